"""Sources that give whole batches: generators, Sequences, data sets and other iterables.

Flow:   ... -> workers -> sources -> [batch_sources] -> streams -> pipeline -> ...
Owns:   telling the kinds apart; one pass over each as an iterator of batches; making batches uniform.
Leaves: reading ahead of the training (streams), processes (workers).

A batch source offers `num_batches` of a pass and `num_samples` (None if unknown), `can_repeat`,
`waits_for_epoch_end`, `lends_memory`, `on_epoch_end()`, `close()` and `batches(epoch, seed, start)`: one pass,
from batch `start` on. With workers, it makes the batches in processes; the numbers and the order stay the same.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import queue
import threading
from collections.abc import Iterator
from typing import Any, Callable, cast

import numpy as np
import tensorflow as tf

from .buffers import BufferPool
from .composites import (
    are_sequences,
    arrays_of_tensor,
    as_tensor,
    concatenate,
    expand,
    is_composite,
    num_samples_of,
    spec_of_tensor,
    take,
)
from .errors import SourceError
from .items import BatchOf, PartOf, SamplesOf, ordered, stack, together
from .sources import as_batch_structure, encode_strings, fed_dtype, make_padded_component
from .workers import WorkerPool

DEFAULT_BATCH_SIZE = 32  # As in Keras.

Batch = list  # Flat list of arrays, in the order of `tf.nest.flatten`.


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
    """How batches are made in processes.

    Args:
        num_workers: Number of processes, at least 1.
        seed: Seeds NumPy's and Python's random state there.
        prefetch: Batches that may wait.
        start_method: As for `WorkerPool`.
        stall_seconds: As for `WorkerPool`.
        stall_limit_seconds: As for `WorkerPool`.
    """

    num_workers: int
    seed: int
    prefetch: int
    start_method: str | None
    stall_seconds: float
    stall_limit_seconds: float | None


class _Pools:
    """Worker pools for one callable: one, or several while several passes are under way at once."""

    def __init__(self, source: Any, settings: WorkerSettings) -> None:
        self._source, self._settings = source, settings
        self._lock = threading.Lock()
        self._all: list[WorkerPool] = []
        self._idle: list[WorkerPool] = []
        self._idle.append(self._make())  # Before the model is traced, and to refuse at once what cannot be pickled.

    def _make(self) -> WorkerPool:
        settings = dataclasses.asdict(self._settings)
        pool = WorkerPool(self._source, settings.pop("num_workers"), **settings)
        self._all.append(pool)
        return pool

    def update(self, source: Any) -> None:
        with self._lock:
            self._source = source
            for pool in self._all:
                pool.update(source)

    def run(self, start: Callable[[WorkerPool], Iterator]) -> Iterator:
        with self._lock:
            pool = self._idle.pop() if self._idle else self._make()
        try:
            yield from start(pool)
        finally:
            with self._lock:
                self._idle.append(pool)

    def close(self) -> None:
        with self._lock:
            for pool in self._all:
                pool.close()  # One that waits for an item wakes with an error.


class BatchSource:
    """What sources have in common unless they say otherwise."""

    num_batches: int | None = None
    num_samples: int | None = None
    can_repeat = True
    waits_for_epoch_end = False  # True: a pass may begin only when the epoch before has been trained.
    _pools: _Pools | None = None

    @property
    def lends_memory(self) -> bool:
        """True if the arrays of a batch are aligned, and nobody else's until they are garbage."""
        return self._pools is not None

    def on_epoch_end(self) -> None:
        """Told when an epoch has been trained."""

    def keeping_remainder(self) -> BatchSource:
        """The source for evaluation and prediction, which leave out nothing."""
        return self

    def close(self) -> None:
        """Ends the worker processes."""
        if self._pools is not None:
            self._pools.close()

    def batches(self, epoch: int, seed: int | None, start: int) -> Iterator:
        """The batches of one pass, as the user's code gives them.

        Args:
            epoch: The pass, from 0.
            seed: Fixes the order, where a source can choose it; None for its own order.
            start: How many batches to leave out at the beginning.
        """
        raise AssertionError("Each source says how it is read.")


class GeneratorSource(BatchSource):
    """A function that returns a fresh iterator of batches for each pass.

    Args:
        make_batches: Called once for each pass, with `epoch=` if it takes an argument of that name; in workers
            also with `worker_id=` and `num_workers=`.
        count: Tells the number of batches of the next pass, if it is known.
        workers: How to make batches in processes; None for this one.
    """

    def __init__(
        self,
        make_batches: Callable,
        count: Callable[[], int] | None = None,
        workers: WorkerSettings | None = None,
    ) -> None:
        self._count = count
        shard_names = ("worker_id", "num_workers")
        names = ("epoch", *shard_names) if workers is not None else ("epoch",)
        taken = tuple(name for name in names if takes(make_batches, name))
        self._make_part = PartOf(make_batches, taken)
        if workers is not None:
            if workers.num_workers > 1 and not set(shard_names) <= set(taken):
                raise SourceError(
                    f"workers={workers.num_workers} was asked for, but the generator function does not take "
                    "worker_id and num_workers, so each worker would give the same batches. Let it take both and "
                    "give only its part, or use workers=1."
                )
            self._pools = _Pools(self._make_part, workers)

    @property
    def num_batches(self) -> int | None:  # type: ignore[override]
        """Batches of the next pass, if their number is known."""
        return None if self._count is None else self._count()

    def batches(self, epoch: int, seed: int | None, start: int) -> Iterator:
        """The batches of one pass."""
        if self._pools is not None:
            return _skip(self._pools.run(lambda pool: pool.stream(epoch)), start)
        made = self._make_part(epoch)
        if not hasattr(made, "__iter__"):
            raise SourceError(
                f"The generator function returned a {type(made).__name__}, not an iterator of batches. "
                "It must contain `yield`, or return an iterable."
            )
        return _skip(_check_length(iter(made), self.num_batches), start)


class IteratorSource(BatchSource):
    """A generator object or iterator: one pass, read on from wherever it stands.

    Args:
        iterator: Gives batches.
    """

    can_repeat = False

    def __init__(self, iterator: Iterator) -> None:
        self._iterator = iterator

    def batches(self, epoch: int, seed: int | None, start: int) -> Iterator:
        """What is left of the iterator."""
        return _skip(self._iterator, start)


class SequenceSource(BatchSource):
    """A `keras.utils.Sequence`, batch by batch, each fetched once.

    Args:
        sequence: The Sequence.
        workers: How to make batches in processes; None for this one.
    """

    def __init__(self, sequence: tf.keras.utils.Sequence, workers: WorkerSettings | None = None) -> None:
        self._sequence = sequence
        # Without a hook of its own, reading may run ahead of the epoch that is being trained.
        self.waits_for_epoch_end = type(sequence).on_epoch_end is not tf.keras.utils.Sequence.on_epoch_end
        if workers is not None:
            self._pools = _Pools(BatchOf(sequence), workers)

    @property
    def num_batches(self) -> int:  # type: ignore[override]
        """Batches of the next pass; a Sequence may change its length between epochs."""
        return len(self._sequence)

    def on_epoch_end(self) -> None:
        """Tells the Sequence that an epoch has been trained; the workers then get its new state."""
        self._sequence.on_epoch_end()
        if self._pools is not None and self.waits_for_epoch_end:
            self._pools.update(BatchOf(self._sequence))

    def batches(self, epoch: int, seed: int | None, start: int) -> Iterator:
        """The batches of one pass, in the order of (seed, epoch)."""
        order = ordered(self.num_batches, seed, epoch)[start:]
        if self._pools is not None:
            return self._pools.run(lambda pool: pool.map((epoch, index) for index in order))
        return (self._sequence[index] for index in order)


class QueueSource(BatchSource):
    """A queue that the user's code fills; None ends a pass.

    Args:
        items: The queue.
    """

    def __init__(self, items: queue.Queue) -> None:
        self._items = items

    def batches(self, epoch: int, seed: int | None, start: int) -> Iterator:
        """What comes out of the queue up to the next None."""
        return _skip(iter(self._items.get, None), start)


class Regrouped(BatchSource):
    """A batch source whose samples are put together to global batches of one size.

    Args:
        source: Gives batches, or single samples.
        batch_size: Global batch size.
        batched: False if `source` gives single samples.
        drop_remainder: Whether to leave out a last, smaller batch.
    """

    def __init__(self, source: Any, batch_size: int, batched: bool, drop_remainder: bool) -> None:
        self._source, self._batch_size = source, batch_size
        self._batched, self._drop_remainder = batched, drop_remainder
        self.can_repeat, self.waits_for_epoch_end = source.can_repeat, source.waits_for_epoch_end

    def keeping_remainder(self) -> BatchSource:
        """The same without `drop_remainder`."""
        return Regrouped(self._source, self._batch_size, self._batched, drop_remainder=False)

    @property
    def num_batches(self) -> int | None:  # type: ignore[override]
        """Known only if single samples are counted."""
        num_samples = None if self._batched else self._source.num_batches
        if num_samples is None:
            return None
        return _num_batches(num_samples, self._batch_size, self._drop_remainder)

    def on_epoch_end(self) -> None:
        """Passed on."""
        self._source.on_epoch_end()

    def close(self) -> None:
        """Passed on."""
        self._source.close()

    def batches(self, epoch: int, seed: int | None, start: int) -> Iterator:
        """The batches of one pass, regrouped."""
        return _skip(self._regroup(self._source.batches(epoch, seed, 0)), start)

    def _regroup(self, items: Iterator) -> Iterator:
        waiting: list[list] = []
        num_waiting, structure = 0, None
        for item in items:
            structure = as_batch_structure(item)
            leaves = [_as_leaf(leaf) for leaf in tf.nest.flatten(structure)]
            if not self._batched:
                leaves = [expand(leaf) for leaf in leaves]
            waiting.append(leaves)
            num_waiting += _num_samples(leaves[0])
            if num_waiting < self._batch_size:
                continue
            joined = [_join_parts(parts) for parts in zip(*waiting)]
            start = 0
            while num_waiting >= self._batch_size:
                stop = start + self._batch_size
                yield tf.nest.pack_sequence_as(structure, [take(leaf, start, stop) for leaf in joined])
                start, num_waiting = stop, num_waiting - self._batch_size
            waiting = [[take(leaf, start, start + num_waiting) for leaf in joined]] if num_waiting else []
        if num_waiting and not self._drop_remainder:
            yield tf.nest.pack_sequence_as(structure, [_join_parts(parts) for parts in zip(*waiting)])


class MapSource(BatchSource):
    """An object that gives its samples one by one, by number: a map-style data set.

    Args:
        samples: Has a length and gives sample number i as `samples[i]`: x, (x, y) or (x, y, sample_weight).
        batch_size: Global batch size.
        drop_remainder: Whether to leave out a last, smaller batch.
        workers: How to make batches in processes; None for this one.
    """

    def __init__(
        self, samples: Any, batch_size: int, drop_remainder: bool, workers: WorkerSettings | None = None
    ) -> None:
        self._samples, self._batch_size, self._drop_remainder = samples, batch_size, drop_remainder
        self._workers = workers
        self._pools_of: dict[int | None, _Pools] = {}
        if workers is not None:
            self._pools_for(workers.seed)

    def _pools_for(self, seed: int | None) -> _Pools:
        """Workers know the order by the seed, so evaluation in natural order has workers of its own."""
        if seed not in self._pools_of:
            source = SamplesOf(self._samples, self._batch_size, seed)
            self._pools_of[seed] = _Pools(source, cast(WorkerSettings, self._workers))
        return self._pools_of[seed]

    @property
    def lends_memory(self) -> bool:
        """True with workers."""
        return self._workers is not None

    def keeping_remainder(self) -> BatchSource:
        """The same without `drop_remainder`, with the same workers."""
        source = copy.copy(self)
        source._drop_remainder = False
        return source

    def close(self) -> None:
        """Ends the worker processes."""
        for pools in self._pools_of.values():
            pools.close()

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """Samples of the next pass."""
        return len(self._samples)

    @property
    def num_batches(self) -> int:  # type: ignore[override]
        """Batches of the next pass."""
        return _num_batches(self.num_samples, self._batch_size, self._drop_remainder)

    def batches(self, epoch: int, seed: int | None, start: int) -> Iterator:
        """The batches of one pass, in the order of (seed, epoch)."""
        numbers = range(start, self.num_batches)
        if self._workers is not None:
            return self._pools_for(seed).run(lambda pool: pool.map((epoch, number) for number in numbers))
        order = ordered(self.num_samples, seed, epoch)
        size = self._batch_size
        chosen = (order[number * size : (number + 1) * size] for number in numbers)
        return (stack([self._samples[place] for place in places]) for places in chosen)


class EveryNthBatch(BatchSource):
    """Every n-th batch of a source; the others are made and left out.

    Args:
        source: The source.
        first: Its first batch here.
        stride: How far it is from one batch to the next.
    """

    def __init__(self, source: BatchSource, first: int, stride: int) -> None:
        self._source, self._first, self._stride = source, first, stride
        self.can_repeat, self.waits_for_epoch_end = source.can_repeat, source.waits_for_epoch_end

    @property
    def lends_memory(self) -> bool:
        """As of the source."""
        return self._source.lends_memory

    @property
    def num_batches(self) -> int | None:  # type: ignore[override]
        """Batches of the next pass, if their number is known."""
        total = self._source.num_batches
        return None if total is None else len(range(self._first, total, self._stride))

    def keeping_remainder(self) -> BatchSource:
        """Every n-th batch where nothing is left out."""
        return EveryNthBatch(self._source.keeping_remainder(), self._first, self._stride)

    def on_epoch_end(self) -> None:
        """Passed on."""
        self._source.on_epoch_end()

    def close(self) -> None:
        """Passed on."""
        self._source.close()

    def batches(self, epoch: int, seed: int | None, start: int) -> Iterator:
        """The batches of one pass."""
        first = self._first + start * self._stride
        return itertools.islice(self._source.batches(epoch, seed, 0), first, None, self._stride)


def make_batch_source(
    x: Any, batch_size: int | None, batched: bool, drop_remainder: bool, workers: WorkerSettings | None
) -> BatchSource | None:
    """The batch source for `x`, or None if `x` is arrays.

    Args:
        x: What the user handed over.
        batch_size: Global batch size, or None to keep the sizes of `x`.
        batched: False if `x` gives single samples.
        drop_remainder: Whether to leave out a last batch smaller than `batch_size`.
        workers: How to make batches in processes; None for this one.
    """
    if isinstance(x, BatchSource):
        return x
    if _is_map(x) and not isinstance(x, (tf.keras.utils.Sequence, tf.data.Dataset)):
        return MapSource(x, batch_size or DEFAULT_BATCH_SIZE, drop_remainder, workers)
    if isinstance(x, tf.distribute.DistributedDataset):
        raise SourceError(
            "x is a DistributedDataset, which is split over replicas already. Pass the data set that it was made from."
        )
    source = _source_of(x, workers)
    if source is None or (batched and batch_size is None):
        return source
    return Regrouped(source, batch_size or DEFAULT_BATCH_SIZE, batched, drop_remainder)


def is_batch_source(x: Any) -> bool:
    """True if `x` is no array, but something that gives batches or samples."""
    if isinstance(x, tf.distribute.DistributedDataset) or x is None or _is_data(x):
        return False
    return isinstance(x, queue.Queue) or callable(x) or hasattr(x, "__next__") or hasattr(x, "__iter__") or _is_map(x)


def _is_map(x: Any) -> bool:
    return hasattr(x, "__getitem__") and hasattr(x, "__len__") and not _is_data(x)


def _is_data(x: Any) -> bool:
    is_structure = isinstance(x, (list, tuple, dict, str, bytes))
    return is_structure or hasattr(x, "shape") or hasattr(x, "__array__") or hasattr(x, "tocsr")


def _source_of(x: Any, workers: WorkerSettings | None) -> BatchSource | None:
    if isinstance(x, tf.keras.utils.Sequence):
        return SequenceSource(x, workers)
    if _is_data(x):
        return None
    is_other = isinstance(x, (tf.data.Dataset, queue.Queue)) or hasattr(x, "__next__")
    if callable(x) and not is_other:
        return GeneratorSource(x, workers=workers)
    if workers is not None:
        raise SourceError(
            f"workers={workers.num_workers} needs a source that other processes can run: a generator function, a "
            f"keras.utils.Sequence, or an object that gives samples by number. Received a {type(x).__name__}. "
            "Leave workers out."
        )
    if isinstance(x, tf.data.Dataset):
        cardinality = int(x.cardinality())
        return GeneratorSource(x.__iter__, None if cardinality < 0 else lambda: cardinality)
    if isinstance(x, queue.Queue):
        return QueueSource(x)
    if hasattr(x, "__next__"):
        return IteratorSource(x)
    if hasattr(x, "__iter__"):
        return GeneratorSource(x.__iter__, x.__len__ if hasattr(x, "__len__") else None)
    return None


class JoinedBatch(tuple):
    """A global batch whose source decides how many samples of it each replica gets."""

    sizes: tuple[int, ...]


class BatchCaster:
    """Makes batches uniform: checks each against the first ones and copies it into aligned memory.

    Args:
        element_spec: The type of a batch, or None to learn it.
        keeps_memory: True if aligned arrays need no copy, because they are nobody else's.
        padding_value: Fills up samples of unequal length; None refuses them.
    """

    def __init__(self, element_spec: Any, keeps_memory: bool, padding_value: float | None) -> None:
        self._keeps_memory, self._padding_value = keeps_memory, padding_value
        self.element_spec = None if element_spec is None else as_batch_structure(element_spec)
        self._pools: list[BufferPool] = []
        self.copied_bytes = 0  # So far.

    def hold(self, batch: Any) -> tuple:
        """A batch that stays as it is: the user's code may fill the same arrays again."""

        def copied(leaf: Any) -> Any:
            leaf = _as_leaf(leaf)
            return copy.deepcopy(leaf) if isinstance(leaf, np.ndarray) else leaf

        return cast(tuple, tf.nest.map_structure(copied, as_batch_structure(batch)))

    def learn(self, batches: list) -> None:
        """Takes the type from the first batches: an axis whose length changes among them may change later on.

        Args:
            batches: What `hold` gave.
        """
        first, *others = batches
        specs = [self._spec_of(leaf) for leaf in tf.nest.flatten(first)]
        for other in others:
            leaves = tf.nest.flatten(other)
            if len(leaves) == len(specs):
                specs = [_join(spec, self._spec_of(leaf)) for spec, leaf in zip(specs, leaves)]
        self.element_spec = tf.nest.pack_sequence_as(first, specs)

    def cast(self, batch: Any, name: str) -> tuple[int, Batch]:
        """The number of samples of a batch, and its arrays, aligned and of the right type.

        Args:
            batch: As the user's code gave it.
            name: What to call it in messages, such as "Batch 3 of epoch 0".
        """
        structure = as_batch_structure(batch)
        try:
            tf.nest.assert_same_structure(self.element_spec, structure)
        except (TypeError, ValueError):
            raise SourceError(
                f"{name} does not have the structure of the first one. Received "
                f"{_describe(structure)}, expected {_describe(self.element_spec)}. "
                "Every batch must be x, (x,), (x, y) or (x, y, sample_weight) with the same nesting."
            ) from None
        specs, leaves = tf.nest.flatten(self.element_spec), tf.nest.flatten(structure)
        self._pools = self._pools or [BufferPool() for _ in specs]
        arrays: Batch = []
        lengths = set()
        for leaf, spec, pool in zip(map(_as_leaf, leaves), specs, self._pools):
            if isinstance(leaf, np.ndarray) and isinstance(spec, tf.TensorSpec):
                arrays.append(self._cast_one(leaf, spec, pool, name))
                lengths.add(len(arrays[-1]))
            elif isinstance(leaf, np.ndarray) or not spec.is_compatible_with(leaf):
                raise SourceError(
                    f"{name} does not fit the first ones. Received {_describe(leaf)}, "
                    f"expected {_describe(spec)}. Give batches of one kind, or pass element_spec=."
                )
            else:
                arrays.extend(arrays_of_tensor(leaf))
                lengths.add(num_samples_of(leaf))
        if len(lengths) > 1:
            raise SourceError(
                f"{name} has arrays that differ along their first axis; all must have the same number of samples. "
                f"Received {_describe(structure)}."
            )
        if lengths == {0}:
            raise SourceError(f"{name} holds no sample. Leave out batches that a filter has emptied.")
        return lengths.pop(), arrays

    def _cast_one(self, array: np.ndarray, spec: tf.TensorSpec, pool: BufferPool, name: str) -> np.ndarray:
        array = self._padded(array, name)
        if array.ndim > 1 and not array.size and spec.dtype != tf.string:
            array = array.astype(spec.dtype.as_numpy_dtype)  # Empty sequences have no dtype of their own.
        strings = array.dtype.kind in "SUO"
        if (
            array.ndim == 0
            or not spec.shape.is_compatible_with(array.shape)
            or strings != (spec.dtype == tf.string)
            or (not strings and not np.can_cast(array.dtype, spec.dtype.as_numpy_dtype, "same_kind"))
        ):
            raise SourceError(
                f"{name} does not fit the first ones. Received an array of shape "
                f"{array.shape} and dtype {array.dtype}, expected shape {tuple(spec.shape)} and dtype "
                f"{spec.dtype.name}. Pass "
                "element_spec=, with None for every axis that may change, for example "
                f"tf.TensorSpec({(None,) * max(array.ndim, 1)}, tf.{spec.dtype.name})."
            )
        if strings:
            return encode_strings(array)
        if self._keeps_memory and array.dtype == spec.dtype.as_numpy_dtype and array.flags.c_contiguous:
            return array
        out = pool.empty(array.shape, spec.dtype.as_numpy_dtype)
        np.copyto(out, array, casting="same_kind")
        self.copied_bytes += out.nbytes
        return out

    def _padded(self, array: np.ndarray, name: str) -> np.ndarray:
        if not are_sequences(array):
            return array
        return make_padded_component(array, name, self._padding_value).read(slice(0, len(array)))

    def _spec_of(self, leaf: Any) -> tf.TypeSpec:
        if not isinstance(leaf, np.ndarray):
            return spec_of_tensor(leaf)
        if are_sequences(leaf):
            return make_padded_component(leaf, "a batch", self._padding_value).spec
        if leaf.ndim == 0:
            raise SourceError(
                f"A batch holds a single value ({leaf.dtype}) where an array of samples is expected. If the generator "
                "yields single samples, pass batched=False."
            )
        dtype = tf.string if leaf.dtype.kind in "SUO" else tf.as_dtype(fed_dtype(leaf.dtype))
        shape = [None, *leaf.shape[1:]]
        if self._padding_value is not None and len(shape) > 1:
            shape[1] = None  # The longest sample of another batch may have another length.
        return tf.TensorSpec(shape, dtype)


def _as_leaf(value: Any) -> Any:
    """A NumPy array, or a sparse or ragged tensor."""
    return as_tensor(value, tf.keras.backend.floatx()) if is_composite(value) else np.asarray(value)


def _num_samples(leaf: Any) -> int:
    return len(leaf) if isinstance(leaf, np.ndarray) else num_samples_of(leaf)


def _join_parts(parts: Any) -> Any:
    return together(list(parts)) if isinstance(parts[0], np.ndarray) else concatenate(parts)


def _num_batches(num_samples: int, batch_size: int, drop_remainder: bool) -> int:
    return num_samples // batch_size if drop_remainder else -(-num_samples // batch_size)


def _join(spec: Any, other: Any) -> Any:
    """What both types are types of; the first where there is none, then the batch is refused when it is cast."""
    if isinstance(spec, tf.TensorSpec) and isinstance(other, tf.TensorSpec):
        if spec.shape.rank != other.shape.rank:
            return spec
        return tf.TensorSpec([a if a == b else None for a, b in zip(spec.shape, other.shape)], spec.dtype)
    return spec.most_specific_common_supertype([other]) or spec


def _describe(structure: Any) -> str:
    def describe(leaf: Any) -> str:
        if not isinstance(leaf, tf.TypeSpec):
            leaf = _as_leaf(leaf)
        if isinstance(leaf, np.ndarray):
            return f"{leaf.dtype}{leaf.shape}"
        kind = {"Sparse": "sparse ", "Ragged": "ragged "}.get(type(leaf).__name__[:6], "")
        return f"{kind}{leaf.dtype.name}{tuple(leaf.shape)}"

    return str(tf.nest.map_structure(describe, structure))


def _check_length(items: Iterator, num_batches: int | None) -> Iterator:
    """Passes on what an iterable gives, and holds it to the length that it claims."""
    for number, item in enumerate(items):
        if number == num_batches:
            raise SourceError(
                f"The source has a length of {num_batches}, but gives more batches than that. Correct its "
                "__len__, or pass a function that returns an iterator: then no length is assumed."
            )
        yield item


def _skip(items: Iterator, number: int) -> Iterator:
    for _ in range(number):
        next(items, None)
    return items


def takes(function: Callable, name: str) -> bool:
    """True if a function has an argument of that name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # Built in, without a signature.
        return False
