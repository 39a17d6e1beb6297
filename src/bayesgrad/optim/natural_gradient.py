"""NaturalGradient: exact natural gradients for the Fisher matrix of a batch."""

from __future__ import annotations

from typing import Any

from torch import nn

from bayesgrad.checkpoint import settings
from bayesgrad.constraints import POSITIVE, one_of
from bayesgrad.likelihoods import Likelihood
from bayesgrad.optim.layerwise import FALLBACK, LayerOptimizer
from bayesgrad.preconditioners import Woodbury
from bayesgrad.preconditioners.woodbury import without_examples


class NaturalGradient(LayerOptimizer):
    r"""The exact damped natural gradient for the Fisher matrix of a batch, by the Woodbury identity.

    .. math::
        D &= (F + \lambda I)^{-1} \nabla
        = \frac1\lambda \left(\nabla - G (\lambda I + G^T G)^{-1} G^T \nabla\right), \quad
        F = \frac1N \sum_j g_j g_j^T = G G^T \\
        W &\leftarrow (1 - \eta\lambda_w)\, W - \eta\, \min\left(1, \frac{c}{\sqrt{D^T \nabla}}\right) D

    with g_j the gradient of example j's loss for a label sampled from the model, eta = `lr`, lambda = `damping`, c =
    `max_norm` and lambda_w = `weight_decay`. D'grad is the square of D's norm in the metric F + lambda I, so a step
    changes the predictions by a Kullback-Leibler divergence of at most eta^2 c^2/2, to second order. Steps that are
    bounded by c do not change if the loss is multiplied by a constant.

    G is never formed: the state has the inputs and errors of each layer, which `observe(outputs)` replaces. Call it
    before `loss.backward()`. The outputs of an independent batch make the step less biased; those of the same batch
    save a forward pass. With the same batch and its own labels, `observe(outputs, labels=labels)`, the gradient is in
    the span of G, and D is G (λI + G'G)^-1 c', for a vector c' with equal entries, which is free of cancellation.

    `state_dict()` restores a run bit for bit, so it contains these inputs and errors, which are training data. Use
    `state_dict_without_examples()` for a checkpoint that must not.

    Args:
        model: the network; BatchNorm must be in evaluation mode.
        lr: eta.
        params: parameters or param groups of the model; None for all.
        damping: lambda, positive, in units of the Fisher matrix.
        likelihood: "categorical", "bernoulli", "gaussian", or an object of `bayesgrad.likelihoods`, from which labels
            are sampled.
        blocks: "full" for the Fisher matrix of the whole network, "layer" for its diagonal blocks, one for each module.
        max_norm: c; `inf` for no bound. There is none with step_size="quadratic".
        fallback_lr: learning rate of Adam for other parameters. A schedule multiplies it by the factor of lr.
        ema: decay of the average of squared gradients, for other parameters.
        update_every: steps between updates of the Fisher matrix (early in a run, at steps 1, 2, 3, 6, 12 and so on);
            observe() does nothing in between.
        losses_per_example: the number of losses of an example in the mean loss. None follows from the outputs: 1, or
            the number of positions of outputs (N, T, C). Rows of flattened outputs (N T, C) are examples with one loss;
            with losses_per_example=T, T rows are one example, and the number of losses is the same.
        momentum: as in torch.optim.SGD, of the preconditioned gradient. It averages over batches, which a Fisher matrix
            of one batch does not; 0 saves one tensor.
        weight_decay: decoupled.
        step_size: "lr", or "quadratic": scale the natural gradient (and the momentum) to the minimum of the damped
            quadratic model of the loss, and multiply the result by lr. Described by Martens and Grosse, 2015, sections
            6.4 and 7; tried by Benzing 2021, footnote 2, without notable gains. Checked by
            tests/equations/test_natural_gradient.py, test_the_quadratic_model_chooses_step_and_momentum.
        adapt_damping: Levenberg-Marquardt: every five steps, compare the change of the loss with the change that the
            quadratic model predicts, and adapt damping. Needs `step(closure)`. Described by Martens and Grosse, 2015,
            section 6.5; tried by Benzing 2021, footnote 2. Checked by tests/equations/test_natural_gradient.py,
            test_damping_adapts_to_how_well_the_model_predicts.
        seed: seed of the sampled labels; None draws one from torch's global generator.
        nonfinite, fused: as in `AdaBayes`.

    Other parameters (raw ones, and those that docs/layers.md lists) are trained by Adam with learning rate fallback_lr
    and betas (momentum, ema).

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = NaturalGradient(model, lr=0.1)
        >>> outputs = model(torch.randn(8, 3))
        >>> optimizer.observe(outputs)
        >>> torch.nn.functional.cross_entropy(outputs, torch.zeros(8, dtype=torch.long)).backward()
        >>> optimizer.step()

    Defaults were chosen by benchmarks/stable_defaults.py, on five small networks.

    Reference: Benzing 2021, Eq. 17-21, appendix E.5 and footnote 2.
    Differs from the paper: Eq. 19-21 lack factors of the batch size; the paper has no bound.
    Checked by: tests/equations/test_natural_gradient.py.
    """

    accepts = {
        **LayerOptimizer.accepts,
        "damping": POSITIVE,
        "blocks": one_of("full", "layer"),
        "step_size": one_of("lr", "quadratic"),
        "adapt_damping": one_of(True, False),
    }
    common = ("max_norm",)
    of_all_groups = (
        *LayerOptimizer.of_all_groups,
        *("losses_per_example", "blocks", "update_every", "step_size", "adapt_damping"),
    )

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.3,
        *,
        params: Any = None,
        damping: float = 0.3,
        likelihood: str | Likelihood = "categorical",
        blocks: str = "full",
        max_norm: float = 1.0,
        fallback_lr: float = 1e-3,
        ema: float = 0.95,
        update_every: int = 10,
        losses_per_example: int | None = None,
        momentum: float = 0.7,
        weight_decay: float = 0.0,
        step_size: str = "lr",
        adapt_damping: bool = False,
        seed: int | None = None,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, settings(locals()), model)

    def state_dict_without_examples(self) -> dict[str, Any]:
        """As `state_dict()`, without the inputs and errors of the observed batch, which are training data.

        The first step after loading needs `observe(outputs)`, whatever `update_every` is. A run is restored bit for bit
        if an update was due in that step, as always with update_every=1.
        """
        return without_examples(self.state_dict())

    def build_preconditioner(self) -> Woodbury:
        return Woodbury(FALLBACK)
