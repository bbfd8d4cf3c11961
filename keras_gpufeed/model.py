"""A Keras model that lives on every visible device.

Flow:   ... -> keras_entry -> [model]
Owns:   the `Model` subclass.
Leaves: moving (promotion), feeding (feeder), training (Keras).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from . import internals
from .keras_entry import feeder_of


class Model(tf.keras.Model):
    """`keras.Model`, functional or subclassed, on every visible device.

    Arrays, generators and other sources given to `fit`, `evaluate` and `predict` go through a `DistributedFeeder`;
    all arguments keep their meaning. The first such call moves the model onto the devices, unless it was made
    under a strategy of the user's.

    It is made as `keras.Model` is: with `inputs` and `outputs`, or by a subclass with layers of its own.

    Example:
        >>> import keras_gpufeed as kg
        >>> import numpy as np
        >>> import tensorflow as tf
        >>> inputs = tf.keras.Input((4,))
        >>> model = kg.Model(inputs, tf.keras.layers.Dense(1)(inputs))
        >>> model.compile("sgd", "mse")
        >>> x = np.ones((21, 4), "float32")
        >>> history = model.fit(x, x.sum(1), batch_size=10, verbose=0)
        >>> history.params["steps"], model.distribute_strategy.num_replicas_in_sync
        (3, 8)
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Model:
        """Makes a functional model where inputs and outputs are given, as `keras.Model` does."""
        if cls is Model and internals.are_functional_arguments(args, kwargs):
            return super().__new__(_Functional, *args, **kwargs)
        return super().__new__(cls, *args, **kwargs)

    def fit(self, x: Any = None, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As `keras.Model.fit`."""
        return _feed(super().fit, x, y, args, kwargs)

    def evaluate(self, x: Any = None, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As `keras.Model.evaluate`."""
        return _feed(super().evaluate, x, y, args, kwargs)

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """As `keras.Model.predict`."""
        return _feed(super().predict, x, None, args, kwargs)


def _feed(method: Any, x: Any, y: Any, args: tuple, kwargs: dict) -> Any:
    names = internals.argument_names(method)
    arguments = dict(zip(names, (x, y, *args) if "y" in names else (x, *args)), **kwargs)
    feeder = feeder_of(arguments)
    if feeder is not None:
        arguments["x"] = feeder
    return method(**arguments)


class _Functional(Model, internals.Functional):
    """A functional `Model`. It goes by Keras's own name, so that files saved from it load anywhere."""


_Functional.__name__ = _Functional.__qualname__ = internals.Functional.__name__
_Functional.__module__ = internals.Functional.__module__
