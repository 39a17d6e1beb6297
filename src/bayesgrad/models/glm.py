r"""Generalised linear models with a Gaussian posterior over all weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from numbers import Real
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import Tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import type_of_target
from sklearn.utils.validation import _check_sample_weight, check_is_fitted
from torch import Tensor

from bayesgrad import inference
from bayesgrad.families import Gaussian as GaussianFamily
from bayesgrad.families import Parameters
from bayesgrad.inference.engine import ProgressLine
from bayesgrad.inference.expectation import Expectation
from bayesgrad.models import checks
from bayesgrad.models.checks import as_numpy, like
from bayesgrad.models.designs import Design, SparseDesign, as_design
from bayesgrad.models.estimator import OBSERVATIONS, Supervised, classifies
from bayesgrad.models.evidence import first_precision, flat_precision, maximise_evidence
from bayesgrad.models.known_weights import KnownWeights, known_weights
from bayesgrad.models.linear_posterior import Belief, LinearPosterior, Outcome, predictor_covariances
from bayesgrad.models.multinomial import Multinomial, quadrature
from bayesgrad.noise import seed32
from bayesgrad.warning import warn

NORMAL = GaussianFamily()
LIKELIHOODS = ("gaussian", "logistic", "probit", "poisson", "student-t", "multinomial")
EXPECTATIONS = ("quadrature", "delta", "mc")
CHUNK = 1 << 21  # numbers that a prediction evaluates at a time
LEARN, ARD = "learn", "ard"
REFINEMENTS = 3  # steps for a Gaussian likelihood: the first is exact, further ones correct its rounding errors


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
            model it is the prior of the weights of each class. `"learn"` learns one number, and `"ard"` one for each
            column (automatic relevance determination), which maximise the bound on the evidence.
        expectation: how E_q is computed. `"quadrature"`: for one x'θ with as many points as its variance needs for 8
            digits; a grid of 20 x 20 for three classes, 256 fixed quasi-random points for more, with errors of the
            bound of 1e-4 to 0.1 as deviations of scores increase from 3 to 30.
            `"delta"`: at the mean, which is Newton's method and the Laplace approximation. `"mc"`: 64 samples for each
            x'θ, the same in each step.
        fit_intercept: whether to add an intercept to x'θ.
        intercept_precision: the prior precision of the intercept. None is nearly flat, because scikit-learn does not
            penalise it: 1e-6, divided by the mean square of the targets of `"gaussian"` and `"student-t"`, less
            offsets, if that is above 1. `partial_fit` takes the targets of the first batch.
        noise_scale: standard deviation of the noise of `"gaussian"`, scale of `"student-t"`: a number, or `"learn"`,
            which maximises the bound on the evidence.
        dof: degrees of freedom of `"student-t"`: a number, or `"learn"`.
        max_iter: maximum number of steps, in `partial_fit` per call; with learned hyperparameters the maximum number of
            their updates, too.
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
        elbos_: the bound before the first step and after each step of the last call; with learned hyperparameters
            after each update of them. The first step starts near the mode.
        n_iter_: number of these steps or updates.
        prior_precision_: the given or learned prior precision: a number, (P,) or (P, P).
        classes_: the labels (classifiers).
        noise_scale_, dof_: the given or learned values, for likelihoods that have them.
        n_features_in_, feature_names_in_: as in scikit-learn.

    X may be a sparse matrix of SciPy, which stays sparse; the posterior has a dense covariance of all weights.
    Results are NumPy arrays, or tensors if X is a tensor. Computations use float64.

    >>> from sklearn.datasets import load_breast_cancer
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> model = GLM("logistic").fit((X - X.mean(0)) / X.std(0), y)
    >>> print(f"{model.elbo_:.2f} after {model.n_iter_} steps")
    -62.26 after 5 steps

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
    intercept_precision: float | None = None
    noise_scale: float | str = 1.0
    dof: float | str = 4.0
    max_iter: int = 100
    tol: float = 1e-9
    rho: float = 1.0
    random_state: int = 0
    progress: bool | None = None

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    @classmethod
    def from_parameters(
        cls,
        coef: Any,
        intercept: Any = None,
        *,
        likelihood: str = "gaussian",
        coef_covariance: Any = None,
        intercept_variance: Any = None,
        classes: Any = None,
        **settings: Any,
    ) -> GLM:
        """A model of known parameters, in the shapes of the attributes, ready to predict, to sample and to update.

        Args:
            intercept: None for a model without one.
            coef_covariance, intercept_variance: None for known parameters, with an error of 1e-10 times their size.
            classes: the labels; None for 0, 1, ...
            settings: of the estimator.
        """
        model = cls(likelihood, fit_intercept=intercept is not None, **settings)
        weights = known_weights(coef, intercept, coef_covariance, intercept_variance)
        (count, size), given = weights.mean.shape, np.arange(max(2, len(weights.mean))) if classes is None else classes
        model._prepare(given, np.asarray(as_numpy(given)))
        many = isinstance(model._observation, Multinomial)
        if count != (outputs := len(model.classes_) if many else 1):
            raise ValueError(f"coef must have {outputs} rows for likelihood={likelihood!r}, got {count}.")
        basis = model._observation.basis(weights.mean) if many else weights.mean.new_ones(1, 1)
        model._natural, model._prior_block = weights.contrasts(basis)
        model.n_features_in_, model.elbo_, model.elbos_, model.n_iter_ = size - model.fit_intercept, 0.0, [0.0], 0
        model._set_attributes(coef, size)
        return model

    # --- learning ---

    def fit(self, X: Any, y: Any, sample_weight: Any = None, offset: Any = None) -> GLM:
        """Fits the model to all data and discards previous fits.

        Args:
            X: (n, P).
            y: (n,): numbers, counts or labels.
            sample_weight: (n,): how many times each row counts.
            offset: (n,), added to x'θ; for multinomial models (n, C), added to the logits.

        Raises:
            ValueError: a parameter is invalid, or the data do not match the likelihood.
        """
        with checks.restore_on_error(self):
            design, targets = self._rows(X, y, reset=True)
            self._prepare(y, targets)
            self._run(X, design, targets, sample_weight, offset, prior=None)
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None, offset: Any = None) -> GLM:
        """Updates the posterior with one more batch; the previous posterior is the prior, and no data are stored.

        Exact for `"gaussian"`; for other likelihoods each batch adds a Gaussian approximation. A call after `fit`
        continues from its posterior.

        Args:
            classes: all labels of a classifier, required in the first call.

        Raises:
            ValueError: as `fit`; or hyperparameters are to be learned, which needs all data at once.
        """
        first = not hasattr(self, "_natural")
        if not first:
            self._require_same_settings()
        if LEARN in self._hyperparameters().values() or (first and self._learns_prior() is not None):
            raise ValueError("partial_fit cannot learn prior_precision, noise_scale or dof: pass numbers, or use fit.")
        with checks.restore_on_error(self):
            design, targets = self._rows(X, y, reset=first)
            if first:
                if classifies(self) and classes is None:
                    raise ValueError("the first call of partial_fit needs classes, the list of all labels.")
                self._prepare(y, np.asarray(as_numpy(classes)) if classifies(self) else targets)
            elif not classifies(self):
                self._prepare(y, targets)  # noise_scale and dof may change between batches
            prior = None if first else self._natural
            self._run(X, design, targets, sample_weight, offset, prior)
        return self

    def _rows(self, X: Any, y: Any, *, reset: bool) -> tuple[Design, np.ndarray]:
        rows, targets = self._validated(
            X, y=as_numpy(y), reset=reset, y_numeric=not classifies(self), accept_sparse="csr"
        )
        return as_design(rows, X, intercept=self.fit_intercept), np.asarray(targets)

    def _prepare(self, y: Any, targets: np.ndarray) -> None:
        """Checks parameters and determines the classes."""
        checks.require_one_of(self, likelihood=LIKELIHOODS, expectation=EXPECTATIONS)
        checks.require_positive_integer(max_iter=self.max_iter)
        checks.require_non_negative(tol=self.tol)
        checks.require_integer(random_state=self.random_state)
        if not (checks.is_number(self.rho) and 0 < self.rho <= 1):
            raise ValueError(f"rho must be in (0, 1], got {self.rho!r}.")
        self._remember_settings()
        for name in ("intercept_precision", "noise_scale", "dof"):
            value = getattr(self, name)
            chosen = value is None if name == "intercept_precision" else isinstance(value, str) and value == LEARN
            if not chosen and not (isinstance(value, Real) and 0 < float(value) < math.inf):
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

    def _learns_prior(self) -> str | None:
        given = self.prior_precision
        return {LEARN: "one", ARD: "each"}.get(given) if isinstance(given, str) else None

    def _encode(self, targets: np.ndarray, rows: Tensor) -> Tensor:
        if self.likelihood == "poisson" and targets.min() < 0:
            raise ValueError(f"y must be non-negative counts, got {targets.min():g}.")
        return super()._encode(targets, rows)

    def _outputs(self) -> int:
        return len(self.classes_) - 1 if isinstance(self._observation, Multinomial) else 1

    def _offsets(self, offset: Any, design: Design) -> Tensor | None:
        """Offsets of the predictors, (n, K), or (n,) for one."""
        if offset is None:
            return None
        given = checks.require_numbers("offset", as_numpy(offset)).to(design.device)
        many = isinstance(self._observation, Multinomial)
        shape = (design.shape[0], len(self.classes_)) if many else (design.shape[0],)
        if given.shape != shape or not torch.isfinite(given).all():
            raise ValueError(f"offset must be finite numbers of shape {shape}, got shape {tuple(given.shape)}.")
        return given @ self._observation.basis(given) if many else given

    def _run(
        self, X: Any, design: Design, targets: np.ndarray, sample_weight: Any, offset: Any, prior: Parameters | None
    ) -> None:
        like_y = torch.empty(0, dtype=torch.float64, device=design.device)
        y = self._encode(targets, like_y)
        weights = None
        if sample_weight is not None:
            given: Any = design.rows if isinstance(design, SparseDesign) else as_numpy(design.rows)
            found = _check_sample_weight(as_numpy(sample_weight), given, dtype=np.float64, ensure_non_negative=True)
            weights = torch.as_tensor(found).to(y)
            if not weights.any():
                raise ValueError("sample_weight is zero for every row: at least one must be positive.")
        learned, features, outputs = self._learns_prior(), self.n_features_in_, self._outputs()
        offsets = self._offsets(offset, design)
        if prior is None:
            if learned is not None:
                precision = first_precision(learned, design, y, weights, self._observation, features)
            else:
                precision = checks.require_precision("prior_precision", self.prior_precision, features).to(y)
            blocks = [precision]  # of one output: the coefficients, then the intercept
            if self.fit_intercept:
                given = self.intercept_precision
                flat = flat_precision(y, weights, offsets, self._observation) if given is None else float(given)
                blocks.append(precision.new_full((1, 1), flat))
            precision = torch.block_diag(*blocks * outputs)
            mean = torch.zeros_like(precision[0])
        else:
            mean, precision = NORMAL.moments(tuple(part.to(y) for part in prior))[0], -2 * prior[1].to(y)
        line = ProgressLine(self.progress, self.max_iter)
        posterior = LinearPosterior(
            design, y, self._observation, self._expectation, mean, precision, weights, offsets, line
        )
        names = [name for name, value in self._hyperparameters().items() if value == LEARN]

        def fit(posterior: LinearPosterior, start: Belief | None) -> Outcome:
            own = prior is None and self.fit_intercept
            found = posterior.start(posterior.guess(intercept=own, new=prior is None) if start is None else start.mean)
            once = posterior.observation.conjugate and self.rho == 1
            outcome = posterior.run(found, max_iter=REFINEMENTS if once else self.max_iter, tol=self.tol, rho=self.rho)
            return outcome._replace(converged=True) if once else outcome

        if names or (learned is not None and prior is None):
            posterior, outcome = maximise_evidence(
                posterior,
                fit,
                prior=learned if prior is None else None,
                names=names,
                features=features,
                max_iter=self.max_iter,
                tol=self.tol,
            )
        else:
            outcome = fit(posterior, None)
        line.close()
        self._observation = posterior.observation
        if not outcome.converged:
            change = abs(outcome.elbos[-1] - outcome.elbos[-2])
            message = f"not converged after max_iter={self.max_iter} steps: the bound still changes by {change:.1g}."
            warn(message, ConvergenceWarning)
        before = 0.0 if prior is None else self.elbo_
        self.elbos_ = [before + bound for bound in outcome.elbos]
        self.elbo_, self.n_iter_ = self.elbos_[-1], len(self.elbos_) - 1
        self._natural = NORMAL.of(outcome.belief.mean, outcome.belief.precision)
        if prior is None:
            size = design.shape[1]
            self._prior_block = posterior.precision[:size, :size]
        self._set_attributes(X, design.shape[1])

    def _expectation(self, place: int) -> Expectation:
        if self.expectation == "delta":
            return inference.Delta()
        if self.expectation == "mc":
            return inference.MonteCarlo(64, "reparameterised", fixed=True, seed=self.random_state + place)
        return quadrature(self._outputs())

    def _set_attributes(self, X: Any, size: int) -> None:
        """Sets the fitted attributes, as arrays of the type of X."""
        kind, outputs = like(X), self._outputs()
        mean, covariance = NORMAL.moments(self._natural)
        found = KnownWeights(mean.view(outputs, size), covariance.view(outputs, size, outputs, size))
        if isinstance(self._observation, Multinomial):
            found = found.expanded(self._observation.basis(mean), self._prior_block.to(mean))
        (mean, blocks), features = found, self.n_features_in_
        count = len(mean)
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
        learned = self._learns_prior()
        if learned is not None:
            diagonal = self._prior_block.diagonal()[:features]
            self.prior_precision_ = diagonal[0].item() if learned == "one" else kind(diagonal.clone())
        else:
            self.prior_precision_ = self.prior_precision
        for name in self._hyperparameters():
            setattr(self, {"scale": "noise_scale_"}.get(name, f"{name}_"), float(getattr(self._observation, name)))

    # --- predicting ---

    def _map_chunks(self, X: Any, offset: Any, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """A function of means and covariances of the predictors; of one predictor, of its means and variances."""
        check_is_fitted(self, "coef_")
        design = as_design(self._validated(X, accept_sparse="csr"), X, intercept=self.fit_intercept)
        offsets, outputs = self._offsets(offset, design), self._outputs()
        mean, covariance = NORMAL.moments(tuple(part.to(design.device) for part in self._natural))
        size, found = max(1, CHUNK // (512 * outputs)), []
        many = isinstance(self._observation, Multinomial)
        for place, part in enumerate(design.split(size)):
            z = part.predict(mean.view(outputs, -1).mT if many else mean)
            if offsets is not None:
                z = z + offsets[place * size : place * size + len(z)]
            spread = predictor_covariances(part, covariance, outputs) if many else part.quadratic(covariance)
            found.append(function(z, spread))
        return torch.cat(found)

    def predict(self, X: Any, return_std: bool = False, offset: Any = None) -> Any:
        """E[y | x] averaged over the posterior, or the class with the greatest mean score.

        Scores are logits at the mean of the posterior, which have no quadrature error. Of two classes it is the more
        probable one; of several, `predict_proba` may prefer another where their variances differ.

        Args:
            return_std: also return the standard deviation of y including noise (regressors only).
            offset: as in `fit`.
        """
        if classifies(self):
            return self._most_probable(X, self._map_chunks(X, offset, self._preferences))
        mean = like(X)(self._map_chunks(X, offset, lambda z, v: self._observation.predict(z, v).mean))
        if not return_std:
            return mean
        square = self._map_chunks(X, offset, lambda z, v: torch.stack(self._observation.predict(z, v)[1:]).sum(0))
        return mean, like(X)(square.sqrt())

    def _preferences(self, z: Tensor, variance: Tensor) -> Tensor:
        """The mean scores of the classes: of two, their order is that of the probabilities, for every variance."""
        return z @ self._observation.basis(z).mT if z.dim() > 1 else torch.stack([-z, z], 1)

    def _probabilities(self, z: Tensor, variance: Tensor) -> Tensor:
        if isinstance(self._observation, Multinomial):
            return self._observation.mean(z, variance)
        p = self._observation.predict(z, variance).mean
        return torch.stack([1 - p, p], 1)

    @available_if(classifies)
    def predict_proba(self, X: Any, offset: Any = None) -> Any:
        """Probabilities of `classes_`, (n, C), averaged over the posterior."""
        return like(X)(self._map_chunks(X, offset, self._probabilities))

    def sample_posterior(self, n_samples: int = 1, random_state: int | None = None) -> tuple[Any, Any]:
        """Posterior samples of coefficients and intercept, (n_samples, ...) in the shapes of `coef_`, `intercept_`."""
        check_is_fitted(self, "coef_")
        checks.require_positive_integer(n_samples=n_samples)
        generator = torch.Generator().manual_seed(seed32(self.random_state if random_state is None else random_state))
        outputs, features = self._outputs(), self.n_features_in_
        drawn = NORMAL.sample(self._natural, n_samples, generator).view(n_samples, outputs, -1)
        if isinstance(self._observation, Multinomial):
            block = self._prior_block.to(drawn)
            common = NORMAL.sample(NORMAL.of(torch.zeros_like(block[0]), block), n_samples, generator)[:, None]
            drawn = self._observation.basis(drawn) @ drawn + common / len(self.classes_) ** 0.5
        kind = like(self.coef_)
        intercept = drawn[..., -1] if self.fit_intercept else drawn.new_zeros(drawn.shape[:2])
        if self._observation.classifies:
            return kind(drawn[..., :features]), kind(intercept)
        return kind(drawn[:, 0, :features]), kind(intercept[:, 0])
