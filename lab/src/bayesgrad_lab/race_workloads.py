"""What a race is run on: six workloads of half a minute or a minute on one thread, each with a validation score.

Data files are read from the folder that the user names. At the scale of tests, data are drawn and networks are tiny.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesgrad.likelihoods import Gaussian
from bayesgrad_lab import networks
from bayesgrad_lab.context import Context
from bayesgrad_lab.dataset import Dataset
from bayesgrad_lab.task import Loss, Task, cross_entropy
from bayesgrad_lab.training import evaluate, in_batches

TILES = 4  # pictures of a mosaic in each direction
UNITS = {"error": "error", "nll": "NLL", "mse": "squared error"}


def _seeded(build: Callable[[Dataset], nn.Module], name: str, data: Dataset, seed: int, **_: Any) -> nn.Module:
    """A network, as `Task.make` wants it."""
    with networks.seeded(seed):
        return build(data).train()


# --- networks ---


def _autoencoder(data: Dataset, *widths: int) -> nn.Module:
    """Layers that narrow and widen again (Hinton and Salakhutdinov, 2006), with tanh in between."""
    sizes = (data.train_x[0].numel(), *widths)
    pairs = itertools.pairwise((*sizes, *reversed(sizes[:-1])))
    layers = [part for pair in pairs for part in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


class Recurrent(nn.Module):
    """Characters, an LSTM and a linear layer."""

    def __init__(self, vocabulary: int, embedding: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, embedding)
        self.cells = nn.LSTM(embedding, width, batch_first=True)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cells(self.tokens(x))[0])


class FourierFeatures(nn.Module):
    """Sines and cosines of random projections of a position (Tancik et al., 2020); not trained."""

    projection: Tensor

    def __init__(self, inputs: int, features: int, deviation: float = 10.0) -> None:
        super().__init__()
        self.register_buffer("projection", 2 * math.pi * deviation * torch.randn(inputs, features))

    def forward(self, x: Tensor) -> Tensor:
        angles = x @ self.projection
        return torch.cat([angles.sin(), angles.cos()], -1)


def _coordinates(data: Dataset, features: int, width: int) -> nn.Module:
    sizes = (2 * features, width, width, width, data.train_y.shape[1])
    return nn.Sequential(FourierFeatures(data.train_x.shape[1], features), *networks.perceptron(sizes))


# --- data ---


def _to_itself(data: Dataset) -> Dataset:
    """Images whose targets are they themselves."""
    return replace(data, train_y=data.train_x.flatten(1), test_y=data.test_x.flatten(1), classes=0)


def _mosaic(data: Dataset) -> Dataset:
    """Positions and colours of the pixels of one picture, made of the first images of a data set, in random order."""
    channels, height, width = data.train_x.shape[1:]
    tiles = data.train_x[: TILES**2].view(TILES, TILES, channels, height, width)
    colours = tiles.permute(0, 3, 1, 4, 2).reshape(-1, channels)
    axes = (torch.linspace(0, 1, TILES * size) for size in (height, width))
    places = torch.cartesian_prod(*axes)
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(0))
    x, y = places[order], colours[order]
    return Dataset(f"{data.name}-mosaic", x, y, x[:0], y[:0], 0, "table")


def drawn(kind: str) -> Dataset:
    """Data for tests: images of one pattern for each of three classes, bright ones, or a text of two kinds."""
    generator = torch.Generator().manual_seed(0)
    if kind == "text":
        windows = (torch.arange(9)[None] * torch.randint(1, 3, (120, 1), generator=generator)) % 7
        return Dataset("drawn-text", windows[:, :-1], windows[:, 1:], windows[:, :-1], windows[:, 1:], 7, "text")
    labels = torch.arange(150) % 3
    patterns = torch.randn(3, 1, 8, 8, generator=generator)
    images = patterns[labels] + 2 * torch.randn(150, 1, 8, 8, generator=generator)
    if kind == "picture":
        images = torch.ones(150, 1, 8, 8)
    return Dataset("drawn-images", images, labels, images, labels, 3, "image")


# --- workloads ---


@dataclass(frozen=True)
class Workload:
    """A task, the score that is to be reached on data held out of its training part, and a budget.

    Args:
        source: the data set.
        kind: of its data, for tests.
        build: the network, of the data and of the sizes.
        sizes: of the network, in a race and in tests.
        metric: "error", "nll" or "mse" of the validation data, the lower the better.
        validated: examples of the validation data at most, so that validation takes a fifth of the time.
        budget: processor seconds.
        held_out: not looked at while defaults are chosen.
        change: what the data are made into.
    """

    name: str
    title: str
    source: str
    kind: str
    build: Callable[..., nn.Module]
    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    batch: int
    metric: str
    validated: int
    budget: float = 30.0
    held_out: bool = False
    change: Callable[[Dataset], Dataset] = field(default=lambda data: data)

    def task(self, context: Context) -> Task:
        """The task, its test part held out of the training part; test data are out of reach."""
        small = context.scale == "smoke"
        data = drawn(self.kind) if small else context.load(self.source)
        return self.task_of(self.change(data).validation(), small)

    def task_of(self, data: Dataset, small: bool = False) -> Task:
        """The task on these data, whose test part is validated on, with the network of a race or of a test."""
        data = replace(data, test_x=data.test_x[: self.validated], test_y=data.test_y[: self.validated])
        build = partial(_seeded, lambda data: self.build(data, *self.sizes[small]))
        loss: Loss = F.mse_loss if self.metric == "mse" else cross_entropy
        return Task(data, self.name, batch=32 if small else self.batch, loss=loss, make=build)

    def likelihood(self, task: Task) -> dict[str, Any]:
        """For rules that draw labels: that whose negative logarithm the loss is."""
        if self.metric != "mse":
            return {}
        return {"likelihood": Gaussian(math.sqrt(task.data.train_y[0].numel() / 2))}  # mean, not sum, of squares

    def scores(self, model: nn.Module, task: Task, device: str) -> tuple[float, float]:
        """The metric and the loss of the validation data; the model is in evaluation mode."""
        x, y = task.data.test_x, task.data.test_y
        if self.metric == "mse":
            value = F.mse_loss(in_batches(model, x, device), y).item()
            return value, value
        found = evaluate(model, x, y, device)
        return found[self.metric], found["nll"]


def _of(name: str) -> Callable[..., nn.Module]:
    """A network of `networks`, of these widths."""
    return lambda data, *widths: networks.NETWORKS[name][0](data, False, widths)


def _gpt(data: Dataset, width: int, depth: int, heads: int) -> nn.Module:
    return networks.GPT(data.classes, data.train_x.shape[1], width, depth, heads)


def _recurrent(data: Dataset, embedding: int, width: int) -> nn.Module:
    return Recurrent(data.classes, embedding, width)


_AE, _GPT = ((1000, 500, 250, 30), (20, 5)), ((128, 4, 4), (16, 1, 2))
WORKLOADS: Mapping[str, Workload] = {
    one.name: one
    for one in (
        Workload("gpt", "GPT on tinyshakespeare", "tinyshakespeare", "text", _gpt, _GPT, 64, "nll", 200, 60.0),
        Workload("resnet", "ResNet on CIFAR-10", "cifar10", "image", _of("resnet"), ((16,), (4,)), 128, "error", 1500),
        Workload(
            "autoencoder", "Autoencoder on MNIST", "mnist", "image", _autoencoder, _AE, 200, "mse", 2000,
            change=_to_itself,
        ),
        Workload("cnn", "CNN on Fashion-MNIST", "fashion-mnist", "image", _of("cnn"), ((), ()), 128, "error", 3000),
        Workload(
            "lstm", "LSTM on tinyshakespeare", "tinyshakespeare", "text", _recurrent, ((64, 256), (8, 12)), 32, "nll",
            300, held_out=True,
        ),
        Workload(
            "picture", "Pixels of a picture by position", "cifar10", "picture", _coordinates, ((128, 256), (8, 16)),
            1024, "mse", 4000, held_out=True, change=_mosaic,
        ),
    )
}  # fmt: skip
