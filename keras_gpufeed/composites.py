"""Arrays that are no plain array: sparse, ragged, and samples of unequal length that are padded.

Flow:   ... -> workers -> [composites] -> sources -> batch_sources -> ...
Owns:   taking samples out of such arrays; such arrays as parts of a generator's batch.
Leaves: recognising arrays (sources), putting tensors together and cutting them (pipeline).

`read` gives a tuple of arrays, the components of a `tf.SparseTensor` or `tf.RaggedTensor` in the order of
`tf.nest.flatten(..., expand_composites=True)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf


class SparseComponent:
    """A sparse array: where each sample's entries begin, their places within the sample, their values.

    Args:
        starts: Of shape `(num_samples + 1,)`: the first entry of each sample, then the number of entries.
        places: Of shape `(entries, rank - 1)`: indices of each entry along all axes but the first.
        values: Of shape `(entries,)`.
        shape: The shape of the whole.
        dtype: What values are fed as.
    """

    sample_bytes = None

    def __init__(self, starts: Any, places: np.ndarray, values: np.ndarray, shape: Any, dtype: Any) -> None:
        self._starts, self._places, self._values, self._dtype = starts, places, values, dtype
        self._sample_shape = tuple(int(size) for size in shape[1:])
        self.num_samples = int(shape[0])
        self.spec = tf.SparseTensorSpec((None, *self._sample_shape), tf.as_dtype(dtype))

    def read(self, samples: Any) -> tuple[np.ndarray, ...]:
        """The components of a batch: indices, values, dense shape."""
        samples = _numbers(samples)
        entries, lengths = _entries_of(samples, self._starts)
        rows = np.repeat(np.arange(len(samples)), lengths)
        indices = np.column_stack([rows, self._places[entries]]).astype(np.int64)
        dense_shape = np.array([len(samples), *self._sample_shape], np.int64)
        return indices, self._values[entries].astype(self._dtype), dense_shape


class RaggedComponent:
    """A ragged array.

    Args:
        row_splits: For each ragged axis, where its rows begin and end.
        values: The innermost values.
        spec: The type of the whole, which may have any number of samples.
    """

    sample_bytes = None

    def __init__(self, row_splits: list[np.ndarray], values: np.ndarray, spec: tf.RaggedTensorSpec) -> None:
        self._row_splits, self._values, self.spec = row_splits, values, spec
        self.num_samples = len(row_splits[0]) - 1

    def read(self, samples: Any) -> tuple[np.ndarray, ...]:
        """The components of a batch: the innermost values, then the row splits."""
        entries, splits = _numbers(samples), []
        for starts in self._row_splits:
            entries, lengths = _entries_of(entries, starts)
            splits.append(np.concatenate([[0], np.cumsum(lengths)]).astype(starts.dtype))
        return self._values[entries], *splits


def make_sparse_component(value: Any, floating: Any) -> SparseComponent:
    """The component for a SciPy matrix or a `tf.SparseTensor`.

    Args:
        value: The sparse array. A SciPy matrix that is not in row format is converted once.
        floating: The dtype that floating-point values are fed as.
    """
    if isinstance(value, tf.SparseTensor):
        value = tf.sparse.reorder(value)
        indices, values, shape = value.indices.numpy(), value.values.numpy(), value.dense_shape.numpy()
        starts, places = np.searchsorted(indices[:, 0], np.arange(shape[0] + 1)), indices[:, 1:]
    else:
        rows = value.tocsr()
        rows.sort_indices()
        starts, places, values, shape = rows.indptr, rows.indices[:, None], rows.data, rows.shape
    return SparseComponent(starts, places, values, shape, floating if values.dtype.kind == "f" else values.dtype)


def make_ragged_component(value: tf.RaggedTensor) -> RaggedComponent:
    """The component for a `tf.RaggedTensor`.

    Args:
        value: The ragged array.
    """
    splits = [row_splits.numpy() for row_splits in value.nested_row_splits]
    return RaggedComponent(splits, value.flat_values.numpy(), spec_of_tensor(value))


class PaddedComponent:
    """Samples of unequal length, filled up with one value to the longest of each batch.

    Args:
        samples: Sequences, each of shape `(length, ...)`, alike but for the length.
        padding_value: What to fill up with.
        dtype: Takes the dtype of the samples and gives that of the batch.
    """

    sample_bytes = None

    def __init__(self, samples: list, padding_value: float, dtype: Callable[[np.dtype], np.dtype]) -> None:
        try:
            arrays = [np.asarray(sample) for sample in samples]
        except ValueError:
            raise ValueError("they hold sequences of unequal length themselves") from None
        shapes = {array.shape[1:] if array.ndim else None for array in arrays if array.size}
        if len(shapes) > 1 or None in shapes:
            raise ValueError(f"beyond their length, samples differ too: {sorted(map(str, shapes))}")
        sample_shape: Any = next(iter(shapes), ())
        # Empty ones have no dtype of their own; NumPy takes them for float64.
        filled = [array for array in arrays if array.size] or arrays
        self._values = np.concatenate([array.reshape(-1, *sample_shape) for array in filled])
        if self._values.dtype.kind not in "biuf":
            raise ValueError(f"samples of dtype {self._values.dtype} cannot be padded")
        self._starts = np.cumsum([0, *map(len, arrays)])
        self._padding_value, self._dtype = padding_value, np.dtype(dtype(self._values.dtype))
        if self._dtype.kind in "biu" and padding_value != self._dtype.type(padding_value):
            raise ValueError(f"{padding_value!r} is no value of dtype {self._dtype}")
        self.num_samples = len(arrays)
        self.spec = tf.TensorSpec((None, None, *sample_shape), tf.as_dtype(self._dtype))

    def read(self, samples: Any) -> np.ndarray:
        """The batch, of shape `(batch, longest, ...)`."""
        entries, lengths = _entries_of(_numbers(samples), self._starts)
        places = np.arange(lengths.max(initial=0))
        shape: Any = (len(lengths), len(places), *self._values.shape[1:])
        batch = np.full(shape, self._padding_value, self._dtype)
        batch[places < lengths[:, None]] = self._values[entries]
        return batch


def are_sequences(array: np.ndarray) -> bool:
    """True for an array of objects that are sequences: samples of unequal length."""
    return (
        array.dtype.kind == "O" and array.ndim == 1 and any(isinstance(one, (list, tuple, np.ndarray)) for one in array)
    )


def is_composite(value: Any) -> bool:
    """True for a sparse or ragged array of SciPy or TensorFlow."""
    return isinstance(value, (tf.SparseTensor, tf.RaggedTensor)) or hasattr(value, "tocsr")


def as_tensor(value: Any, floating: Any) -> Any:
    """A sparse or ragged array as a tensor.

    Args:
        value: The array.
        floating: The dtype that floating-point values are fed as.
    """
    if hasattr(value, "tocsr"):
        rows = value.tocsr()
        rows.sort_indices()
        indices = np.column_stack([np.repeat(np.arange(rows.shape[0]), np.diff(rows.indptr)), rows.indices])
        value = tf.SparseTensor(indices.astype(np.int64), rows.data, rows.shape)
    return tf.cast(value, floating) if value.dtype.is_floating else value


def spec_of_tensor(tensor: Any) -> Any:
    """The type of a sparse or ragged tensor with any number of samples."""
    shape = [None, *tensor.shape[1:]]
    if isinstance(tensor, tf.SparseTensor):
        return tf.SparseTensorSpec(shape, tensor.dtype)
    return tf.RaggedTensorSpec(shape, tensor.dtype, tensor.ragged_rank, tensor.row_splits.dtype)


def arrays_of_tensor(tensor: Any) -> list[np.ndarray]:
    """The components of a sparse or ragged tensor."""
    return [component.numpy() for component in tf.nest.flatten(tensor, expand_composites=True)]


def num_samples_of(value: Any) -> int:
    """Samples of a sparse or ragged tensor."""
    return int(value.nrows()) if isinstance(value, tf.RaggedTensor) else int(value.shape[0])


def concatenate(parts: Sequence) -> Any:
    """Several sparse or ragged tensors, one after the other along the first axis."""
    parts = list(parts)
    return tf.sparse.concat(0, parts) if isinstance(parts[0], tf.SparseTensor) else tf.concat(parts, axis=0)


def expand(sample: Any) -> Any:
    """One sample as a batch of one."""
    return tf.sparse.expand_dims(sample, 0) if isinstance(sample, tf.SparseTensor) else sample[None]


def take(value: Any, start: int, stop: int) -> Any:
    """The samples `start` to `stop` of an array or tensor."""
    if not isinstance(value, tf.SparseTensor):
        return value[start:stop]
    shape = value.shape.as_list()
    others = tuple(shape[1:])
    return tf.sparse.slice(value, (start, *[0] * len(others)), (min(stop, shape[0]) - start, *others))


def _numbers(samples: Any) -> np.ndarray:
    return np.arange(samples.start, samples.stop) if isinstance(samples, slice) else samples


def _entries_of(rows: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The entries of rows, row after row, and how many each has."""
    lengths = starts[rows + 1] - starts[rows]
    first_of_row = np.cumsum(lengths) - lengths
    within = np.arange(lengths.sum()) - np.repeat(first_of_row, lengths)
    return np.repeat(starts[rows], lengths) + within, lengths
