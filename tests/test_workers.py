"""Worker processes: order, memory, failures, and that nothing of them is left behind."""

import functools
import gc
import itertools
import logging
import os
import pathlib
import random
import re
import select
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from worker_sources import (
    ITEMS,
    Careful,
    Dying,
    Growing,
    Holder,
    Kept,
    Once,
    OnlyHere,
    Raising,
    Ranges,
    Restarting,
    SaysMore,
    Slow,
    Stuck,
    TakesOthers,
    TidyingUp,
    draws,
    enormous,
    local_function,
    made,
    mebibyte,
    number,
    public_names,
    rising,
    slow_number,
    streamed_draws,
    surrounded_by_a_generator,
    surroundings,
    up_and_down,
)

from keras_gpufeed import packing, processes, ring, shipping, workers
from keras_gpufeed.errors import SourceError, WorkerError
from keras_gpufeed.workers import WorkerPool

PATIENCE_SECONDS = 60  # For what must happen; how long it takes is no test's business.


# Tools.


def tasks(num_items, epoch=0):
    return [(epoch, index) for index in range(num_items)]


def values(items):
    return [int(item.ravel()[0]) for item in items]


def wait_until(condition, seconds=PATIENCE_SECONDS):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def is_alive(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"  # A zombie has ended, whether or not someone has asked after it.


def children(pid="self"):
    """Process ids of the workers that a process has."""
    found = []
    for listing in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in listing.read_text().split()]
    return [child for child in found if is_alive(child)]


def descriptors(pid="self"):
    return len(os.listdir(f"/proc/{pid}/fd"))


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "keras_gpufeed"]


@pytest.fixture(autouse=True)
def same_start():
    """Nothing here touches TensorFlow, so there are no seeds to set and no graphs to clear."""


@pytest.fixture(scope="module", autouse=True)
def no_process_left():
    before = set(children())
    yield
    gc.collect()
    wait_until(lambda: set(children()) <= before)


@pytest.fixture(scope="module")
def shared_pool(no_process_left):
    """A pool for tests that only need another source."""
    with WorkerPool(number, 2, seed=0, prefetch=2) as pool:
        yield pool


# Items.


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        expected, found = list(expected.values()), list(found.values())
    if isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert found.tolist() == expected.tolist()
    elif isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for pair in zip(found, expected):
            assert_same(*pair)
    else:
        assert found == expected


def test_items_come_as_they_were_made(shared_pool):
    shared_pool.update(made)
    for make, item in zip(ITEMS.values(), shared_pool.map(tasks(len(ITEMS)))):
        assert_same(item, make())


def test_items_may_have_types_that_numpy_does_not_know(shared_pool):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    value = np.arange(4).astype(ml_dtypes.bfloat16)
    shared_pool.update(Kept(value))
    (item,) = shared_pool.map(tasks(1))
    assert_same(item, value)


def test_arrays_are_aligned_contiguous_and_writable(shared_pool):
    shared_pool.update(made)
    for name in ("int8", "float16", "every other", "Fortran", "tuple", "large"):
        (item,) = shared_pool.map([(0, list(ITEMS).index(name))])
        for array in item if isinstance(item, tuple) else [item]:
            assert array.ctypes.data % 64 == 0
            assert array.flags.c_contiguous
            assert array.flags.writeable


def test_an_array_that_appears_twice_is_one_array(shared_pool):
    shared_pool.update(Kept((same := np.arange(1000), same)))
    ((x, y),) = shared_pool.map(tasks(1))
    assert x is y


def test_item_that_cannot_be_sent(shared_pool):
    shared_pool.update(surrounded_by_a_generator)
    with pytest.raises(SourceError, match=re.escape("item['x'][1] is a generator")):
        list(shared_pool.map(tasks(1)))


# Order and how far ahead.


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_each_once_and_in_order(tmp_path, num_workers):
    with WorkerPool(Once(tmp_path), num_workers, seed=0, prefetch=2) as pool:
        assert values(pool.map(tasks(20))) == list(range(20))
        assert values(pool.map(tasks(5, epoch=1))) == list(range(100, 105))
    assert len(list(tmp_path.iterdir())) == 25


def test_works_ahead_but_not_further(tmp_path):
    read = []
    with WorkerPool(Once(tmp_path), 2, seed=0, prefetch=3) as pool:
        items = pool.map(read.append(task) or task for task in tasks(100))
        for _ in range(4):
            next(items)
        wait_until(lambda: len(list(tmp_path.iterdir())) == 4 + 3 + 2)
        time.sleep(0.2)
        assert len(list(tmp_path.iterdir())) == 4 + 3 + 2
        assert len(read) == 4 + 3 + 2


def test_endless_tasks(shared_pool):
    shared_pool.update(number)
    items = shared_pool.map((0, index) for index in itertools.count())
    assert values(itertools.islice(items, 7)) == list(range(7))
    items.close()
    assert values(shared_pool.map(tasks(3))) == [0, 1, 2]


def test_work_that_nobody_waits_for_is_left(tmp_path):
    with WorkerPool(Slow(tmp_path), 1, seed=0, prefetch=8) as pool:
        items = pool.map(tasks(100))
        next(items)
        assert values(pool.map(tasks(2, epoch=1))) == [100, 101]
        assert len(list(tmp_path.glob("0-*"))) <= 4  # Of 9 that were under way.


def test_any_thread_may_ask(shared_pool):
    shared_pool.update(number)
    items = shared_pool.map(tasks(20))
    found = []
    for _ in range(20):
        thread = threading.Thread(target=lambda: found.append(next(items)))
        thread.start()
        thread.join()
    assert values(found) == list(range(20))


def test_a_later_pass_ends_the_one_before(shared_pool):
    shared_pool.update(number)
    first = shared_pool.map(tasks(20))
    next(first)
    assert values(shared_pool.map(tasks(3))) == [0, 1, 2]
    with pytest.raises(WorkerError, match="later pass"):
        next(first)


def test_failing_tasks_come_after_the_items_before(shared_pool):
    def failing():
        yield from tasks(3)
        raise LookupError("of the caller")

    shared_pool.update(number)
    items = shared_pool.map(failing())
    assert values(itertools.islice(items, 3)) == [0, 1, 2]
    with pytest.raises(LookupError, match="of the caller"):
        next(items)


def test_update_holds_from_the_next_task_on(shared_pool):
    def epochs():
        for epoch in range(4):
            shared_pool.update(Kept(np.array([10 * epoch])))
            yield from tasks(3, epoch)

    assert values(shared_pool.map(epochs())) == [0] * 3 + [10] * 3 + [20] * 3 + [30] * 3


# Streams.


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([3], [(0, 0), (0, 1), (0, 2)]),
        ([2, 2], [(0, 0), (1, 0), (0, 1), (1, 1)]),
        ([1, 3], [(0, 0), (1, 0), (1, 1), (1, 2)]),
        ([3, 0, 1], [(0, 0), (2, 0), (0, 1), (0, 2)]),
        ([0, 0], []),
    ],
)
def test_stream_takes_turns(lengths, expected):
    with WorkerPool(Ranges(*lengths), len(lengths), seed=0, prefetch=2) as pool:
        for epoch in range(2):
            assert [tuple(item) for item in pool.stream(epoch)] == [(epoch, *pair) for pair in expected]


def test_a_stream_that_was_left_starts_anew(shared_pool):
    shared_pool.update(Ranges(100, 100))
    items = shared_pool.stream(0)
    next(items)
    del items
    assert [tuple(item) for item in itertools.islice(shared_pool.stream(1), 2)] == [(1, 0, 0), (1, 1, 0)]


def test_the_end_of_an_iterator_is_final(shared_pool):
    shared_pool.update(Restarting)
    assert values(shared_pool.stream(0)) == [1, 1, 2, 2]


# Random state.


def test_random_state_depends_on_seed_epoch_and_index_alone():
    found = []
    for num_workers, seed in ((1, 5), (3, 5), (2, 6)):
        with WorkerPool(draws, num_workers, seed=seed, prefetch=2) as pool:
            found.append([tuple(item) for item in pool.map(tasks(4) + tasks(4, epoch=1))])
    assert found[0] == found[1]
    assert not set(found[0]) & set(found[2])
    assert len({number for pair in found[0] for number in pair}) == 16


def test_random_state_of_streams(shared_pool):
    shared_pool.update(streamed_draws)
    first, again, other = ([tuple(item) for item in shared_pool.stream(epoch)] for epoch in (0, 0, 1))
    assert first == again
    assert len(set(first + other)) == 8


# Memory.


@pytest.mark.parametrize("kilobytes", [mebibyte, rising, up_and_down])
def test_slots_are_used_again(kilobytes):
    counts = []
    with WorkerPool(Growing(kilobytes), 2, seed=0, prefetch=2) as pool:
        for item in pool.map(tasks(200)):
            index = int(item["y"][0])
            assert item["x"].shape == (kilobytes(index), 1024)
            assert (item["x"] == index % 251).all()
            counts.append(descriptors())
    # Tasks under way, the item in hand, and slots that were outgrown but are not forgotten yet.
    assert max(counts) - min(counts) <= 4 + 1 + 4


def test_growing_values_need_few_new_slots():
    writer, num_new = ring.SlotWriter(), 0
    for kilobytes in range(10, 1000):
        slot, _, memory, dropped = writer.write(np.zeros((kilobytes, 1024), np.uint8))
        writer.recycle([slot])
        if memory is not None:
            os.close(memory)
            num_new += 1
            assert len(dropped) == (num_new > 1)
    assert num_new < 30


def test_memory_stays_flat(shared_pool):
    def resident(pid="self"):
        return int(re.search(r"VmRSS:\s+(\d+)", pathlib.Path(f"/proc/{pid}/status").read_text())[1])

    shared_pool.update(Growing(mebibyte))
    list(map(len, shared_pool.map(tasks(100))))
    before = [resident(), *map(resident, children())]
    list(map(len, shared_pool.map(tasks(300))))
    after = [resident(), *map(resident, children())]
    for late, early in zip(after, before):
        assert late - early < 20 * 1024  # KiB; 300 items that stay would be 300 MiB.


def test_a_slot_is_kept_while_anything_of_its_item_lives(shared_pool):
    shared_pool.update(Growing(mebibyte))
    items = shared_pool.map(tasks(60))
    for _ in range(7):
        item = next(items)
    view = item["x"][3:5, ::2].reshape(-1)[10:]
    bytes_view = memoryview(item["y"])
    del item
    gc.collect()
    for _ in items:
        pass
    assert (view == 6).all()
    assert bytes_view[0] == 6


def test_slots_come_back_when_items_are_let_go(shared_pool):
    shared_pool.update(Growing(mebibyte))
    for _ in shared_pool.map(tasks(10)):
        pass
    few = descriptors()
    kept = list(shared_pool.map(tasks(40)))
    assert [int(item["y"][0]) for item in kept] == list(range(40))
    assert descriptors() >= few + 30
    del kept
    for _ in shared_pool.map(tasks(400)):
        pass
    assert descriptors() <= few + 4


def test_items_outlive_the_pool():
    gc.collect()
    before = descriptors()
    with WorkerPool(number, 1, seed=0, prefetch=2) as pool:
        items = list(pool.map(tasks(4)))
    assert values(items) == [0, 1, 2, 3]
    del items
    gc.collect()
    assert descriptors() == before


def test_too_little_memory_in_a_worker(shared_pool):
    shared_pool.update(enormous)
    with pytest.raises(WorkerError, match=r"35,\d{3},\d{3},\d{3},\d{3} bytes are needed, [\d,]+ are available"):
        list(shared_pool.map(tasks(1)))
    shared_pool.update(number)
    assert values(shared_pool.map(tasks(3))) == [0, 1, 2]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "1000", "memory.current": "400", "memory.stat": "anon 5\ninactive_file 50\n"}, 650),
        ({"memory.max": "max", "memory.current": "400"}, np.inf),
        ({}, np.inf),
    ],
)
def test_available_memory_of_a_container(monkeypatch, tmp_path, files, expected):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    read = packing._read_numbers
    monkeypatch.setattr(
        packing,
        "_read_numbers",
        lambda *paths: read(*(str(tmp_path / os.path.basename(path)) for path in paths if "meminfo" not in path)),
    )
    assert packing._available_bytes() == expected


def test_memory_refused_by_the_system(monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    before = descriptors()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(WorkerError, match="5,000 bytes are needed") as caught:
        packing.new_memory(5000)
    assert isinstance(caught.value.__cause__, OSError)
    assert descriptors() == before


def test_without_memfd_there_is_no_file_either(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    memory = packing.new_memory(5000)
    assert os.fstat(memory).st_size == 5000
    assert not list(tmp_path.iterdir())
    os.close(memory)


# The source.


def test_large_arrays_of_a_source_are_shared(shared_pool):
    shared_pool.update(Kept(np.arange(1000)))
    (item,) = shared_pool.map(tasks(1))
    assert item.tolist() == list(range(1000))


def test_memory_maps_are_opened_again(shared_pool, tmp_path):
    np.save(tmp_path / "x.npy", np.arange(1 << 20).reshape(-1, 4))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    for part in (mapped, mapped[10:20, 1:], np.asarray(mapped)[::2][5:7], mapped.T[1]):
        shipped = shipping.ShippedSource(Kept(part), needs_main=True)
        assert os.fstat(shipped.memory).st_size < 1000
        shared_pool.update(Kept(part))
        (item,) = shared_pool.map(tasks(1))
        assert (item == part).all()


@pytest.mark.parametrize(
    ("make_source", "message"),
    [
        (local_function, r"source, a function.*Define local_function.<locals>.inner with `def` at the top"),
        (lambda: Holder(a=1, read=lambda: 0), r"source\.read, a function.*Define .*<lambda>.* at the top"),
        (
            lambda: Holder(deep=[0, {"k": Holder(file=threading.Lock())}]),
            r"source\.deep\[1\]\['k'\]\.file, a lock",
        ),
        (lambda: Holder(items=(i for i in range(2))), r"source\.items, a generator.*makes the generator"),
        (lambda: functools.partial(number, threading.Lock()), r"source\.args\[0\], a lock"),
        (lambda: Holder(lock=threading.Lock()).__call__, r"source\.__self__\.lock, a lock.*__getstate__"),
        (lambda: Careful(lock=threading.Lock(), other=threading.Lock()), r"source\.other, a lock"),
    ],
)
@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_source_that_cannot_be_pickled(make_source, message, start_method, monkeypatch):
    monkeypatch.setattr(workers, "Crew", None)  # Nothing is started.
    with pytest.raises(SourceError, match=message):
        WorkerPool(make_source(), 2, seed=0, prefetch=2, start_method=start_method)


def test_cycles_do_not_confuse_the_search():
    source = Holder()
    source.itself = [source]
    source.lock = threading.Lock()
    assert shipping.find_unpicklable(source, "source") == ("source.lock", source.lock)


def test_source_that_drops_what_cannot_be_pickled(shared_pool):
    shared_pool.update(Careful(lock=threading.Lock()))
    assert len(list(shared_pool.map(tasks(2)))) == 2


def test_source_that_cannot_be_rebuilt(shared_pool):
    shared_pool.update(OnlyHere())
    with pytest.raises(SourceError, match=r"cannot be rebuilt in a worker.*no such disk") as caught:
        list(shared_pool.map(tasks(2)))
    assert "__setstate__" in str(caught.value.__cause__)
    shared_pool.update(number)
    assert values(shared_pool.map(tasks(3))) == [0, 1, 2]


def test_start_method_is_checked():
    with pytest.raises(ValueError, match="Received: 'thread'"):
        WorkerPool(number, 1, seed=0, prefetch=2, start_method="thread")


def test_workers_start_without_tensorflow(monkeypatch):
    monkeypatch.setenv("KERAS_GPUFEED_VIRTUAL_DEVICES", "4")
    with WorkerPool(surroundings, 1, seed=0, prefetch=2) as pool:
        (found,) = pool.map(tasks(1))
    assert found == {
        "tensorflow": False,
        "environment": {"CUDA_VISIBLE_DEVICES": "-1", "KERAS_GPUFEED_VIRTUAL_DEVICES": None},
        "start_session": True,
        "sigint": True,
    }


@pytest.mark.slow
def test_the_package_is_there_for_those_who_ask(shared_pool):
    import keras_gpufeed

    shared_pool.update(public_names)
    (found,) = shared_pool.map(tasks(1))
    assert found == (list(keras_gpufeed.__all__), True)


# Failures.


@pytest.mark.parametrize(
    ("method", "kind", "expected", "message"),
    [
        ("map", "KeyError", KeyError, "'file_17.npy'"),
        ("map", "OSError", FileNotFoundError, "No such file: 'a.png'"),
        ("map", "CannotBePickled", SourceError, "The source raised CannotBePickled: no way out"),
        ("map", "TakesOthers", TakesOthers, "a.png:3"),
        ("map", "SaysMore", SaysMore, "cannot read a.png"),
        ("map", "SystemExit", SourceError, "The source raised SystemExit: 3"),
        ("map", "StopIteration", SourceError, "The source raised StopIteration: nothing"),
        ("stream", "KeyError", KeyError, "'file_17.npy'"),
        ("stream", "CannotBePickled", SourceError, "The source raised CannotBePickled: no way out"),
        ("stream", "SystemExit", SourceError, "The source raised SystemExit: 3"),
        ("stream", "StopIteration", RuntimeError, "generator raised StopIteration"),  # By Python itself.
    ],
)
def test_exceptions_arrive_as_raised(shared_pool, method, kind, expected, message):
    source = Raising(kind, at=5)
    shared_pool.update(source if method == "map" else source.stream)
    items = shared_pool.map(tasks(20, epoch=1)) if method == "map" else shared_pool.stream(1)
    assert values(itertools.islice(items, 5)) == [100, 101, 102, 103, 104]
    with pytest.raises(expected, match=message) as caught:
        next(items)
    assert caught.type is expected
    assert "read_damaged_file" in str(caught.value.__cause__)
    assert "epoch 1" in str(caught.value.__cause__)
    shared_pool.update(number)
    assert values(shared_pool.map(tasks(3))) == [0, 1, 2]


@pytest.mark.parametrize(
    ("how", "reason"),
    [(signal.SIGKILL, "SIGKILL, most likely because memory ran out"), ("exit", "exit code 7")],
)
def test_a_dead_worker_is_replaced(tmp_path, caplog, how, reason):
    with WorkerPool(Dying(tmp_path, at=3, times=1, how=how), 2, seed=0, prefetch=2) as pool:
        assert values(pool.map(tasks(12))) == list(range(12))
        (warning,) = warnings_in(caplog)
        assert re.search(
            rf"Worker \d \(process \d+\) died at epoch 0, index 3 \(both counted from 0\): .*{reason}", warning
        )


def test_the_third_death_at_the_same_index_is_the_last(tmp_path, caplog):
    source = Dying(tmp_path, at=3, times=99, how=signal.SIGSEGV)
    with WorkerPool(source, 2, seed=0, prefetch=2) as pool:
        items = pool.map(tasks(12))
        assert values(itertools.islice(items, 3)) == [0, 1, 2]
        with pytest.raises(WorkerError, match=r"died at epoch 0, index 3 \(both counted from 0\): SIGSEGV, .* third"):
            next(items)
        warnings = warnings_in(caplog)
        assert len(warnings) == len(list(tmp_path.iterdir())) == 3
        assert [warning.endswith("A new worker takes its place.") for warning in warnings] == [True, True, False]
        assert warnings[2].endswith("No other worker tries it again.")
        pool.update(number)
        assert values(pool.map(tasks(3))) == [0, 1, 2]


def test_a_worker_that_died_between_passes_is_replaced(caplog):
    with WorkerPool(number, 1, seed=0, prefetch=2) as pool:
        assert values(pool.map(tasks(3))) == [0, 1, 2]
        (pid,) = worker_pids(pool)
        ended = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        assert select.select([ended], [], [], PATIENCE_SECONDS)[0]
        os.close(ended)
        pool.update(Ranges(2))
        assert len(list(pool.stream(0))) == 2
    assert "died at no task" in warnings_in(caplog)[0]


def worker_pids(pool):
    return [worker.pid for worker in pool._crew.workers.values()]


def test_a_dead_worker_ends_a_stream(tmp_path, caplog):
    source = Dying(tmp_path, at=4, times=1, how=signal.SIGKILL)
    with WorkerPool(source.stream, 2, seed=0, prefetch=2) as pool:
        items = pool.stream(0)
        assert values(itertools.islice(items, 4)) == [0, 1, 2, 3]
        with pytest.raises(WorkerError, match=r"SIGKILL.* A generator cannot be replayed"):
            next(items)
        assert len(warnings_in(caplog)) == 1
        assert values(itertools.islice(pool.stream(1), 3)) == [100, 101, 102]


def test_a_worker_that_dies_before_its_first_item_begins_again(tmp_path, caplog):
    source = Dying(tmp_path, at=1, times=2, how=signal.SIGKILL)
    with WorkerPool(source.stream, 2, seed=0, prefetch=2) as pool:
        assert values(itertools.islice(pool.stream(0), 8)) == list(range(8))
    assert len(warnings_in(caplog)) == 2


@pytest.mark.slow
def test_workers_killed_at_random_moments(caplog):
    moment = random.Random(4)
    found, killed = [], []
    with WorkerPool(slow_number, 3, seed=0, prefetch=3) as pool:
        timer = None
        for item in pool.map(tasks(210)):
            found.append(item)
            if len(found) % 10 == 5 and len(killed) < 20:  # By the next time, those tasks are done.
                if timer:
                    timer.join()
                killed.append(moment.choice(worker_pids(pool)))
                timer = threading.Timer(moment.random() * 0.02, os.kill, (killed[-1], signal.SIGKILL))
                timer.start()
        timer.join()
        assert values(pool.map(tasks(9))) == list(range(9))  # The last one may have died when all was done.
    assert values(found) == list(range(210))
    assert len(set(killed)) == len(warnings_in(caplog)) == 20


def test_a_stuck_worker_is_reported_again_and_again(tmp_path, caplog):
    go_on = tmp_path / "go on"

    class GoOn(logging.Handler):
        def emit(self, record):
            if len(warnings_in(caplog)) == 2:
                go_on.touch()

    handler = GoOn()
    with WorkerPool(Stuck(go_on, at=2), 2, seed=0, prefetch=2, stall_seconds=0.3) as pool:
        next(pool.map(tasks(1)))  # Starting may take longer than that.
        caplog.clear()
        logging.getLogger("keras_gpufeed").addHandler(handler)
        try:
            assert values(pool.map(tasks(8))) == list(range(8))
        finally:
            logging.getLogger("keras_gpufeed").removeHandler(handler)
        pids = "|".join(map(str, worker_pids(pool)))
    assert len(warnings_in(caplog)) >= 2
    for warning in warnings_in(caplog):
        assert re.search(rf"worker \d \(process ({pids})\) for \d+ s.* epoch 0, index 2", warning)
        assert "in wait_for_the_network" in warning


def test_a_worker_that_is_stopped_is_reported(tmp_path, caplog):
    with WorkerPool(number, 1, seed=0, prefetch=2, stall_seconds=0.3) as pool:
        next(pool.map(tasks(1)))
        caplog.clear()
        os.kill(worker_pids(pool)[0], signal.SIGSTOP)
        timer = threading.Timer(2, os.kill, (worker_pids(pool)[0], signal.SIGCONT))
        timer.start()
        assert values(pool.map(tasks(3))) == [0, 1, 2]
        timer.join()
    assert "does not tell where it stands" in warnings_in(caplog)[0]


def test_a_limit_to_waiting(tmp_path):
    source = Stuck(tmp_path / "never", at=2)
    with WorkerPool(source, 2, seed=0, prefetch=2, stall_limit_seconds=1.5) as pool:
        wait_until(lambda: start(pool))
        items = pool.map(tasks(8))
        assert values(itertools.islice(items, 2)) == [0, 1]
        with pytest.raises(WorkerError, match=r"epoch 0, index 2(.|\n)*wait_for_the_network"):
            next(items)
        pool.update(number)
        wait_until(lambda: start(pool))
        assert values(pool.map(tasks(3))) == [0, 1, 2]


def start(pool):
    """On a busy machine a start may take longer than the limit under test."""
    try:
        return len(list(pool.map(tasks(2)))) == 2
    except WorkerError:
        return False


def test_a_worker_that_does_not_start_is_reported(monkeypatch, caplog):
    monkeypatch.setattr(processes, "start_command", lambda *_: ["sleep", "1000"])
    pool = WorkerPool(number, 1, seed=0, prefetch=2, stall_seconds=0.1, stall_limit_seconds=0.25)
    with pool, pytest.raises(WorkerError, match="It is still starting"):
        next(pool.map(tasks(1)))
    assert "It is still starting" in warnings_in(caplog)[0]


def test_workers_that_cannot_be_started(monkeypatch):
    before = set(children())
    started = []

    def start_one(*args, **options):
        if started:
            raise OSError(11, "Resource temporarily unavailable")
        started.append(popen(*args, **options))
        return started[0]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start_one)
    with pytest.raises(WorkerError, match=r"temporarily unavailable\. Use fewer workers"):
        WorkerPool(number, 2, seed=0, prefetch=2)
    assert set(children()) == before


def test_an_interrupt_in_the_middle_of_a_message(monkeypatch):
    receive, received = processes.Worker.receive, []

    def interrupted(worker):
        received.append(worker)
        if len(received) == 5:
            worker.connection.recv()
            raise KeyboardInterrupt
        receive(worker)

    with WorkerPool(number, 2, seed=0, prefetch=2) as pool:
        monkeypatch.setattr(processes.Worker, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(pool.map(tasks(20)))
        assert values(pool.map(tasks(20))) == list(range(20))


# The end.


def test_close_wakes_whoever_waits(tmp_path):
    gc.collect()
    before = descriptors(), threading.active_count()
    pool = WorkerPool(Stuck(tmp_path / "never", at=1), 2, seed=0, prefetch=2, stall_seconds=10**6)
    items = pool.map(tasks(8))
    next(items)
    raised = []

    def wait(items):
        try:
            next(items)
        except WorkerError as error:
            raised.append(str(error))

    waiting = threading.Thread(target=wait, args=(items,), daemon=True)
    waiting.start()
    time.sleep(0.2)
    pids = worker_pids(pool)
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    for thread in (closing, waiting):
        thread.join(PATIENCE_SECONDS)
    assert raised == [
        "The worker processes have been ended by close(), so there are no more batches. Make a new feeder, and close "
        "it when training is over."
    ]
    assert not any(map(is_alive, pids))
    pool.close()
    with pytest.raises(WorkerError, match=r"ended by close\(\)"):
        next(pool.map(tasks(1)))
    del pool, items
    gc.collect()
    assert (descriptors(), threading.active_count()) == before


def test_close_ends_workers_that_are_stopped():
    with WorkerPool(number, 1, seed=0, prefetch=2) as pool:
        assert values(pool.map(tasks(2))) == [0, 1]
        (pid,) = worker_pids(pool)
        os.kill(pid, signal.SIGSTOP)
    assert not is_alive(pid)


def test_the_source_may_tidy_up(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with WorkerPool(TidyingUp(tmp_path), 1, seed=0, prefetch=2) as pool:
        next(pool.stream(0))
        next(pool.stream(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["atexit", "finally 0", "finally 1"]
    assert capfd.readouterr().out == "printedprinted"


@pytest.mark.parametrize("leave", ["started", "in the middle", "after an error", "after a death"])
def test_a_pool_that_nobody_has_any_more(tmp_path, leave):
    gc.collect()
    before = descriptors(), threading.active_count()
    gc.disable()  # There are no cycles, so nothing waits for the collector.
    try:
        if leave == "after a death":
            source = Dying(tmp_path, at=3, times=1, how=signal.SIGKILL).stream
        else:
            source = Raising("KeyError", at=3)
        pool = WorkerPool(source, 2, seed=0, prefetch=2)
        pids = worker_pids(pool)
        if leave != "started":
            items = pool.stream(0) if leave == "after a death" else pool.map(tasks(8))
            next(items)
            if leave != "in the middle":
                with pytest.raises((KeyError, WorkerError)):
                    list(items)
            del items
        del pool
        assert not any(map(is_alive, pids))
    finally:
        gc.enable()
    assert (descriptors(), threading.active_count()) == before


def test_a_forked_copy_of_the_pool_ends_no_worker():
    with WorkerPool(number, 1, seed=0, prefetch=2) as pool:
        assert values(pool.map(tasks(2))) == [0, 1]
        pids = worker_pids(pool)
        pid = os.fork()
        if pid == 0:
            pool.close()
            os._exit(0)
        os.waitpid(pid, 0)
        assert all(map(is_alive, pids))
        assert values(pool.map(tasks(2))) == [0, 1]
        assert worker_pids(pool) == pids


# Whole programs. Their copy of the package does without its __init__, which would load TensorFlow.

PROGRAM = """
import gc, os, signal, sys, threading, time, types
package = types.ModuleType("keras_gpufeed")
package.__path__ = [{folder!r}]
sys.modules["keras_gpufeed"] = package
from keras_gpufeed.workers import WorkerPool
import numpy as np

class Source:
    def __init__(self, busy):
        self.busy = busy
    def __call__(self, epoch, index):
        if self.busy and index:
            time.sleep(1000)
        return np.array([epoch, index])
    def stream(self, epoch, worker_id, num_workers):
        while True:
            yield self(epoch, worker_id)

def start(busy=False, **options):
    pool = WorkerPool(Source(busy), 2, seed=0, prefetch=2, **options)
    items = pool.map((0, index) for index in range(10**9))
    next(items)
    print(*(worker.pid for worker in pool._crew.workers.values()), flush=True)
    return pool, items
"""


def run_program(tmp_path, body, guarded=True):
    script = tmp_path / "program.py"
    main = "if __name__ == '__main__':\n" if guarded else "if True:\n"
    head = PROGRAM.format(folder=os.path.dirname(workers.__file__))
    script.write_text(head + main + "".join(f"    {line}\n" for line in body.strip().splitlines()))
    return subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


ENDINGS = {
    "the last line": ("pool, items = start()", 0, ""),
    "the last line, busy": ("pool, items = start(busy=True)", 0, ""),
    "the last line, forked": ("pool, items = start(start_method='fork')", 0, ""),
    "the last line, forked, busy": ("pool, items = start(busy=True, start_method='fork')", 0, ""),
    "close": ("pool, items = start()\npool.close()", 0, ""),
    "garbage": ("pool, items = start()\ndel pool, items\ngc.collect()\nprint('done')", 0, ""),
    "an exception": ("pool, items = start(busy=True)\nraise KeyError('mine')", 1, "KeyError: 'mine'"),
    "sys.exit": ("pool, items = start()\nsys.exit(3)", 3, ""),
    "os._exit": ("pool, items = start()\nos._exit(4)", 4, ""),
    "os._exit, busy": ("pool, items = start(busy=True)\nos._exit(4)", 4, ""),
    "SIGKILL": ("pool, items = start()\nos.kill(os.getpid(), signal.SIGKILL)", -9, ""),
    "SIGKILL, busy": ("pool, items = start(busy=True)\nos.kill(os.getpid(), signal.SIGKILL)", -9, ""),
    "SIGKILL, forked": (
        "pool, items = start(busy=True, start_method='fork')\nos.kill(os.getpid(), signal.SIGKILL)",
        -9,
        "",
    ),
    "SIGKILL on an old kernel": (
        "del os.pidfd_open\npool, items = start(busy=True, start_method='fork')\nos.kill(os.getpid(), signal.SIGKILL)",
        -9,
        "",
    ),
    "close on an old kernel": (
        "del os.pidfd_open\npool, items = start(busy=True, start_method='fork')\npool.close()",
        0,
        "",
    ),
    "SIGTERM, busy": ("pool, items = start(busy=True)\nos.kill(os.getpid(), signal.SIGTERM)", -15, ""),
    "waiting in a thread": (
        "pool, items = start(busy=True)\nthreading.Thread(target=next, args=(items,), daemon=True).start()\n"
        "time.sleep(0.2)",
        0,
        "WorkerError: The worker processes have been ended by close()",
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_is_left_of_a_program(tmp_path, ending):
    body, exit_code, error = ENDINGS[ending]
    files = set(os.listdir("/dev/shm"))
    program = run_program(tmp_path, body)
    output, errors = program.communicate(timeout=PATIENCE_SECONDS)
    pids = [int(word) for word in output.splitlines()[0].split()]
    assert program.returncode == exit_code
    assert len(pids) == 2
    if error:
        assert error in errors
    else:
        assert errors == ""
    wait_until(lambda: not any(map(is_alive, pids)))
    wait_until(lambda: set(os.listdir("/dev/shm")) <= files)  # Other programs have theirs there for a while.


def test_workers_leave_with_the_parent_though_a_copy_of_it_lives(tmp_path):
    program = run_program(
        tmp_path,
        "pool, items = start()\ncopy = os.fork()\nif copy == 0:\n    os.closerange(0, 3)\n    time.sleep(1000)\n"
        "print(copy, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)",
    )
    *pids, copy = (int(word) for word in program.communicate(timeout=PATIENCE_SECONDS)[0].split())
    wait_until(lambda: not any(map(is_alive, pids)))
    assert is_alive(copy)
    os.kill(copy, signal.SIGKILL)


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_ctrl_c_is_for_the_parent(tmp_path, start_method):
    program = run_program(
        tmp_path,
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # A shell's background jobs ignore it.
        f"pool, items = start(busy=True, start_method={start_method!r})\n"
        "try:\n    next(items)\nexcept KeyboardInterrupt:\n    print('interrupted', flush=True)\n"
        "pool.update(Source(busy=False))\nassert next(pool.map([(0, 7)]))[1] == 7\nprint('went on')",
    )
    pids = [int(word) for word in program.stdout.readline().split()]
    time.sleep(0.3)
    os.kill(program.pid, signal.SIGINT)
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    time.sleep(0.3)
    assert all(map(is_alive, pids))
    os.kill(pids[0], signal.SIGKILL)
    os.kill(pids[1], signal.SIGKILL)
    output, errors = program.communicate(timeout=PATIENCE_SECONDS)
    assert output.split() == ["interrupted", "went", "on"]
    assert "Traceback" not in errors
    assert not any(map(is_alive, pids))


def test_nobody_spins(tmp_path):
    program = run_program(tmp_path, "pool, items = start(busy=True)\nnext(items)")
    pids = [program.pid, *(int(word) for word in program.stdout.readline().split())]

    def cpu_ticks():
        stats = (pathlib.Path(f"/proc/{pid}/stat").read_text().split() for pid in pids)
        return sum(int(stat[13]) + int(stat[14]) for stat in stats)

    time.sleep(0.3)
    before = cpu_ticks()
    time.sleep(1)
    assert cpu_ticks() - before <= 3  # Of 100 a second
    program.kill()
    program.communicate()


def test_a_script_without_a_guard_is_told_so(tmp_path):
    program = run_program(tmp_path, "start()", guarded=False)
    _, errors = program.communicate(timeout=PATIENCE_SECONDS)
    assert program.returncode == 1
    message = errors[errors.index("SourceError: ") :].split()
    assert errors.count("Traceback") == 1
    path, line = message[1], int(message[message.index("line") + 1].rstrip(","))
    assert pathlib.Path(path).read_text().splitlines()[line - 1].strip() == "start()"
    assert errors.endswith('    if __name__ == "__main__":\n        model.fit(...)\n\n')


def test_a_script_is_imported_only_if_the_source_is_from_there(tmp_path):
    program = run_program(
        tmp_path,
        "print(__name__, flush=True)\nif __name__ == '__main__':\n"
        "    pool = WorkerPool(divmod, 1, seed=0, prefetch=2)\n    print(*pool.map([(7, 2)]))\n"
        "    pool.update(Source(False))\n    print(*pool.map([(7, 2)]))",
        guarded=False,
    )
    output, _ = program.communicate(timeout=PATIENCE_SECONDS)
    assert output.splitlines() == ["__main__", "(3, 1)", "__mp_main__", "[7 2]"]


def test_a_session_without_a_file(tmp_path):
    program = PROGRAM.format(folder=os.path.dirname(workers.__file__))
    for options, error in (
        ("", "defined in a notebook or an interactive session"),
        ("start_method='fork'", ""),
    ):
        result = subprocess.run(
            [sys.executable, "-c", f"{program}\nstart({options})"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert error in result.stderr
        assert bool(error) == bool(result.stderr)


def test_the_start_method_of_the_program_stays_open(tmp_path):
    program = run_program(tmp_path, "start()\nimport multiprocessing\nmultiprocessing.set_start_method('spawn')")
    _, errors = program.communicate(timeout=PATIENCE_SECONDS)
    assert (program.returncode, errors) == (0, "")
