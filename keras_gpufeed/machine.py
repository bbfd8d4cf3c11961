"""Looks at the machine while it trains.

Flow:   ... -> strategy -> [machine] -> ... -> callbacks -> ...
Owns:   what a report says of the machine; memory in use; how busy GPUs are, if NVIDIA's Python library is there.
Leaves: judging it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from . import internals
from .strategy import short_device_names


def num_processors() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe_machine(strategy: tf.distribute.Strategy) -> dict[str, str]:
    """What is worth knowing beside a measured rate.

    Args:
        strategy: Where the model lives.
    """
    described = {
        "System": f"{platform.system()}, {platform.machine()}",
        "Processors": str(num_processors()),
        "Python": platform.python_version(),
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
        "NumPy": np.__version__,
        "Strategy": type(strategy).__name__.strip("_"),
        "Devices": ", ".join(device_names(strategy)),
    }
    for device in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(device)
        described[device.name.rpartition("physical_device:")[2]] = str(details.get("device_name", "unknown"))
    return described


def device_names(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Device of each replica; the default strategy uses the first GPU, or the CPU."""
    if not internals.is_default(strategy):
        return short_device_names(strategy)
    return ("GPU:0",) if tf.config.list_logical_devices("GPU") else ("CPU:0",)


class MachineWatch:
    """Reads memory and utilisation.

    Args:
        devices: Names of the devices, such as "GPU:0".
    """

    def __init__(self, devices: tuple[str, ...]) -> None:
        self._gpus = [device for device in devices if device.startswith("GPU")]
        self._library = _nvidia_library() if self._gpus else None

    @property
    def has_gpus(self) -> bool:
        """True if there are GPUs to look at."""
        return bool(self._gpus)

    def memory(self) -> Iterator[tuple[str, float]]:
        """Bytes in use: of this process on the host, and on each GPU."""
        resident = _resident_bytes()
        if resident is not None:
            yield "host", resident
        for device in self._gpus:
            yield device, tf.config.experimental.get_memory_info(device)["current"]

    def utilisation(self) -> Iterator[tuple[str, float]]:
        """Per cent of the time for which each GPU had work, as its driver tells."""
        if self._library is not None:
            for device in self._gpus:
                number = int(device.rpartition(":")[2])
                handle = self._library.nvmlDeviceGetHandleByIndex(_physical_number(number))
                yield device, float(self._library.nvmlDeviceGetUtilizationRates(handle).gpu)


def _resident_bytes() -> int | None:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # Not Linux.
        return None


def _nvidia_library() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # A driver that does not answer is no reason to stop training.
        return None
    return pynvml


def _physical_number(number: int) -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    numbers = [int(word) for word in visible.split(",") if word.strip().isdigit()]
    return numbers[number] if number < len(numbers) else number
