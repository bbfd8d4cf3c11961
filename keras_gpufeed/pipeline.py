"""Brings samples into TensorFlow, batch by batch, and deals them to the replicas.

Flow:   ... -> sources -> [pipeline] -> feeder -> ...
Owns:   the `tf.data` graph and the per-replica iterators.
Leaves: which batch comes when (streams), where it is cut (plan), what Keras does with it (keras_entry).

The graph is traced once and then serves every iterator: where a stream starts and what it reads is looked up by
number in Python, so neither an epoch, nor a second `fit`, nor a resumed run traces anything. One call into Python
brings one global batch, or several small ones; they are cut, and dealt to the replicas, by slices that share their
memory. Where devices have memory of their own, batches are dealt here, so that each part can be copied to its device
ahead; else in the step itself. An element is `((data, seeds), cut)`; the last two are empty where nobody needs them.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import time
import weakref
from collections.abc import Iterator
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from . import internals
from . import strategy as strategies
from .batch_sources import takes
from .order import sample_seeds
from .overrides import Override, place_overrides, split_for
from .plan import BatchPlan, Split, split_batch
from .splitting import as_keras_does, part_of

_stream_ids = itertools.count()
_UNBOUNDED = (1 << 62) - 1
_streams: dict[int, Any] = {}  # Those that an iterator reads.
_recent_graphs: collections.deque = collections.deque(maxlen=32)  # For feeders of the same type: tracing takes time.


@functools.lru_cache(maxsize=16)  # Full steps are all alike.
def _cut(split: Split) -> tuple[np.ndarray, np.ndarray]:
    num_replicas = len(split.parts)
    shares = [
        (
            share / num_replicas,  # Weight of a mean over the replica's samples.
            split.num_samples / size,  # Brings a sum over them to the mean's footing.
            0.0 if split.small_tail and replica else 1.0,  # Whether the samples count here.
        )
        for replica, (share, size) in enumerate(zip(split.shares, split.sizes))
    ]
    return np.array(split.parts, np.int64), np.array(shares, np.float64)


class Pipeline(internals.DistributedDataset):
    """The steps of a feeder on a strategy; what `fit` iterates.

    Args:
        plan: How a pass is cut, for the strategy's replicas.
        strategy: Where batches go.
        transforms: Functions on `(x, y, sample_weight)` of a global batch, applied in order.
        predicting: True if batches are for `predict`.
        seed: For the seeds of the samples, which a transform with an argument `seed` is given; None if none is.
        overrides: What single replicas get for single inputs.
    """

    def __init__(
        self,
        plan: BatchPlan,
        strategy: tf.distribute.Strategy,
        transforms: tuple[Callable, ...],
        predicting: bool,
        seed: int | None,
        overrides: tuple[Override, ...],
    ) -> None:
        self.plan, self.strategy = plan, strategy
        self._transforms, self._predicting, self._seed, self._overrides = transforms, predicting, seed, overrides
        is_default = internals.is_default(strategy)
        self._devices = strategies.first_device() if is_default else internals.replica_devices(strategy)
        self._split_ahead = not internals.share_memory_with_host(self._devices)
        self._graphs: list[_Graph] = []

    def with_transform(self, function: Callable) -> Pipeline:
        """The same steps with `function` applied to each global batch."""
        transforms = (*self._transforms, function)
        return Pipeline(self.plan, self.strategy, transforms, self._predicting, self._seed, self._overrides)

    @property
    def has_stamps(self) -> bool:
        """True if a monitored step reads the clock: for when devices have their parts, and replicas their gradients.

        One device that shares the host's memory has its batch as soon as that is ready, and no other waits for it.
        """
        return self._split_ahead or self.plan.num_replicas > 1

    def iterate(
        self,
        stream: Any,
        on_end: Callable[[], None] | None = None,
        *,
        monitored: bool = False,
        replay: bool = False,
        in_steps: bool = True,
    ) -> Iterator:
        """Starts reading.

        Args:
            stream: What to read.
            on_end: For a loop that is not Keras's: called when the data has ended or failed; may raise.
            monitored: True if steps and transforms are to note their times.
            replay: True to give the first batch for ever, from memory.
            in_steps: False if there are no steps, which could note their times.

        Returns:
            An iterator of `(x, y, sample_weight)`: of tensors for one device, else of per-replica values.
        """
        stream_id = next(_stream_ids)
        _streams[stream_id] = stream
        # Without a transform there is nothing to note there, so that one graph serves both.
        dataset = self._graph_for(stream, monitored and bool(self._transforms)).dataset(stream_id)
        plan = self.plan
        if replay:
            dataset = dataset.take(plan.num_replicas if self._split_ahead else 1).cache().repeat()
        iterator = internals.iterate_on_devices(
            dataset,
            self._devices,
            plan.prefetch,
            even=plan.even,
            predicting=self._predicting,
            small_tails=plan.has_small_tail,
            monitored=monitored and in_steps and self.has_stamps,
        )
        iterator.on_end = on_end
        weakref.finalize(iterator, _streams.pop, stream_id).atexit = False  # type: ignore[misc]
        return iterator

    def _graph_for(self, stream: Any, monitored: bool) -> _Graph:
        """A graph whose batch type admits the stream's; generators may give other shapes from run to run."""
        spec, plan = stream.element_spec, self.plan
        for graph in self._graphs:
            if graph.settings.monitored == monitored and _admits(graph.batch_spec, spec):
                return graph
        settings = _Settings(
            plan.num_replicas,
            self._split_ahead,
            plan.even and self._split_ahead,
            monitored,
            self._transforms,
            plan.prefetch if self._transforms else 0,
            self._seed,
            self._overrides,
            plan.global_batch_size if plan.steps_per_read > 1 else None,
            plan.parallel_reads if plan.parallel_reads > 1 else None,
        )
        for recent in tuple(_recent_graphs):  # Another thread may add one meanwhile.
            if recent.is_for(spec, settings):
                self._graphs.append(recent)
                return recent
        graph = _Graph(spec, settings)
        if not (settings.transforms or settings.overrides):  # What is the user's goes with the feeder.
            _recent_graphs.append(graph)
        self._graphs.append(graph)
        return graph


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What a graph depends on, besides the type of a batch."""

    num_replicas: int
    split_ahead: bool
    even: bool
    monitored: bool
    transforms: tuple[Callable, ...]
    prefetch: int
    seed: int | None
    overrides: tuple[Override, ...]
    rebatch_size: int | None  # Of the batches that are read several at once.
    parallel_reads: int | None


class _Graph:
    """The traced `tf.data` graph, with the stream's number as its input."""

    def __init__(self, batch_spec: Any, settings: _Settings) -> None:
        self.batch_spec, self.settings = batch_spec, settings
        self._overrides = place_overrides(settings.overrides, batch_spec)
        number = tf.TensorSpec((), tf.int64)
        # The public pair to_variant / from_variant lets a traced function make data sets.
        self._make_variant = tf.function(self._trace, input_signature=[number]).get_concrete_function()

    def is_for(self, batch_spec: Any, settings: _Settings) -> bool:
        """True if it is what would be traced for the arguments."""
        return (
            settings == self.settings and _admits(batch_spec, self.batch_spec) and _admits(self.batch_spec, batch_spec)
        )

    def dataset(self, stream_id: int) -> tf.data.Dataset:
        """The steps of a stream: batches with how to split them, or their parts, replica after replica."""
        variant = self._make_variant(tf.constant(stream_id, tf.int64))
        return tf.data.experimental.from_variant(variant, self._element_spec)

    def _trace(self, stream_id: tf.Tensor) -> tf.Tensor:
        settings = self.settings
        read = functools.partial(self._read, stream_id)
        dataset = tf.data.Dataset.range(_UNBOUNDED).map(read, num_parallel_calls=settings.parallel_reads)
        dataset = dataset.take_while(lambda batch, _: _num_samples(tf.nest.flatten(batch)[0]) > 0)
        if settings.rebatch_size is not None:
            # While some batches are taken one by one, the next are read.
            dataset = dataset.prefetch(1).flat_map(functools.partial(_rebatch, settings.rebatch_size))
        for number, transform in enumerate(settings.transforms, start=1):
            note = None
            if settings.monitored:
                note = functools.partial(_note_transform, stream_id, number == len(settings.transforms))
            apply = functools.partial(_apply, transform, note)
            dataset = dataset.map(apply, num_parallel_calls=max(1, settings.prefetch))
        if settings.num_replicas == 1:
            dataset = dataset.map(lambda batch, _: as_keras_does(batch[0]))
        elif settings.split_ahead:
            dataset = dataset.flat_map(functools.partial(_deal, settings.even))
        options = tf.data.Options()
        options.deterministic = True
        # Rewriting and tuning the graph costs more time at each start than it gains with one call per step.
        options.experimental_optimization.apply_default_optimizations = False
        options.autotune.enabled = False
        dataset = dataset.with_options(options)
        self._element_spec = dataset.element_spec
        return tf.data.experimental.to_variant(dataset)

    def _read(self, stream_id: tf.Tensor, number: tf.Tensor) -> tuple:
        specs = tf.nest.flatten(self.batch_spec, expand_composites=True)
        num_replicas, seed = self.settings.num_replicas, self.settings.seed
        steps = [] if self.settings.rebatch_size is None else [None]
        if num_replicas > 1:
            specs += [
                tf.TensorSpec([*steps, num_replicas, 2], tf.int64),
                tf.TensorSpec([*steps, num_replicas, 3], tf.float64),
            ]
        if seed is not None:
            specs.append(tf.TensorSpec((None, 2), tf.int32))
        read = functools.partial(
            _read_stream, num_replicas=num_replicas, specs=specs, seed=seed, overrides=self._overrides
        )
        tensors = tf.numpy_function(read, [stream_id, number], [spec.dtype for spec in specs])
        for tensor, spec in zip(tensors, specs):
            tensor.set_shape(spec.shape)
        seeds = () if seed is None else (tensors.pop(),)
        cut = () if num_replicas == 1 else (tensors.pop(-2), tensors.pop())
        return (tf.nest.pack_sequence_as(self.batch_spec, tensors, expand_composites=True), seeds), cut


def _rebatch(size: int, batch: tuple, cut: tuple) -> tf.data.Dataset:
    if not cut:
        return tf.data.Dataset.from_tensors((batch, cut)).rebatch(size)
    batches = tf.data.Dataset.from_tensors(batch).rebatch(size)
    return tf.data.Dataset.zip((batches, tf.data.Dataset.from_tensor_slices(cut)))


def iterate_one_step(data: tuple, strategy: tf.distribute.Strategy) -> Iterator:
    """One batch that is there already, split for the replicas.

    Args:
        data: `(x,)`, `(x, y)` or `(x, y, sample_weight)`, of tensors.
        strategy: Where it goes.
    """
    devices = internals.replica_devices(strategy)
    split = split_batch(int(_num_samples(tf.nest.flatten(data)[0])), len(devices))
    dataset = tf.data.Dataset.from_tensors(((data, ()), _cut(split)))
    if not internals.share_memory_with_host(devices):
        dataset = dataset.flat_map(functools.partial(_deal, False))
    # All batches are taken for uneven ones, so that a step is traced but once.
    return internals.iterate_on_devices(
        dataset, devices, prefetch=0, even=False, predicting=False, small_tails=True, monitored=False
    )


def _deal(even: bool, batch: tuple, cut: tuple) -> tf.data.Dataset:
    data, (parts, shares) = batch[0], cut

    def deal(replica: tf.Tensor) -> tuple:
        part = part_of(data, parts, replica)
        return part if even else (part, shares[replica])

    return tf.data.Dataset.range(parts.shape[0]).map(deal)


def _num_samples(component: Any) -> tf.Tensor:
    if isinstance(component, tf.RaggedTensor):
        return component.nrows(tf.int64)
    return component.dense_shape[0] if isinstance(component, tf.SparseTensor) else tf.shape(component, tf.int64)[0]


def _apply(transform: Callable, note: Callable | None, batch: tuple, cut: tuple) -> tuple:
    data, seeds = batch
    arguments = {"seed": seeds[0]} if takes(transform, "seed") else {}
    if note is None:
        transformed = transform(*data, **arguments)
    else:
        began = tf.timestamp()
        with tf.control_dependencies([began]):
            transformed = transform(*tf.nest.map_structure(tf.identity, data), **arguments)
        fed = tf.nest.flatten(transformed, expand_composites=True)
        with tf.control_dependencies(fed):
            seconds = tf.timestamp() - began
        with tf.control_dependencies([note(seconds)]):
            transformed = tf.nest.map_structure(tf.identity, transformed)
    if isinstance(transformed, list):  # tf.data would make one tensor of it.
        transformed = tuple(transformed)
    if not isinstance(transformed, tuple):
        transformed = (transformed,)
    num_samples = _num_samples(tf.nest.flatten(data)[0])
    keeps_samples = [tf.equal(_num_samples(component), num_samples) for component in tf.nest.flatten(transformed)]
    # `tf.debugging` would put each behind a branch, which takes as long as a small transform.
    tf.raw_ops.Assert(
        condition=tf.reduce_all(keeps_samples),
        data=["A transform must keep the number of samples of a batch along the first axis."],
    )
    return (transformed, seeds), cut


def _note_transform(stream_id: tf.Tensor, is_last: bool, seconds: tf.Tensor) -> tf.Operation:
    def note(stream_id: np.ndarray, seconds: np.ndarray) -> None:
        stream = _streams.get(int(stream_id))
        if stream is not None:
            stream.meter.note_transform(float(seconds), time.perf_counter() if is_last else None)

    return tf.numpy_function(note, [stream_id, seconds], [])


def _admits(spec: Any, other: Any) -> bool:
    try:
        tf.nest.assert_same_structure(spec, other)
    except (TypeError, ValueError):
        return False
    return all(a.is_subtype_of(b) for a, b in zip(tf.nest.flatten(other), tf.nest.flatten(spec)))


def _read_stream(
    stream_id: np.ndarray,
    number: np.ndarray,
    *,
    num_replicas: int,
    specs: list[tf.TensorSpec],
    seed: int | None,
    overrides: tuple[tuple, ...],
) -> list[np.ndarray]:
    stream = _streams.get(int(stream_id))  # None: the iterator has gone and its last prefetch comes too late.
    batch = None if stream is None else stream.read(int(number))
    if batch is None:
        return [np.zeros([axis or 0 for axis in spec.shape], _host_dtype(spec)) for spec in specs]
    if stream is not None and stream.meter.wants_batch:
        stream.meter.held, stream.meter.wants_batch = batch, False
    arrays, cut, repeated = batch.arrays, [], 1
    if batch.step_sizes is not None:
        if num_replicas > 1:
            cuts = [_cut(split_batch(size, num_replicas)) for size in batch.step_sizes]
            cut = [np.stack(each) for each in zip(*cuts)]
    elif num_replicas > 1 or overrides:
        split, arrays = split_for(batch, num_replicas, overrides)
        cut = [*_cut(split)] if num_replicas > 1 else []
        repeated = num_replicas if overrides and split.small_tail else 1  # As `split_for` repeats the samples.
    seeds = [] if seed is None else [sample_seeds(seed, batch.epoch, np.tile(batch.samples, repeated))]
    return [*arrays, *cut, *seeds]


def _host_dtype(spec: tf.TensorSpec) -> Any:
    return object if spec.dtype == tf.string else spec.dtype.as_numpy_dtype
