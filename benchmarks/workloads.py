"""The models that are measured: what to build, what to feed it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

L = keras.layers

_CROSS_ENTROPY = "sparse_categorical_crossentropy"


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model with its loss and one batch of made-up data."""

    name: str
    build: Callable[[], keras.Model]
    loss: Any
    """What `compile` takes; none where the model's own `train_step` says it."""
    x: np.ndarray | tuple[np.ndarray, ...]
    """The batch, for each of the model's inputs."""
    y: np.ndarray | tuple[np.ndarray, ...]
    steps: int = 12
    optimizer: Callable[[], keras.optimizers.Optimizer] | None = None
    """If given, the inner optimizer, whichever is asked for."""
    loss_weights: list[float] | None = None
    sample_weight: np.ndarray | None = None

    @property
    def batch(self) -> int:
        """The batch size."""
        return len(self.y[0] if isinstance(self.y, tuple) else self.y)

    @property
    def data(self) -> tuple[object, ...]:
        """What one step of `fit` takes."""
        return (self.x, self.y, *([] if self.sample_weight is None else [self.sample_weight]))


def _noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype("float32")


def _ids(high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, high, shape).astype("int32")


def mlp(batch: int = 4096, width: int = 1024, depth: int = 12) -> Workload:
    """`depth` x Dense(`width`, gelu)."""

    def build() -> keras.Model:
        dense = [L.Dense(width, activation="gelu") for _ in range(depth)]
        return keras.Sequential([keras.Input((width,)), *dense])

    x = _noise(batch, width)
    return Workload(f"MLP, {depth} x Dense({width}, gelu), batch {batch}", build, "mse", x, x)


def transformer(
    activation: str, batch: int = 16, length: int = 256, width: int = 256, depth: int = 4
) -> Workload:
    """A pre-norm transformer encoder with dropout 0.1, also in attention."""

    def build() -> keras.Model:
        ids = keras.Input((length,), dtype="int32")
        h = L.Embedding(1000, width)(ids)
        for _ in range(depth):
            normed = L.LayerNormalization()(h)
            attended = L.MultiHeadAttention(4, width // 4, dropout=0.1)(normed, normed)
            h = h + L.Dropout(0.1)(attended)
            inner = L.Dense(4 * width, activation=activation)(L.LayerNormalization()(h))
            h = h + L.Dropout(0.1)(L.Dense(width)(inner))
        return keras.Model(ids, L.Dense(width)(L.LayerNormalization()(h)))

    name = f"Transformer, {depth} layers, {activation}, dropout 0.1, batch {batch} x {length}"
    x, y = _ids(1000, batch, length), _noise(batch, length, width)
    return Workload(name, build, "mse", x, y)


def resnet50(batch: int = 64, side: int = 96) -> Workload:
    """`keras.applications.ResNet50` with 10 classes."""

    def build() -> keras.Model:
        return keras.applications.ResNet50(weights=None, input_shape=(side, side, 3), classes=10)

    x, y = _noise(batch, side, side, 3), _ids(10, batch)
    name = f"ResNet-50, batch {batch}, {side} x {side}"
    return Workload(name, build, _CROSS_ENTROPY, x, y, steps=7)


def residual_net(depth: int, batch: int = 32, side: int = 32, width: int = 32) -> Workload:
    """A stem and `depth` pre-activation residual blocks of two convolutions each."""

    def convolve(h: object) -> object:
        h = L.ReLU()(L.BatchNormalization()(h))
        return L.Conv2D(width, 3, padding="same", use_bias=False)(h)

    def build() -> keras.Model:
        image = keras.Input((side, side, 3))
        h = L.Conv2D(width, 3, padding="same", use_bias=False)(image)
        for _ in range(depth):
            h = h + convolve(convolve(h))
        h = L.GlobalAveragePooling2D()(L.ReLU()(L.BatchNormalization()(h)))
        return keras.Model(image, L.Dense(10, activation="softmax")(h))

    x, y = _noise(batch, side, side, 3), _ids(10, batch)
    name = f"ResNet, {depth} blocks, batch {batch}, {side} x {side}"
    return Workload(name, build, _CROSS_ENTROPY, x, y)


def attention_decoder(length: int, batch: int = 16, units: int = 32, steps: int = 1) -> Workload:
    """An unrolled decoder with additive attention, about 87 forward ops a step."""

    class Decoder(L.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.cell = L.GRUCell(units)
            self.keys, self.query = L.Dense(units, use_bias=False), L.Dense(units)
            self.score = L.Dense(1, use_bias=False)

        def build(self, shape: tuple[int | None, ...]) -> None:
            self.keys.build(shape)
            self.query.build((None, units))
            self.score.build((None, None, units))
            self.cell.build((None, units))

        def call(self, encoded: object) -> object:
            keys, state, outputs = self.keys(encoded), encoded[:, 0], []
            for _ in range(length):
                energy = keras.ops.tanh(keys + self.query(state)[:, None])
                weights = keras.ops.softmax(self.score(energy), axis=1)
                context = keras.ops.sum(weights * encoded, axis=1)
                state, _ = self.cell(context, [state])
                outputs.append(state)
            return keras.ops.stack(outputs, axis=1)

    def build() -> keras.Model:
        encoded = keras.Input((20, units))
        return keras.Model(encoded, Decoder()(encoded))

    x, y = _noise(batch, 20, units), _noise(batch, length, units)
    return Workload(f"attention decoder, {length} steps unrolled", build, "mse", x, y, steps=steps)


class _AttentionCell(L.Layer):
    """An LSTM cell that reads, besides its input, what additive attention picks from `memory`."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units, self.state_size, self.output_size = units, [units, units], 2 * units
        self.cell = L.LSTMCell(units)
        self.query, self.score = L.Dense(units), L.Dense(1, use_bias=False)
        self.memory = self.keys = None

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.cell.build((None, shape[-1] + self.units))
        self.query.build((None, self.units))
        self.score.build((None, None, self.units))

    def call(self, inputs: object, states: list[object]) -> tuple[object, list[object]]:
        energy = keras.ops.tanh(self.keys + self.query(states[0])[:, None])
        weights = keras.ops.softmax(self.score(energy)[..., 0])
        context = keras.ops.sum(weights[..., None] * self.memory, axis=1)
        output, states = self.cell(keras.ops.concatenate([inputs, context], axis=-1), states)
        return keras.ops.concatenate([output, context], axis=-1), states


class _AttentionDecoder(L.Layer):
    """Runs `_AttentionCell` over a sequence, a `tf.while_loop`, with another as its memory."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.keys = L.Dense(units, use_bias=False)
        self.cell = _AttentionCell(units)
        self.loop = L.RNN(self.cell, return_sequences=True)

    def build(self, inputs_shape: tuple[int | None, ...], memory_shape: object) -> None:
        self.keys.build(memory_shape)
        self.loop.build(inputs_shape)

    def call(self, inputs: object, memory: object) -> object:
        self.cell.memory, self.cell.keys = memory, self.keys(memory)
        try:
            return self.loop(inputs)
        finally:
            self.cell.memory = self.cell.keys = None


def nmt(vocabulary: int, batch: int = 32, length: int = 64, units: int = 256) -> Workload:
    """Translation: an LSTM encoder, an LSTM decoder with additive attention that is fed the right
    words.
    """

    def build() -> keras.Model:
        source, target = (keras.Input((length,), dtype="int32") for _ in range(2))
        encoded = L.LSTM(units, return_sequences=True)(L.Embedding(vocabulary, units)(source))
        decoded = _AttentionDecoder(units)(L.Embedding(vocabulary, units)(target), encoded)
        readout = L.Dense(units, activation="tanh")(decoded)
        return keras.Model([source, target], L.Dense(vocabulary)(readout))

    words = _ids(vocabulary, 3, batch, length)
    name = f"NMT, LSTM + attention loop, {length} steps, batch {batch}, vocabulary {vocabulary}"
    return Workload(name, build, _from_logits(), (words[0], words[1]), words[2], steps=7)


def additive_attention(
    vocabulary: int = 2000, batch: int = 32, length: int = 64, units: int = 256
) -> Workload:
    """Translation with `keras.layers.AdditiveAttention`, all target positions at once."""

    def build() -> keras.Model:
        source, target = (keras.Input((length,), dtype="int32") for _ in range(2))
        embedded = L.Embedding(vocabulary, units)(source)
        encoded, *state = L.LSTM(units, return_sequences=True, return_state=True)(embedded)
        embedded = L.Embedding(vocabulary, units)(target)
        decoded = L.LSTM(units, return_sequences=True)(embedded, initial_state=state)
        context = L.AdditiveAttention()([decoded, encoded])
        readout = L.Dense(units, activation="tanh")(L.Concatenate()([decoded, context]))
        return keras.Model([source, target], L.Dense(vocabulary)(readout))

    words = _ids(vocabulary, 3, batch, length)
    name = f"seq2seq, AdditiveAttention, {length} steps, batch {batch}, vocabulary {vocabulary}"
    return Workload(name, build, _from_logits(), (words[0], words[1]), words[2], steps=7)


def lstm_recurrent_dropout(batch: int = 16, length: int = 64, units: int = 512) -> Workload:
    """A Keras LSTM with dropout on its recurrent state."""

    def build() -> keras.Model:
        rnn = L.LSTM(units, return_sequences=True, recurrent_dropout=0.2)
        return keras.Sequential([keras.Input((length, units)), rnn])

    x, y = _noise(batch, length, units), _noise(batch, length, units)
    name = f"LSTM({units}), recurrent dropout 0.2, {length} steps, batch {batch}"
    return Workload(name, build, "mse", x, y)


def lstm_unrolled(batch: int = 16, length: int = 64, units: int = 512) -> Workload:
    """A Keras LSTM without a loop."""

    def build() -> keras.Model:
        rnn = L.LSTM(units, return_sequences=True, unroll=True)
        return keras.Sequential([keras.Input((length, units)), rnn])

    x, y = _noise(batch, length, units), _noise(batch, length, units)
    name = f"LSTM({units}), {length} steps unrolled, batch {batch}"
    return Workload(name, build, "mse", x, y, steps=20)


def gru_language_model(
    vocabulary: int = 5000, batch: int = 32, length: int = 64, units: int = 512
) -> Workload:
    """Two GRUs with dropout between them predict the next word."""

    def build() -> keras.Model:
        ids = keras.Input((length,), dtype="int32")
        h = L.Embedding(vocabulary, units)(ids)
        for _ in range(2):
            h = L.Dropout(0.2)(L.GRU(units, return_sequences=True)(h))
        return keras.Model(ids, L.Dense(vocabulary)(h))

    words = _ids(vocabulary, 2, batch, length)
    name = f"GRU language model, {length} steps, batch {batch}, vocabulary {vocabulary}"
    return Workload(name, build, _from_logits(), words[0], words[1], steps=7)


def deep_speech(
    batch: int = 16, frames: int = 200, bands: int = 80, units: int = 128, letters: int = 20
) -> Workload:
    """After DeepSpeech2: two convolutions, three bidirectional LSTMs, CTC."""

    def convolve(h: object, kernel: tuple[int, int], strides: tuple[int, int]) -> object:
        h = L.Conv2D(32, kernel, strides, padding="same", use_bias=False)(h)
        return L.ReLU(max_value=20.0)(L.BatchNormalization()(h))

    def build() -> keras.Model:
        spectrogram = keras.Input((frames, bands))
        h = convolve(spectrogram[..., None], (11, 21), (2, 2))
        h = convolve(h, (11, 11), (1, 2))
        h = L.Reshape((frames // 2, -1))(h)
        for _ in range(3):
            h = L.Bidirectional(L.LSTM(units, return_sequences=True))(h)
        return keras.Model(spectrogram, L.Dense(29)(h))

    x, y = _noise(batch, frames, bands), 1 + _ids(28, batch, letters)
    name = f"DeepSpeech2-like, {frames} frames, batch {batch}, CTC"
    return Workload(name, build, keras.losses.CTC(), x, y, steps=7)


def _from_logits() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


FOOTPRINT: dict[str, Callable[[], Workload]] = {
    "mlp": mlp,
    "transformer-gelu": lambda: transformer("gelu"),
    "transformer-relu": lambda: transformer("relu"),
    "resnet50": resnet50,
    "nmt-2000": lambda: nmt(2000),
    "nmt-5000": lambda: nmt(5000),
    "additive-attention": additive_attention,
    "lstm-recurrent-dropout": lstm_recurrent_dropout,
    "lstm-unrolled": lstm_unrolled,
    "decoder-unrolled": lambda: attention_decoder(40, units=256, steps=30),
    "gru-lm": gru_language_model,
    "deepspeech2": deep_speech,
}
