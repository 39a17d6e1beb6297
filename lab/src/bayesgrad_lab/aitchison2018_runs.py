"""Training runs for Aitchison 2018: one schedule, lr chosen by validation loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesgrad import optim
from bayesgrad_lab.context import Context, Trial
from bayesgrad_lab.methods import GRADIENT, PAPER_RATIO, POSITIONS, Build, Method, built, of_setup, peer
from bayesgrad_lab.results import Results, Value, mean_and_error
from bayesgrad_lab.studies import best, each, edges, search
from bayesgrad_lab.task import Task
from bayesgrad_lab.training import final_scores, fit, settle

KEY = "{data}{count}-{network}-epochs{epochs}"
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


def _kalman(make: Any = optim.KalmanMomentum, **options: Any) -> Build:
    return built(make, **GRADIENT, **options)


def _adabayes(make: Any = optim.AdaBayes, **options: Any) -> Build:
    return built(make, **GRADIENT, **PAPER_RATIO, **options)


PLAIN = {"damping_mode": "absolute", "max_norm": math.inf, "stats_every": 1}  # the settings of the recorded runs
WHITENED = {"max_step": math.inf, "stats_every": 1, "max_factor": 8192}
# The middle learning rates were chosen in single runs on validation data; as many are tried for each.
VARIANTS = {
    kind: Method(kind, title, (lr / 3, lr, 3 * lr), build)
    for kind, title, lr, build in (
        ("adamw", "AdamW", 5e-3, built(torch.optim.AdamW)),
        ("adabayes", "AdaBayes", 6e-3, _adabayes()),
        ("centered", "AdaBayes, centred evidence", 6e-3, _adabayes(fisher="centered")),
        ("sampled", "AdaBayes, sampled evidence", 6e-3, _adabayes(fisher="sampled")),
        ("linearised", "AdaBayes, statistical linearisation", 6e-3, _adabayes(sample_weights=True)),
        ("revisiting", "AdaBayes, 1/k in visit k", 6e-3, _adabayes(Revisiting)),
        ("momentum", "KalmanMomentum, momentum only", 5e-2, _kalman(MomentumOnly)),
        ("kalman", "KalmanMomentum", 1e-2, _kalman()),
        ("noisy", "KalmanMomentum, weight_noise = lr", 1e-2, _kalman(weight_noise=attrgetter("lr"))),
        ("late-decay", "KalmanMomentum, plain decay", 1e-2, _kalman(weight_decay=DECAY, nesterov_decay=False)),
        ("early-decay", "KalmanMomentum, Nesterov decay", 1e-2, _kalman(weight_decay=DECAY, nesterov_decay=True)),
        ("kroneckerfp", "KroneckerFilterFP", 1e-3, built(optim.KroneckerFilterFP, **GRADIENT, **POSITIONS, **WHITENED)),
        ("kronecker", "KroneckerFilter", 1e-3, built(optim.KroneckerFilter, **GRADIENT, **POSITIONS)),
        ("kfac", "KFAC", 0.02, built(optim.KFAC, damping=0.01, **of_setup("losses_per_example", "seed"), **PLAIN)),
        ("foof", "FOOF", 0.1, built(optim.FOOF, damping=0.1, **POSITIONS, **PLAIN)),
        ("soap", "SOAP", 3e-3, built(lambda params, **options: peer("SOAP")(params, **options), weight_decay=0.0)),
    )
}


# --- one run ---


def run(
    context: Context, task: Task, method: Method, lr: float, seed: int, purpose: str = "final"
) -> dict[str, Tensor]:
    """One run, from the run's folder where it is there: loss and seconds of each step, nan from where it diverged, and
    scores on test data."""
    trial = Trial(purpose, task.key, method.kind, {"lr": lr}, seed)
    return context.once(trial, partial(_run, context, task, method, trial))


def _run(context: Context, task: Task, method: Method, trial: Trial) -> dict[str, Tensor]:
    seed = trial.seed or 0
    model = task.model(seed).to(context.device)
    (optimizer,) = method.build(model, task, trial.settings["lr"], seed)
    losses, seconds = torch.full((2, task.epochs * task.steps), math.nan, dtype=torch.float64)
    for step in fit(context, trial, task, model, [optimizer]):
        if step.lost:
            break
        losses[step.number], seconds[step.number] = step.loss, step.seconds
        _visit(optimizer, 1 + (step.number + 1) // task.steps)
    values = dict.fromkeys(SCORES, math.nan)
    if torch.isfinite(losses).all():
        settle(model, task.data, context.device)
        values = final_scores(model, task.data, context.device)
    scores = torch.tensor([values[name] for name in SCORES], dtype=torch.float64)
    return {"loss": losses, "seconds": seconds, "scores": scores}


def _visit(optimizer: torch.optim.Optimizer, number: int) -> None:
    """Says which visit to the data comes next; see `Revisiting`."""
    for group in optimizer.param_groups:
        group["visit"] = number


# --- searches and finals ---


def finals(context: Context, task: Task, method: Method) -> Results:
    """The lr with the lowest validation NLL, by a seed apart, then all seeds on all training data; test data once."""
    held = task.held_out

    def validation(setting: tuple[float, ...], seed: int, *_: Any) -> float:
        return score(held, run(context, held, method, setting[0], seed, "search"), "nll")

    study = f"{task.key}-{method.kind}"
    tried = search(context, study, ["lr"], method.seeks, validation)
    chosen = best(tried)
    settings, ends = {"lr": chosen[0]}, tuple(edges(tried, chosen).values())

    def final(seed: int) -> dict[str, Tensor]:
        return run(context, task, method, chosen[0], seed)

    runs = each(context, study, settings, range(context.seeds), final, lambda one: score(task, one, "nll"))
    return Results(method.title, runs, partial(score, task), settings, tried, ends, task)


def score(task: Task, run: Mapping[str, Tensor], name: str) -> float:
    """A test score, the training loss of the last epoch, or all seconds."""
    if name == "loss":
        return run["loss"][-task.steps :].mean().item()
    if name == "seconds":
        return run["seconds"].sum().item()
    return run["scores"][SCORES.index(name)].item()


def by_epoch(one: Results) -> list[list[float]]:
    """The mean training loss of each epoch, for each seed."""
    return [[part.mean().item() for part in run["loss"].split(one.of.steps)] for run in one.runs]


def clock(one: Results) -> list[float]:
    """Seconds until the end of each epoch, averaged over seeds."""
    times = torch.stack([run["seconds"].cumsum(0) for run in one.runs]).mean(0)
    return times[one.of.steps - 1 :: one.of.steps].tolist()


def loss_at(one: Results, seconds: float) -> Value:
    """The training loss that was reached in that time: the mean over an epoch's number of steps before it."""
    found = []
    for run in one.runs:
        end = int((run["seconds"].cumsum(0) <= seconds).sum())
        found.append(run["loss"][max(0, end - one.of.steps) : end].mean().item())
    return mean_and_error(found)


# --- repeated data ---


def counted(context: Context, task: Task, method: Method, lr: float, seed: int) -> dict[str, Tensor]:
    """How AdaBayes' belief about the weights compares with data it has seen and with data it has not, by epoch."""
    trial = Trial("counted", task.key, method.kind, {"lr": lr}, seed)
    return context.once(trial, partial(_counted, context, task.held_out, method, trial))


def _counted(context: Context, task: Task, method: Method, trial: Trial) -> dict[str, Tensor]:
    """At a constant lr.

    Returns:
        copies: the precision that data have added to the belief, over the information of the data set at the present
            weights (squared gradients of its batches, for drawn labels); one if each example counts once.
        seen, unseen: squared gradients of batches of either kind over those that the model expects, those at drawn
            labels; one if the data are as surprising as the model says, less if they have been fitted.
    """
    seed, data = trial.seed or 0, task.data
    model = task.model(seed).to(context.device)
    (optimizer,) = method.build(model, task, trial.settings["lr"], seed)
    order = torch.Generator().manual_seed(seed)
    rows = []
    for step in fit(context, trial, task, model, [optimizer], cosine=False, order=order):
        if (step.number + 1) % task.steps:
            continue
        _visit(optimizer, 1)  # for the belief, whose variance is read in units of the step_scale
        seen = squares(model, data.train_x, data.train_y, task.size, order)
        unseen = squares(model, data.test_x, data.test_y, task.size, order)
        variance = torch.cat([v.flatten() for v in optimizer.posterior(model).variance().values()]).double()
        group = optimizer.param_groups[0]
        added = (1 / variance - group["batch_size"] / group["sgd_lr"]).clamp(min=0).sum()
        rows.append(
            [added / (task.steps * seen[1].sum()), seen[0].sum() / seen[1].sum(), unseen[0].sum() / unseen[1].sum()]
        )
        _visit(optimizer, 1 + len(rows))
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
