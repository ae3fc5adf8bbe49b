"""A plan as a table for people."""

from tf_echo.plan import MIB, PeakMemory, RecomputePlan, RegionDecision

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
        kept, ms added, reason), totals, and the predicted peak before and after with its parts.
    """
    header = ("region", "layer", "ops", "decision", "released", "kept", "ms", "reason")
    shown = [d for d in plan.decisions if every_region or _is_worth_a_line(d)]
    rows = [_row(d) for d in shown]
    hidden = len(plan.decisions) - len(shown)
    rows.append(_totals(plan))
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header) - 1)]
    lines = [
        _title(plan),
        _line(header, widths),
        _line(["-" * w for w in widths] + ["-" * 6], widths),
    ]
    lines += [_line(row, widths) for row in rows]
    if hidden:
        lines.append(f"{hidden} small regions that are kept are not listed.")
    if plan.sums:
        lines.append(f"{len(plan.sums)} sums of gradients are built up term by term.")
    if plan.untied:
        lines.append("Gradients are handed to the optimizer one by one instead of all at once.")
    lines += ["", *_peaks(plan)]
    if plan.note:
        lines += ["", plan.note]
    return "\n".join(lines)


def _is_worth_a_line(decision: RegionDecision) -> bool:
    return decision.recompute or decision.released_bytes >= _SMALL_BYTES


def _title(plan: RecomputePlan) -> str:
    count = f"{len(plan.recomputed)} of {len(plan.decisions)} regions recomputed"
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


def _totals(plan: RecomputePlan) -> list[str]:
    chosen = plan.recomputed
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
