"""Linear Gaussian state-space models with Gaussian or other observations (counts, classes, outliers)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayesgrad.families import Parameters
from bayesgrad.families.gaussian import LOG_2PI
from bayesgrad.inference import ElementwiseFactor, Node, run_to_convergence
from bayesgrad.inference.expectation import Expectation, Moments
from bayesgrad.models import checks, dynamics, kalman
from bayesgrad.models.estimator import Estimator
from bayesgrad.models.kalman import Chain, StateMoments
from bayesgrad.models.observations import QUADRATURE, Observation, get_observation
from bayesgrad.models.process import WithSites
from bayesgrad.noise import seed32


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
        x_1 \sim N(m, P), \quad x_t = F x_{t-1} + N(0, Q), \quad y_t \sim p(y \mid H x_t)

    With Gaussian observations the posterior of all states is one conjugate step of the learning rule: the Kalman
    filter and the Rauch-Tung-Striebel smoother. Otherwise each observation has a site, a Gaussian factor of H x_t, and
    the step is repeated until the bound converges. Both take time linear in T, in log2(T) rounds of batched products.

    Args:
        transition: F, (D, D).
        process_covariance: Q, (D, D), positive semi-definite.
        observation: H, (K, D).
        observation_covariance: R, (K, K), positive definite; only for likelihood `"gaussian"`.
        initial_mean: m, (D,), of the state at the first observation; None for zero.
        initial_covariance: P, (D, D); None for the identity.
        likelihood: `"gaussian"`, `"poisson"` (rates e^(Hx)), `"logistic"`, `"probit"`, `"student-t"`, or an instance
            from `models.observations`.
        expectation: how expectations of log p(y | Hx) are computed; None for quadrature.
        max_iter, tol: maximum number of steps and tolerance of the learning rule if observations are not Gaussian.
            `fit` has its own `max_iter` and `tol` for EM.

    Sequences are (T, K), several of the same length (sequences, T, K), or a list of any lengths; (T,) if K = 1. NaN
    marks missing observations. Results are arrays, or tensors if y is a tensor. Matrices that are tensors with a graph
    keep it: `log_likelihood` of Gaussian observations is differentiable. `fit(y, learn=...)` is EM.

    >>> model = LinearStateSpace([[1.0]], [[0.5]], [[1.0]], [[1.0]])
    >>> states = model.smooth(np.array([0.0, 1.0, np.nan, 3.0]))
    >>> states.mean[:, 0].round(3).tolist(), round(float(states.log_likelihood), 4)
    ([0.5, 1.0, 1.5, 2.0], -5.4081)
    >>> model.forecast(np.array([0.0, 1.0, np.nan, 3.0]), 2).mean.round(3).tolist()
    [[2.0], [2.0]]

    Reference: Khan and Rue 2023, section 5.1; Särkkä and García-Fernández, 2021.
    Checked by: tests/equations/test_state_space.py: dense joints, filterpy, quadrature.
    """

    transition: Any
    process_covariance: Any
    observation: Any
    observation_covariance: Any = None
    _: KW_ONLY
    initial_mean: Any = None
    initial_covariance: Any = None
    likelihood: str | Observation = "gaussian"
    expectation: Expectation | None = None
    max_iter: int = 100
    tol: float = 1e-10

    def __post_init__(self) -> None:
        """Checks the parameters and converts them to tensors; `fit` replaces those that it learns."""
        F = checks.require_matrix("transition", self.transition)
        H, size = checks.require_matrix("observation", self.observation), len(F)
        if F.shape != (size, size):
            raise ValueError(f"transition must be square, got shape {tuple(F.shape)}.")
        if H.shape[1] != size:
            raise ValueError(f"observation must have {size} columns, the size of the state, got {tuple(H.shape)}.")
        given = torch.zeros(size) if self.initial_mean is None else self.initial_mean
        mean = checks.require_numbers("initial_mean", given, live=True).to(F)
        if mean.shape != (size,) or not torch.isfinite(mean).all():
            raise ValueError(f"initial_mean must be {size} finite numbers, got {self.initial_mean!r}.")
        Q = checks.require_covariance("process_covariance", self.process_covariance, size)
        P = torch.eye(size).to(F) if self.initial_covariance is None else self.initial_covariance
        chain, R = Chain(F, Q, mean, checks.require_covariance("initial_covariance", P, size)), None
        self._observation_model = get_observation(self.likelihood)
        if self.likelihood == "gaussian":
            if self.observation_covariance is None:
                raise ValueError("likelihood='gaussian' needs observation_covariance, got None.")
            given = self.observation_covariance
            R = checks.require_covariance("observation_covariance", given, len(H), definite=True)
        elif self.observation_covariance is not None:
            raise ValueError(f"observation_covariance needs likelihood='gaussian', got likelihood={self.likelihood!r}.")
        self._matrices = dynamics.Matrices(chain, H, R)
        self._expectation = QUADRATURE if self.expectation is None else self.expectation
        if not isinstance(self._expectation, Expectation):
            raise TypeError(f"expectation must be GaussHermite() or None, got {self.expectation!r}.")
        checks.require_positive_integer(max_iter=self.max_iter)
        checks.require_non_negative(tol=self.tol)

    def set_params(self, **params: Any) -> LinearStateSpace:
        """Sets parameters of the constructor; learned matrices are discarded."""
        with checks.restore_on_error(self):
            super().set_params(**params)
            self.__post_init__()
        return self

    # --- the public interface ---

    def fit(
        self,
        y: Any,
        *,
        learn: str | Sequence[str] = (),
        max_iter: int = 200,
        tol: float = 1e-6,
        progress: bool | None = None,
    ) -> LinearStateSpace:
        """Stores the smoothed states of y as `means_`, `covariances_`, and their log-likelihood (bound) as `elbo_`.

        Args:
            learn: names of constructor arguments that EM estimates, starting from their current values, or "all" (if y
                is not Gaussian, only those of the chain). The results are also stored as `transition_` and so on, and
                the total bound before the first iteration and after each as `elbos_`.
            max_iter: maximum number of EM iterations.
            tol: stop when the change of the log-likelihood per observed number is below this.
            progress: see `inference.run`.
        """
        if names := dynamics.chosen(learn, None if self._matrices.noise is not None else self.likelihood):
            self._learn(_Rows(y, len(self._matrices.observation)), names, max_iter, tol, progress)
        self.means_, self.covariances_, self.elbo_ = self.smooth(y)
        return self

    def _learn(self, rows: _Rows, names: Sequence[str], steps: int, tolerance: float, progress: bool | None) -> None:
        def smooth(at: dynamics.Matrices) -> dynamics.Smooth:
            self._matrices = at
            filtered, log_likelihood = self._observed(rows.values)
            return dynamics.Smooth(*kalman.smoothed(kalman.backward(at.chain, filtered)), log_likelihood)

        found, given = self._matrices, (smooth, rows.values, rows.lengths, names)
        try:
            with torch.no_grad():
                found, result = dynamics.run_em(found, *given, steps=steps, tolerance=tolerance, progress=progress)
        finally:
            self._matrices = found
        self.elbos_, self.n_iter_, self.converged_ = result.elbos, result.steps, result.converged
        every = (*found.chain[:2], found.observation, found.noise, *found.chain[2:])
        learned = {name: value for name, value in zip(dynamics.LEARNABLE, every) if name in names and value is not None}
        vars(self).update({f"{name}_": rows.kind(value) for name, value in learned.items()})

    def _condition(self, y: Any) -> tuple[_Rows, StateMoments, Tensor]:
        """y, the filtered states, and the log-likelihood of each sequence."""
        rows = _Rows(y, len(self._matrices.observation))
        return rows, *self._observed(rows.values)

    def filter(self, y: Any) -> States:
        """Each state given the observations up to its time (Kalman filter); Gaussian observations only."""
        if self._matrices.noise is None:
            raise ValueError("filter supports only Gaussian observations: use smooth.")
        rows, filtered, log_likelihood = self._condition(y)
        return rows.out(filtered, log_likelihood)

    def smooth(self, y: Any) -> States:
        """Each state given all observations."""
        rows, filtered, log_likelihood = self._condition(y)
        smooth, _ = kalman.smoothed(kalman.backward(self._matrices.chain, filtered))
        return rows.out(smooth, log_likelihood)

    def log_likelihood(self, y: Any) -> Any:
        """log p(y) of a sequence or of each sequence; a lower bound if observations are not Gaussian."""
        rows, _, log_likelihood = self._condition(y)
        return rows.each(log_likelihood)

    def score(self, y: Any) -> float:
        """The log-likelihood (or bound) per observed number."""
        rows, _, log_likelihood = self._condition(y)
        if rows.values.isnan().all():
            raise ValueError("y contains only NaN: there is nothing to score.")
        return float(log_likelihood.sum() / (~rows.values.isnan()).sum())

    def sample(self, y: Any, n_samples: int = 1, random_state: int = 0) -> Any:
        """Paths of the states given all observations, (n_samples, T, D) or (n_samples, sequences, T, D)."""
        checks.require_positive_integer(n_samples=n_samples)
        rows, filtered, _ = self._condition(y)
        noise = _noise((len(rows.values), n_samples, *filtered.mean.shape[1:]), filtered.mean, random_state)
        return rows.paths(kalman.sampled(kalman.backward(self._matrices.chain, filtered), noise))

    def simulate(self, length: int, n_samples: int = 1, random_state: int = 0) -> tuple[Tensor, Tensor]:
        """Paths (n_samples, T, D) from the model, and observations (n_samples, T, K) of them."""
        checks.require_positive_integer(length=length, n_samples=n_samples)
        chain, H, R = self._matrices
        noise = _noise((length, n_samples, len(chain.mean)), chain.mean, random_state)
        states = kalman.simulated(chain, noise).transpose(0, 1)
        clean, generator = states @ H.mT, torch.Generator().manual_seed(seed32(random_state) + 1)
        if R is None:
            return states, self._observation_model.sample(clean, generator)
        noise = torch.randn(clean.shape, dtype=clean.dtype, generator=generator).to(clean)
        return states, clean + noise @ torch.linalg.cholesky(R).mT

    def forecast(self, y: Any, steps: int) -> States:
        """The next observations given y: means (steps, K) and covariances including noise.

        For observations that are not Gaussian the covariances are diagonal.
        """
        checks.require_positive_integer(steps=steps)
        rows, filtered, log_likelihood = self._condition(y)
        if len(set(rows.lengths)) > 1:
            raise ValueError(f"forecast needs sequences of equal length, got {rows.lengths}: pass one at a time.")
        (F, Q, *_), H, R = self._matrices
        mean, covariance = filtered.mean[-1], filtered.covariance[-1]
        means, covariances = [], []
        for _ in range(steps):
            mean, covariance = (F @ mean[..., None])[..., 0], F @ covariance @ F.mT + Q
            seen, spread = (H @ mean[..., None])[..., 0], H @ covariance @ H.mT
            if R is not None:
                spread = spread + R
            else:
                found = self._observation_model.predict(seen, spread.diagonal(dim1=-2, dim2=-1).expand_as(seen))
                seen, spread = found.mean, torch.diag_embed(found.variance + found.noise)
            means.append(seen)
            covariances.append(spread.expand(*seen.shape, len(H)))
        return rows.out(StateMoments(torch.stack(means), torch.stack(covariances)), log_likelihood)

    # --- inference ---

    def _observed(self, y: Tensor) -> tuple[StateMoments, Tensor]:
        """The filtered states and the log-likelihood, (sequences,), of y: (T, sequences, K)."""
        chain, H, R = self._matrices
        chain = Chain(*[part.to(y) for part in chain])
        self._observation_model.check(y)
        if R is not None:
            return _gaussian(chain, H.to(y), R.to(y), y)
        family = ChainWithSites(chain, H.to(y), len(y))
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
        return family.at(node.natural).filtered, bound


def _gaussian(chain: Chain, H: Tensor, R: Tensor, y: Tensor) -> tuple[StateMoments, Tensor]:
    """The conjugate step, with sites H'R^-1 y and H'R^-1 H of the observed numbers."""
    known = ~y.isnan()
    if known.all():
        noise, seen = R[None, None], H[None, None]
    else:  # a missing number gets unit noise and a row of zeros in H
        both = known[..., :, None] & known[..., None, :]
        noise = torch.where(both, R, torch.eye(len(R)).to(R))
        seen = torch.where(known[..., None], H, 0)
    y = torch.where(known, y, 0)
    found = kalman.observed(chain, seen, noise, y)
    ahead = kalman.predicted(chain, found)
    error = y - (seen @ ahead.mean[..., None])[..., 0]
    factor = torch.linalg.cholesky(seen @ ahead.covariance @ seen.mT + noise)
    white = torch.linalg.solve_triangular(factor, error[..., None], upper=False)[..., 0]
    volume = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    terms = white.square().sum(-1) + volume + LOG_2PI * known.sum(-1).to(y)
    return found, -terms.sum(0) / 2


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
        h, J = first @ H, H.mT @ (-2 * second[..., None] * H)
        found = kalman.filtered(self.chain, h, J)
        return _Posterior(found, kalman.log_partition(kalman.predicted(self.chain, found), found, h, J))

    def moments(self, natural: Parameters) -> tuple[Tensor, Tensor]:
        """Means and variances of z, (sequences, T K)."""
        posterior = self.at(natural)
        if posterior.marginals is None:
            smooth, _ = kalman.smoothed(kalman.backward(self.chain, posterior.filtered))
            H = self.observation
            mean, variance = smooth.mean @ H.mT, ((H @ smooth.covariance) * H).sum(-1)
            posterior.marginals = mean.transpose(0, 1).flatten(1), variance.transpose(0, 1).flatten(1)
        return posterior.marginals

    def log_partition(self, natural: Parameters) -> Tensor:
        return self.at(natural).log_partition

    def in_domain(self, natural: Parameters) -> Tensor:
        return torch.isfinite(self.log_partition(natural))


@dataclass
class _Posterior:
    filtered: StateMoments
    log_partition: Tensor
    marginals: tuple[Tensor, Tensor] | None = None


class _Rows:
    """Sequences as one tensor (T, sequences, K), and the conversion back."""

    def __init__(self, y: Any, parts: int) -> None:
        self.many = isinstance(y, (list, tuple)) and bool(y) and not np.isscalar(y[0]) and y[0] is not None
        items: Sequence[Any] = y if self.many else [y]
        self.numpy = not any(isinstance(item, Tensor) for item in items)
        tensors = [_rows(item, parts) for item in items]
        self.lengths = [len(item) for item in tensors]
        self.single = not self.many and tensors[0].dim() == 2
        if self.many:
            if any(item.dim() != 2 for item in tensors):
                raise ValueError("each sequence of a list must have shape (T, K) or (T,).")
            longest = max(self.lengths)
            gaps = [item.new_full((longest - len(item), parts), math.nan) for item in tensors]
            self.values = torch.stack([torch.cat(pair) for pair in zip(tensors, gaps)], 1)
        else:
            whole = tensors[0]
            self.values = whole[:, None] if self.single else whole.transpose(0, 1)
            self.lengths = [len(self.values)] * self.values.shape[1]
        if bool(self.values.isinf().any()):
            raise ValueError("y contains infinity: use NaN for missing observations.")

    def kind(self, value: Tensor) -> Any:
        return value.detach().numpy() if self.numpy else value

    def each(self, value: Tensor) -> Any:
        return self.kind(value[0] if self.single else value)

    def _cut(self, value: Tensor) -> Any:
        """(T, sequences, ...) in the layout of y."""
        if self.single:
            return self.kind(value[:, 0])
        if self.many and len(value) == max(self.lengths):
            return [self.kind(value[:n, k]) for k, n in enumerate(self.lengths)]
        return self.kind(value.transpose(0, 1))

    def out(self, moments: StateMoments, log_likelihood: Tensor) -> States:
        mean, covariance = moments
        covariance = covariance.expand(*mean.shape, mean.shape[-1])
        return States(self._cut(mean), self._cut(covariance), self.each(log_likelihood))

    def paths(self, paths: Tensor) -> Any:
        """(T, n_samples, sequences, D) as (n_samples, ...)."""
        if self.single:
            return self.kind(paths[:, :, 0].transpose(0, 1))
        if self.many:
            return [self.kind(paths[:n, :, k].transpose(0, 1)) for k, n in enumerate(self.lengths)]
        return self.kind(paths.permute(1, 2, 0, 3))


def _rows(y: Any, parts: int) -> Tensor:
    rows = checks.require_numbers("y", y, live=True)
    if rows.dim() == 1 and parts == 1:
        rows = rows[:, None]
    if rows.dim() not in (2, 3) or rows.shape[-1] != parts or not rows.numel():
        raise ValueError(f"y must have one row per time and {parts} columns, got shape {tuple(rows.shape)}.")
    return rows


def _noise(shape: tuple[int, ...], like: Tensor, random_state: int) -> Tensor:
    checks.require_integer(random_state=random_state)
    generator = torch.Generator().manual_seed(seed32(random_state))
    return torch.randn(shape, dtype=like.dtype, generator=generator).to(like.device)
