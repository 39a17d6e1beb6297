"""Training runs for Aitchison 2018: one schedule, lr chosen by validation loss."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesgrad import metrics, optim
from bayesgrad_lab import networks
from bayesgrad_lab.dataset import Dataset
from bayesgrad_lab.methods import soap
from bayesgrad_lab.runner import Trial, drawn, log_probabilities
from bayesgrad_lab.study import Context, mean_and_error

STATISTICS = 1000  # training examples that BatchNorm's statistics are estimated from, at the last weights
SEARCH_SEED = 1000  # finals count from 0
DECAY = 1.0  # weight decay where that is what is compared: a thousandth of a weight in a step at lr 1e-3
SCORES = ("error", "nll", "ece", "brier")


class MomentumOnly(optim.KalmanMomentum):
    """Without the direct term S_ww g, which must be dropped for the filter to be Adam: weights follow the momentum."""

    def scalars(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        return {**super().scalars(group, step), "step_scale": 0.0}


class Revisiting(optim.AdaBayes):
    """In visit k to the same data, group["visit"], their likelihood counts to the power 1/k.

    It multiplies both the information B^2 g^2 and the gradient by 1/k. The first visit is AdaBayes.
    """

    def step_scale(self, group: Mapping[str, Any]) -> float:
        return super().step_scale(group) / group.get("visit", 1)

    def gradient_scale(self, group: Mapping[str, Any]) -> float:
        return super().gradient_scale(group) / math.sqrt(group.get("visit", 1))


@dataclass(frozen=True)
class Task:
    """What is trained and for how long."""

    data: Dataset
    network: str
    epochs: int
    batch: int = 128
    large: bool = False

    @property
    def key(self) -> str:
        return f"{self.data.name}{len(self.data.train_x)}-{self.network}-epochs{self.epochs}"

    @property
    def title(self) -> str:
        return f"{self.network} on {len(self.data.train_x):,} of {self.data.name}"

    @property
    def losses_per_example(self) -> int:
        """Losses of an example."""
        return self.data.train_y[0].numel()

    @property
    def losses(self) -> int:
        """Those of a batch."""
        return self.batch * self.losses_per_example

    @property
    def steps(self) -> int:
        """Those of an epoch."""
        return -(-len(self.data.train_x) // self.batch)


@dataclass(frozen=True)
class Variant:
    """A way to train, and the learning rates that a search may choose from: as many for each."""

    kind: str
    title: str
    lrs: tuple[float, ...]
    build: Callable[[nn.Module, Task, float, int], torch.optim.Optimizer]


def around(lr: float) -> tuple[float, ...]:
    return lr / 3, lr, 3 * lr


def _adabayes(make: Callable[..., Any] = optim.AdaBayes, **fixed: Any):
    return lambda model, task, lr, seed: make(
        model.parameters(), lr=lr, batch_size=task.losses, sgd_lr=100 * lr, **_seeded(fixed, seed)
    )


def _kalman(make: Callable[..., Any] = optim.KalmanMomentum, noisy: bool = False, **fixed: Any):
    return lambda model, task, lr, seed: make(
        model.parameters(), lr=lr, batch_size=task.losses, weight_noise=lr if noisy else 0.0, **_seeded(fixed, seed)
    )


def _matrix(make: Callable[..., Any]):
    return lambda model, task, lr, seed: make(
        model, lr=lr, batch_size=task.losses, losses_per_example=task.losses_per_example, seed=seed
    )


def _seeded(fixed: Mapping[str, Any], seed: int) -> dict[str, Any]:
    return {"seed": seed, **fixed}


# The middle learning rates were chosen in single runs on validation data.
VARIANTS = {
    one.kind: one
    for one in (
        Variant("adamw", "AdamW", around(5e-3), lambda m, t, lr, s: torch.optim.AdamW(m.parameters(), lr=lr)),
        Variant("adabayes", "AdaBayes", around(6e-3), _adabayes()),
        Variant("centered", "AdaBayes, centred evidence", around(6e-3), _adabayes(fisher="centered")),
        Variant("sampled", "AdaBayes, sampled evidence", around(6e-3), _adabayes(fisher="sampled")),
        Variant("linearised", "AdaBayes, statistical linearisation", around(6e-3), _adabayes(sample_weights=True)),
        Variant("revisiting", "AdaBayes, 1/k in visit k", around(6e-3), _adabayes(Revisiting)),
        Variant("momentum", "KalmanMomentum, momentum only", around(5e-2), _kalman(MomentumOnly)),
        Variant("kalman", "KalmanMomentum", around(1e-2), _kalman()),
        Variant("noisy", "KalmanMomentum, weight_noise = lr", around(1e-2), _kalman(noisy=True)),
        Variant(
            "late-decay", "KalmanMomentum, plain decay", around(1e-2), _kalman(weight_decay=DECAY, nesterov_decay=False)
        ),
        Variant(
            "early-decay",
            "KalmanMomentum, Nesterov decay",
            around(1e-2),
            _kalman(weight_decay=DECAY, nesterov_decay=True),
        ),
        Variant("kroneckerfp", "KroneckerFilterFP", around(1e-3), _matrix(optim.KroneckerFilterFP)),
        Variant("kronecker", "KroneckerFilter", around(1e-3), _matrix(optim.KroneckerFilter)),
        Variant(
            "kfac",
            "KFAC",
            around(0.02),
            lambda m, t, lr, s: optim.KFAC(m, lr=lr, losses_per_example=t.losses_per_example, seed=s),
        ),
        Variant(
            "foof",
            "FOOF",
            around(0.1),
            lambda m, t, lr, s: optim.FOOF(m, lr=lr, losses_per_example=t.losses_per_example),
        ),
        Variant("soap", "SOAP", around(3e-3), lambda m, t, lr, s: soap()(m.parameters(), lr=lr, weight_decay=0.0)),
    )
}


# --- one run ---


def fit(context: Context, trial: Trial, task: Task, model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Trains by a cosine schedule from the optimizer's lr to zero.

    Returns:
        Loss and seconds of each step, of processor time on a CPU, so that other processes do not count; nan from where
        a run diverged.
    """
    x, y = task.data.train_x, task.data.train_y
    total = task.epochs * task.steps
    if context.expect:
        context.expect(trial, task.epochs, task.steps)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, total))
    order = torch.Generator().manual_seed(trial.seed)
    clock = time.process_time if context.device == "cpu" else time.perf_counter
    losses, seconds = torch.full((2, total), math.nan, dtype=torch.float64)
    model.train()
    for epoch in range(task.epochs):
        for group in optimizer.param_groups:
            group["visit"] = epoch + 1
        for step, chosen in enumerate(torch.randperm(len(x), generator=order).split(task.batch)):
            inputs, labels = x[chosen].to(context.device), y[chosen].to(context.device)
            start = clock()
            value = one_step(model, optimizer, inputs, labels)
            schedule.step()
            at = epoch * task.steps + step
            losses[at], seconds[at] = value, clock() - start
            if not math.isfinite(value):
                return {"loss": losses, "seconds": seconds}
            if context.progress and (step % 10 == 9 or step + 1 == task.steps):
                context.progress(trial, epoch, step + 1, value, math.nan, 1 / seconds[at].item())
    return {"loss": losses, "seconds": seconds}


def one_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> float:
    """The loss before it; nan, and no step, where it cannot go on."""
    optimizer.zero_grad()
    with drawn([optimizer]):
        outputs = model(x)
        loss = F.cross_entropy(outputs.flatten(0, -2), y.flatten())
        if not math.isfinite(loss.item()):
            return math.nan
        if hasattr(optimizer, "observe"):
            optimizer.observe(outputs)
        loss.backward()
    try:
        optimizer.step()
    except (ValueError, FloatingPointError):  # what a layer sees has grown too large to be inverted
        return math.nan
    return loss.item()


def run(context: Context, task: Task, variant: Variant, lr: float, seed: int, final: bool) -> dict[str, Tensor]:
    """One run, from the run's folder where it is there: losses and seconds of steps, and scores on test data."""
    key = f"{'final' if final else 'search'}-{task.key}-{variant.kind}-lr{lr:g}-seed{seed}"
    return context.once(key, partial(_run, context, task, variant, lr, seed, final))


def _run(context: Context, task: Task, variant: Variant, lr: float, seed: int, final: bool) -> dict[str, Tensor]:
    model = networks.build(task.network, task.data, seed, task.large).to(context.device)
    purpose = "final" if final else "search"
    trial = Trial(task.network, variant.kind, lr, seed, task.epochs, task.batch, purpose=purpose, data=task.data.name)
    with context.hearing():
        found = fit(context, trial, task, model, variant.build(model, task, lr, seed))
    values = dict.fromkeys(SCORES, math.nan)
    if torch.isfinite(found["loss"]).all():
        settle(model, task, context.device)
        logs = log_probabilities(model, task.data.test_x, context.device)
        values = metrics.classification(logs, task.data.test_y.flatten())
    return {**found, "scores": torch.tensor([values[name] for name in SCORES], dtype=torch.float64)}


@torch.no_grad()
def settle(model: nn.Module, task: Task, device: str) -> None:
    """BatchNorm's statistics at the weights that are left, for all methods alike."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    if norms:
        model.train()(task.data.train_x[:STATISTICS].to(device))
    model.eval()


# --- searches and finals ---


@dataclass(frozen=True)
class Finals:
    """A variant at the lr that was best, for all seeds, and what was tried."""

    variant: Variant
    task: Task
    lr: float
    runs: list[dict[str, Tensor]]
    tried: Mapping[float, float]

    @property
    def edge(self) -> bool:
        return len(self.tried) > 1 and self.lr in (min(self.tried), max(self.tried))

    def values(self, name: str) -> list[float]:
        """One for each seed: a test score, the training loss of the last epoch, or all seconds."""
        if name == "loss":
            return [run["loss"][-self.task.steps :].mean().item() for run in self.runs]
        if name == "seconds":
            return [run["seconds"].sum().item() for run in self.runs]
        return [run["scores"][SCORES.index(name)].item() for run in self.runs]

    def mean(self, name: str) -> tuple[float, float]:
        return mean_and_error(self.values(name))

    def less(self, other: Finals, name: str) -> tuple[float, float]:
        """Mean and standard error, over paired seeds, of this value less the other's."""
        return mean_and_error([a - b for a, b in zip(self.values(name), other.values(name))])

    def epochs(self) -> list[list[float]]:
        """The mean training loss of each epoch, for each seed."""
        return [[part.mean().item() for part in run["loss"].split(self.task.steps)] for run in self.runs]

    def clock(self) -> list[float]:
        """Seconds until the end of each epoch, averaged over seeds."""
        times = torch.stack([run["seconds"].cumsum(0) for run in self.runs]).mean(0)
        return times[self.task.steps - 1 :: self.task.steps].tolist()

    def at(self, seconds: float) -> tuple[float, float]:
        """The training loss that was reached in that time: the mean over an epoch's number of steps before it."""
        found = []
        for one in self.runs:
            end = int((one["seconds"].cumsum(0) <= seconds).sum())
            found.append(one["loss"][max(0, end - self.task.steps) : end].mean().item())
        return mean_and_error(found)


def finals(context: Context, task: Task, variant: Variant) -> Finals:
    """The lr with the lowest validation NLL, by a seed apart, then all seeds on all training data; test data once."""
    held = replace(task, data=task.data.validation())
    tried = {}
    for lr in variant.lrs:
        value = run(context, held, variant, lr, SEARCH_SEED, False)["scores"][SCORES.index("nll")].item()
        tried[lr] = value if math.isfinite(value) else math.inf
    lr = min(tried, key=tried.__getitem__)
    runs = [run(context, task, variant, lr, seed, True) for seed in range(context.seeds)]
    return Finals(variant, task, lr, runs, tried)


# --- repeated data ---


def counted(context: Context, task: Task, variant: Variant, lr: float, seed: int) -> dict[str, Tensor]:
    """How AdaBayes' belief about the weights stands to data it has seen and to data it has not, after each epoch."""
    key = f"counted-{task.key}-{variant.kind}-lr{lr:g}-seed{seed}"
    return context.once(key, partial(_counted, context, task, variant, lr, seed))


def _counted(context: Context, task: Task, variant: Variant, lr: float, seed: int) -> dict[str, Tensor]:
    """At a constant lr.

    Returns:
        copies: the precision that data have added to the belief, over the information of the data set at the present
            weights (squared gradients of its batches, for drawn labels); one if each example counts once.
        seen, unseen: squared gradients of batches of either kind over those that the model expects, those at drawn
            labels; one if the data are as surprising as the model says, less if they have been fitted.
    """
    held = replace(task, data=task.data.validation())
    model = networks.build(task.network, held.data, seed, task.large).to(context.device)
    optimizer: Any = variant.build(model, held, lr, seed)
    order = torch.Generator().manual_seed(seed)
    rows = []
    for epoch in range(task.epochs):
        for group in optimizer.param_groups:
            group["visit"] = epoch + 1
        for chosen in torch.randperm(len(held.data.train_x), generator=order).split(task.batch):
            one_step(model, optimizer, held.data.train_x[chosen], held.data.train_y[chosen])
        for group in optimizer.param_groups:
            group["visit"] = 1  # for the belief, whose variance is read in units of the step_scale
        seen = squares(model, held.data.train_x, held.data.train_y, task.batch, order)
        unseen = squares(model, held.data.test_x, held.data.test_y, task.batch, order)
        variance = torch.cat([v.flatten() for v in optimizer.posterior(model).variance().values()]).double()
        group = optimizer.param_groups[0]
        added = (1 / variance - group["batch_size"] / group["sgd_lr"]).clamp(min=0).sum()
        rows.append(
            [added / (held.steps * seen[1].sum()), seen[0].sum() / seen[1].sum(), unseen[0].sum() / unseen[1].sum()]
        )
    return dict(zip(("copies", "seen", "unseen"), torch.tensor(rows, dtype=torch.float64).T))


def squares(model: nn.Module, x: Tensor, y: Tensor, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Squared gradients of summed losses, averaged over full batches: at the labels, and at labels that are drawn."""
    params = list(model.parameters())
    totals = [torch.zeros(sum(p.numel() for p in params), dtype=torch.float64) for _ in range(2)]
    count = 0
    for inputs, labels in zip(x.split(batch), y.split(batch)):
        if len(inputs) < batch:
            break
        outputs = model(inputs)
        guessed = torch.multinomial(outputs.detach().softmax(-1), 1, generator=generator)[:, 0]
        for total, target in zip(totals, (labels, guessed)):
            loss = F.cross_entropy(outputs, target, reduction="sum")
            gradients = torch.autograd.grad(loss, params, retain_graph=True)
            total += torch.cat([g.flatten() for g in gradients]).double().square()
        count += 1
    return totals[0] / count, totals[1] / count
