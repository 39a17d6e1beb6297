"""FOOF: gradient descent on the outputs of layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from bayesgrad.checkpoint import settings
from bayesgrad.constraints import LAYER_OPTIONS
from bayesgrad.optimizer import BeliefOptimizer
from bayesgrad.preconditioners import InputFactor
from bayesgrad.rules import NaturalStep, Static, UpdateRule


class FOOF(BeliefOptimizer):
    r"""Gradient descent on neurons: updates the weights of each layer so that its *outputs* follow their gradients.

    .. math::
        A &= \langle \tfrac1N \textstyle\sum_j \sum_t a_{jt} a_{jt}^T \rangle \\
        W &\leftarrow (1 - \eta\lambda_w)\, W - \eta\, \nabla_W (A + \lambda I)^{-1}

    with a the inputs of a layer (a one appended for the bias) for example j at position t, <> a debiased moving average
    with decay `ema`, eta = `lr`, lambda = `damping` and lambda_w = `weight_decay`. This is ridge regression of the
    errors at the layer's outputs on its inputs. It needs no second derivatives, one factor, and no sampled labels.

    An example is one index of the first dimension, with one loss. If an example has T losses (tokens of a sequence) and
    the loss is the mean over all of them, A is divided by `losses_per_example` = T.

    Args:
        model: the network; the training loop is that of any torch optimizer.
        lr: eta.
        params: parameters or param groups of the model; None for all.
        damping: lambda, in units of squared inputs summed over positions.
        ema: decay of the average of A.
        update_every: steps between inversions (early in a run, whenever the number of steps has grown by a quarter).
        stats_every: steps between updates of A.
        losses_per_example: the number of losses per example in the mean loss: 1, or the number of tokens per sequence
            if the loss is a mean over tokens.
        momentum: as in torch.optim.SGD, of the preconditioned gradient.
        weight_decay: decoupled.
        precondition: "step" or "backward": where gradients are preconditioned; see below.
        max_factor: a factor with more rows than this is approximated by its diagonal.
        nonfinite, fused: as in `AdaBayes`.

    Other parameters (of normalisation layers and attention, and raw parameters) are trained by SGD with learning rate
    lr/(1 + damping).

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = FOOF(model, lr=0.5, damping=1e-3)
        >>> model(torch.randn(8, 3)).square().mean().backward()
        >>> optimizer.step()

    Defaults were chosen on scikit-learn's digits and MNIST with small MLPs.

    Reference: Benzing 2021, Eq. 4 and section 2.1.
    Differs from the paper: A is a mean over examples. The paper has a sum, with which lambda depends on the batch size.
    Biases are included.
    Checked by: tests/equations/test_foof.py.
    """

    takes_model = True
    rule = UpdateRule(None, Static(), NaturalStep(heavy_ball=True))
    accepts = {**BeliefOptimizer.accepts, **LAYER_OPTIONS}

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.3,
        *,
        params: Any = None,
        damping: float = 0.1,
        ema: float = 0.95,
        update_every: int = 100,
        stats_every: int = 1,
        losses_per_example: int = 1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        precondition: str = "step",
        max_factor: int = 8192,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, settings(locals()), model)

    def build_preconditioner(self) -> InputFactor:
        return InputFactor("SGD with learning rate lr/(1 + damping)")
