"""Decides which samples each replica gets in each step.

Flow:   errors -> stock -> [plan] -> order -> sources -> ...
Owns:   steps, per-replica ranges, the small-tail rule, shares, and how they are shown.
Leaves: which sample stands at which place (order), reading samples (sources), TensorFlow (pipeline).
"""

from __future__ import annotations

import dataclasses
import itertools

from .errors import SourceError
from .stock import MOST_SHOWN_ONE_BY_ONE, StockSplit, stock_split

_SAMPLES_OF_ONE_DEVICE = 32  # The batch that Keras gives one device by default.
_BYTES_READ_TOGETHER = 4 << 20  # More gains nothing, as it leaves the processor's caches, and takes memory.
_MAX_STEPS_PER_READ = 16
_PARALLEL_READS = 2


@dataclasses.dataclass(frozen=True)
class Split:
    """One global batch, cut for the replicas.

    Args:
        num_samples: Samples in the global batch.
        parts: One `(start, stop)` range of the global batch for each replica.
        small_tail: True if there are fewer samples than replicas, so that every replica gets all of them.
    """

    num_samples: int
    parts: tuple[tuple[int, int], ...]
    small_tail: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples on each replica."""
        return tuple(stop - start for start, stop in self.parts)

    @property
    def shares(self) -> tuple[float, ...]:
        """Weight of each replica: replicas x its samples / samples of the step. They sum to the replicas."""
        num_replicas = len(self.parts)
        return tuple(num_replicas * size / sum(self.sizes) for size in self.sizes)


def split_batch(num_samples: int, num_replicas: int) -> Split:
    """Cuts a global batch into contiguous parts whose sizes differ by at most one sample.

    With fewer samples than replicas no cut leaves every replica a sample. Then each replica gets all of
    them: its gradient is already the whole one, and no layer ever sees zero samples.

    Args:
        num_samples: Samples in the global batch, at least 1.
        num_replicas: Replicas in sync, at least 1.

    Returns:
        The `Split`.

    Example:
        >>> split_batch(10, 4).sizes
        (3, 3, 2, 2)
        >>> split_batch(3, 4).sizes
        (3, 3, 3, 3)
    """
    if num_samples < num_replicas:
        return Split(num_samples, ((0, num_samples),) * num_replicas, small_tail=True)
    size, extra = divmod(num_samples, num_replicas)
    starts = [replica * size + min(replica, extra) for replica in range(num_replicas + 1)]
    return Split(num_samples, tuple(zip(starts[:-1], starts[1:])), small_tail=False)


def split_of_sizes(sizes: tuple[int, ...]) -> Split:
    """The split into parts of given sizes, one after the other.

    Args:
        sizes: Samples of each replica, each at least 1.

    Returns:
        The `Split`.

    Example:
        >>> split_of_sizes((3, 1)).shares
        (1.5, 0.5)
    """
    stops = tuple(itertools.accumulate(sizes))
    return Split(stops[-1], tuple(zip((0, *stops[:-1]), stops)), small_tail=False)


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """How one pass over the data is cut into steps, and each step into replicas.

    Args:
        num_samples: Samples in one pass; None if the source does not know its length.
        global_batch_size: Samples that all replicas together consume in one step; None if the source
            yields batches of its own sizes.
        num_replicas: Replicas in sync.
        drop_remainder: True if a last batch smaller than the global batch is left out.
        sample_bytes: Bytes of one sample as it is fed, or None if samples differ in size.
        prefetch: Global batches that are prepared ahead of the step.
        in_memory: True if samples lie in memory, so that reading them is copying.
        num_batches: Batches of one pass over a source that yields batches of its own sizes, if it says.
        devices: Names of the devices, one for each replica, for display.
        strategy: Name of the strategy, for display.

    Raises:
        SourceError: If there is nothing to feed.

    Example:
        >>> plan = BatchPlan(num_samples=1025, global_batch_size=256, num_replicas=4)
        >>> plan.steps, plan.split(0).sizes, plan.split(4).sizes
        (5, (64, 64, 64, 64), (1, 1, 1, 1))
        >>> print(plan)
        1025 samples in 5 steps of 256 on 4 replicas
          a full step     64 + 64 + 64 + 64 samples
          the last step   1 sample: all 4 replicas compute it, replica 0 counts it
          shares          all steps even: no replica weighs more than another
          left out        nothing
          stock Keras     the last step 1 + 0 + 0 + 0 samples: replicas 1 to 3 get no sample; each
                          counts 0.25 times in the gradient
          batch size      256 keeps all replicas equally busy
    """

    num_samples: int | None
    global_batch_size: int | None
    num_replicas: int
    drop_remainder: bool = False
    sample_bytes: int | None = None
    prefetch: int = 2
    in_memory: bool = False
    num_batches: int | None = None
    devices: tuple[str, ...] = ()
    strategy: str = ""

    def __post_init__(self) -> None:
        if self.steps == 0:
            if not self.num_samples:
                raise SourceError(
                    "There is nothing to feed: the source holds 0 samples. "
                    "Check the path, filter or slice that the data came from."
                )
            raise SourceError(
                f"drop_remainder=True leaves nothing to feed: {self.num_samples} samples do not fill one "
                f"global batch of {self.global_batch_size}. Use a smaller batch_size or drop_remainder=False."
            )

    @property
    def steps(self) -> int | None:
        """Steps in one pass, or None if the source does not know its length."""
        if self.num_samples is None or self.global_batch_size is None:
            return None
        if self.drop_remainder:
            return self.num_samples // self.global_batch_size
        return -(-self.num_samples // self.global_batch_size)

    @property
    def samples_left_out(self) -> int:
        """Samples that `drop_remainder` keeps out of every pass."""
        if not self.drop_remainder or self.num_samples is None or self.global_batch_size is None:
            return 0
        return self.num_samples % self.global_batch_size

    def samples_of(self, step: int) -> tuple[int, int]:
        """The places `(start, stop)` in the pass's order that `step` covers.

        Args:
            step: Step of the pass, from 0.

        Raises:
            SourceError: If the source decides how many samples a step has, or how many there are.
        """
        num_samples, size = self.num_samples, self.global_batch_size
        if num_samples is None or size is None:
            raise SourceError(
                "Which samples a step takes is not known before the source is read: it decides how many there are. "
                "BatchPlan(num_samples, global_batch_size, num_replicas) tells how a step would be cut."
            )
        return step * size, min((step + 1) * size, num_samples)

    def split(self, step: int) -> Split:
        """How the global batch of `step` is cut for the replicas.

        Args:
            step: Step of the pass, from 0, of a source that says how many samples it has.
        """
        start, stop = self.samples_of(step)
        return split_batch(stop - start, self.num_replicas)

    @property
    def even(self) -> bool:
        """True if in every step all replicas get equally many samples and each sample goes to one replica."""
        if self.num_replicas == 1:
            return True
        if self.steps is None:
            return False
        splits = {self.split(0), self.split(self.steps - 1)}
        return all(len(set(split.sizes)) == 1 and not split.small_tail for split in splits)

    @property
    def has_small_tail(self) -> bool:
        """True if some step may have fewer samples than replicas."""
        return self.steps is None or self.split(0).small_tail or self.split(self.steps - 1).small_tail

    @property
    def steps_per_read(self) -> int:
        """Steps whose samples are copied together: calling Python takes longer than copying a small batch.

        Only from memory, which keeps nobody waiting, and never more than a pass.
        """
        if not (self.in_memory and self.prefetch and self.sample_bytes and self.global_batch_size and self.steps):
            return 1
        at_once = _BYTES_READ_TOGETHER // (self.global_batch_size * self.sample_bytes)
        return max(1, min(at_once, _MAX_STEPS_PER_READ, self.steps))

    @property
    def parallel_reads(self) -> int:
        """Reads at once, of large batches: copying is what they do, and one thread does not fill the way to memory."""
        return _PARALLEL_READS if self.in_memory and self.prefetch and self.steps_per_read == 1 else 1

    @property
    def num_ahead(self) -> int:
        """Global batches that may be ready before they are taken."""
        if self.steps_per_read > 1:
            return self.prefetch + 2 * self.steps_per_read  # Those being dealt out, and those after them.
        return self.prefetch + (self.parallel_reads if self.parallel_reads > 1 else 0)

    @property
    def bytes_in_flight(self) -> int | None:
        """Host bytes of the batches prepared ahead and of those in use; None if samples differ in size."""
        if self.sample_bytes is None or self.global_batch_size is None:
            return None
        return self._batches_in_flight * self.global_batch_size * self.sample_bytes

    @property
    def _batches_in_flight(self) -> int:
        together = self.steps_per_read
        if together == 1:
            return self.num_ahead + 1
        # Memory comes back when all of a read is done.
        return together * (2 + -(-(self.prefetch + 1) // together))

    @property
    def device_bytes_in_flight(self) -> int | None:
        """Bytes of batches on each device, the one in use and the one that waits; None if samples differ in size.

        0 on CPUs, which read what lies on the host.
        """
        if self.sample_bytes is None or self.global_batch_size is None:
            return None
        if self.devices and all("GPU" not in device for device in self.devices):
            return 0
        return (
            (2 if self._has_waiting_batch else 1)
            * max(split_batch(self.global_batch_size, self.num_replicas).sizes)
            * self.sample_bytes
        )

    @property
    def _has_waiting_batch(self) -> bool:
        """True if each device has its next batch already. Without a strategy, batches wait on the host."""
        return self.prefetch > 0 and (self.num_replicas > 1 or self.strategy == "OneDeviceStrategy")

    def stock(self, step: int) -> StockSplit:
        """What stock Keras, under a `MirroredStrategy`, would do with the global batch of `step`.

        Args:
            step: Step of the pass, from 0, of a source that says how many samples it has.
        """
        start, stop = self.samples_of(step)
        return stock_split(stop - start, self.num_replicas)

    @property
    def advice(self) -> tuple[str, ...]:
        """What other batch sizes would gain, in sentences; nothing if there is nothing to gain."""
        size, num_replicas = self.global_batch_size, self.num_replicas
        if num_replicas == 1:
            return ()
        if size is None:
            return (f"batches of a multiple of {num_replicas} samples let no replica wait for another",)
        if size < num_replicas:
            return (
                f"with {size}, every replica computes the whole batch and one counts it: "
                f"use a batch_size of at least {num_replicas}",
            )
        if self.num_samples is not None and self.num_samples < size:
            return (f"one step holds all {self.num_samples} samples: a smaller batch_size makes more steps of them",)
        per_replica, extra = divmod(size, num_replicas)
        advice = []
        if extra:
            waiting = num_replicas - extra
            advice.append(
                f"with {size}, {waiting} of {num_replicas} replicas {'waits' if waiting == 1 else 'wait'} at each step "
                f"while the others compute one sample more: use {size - extra} or {size + waiting}"
            )
        if per_replica < _SAMPLES_OF_ONE_DEVICE:
            advice.append(
                f"{_SAMPLES_OF_ONE_DEVICE * num_replicas} gives each replica the {_SAMPLES_OF_ONE_DEVICE} samples that "
                f"Keras gives one device by default; with fewer steps, try a larger learning rate"
            )
        return tuple(advice)

    def __str__(self) -> str:
        rows = [("devices", ", ".join(self.devices)), ("strategy", self.strategy)]
        if self.steps is not None:
            first, last = self.split(0), self.split(self.steps - 1)
            if first.num_samples == self.global_batch_size or self.steps > 1:
                rows.append(("a full step", _describe(first)))
            if last != first or self.steps == 1:
                rows.append(("the last step", _describe(last)))
            rows.append(("shares", self._describe_shares(first, last)))
            left_out = self.samples_left_out
            rows.append(("left out", f"{_count(left_out, 'sample')} (drop_remainder)" if left_out else "nothing"))
        elif self.global_batch_size is not None:
            rows.append(("a full step", _describe(split_batch(self.global_batch_size, self.num_replicas))))
        if self.bytes_in_flight is not None and self.device_bytes_in_flight is not None:
            on_host, on_device = readable_bytes(self.bytes_in_flight), readable_bytes(self.device_bytes_in_flight)
            batches = f"{self.num_ahead} global batches ahead and one in use"
            if self.steps_per_read > 1:
                batches = (
                    f"up to {self._batches_in_flight} global batches, small ones are read {self.steps_per_read} at once"
                )
            rows.append(("bytes in flight", f"{on_host} on the host ({batches})"))
            waiting = "one batch waiting and one in use" if self._has_waiting_batch else "one batch in use"
            if self.device_bytes_in_flight:
                rows.append(("", f"{on_device} on each device ({waiting})"))
        if self.num_replicas > 1:
            rows += zip(("stock Keras", ""), self._describe_stock())
            rows += zip(
                ("batch size", ""), self.advice or (f"{self.global_batch_size} keeps all replicas equally busy",)
            )
        return "\n".join([self._headline(), *(f"  {label:15} {text}" for label, text in rows if text)])

    __repr__ = __str__  # A plan is there to be looked at, in a notebook or a console too.

    def _headline(self) -> str:
        replicas = _count(self.num_replicas, "replica")
        if self.global_batch_size is None:
            steps = "" if self.num_batches is None else f"{_count(self.num_batches, 'step')}, "
            return f"{steps}batches of the source's own sizes on {replicas}"
        if self.steps is None:
            return (
                f"batches of {_count(self.global_batch_size, 'sample')} from a source of unknown length on {replicas}"
            )
        return (
            f"{_count(self.num_samples, 'sample')} in {_count(self.steps, 'step')} of "
            f"{self.global_batch_size} on {replicas}"
        )

    def _describe_stock(self) -> list[str]:
        """What stock Keras would do with a full step and with the last one, where that is not right."""
        size, lines = self.global_batch_size, []
        if size is None:
            return []
        if self.num_samples is None or self.num_samples >= size:
            lines.append(("a full step", stock_split(size, self.num_replicas)))
        remainder = self.num_samples % size if self.num_samples is not None else 0
        if remainder:  # Its `fit` has no drop_remainder for arrays.
            name = "the last step" if not self.drop_remainder else "one more step"
            lines.append((name, stock_split(remainder, self.num_replicas)))
        wrong = [f"{name} {split}" for name, split in lines if not split.is_right]
        if self.num_samples is None and not wrong:
            return ["the same in a full step; how the last one divides is not known"]
        return wrong or ["the same: all steps divide evenly"]

    def _describe_shares(self, first: Split, last: Split) -> str:
        uneven = [split for split in (first, last) if len(set(split.sizes)) > 1]
        if self.num_replicas == 1:
            return "one replica: nothing to weigh"
        if not uneven:
            return "all steps even: no replica weighs more than another"
        shares = _readable_shares(uneven[-1].shares)
        if self.num_replicas > MOST_SHOWN_ONE_BY_ONE:
            shares = [f"{shares.count(share)} x {share}" for share in dict.fromkeys(shares)]
        return f"uneven steps weigh each replica by its samples: {', '.join(shares)}"


def strategy_name(num_replicas: int) -> str:
    """The strategy that models get for so many replicas, for display."""
    return "MirroredStrategy" if num_replicas > 1 else "none: one device needs none"


@dataclasses.dataclass(frozen=True)
class Pace:
    """How one replica's own source is cut into steps.

    Args:
        num_samples: Samples in one pass over the source.
        samples: A step takes `samples / steps` samples, rounded so that every sample is taken once.
        steps: See `samples`.

    Example:
        >>> pace = Pace(10, samples=5, steps=2)
        >>> pace.num_steps, [pace.samples_of(step) for step in range(4)]
        (4, [(0, 2), (2, 5), (5, 7), (7, 10)])
    """

    num_samples: int
    samples: int
    steps: int = 1

    @property
    def num_steps(self) -> int:
        """Steps in one pass."""
        return -(-self.num_samples * self.steps // self.samples)

    def samples_of(self, step: int) -> tuple[int, int]:
        """The places `(start, stop)` in the source's order that `step` covers."""
        start, stop = (place * self.samples // self.steps for place in (step, step + 1))
        return start, min(stop, self.num_samples)


def proportional_paces(lengths: list[int], global_batch_size: int) -> tuple[Pace, ...]:
    """Paces at which sources of different lengths end together.

    Args:
        lengths: Samples of each replica's source.
        global_batch_size: Samples that all replicas together take in a step, but for rounding.

    Raises:
        SourceError: If a source is too short to give a sample to each step.

    Example:
        >>> [pace.samples_of(0) for pace in proportional_paces([20, 10], 6)]
        [(0, 4), (0, 2)]
    """
    total = sum(lengths)
    for replica_id, length in enumerate(lengths):
        if length * global_batch_size < total:
            raise SourceError(
                f"The source of replica {replica_id} has {length} sample(s), too few to give one to each of the "
                f"{-(-total // global_batch_size)} steps of {global_batch_size} samples that all sources together "
                "make. Use a larger batch_size, or an iterator such as itertools.repeat for a source that is to be "
                "read again and again."
            )
    return tuple(Pace(length, global_batch_size * length, total) for length in lengths)


@dataclasses.dataclass(frozen=True)
class SourcesPlan(BatchPlan):
    """The plan of replicas that have a source each.

    Args:
        paces: How each source is cut; empty if one of them does not know its length.
    """

    paces: tuple[Pace, ...] = ()

    @property
    def steps(self) -> int | None:
        """Steps in one pass, or None if a source does not know its length."""
        return self.paces[0].num_steps if self.paces else None

    def split(self, step: int) -> Split:
        """What each replica takes from its source in `step`."""
        ranges = [pace.samples_of(step) for pace in self.paces]
        return split_of_sizes(tuple(stop - start for start, stop in ranges))

    @property
    def even(self) -> bool:
        """True if in every step all replicas get equally many samples."""
        return len(set(self.paces)) == 1

    @property
    def has_small_tail(self) -> bool:
        """Never: each replica has samples of its own in every step."""
        return False

    @property
    def advice(self) -> tuple[str, ...]:
        """Who waits for whom."""
        if self.even:
            return ("all replicas are equally busy",)
        return ("the replica with the most samples sets the pace of each step",)

    def _describe_stock(self) -> list[str]:
        return []  # It has no such thing.

    def _describe_shares(self, first: Split, last: Split) -> str:
        if self.even or self.num_replicas == 1:
            return super()._describe_shares(first, last)
        shares = ", ".join(_readable_shares(first.shares))
        return f"each replica weighs by its samples of the step: at first {shares}"


def _count(number: int | None, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _describe(split: Split) -> str:
    num_replicas = len(split.parts)
    if split.small_tail:
        subject = _count(split.num_samples, "sample")
        pronoun = "it" if split.num_samples == 1 else "them"
        return f"{subject}: all {num_replicas} replicas compute {pronoun}, replica 0 counts {pronoun}"
    if num_replicas > MOST_SHOWN_ONE_BY_ONE:
        least, most = min(split.sizes), max(split.sizes)
        sizes = _count(most, "sample") if least == most else f"{least} to {most} samples"
        return f"{sizes} on each of {num_replicas} replicas"
    return " + ".join(str(size) for size in split.sizes) + (" samples" if split.num_samples != 1 else " sample")


def _readable_shares(shares: tuple[float, ...]) -> list[str]:
    """With three digits; or with more, where one that is not 1 would read 1."""
    for digits in range(3, 17):
        readable = [f"{share:.{digits}g}" for share in shares]
        if all((share == 1) == (text == "1") for share, text in zip(shares, readable)):
            break
    return readable


def readable_bytes(num_bytes: float) -> str:
    """Bytes in the unit that fits, such as "2.41 MB"."""
    for unit in ("bytes", "KB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"
