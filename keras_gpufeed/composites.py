"""Sparse and ragged arrays, read by sample.

Flow:   ... -> workers -> [composites] -> sources -> batch_sources -> ...
Owns:   taking samples out of sparse and ragged arrays.
Leaves: recognising them (sources), putting tensors together and cutting them (pipeline).

`read` gives a tuple of arrays, the components of a `tf.SparseTensor` or `tf.RaggedTensor` in the order of
`tf.nest.flatten(..., expand_composites=True)`.
"""

from __future__ import annotations

from typing import Any

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
    shape = [None, *value.shape[1:]]
    spec = tf.RaggedTensorSpec(shape, value.dtype, value.ragged_rank, value.row_splits.dtype)
    return RaggedComponent([splits.numpy() for splits in value.nested_row_splits], value.flat_values.numpy(), spec)


def _numbers(samples: Any) -> np.ndarray:
    return np.arange(samples.start, samples.stop) if isinstance(samples, slice) else samples


def _entries_of(rows: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The entries of rows, row after row, and how many each has."""
    lengths = starts[rows + 1] - starts[rows]
    first_of_row = np.cumsum(lengths) - lengths
    within = np.arange(lengths.sum()) - np.repeat(first_of_row, lengths)
    return np.repeat(starts[rows], lengths) + within, lengths
