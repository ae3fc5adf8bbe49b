"""Running stages one after the other, in the caller's thread or each in its own.

A stage is a function from an iterator of batches to an iterator of batches. Both executors run the
very same functions. In threads, an error travels behind the batches before it and is raised where
the results are consumed; `stop` wakes all, `join` waits for them, and both may be called twice.
"""

import collections
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

Stage: TypeAlias = tuple[str, Callable[[Iterator[Any]], Iterator[Any]]]
OnWait: TypeAlias = Callable[[str, str, float], None]
"""Called with the waiting stage, the awaited stage, and seconds."""


class Executor(Protocol):
    """Runs stages."""

    def __iter__(self) -> Iterator[Any]:
        """What the last stage returns."""

    def stop(self) -> None:
        """Tell all stages to stop."""

    def join(self) -> None:
        """Wait until they have."""


class InlineExecutor:
    """Runs all stages in the thread that asks for the next batch.

    Args:
        stages: Names and functions, in order. The first gets an empty iterator.
        on_wait: Called with waits. There are none.
    """

    def __init__(self, stages: list[Stage], on_wait: OnWait) -> None:
        self._result: Iterator[Any] = iter(())
        for _, function in stages:
            self._result = function(self._result)

    def __iter__(self) -> Iterator[Any]:
        return self._result

    def stop(self) -> None:
        """Nothing runs between two batches."""

    def join(self) -> None:
        """There is nothing to wait for."""


class ThreadExecutor:
    """Runs each stage in its own thread, with room for one batch between two stages.

    Args:
        stages: Names and functions, in order. The first gets an empty iterator.
        on_wait: Called when a stage has waited for another.
    """

    def __init__(self, stages: list[Stage], on_wait: OnWait) -> None:
        self._on_wait = on_wait
        self._channels = [_Channel() for _ in range(len(stages) + 1)]
        self._channels[0].put(_END)
        self._names = [name for name, _ in stages]
        self._threads = [
            threading.Thread(
                target=self._work, args=(number, function), name=f"scratchpipe-{name}", daemon=True
            )
            for number, (name, function) in enumerate(stages)
        ]
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[Any]:
        return self._received(len(self._names), "train")

    def stop(self) -> None:
        """Wake all threads, to end."""
        for channel in self._channels:
            channel.close()

    def join(self) -> None:
        """Wait for their end."""
        for thread in self._threads:
            # The source may be waiting for something that never comes; it does no harm.
            if thread is not threading.current_thread():
                thread.join(timeout=_JOIN_SECONDS if thread is self._threads[0] else None)

    def _work(self, number: int, function: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
        name, outbox = self._names[number], self._channels[number + 1]
        try:
            try:
                for item in function(self._received(number, name)):
                    started = time.perf_counter()
                    outbox.put(item)
                    self._waited(name, number + 1, time.perf_counter() - started)
                outbox.put(_END)
            except _Closed:
                raise
            except BaseException as error:
                outbox.put(_Failure(error))
        except _Closed:
            pass

    def _received(self, number: int, name: str) -> Iterator[Any]:
        """What comes in at a stage, or at the end of all stages."""
        while True:
            started = time.perf_counter()
            try:
                item = self._channels[number].get()
            except _Closed:
                if number < len(self._names):
                    raise
                return
            self._waited(name, number - 1, time.perf_counter() - started)
            if item is _END:
                return
            if isinstance(item, _Failure):
                raise item.error
            yield item

    def _waited(self, name: str, other: int, seconds: float) -> None:
        if 0 <= other <= len(self._names):
            self._on_wait(name, [*self._names, "train"][other], seconds)


_JOIN_SECONDS = 5.0
_END = object()


class _Closed(Exception):  # noqa: N818
    """The channel is closed."""


class _Failure:
    """An error on its way to the consumer."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Channel:
    """A queue with room for one item that can be closed from either side."""

    def __init__(self) -> None:
        self._items: collections.deque[Any] = collections.deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, item: Any) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._items)
            if self._closed:
                raise _Closed
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._items)
            if self._closed:
                raise _Closed
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


EXECUTORS: dict[str, type[InlineExecutor] | type[ThreadExecutor]] = {
    "inline": InlineExecutor,
    "thread": ThreadExecutor,
}
