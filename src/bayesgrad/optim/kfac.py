"""KFAC: natural gradients with a Kronecker-factored Fisher matrix for each layer."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from bayesgrad.checkpoint import settings
from bayesgrad.constraints import one_of
from bayesgrad.likelihoods import Likelihood
from bayesgrad.optim.layerwise import FALLBACK, LayerOptimizer
from bayesgrad.preconditioners import KroneckerFactors


class KFAC(LayerOptimizer):
    r"""Natural gradients with the Fisher matrix of each layer approximated by a Kronecker product.

    .. math::
        A &= \langle \tfrac1N \textstyle\sum_j \sum_t a_{jt} a_{jt}^T \rangle, \quad
        E = \langle \tfrac1{NT} \textstyle\sum_j \sum_t e_{jt} e_{jt}^T \rangle \\
        D &= (E + \sqrt\lambda\, \bar e I)^{-1} \nabla_W (A + \sqrt\lambda\, \bar a I)^{-1}, \quad
        \bar a = \mathrm{tr} A/d_A, \; \bar e = \mathrm{tr} E/d_E \\
        W &\leftarrow (1 - \eta\lambda_w)\, W - \eta\, \min\left(1,
        \frac{c}{\sqrt{\sum \langle D, \nabla_W \rangle}}\right) D

    with a the inputs of a layer (a one appended for the bias), e the errors at its outputs for labels sampled from the
    model, <> a debiased moving average with decay `ema`, eta = `lr`, lambda = `damping`, c = `max_norm`, the sum over
    all layers, and lambda_w = `weight_decay`.

    The sum of <D, grad> is the square of D's norm in the damped Fisher metric, so a step changes the predictions by a
    Kullback-Leibler divergence of at most eta^2 c^2/2, to second order ("KL clipping"). Steps that are bounded by c do
    not change if the loss is multiplied by a constant. Other steps are multiplied by it, because A and E are those of
    the likelihood.

    With `damping_mode="absolute"`, lambda is in units of the Fisher matrix: pi sqrt(lambda) is added to A and
    sqrt(lambda)/pi to E, with pi^2 = a-bar/e-bar. For large lambda this is FOOF: (sqrt(lambda)/pi) D tends to FOOF's
    with damping pi sqrt(lambda).

    `observe(outputs)` computes the errors. Call it before `loss.backward()`, with the outputs of the same batch or of
    another. When statistics are due, it costs a backward pass without weight gradients; otherwise it does nothing.

    Args:
        model: the network.
        lr: eta.
        params: parameters or param groups of the model; None for all.
        damping: lambda. Under a schedule, inverses are computed anew when it has changed by more than a tenth.
        damping_mode: "relative": lambda is a multiple of the Fisher's mean eigenvalue; "absolute": in its units.
        max_norm: c; `inf` for no bound.
        fallback_lr: learning rate of Adam for other parameters. A schedule multiplies it by the factor of lr.
        likelihood: "categorical", "bernoulli", "gaussian", or an object of `bayesgrad.likelihoods`, from which labels
            are sampled.
        ema: decay of the averages.
        update_every: the largest number of steps between inversions (early in a run, whenever the number of steps has
            doubled, or a factor has changed). After every tenth of them, a factor whose diagonal has changed by a fifth
            is inverted anew.
        stats_every: steps between updates of A and E (early in a run, at steps 1, 2, 3, 5, 8 and so on);
            observe() does nothing in between. If it is more than 1, four times as many for layers with 512 inputs or
            more and 16 times fewer outputs.
        stats_rows: about how many rows (pairs of an example and a position) of a batch statistics are formed of: every
            k-th row, or of a convolution all rows of every k-th line (of an image at one height), but at least four
            rows for each row of a factor, and sixteen lines. `inf` for all. Processes and micro-batches take parts of
            their own, so that results depend on their number.
        losses_per_example: the number of losses of an example in the mean loss. None follows from the outputs: 1, or
            the number of positions of outputs (N, T, C). Rows of flattened outputs (N T, C) are examples with one loss;
            with losses_per_example=T, T rows are one example, and the number of losses is the same.
        momentum: as in torch.optim.SGD, of the preconditioned gradient.
        weight_decay: decoupled.
        sharing: how positions are treated: "expand" as above, or "reduce", which first averages inputs and sums errors
            over the positions of an example, of all rows whatever `stats_rows` is.
        exact_damping: add lambda to the product A ⊗ E in place of damping the factors; this needs eigendecompositions.
        precondition: "step": `step()` preconditions `.grad`. "backward": the backward pass does, and `.grad` is the
            preconditioned gradient, which is cheaper for batches of few rows; see docs/choosing.md.
        max_factor: a factor with more rows than this is approximated by its diagonal.
        seed: seed of the sampled labels; None draws one from torch's global generator.
        nonfinite, fused: as in `AdaBayes`.

    Other parameters (of normalisation layers, raw ones, and those that docs/layers.md lists) are trained by Adam with
    learning rate fallback_lr and betas (momentum, ema).

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = KFAC(model, lr=0.1)
        >>> outputs = model(torch.randn(8, 3))
        >>> optimizer.observe(outputs)
        >>> torch.nn.functional.cross_entropy(outputs, torch.zeros(8, dtype=torch.long)).backward()
        >>> optimizer.step()

    Defaults were chosen by benchmarks/stable_defaults.py, on five small networks.

    Reference: Benzing 2021, Eq. 3; Martens and Grosse, 2015; for the bound, Ba et al., 2017.
    Differs from the paper: factors are means, not sums; pi is a ratio of traces over dimensions; E is averaged over
    positions where A is summed; damping is relative; c bounds D, where Ba et al. bound eta D.
    Checked by: tests/equations/test_kfac.py.
    """

    accepts = {
        **LayerOptimizer.accepts,
        "sharing": one_of("expand", "reduce"),
        "exact_damping": one_of(True, False),
    }
    common = ("damping_mode", "max_norm")
    fixed = ("max_factor", "exact_damping")

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.2,
        *,
        params: Any = None,
        damping: float = 3.0,
        damping_mode: str = "relative",
        max_norm: float = 1.0,
        fallback_lr: float = 1e-3,
        likelihood: str | Likelihood = "categorical",
        ema: float = 0.95,
        update_every: int = 500,
        stats_every: int = 10,
        stats_rows: float = math.inf,
        losses_per_example: int | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        sharing: str = "expand",
        exact_damping: bool = False,
        precondition: str = "step",
        max_factor: int = 8192,
        seed: int | None = None,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, settings(locals()), model)

    def build_preconditioner(self) -> KroneckerFactors:
        return KroneckerFactors(FALLBACK)
