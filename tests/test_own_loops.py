"""Loops that are not Keras's: over a strategy, over plain data sets, over shards."""

import gc
import itertools
import threading

import numpy as np
import pytest
import tensorflow as tf
from comparison import strategy_of

import keras_gpufeed as kg

X = np.random.default_rng(0).normal(size=(29, 2)).astype("float32")
Y = X.sum(1, keepdims=True)


def train_as_in_the_guide(strategy, feeder, loop="outside", epochs=2):
    """The custom training loop of TensorFlow's guide: model, loss, metric and steps as they stand there."""
    tf.keras.utils.set_random_seed(1)
    with strategy.scope():
        loss_object = tf.keras.losses.MeanSquaredError(reduction=tf.keras.losses.Reduction.NONE)

        def compute_loss(labels, predictions, model_losses):
            per_example_loss = loss_object(labels, predictions)
            loss = tf.nn.compute_average_loss(per_example_loss)
            if model_losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
            return loss

        train_error = tf.keras.metrics.MeanAbsoluteError()
        dense = tf.keras.layers.Dense(4, "tanh", input_shape=(2,), kernel_regularizer="l2")
        model = tf.keras.Sequential([dense, tf.keras.layers.Dense(1)])
        optimizer = tf.keras.optimizers.SGD(0.05, momentum=0.9)

    def train_step(inputs):
        images, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = compute_loss(labels, predictions, model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        train_error.update_state(labels, predictions)
        return loss

    traces = []

    @tf.function
    def distributed_train_step(dataset_inputs):
        traces.append("step")
        per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)

    @tf.function
    def distributed_train_epoch(iterator):
        traces.append("epoch")
        total_loss = 0.0
        for dataset_inputs in iterator:
            per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
            total_loss += strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)
        return total_loss

    @tf.function
    def train_multiple_steps(iterator, steps):
        total_loss = 0.0
        for _ in tf.range(steps):
            per_replica_losses = strategy.run(train_step, args=(next(iterator),))
            total_loss += strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)
        return total_loss

    train_dist_dataset = feeder.distributed_dataset(strategy)
    losses = []
    for _ in range(epochs):
        total_loss = 0.0
        if loop == "outside":
            for inputs in train_dist_dataset:
                total_loss += distributed_train_step(inputs)
        elif loop == "inside":
            total_loss = distributed_train_epoch(iter(train_dist_dataset))
        else:
            total_loss = train_multiple_steps(iter(train_dist_dataset), tf.constant(len(train_dist_dataset)))
        losses.append(float(total_loss) / len(train_dist_dataset))
    return losses, float(train_error.result()), model.get_weights(), traces


@pytest.mark.parametrize(
    ("num_samples", "loop"),
    [
        (29, "outside"),  # 5 samples left for 3 replicas
        (26, "inside"),  # 2: a small tail
        (26, "steps"),
    ],
)
def test_the_loop_of_the_guide_gives_the_result_of_one_device(num_samples, loop):
    def feeder():
        return kg.DistributedFeeder(X[:num_samples], Y[:num_samples], batch_size=8, seed=3)

    losses, error, weights, _ = train_as_in_the_guide(strategy_of(3), feeder(), loop)
    expected_losses, expected_error, expected, _ = train_as_in_the_guide(tf.distribute.get_strategy(), feeder(), loop)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert error == pytest.approx(expected_error, rel=1e-5)
    for weight, reference in zip(weights, expected):
        np.testing.assert_allclose(weight, reference, atol=1e-5)


def test_a_function_of_a_whole_epoch_is_traced_once():
    feeder = kg.DistributedFeeder(X, Y, batch_size=8)
    *_, traces = train_as_in_the_guide(strategy_of(2), feeder, "inside", epochs=3)
    assert traces == ["epoch", "epoch"]  # Both in the first epoch: the optimizer makes its variables there.


def test_each_epoch_has_its_own_order_and_all_samples():
    feeder = kg.DistributedFeeder(np.arange(10), batch_size=4, seed=2)
    strategy = strategy_of(2)
    dataset = feeder.distributed_dataset(strategy)
    epochs = [
        [
            int(sample)
            for data in dataset
            for part in strategy.experimental_local_results(data.data)
            for sample in part.numpy()
        ]
        for _ in range(2)
    ]
    assert len(dataset) == 3
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1]


def test_the_data_of_a_step_may_be_unpacked_before_it_is_run():
    feeder = kg.DistributedFeeder({"a": X[:3], "b": Y[:3]}, Y[:3], batch_size=3, shuffle=False)
    strategy = strategy_of(2)
    for inputs, labels in feeder.distributed_dataset(strategy):
        mean = strategy.run(lambda b, y: tf.reduce_mean(b - 2 * y), args=(inputs["b"],), kwargs={"y": labels})
        assert float(strategy.reduce("SUM", mean, axis=None)) == pytest.approx(-float(Y[:3].mean()), rel=1e-5)


def test_what_a_feeder_has_not_fed_is_left_to_the_strategy():
    mixed_keys = {1: 2.0, "b": 3.0}  # Nothing that `tf.nest` takes.
    assert tf.distribute.get_strategy().run(lambda values: values[1] + values["b"], args=(mixed_keys,)) == 5.0


def test_rows_that_a_step_returns_are_gathered_once_each():
    feeder = kg.DistributedFeeder(np.arange(9.0), batch_size=8, shuffle=False)
    strategy = strategy_of(4)
    rows = [
        strategy.gather(strategy.run(lambda x: 2 * x, args=(x,)), axis=0) for x in feeder.distributed_dataset(strategy)
    ]
    assert [row.numpy().tolist() for row in rows] == [[0, 2, 4, 6, 8, 10, 12, 14], [16]]


def test_inside_a_scope_its_strategy_is_taken():
    strategy = strategy_of(3)
    with strategy.scope():
        dataset = kg.DistributedFeeder(np.zeros(6)).distributed_dataset()
    assert len(strategy.experimental_local_results(next(iter(dataset)).data)) == 3


def test_errors_of_a_source_arrive_as_raised_and_nothing_goes_on_running():
    def broken():
        yield X[:4], Y[:4]
        yield X[:4], Y[:4]
        raise KeyError("file 17")

    with pytest.raises(KeyError, match="file 17"):
        train_as_in_the_guide(strategy_of(2), kg.DistributedFeeder(broken))
    with pytest.raises(tf.errors.UnknownError, match="file 17"):  # All that a tf.function lets through.
        train_as_in_the_guide(strategy_of(2), kg.DistributedFeeder(broken), "inside")
    gc.collect()
    assert "keras_gpufeed reader" not in [thread.name for thread in threading.enumerate()]


def test_a_loop_that_is_left_ends_the_reading():
    def endless():
        while True:
            yield X[:4], Y[:4]

    iterator = iter(kg.DistributedFeeder(endless).distributed_dataset(strategy_of(2)))
    next(iterator)
    assert "keras_gpufeed reader" in [thread.name for thread in threading.enumerate()]
    del iterator
    gc.collect()
    assert "keras_gpufeed reader" not in [thread.name for thread in threading.enumerate()]


def test_a_sequence_is_told_of_each_epoch():
    ended = []

    class Halves(tf.keras.utils.Sequence):
        def __len__(self):
            return 2

        def __getitem__(self, number):
            return X[:4]

        def on_epoch_end(self):
            ended.append(len(ended))

    dataset = kg.DistributedFeeder(Halves()).distributed_dataset(strategy_of(2))
    assert [sum(1 for _ in dataset) for _ in range(2)] == [2, 2]
    assert ended == [0, 1]


def test_opening_the_steps_in_a_function_is_refused():
    dataset = kg.DistributedFeeder(X).distributed_dataset(strategy_of(2))

    @tf.function
    def run_epoch():
        total = 0
        for _ in dataset:
            total += 1
        return total

    with pytest.raises(TypeError, match="pass the iterator"):
        run_epoch()


# --- Plain data sets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_data_sets_of_all_replicas_are_the_feed_of_a_strategy(num_replicas):
    feeder = kg.DistributedFeeder(np.arange(11), np.arange(11.0), batch_size=4, seed=1)
    strategy = strategy_of(num_replicas)
    steps = (
        [strategy.experimental_local_results(data[0].data) for data in feeder.distributed_dataset(strategy)]
        if (num_replicas > 1)
        else [(x,) for x, _ in feeder.distributed_dataset(strategy)]
    )
    datasets = [feeder.dataset(replica_id, num_replicas) for replica_id in range(num_replicas)]
    for parts, *elements in zip(steps, *datasets):
        assert [x.numpy().tolist() for x, _ in elements] == [part.numpy().tolist() for part in parts]
    assert [len(list(dataset)) for dataset in datasets] == [3] * num_replicas


def test_each_pass_over_a_data_set_is_another_epoch():
    feeder = kg.DistributedFeeder(np.arange(8), batch_size=8, seed=1)
    first, second, third = (batch.numpy().tolist() for batch in feeder.dataset().repeat(3))
    assert sorted(first) == sorted(second) == sorted(third) == list(range(8))
    assert first != second != third
    again = feeder.dataset()
    assert [next(iter(again)).numpy().tolist() for _ in range(2)] == [first, second]


def test_data_sets_of_generators_transforms_and_sparse_arrays():
    feeder = kg.DistributedFeeder(lambda: iter([X[:5], X[:3]]), transform=lambda x: x + 1)
    assert [part.shape[0] for part in feeder.dataset(1, 2)] == [2, 1]
    np.testing.assert_allclose(next(iter(feeder.dataset())), X[:5] + 1)
    sparse = kg.DistributedFeeder(tf.sparse.from_dense(X), batch_size=20, shuffle=False)
    np.testing.assert_allclose(
        np.concatenate([tf.sparse.to_dense(part) for part in sparse.dataset(1, 2)]), np.concatenate([X[10:20], X[25:]])
    )


def test_a_tf_data_set_goes_in_and_comes_back():
    whole = tf.data.Dataset.from_tensor_slices((X, Y))
    for given, arguments in ((whole, {"batched": False, "batch_size": 8}), (whole.batch(8), {})):
        batches = list(kg.DistributedFeeder(given, **arguments).dataset())
        assert [len(x) for x, _ in batches] == [8, 8, 8, 5]
        np.testing.assert_array_equal(np.concatenate([x for x, _ in batches]), X)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda feeder: feeder.dataset(2, num_replicas=2), "replica_id must be from 0 to 1. Received 2"),
        (lambda feeder: kg.DistributedFeeder(iter([X])).dataset(0), "An iterator can be read once"),
        (lambda feeder: feeder.shard(3, 3), "index must be from 0 to 2 for 3 shards. Received 3"),
        (lambda feeder: feeder.shard(30, 0), r"29 sample\(s\) cannot be cut into 30 shards"),
        (lambda feeder: kg.DistributedFeeder(lambda: iter([X])).shard(2, 0, contiguous=True), "needs arrays"),
        (lambda feeder: kg.DistributedFeeder.per_replica([X, X]).shard(2, 0), "Shard each of them"),
    ],
)
def test_what_cannot_be_given_is_refused(make, message):
    with pytest.raises(kg.SourceError, match=message):
        make(kg.DistributedFeeder(X))


# --- Shards ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize(("num_samples", "num_shards"), [(10, 3), (9, 3), (3, 3), (7, 1)])
def test_shards_are_disjoint_even_and_together_the_whole(num_samples, num_shards, contiguous):
    feeder = kg.DistributedFeeder(np.arange(num_samples), batch_size=2, seed=0)
    shards = [
        [int(sample) for batch in feeder.shard(num_shards, index, contiguous).dataset() for sample in batch]
        for index in range(num_shards)
    ]
    assert sorted(itertools.chain(*shards)) == list(range(num_samples))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    for index, shard in enumerate(shards):
        reference = list(tf.data.Dataset.range(num_samples).shard(num_shards, index).as_numpy_iterator())
        assert contiguous or sorted(shard) == reference
        assert not contiguous or sorted(shard) == list(range(min(shard), max(shard) + 1))


def test_shards_of_batches_are_disjoint_and_together_the_whole():
    class Numbered(tf.keras.utils.Sequence):
        def __len__(self):
            return 5

        def __getitem__(self, number):
            return np.full(3, number)

    feeder = kg.DistributedFeeder(Numbered(), seed=0)
    shards = [[int(batch[0]) for batch in feeder.shard(2, index).dataset()] for index in (0, 1)]
    assert [len(feeder.shard(2, index)) for index in (0, 1)] == [3, 2]
    assert sorted(itertools.chain(*shards)) == [0, 1, 2, 3, 4]
    assert feeder.shard(2, 1).num_steps == 2


def test_a_shard_can_be_trained_on():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    history = model.fit(kg.DistributedFeeder(X, Y, batch_size=4).shard(2, 0), verbose=0)
    assert history.params["steps"] == 4
