"""Figures that a person would rather look at than at numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#000000", "#997700", "#ee8866")


def _figure(columns: int, width: float = 5.2, height: float = 3.8) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=(width * columns, height), squeeze=False, layout="constrained")
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure, list(axes[0])


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=130)
    plt.close(figure)


def curves(path: Path, panels: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], xlabel: str = "epoch") -> None:
    """One panel for each title, in it a line for each name: the mean over runs, and a band of one standard error.

    Args:
        panels: title -> name -> runs -> values, one for each epoch.
    """
    figure, axes = _figure(len(panels))
    for axis, (title, lines) in zip(axes, panels.items()):
        for colour, (name, runs) in zip(PALETTE * 3, lines.items()):
            values = np.array(runs, dtype=float)
            mean = values.mean(0)
            x = np.arange(1, len(mean) + 1)
            axis.plot(x, mean, color=colour, label=name, lw=1.6, marker="o" if len(mean) < 3 else None)
            if len(values) > 1:
                error = values.std(0, ddof=1) / np.sqrt(len(values))
                axis.fill_between(x, mean - error, mean + error, color=colour, alpha=0.18, lw=0)
        axis.set(title=title, xlabel=xlabel)
        flat = np.concatenate([np.ravel(runs) for runs in lines.values()])
        if len(flat) and flat.min() > 0 and flat.max() / flat.min() > 10:
            axis.set_yscale("log")
    axes[-1].legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _save(figure, path)


def lines(
    path: Path,
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[Sequence[float]]]]],
    xlabel: str,
) -> None:
    """One panel for each title, in it a line for each name: the mean over runs at each x, with its standard error.

    Args:
        panels: title -> name -> the x, on a logarithmic axis, and for each the values of its runs; those that are not
            finite are left out.
    """
    figure, axes = _figure(len(panels))
    for axis, (title, named) in zip(axes, panels.items()):
        shown = []
        for colour, (name, (x, runs)) in zip(PALETTE * 3, named.items()):
            pairs = [(a, np.array(some, dtype=float)) for a, some in zip(x, runs) if np.isfinite(some).all()]
            mean = np.array([some.mean() for _, some in pairs])
            error = [some.std(ddof=1) / np.sqrt(len(some)) if len(some) > 1 else 0.0 for _, some in pairs]
            axis.errorbar(
                [a for a, _ in pairs], mean, error, color=colour, label=name, lw=1.6, marker="o", ms=4, capsize=3
            )
            shown += mean.tolist()
        axis.set(title=title, xlabel=xlabel, xscale="log")
        if shown and min(shown) > 0 and max(shown) / min(shown) > 10:
            axis.set_yscale("log")
        axis.legend(fontsize=8, frameon=False)
    _save(figure, path)


def bars(path: Path, values: Mapping[str, float], label: str) -> None:
    """A bar for each name, with its value."""
    figure, (axis,) = _figure(1, 1.2 + 1.1 * len(values), 3.4)
    drawn = axis.bar(list(values), list(values.values()), color=PALETTE[0], width=0.6)
    axis.bar_label(drawn, fmt="%.2f", fontsize=9)
    axis.set_ylabel(label)
    axis.grid(visible=False, axis="x")
    _save(figure, path)


def scatter_with_curves(
    path: Path,
    x: np.ndarray,
    y: np.ndarray,
    lines: Mapping[str, tuple[np.ndarray, np.ndarray]],
    labels: tuple[str, str],
) -> None:
    """Points behind curves, on two logarithmic axes."""
    figure, (axis,) = _figure(1, 6.4, 4.6)
    axis.plot(x, y, ".", ms=2, alpha=0.25, color=PALETTE[6], label="weights", rasterized=True)
    for colour, (name, (a, b)) in zip(PALETTE, lines.items()):
        axis.plot(a, b, color=colour, label=name, lw=1.8)
    axis.set(xscale="log", yscale="log", xlabel=labels[0], ylabel=labels[1])
    reach = np.concatenate([a for a, _ in lines.values()])
    axis.set_xlim(reach.min() / 1.2, reach.max() * 1.2)
    axis.legend(fontsize=9, frameon=False, markerscale=5)
    _save(figure, path)


def paths_with_bands(
    path: Path, truth: np.ndarray, mean: np.ndarray, deviation: np.ndarray, labels: tuple[str, str]
) -> None:
    """A drifting quantity, its estimate, and the estimate's 95 % interval."""
    figure, (axis,) = _figure(1, 7.5, 3.6)
    t = np.arange(len(truth))
    axis.fill_between(t, mean - 1.96 * deviation, mean + 1.96 * deviation, color=PALETTE[0], alpha=0.2, lw=0)
    axis.plot(t, mean, color=PALETTE[0], lw=1.3, label="filter, with its 95 % interval")
    axis.plot(t, truth, color=PALETTE[1], lw=1.3, label="optimum of the weight")
    axis.set(xlabel=labels[0], ylabel=labels[1])
    axis.legend(fontsize=9, frameon=False)
    _save(figure, path)
