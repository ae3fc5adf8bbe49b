"""What would be recomputed, without training: the step is traced, planned and thrown away."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_echo import passes, tracing
from tf_echo.cost_model import CostModel
from tf_echo.optimizer import EchoOptimizer
from tf_echo.plan import RecomputePlan


def explain(
    target: keras.Model | Callable[..., tf.Tensor],
    *args: Any,
    policy: str | None = None,
    nominal_batch_size: int | None = None,
    cost_model: CostModel | None = None,
    exclude: Sequence[str] | None = None,
    include: Sequence[str] | None = None,
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
        policy: see `EchoOptimizer`; by default that of the model's `EchoOptimizer`, else `"echo"`.
        nominal_batch_size: see `EchoOptimizer`.
        cost_model: see `EchoOptimizer`.
        exclude: see `EchoOptimizer`; by default that of the model's `EchoOptimizer`, if any.
        include: the same.

    Returns:
        The plan. `tf_echo.report` makes a table of it.

    Raises:
        ValueError: the model is not compiled or not built, or the loss depends on no variable.
        TypeError: `target` is neither a model nor a function.
    """
    given: dict[str, Any] = {
        "policy": policy,
        "nominal_batch_size": nominal_batch_size,
        "cost_model": cost_model,
        "exclude": exclude,
        "include": include,
    }
    told = {name: value for name, value in given.items() if value is not None}
    if isinstance(target, keras.Model):
        return _explain_model(target, args, told)
    if callable(target):
        return _explain_function(target, args, EchoOptimizer("sgd", **told)._steps.settings)
    raise TypeError(
        "`target` must be a compiled Keras model or a function that returns a loss. Received: "
        f"{target!r}"
    )


def _explain_model(
    model: keras.Model, args: tuple[Any, ...], told: dict[str, Any]
) -> RecomputePlan:
    check_model(model, "explained")
    settings = probe_settings(model.optimizer)
    if told.keys() & {"policy", "exclude", "include"}:
        settings.pop("plan", None)
    probe = EchoOptimizer(**{**settings, **told})
    if not probe.built:
        probe.build(model.trainable_variables)
    with trained_by(model, probe), probe._steps.dry_run() as plans:
        compiled = bool(model.jit_compile)
        step = tf.function(model.train_step, autograph=False, jit_compile=compiled)
        step.get_concrete_function(_data_spec(args))
    return plans[-1].result()


@contextlib.contextmanager
def trained_by(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Lets a model have another optimizer for a while."""
    own, model.optimizer = model.optimizer, optimizer
    try:
        yield
    finally:
        model.optimizer = own


def check_model(model: keras.Model, purpose: str) -> None:
    """Raises ValueError for a model whose train step cannot be traced yet."""
    if not model.compiled or model.optimizer is None:
        raise ValueError(
            f"The model must be compiled with an optimizer before it can be {purpose}."
        )
    if not model.built:
        raise ValueError(f"The model must be built before it can be {purpose}: call it on a batch.")


def probe_settings(own: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Arguments of an `EchoOptimizer` that plans for `own`, and as `own` if that is one; around a
    copy of it if it has no variables yet.
    """
    inner = own._wrapped if isinstance(own, EchoOptimizer) else own
    if not inner.built:
        inner = type(inner).from_config(inner.get_config())
    found = {"inner_optimizer": inner, "loss_scale": None}
    if isinstance(own, EchoOptimizer):
        settings = own._steps.settings
        found |= {
            "policy": settings.policy,
            "nominal_batch_size": settings.batch_size,
            "cost_model": settings.cost_model,
            "exclude": settings.exclude,
            "include": settings.include,
            "plan": settings.plan,
            "without": settings.without,
        }
    return found


def _explain_function(
    function: Callable[..., tf.Tensor],
    args: tuple[Any, ...],
    settings: passes.Settings,
) -> RecomputePlan:
    plans: list[Future[RecomputePlan]] = []

    def step(*inputs: Any) -> tf.Tensor:
        loss, _, gradients = differentiate(function, inputs)
        trace, plan = passes.plan_step([loss], tracing.flat_gradients(gradients), settings)
        plans.append(passes.carry_out(trace, plan))
        return loss

    specs = tf.nest.map_structure(batch_spec, args)
    tf.function(step, autograph=False).get_concrete_function(*specs)
    return plans[-1].result()


def differentiate(
    function: Callable[..., tf.Tensor], inputs: Sequence[Any]
) -> tuple[tf.Tensor, Sequence[tf.Variable], Sequence[Any]]:
    """The loss that a function returns, the variables it reads, and their gradients."""
    with tf.GradientTape() as tape:
        loss = function(*inputs)
    variables = tape.watched_variables()
    gradients = tape.gradient(loss, variables)
    if not tracing.flat_gradients(gradients):
        raise ValueError("The loss that the function returns must depend on a variable.")
    return loss, variables, gradients


def _data_spec(args: tuple[Any, ...]) -> Any:
    if len(args) == 1 and isinstance(args[0], tf.data.Dataset):
        return args[0].element_spec
    specs = tuple(tf.nest.map_structure(batch_spec, arg) for arg in args)
    return specs if len(specs) > 1 else specs[0]


def batch_spec(value: Any) -> Any:
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
