"""The experiments of Smith et al. 2018: does the noise of minibatches make natural gradients a sampler?"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial
from typing import Any

from bayesgrad.samplers import batch_size
from bayesgrad_lab import smith2018_chains as chains
from bayesgrad_lab.context import Context
from bayesgrad_lab.dataset import Dataset
from bayesgrad_lab.report import Report

# --- Fig. 4 and 5: a perceptron ---


def mnist(context: Context) -> Dataset:
    return context.load("digits" if context.scale == "smoke" else "mnist")


def mlp(context: Context, count: int) -> chains.Chain:
    """10 projected features, 40 hidden units; one drawn label for each of the Fisher's examples."""
    hidden, length, examples, begins = {
        "smoke": (6, dict(burn_in=10, steps=10, thin=5), 64, 20),
        "laptop": (40, dict(burn_in=100, steps=200, thin=2), 512, 1000),
        "paper": (40, dict(burn_in=500, steps=500, thin=1), 1024, 0),
    }[context.scale]
    data, network = partial(chains.projected, mnist(context), count), partial(chains.perceptron, (10, hidden, 10))
    fixed: Any = dict(lr=1 / 8, damping=0.1, prior_precision=20.0, examples=min(examples, count))
    task = chains.Chain(f"mlp{count}", data, network, **{**fixed, **length})
    return chains.begun(context, task, begins) if begins else task


def fig4(context: Context) -> Report:
    """Batch sizes of natural gradients on a small perceptron, N = 1024."""
    count = 128 if context.scale == "smoke" else 1024
    task = mlp(context, count)
    sizes = [4, 8, 16] if context.scale == "smoke" else [16, 32, 64, 128, 256]
    found = {f"N = {count}": chains.sweep(context, task, sizes=sizes)}
    return chains.reported(context, Report.of("smith2018-fig4"), found, chains.protocol(task), "batch")


def fig5(context: Context) -> Report:
    """The same with more data."""
    grids = {4096: [64, 128, 256, 512, 1024], 16384: [256, 512, 1024, 2048, 4096]}
    grids = {256: [8, 16, 64]} if context.scale == "smoke" else grids
    found = {f"N = {count}": chains.sweep(context, mlp(context, count), sizes=sizes) for count, sizes in grids.items()}
    protocol = chains.protocol(mlp(context, max(grids)))
    return chains.reported(context, Report.of("smith2018-fig5"), found, protocol, "batch")


def ablation(context: Context) -> Report:
    """Footnote 2: does the best temperature depend on damping and prior?"""
    count = 128 if context.scale == "smoke" else 1024
    base = mlp(context, count)
    sizes = [4, 16] if context.scale == "smoke" else [64, 128, 256]
    variants = {
        "damping 0.1, prior 20": base,
        "damping 0.03, prior 20": replace(base, name=f"{base.name}-d0.03", damping=0.03),
        "damping 0.3, prior 20": replace(base, name=f"{base.name}-d0.3", damping=0.3),
        "damping 0.1, prior 5": replace(base, name=f"{base.name}-p5", prior_precision=5.0),
        "damping 0.1, prior 80": replace(base, name=f"{base.name}-p80", prior_precision=80.0),
    }
    found = {name: chains.sweep(context, task, sizes=sizes) for name, task in variants.items()}
    places = {name: some.temperatures[some.best()] for name, some in found.items()}
    weak = max(places.values()) <= 4.1 * min(places.values())
    report = Report.of("smith2018-ablation")
    minima = "; ".join(f"{name}: {chains.where(some)}" for name, some in found.items())
    report.verdict = f"{'Holds' if weak else 'Does not hold'}. Best temperatures: {minima}."
    report.settings["protocol"] = chains.protocol(base)
    chains.add_sweeps(context, report, found, "ablation.png", singles=False)
    return report


# --- Fig. 6: a convolutional network ---


def fig6(context: Context) -> Report:
    """Learning rates at constant temperature, and sizes of the training set, on 3490 weights."""
    images = mnist(context)
    if context.scale == "laptop":
        images = replace(images, test_x=images.test_x[:2000], test_y=images.test_y[:2000])
    refresh, length = {"smoke": (5, 0.4), "laptop": (20, 85.0), "paper": (1, 850.0)}[context.scale]
    heats, rates, counts, examples, begins = {
        "smoke": ([0.5, 2.0], [0.1, 0.05], [100, 200], 50, 20),
        "laptop": ([0.2, 1.0, 5.0], [0.2, 0.1, 0.05], [1024, 2048, 8192], 2048, 1500),
        "paper": ([2.0**k for k in range(-4, 5)], [0.2, 0.1, 0.05, 0.02], [1024, 2048, 4096, 8192], 1024, 5000),
    }[context.scale]
    seeds = min(context.seeds, 2) if context.scale == "laptop" else context.seeds

    channels = 2 if context.scale == "smoke" else 10
    network = partial(chains.convolutional, size=images.train_x.shape[-1], channels=channels)
    fixed: Any = dict(damping=0.1, prior_precision=40.0, refresh=refresh)
    base = chains.begun(context, chains.Chain("fig6", lambda seed: images, network, **fixed), begins)

    def task(lr: float, count: int) -> chains.Chain:
        updates = math.ceil(length / lr)
        kept = max(1, updates // 5)
        lengths: Any = dict(burn_in=updates - kept, steps=kept, thin=max(1, kept // 40))
        some: Any = dict(data=cache(partial(images.part, count)), examples=min(examples, count))
        return replace(base, name=f"fig6-lr{lr:g}-N{count}", lr=lr, **some, **lengths)

    middle, most = 0.05, 8192 if 8192 in counts else counts[-1]  # the paper's
    rated, counted = {}, {}
    for lr in rates:
        sizes = [batch_size(heat, lr, most) for heat in heats]
        rated[f"lr = {lr:g}"] = chains.sweep(context, task(lr, most), sizes=sizes, seeds=seeds)
    for count in counts:
        sizes = [batch_size(heat, middle, count) for heat in heats]
        counted[f"N = {count}"] = chains.sweep(context, task(middle, count), sizes=sizes, seeds=seeds)
    cool = {name: some.mean(some.one(), "nll")[0] for name, some in rated.items()}
    stable = {name: nll for name, nll in cool.items() if math.isfinite(nll)}
    rises = {name: some.mean(-1, "nll")[0] / some.mean(some.one(), "nll")[0] for name, some in counted.items()}
    same = len(stable) > 1 and max(stable.values()) < 1.25 * min(stable.values())
    hot = all(not ratio <= 1.25 for ratio in rises.values())  # chains that diverged count as worse
    whole = same and hot and len(stable) == len(cool)
    at_one = ", ".join(f"{f'{nll:.4f}' if name in stable else 'diverged'} ({name})" for name, nll in cool.items())
    risen = ", ".join(
        f"{f'{ratio:.2f}' if math.isfinite(ratio) else 'infinitely large'} ({name})" for name, ratio in rises.items()
    )
    report = Report.of("smith2018-fig6")
    minima = "; ".join(f"{name}: {chains.where(some)}" for name, some in (rated | counted).items())
    report.verdict = (
        f"{'Holds' if whole else 'Holds in part' if same or hot else 'Does not hold'}. At T = 1 the cross-entropy is "
        f"{at_one}. At T = {heats[-1]:g} it is {risen} times that at T = 1. Minima: {minima}."
    )
    report.settings["protocol"] = chains.protocol(task(middle, most))
    chains.add_sweeps(context, report, rated, "fig6a.png", singles=False)
    chains.add_sweeps(context, report, counted, "fig6b.png", singles=False)
    words = report.text("protocol", images=len(images.train_x), length=length, seeds=seeds)
    report.settings["protocol of all"] = words
    return report


# --- a Kronecker metric ---


def kronecker(context: Context) -> Report:
    """Natural gradients with a Kronecker metric at many temperatures, on a network of 17,000 weights."""
    images = mnist(context)
    count, width, steps, begins = {
        "smoke": (200, 8, 10, 20),
        "laptop": (4096, 64, 250, 500),
        "paper": (16384, 256, 2000, 2000),
    }[context.scale]
    network = partial(chains.perceptron, (images.train_x[0].numel() // 4, width, width, 10))
    fixed: Any = dict(
        lr=0.1, damping=0.1, prior_precision=20.0, metric="kronecker", examples=min(1024, count), refresh=5
    )
    length: Any = dict(burn_in=steps, steps=steps, thin=5)
    task = chains.Chain(f"kronecker{count}", partial(chains.pooled, images, count), network, **fixed, **length)
    task = chains.begun(context, task, begins)
    heats = [0.5, 2.0] if context.scale == "smoke" else [2.0**k for k in range(-3, 4)]
    sizes = [batch_size(heat, task.lr, count) for heat in heats]
    dampings = {f"damping {d:g}": replace(task, name=f"{task.name}-d{d:g}", damping=d) for d in (0.1, 0.3)}
    found = {name: chains.sweep(context, one, sizes=sizes) for name, one in dampings.items()}
    size = sum(p.numel() for p in task.network(0).parameters())
    report = Report.of("ngd-kronecker", weights=f"{size:,}")
    return chains.reported(context, report, found, chains.protocol(task))
