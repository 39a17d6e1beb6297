"""Figures show the numbers they are given."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bayesgrad import plots
from bayesgrad_lab import figures

NAMES = [f"a rule with a long name, {i}" for i in range(10)]
RUNS = [[3.0, 2.0, 1.0], [3.5, 2.5, 1.5]]
SIDE = np.linspace(-1, 1, 9)
SQUARE = SIDE[:, None] ** 2 + SIDE**2
GROUND = np.stack(np.meshgrid(SIDE, SIDE), -1)
POINTS, LABELS = np.array([[0.1, 0.2], [-0.3, 0.4]]), np.array([0, 1])
X = np.logspace(-3, 1, 30)
PLANE = np.outer(X, X)


def _curves(count: int) -> Any:
    return {f"panel {i}": dict.fromkeys(NAMES, RUNS) for i in range(count)}, "epoch", "loss (nats)"


def _lines(count: int) -> Any:
    named = {name: ([1.0, 2.0, 4.0], [[1.0, 2.0], [2.0, 3.0], [np.nan, 3.0]]) for name in NAMES}
    return {f"panel {i}": named for i in range(count)}, "lr", "loss (nats)", {"panel 0": 2.0}


BAND = plots.Band(SIDE, SIDE, np.full(9, 0.1), np.full(9, 0.2))
HILLS = figures.Hills(SIDE, SQUARE, np.zeros((4, 6, 2)), POINTS)
WAY = np.linspace(-1, 1, 10)[:, None]
DRAWN: dict[str, tuple[Callable[..., None], Any]] = {
    **{f"curves {n}": (figures.curves, _curves(n)) for n in (1, 2, 3, 4)},
    **{f"lines {n}": (figures.lines, _lines(n)) for n in (1, 2, 3)},
    "profiles": (figures.profiles, ({"a": {name: [1.0, 2.0, np.inf] for name in NAMES}},)),
    "clouds": (figures.clouds, ({t: figures.Cloud(POINTS, POINTS[0], np.eye(2), np.eye(2)) for t in "ab"},)),
    "bars": (figures.bars, ({"one": 1.0, "two": 2.0}, "time")),
    "scatter": (figures.scatter_with_curves, (X, X, {"one": (X, X), "two": (X, 2 * X)}, ("rate", "variance"))),
    "paths": (figures.paths_with_bands, (SIDE, SIDE, np.full(9, 0.1), ("step", "weight"))),
    "landscapes": (
        figures.landscapes,
        ([figures.Landscape(t, SIDE, SIDE**2, SIDE**2, (0.0, 0.3), WAY, WAY, (0.0, 1.0)) for t in "ab"],),
    ),
    "dots": (figures.dots, ({f"score {i} (nats)": dict.fromkeys(NAMES, (1.0, 0.1)) for i in range(4)},)),
    "regions": (
        figures.regions,
        (
            X,
            X,
            (PLANE > 1).astype(int),
            ("Adam", "RMSProp"),
            {f"ratio {i}": (PLANE, (0.1, 1.0, 3.0)) for i in range(3)},
            [(0.3, 0.01, 0.97), (1.0, 0.01, 0.94), (1.0, 0.1, 0.83)],
            (1e-4, 1e-2, 1e-1),
            ("size", "rate"),
        ),
    ),
    "hills": (figures.hills, (dict.fromkeys("abcd", HILLS), ("u", "v"))),
    "decisions": (plots.decisions, (dict.fromkeys("abc", SQUARE / 2), GROUND, POINTS, LABELS)),
    "uncertainty": (
        plots.decision_uncertainty,
        (dict.fromkeys("ab", SQUARE), (SQUARE > 1).astype(int), GROUND, POINTS, LABELS),
    ),
    "reliability": (plots.reliability, (dict.fromkeys("abcd", (LABELS / 2 + 0.3, LABELS, LABELS + 1)),)),
    "bands": (plots.bands, (dict.fromkeys("abcd", BAND), POINTS)),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWN)
def test_figures_are_read_at_the_width_of_a_page(name: str, saved_figures: list, tmp_path: Path) -> None:
    """Axes have labels, no text is small, panels and legends do not meet, and all of them is inside."""
    from matplotlib.text import Text

    draw, given = DRAWN[name]
    draw(tmp_path / "f.png", *given)
    (figure,) = saved_figures
    figure.draw_without_rendering()
    assert figure.get_figwidth() == plots.WIDTH
    assert figure.get_facecolor() == (1, 1, 1, 1)
    panels = [axis for axis in figure.axes if axis.axison]
    for axis in panels:
        above = axis.get_shared_x_axes().get_siblings(axis)  # the lowest has the label
        words = {max(one.get_xlabel() for one in above), axis.get_ylabel()}
        named = [text.get_text() for text in (*axis.get_xticklabels(), *axis.get_yticklabels())]
        plain = name == "dots" or any(text.isalpha() for text in named)  # names along an axis need no label
        assert "" not in words or plain or axis.get_label() == "<colorbar>", axis.get_title()
    shown = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert min(text.get_fontsize() for text in shown) >= plots.SMALL
    legends = [*figure.legends, *(axis.get_legend() for axis in figure.axes if axis.get_legend())]
    boxes = [one.get_window_extent() for one in legends]
    boxes += [axis.get_tightbbox() for axis in panels]
    for one, other in combinations(boxes, 2):
        assert not one.padded(-2).overlaps(other), (one, other)
    for box in boxes:
        assert figure.bbox.padded(1).fully_containsx(box.x0), box
        assert figure.bbox.padded(1).fully_containsx(box.x1), box
        assert figure.bbox.padded(1).fully_containsy(box.y0), box
        assert figure.bbox.padded(1).fully_containsy(box.y1), box


def test_lines_of_ten_names_differ_without_colours(saved_figures: list, tmp_path: Path) -> None:
    figures.curves(tmp_path / "c.png", *_curves(1))
    (axis,) = saved_figures[0].axes
    marks = [line.get_marker() for line in axis.get_lines()]
    assert len(set(marks)) == len(marks) == 10
    assert len({(line.get_color(), line.get_linestyle()) for line in axis.get_lines()}) == 10


def test_values_that_are_not_finite_are_shown_as_diverged(saved_figures: list, tmp_path: Path) -> None:
    """A name of which no value is finite would otherwise be in the legend alone."""
    named = {"lr 0.2": ([1.0, 2.0], [[np.nan], [np.inf]]), "lr 0.1": ([1.0, 2.0], [[0.3], [0.2]])}
    figures.lines(tmp_path / "l.png", {"a": named}, "temperature", "loss (nats)")
    (axis,) = saved_figures[0].axes
    (cross,) = (line for line in axis.get_lines() if line.get_marker() == "x")
    assert list(cross.get_xdata()) == [1, 2]
    (legend,) = saved_figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["lr 0.2", "lr 0.1", "diverged"]
    assert cross.get_color() == axis.get_lines()[0].get_color()


def test_a_name_has_one_colour_in_all_panels_and_is_in_the_legend(saved_figures: list, tmp_path: Path) -> None:
    """A panel may lack a name that another has: one that diverged, say."""
    runs = [[3.0, 2.0], [3.5, 2.5]]
    panels = {"a": {"second": runs}, "b": {"first": runs, "second": runs}}
    figures.curves(tmp_path / "c.png", panels, "epoch", "loss (nats)")
    left, right = saved_figures[0].axes
    (second,), (first, again) = left.get_lines(), right.get_lines()
    assert second.get_color() == again.get_color() != first.get_color()
    (legend,) = saved_figures[0].legends
    shown = {text.get_text(): line.get_color() for text, line in zip(legend.get_texts(), legend.get_lines())}
    assert shown == {"second": second.get_color(), "first": first.get_color()}


def test_ticks_are_whole_epochs_and_plain_numbers(saved_figures: list, tmp_path: Path) -> None:
    figures.curves(tmp_path / "c.png", {"a": {"some": [[30.0, 2.0]]}}, "epoch", "loss (nats)")
    (axis,) = saved_figures[0].axes
    low, high = axis.get_xlim()
    assert [x for x in axis.get_xticks() if low <= x <= high] == [1, 2]
    low, high = axis.get_ylim()
    labels = [text.get_text() for y, text in zip(axis.get_yticks(), axis.get_yticklabels()) if low <= y <= high]
    assert labels == ["2", "5", "10", "20"]
    assert not len(axis.get_yticks(minor=True))


def test_ticks_of_dots_do_not_overlap(saved_figures: list, tmp_path: Path) -> None:
    titles = ("power", "wine", "yacht")
    figures.dots(tmp_path / "d.png", {title: {"MAP": (-2.8332, 0.0084), "IVON": (-2.839, 0.0083)} for title in titles})
    for axis in saved_figures[0].axes:
        low, high = axis.get_xlim()
        boxes = [
            text.get_window_extent() for x, text in zip(axis.get_xticks(), axis.get_xticklabels()) if low <= x <= high
        ]
        assert len(boxes) > 1
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
