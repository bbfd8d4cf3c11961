"""The public object that takes data into `fit`.

Flow:   ... -> pipeline -> [feeder] -> keras_entry -> model
Owns:   the public arguments and their checks; pipelines, one for each strategy.
Leaves: how Keras is entered (keras_entry), everything upstream.
"""

from __future__ import annotations

import math
import secrets
import weakref
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from . import internals
from . import strategy as strategies
from .errors import SourceError
from .pipeline import Pipeline, Stream
from .plan import BatchPlan
from .sources import ArraySource, SampleRange

_DEFAULT_BATCH_SIZE = 32  # As in Keras.


class DistributedFeeder:
    """Feeds arrays to every device, with the result of one.

    Goes where `x` goes: into `fit`, `evaluate`, `predict` and `validation_data`, of any Keras model. A model that
    lives on no strategy is moved onto every visible GPU, in place.

    Args:
        x: Inputs of shape `(num_samples, ...)`: a NumPy array, memory map, pandas frame, tensor or anything
            with shape, dtype, length and indexing (an HDF5 data set); or tuples, lists and dicts of these.
            Nothing is copied but the batches in flight.
        y: Targets, likewise.
        sample_weight: Weights of shape `(num_samples,)` or `(num_samples, time steps)`, or one such array for
            each output.
        batch_size: Global batch size: samples per step over all replicas, as in Keras. Any number; it need
            not divide by the replicas, nor the samples by it.
        shuffle: Whether `fit` reads samples in a new random order each epoch. `evaluate`, `predict` and
            validation always read in input order.
        seed: Fixes the orders: they depend on (seed, epoch) alone, not on the number of replicas. None draws
            one, found in `feeder.seed`, so that a run can be repeated.
        drop_remainder: Whether to leave out a last batch smaller than `batch_size` in `fit`.
        steps_per_epoch: Steps of an epoch of `fit`, if not one pass over the data. The next epoch goes on
            where the last one stopped.
        transform: A TensorFlow function applied to each global batch on the host, called as `Dataset.map` calls
            one: with x, y and sample_weight as far as they were given. It keeps the number of samples.
        prefetch: Global batches prepared ahead of the step, at least 0.

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
        prefetch: int = 2,
    ) -> None:
        if isinstance(x, DistributedFeeder):
            raise SourceError("x is a DistributedFeeder already; pass it to fit as it is.")
        self.batch_size: int = _positive("batch_size", batch_size, default=_DEFAULT_BATCH_SIZE)
        self.steps_per_epoch: int | None = _positive("steps_per_epoch", steps_per_epoch)
        self.prefetch: int = _integer("prefetch", prefetch, least=0)
        self.shuffle: bool = _boolean("shuffle", shuffle)
        self.drop_remainder: bool = _boolean("drop_remainder", drop_remainder)
        self.seed: int = secrets.randbits(32) if seed is None else _integer("seed", seed)
        self.seed_was_drawn: bool = seed is None
        if transform is not None and not callable(transform):
            raise SourceError(f"transform must be a function of (x, y). Received a {type(transform).__name__}.")
        self.transform = transform
        self.source: ArraySource | SampleRange = _make_source(x, y, sample_weight)
        self._setup()

    def _setup(self) -> None:
        self.plan(1)  # Refuses what leaves nothing to feed.
        self._pipelines: dict = {}
        self._epochs_of: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    @property
    def num_samples(self) -> int:
        """Samples in one pass."""
        return self.source.num_samples

    def __len__(self) -> int:
        """Steps in one epoch of `fit`."""
        return self.steps_per_epoch or self.plan(1).steps

    def __repr__(self) -> str:
        plan = self.plan()
        sizes = plan.split(0).sizes
        per_replica = str(max(sizes)) if len(set(sizes)) == 1 else f"{min(sizes)} to {max(sizes)}"
        return (
            f"DistributedFeeder({self.num_samples} samples, global batch {self.batch_size}, "
            f"{plan.num_replicas} x {per_replica} samples per replica, {len(self)} steps per epoch, "
            f"seed={self.seed if self.shuffle else None})"
        )

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
        num_replicas = _positive("num_replicas", num_replicas)
        return self._plan_for(num_replicas, drop_remainder=self.drop_remainder)

    def _plan_for(self, num_replicas: int, drop_remainder: bool) -> BatchPlan:
        return BatchPlan(
            num_samples=self.num_samples,
            global_batch_size=self.batch_size,
            num_replicas=num_replicas,
            drop_remainder=drop_remainder,
            sample_bytes=self.source.sample_bytes,
            prefetch=self.prefetch,
        )

    def pipeline(
        self, strategy: tf.distribute.Strategy, training: bool, predicting: bool = False
    ) -> Pipeline:
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
            self._pipelines[key] = Pipeline(self.source, plan, strategy, transforms, predicting)
        return self._pipelines[key]

    def stream(self, pipeline: Pipeline, training: bool, first_step: int, num_steps: int) -> Stream:
        """One run through the data.

        Args:
            pipeline: What is going to read it.
            training: True for `fit`; only there are samples shuffled.
            first_step: Where to start, counted over all passes.
            num_steps: How many steps to give.
        """
        seed = self.seed if training and self.shuffle else None
        return Stream(self.source, pipeline.plan, seed, first_step, num_steps)

    def epochs_trained(self, model: tf.keras.Model) -> int:
        """Epochs that `fit` has given to `model`; the next `fit` goes on with the orders after them."""
        return self._epochs_of.get(model, 0)

    def note_epochs_trained(self, model: tf.keras.Model, epochs: int) -> None:
        """Records that `model` has been trained for `epochs` epochs."""
        self._epochs_of[model] = epochs

    def validation_split(self, fraction: float) -> tuple["DistributedFeeder", "DistributedFeeder"]:
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
        if not 0 < fraction < 1:
            raise SourceError(f"validation_split must lie between 0 and 1. Received {fraction!r}.")
        split_at = math.floor(self.num_samples * (1.0 - fraction))  # Rounded as Keras does.
        if split_at in (0, self.num_samples):
            raise SourceError(
                f"{self.num_samples} samples are too few for validation_split={fraction}: one side stays empty."
            )
        return self._over(0, split_at), self._over(split_at, self.num_samples)

    def _over(self, start: int, stop: int) -> "DistributedFeeder":
        feeder = object.__new__(DistributedFeeder)
        feeder.__dict__.update(self.__dict__)
        feeder.source = SampleRange(self.source, start, stop)
        feeder._setup()
        return feeder


def _make_source(x: Any, y: Any, sample_weight: Any) -> ArraySource:
    for name, value in (("x", x), ("y", y), ("sample_weight", sample_weight)):
        if any(isinstance(item, DistributedFeeder) for item in tf.nest.flatten(value)):
            raise SourceError(f"{name} holds a DistributedFeeder; a feeder takes arrays, not other feeders.")
        if isinstance(value, (tf.data.Dataset, tf.keras.utils.Sequence)) or hasattr(value, "__next__"):
            raise SourceError(
                f"{name} is a {type(value).__name__}; this version feeds arrays. "
                "Pass it to fit without a feeder."
            )
    return ArraySource(x, y, sample_weight)


def _integer(name: str, value: Any, least: int | None = None) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise SourceError(f"{name} must be an integer. Received {value!r} of type {type(value).__name__}.")
    if least is not None and value < least:
        raise SourceError(f"{name} must be at least {least}. Received {value}.")
    return int(value)


def _positive(name: str, value: Any, default: int | None = None) -> Any:
    return default if value is None else _integer(name, value, least=1)


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise SourceError(f"{name} must be True or False. Received {value!r}.")
    return bool(value)
