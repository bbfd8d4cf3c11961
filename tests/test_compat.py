"""Names of the old world."""

import numpy as np
import pytest
import tensorflow as tf

import keras_gpufeed as kg


def small_model():
    tf.keras.utils.set_random_seed(0)
    return tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,))])


@pytest.mark.parametrize(("gpus", "devices"), [(2, ["0", "1"]), ([1, 3, 4], ["1", "3", "4"]), (None, list("01234567"))])
def test_multi_gpu_model_moves_the_same_model(gpus, devices):
    model = small_model()
    with pytest.warns(DeprecationWarning, match="multi_gpu_model is the old name"):
        parallel_model = kg.compat.multi_gpu_model(model, gpus=gpus, cpu_merge=False, cpu_relocation=True)
    assert parallel_model is model
    assert [device[-1] for device in model.distribute_strategy.extended.worker_devices] == devices


def test_what_was_written_after_it_still_works_and_is_exact(tmp_path):
    x = np.random.default_rng(0).normal(size=(21, 3)).astype("float32")
    model, reference = small_model(), small_model()
    with pytest.warns(DeprecationWarning, match="old name"):
        parallel_model = kg.compat.multi_gpu_model(model, 2)
    for each in (parallel_model, reference):
        each.compile("sgd", "mse")
        each.fit(x, x.sum(1), batch_size=8, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], reference.get_weights()[0], rtol=1e-5)
    model.save_weights(str(tmp_path / "weights.h5"))
    reference.load_weights(str(tmp_path / "weights.h5"))


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        (9, "9 devices were asked for, but 8 can be seen"),
        ([0, 12], "There is no device 'CPU:12'"),
        (0, "Received 0"),
        (True, "Received True"),
    ],
)
def test_devices_that_are_not_there(gpus, message):
    with pytest.warns(DeprecationWarning, match="old name"), pytest.raises(kg.StrategyError, match=message):
        kg.compat.multi_gpu_model(small_model(), gpus)
