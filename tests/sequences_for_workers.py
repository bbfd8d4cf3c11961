"""Sequences that worker processes import."""

import numpy as np
import tensorflow as tf
from sources_for_workers import batch


class Batches(tf.keras.utils.Sequence):
    """Three batches, of 8, 8 and 5 samples; notes what is fetched and when an epoch ends."""

    def __init__(self):
        self.events = []

    def __len__(self):
        return 3

    def __getitem__(self, index):
        self.events.append(index)
        return batch(index)

    def on_epoch_end(self):
        self.events.append("end")


class ChangingBatches(tf.keras.utils.Sequence):
    """Gives what its state says; the state changes at the end of an epoch."""

    def __init__(self):
        self.value = 1.0

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.full((4, 1), self.value, "float32"), np.zeros((4, 1), "float32")

    def on_epoch_end(self):
        self.value += 1.0
