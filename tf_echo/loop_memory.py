"""How much memory a loop keeps for its gradient, and needs while it runs.

What the gradient reads of an iteration is kept, so the bytes of one iteration are kept as often as
the body runs. What an iteration needs besides is there once. Parts of the loop's inputs and reads
of variables share memory with what is there anyway, unless XLA compiles the loop: it copies
whatever is kept, and keeps weights once for each iteration.
"""

import dataclasses
from collections.abc import Mapping

from tf_echo.graph_view import Amount, GraphView, Loop
from tf_echo.memory_model import Timeline, simulate


@dataclasses.dataclass(frozen=True, slots=True)
class LoopMemory:
    """What a loop and its gradient hold besides their inputs and results."""

    kept: Amount
    """Of one iteration, kept for the gradient."""
    forward_work: Amount
    backward_work: Amount
    reads: frozenset[int] = frozenset()
    """Ids of tensors around the loop, the same in each iteration, that the gradient reads."""


def resized(view: GraphView, memories: Mapping[int, LoopMemory]) -> GraphView:
    """The view with other sizes for what its loops keep and need, and with all that their
    gradients read.

    Args:
        view: the view.
        memories: by the loop's place in `view.loops`.
    """
    nodes, tensors = list(view.nodes), list(view.tensors)
    for place, memory in memories.items():
        loop = view.loops[place]
        for number, nbytes in _tensor_sizes(view, loop, memory).items():
            tensors[number] = tensors[number]._replace(nbytes=nbytes)
        gradient = nodes[loop.backward]
        more = sorted(memory.reads.difference(gradient.inputs))
        nodes[gradient.id] = gradient._replace(inputs=(*gradient.inputs, *more))
    # A known order is that of the step with other loops.
    return dataclasses.replace(view, nodes=tuple(nodes), tensors=tuple(tensors), known_order=())


def _tensor_sizes(view: GraphView, loop: Loop, memory: LoopMemory) -> dict[int, int]:
    """The sizes of the tensors that stand for what the loop keeps and needs, in bytes."""
    sizes: dict[int, int] = {}
    kept = Amount(loop.trips * memory.kept.scaling, loop.trips * memory.kept.fixed)
    if loop.trips_scale:
        kept = Amount(kept.total, 0)
    for tensors, found in (
        (loop.kept, kept),
        (loop.forward_work, _besides_variables(view, loop, loop.forward, memory.forward_work)),
        (loop.backward_work, _besides_variables(view, loop, loop.backward, memory.backward_work)),
    ):
        sizes.update(zip(tensors, found, strict=True))
    return sizes


def _besides_variables(view: GraphView, loop: Loop, node: int, work: Amount) -> Amount:
    """What an iteration needs besides the loop's results, and the inputs that nobody else reads:
    they are its variables, which `work` counts before and after the iteration.
    """
    own = {*loop.kept, *loop.forward_work, *loop.backward_work}
    same = {view.buffers[t] for t in loop.constants.values()}
    variables = [
        t
        for t in view.nodes[node].inputs
        if view.buffers[t] not in same
        and not view.is_source(t)
        and len(view.consumers[t]) == 1
        and view.buffers[t] == t
    ]
    less = [0, 0]
    for tensor in {*variables, *view.nodes[node].outputs} - own:
        if view.tensors[tensor].dtype != "variant":
            less[not view.tensors[tensor].scales] += view.tensors[tensor].nbytes
    return Amount(max(work.scaling - less[0], 0), max(work.fixed - less[1], 0))


def loop_memory(loop: Loop, body: GraphView, reread: bool = False) -> LoopMemory:
    """What a loop keeps and needs.

    Args:
        loop: the loop.
        body: one iteration, as it is or with something recomputed.
        reread: whether what can be read again is, instead of being kept; see `read_again`.
    """
    kept = _kept(loop, body, reread)
    once, twice = simulate(body), simulate(body, 2.0)
    single, double = _work(body, once), _work(body, twice)
    forward = Amount(max(double[0] - single[0], 0), max(2 * single[0] - double[0], 0))
    backward = Amount(
        max(double[1] - single[1] - kept.scaling, 0),
        max(2 * single[1] - double[1] - kept.fixed, 0),
    )
    return LoopMemory(kept, forward, backward, _constants_read(loop, body, reread))


def read_again(loop: Loop, body: GraphView) -> list[str]:
    """Names of tensors that the backward loop can read again where XLA would keep a copy of each
    iteration: variables, parts of the loop's inputs.

    Args:
        loop: the loop.
        body: one iteration, as it is or with something recomputed.
    """
    if not loop.compiled:
        return []
    sources = [t for t in sorted(body.residuals) if body.is_source(t)]
    return [
        body.tensor_name(t)
        for t in sources
        if body.nodes[body.tensors[t].node].op not in _NEVER_KEPT
        and body.nodes[body.tensors[body.buffers[t]].node].name not in loop.changed
    ]


def _kept(loop: Loop, body: GraphView, reread: bool) -> Amount:
    if loop.compiled:
        again = set(read_again(loop, body)) if reread else set()
        found = {
            _behind_identities(body, t)
            for t in body.residuals
            if body.nodes[body.tensors[t].node].op not in _NEVER_KEPT
            and body.tensor_name(t) not in again
        }
    else:
        found = {body.buffers[t] for t in body.residuals if not body.is_source(t)}
        found -= _kept_as_variables(loop, body)
    sizes = [0, 0]
    for tensor in found:
        sizes[not body.tensors[tensor].scales] += body.tensors[tensor].nbytes
    return Amount(*sizes)


def _constants_read(loop: Loop, body: GraphView, reread: bool) -> frozenset[int]:
    """What the gradient reads of the loop's inputs, be it the memory that something kept shares."""
    again = set(read_again(loop, body)) if reread else set()
    roots = {
        body.nodes[body.tensors[body.buffers[t]].node].name
        for t in body.residuals
        if not loop.compiled
        or body.nodes[body.tensors[t].node].op in _NEVER_KEPT
        or body.tensor_name(t) in again
    }
    return frozenset(loop.constants[name] for name in roots & loop.constants.keys())


def _behind_identities(body: GraphView, tensor: int) -> int:
    """TensorFlow keeps what an Identity passes on."""
    node = body.nodes[body.tensors[tensor].node]
    return _behind_identities(body, node.inputs[0]) if node.op == "Identity" else tensor


_NEVER_KEPT = frozenset(("Const", "Placeholder"))
"""Constants are copied, and constants of the loop handed to its gradient."""


def _kept_as_variables(loop: Loop, body: GraphView) -> set[int]:
    """Results of an iteration that are kept anyway, as variables of the next."""
    names = [tuple(map(loop.body.tensor_name, pair)) for pair in loop.body.carried]
    return {
        body.buffers[body.tensor_named(result)]
        for result, variable in names
        if body.tensor_named(variable) in body.residuals
    }


def _work(body: GraphView, timeline: Timeline) -> tuple[int, int]:
    """The most that the forward and the backward part of an iteration hold."""
    end = timeline.order.index(body.tensors[body.loss].node)
    return max(timeline.usage[: end + 1], default=0), max(timeline.usage[end:], default=0)
