"""The right sides of `docs/old-world.md`, run as they stand there."""

import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

import keras_gpufeed as kg

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "old-world.md").read_text()
BLOCKS = {
    section.partition("\n")[0]: re.findall(r'```python title="new"\n(.*?)```', section, re.DOTALL)
    for section in PAGE.split("\n## ")[1:]
}
X = np.random.default_rng(0).normal(size=(90, 3)).astype("float32")
Y = X.sum(1)


def small_model():
    tf.keras.utils.set_random_seed(0)
    return tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,))])


def run(section, number=0, **names):
    names = {"kg": kg, "tf": tf, "x": X, "y": Y, "b": 16, **names}
    exec(compile(BLOCKS[section][number], f"{section} {number}", "exec"), names)
    return names


def weights_of_one_device(batch_size, epochs=2, rate=0.01):
    model = small_model()
    model.compile(tf.keras.optimizers.SGD(rate), "mse")
    kg.distribute(model, kg.get_strategy(["CPU:0"]))
    model.fit(kg.DistributedFeeder(X, Y, batch_size=batch_size, seed=5), epochs=epochs, verbose=0)
    return model.get_weights()[0]


def test_every_new_side_is_run_here():
    assert {section: len(blocks) for section, blocks in BLOCKS.items() if blocks} == {
        "multi_gpu_model": 2,
        "Towers and `feed_dict`": 3,
        "Queues": 1,
        "tf.data, and loops over a strategy": 1,
        "Estimators": 1,
        "Horovod": 1,
    }


def test_multi_gpu_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = small_model()
    run("multi_gpu_model", model=model)
    np.testing.assert_allclose(model.get_weights()[0], weights_of_one_device(256), rtol=1e-4)
    assert tf.keras.models.load_model("model.keras").input_shape == (None, 3)
    with pytest.warns(DeprecationWarning, match="old name"):
        assert (
            run("multi_gpu_model", 1, model=small_model())["parallel_model"].distribute_strategy.num_replicas_in_sync
            == 4
        )


def test_towers():
    def train(num_towers, batch_size):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            weights = tf.compat.v1.get_variable("weights", initializer=tf.zeros(3))
            tower_loss = run("Towers and `feed_dict`", 1, weights=weights)["tower_loss"]
            placeholder = tf.compat.v1.placeholder
            towers = [(placeholder(tf.float32, [None, 3]), placeholder(tf.float32, [None])) for _ in range(num_towers)]
            shares = [placeholder(tf.float32, []) for _ in towers]
            losses = [tower_loss(*tower, share) for tower, share in zip(towers, shares)]
            gradients = [tf.gradients(loss, weights)[0] for loss in losses]
            mean = sum(gradients) / num_towers
            train = tf.compat.v1.train.GradientDescentOptimizer(0.1).apply_gradients([(mean, weights)])
            session.run(tf.compat.v1.global_variables_initializer())
            names = {"towers": towers, "shares": shares, "session": session, "train": train, "b": batch_size // 2}
            run("Towers and `feed_dict`", kg=Seeded, **names)
            return session.run(weights)

    np.testing.assert_allclose(train(2, 62), train(1, 62), rtol=1e-4)  # 28 samples are left for the last step.


class Seeded:
    """The package with feeders that all draw the same seed."""

    @staticmethod
    def DistributedFeeder(*args, **kwargs):
        return kg.DistributedFeeder(*args, seed=5, **kwargs)


def test_sources_of_their_own():
    model = small_model()
    run("Towers and `feed_dict`", 2, model=model)
    assert model.distribute_strategy.num_replicas_in_sync == 2
    assert int(model.optimizer.iterations) == 10


def test_queues():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        names = run("Queues", session=session)
    assert not any(thread.is_alive() for thread in names["threads"])


def test_loops_over_a_strategy():
    strategy = kg.get_strategy(["CPU:0", "CPU:1", "CPU:2"])
    names = run(
        "tf.data, and loops over a strategy",
        strategy=strategy,
        train_step=lambda inputs: tf.reduce_mean(tf.square(inputs[1])),
        kg=Seeded,
    )
    last = [y for _, y in kg.DistributedFeeder(X, Y, batch_size=64, seed=5).dataset()][-1]
    assert float(names["loss"]) == pytest.approx(float(tf.reduce_mean(tf.square(last))), rel=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # TensorFlow deprecates Estimators at every turn.
def test_estimators(tmp_path):
    def model_fn(features, labels, mode):
        weights = tf.compat.v1.get_variable("weights", (3,), initializer=tf.compat.v1.zeros_initializer())
        loss = tf.reduce_mean(tf.square(tf.linalg.matvec(features["x"], weights) - labels))
        step = tf.compat.v1.train.get_or_create_global_step()
        train = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss, step)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train)

    reduction = tf.distribute.ReductionToOneDevice()
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=reduction)
    names = run("Estimators", strategy=strategy, model_fn=model_fn, folder=str(tmp_path))
    assert names["estimator"].get_variable_value("global_step") == 3


def test_horovod(tmp_path):
    model = small_model()
    run("Horovod", model=model, path=str(tmp_path / "model.keras"), kg=Seeded)
    np.testing.assert_allclose(model.get_weights()[0], weights_of_one_device(64, rate=0.04), rtol=1e-4)
    assert (tmp_path / "model.keras").exists()
