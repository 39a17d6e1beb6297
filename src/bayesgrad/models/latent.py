"""What estimators with hidden variables share: restarts, sweeps until the bound settles, streams."""

from __future__ import annotations

import contextlib
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state

from bayesgrad.inference import Factor, LatentVariableFactor, Node, OutsideDomain, Result, elbo, run, step
from bayesgrad.inference.engine import ProgressLine
from bayesgrad.models.checks import all_or_nothing, is_number, require_same, require_tolerance, require_whole, warn


class Latent(BaseEstimator, ABC):
    r"""Nodes for the parameters, and a `LatentVariableFactor` for the data, whose hidden variables are always at their
    optimum.

    `fit` repeats whole sweeps, steps with rho = 1, until the bound settles, from `n_init` starts, and keeps the best.
    Where `_streams` says so, a sweep is a pass over shuffled batches, as `partial_fit` takes them: with steps of

    .. math::
        \rho_t = (t + \tau)^{-\kappa}, \quad t = 1, 2, \dots

    and each batch counted N/B times. Ctrl-C ends a fit with the best parameters so far, and a warning.

    What follows is set by the constructors of those that inherit it.

    Args:
        n_init: starts.
        max_iter: sweeps, at most.
        tol: a change of the bound, for each row (`_units`), that ends the sweeps.
        random_state: as in scikit-learn.
        progress: whether a line is kept up to date; None: in a terminal, after two seconds.
        batch_size, offset, decay: of streams: B, tau and kappa; a model with other words for the last two says so in
            `_words`.
        total_samples: N of `partial_fit`; None: the rows seen so far.

    Attributes:
        elbo_: the bound on the log evidence of the data, with all constants; with `Point` parameters their
            log-likelihood. After `partial_fit`, as the last batch before its step estimates it.
        elbos_: at the start and after each sweep; after passes over batches with tol=0 at their end only; after
            `partial_fit`, of each batch.
        n_iter_, converged_: sweeps, and whether the bound settled.

    Reference: Khan and Rue 2023, sections 5.2 and 5.3; Hoffman et al., 2013; Cappé and Moulines, 2009, for online EM.
    Checked by: tests/contract/test_latent.py.
    """

    n_init: int
    max_iter: int
    tol: float
    random_state: Any
    progress: bool | None
    batch_size: int
    offset: float
    decay: float
    total_samples: float | None
    _words: ClassVar[tuple[str, str]] = ("offset", "decay")
    _structure: ClassVar[tuple[str, ...]] = ("n_components", "method")  # what a stream cannot change
    _schedule = "parallel"  # "sequential" where nodes must see each other's moves for the bound to rise

    # --- what a model says of itself ---

    @abstractmethod
    def _read(self, X: Any, *, reset: bool) -> Any:
        """Checked data, with a length and rows that can be indexed by an array; settings are checked here as well."""

    @abstractmethod
    def _start(self, data: Any, random: np.random.RandomState) -> list[Node]:
        """The parameters' nodes before the first sweep."""

    @abstractmethod
    def _priors(self, nodes: Sequence[Node]) -> list[Factor]:
        """Factors of the parameters alone."""

    @abstractmethod
    def _evidence(self, data: Any, nodes: Sequence[Node], scale: float = 1.0) -> LatentVariableFactor:
        """The factor of the data."""

    def _repeated(self, data: Any, nodes: Sequence[Node]) -> LatentVariableFactor:
        """The factor of all data in sweeps, which look at it again and again."""
        return self._evidence(data, nodes)

    @abstractmethod
    def _publish(self, nodes: Sequence[Node]) -> None:
        """Sets the attributes that people read."""

    def _between(self, nodes: Sequence[Node]) -> None:
        """Called after each sweep, for moves of several nodes at once that do not lower the bound."""

    def _arrange(self, nodes: Sequence[Node]) -> None:
        """Called once at the end of a fit, to name what could be named otherwise; streams keep their names."""

    def _streams(self) -> bool:
        """Whether `fit` goes through batches."""
        return False

    def _units(self, data: Any) -> float:
        """What changes of the bound are counted for."""
        return len(data)

    # --- fitting ---

    def fit(self, X: Any, y: Any = None) -> Any:
        """Forgets what was known, and learns from X. y is not used."""
        self._check_numbers()
        with self._all_or_nothing():
            return self._fit(X)

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """What fails leaves the estimator as it was."""
        naturals = [(node, node.natural) for node in getattr(self, "_nodes", ())]
        try:
            with all_or_nothing(self):
                yield
        except BaseException:
            for node, natural in naturals:
                node.natural = natural
            raise

    def _fit(self, X: Any) -> Any:
        data = self._read(X, reset=True)
        random = check_random_state(self.random_state)
        self._batches = 0
        best: tuple[list[Node], Result] | None = None
        failure: Exception | None = None
        interrupted = False
        for _ in range(self.n_init):
            try:
                nodes = self._start(data, random)
                result = self._passes(data, nodes, random) if self._streams() else self._sweeps(data, nodes)
            except (OutsideDomain, torch.linalg.LinAlgError) as error:
                failure = error
                continue
            except KeyboardInterrupt:
                if best is None:
                    raise
                interrupted = True
                break
            if best is None or result.elbo > best[1].elbo:
                best = nodes, result
            if result.interrupted:
                interrupted = True
                break
        if best is None:
            raise ValueError(
                f"none of {self.n_init} starts led to a distribution: look for constant columns, rows that are all the "
                "same and numbers of very different sizes, or take fewer components."
            ) from failure
        self._nodes, result = best
        self._begun = self._now()
        self._arrange(self._nodes)
        self._rows = len(data)
        self.elbos_, self.elbo_ = result.elbos, result.elbo
        self.n_iter_, self.converged_ = result.steps, result.converged
        self._publish(self._nodes)
        if interrupted:
            warn(f"the fit was interrupted after {result.steps} sweeps: the best parameters so far are kept.")
        elif not result.converged and self.tol:
            warn(
                f"{self.max_iter} sweeps were not enough to settle within tol={self.tol:g}: take a larger max_iter.",
                ConvergenceWarning,
            )
        return self

    def partial_fit(self, X: Any, y: Any = None) -> Any:
        """Moves what is known by a batch, and keeps none of it; rows of a `fit` before count as batches that were seen.

        y is not used.
        """
        self._check_numbers()
        with self._all_or_nothing():
            return self._partial_fit(X)

    def _partial_fit(self, X: Any) -> Any:
        first = not hasattr(self, "_nodes")
        if not first:
            require_same(self._begun, self)
        data = self._read(X, reset=first)
        if first:
            self._begun, self._nodes = self._now(), self._start(data, check_random_state(self.random_state))
            self._batches, self._rows = 0, 0
        if first or hasattr(self, "converged_"):
            self.elbos_ = []
        if vars(self).pop("converged_", None) is not None and not self._batches:
            self._batches = math.ceil(self._rows / len(data))
        self._rows += len(data)
        self._batches += 1
        total = self._rows if self.total_samples is None else self.total_samples
        factors = [*self._priors(self._nodes), self._evidence(data, self._nodes, total / len(data))]
        try:
            bound = float(elbo(self._nodes, factors))
            step(self._nodes, factors, self._rho(self._batches), schedule=self._schedule)
        except (OutsideDomain, torch.linalg.LinAlgError) as error:
            raise ValueError(
                "this batch leads to no distribution, and is not learned from: look for numbers of very different "
                "sizes from those before, or for rows that are all the same."
            ) from error
        self.elbos_.append(bound)
        self.elbo_, self.n_iter_ = bound, self._batches
        self._publish(self._nodes)
        return self

    def _now(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._structure}

    def _sweeps(self, data: Any, nodes: list[Node]) -> Result:
        factors = [*self._priors(nodes), self._repeated(data, nodes)]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*(were not enough: the bound|interrupted in step)")
            return run(
                nodes,
                factors,
                self.max_iter,
                tolerance=self.tol,
                schedule=self._schedule,
                tune=lambda: self._between(nodes),
                progress=self.progress,
                unit=self._units(data),
                interruptible=True,
            )

    def _passes(self, data: Any, nodes: list[Node], random: np.random.RandomState) -> Result:
        """Passes over batches; the bound of all data is looked at after each, with tol=0 only after the last."""
        priors, whole = self._priors(nodes), self._evidence(data, nodes)
        elbos = [float(elbo(nodes, [*priors, whole]))] if self.tol else []
        progress_line, taken, stopped, settled = ProgressLine(self.progress, self.max_iter), 0, False, False
        self._batches = 0  # where `partial_fit` goes on from
        before = [node.natural for node in nodes]
        try:
            while taken < self.max_iter and not settled:
                order = random.permutation(len(data))
                for rows in np.array_split(order, max(1, round(len(data) / self.batch_size))):
                    before = [node.natural for node in nodes]
                    self._batches += 1
                    factors = [*priors, self._evidence(data[rows], nodes, len(data) / len(rows))]
                    step(nodes, factors, self._rho(self._batches), schedule=self._schedule)
                taken += 1
                if self.tol:
                    elbos.append(float(elbo(nodes, [*priors, whole])))
                    settled = abs(elbos[-1] - elbos[-2]) <= self.tol * self._units(data)
                progress_line.update(taken, elbos[-1] if elbos else None)
        except KeyboardInterrupt:
            stopped = True
            for node, natural in zip(nodes, before):
                node.natural = natural  # none of a batch of which all nodes have not heard
        progress_line.close()
        if stopped or not self.tol:
            elbos.append(float(elbo(nodes, [*priors, whole])))
        return Result(elbos, settled, stopped, taken)

    def _rho(self, count: int) -> float:
        offset, decay = (getattr(self, name) for name in self._words)
        return (count + offset) ** -decay

    def _check_numbers(self) -> None:
        require_whole(n_init=self.n_init, max_iter=self.max_iter, batch_size=self.batch_size)
        require_tolerance(tol=self.tol)
        (first, offset), (second, decay) = ((name, getattr(self, name)) for name in self._words)
        if not (is_number(decay) and 0.5 < decay <= 1):
            raise ValueError(f"{second} must be in (0.5, 1] for steps to settle, got {decay!r}.")
        require_tolerance(**{first: offset})
        if self.total_samples is not None and not (is_number(self.total_samples) and self.total_samples > 0):
            raise ValueError(f"total_samples must be a positive number, or None, got {self.total_samples!r}.")


def random_rows(count: int, columns: int, random: np.random.RandomState) -> torch.Tensor:
    """Shares (count, columns) that sum to one, as scikit-learn's init_params="random" draws them."""
    drawn = random.uniform(size=(count, columns))
    return torch.as_tensor(drawn / drawn.sum(1, keepdims=True))
