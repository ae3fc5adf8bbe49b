"""How Keras and custom training loops call us: the loss first, then, in the same graph, its
gradients.

`scale_loss` is called inside the tape, `apply` after it. Between the two the gradients are taken.
When `apply` is called the graph holds the whole step, so that is where it is planned and rewritten;
`scale_loss` only notes which tensor the loss is.
"""

import contextlib
import logging
import traceback
import warnings
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import tensorflow as tf

from tf_echo import passes, tracing
from tf_echo.exclusion import UnmatchedPatternError
from tf_echo.plan import RecomputePlan
from tf_echo.rewriter import PlanMismatchError

_logger = logging.getLogger(__name__)


class EchoWarning(UserWarning):
    """Training goes on, but without a plan."""


class StepPlanner:
    """Plans every step that an optimizer is traced in.

    Args:
        settings: what the user wants.
    """

    def __init__(self, settings: passes.Settings):
        self.settings = settings
        self.plans: list[Future[RecomputePlan]] = []
        self._losses: weakref.WeakKeyDictionary[tf.Graph, list[str]] = weakref.WeakKeyDictionary()
        self._planned: weakref.WeakSet[tf.Graph] = weakref.WeakSet()
        self._warned: set[str] = set()
        self._dry: list[Future[RecomputePlan]] | None = None

    # AutoGraph would convert all of this package when a user's function is traced.
    @tf.autograph.experimental.do_not_convert
    def note_loss(self, loss: Any) -> None:
        """Notes a loss that is about to be differentiated; numbers and eager tensors are not."""
        if tf.is_symbolic_tensor(loss):
            self._losses.setdefault(loss.graph, []).append(loss.name)
            self._planned.discard(loss.graph)

    @tf.autograph.experimental.do_not_convert
    def step_applied(self, gradients: Sequence[object]) -> None:
        """Plans and rewrites the graph that holds the gradients, after the optimizer has added its
        updates.
        """
        if tf.executing_eagerly():
            self._warn_once(
                "The step runs eagerly, so nothing is recomputed. Compile the model with "
                "`run_eagerly=False`, "
                "or put the step in a `tf.function`."
            )
            return
        tensors = tracing.flat_gradients(gradients)
        names = self._losses.pop(tensors[0].graph, []) if tensors else []
        if not tensors:
            return
        graph = tensors[0].graph
        losses = [graph.get_tensor_by_name(name) for name in names]
        losses = [loss for loss in losses if tracing.depends_on_variables(loss)]
        if losses:
            self._plan(losses, tensors)
            self._planned.add(graph)
        elif not (graph in self._planned and _is_one_of_many_replicas()):
            self._warn_once(
                "The optimizer was not told the loss, so nothing is recomputed. In a custom "
                "training loop call "
                "`loss = optimizer.scale_loss(loss)` inside the gradient tape."
            )

    @contextlib.contextmanager
    def dry_run(self) -> Iterator[list[Future[RecomputePlan]]]:
        """Within it plans are collected in the list that it gives instead of being remembered."""
        collected: list[Future[RecomputePlan]] = []
        self._dry = collected
        try:
            yield collected
        finally:
            self._dry = None

    def _plan(self, losses: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor]) -> None:
        try:
            trace, plan = passes.plan_step(losses, gradients, self.settings)
        except (UnmatchedPatternError, PlanMismatchError):
            raise
        except Exception:
            self._warn_once(
                "This step could not be planned, so nothing is recomputed; training goes on. "
                "Please report this:\n" + traceback.format_exc()
            )
            return
        planned = passes.carry_out(trace, plan)
        (self.plans if self._dry is None else self._dry).append(planned)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(f"EchoOptimizer: {message}", EchoWarning, stacklevel=4)


def _is_one_of_many_replicas() -> bool:
    """Whether others apply the same step: replicas are traced in one graph, which the first plans
    for all.
    """
    context = tf.distribute.get_replica_context()
    return context is not None and context.num_replicas_in_sync > 1
