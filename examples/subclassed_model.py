"""A model with its own `train_step`, written as for one device, on every device.

KERAS_GPUFEED_VIRTUAL_DEVICES=3 python examples/subclassed_model.py
"""

import numpy as np
import tensorflow as tf

import keras_gpufeed as kg


class Autoencoder(tf.keras.Model):
    """Squeezes samples through two numbers; clips the gradient of the whole batch itself."""

    def __init__(self):
        super().__init__()
        self.encoder = tf.keras.layers.Dense(2, "tanh")
        self.decoder = tf.keras.layers.Dense(8)

    def call(self, inputs):
        """Encodes and decodes."""
        return self.decoder(self.encoder(inputs))

    def train_step(self, x):
        """One step: a plain mean over the samples seen, no word of replicas."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - x))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 1.0)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss, "gradient_norm": norm}


x = np.random.default_rng(0).normal(size=(1000, 8)).astype("float32")


def train(strategy):
    """Trains from the same start on a strategy."""
    tf.keras.utils.set_random_seed(0)
    model = Autoencoder()
    model.compile(tf.keras.optimizers.Adam(0.01))
    kg.distribute(model, strategy)
    model.fit(kg.DistributedFeeder(x, batch_size=64, seed=0), epochs=3, verbose=2)
    return model


everywhere = train(kg.get_strategy())
alone = train(kg.get_strategy(["CPU:0"]))
difference = max(np.abs(a - b).max() for a, b in zip(everywhere.get_weights(), alone.get_weights()))
replicas = everywhere.distribute_strategy.num_replicas_in_sync
print(f"{replicas} replica(s) against one: largest difference of any weight {difference:.1e}")
