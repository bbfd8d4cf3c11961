"""Reads the clock inside a step.

Flow:   ... -> meter -> [stamps] -> internals -> ...
Owns:   the queues into which a monitored step puts when it began to wait for data, when it had them, and when
        each replica had its gradients.
Leaves: the places in the step (internals, exact), what it means (verdict).

A step is one compiled function, into which Python cannot see: not when devices with memory of their own have their
parts of the batch, nor when each of several replicas has its gradients. Only a step that a monitor looks at is traced
with these few operations. They are TensorFlow's own: a call into Python would queue for the interpreter's lock behind
the user's generator. One device that shares the host's memory needs none of them.
"""

from __future__ import annotations

import functools

import numpy as np
import tensorflow as tf

_CAPACITY = 1 << 20  # Steps. A monitor empties the queues every thousand; without one, no step fills them.
_HOST = "/device:CPU:0"


class StepStamps:
    """The clock's readings of steps that nobody has read yet, in seconds since 1970 (`time.time`).

    Args:
        num_replicas: How many replicas a step has.
    """

    def __init__(self, num_replicas: int) -> None:
        with tf.init_scope(), tf.device(_HOST):
            self._waits = tf.queue.FIFOQueue(_CAPACITY, [tf.float64, tf.float64], [(), ()])
            self._ends = tf.queue.FIFOQueue(_CAPACITY, [tf.float64], [(num_replicas,)])

    def note_wait(self, began: tf.Tensor, fed: list) -> tf.Tensor:
        """Notes when a step has its data.

        Args:
            began: When it began to wait.
            fed: Its data.

        Returns:
            The clock's reading.
        """
        with tf.device(_HOST):
            with tf.control_dependencies(fed if not tf.executing_eagerly() else []):
                now = tf.timestamp()
            self._waits.enqueue((began, now))
        return now

    def note_ends(self, ends: list) -> None:
        """Notes when each replica had its gradients."""
        with tf.device(_HOST):
            self._ends.enqueue((tf.stack(ends),))

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """The steps since the last time.

        Returns:
            An array (step, 2) of when each began to wait and when it had its data, and an array (step, replica) of
            when the gradients were there; each is empty where that was not seen.
        """
        began, had = self._waits.dequeue_many(self._waits.size())
        ends = self._ends.dequeue_many(self._ends.size())
        return np.stack([began.numpy(), had.numpy()], axis=1), ends.numpy()


@functools.cache
def step_stamps(num_replicas: int) -> StepStamps:
    """The queues of this process for steps on so many replicas."""
    return StepStamps(num_replicas)
