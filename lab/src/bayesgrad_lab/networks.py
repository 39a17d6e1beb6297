"""Networks to compare optimizers on: each a function of a data set, in sizes for a laptop and for the papers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesgrad_lab.dataset import Dataset
from bayesgrad_lab.names import unknown


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut (He et al., 2016)."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        self.shortcut = nn.Sequential()
        if stride != 1 or inner != outer:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(hidden)) + self.shortcut(x))


class ResNet(nn.Module):
    """A ResNet for small images: `blocks` per stage, channels doubling from `width`."""

    def __init__(self, channels: int, classes: int, blocks: tuple[int, ...], width: int, stem_stride: int = 1) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, stem_stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        layers, inner = [], width
        for stage, count in enumerate(blocks):
            outer = width * 2**stage
            for i in range(count):
                layers.append(BasicBlock(inner, outer, 2 if stage and i == 0 else 1))
                inner = outer
        self.layers = nn.Sequential(*layers)
        self.out = nn.Linear(inner, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.stem(x)).mean((2, 3)))


class DenseLayer(nn.Module):
    """Normalise, 1x1, normalise, 3x3; the output is appended to the input (Huang et al., 2017)."""

    def __init__(self, inner: int, growth: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.path(x), x], 1)


class DenseNet(nn.Module):
    """A DenseNet-BC for small images: `layers` per stage, compression one half between stages."""

    def __init__(self, channels: int, classes: int, layers: tuple[int, ...], growth: int, stem_stride: int = 1) -> None:
        super().__init__()
        width = 2 * growth
        parts: list[nn.Module] = [nn.Conv2d(channels, width, 3, stem_stride, 1, bias=False)]
        for stage, count in enumerate(layers):
            for _ in range(count):
                parts.append(DenseLayer(width, growth))
                width += growth
            if stage < len(layers) - 1:
                half = width // 2
                parts += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, half, 1, bias=False), nn.AvgPool2d(2)]
                width = half
        self.features = nn.Sequential(*parts, nn.BatchNorm2d(width), nn.ReLU())
        self.out = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.features(x).mean((2, 3)))


class Attention(nn.Module):
    """Causal self-attention with plain Linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.project(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class GPT(nn.Module):
    """A small decoder over characters."""

    def __init__(self, vocabulary: int, context: int, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(width),
                    "attention": Attention(width, heads),
                    "norm2": nn.LayerNorm(width),
                    "mlp": nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
                }
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.positions[: x.shape[1]]
        for block in self.blocks:
            hidden = hidden + block["attention"](block["norm1"](hidden))  # pyright: ignore[reportIndexIssue]
            hidden = hidden + block["mlp"](block["norm2"](hidden))  # pyright: ignore[reportIndexIssue]
        return self.out(self.norm(hidden))


Widths = tuple[int, ...] | None


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """What is drawn inside is a function of the seed alone; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def perceptron(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers between these sizes, with rectifiers in between."""
    layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def _mlp(data: Dataset, large: bool, widths: Widths) -> nn.Module:
    hidden = (1000 if large else 100,) * 2 if widths is None else widths
    return nn.Sequential(nn.Flatten(), *perceptron((math.prod(data.train_x.shape[1:]), *hidden, data.classes)))


def _cnn(data: Dataset, large: bool, widths: Widths) -> nn.Module:
    width, channels = (32 if large else 16), data.train_x.shape[1]
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * (data.train_x.shape[2] // 4) * (data.train_x.shape[3] // 4), data.classes),
    )


def _resnet(data: Dataset, large: bool, widths: Widths) -> nn.Module:
    channels = data.train_x.shape[1]
    if large:
        return ResNet(channels, data.classes, (3, 4, 6, 3), 64)
    return ResNet(channels, data.classes, (1, 1, 1), (widths or (16,))[0], 1 + (data.train_x.shape[2] >= 28))


def _densenet(data: Dataset, large: bool, widths: Widths) -> nn.Module:
    channels = data.train_x.shape[1]
    if large:
        return DenseNet(channels, data.classes, (6, 12, 24, 16), 32)
    return DenseNet(channels, data.classes, (3, 3), 8, 1 + (data.train_x.shape[2] >= 28))


def _gpt(data: Dataset, large: bool, widths: Widths) -> nn.Module:
    size = dict(width=384, depth=6, heads=6) if large else dict(width=64, depth=2, heads=4)
    return GPT(data.classes, data.train_x.shape[1], **size)


NETWORKS: dict[str, tuple[Callable[[Dataset, bool, Widths], nn.Module], tuple[str, ...]]] = {
    "mlp": (_mlp, ("image", "table")),
    "cnn": (_cnn, ("image",)),
    "resnet": (_resnet, ("image",)),
    "densenet": (_densenet, ("image",)),
    "gpt": (_gpt, ("text",)),
}


def build(name: str, data: Dataset, seed: int, large: bool = False, widths: Widths = None) -> nn.Module:
    """The network of that name for a data set, its weights a function of the seed alone.

    Args:
        large: in the size of the papers.
        widths: of the hidden layers of a perceptron, or the channels of a ResNet's first stage, where they are others.
    """
    if name not in NETWORKS:
        raise unknown("model", name, NETWORKS)
    make, kinds = NETWORKS[name]
    if data.kind not in kinds:
        fitting = ", ".join(other for other, (_, kinds) in NETWORKS.items() if data.kind in kinds)
        raise ValueError(f"{name} takes {' or '.join(kinds)} data, but {data.name} is {data.kind} data; use {fitting}.")
    with seeded(seed):
        model = make(data, large, widths)
    if data.train_x.is_floating_point():
        model = model.to(data.train_x.dtype)
    try:
        with torch.no_grad():
            model.eval()(data.train_x[:1])
    except RuntimeError as error:
        shape = tuple(data.train_x.shape[1:])
        raise ValueError(
            f"{name} cannot take examples of shape {shape}: images are (channels, height, width), 4 pixels at least."
        ) from error
    return model.train()
