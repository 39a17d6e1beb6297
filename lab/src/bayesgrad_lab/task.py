"""What is trained: data, a network, a loss, batches and a budget."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesgrad_lab import networks
from bayesgrad_lab.dataset import Dataset

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean over examples, and over the positions of sequences."""
    return F.cross_entropy(outputs.flatten(0, -2), labels.flatten())


@dataclass(frozen=True)
class Task:
    """What is trained and for how long.

    Args:
        network: the name of a network, see `networks.build`.
        epochs: passes over the training data.
        batch: examples of a gradient; None for all.
        widths: of the network's layers, where they are not those of its name.
        large: the network in the size of the papers.
        lengths: steps of a final run and of one that chooses hyper-parameters, where they are not counted in epochs.
        milestones: epochs after which lr falls tenfold, where there is no other schedule.
        decay: L2 strength in SGD's terms, which each method takes in its own way.
        augment: images are shifted and mirrored.
        loss: of outputs and labels.
        samples: draws that a prediction averages.
        outside: inputs of another kind than those of `data`, which a model should be uncertain about.
        name: a template of `key`; it may use data, apart (a hyphen after a digit), count (of training examples),
            network, epochs, batch and large.
        make: builds the network, with the arguments of `networks.build`.
    """

    data: Dataset
    network: str
    epochs: int = 1
    batch: int | None = 128
    widths: tuple[int, ...] | None = None
    large: bool = False
    lengths: tuple[int, int] = (0, 0)
    milestones: tuple[int, ...] = ()
    decay: float = 0.0
    augment: bool = False
    loss: Loss = cross_entropy
    samples: int = 32
    outside: Tensor = field(default_factory=lambda: torch.empty(0))
    name: str = "{data}-{network}"
    make: Callable[..., nn.Module] = networks.build

    @property
    def key(self) -> str:
        """What the names of its trials' files contain."""
        return self.name.format(
            data=self.data.name,
            apart="-" * self.data.name[-1].isdigit(),
            count=len(self.data.train_x),
            network="-".join(map(str, (self.network, *(self.widths or ())))),
            epochs=self.epochs,
            batch=self.batch or "all",
            large="-large" * self.large,
        )

    @property
    def title(self) -> str:
        return f"{self.network} on {len(self.data.train_x):,} of {self.data.name}"

    @property
    def size(self) -> int:
        """Examples of a batch."""
        return self.batch or len(self.data.train_x)

    @property
    def losses_per_example(self) -> int:
        """Losses of an example: the positions of a sequence; one where targets are numbers."""
        return 1 if self.data.train_y.is_floating_point() else self.data.train_y[0].numel()

    @property
    def steps(self) -> int:
        """Those of an epoch."""
        return -(-len(self.data.train_x) // self.size)

    @property
    def held_out(self) -> Task:
        """The same with a fifth of the training part in place of the test part, which is out of reach."""
        return replace(self, data=self.data.validation())

    def model(self, seed: int, **options: Any) -> nn.Module:
        """The network, its weights a function of the seed."""
        return self.make(self.network, self.data, seed, large=self.large, widths=self.widths, **options)

    def batches(
        self, rows: Iterator[Tensor], device: str = "cpu", generator: torch.Generator | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and labels of these rows of the training part, augmented by the generator where the task asks."""
        for chosen in rows:
            x, y = self.data.train_x[chosen], self.data.train_y[chosen]
            if self.augment and generator is not None:
                x = augmented(x, generator)
            yield x.to(device), y.to(device)


def shuffled(
    count: int, size: int, generator: torch.Generator, epochs: int | None = None, backwards: bool = False
) -> Iterator[Tensor]:
    """Rows of batches: in each epoch all examples in a new random order; for ever where epochs are not given.

    Args:
        backwards: the last batch of an epoch, which may be smaller, comes first.
    """
    for _ in itertools.count() if epochs is None else range(epochs):
        rows = torch.randperm(count, generator=generator).split(size)
        yield from reversed(rows) if backwards else rows


def augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each image shifted by up to four pixels and mirrored half of the time."""
    size = x.shape[-1]
    padded = F.pad(x, (4, 4, 4, 4))
    shift = torch.randint(0, 9, (len(x), 2), generator=generator)
    mirror = torch.rand(len(x), generator=generator) < 0.5
    rows = (torch.arange(size) + shift[:, :1])[:, None, :, None]
    columns = torch.arange(size).expand(len(x), size).clone()
    columns[mirror] = columns[mirror].flip(1)
    columns = (columns + shift[:, 1:])[:, None, None, :]
    return padded[torch.arange(len(x))[:, None, None, None], torch.arange(x.shape[1])[:, None, None], rows, columns]
