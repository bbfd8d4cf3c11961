"""Runs a feed without a model behind it.

Flow:   ... -> pipeline -> [measuring] -> feeder -> ...
Owns:   `FeedRates`, and taking batches for so many seconds.
Leaves: opening streams (feeder), counting (meter).
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Callable

import tensorflow as tf

from .charts import readable_bytes
from .pipeline import Pipeline


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


def measure(pipeline: Pipeline, open_stream: Callable[[int], Any], seconds: float) -> FeedRates:
    """Takes batches onto the devices and lets them go.

    Args:
        pipeline: What is measured.
        open_stream: Gives the stream of one pass, by its number.
        seconds: For how long.

    Returns:
        The rates, without the time to the first batch.
    """
    made: list = []
    transform_seconds, num_transforms, num_steps = 0.0, 0, 0
    began = stop_at = 0.0
    epoch = 0
    while not began or time.perf_counter() < stop_at:
        stream = open_stream(epoch)
        epoch += 1
        try:
            num_of_pass = 0
            for _ in pipeline.iterate(stream, monitored=True):
                num_of_pass += 1
                if not began:
                    began, num_of_pass = time.perf_counter(), 0  # Graphs were traced and buffers allocated.
                    stop_at = began + seconds
                elif time.perf_counter() >= stop_at:
                    break
            ended = time.perf_counter()
            if stream.failure is not None:
                stream.failure.raise_again()
        except tf.errors.OpError:
            if stream.failure is not None:
                stream.failure.raise_again()
            raise
        finally:
            stream.close()
            stream.failure = None  # Its traceback leads back to the user's data.
        meter = stream.meter
        made.extend(meter.batches_from(0))
        num_steps += num_of_pass
        transform_seconds += meter.transform_seconds
        num_transforms += meter.num_transforms
    return FeedRates(
        num_steps=num_steps,
        samples_per_step=sum(batch.num_samples for batch in made) / len(made),
        seconds=ended - began,
        source_seconds=sum(batch.source_seconds for batch in made) / len(made),
        copy_seconds=sum(batch.copy_seconds for batch in made) / len(made),
        transform_seconds=transform_seconds / num_transforms if num_transforms else 0.0,
        copied_bytes=sum(batch.copied_bytes for batch in made) / len(made),
    )
