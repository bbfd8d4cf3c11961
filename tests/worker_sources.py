"""Sources for the tests of worker processes: in a file of their own, because every worker imports it."""

import atexit
import collections
import itertools
import os
import pathlib
import random
import signal
import sys
import threading
import time

import numpy as np


def number(epoch, index):
    return np.full((2, 3), 100 * epoch + index, np.float32)


def slow_number(epoch, index):
    time.sleep(0.004)
    return number(epoch, index)


class Once:
    """Notes each index as a file, so that a second time would fail."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)

    def __call__(self, epoch, index):
        (self.folder / f"{epoch}-{index}").touch(exist_ok=False)
        return number(epoch, index)


class Slow(Once):
    def __call__(self, epoch, index):
        time.sleep(0.2)
        return super().__call__(epoch, index)


class Kept:
    """Returns its own value."""

    def __init__(self, value):
        self.value = value

    def __call__(self, epoch, index):
        return self.value


class Growing:
    """Items of many kilobytes, the size of which depends on the index."""

    def __init__(self, kilobytes):
        self.kilobytes = kilobytes

    def __call__(self, epoch, index):
        return {"x": np.full((self.kilobytes(index), 1024), index % 251, np.uint8), "y": np.array([index])}


def mebibyte(index):
    return 1024


def rising(index):
    return 4 + 3 * index


def up_and_down(index):
    return 1 + index * 7919 % 300


def enormous(epoch, index):
    return np.broadcast_to(np.zeros(1), (1 << 42,))


def draws(epoch, index):
    return np.array([np.random.rand(), random.random()])  # noqa: NPY002


def streamed_draws(epoch, worker_id, num_workers):
    for _ in range(2):
        yield draws(epoch, 0)


class Ranges:
    """Worker w yields w0, w1, ... and as many as `lengths` says."""

    def __init__(self, *lengths):
        self.lengths = lengths

    def __call__(self, epoch, worker_id, num_workers):
        assert num_workers == len(self.lengths)
        for place in range(self.lengths[worker_id]):
            yield np.array([epoch, worker_id, place])


class Restarting:
    """An iterator that goes on after its end, as no iterator should."""

    def __init__(self, epoch, worker_id, num_workers):
        self.asked = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.asked += 1
        if self.asked == 3:
            raise StopIteration
        return np.array([self.asked])


Pair = collections.namedtuple("Pair", ["left", "right"])


ITEMS = {
    "bool": lambda: np.array([True, False]),
    "int8": lambda: np.arange(5, dtype=np.int8),
    "uint64": lambda: np.array([2**64 - 1], np.uint64),
    "float16": lambda: np.arange(6, dtype=np.float16).reshape(2, 3),
    "float64": lambda: np.linspace(0, 1, 7),
    "complex64": lambda: np.array([1 + 2j], np.complex64),
    "big endian": lambda: np.arange(4, dtype=">i4"),
    "dates": lambda: np.array(["2020-01-01"], "datetime64[D]"),
    "str": lambda: np.array(["a", "bcd"]),
    "bytes": lambda: np.array([b"a", b"bcd"]),
    "objects": lambda: np.array(["a", b"b", None, 3], object),
    "records": lambda: np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]),
    "scalar": lambda: np.array(3.5),
    "NumPy scalar": lambda: np.float32(3),
    "no rows": lambda: np.zeros((0, 4), np.float32),
    "no columns": lambda: np.zeros((4, 0), np.int32),
    "every other": lambda: np.arange(20).reshape(4, 5)[:, ::2],
    "backwards": lambda: np.arange(5)[::-1],
    "Fortran": lambda: np.asfortranarray(np.arange(6).reshape(2, 3)),
    "broadcast": lambda: np.broadcast_to(np.arange(3), (4, 3)),
    "read-only": lambda: np.frombuffer(b"abcd", np.uint8),
    "masked": lambda: np.ma.masked_array([1, 2], [True, False]),
    "tuple": lambda: (np.arange(3), np.ones(2)),
    "nested": lambda: {"a": [np.arange(3), (np.ones(2),)], "b": {"c": np.zeros(1)}, "d": None, "e": "text"},
    "named tuple": lambda: Pair(np.arange(3), [np.ones(2)]),
    "large": lambda: (np.arange(300_000), np.arange(3)),
    "no arrays": lambda: (1, "a"),
}


def made(epoch, index):
    return list(ITEMS.values())[index]()


def surrounded_by_a_generator(epoch, index):
    return {"x": [np.zeros(1), (place for place in range(3))]}


class CannotBePickled(Exception):
    def __init__(self):
        super().__init__("no way out")
        self.lock = threading.Lock()


class TakesOthers(Exception):
    def __init__(self, path, line):
        super().__init__(f"{path}:{line}")


class SaysMore(Exception):
    def __init__(self, path):
        super().__init__(f"cannot read {path}")


RAISED = {
    "KeyError": lambda: KeyError("file_17.npy"),
    "OSError": lambda: FileNotFoundError(2, "No such file", "a.png"),
    "CannotBePickled": CannotBePickled,
    "TakesOthers": lambda: TakesOthers("a.png", 3),
    "SaysMore": lambda: SaysMore("a.png"),
    "SystemExit": lambda: SystemExit(3),
    "StopIteration": lambda: StopIteration("nothing"),
}


class Raising:
    def __init__(self, kind, at):
        self.kind = kind
        self.at = at

    def __call__(self, epoch, index):
        if index == self.at:
            self.read_damaged_file()
        return number(epoch, index)

    def read_damaged_file(self):
        raise RAISED[self.kind]()

    def stream(self, epoch, worker_id, num_workers):
        for index in itertools.count(worker_id, num_workers):
            yield self(epoch, index)


class Dying:
    """Ends its process at one index: as often as `times` says, each noted in a file."""

    def __init__(self, folder, at, times, how):
        self.folder = pathlib.Path(folder)
        self.at = at
        self.times = times
        self.how = how

    def __call__(self, epoch, index):
        deaths = len(list(self.folder.iterdir()))
        if index == self.at and deaths < self.times:
            (self.folder / str(deaths)).touch()
            if self.how == "exit":
                os._exit(7)
            os.kill(os.getpid(), self.how)
        return number(epoch, index)

    def stream(self, epoch, worker_id, num_workers):
        for index in itertools.count(worker_id, num_workers):
            yield self(epoch, index)


class Stuck:
    """Waits at one index until a file is there."""

    def __init__(self, file, at):
        self.file = pathlib.Path(file)
        self.at = at

    def __call__(self, epoch, index):
        if index == self.at:
            self.wait_for_the_network()
        return number(epoch, index)

    def wait_for_the_network(self):
        while not self.file.exists():
            time.sleep(0.02)


class TidyingUp:
    """Leaves a file when its generator is closed, and one when its interpreter ends."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)

    def __call__(self, epoch, worker_id, num_workers):
        atexit.register((self.folder / "atexit").touch)
        print("printed", end="")
        try:
            while True:
                yield np.zeros(1)
        finally:
            (self.folder / f"finally {epoch}").touch()


def surroundings(epoch, index):
    names = ["CUDA_VISIBLE_DEVICES", "KERAS_GPUFEED_VIRTUAL_DEVICES"]
    return {
        "tensorflow": "tensorflow" in sys.modules,
        "environment": {name: os.environ.get(name) for name in names},
        "start_session": os.getsid(0) == os.getpid(),
        "sigint": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
    }


def public_names(epoch, index):
    import keras_gpufeed

    return list(keras_gpufeed.__all__), "tensorflow" in sys.modules


class Holder:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __call__(self, epoch, index):
        return np.zeros(1)


class Careful(Holder):
    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "lock"}


def local_function():
    def inner(epoch, index):
        return index

    return inner


class OnlyHere:
    def __setstate__(self, state):
        raise RuntimeError("no such disk")

    def __getstate__(self):
        return {"a": 1}
