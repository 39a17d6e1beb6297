"""Figures of predictions and their uncertainty."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Band", "bands", "decision_uncertainty", "decisions", "reliability"]
PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#000000", "#997700", "#ee8866")


def new_figure(columns: int, width: float = 5.2, height: float = 3.8, rows: int = 1) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    size = (width * columns, height * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, sharex="col", layout="constrained")
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure, list(axes.flat)


def save_figure(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=130)
    plt.close(figure)


def decisions(
    path: Path, maps: Mapping[str, np.ndarray], ground: np.ndarray, points: np.ndarray, labels: np.ndarray
) -> None:
    """The probability of the second class over the plane, a panel for each name, with the training points.

    Args:
        maps: name -> probabilities (n, n).
        ground: the points of the grid (n, n, 2).
        points, labels: (m, 2) and (m,).
    """
    figure, axes = new_figure(len(maps), 4.2, 3.6)
    drawn = None
    for axis, (name, values) in zip(axes, maps.items()):
        across, up = ground[..., 0], ground[..., 1]
        drawn = axis.pcolormesh(across, up, values, cmap="RdBu_r", vmin=0, vmax=1, shading="gouraud", rasterized=True)
        axis.contour(across, up, values, levels=[0.5], colors="black", linewidths=1)
        for label, colour in ((0, PALETTE[0]), (1, PALETTE[1])):
            some = points[labels == label]
            axis.plot(some[:, 0], some[:, 1], "o", ms=3, color=colour, mec="white", mew=0.4)
        axis.set(title=name)
        axis.grid(visible=False)
    figure.colorbar(drawn, ax=axes[-1], label="probability")
    save_figure(figure, path)


def reliability(path: Path, named: Mapping[str, tuple[Any, Any, Any]]) -> None:
    """Accuracy against confidence, a panel for each name: bars on the diagonal where predictions are calibrated.

    Args:
        named: name -> confidence, accuracy and count of each bin of equal width in [0, 1], from `metrics.reliability`.
    """
    figure, axes = new_figure(len(named), 3.8, 3.8)
    for axis, (name, bins) in zip(axes, named.items()):
        confidence, accuracy, count = (np.asarray(part, dtype=float) for part in bins)
        edges, full = np.linspace(0, 1, len(count) + 1), count > 0
        middles, width, share = ((edges[1:] + edges[:-1]) / 2)[full], 1 / len(count), count[full] / count.sum()
        gap = np.abs(accuracy - confidence)[full]
        axis.bar(middles, accuracy[full], 0.92 * width, color=PALETTE[0], alpha=0.75, label="accuracy")
        axis.bar(middles, share, 0.3 * width, color=PALETTE[7], alpha=0.6, label="share of examples")
        axis.plot(confidence[full], accuracy[full], "o", ms=4, color=PALETTE[1], label="at mean confidence")
        axis.plot([0, 1], [0, 1], color=PALETTE[7], lw=1, ls="--")
        axis.set(title=f"{name}\nECE {100 * (share * gap).sum():.1f} %", xlabel="confidence", xlim=(0, 1), ylim=(0, 1))
        axis.title.set_fontsize(10)
    axes[0].set_ylabel("accuracy")
    axes[0].legend(fontsize=8, frameon=False, loc="upper left")
    save_figure(figure, path)


@dataclass(frozen=True)
class Band:
    """A regression with one input.

    Args:
        x, mean: inputs in ascending order, and the prediction, (n,).
        epistemic, total: standard deviations, without and with the noise of the data, (n,).
    """

    x: np.ndarray
    mean: np.ndarray
    epistemic: np.ndarray
    total: np.ndarray


def bands(path: Path, named: Mapping[str, Band], points: np.ndarray, level: float = 0.95) -> None:
    """Predictions with central intervals of the mean and of the targets, a panel for each name.

    Args:
        points: the data, (m, 2): input and target.
        level: the probability of the intervals.
    """
    from statistics import NormalDist

    reach = NormalDist().inv_cdf((1 + level) / 2)
    figure, axes = new_figure(len(named), 4.6, 3.6)
    for axis, (name, band) in zip(axes, named.items()):
        for deviation, alpha, words in ((band.total, 0.15, "with noise"), (band.epistemic, 0.35, "of the mean")):
            low, high = band.mean - reach * deviation, band.mean + reach * deviation
            label = f"{100 * level:g} % {words}"
            axis.fill_between(band.x, low, high, color=PALETTE[0], alpha=alpha, lw=0, label=label)
        axis.plot(band.x, band.mean, color=PALETTE[0], lw=1.6, label="mean")
        axis.plot(points[:, 0], points[:, 1], ".", color=PALETTE[7], ms=4, alpha=0.7, label="data")
        low, high = points[:, 1].min(), points[:, 1].max()
        axis.set(title=name, xlabel="x", ylim=(low - 0.6 * (high - low), high + 0.6 * (high - low)))
    axes[0].set_ylabel("y")
    axes[-1].legend(fontsize=8)
    save_figure(figure, path)


def decision_uncertainty(
    path: Path,
    maps: Mapping[str, np.ndarray],
    classes: np.ndarray,
    ground: np.ndarray,
    points: np.ndarray,
    labels: np.ndarray,
) -> None:
    """The uncertainty of decisions over the plane, a panel for each measure, with the class boundaries.

    Args:
        maps: name -> uncertainties (n, n), from 0; one colour scale for all.
        classes: the most probable class at each grid point (n, n).
        ground: the points of the grid (n, n, 2).
        points, labels: the training data, (m, 2) and (m,).
    """
    figure, axes = new_figure(len(maps), 4.2, 3.6)
    across, up = ground[..., 0], ground[..., 1]
    most = max(float(np.max(values)) for values in maps.values())
    drawn = None
    for axis, (name, values) in zip(axes, maps.items()):
        scale: Any = {"cmap": "Purples", "vmin": 0, "vmax": most}
        drawn = axis.pcolormesh(across, up, values, **scale, shading="gouraud", rasterized=True)
        for border in range(int(classes.max())):
            axis.contour(across, up, classes, levels=[border + 0.5], colors=PALETTE[2], linewidths=1)
        for label in np.unique(labels):
            some = points[labels == label]
            colour = PALETTE[int(label) % len(PALETTE)]
            axis.plot(some[:, 0], some[:, 1], "o", ms=3.5, color=colour, mec="white", mew=0.5)
        axis.set(title=name)
        axis.grid(visible=False)
    figure.colorbar(drawn, ax=axes[-1], label="nats")
    save_figure(figure, path)
