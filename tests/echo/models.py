"""Small models, one case for each way in which a train step can be built.

Batches are large and layers narrow, so that activations outweigh weights and a plan pays.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

BATCH, STEPS = 160, 5
_LAST = 70
"""Rows of the last batch where the batch size is left open."""


@dataclasses.dataclass(frozen=True)
class Data:
    """One input or target of a model."""

    shape: tuple[int, ...]
    kind: str = "normal"
    """`"normal"`; `"bits"`; or `"tokens"`, from 1 and below `high`, sequences padded with zeros."""
    high: int = 0

    def rows(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Random values."""
        if self.kind == "normal":
            return rng.normal(size=(count, *self.shape)).astype("float32")
        if self.kind == "bits":
            return rng.integers(0, 2, size=(count, *self.shape)).astype("bool")
        tokens = rng.integers(1, self.high, size=(count, *self.shape), dtype=np.int32)
        if len(self.shape) != 1:
            return tokens
        lengths = rng.integers(2, self.shape[0] + 1, size=(count, 1))
        return tokens * (np.arange(self.shape[0]) < lengths)


VECTOR = Data((16,))
SEQUENCE, SHORT = Data((10, 8)), Data((5, 8))
IMAGE = Data((8, 8, 4))
TOKENS = Data((10,), "tokens", 20)
LABEL = Data((), "tokens", 4)


@dataclasses.dataclass(frozen=True)
class Case:
    """One model with its data."""

    name: str
    network: Callable[..., Any]
    """From the model's inputs to its outputs."""
    inputs: tuple[Data, ...]
    targets: tuple[Data, ...] = ()
    """By default normal values of the outputs' shapes."""
    model: type[keras.Model] = keras.Model
    compiling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fitting: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weighted: bool = False
    """Whether samples have weights."""

    def __str__(self) -> str:
        return self.name

    def build(self) -> keras.Model:
        """A fresh model."""
        inputs = [_input(data) for data in self.inputs]
        return self.model(inputs if len(inputs) > 1 else inputs[0], self.network(*inputs))

    def dataset(self, open_batch: bool) -> tf.data.Dataset:
        """Five batches. With an open batch size the last one is smaller."""
        rng = np.random.default_rng(5)
        count = BATCH * (STEPS - 1) + (_LAST if open_batch else BATCH)
        x = tuple(data.rows(count, rng) for data in self.inputs)
        outputs = self.targets or [Data(o.shape[1:]) for o in _flat(self.build().outputs)]
        y = tuple(data.rows(count, rng) for data in outputs)
        parts: list[Any] = [part if len(part) > 1 else part[0] for part in (x, y)]
        if self.weighted:
            parts.append(rng.uniform(0.1, 2.0, size=count).astype("float32"))
        return tf.data.Dataset.from_tensor_slices(tuple(parts)).batch(
            BATCH, drop_remainder=not open_batch
        )


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _input(data: Data) -> keras.KerasTensor:
    return keras.Input(data.shape, dtype=str(data.rows(1, np.random.default_rng(0)).dtype))


CASES: list[Case] = []


def _case(*inputs: Data, **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(network: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append(Case(network.__name__, network, inputs, **settings))
        return network

    return add


def _dense_stack(x: Any, *activations: Any) -> Any:
    for activation in activations:
        x = layers.Dense(24)(x)
        x = layers.Activation(activation)(x) if isinstance(activation, str) else activation(x)
    return layers.Dense(3)(x)


def _widen(x: Any) -> Any:
    """Layers whose residuals are worth releasing before what comes next reaches the peak."""
    for _ in range(2):
        x = layers.Dense(24, activation="gelu")(x)
    return x


# Activations.


@_case(VECTOR)
def gelu_swish_relu_and_tanh(x):
    return _dense_stack(x, "gelu", "swish", "relu", "tanh")


@_case(VECTOR)
def selu_elu_softplus_and_mish(x):
    return _dense_stack(_widen(x), "selu", "elu", "softplus", "mish")


@_case(VECTOR)
def leaky_relu_hard_silu_softmax_and_prelu(x):
    return _dense_stack(x, "leaky_relu", "hard_silu", "softmax", layers.PReLU())


@_case(VECTOR)
def sigmoid_softsign_relu6_and_log_softmax(x):
    return _dense_stack(x, "sigmoid", "softsign", "relu6", "log_softmax")


@_case(VECTOR)
def exact_and_approximate_gelu(x):
    return _dense_stack(
        x,
        layers.Lambda(lambda t: ops.gelu(t, approximate=True)),
        layers.Lambda(lambda t: ops.gelu(t, approximate=False)),
        "exponential",
    )


# Convolutions and pooling.


@_case(SEQUENCE)
def strided_and_dilated_conv1d(x):
    x = layers.Conv1D(8, 3, padding="causal", dilation_rate=2, activation="gelu")(x)
    x = layers.Conv1D(8, 3, strides=2, padding="same", activation="swish")(x)
    return layers.Conv1D(4, 3, activation="tanh")(x)


@_case(IMAGE)
def strided_and_dilated_conv2d(x):
    x = layers.Conv2D(8, 3, padding="same", dilation_rate=2, activation="swish")(x)
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation="gelu")(x)
    return layers.Conv2D(4, 3, activation="tanh")(x)


@_case(IMAGE)
def separable_and_depthwise_conv2d(x):
    x = layers.SeparableConv2D(8, 3, padding="same", activation="swish")(x)
    x = layers.DepthwiseConv2D(3, depth_multiplier=2, padding="same", activation="gelu")(x)
    return layers.Conv2D(2, 1)(x)


@_case(SEQUENCE)
def separable_conv1d(x):
    x = layers.SeparableConv1D(8, 3, padding="same", activation="swish")(x)
    return layers.SeparableConv1D(8, 3, padding="same", activation="gelu")(x)


@_case(IMAGE)
def transposed_conv2d_and_upsampling(x):
    x = layers.Conv2DTranspose(6, 3, strides=2, padding="same", activation="swish")(x)
    x = layers.Conv2D(4, 3, strides=2, padding="same", activation="gelu")(x)
    x = layers.UpSampling2D(2, interpolation="bilinear")(x)
    x = layers.Conv2D(4, 3, strides=2, activation="gelu")(x)
    return layers.UpSampling2D(2)(x)


@_case(IMAGE)
def max_average_and_global_pooling(x):
    x = layers.Conv2D(12, 3, padding="same", activation="gelu")(x)
    x = layers.Conv2D(8, 3, padding="same", activation="swish")(x)
    x = layers.MaxPooling2D(2)(x)
    x = layers.Conv2D(8, 3, padding="same", activation="gelu")(x)
    x = layers.AveragePooling2D(2)(x)
    x = layers.Conv2D(8, 2, padding="same", activation="gelu")(x)
    x = layers.concatenate([layers.GlobalMaxPooling2D()(x), layers.GlobalAveragePooling2D()(x)])
    return layers.Dense(3)(x)


@_case(Data((4, 6, 6, 2)))
def conv3d_padding_and_cropping(x):
    x = layers.ZeroPadding3D(1)(x)
    x = layers.Conv3D(6, 3, activation="swish")(x)
    x = layers.Cropping3D(1)(x)
    x = layers.Conv3D(6, 2, activation="gelu")(x)
    return layers.Flatten()(x)


# Normalizations.


@_case(IMAGE)
def batch_normalization_after_conv(x):
    for _ in range(3):
        x = layers.Conv2D(8, 3, padding="same")(x)
        x = layers.Activation("relu")(layers.BatchNormalization(momentum=0.9)(x))
    return layers.Dense(3)(layers.GlobalAveragePooling2D()(x))


@_case(VECTOR)
def batch_normalization_after_dense(x):
    for _ in range(2):
        x = layers.BatchNormalization(momentum=0.9)(layers.Dense(24, activation="swish")(x))
    return layers.Dense(3)(x)


@_case(SEQUENCE)
def layer_normalization(x):
    for _ in range(3):
        x = layers.LayerNormalization()(layers.Dense(16, activation="gelu")(x))
    return layers.Dense(3)(x)


@_case(IMAGE)
def group_normalization(x):
    for _ in range(2):
        x = layers.Conv2D(8, 3, padding="same")(x)
        x = layers.Activation("swish")(layers.GroupNormalization(groups=4)(x))
    return layers.Conv2D(3, 1)(x)


@_case(SEQUENCE)
def rms_and_unit_normalization(x):
    for _ in range(2):
        x = layers.RMSNormalization()(layers.Dense(16, activation="gelu")(x))
    return layers.Dense(3)(layers.UnitNormalization()(x))


@_case(VECTOR)
def spectral_normalization(x):
    for _ in range(2):
        x = layers.SpectralNormalization(layers.Dense(24, activation="gelu"))(x)
    return layers.Dense(3)(x)


# Random numbers.


@_case(VECTOR)
def dropout(x):
    for _ in range(3):
        x = layers.Dropout(0.3)(layers.Dense(24, activation="gelu")(x))
    return layers.Dense(3)(x)


@_case(SEQUENCE)
def spatial_dropout_and_gaussian_noise(x):
    x = layers.SpatialDropout1D(0.3)(layers.Dense(16, activation="gelu")(x))
    x = layers.GaussianNoise(0.1)(layers.Dense(16, activation="swish")(x))
    x = layers.GaussianDropout(0.2)(layers.Dense(16, activation="gelu")(x))
    x = layers.AlphaDropout(0.2)(layers.Dense(16, activation="selu")(x))
    return layers.Dense(3)(x)


# Attention.


@_case(SEQUENCE)
def self_attention(x):
    x = _widen(x)
    y = layers.MultiHeadAttention(2, 8)(x, x)
    return layers.LayerNormalization()(layers.add([x, y]))


@_case(SEQUENCE)
def causal_attention_with_dropout(x):
    x = _widen(x)
    y = layers.MultiHeadAttention(2, 8, dropout=0.2)(x, x, use_causal_mask=True)
    return layers.Dense(4, activation="gelu")(layers.add([x, y]))


@_case(SEQUENCE, Data((6, 8)), Data((10, 6), "bits"))
def cross_attention_with_a_mask(query, value, mask):
    query = _widen(query)
    y = layers.MultiHeadAttention(2, 8, dropout=0.1)(query, value, attention_mask=mask)
    return layers.Dense(4)(y)


@_case(SEQUENCE, Data((12, 8)))
def grouped_query_attention(query, value):
    return layers.Dense(4)(layers.GroupQueryAttention(8, 4, 2)(query, value))


@_case(SEQUENCE, Data((12, 8)))
def additive_attention(query, value):
    y = layers.AdditiveAttention()([layers.Dense(16)(_widen(query)), layers.Dense(16)(value)])
    return layers.Dense(4)(y)


@_case(SEQUENCE, Data((12, 8)))
def dot_product_attention(query, value):
    attention = layers.Attention(use_scale=True, score_mode="concat", dropout=0.2)
    return layers.Dense(4)(attention([layers.Dense(16)(_widen(query)), layers.Dense(16)(value)]))


@_case(
    TOKENS,
    targets=(Data((10,), "tokens", 20),),
    compiling={"loss": "sparse_categorical_crossentropy"},
)
def transformer(tokens):
    x = layers.Embedding(20, 16, mask_zero=True)(tokens)
    for _ in range(2):
        y = layers.MultiHeadAttention(2, 8, dropout=0.1)(x, x, use_causal_mask=True)
        x = layers.LayerNormalization()(layers.add([x, layers.Dropout(0.1)(y)]))
        y = layers.Dense(16)(layers.Dense(32, activation="gelu")(x))
        x = layers.LayerNormalization()(layers.add([x, layers.Dropout(0.1)(y)]))
    return layers.Dense(20, activation="softmax")(x)


# Sequences.


@_case(TOKENS)
def masked_embedding(tokens):
    x = layers.Embedding(20, 16, mask_zero=True)(tokens)
    x = layers.GlobalAveragePooling1D()(_widen(x))
    return layers.Dense(3)(x)


@_case(TOKENS)
def unrolled_simple_rnn(tokens):
    x = layers.Embedding(20, 16, mask_zero=True)(tokens)
    return layers.Dense(3)(layers.SimpleRNN(16, unroll=True)(_widen(x)))


@_case(SHORT)
def unrolled_lstm(x):
    x = layers.LSTM(16, unroll=True, return_sequences=True)(x)
    return layers.Dense(3)(layers.LSTM(8, unroll=True)(x))


@_case(SHORT)
def unrolled_gru_with_recurrent_dropout(x):
    return layers.Dense(3)(layers.GRU(16, unroll=True, dropout=0.2, recurrent_dropout=0.2)(x))


@_case(SHORT)
def masking_and_time_distributed(x):
    x = layers.Masking()(layers.Activation("relu")(x))
    x = layers.TimeDistributed(layers.Dense(16, activation="gelu"))(x)
    return layers.SimpleRNN(4, unroll=True, return_sequences=True)(x)


@_case(SEQUENCE)
def lstm_in_a_loop(x):
    x = layers.Dense(16, activation="gelu")(x)
    x = layers.LSTM(8, return_sequences=True)(x)
    return layers.Dense(3)(layers.Dense(24, activation="gelu")(x))


@_case(SEQUENCE)
def bidirectional_gru_in_a_loop(x):
    x = layers.Dense(24, activation="gelu")(x)
    x = layers.Bidirectional(layers.GRU(4, return_sequences=True))(x)
    return layers.Dense(3)(layers.Dense(24, activation="gelu")(x))


@_case(SEQUENCE)
def einsum_dense(x):
    x = layers.EinsumDense("abc,cde->abde", (10, 2, 8), bias_axes="de", activation="gelu")(x)
    return layers.EinsumDense("abde,def->abf", (10, 4), activation="tanh")(x)


@_case(SEQUENCE)
def cumulative_sums(x):
    x = layers.Dense(16, activation="gelu")(x)
    x = layers.Lambda(lambda t: ops.cumsum(t, axis=1))(x)
    x = layers.Dense(16, activation="swish")(x)
    x = layers.Lambda(lambda t: tf.math.cumprod(1.0 + 0.1 * ops.tanh(t), axis=1))(x)
    return layers.Dense(3)(x)


@_case(SEQUENCE)
def gathers_sorts_and_slices(x):
    x = layers.Dense(16)(_widen(x))
    x = layers.Lambda(lambda t: ops.take(t, [0, 3, 3, 1], axis=1))(x)
    x = layers.Lambda(lambda t: ops.flip(ops.roll(t, 1, axis=1), axis=2))(x)
    x = layers.Lambda(lambda t: ops.swish(t[:, 1:, ::2]) * ops.gelu(t[:, :-1, 1::2]))(x)
    x = layers.Lambda(lambda t: tf.math.top_k(t, 4).values)(layers.Dense(8)(x))
    x = layers.Lambda(lambda t: ops.where(t > 0, ops.sin(t), ops.exp(t)))(x)
    return layers.Dense(3)(x)


@_case(SEQUENCE)
def powers_logs_and_extremes(x):
    x = layers.Dense(16, activation="softplus")(x)
    x = layers.Lambda(lambda t: ops.log1p(t) / ops.sqrt(1.0 + ops.square(t)))(x)
    x = layers.Dense(16)(x)
    x = layers.Lambda(lambda t: ops.maximum(t, ops.minimum(-t, 0.3 * t)) + ops.abs(t))(x)
    x = layers.Dense(16)(x)
    x = layers.Lambda(lambda t: ops.logsumexp(t, axis=-1, keepdims=True) * ops.cos(t))(x)
    x = layers.Dense(16)(x)
    x = layers.Lambda(lambda t: ops.clip(t, -1, 1) * ops.max(t, axis=1, keepdims=True))(x)
    x = layers.Lambda(
        lambda t: ops.power(ops.abs(t) + 0.5, 1.5) * ops.std(t, axis=1, keepdims=True)
    )(x)
    return layers.Dense(3)(x)


# Topologies.


@_case(VECTOR)
def residuals_and_concatenations(x):
    for _ in range(3):
        y = layers.Dense(16, activation="gelu")(x)
        x = layers.add([x, layers.Dense(16, activation="swish")(y)])
    y = layers.multiply([layers.Dense(16, activation="sigmoid")(x), x])
    return layers.Dense(3)(layers.concatenate([x, y, layers.maximum([x, y])]))


@_case(VECTOR)
def the_same_twice(x):
    """Grappler merges what computes the same, also what only the backward pass reads."""
    for _ in range(3):
        x = layers.Dense(24)(x)
        branches = [layers.Dense(24)(layers.Activation("gelu")(x)) for _ in range(3)]
        x = layers.add([*branches, layers.multiply([ops.tanh(x), ops.tanh(x)])])
    return layers.Dense(3)(x)


@_case(VECTOR, SEQUENCE, compiling={"loss": ["mse", "mae"], "loss_weights": [1.0, 0.3]})
def several_inputs_and_outputs(x, y):
    x = layers.Dense(10, activation="gelu")(x)
    y = layers.add([layers.Dense(10, activation="swish")(y), layers.Reshape((1, 10))(x)])
    y = layers.Dense(12, activation="gelu")(y)
    return [layers.Dense(2, name="first")(x), layers.Dense(3, name="second")(y)]


@_case(VECTOR)
def shared_layers(x):
    shared = layers.Dense(16, activation="gelu")
    normalized = layers.LayerNormalization()
    for _ in range(3):
        x = normalized(shared(x))
    return layers.Dense(3)(x)


@_case(
    TOKENS,
    targets=(Data((10,), "tokens", 20),),
    compiling={"loss": "sparse_categorical_crossentropy"},
)
def tied_embedding(tokens):
    embedding = layers.ReversibleEmbedding(20, 16)
    x = layers.Dense(16, activation="gelu")(embedding(tokens))
    return layers.Softmax()(embedding(x, reverse=True))


@_case(VECTOR)
def frozen_layers(x):
    x = layers.Dense(24, activation="gelu")(x)
    x = layers.Dense(24, activation="gelu", trainable=False)(x)
    x = layers.BatchNormalization(trainable=False)(layers.Dense(24, activation="swish")(x))
    return layers.Dense(3)(x)


@_case(VECTOR)
def constraints_and_regularizers(x):
    for _ in range(3):
        x = layers.Dense(
            24,
            activation="gelu",
            kernel_regularizer="l2",
            activity_regularizer=keras.regularizers.L1L2(0.01, 0.02),
            kernel_constraint=keras.constraints.MaxNorm(1.0),
        )(x)
    return layers.Dense(3)(x)


# Losses.


class SquareLoss(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(ops.tanh(x))))
        return x


@_case(VECTOR)
def add_loss(x):
    for _ in range(3):
        x = SquareLoss()(layers.Dense(24, activation="gelu")(x))
    return layers.Dense(3)(x)


@_case(VECTOR, weighted=True, compiling={"loss": "huber"})
def sample_weights(x):
    return _dense_stack(x, "gelu", "swish")


@_case(
    VECTOR,
    targets=(LABEL,),
    compiling={"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
    fitting={"class_weight": {0: 1.0, 1: 0.5, 2: 2.0, 3: 3.0}},
)
def class_weights(x):
    return layers.Dense(4)(_dense_stack(x, "gelu", "swish"))


def _log_cosh_of_square(y_true, y_pred):
    return ops.mean(ops.log(ops.cosh(ops.tanh(y_pred) - y_true)) + ops.square(ops.sin(y_pred)), -1)


@_case(SEQUENCE, compiling={"loss": _log_cosh_of_square})
def custom_loss(x):
    return _dense_stack(x, "gelu", "swish")


# Custom gradients.


@tf.custom_gradient
def _reverse_gradient(x):
    return tf.identity(x), lambda upstream: -0.5 * upstream


@tf.custom_gradient
def _clipped_exp(x):
    y = tf.exp(x)
    return y, lambda upstream: upstream * tf.minimum(y, 2.0)


@_case(VECTOR, compiling={"loss": ["mse", "mse"]})
def custom_gradients(x):
    x = layers.Dense(24, activation="gelu")(x)
    y = layers.Dense(24, activation="gelu")(layers.Lambda(_reverse_gradient)(x))
    x = layers.Lambda(_clipped_exp)(layers.Dense(24, activation="tanh")(x))
    return [layers.Dense(3, name="label")(x), layers.Dense(1, name="domain")(y)]


# What is kept whole.


def _branch(x):
    positive = tf.reduce_sum(x) > 0.0
    return tf.cond(positive, lambda: tf.tanh(x) * x, lambda: tf.sigmoid(x) + x)


def _loop(x):
    return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, tf.tanh(y) * y), (0, x))[1]


@tf.function
def _called(x):
    return tf.tanh(x) * tf.sigmoid(x)


@_case(VECTOR)
def branches_loops_and_calls(x):
    for function in (_branch, _loop, _called):
        x = layers.Dense(24, activation="gelu")(x)
        x = layers.Lambda(function, output_shape=(24,))(x)
    return layers.Dense(3)(layers.Dense(24, activation="gelu")(x))


# Train steps of their own.


class TrainStep(keras.Model):
    """The train step that the documentation of Keras shows."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss, more = self.losses_of(tape, x, y)
            loss = self.optimizer.scale_loss(loss)
        gradients, returned = self.gradients_of(tape, loss, more)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, **returned}

    def losses_of(self, tape, x, y):
        return self.compute_loss(x=x, y=y, y_pred=self(x, training=True)), None

    def gradients_of(self, tape, loss, more):
        return tape.gradient(loss, self.trainable_variables), {}


@_case(VECTOR, model=TrainStep)
def own_train_step(x):
    return _dense_stack(x, "gelu", "swish", "gelu")


class Saliency(TrainStep):
    """Also takes the loss's gradient of the inputs."""

    def losses_of(self, tape, x, y):
        tape.watch(x)
        return self.compute_loss(x=x, y=y, y_pred=self(x, training=True)), x

    def gradients_of(self, tape, loss, x):
        saliency, *gradients = tape.gradient(loss, [x, *self.trainable_variables])
        return gradients, {"saliency": saliency}


@_case(VECTOR, model=Saliency)
def gradient_of_the_inputs(x):
    return _dense_stack(x, "gelu", "swish", "gelu")


class InnerActivation(TrainStep):
    """Also takes the loss's gradient of what an inner layer returns."""

    def losses_of(self, tape, x, y):
        inner = self.get_layer("inner")
        first = keras.Model(self.inputs, inner.output)(x, training=True)
        y_pred = self.get_layer("rest")(first, training=True)
        return self.compute_loss(x=x, y=y, y_pred=y_pred), first

    def gradients_of(self, tape, loss, first):
        wrt_first, *gradients = tape.gradient(loss, [first, *self.trainable_variables])
        return gradients, {"weight": tf.reduce_mean(wrt_first * first, axis=0)}


@_case(VECTOR, model=InnerActivation)
def gradient_of_an_inner_activation(x):
    x = layers.Dense(24, activation="gelu")(layers.Dense(24, activation="gelu")(x))
    x = layers.Activation("swish", name="inner")(x)
    rest = [
        layers.Dense(24, activation="gelu"),
        layers.Dense(24, activation="gelu"),
        layers.Dense(3),
    ]
    return keras.Sequential(rest, name="rest")(x)


class PersistentTape(keras.Model):
    """Uses one tape twice, also after the update."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            loss = self.optimizer.scale_loss(
                self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            )
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "saliency": tape.gradient(loss, x)}


@_case(VECTOR, model=PersistentTape)
def persistent_tape(x):
    return _dense_stack(x, "gelu", "swish", "gelu")


class Adversarial(TrainStep):
    """Trains on inputs moved along the sign of the loss's gradient."""

    def losses_of(self, tape, x, y):
        with tape.stop_recording(), tf.GradientTape() as inner:
            inner.watch(x)
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        with tape.stop_recording():
            moved = x + 0.1 * tf.sign(inner.gradient(loss, x))
        y_pred = self(tf.concat([x, moved], 0), training=True)
        return self.compute_loss(x=x, y=tf.concat([y, y], 0), y_pred=y_pred), None


@_case(VECTOR, model=Adversarial)
def adversarial_step(x):
    return _dense_stack(x, "gelu", layers.Dropout(0.2), "swish")


class GradientPenalty(TrainStep):
    """Adds the squared norm of the outputs' gradient of the inputs to the loss."""

    def losses_of(self, tape, x, y):
        with tf.GradientTape() as inner:
            inner.watch(x)
            y_pred = self(x, training=True)
        slope = inner.gradient(y_pred, x)
        penalty = tf.reduce_mean(tf.square(tf.norm(slope, axis=1) - 1.0))
        return self.compute_loss(x=x, y=y, y_pred=y_pred) + penalty, None


@_case(VECTOR, model=GradientPenalty)
def gradient_penalty(x):
    return _dense_stack(x, "gelu", "swish", "tanh")


class TwoUpdates(keras.Model):
    """Updates twice in one step."""

    def train_step(self, data):
        x, y = data
        logs = {}
        for name in ("first", "second"):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
                logs[name] = self.optimizer.scale_loss(loss)
            gradients = tape.gradient(logs[name], self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
        return logs


@_case(VECTOR, model=TwoUpdates)
def two_updates_in_a_step(x):
    return _dense_stack(x, "gelu", layers.Dropout(0.2), "swish")


class TwoOptimizers(keras.Model):
    """A second optimizer for the model's class to use."""

    def compile(self, optimizer, **settings):
        super().compile(optimizer=optimizer, **settings)
        self.more_optimizers = [type(optimizer).from_config(optimizer.get_config())]
        for one, variables in zip([optimizer, *self.more_optimizers], self.shares(), strict=True):
            one.build(variables)

    def shares(self):
        """The variables of each optimizer."""
        raise NotImplementedError


class Gan(TwoOptimizers):
    """Trains a critic and a generator, with two tapes in one step."""

    def shares(self):
        return [self.get_layer(name).trainable_variables for name in ("critic", "generator")]

    def train_step(self, data):
        noise, real = data
        generator, critic = self.get_layer("generator"), self.get_layer("critic")
        entropy = keras.losses.BinaryCrossentropy(from_logits=True)
        with tf.GradientTape() as critic_tape, tf.GradientTape() as generator_tape:
            fake = generator(noise, training=True)
            for_real, for_fake = critic(real, training=True), critic(fake, training=True)
            critic_loss = entropy(tf.ones_like(for_real), for_real)
            critic_loss += entropy(tf.zeros_like(for_fake), for_fake)
            critic_loss = self.optimizer.scale_loss(critic_loss)
            generator_loss = entropy(tf.ones_like(for_fake), for_fake)
            generator_loss = self.more_optimizers[0].scale_loss(generator_loss)
        gradients = critic_tape.gradient(critic_loss, critic.trainable_variables)
        self.optimizer.apply(gradients, critic.trainable_variables)
        gradients = generator_tape.gradient(generator_loss, generator.trainable_variables)
        self.more_optimizers[0].apply(gradients, generator.trainable_variables)
        return {"critic": critic_loss, "generator": generator_loss}


@_case(VECTOR, targets=(Data((16,)),), model=Gan)
def gan(noise):
    generator = [layers.Dense(24), layers.BatchNormalization(), layers.Activation("gelu")]
    critic = [
        layers.Dense(24, activation="swish"),
        layers.Dropout(0.2),
        layers.Dense(24, activation="gelu"),
    ]
    fake = keras.Sequential([*generator, layers.Dense(16)], name="generator")(noise)
    return keras.Sequential([*critic, layers.Dense(1)], name="critic")(fake)


class TwoSpeeds(TwoOptimizers):
    """One gradient, of which two optimizers apply a half each."""

    def shares(self):
        return self.trainable_variables[::2], self.trainable_variables[1::2]

    def train_step(self, data):
        x, y = data
        slow, fast = self.optimizer, self.more_optimizers[0]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            loss = fast.scale_loss(slow.scale_loss(loss))
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        slow.apply(gradients[::2], variables[::2])
        fast.apply(gradients[1::2], variables[1::2])
        return {"loss": loss}


@_case(VECTOR, model=TwoSpeeds)
def two_optimizers_for_one_loss(x):
    return _dense_stack(x, "gelu", "swish", "gelu")


@_case(VECTOR, compiling={"steps_per_execution": 2})
def several_steps_per_execution(x):
    return _dense_stack(x, "gelu", layers.Dropout(0.2), "swish")


def named(name: str) -> Case:
    """The case of that name."""
    return next(case for case in CASES if case.name == name)
