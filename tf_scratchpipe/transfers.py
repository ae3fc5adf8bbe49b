"""Rows on their way between host and device."""

import dataclasses
import math
import threading
from typing import Any

import numpy as np

from tf_scratchpipe.plan import BatchPlan, Rows


@dataclasses.dataclass(slots=True)
class Transfer:
    """The rows of one batch on their way, for each table and each of its variables."""

    plan: BatchPlan
    version: int = -1
    fills: list[list[Any]] = dataclasses.field(default_factory=list)
    victims: list[list[Any]] = dataclasses.field(default_factory=list)
    buffers: list[Rows] = dataclasses.field(default_factory=list)


class StagingBuffers:
    """Host arrays that rows pass through, used again and again."""

    def __init__(self) -> None:
        self._free: list[Rows] = []
        self._lock = threading.Lock()

    def take(self, rows: int, dim: int, dtype: str) -> Rows:
        """An array of at least that many rows."""
        with self._lock:
            for i, buffer in enumerate(self._free):
                fits = buffer.shape[0] >= rows and buffer.shape[1] == dim and buffer.dtype == dtype
                if fits:
                    return self._free.pop(i)
        return np.empty((2 ** math.ceil(math.log2(max(rows, 16))), dim), dtype)

    def give_back(self, buffers: list[Rows]) -> None:
        """These may be used again."""
        with self._lock:
            # Smaller ones than these will not be asked for often.
            self._free = sorted([*buffers, *self._free], key=len, reverse=True)[:32]
