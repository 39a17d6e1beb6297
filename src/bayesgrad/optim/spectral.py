"""SpectralFOOF: steepest descent on the outputs of layers, in the operator norm."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from bayesgrad.checkpoint import settings
from bayesgrad.optim.layerwise import FALLBACK, LayerOptimizer
from bayesgrad.preconditioners import OrthogonalSteps


class SpectralFOOF(LayerOptimizer):
    r"""FOOF in the operator norm, or Muon with white inputs: all directions of a layer's outputs change equally fast.

    .. math::
        A &= \langle \tfrac1N \textstyle\sum_j \sum_t a_{jt} a_{jt}^T \rangle, \quad
        R = (A/\bar a + \lambda I)^{-1/2}, \quad \bar a = \mathrm{tr} A/d_A \\
        m &\leftarrow \mu m + (1 - \mu) \nabla_W, \quad
        U S V^T = ((1 - \mu) \nabla_W + \mu m) R \\
        W &\leftarrow (1 - \eta\lambda_w)\, W - \eta \sqrt{\max(1, d_E/d_A)}\, U V^T R

    with a the inputs of a layer (a one appended for the bias) for example j at position t, <> a debiased moving average
    with decay `ema`, d_A inputs and d_E outputs, eta = `lr`, lambda = `damping`, mu = `momentum`, and lambda_w =
    `weight_decay`. U V' is computed up to singular values between 0.73 and 1.27 (see `Reference`).

    Of all D with a given largest singular value of D R^-1, which is the largest change of outputs for an input of unit
    size (and lambda = 0), U V' R has the largest product with the gradient. FOOF bounds the sum of squares of all
    changes instead, which the few directions of a strong gradient use up. In terms of beliefs, U V' R is a step of the
    Kronecker filter at its steady state whose error covariance is the one with the largest likelihood for the averaged
    gradient alone, (m R)(m R)', where inputs are white. The step does not depend on the scale of the loss, as long
    as gradients are at most 4.6e18 in float32: larger entries count as that. For large lambda it is Muon's, with
    lr/lambda^(1/2). A layer whose gradient is exactly zero does not move along its average.

    Args:
        model: the network; the training loop is that of any torch optimizer.
        lr: eta.
        params: parameters or param groups of the model; None for all.
        damping: lambda, a multiple of the mean eigenvalue of A. Under a schedule, inverses are computed anew when it
            has changed by more than a tenth.
        fallback_lr: learning rate of Adam for other parameters. A schedule multiplies it by the factor of lr.
        ema: decay of the average of A.
        update_every: the largest number of steps between inversions of A (early in a run, whenever the number of
            steps has doubled, or A has changed). After every tenth of them, a factor whose diagonal has changed by a
            fifth is inverted anew.
        stats_every: steps between updates of A, as in `FOOF`.
        stats_rows: rows of a batch that A is formed of, as in `FOOF`.
        losses_per_example: as in `FOOF`; A is divided by its mean eigenvalue, so that only the average over batches of
            different sizes depends on it.
        momentum: mu.
        weight_decay: decoupled.
        max_factor: a layer of which both sides are larger is trained by the fallback. The step of a square layer costs
            as many operations as its gradient if its size is a twelfth of the rows (examples times positions) of a
            batch. An input factor that is larger is approximated by its diagonal.
        nonfinite, fused: as in `AdaBayes`.

    Other parameters (of embeddings and normalisation layers, raw ones, and those that docs/layers.md lists) are trained
    by Adam with learning rate fallback_lr and betas (momentum, ema).

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = SpectralFOOF(model, lr=0.04)
        >>> model(torch.randn(8, 3)).square().mean().backward()
        >>> optimizer.step()

    Defaults were chosen on validation data of a small GPT, a CNN, a ResNet and an autoencoder, by one seed.

    Reference: Benzing 2021, Eq. 4, for A; Jordan et al., 2024 (Muon), and Amsel et al., 2025, for U V'; Bernstein and
    Newhouse, 2024, for the norm.
    Differs from the paper: it has no U V', and Muon no R.
    Checked by: tests/equations/test_spectral.py.
    """

    fixed = ("max_factor",)

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.04,
        *,
        params: Any = None,
        damping: float = 0.1,
        fallback_lr: float = 1e-3,
        ema: float = 0.95,
        update_every: int = 500,
        stats_every: int = 10,
        stats_rows: float = math.inf,
        losses_per_example: int | None = None,
        momentum: float = 0.8,
        weight_decay: float = 0.0,
        max_factor: int = 512,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, settings(locals()), model)

    def build_preconditioner(self) -> OrthogonalSteps:
        return OrthogonalSteps(FALLBACK)
