"""Figures that a person would rather look at than at numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#000000", "#997700", "#ee8866")


def _figure(columns: int, width: float = 5.2, height: float = 3.8, rows: int = 1) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    size = (width * columns, height * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, sharex="col", layout="constrained")
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure, list(axes.flat)


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=130)
    plt.close(figure)


def _few_decades(axis: Any) -> None:
    """Ticks of a logarithmic axis of less than two decades as plain numbers: powers of ten would be too few."""
    from matplotlib.ticker import LogLocator, NullLocator

    if np.divide(*axis.get_view_interval()) > 0.01:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(lambda x, _: f"{x:.3g}")
        axis.set_minor_locator(NullLocator())


def curves(path: Path, panels: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], xlabel: str = "epoch") -> None:
    """One panel for each title, in it a line for each name: the mean over runs, and a band of one standard error.

    Args:
        panels: title -> name -> runs -> values, one for each epoch. A name has one colour in all of them.
    """
    figure, axes = _figure(len(panels))
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
        flat = np.concatenate([np.ravel(runs) for runs in lines.values()])
        if len(flat) and flat.min() > 0 and flat.max() / flat.min() > 10:
            axis.set_yscale("log")
            _few_decades(axis.yaxis)
        axis.xaxis.get_major_locator().set_params(integer=True)
    handles = list({line.get_label(): line for axis in axes for line in axis.get_lines()}.values())
    axes[-1].legend(handles=handles, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _save(figure, path)


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
        places = {tuple(x) for x, _ in named.values()}
        if len(places) == 1 and len(ticks := sorted(*places)) < 10:  # those of the axis would overlap, or be too few
            axis.set_xticks(ticks, [f"{x:.3g}" if x < 1000 else f"{x:.0f}" for x in ticks])
            axis.minorticks_off()
        else:
            _few_decades(axis.xaxis)
        if shown and min(shown) > 0 and max(shown) / min(shown) > 10:
            axis.set_yscale("log")
            _few_decades(axis.yaxis)
        if marks and title in marks:
            axis.axvline(marks[title], color=PALETTE[7], lw=1, ls=":")
        axis.legend(fontsize=8, frameon=False)
    _save(figure, path)


@dataclass(frozen=True)
class Cloud:
    """Points of the plane (n, 2), and two Gaussians: one around a given centre, and the points' own."""

    points: np.ndarray
    centre: np.ndarray
    expected: np.ndarray
    sampled: np.ndarray


def clouds(path: Path, panels: Mapping[str, Cloud]) -> None:
    """Points in red, the expected ellipse of three standard deviations in blue, the points' own in green."""
    figure, axes = _figure(len(panels), 4.6, 4.2)
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
    figure, axes = _figure(len(panels), 5.6, 3.2, rows=2)
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
    _save(figure, path)


def dots(path: Path, panels: Mapping[str, Mapping[str, tuple[float, float]]]) -> None:
    """One panel for each title, in it a dot for each name with a bar of one standard error, names on the left."""
    names = list(next(iter(panels.values())))
    figure, axes = _figure(len(panels), 3.4, 0.9 + 0.34 * len(names))
    for axis, (title, values) in zip(axes, panels.items()):
        for i, name in enumerate(names):
            mean, error = values[name]
            error = error if np.isfinite(error) else 0.0
            axis.errorbar(mean, -i, xerr=error, fmt="o", color=PALETTE[i % len(PALETTE)], capsize=3, ms=5)
        axis.set(title=title, yticks=[-i for i in range(len(names))], yticklabels=names if axis is axes[0] else [])
        axis.xaxis.get_major_locator().set_params(nbins=4)
    _save(figure, path)


def decisions(
    path: Path, maps: Mapping[str, np.ndarray], ground: np.ndarray, points: np.ndarray, labels: np.ndarray
) -> None:
    """The probability of the second class over the plane, a panel for each name, with the points it was learnt from.

    Args:
        maps: name -> probabilities (n, n).
        ground: the places they belong to (n, n, 2).
        points, labels: (m, 2) and (m,).
    """
    figure, axes = _figure(len(maps), 4.2, 3.6)
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
    _save(figure, path)


def reliability(path: Path, named: Mapping[str, tuple[Any, Any, Any]]) -> None:
    """Accuracy against confidence, a panel for each name: bars on the diagonal where predictions are calibrated.

    Args:
        named: name -> confidence, accuracy and count of each bin of equal width in [0, 1], as of `metrics.reliability`.
    """
    figure, axes = _figure(len(named), 3.8, 3.8)
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
    _save(figure, path)


@dataclass(frozen=True)
class Band:
    """A regression of one input.

    Args:
        x, mean: the ground, in order, and the prediction, (n,).
        epistemic, total: deviations: what weights leave open, and that with the noise of the data, (n,).
    """

    x: np.ndarray
    mean: np.ndarray
    epistemic: np.ndarray
    total: np.ndarray


def bands(path: Path, named: Mapping[str, Band], points: np.ndarray, level: float = 0.95) -> None:
    """A prediction with its two central intervals over the data, a panel for each name.

    Args:
        points: the data, (m, 2): input and target.
        level: what share the intervals should hold.
    """
    from statistics import NormalDist

    reach = NormalDist().inv_cdf((1 + level) / 2)
    figure, axes = _figure(len(named), 4.6, 3.6)
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
    _save(figure, path)


def doubts(
    path: Path,
    maps: Mapping[str, np.ndarray],
    classes: np.ndarray,
    ground: np.ndarray,
    points: np.ndarray,
    labels: np.ndarray,
) -> None:
    """How uncertain decisions are over the plane, a panel for each measure, with the borders between classes.

    Args:
        maps: name -> uncertainties (n, n), from 0; one colour scale for all.
        classes: the most probable class of each place (n, n).
        ground: the places (n, n, 2).
        points, labels: what it was learnt from, (m, 2) and (m,).
    """
    figure, axes = _figure(len(maps), 4.2, 3.6)
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
    _save(figure, path)


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

    figure, axes = _figure(1 + len(ratios), 4.6, 4.2)
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
    _save(figure, path)


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
    figure, axes = _figure(len(panels), 5.0, 4.6)
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
    _save(figure, path)
