"""Graphs and sessions: towers, placeholders, queues."""

import threading

import numpy as np
import pytest
import tensorflow as tf

import keras_gpufeed as kg

v1 = tf.compat.v1
X = np.random.default_rng(0).normal(size=(9, 2)).astype("float32")
Y = X.sum(1)


@pytest.fixture
def session():
    with tf.Graph().as_default(), v1.Session() as session:
        yield session


def train_towers(session, num_towers, feeder, epochs):
    """Average of the towers' gradients, as in the CIFAR-10 tutorial, with the shares in the losses."""
    weights = v1.get_variable("weights", initializer=tf.zeros(2))
    optimizer = v1.train.GradientDescentOptimizer(0.1)
    towers, shares, gradients = [], [], []
    for tower in range(num_towers):
        with tf.device(f"/cpu:{tower}"):
            images, labels = v1.placeholder(tf.float32, [None, 2]), v1.placeholder(tf.float32, [None])
            share = v1.placeholder(tf.float32, [])
            loss = share * tf.reduce_mean(tf.square(tf.linalg.matvec(images, weights) - labels))
            [(gradient, _)] = optimizer.compute_gradients(loss, [weights])
        towers.append((images, labels))
        shares.append(share)
        gradients.append(gradient)
    train = optimizer.apply_gradients([(sum(gradients) / num_towers, weights)])
    session.run(v1.global_variables_initializer())
    for _ in range(epochs):
        for feed_dict in feeder.feed_dicts(towers, shares=shares):
            session.run(train, feed_dict)
    return session.run(weights)


@pytest.mark.parametrize("num_samples", [8, 9, 5])  # even steps; a tail of one; a tail of one after one step
def test_towers_give_the_result_of_one_tower(num_samples):
    results = []
    for num_towers in (1, 2, 3):
        feeder = kg.DistributedFeeder(X[:num_samples], Y[:num_samples], batch_size=4, seed=6)
        with tf.Graph().as_default(), v1.Session() as session:
            results.append(train_towers(session, num_towers, feeder, epochs=3))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5)
    np.testing.assert_allclose(results[2], results[0], rtol=1e-5)


def test_each_tower_gets_its_own_part():
    feeder = kg.DistributedFeeder(np.arange(6.0), np.arange(6), batch_size=5, shuffle=False)
    with tf.Graph().as_default():
        towers = [(v1.placeholder(tf.float32, [None]), v1.placeholder(tf.int64, [None])) for _ in range(2)]
        shares = [v1.placeholder(tf.float32, []) for _ in range(2)]
        steps = list(feeder.feed_dicts(towers, shares=shares))
    parts = [[step[tensor].tolist() for pair in towers for tensor in pair] for step in steps]
    assert parts == [[[0, 1, 2], [0, 1, 2], [3, 4], [3, 4]], [[5], [5], [5], [5]]]
    assert [[step[share] for share in shares] for step in steps] == [[1.2, 0.8], [1.0, 1.0]]


def test_a_tensor_that_is_no_placeholder_can_be_fed(session):
    computed = [tf.fill([2], float(tower)) for tower in range(2)]  # What a queue would have given.
    doubled = [2 * tensor for tensor in computed]
    feeder = kg.DistributedFeeder(np.arange(4.0), batch_size=4, shuffle=False)
    [feed_dict] = feeder.feed_dicts(computed)
    assert [value.tolist() for value in session.run(doubled, feed_dict)] == [[0, 2], [4, 6]]
    assert [value.tolist() for value in session.run(doubled)] == [[0, 0], [2, 2]]


def test_dicts_overrides_and_sources_of_their_own(session):
    towers = [({"image": v1.placeholder(tf.float32, [None])},) for _ in range(2)]
    feeder = kg.DistributedFeeder({"image": np.arange(4.0)}, batch_size=4, shuffle=False)
    [step] = feeder.override(1, {"image": 7.0}).feed_dicts(towers)
    assert [step[tower[0]["image"]].tolist() for tower in towers] == [[0, 1], [7, 7]]
    own = kg.DistributedFeeder.per_replica([np.zeros(3), np.ones(1)], batch_size=[3, 1])
    plain = [tower[0]["image"] for tower in towers]
    [step] = own.feed_dicts(plain)
    assert [step[tensor].tolist() for tensor in plain] == [[0, 0, 0], [1]]


def test_epochs_have_orders_of_their_own():
    feeder = kg.DistributedFeeder(np.arange(8), batch_size=8, seed=1)
    with tf.Graph().as_default():
        tensor = v1.placeholder(tf.int64, [None])
        orders = [feed_dict[tensor].tolist() for feed_dict in feeder.feed_dicts([tensor], epochs=2)]
        orders += [feed_dict[tensor].tolist() for feed_dict in feeder.feed_dicts([tensor])]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(8)) for order in orders)


def test_an_error_of_the_source_arrives_as_raised():
    def broken():
        yield X[:2]
        raise KeyError("file 17")

    with tf.Graph().as_default(), pytest.raises(KeyError, match="file 17"):
        list(kg.DistributedFeeder(broken).feed_dicts([v1.placeholder(tf.float32)]))


def test_what_cannot_be_fed_is_refused():
    feeder, sparse = kg.DistributedFeeder(X, Y), kg.DistributedFeeder(tf.sparse.from_dense(X))
    with tf.Graph().as_default():
        tensor = v1.placeholder(tf.float32, name="images")
        with pytest.raises(kg.SourceError, match="takes a list with the tensors of each tower"):
            feeder.feed_dicts(tensor)
        with pytest.raises(kg.SourceError, match="one tensor for each of the 1 towers"):
            feeder.feed_dicts([tensor], shares=[tensor, tensor])
        with pytest.raises(kg.SourceError, match=r"tensors of tower 0 .* received \('images:0',\)"):
            next(feeder.feed_dicts([(tensor,)]))
        with pytest.raises(kg.SourceError, match="transform is applied where TensorFlow reads the data"):
            kg.DistributedFeeder(X, transform=lambda x: x).feed_dicts([tensor])
        with pytest.raises(kg.SourceError, match="Sparse and ragged"):
            next(sparse.feed_dicts([tensor]))


# --- Queues ------------------------------------------------------------------------------------------------


def fillers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("keras_gpufeed queue")]


def test_a_queue_gives_each_sample_once_and_then_ends(session):
    queue = v1.FIFOQueue(5, [tf.float32, tf.float32], [[2], []])
    images, labels = queue.dequeue_up_to(4)
    coordinator = tf.train.Coordinator()
    threads = kg.DistributedFeeder(X, Y, batch_size=3).fill_queue(queue, session, coordinator, epochs=2)
    taken = []
    try:
        while not coordinator.should_stop():
            batch, targets = session.run([images, labels])
            np.testing.assert_allclose(batch.sum(1), targets, rtol=1e-5)
            taken.extend(targets.tolist())
    except tf.errors.OutOfRangeError:
        coordinator.request_stop()
    coordinator.join(threads)
    assert sorted(taken) == sorted(Y.tolist() * 2)


def test_the_threads_end_with_the_coordinator_though_the_queue_is_full(session):
    queue = v1.FIFOQueue(2, [tf.float32])
    batch = queue.dequeue()
    coordinator = tf.train.Coordinator()
    kg.DistributedFeeder(X, batch_size=4).fill_queue(queue, session, coordinator, whole_batches=True)
    assert session.run(batch).shape == (4, 2)
    assert len(fillers()) == 2
    coordinator.request_stop()
    coordinator.join()  # They are registered.
    assert fillers() == []


def test_an_error_of_the_source_reaches_the_coordinator_as_raised(session):
    def broken():
        yield X[:2]
        yield X[:2]
        yield X[:2]
        raise KeyError("file 17")

    queue = v1.FIFOQueue(20, [tf.float32], [[2]])
    coordinator = tf.train.Coordinator()
    threads = kg.DistributedFeeder(broken).fill_queue(queue, session, coordinator)
    assert coordinator.wait_for_stop(60)
    with pytest.raises(KeyError, match="file 17"):
        coordinator.join(threads)


def test_a_queue_of_other_components_is_refused(session):
    queue = v1.FIFOQueue(5, [tf.float32], [[3]])
    with pytest.raises(kg.SourceError, match=r"samples of this feeder are \[\('float32', '\(2,\)'\)"):
        kg.DistributedFeeder(X).fill_queue(queue, session, tf.train.Coordinator())


# --- Estimators --------------------------------------------------------------------------------------------


def model_fn(features, labels, mode):
    """A linear model, as a user of Estimators writes one."""
    weights = v1.get_variable("weights", (2,), initializer=v1.zeros_initializer())
    predictions = tf.linalg.matvec(features["x"], weights)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions={"y": predictions})
    loss = tf.reduce_mean(tf.square(predictions - labels))
    optimizer = v1.train.GradientDescentOptimizer(0.1)
    train = optimizer.minimize(loss, v1.train.get_or_create_global_step())
    metrics = {"error": v1.metrics.mean_absolute_error(labels, predictions)}
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train, eval_metric_ops=metrics)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # TensorFlow deprecates Estimators at every turn.
def test_an_estimator_trains_on_replicas_as_on_one_device(tmp_path):
    results = []
    # A session on several CPU devices cannot run MirroredStrategy's default collectives, whatever feeds it.
    mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice())
    for name, strategy in (("one", None), ("two", mirrored)):
        feeder = kg.DistributedFeeder({"x": X}, Y, batch_size=4, seed=1, drop_remainder=True)
        config = tf.estimator.RunConfig(train_distribute=strategy, save_summary_steps=None, log_step_count_steps=None)
        estimator = tf.estimator.Estimator(model_fn, str(tmp_path / name), config)
        for _ in range(2):
            estimator.train(feeder.input_fn)
        evaluated = estimator.evaluate(feeder.input_fn)
        predicted = [row["y"] for row in estimator.predict(feeder.input_fn)]
        weights = estimator.get_variable_value("weights")
        np.testing.assert_allclose(predicted, X @ weights, rtol=1e-5)
        assert evaluated["error"] == pytest.approx(float(np.abs(X @ weights - Y).mean()), rel=1e-5)
        results.append((estimator.get_variable_value("global_step"), weights))
    assert results[0][0] == results[1][0] == 4
    np.testing.assert_allclose(results[1][1], results[0][1], rtol=1e-5)


def test_sample_weights_do_not_fit_an_estimator():
    with pytest.raises(kg.SourceError, match="weight_column"):
        kg.DistributedFeeder(X, Y, Y).input_fn()
