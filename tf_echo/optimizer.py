"""`EchoOptimizer`.

Any Keras optimizer, and the train step that it is compiled into needs less memory.
"""

import copy
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_echo import cost_model as costs
from tf_echo import passes, planner
from tf_echo.plan import RecomputePlan
from tf_echo.report import report
from tf_echo.training import StepPlanner

_OWN = ("_wrapped", "_steps", "_given_name", "_loss_scale")

for _model in (costs.UnitCost, costs.RooflineCost, costs.MeasuredCost):
    keras.saving.register_keras_serializable("tf_echo")(_model)


@keras.saving.register_keras_serializable("tf_echo")
class EchoOptimizer(keras.optimizers.Optimizer):
    """Wraps an optimizer so that models compiled with it train in less memory, with the same
    gradients.

    While Keras traces the train step, the step is planned as in *Echo* (ISCA 2020): cheap ops whose
    results only wait for the backward pass run again there instead. The loss, the gradients and the
    random numbers stay the same; nothing is ever recomputed if the predicted peak is not lower.
    Loops that XLA does not compile run their iterations one after the other.

    In all else this is the inner optimizer: it has the same variables, so that checkpoints and
    saved models of one can be loaded by the other, and learning rate, iterations, clipping, moving
    averages and gradient accumulation are the inner optimizer's.

    Example:

    ```python
    model.compile(optimizer=tf_echo.EchoOptimizer("adam"), loss="mse")
    model.fit(x, y)
    print(model.optimizer.report())
    ```

    In a custom training loop, tell it the loss inside the tape:

    ```python
    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss
    ```

    Args:
        inner_optimizer: a Keras optimizer, its name, or its config.
        policy: `"echo"` recomputes what lowers the predicted peak; `"none"` leaves the step as the
            inner optimizer traces it, op for op. `"mirror"` is what the paper compares Echo with
            (section VI): it recomputes all that is not compute-heavy, unless the gradient of
            something heavy reads it, and estimates nothing. It may need more memory than `"none"`.
        loss_scale: `"auto"` scales the loss dynamically, as a
            `keras.optimizers.LossScaleOptimizer`, if the global dtype policy is `"mixed_float16"`;
            `"dynamic"` always does; `None` never does. Around a `LossScaleOptimizer` it stays one.
        nominal_batch_size: the batch size to judge plans at where the data leave it open
            (`Dataset.batch`). By default plans are judged where activations outweigh variables, and
            must not need more memory at small batches either.
        cost_model: what recomputing costs in time, a `RooflineCost` by default.
        exclude: layers of which nothing is recomputed: patterns of their names as in
            `model.summary()`, with `*`, `?` and `[...]` as in file names; names of nested layers
            are joined by `/`. `("decoder/*",)` leaves the layer "decoder" and all in it alone.
        include: patterns of the layers of which alone something may be recomputed; by default all.
        plan: the plan to carry out instead of making one: a `RecomputePlan` of a step with the same
            graph, such as `EchoOptimizer.plan` of an earlier run, as it was or changed by hand;
            `RecomputePlan.to_json` and `from_json` save and load it.
        without: which parts of policy "echo" to leave out, to see what each is worth: `"recompute"`
            (running ops again), `"heavy"` (doing so where the gradient of a compute-heavy op reads
            the result), `"masks"` (drawing random numbers again), `"bits"` (keeping one bit of an
            element of dropout masks and of ReLUs, where that is all that gradients ask for),
            `"sums"` (building up sums of gradients term by term), `"waits"` (letting derivatives
            wait for the gradients that they are multiplied with), `"order"` (running iterations of
            loops one by one).
        name: a name for the optimizer; that of the inner one by default.

    Raises:
        TypeError: `inner_optimizer` is no Keras optimizer, `exclude` or `include` no sequence of
            strings, or `plan` no `RecomputePlan`.
        ValueError: an unknown policy or loss scale, an inner optimizer that is an `EchoOptimizer`
            already, a Keras backend other than TensorFlow, or a plan together with a policy or
            patterns. While the step is traced: a pattern matches no layer, or the plan is one for
            another graph; the error names the first difference.
    """

    def __new__(cls, inner_optimizer: Any = None, *args: Any, **kwargs: Any) -> "EchoOptimizer":
        """Makes a `LossScaleOptimizer` of it where the loss is to be scaled."""
        loss_scale = kwargs.get("loss_scale", args[1] if len(args) > 1 else "auto")
        if cls is EchoOptimizer and _scales(inner_optimizer, loss_scale):
            cls = _EchoLossScaleOptimizer
        return object.__new__(cls)

    def __init__(
        self,
        inner_optimizer: Any,
        policy: str = "echo",
        loss_scale: str | None = "auto",
        nominal_batch_size: int | None = None,
        cost_model: costs.CostModel | None = None,
        exclude: Sequence[str] = (),
        name: str | None = None,
        include: Sequence[str] = (),
        plan: RecomputePlan | None = None,
        without: Sequence[str] = (),
    ):
        _check_backend()
        _check_arguments(policy, loss_scale, nominal_batch_size)
        exclude = _as_patterns("exclude", exclude)
        include = _as_patterns("include", include)
        _check_plan(plan, policy, exclude, include, without)
        _check_techniques(without)
        wrapped = _as_optimizer(inner_optimizer)
        scaled = isinstance(self, keras.optimizers.LossScaleOptimizer)
        if scaled and not isinstance(wrapped, keras.optimizers.LossScaleOptimizer):
            self._loss_scale: str | None = "dynamic"
            wrapped = keras.optimizers.LossScaleOptimizer(wrapped)
        else:
            self._loss_scale = None
        self._given_name = name
        self._wrapped = wrapped
        cost_model = cost_model or costs.RooflineCost()
        self._steps = StepPlanner(
            passes.Settings(
                policy, cost_model, nominal_batch_size, exclude, include, plan, tuple(without)
            )
        )

    # What Echo adds.

    @property
    def inner_optimizer(self) -> keras.optimizers.Optimizer:
        """The optimizer that does the updates."""
        if isinstance(self, keras.optimizers.LossScaleOptimizer):
            return self._wrapped.inner_optimizer
        return self._wrapped

    @property
    def policy(self) -> str:
        """The policy that plans are made by."""
        return self._steps.settings.policy

    @property
    def plans(self) -> list[RecomputePlan]:
        """One plan for each train step traced so far, the latest last."""
        return [planned.result() for planned in self._steps.plans]

    @property
    def plan(self) -> RecomputePlan | None:
        """The latest plan; None before the first train step."""
        return self._steps.plans[-1].result() if self._steps.plans else None

    def report(self, every_region: bool = False) -> str:
        """The latest plan as a table.

        Args:
            every_region: also list regions too small to matter.

        Returns:
            Text, with a line for each region, totals, and the predicted peak before and after.
        """
        plan = self.plan
        if plan is None:
            return "No train step was planned yet. Train the model, or call `tf_echo.explain`."
        return report(plan, every_region)

    def scale_loss(self, loss: Any) -> Any:
        """The loss as the inner optimizer scales it.

        In a traced step it is what will be planned for.
        """
        scaled = self._wrapped.scale_loss(loss)
        if tf.is_symbolic_tensor(loss):
            self._steps.note_loss(scaled)
        return scaled

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Updates variables as the inner optimizer does.

        A step that is being traced is planned and rewritten.
        """
        grads = list(grads)
        self._wrapped.apply(grads, trainable_variables)
        self._steps.step_applied(grads)

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor, serialized."""
        inner = self._wrapped if self._loss_scale is None else self.inner_optimizer
        settings = self._steps.settings
        return {
            "inner_optimizer": keras.saving.serialize_keras_object(inner),
            "policy": settings.policy,
            "loss_scale": self._loss_scale,
            "nominal_batch_size": settings.batch_size,
            "cost_model": keras.saving.serialize_keras_object(settings.cost_model),
            "exclude": list(settings.exclude),
            "include": list(settings.include),
            "plan": settings.plan and settings.plan.to_json(),
            "without": list(settings.without),
            "name": self._given_name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "EchoOptimizer":
        """The inverse of `get_config`."""
        config = dict(config)
        for key in ("inner_optimizer", "cost_model"):
            config[key] = keras.saving.deserialize_keras_object(
                config[key], custom_objects=custom_objects
            )
        if config.get("plan") is not None:
            config["plan"] = RecomputePlan.from_json(config["plan"])
        return EchoOptimizer(**config)

    # All else is the inner optimizer's: its methods, its attributes, what is saved of it.

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        elif name == "name":
            object.__setattr__(self, "_given_name", value)
        else:
            setattr(self._wrapped, name, value)

    def __dir__(self) -> list[str]:
        # Keras saves whatever it finds here. The inner optimizer is saved as this one's own
        # variables; a LossScaleOptimizer saves it once more beside them.
        hidden = {"_wrapped"}
        if not isinstance(self, keras.optimizers.LossScaleOptimizer):
            hidden.add("inner_optimizer")
        return [name for name in super().__dir__() if name not in hidden]

    def __repr__(self) -> str:
        inner = self.inner_optimizer
        return f"<EchoOptimizer policy={self.policy!r} inner_optimizer={inner!r}>"

    @property
    def name(self) -> str:
        """The given name, or the inner optimizer's."""
        return self._given_name or self._wrapped.name

    @property
    def variables(self) -> list[keras.Variable]:
        """The inner optimizer's variables."""
        return list(self._wrapped.variables)

    @property
    def iterations(self) -> Any:
        """The inner optimizer's step count."""
        return self._wrapped.iterations

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate; may be set."""
        return self._wrapped.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self._wrapped.learning_rate = learning_rate

    def build(self, variables: Any) -> None:
        """Creates the inner optimizer's variables."""
        self._wrapped.build(variables)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """One update of one variable, by the inner optimizer."""
        self._wrapped.update_step(gradient, variable, learning_rate)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Puts averaged weights in place, if the inner optimizer keeps any."""
        self._wrapped.finalize_variable_values(var_list)

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Excludes variables from the inner optimizer's weight decay."""
        self._wrapped.exclude_from_weight_decay(var_list, var_names)

    def set_weights(self, weights: Any) -> None:
        """Sets the inner optimizer's variables."""
        self._wrapped.set_weights(weights)

    def save_own_variables(self, store: Any) -> None:
        """Saves the inner optimizer's variables, as that would."""
        self._wrapped.save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Loads variables that this or the plain inner optimizer saved."""
        self._wrapped.load_own_variables(store)


@keras.saving.register_keras_serializable("tf_echo")
class _EchoLossScaleOptimizer(EchoOptimizer, keras.optimizers.LossScaleOptimizer):
    """An EchoOptimizer that Keras takes for what it is: a LossScaleOptimizer."""


def _scales(inner_optimizer: Any, loss_scale: Any) -> bool:
    """Whether the optimizer is to be a LossScaleOptimizer."""
    if isinstance(inner_optimizer, dict):
        inner_optimizer = _from_config(inner_optimizer)
    if isinstance(inner_optimizer, keras.optimizers.LossScaleOptimizer):
        return True
    if loss_scale == "auto":
        return str(keras.config.dtype_policy().name) == "mixed_float16"
    return bool(loss_scale == "dynamic")


def _from_config(identifier: str | dict[str, Any]) -> keras.optimizers.Optimizer:
    # Keras takes entries out of the config that it reads.
    return keras.optimizers.get(copy.deepcopy(identifier))


def _as_optimizer(inner_optimizer: Any) -> keras.optimizers.Optimizer:
    if isinstance(inner_optimizer, (str, dict)):
        inner_optimizer = _from_config(inner_optimizer)
    innermost = inner_optimizer
    while not isinstance(innermost, EchoOptimizer) and hasattr(innermost, "inner_optimizer"):
        innermost = innermost.inner_optimizer
    if isinstance(innermost, EchoOptimizer):
        raise ValueError(
            "`inner_optimizer` must not be an `EchoOptimizer` already, nor wrap one. Wrap the "
            f"plain optimizer once. Received: inner_optimizer={inner_optimizer}"
        )
    if not isinstance(inner_optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "`inner_optimizer` must be a Keras optimizer, its name or its config. Received: "
            f"inner_optimizer={inner_optimizer} (of type {type(inner_optimizer)})"
        )
    return inner_optimizer


def _as_patterns(argument: str, given: Any) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else given
    if not isinstance(patterns, Sequence) or not all(isinstance(p, str) and p for p in patterns):
        raise TypeError(
            f"`{argument}` must be a sequence of patterns of layer names, such as ('decoder/*',). "
            f"Received: {argument}={given!r}"
        )
    return tuple(patterns)


def _check_plan(
    plan: Any,
    policy: str,
    exclude: Sequence[str],
    include: Sequence[str],
    without: Sequence[str],
) -> None:
    if plan is None:
        return
    if not isinstance(plan, RecomputePlan):
        raise TypeError(
            "`plan` must be a `RecomputePlan`, such as `RecomputePlan.from_json(text)`. Received: "
            f"plan={plan!r} (of type {type(plan)})"
        )
    if policy != "echo" or exclude or include or without:
        raise ValueError(
            "`plan` says itself what to recompute: `policy`, `exclude`, `include` and `without` "
            f"must not be given with it. Received: policy={policy!r}, exclude={exclude}, "
            f"include={include}, without={without}"
        )


def _check_techniques(without: Any) -> None:
    known = passes.TECHNIQUES
    if isinstance(without, str) or not all(name in known for name in without):
        raise ValueError(
            f"`without` must be a sequence of some of {', '.join(map(repr, known))}. Received: "
            f"without={without!r}"
        )


def _check_backend() -> None:
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            "EchoOptimizer needs Keras on the TensorFlow backend: it rewrites TensorFlow graphs. "
            "Set the environment variable "
            "KERAS_BACKEND=tensorflow before importing keras. Received: "
            f"backend={keras.backend.backend()!r}"
        )


def _check_arguments(policy: Any, loss_scale: Any, nominal_batch_size: Any) -> None:
    if policy not in planner.POLICIES:
        known = ", ".join(repr(name) for name in sorted(planner.POLICIES))
        raise ValueError(f"`policy` must be one of {known}. Received: policy={policy!r}")
    if loss_scale not in ("auto", "dynamic", None):
        raise ValueError(
            f"`loss_scale` must be 'auto', 'dynamic' or None. Received: loss_scale={loss_scale!r}"
        )
    valid = nominal_batch_size is None or (
        isinstance(nominal_batch_size, int)
        and not isinstance(nominal_batch_size, bool)
        and nominal_batch_size > 0
    )
    if not valid:
        raise ValueError(
            "`nominal_batch_size` must be a positive integer or None. "
            f"Received: nominal_batch_size={nominal_batch_size!r}"
        )
