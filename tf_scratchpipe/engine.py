"""What is behind a layer: its table in one of the four modes, and the optimizer of its rows.

Nothing here knows Keras layers, so that any kind of layer can be put before it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_scratchpipe import keras_internals
from tf_scratchpipe.host_table import HostTable
from tf_scratchpipe.lookup import CachedLookup, IdCheck, Lookup
from tf_scratchpipe.pinned import PinnedLookup, PinnedTable
from tf_scratchpipe.plan import Ints, Rows
from tf_scratchpipe.slot_group import SlotGroup, SlotSettings
from tf_scratchpipe.stats import CacheStats
from tf_scratchpipe.storage import default_device
from tf_scratchpipe.table import Binding, CachedTable, TrainedRows

Mode = Literal["pipelined", "synchronous", "static", "host"]
MODES = ("pipelined", "synchronous", "static", "host")
CACHED_MODES = MODES[:2]

SLOT_KEY = "optimizer."
"""What the names of optimizer slots begin with in a state."""
_WAITING_KEY = "waiting."


class Engine:
    """A table, trained.

    Args:
        name: Name of the layer.
        rows: Its rows.
        mode: Where they are trained.
        settings: What layers that share a slot map must agree on.
        oov_id: Row of wrong ids.
        hot_ids: Rows that mode `"static"` keeps on the device.
        device: Where slots are. None: on the first GPU, if there is one.
        on_plain: Called when mode `"pipelined"` or `"synchronous"` trains on plain ids.
    """

    def __init__(
        self,
        name: str,
        rows: HostTable,
        mode: Mode,
        settings: SlotSettings,
        *,
        oov_id: int | None = None,
        hot_ids: Ints | None = None,
        device: str | None = None,
        on_plain: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.check = IdCheck(settings.rows, name, oov_id)
        self._group: SlotGroup | None = None
        self.rows: TrainedRows
        self.lookup: Lookup
        device = device or default_device()
        if mode in ("host", "static"):
            hot = np.zeros(0, np.int64) if hot_ids is None else hot_ids
            self.rows = pinned = PinnedTable(name, rows, device, hot)
            self.lookup = PinnedLookup(pinned, self.check)
        else:
            self.rows = table = CachedTable(name, rows, device)
            self._group = SlotGroup(settings, [table])
            self.lookup = CachedLookup(table, self._group, self.check, on_plain)

    # ---- modes that cache ---------------------------------------------------------------------

    @property
    def table(self) -> CachedTable:
        """The table, in a mode that caches."""
        assert isinstance(self.rows, CachedTable)
        return self.rows

    @property
    def group(self) -> SlotGroup:
        """The tables that share its slot map, in a mode that caches."""
        assert self._group is not None
        return self._group

    def join(self, group: SlotGroup) -> None:
        """Share a slot map with other tables. All slots of this one are empty."""
        self._group = group
        assert isinstance(self.lookup, CachedLookup)
        self.lookup.group = group

    def flush(self) -> None:
        """Write every cached row back to host memory."""
        if self._group is not None:
            self._group.flush()

    def stats(self) -> CacheStats:
        """What the cache has done so far. All zero in a mode without one."""
        if self._group is None:
            return CacheStats()
        stats = self._group.stats
        return dataclasses.replace(
            stats,
            held=self._group.held(),
            train_lookups=int(self.table.train_lookups.numpy()),
            train_hits=int(self.table.train_hits.numpy()),
            stage_seconds=dict(stats.stage_seconds),
            wait_seconds=dict(stats.wait_seconds),
        )

    # ---- the optimizer ------------------------------------------------------------------------

    def bind(self, optimizer: keras.optimizers.Optimizer, counts: bool) -> None:
        """Have the rows moved by an optimizer.

        Args:
            optimizer: The optimizer.
            counts: Whether it counts its steps itself, being the model's.
        """
        with tf.init_scope():
            binding = Binding.to(optimizer, counts)
            if self._group is not None:
                self._group.bind(self.table, binding)
            else:
                self.rows.set_binding(binding)
            self.accumulate(keras_internals.period(optimizer))

    def accumulate(self, period: int) -> None:
        """Have gradients of so many steps applied together."""
        if period != self.rows.period:
            self.rows.period = period
        if period == 1:
            with tf.init_scope():
                self.rows.pending.forget()

    def refuse_planned(self) -> None:
        """Raise `ValueError` if batches were planned without a thought of accumulation."""
        with tf.init_scope():
            planned = self._group is not None and self._group.has_planned_ahead()
        if planned:
            raise ValueError(
                f"Layer '{self.rows.name}' learns in the middle of a pass of `lookahead` that "
                "gradients are accumulated. Received: gradient_accumulation_steps="
                f"{self.rows.period}. Pass the compiled model to `lookahead`, or set "
                "`gradient_accumulation_steps` of the layer's own optimizer as well."
            )

    def follow(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Have the rows moved as this optimizer of the model says, which may wrap another."""
        optimizer = keras_internals.innermost(optimizer)
        if self.optimizer is not optimizer:
            self.bind(optimizer, counts=True)
        else:
            self.accumulate(keras_internals.period(optimizer))

    @property
    def optimizer(self) -> keras.optimizers.Optimizer | None:
        """What moves the rows, if that is known."""
        return self.rows.binding.optimizer if self.rows.binding else None

    # ---- the whole table ----------------------------------------------------------------------

    def get(self, number: int = 0) -> Rows:
        """A copy of the whole table, or of optimizer slot `number - 1`, as trained so far."""
        if isinstance(self.rows, PinnedTable):
            return self.rows.get(number)
        return self.group.get(self.table, number)

    def set(self, values: npt.ArrayLike, number: int = 0) -> None:
        """Overwrite the whole table, or an optimizer slot.

        Raises:
            ValueError: The values have another shape.
        """
        rows = self._checked(values, "values", self.rows.widths[number])
        if isinstance(self.rows, PinnedTable):
            self.rows.set(rows, number)
        else:
            self.group.set(self.table, rows, number)

    def state(self) -> dict[str, Any]:
        """Everything that training has changed, as arrays."""
        state: dict[str, Any] = {"table": self.get()}
        for number, name in enumerate(self.rows.slot_names, start=1):
            state[SLOT_KEY + name] = self.get(number)
        for name, values in self.rows.loaded_slots.items():
            state.setdefault(SLOT_KEY + name, values)
        return {**state, **self.counters()}

    def counters(self) -> dict[str, Any]:
        """The part of `state` that is not one value or more for each row, as arrays."""
        counters = self._waiting()
        if self.rows.binding is not None and not self.rows.binding.counts:
            counters["iterations"] = self.rows.iterations.numpy()
        return counters

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Take over what `counters` returned."""
        if "iterations" in counters:
            self.rows.iterations.assign(int(counters["iterations"]))
        self._load_waiting(counters)

    def _waiting(self) -> dict[str, Any]:
        """Gradients that wait for their step, with their rows' ids."""
        pending = self.rows.pending
        if pending.parked is not None:
            ids, gradients, steps = pending.parked
        elif pending.steps:
            gradients, steps = pending.gradients, pending.steps
            if isinstance(self.rows, PinnedTable):
                ids = self.rows.ids_in(pending.places)
            else:
                ids = self.group.waiting_ids(self.table)
        else:
            return {}
        values = {"ids": ids, "gradients": gradients, "steps": np.int64(steps)}
        return {_WAITING_KEY + key: value for key, value in values.items()}

    def _load_waiting(self, state: Mapping[str, Any]) -> None:
        pending = self.rows.pending
        pending.forget()
        # A model's optimizer that does not accumulate would never apply it. Rows with their own
        # optimizer do not know yet.
        binding = self.rows.binding
        useless = binding is not None and binding.counts and self.rows.period == 1
        if useless or _WAITING_KEY + "ids" not in state:
            return
        ids = np.asarray(state[_WAITING_KEY + "ids"], np.int64)
        gradients = np.asarray(state[_WAITING_KEY + "gradients"], self.rows.dtype)
        steps = int(state[_WAITING_KEY + "steps"])
        if isinstance(self.rows, PinnedTable):
            pending.held(self.rows.places_of(ids), gradients, steps, since=1)
        else:
            self.group.close_run()
            pending.parked = ids, gradients, steps

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned. Nothing changes if it does not fit.

        Raises:
            ValueError: A table has another shape.
        """
        table = self._checked(state.get("table"), "the saved table")
        slots = {
            key.removeprefix(SLOT_KEY): self._checked(values, f"the saved '{key}'", slot=True)
            for key, values in state.items()
            if key.startswith(SLOT_KEY)
        }
        self.set(table)
        names = self.rows.slot_names
        if self.rows.binding is not None and set(slots) == set(names):
            for number, name in enumerate(names, start=1):
                self.set(slots[name], number)
        else:
            self.rows.load_slots(slots)
        self.load_counters(state)

    def _checked(
        self, values: Any, what: str, width: int | None = None, slot: bool = False
    ) -> Rows:
        """The values as an array of the table's rows, of this width or the rows'.

        Args:
            values: The values.
            what: What they are, for the message.
            width: Values for each row.
            slot: One value for each row will do as well.
        """
        expected = (self.rows.rows, width or self.rows.dim)
        array: Rows = np.asarray(values, None if values is None else self.rows.dtype)
        if array.shape != expected and not (slot and array.shape == (expected[0], 1)):
            raise ValueError(
                f"The table of layer '{self.rows.name}' has shape {expected}. Received: {what} of "
                f"shape {array.shape}"
            )
        return array
