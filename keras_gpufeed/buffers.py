"""Host memory that TensorFlow reads without a copy, used again and again.

Flow:   ... -> exact -> [buffers] -> sources -> pipeline -> ...
Owns:   aligned arrays whose memory comes back when their tensor is gone.
Leaves: filling them (sources), handing them over (pipeline).

`tf.numpy_function` takes an array over without a copy if its address is a multiple of 64, and keeps the array
object alive as long as the tensor. NumPy's own large arrays start 16 bytes after such an address.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np

_ALIGNMENT = 64  # EIGEN_MAX_ALIGN_BYTES in TensorFlow's builds.


class BufferPool:
    """Recycles aligned arrays. As many exist as are in use at once; their sizes follow the largest batch.

    Example:
        >>> pool = BufferPool()
        >>> array = pool.empty((2, 3), np.float32)
        >>> array.shape, array.ctypes.data % 64
        ((2, 3), 0)
        >>> address = array.ctypes.data
        >>> del array
        >>> pool.empty((2, 3), np.float32).ctypes.data == address
        True
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array with undefined content.

        Args:
            shape: Its shape.
            dtype: Its dtype.

        Returns:
            A C-contiguous array at a multiple of 64 bytes.
        """
        dtype = np.dtype(dtype)
        num_bytes = math.prod(shape) * dtype.itemsize
        try:
            block = self._free.pop()
        except IndexError:  # Not asked for before: another thread may take the last.
            block = np.empty(0, np.uint8)
        if len(block) < num_bytes:  # A smaller block is given up: batches have grown.
            block = _aligned_block(num_bytes)
        # All views of the array, and no other array, have the root as their base: it lives as long as any of them.
        root = np.frombuffer(block.data, np.uint8, num_bytes) if num_bytes else np.empty(0, np.uint8)
        weakref.finalize(root, self._free.append, block).atexit = False  # type: ignore[misc]
        return root.view(dtype).reshape(shape)


def _aligned_block(num_bytes: int) -> np.ndarray:
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes]
