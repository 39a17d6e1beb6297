"""Elastic weight consolidation against explicit Hessians; chains of posteriors against all data at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.func import functional_call, jacrev
from torch.nn import functional as F

import bayesgrad
from bayesgrad import EWC, laplace
from bayesgrad.optim import IVON, OGN, VOGN, BayesBiNN
from bayesgrad.posterior import BernoulliPosterior, GaussianPosterior, Posterior

D = torch.float64
STRUCTURES = ("diag", "kron", "input", "full", "subsampled")
N, IN, OUT = 12, 3, 4
close = torch.testing.assert_close


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(IN, 5), nn.Tanh(), nn.Linear(5, OUT)).to(D)


def conv() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Unflatten(1, (1, IN)), nn.Conv1d(1, 4, 2, padding=1), nn.Tanh(), nn.Conv1d(4, 2, 2, groups=2))
    return nn.Sequential(*layers, nn.Flatten(), nn.LayerNorm(2 * IN), nn.Linear(2 * IN, OUT)).to(D)


def data(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, IN, dtype=D, generator=generator)
    return x, torch.randint(OUT, (N,), generator=generator)


def fitted(model: nn.Module, structure: str, seed: int = 1, **options: Any) -> Any:
    return laplace(model.eval(), [data(seed)], **{"likelihood": "categorical", "structure": structure, **options})


def flat(values: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in values.values()])


def weights(model: nn.Module) -> Tensor:
    return flat(dict(model.named_parameters())).detach().clone()


@torch.no_grad()
def moved(model: nn.Module, seed: int = 5) -> Tensor:
    """Changes the weights, and returns by how much, flat."""
    torch.manual_seed(seed)
    change = torch.randn(sum(p.numel() for p in model.parameters()), dtype=D)
    nn.utils.vector_to_parameters(weights(model) + change, model.parameters())
    return change


def gauss_newton(model: nn.Module, x: Tensor) -> Tensor:
    """Σ_j J_j' (diag p - p p') J_j, with a Jacobian of each example by torch.func."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    total = torch.zeros(len(flat(params)), len(flat(params)), dtype=D)
    for example in x:
        row = jacrev(lambda p, x=example: functional_call(model, p, (x[None],)).flatten())(params)
        J = torch.cat([part.flatten(1) for part in row.values()], 1)
        p = model(example[None])[0].softmax(0).detach()
        total += J.T @ (torch.diag(p) - torch.outer(p, p)) @ J
    return total


def kronecker(model: nn.Sequential, x: Tensor, sides: bool) -> Tensor:
    """Σ aa' ⊗ mean ee' of each layer of `mlp`, weights and biases in the order of the parameters."""
    p = model(x).softmax(1).detach()
    root = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    hidden = model[1](model[0](x)).detach()
    slopes = (1 - hidden**2)[:, :, None] * model[2].weight.detach().T
    blocks = []
    for a, e in ((x, slopes @ root @ slopes.mT), (hidden, root)):
        a = torch.cat([a, torch.ones(N, 1)], 1)
        block = torch.kron(e.mean(0) if sides else torch.eye(e.shape[1], dtype=D), a.T @ a)
        where = torch.arange(len(block)).view(e.shape[1], -1)
        order = torch.cat([where[:, :-1].flatten(), where[:, -1]])
        blocks.append(block[order[:, None], order])
    return torch.block_diag(*blocks)


def expected(model: Any, structure: str, seed: int = 1) -> Tensor:
    if structure in ("kron", "input"):
        return kronecker(model, data(seed)[0], structure == "kron")
    exact = gauss_newton(model, data(seed)[0])
    return torch.diag(exact.diagonal()) if structure == "diag" else exact


def gradient(penalty: Tensor, model: nn.Module) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(penalty, list(model.parameters()))])


# --- the penalty ---


@pytest.mark.parametrize(
    ("structure", "make"),
    [
        *[(structure, mlp) for structure in STRUCTURES],
        *[(structure, conv) for structure in ("diag", "full", "subsampled")],
    ],
)
def test_penalty_and_gradient(structure: str, make: Callable[[], nn.Sequential]) -> None:
    """s/2 v'H v and s H v for explicit matrices; nothing at the mean."""
    model = make()
    H = expected(model, structure)
    ewc = EWC(fitted(model, structure), strength=0.3)
    assert ewc(model).item() == 0
    v = moved(model)
    close(ewc(model), 0.3 / 2 * v @ H @ v, rtol=1e-10, atol=0)
    close(gradient(ewc(model), model), 0.3 * H @ v, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_second_derivative_and_the_prior(structure: str) -> None:
    """The Hessian of the penalty is H, and H + δ with the prior; without the bias as a column for variety."""
    model = mlp()
    prior = {"0.weight": 0.4, "0.bias": 3.0, "2.weight": 0.7, "2.bias": 1.0}
    posterior = fitted(model, structure, prior_precision=prior, bias="separate")
    names = {name: p.detach() for name, p in model.named_parameters()}
    sizes = [p.numel() for p in names.values()]

    def at(ewc: EWC) -> Tensor:
        (part,) = ewc.parts
        named = [(name, p.shape) for name, p in names.items()]
        return hessian(lambda w: part({n: u.view(s) for u, (n, s) in zip(w.split(sizes), named)}), flat(names))

    alone = at(EWC(posterior))
    close(at(EWC(posterior, prior=True)), alone + torch.diag(flat({n: 0 * p + prior[n] for n, p in names.items()})))
    close(alone, alone.T)
    if structure in ("full", "subsampled"):
        close(alone, expected(model, structure), rtol=1e-10, atol=1e-10)
    if structure == "input":
        close(alone[15:20, 15:20], N * torch.eye(5, dtype=D))


def test_noise_counts() -> None:
    model, (x, _) = mlp(), data()
    loader = [(x, torch.zeros(N, OUT, dtype=D))]
    ewcs = [EWC(laplace(model, loader, likelihood="gaussian", structure="kron", noise_scale=s)) for s in (1.0, 0.5)]
    moved(model)
    close(ewcs[1](model), 4 * ewcs[0](model), rtol=1e-10, atol=0)


# --- several tasks ---


@pytest.mark.parametrize("structure", STRUCTURES)
def test_several_tasks(structure: str) -> None:
    """`add` is decay H + H' about the latest weights, `+` each about its own; what adds up is kept as one."""
    model = mlp()
    first, H, start = fitted(model, structure), expected(model, structure), weights(model)
    moved(model, 6)
    second, K, middle = fitted(model, structure, 2), expected(model, structure, 2), weights(model)
    moved(model, 7)
    v, u = weights(model) - start, weights(model) - middle
    one = EWC(first, 2.0).add(second, 3.0, decay=0.5)
    close(one(model), u @ (0.5 * 2.0 * H + 3.0 * K) @ u / 2, rtol=1e-10, atol=0)
    close(gradient(one(model), model), (H + 3.0 * K) @ u, rtol=1e-10, atol=1e-9)
    both = EWC(first) + EWC(second)
    close(both(model), v @ H @ v / 2 + u @ K @ u / 2, rtol=1e-10, atol=0)
    close(sum([EWC(first), EWC(second)])(model), both(model))
    kept = {"diag": 4, "kron": 4, "input": 2, "full": 1, "subsampled": 2}[structure]
    assert sum(len(part.forms) for part in one.parts) == kept


def regressions(outputs: int = 1, count: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(9, IN, dtype=D, generator=generator), torch.randn(9, outputs, dtype=D, generator=generator))
        for _ in range(count)
    ]


@torch.no_grad()
def minimised(model: nn.Linear, loss: Callable[[], Tensor]) -> None:
    """One step of Newton's method by autograd: exact for a quadratic."""
    with torch.enable_grad():
        value = loss()
        (g,) = torch.autograd.grad(value, [model.weight], create_graph=True)
        H = torch.stack([torch.autograd.grad(u, [model.weight], retain_graph=True)[0].flatten() for u in g.flatten()])
    model.weight -= torch.linalg.solve(H, g.flatten()).view_as(model.weight)


def in_sequence(tasks: list[tuple[Tensor, Tensor]], structure: str, delta: float, latest: bool) -> Tensor:
    """The weights after all tasks, each learned under the penalty of those before."""
    model, ewc = nn.Linear(IN, 2, bias=False).to(D), None

    def loss(x: Tensor, y: Tensor) -> Tensor:
        old = delta / 2 * model.weight.square().sum() if ewc is None else ewc(model)
        return (model(x) - y).square().sum() / 2 + old

    for x, y in tasks:
        minimised(model, partial(loss, x, y))
        found = laplace(model, [(x, y)], likelihood="gaussian", structure=structure, prior_precision=delta)
        if ewc is None:
            ewc = EWC(found, prior=True)
        else:
            ewc = ewc.add(found) if latest else ewc + EWC(found)
    return model.weight.detach()


@pytest.mark.parametrize("structure", ["full", "subsampled", "input"])
def test_linear_regressions_in_sequence_are_one_regression(structure: str) -> None:
    """Ridge regression on three data sets, where A ⊗ I is the Hessian; about each task's own weights it is another."""
    tasks, delta = regressions(2), 0.7
    x, y = (torch.cat(parts) for parts in zip(*tasks))
    exact = torch.linalg.solve(x.T @ x + delta * torch.eye(IN, dtype=D), x.T @ y).T
    close(in_sequence(tasks, structure, delta, True), exact, rtol=1e-10, atol=1e-12)
    assert (in_sequence(tasks, structure, delta, False) - exact).abs().max() > 1e-2


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(IN, 5), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(5, 2) for _ in range(2))
        self.task = 0
        self.to(D)

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[self.task](self.body(x))


@pytest.mark.filterwarnings("ignore:structure=")
@pytest.mark.parametrize("structure", STRUCTURES)
def test_heads_of_other_tasks(structure: str) -> None:
    """A head that no task has used is free; one that the latest posterior names is kept where it ended."""
    model, (x, y) = Heads(), data()
    loader, options = [(x, y % 2)], {"likelihood": "categorical", "structure": structure}
    ewc = EWC(laplace(model, loader, **options, params=["body", "heads.0"]))
    with torch.no_grad():
        model.heads[1].weight.add_(1.0)
    assert ewc(model).item() == 0
    with torch.no_grad():
        model.heads[0].weight[0].add_(0.1)
    assert ewc(model).item() > 0
    model.task = 1
    ewc = ewc.add(laplace(model, loader, **options))
    assert ewc(model).item() == 0
    for head in model.heads:
        with torch.no_grad():
            head.weight[0].add_(0.1)
        assert ewc(model).item() > 0
        with torch.no_grad():
            head.weight[0].sub_(0.1)


# --- posteriors of optimizers ---


def test_of_a_variational_posterior() -> None:
    """Half of Σ v^2 over the variance: prior and data in one."""
    model = mlp()
    posterior = IVON(model.named_parameters(), num_data=40, prior_precision=2.0, hess_init=0.5).posterior(model)
    ewc = EWC(posterior, 3.0)
    v = moved(model)
    close(ewc(model), 3.0 / 2 * (40 * 0.5 + 2.0) * v @ v, rtol=1e-10, atol=0)
    with pytest.raises(ValueError, match="prior=False needs a Laplace posterior"):
        EWC(posterior, prior=False)


def orthogonal(outputs: int, count: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Regressions whose X'X is diagonal, so that a diagonal Gaussian is the posterior."""
    torch.manual_seed(0)
    tasks = []
    for k in range(count):
        q, _ = torch.linalg.qr(torch.randn(8 + 4 * k, IN, dtype=D))
        tasks.append((q * torch.arange(1 + k, IN + 1 + k), torch.randn(len(q), outputs, dtype=D)))
    return tasks


def rule(name: str, model: nn.Module, **options: Any) -> Any:
    if name == "IVON":
        return IVON(model.named_parameters(), 1.0, betas=(0.0, 0.0), rescale_lr=False, clip_radius=math.inf, **options)
    make = OGN if name == "OGN" else VOGN
    return make(model, 1.0, betas=(0.0, 0.0), fisher="exact", likelihood="gaussian", **options)


def learned(name: str, model: nn.Module, x: Tensor, y: Tensor, prior: Posterior | None, **options: Any) -> Posterior:
    """The belief after steps of Newton's size, at pairs of draws on both sides of the mean where there are draws."""
    optimizer = rule(name, model, num_data=len(x), prior=prior, **options)
    for _ in range(12 if name == "IVON" else 1):
        optimizer.zero_grad()
        for sign in (1.0, -1.0):
            if name == "OGN":
                _backward(optimizer, model, x, y)
            else:
                with optimizer.sampled(noise=lambda p, sign=sign: torch.full_like(p, sign)):
                    _backward(optimizer, model, x, y)
        optimizer.step()
    return optimizer.posterior(model)


def _backward(optimizer: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    outputs = model(x)
    if hasattr(optimizer, "observe"):
        optimizer.observe(outputs)
    ((outputs - y).square().sum(1).mean() / 4).backward()  # half a square, and half of two passes


@pytest.mark.parametrize("name", ["OGN", "VOGN", "IVON"])
def test_posteriors_in_sequence_are_the_posterior_of_all_data(name: str) -> None:
    """Precision δ + Σ X'X and mean precision^-1 Σ X'y, whether two regressions come one after the other or at once."""
    model, posterior, tasks = nn.Linear(IN, 2, bias=False).to(D), None, orthogonal(2)
    for x, y in tasks:
        posterior = learned(name, model, x, y, posterior, prior_precision=0.7)
    assert posterior is not None
    precision = 0.7 + sum((x * x).sum(0) for x, _ in tasks)
    close(1 / posterior.variance()["weight"], precision.expand(2, IN), rtol=1e-10, atol=0)
    close(posterior.mean["weight"], (sum(x.T @ y for x, y in tasks) / precision[:, None]).T, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["OGN", "VOGN", "IVON"])
def test_parameters_that_a_prior_does_not_name_have_the_default(name: str) -> None:
    """Two heads over the same inputs: each has the posterior of its own regression."""
    (x, y), (z, t) = orthogonal(1)
    model = nn.ModuleDict({head: nn.Linear(IN, 1, bias=False) for head in ("one", "two")}).to(D)
    model.forward = lambda x: model["one"](x)
    first = learned(name, model["one"], x, y, None, prior_precision=0.7)
    named = GaussianPosterior({"one.weight": first.beliefs["weight"]})  # pyright: ignore[reportAttributeAccessIssue]
    model.forward = lambda x: model["two"](x) + 0 * model["one"](x)
    second = learned(name, model, z, t, named, prior_precision=0.3)
    precision = 0.3 + (z * z).sum(0)
    close(1 / second.variance()["two.weight"][0], precision, rtol=1e-10, atol=0)
    close(second.mean["two.weight"][0], (z.T @ t)[:, 0] / precision, rtol=1e-9, atol=1e-10)
    close(second.mean["one.weight"], first.mean["weight"], rtol=1e-10, atol=1e-12)


def test_binary_posteriors_in_sequence_are_that_of_all_data() -> None:
    """Losses c'w, whose posterior is λ = -N c + λ_0, exactly; with slopes of one. A head of its own begins anew."""
    torch.manual_seed(0)
    slopes, prior, total = torch.randn(2, 4, dtype=D), None, torch.zeros(4, dtype=D)
    body, heads = nn.Parameter(torch.randn(4, dtype=D)), [nn.Parameter(torch.randn(4, dtype=D)) for _ in range(2)]
    for count, slope, head, name in zip((3, 5), slopes, heads, ("a", "b")):
        options = {"lr": 0.5, "momentum": 0.0, "eps": 1e30, "natural_init": 0.5}
        optimizer = BayesBiNN([("body", body), (name, head)], num_data=count, prior=prior, **options)
        for _ in range(60):
            with optimizer.sampled():
                optimizer.zero_grad()
                (slope @ body + 2 * slope @ head).backward()
            optimizer.step()
        prior = BernoulliPosterior({"body": optimizer.state[body]["natural"], name: optimizer.state[head]["natural"]})
        total -= count * slope
        close(prior.natural["body"], total, rtol=1e-10, atol=1e-12)
        close(prior.natural[name], -2 * count * slope, rtol=1e-10, atol=1e-12)


# --- errors ---


def test_what_cannot_be_is_one_clear_error() -> None:
    model = mlp()
    posterior = fitted(model, "diag")
    for bad in (0, -1.0, float("nan"), float("inf"), "1"):
        with pytest.raises(ValueError, match="strength must be a finite positive number, got"):
            EWC(posterior, bad)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"decay must be a finite positive number, got 0"):
        EWC(posterior).add(posterior, decay=0)
    with pytest.raises(ValueError, match=r"the penalty has a parameter '2.weight' that the model lacks"):
        EWC(posterior)(model[:1])
    wider = nn.Sequential(nn.Linear(IN, 6), nn.Tanh(), nn.Linear(6, OUT)).to(D)
    with pytest.raises(ValueError, match=r"'0.weight' has shape \(6, 3\) in the model and \(5, 3\) in the penalty"):
        EWC(posterior)(wider)
    with pytest.raises(ValueError, match=r"'0.weight' has shape \(6, 3\), but \(5, 3\) in earlier tasks"):
        EWC(posterior).add(fitted(wider, "diag"))
    with pytest.raises(TypeError, match="EWC takes a Gaussian posterior, got BernoulliPosterior"):
        EWC(BernoulliPosterior({"w": torch.zeros(2)}))
    with pytest.raises(TypeError):
        EWC(posterior) + 1  # pyright: ignore[reportOperatorIssue]
    for options in ({}, {"prior_precision": 2.0}):
        with pytest.raises(
            ValueError, match="the prior must contain parameters of the optimizer, such as 'v', got none"
        ):
            IVON([("v", nn.Parameter(torch.zeros(2)))], num_data=1, prior=posterior, **options)
    assert bayesgrad.EWC is EWC


@pytest.mark.parametrize("structure", STRUCTURES)
def test_half_precision_models_and_unbothered_training(structure: str) -> None:
    """A penalty of a float32 posterior serves a bfloat16 copy, and trains beside a loss."""
    model = mlp().float()
    x, y = data()
    posterior = laplace(model, [(x.float(), y)], likelihood="categorical", structure=structure)
    small = mlp().to(torch.bfloat16)
    penalty = EWC(posterior)(small)
    assert penalty.dtype == torch.float32
    penalty.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in small.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    ewc = EWC(posterior, 1e4)
    for _ in range(3):
        optimizer.zero_grad()
        (F.cross_entropy(model(x.float()), (y + 1) % OUT) + ewc(model) / N).backward()
        optimizer.step()
    assert ewc(model).item() > 0
