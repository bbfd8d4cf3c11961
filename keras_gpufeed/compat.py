"""Names of the old world, for code that still calls them.

Flow:   ... -> strategy -> promotion -> [compat] -> ...
Owns:   the old signatures.
Leaves: everything that they do now (promotion).
"""

from __future__ import annotations

import warnings
from typing import Any

import tensorflow as tf

from . import strategy as strategies
from .errors import StrategyError
from .promotion import distribute


def multi_gpu_model(
    model: tf.keras.Model, gpus: Any = None, cpu_merge: bool = True, cpu_relocation: bool = False
) -> tf.keras.Model:
    """Moves a model onto several devices, under the name and arguments of `keras.utils.multi_gpu_model`.

    Keras took that function out in 2.4. It returned a second model that shared the weights, to be compiled, while the
    first one was to be saved. Here both are the same object: what is compiled, trained and saved is `model`. As it
    did, `fit(x, y, batch_size=...)` splits each batch of `batch_size` samples among the devices.

    Args:
        model: Any Keras model.
        gpus: Number of devices, or a list of their numbers; None for all that can be seen. Virtual devices count
            where there are no GPUs.
        cpu_merge: Unused: outputs are not merged on any device.
        cpu_relocation: Unused: each device has its own copy of the weights.

    Returns:
        The same model.

    Raises:
        StrategyError: If there are not so many devices, or the model cannot be moved.

    Example:
        >>> import tensorflow as tf
        >>> import keras_gpufeed as kg
        >>> model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,))])
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     parallel_model = kg.compat.multi_gpu_model(model, gpus=2)
        >>> parallel_model is model, model.distribute_strategy.num_replicas_in_sync
        (True, 2)
    """
    warnings.warn(
        "multi_gpu_model is the old name. Write keras_gpufeed.distribute(model), or only "
        "model.fit(keras_gpufeed.DistributedFeeder(x, y, batch_size=...)), which moves the model itself.",
        DeprecationWarning,
        stacklevel=2,
    )
    return distribute(model, _strategy_for(gpus))


def _strategy_for(gpus: Any) -> tf.distribute.Strategy:
    if gpus is None:
        return strategies.get_strategy()
    if isinstance(gpus, (list, tuple)):
        kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
        return strategies.get_strategy([f"{kind}:{number}" for number in gpus])
    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1:
        raise StrategyError(f"gpus must be a number of devices or a list of their numbers. Received {gpus!r}.")
    return strategies.strategy_of(gpus)
