"""Keeps what a monitor saw of a training, in bounded memory.

Flow:   ... -> verdict -> [recording] -> report -> callbacks -> ...
Owns:   the times of steps (each of the last ones, and all of them merged), epochs, losses, memory, and the means
        that the verdict is made from.
Leaves: measuring (callbacks), showing (report).
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import statistics
from typing import Any

from .plan import Split
from .verdict import Rates, Verdict

_MAX_SPANS = 512  # Then neighbours are merged: a report is no sharper than the screen.
_NUM_RECENT = 40
_MAX_REPLICA_ROWS = 1024
_MAX_MARKS = 1024


@dataclasses.dataclass
class Span:
    """One step, or several in a row, added up.

    Args:
        started: When it began, in seconds since training began.
        ended: When it ended.
        seconds: Of the steps, without what lies between epochs.
        num_steps: How many.
        num_samples: Their samples.
        wait_seconds: For which they waited for data.
        python_seconds: Of Python around them.
        fill: Batches that were ready when they began, added up.
        source_seconds: Of the source for their batches.
        copy_seconds: Of copying them.
        copied_bytes: Copied for them.
        made_at: When the last of their batches was ready, in seconds since training began.
    """

    started: float
    ended: float
    seconds: float
    num_steps: int
    num_samples: int
    wait_seconds: float
    python_seconds: float
    fill: float
    source_seconds: float
    copy_seconds: float
    copied_bytes: int
    made_at: float

    def add(self, other: Span) -> None:
        """Takes in the one after it. Written out, because it is done for each step."""
        self.ended = other.ended
        self.seconds += other.seconds
        self.num_steps += other.num_steps
        self.num_samples += other.num_samples
        self.wait_seconds += other.wait_seconds
        self.python_seconds += other.python_seconds
        self.fill += other.fill
        self.source_seconds += other.source_seconds
        self.copy_seconds += other.copy_seconds
        self.copied_bytes += other.copied_bytes
        self.made_at = other.made_at


def total(spans: list[Span]) -> Span:
    """All of them, as one.

    Args:
        spans: At least one, in order.
    """
    span = copy.copy(spans[0])
    for other in spans[1:]:
        span.add(other)
    return span


@dataclasses.dataclass
class Epoch:
    """What an epoch came to.

    Args:
        number: As Keras counts, from 0.
        steps: Its steps, as one span; None if it had none.
        logs: What Keras logged, as numbers.
    """

    number: int
    steps: Span | None
    logs: dict[str, float]


class Series:
    """Numbers over time; when there are too many, every second one is dropped."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []

    def add(self, seconds: float, value: float) -> None:
        """Adds the value at a time."""
        self.points.append((seconds, value))
        if len(self.points) > _MAX_MARKS:
            del self.points[1::2]


class Recording:
    """What was seen of one `fit`.

    Args:
        num_replicas: Replicas in sync.
        devices: Their devices.
        plan: The plan, as text.
        machine: Names and values that describe the machine.
        feed: What the rates need to know of the feeder: the last fields of `Rates`.
    """

    def __init__(
        self, num_replicas: int, devices: tuple[str, ...], plan: str, machine: dict[str, str], feed: dict[str, Any]
    ) -> None:
        self.num_replicas, self.devices, self.plan, self.machine, self.feed = num_replicas, devices, plan, machine, feed
        self.capacity = 0  # Batches that can be ready at once.
        self.spans: list[Span] = []
        self.recent: collections.deque[Span] = collections.deque(maxlen=_NUM_RECENT)
        self.warm_up: list[Span] = []
        self.epochs: list[Epoch] = []
        self.loss = Series()
        self.memory: dict[str, Series] = {}  # Bytes, by the name of what is measured.
        self.utilisation: dict[str, Series] = {}  # Per cent, by device.
        self.splits: list[tuple[str, Split, int]] = []  # Title, split, place of its first sample in the epoch.
        self.transform_seconds = 0.0  # Of one batch.
        self.ceiling_seconds: float | None = None
        self.state = "running"
        self._merged = 1  # Steps of a span.
        self._growing: Span | None = None
        self._measured: Span | None = None
        self._replica_rows: collections.deque[tuple[float, ...]] = collections.deque(maxlen=_MAX_REPLICA_ROWS)

    def add_step(self, step: Span, is_warm_up: bool, replica_seconds: tuple[float, ...]) -> None:
        """Adds a step.

        Args:
            step: The step, or those of one call of Keras's compiled function.
            is_warm_up: True if it is to be kept apart.
            replica_seconds: For each replica, from the data to the gradients; empty if unknown.
        """
        self.recent.append(step)
        if is_warm_up:
            self.warm_up.append(step)
            return
        if replica_seconds:
            self._replica_rows.append(replica_seconds)
        if self._measured is None:
            self._measured = copy.copy(step)
        else:
            self._measured.add(step)
        if self._merged == 1:
            self.spans.append(step)
        else:
            self._grow(step)
        if len(self.spans) >= _MAX_SPANS:
            self.spans = [total(list(pair)) for pair in zip(self.spans[::2], self.spans[1::2])]
            self._merged *= 2

    def _grow(self, step: Span) -> None:
        if self._growing is None:
            self._growing = copy.copy(step)
        else:
            self._growing.add(step)
        if self._growing.num_steps >= self._merged:
            self.spans.append(self._growing)
            self._growing = None

    def add_memory(self, name: str, seconds: float, num_bytes: float) -> None:
        """Adds a reading of memory in use."""
        self.memory.setdefault(name, Series()).add(seconds, num_bytes)

    def add_utilisation(self, name: str, seconds: float, percent: float) -> None:
        """Adds a reading of how busy a device was."""
        self.utilisation.setdefault(name, Series()).add(seconds, percent)

    @property
    def rates(self) -> Rates | None:
        """The means over the steps after warm-up, of a training that ended before over those after the first."""
        measured = self._measured
        if measured is None and len(self.warm_up) > 1:
            measured = total(self.warm_up[1:])
        if measured is None or measured.seconds <= 0:
            return None
        num_steps = measured.num_steps
        replicas: tuple[float, ...] = ()
        if self._replica_rows:
            replicas = tuple(statistics.median(column) for column in zip(*self._replica_rows))
        return Rates(
            num_steps=num_steps,
            samples_per_step=measured.num_samples / num_steps,
            step_seconds=measured.seconds / num_steps,
            wait_seconds=measured.wait_seconds / num_steps,
            python_seconds=measured.python_seconds / num_steps,
            replica_seconds=replicas,
            source_seconds=measured.source_seconds / num_steps,
            copy_seconds=measured.copy_seconds / num_steps,
            transform_seconds=self.transform_seconds,
            copied_bytes=measured.copied_bytes / num_steps,
            ceiling_seconds=self.ceiling_seconds,
            **self.feed,
        )

    verdict: Verdict | None = None
