"""What a step asks TensorFlow's allocator for, as the profiler saw it.

The allocator hands out chunks, up to twice as large as what is asked for, and counts them whole; a
prediction can only be of what is asked for.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf


class Requests:
    """The most bytes that are asked for at once while `recorded` is open.

    Args:
        on_gpu: whether the GPU's allocator is meant, or the CPU's.
    """

    def __init__(self, on_gpu: bool):
        self._on_gpu = on_gpu
        self.peak_bytes = 0

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Profiles what is done meanwhile."""
        device = "GPU:0" if self._on_gpu else "CPU:0"
        options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=2)
        with tempfile.TemporaryDirectory() as folder:
            before = tf.config.experimental.get_memory_info(device)["current"]
            tf.profiler.experimental.start(folder, options)
            try:
                yield
            finally:
                tf.profiler.experimental.stop()
            (profile,) = Path(folder).rglob("*.xplane.pb")
            self.peak_bytes = before + self._highest(profile.read_bytes())

    def _highest(self, profile: bytes) -> int:
        """The most that is asked for at once, less what was there in the beginning."""
        from tensorflow.tsl.profiler.protobuf import xplane_pb2  # public in no other way

        space = xplane_pb2.XSpace.FromString(profile)
        events = sorted(
            (
                (line.timestamp_ns * 1000 + event.offset_ps, *_change(plane, event))
                for plane in space.planes
                for line in plane.lines
                for event in line.events
                if plane.event_metadata[event.metadata_id].name.startswith("Memory")
            ),
            key=lambda event: event[0],
        )
        live: dict[Any, int] = {}
        current = highest = 0
        for _, allocates, found in events:
            if found["allocator_name"].startswith("GPU") != self._on_gpu:
                continue
            if allocates:
                live[found["addr"]] = found["requested_bytes"]
                current += found["requested_bytes"]
            else:
                current -= live.pop(found["addr"], found["requested_bytes"])
            highest = max(highest, current)
        return highest


def _change(plane: Any, event: Any) -> tuple[bool, dict[str, Any]]:
    """Whether an event allocates, and what it says."""
    found = {}
    for stat in event.stats:
        field = stat.WhichOneof("value")
        value = getattr(stat, field)
        if field == "ref_value":
            value = plane.stat_metadata[value].name
        found[plane.stat_metadata[stat.metadata_id].name] = value
    name = plane.event_metadata[event.metadata_id].name
    return name.startswith("MemoryAllocation"), found
