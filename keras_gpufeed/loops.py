"""A feed for loops that are not Keras's.

Flow:   ... -> pipeline -> [loops] -> feeder -> ...
Owns:   the steps of a loop over a strategy; the parts of a step as plain arrays.
Leaves: weighing what replicas compute (exact), which samples make a step (plan, streams).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any, Callable

import tensorflow as tf

from . import internals
from .errors import SourceError
from .overrides import Override, place_overrides, split_for
from .pipeline import Pipeline
from .plan import Split
from .splitting import as_keras_does
from .streams import BatchStream, SampleStream


class LoopDataset(internals.DistributedDataset):
    """The steps of a feeder for a loop over a strategy. Each `iter` of it is one epoch, with its own order.

    Args:
        pipeline: Brings batches to the devices.
        open_stream: Takes the epoch; gives what is to be read.
        num_steps: Steps of an epoch; None if the source does not say.
    """

    def __init__(self, pipeline: Pipeline, open_stream: Callable[[int], Any], num_steps: int | None) -> None:
        self._pipeline, self._open_stream, self._num_steps = pipeline, open_stream, num_steps
        self._epochs = itertools.count()

    def __len__(self) -> int:
        """Steps of an epoch."""
        if self._num_steps is None:
            raise TypeError("The source does not say how many batches it gives, so there is no length.")
        return self._num_steps

    def __iter__(self) -> Iterator:
        stream = _Loud(self._open_stream(next(self._epochs)))
        iterator = self._pipeline.iterate(stream, on_end=stream.end)
        weakref.finalize(iterator, stream.close).atexit = False  # type: ignore[misc]
        return iterator

    def reduce(self, *_: Any) -> None:
        """What `for` over a distributed dataset in a `tf.function` calls."""
        raise TypeError(
            "A feeder's steps cannot be opened inside a tf.function: it is traced once, and each epoch has its own "
            "order. Open them outside and pass the iterator: `for data in iterator`, with iterator = iter(dataset)."
        )


class _Loud:
    """A stream for readers that do not ask whether it has failed."""

    def __init__(self, stream: SampleStream | BatchStream) -> None:
        self.element_spec, self.meter, self._stream = stream.element_spec, stream.meter, stream

    def read(self, number: int) -> Any:
        batch = self._stream.read(number)
        if batch is None and self._stream.failure is not None:
            self._stream.failure.raise_again()
        return batch

    def end(self) -> None:
        failure = self._stream.failure
        if failure is None and isinstance(self._stream, BatchStream):
            self._stream.allow_next_epoch()
        self.close()
        if failure is not None:
            failure.raise_again()

    def close(self) -> None:
        self._stream.close()


class Passes:
    """A function that gives one epoch after the other as iterators of plain arrays, for `from_generator`.

    Args:
        open_stream: Takes the epoch; gives what is to be read.
        read: Takes a stream; gives the elements.
    """

    def __init__(self, open_stream: Callable[[int], Any], read: Callable[[Any], Iterator]) -> None:
        self._open_stream, self._read = open_stream, read
        self._epochs = itertools.count()
        # The type of a batch may be known only when some have been read; they belong to the first epoch.
        self._opened = [open_stream(next(self._epochs))]
        self.element_spec = self._opened[0].element_spec
        weakref.finalize(self, _close_all, self._opened).atexit = False  # type: ignore[misc]

    def __call__(self) -> Iterator:
        """The elements of the next epoch."""
        return self._read(self._opened.pop() if self._opened else self._open_stream(next(self._epochs)))


def _close_all(streams: list) -> None:
    for stream in streams:
        stream.close()


def steps_of(stream: Any, replica_id: int | None) -> Iterator:
    """The steps of a stream as plain arrays, whole or one replica's part of each.

    Args:
        stream: What to read; closed at the end.
        replica_id: Whose part, of a stream of arrays; None for all.
    """
    spec, loud = stream.element_spec, _Loud(stream)
    try:
        for number in itertools.count():
            batch = loud.read(number) if replica_id is None else stream.read(number, replica_id)
            if batch is None:
                loud.end()
                return
            yield as_keras_does(_pack(spec, batch.arrays))
    finally:
        stream.close()


def parts_of_steps(
    stream: Any, num_replicas: int, overrides: tuple[Override, ...] = ()
) -> Iterator[tuple[Split, list]]:
    """The steps of a stream as plain arrays: how each is split, and the part of each replica.

    Args:
        stream: What to read; closed at the end.
        num_replicas: Replicas to split for.
        overrides: What single replicas get for single inputs.
    """
    spec, loud = stream.element_spec, _Loud(stream)
    try:
        leaves = tf.nest.flatten(spec)
        if not all(isinstance(leaf, tf.TensorSpec) for leaf in leaves):
            raise SourceError(
                "Sparse and ragged arrays can be split by distributed_dataset, or read whole by dataset(); here dense "
                "arrays are needed. Convert them with tf.sparse.to_dense or RaggedTensor.to_tensor."
            )
        placed = place_overrides(overrides, spec)
        for number in itertools.count():
            batch = loud.read(number)
            if batch is None:
                loud.end()
                return
            split, arrays = split_for(batch, num_replicas, placed)
            yield split, [_pack(spec, [array[start:stop] for array in arrays]) for start, stop in split.parts]
    finally:
        stream.close()


def _pack(spec: Any, arrays: list) -> Any:
    if not all(isinstance(leaf, tf.TensorSpec) for leaf in tf.nest.flatten(spec)):
        arrays = [tf.constant(array) for array in arrays]
    return tf.nest.pack_sequence_as(spec, arrays, expand_composites=True)
