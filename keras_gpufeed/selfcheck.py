"""What the doctor runs in processes of its own: asking TensorFlow, and training on two replicas.

Flow:   ... -> model -> [selfcheck] -> doctor -> ...
Owns:   the questions that only TensorFlow answers, and small trainings with a known result.
Leaves: time limits, judging the answers (doctor).

`python -m keras_gpufeed.selfcheck PART` prints one line of JSON for each answer: its name, then the answer or what
went wrong. The doctor reads the lines as they come, so it knows what a process was at that hangs or dies.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Callable

_MARK = "keras_gpufeed.selfcheck: "  # TensorFlow and Keras may print too.
_LARGEST_DIFFERENCE = 1e-5  # Of weights near 1 in float32, after a few steps.


class _Wrong(Exception):
    """A result that is not the known one."""


def answer_in(line: str) -> dict[str, Any] | None:
    """The answer in a line of output, or None if the line is something else's.

    Args:
        line: What a process printed.

    Example:
        >>> answer_in('keras_gpufeed.selfcheck: {"name": "order", "found": "as it was"}')
        {'name': 'order', 'found': 'as it was'}
    """
    return json.loads(line[len(_MARK) :]) if line.startswith(_MARK) else None


def main(part: str) -> None:
    """Answers the questions of a part, one after another.

    Args:
        part: A key of `PARTS`.
    """
    for name, ask in PARTS[part].items():
        try:
            answer = {"name": name, "found": ask()}
        except Exception as error:
            text = str(error) if isinstance(error, _Wrong) else f"{type(error).__name__}: {error}"
            answer = {"name": name, "wrong": text}
        print(_MARK + json.dumps(answer), flush=True)
        if "wrong" in answer and name in ("import", "start"):
            return  # The others would fail alike.


# --- What TensorFlow sees ----------------------------------------------------------------------------------


def _import_tensorflow() -> dict[str, Any]:
    import tensorflow as tf

    build = tf.sysconfig.get_build_info()
    return {
        "version": tf.__version__,
        "has_cuda": tf.test.is_built_with_cuda(),
        "cuda": build.get("cuda_version", ""),
        "cudnn": build.get("cudnn_version", ""),
    }


def _find_gpus() -> list[dict[str, Any]]:
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    return [
        {
            "name": tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name),
            "grows": bool(tf.config.experimental.get_memory_growth(gpu)),
        }
        for gpu in gpus
    ]


def _has_nccl() -> bool:
    from . import internals

    return internals.has_nccl()


# --- Two replicas ------------------------------------------------------------------------------------------


def _start_two_devices() -> str:
    from . import get_strategy, use_virtual_devices

    use_virtual_devices(2)
    return f"{get_strategy().num_replicas_in_sync} virtual devices"


def _start_gpus() -> str:
    from . import get_strategy

    return f"{get_strategy().num_replicas_in_sync} GPUs"


def _sum_over_replicas() -> str:
    import tensorflow as tf

    from . import get_strategy

    strategy = get_strategy()
    num_replicas = strategy.num_replicas_in_sync

    def on_replica() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(context.replica_id_in_sync_group + 1, tf.float32))

    sums = strategy.experimental_local_results(tf.function(lambda: strategy.run(on_replica))())
    expected = num_replicas * (num_replicas + 1) / 2
    if [float(value) for value in sums] != [expected] * num_replicas:
        raise _Wrong(f"the sum over replicas should be {expected}, but they have {[float(value) for value in sums]}")
    return f"a sum over {num_replicas} replicas is right on each"


def _predict(function: Callable, data: Any, **arguments: Any) -> list[float]:
    import tensorflow as tf

    from . import DistributedFeeder

    model = tf.keras.Sequential([tf.keras.layers.Lambda(function)])
    with DistributedFeeder(data, **arguments) as feeder:
        return model.predict(feeder, verbose=0).ravel().tolist()


def _expect(found: list[float], expected: list[float], what: str) -> str:
    if found != expected:
        raise _Wrong(f"{what} should be {expected}, but is {found}")
    return f"{what}: {' '.join(f'{value:.0f}' for value in expected)}"


def _check_split() -> str:
    import numpy as np
    import tensorflow as tf

    def sizes(x: tf.Tensor) -> tf.Tensor:
        return tf.zeros_like(x) + tf.cast(tf.shape(x)[0], tf.float32)

    found = _predict(sizes, np.zeros((11, 1), "float32"), batch_size=5)
    return _expect(found, [3, 3, 3, 2, 2, 3, 3, 3, 2, 2, 1], "11 samples in parts of")


def _check_order() -> str:
    import numpy as np

    found = _predict(lambda x: x, np.arange(9, dtype="float32")[:, None], batch_size=4)
    return _expect(found, list(range(9)), "predictions of 9 samples")


def _check_worker() -> str:
    found = _predict(lambda x: x, range(6), batch_size=4, workers=1)
    return _expect(found, list(range(6)), "samples from a worker process")


def _check_gradient() -> str:
    import numpy as np
    import tensorflow as tf

    from . import DistributedFeeder, distribute, get_strategy

    random = np.random.default_rng(0)
    x, y = random.normal(size=(19, 3)).astype("float32"), random.normal(size=(19, 1)).astype("float32")

    def train(strategy: tf.distribute.Strategy) -> np.ndarray:
        model = tf.keras.Sequential(
            [tf.keras.layers.Dense(4, "tanh", kernel_initializer="ones"), tf.keras.layers.Dense(1)]
        )
        model.build((None, 3))
        model.set_weights([np.ones(weight.shape) / weight.size for weight in model.get_weights()])
        model.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        distribute(model, strategy)
        # Batches of 9, 9 and 1 samples: none divides by two, and the last is a small tail.
        model.fit(DistributedFeeder(x, y, batch_size=9, seed=1), epochs=2, verbose=0)
        return np.concatenate([weight.ravel() for weight in model.get_weights()])

    difference = float(np.max(np.abs(train(get_strategy()) - train(get_strategy(["CPU:0"])))))
    if not difference <= _LARGEST_DIFFERENCE:
        raise _Wrong(f"weights differ by {difference:.1e} from those of one device")
    return f"weights differ by {difference:.1e} from those of one device"


PARTS: dict[str, dict[str, Callable[[], Any]]] = {
    "tensorflow": {"import": _import_tensorflow, "gpus": _find_gpus, "nccl": _has_nccl},
    "replicas": {
        "start": _start_two_devices,
        "collective": _sum_over_replicas,
        "split": _check_split,
        "order": _check_order,
        "gradient": _check_gradient,
        "worker": _check_worker,
    },
    "gpus": {"start": _start_gpus, "collective": _sum_over_replicas},
}

if __name__ == "__main__":
    main(sys.argv[1])
