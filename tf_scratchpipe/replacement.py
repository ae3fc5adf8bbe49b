"""Which of the slots that may be taken is taken first (ScratchPipe, section VI-E).

LRU is the paper's default; LFU and random are the others that it tries. All are exact, and none
looks at every slot in a step as a rule: a policy keeps lists of slots as they were used and sorts
out what has changed since when it comes to them. Over time each entry is looked at about once.
Random looks at all slots where hardly any of them may go.
"""

import abc
import collections
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tf_scratchpipe.plan import Ints

Held: TypeAlias = Callable[[Ints], npt.NDArray[np.bool_]]
"""From slots to a mask: these must not be taken."""

_GONE = np.iinfo(np.int32).min


class Replacement(abc.ABC):
    """Chooses victims among the occupied slots.

    Args:
        slots: Number of slots, all of them empty.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots

    @abc.abstractmethod
    def use(self, slots: Ints, batch: int) -> None:
        """A batch finds its rows in these occupied slots, each named once."""

    @abc.abstractmethod
    def fill(self, slots: Ints, batch: int) -> None:
        """A batch puts new rows into these slots."""

    @abc.abstractmethod
    def empty(self, slots: Ints) -> None:
        """These slots hold nothing any more."""

    @abc.abstractmethod
    def victims(self, count: int, held: Held) -> Ints:
        """Take up to `count` slots that are not held, the best first; fewer if there are no more.

        They are out of the policy's sight until they are filled or given back.
        """

    @abc.abstractmethod
    def give_back(self, slots: Ints, batch: int) -> None:
        """These victims were not needed after all."""

    def grow(self, slots: int) -> None:
        """Add empty slots, up to `slots` in all."""
        self._slots = slots


class LRU(Replacement):
    """The slot goes whose last batch is the longest ago."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._last = np.full(slots, _GONE, np.int32)
        # An entry counts if its batch is still the last one of its slot.
        self._log: collections.deque[tuple[int, Ints]] = collections.deque()
        self._logged = 0

    def use(self, slots: Ints, batch: int) -> None:  # noqa: D102
        if not slots.size:
            return
        self._last[slots] = batch
        self._log.append((batch, slots))
        self._logged += slots.size
        if self._logged > 4 * self._slots + 1024:
            self._compact()

    def fill(self, slots: Ints, batch: int) -> None:  # noqa: D102
        self.use(slots, batch)

    def empty(self, slots: Ints) -> None:  # noqa: D102
        self._last[slots] = _GONE

    def victims(self, count: int, held: Held) -> Ints:  # noqa: D102
        taken, passed = [], []
        while count > 0 and self._log:
            batch, slots = self._log.popleft()
            self._logged -= slots.size
            slots = np.compress(self._last[slots] == batch, slots)
            goes = _first(~held(slots), count)
            taken.append(np.compress(goes, slots))
            count -= taken[-1].size
            if taken[-1].size < slots.size:
                passed.append((batch, np.compress(~goes, slots)))
        for entry in reversed(passed):
            self._log.appendleft(entry)
            self._logged += entry[1].size
        return _joined(taken)

    def give_back(self, slots: Ints, batch: int) -> None:  # noqa: D102
        # A number of their own, so that no later entry of one of these slots counts twice.
        before = (self._log[0][0] if self._log else batch) - 1
        self._last[slots] = before
        self._log.appendleft((before, slots))
        self._logged += slots.size

    def grow(self, slots: int) -> None:  # noqa: D102
        super().grow(slots)
        added = np.full(slots - self._last.size, _GONE, np.int32)
        self._last = np.concatenate([self._last, added])

    def _compact(self) -> None:
        entries = [(batch, slots[self._last[slots] == batch]) for batch, slots in self._log]
        self._log = collections.deque(entry for entry in entries if entry[1].size)
        self._logged = sum(slots.size for _, slots in self._log)


class LFU(Replacement):
    """The slot goes that the fewest batches used since it was filled; of equal ones, the first in
    line.

    Slots wait in one line for each count. A use only counts; a slot changes lines when a search for
    victims comes to it.
    """

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._count: Ints = np.zeros(slots, np.int64)
        self._lines: dict[int, list[Ints]] = {}

    def use(self, slots: Ints, batch: int) -> None:  # noqa: D102
        self._count[slots] += 1

    def fill(self, slots: Ints, batch: int) -> None:  # noqa: D102
        self._count[slots] = 1
        self._queue(1, slots)

    def empty(self, slots: Ints) -> None:  # noqa: D102
        gone = np.zeros(self._slots, bool)
        gone[slots] = True
        for line, parts in self._lines.items():
            self._lines[line] = [part[~gone[part]] for part in parts]

    def victims(self, count: int, held: Held) -> Ints:  # noqa: D102
        taken = []
        line = 0
        while count > 0 and (later := [other for other in self._lines if other > line]):
            line = min(later)
            slots = self._still_in(line)
            goes = _first(~held(slots), count)
            taken.append(slots[goes])
            count -= taken[-1].size
            self._queue(line, slots[~goes])
        return _joined(taken)

    def give_back(self, slots: Ints, batch: int) -> None:  # noqa: D102
        self._queue(1, slots)

    def grow(self, slots: int) -> None:  # noqa: D102
        super().grow(slots)
        self._count = np.concatenate([self._count, np.zeros(slots - self._count.size, np.int64)])

    def _queue(self, line: int, slots: Ints) -> None:
        if slots.size:
            self._lines.setdefault(line, []).append(slots)

    def _still_in(self, line: int) -> Ints:
        """Take a line down; send those on whose count has risen, return the others."""
        slots = _joined(self._lines.pop(line))
        counts = self._count[slots]
        risen = counts > line
        order = np.argsort(counts[risen], kind="stable")
        movers, targets = slots[risen][order], counts[risen][order]
        starts = np.flatnonzero(np.diff(targets, prepend=line))
        for part, target in zip(np.split(movers, starts[1:]), targets[starts], strict=False):
            self._queue(int(target), part)
        return slots[~risen]


class Random(Replacement):
    """Any slot that may go, each with the same chance.

    Args:
        slots: Number of slots.
        seed: Seed of the draw.
    """

    _ROUNDS = 8

    def __init__(self, slots: int, seed: int = 0) -> None:
        super().__init__(slots)
        self._occupied = np.zeros(slots, bool)
        self._generator = np.random.default_rng(seed)

    def use(self, slots: Ints, batch: int) -> None:  # noqa: D102
        pass

    def fill(self, slots: Ints, batch: int) -> None:  # noqa: D102
        self._occupied[slots] = True

    def empty(self, slots: Ints) -> None:  # noqa: D102
        self._occupied[slots] = False

    def victims(self, count: int, held: Held) -> Ints:  # noqa: D102
        taken = []
        for _ in range(self._ROUNDS):
            if count <= 0:
                break
            drawn = self._generator.integers(self._slots, size=2 * count + 16)
            _, first = np.unique(drawn, return_index=True)
            drawn = drawn[np.sort(first)]
            taken.append(self._take(drawn[self._occupied[drawn]], count, held))
            count -= taken[-1].size
        if count > 0:  # Few may go: look at all.
            everyone = self._generator.permutation(np.flatnonzero(self._occupied))
            taken.append(self._take(everyone, count, held))
        return _joined(taken)

    def give_back(self, slots: Ints, batch: int) -> None:  # noqa: D102
        self._occupied[slots] = True

    def grow(self, slots: int) -> None:  # noqa: D102
        super().grow(slots)
        added = np.zeros(slots - self._occupied.size, bool)
        self._occupied = np.concatenate([self._occupied, added])

    def _take(self, slots: Ints, count: int, held: Held) -> Ints:
        victims = slots[~held(slots)][:count]
        self._occupied[victims] = False
        return victims


POLICIES: dict[str, type[Replacement]] = {"lru": LRU, "lfu": LFU, "random": Random}


def _first(mask: npt.NDArray[np.bool_], count: int) -> npt.NDArray[np.bool_]:
    """The mask with its first `count` marks only."""
    if np.count_nonzero(mask) > count:
        mask[np.flatnonzero(mask)[count:]] = False
    return mask


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
