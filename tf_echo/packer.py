"""Keep bits of residuals in TensorFlow's graph; see `packing`."""

import math
from collections.abc import Collection
from typing import Any

import tensorflow as tf

from tf_echo import gating, tf_internals
from tf_echo.gates import Gate
from tf_echo.plan import PackedResidual
from tf_echo.tracer import Trace

_GATHER = 0x0102040810204080
"""Times a word of eight bytes that are 0 or 1: their bits, the first one lowest, in its highest
byte."""
_SPREAD = 0x0101010101010101
_CHOOSE = 0x8040201008040201
"""Of a byte that is repeated eight times the first bit in the first byte, and so on."""


def keep_bits(
    trace: Trace, residual: PackedResidual, gradient: tf.Tensor, added: Collection[tf.Operation]
) -> None:
    """Packs a residual; what reads it after the forward pass reads what is unpacked.

    Args:
        trace: the trace.
        residual: what to pack.
        gradient: what unpacking waits for.
        added: operations that are not in the trace and belong to the backward pass.
    """
    view = trace.view
    number = view.tensor_named(residual.tensor)
    source = trace.tensor(number)
    late = [op for op in source.consumers() if op in added]
    with (
        trace.graph.as_default(),
        tf.control_dependencies(None),
        tf.device(source.op.device or None),
        tf.name_scope(f"{view.nodes[view.tensors[number].node].name}/bits/"),
    ):
        bits = _pack(_mask(source, residual.test))
        unpacked = _unpack(Gate(gradient).tie(bits), source, residual.test)
    for reader in sorted(set(view.consumers[number])):
        node = view.nodes[reader]
        if not node.backward and gating.reads_values(view, node):
            tf_internals.wait_for(trace.operations[reader], bits.op)
    places = [
        p for r in set(gating.backward_readers(view, number)) for p in trace.places(r, number)
    ]
    places += [(op, p) for op in late for p, t in enumerate(op.inputs) if t is source]
    for operation, place in places:
        tf_internals.replace_input(operation, place, unpacked)


def _mask(source: tf.Tensor, test: str) -> tf.Tensor:
    """What the bits say of a tensor, as booleans."""
    if test == "x":
        return source
    mask = tf.raw_ops.Greater(x=source, y=tf.constant(0, source.dtype))
    if test == "x > 0":
        return mask
    return tf.raw_ops.LogicalAnd(
        x=mask, y=tf.raw_ops.Less(x=source, y=tf.constant(6, source.dtype))
    )


def _pack(mask: tf.Tensor) -> tf.Tensor:
    """A vector of bytes, the bits of eight booleans each, zeros at the end."""
    flat = tf.reshape(tf.cast(mask, tf.uint8), [-1])
    if not _fills_bytes(mask):
        flat = tf.pad(flat, [[0, -tf.size(flat) % 8]])
    words = tf.bitcast(tf.reshape(flat, [-1, 8]), tf.uint64)
    gathered = tf.bitwise.right_shift(words * tf.constant(_GATHER, tf.uint64), _word(56))
    return tf.cast(gathered, tf.uint8)


def _unpack(bits: tf.Tensor, like: tf.Tensor, test: str) -> tf.Tensor:
    """Of the shape and dtype of a tensor what passes the test where the bit is set, else zeros."""
    words = tf.cast(bits, tf.uint64) * _word(_SPREAD)
    flat = tf.reshape(tf.bitcast(tf.bitwise.bitwise_and(words, _word(_CHOOSE)), tf.uint8), [-1])
    if not _fills_bytes(like):
        flat = flat[: tf.size(like)]
    # Where its bit is set, a byte is some power of two.
    chosen = flat if test == "x > 0" else tf.not_equal(flat, 0)
    return tf.reshape(tf.cast(chosen, like.dtype), _shape(like))


def _shape(tensor: tf.Tensor) -> Any:
    """The tensor's shape, for a reshape, without holding the tensor if that can be."""
    if tensor.shape.rank is None or list(tensor.shape).count(None) > 1:
        return tf.shape(tensor)
    return [-1 if size is None else size for size in tensor.shape]


def _fills_bytes(tensor: tf.Tensor) -> bool:
    """Whether the number of elements is known to be a multiple of eight."""
    if tensor.shape.rank is None:
        return False
    known = math.prod(size for size in tensor.shape if size is not None)
    return bool(known % 8 == 0)


def _word(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint64)
