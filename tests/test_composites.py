"""Sparse and ragged arrays."""

import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from comparison import largest_difference, strategy_of

import keras_gpufeed as kg

DENSE = np.random.default_rng(0).random((21, 6)).astype("float32")
DENSE[DENSE < 0.6] = 0.0
DENSE[4] = 0.0
TARGETS = DENSE.sum(axis=1)
ROWS = [[1] * (number % 4) + [2] for number in range(21)]

SPARSE = {
    "csr": scipy.sparse.csr_matrix(DENSE),
    "coo of float64": scipy.sparse.coo_matrix(DENSE.astype("float64")),
    "csc": scipy.sparse.csc_matrix(DENSE),
    "SparseTensor": tf.sparse.from_dense(DENSE),
}


@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_arrays_train_like_dense_ones(kind):
    models = []
    for num_replicas, x in ((1, DENSE), (3, SPARSE[kind])):
        tf.keras.utils.set_random_seed(1)
        model = tf.keras.Sequential([tf.keras.layers.Input((6,), sparse=num_replicas > 1), tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        kg.distribute(model, strategy_of(num_replicas))
        model.fit(kg.DistributedFeeder(x, TARGETS, batch_size=8, seed=3), epochs=2, verbose=0)
        predictions = model.predict(kg.DistributedFeeder(x, batch_size=8), verbose=0)
        models.append((model, predictions))
    assert largest_difference(models[1][0], models[0][0]) <= 1e-5
    np.testing.assert_allclose(models[1][1], models[0][1], atol=1e-5)


def test_ragged_tensors_are_split_by_sample():
    ragged = tf.ragged.constant(ROWS)
    model = tf.keras.Sequential([tf.keras.layers.Lambda(lambda x: tf.reduce_sum(x, axis=1, keepdims=True))])
    kg.distribute(model, strategy_of(2))
    sums = model.predict(kg.DistributedFeeder(ragged, batch_size=4), verbose=0)
    assert sums[:, 0].tolist() == [sum(row) for row in ROWS]


def test_ragged_tensors_train_and_validate():
    ragged = tf.ragged.constant(ROWS)
    inputs = tf.keras.Input((None,), ragged=True, dtype="int32")
    hidden = tf.keras.layers.GlobalAveragePooling1D()(tf.keras.layers.Embedding(3, 2)(inputs))
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(hidden))
    model.compile("sgd", "mse")
    kg.distribute(model, strategy_of(2))
    feeder = kg.DistributedFeeder(ragged, TARGETS, batch_size=4, seed=1)
    history = model.fit(feeder, validation_data=feeder, epochs=2, verbose=0)
    assert len(history.history["val_loss"]) == 2
    assert np.isfinite(history.history["val_loss"]).all()


def test_ragged_strings_of_two_ragged_axes_keep_their_order():
    nested = tf.ragged.constant([[["a"], ["b", "c"]], [["d"]], [[], ["e"]], [["f", "g", "h"]], [["i"]]])
    feeder = kg.DistributedFeeder(nested, batch_size=2)
    model = tf.keras.Sequential(
        [tf.keras.layers.Lambda(lambda x: tf.strings.reduce_join(x.merge_dims(1, 2), axis=1, keepdims=True))]
    )
    kg.distribute(model, strategy_of(2))
    assert model.predict(feeder, verbose=0)[:, 0].tolist() == [b"abc", b"d", b"e", b"fgh", b"i"]


# --- Batches of a generator ---------------------------------------------------------------------------------


def batches_of(x, y=None, size=4):
    """A generator function."""

    def generate():
        for start in range(0, x.shape[0], size):
            yield (x[start : start + size],) if y is None else (x[start : start + size], y[start : start + size])

    return generate


@pytest.mark.parametrize("batch_size", [None, 8], ids=["as they come", "of another size"])
@pytest.mark.parametrize("kind", ["matrices", "tensors", "data set"])
def test_sparse_batches_train_like_sparse_arrays(kind, batch_size):
    sources = {
        "matrices": batches_of(SPARSE["coo of float64"].tocsr(), TARGETS, 8),
        "tensors": lambda: ((tf.sparse.from_dense(x), y) for x, y in batches_of(DENSE, TARGETS, 8)()),
        "data set": tf.data.Dataset.from_tensor_slices((SPARSE["SparseTensor"], TARGETS)).batch(8),
    }
    models = []
    for feeder in (
        kg.DistributedFeeder(SPARSE["csr"], TARGETS, batch_size=8, shuffle=False),
        kg.DistributedFeeder(sources[kind], batch_size=batch_size),
    ):
        tf.keras.utils.set_random_seed(1)
        model = tf.keras.Sequential([tf.keras.layers.Input((6,), sparse=True), tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        kg.distribute(model, strategy_of(3)).fit(feeder, verbose=0)
        models.append(model)
    assert largest_difference(models[1], models[0]) <= 1e-6


@pytest.mark.parametrize("batch_size", [None, 5])
def test_ragged_batches_are_split_by_sample(batch_size):
    model = tf.keras.Sequential([tf.keras.layers.Lambda(lambda x: tf.reduce_sum(x, axis=1, keepdims=True))])
    kg.distribute(model, strategy_of(2))
    feeder = kg.DistributedFeeder(batches_of(tf.ragged.constant(ROWS)), batch_size=batch_size)
    assert model.predict(feeder, verbose=0)[:, 0].tolist() == [sum(row) for row in ROWS]


def test_a_dense_batch_after_sparse_ones_is_refused():
    def generate():
        yield SPARSE["csr"][:4], TARGETS[:4]
        yield SPARSE["csr"][:4], TARGETS[:4]
        yield DENSE[:4], TARGETS[:4]

    model = tf.keras.Sequential([tf.keras.layers.Input((6,), sparse=True), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    kg.distribute(model, strategy_of(2))
    with pytest.raises(
        kg.SourceError, match=r"Batch 2 .* Received float32\(4, 6\), expected sparse float32\(None, 6\)"
    ):
        model.fit(kg.DistributedFeeder(generate), verbose=0)


# --- Samples of unequal length -------------------------------------------------------------------------------

UNEQUAL_ROWS = ROWS[:19]  # Of lengths 1, 2, 3, 4, 1, 2, ... and 3 for the last.
OBJECTS = np.array([*UNEQUAL_ROWS, None], object)[:-1]


class Rows:
    """Single samples by number."""

    def __len__(self):
        return len(UNEQUAL_ROWS)

    def __getitem__(self, number):
        return np.array(UNEQUAL_ROWS[number])


UNEQUAL = {
    "lists": lambda **arguments: kg.DistributedFeeder(UNEQUAL_ROWS, batch_size=6, **arguments),
    "objects": lambda **arguments: kg.DistributedFeeder(OBJECTS, batch_size=6, **arguments),
    "batches": lambda **arguments: kg.DistributedFeeder(batches_of(OBJECTS, size=6), **arguments),
    "batches of lists": lambda **arguments: kg.DistributedFeeder(
        lambda: (batch.tolist() for (batch,) in batches_of(OBJECTS, size=6)()), **arguments
    ),
    "other batches": lambda **arguments: kg.DistributedFeeder(batches_of(OBJECTS), batch_size=6, **arguments),
    "samples": lambda **arguments: kg.DistributedFeeder(
        lambda: map(np.array, UNEQUAL_ROWS), batched=False, batch_size=6, **arguments
    ),
    "samples by number": lambda **arguments: kg.DistributedFeeder(Rows(), batch_size=6, **arguments),
}


@pytest.mark.parametrize("kind", UNEQUAL)
def test_samples_of_unequal_length_are_padded_to_the_longest_of_the_global_batch(kind):
    """Whatever the replica: here a batch is two parts of three samples, and most parts have shorter ones."""
    model = tf.keras.Sequential([tf.keras.layers.Lambda(lambda x: tf.reduce_sum(x, axis=1, keepdims=True))])
    kg.distribute(model, strategy_of(2))
    sums = model.predict(UNEQUAL[kind](padding_value=100), verbose=0)[:, 0]
    longest = [4] * 18 + [3]
    assert sums.tolist() == [sum(row) + 100 * (full - len(row)) for row, full in zip(UNEQUAL_ROWS, longest)]


@pytest.mark.parametrize("kind", UNEQUAL)
def test_samples_of_unequal_length_are_refused_with_both_ways_out(kind):
    with pytest.raises(kg.SourceError, match=r"unequal length.*padding_value=0.*tf\.ragged\.constant"):
        kg.distribute(tf.keras.Sequential(), strategy_of(2)).predict(UNEQUAL[kind](), verbose=0)


@pytest.mark.parametrize(
    ("samples", "padding_value", "message"),
    [
        ([[[1], [2, 3]], [[4]]], 0, "unequal length themselves"),
        (UNEQUAL_ROWS, 0.5, "0.5 is no value of dtype int64"),
        ([["a"], ["b", "c"]], 0, "dtype <U1 cannot be padded"),
        (UNEQUAL_ROWS, "0", r"padding_value must be a number. Received '0'"),
    ],
)
def test_what_cannot_be_padded_is_refused(samples, padding_value, message):
    with pytest.raises(kg.SourceError, match=message):
        kg.DistributedFeeder(samples, padding_value=padding_value)
