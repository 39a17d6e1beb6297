"""Every registered structure against dense algebra with its own matrix; a structure is tested by being registered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.func import functional_call, jacrev

from bayesgrad import EWC, laplace
from bayesgrad.belief import Joint
from bayesgrad.layers.fisher import BatchGradients
from bayesgrad.layers.network import Network
from bayesgrad.layers.output_covariance import output_covariance
from bayesgrad.posterior import LaplacePosterior, load
from bayesgrad.structures import Structure

D = torch.float64
N, WORDS, OUT = 7, 6, 3
SCALE = 0.7
close = torch.testing.assert_close


@dataclass(frozen=True, eq=False)
class BlockDiagonal(Structure):
    """A dense matrix for each parameter: no more than a new structure needs."""

    matrix: Tensor
    name = "block diagonal"

    @classmethod
    def empty(cls, params: Mapping[str, nn.Parameter]) -> Structure:
        ((name, p),) = params.items()
        return cls({name: p.shape}, torch.zeros(p.numel(), p.numel(), dtype=p.dtype))

    def add(self, seen: BatchGradients) -> None:
        (name,) = self.shapes
        rows = seen.columns[name].rows().reshape(-1, len(self.matrix))
        self.matrix.addmm_(rows.T, rows)

    def dense(self) -> Tensor:
        return self.matrix


def network() -> nn.Module:
    """Embedding, normalisation, convolution in groups and Linear, with and without bias."""
    torch.manual_seed(0)
    layers = [nn.Embedding(WORDS, 4), nn.LayerNorm(4), nn.Conv1d(4, 4, 2, groups=2), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(12, 3, bias=False), nn.Tanh(), nn.Linear(3, OUT)).to(D).eval()


def data(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(WORDS, (N, 4), generator=generator)
    return x, torch.randint(OUT, (N,), generator=generator)


@pytest.fixture(params=list(Structure.by_name))
def structure(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["joint", "separate"])
def bias(request: pytest.FixtureRequest) -> str:
    return request.param


def fitted(structure: str, bias: str = "joint", seed: int = 1, **options: Any) -> LaplacePosterior:
    x, y = data(seed)
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    return laplace(network(), batches, **{"likelihood": "categorical", "structure": structure, "bias": bias, **options})


pytestmark = pytest.mark.filterwarnings("ignore:structure=")


def priors(block: Structure, by_parameter: bool) -> dict[str, float]:
    """Prior precisions; different ones where the block supports that."""
    prior = {name: 0.5 + 0.25 * i * by_parameter for i, name in enumerate(block.shapes)}
    try:
        block.belief({name: torch.zeros(shape, dtype=D) for name, shape in block.shapes.items()}, prior, SCALE)
    except ValueError:
        return dict.fromkeys(block.shapes, 0.5)
    return prior


def with_prior(block: Structure, prior: Mapping[str, Any]) -> Tensor:
    """s H + δ as a matrix, in the order of the belief."""
    values = {name: torch.as_tensor(prior[name]).expand(shape).to(D) for name, shape in block.shapes.items()}
    return SCALE * block.dense() + torch.diag(joined(block, values))


def joined(block: Structure, values: Mapping[str, Tensor]) -> Tensor:
    """Values by name as one vector, by the join of the belief and not that of the structure."""
    prior = dict.fromkeys(block.shapes, 1.0)
    belief = block.belief({name: torch.zeros(shape, dtype=D) for name, shape in block.shapes.items()}, prior, 1.0)
    return (belief.join(values) if isinstance(belief, Joint) else values[next(iter(block.shapes))]).flatten()


def moved_in(block: Structure, v: Mapping[str, Tensor], name: str, part: Tensor) -> Tensor:
    return block.quadratic({**v, name: part})


def change(block: Structure, seed: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, dtype=D, generator=generator) for name, shape in block.shapes.items()}


# --- accumulation ---


def test_blocks_cover_every_parameter_once(structure: str, bias: str) -> None:
    posterior = fitted(structure, bias)
    found = [(name, shape) for block in posterior.hessians for name, shape in block.shapes.items()]
    assert sorted(found) == sorted((name, p.shape) for name, p in network().named_parameters())


def test_matrices_are_symmetric_and_proportional_to_the_number_of_data(structure: str, bias: str) -> None:
    for one, two in zip(fitted(structure, bias).hessians, fitted(structure, bias, num_data=3 * N).hessians):
        matrix = one.dense()
        close(matrix, matrix.T)
        assert float(torch.linalg.eigvalsh(matrix).min()) > -1e-10 * max(1.0, float(matrix.abs().max()))
        close(two.dense(), 3 * matrix)


def test_the_full_matrix_is_that_of_explicit_jacobians() -> None:
    """Σ_j J_j' (diag p - p p') J_j; the blocks of `BlockDiagonal` are its diagonal blocks, and so is "diag"."""
    model, (x, _) = network(), data()
    params = {name: p.detach() for name, p in model.named_parameters()}
    total = torch.zeros(1)
    for example in x:
        row = jacrev(lambda p, x=example: functional_call(model, p, (x[None],)).flatten())(params)
        J = torch.cat([part.flatten(1) for part in row.values()], 1)
        p = model(example[None])[0].softmax(0).detach()
        total = total + J.T @ (torch.diag(p) - torch.outer(p, p)) @ J
    for name in ("full", "subsampled"):
        (block,) = fitted(name).hessians
        close(block.dense(), total, rtol=1e-10, atol=1e-10)
    starts = dict(zip(params, [0, *torch.tensor([p.numel() for p in params.values()]).cumsum(0).tolist()]))
    for name in ("block diagonal", "diag"):
        for block in fitted(name).hessians:
            (own,) = block.shapes
            part = slice(starts[own], starts[own] + params[own].numel())
            wanted = total[part, part]
            close(block.dense(), torch.diag(wanted.diagonal()) if name == "diag" else wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["kron", "input", "full", "subsampled", "block diagonal"])
def test_blocks_of_one_linear_convolution_are_exact(name: str, bias: str) -> None:
    """With unit noise each position has the errors of every channel, so E = I and H = Σ aa' over positions."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 6, 2, groups=2), nn.Flatten()).to(D)
    x = torch.randn(N, 4, 5, dtype=D)
    y = torch.zeros(N, 24, dtype=D)
    params = {name: p.detach() for name, p in model.named_parameters()}
    slopes = jacrev(lambda p: functional_call(model, p, (x,)).flatten())(params)
    J = torch.cat([part.flatten(1) for part in slopes.values()], 1)
    places = dict(zip(params, torch.arange(J.shape[1]).split([p.numel() for p in params.values()])))
    posterior = laplace(model, [(x[:3], y[:3]), (x[3:], y[3:])], likelihood="gaussian", structure=name, bias=bias)
    for block in posterior.hessians:
        index = joined(block, {own: places[own].view(shape).to(D) for own, shape in block.shapes.items()}).long()
        close(block.dense(), (J.T @ J)[index[:, None], index], rtol=1e-10, atol=1e-10)


# --- algebra ---


def test_quadratic_forms(structure: str, bias: str) -> None:
    for block in fitted(structure, bias).hessians:
        v, H = change(block), block.dense()
        flat = joined(block, v)
        close(block.quadratic(v), flat @ H @ flat, rtol=1e-10, atol=1e-10)
        inputs = {name: part.requires_grad_() for name, part in v.items()}
        slopes = torch.autograd.grad(block.quadratic(inputs), list(inputs.values()))
        close(joined(block, dict(zip(inputs, slopes))), 2 * H @ flat.detach(), rtol=1e-10, atol=1e-10)
        for name, part in change(block, 4).items():  # second derivatives
            found = hessian(partial(moved_in, block, v, name), part)
            where = joined(block, {own: torch.full(s, float(own == name), dtype=D) for own, s in block.shapes.items()})
            index = where.nonzero()[:, 0]
            close(found.reshape(part.numel(), -1), 2 * H[index[:, None], index], rtol=1e-10, atol=1e-10)


def test_multiples_and_sums(structure: str, bias: str) -> None:
    for one, two in zip(fitted(structure, bias).hessians, fitted(structure, bias, seed=2).hessians):
        close(one.times(0.3).dense(), 0.3 * one.dense(), rtol=1e-10, atol=1e-12)
        total = one.times(0.3).plus(two)
        if total is not None:
            close(total.dense(), 0.3 * one.dense() + two.dense(), rtol=1e-10, atol=1e-10)
            v = change(one)
            close(total.quadratic(v), 0.3 * one.quadratic(v) + two.quadratic(v), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("by_parameter", [False, True])
def test_precisions(structure: str, bias: str, by_parameter: bool) -> None:
    """With a prior: the matrix, solutions, variances, the covariance of samples and the determinant."""
    for block in fitted(structure, bias).hessians:
        prior = priors(block, by_parameter)
        P = with_prior(block, prior)
        mean = change(block)
        belief = block.belief(mean, prior, SCALE)
        close(belief.mean.flatten(), joined(block, mean))
        precision = belief.precision
        close(precision.to_dense(), P, rtol=1e-10, atol=1e-10)
        v = torch.randn(belief.mean.shape, dtype=D, generator=torch.Generator().manual_seed(0))
        close(precision.solve(v).flatten(), torch.linalg.solve(P, v.flatten()), rtol=1e-9, atol=1e-10)
        covariance = torch.linalg.inv(P)
        close(precision.variance().flatten(), covariance.diagonal(), rtol=1e-9, atol=1e-10)
        units = torch.eye(len(P), dtype=D).view(-1, *belief.mean.shape)
        root = torch.stack([precision.sample(unit).flatten() for unit in units], 1)
        close(root @ root.T, covariance, rtol=1e-9, atol=1e-10)
        close(precision.logdet(), torch.linalg.slogdet(P)[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("by_parameter", [False, True])
def test_determinants_and_their_derivatives(structure: str, bias: str, by_parameter: bool) -> None:
    """∂ log |s H + δ| is tr(P^-1 H) by s, and the trace of a parameter's part of P^-1 by its δ."""
    for block in fitted(structure, bias).hessians:
        values = priors(block, by_parameter)
        if len(set(values.values())) == 1:
            shared = torch.tensor(0.5, dtype=D, requires_grad=True)
            prior = dict.fromkeys(block.shapes, shared)
        else:
            prior = {name: torch.tensor(value, dtype=D, requires_grad=True) for name, value in values.items()}
        scale = torch.tensor(SCALE, dtype=D, requires_grad=True)
        logdet = block.logdet(prior, scale)
        P = with_prior(block, values)
        close(logdet, torch.linalg.slogdet(P)[1], rtol=1e-10, atol=1e-10)
        covariance = torch.linalg.inv(P)
        slope, *slopes = torch.autograd.grad(logdet, [scale, *{id(t): t for t in prior.values()}.values()])
        close(slope, (covariance * block.dense()).sum(), rtol=1e-9, atol=1e-9)
        if len(slopes) == 1:
            close(slopes[0], covariance.trace(), rtol=1e-9, atol=1e-9)
        for own, found in zip(block.shapes, slopes) if len(slopes) > 1 else ():
            inside = {name: torch.full(s, float(name == own), dtype=D) for name, s in block.shapes.items()}
            close(found, covariance.diagonal() @ joined(block, inside), rtol=1e-9, atol=1e-9)


def jacobian(model: nn.Module, block: Structure, params: Mapping[str, Tensor], example: Tensor) -> Tensor:
    slopes = jacrev(lambda p: functional_call(model, p, (example[None],)).flatten())(params)
    return torch.stack([joined(block, {name: g[k] for name, g in slopes.items()}) for k in range(OUT)])


def test_covariances_of_outputs(structure: str) -> None:
    model, posterior = network(), fitted(structure, num_data=3 * N)
    x, _ = data(5)
    for block, way in zip(posterior.hessians, posterior._output_covariances(), strict=True):
        params = {name: posterior.mean[name] for name in block.shapes}
        J = torch.stack([jacobian(model, block, params, example) for example in x])
        P = block.dense() + torch.eye(block.size, dtype=D)
        found = output_covariance(Network(model, (x,)), params, [way], joint=True)
        close(found, J @ torch.linalg.inv(P) @ J.mT, rtol=1e-9, atol=1e-10)


# --- what is built on them ---


def test_files(structure: str, bias: str, tmp_path: Path) -> None:
    posterior = fitted(structure, bias)
    posterior.save(tmp_path / "one")
    loaded = load(tmp_path / "one", network())
    assert isinstance(loaded, LaplacePosterior)
    for one, two in zip(posterior.hessians, loaded.hessians, strict=True):
        assert one.kind == two.kind
        assert dict(one.shapes) == dict(two.shapes)
        stored, again = one.stored(), two.stored()
        assert all(torch.equal(stored[key], again[key]) for key in stored.keys() | again.keys())
        close(two.dense(), one.dense(), rtol=1e-10, atol=1e-10)
        v = change(one)
        close(two.quadratic(v), one.quadratic(v), rtol=1e-10, atol=1e-10)
        assert (one.plus(one) is None) == (two.plus(two) is None) == (one.plus(two) is None)
    drawn = [p.sample(2, seed=3) for p in (posterior, loaded)]
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])


def test_files_say_what_no_structure_can_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted("block diagonal").save(tmp_path / "one")
    monkeypatch.delitem(Structure.by_kind, "BlockDiagonal")
    with pytest.raises(ValueError, match="no structure stores blocks as 'BlockDiagonal': import the module"):
        load(tmp_path / "one", network())


def test_the_kinds_in_files_never_change() -> None:
    kinds = {name: Structure.by_name[name].kind for name in ("diag", "kron", "input", "full", "subsampled")}
    factored = dict.fromkeys(("kron", "input"), "FactoredHessian")
    others = {"diag": "DiagonalHessian", "full": "DenseHessian", "subsampled": "SubsampledHessian"}
    assert kinds == {**factored, **others}


def test_evidence_and_tuning(structure: str, bias: str) -> None:
    posterior = fitted(structure, bias)
    before = posterior.log_marginal_likelihood()
    prior = torch.tensor(1.0, dtype=D, requires_grad=True)
    posterior.log_marginal_likelihood(prior).backward()
    volume = sum(torch.linalg.slogdet(b.dense() + torch.eye(b.size, dtype=D))[1] for b in posterior.hessians)
    weights = sum(m.square().sum() for m in posterior.mean.values())
    close(before, -posterior.fit.loss - (volume + weights) / 2, rtol=1e-10, atol=1e-10)
    posterior.tune_prior()
    assert posterior.log_marginal_likelihood() > before
    tuned = torch.tensor(posterior.prior_precision, dtype=D, requires_grad=True)
    (slope,) = torch.autograd.grad(posterior.log_marginal_likelihood(tuned), tuned)
    assert abs(float(slope)) < 1e-4 * abs(float(prior.grad))  # pyright: ignore[reportArgumentType]


def test_penalties(structure: str, bias: str) -> None:
    """EWC is s/2 v'H v over all blocks; of two tasks, with and without the prior."""
    one, two, model = fitted(structure, bias), fitted(structure, bias, seed=2), network()
    both = EWC(one, 0.5).add(two, 2.0, decay=0.3)
    alone, with_prior = EWC(one, 0.5), EWC(one, 0.5, prior=True)
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn(p.shape, dtype=D, generator=torch.Generator().manual_seed(p.numel()))
    v = {name: (p - one.mean[name]).detach() for name, p in model.named_parameters()}

    def form(posterior: LaplacePosterior) -> Tensor:
        flat = [(joined(block, v), block.dense()) for block in posterior.hessians]
        return torch.stack([v @ H @ v for v, H in flat]).sum()

    close(alone(model), 0.25 * form(one), rtol=1e-10, atol=1e-10)
    close(with_prior(model), 0.25 * (form(one) + sum(part.square().sum() for part in v.values())), rtol=1e-10, atol=0)
    close(both(model), 0.3 * 0.25 * form(one) + form(two), rtol=1e-10, atol=1e-10)


class Scaled(nn.Module):
    """A linear model whose outputs are multiplied by a parameter of the given shape, with one element."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scale = nn.Linear(4, OUT, dtype=D), nn.Parameter(torch.full(shape, 1.5, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def test_a_scalar_parameter_has_the_posterior_of_one_of_shape_one(structure: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(N, 4, dtype=D, generator=generator), torch.arange(N) % OUT
    found = []
    for shape in ((), (1,)):
        posterior = laplace(Scaled(shape), [(x, y)], likelihood="categorical", structure=structure)
        posterior.save(tmp_path / "posterior.safetensors")
        again = load(tmp_path / "posterior.safetensors", model=posterior.model)
        samples = {name: values.flatten(1) for name, values in again.sample(2, seed=0).items() if values.dim() > 1}
        assert again.sample(2, seed=0)["scale"].shape == (2, *shape)
        samples["scale"] = again.sample(2, seed=0)["scale"].reshape(2, 1)
        found.append((again.variance()["scale"].reshape(1), samples, again.predict(x, method="linear")))
    close(found[0], found[1], rtol=1e-9, atol=1e-12)
