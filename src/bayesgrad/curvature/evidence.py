"""The results of the backward passes since the last step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Evidence:
    """Gradients and related statistics for one block of weights.

    Args:
        gradient: of the mean loss over the minibatch, in the dtype of the state.
        offset: the weights at which the gradient was taken, minus the mean.
        product: the product of gradient and offset, for several samples of the weights.
        squares: the mean over examples of squared per-example gradients.
        hessian: the diagonal of the Hessian of the mean loss.
    """

    gradient: Tensor
    offset: Tensor | None = None
    product: Tensor | None = None
    squares: Tensor | None = None
    hessian: Tensor | None = None
