"""Goes on training a model that was built, compiled and trained on one device, on every device.

KERAS_GPUFEED_VIRTUAL_DEVICES=2 python examples/existing_model.py
"""

import numpy as np
import tensorflow as tf

import keras_gpufeed as kg

random = np.random.default_rng(0)
x, y = random.random((24, 32, 32, 3), "float32"), random.integers(0, 10, 24)

# Yesterday, without this package: an application of Keras, trained for an epoch.
model = tf.keras.applications.MobileNetV2(input_shape=(32, 32, 3), alpha=0.35, weights=None, classes=10)
model.compile("adam", "sparse_categorical_crossentropy")
model.fit(x, y, batch_size=8, verbose=0)
kernel, steps = model.trainable_variables[0], model.optimizer.iterations.numpy()

# Today: the same object, the same variables, Adam's moments and step count kept.
model.fit(kg.DistributedFeeder(x, y, batch_size=8), epochs=1, verbose=2)

print("same variable object:", model.trainable_variables[0] is kernel)
print("optimizer steps:", steps, "before,", model.optimizer.iterations.numpy(), "after")
print("replicas:", model.distribute_strategy.num_replicas_in_sync)
