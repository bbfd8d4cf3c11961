"""A source of its own for each replica.

Flow:   ... -> batch_sources -> [side_by_side] -> streams -> pipeline -> ...
Owns:   reading several sources in step, and joining what they give to global batches.
Leaves: how fast each is read (plan), each source itself (sources, batch_sources), cutting the batches (pipeline).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from .batch_sources import DEFAULT_BATCH_SIZE, BatchSource, JoinedBatch, make_batch_source
from .buffers import BufferPool
from .errors import SourceError
from .order import EpochOrder
from .plan import Pace, SourcesPlan, proportional_paces, split_batch
from .sources import ArraySource, as_batch_structure, encode_strings, fed_dtype

_END: Any = object()


class PacedArrays(BatchSource):
    """Arrays as batches of the sizes that a pace gives.

    Args:
        source: The arrays.
        pace: How they are cut.
    """

    def __init__(self, source: ArraySource, pace: Pace) -> None:
        self._source, self.pace = source, pace

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """Samples of a pass."""
        return self.pace.num_samples

    @property
    def num_batches(self) -> int:  # type: ignore[override]
        """Batches of a pass."""
        return self.pace.num_steps

    def batches(self, epoch: int, seed: int | None, start: int) -> Iterator:
        """The batches of one pass, in the order of (seed, epoch)."""
        order = None if seed is None else EpochOrder(self.num_samples, seed, epoch)
        for step in range(start, self.num_batches):
            first, stop = self.pace.samples_of(step)
            arrays = self._source.read(slice(first, stop) if order is None else order.samples(first, stop))
            yield tf.nest.pack_sequence_as(self._source.element_spec, arrays)


class SideBySide(BatchSource):
    """One source for each replica, read in step: what they give in a step is one global batch.

    Sources that begin anew each epoch must end together. Iterators are read on from epoch to epoch.

    Args:
        sources: For each replica its arrays `x`, `(x, y)` or `(x, y, sample_weight)`, or a source of batches.
        batch_size: Samples of a step over all replicas, or a list of the samples of each replica. None leaves
            the batches of a source of batches as they are, and is 32 over all replicas for arrays.

    Raises:
        SourceError: If the sources do not fit each other.
    """

    lends_memory = True

    def __init__(self, sources: Any, batch_size: int | Sequence[int] | None = None) -> None:
        if not isinstance(sources, (list, tuple)) or not sources:
            raise SourceError(
                f"per_replica takes a list of sources, one for each replica. Received a {type(sources).__name__}"
                f"{' of length 0' if isinstance(sources, (list, tuple)) else ''}."
            )
        sizes = list(batch_size) if isinstance(batch_size, (list, tuple)) else None
        if sizes is not None and (len(sizes) != len(sources) or not all(map(_is_size, sizes))):
            raise SourceError(
                f"batch_size={batch_size!r} must be one positive integer for each of the {len(sources)} sources, or "
                "one for all of them together."
            )
        self.sources = _make_sources(list(sources), sizes, batch_size)
        self.global_batch_size: Any = sum(sizes) if sizes is not None else batch_size
        repeating = [source for source in self.sources if source.can_repeat]
        self._in_step = repeating or self.sources
        self.can_repeat = bool(repeating)
        self.waits_for_epoch_end = any(source.waits_for_epoch_end for source in self.sources)
        self._running: dict[int, Iterator] = {}  # Iterators that go on from epoch to epoch.
        self._buffers: list[BufferPool] = []
        lengths = {
            replica_id: source.num_batches
            for replica_id, source in enumerate(self.sources)
            if source.can_repeat and source.num_batches is not None
        }
        if len(set(lengths.values())) > 1:
            raise SourceError(
                "The sources of all replicas must give equally many batches in an epoch. Received "
                f"{', '.join(f'{length} from source {key}' for key, length in lengths.items())}. Give arrays one "
                "batch_size for all together: then each is read at its own pace. An iterator, such as "
                "itertools.repeat, is read on from epoch to epoch."
            )

    @property
    def num_batches(self) -> int | None:  # type: ignore[override]
        """Steps of a pass, if a source knows them."""
        known = {source.num_batches for source in self._in_step} - {None}
        return known.pop() if len(known) == 1 and self.can_repeat else None

    @property
    def num_samples(self) -> int | None:  # type: ignore[override]
        """Samples of a pass, if all sources know them."""
        lengths = [source.num_samples for source in self.sources]
        return None if None in lengths else sum(lengths)

    def plan(self, num_replicas: int, prefetch: int) -> SourcesPlan:
        """How a pass is cut.

        Args:
            num_replicas: Replicas in sync.
            prefetch: Global batches prepared ahead.

        Raises:
            SourceError: If there are more or fewer replicas than sources.
        """
        if num_replicas != len(self.sources):
            raise SourceError(
                f"per_replica was given {len(self.sources)} source(s), but there are {num_replicas} replica(s). Give "
                f"one source for each, or let the model live on {len(self.sources)} device(s): "
                "keras_gpufeed.distribute(model, keras_gpufeed.get_strategy([...]))."
            )
        is_paced = all(isinstance(source, PacedArrays) for source in self.sources)
        return SourcesPlan(
            num_samples=self.num_samples,
            global_batch_size=self.global_batch_size if self.num_samples is not None else None,
            num_replicas=num_replicas,
            prefetch=prefetch,
            paces=tuple(source.pace for source in self.sources) if is_paced else (),
        )

    def on_epoch_end(self) -> None:
        """Passed on."""
        for source in self.sources:
            source.on_epoch_end()

    def close(self) -> None:
        """Passed on."""
        for source in self.sources:
            source.close()

    def batches(self, epoch: int, seed: int | None, start: int) -> Iterator:
        """The global batches of one pass; each source is shuffled in an order of its own."""
        iterators = [
            source.batches(epoch, None if seed is None else seed + replica_id, start)
            if source.can_repeat
            else self._running.setdefault(replica_id, source.batches(epoch, None, start))
            for replica_id, source in enumerate(self.sources)
        ]
        leading = [number for number, source in enumerate(self.sources) if source in self._in_step]
        following = [number for number in range(len(iterators)) if number not in leading]
        try:
            for step in range(start, 1 << 62):
                parts = {number: next(iterators[number], _END) for number in leading}
                if all(part is _END for part in parts.values()):
                    return
                # Read only now: at the end of an epoch an iterator must not lose a batch.
                parts.update((number, next(iterators[number], _END)) for number in following)
                ended = [number for number in sorted(parts) if parts[number] is _END]
                if ended:
                    raise SourceError(
                        f"The source of replica {ended[0]} ended after {step} batches of epoch {epoch}, while "
                        f"{len(parts) - len(ended)} other(s) went on, so that it has nothing left to compute. Let "
                        "all sources give equally many batches, or pass steps_per_epoch."
                    )
                yield self._join([parts[number] for number in range(len(iterators))], step)
        finally:
            for source, iterator in zip(self.sources, iterators):
                if source.can_repeat and hasattr(iterator, "close"):
                    iterator.close()

    def _join(self, parts: list, step: int) -> JoinedBatch:
        structures = [as_batch_structure(part) for part in parts]
        rows = [[np.asarray(leaf) for leaf in tf.nest.flatten(structure)] for structure in structures]
        for replica_id, structure in enumerate(structures):
            self._check(structures[0], structure, rows[0], rows[replica_id], replica_id, step)
        self._buffers = self._buffers or [BufferPool() for _ in rows[0]]
        joined = [_concatenate(arrays, buffers) for arrays, buffers in zip(zip(*rows), self._buffers)]
        batch = JoinedBatch(tf.nest.pack_sequence_as(structures[0], joined))
        batch.sizes = tuple(len(arrays[0]) for arrays in rows)
        return batch

    def _check(self, first: Any, structure: Any, expected: list, arrays: list, replica_id: int, step: int) -> None:
        try:
            tf.nest.assert_same_structure(first, structure)
            fits = all(
                array.ndim > 0
                and array.shape[1:] == other.shape[1:]
                and (array.dtype.kind in "SUO") == (other.dtype.kind in "SUO")
                for array, other in zip(arrays, expected)
            )
        except (TypeError, ValueError):
            fits = False
        lengths = {len(array) for array in arrays if array.ndim > 0}
        if fits and len(lengths) == 1 and 0 not in lengths:
            return
        received, wanted = (
            str(tf.nest.map_structure(lambda leaf: f"{np.asarray(leaf).dtype}{np.shape(leaf)}", item))
            for item in (structure, first)
        )
        raise SourceError(
            f"Batch {step} of replica {replica_id} cannot stand beside that of replica 0. Received {received}, beside "
            f"{wanted}. All sources must give the same structure with the same shapes but for the first axis, at "
            "least one sample, and equally many in each array."
        )


def _make_sources(sources: list, sizes: list | None, batch_size: Any) -> list[Any]:
    made: list[Any] = []
    for replica_id, source in enumerate(sources):
        size = None if batch_size is None else (sizes or split_batch(batch_size, len(sources)).sizes)[replica_id]
        kind = make_batch_source(source, size, True, False, None) if not isinstance(source, tuple) else None
        made.append(ArraySource(*_up_to_three(source, replica_id)) if kind is None else kind)
    places = [number for number, source in enumerate(made) if isinstance(source, ArraySource)]
    for number in places:
        leaves = tf.nest.flatten(made[number].element_spec)
        if not all(isinstance(leaf, tf.TensorSpec) for leaf in leaves):
            raise SourceError(
                f"Source {number} holds sparse or ragged arrays, which per_replica cannot join. Convert them with "
                "tf.sparse.to_dense or RaggedTensor.to_tensor."
            )
    lengths = [made[number].num_samples for number in places]
    if len(places) == len(made) and sizes is None:
        paces: Sequence[Pace] = proportional_paces(lengths, batch_size or DEFAULT_BATCH_SIZE)
    else:
        paces = [_pace_beside(made, number, sizes, batch_size) for number in places]
    for number, pace in zip(places, paces):
        made[number] = PacedArrays(made[number], pace)
    return made


def _pace_beside(made: list, number: int, sizes: list | None, batch_size: Any) -> Pace:
    """The pace of arrays beside sources of another kind."""
    num_samples = made[number].num_samples
    others = [source for source in made if isinstance(source, BatchSource) and source.can_repeat]
    steps = next((source.num_batches for source in others if source.num_batches is not None), None)
    if batch_size is None and steps is not None and steps <= num_samples:
        return Pace(num_samples, samples=num_samples, steps=steps)  # Then they end together.
    even = split_batch(max(batch_size or DEFAULT_BATCH_SIZE, len(made)), len(made)).sizes if sizes is None else sizes
    return Pace(num_samples, even[number])


def _up_to_three(source: Any, replica_id: int) -> tuple:
    if not isinstance(source, tuple):
        return (source,)
    if not 1 <= len(source) <= 3:
        raise SourceError(
            f"Source {replica_id} is a tuple of {len(source)}. It must be (x,), (x, y) or (x, y, sample_weight); "
            "several inputs go into a list or dict of their own."
        )
    return source


def _is_size(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and int(value) > 0


def _concatenate(arrays: tuple, buffers: BufferPool) -> np.ndarray:
    if arrays[0].dtype.kind in "SUO":
        return np.concatenate([encode_strings(array) for array in arrays])
    dtype = np.result_type(*(fed_dtype(array.dtype) for array in arrays))
    out = buffers.empty((sum(map(len, arrays)), *arrays[0].shape[1:]), dtype)
    np.concatenate(arrays, out=out, casting="same_kind")
    return out
