"""The package as a whole: its public face, the direction of its imports, its examples."""

import ast
import doctest
import importlib
import inspect
import pathlib
import subprocess
import sys
import types

import pytest

import keras_gpufeed as kg

PACKAGE = pathlib.Path(kg.__file__).parent
FLOW = [
    "errors",
    "stock",
    "plan",
    "plan_picture",
    "order",
    "splitting",
    "meter",
    "stamps",
    "verdict",
    "recording",
    "charts",
    "report",
    "internals",
    "strategy",
    "machine",
    "promotion",
    "compat",
    "exact",
    "buffers",
    "items",
    "packing",
    "shipping",
    "ring",
    "worker_main",
    "processes",
    "workers",
    "composites",
    "sources",
    "overrides",
    "batch_sources",
    "side_by_side",
    "streams",
    "pipeline",
    "measuring",
    "loops",
    "graph_mode",
    "feeder",
    "keras_entry",
    "model",
    "callbacks",
    "learning_rate",
]
END_OF_FLOW = [
    "selfcheck",
    "doctor",
    "demo",
    "bench_contenders",
    "bench_figures",
    "bench_report",
    "bench",
    "__main__",
]  # They may import the package itself.
FILES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")


def test_all_lists_the_public_names_in_order():
    public = {
        name for name, value in vars(kg).items() if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert kg.__all__ == sorted(public)


def test_every_file_has_its_place_in_the_flow():
    assert set(FILES) <= {*FLOW, *END_OF_FLOW}


@pytest.mark.parametrize("name", [name for name in FLOW if name in FILES])
def test_imports_point_upstream(name):
    """A file may import only files that come before it in the flow."""
    used = set()
    for node in ast.walk(syntax_of(name)):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            used |= {node.module} if node.module else {alias.name for alias in node.names}
        assert not isinstance(node, ast.ImportFrom) or node.level <= 1
        for module in absolute_imports(node):
            assert module.partition(".")[0] != "keras_gpufeed", "files import one another with a dot"
    assert used <= set(FLOW[: FLOW.index(name)])


@pytest.mark.parametrize("name", [name for name in FILES if name != "internals"])
def test_only_internals_touches_private_parts(name):
    for node in ast.walk(syntax_of(name)):
        for module in absolute_imports(node):
            assert not module.startswith(("tensorflow.python", "tensorflow.core", "keras.src", "keras.engine"))
        if isinstance(node, ast.Attribute) and node.attr in ("python", "src"):
            assert ast.unparse(node) not in ("tf.python", "tensorflow.python", "keras.src")


@pytest.mark.parametrize("name", ["errors", "stock", "plan", "order"])
def test_the_arithmetic_does_not_import_tensorflow(name):
    imported = {module for node in ast.walk(syntax_of(name)) for module in absolute_imports(node)}
    assert not {module.partition(".")[0] for module in imported} & {"tensorflow", "keras"}


@pytest.mark.parametrize("name", FILES)
def test_every_file_says_where_it_stands(name):
    docstring = ast.get_docstring(syntax_of(name))
    assert docstring
    if name in FLOW:
        assert "Owns:" in docstring
        assert "Leaves:" in docstring
        flow = docstring.partition("Flow:")[2].partition("\n")[0]
        assert f"[{name}]" in flow
        named = [word.strip(" []") for word in flow.split("->")]
        places = [FLOW.index(word) for word in named if word != "..."]
        assert places == sorted(places)


@pytest.mark.parametrize("name", FILES)
def test_errors_are_raised_and_never_asserted(name):
    """With `python -O` an assertion checks nothing."""
    assert not [node.lineno for node in ast.walk(syntax_of(name)) if isinstance(node, ast.Assert)]


@pytest.mark.parametrize("name", kg.__all__)
def test_public_names_have_docstrings(name):
    value = getattr(kg, name)
    assert inspect.getdoc(value)
    if isinstance(value, type) and issubclass(value, Exception):
        return  # Errors are raised, not called: nothing to show.
    assert ">>>" in inspect.getdoc(value)


def test_public_methods_have_docstrings():
    for cls in (kg.BatchPlan, kg.DistributedFeeder, kg.Model):
        for name, value in vars(cls).items():
            if not name.startswith("_") and (callable(value) or isinstance(value, property)):
                assert inspect.getdoc(value), f"{cls.__name__}.{name}"


@pytest.mark.parametrize("name", ["__init__", *FILES])
def test_examples_in_docstrings(name):
    if name == "__main__":
        pytest.skip("running it is its own test")
    module = importlib.import_module("keras_gpufeed" if name == "__init__" else f"keras_gpufeed.{name}")
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    assert doctest.testmod(module, optionflags=options).failed == 0


@pytest.mark.parametrize("name", FILES)
def test_optional_packages_are_imported_where_they_are_used(name):
    optional = {"pandas", "h5py", "scipy", "matplotlib", "sklearn"}
    at_import = {module.partition(".")[0] for node in syntax_of(name).body for module in absolute_imports(node)}
    assert not at_import & optional


def test_importing_does_not_start_the_devices():
    """Otherwise memory growth, visible devices and virtual devices could no longer be set."""
    run(
        """
        import tensorflow as tf
        import keras_gpufeed as kg
        cpu = tf.config.list_physical_devices("CPU")[0]
        assert len(tf.config.get_logical_device_configuration(cpu)) == 3  # By the environment variable.
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
        assert kg.get_strategy().num_replicas_in_sync == 4
        """,
        KERAS_GPUFEED_VIRTUAL_DEVICES="3",
    )


def test_a_program_that_python_looks_for_imports_what_it_needs(tmp_path):
    """While Python looks for `python -m project.train`, the package itself imports nothing until it is used."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "__init__.py").write_text(
        unindented("""
            import sys
            import keras_gpufeed as kg
            assert "tensorflow" not in sys.modules and not hasattr(kg, "no_such_name")
            class Net(kg.Model):
                pass
            assert set(kg.__all__) <= set(vars(kg))
        """)
    )
    (tmp_path / "project" / "train.py").write_text(
        unindented("""
            import numpy as np
            import tensorflow as tf
            import keras_gpufeed as kg
            from . import Net
            assert issubclass(Net, tf.keras.Model) and Net.__mro__[1] is kg.Model
            model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
            print(model.predict(kg.DistributedFeeder(np.zeros((3, 2))), verbose=0).shape)
        """)
    )
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": f"{tmp_path}:{PACKAGE.parent}", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-m", "project.train"], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "(3, 1)\n"), done.stderr[-2000:]


def test_without_a_feeder_keras_behaves_as_before():
    run("""
        import numpy as np, tensorflow as tf

        def train():
            tf.keras.utils.set_random_seed(3)
            x = np.arange(63, dtype="float32").reshape(21, 3) / 63
            model = tf.keras.Sequential([tf.keras.layers.Dense(4, "tanh"), tf.keras.layers.Dense(1)])
            model.compile("adam", "mse", metrics=["mae"])
            history = model.fit(x, x.sum(1), batch_size=8, epochs=2, verbose=0, validation_split=0.2)
            assert type(model.distribute_strategy).__name__ == "_DefaultDistributionStrategy"
            return [weight.tolist() for weight in model.get_weights()], history.history

        before = train()
        import keras_gpufeed
        assert train() == before
    """)


def syntax_of(name):
    return ast.parse((PACKAGE / f"{name}.py").read_text())


def absolute_imports(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [node.module]
    return []


def unindented(code):
    return inspect.cleandoc("\n" + code)


def run(code, **environment):
    """Runs a program in a fresh interpreter and returns what it printed."""
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": str(PACKAGE.parent),
        "PATH": "",
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-c", unindented(code)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
