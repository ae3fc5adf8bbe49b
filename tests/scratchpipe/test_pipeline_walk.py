"""Random walks through everything that can be done to a layer, against an array that is right.

Gradients are small whole numbers and the learning rate is 1, so every sum is exact and the array of
whole numbers beside the layer says what each row must be at any time.
"""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_scratchpipe import ScratchPipeEmbedding, lookahead

ROWS, DIM, STEPS = 14, 2, 50


@dataclasses.dataclass
class _Walk:
    """One layer, what it should hold, and the iterator that is on."""

    rng: np.random.Generator
    layer: ScratchPipeEmbedding
    executor: str
    expected: np.ndarray
    iterator: object = None
    due: list = dataclasses.field(default_factory=list)
    """Plain ids of the batches of this iterator that were not trained yet."""
    in_hand: list = dataclasses.field(default_factory=list)
    """Planned batches that were taken from the iterator and not trained yet."""

    def ids(self):
        return self.rng.integers(0, ROWS, self.rng.integers(0, 5)).astype("int32")

    def start(self):
        self.due[:] = self.source[:] = [self.ids() for _ in range(self.rng.integers(0, 9))]
        self.iterator, self.in_hand = iter(self.planned), []

    def take(self):
        # One batch in hand at most: with few slots there is no room for a second one.
        if self.iterator is not None and not self.in_hand:
            batch = next(self.iterator, None)
            if batch is None:
                assert self.due == []
                self.iterator = None
            else:
                self.in_hand.append(batch)

    def train(self):
        self.take()
        if self.in_hand:
            self._step(self.in_hand.pop(0), self.due.pop(0))

    def train_plain(self):
        ids = self.ids()
        self._step(tf.constant(ids), ids)
        self.iterator, self.in_hand = None, []

    def _step(self, batch, ids):
        weights = self.rng.integers(-3, 4, (len(ids), DIM)).astype("float32")
        with tf.GradientTape() as tape:
            rows = self.layer(batch, training=True)
            loss = tf.reduce_sum(rows * weights)
        np.testing.assert_array_equal(rows, self.expected[ids])
        variable = self.layer.embeddings
        self.optimizer.apply([tape.gradient(loss, variable)], [variable])
        np.subtract.at(self.expected, ids, weights)

    def evaluate(self):
        ids = self.ids()
        np.testing.assert_array_equal(self.layer(tf.constant(ids)), self.expected[ids])

    def abandon(self):
        self.iterator, self.due, self.in_hand = None, [], []

    def flush(self):
        self.layer.flush()

    def save(self):
        store = {}
        self.layer.save_own_variables(store)
        np.testing.assert_array_equal(store["table"], self.expected)

    def load(self):
        self.expected = self.rng.integers(-9, 10, (ROWS, DIM)).astype("float32")
        self.layer.load_own_variables({"table": self.expected, "iterations": np.int64(0)})

    def __post_init__(self):
        self.optimizer = keras.optimizers.SGD(1.0)
        self.source = []
        source = tf.data.Dataset.from_generator(
            lambda: iter(list(self.source)), output_signature=tf.TensorSpec([None], tf.int32)
        )
        settings = {"executor": self.executor, "debug": True, "stall_seconds": 20}
        window = {"past": int(self.rng.integers(0, 4)), "future": int(self.rng.integers(0, 4))}
        self.planned = source.apply(lookahead(self.layer, **settings, **window))


ACTIONS = {
    "start": 2,
    "train": 14,
    "take": 2,
    "train_plain": 1,
    "evaluate": 3,
    "abandon": 1,
    "flush": 1,
    "save": 1,
    "load": 1,
}


def _walk(seed, executor, replacement):
    rng = np.random.default_rng(seed)
    layer = ScratchPipeEmbedding(
        ROWS,
        DIM,
        num_slots=[None, *range(4, 10)][rng.integers(7)],
        optimizer=keras.optimizers.SGD(1.0),
        replacement=replacement,
        embeddings_initializer="zeros",
    )
    walk = _Walk(rng, layer, executor, np.zeros((ROWS, DIM), "float32"))
    weights = np.array(list(ACTIONS.values()))
    for name in rng.choice(list(ACTIONS), STEPS, p=weights / weights.sum()):
        getattr(walk, name)()
    walk.save()
    assert layer.stats().train_hits == layer.stats().train_lookups
    return layer.stats().train_lookups


kinds = pytest.mark.parametrize(
    ("executor", "replacement"),
    [(e, r) for e in ("inline", "thread") for r in ("lru", "lfu", "random")],
)


@pytest.mark.filterwarnings("ignore:.*trained on plain ids")
@kinds
def test_some_random_walks(executor, replacement):
    assert sum(_walk(seed, executor, replacement) for seed in range(3)) > 20


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*trained on plain ids")
@kinds
def test_many_random_walks(executor, replacement):
    assert sum(_walk(seed, executor, replacement) for seed in range(3, 34)) > 350
