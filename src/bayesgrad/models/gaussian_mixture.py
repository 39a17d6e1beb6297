"""Gaussian mixtures by EM, variational message passing, and stochastic variational inference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from sklearn.base import DensityMixin
from sklearn.cluster import KMeans, kmeans_plusplus
from sklearn.utils import check_random_state
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from bayesgrad.families import Dirichlet, Family, Parameters, Point
from bayesgrad.inference import Factor, LatentVariableFactor, Node, Prior
from bayesgrad.models import chained, checks
from bayesgrad.models.covariances import COVARIANCES, Components, Covariance
from bayesgrad.models.latent import Latent
from bayesgrad.models.mixture_factor import MixtureFactor, Rows

METHODS = ("em", "vmp", "svi")
STARTS = ("kmeans", "k-means++", "random", "random_from_data")


def _is_em(model: GaussianMixture) -> bool:
    return model.method == "em"


@dataclass(eq=False, repr=False)
class GaussianMixture(DensityMixin, Latent):
    r"""Gaussian mixtures: rows from K Gaussians, with latent component indicators:

    .. math::
        p(x) = \sum_k \pi_k\, N(x \mid m_k, \Lambda_k^{-1}), \quad
        \pi \sim \mathrm{Dir}(\alpha_0), \quad
        m_k, \Lambda_k \sim N(m_k \mid m_0, (\kappa_0 \Lambda_k)^{-1})\, W(\Lambda_k \mid \nu_0, W_0^{-1})

    Args:
        n_components: K.
        method: `"em"`: maximum likelihood, with `Point` parameters and no priors; `partial_fit` is online EM.
            `"vmp"`: posteriors of all parameters, by variational message passing. `"svi"`: the same posteriors, by
            passes over batches.
        covariance_type: `"full"`, `"tied"`, `"diag"` or `"spherical"`.
        tol: stop when the change of the bound per row is below this.
        reg_covar: every row counts as N(x, reg_covar I), so that all covariances are at least reg_covar I.
        max_iter: maximum number of iterations or passes.
        n_init: number of starts; the one with the highest bound is kept.
        init_params: `"kmeans"`; `"k-means++"` and `"random_from_data"`, where each row belongs to the nearest of K
            chosen rows; or `"random"`, random responsibilities. `"svi"` uses a subset of the rows, `partial_fit` the
            first batch.
        weights_init, means_init, precisions_init: initial values of weights, means and precisions, any or all of them,
            as in scikit-learn.
        weight_concentration_prior: alpha_0 of each weight; None for 1/K.
        mean_precision_prior: κ_0; None for 1.
        mean_prior: m_0, (P,); None for the mean of X, in streams of the first batch.
        degrees_of_freedom_prior: nu_0; None for P.
        covariance_prior: W_0, with the shape of one component's covariance; None for that of X, or of the first batch.
        batch_size, offset, decay: for `"svi"` and `partial_fit`: B, and steps of (t + offset)^-decay.
        total_samples: N for `partial_fit`; None for the number of rows so far.
        random_state: as in scikit-learn; an integer by default.
        progress: whether to print a progress line; None prints one in a terminal, after two seconds.

    Attributes:
        weights_: (K,); posterior means unless `"em"`.
        means_: (K, P).
        covariances_, precisions_, precisions_cholesky_: as in scikit-learn; E[Λ]^-1, E[Λ] and its factor unless `"em"`.
        weight_concentration_, mean_precision_, degrees_of_freedom_: alpha (K,), κ (K,) and nu (K,) of the posterior
            (nu is a number for `"tied"`); not for `"em"`.
        weight_concentration_prior_, ..: the priors that were used.
        elbo_: the bound on the log evidence, with all constants; for `"em"` the log-likelihood (minus the effect of
            reg_covar). After `partial_fit` the estimate from the last batch.
        elbos_, n_iter_, converged_: the bound before the first iteration and after each; the number of iterations;
            whether the bound converged.
        n_features_in_, feature_names_in_: as in scikit-learn.

    `fit` sorts components by weight, the largest first, so that runs can be compared; a stream keeps their order. A
    component without rows keeps its last shape in EM, with weight zero, and returns to the prior otherwise. Rows are
    centred internally, so that data far from zero lose no precision.

    Results are NumPy arrays, or tensors if X is a tensor. Computations use float64.

    >>> from sklearn.datasets import load_iris
    >>> bounds = [GaussianMixture(k, method="vmp").fit(load_iris().data).elbo_ for k in (1, 2, 3)]
    >>> print(*[f"{bound:.1f}" for bound in bounds])
    -415.8 -325.6 -335.4

    Reference: Khan and Rue 2023, sections 5.2 and 5.3; Bishop, 2006, section 10.2.
    Differs from scikit-learn: the bound is complete and never decreases, also with reg_covar, which scikit-learn adds
    only in the M-step (with reg_covar=0 there is no difference). `score_samples` and `predict_proba` average over
    posteriors (t distributions) instead of using expected logarithms. Its variational `"diag"`, `"spherical"` and
    `"tied"` treat W as a matrix with P degrees of freedom; here each has the conjugate prior.
    Checked by: tests/equations/test_gaussian_mixture.py, tests/contract/test_gaussian_mixture.py.
    """

    _fixed_settings = ("n_components", "method", "covariance_type")
    n_components: int = 1
    _: KW_ONLY
    method: str = "em"
    covariance_type: str = "full"
    reg_covar: float = 1e-6
    init_params: str = "kmeans"
    weights_init: Any = None
    means_init: Any = None
    precisions_init: Any = None
    weight_concentration_prior: float | None = None
    mean_precision_prior: float | None = None
    mean_prior: Any = None
    degrees_of_freedom_prior: float | None = None
    covariance_prior: Any = None
    batch_size: int = 1024
    offset: float = 1.0
    decay: float = 0.7

    # --- validation ---

    def _read(self, X: Any, *, reset: bool) -> Rows:
        if reset:
            self._check_settings()
        rows = self._rows_of(X, reset=reset)
        if reset:
            if len(rows) < self.n_components:
                raise ValueError(
                    f"n_components={self.n_components} is larger than the number of rows, n_samples={len(rows)}: use "
                    "fewer components, or a larger (first) batch."
                )
            self._centre = checks.near_mean(rows)
            self._remember_kind(X)
        data = Rows(rows, self._covariance, self.n_components, self.reg_covar, self._centre.to(rows))
        if reset and not _is_em(self):
            self._set_priors(data.rows)
        return data

    def _rows_of(self, X: Any, *, reset: bool) -> Tensor:
        return checks.as_finite(self._validated(X, reset=reset, ensure_min_samples=1 + reset), X)

    def _check_settings(self) -> None:
        checks.require_one_of(self, method=METHODS, covariance_type=COVARIANCES, init_params=STARTS)
        checks.require_positive_integer(n_components=self.n_components)
        checks.require_non_negative(reg_covar=self.reg_covar)
        given = [name for name, value in vars(self).items() if name.endswith("_prior") and value is not None]
        if _is_em(self) and given:
            raise ValueError(f"method='em' has no priors, but {given[0]} was set: use method='vmp', or None.")

    def _set_priors(self, rows: Tensor) -> None:
        size = rows.shape[1]
        least = size - 1 if self.covariance_type in ("full", "tied") else 0
        numbers = {}
        for name, default, bound in (
            ("weight_concentration_prior", 1 / self.n_components, 0),
            ("mean_precision_prior", 1.0, 0),
            ("degrees_of_freedom_prior", float(size), least),
        ):
            value = getattr(self, name)
            numbers[name] = default if value is None else value
            if not (checks.is_number(numbers[name]) and numbers[name] > bound):
                raise ValueError(f"{name} must be a number greater than {bound}, got {value!r}.")
        location, spread = self._mean_prior(rows), self._covariance_prior(rows)
        weight, confidence, degrees = numbers.values()
        weights = Dirichlet().of(rows.new_full((self.n_components,), weight))
        self._priors_known = weights, self._covariance.prior(location, confidence, degrees, spread, self.n_components)
        for name, value in numbers.items():
            setattr(self, f"{name}_", value)
        self.mean_prior_ = self._kind(location + self._centre)
        self.covariance_prior_ = self._kind(spread)

    def _mean_prior(self, rows: Tensor) -> Tensor:
        if self.mean_prior is None:
            return rows.mean(0)
        given = checks.require_numbers("mean_prior", self.mean_prior).to(rows)
        if given.shape != rows[0].shape or not torch.isfinite(given).all():
            shape = tuple(given.shape)
            raise ValueError(f"mean_prior must be {rows.shape[1]} finite numbers, one per column, got shape {shape}.")
        return given - self._centre

    def _covariance_prior(self, rows: Tensor) -> Tensor:
        covariance, size = self._covariance, rows.shape[1]
        if self.covariance_prior is None:
            spread = covariance.default_spread(rows.mT)
            if _positive(spread):
                return spread
            spread = spread + self.reg_covar * (torch.eye(size).to(rows) if spread.dim() == 2 else 1)
            if _positive(spread):
                return spread
            raise ValueError("the covariance of X is singular: set covariance_prior, or a larger reg_covar.")
        spread = checks.require_numbers("covariance_prior", self.covariance_prior).to(rows)
        shape = covariance.shape(1, size) if self.covariance_type == "tied" else covariance.shape(1, size)[1:]
        if spread.shape != shape:
            raise ValueError(f"covariance_prior must have shape {shape}, got {tuple(spread.shape)}.")
        if not _positive(spread):
            raise ValueError("covariance_prior must be positive, or a symmetric positive definite matrix.")
        return spread

    # --- the methods of Latent ---

    @property
    def _covariance(self) -> Covariance:
        return COVARIANCES[self.covariance_type]

    def _start(self, data: Rows, random: np.random.RandomState) -> list[Node]:
        some = max(10 * self.batch_size, 200 * self.n_components)
        rows = (
            data[random.choice(len(data), some, replace=False)] if self._uses_batches() and some < len(data) else data
        )
        total = max(len(data), self.total_samples or 0)
        sums = rows.sums(self._shares(rows.rows, random)) * (total / len(rows))
        families: list[Family] = [Dirichlet(), self._covariance.family]
        if _is_em(self):
            families = [Point(family) for family in families]
            found = self._given(sums, self._repaired(families[1], sums, self.n_features_in_))
        else:
            own = self._given(sums, self._covariance.message(sums, self.n_features_in_))
            found = [tuple(a + b for a, b in zip(*pair)) for pair in zip(own, self._priors_known)]
        return [Node(f, n, name=name) for f, n, name in zip(families, found, ("weights", "components"))]

    def _given(self, sums: Tensor, components: Parameters) -> list[Parameters]:
        """Statistics of weights and components; those of the given initial values, where there are any."""
        K, P, kind, weights = self.n_components, self.n_features_in_, self._covariance, sums[:, 0]
        if all(part is None for part in (self.weights_init, self.means_init, self.precisions_init)):
            return [(weights,), components]
        known, _, covariances = kind.summary(components, True, "component", "set precisions_init")
        means, matrices = known.location, chained.to_full_matrices(kind, covariances, K, P)
        if self.weights_init is not None:
            weights = weights.sum() * _shares_of("weights_init", self.weights_init, K).to(sums)
        if self.means_init is not None:
            means = _require_shape("means_init", self.means_init, (K, P)).to(sums) - self._centre
        if self.precisions_init is not None:
            matrices = torch.cholesky_inverse(_roots("precisions_init", self.precisions_init, kind, K, P).to(sums))
        return [(weights,), _statistics(kind, means, matrices, weights)]

    @classmethod
    def from_parameters(
        cls, weights: Any, means: Any, covariances: Any, *, covariance_type: str = "full", **settings: Any
    ) -> GaussianMixture:
        """A mixture of known parameters, in the shapes of the attributes, ready to predict and to sample.

        Args:
            settings: of the estimator.
        """
        places = checks.require_numbers("means", means)
        K, P = _require_shape("means", means, (len(places), places.shape[-1] if places.dim() > 1 else 1)).shape
        model = cls(K, covariance_type=covariance_type, **settings)
        model._check_settings()
        if not _is_em(model):
            raise ValueError(f"from_parameters needs method='em', got {model.method!r}.")
        root = _roots("covariances", covariances, kind := model._covariance, K, P)
        shares = 10 * (K + P) * _shares_of("weights", weights, K)  # rows enough for a posterior with a mode
        model.n_features_in_, model._device, model._centre = P, None, torch.zeros_like(places[0])
        families = Point(Dirichlet()), Point(kind.family)
        parts = (shares,), _statistics(kind, places, root @ root.mT, shares)
        nodes = [Node(f, n, name=m) for f, n, m in zip(families, parts, ("weights", "components"))]
        return model._begun_with(nodes)

    def _shares(self, rows: Tensor, random: np.random.RandomState) -> Tensor:
        """Responsibilities of the components for each row, (K, n)."""
        K, count = self.n_components, len(rows)
        if self.init_params == "random":
            drawn = random.uniform(size=(count, K))  # as in scikit-learn
            return torch.as_tensor(drawn / drawn.sum(1, keepdims=True)).mT.to(rows)
        plain = rows.cpu().numpy()
        if self.init_params == "kmeans":
            means: Any = KMeans(K, n_init=1, random_state=random)  # pyright: ignore[reportArgumentType]
            labels = torch.as_tensor(means.fit(plain).labels_, dtype=torch.long)
        else:
            chosen = (
                kmeans_plusplus(plain, K, random_state=random)[1]
                if self.init_params == "k-means++"
                else random.choice(count, K, replace=False)
            )
            seeds = rows[chosen]
            labels = (seeds.square().sum(1) - 2 * rows @ seeds.mT).argmin(1)
        return rows.new_zeros(K, count).scatter_(0, labels.to(rows.device)[None], 1.0)

    def _repaired(self, family: Family, sums: Tensor, size: int) -> Parameters:
        """Natural parameters of components; a mean row is added to components without rows or without variance."""
        mean = sums.sum(0) / sums[:, 0].sum()
        sums = torch.where(sums[:, :1] > 0, sums, mean)
        for _ in range(2):
            natural = self._covariance.message(sums, size)
            inside = family.in_domain(natural)
            if inside.all():
                return natural
            lacking = ~inside.reshape(len(inside), -1).all(1) if inside.dim() else torch.ones_like(sums[:, 0]) > 0
            sums = sums + lacking[:, None] * mean
        raise ValueError(f"the covariance of X is singular: use a larger reg_covar than {self.reg_covar:g}.")

    def _priors(self, nodes: Sequence[Node]) -> list[Factor]:
        return [] if _is_em(self) else [Prior(node, natural) for node, natural in zip(nodes, self._priors_known)]

    def _data_factor(self, data: Rows, nodes: Sequence[Node], scale: float = 1.0) -> LatentVariableFactor:
        weights, components = nodes
        return MixtureFactor(weights, components, data, scale=scale)

    def _sort_components(self, nodes: Sequence[Node]) -> None:
        weights, components = nodes
        order = weights.natural[0].argsort(descending=True, stable=True)
        weights.natural = (weights.natural[0][order],)
        components.natural = self._covariance.ordered(components.natural, order)

    def _set_attributes(self, nodes: Sequence[Node]) -> None:
        remedy, concentration = "remove outliers, fit groups separately, or increase reg_covar", self._concentration()
        natural, em = nodes[1].natural, _is_em(self)
        known, count, covariances = self._covariance.summary(natural, em, "component", remedy)
        self.weights_ = self._kind(concentration / concentration.sum())
        self.means_ = self._kind(known.location + self._centre)
        self.covariances_ = self._kind(covariances)
        if self.covariance_type in ("full", "tied"):
            root = torch.linalg.cholesky(covariances)
            factor = torch.linalg.solve_triangular(root, torch.eye(root.shape[-1]).to(root), upper=False).mT
            precisions = factor @ factor.mT
        else:
            precisions, factor = 1 / covariances, covariances.rsqrt()
        self.precisions_, self.precisions_cholesky_ = self._kind(precisions), self._kind(factor)
        if not _is_em(self):
            self.weight_concentration_, self.mean_precision_ = self._kind(concentration), self._kind(known.confidence)
            self.degrees_of_freedom_ = self._kind(count)

    def _known(self) -> Components:
        return self._covariance.known(self._nodes[1].natural)

    def _concentration(self) -> Tensor:
        """Numbers that weights are proportional to."""
        return self._nodes[0].natural[0] + (0 if _is_em(self) else 1)

    # --- prediction ---

    def _log_joint(self, X: Any) -> Tensor:
        """log p(x, component), (K, n)."""
        check_is_fitted(self, "means_")
        rows = self._rows_of(X, reset=False)
        rows = rows - self._centre.to(rows)
        known = Components(*[part.to(rows) for part in self._known()])
        weights = self._concentration().to(rows)
        densities = [self._covariance.log_density(part, known, _is_em(self)) for part in self._covariance.chunks(rows)]
        return torch.cat(densities, 1) + (weights.log() - weights.sum().log())[:, None]

    def predict(self, X: Any) -> Any:
        """The most probable component of each row, (n,)."""
        return checks.like(X)(self._log_joint(X).argmax(0))

    def predict_proba(self, X: Any) -> Any:
        """The probability of each component, (n, K), averaged over the posterior."""
        return checks.like(X)(self._log_joint(X).softmax(0).mT)

    def fit_predict(self, X: Any, y: Any = None) -> Any:
        return self.fit(X).predict(X)

    def score_samples(self, X: Any) -> Any:
        """log p(x) of each row, (n,), averaged over the posterior."""
        return checks.like(X)(self._log_joint(X).logsumexp(0))

    def score(self, X: Any, y: Any = None) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The mean of `score_samples`."""
        return self._log_joint(X).logsumexp(0).mean().item()

    def sample(self, n_samples: int = 1) -> tuple[Any, Any]:
        """New rows (n, P) and their components (n,), grouped by component; averaged over the posterior."""
        check_is_fitted(self, "means_")
        checks.require_positive_integer(n_samples=n_samples)
        random, known, size = check_random_state(self.random_state), self._known(), self.n_features_in_
        counts = random.multinomial(n_samples, checks.as_numpy(self.weights_) / checks.as_numpy(self.weights_).sum())
        parts = []
        for k, count in enumerate(counts):
            drawn = torch.as_tensor(random.normal(size=(count, size))).to(self._centre)
            noise = self._covariance.coloured(drawn, known, k)
            if _is_em(self):
                noise = noise / known.weight[k].sqrt()
            else:
                columns = size if self.covariance_type == "diag" else 1
                free = float(self._covariance.free(known, size)[k])
                spread = torch.as_tensor(random.chisquare(free, size=(count, columns))).to(noise)
                noise = noise * ((1 + 1 / known.confidence[k]) / spread).sqrt()
            parts.append(known.location[k] + self._centre + noise)
        labels = torch.arange(len(counts)).repeat_interleave(torch.as_tensor(counts))
        return self._kind(torch.cat(parts)), self._kind(labels)

    def _parameters(self) -> int:
        K, P = self.n_components, self.n_features_in_
        matrix = {"full": K * P * (P + 1) // 2, "tied": P * (P + 1) // 2, "diag": K * P, "spherical": K}
        return matrix[self.covariance_type] + K * P + K - 1

    @available_if(_is_em)
    def bic(self, X: Any) -> float:
        """Bayesian information criterion: -2 log-likelihood + parameters · log n; lower is better. See also `elbo_`."""
        return -2 * self.score(X) * len(X) + self._parameters() * math.log(len(X))

    @available_if(_is_em)
    def aic(self, X: Any) -> float:
        """Akaike information criterion: -2 log-likelihood + 2 parameters; lower is better."""
        return -2 * self.score(X) * len(X) + 2 * self._parameters()


def _require_shape(name: str, value: Any, shape: tuple[int, ...]) -> Tensor:
    given = checks.require_numbers(name, value)
    if given.shape != shape or not torch.isfinite(given).all():
        raise ValueError(f"{name} must be finite numbers of shape {shape}, got shape {tuple(given.shape)}.")
    return given


def _shares_of(name: str, value: Any, count: int) -> Tensor:
    given = _require_shape(name, value, (count,))
    if not ((given >= 0).all() and math.isclose(float(given.sum()), 1.0, rel_tol=1e-6)):
        raise ValueError(f"{name} must be non-negative and sum to 1, got {value!r}.")
    return given


def _roots(name: str, value: Any, kind: Covariance, components: int, size: int) -> Tensor:
    """Lower Cholesky factors (K, P, P) of covariances or precisions in scikit-learn's shapes."""
    given = _require_shape(name, value, kind.shape(components, size))
    matrices = chained.to_full_matrices(kind, given, components, size)
    factors, failed = torch.linalg.cholesky_ex(matrices)
    if failed.any() or not torch.allclose(matrices, matrices.mT, rtol=1e-8):
        raise ValueError(f"{name} must be positive, or symmetric positive definite matrices.")
    return factors


def _statistics(kind: Covariance, means: Tensor, covariances: Tensor, weights: Tensor) -> Parameters:
    """The statistics of rows with these moments; a component of weight zero keeps its shape."""
    return chained.pseudo_statistics(kind, means, covariances, weights.clamp(min=1e-9 * float(weights.sum())))


def _positive(spread: Tensor) -> bool:
    """Whether a matrix is symmetric and positive definite, or all numbers are positive."""
    if not torch.isfinite(spread).all():
        return False
    if spread.dim() < 2:
        return bool((spread > 0).all())
    pivots, info = torch.linalg.cholesky_ex(spread)
    tiny = 1e-14 * spread.diagonal().abs()
    return torch.allclose(spread, spread.mT) and not info and bool((pivots.diagonal().square() > tiny).all())
