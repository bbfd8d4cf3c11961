"""The demonstration: trains a small net on every device, then on one, and compares.

Flow:   ... -> model -> [demo] -> __main__
Owns:   what `python -m keras_gpufeed demo` does and prints.
Leaves: the command line (__main__).
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np
import tensorflow as tf

from . import DistributedFeeder, distribute, get_strategy, internals, use_virtual_devices
from .errors import FeedError
from .strategy import short_device_names

_BATCH_SIZE = 128
_NUM_TEST_SAMPLES = 360
_SEED = 7
_DEFAULT_NUM_VIRTUAL_DEVICES = 4


def run(num_replicas: int | None = None, epochs: int = 5, save: str | None = None) -> None:
    """Trains on scikit-learn's handwritten digits and prints what happens.

    Args:
        num_replicas: Replicas to train on; None for every GPU, or four virtual devices where there are none.
        epochs: Epochs of each of the two trainings.
        save: Where to save the model that was trained on all replicas.

    Raises:
        FeedError: If scikit-learn is missing or there are fewer devices than asked for.
    """
    devices = _choose_devices(num_replicas)
    (x, y), (x_test, y_test) = _load_digits()
    feeder = DistributedFeeder(x, y, batch_size=_BATCH_SIZE, seed=_SEED)
    test_feeder = DistributedFeeder(x_test, y_test, batch_size=_BATCH_SIZE)

    many = _train("Training on all replicas", devices, feeder, epochs)
    one = _train("Training the same model on one device, in the same order", devices[:1], feeder, epochs)

    difference = max(float(np.max(np.abs(a - b))) for a, b in zip(many.get_weights(), one.get_weights()))
    print(f"\nAccuracy on {_NUM_TEST_SAMPLES} test images")
    for name, model in ((f"{len(devices)} replicas", many), ("one device", one)):
        _, accuracy = model.evaluate(test_feeder, verbose=0)
        print(f"  {name:12}  {accuracy:.4f}")
    print(f"Largest difference of any weight: {difference:.1e}")
    if save:
        many.save(save)
        print(f"Saved as {save}; it loads with tf.keras.models.load_model, without this package.")


def _choose_devices(num_replicas: int | None) -> list[str]:
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    if num_gpus < 2:
        num_replicas = num_replicas or _DEFAULT_NUM_VIRTUAL_DEVICES
        use_virtual_devices(num_replicas)
        print(f"{num_gpus or 'No'} GPU: {num_replicas} virtual devices stand in for several.")
    kind = "GPU" if num_gpus else "CPU"
    names = [f"{kind}:{number}" for number in range(len(tf.config.list_logical_devices(kind)))]
    if num_replicas is not None and num_replicas > len(names):
        raise FeedError(f"{num_replicas} replicas were asked for, but there are {len(names)} GPUs.")
    return names[:num_replicas]


def _load_digits() -> tuple[tuple, tuple]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise FeedError(
            "The demonstration takes its images from scikit-learn, which is not installed: "
            "pip install keras-gpufeed[demo]"
        ) from None
    digits = load_digits()
    images, labels = digits.images[..., None] / 16.0, digits.target
    order = np.random.default_rng(_SEED).permutation(len(images))
    train, test = order[:-_NUM_TEST_SAMPLES], order[-_NUM_TEST_SAMPLES:]
    return (images[train], labels[train]), (images[test], labels[test])


def _train(title: str, devices: list[str], feeder: DistributedFeeder, epochs: int) -> tf.keras.Model:
    model = _build()
    strategy = get_strategy(devices)
    distribute(model, strategy)
    print(f"\n{title}")
    plan = feeder.plan(internals.num_replicas(strategy))
    print(dataclasses.replace(plan, devices=short_device_names(strategy), strategy=type(strategy).__name__))
    model.fit(feeder, epochs=epochs, verbose=1 if sys.stdout.isatty() else 2)
    return model


def _build() -> Any:
    tf.keras.utils.set_random_seed(_SEED)
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(16, 3, activation="relu", padding="same"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Conv2D(32, 3, activation="relu", padding="same"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(
        tf.keras.optimizers.SGD(0.05, momentum=0.9),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model
