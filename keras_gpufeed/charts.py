"""Draws: charts as SVG for the page, or all of them in one picture.

Flow:   ... -> recording -> [charts] -> report -> ...
Owns:   axes, curves, bars, the timeline and the split map; the picture by Matplotlib, which is an extra.
Leaves: words around them (report).
"""

from __future__ import annotations

import dataclasses
import html
import io
import math
from typing import Any, Callable

from .plan import Split
from .recording import Recording, Span, total

_NUM_POINTS = 160  # Of a curve.
_NEIGHBOURS = 2  # On each side, with which a step is averaged.
_VISIBLE_GAP = 0.01  # Of the time that is shown.
NUM_STEPS_DRAWN = 24  # Of the timeline.
_WIDTH, _HEIGHT = 420, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 8, 24
_STRIP_WIDTH = 1000
_MAX_REPLICAS_DRAWN = 32


@dataclasses.dataclass(frozen=True)
class Curve:
    """A line of a chart.

    Args:
        name: What it shows.
        kind: Which colour: a class of the page's style.
        pieces: Lists of pairs (seconds since training began, value); there is no line between them.
    """

    name: str
    kind: str
    pieces: list[list[tuple[float, float]]]

    @property
    def points(self) -> list[tuple[float, float]]:
        """Those of all pieces."""
        return [point for piece in self.pieces for point in piece]


def over_time(spans: list[Span], value: Callable[[Span], float]) -> list[list[tuple[float, float]]]:
    """How a mean over neighbouring steps goes. Single ones jump, as the first of an epoch, whose batch lies ready.

    Args:
        spans: In order.
        value: Takes some steps, as one span.

    Returns:
        Pieces of a curve: a new one begins where training paused, as for a validation.
    """
    size = -(-len(spans) // _NUM_POINTS)
    spans = [total(spans[start : start + size]) for start in range(0, len(spans), size or 1)]
    pieces: list[list[Span]] = []
    for place, span in enumerate(spans):
        if not place or span.started - spans[place - 1].ended > _VISIBLE_GAP * (spans[-1].ended - spans[0].started):
            pieces.append([])
        pieces[-1].append(span)
    return [
        [
            (span.started, value(total(piece[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS + 1])))
            for place, span in enumerate(piece)
        ]
        for piece in pieces
    ]


def lines(title: str, curves: list[Curve], unit: str, bottom: float | None, top: float | None) -> str:
    """Curves over time.

    Args:
        title: For screen readers.
        curves: At least one, with points.
        unit: Stands after the numbers of the axis.
        bottom: Where the axis begins, at the most; None leaves it to the values.
        top: Where it ends, at the least.
    """
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    if top is not None:
        bottom = 0.0 if bottom is None else bottom
    low = min([*ys, *([] if bottom is None else [bottom])])
    high = max([*ys, *([] if top is None else [top])])
    ticks = nice_ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    place_x = _scale(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    place_y = _scale(low, high, _HEIGHT - _BOTTOM, _TOP)
    parts = []
    for tick in ticks:
        y = place_y(tick)
        parts.append(f'<path class="axis" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}{unit}</text>')
    for tick in nice_ticks(min(xs), max(xs)):
        if min(xs) <= tick <= max(xs):
            parts.append(
                f'<text x="{place_x(tick):.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{_number(tick)} s</text>'
            )
    for curve in curves:
        for piece in filter(None, curve.pieces):
            path = "L".join(f"{place_x(x):.1f} {place_y(y):.1f}" for x, y in piece)
            # One point is drawn too: a line of no length with round ends.
            parts.append(f'<path class="curve {curve.kind}" d="M{path}{"" if len(piece) > 1 else "h0"}"/>')
    said = "; ".join(
        f"{curve.name}: from {_number(curve.points[0][1])} to {_number(curve.points[-1][1])}, "
        f"lowest {_number(min(y for _, y in curve.points))}, highest {_number(max(y for _, y in curve.points))}"
        for curve in curves
        if curve.points
    )
    return _svg(_WIDTH, _HEIGHT, f"{title}. {said}", parts)


def lost(recording: Recording) -> list[Curve]:
    """For how much of the time steps waited and Python ran, in per cent."""
    return [
        Curve(name, kind, over_time(recording.spans, lambda span, kind=kind: _percent_of(span, kind)))  # type: ignore[misc]
        for kind, name in (("wait", "waiting for data"), ("python", "Python"))
    ]


def _percent_of(span: Span, kind: str) -> float:
    return 100 * getattr(span, f"{kind}_seconds") / span.seconds


def speed(recording: Recording) -> list[Curve]:
    """Samples per second."""
    pieces = over_time(recording.spans, lambda span: span.num_samples / span.seconds)
    return [Curve("samples per second", "compute", pieces)]


def fill(recording: Recording) -> list[Curve]:
    """Batches that lay ready when a step began."""
    return [Curve("batches ready", "feed", over_time(recording.spans, lambda span: span.fill / span.num_steps))]


def last_steps(steps: list[Span]) -> tuple[str, str]:
    """Steps one after the other, and the making of their batches in the same time.

    Args:
        steps: At least one, in order.

    Returns:
        Two strips without text, which a page may stretch to any width.
    """
    start, stop = steps[0].started, steps[-1].started + steps[-1].seconds
    place = _scale(start, stop, 0, _STRIP_WIDTH)
    lane, feed = [], []
    for number, step in enumerate(steps):
        at = step.started
        for kind, name, seconds in _parts_of(step):
            lane.append(_box(place(at), 0, place(at + seconds), 30, kind, f"{name}: {seconds * 1e3:.2f} ms"))
            at += seconds
        making = step.source_seconds + step.copy_seconds
        left, right = place(max(start, step.made_at - making)), place(min(stop, step.made_at))
        if right > left:  # Others were made before the first of these steps.
            title = f"the batch of step {number + 1} of these: {making * 1e3:.2f} ms"
            feed.append(_box(left, 0, max(right - 1, left + 1), 30, "feed", title))
    waited = sum(step.wait_seconds for step in steps) / sum(step.seconds for step in steps)
    said = f"{len(steps)} steps in {_number(1e3 * (stop - start))} ms, of which {100 * waited:.0f} % were waiting."
    said_of_feed = f"{len(feed)} of their batches were made in that time."
    return _svg(_STRIP_WIDTH, 30, said, lane, stretch=True), _svg(_STRIP_WIDTH, 30, said_of_feed, feed, stretch=True)


def _parts_of(step: Span) -> list[tuple[str, str, float]]:
    rest = max(0.0, step.seconds - step.python_seconds - step.wait_seconds)
    return [
        ("python", "Python", step.python_seconds),
        ("wait", "waiting", step.wait_seconds),
        ("compute", "computing", rest),
    ]


def split_map(split: Split, first: int, devices: tuple[str, ...], title: str) -> str:
    """One row for each replica, with its samples of the global batch.

    Args:
        split: The cut.
        first: Place of the first sample in the epoch.
        devices: Of the replicas.
        title: Which step it is.
    """
    shown = list(zip(devices, split.parts))[:_MAX_REPLICAS_DRAWN]
    height, label = 20, 58
    place = _scale(0, split.num_samples, label, _WIDTH - 4)
    parts = []
    for row, (device, (start, stop)) in enumerate(shown):
        y = row * height + 2
        idle = split.small_tail and row > 0  # Computes the samples, but does not count them.
        parts.append(
            f'<text x="{label - 6}" y="{y + 13}" text-anchor="end" class="strong">{html.escape(device)}</text>'
        )
        parts.append(f'<rect class="ground" x="{label}" y="{y}" width="{_WIDTH - 4 - label}" height="{height - 4}"/>')
        said = f"samples {first + start} to {first + stop - 1}"
        parts.append(_box(place(start), y, place(stop), height - 4, "ground" if idle else "compute", said))
        middle = (place(start) + place(stop)) / 2
        kind = "" if idle else ' class="on"'
        if place(stop) - place(start) > 24:
            parts.append(f'<text x="{middle:.1f}" y="{y + 12}" text-anchor="middle"{kind}>{stop - start}</text>')
        else:
            at, anchor = (place(stop) + 4, "start") if middle < _WIDTH / 2 else (place(start) - 4, "end")
            parts.append(f'<text x="{at:.1f}" y="{y + 12}" text-anchor="{anchor}" class="strong">{stop - start}</text>')
    rest = len(split.parts) - len(shown)
    if rest:
        parts.append(f'<text x="{label}" y="{len(shown) * height + 14}">and {rest} more replicas</text>')
    sizes = ", ".join(f"{size} on {device}" for device, size in zip(devices, split.sizes))
    return _svg(_WIDTH, (len(shown) + bool(rest)) * height + 2, f"Split of the {title}: {sizes}", parts)


def bars(values: list[tuple[str, float]], unit: str, marked: int | None) -> str:
    """One bar for each name.

    Args:
        values: Names and numbers.
        unit: Stands after each number.
        marked: The one to point out, or None.
    """
    height, label = 22, 58
    place = _scale(0, max([value for _, value in values] + [1e-9]), 0, _WIDTH - label - 70)
    parts = []
    for row, (name, value) in enumerate(values):
        y, width = row * height + 2, max(1.0, place(value))
        kind = "skew" if row == marked else "compute"
        parts.append(f'<text x="{label - 6}" y="{y + 13}" text-anchor="end" class="strong">{html.escape(name)}</text>')
        parts.append(f'<rect class="{kind}" x="{label}" y="{y}" width="{width:.1f}" height="{height - 6}"/>')
        parts.append(f'<text x="{label + width + 6:.1f}" y="{y + 13}">{_number(value)}{unit}</text>')
    said = ", ".join(f"{name}: {_number(value)}{unit}" for name, value in values)
    return _svg(_WIDTH, len(values) * height + 2, said, parts)


def thinned(values: list, number: int) -> list:
    """At most `number` of the values, evenly spread, the last one included."""
    if len(values) <= number:
        return values
    return [values[round(place * (len(values) - 1) / (number - 1))] for place in range(number)]


def nice_ticks(low: float, high: float, number: int = 4) -> list[float]:
    """Round numbers that cover a range.

    Args:
        low: Its beginning.
        high: Its end.
        number: About how many steps between them.

    Example:
        >>> nice_ticks(0.0, 93.0)
        [0.0, 25.0, 50.0, 75.0, 100.0]
    """
    span = high - low or abs(high) or 1.0
    exponent = math.floor(math.log10(span / number))
    step = next(
        factor * 10.0**exponent for factor in (1, 2, 2.5, 5, 10) if factor * 10.0**exponent >= span / number * 0.999
    )
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(place * step, 12) for place in range(first, last + 1)]


def _scale(low: float, high: float, start: float, stop: float) -> Any:
    factor = (stop - start) / ((high - low) or 1.0)
    return lambda value: start + (value - low) * factor


def _box(left: float, y: float, right: float, height: float, kind: str, title: str) -> str:
    return (
        f'<rect class="{kind}" x="{left:.1f}" y="{y}" width="{max(0.0, right - left):.1f}" height="{height}">'
        f"<title>{html.escape(title)}</title></rect>"
    )


def _number(value: float) -> str:
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _svg(width: int, height: int, label: str, parts: list[str], stretch: bool = False) -> str:
    kind = ' class="strip" preserveAspectRatio="none"' if stretch else ""
    return (
        f'<svg{kind} viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(label, quote=True)}">'
        f"{''.join(parts)}</svg>"
    )


# --- The picture -------------------------------------------------------------------------------------------

_COLORS = {"compute": "#2563c9", "wait": "#d9660a", "python": "#7b3fc4", "skew": "#c02456", "feed": "#0f7f74"}


def picture(recording: Recording, headline: str) -> bytes:
    """All charts in one picture, drawn by Matplotlib.

    Args:
        recording: What to show.
        headline: Stands on top.

    Returns:
        A PNG file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8.5), layout="constrained")  # Not of pyplot: the user's figures are left alone.
    FigureCanvasAgg(figure)
    said = "" if recording.verdict is None else f"\n{recording.verdict.reason}\n{recording.verdict.knob}"
    figure.suptitle(f"{headline}{said}", fontsize=11, x=0.01, ha="left", wrap=True)
    axes = figure.subplots(3, 2)
    _draw_steps(axes[0, 0], list(recording.recent)[-NUM_STEPS_DRAWN:])
    for axis, curves in ((axes[0, 1], lost(recording)), (axes[1, 0], speed(recording)), (axes[1, 1], fill(recording))):
        for curve in curves:
            _draw_curve(axis, curve)
    axes[0, 1].set(title="Share of the time lost (%)", ylim=(0, 100))
    axes[0, 1].legend()
    axes[1, 0].set(title="Samples per second", ylim=(0, None))
    axes[1, 1].set(title="Batches ready when a step asks", ylim=(0, None))
    _draw_splits(axes[2, 0], recording)
    axes[2, 1].plot(*zip(*recording.loss.points or [(0, 0)]), color=_COLORS["python"])
    axes[2, 1].set(title="Loss")
    for axis in (axes[0, 1], axes[1, 0], axes[1, 1], axes[2, 1]):
        axis.set_xlabel("seconds")
        axis.grid(alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _draw_curve(axis: Any, curve: Curve) -> None:
    for number, piece in enumerate(curve.pieces):
        name = curve.name if number == 0 else None
        axis.plot(*zip(*piece), color=_COLORS[curve.kind], label=name, marker="." if len(piece) == 1 else None)


def _draw_steps(axis: Any, steps: list[Span]) -> None:
    for step in steps:
        at = step.started
        for kind, _, seconds in _parts_of(step):
            axis.broken_barh([(at, seconds)], (1.1, 0.8), facecolors=_COLORS[kind])
            at += seconds
        making = step.source_seconds + step.copy_seconds
        axis.broken_barh([(step.made_at - making, making)], (0.1, 0.8), facecolors=_COLORS["feed"])
    if steps:
        axis.set_xlim(steps[0].started, steps[-1].started + steps[-1].seconds)
    axis.set(title="The last steps, and the making of their batches", xlabel="seconds")
    axis.set_yticks([0.5, 1.5], ["feed", "steps"])


def _draw_splits(axis: Any, recording: Recording) -> None:
    rows = [
        (f"{title}, {device}", start, stop)
        for title, split, _ in recording.splits
        for device, (start, stop) in list(zip(recording.devices, split.parts))[:_MAX_REPLICAS_DRAWN]
    ]
    for place, (_, start, stop) in enumerate(rows):
        axis.barh(place, stop - start, left=start, color=_COLORS["compute"], height=0.7)
    axis.set_yticks(range(len(rows)), [name for name, _, _ in rows], fontsize=7)
    axis.invert_yaxis()
    axis.set(title="Which samples of a step go to which replica", xlabel="sample of the step")
