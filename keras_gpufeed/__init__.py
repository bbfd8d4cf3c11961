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

_internals.keep_autograph_out()
_internals.give_conversions()
_exact.install()
_keras_entry.install()
_strategy.use_virtual_devices_of_environment()
