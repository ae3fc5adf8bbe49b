"""Small models of many kinds, one train step of each: what a user may bring.

Activations outweigh weights and a step takes less than a second. Each maker in `ZOO` differs from
all others in its ops, in how its graph is wired, or in how its step is made: `Workload.optimizer`
and the models' own `train_step` are part of the case.
"""

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops
from workloads import Workload

L = keras.layers
Maker = Callable[[], Workload]

ZOO: dict[str, Maker] = {}
_CLASSES = "sparse_categorical_crossentropy"
_LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _zoo(maker: Maker) -> Maker:
    ZOO[maker.__name__.replace("_", "-")] = maker
    return maker


def _noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def _unit(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random(shape).astype("float32")


def _ids(high: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, high, shape).astype("int32")


def _padded(high: int, *shape: int) -> np.ndarray:
    """Ids from 1; each sequence ends in zeros."""
    lengths = np.random.default_rng(1).integers(shape[-1] // 2, shape[-1] + 1, shape[:-1])
    return np.where(np.arange(shape[-1]) < lengths[..., None], 1 + _ids(high - 1, *shape), 0)


# Image classifiers.


def _application(name: str, batch: int, side: int, optimizer: Any = None, **settings: Any) -> Maker:
    def build() -> keras.Model:
        make = getattr(keras.applications, name)
        return make(weights=None, input_shape=(side, side, 3), classes=10, **settings)

    def maker() -> Workload:
        x, y = 255 * _unit(batch, side, side, 3), _ids(10, batch)
        title = f"{name}, batch {batch}, {side} x {side}"
        return Workload(title, build, _CLASSES, x, y, optimizer=optimizer)

    return maker


ZOO["mobilenet"] = _application("MobileNet", 32, 48, alpha=0.5)
ZOO["mobilenet-v2"] = _application("MobileNetV2", 16, 48, alpha=0.5)
ZOO["mobilenet-v3"] = _application("MobileNetV3Small", 64, 48, alpha=0.75)
ZOO["efficientnet-b0"] = _application("EfficientNetB0", 12, 48, keras.optimizers.RMSprop)
ZOO["efficientnet-v2-b0"] = _application("EfficientNetV2B0", 16, 48)
ZOO["densenet121"] = _application("DenseNet121", 16, 48)
ZOO["nasnet-mobile"] = _application("NASNetMobile", 8, 48)
ZOO["xception"] = _application("Xception", 12, 71)


@_zoo
def vgg() -> Workload:
    """Convolutions and max pooling, then dense layers with dropout."""

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((48, 48, 3))])
        for width, depth in ((16, 2), (32, 2), (64, 3), (64, 3)):
            for _ in range(depth):
                model.add(L.Conv2D(width, 3, padding="same", activation="relu"))
            model.add(L.MaxPooling2D())
        for part in (L.Flatten(), L.Dense(128, activation="relu"), L.Dropout(0.5)):
            model.add(part)
        model.add(L.Dense(10, activation="softmax"))
        return model

    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True, use_ema=True)

    x, y = _noise(64, 48, 48, 3), _ids(10, 64)
    return Workload("VGG, batch 64, 48 x 48", build, _CLASSES, x, y, optimizer=optimizer)


@_zoo
def inception() -> Workload:
    """Four branches side by side, concatenated; an auxiliary classifier."""

    def convolve(h: Any, width: int, kernel: Any) -> Any:
        h = L.Conv2D(width, kernel, padding="same", use_bias=False)(h)
        return L.Activation("relu")(L.BatchNormalization(scale=False)(h))

    def block(h: Any, width: int) -> Any:
        pooled = L.AveragePooling2D(3, strides=1, padding="same")(h)
        branches = [
            convolve(h, width, 1),
            convolve(convolve(h, width, 1), width, 3),
            convolve(convolve(convolve(h, width, 1), width, (1, 7)), width, (7, 1)),
            convolve(pooled, width, 1),
        ]
        return L.Concatenate()(branches)

    def classify(h: Any, name: str) -> Any:
        return L.Dense(10, activation="softmax", name=name)(L.GlobalAveragePooling2D()(h))

    def build() -> keras.Model:
        image = keras.Input((32, 32, 3))
        h = block(block(convolve(image, 16, 3), 8), 12)
        early = classify(h, "early")
        h = block(block(L.MaxPooling2D(3, 2, padding="same")(h), 16), 16)
        return keras.Model(image, [classify(h, "late"), early])

    x, y = _noise(32, 32, 32, 3), _ids(10, 32)
    title = "Inception with an auxiliary output, batch 32, 32 x 32"
    return Workload(title, build, [_CLASSES] * 2, x, (y, y), loss_weights=[1.0, 0.3])


@_zoo
def group_norm_resnet() -> Workload:
    """Residual blocks with group normalization and swish, weights of samples."""

    def build() -> keras.Model:
        image = keras.Input((32, 32, 3))
        h = L.Conv2D(32, 3, padding="same")(image)
        for _ in range(4):
            inner = L.Activation("swish")(L.GroupNormalization(8)(h))
            inner = L.Conv2D(32, 3, padding="same")(inner)
            inner = L.Activation("swish")(L.GroupNormalization(8)(inner))
            h = L.Add()([h, L.Conv2D(32, 3, padding="same")(inner)])
        return keras.Model(image, L.Dense(10)(L.GlobalAveragePooling2D()(h)))

    x, y = _noise(24, 32, 32, 3), _ids(10, 24)
    title = "ResNet with GroupNorm, sample weights, batch 24, 32 x 32"
    return Workload(title, build, _LOGITS, x, y, sample_weight=_unit(24))


@_zoo
def convnext() -> Workload:
    """Depthwise 7 x 7, layer normalization, gelu, a scale for each channel, stochastic depth."""

    class Scale(L.Layer):
        def build(self, shape: Any) -> None:
            self.gamma = self.add_weight(shape=(shape[-1],), initializer="ones")

        def call(self, h: Any) -> Any:
            return h * self.gamma

    def build() -> keras.Model:
        image = keras.Input((64, 64, 3))
        h = L.LayerNormalization(epsilon=1e-6)(L.Conv2D(48, 4, strides=4)(image))
        for _ in range(5):
            inner = L.DepthwiseConv2D(7, padding="same")(h)
            inner = L.Dense(192, activation="gelu")(L.LayerNormalization(epsilon=1e-6)(inner))
            inner = Scale()(L.Dense(48)(inner))
            h = L.Add()([h, L.Dropout(0.2, noise_shape=(None, 1, 1, 1))(inner)])
        h = L.LayerNormalization()(L.GlobalAveragePooling2D()(h))
        return keras.Model(image, L.Dense(10)(h))

    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.AdamW(1e-3, weight_decay=0.05, clipnorm=1.0)

    x, y = _noise(16, 64, 64, 3), _ids(10, 16)
    title = "ConvNeXt, stochastic depth, batch 16, 64 x 64"
    return Workload(title, build, _LOGITS, x, y, optimizer=optimizer)


@_zoo
def squeeze_net() -> Workload:
    """Fire modules: two expansions of one squeezed tensor."""

    def fire(h: Any, squeezed: int, expanded: int) -> Any:
        h = L.Conv2D(squeezed, 1, activation="elu")(h)
        wide = L.Conv2D(expanded, 3, padding="same", activation="elu")(h)
        return L.Concatenate()([L.Conv2D(expanded, 1, activation="elu")(h), wide])

    def build() -> keras.Model:
        image = keras.Input((48, 48, 3))
        h = L.Conv2D(32, 3, padding="same", activation="elu")(image)
        h = fire(fire(h, 8, 24), 8, 24)
        h = fire(fire(L.MaxPooling2D()(h), 16, 48), 16, 48)
        h = L.Conv2D(10, 1)(L.Dropout(0.5)(h))
        return keras.Model(image, L.GlobalAveragePooling2D()(h))

    x, y = _noise(20, 48, 48, 3), np.eye(10, dtype="float32")[_ids(10, 20)]
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    return Workload("SqueezeNet, elu, batch 20, 48 x 48", build, loss, x, y)


@_zoo
def shuffle_net() -> Workload:
    """Channels are split, worked on by half and shuffled."""

    def shuffle(h: Any) -> Any:
        _, rows, columns, width = h.shape
        h = ops.reshape(h, (-1, rows, columns, 2, width // 2))
        return ops.reshape(ops.transpose(h, (0, 1, 2, 4, 3)), (-1, rows, columns, width))

    def build() -> keras.Model:
        image = keras.Input((32, 32, 3))
        h = L.Conv2D(48, 3, padding="same")(image)
        for _ in range(5):
            left, right = ops.split(h, 2, axis=-1)
            right = L.Conv2D(24, 1, use_bias=False)(right)
            right = L.Activation("relu6")(L.BatchNormalization()(right))
            right = L.BatchNormalization()(L.DepthwiseConv2D(3, padding="same")(right))
            h = shuffle(L.Concatenate()([left, L.Conv2D(24, 1, activation="relu6")(right)]))
        return keras.Model(image, L.Dense(10)(L.GlobalMaxPooling2D()(h)))

    x, y = _noise(32, 32, 32, 3), _ids(10, 32)
    return Workload("ShuffleNet, batch 32, 32 x 32", build, _LOGITS, x, y)


@_zoo
def capsules() -> Workload:
    """Capsules with three rounds of routing by agreement, margin loss."""

    def squash(s: Any) -> Any:
        square = ops.sum(ops.square(s), axis=-1, keepdims=True)
        return square / (1.0 + square) * s / ops.sqrt(square + 1e-7)

    class Route(L.Layer):
        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight(shape=(shape[1], 10, shape[2], 16))

        def call(self, u: Any) -> Any:
            votes = ops.einsum("bip,iopq->bioq", u, self.kernel)
            logits = ops.zeros_like(votes[..., :1])
            for _ in range(3):
                out = squash(ops.sum(ops.softmax(logits, axis=2) * votes, axis=1, keepdims=True))
                logits = logits + ops.sum(votes * out, axis=-1, keepdims=True)
            return ops.norm(out[:, 0] + 1e-7, axis=-1)

    def build() -> keras.Model:
        image = keras.Input((20, 20, 1))
        h = L.Conv2D(64, 5, activation="relu")(image)
        h = L.Reshape((-1, 8))(L.Conv2D(32, 5, strides=2)(h))
        return keras.Model(image, Route()(squash(h)))

    def margin(y_true: Any, y_pred: Any) -> Any:
        present = y_true * ops.square(ops.maximum(0.0, 0.9 - y_pred))
        absent = 0.5 * (1.0 - y_true) * ops.square(ops.maximum(0.0, y_pred - 0.1))
        return ops.sum(present + absent, axis=-1)

    x, y = _noise(64, 20, 20, 1), np.eye(10, dtype="float32")[_ids(10, 64)]
    return Workload("capsules, routing, batch 64", build, margin, x, y, optimizer=_adam)


def _adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(1e-3)


# Images to images.


@_zoo
def unet() -> Workload:
    """Skips from the way down to the way up; cross-entropy and Dice."""

    def double(h: Any, width: int) -> Any:
        for _ in range(2):
            h = L.Conv2D(width, 3, padding="same")(h)
            h = L.Activation("relu")(L.BatchNormalization()(h))
        return h

    def build() -> keras.Model:
        image = keras.Input((64, 64, 3))
        h, skips = image, []
        for width in (16, 32, 64):
            h = double(h, width)
            skips.append(h)
            h = L.MaxPooling2D()(h)
        h = double(h, 96)
        for width in (64, 32, 16):
            h = L.Conv2DTranspose(width, 2, strides=2)(h)
            h = double(L.Concatenate()([h, skips.pop()]), width)
        return keras.Model(image, L.Conv2D(1, 1, activation="sigmoid")(h))

    def loss(y_true: Any, y_pred: Any) -> Any:
        entropy = keras.losses.binary_crossentropy(y_true, y_pred)
        return ops.mean(entropy) + keras.losses.dice(y_true, y_pred)

    x, y = _noise(12, 64, 64, 3), (_noise(12, 64, 64, 1) > 0).astype("float32")
    return Workload("U-Net, Dice, batch 12, 64 x 64", build, loss, x, y, optimizer=_adam)


@_zoo
def denoising_autoencoder() -> Workload:
    """Noise, strided convolutions down, upsampling up, activity regularizers."""

    def convolve(width: int, **settings: Any) -> L.Layer:
        regularizer = keras.regularizers.L1(1e-5)
        return L.Conv2D(
            width,
            3,
            padding="same",
            activation="leaky_relu",
            activity_regularizer=regularizer,
            **settings,
        )

    def build() -> keras.Model:
        down = [convolve(width, strides=2) for width in (32, 48, 64)]
        up = [part for width in (64, 48, 32) for part in (L.UpSampling2D(), convolve(width))]
        ends = [L.GaussianNoise(0.2), convolve(16)], [L.Conv2D(3, 3, padding="same")]
        return keras.Sequential([keras.Input((48, 48, 3)), *ends[0], *down, *up, *ends[1]])

    x = _unit(24, 48, 48, 3)
    return Workload("denoising autoencoder, batch 24, 48 x 48", build, "mse", x, x)


@_zoo
def super_resolution() -> Workload:
    """Residual blocks without normalization, pixels rearranged from depth, Huber loss."""

    def build() -> keras.Model:
        image = keras.Input((24, 24, 3))
        first = h = L.Conv2D(48, 3, padding="same")(image)
        for _ in range(5):
            inner = L.Conv2D(48, 3, padding="same")(h)
            inner = L.Conv2D(48, 3, padding="same")(L.PReLU(shared_axes=[1, 2])(inner))
            h = h + 0.1 * inner
        h = L.Conv2D(48 * 4, 3, padding="same")(h + first)
        h = L.Lambda(lambda t: tf.nn.depth_to_space(t, 2), output_shape=(48, 48, 48))(h)
        coarse = L.UpSampling2D(2, interpolation="bilinear")(image)
        return keras.Model(image, L.Conv2D(3, 3, padding="same")(h) + coarse)

    x, y = _unit(24, 24, 24, 3), _unit(24, 48, 48, 3)
    return Workload("super-resolution, batch 24", build, keras.losses.Huber(0.1), x, y)


class _Step(keras.Model):
    """A train step of its own, whose loss is `loss_of`, which each model defines."""

    loss_of: Callable[[Any, Any], Any]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@_zoo
def vae() -> Workload:
    """Samples a code, decodes it; reconstruction and KL divergence in its own `train_step`."""

    class Sample(L.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.seed = keras.random.SeedGenerator(7)

        def call(self, mean: Any, log_variance: Any) -> Any:
            drawn = keras.random.normal(ops.shape(mean), seed=self.seed)
            return mean + ops.exp(0.5 * log_variance) * drawn

    class Vae(_Step):
        def loss_of(self, x: Any, y: Any) -> Any:
            decoded, mean, log_variance = self(x, training=True)
            entropy = keras.losses.binary_crossentropy(x, decoded)
            divergence = 1 + log_variance - ops.square(mean) - ops.exp(log_variance)
            reconstruction = ops.mean(ops.sum(entropy, axis=(1, 2)))
            return reconstruction - 0.5 * ops.mean(ops.sum(divergence, axis=1))

    def build() -> keras.Model:
        image = keras.Input((28, 28, 1))
        h = L.Conv2D(32, 3, strides=2, padding="same", activation="relu")(image)
        h = L.Conv2D(64, 3, strides=2, padding="same", activation="relu")(h)
        h = L.Dense(64, activation="relu")(L.Flatten()(h))
        mean, log_variance = L.Dense(16)(h), L.Dense(16)(h)
        h = Sample()(mean, log_variance)
        h = L.Reshape((7, 7, 32))(L.Dense(7 * 7 * 32, activation="relu")(h))
        for width in (64, 32):
            h = L.Conv2DTranspose(width, 3, strides=2, padding="same", activation="relu")(h)
        h = L.Conv2DTranspose(1, 3, padding="same", activation="sigmoid")(h)
        return Vae(image, [h, mean, log_variance])

    x = _unit(128, 28, 28, 1)
    return Workload("VAE, batch 128, 28 x 28", build, None, x, x, optimizer=_adam)


@_zoo
def vq_vae() -> Workload:
    """The nearest code of a book stands for each position; straight-through gradients."""

    class Quantize(L.Layer):
        def build(self, shape: Any) -> None:
            self.codes = self.add_weight(shape=(shape[-1], 128), initializer="random_normal")

        def call(self, h: Any) -> Any:
            flat = ops.reshape(h, (-1, h.shape[-1]))
            distances = ops.sum(flat**2, axis=1, keepdims=True) + ops.sum(self.codes**2, axis=0)
            nearest = ops.argmin(distances - 2 * ops.matmul(flat, self.codes), axis=1)
            picked = ops.take(ops.transpose(self.codes), nearest, axis=0)
            picked = ops.reshape(picked, ops.shape(h))
            commitment = ops.mean(ops.square(ops.stop_gradient(picked) - h))
            self.add_loss(0.25 * commitment + ops.mean((picked - ops.stop_gradient(h)) ** 2))
            return h + ops.stop_gradient(picked - h)

    def build() -> keras.Model:
        image = keras.Input((32, 32, 3))
        h = L.Conv2D(32, 4, strides=2, padding="same", activation="relu")(image)
        h = L.Conv2D(64, 3, padding="same", activation="relu")(h)
        h = Quantize()(L.Conv2D(32, 1)(h))
        h = L.Conv2D(64, 3, padding="same", activation="relu")(h)
        h = L.Conv2DTranspose(32, 4, strides=2, padding="same", activation="relu")(h)
        return keras.Model(image, L.Conv2D(3, 3, padding="same")(h))

    x = _unit(32, 32, 32, 3)
    return Workload("VQ-VAE, batch 32, 32 x 32", build, "mse", x, x)


class _TwoOptimizers(keras.Model):
    """A critic and a generator, each with an optimizer of its own."""

    def compile(self, optimizer: Any, **settings: Any) -> None:
        super().compile(optimizer=optimizer, **settings)
        self.second = type(optimizer).from_config(optimizer.get_config())
        self.optimizer.build(self.get_layer("critic").trainable_variables)
        self.second.build(self.get_layer("generator").trainable_variables)


class _Gan(_TwoOptimizers):
    """Both tapes are open at once."""

    def train_step(self, data: Any) -> dict[str, Any]:
        noise, real = data
        generator, critic = self.get_layer("generator"), self.get_layer("critic")
        entropy = keras.losses.BinaryCrossentropy(from_logits=True)
        with tf.GradientTape() as critic_tape, tf.GradientTape() as generator_tape:
            fake = generator(noise, training=True)
            for_real, for_fake = critic(real, training=True), critic(fake, training=True)
            loss = entropy(tf.ones_like(for_real), for_real)
            loss += entropy(tf.zeros_like(for_fake), for_fake)
            critic_loss = self.optimizer.scale_loss(loss)
            generator_loss = self.second.scale_loss(entropy(tf.ones_like(for_fake), for_fake))
        gradients = critic_tape.gradient(critic_loss, critic.trainable_variables)
        self.optimizer.apply(gradients, critic.trainable_variables)
        gradients = generator_tape.gradient(generator_loss, generator.trainable_variables)
        self.second.apply(gradients, generator.trainable_variables)
        return {"loss": loss + generator_loss}


@_zoo
def dcgan() -> Workload:
    """Two networks, two tapes, two optimizers in one step."""

    def build() -> keras.Model:
        generator = keras.Sequential([L.Dense(8 * 8 * 48), L.Reshape((8, 8, 48))], name="generator")
        for width in (48, 32):
            generator.add(L.BatchNormalization())
            generator.add(L.LeakyReLU(0.2))
            generator.add(L.Conv2DTranspose(width, 4, strides=2, padding="same", use_bias=False))
        generator.add(L.LeakyReLU(0.2))
        generator.add(L.Conv2D(3, 3, padding="same", activation="tanh"))
        critic = keras.Sequential(name="critic")
        for width in (32, 64):
            critic.add(L.Conv2D(width, 4, strides=2, padding="same"))
            critic.add(L.LeakyReLU(0.2))
            critic.add(L.Dropout(0.3))
        critic.add(L.Flatten())
        critic.add(L.Dense(1))
        noise = keras.Input((64,))
        return _Gan(noise, critic(generator(noise)))

    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.Adam(2e-4, beta_1=0.5)

    x, y = _noise(48, 64), np.tanh(_noise(48, 32, 32, 3))
    return Workload("DCGAN, batch 48, 32 x 32", build, None, x, y, optimizer=optimizer)


@_zoo
def wgan_gp() -> Workload:
    """A critic of convolutions whose gradient of the images is held near 1."""

    class Critic(_Step):
        def loss_of(self, real: Any, fake: Any) -> Any:
            mixed = 0.7 * real + 0.3 * fake
            with tf.GradientTape() as tape:
                tape.watch(mixed)
                judged = self(mixed, training=True)
            slope = tape.gradient(judged, mixed)
            norms = tf.sqrt(tf.reduce_sum(tf.square(slope), axis=(1, 2, 3)) + 1e-12)
            gain = tf.reduce_mean(self(fake, training=True) - self(real, training=True))
            return gain + 10.0 * tf.reduce_mean(tf.square(norms - 1.0))

    def build() -> keras.Model:
        image = keras.Input((32, 32, 3))
        h = image
        for width in (24, 48, 64):
            h = L.Conv2D(width, 5, strides=2, padding="same")(h)
            h = L.LayerNormalization()(L.Activation("softplus")(h))
        return Critic(image, L.Dense(1)(L.Flatten()(h)))

    x, y = _noise(48, 32, 32, 3), _noise(48, 32, 32, 3, seed=1)
    return Workload("WGAN-GP critic, batch 48, 32 x 32", build, None, x, y, optimizer=_adam)


@_zoo
def spectral_discriminator() -> Workload:
    """Spectral normalization and hinge loss."""

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((32, 32, 3))])
        for width, strides in ((32, 1), (32, 2), (64, 1), (64, 2)):
            convolution = L.Conv2D(width, 3, strides=strides, padding="same")
            model.add(L.SpectralNormalization(convolution))
            model.add(L.LeakyReLU(0.1))
        model.add(L.Flatten())
        model.add(L.SpectralNormalization(L.Dense(1, activation="tanh")))
        return model

    x, y = _noise(64, 32, 32, 3), 2.0 * _ids(2, 64, 1).astype("float32") - 1.0
    return Workload("spectral normalization, hinge, batch 64", build, "hinge", x, y)


@_zoo
def perceptual_loss() -> Workload:
    """The loss compares Gram matrices of what a frozen network sees."""

    class Stylize(_Step):
        def loss_of(self, x: Any, y: Any) -> Any:
            drawn, *seen = self(x, training=True)
            loss = ops.mean(ops.abs(drawn - y))
            for feature in seen:
                flat = ops.reshape(feature, (-1, feature.shape[1] ** 2, feature.shape[3]))
                gram = ops.einsum("bpi,bpj->bij", flat, flat) / flat.shape[1]
                loss += 1e-2 * ops.mean(ops.square(gram - 1.0))
            return loss

    def build() -> keras.Model:
        image = keras.Input((48, 48, 3))
        h = L.Conv2D(24, 5, padding="same", activation="silu")(image)
        h = L.Conv2D(24, 3, padding="same", activation="silu")(h)
        h = drawn = L.Conv2D(3, 3, padding="same", activation="sigmoid")(h)
        seen = []
        for width in (24, 32):
            h = L.Conv2D(width, 3, padding="same", activation="relu", trainable=False)(h)
            seen.append(h)
            h = L.AveragePooling2D(2)(h)
        return Stylize(image, [drawn, *seen])

    x = _unit(16, 48, 48, 3)
    return Workload("perceptual loss, batch 16, 48 x 48", build, None, x, x, optimizer=_adam)


# Similarities.


def _tower(width: int = 32) -> keras.Sequential:
    parts: list[L.Layer] = [L.Rescaling(2.0, -1.0)]
    for _ in range(3):
        parts += [L.Conv2D(width, 3, padding="same"), L.BatchNormalization(), L.ReLU()]
        parts.append(L.MaxPooling2D())
    return keras.Sequential([*parts, L.Flatten(), L.Dense(64), L.UnitNormalization()])


@_zoo
def siamese() -> Workload:
    """One tower for two images, contrastive loss."""

    def build() -> keras.Model:
        left, right, tower = keras.Input((32, 32, 3)), keras.Input((32, 32, 3)), _tower()
        square = ops.sum(ops.square(tower(left) - tower(right)), axis=1, keepdims=True)
        return keras.Model([left, right], ops.sqrt(ops.maximum(square, 1e-7)))

    def contrastive(y_true: Any, y_pred: Any) -> Any:
        far = ops.square(ops.maximum(1.0 - y_pred, 0.0))
        return ops.mean(y_true * ops.square(y_pred) + (1.0 - y_true) * far)

    x, y = (_unit(48, 32, 32, 3), _noise(48, 32, 32, 3)), _ids(2, 48, 1).astype("float32")
    return Workload("siamese towers, batch 2 x 48, 32 x 32", build, contrastive, x, y)


@_zoo
def triplet() -> Workload:
    """Three images through one tower, in one batch; the loss is added by a layer."""

    class Margin(L.Layer):
        def call(self, h: Any) -> Any:
            anchor, near, far = ops.split(h, 3, axis=0)
            gap = ops.sum(ops.square(anchor - near) - ops.square(anchor - far), axis=1)
            self.add_loss(ops.mean(ops.relu(gap + 0.2)))
            return anchor

    def build() -> keras.Model:
        images = [keras.Input((32, 32, 3)) for _ in range(3)]
        return keras.Model(images, Margin()(_tower(24)(ops.concatenate(images, axis=0))))

    x = tuple(_noise(32, 32, 32, 3, seed=seed) for seed in range(3))
    loss = keras.losses.CosineSimilarity()
    return Workload("triplets, batch 3 x 32, 32 x 32", build, loss, x, _noise(32, 64))


@_zoo
def sim_clr() -> Workload:
    """Two views of each image; every other image of the batch is a negative."""

    class SimClr(_Step):
        def loss_of(self, x: Any, y: Any) -> Any:
            first, second = self(x, training=True), self(x[:, :, ::-1], training=True)
            similar = ops.matmul(first, ops.transpose(second)) / 0.1
            labels = ops.arange(ops.shape(similar)[0])
            return ops.mean(
                keras.losses.sparse_categorical_crossentropy(labels, similar, from_logits=True)
            )

    def build() -> keras.Model:
        image = keras.Input((32, 32, 3))
        moved = L.RandomContrast(0.3, value_range=(0, 1), seed=3)(image)
        return SimClr(image, _tower()(L.GaussianNoise(0.1, seed=4)(moved)))

    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.Lion(1e-4)

    x = _unit(48, 32, 32, 3)
    return Workload("SimCLR, batch 2 x 48, 32 x 32", build, None, x, x, optimizer=optimizer)


@_zoo
def momentum_teacher() -> Workload:
    """A student follows a slowly moving copy of itself, which its step updates."""

    class Follow(_Step):
        def loss_of(self, x: Any, y: Any) -> Any:
            student, teacher = self.get_layer("student"), self.get_layer("teacher")
            target = ops.softmax(teacher(x, training=False) / 0.5)
            return ops.mean(-ops.sum(target * ops.log_softmax(student(y, training=True)), axis=1))

        def train_step(self, data: Any) -> dict[str, Any]:
            logs = super().train_step(data)
            slowly, quickly = (self.get_layer(name).weights for name in ("teacher", "student"))
            for slow, fast in zip(slowly, quickly, strict=True):
                slow.assign(0.9 * slow + 0.1 * fast)
            return logs

    def tower(name: str, **settings: Any) -> keras.Sequential:
        parts = [
            L.Conv2D(32, 3, strides=2, padding="same", activation="gelu"),
            L.Conv2D(48, 3, padding="same", activation="gelu"),
            L.Conv2D(48, 3, strides=2, padding="same", activation="gelu"),
        ]
        return keras.Sequential([*parts, L.Flatten(), L.Dense(64)], name=name, **settings)

    def build() -> keras.Model:
        image = keras.Input((32, 32, 3))
        teacher = tower("teacher", trainable=False)
        return Follow(image, [tower("student")(image), teacher(image)])

    x, y = _noise(128, 32, 32, 3), _noise(128, 32, 32, 3, seed=1)
    return Workload("momentum teacher, batch 128, 32 x 32", build, None, x, y)


@_zoo
def distillation() -> Workload:
    """A teacher that is not trained gives the targets of a student, KL divergence."""

    def net(image: Any, width: int, trainable: bool) -> Any:
        h = image
        for _ in range(3):
            h = L.Conv2D(width, 3, padding="same", trainable=trainable, activation="relu")(h)
        h = L.Dense(10, trainable=trainable)(L.GlobalAveragePooling2D()(L.MaxPooling2D()(h)))
        return ops.softmax(h / 2.0)

    def build() -> keras.Model:
        image = keras.Input((32, 32, 3))
        teacher, student = net(image, 48, trainable=False), net(image, 24, trainable=True)
        return keras.Model(image, [teacher, student])

    class Distill(_Step):
        def loss_of(self, x: Any, y: Any) -> Any:
            teacher, student = self(x, training=True)
            return ops.mean(keras.losses.kl_divergence(ops.stop_gradient(teacher), student))

    def build_step() -> keras.Model:
        model = build()
        return Distill(model.inputs, model.outputs)

    x = _noise(48, 32, 32, 3)
    return Workload("distillation, batch 48, 32 x 32", build_step, None, x, x)


# Sound and other signals.


@_zoo
def wavenet() -> Workload:
    """Dilated causal convolutions with gates, residuals and skips."""

    def build() -> keras.Model:
        wave = keras.Input((512, 1))
        h = L.Conv1D(32, 2, padding="causal")(wave)
        skips = []
        for n in range(7):
            gated = [
                L.Conv1D(32, 2, padding="causal", dilation_rate=2**n, activation=name)(h)
                for name in ("tanh", "sigmoid")
            ]
            inner = L.Multiply()(gated)
            skips.append(L.Conv1D(32, 1)(inner))
            h = L.Add()([h, L.Conv1D(32, 1)(inner)])
        h = L.Conv1D(64, 1, activation="relu")(L.ReLU()(L.Add()(skips)))
        return keras.Model(wave, L.Conv1D(64, 1)(h))

    x, y = _noise(16, 512, 1), _ids(64, 16, 512)
    return Workload("WaveNet, batch 16 x 512", build, _LOGITS, x, y, optimizer=_adam)


@_zoo
def speech_ctc() -> Workload:
    """A spectrum is taken in the model; convolutions, CTC."""

    def spectrum(t: Any) -> Any:
        return tf.math.log1p(tf.abs(tf.signal.stft(t, 128, 64)))

    def build() -> keras.Model:
        wave = keras.Input((8000,))
        h = L.Lambda(spectrum, output_shape=(124, 65))(wave)
        for dilation in (1, 2, 4):
            h = L.Conv1D(96, 5, padding="same", dilation_rate=dilation)(h)
            h = L.Activation("hard_silu")(L.BatchNormalization()(h))
            h = L.SpatialDropout1D(0.1)(h)
        return keras.Model(wave, L.Dense(28)(h))

    x, y = _noise(64, 8000), 1 + _ids(27, 64, 20)
    return Workload("spectrogram, CTC, batch 64", build, keras.losses.CTC(), x, y)


@_zoo
def separable_signals() -> Workload:
    """Depthwise and separable 1D convolutions, average pooling, heads of a multi-task net."""

    def build() -> keras.Model:
        signal = keras.Input((512, 8))
        h = signal
        for width in (48, 64, 64):
            h = L.SeparableConv1D(width, 7, padding="same", activation="mish")(h)
            h = L.DepthwiseConv1D(5, padding="same", activation="squareplus")(h)
            h = L.AveragePooling1D(2)(h)
        h = L.GlobalAveragePooling1D()(h)
        heads = [L.Dense(1, name="rate"), L.Dense(1, name="sign"), L.Dense(5, name="kind")]
        return keras.Model(signal, [head(h) for head in heads])

    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.Nadam(1e-3)

    x, y = _noise(32, 512, 8), (_unit(32, 1), _ids(2, 32, 1).astype("float32"), _ids(5, 32))
    losses = ["log_cosh", keras.losses.BinaryFocalCrossentropy(from_logits=True), _LOGITS]
    weights, title = [1.0, 0.5, 2.0], "separable Conv1D, three tasks, batch 32 x 512"
    return Workload(title, build, losses, x, y, loss_weights=weights, optimizer=optimizer)


@_zoo
def video() -> Workload:
    """Convolutions in space and time."""

    def build() -> keras.Model:
        clip = keras.Input((8, 32, 32, 3))
        h = clip
        for width in (16, 32):
            h = L.Conv3D(width, 3, padding="same", activation="selu")(h)
            h = L.AlphaDropout(0.1)(h)
            h = L.MaxPooling3D((1, 2, 2))(h)
        h = L.Conv3D(32, 3, strides=(2, 1, 1), padding="same", activation="selu")(h)
        return keras.Model(clip, L.Dense(6, activation="softmax")(L.GlobalAveragePooling3D()(h)))

    x, y = _noise(8, 8, 32, 32, 3), _ids(6, 8)
    return Workload("Conv3D, batch 8 x 8 x 32 x 32", build, _CLASSES, x, y)


@_zoo
def conv_lstm() -> Workload:
    """A ConvLSTM in a loop predicts the next frames."""

    def build() -> keras.Model:
        clip = keras.Input((8, 20, 20, 1))
        h = L.ConvLSTM2D(16, 3, padding="same", return_sequences=True)(clip)
        h = L.ConvLSTM2D(16, 3, padding="same", return_sequences=True)(L.LayerNormalization()(h))
        return keras.Model(clip, L.TimeDistributed(L.Conv2D(1, 3, padding="same"))(h))

    x = _unit(16, 8, 20, 20, 1)
    return Workload("ConvLSTM, batch 16 x 8 x 20 x 20", build, "mae", x, x)


# Text.


@_zoo
def text_cnn() -> Workload:
    """Embedded words, three widths of convolution, the largest of each over time."""

    def build() -> keras.Model:
        words = keras.Input((128,), dtype="int32")
        h = L.SpatialDropout1D(0.2)(L.Embedding(2000, 64)(words))
        found = [L.Conv1D(64, k, activation="relu", padding="same")(h) for k in (3, 4, 5)]
        h = L.Concatenate()([L.GlobalMaxPooling1D()(one) for one in found])
        return keras.Model(words, L.Dense(1, activation="sigmoid")(L.Dropout(0.5)(h)))

    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.Adagrad(0.01)

    x, y = _ids(2000, 96, 128), _ids(2, 96, 1).astype("float32")
    title = "TextCNN, batch 96 x 128"
    return Workload(title, build, "binary_crossentropy", x, y, optimizer=optimizer)


@_zoo
def bilstm_tagger() -> Workload:
    """Two bidirectional LSTMs over padded words, recurrent dropout."""

    def build() -> keras.Model:
        words = keras.Input((48,), dtype="int32")
        h = L.Embedding(500, 64, mask_zero=True)(words)
        for _ in range(2):
            rnn = L.LSTM(64, return_sequences=True, dropout=0.1, recurrent_dropout=0.2)
            h = L.Bidirectional(rnn)(h)
        return keras.Model(words, L.TimeDistributed(L.Dense(12))(h))

    x, y = _padded(500, 48, 48), _ids(12, 48, 48)
    return Workload("BiLSTM tagger, batch 48 x 48", build, _LOGITS, x, y)


@_zoo
def gru_seq2seq() -> Workload:
    """The state of an encoder starts a decoder; dot-product attention."""

    def build() -> keras.Model:
        source, target = (keras.Input((40,), dtype="int32") for _ in range(2))
        embedded = L.Embedding(800, 96)(source)
        encoded, state = L.GRU(96, return_sequences=True, return_state=True)(embedded)
        embedded = L.Embedding(800, 96)(target)
        decoded = L.GRU(96, return_sequences=True)(embedded, initial_state=state)
        context = L.Attention()([decoded, encoded])
        h = L.Dense(96, activation="tanh")(L.Concatenate()([decoded, context]))
        return keras.Model([source, target], L.Dense(800)(h))

    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.Adam(1e-3, gradient_accumulation_steps=2)

    words = _ids(800, 3, 48, 40)
    x, y, title = (words[0], words[1]), words[2], "GRU seq2seq, accumulation, batch 48 x 40"
    return Workload(title, build, _LOGITS, x, y, optimizer=optimizer)


@_zoo
def masked_rnn_regression() -> Workload:
    """Masked time steps, stacked SimpleRNN and GRU, a layer for each step."""

    def build() -> keras.Model:
        series = keras.Input((60, 12))
        h = L.Masking()(series)
        h = L.TimeDistributed(L.Dense(96, activation="gelu"))(h)
        h = L.SimpleRNN(96, return_sequences=True)(h)
        h = L.GRU(64, recurrent_dropout=0.1)(h)
        return keras.Model(series, L.Dense(1)(h))

    x = _noise(96, 60, 12) * (np.arange(60) < 45)[None, :, None]
    return Workload(
        "masked RNNs, batch 96 x 60", build, "mae", x.astype("float32"), _noise(96, 1), 7
    )


def _block(h: Any, heads: int, width: int, activation: Any, **settings: Any) -> Any:
    normed = L.LayerNormalization()(h)
    attended = L.MultiHeadAttention(heads, width // heads, dropout=0.1)(normed, normed, **settings)
    h = L.Add()([h, attended])
    inner = L.Dense(4 * width, activation=activation)(L.LayerNormalization()(h))
    return L.Add()([h, L.Dropout(0.1)(L.Dense(width)(inner))])


@_zoo
def gpt() -> Workload:
    """A causal decoder whose embedding is also its readout."""

    def build() -> keras.Model:
        words = keras.Input((64,), dtype="int32")
        embedding, positions = L.ReversibleEmbedding(500, 64), L.Embedding(64, 64)
        h = embedding(words) + positions(ops.arange(64))
        for _ in range(3):
            h = _block(h, 4, 64, "gelu", use_causal_mask=True)
        return keras.Model(words, embedding(L.LayerNormalization()(h), reverse=True))

    def optimizer() -> keras.optimizers.Optimizer:
        schedule = keras.optimizers.schedules.CosineDecay(1e-3, 100, warmup_steps=2)
        return keras.optimizers.AdamW(schedule, global_clipnorm=1.0)

    words = _ids(500, 2, 16, 64)
    title = "decoder, tied embedding, batch 16 x 64"
    return Workload(title, build, _LOGITS, words[0], words[1], optimizer=optimizer)


@_zoo
def llama() -> Workload:
    """RMS normalization, rotary positions, grouped queries, SwiGLU."""

    class Rotate(L.Layer):
        def call(self, h: Any) -> Any:
            _, length, _, size = h.shape
            rates = 1.0 / 10000.0 ** (np.arange(0, size, 2) / size)
            angles = (np.arange(length)[:, None] * rates)[None, :, None].astype("float32")
            left, right = ops.split(h, 2, axis=-1)
            cos, sin = ops.cos(angles), ops.sin(angles)
            return ops.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)

    def attend(h: Any) -> Any:
        query = Rotate()(L.EinsumDense("btw,whd->bthd", (64, 4, 16))(h))
        key = Rotate()(L.EinsumDense("btw,whd->bthd", (64, 2, 16))(h))
        value = L.EinsumDense("btw,whd->bthd", (64, 2, 16))(h)
        key, value = ops.repeat(key, 2, axis=2), ops.repeat(value, 2, axis=2)
        causal = np.triu(np.full((64, 64), -1e9, "float32"), 1)
        scores = ops.einsum("bthd,bshd->bhts", query, key) / 4.0 + causal
        return L.EinsumDense("bthd,hdw->btw", (64, 64))(
            ops.einsum("bhts,bshd->bthd", ops.softmax(scores), value)
        )

    def build() -> keras.Model:
        words = keras.Input((64,), dtype="int32")
        h = L.Embedding(500, 64)(words)
        for _ in range(3):
            h = h + attend(L.RMSNormalization()(h))
            normed = L.RMSNormalization()(h)
            gated = ops.silu(L.Dense(160, use_bias=False)(normed))
            h = h + L.Dense(64, use_bias=False)(gated * L.Dense(160, use_bias=False)(normed))
        return keras.Model(words, L.Dense(500, use_bias=False)(L.RMSNormalization()(h)))

    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.Adafactor(1e-3)

    words = _ids(500, 2, 24, 64)
    title = "rotary decoder, SwiGLU, batch 24 x 64"
    return Workload(title, build, _LOGITS, words[0], words[1], optimizer=optimizer)


@_zoo
def linear_attention() -> Workload:
    """Keys and values are summed over time before queries read them."""

    def attend(h: Any) -> Any:
        query, key = (ops.elu(L.Dense(96)(h)) + 1.0 for _ in range(2))
        memory = ops.einsum("btk,btv->bkv", key, L.Dense(96)(h))
        scale = ops.einsum("btk,bk->bt", query, ops.sum(key, axis=1))
        return ops.einsum("btk,bkv->btv", query, memory) / scale[..., None]

    def build() -> keras.Model:
        series = keras.Input((128, 16))
        h = L.Dense(96)(series)
        for _ in range(3):
            h = L.LayerNormalization()(h + attend(h))
            h = L.LayerNormalization()(h + L.Dense(96)(L.Dense(192, activation="celu")(h)))
        return keras.Model(series, L.Dense(16)(h))

    x = _noise(24, 128, 16)
    return Workload("linear attention, batch 24 x 128", build, "mse", x, x, optimizer=_adam)


@_zoo
def fnet() -> Workload:
    """Fourier transforms mix the positions."""

    def mix(t: Any) -> Any:
        return tf.math.real(tf.signal.fft2d(tf.cast(t, tf.complex64)))

    def build() -> keras.Model:
        words = keras.Input((64,), dtype="int32")
        h = L.Embedding(500, 96)(words)
        for _ in range(3):
            h = L.LayerNormalization()(h + L.Lambda(mix, output_shape=(64, 96))(h))
            inner = L.Dense(96)(L.Dense(192, activation="gelu")(h))
            h = L.LayerNormalization()(h + L.Dropout(0.1)(inner))
        return keras.Model(words, L.Dense(5)(L.GlobalAveragePooling1D()(h)))

    x, y = _ids(500, 32, 64), _ids(5, 32)
    return Workload("FNet, batch 32 x 64", build, _LOGITS, x, y)


@_zoo
def mixture_of_experts() -> Workload:
    """Every expert works on every word, a gate weighs the two best."""

    def experts(h: Any) -> Any:
        gate = ops.softmax(L.Dense(4)(h))
        best, _ = ops.top_k(gate, 2)
        gate = ops.where(gate >= best[..., 1:], gate, 0.0)
        inner = L.EinsumDense("btw,ewf->btef", (None, 4, 128), activation="gelu")(h)
        return ops.einsum(
            "bte,btew->btw", gate, L.EinsumDense("btef,efw->btew", (None, 4, 64))(inner)
        )

    def build() -> keras.Model:
        words = keras.Input((48,), dtype="int32")
        h = L.Embedding(500, 64)(words)
        for _ in range(2):
            h = h + L.MultiHeadAttention(4, 16)(h, h)
            h = h + experts(L.LayerNormalization()(h))
        return keras.Model(words, L.Dense(500)(h))

    words = _ids(500, 2, 24, 48)
    return Workload("experts, batch 24 x 48", build, _LOGITS, words[0], words[1], optimizer=_adam)


# Images as tokens.


def _patches(image: Any, size: int, width: int) -> Any:
    h = L.Conv2D(width, size, strides=size)(image)
    return L.Reshape((-1, width))(h)


@_zoo
def vit() -> Workload:
    """Patches, a class token, transformer blocks."""

    class Tokens(L.Layer):
        def build(self, shape: Any) -> None:
            self.first = self.add_weight(shape=(1, 1, shape[-1]), name="first")
            self.places = self.add_weight(shape=(1, shape[1] + 1, shape[-1]), name="places")

        def call(self, h: Any) -> Any:
            first = ops.repeat(self.first, ops.shape(h)[0], axis=0)
            return ops.concatenate([first, h], axis=1) + self.places

    def build() -> keras.Model:
        image = keras.Input((32, 32, 3))
        h = Tokens()(_patches(image, 4, 64))
        for _ in range(4):
            h = _block(h, 4, 64, "gelu")
        return keras.Model(image, L.Dense(10)(L.LayerNormalization()(h)[:, 0]))

    x, y = _noise(16, 32, 32, 3), _ids(10, 16)
    return Workload("ViT, batch 16, 64 patches", build, _LOGITS, x, y)


@_zoo
def mlp_mixer() -> Workload:
    """Dense layers over patches and over channels in turn."""

    def mix(h: Any, inner: int) -> Any:
        outer = h.shape[-1]
        return L.Dense(outer)(L.Dense(inner, activation="gelu")(h))

    def build() -> keras.Model:
        image = keras.Input((32, 32, 3))
        h = _patches(image, 4, 96)
        for _ in range(3):
            turned = ops.transpose(L.LayerNormalization()(h), (0, 2, 1))
            h = h + ops.transpose(mix(turned, 128), (0, 2, 1))
            h = h + mix(L.LayerNormalization()(h), 192)
        return keras.Model(image, L.Dense(10)(L.GlobalAveragePooling1D()(h)))

    x, y = _noise(32, 32, 32, 3), _ids(10, 32)
    return Workload("MLP-Mixer, batch 32, 64 patches", build, _LOGITS, x, y)


# Tables, sets and graphs.


@_zoo
def residual_mlp() -> Workload:
    """`h + relu(dense(h))`."""

    def build() -> keras.Model:
        row = keras.Input((128,))
        h = row
        for _ in range(8):
            h = h + L.Dense(128, activation="relu")(h)
        return keras.Model(row, L.Dense(1)(h))

    x = 0.1 * _noise(8192, 128)
    return Workload("residual MLP, batch 8192", build, "mse", x, x[:, :1], optimizer=_adam)


@_zoo
def rezero() -> Workload:
    """Residual branches scaled by one number each, which starts at zero; weight decay."""

    class Scaled(L.Layer):
        def build(self, shape: Any) -> None:
            self.alpha = self.add_weight(shape=(), initializer="zeros")

        def call(self, h: Any) -> Any:
            return self.alpha * h

    def build() -> keras.Model:
        row = keras.Input((128,))
        h = row
        for _ in range(6):
            inner = L.Dense(128, activation="tanh", kernel_regularizer="l2")(h)
            h = L.Add()([h, Scaled()(L.Dropout(0.2)(inner))])
        return keras.Model(row, L.Dense(8, activation="softmax")(h))

    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=1e-4)

    x, y = _noise(6144, 128), _ids(8, 6144)
    return Workload("ReZero MLP, batch 6144", build, _CLASSES, x, y, optimizer=optimizer)


def _mlp_of(names: str) -> Callable[[], keras.Model]:
    def activation(name: str) -> L.Layer:
        return L.PReLU() if name == "prelu" else L.Activation(name)

    def build() -> keras.Model:
        row = h = keras.Input((64,))
        for name in names.split():
            h = L.Dense(128)(h)
            # A layer `Activation` takes its shape for granted, which glu halves.
            h = ops.glu(h) if name == "glu" else activation(name)(h)
        return keras.Model(row, L.Dense(4)(h))

    return build


@_zoo
def smooth_activations() -> Workload:
    """An MLP, each layer with another smooth activation."""
    build = _mlp_of("mish squareplus softplus celu selu silu gelu glu soft_shrink sparse_plus")
    x, y = _noise(3072, 64), _noise(3072, 4)
    return Workload("MLP, smooth activations, batch 3072", build, "mse", x, y)


@_zoo
def bounded_activations() -> Workload:
    """An MLP, each layer with another activation that is bounded, cut or normalized."""
    build = _mlp_of(
        "hard_silu hard_tanh hard_sigmoid log_softmax prelu relu6 softsign tanh_shrink "
        "log_sigmoid softmax hard_shrink"
    )
    x, y = _noise(3072, 64), _noise(3072, 4)
    return Workload("MLP, bounded activations, batch 3072", build, "mae", x, y)


@_zoo
def highway() -> Workload:
    """A gate mixes each layer with its input; maxout at the end."""

    def build() -> keras.Model:
        row = keras.Input((96,))
        h = row
        for _ in range(5):
            gate = L.Dense(96, activation="sigmoid", bias_initializer="ones")(h)
            h = gate * L.Dense(96, activation="relu")(h) + (1.0 - gate) * h
        pieces = L.Reshape((24, 4))(L.Dense(96)(h))
        return keras.Model(row, L.Dense(3)(ops.max(pieces, axis=-1)))

    x, y = _noise(4096, 96), _ids(3, 4096)
    return Workload("highway, maxout, batch 4096", build, _LOGITS, x, y)


@_zoo
def deep_fm() -> Workload:
    """Factorization machine and MLP on shared embeddings, wide part, numbers and ids."""

    def build() -> keras.Model:
        ids, numbers = keras.Input((16,), dtype="int32"), keras.Input((8,))
        embedded = L.Embedding(1000, 16)(ids)
        square = ops.square(ops.sum(embedded, axis=1))
        pairs = 0.5 * ops.sum(square - ops.sum(ops.square(embedded), axis=1), axis=1, keepdims=True)
        wide = ops.sum(L.Embedding(1000, 1)(ids), axis=1) + L.Dense(1)(numbers)
        h = L.Concatenate()([L.Flatten()(embedded), numbers])
        for _ in range(3):
            h = L.Dropout(0.1)(L.Dense(192, activation="relu")(h))
            h = L.BatchNormalization()(h)
        return keras.Model([ids, numbers], ops.sigmoid(pairs + wide + L.Dense(1)(h)))

    x, y = (_ids(1000, 4096, 16), _noise(4096, 8)), _ids(2, 4096, 1).astype("float32")
    title = "DeepFM, batch 4096"
    return Workload(title, build, "binary_crossentropy", x, y, optimizer=_adam)


@_zoo
def dlrm() -> Workload:
    """Products of all pairs of embeddings, cross layers."""

    def cross(first: Any, h: Any) -> Any:
        return first * L.Dense(h.shape[-1])(h) + h

    def build() -> keras.Model:
        ids, numbers = keras.Input((12,), dtype="int32"), keras.Input((8,))
        dense = L.Dense(16, activation="relu")(L.Dense(64, activation="relu")(numbers))
        vectors = L.Concatenate(axis=1)([L.Embedding(500, 16)(ids), L.Reshape((1, 16))(dense)])
        pairs = ops.matmul(vectors, ops.transpose(vectors, (0, 2, 1)))
        upper = [i * 13 + j for i in range(13) for j in range(i + 1, 13)]
        first = L.Concatenate()([ops.take(L.Reshape((169,))(pairs), upper, axis=1), dense])
        h = cross(first, cross(first, cross(first, first)))
        return keras.Model([ids, numbers], L.Dense(1)(L.Dense(64, activation="relu")(h)))

    x, y = (_ids(500, 4096, 12), _noise(4096, 8)), _ids(2, 4096, 1).astype("float32")
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return Workload("DLRM with crosses, batch 4096", build, loss, x, y)


@_zoo
def tab_net() -> Workload:
    """Sparse masks (sort and cumulative sum) choose columns; gated linear units."""

    def sparsemax(t: Any) -> Any:
        ordered = ops.flip(ops.sort(t, axis=-1), axis=-1)
        sums = ops.cumsum(ordered, axis=-1) - 1.0
        ranks = np.arange(1, t.shape[-1] + 1, dtype="float32")
        support = ops.sum(ops.cast(ordered * ranks > sums, "float32"), axis=-1, keepdims=True)
        at = ops.one_hot(ops.cast(support[..., 0] - 1, "int32"), t.shape[-1])
        threshold = ops.sum(sums * at, axis=-1, keepdims=True) / support
        return ops.relu(t - threshold)

    def build() -> keras.Model:
        row = keras.Input((64,))
        normed = L.BatchNormalization()(row)
        prior, chosen, out = 1.0, normed, 0.0
        for _ in range(3):
            h = L.BatchNormalization()(L.Dense(128)(chosen))
            h = L.Dense(64)(ops.glu(h))
            out = out + ops.relu(h)
            mask = sparsemax(prior * L.BatchNormalization()(L.Dense(64)(h)))
            prior, chosen = prior * (1.3 - mask), mask * normed
        return keras.Model(row, L.Dense(1)(out))

    x, y = _noise(4096, 64), _noise(4096, 1)
    return Workload("TabNet, batch 4096", build, keras.losses.Huber(), x, y, optimizer=_adam)


@_zoo
def graph_convolution() -> Workload:
    """Dense adjacency matrices, normalized in the model; attention over neighbours."""

    def build() -> keras.Model:
        nodes, edges = keras.Input((64, 24)), keras.Input((64, 64))
        degree = ops.sum(edges, axis=-1, keepdims=True) + 1.0
        spread = (edges + np.eye(64, dtype="float32")) / degree
        h = nodes
        for _ in range(3):
            h = L.Dropout(0.1)(L.Dense(64, activation="relu")(ops.matmul(spread, h)))
        scores = ops.leaky_relu(L.Dense(1)(h) + ops.transpose(L.Dense(1)(h), (0, 2, 1)), 0.2)
        weights = ops.softmax(ops.where(edges > 0, scores, -1e9))
        h = ops.matmul(weights, L.Dense(64, activation="elu")(h))
        return keras.Model([nodes, edges], L.Dense(4)(ops.mean(h, axis=1)))

    x, y = (_noise(128, 64, 24), (_unit(128, 64, 64) > 0.8).astype("float32")), _ids(4, 128)
    return Workload("graph convolution, batch 128 x 64 nodes", build, _LOGITS, x, y)


@_zoo
def point_net() -> Workload:
    """Points turned by a learned matrix, a shared MLP, the largest over all points."""

    def dense(h: Any, width: int) -> Any:
        return ops.relu(L.BatchNormalization()(L.Dense(width)(h)))

    def build() -> keras.Model:
        points = keras.Input((256, 3))
        turn = ops.max(dense(dense(points, 32), 64), axis=1)
        turn = L.Reshape((3, 3))(L.Dense(9, kernel_initializer="zeros")(turn))
        h = ops.matmul(points, turn + np.eye(3, dtype="float32"))
        local = dense(dense(h, 32), 64)
        whole = ops.max(dense(local, 128), axis=1, keepdims=True)
        h = ops.concatenate([local, ops.broadcast_to(whole, (48, 256, 128))], axis=-1)
        return keras.Model(points, L.Dense(8)(dense(h, 96)))

    x, y = _noise(48, 256, 3), _ids(8, 48, 256)
    return Workload("PointNet, batch 48 x 256 points", build, _LOGITS, x, y, optimizer=_adam)


@_zoo
def image_and_words() -> Workload:
    """An image and a question; the words scale the channels, and cross-attention."""

    def build() -> keras.Model:
        image, words = keras.Input((32, 32, 3)), keras.Input((16,), dtype="int32")
        question = L.Embedding(300, 48, mask_zero=True)(words)
        summary = L.GRU(48)(question)
        h = image
        for _ in range(3):
            h = L.Conv2D(48, 3, padding="same")(h)
            scale, shift = (L.Reshape((1, 1, 48))(L.Dense(48)(summary)) for _ in range(2))
            h = ops.relu(h * (1.0 + scale) + shift)
        seen = L.Reshape((64, 48))(L.AveragePooling2D(4)(h))
        h = L.MultiHeadAttention(4, 12)(question, seen)
        return keras.Model([image, words], L.Dense(20)(L.GlobalAveragePooling1D()(h)))

    x, y = (_noise(32, 32, 32, 3), _padded(300, 32, 16)), _ids(20, 32)
    return Workload("image and words, batch 32", build, _LOGITS, x, y, optimizer=_adam)


# Mathematics.


@_zoo
def siren() -> Workload:
    """Sines of sines, on Fourier features of coordinates."""

    def build() -> keras.Model:
        place = keras.Input((2,))
        powers = (2.0 ** np.arange(8) * math.pi).astype("float32")
        angles = L.Reshape((16,))(place[..., None] * powers)
        h = ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=-1)
        for _ in range(5):
            h = ops.sin(3.0 * L.Dense(96)(h))
        return keras.Model(place, L.Dense(3)(h))

    x, y = _unit(8192, 2), _unit(8192, 3)
    return Workload("SIREN, batch 8192", build, "mse", x, y)


@_zoo
def physics() -> Workload:
    """The loss is a differential equation in the network's own derivatives."""

    class Heat(_Step):
        def loss_of(self, x: Any, y: Any) -> Any:
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    u = self(x, training=True)
                first = inner.gradient(u, x)
                slope = first[:, :1]
            second = outer.gradient(slope, x)[:, :1]
            rest = first[:, 1:] - 0.1 * second
            return tf.reduce_mean(tf.square(rest)) + tf.reduce_mean(tf.square(u - y))

    def build() -> keras.Model:
        place = keras.Input((2,))
        h = place
        for _ in range(4):
            h = L.Dense(64, activation="tanh")(h)
        return Heat(place, L.Dense(1)(h))

    x, y = _unit(2048, 2), _unit(2048, 1)
    return Workload("physics, second derivatives, batch 2048", build, None, x, y, optimizer=_adam)


@_zoo
def flow() -> Workload:
    """Affine coupling layers; the likelihood of the data by their determinants."""

    class Density(_Step):
        def loss_of(self, x: Any, y: Any) -> Any:
            z, log_determinant = self(x, training=True)
            return ops.mean(0.5 * ops.sum(ops.square(z), axis=1) - log_determinant[:, 0])

    def build() -> keras.Model:
        row = keras.Input((64,))
        h, log_determinant = row, 0.0
        for n in range(4):
            kept, moved = ops.split(h, 2, axis=1)
            inner = L.Dense(128, activation="relu")(L.Dense(128, activation="relu")(kept))
            scale = ops.tanh(L.Dense(32)(inner))
            moved = moved * ops.exp(scale) + L.Dense(32)(inner)
            log_determinant = log_determinant + ops.sum(scale, axis=1, keepdims=True)
            h = ops.concatenate([moved, kept] if n % 2 else [kept, moved][::-1], axis=1)
        return Density(row, [h, log_determinant])

    x = _noise(4096, 64)
    return Workload("coupling flow, batch 4096", build, None, x, x, optimizer=_adam)


@_zoo
def mixture_density() -> Workload:
    """Outputs parametrize a mixture of Gaussians."""

    def build() -> keras.Model:
        row = keras.Input((32,))
        h = row
        for _ in range(4):
            h = L.LayerNormalization()(L.Dense(128, activation="softplus")(h))
        return keras.Model(row, L.Dense(3 * 16)(h))

    def loss(y_true: Any, y_pred: Any) -> Any:
        logits, mean, log_scale = ops.split(y_pred, 3, axis=-1)
        log_scale = ops.clip(log_scale, -5.0, 5.0)
        distance = ops.square((y_true - mean) * ops.exp(-log_scale))
        return -ops.logsumexp(ops.log_softmax(logits) - log_scale - 0.5 * distance, axis=-1)

    x, y = _noise(4096, 32), _noise(4096, 1)
    return Workload("mixture density, batch 4096", build, loss, x, y, optimizer=_adam)


@_zoo
def neural_ode() -> Workload:
    """Runge-Kutta steps, each of which uses the same layers four times."""

    class Solve(L.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = L.Dense(96, activation="tanh"), L.Dense(48)

        def build(self, shape: Any) -> None:
            self.inner.build(shape)
            self.outer.build((*shape[:-1], 96))

        def slope(self, h: Any) -> Any:
            return self.outer(self.inner(h))

        def call(self, h: Any) -> Any:
            for _ in range(4):
                first = self.slope(h)
                second = self.slope(h + 0.125 * first)
                third = self.slope(h + 0.125 * second)
                last = self.slope(h + 0.25 * third)
                h = h + 0.25 / 6.0 * (first + 2.0 * second + 2.0 * third + last)
            return h

    def build() -> keras.Model:
        row = keras.Input((48,))
        return keras.Model(row, L.Dense(2)(Solve()(row)))

    x, y = _noise(2048, 48), _noise(2048, 2)
    return Workload("neural ODE, batch 2048", build, "mse", x, y)


@_zoo
def actor_critic() -> Workload:
    """Clipped ratios of probabilities, values and entropy on one trunk."""

    class Ppo(_Step):
        def loss_of(self, x: Any, y: Any) -> Any:
            actions = x[1]
            policy, value = self(x, training=True)
            log_policy = ops.log_softmax(policy)
            taken = ops.sum(log_policy * ops.one_hot(actions, 6), axis=1)
            ratio = ops.exp(taken - ops.stop_gradient(taken) + 0.1 * y[:, 0])
            gain = ops.minimum(ratio * y[:, 1], ops.clip(ratio, 0.8, 1.2) * y[:, 1])
            entropy = -ops.sum(ops.exp(log_policy) * log_policy, axis=1)
            missed = ops.square(value[:, 0] - y[:, 2])
            return ops.mean(0.5 * missed - gain - 0.01 * entropy)

    def build() -> keras.Model:
        frames, actions = keras.Input((42, 42, 4)), keras.Input((), dtype="int32")
        h = ops.cast(frames, "float32") / 255.0
        for width, kernel, strides in ((32, 5, 1), (48, 4, 2), (48, 3, 1)):
            h = L.Conv2D(width, kernel, strides=strides, activation="relu")(h)
        h = L.Dense(128, activation="relu")(L.GlobalAveragePooling2D()(h))
        return Ppo([frames, actions], [L.Dense(6)(h), L.Dense(1)(h)])

    x, y = (255 * _unit(64, 42, 42, 4), _ids(6, 64)), _noise(64, 3)
    return Workload("PPO, batch 64, 42 x 42", build, None, x, y, optimizer=_adam)


@_zoo
def detector() -> Workload:
    """A pyramid of features with heads shared between its levels; focal and Huber losses."""

    def build() -> keras.Model:
        image = keras.Input((64, 64, 3))
        h, levels = L.Conv2D(24, 3, strides=2, padding="same", activation="swish")(image), []
        for width in (32, 48, 64):
            h = L.Conv2D(width, 3, strides=2, padding="same", use_bias=False)(h)
            h = L.Activation("swish")(L.BatchNormalization()(h))
            levels.append(L.Conv2D(48, 1)(h))
        for n in (1, 0):
            levels[n] = levels[n] + L.UpSampling2D()(levels[n + 1])
        shared = [L.Conv2D(48, 3, padding="same", activation="relu") for _ in range(2)]
        classes, boxes = L.Conv2D(5, 3, padding="same"), L.Conv2D(4, 3, padding="same")
        found: dict[str, list[Any]] = {"kind": [], "box": []}
        for level in levels:
            h = shared[1](shared[0](level))
            found["kind"].append(L.Reshape((-1, 5))(classes(h)))
            found["box"].append(L.Reshape((-1, 4))(boxes(h)))
        outputs = [L.Concatenate(axis=1, name=name)(found[name]) for name in ("kind", "box")]
        return keras.Model(image, outputs)

    x, y = _noise(24, 64, 64, 3), (_ids(2, 24, 336, 5).astype("float32"), _noise(24, 336, 4))
    focal = keras.losses.BinaryFocalCrossentropy(from_logits=True, apply_class_balancing=True)
    title, losses = "detector with a pyramid, batch 24, 64 x 64", [focal, keras.losses.Huber()]
    return Workload(title, build, losses, x, y, loss_weights=[1.0, 0.5])
