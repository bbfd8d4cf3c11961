"""Brings samples into TensorFlow, batch by batch, and deals them to the replicas.

Flow:   ... -> sources -> [pipeline] -> feeder -> ...
Owns:   the endless stream of steps, its `tf.data` graph, per-replica iterators.
Leaves: which samples (plan, order), reading them (sources), what Keras does with the batches (keras_entry).

The graph is traced once and then serves every iterator: where a stream starts and what it reads is looked up by
number in Python, so neither an epoch, nor a second `fit`, nor a resumed run traces anything. One call into Python
brings one global batch; it is cut for the replicas by slices that share its memory.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any, Callable, Iterator

import numpy as np
import tensorflow as tf

from . import internals
from .order import EpochOrder
from .plan import BatchPlan, split_batch
from .sources import ArraySource

_stream_ids = itertools.count()
_streams: dict[int, "Stream"] = {}  # Those that an iterator reads.


class Stream:
    """One run through the data, from a given step on.

    Args:
        source: Where samples come from.
        plan: How a pass is cut into steps.
        seed: Fixes the order of every pass; None for the order of the source.
        first_step: Where to start, counted over all passes.
        num_steps: How many steps to give.
    """

    def __init__(
        self, source: ArraySource, plan: BatchPlan, seed: int | None, first_step: int, num_steps: int
    ) -> None:
        self.num_steps = num_steps
        self.failure: BaseException | None = None
        self._source, self._plan, self._seed, self._first_step = source, plan, seed, first_step
        self._epoch, self._order = -1, None

    def read(self, step: int) -> list[np.ndarray]:
        """The components of the global batch of a step, then where to cut it and the shares.

        Args:
            step: Step of the stream, from 0.
        """
        try:
            epoch, step_of_pass = divmod(self._first_step + step, self._plan.steps)
            start, stop = self._plan.samples_of(step_of_pass)
            components = self._source.read(self._samples(epoch, start, stop))
        except BaseException as failure:
            self.failure = failure  # TensorFlow passes on no more than its text.
            raise
        return [*components, *_cut(stop - start, self._plan.num_replicas)]

    def _samples(self, epoch: int, start: int, stop: int) -> Any:
        if self._seed is None:
            return slice(start, stop)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, EpochOrder(self._plan.num_samples, self._seed, epoch)
        return self._order.samples(start, stop)


def _cut(num_samples: int, num_replicas: int) -> tuple[np.ndarray, np.ndarray]:
    split = split_batch(num_samples, num_replicas)
    shares = [
        (
            share / num_replicas,  # Weight of a mean over the replica's samples.
            num_samples / size,  # Brings a sum over them to the mean's footing.
            0.0 if split.small_tail and replica else 1.0,  # Whether the samples count here.
        )
        for replica, (share, size) in enumerate(zip(split.shares, split.sizes))
    ]
    return np.array(split.parts, np.int64), np.array(shares, np.float32)


class Pipeline(internals.DistributedDataset):
    """The steps of a feeder on a strategy; what `fit` iterates.

    Args:
        source: Where samples come from.
        plan: How a pass is cut, for the strategy's replicas.
        strategy: Where batches go.
        transforms: Functions on `(x, y, sample_weight)` of a global batch, applied in order.
        predicting: True if batches are for `predict`.
    """

    def __init__(
        self,
        source: ArraySource,
        plan: BatchPlan,
        strategy: tf.distribute.Strategy,
        transforms: tuple[Callable, ...] = (),
        predicting: bool = False,
    ) -> None:
        self.source, self.plan, self.strategy = source, plan, strategy
        self._transforms, self._predicting = transforms, predicting

    def with_transform(self, function: Callable) -> "Pipeline":
        """The same steps with `function` applied to each global batch."""
        return Pipeline(self.source, self.plan, self.strategy, (*self._transforms, function), self._predicting)

    @property
    def element_spec(self) -> Any:
        """Type of a global batch `(x, y, sample_weight)`."""
        return self._graph.data_spec

    @functools.cached_property
    def _graph(self) -> "_Graph":
        return _Graph(self.source.element_spec, self.plan, self._transforms)

    def iterate(self, stream: Stream) -> Iterator:
        """Starts reading.

        Args:
            stream: What to read.

        Returns:
            An iterator of `(x, y, sample_weight)`: of tensors for one device, else of per-replica values.
        """
        stream_id = next(_stream_ids)
        _streams[stream_id] = stream
        dataset = self._graph.dataset(stream_id, stream.num_steps)
        plan = self.plan
        if internals.is_default(self.strategy):
            iterator = iter(dataset.prefetch(plan.prefetch))
        else:
            iterator = internals.iterate_on_devices(
                dataset,
                internals.replica_devices(self.strategy),
                plan.prefetch,
                even=plan.even,
                predicting=self._predicting,
                small_tails=plan.has_small_tail,
            )
        weakref.finalize(iterator, _streams.pop, stream_id).atexit = False
        return iterator


class _Graph:
    """The traced `tf.data` graph, with the stream's number and length as its inputs."""

    def __init__(self, element_spec: Any, plan: BatchPlan, transforms: tuple[Callable, ...]) -> None:
        self._batch_spec, self._plan, self._transforms = element_spec, plan, transforms
        number = tf.TensorSpec((), tf.int64)
        # The public pair to_variant / from_variant lets a traced function make data sets.
        self._make_variant = tf.function(self._trace, input_signature=[number, number]).get_concrete_function()

    def dataset(self, stream_id: int, num_steps: int) -> tf.data.Dataset:
        """The parts of all steps of a stream, replica after replica."""
        variant = self._make_variant(
            tf.constant(stream_id, tf.int64), tf.constant(num_steps, tf.int64)
        )
        return tf.data.experimental.from_variant(variant, self._element_spec)

    def _trace(self, stream_id: tf.Tensor, num_steps: tf.Tensor) -> tf.Tensor:
        dataset = tf.data.Dataset.range(num_steps).map(lambda step: self._read(stream_id, step))
        for transform in self._transforms:
            dataset = dataset.map(
                functools.partial(_apply, transform), num_parallel_calls=max(1, self._plan.prefetch)
            )
        self.data_spec = dataset.element_spec[0]
        if self._plan.num_replicas == 1:
            dataset = dataset.map(lambda data, *_: data)
        else:
            dataset = dataset.flat_map(self._deal)
        options = tf.data.Options()
        options.deterministic = True
        # Rewriting and tuning the graph costs more time at each start than it gains with one call per step.
        options.experimental_optimization.apply_default_optimizations = False
        options.autotune.enabled = False
        dataset = dataset.with_options(options)
        self._element_spec = dataset.element_spec
        return tf.data.experimental.to_variant(dataset)

    def _read(self, stream_id: tf.Tensor, step: tf.Tensor) -> tuple:
        specs = tf.nest.flatten(self._batch_spec)
        dtypes = [spec.dtype for spec in specs] + [tf.int64, tf.float32]
        *components, parts, shares = tf.numpy_function(_read_stream, [stream_id, step], dtypes)
        for component, spec in zip(components, specs):
            component.set_shape(spec.shape)
        parts.set_shape((self._plan.num_replicas, 2))
        shares.set_shape((self._plan.num_replicas, 3))
        return tf.nest.pack_sequence_as(self._batch_spec, components), parts, shares

    def _deal(self, data: tuple, parts: tf.Tensor, shares: tf.Tensor) -> tf.data.Dataset:
        def part(replica: tf.Tensor) -> tuple:
            start, stop = parts[replica, 0], parts[replica, 1]
            # Slices along the first axis share the memory of the batch where their address is aligned.
            sliced = tf.nest.map_structure(lambda component: component[start:stop], data)
            return sliced if self._plan.even else (sliced, shares[replica])

        return tf.data.Dataset.range(self._plan.num_replicas).map(part)


def _apply(transform: Callable, data: tuple, parts: tf.Tensor, shares: tf.Tensor) -> tuple:
    transformed = transform(*data)
    if not isinstance(transformed, tuple):
        transformed = (transformed,)
    for component in tf.nest.flatten(transformed):
        tf.debugging.assert_equal(
            tf.shape(component, tf.int64)[0],
            tf.shape(tf.nest.flatten(data)[0], tf.int64)[0],
            "A transform must keep the number of samples of a batch along the first axis.",
        )
    return transformed, parts, shares


def _read_stream(stream_id: np.ndarray, step: np.ndarray) -> list[np.ndarray]:
    stream = _streams.get(int(stream_id))
    if stream is None:  # The iterator has gone and its last prefetch comes too late.
        raise StopIteration
    return stream.read(int(step))
