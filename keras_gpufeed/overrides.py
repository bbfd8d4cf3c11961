"""Other values for one input on one replica.

Flow:   ... -> sources -> [overrides] -> streams -> pipeline -> ...
Owns:   finding the input, and writing the values into the replica's part of a batch.
Leaves: reading batches (streams), where they are cut (plan).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from .errors import SourceError
from .plan import Split, split_batch, split_of_sizes
from .sources import ArraySource, Samples


@dataclasses.dataclass(frozen=True, eq=False)
class Override:
    """What one replica gets for one input.

    Args:
        replica_id: The replica.
        name: Key of the input in x.
        value: Its value for a sample, the same for all; unused if there is one for each sample.
        extra: For one for each sample: its number among the arrays that come behind those of the batch.
    """

    replica_id: int
    name: str
    value: Any = None
    extra: int | None = None

    def place_in(self, element_spec: Any) -> int:
        """Where the input stands in the flat list of a batch's arrays."""
        specs = tf.nest.flatten(element_spec)
        places = tf.nest.pack_sequence_as(element_spec, list(range(len(specs))))[0]
        if not isinstance(places, dict) or not isinstance(places.get(self.name), int):
            names = f"the inputs {sorted(map(str, places))}" if isinstance(places, dict) else "no names"
            raise SourceError(
                f"override names the input {self.name!r}, but x has {names}. Pass x as a dict from names to arrays."
            )
        if not all(isinstance(spec, tf.TensorSpec) for spec in specs):
            raise SourceError("override needs dense arrays; x, y or sample_weight holds sparse or ragged ones.")
        return places[self.name]

    def constant(self, spec: tf.TensorSpec) -> Any:
        """The value in the shape and dtype of one sample."""
        dtype = object if spec.dtype == tf.string else spec.dtype.as_numpy_dtype
        value = np.asarray(self.value)
        try:
            if dtype is object:
                value = np.array(tf.convert_to_tensor(self.value, tf.string).numpy(), object)
            return np.broadcast_to(value.astype(dtype, casting="same_kind"), spec.shape[1:])
        except (TypeError, ValueError):
            raise SourceError(
                f"The value of {self.name!r} for replica {self.replica_id} has shape {value.shape} and dtype "
                f"{value.dtype}, but a sample of that input has shape {tuple(spec.shape[1:])} and dtype "
                f"{spec.dtype.name}. Pass one such value, or for arrays one for each sample."
            ) from None


class WithExtras:
    """A source that reads further arrays behind its own, for the same samples.

    Args:
        source: Any index-addressed source.
        extras: The further arrays.
    """

    def __init__(self, source: Any, extras: ArraySource) -> None:
        self._source, self._extras = source, extras
        self.num_samples, self.element_spec = source.num_samples, source.element_spec
        self.sample_bytes, self.is_in_memory = source.sample_bytes, source.is_in_memory and extras.is_in_memory

    def read(self, samples: Samples) -> list[np.ndarray]:
        """The components of one batch, and then those of the further arrays."""
        return [*self._source.read(samples), *self._extras.read(samples)]


def is_for_each_sample(value: Any, spec: tf.TensorSpec, num_samples: int) -> bool:
    """True if `value` holds one value for each sample, not one for all of them."""
    shape = np.shape(value)
    return len(shape) == len(spec.shape) and shape[0] == num_samples


def place_overrides(overrides: tuple[Override, ...], element_spec: Any) -> tuple[tuple, ...]:
    """Each override with the place of its input among a batch's arrays, and its constant value if it has one.

    Args:
        overrides: The overrides.
        element_spec: The type of a batch.
    """
    specs, placed = tf.nest.flatten(element_spec), []
    for override in overrides:
        place = override.place_in(element_spec)
        placed.append((override, place, None if override.extra is not None else override.constant(specs[place])))
    return tuple(placed)


def split_for(batch: Any, num_replicas: int, overrides: tuple[tuple, ...]) -> tuple[Split, list]:
    """Where a batch is cut, and its arrays with the overrides written into them.

    Args:
        batch: What a stream gave; its arrays may have those of `WithExtras` behind them.
        num_replicas: Replicas in sync.
        overrides: `(override, place, constant)` for each of them.
    """
    num_samples, arrays = batch.num_samples, batch.arrays
    split = split_batch(num_samples, num_replicas) if batch.sizes is None else split_of_sizes(batch.sizes)
    if not overrides:
        return split, arrays
    num_arrays = len(arrays) - sum(override.extra is not None for override, *_ in overrides)
    arrays, extras, parts = arrays[:num_arrays], arrays[num_arrays:], split.parts
    if split.small_tail:  # All replicas get the same samples, and now one of them does not.
        arrays = [np.concatenate([array] * num_replicas) for array in arrays]
        starts = range(0, num_samples * num_replicas, num_samples)
        split = dataclasses.replace(split, parts=tuple((start, start + num_samples) for start in starts))
    for override, place, constant in overrides:
        start, stop = split.parts[override.replica_id]
        if override.extra is None:
            arrays[place][start:stop] = constant
        else:
            arrays[place][start:stop] = extras[override.extra][slice(*parts[override.replica_id])]
    return split, arrays
