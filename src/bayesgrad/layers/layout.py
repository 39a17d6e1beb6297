"""Which rows of a layer belong to which example, and how many examples and losses a forward pass has.

An *example* is one index of the first dimension of the model's outputs. The *rows* of a layer are its leading
dimensions, flattened (of a convolution: the first dimension). Batch first (N, T), sequence first (T, N), flattened
tokens (N T), windows (N W, T) and concatenated pairs (2 N) are all of the form (outer, N, inner), in which row
(o, j, i) belongs to example j. `layers.examples` finds out which of them a layer has.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowLayout(NamedTuple):
    """The rows of a layer as (outer, examples, inner); no examples if rows mix them."""

    outer: int
    examples: int

    def arrange(self, rows: Tensor, dim: int) -> Tensor:
        """(..., rows, positions, ...) as (..., examples, positions of an example, ...).

        Args:
            dim: that of the rows; the next one is that of the positions of a row.
        """
        if self.outer == 1:
            return rows.reshape(*rows.shape[:dim], self.examples, -1, *rows.shape[dim + 2 :])
        split = rows.unflatten(dim, (self.outer, self.examples, -1)).transpose(dim, dim + 1)
        return split.flatten(dim + 1, dim + 3)


MIXED = RowLayout(0, 0)


class ForwardPass(NamedTuple):
    """The shapes of a forward pass, and the numbers of examples and losses that follow from them.

    Args:
        outputs: the shape of the outputs; the first dimension is that of examples.
        arguments: the shape of the model's first argument, as far as it is known.
        class_dim: the dimension of the outputs that one loss is about, if they have more than two; None if a loss is
            about all outputs of an example.
        single: whether each row of two-dimensional outputs is known to have one loss.
    """

    outputs: torch.Size
    arguments: torch.Size = torch.Size()
    class_dim: int | None = -1
    single: bool = False

    @property
    def rows_of_argument(self) -> int | None:
        """The number of rows of the outputs for each index of the first argument's first dimension.

        1, or the length of sequences for flattened outputs; None if it is not known.
        """
        rows, first = self.outputs[0], self.arguments[:2]
        if not rows or not first:
            return None
        return 1 if first[0] == rows else first[1] if first.numel() == rows and len(self.outputs) == 2 else None

    @property
    def positions(self) -> int:
        """The number of losses of one index of the outputs' first dimension."""
        if len(self.outputs) < 3 or self.class_dim is None:
            return 1
        return self.outputs[1:].numel() // max(1, self.outputs[self.class_dim])

    def group(self, per_example: float | None) -> int:
        """The number of consecutive rows of the outputs that are one example: more than 1 for flattened outputs."""
        if per_example is None or per_example <= 1 or len(self.outputs) != 2:
            return 1
        first = self.arguments[:2]
        flattened = len(first) == 2 and first.numel() == self.outputs[0] != first[0] and per_example in first
        if not (self.single or flattened):
            return 1
        if self.outputs[0] % per_example:
            raise ValueError(
                f"outputs of shape {tuple(self.outputs)} have one loss in each row, but losses_per_example="
                f"{per_example:g} does not divide their number: pass None, or the number of rows of an example."
            )
        return int(per_example)

    def losses(self, per_example: float | None) -> float:
        """The number of losses of the pass.

        Args:
            per_example: the option `losses_per_example`; None for what the outputs tell.
        """
        rows = self.outputs[0]
        if per_example is None or self.group(per_example) > 1:
            return rows * self.positions
        if len(self.outputs) > 2 and 1 < per_example == rows:  # outputs in which the sequence is the first dimension
            return rows * self.positions
        return rows * per_example
