"""The order of samples is a permutation that (seed, epoch) alone decide, any window of it on its own."""

import collections
import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan import assert_mentions_no_tensorflow

from keras_gpufeed import order
from keras_gpufeed.order import EpochOrder

seeds = st.integers(-(2**80), 2**80)
epochs = st.integers(0, 10**6)


def whole(num_samples, seed=0, epoch=0):
    return EpochOrder(num_samples, seed, epoch).samples(0, num_samples).tolist()


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4, 5, 7, 16, 17, 1024, 1025, 32767, 32768, 32769, 100_003])
def test_every_sample_comes_once(num_samples):
    assert sorted(whole(num_samples)) == list(range(num_samples))


@given(st.integers(1, 3000), seeds, epochs)
def test_the_order_is_a_permutation(num_samples, seed, epoch):
    samples = EpochOrder(num_samples, seed, epoch).samples(0, num_samples)
    assert samples.dtype == np.int64
    assert sorted(samples.tolist()) == list(range(num_samples))


@given(st.data(), st.integers(1, 100_000), seeds, epochs)
@settings(deadline=None)
def test_a_window_equals_that_of_the_whole(data, num_samples, seed, epoch):
    start = data.draw(st.integers(0, num_samples - 1))
    stop = data.draw(st.integers(start + 1, num_samples))
    expected = EpochOrder(num_samples, seed, epoch).samples(0, num_samples)[start:stop]
    assert (EpochOrder(num_samples, seed, epoch).samples(start, stop) == expected).all()


def test_windows_can_be_asked_for_in_any_sequence():
    order, expected = EpochOrder(100_003, 5, 0), whole(100_003, 5)
    for start, stop in [(90_000, 100_003), (0, 10), (32_760, 32_780), (65_530, 99_999), (0, 100_003)]:
        assert order.samples(start, stop).tolist() == expected[start:stop]


def test_the_same_seed_and_epoch_give_the_same_order():
    assert whole(1000, seed=7, epoch=3) == whole(1000, seed=7, epoch=3)


@pytest.mark.parametrize(
    ("seed", "epoch"), [(8, 3), (-7, 3), (7 + 2**32, 3), (7 + 2**64, 3), (7, 4), (3, 7), (7, 3 + 2**32)]
)
def test_another_seed_or_epoch_gives_another_order(seed, epoch):
    # Two random orders of 1000 samples agree at one place on average; at ten or more in one case of a million.
    same_places = sum(map(int.__eq__, whole(1000, 7, 3), whole(1000, seed, epoch)))
    assert same_places < 10


@pytest.mark.parametrize(
    ("num_samples", "epoch", "start", "expected"),
    [
        (10, 0, 0, [1, 5, 3, 9, 6, 2, 0, 4, 7, 8]),
        (10, 1, 0, [4, 1, 8, 3, 2, 7, 5, 9, 6, 0]),
        (100_003, 0, 0, [34971, 17633, 93455]),
        (2**40, 0, 2**39, [542618704866, 202258797366, 586090579821]),
    ],
)
def test_the_order_never_changes_between_versions(num_samples, epoch, start, expected):
    """A run that is resumed with a newer version must be given the samples that are left."""
    assert EpochOrder(num_samples, 7, epoch).samples(start, start + len(expected)).tolist() == expected


def test_all_orders_of_four_samples_are_equally_frequent():
    num_epochs = 24 * 150
    found = collections.Counter(tuple(whole(4, seed=0, epoch=epoch)) for epoch in range(num_epochs))
    assert set(found) == set(itertools.permutations(range(4)))
    assert chi_square(found.values(), num_epochs / 24) < 65  # 23 degrees of freedom: 1 in 100 000 lies above.


@pytest.mark.parametrize("num_samples", [10, 1000])
def test_every_sample_comes_equally_often_at_the_first_place(num_samples):
    num_epochs = 2000
    first = [int(EpochOrder(num_samples, 1, epoch).samples(0, 1)[0]) for epoch in range(num_epochs)]
    found = np.bincount(np.array(first) * 10 // num_samples, minlength=10)  # In ten classes.
    assert chi_square(found, num_epochs / 10) < 45  # 9 degrees of freedom: 1 in a million lies above.


def test_neighbours_are_torn_apart():
    """A new order over many samples has about one neighbouring pair that was one before, as a random one."""
    pairs = np.abs(np.diff(whole(20_000, seed=3)))
    assert (pairs == 1).sum() < 15
    # The mean distance of two random places is a third of the range.
    assert np.isclose(pairs.mean(), 20_000 / 3, rtol=0.05)


def test_consecutive_epochs_are_not_correlated():
    first, second = whole(20_000, seed=3, epoch=0), whole(20_000, seed=3, epoch=1)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05  # Standard deviation 0.007.


def test_memory_does_not_grow_with_the_samples():
    tracemalloc.start()
    samples = EpochOrder(2**40, seed=1, epoch=0).samples(2**39, 2**39 + 256)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(samples.tolist())) == 256
    assert samples.min() >= 0
    assert samples.max() < 2**40
    assert peak < 8e6


@pytest.mark.parametrize("num_samples", [2**32 - 1, 2**32, 2**32 + 1, 2**53 + 1, 2**62])
def test_huge_numbers_of_samples_do_not_overflow(num_samples):
    order = EpochOrder(num_samples, seed=1, epoch=0)
    for start in (0, num_samples // 2, num_samples - 1000):
        samples = order.samples(start, start + 1000)
        assert len(set(samples.tolist())) == 1000
        assert samples.min() >= 0
        assert samples.max() < num_samples
        assert samples.max() > num_samples // 2


def test_the_global_random_state_is_neither_used_nor_changed():
    np.random.seed(1)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    first = whole(100, seed=1)
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002
    np.random.seed(2)  # noqa: NPY002
    assert whole(100, seed=1) == first


def test_the_arithmetic_never_mentions_tensorflow():
    assert_mentions_no_tensorflow(order)


def chi_square(found, expected):
    return sum((count - expected) ** 2 / expected for count in found)
