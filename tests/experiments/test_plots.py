"""Figures draw what they are given."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from bayesgrad import metrics, plots


@pytest.fixture
def drawn(monkeypatch, tmp_path: Path) -> list:
    """The figures that were saved, which were written too."""
    figures, save = [], plots._save

    def kept(figure, path: Path) -> None:
        figures.append(figure)
        save(figure, path)
        assert path.stat().st_size > 5_000

    monkeypatch.setattr(plots, "_save", kept)
    return figures


def test_reliability(drawn: list, tmp_path: Path) -> None:
    p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.35, 0.65], [0.55, 0.45]])
    bins = metrics.reliability(p, torch.tensor([0, 1, 1, 1]), bins=10)
    plots.reliability(tmp_path / "r.png", {"some": bins, "same": bins})
    axes = drawn[0].axes
    assert [axis.get_title() for axis in axes] == ["some\nECE 42.5 %", "same\nECE 42.5 %"]  # (2 x 0.4 + 0.35 + 0.55)/4
    accuracy, share = axes[0].containers
    assert [bar.get_height() for bar in accuracy] == pytest.approx([0.0, 1.0, 0.5])
    assert [bar.get_height() for bar in share] == pytest.approx([0.25, 0.25, 0.5])
    assert [bar.get_x() + bar.get_width() / 2 for bar in accuracy] == pytest.approx([0.55, 0.65, 0.85])
    assert axes[0].lines[0].get_xdata() == pytest.approx([0.55, 0.65, 0.9])


def test_bands(drawn: list, tmp_path: Path) -> None:
    x = np.linspace(-1, 1, 5)
    band = plots.Band(x, x**2, np.full(5, 0.1), np.full(5, 0.2))
    points = np.array([[-0.5, 0.3], [0.5, 0.2]])
    plots.bands(tmp_path / "b.png", {"a parabola": band}, points, level=0.6827)
    (axis,) = drawn[0].axes
    mean, data = axis.lines
    assert mean.get_ydata() == pytest.approx(x**2)
    assert data.get_xydata() == pytest.approx(points)
    for patch, deviation in zip(axis.collections, (0.2, 0.1)):  # one deviation each way
        corners = patch.get_paths()[0].vertices
        assert corners[:, 1].max() == pytest.approx(1 + deviation, abs=1e-4)
        assert corners[:, 1].min() == pytest.approx(-deviation, abs=1e-4)


def test_doubts(drawn: list, tmp_path: Path) -> None:
    across, up = np.meshgrid(np.linspace(0, 1, 8), np.linspace(0, 2, 8))
    ground, classes = np.stack([across, up], -1), (across > 0.4).astype(int) + (across > 0.8)
    points, labels = np.array([[0.1, 0.1], [0.5, 1.0], [0.9, 1.9]]), np.array([0, 1, 2])
    plots.doubts(tmp_path / "d.png", {"all": across, "own": across / 2}, classes, ground, points, labels)
    *axes, bar = drawn[0].axes
    assert bar.get_ylabel() == "nats"
    for axis, values in zip(axes, (across, across / 2)):
        assert np.asarray(axis.collections[0].get_array()).ravel().tolist() == pytest.approx(values.ravel().tolist())
        assert axis.collections[0].get_clim() == (0, 1)
        assert [line.get_xydata().tolist() for line in axis.lines] == [[point] for point in points.tolist()]
        borders = [np.concatenate([path.vertices for path in c.get_paths()])[:, 0] for c in axis.collections[1:]]
        assert [b.mean() for b in borders] == pytest.approx([2.5 / 7, 5.5 / 7], abs=0.08)


def test_a_name_has_one_colour_in_all_panels_and_is_in_the_legend(drawn: list, tmp_path: Path) -> None:
    """A panel may lack a name that another has: one that diverged, say."""
    runs = [[3.0, 2.0], [3.5, 2.5]]
    plots.curves(tmp_path / "c.png", {"a": {"second": runs}, "b": {"first": runs, "second": runs}})
    left, right = drawn[0].axes
    (second,), (first, again) = left.get_lines(), right.get_lines()
    assert second.get_color() == again.get_color() != first.get_color()
    legend = right.get_legend()
    shown = {text.get_text(): line.get_color() for text, line in zip(legend.get_texts(), legend.get_lines())}
    assert shown == {"second": second.get_color(), "first": first.get_color()}


def test_ticks_are_whole_epochs_and_plain_numbers(drawn: list, tmp_path: Path) -> None:
    plots.curves(tmp_path / "c.png", {"a": {"some": [[30.0, 2.0]]}})
    (axis,) = drawn[0].axes
    low, high = axis.get_xlim()
    assert [x for x in axis.get_xticks() if low <= x <= high] == [1, 2]
    low, high = axis.get_ylim()
    labels = [text.get_text() for y, text in zip(axis.get_yticks(), axis.get_yticklabels()) if low <= y <= high]
    assert labels == ["2", "5", "10", "20"]
    assert not len(axis.get_yticks(minor=True))


def test_ticks_of_dots_do_not_overlap(drawn: list, tmp_path: Path) -> None:
    titles = ("power", "wine", "yacht")
    plots.dots(tmp_path / "d.png", {title: {"MAP": (-2.8332, 0.0084), "IVON": (-2.839, 0.0083)} for title in titles})
    for axis in drawn[0].axes:
        low, high = axis.get_xlim()
        boxes = [
            text.get_window_extent() for x, text in zip(axis.get_xticks(), axis.get_xticklabels()) if low <= x <= high
        ]
        assert len(boxes) > 1
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
