"""The parent's side of worker processes: starts, reaches and ends them.

Flow:   ... -> ring -> worker_main -> [processes] -> workers -> ...
Owns:   a worker's process and messages, waiting for all of them.
Leaves: which worker does what, and what happens when one dies (workers).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import selectors
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import connection, popen_fork, process, reduction
from typing import Any, Callable

from .errors import SourceError
from .packing import unpack
from .ring import SlotReader
from .shipping import ShippedSource, headline
from .worker_main import (
    GRACE_SECONDS,
    Settings,
    flush_output,
    process_descriptor,
    run_worker,
    start_command,
)

_WORKER_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1"}  # GPUs are for the process that trains.
_STACK_SECONDS = 0.5  # How long a worker may take to tell where it stands.


@dataclasses.dataclass(eq=False)
class Task:
    """One item to be computed.

    Args:
        run: The pass to which it belongs.
        epoch: The epoch.
        index: The index; None for the next item of the worker's iterator.
        worker_id: Who computes it.
        source: With what.
        answer: None at first; then a function that returns the item or a `Failure`, or `end_of_iterator`.
        num_deaths: Workers that died at it.
    """

    run: int
    epoch: int
    index: int | None
    worker_id: int
    source: ShippedSource
    answer: Callable[[], Any] | None = None
    num_deaths: int = 0

    def take(self) -> Any:
        """The item; raises if computing it has failed."""
        answer, self.answer = self.answer, None
        item = answer() if answer else None
        if isinstance(item, Failure):
            try:
                raise item.error
            finally:
                del answer, item  # An error that its own traceback leads to would keep the pool alive.
        return item

    def __str__(self) -> str:
        # As the source was called with, and unlike Keras's display, which counts from 1.
        if self.index is None:
            return f"its iterator of epoch {self.epoch} (counted from 0)"
        return f"epoch {self.epoch}, index {self.index} (both counted from 0)"


@dataclasses.dataclass(frozen=True)
class Failure:
    """What stands in the place of an item that could not be computed."""

    error: Exception


def end_of_iterator() -> None:
    """The answer of a worker whose iterator has ended."""


class Worker:
    """One worker process, as the parent sees it.

    Args:
        settings: Who it is.
        source: What it starts with.
        start_method: "spawn" or "fork".
        close_inherited: Closes, in a forked process, what belongs to the parent.

    Attributes:
        worker_id: Its number.
        pid: Its process id.
        connection: Where its messages come from.
        ended: A descriptor that is readable when the process has ended, or None.
        tasks: What it has been given and has not answered, by number; it is at the first.
        heard_at: When it last sent something, or was started.
        last_run: The pass to which its last answer belongs.
    """

    def __init__(
        self,
        settings: Settings,
        source: ShippedSource,
        start_method: str,
        close_inherited: Callable[[], None],
    ) -> None:
        self.worker_id = settings.worker_id
        self.tasks: dict[int, Task] = {}
        self.heard_at = time.monotonic()
        self.last_run = 0
        self.connection, theirs = connection.Pipe()
        self._stacks, their_stacks = os.pipe()
        self._slots = SlotReader()
        self._source: ShippedSource | None = None
        self._is_ready = False
        self.ended: int | None = None
        self._process: Any
        try:
            if start_method == "fork":
                parent = os.getpid()

                def work() -> None:
                    close_inherited()
                    self.close()
                    os.environ.update(_WORKER_ENVIRONMENT)
                    run_worker(settings, theirs, their_stacks, parent)

                self._process = popen_fork.Popen(_Forked(work))  # type: ignore[arg-type]
            else:
                self._process = _start_interpreter(theirs.fileno(), their_stacks)
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()
            os.close(their_stacks)
        self.pid: int = self._process.pid
        self.ended = process_descriptor(self.pid)
        if start_method != "fork":
            self._send((settings, _preparation(settings)))
        self._ship(source)

    def close(self) -> None:
        """Closes the parent's side of everything."""
        self.connection.close()
        os.close(self._stacks)
        if self.ended is not None:
            os.close(self.ended)

    def give(self, number: int, task: Task) -> None:
        """Sends a task; to a process that has just died, in vain."""
        self.tasks[number] = task
        self._ship(task.source)
        released = [self._slots.released.popleft() for _ in range(len(self._slots.released))]
        self._send((number, task.run, task.epoch, task.index, released))

    def _ship(self, source: ShippedSource) -> None:
        if source is not self._source:
            self._send((source.pickle_bytes, source.main), source.memory)
            self._source = source

    def _send(self, message: Any, descriptor: int | None = None) -> None:
        try:
            self.connection.send(message)
            if descriptor is not None:
                reduction.send_handle(self.connection, descriptor, self.pid)
        except OSError:
            pass  # It has died; the one who listens will see it.

    def receive(self) -> None:
        """Reads one message.

        Raises:
            EOFError: If the process has died and everything that it had sent is read.
            OSError: Likewise.
        """
        message = self.connection.recv()
        self.heard_at = time.monotonic()
        if message is None:
            self._is_ready = True
            return
        number, kind, *content = message
        if kind == "item":
            slot, pickle_bytes, is_new, dropped = content
            if is_new:
                self._slots.add(slot, reduction.recv_handle(self.connection))
            self._slots.forget(dropped)
            answer: Callable[[], Any] = functools.partial(unpack, self._slots.lease(slot), pickle_bytes)
        elif kind == "failed":
            where = f"worker {self.worker_id} (process {self.pid}), {self.tasks[number]}"
            answer = functools.partial(_rebuild, where, *content)
        else:  # "end", or "skipped", which nobody asks for.
            answer = end_of_iterator
        task = self.tasks.pop(number)
        task.answer = answer
        self.last_run = task.run

    def stack(self) -> str:
        """Where its Python stands, as far as it tells."""
        if not self._is_ready:
            return "It is still starting."
        while connection.wait([self._stacks], 0) and os.read(self._stacks, 65536):
            pass  # From an earlier time, when it took too long.
        os.kill(self.pid, signal.SIGUSR1)
        text = b""
        while connection.wait([self._stacks], _STACK_SECONDS):
            part = os.read(self._stacks, 65536)
            if not part:
                break
            text += part
        return text.decode(errors="replace") or "It does not tell where it stands; perhaps it is stopped."

    def hang_up(self) -> None:
        """Lets it go: it ends at once if it is idle, otherwise after `GRACE_SECONDS`."""
        self._send(None)  # End of file alone would not do: a forked process may hold this side open.
        self.connection.close()

    def bury(self, deadline: float) -> int:
        """Waits for its end, brings it about at the deadline, and returns the exit code."""
        patience = max(0.0, deadline - time.monotonic())
        if self.ended is not None:
            connection.wait([self.ended], patience)
        else:
            while self._process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
        self._process.kill()  # Does nothing to a process that has ended: its exit code stays.
        self.close()
        return int(self._process.wait())


def _start_interpreter(messages: int, stacks: int) -> subprocess.Popen[bytes]:
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, **_WORKER_ENVIRONMENT}
    environment.pop("KERAS_GPUFEED_VIRTUAL_DEVICES", None)
    return subprocess.Popen(
        start_command(messages, stacks),
        env=environment,
        stdin=subprocess.DEVNULL,
        pass_fds=(messages, stacks),
        start_new_session=True,  # Ctrl-C in the terminal is for the parent alone, from the first moment on.
    )


def _preparation(settings: Settings) -> dict[str, Any]:
    """What `multiprocessing.spawn.prepare` makes another interpreter like this one with.

    Its own `get_preparation_data` would also settle the start method of the whole program.
    """
    return {
        "name": f"{__package__}-worker-{settings.worker_id}",
        "authkey": bytes(process.current_process().authkey),
        "sys_argv": sys.argv,
        "dir": os.getcwd(),
        "orig_dir": getattr(process, "ORIGINAL_DIR", None),
    }


class _Forked:
    """What `popen_fork.Popen`, which is used like `subprocess.Popen`, runs in a copy of this process."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def _bootstrap(self, parent_sentinel: int) -> int:
        os.setsid()
        self._work()
        flush_output()
        return 0


class _WorkerTraceback(Exception):
    """Carries the text of a traceback from a worker process, as the cause of what is raised here."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def _rebuild(where: str, pickled: bytes | None, title: str, text: str) -> Failure:
    """Makes again what the source raised in a worker, or tells of it."""
    error: Any = None
    if pickled is not None:
        try:
            error = pickle.loads(pickled)
            if isinstance(error, tuple):
                kind, args, attributes = error
                error = kind.__new__(kind, *args)
                error.__dict__.update(attributes)
        except Exception:
            error = None  # Its class is unknown here, or it holds what cannot be sent.
    if not isinstance(error, Exception) or headline(error) != title:
        error = SourceError(
            f"The source raised {title}. The exception itself cannot be passed on between processes; "
            "its traceback is above."
        )
    if text:
        error.__cause__ = _WorkerTraceback(f"In {where}:\n{text}")
    return Failure(error)


class Crew:
    """The workers of a pool, and waiting for news from any of them. It does not refer to the pool.

    Args:
        start_method: "spawn" or "fork".

    Attributes:
        lock: Held by whoever touches workers.
        workers: The workers by number.
        is_open: False when `close` has been called.
    """

    def __init__(self, start_method: str) -> None:
        self.lock = threading.RLock()
        self.workers: dict[int, Worker] = {}
        self.is_open = True
        self._start_method = start_method
        self._selector = selectors.DefaultSelector()
        self._bell = os.pipe()  # Rung by `close`.
        self._selector.register(self._bell[0], selectors.EVENT_READ)
        self._owner = os.getpid()

    def hire(self, settings: Settings, source: ShippedSource) -> None:
        """Starts a worker."""
        worker = Worker(settings, source, self._start_method, self._close_descriptors)
        self.workers[worker.worker_id] = worker
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)
        if worker.ended is not None:
            self._selector.register(worker.ended, selectors.EVENT_READ, worker)

    def dismiss(self, worker: Worker, patience_seconds: float) -> int:
        """Ends a worker, by force after so long, and returns its exit code."""
        self._selector.unregister(worker.connection)
        if worker.ended is not None:
            self._selector.unregister(worker.ended)
        del self.workers[worker.worker_id]
        worker.hang_up()
        return worker.bury(time.monotonic() + patience_seconds)

    def wait(self, timeout: float) -> list[tuple[Worker, bool]]:
        """Waits at most so many seconds; returns workers with news, each with whether it has ended."""
        try:
            ready = self._selector.select(timeout)
        except (OSError, ValueError):
            if self.is_open:
                raise
            return []  # A signal handler has closed the pool while we waited.
        return [(key.data, key.fd == key.data.ended) for key, _ in ready if key.data]

    def close(self) -> None:
        """Ends all workers. Whoever waits is woken first."""
        if os.getpid() != self._owner:
            return  # In a process forked from ours, of which the workers know nothing.
        self.is_open = False
        os.write(self._bell[1], b"!")
        with self.lock:
            for worker in self.workers.values():
                worker.hang_up()
            deadline = time.monotonic() + 2 * GRACE_SECONDS
            for worker in self.workers.values():
                worker.bury(deadline)
            self.workers.clear()
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        for worker in self.workers.values():
            worker.close()
        self._selector.close()
        for descriptor in self._bell:
            os.close(descriptor)
