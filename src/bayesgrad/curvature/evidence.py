"""What the backward passes since the last step show."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Evidence:
    """The evidence about one block of weights.

    Args:
        gradient: of the mean loss over the minibatch, in the dtype of the state.
    """

    gradient: Tensor
