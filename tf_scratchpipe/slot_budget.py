"""One number of slots for many tables, divided by what their batches need.

A table's need is the number of distinct rows in a window of its batches. With fewer slots its
window is shortened; with more, rows stay for later, which is of the more use the more rows pass
through. So each table gets the slots that one batch cannot do without, and of the others a part in
proportion to its need, but no more than it has rows.
"""

import dataclasses
import math
from collections.abc import Sequence

from tf_scratchpipe.errors import TooFewSlotsError


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """What one table asks for.

    Args:
        need: Distinct rows of a window of its batches.
        rows: Rows of the table.
        fixed: Slots that its layer was given, which it gets. None: what the others leave.
        least: Distinct rows of a single batch.
    """

    need: int
    rows: int
    fixed: int | None = None
    least: int = 1


class SlotBudget:
    """The slots of all tables of a dataset. Remembers how it divided them.

    Args:
        total: Slots in all.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._slots: list[int] = []

    @property
    def is_divided(self) -> bool:
        """Whether it was divided before."""
        return bool(self._slots)

    def divided(self, demands: Sequence[Demand]) -> list[int]:
        """Slots for each table: as divided when this was first asked for, or by `divide` since."""
        return self._slots or self.divide(demands)

    def divide(self, demands: Sequence[Demand]) -> list[int]:
        """Slots for each table, by these demands.

        Raises:
            TooFewSlotsError: The rows of a single batch have no slots.
        """
        fixed = sum(demand.fixed or 0 for demand in demands)
        others = [demand for demand in demands if demand.fixed is None]
        least = fixed + sum(demand.least for demand in others)
        if self.total < least:
            raise TooFewSlotsError(
                f"`num_slots` of `lookahead` is too small. Received: num_slots={self.total} for "
                f"{len(demands)} tables, of which {len(demands) - len(others)} have {fixed} slots "
                f"of their own, while one batch needs {least}. Pass num_slots>={least}, and better "
                f"num_slots>={fixed + sum(demand.need for demand in others)}."
            )
        shares = iter(_shares(self.total - fixed, others))
        self._slots = [demand.fixed or next(shares) for demand in demands]
        return self._slots


def _shares(total: int, demands: Sequence[Demand]) -> list[int]:
    """`total` slots, or as many as there are rows."""
    slots = [demand.least for demand in demands]
    waiting, left = list(range(len(demands))), total - sum(slots)
    while waiting and left:
        share = left / sum(demands[n].need for n in waiting)
        room = {n: demands[n].rows - slots[n] for n in waiting}
        whole = [n for n in waiting if demands[n].need * share >= room[n]]
        for n in whole or waiting:
            more = room[n] if whole else math.floor(demands[n].need * share)
            slots[n] += more
            left -= more
        waiting = [n for n in waiting if n not in whole] if whole else []
    for n in sorted(range(len(demands)), key=lambda n: (-demands[n].need, n)):
        more = min(left, demands[n].rows - slots[n])  # What rounding has left.
        slots[n] += more
        left -= more
    return slots
