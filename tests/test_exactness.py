"""The promise: weights and logs after three epochs on N replicas are those of one device, to float rounding."""

import functools
import os

import numpy as np
import pytest
import tensorflow as tf
from comparison import largest_difference, largest_log_difference, strategy_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import keras_gpufeed as kg

layers = tf.keras.layers

TOLERANCE = 1e-5
NUM_SAMPLES = [1, 3, 7, 64, 1024, 1025, 1027, 1030]
BATCH_SIZES = [8, 250, 256]
NUM_REPLICAS = [2, 3, 4, 8]


# --- The models of the grid --------------------------------------------------------------------------------


def stack(*hidden, inputs=(4,), outputs=1, kind=tf.keras.Sequential):
    return kind([layers.InputLayer(inputs), *hidden, layers.Dense(outputs)])


def mlp():
    model = stack(layers.Dense(8, "tanh"))
    model.compile(tf.keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return model


def l2():
    model = stack(layers.Dense(8, "tanh", kernel_regularizer="l2", activity_regularizer="l2"))
    model.compile(tf.keras.optimizers.SGD(0.05, momentum=0.5), "mse")
    return model


def embedding():
    model = tf.keras.Sequential(
        [layers.InputLayer((4,)), layers.Embedding(9, 3), layers.Flatten(), layers.Dense(1)]
    )
    model.compile(tf.keras.optimizers.SGD(0.05), "mse")
    return model


def adam_clipnorm():
    model = stack(layers.Dense(8, "tanh"))
    # A large epsilon: where a gradient is nought but for rounding, Adam would make a whole step of it.
    model.compile(tf.keras.optimizers.Adam(0.01, epsilon=1e-3, clipnorm=0.05), "mse")
    return model


def global_clipnorm():
    model = stack(layers.Dense(8, "tanh"))
    model.compile(tf.keras.optimizers.SGD(0.05, global_clipnorm=0.05), "mse")
    return model


def scalar_mean_loss():
    model = stack(layers.Dense(8, "tanh"))
    model.compile(tf.keras.optimizers.SGD(0.05), lambda y, p: tf.reduce_mean(tf.square(y - p)))
    return model


def two_outputs():
    inputs = tf.keras.Input((4,))
    hidden = layers.Dense(8, "tanh")(inputs)
    outputs = {"a": layers.Dense(1, name="a")(hidden), "b": layers.Dense(1, "sigmoid", name="b")(hidden)}
    model = tf.keras.Model(inputs, outputs)
    model.compile(
        tf.keras.optimizers.SGD(0.05),
        {"a": "mse", "b": "binary_crossentropy"},
        loss_weights={"a": 0.3, "b": 2.0},
        metrics={"b": ["accuracy"]},
    )
    return model


def synchronised_batch_norm():
    model = stack(layers.Dense(8), layers.BatchNormalization(synchronized=True), layers.Activation("tanh"))
    model.compile(tf.keras.optimizers.SGD(0.05), "mse")
    return model


class Minimizing(tf.keras.Sequential):
    def train_step(self, data):
        x, y, *_ = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y)) + sum(self.losses)
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return {"loss": loss}


class Applying(tf.keras.Sequential):
    def train_step(self, data):
        x, y, *_ = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y)) + sum(self.losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients = [tf.clip_by_norm(gradient, 0.05) for gradient in gradients]
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


def minimize_by_hand():
    model = stack(layers.Dense(8, "tanh", kernel_regularizer="l2"), kind=Minimizing)
    model.compile(tf.keras.optimizers.SGD(0.05))
    return model


def apply_gradients_by_hand():
    model = stack(layers.Dense(8, "tanh", kernel_regularizer="l2"), kind=Applying)
    model.compile(tf.keras.optimizers.SGD(0.05))
    return model


MODELS = {
    build.__name__: build
    for build in (
        mlp,
        l2,
        embedding,
        adam_clipnorm,
        global_clipnorm,
        scalar_mean_loss,
        two_outputs,
        synchronised_batch_norm,
        minimize_by_hand,
        apply_gradients_by_hand,
    )
}
WEIGHTS = [None, "samples", "classes"]


@functools.lru_cache(maxsize=4)
def make_data(name, num_samples):
    """Sorted by the first feature: parts of a batch are as unlike as can be."""
    random = np.random.default_rng(0)
    if name == "embedding":
        x = np.sort(random.integers(0, 9, (num_samples, 4)), axis=0)
        y = np.cos(x[:, :1]).astype("float32")
    else:
        x = np.sort(random.normal(size=(num_samples, 4)), axis=0).astype("float32")
        y = np.sin(2 * x[:, :1])
    if name == "two_outputs":
        y = {"a": y, "b": (y > 0).astype("float32")}
    return x, y


def make_weights(name, weights, num_samples):
    """What `fit` is given for its weights: those of samples and of classes."""
    if weights == "samples":
        values = np.linspace(0, 2, num_samples, dtype="float32")
        return ({"a": values, "b": values[::-1].copy()} if name == "two_outputs" else values), {}
    if weights == "classes":
        return None, {"class_weight": {0: 1.0, 1: 5.0}}
    return None, {}


def train(model, num_replicas, x, y, sample_weight=None, batch_size=32, epochs=3, shuffle=False, **arguments):
    """Three epochs; on one device by plain Keras."""
    if num_replicas == 1:
        return model.fit(
            x, y, batch_size, epochs, verbose=0, shuffle=shuffle, sample_weight=sample_weight, **arguments
        )
    kg.distribute(model, strategy_of(num_replicas))
    feeder = kg.DistributedFeeder(x, y, sample_weight, batch_size=batch_size, shuffle=shuffle)
    return model.fit(feeder, epochs=epochs, verbose=0, **arguments)


def assert_equal_to_one_device(name, num_samples, batch_size, num_replicas, weights=None):
    x, y = make_data(name, num_samples)
    sample_weight, arguments = make_weights(name, weights, num_samples)
    if weights == "classes":
        y = (y > 0).astype("int32")
    trained = []
    for devices in (1, num_replicas):
        tf.keras.utils.set_random_seed(1)
        model = MODELS[name]()
        trained.append((model, train(model, devices, x, y, sample_weight, batch_size, **arguments)))
    (reference, expected), (model, history) = trained
    assert all(np.isfinite(values).all() for values in expected.history.values())
    assert largest_difference(model, reference) <= TOLERANCE
    assert largest_log_difference(history, expected) <= TOLERANCE
    assert int(model.optimizer.iterations) == 3 * -(-num_samples // batch_size)


# --- The grid ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_samples", "batch_size", "num_replicas", "weights"),
    [
        ("mlp", 1030, 256, 4, None),  # Six samples left: 2 + 2 + 1 + 1.
        ("mlp", 1025, 256, 4, None),  # One sample left: a small tail.
        ("mlp", 1, 8, 8, None),  # Nothing but a small tail.
        ("mlp", 64, 250, 3, "samples"),  # One batch, smaller than the global batch: 22 + 21 + 21.
        ("l2", 1027, 256, 4, None),  # Three samples left.
        ("l2", 7, 8, 2, "classes"),
        ("embedding", 1030, 250, 3, None),  # No step is even.
        ("embedding", 3, 8, 4, "samples"),
        ("adam_clipnorm", 1027, 250, 4, None),
        ("adam_clipnorm", 64, 8, 3, "classes"),
        ("global_clipnorm", 1030, 256, 8, None),
        ("scalar_mean_loss", 1025, 250, 2, None),
        ("scalar_mean_loss", 7, 8, 3, None),
        ("two_outputs", 1027, 256, 2, "samples"),
        ("two_outputs", 3, 8, 4, None),
        ("synchronised_batch_norm", 1030, 256, 4, None),
        ("synchronised_batch_norm", 1027, 250, 3, "samples"),
        ("minimize_by_hand", 1025, 256, 4, None),
        ("minimize_by_hand", 7, 8, 3, None),
        ("apply_gradients_by_hand", 1030, 256, 3, None),
        ("apply_gradients_by_hand", 1025, 250, 8, None),
    ],
)
def test_grid(name, num_samples, batch_size, num_replicas, weights):
    assert_equal_to_one_device(name, num_samples, batch_size, num_replicas, weights)


def can_have(name, weights):
    by_hand = name.endswith("by_hand")
    return weights is None or not (by_hand or (weights == "classes" and name == "two_outputs"))


@settings(
    max_examples=int(os.environ.get("KERAS_GPUFEED_EXAMPLES", 4)),
    derandomize="KERAS_GPUFEED_EXAMPLES" not in os.environ,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    st.sampled_from(
        [(name, weights) for name in MODELS for weights in WEIGHTS if can_have(name, weights)]
    ),
    st.sampled_from(NUM_SAMPLES),
    st.sampled_from(BATCH_SIZES),
    st.sampled_from(NUM_REPLICAS),
)
def test_anywhere_in_the_grid(model_and_weights, num_samples, batch_size, num_replicas):
    """`KERAS_GPUFEED_EXAMPLES=500` draws as many; there are 2304 points."""
    name, weights = model_and_weights
    assert_equal_to_one_device(name, num_samples, batch_size, num_replicas, weights)
    tf.keras.backend.clear_session()


def test_stock_keras_is_not_exact():
    """The comparison can fail: the same data by Keras's own way through the strategy, with six samples left."""
    x, y = make_data("mlp", 1030)
    models = []
    for num_replicas in (1, 4):
        tf.keras.utils.set_random_seed(1)
        with strategy_of(num_replicas).scope():
            model = mlp()
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(256)
        model.fit(data, epochs=3, verbose=0)
        models.append(model)
    assert largest_difference(*models[::-1]) > 0.01


def test_shuffled_training_is_the_same_on_any_number_of_replicas():
    x, y = make_data("mlp", 70)
    reference = expected = None
    for num_replicas in (1, 2, 3):
        tf.keras.utils.set_random_seed(1)
        model = kg.distribute(mlp(), strategy_of(num_replicas))
        history = model.fit(kg.DistributedFeeder(x, y, seed=11), epochs=3, verbose=0)
        if num_replicas == 1:
            reference, expected = model, history
        assert largest_difference(model, reference) <= TOLERANCE
        assert largest_log_difference(history, expected) <= TOLERANCE


@pytest.mark.parametrize("num_samples", [20, 21, 22])
def test_one_device_is_plain_keras(num_samples):
    """A feeder on one device gives bit for bit what Keras gives."""
    x, y = make_data("mlp", num_samples)
    models = []
    for data in ({"x": x, "y": y, "batch_size": 6, "shuffle": False}, None):
        tf.keras.utils.set_random_seed(1)
        model = mlp()
        if data is None:
            with strategy_of(1).scope():
                model = mlp()
            data = {"x": kg.DistributedFeeder(x, y, batch_size=6, shuffle=False)}
        model.set_weights([np.full_like(weight, 0.1) for weight in model.get_weights()])
        model.fit(**data, epochs=2, verbose=0)
        models.append(model)
    assert all((a == b).all() for a, b in zip(*(model.get_weights() for model in models)))


# --- Losses ------------------------------------------------------------------------------------------------

RANGE = np.arange(22, dtype="float32")[:, None] / 22


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, p: tf.reduce_mean(tf.square(y - p), -1),
        tf.keras.losses.MeanSquaredError(),
        tf.keras.losses.Huber(reduction="none"),
        tf.keras.losses.MeanAbsoluteError(reduction="sum"),
        tf.keras.losses.LogCosh(reduction="sum_over_batch_size"),
    ],
    ids=["a value for each sample", "auto", "none", "sum", "sum over batch size"],
)
def test_losses_of_every_reduction(loss):
    histories = []
    for num_replicas in (1, 4):
        tf.keras.utils.set_random_seed(1)
        model = tf.keras.Sequential([layers.Dense(1, input_shape=(1,))])
        model.compile(tf.keras.optimizers.SGD(0.01), loss)
        histories.append(train(model, num_replicas, RANGE, 2 * RANGE, batch_size=8))
    assert largest_log_difference(*histories[::-1]) <= TOLERANCE


def test_weights_that_are_zero_on_whole_replicas():
    """Three of the four replicas have nothing to learn from."""
    weights = np.r_[np.zeros(12), np.full(4, 3.0)].astype("float32")
    x, y = make_data("mlp", 16)
    models = []
    for num_replicas in (1, 4):
        tf.keras.utils.set_random_seed(1)
        model = mlp()
        train(model, num_replicas, x, y, weights, batch_size=16)
        models.append(model)
    assert largest_difference(*models[::-1]) <= TOLERANCE


class ReturningItsLoss(tf.keras.Sequential):
    def train_step(self, data):
        x, y = data
        errors = self(x, training=True) - y
        return {"loss": tf.reduce_mean(tf.square(errors)), "samples": tf.shape(x)[0], "sum": tf.reduce_sum(errors[:0])}

    def test_step(self, data):
        x, y = data
        return {"loss": tf.reduce_mean(tf.square(self(x) - y))}


@pytest.mark.parametrize("num_samples", [20, 22, 19, 3])
def test_scalars_that_a_step_returns_are_means_over_the_global_batch(num_samples):
    """Stock Keras shows their sum over replicas: four times the loss."""
    x, y = make_data("mlp", num_samples)
    model = stack(kind=ReturningItsLoss)
    model.compile()
    kg.distribute(model, strategy_of(4))
    expected = np.mean(np.square(model.predict(kg.DistributedFeeder(x), verbose=0) - y))
    feeder = kg.DistributedFeeder(x, y, batch_size=num_samples)
    history = model.fit(feeder, verbose=0).history
    assert history["loss"][0] == pytest.approx(expected, rel=1e-5)
    assert history["samples"] == [num_samples]  # Counts are added up.
    assert model.evaluate(feeder, verbose=0) == pytest.approx(expected, rel=1e-5)


# --- Every sample once, none empty -------------------------------------------------------------------------


class Guard(layers.Layer):
    """Fails in a call with zero samples, and where the first sample cannot be looked at."""

    def call(self, inputs):
        tf.debugging.assert_greater(tf.shape(inputs)[0], 0)
        return inputs + 0 * inputs[0]


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_no_layer_ever_sees_zero_samples(num_replicas):
    """Every remainder of batches of eight; a mean over nothing would be NaN, and stay in the weights."""
    model = stack(Guard())
    model.compile(tf.keras.optimizers.SGD(0.01), lambda y, p: tf.reduce_mean(tf.square(y - p)))
    kg.distribute(model, strategy_of(num_replicas))
    for num_samples in range(16, 24):
        x, y = make_data("mlp", num_samples)
        feeder = kg.DistributedFeeder(x, y, batch_size=8)
        history = model.fit(feeder, validation_data=feeder, epochs=1, verbose=0)
        assert np.isfinite([*history.history["loss"], *history.history["val_loss"]]).all()
        predictions = model.predict(kg.DistributedFeeder(x, batch_size=8), verbose=0)
        assert predictions.shape == (num_samples, 1)
        assert np.isfinite(predictions).all()
    assert int(model.optimizer.iterations) == 2 + 7 * 3


@pytest.mark.parametrize("num_replicas", [2, 3, 4])
@pytest.mark.parametrize("num_samples", [1000, 1001, 3])
def test_counts_add_up(num_replicas, num_samples):
    """Every sample is one of true or false, positive or negative; so often the last one counts as well."""
    x = np.linspace(-1, 1, num_samples, dtype="float32")[:, None]
    y = (np.arange(num_samples) % 3 == 0).astype("float32")[:, None]
    model = tf.keras.Sequential([layers.Dense(1, "sigmoid", kernel_initializer="ones", input_shape=(1,))])
    counts = ["TruePositives", "FalsePositives", "TrueNegatives", "FalseNegatives"]
    model.compile("sgd", "mse", metrics=[getattr(tf.keras.metrics, name)() for name in counts])
    kg.distribute(model, strategy_of(num_replicas))
    feeder = kg.DistributedFeeder(x, y, batch_size=64)
    _, *found = model.evaluate(feeder, verbose=0)
    positive, true = x[:, 0] > 0, y[:, 0] > 0
    assert found == [
        (positive & true).sum(),
        (positive & ~true).sum(),
        (~positive & ~true).sum(),
        (~positive & true).sum(),
    ]
    logs = model.fit(kg.DistributedFeeder(x, y, 0 * x[:, 0], batch_size=64), verbose=0).history
    assert sum(sum(values) for name, values in logs.items() if name != "loss") == num_samples


def test_evaluation_counts_the_last_sample():
    x, y = np.arange(21, dtype="float32")[:, None], np.zeros((21, 1), "float32")
    y[-1] = 1000.0
    model = tf.keras.Sequential([layers.Dense(1, kernel_initializer="ones", input_shape=(1,))])
    model.compile("sgd", "mse")
    kg.distribute(model, strategy_of(4))
    loss = model.evaluate(kg.DistributedFeeder(x, y, batch_size=8, drop_remainder=True), verbose=0)
    assert loss == pytest.approx(np.mean(np.square(x - y)), rel=1e-5)


# --- Order -------------------------------------------------------------------------------------------------


class Noting(tf.keras.Model):
    """Keeps the samples of each step, replica after replica."""

    def __init__(self, steps):
        super().__init__()
        self.note = steps.append
        self.compile(run_eagerly=True)

    def train_step(self, data):
        x, _ = data
        self.note(x.numpy().tolist())
        return {}


def samples_fed(num_replicas, num_samples=30, epochs=2, batch_size=6, fits=1, **arguments):
    """The samples of each part, of all steps."""
    parts = []
    model = kg.distribute(Noting(parts), strategy_of(num_replicas))
    x = np.arange(num_samples)
    feeder = kg.DistributedFeeder(x, x, batch_size=batch_size, **arguments)
    for _ in range(fits):
        model.fit(feeder, epochs=epochs, verbose=0)
    return parts


def merged(parts, num_replicas):
    return [sum(parts[i : i + num_replicas], []) for i in range(0, len(parts), num_replicas)]


def test_the_order_depends_on_seed_and_epoch_only():
    orders = [merged(samples_fed(n, seed=11), n) for n in (1, 2, 3)]
    assert orders[0] == orders[1] == orders[2]
    first, second = orders[0][:5], orders[0][5:]
    assert first != second
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(30))
    assert merged(samples_fed(2, seed=12), 2) != orders[0]


def test_without_a_seed_every_feeder_draws_its_own():
    assert samples_fed(1, epochs=1) != samples_fed(1, epochs=1)
    x = np.arange(30)
    drawn = kg.DistributedFeeder(x, x, batch_size=6)
    parts = []
    Noting(parts).fit(drawn, verbose=0) if False else None
    model = kg.distribute(Noting(parts), strategy_of(1))
    model.fit(drawn, verbose=0)
    assert parts == samples_fed(1, epochs=1, seed=drawn.seed)  # It says which one, so a run can be repeated.


def test_without_shuffling_the_order_is_that_of_the_arrays():
    assert merged(samples_fed(3, 20, epochs=1, shuffle=False), 3) == [
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10, 11],
        [12, 13, 14, 15, 16, 17],
        [18, 19, 18, 19, 18, 19],  # A small tail: all replicas have it.
    ]


def test_parts_of_a_step_are_disjoint():
    parts = samples_fed(8, 64, epochs=1, batch_size=16, seed=0)
    assert [len(part) for part in parts] == [2] * 32
    assert all(len(set(step)) == 16 for step in merged(parts, 8))


def test_global_random_state_is_neither_used_nor_changed():
    tf.keras.utils.set_random_seed(1)
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    first = samples_fed(2, seed=5)
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002
    tf.keras.utils.set_random_seed(2)
    assert samples_fed(2, seed=5) == first
