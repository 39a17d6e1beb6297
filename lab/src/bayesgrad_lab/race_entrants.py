"""Who takes part in a race: optimizers of others and ours, each at the settings that it is recommended with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesgrad import optim
from bayesgrad.products import mm
from bayesgrad_lab.methods import DECOUPLED, GRADIENT, METHODS, POSITIONS, Build, Method, Setup, built, peer

SAMPLED_ROWS = 1024  # of a batch, for statistics of layers


def orthogonalised(matrix: Tensor) -> Tensor:
    """About U V' for a matrix U S V', by the quintic Newton-Schulz iteration of Muon (Jordan et al., 2024)."""
    x = matrix.mT if len(matrix) > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=torch.finfo(x.dtype).tiny)
    for _ in range(5):
        gram = mm(x, x.mT)
        x = 3.4445 * x + mm(-4.7750 * gram + 2.0315 * mm(gram, gram), x)
    return x.mT if len(matrix) > matrix.shape[1] else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised, in float32: torch's works in bfloat16, which many CPUs emulate.

    Filters of convolutions are matrices with a row for each output channel. Products are by the library by which those
    of bayesgrad's optimizers are.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalised(p.grad.lerp(buffer, group["momentum"]).flatten(1))
                rows, columns = update.shape
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update.view_as(p), alpha=-group["lr"] * math.sqrt(max(1, rows / columns)))


def _muon(model: nn.Module, setup: Setup) -> list[torch.optim.Optimizer]:
    """Muon for matrices and filters, AdamW at a twentieth of its rate for the rest: vectors, embeddings, last layer."""
    modules = list(model.modules())
    last = [module for module in modules if isinstance(module, nn.Linear)][-1]
    outer = {id(p) for m in modules if m is last or isinstance(m, nn.Embedding) for p in m.parameters()}
    outer |= {id(p) for p in model.parameters(recurse=False)}  # embeddings of positions
    inner = [p for p in model.parameters() if p.dim() > 1 and id(p) not in outer]
    chosen = {id(p) for p in inner}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    other = torch.optim.AdamW(rest, lr=setup.lr / 20, weight_decay=20 * setup.decoupled)
    return [other, Muon(inner, setup.lr, weight_decay=setup.decoupled)] if inner else [other]


def _shampoo(params: Iterable[Tensor], **options: Any) -> torch.optim.Optimizer:
    """With RMSProp's norms, inverse roots every ten steps, and averages of momentum and statistics."""
    return peer("ScalableShampoo")(
        params,
        betas=(0.9, 0.99),
        moving_average_for_momentum=True,
        decoupled_weight_decay=True,
        start_preconditioning_step=10,
        preconditioning_compute_steps=10,
        graft_type=3,  # RMSProp
        nesterov=False,
        **options,
    )


def _of(name: str, **options: Any) -> Build:
    """An optimizer of pytorch_optimizer, which is imported when it is built."""
    return built(lambda params, **given: peer(name)(params, **given), **options, **DECOUPLED)


@dataclass(frozen=True)
class Entrant(Method):
    """A method that takes part.

    Args:
        ours: of bayesgrad.
        cosine: lr falls after its warm-up; else it is constant.
        to_target: it stops when the target is reached, and its time counts; else its loss at equal time.
        draws_labels: it takes a `likelihood`.
        words: its settings beside lr, for the page.
    """

    ours: bool = False
    cosine: bool = True
    to_target: bool = True
    draws_labels: bool = False
    words: str = ""


def at_defaults(name: str, **options: Any) -> Entrant:
    """An optimizer of bayesgrad as `methods` has it."""
    one = METHODS[name]
    return Entrant(one.kind, one.title, one.lrs, one.make, ours=True, **options)


def _of_layers(make: Any, lr: float, *, draws_labels: bool = False, **options: Any) -> Entrant:
    """An optimizer of layers, whose statistics are formed of some rows of a batch."""
    build = built(make, stats_rows=SAMPLED_ROWS, **options, **POSITIONS, **DECOUPLED)
    given = {"stats_rows": SAMPLED_ROWS, **{name: value for name, value in options.items() if not callable(value)}}
    words = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return Entrant(
        make.__name__.lower(), make.__name__, (lr,), build, ours=True, draws_labels=draws_labels, words=words
    )


# Adam's step in the eigenbasis of each layer.
_EIGENBASIS = {"eigenvalues": "gradients", "fisher": "empirical", **GRADIENT}


BASELINE = "adamw"
ENTRANTS: Mapping[str, Entrant] = {
    one.kind: one
    for one in (
        Entrant("sgd", "SGD", (0.1,), METHODS["sgd"].make, words="momentum 0.9"),
        Entrant(BASELINE, "AdamW", (1e-3,), built(torch.optim.AdamW, fused=True, **DECOUPLED), words="fused"),
        Entrant(
            "schedulefree", "schedule-free AdamW", (2.5e-3,), _of("ScheduleFreeAdamW"), cosine=False,
            words="pytorch_optimizer; lr is constant after its warm-up",
        ),
        Entrant(
            "muon", "Muon", (2e-2,), _muon,
            words="float32, momentum 0.95; AdamW at a twentieth of lr for vectors, embeddings and the last layer",
        ),
        Entrant("soap", "SOAP", (3e-3,), _of("SOAP"), words="pytorch_optimizer"),
        Entrant(
            "shampoo", "Shampoo", (1e-3,), built(_shampoo, **DECOUPLED),
            words="ScalableShampoo of pytorch_optimizer, betas (0.9, 0.99), norms of RMSProp, roots every ten steps",
        ),
        _of_layers(optim.SpectralFOOF, 0.04, max_factor=256),
        _of_layers(optim.FOOF, 0.05, momentum=0.9),
        _of_layers(optim.KFAC, 0.05, momentum=0.9, damping=0.3, draws_labels=True),
        _of_layers(optim.KroneckerFilterFP, 6e-3, **_EIGENBASIS),
        at_defaults("adabayesfp", words="sgd_lr = 100 lr"),
        at_defaults("ivon", to_target=False, words="betas (0.9, 0.9995), clip_radius inf"),
    )
}  # fmt: skip
