"""Watches a feed from inside `fit`.

Flow:   ... -> keras_entry -> [callbacks]
Owns:   `FeedMonitor`: reading the counters and stamps at the right moments, Keras's logs, TensorBoard, the ceiling.
Leaves: counting (meter, stamps), judging (verdict), keeping (recording), showing (report).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import time
from typing import Any

import numpy as np
import tensorflow as tf

from . import internals, keras_entry, report
from .batch_sources import GeneratorSource, MapSource, Regrouped, SequenceSource
from .errors import FeedError
from .feeder import DistributedFeeder
from .machine import MachineWatch, describe_machine, device_names, num_processors
from .meter import FeedMeter, MadeBatch
from .plan import BatchPlan, Split, split_batch
from .promotion import variables_of
from .recording import COLUMNS, Epoch, Recording, Span, merged
from .stamps import step_stamps
from .verdict import Rates, Verdict, judge

_LOOK_SECONDS = 1.0  # How often the counters are read; a look takes about 2 ms.
_MAX_UNREAD_STEPS = 1000  # The meter keeps four times as many batches.
_REPORT_SECONDS = 10.0  # How often the report is written while training runs.
_REPLAY_WARM_UP = 3  # Steps.
_NO_STEPS = np.zeros((0, len(COLUMNS)))


class FeedMonitor(internals.GuestCallback):
    """Tells whether the devices are busy, and if not, why: a callback for `fit` with a feeder.

    Adds `samples_per_second` (over all replicas) and `feed_wait` (share of the time for which steps waited for
    data) to the logs, and so to the progress bar, `History`, `CSVLogger` and whatever else reads logs; a
    `TensorBoard` callback beside it gets scalars under `feed/`. When training ends, by itself or by an error, it
    says in words what held it back, what that cost, and what to change.

    The first steps, in which Keras traces the model and buffers are full from before, are kept apart. On GPUs the
    monitor waits for each step to end, as Keras's own progress bar does.

    Args:
        report: File for a report: ".html" for one self-contained page, ".png" for a picture (needs Matplotlib).
            It is written now and then while training runs, and at the end, however training ends. None: no file.
        every_steps: How often rates in the progress bar are brought up to date; None is once a second.
        replay_steps: After training, run so many steps on one batch that lies ready, to measure what the devices
            could do if data took no time. Variables are put back afterwards; a copy of them is held on the host.

    Attributes:
        verdict: The `Verdict`: `bound_by`, `lost_share`, `reason` and `knob`; None before there is one.
        rates: The measured `Rates`, in means over the steps after warm-up; None before there are any, and if
            training is over with its first call of Keras's compiled function.

    Raises:
        FeedError: If the file's name has another ending, its folder is missing, or a package is; from `fit`, if that
            has no feeder or two monitors.

    Example:
        >>> import keras_gpufeed as kg
        >>> import numpy as np
        >>> import tensorflow as tf
        >>> x = np.random.default_rng(0).normal(size=(640, 3)).astype("float32")
        >>> model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> monitor = kg.FeedMonitor()
        >>> feeder = kg.DistributedFeeder(x, x.sum(1), batch_size=32)
        >>> history = model.fit(feeder, epochs=3, verbose=0, callbacks=[monitor])
        >>> sorted(history.history)
        ['feed_wait', 'loss', 'samples_per_second']
        >>> monitor.verdict.bound_by in ("compute", "source", "transform", "copy", "python", "replica")
        True
    """

    goes_first = True  # In `fit` with a feeder, so that all other callbacks find its numbers in the logs.

    def __init__(
        self, report: str | os.PathLike | None = None, every_steps: int | None = None, replay_steps: int | None = None
    ) -> None:
        super().__init__()
        self._path = None if report is None else _checked_path(report)
        self._every_steps = _checked_steps("every_steps", every_steps)
        self._replay_steps = _checked_steps("replay_steps", replay_steps)
        self.verdict: Verdict | None = None
        self.rates: Rates | None = None
        self._is_watching = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins to watch the feeder of this `fit`."""
        call = keras_entry.current_call()
        if call is None or call.training is None:
            raise FeedError(
                "FeedMonitor watches a DistributedFeeder, and fit was called without one. Write "
                "model.fit(DistributedFeeder(x, y, batch_size=...), callbacks=[FeedMonitor()])."
            )
        if call.monitored:  # Each would take from the other what it has not read yet.
            raise FeedError(
                "One FeedMonitor watches a fit, and callbacks holds two. Leave one; it may have report, every_steps "
                "and replay_steps together."
            )
        strategy = self.model.distribute_strategy
        devices = device_names(strategy)
        self._training = call.training
        self._call = call
        call.monitored = True
        call.holds_batch = self._replay_steps is not None
        call.when_over.append(self._on_end)
        self._stamps = step_stamps(internals.num_replicas(strategy)) if call.training.pipeline.has_stamps else None
        if self._stamps is not None:
            self._stamps.take()  # What others left. The first time takes TensorFlow longer, too.
        self._watch = MachineWatch(devices)
        self._has_gpus = self._watch.has_gpus
        self._tensorboard = _tensorboard_of(call.callbacks)
        feeder = call.training.feeder
        plan = dataclasses.replace(
            call.training.pipeline.plan, devices=devices
        )  # Which memory it counts depends on them.
        self._recording = Recording(
            internals.num_replicas(strategy), devices, str(plan), describe_machine(strategy), _facts_of(feeder, plan)
        )
        self._recording.capacity = plan.num_ahead + (plan.prefetch + 1 if feeder.is_streaming else 1)
        self._learns_splits = plan.steps is None and feeder.num_sources is None
        if plan.steps is not None:
            last = plan.steps - 1
            self._recording.splits = [
                ("first step", plan.split(0), 0),
                ("last step", plan.split(last), plan.samples_of(last)[0]),
            ]
        self.verdict = self.rates = None
        self._began_at = self._last_end = self._reported_at = time.perf_counter()
        self._computed = time.thread_time()  # By this thread, at the end of the last call that was read.
        self._look_at = self._look_seconds = math.inf
        self._max_unread = self._every_steps or _MAX_UNREAD_STEPS
        if self._every_steps is None:
            self._look_seconds = _LOOK_SECONDS
        self._calls: list[float] = []  # Not read yet, six numbers each; Python looks through tuples for garbage.
        self._asked = 0.0  # Until the last call that was read.
        self._num_unread = self._num_steps = 0
        self._made = np.zeros((0, len(MadeBatch._fields)))  # Not of a step yet.
        self._ready_at = np.zeros(0)
        self._first_step_ended: float | None = None
        self._is_warm = False
        self._of_epoch = _NO_STEPS
        self._logs: Any = None
        self._shown: dict[str, float] = {}
        # Timed where it is called: hooks for steps would take Keras longer than all that the monitor does.
        self._train_function = self.model.train_function
        self.model.train_function = self._run_steps
        self._is_watching = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """What lies between epochs is no step's time."""
        self._of_epoch = _NO_STEPS
        self._place_in_epoch = 0
        self._last_end, self._computed = time.perf_counter(), time.thread_time()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Shows the rates to whoever reads the logs of steps."""
        # Keras takes the logs of an epoch's last step for the epoch's, if they hold what it expects and no more.
        if logs is not None and batch + 1 != self.params.get("steps"):
            logs.update(self._shown)

    def _run_steps(self, iterator: Any) -> Any:
        """Keras's compiled function, with the clock and the counters read beside it."""
        meter, began = self._meter, time.perf_counter()
        num_batches, asked = meter.num_batches, meter.asked_seconds
        logs = self._train_function(iterator)
        if self._has_gpus:
            for value in list((logs or {}).values())[:1]:
                np.asarray(value)  # Waits for the devices.
        ended = time.perf_counter()
        num_steps = self._training.steps_at_once
        self._calls += began, ended, time.thread_time(), num_steps, num_batches, asked
        self._logs = logs
        self._num_unread += num_steps
        if self._first_step_ended is None:  # It takes long, and is no reason to look.
            self._first_step_ended, self._look_at = ended, ended + self._look_seconds
        if ended >= self._look_at or self._num_unread >= self._max_unread:
            self._look()
        return logs

    @property
    def _meter(self) -> FeedMeter:
        return self._training.stream.meter

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the epoch's rates to the logs."""
        self._look()
        span = Span(*self._of_epoch[0].tolist()) if len(self._of_epoch) else None
        if logs is not None and span is not None:
            logs.update(_logged(span))
        numbers = {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}
        self._recording.epochs.append(Epoch(epoch, span, numbers))
        self._write_scalars(epoch, span)
        if time.perf_counter() - self._reported_at > _REPORT_SECONDS:
            self._write_report()

    def on_train_end(self, logs: Any = None) -> None:
        """Measures the ceiling, if that was asked for."""
        self._look()
        if self._replay_steps is not None and self._num_steps:
            self._recording.ceiling_seconds = self._replay(self._replay_steps)

    def _on_end(self, error: BaseException | None) -> None:
        """Gives the verdict, however training ended."""
        if not self._is_watching:
            return
        self._is_watching = False
        self.model.train_function = self._train_function
        self._look()
        self._judge()
        name = "" if error is None else f"{type(error).__name__}{f': {error}' if str(error) else ''}"
        self._recording.state = "finished" if error is None else f"stopped by {name.splitlines()[0][:200]}"
        self._write_report()
        if self.params.get("verbose"):
            print(f"FeedMonitor: {self.verdict or 'training was over with its first step, so nothing was measured.'}")
        del self._call, self._training, self._train_function, self._tensorboard  # They hold the user's data.

    # --- From counters to numbers ---

    def _look(self) -> None:
        """Takes in the steps since the last look."""
        now = time.perf_counter()
        self._look_at = now + self._look_seconds
        if not self._calls:
            return
        steps = np.concatenate([self._of_epoch, self._read_steps()])
        if len(steps):
            self._of_epoch = merged(steps[None])
            self._shown = _logged(Span(*self._of_epoch[0].tolist()))
        seconds = now - self._began_at
        for name, num_bytes in self._watch.memory():
            self._recording.add_memory(name, seconds, num_bytes)
        for name, percent in self._watch.utilisation():
            self._recording.add_utilisation(name, seconds, percent)
        loss = self._logs.get("loss") if self._logs else None
        if loss is not None and np.isfinite(loss := float(np.mean(loss))):
            self._recording.loss.add(seconds, loss)
        if self._meter.num_transformed:
            self._recording.transform_seconds = self._meter.transform_seconds / self._meter.num_transformed
        self._judge()

    def _judge(self) -> None:
        self.rates = self._recording.rates
        self.verdict = self._recording.verdict = None if self.rates is None else judge(self.rates)

    def _read_steps(self) -> np.ndarray:
        """Takes in the calls of Keras's compiled function since the last time.

        Returns:
            Those after warm-up, as rows of the recording's columns.
        """
        began, ended, computed, num_steps, num_batches, asked = np.array(self._calls).reshape(-1, 6).T
        self._calls, self._num_unread = [], 0
        previous_end = np.concatenate([[self._last_end], ended[:-1]])
        self._last_end = ended[-1]
        seconds = ended - previous_end
        row_of = np.concatenate([[0], np.cumsum(num_steps)]).astype(int)  # A call's first step, counted from 0.
        num_ready = num_batches - self._num_steps - row_of[:-1]
        self._num_steps += row_of[-1]
        made = np.concatenate([self._made, _rows(self._meter.take_batches(), len(MadeBatch._fields))])
        ready_at = self._meter.take_transformed() if self._meter.num_transformed else made[len(self._made) :, 0]
        ready_at = np.concatenate([self._ready_at, ready_at])
        self._ready_at = ready_at[row_of[-1] :]

        # Of a stream, Keras asks for the next batch before the step: a wait for data, not Python's work.
        wait = np.minimum(np.diff(asked, prepend=self._asked), began - previous_end)
        python = began - previous_end - wait
        self._asked = asked[-1]
        started = began
        if not self.model.run_eagerly:
            # Other threads run the steps: what this one computed beyond what it did between calls started them.
            starting = np.maximum(0.0, np.diff(computed, prepend=self._computed) - python)
            self._computed = computed[-1]
            started, python = began + starting, python + starting
        ready_of = np.full(row_of[-1], -np.inf)  # One that nobody has seen made was no reason to wait.
        ready_of[: len(ready_at)] = ready_at[: row_of[-1]]
        waited = _waits(started, ended, row_of, ready_of)
        had = np.maximum(started, ready_of[row_of[:-1]])
        replica_seconds = np.zeros((0, self._recording.num_replicas))
        if self._stamps is not None:
            waits, ends = self._stamps.take()
            clocks_differ = time.time() - time.perf_counter()
            if len(waits) >= row_of[-1]:  # From devices with memory of their own.
                waited = _sums(waits[:, 1:] - waits[:, :1], row_of)[:, 0]
                had = waits[row_of[:-1], 1] - clocks_differ
            if len(ends) >= row_of[-1]:  # Else the gradients were not seen.
                replica_seconds = np.maximum(ends[row_of[:-1]] - clocks_differ - had[:, None], 0.0)
        wait += waited

        batch_of = np.minimum(row_of, len(made))
        self._made = made[batch_of[-1] :]
        _, num_samples, source, source_cpu, copy, copied_bytes = _sums(made, batch_of).T
        has_batch = batch_of[1:] > batch_of[:-1]
        first_ready, made_at = np.full(len(began), np.inf), previous_end.copy()
        first_ready[has_batch] = made[batch_of[:-1][has_batch], 0]
        made_at[has_batch] = made[batch_of[1:][has_batch] - 1, 0]
        if self._learns_splits:
            self._note_splits(made[: batch_of[-1], 1].astype(int).tolist())

        columns = {
            "started": previous_end - self._began_at,
            "ended": ended - self._began_at,
            "made_at": made_at - self._began_at,
            "seconds": seconds,
            "num_steps": num_steps,
            "num_samples": num_samples,
            "wait_seconds": np.minimum(wait, seconds),
            "python_seconds": np.minimum(python, seconds),
            "fill": num_ready * num_steps,
            "source_seconds": source,
            "source_cpu_seconds": source_cpu,
            "copy_seconds": copy,
            "copied_bytes": copied_bytes,
        }
        steps = np.stack([columns[name] for name in COLUMNS], axis=1)
        num_warm_up = self._num_warming_up(first_ready, ended)
        self._recording.add_steps(steps, num_warm_up, replica_seconds)
        return steps[num_warm_up:]

    def _num_warming_up(self, first_ready: np.ndarray, ended: np.ndarray) -> int:
        """Calls up to the first batch that was made after the first step: no tracing, no buffers filled before."""
        if self._is_warm:
            return 0
        is_warm = (first_ready > self._first_step_ended) & (ended > self._first_step_ended)
        self._is_warm = bool(is_warm.any())
        return int(is_warm.argmax()) if self._is_warm else len(is_warm)

    def _note_splits(self, sizes: list[int]) -> None:
        """A source that does not say how many samples it has shows its splits as they come."""
        if not sizes:
            return
        splits = self._recording.splits or [("first step", self._split(sizes[0]), 0)]
        place_of_last = self._place_in_epoch + sum(sizes[:-1])
        self._recording.splits = [splits[0], ("latest step", self._split(sizes[-1]), place_of_last)]
        self._place_in_epoch += sum(sizes)

    def _split(self, num_samples: int) -> Split:
        return split_batch(num_samples, self._recording.num_replicas)

    # --- Out of the numbers ---

    def _write_scalars(self, epoch: int, span: Span | None) -> None:
        if self._tensorboard is None or span is None:
            return
        rates = self._recording.rates
        scalars = {
            **_logged(span),
            "samples_per_second_per_replica": span.num_samples / span.seconds / self._recording.num_replicas,
            "buffer_fill": span.fill / span.num_steps,
            "copied_bytes_per_second": span.copied_bytes / span.seconds,
            "python_share": span.python_seconds / span.seconds,
        }
        if rates is not None and rates.replica_seconds:
            scalars["skew_share"] = rates.skew_seconds / rates.step_seconds
        with internals.train_writer_of(self._tensorboard).as_default():
            for name, value in scalars.items():
                tf.summary.scalar(f"feed/{name}", value, step=epoch)

    def _write_report(self) -> None:
        self._reported_at = time.perf_counter()
        if self._path is not None:
            report.write(self._recording, self._path)

    def _replay(self, num_steps: int) -> float:
        """Seconds of a step on a batch that lies ready."""
        held, self._meter.held = self._meter.held, None
        stream = keras_entry.Replay(self._training.stream, held)
        iterator = self._training.pipeline_in_use.iterate(stream, monitored=True, replay=True)
        strategy = self.model.distribute_strategy
        with strategy.scope(), _put_back(self.model):
            began = 0.0
            for step in range(_REPLAY_WARM_UP + num_steps):
                if step == _REPLAY_WARM_UP:
                    began = time.perf_counter()
                logs = self._train_function(iterator)
                for value in list(logs.values())[:1]:
                    np.asarray(value)  # Waits for the devices.
            seconds = time.perf_counter() - began
        return seconds / num_steps / internals.steps_per_execution(self.model)


def _rows(tuples: list, num_columns: int) -> np.ndarray:
    """Tuples of numbers as an array; `np.array` takes ten times as long."""
    flat = itertools.chain.from_iterable(tuples)
    return np.fromiter(flat, float, num_columns * len(tuples)).reshape(-1, num_columns)


def _sums(rows: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Of the rows from each edge to the next."""
    sums = np.concatenate([np.zeros((1, rows.shape[1])), np.cumsum(rows, axis=0)])
    return np.diff(sums[edges], axis=0)


def _waits(started: np.ndarray, ended: np.ndarray, row_of: np.ndarray, ready_of: np.ndarray) -> np.ndarray:
    """For how long calls waited for data, if the steps of a call compute equally long.

    Step k of n could not begin before its batch was ready, so that it and those after it had from then until the end.
    Computing took the longest that leaves all of them enough time; the rest of the call was waiting.

    Args:
        started: When calls began to run their first step.
        ended: When calls ended.
        row_of: The number of each call's first step; and that of all steps.
        ready_of: When the batches of the steps were ready.

    Returns:
        Seconds for each call.
    """
    num_steps = np.diff(row_of)
    steps_left = np.repeat(row_of[1:], num_steps) - np.arange(row_of[-1])
    at_most = np.minimum.reduceat((np.repeat(ended, num_steps) - ready_of) / steps_left, row_of[:-1])
    in_call = np.maximum(ended - started, 0.0)
    return in_call - num_steps * np.clip(at_most, 0.0, in_call / num_steps)


class _put_back:
    """Puts all variables of a model back to what they were."""

    def __init__(self, model: tf.keras.Model) -> None:
        self._model = model

    def __enter__(self) -> None:
        self._values = [(part, part.numpy()) for variable in variables_of(self._model) for part in _parts(variable)]

    def __exit__(self, *exception: Any) -> None:
        for part, value in self._values:
            part.assign(value)


def _parts(variable: tf.Variable) -> tuple:
    variable = internals.unwrap_autocast(variable)
    return tuple(variable.values) if internals.is_distributed(variable) else (variable,)


def _logged(span: Span) -> dict[str, float]:
    return {"samples_per_second": span.num_samples / span.seconds, "feed_wait": span.wait_seconds / span.seconds}


def _facts_of(feeder: DistributedFeeder, plan: BatchPlan) -> dict[str, Any]:
    """What the verdict needs to know of a feeder to name a knob."""
    source = feeder.source
    while isinstance(source, Regrouped):
        source = source._source
    workers = 0 if not feeder.is_streaming else feeder.num_workers
    if not feeder.is_streaming:
        kind = "arrays"
    elif isinstance(source, (SequenceSource, MapSource)) or workers > 1:
        kind = "workers"
    else:
        kind = "function" if isinstance(source, GeneratorSource) else "other"
    return {
        "workers": workers,
        "prefetch": feeder.prefetch,
        "parallel_reads": plan.parallel_reads,
        "batch_size": feeder.batch_size,
        "source_kind": kind,
        "num_processors": num_processors(),
        "copies_compete": internals.share_memory_with_host(plan.devices),
    }


def _tensorboard_of(callbacks: Any) -> Any:
    callbacks = getattr(callbacks, "callbacks", callbacks)  # Of a CallbackList.
    found = [each for each in tf.nest.flatten(callbacks) if isinstance(each, tf.keras.callbacks.TensorBoard)]
    return found[0] if found else None


def _checked_path(path: str | os.PathLike) -> str:
    path = os.fspath(path)
    ending = os.path.splitext(path)[1]
    if ending not in (".html", ".png"):
        raise FeedError(f'report must be a file name that ends in ".html" or ".png". Received {path!r}.')
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise FeedError(f"The folder of report={path!r} does not exist. Create it first: os.makedirs({folder!r}).")
    if ending == ".png":
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise FeedError(
                "A report as a picture is drawn by Matplotlib, which is not installed: pip install "
                'keras-gpufeed[report]. A report that ends in ".html" needs nothing.'
            ) from None
    return os.path.abspath(path)


def _checked_steps(name: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1):
        raise FeedError(f"{name} must be a positive integer. Received {value!r}.")
    return value
