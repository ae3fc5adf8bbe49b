"""What would be recomputed, without training: the step is traced, planned and thrown away."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_echo import passes, tracing
from tf_echo.cost_model import CostModel, RooflineCost
from tf_echo.optimizer import EchoOptimizer
from tf_echo.plan import RecomputePlan


def explain(
    target: keras.Model | Callable[..., tf.Tensor],
    *args: Any,
    policy: str | None = None,
    nominal_batch_size: int | None = None,
    cost_model: CostModel | None = None,
    exclude: Sequence[str] | None = None,
) -> RecomputePlan:
    """Plans the train step of a model, or the gradient of a loss function, and changes nothing.

    Example:

    ```python
    print(tf_echo.report(tf_echo.explain(model, x_batch, y_batch)))
    plan = tf_echo.explain(lambda x: tf.reduce_mean(network(x) ** 2), x)
    ```

    Args:
        target: a compiled and built Keras model, whose optimizer need not be an `EchoOptimizer`; or
            a function of tensors that returns a scalar loss.
        *args: for a model one batch `x, y, sample_weight`, as for `train_on_batch`, or a
            `tf.data.Dataset` of batches; for a function its arguments. Only shapes and dtypes
            matter.
        policy: `"echo"` or `"none"`; by default that of the model's `EchoOptimizer`, else `"echo"`.
        nominal_batch_size: see `EchoOptimizer`.
        cost_model: see `EchoOptimizer`.
        exclude: see `EchoOptimizer`; by default that of the model's `EchoOptimizer`, if any.

    Returns:
        The plan. `tf_echo.report` makes a table of it.

    Raises:
        ValueError: the model is not compiled or not built, or the loss depends on no variable.
        TypeError: `target` is neither a model nor a function.
    """
    if isinstance(target, keras.Model):
        return _explain_model(target, args, policy, nominal_batch_size, cost_model, exclude)
    if callable(target):
        return _explain_function(target, args, policy, nominal_batch_size, cost_model, exclude)
    raise TypeError(
        "`target` must be a compiled Keras model or a function that returns a loss. Received: "
        f"{target!r}"
    )


def _explain_model(
    model: keras.Model,
    args: tuple[Any, ...],
    policy: str | None,
    nominal_batch_size: int | None,
    cost_model: CostModel | None,
    exclude: Sequence[str] | None,
) -> RecomputePlan:
    if not model.compiled or model.optimizer is None:
        raise ValueError("The model must be compiled with an optimizer before it can be explained.")
    if not model.built:
        raise ValueError("The model must be built before it can be explained: call it on a batch.")
    own = model.optimizer
    probe = _probe(own, policy, nominal_batch_size, cost_model, exclude)
    if not probe.built:
        probe.build(model.trainable_variables)
    model.optimizer = probe
    try:
        with probe._steps.dry_run() as plans:
            step = tf.function(model.train_step, autograph=False)
            step.get_concrete_function(_data_spec(args))
    finally:
        model.optimizer = own
    return plans[-1]


def _probe(
    own: keras.optimizers.Optimizer,
    policy: str | None,
    nominal_batch_size: int | None,
    cost_model: CostModel | None,
    exclude: Sequence[str] | None,
) -> EchoOptimizer:
    """An optimizer that plans for `own`; if `own` has no variables yet, for a copy of it."""
    if isinstance(own, EchoOptimizer):
        config, inner = own.get_config(), own._wrapped
        policy = policy or config["policy"]
        nominal_batch_size = nominal_batch_size or config["nominal_batch_size"]
        cost_model = cost_model or own._steps.cost_model
        exclude = own._steps.exclude if exclude is None else exclude
    else:
        inner = own
    if not inner.built:
        inner = type(inner).from_config(inner.get_config())
    return EchoOptimizer(
        inner,
        policy=policy or "echo",
        loss_scale=None,
        nominal_batch_size=nominal_batch_size,
        cost_model=cost_model,
        exclude=exclude or (),
    )


def _explain_function(
    function: Callable[..., tf.Tensor],
    args: tuple[Any, ...],
    policy: str | None,
    nominal_batch_size: int | None,
    cost_model: CostModel | None,
    exclude: Sequence[str] | None,
) -> RecomputePlan:
    plans: list[RecomputePlan] = []

    def step(*inputs: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = function(*inputs)
        variables = tape.watched_variables()
        gradients = tracing.flat_gradients(tape.gradient(loss, variables))
        if not gradients:
            raise ValueError("The loss that the function returns must depend on a variable.")
        _, plan = passes.plan_step(
            [loss],
            gradients,
            policy or "echo",
            cost_model or RooflineCost(),
            nominal_batch_size,
            exclude or (),
        )
        plans.append(plan)
        return loss

    specs = tf.nest.map_structure(_spec, args)
    tf.function(step, autograph=False).get_concrete_function(*specs)
    return plans[-1]


def _data_spec(args: tuple[Any, ...]) -> Any:
    if len(args) == 1 and isinstance(args[0], tf.data.Dataset):
        return args[0].element_spec
    specs = tuple(tf.nest.map_structure(_spec, arg) for arg in args)
    return specs if len(specs) > 1 else specs[0]


def _spec(value: Any) -> Any:
    """The spec of a batch as Keras would feed it."""
    if (
        isinstance(value, (tf.TensorSpec, tf.SparseTensorSpec, tf.RaggedTensorSpec))
        or value is None
    ):
        return value
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        return tf.type_spec_from_value(value)
    dtype = tf.as_dtype(value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype)
    if dtype.is_floating:
        dtype = tf.as_dtype(keras.config.floatx())
    return tf.TensorSpec(np.shape(value), dtype)
