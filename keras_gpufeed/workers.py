"""Computes items in worker processes.

Flow:   ... -> processes -> [workers] -> sources -> pipeline -> ...
Owns:   which worker does what, order, what happens when one fails, dies or is stuck.
Leaves: what an item is (sources), the processes (processes, worker_main), TensorFlow (pipeline).

There is no thread here: whoever asks for the next item deals out tasks, reads answers and waits. Each worker
has its next tasks before it needs them, so it works on while nobody asks.
"""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import math
import signal
import time
import weakref
from collections.abc import Generator, Iterable, Iterator
from multiprocessing import process
from typing import Any, Callable, Optional

from .errors import WorkerError
from .processes import Crew, Failure, Task, Worker, end_of_iterator
from .shipping import ShippedSource
from .worker_main import GRACE_SECONDS, Settings, UnguardedScriptError

_LOGGER = logging.getLogger("keras_gpufeed")
_MAX_DEATHS = 3  # Of workers at the same task.
_MAX_TASKS = 64  # Of a worker at a time: some 200 unread messages fill a socket, and sending would block.

_Request = tuple[int, Optional[int], Optional[int]]  # Epoch, index (in `map`), worker id (in `stream`).


class WorkerPool:
    """Processes that compute items and hand them over through shared memory.

    An item is a NumPy array, or arrays in nested tuples, lists and dicts. Its arrays lie in shared memory, at
    multiples of 64 bytes, and may be written to. They stay valid as long as they or views of them live, even
    when the pool is closed; then their memory is used again.

    One thread at a time may ask for items, any thread may close the pool. The processes end with `close`,
    with the `with` block, when the pool is garbage, with the interpreter, and when this process is killed.

    Args:
        source: A picklable callable. For `map` it is called as `source(epoch, index)` and returns an item;
            for `stream` as `source(epoch, worker_id, num_workers)` and returns an iterable of items.
        num_workers: Number of processes.
        seed: A number from 0. At the start of each item of `map`, NumPy's and Python's global random state in
            the worker depend on (seed, epoch, index) alone, so that items do not depend on the number of
            workers; at the start of each `stream` on (seed, epoch, worker_id).
        prefetch: Items that may wait for the consumer, besides the one that each worker is at.
        start_method: "spawn", the default, starts new interpreters. "fork" copies this process: that may
            deadlock beside TensorFlow's threads, but it knows the classes of a notebook.
        stall_seconds: After so long a wait for an item, a warning tells where its worker stands; and again
            after as long.
        stall_limit_seconds: After so long a wait for an item, `WorkerError`; None waits on.

    Raises:
        SourceError: If the source cannot be pickled, or a script starts workers while a worker imports it.
        WorkerError: If a process cannot be started or there is not enough memory.

    Example:
        >>> with WorkerPool(divmod, 2, seed=0, prefetch=2) as pool:
        ...     list(pool.map([(7, 2), (7, 3)]))
        [(3, 1), (2, 1)]
    """

    def __init__(
        self,
        source: Callable[..., Any],
        num_workers: int,
        *,
        seed: int,
        prefetch: int,
        start_method: str | None = None,
        stall_seconds: float = 60.0,
        stall_limit_seconds: float | None = None,
    ) -> None:
        if start_method not in (None, "spawn", "fork"):
            raise ValueError(f'start_method must be "spawn" or "fork". Received: {start_method!r}.')
        if getattr(process.current_process(), "_inheriting", False):
            raise UnguardedScriptError("A worker imports this script, and the script starts workers again.")
        self._is_forked = start_method == "fork"
        self._source = ShippedSource(source, needs_main=not self._is_forked)
        self._num_workers = num_workers
        self._seed = seed
        self._max_tasks = min(prefetch + num_workers, _MAX_TASKS * num_workers)
        self._stall_seconds = stall_seconds
        self._stall_limit_seconds = math.inf if stall_limit_seconds is None else stall_limit_seconds
        self._run = _Run(0, iter(()), None)
        self._task_numbers = itertools.count()
        self._crew = Crew(start_method or "spawn")
        self._close = weakref.finalize(self, self._crew.close)
        for worker_id in range(num_workers):
            self._hire(worker_id, self._source)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes: idle ones at once, busy ones within about a second."""
        self._close()
        self._source.close()

    def update(self, source: Callable[..., Any]) -> None:
        """Gives the workers a new source, or a new state of it.

        It holds for the tasks that the pool takes from now on; those that it has taken keep the one they had.
        So it may be called between two passes, and between two epochs by the iterable that `map` reads.

        Args:
            source: As for the class.

        Raises:
            SourceError: If the source cannot be pickled.
            WorkerError: If there is not enough memory.
        """
        self._source = ShippedSource(source, needs_main=not self._is_forked)

    def map(self, tasks: Iterable[tuple[int, int]]) -> Generator[Any, None, None]:
        """Computes the items of tasks. A new pass, of `map` or of `stream`, ends the one before.

        Args:
            tasks: Pairs (epoch, index), possibly without end. Read only as far ahead as `prefetch` allows.

        Yields:
            One item for each task, in the order of the tasks.

        Raises:
            Exception: What the source raised, after the items before it; its cause is the worker's traceback.
            SourceError: If a worker cannot rebuild the source, or send what it returned or raised.
            WorkerError: If three workers died at the same task, a wait took too long, or the pool is closed.
        """
        return self._pass(((epoch, index, None) for epoch, index in tasks), None)

    def stream(self, epoch: int) -> Generator[Any, None, None]:
        """Runs the source's iterators. A new pass, of `map` or of `stream`, ends the one before.

        Args:
            epoch: The epoch that the source is called with.

        Yields:
            An item of worker 0, one of worker 1, and so on around, without the workers that have ended.

        Raises:
            Exception: As for `map`.
            SourceError: As for `map`.
            WorkerError: If a worker died after its first item, a wait took too long, or the pool is closed.
        """
        streaming = list(range(self._num_workers))
        return self._pass(_take_turns(epoch, streaming), streaming)

    def _pass(self, requests: Iterator[_Request], streaming: list[int] | None) -> Generator[Any, None, None]:
        with self._crew.lock:
            self._check_open()
            self._listen(0)  # A worker that has died since the last pass did not die of this one.
            run = self._run = _Run(self._run.number + 1, requests, streaming)
        try:
            while self._wait_for_next(run):
                yield self._take_next(run)  # Without a name, so that this frame does not keep the item alive.
        finally:
            run.clear()

    def _wait_for_next(self, run: _Run) -> bool:
        """Waits for the answer to the first task; False if there is no more."""
        with self._crew.lock:
            waits_since = warned_at = time.monotonic()
            while True:
                self._check_open()
                if run is not self._run:
                    raise WorkerError("A later pass over this pool has ended this one. Make a pool for each.")
                self._deal(run)
                if not run.tasks:
                    if run.error is not None:
                        raise run.error
                    return False
                head = run.tasks[0]
                if head.answer is end_of_iterator:
                    run.end_of(head)
                    continue
                if head.answer is not None:
                    return True
                worker = self._crew.workers[head.worker_id]
                quiet_since = max(waits_since, worker.heard_at)
                warn_at = max(quiet_since, warned_at) + self._stall_seconds
                stop_at = quiet_since + self._stall_limit_seconds
                now = time.monotonic()
                if now >= min(warn_at, stop_at):
                    self._report_stall(worker, now - quiet_since, stop=now >= stop_at)
                    warned_at = time.monotonic()
                self._listen(max(0.0, min(warn_at, stop_at) - now))

    def _take_next(self, run: _Run) -> Any:
        with self._crew.lock:
            task = run.tasks.popleft()
            self._deal(run)
            return task.take()

    def _check_open(self) -> None:
        if not self._crew.is_open:
            raise WorkerError(
                "The worker processes have been ended by close(), so there are no more batches. Make a new feeder, and "
                "close it when training is over."
            )

    def _deal(self, run: _Run) -> None:
        """Gives tasks to workers until as many are under way as may be."""
        workers = self._crew.workers
        while run.requests is not None and len(run.tasks) < self._max_tasks:
            try:
                epoch, index, worker_id = next(run.requests)
                self._check_open()
            except StopIteration:
                run.requests = None
            except Exception as error:  # Of the caller's iterable: raised after the items before it.
                run.requests, run.error = None, error
            else:
                if worker_id is None:
                    worker_id = min(workers, key=lambda each: len(workers[each].tasks))
                task = Task(run.number, epoch, index, worker_id, self._source, run.lost.get(worker_id))
                run.tasks.append(task)
                if task.answer is None:
                    workers[worker_id].give(next(self._task_numbers), task)

    def _listen(self, timeout: float) -> None:
        """Waits for news from workers, at most so many seconds."""
        for worker, has_ended in self._crew.wait(timeout):
            if worker is not self._crew.workers.get(worker.worker_id):
                continue  # Replaced a moment ago.
            try:
                if has_ended:
                    while worker.connection.poll():  # What it has sent still counts.
                        worker.receive()
                    raise EOFError
                worker.receive()
            except (EOFError, OSError):
                self._replace(worker)
            except BaseException:  # Ctrl-C in the middle of a message: nothing after it can be understood.
                self._crew.dismiss(worker, patience_seconds=0)
                self._hire(worker.worker_id, self._source)
                raise

    def _replace(self, worker: Worker) -> None:
        """Puts a new worker in the place of one that has died, and gives it the same tasks."""
        reason = _death_reason(self._crew.dismiss(worker, patience_seconds=GRACE_SECONDS))
        was_at = next(iter(worker.tasks.values()), None)
        message = f"Worker {worker.worker_id} (process {worker.pid}) died at {was_at or 'no task'}: {reason}"
        wanted = [task for task in worker.tasks.values() if task in self._run.tasks]
        outlook = "A new worker takes its place."
        if self._run.is_streaming(worker.worker_id) and worker.last_run == self._run.number:
            error = WorkerError(
                f"{message} A generator cannot be replayed, so the epoch cannot go on. "
                "A source that is read by index, such as a keras.utils.Sequence, can."
            )
            answer = self._run.lost[worker.worker_id] = functools.partial(Failure, error)
            for task in wanted:
                task.answer = answer
            wanted, outlook = [], "The epoch cannot go on."
        elif was_at in wanted:
            was_at.num_deaths += 1
            if was_at.num_deaths == _MAX_DEATHS:
                error = WorkerError(f"{message} It is the third to die there, so no other tries it again.")
                was_at.answer = functools.partial(Failure, error)
                wanted, outlook = [], "No other worker tries it again."  # Those after it are never asked for.
        _LOGGER.warning("%s %s", message, outlook)
        self._hire(worker.worker_id, wanted[0].source if wanted else self._source)
        for task in wanted:
            self._crew.workers[worker.worker_id].give(next(self._task_numbers), task)

    def _report_stall(self, worker: Worker, seconds: float, stop: bool) -> None:
        was_at = next(iter(worker.tasks.values()))
        message = (
            f"No item from worker {worker.worker_id} (process {worker.pid}) for {seconds:.0f} s. "
            f"It is at {was_at}, where its Python stands at:\n{worker.stack()}"
        )
        if not stop:
            _LOGGER.warning("%s", message)
            return
        self._crew.dismiss(worker, patience_seconds=0)
        self._hire(worker.worker_id, self._source)
        raise WorkerError(message)

    def _hire(self, worker_id: int, source: ShippedSource) -> None:
        try:
            self._crew.hire(Settings(worker_id, self._num_workers, self._seed), source)
        except OSError as error:
            self.close()
            raise WorkerError(
                f"Worker process {worker_id} of {self._num_workers} cannot be started: {error}. "
                "Use fewer workers, or raise the limits on processes and open files."
            ) from error


class _Run:
    """One pass of `map` or `stream`, as far as it is under way."""

    def __init__(self, number: int, requests: Iterator[_Request], streaming: list[int] | None) -> None:
        self.number = number
        self.requests: Iterator[_Request] | None = requests  # None when it has ended.
        self.error: Exception | None = None  # How it ended, if not well.
        self.tasks: collections.deque[Task] = collections.deque()  # Dealt and not taken yet, in order.
        self.lost: dict[int, Callable[[], Failure]] = {}  # The answer of workers that died with an iterator.
        self._streaming = streaming  # Workers whose iterators have not ended; None in `map`.

    def clear(self) -> None:
        """Lets go of everything: of slots, and of errors, which refer to the pool by their tracebacks."""
        self.requests = self.error = None
        self.tasks.clear()
        self.lost.clear()

    def is_streaming(self, worker_id: int) -> bool:
        return self._streaming is not None and worker_id in self._streaming

    def end_of(self, task: Task) -> None:
        """Takes the first task off, which found the end of its worker's iterator."""
        self.tasks.popleft()
        if self._streaming and task.worker_id in self._streaming:
            self._streaming.remove(task.worker_id)


def _take_turns(epoch: int, streaming: list[int]) -> Iterator[_Request]:
    while streaming:
        for worker_id in tuple(streaming):
            yield epoch, None, worker_id


def _death_reason(exit_code: int) -> str:
    if exit_code >= 0:
        return f"it ended itself with exit code {exit_code}; what it printed last may tell why."
    name = next((each.name for each in signal.Signals if each == -exit_code), f"signal {-exit_code}")
    if -exit_code == signal.SIGKILL:
        return f"{name}, most likely because memory ran out. Fewer workers or smaller batches need less."
    if -exit_code == signal.SIGTERM:
        return f"{name}, so someone ended it."
    return f"{name}, most likely a crash in native code that the source calls."
