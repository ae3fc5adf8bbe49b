"""A training that can be killed, for `test_resume`.

As a script it imports TensorFlow once, and forks for each line of its input, a job in JSON. So
a killed process costs no start of TensorFlow.
"""

import json
import os
import pathlib
import signal
import sys
import threading
import time
import traceback
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_scratchpipe import ResumeTraining, ScratchPipeEmbedding, lookahead, table_files
from tf_scratchpipe.model_state import ModelState
from tf_scratchpipe.trained_state import TrainedState

ROWS, DIM, LOOKUPS, BATCH, BATCHES, EPOCHS = 3000, 4, 3, 8, 30, 3


def model(optimizer: str = "adam", mode: str = "pipelined", **compiling: Any) -> keras.Model:
    """One table that follows the model's optimizer and one that has its own, and dropout."""
    settings = {"num_slots": 200, "combiner": "sum", "mode": mode}
    start = keras.initializers.RandomUniform(seed=3)
    shared = ScratchPipeEmbedding(ROWS, DIM, embeddings_initializer=start, name="items", **settings)
    own = ScratchPipeEmbedding(
        ROWS, 2 * DIM, optimizer="adagrad", initialize_by_row=True, name="users",
        embeddings_initializer=start, **settings,
    )  # fmt: skip
    inputs = {n: keras.Input((LOOKUPS,), dtype="int32", name=n) for n in ("item", "user")}
    joined = keras.layers.Concatenate()([shared(inputs["item"]), own(inputs["user"])])
    hidden = keras.layers.Dropout(0.3, seed=5)(joined)
    kernel = keras.initializers.GlorotUniform(seed=1)
    output = keras.layers.Dense(1, kernel_initializer=kernel)(hidden)
    result = keras.Model(inputs, output)
    result.compile(optimizer, "mse", metrics=["mae"], **compiling)
    return result


def data(batches: int = BATCHES) -> tf.data.Dataset:
    """Batches that each pass brings in another order."""
    rng = np.random.default_rng(0)
    count = batches * BATCH
    features = {
        name: ((rng.zipf(1.2, (count, LOOKUPS)) - 1) % ROWS).astype("int32")
        for name in ("item", "user")
    }
    targets = rng.random((count, 1)).astype("float32")
    both = tf.data.Dataset.from_tensor_slices((features, targets))
    return both.shuffle(1000, seed=7).batch(BATCH)


def state(trained: keras.Model) -> dict[str, np.ndarray]:
    """All that training changes."""
    known = ModelState(trained)
    result = {f"{n}": v.numpy() for n, v in enumerate(known.variables())}
    for layer in known.layers():
        result |= {f"{layer.name}.{k}": np.asarray(v) for k, v in layer.engine.state().items()}
    return result


class _Killer(keras.callbacks.Callback):
    """Kills the process at some moment during or after a batch, or in the middle of a save."""

    def __init__(self, batch: int, seconds: float, in_save: int) -> None:
        super().__init__()
        self._left = batch
        self._seconds = seconds
        self._saves_left = in_save
        if in_save:
            self._slow_down()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left == 0 and not self._saves_left:
            self._die_in(self._seconds)

    def _slow_down(self) -> None:
        table_files.CHUNK_BYTES = 2**14
        read, sync = TrainedState.read, os.fsync

        def slow_read(self: TrainedState, start: int, stop: int) -> Any:
            time.sleep(0.005)
            return read(self, start, stop)

        def slow_sync(descriptor: int) -> None:
            time.sleep(0.01)
            sync(descriptor)

        save = ModelState.save
        killer = self

        def dying_save(self: ModelState, directory: pathlib.Path) -> Any:
            killer._saves_left -= 1
            if killer._saves_left == 0:
                killer._die_in(killer._seconds)
            return save(self, directory)

        TrainedState.read, ModelState.save, os.fsync = slow_read, dying_save, slow_sync

    def _die_in(self, seconds: float) -> None:
        def die() -> None:
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=die, daemon=True).start()


def run(job: dict[str, Any]) -> None:
    """Train to the end, or until the job says to die."""
    trained = model()
    resume = ResumeTraining(job["directory"], save_freq=job["save_freq"])
    train = data().apply(lookahead(trained, resume=resume)).prefetch(2)
    killer = _Killer(job.get("batch", -1), job.get("seconds", 0.0), job.get("in_save", 0))
    history = trained.fit(train, epochs=EPOCHS, verbose=0, callbacks=[killer, resume])
    out = pathlib.Path(job["out"])
    np.savez(out.with_suffix(".npz"), **state(trained))
    out.write_text(json.dumps(history.history))


def _serve() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            try:
                run(job)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
