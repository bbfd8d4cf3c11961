"""Reads the clock inside a step.

Flow:   ... -> meter -> [stamps] -> internals -> ...
Owns:   the table into which a monitored step writes when it began to wait for data, when it had them, and when
        each replica had its gradients.
Leaves: the places in the step (internals, exact), what it means (verdict).

A step is one compiled function, so Python cannot see it wait. Only a step that a monitor looks at is traced with
these few operations. They are TensorFlow's own: a call into Python would queue for the interpreter's lock behind
the user's generator. The table is one for the process, because a strategy's scope would mirror one made inside it.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import tensorflow as tf

NUM_ROWS = 4096  # Steps that are kept.
MAX_REPLICAS = 64
_HOST = "/device:CPU:0"


class StepStamps:
    """The clock's readings of the last steps, in seconds since 1970 (`time.time`)."""

    def __init__(self) -> None:
        with tf.device(_HOST):
            self._num_steps = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._waits = tf.Variable(tf.zeros((NUM_ROWS, 2), tf.float64), trainable=False)
            self._ends = tf.Variable(tf.zeros((NUM_ROWS, MAX_REPLICAS), tf.float64), trainable=False)

    def note_wait(self, began: tf.Tensor, fed: list) -> tuple[tf.Tensor, tf.Tensor]:
        """Notes when a step has its data.

        Args:
            began: When it began to wait.
            fed: Its data.

        Returns:
            The row of this step, and the clock's reading.
        """
        with tf.device(_HOST):
            with tf.control_dependencies(fed if not tf.executing_eagerly() else []):
                now = tf.timestamp()
            row = (self._num_steps.assign_add(1) - 1) % NUM_ROWS
            self._waits.scatter_nd_update([[row]], [tf.stack([began, now])])
        return row, now

    def note_ends(self, row: tf.Tensor, ends: list) -> None:
        """Notes when each replica had its gradients."""
        with tf.device(_HOST):
            padding = [tf.zeros((), tf.float64)] * (MAX_REPLICAS - len(ends))
            self._ends.scatter_nd_update([[row]], [tf.stack([*ends, *padding])])

    def num_steps(self) -> int:
        """Steps so far, of all monitored runs of the process."""
        return int(self._num_steps.numpy())

    def read(self, first_step: int, num_replicas: int) -> tuple[int, np.ndarray, np.ndarray]:
        """The steps since `first_step`, as far as they are kept.

        Args:
            first_step: Step of the process, from 0.
            num_replicas: How many ends a step has.

        Returns:
            The number of the first step that is there, an array (step, 2) of when it began to wait and when it
            had its data, and an array (step, replica) of when the gradients were there; if that was not seen, of an
            earlier time.
        """
        stop = self.num_steps()
        first_step = max(first_step, stop - NUM_ROWS)
        rows = np.arange(first_step, stop) % NUM_ROWS
        return first_step, self._waits.numpy()[rows], self._ends.numpy()[rows, :num_replicas]


@functools.cache
def step_stamps() -> StepStamps:
    """The table of this process."""
    made: list[Any] = []
    # Another thread has no strategy scope, in which the table would be mirrored.
    thread = threading.Thread(target=lambda: made.append(StepStamps()))
    thread.start()
    thread.join()
    return made[0]
