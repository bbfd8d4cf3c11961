"""Makes N replicas compute what one device computes.

Flow:   ... -> promotion -> [exact] -> sources -> ...
Owns:   weighing gradients, losses, returned values and metrics by the samples each replica had.
Leaves: who gets which samples (plan), carrying shares beside the data (pipeline).

Inside a step that a feeder feeds, each replica computes as if it were the only device and its part the whole
batch: `num_replicas_in_sync` reads 1, so losses are means over the part. What leaves the replica is combined:

- A gradient of variables is weighed by samples of the replica / samples of the step, *inside* the tape (layers
  that talk across replicas then see the weighed loss), and summed over replicas at once. Whatever the step does
  with it afterwards (clipping, accumulating, two optimizers) is done to the one-device gradient.
- A loss that is a sum is first scaled to the mean's footing, so that the weights cancel.
- A scalar that the step returns is the weighted mean; anything longer is concatenated.
- In a small tail every replica has all samples and weighs 1/N, so all of this still holds; metrics and outputs
  are taken from replica 0 alone.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from . import internals
from .errors import FeedError
from .internals import FedElement, FeedIterator
from .stamps import step_stamps

_active = threading.local()


class _ReplicaStep:
    """What one replica knows of its part of the step while the step is traced or run."""

    def __init__(self, shares: Any, small_tails: bool, num_replicas: int, note_end: Any = None) -> None:
        self.note_end = note_end  # Takes the time at which this replica had its gradients, if somebody looks.
        if shares is None:
            # Double, as shares are: `tf.cast` of a Python number goes through single precision.
            self.weight = tf.constant(1.0 / num_replicas, tf.float64)
            self.sum_scale, self.counts = tf.constant(num_replicas, tf.float64), None
        else:
            self.weight, self.sum_scale = shares[0], shares[1]
            self.counts = shares[2] > 0 if small_tails else None
        self.graph = tf.compat.v1.get_default_graph()
        self.has_global_gradients = False
        self.has_local_gradients = False
        self.differentiates = False  # Within a gradient that is weighed, others are part of it.
        self.inner_gradients: list = []  # Those that another tape recorded: a replica's own.

    def can_merge(self) -> bool:
        """True where replicas may meet: not in a branch or loop that is traced on its own."""
        return (
            tf.compat.v1.get_default_graph() is self.graph
            or tf.__internal__.distribute.strategy_supports_no_merge_call()
        )

    @contextlib.contextmanager
    def differentiating(self) -> Iterator[None]:
        self.differentiates = True
        try:
            yield
        finally:
            self.differentiates = False

    def __enter__(self) -> _ReplicaStep:
        self._outer = _current_step()
        _active.step = self
        return self

    def __exit__(self, *exception: Any) -> None:
        _active.step = self._outer


def _current_step() -> _ReplicaStep | None:
    return getattr(_active, "step", None)


def install() -> None:
    """Takes its places in TensorFlow and Keras; without a fed step on the thread each does nothing."""
    internals.attach("run", _run)
    internals.attach("call_function", _call_function)
    internals.attach("num_replicas_in_sync", _num_replicas_in_sync)
    internals.attach("gradient", _gradient)
    internals.attach("jacobian", _jacobian)
    internals.attach("aggregate_gradients", _aggregate_gradients)
    internals.attach("aggregate_gradients_legacy", _aggregate_gradients)
    internals.attach("get_reduction", _get_reduction)
    internals.attach("reduce_weighted_loss", _reduce_weighted_loss)
    internals.attach("apply_valid_mask", _apply_valid_mask)
    internals.attach("compute_average_loss", _compute_average_loss)
    internals.attach("update_reduction", _update_reduction)
    internals.attach("assign_on_read", _assign)
    internals.attach("assign_add_on_read", _assign_difference)
    internals.attach("assign_sub_on_read", _assign_difference)


def agree_on_statistics(model: tf.keras.Model) -> None:
    """Gives all replicas the mean of the statistics that each has gathered from its own samples.

    Only BatchNormalization without `synchronized=True` gathers such. A saved file holds the mean, so the model
    evaluates after loading as before.

    Args:
        model: A model on any strategy.
    """
    if not model.built:
        return
    gathered = [
        variable
        for variable in map(internals.unwrap_autocast, model.non_trainable_variables)
        if internals.is_distributed(variable)
        and variable.synchronization == tf.VariableSynchronization.ON_READ
        and variable.aggregation == tf.VariableAggregation.MEAN
    ]
    with model.distribute_strategy.scope():
        for variable in gathered:
            variable.assign(variable.read_value())


# --- Entering and leaving the step -------------------------------------------------------------------------


def _run(original: Callable) -> Callable:
    def run(
        strategy: tf.distribute.Strategy,
        fn: Callable,
        args: Any = (),
        kwargs: Any = None,
        options: Any = None,
    ) -> Any:
        fed = _find_fed((args, kwargs))
        if fed is None:
            return original(strategy, fn, args, kwargs, options)
        converted = internals.convert_for_graph(fn)
        num_replicas = internals.num_replicas(strategy)

        ends: dict[int, tf.Tensor] = {}

        def replica_fn(replica: int, shares: Any, args: tuple, kwargs: dict) -> Any:
            note_end = functools.partial(ends.__setitem__, replica) if fed.monitored else None
            with _ReplicaStep(shares, fed.small_tails, num_replicas, note_end):
                return converted(*args, **kwargs)

        plain_args, plain_kwargs = tf.nest.map_structure(
            lambda arg: arg.data if isinstance(arg, FedElement) else arg, (tuple(args), kwargs or {})
        )
        replicas = internals.regroup(range(num_replicas))
        outputs = original(strategy, replica_fn, (replicas, fed.shares, plain_args, plain_kwargs), None, options)
        if len(ends) == num_replicas:
            step_stamps(num_replicas).note_ends([ends[replica] for replica in range(num_replicas)])
        return _combine(outputs, fed, num_replicas)

    return run


def _find_fed(value: Any) -> FedElement | None:
    """The first fed element in the arguments, whatever else they hold: `tf.nest` refuses some dicts of users."""
    if isinstance(value, (tuple, list, dict)):
        items = value.values() if isinstance(value, dict) else value
        return next((found for found in map(_find_fed, items) if found is not None), None)
    return value if isinstance(value, FedElement) else None


def _combine(outputs: Any, fed: FedElement, num_replicas: int) -> Any:
    if fed.shares is None:
        shares: list = [None] * num_replicas
    else:
        shares = list(internals.local_values(fed.shares))
    steps = [_ReplicaStep(share, fed.small_tails, num_replicas) for share in shares]

    def combine(output: Any) -> Any:
        values = internals.local_values(output)
        if values is None:  # The same on all replicas: a metric's result.
            return output
        values = [tf.convert_to_tensor(value) if isinstance(value, np.generic) else value for value in values]
        if not _is_scalar(values[0]):
            values = [
                value if step.counts is None else _rows_that_count(value, step) for value, step in zip(values, steps)
            ]
            if isinstance(values[0], tf.SparseTensor):  # Keras cannot put these together.
                return tf.sparse.concat(0, list(values))
            return internals.regroup(values) if fed.predicting else tf.concat(values, axis=0)
        if values[0].dtype in (tf.bool, tf.string):
            return values[0]
        if values[0].dtype.is_floating:
            values = [value * tf.cast(step.weight, value.dtype) for value, step in zip(values, steps)]
        elif values[0].dtype.is_integer:
            values = [
                value if step.counts is None else value * tf.cast(step.counts, value.dtype)
                for value, step in zip(values, steps)
            ]
        return internals.regroup(values)  # Keras sums what it is given for each replica.

    return tf.nest.map_structure(combine, outputs)


def _is_scalar(value: Any) -> bool:
    """True for one number; what has no known rank, such as what `tf.py_function` returns, is taken for one."""
    return isinstance(value, tf.Tensor) and value.shape.rank in (0, None)


def _rows_that_count(value: Any, step: _ReplicaStep) -> Any:
    if isinstance(value, tf.SparseTensor):
        counted = value.dense_shape * tf.concat(
            [[tf.cast(step.counts, tf.int64)], tf.ones_like(value.dense_shape[1:])], axis=0
        )
        return tf.sparse.slice(value, tf.zeros_like(counted), counted)
    num_rows = value.nrows() if isinstance(value, tf.RaggedTensor) else tf.shape(value)[0]
    return value[: num_rows * tf.cast(step.counts, num_rows.dtype)]


def _call_function(original: Callable) -> Callable:
    """A `tf.function` of the user's becomes part of the step.

    On its own it would keep the shares of the step that traced it, and replicas cannot meet in it.
    """

    def call_function(function: Any, *args: Any, **kwargs: Any) -> Any:
        if _current_step() is None:
            if len(args) == 1 and type(args[0]) is FeedIterator and not kwargs and _runs_traces():
                return args[0].call_with_self(function, original)
            return original(function, *args, **kwargs)
        python_function = internals.python_of(function)
        if python_function is None:
            return original(function, *args, **kwargs)
        if function.input_signature is not None:  # It says what Python numbers become.
            given = args[: len(function.input_signature)]
            args = (*map(_as_signed, given, function.input_signature), *args[len(given) :])
        return tf.nest.map_structure(_as_tensor, python_function(*args, **kwargs))

    return call_function


def _runs_traces() -> bool:
    return tf.executing_eagerly() and not tf.config.functions_run_eagerly()


def _as_signed(value: Any, spec: Any) -> Any:
    if not isinstance(spec, tf.TensorSpec) or tf.is_tensor(value):
        return value
    return tf.convert_to_tensor(value, spec.dtype)


def _as_tensor(output: Any) -> Any:
    return output if output is None or tf.is_tensor(output) else tf.convert_to_tensor(output)


def _num_replicas_in_sync(original: Callable) -> Callable:
    def num_replicas_in_sync(strategy: tf.distribute.Strategy) -> int:
        return original(strategy) if _current_step() is None else 1

    return num_replicas_in_sync


# --- Gradients ---------------------------------------------------------------------------------------------


def _gradient(original: Callable) -> Callable:
    def gradient(
        tape: tf.GradientTape,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        step = _current_step()
        flat_sources = tf.nest.flatten(sources)
        are_variables = [isinstance(source, tf.Variable) for source in flat_sources]
        if step is None or step.differentiates or not any(are_variables):
            return original(tape, target, sources, output_gradients, unconnected_gradients)
        if _is_inner(tape):
            gradients = original(tape, target, sources, output_gradients, unconnected_gradients)
            step.inner_gradients.extend(gradient for gradient in tf.nest.flatten(gradients) if gradient is not None)
            return gradients
        targets = tf.nest.flatten(target)
        given = [None] * len(targets) if output_gradients is None else tf.nest.flatten(output_gradients)
        if all(are_variables):
            weights = [_weight(step, one, gradient) for one, gradient in zip(targets, given)]
            with step.differentiating():
                gradients = original(tape, targets, sources, weights, unconnected_gradients)
            flat = tf.nest.flatten(gradients)
        else:  # The gradients by inputs are the replica's own, so the others are weighed afterwards.
            with step.differentiating():
                gradients = original(tape, targets, sources, output_gradients, unconnected_gradients)
            scale = step.weight * (_sum_scale(step, targets[0]) if given[0] is None else 1.0)
            flat = [
                _scaled(gradient, scale) if is_variable else gradient
                for gradient, is_variable in zip(tf.nest.flatten(gradients), are_variables)
            ]
        if step.note_end is not None and not tf.executing_eagerly():
            _note_end(step, flat)
        if not step.can_merge():
            step.has_local_gradients = True
            return tf.nest.pack_sequence_as(gradients, flat)
        step.has_global_gradients = True
        places = [place for place, is_variable in enumerate(are_variables) if is_variable]
        summed = _sum_over_replicas([flat[place] for place in places], [flat_sources[place] for place in places])
        for place, gradient in zip(places, summed):
            flat[place] = gradient
        return tf.nest.pack_sequence_as(gradients, flat)

    return gradient


def _note_end(step: _ReplicaStep, gradients: list) -> None:
    """Reads the clock when a replica has its gradients; not inside a function of the user's or of XLA."""
    tensors = [
        gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        for gradient in gradients
        if gradient is not None
    ]
    if tensors and tf.compat.v1.get_default_graph() is step.graph:
        step.note_end(internals.timestamp_after(tensors))


def _is_inner(tape: tf.GradientTape) -> bool:
    """True if another tape records this gradient, so that it enters a loss, as a penalty does."""
    if not internals.is_recording(tape):
        return not internals.no_tape_records()
    with tape.stop_recording():
        return not internals.no_tape_records()


def _jacobian(original: Callable) -> Callable:
    """A replica's own; if it ends in an optimizer, that weighs it."""

    def jacobian(tape: tf.GradientTape, *args: Any, **kwargs: Any) -> Any:
        step = _current_step()
        if step is None:
            return original(tape, *args, **kwargs)
        with step.differentiating():
            return original(tape, *args, **kwargs)

    return jacobian


def _sum_scale(step: _ReplicaStep, target: Any) -> Any:
    """What brings `target` to the footing of a mean: several losses are differentiated as their sum."""
    tensor = tf.convert_to_tensor(target)
    size = tensor.shape.num_elements()
    if size is None and tensor.shape.rank is None:
        return tf.where(tf.equal(tf.size(tensor), 1), tf.ones_like(step.sum_scale), step.sum_scale)
    return tf.ones_like(step.sum_scale) if size == 1 else step.sum_scale


def _scaled(gradient: Any, scale: Any) -> Any:
    if gradient is None:
        return None
    scale = tf.cast(scale, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * scale, gradient.indices, gradient.dense_shape)
    return gradient * scale


def _weight(step: _ReplicaStep, target: Any, given: Any) -> Any:
    """The gradient that flows into `target`.

    What is given comes from a loss further on, which is the mean over the replica's samples.
    """
    tensor = tf.convert_to_tensor(target)
    if given is not None:
        return tf.cast(step.weight, tensor.dtype) * given
    return tf.cast(step.weight * _sum_scale(step, tensor), tensor.dtype) * tf.ones_like(tensor)


def _sum_over_replicas(gradients: list, variables: list) -> list:
    pairs = [pair for pair in zip(gradients, variables) if pair[0] is not None]
    if not pairs:
        return gradients
    replica_context = tf.distribute.get_replica_context()
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        summed = replica_context.all_reduce(tf.distribute.ReduceOp.SUM, [gradient for gradient, _ in pairs])
    else:
        summed = replica_context.merge_call(_batch_sum, args=(pairs,))
    remaining = iter(summed)
    return [None if gradient is None else next(remaining) for gradient in gradients]


def _batch_sum(strategy: tf.distribute.Strategy, pairs: list) -> list:
    return strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)


def _aggregate_gradients(original: Callable) -> Callable:
    def aggregate_gradients(optimizer: Any, grads_and_vars: Any) -> Any:
        step = _current_step()
        grads_and_vars = list(grads_and_vars)
        if step is None or (step.has_local_gradients and not step.has_global_gradients):
            return original(optimizer, grads_and_vars)
        if step.has_local_gradients:
            raise FeedError(
                "This train_step takes gradients both inside and outside of a tf.cond, tf.while_loop or "
                "tf.range loop; they cannot be combined over replicas in one step. Take all of them inside, "
                "or all of them outside."
            )
        are_inner = [any(gradient is inner for inner in step.inner_gradients) for gradient, _ in grads_and_vars]
        if step.has_global_gradients and not any(are_inner):
            return grads_and_vars
        # The gradient came from somewhere else than a tape, so it is weighed here.
        weighed = [(_scaled(gradient, step.weight), variable) for gradient, variable in grads_and_vars]
        return original(optimizer, weighed)

    return aggregate_gradients


# --- Losses ------------------------------------------------------------------------------------------------


def _get_reduction(original: Callable) -> Callable:
    def get_reduction(loss: tf.keras.losses.Loss) -> str:
        automatic = tf.keras.losses.Reduction.AUTO
        if _current_step() is None:
            return original(loss)
        return tf.keras.losses.Reduction.SUM_OVER_BATCH_SIZE if loss.reduction == automatic else loss.reduction

    return get_reduction


def _reduce_weighted_loss(original: Callable) -> Callable:
    def reduce_weighted_loss(
        weighted_losses: tf.Tensor, reduction: str = tf.keras.losses.Reduction.SUM_OVER_BATCH_SIZE
    ) -> tf.Tensor:
        loss = original(weighted_losses, reduction)
        step = _current_step()
        if step is not None and reduction == tf.keras.losses.Reduction.SUM:
            loss *= tf.cast(step.sum_scale, loss.dtype)
        return loss

    return reduce_weighted_loss


def _compute_average_loss(original: Callable) -> Callable:
    def compute_average_loss(
        per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
    ) -> tf.Tensor:
        loss = original(per_example_loss, sample_weight, global_batch_size)
        step = _current_step()
        if step is not None and global_batch_size is not None:  # Then it is a sum over a constant.
            loss *= tf.cast(step.sum_scale, loss.dtype)
        return loss

    return compute_average_loss


def _apply_valid_mask(original: Callable) -> Callable:
    def apply_valid_mask(losses: tf.Tensor, sw: Any, mask: Any, reduction: str) -> Any:
        step = _current_step()
        if step is None or mask is None or not step.can_merge():
            return original(losses, sw, mask, reduction)
        # The mean over valid entries divides by their number, which must be that of the whole step: the mask
        # is scaled from the replica's own total / valid to the step's.
        valid_mask = tf.cast(mask, losses.dtype)
        own = tf.stack([tf.cast(tf.size(mask), losses.dtype), tf.reduce_sum(valid_mask)])
        whole = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, own)
        weights = original(losses, sw, mask, reduction)
        if reduction == tf.keras.losses.Reduction.SUM_OVER_BATCH_SIZE:
            ratio = tf.math.divide_no_nan(whole[0] * own[1], whole[1] * own[0])
            weights = tf.where(own[1] > 0, weights * ratio, tf.zeros_like(weights))
        return weights

    return apply_valid_mask


# --- Metrics -----------------------------------------------------------------------------------------------


def _counting_step(variable: tf.Variable) -> _ReplicaStep | None:
    """The step, if it may be a small tail and `variable` collects what replicas add up."""
    step = _current_step()
    if step is None or step.counts is None or variable.aggregation == tf.VariableAggregation.MEAN:
        return None
    return step


def _update_reduction(original: Callable) -> Callable:
    def update_state(metric: Any, values: Any, sample_weight: Any = None) -> Any:
        step = _current_step()
        if step is not None and sample_weight is None and not internals.sums(metric):
            number = tf.convert_to_tensor(values) if not isinstance(values, tf.RaggedTensor) else values
            # One number for the whole batch: a loss. It weighs as much as the samples it is the mean of.
            if number.dtype.is_floating and number.shape.rank in (0, None):
                sample_weight = 1.0 / tf.cast(step.sum_scale, number.dtype)
                if number.shape.rank is None:
                    sample_weight = tf.where(tf.equal(tf.rank(number), 0), sample_weight, tf.ones_like(sample_weight))
        return original(metric, values, sample_weight)

    return update_state


def _assign(original: Callable) -> Callable:
    def assign(variable: tf.Variable, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not tf.is_tensor(value):
            value = tf.convert_to_tensor(value, variable.dtype)  # From a weights file: TensorFlow divides it.
        step = _counting_step(variable)
        if step is not None:
            value = tf.where(step.counts, tf.cast(value, variable.dtype), variable.read_value())
        return original(variable, value, *args, **kwargs)

    return assign


def _assign_difference(original: Callable) -> Callable:
    def assign_difference(variable: tf.Variable, delta: Any, *args: Any, **kwargs: Any) -> Any:
        step = _counting_step(variable)
        if step is not None:
            delta = tf.cast(delta, variable.dtype)
            delta = tf.where(step.counts, delta, tf.zeros_like(delta))
        return original(variable, delta, *args, **kwargs)

    return assign_difference
