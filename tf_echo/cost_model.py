"""What recomputing costs in time.

A cost model is any object with `seconds(view, node)`. Plans weigh bytes against seconds only
relative to one another, so that a rough model gives good plans; the seconds in the report are as
good as the model.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, Self

from tf_echo import op_traits
from tf_echo.graph_view import GraphView, Node


class CostModel(Protocol):
    """Says how long one node takes."""

    def seconds(self, view: GraphView, node: Node) -> float:
        """Seconds that running `node` once takes."""


@dataclasses.dataclass(frozen=True)
class _Configurable:
    """Lets Keras save a cost model with the optimizer that uses it."""

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """The inverse of `get_config`."""
        return cls(**config)


@dataclasses.dataclass(frozen=True)
class UnitCost(_Configurable):
    """Every op takes one second, views none. Makes tests exact."""

    def seconds(self, view: GraphView, node: Node) -> float:
        """1.0, or 0.0 for a view."""
        return 0.0 if op_traits.is_view(node.op) else 1.0


@dataclasses.dataclass(frozen=True)
class RooflineCost(_Configurable):
    """Every op takes as long as moving its bytes, times a factor for its kind, plus a fixed
    overhead.

    Args:
        bytes_per_second: memory bandwidth of the device. The default suits two CPU cores; a
            data-centre GPU has about 2e12.
        overhead_seconds: time to launch one op.
    """

    bytes_per_second: float = 1e10
    overhead_seconds: float = 3e-6

    def __post_init__(self) -> None:
        if self.bytes_per_second <= 0 or self.overhead_seconds < 0:
            raise ValueError(
                "`bytes_per_second` must be positive and `overhead_seconds` must not be "
                "negative. Received: "
                f"bytes_per_second={self.bytes_per_second}, "
                f"overhead_seconds={self.overhead_seconds}"
            )

    def seconds(self, view: GraphView, node: Node) -> float:
        """Overhead plus passes x bytes / bandwidth."""
        passes = op_traits.traits_of(node.op).passes
        if op_traits.is_view(node.op):
            return 0.0
        return self.overhead_seconds + passes * moved_bytes(view, node) / self.bytes_per_second


@dataclasses.dataclass(frozen=True)
class MeasuredCost(_Configurable):
    """Seconds per byte as timed on the device; see `tf_echo.measure_costs`.

    Args:
        seconds_per_byte: by op type.
        overhead_seconds: time to launch one op.
        fallback: asked for op types that were not timed.
    """

    seconds_per_byte: Mapping[str, float]
    overhead_seconds: float
    fallback: RooflineCost = dataclasses.field(default_factory=RooflineCost)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """The inverse of `get_config`."""
        return cls(**{**config, "fallback": RooflineCost(**config["fallback"])})

    def seconds(self, view: GraphView, node: Node) -> float:
        """Overhead plus bytes x measured seconds per byte."""
        rate = self.seconds_per_byte.get(node.op)
        if rate is None:
            return self.fallback.seconds(view, node)
        return self.overhead_seconds + rate * moved_bytes(view, node)


def moved_bytes(view: GraphView, node: Node) -> int:
    """Bytes that a node reads and writes."""
    tensors = view.tensors
    return sum(tensors[t].nbytes for t in (*node.inputs, *node.outputs))
