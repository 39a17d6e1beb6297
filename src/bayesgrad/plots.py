"""Figures of predictions and their uncertainty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Band", "bands", "decision_uncertainty", "decisions", "reliability"]
PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#000000", "#997700", "#ee8866")
WIDTH = 8.0  # inches; pages show about 100 pixels of each, so that 10 points of text are 14 pixels high
TITLE, TEXT, SMALL = 11, 10, 9  # points


def new_figure(panels: int, height: float = 3.2, columns: int = 2, *, share_x: bool = False) -> tuple[Any, list[Any]]:
    """A figure as wide as a page, and its panels in rows of at most `columns`.

    Args:
        height: of a row, in inches.
        share_x: panels above each other have one horizontal axis.
    """
    import matplotlib

    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    columns = min(panels, columns)
    rows = -(-panels // columns)
    sizes: Any = {"font.size": TEXT, "axes.titlesize": TITLE, "xtick.labelsize": SMALL, "ytick.labelsize": SMALL}
    shape: Any = {"figsize": (WIDTH, height * rows), "sharex": "col" if share_x else "none"}
    with plt.rc_context(sizes):
        figure, axes = plt.subplots(rows, columns, **shape, squeeze=False, layout="constrained")
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    for axis in axes.flat[panels:]:
        axis.set_axis_off()
    return figure, list(axes.flat[:panels])


def add_legend(figure: Any, axes: Sequence[Any], extra: Sequence[Any] = (), columns: int | None = None) -> None:
    """One legend of all that is labelled in these axes, each label once, where it covers nothing.

    It stands in the first cell that has no panel, else right of a single panel, else below all panels.

    Args:
        extra: what else to list, drawn or not.
        columns: of a legend below.
    """
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            found.setdefault(label, handle)
    found |= {handle.get_label(): handle for handle in extra}
    options: Any = {"fontsize": SMALL, "frameon": False}
    spare = [axis for axis in figure.axes if not axis.axison]
    if spare:
        spare[0].legend(found.values(), found, loc="center left", **options)
    elif len(axes) == 1:
        figure.legend(found.values(), found, loc="outside right upper", **options)
    else:
        across = columns or min(len(found), 2 if max(map(len, found)) > 24 else 4)
        figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(found) // across))
        figure.legend(found.values(), found, loc="outside lower center", ncols=across, **options)


def save_figure(figure: Any, path: Path) -> None:
    """On white, so that a dark page shows it as a light one does."""
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=130, facecolor="white", pil_kwargs={"optimize": True})
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
    figure, axes = new_figure(len(maps))
    drawn = None
    for axis, (name, values) in zip(axes, maps.items()):
        across, up = ground[..., 0], ground[..., 1]
        drawn = axis.pcolormesh(across, up, values, cmap="RdBu_r", vmin=0, vmax=1, shading="gouraud", rasterized=True)
        axis.contour(across, up, values, levels=[0.5], colors="black", linewidths=1)
        for label, colour in ((0, PALETTE[0]), (1, PALETTE[1])):
            some = points[labels == label]
            mark = "o" if label == 0 else "^"
            axis.plot(some[:, 0], some[:, 1], mark, ms=3.5, color=colour, mec="white", mew=0.5, label=f"class {label}")
        axis.set(title=name, xlabel="first input", ylabel="second input")
        axis.grid(visible=False)
    figure.colorbar(drawn, ax=axes, label="probability of class 1")
    add_legend(figure, axes)
    save_figure(figure, path)


def reliability(path: Path, named: Mapping[str, tuple[Any, Any, Any]]) -> None:
    """Accuracy against confidence, a panel for each name: bars on the diagonal where predictions are calibrated.

    Args:
        named: name -> confidence, accuracy and count of each bin of equal width in [0, 1], from `metrics.reliability`.
    """
    figure, axes = new_figure(len(named))
    for axis, (name, bins) in zip(axes, named.items()):
        confidence, accuracy, count = (np.asarray(part, dtype=float) for part in bins)
        edges, full = np.linspace(0, 1, len(count) + 1), count > 0
        middles, width, share = ((edges[1:] + edges[:-1]) / 2)[full], 1 / len(count), count[full] / count.sum()
        gap = np.abs(accuracy - confidence)[full]
        axis.bar(middles, accuracy[full], 0.92 * width, color=PALETTE[0], alpha=0.75, label="accuracy")
        axis.bar(middles, share, 0.3 * width, color=PALETTE[7], alpha=0.6, label="share of examples")
        axis.plot(confidence[full], accuracy[full], "o", ms=4, color=PALETTE[1], label="at mean confidence")
        axis.plot([0, 1], [0, 1], color=PALETTE[7], lw=1, ls="--")
        axis.set(title=f"{name}\nECE {100 * (share * gap).sum():.1f} %", xlim=(0, 1), ylim=(0, 1))
        axis.set(xlabel="confidence", ylabel="accuracy, or share")
    add_legend(figure, axes)
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

    The vertical axis of a panel has room for its own intervals between the first and the last input of the data.

    Args:
        points: the data, (m, 2): input and target.
        level: the probability of the intervals.
    """
    from statistics import NormalDist

    reach = NormalDist().inv_cdf((1 + level) / 2)
    figure, axes = new_figure(len(named))
    for axis, (name, band) in zip(axes, named.items()):
        for deviation, alpha, words in ((band.total, 0.15, "with noise"), (band.epistemic, 0.35, "of the mean")):
            low, high = band.mean - reach * deviation, band.mean + reach * deviation
            label = f"{100 * level:g} % {words}"
            axis.fill_between(band.x, low, high, color=PALETTE[0], alpha=alpha, lw=0, label=label)
        axis.plot(band.x, band.mean, color=PALETTE[0], lw=1.6, label="mean")
        axis.plot(points[:, 0], points[:, 1], ".", color=PALETTE[7], ms=4, alpha=0.7, label="data")
        inner = (points[:, 0].min() <= band.x) & (band.x <= points[:, 0].max())
        seen = inner if inner.any() else np.full(len(band.x), True)
        low = min(points[:, 1].min(), (band.mean - reach * band.total)[seen].min())
        high = max(points[:, 1].max(), (band.mean + reach * band.total)[seen].max())
        axis.set(title=name, xlabel="x", ylabel="y", ylim=(low - 0.2 * (high - low), high + 0.2 * (high - low)))
    add_legend(figure, axes)
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
    figure, axes = new_figure(len(maps))
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
            mark = "o^sDv"[int(label) % 5]
            axis.plot(some[:, 0], some[:, 1], mark, ms=4, color=colour, mec="white", mew=0.5, label=f"class {label}")
        axis.set(title=name, xlabel="first input", ylabel="second input")
        axis.grid(visible=False)
    figure.colorbar(drawn, ax=axes, label="nats")
    add_legend(figure, axes)
    save_figure(figure, path)
