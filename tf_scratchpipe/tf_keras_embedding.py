"""The layer for tf_keras: tf_keras' side of the layer for Keras 3, which does the work."""

from typing import Any

import keras
import numpy.typing as npt
import tensorflow as tf
import tf_keras

from tf_scratchpipe import tf_keras_internals, tf_keras_optimizers
from tf_scratchpipe.engine import Engine, Mode
from tf_scratchpipe.masks import unmasked
from tf_scratchpipe.plan import Rows
from tf_scratchpipe.stats import CacheStats
from tf_scratchpipe.tf_keras_core import Core, Parts, TableState, Weight


@tf_keras.saving.register_keras_serializable("tf_scratchpipe")
class ScratchPipeEmbedding(tf_keras_internals.NotInSavedModel):
    """`tf_scratchpipe.ScratchPipeEmbedding` for models of tf_keras and TensorFlow Recommenders.

    ```python
    import tensorflow_recommenders as tfrs
    from tf_scratchpipe import for_tf_keras as scratchpipe

    movies = scratchpipe.ScratchPipeEmbedding(10_000_000, 64, num_slots=200_000, name="movies")
    ...                                            # any model of tf_keras or tfrs, compiled
    train = train.apply(scratchpipe.lookahead({"movie_id": movies}, model=model))
    model.fit(train, validation_data=plain_validation_data)
    ```

    It takes the same arguments, has the same methods and trains to the same result as the layer for
    Keras 3, whose description holds here too. The differences:

    - The rows move in `optimizer.apply_gradients`. The optimizer is any of `tf_keras.optimizers`
      that has a row optimizer of the same class; with `optimizer` given, any of them. A `legacy`
      one is refused. Its `clipnorm`, `clipvalue` and `global_clipnorm` clip the gradients of rows
      as those of `tf_keras.layers.Embedding`: before the gradients of equal ids are added up.
    - tf_keras moves all rows in a step with momentum and with Adam; here rows that a batch does not
      look up rest. With SGD and Adagrad the result is that of `tf_keras.layers.Embedding`.
    - Saved are table and optimizer slots in `.keras`, `.weights.h5` and TensorFlow's checkpoints,
      the table alone in `.h5`. `model.save` as a SavedModel is refused: serve a model with
      `layer.to_embedding()` in the place of the layer.

    Args:
        input_dim: Number of rows.
        output_dim: Values in a row.
        num_slots: Rows that the device holds at a time.
        combiner: None, `"sum"`, `"mean"` or `"sqrtn"`.
        optimizer: The row optimizer, of tf_keras or Keras 3, or its name. None: as the optimizer
            that moves the model's weights, with its live learning rate.
        embeddings_initializer: An initializer of tf_keras, or its name.
        mode: `"pipelined"`, `"synchronous"`, `"static"` or `"host"`.
        replacement: `"lru"`, `"lfu"` or `"random"`.
        mask_zero: Whether id 0 is a padding.
        oov_id: The row for ids that are out of range. None: such ids are an error.
        initialize_by_row: Whether each row is drawn by itself when it is first needed. None: where
            the table is large.
        hot_ids: For mode `"static"`, the ids of the hot rows.
        storage_device: Where the slots are. None: on the first GPU, if there is one.
        **kwargs: Arguments of `tf_keras.layers.Layer`.

    Call arguments:
        inputs: Ids, integers of any shape; ragged, or, with a combiner, sparse of shape (batch, n).
        weights: With a combiner, one weight for each id, in the structure of the ids.

    Returns:
        Rows, of the shape of the ids and `output_dim`; with a combiner, without the ids' last
        dimension.

    Raises:
        ValueError: For arguments and settings that do not go together.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        num_slots: int | None = None,
        combiner: str | None = None,
        optimizer: Any = None,
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
        refused = {key: kwargs.pop(key) for key in _OF_AN_EMBEDDING if key in kwargs}
        super().__init__(name=name, autocast=False, **kwargs)
        self.embeddings_initializer = _initializer(embeddings_initializer)
        optimizer = _row_optimizer(optimizer)
        own = isinstance(optimizer, tf_keras_internals.OPTIMIZERS)
        core = Core(
            Weight(),
            input_dim=input_dim,
            output_dim=output_dim,
            num_slots=num_slots,
            combiner=combiner,
            optimizer=tf_keras_optimizers.twin(optimizer, of_model=False) if own else optimizer,
            embeddings_initializer=self.embeddings_initializer,
            mode=mode,
            replacement=replacement,
            mask_zero=mask_zero,
            oov_id=oov_id,
            name=self.name,
            initialize_by_row=initialize_by_row,
            hot_ids=hot_ids,
            storage_device=storage_device,
            dtype=self.dtype_policy.name,
            trainable=self.trainable,
            **refused,
        )
        self._parts = Parts(core, optimizer)
        self._state = TableState(core)
        if core.draws_by_row:
            core.embeddings_initializer = _in_keras(self.embeddings_initializer)
        self.input_dim, self.output_dim = core.input_dim, core.output_dim
        self.supports_masking = core.mask_zero

    # ---- building and calling -----------------------------------------------------------------

    @property
    def core(self) -> Core:
        """The layer for Keras 3 that does the work."""
        return self._parts.core

    @property
    def engine(self) -> Engine:
        """The table behind the layer, built if nobody has called the layer yet."""
        return self.core.engine

    def build(self, input_shape: Any = None) -> None:
        """Create the table. No row is drawn before it is needed."""
        engine = self.engine
        with tf.init_scope():
            self.embeddings = tf_keras_internals.StandIn(
                (self.input_dim, self.output_dim),
                self.core.variable_dtype,
                "embeddings",
                read=engine.get,
                write=engine.set,
                move=self._move,
                check=lambda optimizers: tf_keras_optimizers.refuse(self.name, optimizers),
            )
        self.core.embeddings.variable = self.embeddings
        super().build(input_shape)

    @tf.autograph.experimental.do_not_convert
    def call(self, inputs: Any, weights: Any = None, training: bool | None = None) -> Any:
        """Look rows up."""
        self._refuse_surroundings()
        if self.core.trainable != self.trainable:
            self.core.trainable = self.trainable
        return self.core.call(inputs, weights, training)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Where the ids are not 0, with `mask_zero=True` and no combiner."""
        core = self.core
        ragged = isinstance(inputs, tf.RaggedTensor)
        if not core.mask_zero or core.combiner is not None or ragged:
            return None
        return unmasked(tf.convert_to_tensor(inputs), self.engine.settings.codec.slot_bits)

    def compute_output_shape(self, input_shape: Any) -> tf.TensorShape:
        """Shape of the rows for ids of this shape."""
        shape = tf.TensorShape(input_shape)
        return tf.TensorShape(self.core.compute_output_shape(tuple(shape)))

    def _refuse_surroundings(self) -> None:
        if tf.distribute.has_strategy():
            raise ValueError(
                "ScratchPipeEmbedding cannot be called under a tf.distribute strategy. Received: "
                f"{type(tf.distribute.get_strategy()).__name__}. Build and train the model without "
                "`strategy.scope()`."
            )
        for model in tf_keras_internals.training_models():
            if model.jit_compile:
                raise ValueError(
                    f"Layer '{self.name}' cannot be compiled by XLA: its rows are planned on the "
                    f"host. Received: model '{model.name}' compiled with jit_compile=True. Pass "
                    "jit_compile=False to `compile`."
                )

    # ---- training -----------------------------------------------------------------------------

    def _move(self, optimizer: Any, gradient: Any) -> None:
        """Called by the optimizer in the place of moving the weight."""
        if not isinstance(gradient, tf.IndexedSlices):
            raise TypeError(
                f"Gradients of layer '{self.name}' must reach the optimizer as tf.IndexedSlices. "
                f"Received: {gradient!r}. Leave this gradient as the tape returns it, or change "
                "its `values` only."
            )
        self.follow(optimizer)
        # Keras 3 would tell its layer by which optimizer; here that is settled.
        self.core._update(gradient)

    def follow(self, optimizer: Any) -> None:
        """Train the rows as this optimizer of the model does, unless they have their own.

        Args:
            optimizer: An optimizer of `tf_keras.optimizers`.
        """
        tf_keras_optimizers.refuse(self.name, [optimizer])
        if self._parts.optimizer is None and self.row_optimizer() is not optimizer:
            self.core.follow(tf_keras_optimizers.twin(optimizer, of_model=True))

    def row_optimizer(self) -> Any:
        """The optimizer that moves the rows, once it is known."""
        return tf_keras_optimizers.original(self.core.row_optimizer())

    # ---- the table ----------------------------------------------------------------------------

    def get_table(self) -> Rows:
        """A copy of the whole table, array of shape (input_dim, output_dim), as trained so far."""
        return self.core.get_table()

    def set_table(self, values: npt.ArrayLike) -> None:
        """Overwrite the whole table. Optimizer slots stay.

        Args:
            values: Array of shape (input_dim, output_dim).

        Raises:
            ValueError: It has another shape.
        """
        self.core.set_table(values)

    def flush(self) -> None:
        """Write every cached row back to host memory. Nothing needs it before reading the table."""
        self.core.flush()

    def stats(self) -> CacheStats:
        """What the cache has done so far. Print it."""
        return self.core.stats()

    def to_embedding(self) -> Any:
        """A `tf_keras.layers.Embedding` with the table as it is now, for serving.

        Raises:
            ValueError: The layer has a combiner.
        """
        if self.core.combiner is not None:
            raise ValueError(
                "tf_keras.layers.Embedding does not pool. Received: layer "
                f"'{self.name}' with combiner='{self.core.combiner}'."
            )
        plain = tf_keras.layers.Embedding(
            self.input_dim,
            self.output_dim,
            mask_zero=self.core.mask_zero,
            dtype=self.dtype_policy,
            name=self.name,
        )
        plain.build(None)
        plain.set_weights([self.get_table()])
        return plain

    # ---- saving -------------------------------------------------------------------------------

    def count_params(self) -> int:
        """Values in the table."""
        return self.core.count_params()

    def save_own_variables(self, store: Any) -> None:
        """Save the table as it is trained, and its optimizer slots."""
        self.core.save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Load a saved table and its optimizer slots, or the weight of an embedding."""
        self.core.load_own_variables(store)

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        config = super().get_config()
        for key, value in self.core.get_config().items():
            if key not in ("name", "trainable", "dtype"):
                config[key] = value
        config["embeddings_initializer"] = tf_keras.initializers.serialize(
            self.embeddings_initializer
        )
        if isinstance(self._parts.optimizer, tf_keras_internals.OPTIMIZERS):
            config["optimizer"] = tf_keras.optimizers.serialize(self._parts.optimizer)
        return dict(config)


_OF_AN_EMBEDDING = (
    "embeddings_regularizer",
    "embeddings_constraint",
    "lora_rank",
    "input_length",
)
"""Arguments that the layer for Keras 3 passes over or refuses."""


def _initializer(initializer: Any) -> Any:
    if isinstance(initializer, keras.Initializer):
        raise ValueError(
            "`embeddings_initializer` must be an initializer of tf_keras, or its name. Received: "
            f"{initializer} of Keras 3."
        )
    return tf_keras.initializers.get(initializer)


def _in_keras(initializer: Any) -> Any:
    """The initializer of Keras 3 with the same class and settings."""
    kind = getattr(keras.initializers, type(initializer).__name__, None)
    return initializer if kind is None else kind.from_config(initializer.get_config())


def _row_optimizer(optimizer: Any) -> Any:
    """An optimizer of tf_keras or Keras 3 from what was saved of it; others as they are."""
    if isinstance(optimizer, dict) and "is_legacy_optimizer" in optimizer.get("config", {}):
        return tf_keras.optimizers.deserialize(optimizer)
    return optimizer
