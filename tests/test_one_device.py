"""A computer with one device: the same script runs, and the numbers are those of plain Keras."""

import os
import subprocess
import sys

SCRIPT = """
import numpy as np
import tensorflow as tf
import keras_gpufeed as kg

x = np.random.default_rng(0).normal(size=(21, 3)).astype("float32")
y = x.sum(axis=1)

def batches():
    for start in range(0, 21, 8):
        yield x[start : start + 8], y[start : start + 8]

def train(fit):
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.layers.Dense(4, "tanh"), tf.keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    history = fit(model)
    return model, history

plain, expected = train(lambda model: model.fit(
    x, y, batch_size=8, shuffle=False, epochs=2, validation_data=(x, y), class_weight=None, verbose=0))
feeders = [
    kg.DistributedFeeder(x, y, batch_size=8, shuffle=False),
    kg.DistributedFeeder(batches),
    kg.DistributedFeeder(x, y, batch_size=8, shuffle=False, transform=lambda x, y: (x + 0.0, y)),
]
assert kg.get_strategy().num_replicas_in_sync == 1
for feeder in feeders:
    model, history = train(lambda model: model.fit(feeder, epochs=2, validation_data=(x, y), verbose=0))
    assert model.distribute_strategy.num_replicas_in_sync == 1
    assert "Mirrored" not in type(model.trainable_variables[0]).__name__
    for name, values in expected.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-6)
    for a, b in zip(model.get_weights(), plain.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(model.evaluate(feeder, verbose=0), plain.evaluate(x, y, verbose=0), rtol=1e-6)
    np.testing.assert_allclose(model.predict(feeder, verbose=0), plain.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
compiled = tf.keras.Sequential([tf.keras.layers.Dense(1)])
compiled.compile("sgd", "mse", jit_compile=True)
assert np.isfinite(compiled.fit(feeders[0], verbose=0).history["loss"]).all()
print("equal")
"""


def test_the_same_script_on_one_device():
    environment = {key: value for key, value in os.environ.items() if key != "KERAS_GPUFEED_VIRTUAL_DEVICES"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "equal\n"
