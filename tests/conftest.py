"""One process-wide set of eight virtual devices, and models small enough for many tests."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import gc

import pytest
import tensorflow as tf

import keras_gpufeed as kg

kg.use_virtual_devices(8)
tf.config.list_logical_devices()  # Starts them, so that no test can ask for another number.
gc.collect()
gc.freeze()  # TensorFlow's own objects stay; looking at them again after each test takes a quarter of a second.


@pytest.fixture(autouse=True)
def same_start():
    """Gives every test the same seeds and leaves no graphs to the next one."""
    tf.keras.utils.set_random_seed(1)
    yield
    tf.keras.mixed_precision.set_global_policy(None)  # That of floatx; named, it would outlast a change of it.
    tf.keras.backend.clear_session()
    gc.collect()
