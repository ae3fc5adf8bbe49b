"""From the TensorFlow graph that is being traced to a `GraphView`.

When the optimizer is called the graph holds the forward pass, the gradients and the optimizer's
updates: everything whose memory is to be planned, so nothing has to be guessed. Forward and
backward are told apart by reachability: forward is what the loss depends on, backward is all the
rest that leads to the gradients or follows from them.
"""

import dataclasses
import types
from collections.abc import Callable, Iterable, Mapping, Sequence

import tensorflow as tf

from tf_echo import executor_order, grappler_order, loop_internals, op_traits, tf_internals
from tf_echo.graph_view import GraphView
from tf_echo.grappler_order import has_effects
from tf_echo.nominal_shapes import NominalShapes
from tf_echo.op_traits import Kind, traits_of
from tf_echo.tracer import Trace, Tracer, in_order

_ASKED_NODES = 20_000
"""Above this size Grappler is not asked for the order: it would be at work for about as long as the
first step takes."""
NOMINAL_BATCH_SIZE = 32
"""Taken for an open batch size while sizes are worked out; plans are judged at a multiple of it."""


def flat_gradients(gradients: Iterable[object]) -> list[tf.Tensor]:
    """The tensors behind gradients; None has none, IndexedSlices have two or three."""
    present = [g for g in gradients if g is not None]
    return [t for t in tf.nest.flatten(present, expand_composites=True) if tf.is_symbolic_tensor(t)]


def trace_step(
    losses: Sequence[tf.Tensor],
    gradients: Sequence[tf.Tensor],
    batch_size: int | None = None,
) -> Trace:
    """Takes the view of one train step.

    Args:
        losses: the losses that were differentiated, in the graph that is being traced.
        gradients: their gradients, in the same graph.
        batch_size: nominal size of an open batch dimension; `NOMINAL_BATCH_SIZE` by default.

    Returns:
        The trace. Its time is linear in the number of operations.
    """
    graph = losses[-1].graph
    effects = _ordered_by_effects(graph)
    forward = _ancestors([loss.op for loss in losses], effects)
    results = [tensor.op for tensor in (*losses, *gradients)]
    # Whatever has side effects runs, and updates may be linked through variables alone.
    running = [op for op in graph.get_operations() if has_effects(op)]
    needed = _ancestors([*results, *running])
    ordered = in_order([op for op in graph.get_operations() if op in needed], effects)
    early = ordered[: 1 + max(ordered.index(loss.op) for loss in losses)]
    behind_gradients = _ancestors([g.op for g in gradients])
    forward |= _forward_only(early, forward, behind_gradients)
    first = [op for op in ordered if op in forward]
    weights = _made_of_weights(first)
    backward = _weight_gradients_first(
        [op for op in ordered if op not in forward], forward - weights
    )
    ordered = first + backward
    nominal = NominalShapes(batch_size or NOMINAL_BATCH_SIZE)
    tracer = Tracer(graph, nominal, nominal, loop_internals.gradient_loops(ordered))
    created = {operation: place for place, operation in enumerate(graph.get_operations())}
    seed = next((op for op in backward if op in behind_gradients and _is_gradient(op)), None)
    for operation in ordered:
        # The gradient of the loss may be a constant like any other.
        if operation is seed or not tracer.merge(operation):
            after = effects.get(operation, ())
            tracer.add(operation, operation not in forward, created[operation], after)
    loss = tracer.tensor(tracer.number(losses[-1]))
    name = f"{loss.op.name}:{loss.value_index}"
    trace = tracer.finish(name, _weight_bytes(ordered), seed)
    unread = [op for op in results if not any(t.consumers() for t in op.outputs)]
    wanted = tuple(dict.fromkeys([*running, *unread]))
    return dataclasses.replace(trace, wanted=wanted, waits=effects)


def order_question(trace: Trace) -> Callable[[], list[str]]:
    """What will ask for the order of the operations that are in a trace's graph now; see
    `grappler_order.question`.
    """
    graph = trace.graph
    # XLA has an order of its own. A function that creates variables is traced anew before it runs.
    other = loop_internals.is_compiled(graph) or _creates_variables(graph)
    if other or len(trace.view.nodes) > _ASKED_NODES:
        return list
    return grappler_order.question(graph, trace.wanted, trace.waits)


def in_known_order(view: GraphView, names: Sequence[str]) -> GraphView:
    """The view with the order in which the executor will run it.

    Args:
        view: the step of a trace, perhaps after rewriting. Nodes that are not in the graph under
            their name run near what they read or are read by.
        names: of operations, as Grappler orders them; if none, the order is that of the rule.
    """
    if not names:
        return view
    places = {name: place for place, name in enumerate(names)}
    known = executor_order.known_places(view.sources, [places.get(n.name) for n in view.nodes])
    return dataclasses.replace(view, known_order=tuple(view.run(known)))


def _creates_variables(graph: tf.Graph) -> bool:
    return any(op.type == "VarIsInitializedOp" for op in graph.get_operations())


def _is_gradient(operation: tf.Operation) -> bool:
    """Whether it makes floating-point numbers: the first that the gradients need is the gradient of
    the loss itself.
    """
    return any(t.dtype.is_floating for t in operation.outputs)


def depends_on_variables(loss: tf.Tensor) -> bool:
    """Whether any variable can move the loss."""
    return any(output.dtype == tf.resource for op in _ancestors([loss.op]) for output in op.outputs)


def _ancestors(
    roots: Iterable[tf.Operation],
    more: Mapping[tf.Operation, Sequence[tf.Operation]] = types.MappingProxyType({}),
) -> set[tf.Operation]:
    """What the roots depend on, by what they read and by `more`."""
    seen = set(roots)
    waiting = list(seen)
    while waiting:
        operation = waiting.pop()
        read = [t.op for t in operation.inputs]
        for source in (*read, *operation.control_inputs, *more.get(operation, ())):
            if source not in seen:
                seen.add(source)
                waiting.append(source)
    return seen


def _ordered_by_effects(graph: tf.Graph) -> dict[tf.Operation, list[tf.Operation]]:
    """What operations will have to wait for when TensorFlow finishes the function: those with
    effects keep the order in which they were created. So a loop that works out gradients may be
    something that the loss waits for.
    """
    found: dict[tf.Operation, list[tf.Operation]] = {}
    written: dict[int, tf.Operation] = {}
    read: dict[int, list[tf.Operation]] = {}
    latest: list[tf.Operation] = []
    for operation in graph.get_operations():
        handles = [t for t in operation.inputs if t.dtype == tf.resource]
        waits = [written[id(handle)] for handle in handles if id(handle) in written]
        for handle in handles:
            if loop_internals.only_reads(operation, handle):
                read.setdefault(id(handle), []).append(operation)
            else:
                waits += read.pop(id(handle), [])
                written[id(handle)] = operation
        if operation.op_def.is_stateful and not handles:
            waits += latest
            latest = [operation]
        if waits:
            found[operation] = waits
    return found


def _forward_only(
    operations: Sequence[tf.Operation],
    forward: set[tf.Operation],
    behind_gradients: set[tf.Operation],
) -> set[tf.Operation]:
    """What the forward pass makes besides the loss and what gradients need: moving averages, say.

    They read forward values when these are made, and hold nothing for the backward pass.
    """
    found: set[tf.Operation] = set()
    for operation in operations:
        if operation not in forward and operation not in behind_gradients:
            sources = [t.op for t in operation.inputs] + list(operation.control_inputs)
            if all(source in forward or source in found for source in sources):
                found.add(operation)
    return found


def _weight_gradients_first(
    operations: Sequence[tf.Operation], activations: set[tf.Operation]
) -> list[tf.Operation]:
    """Moves each weight gradient (it reads an activation) before the input gradient that reads the
    same upstream gradient.

    The activation dies earlier in this order, which is the one that plans are made in and that
    rewriting enforces.
    """
    places = {operation: place for place, operation in enumerate(operations)}
    input_gradients: dict[int, tf.Operation] = {}
    before: dict[tf.Operation, list[tf.Operation]] = {}
    moved: set[tf.Operation] = set()
    for operation in operations:
        if traits_of(operation.type).kind is not Kind.HEAVY:
            continue
        sources = [t.op for t in operation.inputs] + list(operation.control_inputs)
        gradients = [t for t in operation.inputs if t.op in places]
        if not any(source in activations for source in sources):
            input_gradients.update({id(t): operation for t in gradients})
            continue
        sibling = next(
            (input_gradients[id(t)] for t in gradients if id(t) in input_gradients), None
        )
        if sibling is not None and all(
            places.get(source, -1) < places[sibling] for source in sources
        ):
            before.setdefault(sibling, []).append(operation)
            moved.add(operation)
    ordered: list[tf.Operation] = []
    for operation in operations:
        if operation not in moved:
            ordered += [*before.get(operation, ()), operation]
    return ordered


def _made_of_weights(forward: Sequence[tf.Operation]) -> set[tf.Operation]:
    """What is made of variables, constants and shapes alone: kernels that are cast, say.

    Args:
        forward: the operations of the forward pass, in order.
    """
    found: set[tf.Operation] = set()
    for operation in forward:
        reads = op_traits.is_weight(operation.type)
        holds = any(t.dtype == tf.resource for t in operation.outputs)
        sources = [t.op for t in operation.inputs]
        derived = bool(sources) and all(source in found for source in sources)
        if reads or holds or (derived and not op_traits.may_make_data(operation.type)):
            found.add(operation)
    return found


def _weight_bytes(operations: Sequence[tf.Operation]) -> int:
    """Bytes of the variables that the step reads or updates."""
    handles: dict[str, int] = {}
    for operation in operations:
        for tensor in operation.inputs:
            # Loops pass handles on.
            passed_on = tensor.op.inputs
            if tensor.dtype == tf.resource and not passed_on and tensor.name not in handles:
                handles[tensor.name] = tf_internals.variable_bytes(tensor)
    return sum(handles.values())
