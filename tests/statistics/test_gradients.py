"""Averages over random gradients against closed forms, with standard errors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bayesgrad.optim import AdaBayes, AdaBayesFP
from bayesgrad.rules import CentredGradient, Evidence

pytestmark = pytest.mark.filterwarnings("ignore:lr=.* is .* times the ")  # lr is raised by hand


@pytest.mark.parametrize("step", [2, 3, 10, 300])
def test_the_centred_square_is_unbiased_for_the_variance_at_every_step(step: int) -> None:
    """E h = c^2 s^2 and, h being c^2 s^2 times a chi-squared variable, a standard error of sqrt(2/n) of it."""
    chains, mean, deviation, information = 40_000, 3.0, 0.7, 5.0
    generator = torch.Generator().manual_seed(step)
    part = CentredGradient()
    memory = {"gradient_mean": torch.zeros(chains, dtype=torch.float64)}
    for t in range(1, step + 1):
        gradient = mean + deviation * torch.randn(chains, dtype=torch.float64, generator=generator)
        increment = part.read(Evidence(gradient), memory, {**part.scalars(t), "gradient_scale": information})
    expected = (information * deviation) ** 2
    assert abs(increment.mean().item() / expected - 1) < 5 * math.sqrt(2 / chains)


def test_the_first_centred_square_is_the_square() -> None:
    part = CentredGradient()
    memory = {"gradient_mean": torch.zeros(3, dtype=torch.float64)}
    gradient = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    increment = part.read(Evidence(gradient), memory, {**part.scalars(1), "gradient_scale": 2.0})
    torch.testing.assert_close(increment, (2 * gradient) ** 2)


@pytest.mark.parametrize(("product", "ratio"), [(1e-2, 1.002), (0.1, 1.022), (1.0, 1.118)])
def test_the_mean_variance_under_gaussian_gradients(product: float, ratio: float) -> None:
    """The time average of sigma_post^2 over Eq. 21 at eta*rms: tabulated values, within five standard errors."""
    lr, batch_size, chains = 1e-3, 128, 4000
    rms = product / lr
    weight = torch.nn.Parameter(torch.zeros(chains, dtype=torch.float64))
    optimizer = AdaBayes([weight], lr=lr, batch_size=batch_size, momentum=0.0)
    generator = torch.Generator().manual_seed(0)
    steps = int(max(300, 10 / product))
    records = []
    for t in range(2 * steps):
        weight.grad = rms / batch_size * torch.randn(chains, dtype=torch.float64, generator=generator)
        optimizer.step()
        if t >= steps and t % max(1, steps // 50) == 0:
            records.append(optimizer.state[weight]["variance"].clone())
    sigma2 = 0.1 / batch_size
    predicted = 1 / (1 / (2 * sigma2) + math.sqrt(1 / (4 * sigma2**2) + rms**2 / lr**2))
    chain_means = torch.stack(records).mean(0) / predicted
    error = chain_means.std().item() / math.sqrt(chains)
    rounding = 5e-4  # the tabulated value has three decimals
    assert abs(chain_means.mean().item() - ratio) < 5 * error + rounding


MAKERS = {
    "AdaBayes": lambda p, sgd_lr: AdaBayes(p, batch_size=128, sgd_lr=sgd_lr),
    "AdaBayes-plain": lambda p, sgd_lr: AdaBayes(p, batch_size=128, sgd_lr=sgd_lr, momentum=0.0),
    "AdaBayes-centered": lambda p, sgd_lr: AdaBayes(p, batch_size=128, sgd_lr=sgd_lr, fisher="centered"),
    "AdaBayesFP": lambda p, sgd_lr: AdaBayesFP(p, batch_size=128, sgd_lr=sgd_lr),
}


def wild(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Gradients from 1e-30 to 1e+30 of either sign, a tenth of them zero and a tenth denormal."""
    magnitude = 10 ** (60 * torch.rand(shape, dtype=torch.float64, generator=generator) - 30)
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    kind = torch.randint(0, 10, shape, generator=generator)
    gradient = (magnitude * sign).to(dtype)
    gradient[kind == 0] = 0.0
    gradient[kind == 1] = torch.finfo(dtype).tiny / 1024
    return gradient


def check_variance(optimizer, weight: torch.nn.Parameter) -> None:
    model = torch.nn.Module()
    model.register_parameter("w", weight)
    variance = optimizer.posterior(model).variance()["w"]
    assert bool(torch.isfinite(variance).all())
    assert bool((variance > 0).all())
    assert bool(torch.isfinite(weight).all())


CASES = [(name, sgd_lr) for name in MAKERS for sgd_lr in (0.1, math.inf) if name != "AdaBayes-centered" or sgd_lr < 1]


@pytest.mark.parametrize(("name", "sgd_lr"), CASES)
def test_a_million_wild_sequences_leave_the_variance_positive_and_finite(name: str, sgd_lr: float) -> None:
    weight = torch.nn.Parameter(torch.zeros(1_000_000))
    optimizer = MAKERS[name]([weight], sgd_lr)
    generator = torch.Generator().manual_seed(0)
    for step in range(12):
        optimizer.param_groups[0]["lr"] = (1e-3, 1e-8, 0.0, 1.0)[step % 4]
        weight.grad = wild(weight.shape, generator, weight.dtype)
        optimizer.step()
        check_variance(optimizer, weight)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 6), max_size=4).map(tuple),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    name=st.sampled_from(sorted(MAKERS)),
    sgd_lr=st.sampled_from([1e-6, 0.1, 1e6]),
)
def test_any_shape_stays_finite(
    shape: tuple[int, ...], seed: int, dtype: torch.dtype, name: str, sgd_lr: float
) -> None:
    weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
    optimizer = MAKERS[name]([weight], sgd_lr)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(5):
        weight.grad = wild(shape, generator, dtype)
        optimizer.step()
        check_variance(optimizer, weight)
