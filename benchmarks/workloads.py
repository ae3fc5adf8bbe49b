"""The models that are measured: what to build, what to feed it."""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np

L = keras.layers


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model with its loss and one batch of made-up data."""

    name: str
    build: Callable[[], keras.Model]
    loss: str
    x: np.ndarray
    y: np.ndarray
    steps: int = 12


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
    return Workload(name, build, "sparse_categorical_crossentropy", x, y, steps=7)


def attention_decoder(length: int, batch: int = 16, units: int = 32) -> Workload:
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
    return Workload(f"attention decoder, {length} steps unrolled", build, "mse", x, y, steps=1)


FOOTPRINT: dict[str, Callable[[], Workload]] = {
    "mlp": mlp,
    "transformer-gelu": lambda: transformer("gelu"),
    "transformer-relu": lambda: transformer("relu"),
    "resnet50": resnet50,
}
