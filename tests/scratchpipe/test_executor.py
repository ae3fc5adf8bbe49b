"""Both executors run the same stages; threads end, whoever stops first."""

import threading
import time

import pytest

from tf_scratchpipe import executor
from tf_scratchpipe.executor import EXECUTORS, InlineExecutor, ThreadExecutor

every_executor = pytest.mark.parametrize("kind", EXECUTORS.values(), ids=list(EXECUTORS))
LIMIT = 10.0  # Seconds after which something that should have happened has not.


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert until(lambda: not alive()), [thread.name for thread in alive()]


def alive():
    return [t for t in threading.enumerate() if t.name.startswith("scratchpipe-")]


def until(condition):
    """Whether the condition comes true before the limit."""
    end = time.monotonic() + LIMIT
    while not (done := condition()) and time.monotonic() < end:
        time.sleep(0.001)
    return done


def ignored(waiting, awaited, seconds):
    pass


def source(count, seen=None):
    def numbers(_):
        for number in range(count):
            if seen is not None:
                seen.append(number)
            yield number

    return "source", numbers


def mapped(name, function):
    return name, lambda items: (function(item) for item in items)


def pairs(items):
    """Not one batch for each batch: it takes two."""
    for item in items:
        yield item, next(items, None)


def few(items):
    yield next(items)
    yield next(items)


def failing(at, error=ValueError):
    def stage(items):
        for item in items:
            if item == at:
                raise error(f"at {at}")
            yield item

    return "failing", stage


def consumed(runner):
    """What comes before the end or the error, and the error."""
    results = []
    try:
        for item in runner:
            results.append(item)
    except BaseException as error:
        return results, error
    return results, None


@every_executor
@pytest.mark.parametrize(
    ("name", "stages", "expected"),
    [
        ("one stage", [source(4)], [0, 1, 2, 3]),
        ("no batches", [source(0), mapped("a", str)], []),
        ("in order", [source(30), mapped("a", lambda n: n * n)], [n * n for n in range(30)]),
        (
            "several stages",
            [source(3), mapped("a", lambda n: n + 1), mapped("b", str)],
            ["1", "2", "3"],
        ),
        ("fewer out than in", [source(5), ("pairs", pairs)], [(0, 1), (2, 3), (4, None)]),
        (
            "more out than in",
            [source(3), ("twice", lambda items: (n for item in items for n in (item, item)))],
            [0, 0, 1, 1, 2, 2],
        ),
        ("an end before the source's", [source(9), ("few", few)], [0, 1]),
    ],
)
def test_both_give_the_results_of_the_stages(kind, name, stages, expected):
    runner = kind(stages, ignored)
    assert consumed(runner) == (expected, None)
    runner.stop()
    runner.join()


@every_executor
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("place", [1, 2, 3])
def test_an_error_comes_behind_the_batches_before_it(kind, error, at, place):
    stages = [source(9), mapped("a", lambda n: n), mapped("b", lambda n: n)]
    stages.insert(place, failing(at, error))
    runner = kind(stages, ignored)
    results, raised = consumed(runner)
    assert results == list(range(at))
    assert type(raised) is error
    assert raised.args == (f"at {at}",)
    runner.stop()
    runner.join()


@every_executor
def test_an_error_of_the_source_comes_behind_its_batches(kind):
    def numbers(_):
        yield 0
        yield 1
        raise OSError("no more")

    runner = kind([("source", numbers), mapped("a", lambda n: n)], ignored)
    results, raised = consumed(runner)
    assert (results, str(raised)) == ([0, 1], "no more")
    runner.stop()
    runner.join()


@every_executor
def test_after_an_error_nothing_more_comes(kind):
    runner = kind([source(9), failing(2)], ignored)
    items = iter(runner)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(ValueError, match="at 2"):
        next(items)
    assert next(items, "over") == "over"
    runner.stop()
    runner.join()


@every_executor
def test_a_stage_may_catch_the_error_of_the_one_before(kind):
    def forgiving(items):
        try:
            yield from items
        except ValueError:
            yield "forgiven"

    runner = kind([source(9), failing(2), ("forgiving", forgiving)], ignored)
    assert consumed(runner) == ([0, 1, "forgiven"], None)
    runner.stop()
    runner.join()


@every_executor
def test_stop_and_join_may_be_called_twice_at_any_time(kind):
    runner = kind([source(100), mapped("a", lambda n: n)], ignored)
    items = iter(runner)
    assert next(items) == 0
    for _ in range(2):
        runner.stop()
        runner.join()
    assert not alive()


def test_inline_runs_nothing_before_it_is_asked():
    seen = []
    items = iter(InlineExecutor([source(9, seen), mapped("a", lambda n: n)], ignored))
    assert seen == []
    assert [next(items), next(items)] == [0, 1]
    assert seen == [0, 1]


def test_inline_runs_in_the_thread_of_the_consumer():
    where = []
    stage = mapped("a", lambda n: where.append(threading.current_thread()))
    assert consumed(InlineExecutor([source(1), stage], ignored))[1] is None
    assert where == [threading.current_thread()]


def test_threads_have_one_stage_each_and_its_name():
    where = {}

    def noted(name):
        return mapped(name, lambda n: where.setdefault(name, threading.current_thread().name))

    runner = ThreadExecutor([source(1), noted("a"), noted("b")], ignored)
    assert consumed(runner)[1] is None
    assert where == {"a": "scratchpipe-a", "b": "scratchpipe-b"}
    runner.join()


def test_threads_end_by_themselves_after_the_last_batch():
    runner = ThreadExecutor([source(3), mapped("a", lambda n: n)], ignored)
    assert consumed(runner) == ([0, 1, 2], None)
    assert until(lambda: not alive())


def test_stages_work_on_different_batches_at_the_same_time():
    # One thread alone would wait for ever at the barrier.
    barrier = threading.Barrier(3)

    def meeting(at):
        def stage(items):
            for item in items:
                if item == at:
                    barrier.wait(LIMIT)
                yield item

        return stage

    def first(_):
        yield from meeting(at=2)(range(4))

    stages = [("source", first), ("a", meeting(at=1)), ("b", meeting(at=0))]
    assert consumed(ThreadExecutor(stages, ignored)) == ([0, 1, 2, 3], None)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_slow_consumer_blocks_the_source(count):
    seen = []
    stages = [source(1000, seen), *[mapped(str(n), lambda n: n) for n in range(count)]]
    runner = ThreadExecutor(stages, ignored)
    items = iter(runner)
    # Between two stages, and before the consumer, is room for one batch; each stage holds another.
    room = 2 * (count + 1)
    for taken in range(3):
        assert until(lambda: len(seen) >= room + taken)  # noqa: B023
        time.sleep(0.02)
        assert len(seen) == room + taken
        assert next(items) == taken
    runner.stop()
    runner.join()


def test_stop_wakes_stages_that_wait_for_room():
    seen = []
    runner = ThreadExecutor([source(1000, seen), mapped("a", lambda n: n)], ignored)
    assert until(lambda: len(seen) == 4)
    assert len(alive()) == 2
    runner.stop()
    runner.join()
    assert not alive()
    assert len(seen) == 4


def test_stop_wakes_stages_that_wait_for_batches():
    release = threading.Event()

    def slow(_):
        yield 0
        release.wait(LIMIT)

    stages = [("source", slow), mapped("a", lambda n: n), mapped("b", lambda n: n)]
    runner = ThreadExecutor(stages, ignored)
    assert next(iter(runner)) == 0
    runner.stop()
    assert until(lambda: [t.name for t in alive()] == ["scratchpipe-source"])
    release.set()
    runner.join()
    assert not alive()


def test_stop_wakes_the_consumer_and_its_batches_are_over():
    release = threading.Event()

    def slow(_):
        yield 0
        release.wait(LIMIT)

    runner = ThreadExecutor([("source", slow), mapped("a", lambda n: n)], ignored)
    results = []
    consumer = threading.Thread(target=lambda: results.append(consumed(runner)))
    consumer.start()
    runner.stop()
    consumer.join(LIMIT)
    release.set()
    assert len(results) == 1
    assert results[0][1] is None
    runner.join()


def test_join_does_not_wait_for_ever_for_a_source_that_is_stuck(monkeypatch):
    monkeypatch.setattr(executor, "_JOIN_SECONDS", 0.05)
    release = threading.Event()

    def stuck(_):
        release.wait(LIMIT)
        yield 0

    runner = ThreadExecutor([("source", stuck), mapped("a", lambda n: n)], ignored)
    runner.stop()
    started = time.monotonic()
    runner.join()
    assert time.monotonic() - started < LIMIT / 2
    assert [thread.name for thread in alive()] == ["scratchpipe-source"]
    release.set()


def test_join_from_a_stage_does_not_wait_for_itself():
    runners, joined = [], []

    def closing(items):
        for item in items:
            if item == 1:
                runners[0].stop()
                runners[0].join()
                joined.append(item)
            yield item

    ready = threading.Event()

    def numbers(_):
        ready.wait(LIMIT)
        yield from range(9)

    runners.append(ThreadExecutor([("source", numbers), ("closing", closing)], ignored))
    ready.set()
    results, error = consumed(runners[0])
    assert error is None
    assert results in ([], [0])
    runners[0].join()
    assert joined == [1]


def test_who_waited_for_whom_is_told():
    told = []

    def slow(items):
        for item in items:
            time.sleep(0.02)
            yield item

    stages = [source(5), ("slow", slow), mapped("last", lambda n: n)]
    runner = ThreadExecutor(stages, lambda *wait: told.append(wait))
    assert consumed(runner)[0] == [0, 1, 2, 3, 4]
    runner.join()
    seconds = {}
    for waiting, awaited, spent in told:
        assert spent >= 0
        seconds[waiting, awaited] = seconds.get((waiting, awaited), 0) + spent
    # Each stage may wait for its neighbours; the slow one does not wait for long.
    assert set(seconds) == {
        *[("source", "slow"), ("slow", "source"), ("slow", "last")],
        *[("last", "slow"), ("last", "train"), ("train", "last")],
    }
    assert seconds["last", "slow"] > 0.05
    assert seconds["source", "slow"] > 0.02
    assert seconds["slow", "source"] + seconds["slow", "last"] < seconds["last", "slow"]


def test_inline_waits_for_nobody():
    told = []
    stages = [source(5), mapped("a", lambda n: n)]
    assert consumed(InlineExecutor(stages, lambda *wait: told.append(wait)))[0] == list(range(5))
    assert told == []
