r"""Corrections to the drift of a sampler whose metric depends on the weights.

With G the metric and dG_j its derivative by the j-th weight, let

.. math::
    V = G^{-1} u, \quad u_a = \sum_{j} (\partial_j G\, G^{-1})_{aj}, \qquad
    T = G^{-1} t, \quad t_j = \mathrm{Tr}(G^{-1} \partial_j G).

Noise of covariance G^-1 samples exp(-C) with the drift -V ("flat") and exp(-C) |G|^1/2 with -V + T/2 ("jeffreys").

dG is never formed. For any R with R R' = G^-1 and columns r, u = Σ_r D_r(G r) and t = Σ_r ∇(r'G r), with D_r the
derivative along r at fixed r: only products with G and their derivatives are needed. The sums are exact with n columns;
a single r = R z with random signs z gives an unbiased estimate.

A Gauss-Newton matrix G = (1/N) Σ J'H J, with outputs f of which the loss has the Hessian H(f), has with ḟ = J r and f̈
the second derivative of f along r

.. math::
    u = \tfrac1N \sum_r J^T (H \ddot f + D_{\dot f} H\, \dot f) + q, \quad
    t = \tfrac1N \sum_r J^T \nabla_f (\dot f^T H \dot f) + 2 q, \quad q = \tfrac1N \sum_r (\nabla \dot f)^T H \dot f,

so q cancels from -u + t/2. For outputs that are linear in the weights, f̈ = 0 and q = 0: a closed form.

Reference: Smith et al. 2018, Eq. 2, 6 and 7.
Differs from the paper: signs are corrected.
Checked by: tests/equations/test_samplers.py, which tests that the flux of the stationary density vanishes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, jacrev, jvp, vjp, vmap

from bayesgrad.layers.stateless import functional_call
from bayesgrad.likelihoods import Likelihood
from bayesgrad.samplers.norms import ElementaryNorms

CORRECTIONS = (None, "flat", "jeffreys")
CHUNK = 1 << 22  # elements of derivatives along several directions that are in memory at once

Terms = tuple[Tensor, Tensor | None]  # u and t; t is None if it is not needed


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of examples, and the model's outputs for them as a function of the weights.

    Args:
        names, shapes: of the parameters, in flat order.
        args, kwargs: the arguments of the model.
        labels: for the empirical Fisher, whose H is the outer product of the residual; None for the Hessian.
        count: the number of losses, by which sums over examples are divided.
        observed: the outputs that were observed.
    """

    model: nn.Module
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Tensor | None
    likelihood: Likelihood
    count: float
    observed: Tensor

    def weights(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([shape.numel() for shape in self.shapes])
        return {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes)}

    def outputs(self, flat: Tensor) -> Tensor:
        return functional_call(self.model, self.weights(flat), self.args, self.kwargs)

    def check(self, flat: Tensor) -> None:
        """Raises if the model is another function now than when its outputs were observed."""
        with torch.no_grad():
            now = self.outputs(flat)
        slack = 1e3 * torch.finfo(now.dtype).eps
        if now.shape != self.observed.shape or not torch.allclose(now, self.observed.to(now), slack, slack):
            raise RuntimeError(
                "corrections run the model on the observed inputs again, and its outputs differ from those that were "
                "observed: pass what selects a head as an argument of forward(), change no attribute, mode or buffer "
                "of the model between observe() and step(), or use correction=None."
            )

    def hessian(self, outputs: Tensor, vector: Tensor) -> Tensor:
        """H v for each example; differentiable without labels."""
        if self.labels is None:
            return self.likelihood.hessian_product(outputs, vector)
        residual = self.likelihood.residual(outputs, self.labels)
        return residual * _inner(residual, vector, outputs)

    def hessian_derivative(self, outputs: Tensor, vector: Tensor, kind: str) -> Tensor:
        """D_v H v for "flat", D_v H v - ∇(v'H v)/2 for "jeffreys"; vectors may have more dimensions than outputs."""
        if self.labels is None:
            return self.likelihood.third_product(outputs, vector) * (1.0 if kind == "flat" else 0.5)
        residual = self.likelihood.residual(outputs, self.labels)
        turned = self.likelihood.hessian_product(outputs, vector)
        bent = residual * _inner(turned, vector, outputs)
        return bent + turned * _inner(residual, vector, outputs) if kind == "flat" else bent

    def squares(self, flat: Tensor) -> Tensor:
        """The diagonal of Σ J'H J over examples, (n,)."""

        def alone(flat: Tensor, *example: Tensor) -> Tensor:
            return functional_call(self.model, self.weights(flat), tuple(x[None] for x in example), self.kwargs)[0]

        try:
            slopes = vmap(jacrev(alone), in_dims=(None, *[0] * len(self.args)))(flat, *self.args)  # (N, *outputs, n)
        except NotImplementedError:
            raise
        except RuntimeError as error:
            raise ValueError(
                "corrections of metric='diagonal' run the model on one example under torch.func.vmap, which fails "
                f"here, as with recurrent layers ({_first(error)}): use metric='fisher', or correction=None."
            ) from error
        outputs = self.outputs(flat)
        curved = vmap(lambda v: self.hessian(outputs, v), in_dims=-1, out_dims=-1)(slopes)
        return (slopes * curved).flatten(0, -2).sum(0)


@contextmanager
def _differentiable() -> Iterator[None]:
    """Prepares higher derivatives in forward mode, and replaces operations that have wrong ones.

    The first import of what forward mode needs raises deprecation warnings of torch itself.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.autograd.forward_ad._maybe_load_decompositions()
    try:
        with ElementaryNorms():
            yield
    except NotImplementedError as error:
        raise ValueError(
            f"corrections need higher derivatives, and torch lacks one for this model ({_first(error)}): replace the "
            "operation, or use correction=None."
        ) from error


def _first(error: Exception) -> str:
    """The first sentence of an error."""
    return str(error).split("\n")[0].split(". ")[0].rstrip(".")


@_differentiable()
def gauss_newton_drift(batches: Sequence[Batch], weights: Tensor, roots: Tensor, kind: str, linear: bool) -> Tensor:
    """-u ("flat") or -u + t/2 ("jeffreys") of (1/N) Σ J'H J over all examples.

    Args:
        weights: flat, (n,).
        roots: the columns r of R, (columns, n).
        linear: whether the outputs are linear in the weights.
    """
    total = torch.zeros_like(weights)
    for batch in batches:
        outputs, pull = vjp(batch.outputs, weights)  # pyright: ignore[reportAssignmentType]
        push = torch.zeros_like(outputs)
        for some in roots.split(max(1, CHUNK // max(1, outputs.numel()))):
            if linear:
                speed = vmap(batch.outputs)(some)
            else:
                speed, turn = vmap(lambda r, batch=batch: _directional_derivatives(batch.outputs, weights, r))(some)
                push = push + batch.hessian(outputs, turn.sum(0))
            push = push + batch.hessian_derivative(outputs, speed, kind).sum(0)
            if kind == "flat" and not linear:
                force = batch.hessian(outputs, speed)

                def work(w: Tensor, batch: Batch = batch, some: Tensor = some, force: Tensor = force) -> Tensor:
                    return (force * vmap(lambda r: jvp(batch.outputs, (w,), (r,))[1])(some)).sum()

                total = total - grad(work)(weights)
        total = total - pull(push)[0]
    return total / sum(batch.count for batch in batches)


def _directional_derivatives(
    function: Callable[[Tensor], Tensor], point: Tensor, direction: Tensor
) -> tuple[Tensor, Tensor]:
    """The first and second derivative along a direction."""
    return jvp(lambda w: jvp(function, (w,), (direction,))[1], (point,), (direction,))  # pyright: ignore


def _inner(a: Tensor, b: Tensor, like: Tensor) -> Tensor:
    """Σ a b over all dimensions after that of examples, which are kept with size 1."""
    dims = tuple(range(1 - like.dim(), 0))
    return (a * b).sum(dims, keepdim=True) if dims else a * b


@_differentiable()
def drift_by_autodiff(product: Callable[[Tensor, Tensor], Tensor], weights: Tensor, roots: Tensor, kind: str) -> Tensor:
    """-u ("flat") or -u + t/2 ("jeffreys") of any metric, by its product (w, z) -> G(w) z.

    Args:
        weights: flat, (n,).
        roots: the columns r of R, (columns, n).
    """

    def along(root: Tensor) -> Tensor:
        return jvp(lambda w: product(w, root), (weights,), (root,))[1]

    total = -vmap(along)(roots).sum(0)
    if kind == "jeffreys":
        total = total + grad(lambda w: vmap(lambda r: (r * product(w, r)).sum())(roots).sum())(weights) / 2
    return total


def is_linear(model: nn.Module) -> bool:
    """Whether the outputs are known to be linear in the weights: one Linear layer and no other computation."""
    inner = [module for module in model.modules() if not list(module.children())]
    plain = all(type(module) in (nn.Linear, nn.Flatten, nn.Identity) for module in inner)
    whole = all(type(module) is nn.Sequential for module in model.modules() if module not in inner)
    return plain and whole and sum(type(module) is nn.Linear for module in inner) == 1
