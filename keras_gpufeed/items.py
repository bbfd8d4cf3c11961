"""What worker processes are sent: how to make one batch.

Flow:   ... -> buffers -> [items] -> packing -> ... -> workers -> sources -> batch_sources -> ...
Owns:   the picklable callables that give a batch, or an iterator of batches, for numbers.
Leaves: running them (workers), which numbers when (batch_sources). No TensorFlow: a worker starts without it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

import numpy as np

from .order import EpochOrder


def ordered(num: int, seed: int | None, epoch: int) -> list[int]:
    """The numbers below `num` in the order of one pass.

    Args:
        num: How many.
        seed: Fixes the order; None for the natural one.
        epoch: The pass.
    """
    if seed is None or num == 0:
        return list(range(num))
    return EpochOrder(num, seed, epoch).samples(0, num).tolist()


@dataclasses.dataclass(frozen=True)
class BatchOf:
    """Gives batch number `index` of an object that holds batches, such as a Sequence.

    Args:
        batches: The object.
    """

    batches: Any

    def __call__(self, epoch: int, index: int) -> Any:
        """The batch."""
        return self.batches[index]


@dataclasses.dataclass(frozen=True)
class SamplesOf:
    """Gives batch number `index` of a pass over an object that holds single samples.

    Args:
        samples: The object.
        batch_size: Samples of a batch.
        seed: Fixes the order of samples; None for the natural one.
    """

    samples: Any
    batch_size: int
    seed: int | None

    def __call__(self, epoch: int, index: int) -> Any:
        """The samples of the batch, stacked."""
        start, num_samples = index * self.batch_size, len(self.samples)
        numbers: Any = range(start, min(start + self.batch_size, num_samples))
        if self.seed is not None:
            numbers = EpochOrder(num_samples, self.seed, epoch).samples(numbers.start, numbers.stop).tolist()
        return stack([self.samples[number] for number in numbers])


@dataclasses.dataclass(frozen=True)
class PartOf:
    """Gives one worker's part of a generator function.

    Args:
        make_batches: The function.
        names: Which of epoch, worker_id and num_workers it takes.
    """

    make_batches: Callable
    names: tuple[str, ...]

    def __call__(self, epoch: int, worker_id: int = 0, num_workers: int = 1) -> Any:
        """The iterator."""
        known = {"epoch": epoch, "worker_id": worker_id, "num_workers": num_workers}
        return self.make_batches(**{name: known[name] for name in self.names})


def stack(samples: list) -> Any:
    """Samples of the same nested structure, as one structure of arrays with a new first axis."""
    first = samples[0]
    if isinstance(first, dict):
        return {key: stack([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple) or (isinstance(first, list) and not all(np.isscalar(part) for part in first)):
        return tuple(stack([sample[place] for sample in samples]) for place in range(len(first)))
    return together([np.asarray(sample)[None] for sample in samples])


def together(parts: list[np.ndarray]) -> np.ndarray:
    """Arrays of samples, one after the other; an array of objects where samples differ in shape."""
    if len({part.shape[1:] for part in parts}) == 1:
        return np.concatenate(parts)
    return array_of_objects([sample for part in parts for sample in part])


def array_of_objects(items: list) -> np.ndarray:
    """An array whose elements are the items, whatever they are."""
    array = np.empty(len(items), object)
    for place, item in enumerate(items):  # Given the list, NumPy would look into the items.
        array[place] = item
    return array
