"""Examines a machine: versions, GPUs, limits, and a small training on two replicas.

Flow:   ... -> selfcheck -> [doctor] -> demo -> __main__
Owns:   the checks, what each finding means, how to repair it.
Leaves: what only TensorFlow can tell (selfcheck), which runs in processes of its own.

Nothing here imports TensorFlow, Keras or NumPy: where one of them is missing or does not fit, importing it fails
or ends the process, and that is when a doctor is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import glob
import importlib.metadata
import json
import multiprocessing
import os
import pathlib
import platform
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from . import __version__
from .selfcheck import PARTS, answer_in

# As in setup.cfg, which a test compares: from the first version on, and below the second.
SUPPORTED = {
    "python": ((3, 9), (3, 12)),
    "tensorflow": ((2, 15), (2, 16)),
    "keras": ((2, 15), (2, 16)),
    "numpy": ((0,), (2,)),
}
_TITLES = {"python": "Python", "tensorflow": "TensorFlow", "keras": "Keras", "numpy": "NumPy"}
_TENSORFLOW_NAMES = ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tensorflow-macos", "tensorflow-intel")

# What TensorFlow 2.15 loads to use a GPU.
_CUDA_LIBRARIES = (
    "libcudart.so.12",
    "libcublas.so.12",
    "libcufft.so.11",
    "libcusolver.so.11",
    "libcusparse.so.12",
    "libcudnn.so.8",
)
_OLDEST_CUDA_OF_DRIVER = 12000  # As the driver counts: CUDA 12.0, which driver 525.60 brought.
_NVIDIA, _DISPLAY_CLASS = "0x10de", "0x03"  # As PCI numbers them.
_INSTALL_TENSORFLOW = 'pip install "tensorflow==2.15.*"'
_INSTALL_CUDA = 'pip install "tensorflow[and-cuda]==2.15.*"'

_START_SECONDS = 180.0  # A cold TensorFlow on a network file system takes a minute or two.
_CHECK_SECONDS = 60.0  # For each check of the self-check; on an idle machine one takes a second or two.
_SMI_SECONDS = 30.0
_SMALL_SHARED_MEMORY = 1 << 30  # NVIDIA advises 1 GB for NCCL in containers; Docker gives 64 MB.
_FILES_WANTED = 1024  # What most machines allow.
_FILES_OF_PROGRAM = 64  # TensorFlow and a program with some files of its own.
_FILES_PER_WORKER = 4
_LONGEST_PROBLEM = 300  # Characters of a message.
_HOME = str(pathlib.Path(__file__).resolve().parent.parent)


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the examination.

    Args:
        name: What was examined.
        status: "pass", "fail", "note" for what is worth knowing, "skip" for what could not be examined.
        found: What was found.
        repair: What to do about it; empty if nothing.
    """

    name: str
    status: str
    found: str
    repair: str = ""

    def __str__(self) -> str:
        status, label = ("FAIL", "repair") if self.status == "fail" else (self.status, "hint")
        line = f"{status:6}{self.name:26}{self.found}"
        return f"{line}\n{'':32}{label}: {self.repair}" if self.repair else line


def run(as_json: bool = False) -> int:
    """Examines the machine and prints what it finds, line by line.

    Args:
        as_json: Whether to print one JSON object instead of lines.

    Returns:
        The exit code: 0, or 1 if a check failed.
    """
    checks = []
    for check in examine():
        checks.append(check)
        if not as_json:
            print(check, flush=True)
    num_failed = sum(check.status == "fail" for check in checks)
    if as_json:
        print(json.dumps({"ok": not num_failed, "checks": [dataclasses.asdict(check) for check in checks]}, indent=2))
    elif num_failed:
        print(f"\n{num_failed} of {len(checks)} checks failed.")
    else:
        print("\nNo check failed.")
    return 1 if num_failed else 0


def examine() -> Iterator[Check]:
    """All checks, one after another."""
    yield Check("keras_gpufeed", "pass", f"{__version__}, in {_HOME}")
    yield _check_machine()
    versions = list(_check_versions())
    yield from versions
    answers = {answer.name: answer for answer in _ask("tensorflow")}
    imported, gpus, nccl = (answers[name].found for name in ("import", "gpus", "nccl"))
    yield _check_import(imported, answers["import"].problem, versions)
    yield from _check_gpus(imported, gpus)
    yield from _check_virtual_devices()
    yield _check_nccl(nccl)
    yield _check_memory_growth(gpus)
    yield _check_shared_memory()
    yield _check_open_files()
    yield _check_start_methods()
    works = imported is not None
    yield from _check_replicas("replicas", "two replicas", works)
    if len(gpus or ()) > 1:
        yield from _check_replicas("gpus", "all GPUs", works)


# --- Versions ----------------------------------------------------------------------------------------------


def _check_machine() -> Check:
    found = f"{platform.platform()}, {os.cpu_count()} CPUs"
    if platform.system() != "Linux":
        return Check("machine", "note", found, "keras_gpufeed is tested on Linux only.")
    return Check("machine", "pass", found)


def _check_versions() -> Iterator[Check]:
    yield _judge_version("python", platform.python_version(), "Install Python 3.9, 3.10 or 3.11 and make a new venv.")
    installed = {name: _installed_version(name) for name in _TENSORFLOW_NAMES}
    name = next((name for name, version in installed.items() if version), "tensorflow")
    yield _judge_version("tensorflow", installed[name], _INSTALL_TENSORFLOW, name)
    yield _judge_version("keras", _installed_version("keras"), 'pip install "keras==2.15.*"')
    yield _judge_version("numpy", _installed_version("numpy"), 'pip install "numpy<2"')


def _installed_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _judge_version(name: str, version: str, repair: str, distribution: str = "") -> Check:
    first, end = (".".join(map(str, numbers)) for numbers in SUPPORTED[name])
    wanted = f"below {end}" if first == "0" else f"{first} or later, below {end}"
    if not version:
        return Check(_TITLES[name], "fail", f"not installed; wanted: {wanted}", repair)
    found = version if distribution in ("", name) else f"{version} ({distribution})"
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if SUPPORTED[name][0] <= numbers < SUPPORTED[name][1]:
        return Check(_TITLES[name], "pass", found)
    return Check(_TITLES[name], "fail", f"{found}; wanted: {wanted}", repair)


def _check_import(imported: dict[str, Any] | None, problem: str, versions: list[Check]) -> Check:
    name = "import tensorflow"
    if imported is not None:
        return Check(name, "pass", f"{imported['version']}, built {_describe_build(imported)}")
    causes = [check for check in versions if check.status == "fail"]
    if causes:
        repair = f"First repair what failed above: {', '.join(check.name for check in causes)}."
    elif "SIGILL" in problem:
        repair = "This CPU lacks AVX, which TensorFlow's packages need. Use another machine or build TensorFlow."
    else:
        repair = f"{_INSTALL_TENSORFLOW} --force-reinstall, in a new virtual environment."
    return Check(name, "fail", problem, repair)


def _describe_build(imported: dict[str, Any]) -> str:
    if not imported["has_cuda"]:
        return "without CUDA"
    return f"with CUDA {imported['cuda']} and cuDNN {imported['cudnn']}"


# --- GPUs --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Machine:
    """What the machine has for GPUs, TensorFlow aside."""

    on_bus: int  # NVIDIA display devices on the PCI bus.
    device_files: int
    driver: str  # Its version, empty without one.
    driver_cuda: int  # The newest CUDA that the driver serves, as 1000 x major + 10 x minor; 0 without one.
    names: tuple[str, ...]  # As nvidia-smi lists them.

    @property
    def has_gpu(self) -> bool:
        return bool(self.on_bus or self.device_files or self.names)


def _look_for_gpus() -> _Machine:
    classes = [
        pathlib.Path(path).parent
        for path in glob.glob("/sys/bus/pci/devices/*/vendor")
        if pathlib.Path(path).read_text().strip() == _NVIDIA
    ]
    version = pathlib.Path("/proc/driver/nvidia/version")
    found = re.search(r"Kernel Module.*?(\d+\.\d+(\.\d+)?)", version.read_text()) if version.exists() else None
    return _Machine(
        on_bus=sum((path / "class").read_text().startswith(_DISPLAY_CLASS) for path in classes),
        device_files=len(glob.glob("/dev/nvidia[0-9]*")),
        driver=found[1] if found else "",
        driver_cuda=_cuda_of_driver(),
        names=_ask_smi(),
    )


def _cuda_of_driver() -> int:
    version = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def _ask_smi() -> tuple[str, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())


def _check_gpus(imported: dict[str, Any] | None, gpus: list[dict[str, Any]] | None) -> Iterator[Check]:
    machine = _look_for_gpus()
    libraries = [(name, *_find_library(name)) for name in _CUDA_LIBRARIES]
    missing = [name for name, place, _ in libraries if not place]
    yield _check_driver(machine)
    yield _check_libraries(machine, libraries, missing, gpus)
    yield _check_seen(machine, missing, imported, gpus)


def _check_driver(machine: _Machine) -> Check:
    name = "NVIDIA driver"
    if not machine.has_gpu:
        return Check(name, "note", "this machine shows no NVIDIA GPU", "In a container, start it with --gpus all.")
    num_gpus = max(machine.on_bus, machine.device_files, len(machine.names))
    if not machine.driver_cuda:
        has = f"driver {machine.driver}, but its libcuda.so.1 cannot be loaded" if machine.driver else "no driver"
        repair = "Install NVIDIA driver 525.60 or later; in a container, start it with --gpus all."
        return Check(name, "fail", f"{num_gpus} GPU(s), {has}", repair)
    found = f"{machine.driver or 'loaded'}, for CUDA up to {_readable_cuda(machine.driver_cuda)}"
    if machine.driver_cuda < _OLDEST_CUDA_OF_DRIVER:
        return Check(name, "fail", f"{found}; TensorFlow 2.15 needs CUDA 12", "Install driver 525.60 or later.")
    return Check(name, "pass", found)


def _readable_cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _find_library(name: str) -> tuple[str, str]:
    """Where TensorFlow would find a library, or empty; and files of other versions of it."""
    for folder in _package_folders():
        if (folder / name).exists():
            return str(folder / name), ""
    try:
        ctypes.CDLL(name)
    except OSError:
        stem = name.partition(".so")[0]
        folders = ["/usr/local/cuda*/lib64", "/usr/lib/*-linux-gnu", *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
        others = sorted({other for folder in folders if folder for other in glob.glob(f"{folder}/{stem}.so.[0-9]*")})
        return "", others[-1] if others else ""
    return "on the loader's path", ""


def _package_folders() -> list[pathlib.Path]:
    """Where `tensorflow[and-cuda]` puts libraries: beside TensorFlow, whose files name these folders."""
    folders = []
    for entry in sys.path:
        folders += [path for path in pathlib.Path(entry or ".").glob("nvidia/*/lib") if path.is_dir()]
    return folders


def _check_libraries(
    machine: _Machine, libraries: list[tuple[str, str, str]], missing: list[str], gpus: list[Any] | None
) -> Check:
    name = "CUDA and cuDNN"
    if not missing:
        return Check(name, "pass", "found: " + ", ".join(name for name, _, _ in libraries))
    others = [f"{other} is another version" for _, place, other in libraries if not place and other]
    found = [name for name, place, _ in libraries if place]
    text = "; ".join([f"not found: {', '.join(missing)}", *([f"found: {', '.join(found)}"] if found else []), *others])
    if gpus:  # It found them by ways of its own.
        return Check(name, "note", f"{text}; TensorFlow uses a GPU nevertheless")
    if machine.has_gpu:
        return Check(name, "fail", text, _INSTALL_CUDA)
    return Check(name, "note", text, f"With a GPU: {_INSTALL_CUDA}")


def _check_seen(
    machine: _Machine, missing: list[str], imported: dict[str, Any] | None, gpus: list[dict[str, Any]] | None
) -> Check:
    name = "GPUs of TensorFlow"
    if gpus is None:
        return Check(name, "skip", "TensorFlow could not be asked")
    if gpus:
        return Check(name, "pass", f"{len(gpus)}: {', '.join(gpu['name'] for gpu in gpus)}")
    if not machine.has_gpu:
        return Check(name, "note", "none; keras_gpufeed.use_virtual_devices(n) tries a program on n devices")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and not re.match(r"\s*(\d|GPU|MIG)", hidden):
        return Check(name, "note", f"none: CUDA_VISIBLE_DEVICES={hidden!r} hides them", "Unset CUDA_VISIBLE_DEVICES.")
    if imported is not None and not imported["has_cuda"]:
        return Check(name, "fail", "none: this TensorFlow is built without CUDA", _INSTALL_CUDA)
    if not machine.driver_cuda or machine.driver_cuda < _OLDEST_CUDA_OF_DRIVER:
        return Check(name, "fail", "none: the driver does not serve it", "See NVIDIA driver, above.")
    if missing:
        return Check(name, "fail", "none: libraries are missing", "See CUDA and cuDNN, above.")
    return Check(
        name,
        "fail",
        f"none, though the machine has {', '.join(machine.names) or 'one'}",
        'TF_CPP_MAX_VLOG_LEVEL=1 python -c "import tensorflow as tf; tf.config.list_physical_devices()" tells why.',
    )


def _check_virtual_devices() -> Iterator[Check]:
    variable = "KERAS_GPUFEED_VIRTUAL_DEVICES"
    number = os.environ.get(variable)
    if not number:
        return
    name = "virtual devices"
    if not number.isdigit() or int(number) < 1:
        wrong = f"{variable}={number!r} is no positive integer, so keras_gpufeed cannot be imported"
        yield Check(name, "fail", wrong, f"Unset {variable}, or set it to a number of devices.")
        return
    found = f"{variable}={number}: each program that imports keras_gpufeed sees so many devices that are none"
    yield Check(name, "note", found, f"To train on the devices there are, unset {variable}.")


def _check_nccl(has_nccl: bool | None) -> Check:
    name = "NCCL"
    if has_nccl is None:
        return Check(name, "skip", "TensorFlow could not be asked")
    if os.environ.get("KERAS_GPUFEED_NO_NCCL") == "1":
        return Check(name, "note", "not used: KERAS_GPUFEED_NO_NCCL=1; gradients travel by hierarchical copy")
    if not has_nccl:
        return Check(name, "note", "TensorFlow is built without it; set KERAS_GPUFEED_NO_NCCL=1 for several GPUs")
    return Check(name, "pass", "built into TensorFlow; carries gradients between GPUs")


def _check_memory_growth(gpus: list[dict[str, Any]] | None) -> Check:
    name = "GPU memory growth"
    if not gpus:
        return Check(name, "skip", "no GPU to ask")
    if all(gpu["grows"] for gpu in gpus) or os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH") == "true":
        return Check(name, "pass", "on: TensorFlow takes memory as it needs it")
    return Check(
        name,
        "note",
        "off: TensorFlow takes nearly all memory of each GPU at the start",
        "To share GPUs with other programs, set TF_FORCE_GPU_ALLOW_GROWTH=true.",
    )


# --- The machine -------------------------------------------------------------------------------------------


def _check_shared_memory() -> Check:
    name, folder = "shared memory", "/dev/shm"
    unnamed = hasattr(os, "memfd_create")
    used_by_workers = (
        "workers use unnamed memory instead" if unnamed else f"workers use files in {tempfile.gettempdir()}"
    )
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return Check(name, "note", f"no {folder}; {used_by_workers}")
    found = (
        f"{folder} has {_readable_bytes(usage.total)}, {_readable_bytes(usage.free)} of them free; {used_by_workers}"
    )
    if usage.total < _SMALL_SHARED_MEMORY:
        repair = "If NCCL between several GPUs complains of shared memory, start the container with --shm-size=1g."
        return Check(name, "note", found, repair)
    return Check(name, "pass", found)


def _readable_bytes(number: float) -> str:
    """In the units that containers are given memory in."""
    return f"{number / (1 << 30):.3g} GB" if number >= 1 << 30 else f"{number / (1 << 20):.3g} MB"


def _check_open_files() -> Check:
    name = "open files"
    try:
        import resource
    except ImportError:  # Windows has no such limit.
        return Check(name, "skip", "no limit to ask for")
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return Check(name, "pass", "no limit")
    num_workers = max(0, limit - _FILES_OF_PROGRAM) // _FILES_PER_WORKER
    found = f"at most {limit}: enough for {num_workers} workers"
    if num_workers < (os.cpu_count() or 1):
        repair = f"ulimit -n {_FILES_WANTED}, in the shell that starts the program."
        if highest != resource.RLIM_INFINITY and highest < _FILES_WANTED:
            repair = f"Raise the hard limit of {highest}; of a container by --ulimit nofile={_FILES_WANTED}."
        return Check(name, "fail", found, repair)
    return Check(name, "pass", found)


def _check_start_methods() -> Check:
    name, methods = "start methods", multiprocessing.get_all_start_methods()
    found = ", ".join(methods)
    if "spawn" not in methods or not sys.executable:
        return Check(name, "fail", f"{found}; workers are new interpreters", "Use workers=0.")
    return Check(name, "pass", f"{found}; workers are started by spawn unless told otherwise")


# --- Two replicas ------------------------------------------------------------------------------------------


def _check_replicas(part: str, where: str, works: bool) -> Iterator[Check]:
    repairs = {
        "start": "TensorFlow could be imported, above: the message is about Keras or keras_gpufeed.",
        "collective": "Set KERAS_GPUFEED_NO_NCCL=1, so that gradients travel without NCCL."
        if part == "gpus"
        else "Threads may be limited: see ulimit -u and the limits of the container.",
        "worker": "Use workers=0, and see the limits on processes (ulimit -u), open files and memory.",
    }
    other = "pip install --force-reinstall keras-gpufeed; if it stays, report it with this output."
    answers = _ask(part) if works else (_Answer(name, None, "") for name in PARTS[part])
    for name, found, problem in answers:
        title = f"{where}: {name}"
        if found is not None:
            yield Check(title, "pass", found)
        elif problem:
            yield Check(title, "fail", problem, repairs.get(name, other))
        else:
            yield Check(title, "skip", "not reached" if works else "TensorFlow cannot be imported")


# --- Other processes ---------------------------------------------------------------------------------------


class _Answer(NamedTuple):
    """What became of one question of the self-check."""

    name: str
    found: Any  # The answer; None if there is none.
    problem: str  # Why there is none; empty if the question was not reached.


def _ask(part: str) -> Iterator[_Answer]:
    """Runs a part of the self-check in a process of its own, with a time limit for each answer."""
    hidden = {"KERAS_GPUFEED_VIRTUAL_DEVICES", "TF_CONFIG"} | (
        {"CUDA_VISIBLE_DEVICES"} if part == "replicas" else set()
    )
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment["TF_CPP_MIN_LOG_LEVEL"] = "3"
    environment["PYTHONPATH"] = os.pathsep.join([_HOME, *filter(None, [environment.get("PYTHONPATH")])])
    if part == "replicas":
        environment["CUDA_VISIBLE_DEVICES"] = "-1"
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.selfcheck", part],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        reader = threading.Thread(target=_read, args=(process.stdout, lines))
        reader.start()
        try:
            has_ended = False
            for number, name in enumerate(PARTS[part]):
                if has_ended:
                    yield _Answer(name, None, "")
                    continue
                limit = _CHECK_SECONDS if number else _START_SECONDS
                try:
                    answer = _next_answer(lines, limit)
                except queue.Empty:
                    answer = {"wrong": f"no answer for {limit:.0f} s"}
                    has_ended = True
                if answer is None:
                    answer = {"wrong": _describe_end(process.wait(), errors)}
                    has_ended = True
                yield _Answer(name, answer.get("found"), _in_one_line(answer.get("wrong", "")))
                has_ended = has_ended or ("wrong" in answer and number == 0)
        finally:
            process.kill()  # Its worker processes end with it.
            process.wait()
            reader.join()


def _read(stream: Any, lines: queue.SimpleQueue[str | None]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def _next_answer(lines: queue.SimpleQueue[str | None], seconds: float) -> dict[str, Any] | None:
    """The next answer, or None if the process has ended; raises `queue.Empty` after so long."""
    deadline = time.monotonic() + seconds
    while True:
        line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        answer = None if line is None else answer_in(line)
        if line is None or answer is not None:
            return answer


def _describe_end(exit_code: int, errors: IO[bytes]) -> str:
    errors.seek(0)
    written = errors.read().decode(errors="replace").strip().splitlines()
    names = {-each: each.name for each in signal.Signals}
    end = names.get(exit_code, f"exit code {exit_code}")
    return f"the process ended with {end}" + (f": {written[-1]}" if written else "")


def _in_one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_PROBLEM else f"{line[:_LONGEST_PROBLEM]} ..."
