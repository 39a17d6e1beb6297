"""Gaussian processes for regression, classification, counts and data with outliers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import torch
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from bayesgrad import inference
from bayesgrad.families import Gaussian, Parameters
from bayesgrad.inference.expectation import Expectation
from bayesgrad.models import checks, process
from bayesgrad.models.checks import as_finite, as_numpy, like
from bayesgrad.models.estimator import Supervised, classifies
from bayesgrad.models.hyperparameters import ProcessModel, maximise
from bayesgrad.models.kernels import RBF, Kernel
from bayesgrad.models.observations import QUADRATURE, Observation, get_observation
from bayesgrad.noise import seed32

NORMAL = Gaussian()


@dataclass(eq=False, repr=False)
class GaussianProcess(Supervised):
    r"""Gaussian processes: a function f ~ GP(0, k), observed through y_i ~ p(y | f(x_i)).

    The posterior of the values f is the prior times a Gaussian site for each value. The learning rule updates the
    sites,

    .. math::
        \lambda_i \leftarrow (1 - \rho) \lambda_i + \rho \nabla_{\mu_i} E_q[\log p(y_i \mid f_i)]

    and converges to the Gaussian with the highest bound on the evidence. With Gaussian noise one step is exact, and
    the bound is the log evidence. Hyperparameters of the kernel and of the likelihood maximise the same bound, by
    L-BFGS-B in their logarithms, between 1e-5 and 1e5; the best ones that were seen are kept. At the optimal q the
    gradient of the bound with respect to K is (K^-1 m m'K^-1 - (K + W^-1)^-1)/2, and K is never inverted.

    Args:
        kernel: a kernel of `models.kernels`; None for `1.0 * RBF(1.0)`.
        likelihood: `"gaussian"`, `"logistic"` (or `"bernoulli"`), `"probit"`, `"poisson"` (rates e^f), `"student-t"`,
            or an instance from `models.observations`.
        optimizer: `"auto"` chooses the hyperparameters by the bound (L-BFGS-B, or Adam in batches); None keeps them.
        inducing: for large data: the number of inducing points, or the points themselves; None uses all data.
        batch_size: with `inducing`, the number of rows per step; None for all.
        expectation: `GaussHermite(n)`; with `Delta()`, for log-concave likelihoods and `optimizer=None`, the result is
            the Laplace approximation and `elbo_` its evidence.
        max_iter: maximum number of steps of the learning rule; with batches, the number of steps.
        tol: stop when the relative change of the bound is below this.
        rho: step size with batches.
        learning_rate: with batches, the learning rate of Adam for the logarithms of hyperparameters.
        max_eval: maximum number of evaluations of the bound by L-BFGS-B from each start.
        n_restarts_optimizer: number of additional starts, drawn within a factor of 100 of the given hyperparameters.
        random_state: an integer, the seed of batches and samples.

    Attributes:
        kernel_, likelihood_: with the optimised hyperparameters.
        elbo_: the bound; with Gaussian noise and all data, the log evidence.
        sites_: natural parameters of the sites, (n,) and (n,); with inducing points, of their posterior.
        n_iter_: number of steps of the learning rule in the last run.
        classes_: the labels (classification).
        estimators_: with more than two classes, one process per class against the rest; `elbo_` is then the sum of
            their bounds, and probabilities are normalised.
        n_features_in_, feature_names_in_: as in scikit-learn.

    >>> X, y = np.linspace(0, 3, 20)[:, None], np.sin(np.linspace(0, 3, 20))
    >>> model = GaussianProcess(likelihood="gaussian").fit(X, y)
    >>> mean, deviation = model.predict(np.array([[1.5]]), return_std=True)
    >>> bool(abs(mean[0] - np.sin(1.5)) < 1e-3), bool(deviation[0] < 0.01)
    (True, True)

    Reference: Khan and Rue 2023, section 5.1 and Eqs. 58 to 60; Khan and Lin, 2017; Adam et al., 2021.
    Checked by: tests/equations/test_gaussian_process.py: scikit-learn, dense inference, quadrature.
    """

    kernel_: Any = field(init=False)  # a Kernel; with more than two classes a list of them
    kernel: Kernel | None = None
    likelihood: str | Observation = "gaussian"
    _: KW_ONLY
    optimizer: str | None = "auto"
    inducing: int | Any = None
    batch_size: int | None = None
    expectation: Expectation | None = None
    max_iter: int = 200
    tol: float = 1e-8
    rho: float = 0.1
    learning_rate: float = 0.02
    max_eval: int = 300
    n_restarts_optimizer: int = 0
    random_state: int = 0

    # --- learning ---

    def fit(self, X: Any, y: Any) -> GaussianProcess:
        """Fits rows X, (n, d), and targets y, (n,)."""
        checks.require_positive_integer(max_iter=self.max_iter, max_eval=self.max_eval)
        checks.require_non_negative(tol=self.tol)
        checks.require_integer(random_state=self.random_state, n_restarts_optimizer=self.n_restarts_optimizer)
        checks.require_non_negative(n_restarts_optimizer=self.n_restarts_optimizer)
        if self.optimizer not in ("auto", None):
            raise ValueError(f"optimizer must be 'auto' or None, got {self.optimizer!r}.")
        with checks.restore_on_error(self):
            return self._fit(X, y)

    def _fit(self, X: Any, y: Any) -> GaussianProcess:
        kernel = 1.0 * RBF(1.0) if self.kernel is None else self.kernel
        if not isinstance(kernel, Kernel):
            raise TypeError(
                f"kernel must be a kernel of models.kernels, got {kernel!r}: use Function(f) for a function."
            )
        observation = get_observation(self.likelihood)
        rows, labels = self._read(X, y)
        if observation.classifies and self._set_classes(y, labels) > 2:
            return self._fit_each(X, labels)
        self.__dict__.pop("estimators_", None)
        target = self._encode(labels, rows)
        observation.check(target)
        expect = QUADRATURE if self.expectation is None else self.expectation
        if not isinstance(expect, Expectation):
            raise TypeError(f"expectation must be GaussHermite(), Delta() or None, got {expect!r}.")
        possible = self.optimizer is None and observation.concave and self.inducing is None
        if isinstance(expect, inference.Delta) and not possible:
            raise ValueError(
                "expectation=Delta() (the Laplace approximation) needs optimizer=None, no inducing points and a "
                "log-concave likelihood: use expectation=None."
            )
        with torch.no_grad():  # the search would take errors of the kernel for a bound that is not finite
            kernel(rows[:1], rows[:1])
        self.X_, self._y, self._expect = rows.clone(), target, expect  # rows may be a view of X
        if self.inducing is None and self.batch_size is not None:
            raise ValueError("batch_size needs inducing points: set inducing as well.")
        fit = self._fit_dense if self.inducing is None else self._fit_induced
        model = fit(ProcessModel(kernel, observation))
        self.kernel_, self.likelihood_ = model.kernel, model.likelihood
        return self

    def _fit_each(self, X: Any, labels: np.ndarray) -> GaussianProcess:
        """Fits one process per class against the rest."""
        known, settings = as_numpy(self.classes_), self.get_params(deep=False)
        self.estimators_ = [type(self)(**settings).fit(X, (labels == label).astype(int)) for label in known]
        self.kernel_ = [own.kernel_ for own in self.estimators_]
        self.likelihood_ = self.estimators_[0].likelihood_
        self.elbo_ = sum(own.elbo_ for own in self.estimators_)
        self.n_iter_ = max(own.n_iter_ for own in self.estimators_)
        return self

    def _fit_dense(self, model: ProcessModel) -> ProcessModel:
        best: list[Any] = [None]

        def bound(model: ProcessModel) -> Tensor:
            """-elbo at the optimal q for these hyperparameters, differentiable."""
            K, observation = model.kernel(self.X_, self.X_), model.likelihood
            node, _ = self._run(K.detach(), observation, best[0], 1e-6)
            best[0] = node.natural
            posterior = node.family.at(node.natural)  # pyright: ignore[reportAttributeAccessIssue]
            mean, variance = posterior.mean, posterior.variance
            value = process.expected_value(observation, mean, variance, self._y, self._expect) + node.entropy
            moved = (K * posterior.gradient()).sum()
            return -(value + moved - moved.detach())

        model = self._maximise_bound(model, bound, lambda: best[0], lambda sites: best.__setitem__(0, sites))
        node, result = self._run(model.kernel(self.X_, self.X_).detach(), model.likelihood, best[0], self.tol)
        self.elbo_, self.n_iter_, self.sites_ = result.elbo, result.steps, node.natural
        self._belief: process.ProcessPosterior | inference.Node = node.family.at(node.natural)  # pyright: ignore[reportAttributeAccessIssue]
        return model

    def _run(
        self, K: Tensor, observation: Observation, sites: Parameters | None, tolerance: float
    ) -> tuple[inference.Node, Any]:
        family = process.ProcessWithSites(K)
        with torch.no_grad():
            if sites is None or not bool(family.in_domain(sites)):
                sites = process.mode(family, observation, self._y)
            node = inference.Node(family, sites, name="sites")
            factor = inference.ElementwiseFactor(
                node, lambda mean, variance: observation.expected(mean, variance, self._y, self._expect)
            )
            if isinstance(self._expect, inference.Delta):
                return node, inference.run(node, [factor], self.max_iter, tolerance=tolerance)
            return node, inference.run_to_convergence(node, [factor], self.max_iter, tolerance=tolerance)

    def _maximise_bound(
        self,
        model: ProcessModel,
        bound: Callable[[ProcessModel], Tensor],
        get: Callable[[], Parameters | None],
        put: Callable[[Parameters], None],
    ) -> ProcessModel:
        """The hyperparameters that maximise the bound, unless `optimizer` is None.

        Args:
            get, put: return and set the parameters of the posterior; those of the best hyperparameters are set.
        """
        if not model.hyperparameters() or self.optimizer is None:
            return model
        options = dict(max_eval=self.max_eval, restarts=self.n_restarts_optimizer, random_state=self.random_state)
        model, found = maximise(model, bound, get, self.X_.device, **options)
        put(found)
        return model

    # --- with inducing points ---

    def _fit_induced(self, model: ProcessModel) -> ProcessModel:
        self.inducing_ = points = self._points(model.kernel)
        zero, eye = torch.zeros(len(points)).to(points), torch.eye(len(points)).to(points)
        node = inference.Node(NORMAL, NORMAL.of(zero, eye), name="inducing values")
        prior = inference.Prior(node, NORMAL.of(zero, eye))

        def factor(own: ProcessModel, index: Any = slice(None), scale: float = 1.0) -> Any:
            x, y = self.X_[index], self._y[index]
            return process.InducingPointFactor(node, own, x, y, points, self._expect, scale=scale)

        def bound(own: ProcessModel) -> Tensor:
            data = factor(own)
            with torch.no_grad():
                inference.run(node, [prior, data], self.max_iter, domain="search", tolerance=1e-6)
            return -(data.differentiable() + prior.value() + node.entropy)

        if self.batch_size is None:
            model = self._maximise_bound(
                model, bound, lambda: node.natural, lambda found: setattr(node, "natural", found)
            )
            with torch.no_grad():
                factors = [prior, factor(model)]
                result = inference.run(node, factors, self.max_iter, domain="search", tolerance=self.tol)
            self.elbo_, self.n_iter_ = result.elbo, result.steps
        else:
            model = self._fit_batches(model, node, prior, factor)
        self.sites_, self._belief = node.natural, node
        return model

    def _fit_batches(
        self, model: ProcessModel, node: inference.Node, prior: inference.Prior, factor: Callable[..., Any]
    ) -> ProcessModel:
        """Batches: one step of the rule for the posterior and one step of Adam for the hyperparameters."""
        total, size = len(self.X_), self.batch_size
        if not (isinstance(size, (int, np.integer)) and 1 <= size <= total):
            raise ValueError(f"batch_size must be an integer from 1 to {total}, got {size!r}.")
        logs = {} if self.optimizer is None else model.log_hyperparameters(self.X_.device)
        adam = torch.optim.Adam(list(logs.values()), self.learning_rate) if logs else None
        generator = torch.Generator().manual_seed(seed32(self.random_state))
        order, at = torch.randperm(total, generator=generator), 0
        for _ in range(self.max_iter):
            if at + size > total:
                order, at = torch.randperm(total, generator=generator), 0
            index, at = order[at : at + size], at + size
            batch = factor(model.with_log_hyperparameters(logs), index, total / size)
            inference.step(node, [prior, batch], self.rho)
            if adam is not None:
                adam.zero_grad()
                (-batch.differentiable() / total).backward()
                adam.step()
        model = model.with_log_hyperparameters(logs).detached()
        with torch.no_grad():
            pieces = [factor(model, slice(k, k + 4096)) for k in range(0, total, 4096)]
            self.elbo_, self.n_iter_ = float(inference.elbo([node], [prior, *pieces])), self.max_iter
        return model

    def _points(self, kernel: Kernel) -> Tensor:
        wanted = self.inducing
        if not isinstance(wanted, (int, np.integer)):
            points = checks.require_matrix("inducing", np.atleast_2d(as_numpy(wanted))).to(self.X_)
            if points.shape[1] != self.X_.shape[1]:
                raise ValueError(f"inducing must have {self.X_.shape[1]} columns, got {tuple(points.shape)}.")
            return points
        count = int(wanted)
        if not 1 <= count <= len(self.X_):
            raise ValueError(f"inducing must be between 1 and the number of rows, {len(self.X_)}, got {count}.")
        generator = torch.Generator().manual_seed(seed32(self.random_state))
        pool = self.X_[torch.randperm(len(self.X_), generator=generator)[: max(5000, 2 * count)]]
        return pool[process.pivots(kernel, pool, count)]

    # --- prediction ---

    def _each(self) -> list[GaussianProcess]:
        return getattr(self, "estimators_", [self])

    def latent(self, X: Any) -> tuple[Any, Any]:
        """Mean and variance of f at new rows, (n,); with more than two classes (n, C)."""
        rows = self._fitted_rows(X)
        found = [own._latent(rows, full=False) for own in self._each()]
        mean, variance = (torch.stack(parts, 1) for parts in zip(*found))
        one = len(found) == 1
        return like(X)(mean[:, 0] if one else mean), like(X)(variance[:, 0] if one else variance)

    def _latent(self, rows: Tensor, *, full: bool) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            kernel = self.kernel_
            if isinstance(self._belief, process.ProcessPosterior):
                cross = kernel(self.X_, rows)
                mean = cross.mT @ self._belief.weights
                prior = kernel(rows, rows) if full else kernel.diagonal(rows)
                covariance = prior - self._belief.reduction(cross, diagonal=not full)
            else:
                design, rest = process.features(kernel, rows, self.inducing_)
                centre, spread = NORMAL.moments(self._belief.natural)
                mean, pulled = design @ centre, design @ spread
                covariance = (pulled * design).sum(1) + rest
                if full:
                    covariance = kernel(rows, rows) + (pulled - design) @ design.mT
            return mean, covariance if full else covariance.clamp(min=0)

    def predict(self, X: Any, return_std: bool = False, *, noise: bool = False) -> Any:
        """Labels or expected targets, with `return_std` their standard deviation, and with `noise` that of y itself."""
        rows = self._fitted_rows(X)
        if self.likelihood_.classifies:
            if return_std:
                raise ValueError("return_std is not available for labels: use predict_proba.")
            return self._most_probable(X, self._probabilities(rows))
        found = self.likelihood_.predict(*self._latent(rows, full=False))
        if not return_std:
            return like(X)(found.mean)
        variance = found.variance + found.noise if noise else found.variance
        return like(X)(found.mean), like(X)(variance.sqrt())

    def _probabilities(self, rows: Tensor) -> Tensor:
        each = self._each()
        p = torch.stack([own.likelihood_.predict(*own._latent(rows, full=False)).mean for own in each], 1)
        return torch.cat([1 - p, p], 1) if len(each) == 1 else p / p.sum(1, keepdim=True)

    @available_if(classifies)
    def predict_proba(self, X: Any) -> Any:
        """The probability of each class, (n, C), averaged over the posterior of f."""
        return like(X)(self._probabilities(self._fitted_rows(X)))

    def log_predictive(self, X: Any, y: Any) -> Any:
        """log p(y | x, data) of each row."""
        rows, labels = self._fitted_rows(X), np.asarray(as_numpy(y))
        if labels.shape != (len(rows),):
            raise ValueError(f"y must have one target for each of {len(rows)} rows, got shape {labels.shape}.")
        target = self._encode(labels, rows)
        if not self.likelihood_.classifies:
            return like(X)(self.likelihood_.log_predictive(*self._latent(rows, full=False), target))
        return like(X)(self._probabilities(rows).gather(1, target.long()[:, None])[:, 0].log())

    def sample(self, X: Any, n_samples: int = 1, random_state: int | None = None) -> Any:
        """Samples of f from the posterior at these rows: (n_samples, n), with several classes (n_samples, n, C)."""
        checks.require_positive_integer(n_samples=n_samples)
        seed = self.random_state if random_state is None else random_state
        rows, generator = self._fitted_rows(X), torch.Generator().manual_seed(seed32(seed))
        drawn = []
        for own in self._each():
            mean, covariance = own._latent(rows, full=True)
            values, vectors = torch.linalg.eigh((covariance + covariance.mT) / 2)
            noise = torch.randn(n_samples, len(mean), dtype=mean.dtype, generator=generator).to(mean.device)
            drawn.append(mean + (noise * values.clamp(min=0).sqrt()) @ vectors.mT)
        return like(X)(drawn[0] if len(drawn) == 1 else torch.stack(drawn, 2))

    def _fitted_rows(self, X: Any) -> Tensor:
        check_is_fitted(self, "kernel_")
        return as_finite(self._validated(X), X).to(self._each()[0].X_)
