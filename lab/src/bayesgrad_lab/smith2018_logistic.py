"""Fig. 1 to 3 of Smith et al. 2018: logistic regression, where everything can be compared with what it should be.

Data sets differ by their seed and are sampled side by side: a metric that is a function may have a block for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bayesgrad.samplers import Ensemble, Predictive, batch_size, langevin_covariance, minibatch_covariance
from bayesgrad_lab import figures
from bayesgrad_lab import smith2018_chains as chains
from bayesgrad_lab.context import Context
from bayesgrad_lab.report import Report

DAMPING, LR = 1e-4, 0.1


@dataclass(frozen=True)
class Regression:
    """Logistic regression on standard normal inputs, labels drawn with weights (16, 0, ..., 0).

    Smith et al. 2018, section 6.1.

    Args:
        name: what files of this task begin with.
        burn_in, steps, thin: updates that are forgotten, updates that follow, and one of how many of those is a sample.
    """

    name: str
    inputs: int
    examples: int
    tests: int
    burn_in: int
    steps: int
    thin: int = 1
    damping: float = DAMPING
    lr: float = LR

    @property
    def count(self) -> int:
        return self.examples

    def scores(
        self, context: Context, label: str, batch: int | None, heat: float, seeds: int
    ) -> list[dict[str, float]]:
        """Of ensembles and of their members, for each data set."""
        found = context.once(f"{self.name}-{label}", partial(sample, self, seeds, batch=batch, heat=heat))
        return [{name: found[name][seed].item() for name in chains.SCORES} for seed in range(seeds)]

    def data(self, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs (examples + tests, inputs) and labels.

        Differs from the paper: P(y = 1) = 1/(1 + exp(-w x)); the sign that is printed would turn all labels round.
        """
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(self.examples + self.tests, self.inputs, generator=generator, dtype=torch.float64)
        chance = torch.rand(len(x), generator=generator, dtype=torch.float64)
        return x, (chance < (16 * x[:, 0]).sigmoid()).double()


class Regressions(nn.Module):
    """One regression for each data set; they begin at zero, since many data sets have no finite best weights."""

    def __init__(self, count: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, inputs, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (count, examples) of inputs (count, examples, inputs)."""
        return (x @ self.weight[..., None])[..., 0]


def sample(task: Regression, seeds: int, *, batch: int | None = None, heat: float = 1.0, keep: bool = False) -> dict:
    """Scores of each data set's ensemble, (seeds,), and the mean scores of its members; with `keep`, the samples.

    Args:
        batch: of minibatch natural gradients; None is Langevin dynamics with gradients of all data.
        heat: the temperature of the latter.
    """
    x, y = (torch.stack(parts) for parts in zip(*(task.data(seed) for seed in range(seeds))))
    (x, tests), (y, truth) = (part.split([task.examples, task.tests], 1) for part in (x, y))
    model = Regressions(seeds, task.inputs)

    def fisher(w: Tensor) -> Tensor:  # (seeds, inputs, inputs)
        p = (x @ w.view(seeds, -1, 1)).sigmoid()
        return (x * (p * (1 - p))).mT @ x / task.examples

    settings: dict[str, Any] = dict(num_data=task.examples, prior_precision=0.0, likelihood="bernoulli")
    settings |= dict(metric=fisher, damping=task.damping)
    sampler = chains.sampler_of(model, task.lr, batch, heat, **settings)
    ensemble = Ensemble(model, burn_in=task.burn_in, thin=task.thin, sampler=sampler, keep=keep)
    running = Predictive(model, tests, likelihood="bernoulli")
    rows = [chains.batches(task.examples, batch or task.examples, seed) for seed in range(seeds)]

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(task.burn_in + task.steps):
            if batch is None:
                yield x, y
            else:
                chosen = torch.stack([next(some) for some in rows])
                yield x.gather(1, chosen[..., None].expand(-1, -1, task.inputs)), y.gather(1, chosen)

    found = chains.collected(sampler, ensemble, running, pairs(), chains.logistic_loss, lambda p: scores(p, truth))
    return found | ({"samples": ensemble.draws()["weight"][0]} if keep else {})


def scores(p: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy and error of each data set, (2, seeds)."""
    right = torch.where(y > 0.5, p, 1 - p).clamp(min=1e-12)
    return torch.stack([-right.log().mean(1), (right < 0.5).double().mean(1)])


def optimum(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Best weights by Newton's method, the mean Hessian there, and the covariance of the gradients of examples."""
    w, hessian = x.new_zeros(x.shape[1]), x.T @ x
    for _ in range(100):
        p = (x @ w).sigmoid()
        hessian, gradient = (x * (p * (1 - p))[:, None]).T @ x / len(x), x.T @ (p - y) / len(x)
        if gradient.abs().max() < 1e-13:
            break
        w = w - torch.linalg.solve(hessian, gradient)
    slopes = x * ((x @ w).sigmoid() - y)[:, None]
    return w, hessian, torch.cov(slopes.T, correction=0)


def fig1(context: Context) -> Report:
    """The stationary distributions of Langevin dynamics and of minibatches, beside Laplace's approximation."""
    examples, burn_in, steps = {"smoke": (400, 50, 50), "laptop": (1000, 1000, 5000), "paper": (1000, 5000, 20_000)}[
        context.scale
    ]
    base = Regression("fig1", 2, examples, 10, burn_in, steps)
    batch = round(LR * examples / 2)
    methods = {
        "Langevin, T = 1": (base, None),
        f"NGD, B = {batch}": (base, batch),
        f"NGD, B = {batch}, damping 1e-8": (replace(base, name="fig1-undamped", damping=1e-8), batch),
    }
    tables, clouds = {}, {}
    for name, (task, size) in methods.items():
        key = f"{task.name}-{'langevin' if size is None else 'ngd'}"
        found = context.once(key, partial(sample, task, context.seeds, batch=size, keep=True))
        rows = []
        for seed, points in enumerate(found["samples"].transpose(0, 1)):
            best, hessian, spread = optimum(*(part[:examples] for part in task.data(seed)))
            laplace = torch.linalg.inv(hessian) / examples
            settings: dict[str, Any] = dict(lr=LR, num_data=examples, damping=task.damping)
            expected = (
                langevin_covariance(hessian, **settings)
                if size is None
                else minibatch_covariance(hessian, spread, batch_size=size, damping_noise=False, **settings)
            )
            values, basis = torch.linalg.eigh(laplace)  # the flat direction is the last
            basis = basis * (basis.T @ best).sign()  # shifts are positive where weights grow
            turned = [(basis.T @ some @ basis).diag() / values for some in (torch.cov(points.T), expected)]
            shift = basis.T @ (points.mean(0) - best) / values.sqrt()
            rows.append(torch.stack([*turned, shift]).flip(1))
            if seed == 0 and task is base:
                sampled = torch.cov(points.T).numpy()
                clouds[name] = figures.Cloud(points.numpy(), best.numpy(), laplace.numpy(), sampled)
        tables[name] = torch.stack(rows).numpy()  # (seeds, 3, 2)
        context.say(f"{name}: variance over Laplace's {tables[name][:, 0].mean(0).round(2)}")
    langevin, ngd, undamped = tables.values()
    close = all(0.5 < ngd[:, 0, axis].mean() < 1.5 for axis in (0, 1))
    lost = 100 * (1 - (ngd[:, 1, 0] / undamped[:, 1, 0]).mean())

    def both(values: np.ndarray) -> str:
        """Of the flat and of the steep direction, in words."""
        return " and ".join(map(chains.plus_minus, values.T))

    report = Report.of("smith2018-fig1")
    report.verdict = (
        f"{'Holds, roughly' if close else 'Does not hold'}. Variance over Laplace's in the flat and in the "
        f"steep direction: Langevin {both(langevin[:, 0])}, natural gradients {both(ngd[:, 0])}; the latter over the "
        f"former {both(ngd[:, 0] / langevin[:, 0])}. The spread of natural gradients follows their own noise, which "
        "differs between data sets: variance over the prediction of the discrete Lyapunov equation "
        f"{both(ngd[:, 0] / ngd[:, 1])}. Damping, which does not affect minibatch noise, removes {lost:.0f} % of the "
        "variance in the flat direction."
    )
    columns = [f"{axis}: {what}" for axis in ("flat", "steep") for what in ("variance", "predicted", "ratio of both")]
    cells = []
    for name, some in tables.items():
        axes = [(some[:, 0, a], some[:, 1, a], some[:, 0, a] / some[:, 1, a]) for a in (0, 1)]
        cells.append([name, *(chains.plus_minus(column) for column in (*axes[0], *axes[1], *some[:, 2].T))])
    report.add_table(
        "Variances over Laplace's, and shifts of the mean in its standard deviations",
        ["method", *columns, "flat: shift", "steep: shift"],
        cells,
    )
    report.draw(context.folder / "fig1.png", figures.clouds, clouds)
    report.add_protocol(task=base)
    return report


def fig2(context: Context) -> Report:
    """Langevin dynamics at many temperatures."""
    return _swept(context, "fig2", "Langevin dynamics", False)


def fig3(context: Context) -> Report:
    """Minibatch natural gradients at as many temperatures, by their batch size."""
    return _swept(context, "fig3", "natural gradients", True)


def _swept(context: Context, name: str, method: str, minibatches: bool) -> Report:
    sizes, reach = {
        "smoke": ((8, 200, 500, 30, 30, 5), 1),
        "laptop": ((64, 1000, 5000, 500, 500, 5), 3),
        "paper": ((64, 1000, 10_000, 1000, 1000, 1), 5),
    }[context.scale]
    task, heats = Regression(name, *sizes), [2.0**k for k in range(-reach, reach + 1)]
    batches = [batch_size(heat, LR, task.examples) for heat in heats] if minibatches else ()
    found = {method: chains.sweep(context, task, sizes=batches, heats=heats)}
    protocol = Report.of("smith2018-fig2").text("protocol", task=task, seeds=context.seeds)  # of both figures
    return chains.reported(context, Report.of(f"smith2018-{name}"), found, protocol)
