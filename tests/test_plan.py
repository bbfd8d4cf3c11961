"""Which samples each replica gets in each step: tables of literal expectations, then what always holds."""

import ast
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keras_gpufeed as kg
from keras_gpufeed import plan
from keras_gpufeed.plan import split_batch

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
    assert str(plan) == "batches of the source's own sizes on 4 replicas"


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
            "  left out        nothing",
        ),
        (
            {
                "num_samples": 1025,
                "global_batch_size": 256,
                "num_replicas": 2,
                "devices": ("GPU:0", "GPU:1"),
                "sample_bytes": 3136,
            },
            "1025 samples in 5 steps of 256 on 2 replicas\n"
            "  devices         GPU:0, GPU:1\n"
            "  a full step     128 + 128 samples\n"
            "  the last step   1 sample: all 2 replicas compute it, replica 0 counts it\n"
            "  shares          all steps even: no replica weighs more than another\n"
            "  left out        nothing\n"
            "  bytes in flight 2.41 MB on the host (2 global batches ahead and one in use)",
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
