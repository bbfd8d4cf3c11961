"""Counts what the feed does, while it does it.

Flow:   errors -> plan -> order -> [meter] -> internals -> ...
Owns:   the counters of one run through the data: batches, samples, bytes, and where the time went.
Leaves: the time that steps take and wait (stamps, callbacks), what it all means (verdict).

Every run counts, whether anybody looks or not: a batch costs two or three readings of the clock and one entry.
"""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

_MAX_BATCHES = 4096  # Kept until somebody takes them; then the oldest go.


class MadeBatch(NamedTuple):
    """What one global batch took to make."""

    ready_at: float  # By time.perf_counter().
    num_samples: int
    source_seconds: float  # In the user's code, on storage, or in wait for a worker.
    source_cpu_seconds: float  # Of these, for which a thread of this process computed.
    copy_seconds: float  # In copying samples into the memory that TensorFlow reads.
    copied_bytes: int


class FeedMeter:
    """The counters of one run; the thread that makes batches writes, any thread reads.

    Example:
        >>> meter = FeedMeter()
        >>> meter.note_source(0.5, cpu_seconds=0.125)
        >>> meter.note_batch(ready_at=7.0, num_samples=32, copy_seconds=0.25, copied_bytes=128)
        >>> meter.note_transform(0.5, ready_at=7.5)
        >>> meter.take_transformed()
        [7.5]
        >>> (batch,) = meter.take_batches()
        >>> batch.ready_at, batch.num_samples, batch.source_seconds, batch.source_cpu_seconds
        (7.0, 32, 0.5, 0.125)
        >>> meter.num_batches, meter.take_batches()
        (1, [])
    """

    def __init__(self) -> None:
        self.num_batches = 0
        self.asked_seconds = 0.0  # For which Keras waited to know whether there is another batch.
        self.transform_seconds = 0.0  # In transforms, added up over parallel calls; only while monitored.
        self.num_transformed = 0  # Batches.
        self.wants_batch = False  # True: the next batch is held, for a replay.
        self.held: Any = None
        self._given: collections.deque[tuple[float, float]] = collections.deque()
        self._batches: collections.deque[MadeBatch] = collections.deque(maxlen=_MAX_BATCHES)
        self._transformed: collections.deque[float] = collections.deque(maxlen=_MAX_BATCHES)

    def note_source(self, seconds: float, cpu_seconds: float = 0.0) -> None:
        """Notes what the source took to give a batch that has yet to be copied."""
        self._given.append((seconds, cpu_seconds))

    def note_batch(self, ready_at: float, num_samples: int, copy_seconds: float, copied_bytes: int) -> None:
        """Notes that the oldest batch that the source gave is ready."""
        self._batches.append(MadeBatch(ready_at, num_samples, *self._given.popleft(), copy_seconds, copied_bytes))
        self.num_batches += 1

    def note_transform(self, seconds: float, ready_at: float | None) -> None:
        """Notes one call of a transform.

        Args:
            seconds: What it took.
            ready_at: When it was over, by time.perf_counter(), if it was the batch's last.
        """
        self.transform_seconds += seconds
        if ready_at is not None:
            self._transformed.append(ready_at)
            self.num_transformed += 1

    def take_batches(self) -> list[MadeBatch]:
        """The batches made since the last time."""
        return _taken(self._batches)

    def take_transformed(self) -> list[float]:
        """When batches had been transformed, since the last time; by time.perf_counter(), one for each batch."""
        return _taken(self._transformed)


def _taken(items: collections.deque) -> list:
    """Those that are there now: others may come meanwhile."""
    return [items.popleft() for _ in range(len(items))]
