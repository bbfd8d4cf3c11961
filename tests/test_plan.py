"""Which samples each replica gets in each step: tables of literal expectations, then what always holds."""

import ast
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import keras_gpufeed as kg
from keras_gpufeed import plan
from keras_gpufeed.plan import split_batch
from keras_gpufeed.strategy import prepare

counts = st.integers(1, 5000)
replicas = st.integers(1, 64)


@pytest.mark.parametrize(
    ("num_samples", "num_replicas", "parts"),
    [
        (8, 1, [(0, 8)]),
        (8, 2, [(0, 4), (4, 8)]),
        (9, 2, [(0, 5), (5, 9)]),  # Sizes differ by at most one sample; the first replicas get more.
        (10, 4, [(0, 3), (3, 6), (6, 8), (8, 10)]),
        (5, 4, [(0, 2), (2, 3), (3, 4), (4, 5)]),  # TensorFlow deals 2, 2, 1 and 0.
        (4, 4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (3, 4, [(0, 3), (0, 3), (0, 3), (0, 3)]),  # Fewer samples than replicas: each gets all of them.
        (1, 2, [(0, 1), (0, 1)]),
        (1, 1, [(0, 1)]),
    ],
)
def test_parts_of_a_global_batch(num_samples, num_replicas, parts):
    split = split_batch(num_samples, num_replicas)
    assert list(split.parts) == parts
    assert split.small_tail == (num_samples < num_replicas)


@pytest.mark.parametrize(
    ("num_samples", "num_replicas", "shares"),
    [
        (8, 4, [1.0, 1.0, 1.0, 1.0]),
        (10, 4, [1.2, 1.2, 0.8, 0.8]),
        (5, 4, [1.6, 0.8, 0.8, 0.8]),
        (3, 4, [1.0, 1.0, 1.0, 1.0]),  # Each has all samples, so each weighs the same.
        (7, 1, [1.0]),
    ],
)
def test_shares(num_samples, num_replicas, shares):
    assert split_batch(num_samples, num_replicas).shares == pytest.approx(shares)


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "drop_remainder", "steps", "last_sizes", "left_out"),
    [
        (1024, 256, False, 4, [64, 64, 64, 64], 0),
        (1025, 256, False, 5, [1, 1, 1, 1], 0),
        (1027, 256, False, 5, [3, 3, 3, 3], 0),
        (1030, 256, False, 5, [2, 2, 1, 1], 0),
        (1030, 256, True, 4, [64, 64, 64, 64], 6),
        (1024, 256, True, 4, [64, 64, 64, 64], 0),
        (1, 256, False, 1, [1, 1, 1, 1], 0),
        (7, 8, False, 1, [2, 2, 2, 1], 0),
        (21, 10, False, 3, [1, 1, 1, 1], 0),
        (250, 250, True, 1, [63, 63, 62, 62], 0),
    ],
)
def test_steps_of_a_pass_on_four_replicas(num_samples, batch_size, drop_remainder, steps, last_sizes, left_out):
    plan = kg.BatchPlan(num_samples, batch_size, num_replicas=4, drop_remainder=drop_remainder)
    assert plan.steps == steps
    assert list(plan.split(steps - 1).sizes) == last_sizes
    assert plan.samples_left_out == left_out


def test_steps_do_not_depend_on_the_number_of_replicas():
    assert [kg.BatchPlan(1000, 32, num_replicas).steps for num_replicas in (1, 2, 4, 8)] == [32, 32, 32, 32]


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "num_replicas", "even", "has_small_tail"),
    [
        (1024, 256, 4, True, False),
        (1030, 256, 4, False, False),
        (1027, 256, 4, False, True),  # Every replica has three samples, but they are the same three.
        (1030, 256, 1, True, False),
        (30, 10, 4, False, False),
        (6, 2, 4, False, True),
        (20, 8, 4, True, False),
    ],
)
def test_even_plans_and_small_tails(num_samples, batch_size, num_replicas, even, has_small_tail):
    plan = kg.BatchPlan(num_samples, batch_size, num_replicas)
    assert (plan.even, plan.has_small_tail) == (even, has_small_tail)


def test_a_source_of_unknown_length_has_no_steps():
    plan = kg.BatchPlan(None, 256, num_replicas=4)
    assert plan.steps is None
    assert not plan.even
    assert plan.has_small_tail
    assert str(plan) == (
        "batches of 256 samples from a source of unknown length on 4 replicas\n"
        "  a full step     64 + 64 + 64 + 64 samples\n"
        "  stock Keras     the same in a full step; how the last one divides is not known\n"
        "  batch size      256 keeps all replicas equally busy"
    )


def test_a_source_of_its_own_batch_sizes_has_no_sizes_to_show():
    assert str(kg.BatchPlan(None, None, num_replicas=4)) == (
        "batches of the source's own sizes on 4 replicas\n"
        "  batch size      batches of a multiple of 4 samples let no replica wait for another"
    )


@pytest.mark.parametrize(
    ("sample_bytes", "prefetch", "bytes_in_flight"),
    [(4 * 784, 2, 3 * 256 * 4 * 784), (4, 0, 1024), (None, 2, None)],
)
def test_bytes_in_flight_follow_the_batch_and_not_the_data(sample_bytes, prefetch, bytes_in_flight):
    small, large = (
        kg.BatchPlan(num_samples, 256, 4, sample_bytes=sample_bytes, prefetch=prefetch) for num_samples in (1030, 10**9)
    )
    assert small.bytes_in_flight == large.bytes_in_flight == bytes_in_flight


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"num_samples": 1030, "global_batch_size": 256, "num_replicas": 4},
            "1030 samples in 5 steps of 256 on 4 replicas\n"
            "  a full step     64 + 64 + 64 + 64 samples\n"
            "  the last step   2 + 2 + 1 + 1 samples\n"
            "  shares          uneven steps weigh each replica by its samples: 1.33, 1.33, 0.667, 0.667\n"
            "  left out        nothing\n"
            "  stock Keras     the last step 2 + 2 + 2 + 0 samples: replica 3 gets no sample; each "
            "counts 0.75 times in the gradient\n"
            "  batch size      256 keeps all replicas equally busy",
        ),
        (
            {
                "num_samples": 1025,
                "global_batch_size": 256,
                "num_replicas": 2,
                "devices": ("GPU:0", "GPU:1"),
                "strategy": "MirroredStrategy",
                "sample_bytes": 3136,
            },
            "1025 samples in 5 steps of 256 on 2 replicas\n"
            "  devices         GPU:0, GPU:1\n"
            "  strategy        MirroredStrategy\n"
            "  a full step     128 + 128 samples\n"
            "  the last step   1 sample: all 2 replicas compute it, replica 0 counts it\n"
            "  shares          all steps even: no replica weighs more than another\n"
            "  left out        nothing\n"
            "  bytes in flight 2.41 MB on the host (2 global batches ahead and one in use)\n"
            "                  803 KB on each device (one batch waiting and one in use)\n"
            "  stock Keras     the last step 1 + 0 samples: replica 1 gets no sample; each counts 0.5 "
            "times in the gradient\n"
            "  batch size      256 keeps all replicas equally busy",
        ),
        (
            {"num_samples": 31, "global_batch_size": 10, "num_replicas": 4, "drop_remainder": True},
            "31 samples in 3 steps of 10 on 4 replicas\n"
            "  a full step     3 + 3 + 2 + 2 samples\n"
            "  shares          uneven steps weigh each replica by its samples: 1.2, 1.2, 0.8, 0.8\n"
            "  left out        1 sample (drop_remainder)\n"
            "  stock Keras     a full step 3 + 3 + 3 + 1 samples: each counts 0.833 times in the gradient, "
            "on replica 3 2.5 times\n"
            "                  one more step 1 + 0 + 0 + 0 samples: replicas 1 to 3 get no sample; "
            "each counts 0.25 times in the gradient\n"
            "  batch size      with 10, 2 of 4 replicas wait at each step while the others compute one "
            "sample more: use 8 or 12\n"
            "                  128 gives each replica the 32 samples that Keras gives one device by "
            "default; with fewer steps, try a larger learning rate",
        ),
        (
            {"num_samples": 100, "global_batch_size": 100, "num_replicas": 16},
            "100 samples in 1 step of 100 on 16 replicas\n"
            "  a full step     6 to 7 samples on each of 16 replicas\n"
            "  the last step   6 to 7 samples on each of 16 replicas\n"
            "  shares          uneven steps weigh each replica by its samples: 4 x 1.12, 12 x 0.96\n"
            "  left out        nothing\n"
            "  stock Keras     a full step 14 x 7 + 1 x 2 + 1 x 0 samples: replica 15 gets no sample; "
            "each counts 0.893 times in the gradient, on replica 14 3.12 times\n"
            "  batch size      with 100, 12 of 16 replicas wait at each step while the others compute "
            "one sample more: use 96 or 112\n"
            "                  512 gives each replica the 32 samples that Keras gives one device by "
            "default; with fewer steps, try a larger learning rate",
        ),
        (
            {"num_samples": 9, "global_batch_size": 8, "num_replicas": 1, "drop_remainder": True},
            "9 samples in 1 step of 8 on 1 replica\n"
            "  a full step     8 samples\n"
            "  the last step   8 samples\n"
            "  shares          one replica: nothing to weigh\n"
            "  left out        1 sample (drop_remainder)",
        ),
    ],
)
def test_a_plan_prints_as_a_summary(arguments, text):
    assert str(kg.BatchPlan(**arguments)) == text
    assert repr(kg.BatchPlan(**arguments)) == text  # A notebook shows it without print.


@pytest.mark.parametrize(
    ("sample_bytes", "num_replicas", "prefetch", "strategy", "device_bytes"),
    [
        (10, 4, 2, "MirroredStrategy", 2 * 64 * 10),
        (10, 4, 0, "MirroredStrategy", 64 * 10),
        (10, 3, 1, "MirroredStrategy", 2 * 86 * 10),
        (10, 300, 2, "MirroredStrategy", 2 * 256 * 10),
        (10, 1, 2, "", 256 * 10),  # `fit` of plain Keras takes batches from the host one by one.
        (10, 1, 2, "OneDeviceStrategy", 2 * 256 * 10),
        (None, 4, 2, "", None),
    ],
)
def test_bytes_in_flight_on_each_device(sample_bytes, num_replicas, prefetch, strategy, device_bytes):
    plan = kg.BatchPlan(10**6, 256, num_replicas, sample_bytes=sample_bytes, prefetch=prefetch, strategy=strategy)
    assert plan.device_bytes_in_flight == device_bytes


def test_processors_read_batches_where_they_lie():
    """Only a device with memory of its own needs a copy."""
    arguments = {"num_samples": 64, "global_batch_size": 16, "num_replicas": 2, "sample_bytes": 10}
    on_cpus = kg.BatchPlan(**arguments, devices=("CPU:0", "CPU:1"))
    on_gpus = kg.BatchPlan(**arguments, devices=("GPU:0", "GPU:1"))
    assert on_cpus.device_bytes_in_flight == 0
    assert "on each device" not in str(on_cpus)
    assert "160 bytes on each device (one batch waiting and one in use)" in str(on_gpus)


@pytest.mark.parametrize(
    ("num_samples", "num_replicas", "sizes", "empty_replicas", "factors"),
    [
        (8, 4, (2, 2, 2, 2), (), (1, 1, 1, 1)),
        (5, 4, (2, 2, 1, 0), (3,), (0.625, 0.625, 1.25, 0)),
        (10, 4, (3, 3, 3, 1), (), (2.5 / 3, 2.5 / 3, 2.5 / 3, 2.5)),
        (1, 4, (1, 0, 0, 0), (1, 2, 3), (0.25, 0, 0, 0)),
        (7, 1, (7,), (), (1,)),
    ],
)
def test_what_stock_keras_makes_of_a_batch(num_samples, num_replicas, sizes, empty_replicas, factors):
    stock = kg.BatchPlan(num_samples, 10, num_replicas).stock(0)
    assert (stock.sizes, stock.empty_replicas) == (sizes, empty_replicas)
    assert stock.gradient_factors == pytest.approx(factors)


@pytest.mark.slow
@pytest.mark.parametrize("num_samples", [21, 20, 16, 33, 3])
def test_stock_keras_does_what_the_plan_says_of_it(num_samples):
    """A model with one weight, gradient = sum of factor x sample / samples of the step: powers of two "
    "tell all factors."""
    strategy = tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(4)])
    prepare(strategy)  # Collectives of its own beside those of other tests; nothing else.
    x = 2.0 ** -np.arange(num_samples, dtype="float64")[:, None]
    with strategy.scope():
        model = tf.keras.Sequential(
            [tf.keras.layers.Dense(1, use_bias=False, dtype="float64", kernel_initializer="zeros")]
        )
        model.compile(tf.keras.optimizers.SGD(1.0), lambda y, prediction: -prediction[:, 0])
    model.fit(x, np.zeros(num_samples), batch_size=10, shuffle=False, verbose=0)
    plan = kg.BatchPlan(num_samples, 10, 4)
    expected = 0.0
    for step in range(plan.steps):
        start, stop = plan.samples_of(step)
        stock = plan.stock(step)
        factors = [factor for size, factor in zip(stock.sizes, stock.gradient_factors) for _ in range(size)]
        expected += np.mean(np.array(factors) * x[start:stop, 0])
    assert model.get_weights()[0][0, 0] == pytest.approx(expected, rel=1e-12)


def test_a_feeder_plans_for_the_visible_devices():
    x = np.zeros((100, 3), "float32")
    lines = str(kg.DistributedFeeder(x, batch_size=80).plan()).splitlines()
    assert lines[:3] == [
        "100 samples in 2 steps of 80 on 8 replicas",
        "  devices         CPU:0, CPU:1, CPU:2, CPU:3, CPU:4, CPU:5, CPU:6, CPU:7",
        "  strategy        MirroredStrategy",
    ]
    plan = kg.DistributedFeeder(x, batch_size=80).plan(1)
    assert (plan.devices, plan.strategy) == ((), "none: one device needs none")


@pytest.mark.parametrize(
    ("batch_size", "num_replicas", "advice"),
    [
        (256, 4, []),
        (31, 1, []),
        (3, 4, ["at least 4"]),
        (250, 4, ["2 of 4 replicas wait", "248 or 252"]),
        (255, 4, ["1 of 4 replicas waits", "252 or 256"]),
        (128, 4, []),
        (64, 4, ["128 gives each replica the 32"]),
        (None, 4, ["multiple of 4"]),
    ],
)
def test_advice_on_the_batch_size(batch_size, num_replicas, advice):
    text = " ".join(kg.BatchPlan(None, batch_size, num_replicas).advice)
    assert bool(text) == bool(advice)
    assert not [words for words in advice if words not in text]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_samples": 0, "global_batch_size": 8}, ["0 samples", "nothing to feed", "Check"]),
        (
            {"num_samples": 7, "global_batch_size": 8, "drop_remainder": True},
            ["7 samples", "8", "drop_remainder=False", "smaller batch_size"],
        ),
    ],
)
def test_a_plan_without_steps_is_refused(arguments, words):
    with pytest.raises(kg.SourceError) as caught:
        kg.BatchPlan(num_replicas=4, **arguments)
    assert all(word in str(caught.value) for word in words)


@given(counts, replicas)
def test_parts_are_contiguous_even_and_never_empty(num_samples, num_replicas):
    split = split_batch(num_samples, num_replicas)
    assert len(split.parts) == num_replicas
    assert min(split.sizes) >= 1
    assert max(split.sizes) - min(split.sizes) <= 1
    assert sum(split.shares) == pytest.approx(num_replicas)
    if split.small_tail:
        assert set(split.parts) == {(0, num_samples)}
    else:
        fed = [sample for start, stop in split.parts for sample in range(start, stop)]
        assert fed == list(range(num_samples))


@given(counts, st.integers(1, 600), replicas, st.booleans())
@settings(max_examples=200)
def test_a_pass_covers_every_sample_once(num_samples, batch_size, num_replicas, drop_remainder):
    if drop_remainder and num_samples < batch_size:
        with pytest.raises(kg.SourceError):
            kg.BatchPlan(num_samples, batch_size, num_replicas, drop_remainder)
        return
    plan = kg.BatchPlan(num_samples, batch_size, num_replicas, drop_remainder)
    places = [place for step in range(plan.steps) for place in range(*plan.samples_of(step))]
    assert places == list(range(num_samples - plan.samples_left_out))
    splits = [plan.split(step) for step in range(plan.steps)]
    assert [split.num_samples for split in splits] == [
        stop - start for start, stop in map(plan.samples_of, range(plan.steps))
    ]
    assert plan.has_small_tail == any(split.small_tail for split in splits)
    if plan.even:
        assert all(share == 1.0 for split in splits for share in split.shares)


def test_a_plan_cannot_be_changed():
    plan = kg.BatchPlan(8, 4, 2)
    with pytest.raises(AttributeError):
        plan.num_samples = 9


def test_the_arithmetic_never_mentions_tensorflow():
    assert_mentions_no_tensorflow(plan)


def assert_mentions_no_tensorflow(module):
    """Only names and imports count: prose may speak of TensorFlow."""
    tree = ast.parse(pathlib.Path(module.__file__).read_text())
    imported = {
        name.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }
    imported |= {
        (node.module or "").partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level == 0
    }
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not (imported | used) & {"tensorflow", "tf", "keras"}


def test_a_share_that_is_not_one_does_not_read_one():
    plan = kg.BatchPlan(num_samples=235, global_batch_size=256, num_replicas=4)
    assert "weigh each replica by its samples: 1.004, 1.004, 1.004, 0.9872" in str(plan)


def test_a_plan_of_batches_knows_their_number_but_not_their_samples():
    class Batches(tf.keras.utils.Sequence):
        def __len__(self):
            return 7

        def __getitem__(self, index):
            return np.zeros((4, 2), "float32")

    seen = kg.DistributedFeeder(Batches()).plan(2)
    assert str(seen).splitlines()[0] == "7 steps, batches of the source's own sizes on 2 replicas"
    for ask in (seen.samples_of, seen.split, seen.stock):
        with pytest.raises(kg.SourceError, match=r"not known before the source is read.*BatchPlan\(num_samples"):
            ask(0)
