"""FOOF: gradient descent on the outputs of layers."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from bayesgrad.checkpoint import settings
from bayesgrad.optim.layerwise import FALLBACK, LayerOptimizer
from bayesgrad.preconditioners import InputFactor


class FOOF(LayerOptimizer):
    r"""Gradient descent on neurons: updates the weights of each layer so that its *outputs* follow their gradients.

    .. math::
        A &= \langle \tfrac1N \textstyle\sum_j \sum_t a_{jt} a_{jt}^T \rangle \\
        D &= \nabla_W (A + \lambda \bar a I)^{-1}, \quad \bar a = \mathrm{tr} A/d_A \\
        W &\leftarrow (1 - \eta\lambda_w)\, W - \eta\, \min\left(1,
        \frac{c}{\sqrt{\sum \langle D, \nabla_W \rangle}}\right) D

    with a the inputs of a layer (a one appended for the bias) for example j at position t, <> a debiased moving average
    with decay `ema`, eta = `lr`, lambda = `damping` (a-bar = 1 with `damping_mode="absolute"`), c = `max_norm`, the sum
    over all layers, and lambda_w = `weight_decay`. This is ridge regression of the errors at the layer's outputs on its
    inputs. It needs no second derivatives, one factor, and no sampled labels.

    <D, grad> is the mean square by which a step D changes the outputs of a layer, summed over units and positions. So
    the outputs of all layers together change by at most eta c. If the loss is multiplied by a constant, D is multiplied
    by it; steps that are bounded by c do not change.

    An example is one index of the first dimension of the model's outputs, with one loss. If an example has T losses
    (tokens of a sequence) and the loss is the mean over all of them, A is also divided by T (`losses_per_example`). If
    the model returns no tensor but a loss, an example is one index of the first dimension of a layer's input.

    Args:
        model: the network; the training loop is that of any torch optimizer.
        lr: eta.
        params: parameters or param groups of the model; None for all.
        damping: lambda. Under a schedule, inverses are computed anew when it has changed by more than a tenth.
        damping_mode: "relative": lambda is a multiple of the mean eigenvalue of A; "absolute": in units of squared
            inputs summed over positions.
        max_norm: c; `inf` for no bound.
        fallback_lr: learning rate of Adam for other parameters. A schedule multiplies it by the factor of lr.
        ema: decay of the average of A.
        update_every: the largest number of steps between inversions (early in a run, whenever the number of steps has
            doubled, or a factor has changed). After every tenth of them, a factor whose diagonal has changed by a fifth
            is inverted anew.
        stats_every: steps between updates of A (early in a run, at steps 1, 2, 3, 5, 8 and so on). If it is
            more than 1, four times as many for layers with 512 inputs or more and 16 times fewer outputs.
        stats_rows: about how many rows (pairs of an example and a position) of a batch statistics are formed of: every
            k-th row, or of a convolution all rows of every k-th line (of an image at one height), but at least four
            rows for each row of a factor, and sixteen lines. `inf` for all. Processes and micro-batches take parts of
            their own, so that results depend on their number.
        losses_per_example: the number of losses of an example in the mean loss. None follows from the outputs: 1, or
            the number of positions of outputs with more than two dimensions, (N, T, C) or (N, C, ...), as the last
            layer shows; if it does not, call `observe(outputs, class_dim=1)` for (N, C, T) before `loss.backward()`.
            If the model flattens inputs (N, T) to outputs (N T, C), T rows are one example; else each row has this
            number.
        momentum: as in torch.optim.SGD, of the preconditioned gradient.
        weight_decay: decoupled.
        precondition: "step": `step()` preconditions `.grad`. "backward": the backward pass does, and `.grad` is the
            preconditioned gradient, which is cheaper for batches of few rows; see docs/choosing.md.
        max_factor: a factor with more rows than this is approximated by its diagonal.
        nonfinite, fused: as in `AdaBayes`.

    Other parameters (of normalisation layers, raw ones, and those that docs/layers.md lists) are trained by Adam with
    learning rate fallback_lr and betas (momentum, ema).

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = FOOF(model, lr=0.5)
        >>> model(torch.randn(8, 3)).square().mean().backward()
        >>> optimizer.step()

    Defaults were chosen by benchmarks/stable_defaults.py, on five small networks.

    Reference: Benzing 2021, Eq. 4 and section 2.1.
    Differs from the paper: A is a mean over examples. The paper has a sum, with which lambda depends on the batch size.
    Biases are included. The bound and the relative damping are not in the paper: pass `max_norm=inf` and
    `damping_mode="absolute"`.
    Checked by: tests/equations/test_foof.py.
    """

    common = ("damping_mode", "max_norm")
    fixed = ("max_factor",)

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.2,
        *,
        params: Any = None,
        damping: float = 0.1,
        damping_mode: str = "relative",
        max_norm: float = 1.0,
        fallback_lr: float = 1e-3,
        ema: float = 0.95,
        update_every: int = 500,
        stats_every: int = 10,
        stats_rows: float = math.inf,
        losses_per_example: int | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        precondition: str = "step",
        max_factor: int = 8192,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, settings(locals()), model)

    def build_preconditioner(self) -> InputFactor:
        return InputFactor(FALLBACK)
