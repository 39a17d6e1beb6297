"""The stationary curvature and variance of IVON on quadratic losses, beside closed forms.

Run: python benchmarks/ivon_curvature.py [--write docs/results/ivon-curvature.md]
"""

from __future__ import annotations

import math
import warnings

import torch

from bayesgrad.optim import IVON
from bayesgrad_lab.benchmarks import page

H, N = 2.0, 100.0  # curvature and number of data
# 1 - beta_2, prior precision, noise of batches, kl_weight, draws of a step
SETTINGS = (
    (0.1, 0.0, 0.0, 1.0, 1),
    (0.05, 0.0, 0.0, 1.0, 1),
    (0.01, 0.0, 0.0, 1.0, 1),
    (0.05, 100.0, 0.0, 1.0, 1),
    (0.05, 0.0, 0.0, 1.0, 4),
    (0.02, 0.0, 10.0, 1.0, 1),
    (0.02, 0.0, 10.0, 2.0, 1),
    (0.01, 0.0, 20.0, 1.0, 1),
)
TEXT = """
P = h + tau delta/N, rho = 1 - beta_2, V = Var(h^)/P^2. Gradients of a batch have noise of variance c h/N, which adds
c/tau to V; c is N/B, if the covariance of per-example gradients is the Hessian. Each weight has the loss (h/2) w^2 and
stays at zero.

The update is P <- P (1 + x + x^2/2) with x = rho (h^ + tau delta/N - P)/P. It has a stationary mean of P if E[P]
exceeds the right one by (rho/2) E[(h^ + tau delta/N - P)^2/P], which is rho V/2 of it to first order. But 1 + x + x^2/2
is exp(x) to second order, so log P <- log P + x, and E[x] = 0 says that the mean of 1/P is right. An average without
the term x^2/2 has the right mean of P, and the mean of 1/P is too large by the same rho V/2. Draws and steps use 1/P,
so nothing is corrected. Checked by tests/equations/test_ivon.py.
"""


def measured(rho: float, delta: float, batches: float, tau: float, samples: int, weights: int) -> torch.Tensor:
    """Means over time of P and 1/P, over the right ones, (2, weights)."""
    weight = torch.nn.Parameter(torch.zeros(weights, dtype=torch.float64))
    options = {"prior_precision": delta, "kl_weight": tau, "hess_init": H, "betas": (0.0, 1 - rho), "samples": samples}
    optimizer = IVON([weight], 0.0, num_data=N, seed=0, **options)
    generator, exact = torch.Generator().manual_seed(0), H + tau * delta / N

    def closure() -> torch.Tensor:
        noise = math.sqrt(batches * H / N) * torch.randn(weights, generator=generator, dtype=torch.float64)
        loss = (H / 2 * weight.square() + noise * weight).sum()
        loss.backward()
        return loss

    sums, steps = torch.zeros(2, weights, dtype=torch.float64), int(10 / rho)
    for step in range(int(18 / rho)):
        optimizer.zero_grad()
        optimizer.step(closure)
        if step >= int(18 / rho) - steps:
            variance = optimizer.state[weight]["variance"]
            sums += torch.stack([1 / variance / exact, variance * exact]) / steps
    return sums


def main() -> None:
    parser = page.options(__doc__)
    parser.add_argument("--weights", type=int, default=20_000)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    lines = [
        "# The stationary curvature of IVON",
        "",
        f"`python benchmarks/ivon_curvature.py`, torch {torch.__version__}, float64. Means over",
        f"{arguments.weights} weights and 10/rho steps after 8/rho, ± standard errors over weights.",
        "The curvature is too large, the variance is not.",
        "",
        "| rho | h/P | c | tau | draws of a step | mean of P over the right one | (1 + rho (V-1)/2)/(1 - rho/2) "
        "| mean variance over the right one |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for rho, delta, batches, tau, samples in SETTINGS:
        found = measured(rho, delta, batches, tau, samples, arguments.weights)
        error = found.std(1) / math.sqrt(arguments.weights)
        share = H / (H + tau * delta / N)
        spread = (2 * share**2 + batches / tau) / samples
        cells = [f"{m:.4f} ± {e:.4f}" for m, e in zip(found.mean(1).tolist(), error.tolist())]
        closed = (1 + rho * (spread - 1) / 2) / (1 - rho / 2)
        lines.append(
            f"| {rho:g} | {share:.2g} | {batches:g} | {tau:g} | {samples} | {cells[0]} | {closed:.4f} | {cells[1]} |"
        )
    page.publish([*lines, *TEXT.rstrip().splitlines()], arguments.write)


if __name__ == "__main__":
    main()
