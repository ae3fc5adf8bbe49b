"""What a step changes besides the weights, it changes exactly once, and by the same values.

All variables of the model are compared after every step with those of the untouched model, bit by
bit: no forward op is moved, so what is assigned cannot even round differently. Grappler is off:
what it fuses, and so rounds, depends on what else is in the graph.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tf_echo
from tests import reference
from tests.echo import forcing, models, small


@pytest.fixture(autouse=True)
def _without_grappler() -> Iterator[None]:
    with reference.grappler(enabled=False):
        yield


class Watched(keras.Model):
    """Also shows what its loops carry over and what its metrics hold, for that to be compared."""

    @property
    def variables(self):
        loops = [layer for layer in self._flatten_layers() if isinstance(layer, layers.RNN)]
        states = [state for loop in loops for state in keras.tree.flatten(loop.states or [])]
        return [*super().variables, *states, *self.metrics_variables]


@dataclasses.dataclass(frozen=True)
class Case(models.Case):
    """A model with the part of a variable's path that tells what must change in every step."""

    model: type[keras.Model] = Watched
    state: str = ""
    fixed_batch: bool = False
    by_default: bool = True
    """False for what takes long, or where another file trains a model much like it."""

    def build(self) -> keras.Model:
        if not self.fixed_batch:
            return super().build()
        inputs = keras.Input(batch_shape=(models.BATCH, *self.inputs[0].shape))
        return self.model(inputs, self.network(inputs))


CASES: list[Case] = []


def _case(data: models.Data, state: str, **settings: Any):
    def add(network):
        CASES.append(Case(network.__name__, network, (data,), state=state, **settings))
        return network

    return add


def _wide(x: Any, activation: str = "gelu") -> Any:
    return layers.Dense(24, activation=activation)(x)


def _between(layer: Any, data: Any) -> Any:
    """The layer between others that are worth recomputing."""
    return layers.Dense(3)(_wide(layer(_wide(data))))


# Normalizations.


@_case(models.IMAGE, "moving_variance", by_default=False)
def batch_normalization(x):
    for _ in range(2):
        x = layers.Conv2D(8, 3, padding="same", activation="gelu")(x)
        x = layers.BatchNormalization(momentum=0.9)(x)
    return layers.Dense(3)(layers.GlobalAveragePooling2D()(x))


class FusedBatchNormalization(layers.Layer):
    """One kernel for statistics and result, as Keras 2 does it."""

    def build(self, shape):
        self.scale = self.add_weight((shape[-1],), "ones", name="scale")
        self.offset = self.add_weight((shape[-1],), "zeros", name="offset")
        self.mean = self.add_weight((shape[-1],), "zeros", trainable=False, name="mean")
        self.variance = self.add_weight((shape[-1],), "ones", trainable=False, name="variance")

    def call(self, x):
        y, mean, variance = tf.compat.v1.nn.fused_batch_norm(
            x,
            *(v.value for v in (self.scale, self.offset, self.mean, self.variance)),
            epsilon=1e-3,
            is_training=True,
            exponential_avg_factor=0.1,
        )
        self.mean.assign(mean)
        self.variance.assign(variance)
        return y


@_case(models.IMAGE, "variance")
def fused_batch_normalization(x):
    for _ in range(2):
        x = layers.Conv2D(8, 3, padding="same", activation="gelu")(x)
        x = FusedBatchNormalization()(x)
    return layers.Dense(3)(layers.GlobalAveragePooling2D()(x))


@_case(models.VECTOR, "vector_u", by_default=False)
def spectral_normalization(x):
    return _between(layers.SpectralNormalization(layers.Dense(24, activation="gelu")), x)


# Loops that carry state from batch to batch.


@_case(models.SEQUENCE, "rnn_state", fixed_batch=True)
def stateful_lstm(x):
    return _between(layers.LSTM(8, stateful=True, return_sequences=True), x)


@_case(models.SEQUENCE, "rnn_state", fixed_batch=True, by_default=False)
def stateful_gru_both_ways(x):
    return _between(layers.Bidirectional(layers.GRU(8, stateful=True, return_sequences=True)), x)


@_case(models.SHORT, "rnn_state", fixed_batch=True)
def stateful_unrolled_rnn(x):
    rnn = layers.SimpleRNN(16, stateful=True, unroll=True, return_sequences=True)
    return _between(rnn, x)


@_case(models.SHORT, "moving_mean")
def normalized_at_each_time(x):
    return _between(layers.TimeDistributed(layers.BatchNormalization(momentum=0.9)), x)


# Loops whose every turn changes something.


class MovingCell(layers.Layer):
    """A recurrent cell that counts its calls and keeps a running mean of its activations."""

    def __init__(self, units: int):
        super().__init__()
        self.units = self.state_size = units

    def build(self, shape):
        self.kernel = self.add_weight((shape[-1], self.units), name="kernel")
        self.recurrent = self.add_weight((self.units, self.units), "orthogonal", name="recurrent")
        self.calls = self.add_weight((), "zeros", trainable=False, name="calls")
        self.mean = self.add_weight((self.units,), "zeros", trainable=False, name="running")

    def call(self, x, states):
        self.calls.assign_add(1.0)
        h = ops.gelu(ops.matmul(x, self.kernel)) + ops.matmul(states[0], self.recurrent)
        before = ops.tanh(h - self.mean)
        self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(h, axis=0))
        y = before * ops.sigmoid(h - self.mean)
        return y, [y]


@_case(models.SEQUENCE, "running")
def moving_cell_in_a_loop(x):
    return _between(layers.RNN(MovingCell(24), return_sequences=True), x)


@_case(models.SEQUENCE, "seed_generator", by_default=False)
def recurrent_dropout_in_a_loop(x):
    lstm = layers.LSTM(24, dropout=0.2, recurrent_dropout=0.3, return_sequences=True)
    return _between(lstm, x)


class NoisyCell(layers.Layer):
    """A recurrent cell that draws in each call."""

    def __init__(self, units: int):
        super().__init__()
        self.units = self.state_size = units
        self.seed = keras.random.SeedGenerator(3)

    def build(self, shape):
        self.kernel = self.add_weight((shape[-1], self.units), name="kernel")

    def call(self, x, states):
        h = ops.gelu(ops.matmul(x, self.kernel) + 0.5 * states[0])
        y = h * (1 + 0.1 * keras.random.normal(ops.shape(h), seed=self.seed))
        return y, [y]


@_case(models.SEQUENCE, "seed_generator")
def noisy_cell_in_a_loop(x):
    return _between(layers.RNN(NoisyCell(24), return_sequences=True), x)


# Layers that assign in `call`.


class RunningMean(layers.Layer):
    """Subtracts a running mean of the activations, as it was and as it became."""

    def build(self, shape):
        self.mean = self.add_weight((shape[-1],), "zeros", trainable=False, name="running")

    def call(self, x):
        before = ops.tanh(x - self.mean)
        self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
        return before * ops.tanh(x - self.mean)


@_case(models.VECTOR, "running")
def running_mean_read_before_and_after_it_is_assigned(x):
    return _between(RunningMean(), x)


@_case(models.VECTOR, "running")
def running_mean_of_a_layer_called_twice(x):
    shared = RunningMean()
    return _between(lambda t: shared(shared(t)), x)


class Codebook(layers.Layer):
    """Replaces each row by its nearest code; codes move towards the rows that chose them."""

    def build(self, shape):
        self.codes = self.add_weight((8, shape[-1]), "normal", trainable=False, name="codes")

    def call(self, x):
        distances = ops.sum(ops.square(x[:, None] - self.codes), axis=-1)
        chosen = ops.one_hot(ops.argmin(distances, axis=-1), 8)
        quantized = ops.matmul(chosen, self.codes)
        sums = ops.matmul(ops.transpose(chosen), x)
        self.codes.assign(0.9 * self.codes + 0.1 * sums)
        return x + ops.stop_gradient(quantized - x)


@_case(models.VECTOR, "codes")
def codebook_that_follows_the_activations(x):
    return _between(Codebook(), x)


class Counter(layers.Layer):
    """Counts its calls, and weights its result by the count."""

    def build(self, shape):
        self.calls = self.add_weight((), "zeros", trainable=False, name="calls")

    def call(self, x):
        self.calls.assign_add(1.0)
        return ops.gelu(x) / self.calls


@_case(models.VECTOR, "calls")
def counter(x):
    return _between(Counter(), x)


# Metrics.


class Activity(layers.Layer):
    """Keeps track of its activations in a metric of its own."""

    def __init__(self):
        super().__init__()
        self.activity = keras.metrics.Mean(name="activity")

    def call(self, x):
        y = ops.gelu(x)
        self.activity.update_state(y)
        return y


@_case(models.VECTOR, "activity/total")
def metric_of_a_layer(x):
    return _between(Activity(), x)


@_case(
    models.VECTOR,
    "cosine_similarity/total",
    compiling={"loss": ["mse", None], "metrics": [["mae"], [keras.metrics.CosineSimilarity]]},
)
def metrics_of_an_activation(x):
    hidden = _wide(_wide(_wide(x)))
    return [layers.Dense(3)(_wide(hidden)), hidden]


# Random numbers.


@_case(models.VECTOR, "seed_generator", by_default=False)
def dropout(x):
    return _between(layers.Dropout(0.3), x)


class Noise(layers.Layer):
    """Draws from one seed twice in each call, and notes what it drew."""

    def __init__(self, draw: Any):
        super().__init__()
        self.draw, self.seed = draw, keras.random.SeedGenerator(3)

    def build(self, shape):
        self.drawn = self.add_weight((2,), "zeros", trainable=False, name="drawn")

    def call(self, x):
        first, second = (self.draw(ops.shape(x), self.seed) for _ in range(2))
        self.drawn.assign(ops.stack([ops.mean(first), ops.mean(second)]))
        return ops.gelu(x * (1 + 0.1 * first)) + 0.1 * second


@_case(models.VECTOR, "drawn")
def noise_from_one_seed_drawn_twice(x):
    return _between(Noise(lambda shape, seed: keras.random.normal(shape, seed=seed)), x)


@_case(models.VECTOR, "drawn")
def noise_from_stateful_ops(x):
    return _between(Noise(lambda shape, _: tf.random.normal(shape, seed=7)), x)


@_case(models.VECTOR, "drawn")
def noise_from_a_generator(x):
    generator = tf.random.Generator.from_seed(7)
    return _between(Noise(lambda shape, _: generator.normal(shape)), x)


def _sgd() -> keras.optimizers.SGD:
    return keras.optimizers.SGD(0.01, momentum=0.9)


def _echo() -> keras.optimizers.Optimizer:
    return tf_echo.EchoOptimizer(_sgd())


def _train(case: Case, optimizer: Any) -> reference.Run:
    settings = dict(case.compiling)
    if "metrics" in settings:
        settings["metrics"] = [[_fresh(m) for m in group] for group in settings["metrics"]]
    return reference.train(case.build, optimizer, case.dataset(open_batch=False), settings)


def _fresh(metric: Any) -> Any:
    return metric() if isinstance(metric, type) else metric


@functools.lru_cache(maxsize=2)
def _train_plain(name: str) -> reference.Run:
    return _train(_named(name), _sgd)


def _named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def _history(run: reference.Run, state: str) -> list[list[np.ndarray]]:
    """For each variable whose path holds `state`, its value after each step."""
    paths = [n.removeprefix("step 0: 0.") for n in run.values if n.startswith("step 0: 0.")]
    steps = range(models.STEPS)
    return [[run.values[f"step {s}: 0.{p}"] for s in steps] for p in paths if state in p]


# Each model with the planner as it is and with everything recomputed; one of the two by default.
_RUNS = [
    pytest.param(
        case,
        planner,
        id=f"{case}-{planner}",
        marks=[pytest.mark.slow] * (later % 2 or not case.by_default),
    )
    for number, case in enumerate(CASES)
    for later, planner in enumerate(("echo", "everything"), start=number)
]


@pytest.mark.parametrize(("case", "planner"), _RUNS)
def test_state_changes_as_without_echo(case, planner, monkeypatch):
    forcing.force(monkeypatch, planner)
    forcing.ignore_workspaces(monkeypatch)
    run = _train(case, _echo)
    assert run.model.optimizer.plan.recomputed
    histories = _history(run, case.state)
    assert histories
    for values in histories:
        assert len({value.tobytes() for value in values}) == models.STEPS
    assert reference.differences(run, _train_plain(case.name)) == []


# Ten turns of the loop; before it Keras calls a cell once more, to see what it returns.
COUNTS = {"counter": [1, 2, 3, 4, 5], "moving_cell_in_a_loop": [11, 22, 33, 44, 55]}


@pytest.mark.parametrize(("name", "expected"), COUNTS.items())
def test_each_call_is_counted_once(name, expected, monkeypatch):
    forcing.force(monkeypatch, "everything")
    run = _train(_named(name), _echo)
    assert run.model.optimizer.plan.recomputed
    assert _history(run, "calls") == [expected]


def test_python_is_called_once_a_step(monkeypatch):
    forcing.force(monkeypatch, "everything")
    seen: list[np.ndarray] = []

    def note(x):
        y = ops.gelu(x)
        tf.numpy_function(seen.append, [ops.mean(y)], [])
        return y

    def network(x):
        return _between(layers.Lambda(note, output_shape=(24,)), x)

    case = Case("calls_python", network, (models.VECTOR,))
    run = _train(case, _echo)
    found, seen[:] = list(seen), []
    _train(case, _sgd)
    assert run.model.optimizer.plan.recomputed
    assert len(found) == models.STEPS
    assert found == seen


def test_states_that_are_reset_start_over_as_without_echo():
    case = _named("stateful_lstm")

    def train(optimizer):
        model = _train(case, optimizer).model
        carried = [state.numpy() for state in _states(model)]
        model.layers[2].reset_state()
        reset = [state.numpy() for state in _states(model)]
        model.fit(case.dataset(open_batch=False).take(1), verbose=0, shuffle=False)
        return model, carried, reset, [variable.numpy() for variable in model.variables]

    model, *found = train(_echo)
    expected = train(_sgd)[1:]
    assert len(model.optimizer.plans) == 1
    assert [state.any() for state in found[0]] == [True, True]
    assert [state.any() for state in found[1]] == [False, False]
    for values, others in zip(found, expected, strict=True):
        small.assert_equal(values, others)


def _states(model: keras.Model) -> list[keras.Variable]:
    return [v for v in model.variables if v.path.endswith("rnn_state")]
