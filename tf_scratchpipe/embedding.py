"""The layer that users see: Keras' side of an `Engine`."""

import copy
import pathlib
import warnings
import weakref
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_scratchpipe import (
    exported,
    keras_internals,
    layer_saving,
    pooling,
    table_files,
    tensor_state,
    tf_internals,
)
from tf_scratchpipe.codes import MAX_SLOTS
from tf_scratchpipe.engine import MODES, Engine, Mode
from tf_scratchpipe.errors import check_ids
from tf_scratchpipe.exported import ExportedTable
from tf_scratchpipe.initial_rows import host_table
from tf_scratchpipe.lookup import called
from tf_scratchpipe.masks import Unmasked, unmasked
from tf_scratchpipe.plan import Ints, Rows
from tf_scratchpipe.replacement import POLICIES
from tf_scratchpipe.row_optimizers import (
    get,
    refuse_own_loss_scale,
    refuse_settings,
    row_optimizer,
)
from tf_scratchpipe.row_step import RowStep
from tf_scratchpipe.slot_group import SlotSettings
from tf_scratchpipe.stats import CacheStats
from tf_scratchpipe.storage import HOST_DEVICE
from tf_scratchpipe.table_variable import TableVariable
from tf_scratchpipe.trained_state import TrainedState


@keras.saving.register_keras_serializable("tf_scratchpipe")
class ScratchPipeEmbedding(keras.layers.Layer):
    """Looks rows of a table up that may be larger than the device's memory.

    Use it as `keras.layers.Embedding`, and give the training data to it ahead of time:

    ```python
    items = tf_scratchpipe.ScratchPipeEmbedding(10_000_000, 64, num_slots=200_000, name="items")
    ...                                                     # any Keras model
    train = train.apply(tf_scratchpipe.lookahead(model))    # last, but for `prefetch`
    model.fit(train, validation_data=plain_validation_data)
    ```

    The table stays in host memory. On the device there are `num_slots` slots; while a batch is
    trained, the rows that the next batches need are brought into slots, and rows that are not
    needed go back (*ScratchPipe*, ISCA 2022). Every lookup of a training step finds its row in a
    slot, and the result is that of training the whole table on the device.

    Rows are trained by a row optimizer of their own inside `optimizer.apply`: the gradients of
    equal ids in a batch are added up, and each row that the batch looks up takes one step. With
    SGD without momentum, Adagrad and `tf_scratchpipe.RowwiseAdagrad` that is what training the
    whole table gives. With momentum, RMSprop, Adam, AdamW and Ftrl the other rows rest (the *lazy*
    variant of these optimizers).

    Of the row optimizer's settings, `weight_decay` is for the rows that a step looks up, and
    `clipnorm` and `clipvalue` act on the table's whole gradient, as on any weight's. What the
    model's optimizer does to the step as a whole holds for rows with an optimizer of their own as
    well: a scaled loss (`loss_scale_factor`, or a `LossScaleOptimizer` as under policy
    `"mixed_float16"`) is scaled back and steps that overflow are skipped, and
    `gradient_accumulation_steps` has the rows accumulate. Rows whose gradients are accumulated
    keep their slots until these are applied. `global_clipnorm` and `use_ema` are refused.

    Without `lookahead`, and for `evaluate`, `predict` and `validation_data`, pass plain ids. They
    are right at any time; training on them brings each batch's rows in when the step waits for
    them.

    Args:
        input_dim: Number of rows. Ids are whole numbers from 0 to `input_dim - 1`.
        output_dim: Values in a row.
        num_slots: Rows that the device holds at a time. None: as many as the first batches need,
            and more when later ones need more. In mode `"static"`: the number of hot rows.
        combiner: None returns a row for each id. `"sum"`, `"mean"` and `"sqrtn"` (the sum
            over the root of the sum of squared weights) pool the rows over the last dimension.
        optimizer: The row optimizer, a Keras optimizer or its name: SGD with or without momentum
            and Nesterov's, Adagrad, RowwiseAdagrad, Adam, AdamW, RMSprop, or Ftrl; its learning
            rate may be a schedule or a function. None: the class, settings and live learning rate
            of the optimizer that the model is compiled with.
        embeddings_initializer: Draws the rows.
        initialize_by_row: False draws the whole table when a row is first needed, with the values
            that the initializer would give to any weight of this shape. True draws each row by
            itself when it is first needed: same distribution, other values, no need for the whole
            table in memory. None draws by row where the table has more than 2**28 values.
        mode: `"pipelined"` as described. For comparison: `"synchronous"` moves the rows of a batch
            when its step asks for them (the paper's straw-man), `"static"` has the `hot_ids` on the
            device for good and trains the others on the host, `"host"` trains all on the host.
        replacement: Whose slot is taken: `"lru"`, `"lfu"` or `"random"`.
        mask_zero: Whether id 0 is a padding. Then the layer has a mask, and pooling leaves zeros
            out.
        oov_id: The row for ids that are out of range. None: such ids are an error.
        hot_ids: For mode `"static"`, the ids of the hot rows, the hottest first. See
            `tf_scratchpipe.count_ids`.
        storage_device: Where the slots are. None: on the first GPU, or on the CPU if there is none.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        inputs: Ids, integers of any shape; ragged, or, with a combiner, sparse of shape (batch, n).
            Whole floats are accepted as in `keras.layers.Embedding`, but not from `lookahead`.
        weights: With a combiner, one weight for each id, in the structure of the ids.

    Returns:
        Rows, of the shape of the ids and `output_dim`; with a combiner, without the ids' last
        dimension.

    Raises:
        ValueError: For arguments and settings that do not go together. Wrong ids raise
            `tf_scratchpipe.BadIdError`, which from inside a graph becomes
            `tf.errors.InvalidArgumentError` with the same text.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        num_slots: int | None = None,
        combiner: str | None = None,
        optimizer: keras.optimizers.Optimizer | str | dict[str, Any] | None = None,
        embeddings_initializer: Any = "uniform",
        mode: Mode = "pipelined",
        replacement: str = "lru",
        mask_zero: bool = False,
        oov_id: int | None = None,
        name: str | None = None,
        *,
        initialize_by_row: bool | None = None,
        hot_ids: npt.ArrayLike | None = None,
        storage_device: str | None = None,
        **kwargs: Any,
    ) -> None:
        for refused in ("embeddings_regularizer", "embeddings_constraint", "lora_rank"):
            if (value := kwargs.pop(refused, None)) is not None:
                raise ValueError(
                    f"ScratchPipeEmbedding does not support `{refused}`: there is no tensor of "
                    f"the whole table for it. Received: {refused}={value}. Leave it out."
                )
        kwargs.pop("input_length", None)
        super().__init__(name=name, autocast=False, **kwargs)
        self.input_dim = _positive("input_dim", input_dim)
        self.output_dim = _positive("output_dim", output_dim)
        self.num_slots = None if num_slots is None else _positive("num_slots", num_slots)
        if min(self.num_slots or 1, self.input_dim) > MAX_SLOTS:
            raise ValueError(
                f"`num_slots` must be at most {MAX_SLOTS}. Received: num_slots={num_slots}"
            )
        self.combiner = _one_of("combiner", combiner, (None, *pooling.COMBINERS))
        self.mode = _one_of("mode", mode, MODES)
        self.replacement = _one_of("replacement", replacement, tuple(POLICIES))
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.initialize_by_row = initialize_by_row
        self.mask_zero = bool(mask_zero)
        self.oov_id = self._row("oov_id", oov_id)
        self.storage_device = storage_device
        self.supports_masking = self.mask_zero
        # The rows move by a rule of ours, planned on the host, which XLA cannot compile.
        self.supports_jit = False
        if isinstance(optimizer, dict):
            optimizer = copy.deepcopy(optimizer)  # Keras takes it apart.
        self._row_optimizer = None if optimizer is None else get(optimizer)
        if self._row_optimizer is not None:
            row_optimizer(self._row_optimizer)  # Refuses what it does not know.
            refuse_own_loss_scale(self._row_optimizer)
        self.hot_ids = self._checked_hot_ids(hot_ids)
        self._settings = SlotSettings(
            self.input_dim, self.num_slots, self.replacement, self.mask_zero
        )
        self._warned = False
        self._is_beside = False
        self._exports: weakref.WeakKeyDictionary[Any, ExportedTable] = weakref.WeakKeyDictionary()
        self._checked: weakref.WeakSet[keras.optimizers.Optimizer] = weakref.WeakSet()

    # ---- building -----------------------------------------------------------------------------

    def build(self, input_shape: Any = None) -> None:
        """Create the table. No row is drawn before it is needed."""
        if tf.distribute.has_strategy():
            raise ValueError(
                "ScratchPipeEmbedding cannot be built under a tf.distribute strategy. Received: "
                f"{type(tf.distribute.get_strategy()).__name__}. Build and train the model without "
                "`strategy.scope()`."
            )
        if isinstance(self.dtype_policy, keras.dtype_policies.QuantizedDTypePolicy):
            raise ValueError(self._no_quantization(self.dtype_policy.name))
        rows = host_table(
            self.input_dim,
            self.output_dim,
            self.variable_dtype,
            self.embeddings_initializer,
            self.initialize_by_row,
        )
        self._engine = Engine(
            self.name,
            rows,
            self.mode,
            self._settings,
            oov_id=self.oov_id,
            hot_ids=self.hot_ids,
            device=self.storage_device,
            on_plain=self._on_plain,
        )
        self.embeddings = TableVariable(
            (self.input_dim, self.output_dim),
            self.variable_dtype,
            "embeddings",
            self.trainable,
            read=self._engine.get,
            write=self._engine.set,
            update=self._update,
            skip=self._skip,
            touched=self._check_optimizers,
            to_tensors=self._to_tensors,
            from_tensors=self._from_tensors,
        )
        if self._row_optimizer is not None:
            self._engine.bind(self._row_optimizer, counts=False)
        self.built = True

    @property
    def engine(self) -> Engine:
        """The table behind the layer, built if nobody has called the layer yet."""
        if not self.built:
            self.build()
        return self._engine

    # ---- calling ------------------------------------------------------------------------------

    def call(self, inputs: Any, weights: Any = None, training: bool | None = None) -> Any:
        """Look rows up."""
        inputs = _as_tensor(inputs)
        self._check_rank(inputs.shape)
        flat = pooling.flatten(inputs)
        if weights is not None and self.combiner is None:
            raise ValueError(
                "`weights` need a combiner. Received: combiner=None. Pass combiner='sum', 'mean' "
                "or 'sqrtn'."
            )
        rows = tf.cast(self._rows(flat.ids, training), self.compute_dtype)
        if self.combiner is None:
            return flat.restore(rows)
        factors = None
        if weights is not None:
            factors = tf.cast(pooling.flat_weights(_as_tensor(weights), inputs), rows.dtype)
        if self.mask_zero:
            kept = tf.cast(unmasked(flat.ids, self._settings.codec.slot_bits), rows.dtype)
            factors = kept if factors is None else kept * factors
        return flat.pool(rows, factors, self.combiner)

    def _rows(self, ids: tf.Tensor, training: bool | None) -> tf.Tensor:
        lookup = self._engine.lookup
        if (table := self._exported()) is not None:
            return table.gather(ids)
        trap = tf.identity(self.embeddings.trap)
        # A model whose call has no `training` trains all the same, as all its layers do; and
        # with `training=True` and no tape, nothing is trained.
        recorded = tf_internals.is_recorded(trap)
        if not self.trainable:
            return lookup.read(ids, frozen=bool(training or recorded))
        if not recorded:
            return _untrained(trap, lookup.read(ids, frozen=False))
        index = lookup.planned_index(ids) if training is False else lookup.index(ids)

        @tf.custom_gradient
        def trained(trap: tf.Tensor, index: tf.Tensor) -> Any:
            def gradient(upstream: tf.Tensor) -> tuple[tf.IndexedSlices, None]:
                # No dense shape: nothing may make this a gradient of the whole table.
                return tf.IndexedSlices(upstream, index), None

            if training is False:
                return lookup.either(ids, index), gradient
            return lookup.gather(index), gradient

        return trained(trap, index)

    def _exported(self) -> ExportedTable | None:
        """A copy of the table, if the call is traced on its way to a SavedModel."""
        archive = None if tf.executing_eagerly() else keras_internals.export_archive()
        if archive is None:
            return None
        if archive not in self._exports:
            self._exports[archive] = ExportedTable(self._engine, self._engine.check)
        return self._exports[archive]

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """Where the ids are not 0, with `mask_zero=True` and no combiner."""
        if not self.mask_zero or self.combiner is not None or _is_ragged(inputs):
            return None
        return Unmasked(self._settings.codec.slot_bits)(inputs)

    def compute_output_spec(
        self, inputs: Any, weights: Any = None, training: bool | None = None
    ) -> keras.KerasTensor:
        """Shape and dtype of the rows."""
        shape = self.compute_output_shape(inputs.shape)
        ragged = _is_ragged(inputs) and (self.combiner is None or len(inputs.shape) > 2)
        return keras.KerasTensor(shape, dtype=self.compute_dtype, ragged=ragged)

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        """Shape of the rows for ids of this shape."""
        self._check_rank(input_shape)
        kept = input_shape if self.combiner is None else input_shape[:-1]
        return (*kept, self.output_dim)

    def _check_rank(self, shape: Any) -> None:
        if self.combiner is not None and len(shape) < 2:
            raise ValueError(
                "With a combiner, ids need a last dimension to pool over. Received: "
                f"combiner='{self.combiner}', inputs.shape={tuple(shape)}"
            )

    # ---- training -----------------------------------------------------------------------------

    def _check_optimizers(self) -> list[keras.optimizers.Optimizer]:
        """The optimizers that are at the weight now, the innermost first, if they may be.

        Called when the weight is touched: some of what is refused here would fail on the way to
        the update for reasons that nobody understands.
        """
        optimizers = keras_internals.applying_optimizers()
        for optimizer in optimizers:
            if optimizer in self._checked:
                continue
            refuse_settings(optimizer)
            keras_internals.set_tables_apart(optimizer)
            self._checked.add(optimizer)
        return optimizers

    def _update(self, gradients: tf.IndexedSlices) -> None:
        """Called by the optimizer in the place of overwriting the weight."""
        optimizers = self._check_optimizers()
        planned_for = self._engine.rows.period
        if optimizers:
            self.follow(optimizers[0])
        if self._engine.rows.period not in (1, planned_for):
            self._engine.refuse_planned()
        self.require_optimizer()
        indices = self._trained_indices(gradients)
        self._engine.lookup.update(indices, gradients.values, self._row_step(optimizers))

    def _skip(self, gradients: tf.IndexedSlices) -> None:
        """Called by an optimizer that throws the step's gradients away."""
        self._engine.lookup.skip(self._trained_indices(gradients))

    def _row_step(self, optimizers: list[keras.optimizers.Optimizer]) -> RowStep:
        """What the optimizers that are being applied, the innermost first, say about the rows."""
        own, mover = self._row_optimizer, self.row_optimizer()
        leader = optimizers[0] if optimizers else mover
        if own is not None and keras_internals.period(leader) == 1:
            leader = own
        return RowStep(
            keras_internals.loss_scales(optimizers),
            keras_internals.period(leader),
            None if leader is own else keras_internals.steps_done(leader),
            self._decays(mover),
        )

    def _decays(self, mover: keras.optimizers.Optimizer) -> bool:
        """Whether the weight decay of the optimizer that moves the rows is for them."""
        return keras_internals.decays(mover, self.embeddings.trap)

    def _trained_indices(self, gradients: tf.IndexedSlices) -> tf.Tensor:
        """Where the rows of the gradients are."""
        indices = tf.cast(gradients.indices, tf.int64)
        checked = self._assert_trained(indices)
        # They come from the host, and are looked at there again.
        with tf.device(HOST_DEVICE), tf.control_dependencies([checked]):
            return tf.identity(indices)

    def _assert_trained(self, indices: tf.Tensor) -> tf.Tensor:
        """Fails if rows were looked up in a way that cannot train them."""

        def refuse() -> npt.NDArray[np.generic]:
            raise ValueError(
                f"The optimizer got gradients of layer '{self.name}' for rows that were looked up "
                "with `training=False`, or in a function that was traced without a gradient tape. "
                "Call the model with `training=True` under the tape to train it, or take the "
                "layer's weight out of the variables that the optimizer moves."
            )

        with tf.device(HOST_DEVICE):
            return tf.cond(
                tf.reduce_all(indices >= 0),
                lambda: tf.constant(True),
                lambda: called(refuse, [], tf.bool, tf.TensorShape([])),
            )

    def follow(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Train the rows as this optimizer of the model does, unless they have their own.

        Args:
            optimizer: The optimizer, which may wrap another as its `inner_optimizer`.
        """
        own = self._row_optimizer
        if own is None:
            self.engine.follow(optimizer)
            return
        wanted = keras_internals.period(keras_internals.innermost(optimizer))
        mine = own.gradient_accumulation_steps or wanted
        if wanted not in (1, mine):
            raise ValueError(
                f"The optimizers of layer '{self.name}' and of the model accumulate gradients over "
                f"different numbers of steps. Received: gradient_accumulation_steps={mine} of the "
                f"layer's, {wanted} of the model's. Leave it out of the layer's optimizer: its "
                "rows follow the model."
            )
        self.engine.accumulate(mine)

    def row_optimizer(self) -> keras.optimizers.Optimizer | None:
        """The optimizer that moves the rows, once it is known.

        Not a property, through which Keras would save the model's optimizer with the layer.
        """
        return self._row_optimizer or (self._engine.optimizer if self.built else None)

    def require_optimizer(self) -> None:
        """Raise `ValueError` if it is not known how the rows are trained."""
        if self.row_optimizer() is None:
            raise ValueError(
                f"Layer '{self.name}' does not know its row optimizer. Received: optimizer=None, "
                'and no compiled model to take it from. Pass `optimizer="adagrad"` or the like to '
                "the layer, or use `lookahead(model)` with the compiled model."
            )

    _lookahead = "tf_scratchpipe.lookahead(model)"
    """What to say of it."""

    def _on_plain(self) -> None:
        if self.mode == "pipelined" and not self._warned:
            self._warned = True
            warnings.warn(
                f"Layer '{self.name}' is trained on plain ids: each step waits for its rows to be "
                "brought to the device. Pass the training data through "
                f"`dataset.apply({self._lookahead})` to have them there before, or "
                "mode='synchronous' if this is what you want.",
                stacklevel=2,
            )

    # ---- the table ----------------------------------------------------------------------------

    def get_table(self) -> Rows:
        """A copy of the whole table, array of shape (input_dim, output_dim), as trained so far."""
        return self.engine.get()

    def set_table(self, values: npt.ArrayLike) -> None:
        """Overwrite the whole table. Optimizer slots stay.

        Args:
            values: Array of shape (input_dim, output_dim).

        Raises:
            ValueError: It has another shape.
        """
        self.engine.set(values)

    def to_keras_embedding(self) -> keras.layers.Embedding:
        """A `keras.layers.Embedding` with the table as trained so far.

        ```python
        plain = keras.models.clone_model(model, clone_function=lambda layer: (
            layer.to_keras_embedding() if isinstance(layer, ScratchPipeEmbedding)
            else layer.__class__.from_config(layer.get_config())))
        ```

        Raises:
            ValueError: With a `combiner` or an `oov_id`, which that layer has not.
        """
        return exported.embedding(self.get_table(), self.get_config(), self.trainable)

    @classmethod
    def from_keras_embedding(
        cls, layer: keras.layers.Embedding, num_slots: int | None = None, **kwargs: Any
    ) -> "ScratchPipeEmbedding":
        """A layer with the arguments and, if it is built, the table of a Keras layer.

        ```python
        items = ScratchPipeEmbedding.from_keras_embedding(model.get_layer("items"), 200_000)
        ```

        Args:
            layer: The Keras layer.
            num_slots: As of this class.
            **kwargs: Other arguments of this class, which go before those of the layer.

        Raises:
            ValueError: The layer has a regularizer, a constraint or LoRA.
        """
        own = cls(**{**exported.arguments(layer), "num_slots": num_slots, **kwargs})
        if layer.built:
            own.set_table(layer.get_weights()[0])
        return own

    def flush(self) -> None:
        """Write every cached row back to host memory. Nothing needs it before reading the table."""
        self.engine.flush()

    def stats(self) -> CacheStats:
        """What the cache has done so far. Print it."""
        return self.engine.stats()

    def quantize(self, mode: str, *arguments: Any, **named: Any) -> None:
        """Refused."""
        raise ValueError(self._no_quantization(mode))

    def _no_quantization(self, mode: str) -> str:
        return f"ScratchPipeEmbedding cannot be quantized. Received: '{mode}'. Leave it out."

    # ---- saving -------------------------------------------------------------------------------

    def count_params(self) -> int:
        """Values in the table."""
        return self.input_dim * self.output_dim

    def save_own_variables(self, store: Any) -> None:
        """Save the table as it is trained, and its optimizer slots."""
        if self.built:
            state = TrainedState(self._engine)
            layer_saving.save_variables(state, self._engine.counters(), store)

    def save_assets(self, dir_path: str) -> None:
        """Save a large table with its optimizer slots, in a `.keras` archive."""
        if self.built and layer_saving.goes_beside(state := TrainedState(self._engine)):
            state.save(pathlib.Path(dir_path))

    def load_own_variables(self, store: Any) -> None:
        """Load a saved table and its optimizer slots, or the weight of a Keras embedding."""
        self._is_beside = layer_saving.SIDECAR in store.keys()  # noqa: SIM118 - all that it has.
        if self._is_beside:
            if keras_internals.assets_archive() is None:
                layer_saving.load_from_archive(TrainedState(self.engine), store, self.name)
            return
        state = {key: store[key][()] for key in store.keys()}  # noqa: SIM118
        if "table" not in state and "0" in state:
            state["table"] = state["0"]
        if "table" not in state:
            raise ValueError(
                f"There is no table saved for layer '{self.name}'. Received: {sorted(state)}"
            )
        self.engine.load_state(state)

    def load_assets(self, dir_path: str | None) -> None:
        """Load a table from a `.keras` archive, if it was not among the variables."""
        if self._is_beside:
            if dir_path is None:
                path = pathlib.Path("assets", self.name)
                raise table_files.damaged(path, "no such directory", "the table")
            TrainedState(self.engine).load(pathlib.Path(dir_path))

    def _to_tensors(self) -> dict[str, tf.Tensor]:
        return tensor_state.to_tensors(TrainedState(self._engine), self._engine.counters())

    def _from_tensors(self, tensors: dict[str, tf.Tensor]) -> None:
        tensor_state.load_tensors(TrainedState(self._engine), tensors)

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        config = super().get_config()
        own = self._row_optimizer
        config.update(
            input_dim=self.input_dim,
            output_dim=self.output_dim,
            num_slots=self.num_slots,
            combiner=self.combiner,
            optimizer=None if own is None else keras.optimizers.serialize(own),
            embeddings_initializer=keras.initializers.serialize(self.embeddings_initializer),
            mode=self.mode,
            replacement=self.replacement,
            mask_zero=self.mask_zero,
            oov_id=self.oov_id,
            initialize_by_row=self.initialize_by_row,
            hot_ids=None if self.hot_ids is None else self.hot_ids.tolist(),
            storage_device=self.storage_device,
        )
        return dict(config)

    # ---- checks -------------------------------------------------------------------------------

    def _row(self, name: str, value: int | None) -> int | None:
        if value is not None and not 0 <= value < self.input_dim:
            raise ValueError(
                f"`{name}` must be a row number from 0 to input_dim - 1. Received: {name}={value}, "
                f"input_dim={self.input_dim}"
            )
        return value

    def _checked_hot_ids(self, hot_ids: npt.ArrayLike | None) -> Ints | None:
        if (hot_ids is not None) != (self.mode == "static"):
            raise ValueError(
                "Mode 'static' needs `hot_ids`, and no other mode does. Received: "
                f"mode='{self.mode}', hot_ids={'None' if hot_ids is None else 'given'}. "
                "`tf_scratchpipe.count_ids(dataset, feature)` finds them."
            )
        if hot_ids is None:
            return None
        ids = np.asarray(hot_ids)[: self.num_slots]
        check_ids(ids, self.input_dim, self.name, "hot_ids", None)
        if np.unique(ids).size != ids.size:
            raise ValueError(
                f"`hot_ids` must name each id once. Received: {ids.size - np.unique(ids).size} "
                "repetitions"
            )
        return ids.astype(np.int64)


def _is_ragged(inputs: Any) -> bool:
    return isinstance(inputs, tf.RaggedTensor) or bool(getattr(inputs, "ragged", False))


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value <= 0:
        raise ValueError(f"`{name}` must be a positive integer. Received: {name}={value}")
    return int(value)


def _one_of(name: str, value: Any, known: tuple[Any, ...]) -> Any:
    if value not in known:
        names = ", ".join(repr(option) for option in known)
        raise ValueError(f"`{name}` must be one of {names}. Received: {name}={value!r}")
    return value


def _as_tensor(inputs: Any) -> Any:
    if isinstance(inputs, tf.SparseTensor | tf.RaggedTensor):
        return inputs
    tensor = tf.convert_to_tensor(inputs)
    # Half floats are for numpy to read.
    return tf.cast(tensor, tf.float32) if tensor.dtype in (tf.bfloat16, tf.float16) else tensor


@tf.custom_gradient
def _untrained(trap: tf.Tensor, rows: tf.Tensor) -> Any:
    """The rows, with a gradient that the optimizer will refuse."""

    def gradient(upstream: tf.Tensor) -> tuple[tf.IndexedSlices, None]:
        return tf.IndexedSlices(
            upstream, tf.fill(tf.shape(upstream)[:1], tf.constant(-1, tf.int64))
        ), None

    return tf.identity(rows), gradient
