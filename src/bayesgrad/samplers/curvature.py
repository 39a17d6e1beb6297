r"""The curvature of a loss in units of a sampler's metric, by which its steps are checked.

A step of length ε multiplies a displacement along an eigenvector of G^-1 H by 1 - ελ, for the Hessian H of the loss and
its eigenvalue λ. The chain is stable for ελ < 2, and has variances that are too large by 1/(1 - ελ/2). If G is the
Fisher of the loss, λ is at most about 1. It is far from 1 if loss and likelihood have different scales: a loss that is
divided by 2 s² beside a metric for unit noise has λ = 1/s².

Three measurements, from the most to the least that is known:

| known | measured |
|---|---|
| loss and outputs | the ratio of the loss's second derivative by the outputs to that of the likelihood: `loss_scale` |
| the loss | the largest eigenvalue of G^-1 H, from products with H: `largest_eigenvalue` |
| gradients | the mean eigenvalue, from successive gradients and the noise between them: `Secants` |

Checked by: tests/equations/test_sampler_steps.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bayesgrad import distributed, likelihoods
from bayesgrad.likelihoods import Gaussian, Likelihood
from bayesgrad.warning import warn

EVERY = 1000  # steps 1, 2, 4, 8, ... and every so many are checked
ROUNDS = 16  # products with the Hessian
PAIRS = 8  # successive gradients in one measurement
STABLE = 1.0  # lr times the largest curvature up to which steps are not shortened: variances are twice too large
NOTICEABLE = 0.2  # lr times mean curvature from which variances are more than 11 % too large
FACTOR = 1.5  # between the curvatures of loss and likelihood, from which a warning is given


def is_due(step: int) -> bool:
    """Whether this step is checked, from the first on."""
    return step & (step - 1) == 0 or step % EVERY == 0


def stable_lr(lr: float, group: Mapping[str, Any]) -> float:
    """lr divided by the scale of the loss if that is above 1, and at most 1 (or lr) over the largest curvature."""
    scale, largest = group["loss_scale"], group["curvature"]
    shortened = lr if scale is None else lr / max(1.0, scale)
    return min(shortened, max(lr, STABLE) / largest) if largest is not None and largest > 0 else shortened


def loss_scale(
    loss: Tensor,
    outputs: Tensor,
    likelihood: Likelihood,
    losses: float,
    weights: Tensor | None,
    shared: bool = False,
) -> Tensor | None:
    """v'∇²loss v times the number of losses, divided by v'H v of the likelihood, for one direction v of the outputs.

    Args:
        losses: their number.
        shared: whether other processes have other rows of the batch.

    Returns:
        1 if the loss is the mean negative log-likelihood; None if the loss does not depend on these outputs, has no
        second derivative, or one that is lost in rounding: of predictions without doubt, or in half precision.
    """
    if outputs.dtype.itemsize < 4:
        return None
    first = distributed.position(outputs) * outputs[0].numel() if shared else 0
    v = torch.arange(first, first + outputs.numel(), dtype=outputs.dtype, device=outputs.device)
    v = v.cos().view(outputs.shape)
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(loss.reshape(()), outputs, create_graph=True, allow_unused=True)
        if slope is None or not slope.requires_grad:
            return None
        (curved,) = torch.autograd.grad(slope, outputs, v, retain_graph=True, allow_unused=True)
    if curved is None:
        return None
    each = v * likelihood.hessian_product(outputs.detach(), v)
    expected = (each if weights is None else each * weights).sum()
    least = 0.0 if likelihood.has_noise else torch.finfo(v.dtype).eps ** 0.5
    number, bent, norm = v.new_tensor(losses), (v * curved).sum(), v.square().sum()
    if shared:
        number, bent, expected, norm = distributed.average(number, bent, expected, norm)
    return number * bent / expected if bool(expected > least * norm) else None


def largest_eigenvalue(
    product: Callable[[Tensor], Tensor], solve: Callable[[Tensor], Tensor], start: Tensor, rounds: int = ROUNDS
) -> float:
    """The largest eigenvalue of G^-1 H by power iteration, from below; a second time if a negative one is larger.

    Args:
        product: v -> H v, for flat vectors.
        solve: v -> G^-1 v.
        start: a random vector.
    """
    found = _power_iteration(product, solve, start, rounds, 0.0)
    return _power_iteration(product, solve, start, rounds, -2 * found) if found < 0 else found


def _power_iteration(
    product: Callable[[Tensor], Tensor], solve: Callable[[Tensor], Tensor], start: Tensor, rounds: int, shift: float
) -> float:
    """v'H v/v'G v after so many products with G^-1 H + shift I."""
    vector, image, value = solve(start), start, start.new_full((), math.nan)  # image is always G times the vector
    for _ in range(rounds):
        norm = (vector * image).sum().sqrt()
        vector, image = vector / norm, image / norm
        pushed = product(vector)
        value = (vector * pushed).sum()
        vector, image = solve(pushed) + shift * vector, pushed + shift * image
    return float(value)


class Secants:
    """The mean eigenvalue of G^-1 H, from successive gradients g and the noise r that a step adds to the weights.

    .. math:: \\kappa = \\sum_t r_t^T (g_{t+1} - g_t) \\Big/ \\sum_t r_t^T G (w_{t+1} - w_t)

    Noise r is independent of the minibatches, so their noise makes κ uncertain but does not shift it; differences of
    gradients along whole steps would do so. If H = κ G and gradients are those of all data, κ is exact.
    """

    def __init__(self) -> None:
        self.before: list[tuple[Tensor, Tensor, Tensor]] | None = None  # noise r, gradient, (r'G s, r'G r)
        self.seen: list[Tensor] = []

    def begin(self) -> None:
        self.before, self.seen = [], []

    @property
    def active(self) -> bool:
        return self.before is not None

    def add(self, steps: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[float, float] | None:
        """Takes r, the gradient with prior and (r'G s, r'G r) of each block; returns κ and its standard error at last.

        Blocks of another number or size begin anew: parameters have lost their gradient, or have one now.
        """
        before, self.before = self.before, steps
        if before and [one[0].shape for one in before] == [one[0].shape for one in steps]:
            changes = [(r * (new - old)).sum() for (r, old, _), (_, new, _) in zip(before, steps)]
            moved = torch.stack([pair for _, _, pair in before]).sum(0)
            self.seen.append(torch.cat([torch.stack(changes).sum()[None], moved]))
        if len(self.seen) < PAIRS:
            return None
        pairs, self.before = torch.stack(self.seen).double().cpu(), None
        top, bottom, own = pairs.sum(0).tolist()
        if not bottom:
            return None
        ratio = top / bottom
        error = float((pairs[:, 0] - ratio * pairs[:, 1]).square().sum().sqrt()) / abs(bottom)
        # Where drift is larger than noise, other eigenvalues than the mean show, unless all are equal.
        return (ratio, error) if 100 * error < ratio or abs(own - bottom) < own / 2 else None


class StepCheck:
    """What is measured of a loss before a step, and what follows from it.

    `Langevin` shortens its steps, since its temperature does not depend on them. That of `SNGD` does, so steps that
    would diverge are refused. Each warning is given once.
    """

    def __init__(self) -> None:
        self.warned = self.excused = False
        self.reset()

    @contextmanager
    def unmeasured(self, effect: str) -> Iterator[None]:
        """Warns, once, of a curvature that cannot be measured: a loss without second derivatives, a singular metric."""
        try:
            yield
        except (RuntimeError, ValueError, ArithmeticError) as error:
            if not self.excused:
                warn(f"the curvature of the loss is unknown, so that {effect}: {error}")
            self.excused = True

    def reset(self) -> None:
        self.measured: list[tuple[Tensor | None, float | None]] = []  # scale and largest eigenvalue of each micro-batch
        self.secants = Secants()

    def settle(self, group: dict[str, Any], injected: bool, shortens: bool) -> None:
        """Draws the conclusions of what was measured for this step, and notes the curvature in the group."""
        measured, self.measured = self.measured, []
        largest = [one for _, one in measured if one is not None and math.isfinite(one)]
        if shortens and measured and len(largest) == len(measured):
            group["curvature"] = max(largest)
        scales = [float(one) for one, _ in measured if one is not None]
        if not measured or len(scales) < len(measured) or not 0 < sum(scales) < math.inf:
            return
        # Losses of micro-batches may or may not have been divided by their number.
        scale = min(sum(scales), sum(scales) / len(scales), key=lambda one: abs(math.log(one)))
        lr, likelihood = float(group["lr"]), likelihoods.named(group["likelihood"])
        group["loss_scale"] = scale if abs(math.log(scale)) > math.log(FACTOR) else 1.0
        if group["loss_scale"] == 1:
            return
        if not injected and lr * scale >= 2:
            raise ValueError(_scale_words(likelihood, scale, f", and lr={lr:g} times that must be below 2"))
        if not injected:
            self.warn(_scale_words(likelihood, scale, ", so that the temperature is not that of temperature()"))
        elif shortens and scale > 1:
            self.warn(_scale_words(likelihood, scale, f", so that steps are shortened to lr={lr / scale:.3g}"))
        else:
            self.warn(_scale_words(likelihood, scale, f", so that {_inflation(lr * scale)}"))

    def add_secants(self, steps: list[tuple[Tensor, Tensor, Tensor]], group: Mapping[str, Any]) -> None:
        """Warns of a mean curvature far above 1, if it is five standard errors beyond doubt."""
        found, lr = self.secants.add(steps), float(group["lr"])
        if found is None:
            return
        scale, error = found
        if lr * scale > max(lr, NOTICEABLE) and scale - 5 * error > FACTOR:
            more = f", so that {_inflation(lr * scale)}"
            self.warn(_scale_words(likelihoods.named(group["likelihood"]), scale, more))

    def warn(self, message: str) -> None:
        if not self.warned:
            warn(message)
        self.warned = True


def _inflation(product: float) -> str:
    """What a step of so many times 1/curvature does."""
    wider = f"makes variances {1 / (1 - product / 2):.3g} times too large" if product < 2 else "diverges"
    return f"the chain {wider} (lr times curvature is {product:.3g})"


def _scale_words(likelihood: Likelihood, scale: float, more: str) -> str:
    """That a loss has so many times the curvature of its likelihood, and what to do about it."""
    if isinstance(likelihood, Gaussian):
        noise = likelihood.noise_scale / math.sqrt(scale)
        cure = f"a loss of squared errors over 2 s^2 needs likelihood=Gaussian(noise_scale=s), here s={noise:.3g}"
    else:
        cure = "pass the mean over all losses, and not their sum or a multiple"
    return (
        f"the loss has {scale:.3g} times the curvature of likelihood={likelihood.name!r}, whose Fisher is the metric"
        f"{more}: {cure}."
    )
