"""What a layer has done so far, in numbers."""

import dataclasses

from tf_scratchpipe.plan import BatchPlan
from tf_scratchpipe.planner import STAGES


@dataclasses.dataclass(slots=True)
class CacheStats:
    """Counts since the layer was built, or shares its slots. Prints as text.

    Lookups count duplicates, fills and evictions count rows. Layers that share their slots share
    their counts, and all layers of a dataset share its seconds.
    """

    batches: int = 0
    """Batches planned."""
    lookups: int = 0
    hits: int = 0
    """Lookups whose row was in the cache, or on its way there, when the batch was planned."""
    misses: int = 0
    fills: int = 0
    """Rows brought in from the host table."""
    evictions: int = 0
    """Rows written back to it."""
    held: int = 0
    """Slots that the last planned batch and the batches before it in the window use."""
    slots: int = 0
    whole: bool = False
    """Whether every row has a slot for good, because the table is small enough."""
    shortened: int = 0
    """Batches for which slots were too few to hold the whole window."""
    bytes_to_device: int = 0
    bytes_to_host: int = 0
    train_lookups: int = 0
    """Lookups of training steps, as counted on the device."""
    train_hits: int = 0
    """Those that found their row in its slot."""
    stage_seconds: dict[str, float] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(STAGES[:-1], 0.0)
    )
    """Time spent in each stage, without waiting."""
    wait_seconds: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    """Who waited for whom: (waiting stage, stage that it waited for) -> seconds."""

    @property
    def hit_rate(self) -> float:
        """Hits at Plan, per lookup."""
        return self.hits / self.lookups if self.lookups else 0.0

    @property
    def train_hit_rate(self) -> float:
        """Hits at Train, per lookup."""
        return self.train_hits / self.train_lookups if self.train_lookups else 0.0

    def count(self, plan: BatchPlan, row_bytes: int, whole: tuple[int, int]) -> None:
        """Add one batch.

        Args:
            plan: Its plan.
            row_bytes: Bytes of a row with its optimizer slots.
            whole: Past and future of a window that is not shortened.
        """
        self.batches += 1
        self.lookups += plan.lookups
        self.hits += plan.hits
        self.misses += plan.lookups - plan.hits
        self.fills += plan.fill_ids.size
        self.evictions += plan.victim_ids.size
        self.slots = plan.capacity
        self.shortened += (plan.past, plan.future) != whole
        self.bytes_to_device += plan.fill_ids.size * row_bytes
        self.bytes_to_host += plan.victim_ids.size * row_bytes

    def since(self, before: "CacheStats") -> "CacheStats":
        """What came after `before`; `held` and `slots` as they are now."""
        counts = {
            field.name: getattr(self, field.name) - getattr(before, field.name)
            for field in dataclasses.fields(self)
            if field.type is int
        }
        counts |= {"held": self.held, "slots": self.slots, "whole": self.whole}
        waits, earlier = self.wait_seconds, before.wait_seconds
        return CacheStats(
            **counts,
            stage_seconds={k: s - before.stage_seconds[k] for k, s in self.stage_seconds.items()},
            wait_seconds={k: s - earlier.get(k, 0.0) for k, s in waits.items()},
        )

    def spent(self, stage: str, seconds: float) -> None:
        """Add time that a stage has worked."""
        self.stage_seconds[stage] += seconds

    def waited(self, waiting: str, awaited: str, seconds: float) -> None:
        """Add time that a stage has waited for another."""
        pair = (waiting, awaited)
        self.wait_seconds[pair] = self.wait_seconds.get(pair, 0.0) + seconds

    def _use(self) -> str:
        if self.whole:
            return "the whole table: pinned on the device"
        return f"of which held {self.held:,}; window shortened for {self.shortened:,} batches"

    def __str__(self) -> str:
        stages = ", ".join(f"{stage} {self.stage_seconds[stage]:.2f} s" for stage in STAGES[:-1])
        waits = ", ".join(f"{a} for {b} {s:.2f} s" for (a, b), s in self.wait_seconds.items())
        return "\n".join(
            [
                f"batches     {self.batches:,}",
                f"lookups     {self.lookups:,}",
                f"  at plan   {self.hits:,} hits ({self.hit_rate:.1%}), {self.misses:,} misses",
                f"  at train  {self.train_hits:,} hits ({self.train_hit_rate:.1%} of "
                f"{self.train_lookups:,})",
                f"rows        {self.fills:,} filled, {self.evictions:,} evicted",
                f"slots       {self.slots:,}, {self._use()}",
                f"transfers   {_mib(self.bytes_to_device)} to the device, "
                f"{_mib(self.bytes_to_host)} to the host",
                f"stages      {stages}",
                f"waited      {waits or 'nobody'}",
            ]
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
