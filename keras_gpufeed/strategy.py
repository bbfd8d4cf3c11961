"""Decides which devices a model lives on.

Flow:   ... -> order -> internals -> [strategy] -> sources -> ...
Owns:   the choice of strategy, virtual devices, and which strategies can be served.
Leaves: moving a model there (promotion), splitting data (plan).
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import platform
import weakref
from collections.abc import Sequence

import tensorflow as tf

from . import internals
from .errors import StrategyError

_VIRTUAL_DEVICES_VARIABLE = "KERAS_GPUFEED_VIRTUAL_DEVICES"
_NO_NCCL_VARIABLE = "KERAS_GPUFEED_NO_NCCL"
_VIRTUAL_GPU_MEMORY_MB = 1024  # Enough for a test model; TensorFlow wants a limit when it splits a GPU.

_logger = logging.getLogger("keras_gpufeed")
_first_collective_keys = itertools.count(1000, 1000)
_strategies_with_own_keys: weakref.WeakSet = weakref.WeakSet()


def use_virtual_devices(n: int) -> None:
    """Splits the CPU, or the one GPU there is, into devices that stand in for several GPUs.

    Makes it possible to try, test and debug training on several replicas on any computer. The environment
    variable `KERAS_GPUFEED_VIRTUAL_DEVICES=n` does the same when the package is imported.

    Args:
        n: Number of devices, at least 1. A split GPU gives each device 1024 MB.

    Raises:
        StrategyError: If `n` is no positive integer, if there are several GPUs already, or if TensorFlow has
            started its devices with another number.

    Example:
        >>> import keras_gpufeed as kg
        >>> kg.use_virtual_devices(8)
        >>> kg.get_strategy().num_replicas_in_sync
        8
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise StrategyError(f"The number of virtual devices must be a positive integer. Received {n!r}.")
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) > 1:
        raise StrategyError(
            f"Virtual devices stand in for GPUs, but {len(gpus)} real ones are visible. "
            "Leave use_virtual_devices out, or hide the GPUs with CUDA_VISIBLE_DEVICES=-1."
        )
    kind = "GPU" if gpus else "CPU"
    if internals.devices_are_up():
        found = len(tf.config.list_logical_devices(kind))
        if found != n:
            raise StrategyError(
                f"Virtual devices were asked for too late: TensorFlow has started with {found} {kind} "
                f"device{'' if found == 1 else 's'}, and {n} were asked for. Call use_virtual_devices({n}) "
                f"before the first tensor, model or strategy, or set {_VIRTUAL_DEVICES_VARIABLE}={n} in the "
                "environment. In a notebook, restart the kernel."
            )
        return
    limit = _VIRTUAL_GPU_MEMORY_MB if gpus else None
    device = tf.config.list_physical_devices(kind)[0]
    configuration = [tf.config.LogicalDeviceConfiguration(memory_limit=limit) for _ in range(n)]
    tf.config.set_logical_device_configuration(device, configuration)


def use_virtual_devices_of_environment() -> None:
    """Obeys the environment variable `KERAS_GPUFEED_VIRTUAL_DEVICES`, if it is set."""
    number = os.environ.get(_VIRTUAL_DEVICES_VARIABLE)
    if number:
        if not number.isdigit() or int(number) < 1:
            raise StrategyError(
                f"The environment variable {_VIRTUAL_DEVICES_VARIABLE} must be a positive integer. Received {number!r}."
            )
        if internals.devices_are_up() and num_visible_devices() != int(number):
            raise StrategyError(
                f"{_VIRTUAL_DEVICES_VARIABLE}={number} is obeyed when keras_gpufeed is imported, but TensorFlow has "
                f"started with {num_visible_devices()} device(s) already. Import keras_gpufeed before anything that "
                "makes a tensor, a model or a strategy."
            )
        use_virtual_devices(int(number))


def num_visible_devices() -> int:
    """How many devices `get_strategy` would use, without starting them."""
    return len(visible_device_names())


def visible_device_names() -> tuple[str, ...]:
    """The devices that `get_strategy` would use, such as ("GPU:0", "GPU:1"), without starting them."""
    gpus = tf.config.list_physical_devices("GPU")
    physical = gpus or tf.config.list_physical_devices("CPU")
    number = sum(len(tf.config.get_logical_device_configuration(device) or [device]) for device in physical)
    return tuple(f"{'GPU' if gpus else 'CPU'}:{place}" for place in range(number))


def first_device() -> tuple[str]:
    """The name of the device on which TensorFlow computes where no strategy says otherwise."""
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return (devices[0].name,)


def get_strategy(devices: Sequence[str] | None = None) -> tf.distribute.Strategy:
    """The strategy that the package uses when it is not told otherwise.

    Args:
        devices: Names such as `["GPU:0", "GPU:2"]`; None for every visible GPU, or for every virtual device
            where there are no GPUs.

    Returns:
        A `MirroredStrategy` for two or more devices. For one device the default strategy, or a
        `OneDeviceStrategy` if the device was named. The same object for the same devices, so that models may
        share layers. Where TensorFlow has no NCCL (native Windows), or with the environment variable
        `KERAS_GPUFEED_NO_NCCL=1`, gradients travel by hierarchical copy.

    Raises:
        StrategyError: If a device does not exist or is named twice.

    Example:
        >>> import keras_gpufeed as kg
        >>> kg.get_strategy(["CPU:0", "CPU:3"]).num_replicas_in_sync
        2
    """
    if devices is None:
        visible = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        if len(visible) == 1:
            return tf.distribute.get_strategy()
        return _make_strategy(tuple(device.name for device in visible))
    is_list = isinstance(devices, (list, tuple)) and all(isinstance(device, str) for device in devices)
    if not is_list or not devices:
        raise StrategyError(
            'Devices must be a list of names such as ["GPU:0", "GPU:1"], or ["CPU:0"] for the CPU alone. '
            f"Received {devices!r}."
        )
    known = {_short_name(device.name): device.name for device in tf.config.list_logical_devices()}
    names = tuple(known.get(_short_name(device), "") for device in devices)
    if "" in names:
        raise StrategyError(
            f"There is no device {devices[names.index('')]!r}. TensorFlow sees {', '.join(sorted(known))}. "
            "Check the number, CUDA_VISIBLE_DEVICES and the driver."
        )
    if len(set(names)) < len(names):
        raise StrategyError(f"Each device may be named once. Received {list(devices)}.")
    return _make_strategy(names)


def strategy_of(num_replicas: int) -> tf.distribute.Strategy:
    """The strategy of the first devices that `get_strategy` would use.

    Args:
        num_replicas: How many of them.

    Raises:
        StrategyError: If there are not so many.
    """
    visible = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    if len(visible) < num_replicas:
        raise StrategyError(
            f"{num_replicas} devices were asked for, but {len(visible)} can be seen: "
            f"{', '.join(_short_name(device.name) for device in visible)}. Ask for fewer, or make more visible; "
            f"keras_gpufeed.use_virtual_devices({num_replicas}) tries it on a computer without GPUs."
        )
    return get_strategy([device.name for device in visible[:num_replicas]] if num_replicas < len(visible) else None)


@functools.cache
def _make_strategy(devices: tuple[str, ...]) -> tf.distribute.Strategy:
    if len(devices) == 1:
        return tf.distribute.OneDeviceStrategy(devices[0])
    # NCCL is not built for native Windows: public issue tensorflow/tensorflow#33656.
    no_nccl = platform.system() == "Windows" or os.environ.get(_NO_NCCL_VARIABLE) == "1"
    operations = tf.distribute.HierarchicalCopyAllReduce() if no_nccl else None
    strategy = tf.distribute.MirroredStrategy(list(devices), cross_device_ops=operations)
    prepare(strategy)
    return strategy


def prepare(strategy: tf.distribute.Strategy) -> None:
    """Checks that a strategy can be served and makes it safe beside others of the process.

    Args:
        strategy: Any strategy, the user's own included.

    Raises:
        StrategyError: If the package cannot feed models on such a strategy.
    """
    if internals.is_default(strategy) or isinstance(strategy, tf.distribute.OneDeviceStrategy):
        return
    if not isinstance(strategy, tf.distribute.MirroredStrategy):
        raise StrategyError(
            f"A feeder cannot serve a {type(strategy).__name__}. It serves MirroredStrategy, "
            "OneDeviceStrategy and models that live on no strategy. Build the model under one of these, or "
            "leave the strategy out: the feeder then moves the model onto every visible GPU."
        )
    if strategy not in _strategies_with_own_keys:
        internals.give_own_collective_keys(strategy, next(_first_collective_keys))
        _strategies_with_own_keys.add(strategy)


def describe_devices(strategy: tf.distribute.Strategy) -> str:
    """Devices in brief, such as "GPU:0-3"."""
    names = [_short_name(device) for device in internals.replica_devices(strategy)]
    kinds = {name.partition(":")[0] for name in names}
    numbers = [int(name.partition(":")[2]) for name in names]
    if len(kinds) == 1 and len(names) > 1 and numbers == list(range(numbers[0], numbers[0] + len(names))):
        return f"{names[0]}-{numbers[-1]}"
    return ", ".join(names)


def short_device_names(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Device of each replica, such as ("GPU:0", "GPU:1")."""
    return tuple(_short_name(device) for device in internals.replica_devices(strategy))


def _short_name(device: str) -> str:
    try:
        specification = tf.DeviceSpec.from_string(device if device.startswith("/") else f"/device:{device}")
    except ValueError:  # No name of a device; none is known by it.
        return device
    return f"{specification.device_type}:{specification.device_index or 0}"
