"""Everything that `fit`, `evaluate` and `predict` promise, with a feeder in the place of arrays."""

import gc
import itertools
import logging
import threading
import traceback
import weakref

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from comparison import largest_difference, largest_log_difference, strategy_of

import keras_gpufeed as kg

layers, callbacks = tf.keras.layers, tf.keras.callbacks

X = np.random.default_rng(0).normal(size=(21, 3)).astype("float32")
Y = (X.sum(1, keepdims=True) > 0).astype("float32")
SAMPLE_WEIGHT = np.linspace(0, 2, 21, dtype="float32")
BATCH_SIZE = 8  # Three steps: 8, 8 and 5 samples.


def make_model(optimizer=None, num_replicas=None, **arguments):
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([layers.Dense(4, "tanh", input_shape=(3,)), layers.Dense(1, "sigmoid")])
    model.compile(optimizer or tf.keras.optimizers.SGD(0.1), "mse", **{"metrics": ["mae"], **arguments})
    return model if num_replicas is None else kg.distribute(model, strategy_of(num_replicas))


def feeder_of(*data, **arguments):
    return kg.DistributedFeeder(*data, **{"batch_size": BATCH_SIZE, "shuffle": False, **arguments})


def both(fit, make=make_model):
    """Calls `fit` with a model and what makes its data: plain Keras on one device, then a feeder on two."""

    def plain(x, y=None, sample_weight=None):
        data = {"x": x, "y": y, "batch_size": BATCH_SIZE, "shuffle": False, "sample_weight": sample_weight}
        return {key: value for key, value in data.items() if value is not None}

    reference, model = make(), make(num_replicas=2)
    expected = fit(reference, plain)
    found = fit(model, lambda *data: {"x": feeder_of(*data)})
    return (model, found), (reference, expected)


def assert_equal(result):
    (model, found), (reference, expected) = result
    assert largest_difference(model, reference) <= 1e-5
    assert largest_log_difference(found, expected) <= 1e-5


class Noting(tf.keras.Sequential):
    """Trains eagerly and notes the samples of each part."""

    def __init__(self, parts):
        super().__init__([layers.Dense(1, input_shape=(1,))])
        self.note = parts.append
        self.compile(tf.keras.optimizers.SGD(0.0), "mse", run_eagerly=True)

    def train_step(self, data):
        self.note(data[0].numpy().ravel().astype(int).tolist())
        return super().train_step(data)


def noting(num_replicas=2):
    parts = []
    return kg.distribute(Noting(parts), strategy_of(num_replicas)), parts


def numbers(num_samples):
    return np.arange(num_samples)[:, None], np.zeros((num_samples, 1))


def flat(parts):
    return list(itertools.chain.from_iterable(parts))


def steps_of(parts):
    """The samples of each step on two replicas."""
    return [first + second for first, second in zip(parts[::2], parts[1::2])]


# --- Validation --------------------------------------------------------------------------------------------


def test_validation_data_of_every_form():
    model = make_model(tf.keras.optimizers.SGD(0.0), num_replicas=2)
    plain = make_model(tf.keras.optimizers.SGD(0.0))
    expected = plain.evaluate(X[:13], Y[:13], verbose=0, return_dict=True)
    weighted = plain.evaluate(X[:13], Y[:13], sample_weight=SAMPLE_WEIGHT[:13], verbose=0, return_dict=True)
    assert expected["loss"] != weighted["loss"]
    for validation, logs in [
        (feeder_of(X[:13], Y[:13]), expected),
        (feeder_of(X[:13], Y[:13], SAMPLE_WEIGHT[:13]), weighted),
        ((X[:13], Y[:13]), expected),
        ([X[:13], Y[:13]], expected),
        ((X[:13], Y[:13], SAMPLE_WEIGHT[:13]), weighted),
        ((pd.DataFrame(X[:13]), pd.Series(Y[:13, 0])), expected),
        (tf.data.Dataset.from_tensor_slices((X[:13], Y[:13])).batch(4), expected),
    ]:
        history = model.fit(feeder_of(X, Y), validation_data=validation, epochs=2, verbose=0).history
        for name, value in logs.items():
            assert history[f"val_{name}"] == pytest.approx([value, value], rel=1e-5)
    assert model.fit(feeder_of(X, Y), verbose=0).history.keys() == {"loss", "mae"}  # None is left over.


def test_the_same_feeder_for_training_and_validation():
    assert_equal(
        both(
            lambda model, data: model.fit(
                **data(X, Y),
                validation_data=(X, Y) if "y" in data(X, Y) else data(X, Y)["x"],
                epochs=2,
                verbose=0,
            )
        )
    )


def test_validation_split_holds_out_the_last_samples():
    assert_equal(both(lambda model, data: model.fit(**data(X, Y), validation_split=0.3, epochs=2, verbose=0)))
    model, parts = noting()
    history = model.fit(feeder_of(*numbers(50), shuffle=True), validation_split=0.2, epochs=3, verbose=0)
    assert len(history.history["val_loss"]) == 3
    for epoch in range(3):
        assert sorted(flat(parts[10 * epoch : 10 * epoch + 10])) == list(range(40))


def test_validation_data_comes_before_a_split():
    model = make_model(num_replicas=2)
    history = model.fit(
        feeder_of(X, Y), validation_data=(X, Y), validation_split=0.5, validation_batch_size=3, verbose=0
    )
    assert len(history.history["val_loss"]) == 1
    assert model.optimizer.iterations.numpy() == 3


def test_validation_steps_are_the_first_ones_each_time():
    model = make_model(tf.keras.optimizers.SGD(0.0), num_replicas=2)
    expected = make_model().evaluate(X[:16], Y[:16], verbose=0)[0]
    history = model.fit(
        feeder_of(X, Y), validation_data=feeder_of(X, Y, shuffle=True), validation_steps=2, epochs=3, verbose=0
    ).history
    assert history["val_loss"] == pytest.approx([expected] * 3, rel=1e-5)
    assert model.evaluate(feeder_of(X, Y), steps=2, verbose=0)[0] == pytest.approx(expected, rel=1e-5)
    assert model.predict(feeder_of(X), steps=2, verbose=0).shape == (16, 1)


def test_validation_freq():
    def fit(model, data):
        return model.fit(**data(X, Y), validation_data=(X, Y), epochs=4, validation_freq=2, verbose=0)

    result = both(fit)
    assert_equal(result)
    assert len(result[0][1].history["val_loss"]) == 2


# --- Weights -----------------------------------------------------------------------------------------------


def test_class_weights():
    assert_equal(both(lambda model, data: model.fit(**data(X, Y), class_weight={0: 1.0, 1: 5.0}, epochs=2, verbose=0)))


def test_class_weights_multiply_with_sample_weights():
    """Stock Keras 2.15 fails here: it reshapes weights to a shape that it does not know."""
    reference, model = make_model(), make_model(num_replicas=2)
    product = SAMPLE_WEIGHT * np.where(Y[:, 0] == 1, 5, 1)
    expected = reference.fit(X, Y, BATCH_SIZE, sample_weight=product, shuffle=False, epochs=2, verbose=0)
    feeder = feeder_of(X, Y, SAMPLE_WEIGHT)
    history = model.fit(feeder, class_weight={0: 1.0, 1: 5.0}, epochs=2, verbose=0)
    assert_equal(((model, history), (reference, expected)))


def test_weights_of_time_steps_and_of_several_outputs():
    def make(num_replicas=None):
        tf.keras.utils.set_random_seed(1)
        inputs = tf.keras.Input((3, 2))
        sequence = layers.LSTM(2, return_sequences=True, name="sequence")(inputs)
        last = layers.Dense(1, name="last")(layers.Flatten()(sequence))
        model = tf.keras.Model(inputs, {"sequence": sequence, "last": last})
        model.compile(tf.keras.optimizers.SGD(0.1), "mse", weighted_metrics=["mae"])
        return model if num_replicas is None else kg.distribute(model, strategy_of(num_replicas))

    random = np.random.default_rng(0)
    x = random.normal(size=(21, 3, 2)).astype("float32")
    y = {"sequence": x[:, ::-1], "last": x[:, 0, :1]}
    weights = {"sequence": random.random((21, 3)).astype("float32"), "last": SAMPLE_WEIGHT}
    assert_equal(both(lambda model, data: model.fit(**data(x, y, weights), epochs=2, verbose=0), make))


# --- Epochs and steps --------------------------------------------------------------------------------------


class Batches(callbacks.Callback):
    """Notes the number of each step, and how many Keras announced."""

    def __init__(self):
        super().__init__()
        self.seen, self.steps = [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.steps.append(self.params["steps"])

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(batch)


def test_steps_are_known_and_the_history_is_honest(capsys):
    batches = Batches()
    model = make_model(num_replicas=2)
    feeder = feeder_of(X, Y)
    history = model.fit(feeder, epochs=5, verbose=1, callbacks=[batches], validation_data=feeder_of(X[:11], Y[:11]))
    assert len(feeder) == 3
    assert batches.steps == [3] * 5
    assert batches.seen == [0, 1, 2] * 5
    assert history.epoch == [0, 1, 2, 3, 4]
    assert all(len(values) == 5 for values in history.history.values())
    assert min(history.history["loss"]) > 0
    assert model.optimizer.iterations.numpy() == 15
    printed = capsys.readouterr().out
    assert "1/3 [" in printed  # In the first epoch already.
    assert "Unknown" not in printed


def test_evaluate_and_predict_know_their_steps():
    found = []

    class Note(callbacks.Callback):
        def on_test_begin(self, logs=None):
            found.append(self.params["steps"])

        on_predict_begin = on_test_begin

    model = make_model(num_replicas=2)
    model.evaluate(feeder_of(X, Y), verbose=0, callbacks=[Note()])
    model.predict(feeder_of(X), verbose=0, callbacks=[Note()])
    assert found == [3, 3]


def test_initial_epoch_takes_the_orders_of_its_epochs():
    model, parts = noting()
    model.fit(feeder_of(*numbers(12), shuffle=True, seed=3), epochs=4, verbose=0)
    whole = parts.copy()
    parts.clear()
    history = model.fit(feeder_of(*numbers(12), shuffle=True, seed=3), initial_epoch=2, epochs=4, verbose=0)
    assert history.epoch == [2, 3]
    assert parts == whole[8:]


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_samples_go_on_where_the_last_epoch_stopped(steps):
    """Ten samples are three steps. After a whole number of passes each came equally often."""
    model, parts = noting()
    feeder = feeder_of(*numbers(10), batch_size=4, shuffle=True, steps_per_epoch=steps)
    assert len(feeder) == steps
    history = model.fit(feeder, epochs=6, verbose=0)
    assert history.epoch == [0, 1, 2, 3, 4, 5]
    fed = flat(parts)
    passes = [fed[start : start + 10] for start in range(0, len(fed), 10)]
    assert len(passes) == 2 * steps
    assert all(sorted(one) == list(range(10)) for one in passes)
    assert passes[0] != passes[1]
    assert model.optimizer.iterations.numpy() == 6 * steps


def test_steps_per_epoch_of_fit_equals_that_of_the_feeder():
    orders = []
    for of_feeder, of_fit in [({"steps_per_epoch": 2}, {}), ({}, {"steps_per_epoch": 2})]:
        model, parts = noting()
        feeder = feeder_of(*numbers(10), batch_size=4, shuffle=True, seed=1, **of_feeder)
        model.fit(feeder, epochs=3, verbose=0, **of_fit)
        orders.append(parts)
    assert orders[0] == orders[1]
    assert len(orders[0]) == 3 * 2 * 2


def test_a_second_fit_goes_on_with_new_orders_and_traces_nothing():
    model, parts = noting()
    feeder = feeder_of(*numbers(12), shuffle=True, seed=3)
    model.fit(feeder, epochs=2, verbose=0)
    model.fit(feeder, epochs=2, verbose=0)
    whole = noting()
    whole[0].fit(feeder_of(*numbers(12), shuffle=True, seed=3), epochs=4, verbose=0)
    assert parts == whole[1]
    model = make_model(num_replicas=2)
    model.fit(feeder_of(X, Y), validation_data=feeder_of(X, Y), verbose=0)
    functions = model.train_function, model.test_function
    traced = [function.experimental_get_tracing_count() for function in functions]
    feeder = feeder_of(X[:13], Y[:13])
    for _ in range(2):
        model.fit(feeder, validation_data=feeder, verbose=0)
    assert (model.train_function, model.test_function) == functions
    assert [function.experimental_get_tracing_count() for function in functions] == traced


def test_drop_remainder_counts_in_training_only():
    model, parts = noting()
    feeder = feeder_of(*numbers(21), drop_remainder=True, shuffle=True)
    model.fit(feeder, epochs=2, verbose=0)
    assert len(feeder) == 2
    assert [len(part) for part in parts] == [4] * 8
    assert len(set(flat(parts[:4]))) == 16
    assert len(model.predict(feeder_of(numbers(21)[0], drop_remainder=True), verbose=0)) == 21


# --- Callbacks ---------------------------------------------------------------------------------------------


def test_callbacks_find_what_they_find_with_arrays(tmp_path):
    def fit(model, data):
        path = tmp_path / str(model.distribute_strategy.num_replicas_in_sync)
        return model.fit(
            **data(X, Y),
            validation_data=(X[:11], Y[:11]),
            epochs=6,
            verbose=0,
            callbacks=[
                callbacks.ModelCheckpoint(f"{path}/best.keras", monitor="val_loss", save_best_only=True),
                callbacks.ModelCheckpoint(f"{path}/{{epoch}}.weights.h5", save_weights_only=True, save_freq=2),
                callbacks.EarlyStopping("val_mae", patience=1, min_delta=10, restore_best_weights=True),
                callbacks.LearningRateScheduler(lambda epoch, rate: rate / (1 + epoch)),
                callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10, factor=0.5),
                callbacks.TensorBoard(f"{path}/board", histogram_freq=1, update_freq=1),
                callbacks.CSVLogger(f"{path}/log.csv"),
                callbacks.TerminateOnNaN(),
            ],
        )

    (model, history), (reference, expected) = both(fit)
    assert history.epoch == expected.epoch == [0, 1]  # Stopped early, ...
    assert_equal(((model, history), (reference, expected)))  # ... with the weights after the first epoch.
    files = [sorted(path.name for path in (tmp_path / number).iterdir()) for number in "12"]
    assert files[0] == files[1] == ["1.weights.h5", "2.weights.h5", "best.keras", "board", "log.csv"]
    logs = [pd.read_csv(tmp_path / number / "log.csv") for number in "12"]
    assert logs[1]["epoch"].tolist() == [0, 1]
    assert np.allclose(logs[1], logs[0], atol=1e-5)
    best = [tf.keras.models.load_model(tmp_path / number / "best.keras") for number in "12"]
    assert largest_difference(*best) <= 1e-5


def test_a_callback_may_evaluate_and_predict_inside_an_epoch():
    found = []

    class Look(callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            loss = self.model.evaluate(feeder_of(X[:7], Y[:7]), verbose=0)[0]
            predictions = self.model.predict(feeder_of(X[:7]), verbose=0)
            found.append((loss, np.mean(np.square(predictions - Y[:7]))))

    model, reference = make_model(num_replicas=2), make_model()
    model.fit(feeder_of(X, Y), epochs=2, verbose=0, callbacks=[Look()])
    reference.fit(X, Y, BATCH_SIZE, epochs=2, shuffle=False, verbose=0)
    assert largest_difference(model, reference) <= 1e-5
    assert len(found) == 6
    assert all(loss == pytest.approx(error, rel=1e-5) for loss, error in found)


class Stop(Exception):
    """Ends a run in the middle."""


def stop_at(step, error=Stop):
    class StopAt(callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1
            if self.steps == step:
                raise error("stopped")

    return StopAt()


@pytest.mark.parametrize("stopped_at", [13, 20])
def test_an_interrupted_run_is_resumed_in_the_middle_of_an_epoch(tmp_path, stopped_at):
    """Ten steps an epoch. A new model and a new feeder go on with the samples that were left, in their order."""

    def run(model, *more):
        backup = callbacks.BackupAndRestore(tmp_path, save_freq=1, delete_checkpoint=False)
        feeder = feeder_of(*numbers(40), batch_size=4, shuffle=True, seed=7)
        return model.fit(feeder, epochs=3, verbose=0, callbacks=[*([backup] if more else []), *more])

    whole, expected = noting()
    run(whole)
    model, parts = noting()
    with pytest.raises(Stop):
        run(model, stop_at(stopped_at))
    resumed, rest = noting()
    history = run(resumed, callbacks.Callback())
    assert steps_of(parts) == steps_of(expected)[:stopped_at]
    assert steps_of(rest) == steps_of(expected)[stopped_at:]
    assert resumed.optimizer.iterations.numpy() == 30
    assert history.epoch[-1] == 2


def test_resuming_without_a_seed_warns(tmp_path, caplog):
    for callback in (stop_at(5), callbacks.Callback()):
        model, _ = noting()
        feeder = feeder_of(*numbers(40), batch_size=4, shuffle=True)
        saved = [callbacks.BackupAndRestore(tmp_path, save_freq=1), callback]
        caplog.clear()
        try:
            model.fit(feeder, verbose=0, callbacks=saved)
        except Stop:
            assert not caplog.records
    assert "seed" in caplog.text
    assert "step 5" in caplog.text


# --- Evaluate and predict ----------------------------------------------------------------------------------


def test_predictions_of_every_shape_come_in_order():
    inputs = tf.keras.Input((2,))
    outputs = {
        "same": layers.Lambda(lambda x: x)(inputs),
        "flat": layers.Lambda(lambda x: x[:, 0])(inputs),
        "deep": [layers.Reshape((2, 1))(inputs), layers.RepeatVector(3)(inputs)],
    }
    model = kg.distribute(tf.keras.Model(inputs, outputs), strategy_of(3))
    for num_samples in (1, 2, 3, 8, 13, 29):
        x = np.arange(2 * num_samples, dtype="float32").reshape(num_samples, 2)
        found = model.predict(feeder_of(x, shuffle=True), verbose=0)
        assert (found["same"] == x).all()
        assert (found["flat"] == x[:, 0]).all()
        assert (found["deep"][0] == x[:, :, None]).all()
        assert (found["deep"][1] == np.repeat(x[:, None], 3, axis=1)).all()


def test_predictions_whose_shape_follows_the_data():
    """Ragged, sparse and integer outputs, and strings."""

    class Odd(tf.keras.Model):
        def call(self, x):
            return {
                "ragged": tf.RaggedTensor.from_tensor(x, lengths=tf.cast(x[:, 0], tf.int64) % 3),
                "integers": tf.cast(x[:, 0], tf.int32),
                "text": tf.strings.as_string(tf.cast(x, tf.int32)),
            }

    model = kg.distribute(Odd(), strategy_of(2))
    x = np.arange(22, dtype="float32").reshape(11, 2)
    found = model.predict(feeder_of(x, batch_size=5), verbose=0)
    assert found["ragged"].to_list() == [row[: int(row[0]) % 3].tolist() for row in x]
    assert found["integers"].tolist() == list(range(0, 22, 2))
    assert found["text"].astype(str).tolist() == [[str(int(value)) for value in row] for row in x]


def test_evaluate_with_targets_weights_and_a_dictionary_of_results():
    model, plain = make_model(num_replicas=3, weighted_metrics=["mse"]), make_model(weighted_metrics=["mse"])
    for num_samples in (1, 3, 7, 21):
        data = X[:num_samples], Y[:num_samples]
        weights = SAMPLE_WEIGHT[:num_samples] + 1
        found = model.evaluate(feeder_of(*data, weights), verbose=0, return_dict=True)
        expected = plain.evaluate(*data, sample_weight=weights, verbose=0, return_dict=True)
        assert found == pytest.approx(expected, rel=1e-5)


def test_predict_ignores_targets():
    model = make_model(num_replicas=2)
    assert (model.predict(feeder_of(X, Y, SAMPLE_WEIGHT), verbose=0) == model.predict(feeder_of(X), verbose=0)).all()


def test_single_batches_after_a_move():
    model, plain = make_model(num_replicas=2), make_model()
    model.fit(feeder_of(X, Y), verbose=0)
    plain.fit(X, Y, BATCH_SIZE, shuffle=False, verbose=0)
    assert model.train_on_batch(X[:8], Y[:8]) == pytest.approx(plain.train_on_batch(X[:8], Y[:8]), rel=1e-5)
    assert model.test_on_batch(X[:8], Y[:8]) == pytest.approx(plain.test_on_batch(X[:8], Y[:8]), rel=1e-5)
    assert np.allclose(model.predict_on_batch(X[:8]), plain.predict_on_batch(X[:8]), atol=1e-6)
    assert np.allclose(model(X), plain(X), atol=1e-6)
    assert largest_difference(model, plain) <= 1e-5


def test_arrays_without_a_feeder_still_go_into_a_moved_model():
    model, plain = make_model(num_replicas=2), make_model()
    for one in (model, plain):
        one.fit(X[:16], Y[:16], BATCH_SIZE, shuffle=False, epochs=2, verbose=0)
    assert largest_difference(model, plain) <= 1e-5
    loss, expected = (one.evaluate(X[:16], Y[:16], verbose=0) for one in (model, plain))
    assert loss == pytest.approx(expected, rel=1e-5)
    assert np.allclose(model.predict(X, verbose=0), plain.predict(X, verbose=0), atol=1e-6)


def test_a_transform_runs_on_global_batches():
    images = np.arange(21 * 3, dtype="uint8").reshape(21, 3)
    sizes = []

    def transform(x, y):
        tf.numpy_function(lambda x: sizes.append(len(x)), [x], [])
        return tf.cast(x, "float32") / 255, 1 - y

    model, plain = make_model(num_replicas=2), make_model()
    history = model.fit(feeder_of(images, 1 - Y, transform=transform), verbose=0, class_weight={0: 1.0, 1: 2.0})
    expected = plain.fit(
        images.astype("float32") / 255, Y, BATCH_SIZE, shuffle=False, verbose=0, class_weight={0: 1.0, 1: 2.0}
    )
    assert_equal(((model, history), (plain, expected)))
    assert sorted(sizes) == [5, 8, 8]  # Two at once, whose turns chance decides.


# --- Failures ----------------------------------------------------------------------------------------------


class BrokenFile(KeyError):
    """An exception of the user's own, with more than a text."""

    def __init__(self, name, code):
        super().__init__(name)
        self.code = code


class Breaking:
    """An array-like that cannot be read at one sample."""

    shape, dtype = (21, 3), np.dtype("float32")

    def __init__(self, sample=17):
        self.sample = sample

    def __len__(self):
        return 21

    def __getitem__(self, samples):
        if self.sample in np.arange(21)[samples]:
            self.open_file("file_17.npy")
        return X[samples]

    def open_file(self, name):
        raise BrokenFile(name, code=5)


@pytest.mark.parametrize("shuffle", [False, True])
def test_exceptions_of_a_source_arrive_as_they_were_raised(shuffle):
    model = make_model(num_replicas=2)
    breaking = Breaking()
    feeder = feeder_of(breaking, Y, shuffle=shuffle)
    calls = [
        lambda: model.fit(feeder, epochs=2, verbose=0),
        lambda: model.fit(feeder_of(X, Y), validation_data=feeder, verbose=0),
        lambda: model.evaluate(feeder, verbose=0),
        lambda: model.predict(feeder_of(breaking), verbose=0),
    ]
    threads = threading.active_count()
    for call in calls:
        with pytest.raises(BrokenFile) as caught:
            call()
        assert caught.value.args == ("file_17.npy",)
        assert caught.value.code == 5
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert frames[-2:] == ["__getitem__", "open_file"]
        assert "test_exceptions_of_a_source_arrive_as_they_were_raised" in frames
    breaking.sample = None
    history = model.fit(feeder, validation_data=feeder, epochs=2, verbose=0)
    assert len(history.history["val_loss"]) == 2
    assert model.predict(feeder_of(breaking), verbose=0).shape == (21, 1)
    assert threading.active_count() <= threads + 2


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_an_interrupt_in_the_source_ends_the_run(num_replicas):
    class Interrupting(Breaking):
        def open_file(self, name):
            raise KeyboardInterrupt

    model = make_model(num_replicas=num_replicas)
    with pytest.raises(KeyboardInterrupt):
        model.fit(feeder_of(Interrupting(), Y), verbose=0)
    model.fit(feeder_of(X, Y), verbose=0)


@pytest.mark.parametrize("error", [KeyboardInterrupt, Stop])
def test_a_callback_may_end_a_run_at_any_step(error):
    model, parts = noting()
    feeder = feeder_of(*numbers(40), batch_size=4, shuffle=True)
    with pytest.raises(error):
        model.fit(feeder, epochs=3, verbose=0, callbacks=[stop_at(13, error)], validation_data=feeder)
    assert len(parts) == 26
    parts.clear()
    history = model.fit(feeder, epochs=2, verbose=0, validation_data=feeder)
    assert history.epoch == [0, 1]
    assert len(history.history["val_loss"]) == 2
    assert sorted(flat(parts[:20])) == sorted(flat(parts[20:])) == list(range(40))


def test_an_error_inside_a_step_does_not_spoil_the_next_run():
    model = tf.keras.Sequential([layers.Embedding(5, 2, input_length=1), layers.Flatten(), layers.Dense(1)])
    model.compile("sgd", "mse")
    kg.distribute(model, strategy_of(2))
    x, y = np.zeros((12, 1), "int32"), np.zeros((12, 1))
    x[7] = 99  # Beyond the embedding.
    with pytest.raises(tf.errors.InvalidArgumentError, match="99"):
        model.fit(feeder_of(x, y), verbose=0)
    x[7] = 1
    assert len(model.fit(feeder_of(x, y), epochs=2, verbose=0).history["loss"]) == 2
    other = make_model(num_replicas=3)
    other.fit(feeder_of(X, Y), verbose=0)


def test_an_error_of_the_users_own_step_arrives():
    class Failing(tf.keras.Sequential):
        def train_step(self, data):
            raise NotImplementedError("not written yet")

    model = Failing([layers.Dense(1, input_shape=(3,))])
    model.compile("sgd", "mse")
    kg.distribute(model, strategy_of(2))
    with pytest.raises(NotImplementedError, match="not written yet"):
        model.fit(feeder_of(X, Y), verbose=0)
    model.predict(feeder_of(X), verbose=0)


# --- What is left behind -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_feeder_outlives_it(fails):
    model = make_model(num_replicas=2)
    threads, alive = [], []
    for _ in range(4):
        x = Breaking(sample=17 if fails else None)
        alive.append(weakref.ref(x))
        feeder = feeder_of(x, Y)
        for call in (model.fit, model.evaluate, model.predict):
            try:
                call(feeder, verbose=0)
            except BrokenFile:
                assert fails
        del x, feeder
        gc.collect()
        threads.append(threading.active_count())
    assert [reference() for reference in alive[:-1]] == [None] * 3
    assert threads[-1] == threads[1]


def test_one_feeder_for_several_models_and_strategies():
    feeder = feeder_of(X, Y)
    expected = make_model()
    expected.fit(X, Y, BATCH_SIZE, shuffle=False, epochs=2, verbose=0)
    for num_replicas in (2, 3, 1, 2):
        model = make_model(num_replicas=num_replicas)
        model.fit(feeder, epochs=2, verbose=0)
        assert largest_difference(model, expected) <= 1e-5


# --- What it says ------------------------------------------------------------------------------------------


def test_the_first_fit_says_what_it_did(caplog):
    """Once: a silent run on one of four devices would be a fault, a line for each epoch a nuisance."""
    model = make_model()
    with caplog.at_level(logging.INFO, "keras_gpufeed"):
        model.fit(feeder_of(X, Y), epochs=2, verbose=0)
        model.fit(feeder_of(X, Y), verbose=0)
        model.predict(feeder_of(X), verbose=0)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "8 replicas: CPU:0-7, 1 sample each of a global batch of 8"
    assert model.distribute_strategy.num_replicas_in_sync == 8


def test_all_replicas_train_validate_and_predict():
    seen = {"train": set(), "test": set(), "predict": set()}

    def see(what):
        replica_id = tf.distribute.get_replica_context().replica_id_in_sync_group
        seen[what].add(int(tf.get_static_value(replica_id)))

    class Seeing(tf.keras.Sequential):
        def train_step(self, data):
            see("train")
            return super().train_step(data)

        def test_step(self, data):
            see("test")
            return super().test_step(data)

        def predict_step(self, data):
            see("predict")
            return super().predict_step(data)

    model = Seeing([layers.Dense(1, input_shape=(3,))])
    model.compile("sgd", "mse")
    kg.distribute(model, strategy_of(4))
    model.fit(feeder_of(X, Y), validation_data=(X, Y), verbose=0)
    model.predict(feeder_of(X), verbose=0)
    assert seen == {"train": {0, 1, 2, 3}, "test": {0, 1, 2, 3}, "predict": {0, 1, 2, 3}}


def test_a_feeder_describes_itself():
    feeder = kg.DistributedFeeder(np.zeros((64, 1)), batch_size=32, seed=7)
    assert repr(feeder) == (
        "DistributedFeeder(64 samples, global batch 32, 8 x 4 samples per replica, 2 steps per epoch, seed=7)"
    )
    assert "8 x 1 to 2 samples" in repr(kg.DistributedFeeder(np.zeros(64), batch_size=10))
    assert "seed=None" in repr(kg.DistributedFeeder(np.zeros(64), shuffle=False))


def test_gradients_travel_without_nccl(monkeypatch):
    monkeypatch.setenv("KERAS_GPUFEED_NO_NCCL", "1")
    strategy = kg.get_strategy(["CPU:6", "CPU:7"])
    assert type(strategy.extended._cross_device_ops).__name__ == "HierarchicalCopyAllReduce"
    model = kg.distribute(make_model(), strategy)
    expected = make_model()
    model.fit(feeder_of(X, Y), verbose=0)
    expected.fit(X, Y, BATCH_SIZE, shuffle=False, verbose=0)
    assert largest_difference(model, expected) <= 1e-5
