"""The diagonal of the Hessian of a loss, by differentiating twice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bayesgrad import noise

ROWS = 64  # rows of an exact Hessian that are computed at once


def gradients_of(loss: Tensor, params: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of a loss, with a graph for second derivatives. Leaves the loss's graph and `.grad` unchanged.

    Raises:
        TypeError, ValueError: the loss is not a single number with a graph.
        RuntimeError: the graph has been freed.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss must be a tensor, got {type(loss).__name__}.")
    if loss.numel() != 1:
        raise ValueError(f"loss must be a single number, got shape {tuple(loss.shape)}: average it over the batch.")
    if not loss.requires_grad:
        raise ValueError("the loss has no graph: compute it with gradients enabled and do not detach it.")
    return _grad(loss.reshape(()), params, None, create_graph=True)


def exact(gradient: Tensor, p: Tensor) -> Tensor:
    """dg_i/dp_i for each i, in the shape of p. Each row of the Hessian costs a backward pass."""
    if not gradient.requires_grad:  # for example of a loss that is linear in p
        return torch.zeros_like(p)
    found = []
    for start in range(0, p.numel(), ROWS):
        index = torch.arange(start, min(start + ROWS, p.numel()), device=p.device)
        rows = torch.zeros(len(index), p.numel(), dtype=gradient.dtype, device=p.device)
        rows[torch.arange(len(index), device=p.device), index] = 1
        (products,) = _grad(gradient, [p], rows.view(-1, *p.shape), retain_graph=True, is_grads_batched=True)
        if (
            products.shape == p.shape
        ):  # autograd returns zeros without a batch dimension if the gradient does not depend on p
            return torch.zeros_like(p)
        found.append(products.reshape(len(index), -1).gather(1, index[:, None])[:, 0])
    return torch.cat(found).view(p.shape)


def hutchinson(
    gradients: Sequence[Tensor], params: Sequence[Tensor], starts: Sequence[int], keys: Sequence[noise.Key]
) -> list[Tensor]:
    """The mean of v * (H v) over random signs v, one v for each key: E[v_i sum_j H_ij v_j] = H_ii.

    Its variance for one v is sum_{j != i} H_ij^2, which is zero for a diagonal Hessian.

    Args:
        gradients: of the loss, with their graph.
        params: to differentiate by.
        starts: the position of each parameter's first weight among all weights; signs are a function of it.
        keys: one random key for each v.
    """
    total = [torch.zeros_like(p) for p in params]
    for key in keys:
        signs = [_signs(p, start, key) for p, start in zip(params, starts)]
        products = _products(gradients, params, signs)
        total = [t + v * product / len(keys) for t, v, product in zip(total, signs, products)]
    return total


def _signs(p: Tensor, start: int, key: noise.Key) -> Tensor:
    hashed, _ = noise.bits(noise.positions(noise.signed(start), p), *key)
    return (1 - 2 * (hashed & 1)).view(p.shape).to(p.dtype)


def _products(gradients: Sequence[Tensor], params: Sequence[Tensor], vectors: Sequence[Tensor]) -> list[Tensor]:
    """H v; zero for a loss that is linear in all parameters, whose gradients have no graph."""
    curved = [(gradient, v) for gradient, v in zip(gradients, vectors) if gradient.requires_grad]
    if not curved:
        return [torch.zeros_like(p) for p in params]
    outputs, weights = zip(*curved)
    return list(_grad(outputs, params, weights, retain_graph=True))


def _grad(outputs: Tensor | Sequence[Tensor], params: Sequence[Tensor], weights: object, **how: bool) -> tuple:
    try:
        return torch.autograd.grad(  # pyright: ignore[reportCallIssue]
            outputs,  # pyright: ignore[reportArgumentType]
            params,
            weights,  # pyright: ignore[reportArgumentType]
            allow_unused=True,
            materialize_grads=True,
            **how,
        )
    except RuntimeError as error:
        raise RuntimeError(
            "the loss cannot be differentiated twice: call observe(loss) before loss.backward(), and use operations "
            f"with second derivatives only. The error of torch: {error}"
        ) from error
