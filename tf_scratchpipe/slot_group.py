"""Tables that share one slot map, and what is done to all of them at once.

A feature's ids are replaced by slots, so all layers that read the feature, and all features that
one of these layers reads, must agree on who is where. One group has one planner and carries its
plans out on each of its tables.

The lock is held while a plan is made and while its rows are inserted. Between the two, a row may be
planned to be somewhere and still be elsewhere: `_resident` undoes the plans that have not been
carried out, so readers always find the true row.
"""

import collections
import contextlib
import dataclasses
import functools
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tf_scratchpipe import invariants
from tf_scratchpipe.codes import MAX_SLOTS, SlotCodec
from tf_scratchpipe.errors import TooFewSlotsError
from tf_scratchpipe.hold_window import NEVER, Numbers
from tf_scratchpipe.plan import BatchPlan, Ints, Rows
from tf_scratchpipe.planner import FUTURE, PAST, Looked, SlotPlanner
from tf_scratchpipe.replacement import POLICIES
from tf_scratchpipe.slot_budget import Demand
from tf_scratchpipe.stats import CacheStats
from tf_scratchpipe.table import Binding, CachedTable, Shadow
from tf_scratchpipe.transfers import StagingBuffers, Transfer
from tf_scratchpipe.whole_planner import WholePlanner

_logger = logging.getLogger(__name__)
_LARGEST_WHOLE = 2**28
"""Bytes of a table that the first batch may bring in at once."""


class Run(Protocol):
    """A pass of the pipeline over the data, as far as a group needs to know it."""

    def close(self) -> None:
        """Stop, and give back what was planned and not carried out."""


@dataclasses.dataclass(frozen=True, slots=True)
class SlotSettings:
    """What the layers of a group must agree on.

    Args:
        rows: Rows of each table.
        num_slots: Slots, or None to find out from the data.
        replacement: Name of the policy.
        marks_zero: Whether id 0 is a mask.
    """

    rows: int
    num_slots: int | None
    replacement: str
    marks_zero: bool

    @property
    def most_slots(self) -> int:
        """Slots to which the group may grow. More than rows are of no use."""
        return min(self.num_slots or self.rows, self.rows, MAX_SLOTS)

    @property
    def codec(self) -> SlotCodec:
        """How slots are coded."""
        return SlotCodec.for_slots(self.most_slots, self.marks_zero)


_starting = threading.Lock()
"""Of two runs that start at a time, the second ends the first."""


class SlotGroup:
    """Tables with one slot map.

    Args:
        settings: What its layers agree on.
        tables: Their tables.
    """

    def __init__(self, settings: SlotSettings, tables: Sequence[CachedTable]) -> None:
        self.settings = settings
        self.tables = list(tables)
        self.lock = threading.RLock()
        self.stats = CacheStats()
        self.run: Run | None = None
        self.inserted = 0
        self.touched = time.monotonic()
        self.debug = any(table.shadow is not None for table in self.tables)
        for table in self.tables:
            if table.shadow is not None:
                table.shadow.reads_from(*self._sources(table))
        self._planner: SlotPlanner | None = None
        self._pending: collections.deque[BatchPlan] = collections.deque()
        self._version = 0
        self._buffers = StagingBuffers()
        self._admitted: list[tuple[int, CachedTable, int]] = []
        self._plain = False
        self._warned = False
        self._short = False

    # ---- numbers of batches -------------------------------------------------------------------

    @property
    def planned(self) -> int:
        """Number of the last batch that was planned."""
        return self._planner.batch if self._planner else 0

    def held(self) -> int:
        """Slots that the last planned batch and those before it in the window use."""
        with self.lock:
            return self.planner.held(PAST) if self._planner else 0

    def trained(self) -> int:
        """Number of the last batch that all tables are through with."""
        return min(int(table.applied.numpy()) for table in self.tables)

    def settled(self) -> int:
        """Number of the last batch whose gradients, and all before, have been applied.

        Only the rows of these may lose their slots.
        """
        return min(table.settled() for table in self.tables)

    def accumulates(self) -> bool:
        """Whether gradients wait for later steps."""
        return any(table.period > 1 or table.pending.steps for table in self.tables)

    def has_planned_ahead(self) -> bool:
        """Whether batches are planned that have not been trained."""
        return not self._plain and self.planned > self.trained()

    def in_a_step(self) -> bool:
        """Whether rows were looked up whose gradients have not been applied."""
        return any(bool(table.is_open()) for table in self.tables)

    def declare_trained(self) -> None:
        """Batches that were planned and never trained will not be trained any more."""
        for table in self.tables:
            mine = [batch for batch, owner, _ in self._admitted if owner is table]
            if self._plain and mine and table.pending.steps:  # Steps were counted otherwise.
                table.pending.renumber(min(mine))
            table.applied.assign(self.planned)
        self.hold_waiting_only()
        self._admitted = []
        self._plain = False

    def hold_waiting_only(self) -> None:
        """All batches that were planned are over: only rows are held whose gradients wait."""
        with self.lock:
            waiting = [table.pending for table in self.tables if table.pending.steps]
            if waiting:
                since = min(pending.since for pending in waiting)
                kept = np.concatenate([pending.places for pending in waiting])
                self.planner.window.release(since, kept)
                for pending in waiting:
                    pending.renumber(since)

    def declare_trained_before(self, batch: int) -> None:
        """The same, for the batches up to `batch` only."""
        for table in self.tables:
            table.applied.assign(tf.maximum(table.applied, batch))

    # ---- the stages ---------------------------------------------------------------------------

    @property
    def is_sized(self) -> bool:
        """Whether it is known how many slots there are."""
        return self._planner is not None

    def demand(self, batches: Sequence[Sequence[Ints]], window: int) -> Demand:
        """What the group asks of a budget.

        Args:
            batches: Ids of the first batches, if the group has not seen any.
            window: Number of batches whose rows should have slots.
        """
        rows = self.settings.rows
        seen = self._planner.most_distinct if self._planner else 0
        need = min(window * seen, rows) or _first_size(batches, window, rows)
        fixed = self.settings.num_slots and self.settings.most_slots
        return Demand(need, rows, fixed, min(seen, rows) or _first_size(batches, 1, rows))

    def size(
        self, batches: Sequence[Sequence[Ints]], window: int, slots: int | None = None
    ) -> None:
        """Find out how many slots there should be, if nobody knows yet.

        Args:
            batches: Ids of the first batches.
            window: Number of batches whose rows should have slots.
            slots: How many there are, if that was decided elsewhere.
        """
        if self._planner is not None:
            return
        rows, most = self.settings.rows, slots or self.settings.most_slots
        known = slots or self.settings.num_slots
        slots = most if known else _first_size(batches, window, most)
        self.stats.whole = slots == rows and rows * self._row_bytes() <= _LARGEST_WHOLE
        if self.stats.whole:
            names = ", ".join(f"'{table.name}'" for table in self.tables)
            _logger.info("All %d rows of %s are on the device for good.", rows, names)
            self._planner = WholePlanner(rows)
        else:
            policy = POLICIES[self.settings.replacement]
            self._planner = SlotPlanner(rows, slots, most, replacement=policy)

    def was_short(self) -> bool:
        """Whether slots have been too few for a whole window since they were divided last."""
        return self._short

    def resize(self, slots: int) -> None:
        """Have another number of slots, from the next batch on. Fewer are filled anew."""
        self._short = False
        if slots > self.planner.slots:
            self.planner.most_slots = slots
        elif slots < self.planner.slots:
            self.clear()

    def _row_bytes(self) -> int:
        return sum(table.row_bytes for table in self.tables)

    def look(self, ids: Sequence[Ints]) -> Looked:
        """Look a batch up ahead of its plan."""
        with self.lock:
            return self.planner.look(ids)

    def plan(
        self,
        batch: int,
        looked: Looked,
        upcoming: Sequence[Looked],
        past: int = PAST,
        future: int = FUTURE,
        least_past: int = 0,
    ) -> BatchPlan:
        """Plan a batch."""
        with self.lock:
            if self.accumulates() and not self._plain:
                least_past = max(least_past, batch - 1 - self.settled())
                past = max(past, least_past)
            before = self.planner.window.last_use.copy() if self.debug else None
            plan = self._planned(batch, looked, upcoming, past, future, least_past)
            self._pending.append(plan)
            self._short |= plan.past < past or plan.future < future
            self.stats.count(plan, self._row_bytes(), (past, future))
            if before is not None:
                self._check(plan, looked, upcoming, before)
            return plan

    def _planned(self, batch: int, looked: Looked, *window: Any) -> BatchPlan:
        try:
            return self.planner.plan(batch, looked, *window)
        except TooFewSlotsError as error:
            self._short = True
            if not self.accumulates():
                raise
            raise TooFewSlotsError(
                f"{error} Rows of earlier batches, whose gradients are accumulated, keep their "
                "slots until these are applied: fewer `gradient_accumulation_steps` need fewer."
            ) from None

    def warn_if_shortened(self, plan: BatchPlan, whole: tuple[int, int]) -> None:
        """Say once that slots are too few for the whole window (batches before, batches after)."""
        if (plan.past >= whole[0] and plan.future >= whole[1]) or self._warned:
            return
        self._warned = True
        names = ", ".join(f"'{table.name}'" for table in self.tables)
        warnings.warn(
            f"Slots of layers {names} are too few to hold the rows of {whole[0]} batches before "
            f"and {whole[1]} after the one that is planned. Received: num_slots={plan.capacity}; "
            f"batch {plan.batch} held {plan.past} and {plan.future}. The result is the same, but "
            "training may wait for rows. Pass more `num_slots`, or None to have them found out.",
            stacklevel=2,
        )

    @property
    def planner(self) -> SlotPlanner:
        """The planner, once `size` was called."""
        assert self._planner is not None
        return self._planner

    def collect(self, plan: BatchPlan) -> Transfer:
        """Gather the rows that come in from the host, and those that go out from the device."""
        transfer = Transfer(plan, self._version)
        for table in self.tables:
            transfer.fills.append(self._from_host(table, plan.fill_ids, transfer))
            out = table.storage.gather(plan.victim_slots) if plan.victim_slots.size else []
            transfer.victims.append(out)
            if plan.victim_slots.size:
                table.tag(plan.victim_slots, np.full_like(plan.victim_slots, -1))
        return transfer

    def exchange(self, transfer: Transfer) -> None:
        """Send both to the other side."""
        transfer.fills = [
            list(table.storage.to_device(rows)) if rows else []
            for table, rows in zip(self.tables, transfer.fills, strict=True)
        ]
        transfer.victims = [[rows.numpy() for rows in out] for out in transfer.victims]
        self._buffers.give_back(transfer.buffers)
        transfer.buffers = []

    def insert(self, transfer: Transfer) -> None:
        """Put both where they belong."""
        plan = transfer.plan
        with self.lock:
            if transfer.version != self._version:  # The table was set in the meantime.
                transfer = self.collect(plan)
                self.exchange(transfer)
            # What may fail comes before what cannot be taken back.
            for table in self.tables:
                table.grow(plan.capacity)
            for table, out in zip(self.tables, transfer.victims, strict=True):
                for host, rows in zip(table.host, out, strict=False):
                    host.scatter(plan.victim_ids, rows)
            try:
                for table, fills in zip(self.tables, transfer.fills, strict=True):
                    if fills:
                        table.storage.scatter(plan.fill_slots, fills)
                        table.tag(plan.fill_slots, plan.fill_ids)
            except BaseException:
                # Some slots may hold new rows by now. The victims are in the host table: to undo
                # the plan is to leave all its slots empty.
                none = plan.victim_ids[:0]
                self._pending[0] = dataclasses.replace(plan, victim_ids=none, victim_slots=none)
                raise
            assert self._pending[0] is plan
            self._pending.popleft()
            self.inserted = plan.batch

    def grows_by(self, plan: BatchPlan) -> bool:
        """Whether Insert makes the storage larger, which no step may be in the middle of."""
        return any(0 < table.storage.slots < plan.capacity for table in self.tables)

    # ---- runs ---------------------------------------------------------------------------------

    def start(self, run: Run) -> None:
        """Let a new run plan for this group; the one before is over."""
        with _starting:
            self._start(run)

    def _start(self, run: Run) -> None:
        self.close_run()
        ahead = max(int(table.applied.numpy()) for table in self.tables) > self.planned
        if self._plain or ahead:  # Steps without ids are not planned.
            self.declare_trained()
        self._bring_back()
        self.run = run
        self.inserted = self.planned
        self.touched = time.monotonic()
        for table in self.tables:
            table.resumes_at.assign(self.planned + 1)

    def close_run(self) -> None:
        """End the run that is on, if any. Batches that it has sent out are not trained any more.

        Not to be called with the lock: stages of the run may be waiting for it.
        """
        if self.run is not None:
            self.run.close()

    def finish(self, run: Run, exhausted: bool) -> None:
        """A run has stopped. Undo what it planned and did not carry out."""
        with self.lock:
            if self.run is not run:
                return
            self.run = None
            while self._pending:
                self._undo_last()
            if not exhausted:
                self.declare_trained()

    def _undo_last(self) -> None:
        """Take the latest plan back. Its rows have not been inserted."""
        plan = self._pending.pop()
        self.planner.undo(plan)
        for table in self.tables:
            # Collect may have been there already; or the storage may not be so large yet.
            there = plan.victim_slots < table.storage.slots
            if there.any():
                table.tag(plan.victim_slots[there], plan.victim_ids[there])

    # ---- without a pipeline -------------------------------------------------------------------

    def admit(self, table: CachedTable, ids: Ints) -> Ints:
        """Query, Collect, Exchange and Insert for one lookup, and return its slots.

        Its rows stay until `table` has moved them, which its counter tells.
        """
        if not ids.size:
            # Perhaps a batch of the run: without ids, a planned batch looks like a plain one.
            if self.run is not None:
                self.declare_trained_before(int(table.resumes_at.numpy()) - 1)
            return np.zeros(0, np.int64)
        self.close_run()
        with self.lock:
            if not self._plain:
                self._become_plain()
            self._admitted = [entry for entry in self._admitted if entry[1].settled() <= entry[2]]
            batch = self.planned + 1
            held = batch - (self._admitted[0][0] if self._admitted else batch)
            with self.timed("plan"):
                self.size([[ids]], 1)
                plan = self.plan(batch, self.look([ids]), (), held, future=0, least_past=held)
            self._carry_out(plan)
            self._admitted.append((batch, table, int(table.applied.numpy())))
            return plan.slots[0]

    def _become_plain(self) -> None:
        """From here on, steps bring their rows in themselves."""
        self._bring_back()
        self.declare_trained()
        self._plain = True
        for table in self.tables:
            if table.pending.steps:
                entry = (table.pending.since, table, int(table.applied.numpy()))
                self._admitted.append(entry)

    def _bring_back(self) -> None:
        """Give rows slots again whose gradients have waited without."""
        for table in self.tables:
            if table.pending.parked is None:
                continue
            self.declare_trained()
            ids, gradients, steps = table.pending.parked
            self.size([[ids]], 1)
            batch = self.planned + 1
            held = batch - min([t.pending.since for t in self.tables if t.pending.steps] + [batch])
            plan = self.plan(batch, self.look([ids]), (), held, future=0, least_past=held)
            self._carry_out(plan)
            table.pending.parked = None
            table.pending.held(plan.slots[0], gradients, steps, batch)
            for other in self.tables:
                other.applied.assign(batch)

    def waiting_ids(self, table: CachedTable) -> Ints:
        """The rows whose gradients wait, in the order of their places."""
        with self.lock:
            ids, slots = self._all_resident()
            id_of = np.zeros(slots.max(initial=0) + 1, np.int64)
            id_of[slots] = ids
            return id_of[table.pending.places]

    def _carry_out(self, plan: BatchPlan) -> None:
        """Move the rows of the latest plan, or take it back if that fails."""
        try:
            with self.timed("collect"):
                transfer = self.collect(plan)
            with self.timed("exchange"):
                self.exchange(transfer)
            with self.timed("insert"):
                self.insert(transfer)
        except BaseException:
            self._undo_last()
            raise

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time that passes to a stage's."""
        started = time.perf_counter()
        yield
        self.stats.spent(stage, time.perf_counter() - started)

    def read(self, table: CachedTable, ids: Ints) -> Rows:
        """The rows `ids` of one table, as they are trained so far."""
        with self.lock:
            self.touched = time.monotonic()
            rows = table.host[0].gather(ids)
            slots = self._resident(ids)
            cached = np.flatnonzero(slots >= 0)
            if cached.size:
                rows[cached] = table.storage.gather(slots[cached])[0].numpy()
            return rows

    # ---- whole tables -------------------------------------------------------------------------

    def flush(self) -> None:
        """Write all cached rows back to the host. They stay cached."""
        with self.lock:
            ids, slots = self._all_resident()
            for table in self.tables:
                if ids.size:
                    for host, rows in zip(table.host, table.storage.gather(slots), strict=True):
                        host.scatter(ids, rows.numpy())

    def get(self, table: CachedTable, number: int = 0) -> Rows:
        """A copy of a whole table, or of its optimizer slot `number - 1`, as trained so far."""
        with self.lock:
            self.touched = time.monotonic()
            whole = table.host[number].whole().copy()
            ids, slots = self._all_resident()
            if ids.size:
                whole[ids] = table.storage.gather(slots)[number].numpy()
            return whole

    def set(self, table: CachedTable, values: Rows, number: int = 0) -> None:
        """Overwrite a whole table, or an optimizer slot, on both sides."""
        with self.lock:
            table.host[number].assign(values)
            ids, slots = self._all_resident()
            if ids.size:
                rows = table.storage.gather(slots)
                rows[number] = table.storage.to_device([table.host[number].gather(ids)])[0]
                table.storage.scatter(slots, rows)
            if table.shadow is not None:
                table.shadow.renew()
            self._version += 1

    def get_rows(self, table: CachedTable, start: int, stop: int) -> list[Rows]:
        """Rows `start` to `stop` of a table and its optimizer slots, as trained so far."""
        with self.lock:
            self.touched = time.monotonic()
            whole = [host.peek(start, stop) for host in table.host]
            slots = self._resident(np.arange(start, stop))
            cached = np.flatnonzero(slots >= 0)
            if cached.size:
                for rows, values in zip(whole, table.storage.gather(slots[cached]), strict=True):
                    rows[cached] = values.numpy()
            return whole

    def set_rows(self, table: CachedTable, start: int, columns: Sequence[Rows]) -> None:
        """Overwrite rows from `start` on, on both sides: of the table, and of its first slots."""
        with self.lock:
            ids = np.arange(start, start + len(columns[0]))
            for host, rows in zip(table.host, columns, strict=False):
                host.scatter(ids, rows)
            slots = self._resident(ids)
            cached = np.flatnonzero(slots >= 0)
            if cached.size:
                stored = table.storage.gather(slots[cached])
                stored[: len(columns)] = table.storage.to_device([r[cached] for r in columns])
                table.storage.scatter(slots[cached], stored)
            if table.shadow is not None:
                table.shadow.renew()
            self._version += 1

    def bind(self, table: CachedTable, binding: Binding) -> None:
        """Give a table an optimizer. Cached rows stay cached."""
        with self.lock:
            self.flush()
            table.set_binding(binding)
            ids, slots = self._all_resident()
            if ids.size:
                rows = table.storage.to_device([host.gather(ids) for host in table.host])
                table.storage.scatter(slots, rows)
            self._version += 1

    def clear(self) -> None:
        """Write all rows back and drop all slots, as if nothing had been looked up yet."""
        self.close_run()
        with self.lock:
            self.flush()
            for table in self.tables:
                table.pending.park(self.waiting_ids(table))
            self._planner = None
            self.inserted = 0
            self.declare_trained()
            for table in self.tables:
                table.storage.clear()

    def watch(self) -> None:
        """Check every plan and every step from now on."""
        with self.lock:
            self.debug = True
            for table in self.tables:
                if table.shadow is None:
                    table.shadow = Shadow(table, *self._sources(table))

    def _sources(self, table: CachedTable) -> tuple[Callable[[], Rows], Callable[[Ints], Ints]]:
        """Where a shadow finds the table's rows, and which rows are in some slots."""
        return functools.partial(self.get, table), lambda slots: self.planner.hit_map.id_of[slots]

    # ---- inside -------------------------------------------------------------------------------

    def _from_host(self, table: CachedTable, ids: Ints, transfer: Transfer) -> list[Rows]:
        if not ids.size:
            return []
        rows = []
        for host in table.host:
            buffer = self._buffers.take(ids.size, host.shape[1], table.dtype)
            transfer.buffers.append(buffer)
            rows.append(host.gather(ids, out=buffer[: ids.size]))
        return rows

    def _resident(self, ids: Ints) -> Ints:
        if self._planner is None:
            return np.full(ids.shape, -1, np.int64)
        return self._planner.as_inserted(list(self._pending), ids)

    def _all_resident(self) -> tuple[Ints, Ints]:
        """All rows that are in a slot now, and the slots."""
        if self._planner is None:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        ids, _ = self._planner.hit_map.cached()
        leaving = [plan.victim_ids for plan in self._pending]
        ids = np.unique(np.concatenate([ids, *leaving]))
        slots = self._resident(ids)
        return ids[slots >= 0], slots[slots >= 0]

    def _check(
        self, plan: BatchPlan, looked: Looked, upcoming: Sequence[Looked], last_use: Numbers
    ) -> None:
        needed: dict[int, int] = {}
        for distance, later in reversed(list(enumerate(upcoming, start=1))):
            needed.update(dict.fromkeys(later.flat.tolist(), plan.batch + distance))
        grown = np.full(self.planner.slots - last_use.size, NEVER, np.int32)
        invariants.check_hit_map(self.planner)
        invariants.check_victims(plan, np.concatenate([last_use, grown]), needed)
        for table in self.tables:
            if table.shadow is not None and self.run is not None:
                slots = np.concatenate([array.ravel() for array in plan.slots])
                table.shadow.expect(plan.batch, slots, looked.flat)


def _first_size(batches: Sequence[Sequence[Ints]], window: int, most: int) -> int:
    """Slots for a window of batches like these."""
    counts = [np.unique(np.concatenate([a.ravel() for a in ids])).size for ids in batches if ids]
    return max(min(most, window * max(counts, default=1)), 1)
