"""How a slot travels in the place of an id.

A planned batch carries slots where its ids were: same key, shape and dtype. A slot is coded far
below every id that a user could mean, so that a layer tells planned from plain ids, and a stray -1
stays an error. The code also carries the batch's number, modulo a power of two, so that a batch
that comes out of order or twice is noticed.
"""

import dataclasses

import numpy as np

from tf_scratchpipe.plan import Ints

LOWEST = -(2**31)
"""The smallest code; all codes fit int32."""

HIGHEST = -(2**30)
"""What is not below this is a plain id, right or wrong."""

_BITS = 30
_FEWEST_BATCH_BITS = 4  # One of them may be needed to mark zeros.
MAX_SLOTS = 1 << (_BITS - _FEWEST_BATCH_BITS)
"""More slots than this would leave too few batch numbers."""


@dataclasses.dataclass(frozen=True, slots=True)
class SlotCodec:
    """Codes of the slots of one table.

    Example:

    ```python
    codec = SlotCodec.for_slots(1000)
    codes = codec.encode(ids, slots, batch=7)
    ```
    """

    slot_bits: int
    marks_zero: bool = False
    """Whether one more bit says that the id was 0, for layers with `mask_zero=True`."""

    @classmethod
    def for_slots(cls, slots: int, marks_zero: bool = False) -> "SlotCodec":
        """The codec for slots `0 ... slots - 1`."""
        return cls(max(slots - 1, 1).bit_length(), marks_zero)

    @property
    def cycle(self) -> int:
        """Batch numbers are told apart modulo this."""
        return int(2 ** (_BITS - self.batch_shift))

    @property
    def batch_shift(self) -> int:
        """The lowest bit of a code, less `LOWEST`, that holds the batch's number."""
        return self.slot_bits + self.marks_zero

    @property
    def slot_mask(self) -> int:
        """The bits of a code, less `LOWEST`, that hold the slot."""
        return int(2**self.slot_bits - 1)

    def encode(self, ids: Ints, slots: Ints, batch: int) -> Ints:
        """Codes of the `slots` of `ids` in batch number `batch`."""
        codes = slots + (LOWEST + ((batch % self.cycle) << self.batch_shift))
        return codes + ((ids == 0).astype(np.int64) << self.slot_bits) if self.marks_zero else codes
