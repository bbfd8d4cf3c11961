"""`ScaleLearningRate`: the factor of each step, momentum, schedules, and what others see of it."""

import numpy as np
import pytest
import tensorflow as tf
from comparison import strategy_of

import keras_gpufeed as kg

optimizers = tf.keras.optimizers
schedules = optimizers.schedules

X = np.linspace(1, 2, 16, dtype="float32")[:, None]
Y = 3 * X


def fit(optimizer, scaling, num_replicas=2, model=None, epochs=2, **arguments):
    """Four steps an epoch, in fixed order."""
    if model is None:
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        model.build((None, 1))
        model.compile(optimizer, "mse")
        kg.distribute(model, strategy_of(num_replicas))
    feeder = kg.DistributedFeeder(X, Y, batch_size=4, shuffle=False)
    arguments["callbacks"] = [*arguments.pop("callbacks", []), scaling]
    model.fit(feeder, epochs=epochs, verbose=0, **arguments)
    return model


def by_hand(rates, momentum=0.0, weight=0.0, velocity=0.0, correct=True):
    """The weight after a step with each of the rates, in float64."""
    before = rates[0]
    for step, rate in enumerate(rates):
        x = X[4 * step % 16 : 4 * step % 16 + 4].astype("float64")
        gradient = float(np.mean(2 * x * (weight * x - 3 * x)))
        velocity = momentum * velocity * (rate / before if correct else 1.0) - rate * gradient
        weight, before = weight + velocity, rate
    return weight


# Two replicas, warm-up over two epochs of four steps: the factor grows from 1 to 2 by an eighth at each step.
FACTORS = [1.0, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875]


@pytest.mark.parametrize("make", [optimizers.SGD, optimizers.legacy.SGD])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_each_step_has_its_rate_and_the_velocity_follows(make, momentum):
    model = fit(make(0.01, momentum=momentum), kg.ScaleLearningRate(warmup_epochs=2))
    rates = [0.01 * factor for factor in FACTORS]
    assert model.get_weights()[0].item() == pytest.approx(by_hand(rates, momentum), abs=1e-5)
    if momentum:  # The correction is not too small to be seen.
        assert abs(by_hand(rates, momentum) - by_hand(rates, momentum, correct=False)) > 1e-3


@pytest.mark.parametrize("make", [optimizers.SGD, optimizers.legacy.SGD])
def test_a_schedule_is_scaled_and_stays_the_schedule(make, tmp_path):
    schedule = schedules.PiecewiseConstantDecay([3], [0.01, 0.02])  # Steps 0 to 3, then the others.
    model = fit(make(schedule), kg.ScaleLearningRate(warmup_epochs=2))
    rates = [rate * factor for rate, factor in zip([0.01] * 4 + [0.02] * 4, FACTORS)]
    assert model.get_weights()[0].item() == pytest.approx(by_hand(rates), abs=1e-5)
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config()["learning_rate"]["class_name"] == "PiecewiseConstantDecay"
    # Without the callback, training goes on at the schedule's own rate.
    weight = model.get_weights()[0].item()
    model.fit(kg.DistributedFeeder(X[:4], Y[:4], batch_size=4), verbose=0)
    assert model.get_weights()[0].item() == pytest.approx(by_hand([0.02], weight=weight), abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "num_replicas", "factors"),
    [
        ({"warmup_epochs": 0}, 4, [4.0, 4.0, 4.0, 4.0]),
        ({"warmup_epochs": 0, "rule": "sqrt"}, 4, [2.0, 2.0, 2.0, 2.0]),
        ({"warmup_epochs": 0, "base_replicas": 4}, 2, [0.5, 0.5, 0.5, 0.5]),
        ({"warmup_epochs": 0.5}, 3, [1.0, 2.0, 3.0, 3.0]),
        ({"warmup_epochs": 1}, 1, [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_factor(arguments, num_replicas, factors):
    scaling = kg.ScaleLearningRate(**arguments)
    assert [scaling.factor_at(step / 4, num_replicas) for step in range(4)] == factors


class Noting(tf.keras.callbacks.Callback):
    """Notes the rate of each step, and what there is to see between them."""

    def __init__(self):
        super().__init__()
        self.in_step, self.between = [], []

    def rate(self):
        return round(float(tf.keras.backend.get_value(self.model.optimizer.learning_rate)), 6)

    def on_train_batch_begin(self, batch, logs=None):
        self.in_step.append(self.rate())

    def on_train_batch_end(self, batch, logs=None):
        self.between.append(self.rate())

    def on_epoch_begin(self, epoch, logs=None):
        self.between.append(self.rate())


def test_others_see_and_set_the_plain_rate():
    noting = Noting()
    halving = tf.keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch else rate)
    scaling = kg.ScaleLearningRate(warmup_epochs=0)
    model = fit(optimizers.SGD(0.01), scaling, callbacks=[halving, noting])
    assert noting.in_step == [0.02] * 4 + [0.01] * 4
    assert noting.between == [0.01] * 5 + [0.005] * 5
    assert noting.rate() == 0.005
    assert model.optimizer.get_config()["learning_rate"] == pytest.approx(0.005)


def test_an_error_in_a_step_leaves_the_plain_rate():
    class Failing(tf.keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            raise KeyError("mine")

    model = fit(optimizers.SGD(0.01), kg.ScaleLearningRate(), epochs=1)
    with pytest.raises(KeyError, match="mine"):
        fit(None, kg.ScaleLearningRate(warmup_epochs=0), model=model, callbacks=[Failing()])
    assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(0.01)


def test_goes_on_where_an_interrupted_run_was(tmp_path):
    """With momentum, so that a wrong factor, or a missing correction, shows."""

    class Interrupting(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise InterruptedError

    def run(*callbacks):
        backup = tf.keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
        scaling = kg.ScaleLearningRate(warmup_epochs=2)
        return fit(optimizers.SGD(0.01, momentum=0.9), scaling, callbacks=[backup, *callbacks])

    with pytest.raises(InterruptedError):
        run(Interrupting())
    expected = by_hand([0.01 * factor for factor in FACTORS], 0.9)
    assert run().get_weights()[0].item() == pytest.approx(expected, abs=1e-5)


def test_a_source_of_unknown_length_is_warmed_up_by_epochs_until_its_length_is_known():
    noting = Noting()
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,))])
    model.compile(optimizers.SGD(0.01), "mse")
    kg.distribute(model, strategy_of(2))
    feeder = kg.DistributedFeeder(lambda: iter([(X[:4], Y[:4])] * 4))
    model.fit(feeder, epochs=2, verbose=0, callbacks=[kg.ScaleLearningRate(warmup_epochs=2), noting])
    assert noting.in_step == [0.01] * 4 + [0.015, 0.01625, 0.0175, 0.01875]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"base_replicas": 0}, "base_replicas must be a positive integer. Received 0"),
        ({"warmup_epochs": -1}, "warmup_epochs must be a number of at least 0. Received -1"),
        ({"rule": "cubic"}, 'rule must be "linear" or "sqrt". Received \'cubic\''),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(kg.FeedError, match=message):
        kg.ScaleLearningRate(**arguments)
