"""Layers that are known by the linear layers inside of them, and layers with transposed weights.

The references are the plain modules of torch, one backward pass for each example, and loops that are written here.
"""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from bayesgrad import SubsampledFisher, laplace
from bayesgrad.layers import fisher as fisher_module
from bayesgrad.layers import known_layers
from bayesgrad.layers.call import LayerCall
from bayesgrad.layers.fisher import recorded_layers
from bayesgrad.layers.recorder import LayerRecorder
from bayesgrad.optim import FOOF, KFAC, OGN, VOGN, KroneckerFilter, KroneckerFilterFP, NaturalGradient

N, CLASSES = 5, 3
PLAIN: dict[str, Any] = {"damping_mode": "absolute", "max_norm": math.inf, "stats_every": 1, "update_every": 1}


@pytest.fixture(autouse=True)
def _double(request: pytest.FixtureRequest) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


# --- models ---


class Sequences(nn.Module):
    """A recurrent layer, read at its last outputs and at its final state."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer
        size = (layer.proj_size or layer.hidden_size) * (2 if layer.bidirectional else 1)
        self.head = nn.Linear(size, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        outputs, state = self.layer(x if self.layer.batch_first else x.transpose(0, 1))
        last = outputs.transpose(0, 1) if not self.layer.batch_first else outputs
        state = state[0] if isinstance(state, tuple) else state
        return self.head(last[:, -1] + last.square().mean(1)) + state.square().sum((0, 2))[:, None]


class Attends(nn.Module):
    """Attention of some positions to others; `given` says whether keys and values are the queries."""

    def __init__(self, given: str = "self", **options: Any) -> None:
        super().__init__()
        self.given = given
        self.layer = nn.MultiheadAttention(4, 2, batch_first=True, **options)
        nn.init.normal_(self.layer.in_proj_bias)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        keys, values = x[:, 1:].sin(), x[:, 1:].cos()
        if self.given == "sizes":
            keys, values = keys[..., :3], values[..., :2]
        both = {"self": (x, x), "memory": (keys, keys)}.get(self.given, (keys, values))
        return self.head(self.layer(x, *both, need_weights=False)[0].tanh().mean(1))


class Decoder(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.layer = nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0, batch_first=batch_first)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        target, memory = x[:, :2], x[:, 2:]
        if not self.batch_first:
            target, memory = target.transpose(0, 1), memory.transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(2)
        outputs = self.layer(target, memory, tgt_mask=mask, tgt_is_causal=True)
        return self.head(outputs.tanh().mean(1 if self.batch_first else 0))


class Product(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.layer, self.head = nn.Bilinear(3, 2, 4, bias=bias), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x[..., :3], x[..., 3:]).tanh())


class Bags(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer, self.head = nn.EmbeddingBag(6, 4, **options), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        weights = (x + 1.0).sqrt() if self.layer.mode == "sum" else None
        return self.head(self.layer(x, per_sample_weights=weights).tanh())


class Conv1D(nn.Module):
    """As in transformers: a Linear layer with a weight (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


Conv1D.__module__, Conv1D.__qualname__ = "transformers.pytorch_utils", "Conv1D"


class Words(nn.Module):
    """A table that is also the weight of the output layer."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=bias)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.table(x)).tanh().mean(1))


def upsampling(*layers: nn.Module, size: int) -> nn.Module:
    return nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(size, CLASSES))


def reals(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(N, *shape)


def tokens(length: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(6, (N, length))


RECURRENT = {
    "LSTM": lambda: nn.LSTM(3, 4, batch_first=True),
    "LSTM, time first": lambda: nn.LSTM(3, 4),
    "LSTM, two layers, both directions": lambda: nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True),
    "LSTM, projected": lambda: nn.LSTM(3, 4, 2, proj_size=2, bidirectional=True),
    "GRU": lambda: nn.GRU(3, 4, batch_first=True),
    "GRU, two layers, both directions, time first": lambda: nn.GRU(3, 4, 2, bidirectional=True),
    "RNN": lambda: nn.RNN(3, 4, batch_first=True),
    "RNN, relu, no bias, both directions": lambda: nn.RNN(3, 4, nonlinearity="relu", bias=False, bidirectional=True),
}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    **{name: (lambda make=make: Sequences(make()), reals(4, 3)) for name, make in RECURRENT.items()},
    "attention": (Attends, reals(3, 4)),
    "attention to a memory": (lambda: Attends("memory"), reals(3, 4)),
    "attention to keys and values": (lambda: Attends("keys"), reals(3, 4)),
    "encoder": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True), nn.Flatten(), nn.Linear(12, CLASSES)
        ),
        reals(3, 4),
    ),
    "decoder": (lambda: Decoder(True), reals(5, 4)),
    "decoder, positions first": (lambda: Decoder(False), reals(5, 4)),
    "ConvTranspose1d": (
        lambda: upsampling(
            nn.ConvTranspose1d(4, 6, 3, 2, 1, output_padding=1, groups=2), nn.ConvTranspose1d(6, 2, 2), size=22
        ),
        reals(4, 5),
    ),
    "ConvTranspose1d, dilated": (
        lambda: upsampling(nn.ConvTranspose1d(2, 3, 3, 2, 1, output_padding=2, dilation=3), size=39), reals(2, 4)
    ),
    "ConvTranspose2d": (
        lambda: upsampling(
            nn.ConvTranspose2d(2, 4, (3, 2), (2, 1), (1, 0), groups=2, bias=False), nn.ConvTranspose2d(4, 2, 1), size=50
        ),
        reals(2, 3, 4),
    ),
    "ConvTranspose3d": (
        lambda: upsampling(nn.ConvTranspose3d(2, 2, 2, (1, 2, 1), output_padding=(0, 1, 0)), size=90), reals(2, 2, 2, 2)
    ),
    "Bilinear": (Product, reals(5)),
    "Bilinear on sequences": (lambda: nn.Sequential(Product(bias=False), nn.Flatten(), nn.Linear(6, CLASSES)), reals(2, 5)),
    "EmbeddingBag, sum": (lambda: Bags(mode="sum", padding_idx=1), tokens(4)),
    "EmbeddingBag, mean": (lambda: Bags(mode="mean"), tokens(4)),
    "EmbeddingBag, mean, padding": (lambda: Bags(mode="mean", padding_idx=1), tokens(4)),
    "Conv1D": (lambda: nn.Sequential(Conv1D(6, 4), nn.Tanh(), Conv1D(CLASSES, 6)), reals(4)),
    "Conv1D on sequences": (lambda: nn.Sequential(Conv1D(5, 4), nn.Tanh(), nn.Flatten(), nn.Linear(10, 3)), reals(2, 4)),
    "tied": (Words, tokens(3)),
}  # fmt: skip
every_model = pytest.mark.parametrize("name", MODELS)
# With positions first, Linear layers outside of attention take positions for examples.
models_of_examples = pytest.mark.parametrize("name", [name for name in MODELS if name != "decoder, positions first"])


def build(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    make, inputs = MODELS[name]
    torch.manual_seed(1)
    return make(), inputs(), torch.randint(CLASSES, (N,))


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    assert found.shape == expected.shape
    found, expected = found.detach(), expected.detach()
    assert float((found - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))


def one_by_one(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradient of each example's loss, (N, *shape), by passes of single examples."""
    rows: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for j in range(len(x)):
        loss = F.cross_entropy(model(x[j : j + 1]), y[j : j + 1])
        found = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
        for row, gradient in zip(rows.values(), found):
            row.append(gradient)
    return {name: torch.stack(row) for name, row in rows.items()}


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


def test_second_derivatives() -> None:
    """A penalty on gradients, by torch's own implementation of the recurrent layer."""
    model, x, _ = build("LSTM")
    plain = copy.deepcopy(model)
    recorder = LayerRecorder(model, recorded_layers(model))
    for one in (model, plain):
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(one(inputs).square().sum(), inputs, create_graph=True)
        slope.square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters()):
        close(mine.grad, theirs.grad, 1e-11)
    recorder.close()


@pytest.mark.parametrize("name", ["LSTM, projected", "GRU", "decoder"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations(name: str, reentrant: bool) -> None:
    model, x, y = build(name)
    plain = copy.deepcopy(model)
    calls: list[LayerCall] = []
    recorder = LayerRecorder(model, recorded_layers(model), lambda call: calls.append(call))
    F.cross_entropy(checkpoint(model, x.requires_grad_(), use_reentrant=reentrant), y).backward()
    F.cross_entropy(plain(x), y).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters()):
        close(mine.grad, theirs.grad, 1e-12)
    assert {call.name for call in calls} == set(recorder.layers)
    recorder.close()


@pytest.mark.parametrize("name", ["LSTM", "GRU", "attention", "Bilinear", "EmbeddingBag, sum", "Conv1D"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_and_other_parameters(name: str) -> None:
    """functional_call uses the given tensors and records nothing of them; torch.func sees the plain layers."""
    model, x, y = build(name)
    plain = copy.deepcopy(model)
    calls: list[LayerCall] = []
    recorder = LayerRecorder(model, recorded_layers(model), lambda call: calls.append(call))
    values = {key: (p.detach() + 0.1).requires_grad_() for key, p in model.named_parameters()}
    loss = F.cross_entropy(functional_call(model, values, (x,)), y)
    mine = torch.autograd.grad(loss, list(values.values()))
    theirs = torch.autograd.grad(F.cross_entropy(functional_call(plain, values, (x,)), y), list(values.values()))
    for one, other in zip(mine, theirs):
        close(one, other, 1e-12)
    F.cross_entropy(functional_call(model, values, (x,)), y).backward()
    assert not calls
    if name not in ("LSTM", "GRU"):  # which vmap does not support
        frozen = {key: p.detach() for key, p in model.named_parameters()}
        one = vmap(lambda row: functional_call(model, frozen, (row[None],))[0])(x)
        close(one, plain(x), 1e-12)
        grad(lambda values: functional_call(model, values, (x,)).square().sum())(frozen)
    with torch.no_grad():
        close(model(x), plain(x), 1e-12)
    assert not calls
    recorder.close()


@pytest.mark.parametrize("name", ["LSTM", "attention", "Bilinear", "EmbeddingBag, sum", "Conv1D", "ConvTranspose1d"])
def test_copies_are_plain_models(name: str) -> None:
    model, x, y = build(name)
    keys = list(model.state_dict())
    calls: list[LayerCall] = []
    recorder = LayerRecorder(model, recorded_layers(model), lambda call: calls.append(call))
    copies = [copy.deepcopy(model)]
    if name != "Conv1D":  # its class is not where its name says
        copies.append(pickle.loads(pickle.dumps(model)))
    for one in copies:
        F.cross_entropy(one(x), y).backward()
        assert not calls
        close(one(x), model(x), 1e-12)
        assert list(one.state_dict()) == keys
        LayerRecorder(one, recorded_layers(one), lambda call: calls.append(call)).close()
    assert list(model.state_dict()) == keys
    assert [key for key, _ in model.named_parameters()] == keys
    recorder.close()


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
def test_autocast(kind: str) -> None:
    layer = getattr(nn, kind)(3, 4, batch_first=True).float()
    plain = copy.deepcopy(layer)
    recorder = LayerRecorder(layer, recorded_layers(layer))
    x = torch.randn(2, 5, 3, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)[0].float().square().sum().backward()
    plain(x)[0].square().sum().backward()
    for mine, theirs in zip(layer.parameters(), plain.parameters()):
        assert mine.grad.dtype == torch.float32
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.1, atol=0.05)
    recorder.close()


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
        warnings.filterwarnings("ignore", ".* does not support 0.bias")
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


def test_conv1d_acts_as_a_linear_layer() -> None:
    """The same directions as for nn.Linear with the transposed weight, for every rule."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    for rule, options in (
        (FOOF, {}),
        (FOOF, {"precondition": "backward"}),
        (KFAC, {}),
        (NaturalGradient, {}),
        (KroneckerFilter, {"batch_size": 8}),
        (KroneckerFilterFP, {"batch_size": 8}),
        (OGN, {"num_data": 8}),
    ):
        torch.manual_seed(1)
        turned = nn.Sequential(Conv1D(6, 4), nn.Tanh(), Conv1D(3, 6))
        plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        for i in (0, 2):
            plain[i].weight.data.copy_(turned[i].weight.T)
            plain[i].bias.data.copy_(turned[i].bias)
        for model in (turned, plain):
            optimizer = rule(model, **options)
            for _ in range(3):
                optimizer.zero_grad()
                outputs = model(x)
                loss = F.cross_entropy(outputs, y)
                optimizer.observe(outputs, loss=loss, labels=y) if rule is not OGN else None
                loss.backward()
                optimizer.step()
        for i in (0, 2):
            close(turned[i].weight.T, plain[i].weight)
            close(turned[i].bias, plain[i].bias)


# --- training ---

RULES: dict[str, Callable[[nn.Module], Any]] = {
    "FOOF": lambda model: FOOF(model),
    "FOOF, backward": lambda model: FOOF(model, precondition="backward"),
    "KFAC": lambda model: KFAC(model),
    "NaturalGradient": lambda model: NaturalGradient(model),
    "KroneckerFilter": lambda model: KroneckerFilter(model, batch_size=N),
    "KroneckerFilterFP": lambda model: KroneckerFilterFP(model, batch_size=N),
    "OGN": lambda model: OGN(model, num_data=N),
    "VOGN": lambda model: VOGN(model, num_data=N, seed=0),
}


def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, steps: int) -> None:
    for _ in range(steps):
        with optimizer.sampled():
            optimizer.zero_grad()
            outputs = model(x)
            loss = F.cross_entropy(outputs, y)
            optimizer.observe(outputs, loss=loss)
            loss.backward()
        optimizer.step()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "name", ["LSTM, two layers, both directions", "decoder", "ConvTranspose1d", "EmbeddingBag, mean"]
)
@pytest.mark.filterwarnings("ignore:.* does not support")
def test_a_resumed_run_is_the_same(rule: str, name: str) -> None:
    model, x, y = build(name)
    optimizer = RULES[rule](model)
    train(model, optimizer, x, y, 3)
    other, _, _ = build(name)
    other.load_state_dict(model.state_dict())
    resumed = RULES[rule](other)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, by in ((model, optimizer), (other, resumed)):
        train(one, by, x, y, 3)
    for mine, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("rule", ["FOOF", "KFAC", "NaturalGradient", "OGN"])
@pytest.mark.parametrize("name", ["LSTM, two layers, both directions", "GRU", "Bilinear", "Conv1D"])
def test_nothing_is_left_to_the_fallback(rule: str, name: str) -> None:
    """Warnings are errors, so none was given."""
    model, x, y = build(name)
    optimizer = RULES[rule](model)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, x, y, 2)
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before))


def test_packed_sequences_are_left_to_the_fallback() -> None:
    """They are not recorded: the gradients are torch's, the warning names the layer, and all is trained."""

    class Packed(Sequences):
        def forward(self, x: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, torch.tensor([4, 4, 3, 2, 1]), batch_first=True)
            return self.head(self.layer(packed)[1][0][-1])

    model, x, y = Packed(nn.LSTM(3, 4, batch_first=True)), torch.randn(N, 4, 3), torch.randint(CLASSES, (N,))
    optimizer = FOOF(model)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.warns(UserWarning, match=r"FOOF does not support layer.weight_ih_l0, .* trained by"):
        train(model, optimizer, x, y, 1)
    train(model, optimizer, x, y, 1)
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before))


def test_a_frozen_projection_is_skipped() -> None:
    model, x, y = build("LSTM")
    model.layer.weight_hh_l0.requires_grad_(False)
    model.layer.bias_hh_l0.requires_grad_(False)
    plain = copy.deepcopy(model)
    calls: list[LayerCall] = []
    recorder = LayerRecorder(model, recorded_layers(model), lambda call: calls.append(call))
    for one in (model, plain):
        F.cross_entropy(one(x), y).backward()
    assert {call.name for call in calls} == {"layer.ih_l0", "head"}
    for mine, theirs in zip(model.parameters(), plain.parameters()):
        if mine.requires_grad:
            close(mine.grad, theirs.grad, 1e-12)
        else:
            assert mine.grad is None
    recorder.close()


def test_names_of_parts() -> None:
    def names(model: nn.Module) -> list[str]:
        return [name for name, _ in known_layers(model)]

    assert names(nn.LSTM(2, 3, proj_size=1)) == ["", "ih_l0", "hh_l0", "hr_l0"]
    assert names(nn.Sequential(nn.GRU(2, 3, bidirectional=True))) == [
        "", "0", "0.ih_l0", "0.hh_l0", "0.ih_l0_reverse", "0.hh_l0_reverse",
    ]  # fmt: skip
    assert names(nn.MultiheadAttention(4, 2)) == ["", "in_proj", "out_proj", "out_proj"]
    other_sizes = nn.MultiheadAttention(4, 2, kdim=3)
    assert [name for name in names(other_sizes) if name] == ["q_proj", "k_proj", "v_proj", "out_proj", "out_proj"]
    for unknown in (nn.MultiheadAttention(4, 2, add_zero_attn=True), nn.EmbeddingBag(3, 2, mode="max")):
        assert len(names(unknown)) == len(list(unknown.modules()))

    class Other(nn.LSTM):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[0]

    assert names(Other(2, 3)) == [""]


# --- tied weights and adapters ---


def test_a_tied_table_is_trained_by_the_fallback_with_one_warning() -> None:
    """Its two uses have different factors, so that FOOF and KFAC train it by Adam; exact rules know both uses."""
    for rule in ("FOOF", "KFAC", "KroneckerFilterFP"):
        model, x, y = Words(), torch.randint(6, (N, 3)), torch.randint(6, (N,))
        with pytest.warns(
            UserWarning, match=r"does not support table\.weight, head\.bias: they are trained by"
        ) as caught:
            optimizer = RULES[rule](model)
            before = model.table.weight.detach().clone()
            train(model, optimizer, x, y, 3)
        assert len(caught) == 1
        assert not torch.equal(before, model.table.weight)
        assert "input_moment" not in optimizer.state[model.table.weight]
        assert "input_moment" in optimizer.state[model.inner.weight]


class LoRA(nn.Module):
    """As peft's adapter of a Linear layer: plain Linear layers beside a frozen one."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2.0 * self.lora_B["default"](self.lora_A["default"](x))


@pytest.mark.parametrize("rule", RULES)
def test_adapters(rule: str) -> None:
    """The layers of adapters are found, the frozen one is not recorded, and gradients are exact."""
    model = nn.Sequential(LoRA(nn.Linear(4, 6), 2), nn.Tanh(), LoRA(nn.Linear(6, CLASSES), 2))
    x, y = torch.randn(N, 4), torch.randint(CLASSES, (N,))
    assert set(recorded_layers(model)) == {f"{i}.lora_{side}.default" for i, side in product((0, 2), "AB")}
    optimizer = RULES[rule](model)
    frozen = [p.detach().clone() for p in model.parameters() if not p.requires_grad]
    before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    train(model, optimizer, x, y, 2)
    assert all(torch.equal(p, old) for p, old in zip((p for p in model.parameters() if not p.requires_grad), frozen))
    assert not any(torch.equal(p, old) for p, old in zip((p for p in model.parameters() if p.requires_grad), before))
