"""Models with the layers that docs/layers.md lists, beside those of Linear, Conv and Embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

N, CLASSES = 5, 3


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
    "Bilinear on sequences": (lambda: nn.Sequential(Product(bias=False), nn.Flatten(), nn.Linear(6, 3)), reals(2, 5)),
    "EmbeddingBag, sum": (lambda: Bags(mode="sum", padding_idx=1), tokens(4)),
    "EmbeddingBag, mean": (lambda: Bags(mode="mean"), tokens(4)),
    "EmbeddingBag, mean, padding": (lambda: Bags(mode="mean", padding_idx=1), tokens(4)),
    "Conv1D": (lambda: nn.Sequential(Conv1D(6, 4), nn.Tanh(), Conv1D(CLASSES, 6)), reals(4)),
    "Conv1D on sequences": (lambda: nn.Sequential(Conv1D(5, 4), nn.Flatten(), nn.Tanh(), Conv1D(3, 10)), reals(2, 4)),
    "tied": (Words, tokens(3)),
}  # fmt: skip


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
