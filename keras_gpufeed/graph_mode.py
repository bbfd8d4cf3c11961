"""A feed for graphs and sessions: `tf.compat.v1` code with towers, placeholders and queues.

Flow:   ... -> loops -> [graph_mode] -> feeder -> ...
Owns:   turning the parts of a step into `feed_dict`s; the threads that fill a queue.
Leaves: which samples make a step and a part (loops), the user's graph.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from .errors import SourceError
from .plan import Split


def check_towers(towers: Any, shares: Any) -> None:
    """Refuses towers that are no list of tensors, and shares that do not belong to them.

    Args:
        towers: For each tower its tensors.
        shares: For each tower the tensor of its share, or None.
    """
    if not isinstance(towers, (list, tuple)) or not towers:
        raise SourceError(
            "feed_dicts takes a list with the tensors of each tower, such as [(images_0, labels_0), "
            f"(images_1, labels_1)]. Received {type(towers).__name__}."
        )
    if shares is not None and len(shares) != len(towers):
        raise SourceError(f"shares must be one tensor for each of the {len(towers)} towers. Received {len(shares)}.")


def feed_dicts(
    steps: Iterable[tuple[Split, list]], towers: Sequence[Any], shares: Sequence[Any] | None
) -> Iterator[dict]:
    """One `feed_dict` for each step.

    Args:
        steps: How each step is split, and the part of each replica.
        towers: For each tower its tensors, in the structure of a part.
        shares: For each tower the tensor of its share, or None.
    """
    for split, parts in steps:
        feed_dict: dict = {}
        for tower, (tensors, part) in enumerate(zip(towers, parts)):
            part = part if isinstance(tensors, tuple) else part[0]
            try:
                tf.nest.assert_same_structure(tensors, part)
            except (TypeError, ValueError):
                raise SourceError(
                    f"The tensors of tower {tower} do not have the structure of what is fed: received "
                    f"{tf.nest.map_structure(lambda tensor: tensor.name, tensors)} for "
                    f"{tf.nest.map_structure(lambda array: f'{array.dtype}{array.shape}', part)}. Name one tensor for "
                    "each array."
                ) from None
            # A tensor may be no placeholder: whatever the graph computes there is replaced by what is fed.
            feed_dict.update((key, array) for key, array in zip(tf.nest.flatten(tensors), tf.nest.flatten(part)))
        if shares is not None:
            feed_dict.update(zip(shares, split.shares))
        yield feed_dict


class QueueFiller:
    """Threads that fill a TensorFlow queue until the data or the coordinator ends.

    Args:
        queue: A queue of `tf.compat.v1`, such as a `FIFOQueue`; its components are those of a batch, flat.
        batches: What to put in: structures of arrays.
        session: Runs the graph of the queue.
        coordinator: Ends the threads, waits for them, and gets their errors.
        whole_batches: Whether an element of the queue is a batch, not a sample.
    """

    def __init__(
        self,
        queue: Any,
        batches: Iterator,
        session: tf.compat.v1.Session,
        coordinator: tf.train.Coordinator,
        whole_batches: bool,
    ) -> None:
        self._batches, self._session, self._coordinator = batches, session, coordinator
        with queue.queue_ref.graph.as_default():
            self._placeholders = [tf.compat.v1.placeholder(dtype) for dtype in queue.dtypes]
            self._enqueue = (queue.enqueue if whole_batches else queue.enqueue_many)(self._placeholders)
            self._close = queue.close()
            self._cancel = queue.close(cancel_pending_enqueues=True)
        self._ended = threading.Event()

    def start(self) -> list[threading.Thread]:
        """Starts the threads; the coordinator's `join` waits for them."""
        threads = [
            threading.Thread(target=self._fill, name="keras_gpufeed queue filler", daemon=True),
            threading.Thread(target=self._watch, name="keras_gpufeed queue watch", daemon=True),
        ]
        for thread in threads:
            self._coordinator.register_thread(thread)
            thread.start()
        return threads

    def _fill(self) -> None:
        try:
            for batch in self._batches:
                if self._coordinator.should_stop():
                    break
                arrays = tf.nest.flatten(batch)
                self._session.run(self._enqueue, dict(zip(self._placeholders, arrays)))
            self._session.run(self._close)  # What dequeues takes what is left, and then sees the end.
        except Exception as error:
            # A queue that was closed on purpose, or a session that is gone, is no failure.
            if not self._coordinator.should_stop() and not isinstance(error, tf.errors.CancelledError):
                self._coordinator.request_stop(error)
        finally:
            self._ended.set()
            if hasattr(self._batches, "close"):
                self._batches.close()

    def _watch(self) -> None:
        """Frees the filling thread from a full queue when the coordinator ends."""
        while not self._ended.wait(_POLL_SECONDS):
            if self._coordinator.should_stop():
                # A session that was closed first has cancelled everything itself.
                with contextlib.suppress(RuntimeError, tf.errors.CancelledError):
                    self._session.run(self._cancel)
                return


_POLL_SECONDS = 0.05  # How long a full queue may outlive the request to stop.


def check_queue(queue: Any, element_spec: Any, whole_batches: bool) -> None:
    """Refuses a queue whose components are not those of a batch.

    Args:
        queue: The queue.
        element_spec: The type of a batch.
        whole_batches: Whether an element of the queue is a batch, not a sample.
    """
    specs = tf.nest.flatten(element_spec)
    wanted = [(spec.dtype, spec.shape if whole_batches else spec.shape[1:]) for spec in specs]
    shapes = queue.shapes or [tf.TensorShape(None)] * len(queue.dtypes)
    fits = len(wanted) == len(queue.dtypes) and all(
        dtype == own and shape.is_compatible_with(other)
        for (dtype, shape), own, other in zip(wanted, queue.dtypes, shapes)
    )
    if not fits:
        raise SourceError(
            f"The queue holds {[(dtype.name, str(shape)) for dtype, shape in zip(queue.dtypes, shapes)]}, but "
            f"{'batches' if whole_batches else 'samples'} of this feeder are "
            f"{[(dtype.name, str(shape)) for dtype, shape in wanted]}. Make the queue with these dtypes and shapes, or "
            "convert the arrays."
        )
