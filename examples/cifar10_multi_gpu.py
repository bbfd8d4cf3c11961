"""TensorFlow's CIFAR-10 multi-GPU tutorial, without towers, queues and scopes.

python examples/cifar10_multi_gpu.py --data DIR     # the folder of the binary or the Python version of CIFAR-10
KERAS_GPUFEED_VIRTUAL_DEVICES=4 python examples/cifar10_multi_gpu.py --data DIR     # without GPUs
"""

import argparse
import pathlib
import pickle

import numpy as np
import tensorflow as tf

import keras_gpufeed as kg

SIZE = 24  # Of the images that are trained on; those in the files are 32 x 32.


def read_files(folder, kind):
    """The images and labels of all files of a kind: "data_batch" or "test_batch"."""
    files = sorted(path for path in pathlib.Path(folder).rglob(f"{kind}*") if path.is_file())
    if not files:
        raise SystemExit(f"There is no {kind}* in {folder}: unpack the CIFAR-10 archive there.")
    records, labels = [], []
    for path in files:
        if path.suffix == ".bin":  # Each record is a byte for the label and then the red, green and blue planes.
            rows = np.fromfile(path, np.uint8).reshape(-1, 1 + 3072)
            records.append(rows[:, 1:])
            labels.append(rows[:, 0])
        else:
            content = pickle.loads(path.read_bytes(), encoding="bytes")
            records.append(content[b"data"])
            labels.append(content[b"labels"])
    images = np.concatenate(records).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return images, np.concatenate(labels).astype("int64")


def standardize(images):
    """Mean 0 and deviation 1 for each image."""
    images = images.astype("float32")
    deviation = np.maximum(images.std((1, 2, 3), keepdims=True), 1 / np.sqrt(images[0].size))
    return (images - images.mean((1, 2, 3), keepdims=True)) / deviation


def distort(image, random):
    """A random crop of an image, maybe mirrored, with other brightness and contrast."""
    top, left = random.integers(0, 33 - SIZE, 2)
    image = image[top : top + SIZE, left : left + SIZE].astype("float32")
    if random.random() < 0.5:
        image = image[:, ::-1]
    image = image + random.uniform(-63, 63)
    mean = image.mean((0, 1))
    return (image - mean) * random.uniform(0.2, 1.8) + mean


def build_model():
    """The network of the tutorial."""
    layers = tf.keras.layers
    decay = {"kernel_regularizer": tf.keras.regularizers.L2(0.002)}  # Keras has no factor 1/2 there.
    bias = {"bias_initializer": tf.keras.initializers.Constant(0.1)}

    def normalize(images):
        return tf.nn.local_response_normalization(images, 4, bias=1.0, alpha=0.001 / 9.0, beta=0.75)

    def kernel(deviation):
        return tf.keras.initializers.TruncatedNormal(stddev=deviation)

    return tf.keras.Sequential(
        [
            layers.Conv2D(64, 5, padding="same", activation="relu", kernel_initializer=kernel(0.05)),
            layers.MaxPool2D(3, 2, padding="same"),
            layers.Lambda(normalize),
            layers.Conv2D(64, 5, padding="same", activation="relu", kernel_initializer=kernel(0.05), **bias),
            layers.Lambda(normalize),
            layers.MaxPool2D(3, 2, padding="same"),
            layers.Flatten(),
            layers.Dense(384, "relu", kernel_initializer=kernel(0.04), **bias, **decay),
            layers.Dense(192, "relu", kernel_initializer=kernel(0.04), **bias, **decay),
            layers.Dense(10, kernel_initializer=kernel(1 / 192)),
        ]
    )


def main():
    """Trains, and evaluates with the moving averages of the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with the files of CIFAR-10")
    parser.add_argument("--batch-size", type=int, default=128, help="over all GPUs; the tutorial's was for each")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--moving-average", type=float, default=0.9999, help="decay of the averages of the weights")
    arguments = parser.parse_args()
    images, labels = read_files(arguments.data, "data_batch")
    test_images, test_labels = read_files(arguments.data, "test_batch")

    def make_batches(epoch):
        random = np.random.default_rng(epoch)
        order = random.permutation(len(images))
        for start in range(0, len(images), arguments.batch_size):
            chosen = order[start : start + arguments.batch_size]
            yield standardize(np.stack([distort(images[number], random) for number in chosen])), labels[chosen]

    tf.keras.utils.set_random_seed(0)
    model = build_model()
    steps_per_decay = 350 * -(-len(images) // arguments.batch_size)
    rate = tf.keras.optimizers.schedules.ExponentialDecay(0.1, steps_per_decay, 0.1, staircase=True)
    optimizer = tf.keras.optimizers.SGD(rate, use_ema=True, ema_momentum=arguments.moving_average)
    model.compile(optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    model.fit(kg.DistributedFeeder(make_batches), epochs=arguments.epochs, verbose=2)
    edge = (32 - SIZE) // 2
    test_images = standardize(test_images[:, edge:-edge, edge:-edge])
    loss, accuracy = model.evaluate(kg.DistributedFeeder(test_images, test_labels), verbose=0)
    print(f"{model.distribute_strategy.num_replicas_in_sync} replica(s): test loss {loss:.5f}, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
