"""Memory does not grow with the epochs of a fit, nor with the number of feeders a process has had."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

PHASES = ["epochs of arrays", "feeders of arrays", "epochs of a generator", "feeders of a generator"]


@pytest.mark.slow
def test_memory_does_not_grow():
    """Kept in each epoch, or by each feeder: a copy of the array would be 32 MB, a feeder's buffers 16 MB."""
    if not pathlib.Path("/proc/self/status").exists():
        pytest.skip("the memory of the process is read from /proc")
    script = pathlib.Path(__file__).with_name("memory_over_time.py")
    found = json.loads(subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout)
    assert list(found) == PHASES
    for phase, resident in found.items():
        assert len(resident) == 25
        early, late = np.median(resident[5:10]), np.median(resident[-5:])
        assert late - early < 100e6, phase  # Of the 15 times between them, 240 MB and more would be left.
