"""The public object that takes data into `fit`.

Flow:   ... -> pipeline -> [feeder] -> keras_entry -> model
Owns:   the public arguments and their checks; pipelines, one for each strategy.
Leaves: how Keras is entered (keras_entry), everything upstream.
"""

from __future__ import annotations

import logging
import math
import secrets
import weakref
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from . import internals
from . import strategy as strategies
from .batch_sources import DEFAULT_BATCH_SIZE, BatchSource, WorkerSettings, make_batch_source
from .errors import SourceError
from .measuring import FeedRates, measure
from .pipeline import Pipeline
from .plan import BatchPlan, split_batch
from .sources import ArraySource, SampleRange
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
            one: with x, y and sample_weight as far as they were given. It keeps the number of samples.
        workers: Processes that make the batches: of a Sequence, of an object that gives samples by number (each
            batch made once, in order), or of a generator function that takes `worker_id` and `num_workers` and
            gives its part; any other generator function runs in one. 0: a thread of this process. NumPy's and
            Python's random state in a worker depend on (seed, epoch, batch number), for generators on (seed,
            epoch, worker). The processes live until the feeder is closed or gone.
        start_method: "spawn" (None) starts new interpreters; "fork" copies this process, which may deadlock
            beside TensorFlow's threads but knows the classes of a notebook.
        stall_seconds: A worker that gives nothing for so long is reported by a warning with its traceback.
        stall_limit_seconds: A worker that gives nothing for so long ends training with `WorkerError`.
        prefetch: Global batches prepared ahead of the step, at least 0.
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
            self.source: Any = ArraySource(x, y, sample_weight)
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
        self.element_spec = element_spec
        self._setup()

    def _setup(self) -> None:
        self.plan(1)  # Refuses what leaves nothing to feed.
        self._pipelines: dict = {}
        self._has_warned = False
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
        if self.batch_size is None:
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
            num_replicas: Replicas to plan for; None for the devices that `get_strategy` would use.

        Returns:
            The plan; `print` shows it.

        Example:
            >>> import keras_gpufeed as kg
            >>> import numpy as np
            >>> feeder = kg.DistributedFeeder(np.zeros((1030, 784), "float32"), batch_size=256)
            >>> print(feeder.plan(num_replicas=4))
            1030 samples in 5 steps of 256 on 4 replicas
              a full step     64 + 64 + 64 + 64 samples
              the last step   2 + 2 + 1 + 1 samples
              shares          uneven steps weigh each replica by its samples: 1.33, 1.33, 0.667, 0.667
              left out        nothing
              bytes in flight 2.41 MB on the host (2 global batches ahead and one in use)
        """
        if num_replicas is None:
            num_replicas = strategies.num_visible_devices()
        return self._plan_for(_integer("num_replicas", num_replicas, least=1), drop_remainder=self.drop_remainder)

    def measure(self, seconds: float = 5.0, strategy: tf.distribute.Strategy | None = None) -> FeedRates:
        """Runs the feed alone, as in `fit` but with no model behind it, to see what it could give.

        Args:
            seconds: For how long.
            strategy: Where batches go; None for that of `get_strategy`.

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
        pipeline = self._pipeline_on(strategy or strategies.get_strategy(), training=True)

        if self.is_streaming:
            stream: Any = self._batch_stream(True, True, (0, 1), 0, _ENDLESS)
        else:
            stream = self._sample_stream(pipeline, True, 0, _ENDLESS)
        return measure(pipeline, stream, seconds)

    def _plan_for(self, num_replicas: int, drop_remainder: bool) -> BatchPlan:
        return BatchPlan(
            num_samples=self.num_samples,
            global_batch_size=self.batch_size,
            num_replicas=num_replicas,
            drop_remainder=drop_remainder,
            sample_bytes=None if self.is_streaming else self.source.sample_bytes,
            prefetch=self.prefetch,
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
            transforms = (self.transform,) if self.transform else ()
            self._pipelines[key] = Pipeline(plan, strategy, transforms, predicting)
        return self._pipelines[key]

    def _sample_stream(self, pipeline: Pipeline, shuffle: bool, first_step: int, num_steps: int) -> SampleStream:
        """One run through arrays.

        Args:
            pipeline: What is going to read it.
            shuffle: True for `fit`.
            first_step: Where to start, counted over all passes.
            num_steps: How many steps to give.
        """
        seed = self.seed if shuffle and self.shuffle else None
        return SampleStream(self.source, pipeline.plan, seed, first_step, num_steps)

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
        return BatchStream(source, seed, epochs, start, steps_per_epoch, self.prefetch, self.element_spec)

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
        feeder = object.__new__(DistributedFeeder)
        feeder.__dict__.update(self.__dict__)
        feeder.source = SampleRange(self.source, start, stop)
        feeder._setup()
        return feeder


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
