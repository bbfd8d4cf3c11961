"""Turns what the user hands over into samples that can be read by number.

Flow:   ... -> buffers -> [sources] -> pipeline -> feeder -> ...
Owns:   checking and reading arrays of every kind.
Leaves: which samples make a batch (plan, order), bringing them into TensorFlow (pipeline).

A source offers `num_samples`, `element_spec` (the type of a batch), `sample_bytes` and `read(samples)`, which
gives one array for each component of a batch. To add a kind of array, add a class with the same attributes as
`_ArrayComponent` and let `_make_component` choose it.
"""

from __future__ import annotations

import collections
import functools
import math
import os
from typing import Any

import numpy as np
import tensorflow as tf

from .buffers import BufferPool
from .composites import PaddedComponent, are_sequences, make_ragged_component, make_sparse_component
from .errors import SourceError
from .items import array_of_objects

_CACHED_BYTES = 1 << 18  # Small enough for the second-level cache of a core.

Samples = Any  # A slice with start and stop, or an int64 array of sample numbers.


class ArraySource:
    """Arrays of equally many samples, nested as the model takes them.

    Args:
        x: Inputs: an array, or tuples, lists and dicts of arrays.
        y: Targets, likewise, or None.
        sample_weight: Weights of samples or time steps, likewise, or None.
        padding_value: Fills up samples of unequal length to the longest of a batch; None refuses them.

    Raises:
        SourceError: If the arrays do not fit each other or cannot be fed.
    """

    def __init__(self, x: Any, y: Any = None, sample_weight: Any = None, padding_value: float | None = None) -> None:
        if x is None or isinstance(x, (str, bytes, os.PathLike)):
            raise SourceError(
                f"x must be arrays, a generator or another source. Received {x!r}. "
                "To feed a file, open it with np.load(mmap_mode='r'), pandas, h5py or tf.data first."
            )
        if isinstance(sample_weight, int):
            raise SourceError(
                f"sample_weight must be an array. Received {sample_weight!r}. If that is the batch size, write "
                f"batch_size={sample_weight}."
            )
        named = {"x": x, "y": y, "sample_weight": sample_weight}
        while len(named) > 1 and named[list(named)[-1]] is None:
            named.popitem()
        if named.get("y", x) is None:
            raise SourceError("sample_weight was given without y. Pass the targets as y as well.")
        structure = tuple(_to_structure(value, name) for name, value in named.items())
        leaves = tf.nest.flatten(structure)
        names = [_readable_path(path) for path in _paths(structure)]
        missing = [name for name, leaf in zip(names, leaves) if leaf is None]
        if any(not name.startswith("sample_weight") for name in missing):
            raise SourceError(f"Every input and target must be an array. Received None for {missing[0]}.")
        components = [
            None if leaf is None else _make_component(leaf, name, padding_value) for leaf, name in zip(leaves, names)
        ]
        lengths = {name: component.num_samples for name, component in zip(names, components) if component is not None}
        if len(set(lengths.values())) > 1:
            raise SourceError(
                "All arrays must have the same number of samples along their first axis. Received "
                f"{', '.join(f'{name}: {length}' for name, length in lengths.items())}. "
                "Check that inputs and targets were filtered in the same way."
            )
        self.num_samples: int = next(iter(lengths.values()))
        if self.num_samples == 0:
            raise SourceError(
                "There is nothing to feed: the arrays hold 0 samples. "
                "Check the path, filter or slice that they came from."
            )
        # Keras weighs an output whose sample weight is None by 1; a broadcast 1 costs no memory.
        ones = np.broadcast_to(np.ones((), tf.keras.backend.floatx()), (self.num_samples,))
        self._components = [component or _ArrayComponent(ones) for component in components]
        self.element_spec = tf.nest.pack_sequence_as(structure, [component.spec for component in self._components])

    @property
    def sample_bytes(self) -> int | None:
        """Bytes of one sample as it is fed; None if there are strings."""
        sizes: list = [component.sample_bytes for component in self._components]
        return None if None in sizes else sum(sizes)

    @functools.cached_property
    def is_in_memory(self) -> bool:
        """True if all arrays lie in memory, so that reading them is copying."""
        return not any(
            isinstance(component, _ArrayLikeComponent) or isinstance(getattr(component, "_array", None), np.memmap)
            for component in self._components
        )

    def read(self, samples: Samples) -> list[np.ndarray]:
        """The components of one batch.

        Args:
            samples: Which samples, in which order.

        Returns:
            The arrays of the batch in the order of `tf.nest.flatten(..., expand_composites=True)`: one of shape
            `(batch, ...)` for a dense component, several for a sparse or ragged one.
        """
        arrays: list[np.ndarray] = []
        for component in self._components:
            read = component.read(samples)
            arrays.extend(read if isinstance(read, tuple) else [read])
        return arrays


class SampleRange:
    """Some consecutive samples of a source, as a source.

    Args:
        source: Any index-addressed source.
        start: Its first sample here.
        stop: One past the last.
    """

    def __init__(self, source: Any, start: int, stop: int) -> None:
        self._source, self._start = source, start
        self.num_samples = stop - start
        self.element_spec, self.sample_bytes = source.element_spec, source.sample_bytes
        self.is_in_memory = source.is_in_memory

    def read(self, samples: Samples) -> list[np.ndarray]:
        """The components of one batch."""
        if isinstance(samples, slice):
            return self._source.read(slice(samples.start + self._start, samples.stop + self._start))
        return self._source.read(samples + self._start)


class EveryNthSample:
    """Every n-th sample of a source, as a source.

    Args:
        source: Any index-addressed source.
        first: Its first sample here.
        stride: How far it is from one sample to the next.
    """

    def __init__(self, source: Any, first: int, stride: int) -> None:
        self._source, self._first, self._stride = source, first, stride
        self.num_samples = len(range(first, source.num_samples, stride))
        self.element_spec, self.sample_bytes = source.element_spec, source.sample_bytes
        self.is_in_memory = source.is_in_memory

    def read(self, samples: Samples) -> list[np.ndarray]:
        """The components of one batch."""
        if isinstance(samples, slice):
            samples = np.arange(samples.start, samples.stop)
        return self._source.read(samples * self._stride + self._first)


class _ArrayComponent:
    """A NumPy array of numbers; memory maps included."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self._pool = BufferPool()
        self._dtype = fed_dtype(array.dtype)
        self._needs_cast = array.dtype != self._dtype
        self.num_samples = len(array)
        self.spec = tf.TensorSpec((None, *array.shape[1:]), tf.as_dtype(self._dtype))
        self.sample_bytes: int | None = math.prod(array.shape[1:]) * self._dtype.itemsize

    def read(self, samples: Samples) -> np.ndarray:
        if isinstance(samples, slice):
            batch_size = samples.stop - samples.start
        else:
            batch_size = len(samples)
        out = self._pool.empty((batch_size, *self._array.shape[1:]), self._dtype)
        if isinstance(samples, slice) or not self._array.flags.c_contiguous:
            np.copyto(out, self._array[samples], casting="same_kind")
        elif self._needs_cast:
            self._take_and_cast(samples, out)
        else:
            # The fastest way from scattered samples to a buffer, but it neither casts nor strides. With
            # mode="raise" NumPy fills a second buffer first, in case a number is out of range.
            np.take(self._array, samples, axis=0, out=out, mode="clip")
        return out

    def _take_and_cast(self, samples: np.ndarray, out: np.ndarray) -> None:
        """Some samples at a time, so that they are cast while the processor's cache still holds them."""
        num_at_once = max(1, _CACHED_BYTES // max(1, self._array.strides[0]))
        taken = np.empty((min(num_at_once, len(samples)), *self._array.shape[1:]), self._array.dtype)
        for start in range(0, len(samples), num_at_once):
            some = samples[start : start + num_at_once]
            np.take(self._array, some, axis=0, out=taken[: len(some)], mode="clip")
            np.copyto(out[start : start + len(some)], taken[: len(some)], casting="same_kind")


class _StringComponent:
    """An array of strings, bytes or Python objects that are either."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.num_samples = len(array)
        self.spec = tf.TensorSpec((None, *array.shape[1:]), tf.string)
        self.sample_bytes: int | None = None

    def read(self, samples: Samples) -> np.ndarray:
        return encode_strings(self._array[samples])


class _FrameComponent:
    """A pandas DataFrame whose columns do not lie in one array; converted batch by batch."""

    def __init__(self, frame: Any, dtype: np.dtype) -> None:
        self._frame = frame
        self._dtype = fed_dtype(dtype)
        self._pool = BufferPool()
        self.num_samples = len(frame)
        self.spec = tf.TensorSpec((None, frame.shape[1]), tf.as_dtype(self._dtype))
        self.sample_bytes: int | None = frame.shape[1] * self._dtype.itemsize

    def read(self, samples: Samples) -> np.ndarray:
        batch = self._frame.iloc[samples]
        out = self._pool.empty(batch.shape, self._dtype)
        for place in range(batch.shape[1]):
            out[:, place] = batch.iloc[:, place].to_numpy()
        return out


class _ArrayLikeComponent:
    """Anything with shape, dtype, length and indexing, such as an HDF5 data set; never read whole."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self._dtype = fed_dtype(np.dtype(array.dtype))
        self._holds_strings = self._dtype.kind in "SUO"
        self._pool = BufferPool()
        self.num_samples = len(array)
        dtype = tf.string if self._holds_strings else tf.as_dtype(self._dtype)
        self.spec = tf.TensorSpec((None, *array.shape[1:]), dtype)
        sample_bytes = math.prod(array.shape[1:]) * self._dtype.itemsize
        self.sample_bytes: int | None = None if self._holds_strings else sample_bytes

    def read(self, samples: Samples) -> np.ndarray:
        if isinstance(samples, slice):
            order: Any = slice(None)
            batch = np.asarray(self._array[samples])
        else:
            # HDF5 wants increasing numbers, and every file is read faster in its own order.
            order = np.argsort(samples)
            batch = np.asarray(self._array[samples[order]])
        if self._holds_strings:
            batch = encode_strings(batch)
            out = np.empty(batch.shape, object)
        else:
            out = self._pool.empty(batch.shape, self._dtype)
        out[order] = batch
        return out


def _make_component(value: Any, name: str, padding_value: float | None) -> Any:
    received, kind = value, type(value).__module__.partition(".")[0]
    if isinstance(value, tf.SparseTensor) or hasattr(value, "tocsr"):
        return make_sparse_component(value, tf.keras.backend.floatx())
    if isinstance(value, tf.RaggedTensor):
        return make_ragged_component(value)
    if isinstance(value, (tf.Tensor, tf.Variable)):
        value = _view_of_tensor(value)
    elif kind == "pandas" and hasattr(value, "columns"):
        return _make_frame_component(value, name)
    elif kind == "pandas":
        value = np.expand_dims(value.to_numpy(), -1)  # (n, 1), as Keras does.
    if not isinstance(value, np.ndarray):
        if all(hasattr(value, attribute) for attribute in ("shape", "dtype", "__getitem__", "__len__")):
            _check_array(value, name, value)
            return _ArrayLikeComponent(value)
        value = to_array(value)
    if are_sequences(value):
        return make_padded_component(value, name, padding_value)
    _check_array(value, name, received)
    if value.dtype.kind in "SUO":
        _check_strings(value, name)
        return _StringComponent(value)
    return _ArrayComponent(value)


def _view_of_tensor(tensor: Any) -> np.ndarray:
    tensor = tf.convert_to_tensor(tensor)
    try:
        return np.asarray(memoryview(tensor))  # `numpy()` copies.
    except (BufferError, TypeError, ValueError):  # Strings, bfloat16: no NumPy memory to look at.
        return tensor.numpy()


def _make_frame_component(frame: Any, name: str) -> Any:
    first = frame.iloc[:1].to_numpy()  # What the columns have in common; the whole might be a copy.
    columns = [frame.iloc[:1, place].to_numpy().dtype for place in range(frame.shape[1])]
    if first.dtype.kind == "O" and all(dtype.kind in "biuf" for dtype in columns):
        return _FrameComponent(frame, np.result_type(*columns))  # Truth values beside numbers.
    _check_array(first, name, frame)
    if first.dtype.kind in "SUO":
        array = frame.to_numpy()
        _check_strings(array, name)
        return _StringComponent(array)
    if len(set(frame.dtypes)) == 1:
        array = frame.to_numpy()
        if np.shares_memory(array, frame.iloc[:, 0].to_numpy()):
            return _ArrayComponent(array)
    return _FrameComponent(frame, first.dtype)


def make_padded_component(array: np.ndarray, name: str, padding_value: float | None) -> PaddedComponent:
    """The component for samples of unequal length.

    Args:
        array: The samples, as an array of objects.
        name: What to call it in messages.
        padding_value: What to fill up with; None refuses.
    """
    if padding_value is None:
        raise SourceError(
            f"{name} holds samples of unequal length, which make no array. Pass padding_value=0 to the feeder, "
            "which fills each batch up to its longest sample; or give tf.ragged.constant of them, for a model "
            "that takes ragged tensors."
        )
    try:
        return PaddedComponent(list(array), padding_value, fed_dtype)
    except ValueError as error:
        raise SourceError(
            f"{name} holds samples that padding_value={padding_value} cannot make equal: {error}. Only the length, "
            "the first axis of a sample, may differ; give tf.ragged.constant of anything else."
        ) from None


def to_array(value: Any) -> np.ndarray:
    """An array of what is given; samples of unequal length become an array of objects."""
    try:
        return np.asarray(value)
    except ValueError:
        return array_of_objects(value)


def _check_array(array: Any, name: str, received: Any) -> None:
    if len(array.shape) == 0:
        raise SourceError(
            f"{name} has no axis of samples: its shape is (), and it is a {type(received).__name__}. "
            "Pass an array of shape (num_samples, ...)."
        )
    if np.dtype(array.dtype).kind not in "biufcSUO" and array.dtype != tf.bfloat16.as_numpy_dtype:
        raise SourceError(
            f"{name} has dtype {array.dtype}, which cannot be fed. Convert it to numbers or strings first."
        )


def _check_strings(array: np.ndarray, name: str) -> None:
    if array.dtype.kind != "O":
        return
    for place, item in enumerate(array.flat):
        if not isinstance(item, (str, bytes)):
            raise SourceError(
                f"{name} has dtype object, and an element that is no string: number {place} is a "
                f"{type(item).__name__}. Numbers need a numeric dtype ({name}.astype('float32')); "
                "missing values must be filled."
            )


def encode_strings(array: np.ndarray) -> np.ndarray:
    """Strings as the bytes that TensorFlow takes them for: UTF-8."""
    encoded = np.empty(array.size, object)
    for place, text in enumerate(array.flat):
        encoded[place] = text.encode("utf-8") if isinstance(text, str) else bytes(text)
    return encoded.reshape(array.shape)


def fed_dtype(dtype: np.dtype) -> np.dtype:
    """Floating-point numbers become Keras's floatx, as in `fit`; everything else stays."""
    if dtype.kind == "f":
        return np.dtype(tf.keras.backend.floatx())
    return dtype.newbyteorder("=")


def as_batch_structure(batch: Any) -> tuple:
    """What a generator yielded, as `(x,)`, `(x, y)` or `(x, y, sample_weight)`; Keras's rule."""
    parts = tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)
    if isinstance(batch, list) and _is_numbers(batch):
        parts = (batch,)
    if len(parts) > 3:
        raise SourceError(
            f"A batch is a tuple of {len(parts)} parts. It must be x, (x,), (x, y) or (x, y, sample_weight); "
            "several inputs go into a tuple or dict of their own."
        )
    while len(parts) > 1 and parts[-1] is None:
        parts = parts[:-1]
    structure = tuple(_to_structure(part, name) for part, name in zip(parts, ("x", "y", "sample_weight")))
    if any(part is None for part in tf.nest.flatten(structure)):
        raise SourceError(
            "A batch is None, or holds None where an array of samples is expected. Every batch must be x, (x,), (x, y) "
            "or (x, y, sample_weight); a generator ends with `return`, not with `yield None`."
        )
    return structure


def _to_structure(value: Any, name: str) -> Any:
    """Lists become tuples, as tf.data has no lists; lists of numbers become arrays."""
    if isinstance(value, list) and _is_numbers(value):
        return to_array(value)
    if isinstance(value, (dict, list, tuple)) and not value:
        raise SourceError(f"{name} is an empty {type(value).__name__}; it must hold at least one array.")
    if isinstance(value, dict):
        kind = type(value) if type(value) in (dict, collections.OrderedDict) else dict
        return kind((key, _to_structure(item, f"{name}[{key!r}]")) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        items = [_to_structure(item, f"{name}[{place}]") for place, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def _is_numbers(value: Any) -> bool:
    """True for a list of numbers or strings, or of such lists: data, not structure."""
    if isinstance(value, list):
        return bool(value) and all(_is_numbers(item) for item in value)
    return isinstance(value, (int, float, complex, str, bytes, np.generic))


def _paths(structure: tuple) -> list[tuple]:
    """Where each leaf stands, in the order of `tf.nest.flatten`."""

    def walk(value: Any, path: tuple) -> list[tuple]:
        if isinstance(value, dict):
            return [found for key in sorted(value) for found in walk(value[key], (*path, key))]
        if isinstance(value, tuple):
            return [found for place, item in enumerate(value) for found in walk(item, (*path, place))]
        return [path]

    return walk(structure, ())


def _readable_path(path: tuple) -> str:
    first, *rest = path
    return ("x", "y", "sample_weight")[first] + "".join(f"[{key!r}]" for key in rest)
