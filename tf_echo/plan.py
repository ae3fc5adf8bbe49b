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
    untied: tuple[str, ...] = ()
    """Names of IdentityN ops of the backward pass (Keras passes all gradients through one). Their
    readers read past them, so that each update runs as soon as its gradient is there instead of
    when the last one is."""
    sums: tuple[str, ...] = ()
    """Names of AddN ops of the backward pass that add up their terms one by one instead."""
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
        return "\n".join(map(str, self.decisions))

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
            decisions = [
                RegionDecision(**{**d, "nodes": tuple(d["nodes"])}) for d in fields["decisions"]
            ]
            peaks = {key: PeakMemory(**fields[key]) for key in ("before", "after")}
            names = {key: tuple(fields[key]) for key in ("untied", "sums")}
            return cls(**{**fields, **peaks, **names, "decisions": tuple(decisions)})
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
