"""Optimizers by name, with the settings they are compared at."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from bayesgrad import optim
from bayesgrad_lab.names import unknown
from bayesgrad_lab.task import Task


@dataclass(frozen=True)
class Setup:
    """What an optimizer is built for: hyper-parameters, and how much data a gradient is from.

    Args:
        second: the value of a second hyper-parameter.
        seed: of draws from beliefs.
        batch: examples of a gradient.
        losses_per_example: losses of an example (the positions of a sequence).
        examples: of the training set; None where that is not known yet.
        decay: the strength of L2 regularisation that SGD would have.
    """

    lr: float
    second: float = 0.0
    seed: int = 0
    batch: int = 1
    losses_per_example: int = 1
    examples: int | None = None
    decay: float = 0.0

    @property
    def batch_size(self) -> int:
        """All losses of a batch."""
        return self.batch * self.losses_per_example

    @property
    def num_data(self) -> int:
        """All losses of the training set, or of a batch where that is all that is known."""
        return self.losses_per_example * (self.examples or self.batch)

    @property
    def prior_precision(self) -> float:
        """Of the prior that beside all losses is that L2 regularisation, or a weak one."""
        return self.num_data * self.decay or 1.0

    @property
    def decoupled(self) -> float:
        """Decoupled decay that matches SGD's at learning rate 0.1: lr * weight_decay = 0.1 * decay."""
        return 0.1 * self.decay / self.lr


Build = Callable[..., "torch.optim.Optimizer | list[torch.optim.Optimizer]"]  # of model, setup and options


@dataclass(frozen=True)
class Method:
    """A way to train, and the values that a search may choose from.

    Args:
        kind: its name, in names of files.
        title: for tables and legends.
        lrs: learning rates.
        make: builds the optimizer, or several that step together.
        second: what `seconds` are values of.
        options: further arguments of `make`.
    """

    kind: str
    title: str
    lrs: tuple[float, ...]
    make: Build
    second: str = ""
    seconds: tuple[float, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lr(self) -> float:
        """The usual learning rate, in the middle of those of a search."""
        return self.lrs[len(self.lrs) // 2]

    @property
    def seeks(self) -> list[tuple[float, ...]]:
        """All pairs of a learning rate and a second hyper-parameter, or the learning rates alone."""
        return [(lr, *rest) for lr in self.lrs for rest in (zip(self.seconds) if self.seconds else [()])]

    def named(self, setting: tuple[float, ...]) -> dict[str, float]:
        """The hyper-parameters of a setting, by name."""
        return dict(zip(("lr", self.second), setting))

    def build(self, model: nn.Module, task: Task, lr: float, seed: int, second: float = 0.0) -> list[Any]:
        """The optimizers of a network for a task; all step together."""
        amounts = task.size, task.losses_per_example, len(task.data.train_x)
        return self.of(model, Setup(lr, second, seed, *amounts, task.decay))

    def of(self, model: nn.Module, setup: Setup) -> list[Any]:
        found = self.make(model, setup, **self.options)
        return found if isinstance(found, list) else [found]


def built(make: Any, **arguments: Any) -> Build:
    """Builds an optimizer of the model, or of its parameters, with arguments that may be functions of the setup."""
    layers = "model" in signature(make).parameters

    def build(model: nn.Module, setup: Setup, **options: Any) -> torch.optim.Optimizer:
        every = {**arguments, **options}
        seed = {"seed": 0} if "seed" in signature(make).parameters else {}
        given = seed | {name: value(setup) if callable(value) else value for name, value in every.items()}
        return make(model if layers else model.parameters(), lr=setup.lr, **given)

    return build


def of_setup(*names: str) -> dict[str, Callable[[Setup], Any]]:
    """Arguments that are properties of the setup with the same name."""
    return {name: attrgetter(name) for name in names}


L2 = {"weight_decay": attrgetter("decay")}  # in the gradient
DECOUPLED = {"weight_decay": attrgetter("decoupled")}
PAPER_RATIO = {"sgd_lr": lambda setup: 100 * setup.lr}  # of Aitchison 2020: a search moves both
POSITIONS = of_setup("losses_per_example")
GRADIENT = of_setup("batch_size", "seed")  # of filters, which ask how many losses a gradient is the mean of
VARIATIONAL = of_setup("num_data", "prior_precision", "seed")


def peer(name: str) -> Callable[..., torch.optim.Optimizer]:
    """An optimizer of pytorch_optimizer, which is imported only where it is used."""
    import pytorch_optimizer

    return getattr(pytorch_optimizer, name)


def _muon(model: nn.Module, setup: Setup) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the network, AdamW at a twentieth of its rate elsewhere, as its authors advise."""
    outer = ("tokens", "positions", "out")
    inner = [p for name, p in model.named_parameters() if p.dim() == 2 and not name.startswith(outer)]
    chosen = {id(p) for p in inner}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=setup.lr / 20, weight_decay=20 * setup.decoupled)
    ]
    if inner:
        optimizers.append(torch.optim.Muon(inner, lr=setup.lr, weight_decay=setup.decoupled))
    return optimizers


_ADAM, _ADABAYES = torch.optim.Adam, {**GRADIENT, **PAPER_RATIO, **DECOUPLED}
UNBOUNDED = {"betas": (0.9, 0.9995), "clip_radius": math.inf}  # as IVON's authors; h moves within 2,000 steps

# Learning rates of OGN, VOGN and IVON were chosen on validation data: see docs/results/khan2023-uncertainty.md.
_ROWS: Sequence[tuple[str, str, float, Build]] = (
    ("sgd", "SGD", 0.1, built(torch.optim.SGD, momentum=0.9, **L2)),
    ("adam", "Adam", 1e-3, built(_ADAM, **L2)),
    ("adam99", "Adam (β₁ 0.99)", 1e-3, built(_ADAM, betas=(0.99, 0.999), **L2)),
    ("adagrad", "AdaGrad", 1e-2, built(torch.optim.Adagrad, **L2)),
    ("amsgrad", "AMSGrad", 1e-3, built(_ADAM, amsgrad=True, **L2)),
    ("amsgrad99", "AMSGrad (β₁ 0.99)", 1e-3, built(_ADAM, amsgrad=True, betas=(0.99, 0.999), **L2)),
    ("adabound", "AdaBound", 1e-3, built(optim.AdaBound, **L2)),
    ("amsbound", "AMSBound", 1e-3, built(optim.AMSBound, **L2)),
    ("adamw", "AdamW", 1e-3, built(torch.optim.AdamW, **DECOUPLED)),
    ("adabayes", "AdaBayes", 1e-3, built(optim.AdaBayes, **_ADABAYES)),
    ("adabayes-paper", "AdaBayes (follow_lr=False)", 1e-3, built(optim.AdaBayes, follow_lr=False, **_ADABAYES)),
    ("adabayesfp", "AdaBayesFP", 1e-3, built(optim.AdaBayesFP, **_ADABAYES)),
    ("kalmanmomentum", "KalmanMomentum", 1e-3, built(optim.KalmanMomentum, **GRADIENT, **DECOUPLED)),
    ("kronecker", "KroneckerFilter", 1e-3, built(optim.KroneckerFilter, **GRADIENT, **POSITIONS, **DECOUPLED)),
    ("kroneckerfp", "KroneckerFilterFP", 1e-3, built(optim.KroneckerFilterFP, **GRADIENT, **POSITIONS, **DECOUPLED)),
    ("foof", "FOOF", 0.2, built(optim.FOOF, **POSITIONS, **DECOUPLED)),
    ("kfac", "KFAC", 0.2, built(optim.KFAC, **POSITIONS, **DECOUPLED)),
    ("naturalgradient", "NaturalGradient", 0.3, built(optim.NaturalGradient, **POSITIONS, **DECOUPLED)),
    ("ogn", "OGN", 0.3, built(optim.OGN, **POSITIONS, **VARIATIONAL)),
    ("vogn", "VOGN", 0.3, built(optim.VOGN, **POSITIONS, **VARIATIONAL)),
    ("ivon", "IVON", 0.3, built(optim.IVON, **UNBOUNDED, **VARIATIONAL)),
    ("muon", "Muon", 2e-2, _muon),
)
METHODS = {kind: Method(kind, title, (lr,), build) for kind, title, lr, build in _ROWS}


def method(name: str) -> Method:
    """The method of that name."""
    if name not in METHODS:
        raise unknown("optimizer", name, METHODS)
    return METHODS[name]
