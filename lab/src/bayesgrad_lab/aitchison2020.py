"""The experiments of Aitchison 2020: how Bayesian filtering unifies adaptive and non-adaptive optimization."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch

from bayesgrad.optim import AdaBayes
from bayesgrad.packing import gradient_of
from bayesgrad.precision import Diagonal
from bayesgrad.rules.transition import OrnsteinUhlenbeck
from bayesgrad_lab import figures
from bayesgrad_lab.compare import Budget, compare, curves, table
from bayesgrad_lab.context import Context, Trial
from bayesgrad_lab.report import Report
from bayesgrad_lab.results import Results, mean_and_error, shown
from bayesgrad_lab.task import Task
from bayesgrad_lab.training import fit

BASELINES = ("sgd", "adam", "adagrad", "amsgrad", "adabound", "amsbound", "adamw")
OURS = ("adabayesfp", "adabayes", "adabayes-paper")
METHODS = (*BASELINES, *OURS)
TABLE_SCORES = {
    "error": "test error %",
    "nll": "test NLL",
    "ece": "ECE %",
    "brier": "Brier",
    "best error": "lowest error %",
    "best nll": "lowest NLL",
}
CURVES = {
    "test error": "error",
    "test loss": "nll",
    "training error": "train_error",
    "training loss": "train_loss",
}


def fig1(context: Context) -> Report:
    """The optimum of one weight drifts as the others are trained, and the filter covers it at its nominal rate."""
    chains, steps = {"smoke": (200, 300), "laptop": (2000, 3000), "paper": (20_000, 5000)}[context.scale]
    dimension, batch, eta_mu = 10, 16, 0.02
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(dimension, 2 * dimension, dtype=torch.float64, generator=generator)
    hessian = factor @ factor.T / (2 * dimension)
    coupling, own = hessian[1:, 0], hessian[0, 0].item()
    printed = eta_mu * coupling.norm().item()
    eta = printed / own  # Eq. 15, corrected: divided by H_ii
    stationary = 100 * eta**2
    shrink = 1 - eta**2 / (2 * stationary)
    information = batch * own

    def covered(assumed: float, curvature: str, seed: int = 0) -> tuple[list[float], tuple[np.ndarray, ...]]:
        """Coverage of nominal 50, 68 and 95 % intervals over all chains and the second half of the steps."""
        draw = torch.Generator().manual_seed(1 + seed)
        n = OrnsteinUhlenbeck().scalars(process=assumed**2, stationary=stationary * (assumed / eta) ** 2)
        others = torch.zeros(chains, dimension - 1, dtype=torch.float64)
        mean = torch.zeros(chains, dtype=torch.float64)
        belief = Diagonal(torch.full_like(mean, stationary))
        quantiles = torch.tensor([0.6745, 1.0, 1.96], dtype=torch.float64)
        hits, trace = torch.zeros(3, dtype=torch.float64), []
        for t in range(steps):
            others = shrink * others + eta_mu * torch.randn(others.shape, dtype=torch.float64, generator=draw)
            optimum = -(others @ coupling) / own  # Eq. 10
            mean = math.sqrt(n["retain"]) * mean
            belief = belief.propagate(n["retain"], n["noise"])
            noise = math.sqrt(information) * torch.randn(chains, dtype=torch.float64, generator=draw)
            gradient = information * (optimum - mean) + noise  # Eq. 12, for the sum over a batch
            increment = gradient.square() if curvature == "squared" else torch.full_like(gradient, information)
            belief = belief.add(increment)
            mean = mean + belief.solve(gradient)
            error = (optimum - mean).abs() / belief.variance().sqrt()
            if t >= steps // 2:
                hits += (error[:, None] < quantiles).double().mean(0)
            trace.append((optimum[0].item(), mean[0].item(), belief.variance()[0].sqrt().item()))
        return (hits / (steps - steps // 2)).tolist(), tuple(np.array(trace).T)

    variants = {
        "known curvature, Eq. 15 corrected": (eta, "known"),
        "known curvature, Eq. 15 as printed": (printed, "known"),
        "squared gradients (AdaBayes), Eq. 15 corrected": (eta, "squared"),
    }
    rates = {name: [covered(*variant, seed)[0] for seed in range(context.seeds)] for name, variant in variants.items()}
    summary = {name: [mean_and_error(column) for column in zip(*runs)] for name, runs in rates.items()}
    _, paths = covered(eta, "known")
    exact, squared = (summary[name] for name in variants if "corrected" in name)
    holds = abs(exact[2][0] - 0.95) < 0.01 and abs(exact[1][0] - 0.683) < 0.01
    report = Report.of("aitchison2020-fig1")
    report.verdict = (
        f"{'Holds' if holds else 'Does not hold'} for the filter with known curvature: 95 % intervals "
        f"cover {100 * exact[2][0]:.1f} %. With squared gradients in its place, as in AdaBayes, they cover "
        f"{100 * squared[2][0]:.1f} %. With Eq. 15 as printed, not divided by the curvature, they are too wide."
    )
    rows = [[name, *(f"{shown(cell, '.2f', 100)} %" for cell in cells)] for name, cells in summary.items()]
    columns = ["filter", "nominal 50 %", "nominal 68.3 %", "nominal 95 %"]
    report.add_table("Coverage of the filter's intervals", columns, rows)
    report.draw(
        context.folder / "fig1.png", figures.paths_with_bands, *(path[-300:] for path in paths), ("step", "weight")
    )
    return report


def fig3(context: Context) -> Report:
    """Measured sigma_post^2 against the fixed-point curve and its two limits, on a network that has been trained."""
    name, network, examples, epochs = {
        "smoke": ("digits", "mlp", 300, 2),
        "laptop": ("fashion-mnist", "resnet", 12_000, 24),  # 2256 steps: the filter remembers up to 800
        "paper": ("cifar10", "resnet", None, 20),
    }[context.scale]
    task = Task(context.load(name, examples), network, epochs, large=context.scale == "paper")
    context.say(task.data.note)
    batch, lr, sgd_lr, beta = task.size, 1e-3, 0.1, 0.999
    sigma2 = sgd_lr / batch

    def measure(seed: int) -> dict[str, torch.Tensor]:
        """sigma_post^2 of every weight after training, and the average of its squared gradients G^2."""
        model = task.model(seed).to(context.device)
        optimizer = AdaBayes(model.parameters(), lr=lr, batch_size=batch, sgd_lr=sgd_lr)
        squares = [torch.zeros_like(p) for p in model.parameters()]
        trial = Trial("final", task.key, "adabayes", {"lr": lr}, seed)
        for _ in fit(context, trial, task, model, [optimizer], cosine=False, limit=None):
            for square, p in zip(squares, model.parameters()):
                square.lerp_((batch * gradient_of(p)).square(), 1 - beta)
        variances = optimizer.posterior(model).variance()
        return {
            "measured": torch.cat([v.flatten() for v in variances.values()]).double().cpu(),
            "square": torch.cat([s.flatten() for s in squares]).double().cpu() / (1 - beta ** (epochs * task.steps)),
        }

    ratios, rate, measured = [], np.empty(0), np.empty(0)
    for seed in range(context.seeds):
        found = context.once(f"fig3-seed{seed}", partial(measure, seed))
        seen = found["square"] > 0  # weights that never had a gradient say nothing
        square, measured = found["square"][seen].numpy(), found["measured"][seen].numpy()
        rate = lr / np.sqrt(square)  # Adam's
        ratios.append(measured * (1 / (2 * sigma2) + np.sqrt(1 / (4 * sigma2**2) + 1 / rate**2)))
    every = np.concatenate(ratios)
    median, within = float(np.median(every)), float(np.mean((every < 1.5) & (every > 1 / 1.5)))
    chosen = np.random.default_rng(0).permutation(len(rate))[:20_000]
    low, high = np.quantile(rate, [0.0005, 0.9995]).tolist()
    x = np.geomspace(low, high, 200)
    lines = {
        "fixed point, Eq. 21": (x, 1 / (1 / (2 * sigma2) + np.sqrt(1 / (4 * sigma2**2) + 1 / x**2))),
        "Adam": (x, x),
        "SGD": (x, np.full_like(x, sigma2)),
    }
    holds = abs(median - 1) < 0.1 and within > 0.9
    report = Report.of("aitchison2020-fig3")
    report.verdict = (
        f"{'Holds' if holds else 'Does not hold'}: the median of measured over predicted is {median:.3f} "
        f"(target: within 10 % of 1), and {100 * within:.1f} % of the weights are within a factor of 1.5 "
        "(target: 90 %)."
    )
    rows = [
        [str(seed), f"{np.median(r):.3f}", f"{100 * np.mean((r < 1.5) & (r > 1 / 1.5)):.1f} %"]
        for seed, r in enumerate(ratios)
    ]
    columns = ["seed", "median of measured/predicted", "within a factor of 1.5"]
    report.add_table(f"{network} on {name}, {epochs} epochs", columns, rows)
    report.draw(
        context.folder / "fig3.png",
        figures.scatter_with_curves,
        rate[chosen],
        measured[chosen],
        lines,
        ("Adam's rate  η/√⟨g²⟩", "measured σ²_post"),
    )
    return report


def table1(context: Context) -> Report:
    """Ten optimizers, two networks, a step decay: final error and loss, and the curves behind them."""
    names, examples, epochs, milestones, budget, methods = {
        "smoke": (("digits",), 256, 2, (1,), Budget((1.0,), 1, 100), ("sgd", "adamw", "adabayes", "adabayesfp")),
        "laptop": (("fashion-mnist",), 6000, 10, (8,), Budget((1 / 3, 1.0, 3.0), 3, 2400), METHODS),
        "paper": (("cifar10", "cifar100"), None, 200, (150,), None, METHODS),
    }[context.scale]
    large = context.scale == "paper"
    report = Report.of("aitchison2020-table1")
    wins: list[tuple[bool, str]] = []
    starts: list[str] = []
    for name in names:
        data = context.load(name, examples)
        context.say(data.note)
        for network in ("resnet", "densenet"):
            chosen = [
                f"{m}99" if large and network == "resnet" and m in ("adam", "amsgrad") else m for m in methods
            ]  # the baselines' own settings in the paper
            task = Task(data, network, epochs, large=large, milestones=milestones, decay=5e-4, augment=large)
            results = compare(context, task, chosen, budget)
            title = f"{network} on {name}"
            report.add_table(title, **table(results, TABLE_SCORES))
            report.draw(
                context.folder / f"table1-{name}-{network}.png",
                figures.curves,
                *curves(results, CURVES),
                caption=(
                    f"{title}: curves, mean and standard error over seeds. Test points and the "
                    "lowest values of an epoch, which the paper reports, are computed on 2000 test examples."
                ),
            )
            wins += [_best_adaptive(title, results, score) for score in ("error", "nll")]
            early = {m: np.mean([run.rows[0]["error"] for run in f.runs]) for m, f in results.items()}
            shown = [
                m for m in ("sgd", "adam", "adam99", "adamw", "adabayesfp", "adabayes-paper", "adabayes") if m in early
            ]
            starts.append(f"{title}, error after one epoch: " + ", ".join(f"{m} {100 * early[m]:.1f} %" for m in shown))
    count = sum(won for won, _ in wins)
    report.verdict = (
        f"{'Holds' if count == len(wins) else 'Does not hold'} here: AdaBayes or AdaBayes-FP is the best adaptive "
        f"method in {count} of {len(wins)} comparisons. {' '.join(words for _, words in wins)} {'. '.join(starts)}."
    )
    if budget:
        report.settings["search budget"] = budget.words()
    return report


def _best_adaptive(title: str, results: dict[str, Results], score: str) -> tuple[bool, str]:
    """Whether one of the paper's two methods is the best adaptive one by a final score, and the words for it."""
    means = {m: finals.mean(score) for m, finals in results.items() if math.isfinite(finals.mean(score)[0])}
    papers = [m for m in means if m in ("adabayesfp", "adabayes-paper")] or [m for m in means if m in OURS]
    others = [m for m in means if m != "sgd" and m not in OURS]
    own, rival = (min(group, key=lambda m: means[m][0]) for group in (papers, others))
    factor, unit = (100, " %") if score == "error" else (1, "")

    def show(name: str) -> str:
        return f"{name} {shown(means[name], '.3g', factor, '.2g')}{unit}"

    words = f"{title}, test {score}: {show(own)}, {show(rival)}"
    rest = [m for m in ("adabayes", "sgd") if m in means and m != own]
    return means[own][0] <= means[rival][0], words + "".join(f", {show(m)}" for m in rest) + "."
