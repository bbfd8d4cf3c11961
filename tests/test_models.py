"""Where models come from, how they are moved, and what stays as it was."""

import functools
import logging

import numpy as np
import pytest
import tensorflow as tf
from comparison import largest_difference, largest_log_difference, strategy_of

import keras_gpufeed as kg

layers, optimizers = tf.keras.layers, tf.keras.optimizers

X = np.random.default_rng(0).normal(size=(21, 3)).astype("float32")
Y = X.sum(1, keepdims=True)
BATCH_SIZE = 8


def feeder_of(*data, **arguments):
    return kg.DistributedFeeder(*data, **{"batch_size": BATCH_SIZE, "shuffle": False, **arguments})


def make_model(optimizer=None, **arguments):
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([layers.Dense(4, "tanh", input_shape=(3,)), layers.Dense(1)])
    model.compile(optimizer or optimizers.SGD(0.05, momentum=0.9), "mse", **arguments)
    return model


def train_plainly(model, epochs=1):
    return model.fit(X, Y, BATCH_SIZE, epochs=epochs, shuffle=False, verbose=0)


@functools.cache
def plainly_trained(epochs):
    """What `make_model` makes, after so many epochs on one device, without the package. Not to be trained on."""
    model = make_model()
    return model, train_plainly(model, epochs)


def train_fed(model, strategy, epochs=2):
    return kg.distribute(model, strategy).fit(feeder_of(X, Y), epochs=epochs, verbose=0)


def assert_equals_plain_training(model, history):
    """The last epochs of it, if the model has been trained before."""
    epochs = model.optimizer.iterations.numpy() // 3
    expected, expected_history = plainly_trained(int(epochs))
    assert largest_difference(model, expected) <= 1e-5
    losses = history.history["loss"]
    assert losses == pytest.approx(expected_history.history["loss"][-len(losses) :], rel=1e-5)


# --- The move ----------------------------------------------------------------------------------------------


def test_every_object_stays_the_same_one():
    model = make_model(metrics=["mae"])
    train_plainly(model)
    ids = [id(item) for item in (model, *model.layers, *model.weights, *model.optimizer.variables, *model.metrics)]
    weights, slots = model.get_weights(), [variable.numpy() for variable in model.optimizer.variables]
    learning_rate, iterations = model.optimizer.learning_rate, model.optimizer.iterations

    moved = kg.distribute(model, strategy_of(2))

    assert moved is model
    assert ids == [
        id(item) for item in (model, *model.layers, *model.weights, *model.optimizer.variables, *model.metrics)
    ]
    assert model.optimizer.learning_rate is learning_rate
    assert model.optimizer.iterations is iterations
    assert iterations.numpy() == 3
    assert all((a == b).all() for a, b in zip(model.get_weights(), weights))
    assert all((a.numpy() == b).all() for a, b in zip(model.optimizer.variables, slots))
    assert model.distribute_strategy is strategy_of(2)
    assert [len(variable.values) for variable in model.weights] == [2, 2, 2, 2]


def test_metrics_keep_what_they_have_counted():
    metric = tf.keras.metrics.Mean()
    model = make_model(metrics=["mae"])
    model.counter = metric
    metric.update_state([1.0, 2.0, 3.0])
    kg.distribute(model, strategy_of(3))
    assert metric.result().numpy() == 2.0
    assert metric.count.numpy() == 3.0


def test_moving_twice_is_moving_once():
    model = make_model()
    kg.distribute(model, strategy_of(2))
    weights = [id(weight) for weight in model.weights]
    assert kg.distribute(model, strategy_of(2)) is model
    assert kg.distribute(model) is model  # Where it lives already.
    assert [id(weight) for weight in model.weights] == weights


def test_assigning_weights_reaches_every_replica():
    model = kg.distribute(make_model(), strategy_of(3))
    model.set_weights([np.full_like(weight, 0.5) for weight in model.get_weights()])
    for variable in model.weights:
        assert all((component.numpy() == 0.5).all() for component in variable.values)
    model.fit(feeder_of(X, Y), epochs=2, verbose=0)
    for variable in model.weights:  # Replicas never drift apart.
        first, *others = (component.numpy() for component in variable.values)
        assert all((first == other).all() for other in others)


def test_a_model_may_be_compiled_again_after_the_move():
    model, reference = make_model("adam"), make_model("adam")
    kg.distribute(model, strategy_of(2))
    for one in (model, reference):
        one.layers[0].trainable = False
        one.compile(optimizers.SGD(0.1), "mae", metrics=["mse"])
    expected, history = train_plainly(reference), train_fed(model, strategy_of(2), epochs=1)
    assert largest_difference(model, reference) <= 1e-5
    assert largest_log_difference(history, expected) <= 1e-5


def test_a_model_may_be_compiled_after_the_move_only():
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([layers.Dense(4, "tanh", input_shape=(3,)), layers.Dense(1)])
    kg.distribute(model, strategy_of(2))
    model.compile(optimizers.SGD(0.05, momentum=0.9), "mse")
    assert_equals_plain_training(model, train_fed(model, strategy_of(2)))


def test_what_is_made_after_the_move_is_moved_as_well():
    """Whoever hands a feeder to `fit` need not know of scopes."""
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([layers.Dense(4, "tanh", input_shape=(3,))])
    kg.distribute(model, strategy_of(2))
    model.add(layers.Dense(1))
    model.compile(optimizers.SGD(0.05, momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    assert_equals_plain_training(model, train_fed(model, strategy_of(2)))


def test_a_new_head_on_a_moved_model():
    heads = []
    for num_replicas in (1, 2):
        base = make_model()
        train_plainly(base) if num_replicas == 1 else train_fed(base, strategy_of(2), epochs=1)
        base.layers[0].trainable = False
        head = tf.keras.Model(base.input, layers.Dense(1, kernel_initializer="ones")(base.layers[0].output))
        head.compile(optimizers.SGD(0.05), "mse")
        train_plainly(head) if num_replicas == 1 else train_fed(head, strategy_of(2), epochs=1)
        heads.append(head)
    assert largest_difference(*heads[::-1]) <= 1e-5


# --- Shared parts ------------------------------------------------------------------------------------------


def make_encoder():
    inputs = tf.keras.Input((3,))
    return tf.keras.Model(inputs, layers.Dense(4, "tanh", kernel_regularizer="l2")(inputs), name="encoder")


def with_head(encoder, units=1):
    inputs = tf.keras.Input((3,))
    model = tf.keras.Model(inputs, layers.Dense(units)(encoder(inputs)))
    model.compile(optimizers.SGD(0.1), "mse")
    return model


def test_a_shared_encoder_on_its_own_afterwards():
    encoders = []
    for num_replicas in (1, 2):
        tf.keras.utils.set_random_seed(1)
        encoder = make_encoder()
        model = with_head(encoder)
        if num_replicas == 1:
            train_plainly(model)
        else:
            train_fed(model, strategy_of(2), epochs=1)
        encoders.append(encoder)
    expected, encoder = encoders
    assert np.allclose(encoder(X), expected(X), atol=1e-5)
    assert np.allclose(encoder.predict(X, verbose=0), expected.predict(X, verbose=0), atol=1e-5)
    assert np.allclose(encoder.predict(feeder_of(X), verbose=0), expected.predict(X, verbose=0), atol=1e-5)


def test_two_models_that_share_a_layer():
    found = []
    for num_replicas in (1, 2):
        tf.keras.utils.set_random_seed(1)
        encoder = make_encoder()
        models = [with_head(encoder), with_head(encoder, units=2)]
        for model in [*models, *models]:
            if num_replicas == 1:
                train_plainly(model)
            else:
                train_fed(model, strategy_of(2), epochs=1)
        found.append(models)
    assert all(largest_difference(model, reference) <= 1e-5 for reference, model in zip(*found))


def test_a_model_that_shares_a_layer_with_one_on_another_strategy():
    encoder = make_encoder()
    kg.distribute(with_head(encoder), strategy_of(2))
    with pytest.raises(kg.StrategyError) as caught:
        kg.distribute(with_head(encoder), strategy_of(3))
    assert "another strategy" in str(caught.value)


def test_two_models_with_one_optimizer():
    optimizer = optimizers.legacy.Adam(0.01)
    models = [make_model(optimizer), make_model(optimizer)]
    for model in models:
        kg.distribute(model, strategy_of(2)).fit(feeder_of(X, Y), verbose=0)
    assert optimizer.iterations.numpy() == 6


# --- Models that are not built yet -------------------------------------------------------------------------


class Unbuilt(tf.keras.Model):
    """Makes a layer in `build`, and one in its first call."""

    def build(self, input_shape):
        self.first = layers.Dense(4, "tanh", kernel_initializer="ones")

    def call(self, inputs):
        if not hasattr(self, "second"):
            self.second = layers.Dense(1, kernel_initializer="ones")
        return self.second(self.first(inputs))


@pytest.mark.parametrize(
    "make",
    [
        Unbuilt,
        lambda: tf.keras.Sequential(
            [
                layers.Dense(2, kernel_initializer="ones"),
                layers.BatchNormalization(synchronized=True),
                layers.Dense(1, kernel_initializer="ones"),
            ]
        ),
    ],
    ids=["subclassed", "Sequential"],
)
def test_models_that_are_not_built_yet(make):
    reference, model = make(), make()
    for one in (reference, model):
        one.compile(optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    expected, history = train_plainly(reference, epochs=2), train_fed(model, strategy_of(2))
    assert largest_difference(model, reference) <= 1e-5
    assert largest_log_difference(history, expected) <= 1e-5


def test_a_model_that_predicts_before_it_is_compiled():
    """And moves on its own: onto all devices."""
    model = tf.keras.Sequential([layers.Dense(1, kernel_initializer="ones")])
    assert np.allclose(model.predict(feeder_of(X), verbose=0), Y, atol=1e-5)
    assert model.distribute_strategy.num_replicas_in_sync == 8


# --- Models that were loaded -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model after one epoch, saved in every format."""
    folder = tmp_path_factory.mktemp("saved")
    model = make_model()
    train_plainly(model)
    for name in ("m.keras", "m.h5", "m"):
        model.save(folder / name)
    return folder


@pytest.mark.parametrize("name", ["m.keras", "m.h5"], ids=["keras", "h5"])
def test_loaded_models_go_on_where_they_were(saved, name):
    model = tf.keras.models.load_model(saved / name)
    assert_equals_plain_training(model, train_fed(model, strategy_of(2)))


def test_loaded_models_go_on_as_without_the_package(saved):
    """From a SavedModel, Keras restores no state of the optimizer."""
    model, reference = (tf.keras.models.load_model(saved / "m") for _ in range(2))
    expected, history = train_plainly(reference, epochs=2), train_fed(model, strategy_of(2))
    assert largest_difference(model, reference) <= 1e-5
    assert largest_log_difference(history, expected) <= 1e-5


@tf.keras.utils.register_keras_serializable()
class Scaled(tf.keras.Model):
    """Registered, so that Keras finds it when it loads a file."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.scale = self.add_weight("scale", (3,), initializer="ones")
        self.stack = [layers.Dense(4, "tanh"), layers.Dense(1)]

    def call(self, inputs):
        hidden = inputs * self.scale
        for layer in self.stack:
            hidden = layer(hidden)
        return hidden

    def get_config(self):
        return super().get_config()


class Unregistered(Scaled):
    """Not found when a SavedModel is loaded."""


@pytest.mark.parametrize("name", ["m.keras", "m"], ids=["keras", "SavedModel"])
def test_loaded_models_of_a_class_of_the_users(tmp_path, name):
    reference = Scaled()
    reference.compile(optimizers.SGD(0.05, momentum=0.9), "mse")
    train_plainly(reference)
    reference.save(tmp_path / name)
    model, reference = (tf.keras.models.load_model(tmp_path / name) for _ in range(2))
    assert type(model) is Scaled
    train_plainly(reference, epochs=2)
    train_fed(model, strategy_of(2))
    assert largest_difference(model, reference) <= 1e-5


def test_a_saved_model_without_its_class_is_refused(tmp_path):
    model = Unregistered()
    model.compile("sgd", "mse")
    model.predict(X, verbose=0)
    model.save(tmp_path / "m")
    loaded = tf.keras.models.load_model(tmp_path / "m")
    with pytest.raises(kg.StrategyError) as caught:
        kg.distribute(loaded, strategy_of(2))
    for words in ("SavedModel", "without its class", "custom_objects"):
        assert words in str(caught.value)


def test_a_clone_of_a_moved_model_is_a_plain_model():
    model = kg.distribute(make_model(), strategy_of(2))
    clone = tf.keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    clone.compile(optimizers.SGD(0.05, momentum=0.9), "mse")
    train_plainly(clone)
    assert_equals_plain_training(clone, train_fed(clone, strategy_of(3), epochs=1))


# --- keras.applications ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda **arguments: tf.keras.applications.MobileNet((32, 32, 3), alpha=0.25, **arguments),
        lambda **arguments: tf.keras.applications.ResNet50(input_shape=(32, 32, 3), **arguments),
        lambda **arguments: tf.keras.applications.VGG16(input_shape=(32, 32, 3), **arguments),
    ],
    ids=["MobileNet", "ResNet50", "VGG16"],
)
def test_applications(make, caplog):
    """Their BatchNormalization is that of each replica, so only the predictions can be equal."""
    images = np.random.default_rng(0).random((3, 32, 32, 3), "float32")
    model = make(weights=None, include_top=False, pooling="avg")
    # Eagerly: to trace so many layers takes longer than all the rest of this file.
    model.compile("sgd", "mse", run_eagerly=True)
    expected = model(images, training=False).numpy()
    kg.distribute(model, strategy_of(2))
    assert np.allclose(model.predict(feeder_of(images), verbose=0), expected, atol=1e-5)
    before = model.get_weights()
    history = model.fit(feeder_of(images, np.zeros((3, 1))), verbose=0).history
    assert np.isfinite(history["loss"][0])
    assert any((a != b).any() for a, b in zip(before, model.get_weights()))
    normalises = any(isinstance(layer, layers.BatchNormalization) for layer in model.layers)
    assert ("synchronized=True" in caplog.text) == normalises


# --- State, randomness, normalisation ----------------------------------------------------------------------


def make_stateful(batch_size):
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([layers.LSTM(2, stateful=True, batch_input_shape=(batch_size, 3, 1)), layers.Dense(1)])
    model.compile(optimizers.SGD(0.1), "mse")
    return model


def test_stateful_layers_with_the_samples_of_one_replica():
    x, y = X[:16, :, None], Y[:16]
    model = kg.distribute(make_stateful(4), strategy_of(2))
    model.fit(feeder_of(x, y), epochs=2, verbose=0)
    state = model.layers[0].states[0]
    assert state.shape == (4, 2)
    assert np.any(state.values[0].numpy() != state.values[1].numpy())  # Each replica remembers its samples.
    model.reset_states()
    assert not np.any(model.layers[0].states[0].values[1].numpy())


def test_stateful_layers_with_another_number_of_samples_are_refused():
    for batch_size, data in [(8, (X[:16, :, None], Y[:16])), (4, (X[:, :, None], Y))]:
        model = kg.distribute(make_stateful(batch_size), strategy_of(2))
        with pytest.raises(kg.SourceError) as caught:
            model.fit(feeder_of(*data), verbose=0)
        for words in (f"exactly {batch_size} samples", "replicas get", "Build the model", "drop_remainder=True"):
            assert words in str(caught.value)


def test_random_layers_run():
    """Replicas draw for themselves, so nothing can be compared; but all must be able to draw, and to repeat it."""
    images = np.random.default_rng(0).random((13, 8, 8, 3), "float32")

    def make():
        tf.keras.utils.set_random_seed(1)
        stack = [
            layers.RandomFlip(seed=1),
            layers.RandomRotation(0.1, seed=2),
            layers.RandomZoom(0.1),
            layers.GaussianNoise(0.1, seed=3),
            layers.Flatten(),
            layers.Dropout(0.5, seed=4),
            layers.Dense(1),
        ]
        model = tf.keras.Sequential([layers.InputLayer((8, 8, 3)), *stack])
        model.compile(optimizers.SGD(0.001), "mse")
        return model

    model = make()
    expected = model(images, training=False).numpy()
    kg.distribute(model, strategy_of(2))
    assert np.allclose(model.predict(feeder_of(images), verbose=0), expected, atol=1e-5)
    losses = model.fit(feeder_of(images, np.zeros(13)), epochs=3, verbose=0).history["loss"]
    assert np.isfinite(losses).all()
    assert len(set(losses)) == 3


def test_batch_normalisation_holds_the_same_statistics_on_all_replicas(tmp_path):
    model = tf.keras.Sequential([layers.BatchNormalization(input_shape=(3,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    kg.distribute(model, strategy_of(3))
    model.fit(feeder_of(X, Y), epochs=2, verbose=0)
    for variable in (model.layers[0].moving_mean, model.layers[0].moving_variance):
        first, *others = (component.numpy() for component in variable.values)
        assert all((first == other).all() for other in others)
    loss = model.evaluate(feeder_of(X, Y), verbose=0)
    model.save(tmp_path / "m.keras")
    assert tf.keras.models.load_model(tmp_path / "m.keras").evaluate(X, Y, verbose=0) == pytest.approx(loss, rel=1e-5)


def test_unsynchronised_batch_normalisation_is_pointed_out_once(caplog):
    for synchronized, times in [(False, 1), (True, 0)]:
        caplog.clear()
        normalization = layers.BatchNormalization(synchronized=synchronized, input_shape=(3,), name="norm")
        model = tf.keras.Sequential([normalization])
        with caplog.at_level(logging.WARNING, "keras_gpufeed"):
            kg.distribute(model, strategy_of(2))
            kg.distribute(model, strategy_of(2))
        found = [record.getMessage() for record in caplog.records]
        assert len(found) == times
        assert all("norm" in message and "synchronized=True" in message for message in found)


# --- Strategies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make_strategy",
    [
        lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
        lambda: tf.distribute.MirroredStrategy(
            ["CPU:2", "CPU:3", "CPU:5"], cross_device_ops=tf.distribute.ReductionToOneDevice()
        ),
        lambda: tf.distribute.OneDeviceStrategy("CPU:2"),
    ],
    ids=["MirroredStrategy", "MirroredStrategy with ReductionToOneDevice", "OneDeviceStrategy"],
)
def test_a_model_keeps_the_strategy_it_was_built_under(make_strategy):
    strategy = make_strategy()
    with strategy.scope():
        model = make_model()
    model.set_weights(make_model().get_weights())
    history = model.fit(feeder_of(X, Y), epochs=2, verbose=0)
    assert model.distribute_strategy is strategy
    assert_equals_plain_training(model, history)


def test_calls_inside_the_scope():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = make_model()
        model.fit(feeder_of(X, Y), validation_data=feeder_of(X, Y), verbose=0)
        model.evaluate(feeder_of(X, Y), verbose=0)
        assert model.predict(feeder_of(X), verbose=0).shape == (21, 1)


def test_strategies_of_every_size_one_after_another():
    """Stock TensorFlow: the second size fails, and so does every later run of the process."""
    for strategy in [
        strategy_of(2),
        tf.distribute.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2", "CPU:3"]),
        strategy_of(3),
        kg.get_strategy(["CPU:4", "CPU:1"]),
        tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
    ]:
        model = make_model()
        history = train_fed(model, strategy, epochs=1)
        assert model.distribute_strategy is strategy
        assert_equals_plain_training(model, history)


def test_strategies_that_cannot_be_served_are_refused_by_name():
    strategy = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"])
    with pytest.raises(kg.StrategyError) as caught:
        kg.distribute(make_model(), strategy)
    for words in ("CentralStorageStrategy", "MirroredStrategy", "OneDeviceStrategy"):
        assert words in str(caught.value)
    with strategy.scope():
        model = make_model()
    with pytest.raises(kg.StrategyError, match="CentralStorageStrategy"):
        model.fit(feeder_of(X, Y), verbose=0)


@pytest.mark.parametrize("name", ["TPUStrategy", "ParameterServerStrategy"])
def test_strategies_of_clusters_are_refused_by_name(name):
    strategy = object.__new__(getattr(tf.distribute, name))
    with pytest.raises(kg.StrategyError) as caught:
        kg.distribute(make_model(), strategy)
    assert "cannot serve" in str(caught.value)
    assert name.partition("Strategy")[0] in str(caught.value)


def test_the_same_devices_give_the_same_strategy():
    assert kg.get_strategy(["CPU:0", "CPU:1"]) is kg.get_strategy(("/device:CPU:0", "cpu:1"))
    assert kg.get_strategy() is kg.get_strategy()
    assert kg.get_strategy().num_replicas_in_sync == 8
    assert isinstance(kg.get_strategy(["CPU:3"]), tf.distribute.OneDeviceStrategy)


# --- kg.Model ----------------------------------------------------------------------------------------------


def make_functional(base):
    tf.keras.utils.set_random_seed(1)
    inputs = tf.keras.Input((3,))
    model = base(inputs, layers.Dense(1, "sigmoid")(layers.Dense(4, "tanh")(inputs)))
    model.compile(optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


def under(strategy, make, *arguments):
    with strategy.scope():
        return make(*arguments)


def test_our_functional_model_takes_arrays_and_all_arguments_of_fit():
    reference = make_functional(tf.keras.Model)
    model = under(strategy_of(3), make_functional, kg.Model)
    model.set_weights(reference.get_weights())
    labels = (Y > 0).astype("float32")
    arguments = {
        "batch_size": BATCH_SIZE,
        "epochs": 3,
        "verbose": 0,
        "validation_split": 0.3,
        "shuffle": False,
        "class_weight": {0: 1.0, 1: 3.0},
        "initial_epoch": 1,
        "validation_freq": 2,
        "validation_batch_size": 3,
    }
    expected, history = (one.fit(X, labels, **arguments) for one in (reference, model))
    assert model.distribute_strategy is strategy_of(3)
    assert largest_difference(model, reference) <= 1e-5
    assert largest_log_difference(history, expected) <= 1e-5
    weights = np.linspace(0, 1, 21, dtype="float32")
    for one in (reference, model):
        one.fit(X, labels, 8, 1, 0, None, 0.0, (X, labels), False, None, weights)  # By position.
    assert largest_difference(model, reference) <= 1e-5
    assert model.evaluate(X, labels, sample_weight=weights, verbose=0) == pytest.approx(
        reference.evaluate(X, labels, sample_weight=weights, verbose=0), rel=1e-5
    )
    predictions = reference.predict(X, verbose=0)
    assert np.allclose(model.predict(X, verbose=0), predictions, atol=1e-5)
    assert np.allclose(model.predict(X.tolist(), 4, 0), predictions, atol=1e-5)


class OurSubclass(kg.Model):
    def __init__(self):
        super().__init__()
        self.stack = [layers.Dense(4, "tanh"), layers.Dense(1)]

    def call(self, inputs):
        for layer in self.stack:
            inputs = layer(inputs)
        return inputs


def test_our_subclassed_model(tmp_path):
    model = under(strategy_of(2), OurSubclass)
    with strategy_of(2).scope():
        model.build((None, 3))
    model.set_weights(make_model().get_weights())
    model.compile(optimizers.SGD(0.05, momentum=0.9), "mse")
    history = model.fit(X, Y, batch_size=BATCH_SIZE, shuffle=False, epochs=2, validation_data=(X, Y), verbose=0)
    assert_equals_plain_training(model, history)
    assert history.history["val_loss"][-1] == pytest.approx(np.mean(np.square(model(X) - Y)), rel=1e-4)
    model.save_weights(tmp_path / "m.weights.h5")
    other = OurSubclass()
    other.build((None, 3))
    other.load_weights(tmp_path / "m.weights.h5")
    assert np.allclose(other(X), model(X), atol=1e-6)


def test_our_model_lives_on_every_device():
    model = make_functional(kg.Model)
    assert model.predict(X, verbose=0).shape == (21, 1)
    assert model.distribute_strategy.num_replicas_in_sync == 8


def test_our_model_shuffles_and_takes_steps_as_keras_does():
    model = under(strategy_of(2), make_functional, kg.Model)
    history = model.fit(X, Y, steps_per_epoch=2, epochs=2, verbose=0)  # Without a batch size: 11 samples a step.
    assert history.params["steps"] == 2
    assert model.optimizer.iterations.numpy() == 4
    history = model.fit(X, Y, verbose=0)
    assert history.params["steps"] == 1  # The batch size is 32 where none is given.
    model.fit(kg.DistributedFeeder(X, Y, batch_size=7), verbose=0)
    assert model.optimizer.iterations.numpy() == 8


# --- Steps of the user's own -------------------------------------------------------------------------------


class Accumulating(tf.keras.Model):
    """Applies the mean of the gradients of two steps at once."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1, kernel_initializer="ones")
        self.build((None, 3))
        self.sums = [tf.Variable(tf.zeros_like(weight), trainable=False) for weight in self.trainable_variables]
        self.step = tf.Variable(0, dtype="int64", trainable=False)

    def call(self, inputs):
        return self.dense(inputs)

    def build(self, input_shape):
        self.dense.build(input_shape)
        self.built = True

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        for total, gradient in zip(self.sums, gradients):
            total.assign_add(gradient / 2)
        self.step.assign_add(1)
        due = tf.cast(self.step % 2 == 0, "float32")
        self.optimizer.apply_gradients(zip([due * total for total in self.sums], self.trainable_variables))
        for total in self.sums:
            total.assign(total * (1 - due))
        return {"loss": loss}


def test_gradients_that_are_accumulated_over_steps():
    reference, model = Accumulating(), Accumulating()
    for one in (reference, model):
        one.compile(optimizers.SGD(0.1))
    train_plainly(reference, epochs=2)
    train_fed(model, strategy_of(2))
    assert largest_difference(model, reference) <= 1e-5


class GradientsOfVariablesAndInputs(tf.keras.Sequential):
    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        first = tape.gradient(loss, weights[:2])
        *second, of_inputs = tape.gradient(loss, [*weights[2:], x])
        self.optimizer.apply_gradients(zip([*first, *second], weights))
        return {"loss": loss, "slope": tf.reduce_mean(tf.abs(of_inputs)) * tf.cast(tf.shape(x)[0], "float32")}


def test_gradients_of_variables_and_inputs_at_once():
    reference, model = (
        GradientsOfVariablesAndInputs([layers.Dense(4, "tanh", input_shape=(3,)), layers.Dense(1)]) for _ in range(2)
    )
    model.set_weights(reference.get_weights())
    for one in (reference, model):
        one.compile(optimizers.SGD(0.1))
    expected, history = train_plainly(reference, epochs=2), train_fed(model, strategy_of(3))
    assert largest_difference(model, reference) <= 1e-5
    assert largest_log_difference(history, expected) <= 1e-5


class Statistics(layers.Layer):
    """Keeps a moving mean of what it sees, made as the documentation says."""

    def build(self, input_shape):
        self.mean = self.add_weight(
            "mean",
            (),
            initializer="zeros",
            trainable=False,
            aggregation=tf.VariableAggregation.MEAN,
            synchronization=tf.VariableSynchronization.ON_READ,
        )
        self.calls = tf.Variable(0, trainable=False, dtype="int64")

    def call(self, inputs, training=None):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(inputs))
            self.calls.assign_add(1)
        return inputs - self.mean


def test_statistics_of_the_users_own():
    """Equal to one device where parts are even, and on all replicas always."""
    reference, model = (tf.keras.Sequential([Statistics(input_shape=(3,)), layers.Dense(1)]) for _ in range(2))
    model.set_weights(reference.get_weights())
    for one in (reference, model):
        one.compile(optimizers.SGD(0.0), "mse")
    reference.fit(X[:16], Y[:16], batch_size=BATCH_SIZE, shuffle=False, epochs=2, verbose=0)
    kg.distribute(model, strategy_of(2)).fit(feeder_of(X[:16], Y[:16]), epochs=2, verbose=0)
    assert model.layers[0].calls.numpy() == 4
    assert largest_difference(model, reference) <= 1e-5
    model.fit(feeder_of(X, Y), verbose=0)
    assert len({float(component.numpy()) for component in model.layers[0].mean.values}) == 1


def test_mixed_precision_is_fed_what_the_arrays_hold():
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    seen = []

    class Seeing(tf.keras.Sequential):
        def train_step(self, data):
            seen.append(data[0].dtype)
            return super().train_step(data)

    model = Seeing([layers.Dense(4, input_shape=(3,)), layers.Dense(1, dtype="float32")])
    model.compile("adam", "mse")
    kg.distribute(model, strategy_of(2))
    history = model.fit(feeder_of(X, Y), epochs=2, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    assert set(seen) == {tf.float32}


# --- After the move ----------------------------------------------------------------------------------------


def test_plain_arrays_given_to_a_moved_model_give_the_numbers_of_one_device():
    reference, model = make_model(), make_model()
    kg.distribute(model, strategy_of(3))
    train_plainly(reference, epochs=2)
    train_plainly(model, epochs=2)  # No feeder in sight; the last batch is uneven.
    assert largest_difference(model, reference) <= 1e-5
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(reference.evaluate(X, Y, verbose=0), abs=1e-5)
    assert model.predict(X[:1], verbose=0).shape == (1, 1)


def test_a_moved_model_is_compiled_again_with_new_objects():
    model = kg.distribute(make_model(), strategy_of(2))
    model.fit(feeder_of(X, Y), verbose=0)
    model.compile(optimizers.Adam(1e-3), "mse", metrics=[tf.keras.metrics.MeanAbsoluteError("mae")])
    assert np.isfinite(model.fit(feeder_of(X, Y), verbose=0).history["mae"]).all()


def test_a_model_that_shares_a_moved_layer_follows_it():
    inputs = tf.keras.Input((3,))
    shared = layers.Dense(3)(inputs)
    encoder, whole = tf.keras.Model(inputs, shared), tf.keras.Model(inputs, layers.Dense(1)(shared))
    encoder.compile("sgd", "mse")
    whole.compile("sgd", "mse")
    encoder.predict(X, verbose=0)  # Traced with the variables as they were.
    kg.distribute(whole, strategy_of(2))
    whole.fit(feeder_of(X, Y), verbose=0)
    np.testing.assert_allclose(encoder.predict(X, verbose=0), encoder(X).numpy(), rtol=1e-5)
    before = encoder.get_weights()[0].copy()
    encoder.fit(X, X, verbose=0)
    assert not np.allclose(encoder.get_weights()[0], before)


def test_nothing_is_read_when_there_is_no_epoch_to_train():
    def batches():
        raise AssertionError("read")
        yield

    model = kg.distribute(make_model(), strategy_of(2))
    assert model.fit(kg.DistributedFeeder(batches), initial_epoch=3, epochs=3, verbose=0).history == {}


def test_a_moved_variable_is_still_a_number():
    model = kg.distribute(make_model(optimizers.SGD(0.25)), strategy_of(2))
    model.fit(feeder_of(X, Y), verbose=0)
    assert int(model.optimizer.iterations) == 3
    assert float(model.optimizer.learning_rate) == 0.25
    assert np.asarray(model.weights[0]).shape == (3, 4)


def test_a_function_that_was_traced_before_the_move_sees_what_the_model_learns():
    model = tf.keras.Sequential([layers.Input((3,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    serve = tf.function(lambda x: model(x))
    x = np.random.default_rng(0).random((20, 3)).astype("float32")
    before = serve(x).numpy()
    kg.distribute(model, strategy_of(3)).fit(kg.DistributedFeeder(x, x.sum(axis=1)), verbose=0)
    assert (serve(x).numpy() != before).all()
    np.testing.assert_array_equal(serve(x).numpy(), model(x).numpy())


class Counting(tf.keras.metrics.Metric):
    """Counts samples, in a function of its own: in an eager step that is traced once for many steps."""

    def __init__(self):
        super().__init__(name="count")
        self.count = self.add_weight(name="count", initializer="zeros")

    @tf.function
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(tf.cast(tf.shape(y_pred)[0], tf.float32))

    def result(self):
        return self.count


@pytest.mark.parametrize("run_eagerly", [True, False])
def test_a_metric_of_the_users_own_counts_each_sample_once(run_eagerly):
    """The last batch is a small tail: three replicas have its two samples, one counts them."""
    model = tf.keras.Sequential([layers.Dense(1, input_shape=(1,))])
    model.compile("sgd", "mse", metrics=[Counting()], run_eagerly=run_eagerly)
    kg.distribute(model, strategy_of(3))
    x = np.arange(14, dtype="float32")
    feeder = kg.DistributedFeeder(x, x, batch_size=6)
    assert model.fit(feeder, verbose=0).history["count"] == [14.0]
    assert model.evaluate(feeder, verbose=0)[1] == 14.0


class InFunctionsOfItsOwn(tf.keras.Sequential):
    """Its steps are traced by themselves, inside of Keras's."""

    @tf.function
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compiled_loss(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}

    @tf.function
    def test_step(self, data):
        x, y = data
        return {"loss": self.compiled_loss(y, self(x))}


@pytest.mark.parametrize("run_eagerly", [True, False])
def test_steps_in_functions_of_their_own(run_eagerly):
    """Also when they were traced for arrays before, and when the next feeder gives batches of another type."""
    results = []
    for num_replicas in (1, 3):
        tf.keras.utils.set_random_seed(1)
        model = InFunctionsOfItsOwn([layers.Dense(4, "tanh", input_shape=(2,)), layers.Dense(1)])
        model.compile(optimizers.SGD(0.1), "mse", run_eagerly=run_eagerly)
        x = np.linspace(-1, 1, 38, dtype="float32").reshape(19, 2)
        model.fit(x, x[:, :1], batch_size=8, shuffle=False, verbose=0)
        kg.distribute(model, strategy_of(num_replicas))
        logs = []
        for y in (x[:, :1], x[:, 1]):
            feeder = kg.DistributedFeeder(x, y, batch_size=8, shuffle=False)  # Of 8, 8 and 3 samples.
            logs += model.fit(feeder, validation_data=feeder, epochs=2, verbose=0).history["val_loss"]
            logs.append(model.evaluate(feeder, verbose=0))
        results.append((model.get_weights(), logs))
    (expected, expected_logs), (weights, logs) = results
    for weight, expected_weight in zip(weights, expected):
        np.testing.assert_allclose(weight, expected_weight, atol=1e-6)
    np.testing.assert_allclose(logs, expected_logs, rtol=1e-5)
