"""What is to be recomputed: the data that planner, evaluation, rewriter and report share.

A plan names nodes and tensors of one graph. Plans are equal by value, print as text, and go to JSON
and back.
"""

import dataclasses
import json
from typing import Any

MIB = 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class RegionDecision:
    """What becomes of one region, and why."""

    region: int
    layer: str
    """The name scope that its ops share."""
    ops: int
    """How many replayable ops it holds."""
    recompute: bool
    released_bytes: int
    """Residuals that no longer live from the forward to the backward pass."""
    kept_bytes: int
    """Tensors that must live to the backward pass instead, each counted in one region."""
    added_seconds: float
    """Time of the ops that run again, by the cost model."""
    reason: str
    nodes: tuple[str, ...] = ()
    """Names of the ops that run again, in order."""
    gate: str = ""
    """The tensor (an upstream gradient, or the loss) that they wait for."""

    def __str__(self) -> str:
        released, kept = format_bytes(self.released_bytes), format_bytes(self.kept_bytes)
        if self.recompute:
            what = f"recompute {len(self.nodes)} ops (releases {released}, keeps {kept})"
            return f"region {self.region}: {what}"
        return f"region {self.region}: keep ({self.reason})"


@dataclasses.dataclass(frozen=True, slots=True)
class PackedResidual:
    """A tensor of which the backward pass asks one bit an element; eight go into a byte."""

    tensor: str
    """Name of the tensor of the forward pass."""
    test: str
    """What the bit says of an element: one of `"x"` (it is a boolean), `"x > 0"`,
    `"0 < x < 6"`."""
    gate: str
    """The upstream gradient that unpacking waits for."""
    released_bytes: int
    """The tensor."""
    kept_bytes: int
    """Its bits."""

    def __str__(self) -> str:
        released, kept = format_bytes(self.released_bytes), format_bytes(self.kept_bytes)
        return f"bits {self.tensor}: keep {self.test} (releases {released}, keeps {kept})"


@dataclasses.dataclass(frozen=True, slots=True)
class LoopPlan:
    """What becomes of a while loop: its body is planned like a step of its own."""

    loop: str
    """Name of its op."""
    trips: int
    """How often the body runs."""
    trips_known: bool
    """Whether that is certain; a nominal number otherwise."""
    recompute: bool
    before_bytes: int
    """What is kept of one iteration for the backward loop without the plan."""
    after_bytes: int
    """The same with it."""
    reason: str
    in_order: bool = False
    """Whether each iteration waits for the one before. TensorFlow lets up to 32 iterations run
    side by side, and what those make that run ahead piles up. No value depends on it."""
    decisions: tuple[RegionDecision, ...] = ()
    """The regions of the body; bytes and seconds are those of one iteration."""
    reread: tuple[str, ...] = ()
    """Names of tensors of the body that the backward loop reads again (variables, slices of
    the loop's inputs). Under XLA it would else keep a copy of each iteration."""
    sums: tuple[str, ...] = ()
    """Names of AddN ops of the gradient's body that add up their terms one by one instead."""
    loops: tuple["LoopPlan", ...] = ()
    """The loops in the body."""

    @property
    def released_bytes(self) -> int:
        """Bytes of all iterations that are no longer kept."""
        return self.trips * (self.before_bytes - self.after_bytes) if self.recompute else 0

    @property
    def recomputed(self) -> tuple[RegionDecision, ...]:
        """The decisions that recompute."""
        return tuple(d for d in self.decisions if d.recompute)

    def __str__(self) -> str:
        trips = f"{self.trips}" if self.trips_known else f"about {self.trips}"
        before, after = format_bytes(self.before_bytes), format_bytes(self.after_bytes)
        if not self.recompute:
            return f"loop {self.loop}: keep {trips} x {before} ({self.reason})"
        lines = [f"loop {self.loop}: {trips} x {before} -> {after}"]
        lines += [f"  {line}" for d in self.decisions for line in str(d).splitlines()]
        lines += [f"  {line}" for loop in self.loops for line in str(loop).splitlines()]
        return "\n".join(lines)


def _loop_plan(fields: dict[str, Any]) -> LoopPlan:
    """The inverse of `dataclasses.asdict` for a `LoopPlan`."""
    return LoopPlan(
        **{
            **fields,
            "decisions": tuple(_decision(d) for d in fields["decisions"]),
            "reread": tuple(fields["reread"]),
            "sums": tuple(fields["sums"]),
            "loops": tuple(_loop_plan(loop) for loop in fields["loops"]),
        }
    )


def _decision(fields: dict[str, Any]) -> RegionDecision:
    return RegionDecision(**{**fields, "nodes": tuple(fields["nodes"])})


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """What one part of a plan, other than recomputing, does for the peak."""

    technique: str
    """`"bits"`, `"sums"` or `"waits"`; see `EchoOptimizer`'s `without`."""
    count: int
    """How often it is used."""
    saved_bytes: int
    """By how much the predicted peak would be higher without it, all else being the same."""

    def __str__(self) -> str:
        return f"{self.technique}: {self.count} (saves {format_bytes(self.saved_bytes)})"


@dataclasses.dataclass(frozen=True, slots=True)
class PeakMemory:
    """The predicted peak of a step and what it is made of, in bytes."""

    total_bytes: int
    weight_bytes: int
    """Variables: weights and optimizer state."""
    residual_bytes: int
    """Forward tensors that wait for the backward pass."""
    workspace_bytes: int
    """All else: inputs, gradients, temporaries, what is being recomputed."""


@dataclasses.dataclass(frozen=True, slots=True)
class RecomputePlan:
    """Every region with its decision, and the predicted peak of the step without and with the plan.

    Example:

    ```python
    plan = optimizer.plan
    print(plan)
    assert tf_echo.RecomputePlan.from_json(plan.to_json()) == plan
    ```
    """

    policy: str
    decisions: tuple[RegionDecision, ...]
    before: PeakMemory
    after: PeakMemory
    batch_size: int | None
    """The batch size that bytes and peaks are given for, where the graph left it open.

    None where it was fixed.
    """
    sums: tuple[str, ...] = ()
    """Names of AddN ops of the backward pass that add up their terms one by one instead."""
    bits: tuple[PackedResidual, ...] = ()
    """Of which tensors one bit an element is kept."""
    waits: tuple[str, ...] = ()
    """Names of ops of the backward pass, made of forward values alone, that wait for the upstream
    gradient."""
    loops: tuple[LoopPlan, ...] = ()
    """The while loops whose gradients the step takes."""
    shares: tuple[Share, ...] = ()
    """Of the parts of the plan that are used what each saves at the peak."""
    note: str = ""
    """What the reader must know: why nothing is changed, which ops were kept whole."""
    name: str = ""
    """Which trace it belongs to."""

    @property
    def recomputed(self) -> tuple[RegionDecision, ...]:
        """The decisions that recompute."""
        return tuple(d for d in self.decisions if d.recompute)

    @property
    def ratio(self) -> float:
        """Predicted peak before over after."""
        return self.before.total_bytes / max(self.after.total_bytes, 1)

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.decisions, *self.bits, *self.shares, *self.loops)))

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "RecomputePlan":
        """The inverse of `to_json`.

        Raises:
            ValueError: the text is no plan.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            decisions = {
                "decisions": tuple(_decision(d) for d in fields["decisions"]),
                "bits": tuple(PackedResidual(**bits) for bits in fields["bits"]),
                "loops": tuple(_loop_plan(loop) for loop in fields["loops"]),
                "shares": tuple(Share(**share) for share in fields["shares"]),
            }
            peaks = {key: PeakMemory(**fields[key]) for key in ("before", "after")}
            names = {key: tuple(fields[key]) for key in ("sums", "waits")}
            return cls(**{**fields, **peaks, **names, **decisions})
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"`text` must be what `RecomputePlan.to_json` returned. Received: {text[:80]!r}"
            ) from error


def format_bytes(count: int) -> str:
    """Bytes for people, exact where they are a whole number of a unit: `"2 MiB"`, `"1.5 KiB"`."""
    for unit, size in (("GiB", 2**30), ("MiB", MIB), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"
