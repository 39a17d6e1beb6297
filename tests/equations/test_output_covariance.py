"""The covariance of linearised outputs against dense Jacobians by torch.func, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

import bayesgrad
from bayesgrad.belief import Belief, Joint
from bayesgrad.layers import output_covariance as module
from bayesgrad.layers.network import Network
from bayesgrad.posterior import GaussianPosterior
from bayesgrad.precision import Dense, Diagonal, Kronecker, Precision, Scalar, Spectral

D = torch.float64
STRUCTURES = ("diag", "kron", "input", "full", "subsampled")
COUNT, OUT = 7, 3
BLOCKS = {"whole": (1 << 22, 1 << 24), "examples": (300, 1 << 24), "outputs": (1, 60)}


class Tied(nn.Module):
    """An embedding whose table is also the head: its gradients are sums over two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(OUT, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, OUT)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.table(x)).tanh().mean(1))


class Raw(nn.Module):
    """A bare parameter, a layer that is used twice, and one whose weight is read beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.twice, self.read, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(x * self.scale).tanh()).tanh()
        return self.head(self.read(x).tanh() + self.read.weight.sum(0))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x)[0][:, -1])


class SharedBias(nn.Module):
    """The bias of a Linear layer is also read by another operation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).tanh() + self.first.bias**2)


def floats(*shape: int) -> Tensor:
    return torch.randn(COUNT, *shape, dtype=D)


def words(rows: int = 6) -> Tensor:
    return torch.randint(rows, (COUNT, 5))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, OUT)), lambda: floats(4)),
    "many positions": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 2, stride=2), nn.Flatten(), nn.Linear(18, OUT)
        ),
        lambda: floats(1, 6, 6),
    ),
    "groups, stride, dilation": (
        lambda: nn.Sequential(
            nn.Conv1d(4, 6, 2, groups=2, stride=2, bias=False),
            nn.Tanh(),
            nn.Conv1d(6, 4, 2, groups=2, dilation=2),
            nn.Flatten(),
            nn.Linear(8, OUT),
        ),
        lambda: floats(4, 8),
    ),
    "sequence": (
        lambda: nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 8), nn.Flatten(), nn.Linear(16, OUT)),
        lambda: floats(2, 8),
    ),
    "outputs at positions": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, OUT)),
        lambda: floats(2, 3),
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(6, 4, padding_idx=1), nn.Tanh(), nn.Flatten(), nn.Linear(20, OUT)),
        words,
    ),
    "tied embedding": (Tied, lambda: words(OUT)),
    "normalised": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 2),
            nn.GroupNorm(2, 4),
            nn.BatchNorm1d(4),
            nn.Flatten(),
            nn.LayerNorm(12),
            nn.Linear(12, OUT),
        ),
        lambda: floats(2, 4),
    ),
    "raw parameters": (Raw, lambda: floats(4)),
    "recurrent": (Recurrent, lambda: floats(2, 3)),
    "shared bias": (SharedBias, lambda: floats(4)),
    "attention": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(4, 2, 5, batch_first=True), nn.Flatten(), nn.Linear(12, OUT)),
        lambda: floats(3, 4),
    ),
}


def built(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make().double().eval()
    for buffer_name, buffer in model.named_buffers():
        if "running" in buffer_name:
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    return model, inputs()


def jacobians(model: nn.Module, x: Tensor, names: list[str]) -> Mapping[str, Tensor]:
    """Name -> (examples, outputs, *shape)."""
    params = {name: p.detach() for name, p in model.named_parameters() if name in names}
    with sdpa_kernel(SDPBackend.MATH):
        rows = [jacrev(lambda p, e=e: functional_call(model, p, (e[None],)).flatten())(params) for e in x]
    return {name: torch.stack([row[name] for row in rows]) for name in params}


def expected(posterior: GaussianPosterior, J: Mapping[str, Tensor]) -> Tensor:
    """J S J' with dense matrices, block by block."""
    total: Any = 0.0
    for name, belief in posterior.beliefs.items():
        rows = belief.join(J) if isinstance(belief, Joint) else J[name]
        rows = rows.flatten(2)
        total = total + rows @ torch.linalg.inv(belief.precision.to_dense()) @ rows.mT
    return total


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def check(posterior: GaussianPosterior, model: nn.Module, x: Tensor, J: Mapping[str, Tensor]) -> None:
    S = expected(posterior, J)
    mean, covariance = posterior._linear_moments(Network(model, (x,)), joint=True)
    close(covariance, S)
    assert torch.equal(covariance, covariance.mT) or torch.allclose(covariance, covariance.mT, rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        close(mean, model(x))
    mean, variance = posterior._linear_moments(Network(model, (x,)), joint=False)
    close(variance.flatten(1), S.diagonal(dim1=1, dim2=2))
    assert variance.shape == mean.shape


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.filterwarnings("ignore:structure=")
def test_laplace(structure: str, name: str, blocks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the sizes of the blocks of examples and outputs are."""
    model, x = built(name)
    with torch.no_grad():
        labels = torch.randn_like(model(x))
    posterior = bayesgrad.laplace(model, [(x, labels)], likelihood="gaussian", structure=structure, prior_precision=0.7)
    monkeypatch.setattr(module, "CHUNK", BLOCKS[blocks][0])
    monkeypatch.setattr(module, "BLOCK", BLOCKS[blocks][1])
    check(posterior, model, x, jacobians(model, x, list(posterior.mean)))


def spd(*shape: int) -> Tensor:
    root = torch.randn(*shape, shape[-1], dtype=D)
    return root @ root.mT / shape[-1] + 0.1 * torch.eye(shape[-1], dtype=D)


PRECISIONS: dict[str, Callable[[tuple[int, ...]], Precision]] = {
    "Scalar": lambda s: Scalar(torch.tensor(0.3, dtype=D), s),
    "Diagonal": lambda s: Diagonal(torch.rand(s, dtype=D) + 0.1),
    "Kronecker": lambda s: Kronecker(spd(s[0], s[1]), spd(s[0], s[2]), s),
    "Kronecker, one side": lambda s: Kronecker(None, spd(s[0], s[2]), s),
    "Kronecker, diagonals": lambda s: Kronecker(
        torch.rand(s[:2], dtype=D) + 0.1, torch.rand(s[0], s[2], dtype=D) + 0.1, s
    ),
    "Kronecker, one diagonal": lambda s: Kronecker(torch.rand(s[:2], dtype=D) + 0.1, spd(s[0], s[2]), s),
    "Spectral": lambda s: Spectral(
        torch.linalg.eigh(spd(s[0], s[1]))[1], torch.linalg.eigh(spd(s[0], s[2]))[1], torch.rand(s, dtype=D) + 0.5
    ),
    "Dense": lambda s: Dense(spd(torch.Size(s).numel()), s),
}


@pytest.mark.parametrize("chunk", [1, 1 << 22])
@pytest.mark.parametrize(
    "name", ["mlp", "many positions", "groups, stride, dilation", "sequence", "embedding", "shared bias"]
)
@pytest.mark.parametrize("kind", PRECISIONS)
def test_precisions(kind: str, name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Joint beliefs about weight and bias of each layer."""
    torch.manual_seed(1)
    model, x = built(name)
    beliefs: dict[str, Belief] = {}
    for owner, layer in model.named_modules():
        parts = {f"{owner}.{key}": p.detach() for key, p in layer.named_parameters(recurse=False)}
        if parts:
            first = next(iter(parts))
            groups = getattr(layer, "groups", 1)
            shapes = {key: p.shape for key, p in parts.items()}
            matrix = torch.cat([p.reshape(groups, len(p) // groups, -1) for p in parts.values()], -1)
            beliefs[first] = Joint(matrix, PRECISIONS[kind](tuple(matrix.shape)), shapes)
    monkeypatch.setattr(module, "CHUNK", chunk)
    posterior = GaussianPosterior(beliefs, model)
    check(posterior, model, x, jacobians(model, x, list(posterior.mean)))


def sides(positions: int, fan_in: int, fan_out: int, outputs: int = 4) -> module.Sides:
    return module.Sides(
        torch.randn(2, 3, positions, fan_in, dtype=D), torch.randn(2, 3, outputs, positions, fan_out, dtype=D)
    )


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("varied", [False, True])
@pytest.mark.parametrize("way", ["_by_sums", "_by_positions"])
def test_the_cheaper_way_is_chosen(
    way: str, varied: bool, rotated: bool, joint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few positions of wide layers are multiplied with each other; many positions of narrow layers are summed."""
    unwanted = {"_by_sums": "_by_positions", "_by_positions": "_by_sums"}[way]
    monkeypatch.setattr(module, unwanted, lambda *_: pytest.fail(f"{unwanted} was called"))
    torch.manual_seed(0)
    one = sides(12, 3, 2) if way == "_by_sums" else sides(2, 30, 20)
    shape = 2, one.errors.shape[-1], one.inputs.shape[-1]
    basis = [torch.linalg.eigh(spd(2, n))[1] if rotated else None for n in shape[1:]]
    variance = torch.rand(shape, dtype=D) if varied else None
    form = module.BilinearForm(basis[0], basis[1], variance, 0.5)
    M = torch.einsum("gncto,gnti->gncoi", one.errors, one.inputs)
    if basis[0] is not None and basis[1] is not None:
        M = basis[0].mT[:, None, None] @ M @ basis[1][:, None, None]
    weighted = M if variance is None else M * variance[:, None, None]
    wanted = 0.5 * torch.einsum("gncoi,gndoi->ncd", weighted, M)
    found = module._of_layers(one, one, form, joint)
    close(found, wanted if joint else wanted.diagonal(dim1=1, dim2=2))


def test_estimated_statistics_are_constants() -> None:
    """With `statistics=`, BatchNorm has those of a batch at the mean weights. Afterwards its buffers are as before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    x, batch = floats(3), torch.randn(20, 3, dtype=D)
    beliefs = {n: Belief(p.detach(), Diagonal(torch.rand_like(p))) for n, p in model.named_parameters()}
    posterior, before = GaussianPosterior(beliefs, model), {n: b.clone() for n, b in model.named_buffers()}
    found = posterior._linear_moments(Network(model, (x,), (batch,)), joint=True)[1]
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
    with torch.no_grad():
        hidden = model[0](batch)
        model[1].running_mean.copy_(hidden.mean(0))
        model[1].running_var.copy_(hidden.var(0))
    close(found, expected(posterior, jacobians(model, x, list(beliefs))))


def test_models_that_mix_examples_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)).double()
    beliefs = {n: Belief(p.detach(), Diagonal(torch.rand_like(p))) for n, p in model.named_parameters()}
    with pytest.raises(ValueError, match="mixes the examples of a batch"):
        GaussianPosterior(beliefs, model).predict(floats(3), method="linear")


def test_inference_mode() -> None:
    """Predictions within torch.inference_mode() are the same, and leave the model trainable."""
    model, x = built("many positions")
    beliefs = {n: Belief(p.detach(), Diagonal(torch.rand_like(p))) for n, p in model.named_parameters()}
    posterior = GaussianPosterior(beliefs, model)
    wanted = posterior.predict(x, method="linear", likelihood="gaussian").variance
    with torch.inference_mode():
        for inputs in (x, 1 * x):
            found = posterior.predict(inputs, method="linear", likelihood="gaussian").variance
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    model(x).sum().backward()


def test_half_precision_and_wrappers() -> None:
    """Gradients of half-precision weights are float32; the wrapper of a compiled model is looked through."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, OUT)).bfloat16()
    beliefs = {n: Belief(p.detach().float(), Diagonal(torch.rand(p.shape))) for n, p in model.named_parameters()}
    x = torch.randn(COUNT, 4).bfloat16()
    half = GaussianPosterior(beliefs, model)._linear_moments(Network(model, (x,)), joint=True)[1]
    full = GaussianPosterior(beliefs, model.float())._linear_moments(Network(model, (x.float(),)), joint=True)[1]
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, full, rtol=0.05, atol=0.02)
