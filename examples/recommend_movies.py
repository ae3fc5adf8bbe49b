"""Rank movies with embedding tables of which the device holds only a part.

Most of a recommendation model is tables: a row of numbers for every user and every item. In
ScratchPipe (Kwon and Rhu, "Training Personalized Recommendation Systems from (GPU) Scratch", ISCA
2022) the tables stay in host memory, and the device holds a few slots, into which the rows of the
next batches are brought while earlier ones are trained. The paper's claim is that this changes
where the rows are, and nothing about what is learned.

This example checks the claim on real data, MovieLens-100K. It trains the same model on the same
batches twice, first with `keras.layers.Embedding` and then with
`tf_scratchpipe.ScratchPipeEmbedding`, and prints what the two have learned side by side.

    pip install --no-deps recbole==1.2.1                    # ships MovieLens-100K
    python examples/recommend_movies.py
    python examples/recommend_movies.py --epochs 8 --slots 400
    python examples/recommend_movies.py --data my/ml-100k   # the same files from elsewhere

The tables of this small data set would fit anywhere. The default run takes a minute or two
on two CPU cores, where a cache has nothing to win: it shows that the results agree, not that they
come faster.
"""

import argparse
import csv
import dataclasses
import importlib.util
import math
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import tf_scratchpipe

"""
## The data

The package `recbole` ships MovieLens-100K as three tables with tabs between the columns: who rated
what and when, the users, and the movies. Only its files are wanted, so it is located and not
imported, and need not have its dependencies. The data set has terms of its own, which forbid,
among other things, handing it on without permission: it stays where it is.
"""

FILES = ("ml-100k.inter", "ml-100k.user", "ml-100k.item")
TERMS = "https://files.grouplens.org/datasets/movielens/ml-100k-README.txt"


def find_data(folder: pathlib.Path | None) -> pathlib.Path:
    """The folder with the files: the one given, or that of the installed package."""
    if folder is None:
        spec = importlib.util.find_spec("recbole")
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(
                "MovieLens-100K is not here. Install the package that ships it with "
                "`pip install --no-deps recbole==1.2.1`, or pass --data DIR."
            )
        folder = pathlib.Path(spec.submodule_search_locations[0]) / "dataset_example" / "ml-100k"
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"No {', '.join(missing)} in {folder}. Pass --data DIR with {', '.join(FILES)} as in "
            "`pip install --no-deps recbole==1.2.1`."
        )
    return folder


def find_terms(folder: pathlib.Path) -> str:
    """Where the terms of use are: beside the data if they came with it, else at their source."""
    files = sorted(path for path in folder.iterdir() if path.stem.upper() in ("README", "LICENSE"))
    return str(files[0]) if files else TERMS


def read_columns(path: pathlib.Path) -> dict[str, list[str]]:
    """The columns of a file by name. A heading is a name and a type, such as `age:token`."""
    with path.open(encoding="utf-8", newline="") as file:
        headings, *rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    names = [heading.split(":")[0] for heading in headings]
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))


"""
Every feature becomes a number from 0 to the size of its table: people of similar age share one,
and so do those whose zip codes begin alike, which is to live in the same part of the country.
A movie has up to six genres. They are padded with 0, so theirs count from 1.
"""


@dataclasses.dataclass(frozen=True)
class Features:
    """Ids of each feature, one row per user, movie or interaction, and the size of each table."""

    ids: dict[str, np.ndarray]
    sizes: dict[str, int]

    def of(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """The ids in these rows."""
        return {name: ids[rows] for name, ids in self.ids.items()}


def number(**columns: Sequence[str]) -> Features:
    """Numbers the distinct texts of each column in sorted order."""
    ids, sizes = {}, {}
    for name, texts in columns.items():
        distinct, numbers = np.unique(np.array(texts), return_inverse=True)
        ids[name], sizes[name] = numbers.astype(np.int32), len(distinct)
    return Features(ids, sizes)


def read_users(columns: dict[str, list[str]]) -> Features:
    return number(
        user=columns["user_id"],
        age=[str(min(int(age) // 5, 12)) for age in columns["age"]],
        gender=columns["gender"],
        occupation=columns["occupation"],
        region=[code[0] if code[0].isdigit() else "abroad" for code in columns["zip_code"]],
    )


def read_movies(columns: dict[str, list[str]]) -> Features:
    features = number(movie=columns["item_id"], year=columns["release_year"])
    lists = [text.split() for text in columns["class"]]
    genres = sorted({genre for genres in lists for genre in genres})
    padded = np.zeros((len(lists), max(map(len, lists))), np.int32)
    for row, names in zip(padded, lists, strict=True):
        row[: len(names)] = [1 + genres.index(name) for name in names]
    return Features(features.ids | {"genres": padded}, features.sizes | {"genres": 1 + len(genres)})


"""
The last fifth of each user's ratings is held out, so the model is asked about later ones than it
has learned from. A single date for all would leave a test of something else: five of six ratings
after it would come from users who had not been there before.
"""

Examples = tuple[dict[str, np.ndarray], dict[str, np.ndarray]]
"""Features and targets."""


@dataclasses.dataclass(frozen=True)
class Data:
    """What to train on, what is held out, and the size of each feature's table."""

    train: Examples
    held_out: Examples
    sizes: dict[str, int]


def read_data(folder: pathlib.Path) -> Data:
    """Reads, joins and splits the three files."""
    ratings, user_columns, movie_columns = (read_columns(folder / name) for name in FILES)
    users, movies = read_users(user_columns), read_movies(movie_columns)
    user_rows = rows_of(ratings["user_id"], user_columns["user_id"])
    movie_rows = rows_of(ratings["item_id"], movie_columns["item_id"])
    rating = np.array(ratings["rating"], np.float32)
    late = is_late(user_rows, np.array(ratings["timestamp"], np.float64))

    def examples(chosen: np.ndarray) -> Examples:
        inputs = users.of(user_rows[chosen]) | movies.of(movie_rows[chosen])
        return inputs, {
            "liked": (rating[chosen, None] >= 4).astype(np.float32),
            "rating": rating[chosen, None],
        }

    return Data(examples(~late), examples(late), users.sizes | movies.sizes)


def rows_of(texts: Sequence[str], catalogue: Sequence[str]) -> np.ndarray:
    """The row of each text in the catalogue."""
    rows = {text: row for row, text in enumerate(catalogue)}
    return np.array([rows[text] for text in texts])


def is_late(users: np.ndarray, times: np.ndarray, share: float = 0.2) -> np.ndarray:
    """Marks the last of each user's interactions."""
    order = np.lexsort((times, users))
    counts = np.bincount(users)
    starts = np.cumsum(counts) - counts
    position = np.empty(len(users), np.int64)
    position[order] = np.arange(len(users)) - np.repeat(starts, counts)
    return position >= (1 - share) * counts[users]


"""
## The model

This is DLRM (Naumov et al., "Deep Learning Recommendation Model for Personalization and
Recommendation Systems", 2019): one vector per feature, the dot products of all pairs of them, and
a network on top. There are two outputs: the chance that the user gives four stars or more, and
the expected number of stars.
"""


class DotInteraction(keras.layers.Layer):
    """The dot products of all pairs of vectors, and the vectors themselves."""

    def call(self, vectors: Sequence[Any]) -> Any:
        stacked = ops.stack(vectors, axis=1)
        products = ops.matmul(stacked, ops.transpose(stacked, (0, 2, 1)))
        n = len(vectors)
        one, other = np.tril_indices(n, k=-1)
        pairs = ops.take(ops.reshape(products, (-1, n * n)), one * n + other, axis=1)
        return ops.concatenate([pairs, *vectors], axis=1)


"""
Users and movies are the features whose tables grow with the business, so these two get a
ScratchPipeEmbedding. It takes the place of `keras.layers.Embedding` with one more argument, the
number of slots. The small tables stay on the device.
"""

LARGE = ("user", "movie")


def embed(name: str, rows: int, width: int, slots: int | None) -> keras.layers.Layer:
    """The table of a feature. `slots` is None for a model without ScratchPipe."""
    initializer = keras.initializers.RandomNormal(stddev=0.1)
    if slots is not None and name in LARGE:
        return tf_scratchpipe.ScratchPipeEmbedding(
            rows, width, num_slots=slots, embeddings_initializer=initializer, name=f"{name}_table"
        )
    return keras.layers.Embedding(
        rows,
        width,
        embeddings_initializer=initializer,
        mask_zero=name == "genres",
        name=f"{name}_table",
    )


def build_model(data: Data, width: int, slots: int | None, steps: int) -> keras.Model:
    """A compiled model that reads a dictionary of ids."""
    inputs, vectors = {}, []
    for name, rows in data.sizes.items():
        shape = data.train[0][name].shape[1:]
        # Ids that `lookahead` replaces must stay whole numbers all the way.
        inputs[name] = keras.Input(shape, dtype="int32", name=name)
        vector = embed(name, rows, width, slots)(inputs[name])
        # The mean over a movie's genres, without the padding.
        vectors.append(keras.layers.GlobalAveragePooling1D()(vector) if shape else vector)
    hidden = DotInteraction()(vectors)
    for units in (64, 32):
        hidden = keras.layers.Dense(units, activation="silu")(hidden)
    mean = keras.initializers.Constant(float(data.train[1]["rating"].mean()))
    outputs = {
        "liked": keras.layers.Dense(1, activation="sigmoid", name="liked")(hidden),
        "rating": keras.layers.Dense(1, bias_initializer=mean, name="rating")(hidden),
    }
    model = keras.Model(inputs, outputs)
    compile_model(model, steps)
    return model


"""
## Training

Under plain SGD both kinds of table take the very same steps. With Adagrad and Adam there would be a
small difference: ScratchPipe adds up the gradients of equal ids before it squares them, and with
Adam the rows rest in batches that do not look them up.
"""


def compile_model(model: keras.Model, steps: int) -> None:
    schedule = keras.optimizers.schedules.CosineDecay(0.5, decay_steps=steps)
    model.compile(
        optimizer=keras.optimizers.SGD(schedule),
        loss={"liked": "binary_crossentropy", "rating": "mean_squared_error"},
        metrics={
            "liked": keras.metrics.AUC(name="auc"),
            "rating": keras.metrics.RootMeanSquaredError(name="rmse"),
        },
        jit_compile=False,  # XLA cannot compile the cache, and both models shall run alike.
    )


"""
Both trainings must see the same batches. `Dataset.shuffle` draws a new order for every iterator,
and how many of them Keras opens, and when, is its own affair. So the order of an epoch is made from
the seed and its number, and one iterator goes through all epochs.
"""


def make_dataset(examples: Examples, args: argparse.Namespace) -> tf.data.Dataset:
    """All batches of all epochs."""
    rows = tf.range(len(examples[1]["rating"]))
    order = tf.data.Dataset.range(args.epochs).map(
        lambda epoch: tf.random.experimental.stateless_shuffle(rows, seed=[args.seed, epoch])
    )
    batches = order.flat_map(
        lambda rows: tf.data.Dataset.from_tensor_slices(rows).batch(args.batch_size)
    )
    batches = batches.map(
        lambda rows: tf.nest.map_structure(lambda tensor: tf.gather(tensor, rows), examples)
    )
    count = args.epochs * math.ceil(len(rows) / args.batch_size)
    return batches.apply(tf.data.experimental.assert_cardinality(count))


"""
The other line that brings ScratchPipe in is `lookahead`. It goes on the training data and nowhere
else: validation reads plain ids, and finds every row as it is trained so far.
"""


@dataclasses.dataclass(frozen=True)
class Result:
    """A trained model."""

    model: keras.Model
    history: dict[str, list[float]]
    seconds: float


def train(data: Data, args: argparse.Namespace, slots: int | None) -> Result:
    """Trains a fresh model. Equal seeds give equal weights to begin with and equal batches."""
    keras.utils.set_random_seed(args.seed)
    dataset = make_dataset(data.train, args)
    model = build_model(data, args.width, slots, steps=len(dataset))
    if slots is not None:
        dataset = dataset.apply(tf_scratchpipe.lookahead(model))
    start = time.perf_counter()
    # The dataset is in random order: `shuffle=False` only keeps Keras from warning about it.
    history = model.fit(
        dataset.prefetch(2),
        validation_data=tf.data.Dataset.from_tensor_slices(data.held_out).batch(4096),
        epochs=args.epochs,
        steps_per_epoch=len(dataset) // args.epochs,
        shuffle=False,
        verbose=0,
    )
    return Result(model, history.history, time.perf_counter() - start)


"""
## All together
"""

METRICS = {"AUC": "val_liked_auc", "RMSE": "val_rating_rmse"}


def show(plain: Result, cached: Result) -> None:
    """The two trainings side by side, on the ratings that were held out."""
    headings = "".join(f"{name:>13}" for name in ("Embedding", "ScratchPipe", "difference"))
    print("\n     " + "".join(f"{name:>39}" for name in METRICS))
    print("epoch" + headings * len(METRICS))
    for epoch in range(len(plain.history["loss"])):
        line = f"{epoch + 1:5}"
        for name in METRICS.values():
            one, other = plain.history[name][epoch], cached.history[name][epoch]
            line += f"{one:13.4f}{other:13.4f}{abs(one - other):13.0e}"
        print(line)
    print(f"\nseconds: {plain.seconds:.0f} with Embedding, {cached.seconds:.0f} with ScratchPipe")


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
    args = parser.parse_args(argv)
    try:
        args.data = find_data(args.data)
    except FileNotFoundError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Trains both models and compares them; returns the numbers that it prints."""
    args = parse_args(argv)
    print(f"MovieLens-100K in {args.data}\nIts terms of use: {find_terms(args.data)}")
    data = read_data(args.data)
    train_rows, held_out_rows = (len(part[1]["rating"]) for part in (data.train, data.held_out))
    print(f"{train_rows:,} ratings to train on, {held_out_rows:,} later ones held out")
    tables = ", ".join(f"{data.sizes[name]:,} for the {name} table" for name in LARGE)
    print(f"rows: {tables}; slots on the device: {args.slots:,} for each")

    print("training with keras.layers.Embedding ...", flush=True)
    plain = train(data, args, slots=None)
    print("training with tf_scratchpipe.ScratchPipeEmbedding ...", flush=True)
    cached = train(data, args, slots=args.slots)
    show(plain, cached)
    stats = cached.model.get_layer("movie_table").stats()
    print(f"\nThe cache of the movie table:\n{stats}")
    return {
        "plain": {name: plain.history[name] for name in METRICS.values()},
        "cached": {name: cached.history[name] for name in METRICS.values()},
        "train_hit_rate": stats.train_hit_rate,
    }


if __name__ == "__main__":
    main()
