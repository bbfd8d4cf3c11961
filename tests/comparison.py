"""What "the same result as on one device" means, in numbers."""

import numpy as np

import keras_gpufeed as kg


def strategy_of(num_replicas):
    """The strategy of the first virtual devices; the default one stands for one device."""
    return kg.get_strategy([f"CPU:{number}" for number in range(num_replicas)])


def largest_difference(model, reference):
    """Largest |a - b| / max(1, |b|) over all weights."""
    weights, expected = model.get_weights(), reference.get_weights()
    assert len(weights) == len(expected)
    return max(
        float(np.max(np.abs(a - b) / np.maximum(1.0, np.abs(b)), initial=0.0))
        for a, b in zip(weights, expected)
        if np.issubdtype(a.dtype, np.number)
    )


def largest_log_difference(history, expected):
    """Largest difference of any logged value, relative above 1."""
    assert sorted(history.history) == sorted(expected.history)
    assert history.epoch == expected.epoch
    return max(
        abs(a - b) / max(1.0, abs(b))
        for name in expected.history
        for a, b in zip(history.history[name], expected.history[name])
    )
