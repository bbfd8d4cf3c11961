"""What the benchmark runs: one contender, once, in a process of its own.

Flow:   [bench_contenders] -> bench_figures -> bench -> __main__
Owns:   how each contender feeds, the model that does nothing, what is measured inside the process.
Leaves: which contenders run when, the memory curve, the tables (bench).

`bench` runs this file by its path, so a process that measures Keras, `tf.data` or PyTorch never imports
keras_gpufeed, which takes places in Keras. So this file imports nothing of the package at its top, and a
contender that needs it does so when it runs.

A run begins when the data is in memory, the devices are up and the model is made. One epoch warms up, then whole
epochs are measured until the time asked for is filled. The steady time per step is that of the second half of each
epoch, when what was read ahead at its start has been used up; what the change of epochs costs is a figure of its own,
because it would drown the other in short epochs. No hook of Keras's is called at each batch, because that would cost
time at each batch.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import pathlib
import re
import resource
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, Callable

import numpy as np
import tensorflow as tf

_MANY_EPOCHS = 1_000_000  # The clock stops earlier.
_NUM_DISTINCT_BATCHES = 4  # So many does a source of batches hold; it gives them in turn.
_NUM_DISTINCT_SAMPLES = 1000
_NUM_CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Task:
    """What one process has to do.

    Args:
        contender: A key of `CONTENDERS`.
        source: "array", "memmap", "generator" or "sequence".
        shape: Shape of one sample.
        dtype: Its dtype.
        num_samples: Samples of one epoch.
        global_batch_size: Samples of one step over all replicas.
        num_replicas: Devices to feed.
        num_workers: Processes or threads of the contenders that have them.
        item_seconds: CPU time that making one batch takes in a generator or Sequence.
        steps_per_execution: As `compile` takes it.
        model: "nothing", or "dense" for a small net that trains.
        scales: True if batches are cast to float32 and divided by 255 on their way.
        allowed_bytes: Memory that the process may take beyond what it has when the run begins.
        against: The user's own contender, as "module:function".
        path: File of the memory map.
        timed_seconds: How long to measure.
    """

    contender: str
    source: str = "array"
    shape: tuple[int, ...] = (64, 64, 3)
    dtype: str = "float32"
    num_samples: int = 20_000
    global_batch_size: int = 256
    num_replicas: int = 1
    num_workers: int = 0
    item_seconds: float = 0.0
    steps_per_execution: int = 1
    model: str = "nothing"
    scales: bool = False
    allowed_bytes: int | None = None
    against: str = ""
    path: str = ""
    timed_seconds: float = 3.0

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample as the source holds it."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    @property
    def batch_bytes(self) -> int:
        """Bytes of one global batch, targets not counted."""
        return self.global_batch_size * self.sample_bytes

    @property
    def is_indexed(self) -> bool:
        """True for arrays and memory maps, False for sources of whole batches."""
        return self.source in ("array", "memmap")

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch; sources of whole batches leave out a remainder."""
        if self.is_indexed:
            return -(-self.num_samples // self.global_batch_size)
        return self.num_samples // self.global_batch_size

    @property
    def samples_per_epoch(self) -> int:
        """Samples that one epoch feeds."""
        return self.num_samples if self.is_indexed else self.steps_per_epoch * self.global_batch_size


def main(text: str) -> None:
    """Runs a task and prints its result as a line of JSON.

    Args:
        text: The task's fields as JSON.
    """
    fields = json.loads(text)
    task = Task(**{**fields, "shape": tuple(fields["shape"])})
    contender = CONTENDERS[task.contender]
    if contender.needs:
        importlib.import_module(contender.needs)  # Now, so that it counts for nothing.
    result = contender.measure(task, contender.make)
    print(json.dumps(result), flush=True)


# --- Data --------------------------------------------------------------------------------------------------


def write_file(task: Task) -> None:
    """Writes the array of a task as the file that its memory map opens.

    Args:
        task: With `path`.
    """
    shape = (task.num_samples, *task.shape)
    _fill(np.lib.format.open_memmap(task.path, mode="w+", dtype=task.dtype, shape=shape))


def _fill(x: np.ndarray) -> np.ndarray:
    """Puts numbers into an array so that all of its memory is really there."""
    random = np.random.default_rng(0)
    block = random.integers(0, 256, (min(len(x), _NUM_DISTINCT_SAMPLES), *x.shape[1:])).astype(x.dtype)
    for start in range(0, len(x), len(block)):
        x[start : start + len(block)] = block[: len(x) - start]
    return x


def _data(task: Task) -> tuple[Any, Any]:
    """Inputs and targets; for a source of batches, the source and None."""
    if task.source == "generator":
        return functools.partial(make_batches, _Batches(task)), None
    if task.source == "sequence":
        return BatchSequence(task), None
    if task.source == "memmap":
        x = np.load(task.path, mmap_mode="r")
    else:
        x = _fill(np.empty((task.num_samples, *task.shape), task.dtype))
    return x, np.arange(len(x)) % _NUM_CLASSES


class _Batches:
    """Batches by number. They are views of a few that exist, and take the CPU time that the task says."""

    def __init__(self, task: Task) -> None:
        num_samples = _NUM_DISTINCT_BATCHES * task.global_batch_size
        self._x = _fill(np.empty((num_samples, *task.shape), task.dtype))
        self._y = np.arange(num_samples) % _NUM_CLASSES
        self._size, self._length, self._item_seconds = task.global_batch_size, task.steps_per_epoch, task.item_seconds

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if index >= self._length:
            raise IndexError(index)
        _work(self._item_seconds)
        start = index % _NUM_DISTINCT_BATCHES * self._size
        return self._x[start : start + self._size], self._y[start : start + self._size]


class BatchSequence(_Batches, tf.keras.utils.Sequence):
    """The same batches as a Keras Sequence. At the top level, so that workers find it."""


def make_batches(batches: _Batches, worker_id: int = 0, num_workers: int = 1) -> Iterator:
    """The same batches as a generator function that several processes can share.

    Args:
        batches: Gives them by number.
        worker_id: Which part to give.
        num_workers: How many parts there are.
    """
    return (batches[index] for index in range(worker_id, len(batches), num_workers))


def _work(seconds: float) -> None:
    """Keeps a core busy: for so long by the CPU's clock, so that a core that is shared takes longer."""
    end = time.thread_time() + seconds
    numbers = np.ones(4096)
    while time.thread_time() < end:
        np.sqrt(numbers, out=numbers)


def scale(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Bytes of an image as numbers between 0 and 1.

    Args:
        x: Images.
        y: Targets, left as they are.
    """
    return tf.cast(x, tf.float32) / 255.0, y


# --- Feeding `fit` -----------------------------------------------------------------------------------------


def _ours(task: Task, x: Any, y: Any) -> dict:
    import keras_gpufeed as kg

    batch_size = task.global_batch_size if task.is_indexed else None
    return {"x": kg.DistributedFeeder(x, y, batch_size=batch_size, transform=scale if task.scales else None)}


def _ours_workers(task: Task, x: Any, y: Any) -> dict:
    import keras_gpufeed as kg

    return {"x": kg.DistributedFeeder(x, workers=task.num_workers)}


def _ours_inexact(task: Task, x: Any, y: Any) -> dict:
    """The same feed without the arithmetic that makes N replicas compute what one does."""
    from keras_gpufeed.internals import FedElement

    strategy = tf.distribute.get_strategy()
    run = strategy.run

    def run_plainly(fn: Callable, args: tuple = (), **other: Any) -> Any:
        plain = tuple(argument.data if isinstance(argument, FedElement) else argument for argument in args)
        return run(fn, plain, **other)

    strategy.run = run_plainly
    return _ours(task, x, y)


def _keras(task: Task, x: Any, y: Any) -> dict:
    if task.is_indexed:
        return {"x": x, "y": y, "batch_size": task.global_batch_size, "shuffle": True}
    if task.source == "generator":
        return {"x": _without_end(x), "steps_per_epoch": task.steps_per_epoch}
    return {"x": x}


def _keras_threads(task: Task, x: Any, y: Any) -> dict:
    return {"x": x, "workers": task.num_workers}


def _keras_processes(task: Task, x: Any, y: Any) -> dict:
    return {"x": x, "workers": task.num_workers, "use_multiprocessing": True}


def _from_slices(task: Task, x: Any, y: Any) -> dict:
    with tf.device("CPU:0"):
        dataset = tf.data.Dataset.from_tensor_slices((x, y))
    dataset = dataset.shuffle(task.num_samples).batch(task.global_batch_size)
    return {"x": _finish(task, dataset)}


def _gather(task: Task, x: Any, y: Any) -> dict:
    """What an expert writes: only numbers are shuffled, and a batch is gathered at once."""
    with tf.device("CPU:0"):
        x, y = tf.constant(x), tf.constant(y)
    dataset = tf.data.Dataset.range(task.num_samples).shuffle(task.num_samples).batch(task.global_batch_size)
    dataset = dataset.map(lambda numbers: (tf.gather(x, numbers), tf.gather(y, numbers)), tf.data.AUTOTUNE)
    return {"x": _finish(task, dataset)}


def _from_generator(task: Task, x: Any, y: Any) -> dict:
    specs = (tf.TensorSpec((None, *task.shape), task.dtype), tf.TensorSpec((None,), tf.int64))
    dataset = tf.data.Dataset.from_generator(lambda: _without_end(x), output_signature=specs)
    return {"x": _finish(task, dataset), "steps_per_epoch": task.steps_per_epoch}


def _finish(task: Task, dataset: tf.data.Dataset) -> tf.data.Dataset:
    if task.scales:
        dataset = dataset.map(scale, tf.data.AUTOTUNE)
    return dataset.prefetch(tf.data.AUTOTUNE)


def _floor(task: Task, x: Any, y: Any) -> dict:
    """The same part for each replica again and again: what a step costs when its data costs nothing."""
    size = -(-task.global_batch_size // task.num_replicas)
    dtype = tf.float32 if task.scales else task.dtype
    part = (tf.ones((size, *task.shape), dtype), tf.zeros((size,), tf.int64))
    parts = tf.data.Dataset.from_tensors(part).repeat()
    strategy = tf.distribute.get_strategy()
    dealt = parts if task.num_replicas == 1 else strategy.distribute_datasets_from_function(lambda context: parts)
    return {"x": dealt, "steps_per_epoch": task.steps_per_epoch}


def _against(task: Task, x: Any, y: Any) -> dict:
    module, _, name = task.against.partition(":")
    made = getattr(importlib.import_module(module), name)(x, y, task.global_batch_size)
    return made if isinstance(made, dict) else {"x": made}


def _without_end(make: Callable[[], Iterator]) -> Iterator:
    while True:
        yield from make()


# --- Feeding a loop ----------------------------------------------------------------------------------------


def _torch(task: Task, x: Any, y: Any) -> Iterable:
    """PyTorch's loader with nothing behind it, so not even the way into a framework is counted."""
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    load = functools.partial(
        DataLoader, batch_size=None, num_workers=task.num_workers, persistent_workers=task.num_workers > 0
    )
    if task.source == "generator":
        return load(_torch_stream(x))
    if task.source == "sequence":
        return load(x, shuffle=True)
    sampler = BatchSampler(RandomSampler(range(task.num_samples)), task.global_batch_size, drop_last=False)
    return load(_Gathered(x, y), sampler=sampler)


class _Gathered:
    """Whole batches of arrays by the numbers of their samples: the fast way to index in a PyTorch data set."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self._x, self._y = x, y

    def __getitem__(self, numbers: list[int]) -> tuple[np.ndarray, np.ndarray]:
        return self._x[numbers], self._y[numbers]


def _torch_stream(make: Callable[..., Iterator]) -> Any:
    from torch.utils.data import IterableDataset, get_worker_info

    class Stream(IterableDataset):
        def __iter__(self) -> Iterator:
            worker = get_worker_info()
            return make() if worker is None else make(worker_id=worker.id, num_workers=worker.num_workers)

    return Stream()


class _Loop:
    """The source itself, read in a loop: what one process can make."""

    def __init__(self, task: Task, x: Any, y: Any) -> None:
        self._x = x

    def __iter__(self) -> Iterator:
        return make_batches(self._x) if isinstance(self._x, _Batches) else self._x()


class _Copy:
    """Copies batch after batch from one place in memory to another: what no feed can beat that copies."""

    def __init__(self, task: Task, x: Any, y: Any) -> None:
        self._batches = _Batches(dataclasses.replace(task, item_seconds=0.0))
        self._num_steps = task.steps_per_epoch
        self._out = np.empty((task.global_batch_size, *task.shape), task.dtype)

    def __iter__(self) -> Iterator:
        for step in range(self._num_steps):
            x, y = self._batches[step]
            np.copyto(self._out, x)
            yield self._out, y


# --- Measuring ---------------------------------------------------------------------------------------------


class _Clock(tf.keras.callbacks.Callback):
    """Adds up the time of the epochs after the first and stops when they fill the time asked for."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self._task = task
        self._num_watched = task.steps_per_epoch // task.steps_per_execution // 2  # Calls in an epoch's first half.
        self.num_epochs = 0
        self.is_over = False
        self.first_step_at = 0.0  # Of the whole run.
        self.ended_at = 0.0  # The last epoch.
        self._seconds = 0.0
        self._change_seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras.

        Args:
            epoch: Its number.
            logs: Not used.
        """
        self._done_at: list[float] = []
        self.model.watch(self._num_watched, self._done_at)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras.

        Args:
            epoch: Its number.
            logs: Not used.
        """
        self.model.wait()
        self.add_epoch(self._done_at)
        self.model.stop_training = self.is_over

    def add_epoch(self, done_at: list[float]) -> None:
        """Takes note of an epoch that has just ended.

        Args:
            done_at: When its calls were done, as many as there are in its first half or more.
        """
        now = time.perf_counter()
        if self.num_epochs == 0:
            self.first_step_at = done_at[0]
            self._began_at, self._began_cpu_seconds = now, _cpu_seconds()
        else:
            self._seconds += now - done_at[self._num_watched - 1]
            self._change_seconds.append(done_at[0] - self.ended_at)
        self.num_epochs += 1
        if self.num_epochs > 1 and now - self._began_at >= self._task.timed_seconds:
            self.is_over = True
            self._cpu_seconds = _cpu_seconds() - self._began_cpu_seconds
            self._worker_bytes = sum(map(_private_bytes, _descendants()))
        self.ended_at = time.perf_counter()

    def result(self) -> dict:
        """The figures of the epochs after the first."""
        task, num_epochs = self._task, self.num_epochs - 1
        num_timed_steps = task.steps_per_epoch - self._num_watched * task.steps_per_execution
        step_seconds = self._seconds / (num_epochs * num_timed_steps)
        samples_per_second = task.samples_per_epoch / task.steps_per_epoch / step_seconds
        return {
            "num_steps": num_epochs * task.steps_per_epoch,
            "step_seconds": step_seconds,
            "samples_per_second": samples_per_second,
            "gb_per_second": samples_per_second * task.sample_bytes / 1e9,
            "epoch_change_seconds": statistics.median(self._change_seconds),
            "cpu_seconds_per_gb": self._cpu_seconds * 1e9 / (num_epochs * task.samples_per_epoch * task.sample_bytes),
            "worker_bytes": self._worker_bytes,
        }


class _Timed(tf.keras.Model):
    """A model whose first steps of an epoch can be watched, with nothing in the way of the others."""

    num_traces = 0
    train_function: Any  # Keras's own.

    def watch(self, num_calls: int, done_at: list[float]) -> None:
        """Notes when the next calls of Keras for one step, or for `steps_per_execution` of them, are done.

        Args:
            num_calls: How many to watch.
            done_at: Where to note it.
        """
        run: Callable = self.train_function

        def run_watched(iterator: Any) -> Any:
            logs = run(iterator)
            if len(done_at) in (0, num_calls - 1):
                self.wait()
            done_at.append(time.perf_counter())
            if len(done_at) == num_calls:
                self.train_function = run
            return logs

        self.train_function = run_watched

    def wait(self) -> None:
        """Returns when every replica has done what it was given; on a GPU, steps go on behind Python's back."""
        for value in self.distribute_strategy.experimental_local_results(self.variables[0]):
            value.numpy()


class _Nothing(_Timed):
    """A model whose step reads one number of each array on each device, so that the data must have come there."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = tf.Variable(
            0.0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )

    def train_step(self, data: Any) -> dict:
        """Called by Keras.

        Args:
            data: One replica's part of the step.
        """
        self.num_traces += 1
        firsts = [tf.cast(tf.reshape(array, [-1])[0], tf.float32) for array in tf.nest.flatten(data)]
        self.seen.assign(tf.add_n(firsts))
        return {"loss": 0.0}  # The same on all replicas, so nothing is summed; Keras's loops need something.


class _Dense(_Timed):
    """A small net that trains as Keras trains."""

    def __init__(self) -> None:
        super().__init__()
        self._layers_in_order = [
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(256, "relu"),
            tf.keras.layers.Dense(_NUM_CLASSES),
        ]

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """Called by Keras.

        Args:
            x: Samples.
        """
        for layer in self._layers_in_order:
            x = layer(x)
        return x


def _measure_fit(task: Task, make: Callable) -> dict:
    strategy = _start_devices(task.num_replicas)
    x, y = _data(task)
    with strategy.scope():
        model = _make_model(task)
        began = _begin(task)
        arguments = make(task, x, y)
    return _fit(task, model, arguments, began)


def _measure_second_fit(task: Task, make: Callable) -> dict:
    """Fits twice with the same feeder; the second fit is what is measured."""
    strategy = _start_devices(task.num_replicas)
    x, y = _data(task)
    with strategy.scope():
        model = _make_model(task)
        arguments = make(task, x, y)
    model.fit(**arguments, epochs=2, verbose=0)
    model.num_traces = 0
    return {**_fit(task, model, arguments, _begin(task)), "num_traces": model.num_traces}


def _fit(task: Task, model: _Timed, arguments: dict, began: dict) -> dict:
    clock = _Clock(task)
    model.fit(**arguments, epochs=_MANY_EPOCHS, verbose=0, callbacks=[clock])
    if not clock.is_over:
        raise RuntimeError(f"fit ended after {clock.num_epochs} epoch(s) of its own accord: the data ran out.")
    closing_seconds = time.perf_counter() - clock.ended_at
    return {**clock.result(), "closing_seconds": closing_seconds, **_end(task, began, clock.first_step_at)}


def _make_model(task: Task) -> Any:
    if task.model == "nothing":
        model: Any = _Nothing()
        model.compile(steps_per_execution=task.steps_per_execution)
        return model
    model = _Dense()
    model.build((None, *task.shape))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, steps_per_execution=task.steps_per_execution)
    return model


def _measure_loop(task: Task, make: Callable) -> dict:
    x, y = _data(task)
    began = _begin(task)
    source, clock = make(task, x, y), _Clock(task)
    while not clock.is_over:
        done_at = []
        for x, _ in source:
            x.reshape(-1)[0].item()
            done_at.append(time.perf_counter())
        clock.add_epoch(done_at)
    return {**clock.result(), **_end(task, began, clock.first_step_at)}


def _measure_import(task: Task, make: Callable) -> dict:
    """Times the import where TensorFlow and Keras have been imported."""
    began = time.perf_counter()
    import keras_gpufeed  # noqa: F401

    return {"total_seconds": time.perf_counter() - began}


def _measure_distribute(task: Task, make: Callable) -> dict:
    """Times moving a large model, with the optimizer's state."""
    strategy = _start_devices(task.num_replicas)
    import keras_gpufeed as kg

    model = tf.keras.applications.ResNet50(weights=None, classes=_NUM_CLASSES)
    model.compile("adam", "sparse_categorical_crossentropy")
    model.optimizer.build(model.trainable_variables)
    began = time.perf_counter()
    kg.distribute(model, strategy)
    return {"total_seconds": time.perf_counter() - began}


def _start_devices(num_replicas: int) -> tf.distribute.Strategy:
    """The strategy that every contender's model is made under; none for one replica, as a user would have it."""
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    if kind == "CPU":
        parts = [tf.config.LogicalDeviceConfiguration()] * num_replicas
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
    if num_replicas == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy([f"{kind}:{number}" for number in range(num_replicas)])


def _begin(task: Task) -> dict:
    """What is known when a run begins; then time and memory count."""
    if task.allowed_bytes is not None:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (_status_bytes(os.getpid(), "VmData") + task.allowed_bytes, hard))
    for gpu in _gpus(task):
        tf.config.experimental.reset_memory_stats(gpu)
    return {
        "host_bytes": resident_bytes(os.getpid()),
        "device_bytes": _device_bytes(task, "current"),
        "began_at": time.monotonic(),
        "clock": time.perf_counter(),
    }


def _end(task: Task, began: dict, first_step_at: float) -> dict:
    result = {
        "first_step_seconds": first_step_at - began["clock"],
        "host_bytes": began["host_bytes"],
        "began_at": began["began_at"],  # By the clock that the benchmark's own process has as well.
        "ended_at": time.monotonic(),
    }
    if _gpus(task):
        result["extra_device_bytes"] = _device_bytes(task, "peak") - began["device_bytes"]
    return result


def _gpus(task: Task) -> list[str]:
    """Those that the task has to do with: a contender that only reads must not even start them."""
    if not CONTENDERS[task.contender].has_replicas:
        return []
    return [f"GPU:{number}" for number in range(len(tf.config.list_physical_devices("GPU")))]


def _device_bytes(task: Task, name: str) -> int:
    return sum(tf.config.experimental.get_memory_info(gpu)[name] for gpu in _gpus(task))


# --- The process and its children, as Linux shows them -----------------------------------------------------


def resident_bytes(pid: int) -> int:
    """Memory of a process that is its own or shared on purpose: not the pages of files, which can be read again.

    Args:
        pid: The process; OSError or 0 if it has gone.
    """
    return _status_bytes(pid, "RssAnon") + _status_bytes(pid, "RssShmem")


def _status_bytes(pid: int, name: str) -> int:
    return _kilobytes(f"/proc/{pid}/status", name)


def _kilobytes(path: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", pathlib.Path(path).read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _descendants() -> list[int]:
    """Processes that this one has started, and those that they have."""
    parents = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        fields = _stat_of(folder)
        if fields:
            parents[int(folder.name)] = int(fields[1])
    found, number = [os.getpid()], 0
    while number < len(found):
        found += [child for child, parent in parents.items() if parent == found[number]]
        number += 1
    return found[1:]


def _cpu_seconds() -> float:
    """CPU time of the process, its living descendants, and those that have ended and were waited for."""
    ticks = 0
    for pid in (os.getpid(), *_descendants()):
        fields = _stat_of(pathlib.Path("/proc", str(pid)))
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _stat_of(folder: pathlib.Path) -> list[str]:
    """The fields of /proc/PID/stat after the name; none if the process has just gone."""
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _private_bytes(pid: int) -> int:
    """Memory that a process would give back if it ended: what it has written and shares with nobody."""
    try:
        return _kilobytes(f"/proc/{pid}/smaps_rollup", "Private_Dirty")
    except OSError:
        return 0  # It has just ended.


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to feed.

    Args:
        title: What tables call it; `{workers}` stands for their number.
        measure: Runs a task; takes it and `make`.
        make: From task, inputs and targets: the arguments of `fit`, or what to iterate.
        sources: The kinds of source that it can feed; none if it is for named figures only.
        needs: What it imports besides TensorFlow.
    """

    title: str
    measure: Callable[[Task, Callable], dict]
    make: Callable
    sources: tuple[str, ...]
    needs: str = ""

    @property
    def has_replicas(self) -> bool:
        """False if it only reads, so that the number of replicas is nothing to it."""
        return self.measure is not _measure_loop


_ARRAYS = ("array", "memmap")
_BATCHES = ("generator", "sequence")
_ALL = (*_ARRAYS, *_BATCHES)

# In the order of tables.
CONTENDERS: dict[str, Contender] = {
    "copy": Contender("copying each batch in memory", _measure_loop, _Copy, _ALL),
    "floor": Contender("one constant batch (floor)", _measure_fit, _floor, _ALL),
    "ours": Contender("keras_gpufeed", _measure_fit, _ours, _ALL, "keras_gpufeed"),
    "ours-workers": Contender(
        "keras_gpufeed, {workers} workers", _measure_fit, _ours_workers, _BATCHES, "keras_gpufeed"
    ),
    "keras": Contender("Keras", _measure_fit, _keras, _ALL),
    "keras-threads": Contender("Keras, {workers} threads", _measure_fit, _keras_threads, ("sequence",)),
    "keras-processes": Contender("Keras, {workers} processes", _measure_fit, _keras_processes, ("sequence",)),
    "slices": Contender("from_tensor_slices, shuffle, batch", _measure_fit, _from_slices, _ARRAYS),
    "gather": Contender("tf.data, gather by number", _measure_fit, _gather, _ARRAYS),
    "from-generator": Contender("from_generator, prefetch", _measure_fit, _from_generator, ("generator",)),
    "torch": Contender("PyTorch DataLoader alone", _measure_loop, _torch, _ALL, "torch.utils.data"),
    "loop": Contender("reading the source in a loop", _measure_loop, _Loop, _BATCHES),
    "against": Contender("{against}", _measure_fit, _against, _ALL),
    # For single figures only.
    "ours-second-fit": Contender("keras_gpufeed, a second fit", _measure_second_fit, _ours, (), "keras_gpufeed"),
    "ours-inexact": Contender("keras_gpufeed, exactness left out", _measure_fit, _ours_inexact, (), "keras_gpufeed"),
    "import": Contender("import keras_gpufeed", _measure_import, _ours, ()),
    "distribute": Contender("distribute(ResNet50)", _measure_distribute, _ours, (), "keras_gpufeed"),
}


if __name__ == "__main__":
    main(sys.argv[-1])
