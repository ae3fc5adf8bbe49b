"""The private parts of TensorFlow that tf_echo needs, each with the public call that is missing.

Everything else in the package uses public TensorFlow. Written for TensorFlow 2.21.
"""

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import device_properties_pb2, meta_graph_pb2
from tensorflow.python.eager import context, execute
from tensorflow.python.grappler import cluster, tf_optimizer
from tensorflow.python.ops import handle_data_util

_PROTOBUF_BYTES = 2**31
"""No serialized message may be as large."""


def copy_operation(
    graph: tf.Graph, operation: tf.Operation, inputs: Sequence[tf.Tensor], name: str
) -> list[tf.Tensor]:
    """Adds an operation like `operation`, attributes and all, that reads `inputs`.

    Missing in public: `tf.raw_ops` re-infers attributes and drops the underscored ones,
    `tf.import_graph_def` imports whole graphs. It is recorded on no gradient tape.
    """
    attributes = {k: v for k, v in operation.node_def.attr.items() if k != "_class"}
    copied = graph._create_op_internal(
        operation.type,
        list(inputs),
        dtypes=[output.dtype for output in operation.outputs],
        name=name,
        attrs=attributes,
        op_def=operation.op_def,
    )
    return list(copied.outputs)


def place_like(tensors: Sequence[tf.Tensor], operation: tf.Operation) -> None:
    """Puts the producers of `tensors` on the device of `operation`.

    Missing in public: `tf.device` merges with the scopes that are open.
    """
    for tensor in tensors:
        tensor.op._set_device(operation.device)


def replace_input(operation: tf.Operation, place: int, tensor: tf.Tensor) -> None:
    """Lets an operation that exists already read another tensor.

    Missing in public: a graph can only grow.
    """
    operation._update_input(place, tensor)


def wait_for(operation: tf.Operation, other: tf.Operation) -> None:
    """Lets an operation that exists already run only after another.

    Missing in public: `tf.control_dependencies` only affects operations that are about to be
    created.
    """
    operation._add_control_input(other)


def run_eagerly(operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The results of an operation, computed now from eager inputs.

    Missing in public: running an operation given by type and attributes.
    """
    attributes: list[Any] = []
    for name in operation.node_def.attr:
        if not name.startswith("_"):
            attributes += [name, operation.get_attr(name)]
    with tf.init_scope():
        return list(
            execute.execute(
                operation.type,
                len(operation.outputs),
                list(inputs),
                tuple(attributes),
                context.context(),
            )
        )


def variable_bytes(handle: tf.Tensor) -> int:
    """Bytes of the variable behind a resource handle; 0 if the handle does not tell."""
    total = 0
    for item in behind_handle(handle):
        shape = tf.TensorShape(item.shape)
        if shape.is_fully_defined():
            total += int(shape.num_elements()) * tf.dtypes.as_dtype(item.dtype).size
    return total


def optimize(graph: tf.compat.v1.GraphDef, wanted: Sequence[str]) -> tf.compat.v1.GraphDef | None:
    """What Grappler makes of a graph, even where it is off; None if it does not take the graph.

    Missing in public: running Grappler, whose result a function only shows after it has run.

    Args:
        graph: a graph whose nodes have devices of this machine.
        wanted: the names of the nodes that are asked for.
    """
    config = context.context().config
    config.graph_options.rewrite_options.disable_meta_optimizer = False
    step = meta_graph_pb2.MetaGraphDef(graph_def=graph)
    step.collection_def["train_op"].node_list.value.extend(wanted)
    if step.ByteSize() >= _PROTOBUF_BYTES:
        return None
    machine = cluster.Cluster(devices=[_named_device(device) for device in devices()])
    try:
        return tf_optimizer.OptimizeGraph(config, step, verbose=False, cluster=machine)
    except (tf.errors.OpError, RuntimeError, ValueError):
        return None
    finally:
        machine.Shutdown()


@functools.cache
def uses_onednn() -> bool:
    """Whether TensorFlow's CPU kernels are oneDNN's: by default they are, on processors that it is
    made for.

    Missing in public: asking for it. What Grappler fuses shows it.
    """
    with tf.Graph().as_default() as graph, tf.device(device_name("CPU")):
        x = tf.compat.v1.placeholder(tf.float32, (8, 8))
        y = tf.identity(x * tf.sigmoid(x), name="y")
    optimized = optimize(graph.as_graph_def(), [y.op.name])
    return optimized is not None and any(node.op == "_MklSwish" for node in optimized.node)


def devices() -> list[str]:
    """The kinds of this machine's devices; operations are placed on the last where they can be."""
    return [kind for kind in ("CPU", "GPU") if tf.config.list_physical_devices(kind)]


def device_name(kind: str) -> str:
    """The full name of the first device of a kind."""
    return f"/job:localhost/replica:0/task:0/device:{kind}:0"


def _named_device(kind: str) -> device_properties_pb2.NamedDevice:
    properties = device_properties_pb2.DeviceProperties(type=kind, num_cores=1)
    if kind == "GPU":
        device = tf.config.list_physical_devices(kind)[0]
        details = tf.config.experimental.get_device_details(device)
        major, minor = details.get("compute_capability", (0, 0))
        properties.environment["architecture"] = f"{major}.{minor}"
    return device_properties_pb2.NamedDevice(name=device_name(kind), properties=properties)


def behind_handle(handle: tf.Tensor) -> list[Any]:
    """Shape and dtype, as protobufs, of what is behind a resource handle; empty if it does not
    tell.

    Missing in public: the shape and dtype behind a handle.
    """
    data = handle_data_util.get_resource_handle_data(handle)
    return list(data.shape_and_type) if data is not None and data.is_set else []
