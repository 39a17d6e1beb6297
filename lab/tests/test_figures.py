"""Figures show the numbers they are given."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from bayesgrad_lab import figures


def test_a_name_has_one_colour_in_all_panels_and_is_in_the_legend(saved_figures: list, tmp_path: Path) -> None:
    """A panel may lack a name that another has: one that diverged, say."""
    runs = [[3.0, 2.0], [3.5, 2.5]]
    figures.curves(tmp_path / "c.png", {"a": {"second": runs}, "b": {"first": runs, "second": runs}})
    left, right = saved_figures[0].axes
    (second,), (first, again) = left.get_lines(), right.get_lines()
    assert second.get_color() == again.get_color() != first.get_color()
    legend = right.get_legend()
    shown = {text.get_text(): line.get_color() for text, line in zip(legend.get_texts(), legend.get_lines())}
    assert shown == {"second": second.get_color(), "first": first.get_color()}


def test_ticks_are_whole_epochs_and_plain_numbers(saved_figures: list, tmp_path: Path) -> None:
    figures.curves(tmp_path / "c.png", {"a": {"some": [[30.0, 2.0]]}})
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
