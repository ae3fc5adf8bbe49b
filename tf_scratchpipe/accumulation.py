"""Gradients of rows that wait for their step.

With `gradient_accumulation_steps=k` Keras adds the gradients of k steps up, divides the sum by k
and applies it in the k-th. A table's gradients wait here, as pairs of a row's place and its
gradient, so that they take memory for the rows that were looked up and not for the table. Each
step's are summed before they come, and added up in the order of the steps, as Keras does.

A row whose gradient waits must stay where it is. `settled` tells up to which batch no gradient
waits; the planner takes no slot that a later batch has used.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from tf_scratchpipe.plan import Ints, Rows
from tf_scratchpipe.storage import HOST_DEVICE

Move: TypeAlias = Callable[[tf.Tensor, tf.Tensor], list[tf.Operation]]
"""Moves the rows in some places, each named once, by their gradients."""


def coalesced(slots: tf.Tensor, gradients: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Each slot once, and the sum of its gradients."""
    with tf.device(HOST_DEVICE):  # Where slots come from; how many there are is needed there.
        distinct, position = tf.unique(slots)
    return distinct, tf.math.unsorted_segment_sum(gradients, position, tf.size(distinct))


class PendingGradients:
    """The gradients of one table that wait.

    Args:
        dim: Values in a row.
        dtype: Their dtype.
        device: Where gradients are.
    """

    def __init__(self, dim: int, dtype: str, device: str) -> None:
        self._device = device
        self._dim = dim
        self._dtype = dtype
        self.parked: tuple[Ints, Rows, int] | None = None
        """Ids, gradients and steps that wait while their rows have no places."""
        with tf.init_scope():
            with tf.device(HOST_DEVICE):
                self._places = tf.Variable(
                    tf.zeros((0,), tf.int64), shape=tf.TensorShape([None]), trainable=False
                )
                # How many of these wait. Nothing empties the variables: where a step assigns an
                # empty tensor, TensorFlow's graph optimizer takes them to be empty always.
                self._count = tf.Variable(0, dtype=tf.int32, trainable=False)
                self._steps = tf.Variable(0, dtype=tf.int64, trainable=False)
                self._since = tf.Variable(0, dtype=tf.int64, trainable=False)
            with tf.device(device):
                self._gradients = tf.Variable(
                    tf.zeros((0, dim), dtype), shape=tf.TensorShape([None, dim]), trainable=False
                )

    @property
    def steps(self) -> int:
        """How many steps' gradients wait."""
        return int(self._steps.numpy())

    @property
    def since(self) -> int:
        """Number of the first batch whose gradients wait, if any do."""
        return int(self._since.numpy())

    @property
    def places(self) -> Ints:
        """Places of the rows that wait, some more than once."""
        return np.asarray(self._places.numpy()[: int(self._count.numpy())], np.int64)

    @property
    def gradients(self) -> Rows:
        """A copy of their gradients, in the same order."""
        return np.asarray(self._gradients.numpy()[: int(self._count.numpy())])

    def settled(self, applied: tf.Variable) -> int:
        """Number of the last batch of which, and of those before it, no gradient waits.

        Args:
            applied: Number of the last batch that was trained.
        """
        done = int(applied.numpy())  # First: a step notes that its gradients wait, then counts.
        return min(done, self.since - 1) if self.steps else done

    def take(
        self,
        places: tf.Tensor,
        gradients: tf.Tensor,
        done: tf.Tensor,
        period: int,
        batch: tf.Tensor,
        move: Move,
        rest: Callable[[], list[tf.Operation]],
    ) -> tf.Tensor:
        """One step: add its gradients to those that wait, or apply all.

        Args:
            places: Places of rows, each once.
            gradients: Their summed gradients.
            done: Number of steps before this one.
            period: So many steps are applied together.
            batch: Number of the step's batch.
            move: Called to move the rows.
            rest: Called instead in a step that moves none.

        Returns:
            What is there when all this has happened.
        """
        # A pass begins, and rows that wait get places again, when its first batch is fetched.
        with tf.device(HOST_DEVICE), tf.control_dependencies([places]):
            phase = done % period
            # What waits when a period begins is of one that was broken off, as by a new optimizer.
            kept = tf.where(phase == 0, 0, self._count.read_value())
            last = phase == period - 1

        def together() -> tuple[tf.Tensor, tf.Tensor]:
            with tf.device(HOST_DEVICE):
                all_places = tf.concat([self._places.read_value()[:kept], places], axis=0)
            with tf.device(self._device):
                waiting = self._gradients.read_value()[:kept]
                return all_places, tf.concat([waiting, gradients], axis=0)

        def apply() -> tf.Tensor:
            with tf.device(self._device):
                distinct, summed = coalesced(*together())
                moved = move(distinct, summed / period)
            with tf.control_dependencies(moved):
                return self.drop()

        def wait() -> tf.Tensor:
            with tf.control_dependencies(rest()), tf.device(HOST_DEVICE):
                since = self._since.assign(tf.where(phase == 0, batch, self._since))
            with tf.control_dependencies([since]):
                return self._assigned(*together(), phase + 1)

        with tf.device(HOST_DEVICE):
            return tf.cond(last, apply, wait)

    def drop(self) -> tf.Tensor:
        """Forget what waits, in a step or outside. Returns what is there when it has happened."""
        with tf.device(HOST_DEVICE):
            done = [self._count.assign(0), self._steps.assign(0)]
            with tf.control_dependencies(done):
                return tf.constant(True)

    def forget(self) -> None:
        """The same outside of a step, also for rows without places."""
        self.parked = None
        if self.steps:
            self.drop()

    def held(self, places: Ints, gradients: Rows, steps: int, since: int) -> None:
        """Have these wait."""
        self._since.assign(since)
        self._assigned(tf.constant(places, tf.int64), tf.constant(gradients), steps)

    def renumber(self, since: int) -> None:
        """The first batch whose gradients wait has this number now."""
        self._since.assign(since)

    def park(self, ids: Ints) -> None:
        """Rows leave their places: what waits has these ids, in the order of `places`."""
        if self.steps:
            self.parked = ids, self.gradients, self.steps
            self.drop()

    def _assigned(self, places: tf.Tensor, gradients: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
        with tf.device(self._device):
            kept = self._gradients.assign(gradients)
        with tf.device(HOST_DEVICE):
            counted = self._count.assign(tf.size(places))
            with tf.control_dependencies([kept, self._places.assign(places), counted]):
                noted = self._steps.assign(steps)
            with tf.control_dependencies([noted]):
                return tf.constant(True)
