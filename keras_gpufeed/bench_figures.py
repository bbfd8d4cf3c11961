"""What the benchmark compares: the named figures that the package is held to, and grids of the user's own.

Flow:   bench_contenders -> [bench_figures] -> bench -> __main__
Owns:   which contenders belong together, which ratios of them are looked at, and their limits.
Leaves: running them and telling the result (bench), feeding (bench_contenders).

A ratio is taken within a round, between runs that were neighbours in time, and its median over the rounds counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Callable

from .bench_contenders import CONTENDERS, Task

Results = Mapping[str, dict[str, Any]]  # Of one round: the result of each task by its label.

_MB = 1_000_000


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A number that is computed from the results of one round.

    Args:
        label: What it is, in words.
        value: Computes it; raises KeyError if a result that it needs is missing.
        limit: What it is held to; None for a number that is only shown.
        check_limit: A wider limit, for `bench --check` on any machine; None if it is not checked there.
        at_least: True if the limit is a lower one.
        unit: What follows the number.
    """

    label: str
    value: Callable[[Results], float]
    limit: float | None = None
    check_limit: float | None = None
    at_least: bool = False
    unit: str = ""

    def meets(self, value: float, limit: float) -> bool:
        """True if the limit is kept.

        Args:
            value: The median over the rounds.
            limit: One of the two limits.
        """
        return value >= limit if self.at_least else value <= limit


@dataclasses.dataclass(frozen=True)
class Figure:
    """Contenders that are run in turn, and what is read off them.

    Args:
        name: What the command line calls it.
        what: What it shows, in words.
        tasks: By label.
        ratios: In the order of the report.
    """

    name: str
    what: str
    tasks: dict[str, Task]
    ratios: tuple[Ratio, ...] = ()


# Samples of three sizes as the issue of speed has them: about as many as make 0.6 to 1 GB, in batches of 3 to 38 MB.
_SMALL = Task("", shape=(784,), num_samples=200_000, global_batch_size=1024)
_IMAGES = Task("", shape=(64, 64, 3), num_samples=20_000, global_batch_size=256)
_LARGE = Task("", shape=(224, 224, 3), num_samples=1_600, global_batch_size=64)

CHECKED = (  # By `bench --check`: what can be told in a few minutes on any machine.
    "arrays-49kb",
    "uint8-transform",
    "generator-38mb",
    "workers-38mb",
    "exactness",
    "second-fit",
    "import",
    "distribute",
)


def figures(replicas: tuple[int, ...], workers: int) -> dict[str, Figure]:
    """The named figures.

    Args:
        replicas: Replicas of the figures that are taken for several numbers.
        workers: Processes or threads of the figures that have some.

    Returns:
        By name, in the order in which they are documented.
    """
    all_figures = [
        _arrays("arrays-3kb", "arrays of 3 KB samples, shuffled", _SMALL, replicas),
        _arrays("arrays-49kb", "arrays of 49 KB samples, shuffled", _IMAGES, replicas),
        _arrays("arrays-600kb", "arrays of 602 KB samples, shuffled", _LARGE, replicas),
        _uint8(replicas),
        _replicas(),
        _steps_per_execution(),
        _exactness(),
        _second_fit(),
        _memmap(),
        _generator("generator-38mb", "an in-process generator, 38 MB batches", _LARGE, 1.7, 1.2),
        _generator("generator-3mb", "an in-process generator, 3 MB batches", _SMALL, 1.0, 0.7),
        _generator(
            "generator-100kb",
            "an in-process generator, 100 KB batches",
            dataclasses.replace(_SMALL, global_batch_size=32),
            1.0,
            0.7,
        ),
        _workers("workers-38mb", "workers, 38 MB batches with no work", _LARGE, workers, 20.0, 8.0),
        _workers("workers-3mb", "workers, 3 MB batches with no work", _SMALL, workers, 15.0, 5.0),
        _busy_workers(workers),
        _import(),
        _distribute(),
    ]
    return {figure.name: figure for figure in all_figures}


def grid(template: Task, contenders: tuple[str, ...], replicas: tuple[int, ...]) -> Figure:
    """What `bench` measures when no figure is named: contenders against each other for each number of replicas.

    Args:
        template: The data, and what all tasks have in common.
        contenders: Which to run.
        replicas: Numbers of replicas.
    """
    tasks = {
        label: task
        for label, task in _tasks(template, contenders, replicas).items()
        if CONTENDERS[task.contender].has_replicas or task.num_replicas == replicas[0]
    }
    article = "an" if template.source == "array" else "a"
    return Figure("grid", f"feeding from {article} {template.source}", tasks)


# --- The named figures -------------------------------------------------------------------------------------


def _over(upper: str, lower: str, metric: str = "step_seconds") -> Callable[[Results], float]:
    return lambda results: results[upper][metric] / results[lower][metric]


def _above_floor(upper: str, lower: str, floor: str) -> Callable[[Results], float]:
    def value(results: Results) -> float:
        floor_seconds = results[floor]["step_seconds"]
        return (results[upper]["step_seconds"] - floor_seconds) / (results[lower]["step_seconds"] - floor_seconds)

    return value


def _tasks(template: Task, names: tuple[str, ...], replicas: tuple[int, ...] = (1,)) -> dict[str, Task]:
    return {
        f"{name} {num_replicas}": dataclasses.replace(template, contender=name, num_replicas=num_replicas)
        for num_replicas in replicas
        for name in names
    }


def _arrays(name: str, what: str, template: Task, replicas: tuple[int, ...]) -> Figure:
    ratios = []
    for number in replicas:
        ours, keras, floor = f"ours {number}", f"keras {number}", f"floor {number}"
        allowed = 64 * _MB + 4 * template.batch_bytes
        on = f"on {number} replica{'s' if number > 1 else ''}"
        ratios += [
            Ratio(f"time per step {on}, ours / Keras", _over(ours, keras), 1.0, 1.5),
            Ratio(f"time per step above the floor {on}, ours / Keras", _above_floor(ours, keras, floor), 0.6),
            Ratio(f"time to first step {on}, ours / Keras", _over(ours, keras, "first_step_seconds"), 0.25, 0.6),
            Ratio(
                f"extra host memory {on}, ours",
                lambda results, ours=ours: results[ours]["extra_host_bytes"] / _MB,  # type: ignore[misc]
                allowed / _MB,
                2 * allowed / _MB,
                unit="MB",
            ),
            Ratio(
                f"extra host memory {on}, Keras",
                lambda results, keras=keras: results[keras]["extra_host_bytes"] / _MB,  # type: ignore[misc]
                unit="MB",
            ),
        ]
    return Figure(name, what, _tasks(template, ("floor", "ours", "keras"), replicas), tuple(ratios))


def _uint8(replicas: tuple[int, ...]) -> Figure:
    template = dataclasses.replace(_IMAGES, dtype="uint8", scales=True)

    def against_best(number: int) -> Callable[[Results], float]:
        def value(results: Results) -> float:
            best = min(results[f"{name} {number}"]["step_seconds"] for name in ("slices", "gather"))
            return results[f"ours {number}"]["step_seconds"] / best

        return value

    return Figure(
        "uint8-transform",
        "uint8 images, cast and scaled in transform",
        _tasks(template, ("floor", "ours", "slices", "gather"), replicas),
        tuple(
            Ratio(
                f"time per step on {number} replica{'s' if number > 1 else ''}, ours / the better tf.data pipeline",
                against_best(number),
                1.0,
                1.5,
            )
            for number in replicas
        ),
    )


def _replicas() -> Figure:
    numbers = (1, 2, 4, 8, 16, 32)

    def growth(number: int) -> Callable[[Results], float]:
        def value(results: Results) -> float:
            cost, cost_of_one = (
                results[f"ours {count}"]["step_seconds"] - results[f"floor {count}"]["step_seconds"]
                for count in (number, 1)
            )
            return cost / cost_of_one / number

        return value

    ratios = [
        Ratio(f"time above the floor on {number} replicas / {number} times that on one", growth(number), 1.0)
        for number in numbers[1:]
    ]
    return Figure(
        "replicas",
        "cost above the floor on 1 to 32 replicas",
        _tasks(_SMALL, ("floor", "ours"), numbers),
        tuple(ratios),
    )


def _steps_per_execution() -> Figure:
    tasks = {}
    for at_once in (1, 16):
        template = dataclasses.replace(
            _SMALL, num_replicas=4, steps_per_execution=at_once, num_samples=192 * _SMALL.global_batch_size
        )
        for name in ("floor", "ours", "keras"):
            tasks[f"{name} {at_once}"] = dataclasses.replace(template, contender=name)

    def fall(results: Results) -> float:
        ours, floor = (
            results[f"{name} 1"]["step_seconds"] - results[f"{name} 16"]["step_seconds"] for name in ("ours", "floor")
        )
        return ours / floor

    return Figure(
        "steps-per-execution",
        "steps_per_execution=16 on 4 replicas",
        tasks,
        (
            Ratio("time per step saved, ours / the floor's", fall, 1.0, at_least=True),
            Ratio("time per step with 16 at once, ours / Keras", _over("ours 16", "keras 16")),
        ),
    )


def _exactness() -> Figure:
    tasks, ratios = {}, []
    for kind, num_samples in (
        ("even steps", 195 * _SMALL.global_batch_size),
        ("an uneven last step", _SMALL.num_samples + 1),
    ):
        template = dataclasses.replace(_SMALL, num_replicas=4, model="dense", num_samples=num_samples)
        for name in ("ours", "ours-inexact"):
            tasks[f"{name} {kind}"] = dataclasses.replace(template, contender=name)
        ratios.append(
            Ratio(
                f"time per step with {kind}, exact / stock",
                _over(f"ours {kind}", f"ours-inexact {kind}"),
                1.01 if kind == "even steps" else None,
                1.2 if kind == "even steps" else None,
            )
        )
    return Figure("exactness", "what exactness costs: a small net on 4 replicas", tasks, tuple(ratios))


def _second_fit() -> Figure:
    task = dataclasses.replace(_SMALL, contender="ours-second-fit", num_replicas=4)

    def lateness(results: Results) -> float:
        return 1e3 * (results["second"]["first_step_seconds"] - results["second"]["step_seconds"])

    return Figure(
        "second-fit",
        "a second fit with the same feeder, on 4 replicas",
        {"second": task},
        (
            Ratio("first step later than a steady one by", lateness, 50.0, 500.0, unit="ms"),
            Ratio("times that the step was traced again", lambda results: results["second"]["num_traces"], 0.0, 0.0),
        ),
    )


def _memmap() -> Figure:
    template = dataclasses.replace(_IMAGES, num_samples=40_000, num_replicas=4)
    on_file = dataclasses.replace(template, source="memmap")
    limited = dataclasses.replace(on_file, allowed_bytes=template.num_samples * template.sample_bytes // 4)
    tasks = {
        "in memory": dataclasses.replace(template, contender="ours"),
        "limited": dataclasses.replace(limited, contender="ours"),
        "keras, limited": dataclasses.replace(limited, contender="keras"),
    }
    return Figure(
        "memmap",
        "a memory map four times larger than the memory that the process may take (RLIMIT_DATA), on 4 replicas",
        tasks,
        (Ratio("warm rate, limited / array in memory", _over("in memory", "limited"), 0.8, 0.5, at_least=True),),
    )


def _batches(template: Task, source: str, **changes: Any) -> Task:
    """A source of batches with as many steps that what a queue holds at the start of an epoch counts for little."""
    return dataclasses.replace(template, source=source, num_samples=48 * template.global_batch_size, **changes)


def _generator(name: str, what: str, template: Task, limit: float, check_limit: float) -> Figure:
    task = _batches(template, "generator")
    return Figure(
        name,
        what,
        _tasks(task, ("floor", "ours", "keras", "from-generator")),
        (
            Ratio("rate, ours / Keras", _over("keras 1", "ours 1"), limit, check_limit, at_least=True),
            Ratio("rate, ours / from_generator", _over("from-generator 1", "ours 1")),
        ),
    )


def _workers(name: str, what: str, template: Task, workers: int, limit: float, check_limit: float) -> Figure:
    task = _batches(template, "sequence", num_workers=workers)
    ours = "ours-workers 1"
    return Figure(
        name,
        what,
        _tasks(task, ("floor", "ours-workers", "keras-threads", "keras-processes", "torch")),
        (
            Ratio(
                "rate, ours / Keras's processes", _over("keras-processes 1", ours), limit, check_limit, at_least=True
            ),
            Ratio("rate, ours / Keras's threads", _over("keras-threads 1", ours)),
            Ratio("rate, ours / PyTorch's processes", _over("torch 1", ours), 3.0, at_least=True),
        ),
    )


def _busy_workers(workers: int) -> Figure:
    task = _batches(_LARGE, "sequence", num_workers=workers, item_seconds=0.06)
    ours = "ours-workers 1"
    return Figure(
        "workers-60ms",
        "workers, 38 MB batches that take 60 ms of CPU time each",
        _tasks(task, ("loop", "ours", "ours-workers", "keras", "keras-processes", "torch")),
        (
            Ratio(
                f"rate of {workers} workers / {workers} times that of one process in fit",
                lambda results: _over("ours 1", ours)(results) / workers,
                0.95,
                0.6,
                at_least=True,
            ),
            Ratio(
                f"rate of {workers} workers / {workers} times that of a loop with nothing behind it",
                lambda results: _over("loop 1", ours)(results) / workers,
            ),
            Ratio("rate, ours / Keras's processes", _over("keras-processes 1", ours)),
            Ratio("rate, ours / PyTorch's processes", _over("torch 1", ours), 0.95, at_least=True),
        ),
    )


def _import() -> Figure:
    return Figure(
        "import",
        "import keras_gpufeed where TensorFlow and Keras have been imported",
        {"import": Task("import")},
        (Ratio("seconds", lambda results: results["import"]["total_seconds"], 0.2, 0.6, unit="s"),),
    )


def _distribute() -> Figure:
    return Figure(
        "distribute",
        "distribute(ResNet50), compiled with Adam, onto 4 devices",
        {"distribute": Task("distribute", num_replicas=4)},
        (Ratio("seconds", lambda results: results["distribute"]["total_seconds"], 3.0, 9.0, unit="s"),),
    )
