"""Trains on image files that a generator function reads and augments.

KERAS_GPUFEED_VIRTUAL_DEVICES=2 python examples/train_generator.py
"""

import pathlib
import tempfile

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import keras_gpufeed as kg

folder = pathlib.Path(tempfile.mkdtemp())
digits = load_digits()
for number, (image, label) in enumerate(zip(digits.images[:600], digits.target)):
    pixels = tf.cast(image[..., None] * 15, tf.uint8)
    tf.io.write_file(str(folder / f"{label}_{number}.png"), tf.io.encode_png(pixels))
files = sorted(folder.glob("*.png"))


def make_batches(epoch):
    """Reads the files in a new order each epoch, and shifts each image by up to a pixel."""
    random = np.random.default_rng(epoch)
    order = random.permutation(len(files))
    for start in range(0, len(files), 64):
        chosen = [files[number] for number in order[start : start + 64]]
        images = np.stack([tf.io.decode_png(path.read_bytes()).numpy() for path in chosen])
        shift = random.integers(-1, 2, 2)
        labels = np.array([int(path.name[0]) for path in chosen])
        yield np.roll(images, shift, (1, 2)).astype("float32") / 255, labels


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
history = model.fit(kg.DistributedFeeder(make_batches), epochs=5, verbose=2)
print(f"{model.distribute_strategy.num_replicas_in_sync} replica(s), accuracy {history.history['accuracy'][-1]:.3f}")
