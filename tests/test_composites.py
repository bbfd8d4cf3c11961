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


def test_lists_of_unequal_lengths_are_refused_with_both_ways_out():
    with pytest.raises(kg.SourceError, match=r"unequal lengths.*pad_sequences.*tf\.ragged\.constant\(x\)"):
        kg.DistributedFeeder(ROWS)
