"""The benchmark, as a person runs it: what it compares, writes and says."""

import csv
import json
import os
import pathlib
import subprocess
import sys

import pytest

from keras_gpufeed.__main__ import main
from keras_gpufeed.bench_figures import CHECKED, figures
from keras_gpufeed.bench_report import figure_text, summarize

ROOT = pathlib.Path(__file__).parent.parent

LOADER = """
import sys
import tensorflow as tf

def feed(x, y, batch_size):
    assert "keras_gpufeed" not in sys.modules, "others are measured without this package"
    assert x.shape == (70, 4) and str(x.dtype) == "int16" and y.shape == (70,)
    assert tf.distribute.get_strategy().num_replicas_in_sync == 2
    return {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)}

def fail(x, y, batch_size):
    raise LookupError("no such data")
"""
SMALL = [
    "--shape",
    "4",
    "--samples",
    "70",
    "--batch-size",
    "16",
    "--dtype",
    "int16",
    "--replicas",
    "2",
    "--seconds",
    "0.05",
]


@pytest.fixture
def loader(tmp_path, monkeypatch):
    (tmp_path / "loader_of_test.py").write_text(LOADER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("KERAS_GPUFEED_VIRTUAL_DEVICES", "3")  # Each process of the benchmark has its own number.


@pytest.mark.slow
def test_a_comparison_is_printed_and_written(tmp_path, loader):
    files = {name: tmp_path / f"bench.{name}" for name in ("json", "csv", "png")}
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "keras_gpufeed", "bench", *SMALL, "--source", "memmap", "--rounds", "2"]
    command += ["--contenders", "ours", "--against", "loader_of_test:feed"]
    command += ["--json", files["json"], "--csv", files["csv"], "--plot", files["png"]]
    paths = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr

    assert "memmap of 70 x 4 int16, global batch 16 (0.000128 MB), 2 replicas" in done.stdout
    assert "The ratios are the\nresult" in done.stdout
    assert "core(s)" in done.stdout.splitlines()[0]
    assert "TensorFlow 2.15" in done.stdout.splitlines()[1]
    progress = [line.partition(" ...")[0] for line in done.stderr.splitlines() if line.startswith("[")]
    assert progress == [  # In turn: A B A B.
        "[1/4] grid, round 1: keras_gpufeed, 2 replica(s)",
        "[2/4] grid, round 1: loader_of_test:feed, 2 replica(s)",
        "[3/4] grid, round 2: keras_gpufeed, 2 replica(s)",
        "[4/4] grid, round 2: loader_of_test:feed, 2 replica(s)",
    ]

    report = json.loads(files["json"].read_text())
    assert set(report["machine"]) >= {"date", "processor", "cores", "memory_bytes", "gpus", "versions"}
    (figure,) = report["figures"]
    ours, other = figure["cells"]
    assert (ours["label"], other["label"]) == ("ours 2", "against 2")
    for cell in (ours, other):
        first, second = cell["rounds"]
        for result in (first, second):
            assert result["num_steps"] % 5 == 0  # Whole epochs of five steps.
            assert result["num_steps"] >= 5
            assert result["gb_per_second"] == pytest.approx(result["samples_per_second"] * 8e-9)
            assert result["samples_per_second"] == pytest.approx(14 / result["step_seconds"])
            assert 0 < result["first_step_seconds"] < 60
            assert 0 <= result["extra_host_bytes"] < 1e9
            assert result["cpu_seconds_per_gb"] > 0
            assert result["epoch_change_seconds"] > 0
            assert 0 < result["closing_seconds"] < 60
        assert cell["step_seconds"] == {
            "median": pytest.approx((first["step_seconds"] + second["step_seconds"]) / 2),
            "min": min(first["step_seconds"], second["step_seconds"]),
            "max": max(first["step_seconds"], second["step_seconds"]),
        }
    assert ours["over_ours"] == {"median": 1.0, "min": 1.0, "max": 1.0}

    rows = list(csv.DictReader(files["csv"].read_text().splitlines()))
    assert [(row["figure"], row["label"], row["round"], row["shape"], row["failure"]) for row in rows] == [
        ("grid", "ours 2", "1", "4", ""),
        ("grid", "ours 2", "2", "4", ""),
        ("grid", "against 2", "1", "4", ""),
        ("grid", "against 2", "2", "4", ""),
    ]
    assert float(rows[0]["step_seconds"]) == ours["rounds"][0]["step_seconds"]
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert list(temporary.iterdir()) == []  # The file of the memory map is gone.


@pytest.mark.slow
def test_a_contender_that_fails_is_told_and_the_others_go_on(loader, capfd):
    assert main(["bench", *SMALL, "--contenders", "copy", "--against", "loader_of_test:fail", "--rounds", "1"]) == 0
    printed = capfd.readouterr().out
    assert "loader_of_test:fail failed 1 of 1 times: LookupError: no such data (exit code 1)" in printed
    (row,) = [line.split() for line in printed.splitlines() if line.startswith("  loader_of_test:fail  ")]
    assert set(row[1:]) == {"-"}
    (row,) = [line for line in printed.splitlines() if line.startswith("  copying each batch in memory")]
    assert " to " in row


@pytest.mark.slow
def test_a_check_ends_with_an_exit_code(monkeypatch, capfd):
    assert main(["bench", "--check", "--cell", "import", "--rounds", "1"]) == 0
    printed = capfd.readouterr().out
    assert "at most 0.6 s: met" in printed
    assert "1 of 1 limits are kept." in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cell", "arrays"], ["no figure 'arrays'", "arrays-3kb", "distribute"]),
        (["--cell", "import", "--batch-size", "8"], ["Named figures have data", "Leave out --batch-size"]),
        (["--check", "--against", "a:b"], ["Named figures have data and contenders", "Leave out --against"]),
        (["--samples", "256"], ["256 samples", "global batches of 256", "at least two"]),
        (["--item-ms", "5"], ["--item-ms", "array", "Leave it out"]),
        (["--contenders", "ours,from-generator"], ["from-generator cannot feed", "source array", "slices"]),
    ],
)
def test_options_that_do_not_fit(arguments, words, capsys):
    assert main(["bench", *arguments]) == 1
    complaint = capsys.readouterr().err
    assert not [word for word in words if word not in complaint], complaint


def test_what_this_machine_lacks_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "--contenders", "torch"]) == 1
    assert "PyTorch DataLoader alone, because torch is not installed." in capsys.readouterr().err
    monkeypatch.setattr("tensorflow.config.list_physical_devices", lambda kind: ["GPU"] * 3)
    assert main(["bench", "--contenders", "floor", "--replicas", "4"]) == 1
    assert "Left out: 4 replicas, because there are 3 GPU(s)." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--replicas", "1,0"], "must be a whole number from 1, received '0'"),
        (["--dtype", "float31"], "must be a dtype of numbers such as float32, received 'float31'"),
        (["--dtype", "string"], "must be a dtype of numbers such as float32, received 'string'"),
        (["--contenders", "theirs"], "unknown 'theirs'; known are copy, floor, ours"),
    ],
)
def test_options_that_make_no_sense(arguments, words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


# --- What is read off the results --------------------------------------------------------------------------


def results_of(figure, seconds, **metrics):
    """Made-up results: `seconds` per step by contender, the same for each number of replicas."""
    return {
        label: {"step_seconds": seconds[task.contender], **{name: by[task.contender] for name, by in metrics.items()}}
        for label, task in figure.tasks.items()
    }


def test_ratios_of_arrays_are_medians_over_rounds():
    figure = figures((2,), 2)["arrays-3kb"]
    assert list(figure.tasks) == ["floor 2", "ours 2", "keras 2"]
    rounds = [
        results_of(
            figure,
            {"floor": 1.0, "ours": ours, "keras": 3.0},
            first_step_seconds={"floor": 0.1, "ours": 0.5, "keras": 1.0},
            extra_host_bytes={"floor": 0, "ours": 20_000_000, "keras": 627_000_000},
        )
        for ours in (2.0, 1.5, 9.0)
    ]
    measured = summarize(figure, rounds, check=False)
    assert [(ratio["spread"]["median"], ratio["limit"], ratio["met"]) for ratio in measured["ratios"]] == [
        (pytest.approx(2 / 3), 1.0, True),
        (pytest.approx(0.5), 0.6, True),
        (0.5, 0.25, False),
        (20.0, pytest.approx(76.845056), True),  # 64 MB and four batches of 1024 x 784 x 4 bytes.
        (627.0, None, None),
    ]
    assert measured["ratios"][0]["spread"]["max"] == 3.0
    assert measured["cells"][2]["over_ours"] == {"median": 1.5, "min": pytest.approx(1 / 3), "max": 2.0}
    text = " ".join(figure_text(measured).split())
    assert "time per step on 2 replicas, ours / Keras 0.667 (0.5 to 3) at most 1: met" in text
    assert "time to first step on 2 replicas, ours / Keras 0.5 (0.5 to 0.5) at most 0.25: NOT MET" in text


def test_a_ratio_without_results_is_not_met():
    figure = figures((1,), 2)["generator-38mb"]
    results = results_of(figure, {"floor": 1.0, "ours": 2.0, "keras": 4.0, "from-generator": 3.0})
    assert [ratio["met"] for ratio in summarize(figure, [results], check=False)["ratios"]] == [True, None]
    results["keras 1"] = {"failure": "no memory"}
    measured = summarize(figure, [results], check=True)
    assert [(ratio["met"], ratio["spread"]) for ratio in measured["ratios"]] == [(False, None)]
    assert "not measured" in figure_text(measured)


@pytest.mark.parametrize(
    ("name", "seconds", "expected"),
    [
        ("uint8-transform", {"floor": 1, "ours": 2, "slices": 8, "gather": 4}, [0.5]),
        (
            "workers-38mb",
            {"floor": 0, "ours-workers": 1, "keras-threads": 7, "keras-processes": 30, "torch": 4},
            [30, 7, 4],
        ),
        (
            "workers-60ms",
            {"loop": 6, "ours": 7, "ours-workers": 4, "keras": 9, "keras-processes": 16, "torch": 5},
            [0.875, 0.75, 4, 1.25],
        ),
        ("replicas", {"floor": 1, "ours": 3}, [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32]),
        ("exactness", {"ours": 3, "ours-inexact": 2}, [1.5, 1.5]),
    ],
)
def test_ratios_of_other_figures(name, seconds, expected):
    figure = figures((2,), 2)[name]
    results = results_of(figure, seconds)
    assert [ratio.value(results) for ratio in figure.ratios] == pytest.approx(expected)


def test_steps_per_execution_saves_what_the_floor_saves():
    figure = figures((2,), 2)["steps-per-execution"]
    seconds = {"floor 1": 5.0, "ours 1": 8.0, "keras 1": 9.0, "floor 16": 1.0, "ours 16": 6.0, "keras 16": 5.0}
    results = {label: {"step_seconds": seconds[label]} for label in figure.tasks}
    assert [ratio.value(results) for ratio in figure.ratios] == [0.5, 1.2]


def test_named_figures_are_what_their_names_say():
    named = figures((1, 2, 4, 8), 3)
    assert set(CHECKED) <= set(named)
    sizes = {name: next(iter(figure.tasks.values())).batch_bytes for name, figure in named.items()}
    assert sizes["arrays-49kb"] == 256 * 64 * 64 * 3 * 4
    assert (sizes["generator-38mb"], sizes["workers-3mb"], sizes["generator-100kb"]) == (38_535_168, 3_211_264, 100_352)
    assert {task.num_replicas for task in named["arrays-600kb"].tasks.values()} == {1, 2, 4, 8}
    assert {task.num_replicas for task in named["replicas"].tasks.values()} == {1, 2, 4, 8, 16, 32}
    assert {task.num_workers for task in named["workers-60ms"].tasks.values()} == {3}
    limited = named["memmap"].tasks["limited"]
    assert 4 * limited.allowed_bytes == limited.num_samples * limited.sample_bytes == 1_966_080_000
    for figure in named.values():  # The second half of an epoch is what is timed.
        assert all(task.steps_per_epoch >= 2 * task.steps_per_execution for task in figure.tasks.values())
