"""Small models with while loops: Keras' recurrent layers, custom cells, loops by hand."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras import layers, ops

from tests.echo import models

SEQUENCE, SHORT, TOKENS = models.SEQUENCE, models.SHORT, models.TOKENS
CASES: list[models.Case] = []
WITHOUT_XLA: set[str] = set()
"""Names of models whose untouched train step XLA does not compile, or for which it takes long."""


def _case(
    *inputs: models.Data, xla: bool = True, **settings: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(network: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append(models.Case(network.__name__, network, inputs, **settings))
        if not xla:
            WITHOUT_XLA.add(network.__name__)
        return network

    return add


@_case(SEQUENCE)
def lstm(x):
    return layers.Dense(3)(layers.LSTM(12)(x))


@_case(SEQUENCE)
def gru_that_returns_sequences(x):
    return layers.Dense(3)(layers.GRU(12, return_sequences=True)(x))


@_case(SEQUENCE)
def simple_rnn_and_gru_without_reset_after(x):
    x = layers.SimpleRNN(12, return_sequences=True, activation="gelu")(x)
    return layers.Dense(3)(layers.GRU(12, reset_after=False)(x))


@_case(SEQUENCE)
def lstm_with_dropout_and_recurrent_dropout(x):
    return layers.Dense(3)(layers.LSTM(12, dropout=0.2, recurrent_dropout=0.3)(x))


@_case(SEQUENCE)
def gru_with_recurrent_dropout(x):
    return layers.Dense(3)(layers.GRU(12, recurrent_dropout=0.3)(x))


@_case(SEQUENCE)
def stacked_bidirectional(x):
    x = layers.Bidirectional(layers.LSTM(6, return_sequences=True, recurrent_dropout=0.2))(x)
    return layers.Dense(3)(layers.Bidirectional(layers.GRU(6))(x))


@_case(TOKENS)
def masked_lstm(tokens):
    x = layers.Embedding(20, 8, mask_zero=True)(tokens)
    x = layers.LSTM(12, return_sequences=True, recurrent_dropout=0.2)(x)
    return layers.Dense(3)(layers.GRU(8)(x))


@_case(SEQUENCE)
def backwards(x):
    x = layers.LSTM(12, go_backwards=True, return_sequences=True, recurrent_dropout=0.2)(x)
    return layers.Dense(3)(x)


@_case(SEQUENCE)
def states_handed_on(x):
    _, *states = layers.LSTM(12, return_state=True, recurrent_dropout=0.2)(x)
    return layers.Dense(3)(layers.LSTM(12)(x[:, :4], initial_state=states))


@_case(models.Data((5, 6, 6, 2)), xla=False)
def convolutional_lstm(x):
    return layers.Flatten()(layers.ConvLSTM2D(3, 3, recurrent_dropout=0.2)(x))


@_case(SEQUENCE)
def stacked_cells(x):
    return layers.Dense(3)(layers.RNN([layers.LSTMCell(8), layers.GRUCell(6)])(x))


class AttentionDecoder(layers.Layer):
    """A GRU that looks at a sequence in each step: the case for which the paper was written."""

    def __init__(self, units: int, **arguments: Any):
        super().__init__(**arguments)
        self.units = units
        self.query, self.cell = layers.Dense(units), layers.GRUCell(units)

    def build(self, x_shape: Any, memory_shape: Any) -> None:
        self.query.build((None, self.units))
        self.score = self.add_weight(shape=(self.units,))
        self.cell.build((None, x_shape[-1] + memory_shape[-1]))

    def call(self, x: Any, memory: Any) -> Any:
        inputs = tf.TensorArray(tf.float32, x.shape[1]).unstack(tf.transpose(x, [1, 0, 2]))
        outputs = tf.TensorArray(tf.float32, x.shape[1])

        def step(i: Any, state: Any, made: Any) -> Any:
            energy = ops.tanh(ops.expand_dims(self.query(state), 1) + memory)
            weights = ops.softmax(ops.sum(energy * self.score, axis=-1))
            context = ops.sum(ops.expand_dims(weights, -1) * memory, axis=1)
            read = ops.concatenate([inputs.read(i), context], -1)
            _, (state,) = self.cell(read, (state,))
            return i + 1, state, made.write(i, state)

        start = ops.zeros_like(memory[:, 0])
        count = x.shape[1]
        loop = tf.while_loop(
            lambda i, *_: i < count, step, (0, start, outputs), maximum_iterations=count
        )
        return tf.transpose(loop[2].stack(), [1, 0, 2])


@_case(SEQUENCE, SHORT)
def attention_decoder(x, memory):
    return layers.Dense(3)(AttentionDecoder(12)(x, layers.Dense(12)(memory)))


@_case(TOKENS)
def additive_attention_between_loops(tokens):
    x = layers.Embedding(20, 8)(tokens)
    encoded = layers.LSTM(12, return_sequences=True)(x)
    decoded = layers.LSTM(12, return_sequences=True, recurrent_dropout=0.2)(x)
    attended = layers.AdditiveAttention()([decoded, encoded])
    return layers.Dense(3)(layers.Concatenate()([decoded, attended]))


class Loop(layers.Layer):
    """A layer that runs a function with a weight of its own."""

    def __init__(self, function: Callable[[Any, Any], Any], **arguments: Any):
        super().__init__(**arguments)
        self.function = function

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), initializer="glorot_uniform")

    def call(self, inputs: Any) -> Any:
        return self.function(inputs, self.kernel)


def _step(x: tf.Tensor, kernel: Any) -> tf.Tensor:
    return x + tf.tanh(tf.matmul(x, kernel)) * tf.sigmoid(x)


def _fixed_count(x, kernel):
    return tf.while_loop(lambda i, _: i < 5, lambda i, y: (i + 1, _step(y, kernel)), (0, x))[1]


def _until_small(x, kernel):
    """How often it runs depends on the data; XLA needs a limit for the gradient."""

    def is_large(i, y):
        return (tf.reduce_mean(tf.abs(y)) < 1.5) & (i < 7)

    def body(i, y):
        return i + 1, _step(y, kernel)

    return tf.while_loop(is_large, body, (0, x), maximum_iterations=8)[1]


def _without_limit(x, kernel):
    def is_large(y):
        return tf.reduce_mean(tf.abs(y)) < 1.5

    return tf.while_loop(is_large, lambda y: (_step(y, kernel) + 0.1 * tf.sign(y),), (x,))[0]


def _with_arrays(x, kernel):
    """Reads from and writes to TensorArrays, also what it wrote before."""
    inputs = tf.TensorArray(tf.float32, 5).unstack(tf.stack([x * float(i) for i in range(5)]))
    outputs = tf.TensorArray(tf.float32, 5, clear_after_read=False, element_shape=x.shape)

    def body(i, y, made):
        y = tf.tanh(_step(y, kernel) + inputs.read(i))
        made = made.write(i, y * tf.sigmoid(y))
        return i + 1, y + made.read(i), made

    _, y, made = tf.while_loop(lambda i, *_: i < 5, body, (0, x, outputs))
    return y + tf.reduce_sum(made.stack(), 0)


def _nested(x, kernel):
    def inner(i, y):
        return i + 1, tf.tanh(_step(y, kernel)) * y

    def outer(i, y):
        y = tf.nn.gelu(y)
        y = tf.while_loop(lambda j, _: j < 3, inner, (0, y), maximum_iterations=3)[1]
        return i + 1, tf.nn.silu(_step(y, kernel))

    loop = tf.while_loop(lambda i, _: i < 4, outer, (0, x), maximum_iterations=4)
    return loop[1]


def _two_after_another(x, kernel):
    return _fixed_count(tf.nn.gelu(_fixed_count(x, kernel)), kernel)


def _branch_inside(x, kernel):
    def body(i, y):
        y = tf.cond(i % 2 == 0, lambda: tf.tanh(y) * y, lambda: _step(y, kernel))
        return i + 1, tf.nn.gelu(y)

    return tf.while_loop(lambda i, _: i < 4, body, (0, x), maximum_iterations=4)[1]


@tf.function
def _called(x):
    return tf.tanh(x) * tf.sigmoid(x)


def _call_inside(x, kernel):
    def body(i, y):
        return i + 1, tf.nn.gelu(tf.matmul(_called(y), kernel))

    return tf.while_loop(lambda i, _: i < 4, body, (0, x), maximum_iterations=4)[1]


def _with_integers(x, kernel):
    """Gathers, comparisons and random numbers from a seed that changes in each iteration."""

    def body(i, seed, y):
        noise = tf.random.stateless_uniform(tf.shape(y), tf.stack([seed, i]))
        y = tf.where(noise > 0.3, tf.nn.gelu(tf.matmul(y, kernel)), y * noise)
        return i + 1, seed * 3 + 1, y

    return tf.while_loop(lambda i, *_: i < 4, body, (0, 7, x), maximum_iterations=4)[2]


def _gradients_that_wait(x, kernel):
    """TensorFlow lets what these gradients read wait for the gradient above."""

    def body(i, y):
        y = tf.nn.gelu(tf.matmul(y, kernel) * tf.sin(y))
        return i + 1, tf.nn.gelu(tf.matmul(y, kernel) * tf.nn.silu(y))

    return tf.while_loop(lambda i, _: i < 4, body, (0, x), maximum_iterations=4)[1]


def _shapes_read_early(x, kernel):
    """The gradient reads shapes of what is recomputed before the gradient above is there."""

    def body(i, y):
        first, second = tf.split(
            tf.matmul(tf.concat([y, y], -1), tf.concat([kernel, kernel], 0)), 2, 1
        )
        return i + 1, tf.concat([tf.nn.silu(first) * second, tf.tanh(first) + second], -1)

    return tf.while_loop(lambda i, _: i < 4, body, (0, x), maximum_iterations=4)[1]


def _until_infinite(x, kernel):
    """The limit in the condition is no number of iterations."""

    def is_finite(i, y):
        return (tf.reduce_max(y) < float("inf")) & (i < 3)

    return tf.while_loop(is_finite, lambda i, y: (i + 1, _step(y, kernel)), (0, x))[1]


for _function, _settings in (
    (_fixed_count, {"xla": False}),
    (_until_small, {}),
    (_without_limit, {"xla": False}),
    (_with_arrays, {"xla": False}),
    (_nested, {}),
    (_two_after_another, {"xla": False}),
    (_branch_inside, {}),
    (_call_inside, {}),
    (_with_integers, {}),
    (_gradients_that_wait, {}),
    (_shapes_read_early, {}),
    (_until_infinite, {"xla": False}),
):

    def _network(x: Any, function: Callable[[Any, Any], Any] = _function) -> Any:
        x = layers.Dense(12, activation="gelu")(x)
        return layers.Dense(3)(Loop(function)(x))

    _network.__name__ = f"loop{_function.__name__}"
    _case(models.VECTOR, **_settings)(_network)


class Written(layers.Layer):
    """Two loops, one in the other, that read a variable which changes before the gradient runs.

    Args:
        where: `"inner"` loop, `"outer"` loop or `"after"` the loops.
    """

    def __init__(self, where: str, **arguments: Any):
        super().__init__(**arguments)
        self.where = where

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), initializer="glorot_uniform")
        self.factor = tf.Variable(1.0, trainable=False)

    def call(self, x: Any) -> Any:
        def inner(j: Any, y: Any) -> Any:
            self._write("inner")
            return j + 1, tf.tanh(_step(y, self.kernel) * self.factor) * tf.sigmoid(y * self.factor)

        def outer(i: Any, y: Any) -> Any:
            self._write("outer")
            y = tf.while_loop(lambda j, _: j < 3, inner, (0, y), maximum_iterations=3)[1]
            return i + 1, tf.nn.gelu(y * self.factor)

        y = tf.while_loop(lambda i, _: i < 3, outer, (0, x), maximum_iterations=3)[1]
        self._write("after")
        return y

    def _write(self, where: str) -> None:
        if where == self.where:
            self.factor.assign(self.factor * 0.9)


for _where in ("inner", "outer", "after"):

    def _written(x: Any, where: str = _where) -> Any:
        return layers.Dense(3)(Written(where)(layers.Dense(12, activation="gelu")(x)))

    _written.__name__ = f"variable_written_{_where}"
    _case(models.VECTOR)(_written)


def named(name: str) -> models.Case:
    """The case of that name."""
    return next(case for case in CASES if case.name == name)
