"""KFAC: natural gradients with a Kronecker-factored Fisher matrix for each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from bayesgrad.checkpoint import settings
from bayesgrad.constraints import LAYER_OPTIONS, one_of
from bayesgrad.optimizer import BeliefOptimizer
from bayesgrad.preconditioners import KroneckerFactors
from bayesgrad.rules import MovingAverage, NaturalStep, SquaredGradient, UpdateRule


class KFAC(BeliefOptimizer):
    r"""Natural gradients with the Fisher matrix of each layer approximated by a Kronecker product.

    .. math::
        A &= \langle \tfrac1N \textstyle\sum_j \sum_t a_{jt} a_{jt}^T \rangle, \quad
        E = \langle \tfrac1{NT} \textstyle\sum_j \sum_t e_{jt} e_{jt}^T \rangle \\
        W &\leftarrow (1 - \eta\lambda_w)\, W - \eta\, (E + \tfrac{\sqrt\lambda}{\pi} I)^{-1} \nabla_W
        (A + \pi\sqrt\lambda I)^{-1}, \quad \pi^2 = \frac{\mathrm{tr} A/d_A}{\mathrm{tr} E/d_E}

    with a the inputs of a layer (a one appended for the bias), e the errors at its outputs for labels sampled from the
    model, <> a debiased moving average with decay `ema`, eta = `lr`, lambda = `damping`, lambda_w = `weight_decay`.

    `observe(outputs)` computes the errors. Call it before `loss.backward()`, with the outputs of the same batch or of
    another. When statistics are due, it costs a backward pass without weight gradients; otherwise it does nothing.

    For large damping this is FOOF: (sqrt(lambda)/pi) times the step tends to FOOF's with damping pi sqrt(lambda).

    Args:
        model: the network.
        lr: eta.
        params: parameters or param groups of the model; None for all.
        damping: lambda, in units of the Fisher matrix.
        likelihood: "categorical", "bernoulli" or "gaussian", from which labels are sampled.
        ema: decay of the averages.
        update_every: steps between inversions (early in a run, whenever the number of steps has grown by a quarter).
        stats_every: steps between updates of A and E; observe() does nothing in between.
        losses_per_example: the number of losses per example in the mean loss: 1, or the number of tokens per sequence
            if the loss is a mean over tokens.
        momentum: as in torch.optim.SGD, of the preconditioned gradient.
        weight_decay: decoupled.
        sharing: how positions are treated: "expand" as above, or "reduce", which first averages inputs and sums errors
            over the positions of an example.
        exact_damping: add lambda to the product A ⊗ E in place of damping the factors; this needs eigendecompositions.
        precondition: "step" or "backward": where gradients are preconditioned; see below.
        max_factor: a factor with more rows than this is approximated by its diagonal.
        seed: seed of the sampled labels.
        nonfinite, fused: as in `AdaBayes`.

    Other parameters use a diagonal: w <- w - lr g/(<g^2> + damping), with the same average.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = KFAC(model, lr=0.1, damping=1e-2)
        >>> outputs = model(torch.randn(8, 3))
        >>> optimizer.observe(outputs)
        >>> torch.nn.functional.cross_entropy(outputs, torch.zeros(8, dtype=torch.long)).backward()
        >>> optimizer.step()

    Defaults were chosen on scikit-learn's digits and MNIST with small MLPs.

    Reference: Benzing 2021, Eq. 3; Martens and Grosse, 2015.
    Differs from the paper: factors are means, not sums; pi is a ratio of traces over dimensions; E is averaged over
    positions where A is summed.
    Checked by: tests/equations/test_kfac.py.
    """

    takes_model = True
    rule = UpdateRule(SquaredGradient(), MovingAverage(), NaturalStep(heavy_ball=True))
    accepts = {
        **BeliefOptimizer.accepts,
        **LAYER_OPTIONS,
        "sharing": one_of("expand", "reduce"),
        "exact_damping": one_of(True, False),
    }

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.03,
        *,
        params: Any = None,
        damping: float = 1e-2,
        likelihood: str = "categorical",
        ema: float = 0.95,
        update_every: int = 100,
        stats_every: int = 1,
        losses_per_example: int = 1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        sharing: str = "expand",
        exact_damping: bool = False,
        precondition: str = "step",
        max_factor: int = 8192,
        seed: int = 0,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, settings(locals()), model)

    def build_preconditioner(self) -> KroneckerFactors:
        return KroneckerFactors("a diagonal of squared gradients with the same damping")

    def dynamics(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        return {"decay": group["ema"], "step": step}
