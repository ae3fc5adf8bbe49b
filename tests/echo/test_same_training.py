"""A model trains the same with and without EchoOptimizer, bit by bit: its loss, gradients, weights,
and all other state.

The rewrite changes the order of no sum, so nothing may differ; plain runs of these models are equal
to each other, too. Grappler is off: what it fuses, and so rounds, depends on what else is in the
graph.
"""

import collections
import functools
import os
import subprocess
import sys
from collections.abc import Callable

import keras
import pytest
import tensorflow as tf

import tf_echo
from tests import reference
from tests.echo import forcing, models
from tf_echo import rewriter

_BATCHES = ("open", "fixed")
# Each model with the planner as it is and with everything recomputed, and either kind of batch;
# every other model with all that is proposed. By default one of these for each model.
_RUNS = [
    pytest.param(
        case,
        planner,
        batch,
        id=f"{case}-{planner}-{batch}",
        marks=[pytest.mark.slow] * (planner != ("everything", "echo")[number % 3 == 0]),
    )
    for number, case in enumerate(models.CASES)
    for place, planner in enumerate(forcing.PLANNERS)
    for batch in [_BATCHES[(number + place) % 2]]
    if planner != "proposed" or number % 2
]
_EXPECTED_OPS = """
    Abs AddV2 AvgPool BiasAdd Cast ConcatV2 Cos Cumprod Cumsum Elu Erfc Exp ExpandDims GatherV2
    GreaterEqual Identity IdentityN LeakyRelu Less Log Log1p LogSoftmax LogicalAnd Max MaxPool
    Maximum Mean Minimum Mul Neg NotEqual Pack Pad Pow RealDiv Relu Relu6 Reshape
    ResizeBilinear ReverseV2 Roll Rsqrt Select SelectV2 Selu Sigmoid Sin Softmax Softplus
    Softsign SpaceToBatchND BatchToSpaceND Split Sqrt Square SquaredDifference Squeeze
    StatelessRandomNormalV2 StatelessRandomUniformV2 StopGradient StridedSlice Sub Sum Tanh
    TanhGrad Tile Transpose Unpack
"""
_REPLAYED: dict[str, collections.Counter[str]] = {}
"""For each run how many ops of each type ran again."""


def _sgd() -> keras.optimizers.SGD:
    return keras.optimizers.SGD(0.01, momentum=0.9)


def _train(
    case: models.Case, optimizer: Callable[[], keras.optimizers.Optimizer], batch: str
) -> reference.Run:
    with reference.grappler(enabled=False):
        return reference.train(
            case.build, optimizer, case.dataset(batch == "open"), case.compiling, case.fitting
        )


@functools.lru_cache(maxsize=4)
def _train_plain(name: str, batch: str) -> reference.Run:
    return _train(models.named(name), _sgd, batch)


@pytest.mark.parametrize(("case", "planner", "batch"), _RUNS)
def test_model_trains_the_same(case, planner, batch, monkeypatch, request):
    forcing.force(monkeypatch, planner)
    forcing.ignore_workspaces(monkeypatch)
    replayed = forcing.record_replayed_ops(monkeypatch)
    _REPLAYED[request.node.callspec.id] = replayed
    run = _train(case, lambda: tf_echo.EchoOptimizer(_sgd()), batch)
    assert replayed
    assert reference.differences(run, _train_plain(case.name, batch)) == []


def test_ops_of_every_kind_ran_again():
    if len(_REPLAYED) < len(_RUNS):
        pytest.skip("needs all of the models above to have been trained in this session")
    expected = set(_EXPECTED_OPS.split())
    assert expected - set().union(*_REPLAYED.values()) == set()


@pytest.mark.parametrize("name", ["dropout", "transformer"])
def test_a_wrong_copy_is_noticed(name, monkeypatch):
    guard = rewriter._Region._tied

    def off_by_a_little(region: rewriter._Region, tensor: int) -> tf.Tensor:
        tied = guard(region, tensor)
        if tied.dtype == tf.bool:
            return ~tied
        return tied * (1 + 1e-6) if tied.dtype == tf.float32 else tied + tf.cast(1, tied.dtype)

    monkeypatch.setattr(rewriter._Region, "_tied", off_by_a_little)
    run = _train(models.named(name), lambda: tf_echo.EchoOptimizer(_sgd()), "fixed")
    assert reference.differences(run, _train_plain(name, "fixed"))


def test_models_train_the_same_where_onednn_merges_ops():
    """By default it depends on the processor whether oneDNN is on."""
    runs = (
        "strided_and_dilated_conv2d-echo-open",
        "transposed_conv2d_and_upsampling-echo-fixed",
        "batch_normalization_after_conv-echo-open",
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
    command += [f"{__file__}::test_model_trains_the_same[{run}]" for run in runs]
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout
    assert f"{len(runs)} passed" in done.stdout
