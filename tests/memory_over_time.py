"""Prints, as JSON, the memory of this process over many epochs and over many feeders.

A process of its own, because the memory of one that has run other tests says more about those.
"""

import json

import numpy as np
import tensorflow as tf

import keras_gpufeed as kg

NUM_SAMPLES, NUM_TIMES = 4000, 25


def resident_bytes():
    """Memory of this process that is no file's."""
    with open("/proc/self/status") as status:
        (kilobytes,) = [line.split()[1] for line in status if line.startswith("RssAnon")]
    return 1024 * int(kilobytes)


def main():
    kg.use_virtual_devices(2)
    x, y = np.zeros((NUM_SAMPLES, 2000), "float32"), np.zeros(NUM_SAMPLES)  # 32 MB.

    def generate():
        for start in range(0, NUM_SAMPLES, 400):
            yield x[start : start + 400].copy(), y[start : start + 400]

    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    kg.distribute(model, kg.get_strategy(["CPU:0", "CPU:1"]))
    found = {}
    for name, make_feeder in {
        "arrays": lambda: kg.DistributedFeeder(x, y, batch_size=400),
        "a generator": lambda: kg.DistributedFeeder(generate),
    }.items():
        feeder, after_epochs, after_feeders = make_feeder(), [], []
        note = tf.keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_, after=after_epochs, **__: after.append(resident_bytes())
        )
        model.fit(feeder, validation_data=make_feeder(), epochs=NUM_TIMES, verbose=0, callbacks=[note])
        for _ in range(NUM_TIMES):
            model.fit(make_feeder(), verbose=0)
            after_feeders.append(resident_bytes())
        found[f"epochs of {name}"], found[f"feeders of {name}"] = after_epochs, after_feeders
    print(json.dumps(found))


if __name__ == "__main__":
    main()
