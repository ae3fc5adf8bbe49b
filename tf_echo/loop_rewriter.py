"""Carry out the plan of a loop: the gradient's body makes again what the forward body no longer
keeps.

Both bodies are graphs of their own, so nothing can merge a copy with its original. Copies wait for
the upstream gradient: TensorFlow runs many iterations of a loop side by side where it can.
"""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from tf_echo import loop_evaluation, loop_internals, op_traits, regions, summing, tf_internals
from tf_echo.graph_view import Node
from tf_echo.op_traits import Kind
from tf_echo.plan import LoopPlan, RegionDecision
from tf_echo.tracer import LoopTrace


def rewrite_loop(trace: LoopTrace, plan: LoopPlan) -> None:
    """Applies the plan of a loop to the loop and its gradient.

    Args:
        trace: the trace of the loop that the plan was made for.
        plan: any plan whose nodes exist in the body.
    """
    if plan.in_order:
        for loop in (trace.forward, trace.backward):
            loop_internals.run_in_order(loop)
    if not plan.recompute and not any(map(_does_anything, plan.loops)):
        return
    editor = loop_internals.LoopEditor(trace.forward, trace.backward, trace.lists)
    inner = {loop.forward.name: loop for loop in trace.body.loops}
    for loop_plan in plan.loops:
        rewrite_loop(inner[loop_plan.loop], loop_plan)
    rewriting = _Rewriting(trace, editor, plan)
    for decision in plan.recomputed:
        rewriting.recompute(decision)
    rewriting.read_again()
    summing.replace_sums(trace.body, plan.sums)
    editor.drop_unread()
    editor.finish()


def _does_anything(plan: LoopPlan) -> bool:
    return plan.recompute or plan.in_order or any(map(_does_anything, plan.loops))


class _Rewriting:
    """A loop while its gradient's body is being changed."""

    def __init__(self, trace: LoopTrace, editor: loop_internals.LoopEditor, plan: LoopPlan):
        self.trace, self.editor, self.compiled = trace.body, editor, trace.loop.compiled
        self.view = loop_evaluation.planned(trace.body.view, plan.loops)
        self.graph = trace.body.graph
        self.reread = frozenset(self.view.tensor_named(name) for name in plan.reread)
        self.roots = frozenset(self.view.buffers[t] for t in self.reread)
        self.again: dict[int, tf.Tensor] = {}
        self.gates: dict[int, tf.Operation] = {}

    def recompute(self, decision: RegionDecision) -> None:
        """Adds copies of a region's ops and lets the gradient read them."""
        nodes = [self.view.node(name) for name in decision.nodes]
        gate = self._gate(nodes, self.view.tensor_named(decision.gate))
        copies: dict[int, tf.Tensor] = {}
        for node in nodes:
            operation = self.trace.operations[node.id]
            inputs = [copies[t] if t in copies else self._input(t, copies) for t in node.inputs]
            outputs = self._copy(operation, inputs)
            if gate is not None and copies.keys().isdisjoint(node.inputs):
                tf_internals.wait_for(outputs[0].op, gate)
            copies.update(zip(node.outputs, outputs, strict=True))
        for tensor, copied in copies.items():
            self._redirect(tensor, copied)

    def read_again(self) -> None:
        """Lets the gradient read variables, and parts of the loop's inputs, by itself."""
        for tensor in sorted(self.reread):
            self._redirect(tensor, self._input(tensor, {}))

    def _input(self, tensor: int, copies: Mapping[int, tf.Tensor]) -> tf.Tensor:
        """What a tensor of the forward body is in the gradient's body: kept or read again.

        Args:
            tensor: the tensor.
            copies: what a region makes again; shapes are those of these.
        """
        view, operation = self.view, self.trace.operations[self.view.tensors[tensor].node]
        node = view.nodes[view.tensors[tensor].node]
        again = view.buffers[tensor] in self.roots or self._is_shape(node)
        if not again or not node.inputs:
            return self.editor.keep(self.trace.tensor(tensor))
        if tensor in self.again:
            return self.again[tensor]
        inputs = [copies[t] if t in copies else self._input(t, copies) for t in node.inputs]
        made = dict(zip(node.outputs, self._copy(operation, inputs), strict=True))
        if copies.keys().isdisjoint(node.inputs):
            self.again.update(made)
        return made[tensor]

    def _is_shape(self, node: Node) -> bool:
        """Whether XLA must know what the node makes when it compiles, so that no list may hold
        it.
        """
        known = self.view.kinds[node.id] is Kind.METADATA or op_traits.is_replayable(node.op)
        return self.compiled and known and regions.is_shape_arithmetic(self.view, node)

    def _copy(self, operation: tf.Operation, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        with self.graph.as_default(), tf.control_dependencies(None), tf.name_scope(""):
            name = f"{operation.name}/recompute"
            outputs = tf_internals.copy_operation(self.graph, operation, inputs, name)
            tf_internals.place_like(outputs, operation)
        return outputs

    def _gate(self, nodes: Sequence[Node], tensor: int) -> tf.Operation | None:
        """An operation that runs when the gate is there.

        None if that is from the start, or if something needs a copy before, if only its shape.
        """
        readers = (r for n in nodes for t in n.outputs for r in self.view.consumers[t])
        first = min((r for r in readers if self.view.nodes[r].backward), default=0)
        gate = self.view.nodes[self.view.tensors[tensor].node]
        if not gate.backward or gate.id >= first:
            return None
        if tensor not in self.gates:
            # Arguments of a function cannot be waited for.
            with self.graph.as_default(), tf.control_dependencies(None):
                self.gates[tensor] = tf.identity(self.trace.tensor(tensor)).op
        return self.gates[tensor]

    def _redirect(self, tensor: int, other: tf.Tensor) -> None:
        for reader in sorted(set(self.view.consumers[tensor])):
            node = self.view.nodes[reader]
            if node.backward:
                for operation, place in self._places(reader, tensor):
                    tf_internals.replace_input(operation, place, other)

    def _places(self, reader: int, tensor: int) -> list[tuple[tf.Operation, int]]:
        """Where a node of the gradient's body reads a tensor of the forward body."""
        found = self.trace.places(reader, tensor)
        if found or tensor in self.trace.view.nodes[reader].inputs:
            return found
        # A loop in the body that reads it since that loop was changed.
        kept = self.editor.keep(self.trace.tensor(tensor))
        passing = [t.op for t in self.trace.operations[reader].inputs if t.op.type == "Identity"]
        return [(op, 0) for op in passing if op.inputs[0] is kept]
