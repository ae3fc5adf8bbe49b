"""What a step asks TensorFlow's allocator for, as the profiler saw it.

The allocator hands out chunks, up to twice as large as what is asked for, and counts them whole; a
prediction can only be of what is asked for.
"""

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

_Event = tuple[bool, dict[str, Any]]
"""Whether it allocates, and what it says."""


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
        before = tf.config.experimental.get_memory_info(device)["current"]
        events: list[_Event] = []
        with self._profiled(events):
            yield
        live: dict[Any, int] = {}
        current = highest = 0
        for allocates, found in events:
            if allocates:
                live[found["addr"]] = found["requested_bytes"]
                current += found["requested_bytes"]
            else:
                current -= live.pop(found["addr"], found["requested_bytes"])
            highest = max(highest, current)
        self.peak_bytes = before + highest

    def forget_surplus(self, variables: Iterable[Any]) -> None:
        """Takes off what was handed out for variables beyond what they had asked for.

        Each is written once more, so that what it held so far is given back.
        """
        events: list[_Event] = []
        with self._profiled(events):
            for variable in variables:
                variable.assign(variable.numpy())
        made = set()
        for allocates, found in events:
            if allocates:
                made.add(found["addr"])
            elif found["addr"] not in made:
                self.peak_bytes -= found["allocation_bytes"] - found["requested_bytes"]

    @contextlib.contextmanager
    def _profiled(self, events: "list[_Event]") -> Iterator[None]:
        """Notes what is allocated and given back meanwhile."""
        from tensorflow.tsl.profiler.protobuf import xplane_pb2  # public in no other way

        options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=2)
        with tempfile.TemporaryDirectory() as folder:
            tf.profiler.experimental.start(folder, options)
            try:
                yield
            finally:
                tf.profiler.experimental.stop()
            (profile,) = Path(folder).rglob("*.xplane.pb")
            space = xplane_pb2.XSpace.FromString(profile.read_bytes())
        found = sorted(
            (
                (line.timestamp_ns * 1000 + event.offset_ps, *_change(plane, event))
                for plane in space.planes
                for line in plane.lines
                for event in line.events
                if plane.event_metadata[event.metadata_id].name.startswith("Memory")
            ),
            key=lambda event: event[0],
        )
        events += [
            (allocates, change)
            for _, allocates, change in found
            if change["allocator_name"].startswith("GPU") is self._on_gpu
        ]


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
