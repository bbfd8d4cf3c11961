"""Trains any Keras model on every visible GPU from arrays, with the result of one GPU.

Example:
    >>> import keras_gpufeed as kg
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> x = np.random.default_rng(0).normal(size=(100, 3)).astype("float32")
    >>> model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    >>> model.compile("adam", "mse")
    >>> history = model.fit(kg.DistributedFeeder(x, x.sum(1), batch_size=32), epochs=2, verbose=0)
"""

import sys as _sys
import typing as _typing

__all__ = [
    "BatchPlan",
    "DistributedFeeder",
    "FeedError",
    "FeedMonitor",
    "FeedRates",
    "Model",
    "Rates",
    "ScaleLearningRate",
    "SourceError",
    "StrategyError",
    "Verdict",
    "WorkerError",
    "distribute",
    "get_strategy",
    "use_virtual_devices",
]

__version__ = "0.1.0"

# While Python looks for the program that `python -m` names, the first word is "-m". `python -m keras_gpufeed doctor`
# must answer where TensorFlow cannot be imported, and `plan` needs none: then whatever asks for a name imports it.
if _typing.TYPE_CHECKING or _sys.argv[:1] != ["-m"] or "__getattr__" in globals():
    from . import compat as compat
    from . import exact as _exact
    from . import internals as _internals
    from . import keras_entry as _keras_entry
    from . import strategy as _strategy
    from .callbacks import FeedMonitor
    from .errors import FeedError, SourceError, StrategyError, WorkerError
    from .feeder import DistributedFeeder
    from .learning_rate import ScaleLearningRate
    from .measuring import FeedRates
    from .model import Model
    from .plan import BatchPlan
    from .promotion import distribute
    from .strategy import get_strategy, use_virtual_devices
    from .verdict import Rates, Verdict

    _internals.keep_autograph_out()
    _internals.give_conversions()
    _exact.install()
    _keras_entry.install()
    _strategy.use_virtual_devices_of_environment()
else:

    def __getattr__(name: str) -> _typing.Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        importlib.reload(_sys.modules[__name__])  # It finds this function and imports everything.
        return globals()[name]
