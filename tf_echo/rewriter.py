"""Carry out a plan in the TensorFlow graph that is being traced.

The forward pass stays as it is. For each recomputed region the ops of the plan are added once more,
reading the forward tensors that are kept, tied to the region's gate; then every backward op that
reads a recomputed tensor is pointed at the copy, so that the original dies in the forward pass.
Gradients are those that TensorFlow took of the untouched graph: no gradient function is called
here, which is why custom gradients, several tapes and gradients of inputs or activations need no
care.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tf_echo import (
    early,
    gating,
    loop_evaluation,
    loop_rewriter,
    packer,
    packing,
    scheduling,
    summing,
    tf_internals,
)
from tf_echo.gates import Gate
from tf_echo.graph_view import GraphView
from tf_echo.plan import LoopPlan, PackedResidual, RecomputePlan, RegionDecision
from tf_echo.tracer import LoopTrace, Trace


class PlanMismatchError(ValueError):
    """A plan that is not for this graph."""


def rewrite(trace: Trace, plan: RecomputePlan) -> None:
    """Applies a plan to the graph of a trace.

    Args:
        trace: the trace that the plan was made for.
        plan: any plan whose nodes and gates exist in the trace, also one written by hand. The empty
            plan changes nothing.

    Raises:
        PlanMismatchError: the plan names a node or a gate that the trace does not hold, or one that
            may not be recomputed. The graph is then unchanged.
    """
    trace = check(trace, plan)
    for loop_plan, loop in _loops(trace, plan.loops):
        loop_rewriter.rewrite_loop(loop, loop_plan)
    if not changes(plan):
        return
    # What is left out of the view must not go on reading what is recomputed for the rest.
    for tensor, other in trace.left_out:
        summing.read_instead(tensor, other)
    totals = summing.replace_sums(trace, plan.sums)
    known = len(trace.graph.get_operations())
    _recompute(trace, plan, totals)
    added = frozenset(trace.graph.get_operations()[known:])
    for residual in plan.bits:
        packer.keep_bits(trace, residual, _gradient(trace, residual.gate, totals), added)
    for first, second in scheduling.put_offs(trace.view) + early.pairs(trace.view, plan.waits):
        tf_internals.wait_for(trace.operations[second], _operation(trace, first, totals))


def changes(plan: RecomputePlan) -> bool:
    """Whether a plan changes anything but loops."""
    return any((plan.recomputed, plan.sums, plan.bits, plan.waits))


def check(trace: Trace, plan: RecomputePlan) -> Trace:
    """Raises `PlanMismatchError` where a plan is not for a trace; see `rewrite`.

    Returns:
        The trace with what the gradients of its loops read when the plan is carried out.
    """
    for loop_plan, loop in _loops(trace, plan.loops):
        _check_loop(loop, loop_plan)
    untouched = trace
    trace = dataclasses.replace(trace, view=loop_evaluation.planned(trace.view, plan.loops))
    for decision in plan.recomputed:
        _check(trace, decision)
    _check_sums(trace, plan.sums)
    _check_waits(untouched, plan.waits)
    for residual in plan.bits:
        _check_bits(trace, residual, plan.recomputed)
    return trace


def _loops(trace: Trace, plans: Sequence[LoopPlan]) -> list[tuple[LoopPlan, LoopTrace]]:
    """Plans of loops with the loops that they are for."""
    loops = {loop.forward.name: loop for loop in trace.loops}
    for plan in plans:
        if plan.loop not in loops:
            raise PlanMismatchError(
                f"The plan names {plan.loop!r}, which is no loop of this graph."
            )
    return [(plan, loops[plan.loop]) for plan in plans]


def _check_loop(loop: LoopTrace, plan: LoopPlan) -> None:
    for decision in plan.recomputed:
        _check(loop.body, decision)
    _check_sums(loop.body, plan.sums)
    for name in plan.reread:
        _check_read_again(loop, name)
    for inner_plan, inner in _loops(loop.body, plan.loops):
        _check_loop(inner, inner_plan)


def _check_read_again(loop: LoopTrace, name: str) -> None:
    view = loop.body.view
    try:
        tensor = view.tensor_named(name)
    except KeyError:
        tensor = None
    changed = loop.loop.changed
    if tensor is None or not view.is_source(tensor) or _root_name(view, tensor) in changed:
        raise PlanMismatchError(
            f"The plan reads {name!r} again in the gradient of loop {loop.forward.name!r}, which "
            "is no variable or input of it that stays as it is."
        )


def _root_name(view: GraphView, tensor: int) -> str:
    return view.nodes[view.tensors[view.buffers[tensor]].node].name


def _recompute(trace: Trace, plan: RecomputePlan, totals: dict[int, tf.Tensor]) -> None:
    """Rewrites all regions; they wait for sums that were replaced rather than for the AddN."""
    firsts = {d.region: min(_readers(trace, d), default=None) for d in plan.recomputed}
    waits = scheduling.waits(trace.view, sorted({f for f in firsts.values() if f is not None}))
    for decision in plan.recomputed:
        start = firsts[decision.region]
        if start is not None:
            ready = [_operation(trace, n, totals) for n in waits[start]]
            gate = Gate(_gradient(trace, decision.gate, totals), ready)
            _Region(trace, decision, gate).rewrite()


def _operation(trace: Trace, node: int, totals: Mapping[int, tf.Tensor]) -> tf.Operation:
    """The operation of a node; where it is a sum that was replaced, what replaces it."""
    return totals[node].op if node in totals else trace.operations[node]


def _gradient(trace: Trace, name: str, totals: Mapping[int, tf.Tensor]) -> tf.Tensor:
    """The gate of that name; where it is a sum that was replaced, what replaces it."""
    number = trace.view.tensor_named(name)
    total = totals.get(trace.view.tensors[number].node)
    return trace.tensor(number) if total is None else total


def _check_sums(trace: Trace, names: Sequence[str]) -> None:
    for name in names:
        if name not in trace.view.by_name or trace.view.node(name).op != "AddN":
            raise PlanMismatchError(f"The plan names {name!r}, which is no AddN of this graph.")


def _check_waits(trace: Trace, names: Sequence[str]) -> None:
    known = early.upstream(trace.view)
    for name in names:
        if trace.view.by_name.get(name) not in known:
            raise PlanMismatchError(
                f"The plan lets {name!r} wait, which is no op of this graph that gradients make of "
                "forward values alone."
            )


def _readers(trace: Trace, decision: RegionDecision) -> list[int]:
    """The backward nodes that read what a region recomputes."""
    view = trace.view
    replayed = [t for name in decision.nodes for t in view.node(name).outputs]
    return [r for t in replayed for r in gating.backward_readers(view, t)]


def _check(trace: Trace, decision: RegionDecision) -> None:
    view = trace.view
    for name in decision.nodes:
        if name not in view.by_name:
            raise PlanMismatchError(
                f"Region {decision.region} of the plan recomputes op {name!r}, which this graph "
                "does not hold."
            )
        node = view.node(name)
        if node.backward or not gating.may_replay(view, node):
            raise PlanMismatchError(
                f"Region {decision.region} of the plan recomputes op {name!r} of type {node.op}, "
                "which may not run twice."
            )
    try:
        gate = view.tensor_named(decision.gate)
    except KeyError:
        raise PlanMismatchError(
            f"Region {decision.region} of the plan waits for {decision.gate!r}, which this graph "
            "does not hold."
        ) from None
    readers = _readers(trace, decision)
    producer = view.nodes[view.tensors[gate].node]
    if readers and producer.backward and producer.id >= min(readers):
        raise PlanMismatchError(
            f"Region {decision.region} of the plan waits for {decision.gate!r}, which itself "
            "needs what the region recomputes."
        )


def _check_bits(
    trace: Trace, residual: PackedResidual, recomputed: Sequence[RegionDecision]
) -> None:
    view = trace.view
    try:
        tensor, gate = (view.tensor_named(name) for name in (residual.tensor, residual.gate))
    except KeyError as error:
        raise PlanMismatchError(
            f"The plan keeps bits of {residual.tensor!r} and waits for {residual.gate!r}. This "
            f"graph does not hold {error.args[0]!r}."
        ) from None
    maker = view.nodes[view.tensors[tensor].node].name
    made = any(maker in d.nodes for d in recomputed)
    copying = [
        d
        for d in recomputed
        if maker not in d.nodes and any(tensor in view.node(n).inputs for n in d.nodes)
    ]
    test = packing.test_of(view, tensor)
    if test != residual.test or ((made or copying) and test != "x"):
        raise PlanMismatchError(
            f"The plan keeps of {residual.tensor!r} whether {residual.test}. The backward pass of "
            "this graph asks for something else."
        )
    readers = [] if made else gating.backward_readers(view, tensor)
    readers += [r for decision in copying for r in _readers(trace, decision)]
    if not readers:
        raise PlanMismatchError(
            f"The plan keeps bits of {residual.tensor!r}, which nothing reads in the backward pass "
            "when its regions are recomputed."
        )
    if view.tensors[gate].node >= min(readers):
        raise PlanMismatchError(
            f"The plan unpacks the bits of {residual.tensor!r} after {residual.gate!r}, which "
            "itself needs them."
        )


class _Region:
    """One region while it is being copied."""

    def __init__(self, trace: Trace, decision: RegionDecision, gate: Gate):
        self.trace, self.gate = trace, gate
        self.graph = trace.graph
        self.nodes = [trace.view.node(name) for name in decision.nodes]
        self.copies: dict[int, tf.Tensor] = {}

    def rewrite(self) -> None:
        """Adds the copies and points the backward ops at them."""
        view = self.trace.view
        with self.graph.as_default(), tf.control_dependencies(None), tf.name_scope(""):
            own = {
                tensor: self._tied(tensor)
                for tensor in sorted(gating.guarded_tensors(view, self.nodes))
            }
            for node in self.nodes:
                inputs = [own[t] if t in own else self.trace.tensor(t) for t in node.inputs]
                operation = self.trace.operations[node.id]
                outputs = tf_internals.copy_operation(
                    self.graph, operation, inputs, f"{node.name}/recompute"
                )
                tf_internals.place_like(outputs, operation)
                own.update(zip(node.outputs, outputs, strict=True))
                self.copies.update(zip(node.outputs, outputs, strict=True))
        for tensor in sorted(self.copies):
            for reader in sorted(set(gating.backward_readers(view, tensor))):
                self._redirect(reader, tensor)

    def _redirect(self, reader: int, tensor: int) -> None:
        for operation, place in self.trace.places(reader, tensor):
            tf_internals.replace_input(operation, place, self.copies[tensor])

    def _tied(self, tensor: int) -> tf.Tensor:
        source = self.trace.tensor(tensor)
        with tf.device(source.op.device or None):
            return self.gate.tie(source)


def copies_of(graph: tf.Graph) -> Sequence[tf.Operation]:
    """The operations that rewriting added as copies."""
    return [op for op in graph.get_operations() if "/recompute" in op.name]
