"""The Hit-Map: which row is in which slot (ScratchPipe, section IV-D).

Two arrays, one in each direction, both addressed directly: 4 bytes for each row of the table, 8
for each slot. As in the paper, the map shows the state that the storage will have once all plans
made so far are carried out.
"""

import numpy as np
import numpy.typing as npt

from tf_scratchpipe.plan import Ints

EMPTY = -1
_MARKED = -2


class HitMap:
    """A bijection between the cached rows and the slots that hold them.

    Args:
        rows: Number of rows of the table.
        slots: Number of slots.
    """

    def __init__(self, rows: int, slots: int) -> None:
        self.slot_of: npt.NDArray[np.int32] = np.full(rows, EMPTY, np.int32)
        self.id_of: Ints = np.full(slots, EMPTY, np.int64)

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self.id_of.size

    def lookup(self, ids: Ints) -> npt.NDArray[np.int32]:
        """The slot of each row; negative where the row is not cached."""
        return self.slot_of[ids]

    def distinct(self, ids: Ints) -> tuple[Ints, Ints]:
        """Ids that have no slot, each once, and for each of `ids` its place among these.

        The map's entries of these ids are scratch space until they are bound or unbound.
        """
        # Of equal ids the one that was written last finds its own mark.
        marks = np.arange(_MARKED, _MARKED - ids.size, -1, dtype=np.int32)
        self.slot_of[ids] = marks
        found = self.slot_of[ids]
        first = found == marks
        places = np.cumsum(first) - 1
        return np.compress(first, ids), places[_MARKED - found]

    def bind(self, ids: Ints, slots: Ints) -> None:
        """Note that the rows `ids` are in `slots` from now on."""
        self.slot_of[ids] = slots
        self.id_of[slots] = ids

    def unbind(self, ids: Ints, slots: Ints | None = None) -> None:
        """Note that they no longer are."""
        self.slot_of[ids] = EMPTY
        if slots is not None:
            self.id_of[slots] = EMPTY

    def holds(self, ids: Ints, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Whether these slots hold these rows. Negative slots hold nothing."""
        same: npt.NDArray[np.bool_] = self.id_of[slots] == ids
        return same & (slots >= 0)

    def grow(self, slots: int) -> None:
        """Add empty slots, up to `slots` in all."""
        added = np.full(slots - self.slots, EMPTY, np.int64)
        self.id_of = np.concatenate([self.id_of, added])

    def cached(self) -> tuple[Ints, Ints]:
        """All cached ids and their slots. Looks at every slot."""
        slots = np.flatnonzero(self.id_of != EMPTY)
        return self.id_of[slots], slots
