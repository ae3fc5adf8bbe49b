"""Make views of operations, loops and their bodies included.

A loop and its gradient are two nodes of the view around them, and one iteration of both is a view
of its own: what TensorFlow keeps on lists from one to the other is there simply read by the
backward part. So bodies are planned like whole steps.
"""

import collections
import dataclasses
import itertools
import os
import types
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import tensorflow as tf

from tf_echo import loop_internals, loop_memory, op_traits, tf_internals, workspaces
from tf_echo.graph_view import NOTHING, GraphView, Loop, ViewBuilder
from tf_echo.nominal_shapes import NominalShapes, Shape, dtype_name, static_shape
from tf_echo.op_traits import Kind

_MERGED = op_traits.REPLAYABLE | {Kind.METADATA, Kind.HEAVY}
_KEPT_APART = frozenset(("AddN", "TensorListGetItem"))
"""What plans name by its operation."""
_PRODUCTS = frozenset(("MatMul", "BatchMatMul", "BatchMatMulV2"))
_UNIFORM = frozenset(("Fill", "ZerosLike", "OnesLike"))
_LARGE_CONSTANT = 64
"""Elements from which it would take long to compare constants."""


@dataclasses.dataclass(frozen=True)
class LoopTrace:
    """A loop of a view together with its operations."""

    loop: Loop
    forward: tf.Operation
    backward: tf.Operation
    body: "Trace"
    """One iteration. What is recomputed is added to the graph of the gradient's body."""
    lists: Mapping[int, int]
    """Where the gradient reads what the loop keeps: for the place among its inputs the place among
    the loop's outputs."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """A view together with the operations and tensors that it was taken from."""

    graph: tf.Graph
    view: GraphView
    operations: tuple[tf.Operation, ...]
    """The operation of each node of the view."""
    loops: tuple[LoopTrace, ...] = ()
    """Those of the view, in the same order."""
    whole: tuple[str, ...] = ()
    """The loops with a gradient that are not looked into, each with the reason."""
    numbers: Mapping[int, tuple[tf.Tensor, int]] = dataclasses.field(default_factory=dict)
    """By the id of a TensorFlow tensor, the tensor and the one of the view that it stands for."""
    left_out: tuple[tuple[tf.Tensor, tf.Tensor], ...] = ()
    """Tensors that the view leaves out, each with the one that its readers may read instead."""
    wanted: tuple[tf.Operation, ...] = ()
    """What runs for its effects, and losses and gradients that nothing in the graph reads."""
    waits: Mapping[tf.Operation, Sequence[tf.Operation]] = dataclasses.field(default_factory=dict)
    """What operations will have to wait for besides when TensorFlow finishes the function."""
    order: Future[list[str]] | None = None
    """Names of operations in the order in which Grappler leaves the step as it was traced."""

    @property
    def open_batch(self) -> bool:
        """Whether the graph leaves the batch size open."""
        return any(t.scales and t.known and t.nbytes for t in self.view.tensors)

    def tensor(self, tensor: int) -> tf.Tensor:
        """The TensorFlow tensor of a tensor id."""
        _, node, index, *_ = self.view.tensors[tensor]
        return self.operations[node].outputs[index]

    def places(self, node: int, tensor: int) -> list[tuple[tf.Operation, int]]:
        """Where a node's operation, as it is now, reads a tensor of the view: operations and places
        among their inputs. What a loop reads since it was changed is passed on to it.
        """
        operation = self.operations[node]
        found = [(operation, p) for p, t in enumerate(operation.inputs) if self._is(t, tensor)]
        new = [t for t in operation.inputs if id(t) not in self.numbers]
        passing = [t.op for t in new if t.op.type == "Identity"]
        return found + [(op, 0) for op in passing if self._is(op.inputs[0], tensor)]

    def _is(self, found: tf.Tensor, tensor: int) -> bool:
        return self.numbers.get(id(found), (found, -1))[1] == tensor


class Tracer:
    """Makes a view of operations, which are added in an order in which they may run.

    Args:
        graph: the graph that what is recomputed will be added to.
        nominal: sizes of the forward operations.
        backward_nominal: sizes of the backward operations.
        gradients: for each loop its gradient loops.
        around: for the body of a loop, the loop and what it is in.
    """

    def __init__(
        self,
        graph: tf.Graph,
        nominal: NominalShapes,
        backward_nominal: NominalShapes,
        gradients: Mapping[tf.Operation, Sequence[tf.Operation]],
        around: "_Around | None" = None,
    ):
        self.graph, self.nominal, self.backward_nominal = graph, nominal, backward_nominal
        self.around = around
        self.builder = ViewBuilder()
        self.operations: list[tf.Operation] = []
        self.loops: list[LoopTrace] = []
        self.whole = [
            f"{forward.name} (its gradient is taken {len(found)} times)"
            for forward, found in gradients.items()
            if len(found) > 1
        ]
        self._gradient_of = {f: found[0] for f, found in gradients.items() if len(found) == 1}
        self._forward_of = {b: f for f, b in self._gradient_of.items()}
        self._carried: tuple[tuple[int, int], ...] = ()
        self._numbers: dict[int, tuple[tf.Tensor, int]] = {}
        """Ids of Python objects are only unique while the objects live."""
        self._nodes: dict[tf.Operation, int] = {}
        self._left_out: list[tuple[tf.Tensor, tf.Tensor]] = []
        self._alike: dict[Hashable, list[tf.Operation]] = collections.defaultdict(list)
        """Operations that differ in their attributes at most."""
        self._shapes: list[Shape | None] = []
        """For each tensor its shape, nominal sides filled in; None where it is not known."""
        self._threads = 0 if tf.config.list_physical_devices("GPU") else _threads()
        self._onednn = bool(self._threads) and tf_internals.uses_onednn()

    def name(self, tensor: tf.Tensor, number: int) -> None:
        """Lets a TensorFlow tensor stand for a tensor of the view."""
        self._numbers[id(tensor)] = tensor, number

    def number(self, tensor: tf.Tensor) -> int:
        """The tensor of the view that a TensorFlow tensor stands for."""
        return self._numbers[id(tensor)][1]

    def tensor(self, number: int) -> tf.Tensor:
        """The TensorFlow tensor that a tensor of the view was made for."""
        made = self.builder.tensors[number]
        return self.operations[made.node].outputs[made.output_index]

    def merge(self, operation: tf.Operation) -> bool:
        """Leaves an operation out if one that was added computes the same, as Grappler will, or if
        it multiplies by one.

        What reads its results then reads those of the other one.
        """
        factor = self._times_one(operation)
        if factor is not None:
            self._nodes[operation] = self.builder.tensors[self.number(factor)].node
            self.nominal.add(operation, [static_shape(operation.outputs[0])])
            self.name(operation.outputs[0], self.number(factor))
            self._left_out.append((operation.outputs[0], self.tensor(self.number(factor))))
            return True
        key = self._computes(operation)
        if key is None:
            return False
        attributes = operation.node_def.attr if self._alike[key] else None
        for other in self._alike[key]:
            if other.node_def.attr == attributes:
                self._nodes[operation] = self._nodes[other]
                self.nominal.add_alike(operation, other)
                self.backward_nominal.add_alike(operation, other)
                for output, kept in zip(operation.outputs, other.outputs, strict=True):
                    self.name(output, self.number(kept))
                    self._left_out.append((output, kept))
                return True
        self._alike[key].append(operation)
        return False

    def _times_one(self, operation: tf.Operation) -> tf.Tensor | None:
        """What an operation multiplies by one."""
        # What waits hands its waiting on to its readers.
        if operation.type != "Mul" or operation.control_inputs:
            return None
        for one, other in zip(operation.inputs, reversed(operation.inputs), strict=True):
            made = self.tensor(self.number(one))
            if (
                made.op.type == "Const"
                and made.shape.rank == 0
                and other.shape.rank != 0
                and tf.get_static_value(made) == 1
            ):
                return other
        return None

    def _computes(self, operation: tf.Operation) -> Hashable | None:
        """All that an operation computes follows from but its attributes; None if more does."""
        kind = operation.type
        constant = kind == "Const"
        if not (constant or op_traits.traits_of(kind).kind in _MERGED) or kind in _KEPT_APART:
            return None
        if constant and (operation.outputs[0].shape.num_elements() or 0) > _LARGE_CONSTANT:
            return None
        value = operation.get_attr("value").SerializeToString() if constant else None
        control = frozenset(self._nodes.get(c, c) for c in operation.control_inputs)
        read = tuple(self.number(t) for t in operation.inputs)
        return kind, read, control, operation.device, value

    def add(
        self,
        operation: tf.Operation,
        backward: bool,
        created: int = -1,
        after: Iterable[tf.Operation] = (),
    ) -> None:
        """Adds an operation.

        Args:
            operation: the operation.
            backward: whether it belongs to the backward pass.
            created: as in `Node`.
            after: what it will wait for besides what it reads and its control inputs.
        """
        inputs = [self.number(t) for t in operation.inputs]
        kind = operation.type
        if kind == "IdentityN":
            self._pass_on(operation, inputs, backward)
            return
        if kind == "TensorListGetItem" and not self._is_constant(operation.inputs[0]):
            kind = "TensorListGetItem(changing)"
        if self.around is None and self._is_uniform(operation):
            kind, inputs = "Const", []
        if self.around is None and _is_folded(operation):
            kind = op_traits.FOLDED_TRANSPOSE
        self._add(operation, kind, inputs, backward, created, after)

    def _pass_on(self, operation: tf.Operation, inputs: Sequence[int], backward: bool) -> None:
        """Leaves an operation out: Grappler lets its readers read past it, one by one.

        Keras hands all gradients to the optimizer through one, which would hold them until the last
        is there.
        """
        for output, number in zip(operation.outputs, inputs, strict=True):
            self.name(output, number)
            if backward:
                self._left_out.append((output, self.tensor(number)))
        nominal = self.backward_nominal if backward else self.nominal
        nominal.add(operation, [static_shape(output) for output in operation.outputs])
        self._nodes[operation] = max(self.builder.tensors[number].node for number in inputs)

    def _is_uniform(self, operation: tf.Operation) -> bool:
        """Whether it repeats one number in a known shape. Grappler makes a constant of that, which
        stays; where other constants are made larger it leaves that to the step.
        """
        if operation.type not in _UNIFORM or static_shape(operation.outputs[0]) is None:
            return False
        if operation.type != "Fill":
            return bool(operation.outputs[0].dtype != tf.variant)
        made = [self.builder.tensors[self.number(t)].node for t in operation.inputs]
        ops = [self.builder.nodes[node].op for node in made]
        shape = ops[0] == "Const" or op_traits.traits_of(ops[0]).kind is Kind.METADATA
        return shape and ops[1] == "Const"

    def add_variable(self, operation: tf.Operation, after: Sequence[int], backward: bool) -> None:
        """Adds the placeholder of what changes from one iteration of a loop to the next.

        Args:
            operation: the placeholder.
            after: the tensors that must be there before.
            backward: whether it belongs to the backward loop.
        """
        self._add(operation, "LoopVariable", after, backward)

    def add_end(self, results: Iterable[tf.Tensor], loop: tf.Operation) -> int:
        """Adds the end of an iteration of the forward loop, and returns its tensor."""
        numbers = [self.number(t) for t in results]
        node = self.builder.add("LoopEnd", "LoopEnd", numbers, [(0, "float32", False, True)])
        self._shapes.append(None)
        self.operations.append(loop)
        return node.outputs[0]

    def note_carried(self, results: Iterable[tuple[tf.Tensor, tf.Tensor]]) -> None:
        """Notes which results of an iteration are which variables of the next."""
        self._carried = tuple((self.number(r), self.number(v)) for r, v in results)

    def _add(
        self,
        operation: tf.Operation,
        kind: str,
        inputs: Sequence[int],
        backward: bool,
        created: int = -1,
        after: Iterable[tf.Operation] = (),
    ) -> None:
        nominal = self.backward_nominal if backward else self.nominal
        static = [static_shape(output) for output in operation.outputs]
        shapes = nominal.add(operation, static)
        sizes = [
            _size(*item, nominal) for item in zip(operation.outputs, static, shapes, strict=True)
        ]
        same = loop_internals.constants(operation)
        for place in same:
            sizes[place] = (0, sizes[place][1], False, True)
        # What loops keep and need: sizes are filled in when the gradient has been added.
        forward = self._forward_of.get(operation)
        extra = 4 * (operation in self._gradient_of) + 2 * (forward is not None)
        sizes += [(0, "variant", place % 2 == 0, True) for place in range(extra)]
        if forward is not None:
            inputs = [*inputs, *self._extra(forward)[:2]]
        waits = dict.fromkeys([*operation.control_inputs, *after])
        control = [self._nodes[c] for c in waits if c in self._nodes]
        name = self._unused(operation.name)
        workspace = NOTHING
        if self._threads:
            read = [self._shapes[number] for number in inputs]
            einsum = kind == "Einsum"
            workspace = workspaces.workspace(
                kind,
                read,
                shapes,
                self._threads,
                self._onednn,
                operation.get_attr("equation").decode() if einsum else "",
                operation.outputs[0].dtype.size if einsum else 4,
            )
        node = self.builder.add(name, kind, inputs, sizes, control, backward, workspace, created)
        self._shapes += [*shapes, *[None] * extra]
        self._nodes[operation] = node.id
        self.operations.append(operation)
        for output, number in zip(operation.outputs, node.outputs, strict=False):
            self.name(output, number)
        for place in same:
            self.name(operation.outputs[place], inputs[place])
        if forward is not None:
            self._add_loop(forward, operation)

    def _unused(self, name: str) -> str:
        """The name, or one like it: the two bodies of a loop are graphs of their own."""
        unused = name
        for number in itertools.count(1):
            if not self.builder.holds(unused):
                break
            unused = f"{name}/{number}"
        return unused

    def finish(self, loss: str, weight_bytes: int = 0, seed: tf.Operation | None = None) -> Trace:
        """The trace of all that was added.

        Args:
            loss: the name of the loss.
            weight_bytes: bytes of the variables that live across steps.
            seed: the operation that makes the gradient of the loss itself.
        """
        self.loops.sort(key=lambda trace: trace.loop.forward)
        loops = tuple(trace.loop for trace in self.loops)
        view = self.builder.finish(loss, weight_bytes, self.nominal.batch_size)
        first = None if seed is None else self.number(seed.outputs[0])
        view = dataclasses.replace(view, carried=self._carried, loops=loops, seed=first)
        memories = {p: loop_memory.loop_memory(loop, loop.body) for p, loop in enumerate(loops)}
        return Trace(
            self.graph,
            loop_memory.resized(view, memories),
            tuple(self.operations),
            tuple(self.loops),
            tuple(self.whole),
            self._numbers,
            tuple(self._left_out),
        )

    def _extra(self, loop: tf.Operation) -> tuple[int, ...]:
        """The tensors of a loop's node that TensorFlow does not have."""
        return self.builder.nodes[self._nodes[loop]].outputs[len(loop.outputs) :]

    def _constants(self, loop: tf.Operation) -> dict[str, int]:
        """For placeholders in the body of a loop, by name, the tensors outside."""
        body = loop_internals.body_graph(loop)
        return {
            body.inputs[place].op.name: self.number(loop.inputs[place])
            for place in loop_internals.constants(loop)
            if loop.inputs[place].dtype != tf.resource
        }

    def _is_constant(self, tensor: tf.Tensor) -> bool:
        """Whether a list of tensors is made at once, so that what it holds shares its memory."""
        node = self.builder.nodes[self.builder.tensors[self.number(tensor)].node]
        return node.op in ("Placeholder", "TensorListFromTensor")

    def _add_loop(self, forward: tf.Operation, backward: tf.Operation) -> None:
        inside = self.nominal.bodies[forward]
        inside_gradient = self.backward_nominal.bodies[backward]
        links = _links(self, forward, backward)
        body = _trace_body(self, forward, backward, links, inside, inside_gradient)
        kept, work = _pairs(self._extra(forward))
        (backward_work,) = _pairs(self._extra(backward))
        compiled = loop_internals.is_compiled(forward.graph)
        trips = self.nominal.trips[forward]
        loop = Loop(
            self._nodes[forward],
            self._nodes[backward],
            trips.number,
            trips.known,
            compiled,
            body.view,
            kept,
            work,
            backward_work,
            _changed(body, _Around(forward, backward, self.around)) if compiled else frozenset(),
            self._constants(forward),
            trips.scale,
        )
        self.whole += body.whole
        self.loops.append(LoopTrace(loop, forward, backward, body, links.lists))


def _pairs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(numbers[::2], numbers[1::2], strict=True))


class _Around(NamedTuple):
    """A loop, its gradient, and the loop that both are in."""

    forward: tf.Operation
    backward: tf.Operation
    outer: "_Around | None"


class _Links(NamedTuple):
    """Which placeholders of a gradient's body stand for what of the forward body."""

    same: dict[int, tf.Tensor]
    """By the placeholder's id, a constant of the loop."""
    popped: dict[int, tf.Tensor]
    """By the placeholder's id, the tensor that is pushed on the list that it holds."""
    lists: dict[int, int]
    """By the placeholder's place, the place of that list among the loop's outputs."""
    pushes: set[tf.Operation]
    """The operations that push, and the placeholders of the lists."""


def _links(outer: Tracer, forward: tf.Operation, backward: tf.Operation) -> _Links:
    body, gradient = loop_internals.body_graph(forward), loop_internals.body_graph(backward)
    constants = {
        outer.number(forward.inputs[place]): body.inputs[place]
        for place in loop_internals.constants(forward)
    }
    links = _Links({}, {}, {}, set())
    triples = zip(backward.inputs, gradient.inputs, gradient.outputs, strict=True)
    for position, (given, inside, output) in enumerate(triples):
        number = outer.number(given)
        source = outer.tensor(number)
        place = source.value_index if source.op is forward else None
        push = None if place is None else body.outputs[place].op
        if inside is output and number in constants:
            links.same[id(inside)] = constants[number]
        elif (
            place is not None
            and push is not None
            and push.type == "TensorListPushBack"
            and push.inputs[0] is body.inputs[place]
            and output.op.type == "TensorListPopBack"
            and output.op.inputs[0] is inside
        ):
            links.popped[id(inside)] = push.inputs[1]
            links.lists[position] = place
            links.pushes.update((push, body.inputs[place].op))
    return links


def _trace_body(
    outer: Tracer,
    forward: tf.Operation,
    backward: tf.Operation,
    links: _Links,
    nominal: NominalShapes,
    backward_nominal: NominalShapes,
) -> Trace:
    """One iteration of a loop and of its gradient."""
    body, gradient = loop_internals.body_graph(forward), loop_internals.body_graph(backward)
    operations, gradient_operations = body.get_operations(), gradient.get_operations()
    tracer = Tracer(
        gradient,
        nominal,
        backward_nominal,
        loop_internals.gradient_loops([*operations, *gradient_operations]),
        _Around(forward, backward, outer.around),
    )
    pairs = list(zip(body.inputs, body.outputs, strict=True))
    variables = {i.op for i, o in pairs if i is not o}
    for operation in in_order([op for op in operations if op not in links.pushes]):
        if operation in variables:
            tracer.add_variable(operation, (), backward=False)
        else:
            tracer.add(operation, backward=False)
    end = tracer.add_end((t for t in body.outputs if t.op not in links.pushes), forward)
    if not loop_internals.is_compiled(forward.graph):
        changing = [(o, i) for i, o in pairs if i is not o and o.op not in links.pushes]
        tracer.note_carried(changing)
    arguments = {id(t) for t in gradient.inputs}
    for operation in in_order(gradient_operations):
        outputs = operation.outputs
        first = id(outputs[0]) if outputs else -1
        if first in links.same:
            tracer.name(outputs[0], tracer.number(links.same[first]))
        elif first in links.popped:
            tracer.name(outputs[0], end)
        elif operation.type == "TensorListPopBack" and id(operation.inputs[0]) in links.popped:
            tracer.name(outputs[0], end)
            tracer.name(outputs[1], tracer.number(links.popped[id(operation.inputs[0])]))
        elif first in arguments:
            tracer.add_variable(operation, (end,), backward=True)
        else:
            tracer.add(operation, backward=True)
    return tracer.finish("LoopEnd")


def _changed(body: Trace, around: _Around) -> frozenset[str]:
    """Nodes of a body that read variables which something writes before the gradient of the
    outermost loop runs: in a loop, or between the two.
    """
    outermost = around
    while outermost.outer is not None:
        outermost = outermost.outer
    operations = outermost.forward.graph.get_operations()
    start, end = (operations.index(op) for op in (outermost.forward, outermost.backward))
    between = set(operations[start:end])
    reads = [n for n in body.view.nodes if n.op == "ReadVariableOp" and not n.backward]
    return frozenset(
        n.name for n in reads if _is_written(body.tensor(n.inputs[0]), around, between)
    )


def _is_written(handle: tf.Tensor, around: _Around, between: Collection[tf.Operation]) -> bool:
    """Whether anything writes a variable that the body of a loop reads."""
    inputs = loop_internals.body_graph(around.forward).inputs
    place = next((p for p, t in enumerate(inputs) if t is handle), None)
    if place is None or not _only_read(handle, handle.consumers()):
        return True
    outside = around.forward.inputs[place]
    if around.outer is not None:
        return _is_written(outside, around.outer, between)
    return not _only_read(outside, (user for user in outside.consumers() if user in between))


def _only_read(handle: tf.Tensor, users: Iterable[tf.Operation]) -> bool:
    return all(loop_internals.only_reads(user, handle) for user in users)


def in_order(
    operations: Sequence[tf.Operation],
    more: Mapping[tf.Operation, Sequence[tf.Operation]] = types.MappingProxyType({}),
) -> list[tf.Operation]:
    """Order of creation, except where an operation was given an input that is younger than
    itself.

    Args:
        operations: operations in their order of creation.
        more: what they wait for besides what they read and their control inputs.
    """
    done: set[tf.Operation] = set()
    ordered: list[tf.Operation] = []
    for first in operations:
        stack = [first]
        while stack:
            operation = stack[-1]
            sources = [t.op for t in operation.inputs] + list(operation.control_inputs)
            sources += more.get(operation, ())
            missing = [source for source in sources if source not in done]
            if missing and operation not in done:
                stack.extend(missing)
                continue
            stack.pop()
            if operation not in done:
                done.add(operation)
                ordered.append(operation)
    return ordered


def _is_folded(operation: tf.Operation) -> bool:
    """Whether it transposes matrices for products alone, which then read them as they are."""
    if operation.type != "Transpose" or operation.outputs[0].dtype.is_complex:
        return False
    order = tf.get_static_value(operation.inputs[1])
    if order is None or len(order) < 2:
        return False
    *kept, last, before = order
    readers = operation.outputs[0].consumers()
    return (
        kept == list(range(len(kept)))
        and (last, before) == (len(kept) + 1, len(kept))
        and bool(readers)
        and all(reader.type in _PRODUCTS for reader in readers)
    )


def _threads() -> int:
    """How many threads one op may use."""
    configured = tf.config.threading.get_intra_op_parallelism_threads()
    return configured or int(os.environ.get("TF_NUM_INTRAOP_THREADS", 0)) or os.cpu_count() or 1


def _size(
    tensor: tf.Tensor, static: Shape | None, shape: Shape | None, nominal: NominalShapes
) -> tuple[int, str, bool, bool]:
    if tensor.dtype == tf.variant and tensor.op.type in (
        *loop_internals.LOOPS,
        "TensorListFromTensor",
        "ZerosLike",
    ):
        items = nominal.list_of(tensor)
        if items is not None:
            return items.nbytes, "variant", items.scales, True
    if tensor.dtype in (tf.resource, tf.variant):
        return 0, dtype_name(tensor.dtype), False, True
    if shape is None:
        return 0, dtype_name(tensor.dtype), True, False
    nbytes = tensor.dtype.size
    for side in shape:
        nbytes *= side
    return nbytes, dtype_name(tensor.dtype), static is None, True
