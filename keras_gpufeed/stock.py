"""What stock Keras does with a batch, to be compared with what is done here.

Flow:   errors -> [stock] -> plan -> ...
Owns:   the split of stock Keras 2.15 under a `MirroredStrategy`, and what it does to the gradient.
Leaves: the split that is used (plan).
"""

from __future__ import annotations

import dataclasses

MOST_SHOWN_ONE_BY_ONE = 8  # Replicas in a line; more are counted.


@dataclasses.dataclass(frozen=True)
class StockSplit:
    """One global batch as `fit` with arrays cuts it under a `MirroredStrategy`, without this package.

    TensorFlow gives each replica the samples of one replica rounded up, in order, until none are left. Keras
    then takes the mean over each replica's samples and the mean of these over all replicas.

    Args:
        sizes: Samples on each replica.

    Example:
        >>> stock_split(5, 4)
        StockSplit(sizes=(2, 2, 1, 0))
        >>> stock_split(5, 4).empty_replicas, stock_split(5, 4).gradient_factors
        ((3,), (0.625, 0.625, 1.25, 0.0))
    """

    sizes: tuple[int, ...]

    @property
    def empty_replicas(self) -> tuple[int, ...]:
        """Numbers of the replicas that get an empty batch."""
        return tuple(replica for replica, size in enumerate(self.sizes) if size == 0)

    @property
    def gradient_factors(self) -> tuple[float, ...]:
        """How many times too much a sample of each replica weighs in the gradient; 1 is right, 0 has no sample."""
        even_size = sum(self.sizes) / len(self.sizes)
        return tuple(even_size / size if size else 0.0 for size in self.sizes)

    @property
    def is_right(self) -> bool:
        """True if no replica is empty and every sample weighs the same."""
        return len(set(self.sizes)) == 1

    def __str__(self) -> str:
        num_replicas, num_empty = len(self.sizes), len(self.empty_replicas)
        parts = " + ".join(str(size) for size in self.sizes)
        if num_replicas > MOST_SHOWN_ONE_BY_ONE:
            parts = " + ".join(f"{self.sizes.count(size)} x {size}" for size in dict.fromkeys(self.sizes))
        if self.is_right:
            return f"{parts} samples"
        nothing = ""
        if num_empty:
            first, last = self.empty_replicas[0], self.empty_replicas[-1]
            nothing = (
                f"replica {last} gets no sample; "
                if num_empty == 1
                else f"replicas {first} {'and' if num_empty == 2 else 'to'} {last} get no sample; "
            )
        factors = list(dict.fromkeys(factor for factor in self.gradient_factors if factor))
        others = f", on replica {self.gradient_factors.index(factors[-1])} {factors[-1]:.3g} times"
        return (
            f"{parts} samples: {nothing}each counts {factors[0]:.3g} times in the gradient"
            f"{others if len(factors) > 1 else ''}"
        )


def stock_split(num_samples: int, num_replicas: int) -> StockSplit:
    """How stock Keras cuts a global batch.

    Args:
        num_samples: Samples in the global batch, at least 1.
        num_replicas: Replicas in sync, at least 1.

    Returns:
        The `StockSplit`.
    """
    size = -(-num_samples // num_replicas)
    return StockSplit(tuple(max(0, min(size, num_samples - replica * size)) for replica in range(num_replicas)))
