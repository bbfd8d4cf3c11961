"""The one place that touches private parts of TensorFlow and Keras.

Flow:   errors -> plan -> order -> stamps -> [internals] -> sources -> ...
Owns:   every import from `tensorflow.python` and `keras.src` and every use of their private attributes, each
        with its reason. Read in TensorFlow 2.15.1 and Keras 2.15.0; `setup.cfg` admits no other minor version.
Leaves: what to do at these places (exact, promotion, keras_entry), so that this file decides nothing.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Callable, cast

import numpy as np
import tensorflow as tf
from keras.src.engine import data_adapter, functional, keras_tensor, node, training
from keras.src.losses import Loss
from keras.src.metrics import base_metric
from keras.src.mixed_precision import autocast_variable
from keras.src.optimizers import optimizer as keras_optimizer
from keras.src.optimizers.legacy import optimizer_v2
from keras.src.saving.legacy.saved_model import load as saved_model_load
from keras.src.utils import losses_utils, metrics_utils
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.core import config as autograph_config
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.distribute import cross_device_utils, distribute_lib, distribute_utils, values
from tensorflow.python.eager import context
from tensorflow.python.framework import composite_tensor, type_spec
from tensorflow.python.types import distribute as distribute_types

from .stamps import step_stamps

Wrapper = Callable[[Callable], Callable]

# Where other files may step in, and why no public way does. `attach` wraps the function that stands there.
_PLACES: dict[str, tuple[Any, str]] = {
    # `fit`, `evaluate`, `predict`: Keras enters the model's strategy before it looks at the data, so a model
    # that lives on none must be moved one call earlier. All public, but assigned on a class that is not ours.
    "fit": (tf.keras.Model, "fit"),
    "evaluate": (tf.keras.Model, "evaluate"),
    "predict": (tf.keras.Model, "predict"),
    # Keras refuses to compile a model that was moved and then got another layer.
    "compile": (tf.keras.Model, "compile"),
    # `BackupAndRestore` sets the first epoch and step on the handler after our adapter exists.
    "enumerate_epochs": (data_adapter.DataHandler, "enumerate_epochs"),
    # Keras finds the end of unknown data by running a step too many.
    "steps": (data_adapter.DataHandler, "steps"),
    # A step's shares travel beside its data and must be known inside the replicas.
    "run": (distribute_lib.StrategyBase, "run"),
    # Losses divide by it, because they assume even replicas; inside a step that is weighed here it reads 1.
    "num_replicas_in_sync": (distribute_lib.StrategyBase, "num_replicas_in_sync"),
    # The gradient is where a replica's loss is weighed: before layers that talk across replicas.
    "gradient": (tf.GradientTape, "gradient"),
    "aggregate_gradients": (keras_optimizer.Optimizer, "aggregate_gradients"),
    "aggregate_gradients_legacy": (optimizer_v2.OptimizerV2, "_aggregate_gradients"),
    # A `Loss` object used by hand refuses its default reduction under any strategy.
    "get_reduction": (Loss, "_get_reduction"),
    # Sums and masked means need their samples counted over all replicas.
    "reduce_weighted_loss": (losses_utils, "reduce_weighted_loss"),
    "apply_valid_mask": (losses_utils, "apply_valid_mask"),
    "compute_average_loss": (tf.nn, "compute_average_loss"),
    # A metric that is given one number for the batch has to know how much of the step it speaks for.
    "update_reduction": (base_metric.Reduce, "update_state"),
    # Metrics are replica-local variables that are summed when read; a sample seen by every replica must be
    # added by one of them.
    "assign_on_read": (values.SyncOnReadVariable, "assign"),
    "assign_add_on_read": (values.SyncOnReadVariable, "assign_add"),
    "assign_sub_on_read": (values.SyncOnReadVariable, "assign_sub"),
}


def attach(place: str, wrapper: Wrapper) -> None:
    """Replaces the function at `place` by `wrapper(function)`.

    Args:
        place: A key of the table of places.
        wrapper: Takes the function (for a property, its getter) and returns the one to stand there.
    """
    owner, name = _PLACES[place]
    original = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    if isinstance(original, property):
        setattr(owner, name, property(wrapper(cast(Callable, original.fget)), doc=original.__doc__))
    else:
        setattr(owner, name, functools.wraps(original)(wrapper(original)))


# --- Data into `fit` ---------------------------------------------------------------------------------------

DataAdapter = data_adapter.DataAdapter
Functional = functional.Functional
are_functional_arguments = training.is_functional_model_init_params
unpack_x_y_sample_weight = data_adapter.unpack_x_y_sample_weight


def register_adapter(adapter: type) -> None:
    """Adds a class to the list from which `fit` picks the one that accepts its data. There is no public list."""
    data_adapter.ALL_ADAPTER_CLS.append(adapter)


def adapter_of(handler: data_adapter.DataHandler) -> data_adapter.DataAdapter:
    """The adapter that Keras made for the data of one call."""
    return handler._adapter


def epoch_range(handler: data_adapter.DataHandler) -> tuple[int, int, int]:
    """The epoch and step at which `fit` starts, after `BackupAndRestore` had its say, and the epoch it stops before."""
    return handler._initial_epoch, handler._initial_step, handler._epochs


def argument_names(method: Callable) -> list[str]:
    """The positional arguments of a bound Keras method."""
    return [
        name for name, argument in inspect.signature(method).parameters.items() if argument.kind != argument.VAR_KEYWORD
    ]


def set_steps(handler: data_adapter.DataHandler, steps: int | None) -> None:
    """Tells Keras how many steps the coming epoch has; None if unknown."""
    handler._inferred_steps = steps


def steps_as_ready(handler: data_adapter.DataHandler, num_ready: Callable[[int], int]) -> Iterator[int]:
    """The steps of one epoch, as `DataHandler.steps` gives them, but only those for which there is data.

    Args:
        handler: Keras's handler.
        num_ready: Takes the number of steps that Keras would run at once; gives how many of them there are.
    """
    handler._current_step, handler._initial_step = handler._initial_step, 0
    at_once = int(handler._steps_per_execution.numpy())
    while handler._inferred_steps is None or handler._current_step < handler._inferred_steps:
        wanted = at_once
        if handler._inferred_steps is not None:
            wanted = min(at_once, handler._inferred_steps - handler._current_step)
        ready = num_ready(wanted)
        if ready == 0:
            return
        if ready != at_once:
            handler._steps_per_execution.assign(ready)
        handler._step_increment = ready - 1
        yield handler._current_step
        handler._current_step += ready
        if ready != at_once:
            handler._steps_per_execution.assign(at_once)


def keras_would_take(x: Any, y: Any) -> bool:
    """True if stock Keras accepts `x` and `y` as arrays (not as a data set or a generator)."""
    return data_adapter.TensorLikeDataAdapter.can_handle(x, y) or data_adapter.ListsOfScalarsDataAdapter.can_handle(
        x, y
    )


class DistributedDataset(distribute_types.DistributedDatasetInterface):
    """Base of what an adapter hands to Keras; Keras distributes anything else once more."""


class FedElement:
    """The data of one step with its shares beside it, on the way from the iterator to the replicas.

    Args:
        data: Per-replica structure, as `train_step` is to get it.
        shares: Per-replica float64 of shape (3,): weight of the replica's means, scale of its sums, and 1 if
            its samples count (0 on the replicas of a small tail that repeat them). None if all steps are even.
        predicting: True if what the step returns are rows to concatenate.
        small_tails: True if a step may have fewer samples than replicas.
        monitored: True if the step is to note its times.
    """

    def __init__(self, data: Any, shares: Any, predicting: bool, small_tails: bool, monitored: bool) -> None:
        self.data, self.shares, self.predicting, self.small_tails = data, shares, predicting, small_tails
        self.monitored = monitored


class FeedIterator(composite_tensor.CompositeTensor, distribute_types.DistributedIteratorInterface):
    """Iterates a data set whose consecutive elements go to consecutive devices, with a buffer on each.

    The public way, `distribute_datasets_from_function`, fixes the buffers to one element and answers a
    finite data set with a branch that makes up empty batches.

    Args:
        inner: TensorFlow's iterator over the devices, or over the batches for the default strategy.
        even: True if elements are `data`, False if they are `(data, shares)`.
        predicting: Passed on to the elements.
        small_tails: Passed on to the elements.
        monitored: True if steps note how long they waited for data.
    """

    def __init__(self, inner: Any, even: bool, predicting: bool, small_tails: bool, monitored: bool) -> None:
        self._inner, self._even, self._predicting, self._small_tails = inner, even, predicting, small_tails
        self._monitored = monitored

    def __next__(self) -> Any:
        try:
            return self.get_next()
        except tf.errors.OutOfRangeError:
            raise StopIteration from None

    def __iter__(self) -> Iterator:
        return self

    def get_next(self) -> Any:
        """The next `FedElement`, or the plain data for one device; raises OutOfRangeError after the last."""
        if self._monitored:
            with tf.device("/device:CPU:0"):
                began = tf.timestamp()
            with tf.control_dependencies([] if tf.executing_eagerly() else [began]):
                elements = self._inner.get_next()
            elements = self._note_wait(began, elements)
        else:
            elements = self._inner.get_next()
        if not self._is_dealt:
            return elements
        if len(elements) == 1:
            return elements[0]
        if self._even:
            return FedElement(regroup(elements), None, self._predicting, self._small_tails, self._monitored)
        data, shares = regroup(elements)
        return FedElement(data, shares, self._predicting, self._small_tails, self._monitored)

    def _note_wait(self, began: tf.Tensor, elements: Any) -> Any:
        flat = tf.nest.flatten(elements, expand_composites=True)
        now = step_stamps(self._num_replicas(elements)).note_wait(began, flat)
        if not tf.executing_eagerly():
            # Computing begins after the clock was read; else the reading waits for a thread that computes.
            with tf.control_dependencies([now]):
                flat = [_identity_where_it_is(tensor) for tensor in flat]
        return tf.nest.pack_sequence_as(elements, flat, expand_composites=True)

    def _num_replicas(self, elements: Any) -> int:
        return len(elements) if self._is_dealt else 1

    @property
    def _is_dealt(self) -> bool:
        """False for the default strategy, whose iterator gives whole batches."""
        return isinstance(self._inner, multi_device_iterator_ops.OwnedMultiDeviceIterator)

    def get_next_as_optional(self) -> Any:
        """Not offered: a feeder knows its steps."""
        raise TypeError("The iterator of a feeder has no optional elements; it knows its steps.")

    @property
    def element_spec(self) -> Any:
        """The type of one replica's element."""
        return self._inner.element_spec

    @property
    def _type_spec(self) -> _FeedIteratorSpec:
        flags = (self._even, self._predicting, self._small_tails, self._monitored)
        return _FeedIteratorSpec(self._inner._type_spec, *flags)


def _identity_where_it_is(tensor: tf.Tensor) -> tf.Tensor:
    with tf.device(tensor.device or None):
        return tf.identity(tensor)


class _FeedIteratorSpec(type_spec.TypeSpec):
    """Lets the iterator be an argument of a `tf.function`."""

    def __init__(self, inner: type_spec.TypeSpec, *flags: bool) -> None:
        self._inner, self._flags = inner, flags

    value_type = property(lambda self: FeedIterator)
    _component_specs = property(lambda self: self._inner)

    def _serialize(self) -> tuple:
        return (self._inner, *self._flags)

    def _to_components(self, value: FeedIterator) -> Any:
        return value._inner

    def _from_components(self, components: Any) -> FeedIterator:
        return FeedIterator(components, *self._flags)


def iterate_on_devices(
    dataset: tf.data.Dataset, devices: tuple[str, ...], prefetch: int, **flags: bool
) -> FeedIterator:
    """Deals the elements of `dataset` to `devices`, with one of `prefetch` on each device and the rest on the host."""
    inner = multi_device_iterator_ops.OwnedMultiDeviceIterator(
        dataset,
        devices=devices,
        source_device="/device:CPU:0",
        max_buffer_size=max(prefetch - 1, 1),
        prefetch_buffer_size=min(prefetch, 1),
    )
    return FeedIterator(inner, **flags)


def timestamp_after(tensors: list) -> tf.Tensor:
    """When all of `tensors` are there, by a clock on the host.

    TensorFlow runs operations with side effects one after the other, in the order in which they were traced, and
    counts this one among them: without `run_independently`, which is not public, one replica's next random number
    would wait for the gradients of another.
    """
    with tf.control_dependencies(tensors):
        # Control alone would not wait for a GPU, only for the launch of its kernels; a value has to come over.
        sample = tf.reshape(tensors[0], [-1])[:1]
    with tf.device("/device:CPU:0"), tf.control_dependencies([tf.identity(sample)]):
        now = tf.timestamp()
    manager = tf.compat.v1.get_default_graph().experimental_acd_manager
    if manager is not None:  # In the body of a loop nothing is put in order.
        manager.run_independently(now.op)
    return now


# --- Strategies --------------------------------------------------------------------------------------------


def regroup(per_replica: Iterable) -> Any:
    """One value that stands for the given structures, one for each replica."""
    return distribute_utils.regroup(tuple(per_replica), always_wrap=True)


def local_values(value: Any) -> Any:
    """The tuple of values of a per-replica value, or None if `value` is the same on all replicas."""
    return value.values if isinstance(value, values.PerReplica) else None


def replica_devices(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Device of each replica that this process drives."""
    return tuple(strategy.extended.worker_devices)


def num_replicas(strategy: tf.distribute.Strategy) -> int:
    """Replicas in sync, also inside a step that is weighed."""
    return strategy.extended._num_replicas_in_sync


def is_default(strategy: tf.distribute.Strategy) -> bool:
    """True for the strategy that stands for "none"."""
    return isinstance(strategy, distribute_lib._DefaultDistributionStrategy)


def give_own_collective_keys(strategy: tf.distribute.Strategy, first_key: int) -> None:
    """Numbers the strategy's collectives from `first_key`.

    Every MirroredStrategy numbers its group of devices from 1; two of different size in one process then
    meet in the same group, and all later collectives of the process fail.
    """
    operations = strategy.extended._collective_ops
    if getattr(operations, "_collective_keys", None) is not None:
        keys = cross_device_utils.CollectiveKeys(group_key_start=first_key)
        operations.__init__(
            operations._devices,
            operations._group_size,
            operations._options,
            keys,
            operations._canonicalize_devices,
        )
        strategy.extended._collective_keys = keys


def devices_are_up() -> bool:
    """True once TensorFlow has started its devices; then their number cannot change."""
    return context.context()._initialized


def keep_autograph_out() -> None:
    """Makes AutoGraph call this package's functions as they are, as it does TensorFlow's, in whose place they stand."""
    rules = autograph_config.CONVERSION_RULES
    autograph_config.CONVERSION_RULES = (autograph_config.DoNotConvert("keras_gpufeed"), *rules)


def convert_for_graph(function: Callable) -> Callable:
    """Lets AutoGraph convert `function` as `Strategy.run` would have done with it."""
    return autograph.tf_convert(function, ag_ctx.control_status_ctx(), convert_by_default=False)


def no_tape_records() -> bool:
    """True if no `GradientTape` of this thread is recording."""
    return pywrap_tfe.TFE_Py_TapeSetIsEmpty()


def is_recording(tape: tf.GradientTape) -> bool:
    """True between a tape's `__enter__` and `__exit__`."""
    return tape._recording


# --- Variables and models ----------------------------------------------------------------------------------


def is_distributed(variable: tf.Variable) -> bool:
    """True if the variable has a component on each replica."""
    return isinstance(variable, values.DistributedVariable)


def give_conversions() -> None:
    """Lets a distributed variable be an int, a float or an array where a plain one can.

    TensorFlow leaves these out, so `int(model.optimizer.iterations)` in a callback would break by moving a model.
    """
    values.DistributedVariable.__int__ = lambda variable: int(variable.numpy())
    values.DistributedVariable.__float__ = lambda variable: float(variable.numpy())
    values.DistributedVariable.__array__ = lambda variable, dtype=None: np.asarray(variable.numpy(), dtype)


def unwrap_autocast(variable: tf.Variable) -> tf.Variable:
    """The variable inside mixed precision's casting wrapper; any other variable as it is."""
    return variable._variable if isinstance(variable, autocast_variable.AutoCastVariable) else variable


def become_distributed(variable: tf.Variable, replacement: tf.Variable) -> None:
    """Turns `variable`, the object, into what `replacement` is.

    Whoever holds the object (layers, optimizer slots, closures of regularisers) then holds the distributed
    variable. Its unique id stays, because optimizers find their slots by it, and the components' references
    to their container are pointed at it.
    """
    unique_id = variable._unique_id
    variable.__class__ = type(replacement)
    variable.__dict__ = replacement.__dict__
    variable._primary._unique_id = unique_id
    for component in variable.values:
        component.handle._distributed_container = weakref.ref(variable)


def refresh_autocast(wrapper: tf.Variable) -> None:
    """Gives a casting wrapper the class that Keras gives one around a distributed variable."""
    wrapper.__class__ = type(autocast_variable.create_autocast_variable(wrapper._variable))


def lives_on(owner: Any) -> tf.distribute.Strategy | None:
    """The strategy that a model or an optimizer was made under; None for the default one."""
    return getattr(owner, "_distribution_strategy", None)


def settle_on(owner: Any, strategy: tf.distribute.Strategy) -> None:
    """Records on a model or an optimizer that it lives on `strategy`; there is no public setter."""
    if hasattr(owner, "_distribution_strategy"):
        owner._distribution_strategy = strategy
    if isinstance(owner, tf.keras.Model):
        owner._reset_compile_cache()  # Functions traced so far hold the old variables.


def look_up_update_again(metric: Any) -> None:
    """Makes a metric find `update_state` anew: each binds it when it is made, maybe before this package was there."""
    if isinstance(metric, base_metric.Reduce) and base_metric.is_built_in(type(metric)):
        update = types.MethodType(type(metric).update_state, metric)

        def update_state_fn(*args: Any, **kwargs: Any) -> Any:
            return autograph.tf_convert(update, ag_ctx.control_status_ctx())(*args, **kwargs)

        metric.update_state = types.MethodType(metrics_utils.update_state_wrapper(update_state_fn), metric)


def sums(metric: Any) -> bool:
    """True for a metric that adds up its values and divides by nothing."""
    return metric.reduction == metrics_utils.Reduction.SUM


def children_of(owner: Any) -> list:
    """What `owner` holds in its attributes, private ones included; metrics of a model are in none that is public."""
    return list(vars(owner).values()) if hasattr(owner, "__dict__") else []


# --- Callbacks ---------------------------------------------------------------------------------------------


class LightCallback(tf.keras.callbacks.Callback):
    """A callback whose hooks for steps do not make Keras fetch the logs from the devices first."""

    _supports_tf_logs = True


def unwrap_loss_scale(optimizer: Any) -> Any:
    """The optimizer inside mixed precision's scaling wrapper; any other as it is."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def schedule_of(optimizer: Any) -> Any:
    """The learning-rate schedule of an optimizer; None if its rate is a number. Public is only the present rate."""
    is_legacy = isinstance(optimizer, optimizer_v2.OptimizerV2)
    rate = optimizer._hyper.get("learning_rate") if is_legacy else optimizer._learning_rate
    return rate if isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule) else None


def velocities_of(optimizer: Any, variables: list[tf.Variable]) -> list[tf.Variable]:
    """Slots of an optimizer that hold steps already multiplied by the learning rate.

    They are made if they are not there yet, because values restored from a backup wait for that. How to make them
    for legacy optimizers is not public, nor where RMSprop has them.
    """
    legacy = tf.keras.optimizers.legacy
    if isinstance(optimizer, (legacy.SGD, legacy.RMSprop)):
        optimizer._create_all_weights(variables)
        if "momentum" not in optimizer.get_slot_names():
            return []
        return [optimizer.get_slot(variable, "momentum") for variable in variables]
    if isinstance(optimizer, (tf.keras.optimizers.SGD, tf.keras.optimizers.RMSprop)):
        optimizer.build(variables)  # Does nothing the second time.
        return list(optimizer.momentums if isinstance(optimizer, tf.keras.optimizers.SGD) else optimizer._momentums)
    return []


def steps_per_execution(model: tf.keras.Model) -> int:
    """Steps that Keras runs inside one compiled call."""
    return 1 if model._steps_per_execution is None else int(model._steps_per_execution)


def train_writer_of(tensorboard: tf.keras.callbacks.TensorBoard) -> Any:
    """The writer of a TensorBoard callback for what concerns training; it is open while `fit` runs."""
    return tensorboard._train_writer


# Records of how a functional model was put together. They lead on to layers of other models.
GRAPH_RECORDS = (node.Node, keras_tensor.KerasTensor)


def is_revived(layer: Any) -> bool:
    """True for a layer whose class was unknown when a SavedModel was loaded.

    It runs stored functions that hold their variables by handle, so moving the variables would not reach them.
    """
    return isinstance(layer, (saved_model_load.RevivedLayer, saved_model_load.RevivedNetwork))
