"""What is to be done for one batch, as data.

The Plan stage decides, without TensorFlow; the stages after it carry out (ScratchPipe, section
IV-C).
"""

import dataclasses
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Rows: TypeAlias = npt.NDArray[np.floating]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """Where the rows of one batch are, and which ones have to move for that.

    Plans are equal by value. Arrays are read-only.
    """

    batch: int
    """Number of the batch; one more than the batch's before it."""
    slots: tuple[Ints, ...]
    """For each array of ids, the slots of its rows, in the same shape."""
    fill_ids: Ints
    """Rows to bring in, each once."""
    fill_slots: Ints
    """Where to put them. Free slots come first, the victims' after them."""
    victim_ids: Ints
    """Rows to write back to the host table, because their slots are taken."""
    victim_slots: Ints
    """Where those are: the last `len(victim_ids)` of `fill_slots`."""
    past: int
    """How many batches before this one were held. Less than usual where slots are scarce."""
    future: int
    """How many batches after this one were held."""
    after_trained: int
    """Collect reads the victims once this batch was trained; -1 if there is nothing to wait for."""
    after_inserted: int
    """Collect reads the host table once this batch's victims are in it; -1 likewise."""
    capacity: int
    """Slots that the storage must have by the time of Insert."""
    hits: int
    """Lookups, duplicates counted, whose row was in the cache or on its way there."""

    @property
    def lookups(self) -> int:
        """Number of lookups, duplicates counted."""
        return sum(slots.size for slots in self.slots)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BatchPlan):
            return NotImplemented
        return all(
            _same(getattr(self, field.name), getattr(other, field.name))
            for field in dataclasses.fields(self)
        )

    def __str__(self) -> str:
        moves = [f"fill {_pairs(self.fill_ids, self.fill_slots)}"] if self.fill_ids.size else []
        if self.victim_ids.size:
            moves.append(f"evict {_pairs(self.victim_ids, self.victim_slots)}")
        hits = f"batch {self.batch}: {self.hits} of {self.lookups} hit"
        return "; ".join([hits, *moves])


def frozen(array: npt.NDArray[np.integer]) -> Ints:
    """The array as read-only int64."""
    result = array.astype(np.int64, copy=False).view()
    result.flags.writeable = False
    return result


def _same(one: object, other: object) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(np.array_equal, one, other))
    return bool(np.array_equal(one, other))  # type: ignore[arg-type]


def _pairs(ids: Ints, slots: Ints) -> str:
    return ", ".join(f"{row}@{slot}" for row, slot in zip(ids, slots, strict=True))
