"""The promise: weights and logs after three epochs on N replicas are those of one device, to float rounding."""

import functools
import itertools
import os

import numpy as np
import pytest
import tensorflow as tf
from comparison import largest_difference, largest_log_difference, strategy_of
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import keras_gpufeed as kg
from keras_gpufeed import internals

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
    model.compile(tf.keras.optimizers.SGD(0.02), "mse", metrics=["mae"])
    return model


def l2():
    model = stack(layers.Dense(8, "tanh", kernel_regularizer="l2", activity_regularizer="l2"))
    model.compile(tf.keras.optimizers.SGD(0.02, momentum=0.5), "mse")
    return model


def embedding():
    model = tf.keras.Sequential([layers.InputLayer((4,)), layers.Embedding(9, 3), layers.Flatten(), layers.Dense(1)])
    model.compile(tf.keras.optimizers.SGD(0.02), "mse")
    return model


def adam_clipnorm():
    model = stack(layers.Dense(8, "tanh"))
    # A large epsilon: where a gradient is nought but for rounding, Adam would make a whole step of it.
    model.compile(tf.keras.optimizers.Adam(0.1, epsilon=0.1, clipnorm=0.05), "mse")
    return model


def global_clipnorm():
    model = stack(layers.Dense(8, "tanh"))
    model.compile(tf.keras.optimizers.SGD(0.02, global_clipnorm=0.05), "mse")
    return model


def scalar_mean_loss():
    model = stack(layers.Dense(8, "tanh"))
    model.compile(tf.keras.optimizers.SGD(0.02), lambda y, p: tf.reduce_mean(tf.square(y - p)))
    return model


def two_outputs():
    inputs = tf.keras.Input((4,))
    hidden = layers.Dense(8, "tanh")(inputs)
    outputs = {"a": layers.Dense(1, name="a")(hidden), "b": layers.Dense(1, "sigmoid", name="b")(hidden)}
    model = tf.keras.Model(inputs, outputs)
    model.compile(
        tf.keras.optimizers.SGD(0.02),
        {"a": "mse", "b": "binary_crossentropy"},
        loss_weights={"a": 0.3, "b": 2.0},
        metrics={"b": ["accuracy"]},
    )
    return model


def synchronised_batch_norm():
    # A large epsilon: with three samples a variance may be next to nothing, and rounding would be blown up.
    normalization = layers.BatchNormalization(epsilon=0.1, synchronized=True)
    model = stack(layers.Dense(8), normalization, layers.Activation("tanh"))
    model.compile(tf.keras.optimizers.SGD(0.02), "mse")
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
    model.compile(tf.keras.optimizers.SGD(0.02))
    return model


def apply_gradients_by_hand():
    model = stack(layers.Dense(8, "tanh", kernel_regularizer="l2"), kind=Applying)
    model.compile(tf.keras.optimizers.SGD(0.02))
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
        return model.fit(x, y, batch_size, epochs, verbose=0, shuffle=shuffle, sample_weight=sample_weight, **arguments)
    kg.distribute(model, strategy_of(num_replicas))
    feeder = kg.DistributedFeeder(x, y, sample_weight, batch_size=batch_size, shuffle=shuffle)
    return model.fit(feeder, epochs=epochs, verbose=0, **arguments)


def assert_equal_to_one_device(name, num_replicas, points):
    """One model on one device and one on several are trained with the data of each point, one after another."""
    models = []
    for _ in range(2):
        tf.keras.utils.set_random_seed(1)
        models.append(MODELS[name]())
    reference, model = models
    steps = 0
    for num_samples, batch_size, weights in points:
        x, y = make_data(name, num_samples)
        sample_weight, arguments = make_weights(name, weights, num_samples)
        if weights == "classes":
            y = (y > 0).astype("float32")
        expected = train(reference, 1, x, y, sample_weight, batch_size, **arguments)
        history = train(model, num_replicas, x, y, sample_weight, batch_size, **arguments)
        assert all(np.isfinite(values).all() for values in expected.history.values())
        assert largest_difference(model, reference) <= TOLERANCE
        assert largest_log_difference(history, expected) <= TOLERANCE
        steps += 3 * -(-num_samples // batch_size)
        assert model.optimizer.iterations.numpy() == steps


# --- The grid ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_replicas", "points"),
    [
        # Samples, global batch size, weights. Of 1025 samples one is left over, of 1030 six.
        ("mlp", 4, [(1025, 256, None), (1027, 256, None), (3, 8, None), (1, 8, None)]),
        ("mlp", 2, [(1030, 250, None), (64, 250, None), (7, 256, None)]),
        ("l2", 4, [(1030, 256, None), (7, 8, None), (1024, 250, None)]),
        ("embedding", 2, [(1027, 256, "samples"), (7, 8, "samples")]),
        ("adam_clipnorm", 2, [(1025, 256, "samples"), (3, 8, "samples")]),
        ("global_clipnorm", 8, [(1030, 256, None), (7, 8, None)]),
        ("scalar_mean_loss", 2, [(1025, 250, None), (1027, 256, None), (1, 256, None)]),
        ("two_outputs", 2, [(1027, 256, "samples"), (7, 250, "samples")]),
        ("synchronised_batch_norm", 3, [(1030, 250, None), (64, 250, None)]),
        ("minimize_by_hand", 3, [(1025, 256, None), (1030, 250, None)]),
        ("apply_gradients_by_hand", 2, [(1025, 256, None), (7, 8, None)]),
        ("l2", 3, [(1027, 256, "classes"), (7, 8, "classes")]),
    ],
)
def test_grid(name, num_replicas, points):
    assert_equal_to_one_device(name, num_replicas, points)


def can_have(name, weights):
    """Keras has class weights for one output only, and multiplies a mean loss by the mean of the weights."""
    never = name.endswith("by_hand") or name == "scalar_mean_loss"
    return weights is None or not (never or (weights == "classes" and name == "two_outputs"))


@settings(
    max_examples=int(os.environ.get("KERAS_GPUFEED_EXAMPLES", "2")),
    derandomize="KERAS_GPUFEED_EXAMPLES" not in os.environ,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # A point is as small as its neighbours: there is nothing to shrink.
    suppress_health_check=list(HealthCheck),
)
@given(
    st.sampled_from([(name, weights) for name in MODELS for weights in WEIGHTS if can_have(name, weights)]),
    st.sampled_from(NUM_SAMPLES),
    st.sampled_from(BATCH_SIZES),
    st.sampled_from(NUM_REPLICAS),
)
def test_anywhere_in_the_grid(model_and_weights, num_samples, batch_size, num_replicas):
    """Two points each time; with `KERAS_GPUFEED_EXAMPLES=500` in the environment as many, others each time."""
    name, weights = model_and_weights
    assert_equal_to_one_device(name, num_replicas, [(num_samples, batch_size, weights)])
    tf.keras.backend.clear_session()


def test_stock_keras_is_not_exact():
    """The comparison can fail: the same data by Keras's own way through the strategy, with six samples left."""
    x, y = make_data("mlp", 1030)
    reference = mlp()
    train(reference, 1, x, y, batch_size=256)
    tf.keras.utils.set_random_seed(1)
    with strategy_of(4).scope():
        model = mlp()
    model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(256), epochs=3, verbose=0)
    assert largest_difference(model, reference) > 0.01


def test_shuffled_training_is_the_same_on_any_number_of_replicas():
    x, y = make_data("mlp", 70)
    reference = expected = None
    for num_replicas in (1, 3):
        tf.keras.utils.set_random_seed(1)
        model = kg.distribute(mlp(), strategy_of(num_replicas))
        history = model.fit(kg.DistributedFeeder(x, y, seed=11), epochs=3, verbose=0)
        if num_replicas == 1:
            reference, expected = model, history
        assert largest_difference(model, reference) <= TOLERANCE
        assert largest_log_difference(history, expected) <= TOLERANCE


def test_one_device_is_plain_keras():
    """A feeder on one device gives bit for bit what Keras gives."""
    x, y = make_data("mlp", 22)
    expected, model = mlp(), mlp()
    model.set_weights(expected.get_weights())
    train(expected, 1, x, y, batch_size=6)
    kg.distribute(model, strategy_of(1))
    model.fit(kg.DistributedFeeder(x, y, batch_size=6, shuffle=False), epochs=3, verbose=0)
    assert all((a == b).all() for a, b in zip(model.get_weights(), expected.get_weights()))


@pytest.mark.parametrize("batch_size", [8, 9], ids=["uneven steps", "even steps"])
def test_double_precision(batch_size):
    """What weighs the replicas is double too, so that the difference is that of double precision."""
    tf.keras.backend.set_floatx("float64")
    try:
        x, y = (array.astype("float64") for array in make_data("mlp", 18))
        reference, model = mlp(), mlp()
        model.set_weights(reference.get_weights())
        train(reference, 1, x, y, batch_size=batch_size)
        train(model, 3, x, y, batch_size=batch_size)
        assert largest_difference(model, reference) <= 1e-12
    finally:
        tf.keras.backend.set_floatx("float32")


def test_parts_that_are_sent_to_the_devices_ahead(monkeypatch):
    """As where devices have memory of their own, which the virtual ones have not; the last of 13 is a small tail."""
    monkeypatch.setattr(internals, "share_memory_with_host", lambda devices: False)
    assert_equal_to_one_device("mlp", 3, [(13, 4, None), (12, 6, None)])
    x, y = make_data("mlp", 13)
    model = kg.distribute(mlp(), strategy_of(3))
    feeder = kg.DistributedFeeder(x, y, batch_size=4)
    np.testing.assert_allclose(model.predict(feeder, verbose=0), model(x), atol=1e-6)
    assert model.evaluate(feeder, verbose=0)[0] == pytest.approx(np.mean(np.square(model(x) - y)), rel=1e-5)


# --- Losses ------------------------------------------------------------------------------------------------


def train_with_losses(num_replicas, losses):
    tf.keras.utils.set_random_seed(1)
    inputs = tf.keras.Input((1,))
    model = tf.keras.Model(inputs, {name: layers.Dense(1, name=name)(inputs) for name in losses})
    model.compile(tf.keras.optimizers.SGD(0.01), losses)
    x = np.arange(22, dtype="float32")[:, None] / 22
    return model, train(model, num_replicas, x, dict.fromkeys(losses, 2 * x), batch_size=8)


@pytest.mark.parametrize(
    "losses",
    [
        {
            "vector": lambda y, p: tf.reduce_mean(tf.square(y - p), -1),
            "scalar": lambda y, p: tf.reduce_mean(tf.square(y - p)),
            "auto": tf.keras.losses.MeanSquaredError(),
            "sum": tf.keras.losses.MeanAbsoluteError(reduction="sum"),
            "mean": tf.keras.losses.LogCosh(reduction="sum_over_batch_size"),
        },
        {"none": tf.keras.losses.Huber(reduction="none")},
    ],
    ids=["reduced", "not reduced"],
)
def test_losses_of_every_reduction(losses):
    (reference, expected), (model, history) = (train_with_losses(number, losses) for number in (1, 3))
    assert largest_difference(model, reference) <= TOLERANCE
    if "none" not in losses:  # Keras's container weighs what it logs of such a loss by squares: docs/exactness.md.
        assert largest_log_difference(history, expected) <= TOLERANCE


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
        return {"loss": tf.reduce_mean(tf.square(errors)), "samples": tf.shape(x)[0]}

    def test_step(self, data):
        x, y = data
        return {"loss": tf.reduce_mean(tf.square(self(x) - y))}


def test_scalars_that_a_step_returns_are_means_over_the_global_batch():
    """Stock Keras shows their sum over replicas: four times the loss."""
    model = stack(kind=ReturningItsLoss)
    model.compile()
    kg.distribute(model, strategy_of(4))
    for num_samples in (19, 22, 3):  # A small tail is the global batch of three.
        x, y = make_data("mlp", num_samples)
        expected = np.mean(np.square(model(x) - y))
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


def test_no_layer_ever_sees_zero_samples():
    """Every remainder of batches of five; a mean over nothing would be NaN, and stay in the weights."""
    model = stack(Guard())
    model.compile(tf.keras.optimizers.SGD(0.01), lambda y, p: tf.reduce_mean(tf.square(y - p)))
    kg.distribute(model, strategy_of(3))
    for num_samples in range(6, 11):
        x, y = make_data("mlp", num_samples)
        feeder = kg.DistributedFeeder(x, y, batch_size=5)
        history = model.fit(feeder, validation_data=feeder, verbose=0).history
        assert np.isfinite([*history["loss"], *history["val_loss"]]).all()
        predictions = model.predict(kg.DistributedFeeder(x, batch_size=5), verbose=0)
        assert predictions.shape == (num_samples, 1)
        assert np.isfinite(predictions).all()
    assert model.optimizer.iterations.numpy() == 5 * 2


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_counts_add_up(num_replicas):
    """Every sample is one of true or false, positive or negative, on any number of replicas."""
    counts = ["TruePositives", "FalsePositives", "TrueNegatives", "FalseNegatives"]
    model = tf.keras.Sequential([layers.Dense(1, "sigmoid", kernel_initializer="ones", input_shape=(1,))])
    model.compile("sgd", "mse", metrics=[getattr(tf.keras.metrics, name)() for name in counts])
    kg.distribute(model, strategy_of(num_replicas))
    for num_samples in (1000, 961):
        x = np.linspace(-1, 1, num_samples, dtype="float32")[:, None]
        y = (np.arange(num_samples) % 3 == 0).astype("float32")[:, None]
        _, *found = model.evaluate(kg.DistributedFeeder(x, y, batch_size=64), verbose=0)
        positive, true = x > 0, y > 0
        assert found == [
            (positive & true).sum(),
            (positive & ~true).sum(),
            (~positive & ~true).sum(),
            (~positive & true).sum(),
        ]
        assert sum(found) == num_samples


def test_evaluation_counts_the_last_sample():
    """Also where training leaves out what does not fill a batch."""
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


def flat(parts):
    return list(itertools.chain.from_iterable(parts))


def merged(parts, num_replicas):
    """The samples of each step."""
    return [flat(parts[i : i + num_replicas]) for i in range(0, len(parts), num_replicas)]


def test_the_order_depends_on_seed_and_epoch_only():
    orders = [merged(samples_fed(n, seed=11), n) for n in (1, 2, 3)]
    assert orders[0] == orders[1] == orders[2]  # Six samples make no small tail on any of them.
    first, second = orders[0][:5], orders[0][5:]
    assert first != second
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(30))
    assert merged(samples_fed(2, seed=12), 2) != orders[0]


def test_without_a_seed_every_feeder_draws_its_own():
    assert samples_fed(1, epochs=1) != samples_fed(1, epochs=1)
    x = np.arange(30)
    drawn = kg.DistributedFeeder(x, x, batch_size=6)
    parts = []
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
