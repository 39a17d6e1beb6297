"""Linear Gaussian state-space models with Gaussian or other observations (counts, classes, outliers)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NamedTuple

import torch
from sklearn.utils import Tags
from torch import Tensor

from bayesgrad.families import Parameters
from bayesgrad.inference import ElementwiseFactor, Node, run_to_convergence
from bayesgrad.inference.expectation import Expectation, Moments
from bayesgrad.models import checks, dynamics, kalman
from bayesgrad.models.estimator import Estimator
from bayesgrad.models.filtering import Filter, run_filter
from bayesgrad.models.kalman import Chain, GaussianRows, SiteRows, StateMoments
from bayesgrad.models.observations import QUADRATURE, Observation, get_observation
from bayesgrad.models.process import WithSites
from bayesgrad.models.sequences import Sequences
from bayesgrad.noise import generator_of


class States(NamedTuple):
    """The posterior of the states of a sequence.

    Args:
        mean: (T, D), or (sequences, T, D).
        covariance: (T, D, D), or (sequences, T, D, D).
        log_likelihood: of the sequence, or of each sequence; a lower bound if observations are not Gaussian.
    """

    mean: Any
    covariance: Any
    log_likelihood: Any


@dataclass(eq=False, repr=False)
class LinearStateSpace(Estimator):
    r"""Linear Gaussian state-space models (Kalman filter and smoother), with Gaussian or other observations:

    .. math::
        x_1 \sim N(m, P), \quad x_{t+1} = F x_t + N(0, Q), \quad y_t \sim p(y \mid H x_t)

    With Gaussian observations the posterior of all states is one conjugate step of the learning rule: the Kalman
    filter and smoother. Otherwise each observation has a site, a Gaussian factor of H x_t, and the step is repeated
    until the bound converges. Both take time linear in T, in about 2 √(2T) steps of batched products.

    Args:
        transition: F, (D, D), or (T, D, D) if it varies: entry t leads from time t to time t + 1, as in statsmodels.
        process_covariance: Q, (D, D) or (T, D, D), positive semi-definite.
        observation: H, (K, D) or (T, K, D).
        observation_covariance: R, (K, K) or (T, K, K), positive definite; only for likelihood `"gaussian"`.
        initial_mean: m, (D,), of the state at the first observation; None for zero.
        initial_covariance: P, (D, D); None for the identity. Large numbers cost no digits.
        diffuse: True if all states have an infinite initial variance, or a list of D booleans; their entries of
            `initial_mean` and `initial_covariance` have no effect. The log-likelihood is the limit of
            log p(y) + d/2 log κ for d diffuse states with the initial variance κ → ∞, as in statsmodels. A covariance
            is infinite where the observations do not determine the states. Gaussian observations only.
        likelihood: `"gaussian"`, `"poisson"` (rates e^(Hx)), `"logistic"`, `"probit"`, `"student-t"`, or an instance
            from `models.observations`.
        expectation: how expectations of log p(y | Hx) are computed; None for quadrature.
        max_iter, tol: maximum number of steps and tolerance of the learning rule if observations are not Gaussian.
            `fit` has its own `max_iter` and `tol` for EM.

    Sequences are (T, K), several of the same length (sequences, T, K), or a list of any lengths; (T,) if K = 1. NaN
    marks missing observations. Results are arrays, or tensors if y is a tensor. Matrices that are tensors with a graph
    keep it: `log_likelihood` of Gaussian observations is differentiable. `fit(y, learn=...)` is EM.

    >>> import numpy as np
    >>> model = LinearStateSpace([[1.0]], [[0.5]], [[1.0]], [[1.0]])
    >>> states = model.smooth(np.array([0.0, 1.0, np.nan, 3.0]))
    >>> states.mean[:, 0].round(3).tolist(), round(float(states.log_likelihood), 4)
    ([0.5, 1.0, 1.5, 2.0], -5.4081)
    >>> model.forecast(np.array([0.0, 1.0, np.nan, 3.0]), 2).mean.round(3).tolist()
    [[2.0], [2.0]]

    Reference: Khan and Rue 2023, section 5.1; Durbin and Koopman, 2012, section 5, for diffuse states.
    Checked by: tests/equations/test_state_space.py: dense joints, filterpy, quadrature;
        tests/equations/test_vague_starts.py: statsmodels.
    """

    transition: Any
    process_covariance: Any
    observation: Any
    observation_covariance: Any = None
    _: KW_ONLY
    initial_mean: Any = None
    initial_covariance: Any = None
    diffuse: Any = False
    likelihood: str | Observation = "gaussian"
    expectation: Expectation | None = None
    max_iter: int = 100
    tol: float = 1e-10

    def __post_init__(self) -> None:
        """Checks the parameters and converts them to tensors; `fit` replaces those that it learns."""
        F = checks.require_matrix("transition", self.transition, varying=True)
        H, size = checks.require_matrix("observation", self.observation, varying=True), F.shape[-1]
        if F.shape[-2] != size:
            raise ValueError(f"transition must be square, got shape {tuple(F.shape)}.")
        if H.shape[-1] != size:
            raise ValueError(f"observation must have {size} columns, the size of the state, got {tuple(H.shape)}.")
        given = torch.zeros(size) if self.initial_mean is None else self.initial_mean
        mean = checks.require_numbers("initial_mean", given, live=True).to(F)
        if mean.shape != (size,) or not torch.isfinite(mean).all():
            raise ValueError(f"initial_mean must be {size} finite numbers, got {self.initial_mean!r}.")
        Q = checks.require_covariance("process_covariance", self.process_covariance, size, varying=True)
        P = torch.eye(size).to(F) if self.initial_covariance is None else self.initial_covariance
        P, R = checks.require_covariance("initial_covariance", P, size), None
        chain = Chain(F, Q, mean, P, self._diffuse(size))
        self._observation_model = get_observation(self.likelihood)
        if self.likelihood == "gaussian":
            if self.observation_covariance is None:
                raise ValueError("likelihood='gaussian' needs observation_covariance, got None.")
            given, parts = self.observation_covariance, H.shape[-2]
            R = checks.require_covariance("observation_covariance", given, parts, definite=True, varying=True)
        elif self.observation_covariance is not None:
            raise ValueError(f"observation_covariance needs likelihood='gaussian', got likelihood={self.likelihood!r}.")
        elif chain.diffuse is not None:
            raise ValueError(f"diffuse needs likelihood='gaussian', got {self.likelihood!r}: set initial_covariance.")
        self._matrices = dynamics.Matrices(chain, H, R)
        self._expectation = QUADRATURE if self.expectation is None else self.expectation
        if not isinstance(self._expectation, Expectation):
            raise TypeError(f"expectation must be GaussHermite() or None, got {self.expectation!r}.")
        checks.require_positive_integer(max_iter=self.max_iter)
        checks.require_non_negative(tol=self.tol)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan, tags.input_tags.three_d_array, tags.input_tags.one_d_array = True, True, True
        return tags

    def set_params(self, **params: Any) -> LinearStateSpace:
        """Sets parameters of the constructor; learned matrices are discarded."""
        with checks.restore_on_error(self):
            super().set_params(**params)
            self.__post_init__()
        return self

    def _diffuse(self, size: int) -> Tensor | None:
        marks = torch.as_tensor(math.nan if self.diffuse is None else self.diffuse)
        if marks.dtype != torch.bool or marks.shape not in ((), (size,)):
            raise ValueError(f"diffuse must be True, False or a list of {size} booleans, got {self.diffuse!r}.")
        return marks.expand(size) if bool(marks.any()) else None

    # --- the public interface ---

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        learn: str | Sequence[str] = (),
        max_iter: int = 200,
        tol: float = 1e-6,
        progress: bool | None = None,
    ) -> LinearStateSpace:
        """Stores the smoothed states of X as `means_`, `covariances_`, and their log-likelihood (bound) as `elbo_`.

        Args:
            X: the observations, called y elsewhere.
            y: ignored.
            learn: names of constructor arguments that EM estimates, starting from their current values, or "all" (if y
                is not Gaussian, only those of the chain). The results are also stored as `transition_` and so on, and
                the total bound before the first iteration and after each as `elbos_`.
            max_iter: maximum number of EM iterations.
            tol: stop when the change of the log-likelihood per observed number is below this.
            progress: see `inference.run`.
        """
        if names := dynamics.chosen(learn, self._matrices, self.likelihood):
            self._learn(self._sequences(X), names, max_iter, tol, progress)
        self.means_, self.covariances_, self.elbo_ = self.smooth(X)
        self.n_features_in_ = self._matrices.observation.shape[-2]
        return self

    def _learn(
        self, rows: Sequences, names: Sequence[str], steps: int, tolerance: float, progress: bool | None
    ) -> None:
        def smooth(at: dynamics.Matrices) -> dynamics.Smooth:
            self._matrices = at
            found = self._observed(rows.values)
            states, pairs = found.smoothed(pairs=True)
            assert pairs is not None
            return dynamics.Smooth(states, pairs, found.log_likelihood)

        found, given = self._matrices, (smooth, rows.values, rows.lengths, names)
        try:
            with torch.no_grad():
                found, result = dynamics.run_em(found, *given, steps=steps, tolerance=tolerance, progress=progress)
        finally:
            self._matrices = found
        self.elbos_, self.n_iter_, self.converged_ = result.elbos, result.steps, result.converged
        every = (*found.chain[:2], found.observation, found.noise, *found.chain[2:4])
        learned = {name: value for name, value in zip(dynamics.LEARNABLE, every) if name in names and value is not None}
        vars(self).update({f"{name}_": rows.kind(value) for name, value in learned.items()})

    def _sequences(self, y: Any, ahead: int = 0) -> Sequences:
        """y, which may be as long as the matrices that vary, less `ahead`."""
        rows = Sequences(y, self._matrices.observation.shape[-2])
        for name, part in zip(dynamics.LEARNABLE, (*self._matrices.chain[:2], *self._matrices[1:])):
            if part is not None and part.dim() == 3 and len(part) < len(rows.values) + ahead:
                needed = f"{len(rows.values)} times" + (f" and {ahead} steps ahead" if ahead else "")
                raise ValueError(f"{name} has {len(part)} entries, but y needs {needed}: add entries.")
        return rows

    def _condition(self, y: Any) -> tuple[Sequences, Filter]:
        rows = self._sequences(y)
        return rows, self._observed(rows.values)

    def filter(self, y: Any) -> States:
        """Each state given the observations up to its time (Kalman filter); Gaussian observations only."""
        if self._matrices.noise is None:
            raise ValueError("filter supports only Gaussian observations: use smooth.")
        rows, found = self._condition(y)
        return States(*rows.out(found.filtered(), found.log_likelihood))

    def smooth(self, y: Any) -> States:
        """Each state given all observations."""
        rows, found = self._condition(y)
        return States(*rows.out(found.smoothed()[0], found.log_likelihood))

    def log_likelihood(self, y: Any) -> Any:
        """log p(y) of a sequence or of each sequence; a lower bound if observations are not Gaussian."""
        rows, found = self._condition(y)
        return rows.each(found.log_likelihood)

    def score(self, X: Any, y: Any = None) -> float:
        """The log-likelihood (or bound) of the observations X per observed number. y is ignored."""
        rows, found = self._condition(X)
        if rows.values.isnan().all():
            raise ValueError("X contains only NaN: there is nothing to score.")
        return float(found.log_likelihood.sum() / (~rows.values.isnan()).sum())

    def sample(self, y: Any, n_samples: int = 1, random_state: int = 0) -> Any:
        """Paths of the states given all observations, (n_samples, T, D) or (n_samples, sequences, T, D)."""
        checks.require_positive_integer(n_samples=n_samples)
        rows, (chain, _, R) = self._sequences(y), self._matrices
        length, count = rows.values.shape[:2]
        shape = (count, n_samples, length, len(chain.mean))
        if R is None:
            back = kalman.backward(chain, self._observed(rows.values).filtered())
            return rows.paths(kalman.sampled(back, _noise(shape, chain.mean, random_state).permute(2, 1, 0, 3)))
        # Durbin and Koopman, 2002: a path of the prior, corrected by the smoothed difference of the observations.
        drawn, seen = self._simulated(length, n_samples * count, random_state)
        rest = rows.values[:, None] - seen.unflatten(1, (n_samples, count))
        matrices = self._matrices._replace(chain=chain._replace(mean=torch.zeros_like(chain.mean)))
        states, _ = _gaussian(matrices, rest.flatten(1, 2)).smoothed()
        if not torch.isfinite(states.covariance).all():
            raise ValueError("sample needs observations that determine all diffuse states, got too few of them.")
        return rows.paths((drawn + states.mean).unflatten(1, (n_samples, count)))

    def simulate(self, length: int, n_samples: int = 1, random_state: int = 0) -> tuple[Tensor, Tensor]:
        """Paths (n_samples, T, D) from the model, and observations (n_samples, T, K) of them."""
        checks.require_positive_integer(length=length, n_samples=n_samples)
        if self._matrices.chain.diffuse is not None:
            raise ValueError("simulate needs an initial state with a finite covariance: set diffuse=False.")
        states, seen = self._simulated(length, n_samples, random_state)
        return states.transpose(0, 1), seen.transpose(0, 1)

    def _simulated(self, length: int, count: int, random_state: int) -> tuple[Tensor, Tensor]:
        """States (T, count, D) and observations (T, count, K); diffuse states start at their mean."""
        chain, H, R = self._matrices
        if chain.diffuse is not None:
            known = (~chain.diffuse).to(chain.mean)
            chain = chain._replace(covariance=known[:, None] * chain.covariance * known)
        states = kalman.simulated(chain, _noise((length, count, len(chain.mean)), chain.mean, random_state))
        H = H[:length] if H.dim() == 3 else H
        clean, generator = states @ H.mT, generator_of(random_state, 1)
        if R is None:
            return states, self._observation_model.sample(clean, generator)
        noise = torch.randn(clean.shape, dtype=clean.dtype, generator=generator).to(clean)
        return states, clean + noise @ torch.linalg.cholesky(R[:length] if R.dim() == 3 else R).mT

    def forecast(self, y: Any, steps: int) -> States:
        """The next observations given y: means (steps, K) and covariances including noise.

        For observations that are not Gaussian the covariances are diagonal.
        """
        checks.require_positive_integer(steps=steps)
        rows = self._sequences(y, ahead=steps)
        if len(set(rows.lengths)) > 1:
            raise ValueError(f"forecast needs sequences of equal length, got {rows.lengths}: pass one at a time.")
        found = self._observed(rows.values)
        mean, covariance = (part[-1] for part in found.filtered())
        if not torch.isfinite(covariance).all():
            raise ValueError("forecast needs observations that determine all diffuse states, got too few of them.")
        means, covariances = [], []
        for t in range(rows.lengths[0], rows.lengths[0] + steps):
            (F, Q, *_), _, _ = _at_time(self._matrices, t - 1)
            _, H, R = _at_time(self._matrices, t)
            mean, covariance = kalman.times(F, mean), F @ covariance @ F.mT + Q
            seen, spread = kalman.times(H, mean), H @ covariance @ H.mT
            if R is not None:
                spread = spread + R
            else:
                predicted = self._observation_model.predict(seen, spread.diagonal(dim1=-2, dim2=-1).expand_as(seen))
                seen, spread = predicted.mean, torch.diag_embed(predicted.variance + predicted.noise)
            means.append(seen)
            covariances.append(spread.expand(*seen.shape, len(H)))
        return States(*rows.out(StateMoments(torch.stack(means), torch.stack(covariances)), found.log_likelihood))

    # --- inference ---

    def _observed(self, y: Tensor) -> Filter:
        """The filter of y: (T, sequences, K); its log-likelihood is the bound if observations are not Gaussian."""
        self._observation_model.check(y)
        if self._matrices.noise is not None:
            return _gaussian(self._matrices, y)
        family = ChainWithSites(_like(self._matrices.chain, y), self._matrices.observation.to(y), len(y))
        flat = y.transpose(0, 1).flatten(1)
        known = ~flat.isnan()
        target = torch.where(known, flat, 0)

        def expected(mean: Tensor, variance: Tensor) -> Moments:
            found = self._observation_model.expected(mean, variance, target, self._expectation)
            return Moments(*[torch.where(known, part, 0) for part in found])

        start = tuple(torch.where(known, part, 0) for part in self._observation_model.sites(target))
        node = Node(family, start, name="sites")
        factor = ElementwiseFactor(node, expected)
        result = run_to_convergence(node, [factor], self.max_iter, tolerance=self.tol)
        self.n_iter_ = result.steps
        bound = factor.moments().value.sum(-1) + family.entropy(node.natural)
        return replace(family.at(node.natural).found, log_likelihood=bound)


def _gaussian(matrices: dynamics.Matrices, y: Tensor) -> Filter:
    """The conjugate step."""
    chain, H, R = matrices
    assert R is not None
    return run_filter(_like(chain, y), GaussianRows.of(H.to(y), R.to(y), y), len(y))


def _like(chain: Chain, y: Tensor) -> Chain:
    F, Q, mean, covariance, diffuse = chain
    return Chain(F.to(y), Q.to(y), mean.to(y), covariance.to(y), diffuse)


def _at_time(matrices: dynamics.Matrices, t: int) -> dynamics.Matrices:
    """The matrices at one time."""
    chain, H, R = matrices
    F, Q, H = (part[t] if part.dim() == 3 else part for part in (*chain[:2], H))
    return dynamics.Matrices(chain._replace(transition=F, noise=Q), H, R if R is None or R.dim() == 2 else R[t])


@dataclass(frozen=True, eq=False)
class ChainWithSites(WithSites):
    r"""A chain times Gaussian sites: q(x) = p(x) exp(Σ_t λ1_t'z_t + λ2_t'z_t²) / Z with z_t = H x_t.

    An exponential family with statistics (z, z²), the sites as natural parameters, log Z as its log-partition, and the
    chain as base measure. Its entropy is -KL(q, chain), so a model needs no factor for the chain.

    Args:
        chain: the Gaussian chain of the states.
        observation: H, (K, D).
        length: T; natural parameters are (sequences, T K).
    """

    domain = ", with a positive definite precision of the states"
    prior_name = "chain"

    chain: Chain
    observation: Tensor
    length: int

    def _posterior(self, natural: Parameters) -> _Posterior:
        """The chain given these sites."""
        first, second = (part.unflatten(-1, (self.length, -1)).transpose(0, 1) for part in natural)
        H = self.observation
        rows = SiteRows(H[:, None] if H.dim() == 3 else H[None, None], first[..., None], -2 * second[..., None])
        found = run_filter(self.chain, rows, self.length)
        if first.shape[-1] == 1:  # all pivots are positive
            return _Posterior(found)
        proper = (kalman.least(found.filtered().covariance) >= 0).all(0)
        return _Posterior(replace(found, log_likelihood=torch.where(proper, found.log_likelihood, torch.nan)))

    def moments(self, natural: Parameters) -> tuple[Tensor, Tensor]:
        """Means and variances of z, (sequences, T K)."""
        posterior = self.at(natural)
        if posterior.marginals is None:
            smooth, _ = posterior.found.smoothed()
            H = self.observation[: self.length, None] if self.observation.dim() == 3 else self.observation
            mean, variance = kalman.times(H, smooth.mean), ((H @ smooth.covariance) * H).sum(-1)
            posterior.marginals = mean.transpose(0, 1).flatten(1), variance.transpose(0, 1).flatten(1)
        return posterior.marginals

    def log_partition(self, natural: Parameters) -> Tensor:
        return self.at(natural).found.log_likelihood

    def in_domain(self, natural: Parameters) -> Tensor:
        return torch.isfinite(self.log_partition(natural))


@dataclass
class _Posterior:
    found: Filter
    marginals: tuple[Tensor, Tensor] | None = None


def _noise(shape: tuple[int, ...], like: Tensor, random_state: int) -> Tensor:
    checks.require_integer(random_state=random_state)
    return torch.randn(shape, dtype=like.dtype, generator=generator_of(random_state, 0)).to(like.device)
