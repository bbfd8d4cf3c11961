"""Files saved after training on three replicas load, and go on, in a program that never imports this package."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from comparison import strategy_of

import keras_gpufeed as kg

layers = tf.keras.layers

X = np.linspace(-1, 1, 63, dtype="float32").reshape(21, 3)
Y = X.sum(1, keepdims=True)

# Trains once more, on one device and from the arrays, and prints what came out.
PROGRAM = """
import json, sys
import numpy as np, tensorflow as tf
x = np.linspace(-1, 1, 63, dtype="float32").reshape(21, 3)
y = x.sum(1, keepdims=True)
found = {}
for path in sys.argv[1:]:
    model = tf.keras.models.load_model(path)
    found[path] = {
        "class": type(model).__name__,
        "predictions": model.predict(x, verbose=0).tolist(),
        "evaluation": model.evaluate(x, y, verbose=0),
        "iterations": int(model.optimizer.iterations.numpy()),
    }
    model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    found[path]["iterations afterwards"] = int(model.optimizer.iterations.numpy())
    found[path]["weights afterwards"] = [weight.tolist() for weight in model.get_weights()]
assert "keras_gpufeed" not in sys.modules
print(json.dumps(found))
"""


def feeder_of(*data):
    return kg.DistributedFeeder(*data, batch_size=8, shuffle=False)


def make_sequential():
    model = tf.keras.Sequential([layers.Dense(4, "tanh", input_shape=(3,)), layers.Dense(1)])
    model.compile(tf.keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return kg.distribute(model, strategy_of(3))


def make_our_functional():
    with strategy_of(3).scope():
        inputs = tf.keras.Input((3,))
        model = kg.Model(inputs, layers.Dense(1)(layers.Dense(4, "tanh")(inputs)))
        model.compile(tf.keras.optimizers.SGD(0.01, momentum=0.9), "mse", metrics=["mae"])
    return model


class Checkpoints(tf.keras.callbacks.ModelCheckpoint):
    """Saves in every format."""

    def __init__(self, folder, names):
        super().__init__(str(folder))
        self.paths = [str(folder / name) for name in names]

    def on_epoch_end(self, epoch, logs=None):
        for path in self.paths:
            self.filepath = path
            super().on_epoch_end(epoch, logs)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """For each model and format: the file, what the program found, and the model after the same epoch more."""
    tf.keras.utils.set_random_seed(1)
    folder = tmp_path_factory.mktemp("saved")
    cases = {}
    for make, names in [
        (make_sequential, ["m.keras", "m.h5", "m"]),
        (make_our_functional, ["ours.keras"]),
    ]:
        model = make()
        model.fit(feeder_of(X, Y), epochs=2, verbose=0, callbacks=[Checkpoints(folder, names)])
        expected = {
            "predictions": model.predict(feeder_of(X), verbose=0),
            "evaluation": model.evaluate(feeder_of(X, Y), verbose=0),
        }
        model.fit(feeder_of(X, Y), verbose=0)
        expected["weights afterwards"] = model.get_weights()
        cases.update({str(folder / name): expected for name in names})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *cases],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {path.rpartition("/")[2]: (found[path], expected) for path, expected in cases.items()}


FILES = ["m.keras", "m.h5", "m", "ours.keras"]


@pytest.mark.parametrize("name", FILES)
def test_predictions_are_equal(results, name):
    found, expected = results[name]
    assert found["class"] in ("Sequential", "Functional")
    assert np.allclose(found["predictions"], expected["predictions"], atol=1e-6)
    assert found["evaluation"] == pytest.approx(expected["evaluation"], rel=1e-5)


@pytest.mark.parametrize("name", ["m.keras", "m.h5", "ours.keras"])
def test_training_goes_on_with_the_state_of_the_optimizer(results, name):
    found, expected = results[name]
    assert found["iterations"] == 6
    assert found["iterations afterwards"] == 9
    for weight, wanted in zip(found["weights afterwards"], expected["weights afterwards"]):
        assert np.allclose(weight, wanted, atol=1e-5)


def test_training_goes_on_from_a_saved_model(results):
    """Keras 2.15 does not restore the new optimizers' state from one, with or without this package."""
    found, _ = results["m"]
    assert found["iterations afterwards"] - found["iterations"] == 3
    assert np.isfinite(np.concatenate([np.ravel(weight) for weight in found["weights afterwards"]])).all()


def test_weights_alone_in_both_formats(tmp_path):
    model = make_sequential()
    model.fit(feeder_of(X, Y), verbose=0)
    plain = tf.keras.Sequential([layers.Dense(4, "tanh", input_shape=(3,)), layers.Dense(1)])
    for name in ("m.weights.h5", "checkpoint"):
        model.save_weights(tmp_path / name)
        plain.set_weights([np.zeros_like(weight) for weight in plain.get_weights()])
        plain.load_weights(tmp_path / name)
        assert all((a == b).all() for a, b in zip(plain.get_weights(), model.get_weights()))
        model.set_weights([np.zeros_like(weight) for weight in model.get_weights()])
        model.load_weights(tmp_path / name)
        assert np.allclose(model(X), plain(X), atol=1e-6)


def test_a_checkpoint_of_model_and_optimizer(tmp_path):
    """Written on three replicas, restored on one and on two."""
    model = make_sequential()
    model.fit(feeder_of(X, Y), epochs=2, verbose=0)
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(tmp_path / "c"))
    model.fit(feeder_of(X, Y), verbose=0)
    for num_replicas in (1, 2):
        other = tf.keras.Sequential([layers.Dense(4, "tanh", input_shape=(3,)), layers.Dense(1)])
        other.compile(tf.keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        kg.distribute(other, strategy_of(num_replicas))
        with other.distribute_strategy.scope():
            other.optimizer.build(other.trainable_variables)
        checkpoint = tf.train.Checkpoint(model=other, optimizer=other.optimizer)
        checkpoint.read(str(tmp_path / "c")).assert_consumed()
        assert other.optimizer.iterations.numpy() == 6
        other.fit(feeder_of(X, Y), verbose=0)
        assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(other.get_weights(), model.get_weights()))


def test_the_configuration_knows_nothing_of_devices():
    model = tf.keras.Sequential([layers.Dense(4, "tanh", input_shape=(3,)), layers.Dense(1)])
    model.compile("adam", "mse")
    before = model.to_json(), model.get_config(), model.get_compile_config()
    kg.distribute(model, strategy_of(2))
    assert (model.to_json(), model.get_config(), model.get_compile_config()) == before
