"""The six stages, as one pass over the data (ScratchPipe, section IV-C).

Load, Plan, Collect, Exchange and Insert run here, each on another batch; Train is whoever takes the
batches. There is no common clock. What the paper gets from its cycles, a stage gets by waiting: for
the training of a batch whose row is to be written back, for the Insert that brings a row to the
host before it is read again, and with a larger storage for all steps to be over.
"""

import atexit
import collections
import contextlib
import dataclasses
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_scratchpipe.errors import AbandonedError, StallError, TooFewSlotsError
from tf_scratchpipe.executor import EXECUTORS, Executor
from tf_scratchpipe.lookup import IdCheck
from tf_scratchpipe.plan import BatchPlan, Ints
from tf_scratchpipe.planner import Looked
from tf_scratchpipe.slot_budget import Demand, SlotBudget
from tf_scratchpipe.slot_group import SlotGroup
from tf_scratchpipe.transfers import Transfer

_live: "weakref.WeakSet[PipelineRun]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """No stage may be in the middle of an op when the interpreter goes."""
    for run in list(_live):
        run.close()


_POLL_SECONDS = 0.0003
_LONGEST_POLL_SECONDS = 0.01
_LATE_SHARE = 0.02
_LONGEST_COUNTED_SECONDS = 0.1
_DROPPED_SECONDS = 20.0
"""Batches that were sent out by an earlier pass and that nobody trained or evaluated anything for
so long will not be trained any more."""


class _Patience:
    """Seconds that go by while somebody waits and asks again and again.

    A machine that is suspended or busy elsewhere keeps training from going on, too: between two
    questions only `_LONGEST_COUNTED_SECONDS` count.
    """

    def __init__(self) -> None:
        self._asked, self._seconds = time.monotonic(), 0.0

    def seconds_since(self, sign_of_life: float) -> float:
        """Seconds counted up to now, and none before `sign_of_life` (`time.monotonic`)."""
        now = time.monotonic()
        if sign_of_life > self._asked:
            self._asked, self._seconds = sign_of_life, 0.0
        self._seconds += min(now - self._asked, _LONGEST_COUNTED_SECONDS)
        self._asked = now
        return self._seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Feature:
    """Where ids are in the data.

    Args:
        name: Its name, for messages.
        position: Number of the component that holds the ids.
        check: Their check.
        select: From the component to the view of it that holds the ids.
    """

    name: str
    position: int
    check: IdCheck
    select: Callable[[npt.NDArray[np.generic]], npt.NDArray[np.generic]]


@dataclasses.dataclass(frozen=True, slots=True)
class Feed:
    """A group of tables and the features that they look up."""

    group: SlotGroup
    features: Sequence[Feature]


@dataclasses.dataclass(slots=True)
class Batch:
    """A batch on its way through the stages. The lists have an entry for each feed."""

    number: int
    components: list[tf.Tensor | npt.NDArray[np.generic]]
    ids: list[list[Ints]]
    looked: list[Looked] = dataclasses.field(default_factory=list)
    plans: list[BatchPlan] = dataclasses.field(default_factory=list)
    transfers: list[Transfer] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineSettings:
    """How to run the stages.

    Args:
        past: Batches held before the current one.
        future: Batches held after it.
        executor: `"thread"` or `"inline"`.
        stall_seconds: After so long a wait, give up. None: never.
        budget: The slots of all tables, if they share them.
    """

    past: int
    future: int
    executor: str
    stall_seconds: float | None
    budget: SlotBudget | None = None

    @property
    def window(self) -> int:
        """Batches whose rows are held at the same time."""
        return self.past + 1 + self.future


class PipelineRun:
    """One pass over the data. Iterate over it once.

    Args:
        source: The components of each batch.
        feeds: What to look up in them.
        settings: How.
    """

    def __init__(
        self,
        source: Generator[list[tf.Tensor]],
        feeds: Sequence[Feed],
        settings: PipelineSettings,
    ) -> None:
        self._source = source
        self._feeds = feeds
        self._settings = settings
        self._closed = threading.Event()
        self._exhausted = False
        self._lock = threading.Lock()
        self._executor: Executor | None = None
        self._divide_anew()
        for feed in feeds:
            feed.group.start(self)
        self._bases = [feed.group.planned for feed in feeds]
        self._late_since = [(feed.group.trained(), _Patience()) for feed in feeds]
        stages = [
            ("load", self._load),
            ("plan", self._plan),
            ("collect", self._collect),
            ("exchange", self._exchange),
            ("insert", self._insert),
        ]
        self._executor = EXECUTORS[settings.executor](stages, self._note_wait)
        _live.add(self)

    def __iter__(self) -> Iterator[list[tf.Tensor | npt.NDArray[np.generic]]]:
        for batch in self._executor or ():
            yield batch.components
        if self._closed.is_set():
            raise AbandonedError(
                "This iterator of a `lookahead(...)` dataset is over: another one was started on "
                "the same layers, or they were trained on plain ids. Start a new iterator."
            )
        self._exhausted = True
        self.close()

    def stop(self) -> None:
        """Stop, without waiting for the end of the stages: for a garbage collector's turn."""
        self._closed.set()
        if self._executor is not None:
            self._executor.stop()
        self._close_source()

    def close(self) -> None:
        """Stop, and take back what was planned and not carried out. May be called twice."""
        self.stop()
        if self._executor is not None:
            self._executor.join()
        with self._lock:
            for feed in self._feeds:
                feed.group.finish(self, self._exhausted)

    # ---- stages -------------------------------------------------------------------------------

    def _load(self, _: Iterator[Batch]) -> Iterator[Batch]:
        try:
            for number in itertools.count(1):
                with self._timed("load"):
                    components = next(self._source, None)
                    if components is None:
                        return
                    ids = [
                        [self._ids(feature, components, number) for feature in feed.features]
                        for feed in self._feeds
                    ]
                yield Batch(number, list(components), ids)
        finally:
            self._close_source()

    def _plan(self, loaded: Iterator[Batch]) -> Iterator[Batch]:
        window: collections.deque[Batch] = collections.deque()
        source = _Postponing(loaded)
        while True:
            new = source.take(self._settings.future + 1 - len(window))
            window.extend(new)
            if not window:
                source.raise_error()
                return
            with self._timed("plan"):
                self._size(window)
                for number, feed in enumerate(self._feeds):
                    for arrived in new:
                        arrived.looked.append(feed.group.look(arrived.ids[number]))
            batch = window.popleft()
            for number, feed in enumerate(self._feeds):
                self._plan_feed(batch, number, feed, [b.looked[number] for b in window])
            yield batch

    def _size(self, window: Sequence[Batch]) -> None:
        """Find out how many slots each group has, with the first batches."""
        if all(feed.group.is_sized for feed in self._feeds):
            return
        shares: list[int | None] = [None] * len(self._feeds)
        seen = [[batch.ids[n] for batch in window] for n in range(len(self._feeds))]
        if self._settings.budget is not None:
            shares = list(self._settings.budget.divided(self._demands(seen)))
        for feed, batches, slots in zip(self._feeds, seen, shares, strict=True):
            feed.group.size(batches, self._settings.window, slots)

    def _demands(self, seen: Sequence[Sequence[list[Ints]]]) -> list[Demand]:
        return [
            feed.group.demand(batches, self._settings.window)
            for feed, batches in zip(self._feeds, seen, strict=True)
        ]

    def _divide_anew(self) -> None:
        """Divide slots by what tables have needed: if one had too few in the pass before, or all
        got theirs without this budget.
        """
        budget, groups = self._settings.budget, [feed.group for feed in self._feeds]
        if budget is None or not all(group.is_sized for group in groups):
            return
        if not budget.is_divided or any(group.was_short() for group in groups):
            slots = budget.divide(self._demands([()] * len(groups)))
            for group, count in zip(groups, slots, strict=True):
                group.resize(count)

    def _plan_feed(self, batch: Batch, number: int, feed: Feed, upcoming: Sequence[Looked]) -> None:
        group, ids = feed.group, batch.ids[number]
        plan = self._plan_with_slots(batch, number, upcoming)
        batch.plans.append(plan)
        with self._timed("plan"):
            for feature, array, slots in zip(feed.features, ids, plan.slots, strict=True):
                codes = group.settings.codec.encode(array, slots, plan.batch)
                batch.components[feature.position] = _replaced(
                    batch.components[feature.position], feature, codes
                )

    def _plan_with_slots(self, batch: Batch, number: int, upcoming: Sequence[Looked]) -> BatchPlan:
        """Plan a batch, if need be once gradients have been applied that hold slots."""
        group, target = self._feeds[number].group, self._bases[number] + batch.number
        trained = -1
        while True:
            all_over, trained = trained >= target - 1, group.trained()
            try:
                with self._timed("plan"):
                    return group.plan(
                        target,
                        batch.looked[number],
                        upcoming,
                        self._settings.past,
                        self._settings.future,
                    )
            except TooFewSlotsError:
                if not group.accumulates() or all_over:
                    raise
            self._wait_for_training(number, min(trained + 1, target - 1), "plan", batch)
            if trained >= target - 1:  # Some batches may have been skipped.
                group.hold_waiting_only()

    def _collect(self, planned: Iterator[Batch]) -> Iterator[Batch]:
        for batch in planned:
            for number, (feed, plan) in enumerate(zip(self._feeds, batch.plans, strict=True)):
                self._wait_for_training(number, plan.after_trained, "collect", batch)
                group = feed.group
                self._wait(
                    lambda g=group, p=plan: g.inserted >= p.after_inserted,  # type: ignore[misc]
                    ("collect", "insert"),
                    batch,
                    number,
                    "the rows that an earlier batch writes back",
                )
                with self._timed("collect"):
                    batch.transfers.append(group.collect(plan))
            yield batch

    def _exchange(self, collected: Iterator[Batch]) -> Iterator[Batch]:
        for batch in collected:
            with self._timed("exchange"):
                for feed, transfer in zip(self._feeds, batch.transfers, strict=True):
                    feed.group.exchange(transfer)
            yield batch

    def _insert(self, exchanged: Iterator[Batch]) -> Iterator[Batch]:
        for batch in exchanged:
            for number, (feed, transfer) in enumerate(
                zip(self._feeds, batch.transfers, strict=True)
            ):
                if feed.group.grows_by(transfer.plan):
                    self._wait_for_training(number, transfer.plan.batch - 1, "insert", batch)
                with self._timed("insert"):
                    feed.group.insert(transfer)
                window = (self._settings.past, self._settings.future)
                feed.group.warn_if_shortened(transfer.plan, window)
            yield batch

    # ---- waiting ------------------------------------------------------------------------------

    def _wait_for_training(self, number: int, target: int, stage: str, batch: Batch) -> None:
        group = self._feeds[number].group

        def ready() -> bool:
            trained = group.trained()
            if trained >= target:
                return True
            before, patience = self._late_since[number]
            if trained != before or trained >= self._bases[number] or group.in_a_step():
                self._late_since[number] = trained, _Patience()
            elif patience.seconds_since(group.touched) > _DROPPED_SECONDS:
                # An earlier pass has sent out batches that nobody trains.
                group.declare_trained_before(self._bases[number])
            return False

        what = f"the training of batch {target - self._bases[number]}"
        self._wait(ready, (stage, "train"), batch, number, what)

    def _wait(
        self,
        ready: Callable[[], bool],
        who: tuple[str, str],
        batch: Batch,
        number: int,
        what: str,
    ) -> None:
        if ready():
            return
        group, limit = self._feeds[number].group, self._settings.stall_seconds
        started, patience = time.monotonic(), _Patience()
        while not ready():
            # Who waits for long may wait a little longer, and need not keep a core busy.
            pause = (time.monotonic() - started) * _LATE_SHARE
            if self._closed.wait(min(max(pause, _POLL_SECONDS), _LONGEST_POLL_SECONDS)):
                raise AbandonedError(f"Stage '{who[0]}' was stopped at batch {batch.number}.")
            waited = patience.seconds_since(group.touched)
            if limit is not None and waited > limit:
                names = ", ".join(f"'{table.name}'" for table in group.tables)
                raise StallError(
                    f"Stage '{who[0]}' has waited for {waited:.1f} s with batch {batch.number} of "
                    f"this iterator. It waits for {what}, with layers {names} trained up to batch "
                    f"{group.trained() - self._bases[number]}. Are the batches trained, each once, "
                    "and does the loss reach each layer? Does anything between `lookahead` and "
                    "the training hold batches back? Pass more `num_slots`, or another "
                    "`stall_seconds` to `lookahead`."
                )
        self._note_wait(*who, time.monotonic() - started)

    def _close_source(self) -> None:
        # An iterator of tf.data that is left to the garbage collector may take it a minute.
        with contextlib.suppress(ValueError):  # The thread that is at it closes it itself.
            self._source.close()

    # ---- small things -------------------------------------------------------------------------

    def _ids(self, feature: Feature, components: list[tf.Tensor], number: int) -> Ints:
        view = feature.select(components[feature.position].numpy())
        return feature.check(view, number, feature.name)

    @contextlib.contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        with contextlib.ExitStack() as groups:
            for feed in self._feeds:
                groups.enter_context(feed.group.timed(stage))
            yield

    def _note_wait(self, waiting: str, awaited: str, seconds: float) -> None:
        for feed in self._feeds:
            feed.group.stats.waited(waiting, awaited, seconds)


class _Postponing:
    """Batches from an iterator whose error waits until those before it are through.

    Args:
        batches: The iterator.
    """

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._error: Exception | None = None

    def take(self, count: int) -> list[Batch]:
        """Up to `count` batches."""
        taken: list[Batch] = []
        try:
            while len(taken) < count and self._error is None:
                taken.append(next(self._batches))
        except StopIteration:
            pass
        except Exception as error:
            self._error = error
        return taken

    def raise_error(self) -> None:
        """Raise what the iterator has raised."""
        if self._error is not None:
            raise self._error


def _replaced(
    component: tf.Tensor | npt.NDArray[np.generic], feature: Feature, codes: Ints
) -> npt.NDArray[np.generic]:
    """A component with codes where the ids were."""
    array = np.array(component)
    feature.select(array)[...] = codes
    return array
