"""Generators, Sequences and other sources of batches, through `fit`, `evaluate` and `predict`."""

import gc
import logging
import queue
import threading
import weakref

import numpy as np
import pytest
import tensorflow as tf
from comparison import largest_difference, largest_log_difference, strategy_of
from sequences_for_workers import Batches, ChangingBatches
from sources_for_workers import (
    FailingSamples,
    KilledOnce,
    RandomSamples,
    Samples,
    SlowSamples,
    X,
    Y,
    batch,
    batches,
    sharded_batches,
)

import keras_gpufeed as kg


def make_model(num_replicas=1):
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.layers.Dense(4, "tanh", input_shape=(2,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return kg.distribute(model, strategy_of(num_replicas))


def identity():
    return kg.distribute(tf.keras.Sequential([tf.keras.layers.Lambda(lambda x: x)]), strategy_of(2))


@pytest.fixture(scope="module")
def reference():
    """Plain Keras on the same samples, as arrays."""
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.layers.Dense(4, "tanh", input_shape=(2,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    history = model.fit(X, Y, batch_size=8, shuffle=False, epochs=2, validation_data=(X, Y), verbose=0)
    return model, history, model.predict(X, verbose=0)


def as_queue():
    items = queue.Queue()
    for _ in range(5):  # Two epochs of training, two of validation, one of prediction.
        for index in range(3):
            items.put(batch(index))
        items.put(None)
    return items


def dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y))


class Loader:
    """An iterable with a length, such as a data loader of another library."""

    def __len__(self):
        return 3

    def __iter__(self):
        return batches()


SOURCES = {
    "generator function": lambda: kg.DistributedFeeder(batches),
    "Sequence": lambda: kg.DistributedFeeder(Batches(), shuffle=False),
    "iterable": lambda: kg.DistributedFeeder(Loader()),
    "batched data set": lambda: kg.DistributedFeeder(dataset().batch(8)),
    "data set of samples": lambda: kg.DistributedFeeder(dataset(), batch_size=8, batched=False),
    "batches of another size": lambda: kg.DistributedFeeder(dataset().batch(5), batch_size=8),
    "map-style data set": lambda: kg.DistributedFeeder(Samples(), batch_size=8, shuffle=False),
    "Sequence in workers": lambda: kg.DistributedFeeder(Batches(), shuffle=False, workers=2),
    "samples in workers": lambda: kg.DistributedFeeder(Samples(), batch_size=8, shuffle=False, workers=2),
    "generator in workers": lambda: kg.DistributedFeeder(sharded_batches, workers=2),
    "generator in one worker": lambda: kg.DistributedFeeder(batches, workers=1),
}


@pytest.mark.parametrize("name", SOURCES)
def test_sources_train_and_predict_like_arrays(name, reference):
    expected, expected_history, expected_predictions = reference
    model = make_model(num_replicas=3)
    with SOURCES[name]() as feeder:
        history = model.fit(feeder, epochs=2, validation_data=feeder, verbose=0)
        predictions = model.predict(feeder, verbose=0)
    assert largest_difference(model, expected) <= 1e-5
    assert largest_log_difference(history, expected_history) <= 1e-5
    assert int(model.optimizer.iterations.numpy()) == 6
    np.testing.assert_allclose(predictions, expected_predictions, atol=1e-5)


def test_a_queue_is_read_up_to_each_none(reference):
    expected, expected_history, _ = reference
    model = make_model()
    items = as_queue()
    history = model.fit(kg.DistributedFeeder(items), epochs=2, verbose=0)
    assert history.history["loss"] == pytest.approx(expected_history.history["loss"])
    assert largest_difference(model, expected) <= 1e-5


def test_a_generator_function_is_called_for_each_epoch_with_its_number():
    epochs = []

    def make_batches(epoch):
        epochs.append(epoch)
        yield from batches()

    make_model().fit(kg.DistributedFeeder(make_batches), epochs=3, verbose=0)
    assert epochs == [0, 1, 2]


def test_a_generator_object_serves_one_epoch():
    model = make_model()
    history = model.fit(kg.DistributedFeeder(batches()), verbose=0)
    assert len(history.history["loss"]) == 1
    assert int(model.optimizer.iterations.numpy()) == 3


def test_a_second_epoch_of_a_generator_object_is_refused_before_the_first_step():
    pulled = []

    def generator():
        for index in range(3):
            pulled.append(index)
            yield batch(index)

    with pytest.raises(kg.SourceError, match=r"read once, but fit asks for 3 epochs.*steps_per_epoch="):
        make_model().fit(kg.DistributedFeeder(generator()), epochs=3, verbose=0)
    assert pulled == []


def test_an_iterator_is_read_on_and_its_end_ends_training_truthfully(caplog):
    model = make_model()
    with caplog.at_level(logging.WARNING, "keras_gpufeed"):
        history = model.fit(kg.DistributedFeeder(batches()), epochs=5, steps_per_epoch=2, verbose=0)
    assert history.epoch == [0, 1]  # Two steps, then the one that was left; no epoch without data.
    assert int(model.optimizer.iterations.numpy()) == 3
    assert "ended after 3 batches" in caplog.text
    assert "ended after 2 epoch(s)" in caplog.text


def test_steps_per_epoch_goes_on_through_an_endless_generator():
    pulled = []

    def endless():
        index = 0
        while True:
            pulled.append(index)
            yield batch(index % 3)
            index += 1

    history = make_model().fit(kg.DistributedFeeder(endless), epochs=3, steps_per_epoch=2, verbose=0)
    assert history.epoch == [0, 1, 2]
    assert pulled == [0, 1, 2, 3, 4, 5]  # Nothing is read that is not trained on.


def test_validation_sees_the_same_batches_each_time():
    def validation():
        for index in range(50):
            yield np.full((4, 2), index, "float32"), np.zeros(4, "float32")

    model = make_model()
    model.optimizer.learning_rate = 0.0
    history = model.fit(
        kg.DistributedFeeder(batches),
        epochs=3,
        validation_data=kg.DistributedFeeder(validation),
        validation_steps=2,
        verbose=0,
    )
    assert len(set(np.round(history.history["val_loss"], 6))) == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sequence_keeps_its_contract(num_workers):
    """Each item once an epoch, in another order each time; `on_epoch_end` between, in this process."""
    sequence = Batches()
    with kg.DistributedFeeder(sequence, seed=3, workers=num_workers) as feeder:
        make_model().fit(feeder, epochs=3, verbose=0)
    if num_workers:
        assert sequence.events == ["end", "end", "end"]
        return
    epochs = [sequence.events[start : start + 4] for start in (0, 4, 8)]
    assert [sorted(epoch[:3]) + epoch[3:] for epoch in epochs] == [[0, 1, 2, "end"]] * 3
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_a_sequence_that_has_one_batch_for_each_epoch_does_not_wait_for_the_next():
    sequence = Batches()
    make_model().fit(kg.DistributedFeeder(sequence, shuffle=False, steps_per_epoch=1), epochs=4, verbose=0)
    assert sequence.events == [0, "end", 1, "end", 2, "end", 0, "end"]


@pytest.mark.parametrize("change", [1, -1])
def test_a_sequence_may_change_its_length_between_epochs(change, caplog):
    class Changing(Batches):
        size = 3

        def __len__(self):
            return self.size

        def __getitem__(self, index):
            self.events.append(index)
            return batch(index % 3)

        def on_epoch_end(self):
            self.size += change

    sequence = Changing()
    with caplog.at_level(logging.WARNING, "keras_gpufeed"):
        make_model().fit(kg.DistributedFeeder(sequence, shuffle=False), epochs=2, verbose=0)
    assert sequence.events == [0, 1, 2, *range(3 + change)]
    assert caplog.text == ""


def test_the_hook_of_a_validation_sequence_is_called_too():
    sequence = Batches()
    make_model().fit(kg.DistributedFeeder(batches), epochs=2, validation_data=kg.DistributedFeeder(sequence), verbose=0)
    assert sequence.events == [0, 1, 2, "end", 0, 1, 2, "end"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_sequence_changes_between_epochs_reaches_the_next_epoch(num_workers):
    class Seen(tf.keras.Model):
        def train_step(self, data):
            x, _ = data
            return {"value": tf.reduce_mean(x)}

    model = Seen()
    model.compile()
    with kg.DistributedFeeder(ChangingBatches(), workers=num_workers) as feeder:
        seen = model.fit(feeder, epochs=3, verbose=0).history["value"]
    assert seen == [1.0, 2.0, 3.0]


def test_batches_come_in_order_from_workers_of_different_speed():
    with kg.DistributedFeeder(SlowSamples(), batch_size=4, workers=3) as feeder:
        np.testing.assert_array_equal(identity().predict(feeder, verbose=0), X)


def test_random_numbers_of_workers_depend_on_the_batch_alone():
    values = []
    for num_workers in (1, 3):
        with kg.DistributedFeeder(RandomSamples(), batch_size=4, seed=3, workers=num_workers) as feeder:
            values.append(identity().predict(feeder, verbose=0)[:, 0])
    np.testing.assert_array_equal(values[0], values[1])
    assert len(set(values[0])) == 21


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_arrives_as_raised_after_the_steps_before_it(num_workers):
    steps = []
    note = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, _: steps.append(step))
    feeder = kg.DistributedFeeder(FailingSamples(), batch_size=8, shuffle=False, workers=num_workers)
    with feeder, pytest.raises(KeyError, match=r"file_17\.npy") as caught:
        make_model().fit(feeder, verbose=0, callbacks=[note])
    assert steps == [0, 1]
    told = "".join(str(frame.path) for frame in caught.traceback) + repr(caught.value.__cause__)
    assert "sources_for_workers.py" in told
    history = make_model().fit(kg.DistributedFeeder(batches), verbose=0)  # The next fit works.
    assert np.isfinite(history.history["loss"]).all()


def test_a_killed_worker_is_replaced_and_the_order_stays(tmp_path, caplog):
    feeder = kg.DistributedFeeder(KilledOnce(tmp_path / "died"), batch_size=4, workers=2)
    with feeder, caplog.at_level(logging.WARNING, "keras_gpufeed"):
        np.testing.assert_array_equal(identity().predict(feeder, verbose=0), X)
    assert "SIGKILL" in caplog.text


def test_no_thread_outlives_the_call():
    before = threading.active_count()
    feeder = kg.DistributedFeeder(batches)
    model = make_model()
    model.fit(feeder, epochs=2, validation_data=feeder, verbose=0)
    stop = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_: setattr(model, "stop_training", True))
    model.fit(feeder, epochs=2, verbose=0, callbacks=[stop])
    assert threading.active_count() == before


def test_a_feeder_that_is_gone_frees_its_source():
    model = make_model()
    references = []
    for _ in range(3):
        sequence = Batches()
        references.append(weakref.ref(sequence))
        model.fit(kg.DistributedFeeder(sequence), verbose=0)
        del sequence
    gc.collect()
    assert [reference() is None for reference in references] == [True, True, True]


def test_axes_that_change_in_the_first_batches_may_change():
    def make_batches():
        for num_samples, length in ((8, 5), (4, 9), (6, 20), (3, 7)):
            yield np.ones((num_samples, length), "int32"), np.ones((num_samples, 1), "float32")

    model = tf.keras.Sequential(
        [tf.keras.layers.Embedding(3, 2), tf.keras.layers.GlobalAveragePooling1D(), tf.keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    kg.distribute(model, strategy_of(2))
    model.fit(kg.DistributedFeeder(make_batches), epochs=2, verbose=0)
    assert model.train_function.experimental_get_tracing_count() <= 2  # One of them makes the variables.


def test_an_axis_that_changes_later_is_refused_unless_it_was_announced():
    def make_batches():
        for length in (5, 5, 7):
            yield np.ones((4, length), "float32"), np.ones(4, "float32")

    class Mean(tf.keras.Model):
        def train_step(self, data):
            return {"mean": tf.reduce_mean(data[0])}

    model = Mean()
    model.compile()
    with pytest.raises(kg.SourceError, match=r"Batch 2 .*shape \(4, 7\).*expected shape \(None, 5\).*element_spec="):
        model.fit(kg.DistributedFeeder(make_batches), verbose=0)
    spec = (tf.TensorSpec((None, None), tf.float32), tf.TensorSpec((None,), tf.float32))
    history = model.fit(kg.DistributedFeeder(make_batches, element_spec=spec), verbose=0)
    assert history.history == {"mean": [1.0]}


def test_an_array_that_the_generator_fills_again_is_safe():
    def make_batches():
        same = np.empty((4, 1), "float32")
        for value in range(6):
            same[:] = value
            yield same

    predictions = identity().predict(kg.DistributedFeeder(make_batches), verbose=0)
    assert predictions[:, 0].tolist() == np.repeat(np.arange(6.0), 4).tolist()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kg.DistributedFeeder(batches, Y), "y and sample_weight were given beside a function"),
        (lambda: kg.DistributedFeeder(batches, workers=2), "does not take worker_id and num_workers"),
        (lambda: kg.DistributedFeeder(batches(), workers=1), "workers=1 needs a source that other processes can run"),
        (lambda: kg.DistributedFeeder(X, Y, workers=1), "workers=1 was given with arrays"),
        (lambda: kg.DistributedFeeder(X, Y, batched=False), "batched and element_spec are for sources of batches"),
        (lambda: kg.DistributedFeeder(Batches(), start_method="thread"), 'must be "spawn" or "fork"'),
        (lambda: kg.DistributedFeeder(lambda: batches(), workers=1), "cannot be pickled"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_at_once(make, message):
    with pytest.raises(kg.SourceError, match=message):
        make()


@pytest.mark.parametrize(
    ("make_batches", "message"),
    [
        (lambda: iter(()), "gave no batch"),
        (lambda: 7, "returned a int, not an iterator"),
        (lambda: iter([(X, Y, Y, Y)]), "tuple of 4 parts"),
        (lambda: iter([(X, Y[:3])]), "same number of samples"),
        (lambda: iter([(1.0, 2.0)]), r"single value \(float64\).*batched=False"),
        (lambda: iter([None]), "None.*`return`, not with `yield None`"),
        (lambda: iter([batch(0), batch(1), batch(2), None]), "None.*`return`, not with `yield None`"),
        (lambda: iter([({"a": X, "b": None}, Y)]), "holds None where an array"),
        (lambda: iter([batch(0), (X[:0], Y[:0])]), r"Batch 1 of epoch 0 \(both counted from 0\) holds no sample"),
        (lambda: iter([batch(0), X]), "does not have the structure of the first one"),
    ],
)
def test_batches_that_do_not_fit_are_refused(make_batches, message):
    with pytest.raises(kg.SourceError, match=message):
        make_model().fit(kg.DistributedFeeder(make_batches), verbose=0)


def test_a_length_that_is_not_kept_is_told(caplog):
    class TooLong(Loader):
        def __len__(self):
            return 5

    class TooShort(Loader):
        def __len__(self):
            return 2

    with caplog.at_level(logging.WARNING, "keras_gpufeed"):
        model = make_model()
        model.fit(kg.DistributedFeeder(TooLong()), verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 3
    assert "ended after 3 batches in all, in an epoch of 5 steps" in caplog.text
    with pytest.raises(kg.SourceError, match="has a length of 2, but gives more"):
        make_model().fit(kg.DistributedFeeder(TooShort()), verbose=0)


def test_steps_are_known_where_the_source_knows_them():
    assert len(kg.DistributedFeeder(Batches())) == 3
    assert len(kg.DistributedFeeder(Samples(), batch_size=8)) == 3
    assert len(kg.DistributedFeeder(batches, steps_per_epoch=7)) == 7
    with pytest.raises(TypeError, match="does not say how many batches"):
        len(kg.DistributedFeeder(batches))


def test_several_steps_per_execution_stop_at_the_end_of_the_source():
    model = make_model()
    model.compile("sgd", "mse", steps_per_execution=2)
    history = model.fit(kg.DistributedFeeder(Batches()), epochs=2, verbose=0)
    assert history.epoch == [0, 1]
    assert int(model.optimizer.iterations.numpy()) == 6


def test_a_model_of_ours_takes_sources_as_they_are(reference):
    expected, expected_history, _ = reference
    tf.keras.utils.set_random_seed(1)
    inputs = tf.keras.Input((2,))
    model = kg.Model(inputs, tf.keras.layers.Dense(1)(tf.keras.layers.Dense(4, "tanh")(inputs)))
    model.compile("sgd", "mse")
    kg.distribute(model, strategy_of(3))
    history = model.fit(Batches(), shuffle=False, epochs=2, validation_data=Batches(), verbose=0)
    assert largest_difference(model, expected) <= 1e-5
    assert largest_log_difference(history, expected_history) <= 1e-5


# --- Seeds of samples ----------------------------------------------------------------------------------------


def with_noise(x, y, seed):
    return x + tf.map_fn(lambda one: tf.random.stateless_uniform((), one), seed, tf.float32)[:, None], y


class NumberedSamples:
    """Single samples by number."""

    def __len__(self):
        return 22

    def __getitem__(self, number):
        return np.float32([number]), np.float32(0)


SEEDED = {
    "arrays": lambda **arguments: kg.DistributedFeeder(
        np.arange(22, dtype="float32")[:, None], np.zeros(22), batch_size=6, **arguments
    ),
    "generator": lambda **arguments: kg.DistributedFeeder(
        lambda: ((np.arange(start, start + 6, dtype="float32")[:, None], np.zeros(6)) for start in range(0, 22, 6)),
        **arguments,
    ),
    "by sample": lambda **arguments: kg.DistributedFeeder(NumberedSamples(), batch_size=6, **arguments),
    "by sample, in workers": lambda **arguments: kg.DistributedFeeder(
        NumberedSamples(), batch_size=6, workers=1, **arguments
    ),
}


@pytest.mark.parametrize("kind", SEEDED)
def test_a_transform_may_draw_the_same_for_a_sample_on_any_number_of_replicas(kind):
    drawn = []
    for num_replicas, seed in ((1, 5), (3, 5), (3, 6)):
        seen = []
        model = kg.distribute(Noting(seen), strategy_of(num_replicas))
        with SEEDED[kind](seed=seed, transform=with_noise) as feeder:
            model.fit(feeder, epochs=2, verbose=0)
        drawn.append(np.sort(np.unique(np.concatenate(seen)[:, 0])).reshape(-1, 2))  # Both draws of each sample.
    assert drawn[0].shape == ((24, 2) if kind == "generator" else (22, 2))
    np.testing.assert_array_equal(np.floor(drawn[0][:, 0]), np.arange(len(drawn[0])))
    assert (drawn[0][:, 0] < drawn[0][:, 1]).all()  # Another draw in another epoch.
    np.testing.assert_array_equal(drawn[1], drawn[0])
    assert (drawn[2] != drawn[0]).all()


class Noting(tf.keras.Model):
    """Keeps the inputs that it is given, replica after replica."""

    def __init__(self, seen):
        super().__init__()
        self.note = seen.append
        self.compile(run_eagerly=True)

    def train_step(self, data):
        self.note(data[0].numpy())
        return {}
