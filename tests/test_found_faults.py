"""Models and sources that were once trained wrongly, or refused, where plain Keras trains them."""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from comparison import largest_difference, strategy_of
from sources_for_workers import Unreadable, UnreadableError

import keras_gpufeed as kg

layers = tf.keras.layers

X = np.random.default_rng(0).normal(size=(22, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def train(make, num_replicas, **arguments):
    """Two epochs with uneven batches: 8, 8 and 6; on one device by plain Keras."""
    tf.keras.utils.set_random_seed(1)
    model = make()
    if num_replicas == 1:
        model.fit(X, Y, 8, epochs=2, shuffle=False, verbose=0, **arguments)
    else:
        kg.distribute(model, strategy_of(num_replicas))
        model.fit(kg.DistributedFeeder(X, Y, batch_size=8, shuffle=False), epochs=2, verbose=0, **arguments)
    return model


class ByHand(tf.keras.Model):
    """Two layers; what `train_step` does with them is the case."""

    def __init__(self, step):
        super().__init__()
        self.first, self.second = layers.Dense(4, "tanh"), layers.Dense(1)
        self.step = step
        self(X[:1])
        self.compile(tf.keras.optimizers.SGD(0.1))
        self.other_optimizer = tf.keras.optimizers.SGD(0.1)

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        return {"loss": self.step(self, *data)}


def in_two_stages(model, x, y):
    """The gradient by the features goes on to the layer that made them."""
    with tf.GradientTape() as back:
        features = model.first(x)
    with tf.GradientTape() as front:
        front.watch(features)
        loss = tf.reduce_mean(tf.square(model.second(features) - y))
    by_features, *by_second = front.gradient(loss, [features, *model.second.trainable_variables])
    by_first = back.gradient(features, model.first.trainable_variables, output_gradients=by_features)
    model.optimizer.apply_gradients(zip([*by_first, *by_second], model.trainable_variables))
    return loss


def with_an_inner_optimizer(model, x, y):
    """A step inside another tape, after a gradient of the whole step."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    model.optimizer.minimize(loss, model.trainable_variables, tape=tape)
    with tf.GradientTape():
        with tf.GradientTape() as inner:
            other = tf.reduce_mean(tf.abs(model(x) - y))
        gradients = inner.gradient(other, model.second.trainable_variables)
        model.other_optimizer.apply_gradients(zip(gradients, model.second.trainable_variables))
    return loss


def of_unknown_rank(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.py_function(lambda a, b: tf.reduce_mean(tf.square(a - b)), [model(x), y], tf.float32)
    model.optimizer.minimize(loss, model.trainable_variables, tape=tape)
    return loss


def by_a_jacobian(model, x, y):
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))[None]
    rows = tape.jacobian(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip([row[0] for row in rows], model.trainable_variables))
    return loss[0]


class Recomputing(layers.Layer):
    """Computes its output again for the gradient, to spare memory."""

    def build(self, shape):
        self.dense = layers.Dense(4, "tanh")
        self.dense.build(shape)

    def call(self, x):
        return tf.recompute_grad(self.dense)(x)


def recomputing():
    model = tf.keras.Sequential([layers.Input((3,)), Recomputing(), layers.Dense(1)])
    model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    return model


def frozen_after_compiling():
    """What was trainable when the model was compiled counts, as in Keras's GANs."""
    model = tf.keras.Sequential([layers.Dense(1, input_shape=(3,))])
    model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    model.trainable = False
    return model


MODELS = {
    "in two stages": lambda: ByHand(in_two_stages),
    "an inner optimizer": lambda: ByHand(with_an_inner_optimizer),
    "unknown rank": lambda: ByHand(of_unknown_rank),
    "jacobian": lambda: ByHand(by_a_jacobian),
    "recompute_grad": recomputing,
    "frozen after compiling": frozen_after_compiling,
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    reference, start, model = train(MODELS[name], 1), MODELS[name](), train(MODELS[name], 3)
    assert largest_difference(reference, start) > 1e-3
    assert largest_difference(model, reference) <= 1e-6


def test_a_model_inside_one_that_was_moved_stays_exact_with_plain_arrays():
    models = []
    for num_replicas in (1, 3):
        tf.keras.utils.set_random_seed(1)
        inner = tf.keras.Sequential([layers.Input((3,)), layers.Dense(2, "tanh"), layers.Dense(1)])
        inner.compile(tf.keras.optimizers.SGD(0.1), "mse")
        outer = tf.keras.Sequential([layers.Input((3,)), inner, layers.Dense(1)])
        kg.distribute(outer, strategy_of(num_replicas))
        inner.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        models.append(inner)
    assert largest_difference(*models) <= 1e-6


def test_single_batches_are_exact():
    results = []
    for num_replicas in (1, 3):
        tf.keras.utils.set_random_seed(1)
        model = tf.keras.Sequential([layers.Dense(4, "tanh", input_shape=(3,)), layers.Dense(1)])
        model.compile(tf.keras.optimizers.Adam(0.1, epsilon=0.1), "mse", metrics=["mae"])
        kg.distribute(model, strategy_of(num_replicas))
        logs = []
        for number in (7, 2, 6):  # Two samples on three replicas are a small tail.
            weights = np.linspace(0, 1, number)
            logs.append(model.train_on_batch(X[:number], Y[:number], sample_weight=weights))
            logs.append(model.train_on_batch(X[:number], np.float32(Y[:number] > 0), class_weight={0: 1.0, 1: 3.0}))
            logs.append(model.test_on_batch(X[:number], Y[:number]))
            assert model.predict_on_batch(X[:number]).shape == (number, 1)
        results.append((model, logs))
    (reference, expected), (model, logs) = results
    assert largest_difference(model, reference) <= 1e-6
    np.testing.assert_allclose(logs, expected, rtol=1e-5)


def test_functions_of_models_losses_and_signatures():
    class Functions(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.net = tf.keras.Sequential([layers.Dense(3), layers.BatchNormalization(synchronized=True)])
            self.run = tf.function(self.net)
            self.loss_of = tf.function(tf.keras.losses.MeanSquaredError(reduction="sum"))

        @tf.function(input_signature=[tf.TensorSpec((None, 1)), tf.TensorSpec(())])
        def scaled(self, values, factor):
            return values * factor

        def call(self, x, training=False):
            return tf.reduce_sum(self.run(x, training=training), axis=1, keepdims=True)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.loss_of(self.scaled(y, 2), self(x, training=True))
            self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
            return {"loss": np.float32(2), "any": tf.reduce_any(y > 0), "name": tf.constant("a")}

    def make():
        model = Functions()
        model(X[:1])
        model.compile(tf.keras.optimizers.SGD(0.001))
        return model

    models = []
    for num_replicas in (1, 3):
        tf.keras.utils.set_random_seed(1)
        model = kg.distribute(make(), strategy_of(num_replicas))
        feeder = kg.DistributedFeeder(X, Y, batch_size=8, shuffle=False)
        history = model.fit(feeder, verbose=0).history
        assert history["loss"] == [2.0]
        models.append(model)
    assert largest_difference(*models[::-1]) <= 1e-5


# --- Sources -------------------------------------------------------------------------------------------------


def sums_of(feeder):
    model = tf.keras.Sequential([layers.Lambda(lambda x: tf.reduce_sum(x, axis=1, keepdims=True))])
    return kg.distribute(model, strategy_of(2)).predict(feeder, verbose=0)[:, 0].tolist()


def test_a_sample_may_be_empty():
    assert sums_of(kg.DistributedFeeder([[1, 2], [], [3]], padding_value=5)) == [3, 10, 8]
    batches = [[[1, 1], []], [[], []]]
    assert sums_of(kg.DistributedFeeder(lambda: iter(batches), padding_value=7)) == [2, 14, 0, 0]


def test_batches_of_one_length_do_not_fix_it():
    batches = [[[1, 2], [3, 4]], [[1, 1], [2, 2]], [[1], [2, 2, 2]]]
    assert sums_of(kg.DistributedFeeder(lambda: iter(batches), padding_value=0)) == [3, 7, 2, 4, 1, 6]


def test_a_series_of_lists():
    pandas = pytest.importorskip("pandas")
    assert sums_of(kg.DistributedFeeder(pandas.Series([[1, 2], [3]]), padding_value=1)) == [3, 4]


def test_a_list_of_arrays_is_told_to_be_several_inputs():
    with pytest.raises(kg.SourceError, match=r"x\[0\]: 2, x\[1\]: 1.*several inputs; .*padding_value="):
        kg.DistributedFeeder([np.ones(2), np.ones(1)])


def test_a_transform_may_return_a_list():
    models = []
    for transform in (lambda x, y: (2 * x, y), lambda x, y: [2 * x, y]):
        tf.keras.utils.set_random_seed(1)
        model = tf.keras.Sequential([layers.Dense(1, input_shape=(3,))])
        model.compile("sgd", "mse")
        kg.distribute(model, strategy_of(2))
        model.fit(kg.DistributedFeeder(X, Y, transform=transform, seed=1), verbose=0)
        models.append(model)
    assert largest_difference(*models) == 0


@pytest.mark.parametrize("done", [7, 9, 10, 12], ids=["middle", "one before the end", "end", "next epoch"])
def test_a_generator_of_unknown_length_is_resumed(tmp_path, done):
    fed = []

    class Noting(tf.keras.Sequential):
        def train_step(self, data):
            fed.append(data[0].numpy()[0, 0])
            return super().train_step(data)

    class Stop(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if len(fed) == 2 * done:  # On two replicas.
                raise KeyboardInterrupt

    def generate(epoch):
        for number in range(10):
            yield np.full((4, 1), 100 * epoch + number, "float32"), np.zeros((4, 1), "float32")

    def run(*callbacks):
        model = Noting([layers.Dense(1, input_shape=(1,), kernel_initializer="zeros")])
        model.compile("sgd", "mse", run_eagerly=True)
        kg.distribute(model, strategy_of(2))
        backup = tf.keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=1)
        return model.fit(kg.DistributedFeeder(generate), epochs=2, verbose=0, callbacks=[backup, *callbacks])

    with pytest.raises(KeyboardInterrupt):
        run(Stop())
    del fed[2 * done :]
    history = run()
    assert fed[::2] == [*range(10), *range(100, 110)]
    assert history.epoch == ([0, 1] if done < 10 else [1])


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_that_takes_other_arguments_than_it_passes_on(workers):
    model = tf.keras.Sequential([layers.Dense(1)])
    kg.distribute(model, strategy_of(2))
    feeder = kg.DistributedFeeder(Unreadable(), batch_size=2, workers=workers)
    with feeder, pytest.raises(UnreadableError, match=r"^a\.npy: 5$") as raised:
        model.predict(feeder, verbose=0)
    assert raised.value.path == "a.npy"


def test_what_was_done_is_said_once_though_logging_is_set_up_later(tmp_path):
    program = """
import logging, numpy as np, tensorflow as tf, keras_gpufeed as kg
kg.use_virtual_devices(2)
for _ in range(2):
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(kg.DistributedFeeder(np.ones((4, 1)), np.ones(4)), verbose=0)
    logging.basicConfig(level=logging.INFO)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.count("2 replicas: CPU:0-1") == 2
