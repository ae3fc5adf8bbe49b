"""One cached table: its rows on the host, its slots on the device, and how a step uses them."""

import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from tf_scratchpipe import invariants, keras_internals
from tf_scratchpipe.accumulation import Move, PendingGradients, coalesced
from tf_scratchpipe.host_table import HostTable
from tf_scratchpipe.plan import Ints, Rows
from tf_scratchpipe.row_optimizers import RowOptimizer, clipped, decayed, row_optimizer
from tf_scratchpipe.row_step import PLAIN, RowStep
from tf_scratchpipe.storage import HOST_DEVICE, Storage, gathered, scattered


@dataclasses.dataclass(frozen=True, slots=True)
class Binding:
    """The optimizer that moves the rows.

    Args:
        optimizer: Gives the learning rate, at every step anew.
        formula: Its formula.
        counts: Whether it counts its steps itself, as the model's optimizer does. Otherwise the
            table does.
    """

    optimizer: keras.optimizers.Optimizer
    formula: RowOptimizer
    counts: bool

    @classmethod
    def to(cls, optimizer: keras.optimizers.Optimizer, counts: bool) -> "Binding":
        """Bind to an optimizer."""
        return cls(optimizer, row_optimizer(optimizer), counts)


class TrainedRows:
    """Rows with an optimizer: how one step moves them. Parent of the kinds of tables.

    Args:
        name: Name of the layer, for messages.
        rows: Rows of the table.
        device: Where gradients are that wait for their step.
    """

    def __init__(self, name: str, rows: HostTable, device: str) -> None:
        self.name = name
        self.rows, self.dim = rows.shape
        self.dtype = str(rows.dtype)
        self.host = [rows]
        self.binding: Binding | None = None
        self._loaded: dict[str, Rows] = {}
        self.pending = PendingGradients(self.dim, self.dtype, device)
        self.period = 1
        """So many steps' gradients are applied together, as far as is known."""
        with tf.init_scope(), tf.device(HOST_DEVICE):
            self.applied = tf.Variable(0, dtype=tf.int64, trainable=False, name="applied")
            """Steps that have moved the rows; in a pipeline, the last such batch's number."""
            self.resumes_at = tf.Variable(0, dtype=tf.int64, trainable=False, name="resumes_at")
            """Number of the first batch of the run that is on."""
            self.iterations = tf.Variable(0, dtype=tf.int64, trainable=False, name="iterations")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with its optimizer slots."""
        return sum(self.widths) * np.dtype(self.dtype).itemsize

    @property
    def widths(self) -> list[int]:
        """Values of a row and of each of its optimizer slots."""
        return [table.shape[1] for table in self.host]

    def settled(self) -> int:
        """Number of the last batch whose gradients, and all before, have been applied."""
        return self.pending.settled(self.applied)

    def set_binding(self, binding: Binding) -> None:
        """Have this optimizer move the rows, with fresh slots or those loaded for it."""
        self.binding = binding
        slots = binding.formula.slots
        tables = [
            HostTable.filled(self.rows, slot.width_for(self.dim), slot.initial, self.dtype)
            for slot in slots
        ]
        for slot, table in zip(slots, tables, strict=True):
            loaded = self._loaded.pop(slot.name, None)
            if loaded is not None and loaded.shape == table.shape:
                table.assign(loaded)
        self._loaded = {}
        self.host[1:] = tables

    @property
    def slot_names(self) -> list[str]:
        """Names of the optimizer slots, in the order of `host[1:]`."""
        return [slot.name for slot in self.binding.formula.slots] if self.binding else []

    def load_slots(self, values: dict[str, Rows]) -> None:
        """Remember loaded optimizer slots until an optimizer is bound that has them."""
        if values and self.binding is not None:
            warnings.warn(
                f"The optimizer slots of layer '{self.name}' were not loaded. Received: slots "
                f"{sorted(values)}. Expected: {sorted(self.slot_names)}. Those that the layer has "
                "stay as they are; its rows were loaded.",
                stacklevel=2,
            )
        self._loaded = {name: np.array(table, self.dtype) for name, table in values.items()}

    @property
    def loaded_slots(self) -> dict[str, Rows]:
        """Optimizer slots that were loaded and that no optimizer has taken up yet."""
        return self._loaded

    def new_values(
        self, values: list[tf.Tensor], gradient: tf.Tensor, step: RowStep
    ) -> list[tf.Tensor]:
        """Rows and slots after one step, given each row's clipped gradient."""
        assert self.binding is not None
        optimizer = self.binding.optimizer
        with tf.device(HOST_DEVICE):
            done = self.iterations.read_value()
            if self.binding.counts:
                done = keras_internals.steps_done(optimizer)
        rate = ops.cast(keras_internals.learning_rate_at(optimizer, done), self.dtype)
        # Steps that only add gradients up are steps for schedules, but not for formulas.
        number = ops.cast(done // step.period + 1, self.dtype)
        if step.decays:
            values = [decayed(optimizer, values[0], rate), *values[1:]]
        return self.binding.formula.step(values, gradient, rate, number)

    def stepped(
        self, places: tf.Tensor, gradients: tf.Tensor, step: RowStep, move: Move
    ) -> list[tf.Operation]:
        """Have `move` move rows, now or when the gradients of more steps have come.

        Args:
            places: Places of the step's rows, each once.
            gradients: Their summed gradients.
            step: What the optimizers say.
            move: Moves rows by gradients that are ready to be clipped.
        """
        gradients = step.unscaled(gradients)
        if step.period == 1:
            return move(places, gradients)
        with tf.device(HOST_DEVICE), tf.control_dependencies([places]):
            done = self.iterations.read_value() if step.done is None else step.done
            batch = self.applied.read_value() + 1
        taken = self.pending.take(places, gradients, done, step.period, batch, move, self._rested)
        return [taken]

    def skip(self) -> None:
        """Note that a step is over that its optimizer did not apply."""
        with tf.control_dependencies(self._rested()), tf.device(HOST_DEVICE):
            self.applied.assign_add(1)

    def _rested(self) -> list[tf.Operation]:
        """A step moves no rows. Returns what it has to wait for."""
        return []

    def clipped(self, gradients: tf.Tensor) -> tf.Tensor:
        """A step's gradients, each row's once, clipped as the optimizer says."""
        assert self.binding is not None
        return clipped(self.binding.optimizer, gradients)

    def after_reads(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor, once all reads that came before in the step are over.

        They touch a counter.
        """
        with tf.device(HOST_DEVICE):
            done = self.applied.read_value()
        with tf.control_dependencies([done]):
            return tf.identity(tensor)

    def touch(self, read: tf.Tensor) -> None:
        """Note a read that the next update has to wait for."""
        with tf.control_dependencies([read]), tf.device(HOST_DEVICE):
            self.applied.assign_add(0)

    def count_step(self, moved: list[tf.Operation]) -> None:
        """Note that a step is over, once `moved` has happened."""
        with tf.control_dependencies(moved), tf.device(HOST_DEVICE):
            self.applied.assign_add(1)
            if self.binding is not None and not self.binding.counts:
                self.iterations.assign_add(1)


class CachedTable(TrainedRows):
    """A table whose rows are trained in slots on the device.

    Args:
        name: Name of the layer.
        rows: Rows of the table.
        device: Where the slots are.
    """

    def __init__(self, name: str, rows: HostTable, device: str) -> None:
        super().__init__(name, rows, device)
        self.shadow: Shadow | None = None
        with tf.init_scope():
            with tf.device(HOST_DEVICE):
                self.looked_up = tf.Variable(0, dtype=tf.int64, trainable=False)
                self.lookups_in_batch = tf.Variable(1, dtype=tf.int64, trainable=False)
                self._frozen_batch = tf.Variable(0, dtype=tf.int64, trainable=False)
                self._frozen_seen = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.storage = Storage(self.dim, self.dtype, device, name)
            with tf.device(device):
                # The row in each slot, or -1; what a step finds here is a hit.
                self.tags = tf.Variable(
                    tf.zeros((0,), tf.int64), shape=tf.TensorShape([None]), trainable=False
                )
                self.train_lookups = tf.Variable(0, dtype=tf.int64, trainable=False)
                self.train_hits = tf.Variable(0, dtype=tf.int64, trainable=False)

    def set_binding(self, binding: Binding) -> None:
        """Bind an optimizer. The caller fills the slots of cached rows in."""
        super().set_binding(binding)
        with tf.init_scope():
            self.storage.set_widths(self.widths)

    def grow(self, slots: int) -> None:
        """Add slots, up to `slots` in all."""
        if slots <= self.storage.slots:
            return
        fresh = not self.storage.slots
        self.storage.grow(slots)
        with tf.device(self.storage.device):
            tags = tf.zeros((0,), tf.int64) if fresh else self.tags.read_value()
            added = tf.fill([slots - tf.size(tags)], tf.constant(-1, tf.int64))
            self.tags.assign(tf.concat([tags, added], axis=0))

    def tag(self, slots: Ints, ids: Ints) -> None:
        """Note on the device which rows are in `slots` (-1: none)."""
        with tf.device(self.storage.device):
            scattered(self.tags, slots, ids)

    def gather(self, slots: tf.Tensor) -> tf.Tensor:
        """The rows in `slots`, in a step."""
        with tf.device(self.storage.device):
            return gathered(self.storage.variables[0], slots)

    def opened(self, slots: tf.Tensor) -> tf.Tensor:
        """A training step's slots, once it is noted that their gradients are to come."""
        with tf.control_dependencies([slots]), tf.device(HOST_DEVICE):
            opened = self.looked_up.assign(self.applied.read_value() + 1)
            with tf.control_dependencies([opened]):
                return tf.identity(slots)

    def is_open(self) -> tf.Tensor:
        """Whether rows were looked up whose gradients have not been applied."""
        with tf.device(HOST_DEVICE):
            return self.looked_up.read_value() == self.applied.read_value() + 1

    def counted(self, slots: tf.Tensor) -> tf.Tensor:
        """A training step's slots, once its lookups and hits are counted on the device.

        Once the step is over the slots may be another batch's.
        """
        with tf.device(self.storage.device):
            found = tf.gather(self.tags, slots) >= 0
            counts = [
                self.train_lookups.assign_add(tf.size(slots, tf.int64)),
                self.train_hits.assign_add(tf.math.count_nonzero(found)),
            ]
        with tf.control_dependencies(counts), tf.device(HOST_DEVICE):
            return tf.identity(slots)

    def count_frozen_lookup(self, batch: tf.Tensor, rows: tf.Tensor) -> None:
        """A batch that trains nothing is over once all features have been looked up."""
        # Rows may leave their slots from here on.
        dropped = self.pending.drop()
        with tf.control_dependencies([rows, dropped]), tf.device(HOST_DEVICE):
            seen = tf.where(self._frozen_batch == batch, self._frozen_seen + 1, 1)
            over = seen >= self.lookups_in_batch
            self._frozen_batch.assign(batch)
            self._frozen_seen.assign(seen)
            self.applied.assign(tf.where(over, batch, batch - 1))

    def update(self, slots: tf.Tensor, gradients: tf.Tensor, step: RowStep = PLAIN) -> None:
        """Move the rows in `slots` by their gradients, each once."""
        with tf.device(self.storage.device):
            distinct, summed = coalesced(slots, gradients)
            distinct = self.after_reads(distinct)
            moved = self.stepped(distinct, summed, step, functools.partial(self._moved, step))
        self.count_step(moved)

    def _moved(self, step: RowStep, slots: tf.Tensor, gradients: tf.Tensor) -> list[tf.Operation]:
        with tf.device(self.storage.device):
            new = self.new_values(self.storage.gather(slots), self.clipped(gradients), step)
            moved = self.storage.scatter(slots, new)
        if self.shadow is not None:
            moved = [*moved, self.shadow.followed(slots, new[0])]
        return moved

    def _rested(self) -> list[tf.Operation]:
        if self.shadow is None:
            return []
        none = tf.zeros((0,), tf.int64), tf.zeros((0, self.dim), self.dtype)
        return [self.shadow.followed(*none)]


class Shadow:
    """An uncached copy of a table that follows each step, to check the cache against.

    Steps that were traced before there was a shadow are not followed: it is copied anew after them.

    Args:
        table: The table.
        read: Gives its rows at any time.
        resident: Gives the rows that are in these slots, for batches that no plan announced.
    """

    def __init__(
        self,
        table: CachedTable,
        read: Callable[[], Rows],
        resident: Callable[[Ints], Ints],
    ) -> None:
        self._table = weakref.proxy(table)
        self.reads_from(read, resident)
        self._rows = read()
        self._followed = self._done()
        self._owners: dict[int, tuple[Ints, Ints]] = {}

    def reads_from(self, read: Callable[[], Rows], resident: Callable[[Ints], Ints]) -> None:
        """Ask others, when the table is in another group."""
        self._read = read
        self._resident = resident

    def renew(self) -> None:
        """The table was set."""
        self._followed = -1

    def expect(self, batch: int, slots: Ints, ids: Ints) -> None:
        """A batch will look up rows `ids` in `slots`, says its plan."""
        slots, first = np.unique(slots, return_index=True)
        self._owners[batch] = slots, ids[first]

    def checked(self, slots: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        """The rows that a step reads, once they were found equal to the uncached ones."""

        def compare(slots: tf.Tensor, gathered: tf.Tensor) -> tf.Tensor:
            if self._followed != self._done():
                self._rows, self._followed = self._read(), self._done()
            ids = self._ids(slots.numpy())
            batch = self._done() + 1
            uncached = self._rows[ids]
            invariants.check_rows(batch, self._table.name, ids, gathered.numpy(), uncached)
            return tf.constant(True)

        with tf.control_dependencies([tf.py_function(compare, [slots, rows], tf.bool)]):
            return tf.identity(rows)

    def followed(self, slots: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        """Take a step's new rows over. Returns what the step has to wait for."""

        def follow(slots: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
            self._rows[self._ids(slots.numpy())] = new.numpy()
            done = self._done()
            self._owners = {b: owners for b, owners in self._owners.items() if b > done + 1}
            self._followed += 1
            return tf.constant(True)

        return tf.py_function(follow, [slots, rows], tf.bool)

    def _done(self) -> int:
        return int(self._table.applied.numpy())

    def _ids(self, slots: Ints) -> Ints:
        """The rows that the plan of the batch in training says are in `slots`."""
        batch = self._done() + 1
        resident = self._resident(slots)
        if batch not in self._owners:
            return resident
        known, ids = self._owners[batch]
        found = np.minimum(np.searchsorted(known, slots), known.size - 1)
        # Rows of earlier batches, whose gradients wait, have not moved.
        return np.where(known[found] == slots, ids[found], resident)
