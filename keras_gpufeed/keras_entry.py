"""The way from `model.fit(feeder)` into the feeder.

Flow:   ... -> feeder -> [keras_entry] -> model
Owns:   the entry of `fit`, `evaluate` and `predict`, and the data adapter.
Leaves: everything that Keras does well; without a feeder in the call, all of it.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from . import internals
from . import strategy as strategies
from .batch_sources import is_batch_source
from .errors import SourceError, StrategyError
from .exact import agree_on_statistics
from .feeder import DistributedFeeder
from .meter import FeedMeter
from .pipeline import Pipeline, iterate_one_step
from .promotion import distribute, follow_shared_layers, move_along, was_moved
from .streams import Batch, Failure

_logger = logging.getLogger("keras_gpufeed")
_active = threading.local()
_LONGEST_STRUCTURE = 100


def install() -> None:
    """Registers the adapter and takes the places in Keras."""
    internals.register_adapter(FeedAdapter)
    internals.attach("enumerate_epochs", _enumerate_epochs)
    internals.attach("steps", _steps)
    internals.attach("compile", _compile)
    internals.attach("initial_counters", _initial_counters)
    internals.attach("single_batch_iterator", _single_batch_iterator)
    for name in ("train_on_batch", "test_on_batch"):
        internals.attach(name, _on_batch)
    for name in ("fit", "evaluate", "predict"):
        internals.attach(name, _entry)


class _Call:
    """One `fit`, `evaluate` or `predict` that was handed a feeder."""

    def __init__(self, name: str, x: Any, num_epochs: int, callbacks: Any = None) -> None:
        self.name, self.x, self.num_epochs, self.callbacks = name, x, num_epochs, callbacks
        self.training_data_taken = False
        self.streams: list[Any] = []
        # For a monitor:
        self.monitored = self.holds_batch = False
        self.training: FeedAdapter | None = None
        self.when_over: list[Callable[[BaseException | None], None]] = []

    def takes_for_training(self, feeder: DistributedFeeder) -> bool:
        """True for the first adapter of a `fit`; the same feeder may come again as validation data."""
        if self.name != "fit" or feeder is not self.x or self.training_data_taken:
            return False
        self.training_data_taken = True
        return True

    @property
    def failure(self) -> Failure | None:
        return next((stream.failure for stream in self.streams if stream.failure is not None), None)


def _calls() -> list[_Call]:
    if not hasattr(_active, "calls"):
        _active.calls = []
    return _active.calls


def current_call() -> _Call | None:
    """The innermost call of this thread that was handed a feeder and is under way."""
    return _calls()[-1] if _calls() else None


def _entry(original: Callable) -> Callable:
    signature = inspect.signature(original)
    name = original.__name__

    def call(model: tf.keras.Model, *args: Any, **kwargs: Any) -> Any:
        follow_shared_layers(model)
        has_feeder = _holds_feeder([*args, *kwargs.values()])
        if not has_feeder and not was_moved(model):
            return original(model, *args, **kwargs)
        arguments = signature.bind(model, *args, **kwargs).arguments
        del arguments["self"]
        arguments.update(arguments.pop("kwargs", {}))
        if not has_feeder:
            # Plain data on a model that was moved: Keras would train it inexactly on several devices.
            feeder = feeder_of(arguments)
            if feeder is None:
                return original(model, **arguments)
            arguments["x"] = feeder
        _prepare(model, name, arguments)
        if isinstance(arguments.get("callbacks"), list):
            # Those that add to the logs, or set the learning rate, before those that read them.
            arguments["callbacks"] = sorted(
                arguments["callbacks"], key=lambda callback: not getattr(callback, "goes_first", False)
            )
        num_epochs = arguments.get("epochs", 1) - arguments.get("initial_epoch", 0)
        if name != "fit":
            agree_on_statistics(model)
        with _entered(model, _Call(name, arguments.get("x"), num_epochs, arguments.get("callbacks"))):
            result = original(model, **arguments)
        if name == "fit":
            agree_on_statistics(model)
        return result

    return call


def _compile(original: Callable) -> Callable:
    def compile(model: tf.keras.Model, *args: Any, **kwargs: Any) -> Any:
        if was_moved(model):
            distribute(model)  # Layers that were added since.
            move_along((args, kwargs), model.distribute_strategy)  # Metrics and optimizers that were made since.
        return original(model, *args, **kwargs)

    return compile


def _initial_counters(original: Callable) -> Callable:
    def initial_counters(model: tf.keras.Model, steps_per_epoch: int | None, initial_epoch: int) -> Any:
        # A step in the middle of an epoch of unknown length: at its end the source says so.
        return original(model, steps_per_epoch or 0, initial_epoch)

    return initial_counters


def _on_batch(original: Callable) -> Callable:
    def on_batch(model: tf.keras.Model, *args: Any, **kwargs: Any) -> Any:
        if not was_moved(model):
            return original(model, *args, **kwargs)
        _active.feeds_single_batches = True
        try:
            return original(model, *args, **kwargs)
        finally:
            _active.feeds_single_batches = False

    return on_batch


def _single_batch_iterator(original: Callable) -> Callable:
    def single_batch_iterator(strategy: tf.distribute.Strategy, *args: Any, **kwargs: Any) -> Iterator:
        if not getattr(_active, "feeds_single_batches", False) or strategy.num_replicas_in_sync == 1:
            return original(strategy, *args, **kwargs)
        (data,) = original(internals.default_strategy(), *args, **kwargs)
        return iterate_one_step(data if isinstance(data, tuple) else (data,), strategy)

    return single_batch_iterator


def _holds_feeder(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        # A feeder among thousands of numbers is nobody's mistake, and looking costs every `fit` of arrays in lists.
        return len(value) <= _LONGEST_STRUCTURE and any(map(_holds_feeder, value))
    if isinstance(value, dict):
        return any(map(_holds_feeder, value.values()))
    return isinstance(value, DistributedFeeder)


@contextlib.contextmanager
def _entered(model: tf.keras.Model, call: _Call) -> Iterator[None]:
    _calls().append(call)
    ended_by: BaseException | None = None
    try:
        yield
    except BaseException as error:
        ended_by = error
        if call.name == "fit":
            # Keras keeps the validation data for the next epoch, and after an error for the next `fit`.
            vars(model).pop("_eval_data_handler", None)
        if call.failure is not None and call.failure.is_behind(error):
            call.failure.raise_again()
        raise
    finally:
        _calls().pop()
        try:
            for say in call.when_over:
                say(ended_by)
        finally:
            ended_by = None  # Its traceback leads back to this frame.
            for stream in call.streams:
                stream.close()
                stream.failure = None  # Its traceback leads back to the iterator, and so to the user's data.
            call.training = None  # It leads to the call: data and buffers would stay until Python looks for cycles.


# --- Before Keras begins -----------------------------------------------------------------------------------


def _prepare(model: tf.keras.Model, name: str, arguments: dict) -> None:
    _refuse_misplaced_feeders(name, arguments)
    if name == "fit":
        _prepare_fit(arguments)
    for argument in ("steps_per_epoch", "validation_steps", "steps"):
        steps = arguments.get(argument)
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, (int, np.integer))):
            raise SourceError(f"{argument} must be an integer. Received {steps!r} of type {type(steps).__name__}.")
    feeder = arguments.get("x")
    if not isinstance(feeder, DistributedFeeder):
        return  # Only the validation data is a feeder; it takes whichever strategy the model lives on.
    was_moved = internals.lives_on(model) is None
    distribute(model, strategies.strategy_of(feeder.num_sources) if was_moved and feeder.num_sources else None)
    strategy = model.distribute_strategy
    strategies.prepare(strategy)
    _check_model(model, name, feeder, strategy)
    validation = arguments.get("validation_data")
    if isinstance(validation, DistributedFeeder):
        _check_model(model, "evaluate", validation, strategy)
    if was_moved and strategy.num_replicas_in_sync > 1:
        _say_what_was_done(feeder, strategy)
    feeder._warn_of_idle_devices(strategy.num_replicas_in_sync)


def _refuse_misplaced_feeders(name: str, arguments: dict) -> None:
    x = arguments.get("x")
    if not isinstance(x, DistributedFeeder) and _holds_feeder(x):
        raise SourceError(
            f"x is a {type(x).__name__} that holds a DistributedFeeder. Pass the feeder itself, which holds "
            f"inputs, targets and weights: model.{name}(feeder)."
        )
    for other in ("y", "sample_weight"):
        if _holds_feeder(arguments.get(other)):
            raise SourceError(
                f"{other} is a DistributedFeeder. Targets and weights go into the feeder of the inputs: "
                "DistributedFeeder(x, y, sample_weight)."
            )
        if isinstance(x, DistributedFeeder) and arguments.get(other) is not None:
            raise SourceError(
                f"{other} was given beside a DistributedFeeder, which holds its own targets and weights. "
                f"Write model.{name}(DistributedFeeder(x, y, sample_weight))."
            )
    batch_size = arguments.get("batch_size")
    passed_on_by_fit = arguments.get("_use_cached_eval_dataset", False)
    if isinstance(x, DistributedFeeder) and batch_size not in (None, x.batch_size) and not passed_on_by_fit:
        raise SourceError(
            f"batch_size={batch_size} was given to {name}, but the feeder has batch_size={x.batch_size}. "
            "Give it to the feeder only: DistributedFeeder(x, y, batch_size=...)."
        )


def _prepare_fit(arguments: dict) -> None:
    x, validation = arguments.get("x"), arguments.get("validation_data")
    if not isinstance(x, DistributedFeeder):
        # Stock Keras would train inexactly on the strategy that the validation feeder may live on.
        x = feeder_of(arguments)
        if x is None:
            return
    arguments["x"] = x
    split = arguments.pop("validation_split", 0.0)
    if split and validation is None:
        x, validation = x.validation_split(split)
        arguments["x"] = x
    if validation is not None:
        arguments["validation_data"] = _validation_feeder(validation, x, arguments)


def _validation_feeder(validation: Any, x: DistributedFeeder, arguments: dict) -> Any:
    if isinstance(validation, (tuple, list)):
        if _holds_feeder(validation):
            if len(validation) > 1:
                raise SourceError(
                    f"validation_data is a {type(validation).__name__} that holds a DistributedFeeder. Pass the "
                    "feeder itself: validation_data=DistributedFeeder(x, y)."
                )
            return validation[0]
        inputs, targets, weights = internals.unpack_x_y_sample_weight(tuple(validation))
    else:
        inputs, targets, weights = validation, None, None
    batch_size = arguments.pop("validation_batch_size", None) or x.batch_size
    named = {"x": inputs, "y": targets, "sample_weight": weights, "batch_size": batch_size}
    return feeder_of(named) or validation


def feeder_of(arguments: dict) -> DistributedFeeder | None:
    """Moves the data out of the arguments of `fit`, `evaluate` or `predict` into a feeder.

    Args:
        arguments: The call's arguments by name; those that the feeder takes over are removed.

    Returns:
        The feeder: `x` itself if it is one, None for data that is distributed already.
    """
    x, y = arguments.get("x"), arguments.get("y")
    if isinstance(x, DistributedFeeder):
        return x
    is_array = internals.keras_would_take(x, y)
    if not is_array and not is_batch_source(x):
        return None
    data = {name: arguments.pop(name, None) for name in ("x", "y", "sample_weight")}
    batch_size = arguments.pop("batch_size", None)
    steps = arguments.get("steps_per_epoch") or arguments.get("steps")
    shuffle = arguments.pop("shuffle", True)
    if isinstance(shuffle, str):
        raise SourceError(
            f"shuffle={shuffle!r} keeps samples of a batch together, for HDF5; a feeder reads HDF5 sample by "
            "sample at no such cost. Use shuffle=True."
        )
    if is_array and batch_size is None and steps:  # As Keras does: then steps alone fix the size of a batch.
        batch_size = -(-DistributedFeeder(**data).num_samples // steps)
    workers = arguments.get("workers", 1) if arguments.get("use_multiprocessing") else 0
    return DistributedFeeder(
        **data,
        batch_size=batch_size if is_array else None,  # Sources of batches keep theirs, as in Keras.
        shuffle=bool(shuffle),
        workers=0 if is_array else workers,
    )


def _check_model(model: tf.keras.Model, name: str, feeder: DistributedFeeder, strategy: tf.distribute.Strategy) -> None:
    on_several_cpus = strategy.num_replicas_in_sync > 1 and any(
        "GPU" not in device for device in internals.replica_devices(strategy)
    )
    if model.jit_compile and on_several_cpus:
        raise StrategyError(
            "jit_compile=True does not work on several CPU devices: XLA has no collectives for them in "
            "TensorFlow 2.15. Compile the model with jit_compile=False, or use one device or GPUs."
        )
    if feeder.num_sources is not None and name == "predict":
        raise SourceError(
            "predict returns one row for each sample in input order, and sources side by side have none in common. "
            "Predict from each source: model.predict(DistributedFeeder(x))."
        )
    if feeder.is_streaming:
        return  # What it gives is known when it has been read.
    step = {"fit": "train_step", "evaluate": "test_step"}.get(name, "")
    is_keras_own = getattr(type(model), step, None) is getattr(tf.keras.Model, step, None)
    loss = getattr(model, "loss", None)
    if step and is_keras_own and loss and len(feeder.source.element_spec) < 2:
        raise SourceError(
            f"The model was compiled with loss={loss!r}, which needs targets, but the feeder holds "
            "inputs only. Pass y: DistributedFeeder(x, y). A list of batches goes in as iter(batches)."
        )
    _check_inputs(model, feeder, strategy)


def _check_inputs(model: tf.keras.Model, feeder: DistributedFeeder, strategy: tf.distribute.Strategy) -> None:
    inputs = getattr(model, "inputs", None)
    if not inputs or feeder.transform is not None:
        return
    x = feeder.source.element_spec[0]
    if isinstance(x, dict):
        specs = dict(x)
        named: list = [(tensor.name, tensor, specs.get(tensor.name)) for tensor in inputs]
        missing = [key for key, _, spec in named if spec is None]
        if missing:
            raise SourceError(
                f"The model has an input {missing[0]!r}, but x has the keys {sorted(specs)}. "
                "Name the keys of x after the model's inputs."
            )
    else:
        flat = tf.nest.flatten(x)
        if len(flat) != len(inputs):
            raise SourceError(
                f"The model has {len(inputs)} input(s), {[tensor.name for tensor in inputs]}, but x holds "
                f"{len(flat)} array(s). Pass one array for each input, as a list, tuple or dict."
            )
        named = [(tensor.name, tensor, spec) for tensor, spec in zip(inputs, flat)]
    num_replicas = strategy.num_replicas_in_sync
    plan = feeder.plan(num_replicas)
    last_step = feeder._steps_per_pass(training=True) - 1
    for key, tensor, spec in named:
        declared, fed = tensor.shape[1:], spec.shape[1:]
        if (tensor.dtype == tf.string) != (spec.dtype == tf.string):
            raise SourceError(
                f"Input {key!r} of the model takes {tensor.dtype.name}, but x holds {spec.dtype.name}. "
                "Convert x, or put a layer such as TextVectorization or StringLookup first in the model."
            )
        if not _fits(declared, fed):
            raise SourceError(
                f"Input {key!r} of the model takes samples of shape {tuple(declared)}, but x holds samples of "
                f"shape {tuple(fed)} ({spec.dtype.name}). Reshape x, or build the model for this shape."
            )
        sizes = {size for step in {0, last_step} for size in plan.split(step).sizes}
        if tensor.shape[0] is not None and sizes != {tensor.shape[0]}:
            raise SourceError(
                f"Input {key!r} of the model declares a batch of exactly {tensor.shape[0]} samples, but the "
                f"replicas get {sorted(sizes)}. Build the model for the samples of one replica, with "
                f"batch_size={tensor.shape[0] * num_replicas} and drop_remainder=True on the feeder for "
                f"{num_replicas} replica(s)."
            )


def _fits(declared: tf.TensorShape, fed: tf.TensorShape) -> bool:
    """Keras adds or drops a last axis of one element where that makes shapes fit."""
    if declared.rank is not None and declared.rank == fed.rank + 1 and declared[-1] in (1, None):
        declared = declared[:-1]
    elif declared.rank is not None and declared.rank == fed.rank - 1 and fed[-1] == 1:
        fed = fed[:-1]
    return declared.is_compatible_with(fed)


def _say_what_was_done(feeder: DistributedFeeder, strategy: tf.distribute.Strategy) -> None:
    if not _logger.hasHandlers():  # Logging was not set up: a move to other devices is not to pass in silence.
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        handler.addFilter(lambda record: not logging.getLogger().handlers)  # Logging may be set up later on.
        _logger.addHandler(handler)
        _logger.setLevel(logging.INFO)
    devices = strategies.describe_devices(strategy)
    if feeder.num_samples is None:
        _logger.info("%d replicas: %s, each batch is split among them", strategy.num_replicas_in_sync, devices)
        return
    sizes = feeder.plan(strategy.num_replicas_in_sync).split(0).sizes
    each = f"{min(sizes)} to {max(sizes)}" if len(set(sizes)) > 1 else str(max(sizes))
    samples = "sample" if each == "1" else "samples"
    _logger.info(
        "%d replicas: %s, %s %s each of a global batch of %d",
        strategy.num_replicas_in_sync,
        devices,
        each,
        samples,
        min(feeder.batch_size, feeder.num_samples),
    )


# --- While Keras runs --------------------------------------------------------------------------------------


class FeedAdapter(internals.DataAdapter):
    """What Keras's data handler asks about the data of one call."""

    @staticmethod
    def can_handle(x: Any, y: Any = None) -> bool:
        """Keras asks every adapter, and exactly one may say yes."""
        return isinstance(x, DistributedFeeder)

    def __init__(
        self,
        x: DistributedFeeder,
        y: Any = None,
        sample_weights: Any = None,
        steps: int | None = None,
        shuffle: bool = True,
        model: tf.keras.Model | None = None,
        **other: Any,
    ) -> None:
        super().__init__(x, y)
        call = _calls()[-1]
        self._call, self._feeder, self._model = call, x, model
        self._training = call.takes_for_training(x)
        if self._training:
            call.training = self
        self._shuffle = shuffle
        self.pipeline = x._pipeline_on(
            tf.distribute.get_strategy(), training=self._training, predicting=call.name == "predict"
        )
        self.pipeline_in_use = self.pipeline  # With class weights.
        # An epoch of so many steps, whatever a pass has; None: an epoch is a pass.
        self._fixed_steps = steps or (x.steps_per_epoch if self._training else None)
        self._first, self._epochs = (0, 0), 1  # (epoch, step) to start at, and the epoch to stop before.
        self._epoch = self._steps_taken = 0
        self.steps_at_once = 1  # Of the present call of Keras's compiled function.
        self._stream: Any = None
        self._check_repeats()

    def _check_repeats(self) -> None:
        if not self.is_streaming or self._feeder.source.can_repeat or self._fixed_steps:
            return
        if self._call.name == "fit" and self._call.num_epochs > 1:
            what = "epochs" if self._training else "validation runs"
            steps = "steps_per_epoch" if self._training else "validation_steps"
            raise SourceError(
                f"A generator object or iterator can be read once, but fit asks for {self._call.num_epochs} {what}. "
                f"Pass the function that makes it, without calling it, so that each gets a fresh one; or {steps}="
                ", then it is read on."
            )

    def get_dataset(self) -> _Steps:
        """What Keras iterates."""
        return _Steps(self, self.pipeline)

    def get_size(self) -> int:
        """Steps of an epoch; None if the source does not say."""
        return self._fixed_steps or self._steps_per_pass()

    def _steps_per_pass(self) -> Any:
        """Asked again for each epoch: a source may change its length between them."""
        return self._feeder._steps_per_pass(self._training)

    def batch_size(self) -> int | None:
        """The global batch size; None if the source decides."""
        return self._feeder.batch_size

    def has_partial_batch(self) -> bool:
        """True if the last batch is smaller."""
        return bool(self.partial_batch_size())

    def partial_batch_size(self) -> int | None:
        """Samples in a smaller last batch, or 0; None if the source decides."""
        if self._feeder.num_samples is None:
            return None
        return self._feeder.num_samples % self._feeder.batch_size

    def should_recreate_iterator(self) -> bool:
        """One stream serves all epochs, so that the pipeline does not drain between them."""
        return False

    @property
    def is_streaming(self) -> bool:
        """True if batches come one after the other, so that only reading them tells how many there are."""
        return self._feeder.is_streaming

    def start_at(self, epoch: int, step: int, epochs: int) -> None:
        """Sets what the next iterator reads.

        Args:
            epoch: First epoch, as Keras counts them.
            step: First step of that epoch.
            epochs: The epoch to stop before.
        """
        if not self._training:
            self._epoch = self._steps_taken = 0
            return
        if step and self._shuffle and self._feeder.shuffle and self._feeder.seed_was_drawn:
            _logger.warning(
                "Training goes on in the middle of an epoch (step %d), but the feeder drew a new seed, so "
                "samples come in another order than before the interruption. Pass seed=... to the feeder.",
                step,
            )
        # A second `fit` of the same model goes on with new orders; an explicit position is taken at its word.
        passed = 0 if epoch or step else self._feeder._epochs_trained(self._model)
        self._first, self._epochs = (epoch + passed, step), epochs + passed
        self._epoch = self._steps_taken = 0

    def open_stream(self) -> Any:
        """The stream for a new iterator."""
        (epoch, step), shuffle = self._first, self._training and self._shuffle
        if self._stream is not None:  # That of the last validation: its buffers are to go.
            self._stream.close()
            self._call.streams.remove(self._stream)
        if self.is_streaming:
            self._stream = self._feeder._batch_stream(
                self._training, shuffle, (epoch, self._epochs), step, self._fixed_steps
            )
        else:
            steps = self.get_size()
            num_steps = (self._epochs - epoch) * steps - step
            if not self._training:
                num_steps = min(num_steps, self._steps_per_pass())  # Nothing is counted twice.
            self._stream = self._feeder._sample_stream(self.pipeline, shuffle, epoch * steps + step, num_steps)
        self._call.streams.append(self._stream)
        self._stream.meter.wants_batch = self.is_monitored and self._call.holds_batch
        return self._stream

    @property
    def feeder(self) -> DistributedFeeder:
        """What is fed."""
        return self._feeder

    @property
    def stream(self) -> Any:
        """What the present iterator reads; None before the first."""
        return self._stream

    @property
    def is_monitored(self) -> bool:
        """True if steps are to note their times."""
        return self._training and self._call.monitored

    def num_ready(self, wanted: int) -> int:
        """How many of the `wanted` steps the current epoch still has; a streaming feeder waits to know."""
        if not self.is_streaming:
            self.steps_at_once = wanted
            return wanted
        started = time.perf_counter()
        ready = self._stream.num_ready(self._epoch, self._steps_taken, wanted)
        self._stream.meter.asked_seconds += time.perf_counter() - started
        if ready < wanted and self.get_size() is not None:
            _logger.warning(
                "The source ended after %d batches in all, in an epoch of %d steps; the epoch ends there.",
                self._steps_taken + ready,
                self.get_size(),
            )
        self._steps_taken += ready
        self.steps_at_once = ready
        return ready

    def has_another_epoch(self) -> bool:
        """True if a streaming feeder has a batch for the epoch that is to begin."""
        return self._stream.num_ready(self._epoch, self._steps_taken, 1) > 0

    def resumes_at_end_of_epoch(self) -> bool:
        """True if the run that is resumed had done all steps of its epoch, and only the source could tell."""
        return self._first[1] > 0 and not self.has_another_epoch() and self._stream.has_ended_pass()

    def on_epoch_end(self) -> None:
        """Keras calls this when an epoch has been trained, or an evaluation is over."""
        self._epoch += 1
        if self._training:
            self._feeder._note_epochs_trained(self._model, self._first[0] + self._epoch)
        if self.is_streaming:
            self._stream.allow_next_epoch()


class Replay:
    """One batch as a stream, to be given again and again.

    Args:
        stream: Where it came from.
        batch: What `stream.read` gave.
    """

    def __init__(self, stream: Any, batch: Batch) -> None:
        self.element_spec, self.failure, self.meter, self._batch = stream.element_spec, None, FeedMeter(), batch

    def read(self, number: int) -> Batch:
        """The batch."""
        return self._batch


class _Steps(internals.DistributedDataset):
    """The steps of one call, in the form that Keras takes for data that is distributed already."""

    def __init__(self, adapter: FeedAdapter, pipeline: Pipeline) -> None:
        self._adapter, self._pipeline = adapter, pipeline

    def map(self, function: Callable) -> _Steps:
        """The same steps with `function` applied to each batch; Keras adds class weights in this way."""

        def weigh(x: Any, y: Any, sample_weight: Any = None) -> tuple:
            # Keras's function fails on sample weights of a batch size that is not fixed, so it gets none.
            x, y, class_weight = function(x, y)
            if sample_weight is None:
                return x, y, class_weight
            missing_axes = [1] * (class_weight.shape.rank - sample_weight.shape.rank)
            shape = tf.concat([tf.shape(sample_weight), tf.constant(missing_axes, tf.int32)], axis=0)
            return x, y, tf.cast(class_weight, sample_weight.dtype) * tf.reshape(sample_weight, shape)

        return _Steps(self._adapter, self._pipeline.with_transform(weigh))

    def __iter__(self) -> Iterator:
        self._adapter.pipeline_in_use = self._pipeline
        return self._pipeline.iterate(self._adapter.open_stream(), monitored=self._adapter.is_monitored)


def _enumerate_epochs(original: Callable) -> Callable:
    def enumerate_epochs(handler: Any) -> Iterator:
        adapter = internals.adapter_of(handler)
        if not isinstance(adapter, FeedAdapter):
            return original(handler)
        first_epoch, _, epochs = internals.epoch_range(handler)
        if first_epoch >= epochs:
            return iter(())  # A run that had finished: nothing is read.
        adapter.start_at(*internals.epoch_range(handler))
        return _enumerate_what_there_is(original(handler), handler, adapter)

    return enumerate_epochs


def _enumerate_what_there_is(epochs: Iterator, handler: Any, adapter: FeedAdapter) -> Iterator:
    """Ends training when a source has ended, before an epoch begins that would see no data."""
    for number, item in enumerate(epochs):
        if adapter.is_streaming:
            internals.set_steps(handler, adapter.get_size())
            if number == 0 and adapter.resumes_at_end_of_epoch():
                internals.forget_first_step(handler)
                adapter.on_epoch_end()
                continue
            if not adapter.has_another_epoch():
                _logger.warning("The source has ended after %d epoch(s); training ends there.", number)
                return
        yield item


def _steps(original: Callable) -> Callable:
    def steps(handler: Any) -> Iterator[int]:
        adapter = internals.adapter_of(handler)
        if isinstance(adapter, FeedAdapter):
            return internals.steps_as_ready(handler, adapter.num_ready)
        return original(handler)

    return steps
