"""`FeedMonitor`, its report, and the feed measured alone, seen from outside."""

import csv
import gc
import html.parser
import re
import time
import weakref

import numpy as np
import pytest
import tensorflow as tf
from comparison import largest_difference, strategy_of

import keras_gpufeed as kg

layers, callbacks = tf.keras.layers, tf.keras.callbacks

X = np.random.default_rng(0).normal(size=(21, 3)).astype("float32")
Y = X.sum(1, keepdims=True)
NAP_SECONDS = 0.04  # Long against everything that these models do, also on a busy machine.


class Napping(layers.Layer):
    """Takes its time on one replica, or on all."""

    def __init__(self, replica=None):
        super().__init__()
        self._replica = replica

    def call(self, x):
        def nap(x, replica):
            if self._replica in (None, replica):
                time.sleep(NAP_SECONDS)
            return x

        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        napped = tf.ensure_shape(tf.numpy_function(nap, [x, replica], tf.float32, stateful=False), x.shape)
        return x + 0.0 * tf.stop_gradient(napped)


def make_model(*first, num_replicas=2, **arguments):
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([layers.Input((3,)), *first, layers.Dense(4, "tanh"), layers.Dense(1)])
    model.compile(tf.keras.optimizers.SGD(0.1), "mse", **arguments)
    return kg.distribute(model, strategy_of(num_replicas))


def watch(model, feeder, epochs=2, monitor=None, **arguments):
    monitor = monitor or kg.FeedMonitor()
    arguments["callbacks"] = [*arguments.pop("callbacks", []), monitor]
    history = model.fit(feeder, epochs=epochs, **{"verbose": 0, **arguments})
    return monitor, history


def repeated(number):
    return np.tile(X, (number, 1)), np.tile(Y, (number, 1))


def napping_batches():
    for _ in range(20):
        time.sleep(NAP_SECONDS)
        yield X, Y


def computing_batches():
    for _ in range(40):
        total = 0
        for number in range(400_000):  # Python computes, and no other thread of this process can.
            total += number
        yield X, Y


def napping_transform(x, y):
    def nap(x):
        time.sleep(2 * NAP_SECONDS)  # Two run at a time.
        return x

    return tf.ensure_shape(tf.numpy_function(nap, [x], tf.float32), x.shape), y


# --- Verdicts on planted faults ----------------------------------------------------------------------------


def slow_source():
    return make_model(), kg.DistributedFeeder(napping_batches)


def slow_python_source():
    return make_model(), kg.DistributedFeeder(computing_batches)


def slow_transform():
    return make_model(), kg.DistributedFeeder(*repeated(20), batch_size=21, transform=napping_transform)


def slow_model():
    return make_model(Napping()), kg.DistributedFeeder(*repeated(20), batch_size=21)


def slow_replica():
    return make_model(Napping(replica=1)), kg.DistributedFeeder(*repeated(20), batch_size=21)


def tiny_batches():
    return make_model(), kg.DistributedFeeder(*repeated(20), batch_size=2)


def slow_copy():
    """Numbers that are cast from another dtype, from memory that is laid out the other way."""
    x = np.zeros((200_000, 200)).T
    model = tf.keras.Sequential([layers.Input((200_000,)), layers.Lambda(lambda x: x[:, :1]), layers.Dense(1)])
    model.compile("sgd", "mse")
    kg.distribute(model, strategy_of(1))
    return model, kg.DistributedFeeder(x, np.zeros(200), batch_size=20)


@pytest.mark.parametrize(
    ("plant", "bound_by", "least_lost", "knob"),
    [
        (slow_source, "source", 0.4, r"worker_id and num_workers, with workers=\d+"),
        (slow_python_source, "source", 0.4, r"worker_id and num_workers, with workers=\d+"),
        (slow_transform, "transform", 0.4, r"prefetch=\d+|processors to hide it"),
        (slow_model, "compute", 0.0, "Nothing in the feed would help"),
        (slow_replica, "replica", 0.4, r"what else runs on the device of replica 1"),
        (tiny_batches, "python", 0.25, r"batch_size=16"),
        (slow_copy, "copy", 0.4, "smaller dtype"),
    ],
)
def test_names_the_planted_fault(plant, bound_by, least_lost, knob):
    model, feeder = plant()
    monitor, _ = watch(model, feeder)
    assert monitor.verdict.bound_by == bound_by, monitor.rates
    assert least_lost <= monitor.verdict.lost_share <= 1
    assert re.search(knob, monitor.verdict.knob)


# --- What it adds and what it leaves alone -----------------------------------------------------------------


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_training_is_the_same_with_and_without(num_replicas):
    plain, watched = (make_model(num_replicas=num_replicas) for _ in range(2))
    feeder = kg.DistributedFeeder(X, Y, batch_size=8, seed=3)
    expected = plain.fit(feeder, epochs=3, verbose=0)
    _, history = watch(watched, kg.DistributedFeeder(X, Y, batch_size=8, seed=3), epochs=3)
    assert largest_difference(watched, plain) < 1e-6
    assert history.history["loss"] == pytest.approx(expected.history["loss"])


@pytest.mark.parametrize(
    ("num_replicas", "arguments"),
    [(2, {"run_eagerly": True}), (1, {"steps_per_execution": 4}), (2, {"steps_per_execution": 4})],
)
def test_every_way_of_running_steps(num_replicas, arguments):
    model = make_model(num_replicas=num_replicas)
    model.compile("sgd", "mse", **arguments)
    monitor, _ = watch(model, kg.DistributedFeeder(*repeated(8), batch_size=16, shuffle=False), epochs=2)
    assert 0 <= monitor.rates.feed_wait < 1
    assert 8 <= monitor.rates.samples_per_step <= 16  # 168 samples: ten steps of 16 and one of 8.
    assert 11 <= monitor.rates.num_steps <= 22


def test_logs_reach_everybody(tmp_path, capsys):
    first = callbacks.CSVLogger(tmp_path / "log.csv")  # Before the monitor in the list.
    feeder = kg.DistributedFeeder(*repeated(20), batch_size=7)
    monitor, history = watch(
        make_model(), feeder, callbacks=[first], verbose=1, validation_data=(X, Y), monitor=kg.FeedMonitor(None, 5)
    )
    printed = capsys.readouterr().out
    assert "samples_per_second: " in printed
    assert f"FeedMonitor: {monitor.verdict}" in printed
    assert sorted(history.history) == ["feed_wait", "loss", "samples_per_second", "val_loss"]
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["samples_per_second"]) for row in rows] == pytest.approx(history.history["samples_per_second"])
    assert all(0 <= share <= 1 for share in history.history["feed_wait"])


def test_a_source_of_unknown_length():
    def batches():
        for start in range(0, 21, 5):
            yield X[start : start + 5], Y[start : start + 5]

    monitor, history = watch(make_model(), kg.DistributedFeeder(batches), epochs=6)
    assert len(history.history["loss"]) == 6
    assert monitor.rates.copied_bytes == pytest.approx(21 * 4 * 4 / 5, rel=0.2)


def test_tensorboard_gets_scalars_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    feeder = kg.DistributedFeeder(*repeated(4), batch_size=7)
    watch(make_model(), feeder)
    assert list(tmp_path.iterdir()) == []
    watch(make_model(), feeder, callbacks=[callbacks.TensorBoard("logs", write_graph=False)])
    tags = set()
    for file in (tmp_path / "logs" / "train").glob("events*"):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            tags |= {value.tag for value in event.summary.value if value.tag.startswith("feed/")}
    assert tags == {
        "feed/buffer_fill",
        "feed/copied_bytes_per_second",
        "feed/feed_wait",
        "feed/python_share",
        "feed/samples_per_second",
        "feed/samples_per_second_per_replica",
        "feed/skew_share",
    }


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_replay_tells_the_ceiling_and_changes_nothing(num_replicas):
    models = [make_model(layers.BatchNormalization(synchronized=True), num_replicas=num_replicas) for _ in range(2)]
    x, y = repeated(8)  # 21 steps.
    feeders = [kg.DistributedFeeder(x, (y > 0).astype(int), batch_size=8, seed=3) for _ in range(2)]
    weights = {0: 1.0, 1: 2.0}
    models[0].fit(feeders[0], epochs=1, verbose=0, class_weight=weights)
    monitor, _ = watch(models[1], feeders[1], epochs=1, monitor=kg.FeedMonitor(replay_steps=3), class_weight=weights)
    assert largest_difference(*models) < 1e-6
    assert int(models[1].optimizer.iterations.numpy()) == 21
    assert monitor.rates.ceiling_seconds > 0


def test_a_replay_needs_no_data(tmp_path):
    path = tmp_path / "report.html"
    monitor, _ = watch(*slow_source(), epochs=1, monitor=kg.FeedMonitor(path, replay_steps=5))
    assert monitor.rates.ceiling_seconds < NAP_SECONDS / 2
    assert "would be the most" in path.read_text()


def test_curves_are_broken_where_training_paused(tmp_path):
    pause = callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: time.sleep(0.3))
    path = tmp_path / "report.html"
    x, y = repeated(8)  # 21 steps.
    watch(make_model(), kg.DistributedFeeder(x, y, batch_size=8), 3, kg.FeedMonitor(path), callbacks=[pause])
    page = path.read_text()
    assert "bytes in flight" in page
    assert "on each device" not in page  # CPUs read what lies on the host.
    drawn = re.findall('<path class="curve ([a-z]+)" d="M', page)
    assert [drawn.count(kind) for kind in ("compute", "wait", "feed")] == [3, 3, 4]  # The last with memory's one.


def test_nothing_of_the_data_is_kept():
    x = X.copy()
    gone = weakref.ref(x)
    monitor, _ = watch(make_model(), kg.DistributedFeeder(x, Y, batch_size=8))
    del x
    tf.keras.backend.clear_session()
    gc.collect()
    assert gone() is None
    assert monitor.verdict is not None


# --- The report --------------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """Holds a page to being well-formed and to needing nothing else."""

    def __init__(self, text):
        super().__init__()
        self.open, self.names, self.words = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.names.append(tag)
        assert not {name for name, _ in attributes} & {"src", "href", "srcset", "data", "action"}
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.names.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def read_page(path):
    text = path.read_text()
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.names)
    assert "url(" not in text
    assert "@import" not in text
    assert page.names.count("svg") == text.count('role="img" aria-label="')
    return " ".join(page.words)


def test_the_page_is_complete_and_needs_no_network(tmp_path):
    path = tmp_path / "report.html"
    x, y = repeated(10)
    monitor, _ = watch(make_model(), kg.DistributedFeeder(x[:206], y[:206], batch_size=8), monitor=kg.FeedMonitor(path))
    words = read_page(path)
    for said in (
        "training finished",
        monitor.verdict.headline,
        monitor.verdict.knob,
        "Where a step's time goes",
        "The last 24 steps",
        "Samples per second",
        "Batches ready",
        "last step, samples 200 to 205 of the epoch",  # 206 samples: 25 steps of 8, and one of 6.
        "Loss",
        "Memory in use",
        "206 samples in 26 steps of 8 on 2 replicas",
        tf.__version__,
    ):
        assert said in words
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("error", [KeyError("no such thing <b>"), KeyboardInterrupt()])
def test_the_page_is_written_when_training_is_stopped(tmp_path, error):
    class Stopping(callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 15:
                raise error

    path = tmp_path / "report.html"
    monitor = kg.FeedMonitor(path)
    with pytest.raises(type(error)):
        watch(make_model(), kg.DistributedFeeder(*repeated(10), batch_size=8), monitor=monitor, callbacks=[Stopping()])
    words = read_page(path)
    assert f"training stopped by {type(error).__name__}" in words
    assert monitor.verdict.headline in words
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_a_failing_source_arrives_as_raised_and_leaves_a_page(tmp_path):
    def batches():
        for _ in range(12):
            yield X, Y
        raise LookupError("file 13")

    with pytest.raises(LookupError, match="file 13"):
        watch(make_model(), kg.DistributedFeeder(batches), monitor=kg.FeedMonitor(tmp_path / "report.html"))
    assert "training stopped by LookupError: file 13" in read_page(tmp_path / "report.html")


def test_a_training_too_short_to_judge(tmp_path):
    monitor, _ = watch(
        make_model(), kg.DistributedFeeder(X, Y, batch_size=21), epochs=1, monitor=kg.FeedMonitor(tmp_path / "r.html")
    )
    assert monitor.verdict is None
    assert "Too few steps to judge" in read_page(tmp_path / "r.html")


def test_the_picture(tmp_path):
    path = tmp_path / "report.png"
    watch(make_model(), kg.DistributedFeeder(*repeated(10), batch_size=8), monitor=kg.FeedMonitor(path))
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    pixels = tf.io.decode_png(path.read_bytes()).numpy()
    assert pixels.shape[1] > 1000
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 20  # Something is drawn.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"report": "report.pdf"}, r"ends in \".html\" or \".png\". Received 'report.pdf'"),
        ({"report": "no/such/folder/report.html"}, "The folder of report='no/such/folder/report.html' does not exist"),
        ({"every_steps": 0}, "every_steps must be a positive integer. Received 0"),
        ({"replay_steps": "all"}, "replay_steps must be a positive integer. Received 'all'"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(kg.FeedError, match=message):
        kg.FeedMonitor(**arguments)


def test_without_a_feeder():
    model = tf.keras.Sequential([layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(kg.FeedError, match="FeedMonitor watches a DistributedFeeder"):
        model.fit(X, Y, verbose=0, callbacks=[kg.FeedMonitor()])


def test_two_in_one_fit():
    model = make_model()
    feeder = kg.DistributedFeeder(X, Y, batch_size=16)
    with pytest.raises(kg.FeedError, match="One FeedMonitor watches a fit, and callbacks holds two"):
        model.fit(feeder, verbose=0, callbacks=[kg.FeedMonitor(), kg.FeedMonitor()])
    assert int(model.optimizer.iterations) == 0
    assert list(model.fit(feeder, verbose=0).history) == ["loss"]  # Trains on, watched by nobody.


# --- The feed alone ----------------------------------------------------------------------------------------


def test_the_feed_alone():
    rates = kg.DistributedFeeder(*repeated(20), batch_size=21).measure(seconds=0.2, strategy=strategy_of(2))
    assert rates.samples_per_step == 21
    assert rates.copied_bytes == 21 * 4 * 4
    assert rates.source_seconds == rates.transform_seconds == 0
    assert rates.num_steps > 20  # More than one pass.
    assert rates.seconds >= 0.2


def test_the_feed_alone_by_stage():
    generator = kg.DistributedFeeder(napping_batches).measure(seconds=0.3, strategy=strategy_of(2))
    assert generator.source_seconds >= NAP_SECONDS
    assert generator.step_seconds >= 0.8 * NAP_SECONDS  # The clock may start late in a batch.
    transformed = kg.DistributedFeeder(*repeated(20), batch_size=21, transform=napping_transform)
    assert transformed.measure(seconds=0.3, strategy=strategy_of(2)).transform_seconds >= 2 * NAP_SECONDS


def test_measuring_leaves_training_as_it_was():
    models = [make_model(num_replicas=1) for _ in range(2)]
    feeders = [kg.DistributedFeeder(X, Y, batch_size=8, seed=3) for _ in range(2)]
    feeders[0].measure(seconds=0.05, strategy=strategy_of(2))
    for model, feeder in zip(models, feeders):
        model.fit(feeder, epochs=2, verbose=0)
    assert largest_difference(*models) == 0


def test_what_cannot_be_measured():
    with pytest.raises(kg.SourceError, match="measure would use up a generator object"):
        kg.DistributedFeeder(napping_batches()).measure()

    def failing():
        yield X, Y
        yield X, Y
        raise LookupError("file 3")

    with pytest.raises(LookupError, match="file 3"):
        kg.DistributedFeeder(failing).measure(seconds=5)
