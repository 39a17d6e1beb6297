"""Optimizers by name, with the settings they are compared at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bayesgrad import optim
from bayesgrad_lab.names import unknown


@dataclass(frozen=True)
class Amounts:
    """How much data a gradient is from.

    Args:
        batch: examples of a gradient.
        losses_per_example: losses of an example (the positions of a sequence).
        examples: of the training set; None where that is not known yet.
        seed: of draws from beliefs.
    """

    batch: int
    losses_per_example: int = 1
    examples: int | None = None
    seed: int = 0

    @property
    def losses(self) -> int:
        """All losses of the training set, or of a batch where that is all that is known."""
        return self.losses_per_example * (self.examples or self.batch)


Build = Callable[[nn.Module, float, Amounts, float], list[torch.optim.Optimizer]]


@dataclass(frozen=True)
class Method:
    """How one optimizer is built for a comparison.

    Args:
        title: for tables and legends.
        lr: its usual learning rate, around which a search looks.
        build: (model, lr, amounts, decay) -> optimizers that step together; `decay` is the strength of L2
            regularisation that SGD would have, which each takes in its own way.
    """

    title: str
    lr: float
    build: Build


def _simple(make: Callable[..., torch.optim.Optimizer], **fixed: Any):
    """L2 regularisation in the gradient."""
    return lambda model, lr, amounts, decay: [make(model.parameters(), lr=lr, weight_decay=decay, **fixed)]


def _decoupled(make: Callable[..., torch.optim.Optimizer], **fixed: Any):
    """Decoupled decay that matches SGD's at learning rate 0.1: lr * weight_decay = 0.1 * decay."""
    return lambda model, lr, amounts, decay: [make(model.parameters(), lr=lr, weight_decay=0.1 * decay / lr, **fixed)]


def _adabayes(make: Callable[..., torch.optim.Optimizer], **fixed: Any):
    """As `_decoupled`, with sgd_lr = 100 lr, the ratio of the paper: a search moves both."""

    def build(model: nn.Module, lr: float, amounts: Amounts, decay: float) -> list[torch.optim.Optimizer]:
        batch_size = amounts.batch * amounts.losses_per_example
        return _decoupled(make, sgd_lr=100 * lr, batch_size=batch_size, **fixed)(model, lr, amounts, decay)

    return build


def _layerwise(make: Callable[..., torch.optim.Optimizer], **fixed: Any):
    """As `_decoupled`, for rules that take the model."""
    return lambda model, lr, amounts, decay: [
        make(model, lr=lr, losses_per_example=amounts.losses_per_example, weight_decay=0.1 * decay / lr, **fixed)
    ]


def _prior(amounts: Amounts, decay: float) -> dict[str, Any]:
    """The prior whose precision beside all losses is that L2 regularisation, or a weak one."""
    return dict(num_data=amounts.losses, prior_precision=amounts.losses * decay or 1.0, seed=amounts.seed)


def _gauss_newton(make: Callable[..., torch.optim.Optimizer], **fixed: Any) -> Build:
    return lambda model, lr, amounts, decay: [
        make(model, lr=lr, losses_per_example=amounts.losses_per_example, **_prior(amounts, decay), **fixed)
    ]


def _ivon(model: nn.Module, lr: float, amounts: Amounts, decay: float) -> list[torch.optim.Optimizer]:
    """With a Hessian that moves within a few thousand steps."""
    prior = _prior(amounts, decay)
    return [optim.IVON(model.parameters(), lr=lr, betas=(0.9, 0.9995), **prior)]


def _filtered(make: Callable[..., torch.optim.Optimizer], **fixed: Any) -> Build:
    """As `_layerwise`, for filters, which ask how many losses a gradient is the mean of."""

    def build(model: nn.Module, lr: float, amounts: Amounts, decay: float) -> list[torch.optim.Optimizer]:
        counts = dict(
            batch_size=amounts.batch * amounts.losses_per_example,
            losses_per_example=amounts.losses_per_example,
            seed=amounts.seed,
        )
        return [make(model, lr=lr, weight_decay=0.1 * decay / lr, **counts, **fixed)]

    return build


def _kalman(model: nn.Module, lr: float, amounts: Amounts, decay: float) -> list[torch.optim.Optimizer]:
    batch_size = amounts.batch * amounts.losses_per_example
    return _decoupled(optim.KalmanMomentum, batch_size=batch_size)(model, lr, amounts, decay)


def soap() -> Callable[..., torch.optim.Optimizer]:
    """SOAP, which is in a package of its own."""
    try:
        from pytorch_optimizer import SOAP
    except ImportError as error:
        raise ImportError("soap is in a package that is not installed: pip install pytorch_optimizer.") from error
    return SOAP


def _muon(model: nn.Module, lr: float, amounts: Amounts, decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the network, AdamW at a twentieth of its rate elsewhere, as its authors advise."""
    outer = ("tokens", "positions", "out")
    inner = [p for name, p in model.named_parameters() if p.dim() == 2 and not name.startswith(outer)]
    chosen = {id(p) for p in inner}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=lr / 20, weight_decay=2 * decay / lr)]
    if inner:
        optimizers.append(torch.optim.Muon(inner, lr=lr, weight_decay=0.1 * decay / lr))
    return optimizers


# Those of OGN, VOGN and IVON were chosen on validation data: see docs/results/khan2023-uncertainty.md.
METHODS: dict[str, Method] = {
    "sgd": Method("SGD", 0.1, _simple(torch.optim.SGD, momentum=0.9)),
    "adam": Method("Adam", 1e-3, _simple(torch.optim.Adam)),
    "adam99": Method("Adam (β₁ 0.99)", 1e-3, _simple(torch.optim.Adam, betas=(0.99, 0.999))),
    "adagrad": Method("AdaGrad", 1e-2, _simple(torch.optim.Adagrad)),
    "amsgrad": Method("AMSGrad", 1e-3, _simple(torch.optim.Adam, amsgrad=True)),
    "amsgrad99": Method("AMSGrad (β₁ 0.99)", 1e-3, _simple(torch.optim.Adam, amsgrad=True, betas=(0.99, 0.999))),
    "adabound": Method("AdaBound", 1e-3, _simple(optim.AdaBound)),
    "amsbound": Method("AMSBound", 1e-3, _simple(optim.AMSBound)),
    "adamw": Method("AdamW", 1e-3, _decoupled(torch.optim.AdamW)),
    "adabayes": Method("AdaBayes", 1e-3, _adabayes(optim.AdaBayes)),
    "adabayes-paper": Method("AdaBayes (follow_lr=False)", 1e-3, _adabayes(optim.AdaBayes, follow_lr=False)),
    "adabayesfp": Method("AdaBayesFP", 1e-3, _adabayes(optim.AdaBayesFP)),
    "kalmanmomentum": Method("KalmanMomentum", 1e-3, _kalman),
    "kronecker": Method("KroneckerFilter", 1e-3, _filtered(optim.KroneckerFilter)),
    "kroneckerfp": Method("KroneckerFilterFP", 1e-3, _filtered(optim.KroneckerFilterFP)),
    "foof": Method("FOOF", 0.3, _layerwise(optim.FOOF)),
    "kfac": Method("KFAC", 0.03, _layerwise(optim.KFAC)),
    "naturalgradient": Method("NaturalGradient", 0.1, _layerwise(optim.NaturalGradient)),
    "ogn": Method("OGN", 0.3, _gauss_newton(optim.OGN)),
    "vogn": Method("VOGN", 0.3, _gauss_newton(optim.VOGN)),
    "ivon": Method("IVON", 0.3, _ivon),
    "muon": Method("Muon", 2e-2, _muon),
}


def method(name: str) -> Method:
    """The method of that name."""
    if name not in METHODS:
        raise unknown("optimizer", name, METHODS)
    return METHODS[name]
