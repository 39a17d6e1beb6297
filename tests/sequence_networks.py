"""Small language models, recurrent networks and attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patch_networks import SelfAttention
from vision_networks import Apply

WORDS = 7


# --- as in Hugging Face's transformers ---


class Conv1D(nn.Module):
    """A Linear layer whose weight is (in, out)."""

    def __init__(self, out: int, fan_in: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(fan_in, out)), nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, causal: bool, bias: Tensor | float = 0.0) -> Tensor:
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5 + bias
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class GPT2(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, width), nn.Embedding(8, width)
        self.norm1, self.c_attn, self.c_proj = nn.LayerNorm(width), Conv1D(3 * width, width), Conv1D(width, width)
        self.norm2, self.c_fc, self.c_out = nn.LayerNorm(width), Conv1D(2 * width, width), Conv1D(width, 2 * width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.wte(x) + self.wpe(torch.arange(x.shape[1])[None])
        h = h + self.c_proj(attend(*self.c_attn(self.norm1(h)).chunk(3, -1), heads=2, causal=True))
        h = h + self.c_out(F.gelu(self.c_fc(self.norm2(h)), approximate="tanh"))
        return self.head(self.norm(h))


class BERT(nn.Module):
    """With token types, which are the same for all tokens of an example, and a pooler."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(WORDS, width, padding_idx=0), nn.Embedding(8, width)
        self.kind, self.norm0 = nn.Embedding(2, width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.norm1 = nn.Linear(width, width), nn.LayerNorm(width)
        self.wide, self.narrow, self.norm2 = nn.Linear(width, 6), nn.Linear(6, width), nn.LayerNorm(width)
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        h = self.norm0(self.word(x) + self.place(torch.arange(x.shape[1])) + self.kind(kinds))
        mask = torch.where(x == 0, -1e4, 0.0)[:, None, None].to(h)
        h = self.norm1(h + self.out(attend(self.query(h), self.key(h), self.value(h), 2, False, mask)))
        h = self.norm2(h + self.narrow(F.gelu(self.wide(h))))
        return self.head(self.pooler(h[:, 0]).tanh())


class RMSNorm(nn.Module):
    """As in transformers, which has its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt())


class T5(nn.Module):
    """An encoder and a decoder with relative position biases, which two tables hold, and one table of words."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.shared, self.bias, self.decoder_bias = nn.Embedding(WORDS, width), nn.Embedding(5, 2), nn.Embedding(5, 2)
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(6))
        self.encoder, self.decoder, self.cross = (
            nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4)) for _ in range(3)
        )
        self.wi, self.wo = nn.Linear(width, 6, bias=False), nn.Linear(6, width, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        def layer(parts: nn.ModuleList, h: Tensor, memory: Tensor, causal: bool, table: nn.Embedding | None) -> Tensor:
            q, k, v, out = parts
            bias: Tensor | float = 0.0
            if table is not None:
                places = torch.arange(h.shape[1])
                bias = table((places[:, None] - places).clamp(-2, 2) + 2).permute(2, 0, 1)[None]
            return out(attend(q(h), k(memory), v(memory), 2, causal, bias))

        a, h = self.shared(x), self.shared(y)
        n = self.norms[0](a)
        a = self.norms[1](a + layer(self.encoder, n, n, False, self.bias))
        n = self.norms[2](h)
        h = h + layer(self.decoder, n, n, True, self.decoder_bias)
        h = h + layer(self.cross, self.norms[3](h), a, False, None)
        h = h + self.wo(F.relu(self.wi(self.norms[4](h))))
        return self.norms[5](h) @ self.shared.weight.T / h.shape[-1] ** 0.5


class LLaMA(nn.Module):
    """Rotary positions, SwiGLU, keys and values shared by two heads."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.table, self.norm1, self.norm2, self.norm = nn.Embedding(WORDS, width), *(RMSNorm(width) for _ in range(3))
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width // 2, bias=False)
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((width, 6), (width, 6), (6, width)))
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        def rotated(t: Tensor) -> Tensor:
            t = t.unflatten(-1, (-1, 2))
            angle = torch.arange(t.shape[1], dtype=t.dtype)[:, None]
            a, b = t.unbind(-1)
            return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).flatten(2)

        h = self.table(x)
        n = self.norm1(h)
        q, k, v = rotated(self.q(n)), rotated(self.k(n)).repeat(1, 1, 2), self.v(n).repeat(1, 1, 2)
        h = h + self.o(attend(q, k, v, 2, True))
        n = self.norm2(h)
        return self.head(self.norm(h + self.down(F.silu(self.gate(n)) * self.up(n))))


class LoRA(nn.Module):
    """A frozen Linear layer with a trained update of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.lora_B(self.lora_A(x))


def lora() -> nn.Module:
    return nn.Sequential(LoRA(nn.Linear(4, 6)), nn.Tanh(), LoRA(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 3))


class TiedHead(nn.Module):
    """A language model whose head has the weight of the table, and a bias of its own."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(WORDS, width), nn.Linear(width, width), nn.Linear(width, WORDS)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(self.table(x)).tanh())


def char_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(WORDS, 3, padding_idx=0),
        Apply(lambda x: x.mT),
        nn.Conv1d(3, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv1d(4, 5, 2, stride=2),
        Apply(lambda x: x.amax(2)),
        nn.Linear(5, 3),
    )


# --- recurrent ---


class Recurrent(nn.Module):
    """A class for each sequence, or a word for each position."""

    def __init__(self, kind: type[nn.RNNBase], language: bool = False, width: int = 4, **options) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width - 1)
        self.rnn = kind(width - 1, width, batch_first=True, **options)
        sides = 2 if options.get("bidirectional") else 1
        self.head, self.language = nn.Linear(sides * width, WORDS if language else 3), language

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(self.table(x))
        return self.head(h if self.language else h.mean(1) if self.rnn.bidirectional else h[:, -1])


class Cell(nn.Module):
    """A cell that is called for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0])  # pyright: ignore[reportOptionalSubscript]


# --- torch's attention ---


class Encoder(nn.Module):
    def __init__(self, batch_first: bool, **options) -> None:
        super().__init__()
        self.table, self.batch_first = nn.Embedding(WORDS, 4), batch_first
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=batch_first, **options)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        h = self.layer(h) if self.batch_first else self.layer(h.transpose(0, 1)).transpose(0, 1)
        return self.head(h.mean(1))


class AttentionPool(nn.Module):
    """Learned queries attend to the elements of a set."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.query = nn.Linear(3, 4), nn.Parameter(torch.randn(1, 2, 4))
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return self.head(self.attention(self.query.expand(len(x), -1, -1), h, h, need_weights=False)[0].flatten(1))


class PositionsFirst(nn.Module):
    """Sequences as (positions, examples, features) inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.attention, self.head = nn.Linear(3, 4), SelfAttention(4, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x.transpose(0, 1)).tanh()
        return self.head(self.attention(h.transpose(0, 1)).mean(1))
