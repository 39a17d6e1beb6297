r"""EM for linear Gaussian state-space models: estimates of the matrices from smoothed moments.

.. math::
    F &= \left(\sum_t E[x_t x_{t-1}^T]\right) \left(\sum_t E[x_{t-1} x_{t-1}^T]\right)^{-1}, \quad
    Q = \frac1n \sum_t E[(x_t - F x_{t-1})(x_t - F x_{t-1})^T] \\
    H &= \left(\sum_t E[y_t x_t^T]\right) \left(\sum_t E[x_t x_t^T]\right)^{-1}, \quad
    R = \frac1n \sum_t E[(y_t - H x_t)(y_t - H x_t)^T]

with the current F and H if only the noise is learned. The missing part of a row is a latent variable, whose moments
are computed given the other parts and the state; a row that is missing as a whole does not affect H and R.

EM takes thousands of iterations where a variance goes to zero. After the first few, Anderson's acceleration
extrapolates them, in the logarithms of covariances; EM itself takes over where that would decrease the likelihood.

Reference: Khan and Rue 2023, section 5.2; Shumway and Stoffer, 1982; Henderson and Varadhan, 2019, for acceleration.
Checked by: tests/equations/test_dynamics.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesgrad.inference.engine import ProgressLine, Result
from bayesgrad.models.checks import require_non_negative, require_positive_integer
from bayesgrad.models.kalman import Chain, StateMoments
from bayesgrad.warning import warn

LEARNABLE = (
    "transition",
    "process_covariance",
    "observation",
    "observation_covariance",
    "initial_mean",
    "initial_covariance",
)
PLAIN = 4  # iterations before the first that is accelerated
MEMORY = 8  # iterations that are extrapolated
FURTHEST = 5.0  # change of a coordinate in an iteration, for example of the logarithm of a variance


class Matrices(NamedTuple):
    """F, Q, m and P; H, and R if observations are Gaussian."""

    chain: Chain
    observation: Tensor
    noise: Tensor | None


class Smooth(NamedTuple):
    """The posterior of states, the covariances of x_t with x_{t+1}, and log p(y), (sequences,)."""

    states: StateMoments
    pairs: Tensor
    log_likelihood: Tensor


def chosen(learn: str | Iterable[str] | None, matrices: Matrices, likelihood: Any) -> list[str]:
    """The checked list of names to learn; "all" selects all that can be learned, None nothing."""
    if learn is None:
        return []
    able = _able(matrices)
    one = isinstance(learn, str) or not isinstance(learn, Iterable)
    names: list[Any] = able if one and learn == "all" else [learn] if one else list(learn)
    if wrong := [name for name in names if not (isinstance(name, str) and name in able)]:
        where = "" if matrices.noise is not None else f" for likelihood {likelihood!r}"
        if wrong[0] in LEARNABLE[:4] and matrices.noise is not None:
            where = " where matrices vary with time"
        elif wrong[0] in LEARNABLE[4:]:
            where = " where states are diffuse"
        raise ValueError(f"learn must contain only {', '.join(map(repr, able))}{where}, got {wrong[0]!r}.")
    return names


def _able(matrices: Matrices) -> list[str]:
    """Names of what can be learned: not with matrices that vary, nor infinite variances."""
    chain, H, R = matrices
    moves = chain.transition.dim() == chain.noise.dim() == 2
    rows = R is not None and H.dim() == R.dim() == 2
    able = (moves, moves, rows, rows, chain.diffuse is None, chain.diffuse is None)
    return [name for name, free in zip(LEARNABLE, able) if free]


def run_em(
    matrices: Matrices,
    smooth: Callable[[Matrices], Smooth],
    y: Tensor,
    lengths: Sequence[int],
    names: Collection[str],
    *,
    steps: int,
    tolerance: float,
    progress: bool | None = None,
) -> tuple[Matrices, Result]:
    """EM until the log-likelihood per observed number converges; Ctrl-C stops it and keeps the current matrices.

    Args:
        smooth: the E-step.
        y: (T, sequences, K), NaN for missing numbers and after the end of a sequence.
        names: of `LEARNABLE`.
    """
    require_positive_integer(max_iter=steps)
    require_non_negative(tol=tolerance)
    if y.isnan().all():
        raise ValueError("y contains only NaN: there is nothing to learn from.")
    there = torch.arange(len(y))[:, None] < torch.tensor(lengths)  # (T, sequences)
    unit, progress_line = float((~y.isnan()).sum()), ProgressLine(progress, steps)
    found = smooth(matrices)
    elbos = [float(found.log_likelihood.sum())]
    converged = interrupted = small = False
    path = _Path(matrices, names)
    for count in range(steps):
        try:
            moved = m_step(matrices, found, y, there, names)
            path.add(matrices, moved)
            ahead = path.extrapolated(smooth, elbos[-1]) if count >= PLAIN else None
            moved, found = (moved, smooth(moved)) if ahead is None else ahead
        except KeyboardInterrupt:
            warn(f"interrupted in EM iteration {count + 1}: the matrices before this iteration are kept.")
            interrupted = True
            break
        matrices = moved
        elbos.append(float(found.log_likelihood.sum()))
        progress_line.update(count + 1, elbos[-1])
        before, small = small, abs(elbos[-1] - elbos[-2]) <= tolerance * unit
        # One small change may be that of an extrapolation beyond the maximum, or of EM after it: two are needed.
        if small and before and tolerance:
            converged = True
            break
    progress_line.close()
    if tolerance and not (converged or interrupted):
        change = (elbos[-1] - elbos[-2]) / unit
        warn(
            f"not converged after max_iter={steps} EM iterations: the log-likelihood per observed number still "
            f"increases by {change:.1g} (tol={tolerance:g})."
        )
    return matrices, Result(elbos, converged, interrupted)


class _Path:
    """The last iterations of EM in coordinates that can be extrapolated: logarithms of covariances, in the directions
    in which they are not zero; other numbers as they are."""

    def __init__(self, start: Matrices, names: Collection[str]) -> None:
        self.start, self.names = start, [name for name in LEARNABLE if name in names]
        self.bases: dict[str, Tensor] = {}
        for name, part in zip(LEARNABLE, _parts(start)):
            if name in self.names and name.endswith("covariance"):
                values, vectors = torch.linalg.eigh(part)
                self.bases[name] = vectors[:, values > 1e-14 * values[-1]]
        self.points: list[Tensor] = []
        self.steps: list[Tensor] = []

    def add(self, matrices: Matrices, moved: Matrices) -> None:
        """Notes that EM leads from these matrices to those."""
        point = self._coordinates(matrices)
        self.points = [*self.points, point][-MEMORY - 1 :]
        self.steps = [*self.steps, self._coordinates(moved) - point][-MEMORY - 1 :]

    def extrapolated(self, smooth: Callable[[Matrices], Smooth], least: float) -> tuple[Matrices, Smooth] | None:
        """Where the steps of EM vanish, if they are linear in the coordinates, and the E-step there; None, and a new
        path, if the log-likelihood is not above `least`."""
        points, steps = torch.stack(self.points, 1), torch.stack(self.steps, 1)
        if points.shape[1] > 1:
            moves, changes = points.diff(dim=1), steps.diff(dim=1)
            weights = torch.linalg.lstsq(changes, steps[:, -1:], driver="gelsd").solution
            move = (steps[:, -1:] - (moves + changes) @ weights)[:, 0].clamp(-FURTHEST, FURTHEST)
            try:
                moved = self._matrices(points[:, -1] + move)
                found = smooth(moved)
                if float(found.log_likelihood.sum()) > least:
                    return moved, found
            except (ValueError, torch.linalg.LinAlgError):
                pass
            self.points, self.steps = [], []
        return None

    def _coordinates(self, matrices: Matrices) -> Tensor:
        found = []
        for name, part in zip(LEARNABLE, _parts(matrices)):
            if name in self.bases:
                V = self.bases[name]
                values, vectors = torch.linalg.eigh(V.mT @ part @ V)
                logs = values.clamp(min=torch.finfo(values.dtype).tiny).log()
                found.append(((vectors * logs) @ vectors.mT).flatten())
            elif name in self.names:
                found.append(part.flatten())
        return torch.cat(found)

    def _matrices(self, point: Tensor) -> Matrices:
        parts, at = _parts(self.start), 0
        for place, name in enumerate(LEARNABLE):
            if name in self.bases:
                V = self.bases[name]
                size = V.shape[1]
                values, vectors = torch.linalg.eigh(point[at : at + size**2].view(size, size))
                half = V @ vectors
                parts[place], at = (half * values.exp()) @ half.mT, at + size**2
            elif name in self.names:
                count = parts[place].numel()
                parts[place], at = point[at : at + count].view_as(parts[place]), at + count
        F, Q, H, R, mean, P = parts
        return Matrices(Chain(F, Q, mean, P, self.start.chain.diffuse), H, R)


def _parts(matrices: Matrices) -> list[Any]:
    """In the order of `LEARNABLE`."""
    chain, H, R = matrices
    return [chain.transition, chain.noise, H, R, chain.mean, chain.covariance]


def m_step(matrices: Matrices, found: Smooth, y: Tensor, there: Tensor, names: Collection[str]) -> Matrices:
    """The M-step.

    Raises:
        ValueError: there are no data to learn from, or a covariance that must be positive definite is singular.
    """
    chain = _chain(matrices.chain, found, there, names)
    H, R = matrices.observation, matrices.noise
    if R is None or not {"observation", "observation_covariance"} & set(names):
        return Matrices(chain, H, R)
    moments = _observation_moments(matrices, found.states, y, there)
    if "observation" in names:
        H = moments.slope()
    if "observation_covariance" in names:
        R = moments.residual(H)
        values = torch.linalg.eigvalsh(R)
        if not values[0] > 1e-14 * values[-1]:
            raise ValueError(
                f"observation_covariance became singular, with a smallest eigenvalue of {values[0]:g}, because the "
                "states explain the observations fully: remove it from learn, or use fewer states."
            )
    return Matrices(chain, H, R)


def _chain(chain: Chain, found: Smooth, there: Tensor, names: Collection[str]) -> Chain:
    F, Q, mean, covariance, diffuse = chain
    states, moved = found.states, there[1:].to(F)
    if {"transition", "process_covariance"} & set(names):
        if not moved.sum():
            raise ValueError("all sequences have length 1, so transition and process_covariance cannot be learned.")
        parts = states.covariance[1:], found.pairs.mT, states.covariance[:-1]
        moments = _Moments.of(moved, states.mean[1:], states.mean[:-1], *parts)
        if "transition" in names:
            F = moments.slope()
        if "process_covariance" in names:
            Q = moments.residual(F)
    first = states.mean[0]  # (sequences, D)
    if "initial_mean" in names:
        mean = first.mean(0)
    if "initial_covariance" in names:
        error = first - mean
        covariance = (states.covariance[0] + error[..., :, None] * error[..., None, :]).mean(0)
        covariance = (covariance + covariance.mT) / 2
    return Chain(F, Q, mean, covariance, diffuse)


class _Moments(NamedTuple):
    """Means of pairs (a, b), (times, sequences, ...), their weights, and sums of their covariances.

    The products of means are not summed up: a residual that is small beside a and b would lose its digits.
    """

    weights: Tensor
    a: Tensor
    b: Tensor
    aa: Tensor
    ab: Tensor
    bb: Tensor

    @staticmethod
    def of(weights: Tensor, a: Tensor, b: Tensor, *covariances: Tensor) -> _Moments:
        def total(part: Tensor) -> Tensor:
            full = part.expand(*weights.shape, *part.shape[-2:])
            return (weights.flatten() @ full.flatten(0, 1).flatten(1)).view(full.shape[-2:])

        return _Moments(weights, a, b, *map(total, covariances))

    def _products(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.weights[..., None] * a).flatten(0, 1).mT @ b.flatten(0, 1)

    def slope(self) -> Tensor:
        """The matrix of the regression of a on b."""
        return _right_solve(self._products(self.a, self.b) + self.ab, self._products(self.b, self.b) + self.bb)

    def residual(self, M: Tensor) -> Tensor:
        """The mean of E[(a - M b)(a - M b)'], with negative eigenvalues from rounding set to zero."""
        error, cross = self.a - self.b @ M.mT, M @ self.ab.mT
        found = (self._products(error, error) + self.aa - cross - cross.mT + M @ self.bb @ M.mT) / self.weights.sum()
        values, vectors = torch.linalg.eigh((found + found.mT) / 2)
        return (vectors * values.clamp(min=0)) @ vectors.mT


def _observation_moments(matrices: Matrices, states: StateMoments, y: Tensor, there: Tensor) -> _Moments:
    """Moments of (y, x) over rows with any observed number.

    Given x, the missing numbers are y = G x + g + noise of covariance E, the regression on the observed ones under R.
    """
    H, R = matrices.observation, matrices.noise
    assert R is not None
    known = ~y.isnan()
    counts = (known.any(-1) & there).to(R)
    y = torch.where(known, y, 0)
    mean, covariance = states
    if (known.all(-1) | (counts == 0)).all():
        none = torch.zeros(1, 1, len(H), len(H) + H.shape[1]).to(R)
        return _Moments.of(counts, y, mean, none[..., : len(H)], none[..., len(H) :], covariance)
    lost, both = ~known, known[..., :, None] & known[..., None, :]
    across = torch.where(lost[..., :, None] & known[..., None, :], R, 0)
    gain = torch.linalg.solve(torch.where(both, R, torch.eye(len(R)).to(R)), across, left=False)
    G = torch.where(lost[..., None], H - gain @ H, 0)
    rest = torch.where(lost[..., :, None] & lost[..., None, :], R, 0) - gain @ across.mT
    y = y + (gain @ y[..., None])[..., 0] + (G @ mean[..., None])[..., 0]
    shared = G @ covariance  # Cov(y, x)
    return _Moments.of(counts, y, mean, shared @ G.mT + rest, shared, covariance)


def _right_solve(a: Tensor, b: Tensor) -> Tensor:
    """a b^-1 for a symmetric b; the pseudo-inverse if b is singular."""
    factor, info = torch.linalg.cholesky_ex(b)
    if info:
        return a @ torch.linalg.pinv(b, hermitian=True)
    return torch.cholesky_solve(a.mT, factor).mT
