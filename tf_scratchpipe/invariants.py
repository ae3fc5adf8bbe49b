"""What must hold at all times, checked where `debug=True` asks for it."""

import numpy as np

from tf_scratchpipe.hold_window import NEVER, Numbers
from tf_scratchpipe.plan import BatchPlan, Ints, Rows
from tf_scratchpipe.planner import SlotPlanner


class HazardError(AssertionError):
    """A row would have been lost, or trained on a stale value."""


def check_hit_map(planner: SlotPlanner) -> None:
    """The Hit-Map is a bijection. Looks at every slot."""
    ids, slots = planner.hit_map.cached()
    if not np.array_equal(planner.hit_map.lookup(ids), slots):
        raise HazardError("Two slots of the Hit-Map hold the same row.")
    if np.count_nonzero(planner.hit_map.slot_of != -1) != ids.size:
        raise HazardError("The Hit-Map names a slot that does not hold the row.")


def check_victims(plan: BatchPlan, last_use: Numbers, next_use: dict[int, int]) -> None:
    """No victim is held by the plan's window.

    Args:
        plan: The plan.
        last_use: For each slot, the last batch that used it, before the plan.
        next_use: For each row that is needed later, the batch that needs it next.
    """
    used = last_use[plan.victim_slots]
    if np.any((used != NEVER) & (used >= plan.batch - plan.past)):
        raise HazardError(f"Batch {plan.batch} evicts a row that an earlier batch still trains.")
    for row in plan.victim_ids.tolist():
        if next_use.get(row, plan.batch + plan.future + 1) <= plan.batch + plan.future:
            raise HazardError(f"Batch {plan.batch} evicts row {row}, which is needed next.")
    if np.intersect1d(plan.victim_slots, np.concatenate(plan.slots, axis=None)).size != np.unique(
        plan.victim_slots
    ).size or (np.unique(plan.fill_slots).size != plan.fill_slots.size):
        raise HazardError(f"Batch {plan.batch} takes a slot twice, or one that it does not fill.")


def check_rows(batch: int, table: str, ids: Ints, gathered: Rows, uncached: Rows) -> None:
    """What Train reads is what an uncached table would hold."""
    wrong = np.flatnonzero(np.any(gathered != uncached, axis=1) & ~np.isnan(uncached).any(axis=1))
    if wrong.size:
        raise HazardError(
            f"Batch {batch} of layer '{table}' reads stale rows: "
            f"{np.unique(ids[wrong])[:5].tolist()} and others, {wrong.size} lookups in all."
        )
