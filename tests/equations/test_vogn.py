"""OGN and VOGN against equations with per-example gradients by torch.func, against BackPACK, and at convergence."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from bayesgrad.optim import OGN, VOGN
from equations.test_ivon import toy

pytestmark = pytest.mark.filterwarnings("ignore")
F64 = {"dtype": torch.float64}


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).double()


def conv() -> nn.Module:
    torch.manual_seed(2)
    first = nn.Conv2d(2, 4, 3, stride=2, padding=1)
    second = nn.Conv2d(4, 6, 3, padding=2, dilation=2, groups=2)
    return nn.Sequential(first, nn.ReLU(), second, nn.Flatten(), nn.Linear(96, 3)).double()


class Sequence(nn.Module):
    """Tokens through a shared Linear, pooled."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table, self.mix, self.out = nn.Embedding(7, 4), nn.Linear(4, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.mix(self.table(x)).tanh().mean(1))


def data(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    y = torch.randint(0, 3, (12,))
    if kind == "mlp":
        return torch.randn(12, 5, **F64), y
    return (torch.randn(12, 2, 8, 8, **F64) if kind == "conv" else torch.randint(0, 7, (12, 5))), y


MODELS = {"mlp": mlp, "conv": conv, "sequence": Sequence}


def per_example(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """Per-example gradients, (N, *shape)."""

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])

    return vmap(grad(loss), (None, 0, 0))({n: p.detach() for n, p in model.named_parameters()}, x, y)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("sampled", [False, True], ids=["OGN", "VOGN"])
def test_is_its_equations(kind: str, sampled: bool) -> None:
    """The per-example-mean form of the corrected equations, with known noise, a tempered prior and momentum."""
    model, (x, y) = MODELS[kind](), data(kind)
    size, delta, tau, lr, b1, b2 = 30, 2.0, 0.7, 0.05, 0.8, 0.9
    options = dict(num_data=size, prior_precision=delta, kl_weight=tau, hess_init=0.5, betas=(b1, b2))
    optimizer = (VOGN if sampled else OGN)(model, lr, **options)
    m = {n: p.detach().clone() for n, p in model.named_parameters()}
    h = {n: torch.full_like(p, 0.5) for n, p in m.items()}
    average = {n: torch.zeros_like(p) for n, p in m.items()}
    other = MODELS[kind]()
    wd = tau * delta / size
    for t in range(1, 6):
        torch.manual_seed(t)
        eps = {n: torch.randn_like(p) * sampled for n, p in m.items()}
        named = dict(zip(model.parameters(), eps.values()))
        optimizer.zero_grad()
        if sampled:
            with optimizer.sampled(noise=named):
                F.cross_entropy(model(x), y).backward()
        else:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        drawn = {n: m[n] + eps[n] * (tau / (size * (h[n] + wd))).sqrt() for n in m}
        other.load_state_dict(drawn)
        rows = per_example(other, x, y)
        for n in m:
            h[n] = b2 * h[n] + (1 - b2) * rows[n].square().mean(0)
            average[n] = b1 * average[n] + (1 - b1) * rows[n].mean(0)
            m[n] = m[n] - lr * (average[n] / (1 - b1**t) + wd * m[n]) / (h[n] + wd)
    variance = optimizer.posterior(model).variance()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), m[n], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(variance[n], tau / (size * (h[n] + wd)), rtol=1e-10, atol=0)


def squares(optimizer: OGN, model: nn.Module) -> dict[str, torch.Tensor]:
    params = [p for p in model.parameters() if p.grad is not None]
    found = optimizer.sources[-1]._squares(params)
    return {n: found[p] for n, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["mlp", "conv", "sequence"])
def test_squares_are_backpacks(kind: str) -> None:
    backpack = pytest.importorskip("backpack")
    x, y = data(kind)
    if kind == "mlp":
        build = lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()  # noqa: E731
    elif kind == "conv":
        build = conv
    else:
        x = torch.randn(12, 5, 4, **F64)
        build = lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Flatten(), nn.Linear(30, 3)).double()  # noqa: E731
    torch.manual_seed(0)
    model = build()
    torch.manual_seed(0)
    theirs = backpack.extend(build())
    theirs.load_state_dict(model.state_dict())
    with backpack.backpack(backpack.extensions.SumGradSquared()):
        backpack.extend(nn.CrossEntropyLoss())(theirs(x), y).backward()
    optimizer = OGN(model, num_data=10)
    F.cross_entropy(model(x), y).backward()
    mine = squares(optimizer, model)
    for n, p in theirs.named_parameters():
        torch.testing.assert_close(mine[n], 12 * p.sum_grad_squared, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("fisher", ["sampled", "exact"])
def test_observed_squares_are_those_of_predicted_labels(fisher: str) -> None:
    model, (x, y) = mlp(), data("mlp")
    optimizer = OGN(model, num_data=10, fisher=fisher)
    outputs = model(x)
    optimizer.observe(outputs, labels=y if fisher == "sampled" else None)
    F.cross_entropy(outputs, y).backward()
    found = squares(optimizer, model)
    if fisher == "sampled":
        expected = {n: g.square().mean(0) for n, g in per_example(model, x, y).items()}
    else:
        p = outputs.softmax(1).detach()
        labels = [per_example(model, x, torch.full((12,), c)) for c in range(3)]
        expected = {
            n: sum((p[:, c].view(-1, *[1] * (g.dim() - 1)) * labels[c][n].square()).mean(0) for c in range(3))
            for n, g in labels[0].items()
        }
    for n in expected:
        torch.testing.assert_close(found[n], expected[n], rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("how", ["micro-batches", "two draws", "closure", "norm", "scaler"])
def test_whatever_happens_to_gradients_happens_to_squares(how: str) -> None:
    model, other, (x, y) = mlp(), mlp(), data("mlp")
    options = dict(num_data=30, betas=(0.0, 0.5), samples=2 if how == "closure" else 1)
    optimizer, reference = VOGN(model, 0.1, **options), VOGN(other, 0.1, **options)

    def loss(network: nn.Module) -> torch.Tensor:
        return F.cross_entropy(network(x), y)

    factor = 1.0
    with optimizer.sampled(noise=torch.ones_like):
        if how == "micro-batches":
            for part in range(3):
                (F.cross_entropy(model(x[part::3]), y[part::3]) / 3).backward()
        elif how == "two draws":
            (loss(model) / 2).backward()
        elif how == "scaler":
            (1024 * loss(model)).backward()
        else:
            loss(model).backward()
    with reference.sampled(noise=torch.ones_like):
        loss(other).backward()
    if how == "two draws":
        with optimizer.sampled(noise=torch.ones_like):
            (loss(model) / 2).backward()
    if how == "scaler":
        for p in model.parameters():
            p.grad.data.div_(1024)  # as unscale_ does, without changing the version counter
    if how == "norm":
        total = nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        factor = 1e-2 / (float(total) + 1e-6)
    if how == "closure":
        optimizer.zero_grad()
        reference.zero_grad()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            value = loss(model)
            value.backward()
            return value

        optimizer.step(closure)
        for _ in range(2):
            with reference.sampled():
                (loss(other) / 2).backward()
    else:
        optimizer.step()
    if how == "norm":
        for p in other.parameters():
            p.grad.mul_(factor)
    reference.step()
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(optimizer.state[p]["variance"], reference.state[q]["variance"], rtol=1e-9, atol=0)
    if how == "norm":
        plain = squares_of(mlp(), x, y, reference)
        for p, q in zip(model.parameters(), plain):
            v = optimizer.state[p]["variance"]
            expected = 0.5 * (1 + 1 / 30) + 0.5 * (factor**2 * q + 1 / 30)
            torch.testing.assert_close(1 / v, expected, rtol=1e-9, atol=0)


def squares_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, like: VOGN) -> list[torch.Tensor]:
    """Mean squares at the draw of ones that the test above takes first."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(math.sqrt(1 / (30 * (1 + 1 / 30))))
    return [g.square().mean(0) for g in per_example(model, x, y).values()]


def test_posterior_at_convergence_is_the_empirical_diagonal_laplace() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(60, 3, **F64), torch.randint(0, 2, (60,))
    model = nn.Linear(3, 2).double()
    optimizer = OGN(model, 0.3, num_data=60, prior_precision=1.0, betas=(0.0, 0.9))
    for _ in range(1500):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    total = 60 * F.cross_entropy(model(x), y) + 0.5 * sum(p.square().sum() for p in model.parameters())
    assert all(float(g.abs().max()) < 1e-10 for g in torch.autograd.grad(total, list(model.parameters())))
    variance = optimizer.posterior(model).variance()
    for n, g in per_example(model, x, y).items():
        torch.testing.assert_close(variance[n], 1 / (g.square().sum(0) + 1.0), rtol=1e-9, atol=0)


def fixed_point(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Where E[gradient] = 0 and s = E[sum of squares] + 1, by quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()
    m, s = 0.0, 1.0
    for _ in range(3000):
        w = m + nodes / np.sqrt(s)
        rows = -(y * x)[:, None] / (1 + np.exp((y * x)[:, None] * w))
        s = 0.5 * s + 0.5 * (weights @ (rows**2).sum(0) + 1)
        m = m - 0.5 * (weights @ rows.sum(0) + m) / s
    return m, s


def test_finds_the_quadrature_fixed_point_of_its_own_equations() -> None:
    """Means within 0.01 and s within 1 %, averaged over 100 steps of 8 draws of each of 30 weights, which are learned
    at once and apart: each has an output and a loss of its own."""
    x, y = toy()
    m, s = fixed_point(x, y)
    inputs, labels = torch.tensor(x)[:, None], torch.tensor(y)[:, None]
    model = nn.Linear(1, 30, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = VOGN(model, 0.02, num_data=40, betas=(0.0, 0.98), hess_init=0.3, samples=8)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.softplus(-labels * model(inputs)).sum(1).mean()
        loss.backward()
        return loss

    means, precisions = [], []
    for step in range(500):
        optimizer.step(closure)
        if step >= 400:
            means.append(model.weight.mean().item())
            precisions.append((1 / optimizer.posterior(model).variance()["weight"]).mean().item())
    assert np.mean(means) == pytest.approx(m, abs=0.01)
    assert np.mean(precisions) == pytest.approx(s, rel=0.01)


def test_train_mode_batch_norm_is_accepted_with_its_statistics_as_constants() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()
    x, y = torch.randn(16, 4, **F64), torch.randint(0, 3, (16,))
    optimizer = OGN(model, num_data=16)
    F.cross_entropy(model(x), y).backward()
    found = squares(optimizer, model)
    hidden = model[0](x).detach()
    normal = (hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + model[1].eps).sqrt()

    def loss(weight: torch.Tensor, z: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model[3]((z * weight + model[1].bias).relu())[None], label[None])

    rows = vmap(grad(loss), (None, 0, 0))(model[1].weight.detach(), normal, y)
    torch.testing.assert_close(found["1.weight"], rows.square().mean(0), rtol=1e-9, atol=1e-14)
    optimizer.step()


def test_what_layers_do_not_explain_takes_the_fallback_and_is_named() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.raw = nn.Linear(3, 2), nn.Parameter(torch.tensor([1.0, 2.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.raw + F.linear(x, self.layer.weight)

    model = Model().double()
    with pytest.warns(UserWarning, match="trains raw by the squares of their mean"):
        optimizer = OGN(model, num_data=10)
    F.cross_entropy(model(torch.randn(6, 3, **F64)), torch.zeros(6, dtype=torch.long)).backward()
    with pytest.warns(UserWarning, match=r"trains layer\.weight"):  # it is used twice and recorded once
        found = squares(optimizer, model)
    for name in ("raw", "layer.weight"):
        p = dict(model.named_parameters())[name]
        torch.testing.assert_close(found[name], 6 * p.grad**2, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["penalty", "create_graph"])
def test_a_gradient_penalty_is_found_in_each_step(kind: str) -> None:
    """Weights then take the fallback, in those steps alone. `backward(create_graph=True)` adds nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    optimizer, told = OGN(model, num_data=10), []
    for odd in (False, True, False, True, True):
        x, y = torch.randn(6, 5, **F64), torch.randint(0, 3, (6,))
        scale = float(odd and kind == "penalty")

        def plain(params: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])

        def loss(params: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return plain(params, x, y) + scale * grad(plain, 1)(params, x, y).square().sum()  # noqa: B023

        exact = vmap(grad(loss), (None, 0, 0))({n: p.detach() for n, p in model.named_parameters()}, x, y)
        optimizer.zero_grad()
        total = F.cross_entropy(model(x.requires_grad_()), y)
        if scale:
            (slope,) = torch.autograd.grad(6 * total, x, create_graph=True)
            total = total + slope.square().sum() / 6
        total.backward(create_graph=odd and kind == "create_graph")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = squares(optimizer, model)
        told += [str(w.message) for w in caught]
        for n, p in model.named_parameters():
            mean = bool(scale) and n.endswith("weight")
            expected = 6 * p.grad.detach() ** 2 if mean else exact[n].square().mean(0)
            torch.testing.assert_close(found[n], expected, rtol=1e-10, atol=1e-14)
        optimizer.step()
    assert [line.split(" by ")[0] for line in told] == ["OGN trains 0.weight, 2.weight"] * (kind == "penalty")


@pytest.mark.parametrize("shared", ["bias", "chain"])
def test_layers_that_share_a_bias(shared: str) -> None:
    """In the chain, the first and the second layer share a weight, and the second and the third a bias."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    first, second, third = model[0], model[2], model[4]
    if shared == "chain":
        second.weight, third.bias = first.weight, second.bias
    else:
        second.bias = first.bias
    optimizer = OGN(model, num_data=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for how in ("plain", "discarded", "micro-batches", "parts"):
            x, y = torch.randn(6, 3, **F64), torch.randint(0, 3, (6,))
            optimizer.zero_grad()
            if how == "discarded":
                model(torch.randn(4, 3, **F64)).sum().backward()
                optimizer.zero_grad()
            parts = [slice(0, 6)] if how in ("plain", "discarded") else [slice(0, 4), slice(4, 6)]
            total = torch.zeros((), **F64)
            for part in parts:
                loss = F.cross_entropy(model(x[part]), y[part], reduction="sum") / 6
                total = total + loss
                loss.backward() if how != "parts" else None
            total.backward() if how == "parts" else None
            found = squares(optimizer, model)
            for n, each in per_example(model, x, y).items():
                torch.testing.assert_close(found[n], each.square().mean(0), rtol=1e-10, atol=1e-14)
            optimizer.step()
