"""Embedding tables larger than the GPU, trained as fast as if they fitted.

A Keras embedding layer whose table lives in host memory and whose rows are cached on the device.
The input pipeline looks a few batches ahead and brings the rows that a batch needs before its step
begins, so every training lookup finds its row on the device, and training gives exactly the result
of an uncached table. The method is that of ScratchPipe (Kwon and Rhu, "Training Personalized
Recommendation Systems from (GPU) Scratch", ISCA 2022).

```python
items = tf_scratchpipe.ScratchPipeEmbedding(10_000_000, 64, num_slots=200_000, name="items")
...                                                      # any Keras model
train = train.apply(tf_scratchpipe.lookahead(model))     # last, but for `prefetch`
model.fit(train, validation_data=plain_validation_data)
```
"""

from tf_scratchpipe.counting import count_ids
from tf_scratchpipe.embedding import ScratchPipeEmbedding
from tf_scratchpipe.errors import (
    AbandonedError,
    BadIdError,
    StallError,
    TooFewSlotsError,
)
from tf_scratchpipe.invariants import HazardError
from tf_scratchpipe.lookahead import lookahead
from tf_scratchpipe.monitor import CacheMonitor
from tf_scratchpipe.resume import ResumeTraining
from tf_scratchpipe.rowwise_adagrad import RowwiseAdagrad
from tf_scratchpipe.stats import CacheStats

__all__ = [
    "AbandonedError",
    "BadIdError",
    "CacheMonitor",
    "CacheStats",
    "HazardError",
    "ResumeTraining",
    "RowwiseAdagrad",
    "ScratchPipeEmbedding",
    "StallError",
    "TooFewSlotsError",
    "count_ids",
    "lookahead",
]
