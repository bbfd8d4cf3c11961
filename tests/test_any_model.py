"""Every kind of Keras model: one epoch of plain training, then moved and fed, equals plain training throughout."""

import numpy as np
import pytest
import tensorflow as tf
from comparison import largest_difference, largest_log_difference, strategy_of

import keras_gpufeed as kg

layers, losses, optimizers = tf.keras.layers, tf.keras.losses, tf.keras.optimizers

NUM_SAMPLES, BATCH_SIZE = 21, 8  # Last batch of 5 samples: uneven on 2, 3 and 4 replicas.


def dense_data():
    random = np.random.default_rng(0)
    x = random.normal(size=(NUM_SAMPLES, 6)).astype("float32")
    return x, (x.sum(axis=1, keepdims=True) > 0).astype("float32")


def image_data():
    random = np.random.default_rng(0)
    return random.random((NUM_SAMPLES, 32, 32, 3), "float32"), random.integers(0, 3, NUM_SAMPLES)


def token_data():
    random = np.random.default_rng(0)
    return random.integers(1, 20, (NUM_SAMPLES, 5)), random.integers(0, 2, (NUM_SAMPLES, 1)).astype("float32")


def padded_token_data():
    tokens, _ = token_data()
    tokens[::3, 2:] = 0
    tokens[1::3, 4:] = 0
    return tokens, np.random.default_rng(1).integers(0, 4, (NUM_SAMPLES, 5))


def sequence_data():
    random = np.random.default_rng(0)
    return random.normal(size=(NUM_SAMPLES, 5, 3)).astype("float32"), random.normal(size=(NUM_SAMPLES, 2)).astype(
        "float32"
    )


def text_data():
    words = np.array(["red", "green", "blue", "grey"])
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(words, 3)) for _ in range(NUM_SAMPLES)]
    return np.array(texts)[:, None], random.integers(0, 2, (NUM_SAMPLES, 1)).astype("float32")


def two_output_data():
    x, y = dense_data()
    return x, {"first": y, "second": 2 * x[:, :2]}


def compiled(model, optimizer="adam", loss="mse", **arguments):
    model.compile(optimizer, loss, **arguments)
    return model


def mlp(optimizer="adam", loss="mse", kernel=None, **arguments):
    stack = [layers.Dense(8, "tanh", **(kernel or {})), layers.Dense(1, "sigmoid")]
    return compiled(tf.keras.Sequential([layers.InputLayer((6,)), *stack]), optimizer, loss, **arguments)


CASES = {}


def case(data, tolerance=1e-5):
    def add(build):
        CASES[build.__name__] = (build, data, tolerance)
        return build

    return add


@case(dense_data)
def sequential():
    return mlp(metrics=["accuracy", tf.keras.metrics.AUC(name="auc"), tf.keras.metrics.Precision(name="precision")])


@case(dense_data)
def functional():
    inputs = tf.keras.Input((6,))
    hidden = layers.Dense(8, "relu")(inputs)
    return compiled(tf.keras.Model(inputs, layers.Dense(1)(layers.Concatenate()([hidden, inputs]))), "sgd")


@case(dense_data)
def nested_functional():
    inner_inputs = tf.keras.Input((6,))
    encoder = tf.keras.Model(inner_inputs, layers.Dense(4, "tanh")(inner_inputs), name="encoder")
    inputs = tf.keras.Input((6,))
    both = layers.Add()([encoder(inputs), encoder(2 * inputs)])
    return compiled(tf.keras.Model(inputs, layers.Dense(1)(both)))


class Subclassed(tf.keras.Model):
    """Weights of its own, layers in a list and in a dict."""

    def __init__(self):
        super().__init__()
        self.scale = self.add_weight("scale", (6,), initializer="ones")
        self.stack = [layers.Dense(8, "tanh"), layers.Dense(4, "tanh")]
        self.heads = {"out": layers.Dense(1)}

    def call(self, inputs):
        hidden = inputs * self.scale
        for layer in self.stack:
            hidden = layer(hidden)
        return self.heads["out"](hidden)


@case(dense_data)
def subclassed():
    return compiled(Subclassed())


@case(sequence_data)
def lstm_and_gru():
    stack = [layers.LSTM(4, return_sequences=True), layers.Bidirectional(layers.GRU(3)), layers.Dense(2)]
    return compiled(tf.keras.Sequential([layers.InputLayer((5, 3)), *stack]))


@case(token_data)
def embedding():
    stack = [layers.Embedding(20, 4), layers.GlobalAveragePooling1D(), layers.Dense(1, "sigmoid")]
    return compiled(
        tf.keras.Sequential([layers.InputLayer((5,)), *stack]),
        optimizers.Adam(global_clipnorm=0.1),
        "binary_crossentropy",
    )


@case(padded_token_data)
def masked_sequence_output():
    stack = [layers.Embedding(20, 4, mask_zero=True), layers.LSTM(4, return_sequences=True), layers.Dense(4)]
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(tf.keras.Sequential([layers.InputLayer((5,)), *stack]), "adam", loss, weighted_metrics=["accuracy"])


@case(sequence_data)
def attention():
    inputs = tf.keras.Input((5, 3))
    attended = layers.LayerNormalization()(layers.MultiHeadAttention(2, 4)(inputs, inputs))
    # Adam would blow up the rounding of the gradient of the key's bias, which is zero: softmax ignores it.
    return compiled(tf.keras.Model(inputs, layers.Dense(2)(layers.Flatten()(attended))), "sgd")


@case(dense_data)
def synchronised_batch_norm():
    stack = [layers.Dense(8, use_bias=False), layers.BatchNormalization(synchronized=True), layers.Dense(1)]
    return compiled(tf.keras.Sequential([layers.InputLayer((6,)), *stack]))


@case(dense_data)
def adapted_normalization():
    normalization = layers.Normalization()
    normalization.adapt(dense_data()[0])
    return compiled(tf.keras.Sequential([layers.InputLayer((6,)), normalization, layers.Dense(1)]))


@case(text_data)
def text_vectorization():
    vectorization = layers.TextVectorization(output_sequence_length=3)
    vectorization.adapt(text_data()[0])
    stack = [vectorization, layers.Embedding(10, 4), layers.Flatten(), layers.Dense(1)]
    return compiled(tf.keras.Sequential([layers.InputLayer((1,), dtype=tf.string), *stack]))


@case(text_data)
def string_lookup():
    lookup = layers.StringLookup(vocabulary=sorted(set(text_data()[0].ravel())))
    stack = [lookup, layers.Embedding(30, 4), layers.Flatten(), layers.Dense(1)]
    return compiled(tf.keras.Sequential([layers.InputLayer((1,), dtype=tf.string), *stack]))


@case(dense_data)
def lambda_closing_over_a_variable():
    scale = tf.Variable(0.5, trainable=False)
    stack = [layers.Dense(4), layers.Lambda(lambda x: x * scale), layers.Dense(1)]
    return compiled(tf.keras.Sequential([layers.InputLayer((6,)), *stack]))


@case(dense_data)
def loss_closing_over_a_weight():
    model = tf.keras.Sequential([layers.Dense(4, input_shape=(6,)), layers.Dense(1)])
    kernel = model.layers[0].kernel
    return compiled(
        model,
        "sgd",
        lambda y, p: tf.reduce_mean(tf.square(y - p), -1) + 0.1 * tf.reduce_sum(tf.square(kernel)),
    )


@case(dense_data)
def regularisers():
    kernel = {
        "kernel_regularizer": tf.keras.regularizers.L1L2(0.01, 0.1),
        "activity_regularizer": tf.keras.regularizers.L2(0.1),
    }
    return mlp("sgd", kernel=kernel)


@case(dense_data)
def constraints():
    return mlp("adam", kernel={"kernel_constraint": tf.keras.constraints.MaxNorm(0.2)})


@case(dense_data)
def frozen_layers():
    model = mlp()
    model.layers[0].trainable = False
    return compiled(model)


@case(dense_data)
def sgd_with_momentum():
    return mlp(optimizers.SGD(0.1, momentum=0.9, nesterov=True))


@case(dense_data)
def adamw_with_ema():
    return mlp(optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2))


@case(dense_data)
def legacy_adam():
    return mlp(optimizers.legacy.Adam(0.01, clipnorm=0.1))


@case(dense_data)
def legacy_sgd():
    return mlp(optimizers.legacy.SGD(0.1, momentum=0.9, decay=0.01))


@case(dense_data)
def learning_rate_schedule():
    return mlp(optimizers.Adam(optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)))


@case(dense_data)
def legacy_optimizer_with_schedule():
    return mlp(optimizers.legacy.SGD(optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)))


def mixed(policy):
    tf.keras.mixed_precision.set_global_policy(policy)
    stack = [layers.Dense(8, "tanh"), layers.Dense(1, dtype="float32")]
    return compiled(tf.keras.Sequential([layers.InputLayer((6,)), *stack]), optimizers.SGD(0.1))


@case(dense_data, tolerance=2e-3)
def mixed_float16():
    return mixed("mixed_float16")


@case(dense_data, tolerance=1e-2)
def mixed_bfloat16():
    return mixed("mixed_bfloat16")


@case(dense_data)
def loss_scale_optimizer():
    return mlp(tf.keras.mixed_precision.LossScaleOptimizer(optimizers.Adam(0.01, clipnorm=0.1)))


@case(dense_data)
def legacy_loss_scale_optimizer():
    return mlp(tf.keras.mixed_precision.LossScaleOptimizer(optimizers.legacy.Adam(0.01)))


@case(two_output_data)
def several_losses():
    inputs = tf.keras.Input((6,))
    hidden = layers.Dense(8, "tanh")(inputs)
    first, second = layers.Dense(1, "sigmoid", name="first")(hidden), layers.Dense(2, name="second")(hidden)
    return compiled(
        tf.keras.Model(inputs, {"first": first, "second": second}),
        loss={"first": "binary_crossentropy", "second": losses.Huber()},
        loss_weights={"first": 0.3, "second": 2.0},
        metrics={"first": ["accuracy", lambda y, p: tf.reduce_mean(tf.abs(y - p), -1)], "second": "mae"},
        weighted_metrics={"second": tf.keras.metrics.MeanSquaredError("weighted")},
    )


@case(dense_data)
def loss_that_sums():
    return mlp(optimizers.SGD(0.01), losses.MeanSquaredError(reduction="sum"))


@case(dense_data)
def loss_that_returns_a_scalar():
    return mlp("sgd", lambda y, p: tf.reduce_mean(tf.square(y - p)))


@case(dense_data)
def eager():
    return mlp(run_eagerly=True)


@case(dense_data)
def several_steps_per_execution():
    return mlp(steps_per_execution=2)


class MinimizingByHand(tf.keras.Sequential):
    """A `train_step` as for one device: a plain mean, `minimize`."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y)) + tf.add_n(self.losses)
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return {"loss": loss}


class ApplyingByHand(tf.keras.Sequential):
    """A `train_step` as for one device: clips, accumulates and applies gradients itself."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predictions = self(x, training=True)
            loss = self.compute_loss(x, y, predictions)
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.1)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {**self.compute_metrics(x, y, predictions, None), "norm": norm}


class SummingByHand(tf.keras.Sequential):
    """A `train_step` that differentiates one loss for each sample, and returns them."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.keras.losses.mean_squared_error(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": tf.reduce_mean(loss)}


class TrackingItsLoss(tf.keras.Sequential):
    """A `train_step` that gives a metric one number for the batch, as Keras's guides do."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.tracker = tf.keras.metrics.Mean(name="tracked")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        self.tracker.update_state(loss)
        return {"tracked": self.tracker.result()}


class LossObjectByHand(tf.keras.Sequential):
    """A `train_step` with a `Loss` object of its own, which stock Keras refuses under a strategy."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = losses.MeanSquaredError()(y, self(x, training=True))
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return {"loss": loss}


class AverageLossByHand(tf.keras.Sequential):
    """A `train_step` written for strategies, dividing by a constant global batch."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            each = tf.reduce_mean(tf.square(self(x, training=True) - y), -1)
            loss = tf.nn.compute_average_loss(each, global_batch_size=BATCH_SIZE)
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return {"loss": loss}


def by_hand(kind, synchronized=False):
    stack = [layers.Dense(8, "tanh", kernel_regularizer="l2"), layers.Dense(1)]
    if synchronized:
        stack.insert(1, layers.BatchNormalization(synchronized=True))
    model = kind([layers.InputLayer((6,)), *stack])
    return compiled(model, optimizers.SGD(0.1 if kind is not SummingByHand else 0.01))


@case(dense_data)
def minimize_by_hand():
    return by_hand(MinimizingByHand, synchronized=True)


@case(dense_data)
def apply_gradients_by_hand():
    return by_hand(ApplyingByHand, synchronized=True)


@case(dense_data)
def summed_loss_by_hand():
    return by_hand(SummingByHand)


@case(dense_data)
def tracked_loss():
    return by_hand(TrackingItsLoss)


@case(dense_data)
def loss_object_by_hand():
    return by_hand(LossObjectByHand)


@case(dense_data)
def average_loss_by_hand():
    return by_hand(AverageLossByHand)


class Gan(tf.keras.Model):
    """Two optimizers, two tapes, a gradient penalty, plain means."""

    def __init__(self):
        super().__init__()
        self.generator = tf.keras.Sequential([layers.Dense(8, "tanh", input_shape=(6,)), layers.Dense(6)])
        self.critic = tf.keras.Sequential([layers.Dense(8, "tanh", input_shape=(6,)), layers.Dense(1)])

    def compile(self):
        super().compile()
        self.generator_optimizer, self.critic_optimizer = optimizers.Adam(0.01), optimizers.SGD(0.01)

    def call(self, inputs):
        return self.critic(self.generator(inputs))

    def train_step(self, data):
        real, _ = data
        noise = tf.reverse(real, [1])
        with tf.GradientTape() as tape:
            fake = self.generator(noise)
            with tf.GradientTape() as inner:
                middle = (real + fake) / 2
                inner.watch(middle)
                score = self.critic(middle)
            slope = inner.gradient(score, middle)
            penalty = tf.reduce_mean(tf.square(tf.norm(slope, axis=1) - 1))
            critic_loss = tf.reduce_mean(self.critic(fake)) - tf.reduce_mean(self.critic(real)) + penalty
        self.critic_optimizer.minimize(critic_loss, self.critic.trainable_variables, tape=tape)
        with tf.GradientTape() as tape:
            generator_loss = -tf.reduce_mean(self.critic(self.generator(noise)))
        gradients = tape.gradient(generator_loss, self.generator.trainable_variables)
        self.generator_optimizer.apply_gradients(zip(gradients, self.generator.trainable_variables))
        return {"critic": critic_loss, "generator": generator_loss}


@case(dense_data)
def gan():
    model = Gan()
    model.build((None, 6))
    model.compile()
    return model


@pytest.mark.parametrize("name", CASES)
def test_training_on_three_replicas_equals_one_device(name):
    build, data, tolerance = CASES[name]
    x, y = data()
    expected_logs = reference = None
    for num_replicas in (1, 3):
        tf.keras.utils.set_random_seed(1)
        tf.keras.mixed_precision.set_global_policy("float32")
        model = build()
        model.fit(x, y, batch_size=BATCH_SIZE, shuffle=False, verbose=0)
        if num_replicas == 1:
            expected_logs = model.fit(x, y, batch_size=BATCH_SIZE, shuffle=False, epochs=2, verbose=0)
            reference = model
    kg.distribute(model, strategy_of(3))
    logs = model.fit(kg.DistributedFeeder(x, y, batch_size=BATCH_SIZE, shuffle=False), epochs=2, verbose=0)
    assert largest_difference(model, reference) <= tolerance
    assert largest_log_difference(logs, expected_logs) <= tolerance
    assert model.run_eagerly or model.train_function.experimental_get_tracing_count() == 1
