"""The doctor: what it says of this machine, of broken ones, and how it says it."""

import configparser
import json
import os
import pathlib
import subprocess
import sys

import pytest

import keras_gpufeed as kg
from keras_gpufeed import doctor, selfcheck
from keras_gpufeed.__main__ import main

HOME = pathlib.Path(kg.__file__).resolve().parent.parent
GOOD = {
    "import": {"version": "2.15.1", "has_cuda": True, "cuda": "12.2", "cudnn": "8"},
    "gpus": [],
    "nccl": True,
}


def in_new_process(*arguments, path=(), **environment):
    """Runs the command line with folders that come before all others, and returns exit code and output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, HOME))), **environment}
    done = subprocess.run(
        [sys.executable, "-m", "keras_gpufeed", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


def pretend(folder, name, version, code):
    """Puts a package into a folder that is not what it should be."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)
    information = folder / f"{name}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.slow
def test_this_machine():
    """Nothing in the package may be wrong where its tests run; TensorFlow is really asked, and two replicas trained."""
    exit_code, output = in_new_process("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(output)["checks"]}
    assert [check for check in checks.values() if check["status"] == "fail"] == []
    assert (exit_code, json.loads(output)["ok"]) == (0, True)
    assert checks["import tensorflow"]["found"].startswith("2.15.")
    assert checks["two replicas: start"]["found"] == "2 virtual devices"
    assert checks["two replicas: collective"]["found"] == "a sum over 2 replicas is right on each"
    assert checks["two replicas: split"]["found"] == "11 samples in parts of: 3 3 3 2 2 3 3 3 2 2 1"
    assert checks["two replicas: order"]["found"] == "predictions of 9 samples: 0 1 2 3 4 5 6 7 8"
    assert checks["two replicas: worker"]["found"] == "samples from a worker process: 0 1 2 3 4 5"
    assert [checks[f"two replicas: {name}"]["status"] for name in ("gradient", "worker")] == ["pass", "pass"]


def test_wrong_numpy(tmp_path):
    pretend(tmp_path, "numpy", "2.2.6", "raise ImportError('built for another NumPy')")
    exit_code, output = in_new_process("doctor", path=[tmp_path])
    lines = [" ".join(line.split()) for line in output.splitlines()]
    at = lines.index("FAIL NumPy 2.2.6; wanted: below 2")
    assert lines[at + 1 : at + 4] == [
        'repair: pip install "numpy<2"',
        "FAIL import tensorflow ImportError: built for another NumPy",
        "repair: First repair what failed above: NumPy.",
    ]
    assert "skip two replicas: gradient TensorFlow cannot be imported" in lines
    assert lines[-1] == "2 of 21 checks failed."
    assert exit_code == 1


def test_tensorflow_that_kills_the_process(tmp_path, monkeypatch):
    pretend(tmp_path, "tensorflow", "2.15.1", "import os, signal\nos.kill(os.getpid(), signal.SIGILL)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    answers = list(doctor._ask("tensorflow"))
    assert answers == [
        ("import", None, "the process ended with SIGILL"),
        ("gpus", None, ""),
        ("nccl", None, ""),
    ]


def test_tensorflow_that_never_comes_up(tmp_path, monkeypatch):
    marker = tmp_path / "pid"
    code = f"import os, time\nopen({str(marker)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    pretend(tmp_path, "tensorflow", "2.15.1", code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "_START_SECONDS", 3.0)
    assert [answer.problem for answer in doctor._ask("tensorflow")] == ["no answer for 3 s", "", ""]
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


@pytest.fixture
def examined(monkeypatch):
    """Examines this machine with the answers of processes given, so that nothing is started."""

    def examine(**answers):
        problems = {name: str(value) for name, value in answers.items() if isinstance(value, Exception)}
        found = {name: value for name, value in {**GOOD, **answers}.items() if name not in problems}
        answered = {**dict.fromkeys(selfcheck.PARTS["replicas"], "fine"), **found}

        def ask(part):
            for name in selfcheck.PARTS[part]:
                yield doctor._Answer(name, None if name in problems else answered[name], problems.get(name, ""))

        monkeypatch.setattr(doctor, "_ask", ask)
        return {check.name: check for check in doctor.examine()}

    return examine


@pytest.fixture
def with_gpu(monkeypatch, tmp_path):
    """A machine whose nvidia-smi lists two GPUs."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho NVIDIA Made Up\necho NVIDIA Made Up\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("name", "version", "status", "found"),
    [
        ("numpy", "1.26.4", "pass", "1.26.4"),
        ("numpy", "2.0.0", "fail", "2.0.0; wanted: below 2"),
        ("keras", "3.0.5", "fail", "3.0.5; wanted: 2.15 or later, below 2.16"),
        ("tensorflow", "2.9.3", "fail", "2.9.3; wanted: 2.15 or later, below 2.16"),
        ("tensorflow", "2.15.0rc1", "pass", "2.15.0rc1"),
        ("tensorflow", "2.16.1", "fail", "2.16.1; wanted: 2.15 or later, below 2.16"),
        ("tensorflow", "", "fail", "not installed; wanted: 2.15 or later, below 2.16"),
    ],
)
def test_versions(examined, monkeypatch, name, version, status, found):
    ask = doctor._installed_version
    monkeypatch.setattr(doctor, "_installed_version", lambda asked: version if asked == name else ask(asked))
    check = examined()[{"numpy": "NumPy", "keras": "Keras", "tensorflow": "TensorFlow"}[name]]
    assert (check.status, check.found) == (status, found)
    assert check.repair.startswith("pip install") == (status == "fail")


def test_supported_versions_are_those_of_the_package():
    setup = configparser.ConfigParser()
    setup.read(HOME / "setup.cfg")
    required = setup["options"]["install_requires"].split()
    assert required == ["keras>=2.15,<2.16", "numpy<2", "tensorflow>=2.15,<2.16"]
    assert setup["options"]["python_requires"] == ">=3.9,<3.12"
    assert doctor.SUPPORTED == {
        "python": ((3, 9), (3, 12)),
        "tensorflow": ((2, 15), (2, 16)),
        "keras": ((2, 15), (2, 16)),
        "numpy": ((0,), (2,)),
    }


def test_a_machine_without_gpus_is_not_ill(examined, monkeypatch):
    monkeypatch.setattr(doctor, "_look_for_gpus", lambda: doctor._Machine(0, 0, "", 0, ()))
    checks = examined()
    assert [checks[name].status for name in ("NVIDIA driver", "GPUs of TensorFlow")] == ["note", "note"]
    assert not [check for check in checks.values() if check.status == "fail"]


@pytest.mark.parametrize(("number", "status"), [("4", "note"), ("four", "fail"), ("0", "fail"), ("", None)])
def test_virtual_devices_of_the_environment_are_named(examined, monkeypatch, number, status):
    monkeypatch.setenv("KERAS_GPUFEED_VIRTUAL_DEVICES", number)
    check = examined().get("virtual devices")
    assert (check and check.status) == (status or None)
    if status:
        assert f"KERAS_GPUFEED_VIRTUAL_DEVICES={number if status == 'note' else repr(number)}" in check.found


def test_gpus_that_tensorflow_does_not_see(examined, with_gpu):
    checks = examined()
    if checks["NVIDIA driver"].status == "pass":
        pytest.skip("this machine has a driver")
    assert checks["NVIDIA driver"].found == "2 GPU(s), no driver"
    assert "525.60" in checks["NVIDIA driver"].repair
    assert checks["CUDA and cuDNN"].status == "fail"
    assert checks["CUDA and cuDNN"].repair == 'pip install "tensorflow[and-cuda]==2.15.*"'
    assert checks["GPUs of TensorFlow"].status == "fail"


@pytest.mark.parametrize(
    ("driver_cuda", "visible", "has_cuda", "gpu_status", "words"),
    [
        (12020, None, True, "fail", "libraries are missing"),
        (12020, "-1", True, "note", "CUDA_VISIBLE_DEVICES='-1' hides them"),
        (12020, "", True, "note", "CUDA_VISIBLE_DEVICES='' hides them"),
        (12020, "0,1", True, "fail", "libraries are missing"),
        (12020, None, False, "fail", "built without CUDA"),
        (11080, None, True, "fail", "the driver does not serve it"),
    ],
)
def test_why_no_gpu_is_seen(examined, monkeypatch, driver_cuda, visible, has_cuda, gpu_status, words):
    machine = doctor._Machine(1, 1, "535.1", driver_cuda, ("NVIDIA Made Up",))
    monkeypatch.setattr(doctor, "_look_for_gpus", lambda: machine)
    monkeypatch.setattr(doctor, "_find_library", lambda name: ("", ""))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    checks = examined(**{"import": {**GOOD["import"], "has_cuda": has_cuda}})
    check = checks["GPUs of TensorFlow"]
    assert check.status == gpu_status
    assert words in check.found
    assert checks["NVIDIA driver"].status == ("pass" if driver_cuda >= 12000 else "fail")


def test_libraries_beside_tensorflow_are_found(examined, monkeypatch, tmp_path):
    for name, package in (("libcudart.so.12", "cuda_runtime"), ("libcudnn.so.8", "cudnn")):
        folder = tmp_path / "nvidia" / package / "lib"
        folder.mkdir(parents=True)
        (folder / name).touch()
    other = tmp_path / "other"
    other.mkdir()
    (other / "libcublas.so.11").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(other))
    found = examined()["CUDA and cuDNN"].found
    not_found, _, rest = found.partition("; found: ")
    assert "libcudart" not in not_found
    assert "libcudnn" not in not_found
    assert "libcudart.so.12" in rest
    assert "libcudnn.so.8" in rest
    assert f"{other}/libcublas.so.11 is another version" in rest or "libcublas.so.12" in rest


def test_two_gpus_that_work(examined, monkeypatch, with_gpu):
    gpus = [{"name": "NVIDIA Made Up", "grows": False}] * 2
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)
    monkeypatch.delenv("KERAS_GPUFEED_NO_NCCL", raising=False)
    checks = examined(gpus=gpus)
    assert checks["GPUs of TensorFlow"].found == "2: NVIDIA Made Up, NVIDIA Made Up"
    assert checks["CUDA and cuDNN"].status in ("pass", "note")
    assert "TF_FORCE_GPU_ALLOW_GROWTH=true" in checks["GPU memory growth"].repair
    assert checks["NCCL"].status == "pass"
    assert [name for name in checks if name.startswith("all GPUs")] == ["all GPUs: start", "all GPUs: collective"]
    monkeypatch.setenv("KERAS_GPUFEED_NO_NCCL", "1")
    assert "not used" in examined(gpus=gpus)["NCCL"].found


def test_shared_memory_of_a_container(examined, monkeypatch):
    usage = type("usage", (), {"total": 64 << 20, "free": 60 << 20})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: usage)
    check = examined()["shared memory"]
    assert check.status == "note"
    assert check.found.startswith("/dev/shm has 64 MB, 60 MB of them free; ")
    assert "--shm-size=1g" in check.repair


@pytest.mark.parametrize(
    ("limit", "status", "found", "repair"),
    [
        ((1 << 20, 1 << 20), "pass", "at most 1048576: enough for 262128 workers", ""),
        (
            (64, 4096),
            "fail",
            "at most 64: enough for 0 workers",
            "ulimit -n 1024, in the shell that starts the program.",
        ),
        ((64, 64), "fail", "at most 64: enough for 0 workers", "hard limit of 64"),
    ],
)
def test_open_files(examined, monkeypatch, limit, status, found, repair):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: limit)
    check = examined()["open files"]
    assert (check.status, check.found) == (status, found)
    assert repair in check.repair


def test_a_collective_that_hangs(examined, monkeypatch, capsys):
    examined(collective=TimeoutError("no answer for 60 s"))
    assert main(["doctor"]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "FAIL two replicas: collective no answer for 60 s repair: Threads may be limited" in output
    assert output.endswith("1 of 21 checks failed.")


def test_plan_and_doctor_do_not_need_tensorflow(tmp_path):
    pretend(tmp_path, "tensorflow", "2.15.1", "raise SystemError('imported')")
    pretend(tmp_path, "numpy", "1.26.4", "raise SystemError('imported')")
    exit_code, output = in_new_process(
        "plan", "--samples", "1025", "--batch-size", "256", "--replicas", "4", path=[tmp_path]
    )
    assert output.splitlines()[0] == "1025 samples in 5 steps of 256 on 4 replicas"
    assert exit_code == 0
