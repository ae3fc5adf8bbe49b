"""A plan as a table for people."""

from collections.abc import Sequence

from tf_echo.plan import MIB, LoopPlan, PeakMemory, RecomputePlan, RegionDecision

_LAYER_WIDTH = 40
_SMALL_BYTES = MIB // 8


def report(plan: RecomputePlan, every_region: bool = False) -> str:
    """The plan as a text table.

    Args:
        plan: the plan.
        every_region: also list kept regions whose residuals are below 1/8 MiB; otherwise they are
            only counted.

    Returns:
        One line a region (region, layer, ops that run again of all, decision, MiB released, MiB
        kept, ms added, reason), totals, the same for one iteration of each loop with what the loop
        keeps of an iteration and in all, and the predicted peak before and after with its parts.
    """
    lines = [_title(plan), *_table(plan.decisions, every_region)]
    for loop in plan.loops:
        lines += _loop_lines(loop, every_region)
    lines += _share_lines(plan)
    lines += ["", *_peaks(plan)]
    if plan.note:
        lines += ["", plan.note]
    return "\n".join(lines)


_DOES = {
    "bits": "Of {count} tensors one bit an element is kept, {released} -> {kept} MiB",
    "sums": "{count} sums of gradients are built up term by term",
    "waits": "{count} derivatives wait for the gradient that they are multiplied with",
}


def _share_lines(plan: RecomputePlan) -> list[str]:
    """What the plan does besides recomputing, each with what it saves at the peak."""
    released, kept = (
        _mib(sum(getattr(residual, field) for residual in plan.bits))
        for field in ("released_bytes", "kept_bytes")
    )
    return [
        _DOES[share.technique].format(count=share.count, released=released, kept=kept)
        + f": saves {_mib(share.saved_bytes)} MiB at the peak."
        for share in plan.shares
    ]


def _table(decisions: Sequence[RegionDecision], every_region: bool, times: int = 1) -> list[str]:
    header = ("region", "layer", "ops", "decision", "released", "kept", "ms", "reason")
    shown = [d for d in decisions if every_region or _is_worth_a_line(d, times)]
    rows = [_row(d) for d in shown]
    rows.append(_totals(decisions))
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header) - 1)]
    lines = [_line(header, widths), _line(["-" * w for w in widths] + ["-" * 6], widths)]
    lines += [_line(row, widths) for row in rows]
    if len(shown) < len(decisions):
        lines.append(f"{len(decisions) - len(shown)} small regions that are kept are not listed.")
    return lines


def _loop_lines(loop: LoopPlan, every_region: bool) -> list[str]:
    """What becomes of a loop, its regions, and the loops in it."""
    count = f"{loop.trips}" if loop.trips_known else f"nominally {loop.trips}"
    each, all_of_it = (
        f"{_mib(loop.before_bytes * factor)} -> {_mib(loop.after_bytes * factor)}"
        for factor in (1, loop.trips)
    )
    lines = ["", f"Loop {loop.loop}, {count} iterations: keeps {each} of each, {all_of_it} in all."]
    if loop.in_order:
        lines.append("Each iteration waits for the one before.")
    if loop.reread:
        lines.append(f"{len(loop.reread)} variables or inputs are read again instead of kept.")
    if loop.sums:
        lines.append(f"{len(loop.sums)} sums of gradients are built up term by term.")
    if not loop.recompute:
        return [*lines, f"Nothing is recomputed in it: {loop.reason}."]
    lines += _table(loop.decisions, every_region, loop.trips)
    for inner in loop.loops:
        lines += _loop_lines(inner, every_region)
    return lines


def _is_worth_a_line(decision: RegionDecision, times: int) -> bool:
    return decision.recompute or times * decision.released_bytes >= _SMALL_BYTES


def _title(plan: RecomputePlan) -> str:
    count = f"{len(plan.recomputed)} of {len(plan.decisions)} regions recomputed"
    changed = [loop for loop in plan.loops if loop.recompute]
    count += f" and {len(changed)} of {len(plan.loops)} loops changed" if plan.loops else ""
    batch = f", sizes for a batch of {plan.batch_size}" if plan.batch_size else ""
    name = f" for {plan.name}" if plan.name else ""
    return f"Echo plan{name}, policy {plan.policy!r}: {count}{batch}. Sizes in MiB, times in ms."


def _row(decision: RegionDecision) -> list[str]:
    layer = decision.layer
    if len(layer) > _LAYER_WIDTH:
        layer = "..." + layer[3 - _LAYER_WIDTH :]
    ops = f"{len(decision.nodes)}/{decision.ops}"
    return [
        str(decision.region),
        layer,
        ops,
        "recompute" if decision.recompute else "keep",
        _mib(decision.released_bytes),
        _mib(decision.kept_bytes),
        f"{1e3 * decision.added_seconds:.2f}",
        decision.reason,
    ]


def _totals(decisions: Sequence[RegionDecision]) -> list[str]:
    chosen = [d for d in decisions if d.recompute]
    return [
        "total",
        "",
        str(sum(len(d.nodes) for d in chosen)),
        "recompute",
        _mib(sum(d.released_bytes for d in chosen)),
        _mib(sum(d.kept_bytes for d in chosen)),
        f"{1e3 * sum(d.added_seconds for d in chosen):.2f}",
        "",
    ]


def _line(cells: list[str] | tuple[str, ...], widths: list[int]) -> str:
    left = {1, 3}
    padded = [
        cell.ljust(width) if i in left else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=False))
    ]
    return "  ".join([*padded, cells[-1]]).rstrip()


def _peaks(plan: RecomputePlan) -> list[str]:
    def parts(name: str, peak: PeakMemory) -> str:
        return (
            f"{name} {_mib(peak.total_bytes):>9}  =  weights {_mib(peak.weight_bytes)} + residuals "
            f"{_mib(peak.residual_bytes)} + workspace {_mib(peak.workspace_bytes)}"
        )

    return [
        parts("predicted peak before:", plan.before),
        parts("predicted peak after: ", plan.after) + f"   ({plan.ratio:.2f}x less)",
    ]


def _mib(count: int) -> str:
    return f"{count / MIB:,.1f}" if count >= MIB / 10 or not count else f"{count / MIB:.3f}"
