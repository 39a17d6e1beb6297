"""NaturalGradient: exact natural gradients for the Fisher matrix of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from bayesgrad.checkpoint import settings
from bayesgrad.constraints import LAYER_OPTIONS, POSITIVE, one_of
from bayesgrad.optimizer import BeliefOptimizer
from bayesgrad.preconditioners import Woodbury
from bayesgrad.rules import MovingAverage, NaturalStep, SquaredGradient, UpdateRule


class NaturalGradient(BeliefOptimizer):
    r"""The exact damped natural gradient for the Fisher matrix of a batch, by the Woodbury identity.

    .. math::
        W \leftarrow (1 - \eta\lambda_w)\, W - \eta\, (F + \lambda I)^{-1} \nabla, \quad
        F = \frac1N \sum_j g_j g_j^T = G G^T, \quad
        (F + \lambda I)^{-1} \nabla = \frac1\lambda \left(\nabla - G (\lambda I + G^T G)^{-1} G^T \nabla\right)

    with g_j the gradient of example j's loss for a label sampled from the model, eta = `lr`, lambda = `damping` and
    lambda_w = `weight_decay`. G is never formed: the state has the inputs and errors of each layer, which
    `observe(outputs)` replaces. Call it before `loss.backward()`. The outputs of an independent batch make the step
    less biased; those of the same batch save a forward pass. With the same batch and its own labels,
    `observe(outputs, labels=labels)`, the gradient is in the span of G, and the step is G (λI + G'G)^-1 c, which is
    free of cancellation.

    Args:
        model: the network; BatchNorm must be in evaluation mode.
        lr: eta.
        params: parameters or param groups of the model; None for all.
        damping: lambda, positive, in units of the Fisher matrix.
        likelihood: "categorical", "bernoulli" or "gaussian", from which labels are sampled.
        blocks: "full" for the Fisher matrix of the whole network, "layer" for its diagonal blocks, one for each module.
        ema: decay of the average of squared gradients, for parameters outside of known layers.
        update_every: steps between updates of the Fisher matrix; observe() does nothing in between.
        losses_per_example: the number of losses per example in the mean loss: 1, or the number of tokens per sequence
            if the loss is a mean over tokens.
        momentum: as in torch.optim.SGD, of the preconditioned gradient.
        weight_decay: decoupled.
        step_size: "lr", or "quadratic": scale the natural gradient (and the momentum) to the minimum of the damped
            quadratic model of the loss, and multiply the result by lr. Described by Martens and Grosse, 2015, sections
            6.4 and 7; tried by Benzing 2021, footnote 2, without notable gains. Checked by
            tests/equations/test_natural_gradient.py, test_the_quadratic_model_chooses_step_and_momentum.
        adapt_damping: Levenberg-Marquardt: every five steps, compare the change of the loss with the change that the
            quadratic model predicts, and adapt damping. Needs `step(closure)`. Described by Martens and Grosse, 2015,
            section 6.5; tried by Benzing 2021, footnote 2. Checked by tests/equations/test_natural_gradient.py,
            test_damping_adapts_to_how_well_the_model_predicts.
        seed: seed of the sampled labels.
        nonfinite, fused: as in `AdaBayes`.

    Parameters outside of known layers (attention, LSTM, raw parameters) use a diagonal,
    w <- w - lr g/(<g^2> + damping).

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = NaturalGradient(model, lr=0.1)
        >>> outputs = model(torch.randn(8, 3))
        >>> optimizer.observe(outputs)
        >>> torch.nn.functional.cross_entropy(outputs, torch.zeros(8, dtype=torch.long)).backward()
        >>> optimizer.step()

    Defaults were chosen on scikit-learn's digits and MNIST with small MLPs.

    Reference: Benzing 2021, Eq. 17-21, appendix E.5 and footnote 2.
    Differs from the paper: Eq. 19-21 lack factors of the batch size.
    Checked by: tests/equations/test_natural_gradient.py.
    """

    takes_model = True
    rule = UpdateRule(SquaredGradient(), MovingAverage(), NaturalStep(heavy_ball=True))
    accepts = {
        **BeliefOptimizer.accepts,
        **LAYER_OPTIONS,
        "damping": POSITIVE,
        "blocks": one_of("full", "layer"),
        "step_size": one_of("lr", "quadratic"),
        "adapt_damping": one_of(True, False),
    }

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.1,
        *,
        params: Any = None,
        damping: float = 0.1,
        likelihood: str = "categorical",
        blocks: str = "full",
        ema: float = 0.95,
        update_every: int = 1,
        losses_per_example: int = 1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        step_size: str = "lr",
        adapt_damping: bool = False,
        seed: int = 0,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, settings(locals()), model)

    def build_preconditioner(self) -> Woodbury:
        return Woodbury("a diagonal of squared gradients with the same damping")

    def dynamics(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        return {"decay": group["ema"], "step": step}
