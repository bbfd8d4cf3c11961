"""Draws a plan: who gets which samples of a step, here and in stock Keras.

Flow:   errors -> stock -> plan -> [plan_picture] -> order -> ...
Owns:   the picture.
Leaves: every number in it (plan). Matplotlib is imported when a picture is drawn, and only then.
"""

from __future__ import annotations

from typing import Any

from .errors import FeedError
from .plan import BatchPlan, Split
from .stock import StockSplit

_COLOUR, _REPEATED, _WRONG, _TEXT = "#3b6fb6", "#b9cbe4", "#c0392b", "#222222"
_INCHES_PER_REPLICA = 0.36
_MOST_LABELS = 32  # With more replicas, bars become thin and not each has a label.
_CHARACTERS_PER_AXES = 66  # Of the size that bars are labelled with.


def draw_plan(plan: BatchPlan, path: str) -> None:
    """Draws the full step and the last step of a plan of known length, with stock Keras beside them.

    Args:
        plan: The plan.
        path: The file; its ending names the format, such as .png, .svg or .pdf.

    Raises:
        FeedError: If Matplotlib is missing, or the file cannot be written in this format.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        raise FeedError(
            "Pictures are drawn by Matplotlib, which is not installed: pip install keras-gpufeed[report]"
        ) from None
    steps = _kinds_of_steps(plan)
    height = 1.1 + len(steps) * (1.0 + _INCHES_PER_REPLICA * min(plan.num_replicas, _MOST_LABELS))
    figure = Figure(figsize=(11, height), layout=ConstrainedLayoutEngine(wspace=0.06, hspace=0.06))
    figure.suptitle(str(plan).partition("\n")[0], fontsize=13, color=_TEXT)
    labelled = range(0, plan.num_replicas, -(-plan.num_replicas // _MOST_LABELS))
    all_axes = figure.subplots(len(steps), 2, squeeze=False, sharey=True)
    for row, (axes_here, axes_stock) in enumerate(all_axes):
        name, step = steps[row]
        split, stock = plan.split(step), plan.stock(step)
        _draw_here(axes_here, split, labelled)
        _draw_stock(axes_stock, stock, labelled)
        for axes, title in ((axes_here, f"keras_gpufeed, {name}"), (axes_stock, f"stock Keras, {name}")):
            axes.set_title(title, fontsize=10, color=_TEXT, loc="left")
            axes.set_xlim(0, split.num_samples)
            axes.set_ylim(plan.num_replicas - 0.4, -0.6)  # Replica 0 on top.
            axes.set_xlabel("sample of the global batch", fontsize=8, color=_TEXT)
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.xaxis.get_major_locator().set_params(integer=True)
        if not stock.is_right:
            axes_stock.set_xlabel(
                "sample of the global batch; in the gradient, each should count once", fontsize=8, color=_WRONG
            )
        axes_here.set_yticks(labelled)
        axes_here.set_yticklabels([f"replica {replica}" for replica in labelled])
        axes_here.tick_params(axis="y", length=0)
        axes_stock.tick_params(axis="y", length=0)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise FeedError(f"The plan cannot be drawn as {path!r}: {error}") from error


def _kinds_of_steps(plan: BatchPlan) -> list[tuple[str, int]]:
    last = (plan.steps or 1) - 1
    if plan.split(0) == plan.split(last):
        return [("each step" if last else "the only step", 0)]
    return [(f"steps 1 to {last}" if last > 1 else "step 1", 0), (f"step {last + 1}, the last", last)]


def _draw_here(axes: Any, split: Split, labelled: range) -> None:
    for replica, (start, stop) in enumerate(split.parts):
        repeats = split.small_tail and replica > 0
        axes.barh(replica, stop - start, left=start, height=0.62, color=_REPEATED if repeats else _COLOUR)
        share = split.shares[replica]
        weight = "" if len(set(split.shares)) == 1 else f", share {share:.3g}"
        text = f"{_samples(stop - start)}{weight}"
        if split.small_tail:
            text += ", counted by replica 0" if replica else ", counted"
        if replica in labelled:
            _write(axes, replica, start, stop, split.num_samples, text, "white" if not repeats else _TEXT)


def _draw_stock(axes: Any, stock: StockSplit, labelled: range) -> None:
    start, total = 0, sum(stock.sizes)
    for replica, (size, factor) in enumerate(zip(stock.sizes, stock.gradient_factors)):
        axes.barh(replica, size, left=start, height=0.62, color=_COLOUR if stock.is_right else _WRONG)
        weight = "" if stock.is_right else f", each {factor:.3g} times"
        text = f"{_samples(size)}{weight}" if size else "no sample"
        if replica in labelled:
            _write(axes, replica, start, start + size, total, text, "white" if size else _WRONG)
        start += size


def _write(axes: Any, replica: int, start: int, stop: int, total: int, text: str, colour: str) -> None:
    """Puts a text on its bar, or beside it, on the side with more room, where the bar is too short."""
    if (stop - start) / total * _CHARACTERS_PER_AXES > len(text):
        place, side = (start + stop) / 2, "center"
    elif total - stop >= start:
        place, side, text, colour = stop, "left", f" {text}", _TEXT if colour == "white" else colour
    else:
        place, side, text, colour = start, "right", f"{text} ", _TEXT if colour == "white" else colour
    axes.text(place, replica, text, ha=side, va="center", fontsize=8, color=colour).set_in_layout(False)


def _samples(number: int) -> str:
    return f"{number} sample" if number == 1 else f"{number} samples"
