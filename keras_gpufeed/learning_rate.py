"""Scales the learning rate for larger batches, and warms it up.

Flow:   ... -> callbacks -> [learning_rate]
Owns:   `ScaleLearningRate`: the factor of each step, and the momentum that goes with it.
Leaves: the rate itself (the optimizer, its schedule, other callbacks).

After Goyal et al. 2017, "Accurate, Large Minibatch SGD": the rate grows with the batch (linear scaling), over the
first epochs (gradual warm-up), and where the velocity holds the rate, it is scaled along (momentum correction).
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from . import internals, keras_entry
from .errors import FeedError

_RULES = {"linear": lambda ratio: ratio, "sqrt": math.sqrt}


class ScaleLearningRate(internals.LightCallback):
    """Multiplies the learning rate for training on more replicas, step by step over the first epochs.

    For those who give every replica the batch that one had: then the global batch is larger by the number of
    replicas, and there are fewer steps. A `batch_size` that stays the same needs no other learning rate.

    The rate is scaled for the duration of each step only. Other callbacks (`LearningRateScheduler`,
    `ReduceLROnPlateau`, `ModelCheckpoint`) and saved files see the rate that the optimizer was given, and a
    `LearningRateSchedule` stays the schedule it is. The factor depends on the epoch and the step alone, so training
    that goes on from a backup goes on with it. Put it first among the callbacks; in `fit` with a feeder it is.

    With momentum in SGD, whose velocity holds the learning rate, the velocity is scaled by the same ratio whenever
    the factor changes. Adam's moments hold no rate.

    Args:
        base_replicas: The number of replicas that the optimizer's learning rate was chosen for.
        warmup_epochs: Epochs over which the factor grows from 1, a fraction of one included; 0 begins with all of it.
        rule: "linear": by the ratio of replicas; "sqrt": by its square root.

    Raises:
        FeedError: If an argument is out of range.

    Example:
        >>> import keras_gpufeed as kg
        >>> scaling = kg.ScaleLearningRate(base_replicas=1, warmup_epochs=5)
        >>> [scaling.factor_at(epoch, num_replicas=8) for epoch in (0, 2.5, 5, 90)]
        [1.0, 4.5, 8.0, 8.0]
    """

    goes_first = True

    def __init__(self, base_replicas: int = 1, warmup_epochs: float = 5, rule: str = "linear") -> None:
        super().__init__()
        if isinstance(base_replicas, bool) or not isinstance(base_replicas, int) or base_replicas < 1:
            raise FeedError(f"base_replicas must be a positive integer. Received {base_replicas!r}.")
        if isinstance(warmup_epochs, bool) or not isinstance(warmup_epochs, (int, float)) or warmup_epochs < 0:
            raise FeedError(f"warmup_epochs must be a number of at least 0. Received {warmup_epochs!r}.")
        if rule not in _RULES:
            raise FeedError(f'rule must be "linear" or "sqrt". Received {rule!r}.')
        self._base_replicas, self._warmup_epochs, self._rule = base_replicas, warmup_epochs, rule
        self._optimizer: Any = None
        self._factor: float | None = None  # Of the last step; None: unknown.
        self._multiplier: tf.Variable | None = None  # Of a schedule.
        self._given: float | None = None  # The rate that the step's was made from, while it lasts.

    def factor_at(self, epoch: float, num_replicas: int) -> float:
        """What the learning rate is multiplied by.

        Args:
            epoch: Where training stands, in epochs; 1.5 is in the middle of the second.
            num_replicas: Replicas in sync.
        """
        full = float(_RULES[self._rule](num_replicas / self._base_replicas))
        progress = min(1.0, epoch / self._warmup_epochs) if self._warmup_epochs else 1.0
        return 1.0 + (full - 1.0) * progress

    def on_train_begin(self, logs: Any = None) -> None:
        """Finds out how the optimizer of this `fit` holds its rate."""
        self._num_replicas = internals.num_replicas(self.model.distribute_strategy)
        self._steps_of_epoch: int | None = self.params.get("steps")
        optimizer = internals.unwrap_loss_scale(self.model.optimizer)
        if optimizer is not self._optimizer:
            self._optimizer, self._factor = optimizer, None
        schedule = internals.schedule_of(optimizer)
        self._multiplier = None
        if schedule is not None:
            if not hasattr(schedule, "step_factor"):
                schedule = _scalable(schedule)
                optimizer.learning_rate = schedule
                self.model.make_train_function(force=True)  # What was traced before knows nothing of the factor.
            self._multiplier = schedule.step_factor
        call = keras_entry.current_call()
        if call is not None:
            call.when_over.append(lambda error: self._give_back())

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remembers where training stands."""
        self._epoch, self._num_steps = epoch, 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """A source that does not say how many steps it has has shown it now."""
        if self.params.get("steps") is None:
            self._steps_of_epoch = self._num_steps

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Scales the rate for the step."""
        within = batch / self._steps_of_epoch if self._steps_of_epoch else 0.0
        factor = self.factor_at(self._epoch + within, self._num_replicas)
        if self._factor is None and (self._epoch or batch):  # Training goes on: the velocity has a step's rate in it.
            before = max(0.0, self._epoch + within - 1 / (self._steps_of_epoch or 1))
            self._factor = self.factor_at(before, self._num_replicas)
        if self._factor is not None and self._factor != factor:
            self._correct_momentum(factor / self._factor)
        self._factor = factor
        if self._multiplier is not None:
            self._multiplier.assign(factor)
        else:
            self._given = float(tf.keras.backend.get_value(self._optimizer.learning_rate))
            self._optimizer.learning_rate = self._given * factor

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Gives the rate back."""
        self._num_steps = batch + 1
        self._give_back()

    def _give_back(self) -> None:
        if self._multiplier is not None:
            self._multiplier.assign(1.0)
        elif self._given is not None:
            self._optimizer.learning_rate, self._given = self._given, None

    def _correct_momentum(self, ratio: float) -> None:
        for velocity in internals.velocities_of(self._optimizer, self.model.trainable_variables):
            velocity.assign(velocity * tf.cast(ratio, velocity.dtype))


def _scalable(schedule: tf.keras.optimizers.schedules.LearningRateSchedule) -> Any:
    """The schedule, multiplied by its variable `step_factor`; saved, it is the schedule that it was."""
    factor = tf.Variable(1.0, trainable=False, name="step_factor")

    def call(self: Any, step: Any) -> Any:
        rate = type(schedule).__call__(schedule, step)
        return rate * tf.cast(factor, rate.dtype)

    # Of a class of the same name, because Keras saves name and configuration, and knows its own by an attribute.
    members = {**vars(type(schedule)), "__call__": call}
    members.pop("__dict__", None)
    members.pop("__weakref__", None)
    scaled: Any = object.__new__(type(type(schedule).__name__, (type(schedule),), members))
    scaled.__dict__.update(vars(schedule), step_factor=factor)
    return scaled
