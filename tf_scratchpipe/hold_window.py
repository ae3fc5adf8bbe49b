"""The Hold mask: slots that must not be taken yet (ScratchPipe, section IV-D).

The paper keeps one bit for each slot and batch of the window and shifts them every cycle. Here each
slot has the numbers of the last batch that used it and of the next one that will; the mask is
the comparison of both with the current batch, so nothing has to be shifted and a window may be
shortened at any time.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tf_scratchpipe.plan import Ints

NEVER = -1

Numbers: TypeAlias = npt.NDArray[np.int32]
"""Numbers of batches, one for each slot."""


class HoldWindow:
    """Which slots the batches around the current one use.

    Args:
        slots: Number of slots.
    """

    def __init__(self, slots: int) -> None:
        self.last_use: Numbers = np.full(slots, NEVER, np.int32)
        self._next_use: Numbers = np.full(slots, NEVER, np.int32)

    def use(self, slots: Ints, batch: int) -> None:
        """Batch number `batch`, the latest so far, uses `slots`."""
        self.last_use[slots] = batch

    def in_use(self, batch: int, past: int) -> int:
        """Number of slots that `batch` or the `past` batches before it use. Looks at every slot."""
        return int(np.count_nonzero(self.last_use >= max(batch - past, 1)))

    def foresee(self, batch: int, slots: Sequence[npt.NDArray[np.integer]]) -> None:
        """The batches after `batch` will use `slots[0]`, `slots[1]`, ..., in that order."""
        # From the last to the next, so that a slot keeps its next use.
        for distance, used in reversed(list(enumerate(slots, start=1))):
            self._next_use[used] = batch + distance

    def held(self, slots: Ints, batch: int, past: int, future: int) -> np.ndarray:
        """Mask over `slots`.

        Used by one of the `past` batches before, `batch`, or `future` after.
        """
        upcoming = self._next_use[slots]
        return (self.last_use[slots] >= batch - past) | (
            (upcoming > batch) & (upcoming <= batch + future)
        )

    def release(self, since: int, kept: Ints) -> None:
        """Batches from `since` on hold nothing any more but `kept`. Looks at every slot."""
        np.minimum(self.last_use, since - 1, out=self.last_use)
        self.last_use[kept] = since

    def forget(self, slots: Ints) -> None:
        """Nothing uses `slots`: they are empty."""
        self.last_use[slots] = NEVER

    def grow(self, slots: int) -> None:
        """Add unused slots, up to `slots` in all."""
        added = np.full(slots - self.last_use.size, NEVER, np.int32)
        self.last_use = np.concatenate([self.last_use, added])
        self._next_use = np.concatenate([self._next_use, added])
