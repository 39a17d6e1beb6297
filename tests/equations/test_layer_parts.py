"""Layers that are known by the linear layers inside of them, and layers with transposed weights.

The references are the plain modules of torch, one backward pass for each example, and loops that are written here.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesgrad import SubsampledFisher, laplace
from bayesgrad.layers import fisher as fisher_module
from bayesgrad.layers.call import LayerCall
from bayesgrad.layers.fisher import recorded_layers
from bayesgrad.layers.recorder import LayerRecorder
from bayesgrad.optim import FOOF, KFAC, OGN, KroneckerFilter, KroneckerFilterFP, NaturalGradient
from layer_models import MODELS, Conv1D, N, build, close, one_by_one

PLAIN: dict[str, Any] = {"damping_mode": "absolute", "max_norm": math.inf, "stats_every": 1, "update_every": 1}


@pytest.fixture(autouse=True)
def _double(request: pytest.FixtureRequest) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


every_model = pytest.mark.parametrize("name", MODELS)
# With positions first, Linear layers outside of attention take positions for examples.
models_of_examples = pytest.mark.parametrize("name", [name for name in MODELS if name != "decoder, positions first"])


# --- forward and backward passes ---


@every_model
def test_recorded_passes_are_the_plain_ones(name: str) -> None:
    model, x, y = build(name)
    plain = copy.deepcopy(model)
    calls: list[LayerCall] = []
    recorder = LayerRecorder(model, recorded_layers(model), lambda call: calls.append(call))
    found = []
    for one in (model, plain):
        inputs = x.clone().requires_grad_(x.is_floating_point())
        outputs = one(inputs)
        F.cross_entropy(outputs, y).backward()
        found.append([outputs, *([inputs.grad] if x.is_floating_point() else []), *(p.grad for p in one.parameters())])
    for mine, theirs in zip(*found):
        close(mine, theirs, 1e-12)
    assert {call.name for call in calls} == set(recorder.layers)
    covered = {id(p) for layer in recorder.layers.values() for p in layer.parameters(recurse=False)}
    assert {id(p) for p in model.parameters()} <= covered
    recorder.close()
    assert not [module for module in model.modules() if "forward" in module.__dict__]


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("batched", [True, False])
def test_initial_states_dropout_and_final_states(kind: str, batched: bool) -> None:
    """Given states have their gradients, and masks between layers are those that torch draws."""
    for batch_first, bidirectional in product((False, True), repeat=2):
        layer = getattr(nn, kind)(3, 4, 2, dropout=0.4, batch_first=batch_first, bidirectional=bidirectional)
        plain = copy.deepcopy(layer)
        recorder = LayerRecorder(layer, recorded_layers(layer))
        x = torch.randn(*((2, 6) if batched and batch_first else (6, 2) if batched else (6,)), 3)
        state = torch.randn(2, 4 if bidirectional else 2, *((2,) if batched else ()), 4)
        found = []
        for one in (layer, plain):
            given = state.clone().requires_grad_()
            torch.manual_seed(3)
            outputs, last = one(x, tuple(given) if kind == "LSTM" else given[0])
            last = torch.stack(last) if isinstance(last, tuple) else last
            (outputs.square().sum() + last.sin().sum()).backward()
            assert batch_first or outputs.is_contiguous()
            found.append([outputs, last, given.grad, *(p.grad for p in one.parameters())])
            if one is layer:
                assert outputs.grad_fn is not None
        for mine, theirs in zip(*found):
            close(mine, theirs, 1e-12)
        recorder.close()


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("given", ["self", "memory", "keys", "sizes"])
def test_attention_with_masks(given: str, need_weights: bool) -> None:
    sizes = {"kdim": 3, "vdim": 2} if given == "sizes" else {}
    for batch_first, batched, masked in product(
        (False, True), (False, True), (None, "causal", "3-D", "padding", "both")
    ):
        layer = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=batch_first, **sizes)
        nn.init.normal_(layer.in_proj_bias)
        plain = copy.deepcopy(layer)
        recorder = LayerRecorder(layer, recorded_layers(layer))
        length, sources, count = 3, 3 if given == "self" else 5, 2 if batched else 1

        def sequence(length: int, size: int, batched: bool = batched, batch_first: bool = batch_first) -> Tensor:
            shape = ((2, length) if batch_first else (length, 2)) if batched else (length,)
            return torch.randn(*shape, size)

        query, key = sequence(length, 4), sequence(sources, sizes.get("kdim", 4))
        value = key if given == "memory" else sequence(sources, sizes.get("vdim", 4))
        key, value = (query, query) if given == "self" else (key, value)
        options: dict[str, Any] = {"need_weights": need_weights, "average_attn_weights": batch_first}
        if masked in ("causal", "both"):
            options |= {"attn_mask": torch.ones(length, sources).triu(1).bool(), "is_causal": masked == "causal"}
        if masked == "3-D":
            options["attn_mask"] = torch.randn(2 * count, length, sources)
        if masked in ("padding", "both"):
            ignored = torch.zeros(count, sources, dtype=torch.bool)
            ignored[0, -1] = True
            options["key_padding_mask"] = ignored if batched else ignored[0]
        found = []
        for one in (layer, plain):
            torch.manual_seed(3)
            outputs, weights = one(query, key, value, **options)
            (outputs.square().sum() + (0 if weights is None else weights.sin().sum())).backward()
            found.append([outputs, *([] if weights is None else [weights]), *(p.grad for p in one.parameters())])
        assert len(found[0]) == len(found[1])
        for mine, theirs in zip(*found):
            close(mine, theirs, 1e-12)
        recorder.close()


def test_wrong_arguments_have_torchs_errors() -> None:
    attention, lstm = nn.MultiheadAttention(4, 2), nn.LSTM(3, 4)
    recorders = [LayerRecorder(one, recorded_layers(one)) for one in (attention, lstm)]
    x = torch.randn(3, 2, 4)
    with pytest.raises(RuntimeError, match="The shape of the 2D attn_mask is"):
        attention(x, x, x, attn_mask=torch.ones(3, 1).bool())
    with pytest.raises(RuntimeError, match="Need attn_mask if specifying the is_causal hint"):
        attention(x, x, x, is_causal=True)
    with pytest.raises(RuntimeError, match=r"input.size\(-1\) must be equal to input_size"):
        lstm(x)
    del recorders


# --- gradients of single examples ---


@models_of_examples
def test_per_example_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them follow from inputs and errors, without passes of torch.func."""
    model, x, y = build(name)
    rows = one_by_one(copy.deepcopy(model), x, y)

    def refuse(*args: Any) -> Any:
        raise AssertionError(f"torch.func was used for {list(args[1])}")

    monkeypatch.setattr(fisher_module, "gradients_by_vmap", refuse)
    fisher = SubsampledFisher(model, x, fisher="empirical", labels=y)
    for key, expected in rows.items():
        close(fisher._gradients.columns[key].rows(), expected)
    flat = torch.cat([row.flatten(1) for row in rows.values()], 1)
    close(fisher.dense(), flat.T @ flat / N)
    close(fisher.gram(), flat @ flat.T / N)
    close(fisher.diagonal(), flat.square().mean(0))
    v = torch.randn(flat.shape[1])
    close(fisher.matvec(v), flat.T @ (flat @ v) / N)


@models_of_examples
@pytest.mark.parametrize("parts", [1, 2])
def test_squares(name: str, parts: int) -> None:
    """The squares that OGN uses, of one batch and of two micro-batches."""
    model, x, y = build(name)
    expected = {key: row.square().mean(0) for key, row in one_by_one(copy.deepcopy(model), x, y).items()}
    optimizer = OGN(model, num_data=10)
    for i in range(parts):
        some = slice(i * 3, (i + 1) * 3) if parts > 1 else slice(None)
        (F.cross_entropy(model(x[some]), y[some], reduction="sum") / N).backward()
    found = optimizer.sources[-1]._squares(list(model.parameters()))
    for key, p in model.named_parameters():
        close(found[p], expected[key])


@pytest.mark.parametrize("structure", ["diag", "full", "subsampled"])
@pytest.mark.parametrize(
    "name", ["LSTM, time first", "GRU", "decoder", "ConvTranspose1d", "Bilinear", "Conv1D", "tied"]
)
def test_exact_structures(name: str, structure: str) -> None:
    model, x, y = build(name)
    rows = one_by_one(copy.deepcopy(model), x, y)
    flat = torch.cat([row.flatten(1) for row in rows.values()], 1)
    exact = flat.T @ flat
    posterior = laplace(model, [(x, y)], structure=structure, likelihood="categorical", fisher="empirical")
    found = torch.block_diag(*[hessian.dense() for hessian in posterior.hessians])
    close(found, torch.diag(exact.diagonal()) if structure == "diag" else exact)


# --- factors ---


def lstm_rows(layer: nn.LSTM, x: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Outputs of one layer, with each projection's input and an offset of its output, whose gradient is the error."""
    h = c = torch.zeros(len(x), layer.hidden_size)
    inputs, added, outputs = [], torch.zeros(len(x), x.shape[1], 4 * layer.hidden_size).requires_grad_(), []
    for t in range(x.shape[1]):
        inputs.append(h)
        sums = F.linear(x[:, t], layer.weight_ih_l0, layer.bias_ih_l0)
        sums = sums + F.linear(h, layer.weight_hh_l0, layer.bias_hh_l0) + added[:, t]
        i, f, g, o = sums.chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    return torch.stack(outputs, 1), {"ih": (x, added), "hh": (torch.stack(inputs, 1), added)}


def gru_rows(layer: nn.GRU, x: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    h = torch.zeros(len(x), layer.hidden_size)
    by_input, by_hidden = (torch.zeros(len(x), x.shape[1], 3 * layer.hidden_size).requires_grad_() for _ in range(2))
    inputs, outputs = [], []
    for t in range(x.shape[1]):
        inputs.append(h)
        a = F.linear(x[:, t], layer.weight_ih_l0, layer.bias_ih_l0) + by_input[:, t]
        b = F.linear(h, layer.weight_hh_l0, layer.bias_hh_l0) + by_hidden[:, t]
        (ar, az, an), (br, bz, bn) = a.chunk(3, -1), b.chunk(3, -1)
        z, n = (az + bz).sigmoid(), (an + (ar + br).sigmoid() * bn).tanh()
        h = (1 - z) * n + z * h
        outputs.append(h)
    return torch.stack(outputs, 1), {"ih": (x, by_input), "hh": (torch.stack(inputs, 1), by_hidden)}


def attention_rows(layer: nn.MultiheadAttention, x: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    inside, outside = torch.zeros(*x.shape[:2], 12).requires_grad_(), torch.zeros_like(x).requires_grad_()
    q, k, v = (F.linear(x, layer.in_proj_weight, layer.in_proj_bias) + inside).chunk(3, -1)
    heads = [
        (a @ b.mT / math.sqrt(2)).softmax(-1) @ c for a, b, c in zip(*(s.split(2, -1) for s in (q, k, v)))
    ]  # fmt: skip
    mixed = torch.cat(heads, -1)
    outputs = F.linear(mixed, layer.out_proj.weight, layer.out_proj.bias) + outside
    return outputs, {"in_proj": (x, inside), "out_proj": (mixed.detach(), outside)}


class Wrapped(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        given = (x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else (x,)
        return self.layer(*given)[0].mean(1)


FACTORED: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "LSTM": (lambda: nn.LSTM(4, 4, batch_first=True), lstm_rows),
    "GRU": (lambda: nn.GRU(4, 4, batch_first=True), gru_rows),
    "attention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), attention_rows),
}
PARAMETERS = {
    "ih": ("weight_ih_l0", "bias_ih_l0"),
    "hh": ("weight_hh_l0", "bias_hh_l0"),
    "in_proj": ("in_proj_weight", "in_proj_bias"),
    "out_proj": ("out_proj.weight", "out_proj.bias"),
}


def factors_of(kind: str) -> tuple[Wrapped, Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """A model, data, and for each part the sums Σ aa' and Σ ee' for losses of single examples."""
    make, rows_of = FACTORED[kind]
    model = Wrapped(make())
    if kind == "attention":
        nn.init.normal_(model.layer.in_proj_bias)
    x, y = torch.randn(N, 3, 4), torch.randint(4, (N,))
    outputs, rows = rows_of(model.layer, x)
    close(outputs.mean(1), model(x), 1e-12)
    loss = F.cross_entropy(outputs.mean(1), y, reduction="sum")
    errors = torch.autograd.grad(loss, [offset for _, offset in rows.values()])
    found = {}
    for (key, (a, _)), e in zip(rows.items(), errors):
        a = torch.cat([a, torch.ones(N, 3, 1)], -1).flatten(0, 1).detach()
        e = e.flatten(0, 1)
        found[key] = a.T @ a, e.T @ e
    return model, x, y, found


@pytest.mark.parametrize("kind", FACTORED)
@pytest.mark.parametrize("precondition", ["step", "backward"])
@pytest.mark.parametrize("micro", [1, 2])
def test_foof(kind: str, precondition: str, micro: int) -> None:
    """Two steps: the second one has a gradient that was preconditioned with the inverse of the first."""
    model, x, y, sums = factors_of(kind)
    plain = copy.deepcopy(model)
    F.cross_entropy(plain(x), y).backward()
    optimizer = FOOF(model, lr=0.0, damping=0.3, ema=0.0, momentum=0.0, precondition=precondition, **PLAIN)
    inverse = {key: torch.linalg.inv(A / N + 0.3 * torch.eye(len(A))) for key, (A, _) in sums.items()}
    for lr in (0.0, 1.0):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        for rows, labels in zip(x.split(-(-N // micro)), y.split(-(-N // micro))):
            (F.cross_entropy(model(rows), labels, reduction="sum") / N).backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step()
    for key, matrix in inverse.items():
        weight, bias = (plain.layer.get_parameter(name) for name in PARAMETERS[key])
        gradient = torch.cat([weight.grad, bias.grad[:, None]], 1) @ matrix
        for name, part in zip(PARAMETERS[key], (gradient[:, :-1], gradient[:, -1])):
            close(before[f"layer.{name}"] - model.layer.get_parameter(name), part)


@pytest.mark.parametrize("kind", FACTORED)
def test_kfac_factors(kind: str) -> None:
    model, x, y, sums = factors_of(kind)
    optimizer = KFAC(model, lr=0.1, damping=0.3, ema=0.0, **PLAIN)
    outputs = model(x)
    optimizer.observe(outputs, labels=y)
    F.cross_entropy(outputs, y).backward()
    optimizer.step()
    for key, (A, E) in sums.items():
        state = optimizer.state[model.layer.get_parameter(PARAMETERS[key][0])]
        close(state["input_moment"][0].tril(), (A / N).tril())
        close(state["error_moment"][0].tril(), (E / (3 * N)).tril())


@pytest.mark.parametrize("kind", FACTORED)
def test_kronecker_structure(kind: str) -> None:
    model, x, y, sums = factors_of(kind)
    posterior = laplace(
        model, [(x[:2], y[:2]), (x[2:], y[2:])], structure="kron", fisher="empirical", likelihood="categorical"
    )
    blocks = {next(iter(hessian.shapes)): hessian for hessian in posterior.hessians}
    for key, (A, E) in sums.items():
        names = [f"layer.{name}" for name in PARAMETERS[key]]
        assert list(blocks[names[0]].shapes) == names
        close(blocks[names[0]].dense(), torch.kron(E / (3 * N), A))


def windows(layer: nn.Module, error: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """What a kernel adds at each position of the input, (N, positions, out, *kernel), by loops."""
    places = list(product(*[range(size) for size in sizes]))
    kernel = list(product(*[range(size) for size in layer.kernel_size]))
    found = torch.zeros(len(error), len(places), error.shape[1], len(kernel))
    for p, place in enumerate(places):
        for k, offset in enumerate(kernel):
            settings = zip(place, offset, layer.stride, layer.padding, layer.dilation)
            index = [i * stride - padding + j * dilation for i, j, stride, padding, dilation in settings]
            if all(0 <= i < size for i, size in zip(index, error.shape[2:])):
                found[:, p, :, k] = error[(slice(None), slice(None), *index)]
    return found


TRANSPOSED = {
    "plain": lambda: nn.ConvTranspose2d(2, 3, 2),
    "strided": lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1),
    "dilated": lambda: nn.ConvTranspose2d(2, 3, (3, 2), stride=2, padding=(2, 0), output_padding=(2, 0), dilation=3),
    "groups": lambda: nn.ConvTranspose2d(4, 6, 3, stride=(1, 2), groups=2, bias=False),
}


@pytest.mark.parametrize("name", TRANSPOSED)
def test_factors_of_transposed_convolutions(name: str) -> None:
    """Rows are positions of the input; the bias, which is added elsewhere, is a parameter by itself."""
    layer = TRANSPOSED[name]()
    groups, x = layer.groups, torch.randn(N, layer.in_channels, 3, 2)
    model = nn.Sequential(layer, nn.Flatten(), nn.Softmax(-1))
    y = torch.randint(10, (N,))
    outputs = layer(x)
    scores = outputs.flatten(1).softmax(-1)
    (error,) = torch.autograd.grad(F.cross_entropy(scores, y, reduction="sum"), outputs)
    a = x.flatten(2).mT.unflatten(2, (groups, -1)).permute(2, 0, 1, 3).flatten(1, 2)  # (groups, rows, in)
    e = windows(layer, error, (3, 2)).unflatten(2, (groups, -1)).permute(2, 0, 1, 3, 4).flatten(3).flatten(1, 2)
    gradient = (a.mT @ e).reshape(layer.weight.shape)
    close(
        gradient,
        torch.autograd.grad(F.cross_entropy(layer(x).flatten(1).softmax(-1), y, reduction="sum"), layer.weight)[0],
    )
    A, E = a.mT @ a, e.mT @ e
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* trains 0.bias")
        optimizer = KFAC(model, lr=0.0, damping=0.2, ema=0.0, **PLAIN)
        foof = FOOF(copy.deepcopy(model), lr=1.0, damping=0.2, ema=0.0, momentum=0.0, **PLAIN)
    found = model(x)
    optimizer.observe(found, labels=y)
    F.cross_entropy(found, y).backward()
    optimizer.step()
    state = optimizer.state[layer.weight]
    close(state["input_moment"].tril(), (A / N).tril())
    close(state["error_moment"].tril(), (E / (6 * N)).tril())
    other = foof.model[0]
    before = other.weight.detach().clone()
    F.cross_entropy(foof.model(x), y).backward()
    foof.step()
    solved = torch.linalg.solve(A / N + 0.2 * torch.eye(A.shape[-1]), a.mT @ e / N)
    close(before - other.weight, solved.reshape(layer.weight.shape))
    posterior = laplace(model, [(x, y)], structure="kron", fisher="empirical", likelihood="categorical")
    block = next(hessian for hessian in posterior.hessians if "0.weight" in hessian.shapes)
    close(block.dense(), torch.block_diag(*[torch.kron(one, other) for one, other in zip(A, E / (6 * N))]))


@pytest.mark.parametrize("sizes", [(8, 4, 6), (2, 20, 30)], ids=["many rows", "few rows"])
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (FOOF, {}),
        (FOOF, {"precondition": "backward"}),
        (KFAC, {}),
        (NaturalGradient, {}),
        (KroneckerFilter, {"batch_size": 8}),
        (KroneckerFilterFP, {"batch_size": 8}),
        (OGN, {"num_data": 8}),
    ],
)
def test_conv1d_acts_as_a_linear_layer(rule: Any, options: dict[str, Any], sizes: tuple[int, int, int]) -> None:
    """The same directions as for nn.Linear with the transposed weight, also in steps without an observation."""
    count, fan_in, hidden = sizes
    x, y = torch.randn(count, fan_in), torch.randint(3, (count,))
    turned = nn.Sequential(Conv1D(hidden, fan_in), nn.Tanh(), Conv1D(3, hidden))
    plain = nn.Sequential(nn.Linear(fan_in, hidden), nn.Tanh(), nn.Linear(hidden, 3))
    for i in (0, 2):
        turned[i].weight.data.div_(math.sqrt(fan_in))
        plain[i].weight.data.copy_(turned[i].weight.T)
        plain[i].bias.data.copy_(turned[i].bias)
    for model in (turned, plain):
        optimizer = rule(model, **options)
        for _ in range(5):
            optimizer.zero_grad()
            outputs = model(x)
            loss = F.cross_entropy(outputs, y)
            optimizer.observe(outputs, loss=loss, labels=y) if rule is not OGN else None
            loss.backward()
            optimizer.step()
    for i in (0, 2):
        close(turned[i].weight.T, plain[i].weight, 1e-9)
        close(turned[i].bias, plain[i].bias, 1e-9)
