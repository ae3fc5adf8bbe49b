"""Both packages in one model: recomputing and caching do not see each other."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_echo import EchoOptimizer
from tf_scratchpipe import ScratchPipeEmbedding, lookahead

RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 300, (330, 4)).astype("int32")
TARGETS = RNG.random((330, 1)).astype("float32")


def _train(wrap, optimizer, mode="pipelined"):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,), dtype="int32")
    layer = ScratchPipeEmbedding(300, 32, num_slots=200, combiner="sum", mode=mode, name="table")
    hidden = layer(inputs)
    for _ in range(6):
        hidden = keras.layers.Dense(64, activation="gelu")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(wrap(keras.optimizers.get(optimizer)), "mse", jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices((IDS, TARGETS)).batch(32, drop_remainder=True)
    model.fit(data.apply(lookahead(model)), epochs=2, verbose=0)
    return model, layer


_SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("sgd", "adam")]


@pytest.mark.parametrize("optimizer", ["adagrad", *_SLOW])
def test_training_is_the_same_under_echo(optimizer):
    plain, plain_layer = _train(lambda inner: inner, optimizer)
    echo, echo_layer = _train(EchoOptimizer, optimizer)
    assert any(str(plan) for plan in echo.optimizer.plans)
    for one, other in zip(plain.get_weights(), echo.get_weights(), strict=True):
        # Graph optimizers are free to round otherwise in another graph.
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    stats = echo_layer.stats()
    assert stats.train_hits == stats.train_lookups == 2 * 320 * 4
    assert echo_layer.row_optimizer() is echo.optimizer.inner_optimizer
    assert plain_layer.stats().evictions == stats.evictions > 0
