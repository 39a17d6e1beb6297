"""Factor analysis and probabilistic PCA, by EM or variational Bayes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags, check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from bayesgrad.families import Gamma, Gaussian, Point
from bayesgrad.inference import Factor, Node, Prior
from bayesgrad.models.checks import (
    as_numpy,
    is_number,
    like,
    require_numbers,
    require_one_of,
    require_positive_integer,
)
from bayesgrad.models.factors import Loadings, RelevancePrior, Rows, ScoresFactor, as_rows, infer
from bayesgrad.models.latent import Latent
from bayesgrad.warning import warn

METHODS = ("em", "vb")
NOISES = ("diagonal", "isotropic")
INITS = ("pca", "random")
NORMAL = Gaussian()
FLOORS = {"diagonal": 0.005, "isotropic": 1e-12}  # defaults of `noise_floor`


@dataclass(eq=False, repr=False)
class FactorAnalysis(ClassNamePrefixFeaturesOutMixin, TransformerMixin, Latent):
    r"""Factor analysis and probabilistic PCA: a few latent scores explain the rows, up to independent noise:

    .. math::
        x = W z + m + e, \quad z \sim N(0, I_K), \quad e_d \sim N(0, 1/\tau_d)

    The bound is maximised over the scores (`factors.ScoresFactor`); W, m and τ are nodes. With `method="em"` these
    are `Point`: maximum likelihood, as in scikit-learn's `FactorAnalysis`; with `noise="isotropic"` it is
    probabilistic PCA, whose closed form is the start. With `method="vb"` rows of [W m] are Gaussian and precisions
    Gamma, and each column of W has its own precision alpha_k, also Gamma, which switches off columns that explain
    nothing: Bishop's Bayesian PCA. An iteration updates [W m] and τ in turn, with new scores before each, so that the
    bound never decreases.

    NaN in X marks missing numbers. They are left out of the density.

    With diagonal noise the likelihood often has its maximum where a column has no noise (a Heywood case; with K = D it
    is one if columns are collinear), and rows that deviate from the training rows there have a density of nearly 0. EM
    therefore maximises the likelihood over noise of at least `noise_floor`, and warns of columns at this bound.

    Args:
        n_components: K; None for the number of columns (minus one with `"vb"`), which fits any covariance matrix.
        method: `"em"` or `"vb"`.
        noise: `"diagonal"`, a τ_d for each column, or `"isotropic"`, one for all.
        init: `"pca"`, principal components of the columns (standardised for diagonal noise), or `"random"`; starts
            after the first are random.
        noise_floor: smallest noise variance of `"em"`, in units of the column's variance (of the mean of all, if
            isotropic); None for 0.005 with diagonal noise, the bound of R's `factanal`, and 1e-12 with isotropic noise,
            which has the mean of what all columns leave.
        relevance_prior, noise_prior: shape and rate of the Gamma priors of alpha_k and τ_d, in data units; `"vb"`.
        mean_precision: of m_d ~ N(mean of the column, 1/mean_precision); `"vb"`.
        n_init, max_iter, tol, random_state, progress, offset, decay, total_samples: see `Latent`.

    Attributes:
        components_: W', (K, D). EM rotates them so that W'diag(τ)W is diagonal, with the largest first; the likelihood
            does not change. With `"vb"` expectations.
        noise_variance_: 1/E[τ], (D,), or a number.
        mean_: m, (D,).
        relevance_: E[alpha], (K,), with `"vb"`: large for columns that are switched off.
        elbo_, elbos_, n_iter_, converged_: see `Latent`.

    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(500, 1)) * [3.0, 2.0, 1.0] + rng.normal(size=(500, 3))
    >>> model = FactorAnalysis(1).fit(X)
    >>> model.components_.round(1).tolist(), model.transform(X[:2]).shape
    ([[2.9, 2.0, 1.0]], (2, 1))

    Reference: Khan and Rue 2023, sections 5.2 and 5.3; Rubin and Thayer, 1982; Tipping and Bishop, 1999; Bishop, 1999.
    Checked by: tests/equations/test_factor_analysis.py and tests/contract/test_factor_analysis.py.
    """

    _schedule = "sequential"
    _fixed_settings = ("n_components", "method", "noise")
    n_components: int | None = None
    _: KW_ONLY
    method: str = "em"
    noise: str = "diagonal"
    init: str = "pca"
    noise_floor: float | None = None
    relevance_prior: tuple[float, float] = (1e-3, 1e-3)
    noise_prior: tuple[float, float] = (1e-3, 1e-3)
    mean_precision: float = 1e-6
    max_iter: int = 1000
    tol: float = 1e-6
    offset: float = 10.0
    decay: float = 0.7

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def fit(self, X: Any, y: Any = None) -> FactorAnalysis:
        """Fits X and discards previous fits. y is ignored."""
        super().fit(X)
        noise = torch.as_tensor(self.noise_variance_, dtype=torch.float64).expand(len(self._unit))
        least = (1 + 1e-6) * self._floor().to(noise)
        if self.method == "em" and (exact := (noise <= least).nonzero().flatten().tolist()):
            some = ", ".join(map(str, exact[:5])) + (", .." if len(exact) > 5 else "")
            warn(
                f"the factors explain {len(exact)} columns but for noise_floor={self._fraction():g} of their variance "
                f"(columns {some}), where the likelihood still rises as their noise falls: leave out columns that "
                "others determine, use fewer components, or set noise_floor."
            )
        return self

    # --- the model ---

    def _read(self, X: Any, *, reset: bool) -> Rows:
        self._check_settings()
        least = 1 if hasattr(self, "_nodes") and not reset else 2
        checked = self._validated(X, reset=reset, ensure_min_samples=least)
        rows, centre = as_rows(checked, X, None if reset else self._centre)
        if reset:
            self._centre, self._starts = centre, 0
            self._remember_kind(X)
            n, D = self._shape = rows.values.shape
            wanted = self._components()
            if wanted > D:
                raise ValueError(f"n_components must be at most the number of columns, {D}, got {wanted}.")
            if wanted >= n and self.n_components is not None:
                raise ValueError(
                    f"n_components must be less than the number of rows, {n}, got {wanted}: use more rows."
                )
        return rows

    def _components(self) -> int:
        if self.n_components is not None:
            return self.n_components
        rows, columns = self._shape  # n centred rows span at most n - 1 directions
        return max(1, min(columns - (self.method == "vb"), rows - 1))

    def _start(self, data: Rows, random: np.random.RandomState) -> list[Node]:
        pca, self._starts = self.init == "pca" and not self._starts, self._starts + 1
        return self._nodes_at(*self._initial_values(data, random, pca), len(data))

    def _nodes_at(self, W: Tensor, variance: Tensor, n: int) -> list[Node]:
        """Nodes at these loadings, (D, K), and variances, (D,), as after n rows."""
        loadings, tau = torch.cat([W, torch.zeros_like(W[:, :1])], 1), 1 / variance
        # The weight of n rows whose scores have mean 0 and variance 1, so that streams weight the start correctly.
        rows = NORMAL.of(loadings, n * tau[:, None, None] * torch.eye(loadings.shape[1]).to(W))
        if self.noise == "isotropic":
            precision = Gamma().of(tau.new_tensor(n * len(tau) / 2 + 1), n * len(tau) / 2 / tau.mean())
        else:
            precision = Gamma().of(torch.full_like(tau, n / 2 + 1), n / 2 / tau)
        if self.method == "em":
            return [Node(Point(NORMAL), rows, name="loadings"), Node(Point(Gamma()), precision, name="noise")]
        shape, rate = self.relevance_prior
        squares = W.square().sum(0) + (variance / n).sum()
        alpha = Gamma().of(torch.full_like(squares, shape + len(W) / 2), rate + squares / 2)
        return [
            Node(NORMAL, rows, name="loadings"),
            Node(Gamma(), precision, name="noise"),
            Node(Gamma(), alpha, name="relevance"),
        ]

    @classmethod
    def from_parameters(cls, components: Any, mean: Any, noise_variance: Any, **settings: Any) -> FactorAnalysis:
        """A model of known parameters, in the shapes of the attributes, ready to transform, to score and to sample.

        `components_` are those given up to a rotation, which changes neither the density nor the covariance.

        Args:
            noise_variance: (D,), or a number for isotropic noise.
            settings: of the estimator.
        """
        W, centre, noise = (
            require_numbers(name, value)
            for name, value in (("components", components), ("mean", mean), ("noise_variance", noise_variance))
        )
        if W.dim() != 2 or centre.shape != (W.shape[1],) or noise.shape not in ((), centre.shape):
            shapes = ", ".join(str(tuple(part.shape)) for part in (W, centre, noise))
            raise ValueError(f"components (K, D), mean (D,) and noise_variance (D,) or () are needed, got {shapes}.")
        if not (torch.isfinite(W).all() and torch.isfinite(centre).all() and (noise > 0).all()):
            raise ValueError("components and mean must be finite and noise_variance positive: check the parameters.")
        model = cls(len(W), noise="diagonal" if noise.dim() else "isotropic", **settings)
        model._check_settings()
        if model.method != "em":
            raise ValueError(f"from_parameters needs method='em', got {model.method!r}.")
        D = model.n_features_in_ = len(centre)
        model._shape, model._device, model._centre, model._starts = (10 * (D + len(W)), D), None, centre, 0
        variance = noise.expand(D)
        model._unit = variance + W.square().sum(0)
        return model._begun_with(model._nodes_at(W.mT, variance, model._shape[0]))

    def _initial_values(self, data: Rows, random: np.random.RandomState, pca: bool) -> tuple[Tensor, Tensor]:
        """Initial W (D, K) and noise variances (D,), relative to each column's variance if noise is diagonal."""
        X, (n, D), K = data.values, data.values.shape, self._components()
        counts = n if data.observed is None else data.observed.sum(0).clamp(min=1)
        unit = X.square().sum(0) / counts
        usual = unit.mean() if unit.any() else torch.ones_like(unit[0])
        unit = torch.where(unit > 0, unit, usual) if self.noise == "diagonal" else usual.expand(D)
        self._unit, least = unit, self._fraction()
        if not pca:
            W = torch.as_tensor(random.normal(size=(D, K)) / K**0.5).to(X)
            return unit.sqrt()[:, None] * W, unit * max(least, 0.5)
        values, directions = _spectrum(X / unit.sqrt())
        values = torch.cat([values / n, values.new_zeros(D - len(values))])
        rest = values[K:].mean() if K < D else values[-1] / 2
        count = min(K, len(directions))
        W = directions[:count].mT * (values[:count] - rest).clamp(min=1e-6).sqrt()
        if W.shape[1] < K:  # fewer rows than components
            W = torch.cat([W, 1e-3 * torch.as_tensor(random.normal(size=(D, K - W.shape[1]))).to(X)], 1)
        noise = rest if self.noise == "isotropic" else (1 - W.square().sum(1)).clamp(min=0.05)
        return unit.sqrt()[:, None] * W, unit * noise.clamp(min=least)

    def _fraction(self) -> float:
        """The smallest noise of EM in units of `_unit`."""
        return FLOORS[self.noise] if self.noise_floor is None else self.noise_floor

    def _floor(self) -> Tensor:
        """The smallest noise variances, (D,)."""
        return self._fraction() * self._unit

    def _priors(self, nodes: Sequence[Node]) -> list[Factor]:
        if self.method == "em":
            return []
        loadings, noise, relevance = nodes
        of = [Gamma().of(*map(self._centre.new_tensor, prior)) for prior in (self.noise_prior, self.relevance_prior)]
        return [
            RelevancePrior(loadings, relevance, torch.zeros_like(self._centre), self.mean_precision),
            Prior(noise, of[0]),
            Prior(relevance, of[1]),
        ]

    def _data_factor(self, data: Rows, nodes: Sequence[Node], scale: float = 1.0) -> ScoresFactor:
        return ScoresFactor(data, nodes[0], nodes[1], scale, floor=self._floor() if self.method == "em" else 0.0)

    def _after_iteration(self, nodes: Sequence[Node]) -> None:
        """Rotates W so that Σ_d E[w_d w_d'] is diagonal, and updates alpha to its optimum.

        The data term is invariant to rotations of W and z, but the bound at the optimal alpha contains
        -Σ_k log(b + Σ_d E[W_dk²]/2), which is highest in the eigenbasis (Hadamard's inequality). Iterations alone
        rotate W slowly.
        """
        if self.method == "em":
            return
        loadings, _, relevance = nodes
        K, (shape, rate) = loadings.natural[0].shape[1] - 1, self.relevance_prior
        squares, vectors = torch.linalg.eigh(loadings.mean[1].sum(0)[:K, :K])
        rotation = torch.eye(K + 1).to(vectors)
        rotation[:K, :K] = vectors.flip(1)
        loadings.natural = loadings.natural[0] @ rotation, rotation.mT @ loadings.natural[1] @ rotation
        squares = squares.flip(0)
        relevance.natural = Gamma().of(torch.full_like(squares, shape + len(self._centre) / 2), rate + squares / 2)

    def _set_attributes(self, nodes: Sequence[Node]) -> None:
        known = Loadings.of(nodes[0], nodes[1])
        W, mean, variance = known.first[:, :-1], known.first[:, -1] + self._centre, 1 / known.precision
        self._rotation = torch.eye(W.shape[1]).to(W)
        if self.method == "em":
            left, _, right = torch.linalg.svd(W / variance.sqrt()[:, None], full_matrices=False)
            largest = left.abs().argmax(0)
            signs = left.gather(0, largest[None])[0].sign()
            self._rotation = right.mT * torch.where(signs == 0, 1.0, signs)
        else:
            self.relevance_ = self._kind(nodes[2].mean[1].clone())
        self.components_ = self._kind((W @ self._rotation).mT.contiguous())
        self.mean_ = self._kind(mean)
        self.noise_variance_ = float(variance[0]) if self.noise == "isotropic" else self._kind(variance)

    # --- prediction ---

    def _centred(self, X: Any) -> Rows:
        check_is_fitted(self)
        return as_rows(self._validated(X), X, self._centre)[0]

    def _point(self) -> Loadings:
        """The published parameters, with means relative to the centre."""
        W, mean = (torch.as_tensor(part).to(self._centre) for part in (self.components_.T, self.mean_))
        variance = torch.as_tensor(self.noise_variance_, dtype=W.dtype, device=W.device).expand(len(W))
        return Loadings.at(torch.cat([W, (mean - self._centre)[:, None]], 1), 1 / variance)

    def transform(self, X: Any) -> Any:
        """E[z | x] of each row, (n, K); NaN in X marks missing numbers."""
        rows = self._centred(X)
        return like(X)(infer(rows, Loadings.of(self._nodes[0], self._nodes[1]))[0] @ self._rotation)

    def inverse_transform(self, Z: Any) -> Any:
        """W z + m, (n, D); for the scores of rows with missing numbers it imputes them."""
        check_is_fitted(self)
        loadings = self._point().first
        scores = torch.as_tensor(as_numpy(Z)).to(loadings)
        if scores.dim() != 2 or scores.shape[1] != loadings.shape[1] - 1:
            raise ValueError(
                f"Z must have {loadings.shape[1] - 1} columns, the number of components, got {tuple(scores.shape)}."
            )
        return like(Z)(scores @ loadings[:, :-1].mT + loadings[:, -1] + self._centre)

    def score_samples(self, X: Any) -> Any:
        """log N(x | mean_, get_covariance()) of the observed part of each row, (n,)."""
        rows = self._centred(X)
        return like(X)(infer(rows, self._point())[-1])

    def score(self, X: Any, y: Any = None) -> float:
        """The mean of `score_samples`. y is ignored."""
        return float(self.score_samples(X).mean())

    def get_covariance(self) -> Any:
        """W W' + diag(noise), (D, D)."""
        check_is_fitted(self)
        known = self._point()
        W = known.first[:, :-1]
        return like(self.mean_)(W @ W.mT + torch.diag(1 / known.precision))

    def get_precision(self) -> Any:
        """The inverse of `get_covariance`, by a K x K system."""
        check_is_fitted(self)
        known = self._point()
        tau, W = known.precision, known.first[:, :-1]
        white = tau[:, None] * W
        factor = torch.linalg.cholesky(torch.eye(W.shape[1]).to(W) + W.mT @ white)
        half = torch.linalg.solve_triangular(factor, white.mT, upper=False)
        return like(self.mean_)(torch.diag(tau) - half.mT @ half)

    def sample(self, n_samples: int = 1) -> Any:
        """Samples from the model, (n, D), with `random_state`."""
        check_is_fitted(self)
        require_positive_integer(n_samples=n_samples)
        random, known = check_random_state(self.random_state), self._point()
        D, K = known.first.shape[0], known.first.shape[1] - 1
        z, e = (torch.as_tensor(random.normal(size=(n_samples, size))).to(known.first) for size in (K, D))
        drawn = z @ known.first[:, :-1].mT + known.first[:, -1] + self._centre + e / known.precision.sqrt()
        return like(self.mean_)(drawn)

    def _check_settings(self) -> None:
        require_one_of(self, method=METHODS, noise=NOISES, init=INITS)
        if self.n_components is not None:
            require_positive_integer(n_components=self.n_components)
        for name in ("relevance_prior", "noise_prior"):
            given = getattr(self, name)
            pair = require_numbers(name, given)
            if pair.shape != (2,) or not ((pair > 0) & torch.isfinite(pair)).all():
                raise ValueError(f"{name} must be a positive shape and rate, got {given!r}.")
        floor = self.noise_floor
        if floor is not None and not (is_number(floor) and 0 < floor < 1):
            raise ValueError(f"noise_floor must be a number between 0 and 1, or None, got {floor!r}.")
        if not (is_number(self.mean_precision) and self.mean_precision > 0):
            raise ValueError(f"mean_precision must be a positive number, got {self.mean_precision!r}.")


def _spectrum(X: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues of X'X, largest first, and its eigenvectors as rows, min(n, D) of them."""
    tall = len(X) >= X.shape[1]
    values, vectors = torch.linalg.eigh(X.mT @ X if tall else X @ X.mT)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    if tall:
        return values, vectors.mT
    return values, (vectors.mT @ X) / values.sqrt().clamp(min=torch.finfo(X.dtype).tiny ** 0.5)[:, None]
