"""The order of samples in a pass, as a function of (seed, epoch), in constant memory.

Flow:   errors -> plan -> [order] -> sources -> ...
Owns:   the permutation; the seed of each sample, for random transforms.
Leaves: how many samples a step takes (plan), reading them (sources).

The permutation is a Feistel network over the grid `rows x columns` that just covers the samples: each round
shifts one coordinate by a keyed hash of the other, which can always be undone, so the network is a
permutation of the grid. The few places of the grid beyond the last sample are walked through until the walk
is back among the samples (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
Any place of the order can be computed on its own, so a run can start anywhere and nothing grows with the data.
"""

from __future__ import annotations

import math

import numpy as np

_ROUNDS = 12  # Fewer show: with 8, the 120 orders of 5 samples do not come up equally often over epochs.
_BLOCK = 1 << 15  # Places computed at once: NumPy's cost per call is then spread over many steps.


def sample_seeds(seed: int, epoch: int, samples: np.ndarray) -> np.ndarray:
    """Seeds for `tf.random.stateless_*`, one for each sample, that depend on nothing but the arguments.

    Args:
        seed: Any Python integer.
        epoch: The pass, from 0.
        samples: Numbers of samples, of shape `(batch,)`.

    Returns:
        An int32 array of shape `(batch, 2)`.

    Example:
        >>> first, second = sample_seeds(7, 0, np.array([3, 4])), sample_seeds(7, 0, np.array([4, 3]))
        >>> (first == second[::-1]).all(), (first[0] == first[1]).any()
        (True, False)
    """
    key = np.random.SeedSequence([abs(seed), int(seed < 0), epoch]).generate_state(1, np.uint64)
    # SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
    mixed = key + (np.asarray(samples, np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))).view(np.int32).reshape(-1, 2)


class EpochOrder:
    """A pseudo-random permutation of `range(num_samples)`.

    Args:
        num_samples: Samples in one pass, from 1 to 2**62.
        seed: Any Python integer.
        epoch: The pass, from 0.

    Example:
        >>> order = EpochOrder(5, seed=7, epoch=0)
        >>> sorted(order.samples(0, 5).tolist())
        [0, 1, 2, 3, 4]
        >>> (order.samples(0, 5)[2:4] == order.samples(2, 4)).all()
        True
    """

    def __init__(self, num_samples: int, seed: int, epoch: int) -> None:
        self._num_samples = num_samples
        self._rows = math.isqrt(num_samples - 1) + 1
        self._columns = -(-num_samples // self._rows)
        # Coordinates fill half a word, so that their product with a hash of that size fits the word.
        self._word = np.uint32 if self._rows <= 1 << 16 else np.uint64
        # SeedSequence takes integers of any size, but no negative ones.
        entropy = [abs(seed), int(seed < 0), epoch, num_samples]
        self._keys = np.random.SeedSequence(entropy).generate_state(_ROUNDS, self._word)
        self._block_index = -1
        self._block = np.empty(0, np.int64)

    def samples(self, start: int, stop: int) -> np.ndarray:
        """The samples at the places `start` to `stop` of the order.

        Args:
            start: First place, from 0.
            stop: One past the last place, at most `num_samples`.

        Returns:
            An int64 array of shape `(stop - start,)`.
        """
        parts = []
        for block_index in range(start // _BLOCK, (stop - 1) // _BLOCK + 1):
            if block_index != self._block_index:
                self._block, self._block_index = self._compute(block_index), block_index
            first = block_index * _BLOCK
            parts.append(self._block[max(start - first, 0) : stop - first])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _compute(self, block_index: int) -> np.ndarray:
        start = block_index * _BLOCK
        places = np.arange(start, min(start + _BLOCK, self._num_samples), dtype=np.int64)
        places = self._permute(places)
        while (outside := places >= self._num_samples).any():
            places[outside] = self._permute(places[outside])
        return places

    def _permute(self, places: np.ndarray) -> np.ndarray:
        row, column = (part.astype(self._word) for part in np.divmod(places, self._columns))
        for round_, key in enumerate(self._keys):
            if round_ % 2:
                column = self._shift(column, row, key, self._columns)
            else:
                row = self._shift(row, column, key, self._rows)
        return row.astype(np.int64) * self._columns + column.astype(np.int64)

    def _shift(self, values: np.ndarray, other: np.ndarray, key: np.ndarray, size: int) -> np.ndarray:
        """Adds a hash of `other`, scaled to `range(size)`, to `values` modulo `size`."""
        word = self._word
        half = word(4 * np.dtype(word).itemsize)
        # Two rounds of multiply and fold, after MurmurHash3's finaliser (Appleby, 2011).
        mixed = (other ^ key) * word(0x85EBCA6B)
        mixed ^= mixed >> word(13)
        mixed *= word(0xC2B2AE35)
        mixed >>= half
        mixed *= word(size)
        mixed >>= half
        mixed += values
        # Unsigned: where nothing is to be taken off, the difference wraps round to a huge number.
        return np.minimum(mixed, mixed - word(size))
