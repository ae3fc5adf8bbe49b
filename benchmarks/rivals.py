"""What else there is against activation memory in TensorFlow and Keras, used as a user would."""

import functools
from collections.abc import Callable

import keras
import tensorflow as tf
from workloads import Workload


def remat_scope(workload: Workload) -> keras.Model:
    """The model, built under `keras.RematScope`."""
    with keras.RematScope(mode="full"):
        return workload.build()


def recompute_grad(workload: Workload) -> keras.Model:
    """The model with `tf.recompute_grad` around the call of each layer, by hand.

    It runs a layer's Python again: dropout draws another mask, so that gradients are wrong, and
    batch normalization updates its averages twice.
    """
    model = workload.build()
    for layer in model.layers:
        if not isinstance(layer, keras.layers.InputLayer | keras.layers.Embedding):
            layer.call = _recomputed(layer.call)
    return model


def grappler(workload: Workload) -> keras.Model:
    """The model, with Grappler's recomputation switched on.

    There is no public switch, and by itself it looks for ops named "gradients/", which is not what
    TensorFlow 2 calls them.
    """
    from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
    from tensorflow.python.eager import context

    config = config_pb2.ConfigProto()
    rewrites = config.graph_options.rewrite_options
    rewrites.memory_optimization = rewriter_config_pb2.RewriterConfig.RECOMPUTATION_HEURISTICS
    rewrites.memory_optimizer_target_node_name_scope = "gradient_tape/"
    context.context()._config = config
    return workload.build()


RIVALS: dict[str, Callable[[Workload], keras.Model]] = {
    "RematScope": remat_scope,
    "recompute_grad": recompute_grad,
    "Grappler": grappler,
}
"""For each rival what makes the model, before anything has run."""


def _recomputed(call: Callable[..., object]) -> Callable[..., object]:
    """`call` under `tf.recompute_grad`, which takes no keywords, lists or None."""

    @functools.wraps(call)
    def wrapper(*args: object, **kwargs: object) -> object:
        flat = tf.nest.flatten((args, kwargs))
        places = [i for i, value in enumerate(flat) if tf.is_tensor(value)]

        def with_tensors(*tensors: tf.Tensor) -> object:
            given = dict(zip(places, tensors, strict=True))
            full = [given.get(i, value) for i, value in enumerate(flat)]
            positional, named = tf.nest.pack_sequence_as((args, kwargs), full)
            return call(*positional, **named)

        return tf.recompute_grad(with_tensors)(*(flat[i] for i in places))

    return wrapper
