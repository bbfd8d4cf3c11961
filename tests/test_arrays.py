"""What a model receives for each kind of array, and what it costs in memory."""

import collections
import gc
import pathlib
import tracemalloc
from typing import ClassVar

import h5py
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from comparison import strategy_of

import keras_gpufeed as kg


class Recorder(tf.keras.Model):
    """Keeps what each replica is handed in each step."""

    def __init__(self, steps):
        super().__init__()
        self.record = steps.append
        self.compile(run_eagerly=True)

    def keep(self, data):
        self.record(tf.nest.map_structure(lambda component: component.numpy(), data))
        return {}

    def train_step(self, data):
        return self.keep(data)

    def test_step(self, data):
        return self.keep(data)


def parts_fed(*data, batch_size=4, shuffle=False, evaluate=False, **arguments):
    """What two replicas are handed in one epoch: of step 0 both parts, then of step 1, ..."""
    parts = []
    model = kg.distribute(Recorder(parts), strategy_of(2))
    feeder = kg.DistributedFeeder(*data, batch_size=batch_size, shuffle=shuffle, **arguments)
    if evaluate:
        model.evaluate(feeder, verbose=0)
    else:
        model.fit(feeder, verbose=0)
    return parts


def joined(parts):
    """The samples of all parts, one after another: x, y and sample_weight, None where there were none."""
    parts = [tf.keras.utils.unpack_x_y_sample_weight(part) for part in parts]
    return tf.nest.map_structure(lambda *arrays: None if arrays[0] is None else np.concatenate(arrays), *parts)


# --- Every dtype -------------------------------------------------------------------------------------------

NUMBERS = [0, 1, 2, 3, 4, 5]
WORDS = ["", "a", "bc", "größer", "日本", "e" * 40]
BYTES = [word.encode() for word in WORDS]

DTYPES = {
    "float16": (np.array(NUMBERS, "float16"), "float32", NUMBERS),
    "float32": (np.array(NUMBERS, "float32"), "float32", NUMBERS),
    "float64": (np.array(NUMBERS, "float64"), "float32", NUMBERS),
    "longdouble": (np.array(NUMBERS, "longdouble"), "float32", NUMBERS),
    "int8": (np.array(NUMBERS, "int8"), "int8", NUMBERS),
    "int16": (np.array(NUMBERS, "int16"), "int16", NUMBERS),
    "int32": (np.array(NUMBERS, "int32"), "int32", NUMBERS),
    "int64": (np.array(NUMBERS, "int64"), "int64", NUMBERS),
    "uint8": (np.array(NUMBERS, "uint8"), "uint8", NUMBERS),
    "uint16": (np.array(NUMBERS, "uint16"), "uint16", NUMBERS),
    "uint32": (np.array(NUMBERS, "uint32"), "uint32", NUMBERS),
    "uint64": (np.array(NUMBERS, "uint64"), "uint64", NUMBERS),
    "bool": (np.array([0, 1, 1, 0, 0, 1], bool), "bool", [0, 1, 1, 0, 0, 1]),
    "complex64": (np.array(NUMBERS, "complex64") * 1j, "complex64", [0, 1j, 2j, 3j, 4j, 5j]),
    "bfloat16": (np.array(NUMBERS, tf.bfloat16.as_numpy_dtype), "bfloat16", NUMBERS),
    "big-endian float64": (np.array(NUMBERS, ">f8"), "float32", NUMBERS),
    "big-endian int16": (np.array(NUMBERS, ">i2"), "int16", NUMBERS),
    "unicode": (np.array(WORDS), "object", BYTES),
    "bytes": (np.array(BYTES), "object", BYTES),
    "object of strings": (np.array(WORDS, object), "object", BYTES),
    "object of bytes": (np.array(BYTES, object), "object", BYTES),
    "object of both": (np.array([*WORDS[:3], *BYTES[3:]], object), "object", BYTES),
}

# --- Every layout ------------------------------------------------------------------------------------------

TABLE = np.arange(18, dtype="float32").reshape(6, 3)
ROWS = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14], [15, 16, 17]]


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def misaligned(array):
    buffer = bytearray(1 + array.nbytes)
    shifted = np.frombuffer(buffer, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    shifted[...] = array
    assert not shifted.flags.aligned
    return shifted


LAYOUTS = {
    "C": TABLE,
    "Fortran": np.asfortranarray(TABLE),
    "every second sample": np.repeat(TABLE, 2, axis=0)[::2],
    "backwards": TABLE[::-1].copy()[::-1],
    "every second column": np.repeat(TABLE, 2, axis=1)[:, ::2],
    "transposed": np.ascontiguousarray(TABLE.T).T,
    "read-only": read_only(TABLE),
    "misaligned": misaligned(TABLE),
    "misaligned float64": misaligned(TABLE.astype("float64")),
    "read-only view of a view": read_only(np.repeat(TABLE, 2, axis=0))[::2],
}


def fed_together(arrays, shuffle):
    parts = parts_fed(arrays, shuffle=shuffle, seed=3)
    return joined(parts)[0]


@pytest.fixture(scope="module", params=[False, True], ids=["in order", "shuffled"])
def everything(request):
    """All arrays of the tables, fed beside one another, and the place of each sample in its array."""
    arrays = {key: array for key, (array, _, _) in DTYPES.items()}
    arrays.update({f"layout {key}": array for key, array in LAYOUTS.items()})
    arrays["place"] = np.arange(6)
    return fed_together(arrays, request.param)


def test_every_sample_is_fed_once(everything):
    assert sorted(everything["place"]) == NUMBERS


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(everything, name):
    _, dtype, values = DTYPES[name]
    fed = everything[name]
    assert fed.dtype == dtype
    assert fed.tolist() == [values[place] for place in everything["place"]]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(everything, name):
    assert everything[f"layout {name}"].tolist() == [ROWS[place] for place in everything["place"]]


@pytest.mark.parametrize("floatx", ["float16", "float64"])
def test_floating_point_numbers_become_floatx(floatx):
    tf.keras.backend.set_floatx(floatx)
    try:
        x = {"float32": np.ones(2, "float32"), "float64": np.ones(2), "int32": np.ones(2, "int32")}
        fed = joined(parts_fed(x))[0]
        assert {key: value.dtype.name for key, value in fed.items()} == {
            "float32": floatx,
            "float64": floatx,
            "int32": "int32",
        }
    finally:
        tf.keras.backend.set_floatx("float32")


@pytest.mark.parametrize("name", [name for name in DTYPES if "big-endian" not in name and "object of both" not in name])
def test_plain_keras_feeds_the_same(name):
    array = DTYPES[name][0]
    parts = []
    Recorder(parts).fit(array, batch_size=6, shuffle=False, verbose=0)
    fed = joined(parts)[0]
    assert fed.dtype == DTYPES[name][1]
    assert fed.tolist() == DTYPES[name][2]


@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 2, 3), (6, 1, 2, 1, 2), (6, 0), (6, 3, 0)])
def test_shapes(shape):
    array = np.arange(np.prod(shape)).reshape(shape)
    fed = joined(parts_fed(array))[0]
    assert fed.shape == shape
    assert (fed == array).all()


def test_text_of_several_columns():
    words = np.array([["a", "b"], ["c", "d"], ["e", "f"]])
    fed = joined(parts_fed(words))[0]
    assert fed.tolist() == [[b"a", b"b"], [b"c", b"d"], [b"e", b"f"]]


# --- Every structure ---------------------------------------------------------------------------------------

A, B, C = np.arange(6), np.arange(10, 16), np.arange(20, 26)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ((A, B), (A, B)),
        ((A, B, C), (A, B, C)),
        (([A, B], C), ((A, B), C)),
        (((A, B), [B, C]), ((A, B), (B, C))),
        (({"b": B, "a": A}, {"c": C}), ({"b": B, "a": A}, {"c": C})),
        (({"a": [A, {"b": B}]}, (A, (B, C))), ({"a": (A, {"b": B})}, (A, (B, C)))),
        ((A, {"a": A, "b": B}, {"a": C, "b": C}), (A, {"a": A, "b": B}, {"a": C, "b": C})),
        (([A], [B]), ((A,), (B,))),
        ((A, [A, B], [C, None]), (A, (A, B), (C, np.ones(6)))),  # None weighs 1, as in Keras.
        (([0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15]), (A, B)),  # Lists of numbers are data.
        (([[0, 1], [2, 3]], [0.5, 1.5]), (np.array([[0, 1], [2, 3]]), np.array([0.5, 1.5]))),
        ((["a", "b"], [True, False]), (np.array([b"a", b"b"]), np.array([True, False]))),
    ],
)
def test_structures(data, expected):
    parts = parts_fed(*data)
    tf.nest.assert_same_structure(parts[0], expected)
    fed = joined(parts)
    for array, values in zip(tf.nest.flatten(fed[: len(expected)]), tf.nest.flatten(expected)):
        assert array.tolist() == values.tolist()


@pytest.mark.parametrize(
    ("x", "kind"),
    [(A, np.ndarray), ({"a": A}, dict), ((A, B), tuple), ([A, B], tuple), ({"a": (A, B)}, dict)],
)
def test_a_lone_input_is_handed_over_as_keras_does(x, kind):
    """An array or dict without targets reaches `train_step` as it is; a tuple or list within one more tuple."""
    for part in parts_fed(x), parts_fed(x, evaluate=True):
        if kind is tuple:
            assert len(part[0]) == 1
            part = part[0]
        assert isinstance(part[0], kind)


Pair = collections.namedtuple("Pair", ["left", "right"])


@pytest.mark.parametrize(
    ("x", "kind"),
    [
        (Pair(A, B), Pair),
        ({"pair": Pair(A, B)}, dict),
        (collections.OrderedDict(b=B, a=A), dict),
        (collections.defaultdict(list, {"a": A, "b": B}), dict),
    ],
    ids=["named tuple", "named tuple in a dictionary", "OrderedDict", "defaultdict"],
)
def test_structures_of_the_users_classes(x, kind):
    fed, _, _ = joined(parts_fed(x, C))
    assert isinstance(fed, kind)
    if isinstance(fed, dict) and "pair" in fed:
        fed = fed["pair"]
    first, second = (fed.left, fed.right) if isinstance(x, Pair) or "pair" in x else (fed["a"], fed["b"])
    assert first.tolist() == A.tolist()
    assert second.tolist() == B.tolist()


def test_parts_are_contiguous_and_in_order():
    assert [x.tolist() for x, _ in parts_fed(np.arange(7), np.arange(7))] == [[0, 1], [2, 3], [4, 5], [6]]
    assert [x.tolist() for x, _ in parts_fed(np.arange(5), np.arange(5))] == [[0, 1], [2, 3], [4], [4]]


def test_weights_of_time_steps():
    weights = np.arange(12.0).reshape(6, 2)
    fed = joined(parts_fed(A, np.zeros((6, 2)), weights))
    assert fed[2].tolist() == weights.tolist()


def test_evaluate_is_fed_the_same():
    fed = joined(parts_fed([A, B], C, shuffle=True, evaluate=True))  # It never shuffles.
    assert [array.tolist() for array in tf.nest.flatten(fed[:2])] == [A.tolist(), B.tolist(), C.tolist()]


# --- Other kinds of array ----------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["in order", "shuffled"])
def fed(request):
    """Feeds one array and gives it back in its own order."""

    def feed(array):
        places = np.arange(array.shape[0])
        parts = parts_fed({"array": array, "place": places}, shuffle=request.param, seed=1)
        fed = joined(parts)[0]
        order = np.argsort(fed["place"])
        assert fed["place"][order].tolist() == places.tolist()
        return fed["array"][order]

    return feed


def test_tensors(fed):
    assert fed(tf.range(6)).tolist() == NUMBERS
    assert fed(tf.constant(ROWS, tf.float64)).dtype == "float32"
    assert fed(tf.constant(BYTES)).tolist() == BYTES
    assert fed(tf.Variable(NUMBERS)).tolist() == NUMBERS


def test_frames_of_one_dtype(fed):
    frame = pd.DataFrame(TABLE, columns=["c", "a", "b"], index=[5, 4, 3, 2, 1, 0])
    array = fed(frame)  # The index is not looked at, columns stay where they are.
    assert (array.dtype, array.tolist()) == ("float32", ROWS)


def test_frames_of_mixed_dtypes(fed):
    frame = pd.DataFrame(
        {"i": NUMBERS, "f": np.array(NUMBERS) / 2, "b": np.array([0, 1, 0, 1, 0, 1], "int8")},
        index=[5, 4, 3, 2, 1, 0],
    )
    array = fed(frame)
    assert array.dtype == "float32"
    assert array.tolist() == [[0, 0, 0], [1, 0.5, 1], [2, 1, 0], [3, 1.5, 1], [4, 2, 0], [5, 2.5, 1]]
    integers = fed(frame[["i", "b"]])
    assert integers.dtype == "int64"
    assert integers[5].tolist() == [5, 1]


def test_frames_of_strings(fed):
    frame = pd.DataFrame({"text": WORDS, "more": WORDS[::-1]})
    assert fed(frame).tolist() == [list(pair) for pair in zip(BYTES, BYTES[::-1])]


def test_columns_of_frames_by_name(fed):
    frame = pd.DataFrame({"text": WORDS, "number": NUMBERS}, index=[5, 4, 3, 2, 1, 0])
    assert fed(frame["number"]).tolist() == [[number] for number in NUMBERS]  # As Keras does.
    assert fed(frame["text"]).tolist() == [[text] for text in BYTES]


def test_categories_and_booleans_of_pandas(fed):
    assert fed(pd.Series(WORDS).astype("category")).ravel().tolist() == BYTES
    assert fed(pd.Series([True, False, True])).ravel().tolist() == [True, False, True]


def test_a_memory_map_stays_on_the_disk(fed, tmp_path):
    written = np.lib.format.open_memmap(tmp_path / "a.npy", "w+", "uint16", (50, 2))
    written[:] = np.arange(50)[:, None]
    written.flush()
    array = np.load(tmp_path / "a.npy", mmap_mode="r")
    assert fed(array)[:, 0].tolist() == list(range(50))
    raw = np.memmap(tmp_path / "a.npy", "uint16", "r", offset=129, shape=(40,))  # No multiple of anything.
    assert fed(raw).tolist() == np.asarray(raw).tolist()


def test_hdf5_data_sets(fed, tmp_path):
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["table"], file["small"], file["texts"] = TABLE, np.array(NUMBERS, "uint8"), WORDS
        file["fixed"] = np.array(BYTES)
        assert fed(file["table"]).tolist() == ROWS
        assert fed(file["small"]).dtype == "uint8"
        assert fed(file["small"]).tolist() == NUMBERS
        assert fed(file["texts"]).tolist() == BYTES
        assert fed(file["fixed"]).tolist() == BYTES


class ArrayLike:
    """Has only what a source needs, and notes what is asked of it."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.asked = array, array.shape, array.dtype, []

    def __len__(self):
        return len(self.array)

    def __getitem__(self, samples):
        self.asked.append(samples)
        return self.array[samples]


def test_anything_with_shape_dtype_length_and_indexing(fed):
    table = ArrayLike(TABLE)
    assert fed(table).tolist() == ROWS
    assert fed(ArrayLike(np.array(WORDS))).tolist() == BYTES
    assert fed(ArrayLike(np.array(WORDS, object))).tolist() == BYTES
    assert fed(ArrayLike(np.array(NUMBERS, ">f8"))).tolist() == NUMBERS


def test_an_array_like_is_asked_for_whole_batches_in_its_own_order():
    table = ArrayLike(np.arange(10))
    parts_fed(table)
    assert table.asked == [slice(0, 4), slice(4, 8), slice(8, 10)]
    table.asked.clear()
    parts_fed(table, shuffle=True, seed=1)
    assert [len(samples) for samples in table.asked] == [4, 4, 2]
    assert all((np.diff(samples) > 0).all() for samples in table.asked)


# --- Memory ------------------------------------------------------------------------------------------------


class Spy(np.ndarray):
    """Notes the largest part that is ever taken out of it, and all parts that slices take."""

    largest = 0
    sliced: ClassVar[list] = []

    def __getitem__(self, samples):
        part = super().__getitem__(samples)
        Spy.largest = max(Spy.largest, np.size(part))
        if isinstance(samples, slice):
            Spy.sliced.append(len(part))
        return part

    def __array_finalize__(self, parent):
        if parent is not None and self.base is None:
            Spy.largest = max(Spy.largest, self.size)


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8"])
def test_no_part_larger_than_sixteen_batches_is_taken(dtype):
    x = np.zeros((10_000, 16), dtype).view(Spy)
    Spy.largest = 0
    parts_fed(x, batch_size=100, shuffle=True, steps_per_epoch=3)
    parts_fed(x, batch_size=100, evaluate=True)
    assert 100 * 16 <= Spy.largest <= 16 * 100 * 16


@pytest.mark.parametrize(
    ("num_samples", "num_floats", "batch_size", "prefetch", "read"),
    [
        (400, 4, 10, 2, [1, 1, 2, 4, 8, 16, 8]),  # At most 16 batches.
        (100, 4, 10, 2, [1, 1, 2, 4, 2]),  # At most a pass.
        (12, 250_000, 1, 1, [1, 1, 2, 4, 4]),  # Of 1 MB: at most 4.
        (6, 1_000_000, 1, 2, [1, 1, 1, 1, 1, 1]),
        (40, 4, 10, 0, [1, 1, 1, 1]),  # Nothing is to be read ahead.
    ],
)
def test_small_batches_are_read_several_at_once(num_samples, num_floats, batch_size, prefetch, read):
    x = np.zeros((num_samples, num_floats), "float32").view(Spy)
    Spy.sliced = []
    model = tf.keras.Sequential([tf.keras.layers.Lambda(lambda x: x[:, :1])])
    model.predict(kg.DistributedFeeder(x, batch_size=batch_size, prefetch=prefetch), verbose=0)
    # Two large ones are read at once.
    assert sorted(Spy.sliced) == sorted(batch_size * number for number in read)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_batches_read_together_are_those_of_single_reads(num_replicas):
    """Through ends of passes, short last batches and a start in the middle, with seeds for a transform."""
    x = np.arange(101 * 3, dtype="float32").reshape(101, 3)

    def draw(x, seed):
        noise = tf.map_fn(lambda one: tf.random.stateless_uniform([], one), seed, fn_output_signature=tf.float32)
        return x + noise[:, None]

    fed = []
    for prefetch in (0, 2):
        steps = []
        feeder = kg.DistributedFeeder(x, batch_size=4, seed=3, transform=draw, prefetch=prefetch)
        model = kg.distribute(Recorder(steps), strategy_of(num_replicas))
        model.fit(feeder, epochs=3, verbose=0)
        model.fit(feeder, initial_epoch=1, epochs=2, verbose=0)
        fed.append(steps)
    assert len(fed[0]) == len(fed[1]) == 4 * 26 * num_replicas
    assert {len(part) for part in fed[1]} == ({4, 1} if num_replicas == 1 else {2, 1})
    for one, other in zip(*fed):
        np.testing.assert_array_equal(one, other)


def make_frame():
    return pd.DataFrame({"i": np.arange(200_000), "f": np.zeros(200_000), "b": np.zeros(200_000, "int8")})


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros((25_000, 128), "float32"),
        lambda: np.zeros((25_000, 64)),
        lambda: np.asfortranarray(np.zeros((25_000, 128), "float32")),
        lambda: np.zeros((25_000, 1024), "uint8")[:, ::2],
        lambda: pd.DataFrame(np.zeros((25_000, 128), "float32")),
        lambda: pd.DataFrame(np.zeros((25_000, 128), "float32"))[5:],
        lambda: pd.Series(np.zeros(2_000_000)),
        lambda: make_frame(),
        lambda: tf.zeros((25_000, 128)),
    ],
    ids=[
        "float32",
        "float64",
        "Fortran",
        "strided",
        "frame",
        "part of a frame",
        "series",
        "mixed frame",
        "tensor",
    ],
)
def test_a_feeder_copies_no_array(make):
    x = make()
    y = np.zeros(len(x), "float32")
    gc.collect()
    tracemalloc.start()
    feeder = kg.DistributedFeeder(x, y)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 500_000  # The arrays have 3 to 16 MB.
    assert feeder.num_samples == len(x)


def test_fit_holds_batches_and_never_the_array():
    """Stock Keras copies the 100 MB, and on a GPU machine puts the copy on the first GPU."""
    x = np.full((100_000, 1000), 7, "uint8")
    model = tf.keras.Sequential(
        [tf.keras.layers.Lambda(lambda x: tf.cast(x[:, :1], "float32")), tf.keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    kg.distribute(model, strategy_of(2))
    model.fit(kg.DistributedFeeder(x[:500], np.zeros(500), batch_size=250), verbose=0)
    model.predict(kg.DistributedFeeder(x[:500], batch_size=250), verbose=0)
    gc.collect()
    start, found = resident_bytes(), []
    note = tf.keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: found.append(resident_bytes()),
        on_predict_batch_end=lambda *_, **__: found.append(resident_bytes()),
    )
    feeder = kg.DistributedFeeder(x, np.zeros(100_000), batch_size=5000)  # 5 MB.
    model.fit(feeder, validation_data=feeder, verbose=0, callbacks=[note])
    model.predict(feeder, verbose=0, callbacks=[note])
    assert len(found) == 40
    assert max(found) - start < 64e6 + 4 * 5e6


def resident_bytes():
    """Memory of this process that is no file's."""
    status = pathlib.Path("/proc/self/status")
    if not status.exists():
        pytest.skip("the memory of the process is read from /proc")
    (kilobytes,) = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("RssAnon")]
    return 1024 * int(kilobytes)


def test_every_sample_of_a_large_array_is_cast():
    """A batch of 8 MB is cast piece by piece."""
    x = np.arange(4000 * 500, dtype="float64").reshape(4000, 500)
    (batch,) = kg.DistributedFeeder(x, batch_size=4000, seed=1).dataset()
    assert batch.dtype == "float32"
    order = np.argsort(batch[:, 0])
    assert (order != np.arange(4000)).any()
    np.testing.assert_array_equal(batch.numpy()[order], x)
