"""The plan on the command line, and its picture."""

import subprocess
import sys

import pytest

import keras_gpufeed as kg
from keras_gpufeed.__main__ import main
from keras_gpufeed.plan_picture import draw_plan

WORDS = ["plan", "--samples", "1025", "--batch-size", "256", "--replicas", "4"]


def texts_of(plan, path):
    """All that is written in a picture; Matplotlib writes SVG text as comments and outlines."""
    draw_plan(plan, str(path))
    drawn = path.read_text()
    return [line.strip()[5:-4] for line in drawn.splitlines() if line.strip().startswith("<!-- ")]


def test_a_plan_without_data(capsys):
    assert main(WORDS) == 0
    assert capsys.readouterr().out == (
        "1025 samples in 5 steps of 256 on 4 replicas\n"
        "  strategy        MirroredStrategy\n"
        "  a full step     64 + 64 + 64 + 64 samples\n"
        "  the last step   1 sample: all 4 replicas compute it, replica 0 counts it\n"
        "  shares          all steps even: no replica weighs more than another\n"
        "  left out        nothing\n"
        "  stock Keras     the last step 1 + 0 + 0 + 0 samples: replicas 1 to 3 get no sample; each counts 0.25 times "
        "in the gradient\n"
        "  batch size      256 keeps all replicas equally busy\n"
    )


def test_a_plan_goes_into_a_pipe_that_closes():
    command = [sys.executable, "-m", "keras_gpufeed", *WORDS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


@pytest.mark.parametrize("word", ["0", "-3", "1,000", "1e3"])
def test_numbers_that_make_no_plan(capsys, word):
    with pytest.raises(SystemExit):
        main(["plan", "--samples", word, "--replicas", "2"])
    assert "must be a whole number from 1 on" in capsys.readouterr().err


def test_a_picture_says_who_gets_what(tmp_path):
    texts = texts_of(kg.BatchPlan(33, 10, 4), tmp_path / "plan.svg")
    assert texts[-1] == "33 samples in 4 steps of 10 on 4 replicas"
    for text in (
        "keras_gpufeed, steps 1 to 3",
        "stock Keras, steps 1 to 3",
        "3 samples, share 1.2",
        "2 samples, share 0.8",
        "3 samples, each 0.833 times",
        "1 sample, each 2.5 times",
        "keras_gpufeed, step 4, the last",
        "3 samples, counted by replica 0",
        "1 sample, each 0.75 times",
        "no sample",
    ):
        assert any(text == found.strip() for found in texts), text


@pytest.mark.parametrize(
    ("plan", "title"),
    [
        (kg.BatchPlan(1024, 256, 2), "keras_gpufeed, each step"),
        (kg.BatchPlan(5, 8, 2), "keras_gpufeed, the only step"),
        (kg.BatchPlan(12, 8, 2), "keras_gpufeed, step 1"),
        (kg.BatchPlan(9000, 1000, 100), "replica 96"),
    ],
)
def test_titles_of_pictures(tmp_path, plan, title):
    assert title in texts_of(plan, tmp_path / "plan.svg")


def test_a_picture_from_the_command_line(tmp_path, capsys):
    path = tmp_path / "plan.png"
    assert main([*WORDS, "--plot", str(path)]) == 0
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(("name", "words"), [("plan.docx", "not supported"), ("nowhere/plan.png", "No such file")])
def test_pictures_that_cannot_be_written(tmp_path, capsys, name, words):
    assert main([*WORDS, "--plot", str(tmp_path / name)]) == 1
    assert words in capsys.readouterr().err


def test_matplotlib_is_needed_for_pictures_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(kg.FeedError, match=r"pip install keras-gpufeed\[report\]"):
        draw_plan(kg.BatchPlan(9, 8, 2), str(tmp_path / "plan.png"))
