"""A source of its own for each replica, and other values for one input on one replica."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from comparison import largest_difference, strategy_of

import keras_gpufeed as kg

X = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
Y = X.sum(1, keepdims=True) + 1


class Seen(tf.keras.Model):
    """Adds up, on each replica apart, what it was given."""

    def __init__(self):
        super().__init__()
        self.dense = tf.keras.layers.Dense(1)
        self.samples, self.total, self.calls = (
            self.add_weight(
                name,
                (),
                trainable=False,
                initializer="zeros",
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
            for name in ("samples", "total", "calls")
        )

    def call(self, inputs):
        """Counts its samples."""
        self.samples.assign_add(tf.cast(tf.shape(inputs)[0], tf.float32))
        self.total.assign_add(tf.reduce_sum(inputs))
        self.calls.assign_add(1.0)
        return self.dense(inputs)

    def of_replicas(self, variable):
        """Its value on each replica."""
        return [float(value) for value in self.distribute_strategy.experimental_local_results(variable)]


def compiled(model):
    model.compile(tf.keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return model


def small_model():
    tf.keras.utils.set_random_seed(3)
    layers = [tf.keras.layers.Dense(4, "tanh", input_shape=(3,), kernel_regularizer="l2"), tf.keras.layers.Dense(1)]
    return compiled(tf.keras.Sequential(layers))


def joined_batches(*sources):
    """What one device is to be fed for the same result: the replicas' batches, one behind the other."""
    return [[np.concatenate(arrays) for arrays in zip(*parts)] for parts in zip(*sources)]


def batches(first, stop, size):
    places = range(first, stop, size)
    return [(X[place : min(place + size, stop)], Y[place : min(place + size, stop)]) for place in places]


# --- Who sees what -----------------------------------------------------------------------------------------


def test_each_replica_sees_its_own_samples_and_no_others():
    parts = [(0, 20), (20, 30), (30, 40)]
    feeder = kg.DistributedFeeder.per_replica([(X[a:b], Y[a:b]) for a, b in parts], batch_size=8)
    model = compiled(Seen())
    model.fit(feeder, epochs=3, verbose=0)
    assert model.distribute_strategy.num_replicas_in_sync == 3
    assert model.of_replicas(model.samples) == [60, 30, 30]
    assert model.of_replicas(model.total) == pytest.approx([3 * float(X[a:b].sum()) for a, b in parts], rel=1e-4)
    assert model.of_replicas(model.calls) == [15, 15, 15]


@pytest.mark.parametrize(
    ("lengths", "batch_size", "expected"),
    [
        ([16, 16], 8, [(4, 4)] * 4),
        ([10, 10], 8, [(4, 4), (4, 4), (2, 2)]),  # as with one source: full steps, then what is left
        ([20, 10], 6, [(4, 2)] * 5),
        ([10, 11], 7, [(3, 3), (3, 4), (4, 4)]),
        ([30, 1], 32, [(30, 1)]),
        ([20, 9, 5], [8, 4, 2], [(8, 4, 2), (8, 4, 2), (4, 1, 1)]),
    ],
)
def test_sizes_of_steps(lengths, batch_size, expected):
    feeder = kg.DistributedFeeder.per_replica([np.arange(float(n)) for n in lengths], batch_size=batch_size)
    plan = feeder.plan()
    assert [plan.split(step).sizes for step in range(len(feeder))] == expected
    assert plan.num_samples == sum(lengths)
    steps = [np.concatenate(list(step)) for step in zip(*(feeder.dataset(r) for r in range(len(lengths))))]
    assert [len(step) for step in steps] == [sum(sizes) for sizes in expected]
    expected_values = [float(value) for length in lengths for value in range(length)]
    assert sorted(np.concatenate(steps).tolist()) == sorted(expected_values)


def test_each_source_has_an_order_of_its_own_given_by_the_seed():
    def orders(seed, **arguments):
        feeder = kg.DistributedFeeder.per_replica([np.arange(12)] * 2, batch_size=24, seed=seed, **arguments)
        return [next(iter(feeder.dataset(replica_id))).numpy().tolist() for replica_id in (0, 1)]

    assert orders(5) == orders(5)
    assert orders(5) != orders(6)
    assert orders(5)[0] != orders(5)[1]
    assert orders(5, shuffle=False) == [list(range(12))] * 2


# --- Results -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[6, 6], [4, 2, 6]])
def test_weights_and_logs_equal_one_device_fed_with_the_same_batches(sizes):
    bounds = np.cumsum([0, *sizes]) * 40 // sum(sizes)
    steps = {-(-(b - a) // size) for a, b, size in zip(bounds, bounds[1:], sizes)}
    bounds = [int(bound) for bound in bounds]
    assert len(steps) == 1
    model, reference = small_model(), small_model()
    feeder = kg.DistributedFeeder.per_replica(
        [(X[a:b], Y[a:b]) for a, b in zip(bounds, bounds[1:])], batch_size=sizes, shuffle=False
    )
    history = model.fit(feeder, epochs=3, verbose=0)
    together = joined_batches(*(batches(a, b, size) for a, b, size in zip(bounds, bounds[1:], sizes)))
    kg.distribute(reference, strategy_of(1))
    expected = reference.fit(kg.DistributedFeeder(lambda: iter(together)), epochs=3, verbose=0)
    assert largest_difference(model, reference) < 1e-5
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-5)
    np.testing.assert_allclose(history.history["mae"], expected.history["mae"], rtol=1e-5)


def test_evaluate_counts_each_sample_once():
    model = small_model()
    feeder = kg.DistributedFeeder.per_replica([(X[:25], Y[:25]), (X[25:], Y[25:])], batch_size=7)
    np.testing.assert_allclose(
        model.evaluate(feeder, verbose=0), model.evaluate(kg.DistributedFeeder(X, Y), verbose=0), rtol=1e-5
    )


def test_validation_data_may_be_sources_side_by_side():
    model = small_model()
    feeder = kg.DistributedFeeder.per_replica([(X[:25], Y[:25]), (X[25:], Y[25:])], batch_size=7)
    history = model.fit(feeder, validation_data=feeder, epochs=2, verbose=0)
    assert history.history["val_loss"][-1] == pytest.approx(model.evaluate(feeder, verbose=0)[0], rel=1e-5)


def test_a_loop_of_your_own_is_fed_and_weighed():
    strategy = strategy_of(2)
    feeder = kg.DistributedFeeder.per_replica([np.full(6, 1.0), np.full(2, 5.0)], batch_size=[3, 1])
    for data in feeder.distributed_dataset(strategy):
        sums = strategy.run(lambda x: tf.reshape(tf.reduce_sum(x), [1]), args=(data,))
        mean = strategy.reduce("SUM", strategy.run(tf.reduce_mean, args=(data,)), axis=None)
        assert [value.numpy().tolist() for value in strategy.experimental_local_results(sums)] == [[3.0], [5.0]]
        assert float(mean) == 2.0
        assert [float(share[0]) for share in strategy.experimental_local_results(data.shares)] == [0.75, 0.25]


# --- Kinds of sources --------------------------------------------------------------------------------------


def test_generators_arrays_sequences_and_constants_side_by_side():
    class Halves(tf.keras.utils.Sequence):
        def __len__(self):
            return 5

        def __getitem__(self, number):
            return X[number : number + 2], Y[number : number + 2]

    def make_batches(epoch):
        for number in range(5):
            yield X[: 1 + number], Y[: 1 + number] + epoch

    constant = itertools.repeat((X[:4], Y[:4]))
    feeder = kg.DistributedFeeder.per_replica([make_batches, (X[:15], Y[:15]), Halves(), constant])
    model = compiled(Seen())
    model.fit(feeder, epochs=2, verbose=0)
    assert model.of_replicas(model.calls) == [10, 10, 10, 10]
    assert model.of_replicas(model.samples) == [30, 30, 20, 40]
    assert model.of_replicas(model.total)[3] == pytest.approx(10 * float(X[:4].sum()), rel=1e-4)


def test_an_iterator_is_read_on_from_epoch_to_epoch_and_loses_nothing():
    given = iter(range(100))
    endless = (np.array([float(number)], "float32") for number in given)
    feeder = kg.DistributedFeeder.per_replica([np.zeros(3, "float32"), endless], batch_size=[1, 1], prefetch=1)
    seen = [[float(part[0]) for part in epoch] for epoch in (feeder_parts(feeder, 1), feeder_parts(feeder, 1))]
    assert seen == [[0, 1, 2], [3, 4, 5]]


def feeder_parts(feeder, replica_id):
    strategy = strategy_of(feeder.num_sources)
    return [
        strategy.experimental_local_results(data.data)[replica_id].numpy()
        for data in feeder.distributed_dataset(strategy)
    ]


def test_dicts_and_steps_per_epoch():
    source = {"a": X[:10], "b": X[:10, :1]}
    feeder = kg.DistributedFeeder.per_replica([(source, Y[:10]), (source, Y[:10])], batch_size=8, steps_per_epoch=2)
    a, b = tf.keras.Input((3,), name="a"), tf.keras.Input((1,), name="b")
    model = compiled(tf.keras.Model([a, b], tf.keras.layers.Dense(1)(tf.concat([a, b], 1))))
    history = model.fit(feeder, epochs=3, verbose=0)
    assert history.params["steps"] == 2
    assert int(model.optimizer.iterations) == 6


# --- What is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sources", "arguments", "message"),
    [
        ([], {}, "takes a list of sources, one for each replica. Received a list of length 0"),
        ((X, Y), {"batch_size": [8]}, "must be one positive integer for each of the 2 sources"),
        ([X, X[:10]], {"batch_size": [8, 8]}, "Received 5 from source 0, 2 from source 1"),
        ([X, X[:1]], {"batch_size": 8}, "source of replica 1 has 1 sample"),
        ([(X, Y, Y, Y), X], {}, "Source 0 is a tuple of 4"),
        ([tf.sparse.from_dense(X), X], {}, "Source 0 holds sparse or ragged arrays"),
    ],
)
def test_sources_that_do_not_fit_are_refused_at_once(sources, arguments, message):
    with pytest.raises(kg.SourceError, match=message):
        kg.DistributedFeeder.per_replica(sources, **arguments)


def test_more_or_fewer_replicas_than_sources():
    model = kg.distribute(small_model(), strategy_of(4))
    with pytest.raises(kg.SourceError, match=r"given 2 source\(s\), but there are 4 replica"):
        model.fit(kg.DistributedFeeder.per_replica([(X, Y), (X, Y)]), verbose=0)
    with pytest.raises(kg.StrategyError, match="9 devices were asked for, but 8 can be seen"):
        small_model().fit(kg.DistributedFeeder.per_replica([(X, Y)] * 9), verbose=0)


def test_predict_is_refused():
    with pytest.raises(kg.SourceError, match="Predict from each source"):
        small_model().predict(kg.DistributedFeeder.per_replica([X, X]), verbose=0)


def test_sources_of_unequal_length_or_structure_are_reported_with_the_replica():
    def short():
        yield X[:2], Y[:2]

    def long():
        yield from (short_batch for _ in range(3) for short_batch in short())

    with pytest.raises(kg.SourceError, match="source of replica 1 ended after 1 batches of epoch 0"):
        small_model().fit(kg.DistributedFeeder.per_replica([long, short]), verbose=0)
    with pytest.raises(kg.SourceError, match=r"Batch 0 of replica 1 cannot stand beside .*float32\(2, 3\)"):
        small_model().fit(kg.DistributedFeeder.per_replica([short, X]), verbose=0)


def test_an_error_in_one_source_arrives_as_raised():
    def broken():
        yield X[:2], Y[:2]
        yield X[:2], Y[:2]
        yield X[:2], Y[:2]
        raise KeyError("file 17")

    with pytest.raises(KeyError, match="file 17"):
        small_model().fit(kg.DistributedFeeder.per_replica([broken, broken]), verbose=0)


# --- One input of one replica ------------------------------------------------------------------------------

INPUTS = {"image": X[:10], "noise": np.arange(10, dtype="float32")}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (-1.0, [[-1, -1], [-1, -1], [-1, -1]]),  # the same for every sample
        (np.arange(100, 110), [[102, 103], [106, 107], [108, 109]]),  # one for each; the last two are a small tail
    ],
)
def test_override_reaches_one_input_of_one_replica(value, expected):
    feeder = kg.DistributedFeeder(INPUTS, batch_size=4, shuffle=False)
    overridden = feeder.override(1, {"noise": value})
    strategy = strategy_of(2)
    seen = [
        strategy.experimental_local_results(data["noise"].data) for data in overridden.distributed_dataset(strategy)
    ]
    assert [part[1].numpy().tolist() for part in seen] == [*expected[:2], expected[2][1:]]
    assert [part[0].numpy().tolist() for part in seen] == [[0, 1], [4, 5], [8]]
    plain = [part["noise"].numpy().tolist() for part in feeder.dataset(1, 2)]
    assert plain == [[2, 3], [6, 7], [9]]


def test_override_in_a_small_tail_and_in_shuffled_order():
    feeder = kg.DistributedFeeder(INPUTS, batch_size=9, seed=4).override(1, {"noise": np.arange(10) + 100.0})
    parts = [list(feeder.dataset(replica_id, 2)) for replica_id in (0, 1)]
    tails = [float(part[1]["noise"][0]) for part in parts]
    assert tails[1] == tails[0] + 100  # The one sample that is left goes to both, and only one sees another value.
    fed = [float(value) for part in parts for value in part[0]["noise"]]
    assert sorted(value % 100 for value in [*fed, tails[0]]) == list(range(10))


def test_override_in_fit_changes_what_that_replica_contributes():
    image, noise = tf.keras.Input((3,), name="image"), tf.keras.Input((), name="noise")
    outputs = tf.keras.layers.Dense(1)(tf.concat([image, noise[:, None]], 1))
    model = compiled(tf.keras.Model([image, noise], outputs))
    kg.distribute(model, strategy_of(2))
    overridden = kg.DistributedFeeder(INPUTS, Y[:10], batch_size=10, shuffle=False).override(1, {"noise": 0.0})
    expected = {"image": X[:10], "noise": np.array([0, 1, 2, 3, 4, 0, 0, 0, 0, 0], "float32")}
    np.testing.assert_allclose(
        model.evaluate(overridden, verbose=0),
        model.evaluate(kg.DistributedFeeder(expected, Y[:10], batch_size=10), verbose=0),
        rtol=1e-6,
    )


def test_override_of_a_generator():
    feeder = kg.DistributedFeeder(lambda: iter([INPUTS, INPUTS])).override(0, {"noise": 7.0})
    part = next(iter(feeder.dataset(0, 2)))
    assert part["noise"].numpy().tolist() == [7.0] * 5
    np.testing.assert_array_equal(part["image"], X[:5])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"nose": 0.0}, r"override names the input 'nose', but x has the inputs \['image', 'noise'\]"),
        ({"image": np.zeros(7)}, r"has shape \(7,\) and dtype float64, but a sample of that input has shape \(3,\)"),
        ({"noise": "loud"}, "dtype <U4"),
        ({}, "must be a dict from names of inputs to values"),
    ],
)
def test_overrides_that_do_not_fit_are_refused(inputs, message):
    with pytest.raises(kg.SourceError, match=message):
        kg.DistributedFeeder(INPUTS).override(0, inputs)


def test_override_of_a_replica_that_is_not_there():
    feeder = kg.DistributedFeeder(INPUTS).override(2, {"noise": 0.0})
    with pytest.raises(kg.SourceError, match=r"names replica 2, but there are 2 replica\(s\)"):
        feeder.distributed_dataset(strategy_of(2))
