"""Cuts a global batch for the replicas, in TensorFlow.

Flow:   errors -> plan -> order -> [splitting] -> internals -> ...
Owns:   slices of dense, sparse and ragged tensors; the form in which Keras takes a batch.
Leaves: where to cut (plan), when and on which device (internals, pipeline).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def part_of(data: tuple, parts: tf.Tensor, replica: Any) -> Any:
    """The samples of one replica, as Keras takes them.

    Args:
        data: The global batch: `(x,)`, `(x, y)` or `(x, y, sample_weight)`.
        parts: Start and stop of each replica's samples, of shape `(num_replicas, 2)`.
        replica: Which replica.
    """
    start, stop = parts[replica, 0], parts[replica, 1]
    return as_keras_does(tf.nest.map_structure(lambda component: _slice(component, start, stop), data))


def as_keras_does(data: tuple) -> Any:
    """A lone input goes to `train_step` by itself, unless it is a tuple: there it could be taken for (x, y)."""
    return data[0] if len(data) == 1 and not isinstance(data[0], tuple) else data


def _slice(component: Any, start: tf.Tensor, stop: tf.Tensor) -> Any:
    if not isinstance(component, tf.SparseTensor):
        return component[start:stop]  # Shares the memory of the batch where its address is aligned.
    sizes = component.shape[1:].as_list()  # Layers want to know them while they are traced.
    part = tf.sparse.slice(component, [start, *[0] * len(sizes)], [stop - start, *sizes])
    return tf.SparseTensor(part.indices, part.values, tf.stack([stop - start, *sizes]))
