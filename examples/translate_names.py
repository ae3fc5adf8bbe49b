"""Translate names with an attention decoder that trains in less memory.

Echo (Zheng et al., "Echo: Compiler-based GPU Memory Footprint Reduction for LSTM RNN Training",
ISCA 2020) began with one observation: in an LSTM translator most of the memory goes to the
attention. At every output step it compares the decoder's state with *every* source position, and
the result, a tensor `[batch, source length, width]`, has to wait for the backward pass. Each is
cheap to compute again: an addition and a `tanh`. The decoder is a `tf.while_loop`, as recurrent
layers are in Keras; Echo plans inside of it.

This example builds such a translator for character sequences and trains it on real data: the
names of languages, countries, regions, scripts and currencies that the package `pycountry` ships
in many languages. It then compares the memory of the same train step with and without Echo.

    python examples/translate_names.py
    python examples/translate_names.py --language fr --epochs 20
    python examples/translate_names.py --policy none     # train without recomputation
    python examples/translate_names.py --unroll          # the same model without loops

The default run takes a few minutes on two CPU cores.
"""

import argparse
import dataclasses
import gettext
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# The measurements below run in processes of their own, which must find room on the same GPU.
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

import keras
import numpy as np
import pycountry
import rich.box
import rich.console
import rich.progress
import rich.table
import rich.text
import sacrebleu
import tensorflow as tf
from keras import ops

import tf_echo

Pair = tuple[str, str]
"""A name in English and its translation."""

"""
## The data

`pycountry` ships gettext catalogues, one per standard and language: ISO 639 (languages), 3166
(countries and their regions), 4217 (currencies) and 15924 (scripts). Nearly three quarters of the
German entries are the same in both languages. They teach nothing and would flatter every score,
so only the pairs that differ are kept.
"""

LOCALES = pathlib.Path(pycountry.__file__).parent / "locales"


def languages() -> list[str]:
    """The languages that pycountry ships."""
    return sorted(folder.name for folder in LOCALES.iterdir() if folder.is_dir())


def read_pairs(language: str, max_length: int) -> list[Pair]:
    """The names that differ from English and fit in `max_length` with an end mark."""
    known = languages()
    if language not in known:
        raise ValueError(
            f"pycountry has no catalogues for this language. Received: {language!r}. "
            f"It has {len(known)} languages, among them de, es, fr, it, ja, nl, pl, ru, sv, tr."
        )
    translations: dict[str, str] = {}
    for path in sorted((LOCALES / language / "LC_MESSAGES").glob("*.mo")):
        for source, target in read_catalogue(path):
            translations.setdefault(source, target)  # One translation per name.
    pairs = [
        (source, target)
        for source, target in sorted(translations.items())
        if source != target and max(len(source), len(target)) < max_length
    ]
    if len(pairs) < 100:
        raise ValueError(
            f"Too few names of language {language!r} differ from English: {len(pairs)} with fewer "
            f"than {max_length} characters. Choose another language or a larger --max-length."
        )
    return pairs


def read_catalogue(path: pathlib.Path) -> list[Pair]:
    """All entries of one `.mo` file, without its header and without plural forms."""
    with path.open("rb") as file:
        entries = gettext.GNUTranslations(file)._catalog  # There is no public way to list them.
    return [(key, text) for key, text in entries.items() if isinstance(key, str) and key]


"""
One in ten pairs is held out and never seen in training. English names are unique in the list, so
no source string is on both sides.
"""


def split_pairs(pairs: Sequence[Pair], seed: int, limit: int | None) -> tuple[list[Pair], ...]:
    """Shuffles, takes `limit` pairs, and returns those to train on and those held out."""
    shuffled = random.Random(seed).sample(pairs, k=min(limit or len(pairs), len(pairs)))
    held_out = max(1, len(shuffled) // 10)
    return shuffled[held_out:], shuffled[:held_out]


PAD, END = 0, 1


class Alphabet:
    """Maps characters to numbers from 2 on; 0 pads, 1 marks the end (and starts the decoder)."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.characters = sorted(set("".join(texts)))
        self.numbers = {character: 2 + i for i, character in enumerate(self.characters)}

    def __len__(self) -> int:
        return 2 + len(self.characters)

    def encode(self, texts: Sequence[str], length: int) -> np.ndarray:
        """One row per text: its characters, an end mark, padding."""
        rows = np.full((len(texts), length), PAD, np.int32)
        for row, text in zip(rows, texts, strict=True):
            row[: len(text) + 1] = [*(self.numbers[character] for character in text), END]
        return rows

    def decode(self, row: np.ndarray) -> str:
        """The text before the first end mark."""
        marks = np.flatnonzero(row <= END)
        row = row[: marks[0]] if marks.size else row
        return "".join(self.characters[number - 2] for number in row)


"""
The last batch of an epoch is smaller than the others, so the batch size is unknown when the train
step is traced. Echo plans for a nominal batch size and needs no `drop_remainder`.
"""


def make_dataset(
    pairs: Sequence[Pair], alphabet: Alphabet, length: int, batch_size: int, seed: int
) -> tf.data.Dataset:
    """Batches of ({source, previous target characters}, target characters)."""
    source = alphabet.encode([source for source, _ in pairs], length)
    target = alphabet.encode([target for _, target in pairs], length)
    previous = np.concatenate([np.full_like(target[:, :1], END), target[:, :-1]], axis=1)
    dataset = tf.data.Dataset.from_tensor_slices(({"source": source, "previous": previous}, target))
    return dataset.shuffle(len(pairs), seed=seed).batch(batch_size).prefetch(2)


"""
## The model

The decoder is Bahdanau's (Bahdanau et al., "Neural Machine Translation by Jointly Learning to
Align and Translate", ICLR 2015). At each step it scores every source position with
`v · tanh(key + query)`, reads the average of the encoder's states under those scores, and feeds
it to an LSTM cell. It is written as a cell for `keras.layers.RNN`, which runs it in a
`tf.while_loop`, as `keras.layers.LSTM` does in the encoder. With `--unroll` the graph holds every
step side by side instead, and takes longer to trace.
"""


class AttentionCell(keras.layers.Layer):
    """One step of an LSTM decoder with additive attention, for `keras.layers.RNN`."""

    def __init__(self, units: int, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units, self.width = units, width
        self.state_size = [units, units]
        self.key = keras.layers.Dense(width, use_bias=False, name="key")
        self.query = keras.layers.Dense(width, name="query")
        self.score = keras.layers.Dense(1, use_bias=False, name="score")
        self.lstm = keras.layers.LSTMCell(units, name="lstm")

    def build(self, inputs_shape: Sequence[int | None]) -> None:
        # A variable made inside of the loop would be lost with it.
        self.query.build((None, self.units))
        self.score.build((None, None, self.width))
        self.lstm.build((None, inputs_shape[-1] + self.units))

    def look_at(self, memory: Any, penalty: Any) -> None:
        """Sets what to attend to: `keras.layers.RNN` hands a cell only its inputs and states."""
        self.memory, self.penalty, self.keys = memory, penalty, self.key(memory)

    def attend(self, hidden: Any) -> Any:
        """How much to read from each source position: `[batch, source length]`, sum 1."""
        # Here is the memory: one tensor [batch, source length, width] for every output step.
        energies = ops.tanh(self.keys + ops.expand_dims(self.query(hidden), axis=1))
        return ops.softmax(ops.squeeze(self.score(energies), axis=-1) + self.penalty)

    def call(self, inputs: Any, states: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """The LSTM's output, what it has read and the attention weights, side by side."""
        weights = self.attend(states[0])
        context = ops.squeeze(ops.matmul(ops.expand_dims(weights, axis=1), self.memory), axis=1)
        hidden, states = self.lstm(ops.concatenate([inputs, context], axis=-1), states)
        return ops.concatenate([hidden, context, weights], axis=-1), states


"""
Many characters are simply copied: *Tatar* stays *Tatar* in *Krimtatarisch*. A pointer network
(See et al., "Get To The Point", ACL 2017) makes that easy: a gate mixes the distribution over the
alphabet with the attention weights, added up per source character.
"""


class Translator(keras.Model):
    """Bidirectional LSTM encoder, attention decoder, and a gate between writing and copying."""

    def __init__(
        self, alphabet_size: int, units: int, unroll: bool = False, dropout: float = 0.2
    ) -> None:
        super().__init__()
        self.alphabet_size = alphabet_size
        self.units = units
        self.embedding = keras.layers.Embedding(alphabet_size, units // 2)
        self.encoder = keras.layers.Bidirectional(
            keras.layers.LSTM(units // 2, return_sequences=True, unroll=unroll)
        )
        self.cell = AttentionCell(units, width=2 * units)
        self.decoder = keras.layers.RNN(self.cell, return_sequences=True, unroll=unroll)
        self.write = keras.layers.Dense(alphabet_size, activation="softmax")
        self.gate = keras.layers.Dense(1, activation="sigmoid")
        self.dropout = keras.layers.Dropout(dropout)

    def read(self, source: Any, training: bool = False) -> None:
        """Encodes the source and has the decoder's cell look at it, but not at its padding."""
        embedded = self.dropout(self.embedding(source), training=training)
        penalty = -1e9 * ops.cast(ops.equal(source, PAD), "float32")
        self.cell.look_at(self.encoder(embedded), penalty)

    def predict_characters(self, outputs: Any, source: Any, training: bool = False) -> Any:
        """Log-probabilities `[batch, steps, alphabet]` from the outputs of the decoder's cell."""
        features, weights = ops.split(outputs, [2 * self.units], axis=-1)
        features = self.dropout(features, training=training)
        copied = ops.matmul(weights, ops.one_hot(source, self.alphabet_size))
        gate = self.gate(features)
        return ops.log(gate * self.write(features) + (1 - gate) * copied + 1e-6)

    def call(self, inputs: dict[str, Any], training: bool = False) -> Any:
        """Predicts each character from the source and the true characters before it."""
        self.read(inputs["source"], training)
        previous = self.dropout(self.embedding(inputs["previous"]), training=training)
        return self.predict_characters(self.decoder(previous), inputs["source"], training)

    def translate(self, source: Any) -> Any:
        """Predicts each character from the source and its own best characters before it."""
        self.read(source)
        states = self.decoder.get_initial_state(batch_size=ops.shape(source)[0])
        characters = [END * ops.ones_like(source[:, 0])]
        for _ in range(source.shape[1]):
            outputs, states = self.cell(self.embedding(characters[-1]), states)
            scores = self.predict_characters(ops.expand_dims(outputs, axis=1), source)
            characters.append(ops.cast(ops.argmax(scores[:, 0], axis=-1), source.dtype))
        return ops.stack(characters[1:], axis=1)


"""
## Training

One line brings Echo in: the optimizer is wrapped. Nothing else in the model, the loss or `fit`
knows about it. The wrapper plans when Keras traces the train step, and the gradients stay the
same.
"""


def compile_model(model: Translator, policy: str, steps: int) -> None:
    """Readies the model to train for `steps` steps."""
    schedule = keras.optimizers.schedules.CosineDecay(6e-3, decay_steps=steps)
    adam = keras.optimizers.Adam(schedule, clipnorm=1.0)
    model.compile(
        optimizer=tf_echo.EchoOptimizer(adam, policy=policy),
        # Log-probabilities are logits too. Padding does not count.
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=PAD),
        jit_compile=False,  # XLA would compile a graph of `--unroll` for minutes.
    )


class Progress(keras.callbacks.Callback):
    """One progress bar for the whole training, and a line for every few epochs."""

    def __init__(self, epochs: int, steps: int, console: rich.console.Console) -> None:
        super().__init__()
        self.epochs = epochs
        self.steps = steps
        self.bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            rich.progress.TimeElapsedColumn(),
            console=console,
            transient=True,
        )

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        self.task = self.bar.add_task("tracing the train step", total=self.epochs * self.steps)
        self.bar.start()

    def describe(self, logs: dict[str, float] | None) -> str:
        """The epoch and its mean loss so far."""
        return f"epoch {self.epoch:2}/{self.epochs}   loss {(logs or {})['loss']:.3f}"

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.epoch = epoch + 1

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self.bar.update(self.task, advance=1, description=self.describe(logs))

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        if self.epoch % 5 == 0 or self.epoch in (1, self.epochs):
            self.bar.console.print(self.describe(logs))

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        self.bar.stop()


@dataclasses.dataclass(frozen=True)
class Task:
    """Everything that is needed to train: data, alphabet, model."""

    train: list[Pair]
    held_out: list[Pair]
    alphabet: Alphabet
    dataset: tf.data.Dataset
    model: Translator


def prepare(args: argparse.Namespace, policy: str) -> Task:
    """Splits the pairs and compiles a fresh model."""
    keras.utils.set_random_seed(args.seed)
    train, held_out = split_pairs(args.pairs, args.seed, args.limit)
    # All names that may have to be read, but only those translations that may be learned from.
    alphabet = Alphabet(
        [source for source, _ in train + held_out] + [target for _, target in train]
    )
    dataset = make_dataset(train, alphabet, args.max_length, args.batch_size, args.seed)
    model = Translator(len(alphabet), args.units, args.unroll)
    compile_model(model, policy, steps=args.epochs * len(dataset))
    return Task(train, held_out, alphabet, dataset, model)


"""
## Translating and scoring

chrF compares character n-grams and is at home with names. Copying the English name is a baseline
that is hard to call unfair: much of most names is the same.
"""


def translate(task: Task, names: Sequence[str], length: int, batch_size: int = 256) -> list[str]:
    """Greedy translations, in the order of `names`."""
    decode = tf.function(
        task.model.translate, input_signature=[tf.TensorSpec([None, length], tf.int32)]
    )
    rows = task.alphabet.encode(names, length)
    batches = [decode(rows[i : i + batch_size]) for i in range(0, len(rows), batch_size)]
    return [task.alphabet.decode(row) for batch in batches for row in batch.numpy()]


def chrf(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Corpus chrF between 0 and 100."""
    return sacrebleu.CHRF().corpus_score(list(hypotheses), [list(references)]).score


def show_samples(
    pairs: Sequence[Pair], translations: Sequence[str], console: rich.console.Console
) -> None:
    """A dozen held-out names: the first in their random order that fit on a line."""
    rows = [(*pair, text) for pair, text in zip(pairs, translations, strict=True)]
    rows = [row for row in rows if max(map(len, row)) <= 23][:12]
    table = rich.table.Table(title="Held-out names", box=rich.box.SIMPLE_HEAD, title_justify="left")
    for heading in ("English", "catalogue", "model"):
        table.add_column(heading)
    for source, target, translation in rows:
        style = "green" if translation == target else ""
        table.add_row(source, target, rich.text.Text(translation, style=style))
    console.print(table)


"""
## Memory, with and without Echo

The allocator knows how many bytes a step really had in use at its peak. On a GPU, TensorFlow
always counts. On a CPU it does so if `TF_CPU_ALLOCATOR_USE_BFC=1` is set before it is imported, and
the peak is steady only if ops run one at a time. So each policy is measured in a process of its
own: this same file with `--measure-peak`, which trains a few steps and prints one line of JSON.
"""

WARM_UP_STEPS, MEASURED_STEPS = 2, 10


class PeakMeter(keras.callbacks.Callback):
    """Notes the peak bytes in use and the seconds of each step."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.peaks: list[int] = []
        self.seconds: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        tf.config.experimental.reset_memory_stats(self.device)
        self.start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self.seconds.append(time.perf_counter() - self.start)
        self.peaks.append(tf.config.experimental.get_memory_info(self.device)["peak"])


def measure_peak(args: argparse.Namespace) -> dict[str, Any]:
    """Trains a few full batches under `args.measure_peak`; medians over the steps."""
    task = prepare(args, policy=args.measure_peak)
    meter = PeakMeter("GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0")
    task.model.fit(
        task.dataset.unbatch().repeat().batch(args.batch_size),
        steps_per_epoch=WARM_UP_STEPS + MEASURED_STEPS,
        callbacks=[meter],
        shuffle=False,
        verbose=0,
    )
    return {
        "policy": args.measure_peak,
        "device": meter.device,
        "peak_bytes": int(statistics.median(meter.peaks[WARM_UP_STEPS:])),
        "step_seconds": statistics.median(meter.seconds[WARM_UP_STEPS:]),
    }


def measure_in_subprocess(policy: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs `measure_peak` in a fresh process."""
    command = [sys.executable, __file__, f"--measure-peak={policy}"]
    for name in ("language", "batch_size", "units", "max_length", "seed", "limit"):
        if (value := getattr(args, name)) is not None:
            command.append(f"--{name.replace('_', '-')}={value}")
    command += ["--unroll"] * args.unroll
    counted = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_NUM_INTEROP_THREADS": "1"}
    result = subprocess.run(
        command, env=os.environ | counted, capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise RuntimeError(f"Measuring policy {policy!r} failed:\n{result.stderr[-4000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def show_peaks(peaks: dict[str, dict[str, Any]], console: rich.console.Console) -> None:
    """Peak memory and time per step, side by side."""
    base = peaks["none"]
    console.print()
    table = rich.table.Table(
        title=f"One train step ({base['device']})", box=rich.box.SIMPLE_HEAD, title_justify="left"
    )
    table.add_column("policy")
    for heading in ("peak memory", "saving", "time"):
        table.add_column(heading, justify="right")
    for policy, peak in peaks.items():
        table.add_row(
            policy,
            f"{peak['peak_bytes'] / 2**20:.1f} MiB",
            f"{base['peak_bytes'] / peak['peak_bytes']:.2f}x",
            f"{peak['step_seconds'] * 1000:.0f} ms",
        )
    console.print(table)


"""
## All together
"""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line, and the names that it asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add: Callable[..., Any] = parser.add_argument
    add("--language", default="de", help="any language that pycountry ships (default: de)")
    add("--epochs", type=int, default=16, help="(default: 16)")
    add("--batch-size", type=int, default=128, help="(default: 128)")
    add("--policy", choices=["echo", "none"], default="echo", help="(default: echo)")
    add("--units", type=int, default=96, help="width of the network (default: 96)")
    add("--max-length", type=int, default=40, help="leave out longer names (default: 40)")
    add("--limit", type=int, help="use only so many pairs")
    add("--seed", type=int, default=0, help="(default: 0)")
    add("--unroll", action="store_true", help="build the graph without loops")
    add("--skip-peaks", action="store_true", help="do not measure memory")
    add("--measure-peak", choices=["echo", "none"], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    try:
        args.pairs = read_pairs(args.language, args.max_length)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Trains, translates, measures; returns the numbers that it prints."""
    args = parse_args(argv)
    if args.measure_peak:
        result = measure_peak(args)
        print(json.dumps(result))
        return result

    console = rich.console.Console(highlight=False)
    task = prepare(args, args.policy)
    console.print(f"{len(task.train)} pairs to train on, {len(task.held_out)} held out")
    progress = Progress(args.epochs, len(task.dataset), console)
    # The dataset shuffles itself: `shuffle=False` only keeps Keras from warning about it.
    task.model.fit(task.dataset, epochs=args.epochs, callbacks=[progress], shuffle=False, verbose=0)

    names, references = zip(*task.held_out, strict=True)
    translations = translate(task, names, args.max_length)
    show_samples(task.held_out, translations, console)
    scores = {"chrf": chrf(translations, references), "copy_chrf": chrf(names, references)}
    console.print(f"chrF of the model {scores['chrf']:.1f}, of copying {scores['copy_chrf']:.1f}")

    peaks = {}
    if not args.skip_peaks:
        with console.status("measuring the memory of a train step"):
            peaks = {policy: measure_in_subprocess(policy, args) for policy in ("none", "echo")}
        show_peaks(peaks, console)
    print(task.model.optimizer.report())
    return {**scores, "peaks": peaks}


if __name__ == "__main__":
    main()
