"""The benchmark: how fast data comes into `fit`, side by side with the other ways.

Flow:   bench_contenders -> bench_figures -> bench_report -> [bench] -> __main__
Owns:   the options, the processes of the contenders and their turns, the memory curve.
Leaves: what is compared (bench_figures), what a process does (bench_contenders), tables and files (bench_report).

Each contender runs in a process of its own, one after another, A B C A B C, so that a machine that slows down or
heats up slows all alike. pyperf and pytest-benchmark do not fit: both call a function again and again in one
process (pyperf also in several) and time the calls. Here the thing to time is a step inside `fit`, which calls us;
a contender must not share a process with another, because strategies, thread pools, allocators and forked workers
outlive a `fit`; memory is read from outside while it runs; and contenders must alternate, where pyperf finishes one
before the next. What is left for a library is the median, which `statistics` has.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import tensorflow as tf

from . import bench_contenders, bench_report
from .bench_contenders import CONTENDERS, Task
from .bench_figures import CHECKED, Figure, figures, grid
from .errors import FeedError

_SAMPLING_SECONDS = 0.02  # Between two looks at a contender's memory.
_MOST_SECONDS = 600.0  # For one process. Keras's worker processes may hang: they fork beside TensorFlow's threads.
_QUICK_SECONDS = 110.0  # After so long, `--quick` begins no process that it cannot end in two minutes.
# `runpy`, because `python FILE` would put the package's folder on the path and with it all its file names.
_PROGRAM = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"

_DATA = {
    "source": "array",
    "shape": (64, 64, 3),
    "dtype": "float32",
    "samples": 20_000,
    "batch_size": 256,
    "item_ms": 0.0,
    "contenders": (),
    "against": "",
}
_FULL = {"rounds": 5, "seconds": 3.0}
_QUICK = {"rounds": 3, "seconds": 1.0, "samples": 4_000}
_CHECK = {"rounds": 3, "seconds": 2.0}
_QUICK_CONTENDERS = {
    "array": ("floor", "ours", "keras", "slices"),
    "memmap": ("floor", "ours", "keras", "slices"),
    "generator": ("floor", "ours", "keras", "from-generator"),
    "sequence": ("floor", "ours-workers", "keras-processes", "torch"),
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Describes the options.

    Args:
        command: The parser of `bench`.
    """
    names = ", ".join(figures((1,), 1))
    data = command.add_argument_group("what to feed")
    data.add_argument("--source", choices=("array", "memmap", "generator", "sequence"), help="default: array")
    data.add_argument("--shape", type=_numbers, help="shape of a sample (default: 64,64,3)")
    data.add_argument("--dtype", type=_dtype, help="dtype of a sample (default: float32)")
    data.add_argument("--samples", type=_number, help="samples of an epoch (default: 20000)")
    data.add_argument("--batch-size", type=_number, help="global batch size (default: 256)")
    data.add_argument("--item-ms", type=float, help="CPU time to make a batch, for generator and sequence")
    how = command.add_argument_group("how to feed it")
    how.add_argument("--replicas", type=_numbers, help="numbers of replicas (default: 1,2,4,8, or up to all GPUs)")
    how.add_argument(
        "--workers", type=_number, default=2, help="processes or threads of those that have them (default: 2)"
    )
    how.add_argument("--contenders", type=_contenders, help=f"only these of {', '.join(_in_grids())}")
    how.add_argument("--against", metavar="MODULE:FUNCTION", help="a contender of your own; see the docs")
    how.add_argument("--cell", type=_words, default=(), metavar="NAME,...", help=f"named figures instead: all, {names}")
    run = command.add_argument_group("how long")
    run.add_argument("--quick", action="store_true", help="a small comparison that ends in two minutes")
    run.add_argument("--check", action="store_true", help="named figures with wide limits; the exit code tells")
    run.add_argument("--rounds", type=_number, help="how often each contender has its turn (default: 5)")
    run.add_argument(
        "--seconds", type=float, help="how long to measure each time, after an epoch of warm-up (default: 3)"
    )
    out = command.add_argument_group("where to put it, besides the table")
    out.add_argument("--json", type=pathlib.Path, metavar="FILE", help="everything, as JSON")
    out.add_argument("--csv", type=pathlib.Path, metavar="FILE", help="a row for each process")
    out.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="a picture, such as bench.png; needs matplotlib")


def run(options: argparse.Namespace) -> int:
    """Runs the benchmark and prints what it finds.

    Args:
        options: As `add_arguments` describes them.

    Returns:
        The exit code: 1 if `--check` found a limit broken or could not measure something, else 0.

    Raises:
        FeedError: If the options do not fit each other or this machine.
    """
    given = [name for name in _DATA if getattr(options, name) is not None]
    if given and (options.cell or options.check):
        raise FeedError(
            f"Named figures have data and contenders of their own. Leave out --{given[0].replace('_', '-')}."
        )
    for name, value in {**_DATA, **_FULL, **(_QUICK if options.quick else _CHECK if options.check else {})}.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.plot:
        bench_report.require_matplotlib()
    chosen, left_out = _leave_out_what_is_missing(_choose(options))
    machine = bench_report.describe_machine()
    print(bench_report.machine_text(machine), *left_out, sep="\n", flush=True)
    measured = []
    with tempfile.TemporaryDirectory(prefix="keras_gpufeed_bench_") as folder:
        deadline = time.monotonic() + _QUICK_SECONDS if options.quick else math.inf
        turns = _Turns(chosen, options.rounds, deadline, pathlib.Path(folder))
        for figure in chosen:
            measured.append(bench_report.summarize(figure, turns.take(figure), options.check))
            print(bench_report.figure_text(measured[-1]), flush=True)
            bench_report.write(machine, measured, options.json, options.csv, options.plot)
    print(bench_report.LEGEND)
    return bench_report.print_verdict(measured) if options.check else 0


# --- Options -----------------------------------------------------------------------------------------------


def _number(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, received {text!r}")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_number(part) for part in text.split(","))


def _dtype(text: str) -> str:
    try:
        return tf.as_dtype(text).as_numpy_dtype().dtype.name
    except (TypeError, AttributeError):
        raise argparse.ArgumentTypeError(f"must be a dtype of numbers such as float32, received {text!r}") from None


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _contenders(text: str) -> tuple[str, ...]:
    unknown = [name for name in _words(text) if name not in _in_grids()]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown {unknown[0]!r}; known are {', '.join(_in_grids())}")
    return _words(text)


def _in_grids() -> list[str]:
    return [name for name, contender in CONTENDERS.items() if contender.sources and name != "against"]


def _choose(options: argparse.Namespace) -> list[Figure]:
    replicas = options.replicas or _default_replicas(options.quick or options.check)
    if options.check or options.cell:
        named = figures(replicas, options.workers)
        names = tuple(named) if "all" in options.cell else options.cell or CHECKED
        unknown = [name for name in names if name not in named]
        if unknown:
            raise FeedError(f"There is no figure {unknown[0]!r}. There are: all, {', '.join(named)}.")
        chosen = [named[name] for name in names]
    else:
        chosen = [_grid(options, replicas)]
    return [_with(figure, timed_seconds=options.seconds) for figure in chosen]


def _default_replicas(is_short: bool) -> tuple[int, ...]:
    num_devices = len(tf.config.list_physical_devices("GPU")) or 8
    if is_short:
        return (min(2, num_devices),)
    return tuple(number for number in (1, 2, 4, 8) if number <= num_devices)


def _grid(options: argparse.Namespace, replicas: tuple[int, ...]) -> Figure:
    is_indexed = options.source in ("array", "memmap")
    template = Task(
        "",
        source=options.source,
        shape=options.shape,
        dtype=options.dtype,
        num_samples=options.samples,
        global_batch_size=options.batch_size,
        num_workers=0 if is_indexed else options.workers,
        item_seconds=options.item_ms / 1000,
        against=options.against,
    )
    if template.steps_per_epoch < 2:
        raise FeedError(
            f"{options.samples} samples in global batches of {options.batch_size} make {template.steps_per_epoch} "
            "step(s) per epoch. The second half of each epoch is timed, so there must be at least two."
        )
    if options.item_ms and is_indexed:
        raise FeedError(f"--item-ms is the time to make a batch; source {options.source} makes none. Leave it out.")
    able = [name for name in _in_grids() if options.source in CONTENDERS[name].sources]
    wanted = options.contenders or (_QUICK_CONTENDERS[options.source] if options.quick else able)
    unable = [name for name in wanted if name not in able]
    if unable:
        raise FeedError(f"{unable[0]} cannot feed from source {options.source}. These can: {', '.join(able)}.")
    names = [name for name in able if name in wanted] + ["against"] * bool(options.against)
    return grid(template, tuple(names), replicas)


def _with(figure: Figure, **changes: Any) -> Figure:
    tasks = {label: dataclasses.replace(task, **changes) for label, task in figure.tasks.items()}
    return dataclasses.replace(figure, tasks=tasks)


def _leave_out_what_is_missing(chosen: list[Figure]) -> tuple[list[Figure], list[str]]:
    """Figures with only those contenders that this machine can run, and lines that name the others."""
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    kept: list[Figure] = []
    reasons: dict[str, None] = {}  # Each once, in order.
    for figure in chosen:
        tasks = {}
        for label, task in figure.tasks.items():
            package = CONTENDERS[task.contender].needs.partition(".")[0]
            if package and importlib.util.find_spec(package) is None:
                reasons[f"Left out: {bench_report.title(task)}, because {package} is not installed."] = None
            elif num_gpus and task.num_replicas > num_gpus:
                reasons[f"Left out: {task.num_replicas} replicas, because there are {num_gpus} GPU(s)."] = None
            else:
                tasks[label] = task
        if tasks:
            kept.append(dataclasses.replace(figure, tasks=tasks))
    if not kept:
        raise FeedError(" ".join(["Nothing is left to measure.", *reasons]))
    return kept, list(reasons)


# --- Processes ---------------------------------------------------------------------------------------------


class _Turns:
    """Runs the contenders of figures in turn, and says on the way how far it is.

    Args:
        chosen: All figures of the run.
        num_rounds: How often each contender has its turn.
        deadline: When to begin no further process, by the monotonic clock.
        folder: Where files of memory maps may lie.
    """

    def __init__(self, chosen: list[Figure], num_rounds: int, deadline: float, folder: pathlib.Path) -> None:
        self._num_rounds, self._deadline, self._folder = num_rounds, deadline, folder
        self._num_processes = num_rounds * sum(len(figure.tasks) for figure in chosen)
        self._began_at, self._number, self._longest_seconds = time.monotonic(), 0, 0.0

    def take(self, figure: Figure) -> list[dict[str, dict]]:
        """The results of all rounds of a figure, each by the labels of its tasks.

        Args:
            figure: One of those that were announced.
        """
        rounds: list[dict[str, dict]] = []
        for number in range(self._num_rounds):
            rounds.append({})
            for label, task in figure.tasks.items():
                began_at = time.monotonic()
                if began_at + self._longest_seconds > self._deadline:
                    print("The time is up; what is left of the rounds is left out.", file=sys.stderr)
                    return rounds
                self._number += 1
                place = f"[{self._number}/{self._num_processes}] {figure.name}, round {number + 1}"
                print(
                    f"{place}: {bench_report.title(task)}, {task.num_replicas} replica(s) ...", end=" ", file=sys.stderr
                )
                sys.stderr.flush()
                result = rounds[-1][label] = _run_process(self._with_file(task))
                self._longest_seconds = max(self._longest_seconds, time.monotonic() - began_at)
                print(f"{bench_report.brief(result)}{self._time_left()}", file=sys.stderr, flush=True)
        return rounds

    def _with_file(self, task: Task) -> Task:
        if task.source != "memmap":
            return task
        name = f"{task.dtype}_{'x'.join(map(str, (task.num_samples, *task.shape)))}.npy"
        task = dataclasses.replace(task, path=str(self._folder / name))
        if not pathlib.Path(task.path).exists():
            bench_contenders.write_file(task)
        return task

    def _time_left(self) -> str:
        seconds = (time.monotonic() - self._began_at) / self._number * (self._num_processes - self._number)
        seconds = min(seconds, max(self._deadline - time.monotonic(), 0.0))
        return f" (about {math.ceil(seconds / 60)} min left)" if seconds > 30 else ""


def _run_process(task: Task) -> dict[str, Any]:
    """Runs one contender and watches its memory; what it reports, or `failure`."""
    environment = {key: value for key, value in os.environ.items() if key != "KERAS_GPUFEED_VIRTUAL_DEVICES"}
    package = pathlib.Path(bench_contenders.__file__).parent
    paths = [str(package.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    command = [sys.executable, "-c", _PROGRAM, bench_contenders.__file__, json.dumps(dataclasses.asdict(task))]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=errors, start_new_session=True)
        try:
            curve, is_stuck = _watch(process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # With its workers, whatever it has left behind.
            process.wait()
        output.seek(0)
        errors.seek(0)
        lines, complaint = output.read().splitlines(), errors.read()
    if is_stuck:
        return {"failure": f"no result in {_MOST_SECONDS:.0f} seconds"}
    if process.returncode or not lines:
        return {"failure": _reason(complaint, process.returncode)}
    return _add_memory(json.loads(lines[-1]), curve)


def _watch(process: subprocess.Popen) -> tuple[list[tuple[float, int]], bool]:
    """Waits for a process; the curve of its memory, and whether it was given up."""
    curve: list[tuple[float, int]] = []
    stop_at = time.monotonic() + _MOST_SECONDS
    while process.poll() is None:
        if time.monotonic() > stop_at:
            return curve, True
        with contextlib.suppress(OSError):  # It has just ended.
            curve.append((time.monotonic(), bench_contenders.resident_bytes(process.pid)))
        time.sleep(_SAMPLING_SECONDS)
    return curve, False


def _add_memory(result: dict[str, Any], curve: list[tuple[float, int]]) -> dict[str, Any]:
    if "began_at" in result:
        began_at, ended_at, start = (result.pop(name) for name in ("began_at", "ended_at", "host_bytes"))
        peak = max((size for moment, size in curve if began_at <= moment <= ended_at), default=start)
        result["extra_host_bytes"] = max(peak - start, 0) + result["worker_bytes"]
    return result


def _reason(complaint: str, code: int) -> str:
    """The last exception of a traceback, in a line."""
    named = [line for line in complaint.splitlines() if re.match(r"\s*[\w.]*(Error|Exception)\b", line)]
    lines = named or complaint.split("\n")[-2:-1] or [""]
    return f"{lines[-1].strip()[:200]} (exit code {code})"
