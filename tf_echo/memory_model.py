"""How much memory a train step needs, node by node.

The model runs the nodes in the order of TensorFlow's executor, see `executor_order`. Every output
is allocated when its node runs and freed when its last reader has run; an elementwise op writes its
result over an input that nobody else will read; views share their input's memory; variables are
resident, but an update that comes while somebody still holds an earlier read of the variable copies
it first.

Workspace inside kernels is that of TensorFlow's CPU kernels, see `workspaces`. Known gaps: cuDNN's
workspace is not modelled, nor what an allocator hands out beyond what is asked for.
"""

import collections
import dataclasses
from collections.abc import Sequence

from tf_echo.graph_view import GraphView, Node
from tf_echo.op_traits import Kind


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """Which node runs when, and what is allocated while it runs (bytes, variables and inputs not
    included).
    """

    order: tuple[int, ...]
    """Node ids in the order in which they run."""
    usage: tuple[int, ...]
    """Bytes allocated while each node of `order` runs."""
    born: tuple[int, ...]
    """For each tensor the step in which its memory is allocated; -1 if it has none of its own."""
    died: tuple[int, ...]
    """For each tensor the last step in which its memory is in use; -1 if it has none of its own."""
    sizes: tuple[int, ...]
    """Bytes of each tensor at the simulated batch size."""
    resident_bytes: int
    """Variables, constants and inputs of the step: there throughout."""

    @property
    def peak_step(self) -> int:
        """The first step in which the most memory is allocated."""
        return max(range(len(self.usage)), key=self.usage.__getitem__, default=0)

    @property
    def peak_bytes(self) -> int:
        """The most that is allocated at once, variables and inputs included."""
        return self.resident_bytes + max(self.usage, default=0)

    def live_at(self, step: int) -> list[int]:
        """Ids of the tensors whose memory is in use at a step, largest first."""
        live = [t for t, born in enumerate(self.born) if 0 <= born <= step <= self.died[t]]
        return sorted(live, key=lambda t: (-self.sizes[t], t))


_UPDATES = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply")
_WRITES_OVER_INPUT = {
    "Softmax": 0,
    "LogSoftmax": 0,
    "SoftmaxCrossEntropyWithLogits": 1,
    "SparseSoftmaxCrossEntropyWithLogits": 1,
}
"""Ops that are not elementwise, with the output that they write over an input that dies."""


def _is_update(op: str) -> bool:
    return op.startswith(_UPDATES)


def simulate(view: GraphView, scale: float = 1.0) -> Timeline:
    """Runs a view on the model of the executor.

    Args:
        view: the train step.
        scale: factor on every tensor that grows with the batch: 4.0 simulates four times the view's
            batch size.

    Returns:
        The timeline. The time taken is linear in the number of nodes.
    """
    return _Simulation(view, scale).run()


class _Simulation:
    """The state of one simulated step."""

    def __init__(self, view: GraphView, scale: float):
        self.view, self.scale = view, scale
        self.roots = view.buffers
        self.sizes = [int(t.nbytes * scale) if t.scales else t.nbytes for t in view.tensors]
        self.uses = [0] * len(view.tensors)
        for node in view.nodes:
            for tensor in node.inputs:
                self.uses[self.roots[tensor]] += 1
        self.owned = [True] * len(view.tensors)
        self.loop_work = frozenset(
            tensor
            for loop in view.loops
            for tensor in (*loop.kept, *loop.forward_work, *loop.backward_work)
        )
        self.handles: dict[int, int] = {}
        """From the memory that a variable's read returns to the variable's handle."""
        self.reads: collections.Counter[int] = collections.Counter()
        self.copies: collections.Counter[int] = collections.Counter()
        self.current, self.inputs_bytes = 0, 0
        self.usage: list[int] = []
        self.born = [-1] * len(view.tensors)
        self.died = [-1] * len(view.tensors)
        for node in view.nodes:
            if view.kinds[node.id] is Kind.SOURCE:
                self._note_source(node)

    def _note_source(self, node: Node) -> None:
        for tensor in node.outputs:
            self.owned[tensor] = False
            if node.op == "ReadVariableOp":
                handle = node.inputs[0]
                self.handles[tensor] = handle
                self.reads[handle] += self.uses[tensor]
            else:
                self.inputs_bytes += self.sizes[tensor]

    def run(self) -> Timeline:
        order = self.view.execution_order
        for node in order:
            self._run_node(self.view.nodes[node])
        for tensor, born in enumerate(self.born):
            if born >= 0 and self.died[tensor] < 0:
                self.died[tensor] = len(order) - 1
        resident = self.view.weight_bytes + self.inputs_bytes
        return Timeline(
            order,
            tuple(self.usage),
            tuple(self.born),
            tuple(self.died),
            tuple(self.sizes),
            resident,
        )

    def _run_node(self, node: Node) -> None:
        step = len(self.usage)
        kind = self.view.kinds[node.id]
        if _is_update(node.op):
            self._copy_before_write(node)
        elif kind is not Kind.VIEW and kind is not Kind.SOURCE:
            self._allocate(node, step)
        scaling, fixed = node.workspace
        self.usage.append(self.current + int(scaling * self.scale) + fixed)
        for tensor in node.inputs:
            self._release(self.roots[tensor], step)
        for tensor in node.outputs:
            root = self.roots[tensor]
            if not self.uses[root] and self.born[root] == step:
                self._free(root, step)

    def _allocate(self, node: Node, step: int) -> None:
        written = self._written_over(node)
        for tensor in node.outputs:
            reused = self._dying_input(written.get(tensor, ()), tensor)
            self.born[tensor] = step
            if reused is not None:
                self.owned[reused] = False
                self.died[reused] = step - 1
            else:
                self.current += self.sizes[tensor]

    def _written_over(self, node: Node) -> dict[int, Sequence[int]]:
        """For outputs the inputs whose memory they may take, if nobody else will read those."""
        kind = self.view.kinds[node.id]
        if node.op in ("While", "StatelessWhile"):
            # Loops replace the items of their lists one by one.
            pairs = zip(node.outputs, node.inputs, strict=False)
            lists = (pair for pair in pairs if self.view.tensors[pair[0]].dtype == "variant")
            return {output: (given,) for output, given in lists if output not in self.loop_work}
        place = 0 if kind is Kind.ELEMENTWISE else _WRITES_OVER_INPUT.get(node.op, -1)
        return {o: node.inputs for p, o in enumerate(node.outputs) if p == place}

    def _dying_input(self, inputs: Sequence[int], output: int) -> int | None:
        tensors = self.view.tensors
        for tensor in inputs:
            root = self.roots[tensor]
            same = (
                self.sizes[root] == self.sizes[output]
                and tensors[root].dtype == tensors[output].dtype
            )
            if same and self.owned[root] and self.uses[root] == 1 and self.born[root] >= 0:
                return root
        return None

    def _release(self, root: int, step: int) -> None:
        self.uses[root] -= 1
        if root in self.handles:
            handle = self.handles[root]
            self.reads[handle] -= 1
            if not self.reads[handle]:
                self.current -= self.copies.pop(handle, 0)
        if not self.uses[root] and self.owned[root]:
            self._free(root, step)

    def _free(self, root: int, step: int) -> None:
        if self.born[root] >= 0:
            self.current -= self.sizes[root]
            self.died[root] = step
            self.owned[root] = False

    def _copy_before_write(self, node: Node) -> None:
        handle = node.inputs[0] if node.inputs else -1
        if self.reads[handle] > 0 and handle not in self.copies:
            size = max(
                (self.sizes[root] for root, of in self.handles.items() if of == handle), default=0
            )
            self.copies[handle] = size
            self.current += size
