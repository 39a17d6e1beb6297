"""What the backward passes since the last step show."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Evidence:
    """The evidence about one block of weights.

    Args:
        gradient: of the mean loss over the minibatch, in the dtype of the state.
        offset: where the gradient was taken, from the mean.
        product: of gradients and offsets, added up over several draws.
        squares: the mean over examples of their squared gradients.
        hessian: the diagonal of the mean loss's Hessian.
    """

    gradient: Tensor
    offset: Tensor | None = None
    product: Tensor | None = None
    squares: Tensor | None = None
    hessian: Tensor | None = None
