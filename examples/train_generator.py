"""Trains on image files that two worker processes read and augment.

KERAS_GPUFEED_VIRTUAL_DEVICES=2 python examples/train_generator.py
"""

import pathlib
import tempfile

import numpy as np


class Digits:
    """Samples by number: image files in a folder, each shifted at random by up to a pixel.

    The file needs neither TensorFlow nor the package up to here, so workers start in a blink.
    """

    def __init__(self, folder):
        self.files = sorted(pathlib.Path(folder).glob("*.pgm"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, number):
        path = self.files[number]
        header, pixels = path.read_bytes().split(b"\n15\n", 1)  # A portable graymap of up to 15.
        width, height = map(int, header.split()[1:])
        image = np.frombuffer(pixels, np.uint8).reshape(height, width, 1)
        shift = np.random.randint(-1, 2, 2)  # noqa: NPY002  Seeded by (seed, epoch, batch).
        return np.roll(image, shift, (0, 1)).astype("float32") / 15, int(path.stem.split("_")[1])


def write_images(folder):
    """Writes scikit-learn's handwritten digits as image files."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images[:600], digits.target)):
        pixels = np.minimum(image, 15).astype(np.uint8).tobytes()
        (folder / f"{number:04}_{label}.pgm").write_bytes(b"P5\n8 8\n15\n" + pixels)


def main():
    """Writes, trains, tells."""
    import tensorflow as tf

    import keras_gpufeed as kg

    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(16, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10),
        ]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    with tempfile.TemporaryDirectory() as name:
        write_images(pathlib.Path(name))
        with kg.DistributedFeeder(Digits(name), batch_size=64, workers=2, seed=1) as feeder:
            history = model.fit(feeder, epochs=5, verbose=2)
    replicas = model.distribute_strategy.num_replicas_in_sync
    print(f"{replicas} replica(s), accuracy {history.history['accuracy'][-1]:.3f}")


if __name__ == "__main__":
    main()
