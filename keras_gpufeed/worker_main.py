"""What runs inside a worker process.

Flow:   ... -> ring -> [worker_main] -> workers -> ...
Owns:   starting without TensorFlow, computing items one after another, leaving with the parent.
Leaves: which items, in which order, and what happens when a process dies (workers).

Messages from the parent, obeyed in the order in which they were sent:
    (Settings, preparation)     only to a new interpreter, once
    (pickle_bytes, main)        the source for all that follows; the descriptor of its memory comes next
    (number, run, epoch, index, released)
                                one task; where index is None, the next item of this worker's iterator.
                                The slots that it releases may be used at once, and it is skipped as soon as
                                a task of a later run is there
    None                        the end, at once
Messages to the parent: None once, when ready, then one for each task in the same order:
    (number, "item", slot, pickle_bytes, is_new, dropped)
                                if is_new, the descriptor of the slot's memory comes next
    (number, "failed", pickled, headline, text)
    (number, "end"), (number, "skipped")
"""

from __future__ import annotations

import atexit
import collections
import dataclasses
import faulthandler
import mmap
import os
import pickle
import random
import select
import signal
import subprocess
import sys
import threading
import traceback
from multiprocessing import process, reduction, spawn
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from .errors import FeedError, SourceError
from .packing import unpack
from .ring import SlotWriter
from .shipping import find_unpicklable, headline

GRACE_SECONDS = 1.0  # What user code may still take, once the parent has closed the pool or is gone.
_END = object()

# The package's __init__ imports TensorFlow, which takes seconds; most sources do not need it. So a stand-in
# takes the place of the package, and becomes the package when someone asks it for a name of its own.
_PROGRAM = """
import importlib, importlib.util, sys
sys.path[:] = {path!r}
spec = importlib.util.spec_from_file_location({package!r}, {init!r}, submodule_search_locations=[{folder!r}])
package = importlib.util.module_from_spec(spec)
def __getattr__(name):
    if name.startswith("__") and name != "__all__":
        raise AttributeError(name)
    if importlib.util.find_spec({package!r} + "." + name):
        return importlib.import_module({package!r} + "." + name)
    del package.__getattr__
    spec.loader.exec_module(package)
    return getattr(package, name)
package.__getattr__ = __getattr__
sys.modules[{package!r}] = package
importlib.import_module({package!r} + ".worker_main").run_interpreter({connection}, {stacks}, {parent})
"""


class UnguardedScriptError(SourceError):
    """Raised by a script that a worker imports, when it is about to start workers again."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a worker process is told once.

    Args:
        worker_id: Its number, `0 .. num_workers - 1`.
        num_workers: How many there are.
        seed: With the epoch and the index, it seeds NumPy's and Python's global random state.
    """

    worker_id: int
    num_workers: int
    seed: int


def start_command(connection: int, stacks: int) -> list[str]:
    """The command line of a new interpreter for a worker.

    Args:
        connection: Descriptor, in the new process, of its side of the connection.
        stacks: Descriptor, in the new process, that faulthandler writes to at SIGUSR1.
    """
    folder = os.path.dirname(os.path.abspath(__file__))
    program = _PROGRAM.format(
        path=[os.path.abspath(entry) for entry in sys.path],
        package=__package__,
        init=os.path.join(folder, "__init__.py"),
        folder=folder,
        connection=connection,
        stacks=stacks,
        parent=os.getpid(),
    )
    # As multiprocessing does it: the interpreter that it is told to use, with the options of this one.
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [os.fsdecode(spawn.get_executable()), *options, "-c", program]


def run_interpreter(connection: int, stacks: int, parent: int) -> None:
    """The whole life of an interpreter that was started with `start_command`.

    Args:
        connection: Descriptor of this side of the connection with the parent.
        stacks: Descriptor that faulthandler writes to at SIGUSR1.
        parent: Process id of the parent.
    """
    messages = Connection(connection)
    try:
        settings, preparation = messages.recv()
    except (EOFError, OSError):
        return  # The parent is gone.
    spawn.prepare(preparation)
    run_worker(settings, messages, stacks, parent)
    atexit._run_exitfuncs()
    flush_output()
    os._exit(0)  # An interpreter with TensorFlow in it takes about a second to tear itself down.


def run_worker(settings: Settings, messages: Connection, stacks: int, parent: int) -> None:
    """Works until the parent says so or is gone.

    Args:
        settings: Who this worker is.
        messages: The connection with the parent.
        stacks: Descriptor that faulthandler writes to at SIGUSR1.
        parent: Process id of the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer.
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)
    threading.Thread(target=_leave_with_parent, args=(messages.fileno(), parent), daemon=True).start()
    try:
        messages.send(None)  # From now on SIGUSR1 is answered.
        _Worker(settings, messages).serve()
    except (EOFError, OSError):
        pass  # The parent is gone.


def flush_output() -> None:
    """Writes what is still in the buffers of the standard streams."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _leave_with_parent(connection: int, parent: int) -> None:
    """Waits until the parent has gone, then ends this process after a moment, whatever it is doing."""
    poll = select.poll()
    poll.register(connection, 0)  # Tells when the other side is closed ...
    descriptor = process_descriptor(parent)
    if descriptor is not None:  # ... which it is not while another child of the parent has inherited it.
        poll.register(descriptor, select.POLLIN)
    if os.getppid() == parent:
        poll.poll()
    # Unlike a Python thread, this needs no interpreter lock: nothing that user code does can hold it up.
    nowhere = open(os.devnull, "w")  # noqa: SIM115
    faulthandler.dump_traceback_later(GRACE_SECONDS, exit=True, file=nowhere)


def process_descriptor(pid: int) -> int | None:
    """A descriptor that is readable when the process has ended; None where there is no such thing."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # Not Linux, or older than 5.3.
        return None


class _Worker:
    """Computes what the parent asks for."""

    def __init__(self, settings: Settings, messages: Connection) -> None:
        self._settings = settings
        self._messages = messages
        self._slots = SlotWriter()
        self._source: Any = None
        self._no_source: tuple[Any, ...] = ()  # The failure, if the source could not be rebuilt.
        self._iterator: Any = None
        self._iterator_run = 0

    def serve(self) -> None:
        inbox: collections.deque[tuple[Any, ...]] = collections.deque()
        poll = select.poll()
        poll.register(self._messages.fileno(), select.POLLIN)
        newest_run = 0
        while True:
            while not inbox or poll.poll(0):
                message = self._messages.recv()
                if message is None:
                    return
                if len(message) == 2:
                    message = (*message, reduction.recv_handle(self._messages))
                else:
                    newest_run = message[1]
                    self._slots.recycle(message[4])
                inbox.append(message)
            message = inbox.popleft()
            if len(message) == 3:
                self._take_source(*message)
            else:
                number, run, epoch, index, _ = message
                # Nobody waits for the rest of an older run.
                answer = ("skipped",) if run < newest_run else self._answer(run, epoch, index)
                self._send(number, *answer)

    def _take_source(self, pickle_bytes: int, main: dict[str, Any], memory: int) -> None:
        self._source, self._no_source = None, ()
        try:
            mapped = mmap.mmap(memory, 0, access=mmap.ACCESS_COPY)  # All workers share what none has changed.
            os.close(memory)
            _import_main(main)
            self._source = unpack(mapped, pickle_bytes)
        except UnguardedScriptError as error:
            self._no_source = _failure(SourceError(_tell_of_guard(error)), "")  # The traceback would explain nothing.
        except BaseException as error:
            message = (
                f"The source cannot be rebuilt in a worker process ({headline(error)}). Its class must be in "
                "a file that can be imported there; a script works under if __name__ == '__main__':"
            )
            self._no_source = _failure(SourceError(message), _describe(error))

    def _answer(self, run: int, epoch: int, index: int | None) -> tuple[Any, ...]:
        if self._no_source:
            return self._no_source
        try:
            item = self._compute(run, epoch, index)
        except BaseException as error:
            return _failure(error, _describe(error))
        if item is _END:
            return ("end",)
        try:
            return ("item", *self._slots.write(item))
        except FeedError as error:
            return _failure(error, _describe(error))
        except Exception as error:
            path, part = find_unpicklable(item, "item")
            message = (
                f"An item cannot be sent to the training process: {path} is a {type(part).__qualname__} "
                f"({headline(error)}). Items are NumPy arrays, in tuples, lists and dicts."
            )
            return _failure(SourceError(message), _describe(error))

    def _compute(self, run: int, epoch: int, index: int | None) -> Any:
        settings = self._settings
        if index is not None:
            _seed_random(settings.seed, epoch, index)
            return self._source(epoch, index)
        if run != self._iterator_run:
            _seed_random(settings.seed, epoch, settings.worker_id)
            self._iterator = iter(self._source(epoch, settings.worker_id, settings.num_workers))
            self._iterator_run = run
        item = next(self._iterator, _END)
        if item is _END:
            self._iterator = iter(())  # Whatever the iterator would do if it were asked again.
        return item

    def _send(self, number: int, kind: str, *content: Any) -> None:
        if kind != "item":
            self._messages.send((number, kind, *content))
            return
        slot, pickle_bytes, memory, dropped = content
        self._messages.send((number, kind, slot, pickle_bytes, memory is not None, dropped))
        if memory is not None:
            reduction.send_handle(self._messages, memory, 0)
            os.close(memory)


def _import_main(main: dict[str, Any]) -> None:
    """Imports the user's script under another name, as multiprocessing does, if the source is from there."""
    current = process.current_process()
    current._inheriting = True  # type: ignore[attr-defined]  # Where multiprocessing notes it.
    try:
        spawn.prepare(main)
    finally:
        del current._inheriting  # type: ignore[attr-defined]


def _tell_of_guard(error: UnguardedScriptError) -> str:
    frames = traceback.walk_tb(error.__traceback__)
    script, line = next(each for each in frames if each[0].f_globals["__name__"] == "__mp_main__")
    return (
        f"{script.f_code.co_filename} starts worker processes in line {line}, and each of them imports the script to "
        "find the source in it, which would start workers again. Put what the script does under a guard; only "
        "imports, functions and classes stay outside:\n\n"
        '    if __name__ == "__main__":\n'
        "        model.fit(...)\n"
    )


def _seed_random(*key: int) -> None:
    words = np.random.SeedSequence(key).generate_state(8)
    np.random.seed(words)  # noqa: NPY002 - the global state is what user code may draw from
    random.seed(words.tobytes())


def _failure(error: BaseException, text: str) -> tuple[Any, ...]:
    pickled = None
    if isinstance(error, Exception) and not isinstance(error, StopIteration):  # A generator cannot raise it.
        pickled = _pickled(error)
    return "failed", pickled, headline(error), text


def _pickled(error: Exception) -> bytes | None:
    """The exception; or its class, arguments and attributes, where its `__init__` takes others; or None."""
    for parts in (error, (type(error), error.args, error.__dict__)):
        try:
            pickled = pickle.dumps(parts)
            rebuilt = pickle.loads(pickled)
        except Exception:
            continue
        if isinstance(rebuilt, tuple) or headline(rebuilt) == headline(error):
            return pickled
    return None


def _describe(error: BaseException) -> str:
    """The traceback from the first line that is not of this file."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))
