"""Modes `"host"` and `"static"`: the systems that the paper compares with (sections III-A and
III-B).

`"host"` keeps the whole table in host memory and gathers and scatters there. `"static"` keeps the
rows that are looked up most on the device for good; all others are served by the host. Rows move by
the same formulas as in the cached modes, so all modes train to the same table.
"""

import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_scratchpipe.accumulation import coalesced
from tf_scratchpipe.host_table import HostTable
from tf_scratchpipe.lookup import IdCheck
from tf_scratchpipe.plan import Ints, Rows
from tf_scratchpipe.row_step import PLAIN, RowStep
from tf_scratchpipe.storage import HOST_DEVICE, Storage, scattered
from tf_scratchpipe.table import Binding, TrainedRows


class PinnedTable(TrainedRows):
    """A table whose rows never move: the first places are on the device, the others on the host.

    Args:
        name: Name of the layer.
        rows: Rows of the table, to begin with.
        device: Where the hot rows are.
        hot_ids: Which ones; none for mode `"host"`.
    """

    def __init__(self, name: str, rows: HostTable, device: str, hot_ids: Ints) -> None:
        self._device = device if hot_ids.size else HOST_DEVICE
        super().__init__(name, rows, self._device)
        self.hot_ids = hot_ids
        with tf.init_scope():
            self._hot = Storage(self.dim, self.dtype, device, f"{name}_hot")
            self._cold = Storage(self.dim, self.dtype, HOST_DEVICE, name)
            # Without hot rows every row is in the place of its number.
            self._places = self._map() if hot_ids.size else None
        self._filled = 0

    def _map(self) -> tf.Variable:
        """From ids to places."""
        places = np.arange(self.rows, dtype=np.int64) + self.hot_ids.size
        places[self.hot_ids] = np.arange(self.hot_ids.size)
        with tf.device(HOST_DEVICE):
            return tf.Variable(places, trainable=False)

    def set_binding(self, binding: Binding) -> None:
        """Bind an optimizer."""
        self.save()
        super().set_binding(binding)
        with tf.init_scope():
            for part in (self._hot, self._cold):
                part.set_widths(self.widths)
            self._filled = 0
            self.fill()

    def fill(self) -> None:
        """Bring the rows to where they are trained, if they are not there."""
        if self._filled == len(self.host):
            return
        with tf.init_scope():
            for part, ids in ((self._cold, None), (self._hot, self.hot_ids)):
                with tf.device(part.device):
                    for variable, host in zip(part.variables, self.host, strict=True):
                        variable.assign(host.whole() if ids is None else host.gather(ids))
            self._filled = len(self.host)
        for host in self.host:
            host.release()

    @property
    def filled(self) -> bool:
        """Whether the rows are where they are trained, and not in `host`."""
        return bool(self._filled)

    def save(self) -> None:
        """Copy the rows back into `host`."""
        if self._filled:
            for number, host in enumerate(self.host):
                host.assign(self.get(number))
            self._filled = 0

    def get(self, number: int = 0) -> Rows:
        """A copy of the whole table, or of optimizer slot `number - 1`."""
        if not self._filled:
            return self.host[number].whole().copy()
        whole: Rows = self._cold.variables[number].numpy().copy()
        if self.hot_ids.size:
            whole[self.hot_ids] = self._hot.variables[number].numpy()
        return whole

    def set(self, values: Rows, number: int = 0) -> None:
        """Overwrite the whole table, or an optimizer slot."""
        if not self._filled:
            self.host[number].assign(values)
            return
        self._cold.variables[number].assign(values)
        if self.hot_ids.size:
            self._hot.variables[number].assign(values[self.hot_ids])

    def get_rows(self, start: int, stop: int) -> list[Rows]:
        """Rows `start` to `stop` of the table and its optimizer slots."""
        if not self._filled:
            return [host.peek(start, stop) for host in self.host]
        whole = [rows.numpy() for rows in self._cold.gather(np.arange(start, stop))]
        slots = self._hot_between(start, stop)
        if slots.size:
            for rows, hot in zip(whole, self._hot.gather(slots), strict=True):
                rows[self.hot_ids[slots] - start] = hot.numpy()
        return whole

    def set_rows(self, start: int, columns: Sequence[Rows]) -> None:
        """Overwrite rows from `start` on: of the table, and of its first optimizer slots."""
        ids = np.arange(start, start + len(columns[0]))
        slots = self._hot_between(start, start + len(ids))
        for number, rows in enumerate(columns):
            if not self._filled:
                self.host[number].scatter(ids, rows)
                continue
            with tf.device(HOST_DEVICE):
                scattered(self._cold.variables[number], ids, rows)
            if slots.size:
                with tf.device(self._hot.device):
                    hot = rows[self.hot_ids[slots] - start]
                    scattered(self._hot.variables[number], slots, hot)

    def _hot_between(self, start: int, stop: int) -> Ints:
        """Slots of the hot rows among rows `start` to `stop`."""
        return np.flatnonzero((self.hot_ids >= start) & (self.hot_ids < stop))

    def places_of(self, ids: Ints) -> Ints:
        """Where rows are, outside of a step."""
        return ids if self._places is None else np.asarray(self._places.numpy()[ids])

    def ids_in(self, places: Ints) -> Ints:
        """Which rows are in these places."""
        if self._places is None:
            return places
        cold = places - self.hot_ids.size
        return np.where(cold < 0, self.hot_ids[np.minimum(places, self.hot_ids.size - 1)], cold)

    def places(self, ids: tf.Tensor) -> tf.Tensor:
        """Where the rows are: below `hot_ids.size` on the device."""
        if self._places is None:
            return ids
        with tf.device(HOST_DEVICE):
            return tf.gather(self._places, ids)

    def gather(self, places: tf.Tensor) -> tf.Tensor:
        """The rows in these places."""
        if self._places is None:
            with tf.device(HOST_DEVICE):
                return tf.gather(self._cold.variables[0], places)
        split = self._split(places)
        rows = [part.gather(slots)[0] for part, _, slots in split]
        with tf.device(self._hot.device):
            whole = tf.dynamic_stitch([where for _, where, _ in split], rows)
        whole.set_shape([None, self.dim])
        return whole

    def update(self, places: tf.Tensor, gradients: tf.Tensor, step: RowStep = PLAIN) -> None:
        """Move the rows in these places by their gradients, each once."""
        with tf.device(self._device):
            distinct, summed = coalesced(self.after_reads(places), gradients)
            moved = self.stepped(distinct, summed, step, functools.partial(self._moved, step))
        self.count_step(moved)

    def _moved(self, step: RowStep, places: tf.Tensor, gradients: tf.Tensor) -> list[tf.Operation]:
        gradients = self.clipped(gradients)
        if self._places is None:
            return self._move(self._cold, places, gradients, step)
        moved = []
        for part, where, slots in self._split(places):
            moved += self._move(part, slots, tf.gather(gradients, where), step)
        return moved

    def _move(
        self, part: Storage, slots: tf.Tensor, gradients: tf.Tensor, step: RowStep
    ) -> list[tf.Operation]:
        with tf.device(part.device):
            return part.scatter(slots, self.new_values(part.gather(slots), gradients, step))

    def _split(self, places: tf.Tensor) -> list[tuple[Storage, tf.Tensor, tf.Tensor]]:
        """For each storage the positions of the lookups that it serves, and their slots in it."""
        split = []
        with tf.device(HOST_DEVICE):
            on_device = places < self.hot_ids.size
            for part, chosen, start in (
                (self._hot, on_device, 0),
                (self._cold, ~on_device, self.hot_ids.size),
            ):
                where = tf.cast(tf.reshape(tf.where(chosen), [-1]), tf.int32)
                split.append((part, where, tf.gather(places, where) - start))
        return split


class PinnedLookup:
    """How a step finds rows in these modes.

    Args:
        table: The table.
        check: Its check of ids.
    """

    def __init__(self, table: PinnedTable, check: IdCheck) -> None:
        self.table = table
        self._check = check

    def index(self, ids: tf.Tensor) -> tf.Tensor:
        """The places of the ids' rows."""
        self.table.fill()
        return self.table.places(self._check.in_graph(ids))

    def planned_index(self, ids: tf.Tensor) -> tf.Tensor:
        """The same: nothing is planned, and all rows can be trained at any time."""
        return self.index(ids)

    def gather(self, index: tf.Tensor) -> tf.Tensor:
        """The rows in these places."""
        return self.table.gather(index)

    def either(self, ids: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        """The rows in these places."""
        return self.gather(index)

    def read(self, ids: tf.Tensor, frozen: bool) -> tf.Tensor:
        """The rows of the ids."""
        rows = self.gather(self.index(ids))
        self.table.touch(rows)
        return rows

    def update(self, index: tf.Tensor, gradients: tf.Tensor, step: RowStep = PLAIN) -> None:
        """Move the rows in these places."""
        self.table.update(index, gradients, step)

    def skip(self, index: tf.Tensor) -> None:
        """Nothing relies on the count of steps."""
        self.table.skip()
