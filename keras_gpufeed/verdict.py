"""Says in words what holds training back.

Flow:   ... -> meter -> [verdict] -> callbacks -> ...
Owns:   from the times that were measured to the one cause that cost most, and the one knob to turn.
Leaves: measuring (meter, stamps, callbacks), showing (report). Arithmetic only: no TensorFlow.

A step's time is what it waited for data, what Python took around it, what replicas waited for the slowest, and
computing: the rest. The largest of the first three is the cause. If it is the wait for data, the stage of the feed
that takes most of a step names it; if no stage takes half a step, handing batches over does. With the wait for data
counts that for Python's interpreter, if the source keeps it busy, and that for processors which are the devices, if
copying keeps them busy.
"""

from __future__ import annotations

import dataclasses
import math
import statistics

# Shares of the time below which a loss is no reason to change anything. Some Python is in every step.
_WORTH_SAYING = {"wait": 0.1, "python": 0.25, "replica": 0.1}
_EXPLAINS = 0.5  # Of a step: in a feed that is the limit, its slowest stage takes about as long as a step.
_IS_SLOW = 1.2  # Times the median of the other replicas.
_PYTHONS_BATCHES = 8.0  # How much larger a batch makes Python's part of a step small.
_FEW_STEPS = 10  # Chance rules fewer.


@dataclasses.dataclass(frozen=True)
class Rates:
    """What was measured, in means over the steps after warm-up.

    Args:
        num_steps: Steps that were measured.
        samples_per_step: Samples of a global batch.
        step_seconds: From the beginning of a step to that of the next.
        wait_seconds: For which the step waited for data.
        python_seconds: Outside of the compiled step: Keras's loop, callbacks, starting the step.
        replica_seconds: For each replica, from the data to the gradients (medians); empty if unknown.
        source_seconds: In the source for one batch: the user's code, storage, or the wait for a worker.
        copy_seconds: In copying one batch on the host.
        transform_seconds: In the transform of one batch.
        copied_bytes: Copied on the host for one batch.
        source_cpu_seconds: Of `source_seconds`, for which it computed in a thread of this process.
        quick_compute_seconds: `compute_seconds` of the quickest steps; None if unknown.
        quick_python_seconds: `python_seconds` of the quickest steps.
        workers: Processes that make batches.
        prefetch: Global batches prepared ahead; so many transforms run at once.
        parallel_reads: Batches that are copied at once.
        batch_size: The feeder's global batch size; None if the source decides.
        source_kind: What could make the source faster: "workers", "function" (one that takes worker_id),
            "arrays" (on storage) or "other".
        num_processors: Processors that this process may use.
        copies_compete: True if the devices are processors, so that copying takes from them.
        ceiling_seconds: A step on data that were there already, if that was measured.

    Example:
        >>> rates = Rates(
        ...     num_steps=100,
        ...     samples_per_step=256,
        ...     step_seconds=0.02,
        ...     wait_seconds=0.015,
        ...     python_seconds=0.001,
        ...     source_seconds=0.02,
        ... )
        >>> round(rates.samples_per_second), round(rates.compute_seconds, 4)
        (12800, 0.004)
    """

    num_steps: int
    samples_per_step: float
    step_seconds: float
    wait_seconds: float
    python_seconds: float
    replica_seconds: tuple[float, ...] = ()
    source_seconds: float = 0.0
    copy_seconds: float = 0.0
    transform_seconds: float = 0.0
    copied_bytes: float = 0.0
    source_cpu_seconds: float = 0.0
    quick_compute_seconds: float | None = None
    quick_python_seconds: float = 0.0
    workers: int = 0
    prefetch: int = 2
    parallel_reads: int = 1
    batch_size: int | None = None
    source_kind: str = "other"
    num_processors: int = 1
    copies_compete: bool = False
    ceiling_seconds: float | None = None

    @property
    def samples_per_second(self) -> float:
        """Over all replicas."""
        return self.samples_per_step / self.step_seconds

    @property
    def slowest_replica(self) -> int | None:
        """The replica that takes clearly longer than the others; None if none does."""
        if len(self.replica_seconds) < 2:
            return None
        slowest = max(range(len(self.replica_seconds)), key=self.replica_seconds.__getitem__)
        return slowest if self.replica_seconds[slowest] > _IS_SLOW * self._others_seconds(slowest) else None

    @property
    def skew_seconds(self) -> float:
        """For which the other replicas waited for the slowest."""
        slowest = self.slowest_replica
        return 0.0 if slowest is None else self.replica_seconds[slowest] - self._others_seconds(slowest)

    def _others_seconds(self, replica: int) -> float:
        return statistics.median([*self.replica_seconds[:replica], *self.replica_seconds[replica + 1 :]])

    @property
    def interpreter_seconds(self) -> float:
        """For which the step waited for Python's interpreter, held by a source that computes in this process.

        Python runs one thread at a time, and a step needs it to begin and to return. That wait cannot be seen
        directly; it is what steps take beyond the quickest ones, and at most what the source computed meanwhile.
        """
        return min(self.source_cpu_seconds, self._excess_of_python + self._excess_of_computing)

    @property
    def processor_seconds(self) -> float:
        """For which the step waited for processors, busy with copying; at most what copying took."""
        if not self.copies_compete:
            return 0.0
        return min(self.copy_seconds, max(0.0, self._excess_of_computing - self._interpreter_seconds_in_step))

    @property
    def lost_to_feed(self) -> float:
        """For which the step waited for data, for the interpreter, or for processors, in seconds."""
        return self.wait_seconds + self.interpreter_seconds + self.processor_seconds

    @property
    def compute_seconds(self) -> float:
        """What is left of a step: the devices at work."""
        return max(0.0, self._seconds_in_step - self._interpreter_seconds_in_step - self.processor_seconds)

    @property
    def own_python_seconds(self) -> float:
        """What Python took around the step, without the wait for its interpreter."""
        return self.python_seconds - self.interpreter_seconds * self._share_of_python

    @property
    def _interpreter_seconds_in_step(self) -> float:
        return self.interpreter_seconds * (1 - self._share_of_python)

    @property
    def _seconds_in_step(self) -> float:
        return self.step_seconds - self.wait_seconds - self.python_seconds - self.skew_seconds

    @property
    def _excess_of_computing(self) -> float:
        quick = self.quick_compute_seconds
        return 0.0 if quick is None else max(0.0, self._seconds_in_step - quick)

    @property
    def _excess_of_python(self) -> float:
        return 0.0 if self.quick_compute_seconds is None else max(0.0, self.python_seconds - self.quick_python_seconds)

    @property
    def _share_of_python(self) -> float:
        """Of the wait for the interpreter, how much lay around the step."""
        excess = self._excess_of_python + self._excess_of_computing
        return self._excess_of_python / excess if excess else 0.0

    @property
    def feed_wait(self) -> float:
        """Share of the time for which steps waited for data."""
        return self.wait_seconds / self.step_seconds


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What holds training back.

    Args:
        bound_by: "compute", "source", "copy", "transform", "python" or "replica".
        lost_share: Share of the time that it costs; for "compute", what all others together cost.
        reason: What was measured, as a sentence.
        knob: The one thing to change, as a sentence.

    Example:
        >>> rates = Rates(
        ...     num_steps=100,
        ...     samples_per_step=256,
        ...     step_seconds=0.02,
        ...     wait_seconds=0.015,
        ...     python_seconds=0.001,
        ...     source_seconds=0.02,
        ...     source_kind="workers",
        ...     num_processors=8,
        ... )
        >>> print(judge(rates))
        Data-bound by the source: 75 % of the time is lost.
        Steps waited 15.0 of 20.0 ms for data; the source takes 20.0 ms for a batch, the rest of a step 5.0 ms.
        workers=4 would hide it. Processes take some seconds to start, once.
    """

    bound_by: str
    lost_share: float
    reason: str
    knob: str

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        lost = f"{self.lost_share:.0%}".replace("%", " %")
        names = {
            "compute": f"Compute-bound: {lost} of the time is lost outside the devices' work.",
            "source": f"Data-bound by the source: {lost} of the time is lost.",
            "transform": f"Data-bound by the transform: {lost} of the time is lost.",
            "copy": f"Data-bound by copying: {lost} of the time is lost.",
            "python": f"Bound by Python: {lost} of the time is lost.",
            "replica": f"Held back by one replica: {lost} of the time is lost.",
        }
        return names[self.bound_by]

    def __str__(self) -> str:
        return f"{self.headline}\n{self.reason}\n{self.knob}"


def judge(rates: Rates) -> Verdict:
    """Names the cause that costs most.

    Args:
        rates: What was measured.

    Returns:
        The verdict.
    """
    verdict = _judge(rates)
    if rates.num_steps >= _FEW_STEPS:
        return verdict
    few = f" Only {rates.num_steps} step(s) could be measured: train longer before you act on it."
    return dataclasses.replace(verdict, reason=verdict.reason + few)


def _judge(rates: Rates) -> Verdict:
    step = rates.step_seconds
    losses = {
        "wait": rates.lost_to_feed,
        "python": rates.own_python_seconds,
        "replica": rates.skew_seconds,
    }
    losses = {cause: seconds for cause, seconds in losses.items() if seconds >= _WORTH_SAYING[cause] * step}
    if not losses:
        return _compute_bound(rates)
    cause = max(losses, key=losses.__getitem__)
    share = losses[cause] / step
    if cause == "replica":
        return _bound_by_replica(rates, share)
    if cause == "python":
        reason = (
            f"Of a step of {_ms(step)} ms, Python takes {_ms(rates.own_python_seconds)} ms around it, and that does "
            f"not depend on the {rates.samples_per_step:.0f} samples in it."
        )
        return Verdict("python", share, reason, _larger_batches(rates))
    return _bound_by_data(rates, share)


def _compute_bound(rates: Rates) -> Verdict:
    lost = 1 - rates.compute_seconds / rates.step_seconds
    copying = f", {_ms(rates.processor_seconds)} ms to copying" if rates.processor_seconds else ""
    reason = (
        f"Of a step of {_ms(rates.step_seconds)} ms the devices compute for {_ms(rates.compute_seconds)} ms; "
        f"{_ms(rates.wait_seconds)} ms go to waiting for data{copying} and "
        f"{_ms(rates.own_python_seconds + rates.interpreter_seconds)} ms to Python."
    )
    return Verdict("compute", lost, reason, "Nothing in the feed would help: a faster or further device would.")


def _bound_by_replica(rates: Rates, share: float) -> Verdict:
    slowest = rates.slowest_replica or 0
    others = rates._others_seconds(slowest)
    reason = (
        f"Replica {slowest} takes {_ms(rates.replica_seconds[slowest])} ms to its gradients, the others "
        f"{_ms(others)} ms, and all wait for it."
    )
    return Verdict(
        "replica",
        share,
        reason,
        f"See what else runs on the device of replica {slowest}, or leave it out: get_strategy(devices=[...]).",
    )


def _bound_by_data(rates: Rates, share: float) -> Verdict:
    rest = rates.step_seconds - rates.lost_to_feed  # What a step would take if its data were there.
    at_once = {"source": 1, "copy": rates.parallel_reads, "transform": max(1, rates.prefetch)}
    taken = {stage: getattr(rates, f"{stage}_seconds") for stage in at_once}
    stages = {stage: taken[stage] / at_once[stage] for stage in at_once}
    lost_beside = {"source": rates.interpreter_seconds, "copy": rates.processor_seconds}  # Besides the wait for data.
    stage = max(lost_beside, key=lost_beside.__getitem__)
    is_wait = rates.wait_seconds >= lost_beside[stage]
    if is_wait:
        stage = max(stages, key=stages.__getitem__)
    if is_wait and stages[stage] < _EXPLAINS * rates.step_seconds:
        reason = (
            f"Steps waited {_ms(rates.wait_seconds)} of {_ms(rates.step_seconds)} ms for data, but no stage takes "
            f"long: the source {_ms(rates.source_seconds)} ms, copying {_ms(rates.copy_seconds)} ms for a batch. "
            "What takes time is handing over batches, however small."
        )
        return Verdict("python", share, reason, _larger_batches(rates))
    name = {"source": "the source", "copy": "copying", "transform": "the transform"}[stage]
    parallel = f", {at_once[stage]} at a time" if at_once[stage] > 1 else ""
    beside = ""
    if rates.interpreter_seconds >= _WORTH_SAYING["wait"] * rates.step_seconds:
        beside += f" and {_ms(rates.interpreter_seconds)} ms for Python's interpreter, which the source holds"
    if rates.processor_seconds >= _WORTH_SAYING["wait"] * rates.step_seconds:
        beside += f" and {_ms(rates.processor_seconds)} ms for processors, which copying keeps busy"
    reason = (
        f"Steps waited {_ms(rates.wait_seconds)} of {_ms(rates.step_seconds)} ms for data{beside}; {name} takes "
        f"{_ms(taken[stage])} ms for a batch{parallel}, the rest of a step {_ms(rest)} ms."
    )
    if stage == "source":
        return Verdict(stage, share, reason, _knob_of_source(rates, rest))
    if stage == "transform":
        return Verdict(stage, share, reason, _knob_of_transform(rates, rest))
    return Verdict(stage, share, reason, _knob_of_copy(rates))


def _knob_of_source(rates: Rates, rest: float) -> str:
    if rates.source_kind == "arrays":
        return "Hold the arrays in memory, or on a faster disk."
    if rates.source_seconds <= rest:  # Fast enough on average.
        return f"It is fast enough on average but not evenly: prefetch={4 * max(1, rates.prefetch)} would even it out."
    if rates.source_kind == "other":
        return "Make the source faster, or pass a generator function or a keras.utils.Sequence, with workers=."
    workers = math.ceil(max(1, rates.workers) * rates.source_seconds / rest)
    knob = f"workers={workers} would hide it."
    if rates.source_kind == "function":
        knob = f"A generator function that takes worker_id and num_workers, with workers={workers}, would hide it."
    if not rates.workers:
        knob += " Processes take some seconds to start, once."
    if workers > rates.num_processors:
        knob += f" There are {rates.num_processors} processors, so if it computes rather than waits, make it cheaper."
    return knob


def _knob_of_transform(rates: Rates, rest: float) -> str:
    prefetch = math.ceil(rates.transform_seconds / rest)
    if prefetch > max(1, rates.prefetch) and prefetch <= rates.num_processors:
        return f"prefetch={prefetch} would run as many at once and hide it."
    return (
        f"Move it into the model, where the devices compute it, or make it cheaper: it would take {prefetch} "
        f"processors to hide it, and there are {rates.num_processors}."
    )


def _knob_of_copy(rates: Rates) -> str:
    if rates.prefetch == 0:
        return "prefetch=2 would copy while the devices compute."
    gigabytes = rates.parallel_reads * rates.copied_bytes / rates.copy_seconds / 1e9
    return (
        f"Feed a smaller dtype, such as uint8 or float16, and convert it in the model: {rates.copied_bytes / 1e6:.3g} "
        f"MB for each batch are copied, at {gigabytes:.2g} GB/s."
    )


def _larger_batches(rates: Rates) -> str:
    larger = max(1, round((rates.batch_size or rates.samples_per_step) * _PYTHONS_BATCHES))
    return (
        f"A larger batch, such as batch_size={larger} where there are so many samples, would spread it over more of "
        "them; where the batch must stay, compile(steps_per_execution=...) spares Keras's part."
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1e-3 else f"{seconds * 1e3:.1f}"
