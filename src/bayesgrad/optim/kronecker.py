"""KroneckerFilter and KroneckerFilterFP: a matrix normal belief about each layer, filtered or at its steady state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bayesgrad.curvature import SquaredGradient
from bayesgrad.layers.layer import Layer
from bayesgrad.layers.statistics import LayerStatistics as LayerBatch
from bayesgrad.layers.statistics import symmetric
from bayesgrad.optimizer.base import settings
from bayesgrad.optimizer.factored import MERGED, store
from bayesgrad.optimizer.kronecker import KroneckerOptimizer
from bayesgrad.precision import Kronecker, Precision, Spectral
from bayesgrad.precision.linalg import eigenvalues
from bayesgrad.precision.projection import Factors
from bayesgrad.transition import OrnsteinUhlenbeck, SteadyState

FLOOR = 1e-4  # of a moment's eigenvalues, relative to the largest


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

    The projection is exact for one example. The examples of a batch are processed in chunks, whose size is that of the
    layer's smaller side. This is correct to first order and keeps both factors positive definite for any gradients. For
    strong data the belief converges to that of `KroneckerFilterFP`.

    Args:
        model: the network.
        lr: eta, the drift of the optimal weights in one step; lr = 0 changes neither weights nor state. When lr changes
            by a factor, the covariance is multiplied by it at once.
        params: parameters or param groups of the model; None for all.
        batch_size: B, the number of losses whose mean is differentiated, over all micro-batches (and tokens).
        prior_std: sigma, the standard deviation of weights before the first gradient. With `inf` the drift is a random
            walk, and the initial covariance is that for which the first step is SGD with learning rate 0.1.
        momentum: decay of the moving average of the step. (While the covariance is constant, this is the step for an
            averaged gradient.)
        weight_decay: decoupled.
        likelihood: "categorical", "bernoulli" or "gaussian", from which labels are sampled.
        fisher: how delta is computed. "sampled": for labels sampled from the model, by `observe(outputs)` before
            `loss.backward()`; "empirical": from the backward passes of the loss; "centered": the same, minus their mean
            over earlier batches (this centres the gradients only if errors do not depend on inputs).
        update_every: steps between computations of the traces that the drift needs; they are extrapolated in between
            (early in a run, whenever the number of steps has grown by a quarter).
        stats_every: steps between updates of the covariance; the batch of that step stands for all of them.
        losses_per_example: the number of losses per example in the mean loss: 1, or the number of tokens per sequence
            if the loss is a mean over tokens.
        max_factor: layers with a larger side are trained by AdaBayes.
        seed: seed of the sampled labels.
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
    examples; the Ornstein-Uhlenbeck step is exact in time, so the covariance is positive for any lr.
    Checked by: tests/equations/test_kronecker_filter.py.
    """

    factor = "covariance"
    fallback_parts = (SquaredGradient(), OrnsteinUhlenbeck())
    fallback_name = "AdaBayes with the same lr and prior"

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
        likelihood: str = "categorical",
        fisher: str = "sampled",
        update_every: int = 100,
        stats_every: int = 1,
        losses_per_example: int = 1,
        max_factor: int = 8192,
        seed: int = 0,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(model, params, settings(locals()))

    def _find_layers(self, mine: set[int]) -> list[Layer]:
        limit = {p: group["max_factor"] for group in self.param_groups for p in group["params"]}
        return [
            layer
            for layer in super()._find_layers(mine)
            if not layer.lookup and max(layer.shape[1:]) <= limit[layer.owner]
        ]

    # As in AdaBayes, the state is the covariance in units of lr/base_lr, so it need not be rescaled when lr changes.

    def _unit(self, group: Mapping[str, Any]) -> float:
        return float(group["lr"]) / (group["base_lr"] or math.inf)

    def dynamics(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
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

    def initial_factor(self, zeros: Tensor, group: Mapping[str, Any]) -> Tensor:
        zeros.diagonal(dim1=1, dim2=2).fill_(math.sqrt(self.start(group)))
        return zeros

    def merge(self, layer: Layer, entry: dict[str, Tensor], batch: LayerBatch, group: Mapping[str, Any]) -> None:
        unit, steps = self._unit(group), int(entry.get("step", 0)) + 1 - int(entry["clock"][MERGED])
        if unit == 0:
            return
        drift = OrnsteinUhlenbeck().scalars(**self._drift(group, steps))
        share = unit * steps * group["batch_size"] / (batch.examples * group["losses_per_example"])
        self._keep(
            entry, self._factors(entry).propagate(**drift).observe(batch.inputs, batch.errors * math.sqrt(share))
        )

    def invert(self, layer: Layer, entry: dict[str, Tensor], group: Mapping[str, Any]) -> None:
        self._keep(entry, self._factors(entry).with_exact_traces())

    def _factors(self, entry: Mapping[str, Tensor]) -> Factors:
        sides = entry["input_covariance"], entry["error_covariance"]
        if "traces" in entry:
            return Factors(*sides, entry["traces"])
        return Factors(*sides, torch.stack([(1 / side[:, 0, 0]).double().cpu() for side in sides]))

    def _keep(self, entry: dict[str, Tensor], belief: Factors) -> None:
        entry["input_covariance"], entry["error_covariance"] = belief.inputs, belief.errors
        entry["traces"] = belief.traces

    def precision(self, layer: Layer, group: Mapping[str, Any]) -> Precision:
        entry = self.state[layer.owner]
        return Kronecker(entry["error_covariance"], entry["input_covariance"], layer.shape)

    def covariance(self, layer: Layer, group: Mapping[str, Any]) -> Precision:
        return self.precision(layer, group).scale(1 / self._unit(group))


class KroneckerFilterFP(KroneckerOptimizer):
    r"""The Kronecker filter at its steady state: whitened gradients for strong data, SGD for weak data.

    .. math::
        C_x &= \langle x x^T \rangle = U_x\, \mathrm{diag}(c_x)\, U_x^T, \quad
        C_\delta = \langle \delta \delta^T \rangle = U_\delta\, \mathrm{diag}(c_\delta)\, U_\delta^T \\
        s_{ij} &= \left(\tfrac1{2\sigma^2} + \sqrt{\tfrac1{4\sigma^4} + B\, c_{\delta i} c_{xj} / \eta^2}\right)^{-1} \\
        W &\leftarrow (1 - \eta\lambda)\, W - \langle U_\delta (s \circ U_\delta^T B g\, U_x)\, U_x^T \rangle

    with x the inputs of a layer (a one appended for the bias), delta the errors at its outputs for single examples, g
    the gradient of the mean loss (`.grad`), eta = `lr`, sigma = `prior_std`, B = `batch_size`, lambda = `weight_decay`.
    For sigma = inf the step is eta sqrt(B) C_delta^-1/2 g C_x^-1/2: gradients of pure noise move the weights equally
    far in all directions. For weak data it is that of SGD with learning rate B sigma^2.

    This is the fixed point of the exact filter in the eigenbasis, to first order in eta sqrt(B c c'). For sigma = inf
    it is also the fixed point of `KroneckerFilter`; for finite sigma the fixed point is not a Kronecker product.

    Args:
        model: the network.
        lr: eta, Adam's learning rate.
        params: parameters or param groups of the model; None for all.
        batch_size: B, the number of losses whose mean is differentiated, over all micro-batches (and tokens).
        prior_std: sigma, the standard deviation of weights before the first gradient. A finite value costs four
            products with eigenvectors per step, `inf` two products with inverse square roots.
        momentum: decay of the moving average of the step. (While the factors are constant, this is the step for an
            averaged gradient.)
        weight_decay: decoupled.
        likelihood: "categorical", "bernoulli" or "gaussian", from which labels are sampled.
        fisher: how delta is computed. "sampled": for labels sampled from the model, by `observe(outputs)` before
            `loss.backward()`; "empirical": from the backward passes of the loss; "centered": the same, minus their mean
            over earlier batches (this centres the gradients only if errors do not depend on inputs).
        ema: decay of the moments' averages.
        update_every: steps between eigendecompositions (early in a run, whenever the number of steps has grown by a
            quarter).
        stats_every: steps between updates of the moments; observe() does nothing in between.
        losses_per_example: the number of losses per example in the mean loss: 1, or the number of tokens per sequence
            if the loss is a mean over tokens.
        max_factor: a factor with more rows than this is approximated by its diagonal.
        seed: seed of the sampled labels.
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

    Defaults were chosen on scikit-learn's digits with small MLPs.

    Reference: the steady state of Aitchison 2018, section 2.4; Aitchison 2020, Eq. 21, for the prior.
    Checked by: tests/equations/test_kronecker_filter.py.
    """

    fallback_parts = (SquaredGradient(), SteadyState(OrnsteinUhlenbeck()))
    fallback_name = "AdaBayesFP with the same lr and prior"

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
        likelihood: str = "categorical",
        fisher: str = "sampled",
        ema: float = 0.95,
        update_every: int = 100,
        stats_every: int = 1,
        losses_per_example: int = 1,
        max_factor: int = 8192,
        seed: int = 0,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(model, params, settings(locals()))

    def setting(self, group: Mapping[str, Any]) -> float:
        """1 with a finite prior_std, else 0."""
        return float(math.isfinite(group["prior_std"]))

    def dynamics(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        half = float(group["lr"]) / (2 * group["prior_std"] ** 2 * group["batch_size"])
        return {"beta": group["ema"], "step": step, "half": half}

    def step_scale(self, group: Mapping[str, Any]) -> float:
        lr, batch = float(group["lr"]), group["batch_size"]
        if not group.get("preconditioned"):
            return lr
        return lr * batch if self.setting(group) else lr * math.sqrt(batch)

    def prior_variance(self, group: Mapping[str, Any]) -> float:
        return self.start(group) * group["batch_size"] / float(group["lr"])

    def invert(self, layer: Layer, entry: dict[str, Tensor], group: Mapping[str, Any]) -> None:
        for side in self.layer_curvature.sides:
            moment = symmetric(entry[f"{side}_moment"])
            values, vectors = eigenvalues(moment)
            if self.setting(group):
                store(entry, f"{side}_values", values)
                if vectors is not None:
                    store(entry, f"{side}_basis", vectors)
                continue
            largest = values.amax(1, keepdim=True)
            root = torch.where(largest > 0, values.maximum(FLOOR * largest).rsqrt(), 0.0)  # zero without data
            store(entry, f"{side}_root", root if vectors is None else (vectors * root[:, None]) @ vectors.mT)

    def precision(self, layer: Layer, group: Mapping[str, Any]) -> Precision:
        entry = self.state[layer.owner]
        left, right = ("input", "error") if layer.lookup else ("error", "input")
        if not self.setting(group):
            return Kronecker(entry[f"{left}_root"], entry[f"{right}_root"], layer.shape)
        # At lr = 0 the weights are constant, but the average of directions is still updated.
        lr = float(group["lr"]) or group["last_lr"] or 1.0
        half = lr / (2 * group["prior_std"] ** 2)
        information = entry[f"{left}_values"][..., :, None] * entry[f"{right}_values"][..., None, :]
        spectrum = half + (half * half + group["batch_size"] * information).sqrt()
        return Spectral(entry.get(f"{left}_basis"), entry.get(f"{right}_basis"), spectrum)

    def covariance(self, layer: Layer, group: Mapping[str, Any]) -> Precision:
        return self.precision(layer, group).scale(
            group["batch_size"] / self.step_scale({**group, "preconditioned": True})
        )
