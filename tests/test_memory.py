"""Memory does not grow with the epochs of a fit, nor with the number of feeders a process has had."""

import gc
import json
import pathlib
import subprocess
import sys
import weakref

import numpy as np
import pytest
import tensorflow as tf
from comparison import strategy_of

import keras_gpufeed as kg

PHASES = ["epochs of arrays", "feeders of arrays", "epochs of a generator", "feeders of a generator"]


@pytest.mark.slow
def test_memory_does_not_grow():
    """Kept in each epoch, or by each feeder: a copy of the array would be 32 MB, a feeder's buffers 16 MB."""
    if not pathlib.Path("/proc/self/status").exists():
        pytest.skip("the memory of the process is read from /proc")
    script = pathlib.Path(__file__).with_name("memory_over_time.py")
    found = json.loads(subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout)
    assert list(found) == PHASES
    for phase, resident in found.items():
        assert len(resident) == 25
        early, late = np.median(resident[5:10]), np.median(resident[-5:])
        assert late - early < 100e6, phase  # Of the 15 times between them, 240 MB and more would be left.


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("kind", ["arrays", "generator"])
def test_a_feeder_and_its_buffers_go_with_its_last_name(kind, num_replicas):
    """Not only when Python looks for cycles: a loop over feeders would pile up their buffers until then."""
    x, y = np.zeros((40, 3), "float32"), np.zeros(40)

    def generate():
        yield x, y

    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    kg.distribute(model, strategy_of(num_replicas))
    gc.collect()
    gc.disable()
    try:
        for method in (model.fit, model.evaluate, model.predict):
            feeder = kg.DistributedFeeder(x, y, batch_size=8) if kind == "arrays" else kg.DistributedFeeder(generate)
            method(feeder, verbose=0)
            gone = weakref.ref(feeder)
            del feeder
            assert gone() is None
    finally:
        gc.enable()
