"""A callback that shows what the caches do while a model trains."""

from typing import Any, Literal

import keras

from tf_scratchpipe import keras_internals
from tf_scratchpipe.embedding import ScratchPipeEmbedding
from tf_scratchpipe.engine import CACHED_MODES
from tf_scratchpipe.errors import check_frequency
from tf_scratchpipe.planner import STAGES
from tf_scratchpipe.stats import CacheStats


class CacheMonitor(keras.callbacks.Callback):
    """Adds what the caches of a model's ScratchPipeEmbedding layers did to `logs`.

    So the progress bar, the history that `fit` returns, `CSVLogger` and `TensorBoard` show it,
    callbacks that come after this one in `callbacks`:

    ```python
    model.fit(train, callbacks=[tf_scratchpipe.CacheMonitor(), keras.callbacks.CSVLogger("log")])
    ```

    Numbers are those of the epoch, over all layers:

    - `cache_hit_rate`: lookups whose row was in a slot, or on its way there, when their batch was
      planned, per lookup;
    - `cache_fills`, `cache_evictions`: rows that came to the device, and that went back;
    - `cache_held`, `cache_slots`: slots that the window holds now, and all of them;
    - `stall_train_seconds`: for how long training waited for rows; `stall_plan_seconds` and the
      like: for how long that stage of the pipeline waited for others, which is what a stage does
      that is faster than training.

    Args:
        update_freq: `"epoch"` adds them at the end of each epoch. A number adds them after as many
            batches too; then Keras waits for each step before it starts the next.
        per_layer: Whether to add the first five for each layer also, as
            `<name of the layer>_hit_rate` and so on. Layers that read the same feature share their
            slots and have the same numbers.
    """

    def __init__(self, update_freq: int | Literal["epoch"] = "epoch", per_layer: bool = False):
        super().__init__()
        check_frequency("update_freq", update_freq)
        self.update_freq = update_freq
        self.per_layer = bool(per_layer)
        # Keras need not wait for steps whose logs nobody changes.
        self.async_safe = update_freq == "epoch"
        self._layers: list[ScratchPipeEmbedding] = []
        self._before: dict[str, CacheStats] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        """Find the layers."""
        self._layers = [
            layer
            for layer in keras_internals.sublayers(self.model)
            if isinstance(layer, ScratchPipeEmbedding) and layer.mode in CACHED_MODES
        ]
        if not self._layers:
            raise ValueError(
                f"Model '{self.model.name}' has no ScratchPipeEmbedding layer with a cache for "
                "CacheMonitor to show. Leave it out of `callbacks`."
            )
        self._before = {}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember the numbers from which the epoch counts."""
        self._before = self._stats()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the numbers of the epoch so far."""
        if self.update_freq != "epoch" and logs is not None and not (batch + 1) % self.update_freq:
            logs.update(self._numbers())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the numbers of the epoch."""
        if logs is not None:
            logs.update(self._numbers())

    def _stats(self) -> dict[str, CacheStats]:
        return {layer.path: layer.stats() for layer in self._layers}

    def _numbers(self) -> dict[str, float]:
        now = self._stats()
        zero = CacheStats()
        changes = {
            layer.path: now[layer.path].since(self._before.get(layer.path, zero))
            for layer in self._layers
        }
        # Layers of one group have its numbers each.
        groups = {id(layer.engine.group): changes[layer.path] for layer in self._layers}
        numbers = _named("cache", list(groups.values())) | _stalls(list(groups.values()))
        if self.per_layer:
            for layer in self._layers:
                numbers |= _named(layer.name, [changes[layer.path]])
        return numbers


def _named(prefix: str, stats: list[CacheStats]) -> dict[str, float]:
    lookups = sum(one.lookups for one in stats)
    return {
        f"{prefix}_hit_rate": sum(one.hits for one in stats) / lookups if lookups else 0.0,
        f"{prefix}_fills": float(sum(one.fills for one in stats)),
        f"{prefix}_evictions": float(sum(one.evictions for one in stats)),
        f"{prefix}_held": float(sum(one.held for one in stats)),
        f"{prefix}_slots": float(sum(one.slots for one in stats)),
    }


def _stalls(stats: list[CacheStats]) -> dict[str, float]:
    """Layers of one dataset have the same seconds."""
    return {
        f"stall_{stage}_seconds": max(
            sum(s for (waiting, _), s in one.wait_seconds.items() if waiting == stage)
            for one in stats
        )
        for stage in STAGES
    }
