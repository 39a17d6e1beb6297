"""Plots show the numbers they are given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bayesgrad import metrics, plots


def test_reliability(saved_figures: list, tmp_path: Path) -> None:
    p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.35, 0.65], [0.55, 0.45]])
    bins = metrics.reliability(p, torch.tensor([0, 1, 1, 1]), bins=10)
    plots.reliability(tmp_path / "r.png", {"some": bins, "same": bins})
    axes = saved_figures[0].axes
    assert [axis.get_title() for axis in axes] == ["some\nECE 42.5 %", "same\nECE 42.5 %"]  # (2 x 0.4 + 0.35 + 0.55)/4
    accuracy, share = axes[0].containers
    assert [bar.get_height() for bar in accuracy] == pytest.approx([0.0, 1.0, 0.5])
    assert [bar.get_height() for bar in share] == pytest.approx([0.25, 0.25, 0.5])
    assert [bar.get_x() + bar.get_width() / 2 for bar in accuracy] == pytest.approx([0.55, 0.65, 0.85])
    assert axes[0].lines[0].get_xdata() == pytest.approx([0.55, 0.65, 0.9])


def test_bands(saved_figures: list, tmp_path: Path) -> None:
    x = np.linspace(-1, 1, 5)
    band = plots.Band(x, x**2, np.full(5, 0.1), np.full(5, 0.2))
    points = np.array([[-0.5, 0.3], [0.5, 0.2]])
    plots.bands(tmp_path / "b.png", {"a parabola": band}, points, level=0.6827)
    (axis,) = saved_figures[0].axes
    mean, data = axis.lines
    assert mean.get_ydata() == pytest.approx(x**2)
    assert data.get_xydata() == pytest.approx(points)
    for patch, deviation in zip(axis.collections, (0.2, 0.1)):  # one deviation each way
        corners = patch.get_paths()[0].vertices
        assert corners[:, 1].max() == pytest.approx(1 + deviation, abs=1e-4)
        assert corners[:, 1].min() == pytest.approx(-deviation, abs=1e-4)


def test_decision_uncertainty(saved_figures: list, tmp_path: Path) -> None:
    across, up = np.meshgrid(np.linspace(0, 1, 8), np.linspace(0, 2, 8))
    ground, classes = np.stack([across, up], -1), (across > 0.4).astype(int) + (across > 0.8)
    points, labels = np.array([[0.1, 0.1], [0.5, 1.0], [0.9, 1.9]]), np.array([0, 1, 2])
    plots.decision_uncertainty(tmp_path / "d.png", {"all": across, "own": across / 2}, classes, ground, points, labels)
    *axes, bar = saved_figures[0].axes
    assert bar.get_ylabel() == "nats"
    for axis, values in zip(axes, (across, across / 2)):
        assert np.asarray(axis.collections[0].get_array()).ravel().tolist() == pytest.approx(values.ravel().tolist())
        assert axis.collections[0].get_clim() == (0, 1)
        assert [line.get_xydata().tolist() for line in axis.lines] == [[point] for point in points.tolist()]
        borders = [np.concatenate([path.vertices for path in c.get_paths()])[:, 0] for c in axis.collections[1:]]
        assert [b.mean() for b in borders] == pytest.approx([2.5 / 7, 5.5 / 7], abs=0.08)
