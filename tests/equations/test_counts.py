"""Examples, positions and losses are counted right in any layout of a layer's rows, against torch.func."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from bayesgrad import SubsampledFisher, laplace
from bayesgrad.layers.examples import RowLayouts
from bayesgrad.layers.layout import MIXED, ForwardPass, RowLayout
from bayesgrad.layers.moments import symmetric
from bayesgrad.layers.per_example import OuterProducts
from bayesgrad.layers.recorder import LayerRecorder
from bayesgrad.optim import (
    FOOF,
    KFAC,
    OGN,
    VOGN,
    AdaBayes,
    AdaBayesFP,
    DenseFilter,
    KroneckerFilterFP,
    NaturalGradient,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*trains norm")
D = torch.float64
B, T, C = 4, 6, 3


def close(a: Tensor, b: Tensor, rtol: float = 1e-10) -> None:
    torch.testing.assert_close(a.detach(), b.detach(), rtol=rtol, atol=1e-13)


class Tokens(nn.Module):
    """Sequences (B, T) of tokens, each of which also sees the mean of its sequence.

    Args:
        layout: of the rows of the layers: "batch", "sequence", "flat", "windows" or "reversed" examples.
        outputs: the layout of the outputs: "batch", "sequence", "flat" or "mean" over tokens.
    """

    def __init__(self, layout: str, outputs: str = "batch") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layout, self.outputs = layout, outputs
        self.table, self.first, self.norm, self.second = (
            nn.Embedding(7, 5),
            nn.Linear(5, 6),
            nn.LayerNorm(6),
            nn.Linear(6, C),
        )
        self.double()

    def arranged(self, x: Tensor) -> Tensor:
        if self.layout == "sequence":
            return x.transpose(0, 1)
        if self.layout == "flat":
            return x.flatten(0, 1)
        if self.layout == "windows":
            return x.unflatten(1, (3, 2)).flatten(0, 1)
        return x.flip(0) if self.layout == "reversed" else x

    def restored(self, x: Tensor, count: int) -> Tensor:
        if self.layout == "sequence":
            return x.transpose(0, 1)
        x = x.flip(0) if self.layout == "reversed" else x
        return x.reshape(count, -1, x.shape[-1])

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.table(self.arranged(x))).tanh()
        h = self.restored(h, len(x))
        h = self.arranged(h + h.mean(1, keepdim=True))
        out = self.restored(self.second(self.norm(h)), len(x))
        if self.outputs == "mean":
            return out.mean(1)
        return (
            out.transpose(0, 1) if self.outputs == "sequence" else out.flatten(0, 1) if self.outputs == "flat" else out
        )


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(0, 7, (B, T)), torch.randint(0, C, (B, T))


def labels_like(y: Tensor, outputs: str) -> Tensor:
    return y.T if outputs == "sequence" else y.flatten() if outputs == "flat" else y


def per_sequence(model: nn.Module, x: Tensor, y: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
    """The gradient of each sequence's summed loss, (B, *shape), by torch.func."""
    weights = torch.ones_like(y, dtype=D) if weights is None else weights.to(D)

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        logits = functional_call(model, params, (x[None],)).reshape(-1, C)
        return (F.cross_entropy(logits, y.flatten(), reduction="none") * w.flatten()).sum()

    params = {n: p.detach() for n, p in model.named_parameters()}
    with sdpa_kernel(SDPBackend.MATH):
        return vmap(grad(loss), (None, 0, 0, 0))(params, x, y, weights)


def squares(optimizer: OGN | VOGN, model: nn.Module) -> dict[str, Tensor]:
    params = list(model.parameters())
    found = optimizer.sources[-1]._squares(params)
    return {n: found[p] for n, p in model.named_parameters()}


# --- moments ---

LAYOUTS = [("batch", "batch"), ("sequence", "sequence"), ("sequence", "batch"), ("flat", "flat"), ("windows", "batch")]
PLAIN: dict[str, Any] = {"damping_mode": "absolute", "max_norm": math.inf}
MAKE = {
    "FOOF": lambda m, n: FOOF(m, lr=0.1, fallback_lr=0.0, losses_per_example=n, **PLAIN),
    "KFAC": lambda m, n: KFAC(m, lr=0.1, damping=0.1, fallback_lr=0.0, losses_per_example=n, **PLAIN),
    "reduce": lambda m, n: KFAC(m, lr=0.1, fallback_lr=0.0, losses_per_example=n, sharing="reduce", **PLAIN),
    "FP": lambda m, n: KroneckerFilterFP(m, batch_size=B * T, losses_per_example=n),
    "empirical": lambda m, n: KroneckerFilterFP(m, batch_size=B * T, losses_per_example=n, fisher="empirical"),
}


@pytest.mark.parametrize("explicit", [None, T])
@pytest.mark.parametrize("name", MAKE)
def test_the_same_loss_in_other_layouts_takes_the_same_step(name: str, explicit: int | None) -> None:
    """Moments A and E of all layers, and the weights after two steps."""
    x, y = data()
    results = []
    for layout, outputs in LAYOUTS:
        if name == "reduce" and outputs == "sequence":
            continue  # the positions of an example are those of its index in the outputs' first dimension
        if name == "reduce" and outputs == "flat" and explicit is None:
            continue
        model = Tokens(layout, outputs)
        optimizer = MAKE[name](model, explicit)
        for _ in range(2):
            optimizer.zero_grad()
            out = model(x)
            optimizer.observe(out, labels=labels_like(y, outputs))
            F.cross_entropy(out.reshape(-1, C), labels_like(y, outputs).flatten()).backward()
            optimizer.step()
        state = {n: optimizer.state[p] for n, p in model.named_parameters()}
        results.append((dict(model.named_parameters()), state))
    (weights, state), *others = results
    assert len(others) >= 2
    for other, its in others:
        for n, p in other.items():
            close(p, weights[n])
        for n in ("table.weight", "first.weight", "second.weight"):
            for side in ("input_moment", "error_moment"):
                if side in state[n]:
                    close(symmetric(its[n][side]), symmetric(state[n][side]))


def test_moments_are_sums_over_all_rows() -> None:
    """A = Σ aa'/L and E = Σ ee'/R, with errors by autograd, in sequence-first layers."""
    x, y = data()
    model = Tokens("sequence")
    caught: list[Tensor] = []
    model.second.register_forward_pre_hook(lambda m, args: caught.append(args[0].detach()))
    optimizer = KFAC(model, lr=0.0, fallback_lr=0.0)
    out = model(x)
    optimizer.observe(out, labels=y)
    F.cross_entropy(out.flatten(0, 1), y.flatten()).backward()
    optimizer.step()
    a = torch.cat([caught[0].flatten(0, 1), torch.ones(B * T, 1, dtype=D)], 1)
    e = (out.softmax(-1) - F.one_hot(y, C)).flatten(0, 1).detach()
    entry = optimizer.state[model.second.weight]
    close(symmetric(entry["input_moment"])[0], a.T @ a / (B * T))
    close(symmetric(entry["error_moment"])[0], e.T @ e / (B * T))


@pytest.mark.parametrize("wrap", ["logits", "tuple", "dict", "loss"])
def test_what_a_model_may_return(wrap: str) -> None:
    """An object with logits, a tuple, a dictionary; a model that returns its loss has the first dimension of inputs."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, C).double()

        def forward(self, x: Tensor) -> Any:
            out = self.inner(x.transpose(0, 1)).transpose(0, 1)
            loss = out.square().sum() / (B * T)
            if wrap == "loss":
                return loss
            return {
                "logits": SimpleNamespace(loss=loss, logits=out),
                "tuple": (loss, out),
                "dict": {"loss": loss, "outputs": out},
            }[wrap]

    torch.manual_seed(0)
    x = torch.randn(B, T, 5, dtype=D)
    model = Wrapped()
    optimizer = FOOF(model, lr=0.0)
    found = model(x)
    loss = {"logits": lambda: found.loss, "tuple": lambda: found[0], "dict": lambda: found["loss"]}.get(
        wrap, lambda: found
    )
    loss().backward()
    optimizer.step()
    rows = torch.cat([x.flatten(0, 1), torch.ones(B * T, 1, dtype=D)], 1)
    count = T if wrap == "loss" else B * T
    close(symmetric(optimizer.state[model.inner.weight]["input_moment"])[0], rows.T @ rows / count)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_model_notes_the_shape_of_its_outputs() -> None:
    x, y = data()
    moments = []
    for compiled in (False, True):
        model = Tokens("sequence")
        model.norm.requires_grad_(False)
        optimizer = FOOF(model, lr=0.0)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        F.cross_entropy(run(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        moments.append(symmetric(optimizer.state[model.first.weight]["input_moment"]))
    close(*moments)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("other", ["none", "later", "gone"])
@pytest.mark.parametrize("order", ["evaluation between", "one backward pass", "two backward passes"])
def test_passes_of_a_compiled_model_are_counted_by_their_own_outputs(order: str, other: str) -> None:
    """Also if another optimizer of the model was built later, which then counts the passes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, C)).double()
    optimizer = FOOF(model, lr=0.0)
    x, y = torch.randn(11, 5, dtype=D), torch.randint(C, (11,))
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    run(x)
    second = None if other == "none" else OGN(model, params=model[0].parameters(), num_data=50)
    if other == "gone":
        del second
    outputs = run(x[:8])
    with torch.set_grad_enabled(order != "evaluation between"):
        more = run(x[8:])
    used = x[:8] if order == "evaluation between" else x
    losses = [F.cross_entropy(outputs, y[:8], reduction="sum") / len(used)]
    losses += [F.cross_entropy(more, y[8:], reduction="sum") / 11] if more.requires_grad else []
    for loss in [torch.stack(losses).sum()] if order == "one backward pass" else losses:
        loss.backward()
    optimizer.step()
    rows = torch.cat([used, torch.ones(len(used), 1, dtype=D)], 1)
    close(symmetric(optimizer.state[model[0].weight]["input_moment"])[0], rows.T @ rows / len(used))


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("ignored", [0, 2])
@pytest.mark.parametrize("make", [OGN, VOGN])
def test_squares_of_uneven_micro_batches_of_a_compiled_model(make: Any, ignored: int) -> None:
    """Each one is counted by its own outputs and labels, of which the first ones may be ignored."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, C)).double()
    plain, optimizer = copy.deepcopy(model), make(model, num_data=50, likelihood="categorical")
    x, y = torch.randn(11, 5, dtype=D), torch.randint(C, (11,))
    y[:ignored] = -100
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    for part in (slice(0, 8), slice(8, 11)):
        outputs = run(x[part])
        optimizer.observe(outputs, labels=y[part])
        (F.cross_entropy(outputs, y[part], reduction="sum") / (11 - ignored)).backward()
    found, wanted = squares(optimizer, model), per_sequence(plain, x[ignored:], y[ignored:])
    for n in found:
        close(found[n], wanted[n].square().mean(0))


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("layout", ["batch", "flat"])
@pytest.mark.parametrize("joined", [False, True])
def test_squares_of_a_compiled_model_whose_hooks_are_in_the_graph_need_the_batch_in_the_first_dimension(
    joined: bool, layout: str
) -> None:
    """The hooks of nn.Sequential are in the graph. Those of other modules run eagerly, and rows are searched."""
    x, y = data()
    model = Tokens(layout)
    outer = nn.Sequential(model) if joined else model
    optimizer = OGN(outer, num_data=50)
    run = torch.compile(outer, backend="aot_eager", fullgraph=True)
    F.cross_entropy(run(x).flatten(0, 1), y.flatten()).backward()
    expected, found = per_sequence(model, x, y), squares(optimizer, model)
    for n, p in model.named_parameters():
        lost = joined and layout == "flat"
        wanted = B * T * p.grad.square() if lost else expected[n].square().sum(0) / (B * T)
        close(found[n], wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_squares_of_a_checkpointed_model(reentrant: bool) -> None:
    """Reentrant checkpointing allows no further backward passes: the first dimension is taken for that of examples."""
    model, x, y = first_of_many()

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x.requires_grad_(), use_reentrant=reentrant)  # pyright: ignore

    outer = Checkpointed()
    optimizer = OGN(outer, num_data=50)
    F.cross_entropy(outer(x), y).backward()
    found, expected = squares(optimizer, outer), per_sequence(model, x.detach(), y)
    for n in expected:
        close(found[f"inner.{n}"], expected[n].square().mean(0))


def test_layers_called_outside_of_the_model_are_not_counted_by_its_last_outputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    optimizer = FOOF(model, lr=0.0)
    model(torch.randn(5, 3, dtype=D))
    x = torch.randn(8, 3, dtype=D)
    model[1](model[0](x)).sum().backward()
    optimizer.step()
    rows = torch.cat([x, torch.ones(8, 1, dtype=D)], 1)
    close(symmetric(optimizer.state[model[0].weight]["input_moment"])[0], rows.T @ rows / 8)


def test_images_have_a_loss_for_each_pixel() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(2, 3, 1, bias=False).double()
    x = torch.randn(2, 2, 4, 5, dtype=D)
    optimizer = FOOF(model, lr=0.0)
    F.cross_entropy(model(x), torch.randint(0, 3, (2, 4, 5))).backward()
    optimizer.step()
    rows = x.permute(0, 2, 3, 1).reshape(-1, 2)
    close(symmetric(optimizer.state[model.weight]["input_moment"])[0], rows.T @ rows / 40)


# --- per-example gradients ---


@pytest.mark.parametrize("layout", ["batch", "sequence", "flat", "windows"])
@pytest.mark.parametrize("make", [OGN, VOGN])
@pytest.mark.parametrize("outputs", ["batch", "flat", "mean"])
def test_squares_are_those_of_sequences(layout: str, make: Any, outputs: str) -> None:
    """h = Σ_j g_j^2/L for sequences j, also for flattened outputs of which T rows are one sequence."""
    x, y = data()
    y = y[:, 0] if outputs == "mean" else y
    model = Tokens(layout, outputs)
    optimizer = make(model, num_data=50, losses_per_example=T if outputs == "flat" else None)
    with optimizer.sampled(noise=torch.zeros_like) if make is VOGN else optimizer.sampled():
        F.cross_entropy(model(x).reshape(-1, C), y.flatten()).backward()
    expected = per_sequence(model, x, y)
    found = squares(optimizer, model)
    for n in expected:
        close(found[n], expected[n].square().sum(0) / y.numel())


@pytest.mark.parametrize("fisher", ["sampled", "exact"])
@pytest.mark.parametrize("layout", ["sequence", "flat", "windows"])
def test_observed_squares_are_those_of_sequences(layout: str, fisher: str) -> None:
    x, y = data()
    model, plain = Tokens(layout, "mean"), Tokens("batch", "mean")
    optimizer = OGN(model, num_data=50, fisher=fisher)
    out = model(x)
    optimizer.observe(out, labels=y[:, 0] if fisher == "sampled" else None)
    F.cross_entropy(out, y[:, 0]).backward()
    if fisher == "sampled":
        expected = {n: g.square().mean(0) for n, g in per_sequence(plain, x, y[:, 0]).items()}
    else:
        p = plain(x).softmax(-1).detach()
        each = [per_sequence(plain, x, torch.full((B,), c)) for c in range(C)]
        names = [n for n, _ in plain.named_parameters()]
        expected = {
            n: sum(torch.einsum("n,n...->...", p[:, c], g[n].square()) for c, g in enumerate(each)) / B for n in names
        }
    found = squares(optimizer, model)
    for n in expected:
        close(found[n], expected[n])


def test_rows_of_flattened_outputs_are_examples() -> None:
    """Without losses_per_example, a row of the outputs is an example: a network that treats tokens alike."""
    x, y = data()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 5), nn.Flatten(0, 1), nn.Tanh(), nn.Linear(5, C)).double()
    optimizer = OGN(model, num_data=50)
    F.cross_entropy(model(x), y.flatten()).backward()
    tokens = per_sequence(model, x.reshape(-1, 1), y.reshape(-1, 1))
    found = squares(optimizer, model)
    for n in tokens:
        close(found[n], tokens[n].square().mean(0))


class Encoder(nn.Module):
    """nn.TransformerEncoderLayer in its default layout, which is sequence first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
        self.head = nn.Linear(4, C)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.table(x.T)).mean(0))


class Pairs(nn.Module):
    """One call of an encoder for both halves of pairs (B, 2, d)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = nn.Linear(5, 4), nn.Linear(4, C)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.encoder(torch.cat([x[:, 0], x[:, 1]])).tanh().chunk(2)
        return self.head((a - b).square())


class Frames(nn.Module):
    """A convolution of frames (B T, channels, height, width), interleaved with time first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4), nn.Linear(4, C)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x.transpose(0, 1).flatten(0, 1))).tanh().mean((2, 3))
        return self.head(h.unflatten(0, (-1, len(x))).mean(0))


def inputs_of(kind: type) -> Tensor:
    torch.manual_seed(2)
    if kind is Encoder:
        return torch.randint(0, 7, (B, T))
    return torch.randn(B, 2, 5, dtype=D) if kind is Pairs else torch.randn(B, 3, 2, 3, 3, dtype=D)


@pytest.mark.filterwarnings("ignore:.*trains layer.self_attn")
@pytest.mark.parametrize("kind", [Encoder, Pairs, Frames])
def test_networks_whose_layers_do_not_begin_with_the_batch(kind: type) -> None:
    """Squares of OGN, and the matrix of SubsampledFisher, which stores inputs and errors."""
    x, y = inputs_of(kind), torch.tensor([0, 1, 2, 1])
    model = kind()
    expected = per_sequence(model, x, y)
    optimizer = OGN(model, num_data=50)
    F.cross_entropy(model(x), y).backward()
    found = squares(optimizer, model)
    for n in expected:
        close(found[n], expected[n].square().mean(0))
    fisher = SubsampledFisher(model, x, labels=y)
    rows = torch.cat([g.flatten(1) for g in expected.values()], 1)
    close(fisher.dense(), rows.T @ rows / B)
    weights = [n for n, c in fisher._gradients.columns.items() if isinstance(c, OuterProducts)]
    assert weights == [n for n, p in model.named_parameters() if p.dim() > 1 and "table" not in n]


def test_natural_gradients_of_sequences() -> None:
    """(F + damping)^-1 g with F = Σ_j g_j g_j'/L in all layouts."""
    x, y = data()
    expected = per_sequence(Tokens("batch"), x, y)
    rows = torch.cat([g.flatten(1) for g in expected.values()], 1)
    direction = torch.linalg.solve(
        rows.T @ rows / (B * T) + 0.1 * torch.eye(rows.shape[1], dtype=D), rows.sum(0) / (B * T)
    )
    for layout, outputs, explicit in [
        *[(*one, None) for one in LAYOUTS[::2]],
        ("flat", "flat", T),
        ("batch", "batch", T),
    ]:
        model = Tokens(layout, outputs)
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        optimizer = NaturalGradient(model, lr=1.0, damping=0.1, max_norm=math.inf, losses_per_example=explicit)
        out = model(x)
        optimizer.observe(out, labels=labels_like(y, outputs))
        F.cross_entropy(out.reshape(-1, C), labels_like(y, outputs).flatten()).backward()
        optimizer.step()
        close(nn.utils.parameters_to_vector(model.parameters()), before - direction, 1e-8)


def test_kronecker_factors_of_laplace_in_all_layouts() -> None:
    x, y = data()
    wanted = None
    for layout in ("batch", "sequence", "flat", "windows"):
        model = Tokens(layout, "mean")
        model.norm.requires_grad_(False)
        posterior = laplace(model, [(x, y[:, 0])], likelihood="categorical", structure="kron")
        found = torch.cat([h.dense().flatten() for h in posterior.hessians])
        wanted = found if wanted is None else wanted
        close(found, wanted)


def test_layers_that_mix_examples_have_the_squares_of_mean_gradients() -> None:
    x, y = data()
    model = Tokens("reversed")
    optimizer = OGN(model, num_data=50)
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    with pytest.warns(UserWarning, match=r"OGN trains table.weight, first.weight, .*squares of their mean"):
        found = squares(optimizer, model)
    for n, p in model.named_parameters():
        close(found[n], B * T * p.grad.square())
    reduced = KFAC(model, sharing="reduce")
    reduced.observe(model(x))
    with pytest.raises(ValueError, match="use sharing='expand'"):
        reduced.step()


def test_a_layout_is_searched_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two more backward passes in the first pass with a shape; none in later ones."""
    x, y = data()
    calls: list[int] = []
    backpropagate = LayerRecorder.backpropagate
    monkeypatch.setattr(LayerRecorder, "backpropagate", lambda *a: calls.append(1) or backpropagate(*a))
    model = Tokens("sequence")
    optimizer = OGN(model, num_data=50)
    for rows in (B, B, B - 1, B, B - 1):
        optimizer.zero_grad()
        F.cross_entropy(model(x[:rows]).flatten(0, 1), y[:rows].flatten()).backward()
        optimizer.step()
    assert len(calls) == 4


def test_a_layout_that_is_not_visible_yet_is_searched_again() -> None:
    """Errors of a network whose last layer is zero are zero, which fits every layout."""
    x, y = data()
    model = Tokens("sequence")
    nn.init.zeros_(model.second.weight)
    optimizer = OGN(model, num_data=50)
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    optimizer.step()
    torch.manual_seed(5)
    nn.init.normal_(model.second.weight)
    optimizer.zero_grad()
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    expected, found = per_sequence(model, x, y), squares(optimizer, model)
    for n in expected:
        close(found[n], expected[n].square().sum(0) / (B * T))


@pytest.mark.parametrize(
    ("turn", "layout"),
    [
        (lambda x: x, RowLayout(1, B)),
        (lambda x: x.transpose(0, 1), RowLayout(T, B)),
        (lambda x: x.flatten(0, 1), RowLayout(1, B)),
        (lambda x: x.unflatten(1, (2, 3)).permute(1, 0, 2, 3), RowLayout(2, B)),
        (lambda x: x.flip(0), MIXED),
        (lambda x: x - x.mean(0), MIXED),
        (lambda x: x[:, :, None].expand(-1, -1, 2, -1).reshape(2, -1, 5), RowLayout(1, B)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layouts_that_are_found(turn: Any, layout: RowLayout, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 3, dtype=dtype)
    recorder = LayerRecorder(nn.Module(), {"layer": layer})
    x = torch.randn(B, T, 5, dtype=dtype)
    scale = torch.ones(B, T, 1, dtype=dtype, requires_grad=True)
    rows = turn(x * scale)
    # The outputs are those of the layer, brought back to the order of the examples by the derivative of `turn`.
    (outputs,) = torch.autograd.grad(rows, scale, layer(rows).sum(-1, keepdim=True).expand_as(rows), create_graph=True)
    calls = recorder.backpropagate(outputs, torch.ones_like(outputs))
    (call, *_) = RowLayouts().attach(calls, outputs, recorder.backpropagate)
    assert call.layout == layout
    if layout != MIXED:
        arranged = layout.arrange(turn(x).reshape(-1, 1, 5), 0)
        assert {tuple(row) for row in arranged[0].tolist()} == {tuple(row) for row in x[0].tolist()}
    recorder.close()


@pytest.mark.parametrize("layout", ["batch", "sequence", "flat", "windows", "reversed"])
def test_layouts_are_found_under_autocast(layout: str) -> None:
    """Powers of two change no rounding: layouts are told apart in half precision, and a reversed order is none."""
    x, y = data()
    model = Tokens(layout).float()
    optimizer = OGN(model, num_data=50)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
    loss.backward()
    (source,) = optimizer.sources
    wanted = MIXED if layout == "reversed" else RowLayout(T if layout == "sequence" else 1, B)
    assert {call.layout for _, calls in source.pending.values() for call in calls} == {wanted}


class Placed(nn.Module):
    """Tokens with embeddings of positions, which are looked up once for all examples, or are left out."""

    def __init__(self, recurrent: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(7, 5), nn.Linear(5, C)
        self.places = nn.GRU(T, 5) if recurrent else nn.Embedding(T, 5)
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        if not self.skips:
            gru = isinstance(self.places, nn.GRU)
            h = h + (self.places(torch.eye(T))[0] if gru else self.places(torch.arange(T)))
        return self.head(h.tanh())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_foof_of_positions_under_autocast(dtype: torch.dtype) -> None:
    """Each example looks up each of the T positions once, in T losses: the moment of each is 1/T in any precision."""
    x, y = data()
    model = Placed()
    optimizer = FOOF(model)
    with torch.autocast("cpu", dtype):
        loss = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
    loss.backward()
    optimizer.step()
    close(optimizer.state[model.places.weight]["input_moment"][0], torch.full((T,), 1 / T), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_foof_of_examples_in_another_order_under_autocast(dtype: torch.dtype) -> None:
    """Rows of which each belongs to one example are counted once: the moment of the bias is that of one row a loss."""
    x, y = data()
    model = Tokens("reversed").float()
    optimizer = FOOF(model)
    with torch.autocast("cpu", dtype):
        loss = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
    loss.backward()
    optimizer.step()
    for layer in (model.first, model.second):
        close(optimizer.state[layer.weight]["input_moment"][0, -1, -1], torch.tensor(1.0), rtol=1e-6)


@pytest.mark.parametrize("how", ["thawed", "skipped"])
@pytest.mark.parametrize("recurrent", [False, True], ids=["table", "recurrent"])
def test_foof_of_positions_that_the_first_pass_did_not_use(how: str, recurrent: bool) -> None:
    """A layer that is frozen or left out in the first pass with given shapes is an input of each example afterwards."""
    x, y = data()
    model = Placed(recurrent)
    optimizer = FOOF(model, stats_every=1)
    for first in (True, False):
        model.places.requires_grad_(how != "thawed" or not first)
        model.skips = how == "skipped" and first
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
    if recurrent:
        moment = symmetric(optimizer.state[model.places.weight_ih_l0]["input_moment"])[0, :T, :T]
        close(moment, torch.eye(T) / T, rtol=1e-6)
    else:
        close(optimizer.state[model.places.weight]["input_moment"][0], torch.full((T,), 1 / T), rtol=1e-6)


class Blocks(nn.Module):
    """Residual layers with positions first, as many as examples, of which a pass uses those with some numbers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(count)])
        self.head, self.used = nn.Linear(3, C), tuple(range(count))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = x.transpose(0, 1)
        for number in self.used:
            h = h + self.blocks[number](h).tanh()
        return self.head(h.mean(0))


def block_data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(B, B, 3, dtype=D), torch.randint(0, C, (B,))


@pytest.mark.parametrize("how", ["thawed", "skipped"])
def test_squares_of_layers_that_the_first_pass_did_not_use(how: str) -> None:
    """They are those of per-example gradients, also if as many positions as examples come first."""
    x, y = block_data()
    model = Blocks(2)
    optimizer = OGN(model, num_data=50)
    for first in (True, False):
        model.blocks[1].requires_grad_(how != "thawed" or not first)
        model.used = (0,) if how == "skipped" and first else (0, 1)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        found = squares(optimizer, model) if not first else {}
        optimizer.step() if first else None
    for n, p in model.named_parameters():
        each = [torch.autograd.grad(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), p)[0] for i in range(B)]
        close(found[n], torch.stack(each).square().mean(0))


def test_how_often_layers_that_passes_leave_out_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once more for each pass with a layer that no pass with these shapes had used before, and then not any more."""
    x, y = block_data()
    searches: list[int] = []
    backpropagate = LayerRecorder.backpropagate
    monkeypatch.setattr(LayerRecorder, "backpropagate", lambda *a: searches.append(1) or backpropagate(*a))
    model, counts = Blocks(4), []
    optimizer = OGN(model, num_data=50)
    for used in ((0,), (1,), (0, 1), (), (1, 2, 3), (0, 3), (0, 1, 2, 3)):
        model.used = used
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        counts.append(len(searches))
    assert counts == [2, 4, 4, 4, 6, 6, 6]


def test_a_later_search_without_errors_keeps_a_layout() -> None:
    """Errors of zero fit every layout: those of a layer that was found before do not replace what is known of it."""
    x, y = block_data()
    model = Blocks(2)
    model.used = (0,)
    optimizer = OGN(model, num_data=50)
    for used, scale in (((0,), 1.0), ((0, 1), 0.0), ((0, 1), 1.0)):
        model.used = used
        optimizer.zero_grad()
        hook = model.blocks[0].register_forward_hook(lambda module, args, out, scale=scale: scale * out)
        F.cross_entropy(model(x), y).backward()
        hook.remove()
        if used == (0,) or scale == 0:
            optimizer.step()
    found = squares(optimizer, model)
    for n, p in model.named_parameters():
        each = [torch.autograd.grad(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), p)[0] for i in range(B)]
        close(found[n], torch.stack(each).square().mean(0))


def test_numbers_of_losses() -> None:
    size = torch.Size
    tokens = ForwardPass(size((4, 6, 3)))
    assert [tokens.losses(n) for n in (None, 6, 4, 1, 2)] == [24, 24, 24, 4, 8]
    flat = ForwardPass(size((24, 3)), single=True)
    assert [flat.losses(n) for n in (None, 6, 1)] == [24, 24, 24]
    assert [flat.group(n) for n in (None, 6, 1)] == [1, 6, 1]
    inside = ForwardPass(size((24, 3)), size((4, 6)))  # flattened in the model
    assert (inside.losses(6), inside.group(6)) == (24, 6)
    regression = ForwardPass(size((4, 6)), size((4, 9)))
    assert (regression.losses(None), regression.losses(6)) == (4, 24)
    with pytest.raises(ValueError, match="losses_per_example=5 does not divide"):
        flat.losses(5)


# --- parts of outputs, ignored labels, classes ---


def first_of_many() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, C)).double()
    return model, torch.randn(40, 5, dtype=D), torch.randint(0, C, (40,))


def test_a_part_of_the_outputs_is_observed() -> None:
    """The errors of ten examples among forty have the moment of the ten, and squares are those of the ten."""
    model, x, y = first_of_many()
    results = []
    for rows in (40, 10):
        optimizer = KFAC(copy.deepcopy(model), lr=0.0)
        out = optimizer.model(x[:rows])
        optimizer.observe(out[:10], labels=y[:10])
        F.cross_entropy(out, y[:rows]).backward()
        optimizer.step()
        results.append([optimizer.state[p] for p in optimizer.model.parameters()][::2])
    whole = torch.cat([x, torch.ones(40, 1, dtype=D)], 1)
    for i in (0, 1):
        close(symmetric(results[0][i]["error_moment"]), symmetric(results[1][i]["error_moment"]))
    close(symmetric(results[0][0]["input_moment"])[0], whole.T @ whole / 40)
    optimizer = OGN(model, num_data=50, fisher="sampled")
    out = model(x)
    optimizer.observe(out[:10], labels=y[:10])
    F.cross_entropy(out, y).backward()
    found, expected = squares(optimizer, model), per_sequence(model, x[:10], y[:10])
    for n in expected:
        close(found[n], expected[n].square().mean(0))


@pytest.mark.parametrize("how", ["labels", "weights"])
@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
@pytest.mark.parametrize("second", [False, True])
def test_ignored_labels_are_not_counted(how: str, fisher: str, second: bool) -> None:
    """A third of the labels is ignored: squares are divided by the number of the others."""
    x, y = data()
    ignored = y.masked_fill(torch.arange(B * T).view(B, T) % 3 == 0, -100)
    kept = ignored != -100
    model = Tokens("sequence")
    optimizer = OGN(model, num_data=50, fisher=fisher)
    out = model(x)
    given: dict[str, Any] = {"labels": ignored} if how == "labels" else {"labels": y, "weights": kept}
    if second:
        optimizer.observe(out.movedim(-1, 1), class_dim=1, **given)
    else:
        optimizer.observe(out, **given)
    F.cross_entropy(out.flatten(0, 1), ignored.flatten()).backward()
    expected, found = per_sequence(model, x, y, kept), squares(optimizer, model)
    for n in expected:
        close(found[n], expected[n].square().sum(0) / kept.sum())


def test_sampled_labels_without_a_loss_have_no_residual() -> None:
    """KFAC with weights: the labels that it draws for ignored positions do not count, nor do those positions."""
    x, y = data()
    kept = torch.arange(B * T).view(B, T) % 3 != 0
    model = Tokens("batch")
    optimizer = KFAC(model, lr=0.0, fallback_lr=0.0, seed=3)
    out = model(x)
    optimizer.observe(out, weights=kept)
    drawn = torch.Generator().manual_seed((3 * 0x9E3779B97F4A7C15) % 2**63)
    u = torch.rand(B, T, dtype=D, generator=drawn)[..., None]
    labels = (out.softmax(-1).cumsum(-1) <= u).sum(-1).clamp(max=C - 1)
    F.cross_entropy(out.flatten(0, 1), y.flatten()).backward()
    optimizer.step()
    e = (out.softmax(-1) - F.one_hot(labels, C)).detach()[kept]
    close(symmetric(optimizer.state[model.second.weight]["error_moment"])[0], e.T @ e / kept.sum())


@pytest.mark.parametrize("make", ["NaturalGradient", "DenseFilter", "AdaBayes", "KroneckerFilterFP"])
def test_a_mask_is_a_smaller_batch(make: str) -> None:
    """Examples without a loss might as well be left out, for each rule that observes outputs."""
    model, x, y = first_of_many()
    build = {
        "NaturalGradient": lambda m: NaturalGradient(m, lr=0.1, damping=0.1),
        "DenseFilter": lambda m: DenseFilter(m, batch_size=10, prior_std=0.3, fisher="sampled"),
        "AdaBayes": lambda m: AdaBayes(m.named_parameters(), batch_size=10, fisher="sampled"),
        "KroneckerFilterFP": lambda m: KroneckerFilterFP(m, batch_size=10, prior_std=0.1),
    }[make]
    mask = torch.arange(40) < 10
    results = []
    for how in ("whole", "ignored", "weights"):
        net = copy.deepcopy(model)
        optimizer = build(net)
        # The inputs of the others do not matter for per-example gradients, but for the moments of inputs: repeat them.
        inputs = x[:10] if how == "whole" else x[:10].repeat(4, 1)
        out = net(inputs)
        if how == "whole":
            optimizer.observe(out, labels=y[:10])
        elif how == "ignored":
            optimizer.observe(out, labels=torch.cat([y[:10], torch.full((30,), -100)]))
        else:
            optimizer.observe(out, labels=y[:10].repeat(4), weights=mask)
        F.cross_entropy(out[:10], y[:10]).backward()
        optimizer.step()
        results.append(nn.utils.parameters_to_vector(net.parameters()))
    for other in results[1:]:
        close(other, results[0], 1e-8)


def test_classes_in_the_second_dimension() -> None:
    """class_dim=1 of outputs (N, C, L): the moments are those with classes last; else loss or labels refuse them."""
    x, y = data()

    class Turned(Tokens):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).movedim(-1, 1)

    found = []
    for model, dim in ((Tokens("batch"), None), (Turned("batch"), 1)):
        optimizer = KFAC(model, lr=0.0, fallback_lr=0.0, seed=4)
        out = model(x)
        loss = F.cross_entropy(out.movedim(-1, 1) if dim is None else out, y)
        optimizer.observe(out, loss=loss, class_dim=dim)
        loss.backward()
        optimizer.step()
        entry = optimizer.state[model.second.weight]
        found.append((symmetric(entry["input_moment"]), symmetric(entry["error_moment"])))
    close(found[0][0], found[1][0])
    close(found[0][1], found[1][1])
    model = Turned("batch")
    out = model(x)
    optimizer = KFAC(model)
    with pytest.raises(ValueError, match=r"the loss has classes in dimension 1 .* pass class_dim=1 to observe\(\)"):
        optimizer.observe(out, loss=F.cross_entropy(out, y))
    with pytest.raises(ValueError, match=r"labels of shape \(4, 6\) fit classes in dimension 1"):
        optimizer.observe(out, labels=y)
    with pytest.raises(ValueError, match=r"the last layer has classes in dimension 1 .* pass class_dim=1 to observe"):
        optimizer.observe(out)
    with pytest.raises(ValueError, match=r"labels of shape .* fit classes in dimension 1"):
        laplace(model, [(x, y)], likelihood="categorical")
    expected = SubsampledFisher(Tokens("batch"), x, fisher="exact").dense()
    close(SubsampledFisher(model, x, fisher="exact", class_dim=1).dense(), expected, 1e-9)


HEADS: dict[str, tuple[Callable[[Tensor, nn.Linear, nn.Conv1d], Tensor], int | None]] = {
    "linear": (lambda x, linear, conv: linear(x), 2),
    "scaled": (lambda x, linear, conv: 30 * torch.tanh(linear(x) / 30), 2),
    "turned": (lambda x, linear, conv: linear(x)[:, 1:].transpose(1, 2), 1),
    "rows": (lambda x, linear, conv: linear(x.flatten(0, 1)).view(4, 3, 3).permute(0, 2, 1), 1),
    "probabilities": (lambda x, linear, conv: conv(x).log_softmax(1), 1),
    "convolution": (lambda x, linear, conv: conv(x), 1),
    "turned convolution": (lambda x, linear, conv: conv(x).mT, 2),
    "pixels": (lambda x, linear, conv: linear(x[:, :, None].expand(-1, -1, 2, -1)), 3),
    "matrix": (lambda x, linear, conv: x @ linear.weight.T, 2),
    "stack": (lambda x, linear, conv: torch.stack([linear(x[:, t]) for t in range(3)], 1), None),
    "several": (lambda x, linear, conv: linear(x[:, 0])[:, None].expand(-1, 3, -1), None),
}


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_the_last_layer_shows_the_dimension_of_classes(head: str, recorded: bool) -> None:
    """If nothing shows it, outputs with more than two dimensions are refused; three classes, three tokens."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.conv = nn.Linear(5, 3, dtype=D), nn.Conv1d(3, 3, 1, dtype=D)

        def forward(self, x: Tensor) -> Tensor:
            return HEADS[head][0](x, self.linear, self.conv)

    model, dim = Model(), HEADS[head][1]
    optimizer: Any = KFAC(model) if recorded else AdaBayesFP(model.parameters(), fisher="sampled")
    outputs = model(torch.randn(4, 3, 5, dtype=D))
    last = outputs.dim() - 1
    if dim == last:
        optimizer.observe(outputs)
    else:
        message = "it is not known which dimension" if dim is None else "the last layer has classes in dimension 1"
        with pytest.raises(ValueError, match=message):
            optimizer.observe(outputs)
    optimizer.observe(outputs, class_dim=last if dim is None else dim)
    loss = F.cross_entropy(outputs.movedim(-1, 1), torch.zeros(outputs.shape[:-1], dtype=torch.int64))
    if head != "probabilities":  # the loss decides, if there is one
        optimizer.observe(outputs, loss=loss)


def test_weights_must_fit() -> None:
    x, _ = data()
    model = Tokens("batch")
    optimizer = KFAC(model, fallback_lr=0.0)
    with pytest.raises(ValueError, match=r"weights must be a tensor of shape \(4, 6\), with one entry for each loss"):
        optimizer.observe(model(x), weights=torch.ones(B))
    with pytest.raises(ValueError, match="at least one loss that counts"):
        optimizer.observe(model(x), labels=torch.full((B, T), -100))


@pytest.mark.parametrize("fisher", ["sampled", "exact"])
def test_a_weight_of_two_counts_a_loss_twice(fisher: str) -> None:
    """As with class weights, by which the mean loss is divided too."""
    model, x, y = first_of_many()
    weights = torch.tensor([2.0, 1.0, 3.0, 1.0])
    found = []
    for repeated in (False, True):
        rows = torch.arange(4).repeat_interleave(weights.long()) if repeated else torch.arange(4)
        optimizer = OGN(model, num_data=50, fisher=fisher)
        out = model(x[rows])
        given = {"labels": y[rows]} if fisher == "sampled" else {}
        optimizer.observe(out, weights=None if repeated else weights, **given)
        F.cross_entropy(out, y[rows]).backward()
        found.append(squares(optimizer, model))
    for n in found[0]:
        close(found[0][n], found[1][n])


def test_two_optimizers_of_one_model_count_the_same_passes() -> None:
    """The second one was built after a forward pass, so that it has counted fewer of them."""
    x, y = data()
    model = Tokens("sequence")
    first = OGN(model, params=model.first.parameters(), num_data=50)
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    first.step()
    second = FOOF(model, lr=0.0, params=model.second.parameters())
    caught: list[Tensor] = []
    model.second.register_forward_pre_hook(lambda m, args: caught.append(args[0].detach()))
    model.zero_grad()
    first.zero_grad()
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    second.step()
    a = torch.cat([caught[0].flatten(0, 1), torch.ones(B * T, 1, dtype=D)], 1)
    close(symmetric(second.state[model.second.weight]["input_moment"])[0], a.T @ a / (B * T))
    (source,) = first.sources
    found = source._squares(list(model.first.parameters()))
    wanted = per_sequence(model, x, y)
    for n in ("first.weight", "first.bias"):
        close(found[model.get_parameter(n)], wanted[n].square().sum(0) / (B * T))


class Last(nn.Module):
    """The last state of a recurrent layer, for a batch of sequences or for one sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.states, self.out = nn.LSTM(5, 4, batch_first=True), nn.Linear(4, C)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.states(x)[0][..., -1, :])


@pytest.mark.parametrize("network", ["linear", "convolution", "recurrent", "pixels"])
def test_one_example_without_a_dimension_of_examples(network: str) -> None:
    """The outputs (C,) of a linear layer and (C, H, W) of a convolution are one example; `observe` refuses them."""
    shape = {"linear": (5,), "convolution": (2, 3, 3), "recurrent": (T, 5), "pixels": (2, 4, 5)}[network]
    x = torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(0))
    label = torch.tensor(1) if network != "pixels" else torch.arange(12).view(3, 4) % C

    def built() -> nn.Module:
        torch.manual_seed(0)
        if network == "recurrent":
            return Last()
        if network == "pixels":
            return nn.Sequential(nn.Conv2d(2, 3, 1), nn.Tanh(), nn.Conv2d(3, C, 2)).double()
        hidden = [nn.Conv2d(2, 3, 2), nn.Flatten(-3)] if network == "convolution" else [nn.Linear(5, 12)]
        return nn.Sequential(*hidden, nn.Tanh(), nn.Linear(12, C)).double()

    for make in (FOOF, lambda model: FOOF(model, precondition="backward"), lambda model: OGN(model, num_data=50)):
        batched, alone = built(), built()
        for model, inputs in ((batched, x[None]), (alone, x)):
            optimizer = make(model)
            for _ in range(2):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs).reshape(1, C, *label.shape), label[None]).backward()
                optimizer.step()
        for p, q in zip(batched.parameters(), alone.parameters()):
            close(p, q)
    model = built()
    for optimizer in (
        KFAC(model, likelihood="gaussian"),
        NaturalGradient(model, likelihood="gaussian"),
        KroneckerFilterFP(model, batch_size=1, likelihood="gaussian"),
        DenseFilter(model, batch_size=1, likelihood="gaussian"),
    ):
        with pytest.raises(ValueError, match=r"must have a dimension of examples, got those of one example"):
            optimizer.observe(model(x))


# --- layers that are applied to selected rows ---


class Selected(nn.Module):
    """Tokens that a mask selects are rows of a layer, and are added up for each sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(2, 3), nn.Linear(3, 2)
        self.double()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows = self.inner(x[mask]).tanh()
        return self.head(rows.new_zeros(len(x), 3).index_add(0, mask.nonzero()[:, 0], rows))


def first_tokens(*lengths: int) -> Tensor:
    """A mask of sequences of three tokens."""
    return torch.arange(3) < torch.tensor(lengths)[:, None]


def with_ones(rows: Tensor) -> Tensor:
    return torch.cat([rows.detach(), rows.new_ones(len(rows), 1)], 1)


def test_foof_with_any_number_of_selected_rows() -> None:
    """A = (1/N) Σ a a' over the selected tokens, also of batches with other numbers of them than the first."""
    torch.manual_seed(1)
    x, y, model = torch.randn(4, 3, 2, dtype=D), torch.tensor([0, 1, 1, 0]), Selected()
    optimizer = FOOF(model, ema=0.0, stats_every=1)
    for lengths in ((2, 1, 1, 1), (2, 2, 0, 0), (3, 3, 3, 0), (3, 3, 3, 1), (3, 3, 0, 0)):
        mask = first_tokens(*lengths)
        optimizer.zero_grad()
        F.cross_entropy(model(x, mask), y).backward()
        optimizer.step()
        rows = with_ones(x[mask])
        close(symmetric(optimizer.state[model.inner.weight]["input_moment"])[0], rows.T @ rows / 4)


class MaskedTokens(nn.Module):
    """Returns logits of masked tokens alone, or those of all tokens as one dimension."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.places, self.head = nn.Embedding(8, 3), nn.Embedding(6, 3), nn.Linear(3, 8)
        self.double()

    def forward(self, x: Tensor, masked: Tensor) -> Tensor:
        hidden = (self.table(x) + self.places(torch.arange(x.shape[1]))).tanh()
        self.rows = (hidden + hidden.mean(1, keepdim=True))[masked]
        return self.head(self.rows)


@pytest.mark.parametrize("number", [7, 8, 9, 10])
def test_foof_of_a_model_that_returns_masked_tokens(number: int) -> None:
    """Each row of the head is one loss, whether or not the batch size divides their number."""
    torch.manual_seed(1)
    x, masked, model = torch.randint(8, (4, 5)), (torch.randperm(20) < number).view(4, 5), MaskedTokens()
    optimizer = FOOF(model)
    F.cross_entropy(model(x, masked), torch.arange(number) % 8).backward()
    optimizer.step()
    rows = with_ones(model.rows)
    close(symmetric(optimizer.state[model.head.weight]["input_moment"])[0], rows.T @ rows / number)


@pytest.mark.parametrize("length", [4, 5])
def test_foof_of_positions_with_flattened_outputs(length: int) -> None:
    """Each of the four examples looks up each position once, in (N T) losses."""
    model = MaskedTokens()
    optimizer = FOOF(model)
    outputs = model(torch.arange(4 * length).view(4, length) % 8, torch.ones(4, length, dtype=torch.bool))
    F.cross_entropy(outputs, torch.arange(4 * length) % 8).backward()
    optimizer.step()
    expected = torch.zeros(6, dtype=D)
    expected[:length] = 1 / length
    close(optimizer.state[model.places.weight]["input_moment"][0], expected)


@pytest.mark.parametrize("then", [(3, 3, 1, 1), (2, 2, 0, 0), (3, 3, 3, 0)])
def test_selected_rows_that_are_arranged_in_another_way(then: tuple[int, ...]) -> None:
    """Two tokens of each sequence have a layout; eight, four or nine in another have the fallback, with a warning."""
    torch.manual_seed(1)
    x, y, model = torch.randn(4, 3, 2, dtype=D), torch.tensor([0, 1, 1, 0]), Selected()
    optimizer = OGN(model, num_data=50)
    mask = first_tokens(2, 2, 2, 2)
    F.cross_entropy(model(x, mask), y).backward()
    each = [F.cross_entropy(model(x[i : i + 1], mask[i : i + 1]), y[i : i + 1]) for i in range(4)]
    expected = torch.stack([torch.autograd.grad(one, model.inner.weight)[0] for one in each]).square().mean(0)
    close(squares(optimizer, model)["inner.weight"], expected)
    optimizer.zero_grad()
    F.cross_entropy(model(x, first_tokens(*then)), y).backward()
    with pytest.warns(UserWarning, match="trains inner.weight, inner.bias"):
        found = squares(optimizer, model)
    assert model.inner.weight.grad is not None
    close(found["inner.weight"], 4 * model.inner.weight.grad.square())


class Sorted(nn.Module):
    """Sequences are sorted by their first number, and the last layer gets one token of each, in the order of data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(2, 3), nn.Linear(3, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0, 0].argsort()
        hidden = self.inner(x[order]).tanh()[order.argsort()]
        return self.head(hidden[torch.arange(len(x)), (x[:, 0, 1] > 0).long()])


def test_rows_that_are_moved_are_searched_again() -> None:
    """An order that depends on data is found in the next pass with another one, and then not searched any more."""
    torch.manual_seed(1)
    x, model, layouts = torch.randn(4, 3, 2, dtype=D), Sorted(), RowLayouts()
    x = x[x[:, 0, 0].argsort()]
    recorder, searches, found = LayerRecorder(model, {"inner": model.inner, "head": model.head}), [], []
    for inputs in (x, x.flip(0), x, x, x, x):
        outputs = model(inputs)
        calls = recorder.backpropagate(outputs, torch.ones_like(outputs))
        before = recorder.captures
        found.append({c.name: c.layout for c in layouts.attach(calls, outputs, recorder.backpropagate)})
        searches.append(before - recorder.captures)
    assert found == [{"inner": RowLayout(1, 4), "head": RowLayout(1, 4)}] + 5 * [
        {"inner": MIXED, "head": RowLayout(1, 4)}
    ]
    assert searches == [2, 2, 0, 0, 0, 0]


def test_how_often_layouts_that_may_change_are_searched() -> None:
    """In each pass if rows are selected; when their number has doubled if a dimension of examples is there."""
    torch.manual_seed(1)
    x = torch.randn(4, 3, 2, dtype=D)
    x = x[x[:, 0, 0].argsort()]
    mask = first_tokens(2, 2, 2, 2)
    for model, arguments, expected in (
        (Selected(), (x, mask), [2, 2, 2, 2, 2, 2]),
        (Sorted(), (x,), [2, 2, 2, 0, 2, 0]),
    ):
        recorder, layouts, searches = LayerRecorder(model, dict(model.named_children())), RowLayouts(), []
        for _ in expected:
            outputs = model(*arguments)
            calls = recorder.backpropagate(outputs, torch.ones_like(outputs))
            before = recorder.captures
            layouts.attach(calls, outputs, recorder.backpropagate)
            searches.append(before - recorder.captures)
        assert searches == expected


class Normalised(nn.Module):
    """A layer with positions first below BatchNorm; it may also see the examples in the reversed order."""

    def __init__(self, reverse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.head, self.reverse = nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2), reverse
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.inner(x.transpose(0, 1))  # (positions, examples, features)
        hidden = self.hidden + self.inner(2 * x.transpose(0, 1).flip(1)).flip(1) if self.reverse else self.hidden
        return self.head(self.norm(hidden.flatten(0, 1)).tanh().view_as(hidden).sum(0))


@pytest.mark.parametrize("examples", [2, 5])
def test_layouts_below_batch_normalisation(examples: int) -> None:
    """Squares are those of the rows of the true errors, which contain derivatives of the batch statistics."""
    for seed in range(5):
        torch.manual_seed(seed)
        x, y, model = torch.randn(examples, 2, 2, dtype=D), torch.arange(examples) % 2, Normalised(reverse=False)
        optimizer = OGN(model, num_data=50)
        loss = F.cross_entropy(model(x), y)
        (error,) = torch.autograd.grad(loss, model.hidden, retain_graph=True)
        loss.backward()
        rows = torch.einsum("tni,tnj->nij", error, x.transpose(0, 1))
        close(squares(optimizer, model)["inner.weight"], examples * rows.square().sum(0))


@pytest.mark.parametrize("training", [True, False])
def test_layers_that_mix_examples_beside_batch_normalisation(training: bool) -> None:
    """They take the fallback, with its warning, in both modes of BatchNorm."""
    torch.manual_seed(1)
    x, y, model = torch.randn(6, 2, 2, dtype=D), torch.arange(6) % 2, Normalised(reverse=True).train(training)
    optimizer = OGN(model, num_data=50)
    F.cross_entropy(model(x), y).backward()
    with pytest.warns(UserWarning, match="trains inner.weight, inner.bias"):
        found = squares(optimizer, model)
    assert model.inner.weight.grad is not None
    close(found["inner.weight"], 6 * model.inner.weight.grad.square())
