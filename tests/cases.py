"""The table of optimizers; the tests in tests/contract run on every entry."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from bayesgrad import optim, samplers
from bayesgrad.parts import Needs
from bayesgrad.sources import HessianDiagonal


@dataclass(frozen=True)
class Case:
    """One optimizer under one set of options.

    Args:
        make: the class.
        options: arguments beside params; omitted ones have their defaults.
        slots: the state tensors beside `step`.
        bad: invalid arguments, with the error message that they must raise.
        layers: whether it takes the model and uses its layers.
        binary: whether weights are -1 or 1.
        decays: whether it has weight decay. Optimizers with a prior have none; tests of decay do not change the prior.
    """

    name: str
    make: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    slots: tuple[str, ...] = ("momentum",)
    bad: tuple[tuple[dict[str, Any], str], ...] = ()
    layers: bool = False
    binary: bool = False
    decays: bool = True

    def __call__(self, target: Any, **options: Any) -> torch.optim.Optimizer:
        if not self.decays:
            options.pop("weight_decay", None)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* sets all its parameters")  # networks here have biases
            return self.make(target, **{**self.options, **options})

    def of(self, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        """The optimizer for all parameters of a model; warnings about fallbacks and temperatures are ignored."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* trains .* by |lr=.* (samples at temperature|is not small)")
            return self(model if self.layers else model.named_parameters(), **options)


COMMON = (
    ({"lr": -0.1}, "lr must be a finite number >= 0, got -0.1."),
    ({"lr": float("nan")}, "lr must be a finite number >= 0, got nan."),
    ({"lr": "fast"}, "lr must be a finite number >= 0, got 'fast'."),
    ({"weight_decay": -1}, "weight_decay must be a finite number >= 0, got -1."),
    ({"nonfinite": "warn"}, "nonfinite must be 'ignore' or 'raise' or 'skip', got 'warn'."),
    ({"fused": "yes"}, "fused must be None, True or False, got 'yes'."),
)
EVIDENT = (
    ({"fisher": "fisher"}, "fisher must be 'empirical' or 'centered' or 'sampled', got 'fisher'."),
    ({"likelihood": "poisson"}, "likelihood must be 'categorical' or 'bernoulli' or 'gaussian', got 'poisson'."),
    ({"sample_weights": 1}, "sample_weights must be True or False, got 1."),
    ({"samples": 0}, "samples must be an integer >= 1, got 0."),
    ({"seed": 0.5}, "seed must be None or an integer, got 0.5."),
)
ADABAYES = (
    *COMMON,
    ({"batch_size": 0}, "batch_size must be a number >= 1, got 0."),
    ({"sgd_lr": 0.0}, "sgd_lr must be a positive number, got 0.0."),
    ({"momentum": 1.0}, "momentum must be in [0, 1), got 1.0."),
    ({"follow_lr": 1}, "follow_lr must be True or False, got 1."),
    *EVIDENT,
)
ADABAYES_FP = (
    *COMMON,
    ({"batch_size": 0}, "batch_size must be None or a number >= 1, got 0."),
    ({"sgd_lr": -1.0}, "sgd_lr must be a positive number, got -1.0."),
    ({"betas": (0.9, 1.0)}, "betas must be two numbers in [0, 1), got (0.9, 1.0)."),
    ({"betas": 0.9}, "betas must be two numbers in [0, 1), got 0.9."),
)
KALMAN = (
    *COMMON,
    *EVIDENT,
    ({"batch_size": 0}, "batch_size must be a number >= 1, got 0."),
    ({"momentum_decay": 0.0}, "momentum_decay must be in (0, 1], got 0.0."),
    ({"weight_noise": -1.0}, "weight_noise must be a finite number >= 0, got -1.0."),
    ({"prior_std": 0.0}, "prior_std must be inf or between 1e-18 and 1e18, got 0.0."),
    ({"prior_std": 1e300}, "prior_std must be inf or between 1e-18 and 1e18, got 1e+300."),
    (
        {"prior_std": 1e-3},
        "prior_std=0.001 must be larger than lr=0.001 and weight_noise=0.0, the distance that a weight's optimum "
        "moves in a single step.",
    ),
    ({"nesterov_decay": 1}, "nesterov_decay must be True or False, got 1."),
    ({"beta2": 1.0}, "beta2 must be in [0, 1), got 1.0."),
    (
        {"fisher": "centered"},
        "fisher='centered' needs a finite prior_std, got inf: the step for a gradient of zero variance would be "
        "unbounded.",
    ),
    (
        {"steady_state": True, "weight_noise": 0.1},
        "steady_state=True needs prior_std=inf, weight_noise=0 and sample_weights=False, "
        "got prior_std=inf, weight_noise=0.1, sample_weights=False.",
    ),
)
ADABOUND = (
    *COMMON,
    ({"final_lr": 0.0}, "final_lr must be a finite positive number, got 0.0."),
    ({"final_lr": float("inf")}, "final_lr must be a finite positive number, got inf."),
    ({"gamma": 0.0}, "gamma must be in (0, 1), got 0.0."),
    ({"eps": -1e-8}, "eps must be a finite number >= 0, got -1e-08."),
)
STE = (
    *COMMON,
    ({"momentum": 1.0}, "momentum must be in [0, 1), got 1.0."),
)
BAYESBINN = (
    *(bad for bad in COMMON if "weight_decay" not in bad[0]),
    ({"momentum": -0.1}, "momentum must be in [0, 1), got -0.1."),
    ({"num_data": 0}, "num_data must be a number >= 1, got 0."),
    ({"relaxation": 0.0}, "relaxation must be a finite positive number, got 0.0."),
    ({"relaxation": float("inf")}, "relaxation must be a finite positive number, got inf."),
    ({"eps": -1.0}, "eps must be a finite number >= 0, got -1.0."),
    ({"natural_init": -1}, "natural_init must be a finite number >= 0, got -1."),
    ({"samples": 0}, "samples must be an integer >= 1, got 0."),
    ({"seed": 0.5}, "seed must be None or an integer, got 0.5."),
    ({"lr": 1.5}, "lr must be at most 1, got 1.5: it is the fraction of lambda that a step replaces."),
)

LAYERS = (
    *COMMON,
    ({"momentum": 1.0}, "momentum must be in [0, 1), got 1.0."),
)
FOOF = (
    *LAYERS,
    ({"damping": -1}, "damping must be a finite number >= 0, got -1."),
    ({"ema": 1.0}, "ema must be in [0, 1), got 1.0."),
    ({"update_every": 0}, "update_every must be an integer >= 1, got 0."),
    ({"update_every": float("inf")}, "update_every must be an integer >= 1, got inf."),
    ({"stats_every": 1.5}, "stats_every must be an integer >= 1, got 1.5."),
    ({"max_factor": 0}, "max_factor must be a number >= 1, got 0."),
    ({"stats_rows": 0}, "stats_rows must be a positive number, got 0."),
)
KFAC = (
    *FOOF,
    ({"likelihood": "poisson"}, "likelihood must be 'categorical' or 'bernoulli' or 'gaussian', got 'poisson'."),
    ({"sharing": "flatten"}, "sharing must be 'expand' or 'reduce', got 'flatten'."),
    ({"seed": 0.5}, "seed must be None or an integer, got 0.5."),
)
KRONECKER = (
    *LAYERS,
    ({"batch_size": 0}, "batch_size must be a number >= 1, got 0."),
    ({"prior_std": 0.0}, "prior_std must be inf or between 1e-18 and 1e18, got 0.0."),
    ({"prior_std": 1e300}, "prior_std must be inf or between 1e-18 and 1e18, got 1e+300."),
    ({"fisher": "true"}, "fisher must be 'sampled' or 'centered' or 'empirical', got 'true'."),
    ({"update_every": 0}, "update_every must be an integer >= 1, got 0."),
    ({"likelihood": "poisson"}, "likelihood must be 'categorical' or 'bernoulli' or 'gaussian', got 'poisson'."),
    ({"seed": 0.5}, "seed must be None or an integer, got 0.5."),
)
NATURAL = (
    *LAYERS,
    ({"damping": 0.0}, "damping must be a positive number, got 0.0."),
    ({"blocks": "diagonal"}, "blocks must be 'full' or 'layer', got 'diagonal'."),
    ({"step_size": "auto"}, "step_size must be 'lr' or 'quadratic', got 'auto'."),
)

VARIATIONAL = (
    *(bad for bad in COMMON if "weight_decay" not in bad[0]),
    ({"num_data": 0}, "num_data must be a number >= 1, got 0."),
    ({"prior_precision": -1.0}, "prior_precision must be a finite number >= 0, got -1.0."),
    ({"hess_init": 0.0}, "hess_init must be a finite positive number, got 0.0."),
    ({"hess_init": float("inf")}, "hess_init must be a finite positive number, got inf."),
    ({"kl_weight": 0.0}, "kl_weight must be a finite positive number, got 0.0."),
    ({"kl_weight": float("inf")}, "kl_weight must be a finite positive number, got inf."),
    ({"betas": (0.9, 1.0)}, "betas must be two numbers in [0, 1), got (0.9, 1.0)."),
    ({"samples": 0}, "samples must be an integer >= 1, got 0."),
    ({"samples": float("inf")}, "samples must be an integer >= 1, got inf."),
    ({"natural_momentum": 1.0}, "natural_momentum must be in [0, 1), got 1.0."),
    ({"seed": 0.5}, "seed must be None or an integer, got 0.5."),
)
IVON = (
    *VARIATIONAL,
    ({"clip_radius": 0.0}, "clip_radius must be None or a positive number, got 0.0."),
    ({"rescale_lr": 1}, "rescale_lr must be True or False, got 1."),
    ({"curvature": "exact"}, "curvature must be 'reparameterised' or 'gradsq', got 'exact'."),
)
GAUSS_NEWTON = (
    *VARIATIONAL,
    ({"fisher": "true"}, "fisher must be 'empirical' or 'sampled' or 'exact', got 'true'."),
)
SECOND_ORDER = (
    ({"hessian": "fisher"}, "hessian must be 'auto' or 'exact' or 'hutchinson', got 'fisher'."),
    ({"probes": 0}, "probes must be an integer >= 1, got 0."),
)
NEWTON = (*(bad for bad in VARIATIONAL if "samples" not in bad[0]), *SECOND_ORDER)
VON = (*VARIATIONAL, *SECOND_ORDER, ({"improved": 1}, "improved must be True or False, got 1."))
SPIKE_SLAB = (
    *SECOND_ORDER,
    *COMMON,
    ({"keep": 0.0}, "keep must be in (0, 1], or a dict from names of layers to such numbers, got 0.0."),
    ({"keep": {"": 1.5}}, "keep must be in (0, 1], or a dict from names of layers to such numbers, got {'': 1.5}."),
    ({"keep": {"hidden": 0.5}}, "keys of keep must be among the layers [''], got 'hidden'."),
    ({"update": "sgd"}, "update must be 'adam' or 'rmsprop' or 'newton', got 'sgd'."),
    ({"drop_inputs": 1}, "drop_inputs must be True or False, got 1."),
    ({"eps": -1e-8}, "eps must be a finite number >= 0, got -1e-08."),
    ({"samples": 0}, "samples must be an integer >= 1, got 0."),
    ({"seed": 0.5}, "seed must be None or an integer, got 0.5."),
    (
        {"update": "newton", "lr": 2.0},
        "lr must be at most 1 with update='newton', got 2.0: 1 - lr is the decay of an average.",
    ),
)

SAMPLER = (
    *(bad for bad in COMMON if "weight_decay" not in bad[0]),
    ({"num_data": 0}, "num_data must be a number >= 1, got 0."),
    ({"prior_precision": -1.0}, "prior_precision must be a finite number >= 0, got -1.0."),
    ({"damping": -1}, "damping must be None or a finite number >= 0, got -1."),
    ({"correction": "levy"}, "correction must be None or 'flat' or 'jeffreys', got 'levy'."),
    ({"fisher": "true"}, "fisher must be 'exact' or 'sampled', got 'true'."),
    ({"ema": 1.0}, "ema must be in [0, 1), got 1.0."),
    ({"update_every": 0}, "update_every must be an integer >= 1, got 0."),
    ({"probes": 0.5}, "probes must be None or a whole number >= 1, got 0.5."),
    ({"seed": 0.5}, "seed must be None or an integer, got 0.5."),
    (
        {"metric": "manifold"},
        "metric must be one of 'identity', 'diagonal', 'kronecker', 'fisher', 'empirical', or a function, "
        "got 'manifold'.",
    ),
)
LANGEVIN = (*SAMPLER, ({"temperature": -1.0}, "temperature must be a finite number >= 0, got -1.0."))
SNGD = (
    *SAMPLER,
    ({"batch_size": 0}, "batch_size must be a number >= 1, got 0."),
    ({"batch_size": 2000}, "batch_size must be at most num_data=1344, got 2000."),
)

PAIR = ("variance", "cross", "momentum_variance", "momentum")
ELEMENTWISE = (
    Case("AdaBayes", optim.AdaBayes, {"batch_size": 32}, ("variance", "momentum"), ADABAYES),
    Case("AdaBayes-plain", optim.AdaBayes, {"batch_size": 32, "momentum": 0.0}, ("variance",)),
    Case(
        "AdaBayes-centered",
        optim.AdaBayes,
        {"batch_size": 32, "fisher": "centered", "weight_decay": 0.1},
        ("gradient_mean", "variance", "momentum"),
    ),
    Case(
        "AdaBayes-paper",
        optim.AdaBayes,
        {"batch_size": 32, "follow_lr": False, "weight_decay": 0.1},
        ("variance", "momentum"),
    ),
    Case("AdaBayes-random-walk", optim.AdaBayes, {"batch_size": 32, "sgd_lr": float("inf")}, ("variance", "momentum")),
    Case("AdaBayesFP", optim.AdaBayesFP, {}, ("moment", "momentum"), ADABAYES_FP),
    Case(
        "AdaBayesFP-centered",
        optim.AdaBayesFP,
        {"fisher": "centered", "weight_decay": 0.1},
        ("gradient_mean", "moment", "momentum"),
    ),
    Case("AdaBayesFP-adamw", optim.AdaBayesFP, {"sgd_lr": float("inf")}, ("moment", "momentum")),
    Case("KalmanMomentum", optim.KalmanMomentum, {"batch_size": 32}, PAIR, KALMAN),
    Case(
        "KalmanMomentum-prior",
        optim.KalmanMomentum,
        {"batch_size": 32, "prior_std": 1.0, "weight_noise": 1e-3, "fisher": "centered", "nesterov_decay": False},
        ("gradient_mean", *PAIR),
    ),
    Case(
        "KalmanMomentum-steady",
        optim.KalmanMomentum,
        {"batch_size": 32, "steady_state": True, "weight_decay": 0.1},
        ("moment", "momentum"),
    ),
    Case("STE", optim.STE, {"weight_decay": 0.1}, ("latent", "momentum"), STE, binary=True),
    Case("STE-plain", optim.STE, {"momentum": 0.0}, ("latent",), binary=True),
    Case(
        "BayesBiNN", optim.BayesBiNN, {"num_data": 1000}, ("natural", "momentum"), BAYESBINN, binary=True, decays=False
    ),
    Case(
        "BayesBiNN-sharp",
        optim.BayesBiNN,
        {"num_data": 10_000, "relaxation": 0.1, "momentum": 0.0, "lr": 0.01},
        ("natural",),
        binary=True,
        decays=False,
    ),
    Case("AdaBound", optim.AdaBound, {"weight_decay": 0.1}, ("moment", "momentum"), ADABOUND),
    Case("AMSBound", optim.AMSBound, {}, ("moment", "peak", "momentum"), ADABOUND),
    Case("IVON", optim.IVON, {"num_data": 1344}, ("variance", "momentum"), IVON, decays=False),
    Case(
        "IVON-natural",
        optim.IVON,
        {
            "num_data": 1000,
            "betas": (0.0, 0.99),
            "natural_momentum": 0.5,
            "curvature": "gradsq",
            "clip_radius": 0.5,
            "rescale_lr": False,
            "lr": 0.01,
        },
        ("variance", "last_variance", "last_step"),
        decays=False,
    ),
)
LAYERWISE = (
    Case("FOOF", optim.FOOF, {}, (), FOOF, layers=True),
    Case(
        "FOOF-momentum",
        optim.FOOF,
        {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.1, "update_every": 2, "stats_every": 2},
        layers=True,
    ),
    Case("FOOF-backward", optim.FOOF, {"precondition": "backward"}, (), FOOF, layers=True),
    Case("SpectralFOOF", optim.SpectralFOOF, {"lr": 0.01}, bad=FOOF, layers=True),
    Case("SpectralFOOF-plain", optim.SpectralFOOF, {"lr": 0.01, "momentum": 0.0, "weight_decay": 0.1}, (), layers=True),
    Case("KFAC", optim.KFAC, {}, (), KFAC, layers=True),
    Case("KFAC-backward", optim.KFAC, {"precondition": "backward", "momentum": 0.5}, bad=KFAC, layers=True),
    Case("KFAC-exact", optim.KFAC, {"lr": 0.01, "momentum": 0.5, "exact_damping": True, "max_factor": 64}, layers=True),
    Case("KroneckerFilter", optim.KroneckerFilter, {"batch_size": 32}, bad=KRONECKER, layers=True),
    Case(
        "KroneckerFilter-prior",
        optim.KroneckerFilter,
        {
            "lr": 0.01,
            "batch_size": 32,
            "prior_std": 0.1,
            "momentum": 0.0,
            "fisher": "centered",
            "update_every": 3,
            "stats_every": 2,
        },
        (),
        layers=True,
    ),
    Case("KroneckerFilterFP", optim.KroneckerFilterFP, {"batch_size": 32}, bad=KRONECKER, layers=True),
    Case(
        "KroneckerFilterFP-backward",
        optim.KroneckerFilterFP,
        {"batch_size": 32, "precondition": "backward"},
        bad=KRONECKER,
        layers=True,
    ),
    Case(
        "KroneckerFilterFP-prior",
        optim.KroneckerFilterFP,
        {"batch_size": 32, "prior_std": 0.1, "fisher": "empirical", "max_factor": 64, "weight_decay": 0.1},
        layers=True,
    ),
    Case(
        "KroneckerFilterFP-gradients",
        optim.KroneckerFilterFP,
        {"batch_size": 32, "eigenvalues": "gradients", "update_every": 3},
        bad=(
            ({"eigenvalues": "squares"}, "eigenvalues must be 'factors' or 'gradients', got 'squares'."),
            (
                {"eigenvalues": "gradients", "precondition": "backward"},
                "eigenvalues='gradients' squares gradients, which precondition='backward' does not form: use "
                "precondition='step'.",
            ),
        ),
        layers=True,
    ),
    Case("NaturalGradient", optim.NaturalGradient, {}, (), NATURAL, layers=True),
    Case(
        "NaturalGradient-layer",
        optim.NaturalGradient,
        {"lr": 0.03, "blocks": "layer", "momentum": 0.9, "update_every": 2},
        layers=True,
    ),
)
BY_EXAMPLE = (
    Case("OGN", optim.OGN, {"num_data": 1000}, ("variance", "momentum"), GAUSS_NEWTON, layers=True, decays=False),
    Case("VOGN", optim.VOGN, {"num_data": 1000}, ("variance", "momentum"), layers=True, decays=False),
    Case(
        "VOGGN",
        optim.VOGN,
        {"num_data": 1000, "fisher": "sampled", "kl_weight": 0.5, "betas": (0.0, 0.999)},
        ("variance",),
        layers=True,
        decays=False,
    ),
)
SECOND = (
    Case("Newton", optim.Newton, {"num_data": 1344}, ("variance", "momentum"), NEWTON, decays=False),
    Case(
        "Newton-natural",
        optim.Newton,
        {"num_data": 1344, "betas": (0.0, 0.99), "natural_momentum": 0.5, "probes": 2},
        ("variance", "last_variance", "last_step"),
        decays=False,
    ),
    Case("VON", optim.VON, {"num_data": 1344}, ("variance", "momentum"), VON, decays=False),
    Case("VON-plain", optim.VON, {"num_data": 1344, "improved": False}, ("variance", "momentum"), decays=False),
)
SHOWN = (
    Case("AdaBayes-sampled", optim.AdaBayes, {"batch_size": 32, "fisher": "sampled"}, ("variance", "momentum")),
    Case("AdaBayes-drawn", optim.AdaBayes, {"batch_size": 32, "sample_weights": True}, ("variance", "momentum")),
    Case("AdaBayesFP-sampled", optim.AdaBayesFP, {"fisher": "sampled"}, ("moment", "momentum")),
    Case(
        "KalmanMomentum-sampled",
        optim.KalmanMomentum,
        {"batch_size": 32, "fisher": "sampled", "sample_weights": True, "weight_decay": 0.1},
        PAIR,
    ),
)
MASKED = (
    Case("SpikeSlab", optim.SpikeSlab, {}, ("moment", "momentum"), SPIKE_SLAB, layers=True),
    Case("SpikeSlab-rmsprop", optim.SpikeSlab, {"update": "rmsprop", "keep": 0.8}, ("moment",), layers=True),
    Case("SpikeSlab-newton", optim.SpikeSlab, {"update": "newton"}, ("moment", "momentum"), layers=True),
)
SAMPLERS = (
    Case(
        "Langevin",
        samplers.Langevin,
        # Limited steps depend on second derivatives.
        {"num_data": 1344, "metric": "diagonal", "fisher": "sampled", "limit_step": False},
        (),
        LANGEVIN,
        layers=True,
        decays=False,
    ),
    Case(
        "Langevin-default",
        samplers.Langevin,
        {"num_data": 1344},
        (),
        layers=True,
        decays=False,
    ),
    Case(
        "SNGD",
        samplers.SNGD,
        {
            "num_data": 1344,
            "batch_size": 64,
            "metric": "diagonal",
            "fisher": "sampled",
            "ema": 0.9,
            "update_every": 2,
        },
        (),
        SNGD,
        layers=True,
        decays=False,
    ),
)
CASES = (*ELEMENTWISE, *LAYERWISE, *BY_EXAMPLE, *SECOND, *SHOWN, *MASKED, *SAMPLERS)


every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
elementwise_case = pytest.mark.parametrize("case", ELEMENTWISE, ids=lambda case: case.name)
layerwise_case = pytest.mark.parametrize("case", LAYERWISE, ids=lambda case: case.name)


def small_model(dtype: torch.dtype = torch.float32, seed: int = 0, width: int = 1000) -> nn.Module:
    """A model with large and small tensors, a scalar and a single element: every case of the memory layout."""
    generator = torch.Generator().manual_seed(seed)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(40, width)
            self.conv = nn.Conv1d(1, 2, 3)
            self.out = nn.Linear(width, 3)
            self.scale = nn.Parameter(torch.tensor(1.0))
            self.shift = nn.Parameter(torch.tensor([0.1]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.relu(self.wide(x)) * self.scale + self.shift
            return self.out(hidden) + nn.functional.pad(self.conv(x[:, None]).mean(2), (0, 1))

    model = Model()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p if p.numel() == 1 else 0.1 * torch.randn(p.shape, generator=generator))
    return model.to(dtype)


def batch(index: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """The index-th batch of 32 random examples with three classes."""
    generator = torch.Generator().manual_seed(1000 + index)
    return torch.randn(32, 40, generator=generator).to(dtype), torch.randint(0, 3, (32,), generator=generator)


def backward(model: nn.Module, index: int, optimizer: Any = None) -> torch.Tensor:
    x, y = batch(index, next(model.parameters()).dtype)
    with drawn(optimizer):
        outputs = model(x)
        loss = nn.functional.cross_entropy(outputs, y)
        observe(optimizer, outputs, y, loss)
        loss.backward()
    return loss


def drawn(optimizer: Any) -> Any:
    """The context in which gradients must be computed, unless it is already active."""
    if optimizer is None or any(getattr(source, "active", False) for source in optimizer.sources):
        return nullcontext()
    return optimizer.sampled()


def still(optimizer: Any) -> Any:
    """As `drawn`, with noise that does not depend on param groups."""
    if not optimizer.needs.draws:
        return nullcontext()
    return optimizer.sampled(noise=lambda p: torch.full_like(p, 0.5))


def observe(
    optimizer: Any, outputs: torch.Tensor, labels: torch.Tensor | None, loss: torch.Tensor | None = None
) -> None:
    """Calls observe(), if there is an optimizer; with labels, or without any by an exact Fisher, nothing is random."""
    if optimizer is not None:
        exact = isinstance(optimizer, samplers.Langevin) and optimizer.param_groups[0]["fisher"] == "exact"
        optimizer.observe(outputs, loss=loss, labels=None if exact else labels)


def diagonals(optimizer: Any) -> dict[torch.Tensor, torch.Tensor]:
    """What observe() has computed since the last step."""
    (source,) = (source for source in optimizer.sources if isinstance(source, HessianDiagonal))
    return source.diagonals


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for index in steps:
        optimizer.zero_grad()
        backward(model, index, optimizer)
        optimizer.step()


def push(model: nn.Module, optimizer: Any, steps: range) -> None:
    """Takes steps with random gradients, which do not depend on the rounding of matrix products."""
    for index in steps:
        optimizer.zero_grad()
        if optimizer.needs._replace(draws=False) != Needs():
            backward(model, index, optimizer)
        generator = torch.Generator().manual_seed(2000 + index)
        with drawn(optimizer):
            for p in model.parameters():
                values = torch.randn(p.shape, generator=generator).to(p.dtype)
                p.grad = values if p.grad is None else p.grad.copy_(values)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "gradients were changed between")
            optimizer.step()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def states(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    saved = optimizer.state_dict()["state"]
    return {f"{key}.{name}": value.clone() for key, entry in saved.items() for name, value in entry.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether tensors are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
