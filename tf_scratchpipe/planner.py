"""The Plan stage: find the rows of a batch, and decide what moves (ScratchPipe, Algorithm 1).

Three hazards are planned away (section IV-C). Victims are not among the slots that the `past`
batches before this one use, so none is read before its training is over; nor among those of the
`future` batches after it, so none of their Collects reads a row from the host that is only now on
its way back. Where slots are too few for the whole window it is shortened, first from the far end
of the future, then of the past; the plan says what Collect must wait for instead. Only a batch
that needs more distinct rows than there are slots cannot be planned.

The paper's stages advance together, which makes both safe. Here they do not, so a plan says which
training and which Insert its Collect has to wait for.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tf_scratchpipe.errors import TooFewSlotsError
from tf_scratchpipe.hit_map import HitMap
from tf_scratchpipe.hold_window import HoldWindow
from tf_scratchpipe.plan import BatchPlan, Ints, frozen
from tf_scratchpipe.replacement import LRU, Replacement

STAGES = ("load", "plan", "collect", "exchange", "insert", "train")

PAST = STAGES.index("train") - STAGES.index("collect")
"""A victim read by Collect must be through Train."""

FUTURE = STAGES.index("insert") - STAGES.index("collect")
"""A victim written back by Insert must not be wanted by a Collect before that."""

_GROWTH = 1.5


class SlotPlanner:
    """Assigns slots to rows, batch after batch.

    Args:
        rows: Number of rows of the table.
        slots: Number of slots to begin with.
        most_slots: Number of slots to grow to before the window is shortened.
        replacement: Class of the replacement policy.

    Example:

    ```python
    planner = SlotPlanner(rows=100, slots=4)
    batches = [planner.look([ids]) for ids in (np.array([7, 8, 7]), np.array([8, 9]))]
    plan = planner.plan(1, batches[0], upcoming=batches[1:])
    ```
    """

    def __init__(
        self,
        rows: int,
        slots: int,
        most_slots: int | None = None,
        replacement: type[Replacement] = LRU,
    ) -> None:
        self.most_slots = most_slots or slots
        self.hit_map = HitMap(rows, slots)
        self.window = HoldWindow(slots)
        self.replacement = replacement(slots)
        self.batch = 0
        self.most_distinct = 0
        """The most distinct rows that a batch has had."""
        # Free slots are handed out from the end.
        self._free: Ints = np.arange(slots, dtype=np.int64)[::-1]
        # Batches with victims, and the last batch that has been kept from missing one of these.
        self._written_back: list[tuple[int, int]] = []
        self._waited = -1
        self._scratch: npt.NDArray[np.int32] = np.empty(slots, np.int32)

    @property
    def slots(self) -> int:
        """Number of slots so far."""
        return self.hit_map.slots

    def held(self, past: int) -> int:
        """Slots that the latest batch and the `past` before it use. Looks at every slot."""
        return self.window.in_use(self.batch, past)

    def look(self, ids: Sequence[Ints]) -> "Looked":
        """Look a batch up ahead of time, for `plan`.

        Args:
            ids: Arrays of ids of any shape, all of them valid.
        """
        flat = flattened(ids)
        slots = self.hit_map.lookup(flat)
        cached = self._distinct(np.compress(slots >= 0, slots))
        return Looked(tuple(ids), flat, slots, cached, self.batch)

    def plan(
        self,
        batch: int,
        looked: "Looked",
        upcoming: Sequence["Looked"] = (),
        past: int = PAST,
        future: int = FUTURE,
        least_past: int = 0,
    ) -> BatchPlan:
        """Decide where the rows of a batch go, and note that they are there.

        Args:
            batch: Its number, greater than the last one's.
            looked: The batch, as `look` returned it some batches ago or just now.
            upcoming: The batches after it, the next one first.
            past: Number of batches before it whose slots are held.
            future: Number of batches after it whose slots are held, as far as `upcoming` says.
            least_past: Number of batches before it whose slots are held in any case.

        Raises:
            TooFewSlotsError: The batch, with the batches before it that must be held in any case,
                has more distinct rows than there are slots. Nothing has changed then.
        """
        flat = looked.flat
        slots, hit_slots, missing = self._found(looked, batch)
        misses, places = self.hit_map.distinct(flat[missing])
        used_before = self.window.last_use[hit_slots]
        self.window.use(hit_slots, batch)
        self.most_distinct = max(self.most_distinct, hit_slots.size + misses.size)
        try:
            new, victims, windows = self._make_room(
                batch, misses.size, upcoming, (past, future), least_past
            )
        except TooFewSlotsError:
            self.window.last_use[hit_slots] = used_before
            self.hit_map.unbind(misses)
            raise
        self.replacement.use(hit_slots, batch)
        victim_ids = self.hit_map.id_of[victims]
        after_trained = int(self.window.last_use[victims].max()) if victims.size else -1
        fill_slots = np.concatenate([new, victims])
        self.hit_map.unbind(victim_ids)
        self.hit_map.bind(misses, fill_slots)
        self.window.use(fill_slots, batch)
        self.replacement.fill(fill_slots, batch)
        after_inserted = self._last_unprotected(batch)
        if victims.size:
            self._written_back.append((batch, batch + min(windows[1], len(upcoming))))
        self.batch = batch
        slots[missing] = fill_slots[places]
        return BatchPlan(
            batch=batch,
            slots=shaped(slots, looked.ids),
            fill_ids=frozen(misses),
            fill_slots=frozen(fill_slots),
            victim_ids=frozen(victim_ids),
            victim_slots=frozen(victims),
            past=windows[0],
            future=windows[1],
            after_trained=after_trained,
            after_inserted=after_inserted,
            capacity=self.slots,
            hits=flat.size - missing.size,
        )

    def _found(self, looked: "Looked", batch: int) -> tuple[Ints, Ints, Ints]:
        """The slot of each lookup, the slots that are hit, and which lookups have no slot."""
        slots, hits = looked.slots.astype(np.int64), looked.cached
        if self._may_have_lost(looked, batch):
            slots[~self.hit_map.holds(looked.flat, looked.slots)] = -1
            hits = self._distinct(np.compress(slots >= 0, slots))
        missing = np.flatnonzero(slots < 0)
        if missing.size and looked.at < self.batch:  # Rows may have come since.
            found = self.hit_map.lookup(looked.flat[missing])
            slots[missing] = found
            come = self._distinct(np.compress(found >= 0, found))
            # A row that has gone and come back may be among both.
            hits = self._distinct(np.concatenate([hits, come])) if come.size else hits
            missing = np.compress(found < 0, missing)
        return slots, hits, missing

    def _may_have_lost(self, looked: "Looked", batch: int) -> bool:
        """Whether a plan made since then may have taken a row that the batch needs."""
        return looked.at < self._least_protected(batch)

    def _least_protected(self, batch: int) -> int:
        """The last batch whose victims may be rows of `batch`; -1 if there is none."""
        lost = [number for number, protected in self._written_back if protected < batch]
        return max([self._waited, *lost])

    def undo(self, plan: BatchPlan) -> None:
        """Take the latest plan back that has not been undone: its moves have not been made."""
        free, retaken = np.split(plan.fill_slots, [plan.fill_slots.size - plan.victim_slots.size])
        self.hit_map.unbind(plan.fill_ids, plan.fill_slots)
        self.hit_map.bind(plan.victim_ids, retaken)
        self.window.forget(free)
        self.replacement.empty(free)
        self._free = np.concatenate([self._free, free[::-1]])

    def as_inserted(self, pending: Sequence[BatchPlan], ids: Ints) -> Ints:
        """The slots of `ids` before the moves of `pending` are made, oldest plan first."""
        slot_of = self.hit_map.slot_of
        for plan in reversed(pending):
            slot_of[plan.fill_ids] = -1
            slot_of[plan.victim_ids] = plan.victim_slots
        slots = slot_of[ids].astype(np.int64)
        for plan in pending:
            slot_of[plan.victim_ids] = -1
            slot_of[plan.fill_ids] = plan.fill_slots
        return slots

    def _make_room(
        self,
        batch: int,
        count: int,
        upcoming: Sequence["Looked"],
        window: tuple[int, int],
        least_past: int,
    ) -> tuple[Ints, Ints, tuple[int, int]]:
        """Find `count` slots: free ones, then victims; and the window that was held for them."""
        past, future = window
        new = self._take_free(count)
        missing = count - new.size
        if not missing:
            return new, _none(), (past, future)
        self._foresee(batch, upcoming[:future], past)
        parts = [self._victims(missing, batch, past, future)]
        missing -= parts[0].size
        if missing and self.slots < self.most_slots:
            self._grow(self.slots + missing)
            more = self._take_free(missing)
            new, missing = np.concatenate([new, more]), missing - more.size
        shortened = _shorter(past, future, least_past)
        while missing and (shorter := next(shortened, None)):
            past, future = shorter
            parts.append(self._victims(missing, batch, past, future))
            missing -= parts[-1].size
        victims = np.concatenate(parts)
        if missing:
            self.replacement.give_back(victims, batch)
            self._free = np.concatenate([self._free, new[::-1]])
            raise TooFewSlotsError(
                f"`num_slots` is too small. Received: num_slots={self.slots}, but batch {batch} "
                f"needs {self.slots + missing} rows at once. Pass "
                f"num_slots>={self.slots + missing} or a smaller batch."
            )
        return new, victims, (past, future)

    def _victims(self, count: int, batch: int, past: int, future: int) -> Ints:
        return self.replacement.victims(
            count, lambda slots: self.window.held(slots, batch, past, future)
        )

    def _take_free(self, count: int) -> Ints:
        kept = max(self._free.size - count, 0)
        taken = self._free[kept:][::-1]
        self._free = self._free[:kept]
        return taken

    def _grow(self, needed: int) -> None:
        before = self.slots
        slots = min(self.most_slots, max(needed, int(before * _GROWTH)))
        for part in (self.hit_map, self.window, self.replacement):
            part.grow(slots)
        self._free = np.concatenate([np.arange(before, slots)[::-1], self._free])
        self._scratch = np.empty(slots, np.int32)

    def _last_unprotected(self, batch: int) -> int:
        """The same, for the last time that it is asked for this batch or one before."""
        self._waited = self._least_protected(batch)
        self._written_back = [one for one in self._written_back if one[1] >= batch]
        return self._waited

    def _foresee(self, batch: int, upcoming: Sequence["Looked"], past: int) -> None:
        """Mark the slots that the next batches need."""
        cached = [later.cached for later in upcoming]
        if past < len(upcoming):
            # Rows that came in since these batches were looked up are not all held by the past.
            found = [self.hit_map.lookup(later.flat) for later in upcoming]
            cached = [np.compress(slots >= 0, slots) for slots in found]
        self.window.foresee(batch, cached)

    def _distinct(self, slots: npt.NDArray[np.integer]) -> Ints:
        """Each slot once."""
        order = np.arange(slots.size, dtype=np.int32)
        self._scratch[slots] = order
        distinct: Ints = np.compress(self._scratch[slots] == order, slots).astype(np.int64)
        return distinct


@dataclasses.dataclass(frozen=True, slots=True)
class Looked:
    """A batch as it was looked up at some time."""

    ids: tuple[Ints, ...]
    flat: Ints
    slots: npt.NDArray[np.int32]
    """For each lookup, the slot of its row then; negative if there was none."""
    cached: Ints
    """The slots among these, each once."""
    at: int
    """Number of the last batch that had been planned then."""


def shaped(slots: Ints, like: Sequence[Ints]) -> tuple[Ints, ...]:
    """Parts of `slots` in the shapes of the arrays in `like`."""
    ends = np.cumsum([array.size for array in like])
    parts = [slots] if len(like) == 1 else np.split(slots, ends)[: len(like)]
    return tuple(frozen(part.reshape(array.shape)) for part, array in zip(parts, like, strict=True))


def _shorter(past: int, future: int, least_past: int) -> Iterator[tuple[int, int]]:
    """Ever shorter windows: less of the future, then also less of the past."""
    yield from ((past, shorter) for shorter in reversed(range(future)))
    yield from ((shorter, 0) for shorter in reversed(range(least_past, past)))


def flattened(ids: Sequence[Ints]) -> Ints:
    """All ids of a batch, one after the other."""
    if len(ids) == 1:
        return ids[0].reshape(-1)
    return np.concatenate([array.reshape(-1) for array in ids]) if ids else _none()


def _none() -> Ints:
    return np.zeros(0, np.int64)
