"""The public object that takes data into `fit`.

Flow:   ... -> pipeline -> [feeder] -> keras_entry -> model
Owns:   the public arguments and their checks; pipelines, one for each strategy.
Leaves: how Keras is entered (keras_entry), everything upstream.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import secrets
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from . import graph_mode, internals
from . import strategy as strategies
from .batch_sources import DEFAULT_BATCH_SIZE, BatchSource, EveryNthBatch, WorkerSettings, make_batch_source, takes
from .errors import SourceError
from .loops import LoopDataset, Passes, parts_of_steps, steps_of
from .measuring import FeedRates, measure
from .overrides import Override, WithExtras, is_for_each_sample
from .pipeline import Pipeline
from .plan import BatchPlan, split_batch, strategy_name
from .side_by_side import SideBySide
from .sources import ArraySource, EveryNthSample, SampleRange
from .splitting import as_keras_does
from .streams import BatchStream, SampleStream

_logger = logging.getLogger("keras_gpufeed")
_ENDLESS = 1 << 40  # Steps.


class DistributedFeeder:
    """Feeds arrays or generators to every device, with the result of one.

    Goes where `x` goes: into `fit`, `evaluate`, `predict` and `validation_data`, of any Keras model. A model that
    lives on no strategy is moved onto every visible GPU, in place.

    Args:
        x: Inputs of shape `(num_samples, ...)`: a NumPy array, memory map, pandas frame, tensor or anything
            with shape, dtype, length and indexing (an HDF5 data set); or tuples, lists and dicts of these.
            Nothing is copied but the batches in flight.
            Or a source of global batches `x`, `(x, y)` or `(x, y, sample_weight)`: a function that returns a
            fresh iterator for each epoch (called with `epoch=` if it takes that), a generator object (one
            pass), a `keras.utils.Sequence`, a `tf.data.Dataset`, a `queue.Queue` (None ends an epoch), or
            any other iterable. An object with a length that gives single samples by number is read by sample.
        y: Targets, likewise; sources of batches hold their own.
        sample_weight: Weights of shape `(num_samples,)` or `(num_samples, time steps)`, or one such array for
            each output.
        batch_size: Global batch size: samples per step over all replicas, as in Keras. Any number; it need
            not divide by the replicas, nor the samples by it. None is 32 for arrays and single samples, and
            leaves the batches of a source as they are.
        batched: False if a source yields single samples rather than batches.
        shuffle: Whether `fit` reads samples in a new random order each epoch. `evaluate`, `predict` and
            validation always read in input order.
        seed: Fixes the orders: they depend on (seed, epoch) alone, not on the number of replicas. None draws
            one, found in `feeder.seed`, so that a run can be repeated. Generators keep their own order.
        drop_remainder: Whether to leave out a last batch smaller than `batch_size` in `fit`.
        steps_per_epoch: Steps of an epoch of `fit`, if not one pass over the data. The next epoch goes on
            where the last one stopped.
        transform: A TensorFlow function applied to each global batch on the host, called as `Dataset.map` calls
            one: with x, y and sample_weight as far as they were given. It keeps the number of samples. If it
            has an argument `seed`, it also gets an int32 tensor of shape `(batch, 2)`: a seed for each sample,
            for `tf.random.stateless_*`, that depends on (seed, epoch, sample) alone, so that augmentation is
            the same on any number of replicas and workers.
        workers: Processes that make the batches: of a Sequence, of an object that gives samples by number (each
            batch made once, in order), or of a generator function that takes `worker_id` and `num_workers` and
            gives its part; any other generator function takes `workers=1`. 0: a thread of this process. NumPy's and
            Python's random state in a worker depend on (seed, epoch, batch number), for generators on (seed,
            epoch, worker). The processes live until the feeder is closed or gone.
        start_method: "spawn" (None) starts new interpreters; "fork" copies this process, which may deadlock
            beside TensorFlow's threads but knows the classes of a notebook.
        stall_seconds: A worker that gives nothing for so long is reported by a warning with its traceback.
        stall_limit_seconds: A worker that gives nothing for so long ends training with `WorkerError`.
        prefetch: Global batches prepared ahead of the step, at least 0, which prepares each one when it is asked for.
            Small batches of arrays in memory are read several at once.
        padding_value: Fills up samples of unequal length (lists of lists, arrays of sequences) at their end, to
            the longest of each global batch. None refuses such samples.
        element_spec: The type of a batch of a source, as nested `tf.TensorSpec`; None learns it from the first
            two batches, in which an axis that changes may change later on.

    Raises:
        SourceError: If the data or the arguments do not fit each other.

    Example:
        >>> import keras_gpufeed as kg
        >>> import numpy as np
        >>> import tensorflow as tf
        >>> x = np.linspace(0, 1, 21, dtype="float32")[:, None]
        >>> feeder = kg.DistributedFeeder(x, 3 * x, batch_size=10, seed=7)
        >>> len(feeder)
        3
        >>> model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> history = model.fit(feeder, epochs=2, verbose=0)
        >>> model.distribute_strategy.num_replicas_in_sync
        8
        >>> model.predict(kg.DistributedFeeder(x), verbose=0).shape
        (21, 1)
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        drop_remainder: bool = False,
        steps_per_epoch: int | None = None,
        transform: Callable | None = None,
        workers: int = 0,
        prefetch: int = 2,
        batched: bool = True,
        element_spec: Any = None,
        padding_value: float | None = None,
        start_method: str | None = None,
        stall_seconds: float = 60.0,
        stall_limit_seconds: float | None = None,
    ) -> None:
        if isinstance(x, DistributedFeeder):
            raise SourceError("x is a DistributedFeeder already; pass it to fit as it is.")
        batch_size = _positive("batch_size", batch_size)
        batched = _boolean("batched", batched)
        self.steps_per_epoch: int | None = _positive("steps_per_epoch", steps_per_epoch)
        self.prefetch: int = _integer("prefetch", prefetch, least=0)
        self.shuffle: bool = _boolean("shuffle", shuffle)
        self.drop_remainder: bool = _boolean("drop_remainder", drop_remainder)
        self.seed: int = secrets.randbits(32) if seed is None else _integer("seed", seed)
        self.seed_was_drawn: bool = seed is None
        if transform is not None and not callable(transform):
            raise SourceError(f"transform must be a function of (x, y). Received a {type(transform).__name__}.")
        self.transform = transform
        if isinstance(padding_value, bool) or not isinstance(padding_value, (int, float, np.number, type(None))):
            raise SourceError(
                f"padding_value must be a number. Received {padding_value!r} of type {type(padding_value).__name__}."
            )
        _refuse_nested_feeders(x, y, sample_weight)
        self.num_workers: int = _integer("workers", workers, least=0)
        num_workers = self.num_workers
        if start_method not in (None, "spawn", "fork"):
            raise SourceError(f'start_method must be "spawn" or "fork". Received {start_method!r}.')
        settings = WorkerSettings(
            num_workers, self.seed, self.prefetch, start_method, stall_seconds, stall_limit_seconds
        )
        batch_source = make_batch_source(x, batch_size, batched, self.drop_remainder, settings if num_workers else None)
        if batch_source is None:
            if num_workers:
                raise SourceError(
                    f"workers={num_workers} was given with arrays, which need none: batches are gathered from them "
                    "faster than processes could send them. Leave workers out; use transform= to change batches."
                )
            if not batched or element_spec is not None:
                raise SourceError(
                    f"batched and element_spec are for sources of batches. Received a {type(x).__name__}, whose "
                    "samples lie along its first axis. Leave both out."
                )
            self.source: Any = ArraySource(x, y, sample_weight, padding_value)
            batch_size = batch_size or DEFAULT_BATCH_SIZE
        else:
            if y is not None or sample_weight is not None:
                raise SourceError(
                    f"y and sample_weight were given beside a {type(x).__name__}, which yields its own. Let it "
                    "yield (x, y) or (x, y, sample_weight)."
                )
            self.source = batch_source
            if batch_source.num_samples is not None or not batched:
                batch_size = batch_size or DEFAULT_BATCH_SIZE
        self.batch_size: Any = batch_size
        self.element_spec, self.padding_value = element_spec, padding_value
        self._overrides: tuple[Override, ...] = ()
        self._setup()

    @classmethod
    def per_replica(
        cls,
        sources: Sequence[Any],
        *,
        batch_size: int | Sequence[int] | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        steps_per_epoch: int | None = None,
        transform: Callable | None = None,
        prefetch: int = 2,
        element_spec: Any = None,
    ) -> DistributedFeeder:
        """A feeder with a source of its own for each replica.

        For `fit`, `evaluate` and loops of your own. All that the replicas get in a step counts as one global batch,
        each replica by its samples, however many they are. A model that lives on no strategy is moved onto as many
        devices as there are sources.

        Args:
            sources: For each replica arrays `x`, `(x, y)` or `(x, y, sample_weight)`, or anything else that a feeder
                takes, all of the same structure. Sources that begin anew each epoch must give equally many batches.
                An iterator is read on from epoch to epoch, so `itertools.repeat((x, y))` is a constant.
            batch_size: Samples of a step over all replicas: arrays are then read each at its own pace, in proportion
                to their lengths, so that they end together and each sample is fed once. Or a list of the samples of
                each replica. None is 32 over all for arrays, and leaves other batches as they are; arrays
                beside sources that know their number of batches then take as many.
            shuffle: Whether `fit` reads arrays in a new random order each epoch, each source in an order of its own.
            seed: Fixes these orders; None draws one.
            steps_per_epoch: Steps of an epoch, if not one pass.
            transform: As for a feeder, on what all replicas get together.
            prefetch: Global batches prepared ahead of the step.
            element_spec: The type of a batch, if it is not to be learned from the first two.

        Raises:
            SourceError: If the sources do not fit each other, or later the replicas.

        Example:
            >>> import keras_gpufeed as kg
            >>> import numpy as np
            >>> import tensorflow as tf
            >>> x = np.ones((30, 3), "float32")
            >>> feeder = kg.DistributedFeeder.per_replica([(x, x), (-x[:10], x[:10])], batch_size=8)
            >>> feeder.plan().split(0).sizes
            (6, 2)
            >>> model = tf.keras.Sequential([tf.keras.layers.Dense(3)])
            >>> model.compile("sgd", "mse")
            >>> history = model.fit(feeder, verbose=0)
            >>> history.params["steps"], model.distribute_strategy.num_replicas_in_sync
            (5, 2)
        """
        joined = SideBySide(sources, batch_size)
        return cls(
            joined,
            batch_size=joined.global_batch_size,
            shuffle=shuffle,
            seed=seed,
            steps_per_epoch=steps_per_epoch,
            transform=transform,
            prefetch=prefetch,
            element_spec=element_spec,
        )

    def override(self, replica_id: int, inputs: dict) -> DistributedFeeder:
        """The same feed, but for some inputs of one replica.

        Args:
            replica_id: The replica, from 0.
            inputs: For names of inputs (keys of x) the value of one sample, the same for all that this replica
                gets; or, if the feeder holds arrays, an array with a value for each sample.

        Returns:
            A new feeder with the same samples and orders; this one stays as it is.

        Raises:
            SourceError: If there is no such input, or the value does not fit it.

        Example:
            >>> import keras_gpufeed as kg
            >>> import numpy as np
            >>> x = {"image": np.ones((8, 2)), "noise": np.ones(8)}
            >>> feeder = kg.DistributedFeeder(x, batch_size=4, shuffle=False).override(1, {"noise": 0.0})
            >>> [part["noise"].numpy().tolist() for part in feeder.dataset(replica_id=1, num_replicas=2)]
            [[0.0, 0.0], [0.0, 0.0]]
        """
        replica_id = _integer("replica_id", replica_id, least=0)
        if not isinstance(inputs, dict) or not inputs:
            raise SourceError(f"inputs must be a dict from names of inputs to values. Received {inputs!r}.")
        feeder = self._copy(self.source)
        for name, value in inputs.items():
            override = Override(replica_id, name, value)
            if not self.is_streaming:
                spec = tf.nest.flatten(self.source.element_spec)[override.place_in(self.source.element_spec)]
                if is_for_each_sample(value, spec, self.num_samples):
                    feeder.source = WithExtras(feeder.source, ArraySource(value))
                    num_extras = sum(known.extra is not None for known in feeder._overrides)
                    override = Override(replica_id, name, np.zeros(spec.shape[1:]), num_extras)
                else:
                    override.constant(spec)
            feeder._overrides = (*feeder._overrides, override)
        return feeder

    def _copy(self, source: Any) -> DistributedFeeder:
        feeder = object.__new__(DistributedFeeder)
        feeder.__dict__.update(self.__dict__)
        feeder.source = source
        feeder._setup()
        return feeder

    @property
    def num_sources(self) -> int | None:
        """Number of replicas that this feeder can serve, if it was made by `per_replica`; None for any number."""
        return len(self.source.sources) if isinstance(self.source, SideBySide) else None

    def _setup(self) -> None:
        self._plan_for(self.num_sources or 1, self.drop_remainder)  # Refuses what leaves nothing to feed.
        self._pipelines: dict = {}
        self._has_warned = False
        self._epochs_given = itertools.count()  # To code that neither Keras nor a data set runs.
        self._epochs_of: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def close(self) -> None:
        """Ends the worker processes, if there are any. So do the end of a `with` block and of the feeder's life."""
        if self.is_streaming:
            self.source.close()

    def __enter__(self) -> DistributedFeeder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_streaming(self) -> bool:
        """True if batches are read one after the other, on a thread, and not by number."""
        return isinstance(self.source, BatchSource)

    @property
    def num_samples(self) -> Any:
        """Number of samples in one pass; None if the source does not say."""
        return self.source.num_samples

    @property
    def num_steps(self) -> Any:
        """Number of steps in one epoch of `fit`; None if the source does not say."""
        return self.steps_per_epoch or self._steps_per_pass(training=True)

    def _steps_per_pass(self, training: bool) -> Any:
        """Number of steps in one pass over the data; None if the source does not say."""
        if self.is_streaming:
            return (self.source if training else self.source.keeping_remainder()).num_batches
        return self._plan_for(1, training and self.drop_remainder).steps

    def __len__(self) -> int:
        """Steps in one epoch of `fit`."""
        if self.num_steps is None:
            raise TypeError("The source does not say how many batches it gives, so the feeder has no length.")
        return self.num_steps

    def __bool__(self) -> bool:
        """True, also without a length: Keras asks whether there is validation data."""
        return True

    def __repr__(self) -> str:
        plan = self.plan()
        parts = [] if self.num_samples is None else [f"{self.num_samples} samples"]
        if self.num_sources is not None:
            parts.append(f"{self.num_sources} sources side by side")
        elif self.batch_size is None:
            parts.append("batches of the source's own sizes")
        else:
            sizes = split_batch(min(self.batch_size, self.num_samples or self.batch_size), plan.num_replicas).sizes
            per_replica = str(max(sizes)) if len(set(sizes)) == 1 else f"{min(sizes)} to {max(sizes)}"
            parts.append(f"global batch {self.batch_size}")
            parts.append(f"{plan.num_replicas} x {per_replica} samples per replica")
        if self.num_steps is not None:
            parts.append(f"{self.num_steps} steps per epoch")
        parts.append(f"seed={self.seed if self.shuffle else None}")
        return f"DistributedFeeder({', '.join(parts)})"

    def plan(self, num_replicas: int | None = None) -> BatchPlan:
        """How one pass over the data is cut into steps, and each step into replicas.

        Args:
            num_replicas: Replicas to plan for; None for the devices that `get_strategy` would use, which the plan
                then names.

        Returns:
            The plan; `print` shows it, and so does a notebook.

        Example:
            >>> import keras_gpufeed as kg
            >>> import numpy as np
            >>> feeder = kg.DistributedFeeder(np.zeros((1030, 784), "float32"), batch_size=256)
            >>> print(feeder.plan(num_replicas=4))
            1030 samples in 5 steps of 256 on 4 replicas
              strategy        MirroredStrategy
              a full step     64 + 64 + 64 + 64 samples
              the last step   2 + 2 + 1 + 1 samples
              shares          uneven steps weigh each replica by its samples: 1.33, 1.33, 0.667, 0.667
              left out        nothing
              bytes in flight 12 MB on the host (up to 15 global batches, small ones are read 5 at once)
                              401 KB on each device (one batch waiting and one in use)
              stock Keras     the last step 2 + 2 + 2 + 0 samples: replica 3 gets no sample; each
                              counts 0.75 times in the gradient
              batch size      256 keeps all replicas equally busy
        """
        devices: tuple[str, ...] = ()
        if num_replicas is None:
            devices = strategies.visible_device_names()
            if self.num_sources is not None:
                devices = devices[: self.num_sources]
            num_replicas = self.num_sources or len(devices)
        plan = self._plan_for(_integer("num_replicas", num_replicas, least=1), drop_remainder=self.drop_remainder)
        return dataclasses.replace(plan, devices=devices, strategy=strategy_name(num_replicas))

    def measure(self, seconds: float = 5.0, strategy: tf.distribute.Strategy | None = None) -> FeedRates:
        """Runs the feed alone, as in `fit` but with no model behind it, to see what it could give.

        Args:
            seconds: For how long.
            strategy: Where batches go; None for every visible device.

        Returns:
            The rates of the whole and of each stage; `print` shows them.

        Raises:
            SourceError: If the source can be read only once, so that nothing would be left to train on.

        Example:
            >>> import keras_gpufeed as kg
            >>> import numpy as np
            >>> feeder = kg.DistributedFeeder(np.zeros((1030, 784), "float32"), batch_size=256)
            >>> rates = feeder.measure(seconds=0.1)
            >>> rates.copied_bytes > 600_000, rates.samples_per_second > 0
            (True, True)
        """
        if self.is_streaming and not self.source.can_repeat:
            raise SourceError(
                "measure would use up a generator object or iterator, which can be read only once. Pass the function "
                "that makes it, without calling it."
            )
        if strategy is None:
            strategy = strategies.strategy_of(self.num_sources) if self.num_sources else strategies.get_strategy()
        pipeline = self._pipeline_on(strategy, training=True)
        if self.is_streaming:
            stream: Any = self._batch_stream(True, True, (0, 1), 0, _ENDLESS)
        else:
            stream = self._sample_stream(pipeline, True, 0, _ENDLESS)
        return measure(pipeline, stream, seconds)

    def _plan_for(self, num_replicas: int, drop_remainder: bool) -> BatchPlan:
        if isinstance(self.source, SideBySide):
            return self.source.plan(num_replicas, self.prefetch)
        return BatchPlan(
            num_samples=self.num_samples,
            global_batch_size=self.batch_size,
            num_replicas=num_replicas,
            drop_remainder=drop_remainder,
            sample_bytes=None if self.is_streaming else self.source.sample_bytes,
            prefetch=self.prefetch,
            in_memory=not self.is_streaming and self.source.is_in_memory and not self._overrides,
            num_batches=self.source.num_batches if self.is_streaming else None,
        )

    def _pipeline_on(self, strategy: tf.distribute.Strategy, training: bool, predicting: bool = False) -> Pipeline:
        """The steps on a strategy; made once for each, so that nothing is traced twice.

        Args:
            strategy: Where batches go.
            training: True for `fit`; only there does `drop_remainder` count.
            predicting: True for `predict`.
        """
        key = (strategy, training and self.drop_remainder, predicting)
        if key not in self._pipelines:
            plan = self._plan_for(internals.num_replicas(strategy), key[1])
            self._check_overrides(plan.num_replicas)
            transforms = (self.transform,) if self.transform else ()
            seed = self.seed if self.transform and takes(self.transform, "seed") else None
            self._pipelines[key] = Pipeline(plan, strategy, transforms, predicting, seed, self._overrides)
        return self._pipelines[key]

    def _check_overrides(self, num_replicas: int) -> None:
        for override in self._overrides:
            if override.replica_id >= num_replicas:
                raise SourceError(
                    f"override names replica {override.replica_id}, but there are {num_replicas} replica(s), numbered "
                    "from 0."
                )

    def _sample_stream(self, pipeline: Pipeline, shuffle: bool, first_step: int, num_steps: int) -> SampleStream:
        """One run through arrays.

        Args:
            pipeline: What is going to read it.
            shuffle: True for `fit`.
            first_step: Where to start, counted over all passes.
            num_steps: How many steps to give.
        """
        seed = self.seed if shuffle and self.shuffle else None
        return SampleStream(self.source, pipeline.plan, seed, first_step, num_steps, pipeline.plan.steps_per_read)

    def _batch_stream(
        self, training: bool, shuffle: bool, epochs: tuple[int, int], start: int, steps_per_epoch: int | None
    ) -> BatchStream:
        """One run through a source of batches.

        Args:
            training: True for `fit`; only there does `drop_remainder` count.
            shuffle: True for `fit` unless it was told not to.
            epochs: First epoch and the one to stop before.
            start: Steps of the first epoch to leave out.
            steps_per_epoch: Steps of an epoch, if not one pass.
        """
        seed = self.seed if shuffle and self.shuffle else None
        source = self.source if training else self.source.keeping_remainder()
        return BatchStream(
            source, seed, epochs, start, steps_per_epoch, self.prefetch, self.element_spec, self.padding_value
        )

    def _warn_of_idle_devices(self, num_replicas: int) -> None:
        """Says once if batches are too small to occupy every replica.

        Args:
            num_replicas: Replicas in sync.
        """
        if self.batch_size is None or num_replicas <= self.batch_size or self._has_warned:
            return
        self._has_warned = True
        _logger.warning(
            "A global batch of %d sample(s) is smaller than the number of replicas (%d): every replica computes the "
            "whole batch and only one counts it, so %d device(s) do nothing useful. Use a batch_size of at least %d.",
            self.batch_size,
            num_replicas,
            num_replicas - 1,
            num_replicas,
        )

    def _epochs_trained(self, model: tf.keras.Model) -> int:
        """Epochs that `fit` has given to `model`; the next `fit` goes on with the orders after them."""
        return self._epochs_of.get(model, 0)

    def _note_epochs_trained(self, model: tf.keras.Model, epochs: int) -> None:
        """Records that `model` has been trained for `epochs` epochs."""
        self._epochs_of[model] = epochs

    def distributed_dataset(self, strategy: tf.distribute.Strategy | None = None) -> tf.distribute.DistributedDataset:
        """The steps for a hand-written training loop over a strategy.

        Write the loop as in TensorFlow's guide, with `strategy.run(step, args=(data,))`: losses, gradients and
        metrics inside the step are then those of one device, also in uneven batches (`docs/exactness.md`). A scalar
        that the step returns comes back weighed, so that `strategy.reduce("SUM", loss, axis=None)` is the mean over
        the global batch. `data` may be unpacked; `data.data` are the bare per-replica values, and `data.shares`
        each replica's samples / samples of the step (first of three numbers), None where all steps are even.

        Args:
            strategy: Where the model was built, or moved by `distribute`; None for the strategy whose scope this
                is called in, or the one that `get_strategy` chooses.

        Returns:
            Each `for` loop over it, each `iter`, is one epoch, shuffled anew.

        Example:
            >>> import keras_gpufeed as kg
            >>> import numpy as np
            >>> import tensorflow as tf
            >>> feeder = kg.DistributedFeeder(np.arange(5.0), batch_size=5)
            >>> strategy = kg.get_strategy(["CPU:0", "CPU:1"])
            >>> for data in feeder.distributed_dataset(strategy):
            ...     means = strategy.run(tf.reduce_mean, args=(data,))
            ...     round(float(strategy.reduce("SUM", means, axis=None)), 3)
            2.0
        """
        if strategy is None:
            strategy = tf.distribute.get_strategy()
            if not tf.distribute.has_strategy():
                strategy = strategies.strategy_of(self.num_sources) if self.num_sources else strategies.get_strategy()
        strategies.prepare(strategy)
        pipeline = self._pipeline_on(strategy, training=True, predicting=True)
        steps_per_read = pipeline.plan.steps_per_read
        return LoopDataset(
            pipeline,
            lambda epoch: self._epoch_stream(epoch, pipeline.plan, steps_per_read=steps_per_read),
            self.num_steps,
        )

    def _epoch_stream(self, epoch: int, plan: BatchPlan, training: bool = True, steps_per_read: int = 1) -> Any:
        """One epoch.

        Args:
            epoch: The epoch, from 0.
            plan: How a pass is cut.
            training: True to read as `fit` does, False as `evaluate`.
            steps_per_read: How many steps of arrays to read together.
        """
        if self.is_streaming:
            fixed = self.steps_per_epoch if training else None
            return self._batch_stream(training, training, (epoch, epoch + 1), 0, fixed)
        steps: Any = self.num_steps if training else plan.steps
        seed = self.seed if training and self.shuffle else None
        return SampleStream(self.source, plan, seed, epoch * steps, steps, steps_per_read)

    def dataset(self, replica_id: int | None = None, num_replicas: int | None = None) -> tf.data.Dataset:
        """A plain `tf.data.Dataset`: of the global batches, or of one replica's parts.

        One such data set for each device serves code that places its towers itself. Each iteration of it, each
        `repeat`, is one epoch, shuffled as in `fit`; iterated equally often, the data sets of all replicas are
        in the same step of the same order. The parts of a step may differ in size: `plan(num_replicas).split(step)`
        tells the shares. With fewer samples than replicas left, each replica gets all of them.

        Args:
            replica_id: Which replica's parts; None for whole batches.
            num_replicas: Number of replicas; None for the devices that `get_strategy` would use. A source that is
                no array is read anew for each replica.

        Example:
            >>> import keras_gpufeed as kg
            >>> import numpy as np
            >>> feeder = kg.DistributedFeeder(np.arange(5.0), batch_size=3, shuffle=False)
            >>> [batch.numpy().tolist() for batch in feeder.dataset(replica_id=1, num_replicas=2)]
            [[2.0], [4.0]]
        """
        if num_replicas is None:
            num_replicas = self.num_sources or (1 if replica_id is None else strategies.num_visible_devices())
        num_replicas = _integer("num_replicas", num_replicas, least=1)
        plan = self._plan_for(num_replicas, self.drop_remainder)
        self._check_overrides(num_replicas)
        if replica_id is None and self._overrides:
            raise SourceError(
                "dataset() gives whole batches, but override gives a replica values of its own. Pass replica_id."
            )
        if replica_id is not None and not 0 <= _integer("replica_id", replica_id) < num_replicas:
            raise SourceError(f"replica_id must be from 0 to {num_replicas - 1}. Received {replica_id}.")
        if replica_id is not None and self.is_streaming and not self.source.can_repeat:
            raise SourceError(
                "An iterator can be read once, but dataset(replica_id=...) is read by each replica. Pass the function "
                "that makes it, or use distributed_dataset, which reads it once for all."
            )

        def read(stream: Any) -> Iterator:
            if replica_id is None or (not self.is_streaming and not self._overrides):
                return steps_of(stream, replica_id)
            parts = parts_of_steps(stream, num_replicas, self._overrides)
            return (as_keras_does(of_replicas[replica_id]) for _, of_replicas in parts)

        return self._as_dataset(Passes(lambda epoch: self._epoch_stream(epoch, plan), read))

    def _as_dataset(self, passes: Passes) -> tf.data.Dataset:
        spec = as_keras_does(passes.element_spec)
        dataset = tf.data.Dataset.from_generator(passes, output_signature=spec)
        if self.transform is not None:
            if takes(self.transform, "seed"):
                raise SourceError(
                    "The transform takes the seeds of the samples, which a plain data set does not carry. Use "
                    "distributed_dataset, or apply the function with Dataset.map and seeds of yours."
                )
            dataset = dataset.map(self.transform)
        return dataset.prefetch(self.prefetch)

    def shard(self, num_shards: int, index: int, contiguous: bool = False) -> DistributedFeeder:
        """A feeder over one of several disjoint shards of the data, which together are all of it.

        For programs that run side by side, each with its own devices. Shards of arrays differ by at most one sample;
        of other sources each takes every `num_shards`-th batch (give all programs the same `seed`).

        Args:
            num_shards: Number of shards.
            index: Which of them, from 0.
            contiguous: Whether a shard of arrays is a block of consecutive samples, not every `num_shards`-th one
                as in `tf.data.Dataset.shard`.

        Example:
            >>> import keras_gpufeed as kg
            >>> import numpy as np
            >>> feeder = kg.DistributedFeeder(np.arange(5), shuffle=False)
            >>> [batch.numpy().tolist() for batch in feeder.shard(2, 0).dataset()]
            [[0, 2, 4]]
            >>> [batch.numpy().tolist() for batch in feeder.shard(2, 1, contiguous=True).dataset()]
            [[3, 4]]
        """
        num_shards = _integer("num_shards", num_shards, least=1)
        if not 0 <= _integer("index", index) < num_shards:
            raise SourceError(f"index must be from 0 to {num_shards - 1} for {num_shards} shards. Received {index}.")
        if self.num_sources is not None:
            raise SourceError("Sources side by side cannot be sharded together. Shard each of them.")
        if self.is_streaming:
            if contiguous:
                raise SourceError(
                    "contiguous=True needs arrays, whose samples can be counted. Leave it out: each shard then gets "
                    f"every {num_shards}-th batch."
                )
            return self._copy(EveryNthBatch(self.source, index, num_shards))
        if num_shards > self.num_samples:
            raise SourceError(f"{self.num_samples} sample(s) cannot be cut into {num_shards} shards.")
        if contiguous:
            start, stop = split_batch(self.num_samples, num_shards).parts[index]
            return self._over(start, stop)
        return self._copy(EveryNthSample(self.source, index, num_shards))

    def feed_dicts(
        self, towers: Sequence[Any], shares: Sequence[Any] | None = None, epochs: int = 1
    ) -> Iterator[dict[Any, Any]]:
        """The steps as values of `feed_dict` for `session.run`, each tower with its own part.

        For `tf.compat.v1` graphs with towers. Each call goes on with the orders of the next epochs.

        Args:
            towers: For each tower the tensors to feed, as a tuple `(x, y)` like the feeder's own, or the tensor of x
                alone. Any tensor will do, also one that is no placeholder: what the graph computes there is replaced.
            shares: For each tower a scalar tensor for its share: towers x its samples / samples of the step. The
                mean over towers of share x mean loss is the loss of one device, and so are the gradients.
            epochs: How often to read all samples.

        Returns:
            An iterator of dicts. With fewer samples than towers left, each tower gets all of them; its share is 1.

        Example:
            >>> import keras_gpufeed as kg
            >>> import numpy as np
            >>> import tensorflow as tf
            >>> feeder = kg.DistributedFeeder(np.arange(6.0), batch_size=4, shuffle=False)
            >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            ...     towers = [tf.compat.v1.placeholder(tf.float32, [None]) for _ in range(2)]
            ...     sums = [tf.reduce_sum(tower) for tower in towers]
            ...     for feed_dict in feeder.feed_dicts(towers):
            ...         print(*session.run(sums, feed_dict))
            1.0 5.0
            4.0 5.0
        """
        graph_mode.check_towers(towers, shares)
        num_epochs = _integer("epochs", epochs, least=1)
        plan = self._plain_plan(len(towers))
        steps = itertools.chain.from_iterable(
            parts_of_steps(self._epoch_stream(next(self._epochs_given), plan), len(towers), self._overrides)
            for _ in range(num_epochs)
        )
        return graph_mode.feed_dicts(steps, towers, shares)

    def fill_queue(
        self,
        queue: tf.queue.QueueBase,
        session: tf.compat.v1.Session,
        coordinator: tf.train.Coordinator,
        *,
        whole_batches: bool = False,
        epochs: int | None = None,
    ) -> list[threading.Thread]:
        """Fills a TensorFlow queue, for `tf.compat.v1` code that dequeues.

        The threads end with the coordinator, which also gets an error of the source. When the data has ended, the
        queue is closed: `dequeue` then raises `OutOfRangeError` once it is empty.

        Args:
            queue: A queue of the session's graph, for instance a `FIFOQueue`, with a component for each array.
            session: Runs the graph.
            coordinator: Its `join` waits for the threads.
            whole_batches: Whether an element of the queue is a global batch, not a sample.
            epochs: How often to read all samples; None until the coordinator ends.

        Returns:
            The threads, started.

        Example:
            >>> import keras_gpufeed as kg
            >>> import numpy as np
            >>> import tensorflow as tf
            >>> feeder = kg.DistributedFeeder(np.arange(6.0), shuffle=False)
            >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            ...     queue = tf.queue.FIFOQueue(4, [tf.float32], [[]])
            ...     samples = queue.dequeue_many(3)
            ...     coordinator = tf.train.Coordinator()
            ...     threads = feeder.fill_queue(queue, session, coordinator)
            ...     print(session.run(samples))
            ...     coordinator.request_stop()
            ...     coordinator.join(threads)
            [0. 1. 2.]
        """
        plan = self._plain_plan(self.num_sources or 1)
        first = self._epoch_stream(next(self._epochs_given), plan)
        graph_mode.check_queue(queue, first.element_spec, whole_batches)
        more = (
            self._epoch_stream(next(self._epochs_given), plan)
            for _ in (itertools.count() if epochs is None else range(_integer("epochs", epochs, least=1) - 1))
        )
        batches = itertools.chain.from_iterable(steps_of(stream, None) for stream in itertools.chain([first], more))
        return graph_mode.QueueFiller(queue, batches, session, coordinator, whole_batches).start()

    def _plain_plan(self, num_replicas: int) -> BatchPlan:
        """The plan for code that gets arrays and not a data set."""
        if self.transform is not None:
            raise SourceError(
                "transform is applied where TensorFlow reads the data, and arrays are handed out here. Leave it out, "
                "and apply the function to the tensors of the graph."
            )
        self._check_overrides(num_replicas)
        return self._plan_for(num_replicas, self.drop_remainder)

    def input_fn(self, mode: str | None = None, input_context: Any = None) -> tf.data.Dataset:
        """The `input_fn` of a `tf.estimator.Estimator`: `estimator.train(input_fn=feeder.input_fn)`.

        Under `RunConfig(train_distribute=tf.distribute.MirroredStrategy())` each replica gets its part of the global
        batch; there is no second multiplication of `batch_size`, as with data sets. One call of `train` is one epoch,
        the next goes on with the order of the next; for more at once, write an `input_fn(mode, input_context)` of
        yours that returns `feeder.input_fn(mode, input_context).repeat(10)`. An Estimator averages replicas without
        weights, so that a step is exact only if it is even: see `plan`, and `drop_remainder`.

        Args:
            mode: A `tf.estimator.ModeKeys`: training shuffles, evaluation and prediction read all in input order.
            input_context: What the strategy says of its replicas.

        Example:
            >>> import keras_gpufeed as kg
            >>> import numpy as np
            >>> feeder = kg.DistributedFeeder({"x": np.arange(4.0)}, np.arange(4), batch_size=4)
            >>> [labels.numpy().tolist() for _, labels in feeder.input_fn("eval")]
            [[0, 1, 2, 3]]
        """
        training = mode in (None, tf.estimator.ModeKeys.TRAIN)
        num_replicas = 1 if input_context is None else input_context.num_replicas_in_sync
        self._check_overrides(num_replicas)
        plan = self._plan_for(num_replicas, training and self.drop_remainder)

        def open_stream(_: int) -> Any:
            return self._epoch_stream(next(self._epochs_given) if training else 0, plan, training)

        def read(stream: Any) -> Iterator:
            steps = parts_of_steps(stream, num_replicas, self._overrides)
            return (as_keras_does(part) for _, parts in steps for part in parts)

        passes = Passes(open_stream, read)
        if len(passes.element_spec) > 2:
            raise SourceError(
                "An Estimator takes (features, labels). Put the sample weights among the features, and name them as "
                "its weight_column."
            )
        return self._as_dataset(passes)

    def validation_split(self, fraction: float) -> tuple[DistributedFeeder, DistributedFeeder]:
        """Two feeders over the same data: all but the last samples, and the last ones, as Keras splits arrays.

        Args:
            fraction: Part of the samples to hold out, between 0 and 1.

        Returns:
            The feeder to train on and the one to validate on. They share the seed.

        Example:
            >>> import keras_gpufeed as kg
            >>> import numpy as np
            >>> train, validation = kg.DistributedFeeder(np.arange(50.0)).validation_split(0.2)
            >>> train.num_samples, validation.num_samples
            (40, 10)
        """
        if self.is_streaming:
            raise SourceError(
                "validation_split needs arrays, whose last samples can be held out. Give the source of the "
                "validation batches a feeder of its own: validation_data=DistributedFeeder(...)."
            )
        if not 0 < fraction < 1:
            raise SourceError(f"validation_split must lie between 0 and 1. Received {fraction!r}.")
        split_at = math.floor(self.num_samples * (1.0 - fraction))  # Rounded as Keras does.
        if split_at in (0, self.num_samples):
            raise SourceError(
                f"{self.num_samples} samples are too few for validation_split={fraction}: one side stays empty."
            )
        return self._over(0, split_at), self._over(split_at, self.num_samples)

    def _over(self, start: int, stop: int) -> DistributedFeeder:
        return self._copy(SampleRange(self.source, start, stop))


def _refuse_nested_feeders(x: Any, y: Any, sample_weight: Any) -> None:
    for name, value in (("x", x), ("y", y), ("sample_weight", sample_weight)):
        if any(isinstance(item, DistributedFeeder) for item in tf.nest.flatten(value)):
            raise SourceError(f"{name} holds a DistributedFeeder; a feeder takes data, not other feeders.")


def _integer(name: str, value: Any, least: int | None = None) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise SourceError(f"{name} must be an integer. Received {value!r} of type {type(value).__name__}.")
    if least is not None and value < least:
        raise SourceError(f"{name} must be at least {least}. Received {value}.")
    return int(value)


def _positive(name: str, value: Any) -> int | None:
    return None if value is None else _integer(name, value, least=1)


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise SourceError(f"{name} must be True or False. Received {value!r}.")
    return bool(value)
