"""A callback that saves a training in mid-epoch and lets `fit` go on where it was saved.

Keras' `fit` can begin at an epoch, not within one. So a resumed `fit` goes through the steps of the
epoch that were done before without doing them, and only the data that follow are read. What is
saved is what has been trained: batches that are planned or on their way are read again.
"""

import contextlib
import dataclasses
import logging
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import keras
import tensorflow as tf

from tf_scratchpipe import keras_internals
from tf_scratchpipe.checkpoint_directory import CheckpointDirectory
from tf_scratchpipe.errors import check_frequency
from tf_scratchpipe.model_state import DenseState, ModelState
from tf_scratchpipe.repositioning import Repositioned, Source
from tf_scratchpipe.table_files import FORMAT, read_json, write_json

_logger = logging.getLogger(__name__)
_FILE = "training.json"


@dataclasses.dataclass(slots=True)
class Position:
    """How far training has come."""

    epoch: int = 0
    calls: int = 0
    """Calls of the train function in this epoch, each of `steps_per_execution` steps."""
    batches: int = 0
    """Batches trained in this epoch."""
    data_pass: int = -1
    """Number of the pass over the data; -1 before the first."""
    batches_in_pass: int = 0
    steps_per_execution: int = 1
    stopped: bool = False
    """Whether training came to its end before the last epoch."""


class ResumeTraining(keras.callbacks.Callback):
    """Saves training every so often, and resumes it where it was saved last.

    Start the same script again after an interruption: `fit` then restores the tables, the
    optimizers, the other weights, random generators, metrics and the place in the data, and goes on
    in the middle of an epoch. The result is, bit for bit, that of a training without interruption.

    ```python
    resume = tf_scratchpipe.ResumeTraining("checkpoints", save_freq=1000)
    train = train.apply(tf_scratchpipe.lookahead(model, resume=resume))   # the data
    model.fit(train, epochs=10, callbacks=[resume])                       # and the training
    ```

    A checkpoint is written beside the one before, which is removed once the new one is on the disk.
    Whatever happens meanwhile leaves one of them. After the end of training the last one stays, so
    that the script can be started again to no effect, or with more epochs. Give each `fit` of a
    script a directory and a dataset of its own.

    The data must come in the same order again: with `shuffle(..., seed=...)`, and without
    `deterministic=False`. Batches that were trained before are read and dropped; where that
    takes too long, pass `source`.

    In a resumed epoch other callbacks see the steps that were done before go by, with the metrics
    of the checkpoint. What callbacks remember themselves (the patience of `EarlyStopping`) begins
    anew.

    Args:
        directory: Where to keep the checkpoint: a local directory, for nothing else.
        save_freq: `"epoch"` saves after each epoch, an integer after that many batches.
        source: A function from the number of the epoch and the number of batches to leave out to
            a dataset with the rest of that epoch, before `lookahead`. With `steps_per_epoch`, all
            epochs are epoch 0 of an endless dataset. None: the data are gone through.
        delete_checkpoint: Whether to remove the checkpoint at the end of training, as
            `keras.callbacks.BackupAndRestore` does.

    Raises:
        ValueError: In `fit`: for data that cannot be had again, and for a checkpoint that is
            damaged or another model's. Nothing is changed then.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        save_freq: int | Literal["epoch"] = "epoch",
        source: Source | None = None,
        delete_checkpoint: bool = False,
    ) -> None:
        super().__init__()
        check_frequency("save_freq", save_freq)
        self.directory = os.fspath(directory)
        self.save_freq = save_freq
        self.delete_checkpoint = delete_checkpoint
        self._checkpoints = CheckpointDirectory(directory)
        self._data = Repositioned(source)
        self._dataset: tf.data.Dataset | None = None
        self._training = False
        self._forget()

    def _forget(self) -> None:
        self._position = Position()
        self._epoch_logs: list[tuple[int, dict[str, float]]] = []
        self._is_same_pass = False
        self._unsaved = 0
        self._is_saved = True
        self._to_skip = 0
        self._restored: DenseState | None = None

    # ---- the data -----------------------------------------------------------------------------

    def attach(self, dataset: tf.data.Dataset) -> None:
        """Called by `lookahead` with the dataset that it is applied to."""
        self._data.check(dataset)
        self._dataset = dataset

    def batches(self, dataset: tf.data.Dataset) -> Iterator[Any]:
        """One pass over the dataset, from where training is."""
        if not self._training:
            yield from dataset
            return
        for _ in range(2):
            position = self._begin_pass()
            skipped, empty = position.batches_in_pass, True
            for element in self._data.rest(dataset, position.data_pass, skipped):
                empty = False
                yield element
            if not empty or not skipped or position.calls:
                return
            # The checkpoint was at the end of a pass, and another epoch begins.

    def _begin_pass(self) -> Position:
        if self._is_same_pass:
            self._is_same_pass = False
        else:
            self._position.data_pass += 1
            self._position.batches_in_pass = 0
        return self._position

    # ---- what Keras calls ---------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the checkpoint, if there is one."""
        dataset = self._checked_dataset()
        self._forget()
        if isinstance(self.model.train_function, _Skipping):  # An earlier `fit` failed there.
            self.model.train_function = self.model.train_function.train
        checkpoint = self._checkpoints.newest()
        if checkpoint is not None:
            self._restore(checkpoint, dataset.element_spec)
        self._position.steps_per_execution = self.model.steps_per_execution
        self._data.begin(dataset, anew=checkpoint is None)
        self._training = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Save, if the epoch before has ended, or go on with the restoration."""
        self._fill_history()
        keras_internals.start_at_epoch(self.model, None)  # It has; another `fit` should not.
        if self._position.epoch != epoch:
            self._position.epoch = epoch
            self._position.calls = self._position.batches = 0
            # Only here, since other callbacks may change something at the end of an epoch.
            if self.save_freq == "epoch" and self._epoch_logs:
                self.save()
        elif self._restored is not None and not self._to_skip:
            self._finish_restoring()
            self.model.reset_metrics()  # At the end of training they were those of the last epoch.

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count, and save if it is time to."""
        if self._to_skip:
            self._to_skip -= 1
            if not self._to_skip:
                self._finish_restoring()
            return
        if self._is_same_pass or self._position.data_pass < 0:
            raise ValueError(
                "ResumeTraining was passed to a `fit` on other data than those that it was given "
                "to. Pass `data.apply(lookahead(model, resume=...))` to `fit`."
            )
        added = batch + 1 - self._position.batches
        self._position.calls += 1
        self._position.batches += added
        self._position.batches_in_pass += added
        self._unsaved += added
        if self.save_freq != "epoch" and self._unsaved >= self.save_freq:
            self.save(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Remember the metrics of the epoch."""
        self._epoch_logs.append((epoch, _numbers(logs)))
        self._is_saved = False

    def on_train_end(self, logs: Any = None) -> None:
        """Save the end."""
        self._training = False
        self._fill_history()
        keras_internals.start_at_epoch(self.model, None)
        if self.delete_checkpoint:
            self._checkpoints.delete()
        elif not self._is_saved:
            self._position.epoch += 1
            self._position.calls = self._position.batches = 0
            self._position.stopped = bool(self.model.stop_training)
            self.save()

    # ---- saving -------------------------------------------------------------------------------

    def save(self, logs: Any = None) -> None:
        """Save now. Between two steps only, as in a callback.

        Args:
            logs: Metrics of the last batch.
        """
        with self._checkpoints.writing() as directory:
            state = {
                "format": FORMAT,
                "position": dataclasses.asdict(self._position),
                "logs": _numbers(logs),
                "epoch_logs": self._epoch_logs,
                "model": ModelState(self.model).save(directory),
            }
            write_json(directory / _FILE, state, sync=True)
        self._unsaved = 0
        self._is_saved = True

    # ---- restoring ----------------------------------------------------------------------------

    def _checked_dataset(self) -> tf.data.Dataset:
        if self._dataset is None:
            raise ValueError(
                "ResumeTraining needs to know the data. Received: a `fit` on data that it was not "
                "given to. Pass it to `lookahead(model, resume=...)`, and to `fit` as a callback."
            )
        cardinality, steps = int(self._dataset.cardinality()), self.params.get("steps")
        if cardinality >= 0 and steps not in (None, cardinality):
            raise ValueError(
                "With `steps_per_epoch`, ResumeTraining needs an endless dataset. Received: "
                f"steps_per_epoch={steps}, and a dataset of {cardinality} batches. Add "
                "`.repeat()` before `lookahead`, or leave `steps_per_epoch` out."
            )
        together = self.model.steps_per_execution
        if cardinality >= 0 and cardinality % together:
            raise ValueError(
                "ResumeTraining needs a number of batches that `steps_per_execution` divides. "
                f"Received: {cardinality} batches, steps_per_execution={together}. Take fewer "
                "batches, or add `.repeat()` before `lookahead` and pass `steps_per_epoch`."
            )
        return self._dataset

    def _restore(self, checkpoint: pathlib.Path, spec: Any) -> None:
        state = read_json(checkpoint / _FILE)
        position = Position(**state["position"])
        if position.calls and position.steps_per_execution != self.model.steps_per_execution:
            raise ValueError(
                "The checkpoint is in the middle of an epoch, and was trained with another "
                f"`steps_per_execution`. Received: {self.model.steps_per_execution}. Expected: "
                f"{position.steps_per_execution}"
            )
        self._restored = ModelState(self.model).load(checkpoint, state["model"], spec)
        self._position = position
        self._is_same_pass = position.data_pass >= 0
        self._epoch_logs = [(epoch, logs) for epoch, logs in state["epoch_logs"]]
        self._to_skip = position.calls
        if position.calls:
            train = self.model.train_function
            self.model.train_function = _Skipping(self.model, train, position.calls, state["logs"])
        last = self.params.get("epochs") or 0
        epoch = max(position.epoch, last) if position.stopped else position.epoch
        keras_internals.start_at_epoch(self.model, epoch)
        _logger.info(
            "resumed from %s: epoch %d, %d batches", checkpoint, position.epoch, position.batches
        )

    def _finish_restoring(self) -> None:
        """Undo what Keras and callbacks have changed on the way to where training goes on."""
        assert self._restored is not None
        self._restored.assign()
        self._restored = None

    def _fill_history(self) -> None:
        """Put the epochs before the resumption into what `fit` returns."""
        history = getattr(self.model, "history", None)
        if history is None or history.epoch:
            return
        for epoch, logs in self._epoch_logs:
            history.epoch.append(epoch)
            for name, value in logs.items():
                history.history.setdefault(name, []).append(value)


class _Skipping:
    """Stands for the train function until the steps that were done before are through."""

    def __init__(
        self, model: keras.Model, train: Callable[..., Any], calls: int, logs: dict[str, float]
    ) -> None:
        self._model = model
        self.train = train
        self._calls = calls
        self._logs = logs

    def __call__(self, iterator: Any) -> Any:
        self._calls -= 1
        if not self._calls:
            self._model.train_function = self.train
        return dict(self._logs)


def _numbers(logs: Any) -> dict[str, float]:
    """Metrics as Python numbers; others than scalars are left out."""
    numbers = {}
    for name, value in (logs or {}).items():
        with contextlib.suppress(TypeError, ValueError):
            numbers[name] = float(value)
    return numbers
