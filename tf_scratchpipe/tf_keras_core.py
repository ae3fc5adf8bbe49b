"""What is behind the layer for tf_keras: the one for Keras 3, which no Keras calls.

It checks arguments, looks rows up and trains them as ever. Only its weight is another one: that of
the layer for tf_keras.
"""

import io
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_scratchpipe import tf_keras_internals, tf_keras_optimizers
from tf_scratchpipe.embedding import ScratchPipeEmbedding
from tf_scratchpipe.initial_rows import LARGEST_WHOLE
from tf_scratchpipe.tf_keras_internals import StandIn


class Weight:
    """What a `Core` asks of its weight."""

    def __init__(self) -> None:
        self.variable: StandIn | None = None

    @property
    def trap(self) -> tf.Tensor:
        """The scalar that the tape holds on to."""
        assert self.variable is not None
        return self.variable.scalar()


class Core(ScratchPipeEmbedding):
    """A layer for Keras 3 that no Keras calls: another layer hands its tape and optimizer on.

    Args:
        weight: Gives what stands for the table in the other layer.
        **settings: Arguments of the layer.
    """

    _lookahead = "tf_scratchpipe.for_tf_keras.lookahead(layers, model=model)"

    def __init__(self, weight: Weight, **settings: Any) -> None:
        super().__init__(**settings)
        self._weight = weight

    @property
    def draws_by_row(self) -> bool:
        """Whether each row is drawn by itself, by the samplers that know Keras 3's initializers."""
        if self.initialize_by_row is not None:
            return self.initialize_by_row
        return self.input_dim * self.output_dim > LARGEST_WHOLE

    def build(self, input_shape: Any = None) -> None:
        """Create the table."""
        super().build(input_shape)
        self.embeddings: Any = self._weight

    def _decays(self, mover: keras.optimizers.Optimizer) -> bool:
        """As the optimizer of tf_keras says, if it is one that moves the rows."""
        told = tf_keras_optimizers.original(mover)
        return told is mover or tf_keras_internals.decays(told, self._weight.variable)


class Parts:
    """What a layer holds and tf_keras shall not find."""

    def __init__(self, core: Core, optimizer: Any) -> None:
        self.core = core
        self.optimizer = optimizer


class TableState(tf.train.experimental.PythonState):
    """A table and its optimizer slots in a TensorFlow checkpoint."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def serialize(self) -> bytes:
        """All of it."""
        file = io.BytesIO()
        np.savez(file, **self._core.engine.state())
        return file.getvalue()

    def deserialize(self, string_value: bytes) -> None:
        """Take it over."""
        with np.load(io.BytesIO(string_value), allow_pickle=False) as saved:
            self._core.engine.load_state(dict(saved))
