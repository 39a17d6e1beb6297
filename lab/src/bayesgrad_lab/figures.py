"""Figures of the experiments: learning curves, sweeps, maps and paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bayesgrad.plots import PALETTE, SMALL, add_legend, new_figure, save_figure

HUES = [PALETTE[i] for i in (0, 1, 2, 3, 4, 5, 7)]  # without light grey, and what is too near to another
MARKS = "os^DvPX<>*"


def _styles(panels: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """How the line of each name is drawn, in all panels: names differ in their marks too, not in colours alone."""
    names = dict.fromkeys(name for named in panels.values() for name in named)
    return {
        name: {
            "color": HUES[i % len(HUES)],
            "ls": ("-", "--", ":")[i // len(HUES) % 3],
            "marker": MARKS[i % len(MARKS)],
            "ms": 4.5,
            "mec": "white",
            "mew": 0.5,
            "lw": 1.6,
            "label": name,
        }
        for i, name in enumerate(names)
    }


def _each(labels: str | Sequence[str], count: int) -> Sequence[str]:
    """A label for each panel, where one may be for all."""
    return [labels] * count if isinstance(labels, str) else labels


def _dot(label: str, colour: str) -> Any:
    """What a legend shows for many faint points."""
    from matplotlib.lines import Line2D

    return Line2D([], [], ls="none", marker=".", color=colour, label=label)


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


def curves(
    path: Path,
    panels: Mapping[str, Mapping[str, Sequence[Sequence[float]]]],
    xlabel: str,
    ylabel: str | Sequence[str],
) -> None:
    """One panel for each title, in it a line for each name: the mean over runs, and a band of one standard error.

    Args:
        panels: title -> name -> runs -> values, one for each epoch. A name has one colour in all of them.
        ylabel: with its unit; of all panels, or of each.
    """
    figure, axes = new_figure(len(panels))
    styles = _styles(panels)
    for axis, (title, lines), label in zip(axes, panels.items(), _each(ylabel, len(panels))):
        for name, runs in lines.items():
            values = np.array(runs, dtype=float)
            mean = values.mean(0)
            x = np.arange(1, len(mean) + 1)
            axis.plot(x, mean, **styles[name], markevery=max(1, len(mean) // 10))
            if len(values) > 1:
                error = values.std(0, ddof=1) / np.sqrt(len(values))
                axis.fill_between(x, mean - error, mean + error, color=styles[name]["color"], alpha=0.15, lw=0)
        axis.set(title=title, xlabel=xlabel, ylabel=label)
        _fit_scale(axis, np.concatenate([np.ravel(runs) for runs in lines.values()]))
        axis.xaxis.get_major_locator().set_params(integer=True)
    add_legend(figure, axes)
    save_figure(figure, path)


def lines(
    path: Path,
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[Sequence[float]]]]],
    xlabel: str,
    ylabel: str | Sequence[str],
    marks: Mapping[str, float] | None = None,
) -> None:
    """One panel for each title, in it a line for each name: the mean over runs at each x, with its standard error.

    Args:
        panels: title -> name -> the x, on a logarithmic axis, and for each the values of its runs. Where one of them
            is not finite, a cross stands above the axes.
        ylabel: with its unit; of all panels, or of each.
        marks: title -> an x that is marked by a dotted line.
    """
    from matplotlib.lines import Line2D
    from matplotlib.transforms import ScaledTranslation

    figure, axes = new_figure(len(panels))
    cross: Any = {"ms": 6, "mew": 1.8}
    styles, any_lost = _styles(panels), False
    for axis, (title, named), label in zip(axes, panels.items(), _each(ylabel, len(panels))):
        shown, lost, apart = [], 0, min(9, 45 / len(named))  # points between the crosses of two names
        for name, (x, runs) in named.items():
            pairs = [(a, np.array(some, dtype=float)) for a, some in zip(x, runs) if np.isfinite(some).all()]
            mean = np.array([some.mean() for _, some in pairs])
            error = [some.std(ddof=1) / np.sqrt(len(some)) if len(some) > 1 else np.nan for _, some in pairs]
            axis.errorbar([a for a, _ in pairs], mean, error, **styles[name], capsize=3, elinewidth=1.2)
            shown += mean.tolist()
            if gone := [a for a, some in zip(x, runs) if not np.isfinite(some).all()]:
                above = ScaledTranslation(0, (5 + apart * lost) / 72, figure.dpi_scale_trans)
                top: Any = {"transform": axis.get_xaxis_transform() + above, "clip_on": False}
                axis.plot(gone, [1.0] * len(gone), "x", color=styles[name]["color"], **cross, **top)
                lost += 1
        any_lost = any_lost or bool(lost)
        axis.set_title(title, pad=6 + apart * lost)
        axis.set(xlabel=xlabel, ylabel=label, xscale="log")
        places = {tuple(x) for x, _ in named.values()}
        if len(places) == 1 and len(ticks := sorted(*places)) < 10:  # those of the axis would overlap, or be too few
            axis.set_xticks(ticks, [f"{x:.3g}" if x < 1000 else f"{x:.0f}" for x in ticks])
            axis.minorticks_off()
        else:
            _few_decades(axis.xaxis)
        _fit_scale(axis, np.array(shown))
        if marks and title in marks:
            axis.axvline(marks[title], color=PALETTE[7], lw=1, ls=":")
    extra = Line2D([], [], ls="none", marker="x", color=PALETTE[7], label="diverged", **cross)
    add_legend(figure, axes, [extra] if any_lost else [])
    save_figure(figure, path)


def profiles(path: Path, panels: Mapping[str, Mapping[str, Sequence[float]]], reach: float = 4.0) -> None:
    """Performance profiles (Dolan and Moré, 2002): for each name, the part of its ratios that is at most x.

    Args:
        panels: title -> name -> ratios to the best, infinite ones included.
    """
    figure, axes = new_figure(len(panels))
    styles = _styles(panels)
    for axis, (title, named) in zip(axes, panels.items()):
        for name, ratios in named.items():
            inner = sorted(ratio for ratio in ratios if ratio <= reach)
            x, y = [1.0, *inner, reach], np.array([0, *range(1, len(inner) + 1), len(inner)]) / len(ratios)
            axis.step(x, y, where="post", **styles[name])
        axis.set(title=title, xlabel="time over the shortest", ylabel="part of the workloads")
        axis.set(xscale="log", ylim=(-0.02, 1.02))
        _few_decades(axis.xaxis)
    add_legend(figure, axes)
    save_figure(figure, path)


@dataclass(frozen=True)
class Cloud:
    """Points of the plane (n, 2), and two Gaussians: one around a given centre, and the points' own."""

    points: np.ndarray
    centre: np.ndarray
    expected: np.ndarray
    sampled: np.ndarray


def clouds(path: Path, panels: Mapping[str, Cloud]) -> None:
    """Points in red, the expected ellipse of three standard deviations in blue, the points' own dashed in green."""
    figure, axes = new_figure(len(panels), 3.6)
    turn = np.linspace(0, 2 * np.pi, 200)
    circle = 3 * np.stack([np.cos(turn), np.sin(turn)])
    for axis, (title, panel) in zip(axes, panels.items()):
        axis.plot(*panel.points.T, ".", ms=2, alpha=0.3, color=PALETTE[1], rasterized=True)
        axis.plot(*panel.centre, "o", color=PALETTE[0], ms=5)
        for centre, covariance, colour, dashes, label in (
            (panel.centre, panel.expected, PALETTE[0], "-", "Laplace, three deviations"),
            (panel.points.mean(0), panel.sampled, PALETTE[2], "--", "iterates, three deviations"),
        ):
            ellipse = centre[:, None] + np.linalg.cholesky(covariance) @ circle
            axis.plot(*ellipse, color=colour, lw=1.6, ls=dashes, label=label)
        axis.set(title=title, xlabel="first weight", ylabel="second weight")
    add_legend(figure, axes, [_dot("iterates", PALETTE[1])], columns=3)
    save_figure(figure, path)


def bars(path: Path, values: Mapping[str, float], label: str) -> None:
    """A bar for each name, with its value."""
    figure, (axis,) = new_figure(1)
    drawn = axis.bar(list(values), list(values.values()), color=PALETTE[0], width=0.6)
    axis.bar_label(drawn, fmt="%.2f", fontsize=SMALL)
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
    figure, (axis,) = new_figure(1, 4.0)
    axis.plot(x, y, ".", ms=2, alpha=0.25, color=PALETTE[6], rasterized=True)
    for colour, dashes, (name, (a, b)) in zip(HUES, ("-", "--", "-.", ":"), lines.items()):
        axis.plot(a, b, color=colour, ls=dashes, label=name, lw=1.8)
    axis.set(xscale="log", yscale="log", xlabel=labels[0], ylabel=labels[1])
    reach = np.concatenate([a for a, _ in lines.values()])
    axis.set_xlim(reach.min() / 1.2, reach.max() * 1.2)
    add_legend(figure, [axis], [_dot("weights", PALETTE[6])])
    save_figure(figure, path)


def paths_with_bands(
    path: Path, truth: np.ndarray, mean: np.ndarray, deviation: np.ndarray, labels: tuple[str, str]
) -> None:
    """A drifting quantity, its estimate, and the estimate's 95 % interval."""
    figure, (axis,) = new_figure(1)
    t = np.arange(len(truth))
    axis.fill_between(t, mean - 1.96 * deviation, mean + 1.96 * deviation, color=PALETTE[0], alpha=0.2, lw=0)
    axis.plot(t, mean, color=PALETTE[0], lw=1.3, label="filter, with\nits 95 % interval")
    axis.plot(t, truth, color=PALETTE[1], lw=1.3, label="optimum of\nthe weight")
    axis.set(xlabel=labels[0], ylabel=labels[1])
    add_legend(figure, [axis])
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
    figure, axes = new_figure(2 * len(panels), columns=len(panels), share_x=True)
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
        above.set(title=panel.title, ylabel="loss", ylim=panel.reach)
        ways = ((panel.descent, PALETTE[1], "path of gradient descent"), (panel.bayes, PALETTE[0], "path of IVON"))
        for values, colour, name in ways:
            time = np.linspace(0, 1, len(values))
            for i, line in enumerate(values.T):
                below.plot(line, time, color=colour, lw=1, alpha=0.8, label=name if i == 0 else None)
        below.set(xlabel="weight", ylabel="fraction of the steps", xlim=(panel.x.min(), panel.x.max()))
        below.invert_yaxis()
    add_legend(figure, axes, columns=3)
    save_figure(figure, path)


def dots(path: Path, panels: Mapping[str, Mapping[str, tuple[float, float]]]) -> None:
    """A dot for each name with a bar of one standard error, names on the left.

    Args:
        panels: the label of a panel's horizontal axis, with its unit -> name -> mean and error.
    """
    names = list(next(iter(panels.values())))
    columns = 2 if len(panels) % 3 else 3
    figure, axes = new_figure(len(panels), 0.8 + 0.24 * len(names), columns)
    for i, (axis, (label, values)) in enumerate(zip(axes, panels.items())):
        for place, name in enumerate(names):
            mean, error = values[name]
            error = error if np.isfinite(error) else 0.0
            axis.errorbar(mean, -place, xerr=error, fmt="o", color=PALETTE[0], capsize=3, ms=5)
        axis.set(xlabel=label, yticks=[-place for place in range(len(names))])
        axis.set_yticklabels(names if i % columns == 0 else [])
        axis.xaxis.get_major_locator().set_params(nbins=4)
    save_figure(figure, path)


def _label_places(axis: Any, lines: Any) -> list[tuple[float, float]]:
    """Of each contour the point nearest to the middle of its panel, a little higher or lower in turns."""
    places, turn = [], axis.transAxes.inverted()
    for i, way in enumerate(lines.get_paths()):
        seen = turn.transform(axis.transData.transform(way.vertices)) if len(way.vertices) else way.vertices
        inner = np.flatnonzero(np.all((seen > 0.1) & (seen < 0.9), axis=1))
        if len(inner):
            far = np.linalg.norm(seen[inner] - (0.5, 0.4 + 0.2 * (i % 2)), axis=1)
            places.append(tuple(way.vertices[inner[far.argmin()]]))
    return places


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
    from matplotlib.patheffects import withStroke

    figure, axes = new_figure(1 + len(ratios), 3.5)
    drawn: Any = None
    for axis in axes:  # before contours are labelled, which is done along their lines as they are seen
        axis.set(xscale="log", yscale="log", xlabel=labels[0], ylabel=labels[1])
        axis.grid(visible=False)
    colours = [PALETTE[i] for i in (1, 0, 6)][: len(names)]
    scale: Any = {"cmap": ListedColormap(colours), "vmin": -0.5, "vmax": len(names) - 0.5}
    axes[0].pcolormesh(x, y, kinds, **scale, alpha=0.55, rasterized=True)
    for i, (a, b, value) in enumerate(points):
        near = any(c < a < 5 * c and b == d for c, d, _ in points)  # its number would meet that of the other point
        axes[0].plot(a, b, "o", color="black", ms=4, label="step that was measured" if i == 0 else None)
        place: Any = {"xytext": (0, -12 if near else 5), "textcoords": "offset points", "ha": "center"}
        axes[0].annotate(f"{value:.2f}", (a, b), **place, fontsize=SMALL)
    low, middle, high = (max(place, x[0]) for place in bar)
    axes[0].plot([low, high], [0.1, 0.1], color=PALETTE[2], lw=4, solid_capstyle="butt", label="weights of a network")
    axes[0].plot(middle, 0.1, "|", color=PALETTE[2], ms=16, mew=2.5, clip_on=False)
    axes[0].set(title="what the filter is")
    halo = [withStroke(linewidth=2.5, foreground="white")]
    for axis, (title, (values, levels)) in zip(axes[1:], ratios.items()):
        drawn = axis.pcolormesh(x, y, values, cmap="RdBu_r", norm=LogNorm(0.1, 10), rasterized=True)
        lines = axis.contour(x, y, values, levels=sorted(levels), colors="black", linewidths=0.8)
        places = _label_places(axis, lines)
        for text in axis.clabel(lines, fontsize=SMALL, fmt="%g", inline_spacing=2, manual=places):
            text.set_path_effects(halo)
        axis.set(title=title)
    side = figure.colorbar(drawn, ax=axes, extend="both", label="ratio", shrink=0.6, aspect=30)
    side.ax.set_yticks(ticks := (0.1, 0.2, 0.5, 1, 2, 5, 10), [f"{tick:g}" for tick in ticks])
    side.ax.minorticks_off()
    add_legend(figure, axes, [Patch(color=c, alpha=0.55, label=n) for c, n in zip(colours, names)], columns=5)
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


def hills(path: Path, panels: Mapping[str, Hills], labels: tuple[str, str]) -> None:
    """One panel for each loss, seen from above."""
    from matplotlib.lines import Line2D

    figure, axes = new_figure(len(panels), 3.6)
    for axis, (title, panel) in zip(axes, panels.items()):
        axis.contourf(panel.side, panel.side, panel.height, levels=24, cmap="Greys_r", alpha=0.75)
        for k in range(panel.paths.shape[1]):
            colour, way = HUES[k % 6], panel.paths[:, k]
            axis.plot(way[:, 0], way[:, 1], color=colour, lw=1.6)
            axis.plot(*way[0], ".", color=colour, ms=6)
            axis.plot(*way[-1], "o", color=colour, ms=8, mfc="none", mew=1.8)
        axis.plot(panel.minima[:, 0], panel.minima[:, 1], "x", color="black", ms=7, mew=1.5, label="minimum")
        axis.set(title=title, xlim=(panel.side[0], panel.side[-1]), ylim=(panel.side[0], panel.side[-1]))
        axis.set(xlabel=labels[0], ylabel=labels[1])
        axis.grid(visible=False)
    end = Line2D([], [], ls="none", marker="o", mfc="none", color=PALETTE[7], label="end")
    add_legend(figure, axes, [_dot("start", PALETTE[7]), end])
    save_figure(figure, path)
