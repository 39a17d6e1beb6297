"""The subsampled Fisher against the one made of per-example gradients that are written down.

Tolerances: float64 1e-12 + 1e-15 cond, float32 2e-7 max(50, cond), with cond = λ_max(F)/λ; all of whole vectors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector
from torch.nn.utils.parametrizations import weight_norm

from bayesgrad import SubsampledFisher, likelihoods

N = 6
CLASSES = 4
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "categorical": lambda f, y: F.cross_entropy(f.flatten(0, -2), y.flatten(), reduction="sum"),
    "bernoulli": lambda f, y: F.binary_cross_entropy_with_logits(f, y, reduction="sum"),
    "gaussian": lambda f, y: 0.5 * F.mse_loss(f, y, reduction="sum"),
}


# --- networks ---


class Mean(nn.Module):
    """Over positions: (N, T, features) to (N, features)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Swap(nn.Module):
    """Positions first, or back."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


class First(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[0]


class Last(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[-1]


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Take(nn.Module):
    """The outputs of a recurrent layer, without its state."""

    def forward(self, x: Tensor | tuple[Tensor, object]) -> Tensor:
        return x[0] if isinstance(x, tuple) else x


class Merged(nn.Module):
    """Examples and positions in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x.flatten(0, 1)).tanh().view(len(x), -1, 5).sum(1))


class Twice(nn.Module):
    """One module at two places with different numbers of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.inner(x).tanh().mean(1)).tanh())


class ConvTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(2 * 16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.inner(x).tanh()).flatten(1))


class Tokens(nn.Module):
    """Words in, logits over words out, (N, T, words); the table is shared with the head in one of three ways."""

    def __init__(self, tied: str, words: int = 5, size: int = 3, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(words, size, padding_idx=padding)
        self.inner = nn.Linear(size, size)
        self.head = nn.Linear(size, words) if tied != "raw" else None
        if tied == "head":
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(self.table(x)).tanh()
        return self.head(h) if self.head is not None else h @ self.table.weight.T


class Encoder(nn.Module):
    def __init__(self, batch_first: bool = True, pool: str = "mean") -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=batch_first)
        self.head = nn.Linear(4, CLASSES)
        self.batch_first, self.pool = batch_first, pool

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(self.table(x if self.batch_first else x.T))
        h = h if self.batch_first else h.transpose(0, 1)
        return self.head(h if self.pool == "none" else h[:, 0] if self.pool == "first" else h.mean(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Raw(nn.Module):
    """Parameters that no layer holds, one without dimensions, and one that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(5, 6))
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.unread = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x @ self.matrix).tanh() * self.scale)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x) * self.b(y)


class Broadcast(nn.Module):
    """A layer that is applied once for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.each, self.start = nn.Linear(5, CLASSES), nn.Linear(5, CLASSES), nn.Parameter(torch.randn(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.each(x) * self.once(self.start)


class Positions(nn.Module):
    """A table of positions, looked up once for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places, self.head = nn.Embedding(5, 3), nn.Embedding(N, 3), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.table(x) + self.places(torch.arange(x.shape[1]))).tanh().mean(1))


class Doubled(nn.Linear):
    """Its forward pass is not torch.nn's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(6, CLASSES))
    model.insert(2, nn.Unflatten(1, (1, 4)))
    for layer in (model[0], model[3]):
        layer.weight.requires_grad_(False)
    model[-1].bias.requires_grad_(False)
    return model


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 2, padding="same", groups=2),
        nn.Tanh(),
        nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1), padding_mode="reflect", groups=2),
        nn.Tanh(),
        nn.Conv2d(6, 2, 2, padding=1, padding_mode="circular", bias=False),
        nn.Flatten(),
        nn.LazyLinear(CLASSES),
    )


def reals(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(N, *shape)


def words(count: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(count, (N, *shape))


def normed(norm: nn.Module, size: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, size, 3), norm, nn.Tanh(), nn.Flatten(), nn.LazyLinear(CLASSES))


Case = tuple[Callable[[], nn.Module], Callable[[], "Tensor | tuple[Tensor, ...]"]]
CASES: dict[str, Case] = {
    "MLP": (
        lambda: nn.Sequential(
            nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.ReLU(inplace=True), nn.Linear(6, CLASSES)
        ),
        reals(5),
    ),
    "Linear on sequences": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, CLASSES)), reals(2, 3)),
    "Conv2d": (images, reals(2, 7, 8)),
    "Conv1d": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3, stride=2, dilation=2, padding=3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(28, 4)
        ),
        reals(2, 11),
    ),
    "Conv3d": (
        lambda: nn.Sequential(
            nn.Conv3d(2, 4, (2, 1, 3), stride=(1, 2, 1), padding=(1, 0, 1), groups=2),
            nn.Tanh(),
            nn.Conv3d(4, 2, 2, padding=1, padding_mode="replicate"),
            nn.Flatten(),
            nn.LazyLinear(CLASSES),
        ),
        reals(2, 3, 4, 3),
    ),
    "GroupNorm": (lambda: normed(nn.GroupNorm(2, 4), 4), reals(2, 5, 5)),
    "BatchNorm2d": (lambda: normed(nn.BatchNorm2d(4), 4).eval(), reals(2, 5, 5)),
    "BatchNorm1d": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, CLASSES)).eval(),
        reals(5),
    ),
    "LayerNorm": (
        lambda: nn.Sequential(nn.Linear(3, 5), nn.LayerNorm((2, 5)), nn.Tanh(), Mean(), nn.Linear(5, CLASSES)),
        reals(2, 3),
    ),
    "RMSNorm": (
        lambda: nn.Sequential(nn.Linear(3, 5), nn.RMSNorm(5), nn.Tanh(), Mean(), nn.Linear(5, CLASSES)),
        reals(2, 3),
    ),
    "encoder": (Encoder, words(7, 5)),
    "encoder, all positions": (lambda: Encoder(pool="none"), words(7, 3)),
    "encoder, positions first": (lambda: Encoder(batch_first=False), words(7, 5)),
    "encoder, positions first, as many": (lambda: Encoder(batch_first=False), words(7, N)),
    "encoder, positions first, as many, reads one": (
        lambda: Encoder(batch_first=False, pool="first"),
        words(7, N),
    ),
    "module shared": (Twice, reals(3, 5)),
    "conv shared": (ConvTwice, reals(2, 4, 4)),
    "words": (lambda: Tokens("no", padding=0), words(5, 3)),
    "words, head tied": (lambda: Tokens("head"), words(5, 3)),
    "words, head tied, padding": (lambda: Tokens("head", padding=1), words(5, 3)),
    "words, table read raw": (lambda: Tokens("raw"), words(5, 3)),
    "words, table read raw, padding": (lambda: Tokens("raw", padding=1), words(5, 3)),
    "attention": (Attention, reals(3, 4)),
    "LSTM": (Recurrent, reals(3, 3)),
    "raw parameters": (Raw, reals(5)),
    "frozen": (frozen, reals(5)),
    "two inputs": (TwoInputs, lambda: (torch.randn(N, 3), torch.randn(N, 2))),
    "weight_norm": (lambda: nn.Sequential(weight_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, CLASSES)), reals(5)),
    "overridden": (lambda: nn.Sequential(Doubled(5, 4), nn.Tanh(), nn.Linear(4, CLASSES)), reals(5)),
    "merged": (Merged, reals(2, 3)),
    "broadcast": (Broadcast, reals(5)),
    "positions": (Positions, words(5, 3)),
    "positions, as many": (Positions, words(5, N)),
    "transposed": (
        lambda: nn.Sequential(Swap(), nn.Linear(3, 5), nn.Tanh(), Swap(), Mean(), nn.Linear(5, CLASSES)),
        reals(2, 3),
    ),
    "transposed, as many": (
        lambda: nn.Sequential(Swap(), nn.Linear(3, 5), nn.Tanh(), Swap(), Mean(), nn.Linear(5, CLASSES)),
        reals(N, 3),
    ),
    "transposed, as many, reads the first": (
        lambda: nn.Sequential(Swap(), nn.Linear(3, 5), nn.Tanh(), First(), nn.Linear(5, CLASSES)),
        reals(N, 3),
    ),
    "transposed, as many, reads the last": (
        lambda: nn.Sequential(Swap(), nn.Linear(3, 5), nn.Tanh(), Last(), nn.Linear(5, CLASSES)),
        reals(N, 3),
    ),
}
# The model's other passes are vmap's, so these are compared with passes of one example each.
BY_LOOP = ("attention", "LSTM", "raw parameters", "weight_norm", "overridden", "words, table read raw, padding")


def build(name: str) -> tuple[nn.Module, Tensor | tuple[Tensor, ...]]:
    make, data = CASES[name]
    torch.manual_seed(1)
    inputs = data()
    model = make()
    first = inputs if isinstance(inputs, tuple) else (inputs,)
    with torch.no_grad():
        model(*first)  # of lazy layers
        for module in model.modules():
            if isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d)):
                for p in module.parameters():
                    p.normal_()
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
    inputs = tuple(x.double() if x.is_floating_point() else x for x in first)
    return model.double(), inputs if len(inputs) > 1 else inputs[0]


# --- the oracle ---


def gradients(
    model: nn.Module, inputs: Tensor | tuple[Tensor, ...], labels: Tensor, likelihood: str, loop: bool = False
) -> Tensor:
    """Of each example's loss by all trainable parameters, (N, n)."""
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    loss = LOSSES[likelihood]
    if loop:
        rows = []
        for j in range(len(labels)):
            one = loss(model(*(x[j : j + 1] for x in arguments)), labels[j : j + 1])
            parts = torch.autograd.grad(one, list(params.values()), materialize_grads=True)
            rows.append(parameters_to_vector([part.contiguous() for part in parts]))
        return torch.stack(rows)

    def of_one(values: dict[str, Tensor], label: Tensor, *example: Tensor) -> Tensor:
        return loss(functional_call(model, values, tuple(x[None] for x in example)), label[None])

    values = {name: p.detach() for name, p in params.items()}
    with sdpa_kernel(SDPBackend.MATH):
        parts = vmap(grad(of_one), in_dims=(None, 0, *[0] * len(arguments)))(values, labels, *arguments)
    return torch.cat([parts[name].reshape(len(labels), -1) for name in params], 1)


def near(found: Tensor, expected: Tensor, rtol: float) -> None:
    assert found.shape == expected.shape
    error = torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected)
    assert error <= rtol, f"relative error {error:.2e} > {rtol:.2e}"


def near_solve(fisher: SubsampledFisher, dense: Tensor, v: Tensor, damping: float) -> None:
    cond = float(torch.linalg.eigvalsh(dense)[-1]) / damping
    eye = torch.eye(len(dense), dtype=torch.float64)
    near(fisher.solve(v, damping), torch.linalg.solve(dense + damping * eye, v), 1e-12 + 1e-15 * cond)


@pytest.mark.parametrize("name", CASES)
def test_against_per_example_gradients(name: str) -> None:
    model, inputs = build(name)
    fisher = SubsampledFisher(model, inputs, seed=2)
    assert fisher.labels is not None
    rows = gradients(model, inputs, fisher.labels, "categorical", loop=name in BY_LOOP)
    dense = rows.T @ rows / N
    v = torch.randn(len(dense), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    near(fisher.gram(), rows @ rows.T / N, 1e-12)
    near(fisher.dense(), dense, 1e-12)
    near(fisher.diagonal(), dense.diagonal(), 1e-12)
    near(fisher.matvec(v), dense @ v, 1e-12)
    near(fisher.quadratic(v), v @ dense @ v, 1e-12)
    assert not fisher.dense().requires_grad  # no graph is kept
    for damping in (1e-2, 1e-6):
        near_solve(fisher, dense, rows.mean(0), damping)
    named = dict(zip(fisher.names, v.split([model.get_parameter(n).numel() for n in fisher.names])))
    named = {n: part.view_as(model.get_parameter(n)) for n, part in named.items()}
    assert fisher.names == [n for n, p in model.named_parameters() if p.requires_grad]
    for product in (fisher.matvec, lambda x: fisher.solve(x, 1e-2)):
        by_name = product(named)
        assert list(by_name) == fisher.names
        near(torch.cat([by_name[n].flatten() for n in fisher.names]), product(v), 1e-14)
    near(fisher.quadratic(named), fisher.quadratic(v), 1e-14)


def test_the_model_is_left_as_it_was() -> None:
    model, inputs = build("encoder")
    kept = {name: t.clone() for name, t in model.state_dict().items()}
    SubsampledFisher(model, inputs)
    assert all(p.grad is None for p in model.parameters())
    assert all(not module._forward_hooks for module in model.modules())
    assert all(torch.equal(t, kept[name]) for name, t in model.state_dict().items())


def test_labels_are_a_function_of_the_seed() -> None:
    model, inputs = build("Linear on sequences")
    labels = [SubsampledFisher(model, inputs, seed=seed).labels for seed in (3, 3, 4, None, 0)]
    assert torch.equal(labels[0], labels[1])
    assert not torch.equal(labels[0], labels[2])
    assert torch.equal(labels[3], labels[4])
    state = torch.get_rng_state()
    SubsampledFisher(model, inputs, seed=5)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["MLP", "transposed", "merged"])
def test_one_example(name: str) -> None:
    model, inputs = build(name)
    fisher = SubsampledFisher(model, inputs[:1])
    rows = gradients(model, inputs[:1], fisher.labels, "categorical")
    near(fisher.dense(), rows.T @ rows, 1e-12)


# --- the other Fishers ---


def targets(likelihood: str, outputs: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if likelihood == "categorical":
        return torch.randint(outputs.shape[-1], outputs.shape[:-1], generator=generator)
    if likelihood == "bernoulli":
        return torch.randint(2, outputs.shape, generator=generator).double()
    return torch.randn(outputs.shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("likelihood", LOSSES)
@pytest.mark.parametrize("name", ["MLP", "Linear on sequences", "raw parameters", "words, head tied"])
def test_exact_is_the_gauss_newton_matrix(name: str, likelihood: str) -> None:
    model, inputs = build(name)
    params = {n: p.detach() for n, p in model.named_parameters()}
    outputs = model(inputs).detach()
    jacobians = jacrev(lambda values: functional_call(model, values, (inputs,)))(params)
    J = torch.cat([jacobians[n].reshape(N, outputs[0].numel(), -1) for n in params], -1)  # (N, outputs, n)
    labels = targets(likelihood, outputs)
    dense = torch.zeros(J.shape[-1], J.shape[-1], dtype=torch.float64)
    for j in range(N):
        H = jacrev(jacrev(lambda f: LOSSES[likelihood](f[None], labels[j : j + 1])))(outputs[j])  # noqa: B023
        dense += J[j].T @ H.reshape(J.shape[1], J.shape[1]) @ J[j] / N
    fisher = SubsampledFisher(model, inputs, likelihood=likelihood, fisher="exact")
    v = torch.randn(len(dense), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert fisher.labels is None
    near(fisher.dense(), dense, 1e-12)
    near(fisher.diagonal(), dense.diagonal(), 1e-12)
    near(fisher.matvec(v), dense @ v, 1e-12)
    near(fisher.quadratic(v), v @ dense @ v, 1e-12)
    for damping in (1e-2, 1e-6):
        near_solve(fisher, dense, v, damping)


@pytest.mark.parametrize("likelihood", LOSSES)
@pytest.mark.parametrize("name", ["MLP", "Linear on sequences"])
def test_given_and_drawn_labels(name: str, likelihood: str) -> None:
    model, inputs = build(name)
    labels = targets(likelihood, model(inputs))
    rows = gradients(model, inputs, labels, likelihood)
    for kind in ("empirical", "sampled"):
        fisher = SubsampledFisher(model, inputs, likelihood=likelihood, fisher=kind, labels=labels)
        assert fisher.labels is labels
        near(fisher.dense(), rows.T @ rows / N, 1e-12)
    drawn = SubsampledFisher(model, inputs, likelihood=likelihood, seed=1)
    rows = gradients(model, inputs, drawn.labels, likelihood)
    near(drawn.dense(), rows.T @ rows / N, 1e-12)


@pytest.mark.parametrize("damping", [1e-1, 1e-3])
@pytest.mark.parametrize("name", ["MLP", "Conv2d", "encoder"])
def test_float32(name: str, damping: float) -> None:
    """The same in float32 with the weights and labels of float64, for a gradient of the same batch.

    The solution has at most the relative error of the matrix times its condition, and again for the solver's own.
    """
    model, inputs = build(name)
    for p in model.parameters():
        p.data = p.data.float().double()
    inputs = inputs.float().double() if inputs.is_floating_point() else inputs
    labels = SubsampledFisher(model, inputs).labels
    rows = gradients(model, inputs, labels, "categorical")
    dense = rows.T @ rows / N
    cond = float(torch.linalg.eigvalsh(dense)[-1]) / damping
    u = rows.mean(0)
    expected = torch.linalg.solve(dense + damping * torch.eye(len(dense), dtype=torch.float64), u)
    single = inputs.float() if inputs.is_floating_point() else inputs
    fisher = SubsampledFisher(model.float(), single, labels=labels)
    assert fisher.solve(u.float(), damping).dtype == torch.float32
    gram = rows @ rows.T / N
    near(fisher.gram().double(), gram, 1e-5)
    norm = partial(torch.linalg.matrix_norm, ord=2)
    rounding = float(norm(fisher.gram().double() - gram) / norm(gram)) + torch.finfo(torch.float32).eps
    near(fisher.solve(u.float(), damping).double(), expected, 2 * rounding * max(50, cond))


# --- likelihoods ---


@pytest.mark.parametrize("shape", [(5, 3), (4, 2, 3), (2, 3, 2, 3)])
@pytest.mark.parametrize("likelihood", LOSSES)
def test_residuals_and_roots_are_derivatives_of_torchs_losses(likelihood: str, shape: tuple[int, ...]) -> None:
    outputs = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = targets(likelihood, outputs)
    kind = likelihoods.named(likelihood)
    (expected,) = torch.autograd.grad(LOSSES[likelihood](outputs, labels), outputs)
    torch.testing.assert_close(kind.residual(outputs, labels), expected, rtol=1e-12, atol=1e-14)
    size = outputs[0].numel()
    H = jacrev(jacrev(lambda f: LOSSES[likelihood](f[None], labels[:1])))(outputs[0].detach()).reshape(size, size)
    roots = torch.stack([root[0].flatten() for root in kind.hessian_roots(outputs)], 1)
    torch.testing.assert_close(roots @ roots.T, H, rtol=1e-12, atol=1e-14)


def test_drawn_classes_have_their_probabilities() -> None:
    """Frequencies within five standard errors; what is impossible is never drawn."""
    draws = 20_000
    logits = torch.tensor([[0.0, 1.0, -2.0, -torch.inf], [3.0, -torch.inf, 0.0, 0.5]], dtype=torch.float64)
    p = logits.softmax(-1)
    generator = torch.Generator().manual_seed(0)
    labels = likelihoods.named("categorical").sample(logits.expand(draws, 2, 4), generator)
    assert labels.shape == (draws, 2)
    frequencies = F.one_hot(labels, 4).double().mean(0)
    assert ((frequencies - p).abs() <= 5 * (p * (1 - p) / draws).sqrt()).all()
    together = (labels[:, 0] == 1) & (labels[:, 1] == 0)  # positions are independent
    joint = p[0, 1] * p[1, 0]
    assert (together.double().mean() - joint).abs() <= 5 * (joint * (1 - joint) / draws).sqrt()


def test_each_output_has_its_own_label() -> None:
    classes = torch.tensor([[2, 0, 1], [1, 1, 2]])
    certain = 1e3 * F.one_hot(classes, 3).double()
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(likelihoods.named("categorical").sample(certain, generator), classes)
    assert torch.equal(likelihoods.named("bernoulli").sample(certain - 500, generator), F.one_hot(classes, 3).double())
    means = 1e6 * classes.double()
    assert torch.equal((likelihoods.named("gaussian").sample(means, generator) / 1e6).round(), classes.double())


def test_drawn_bits_have_their_probabilities() -> None:
    draws = 20_000
    logits = torch.tensor([0.0, 1.5, -3.0, torch.inf, -torch.inf], dtype=torch.float64)
    p = logits.sigmoid()
    labels = likelihoods.named("bernoulli").sample(logits.expand(draws, 5), torch.Generator().manual_seed(0))
    assert set(labels.unique().tolist()) == {0.0, 1.0}
    assert ((labels.mean(0) - p).abs() <= 5 * (p * (1 - p) / draws).sqrt()).all()


def test_drawn_targets_have_unit_noise() -> None:
    draws = 20_000
    means = torch.tensor([0.0, 7.0], dtype=torch.float64)
    noise = likelihoods.named("gaussian").sample(means.expand(draws, 2), torch.Generator().manual_seed(0)) - means
    assert (noise.mean(0).abs() <= 5 / draws**0.5).all()
    assert ((noise.var(0) - 1).abs() <= 5 * (2 / draws) ** 0.5).all()
    assert abs(float((noise[:, 0] * noise[:, 1]).mean())) <= 5 / draws**0.5


# --- refusals ---


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(5), nn.BatchNorm1d(5, track_running_stats=False).eval()])
def test_mixing_examples_is_refused(norm: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"1 \(BatchNorm1d\) mixes the examples of a batch"):
        SubsampledFisher(nn.Sequential(nn.Linear(3, 5), norm), torch.randn(4, 3))


@pytest.mark.parametrize("after", [nn.Linear(5, 3), nn.GRU(5, 3, batch_first=True)])
def test_mixing_by_hand_is_refused(after: nn.Module) -> None:
    """A layer before the mixing has errors at other examples, and passes of one example are another model."""
    model = nn.Sequential(nn.Linear(3, 5), Centred(), nn.Unflatten(1, (1, 5)), after, Take(), nn.Flatten())
    with pytest.raises(ValueError, match="it mixes the examples of a batch"):
        SubsampledFisher(model, torch.randn(4, 3))


def test_vectors_of_other_sizes_are_refused() -> None:
    fisher = SubsampledFisher(nn.Linear(3, 2), torch.randn(4, 3))
    for vector in (torch.ones(7), torch.ones(8, 1)):
        with pytest.raises(ValueError, match=r"a flat vector must have shape \(8,\)"):
            fisher.matvec(vector)
    with pytest.raises(ValueError, match="needs the names of the trainable parameters; \\['bias'\\]"):
        fisher.solve({"weight": torch.ones(2, 3)}, 0.1)
    with pytest.raises(ValueError, match=r"weight must have shape \(2, 3\), got \(3, 2\)"):
        fisher.quadratic({"weight": torch.ones(3, 2), "bias": torch.ones(2)})


@pytest.mark.parametrize("damping", [0.0, -1.0, float("nan"), float("inf")])
def test_damping_must_be_positive(damping: float) -> None:
    with pytest.raises(ValueError, match="damping must be a finite positive number"):
        SubsampledFisher(nn.Linear(3, 2), torch.randn(4, 3)).solve(torch.ones(8), damping)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(fisher="diagonal"), "fisher must be one of 'sampled', 'exact', 'empirical', got 'diagonal'"),
        (dict(likelihood="cauchy"), "likelihood must be one of"),
        (dict(fisher="empirical"), "fisher='empirical' needs labels="),
        (dict(fisher="exact", labels=torch.zeros(4).long()), "fisher='exact' takes no labels"),
        (dict(labels=torch.full((4,), 2)), r"labels must be in 0\.\.1, got 2 to 2"),
        (dict(labels=torch.full((4,), -100)), r"labels must be in 0\.\.1, got -100 to -100"),
        (dict(labels=torch.zeros(3).long()), r"labels must be whole numbers of shape \(4,\)"),
        (dict(labels=torch.zeros(4)), "labels must be whole numbers"),
        (dict(likelihood="gaussian", labels=torch.zeros(4)), r"labels must have the outputs' shape \(4, 2\)"),
        (dict(likelihood="bernoulli", labels=torch.zeros(4)), r"labels must have the outputs' shape \(4, 2\)"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, message: str) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=message):
        SubsampledFisher(model, torch.randn(4, 3), **arguments)
    assert not model._forward_hooks


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="the model has no trainable parameters"):
        SubsampledFisher(nn.Linear(3, 2).requires_grad_(False), torch.randn(4, 3))


def test_outputs_that_do_not_count_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="the first dimension of inputs and outputs must be that of examples"):
        SubsampledFisher(nn.Sequential(nn.Linear(3, 2), nn.Flatten(0)), torch.randn(4, 3))


class DoubledLSTM(nn.LSTM):
    """Its forward pass is not torch.nn's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)[0]


@pytest.mark.parametrize("layer", [Doubled(5, 4), DoubledLSTM(5, 4, batch_first=True)])
def test_dropout_must_be_off_where_passes_are_repeated(layer: nn.Module) -> None:
    """vmap tells of random numbers by itself; an LSTM's passes are loops, which would not."""
    layer = nn.Sequential(nn.Unflatten(1, (1, 5)), layer, nn.Flatten())
    model = nn.Sequential(layer, nn.Dropout(0.5), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"0\.1\.weight\S* needs additional passes, in which dropout would differ"):
        SubsampledFisher(model, torch.randn(6, 5))
    SubsampledFisher(model.eval(), torch.randn(6, 5))


def test_an_embedding_that_rescales_its_rows_is_refused_by_name() -> None:
    """max_norm writes to the weight in the forward pass, which no vectorised pass of single examples can do."""
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Flatten(), nn.Linear(6, 2))
    inputs = torch.arange(8).view(4, 2) % 5
    with pytest.raises(ValueError, match=r"0 has max_norm=1\.0, which rescales .* set its max_norm to None"):
        SubsampledFisher(model, inputs)
    plain = copy.deepcopy(model)
    plain[0].max_norm = None  # what the message asks for
    torch.testing.assert_close(plain(inputs), model(inputs))
    assert SubsampledFisher(plain, inputs).dense().shape == (15 + 14, 15 + 14)


def test_dropout_is_one_mask_where_layers_explain_everything() -> None:
    """For unit Gaussian noise, F of a linear model is I ⊗ X'X/N, here with the inputs that the one pass masked."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 5, bias=False)).double()
    x = torch.rand(N, 5, dtype=torch.float64) + 1
    torch.manual_seed(0)
    masked = model[0](x)
    torch.manual_seed(0)
    fisher = SubsampledFisher(model, x, likelihood="gaussian", fisher="exact")
    near(fisher.dense(), torch.kron(torch.eye(5, dtype=torch.float64), masked.T @ masked / N), 1e-12)


def test_a_damping_for_each_parameter() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    fisher = SubsampledFisher(model, torch.randn(7, 4, dtype=torch.float64))
    damping = dict(zip(fisher.names, (0.1, 0.02, 3.0, 0.5)))
    diagonal = torch.cat(
        [torch.full((p.numel(),), damping[n], dtype=torch.float64) for n, p in model.named_parameters()]
    )
    v = torch.randn(len(diagonal), dtype=torch.float64)
    expected = torch.linalg.solve(fisher.dense() + torch.diag(diagonal), v)
    torch.testing.assert_close(fisher.solve(v, damping), expected, rtol=1e-10, atol=1e-12)
    for bad in ({"0.weight": 1.0}, {**damping, "0.weight": 0.0}):
        with pytest.raises(ValueError, match="damping by name must be a finite positive number for each of"):
            fisher.solve(v, bad)
