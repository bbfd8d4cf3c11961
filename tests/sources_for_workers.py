"""Sources that worker processes import. Without TensorFlow, so that they start fast."""

import os
import time

import numpy as np

X = np.random.default_rng(0).normal(size=(21, 2)).astype("float32")
Y = X.sum(axis=1)


def batch(index):
    return X[index * 8 : index * 8 + 8], Y[index * 8 : index * 8 + 8]


def batches():
    for index in range(3):
        yield batch(index)


def sharded_batches(worker_id, num_workers):
    for index in range(worker_id, 3, num_workers):
        yield batch(index)


class Samples:
    """A map-style data set."""

    def __len__(self):
        return 21

    def __getitem__(self, number):
        return X[number], Y[number]


class SlowSamples(Samples):
    """The earlier a sample, the longer it takes."""

    def __getitem__(self, number):
        time.sleep(0.02 - 0.001 * number)
        return super().__getitem__(number)


class RandomSamples(Samples):
    """Augments with NumPy's global random state."""

    def __getitem__(self, number):
        return np.array([np.random.random()], "float32")  # noqa: NPY002 (the global state is what is tested)


class FailingSamples(Samples):
    def __getitem__(self, number):
        if number == 17:
            raise KeyError("file_17.npy")
        return super().__getitem__(number)


class KilledOnce(Samples):
    """The first process to reach sample 9 dies there."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __getitem__(self, number):
        if number == 9 and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            os.kill(os.getpid(), 9)
        return super().__getitem__(number)


class UnreadableError(Exception):
    """Takes other arguments than it passes on."""

    def __init__(self, path, code):
        super().__init__(f"{path}: {code}")
        self.path = path


class Unreadable:
    """Samples by number, of which one cannot be read."""

    def __len__(self):
        return 8

    def __getitem__(self, number):
        if number == 5:
            raise UnreadableError("a.npy", 5)
        return np.float32([number])
