"""DenseFilter against its equations, closed forms, filterpy's Kalman filter and the scalar filters."""

from __future__ import annotations

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn import functional as F

from bayesgrad.optim import AdaBayes, DenseFilter

D = torch.float64
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def flat(model: nn.Module) -> np.ndarray:
    return nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()


def sum_gradient(model: nn.Module, count: int) -> np.ndarray:
    return count * torch.cat([p.grad.flatten() for p in model.parameters()]).numpy()


def posterior_mean(model: nn.Module, optimizer: DenseFilter) -> np.ndarray:
    with optimizer.mode(training=False):
        return flat(model)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def positive(size: int, seed: int) -> Tensor:
    root = random(size, size, seed=seed)
    return root @ root.T / size + 0.1 * torch.eye(size, dtype=D)


def half_squares(outputs: Tensor, y: Tensor) -> Tensor:
    """The mean over examples of the Gaussian negative log-likelihood."""
    return 0.5 * (outputs - y).square().flatten(1).sum(1).mean()


class Odd(nn.Module):
    """Layers, a raw parameter, one that is used twice, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 3)
        self.tied = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.scale = nn.Parameter(torch.tensor([0.7, 1.3, 1.1]))
        self.unused = nn.Parameter(torch.ones(2))
        self.to(D)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.tied(torch.tanh(self.first(x))))
        return self.tied(self.norm(hidden) * self.scale) + hidden @ self.tied.weight


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).to(D)


def labelled(n: int, seed: int) -> tuple[Tensor, Tensor]:
    return random(n, 4, seed=seed), torch.randint(0, 3, (n,), generator=torch.Generator().manual_seed(seed))


def jacobians(model: nn.Module, x: Tensor) -> Tensor:
    """Jacobians of each example's outputs with respect to all weights, (N, outputs, weights)."""
    params = {name: p.detach() for name, p in model.named_parameters()}

    def outputs(params: dict[str, Tensor], example: Tensor) -> Tensor:
        return functional_call(model, params, (example[None],))[0]

    found = vmap(jacrev(outputs), in_dims=(None, 0))(params, x)
    return torch.cat([found[name].flatten(2) for name in params], 2).detach()


def per_example(model: nn.Module, x: Tensor, y: Tensor) -> np.ndarray:
    """Gradients of each example's cross-entropy, (N, weights)."""
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, Tensor], example: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, params, (example[None],)), label[None])

    found = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)
    return torch.cat([found[name].flatten(1) for name in params], 1).detach().numpy()


# --- the equations ---


def test_rank_one_steps_in_numpy() -> None:
    """The corrected equations, transcribed, with the exact Ornstein-Uhlenbeck step and decoupled decay."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).to(D)
    lr, sigma, decay = 0.3, 0.7, 0.1
    optimizer = DenseFilter(
        model, lr, batch_size=1, prior_std=sigma, likelihood="bernoulli", fisher="empirical", weight_decay=decay
    )
    r = math.exp(-(lr**2) / sigma**2)
    S = sigma**2 * np.eye(4)
    for t in range(6):
        x, y = random(1, 3, seed=t), torch.tensor([[float(t % 2)]], dtype=D)
        mu, error = flat(model), (model(x).sigmoid() - y).item()
        e = error * np.append(x.numpy(), 1.0)
        optimizer.zero_grad()
        outputs = model(x)
        optimizer.observe(outputs, labels=y)
        F.binary_cross_entropy_with_logits(outputs, y).backward()
        optimizer.step()
        S = S - np.outer(S @ e, S @ e) / (1 + e @ S @ e)
        mu = mu - S @ e
        np.testing.assert_allclose(posterior_mean(model, optimizer), mu, **CLOSE)
        np.testing.assert_allclose(optimizer.covariance().numpy(), S, **CLOSE)
        np.testing.assert_allclose(flat(model), (1 - lr * decay) * math.sqrt(r) * mu, **CLOSE)
        S = r * S + sigma**2 * (1 - r) * np.eye(4)


@pytest.mark.parametrize("prior_std", [0.5, math.inf])
@pytest.mark.parametrize("size", [2, 40], ids=["fewer columns than weights", "more columns than weights"])
def test_batches_in_the_information_form(size: int, prior_std: float) -> None:
    """1/S_post = 1/S_prior + sum_j J_j'(diag p - p p')J_j, by matrix inverses, which the filter does not use."""
    model = mlp()
    optimizer = DenseFilter(model, 0.05, batch_size=size, prior_std=prior_std)
    variance = 0.1 / size if math.isinf(prior_std) else prior_std**2
    S = variance * np.eye(27)
    r = math.exp(-(0.05**2) / prior_std**2)
    for t in range(4):
        x, y = labelled(size, t)
        mu, J, p = flat(model), jacobians(model, x).numpy(), model(x).softmax(1).detach().numpy()
        hessian = np.einsum("nc,cd->ncd", p, np.eye(3)) - np.einsum("nc,nd->ncd", p, p)
        optimizer.zero_grad()
        outputs = model(x)
        optimizer.observe(outputs)
        F.cross_entropy(outputs, y).backward()
        G = sum_gradient(model, size)
        optimizer.step()
        S = np.linalg.inv(np.linalg.inv(S) + np.einsum("nci,ncd,ndj->ij", J, hessian, J))
        mu = mu - S @ G
        np.testing.assert_allclose(optimizer.covariance().numpy(), S, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(posterior_mean(model, optimizer), mu, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(flat(model), math.sqrt(r) * mu, rtol=1e-9, atol=1e-11)
        S = r * S + (0.05**2 if math.isinf(prior_std) else variance * (1 - r)) * np.eye(27)


@pytest.mark.parametrize("batch", [1, 4, 20])
def test_linear_regression_without_drift_is_conjugate(batch: int) -> None:
    """One pass at lr = 0: precision I/sigma^2 + X'X and mean precision^-1 (X'y + w_0/sigma^2), in any batches."""
    torch.manual_seed(0)
    model = nn.Linear(5, 1, bias=False).to(D)
    start, X, y = flat(model), random(20, 5, seed=1), random(20, 1, seed=2)
    optimizer = DenseFilter(model, lr=0.0, batch_size=batch, prior_std=2.0, likelihood="gaussian")
    for part in torch.arange(20).split(batch):
        optimizer.zero_grad()
        outputs = model(X[part])
        optimizer.observe(outputs)
        half_squares(outputs, y[part]).backward()
        optimizer.step()
    precision = np.eye(5) / 4 + (X.T @ X).numpy()
    mean = np.linalg.solve(precision, (X.T @ y).numpy()[:, 0] + start / 4)
    np.testing.assert_allclose(optimizer.covariance().numpy(), np.linalg.inv(precision), **CLOSE)
    np.testing.assert_allclose(flat(model), mean, **CLOSE)
    np.testing.assert_allclose(posterior_mean(model, optimizer), mean, **CLOSE)


# --- peers ---


def drifts(kind: str) -> tuple[dict, np.ndarray, np.ndarray, np.ndarray, int]:
    """Options of the filter, and filterpy's F, Q and first P; eight weights, with or without latent values."""
    lr, sigma, eye = 0.3, 0.8, np.eye(8)
    if kind == "random walk":
        return {"lr": lr}, eye, lr**2 * eye, 0.1 / 5 * eye, 8
    if kind == "Ornstein-Uhlenbeck":
        r = math.exp(-(lr**2) / sigma**2)
        return {"lr": lr, "prior_std": sigma}, math.sqrt(r) * eye, sigma**2 * (1 - r) * eye, sigma**2 * eye, 8
    size = 8 if kind == "general" else 16
    A, Q, P = 0.2 * random(size, size, seed=5), positive(size, 6), positive(size, 7)
    return {"transition": (A, Q), "prior_covariance": P}, np.eye(size) - A.numpy(), Q.numpy(), P.numpy(), size


@pytest.mark.parametrize("kind", ["random walk", "Ornstein-Uhlenbeck", "general", "general with latent values"])
def test_linear_models_with_gaussian_noise_are_filtered_as_by_filterpy(kind: str) -> None:
    KalmanFilter = pytest.importorskip("filterpy.kalman").KalmanFilter
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(D)
    options, transition, noise, first, size = drifts(kind)
    optimizer = DenseFilter(model, batch_size=5, likelihood="gaussian", **options)
    kalman = KalmanFilter(dim_x=size, dim_z=10)
    kalman.x[:8, 0] = flat(model)
    kalman.P, kalman.F, kalman.Q, kalman.R = first, transition, noise, np.eye(10)
    for t in range(8):
        x, y = random(5, 3, seed=t), random(5, 2, seed=100 + t)
        optimizer.zero_grad()
        outputs = model(x)
        optimizer.observe(outputs)
        half_squares(outputs, y).backward()
        optimizer.step()
        # W is (out, in), row by row, then b; observations are example by example.
        H = [np.kron(np.eye(2), row) for row in x.numpy()]
        H = np.concatenate([np.concatenate(H), np.tile(np.eye(2), (5, 1)), np.zeros((10, size - 8))], 1)
        kalman.update(y.numpy().reshape(10, 1), H=H)
        np.testing.assert_allclose(posterior_mean(model, optimizer), kalman.x[:8, 0], rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(optimizer.covariance().numpy(), kalman.P[:8, :8], rtol=1e-9, atol=1e-11)
        kalman.predict()
        np.testing.assert_allclose(flat(model), kalman.x[:8, 0], rtol=1e-9, atol=1e-11)
    entry = optimizer.state[model.weight]
    np.testing.assert_allclose(entry["mean"].numpy()[8:], np.linalg.solve(transition, kalman.x)[8:, 0], rtol=1e-8)


# --- the scalar filters ---


def test_weights_with_momentum_of_their_own_follow_the_scalar_equations() -> None:
    """Three weights, each with the gradient of one example of the batch only."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False).to(D)
    eta, eta_p, eta_w, sigma = 0.1, 0.2, 0.03, 0.9
    cw = 1 - (eta**2 + eta_w**2) / (2 * sigma**2)
    sww, swp, spp = (
        np.full(3, v) for v in (sigma**2, eta * (1 - eta_p) / (2 - eta_p), eta_p / (2 - eta_p))
    )  # posterior
    x, p = flat(model), np.zeros(3)
    move, noise = np.array([[cw, eta], [0, 1 - eta_p]]), np.diag([eta_w**2, eta_p**2])
    before = np.array([[sww[0], swp[0]], [swp[0], spp[0]]])
    matrices = (np.eye(2) - move, noise, move @ before @ move.T + noise)
    A, Q, first = (torch.from_numpy(np.kron(matrix, np.eye(3))) for matrix in matrices)
    optimizer = DenseFilter(
        model, batch_size=3, transition=(A, Q), prior_covariance=first, likelihood="bernoulli", fisher="empirical"
    )
    for t in range(10):
        inputs, y = torch.diag(random(3, seed=t)), torch.tensor([[1.0], [0.0], [float(t % 2)]], dtype=D)
        optimizer.zero_grad()
        outputs = model(inputs)
        optimizer.observe(outputs, labels=y)
        F.binary_cross_entropy_with_logits(outputs, y).backward()
        G = sum_gradient(model, 3)
        optimizer.step()
        pww = cw**2 * sww + 2 * cw * eta * swp + eta**2 * spp + eta_w**2
        pwp = (1 - eta_p) * (cw * swp + eta * spp)
        ppp = (1 - eta_p) ** 2 * spp + eta_p**2
        d = 1 + G**2 * pww
        sww, swp, spp = pww / d, pwp / d, ppp - G**2 * pwp**2 / d
        mu_w, p = x - sww * G, (1 - eta_p) * p - swp * G
        x = cw * mu_w + eta * p
        np.testing.assert_allclose(posterior_mean(model, optimizer), mu_w, **CLOSE)
        np.testing.assert_allclose(flat(model), x, **CLOSE)
        entry = optimizer.state[model.weight]
        np.testing.assert_allclose(entry["mean"].numpy()[3:], p, **CLOSE)
        expected = np.block([[np.diag(sww), np.diag(swp)], [np.diag(swp), np.diag(spp)]])
        np.testing.assert_allclose(entry["covariance"].numpy(), expected, **CLOSE)


def test_a_single_weight_on_a_random_walk_is_that_of_adabayes() -> None:
    """AdaBayes without the SGD limit, one example at a time; it propagates before its first gradient."""
    mine, other = (nn.Linear(1, 1, bias=False).to(D) for _ in range(2))
    other.load_state_dict(mine.state_dict())
    first = torch.tensor([[0.1 + 0.02**2]], dtype=D)
    dense = DenseFilter(mine, 0.02, batch_size=1, prior_covariance=first, likelihood="bernoulli", fisher="empirical")
    scalar = AdaBayes(other.parameters(), 0.02, batch_size=1, sgd_lr=math.inf, momentum=0.0, follow_lr=False)
    for t in range(20):
        x, y = random(1, 1, seed=t), torch.tensor([[float(t % 2)]], dtype=D)
        for model, optimizer in ((mine, dense), (other, scalar)):
            optimizer.zero_grad()
            outputs = model(x)
            if optimizer is dense:
                dense.observe(outputs, labels=y)
            F.binary_cross_entropy_with_logits(outputs, y).backward()
            optimizer.step()
        np.testing.assert_allclose(flat(mine), flat(other), **CLOSE)
        variance = scalar.posterior(other).variance()["weight"]
        np.testing.assert_allclose(dense.covariance().numpy(), variance.numpy(), **CLOSE)


# --- evidence ---


def information(model: nn.Module, x: Tensor, y: Tensor | None, fisher: str, batch_size: int = 6) -> np.ndarray:
    """U U' of a step, from the covariances before and after."""
    optimizer = DenseFilter(model, 0.0, batch_size=batch_size, prior_std=1.0, fisher=fisher, seed=3)
    optimizer.observe(model(x), labels=y)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return np.linalg.inv(optimizer.covariance().numpy()) - np.eye(sum(p.numel() for p in model.parameters()))


@pytest.mark.parametrize("build", [mlp, Odd])
def test_columns_against_explicit_gradients(build) -> None:
    model = build()
    x, y = labelled(6, 0)
    J, p = jacobians(model, x).numpy(), model(x).softmax(1).detach().numpy()
    hessian = np.einsum("nc,cd->ncd", p, np.eye(3)) - np.einsum("nc,nd->ncd", p, p)
    gauss_newton = np.einsum("nci,ncd,ndj->ij", J, hessian, J)
    np.testing.assert_allclose(information(model, x, None, "exact"), gauss_newton, rtol=1e-8, atol=1e-10)

    g = per_example(model, x, y)
    np.testing.assert_allclose(information(model, x, y, "empirical"), g.T @ g, rtol=1e-8, atol=1e-10)
    covariance = np.cov(g.T, ddof=1) * 6
    np.testing.assert_allclose(information(model, x, y, "centered"), covariance, rtol=1e-8, atol=1e-10)

    u = torch.rand(6, dtype=D, generator=torch.Generator().manual_seed(3 * 0x9E3779B97F4A7C15 % 2**63))
    drawn = (model(x).softmax(1).cumsum(1) <= u[:, None]).sum(1)
    g = per_example(model, x, drawn)
    np.testing.assert_allclose(information(model, x, None, "sampled"), g.T @ g, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(information(model, x, drawn, "sampled"), g.T @ g, rtol=1e-8, atol=1e-10)


def test_what_was_observed_stands_for_batch_size_losses() -> None:
    """batch_size twice the observed examples doubles the information; `losses_per_example` counts tokens."""
    model = mlp()
    x, _ = labelled(6, 0)
    whole = information(model, x, None, "exact")
    np.testing.assert_allclose(information(model, x, None, "exact", 12), 2 * whole, rtol=1e-8, atol=1e-10)
    tokens = DenseFilter(model, batch_size=6, prior_std=1.0, losses_per_example=3)
    tokens.observe(model(x.view(2, 3, 4)))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    tokens.step()
    found = np.linalg.inv(tokens.covariance().numpy()) - np.eye(27)
    np.testing.assert_allclose(found, whole, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("fisher", ["exact", "centered"])
def test_two_observations_are_one_batch(fisher: str) -> None:
    one, two = mlp(), mlp()
    x, y = labelled(10, 0)
    found = []
    for model, parts in ((one, [slice(0, 10)]), (two, [slice(0, 4), slice(4, 10)])):
        optimizer = DenseFilter(model, batch_size=10, fisher=fisher)
        for part in parts:
            outputs = model(x[part])
            optimizer.observe(outputs, labels=y[part] if fisher == "centered" else None)
            (F.cross_entropy(outputs, y[part], reduction="sum") / 10).backward()
        optimizer.step()
        found.append((flat(model), optimizer.covariance().numpy()))
    for a, b in zip(*found):
        np.testing.assert_allclose(a, b, **CLOSE)


# --- missing and bad gradients ---


@pytest.mark.parametrize("frozen", [True, False])
def test_a_parameter_without_gradient_is_left_alone_and_the_others_are_filtered_alone(frozen: bool) -> None:
    """The covariance of the others is that of a filter of only these, started from their belief."""
    model = mlp()
    optimizer = DenseFilter(model, 0.1, batch_size=6, prior_std=0.5)
    some = np.r_[0:15]  # the first layer; the second is frozen later, or its gradients are removed
    r = math.exp(-(0.1**2) / 0.5**2)
    S = np.empty(0)
    for t in range(5):
        x, y = labelled(6, t)
        mu, before = flat(model), optimizer.covariance().numpy()
        optimizer.zero_grad()
        if t == 2:
            model[2].requires_grad_(not frozen)
            S = r * before[:15, :15] + 0.25 * (1 - r) * np.eye(15)
        outputs = model(x)
        J, p = jacobians(model, x).numpy(), outputs.softmax(1).detach().numpy()
        hessian = np.einsum("nc,cd->ncd", p, np.eye(3)) - np.einsum("nc,nd->ncd", p, p)
        optimizer.observe(outputs)
        F.cross_entropy(outputs, y).backward()
        if t >= 2:
            model[2].zero_grad()
            G = 6 * np.concatenate([p.grad.numpy().ravel() for p in model[0].parameters()])
        optimizer.step()
        after = optimizer.covariance().numpy()
        assert np.linalg.eigvalsh(after)[0] > 0
        if t < 2:
            continue
        J = J[:, :, some]
        S = np.linalg.inv(np.linalg.inv(S) + np.einsum("nci,ncd,ndj->ij", J, hessian, J))
        np.testing.assert_allclose(after[:15, :15], S, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(posterior_mean(model, optimizer)[:15], mu[:15] - S @ G, rtol=1e-9, atol=1e-11)
        np.testing.assert_array_equal(flat(model)[15:], mu[15:])
        np.testing.assert_array_equal(posterior_mean(model, optimizer)[15:], mu[15:])
        spread = r * before[15:, 15:] + 0.25 * (1 - r) * np.eye(12) if t == 2 else before[15:, 15:]
        np.testing.assert_allclose(after[15:, 15:], spread, rtol=1e-13)
        S = r * S + 0.25 * (1 - r) * np.eye(15)


def test_evidence_that_is_not_finite_leaves_the_belief_as_it_was() -> None:
    for option in ("skip", "raise", "ignore"):
        model = mlp()
        optimizer = DenseFilter(model, 0.1, batch_size=6, nonfinite=option)
        for t in range(3):
            x, y = labelled(6, t)
            before = flat(model), optimizer.covariance().numpy(), posterior_mean(model, optimizer)
            optimizer.zero_grad()
            outputs = model(x)
            if t == 1:
                optimizer.observe(model(x.index_fill(0, torch.tensor([0]), math.inf)))  # another batch
            else:
                optimizer.observe(outputs)
            F.cross_entropy(outputs, y).backward()
            if t == 1 and option == "raise":
                with pytest.raises(
                    FloatingPointError, match="found per-example gradients that are not finite; nothing was"
                ):
                    optimizer.step()
            else:
                optimizer.step()
            after = flat(model), optimizer.covariance().numpy(), posterior_mean(model, optimizer)
            assert all(np.isfinite(values).all() for values in after)
            np.testing.assert_equal(np.array_equal(before[1], after[1]), t == 1)
            np.testing.assert_equal(np.array_equal(before[0], after[0]), t == 1 and option != "ignore")
            np.testing.assert_equal(np.array_equal(before[2], after[2]), t == 1)


def test_gradients_that_are_not_finite_leave_the_covariance_as_it_was() -> None:
    for option in ("skip", "ignore"):
        model = mlp()
        optimizer = DenseFilter(model, 0.1, batch_size=6, nonfinite=option)
        before = optimizer.covariance()
        outputs = model(labelled(6, 0)[0])
        optimizer.observe(outputs)
        F.cross_entropy(outputs, labelled(6, 0)[1]).backward()
        model[0].bias.grad[1] = math.nan
        with pytest.warns(RuntimeWarning, match="found at step 1") if option == "ignore" else nullcontext():
            optimizer.step()
        assert torch.equal(before, optimizer.covariance())
        assert np.isfinite(flat(model)).all() == (option == "skip")
