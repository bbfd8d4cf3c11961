"""From measured times to the cause and the knob: a table."""

import pytest

from keras_gpufeed.verdict import Rates, judge


def rates(**given):
    ordinary = {
        "num_steps": 100,
        "samples_per_step": 256,
        "step_seconds": 0.020,
        "wait_seconds": 0.0002,
        "python_seconds": 0.001,
        "num_processors": 8,
    }
    return Rates(**{**ordinary, **given})


@pytest.mark.parametrize(
    ("given", "bound_by", "lost_share", "knob"),
    [
        ({}, "compute", 0.06, "a faster or further device"),
        # A wait too short to act on.
        ({"wait_seconds": 0.0019}, "compute", 0.145, "a faster or further device"),
        # A source that takes four times as long as the rest of the step.
        (
            {"wait_seconds": 0.015, "source_seconds": 0.02, "source_kind": "workers"},
            "source",
            0.75,
            "workers=4 would hide it. Processes take some seconds to start, once.",
        ),
        # Two workers together give a batch in 20 ms, so one takes 40 ms.
        (
            {"wait_seconds": 0.010, "source_seconds": 0.02, "source_kind": "workers", "workers": 2},
            "source",
            0.5,
            "workers=4 would hide it.",
        ),
        (
            {"wait_seconds": 0.015, "source_seconds": 0.02, "source_kind": "function"},
            "source",
            0.75,
            "worker_id and num_workers, with workers=4",
        ),
        (
            {"wait_seconds": 0.018, "source_seconds": 0.02, "source_kind": "workers", "num_processors": 2},
            "source",
            0.9,
            "There are 2 processors",
        ),
        ({"wait_seconds": 0.015, "source_seconds": 0.02, "source_kind": "arrays"}, "source", 0.75, "in memory"),
        # Fast enough on average, but not when it is needed.
        ({"wait_seconds": 0.008, "source_seconds": 0.0115}, "source", 0.4, "prefetch=8 would even it out"),
        ({"wait_seconds": 0.012, "copy_seconds": 0.019, "copied_bytes": 1e8}, "copy", 0.6, "smaller dtype"),
        ({"wait_seconds": 0.012, "copy_seconds": 0.019, "copied_bytes": 1e8, "prefetch": 0}, "copy", 0.6, "prefetch=2"),
        # Two copies at a time give a batch in 19 ms.
        (
            {"wait_seconds": 0.012, "copy_seconds": 0.038, "copied_bytes": 1e8, "parallel_reads": 2},
            "copy",
            0.6,
            "100 MB for each batch are copied, at 5.3 GB/s",
        ),
        (
            {"wait_seconds": 0.012, "copy_seconds": 0.030, "transform_seconds": 0.036, "parallel_reads": 2},
            "transform",
            0.6,
            "prefetch=5 would run as many",
        ),
        # Two transforms at a time give a batch in 20 ms.
        ({"wait_seconds": 0.010, "transform_seconds": 0.040}, "transform", 0.5, "prefetch=4 would run as many"),
        (
            {"wait_seconds": 0.010, "transform_seconds": 0.040, "num_processors": 2},
            "transform",
            0.5,
            "it would take 4 processors to hide it, and there are 2",
        ),
        # Steps that take long because there are so many.
        (
            {"samples_per_step": 4, "step_seconds": 0.001, "wait_seconds": 0.0001, "python_seconds": 0.0006},
            "python",
            0.6,
            "batch_size=32",
        ),
        # They wait, but no stage of the feed takes long.
        (
            {"samples_per_step": 4, "step_seconds": 0.001, "wait_seconds": 0.0005, "python_seconds": 0.0002},
            "python",
            0.5,
            "batch_size=32",
        ),
        ({"replica_seconds": (0.008, 0.018, 0.009, 0.007)}, "replica", 0.5, "device of replica 1"),
        # A source that computes in Python holds its interpreter: in the step and around it.
        (
            {
                "python_seconds": 0.009,
                "source_seconds": 0.019,
                "source_cpu_seconds": 0.018,
                "quick_compute_seconds": 0.0008,
                "quick_python_seconds": 0.001,
                "source_kind": "function",
            },
            "source",
            0.91,
            "with workers=11, would hide it",
        ),
        # It costs at most what it computes.
        (
            {"source_seconds": 0.005, "source_cpu_seconds": 0.004, "quick_compute_seconds": 0.005},
            "source",
            0.21,
            "even it out",
        ),
        # Steps that vary are not owed to a source that sleeps.
        (
            {
                "source_seconds": 0.015,
                "source_cpu_seconds": 0.0001,
                "quick_compute_seconds": 0.005,
                "quick_python_seconds": 0.001,
            },
            "compute",
            0.065,
            "a faster or further device",
        ),
        # A source that computes while the devices do, and is in nobody's way.
        (
            {
                "source_seconds": 0.015,
                "source_cpu_seconds": 0.015,
                "quick_compute_seconds": 0.0187,
                "quick_python_seconds": 0.001,
            },
            "compute",
            0.065,
            "a faster or further device",
        ),
        # Devices that are processors compute longer while others copy.
        (
            {
                "wait_seconds": 0.002,
                "copy_seconds": 0.036,
                "copied_bytes": 1e8,
                "parallel_reads": 2,
                "copies_compete": True,
                "quick_compute_seconds": 0.005,
                "quick_python_seconds": 0.001,
            },
            "copy",
            0.7,
            "smaller dtype",
        ),
        # It costs at most what copying takes, and nothing where devices have processors of their own.
        (
            {"copy_seconds": 0.001, "copies_compete": True, "quick_compute_seconds": 0.005},
            "compute",
            0.11,
            "a faster or further device",
        ),
        (
            {"copy_seconds": 0.036, "copies_compete": False, "quick_compute_seconds": 0.005},
            "compute",
            0.06,
            "a faster or further device",
        ),
        # Replicas that differ by little are no cause.
        ({"replica_seconds": (0.016, 0.018, 0.017, 0.0165)}, "compute", 0.06, "a faster or further device"),
    ],
)
def test_cause_share_and_knob(given, bound_by, lost_share, knob):
    verdict = judge(rates(**given))
    assert verdict.bound_by == bound_by
    assert verdict.lost_share == pytest.approx(lost_share)
    assert knob in verdict.knob


def test_the_larger_loss_is_the_cause():
    both = {"python_seconds": 0.006, "source_seconds": 0.02}
    assert judge(rates(wait_seconds=0.005, **both)).bound_by == "python"
    assert judge(rates(wait_seconds=0.007, **both)).bound_by == "source"


def test_words():
    assert str(judge(rates(wait_seconds=0.015, source_seconds=0.02, source_kind="workers"))) == (
        "Data-bound by the source: 75 % of the time is lost.\n"
        "Steps waited 15.0 of 20.0 ms for data; the source takes 20.0 ms for a batch, the rest of a step 5.0 ms.\n"
        "workers=4 would hide it. Processes take some seconds to start, once."
    )


def test_few_steps_are_said_to_be_few():
    few = "Only 4 step(s) could be measured: train longer before you act on it."
    assert judge(rates(num_steps=4)).reason.endswith(few)
    assert few not in judge(rates(num_steps=10)).reason


def test_a_larger_batch_is_a_multiple_of_the_batch_size():
    verdict = judge(rates(python_seconds=0.012, samples_per_step=31.3, batch_size=32))
    assert "batch_size=256 where there are so many samples" in verdict.knob
