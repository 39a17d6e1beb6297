"""The base class of estimators with latent variables: restarts, iterations until convergence, streams."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state

from bayesgrad.inference import Factor, LatentVariableFactor, Node, OutsideDomain, Result, elbo, run, step
from bayesgrad.inference.engine import ProgressLine
from bayesgrad.models import checks
from bayesgrad.models.estimator import Estimator
from bayesgrad.warning import warn


@dataclass(kw_only=True, eq=False, repr=False)
class Latent(Estimator, ABC):
    r"""Base class: nodes for the parameters, and a `LatentVariableFactor` for the data, which maximises the bound over
    the latent variables.

    `fit` repeats steps with rho = 1 until the bound converges, from `n_init` starts, and keeps the best result. If
    `_uses_batches` is True (with method "svi"), an iteration is a pass over shuffled batches, as in `partial_fit`, with
    steps of

    .. math::
        \rho_t = (t + \tau)^{-\kappa}, \quad t = 1, 2, \dots

    and each batch counted N/B times. Ctrl-C ends a fit with a warning and the best parameters so far.

    Args:
        n_init: number of starts.
        max_iter: maximum number of iterations.
        tol: stop when the change of the bound per row (`_num_units`) is below this.
        random_state: as in scikit-learn.
        progress: whether to print a progress line; None prints one in a terminal, after two seconds.
        batch_size, offset, decay: B, tau and kappa for streams; a subclass with other names for the last two sets
            `_schedule_names`.
        total_samples: N for `partial_fit`; None uses the number of rows so far.

    Attributes:
        elbo_: the bound on the log evidence of the data, with all constants; with `Point` parameters their
            log-likelihood. After `partial_fit`, the estimate from the last batch before its step.
        elbos_: before the first iteration and after each; after passes over batches with tol=0 only at the end; after
            `partial_fit`, of each batch.
        n_iter_, converged_: number of iterations, and whether the bound converged.

    Reference: Khan and Rue 2023, sections 5.2 and 5.3; Hoffman et al., 2013; Cappé and Moulines, 2009, for online EM.
    Checked by: tests/contract/test_latent.py.
    """

    n_init: int = 1
    max_iter: int = 500
    tol: float = 1e-5
    random_state: Any = 0
    progress: bool | None = None
    total_samples: float | None = None
    batch_size = 1  # not a setting where batches come only from `partial_fit`
    _schedule_names: ClassVar[tuple[str, str]] = ("offset", "decay")
    _fixed_settings = ("n_components", "method")
    _schedule = "parallel"  # "sequential" if the bound increases only when nodes are updated one after the other

    # --- defined by subclasses ---

    @abstractmethod
    def _read(self, X: Any, *, reset: bool) -> Any:
        """Validated data with a length, whose rows can be indexed by an array; also validates the settings."""

    @abstractmethod
    def _start(self, data: Any, random: np.random.RandomState) -> list[Node]:
        """The initial nodes of the parameters."""

    @abstractmethod
    def _priors(self, nodes: Sequence[Node]) -> list[Factor]:
        """Factors of the parameters only."""

    @abstractmethod
    def _data_factor(self, data: Any, nodes: Sequence[Node], scale: float = 1.0) -> LatentVariableFactor:
        """The factor of the data."""

    def _stream_factor(self, data: Any, nodes: Sequence[Node], scale: float) -> LatentVariableFactor:
        """The factor of a batch of `partial_fit`, number `_batches`."""
        return self._data_factor(data, nodes, scale)

    def _full_data_factor(self, data: Any, nodes: Sequence[Node]) -> LatentVariableFactor:
        """The factor of all data for full iterations, which evaluate it repeatedly."""
        return self._data_factor(data, nodes)

    @abstractmethod
    def _set_attributes(self, nodes: Sequence[Node]) -> None:
        """Sets the fitted attributes."""

    def _after_iteration(self, nodes: Sequence[Node]) -> None:
        """Called after each iteration, for joint updates of several nodes that do not decrease the bound."""

    def _sort_components(self, nodes: Sequence[Node]) -> None:
        """Called once at the end of `fit`, to put exchangeable components in order; not called for streams."""

    @property
    def _n_features_out(self) -> int:
        """The number of columns of `transform`, where there is one."""
        return len(self.components_)

    def _uses_batches(self) -> bool:
        """Whether `fit` uses batches."""
        return getattr(self, "method", None) == "svi"

    def _num_units(self, data: Any) -> float:
        """The number that changes of the bound are divided by."""
        return len(data)

    # --- fitting ---

    def fit(self, X: Any, y: Any = None) -> Any:
        """Fits X and discards previous fits. y is ignored."""
        self._check_common_settings()
        with checks.restore_on_error(self):
            return self._fit(X)

    def _fit(self, X: Any) -> Any:
        data = self._read(X, reset=True)
        random = check_random_state(self.random_state)
        self._batches = 0
        best: tuple[list[Node], Result] | None = None
        failure: Exception | None = None
        interrupted, iterate = False, self._iterate_batches if self._uses_batches() else self._iterate
        for _ in range(self.n_init):
            try:
                nodes = self._start(data, random)
                result = iterate(data, nodes, random)
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
                f"none of {self.n_init} starts led to a valid distribution: check for constant columns, identical rows "
                "and numbers of very different sizes, or use fewer components."
            ) from failure
        self._nodes, result = best
        self._remember_settings()
        self._sort_components(self._nodes)
        self._rows = len(data)
        self.elbos_, self.elbo_ = result.elbos, result.elbo
        self.n_iter_, self.converged_ = result.steps, result.converged
        self._set_attributes(self._nodes)
        if interrupted:
            warn(f"interrupted after {result.steps} iterations: the best parameters so far are kept.")
        elif not result.converged and self.tol:
            warn(
                f"not converged after max_iter={self.max_iter} iterations (tol={self.tol:g}): increase max_iter.",
                ConvergenceWarning,
            )
        return self

    def partial_fit(self, X: Any, y: Any = None) -> Any:
        """Updates the parameters with a batch, which is not stored; rows of a previous `fit` count as earlier batches.

        y is ignored.
        """
        self._check_common_settings()
        with checks.restore_on_error(self):
            return self._partial_fit(X)

    def _begun_with(self, nodes: list[Node]) -> Any:
        """This estimator with known nodes, as before the first batch of a stream."""
        self._nodes, self._rows, self._batches, self.elbos_ = nodes, 0, 0, []
        self._remember_settings()
        self._set_attributes(nodes)
        return self

    def _partial_fit(self, X: Any) -> Any:
        first = not hasattr(self, "_nodes")
        if not first:
            self._require_same_settings()
        data = self._read(X, reset=first)
        if first:
            self._remember_settings()
            self._nodes = self._start(data, check_random_state(self.random_state))
            self._batches, self._rows = 0, 0
        if first or hasattr(self, "converged_"):
            self.elbos_ = []
        if vars(self).pop("converged_", None) is not None and not self._batches:
            self._batches = math.ceil(self._rows / len(data))
        self._rows += len(data)
        self._batches += 1
        total = self._rows if self.total_samples is None else self.total_samples
        factors = [*self._priors(self._nodes), self._stream_factor(data, self._nodes, total / len(data))]
        try:
            bound = float(elbo(self._nodes, factors))
            step(self._nodes, factors, self._rho(self._batches), schedule=self._schedule)
        except (OutsideDomain, torch.linalg.LinAlgError) as error:
            raise ValueError(
                "this batch leads to an invalid distribution and was ignored: check for numbers of very different "
                "sizes from those before, or for identical rows."
            ) from error
        self.elbos_.append(bound)
        self.elbo_, self.n_iter_ = bound, self._batches
        self._set_attributes(self._nodes)
        return self

    def _iterate(self, data: Any, nodes: list[Node], random: np.random.RandomState) -> Result:
        factors = [*self._priors(nodes), self._full_data_factor(data, nodes)]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*(not converged after|interrupted in step)")
            return run(
                nodes,
                factors,
                self.max_iter,
                tolerance=self.tol,
                schedule=self._schedule,
                tune=lambda: self._after_iteration(nodes),
                progress=self.progress,
                unit=self._num_units(data),
                interruptible=True,
            )

    def _iterate_batches(self, data: Any, nodes: list[Node], random: np.random.RandomState) -> Result:
        """Passes over batches; computes the bound of all data after each, with tol=0 only after the last."""
        priors, whole = self._priors(nodes), self._data_factor(data, nodes)
        elbos = [float(elbo(nodes, [*priors, whole]))] if self.tol else []
        progress_line, taken, stopped, converged = ProgressLine(self.progress, self.max_iter), 0, False, False
        self._batches = 0  # `partial_fit` continues from here
        before = [node.natural for node in nodes]
        try:
            while taken < self.max_iter and not converged:
                order = random.permutation(len(data))
                for rows in np.array_split(order, max(1, round(len(data) / self.batch_size))):
                    before = [node.natural for node in nodes]
                    self._batches += 1
                    factors = [*priors, self._data_factor(data[rows], nodes, len(data) / len(rows))]
                    step(nodes, factors, self._rho(self._batches), schedule=self._schedule)
                taken += 1
                if self.tol:
                    elbos.append(float(elbo(nodes, [*priors, whole])))
                    converged = abs(elbos[-1] - elbos[-2]) <= self.tol * self._num_units(data)
                progress_line.update(taken, elbos[-1] if elbos else None)
        except KeyboardInterrupt:
            stopped = True
            for node, natural in zip(nodes, before):
                node.natural = natural  # undo a batch that has not updated all nodes
        progress_line.close()
        if stopped or not self.tol:
            elbos.append(float(elbo(nodes, [*priors, whole])))
        return Result(elbos, converged, stopped, taken)

    def _rho(self, count: int) -> float:
        offset, decay = (getattr(self, name) for name in self._schedule_names)
        return (count + offset) ** -decay

    def _check_common_settings(self) -> None:
        checks.require_positive_integer(n_init=self.n_init, max_iter=self.max_iter, batch_size=self.batch_size)
        checks.require_non_negative(tol=self.tol)
        (first, offset), (second, decay) = ((name, getattr(self, name)) for name in self._schedule_names)
        if not (checks.is_number(decay) and 0.5 < decay <= 1):
            raise ValueError(f"{second} must be in (0.5, 1] for convergence, got {decay!r}.")
        checks.require_non_negative(**{first: offset})
        if self.total_samples is not None and not (checks.is_number(self.total_samples) and self.total_samples > 0):
            raise ValueError(f"total_samples must be a positive number or None, got {self.total_samples!r}.")
