"""The cache on a GPU. Run with `CUDA_VISIBLE_DEVICES=0 pytest -m gpu`."""

import numpy as np
import pytest
import tensorflow as tf

from tests.scratchpipe import uncached
from tf_scratchpipe import lookahead

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not tf.config.list_physical_devices("GPU"), reason="needs a GPU"),
]


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("mode", ["pipelined", "synchronous", "static"])
def test_the_table_is_that_of_the_host(mode, optimizer):
    ids, targets = uncached.data(60)
    tables = {}
    for one in (mode, "host"):
        hot = {"hot_ids": np.arange(300)} if one == "static" else {}
        model, layer = uncached.cached_model(optimizer, num_slots=600, mode=one, **hot)
        train = uncached.dataset(ids, targets).apply(lookahead(model))
        model.fit(train, epochs=2, verbose=0)
        tables[one] = layer.get_table()
        if one == "pipelined":
            assert "GPU" in layer.engine.table.storage.variables[0].device
            assert layer.stats().train_hits == layer.stats().train_lookups
            assert layer.stats().evictions > 1000
    # The GPU adds and divides in another order than the CPU.
    np.testing.assert_allclose(tables[mode], tables["host"], rtol=1e-4, atol=1e-5)
