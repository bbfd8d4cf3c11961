"""What the benchmark tells: tables, files and a picture.

Flow:   bench_contenders -> bench_figures -> [bench_report] -> bench -> __main__
Owns:   medians and spreads, the description of the machine, the forms of the result.
Leaves: measuring (bench, bench_contenders).
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import statistics
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from . import __version__
from .bench_contenders import CONTENDERS, Task
from .bench_figures import Figure, Ratio
from .errors import FeedError

_METRICS = {  # Of a process: name in files, heading, factor, digits.
    "step_seconds": ("ms/step", 1e3, 3),
    "samples_per_second": ("samples/s", 1, 0),
    "gb_per_second": ("GB/s", 1, 2),
    "first_step_seconds": ("first step", 1, 2),
    "epoch_change_seconds": ("new epoch", 1e3, 1),
    "closing_seconds": ("end", 1, 2),
    "extra_host_bytes": ("host MB", 1e-6, 0),
    "extra_device_bytes": ("device MB", 1e-6, 0),
    "cpu_seconds_per_gb": ("CPU s/GB", 1, 2),
    "total_seconds": ("seconds", 1, 3),
}
_DRAWN = {
    "step_seconds": "milliseconds per step",
    "first_step_seconds": "seconds to the first step",
    "extra_host_bytes": "extra host memory, MB",
    "total_seconds": "seconds",
}
_BUSY_LOAD = 0.3  # Of a core, by programs that were there before.

LEGEND = """
How to read it: each row is the median over the rounds, with the smallest and the largest of them. The ratios are the
result: the times are those of this machine as it was in these minutes.
  ms/step       steady: the second half of each epoch, after an epoch of warm-up
  / ours        how many times as long as keras_gpufeed it takes, each time compared within a round
  first step    seconds from the call until the first step is done, with all that has to be made before
  new epoch     milliseconds from the last step of an epoch until the first of the next is done
  end           seconds from the last step until fit has returned, its iterator and helpers gone
  host MB       peak of host memory above what was there before the call, and what worker processes take for themselves
  CPU s/GB      CPU time of all its processes for each GB fed"""


def title(task: Task) -> str:
    """What a contender is called.

    Args:
        task: What it is to do.
    """
    return CONTENDERS[task.contender].title.format(workers=task.num_workers, against=task.against)


def brief(result: dict[str, Any]) -> str:
    """A result in a few words.

    Args:
        result: Of one process.
    """
    if "failure" in result:
        return f"failed: {result['failure']}"
    if "total_seconds" in result:
        return f"{result['total_seconds']:.3f} s"
    return f"{1e3 * result['step_seconds']:.3f} ms/step"


# --- The machine -------------------------------------------------------------------------------------------


def describe_machine() -> dict[str, Any]:
    """What the benchmark runs on, and how busy it is before the start."""
    processor = platform.processor() or platform.machine()
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    gpus = [
        tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name)
        for gpu in tf.config.list_physical_devices("GPU")
    ]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpus,
        "system": f"{platform.system()} {platform.release()}",
        "load_average": os.getloadavg()[0],
        "versions": {
            "keras_gpufeed": __version__,
            "Python": platform.python_version(),
            "TensorFlow": tf.__version__,
            "Keras": keras.__version__,
            "NumPy": np.__version__,
        },
    }


def machine_text(machine: dict[str, Any]) -> str:
    """The description in lines.

    Args:
        machine: From `describe_machine`.
    """
    devices = ", ".join(machine["gpus"]) or "no GPU: virtual devices on the CPU stand in for several"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"{machine['processor']}, {machine['cores']} core(s), {machine['memory_bytes'] / 2**30:.0f} GiB, {devices}",
        f"{versions}, {machine['system']}, {machine['date']}",
    ]
    if machine["load_average"] > _BUSY_LOAD * machine["cores"]:
        lines.append(
            f"Other programs keep this machine busy: the load is {machine['load_average']:.1f}. Figures will be off; "
            "wait until it is quiet for those that you mean to quote."
        )
    return "\n".join(lines)


# --- Medians -----------------------------------------------------------------------------------------------


def summarize(figure: Figure, rounds: list[dict[str, dict]], check: bool) -> dict[str, Any]:
    """A figure with its medians, in a form that JSON can hold.

    Args:
        figure: What was run.
        rounds: The results of each round, by label; a round may lack some.
        check: True to hold ratios to their wider limits, and to leave out those that have none.
    """
    cells = []
    for label, task in figure.tasks.items():
        results = [results[label] for results in rounds if label in results]
        metrics = [name for name in _METRICS if any(name in result for result in results)]
        spread = {name: _spread([result[name] for result in results if name in result]) for name in metrics}
        relative = [
            results[label]["step_seconds"] / results[base]["step_seconds"]
            for results in rounds
            for base in [_base_of(figure, task)]
            if "step_seconds" in results.get(label, {}) and "step_seconds" in results.get(base, {})
        ]
        cells.append(
            {
                "label": label,
                "title": title(task),
                "task": dataclasses.asdict(task),
                "rounds": results,
                **({"over_ours": _spread(relative)} if relative else {}),
                **spread,
            }
        )
    ratios = [_summarize_ratio(ratio, rounds, check) for ratio in figure.ratios]
    return {
        "name": figure.name,
        "what": figure.what,
        "cells": cells,
        "ratios": [ratio for ratio in ratios if not check or ratio["limit"] is not None],
    }


def _base_of(figure: Figure, task: Task) -> str:
    """The label of our own run that does the same as `task`."""
    alike = [label for label, other in figure.tasks.items() if _group(other) == _group(task)]
    for name in ("ours-workers", "ours"):
        for label in alike:
            if figure.tasks[label].contender == name:
                return label
    return ""


def _task_of(cell: dict[str, Any]) -> Task:
    return Task(**cell["task"])


def _group(task: Task) -> Task:
    """What tasks have in common that are compared in one table."""
    return dataclasses.replace(task, contender="", against="")


def _summarize_ratio(ratio: Ratio, rounds: list[dict[str, dict]], check: bool) -> dict[str, Any]:
    values = []
    for results in rounds:
        try:
            values.append(float(ratio.value(results)))
        except KeyError:  # A contender failed or was left out; the ratio then has a round less.
            continue
    limit = ratio.check_limit if check else ratio.limit
    spread = _spread(values) if values else None
    met = None if limit is None else spread is not None and ratio.meets(spread["median"], limit)
    return {
        "label": ratio.label,
        "unit": ratio.unit,
        "rounds": values,
        "spread": spread,
        "limit": limit,
        "at_least": ratio.at_least,
        "met": met,
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


# --- Text --------------------------------------------------------------------------------------------------


def figure_text(measured: dict[str, Any]) -> str:
    """A figure as tables in plain text, one for each group of contenders that do the same.

    Args:
        measured: From `summarize`.
    """
    lines = ["", f"== {measured['name']}: {measured['what']}"]
    groups: dict[Task, list[dict[str, Any]]] = {}
    for cell in measured["cells"]:
        groups.setdefault(_group(_task_of(cell)), []).append(cell)
    for task, cells in groups.items():
        columns = [name for name in _METRICS if any(name in cell for cell in cells)]
        lines += [
            "",
            _group_text(task, columns),
            *_table([_heading(columns), *(_row(cell, columns) for cell in cells)]),
        ]
        for cell in cells:
            failures = [result["failure"] for result in cell["rounds"] if "failure" in result]
            if failures:
                lines.append(f"  {cell['title']} failed {len(failures)} of {len(cell['rounds'])} times: {failures[-1]}")
    if measured["ratios"]:
        width = max(len(ratio["label"]) for ratio in measured["ratios"])
        lines.append("")
        lines += [f"  {ratio['label']:{width}}  {_ratio_text(ratio)}" for ratio in measured["ratios"]]
    return "\n".join(lines)


def _group_text(task: Task, columns: list[str]) -> str:
    on = f"{task.num_replicas} replica{'s' if task.num_replicas > 1 else ''}"
    if "step_seconds" not in columns:
        return on
    parts = [
        f"{task.source} of {task.num_samples} x {'x'.join(map(str, task.shape))} {task.dtype}",
        f"global batch {task.global_batch_size} ({task.batch_bytes / 1e6:.3g} MB)",
        on,
    ]
    if task.item_seconds:
        parts.append(f"{1e3 * task.item_seconds:g} ms of work for each batch")
    if task.steps_per_execution > 1:
        parts.append(f"{task.steps_per_execution} steps per execution")
    if task.allowed_bytes is not None:
        parts.append(f"{task.allowed_bytes / 1e6:.0f} MB of memory allowed")
    return ", ".join(parts)


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        f"  {title:{widths[0]}}" + "".join(f"  {text:>{width}}" for text, width in zip(texts, widths[1:]))
        for title, *texts in rows
    ]


def _heading(columns: list[str]) -> list[str]:
    texts = [""]
    for name in columns:
        texts.append(_METRICS[name][0])
        if name == "step_seconds":
            texts += ["min to max", "/ ours"]
    return texts


def _row(cell: dict[str, Any], columns: list[str]) -> list[str]:
    texts = [cell["title"]]
    for name in columns:
        _, factor, digits = _METRICS[name]
        values = {key: f"{factor * value:.{digits}f}" for key, value in cell[name].items()} if name in cell else {}
        texts.append(values.get("median", "-"))
        if name == "step_seconds":
            texts.append(f"{values['min']} to {values['max']}" if values else "-")
            texts.append(f"{cell['over_ours']['median']:.2f}" if "over_ours" in cell else "-")
    return texts


def _ratio_text(ratio: dict[str, Any]) -> str:
    unit = f" {ratio['unit']}" if ratio["unit"] else ""
    if ratio["spread"] is None:
        text = "not measured"
    else:
        median, least, most = (ratio["spread"][name] for name in ("median", "min", "max"))
        text = f"{_short(median)}{unit} ({_short(least)} to {_short(most)})"
    if ratio["limit"] is None:
        return text
    bound = "at least" if ratio["at_least"] else "at most"
    return f"{text:28}  {bound} {_short(ratio['limit'])}{unit}: {'met' if ratio['met'] else 'NOT MET'}"


def _short(number: float) -> str:
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"


def print_verdict(measured: list[dict[str, Any]]) -> int:
    """Says which limits were broken, and returns the exit code.

    Args:
        measured: All figures.
    """
    broken = [ratio for figure in measured for ratio in figure["ratios"] if not ratio["met"]]
    num_ratios = sum(len(figure["ratios"]) for figure in measured)
    print(f"\n{num_ratios - len(broken)} of {num_ratios} limits are kept.")
    return 1 if broken else 0


# --- Files -------------------------------------------------------------------------------------------------


def write(
    machine: dict[str, Any],
    measured: list[dict[str, Any]],
    to_json: pathlib.Path | None,
    to_csv: pathlib.Path | None,
    to_plot: pathlib.Path | None,
) -> None:
    """Writes what has been measured so far.

    Args:
        machine: From `describe_machine`.
        measured: Figures.
        to_json: The file for everything, or None.
        to_csv: The file for a row for each process, or None.
        to_plot: The file for a picture, or None.
    """
    if to_json:
        to_json.write_text(json.dumps({"machine": machine, "figures": measured}, indent=1) + "\n")
    if to_csv:
        _write_csv(to_csv, measured)
    if to_plot:
        _plot(to_plot, machine, measured)


def _write_csv(path: pathlib.Path, measured: list[dict[str, Any]]) -> None:
    settings = [field.name for field in dataclasses.fields(Task)]
    with path.open("w", newline="") as file:
        rows = csv.DictWriter(
            file, ["figure", "label", "round", *settings, *_METRICS, "failure"], extrasaction="ignore"
        )
        rows.writeheader()
        for figure in measured:
            for cell in figure["cells"]:
                shape = "x".join(map(str, cell["task"]["shape"]))
                for number, result in enumerate(cell["rounds"], 1):
                    place = {"figure": figure["name"], "label": cell["label"], "round": number}
                    rows.writerow({**place, **cell["task"], "shape": shape, **result})


def require_matplotlib() -> None:
    """Says at once, and not after minutes, that no picture can be drawn.

    Raises:
        FeedError: If matplotlib is missing.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise FeedError(
            "--plot draws with matplotlib, which is not installed: pip install keras-gpufeed[report]"
        ) from None


def _plot(path: pathlib.Path, machine: dict[str, Any], measured: list[dict[str, Any]]) -> None:
    """Time per step, time to first step and memory of every contender, with the spread over the rounds."""
    from matplotlib.figure import Figure as Picture

    groups: dict[tuple[str, Task], list] = {}
    for figure in measured:
        for cell in figure["cells"]:
            groups.setdefault((figure["name"], _group(_task_of(cell))), []).append(cell)
    heights = [0.9 + 0.32 * len(cells) for cells in groups.values()]
    picture = Picture(figsize=(12, sum(heights) + 0.7), layout="constrained")
    parts = picture.subfigures(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, ((name, task), cells) in zip(parts, groups.items()):
        metrics = [metric for metric in _DRAWN if any(metric in cell for cell in cells)]
        part.suptitle(f"{name}: {_group_text(task, metrics)}", fontsize=9, x=0.01, ha="left")
        all_axes = part.subplots(1, len(metrics), squeeze=False, sharey=True)[0]
        for axis, metric in zip(all_axes, metrics):
            _draw(axis, metric, cells)
    devices = ", ".join(machine["gpus"]) or "virtual devices"
    picture.suptitle(
        f"{machine['processor']}, {machine['cores']} cores, {devices}: median and range over the rounds. "
        "The ratios are the result.",
        fontsize=9,
    )
    picture.savefig(path, dpi=110)


def _draw(axis: Any, metric: str, cells: list[dict[str, Any]]) -> None:
    _, factor, digits = _METRICS[metric]
    for place, cell in enumerate(cells):
        if metric not in cell:
            axis.annotate("failed", (0, place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8)
            continue
        spread = {key: factor * value for key, value in cell[metric].items()}
        below, above = spread["median"] - spread["min"], spread["max"] - spread["median"]
        color = "tab:blue" if cell["task"]["contender"].startswith("ours") else "tab:gray"
        axis.barh(place, spread["median"], color=color, alpha=0.8)
        axis.errorbar(spread["median"], place, xerr=[[below], [above]], color="black", capsize=3, linewidth=1)
        text = f"{spread['median']:.{digits}f}"
        if metric == "step_seconds" and "over_ours" in cell:
            text += f"  = {cell['over_ours']['median']:.2f} x ours"
        axis.annotate(text, (spread["max"], place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set_yticks(range(len(cells)), [cell["title"] for cell in cells], fontsize=8)
    axis.set_ylim(len(cells) - 0.5, -0.5)
    axis.set_xlim(0, max(1.5 * axis.get_xlim()[1], 1e-3))
    axis.set_xlabel(_DRAWN[metric], fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
