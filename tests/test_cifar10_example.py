"""The example of the CIFAR-10 tutorial, on files of that format made of photographs."""

import os
import pathlib
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
from sklearn.datasets import load_sample_images

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "cifar10_multi_gpu.py"


@pytest.fixture(scope="module")
def tiles():
    """Squares of 32 x 32 pixels cut out of scikit-learn's two photographs; the label is the photograph."""
    tiles, labels = [], []
    for label, photograph in enumerate(load_sample_images().images):
        for top in range(0, 384, 64):
            for left in range(0, 608, 64):
                tiles.append(photograph[top : top + 32, left : left + 32])
                labels.append(label)
    order = np.random.default_rng(0).permutation(len(tiles))
    return np.array(tiles)[order], np.array(labels)[order]


def planes(tiles):
    return tiles.transpose(0, 3, 1, 2).reshape(len(tiles), 3072)


def write_binary(folder, name, tiles, labels):
    rows = np.concatenate([labels[:, None].astype(np.uint8), planes(tiles)], axis=1)
    (folder / f"{name}.bin").write_bytes(rows.tobytes())


def write_python(folder, name, tiles, labels):
    content = {b"batch_label": name.encode(), b"labels": labels.tolist(), b"data": planes(tiles)}
    (folder / name).write_bytes(pickle.dumps(content, protocol=2))


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiles):
    folders = {}
    for kind, write in (("binary", write_binary), ("python", write_python)):
        folder = folders[kind] = tmp_path_factory.mktemp("data") / f"cifar-10-batches-{kind[:2]}"
        folder.mkdir()
        images, labels = tiles
        write(folder, "data_batch_1", images[:40], labels[:40])
        write(folder, "data_batch_2", images[40:75], labels[40:75])
        write(folder, "test_batch", images[75:], labels[75:])
    return folders


def run(folder, num_devices, *arguments):
    environment = {**os.environ, "KERAS_GPUFEED_VIRTUAL_DEVICES": str(num_devices), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, EXAMPLE, "--data", folder, "--epochs", "2", "--batch-size", "25", *arguments]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"- loss: ([\d.]+)", done.stdout)]
    found = re.search(r"(\d) replica\(s\): test loss ([\d.]+), accuracy ([\d.]+)", done.stdout)
    assert int(found[1]) == num_devices
    return [*losses, float(found[2]), float(found[3])]


def test_files_of_both_kinds_hold_what_was_written(folders, tiles):
    namespace = {"__name__": "example"}
    exec(compile(EXAMPLE.read_text(), str(EXAMPLE), "exec"), namespace)
    for folder in folders.values():
        images, labels = namespace["read_files"](folder.parent, "data_batch")
        np.testing.assert_array_equal(images, tiles[0][:75])
        np.testing.assert_array_equal(labels, tiles[1][:75])
        assert len(namespace["read_files"](folder, "test_batch")[0]) == len(tiles[0]) - 75
    with pytest.raises(SystemExit, match="There is no data_batch"):
        namespace["read_files"](ROOT / "docs", "data_batch")


@pytest.mark.slow
def test_the_result_does_not_depend_on_the_number_of_devices(folders):
    one, two, four = (run(folders[kind], n) for kind, n in (("python", 1), ("binary", 2), ("binary", 4)))
    assert len(one) == 4
    np.testing.assert_allclose(two, one, rtol=2e-4)
    np.testing.assert_allclose(four, one, rtol=2e-4)


def test_the_example_is_short_and_has_no_tower_queue_or_scope():
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) < 120
    assert not re.search(r"\.scope\(|queue_runner|Coordinator|tower_|Strategy", text.partition('"""\n')[2])
