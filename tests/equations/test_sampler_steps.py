"""The step of a sampler in units of the loss: noise, number of losses and curvature, and what is said of them."""

from __future__ import annotations

import os
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from bayesgrad.likelihoods import Gaussian, named
from bayesgrad.noise import generator_of
from bayesgrad.samplers import SNGD, Diverged, Langevin
from bayesgrad.samplers.curvature import largest_eigenvalue

D = torch.float64
N, T = 40, 5
REAL = os.environ.get("BAYESGRAD_DATA")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def regression(noise: float) -> tuple[nn.Linear, Tensor, Tensor, Tensor, Tensor]:
    """A model, its data, and optimum and Hessian of the mean of |f - y|^2/(2 noise) over flat weights."""
    model, x = nn.Linear(3, 2, bias=False, dtype=D), normal(N, 3)
    y = x @ normal(3, 2, seed=1) + 0.3 * normal(N, 2, seed=2)
    hessian = torch.kron(torch.eye(2, dtype=D), x.T @ x / N) / noise
    return model, x, y, torch.linalg.lstsq(x, y).solution.T.flatten(), hessian


def half_square(outputs: Tensor, y: Tensor, noise: float) -> Tensor:
    return (outputs - y).square().sum(-1).mean() / (2 * noise)


@pytest.mark.parametrize("fisher", ["exact", "sampled"])
@pytest.mark.parametrize("noise", [1.0, 0.1, 0.05])
def test_a_step_without_noise_contracts_a_linear_gaussian_posterior_by_lr(noise: float, fisher: str) -> None:
    """w - w* shrinks by 1 - lr for G = H. With the Fisher of unit noise it would by 1 - lr/noise, which is -1 at last.

    The sampled Fisher is that of its labels, which it gets again from the seed.
    """
    model, x, y, optimum, hessian = regression(noise)
    likelihood = Gaussian(noise_scale=noise**0.5)
    options = dict(num_data=N, metric="fisher", damping=0.0, prior_precision=0.0, fisher=fisher, seed=0)
    sampler = Langevin(model, 0.1, temperature=0.0, likelihood=likelihood, limit_step=False, **options)
    before = model.weight.detach().flatten() - optimum
    outputs = model(x)
    sampler.observe(outputs)
    half_square(outputs, y, noise).backward()
    sampler.step()
    (metric,) = [entry["fisher"] for entry in sampler.state.values() if "fisher" in entry]
    if fisher == "sampled":
        labels = likelihood.sample(outputs, generator_of(0, 0))
        each = torch.einsum("no,ni->noi", (outputs.detach() - labels) / noise, x).flatten(1)
        torch.testing.assert_close(metric, each.T @ each / N, rtol=1e-12, atol=1e-12)
        assert 0.3 < float(metric.trace() / hessian.trace()) < 3
        return
    torch.testing.assert_close(metric, hessian, rtol=1e-12, atol=1e-12)
    after = model.weight.detach().flatten() - optimum
    torch.testing.assert_close(after, 0.9 * before, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("correction", [None, "jeffreys"])
@pytest.mark.parametrize("metric", ["fisher", "diagonal", "kronecker"])
def test_the_metric_of_a_mean_over_tokens_is_the_hessian_of_that_mean(metric: str, correction: str | None) -> None:
    """Logits (N, T, C) and (N T, C) with the same mean loss have the same metric, step and correction.

    For a linear model the Fisher is the Hessian of the loss, which autograd gives.
    """
    x, y = normal(N, T, 3), torch.randint(4, (N, T), generator=torch.Generator().manual_seed(1))
    found = []
    for rows, labels in ((x, y), (x.flatten(0, 1), y.flatten())):
        torch.manual_seed(0)
        model = nn.Linear(3, 4, dtype=D)
        options = dict(num_data=N * T, metric=metric, damping=0.1, correction=correction, seed=0)
        sampler = Langevin(model, 0.1, **options)
        outputs = model(rows)
        sampler.observe(outputs)
        cross_entropy(outputs.flatten(0, -2), labels.flatten()).backward()
        start = nn.utils.parameters_to_vector(model.parameters()).detach()
        sampler.step()
        found.append(nn.utils.parameters_to_vector(model.parameters()).detach() - start)
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)
    if metric != "fisher" or correction:
        return

    def loss(w: Tensor) -> Tensor:
        weight, bias = w[:12].view(4, 3), w[12:]
        return cross_entropy((x @ weight.T + bias).flatten(0, 1), y.flatten())

    (stored,) = [entry["fisher"] for entry in sampler.state.values() if "fisher" in entry]
    hessian = torch.autograd.functional.hessian(loss, start)
    torch.testing.assert_close(stored, hessian, rtol=1e-10, atol=1e-12)


def test_losses_per_example_can_be_given() -> None:
    """The loss is a mean over 3 outputs of a Gaussian, whose metric is that of their sum unless it is told."""
    for told, scale in ((None, 1.0), (3, 3.0)):
        model, x, _, _, _ = regression(1.0)
        sampler = Langevin(
            model, num_data=N, metric="fisher", damping=0.1, likelihood="gaussian", losses_per_example=told
        )
        sampler.observe(model(x))
        model(x).square().mean().backward()
        sampler.step()
        (metric,) = [entry["fisher"] for entry in sampler.state.values() if "fisher" in entry]
        torch.testing.assert_close(scale * metric, regression(1.0)[4], rtol=1e-12, atol=1e-12)


# --- the check of a step ---


def chain(sampler, model: nn.Module, x: Tensor, y: Tensor, noise: float, steps: int, given: bool) -> list[Tensor]:
    draws = []
    for _ in range(steps):
        sampler.zero_grad()
        outputs = model(x)
        loss = half_square(outputs, y, noise)
        sampler.observe(outputs, loss=loss if given else None)
        loss.backward()
        sampler.step()
        draws.append(model.weight.detach().flatten().clone())
    return draws


def test_a_loss_on_another_scale_is_named_and_its_step_is_shortened() -> None:
    """With the metric of unit noise, lr = 0.1 and s^2 = 0.05, the step would be 20 times too long: lr H/G = 2.

    Steps are divided by 20, which makes them those of the right likelihood.
    """
    model, x, y, _, _ = regression(0.05)
    start = model.weight.detach().clone()
    options = dict(num_data=N, metric="fisher", damping=0.0, prior_precision=0.0, seed=0)
    sampler = Langevin(model, 0.1, likelihood="gaussian", **options)
    message = (
        "the loss has 20 times the curvature of likelihood='gaussian', whose Fisher is the metric, so that steps are "
        "shortened to lr=0.005: a loss of squared errors over 2 s^2 needs likelihood=Gaussian(noise_scale=s), "
        "here s=0.224."
    )
    with pytest.warns(UserWarning, match=re.escape(message)):
        wrong = chain(sampler, model, x, y, 0.05, 20, True)
    with torch.no_grad():
        model.weight.copy_(start)
    right = chain(
        Langevin(model, 0.1, likelihood=Gaussian(0.05**0.5), **options), model, x, y, 0.05, 20, True
    )  # without a warning
    torch.testing.assert_close(torch.stack(wrong), torch.stack(right), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("noise", "words"), [(0.1, "makes variances 2 times too large"), (0.05, "the chain diverges")])
def test_without_the_loss_successive_gradients_show_it(noise: float, words: str) -> None:
    """r'(g' - g) = κ r'G s exactly, for the gradients of all data and H = κ G."""
    model, x, y, _, _ = regression(noise)
    options = dict(num_data=N, metric="fisher", damping=0.0, prior_precision=0.0, seed=0)
    with pytest.warns(UserWarning, match=rf"the loss has {1 / noise:g} times .*{words} .*here s={noise**0.5:.3g}\."):
        chain(Langevin(model, 0.1, likelihood="gaussian", **options), model, x, y, noise, 12, False)
    chain(Langevin(model, 0.1, likelihood=Gaussian(noise**0.5), **options), model, x, y, noise, 40, False)


def test_minibatch_noise_alone_raises_no_alarm() -> None:
    """Gradients of 4 of 40 examples: differences along whole steps would show a curvature of 1/lr."""
    model, x, y, _, _ = regression(1.0)
    generator = torch.Generator().manual_seed(0)
    sampler = Langevin(model, 0.1, num_data=N, metric="fisher", damping=0.0, likelihood="gaussian", seed=0)
    for _ in range(300):
        sampler.zero_grad()
        sampler.observe(model(x))
        batch = torch.randperm(N, generator=generator)[:4]
        half_square(model(x[batch]), y[batch], 1.0).backward()
        sampler.step()


def test_minibatches_on_another_scale_are_warned_of_or_refused() -> None:
    model, x, y, _, _ = regression(1.0)
    options = dict(num_data=N, batch_size=2, metric="fisher", damping=0.0)
    with pytest.warns(UserWarning, match=r"has 0\.5 times .*the temperature is not that of temperature\(\): .*s=1\.41"):
        chain(SNGD(model, 0.1, likelihood="gaussian", **options), model, x, y, 2.0, 1, True)
    sampler, before = SNGD(model, 0.1, likelihood="gaussian", **options), model.weight.detach().clone()
    with pytest.raises(ValueError, match=r"has 25 times the curvature .*, and lr=0\.1 times that must be below 2: "):
        chain(sampler, model, x, y, 0.04, 1, True)
    assert torch.equal(model.weight, before)
    assert not any("fisher" in entry for entry in sampler.state.values())


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "poisson", "gaussian"])
def test_the_mean_loss_of_a_likelihood_is_on_its_scale_and_the_sum_is_not(likelihood: str) -> None:
    kind, x = named(likelihood), normal(N, 3)
    for sums in (False, True):
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        sampler = Langevin(model, num_data=N, likelihood=likelihood, damping=0.5)
        outputs = model(x)
        labels = kind.sample(outputs, torch.Generator().manual_seed(0))
        loss = kind.loss(outputs, labels).sum() if sums else kind.loss(outputs, labels).mean()
        sampler.observe(outputs, loss=loss)
        loss.backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sampler.step()
        assert [f"the loss has {N} times" in str(one.message) for one in caught] == [True] * sums


def test_micro_batches_add_up_and_mse_loss_is_told_apart() -> None:
    model, x, y, _, _ = regression(1.0)
    options = dict(num_data=N, metric="fisher", damping=0.0, likelihood="gaussian")
    sampler = Langevin(model, 0.1, **options)
    for half in range(2):
        rows = slice(20 * half, 20 * half + 20)
        outputs = model(x[rows])
        loss = half_square(outputs, y[rows], 1.0) / 2
        sampler.observe(outputs, loss=loss)
        loss.backward()
    sampler.step()  # no warning
    sampler = Langevin(model, 0.1, **options)
    loss = mse_loss(outputs := model(x)[:, :1], y[:, :1]) * 2  # over one of two outputs: the same Hessian as that of
    sampler.observe(model(x), loss=loss)  # other outputs, which show nothing of the loss
    loss.backward()
    sampler.step()
    assert outputs.requires_grad
    one = nn.Linear(3, 1, dtype=D)
    sampler = Langevin(one, 0.1, **options)
    loss = mse_loss(outputs := one(x), y[:, :1])
    sampler.observe(outputs, loss=loss)
    loss.backward()
    with pytest.warns(UserWarning, match=r"the loss has 2 times the curvature .* here s=0\.707\."):
        sampler.step()


@pytest.mark.parametrize("metric", ["identity", "fisher", "diagonal", "kronecker", "function"])
def test_the_largest_eigenvalue_is_that_of_dense_algebra_and_shortens_steps(metric: str) -> None:
    """lr_eff = 1/λ for λ > 1/lr, of G^-1 (H + δ/N) with dense matrices; a state dict has it."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 2, bias=False, dtype=D), 9 * normal(N, 3), normal(N, 2, seed=3)
    hessian = torch.kron(torch.eye(2, dtype=D), x.T @ x / N) + 2.0 / N * torch.eye(6, dtype=D)
    given = (lambda w: torch.linspace(1, 2, len(w), dtype=w.dtype)) if metric == "function" else metric
    lr, damping = 0.5 if metric in ("identity", "function") else 0.2, 0.01
    options = dict(num_data=N, prior_precision=2.0, temperature=0.0, damping=damping, likelihood="gaussian", seed=0)
    sampler = Langevin(model, lr, metric=given, **options)
    start = model.weight.detach().flatten().clone()
    outputs = model(x)
    loss = half_square(outputs, y, 1.0)
    sampler.observe(outputs, loss=loss)
    loss.backward()
    moment = x.T @ x / N
    dense = {
        "identity": torch.eye(6, dtype=D),
        "fisher": torch.kron(torch.eye(2, dtype=D), moment),
        "diagonal": torch.kron(torch.eye(2, dtype=D), torch.diag(moment.diagonal())),
        "kronecker": torch.kron(torch.eye(2, dtype=D), moment),
        "function": torch.diag(torch.linspace(1, 2, 6, dtype=D)),
    }[metric] + damping * torch.eye(6, dtype=D)
    largest = float(torch.linalg.eigvals(torch.linalg.solve(dense, hessian)).real.max())
    sampler.step()
    found = sampler.param_groups[0]["curvature"]
    assert 0.9 * largest < found < (1 + 1e-9) * largest
    taken = min(lr, 1 / found)
    gradient = hessian @ start - (y.T @ x / N).flatten()
    expected = -taken * torch.linalg.solve(dense, gradient)
    torch.testing.assert_close(model.weight.detach().flatten() - start, expected, rtol=1e-8, atol=1e-12)
    assert (taken < lr) == (metric in ("identity", "function"))
    assert sampler.state_dict()["param_groups"][0]["curvature"] == found


class NoDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> Tensor:
        raise RuntimeError("this has no derivative")


class OnceDifferentiable(torch.autograd.Function):
    """Half the mean square of a tensor, without second derivatives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().mean() / 2

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return NoDerivative.apply(error * x / x.numel())


def test_a_curvature_that_cannot_be_measured_is_said_once_and_mistakes_raise() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1).double(), torch.randn(8, 3, dtype=D)
    sampler = Langevin(model, num_data=8, likelihood="gaussian", seed=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            sampler.zero_grad()
            outputs = model(x)
            loss = OnceDifferentiable.apply(outputs)
            sampler.observe(outputs, loss=loss)
            loss.backward()
            sampler.step()
    (message,) = [str(one.message) for one in caught]
    assert message.startswith("the curvature of the loss is unknown, so that its scale is not compared")
    outputs = model(x)
    stale = Langevin(model, num_data=8, likelihood="gaussian", update_every=100, seed=0)
    stale.observe(outputs)
    outputs.square().mean().div(2).backward()
    stale.step()
    outputs = model(x)
    with pytest.raises(ValueError, match="weights must"):  # step 2 measures, but does not update the metric
        stale.observe(outputs, loss=outputs.square().mean() / 2, weights=torch.ones(5))


def test_power_iteration_converges_from_below_also_beside_larger_negative_eigenvalues() -> None:
    for size, shift in ((1, 0.1), (1, -1.0), (3, 0.1), (40, 0.1), (40, 2.0)):
        root, other = normal(2, size, size)
        metric = root @ root.T / size + torch.eye(size, dtype=D)
        hessian = other @ other.T / size - shift * metric
        exact = float(torch.linalg.eigvals(torch.linalg.solve(metric, hessian)).real.max())
        start = normal(size, seed=5)
        maps = partial(torch.mv, hessian), partial(torch.linalg.solve, metric)
        found = [largest_eigenvalue(*maps, start, rounds) for rounds in (16, 200)]
        assert found[0] <= found[1] + 1e-9 <= exact + 2e-9
        assert found[0] > exact - 0.1 * (abs(exact) + shift)
        assert found[1] == pytest.approx(exact, rel=1e-5)


# --- likelihoods that carry their noise ---


def test_a_gaussian_with_its_noise_is_the_normal_density() -> None:
    f, y, s = normal(7, 2), normal(7, 2, seed=1), 0.3
    kind = Gaussian(noise_scale=s)
    exact = torch.distributions.Normal(f, s).log_prob(y).sum(1)
    torch.testing.assert_close(kind.log_likelihood(f, y), exact, rtol=1e-12, atol=1e-12)
    f.requires_grad_()
    slope = torch.autograd.grad(kind.loss(f, y).sum(), f)[0]
    torch.testing.assert_close(kind.residual(f, y), slope, rtol=1e-12, atol=1e-12)
    total = sum(s.flatten(1)[:, :, None] * s.flatten(1)[:, None] for s in kind.hessian_roots(f))
    torch.testing.assert_close(total, torch.eye(2, dtype=D).expand(7, 2, 2) / s**2, rtol=1e-12, atol=1e-12)
    v = normal(7, 2, seed=2)
    torch.testing.assert_close(kind.hessian_product(f, v), v / s**2, rtol=1e-12, atol=1e-12)
    draws = kind.sample(torch.zeros(20_000, 1, dtype=D), torch.Generator().manual_seed(0))
    assert abs(float(draws.std()) / s - 1) < 5 / (2 * 20_000) ** 0.5
    assert named(kind.name) == kind
    assert named("gaussian") == Gaussian()
    assert named("gaussian", 0.3) == named(Gaussian(0.3), 0.3) == kind


def test_refusals_of_likelihoods() -> None:
    with pytest.raises(
        ValueError, match=r"Gaussian\(noise_scale=0.3\) has its own noise and cannot have noise_scale=0"
    ):
        named(Gaussian(0.3), 0.5)
    with pytest.raises(ValueError, match="noise_scale must be a finite positive number, got 0"):
        Gaussian(0.0)
    for odd in ("gauss", "gaussian(noise_scale=)", 3, None):
        with pytest.raises(ValueError, match=r"likelihood must be one of 'categorical'.*, or an object such as"):
            named(odd)  # pyright: ignore[reportArgumentType]


# --- defaults ---


def table(folder: str | None) -> tuple[Tensor, Tensor]:
    """UCI concrete where a folder has it, else 1030 rows of correlated columns with long tails; standardised."""
    if folder is None:
        columns = normal(1030, 8) @ normal(8, 8, seed=1) + normal(1030, 8, seed=2).pow(3)
        strength = (columns[:, :3].tanh() @ normal(3, 1, seed=3) + 0.3 * normal(1030, 1, seed=4)).exp()
        rows = torch.cat([columns, strength], 1)
    else:
        rows = torch.as_tensor(np.loadtxt(Path(folder) / "uci_regression" / "concrete" / "data.txt"))
    rows = (rows - rows.mean(0)) / rows.std(0)
    return rows[:, :-1], rows[:, -1:]


FOLDERS = [None, pytest.param(REAL, marks=pytest.mark.skipif(not REAL, reason="BAYESGRAD_DATA names no folder"))]


@pytest.mark.parametrize("folder", FOLDERS, ids=["made", "concrete"])
@pytest.mark.parametrize("noise", [1.0, 0.3])
@pytest.mark.parametrize("given", [True, False])
def test_defaults_sample_a_regression_network_from_its_initial_weights(
    given: bool, noise: float, folder: str | None
) -> None:
    """8-50-1 units, all defaults, with the loss and without it: no warning, and the loss falls and stays low.

    lr = 0.1 with the identity, and nothing that shortens steps, diverges for noise of 0.3: from most initial weights.
    """
    x, y = table(folder)

    def losses(**options: Any) -> list[float]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 50), nn.ReLU(), nn.Linear(50, 1)).double()
        sampler = Langevin(model, num_data=len(x), likelihood=Gaussian(noise), seed=0, **options)
        found = []
        for _ in range(40):
            sampler.zero_grad()
            outputs = model(x)
            loss = half_square(outputs, y, noise**2)
            sampler.observe(outputs, loss=loss if given else None)
            loss.backward()
            sampler.step()
            found.append(loss.item())
        return found

    found = losses()
    assert max(found) == found[0]
    assert max(found[-10:]) < found[0] / 2
    if noise < 1 and not given:
        with pytest.raises(Diverged):
            losses(metric="identity", limit_step=False)
