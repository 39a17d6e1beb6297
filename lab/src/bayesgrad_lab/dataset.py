"""What a data set is, wherever it comes from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

SPLIT_SEED = 0
MOST_BYTES = 1 << 32  # of one array or file; a damaged header may ask for any number


@dataclass(frozen=True)
class Dataset:
    """Inputs and integer labels for training and testing.

    Args:
        train_x, test_x: (n, ...) float inputs, or (n, time) token numbers where `kind` is "text".
        train_y, test_y: (n,) labels, or (n, time) next tokens.
        classes: how many different labels there may be.
        kind: "image" (n, channels, height, width), "table" (n, features) or "text".
        note: what was found, for people.
    """

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int
    kind: str
    note: str = ""

    def fingerprint(self) -> str:
        """A short digest of all that is in it."""
        digest = hashlib.sha256()
        for tensor in (self.train_x, self.train_y, self.test_x, self.test_y):
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()[:12]

    def part(self, count: int | None, seed: int = SPLIT_SEED) -> Dataset:
        """The same test data and a fixed random choice of `count` training examples."""
        if count is None or count >= len(self.train_x):
            return self
        chosen = torch.randperm(len(self.train_x), generator=torch.Generator().manual_seed(seed))[:count]
        return replace(self, train_x=self.train_x[chosen], train_y=self.train_y[chosen])

    def validation(self, fraction: float = 0.2) -> Self:
        """A data set whose test part is held out of this one's training part; the test part is out of reach."""
        return self.held_out(fraction, SPLIT_SEED + 1)

    def held_out(self, fraction: float, seed: int) -> Self:
        """The same, by a random choice that is a function of the seed."""
        count = int(fraction * len(self.train_x))
        if count < 1:
            raise ValueError(
                f"{len(self.train_x)} training examples are too few for a validation split: use at least 5."
            )
        order = torch.randperm(len(self.train_x), generator=torch.Generator().manual_seed(seed))
        held, kept = order[:count], order[count:]
        x, y = self.train_x, self.train_y
        return replace(self, train_x=x[kept], train_y=y[kept], test_x=x[held], test_y=y[held])
