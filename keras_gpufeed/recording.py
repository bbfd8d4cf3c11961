"""Keeps what a monitor saw of a training, in bounded memory.

Flow:   ... -> verdict -> [recording] -> report -> callbacks -> ...
Owns:   the times of steps (each of the last ones, and all of them merged), epochs, losses, memory, and the means
        that the verdict is made from.
Leaves: measuring (callbacks), showing (report).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from .plan import Split
from .verdict import Rates, Verdict

_MAX_SPANS = 512  # Then neighbours are merged: a report is no sharper than the screen.
_NUM_RECENT = 40
_MAX_LOOKED_BACK = 1024  # Steps from which medians are taken.
_MAX_MARKS = 1024
_QUICK = 0.02  # The share of the steps that are taken for undisturbed.


@dataclasses.dataclass(frozen=True)
class Span:
    """One step, or several in a row, added up.

    Args:
        started: When it began, in seconds since training began.
        ended: When it ended.
        made_at: When the last of their batches was ready, in seconds since training began.
        seconds: Of the steps, without what lies between epochs.
        num_steps: How many.
        num_samples: Their samples.
        wait_seconds: For which they waited for data.
        python_seconds: Of Python around them.
        fill: Batches that were ready when they began, added up.
        source_seconds: Of the source for their batches.
        source_cpu_seconds: For which it computed in a thread of this process.
        copy_seconds: Of copying them.
        copied_bytes: Copied for them.
    """

    started: float
    ended: float
    made_at: float
    seconds: float
    num_steps: float
    num_samples: float
    wait_seconds: float
    python_seconds: float
    fill: float
    source_seconds: float
    source_cpu_seconds: float
    copy_seconds: float
    copied_bytes: float


# Spans that are kept lie in arrays of these columns: a training has too many for objects.
COLUMNS = tuple(field.name for field in dataclasses.fields(Span))
_STARTED, _OF_LAST = 0, [1, 2]


def merged(spans: np.ndarray) -> np.ndarray:
    """Neighbours added up.

    Args:
        spans: Of shape (groups, spans of a group, columns).

    Returns:
        Of shape (groups, columns).
    """
    sums = spans.sum(axis=1)
    sums[:, _STARTED] = spans[:, 0, _STARTED]
    sums[:, _OF_LAST] = spans[:, -1, _OF_LAST]
    return sums


def total(spans: Iterable[Span]) -> Span:
    """All of them, as one.

    Args:
        spans: At least one, in order.
    """
    return Span(*merged(np.array([dataclasses.astuple(span) for span in spans])[None])[0].tolist())


def _spans_of(rows: np.ndarray) -> list[Span]:
    return [Span(*row) for row in rows.tolist()]


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
        self.epochs: list[Epoch] = []
        self.loss = Series()
        self.memory: dict[str, Series] = {}  # Bytes, by the name of what is measured.
        self.utilisation: dict[str, Series] = {}  # Per cent, by device.
        self.splits: list[tuple[str, Split, int]] = []  # Title, split, place of its first sample in the epoch.
        self.transform_seconds = 0.0  # Of one batch.
        self.ceiling_seconds: float | None = None
        self.state = "running"
        no_steps = np.zeros((0, len(COLUMNS)))
        self._warm_up = self._recent = self._kept = self._growing = self._measured = no_steps
        self._num_merged = 1  # Steps of a span that is kept.
        self._own_seconds = np.zeros((0, 2))
        self._replica_seconds = np.zeros((0, num_replicas))

    def add_steps(self, steps: np.ndarray, num_warm_up: int, replica_seconds: np.ndarray) -> None:
        """Adds steps, or calls of Keras's compiled function that run several.

        Args:
            steps: Of shape (steps, `COLUMNS`), in order.
            num_warm_up: How many of them, the first ones, are to be kept apart.
            replica_seconds: Of shape (steps, replicas), from the data to the gradients; no rows if unknown.
        """
        self._recent = np.concatenate([self._recent, steps])[-_NUM_RECENT:]
        self._warm_up = np.concatenate([self._warm_up, steps[:num_warm_up]])
        steps, replica_seconds = steps[num_warm_up:], replica_seconds[num_warm_up:]
        if not len(steps):
            return
        self._replica_seconds = np.concatenate([self._replica_seconds, replica_seconds])[-_MAX_LOOKED_BACK:]
        self._own_seconds = np.concatenate([self._own_seconds, _own_seconds(steps)])[-_MAX_LOOKED_BACK:]
        self._measured = merged(np.concatenate([self._measured, steps])[None])
        steps = np.concatenate([self._growing, steps])
        num_groups, size = len(steps) // self._num_merged, self._num_merged
        groups, self._growing = np.split(steps, [num_groups * size])
        self._kept = np.concatenate([self._kept, merged(groups.reshape(num_groups, size, -1))])
        while len(self._kept) >= _MAX_SPANS:
            pairs, odd = np.split(self._kept, [len(self._kept) // 2 * 2])
            self._kept = np.concatenate([merged(pairs.reshape(-1, 2, len(COLUMNS))), odd])
            self._num_merged *= 2

    @property
    def spans(self) -> list[Span]:
        """All steps after warm-up, neighbours merged."""
        return _spans_of(self._kept)

    @property
    def recent(self) -> list[Span]:
        """The last steps."""
        return _spans_of(self._recent)

    @property
    def warm_up(self) -> list[Span]:
        """The steps that were kept apart."""
        return _spans_of(self._warm_up)

    def add_memory(self, name: str, seconds: float, num_bytes: float) -> None:
        """Adds a reading of memory in use."""
        self.memory.setdefault(name, Series()).add(seconds, num_bytes)

    def add_utilisation(self, name: str, seconds: float, percent: float) -> None:
        """Adds a reading of how busy a device was."""
        self.utilisation.setdefault(name, Series()).add(seconds, percent)

    @property
    def rates(self) -> Rates | None:
        """The means over the steps after warm-up, of a training that ended before over those after the first."""
        measured, own = self._measured, self._own_seconds
        if not len(measured) and len(self._warm_up) > 1:
            measured, own = merged(self._warm_up[None, 1:]), _own_seconds(self._warm_up[1:])
        if not len(measured) or measured[0, COLUMNS.index("seconds")] <= 0:
            return None
        (span,) = _spans_of(measured)
        replicas = self._replica_seconds
        quick_compute, quick_python = np.quantile(own, _QUICK, axis=0)
        num_steps = int(span.num_steps)
        return Rates(
            num_steps=num_steps,
            samples_per_step=span.num_samples / num_steps,
            step_seconds=span.seconds / num_steps,
            wait_seconds=span.wait_seconds / num_steps,
            python_seconds=span.python_seconds / num_steps,
            quick_compute_seconds=float(quick_compute),
            quick_python_seconds=float(quick_python),
            replica_seconds=tuple(np.median(replicas, axis=0).tolist()) if len(replicas) else (),
            source_seconds=span.source_seconds / num_steps,
            source_cpu_seconds=span.source_cpu_seconds / num_steps,
            copy_seconds=span.copy_seconds / num_steps,
            transform_seconds=self.transform_seconds,
            copied_bytes=span.copied_bytes / num_steps,
            ceiling_seconds=self.ceiling_seconds,
            **self.feed,
        )

    verdict: Verdict | None = None


def _own_seconds(steps: np.ndarray) -> np.ndarray:
    """Of one step of each row, without the wait for data: in the compiled step, and in the Python around it."""
    of = dict(zip(COLUMNS, steps.T))
    in_step = of["seconds"] - of["wait_seconds"] - of["python_seconds"]
    return np.stack([in_step, of["python_seconds"]], axis=1) / of["num_steps"][:, None]
