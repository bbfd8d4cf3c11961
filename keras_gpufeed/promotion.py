"""Moves an existing model onto a strategy, in place.

Flow:   ... -> strategy -> [promotion] -> exact -> sources -> ...
Owns:   finding every variable of a model and turning it, the object, into a distributed one.
Leaves: choosing the strategy (strategy), feeding (pipeline).
"""

from __future__ import annotations

import logging
import types
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from . import internals
from . import strategy as strategies
from .errors import StrategyError

_logger = logging.getLogger("keras_gpufeed")
_moved: weakref.WeakSet = weakref.WeakSet()  # Models that live on several devices because of this package.

_LEAVES = (str, bytes, int, float, type(None), type, types.ModuleType, *internals.GRAPH_RECORDS)


def distribute(model: tf.keras.Model, strategy: tf.distribute.Strategy | None = None) -> tf.keras.Model:
    """Moves a model onto every visible device, in place.

    The model stays the same object with the same variable objects, so everything that refers to them stays
    right: shared layers, closures of regularisers and losses, optimizer slots, metrics. Weights, optimizer
    state and the iteration count are kept. Saved, the model loads in a program without keras_gpufeed.

    `fit`, `evaluate` and `predict` do this on their own when they are handed a feeder.

    Args:
        model: A Keras model of any kind: built or not, compiled or not, trained or not.
        strategy: Where to move it; `get_strategy()` if None.

    Returns:
        The same model.

    Raises:
        StrategyError: If the strategy cannot be served, the model lives on another one, or the model was
            loaded from a SavedModel without its class.

    Example:
        >>> import keras_gpufeed as kg
        >>> import tensorflow as tf
        >>> model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,))])
        >>> kernel = model.layers[0].kernel
        >>> kg.distribute(model).distribute_strategy.num_replicas_in_sync
        8
        >>> model.layers[0].kernel is kernel
        True
    """
    if not isinstance(model, tf.keras.Model):
        raise StrategyError(f"Only a Keras model can be moved. Received an object of type {type(model).__name__}.")
    if strategy is None:
        strategy = internals.lives_on(model) or strategies.get_strategy()
    strategies.prepare(strategy)
    home = internals.lives_on(model)
    if internals.is_default(strategy):
        return model
    if home is not None and home is not strategy:
        raise StrategyError(
            f"The model lives on a strategy of {home.num_replicas_in_sync} replica(s) already and cannot be "
            f"moved to one of {strategy.num_replicas_in_sync}. Save it and load it again, or rebuild it, "
            "outside any strategy scope."
        )
    if home is None:
        _moved.add(model)
    _move(model, strategy)
    return model


def was_moved(model: tf.keras.Model) -> bool:
    """True if `distribute` moved the model, so that its user need not know that it lives on several devices.

    Args:
        model: Any model.
    """
    return model in _moved


def _move(model: tf.keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Moves what is not on the strategy yet: all of a model, or what was added to it since."""
    owners: list = []
    variables: list[tf.Variable] = []
    for found in _walk(model):
        (variables if isinstance(found, tf.Variable) else owners).append(found)
    is_first = internals.lives_on(model) is not strategy
    _check(owners if is_first else [], variables, strategy)
    on_several = isinstance(strategy, tf.distribute.MirroredStrategy)
    to_move = variables if is_first or on_several else []
    to_move = [variable for variable in to_move if not internals.is_distributed(internals.unwrap_autocast(variable))]
    _move_variables(to_move, strategy)
    for owner in owners:
        internals.look_up_update_again(owner)
        if to_move or internals.lives_on(owner) is not strategy:
            internals.settle_on(owner, strategy)
    if is_first and strategy.num_replicas_in_sync > 1:
        _warn_of_own_statistics(owners)


def _warn_of_own_statistics(owners: list) -> None:
    names = [
        owner.name
        for owner in owners
        if isinstance(owner, tf.keras.layers.BatchNormalization) and not owner.synchronized
    ]
    if names:
        _logger.warning(
            "%d BatchNormalization layer(s) (%s%s) normalise with each replica's own samples, so results "
            "differ from one device. BatchNormalization(synchronized=True) uses the global batch.",
            len(names),
            ", ".join(names[:3]),
            ", ..." if len(names) > 3 else "",
        )


def variables_of(model: tf.keras.Model) -> list[tf.Variable]:
    """Every variable that a model holds, those of its optimizer and its metrics included.

    Args:
        model: Any model.
    """
    return [each for each in _walk(model) if isinstance(each, tf.Variable)]


def move_along(things: Any, strategy: tf.distribute.Strategy) -> None:
    """Moves the variables of what is given to a model that was moved: metrics, optimizers.

    Args:
        things: Any objects, in tuples, lists and dicts.
        strategy: Where the model lives.
    """
    if isinstance(strategy, tf.distribute.MirroredStrategy):
        found = list(_walk(things))
        _move_variables([each for each in found if isinstance(each, tf.Variable)], strategy)
        for each in found:
            if not isinstance(each, tf.keras.Model):
                internals.settle_on(each, strategy)


def follow_shared_layers(model: tf.keras.Model) -> None:
    """Moves a model that shares a layer with one that was moved; what it had traced would go on with old variables.

    Args:
        model: Any model.
    """
    if internals.lives_on(model) is not None or not model.built:
        return
    for variable in map(internals.unwrap_autocast, model.variables):
        if internals.is_distributed(variable):
            distribute(model, variable.distribute_strategy)
            return


def _move_variables(variables: list[tf.Variable], strategy: tf.distribute.Strategy) -> None:
    with strategy.scope():
        for variable in variables:
            inner = internals.unwrap_autocast(variable)
            if not internals.is_distributed(inner):  # Else two wrappers hold the same one.
                _move_variable(inner, strategy)
            if inner is not variable:
                internals.refresh_autocast(variable)


def _check(owners: list, variables: list[tf.Variable], strategy: tf.distribute.Strategy) -> None:
    for owner in owners:
        if internals.is_revived(owner):
            raise StrategyError(
                f"Layer {owner.name!r} was loaded from a SavedModel without its class, so it runs stored "
                "functions that cannot be moved. Load the model inside `with keras_gpufeed.get_strategy()"
                ".scope():`, or pass its class to load_model(custom_objects=...)."
            )
    for variable in variables:
        inner = internals.unwrap_autocast(variable)
        if internals.is_distributed(inner) and inner.distribute_strategy is not strategy:
            raise StrategyError(
                f"Variable {variable.name!r} lives on another strategy already; the model shares a layer "
                "with a model that was moved there. Pass that strategy to distribute(model, strategy)."
            )


def _move_variable(variable: tf.Variable, strategy: tf.distribute.Strategy) -> None:
    replacement = tf.Variable(
        initial_value=variable.read_value(),
        trainable=variable.trainable,
        name="moved",  # TensorFlow prepares an operation for each name, which takes most of the time.
        dtype=variable.dtype,
        constraint=variable.constraint,
        synchronization=variable.synchronization,
        aggregation=variable.aggregation,
        shape=variable.shape,
    )
    internals.become(variable, replacement)
    if (
        internals.is_distributed(variable)
        and variable.synchronization == tf.VariableSynchronization.ON_READ
        and variable.aggregation == tf.VariableAggregation.SUM
    ):
        # Reading sums the components, and each was given the whole value.
        for component in variable.values[1:]:
            component.assign(tf.zeros_like(component))


def _walk(root: Any) -> Iterator[Any]:
    """Every variable, model, layer and optimizer that `root` holds, each once.

    Keras's own lists (`weights`, `metrics`) leave out counters, containers that are not built yet, and what a
    model's own `compile` stores in its attributes, so this follows the attributes.
    """
    seen, stack = set(), [root]
    while stack:
        item = stack.pop()
        if isinstance(item, _LEAVES) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, tf.Variable):
            yield item
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack.extend(item)
        elif isinstance(item, tf.__internal__.tracking.Trackable) or type(item).__module__.startswith("keras."):
            yield item
            stack.extend(internals.children_of(item))
