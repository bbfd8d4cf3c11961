"""Runs through the data, step by step, as the pipeline asks for them.

Flow:   ... -> batch_sources -> [streams] -> pipeline -> ...
Owns:   which batch belongs to which step; reading ahead; where epochs end; failures of the user's code.
Leaves: cutting batches for replicas (plan, pipeline).

A stream offers `element_spec`, `read(number)` (a `Batch`, or None after the end), `failure`, `meter` and
`close()`.
"""

from __future__ import annotations

import collections
import threading
import time
from typing import Any, NamedTuple, cast

import numpy as np
import tensorflow as tf

from .batch_sources import BatchCaster, JoinedBatch
from .errors import SourceError
from .meter import FeedMeter
from .order import EpochOrder
from .plan import BatchPlan

_NUM_BATCHES_TO_LEARN_FROM = 2
_JOIN_SECONDS = 5.0  # How long `close` waits for the user's code to give its current batch.


class Batch(NamedTuple):
    """One global batch, or several small ones that were read together and lie one behind the other.

    Args:
        num_samples: Samples in it.
        arrays: Its arrays, in the order of `tf.nest.flatten(..., expand_composites=True)`.
        epoch: The pass it belongs to.
        samples: The numbers of its samples, of shape `(num_samples,)`: different for all samples of a pass.
        sizes: Samples of each replica, where the source decides; they lie in the batch one behind the other.
        step_sizes: Samples of each global batch, if several may be there.
    """

    num_samples: int
    arrays: list
    epoch: int
    samples: np.ndarray
    sizes: tuple[int, ...] | None = None
    step_sizes: list[int] | None = None


class Failure:
    """An exception of the user's code, as it was when it was raised.

    Python and Keras add frames to an exception, and drop its cause, each time it is raised again.

    Args:
        exception: The exception.
    """

    def __init__(self, exception: BaseException) -> None:
        self._exception = exception
        self._traceback, self._cause = exception.__traceback__, exception.__cause__

    def is_behind(self, error: BaseException) -> bool:
        """True if `error` is this exception, or what TensorFlow made of it."""
        return error is self._exception or isinstance(error, tf.errors.OpError)

    def raise_again(self) -> None:
        """Raises the exception with its own traceback and cause."""
        raise self._exception.with_traceback(self._traceback) from self._cause


class SampleStream:
    """A run through an index-addressed source, which can begin at any step.

    Args:
        source: Where samples come from.
        plan: How a pass is cut into steps.
        seed: Fixes the order of every pass; None for the order of the source.
        first_step: Where to start, counted over all passes.
        num_steps: How many steps to give.
        steps_per_read: How many to read together, at most. A run begins with one, so that training begins soon, and
            no read goes beyond the end of a pass.
    """

    def __init__(
        self,
        source: Any,
        plan: BatchPlan,
        seed: int | None,
        first_step: int,
        num_steps: int,
        steps_per_read: int = 1,
    ) -> None:
        self.element_spec, self._steps_per_read = source.element_spec, steps_per_read
        self.failure: Failure | None = None
        self.meter = FeedMeter()
        self._source, self._plan, self._seed = source, plan, seed
        self._next_step, self._num_planned, self._num_steps = first_step, 0, num_steps
        self._num_reads = 0
        self._planned: dict[int, Any] = {}  # Reads that are yet to be made, by number.
        self._lock = threading.Lock()  # Two threads may read at once, and not in the order of the reads.
        self._steps_per_pass, self._num_samples = cast(int, plan.steps), cast(int, plan.num_samples)
        self._epoch, self._order = -1, EpochOrder(self._num_samples, 0, 0)

    def read(self, number: int, replica_id: int | None = None) -> Batch | None:
        """The global batch of a step or of several, or None after the last.

        Args:
            number: Which read, from 0. Each is made once.
            replica_id: A replica whose part alone is to be read, of single steps.
        """
        if self.failure is not None:
            self.failure.raise_again()  # The iterator goes on for other devices; what they see is no end of data.
        try:
            with self._lock:
                epoch, steps = self._steps_of(number)
                if not steps:
                    return None
                ranges = [self._plan.samples_of(step) for step in steps]
                start, stop = ranges[0][0], ranges[-1][1]
                if replica_id is not None:
                    part = self._plan.split(steps[0]).parts[replica_id]
                    start, stop = start + part[0], start + part[1]
                samples = self._samples(epoch, start, stop)
            started = time.perf_counter()
            arrays = self._source.read(samples)
            sizes = [stop - start for start, stop in ranges]
            with self._lock:
                self._note(started, sizes, arrays)
            numbers = np.arange(start, stop) if self._seed is None else samples
            return Batch(stop - start, arrays, epoch, numbers, step_sizes=sizes if self._steps_per_read > 1 else None)
        except BaseException as error:
            self.failure = Failure(error)  # TensorFlow passes on no more than its text.
            raise

    def _steps_of(self, number: int) -> tuple[int, range]:
        """The pass and its steps that a read takes."""
        while self._num_reads <= number:
            epoch, step = divmod(self._next_step, self._steps_per_pass)
            together = min(self._steps_per_read, max(self._num_planned, 1), self._steps_per_pass - step)
            together = min(together, self._num_steps - self._num_planned)
            self._planned[self._num_reads] = epoch, range(step, step + together)
            self._num_planned += together
            self._next_step += together
            self._num_reads += 1
        return self._planned.pop(number)

    def _note(self, started: float, sizes: list[int], arrays: list[np.ndarray]) -> None:
        now = time.perf_counter()
        in_memory = self._source.is_in_memory  # Then reading is copying.
        seconds, num_bytes = (now - started) / len(sizes), sum(array.nbytes for array in arrays) // len(sizes)
        for size in sizes:
            self.meter.note_source(0.0 if in_memory else seconds)
            self.meter.note_batch(now, size, seconds if in_memory else 0.0, num_bytes)

    def _samples(self, epoch: int, start: int, stop: int) -> Any:
        if self._seed is None:
            return slice(start, stop)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, EpochOrder(self._num_samples, self._seed, epoch)
        return self._order.samples(start, stop)

    def close(self) -> None:
        """Nothing runs in the background."""


class BatchStream:
    """A run through a batch source, read ahead on a thread of its own.

    Args:
        source: Where batches come from.
        seed: Fixes the order of every pass; None for the order of the source.
        epochs: First epoch and the one to stop before.
        start: Batches of the first epoch to leave out: a resumed run.
        steps_per_epoch: Steps of an epoch, if not one pass; then passes follow each other without regard to epochs.
        prefetch: How many batches may wait.
        element_spec: The type of a batch, if the user gave it.
        padding_value: Fills up samples of unequal length; None refuses them.
    """

    def __init__(
        self,
        source: Any,
        seed: int | None,
        epochs: tuple[int, int],
        start: int,
        steps_per_epoch: int | None,
        prefetch: int,
        element_spec: Any,
        padding_value: float | None,
    ) -> None:
        self.failure: Failure | None = None
        self.meter = FeedMeter()
        self._source, self._seed, self._epochs, self._start = source, seed, epochs, start
        self._steps_per_epoch: Any = steps_per_epoch
        self._limit: int | None = None
        if steps_per_epoch is not None:
            self._limit = (epochs[1] - epochs[0]) * steps_per_epoch - start
        self._caster = BatchCaster(element_spec, source.lends_memory, padding_value)
        self._capacity = max(prefetch, 1)
        self._first: list = []  # Batches from which the type of all is learned.
        self._place = (0, 0)  # Epoch and number in it of the next batch to be queued.
        self._waiting: collections.deque = collections.deque()
        self._changed = threading.Condition()
        self._num_given = 0  # Batches that the source has given,
        self._num_queued = 0  # and those of them that were good.
        self._pass_ends: list[int] = []  # `_num_queued` at the end of each pass.
        self._epochs_allowed = 1
        self._ended = self._closed = False
        self._thread = threading.Thread(target=self._run, name="keras_gpufeed reader", daemon=True)
        self._thread.start()

    @property
    def element_spec(self) -> Any:
        """The type of a batch; waits until it is known."""
        with self._changed:
            self._changed.wait_for(lambda: self._caster.element_spec is not None or self._ended)
            if self._caster.element_spec is None:
                if self.failure is not None:
                    self.failure.raise_again()
                raise SourceError("There is nothing to feed: the source gave no batch.")
            return self._caster.element_spec

    def read(self, number: int) -> Batch | None:
        """The next global batch, or None after the last.

        Args:
            number: Which one, from 0; they come in this order.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended or self._closed)
            if not self._waiting:
                return None  # A failure is raised by `num_ready`, in the user's thread.
            batch = self._waiting.popleft()
            self._changed.notify_all()
            return batch

    def num_ready(self, epoch: int, done: int, wanted: int) -> int:
        """How many more steps of an epoch there are, up to `wanted`; waits until it is known.

        Args:
            epoch: Epoch of this run, from 0.
            done: Steps of this run that were taken already.
            wanted: How many are asked for.
        """

        def end_of_epoch() -> int | None:
            if self._steps_per_epoch is None and len(self._pass_ends) > epoch:
                return self._pass_ends[epoch]
            return self._num_queued if self._ended else None

        def is_known() -> bool:
            return self._num_queued >= done + wanted or end_of_epoch() is not None or self._closed

        with self._changed:
            self._changed.wait_for(is_known)
            end = end_of_epoch()
            if end is None:
                return wanted
            if end == done and self.failure is not None:
                self.failure.raise_again()
            return min(wanted, end - done)

    def has_ended_pass(self) -> bool:
        """True if a pass has ended."""
        with self._changed:
            return bool(self._pass_ends)

    def allow_next_epoch(self) -> None:
        """Says that an epoch has been trained."""
        if self._steps_per_epoch is None and self._source.num_batches is not None:
            with self._changed:  # The source may yet give more than its length.
                done = self._epochs_allowed
                self._changed.wait_for(lambda: len(self._pass_ends) >= done or self._ended or self._closed)
                if self.failure is not None and not self._waiting and len(self._pass_ends) < done:
                    self.failure.raise_again()
        self._source.on_epoch_end()
        with self._changed:
            self._epochs_allowed += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Stops reading. The user's code finishes its current batch first."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join(_JOIN_SECONDS)

    # --- On the reader's thread ---

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            self._read_passes()
        except BaseException as error:
            failure = error
        try:
            self._settle_type()
        except BaseException as error:
            failure = failure or error
        with self._changed:
            self.failure, self._ended = None if failure is None else Failure(failure), True
            self._changed.notify_all()

    def _read_passes(self) -> None:
        epoch, start = self._epochs[0], self._start
        if self._limit is not None and self._source.num_batches:
            # Passes do not line up with epochs: find the one in which the first step lies.
            epoch, start = divmod(epoch * self._steps_per_epoch + start, self._source.num_batches)
        while self._wants_pass(epoch):
            num_before = self._num_given
            batches = self._source.batches(epoch, self._seed, start)
            self._place = (epoch, start)
            try:
                started, computed = time.perf_counter(), time.thread_time()
                for batch in batches:
                    self.meter.note_source(time.perf_counter() - started, time.thread_time() - computed)
                    if not self._offer(batch):
                        return
                    started, computed = time.perf_counter(), time.thread_time()
            finally:
                if self._source.can_repeat and hasattr(batches, "close"):
                    batches.close()  # Runs the `finally` of the user's generator.
            if not self._source.can_repeat:
                return
            self._settle_type()
            if self._num_given == num_before and not start:
                raise SourceError(
                    f"The source gave no batch in epoch {epoch} (counted from 0). A generator function must return a "
                    "fresh iterator at each call."
                )
            with self._changed:
                self._pass_ends.append(self._num_queued)
                self._changed.notify_all()
            epoch, start = epoch + 1, 0

    def _wants_pass(self, epoch: int) -> bool:
        if self._limit is not None:
            return not self._closed and self._num_given < self._limit
        if epoch >= self._epochs[1]:
            return False
        with self._changed:
            self._changed.wait_for(lambda: self._may_read(epoch - self._epochs[0]) or self._closed)
        return not self._closed

    def _may_read(self, epoch: int) -> bool:
        return not self._source.waits_for_epoch_end or epoch < self._epochs_allowed

    def _offer(self, batch: Any) -> bool:
        """Takes a batch in; False if no more are wanted."""
        sizes = batch.sizes if isinstance(batch, JoinedBatch) else None
        if self._caster.element_spec is None:
            self._first.append((self._caster.hold(batch), sizes))
            if len(self._first) == _NUM_BATCHES_TO_LEARN_FROM:
                self._settle_type()
        else:
            self._queue(batch, sizes)
        self._num_given += 1
        if self._limit is None:
            return not self._closed
        if self._num_given >= self._limit:
            return False
        epoch = (self._num_given + self._start) // self._steps_per_epoch
        if not self._may_read(epoch):
            self._settle_type()  # The epoch must not wait for a batch of the next one.
        with self._changed:
            self._changed.wait_for(lambda: self._may_read(epoch) or self._closed)
        return not self._closed

    def _name_of_next(self) -> str:
        """What messages call the next batch: numbered as `epoch=` and indices are, not as Keras's display."""
        epoch, number = self._place
        return f"Batch {number} of epoch {epoch} (both counted from 0)"

    def _settle_type(self) -> None:
        """Learns the type from the batches that were held back, and queues them."""
        if self._first:
            self._caster.learn([batch for batch, _ in self._first])
            first, self._first = self._first, []
            for batch, sizes in first:
                self._queue(batch, sizes)

    def _queue(self, batch: Any, sizes: tuple[int, ...] | None) -> None:
        started, num_bytes = time.perf_counter(), self._caster.copied_bytes
        num_samples, arrays = self._caster.cast(batch, self._name_of_next())
        now = time.perf_counter()
        self.meter.note_batch(now, num_samples, now - started, self._caster.copied_bytes - num_bytes)
        epoch, number = self._place
        self._place = epoch, number + 1
        # Where a batch begins among the samples is not known in a resumed run, so its number comes first.
        samples = (np.int64(number) << np.int64(32)) + np.arange(num_samples)
        with self._changed:
            self._waiting.append(Batch(num_samples, arrays, epoch, samples, sizes))
            self._num_queued += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._waiting) <= self._capacity or self._closed)
