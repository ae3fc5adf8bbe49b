"""Rank and retrieve movies with TensorFlow Recommenders, with a part of each table on the device.

TensorFlow Recommenders (TFRS) has ready tasks and models for recommendation. It is written for
tf_keras, so this example uses `tf_scratchpipe.for_tf_keras`, the same cache with a layer for
tf_keras before it. Three models are trained on MovieLens-100K, each of them twice on the same
batches, first with `tf.keras.layers.Embedding` and then with `ScratchPipeEmbedding`:

- `tfrs.tasks.Ranking`: how many stars will this user give to this movie?
- `tfrs.tasks.Retrieval`: which of all movies will this user see next?
- `tfrs.experimental.models.Ranking`, a whole DLRM: will this user like this movie?

    pip install "tf-echo-scratchpipe[tfrs]"
    pip install --no-deps recbole==1.2.1                    # ships MovieLens-100K
    python examples/tfrs_ranking.py
    python examples/tfrs_ranking.py --epochs 1 --slots 400 --only tasks.Retrieval
    python examples/tfrs_ranking.py --data my/ml-100k       # the same files from elsewhere

The default run takes two or three minutes on two CPU cores, where a cache has nothing to win: it
shows that the results agree, not that they come faster.
"""

import os

# For TensorFlow and TFRS, which decide upon their Keras when they are imported.
os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import argparse
import dataclasses
import pathlib
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import recommend_movies
import tensorflow as tf
import tensorflow_recommenders as tfrs

from tf_scratchpipe import for_tf_keras as scratchpipe

"""
## The data

The other example reads MovieLens-100K, and says what is in it: ids of users, movies and their
features, ratings, and who liked what. The last fifth of each user's ratings is held out.
"""

Features = dict[str, Any]

"""
## The tables

Users and movies are the features whose tables grow with the business, so these two get a
ScratchPipeEmbedding; the others are small. A table starts from the same values whoever else draws
random numbers, so that both kinds of model begin alike.
"""

LARGE = ("user", "movie")


@dataclasses.dataclass(frozen=True)
class Tables:
    """Makes the tables of a model.

    `slots` is None for a model without ScratchPipe.
    """

    sizes: dict[str, int]
    width: int
    slots: int | None

    def make(self, name: str) -> tf.keras.layers.Layer:
        options = {
            "embeddings_initializer": tf.keras.initializers.RandomNormal(
                stddev=0.1, seed=zlib.crc32(name.encode())
            ),
            "name": f"{name}_table",
        }
        if self.slots is None or name not in LARGE:
            return tf.keras.layers.Embedding(self.sizes[name], self.width, **options)
        return scratchpipe.ScratchPipeEmbedding(
            self.sizes[name], self.width, num_slots=self.slots, **options
        )


"""
## Ranking

The first model is the one of TFRS' tutorial on ranking: a network reads the vectors of user and
movie and says how many stars there will be. `Ranking` has the loss and the metrics.
"""


class StarsModel(tfrs.Model):
    def __init__(self, tables: Tables, mean: float) -> None:
        super().__init__()
        self.tables = {name: tables.make(name) for name in LARGE}
        self.network = tf.keras.Sequential(
            [
                tf.keras.layers.Dense(64, activation="relu"),
                tf.keras.layers.Dense(32, activation="relu"),
                tf.keras.layers.Dense(1, bias_initializer=tf.keras.initializers.Constant(mean)),
            ]
        )
        self.task = tfrs.tasks.Ranking(
            loss=tf.keras.losses.MeanSquaredError(),
            metrics=[tf.keras.metrics.RootMeanSquaredError(name="rmse")],
        )

    def call(self, features: Features) -> tf.Tensor:
        vectors = [table(features[name]) for name, table in self.tables.items()]
        return self.network(tf.concat(vectors, axis=1))

    def compute_loss(self, inputs: tuple[Features, Features], training: bool = False) -> tf.Tensor:
        features, targets = inputs
        return self.task(labels=targets["rating"], predictions=self(features))


"""
## Retrieval

The second one has two towers, one vector for the user and one for the movie, whose product says how
well they fit. The other movies of a batch serve as those that the user did not see. What counts is
in how many cases the movie is among the hundred that fit best, out of all movies.

While the metric goes through all movies it reads the table with plain ids, which are right at any
time.
"""


class TwoTowers(tfrs.Model):
    def __init__(self, tables: Tables) -> None:
        super().__init__()
        self.tables = {name: tables.make(name) for name in LARGE}
        movies = tf.data.Dataset.range(tables.sizes["movie"]).batch(256)
        self.task = tfrs.tasks.Retrieval(
            metrics=tfrs.metrics.FactorizedTopK(movies.map(self.tables["movie"]), ks=(10, 100))
        )

    def compute_loss(self, inputs: tuple[Features, Features], training: bool = False) -> tf.Tensor:
        features, _ = inputs
        user, movie = (table(features[name]) for name, table in self.tables.items())
        return self.task(user, movie, compute_metrics=not training)


"""
## A whole model

`tfrs.experimental.models.Ranking` is a DLRM. It takes its features in two groups, and for one of
them a layer that makes a dictionary of vectors from a dictionary of ids. Which of these vectors
come from a cache is that layer's own affair. The genres of a movie are the other group, as numbers.
"""

SPARSE = ("user", "age", "occupation", "region", "movie", "year")


class Vectors(tf.keras.layers.Layer):
    def __init__(self, tables: Tables) -> None:
        super().__init__()
        self.tables = {name: tables.make(name) for name in SPARSE}

    def call(self, features: Features) -> Features:
        return {name: table(features[name]) for name, table in self.tables.items()}


def grouped(features: Features, genres: int) -> Features:
    marks = tf.reduce_max(tf.one_hot(features["genres"], genres), axis=1)
    return {
        "dense_features": marks[:, 1:],  # The first marks the padding.
        "sparse_features": {name: features[name] for name in SPARSE},
    }


def make_dlrm(tables: Tables) -> tfrs.Model:
    return tfrs.experimental.models.Ranking(
        embedding_layer=Vectors(tables),
        bottom_stack=tfrs.layers.blocks.MLP([64, tables.width], final_activation="relu"),
        top_stack=tfrs.layers.blocks.MLP([64, 32, 1], final_activation="sigmoid"),
    )


"""
## Training

A subclassed model does not tell which features its layers read, so `lookahead` gets a mapping from
features to layers, and the model for the sake of its optimizer. That line and the layer itself are
all that a model of TFRS needs for ScratchPipe.

The optimizer is Adagrad, as in TFRS' tutorials. tf_keras and ScratchPipe both add up the gradients
of equal ids before a row moves, so both kinds of table take the very same steps.
"""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to make a model, its data and the mapping for `lookahead`, and what to look at."""

    make: Callable[[Tables], tfrs.Model]
    prepare: Callable[[Features, Features], Any]
    layers: Callable[[tfrs.Model], dict[Any, Any]]
    metric: str
    rate: float


NAMES = ("tasks.Ranking", "tasks.Retrieval", "models.Ranking")


def recipes(data: recommend_movies.Data) -> dict[str, Recipe]:
    mean, genres = float(data.train[1]["rating"].mean()), data.sizes["genres"]
    found = (
        Recipe(
            lambda tables: StarsModel(tables, mean),
            lambda features, targets: (features, targets),
            lambda model: dict(model.tables),
            "rmse",
            0.1,
        ),
        Recipe(
            TwoTowers,
            lambda features, targets: (features, targets),
            lambda model: dict(model.tables),
            "factorized_top_k/top_100_categorical_accuracy",
            0.1,
        ),
        Recipe(
            make_dlrm,
            lambda features, targets: (grouped(features, genres), targets["liked"][:, 0]),
            lambda model: {
                ("sparse_features", name): model._embedding_layer.tables[name] for name in LARGE
            },
            "auc",
            0.3,
        ),
    )
    return dict(zip(NAMES, found, strict=True))


@dataclasses.dataclass(frozen=True)
class Result:
    """What a trained model has come to on the ratings that were held out."""

    value: float
    seconds: float
    caches: dict[str, Any]


def train(
    recipe: Recipe, data: recommend_movies.Data, args: argparse.Namespace, slots: int | None
) -> Result:
    """Trains a fresh model. Equal seeds give equal weights to begin with and equal batches."""
    tf.keras.utils.set_random_seed(args.seed)
    dataset = recommend_movies.make_dataset(data.train, args).map(recipe.prepare)
    model = recipe.make(Tables(data.sizes, args.width, slots))
    model.compile(tf.keras.optimizers.Adagrad(recipe.rate))
    caches = {}
    if slots is not None:
        caches = recipe.layers(model)
        dataset = dataset.apply(scratchpipe.lookahead(caches, model=model))
    start = time.perf_counter()
    model.fit(dataset.prefetch(2), verbose=0)
    seconds = time.perf_counter() - start
    held_out = tf.data.Dataset.from_tensor_slices(data.held_out).batch(1024).map(recipe.prepare)
    metrics = model.evaluate(held_out, verbose=0, return_dict=True)
    stats = {layer.name: layer.stats() for layer in caches.values()}
    return Result(metrics[recipe.metric], seconds, stats)


"""
## All together
"""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line, and finds the data."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add: Callable[..., Any] = parser.add_argument
    add("--data", type=pathlib.Path, metavar="DIR", help="(default: in the package recbole)")
    add("--epochs", type=int, default=5, help="(default: 5)")
    add("--batch-size", type=int, default=256, help="(default: 256)")
    add("--slots", type=int, default=640, help="rows on the device per table (default: 640)")
    add("--width", type=int, default=16, help="values in a row (default: 16)")
    add("--seed", type=int, default=0, help="(default: 0)")
    add("--only", choices=NAMES, help="one of the models (default: all)")
    args = parser.parse_args(argv)
    try:
        args.data = recommend_movies.find_data(args.data)
    except FileNotFoundError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Trains all models and compares them; returns the numbers that it prints."""
    args = parse_args(argv)
    terms = recommend_movies.find_terms(args.data)
    print(f"MovieLens-100K in {args.data}\nIts terms of use: {terms}")
    data = recommend_movies.read_data(args.data)
    tables = ", ".join(f"{data.sizes[name]:,} for the {name} table" for name in LARGE)
    print(f"rows: {tables}; slots on the device: {args.slots:,} for each\n")
    headings = ("Embedding", "ScratchPipe", "difference", "hits", "evictions", "seconds")
    print(f"{'':16}{'':46}" + "".join(f"{name:>13}" for name in headings))
    found = {}
    for name, recipe in recipes(data).items():
        if args.only not in (None, name):
            continue
        plain, cached = (train(recipe, data, args, slots) for slots in (None, args.slots))
        hits = np.mean([stats.train_hit_rate for stats in cached.caches.values()])
        evictions = sum(stats.evictions for stats in cached.caches.values())
        seconds = f"{plain.seconds:.0f} / {cached.seconds:.0f}"
        print(
            f"{name:16}{recipe.metric:46}{plain.value:13.4f}{cached.value:13.4f}"
            f"{abs(plain.value - cached.value):13.0e}{hits:13.1%}{evictions:13,}{seconds:>13}",
            flush=True,
        )
        found[name] = {
            "plain": plain.value,
            "cached": cached.value,
            "train_hit_rate": float(hits),
            "evictions": evictions,
        }
    return found


if __name__ == "__main__":
    main()
