"""What is refused before the first step: each message says what was received, what was expected, how to repair it."""

import logging

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from comparison import strategy_of

import keras_gpufeed as kg
from keras_gpufeed.strategy import use_virtual_devices_of_environment

X, Y = np.full((6, 3), 12345.0, "float32"), np.full((6, 1), 12345.0, "float32")


def make_model(loss="mse", **arguments):
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,))])
    model.compile("sgd", loss, **arguments)
    return model


class NoStep(tf.keras.callbacks.Callback):
    """Fails if a step begins."""

    def on_train_batch_begin(self, *_):
        raise AssertionError("a step began")

    on_test_batch_begin = on_predict_batch_begin = on_train_batch_begin


def check(caught, words):
    message = str(caught.value)
    assert not [word for word in words if word not in message], message
    assert "12345" not in message, "an array was printed"
    assert len(message) < 500


# --- The arrays --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "words"),
    [
        # Unequal lengths.
        ((X, Y[:5]), ["same number of samples", "x: 6", "y: 5", "filtered"]),
        ((X, Y, np.ones(7)), ["same number of samples", "x: 6", "y: 6", "sample_weight: 7"]),
        (([X, X[:4]], Y), ["x[0]: 6", "x[1]: 4", "y: 6"]),
        (({"image": X, "text": X[:4]}, Y), ["x['image']: 6", "x['text']: 4"]),
        ((X, {"a": Y, "b": [Y, Y[:1]]}), ["y['a']: 6", "y['b'][1]: 1"]),
        # Empty data.
        ((X[:0], Y[:0]), ["nothing to feed", "0 samples", "Check"]),
        (([],), ["x is an empty list", "at least one array"]),
        (((), Y), ["x is an empty tuple", "at least one array"]),
        (({}, Y), ["x is an empty dict", "at least one array"]),
        ((None, Y), ["None", "x"]),
        ((pd.DataFrame({"a": []}), Y[:0]), ["nothing to feed", "0 samples"]),
        # Zero-dimensional.
        ((np.float32(12345.0),), ["x has no axis of samples", "shape is ()", "(num_samples, ...)"]),
        ((X, np.array(12345.0)), ["y has no axis of samples", "(num_samples, ...)"]),
        ((12345,), ["x has no axis of samples"]),
        ((X, Y, 12345.0), ["sample_weight has no axis of samples"]),
        # Ragged nesting.
        (([[1, 2], [3]],), ["x holds samples of unequal length", "padding_value=0", "tf.ragged.constant"]),
        (([[[1], [2]], [[3], [4, 5]]],), ["x holds samples of unequal length", "padding_value=0"]),
        ((X, [[1], [2, 3], [4]]), ["y holds samples of unequal length", "padding_value=0"]),
        # dtype object that is no string, and others that are no numbers.
        ((np.array([1, 2, None], object),), ["x", "object", "number 0 is a int", "astype('float32')"]),
        ((np.array(["a", None], object),), ["number 1 is a NoneType", "missing values must be filled"]),
        ((np.array(["a", np.nan], object),), ["number 1 is a float", "missing values must be filled"]),
        ((np.array([[1], [2, 3]], object),), ["x holds samples of unequal length", "padding_value=0"]),
        ((np.array([X, X[:2]], object),), ["x holds samples of unequal length", "padding_value=0"]),
        ((np.zeros(3, "datetime64[s]"),), ["x has dtype datetime64[s]", "numbers or strings"]),
        ((np.zeros(3, "timedelta64[s]"),), ["x has dtype timedelta64[s]", "numbers or strings"]),
        ((np.zeros(3, [("a", "f4"), ("b", "i4")]),), ["dtype", "numbers or strings"]),
        ((pd.DataFrame({"a": [1, 2], "b": ["x", "y"]}),), ["x", "object", "is a int"]),
        ((pd.Series(["x", None]),), ["missing values must be filled"]),
        (([object(), object()],), ["x[0]", "object"]),
        # None among the arrays.
        (([X, None], Y), ["x[1]", "None", "must be an array"]),
        ((X, {"a": Y, "b": None}), ["y['b']", "None", "must be an array"]),
        ((X, None, np.ones(6)), ["sample_weight", "without y"]),
    ],
)
def test_arrays_that_cannot_be_fed(data, words):
    with pytest.raises(kg.SourceError) as caught:
        kg.DistributedFeeder(*data)
    check(caught, words)


# --- The arguments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_size": 0}, ["batch_size", "at least 1", "0"]),
        ({"batch_size": -8}, ["batch_size", "at least 1", "-8"]),
        ({"batch_size": 8.0}, ["batch_size", "integer", "8.0", "float"]),
        ({"batch_size": True}, ["batch_size", "integer", "True", "bool"]),
        ({"batch_size": "8"}, ["batch_size", "integer", "'8'", "str"]),
        ({"batch_size": np.float32(8)}, ["batch_size", "integer"]),
        ({"steps_per_epoch": 0}, ["steps_per_epoch", "at least 1"]),
        ({"steps_per_epoch": 2.5}, ["steps_per_epoch", "integer", "2.5"]),
        ({"prefetch": -1}, ["prefetch", "at least 0", "-1"]),
        ({"prefetch": False}, ["prefetch", "integer", "False"]),
        ({"seed": 1.5}, ["seed", "integer", "1.5"]),
        ({"seed": "a"}, ["seed", "integer", "'a'"]),
        ({"shuffle": "batch"}, ["shuffle", "True or False", "'batch'"]),
        ({"shuffle": 1}, ["shuffle", "True or False", "1"]),
        ({"drop_remainder": None}, ["drop_remainder", "True or False", "None"]),
        ({"batch_size": 8, "drop_remainder": True}, ["6 samples", "global batch of 8", "drop_remainder=False"]),
        ({"transform": 5}, ["transform", "function", "int"]),
    ],
)
def test_arguments_that_make_no_sense(arguments, words):
    with pytest.raises(kg.SourceError) as caught:
        kg.DistributedFeeder(X, Y, **arguments)
    check(caught, words)


def test_numpy_integers_are_integers():
    feeder = kg.DistributedFeeder(X, Y, batch_size=np.int32(4), seed=np.int64(7), prefetch=np.uint8(1))
    assert (feeder.batch_size, feeder.seed, feeder.prefetch, len(feeder)) == (4, 7, 1, 2)


@pytest.mark.parametrize("num_replicas", [0, -1, 2.0, True])
def test_a_plan_for_no_number_of_replicas(num_replicas):
    with pytest.raises(kg.SourceError, match="num_replicas"):
        kg.DistributedFeeder(X, Y).plan(num_replicas)


def make_generator():
    yield X, Y


class Sequence(tf.keras.utils.Sequence):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return X, Y


@pytest.mark.parametrize(
    "source", [make_generator, make_generator(), Sequence()], ids=["function", "iterator", "Sequence"]
)
def test_targets_beside_a_generator(source):
    with pytest.raises(kg.SourceError) as caught:
        kg.DistributedFeeder(source, Y)
    check(caught, ["y", "yield"])


# --- The call ----------------------------------------------------------------------------------------------


def refused(call, words):
    """`call` gets a model and a feeder and must raise before a step, leaving the model fit for use."""
    model = make_model()
    kg.distribute(model, strategy_of(2))
    before = model.get_weights()
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call(model, kg.DistributedFeeder(X, Y))
    assert isinstance(caught.value, kg.FeedError)
    check(caught, words)
    assert all((a == b).all() for a, b in zip(before, model.get_weights()))


NONE = {"callbacks": [NoStep()], "verbose": 0}


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize(
    ("hide", "words"),
    [
        (lambda feeder: (feeder, Y), ["x is a tuple", "holds a DistributedFeeder", "feeder itself"]),
        (lambda feeder: [feeder], ["x is a list", "holds a DistributedFeeder", "feeder itself"]),
        (lambda feeder: {"a": (feeder,)}, ["x is a dict", "holds a DistributedFeeder", "feeder itself"]),
    ],
)
def test_a_feeder_inside_a_structure(method, hide, words):
    refused(lambda model, feeder: getattr(model, method)(hide(feeder), **NONE), words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"y": Y}, ["y was given beside a DistributedFeeder", "DistributedFeeder(x, y"]),
        ({"sample_weight": np.ones(6)}, ["sample_weight was given beside", "DistributedFeeder(x, y, sample_weight)"]),
        ({"batch_size": 2}, ["batch_size=2", "the feeder has batch_size=32", "to the feeder only"]),
        ({"validation_split": 1.5}, ["validation_split", "between 0 and 1", "1.5"]),
        ({"validation_split": 0.99}, ["6 samples", "too few", "0.99"]),
        ({"steps_per_epoch": 1.5}, ["steps_per_epoch", "integer"]),
    ],
)
def test_arguments_of_fit_that_do_not_go_with_a_feeder(arguments, words):
    refused(lambda model, feeder: model.fit(feeder, **arguments, **NONE), words)


def test_a_feeder_in_the_wrong_place():
    refused(lambda model, feeder: model.fit(X, feeder, **NONE), ["y is a DistributedFeeder", "DistributedFeeder(x, y"])
    refused(
        lambda model, feeder: model.fit(feeder, validation_data=(feeder, Y), **NONE),
        ["validation_data is a tuple", "holds a DistributedFeeder", "validation_data=DistributedFeeder"],
    )
    with pytest.raises(kg.SourceError, match="not other feeders"):
        kg.DistributedFeeder([kg.DistributedFeeder(X)])
    with pytest.raises(kg.SourceError, match="DistributedFeeder already"):
        kg.DistributedFeeder(kg.DistributedFeeder(X))


def test_targets_missing_where_the_loss_needs_them():
    refused(
        lambda model, _: model.fit(kg.DistributedFeeder(X), **NONE),
        ["loss='mse'", "needs targets", "inputs only", "DistributedFeeder(x, y)"],
    )
    refused(
        lambda model, _: model.evaluate(kg.DistributedFeeder(X), **NONE),
        ["loss='mse'", "needs targets", "inputs only", "DistributedFeeder(x, y)"],
    )


def test_targets_are_not_missed_where_the_loss_needs_none():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, activity_regularizer="l2", input_shape=(3,))])
    model.compile("sgd")
    kg.distribute(model, strategy_of(2)).fit(kg.DistributedFeeder(X), verbose=0)


@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_a_model_that_was_never_compiled(method):
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,))])
    kg.distribute(model, strategy_of(2))
    with pytest.raises(RuntimeError, match="compile"):
        getattr(model, method)(kg.DistributedFeeder(X, Y), **NONE)


def two_inputs():
    first, second = tf.keras.Input((3,), name="first"), tf.keras.Input((4, 2), name="second")
    flat = tf.keras.layers.Flatten()(second)
    model = tf.keras.Model([first, second], tf.keras.layers.Dense(1)(tf.keras.layers.Concatenate()([first, flat])))
    model.compile("sgd", "mse")
    return kg.distribute(model, strategy_of(2))


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ([X, np.zeros((6, 4, 3))], ["Input 'second'", "(4, 2)", "(4, 3)", "Reshape"]),
        ([X[:, :2], np.zeros((6, 4, 2))], ["Input 'first'", "(3,)", "(2,)", "float32"]),
        ({"first": X, "second": np.zeros((6, 8))}, ["Input 'second'", "(4, 2)", "(8,)"]),
        ({"first": X, "third": X}, ["input 'second'", "'first', 'third'", "Name the keys"]),
        (X, ["2 input(s)", "'first', 'second'", "1 array(s)", "one array for each"]),
        ([X, X, X], ["2 input(s)", "3 array(s)"]),
    ],
)
def test_shapes_that_do_not_fit_say_which_input(x, words):
    model = two_inputs()
    for method, data in [("fit", (x, Y)), ("evaluate", (x, Y)), ("predict", (x,))]:
        with pytest.raises(kg.SourceError) as caught:
            getattr(model, method)(kg.DistributedFeeder(*data), **NONE)
        check(caught, words)


def test_validation_data_that_does_not_fit_is_refused_before_training():
    refused(
        lambda model, feeder: model.fit(feeder, validation_data=kg.DistributedFeeder(X[:, :2], Y), **NONE),
        ["(3,)", "(2,)"],
    )
    refused(
        lambda model, feeder: model.fit(feeder, validation_data=(X[:, :2], Y), **NONE),
        ["(3,)", "(2,)"],
    )


def test_text_for_an_input_of_numbers():
    refused(
        lambda model, _: model.predict(kg.DistributedFeeder(np.full((6, 3), "12345")), **NONE),
        ["string", "float32"],
    )


# --- Warnings ----------------------------------------------------------------------------------------------


def test_a_batch_smaller_than_the_replicas_works_and_warns_once(caplog):
    model = kg.distribute(make_model(), strategy_of(4))
    feeder = kg.DistributedFeeder(X, Y, batch_size=3)
    with caplog.at_level(logging.WARNING, "keras_gpufeed"):
        model.fit(feeder, verbose=0, epochs=2)
        model.fit(feeder, verbose=0)
    (warning,) = [record.getMessage() for record in caplog.records]
    for words in ("3 sample(s)", "number of replicas (4)", "at least 4"):
        assert words in warning


# --- Devices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (["CPU:0", "CPU:8"], ["'CPU:8'", "CPU:0, CPU:1", "Check"]),
        (["GPU:0"], ["'GPU:0'", "CPU:7", "CUDA_VISIBLE_DEVICES"]),
        (["CPU:0", "CPU:0"], ["once", "CPU:0"]),
        (["CPU:0", "/device:CPU:0"], ["once", "CPU:0"]),
        (["nonsense"], ["nonsense", "CPU:0"]),
        (["CPU:x"], ["CPU:x", "CPU:0"]),
        ([0, 1], ["0", "CPU:0"]),
        ([], ["list of names", "[]"]),
        ("CPU:0", ["list of names", "'CPU:0'"]),
        (4, ["list of names", "4"]),
    ],
)
def test_devices_that_do_not_exist(devices, words):
    with pytest.raises(kg.StrategyError) as caught:
        kg.get_strategy(devices)
    check(caught, words)


@pytest.mark.parametrize("n", [4, 16])
def test_virtual_devices_asked_for_too_late(n):
    with pytest.raises(kg.StrategyError) as caught:
        kg.use_virtual_devices(n)
    check(caught, ["too late", "started with 8 CPU devices", f"{n} were asked for", "before the first", "restart"])


@pytest.mark.parametrize("n", [0, -1, 2.0, True, "4", None])
def test_no_number_of_virtual_devices(n):
    with pytest.raises(kg.StrategyError) as caught:
        kg.use_virtual_devices(n)
    check(caught, ["positive integer", repr(n)])


@pytest.mark.parametrize("value", ["many", "0", "-1", "2.5"])
def test_an_environment_variable_that_makes_no_sense(monkeypatch, value):
    monkeypatch.setenv("KERAS_GPUFEED_VIRTUAL_DEVICES", value)
    with pytest.raises(kg.StrategyError) as caught:
        use_virtual_devices_of_environment()
    check(caught, ["KERAS_GPUFEED_VIRTUAL_DEVICES", "positive integer", repr(value)])


def test_only_models_can_be_moved():
    with pytest.raises(kg.StrategyError, match=r"Only a Keras model can be moved.*Dense"):
        kg.distribute(tf.keras.layers.Dense(1))


def test_a_model_lives_on_one_strategy():
    model = kg.distribute(make_model(), strategy_of(2))
    with pytest.raises(kg.StrategyError) as caught:
        kg.distribute(model, strategy_of(3))
    check(caught, ["2 replica(s)", "3", "Save it and load it again"])


def test_compilation_by_xla_on_several_processors():
    model = kg.distribute(make_model(jit_compile=True), strategy_of(2))
    with pytest.raises(kg.StrategyError) as caught:
        model.fit(kg.DistributedFeeder(X, Y), **NONE)
    check(caught, ["jit_compile=True", "several CPU devices", "jit_compile=False"])
