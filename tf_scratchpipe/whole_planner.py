"""Plans for a table that is on the device as a whole.

With a slot for every row there is nothing to decide: row 7 is in slot 7 from the first batch on,
which brings all rows in. No map is looked at, no row is ever missed or evicted.
"""

from collections.abc import Sequence

import numpy as np

from tf_scratchpipe.plan import BatchPlan, Ints, frozen
from tf_scratchpipe.planner import FUTURE, PAST, Looked, SlotPlanner, flattened, shaped

_NONE: Ints = np.zeros(0, np.int64)


class WholePlanner(SlotPlanner):
    """Has each row in the slot of its number.

    Args:
        rows: Number of rows of the table, and of slots.
    """

    def __init__(self, rows: int) -> None:
        super().__init__(rows, rows)
        self._all = frozen(np.arange(rows))
        self._there = False
        self.most_distinct = rows

    def held(self, past: int) -> int:
        """Slots that are held: all."""
        return self.slots

    def look(self, ids: Sequence[Ints]) -> Looked:
        """Take a batch up, for `plan`."""
        flat = flattened(ids)
        return Looked(tuple(ids), flat, flat.astype(np.int32), _NONE, self.batch)

    def plan(
        self,
        batch: int,
        looked: Looked,
        upcoming: Sequence[Looked] = (),
        past: int = PAST,
        future: int = FUTURE,
        least_past: int = 0,
    ) -> BatchPlan:
        """Say where the rows of a batch are. The first plan brings all rows in."""
        fills, hits = (_NONE, looked.flat.size) if self._there else (self._all, 0)
        self.hit_map.bind(fills, fills)
        self._there, self.batch = True, batch
        return BatchPlan(
            batch=batch,
            slots=shaped(looked.flat, looked.ids),
            fill_ids=fills,
            fill_slots=fills,
            victim_ids=_NONE,
            victim_slots=_NONE,
            past=past,
            future=future,
            after_trained=-1,
            after_inserted=-1,
            capacity=self.slots,
            hits=hits,
        )

    def undo(self, plan: BatchPlan) -> None:
        """Take the latest plan back."""
        if plan.fill_ids.size:
            self.hit_map.unbind(plan.fill_ids, plan.fill_slots)
            self._there = False
