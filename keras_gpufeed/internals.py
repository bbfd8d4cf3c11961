"""The one place that touches private parts of TensorFlow and Keras.

Flow:   errors -> plan -> order -> splitting -> stamps -> [internals] -> sources -> ...
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
from tensorflow.python.eager.polymorphic_function import autograph_util, polymorphic_function
from tensorflow.python.framework import composite_tensor, kernels, type_spec
from tensorflow.python.types import distribute as distribute_types
from tensorflow.python.util import nest

from .splitting import as_keras_does, part_of
from .stamps import step_stamps

Wrapper = Callable[[Callable], Callable]

# Where other files may step in, and why no public way does. `attach` wraps the function that stands there.
_PLACES: dict[str, tuple[Any, str]] = {
    # `fit`, `evaluate`, `predict`: Keras enters the model's strategy before it looks at the data, so a model
    # that lives on none must be moved one call earlier. All public, but assigned on a class that is not ours.
    "fit": (tf.keras.Model, "fit"),
    "evaluate": (tf.keras.Model, "evaluate"),
    "predict": (tf.keras.Model, "predict"),
    # One batch at a time, which Keras splits without exactness.
    "train_on_batch": (tf.keras.Model, "train_on_batch"),
    "test_on_batch": (tf.keras.Model, "test_on_batch"),
    "single_batch_iterator": (data_adapter, "single_batch_iterator"),
    # `BackupAndRestore` looks whether it stopped at the last step of an epoch, and fails where that is unknown.
    "initial_counters": (training.Model, "_maybe_load_initial_counters_from_ckpt"),
    # Keras refuses to compile a model that was moved and then got another layer.
    "compile": (tf.keras.Model, "compile"),
    # `BackupAndRestore` sets the first epoch and step on the handler after our adapter exists.
    "enumerate_epochs": (data_adapter.DataHandler, "enumerate_epochs"),
    # Keras finds the end of unknown data by running a step too many, and reads a variable for each step.
    "steps": (data_adapter.DataHandler, "steps"),
    # A step's shares travel beside its data and must be known inside the replicas.
    "run": (distribute_lib.StrategyBase, "run"),
    # A `tf.function` that is called inside a step takes up the step's shares when it is traced.
    "call_function": (polymorphic_function.Function, "__call__"),
    # Losses divide by it, because they assume even replicas; inside a step that is weighed here it reads 1.
    "num_replicas_in_sync": (distribute_lib.StrategyBase, "num_replicas_in_sync"),
    # The gradient is where a replica's loss is weighed: before layers that talk across replicas.
    "gradient": (tf.GradientTape, "gradient"),
    # It takes gradients in a loop of its own, in which replicas cannot meet.
    "jacobian": (tf.GradientTape, "jacobian"),
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


def forget_first_step(handler: data_adapter.DataHandler) -> None:
    """The next epoch begins at its beginning."""
    handler._initial_step = 0


def set_steps(handler: data_adapter.DataHandler, steps: int | None) -> None:
    """Tells Keras how many steps the coming epoch has; None if unknown."""
    handler._inferred_steps = steps


def steps_as_ready(handler: data_adapter.DataHandler, num_ready: Callable[[int], int]) -> Iterator[int]:
    """The steps of one epoch, as `DataHandler.steps` gives them, but only those for which there is data.

    Keras reads a variable for each step, to know how many run at once; only its tuner ever changes that.

    Args:
        handler: Keras's handler.
        num_ready: Takes the number of steps that Keras would run at once; gives how many of them there are.
    """
    handler._current_step, handler._initial_step = handler._initial_step, 0
    at_once = int(handler._steps_per_execution.numpy())
    is_tuned = handler._model.autotune_steps_per_execution
    while handler._inferred_steps is None or handler._current_step < handler._inferred_steps:
        if is_tuned:
            at_once = int(handler._steps_per_execution.numpy())
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


class FedElement(composite_tensor.CompositeTensor):
    """The data of one step with its shares beside it, on the way from the iterator to the replicas.

    In a loop of the user's it passes through a `tf.function` and may be unpacked: its parts know the shares too.

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

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, key: Any) -> FedElement:
        return FedElement(self.data[key], self.shares, self.predicting, self.small_tails, self.monitored)

    def __iter__(self) -> Iterator:
        return iter([self[key] for key in (self.data if isinstance(self.data, dict) else range(len(self.data)))])

    @property
    def _type_spec(self) -> _FedElementSpec:
        specs = nest.map_structure(type_spec.type_spec_from_value, (self.data, _or_nothing(self.shares)))
        return _FedElementSpec(*specs, self.predicting, self.small_tails, self.monitored)


def _or_nothing(shares: Any) -> Any:
    return () if shares is None else shares


class _FedElementSpec(type_spec.TypeSpec):
    """Lets the data of a step be an argument of a `tf.function`."""

    def __init__(self, data: Any, shares: Any, *flags: bool) -> None:
        self._specs, self._flags = (data, shares), flags

    value_type = property(lambda self: FedElement)
    _component_specs = property(lambda self: self._specs)

    def _serialize(self) -> tuple:
        return (*self._specs, *self._flags)

    def _to_components(self, value: FedElement) -> Any:
        return value.data, _or_nothing(value.shares)

    def _from_components(self, components: Any) -> FedElement:
        data, shares = components
        return FedElement(data, None if isinstance(shares, tuple) else shares, *self._flags)


class _FedOptional:
    """The next `FedElement`, if there is one; loops over an iterator in a `tf.function` ask for it.

    Args:
        inner: TensorFlow's: one, or a list of one for each device.
        make_element: Makes the element of what it holds.
    """

    def __init__(self, inner: Any, make_element: Callable) -> None:
        self._inner, self._make_element = inner, make_element

    def has_value(self) -> tf.Tensor:
        return tf.nest.flatten(self._inner)[0].has_value()

    def get_value(self) -> Any:
        return self._make_element(tf.nest.map_structure(lambda optional: optional.get_value(), self._inner))


class FeedIterator(composite_tensor.CompositeTensor, distribute_types.DistributedIteratorInterface):
    """Iterates the steps of a feed on several devices.

    The public way, `distribute_datasets_from_function`, fixes the buffers to one element and answers a
    finite data set with a branch that makes up empty batches.

    Args:
        inner: TensorFlow's iterator: of batches with how to split them; or of parts for each device in turn.
        devices: The devices to split batches for; empty if that has been done.
        even: True if parts go without shares.
        predicting: Passed on to the elements.
        small_tails: Passed on to the elements.
        monitored: True if steps note when they had their data, where devices have memory of their own, and when
            replicas had their gradients.
    """

    on_end: Callable[[], None] | None = None  # Called when the data has ended or failed; may raise.

    def __init__(
        self, inner: Any, devices: tuple[str, ...], even: bool, predicting: bool, small_tails: bool, monitored: bool
    ) -> None:
        self._inner, self._devices = inner, devices
        self._even, self._predicting, self._small_tails = even, predicting, small_tails
        self._monitored = monitored
        self._traces: dict[Any, Any] = {}  # Of the functions that are called with this iterator and nothing else.

    def call_with_self(self, function: Any, call: Callable) -> Any:
        """Calls a `tf.function` with this iterator as its only argument, eagerly.

        Training does so for every step. TensorFlow computes the types of the arguments each time to look up the
        trace for them, which takes it twice as long as to run a small step: here the trace is looked up once.

        Args:
            function: The `tf.function`.
            call: Calls it in TensorFlow's way.
        """
        key = function, tf.distribute.in_cross_replica_context()  # What a trace depends on besides its arguments.
        trace = self._traces.get(key)
        if trace is not None:
            return trace._call_flat([self._inner._iterator_resource], trace.captured_inputs)
        outputs = call(function, self)
        if hasattr(self._inner, "_iterator_resource"):  # Not of several devices with memory of their own.
            self._traces[key] = function.get_concrete_function(self)
        return outputs

    def __next__(self) -> Any:
        try:
            return self.get_next()
        except tf.errors.OpError as error:
            if self.on_end is not None:
                self.on_end()
            if isinstance(error, tf.errors.OutOfRangeError):
                raise StopIteration from None
            raise

    def __iter__(self) -> Iterator:
        return self

    def get_next(self) -> Any:
        """The next `FedElement`, or the plain data for one device; raises OutOfRangeError after the last."""
        if self._devices or not self._monitored:
            return self._make_element(self._inner.get_next())
        with tf.device("/device:CPU:0"):
            began = tf.timestamp()
        with tf.control_dependencies([] if tf.executing_eagerly() else [began]):
            elements = self._inner.get_next()
        return self._make_element(self._note_wait(began, elements))

    def _make_element(self, elements: Any) -> Any:
        if len(self._devices) == 1:
            return elements
        if self._devices:
            elements = [self._deal(replica, *elements) for replica in range(len(self._devices))]
        if len(elements) == 1:
            return elements[0]
        if self._even:
            return FedElement(regroup(elements), None, self._predicting, self._small_tails, self._monitored)
        data, shares = regroup(elements)
        return FedElement(data, shares, self._predicting, self._small_tails, self._monitored)

    def _note_wait(self, began: tf.Tensor, elements: Any) -> Any:
        flat = tf.nest.flatten(elements, expand_composites=True)
        now = step_stamps(len(elements)).note_wait(began, flat)
        if not tf.executing_eagerly():
            # Computing begins after the clock was read; else the reading waits for a thread that computes.
            with tf.control_dependencies([now]):
                flat = [_identity_where_it_is(tensor) for tensor in flat]
        return tf.nest.pack_sequence_as(elements, flat, expand_composites=True)

    def _deal(self, replica: int, batch: tuple, cut: tuple) -> Any:
        data, (parts, shares) = batch[0], cut
        with tf.device(self._devices[replica]):
            part = part_of(data, parts, replica)
            return part if self._even else (part, shares[replica])

    def get_next_as_optional(self) -> Any:
        """The next element, or that there is none; `for` loops in a `tf.function` use it."""
        return _FedOptional(self._inner.get_next_as_optional(), self._make_element)

    @property
    def element_spec(self) -> Any:
        """The type of one replica's data."""
        spec = self._inner.element_spec
        if len(self._devices) > 1:
            return as_keras_does(spec[0][0])
        return spec if self._devices or self._even else spec[0]

    @property
    def _type_spec(self) -> _FeedIteratorSpec:
        flags = (self._even, self._predicting, self._small_tails, self._monitored)
        return _FeedIteratorSpec(self._inner._type_spec, self._devices, *flags)


def _identity_where_it_is(tensor: tf.Tensor) -> tf.Tensor:
    with tf.device(tensor.device or None):
        return tf.identity(tensor)


class _FeedIteratorSpec(type_spec.TypeSpec):
    """Lets the iterator be an argument of a `tf.function`."""

    def __init__(self, inner: type_spec.TypeSpec, *flags: Any) -> None:
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
    """Iterates the steps of a feed, with `prefetch` of them made ahead.

    Args:
        dataset: Steps whole where `share_memory_with_host`; else their parts for one device after the other.
        devices: Of the replicas.
        prefetch: Global batches to make ahead; where devices have memory of their own, one of them is there.
        **flags: As for `FeedIterator`.
    """
    if share_memory_with_host(devices):
        return FeedIterator(iter(dataset.prefetch(prefetch)), devices, **flags)
    inner = multi_device_iterator_ops.OwnedMultiDeviceIterator(
        dataset,
        devices=devices,
        source_device="/device:CPU:0",
        max_buffer_size=max(prefetch - 1, 1),
        prefetch_buffer_size=min(prefetch, 1),
    )
    return FeedIterator(inner, (), **flags)


def share_memory_with_host(devices: tuple[str, ...]) -> bool:
    """True if tensors need no copy to get to any of the devices."""
    return all("GPU" not in device for device in devices)


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


def default_strategy() -> tf.distribute.Strategy:
    """The strategy that stands for "none", also inside the scope of another."""
    return distribute_lib._get_default_strategy()


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


def has_nccl() -> bool:
    """True if TensorFlow was built with NCCL, which it can be asked for in no public way."""
    registered = kernels.get_registered_kernels_for_op("NcclAllReduce")
    return any(kernel.device_type == "GPU" for kernel in registered.kernel)


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


def python_of(function: Any) -> Callable | None:
    """What a `tf.function` would trace; None for the functions of Keras and TensorFlow.

    Keras chooses the kernel of a recurrent layer by such a function, and a SavedModel is made of them.

    Args:
        function: The `tf.function`.
    """
    python_function = function.python_function
    module = getattr(python_function, "__module__", None) or ""
    if inspect.isroutine(python_function) and module.partition(".")[0] in ("keras", "tensorflow"):
        return None  # Not so for a model or a loss, which is callable but no function.
    if not function._autograph:
        return python_function
    return autograph_util.py_func_from_autograph(python_function, function._experimental_autograph_options)


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


def become(variable: tf.Variable, replacement: tf.Variable) -> None:
    """Turns `variable`, the object, into what `replacement` is.

    Whoever holds the object (layers, optimizer slots, closures of regularisers) then holds the replacement.
    Its name stays, and its unique id, by which optimizers find their slots. The first component keeps the memory, if
    it is on the right device: a `tf.function` of the user's that was traced before reads it by its handle.

    Args:
        variable: An ordinary variable.
        replacement: A variable of the same value made under a strategy: distributed, or an ordinary one on the
            device of a OneDeviceStrategy.
    """
    unique_id, handle, name = variable._unique_id, variable.handle, variable.name.partition(":")[0]
    components = replacement.values if is_distributed(replacement) else (replacement,)
    for replica, component in enumerate(components):
        component._handle_name = f"{name}/replica_{replica}:0" if replica else f"{name}:0"
    primary = components[0]
    if handle.device == primary.handle.device:
        primary._handle = handle
    primary._unique_id = unique_id
    variable.__class__ = type(replacement)
    variable.__dict__ = replacement.__dict__
    if is_distributed(variable):
        variable._common_name = name
        for component in components:  # They refer to their container.
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
        trainable = owner._compiled_trainable_state  # What was trainable when the model was compiled counts.
        owner._reset_compile_cache()  # Functions traced so far hold the old variables.
        owner._compiled_trainable_state.update(trainable)


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


class GuestCallback(LightCallback):
    """A callback whose hooks for steps are called only if another callback has such hooks.

    It takes Keras about 9 microseconds for each step to call hooks, if one of the callbacks has any.
    """

    def _implements_train_batch_hooks(self) -> bool:
        return False


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
