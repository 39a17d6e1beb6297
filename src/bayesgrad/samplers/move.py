"""How samplers move: a step of a Langevin equation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bayesgrad.precision import Precision
from bayesgrad.rules.transition import Memory, Scalars
from bayesgrad.rules.update import Move


@dataclass(frozen=True)
class LangevinStep(Move):
    r"""A step of a Langevin equation on the manifold whose metric is the precision P.

    .. math::
        w \leftarrow w - \epsilon P^{-1} (g + \lambda w) + \epsilon\tau\, c + \sqrt{2\epsilon\tau}\, P^{-1/2} \xi

    with the gradient g of the mean loss, lambda = delta/N for the prior precision delta, tau = T/N for the temperature
    T and the number of data N, standard normal xi, and the correction c for a metric that depends on w.

    Args:
        injected: whether the noise xi is added. If False, the noise of minibatch gradients takes its place, and what is
            added is noise of the gradient, for the damping.

    Reference: Smith et al. 2018, Eq. 2, 5, 6, 7 and 11, with corrected signs.
    """

    injected: bool = True

    def scalars(self, group: Mapping[str, Any], step: int, step_scale: float) -> dict[str, float]:
        return {"step_scale": step_scale}

    def axpy_coefficients(self, n: Scalars, slots: tuple[str, ...]) -> tuple[float, float, float, float]:
        return 0.0, 1.0, n["step_scale"], 1.0

    def change(
        self,
        mean: Tensor,
        gradient: Tensor,
        precision: Precision,
        correction: Tensor | None,
        noise: Tensor | None,
        n: Scalars,
    ) -> Tensor:
        """What a step subtracts from the weights.

        `n` has lr, heat (T/N), pull (lambda; a number or a tensor) and damping, whose noise the gradient gets.
        """
        gradient = gradient + n["pull"] * mean
        if noise is not None and not self.injected:
            gradient = gradient + (2 * n["heat"] * n["damping"] / n["lr"]) ** 0.5 * noise
        change = n["lr"] * precision.solve(gradient)
        if correction is not None:
            change = change - n["lr"] * n["heat"] * correction
        if noise is not None and self.injected:
            change = change - self.added(precision, noise, n)
        return change

    def added(self, precision: Precision, noise: Tensor, n: Scalars) -> Tensor:
        """The noise that is added to the weights."""
        return (2 * n["lr"] * n["heat"]) ** 0.5 * precision.sample(noise)

    def move(self, mean: Tensor, gradient: Tensor, precision: Precision, memory: Memory, n: Scalars) -> Tensor:
        return mean - n["step_scale"] * precision.solve(gradient)
