"""Aitchison 2018, section 2.2.3: Reddi et al.'s counter-examples, on which Adam goes to the wrong end."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bayesgrad import optim
from bayesgrad_lab import figures
from bayesgrad_lab.context import Context
from bayesgrad_lab.report import Report
from bayesgrad_lab.results import mean_and_error, outcome

STILL = 1e-12  # eta = 0, for optimizers in which a learning rate of zero stops everything
RATES = (1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
FIRST = 0.1  # where rates that fall begin


@dataclass(frozen=True)
class Problem:
    """Losses g_t x on [-1, 1], whose sum is least at -1: `large` now and then, else -1.

    Args:
        period: every so many steps exactly; None for a probability such that the mean gradient is `mean`.
    """

    title: str
    large: float
    period: int | None
    mean: float

    @property
    def rms(self) -> float:
        chance = (1 + self.mean) / (1 + self.large)
        return math.sqrt(chance * self.large**2 + 1 - chance)

    def gradients(self, steps: int, chains: int, seed: int) -> Tensor:
        """(steps, chains)."""
        if self.period:
            one = torch.where(torch.arange(steps) % self.period == 0, self.large, -1.0)
            return one[:, None].expand(steps, chains).double()
        chance = (1 + self.mean) / (1 + self.large)
        drawn = torch.rand(steps, chains, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return torch.where(drawn < chance, self.large, -1.0).double()


PROBLEMS = (
    Problem("periodic, C = 3", 3.0, 3, 1 / 3),
    Problem("stochastic, C = 10", 10.0, None, 0.2),
)


@dataclass(frozen=True)
class Way:
    """An optimizer of one weight, and how its lr falls: as t^-decay."""

    kind: str
    title: str
    build: Callable[[nn.Parameter, float], torch.optim.Optimizer]
    decay: float = 0.0


def _adam(beta2: float, **fixed: Any):
    return lambda w, lr: torch.optim.Adam([w], lr=lr, betas=(0.0, beta2), eps=1e-12, foreach=False, **fixed)


def _filter(w: nn.Parameter, lr: float) -> torch.optim.Optimizer:
    return optim.AdaBayes(
        [w], lr=lr, batch_size=1, sgd_lr=math.inf, momentum=0.0, follow_lr=False, fused=False
    )  # the paper's filter: its variance does not follow lr


def _momentum(w: nn.Parameter, lr: float) -> torch.optim.Optimizer:
    return optim.KalmanMomentum([w], lr=lr, batch_size=1, momentum_decay=0.1, fused=False)


WAYS = (
    Way("adam1", "Adam, β₂ 0.1", _adam(0.1)),
    Way("adam9", "Adam, β₂ 0.9", _adam(0.9)),
    Way("adam999", "Adam, β₂ 0.999", _adam(0.999)),
    Way("amsgrad", "AMSGrad, β₂ 0.1", _adam(0.1, amsgrad=True)),
    Way("filter", "filter", _filter),
    Way("kalman", "filter with momentum", _momentum),
)
FALLING = (
    Way("adam1-falling", "Adam, β₂ 0.1, lr/√t", _adam(0.1), 0.5),
    Way("amsgrad-falling", "AMSGrad, β₂ 0.1, lr/√t", _adam(0.1, amsgrad=True), 0.5),
    Way("filter-falling", "filter, η/√t", _filter, 0.5),
    Way("filter-faster", "filter, η/t", _filter, 1.0),
    Way("kalman-falling", "filter with momentum, η/√t", _momentum, 0.5),
)
STANDING = (
    Way("filter-still", "filter, η = 0", _filter),
    Way("kalman-still", "filter with momentum, η = 0", _momentum),
)


def follow(problem: Problem, way: Way, lr: float, steps: int, chains: int, seeds: int) -> dict[str, Tensor]:
    """From 0, projected to [-1, 1] after each step.

    Returns:
        path: (200, seeds), the mean of x over chains; end: (seeds, chains), the mean over the last tenth of the steps.
    """
    weight = nn.Parameter(torch.zeros(seeds * chains, dtype=torch.float64))
    optimizer = way.build(weight, lr)
    gradients, every = problem.gradients(steps, seeds * chains, 0), max(1, steps // 200)
    path, last, count = [], torch.zeros_like(weight.detach()), 0
    for step, gradient in enumerate(gradients):
        if way.decay:
            for group in optimizer.param_groups:
                group["lr"] = lr * (step + 1) ** -way.decay
        weight.grad = gradient
        optimizer.step()
        with torch.no_grad():
            weight.clamp_(-1.0, 1.0)
            if step % every == 0:
                path.append(weight.detach().view(seeds, chains).mean(1))
            if step >= 0.9 * steps:
                last += weight
                count += 1
    return {"path": torch.stack(path), "end": (last / count).view(seeds, chains)}


def convergence(context: Context) -> Report:
    """Adam, AMSGrad and the filters on two counter-examples, over learning rates and as they go to zero."""
    steps, longer, chains, rates = {
        "smoke": (60, 60, 3, (0.1, 1.0)),
        "laptop": (12_000, 40_000, 20, RATES),
        "paper": (200_000, 1_000_000, 200, RATES),
    }[context.scale]
    report = Report.of("aitchison2018-convergence")

    def found(problem: Problem, way: Way, lr: float, steps: int) -> dict[str, Tensor]:
        key = f"{problem.large:g}-{way.kind}-lr{lr:g}"
        return context.once(key, partial(follow, problem, way, lr, steps, chains, context.seeds))

    words, panels, paths, held = [], {}, {}, []
    for problem in PROBLEMS:
        panel = {w.title: [found(problem, w, lr, steps)["end"].mean(1).tolist() for lr in rates] for w in WAYS}
        report.add_table(
            f"{problem.title}: where x ends after {steps:,} steps, by lr or eta (the optimum is -1)",
            ["", *(f"{rate:g}" for rate in rates)],
            [[title, *map(_cell, ends)] for title, ends in panel.items()],
        )
        panels[problem.title] = {title: (list(rates), ends) for title, ends in panel.items()}
        falling = {w.kind: found(problem, w, FIRST, longer) for w in FALLING}
        falling |= {w.kind: found(problem, w, STILL, longer) for w in STANDING}
        titles = {w.kind: w.title for w in (*FALLING, *STANDING)}
        rows = []
        for kind, run in falling.items():
            early = {part: run["path"][int(part * (len(run["path"]) - 1))].tolist() for part in (0.01, 0.1)}
            rows.append(
                {
                    "": titles[kind],
                    "after 1 % of the steps": _cell(early[0.01]),
                    "after 10 %": _cell(early[0.1]),
                    f"where x ends after {longer:,} steps": _cell(run["end"].mean(1).tolist()),
                    "deviation over chains": f"{run['end'].std().item():.2f}",
                }
            )
        report.add_rows(f"{problem.title}: lr or eta that falls from {FIRST:g}, or is 0", rows)
        paths[problem.title] = {titles[kind]: run["path"].T.tolist() for kind, run in falling.items()}
        adam = panel[WAYS[0].title][rates.index(FIRST)]
        zero, slow = (falling[kind]["end"].mean(1).tolist() for kind in ("filter-still", "filter-falling"))
        means = {rate: mean_and_error(ends)[0] for rate, ends in zip(rates, panel["filter"])}
        right, wrong = ([r for r, v in means.items() if sign * v > 0.5] for sign in (-1, 1))
        held += [mean_and_error(adam)[0] > 0.5, *(mean_and_error(v)[0] < -0.5 for v in (zero, slow))]
        words.append(
            f"{problem.title}: Adam (β₂ 0.1, lr {FIRST:g}) ends at {_cell(adam)}; the filter with eta = 0 at "
            f"{_cell(zero)}, with eta/√t at {_cell(slow)}; with constant eta it ends below -0.5 for eta "
            f"{_list(right)} and above 0.5 for {_list(wrong)}"
        )
        if wrong:
            memory, gap = 1 / (2 * min(wrong) * problem.rms), (1 + problem.large) / (1 + problem.mean)
            words[-1] += f", whose memory 1/(2 eta rms) is {memory:.1f} steps and less, for large ones every {gap:.1f}"
    report.verdict = (
        f"{outcome(held)}. "
        f"{'. '.join(words)}. Coupling memory to the learning rate helps only where eta is small or falls; at eta = 0 "
        "steps are 1/t, and the distance covered is logarithmic in their number."
    )
    report.draw(context.folder / "rates.png", figures.lines, panels, "learning rate, or η", "final x")
    axes = (f"steps / {max(1, longer // 200)}", "x")
    report.draw(context.folder / "paths.png", figures.curves, paths, *axes)
    report.add_protocol(steps=steps, longer=longer, chains=chains)
    return report


def _cell(values: list[float]) -> str:
    mean, error = mean_and_error(values)
    return f"{mean:.2f} ± {error:.2f}" if error > 0.005 else f"{mean:.2f}"


def _list(rates: list[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates) or "none"
