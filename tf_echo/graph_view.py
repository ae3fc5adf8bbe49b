"""A train step as frozen data: what runs, what it reads, how large each tensor is.

A view holds the nodes of one traced train step in an order in which they may run: first the
*forward* nodes (those the loss depends on), then the *backward* nodes (gradients and optimizer
updates). It imports no TensorFlow, so that plans are made, judged and tested on plain data.
`parse_view` and `str(view)` are inverse to each other.

A loop and its gradient are one node each; `Loop` says what one iteration of both does, as a view of
its own. Calls and conditionals are single nodes that nothing looks into.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar, cast

from tf_echo import executor_order, op_traits

_FOLDED_BYTES = 100 * 2**10
"""Grappler makes no constants that are larger."""


class Tensor(NamedTuple):
    """One output of a node. `id` is its place in `GraphView.tensors`."""

    id: int
    node: int
    """Id of the node that produces it."""
    output_index: int
    """Which of the node's outputs it is."""
    nbytes: int
    """Size in bytes, at the view's batch size; 0 for resources; see `known`."""
    dtype: str
    scales: bool
    """Whether the size grows with the batch."""
    known: bool
    """Whether the size is certain. A tensor of unknown size is never recomputed."""


class Amount(NamedTuple):
    """Bytes that grow with the batch, and bytes that do not."""

    scaling: int
    fixed: int

    @property
    def total(self) -> int:
        """Both together, at the view's batch size."""
        return self.scaling + self.fixed


NOTHING = Amount(0, 0)
_Found = TypeVar("_Found")
_CHEAP = frozenset((op_traits.Kind.VIEW, op_traits.Kind.SOURCE, op_traits.Kind.METADATA))


class Node(NamedTuple):
    """One operation. `id` is its place in `GraphView.nodes`."""

    id: int
    name: str
    op: str
    inputs: tuple[int, ...]
    """Ids of the tensors that it reads, in order."""
    outputs: tuple[int, ...]
    """Ids of the tensors that it produces, in order."""
    control_inputs: tuple[int, ...] = ()
    """Ids of the nodes that must have run before it."""
    backward: bool = False
    """Whether it is no ancestor of the loss."""
    workspace: Amount = NOTHING
    """What it needs while it runs besides its inputs and outputs."""
    created: int = -1
    """Its place in the order in which operations were created, where the view has another order; -1
    for what rewriting adds last."""


@dataclasses.dataclass(frozen=True)
class Loop:
    """A while loop of the forward pass and the loop that is its gradient.

    TensorFlow keeps what the gradient reads of each iteration. In the view that is a tensor more
    that the forward loop makes and the backward loop reads; what an iteration needs while it runs
    is a tensor more that nobody reads.
    """

    forward: int
    """Id of the loop's node."""
    backward: int
    """Id of its gradient's node."""
    trips: int
    """How often the body runs."""
    trips_known: bool
    """Whether that is certain; nominal otherwise."""
    compiled: bool
    """Whether XLA compiles it: then what is kept is copied, even if it is part of something that
    lives on."""
    body: "GraphView"
    """One iteration, forward and backward. The forward part ends in a node `LoopEnd`; what
    changes from one iteration to the next comes from nodes `LoopVariable`."""
    kept: tuple[int, int]
    """Ids of the tensors that stand for what is kept: what grows with the batch, and the rest."""
    forward_work: tuple[int, int]
    """The same for what an iteration of the forward loop needs besides."""
    backward_work: tuple[int, int]
    """The same for the backward loop."""
    changed: frozenset[str] = frozenset()
    """Names of body nodes that read a variable which is written before the backward loop runs."""
    constants: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """For body nodes that stand for what is the same in each iteration, the tensor outside."""
    trips_scale: bool = False
    """Whether the number of iterations grows with the batch."""


@dataclasses.dataclass(frozen=True)
class GraphView:
    """One train step, ordered so that every node comes after what it reads.

    Example:

    ```python
    view = parse_view('''
        x = Placeholder [1MiB]
        y = Tanh x [1MiB]
        loss = Mean y [4B]
        backward:
        dy = TanhGrad y loss [1MiB]
    ''')
    view.node("y").op     # "Tanh"
    ```
    """

    nodes: tuple[Node, ...]
    tensors: tuple[Tensor, ...]
    loss: int
    """Id of the loss, a tensor."""
    weight_bytes: int = 0
    """Bytes of the variables that live across steps."""
    batch_size: int | None = None
    """The batch size that sizes were computed for, where the graph left it open."""
    carried: tuple[tuple[int, int], ...] = ()
    """Where the view is an iteration of a loop: results that are the same memory as a
    `LoopVariable` in the next iteration; pairs of tensors."""
    seed: int | None = None
    """Id of the gradient of the loss itself, a tensor of the backward pass."""
    loops: tuple[Loop, ...] = ()
    """The loops whose gradients are in the view; left out of its text."""
    known_order: tuple[int, ...] = ()
    """Node ids in the order in which the executor runs them, where that is known; left out of the
    view's text."""

    @functools.cached_property
    def kinds(self) -> tuple[op_traits.Kind, ...]:
        """For each node the kind of its op."""
        return tuple(op_traits.traits_of(node.op).kind for node in self.nodes)

    @functools.cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """For each node the ids of the nodes that it reads or waits for, one entry an edge."""
        return tuple(
            (*(self.tensors[t].node for t in node.inputs), *node.control_inputs)
            for node in self.nodes
        )

    @functools.cached_property
    def execution_order(self) -> tuple[int, ...]:
        """Node ids in the order in which TensorFlow's executor runs them."""
        return self.known_order or tuple(self.run(self._likely_places()))

    def run(self, places: Sequence[float]) -> Iterator[int]:
        """The order in which the executor runs the nodes.

        Args:
            places: for each node its place in the graph that the executor is given.
        """
        constant = self._constants()
        cheap = [
            constant[node.id] or (kind in _CHEAP and not self._is_data(node))
            for node, kind in zip(self.nodes, self.kinds, strict=True)
        ]
        return executor_order.execution_order(self.sources, places, cheap)

    def _likely_places(self) -> list[int]:
        # What rewriting adds is created after all that was there.
        last = len(self.nodes) + max((node.created for node in self.nodes), default=0)
        created = [last + n.id if n.created < 0 else n.created for n in self.nodes]
        return executor_order.breadth_first(self.sources, created)

    def _is_data(self, node: Node) -> bool:
        """Whether a node is an input of the step, for which the executor has to wait."""
        return node.op == "Placeholder" and self.tensors[node.outputs[0]].dtype != "resource"

    def _constants(self) -> list[bool]:
        """For each node whether Grappler makes constants of what it makes."""
        found: list[bool] = []
        for node, kind in zip(self.nodes, self.kinds, strict=True):
            outputs = [self.tensors[t] for t in node.outputs]
            inputs = [self.tensors[t] for t in node.inputs]
            if kind is op_traits.Kind.METADATA:
                known = self.batch_size is None or not any(t.scales for t in inputs)
            else:
                known = node.op == "Const" or (
                    kind in op_traits.REPLAYABLE
                    and kind is not op_traits.Kind.RANDOM
                    and bool(inputs)
                    and all(found[t.node] for t in inputs)
                )
            found.append(known and all(t.known and t.nbytes <= _FOLDED_BYTES for t in outputs))
        return found

    @functools.cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor the ids of the nodes that read it, once per reading."""
        found: list[list[int]] = [[] for _ in self.tensors]
        for node in self.nodes:
            for tensor in node.inputs:
                found[tensor].append(node.id)
        return tuple(map(tuple, found))

    @functools.cached_property
    def buffers(self) -> tuple[int, ...]:
        """For each tensor the id of the tensor whose memory it shares (itself unless it is a
        view).
        """
        roots = list(range(len(self.tensors)))
        for node in self.nodes:
            if op_traits.is_view(node.op):
                for source, output in zip(node.inputs, node.outputs, strict=False):
                    roots[output] = roots[source]
        return tuple(roots)

    @functools.cached_property
    def residual_buffers(self) -> frozenset[int]:
        """Memory that the forward pass makes and the backward pass reads, as in `buffers`."""
        return frozenset(
            self.buffers[tensor]
            for node in self.nodes
            if node.backward
            for tensor in node.inputs
            if not self.nodes[self.tensors[self.buffers[tensor]].node].backward
        )

    @functools.cached_property
    def residuals(self) -> frozenset[int]:
        """Tensors of the forward pass that the backward pass reads."""
        return frozenset(
            tensor
            for node in self.nodes
            if node.backward
            for tensor in node.inputs
            if not self.nodes[self.tensors[tensor].node].backward
        )

    def is_source(self, tensor: int) -> bool:
        """Whether a tensor is, or is a view of, a constant, an input or a variable."""
        return self.kinds[self.tensors[self.buffers[tensor]].node] is op_traits.Kind.SOURCE

    @functools.cached_property
    def by_name(self) -> dict[str, int]:
        """Node ids by node name."""
        return {node.name: node.id for node in self.nodes}

    def node(self, name: str) -> Node:
        """The node of that name; KeyError where there is none."""
        return self.nodes[self.by_name[name]]

    def tensor_name(self, tensor: int) -> str:
        """`"node"` for a first output, `"node:1"` for a second one."""
        _, node, index, *_ = self.tensors[tensor]
        return self.nodes[node].name + (f":{index}" if index else "")

    def tensor_named(self, name: str) -> int:
        """The inverse of `tensor_name`; KeyError where there is none."""
        node, _, index = name.partition(":")
        outputs = self.nodes[self.by_name[node]].outputs
        if int(index or 0) >= len(outputs):
            raise KeyError(name)
        return outputs[int(index or 0)]

    def verify(self) -> None:
        """Raises ValueError where ids, names, order or the forward/backward split are
        inconsistent.
        """
        if len(self.by_name) < len(self.nodes):
            counts = collections.Counter(node.name for node in self.nodes)
            raise ValueError(f"Two nodes are called {counts.most_common(1)[0][0]!r}.")
        for place, node in enumerate(self.nodes):
            if node.id != place:
                raise ValueError(f"Node {node.name!r} has id {node.id} at place {place}.")
            sources = self.sources[node.id]
            if any(source >= node.id for source in sources):
                raise ValueError(f"Node {node.name!r} comes before something that it needs.")
            if not node.backward and any(self.nodes[s].backward for s in sources):
                raise ValueError(f"Forward node {node.name!r} needs a backward node.")
            if any(self.tensors[t].node != node.id for t in node.outputs):
                raise ValueError(f"An output of node {node.name!r} names another producer.")

    def __str__(self) -> str:
        lines, backward = [], False
        for node in self.nodes:
            if node.backward and not backward:
                backward = True
                lines.append("backward:")
            lines.append(self._line(node))
        lines.append(f"loss: {self.tensor_name(self.loss)}")
        if self.seed is not None:
            lines.append(f"seed: {self.tensor_name(self.seed)}")
        return "\n".join(lines)

    def _line(self, node: Node) -> str:
        words = [f"{node.name} = {node.op}"]
        words += [self.tensor_name(t) for t in node.inputs]
        words += ["^" + self.nodes[c].name for c in node.control_inputs]
        sizes = ", ".join(_size_text(self.tensors[t]) for t in node.outputs)
        scaling, fixed = node.workspace
        more = [f"+{_bytes_text(scaling)}"] if scaling else []
        more += [f"+{_bytes_text(fixed)} fixed"] if fixed else []
        return " ".join([*words, f"[{sizes}]", *more])


_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_LINE = re.compile(
    r"(?P<name>\S+) = (?P<op>\S+)(?P<inputs>[^\[]*)(\[(?P<sizes>.*)\])?"
    r"( \+(?P<scaling>\d+\w*B))?( \+(?P<fixed>\d+\w*B) fixed)?$"
)


def _bytes_text(nbytes: int) -> str:
    """The bytes in the largest unit of which they are a multiple."""
    unit = max((u for u in _UNITS if nbytes % _UNITS[u] == 0), key=_UNITS.__getitem__)
    unit = unit if nbytes else "B"
    return f"{nbytes // _UNITS[unit]}{unit}"


def _size_text(tensor: Tensor) -> str:
    if not tensor.known:
        return "?"
    text = _bytes_text(tensor.nbytes)
    text += f" {tensor.dtype}" if tensor.dtype != "float32" else ""
    return text if tensor.scales else f"{text} fixed"


def _parse_size(text: str) -> tuple[int, str, bool, bool]:
    words = text.split()
    if not words or words[0] == "?":
        return 0, "float32", True, False
    match = re.fullmatch(r"(\d+)([KMG]i)?B", words[0])
    if match is None:
        raise ValueError(f"A size must read like '4B', '16KiB' or '1MiB'. Received: {text!r}")
    nbytes = int(match[1]) * _UNITS[(match[2] or "") + "B"]
    dtype = next((word for word in words[1:] if word != "fixed"), "float32")
    return nbytes, dtype, "fixed" not in words, True


def per_view(function: Callable[[GraphView], _Found]) -> Callable[[GraphView], _Found]:
    """Works out once what follows from a view alone."""
    name = f"{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    def remembered(view: GraphView) -> _Found:
        known = view.__dict__
        if name not in known:
            known[name] = function(view)
        return cast(_Found, known[name])

    return remembered


def parse_view(text: str, weight_bytes: int = 0) -> GraphView:
    """Builds a view from text, one node a line; what tests and bug reports are written in.

    A line reads `name = Op input input:1 ^control [4KiB, 1MiB bool fixed]`: the sizes of its
    outputs in brackets, with a dtype unless it is float32, and `fixed` unless the size grows with
    the batch; `?` is an unknown size; `+2MiB` behind the brackets, what the node needs while it
    runs, and `+30MiB fixed` what of that does not grow with the batch. Without brackets a node has
    one output of 4 bytes. Lines below `backward:` are backward nodes. `loss: name` names the loss;
    without it the loss is the last forward node. `seed: name` names its gradient.

    Args:
        text: the lines.
        weight_bytes: bytes of the variables that live across steps.

    Raises:
        ValueError: a line cannot be read, or a node comes before something that it needs.
    """
    builder = ViewBuilder()
    backward, loss, seed = False, None, None
    for line in filter(None, (line.strip() for line in text.splitlines())):
        if line == "backward:":
            backward = True
        elif line.startswith("loss:"):
            loss = line.removeprefix("loss:").strip()
        elif line.startswith("seed:"):
            seed = line.removeprefix("seed:").strip()
        else:
            builder.add_line(line, backward)
    view = builder.finish(loss, weight_bytes)
    return view if seed is None else dataclasses.replace(view, seed=view.tensor_named(seed))


class ViewBuilder:
    """Collects nodes in order and numbers them and their tensors."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.tensors: list[Tensor] = []
        self._names: dict[str, int] = {}

    def add(
        self,
        name: str,
        op: str,
        inputs: Iterable[int],
        outputs: Sequence[tuple[int, str, bool, bool]],
        control_inputs: Iterable[int] = (),
        backward: bool = False,
        workspace: Amount = NOTHING,
        created: int = -1,
    ) -> Node:
        """Appends a node; `outputs` holds (bytes, dtype, scales, known) each."""
        node_id, first = len(self.nodes), len(self.tensors)
        for index, output in enumerate(outputs):
            self.tensors.append(Tensor(first + index, node_id, index, *output))
        numbers = tuple(range(first, first + len(outputs)))
        control = tuple(control_inputs)
        read = tuple(inputs)
        node = Node(node_id, name, op, read, numbers, control, backward, workspace, created)
        self.nodes.append(node)
        self._names[name] = node_id
        return node

    def add_line(self, line: str, backward: bool) -> None:
        """Appends the node that a line of text describes."""
        match = _LINE.match(line)
        if match is None:
            raise ValueError(f"A node must read like 'z = Tanh y [1MiB]'. Received: {line!r}")
        words = match["inputs"].split()
        sizes = match["sizes"] if match["sizes"] is not None else "4B"
        try:
            inputs = [self._tensor(w) for w in words if not w.startswith("^")]
            control = [self._names[w[1:]] for w in words if w.startswith("^")]
        except (KeyError, IndexError) as error:
            raise ValueError(f"Nothing above is called {error.args[0]!r} in {line!r}.") from error
        outputs = [_parse_size(part) for part in sizes.split(",")] if sizes.strip() else []
        workspace = Amount(*(_parse_size(match[k] or "0B")[0] for k in ("scaling", "fixed")))
        self.add(match["name"], match["op"], inputs, outputs, control, backward, workspace)

    def holds(self, name: str) -> bool:
        """Whether a node of that name was added."""
        return name in self._names

    def _tensor(self, name: str) -> int:
        node, _, index = name.partition(":")
        outputs = self.nodes[self._names[node]].outputs
        if int(index or 0) >= len(outputs):
            raise KeyError(name)
        return outputs[int(index or 0)]

    def finish(
        self, loss: str | None, weight_bytes: int = 0, batch: int | None = None
    ) -> GraphView:
        """The view of all nodes added, verified."""
        if loss is None:
            forward = [n for n in self.nodes if not n.backward and n.outputs]
            if not forward:
                raise ValueError("A view needs at least one forward node.")
            tensor = forward[-1].outputs[0]
        else:
            tensor = self._tensor(loss)
        view = GraphView(tuple(self.nodes), tuple(self.tensors), tensor, weight_bytes, batch)
        view.verify()
        return view
