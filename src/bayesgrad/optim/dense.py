"""DenseFilter: the Kalman filter with the full covariance of all weights, for small models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bayesgrad.belief import Joint
from bayesgrad.checkpoint import settings
from bayesgrad.constraints import COUNT, DEVIATION, LAYER_OPTIONS, covariance_matrix, one_of, square_matrix
from bayesgrad.likelihoods import Likelihood
from bayesgrad.optimizer import BeliefOptimizer
from bayesgrad.precision import Dense
from bayesgrad.preconditioners import DenseKalman
from bayesgrad.rules import NaturalStep, Static, UpdateRule


class DenseFilter(BeliefOptimizer):
    r"""Bayesian filtering with the full covariance of all weights; on linear-Gaussian models, the Kalman filter.

    .. math::
        \Sigma_{post} &= \Sigma_{prior} - \Sigma_{prior} U (I + U^T \Sigma_{prior} U)^{-1} U^T \Sigma_{prior} \\
        \mu_{post} &= \mu_{prior} - \Sigma_{post}\, B \nabla(\mu_{prior}) \\
        \mu_{prior} &\leftarrow (1 - \eta\lambda)(I - A)\, \mu_{post}, \quad
        \Sigma_{prior} \leftarrow (I - A)\, \Sigma_{post} (I - A)^T + Q

    with the gradient of the mean loss (`.grad`), B = `batch_size`, lambda = `weight_decay` and U U' the Fisher
    information of the batch, one column for each example (and output), from `observe(outputs)` before
    `loss.backward()`. The parameters are mu_prior, where the next gradient is taken. After
    `optimizer.eval()` they are mu_post; `covariance()` returns Sigma_post.

    By default the optimum of each weight drifts independently, with eta = `lr` and sigma = `prior_std`: I - A =
    sqrt(r) I and Q = sigma^2 (1 - r) I with r = exp(-eta^2/sigma^2). For sigma = inf it is a random walk, A = 0 and
    Q = eta^2 I. A schedule of lr scales Q. With lr = 0 there is no drift: the precision only grows, and steps decrease
    as 1/t.

    Any other drift is given by `transition=(A, Q)`, which does not depend on lr. For n weights, matrices of size k n
    describe (k - 1) n latent values (such as momentum) after the weights. They have no gradient, start at zero
    and do not decay: 1 - eta lambda multiplies the weights alone.

    The state is float64 for weights of any dtype. Sigma_post is a difference, which in float32 loses its sign if the
    precision of a batch is 1e6 times that of the prior (float64: 1e13).

    Args:
        model: the network; BatchNorm must be in evaluation mode.
        lr: eta, the drift of a weight's optimum in one step.
        params: parameters or param groups of the model; None for all. Groups may have their own lr, prior_std and
            weight_decay; other options must be the same in all groups.
        batch_size: B, the number of losses whose mean is differentiated, over all micro-batches (and tokens). The
            Fisher information of the observed outputs is scaled to B losses. Drop a smaller last batch.
        prior_std: sigma, also the standard deviation before the first gradient. With `inf` the initial variance is
            0.1/B, so the first step is at most that of SGD with learning rate 0.1.
        transition: (A, Q) in the order of `torch.nn.utils.parameters_to_vector`, Q symmetric and positive
            semi-definite. Every parameter must then have a gradient in every step.
        prior_covariance: the covariance before the first gradient, of the size of Q; None for prior_std^2 for each
            weight and zero for latent values.
        likelihood: "categorical", "bernoulli" or "gaussian", or an object of `bayesgrad.likelihoods`; the loss must be
            its mean negative log-likelihood, for "gaussian" half the squared error.
        fisher: which gradients are the columns of U: "exact", those of all labels, weighted by the model's predictions
            (Gauss-Newton); "sampled", of one sampled label per example; "empirical", of the labels given to
            `observe(outputs, labels=labels)`; "centered", the same minus their mean over the batch, times
            sqrt(N/(N-1)), so that U U' is an unbiased estimate of N times the covariance of the gradients.
        weight_decay: decoupled, applied after the prediction.
        seed: seed of the sampled labels; None draws one from torch's global generator.
        losses_per_example: the number of losses of an example in the mean loss; None follows from the outputs, as in
            `NaturalGradient`. Rows of flattened outputs are always examples.
        nonfinite: as in `AdaBayes`; also checks the observed gradients. With "ignore", gradients that are not finite
            change all weights, but not the covariance.

    A parameter without a gradient keeps its mean, its variance, and its covariance with other such parameters.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = DenseFilter(model, lr=0.01, batch_size=8)
        >>> outputs = model(torch.randn(8, 3))
        >>> optimizer.observe(outputs)
        >>> torch.nn.functional.cross_entropy(outputs, torch.zeros(8, dtype=torch.long)).backward()
        >>> optimizer.step()
        >>> optimizer.covariance().shape
        torch.Size([8, 8])

    Reference: Aitchison 2018, Eq. 1-7.
    Differs from the paper: the denominator of Eq. 7 is a number for one column of U, and the matrix above for several;
    the default drift is discretised exactly.
    Checked by: tests/equations/test_dense_filter.py, against filterpy and closed forms.
    """

    takes_model = True
    rule = UpdateRule(None, Static(), NaturalStep(heavy_ball=True))
    accepts = {
        **BeliefOptimizer.accepts,
        **LAYER_OPTIONS,
        "batch_size": COUNT,
        "prior_std": DEVIATION,
        "fisher": one_of("exact", "sampled", "empirical", "centered"),
    }
    of_all_groups = (*BeliefOptimizer.of_all_groups, "batch_size", "fisher", "losses_per_example")

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        params: Any = None,
        batch_size: float,
        prior_std: float = math.inf,
        transition: tuple[Tensor, Tensor] | None = None,
        prior_covariance: Tensor | None = None,
        likelihood: str | Likelihood = "categorical",
        fisher: str = "exact",
        weight_decay: float = 0.0,
        seed: int | None = None,
        losses_per_example: int | None = None,
        nonfinite: str = "ignore",
    ) -> None:
        if transition is not None:
            if not isinstance(transition, (tuple, list)) or len(transition) != 2:
                raise TypeError(f"transition must be None or a pair of matrices (A, Q), got {transition!r}.")
            transition = (
                square_matrix(transition[0], "A of transition"),
                covariance_matrix(transition[1], "Q of transition"),
            )
            if transition[0].shape != transition[1].shape:
                sizes = " and ".join(str(tuple(matrix.shape)) for matrix in transition)
                raise ValueError(f"A and Q of transition must have the same shape, got {sizes}.")
        if prior_covariance is not None:
            prior_covariance = covariance_matrix(prior_covariance, "prior_covariance")
        super().__init__(params, settings(locals()), model)

    def build_preconditioner(self) -> DenseKalman:
        return DenseKalman()

    @property
    def _kalman(self) -> DenseKalman:
        assert isinstance(self.preconditioner, DenseKalman)
        return self.preconditioner

    def evaluation_weights(self) -> Mapping[Tensor, Tensor]:
        return self._kalman.posterior_means()

    def covariance(self) -> Tensor:
        """A copy of Sigma_post of the weights, in the order of `torch.nn.utils.parameters_to_vector`; float64."""
        return self._kalman.covariance()

    def joint_beliefs(self, names: Mapping[int, str], scale: float) -> list[tuple[str, Joint]]:
        order = self._kalman.params
        mean = torch.cat([p.detach().double().flatten() for p in order])
        belief = Dense(scale * self.covariance(), tuple(mean.shape))
        return [(names[id(order[0])], Joint(mean, belief, {names[id(p)]: p.shape for p in order}))]
