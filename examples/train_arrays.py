"""Trains a small net on arrays, on every device, and shows the one line that differs from plain Keras.

python examples/train_arrays.py                                     # every visible GPU
KERAS_GPUFEED_VIRTUAL_DEVICES=4 python examples/train_arrays.py     # no GPU: four devices on the CPU
"""

import tensorflow as tf
from sklearn.datasets import load_digits

import keras_gpufeed as kg

digits = load_digits()
x, y = digits.images[..., None] / 16.0, digits.target
x_train, y_train, x_test, y_test = x[:1437], y[:1437], x[1437:], y[1437:]

model = tf.keras.Sequential(
    [
        tf.keras.layers.Input((8, 8, 1)),
        tf.keras.layers.Conv2D(16, 3, activation="relu"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(10),
    ]
)
loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("adam", loss, metrics=["accuracy"])

# Was: model.fit(x_train, y_train, batch_size=64, epochs=3, validation_data=(x_test, y_test))
model.fit(
    kg.DistributedFeeder(x_train, y_train, batch_size=64, seed=0),
    epochs=3,
    validation_data=(x_test, y_test),
    verbose=2,
)

# All samples, in their order, whatever their number and that of the devices.
logits = model.predict(kg.DistributedFeeder(x_test), verbose=0)
accuracy = (logits.argmax(axis=1) == y_test).mean()
print(f"{model.distribute_strategy.num_replicas_in_sync} replica(s), accuracy {accuracy:.3f} on {len(logits)} images")
