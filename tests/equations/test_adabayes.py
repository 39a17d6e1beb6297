"""AdaBayes and AdaBayesFP against independent transcriptions, their fixed points and their limits.

The transcriptions are in NumPy, in the papers' units: gradients G = B g of the summed loss.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from bayesgrad.optim import AdaBayes, AdaBayesFP

pytestmark = pytest.mark.filterwarnings("ignore:lr=.* is .* times the ")  # lr is raised by hand

ETA, SGD_LR, BATCH = 1e-3, 0.1, 128
SIGMA2 = SGD_LR / BATCH


def parameter(values) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(np.array(values), dtype=torch.float64))


def gradients(steps: int, size: int, seed: int = 0) -> np.ndarray:
    """Noisy gradients of very different scales."""
    generator = np.random.default_rng(seed)
    return generator.normal(size=(steps, size)) * np.logspace(-6, 2, size) + 1e-3


def run(optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter, sequence: np.ndarray, rates=None) -> np.ndarray:
    path = []
    for t, gradient in enumerate(sequence):
        if rates is not None:
            optimizer.param_groups[0]["lr"] = rates[t]
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        path.append(weight.detach().numpy().copy())
    return np.array(path)


def variance(optimizer, weight: torch.nn.Parameter) -> np.ndarray:
    """sigma_post^2 of the optimizer's posterior."""
    model = torch.nn.Module()
    model.register_parameter("w", weight)
    return optimizer.posterior(model).variance()["w"].numpy()


def adabayes(sequence, batch, rates, sgd_lr, beta=0.9, decay=0.0, follow=True):
    """Corrected Algorithm 1 with the exact Ornstein-Uhlenbeck step; returns weights and sigma_post^2."""
    w, m = np.ones(sequence.shape[1]), np.zeros(sequence.shape[1])
    post = np.full_like(w, sgd_lr * rates[0] / rates[0] / batch)
    last = rates[0]
    path = []
    for t, g in enumerate(sequence, 1):
        eta = rates[t - 1]
        sigma2 = sgd_lr * eta / rates[0] / batch
        if follow:
            post = post * (eta / last)
        G = batch * g
        m = beta * m + (1 - beta) * G
        rho = math.exp(-(eta**2) / sigma2)
        prior = rho * post + sigma2 * (1 - rho)
        post = 1 / (1 / prior + G**2)
        w = (1 - eta * decay) * w - post * m / (1 - beta**t)
        last = eta
        path.append(w)
    return np.array(path), post


def adabayes_fp(sequence, batch, rates, sgd_lr, betas=(0.9, 0.999), decay=0.0):
    """Corrected Algorithm 2."""
    w, m, s = (np.full(sequence.shape[1], value) for value in (1.0, 0.0, 0.0))
    path = []
    for t, g in enumerate(sequence, 1):
        eta = rates[t - 1]
        sigma2 = sgd_lr * eta / rates[0] / batch
        G = batch * g
        m = betas[0] * m + (1 - betas[0]) * G
        s = betas[1] * s + (1 - betas[1]) * G**2
        square = s / (1 - betas[1] ** t)
        post = 1 / (1 / (2 * sigma2) + np.sqrt(1 / (4 * sigma2**2) + square / eta**2))
        w = (1 - eta * decay) * w - post * m / (1 - betas[0] ** t)
        path.append(w)
    return np.array(path), post


def root(eta: float, sigma2: float, square: np.ndarray) -> np.ndarray:
    """The fixed point of the exact step: positive root of q L^2 + (rho - 1 - q h) L - rho h = 0, L = 1/sigma_post^2."""
    rho, q = (
        (1.0, eta**2)
        if math.isinf(sigma2)
        else (math.exp(-(eta**2) / sigma2), -sigma2 * math.expm1(-(eta**2) / sigma2))
    )
    b = rho - 1 - q * square
    return 2 * q / (-b + np.sqrt(b * b + 4 * q * rho * square))


RATES = {
    "constant": np.full(60, ETA),
    "warm-up and decay": ETA * np.concatenate([[1.0], np.linspace(0.1, 2, 30), np.geomspace(1, 1e-3, 29)]),
}


@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
@pytest.mark.parametrize("follow", [True, False])
def test_adabayes_is_the_corrected_algorithm(rates: np.ndarray, follow: bool) -> None:
    sequence = gradients(60, 20)
    weight = parameter(np.ones(20))
    optimizer = AdaBayes([weight], lr=ETA, batch_size=BATCH, sgd_lr=SGD_LR, weight_decay=0.3, follow_lr=follow)
    path, post = adabayes(sequence, BATCH, rates, SGD_LR, decay=0.3, follow=follow)
    np.testing.assert_allclose(run(optimizer, weight, sequence, rates), path, rtol=1e-12)
    np.testing.assert_allclose(variance(optimizer, weight), post, rtol=1e-12)


@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
def test_adabayes_fp_is_the_corrected_algorithm(rates: np.ndarray) -> None:
    sequence = gradients(60, 20)
    weight = parameter(np.ones(20))
    optimizer = AdaBayesFP([weight], lr=ETA, sgd_lr=SGD_LR, weight_decay=0.3, batch_size=BATCH)
    path, post = adabayes_fp(sequence, BATCH, rates, SGD_LR, decay=0.3)
    np.testing.assert_allclose(run(optimizer, weight, sequence, rates), path, rtol=1e-12)
    np.testing.assert_allclose(variance(optimizer, weight), post, rtol=1e-12)


def test_adabayes_fp_does_not_depend_on_the_batch_size() -> None:
    sequence = gradients(300, 20)
    weight = parameter(np.ones(20))
    ours = run(AdaBayesFP([weight], lr=ETA, sgd_lr=SGD_LR), weight, sequence)
    for batch in (128, 7):
        np.testing.assert_allclose(ours, adabayes_fp(sequence, batch, np.full(300, ETA), SGD_LR)[0], rtol=1e-12)


def test_adabayes_depends_on_the_batch_size_through_process_noise_and_information() -> None:
    """In units u = B sigma^2: u_pr = r u + eta_SGD (1 - r), r = exp(-B eta^2/eta_SGD); 1/u = 1/u_pr + B g^2."""
    sequence = gradients(200, 20)
    finals = []
    for batch in (1, 128):
        weight = parameter(np.ones(20))
        optimizer = AdaBayes([weight], lr=ETA, batch_size=batch, momentum=0.0)
        path = run(optimizer, weight, sequence)
        u, w = np.full(20, SGD_LR), np.ones(20)
        retain = math.exp(-batch * ETA**2 / SGD_LR)
        for g in sequence:
            u = 1 / (1 / (retain * u + SGD_LR * (1 - retain)) + batch * g**2)
            w = w - u * g
        np.testing.assert_allclose(path[-1], w, rtol=1e-12)
        finals.append(w)
    assert np.abs(finals[0] - finals[1]).max() > 1e-3


@pytest.mark.parametrize("sgd_lr", [SGD_LR, math.inf], ids=["finite sigma", "infinite sigma"])
def test_adabayes_settles_at_the_root_of_its_own_transition(sgd_lr: float) -> None:
    """For constant gradients with eta*rms from 1e-3 to 1e3; the slowest relaxes within 20/(2 eta rms) steps."""
    square = 10.0 ** np.arange(0, 13)
    weight = parameter(np.zeros(13))
    optimizer = AdaBayes([weight], lr=ETA, batch_size=BATCH, sgd_lr=sgd_lr)
    weight.grad = torch.tensor(np.sqrt(square) / BATCH)
    for _ in range(12_000):
        optimizer.step()
    np.testing.assert_allclose(variance(optimizer, weight), root(ETA, sgd_lr / BATCH, square), rtol=1e-9)


def test_the_fixed_point_for_infinite_sigma_has_its_closed_form() -> None:
    """sigma_post^2 = eta/|e| (sqrt(1 + x^2/4) - x/2), x = eta |e|; Adam's eta/|e| is 5.1 % too large at x = 0.1."""
    e = np.array([1.0, 10.0, 100.0, 1e3, 1e4])
    x = ETA * e
    np.testing.assert_allclose(root(ETA, math.inf, e**2), ETA / e * (np.sqrt(1 + x**2 / 4) - x / 2), rtol=1e-10)
    np.testing.assert_allclose((ETA / e / root(ETA, math.inf, e**2) - 1)[2], 0.0512, atol=5e-4)


def test_equation_21_is_the_fixed_point_to_first_order() -> None:
    """Its relative error is at most that of Adam, sqrt(1 + x^2/4) + x/2 - 1 at x = eta rms, up to order eta^2/sigma^2.

    With p = eta/(sigma^2 rms), N(y) = exp(asinh(y/2)) and r = exp(-eta^2/sigma^2), the ratio is N(x + p)/N(p), times a
    factor between r^1/2 and r^-1/2. It decreases in p from Adam's N(x), never below one. The slope of its logarithm is
    bounded by (1 - (1 + (x + p)^2/4)^-1/2)/2.
    """
    square = 10.0 ** np.arange(-6, 13)
    x = ETA * np.sqrt(square)
    weight = parameter(np.zeros(19))
    optimizer = AdaBayesFP([weight], lr=ETA, sgd_lr=SGD_LR, batch_size=BATCH)
    run(optimizer, weight, np.sqrt(square)[None].repeat(5, 0) / BATCH)
    ratio = variance(optimizer, weight) / root(ETA, SIGMA2, square)
    adam, p = np.sqrt(1 + x**2 / 4) + x / 2, ETA / (SIGMA2 * np.sqrt(square))
    factor, rounding = math.exp(ETA**2 / (2 * SIGMA2)), 1 + 1e-12
    fall = p * (1 - (1 + (x + p) ** 2 / 4) ** -0.5) / 2
    assert (ratio <= adam * factor * rounding).all()
    assert (ratio >= np.maximum(1, adam * np.exp(-fall)) / (factor * rounding)).all()


def test_sigma_is_stationary_for_any_learning_rate_without_evidence() -> None:
    """The exact step leaves sigma^2 invariant; the printed one diverges for eta^2 > 2 sigma^2."""
    for lr in (1e-3, 0.1, 10.0):
        weight = parameter(np.zeros(1))
        optimizer = AdaBayes([weight], lr=lr, batch_size=BATCH)
        run(optimizer, weight, np.zeros((100, 1)))
        np.testing.assert_allclose(variance(optimizer, weight), SIGMA2, rtol=1e-12)


def test_adabayes_fp_becomes_adamw() -> None:
    """First order in 1/sgd_lr: 7e-7 at 1e3, 7e-10 at 1e6; exact at infinity."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(50, dtype=torch.float64, generator=generator)
    curvature = torch.rand(50, dtype=torch.float64, generator=generator) + 0.1
    noise = 0.1 * torch.randn(300, 50, dtype=torch.float64, generator=generator)

    def trained(make) -> torch.Tensor:
        weight = torch.nn.Parameter(start.clone())
        optimizer = make([weight])
        for t in range(300):
            weight.grad = curvature * weight.detach() + noise[t]
            optimizer.step()
        return weight.detach()

    adamw = trained(lambda p: torch.optim.AdamW(p, lr=ETA, weight_decay=0.05, eps=0.0))
    difference = [
        (trained(partial(AdaBayesFP, lr=ETA, sgd_lr=sgd_lr, weight_decay=0.05)) - adamw).abs().max().item()
        for sgd_lr in (1e3, 1e6, math.inf)
    ]
    assert 1e-8 < difference[0] < 1e-6
    assert difference[1] < 1e-9
    assert difference[2] < 1e-12
    assert 500 < difference[0] / difference[1] < 2000


def test_adabayes_fp_becomes_sgd_with_averaged_gradients() -> None:
    sequence = gradients(300, 20)
    weight = parameter(np.ones(20))
    ours = run(AdaBayesFP([weight], lr=1e8, sgd_lr=SGD_LR), weight, sequence)
    w, m = np.ones(20), np.zeros(20)
    for t, g in enumerate(sequence, 1):
        m = 0.9 * m + 0.1 * g
        w = w - SGD_LR * m / (1 - 0.9**t)
    np.testing.assert_allclose(ours[-1], w, rtol=1e-10)


def test_adabayes_becomes_sgd_for_weak_gradients() -> None:
    sequence = 1e-9 * gradients(300, 20)
    weight = parameter(np.zeros(20))
    ours = run(AdaBayes([weight], lr=ETA, batch_size=BATCH, momentum=0.0), weight, sequence)
    np.testing.assert_allclose(ours[-1], -SGD_LR * sequence.sum(0), rtol=1e-8)


@pytest.mark.parametrize(("square", "ratio"), [(1e-4, 598.0), (1.0, 1130.0), (1e4, 10.6)])
def test_algorithm_1_as_printed_fails(square: float, ratio: float) -> None:
    """It prints sigma_post^2 = 1/(sigma_prior^2 + g^2), which gives learning rates up to a thousand times too large."""
    printed = SIGMA2
    for _ in range(10_000):
        prior = (1 - ETA**2 / (2 * SIGMA2)) ** 2 * printed + ETA**2
        printed = 1 / (prior + square)
    weight = parameter(np.zeros(1))
    optimizer = AdaBayes([weight], lr=ETA, batch_size=BATCH)
    run(optimizer, weight, np.full((10_000, 1), math.sqrt(square) / BATCH))
    np.testing.assert_allclose(printed / variance(optimizer, weight), ratio, rtol=0.01)


def test_algorithm_2_as_printed_fails() -> None:
    """Line 11 assigns 1827, the inverse of sigma_post^2, at <g^2> = 1."""
    weight = parameter(np.zeros(1))
    optimizer = AdaBayesFP([weight], lr=ETA, sgd_lr=SGD_LR, batch_size=BATCH)
    run(optimizer, weight, np.full((10, 1), 1 / BATCH))
    printed = 1 / (2 * SIGMA2) + math.sqrt(1 / (4 * SIGMA2**2) + 1 / ETA**2)
    np.testing.assert_allclose(printed, 1827, rtol=1e-3)
    np.testing.assert_allclose(variance(optimizer, weight), 5.47266e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_without_momentum_no_step_exceeds_half_the_prior_deviation(dtype: torch.dtype) -> None:
    """v G = G/(1/v_pr + G^2) <= sqrt(v_pr)/2, attained at G = 1/sqrt(v_pr), even for a sudden large gradient."""
    magnitudes = torch.logspace(-30, 30, 601, dtype=torch.float64)
    for lr, batch_size in ((ETA, BATCH), (1e-6, 10_000), (1.0, 1)):
        weight = torch.nn.Parameter(torch.zeros(601, dtype=dtype))
        optimizer = AdaBayes([weight], lr=lr, batch_size=batch_size, momentum=0.0)
        weight.grad = torch.zeros_like(weight)
        for _ in range(50):
            optimizer.step()
        weight.grad = magnitudes.to(dtype)
        optimizer.step()
        bound = math.sqrt(SGD_LR / batch_size) / 2
        steps = weight.detach().double().abs()
        assert bool(torch.isfinite(steps).all())
        assert steps.max().item() <= bound * (1 + 1e-5)
        if lr == ETA:
            assert steps.max().item() > 0.99 * bound


def test_the_papers_filter_hardly_reacts_to_a_step_decay() -> None:
    """lr falls tenfold: with follow_lr, sigma_post^2 is at its new value at once; without, after many steps."""
    square = 1e2
    values = {}
    for follow in (True, False):
        weight = parameter(np.zeros(1))
        optimizer = AdaBayes([weight], lr=ETA, batch_size=BATCH, follow_lr=follow)
        gradient = np.full((1, 1), math.sqrt(square) / BATCH)
        run(optimizer, weight, gradient.repeat(3000, 0))
        optimizer.param_groups[0]["lr"] = ETA / 10
        run(optimizer, weight, gradient)
        values[follow, 1] = variance(optimizer, weight)[0]
        run(optimizer, weight, gradient.repeat(99, 0))
        values[follow, 100] = variance(optimizer, weight)[0]
    target = root(ETA / 10, SIGMA2 / 10, np.array([square]))[0]
    assert values[True, 1] / target == pytest.approx(1, rel=0.01)
    assert values[True, 100] / target == pytest.approx(1, rel=0.01)
    assert values[False, 100] / target > 5


def test_centred_gradients_give_the_squared_rule_at_the_first_step_and_ignore_a_constant() -> None:
    """A constant gradient carries no information about curvature: sigma_post^2 returns to sigma^2."""
    plain, centred = parameter(np.ones(3)), parameter(np.ones(3))
    gradient = np.array([[1e-3, 0.1, 10.0]])
    a = AdaBayes([plain], lr=0.01, batch_size=BATCH)
    b = AdaBayes([centred], lr=0.01, batch_size=BATCH, fisher="centered")
    np.testing.assert_array_equal(run(a, plain, gradient), run(b, centred, gradient))
    run(b, centred, gradient.repeat(1000, 0))
    np.testing.assert_allclose(variance(b, centred), SIGMA2, rtol=1e-9)


def test_the_posterior_says_what_it_needs() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="pass batch_size= to AdaBayesFP"):
        AdaBayesFP(model.parameters()).posterior(model)
    optimizer = AdaBayes(model.parameters(), batch_size=4)
    with pytest.raises(ValueError, match="is not in the model"):
        optimizer.posterior(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"scale must be a finite positive number, got 0\."):
        optimizer.posterior(model, scale=0.0)
    untouched = optimizer.posterior(model, scale=2.0).variance()["weight"]
    torch.testing.assert_close(untouched, torch.full((2, 2), 2 * 0.1 / 4))
    for make in (AdaBayes, AdaBayesFP):  # the prior does not depend on later learning rates
        for options in ({"lr": 0.0}, {"sgd_lr": math.inf}, {"lr": 0.0, "sgd_lr": math.inf}):
            prior = make(model.parameters(), batch_size=4, **options).posterior(model).variance()["weight"]
            torch.testing.assert_close(prior, torch.full((2, 2), 0.1 / 4))


def test_frozen_weights_are_not_part_of_the_posterior() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = AdaBayes(model.parameters(), batch_size=4)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert set(optimizer.posterior(model).mean) == {"1.weight", "1.bias"}


def test_the_fixed_point_rule_is_bounded_for_any_gradient() -> None:
    """Debiased averages at the first step: |step| <= lr, for gradients from denormals to the largest float."""
    weight = torch.nn.Parameter(torch.zeros(81))
    optimizer = AdaBayesFP([weight], lr=ETA, sgd_lr=math.inf)
    weight.grad = torch.logspace(-42, 38, 81, dtype=torch.float64).float()
    optimizer.step()
    assert weight.abs().max().item() <= ETA * (1 + 1e-5)
    assert weight.abs()[28:].min().item() >= ETA * (1 - 1e-5)  # from 1e-14 on
    optimizer.step()
    assert bool(torch.isfinite(weight).all())


def test_centred_gradients_need_a_finite_sgd_lr() -> None:
    with pytest.raises(ValueError, match="fisher='centered' needs a finite sgd_lr"):
        AdaBayesFP([parameter([0.0])], sgd_lr=math.inf, fisher="centered")


def test_averages_that_are_switched_on_late_start_at_the_gradient() -> None:
    weight = parameter([0.0])
    optimizer = AdaBayesFP([weight], lr=ETA, sgd_lr=math.inf, betas=(0.0, 0.999))
    constant = np.full((50, 1), 3.0)
    run(optimizer, weight, constant)
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    path = run(optimizer, weight, constant)
    np.testing.assert_allclose(np.diff(path[:, 0]), -ETA, rtol=1e-9)


@pytest.mark.parametrize("rule", [partial(AdaBayesFP, sgd_lr=math.inf), partial(AdaBayes, batch_size=4)])
def test_an_average_that_is_switched_off_begins_anew(rule: Any) -> None:
    """Gradients of 1 before a pause count no more after it."""
    weight = parameter([0.0])
    optimizer = rule([weight], lr=ETA)
    (group,) = optimizer.param_groups
    name = "betas" if "betas" in group else "momentum"
    for momentum, gradient in [(0.9, 1.0)] * 3 + [(0.0, -1.0)] * 2 + [(0.9, -2.0), (0.9, -2.0)]:
        group[name] = (momentum, 0.999) if name == "betas" else momentum
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
        assert ("momentum" in optimizer.state[weight]) == (momentum > 0)
        if momentum:
            torch.testing.assert_close(
                optimizer.state[weight]["momentum"], torch.full_like(weight, gradient), rtol=1e-12, atol=0
            )


def test_the_posterior_at_the_end_of_a_schedule_is_that_of_the_last_step() -> None:
    model = torch.nn.Linear(2, 2, dtype=torch.float64)
    optimizer = AdaBayes(model.parameters(), batch_size=4)
    model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    optimizer.step()
    before = optimizer.posterior(model).variance()["weight"]
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    torch.testing.assert_close(optimizer.posterior(model).variance()["weight"], before, rtol=1e-12, atol=0)
