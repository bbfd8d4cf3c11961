"""Puts values into memory that processes share.

Flow:   errors -> [packing] -> shipping -> ring -> worker_main -> processes -> workers -> ...
Owns:   pickling with the data of arrays set aside, shared memory without a name.
Leaves: using memory again (ring), processes (worker_main, processes). No TensorFlow here.

A value becomes one block: its pickle, which holds the structure, then the data of its arrays, each at a
multiple of 64 bytes. The reader's arrays lie on that block, so nothing is copied on its side.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
import tempfile
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import WorkerError

_ALIGNMENT = 64  # EIGEN_MAX_ALIGN_BYTES: TensorFlow copies arrays that start elsewhere.


class Packed:
    """A value made ready for `write`: pickled, apart from the data of its arrays.

    Args:
        value: Anything that pickle takes. Arrays of Python objects are pickled whole.
        reopen_maps: True if memory-mapped files are opened again where the value is unpacked, not copied.

    Raises:
        Exception: Whatever pickle raises for a value that it does not take.

    Example:
        >>> packed = Packed({"x": np.arange(3), "name": "a"})
        >>> memory = bytearray(packed.num_bytes)
        >>> packed.write(memory)
        >>> unpack(memory, packed.pickle_bytes)
        {'x': array([0, 1, 2]), 'name': 'a'}
    """

    def __init__(self, value: Any, reopen_maps: bool = False) -> None:
        stream = io.BytesIO()
        pickler = _Pickler(stream, reopen_maps)
        pickler.dump(value)
        self.pickled = stream.getvalue()
        self.pickle_bytes = len(self.pickled)
        self._arrays = pickler.arrays
        self._start = _aligned(self.pickle_bytes)
        self.num_bytes = self._start + pickler.num_bytes

    def write(self, memory: Any) -> None:
        """Copies everything into memory of at least `num_bytes`."""
        memory[: self.pickle_bytes] = self.pickled
        for array, offset in self._arrays:
            np.ndarray(array.shape, array.dtype, memory, self._start + offset)[...] = array


def unpack(memory: Any, pickle_bytes: int) -> Any:
    """The value that `Packed.write` left in `memory`. Its arrays lie there and keep `memory` alive."""
    return _Unpickler(memory, pickle_bytes).load()


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, reopen_maps: bool) -> None:
        super().__init__(stream, protocol=5)
        self.arrays: list[tuple[npt.NDArray[Any], int]] = []  # With the offset from the first array.
        self.num_bytes = 0
        self._reopen_maps = reopen_maps
        self._keys: dict[int, Any] = {}
        self._kept: list[Any] = []  # An id is unique only while its object lives.

    def persistent_id(self, value: Any) -> Any:
        if type(value) not in (np.ndarray, np.memmap) or value.dtype.hasobject:
            return None
        if id(value) not in self._keys:  # An array that appears twice, as in (x, x), is written once.
            self._kept.append(value)
            self._keys[id(value)] = (self._reopen_maps and _file_key(value)) or self._memory_key(value)
        return self._keys[id(value)]

    def _memory_key(self, array: npt.NDArray[Any]) -> tuple[Any, ...]:
        key = (array.shape, array.dtype, self.num_bytes)
        self.arrays.append((array, self.num_bytes))
        self.num_bytes = _aligned(self.num_bytes + array.nbytes)
        return key


class _Unpickler(pickle.Unpickler):
    def __init__(self, memory: Any, pickle_bytes: int) -> None:
        super().__init__(io.BytesIO(memory[:pickle_bytes]))
        self._memory = memory
        self._start = _aligned(pickle_bytes)
        self._arrays: dict[Any, npt.NDArray[Any]] = {}

    def persistent_load(self, key: Any) -> npt.NDArray[Any]:
        if key not in self._arrays:
            shape, dtype, offset, *file = key
            if file:
                path, mode, start, num_bytes, strides = file
                mapped = np.memmap(path, np.uint8, mode, start, (num_bytes,))
                self._arrays[key] = np.ndarray(shape, dtype, mapped, offset, strides)
            else:
                self._arrays[key] = np.ndarray(shape, dtype, self._memory, self._start + offset)
        return self._arrays[key]


def _file_key(array: npt.NDArray[Any]) -> tuple[Any, ...] | None:
    """What it takes to map the same part of the same file again, if that is what the array is."""
    root: Any = array
    while isinstance(root, np.ndarray) and not isinstance(root.base, mmap.mmap):
        root = root.base
    if not isinstance(root, np.memmap) or root.filename is None or root.mode == "c":
        return None  # Changes to a map with mode "c" are in no file.
    offset = array.ctypes.data - root.ctypes.data
    file = (str(root.filename), "r" if root.mode == "r" else "r+", root.offset, root.nbytes)
    return (array.shape, array.dtype, offset, *file, array.strides)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def new_memory(num_bytes: int) -> int:
    """Takes shared memory that never has a name: when no process maps it any more, it is gone.

    Args:
        num_bytes: How much.

    Returns:
        Its file descriptor, which the caller closes.

    Raises:
        WorkerError: If there is not enough.
    """
    available = _available_bytes()
    refused: OSError | None = None
    if num_bytes <= available:
        if hasattr(os, "memfd_create"):  # Not bound by the size of /dev/shm, unlike files there.
            memory = os.memfd_create("keras_gpufeed", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                memory = os.dup(file.fileno())
        try:
            if hasattr(os, "posix_fallocate"):  # A lack of memory shows here, not as a SIGBUS on first use.
                os.posix_fallocate(memory, 0, num_bytes)
            else:
                os.ftruncate(memory, num_bytes)
            return memory
        except OSError as error:
            os.close(memory)
            refused = error
    raise WorkerError(
        f"There is too little memory: {num_bytes:,} bytes are needed, {available:,.0f} are available. "
        "Use fewer workers, a smaller prefetch or smaller batches, keep large data out of the source's "
        "attributes (open it on first use), or give the machine or container more memory."
    ) from refused


def _available_bytes() -> float:
    """What the machine has left, or the container where that is less; infinity if neither tells."""
    found = [math.inf]
    numbers = _read_numbers("/proc/meminfo")
    if "MemAvailable:" in numbers:
        found.append(numbers["MemAvailable:"] * 1024)
    for folder, limit, usage in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        numbers = _read_numbers(f"{folder}/{limit}", f"{folder}/{usage}", f"{folder}/memory.stat")
        if limit in numbers and usage in numbers:
            cached = numbers.get("inactive_file", 0) + numbers.get("active_file", 0)  # Given back on demand.
            found.append(numbers[limit] - numbers[usage] + cached)
    return min(found)


def _read_numbers(*paths: str) -> dict[str, int]:
    """The numbers of files with lines `name number ...`; one that stands alone goes by its file's name."""
    numbers = {}
    for path in paths:
        try:
            with open(path) as file:
                lines = [line.split() for line in file]
        except OSError:
            continue
        named = [words if len(words) > 1 else [os.path.basename(path), *words] for words in lines]
        numbers.update({name: int(number) for name, number, *_ in named if number.isdigit()})
    return numbers
