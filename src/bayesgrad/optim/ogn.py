"""OGN and VOGN: online Gauss-Newton, at the mean and at weights sampled from the belief."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bayesgrad import layers, likelihoods
from bayesgrad.block import gradient_of
from bayesgrad.curvature import PerExampleSquare
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.fisher import check_outputs
from bayesgrad.layers.probe import fit_factors
from bayesgrad.layers.squares import Examples, examples_of
from bayesgrad.optimizer import Parts
from bayesgrad.optimizer.base import settings
from bayesgrad.optimizer.constraints import one_of
from bayesgrad.optimizer.layerwise import LayerwiseOptimizer
from bayesgrad.optimizer.variational import SampledVariational, VariationalOptimizer
from bayesgrad.posterior import Posterior
from bayesgrad.rule import NaturalGradient
from bayesgrad.transition import Forget

MAX_EXCESS = 1e3  # in rounding errors; a larger difference means that a gradient has other terms than the layers'


class GaussNewton(VariationalOptimizer, LayerwiseOptimizer):
    """What OGN and VOGN share: squares of per-example gradients, from the inputs and errors of layers."""

    curvature = PerExampleSquare()
    transition = Forget()
    rule = NaturalGradient()
    by_layer = False
    recorded = (layers.is_matrix, layers.normalises)
    observes = True
    fallback_name = "the squares of their mean gradients, times the batch size"
    accepts = {
        **LayerwiseOptimizer.accepts,
        **VariationalOptimizer.accepts,
        "fisher": one_of("empirical", "sampled", "exact"),
    }

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.03,
        *,
        params: Any = None,
        num_data: float,
        prior_precision: float = 1.0,
        hess_init: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        kl_weight: float = 1.0,
        samples: int = 1,
        fisher: str = "empirical",
        likelihood: str = "categorical",
        losses_per_example: int = 1,
        natural_momentum: float = 0.0,
        prior: Posterior | None = None,
        seed: int = 0,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(model, params, settings(locals()))
        self._load_prior(prior)

    def parts(self, group: Mapping[str, Any]) -> Parts:
        natural = group["natural_momentum"] > 0
        return Parts(self.curvature, Forget(natural_momentum=natural), NaturalGradient(natural_momentum=natural))

    def gradient_scale(self, group: Mapping[str, Any]) -> None:
        return None

    # --- evidence ---

    def observe(self, outputs: Tensor, labels: Tensor | None = None) -> None:
        """Computes the squares of this batch from the model's predictions, with `fisher="sampled"` or `"exact"`.

        Args:
            outputs: outputs of the model with their graph; neither the graph nor `.grad` is changed.
            labels: replace the sampled labels.
        """
        group = self.param_groups[0]
        if group["fisher"] == "empirical":
            return
        check_outputs(outputs)
        likelihood = likelihoods.named(group["likelihood"])
        trace = self.recorder.trace(outputs)
        exact = group["fisher"] == "exact" and labels is None
        if exact:
            directions = list(likelihood.hessian_roots(outputs))
        else:
            directions = [likelihood.residual(outputs, self.draw(outputs) if labels is None else labels)]
        self._observed.append(([trace.backpropagate(direction) for direction in directions], len(outputs)))
        self._marked = self._mark()

    def evidence(self, groups: list[dict[str, Any]], active: list[list[Tensor]]) -> dict[str, Mapping[Tensor, Tensor]]:
        stored: list[dict[Tensor, Tensor]] = self.__dict__.pop("_stored_draws", [])
        params = [p for some in active for p in some]
        if stored:
            every = {p: [squares[p] for squares in stored if p in squares] for p in params}
            return {"squares": {p: torch.stack(parts).mean(0) for p, parts in every.items()}}
        return {"squares": self._squares(groups[0], params)}

    def _squares(self, group: Mapping[str, Any], params: list[Tensor]) -> dict[Tensor, Tensor]:
        """The mean over examples of squared gradients, for each parameter."""
        passes = self.backward_passes()
        recorded = examples_of(passes) if passes else {}
        if not recorded and any(bool(gradient_of(p).any()) for p in params):
            raise self.missing_observation("no backward pass was recorded", "call loss.backward() on outputs")
        count = max((examples.count for examples in recorded.values()), default=1) * group["losses_per_example"]
        if group["fisher"] != "empirical":
            return self._observed_squares(group, params, count)
        known = [p for p in params if p in recorded]
        factors, odd = self._factors(known, recorded)
        found = {
            p: recorded[p].squares().mul_(recorded[p].count * group["losses_per_example"] * factors[p] ** 2)
            for p in known
            if p not in odd
        }
        self._warn_fallback({p for p in params if p not in recorded and bool(gradient_of(p).any())} | odd)
        for p in params:
            if p not in found:
                found[p] = gradient_of(p).to(compute_dtype(p.dtype)).square() * count
        return found

    def _factors(
        self, params: list[Tensor], recorded: Mapping[Tensor, Examples]
    ) -> tuple[dict[Tensor, float], set[Tensor]]:
        """The factors by which gradients were multiplied since the backward pass; parameters with other gradients.

        If no gradient was modified in place, all have the same factor (unscaling), so one parameter is enough if all
        were checked before.
        """
        if not params:
            return {}, set()
        untouched = all(gradient_of(p)._version == 0 for p in params)
        made: dict[Tensor, bool] = self.__dict__.setdefault("_explained", {})
        good = [p for p in params if made.get(p, True)]
        some = (good[:1] or params) if untouched and all(p in made for p in params) else params
        table = fit_factors([recorded[p].projection(gradient_of(p)) for p in some])
        factors = {p: factor for p, (factor, _) in zip(some, table)}
        if untouched:
            made |= {p: excess <= MAX_EXCESS for p, (_, excess) in zip(some, table)}
            common = next((factors[p] for p in some if made[p]), 1.0)
            factors = dict.fromkeys(params, common)
        return factors, {p for p in params if not made.get(p, True)}

    def _observed_squares(self, group: Mapping[str, Any], params: list[Tensor], count: int) -> dict[Tensor, Tensor]:
        observed, self._observed = self._observed, []
        if not observed:
            raise self.missing_observation(
                "observe() was not called", "call observe(outputs), before loss.backward(), on outputs"
            )
        total = sum(number for _, number in observed) * group["losses_per_example"]
        found: dict[Tensor, Tensor] = {}
        for directions, _ in observed:
            for uses in directions:
                for p, examples in examples_of([uses]).items():
                    squares = examples.squares() / total
                    found[p] = found[p] + squares if p in found else squares
        self._warn_fallback({p for p in params if p not in found and bool(gradient_of(p).any())})
        return {p: found[p] if p in found else gradient_of(p).square() * count for p in params}


class OGN(GaussNewton):
    r"""Online Gauss-Newton with squared per-example gradients; at convergence the belief is a Laplace approximation.

    .. math::
        h &\leftarrow \beta_2 h + (1-\beta_2)\, \tfrac1B \textstyle\sum_i (\nabla \ell_i(m))^2 \\
        m &\leftarrow m - \eta\, (\langle \bar g \rangle + \tfrac{\tau\delta}{N} m)/(h + \tfrac{\tau\delta}{N}),
        \quad \sigma^2 = \tau/(N (h + \tfrac{\tau\delta}{N}))

    with N = `num_data`, delta = `prior_precision`, tau = `kl_weight`, <> a debiased moving average with decay beta_1.
    The squares of per-example gradients cost one more matrix product for each layer. At convergence the posterior is
    the diagonal Laplace approximation with the empirical Fisher matrix.

        >>> model = nn.Linear(3, 2)
        >>> optimizer = OGN(model, num_data=100)
        >>> nn.functional.cross_entropy(model(torch.randn(8, 3)), torch.zeros(8, dtype=torch.long)).backward()
        >>> optimizer.step()

    Args:
        model: the network. BatchNorm in training mode is allowed; its batch statistics are treated as constants.
        lr: eta, in units of a Newton step. Chosen on digits and Fashion-MNIST with a small MLP.
        params: parameters, named parameters or param groups of the model; None for all.
        num_data: N, the number of training examples (times `losses_per_example`).
        prior_precision: delta, of the prior N(0, 1/delta).
        hess_init: the initial h.
        betas: decays of the averages of gradient and squares.
        kl_weight: tau, the weight of KL(q, prior).
        samples: number of weight samples that `step(closure)` averages over; VOGN only.
        fisher: which gradients are squared: those of the loss (`"empirical"`), or those for labels that the model
            predicts, `"sampled"` or `"exact"` (OGGN). The latter two need `observe(outputs)` before `loss.backward()`.
        likelihood: the likelihood of the outputs, for `observe`: "categorical", "bernoulli" or "gaussian".
        losses_per_example: the number of losses per example (the length of a sequence with a loss for each token).
        natural_momentum: gamma, momentum of the natural parameters of the Gaussian (Khan and Rue 2023, appendix F,
            Eq. 79-81), in place of or in addition to beta_1. Checked by tests/equations/test_ivon.py,
            test_natural_momentum_is_momentum_of_natural_parameters.
        prior: the posterior of an earlier task, used as the prior of this one. Parameters that it does not contain
            have the prior N(0, 1/prior_precision).
        seed: seed of sampled weights and labels.
        nonfinite: what to do if a gradient has infinite or NaN entries: `"ignore"`, `"raise"`, or `"skip"`.
        fused: compile the step (`True`), run it eagerly (`False`), or compile it for large models only (`None`).

    Parameters outside of known layers use the squares of mean gradients, times the batch size; a warning names them.

    Reference: Khan and Rue 2023, section 4.4, Eq. 47-48 at the mean.
    Checked by: tests/equations/test_vogn.py, squares against BackPACK.
    """


class VOGN(SampledVariational, GaussNewton):
    r"""Variational online Gauss-Newton: OGN with gradients and squares at weights sampled from the belief.

    .. math::
        \theta &= m + \epsilon \sigma, \quad \sigma^2 = \tau/(N (h + \tfrac{\tau\delta}{N})) \\
        h &\leftarrow \beta_2 h + (1-\beta_2)\, \tfrac1B \textstyle\sum_i (\nabla \ell_i(\theta))^2 \\
        m &\leftarrow m - \eta\, (\langle \bar g(\theta) \rangle + \tfrac{\tau\delta}{N} m)/(h + \tfrac{\tau\delta}{N})

    Its arguments are those of `OGN`; with `fisher="sampled"` or `"exact"` it is VOGGN. Run passes inside `sampled()`:

        >>> model = nn.Linear(3, 2)
        >>> optimizer = VOGN(model, num_data=100)
        >>> with optimizer.sampled():
        ...     optimizer.zero_grad()
        ...     nn.functional.cross_entropy(model(torch.randn(8, 3)), torch.zeros(8, dtype=torch.long)).backward()
        >>> optimizer.step()

    Its fixed point differs slightly from the optimal Gaussian, because squares replace the Hessian.

    Reference: Khan and Rue 2023, section 4.4, Eq. 47-48.
    Differs from the paper: the noise has variance 1/s; the text prints s.
    Checked by: tests/equations/test_vogn.py.
    """

    draw_evidence = None

    def _store_draw(self, samples: int) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.__dict__.setdefault("_stored_draws", []).append(self._squares(self.param_groups[0], params))
