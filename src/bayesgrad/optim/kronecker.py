"""KroneckerFilter and KroneckerFilterFP: a matrix normal belief about each layer, filtered or at its steady state."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from bayesgrad.belief import Joint
from bayesgrad.checkpoint import settings
from bayesgrad.constraints import COUNT, DEVIATION, LAYER_OPTIONS, POSITIVE, one_of
from bayesgrad.likelihoods import Likelihood
from bayesgrad.optim.adabayes import DEFAULT_SGD_LR
from bayesgrad.optimizer import BeliefOptimizer
from bayesgrad.preconditioners import KroneckerBelief, LayerBelief, Whitening
from bayesgrad.rules import NaturalStep, OrnsteinUhlenbeck, SquaredGradient, SteadyState, UpdateRule
from bayesgrad.schedule import state_unit


class KroneckerOptimizer(BeliefOptimizer):
    """What the Kronecker filters share: the options `fisher` and `prior_std`, and joint posteriors of layers."""

    takes_model = True
    fixed = ("fisher", "max_factor")
    accepts = {
        **BeliefOptimizer.accepts,
        **LAYER_OPTIONS,
        "batch_size": COUNT,
        "prior_std": DEVIATION,
        "max_step": POSITIVE,
        "fisher": one_of("sampled", "centered", "empirical"),
    }

    def start(self, group: Mapping[str, Any]) -> float:
        """The variance before the first gradient."""
        prior = group["prior_std"] ** 2
        return prior if math.isfinite(prior) else DEFAULT_SGD_LR / group["batch_size"]

    def joint_beliefs(self, names: Mapping[int, str], scale: float) -> list[tuple[str, Joint]]:
        assert isinstance(self.preconditioner, LayerBelief)
        groups = {p: group for group in self.param_groups for p in group["params"]}
        found = []
        for layer in self.preconditioner.believed_layers():
            group = groups[layer.owner]
            then = {**group, "lr": group["last_lr"] or 1.0, "base_lr": group["base_lr"] or 1.0}
            shapes = {names[id(p)]: p.shape for p in layer.members}
            known = copy.deepcopy(self.preconditioner.belief(layer, then))  # later steps write to the state in place
            turned = frozenset([names[id(layer.weight)]] if layer.transposed and layer.weight is not None else [])
            found.append((names[id(layer.owner)], Joint(layer.values(), known.scale(1 / scale), shapes, turned)))
        return found


class KroneckerFilter(KroneckerOptimizer):
    r"""Kalman filtering of the weights of each layer, with a Kronecker product as their covariance.

    .. math::
        \Sigma &= \Sigma_x \otimes \Sigma_\delta, \quad
        \Sigma \leftarrow \Pi\left[r \Sigma + \sigma^2 (1 - r) I\right], \quad r = e^{-\eta^2/\sigma^2} \\
        \Sigma &\leftarrow \Pi\left[(\Sigma^{-1} + \textstyle\sum_b (x_b \otimes \delta_b)
        (x_b \otimes \delta_b)^T)^{-1}\right] \\
        W &\leftarrow (1 - \eta\lambda)\, W - \langle \Sigma_\delta\, B g\, \Sigma_x \rangle

    with x the inputs of a layer (a one appended for the bias), delta the errors at its outputs for single examples, g
    the gradient of the mean loss (`.grad`), <> a debiased moving average, eta = `lr`, sigma = `prior_std`, B =
    `batch_size`, lambda = `weight_decay`, and Pi the projection to the Kronecker product with the smallest
    KL(exact || product).

    The projection of one example's information is exact. The examples of a batch are processed in chunks, whose size is
    that of the layer's smaller side. This is correct to first order and keeps both factors positive definite for any
    gradients. That of the drift, q = sigma^2 (1 - r), is correct to first order in q too:
    (r Sigma_x + q l_delta I) ⊗ (r Sigma_delta + q l_x I)/(r + q l_x l_delta), with l the mean eigenvalue
    of a factor's inverse. For strong data the belief converges to that of `KroneckerFilterFP`.

    Args:
        model: the network.
        lr: eta, the drift of the optimal weights in one step; lr = 0 changes neither weights nor covariance. When lr
            changes by a factor, the covariance is multiplied by it at once.
        params: parameters or param groups of the model; None for all.
        batch_size: B, the number of losses whose mean is differentiated, over all micro-batches (and tokens).
        prior_std: sigma, the standard deviation of weights before the first gradient. With `inf` the drift is a random
            walk, and the initial covariance is that for which the first step is SGD with learning rate 0.1. As in
            AdaBayes, sigma does not decay the weights: lambda = eta/(2 sigma^2) is the decay of the filter's mean.
        momentum: decay of the moving average of the step, in units of lr and `batch_size`: a new lr acts at once, and
            so does a new batch size. (While the covariance is constant, this is the step for an averaged gradient.)
        weight_decay: decoupled.
        likelihood: "categorical", "bernoulli", "gaussian", or an object of `bayesgrad.likelihoods`, from which labels
            are sampled.
        fisher: how delta is computed. "sampled": for labels sampled from the model, by `observe(outputs)` before
            `loss.backward()`; "empirical": from the backward passes of the loss; "centered": the same, minus their mean
            over earlier batches (this centres the gradients only if errors do not depend on inputs).
        update_every: steps between computations of the traces that the drift needs; they are extrapolated in between
            (early in a run, at steps 1, 2, 3, 5, 8 and so on).
        stats_every: steps between updates of the covariance (early in a run, at steps 1, 2, 3, 5, 8 and so
            on); the batch of that step stands for all of them. They are as many for large layers, unlike those of
            `KroneckerFilterFP`.
        losses_per_example: the number of losses of an example in the mean loss. None follows from the outputs: 1, or
            the number of positions of outputs (N, T, C). Rows of flattened outputs (N T, C) are examples with one loss;
            with losses_per_example=T, T rows are one example, and the number of losses is the same.
        max_factor: layers with a larger side are trained by AdaBayes.
        seed: seed of the sampled labels; None draws one from torch's global generator.
        nonfinite, fused: as in `AdaBayes`.

    Other parameters, and those of Embedding layers (whose input side is too large for a covariance), are trained by
    AdaBayes with the same lr and prior.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = KroneckerFilter(model, batch_size=8)
        >>> outputs = model(torch.randn(8, 3))
        >>> optimizer.observe(outputs)
        >>> torch.nn.functional.cross_entropy(outputs, torch.zeros(8, dtype=torch.long)).backward()
        >>> optimizer.step()

    Defaults were chosen on scikit-learn's digits with small MLPs.

    Reference: Aitchison 2018, Eq. 24, 28 and section 4.3.
    Differs from the paper: its Eq. 24 lacks factors 1/n_in and 1/n_out and is of first order; batches of several
    examples; the Ornstein-Uhlenbeck step is exact in time, so the covariance is positive for any lr; the decay
    eta^2/(2 sigma^2) of the mean is replaced by `weight_decay`, as in Aitchison 2020, section 3.
    Checked by: tests/equations/test_kronecker_filter.py.
    """

    rule = UpdateRule(SquaredGradient(), OrnsteinUhlenbeck(), NaturalStep())

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        params: Any = None,
        batch_size: float,
        prior_std: float = math.inf,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        likelihood: str | Likelihood = "categorical",
        fisher: str = "sampled",
        update_every: int = 100,
        stats_every: int = 1,
        losses_per_example: int | None = None,
        max_factor: int = 8192,
        seed: int | None = None,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, settings(locals()), model)

    def build_preconditioner(self) -> KroneckerBelief:
        return KroneckerBelief("AdaBayes with the same lr and prior", self._unit, self._drift, self.start)

    # As in AdaBayes, the state is the covariance in units of lr/unit_lr, so it need not be rescaled when lr changes.

    def _unit(self, group: Mapping[str, Any]) -> float:
        return state_unit(group)

    def dynamics(self, group: Mapping[str, Any]) -> dict[str, float]:
        return self._drift(group, 1)

    def _drift(self, group: Mapping[str, Any], steps: int) -> dict[str, float]:
        unit = self._unit(group)
        if unit == 0:
            return {"process": 0.0, "stationary": math.inf}
        return {"process": steps * float(group["lr"]) ** 2 / unit, "stationary": group["prior_std"] ** 2 / unit}

    def step_scale(self, group: Mapping[str, Any]) -> float:
        return self._unit(group) * group["batch_size"]

    def gradient_scale(self, group: Mapping[str, Any]) -> float:
        return math.sqrt(self._unit(group)) * group["batch_size"]

    def prior_variance(self, group: Mapping[str, Any]) -> float:
        return self.start(group)


class KroneckerFilterFP(KroneckerOptimizer):
    r"""The Kronecker filter at its steady state: whitened gradients for strong data, SGD for weak data.

    .. math::
        C_x &= \langle x x^T \rangle = U_x\, \mathrm{diag}(c_x)\, U_x^T, \quad
        C_\delta = \langle \delta \delta^T \rangle = U_\delta\, \mathrm{diag}(c_\delta)\, U_\delta^T \\
        s_{ij} &= \left(\tfrac1{2\sigma^2} + \sqrt{\tfrac1{4\sigma^4} + B\, c_{\delta i} c_{xj} / \eta^2}\right)^{-1} \\
        D &= U_\delta (s \circ U_\delta^T B g\, U_x)\, U_x^T, \quad
        W \leftarrow (1 - \eta\lambda)\, W
        - \left\langle \min\left(1, \frac{c\, \eta}{\mathrm{rms}(D)}\right) D \right\rangle

    with x the inputs of a layer (a one appended for the bias), delta the errors at its outputs for single examples, g
    the gradient of the mean loss (`.grad`), eta = `lr`, sigma = `prior_std`, B = `batch_size`, c = `max_step`, lambda =
    `weight_decay`. For sigma = inf, D is eta sqrt(B) C_delta^-1/2 g C_x^-1/2: gradients of pure noise move the weights
    equally far in all directions, by eta. Gradients on which all examples agree would move them sqrt(B) times as far;
    the bound of the root mean square in each layer makes this at most c eta. For weak data the step is that of SGD with
    learning rate B sigma^2.

    This is the fixed point of the exact filter in the eigenbasis, to first order in eta sqrt(B c c'). For sigma = inf
    it is also the fixed point of `KroneckerFilter`; for finite sigma the fixed point is not a Kronecker product.

    Args:
        model: the network.
        lr: eta, Adam's learning rate.
        params: parameters or param groups of the model; None for all.
        batch_size: B, the number of losses whose mean is differentiated, over all micro-batches (and tokens).
        prior_std: sigma, the standard deviation of weights before the first gradient. A finite value costs four
            products with eigenvectors per step, `inf` two products with inverse square roots. As in AdaBayes, sigma
            does not decay the weights: lambda = eta/(2 sigma^2) is the decay of the filter's mean.
        momentum: decay of the moving average of the step, in units of lr and of `batch_size` (its root, without a
            prior): a new lr acts at once, and so does a new batch size. (While the factors are constant, this is the
            step for an averaged gradient.)
        weight_decay: decoupled.
        likelihood: "categorical", "bernoulli", "gaussian", or an object of `bayesgrad.likelihoods`, from which labels
            are sampled.
        fisher: how delta is computed. "sampled": for labels sampled from the model, by `observe(outputs)` before
            `loss.backward()`; "empirical": from the backward passes of the loss; "centered": the same, minus their mean
            over earlier batches (this centres the gradients only if errors do not depend on inputs), of all rows
            whatever `stats_rows` is.
        ema: decay of the moments' averages.
        max_step: c; `inf` for no bound.
        update_every: the largest number of steps between eigendecompositions (early in a run, whenever the number of
            steps has doubled, or a moment has changed). After every tenth of them, moments whose diagonal has changed
            by a fifth are decomposed anew.
        stats_every: steps between updates of the moments (early in a run, at steps 1, 2, 3, 5, 8 and so on);
            observe() does nothing in between. If it is more than 1, four times as many for layers with 512 inputs or
            more and 16 times fewer outputs.
        stats_rows: about how many rows (pairs of an example and a position) of a batch statistics are formed of: every
            k-th row, or of a convolution all rows of every k-th line (of an image at one height), but at least four
            rows for each row of a factor, and sixteen lines. `inf` for all. Processes and micro-batches take parts of
            their own, so that results depend on their number.
        losses_per_example: the number of losses of an example in the mean loss. None follows from the outputs: 1, or
            the number of positions of outputs (N, T, C). Rows of flattened outputs (N T, C) are examples with one loss;
            with losses_per_example=T, T rows are one example, and the number of losses is the same.
        whiten: "both", or "input": C_delta is replaced by its mean eigenvalue times the identity, which saves an
            eigendecomposition and a product.
        eigenvalues: what stands for c_delta_i c_xj. "factors": that. "gradients": B v_ij, with v the average (decay
            `ema`) of the squared entries of U_delta' g U_x, the gradient in the eigenbasis (George et al., 2018). For
            sigma = inf, D is then Adam's step in that basis, as in SOAP (Vyas et al., 2024), with v at least 1e-8 of
            its largest entry. When the basis turns from U to V, v becomes (V'U)^2 times it, with elementwise squares,
            for each side. It costs four products with eigenvectors per step, and one more tensor of state.
            Directions without data have no unique basis, so that steps in them depend on rounding.
        precondition: "step": `step()` preconditions `.grad`. "backward": the backward pass does, and `.grad` is the
            preconditioned gradient, which is cheaper for batches of few rows; see docs/choosing.md.
        max_factor: a factor with more rows than this is approximated by its diagonal.
        seed: seed of the sampled labels; None draws one from torch's global generator.
        nonfinite, fused: as in `AdaBayes`.

    For sigma = inf, eigenvalues are clamped to at least 1e-4 of the largest, so the factor of a direction without data
    is at most a hundred times that of the direction with the largest eigenvalue.

    Other parameters are trained by AdaBayesFP, the diagonal of the same steady state, with squared gradients.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = KroneckerFilterFP(model, batch_size=8)
        >>> outputs = model(torch.randn(8, 3))
        >>> optimizer.observe(outputs)
        >>> torch.nn.functional.cross_entropy(outputs, torch.zeros(8, dtype=torch.long)).backward()
        >>> optimizer.step()

    Defaults were chosen by benchmarks/stable_defaults.py, on five small networks.

    Reference: the steady state of Aitchison 2018, section 2.1.3; Aitchison 2020, Eq. 21, for the prior.
    Differs from the paper: the bound c, which makes the first steps stable; pass `max_step=inf`.
    Checked by: tests/equations/test_kronecker_filter.py.
    """

    rule = UpdateRule(SquaredGradient(), SteadyState(OrnsteinUhlenbeck()), NaturalStep())
    fixed = (*KroneckerOptimizer.fixed, "whiten", "eigenvalues")
    accepts = {
        **KroneckerOptimizer.accepts,
        "max_step": POSITIVE,
        "whiten": one_of("both", "input"),
        "eigenvalues": one_of("factors", "gradients"),
    }

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        params: Any = None,
        batch_size: float,
        prior_std: float = math.inf,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        likelihood: str | Likelihood = "categorical",
        fisher: str = "sampled",
        max_step: float = 1.0,
        ema: float = 0.95,
        update_every: int = 500,
        stats_every: int = 10,
        stats_rows: float = math.inf,
        losses_per_example: int | None = None,
        whiten: str = "both",
        eigenvalues: str = "factors",
        precondition: str = "step",
        max_factor: int = 768,
        seed: int | None = None,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, settings(locals()), model)

    def build_preconditioner(self) -> Whitening:
        return Whitening("AdaBayesFP with the same lr and prior")

    def dynamics(self, group: Mapping[str, Any]) -> dict[str, float]:
        half = float(group["lr"]) / (2 * group["prior_std"] ** 2 * group["batch_size"])
        return {"beta": group["ema"], "half": half}

    def prior_variance(self, group: Mapping[str, Any]) -> float:
        return self.start(group) * group["batch_size"] / float(group["lr"])
