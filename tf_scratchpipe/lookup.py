"""How a step finds its rows: planned ids, plain ids, and ids that are wrong.

A batch is planned if all of its ids are codes. Plain ids
are served on the spot: with `training=True` their rows are brought into the cache first (the
paper's straw-man), otherwise they are read wherever they are, without a change to anything.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_scratchpipe.codes import HIGHEST, LOWEST
from tf_scratchpipe.errors import bad_ids, check_ids
from tf_scratchpipe.plan import Ints
from tf_scratchpipe.row_step import PLAIN, RowStep
from tf_scratchpipe.slot_group import SlotGroup
from tf_scratchpipe.storage import HOST_DEVICE
from tf_scratchpipe.table import CachedTable


class Lookup(Protocol):
    """What the layer needs of a mode."""

    def index(self, ids: tf.Tensor) -> tf.Tensor:
        """Where the rows of a training step's ids are."""

    def gather(self, index: tf.Tensor) -> tf.Tensor:
        """The rows there."""

    def planned_index(self, ids: tf.Tensor) -> tf.Tensor:
        """Where they are if the ids are planned, and negative numbers otherwise."""

    def either(self, ids: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        """The rows there, or where the index is negative those of the ids."""

    def read(self, ids: tf.Tensor, frozen: bool) -> tf.Tensor:
        """The rows of ids that will not be trained. `frozen`: in a training step all the same."""

    def update(self, index: tf.Tensor, gradients: tf.Tensor, step: RowStep = PLAIN) -> None:
        """Move the rows there by their gradients."""

    def skip(self, index: tf.Tensor) -> None:
        """The step in which these rows were looked up is over; it is not applied."""


class IdCheck:
    """Tells right ids from wrong ones.

    Args:
        rows: Rows of the table.
        table: Name of the layer.
        oov_id: The row that stands for all wrong ids, or None if they are errors.
    """

    def __init__(self, rows: int, table: str, oov_id: int | None) -> None:
        self.rows = rows
        self.table = table
        self.oov_id = oov_id

    def __call__(
        self, ids: npt.NDArray[np.generic], batch: int | None = None, feature: str = "inputs"
    ) -> Ints:
        """Ids as int64, with `oov_id` in the place of wrong ones.

        Raises:
            BadIdError: An id is wrong and there is no `oov_id`.
        """
        if self.oov_id is None:
            check_ids(ids, self.rows, self.table, feature, batch)
            return ids.astype(np.int64)
        bad = np.isin(ids, bad_ids(ids, self.rows)) | (ids != ids)
        return np.where(bad, self.oov_id, ids).astype(np.int64)

    def in_graph(self, ids: tf.Tensor) -> tf.Tensor:
        """The same for a tensor. Python is called for wrong ids only."""
        with tf.device(HOST_DEVICE):
            return tf.cond(
                tf.reduce_all(self.fine(ids)),
                lambda: tf.cast(ids, tf.int64),
                lambda: called(self, [ids], tf.int64, ids.shape),
            )

    def fine(self, ids: tf.Tensor) -> tf.Tensor:
        """Which ids have a row."""
        whole = ids if ids.dtype.is_integer else tf.math.floor(ids)
        limit = tf.cast(min(self.rows, ids.dtype.max), ids.dtype)
        return (ids >= 0) & (whole == ids) & ((ids < limit) | (limit < self.rows))


def called(
    function: Callable[..., npt.NDArray[np.generic]],
    tensors: list[tf.Tensor],
    dtype: tf.DType,
    shape: tf.TensorShape,
) -> tf.Tensor:
    """Call Python with arrays in a step, in the host's turn."""

    def with_arrays(*values: tf.Tensor) -> tf.Tensor:
        return tf.constant(function(*(value.numpy() for value in values)), dtype)

    with tf.device(HOST_DEVICE):
        result = tf.py_function(with_arrays, tensors, dtype)
    result.set_shape(shape)
    return result


class CachedLookup:
    """Modes `"pipelined"` and `"synchronous"`.

    Args:
        table: The table.
        group: The group that it is in.
        check: Its check of plain ids.
        on_plain: Called when a training step comes with plain ids.
    """

    def __init__(
        self,
        table: CachedTable,
        group: SlotGroup,
        check: IdCheck,
        on_plain: Callable[[], None],
    ) -> None:
        self.table = table
        self.group = group
        self.check = check
        self._on_plain = on_plain

    def index(self, ids: tf.Tensor) -> tf.Tensor:
        """Slots: those of the plan, or those that the rows are brought to now."""
        with tf.device(HOST_DEVICE):
            slots = tf.cond(
                _planned(ids),
                lambda: self._decoded(ids)[0],
                lambda: called(self._admit, [ids, self.table.applied], tf.int64, ids.shape),
            )
        return self.table.counted(self.table.opened(slots))

    def planned_index(self, ids: tf.Tensor) -> tf.Tensor:
        """Slots of the plan, or -1 for plain ids."""
        with tf.device(HOST_DEVICE):
            slots = tf.cond(
                _planned(ids),
                lambda: self._decoded(ids)[0],
                lambda: tf.fill(tf.shape(ids), tf.constant(-1, tf.int64)),
            )
        return self.table.opened(slots)

    def either(self, ids: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        """Rows from the plan's slots; those of plain ids from wherever they are."""
        shape = tf.TensorShape([None, self.table.dim])
        rows = tf.cond(
            _planned(ids),
            lambda: self.gather(index),
            lambda: called(self._read, [ids, self.table.applied], self.table.dtype, shape),
        )
        self.table.touch(rows)
        return rows

    def gather(self, index: tf.Tensor) -> tf.Tensor:
        """The rows in these slots."""
        rows = self.table.gather(index)
        return self.table.shadow.checked(index, rows) if self.table.shadow else rows

    def read(self, ids: tf.Tensor, frozen: bool) -> tf.Tensor:
        """Rows from their slots or from the host. A planned batch is over with that."""
        shape = tf.TensorShape([None, self.table.dim])
        rows = tf.cond(
            _planned(ids),
            lambda: self._frozen(ids) if frozen else self._refused(ids, shape),
            lambda: called(self._read, [ids, self.table.applied], self.table.dtype, shape),
        )
        self.table.touch(rows)
        return rows

    def update(self, index: tf.Tensor, gradients: tf.Tensor, step: RowStep = PLAIN) -> None:
        """Move the rows in these slots."""
        self.table.update(self._once(index), gradients, step)

    def skip(self, index: tf.Tensor) -> None:
        """The step in which these rows were looked up is over; they stay as they are."""
        with tf.control_dependencies([self._once(index)]):
            self.table.skip()

    def _once(self, index: tf.Tensor) -> tf.Tensor:
        """The index, if the rows there were looked up and their step is not over."""
        with tf.device(HOST_DEVICE):
            once = tf.cond(
                self.table.is_open(),
                lambda: tf.constant(True),
                lambda: called(self._twice, [], tf.bool, tf.TensorShape([])),
            )
            with tf.control_dependencies([once]):
                return tf.identity(index)

    def _twice(self) -> npt.NDArray[np.generic]:
        raise ValueError(
            f"Gradients of layer '{self.table.name}' were applied twice for one lookup. Expected: "
            "each batch is looked up, and its gradients are applied once, before the next one. "
            "Its rows may have left the device after the first time."
        )

    def _admit(self, ids: npt.NDArray[np.generic], _: Ints) -> Ints:
        self._on_plain()
        return self.group.admit(self.table, self.check(ids))

    def _read(self, ids: npt.NDArray[np.generic], _: Ints) -> npt.NDArray[np.generic]:
        return self.group.read(self.table, self.check(ids))

    def _frozen(self, ids: tf.Tensor) -> tf.Tensor:
        slots, batch = self._decoded(ids, skips=True)
        rows = self.table.gather(slots)
        self.table.count_frozen_lookup(batch, rows)
        return rows

    def _refused(self, ids: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
        def refuse(ids: Ints) -> npt.NDArray[np.generic]:
            raise ValueError(
                f"Layer '{self.table.name}' got a batch from `lookahead(...)` with "
                "`training=False`. Evaluate and predict on the dataset as it is without "
                "`lookahead`: plain ids are read correctly at any time."
            )

        return called(refuse, [ids], self.table.dtype, shape)

    def _decoded(self, codes: tf.Tensor, skips: bool = False) -> tuple[tf.Tensor, tf.Tensor]:
        """Slots of a planned batch and its number, if it is the next one.

        Args:
            codes: Its codes.
            skips: Batches may be left out, as nothing is trained; those without ids are.
        """
        codec, applied = self.group.settings.codec, self.table.applied
        with tf.device(HOST_DEVICE), tf.control_dependencies([codes]):
            offset = tf.cast(codes, tf.int64) - LOWEST
            numbers = tf.bitwise.right_shift(offset, codec.batch_shift)
            done, first = applied.read_value(), self.table.resumes_at.read_value()
            # Batches before a new run that were never trained will not be trained any more.
            resumed = (first > done + 1) & tf.reduce_all(numbers == first % codec.cycle)
            last = tf.where(resumed, first - 1, done)
            ahead = (numbers - last) % codec.cycle
            due = tf.reduce_all(ahead == ahead[0])
            due &= ahead[0] < codec.cycle // 2 if skips else ahead[0] == 1
            with tf.control_dependencies([self._assert_due(due, codes, numbers, last)]):
                applied.assign(last)
                return tf.bitwise.bitwise_and(offset, codec.slot_mask), last + ahead[0]

    def _assert_due(
        self, due: tf.Tensor, codes: tf.Tensor, numbers: tf.Tensor, done: tf.Tensor
    ) -> tf.Operation:
        """Fails unless the batch is due."""

        def explain(codes: Ints, numbers: Ints, done: Ints) -> npt.NDArray[np.generic]:
            if not self.table.resumes_at.numpy() or np.unique(numbers).size > 1:
                self.check(codes)  # No batch ever had these codes.
            cycle = self.group.settings.codec.cycle
            raise ValueError(
                f"Layer '{self.table.name}' got a batch out of order. Expected: batch "
                f"{int(done) + 1}. Received: batch {int(numbers.flat[0])} (modulo {cycle}). "
                "`lookahead(...)` must come after shuffle, cache and the like, with nothing but "
                "`prefetch` after it; each batch can be trained once, and only while its iterator "
                "is the last one that was started; and each batch's gradients must have been "
                "applied, by `optimizer.apply` with this layer's weights, before the next batch is "
                "looked up. To keep the rows as they are, set `layer.trainable = False`."
            )

        return tf.cond(
            due,
            lambda: tf.constant(True),
            lambda: called(explain, [codes, numbers, done], tf.bool, tf.TensorShape([])),
        )


def _planned(ids: tf.Tensor) -> tf.Tensor:
    """Whether these are codes."""
    if ids.dtype not in (tf.int32, tf.int64):
        return tf.constant(False)
    with tf.device(HOST_DEVICE):
        return tf.reduce_all((ids < HIGHEST) & (ids >= LOWEST)) & (tf.size(ids) > 0)
