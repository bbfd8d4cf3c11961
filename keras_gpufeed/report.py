"""Shows what a monitor recorded: one page, or one picture.

Flow:   ... -> recording -> [report] -> ... -> callbacks
Owns:   the words and the layout of the page; writing files so that nobody ever sees half of one.
Leaves: the curves themselves (charts), what they show (recording, verdict).

The page is one file and loads nothing: its style is in it, its charts are inline SVG, and there is no script. Each
chart has its numbers in a table below, for screen readers and for copying.
"""

from __future__ import annotations

import contextlib
import html
import os
import secrets

from . import charts
from .charts import Curve
from .plan import readable_bytes
from .recording import Recording, total

_KINDS = (
    ("wait", "waiting for data"),
    ("python", "Python"),
    ("skew", "waiting for a replica"),
    ("compute", "computing"),
)

_WORTH_MARKING = 0.1  # Of a step: below, a loss is no reason to look at it.

_STYLE = """
:root {
  --page: #f6f7f9; --card: #fff; --text: #1a2027; --soft: #56616e; --line: #d5dae1; --ground: #e6eaef;
  --compute: #2563c9; --wait: #d9660a; --python: #7b3fc4; --skew: #c02456; --feed: #0f7f74;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #12161b; --card: #1b2128; --text: #e8ecf1; --soft: #a3aebb; --line: #38424e; --ground: #2b3540;
    --compute: #6aa3ff; --wait: #ffa04d; --python: #bd93f9; --skew: #ff7b9f; --feed: #45c9b8;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; padding: 1rem; background: var(--page); color: var(--text);
  font: 1rem/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 76rem; margin: 0 auto; }
section, header { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: 1rem 1.1rem; }
header { border-left: .4rem solid var(--mark); margin-bottom: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .1rem 0 .5rem; }
h2 { font-size: 1.02rem; margin: 0 0 .3rem; }
p { margin: .3rem 0; }
.soft, .lane, summary { color: var(--soft); font-size: .88rem; }
.knob { font-weight: 600; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .6rem; margin: 0 0 1rem; }
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .55rem .8rem; }
.tiles dt { color: var(--soft); font-size: .82rem; }
.tiles dd { margin: 0; font-size: 1.25rem; font-weight: 600; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 23rem), 1fr)); gap: 1rem; }
.wide { grid-column: 1 / -1; }
.bar { display: flex; height: 1.6rem; border-radius: .35rem; overflow: hidden; margin: .5rem 0; }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; font-size: .88rem; padding: 0; margin: .2rem 0; }
.key li { list-style: none; }
.key i { display: inline-block; width: .8em; height: .8em; border-radius: .15em; margin-right: .4em; }
figure { margin: 0; }
svg { display: block; width: 100%; height: auto; }
svg.strip { height: 2rem; background: var(--ground); }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
svg .strong { fill: var(--text); }
svg .on { fill: var(--card); font-weight: 600; }
svg .axis { stroke: var(--line); fill: none; }
.compute { background: var(--compute); fill: var(--compute); stroke: var(--compute); }
.wait { background: var(--wait); fill: var(--wait); stroke: var(--wait); }
.python { background: var(--python); fill: var(--python); stroke: var(--python); }
.skew { background: var(--skew); fill: var(--skew); stroke: var(--skew); }
.feed { background: var(--feed); fill: var(--feed); stroke: var(--feed); }
.ground { fill: var(--ground); }
svg rect { stroke: none; }
path.curve { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
details { margin-top: .3rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .9rem .2rem 0; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, caption { text-align: left; }
caption { color: var(--soft); }
.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.facts th { vertical-align: top; font-weight: 400; color: var(--soft); }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; }
@media print {
  body { padding: 0; font-size: .85rem; background: #fff; }
  .tiles { grid-template-columns: repeat(6, 1fr); }
  .cards { grid-template-columns: 1fr 1fr; gap: .6rem; }
  details { display: none; }
  section, header, .tiles div { break-inside: avoid; }
  .bar, .key i, svg { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""


def write(recording: Recording, path: str) -> None:
    """Writes the report, all of it or nothing.

    Args:
        recording: What to show.
        path: File that ends in ".html" or ".png"; one that is there is replaced.
    """
    content = charts.picture(recording, _headline(recording)) if path.endswith(".png") else page(recording).encode()
    beside = f"{path}.{os.getpid()}-{secrets.token_hex(4)}.part"  # In the same folder, so that it can be renamed.
    try:
        with open(beside, "wb") as file:
            file.write(content)
        os.replace(beside, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(beside)


def page(recording: Recording) -> str:
    """The page.

    Args:
        recording: What to show.

    Returns:
        HTML that needs no other file.
    """
    mark = {"compute": "compute", "python": "python", "replica": "skew"}
    bound_by = recording.verdict.bound_by if recording.verdict else "compute"
    body = [
        _verdict(recording),
        _tiles(recording),
        '<div class="cards">',
        _where_time_went(recording),
        _last_steps(recording),
        _shares(recording),
        _throughput(recording),
        _fill(recording),
        _splits(recording),
        _replicas(recording),
        _loss(recording),
        _memory(recording),
        _utilisation(recording),
        _card("The plan", f"<pre>{html.escape(recording.plan)}</pre>"),
        _card("The machine", _facts(recording.machine)),
        _epochs(recording),
        "</div>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{html.escape(_headline(recording))}</title>\n"
        f"<style>{_STYLE.strip()}\n:root {{ --mark: var(--{mark.get(bound_by, 'wait')}); }}\n</style>\n"
        "</head>\n<body>\n<main>\n" + "\n".join(part for part in body if part) + "\n</main>\n</body>\n</html>\n"
    )


def _headline(recording: Recording) -> str:
    if recording.verdict is None:
        return "Too few steps to judge: all were warm-up."
    return recording.verdict.headline


def _verdict(recording: Recording) -> str:
    lines = [f'<p class="soft">keras_gpufeed: training {html.escape(recording.state)}</p>']
    lines.append(f"<h1>{html.escape(_headline(recording))}</h1>")
    if recording.verdict is not None:
        lines.append(f"<p>{html.escape(recording.verdict.reason)}</p>")
        lines.append(f'<p class="knob">{html.escape(recording.verdict.knob)}</p>')
    rates = recording.rates
    if rates is not None and rates.ceiling_seconds:
        ceiling, reached = rates.samples_per_step / rates.ceiling_seconds, rates.ceiling_seconds / rates.step_seconds
        lines.append(
            f"<p>On one batch that lay ready, a step took {_ms(rates.ceiling_seconds)}: {_count(ceiling)} samples/s "
            f"would be the most, and training reached {_percent(reached)} of it.</p>"
        )
    return f"<header>{''.join(lines)}</header>"


def _tiles(recording: Recording) -> str:
    rates = recording.rates
    if rates is None:
        return ""
    tiles = {
        "samples per second": _count(rates.samples_per_second),
        f"on each of {recording.num_replicas} replicas": _count(rates.samples_per_second / recording.num_replicas),
        "waiting for data": _percent(rates.feed_wait),
        "a step": _ms(rates.step_seconds),
        "host copies": f"{readable_bytes(rates.copied_bytes / rates.step_seconds)}/s",
        "steps measured": f"{rates.num_steps:,}",
    }
    return (
        '<dl class="tiles">'
        + "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in tiles.items())
        + "</dl>"
    )


def _where_time_went(recording: Recording) -> str:
    rates = recording.rates
    if rates is None:
        return ""
    seconds = {
        "wait": rates.wait_seconds + rates.processor_seconds,
        "python": rates.own_python_seconds + rates.interpreter_seconds,
        "skew": rates.skew_seconds,
        "compute": rates.compute_seconds,
    }
    named = dict(_KINDS)
    bar = "".join(
        f'<span class="{kind}" style="flex:{value / rates.step_seconds:.4f}" title="{named[kind]}"></span>'
        for kind, value in seconds.items()
    )
    key = "".join(
        f'<li><i class="{kind}"></i>{named[kind]} {_percent(value / rates.step_seconds)}, {_ms(value)}</li>'
        for kind, value in seconds.items()
        if value or kind != "skew"
    )
    stages = {"source": rates.source_seconds, "transform": rates.transform_seconds, "copying": rates.copy_seconds}
    feed = ", ".join(f"{name} {_ms(value)}" for name, value in stages.items() if value)
    warm_up = ""
    if recording.warm_up:
        apart = total(recording.warm_up)
        warm_up = f" Kept apart as warm-up: {_steps(round(apart.num_steps))}, {apart.seconds:.3g} s."
    hidden = {
        "Python's part the wait for its interpreter, which the source held": rates.interpreter_seconds,
        "the wait for data that for processors, which copying kept busy": rates.processor_seconds,
    }
    said = [
        f" Of {what}: {_ms(value)}. The last steps, below, show it as computing."
        for what, value in hidden.items()
        if value >= _WORTH_MARKING * rates.step_seconds
    ]
    return _card(
        "Where a step's time goes",
        f'<div class="bar" aria-hidden="true">{bar}</div><ul class="key">{key}</ul>'
        f'<p class="soft">Meanwhile the feed makes the next batches; one takes: {feed or "no time to speak of"}.'
        f"{''.join(said)}{warm_up}</p>",
        wide=True,
    )


def _last_steps(recording: Recording) -> str:
    steps = list(recording.recent)[-charts.NUM_STEPS_DRAWN :]
    if not steps:
        return ""
    rows = [
        [
            f"{step.started:.4f}",
            *(f"{value * 1e3:.3f}" for value in (step.seconds, step.wait_seconds, step.python_seconds)),
            f"{(step.source_seconds + step.copy_seconds) * 1e3:.3f}",
        ]
        for step in steps
    ]
    key = "".join(
        f'<li><i class="{kind}"></i>{name}</li>'
        for kind, name in (*(pair for pair in _KINDS if pair[0] != "skew"), ("feed", "making a batch"))
    )
    lane, feed = charts.last_steps(steps)
    milliseconds = 1e3 * (steps[-1].started + steps[-1].seconds - steps[0].started)
    header = ["begins at (s)", "takes (ms)", "waits (ms)", "Python (ms)", "its batch took (ms)"]
    return _card(
        f"The last {_steps(len(steps))}, and the making of their batches",
        f'<ul class="key">{key}</ul><p class="lane">steps, {milliseconds:.3g} ms in all</p>{lane}'
        + _figure(f'<p class="lane">feed, in the same time</p>{feed}', header, rows),
        wide=True,
    )


def _shares(recording: Recording) -> str:
    if len(recording.spans) < 2:
        return ""
    return _chart("Share of the time lost", charts.lost(recording), "%", top=100)


def _throughput(recording: Recording) -> str:
    return _chart("Samples per second", charts.speed(recording), "", bottom=0)


def _fill(recording: Recording) -> str:
    return _chart(
        f"Batches ready when a step asks (up to about {recording.capacity})",
        charts.fill(recording),
        "",
        top=recording.capacity,
    )


def _loss(recording: Recording) -> str:
    return _chart("Loss", [Curve("loss", "python", [recording.loss.points])], "")


def _memory(recording: Recording) -> str:
    kinds = ("feed", "compute", "wait", "python", "skew")
    curves = [
        Curve(f"{name} (MB)", kinds[number % len(kinds)], [[(x, value / 1e6) for x, value in series.points]])
        for number, (name, series) in enumerate(recording.memory.items())
    ]
    return _chart("Memory in use", curves, " MB", bottom=0)


def _utilisation(recording: Recording) -> str:
    kinds = ("compute", "wait", "python", "skew", "feed")
    curves = [
        Curve(name, kinds[number % len(kinds)], [series.points])
        for number, (name, series) in enumerate(recording.utilisation.items())
    ]
    return _chart("GPU utilisation, as the driver tells", curves, "%", top=100) if curves else ""


def _splits(recording: Recording) -> str:
    parts = []
    for title, split, first in recording.splits:
        last = first + split.num_samples - 1
        rule = ": fewer samples than replicas, so all get all and replica 0 counts them" if split.small_tail else ""
        rows = [
            [device, f"{first + start}", f"{first + stop - 1}", f"{stop - start}"]
            for device, (start, stop) in zip(recording.devices, split.parts)
        ]
        parts.append(
            f'<p class="soft">{title}, samples {first:,} to {last:,} of the epoch{rule}</p>'
            + _figure(
                charts.split_map(split, first, recording.devices, title),
                ["replica", "first sample", "last sample", "samples"],
                rows,
            )
        )
    if not parts:
        return ""
    return _card("Which samples go to which replica", "".join(parts))


def _replicas(recording: Recording) -> str:
    rates = recording.rates
    if rates is None or not rates.replica_seconds:
        return ""
    matters = rates.skew_seconds >= _WORTH_MARKING * rates.step_seconds
    bars = [(device, seconds * 1e3) for device, seconds in zip(recording.devices, rates.replica_seconds)]
    rows = [[device, f"{value:.3f}"] for device, value in bars]
    return _card(
        "From the data to the gradients, on each replica",
        _figure(charts.bars(bars, " ms", rates.slowest_replica if matters else None), ["replica", "median (ms)"], rows),
    )


def _epochs(recording: Recording) -> str:
    if not recording.epochs:
        return ""
    names = list(dict.fromkeys(name for epoch in recording.epochs for name in epoch.logs))
    rows = [
        [str(epoch.number), *(f"{epoch.logs[name]:.5g}" if name in epoch.logs else "" for name in names)]
        for epoch in recording.epochs[-50:]
    ]
    table = _table(["epoch", *names], rows, "What Keras logged for each epoch")
    return _card("Epochs", f'<div class="scroll">{table}</div>', wide=True)


# --- Pieces of HTML ----------------------------------------------------------------------------------------


def _chart(title: str, curves: list[Curve], unit: str, bottom: float | None = None, top: float | None = None) -> str:
    if not any(len(curve.points) > 1 for curve in curves):
        return ""
    places = sorted({x for curve in curves for x, _ in curve.points})
    values = [dict(curve.points) for curve in curves]
    rows = [
        [f"{x:.3f}", *(f"{each[x]:.5g}" if x in each else "" for each in values)] for x in charts.thinned(places, 24)
    ]
    key = ""
    if len(curves) > 1:
        key = "".join(f'<li><i class="{curve.kind}"></i>{html.escape(curve.name)}</li>' for curve in curves)
        key = f'<ul class="key">{key}</ul>'
    drawn = charts.lines(title, curves, unit, bottom, top)
    return _card(title, _figure(drawn, ["seconds", *(curve.name for curve in curves)], rows) + key)


def _card(title: str, content: str, wide: bool = False) -> str:
    kind = ' class="wide"' if wide else ""
    return f"<section{kind}><h2>{html.escape(title)}</h2>{content}</section>"


def _figure(drawn: str, header: list[str], rows: list[list[str]]) -> str:
    table = _table(header, rows, "")
    return f'<figure>{drawn}<details><summary>Numbers</summary><div class="scroll">{table}</div></details></figure>'


def _table(header: list[str], rows: list[list[str]], caption: str) -> str:
    head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _facts(facts: dict[str, str]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th><td>{html.escape(value)}</td></tr>'
        for name, value in facts.items()
    )
    return f'<table class="facts"><tbody>{rows}</tbody></table>'


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _count(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _steps(number: int) -> str:
    return f"{number} step" if number == 1 else f"{number} steps"
