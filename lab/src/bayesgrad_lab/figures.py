"""Figures of the experiments: learning curves, sweeps, maps and paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bayesgrad.plots import PALETTE, new_figure, save_figure


def _few_decades(axis: Any) -> None:
    """Ticks of a logarithmic axis of less than two decades as plain numbers: powers of ten would be too few."""
    from matplotlib.ticker import LogLocator, NullLocator

    if np.divide(*axis.get_view_interval()) > 0.01:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(lambda x, _: f"{x:.3g}")
        axis.set_minor_locator(NullLocator())


def _fit_scale(axis: Any, values: np.ndarray) -> None:
    """A logarithmic vertical axis for positive values that differ by more than a factor of ten."""
    if len(values) and values.min() > 0 and values.max() / values.min() > 10:
        axis.set_yscale("log")
        _few_decades(axis.yaxis)


def curves(path: Path, panels: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], xlabel: str = "epoch") -> None:
    """One panel for each title, in it a line for each name: the mean over runs, and a band of one standard error.

    Args:
        panels: title -> name -> runs -> values, one for each epoch. A name has one colour in all of them.
    """
    figure, axes = new_figure(len(panels))
    colours = dict(zip(dict.fromkeys(name for lines in panels.values() for name in lines), PALETTE * 3))
    for axis, (title, lines) in zip(axes, panels.items()):
        for name, runs in lines.items():
            colour, values = colours[name], np.array(runs, dtype=float)
            mean = values.mean(0)
            x = np.arange(1, len(mean) + 1)
            axis.plot(x, mean, color=colour, label=name, lw=1.6, marker="o" if len(mean) < 3 else None)
            if len(values) > 1:
                error = values.std(0, ddof=1) / np.sqrt(len(values))
                axis.fill_between(x, mean - error, mean + error, color=colour, alpha=0.18, lw=0)
        axis.set(title=title, xlabel=xlabel)
        _fit_scale(axis, np.concatenate([np.ravel(runs) for runs in lines.values()]))
        axis.xaxis.get_major_locator().set_params(integer=True)
    handles = list({line.get_label(): line for axis in axes for line in axis.get_lines()}.values())
    axes[-1].legend(handles=handles, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save_figure(figure, path)


def lines(
    path: Path,
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[Sequence[float]]]]],
    xlabel: str,
    marks: Mapping[str, float] | None = None,
) -> None:
    """One panel for each title, in it a line for each name: the mean over runs at each x, with its standard error.

    Args:
        panels: title -> name -> the x, on a logarithmic axis, and for each the values of its runs; those that are not
            finite are left out.
        marks: title -> an x that is marked by a dotted line.
    """
    figure, axes = new_figure(len(panels))
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
        places = {tuple(x) for x, _ in named.values()}
        if len(places) == 1 and len(ticks := sorted(*places)) < 10:  # those of the axis would overlap, or be too few
            axis.set_xticks(ticks, [f"{x:.3g}" if x < 1000 else f"{x:.0f}" for x in ticks])
            axis.minorticks_off()
        else:
            _few_decades(axis.xaxis)
        _fit_scale(axis, np.array(shown))
        if marks and title in marks:
            axis.axvline(marks[title], color=PALETTE[7], lw=1, ls=":")
        axis.legend(fontsize=8, frameon=False)
    save_figure(figure, path)


def profiles(path: Path, panels: Mapping[str, Mapping[str, Sequence[float]]], reach: float = 4.0) -> None:
    """Performance profiles (Dolan and Moré, 2002): for each name, the part of its ratios that is at most x.

    Args:
        panels: title -> name -> ratios to the best, infinite ones included.
    """
    figure, axes = new_figure(len(panels))
    colours = dict(zip(dict.fromkeys(name for named in panels.values() for name in named), PALETTE * 3))
    for axis, (title, named) in zip(axes, panels.items()):
        for i, (name, ratios) in enumerate(named.items()):
            inner = sorted(ratio for ratio in ratios if ratio <= reach)
            x, y = [1.0, *inner, reach], np.array([0, *range(1, len(inner) + 1), len(inner)]) / len(ratios)
            axis.step(x, y, where="post", color=colours[name], label=name, lw=1.6, ls="-" if i < len(PALETTE) else "--")
        axis.set(title=title, xlabel="time over the shortest", xscale="log", ylim=(-0.02, 1.02))
        _few_decades(axis.xaxis)
    axes[0].set_ylabel("part of the workloads")
    axes[-1].legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save_figure(figure, path)


@dataclass(frozen=True)
class Cloud:
    """Points of the plane (n, 2), and two Gaussians: one around a given centre, and the points' own."""

    points: np.ndarray
    centre: np.ndarray
    expected: np.ndarray
    sampled: np.ndarray


def clouds(path: Path, panels: Mapping[str, Cloud]) -> None:
    """Points in red, the expected ellipse of three standard deviations in blue, the points' own in green."""
    figure, axes = new_figure(len(panels), 4.6, 4.2)
    turn = np.linspace(0, 2 * np.pi, 200)
    circle = 3 * np.stack([np.cos(turn), np.sin(turn)])
    for axis, (title, panel) in zip(axes, panels.items()):
        axis.plot(*panel.points.T, ".", ms=2, alpha=0.3, color=PALETTE[1], label="iterates", rasterized=True)
        axis.plot(*panel.centre, "o", color=PALETTE[0], ms=5)
        for centre, covariance, colour, label in (
            (panel.centre, panel.expected, PALETTE[0], "Laplace"),
            (panel.points.mean(0), panel.sampled, PALETTE[2], "of the iterates"),
        ):
            ellipse = centre[:, None] + np.linalg.cholesky(covariance) @ circle
            axis.plot(*ellipse, color=colour, lw=1.6, label=label)
        axis.set(title=title)
    axes[-1].legend(fontsize=8)
    save_figure(figure, path)


def bars(path: Path, values: Mapping[str, float], label: str) -> None:
    """A bar for each name, with its value."""
    figure, (axis,) = new_figure(1, 1.2 + 1.1 * len(values), 3.4)
    drawn = axis.bar(list(values), list(values.values()), color=PALETTE[0], width=0.6)
    axis.bar_label(drawn, fmt="%.2f", fontsize=9)
    axis.set_ylabel(label)
    axis.grid(visible=False, axis="x")
    save_figure(figure, path)


def scatter_with_curves(
    path: Path,
    x: np.ndarray,
    y: np.ndarray,
    lines: Mapping[str, tuple[np.ndarray, np.ndarray]],
    labels: tuple[str, str],
) -> None:
    """Points behind curves, on two logarithmic axes."""
    figure, (axis,) = new_figure(1, 6.4, 4.6)
    axis.plot(x, y, ".", ms=2, alpha=0.25, color=PALETTE[6], label="weights", rasterized=True)
    for colour, (name, (a, b)) in zip(PALETTE, lines.items()):
        axis.plot(a, b, color=colour, label=name, lw=1.8)
    axis.set(xscale="log", yscale="log", xlabel=labels[0], ylabel=labels[1])
    reach = np.concatenate([a for a, _ in lines.values()])
    axis.set_xlim(reach.min() / 1.2, reach.max() * 1.2)
    axis.legend(fontsize=9, frameon=False, markerscale=5)
    save_figure(figure, path)


def paths_with_bands(
    path: Path, truth: np.ndarray, mean: np.ndarray, deviation: np.ndarray, labels: tuple[str, str]
) -> None:
    """A drifting quantity, its estimate, and the estimate's 95 % interval."""
    figure, (axis,) = new_figure(1, 7.5, 3.6)
    t = np.arange(len(truth))
    axis.fill_between(t, mean - 1.96 * deviation, mean + 1.96 * deviation, color=PALETTE[0], alpha=0.2, lw=0)
    axis.plot(t, mean, color=PALETTE[0], lw=1.3, label="filter, with its 95 % interval")
    axis.plot(t, truth, color=PALETTE[1], lw=1.3, label="optimum of the weight")
    axis.set(xlabel=labels[0], ylabel=labels[1])
    axis.legend(fontsize=9, frameon=False)
    save_figure(figure, path)


@dataclass(frozen=True)
class Landscape:
    """A loss of one weight and two ways through it.

    Args:
        x, loss, smooth: the ground, the loss, and its average over a belief of fixed width around each x.
        belief: mean and deviation of the belief that is drawn.
        descent, bayes: iterates (points, starts), which begin and end at the same time.
        reach: of the vertical axis.
    """

    title: str
    x: np.ndarray
    loss: np.ndarray
    smooth: np.ndarray
    belief: tuple[float, float]
    descent: np.ndarray
    bayes: np.ndarray
    reach: tuple[float, float]


def landscapes(path: Path, panels: Sequence[Landscape]) -> None:
    """For each panel the loss and its average above, and the iterates on the same ground below."""
    figure, axes = new_figure(len(panels), 5.6, 3.2, rows=2)
    for above, below, panel in zip(axes, axes[len(panels) :], panels):
        mean, deviation = panel.belief
        density = np.exp(-0.5 * ((panel.x - mean) / deviation) ** 2)
        low, high = panel.reach
        shown = low + 0.3 * (high - low) * density
        above.fill_between(panel.x, low, shown, color=PALETTE[0], alpha=0.2, lw=0, label="best Gaussian belief")
        above.plot(panel.x, panel.loss, color=PALETTE[7], lw=1.6, label="loss")
        above.plot(panel.x, panel.smooth, color=PALETTE[0], lw=1.6, ls="--", label="its average over the belief")
        ends = np.interp(panel.descent[-1], panel.x, panel.loss)
        above.plot(panel.descent[-1], ends, "o", color=PALETTE[1], label="gradient descent ends")
        above.axvline(mean, color=PALETTE[0], lw=1, ls=":")
        above.set(title=panel.title, ylim=panel.reach)
        above.legend(fontsize=8, frameon=False)
        ways = ((panel.descent, PALETTE[1], "gradient descent"), (panel.bayes, PALETTE[0], "IVON"))
        for values, colour, name in ways:
            time = np.linspace(0, 1, len(values))
            for i, line in enumerate(values.T):
                below.plot(line, time, color=colour, lw=1, alpha=0.8, label=name if i == 0 else None)
        below.set(xlabel="weight", ylabel="fraction of the steps", xlim=(panel.x.min(), panel.x.max()))
        below.invert_yaxis()
        below.legend(fontsize=8, frameon=False)
    save_figure(figure, path)


def dots(path: Path, panels: Mapping[str, Mapping[str, tuple[float, float]]]) -> None:
    """One panel for each title, in it a dot for each name with a bar of one standard error, names on the left."""
    names = list(next(iter(panels.values())))
    figure, axes = new_figure(len(panels), 3.4, 0.9 + 0.34 * len(names))
    for axis, (title, values) in zip(axes, panels.items()):
        for i, name in enumerate(names):
            mean, error = values[name]
            error = error if np.isfinite(error) else 0.0
            axis.errorbar(mean, -i, xerr=error, fmt="o", color=PALETTE[i % len(PALETTE)], capsize=3, ms=5)
        axis.set(title=title, yticks=[-i for i in range(len(names))], yticklabels=names if axis is axes[0] else [])
        axis.xaxis.get_major_locator().set_params(nbins=4)
    save_figure(figure, path)


def regions(
    path: Path,
    x: np.ndarray,
    y: np.ndarray,
    kinds: np.ndarray,
    names: Sequence[str],
    ratios: Mapping[str, tuple[np.ndarray, Sequence[float]]],
    points: Sequence[tuple[float, float, float]],
    bar: tuple[float, float, float],
    labels: tuple[str, str],
) -> None:
    """A map of which kind lies where, on two logarithmic axes, and beside it maps of ratios with their contours.

    Args:
        kinds: (len(y), len(x)), an index into `names`.
        ratios: title -> values (len(y), len(x)) and the levels of contours.
        points: x, y and a number to be written beside each.
        bar: low, middle and high x, drawn at y = 0.1.
    """
    from matplotlib.colors import ListedColormap, LogNorm
    from matplotlib.patches import Patch

    figure, axes = new_figure(1 + len(ratios), 4.6, 4.2)
    colours = [PALETTE[i] for i in (1, 0, 6)][: len(names)]
    scale: Any = {"cmap": ListedColormap(colours), "vmin": -0.5, "vmax": len(names) - 0.5}
    axes[0].pcolormesh(x, y, kinds, **scale, alpha=0.55, rasterized=True)
    for a, b, value in points:
        axes[0].plot(a, b, "o", color="black", ms=4)
        axes[0].annotate(f"{value:.2f}", (a, b), textcoords="offset points", xytext=(4, 4), fontsize=8)
    axes[0].plot([max(bar[0], x[0]), bar[2]], [0.1, 0.1], color=PALETTE[2], lw=4, solid_capstyle="butt")
    axes[0].plot(max(bar[1], x[0]), 0.1, "|", color=PALETTE[2], ms=16, mew=2.5, clip_on=False)
    patches = [Patch(color=c, alpha=0.55, label=n) for c, n in zip(colours, names)]
    axes[0].legend(handles=patches, fontsize=8, loc="lower left")
    axes[0].set(title="what the filter is")
    for axis, (title, (values, levels)) in zip(axes[1:], ratios.items()):
        drawn = axis.pcolormesh(x, y, values, cmap="RdBu_r", norm=LogNorm(0.1, 10), rasterized=True)
        lines = axis.contour(x, y, values, levels=sorted(levels), colors="black", linewidths=0.8)
        axis.clabel(lines, fontsize=8, fmt="%g")
        axis.set(title=title)
        figure.colorbar(drawn, ax=axis)
    for axis in axes:
        axis.set(xscale="log", yscale="log", xlabel=labels[0], ylabel=labels[1])
        axis.grid(visible=False)
    save_figure(figure, path)


@dataclass(frozen=True)
class Hills:
    """A loss over a square, with paths on it.

    Args:
        side: (n,), of both axes.
        height: (n, n), rows along the second axis.
        paths: (steps, paths, 2).
        minima: (m, 2).
    """

    side: np.ndarray
    height: np.ndarray
    paths: np.ndarray
    minima: np.ndarray


def hills(path: Path, panels: Mapping[str, Hills]) -> None:
    """One panel for each loss, seen from above."""
    figure, axes = new_figure(len(panels), 5.0, 4.6)
    for axis, (title, panel) in zip(axes, panels.items()):
        axis.contourf(panel.side, panel.side, panel.height, levels=24, cmap="Greys_r", alpha=0.75)
        for k in range(panel.paths.shape[1]):
            colour, way = PALETTE[k % 6], panel.paths[:, k]
            axis.plot(way[:, 0], way[:, 1], color=colour, lw=1.4)
            axis.plot(*way[0], ".", color=colour, ms=6)
            axis.plot(*way[-1], "o", color=colour, ms=8, mfc="none", mew=1.8)
        axis.plot(panel.minima[:, 0], panel.minima[:, 1], "x", color="black", ms=7, mew=1.5)
        axis.set(title=title, xlim=(panel.side[0], panel.side[-1]), ylim=(panel.side[0], panel.side[-1]))
        axis.grid(visible=False)
    save_figure(figure, path)
