"""Linear Gaussian dynamics, seen through Gaussian noise or as counts, classes, and values with outliers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from bayesgrad.families import Family, Parameters
from bayesgrad.families.gaussian import LOG_2PI
from bayesgrad.inference import ElementwiseFactor, Node, run_to_convergence
from bayesgrad.inference.expectation import Expectation, Moments
from bayesgrad.models import dynamics, kalman
from bayesgrad.models.checks import (
    require_covariance,
    require_matrix,
    require_numbers,
    require_seed,
    require_tolerance,
    require_whole,
)
from bayesgrad.models.kalman import Beliefs, Chain
from bayesgrad.models.observations import QUADRATURE, Observation, named
from bayesgrad.noise import seed32


class States(NamedTuple):
    """What is believed of the states of a sequence.

    Args:
        mean: (T, D), or (sequences, T, D).
        covariance: (T, D, D), or (sequences, T, D, D).
        log_likelihood: of the sequence, or of each; where observations are not Gaussian, its lower bound.
    """

    mean: Any
    covariance: Any
    log_likelihood: Any


class LinearStateSpace:
    r"""Hidden states that move linearly, and what is observed of them:

    .. math::
        x_1 \sim N(m, P), \quad x_t = F x_{t-1} + N(0, Q), \quad y_t \sim p(y \mid H x_t)

    With Gaussian observations the belief about all states is one conjugate step of the learning rule, the Kalman filter
    and the Rauch-Tung-Striebel smoother. With others each observation has a site, a Gaussian factor in H x_t, and
    `inference.run` repeats the step until the bound settles. Both take time linear in T, in log2(T) rounds of batched
    products.

    Args:
        transition: F, (D, D).
        process_noise: Q, (D, D), positive semi-definite.
        observation: H, (K, D).
        observation_noise: R, (K, K), positive definite; for likelihood `"gaussian"` alone.
        initial_mean: m, (D,), of the state at the first observation; None: zero.
        initial_covariance: P, (D, D); None: the identity.
        likelihood: `"gaussian"`, `"poisson"` (rates e^(Hx)), `"logistic"`, `"probit"`, `"student-t"`, or one of
            `models.observations` with numbers of your choice.
        expectation: how expectations of log p(y | Hx) are taken; None: quadrature.
        steps, tolerance: of `inference.run`, where it is needed.

    Sequences are (T, K), several of one length (sequences, T, K), or a list of any lengths; (T,) where K = 1. NaN is an
    observation that is missing. Arrays in, arrays out; tensors in, tensors out. Matrices that are tensors with a graph
    keep it: `log_likelihood` of Gaussian observations can be differentiated. `fit(y, learn=...)` is EM.

    >>> model = LinearStateSpace([[1.0]], [[0.5]], [[1.0]], [[1.0]])
    >>> states = model.smooth(np.array([0.0, 1.0, np.nan, 3.0]))
    >>> states.mean[:, 0].round(3).tolist(), round(float(states.log_likelihood), 4)
    ([0.5, 1.0, 1.5, 2.0], -5.4081)
    >>> model.forecast(np.array([0.0, 1.0, np.nan, 3.0]), 2).mean.round(3).tolist()
    [[2.0], [2.0]]

    Reference: 002, section 5.1; Särkkä and García-Fernández, 2021.
    Checked by: tests/equations/test_state_space.py: dense joints, filterpy, quadrature.
    """

    def __init__(
        self,
        transition: Any,
        process_noise: Any,
        observation: Any,
        observation_noise: Any = None,
        *,
        initial_mean: Any = None,
        initial_covariance: Any = None,
        likelihood: str | Observation = "gaussian",
        expectation: Expectation | None = None,
        steps: int = 100,
        tolerance: float = 1e-10,
    ) -> None:
        F, H = require_matrix("transition", transition), require_matrix("observation", observation)
        size = len(F)
        if F.shape != (size, size):
            raise ValueError(f"transition must be square, got shape {tuple(F.shape)}.")
        if H.shape[1] != size:
            raise ValueError(f"observation must have {size} columns, as the state has parts, got {tuple(H.shape)}.")
        given = torch.zeros(size) if initial_mean is None else initial_mean
        mean = require_numbers("initial_mean", given, live=True).to(F)
        if mean.shape != (size,) or not torch.isfinite(mean).all():
            raise ValueError(f"initial_mean must be {size} finite numbers, got {initial_mean!r}.")
        Q = require_covariance("process_noise", process_noise, size)
        P = torch.eye(size).to(F) if initial_covariance is None else initial_covariance
        self.chain = Chain(F, Q, mean, require_covariance("initial_covariance", P, size))
        self.observation, self.likelihood, self._sees = H, likelihood, named(likelihood)
        self.observation_noise: Tensor | None = None
        if likelihood == "gaussian":
            if observation_noise is None:
                raise ValueError("observation_noise must be given for likelihood='gaussian'.")
            self.observation_noise = require_covariance("observation_noise", observation_noise, len(H), definite=True)
        elif observation_noise is not None:
            raise ValueError(f"observation_noise is for likelihood='gaussian', got likelihood={likelihood!r}.")
        self.expectation = QUADRATURE if expectation is None else expectation
        if not isinstance(self.expectation, Expectation):
            raise TypeError(f"expectation must be GaussHermite() or None, got {expectation!r}.")
        require_whole(steps=steps)
        require_tolerance(tolerance=tolerance)
        self.steps, self.tolerance = steps, tolerance

    # --- what is asked of it ---

    def fit(
        self,
        y: Any,
        *,
        learn: str | Sequence[str] = (),
        max_iter: int = 200,
        tol: float = 1e-6,
        progress: bool | None = None,
    ) -> LinearStateSpace:
        """Keeps the smoothed states of y as `means_`, `covariances_`, and their log-likelihood (bound) as `elbo_`.

        Args:
            learn: arguments of the constructor that EM replaces, from where they are, by those under which y is
                likelier: names, or "all" (where y is not Gaussian, of the chain). They are kept as `transition_` and
                so on, too; the total bound at the start and after each sweep as `elbos_`.
            max_iter: sweeps of EM, at most.
            tol: a change of the log-likelihood, for each number that was observed, that ends them.
            progress: see `inference.run`.
        """
        if names := dynamics.chosen(learn, None if self.observation_noise is not None else self.likelihood):
            self._learn(_Rows(y, len(self.observation)), names, max_iter, tol, progress)
        self.means_, self.covariances_, self.elbo_ = self.smooth(y)
        return self

    def _learn(self, rows: _Rows, names: Sequence[str], steps: int, tolerance: float, progress: bool | None) -> None:
        def smooth(at: dynamics.Matrices) -> dynamics.Smooth:
            self.chain, self.observation, self.observation_noise = at
            belief = self._observed(rows.values)
            back = kalman.backward(self.chain, belief.filtered)
            return dynamics.Smooth(*kalman.smoothed(back), belief.log_likelihood)

        found = dynamics.Matrices(self.chain, self.observation, self.observation_noise)
        given = smooth, rows.values, rows.lengths, names
        try:
            with torch.no_grad():
                found, result = dynamics.climb(found, *given, steps=steps, tolerance=tolerance, progress=progress)
        finally:
            self.chain, self.observation, self.observation_noise = found
        self.elbos_, self.n_iter_, self.converged_ = result.elbos, result.steps, result.converged
        every = (*found.chain[:2], found.observation, found.noise, *found.chain[2:])
        learned = {name: value for name, value in zip(dynamics.LEARNABLE, every) if name in names and value is not None}
        vars(self).update({f"{name}_": rows.kind(value) for name, value in learned.items()})

    def filter(self, y: Any) -> States:
        """Each state given the observations so far (Kalman); of Gaussian observations."""
        if self.observation_noise is None:
            raise ValueError("filter is for Gaussian observations: smooth gives what is known of others.")
        rows = _Rows(y, len(self.observation))
        belief = self._observed(rows.values)
        return rows.out(belief.filtered, belief.log_likelihood)

    def smooth(self, y: Any) -> States:
        """Each state given all observations."""
        rows = _Rows(y, len(self.observation))
        belief = self._observed(rows.values)
        smooth, _ = kalman.smoothed(kalman.backward(self.chain, belief.filtered))
        return rows.out(smooth, belief.log_likelihood)

    def log_likelihood(self, y: Any) -> Any:
        """log p(y), or its lower bound where observations are not Gaussian: of a sequence, or of each."""
        rows = _Rows(y, len(self.observation))
        return rows.each(self._observed(rows.values).log_likelihood)

    def score(self, y: Any) -> float:
        """The log-likelihood (or bound) for each number that was observed."""
        rows = _Rows(y, len(self.observation))
        if rows.values.isnan().all():
            raise ValueError("y holds NaN only: there is nothing to score.")
        total = self._observed(rows.values).log_likelihood.sum()
        return float(total / (~rows.values.isnan()).sum())

    def sample(self, y: Any, count: int = 1, seed: int = 0) -> Any:
        """Whole paths of the states given all observations, (count, T, D) or (count, sequences, T, D)."""
        require_whole(count=count)
        rows = _Rows(y, len(self.observation))
        belief = self._observed(rows.values)
        noise = _noise((len(rows.values), count, *belief.filtered.mean.shape[1:]), belief.filtered.mean, seed)
        return rows.paths(kalman.sampled(kalman.backward(self.chain, belief.filtered), noise))

    def simulate(self, length: int, count: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Paths (count, T, D) of the model itself, and observations (count, T, K) of them."""
        require_whole(length=length, count=count)
        noise = _noise((length, count, len(self.chain.mean)), self.chain.mean, seed)
        states = kalman.simulated(self.chain, noise).transpose(0, 1)
        clean, generator = states @ self.observation.mT, torch.Generator().manual_seed(seed32(seed) + 1)
        if self.observation_noise is None:
            return states, self._sees.sample(clean, generator)
        noise = torch.randn(clean.shape, dtype=clean.dtype, generator=generator).to(clean)
        return states, clean + noise @ torch.linalg.cholesky(self.observation_noise).mT

    def forecast(self, y: Any, steps: int) -> States:
        """The next observations: means (steps, K) and, given y, their covariances, noise included.

        Of observations that are not Gaussian, variances are on the diagonal of matrices that have nothing else.
        """
        require_whole(steps=steps)
        rows = _Rows(y, len(self.observation))
        rows.only_equal("forecast")
        belief, (F, Q, *_) = self._observed(rows.values), self.chain
        mean, covariance, H = belief.filtered.mean[-1], belief.filtered.covariance[-1], self.observation
        means, covariances = [], []
        for _ in range(steps):
            mean, covariance = (F @ mean[..., None])[..., 0], F @ covariance @ F.mT + Q
            seen, spread = (H @ mean[..., None])[..., 0], H @ covariance @ H.mT
            if self.observation_noise is not None:
                spread = spread + self.observation_noise
            else:
                found = self._sees.predict(seen, spread.diagonal(dim1=-2, dim2=-1).expand_as(seen))
                seen, spread = found.mean, torch.diag_embed(found.variance + found.noise)
            means.append(seen)
            covariances.append(spread.expand(*seen.shape, len(H)))
        return rows.out(Beliefs(torch.stack(means), torch.stack(covariances)), belief.log_likelihood)

    # --- how ---

    def _observed(self, y: Tensor) -> _Observed:
        """y: (T, sequences, K)."""
        chain = Chain(*[part.to(y) for part in self.chain])
        self._sees.check(y)
        if self.observation_noise is not None:
            return _gaussian(chain, self.observation.to(y), self.observation_noise.to(y), y)
        family = SitedChain(chain, self.observation.to(y), len(y))
        flat = y.transpose(0, 1).flatten(1)
        known = ~flat.isnan()
        target = torch.where(known, flat, 0)

        def expected(mean: Tensor, variance: Tensor) -> Moments:
            found = self._sees.expected(mean, variance, target, self.expectation)
            return Moments(*[torch.where(known, part, 0) for part in found])

        start = tuple(torch.where(known, part, 0) for part in self._sees.sites(target))
        node = Node(family, start, name="sites")
        factor = ElementwiseFactor(node, expected)
        result = run_to_convergence(node, [factor], self.steps, tolerance=self.tolerance)
        self.n_iter_ = result.steps
        bound = factor.moments().value.sum(-1) + family.entropy(node.natural)
        return _Observed(family.at(node.natural).filtered, bound)


class _Observed(NamedTuple):
    filtered: Beliefs
    log_likelihood: Tensor  # (sequences,)


def _gaussian(chain: Chain, H: Tensor, R: Tensor, y: Tensor) -> _Observed:
    """The conjugate step: sites H'R^-1 y and H'R^-1 H, of what was observed."""
    known = ~y.isnan()
    if known.all():
        noise, seen = R[None, None], H[None, None]
    else:  # what is missing has a unit noise of its own and sees nothing
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
    return _Observed(found, -terms.sum(0) / 2)


@dataclass(frozen=True, eq=False)
class SitedChain(Family):
    r"""A chain times Gaussian sites: q(x) = p(x) exp(Σ_t λ1_t'z_t + λ2_t'z_t²) / Z with z_t = H x_t.

    A family by itself: statistics (z, z²), sites as its natural parameters, log Z as its log-partition, and the chain
    as the measure that densities are relative to. So its entropy is -KL(q, chain), and a model needs no factor for it.

    Args:
        chain: of the states.
        observation: H, (K, D).
        length: T; natural parameters are (sequences, T K).
    """

    events = (1, 1)

    chain: Chain
    observation: Tensor
    length: int
    _seen: list[Any] = field(default_factory=list, repr=False)

    def at(self, natural: Parameters) -> _Tilted:
        """The chain given these sites; of the last ones that were asked for, from memory."""
        if not (self._seen and all(torch.equal(a, b) for a, b in zip(natural, self._seen[0]))):
            first, second = (part.unflatten(-1, (self.length, -1)).transpose(0, 1) for part in natural)
            H = self.observation
            h, J = first @ H, H.mT @ (-2 * second[..., None] * H)
            found = kalman.filtered(self.chain, h, J)
            value = kalman.log_partition(kalman.predicted(self.chain, found), found, h, J)
            self._seen[:] = [natural, _Tilted(found, value)]
        return self._seen[1]

    def moments(self, natural: Parameters) -> tuple[Tensor, Tensor]:
        """Means and variances of z, (sequences, T K)."""
        tilted = self.at(natural)
        if tilted.marginals is None:
            smooth, _ = kalman.smoothed(kalman.backward(self.chain, tilted.filtered))
            H = self.observation
            mean, variance = smooth.mean @ H.mT, ((H @ smooth.covariance) * H).sum(-1)
            tilted.marginals = mean.transpose(0, 1).flatten(1), variance.transpose(0, 1).flatten(1)
        return tilted.marginals

    def log_partition(self, natural: Parameters) -> Tensor:
        return self.at(natural).log_partition

    def mean(self, natural: Parameters) -> Parameters:
        mean, variance = self.moments(natural)
        return mean, variance + mean.square()

    def natural(self, mean: Parameters) -> Parameters:
        raise ValueError("the sites of a chain are not found from expectations: run the rule instead.")

    def inside(self, natural: Parameters) -> Tensor:
        return torch.isfinite(self.log_partition(natural))

    def statistics(self, x: Tensor) -> Parameters:
        return x, x.square()

    def to_distribution(self, natural: Parameters) -> Distribution:
        raise ValueError("a chain has no counterpart in torch.distributions: sample it.")

    def sample(self, natural: Parameters, count: int, generator: torch.Generator | None = None) -> Tensor:
        """z, (count, sequences, T K)."""
        found = self.at(natural).filtered
        shape = (self.length, count, *found.mean.shape[1:])
        noise = torch.randn(shape, dtype=found.mean.dtype, generator=generator).to(found.mean.device)
        paths = kalman.sampled(kalman.backward(self.chain, found), noise) @ self.observation.mT
        return paths.permute(1, 2, 0, 3).flatten(2)

    def _domain(self) -> str:
        return ", with a positive definite precision of the states"


@dataclass
class _Tilted:
    filtered: Beliefs
    log_partition: Tensor
    marginals: tuple[Tensor, Tensor] | None = None


class _Rows:
    """Sequences as one tensor (T, sequences, K), and the way back."""

    def __init__(self, y: Any, parts: int) -> None:
        self.many = isinstance(y, (list, tuple)) and bool(y) and not np.isscalar(y[0]) and y[0] is not None
        items: Sequence[Any] = y if self.many else [y]
        self.numpy = not any(isinstance(item, Tensor) for item in items)
        tensors = [_rows(item, parts) for item in items]
        self.lengths = [len(item) for item in tensors]
        self.single = not self.many and tensors[0].dim() == 2
        if self.many:
            if any(item.dim() != 2 for item in tensors):
                raise ValueError("each sequence of a list must have one row for each time.")
            longest = max(self.lengths)
            gaps = [item.new_full((longest - len(item), parts), math.nan) for item in tensors]
            self.values = torch.stack([torch.cat(pair) for pair in zip(tensors, gaps)], 1)
        else:
            whole = tensors[0]
            self.values = whole[:, None] if self.single else whole.transpose(0, 1)
            self.lengths = [len(self.values)] * self.values.shape[1]
        if bool(self.values.isinf().any()):
            raise ValueError("y holds infinity: NaN is how a missing observation is written.")

    def only_equal(self, what: str) -> None:
        if len(set(self.lengths)) > 1:
            raise ValueError(f"{what} takes sequences of one length, got {self.lengths}: give one at a time.")

    def kind(self, value: Tensor) -> Any:
        return value.detach().numpy() if self.numpy else value

    def each(self, value: Tensor) -> Any:
        return self.kind(value[0] if self.single else value)

    def _cut(self, value: Tensor) -> Any:
        """(T, sequences, ...) as it came."""
        if self.single:
            return self.kind(value[:, 0])
        if self.many and len(value) == max(self.lengths):
            return [self.kind(value[:n, k]) for k, n in enumerate(self.lengths)]
        return self.kind(value.transpose(0, 1))

    def out(self, beliefs: Beliefs, log_likelihood: Tensor) -> States:
        mean, covariance = beliefs
        covariance = covariance.expand(*mean.shape, mean.shape[-1])
        return States(self._cut(mean), self._cut(covariance), self.each(log_likelihood))

    def paths(self, paths: Tensor) -> Any:
        """(T, count, sequences, D) as (count, ...)."""
        if self.single:
            return self.kind(paths[:, :, 0].transpose(0, 1))
        if self.many:
            return [self.kind(paths[:n, :, k].transpose(0, 1)) for k, n in enumerate(self.lengths)]
        return self.kind(paths.permute(1, 2, 0, 3))


def _rows(y: Any, parts: int) -> Tensor:
    rows = require_numbers("y", y, live=True)
    if rows.dim() == 1 and parts == 1:
        rows = rows[:, None]
    if rows.dim() not in (2, 3) or rows.shape[-1] != parts or not rows.numel():
        raise ValueError(f"y must have one row for each time and {parts} columns, got shape {tuple(rows.shape)}.")
    return rows


def _noise(shape: tuple[int, ...], like: Tensor, seed: int) -> Tensor:
    require_seed(seed=seed)
    return torch.randn(shape, dtype=like.dtype, generator=torch.Generator().manual_seed(seed32(seed))).to(like.device)
