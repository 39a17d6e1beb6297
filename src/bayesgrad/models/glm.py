r"""Generalised linear models with a Gaussian posterior over all weights."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from numbers import Real
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import type_of_target
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from bayesgrad import inference
from bayesgrad.families import Gaussian as GaussianFamily
from bayesgrad.families import Parameters
from bayesgrad.inference.expectation import Expectation
from bayesgrad.inference.factor import Factor, predictor_moments
from bayesgrad.models import checks
from bayesgrad.models.checks import as_finite, as_numpy, like
from bayesgrad.models.estimator import OBSERVATIONS, Supervised, classifies
from bayesgrad.models.multinomial import Multinomial, MultinomialLogLikelihood, quadrature
from bayesgrad.models.observations import CallableLikelihood, fit_hyperparameters
from bayesgrad.noise import seed32

NORMAL = GaussianFamily()
LIKELIHOODS = ("gaussian", "logistic", "probit", "poisson", "student-t", "multinomial")
EXPECTATIONS = ("quadrature", "delta", "mc")
CHUNK = 1 << 21  # numbers that one factor evaluates at a time
LEARN = "learn"


@dataclass(eq=False, repr=False)
class GLM(Supervised):
    r"""Generalised linear models: y depends on x'θ, with a Gaussian posterior q(θ) = N(m, V) over all weights.

    The Bayesian learning rule computes it:

    .. math::
        V^{-1} \leftarrow (1-\rho) V^{-1} + \rho\left(\Lambda - X^T E_q[\ell''] X\right), \quad
        m \leftarrow m + \rho V \left(X^T E_q[\ell'] - \Lambda m\right)

    A step has size rho, and is halved until the bound does not decrease.

    Args:
        likelihood: `"gaussian"`, `"student-t"` (robust regression), `"poisson"` (counts, log link); `"logistic"`,
            `"probit"` (two classes), `"multinomial"` (softmax, any number of them).
        prior_precision: Λ of the prior N(0, Λ^-1) of the coefficients: a number, one per column of X, or a matrix. It
            corresponds to alpha of `Ridge` for noise of scale 1, and to 1/C of `LogisticRegression`. In a multinomial
            model it is the prior of the weights of each class.
        expectation: how E_q is computed. `"quadrature"`: 32 Gauss-Hermite points for each x'θ (for `"logistic"` the
            error per row is 1e-4 nats up to a standard deviation of x'θ of 10, and 0.03 at 10^4, which separable data
            with weak priors have); a grid of 20 x 20 for three classes, 256 fixed quasi-random points for more.
            `"delta"`: at the mean, which is Newton's method and the Laplace approximation. `"mc"`: 64 samples for each
            x'θ, the same in each step.
        fit_intercept: whether to add an intercept to x'θ.
        intercept_precision: the prior precision of the intercept; nearly flat by default, because scikit-learn does
            not penalise it.
        noise_scale: standard deviation of the noise of `"gaussian"`, scale of `"student-t"`: a number, or `"learn"`,
            which maximises E_q[log p(y | θ)] after each step (always by quadrature).
        dof: degrees of freedom of `"student-t"`: a number, or `"learn"`.
        max_iter: maximum number of steps, in `partial_fit` per call.
        tol: stop when the relative change of the bound is below this.
        rho: initial step size, in (0, 1].
        random_state: an integer, the seed of `"mc"` and the default seed of `sample_posterior`.
        progress: whether to print a progress line; None prints one in a terminal, after two seconds.

    Attributes:
        coef_: mean of the coefficients: (P,), for classifiers (1, P), for multinomial models (C, P).
        intercept_: mean of the intercept: a number, for classifiers (1,) or (C,); 0 without an intercept.
        coef_covariance_: covariance of the flattened coefficients, (P, P) or (C P, C P). The direction in which all
            classes of a multinomial model change equally has its prior variance, since the data do not depend on it.
        intercept_variance_: variance of the intercept, with the shape of `intercept_`.
        elbo_: the bound on the log evidence, with all constants; exact for `"gaussian"`, the Laplace approximation for
            `"delta"`. After `partial_fit` the sum over batches, each given those before.
        elbos_: the bound before the first step and after each step of the last call.
        n_iter_: number of steps of the last call.
        classes_: the labels (classifiers).
        noise_scale_, dof_: the given or learned values, for likelihoods that have them.
        n_features_in_, feature_names_in_: as in scikit-learn.

    Results are NumPy arrays, or tensors if X is a tensor. Computations use float64.

    >>> from sklearn.datasets import load_breast_cancer
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> model = GLM("logistic").fit((X - X.mean(0)) / X.std(0), y)
    >>> print(f"{model.elbo_:.2f} after {model.n_iter_} steps")
    -62.26 after 19 steps

    Reference: Khan and Rue 2023, Eqs. 10, 11 and 58; Khan and Lin, 2017 (conjugate-computation variational inference).
    Checked by: tests/equations/test_glm.py, tests/contract/test_glm.py.
    """

    _binary = ("logistic", "probit")
    _fixed_settings = ("likelihood", "fit_intercept")
    _observation: Any = field(init=False)  # an Observation, or Multinomial
    likelihood: str = "gaussian"
    _: KW_ONLY
    prior_precision: Any = 1.0
    expectation: str = "quadrature"
    fit_intercept: bool = True
    intercept_precision: float = 1e-6
    noise_scale: float | str = 1.0
    dof: float | str = 4.0
    max_iter: int = 100
    tol: float = 1e-9
    rho: float = 1.0
    random_state: int = 0
    progress: bool | None = None

    # --- learning ---

    def fit(self, X: Any, y: Any) -> GLM:
        """Fits the model to all data and discards previous fits.

        Args:
            X: (n, P).
            y: (n,): numbers, counts or labels.

        Raises:
            ValueError: a parameter is invalid, or the data do not match the likelihood.
        """
        with checks.restore_on_error(self):
            design, targets = self._read(X, y, reset=True)
            self._prepare(y, targets)
            self._run(X, design, self._encode(targets, design), prior=self._prior(design))
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> GLM:
        """Updates the posterior with one more batch; the previous posterior is the prior, and no data are stored.

        Exact for `"gaussian"`; for other likelihoods each batch adds a Gaussian approximation. A call after `fit`
        continues from its posterior.

        Args:
            classes: all labels of a classifier, required in the first call.

        Raises:
            ValueError: as `fit`; or the noise is to be learned, which needs all data at once.
        """
        first = not hasattr(self, "_natural")
        if not first:
            self._require_same_settings()
        if LEARN in self._hyperparameters().values():
            raise ValueError("partial_fit cannot learn noise_scale or dof: pass numbers, or use fit.")
        with checks.restore_on_error(self):
            design, targets = self._read(X, y, reset=first)
            if first:
                if classifies(self) and classes is None:
                    raise ValueError("the first call of partial_fit needs classes, the list of all labels.")
                self._prepare(y, np.asarray(as_numpy(classes)) if classifies(self) else targets)
            elif not classifies(self):
                self._prepare(y, targets)  # noise_scale and dof may change between batches
            prior = self._prior(design) if first else tuple(part.to(design) for part in self._natural)
            before = 0.0 if first else self.elbo_
            self._run(X, design, self._encode(targets, design), prior, before=before, update=not first)
        return self

    def _prepare(self, y: Any, targets: np.ndarray) -> None:
        """Checks parameters and determines the classes."""
        checks.require_one_of(self, likelihood=LIKELIHOODS, expectation=EXPECTATIONS)
        checks.require_positive_integer(max_iter=self.max_iter)
        checks.require_non_negative(tol=self.tol)
        checks.require_integer(random_state=self.random_state)
        self._remember_settings()
        for name in ("intercept_precision", "noise_scale", "dof"):
            value = getattr(self, name)
            if value != LEARN and not (isinstance(value, Real) and 0 < float(value) < math.inf):
                raise ValueError(f"{name} must be a positive number, got {value!r}.")
        observation: Any = OBSERVATIONS[self.likelihood]
        if not observation.classifies:
            given = self._hyperparameters().items()
            self._observation = observation(**{k: 1.0 if v == LEARN else float(v) for k, v in given})
            return
        count = self._set_classes(y, targets)
        if observation is Multinomial:
            self._observation = Multinomial(count)
        elif count > 2:
            raise ValueError(
                f"Only binary classification is supported. The type of the target is {type_of_target(targets)}: "
                f"use likelihood='multinomial' for {count} classes."
            )
        else:
            self._observation = observation()

    def _hyperparameters(self) -> dict[str, Any]:
        """The given hyperparameters of the likelihood."""
        own = {"gaussian": ("scale",), "student-t": ("scale", "dof")}.get(str(self.likelihood), ())
        return {name: self.noise_scale if name == "scale" else self.dof for name in own}

    def _encode(self, targets: np.ndarray, rows: Tensor) -> Tensor:
        if self.likelihood == "poisson" and targets.min() < 0:
            raise ValueError(f"y must be non-negative counts, got {targets.min():g}.")
        return super()._encode(targets, rows)

    def _prior(self, design: Tensor) -> Parameters:
        """Natural parameters of N(0, Λ^-1) for each contrast of classes; the intercept is last."""
        precision = checks.require_precision("prior_precision", self.prior_precision, design.shape[1]).to(design)
        if self.fit_intercept:
            precision = torch.block_diag(precision, precision.new_full((1, 1), self.intercept_precision))
        precision = torch.block_diag(*[precision] * self._outputs())
        return NORMAL.of(precision.new_zeros(len(precision)), precision)

    def _outputs(self) -> int:
        return len(self.classes_) - 1 if isinstance(self._observation, Multinomial) else 1

    def _with_intercept(self, design: Tensor) -> Tensor:
        return torch.cat([design, torch.ones_like(design[:, :1])], 1) if self.fit_intercept else design

    def _run(
        self, X: Any, design: Tensor, y: Tensor, prior: Parameters, *, before: float = 0.0, update: bool = False
    ) -> None:
        design = self._with_intercept(design)
        node = inference.Node(NORMAL, prior, name="weights")
        node.natural = self._start(design, y, prior, update)
        factors: list[Factor] = [inference.Prior(node, prior), *self._factors(node, design, y)]
        learned = [name for name, value in self._hyperparameters().items() if value == LEARN]
        once = self._observation.conjugate and not learned and self.rho == 1

        def tune() -> None:
            z, variance = self._predictor_moments(design, node.natural)
            self._observation = fit_hyperparameters(self._observation, learned, z, variance, y)
            if learned and not float(self._observation.scale) > 1e-8 * float(y.abs().max()):
                raise ValueError("noise_scale cannot be learned because X explains y without noise: pass a number.")
            factors[1:] = self._factors(node, design, y)

        if learned:
            tune()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not converged after")
            result = inference.run(
                node,
                factors,
                steps=1 if once else self.max_iter,
                rho=self.rho,
                tolerance=0 if once else self.tol,
                domain="search",
                tune=tune if learned else None,
                progress=self.progress,
            )
        if not result.converged and not once:
            change = abs(result.elbos[-1] - result.elbos[-2])
            checks.warn(
                f"not converged after max_iter={self.max_iter} steps: the bound still changes by {change:.1g}.",
                ConvergenceWarning,
            )
        self.elbos_ = [before + bound for bound in result.elbos]
        self.elbo_, self.n_iter_ = self.elbos_[-1], result.steps
        self._natural = node.natural
        self._set_attributes(X, design)

    def _start(self, design: Tensor, y: Tensor, prior: Parameters, update: bool) -> Parameters:
        """The prior mean, with a precision that includes the data: under a broad prior E[exp(x'θ)] would overflow."""
        observation, outputs = self._observation, self._outputs()
        mean = NORMAL.moments(prior)[0].clone()
        if self.fit_intercept and not update and not observation.classifies:
            mean[-1] = observation.start(y).mean()
        z = design @ mean.view(outputs, -1).mT
        weights = observation.information(z if isinstance(observation, Multinomial) else z[:, 0])
        gain = design.mT @ (weights[:, None] * design)
        precision = -2 * prior[1] + torch.block_diag(*[gain] * outputs)
        if observation.least_squares and not update:
            mean = torch.linalg.solve(precision, prior[0] + design.mT @ (weights * y))
        return NORMAL.of(mean, precision)

    def _factors(self, node: inference.Node, design: Tensor, y: Tensor) -> list[Factor]:
        """The factors of the likelihood, for chunks of rows to limit memory."""
        observation, outputs = self._observation, self._outputs()
        if observation.conjugate:
            return [inference.linear_gaussian(node, design, y, 1 / float(observation.scale) ** 2)]  # pyright: ignore
        rows = max(1, CHUNK // (outputs * (32 if outputs == 1 else 512)))
        factor, log_likelihood = inference.LinearPredictorFactor, CallableLikelihood
        if isinstance(observation, Multinomial):
            factor, log_likelihood = inference.MultiLinearPredictorFactor, MultinomialLogLikelihood
        parts = enumerate(zip(design.split(rows), y.split(rows)))
        return [
            factor(node, x, log_likelihood(observation, own), self._expectation(place))  # pyright: ignore
            for place, (x, own) in parts
        ]

    def _expectation(self, place: int) -> Expectation:
        if self.expectation == "delta":
            return inference.Delta()
        if self.expectation == "mc":
            return inference.MonteCarlo(64, "reparameterised", fixed=True, seed=self.random_state + place)
        return quadrature(self._outputs())

    def _set_attributes(self, X: Any, design: Tensor) -> None:
        """Sets the fitted attributes, as arrays of the type of X."""
        kind, outputs = like(X), self._outputs()
        mean, covariance = NORMAL.moments(self._natural)
        mean, size = mean.view(outputs, -1), design.shape[1]
        if isinstance(self._observation, Multinomial):
            basis = self._observation.basis(design)
            common = torch.full_like(basis @ basis.mT, 1 / len(basis))
            prior = NORMAL.moments(self._prior(design[:, : self.n_features_in_]))[1][:size, :size]
            blocks = covariance.view(outputs, size, outputs, size)
            covariance = torch.einsum("cj,jpkq,dk->cpdq", basis, blocks, basis)
            covariance += torch.einsum("cd,pq->cpdq", common, prior)
            mean = basis @ mean
        count, features = len(mean), self.n_features_in_
        blocks = covariance.reshape(count, size, count, size)
        flat = blocks[:, :features, :, :features].reshape(count * features, count * features)
        intercept, variance = mean.new_zeros(count), mean.new_zeros(count)
        if self.fit_intercept:
            intercept, variance = mean[:, -1], blocks[:, -1, :, -1].diagonal().clone()
        self.coef_covariance_ = kind(flat)
        if self._observation.classifies:
            self.coef_, self.intercept_ = kind(mean[:, :features]), kind(intercept)
            self.intercept_variance_ = kind(variance)
        else:
            self.coef_ = kind(mean[0, :features])
            self.intercept_, self.intercept_variance_ = intercept.item(), variance.item()
        for name in self._hyperparameters():
            setattr(self, {"scale": "noise_scale_"}.get(name, f"{name}_"), float(getattr(self._observation, name)))

    # --- predicting ---

    def _predictor_moments(self, design: Tensor, natural: Parameters) -> tuple[Tensor, Tensor]:
        """Mean and variance of x'θ for each row; for a multinomial model means and covariances of contrasts."""
        mean, covariance = NORMAL.moments(natural)
        z, variance = predictor_moments(design, mean, covariance, self._outputs())
        return (z, variance) if isinstance(self._observation, Multinomial) else (z[:, 0], variance[:, 0, 0])

    def _map_chunks(self, X: Any, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        check_is_fitted(self, "coef_")
        design = self._with_intercept(as_finite(self._validated(X), X))
        natural = tuple(part.to(design) for part in self._natural)
        size = max(1, CHUNK // (512 * self._outputs()))
        return torch.cat([function(*self._predictor_moments(part, natural)) for part in design.split(size)])

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """E[y | x] averaged over the posterior, or the most probable class.

        Args:
            return_std: also return the standard deviation of y including noise (regressors only).
        """
        if classifies(self):
            return self._most_probable(X, self._map_chunks(X, self._probabilities))
        mean = like(X)(self._map_chunks(X, lambda z, v: self._observation.predict(z, v).mean))
        if not return_std:
            return mean
        return mean, like(X)(self._map_chunks(X, self._deviation))

    def _deviation(self, z: Tensor, variance: Tensor) -> Tensor:
        found = self._observation.predict(z, variance)
        return (found.variance + found.noise).sqrt()

    def _probabilities(self, z: Tensor, variance: Tensor) -> Tensor:
        if isinstance(self._observation, Multinomial):
            return self._observation.mean(z, variance)
        p = self._observation.predict(z, variance).mean
        return torch.stack([1 - p, p], 1)

    @available_if(classifies)
    def predict_proba(self, X: Any) -> Any:
        """Probabilities of `classes_`, (n, C), averaged over the posterior."""
        return like(X)(self._map_chunks(X, self._probabilities))

    def sample_posterior(self, n_samples: int = 1, random_state: int | None = None) -> tuple[Any, Any]:
        """Posterior samples of coefficients and intercept, (n_samples, ...) in the shapes of `coef_`, `intercept_`."""
        check_is_fitted(self, "coef_")
        checks.require_positive_integer(n_samples=n_samples)
        generator = torch.Generator().manual_seed(seed32(self.random_state if random_state is None else random_state))
        outputs, features = self._outputs(), self.n_features_in_
        drawn = NORMAL.sample(self._natural, n_samples, generator).view(n_samples, outputs, -1)
        if isinstance(self._observation, Multinomial):
            prior = self._prior(drawn.new_empty(1, features))
            common = NORMAL.sample(prior, n_samples, generator).view(n_samples, outputs, -1)[:, :1]
            drawn = self._observation.basis(drawn) @ drawn + common / len(self.classes_) ** 0.5
        kind = like(self.coef_)
        intercept = drawn[..., -1] if self.fit_intercept else drawn.new_zeros(drawn.shape[:2])
        if self._observation.classifies:
            return kind(drawn[..., :features]), kind(intercept)
        return kind(drawn[:, 0, :features]), kind(intercept[:, 0])
