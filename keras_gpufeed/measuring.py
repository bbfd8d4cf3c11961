"""Runs a feed without a model behind it.

Flow:   ... -> pipeline -> [measuring] -> feeder -> ...
Owns:   `FeedRates`, and taking batches for so many seconds.
Leaves: opening streams (feeder), counting (meter).
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import tensorflow as tf

from .pipeline import Pipeline
from .plan import readable_bytes


@dataclasses.dataclass(frozen=True)
class FeedRates:
    """What a feed alone can do: no model takes part in the processor's time.

    Args:
        num_steps: Global batches taken.
        samples_per_step: Samples of a global batch.
        seconds: In which they were taken, from the first one on.
        source_seconds: Of the source for one batch: the user's code, storage, or the wait for a worker.
        copy_seconds: Of copying one batch on the host.
        transform_seconds: Of the transform of one batch; several may run at once.
        copied_bytes: Copied on the host for one batch.

    Example:
        >>> print(
        ...     FeedRates(
        ...         num_steps=200,
        ...         samples_per_step=256,
        ...         seconds=0.5,
        ...         source_seconds=0.0021,
        ...         copy_seconds=0.0001,
        ...         transform_seconds=0.0,
        ...         copied_bytes=803840,
        ...     )
        ... )
        102,400 samples/s: a batch every 2.5 ms
          source          2.1 ms for a batch
          copying         0.1 ms for a batch, 804 KB
    """

    num_steps: int
    samples_per_step: float
    seconds: float
    source_seconds: float
    copy_seconds: float
    transform_seconds: float
    copied_bytes: float

    @property
    def samples_per_second(self) -> float:
        """Over all replicas."""
        return self.samples_per_step / self.step_seconds

    @property
    def step_seconds(self) -> float:
        """From one global batch to the next."""
        return self.seconds / self.num_steps

    def __str__(self) -> str:
        lines = [f"{self.samples_per_second:,.0f} samples/s: a batch every {1e3 * self.step_seconds:.3g} ms"]
        if self.source_seconds:
            lines.append(f"  source          {1e3 * self.source_seconds:.3g} ms for a batch")
        if self.transform_seconds:
            lines.append(f"  transform       {1e3 * self.transform_seconds:.3g} ms for a batch")
        copied = f", {readable_bytes(self.copied_bytes)}" if self.copied_bytes else ", none needed"
        lines.append(f"  copying         {1e3 * self.copy_seconds:.3g} ms for a batch{copied}")
        return "\n".join(lines)


def measure(pipeline: Pipeline, stream: Any, seconds: float) -> FeedRates:
    """Takes batches onto the devices and lets them go.

    Args:
        pipeline: What is measured.
        stream: Gives batches for long enough.
        seconds: For how long to measure.

    Returns:
        The rates, without the beginning.
    """
    began = stop_at = ended = 0.0
    num_steps, num_early, num_before = 0, None, 0
    iterator = pipeline.iterate(stream, monitored=True, in_steps=False)
    # As in training: taken eagerly, the parts of a batch would cost more than all of the feed.
    take = tf.function(lambda iterator: _nothing_of(iterator.get_next()))
    try:
        while True:
            take(iterator)
            ended = time.perf_counter()
            num_steps += 1
            if began and ended >= stop_at:
                break
            # Batches that were made while graphs were traced and buffers allocated come faster than they can.
            num_early = num_early or stream.meter.num_batches
            if not began and num_steps >= num_early:
                began, stop_at, num_before, num_steps = ended, ended + seconds, num_steps, 0
    except tf.errors.OpError:
        if stream.failure is None:
            raise
    finally:
        stream.close()
    failure, stream.failure = stream.failure, None  # Its traceback leads back to the user's data.
    if failure is not None:
        failure.raise_again()
    meter = stream.meter
    made = meter.take_batches()[-(meter.num_batches - num_before) :]
    return FeedRates(
        num_steps=num_steps,
        samples_per_step=statistics.mean(batch.num_samples for batch in made),
        seconds=ended - began,
        source_seconds=statistics.mean(batch.source_seconds for batch in made),
        copy_seconds=statistics.mean(batch.copy_seconds for batch in made),
        transform_seconds=meter.transform_seconds / meter.num_transformed if meter.num_transformed else 0.0,
        copied_bytes=statistics.mean(batch.copied_bytes for batch in made),
    )


def _nothing_of(element: Any) -> None:
    """A step without a model."""
