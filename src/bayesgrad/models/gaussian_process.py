"""Gaussian processes: regression, classification, counts and outliers, by one site for each value."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import ClassifierTags, RegressorTags, Tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from bayesgrad.families import Gaussian, Parameters
from bayesgrad.inference import (
    Delta,
    ElementwiseFactor,
    Node,
    OutsideDomain,
    Prior,
    elbo,
    run,
    run_to_convergence,
    step,
)
from bayesgrad.inference.expectation import Expectation
from bayesgrad.models import checks
from bayesgrad.models.arrays import as_finite, as_numpy
from bayesgrad.models.kernels import RBF, Kernel
from bayesgrad.models.observations import QUADRATURE, Observation, named
from bayesgrad.models.process import Induced, Sited, Tilted, expected_value, features, mode
from bayesgrad.models.tunable import Tunable
from bayesgrad.noise import seed32

NORMAL = Gaussian()
LIMIT = math.log(1e5)  # numbers are looked for in 1e-5 to 1e5


def _classifies(model: GaussianProcess) -> bool:
    return named(model.likelihood).classifies


class GaussianProcess(BaseEstimator):
    r"""An unknown function f ~ GP(0, k), and what was observed of it, y_i ~ p(y | f(x_i)).

    The belief about the values f is the prior times a Gaussian site for each; the learning rule moves the sites,

    .. math::
        \lambda_i \leftarrow (1 - \rho) \lambda_i + \rho \nabla_{\mu_i} E_q[\log p(y_i \mid f_i)]

    and settles at the Gaussian with the highest bound on the evidence. With Gaussian noise one step does it, and the
    bound is the evidence. Numbers of the kernel and of the likelihood climb the same bound, by L-BFGS in their
    logarithms; with q at its optimum the bound's gradient by K is (K^-1 m m'K^-1 - (K + W^-1)^-1)/2, and K is never
    inverted.

    Args:
        kernel: of `models.kernels`; None: `1.0 * RBF(1.0)`.
        likelihood: `"gaussian"`, `"logistic"` (or `"bernoulli"`), `"probit"`, `"poisson"` (rates e^f), `"student-t"`,
            or one of `models.observations` with numbers of your choice.
        optimise: whether the numbers are chosen by the bound, or taken as they are.
        inducing: for large data: how many rows to know the function by, or these rows; None: all data.
        batch_size: with `inducing`, how many rows a step looks at; None: all.
        expectation: `GaussHermite(n)`; with `Delta()`, for likelihoods that are concave, the result is Laplace's
            approximation and `elbo_` its evidence (`optimise=False`).
        steps, tolerance: of `inference.run`; in batches, as many steps are taken.
        rho: the step size in batches.
        lr: in batches, the learning rate of Adam for the logarithms of numbers.
        rounds: evaluations of the bound by L-BFGS at most.
        seed: of batches and of draws.

    Attributes:
        kernel_, likelihood_: with the numbers that were found.
        elbo_: the bound; of Gaussian noise and all data, the log evidence.
        sites_: natural parameters of the sites, (n,) and (n,); with inducing points, of the belief about these.
        n_iter_: steps of the rule in the last run.
        classes_: the labels, in classification.
        estimators_: where there are more than two, a process for each, against the rest; `elbo_` is then the sum of
            their bounds, and probabilities are made to sum to one.
        n_features_in_, feature_names_in_: as in scikit-learn.

    >>> X, y = np.linspace(0, 3, 20)[:, None], np.sin(np.linspace(0, 3, 20))
    >>> model = GaussianProcess(likelihood="gaussian").fit(X, y)
    >>> mean, deviation = model.predict(np.array([[1.5]]), return_std=True)
    >>> bool(abs(mean[0] - np.sin(1.5)) < 1e-3), bool(deviation[0] < 0.01)
    (True, True)

    Reference: 002, section 5.1 and Eqs. 58 to 60; Khan and Lin, 2017; Adam et al., 2021.
    Checked by: tests/equations/test_gaussian_process.py: scikit-learn, dense inference, quadrature.
    """

    n_features_in_: int
    kernel_: Any  # a Kernel; of several classes one for each

    def __init__(
        self,
        kernel: Kernel | None = None,
        likelihood: str | Observation = "gaussian",
        *,
        optimise: bool = True,
        inducing: int | Any = None,
        batch_size: int | None = None,
        expectation: Expectation | None = None,
        steps: int = 200,
        tolerance: float = 1e-8,
        rho: float = 0.1,
        lr: float = 0.02,
        rounds: int = 100,
        seed: int = 0,
    ) -> None:
        self.kernel, self.likelihood, self.optimise = kernel, likelihood, optimise
        self.inducing, self.batch_size, self.expectation = inducing, batch_size, expectation
        self.steps, self.tolerance, self.rho, self.lr = steps, tolerance, rho, lr
        self.rounds, self.seed = rounds, seed

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        if _classifies(self):
            tags.estimator_type, tags.classifier_tags = "classifier", ClassifierTags(multi_class=True)
        else:
            tags.estimator_type, tags.regressor_tags = "regressor", RegressorTags()
            tags.target_tags.positive_only = self.likelihood == "poisson"
        return tags

    # --- learning ---

    def fit(self, X: Any, y: Any) -> GaussianProcess:
        """Learns from rows X, (n, d), and targets y, (n,)."""
        checks.require_whole(steps=self.steps, rounds=self.rounds)
        checks.require_tolerance(tolerance=self.tolerance)
        checks.require_seed(seed=self.seed)
        with checks.all_or_nothing(self):
            return self._fit(X, y)

    def _fit(self, X: Any, y: Any) -> GaussianProcess:
        kernel = 1.0 * RBF(1.0) if self.kernel is None else self.kernel
        if not isinstance(kernel, Kernel):
            raise TypeError(
                f"kernel must be one of models.kernels, got {kernel!r}: Function(f) makes one of a function."
            )
        seen = named(self.likelihood)
        options: dict[str, Any] = dict(dtype=np.float64, ensure_all_finite=False, y_numeric=not seen.classifies)
        checked, labels = validate_data(self, as_numpy(X), as_numpy(y), **options)
        rows = as_finite(checked, X)
        if seen.classifies and self._found(np.asarray(labels), isinstance(y, Tensor)) > 2:
            return self._fit_each(X, np.asarray(labels))
        target = self._targets(np.asarray(labels), seen, rows)
        expect = QUADRATURE if self.expectation is None else self.expectation
        if not isinstance(expect, Expectation):
            raise TypeError(f"expectation must be GaussHermite(), Delta() or None, got {expect!r}.")
        if isinstance(expect, Delta) and (self.optimise or not seen.concave or self.inducing is not None):
            raise ValueError(
                "Delta, Laplace's approximation, takes optimise=False, no inducing points and a concave likelihood: "
                "leave expectation=None."
            )
        self.X_, self._y, self._expect, self._device = rows, target, expect, rows.device
        if self.inducing is not None:
            self._fit_induced(kernel, seen)
        elif self.batch_size is not None:
            raise ValueError("batch_size is for inducing points: give inducing as well.")
        else:
            self._fit_dense(kernel, seen)
        return self

    def _found(self, labels: np.ndarray, tensors: bool) -> int:
        """How many classes there are."""
        check_classification_targets(labels)
        unique = np.unique(labels)
        if len(unique) < 2:
            raise ValueError(f"y has one class only, {unique[0].item()!r}: at least two are needed.")
        self.classes_ = torch.as_tensor(unique) if tensors else unique
        return len(unique)

    def _fit_each(self, X: Any, labels: np.ndarray) -> GaussianProcess:
        """A process for each class, against the rest."""
        known = as_numpy(self.classes_)
        self.estimators_ = [self._fresh().fit(X, (labels == label).astype(int)) for label in known]
        self.kernel_ = [own.kernel_ for own in self.estimators_]
        self.likelihood_ = self.estimators_[0].likelihood_
        self.elbo_ = sum(own.elbo_ for own in self.estimators_)
        self.n_iter_ = max(own.n_iter_ for own in self.estimators_)
        return self

    def _fresh(self) -> GaussianProcess:
        return type(self)(**self.get_params(deep=False))

    def _targets(self, labels: np.ndarray, seen: Observation, rows: Tensor) -> Tensor:
        self.__dict__.pop("estimators_", None)
        if seen.classifies:
            return torch.as_tensor(labels == as_numpy(self.classes_)[1]).to(rows)
        target = torch.as_tensor(np.array(labels, dtype=np.float64)).to(rows)
        seen.check(target)
        return target

    def _fit_dense(self, kernel: Kernel, seen: Observation) -> None:
        best: list[Any] = [None]

        def bound(kernel: Kernel, seen: Observation) -> Tensor:
            """-elbo at the best q for these numbers, with its gradient."""
            K = kernel(self.X_, self.X_)
            node, _ = self._run(K.detach(), seen, best[0], 1e-6)
            best[0] = node.natural
            tilted = node.family.at(node.natural)  # pyright: ignore[reportAttributeAccessIssue]
            mean, variance = tilted.mean, tilted.variance
            value = expected_value(seen, mean, variance, self._y, self._expect) + node.entropy
            moved = (K * tilted.gradient()).sum()
            return -(value + moved - moved.detach())

        if self.optimise:
            kernel, seen = self._climb(kernel, seen, bound)
        node, result = self._run(kernel(self.X_, self.X_).detach(), seen, best[0], self.tolerance)
        self.kernel_, self.likelihood_, self.sites_ = kernel, seen, node.natural
        self.elbo_, self.n_iter_ = result.elbo, result.steps
        self._belief: Tilted | Node = node.family.at(node.natural)  # pyright: ignore[reportAttributeAccessIssue]

    def _run(self, K: Tensor, seen: Observation, sites: Parameters | None, tolerance: float) -> tuple[Node, Any]:
        family = Sited(K)
        with torch.no_grad():
            if sites is None or not bool(family.inside(sites)):
                sites = mode(family, seen, self._y)
            node = Node(family, sites, name="sites")
            factor = ElementwiseFactor(
                node, lambda mean, variance: seen.expected(mean, variance, self._y, self._expect)
            )
            if isinstance(self._expect, Delta):
                return node, run(node, [factor], self.steps, tolerance=tolerance)
            return node, run_to_convergence(node, [factor], self.steps, tolerance=tolerance)

    def _climb(
        self, kernel: Kernel, seen: Observation, bound: Callable[[Kernel, Observation], Tensor]
    ) -> tuple[Kernel, Observation]:
        """Numbers with the highest bound, by L-BFGS in their logarithms."""
        logs = _logs(kernel, seen, self._device)
        if not logs:
            return kernel, seen
        optimizer = torch.optim.LBFGS(
            list(logs.values()), max_iter=self.rounds, max_eval=self.rounds, line_search_fn="strong_wolfe",
            tolerance_grad=1e-3, tolerance_change=1e-6,
        )  # fmt: skip

        def closure() -> Tensor:
            optimizer.zero_grad()
            try:
                value = bound(*_with(kernel, seen, logs))
            except (OutsideDomain, ValueError):
                value = 1e10 + torch.stack([log.square().sum() for log in logs.values()]).sum()
            value.backward()
            return value.detach()

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*steps were not enough.*")
            optimizer.step(closure)  # pyright: ignore[reportArgumentType]
        # Noise may vanish, and lengths be endless; a scale or variance this large is one that was not found.
        if far := [name for name, log in logs.items() if "length" not in name and bool((log >= LIMIT).any())]:
            checks.warn(f"{far[0]} went to the end of its range, 1e5: divide y by its size.")
        found = _with(kernel, seen, logs)
        return found[0].plain(), found[1].plain()

    # --- with inducing points ---

    def _fit_induced(self, kernel: Kernel, seen: Observation) -> None:
        self.inducing_ = points = self._points(kernel)
        zero, eye = torch.zeros(len(points)).to(points), torch.eye(len(points)).to(points)
        node = Node(NORMAL, NORMAL.of(zero, eye), name="inducing values")
        prior = Prior(node, NORMAL.of(zero, eye))

        def factor(kernel: Kernel, seen: Observation, index: Any = slice(None), scale: float = 1.0) -> Induced:
            x, y = self.X_[index], self._y[index]
            return Induced(node, kernel, seen, x, y, points, self._expect, scale=scale)

        if self.batch_size is None:

            def bound(kernel: Kernel, seen: Observation) -> Tensor:
                own = factor(kernel, seen)
                with torch.no_grad():
                    run(node, [prior, own], self.steps, domain="search", tolerance=1e-6)
                return -(own.differentiable() + prior.value() + node.entropy)

            if self.optimise:
                kernel, seen = self._climb(kernel, seen, bound)
            with torch.no_grad():
                factors = [prior, factor(kernel, seen)]
                result = run(node, factors, self.steps, domain="search", tolerance=self.tolerance)
            self.elbo_, self.n_iter_ = result.elbo, result.steps
        else:
            kernel, seen = self._stream(kernel, seen, node, prior, factor)
        self.kernel_, self.likelihood_, self.sites_, self._belief = kernel, seen, node.natural, node

    def _stream(
        self, kernel: Kernel, seen: Observation, node: Node, prior: Prior, factor: Callable[..., Induced]
    ) -> tuple[Kernel, Observation]:
        """Batches: a step of the rule for the belief, one of Adam for the numbers."""
        total, size = len(self.X_), self.batch_size
        if not (isinstance(size, (int, np.integer)) and 1 <= size <= total):
            raise ValueError(f"batch_size must be a whole number from 1 to {total}, got {size!r}.")
        logs = _logs(kernel, seen, self._device) if self.optimise else {}
        adam = torch.optim.Adam(list(logs.values()), self.lr) if logs else None
        generator = torch.Generator().manual_seed(seed32(self.seed))
        order, at = torch.randperm(total, generator=generator), 0
        for _ in range(self.steps):
            if at + size > total:
                order, at = torch.randperm(total, generator=generator), 0
            index, at = order[at : at + size], at + size
            batch = factor(*_with(kernel, seen, logs), index, total / size)
            step(node, [prior, batch], self.rho)
            if adam is not None:
                adam.zero_grad()
                (-batch.differentiable() / total).backward()
                adam.step()
        kernel, seen = _with(kernel, seen, logs)
        kernel, seen = kernel.plain(), seen.plain()
        with torch.no_grad():
            pieces = [factor(kernel, seen, slice(k, k + 4096)) for k in range(0, total, 4096)]
            self.elbo_, self.n_iter_ = float(elbo([node], [prior, *pieces])), self.steps
        return kernel, seen

    def _points(self, kernel: Kernel) -> Tensor:
        wanted = self.inducing
        if not isinstance(wanted, (int, np.integer)):
            points = checks.require_matrix("inducing", np.atleast_2d(as_numpy(wanted))).to(self.X_)
            if points.shape[1] != self.X_.shape[1]:
                raise ValueError(f"inducing must have {self.X_.shape[1]} columns, got {tuple(points.shape)}.")
            return points
        count = int(wanted)
        if not 1 <= count <= len(self.X_):
            raise ValueError(f"inducing must be in 1 to {len(self.X_)}, the number of rows, got {count}.")
        # Those that leave the least variance to the others, one after the other (pivoted Cholesky).
        generator = torch.Generator().manual_seed(seed32(self.seed))
        pool = self.X_[torch.randperm(len(self.X_), generator=generator)[: max(5000, 2 * count)]]
        with torch.no_grad():
            rest, columns, chosen = kernel.diagonal(pool).clone(), pool.new_zeros(len(pool), count), []
            for k in range(count):
                pick = int(rest.argmax())
                if not rest[pick] > 1e-8 * rest.new_ones(()) * kernel.diagonal(pool[pick, None])[0]:
                    break  # the rest follows from these
                column = kernel(pool, pool[pick, None])[:, 0] - columns[:, :k] @ columns[pick, :k]
                columns[:, k] = column / rest[pick].sqrt()
                rest = rest - columns[:, k].square()
                chosen.append(pick)
        return pool[chosen]

    # --- what is asked of it ---

    def _each(self) -> list[GaussianProcess]:
        return getattr(self, "estimators_", [self])

    def latent(self, X: Any) -> tuple[Any, Any]:
        """Mean and variance of f at new rows, (n,); of several classes (n, C)."""
        rows = self._new(X)
        found = [own._latent(rows, full=False) for own in self._each()]
        mean, variance = (torch.stack(parts, 1) for parts in zip(*found))
        one = len(found) == 1
        return _like(X, mean[:, 0] if one else mean), _like(X, variance[:, 0] if one else variance)

    def _latent(self, rows: Tensor, *, full: bool) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            kernel = self.kernel_
            if isinstance(self._belief, Tilted):
                cross = kernel(self.X_, rows)
                mean = cross.mT @ self._belief.weights
                prior = kernel(rows, rows) if full else kernel.diagonal(rows)
                covariance = prior - self._belief.reduction(cross, diagonal=not full)
            else:
                design, rest = features(kernel, rows, self.inducing_)
                centre, spread = NORMAL.moments(self._belief.natural)
                mean, pulled = design @ centre, design @ spread
                covariance = (pulled * design).sum(1) + rest
                if full:
                    covariance = kernel(rows, rows) + (pulled - design) @ design.mT
            return mean, covariance if full else covariance.clamp(min=0)

    def predict(self, X: Any, return_std: bool = False, *, noise: bool = False) -> Any:
        """Labels, or expected targets; with their deviation, which counts the noise of single targets if `noise`."""
        if self._knows().classifies:
            if return_std:
                raise ValueError("labels have no deviation: predict_proba says how sure they are.")
            labels = as_numpy(self.classes_)[self._probabilities(self._new(X)).argmax(1).cpu().numpy()]
            tensors = isinstance(X, Tensor) and labels.dtype.kind in "biuf"
            return torch.as_tensor(labels, device=X.device) if tensors else labels
        found = self.likelihood_.predict(*self._latent(self._new(X), full=False))
        if not return_std:
            return _like(X, found.mean)
        variance = found.variance + found.noise if noise else found.variance
        return _like(X, found.mean), _like(X, variance.sqrt())

    def _probabilities(self, rows: Tensor) -> Tensor:
        each = self._each()
        p = torch.stack([own.likelihood_.predict(*own._latent(rows, full=False)).mean for own in each], 1)
        return torch.cat([1 - p, p], 1) if len(each) == 1 else p / p.sum(1, keepdim=True)

    @available_if(_classifies)
    def predict_proba(self, X: Any) -> Any:
        """The probability of each class, (n, C), averaged over the belief about f."""
        return _like(X, self._probabilities(self._new(X)))

    def log_predictive(self, X: Any, y: Any) -> Any:
        """log p(y | x, data) of each row."""
        rows, labels = self._new(X), np.asarray(as_numpy(y))
        if labels.shape != (len(rows),):
            raise ValueError(f"y must have one target for each of {len(rows)} rows, got shape {labels.shape}.")
        if not self.likelihood_.classifies:
            target = torch.as_tensor(labels).to(rows)
            return _like(X, self.likelihood_.log_predictive(*self._latent(rows, full=False), target))
        known = as_numpy(self.classes_)
        if not np.isin(labels, known).all():
            raise ValueError(
                f"y holds {labels[~np.isin(labels, known)][0].item()!r}, which is none of {known.tolist()}."
            )
        at = np.searchsorted(known, labels)
        return _like(X, self._probabilities(rows).gather(1, torch.as_tensor(at)[:, None].to(rows.device))[:, 0].log())

    def score(self, X: Any, y: Any) -> float:
        """Accuracy, or R²."""
        found = as_numpy(self.predict(X))
        return float((accuracy_score if self.likelihood_.classifies else r2_score)(as_numpy(y), found))

    def sample(self, X: Any, count: int = 1, seed: int | None = None) -> Any:
        """Functions drawn from the belief, at these rows: (count, n), of several classes (count, n, C)."""
        checks.require_whole(count=count)
        rows, generator = self._new(X), torch.Generator().manual_seed(seed32(self.seed if seed is None else seed))
        drawn = []
        for own in self._each():
            mean, covariance = own._latent(rows, full=True)
            values, vectors = torch.linalg.eigh((covariance + covariance.mT) / 2)
            noise = torch.randn(count, len(mean), dtype=mean.dtype, generator=generator).to(mean.device)
            drawn.append(mean + (noise * values.clamp(min=0).sqrt()) @ vectors.mT)
        return _like(X, drawn[0] if len(drawn) == 1 else torch.stack(drawn, 2))

    def _knows(self) -> Observation:
        check_is_fitted(self, "kernel_")
        return self.likelihood_

    def _new(self, X: Any) -> Tensor:
        check_is_fitted(self, "kernel_")
        rows = validate_data(self, as_numpy(X), reset=False, dtype=np.float64, ensure_all_finite=False)
        return as_finite(rows, X).to(self._each()[0].X_)


def _like(X: Any, value: Tensor) -> Any:
    return value.to(X.device) if isinstance(X, Tensor) else value.cpu().numpy()


def _logs(kernel: Kernel, seen: Observation, device: torch.device) -> dict[str, Tensor]:
    parts: dict[str, Tunable] = {"kernel": kernel, "likelihood": seen}
    return {
        f"{name}.{inner}": number.log().to(device).clone().requires_grad_()
        for name, part in parts.items()
        for inner, number in part.numbers().items()
    }


def _with(kernel: Kernel, seen: Observation, logs: dict[str, Tensor]) -> tuple[Kernel, Observation]:
    numbers = {name: log.clamp(-LIMIT, LIMIT).exp() for name, log in logs.items()}
    own = {name.removeprefix("kernel."): n for name, n in numbers.items() if name.startswith("kernel.")}
    other = {name.removeprefix("likelihood."): n for name, n in numbers.items() if name.startswith("likelihood.")}
    return kernel.replaced(own), seen.replaced(other)
