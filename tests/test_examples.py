"""The demonstration and the examples, as a person runs them."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
import tensorflow as tf

ROOT = pathlib.Path(__file__).parent.parent


def run(*command, num_devices=2):
    environment = {**os.environ, "KERAS_GPUFEED_VIRTUAL_DEVICES": str(num_devices), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("train_arrays", r"2 replica\(s\), accuracy 0\.\d+ on 360 images"),
        ("existing_model", r"same variable object: True\noptimizer steps: 3 before, 6 after\nreplicas: 2"),
        ("subclassed_model", r"2 replica\(s\) against one: largest difference of any weight \d\.\de-0[678]"),
        ("train_generator", r"2 replica\(s\), accuracy 0\.\d+"),
    ],
)
def test_examples_run(name, expected):
    done = run(ROOT / "examples" / f"{name}.py")
    assert done.returncode == 0, done.stderr
    assert re.search(expected, done.stdout)


@pytest.mark.slow
def test_the_demonstration_compares_and_saves(tmp_path):
    saved = tmp_path / "model.keras"
    done = run("-m", "keras_gpufeed", "demo", "--replicas", 3, "--epochs", 1, "--save", saved, num_devices=3)
    assert done.returncode == 0, done.stderr
    assert "the last step   10 + 10 + 9 samples" in done.stdout
    assert re.search(r"Largest difference of any weight: (\d\.\de-0[678]|0\.0e\+00)\n", done.stdout)
    assert tf.keras.models.load_model(saved).input_shape == (None, 8, 8, 1)


def test_the_command_line_explains_itself():
    done = run("-m", "keras_gpufeed", "demo", "--epochs", 0)
    assert done.returncode == 2
    assert "must be a whole number from 1 on, in digits alone. Received '0'" in done.stderr
