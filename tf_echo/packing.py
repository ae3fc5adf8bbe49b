"""Keep one bit of an element where the backward pass asks for no more (Echo, section IV-B).

The gradients of ReLU, ReLU6 and leaky ReLU ask of each element whether it lies in a range, and a
dropout mask is a byte an element. Where nothing else reads such a tensor after the forward pass,
its bits are kept, eight of them in a byte, and unpacked when the upstream gradient is there. What
stands in for a number is in the range if it was, else zero: the gradient ops take it as they would
the number itself.

Eight booleans are one 64-bit word; a product gathers their bits in its highest byte, and another
one spreads them again, so that packing takes about as long as reading the tensor once.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from tf_echo import gating
from tf_echo.graph_view import GraphView, Node, Tensor, ViewBuilder
from tf_echo.op_traits import Kind

MIN_ELEMENTS = 1 << 10
"""Fewer are not worth the ops, unless they grow with the batch."""

_TESTS = {"ReluGrad": "x > 0", "LeakyReluGrad": "x > 0", "Relu6Grad": "0 < x < 6"}
"""By op of the backward pass what it asks of its second input."""
_FEATURES = 1
_WIDTHS = {"bool": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of an element, by dtype of what may be packed."""

_Part = tuple[str, str, int, str]
"""A node of packing: suffix of its name, op, bytes for eight elements, dtype."""
_MASK: dict[str, tuple[_Part, ...]] = {
    "x": (),
    "x > 0": (("positive", "Greater", 8, "bool"),),
    "0 < x < 6": (("between", "Greater", 8, "bool"), ("below", "LogicalAnd", 8, "bool")),
}
_PACK: tuple[_Part, ...] = (
    ("bytes", "Cast", 8, "uint8"),
    ("gathered", "Mul", 8, "uint64"),
    ("shifted", "RightShift", 8, "uint64"),
    ("bits", "Cast", 1, "uint8"),
)
_UNPACK: tuple[_Part, ...] = (
    ("word", "Cast", 8, "uint64"),
    ("spread", "Mul", 8, "uint64"),
    ("chosen", "BitwiseAnd", 8, "uint64"),
)


class Candidate(NamedTuple):
    """A residual of which one bit is enough. Tensors are ids of one view."""

    tensor: int
    test: str
    """What the bit says; see `PackedResidual.test`."""
    gate: int
    """The gradient that unpacking waits for."""


@dataclasses.dataclass(frozen=True)
class Packed:
    """A view with some residuals packed."""

    view: GraphView
    tensors: tuple[int, ...]
    """For each tensor of `view` the one of the old view that it is; -1 where it is new."""
    nodes: tuple[int, ...]
    """The same for nodes."""


def kept_bytes(tensor: Tensor) -> int:
    """Bytes that it takes to keep a tensor for the backward pass if booleans are packed."""
    packs = tensor.dtype == "bool" and (tensor.scales or tensor.nbytes >= MIN_ELEMENTS)
    return bits_bytes(tensor) if packs else tensor.nbytes


def bits_bytes(tensor: Tensor) -> int:
    """Bytes of one bit for each element of a tensor."""
    return -(-tensor.nbytes // _WIDTHS[tensor.dtype] // 8)


def find(
    view: GraphView,
    gates: Mapping[int, int] | None = None,
    usable: Collection[int] | None = None,
) -> list[Candidate]:
    """The residuals of which one bit is enough.

    Args:
        view: a step, perhaps with what is recomputed in it.
        gates: for each node that is recomputed the gradient that it waits for.
        usable: the gradients that may be waited for; by default any.
    """
    gates = gates or {}
    of_root: dict[int, list[int]] = {}
    for residual in sorted(view.residuals):
        if gating.backward_readers(view, residual):
            of_root.setdefault(view.buffers[residual], []).append(residual)
    found, late = [], gating.late_nodes(view)
    for root, tensors in of_root.items():
        tensor = view.tensors[tensors[0]]
        if len(tensors) > 1 or not _is_packable(view, tensor) or view.is_source(root):
            continue
        test, gate = test_of(view, tensor.id), _gate(view, tensor, gates, late, usable)
        # What runs again may ask for more than its gradient does.
        copied = any(reader in gates for reader in gating.backward_readers(view, tensor.id))
        if test is not None and gate is not None and not (copied and test != "x"):
            found.append(Candidate(tensor.id, test, gate))
    return found


def test_of(view: GraphView, tensor: int) -> str | None:
    """What all that read a tensor in the backward pass ask of an element, if that is one bit."""
    readers = [view.nodes[r] for r in gating.backward_readers(view, tensor)]
    if any(view.kinds[r.id] is Kind.CONTROL_FLOW for r in readers):
        return None
    if view.tensors[tensor].dtype == "bool":
        return "x"
    tests = {_TESTS.get(reader.op) for reader in readers}
    places = {p for reader in readers for p, t in enumerate(reader.inputs) if t == tensor}
    return tests.pop() if len(tests) == 1 and places == {_FEATURES} else None


def _is_packable(view: GraphView, tensor: Tensor) -> bool:
    width = _WIDTHS.get(tensor.dtype)
    return (
        width is not None
        and tensor.known
        and (tensor.scales or tensor.nbytes // width >= MIN_ELEMENTS)
        and view.kinds[tensor.node] is not Kind.CONTROL_FLOW
    )


def _gate(
    view: GraphView,
    tensor: Tensor,
    gates: Mapping[int, int],
    late: Sequence[bool],
    usable: Collection[int] | None,
) -> int | None:
    """A gradient that is there before the first reader, and not much earlier."""
    first = min(gating.backward_readers(view, tensor.id))
    if first in gates:
        return gates[first]
    near = [first, *(c for t in view.nodes[first].outputs for c in view.consumers[t])]
    found = [
        (view.tensors[t].node, t)
        for node in near
        for t in view.nodes[node].inputs
        if view.tensors[t].node < first
        and late[view.tensors[t].node]
        and view.tensors[t].node not in gates
        and (usable is None or t in usable)
        and view.tensors[t].dtype in gating.GRADIENTS
    ]
    return max(found)[1] if found else None


def pack(view: GraphView, residuals: Sequence[Candidate]) -> Packed:
    """The view as it is with some residuals packed.

    Whatever reads one in the forward pass waits until it is packed: else TensorFlow's executor puts
    packing off, and what is to be released is held meanwhile.
    """
    return _Packing(view, residuals).run()


class _Packing:
    """The state of one `pack`."""

    def __init__(self, view: GraphView, residuals: Sequence[Candidate]):
        self.view, self.builder = view, ViewBuilder()
        self.residuals = {r.tensor: r for r in residuals}
        self.due: dict[int, list[Candidate]] = {}
        for residual in residuals:
            first = min(gating.backward_readers(view, residual.tensor))
            self.due.setdefault(first, []).append(residual)
        self.bits: dict[int, int] = {}
        self.unpacked: dict[int, int] = {}
        self.renamed: dict[int, int] = {}
        self.places: dict[int, int] = {}
        self.tensors: list[int] = []
        self.nodes: list[int] = []

    def run(self) -> Packed:
        view = self.view
        for node in view.nodes:
            for residual in self.due.get(node.id, ()):
                self._unpack(residual)
            inputs = [self._source(node, t) for t in node.inputs]
            control = [self.places[c] for c in node.control_inputs]
            if not node.backward and gating.reads_values(view, node):
                packed = {self.bits[t] for t in node.inputs if t in self.bits}
                control += sorted(self.builder.tensors[b].node for b in packed)
            sizes = [view.tensors[t][3:] for t in node.outputs]
            new = self.builder.add(
                node.name,
                node.op,
                inputs,
                sizes,
                control,
                node.backward,
                node.workspace,
                node.created,
            )
            self.places[node.id] = new.id
            self.renamed.update(zip(node.outputs, new.outputs, strict=True))
            self.tensors.extend(node.outputs)
            self.nodes.append(node.id)
            for tensor in node.outputs:
                if tensor in self.residuals:
                    self._pack(self.residuals[tensor])
        after = dataclasses.replace(
            view,
            nodes=tuple(self.builder.nodes),
            tensors=tuple(self.builder.tensors),
            loss=self.renamed[view.loss],
            seed=None if view.seed is None else self.renamed[view.seed],
        )
        return Packed(after, tuple(self.tensors), tuple(self.nodes))

    def _source(self, node: Node, tensor: int) -> int:
        if node.backward and tensor in self.unpacked and gating.reads_values(self.view, node):
            return self.unpacked[tensor]
        return self.renamed[tensor]

    def _pack(self, residual: Candidate) -> None:
        parts = (*_MASK[residual.test], *_PACK)
        start = self.renamed[residual.tensor]
        self.bits[residual.tensor] = self._add(residual, parts, start, (), backward=False)

    def _unpack(self, residual: Candidate) -> None:
        old = self.view.tensors[residual.tensor]
        op = "NotEqual" if old.dtype == "bool" else "Cast"
        parts = (*_UNPACK, ("unpacked", op, 8 * _WIDTHS[old.dtype], old.dtype))
        gate = self.builder.tensors[self.renamed[residual.gate]].node
        start = self.bits[residual.tensor]
        self.unpacked[residual.tensor] = self._add(residual, parts, start, (gate,), backward=True)

    def _add(
        self,
        residual: Candidate,
        parts: Sequence[_Part],
        tensor: int,
        waits: Sequence[int],
        backward: bool,
    ) -> int:
        """Adds a chain of nodes, each of which reads the one before, and returns its end."""
        old = self.view.tensors[residual.tensor]
        scope = self.view.tensor_name(residual.tensor).replace(":", "_")
        for suffix, op, width, dtype in parts:
            size = (bits_bytes(old) * width, dtype, old.scales, old.known)
            node = self.builder.add(f"{scope}/{suffix}", op, [tensor], [size], waits, backward)
            tensor, waits = node.outputs[0], ()
            self.tensors.append(-1)
            self.nodes.append(-1)
        return tensor
