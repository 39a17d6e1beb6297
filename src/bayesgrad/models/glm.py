r"""Generalised linear models with a Gaussian belief about all of their weights."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from numbers import Real
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import ClassifierTags, RegressorTags, Tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from bayesgrad.families import Gaussian as GaussianFamily
from bayesgrad.families import Parameters
from bayesgrad.inference import (
    Delta,
    LinearPredictorFactor,
    MonteCarlo,
    MultiLinearPredictorFactor,
    Node,
    Prior,
    linear_gaussian,
    run,
)
from bayesgrad.inference.expectation import Expectation
from bayesgrad.inference.factor import Factor, project
from bayesgrad.models import checks
from bayesgrad.models.arrays import as_finite, as_numpy, like
from bayesgrad.models.multinomial import GivenLabels, Multinomial, quadrature
from bayesgrad.models.observations import (
    CallableLikelihood,
    Gaussian,
    Logistic,
    Observation,
    Poisson,
    Probit,
    StudentT,
    tuned,
)
from bayesgrad.noise import seed32

NORMAL = GaussianFamily()
NAMED: dict[str, type[Observation] | type[Multinomial]] = {
    "gaussian": Gaussian,
    "logistic": Logistic,
    "multinomial": Multinomial,
    "probit": Probit,
    "poisson": Poisson,
    "student-t": StudentT,
}
EXPECTATIONS = ("quadrature", "delta", "mc")
CHUNK = 1 << 21  # numbers that one factor evaluates at a time
LEARN = "learn"
STRUCTURE = ("likelihood", "fit_intercept")  # what a stream cannot change


def _classifies(model: GLM) -> bool:
    observation = NAMED.get(model.likelihood) if isinstance(model.likelihood, str) else None
    return observation is not None and observation.classifies


class GLM(BaseEstimator):
    r"""A target that depends on x'θ, and q(θ) = N(m, V) over all weights, by the Bayesian learning rule:

    .. math::
        V^{-1} \leftarrow (1-\rho) V^{-1} + \rho\left(\Lambda - X^T E_q[\ell''] X\right), \quad
        m \leftarrow m + \rho V \left(X^T E_q[\ell'] - \Lambda m\right)

    with steps as long as the bound allows: the whole way in most, halved where the bound would fall.

    Args:
        likelihood: `"gaussian"`, `"student-t"` (robust regression), `"poisson"` (counts, log link); `"logistic"`,
            `"probit"` (two classes), `"multinomial"` (softmax, any number of them).
        prior_precision: Λ of the prior N(0, Λ^-1) of the coefficients: a number, one for each column of X, or a
            matrix. `Ridge(alpha)`'s alpha for noise of scale 1, and 1/C of `LogisticRegression`. Of a multinomial
            model the weights of each class have this prior.
        expectation: how E_q is taken. `"quadrature"`: 32 Gauss-Hermite points for each x'θ (of `"logistic"` right to
            1e-4 nats a row up to a deviation of 10 of x'θ, to 0.03 at 10^4, which separable data have under weak
            priors); for three classes a grid of 20 x 20, for more 256 fixed quasi-random points. `"delta"`: at the
            mean, which is Newton's method and Laplace's approximation. `"mc"`: 64 draws for each x'θ, the same in
            each step.
        fit_intercept: whether a constant is added to x'θ.
        intercept_precision: the prior precision of that constant; nearly flat by default, as in scikit-learn, where
            it is not penalised.
        noise_scale: deviation of the noise of `"gaussian"`, scale of `"student-t"`: a number, or `"learn"`, by which
            E_q[log p(y | θ)] is maximised after each step (always by quadrature).
        dof: degrees of freedom of `"student-t"`: a number, or `"learn"`.
        max_iter: steps, at most; of `partial_fit` for each call.
        tol: a change of the bound, relative to its size, that ends the run.
        rho: the length of a step before any halving, in (0, 1].
        random_state: the seed of `"mc"` and the default one of `sample_posterior`, a whole number.
        progress: whether a line is kept up to date; None: in a terminal, after two seconds.

    Attributes:
        coef_: mean of the coefficients: (P,), of classifiers (1, P), multinomial (C, P).
        intercept_: mean of the constant: a number, of classifiers (1,) or (C,); 0 without one.
        coef_covariance_: of the flattened coefficients, (P, P) or (C P, C P). What all classes of a multinomial model
            have in common is part of it; there it is the prior's, since no data speak of it.
        intercept_variance_: the constant's, shaped like `intercept_`.
        elbo_: the bound on the log evidence, with all constants; exact for `"gaussian"`, Laplace's for `"delta"`.
            After `partial_fit` the sum over its batches, each given those before.
        elbos_: the bound at the start and after each step of the last call.
        n_iter_: steps taken; of `partial_fit` in the last call.
        classes_: of classifiers.
        noise_scale_, dof_: the values that were given or learned, where the likelihood has them.
        n_features_in_, feature_names_in_: as in scikit-learn.

    Arrays are of NumPy, or tensors where X was one; computed in float64.

    >>> from sklearn.datasets import load_breast_cancer
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> model = GLM("logistic").fit((X - X.mean(0)) / X.std(0), y)
    >>> print(f"{model.elbo_:.2f} after {model.n_iter_} steps")
    -62.26 after 19 steps

    Reference: 002, Eqs. 10, 11 and 58; Khan and Lin, 2017 (conjugate-computation variational inference).
    Checked by: tests/equations/test_glm.py, tests/contract/test_glm.py.
    """

    n_features_in_: int
    _observation: Any  # an Observation, or Multinomial

    def __init__(
        self,
        likelihood: str = "gaussian",
        *,
        prior_precision: Any = 1.0,
        expectation: str = "quadrature",
        fit_intercept: bool = True,
        intercept_precision: float = 1e-6,
        noise_scale: float | str = 1.0,
        dof: float | str = 4.0,
        max_iter: int = 100,
        tol: float = 1e-9,
        rho: float = 1.0,
        random_state: int = 0,
        progress: bool | None = None,
    ) -> None:
        self.likelihood, self.prior_precision, self.expectation = likelihood, prior_precision, expectation
        self.fit_intercept, self.intercept_precision = fit_intercept, intercept_precision
        self.noise_scale, self.dof = noise_scale, dof
        self.max_iter, self.tol, self.rho = max_iter, tol, rho
        self.random_state, self.progress = random_state, progress

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        if _classifies(self):
            tags.estimator_type = "classifier"
            tags.classifier_tags = ClassifierTags(multi_class=self.likelihood == "multinomial")
        else:
            tags.estimator_type = "regressor"
            tags.regressor_tags = RegressorTags()
            tags.target_tags.positive_only = self.likelihood == "poisson"
        return tags

    # --- learning ---

    def fit(self, X: Any, y: Any) -> GLM:
        """From all of the data, whatever was learned before.

        Args:
            X: (n, P).
            y: (n,): numbers, counts or labels.

        Raises:
            ValueError: a parameter or the data are none that the likelihood can have.
        """
        with checks.all_or_nothing(self):
            design, targets = self._read(X, y, reset=True)
            self._begin(y, targets)
            self._learn(X, design, self._encode(targets, design), prior=self._prior(design))
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> GLM:
        """From one more batch: the belief so far is its prior, and the data are not kept.

        Exact for `"gaussian"`; elsewhere each batch adds what a Gaussian can keep of it. After `fit` it goes on from
        there.

        Args:
            classes: of classifiers all labels that there are, in the first call.

        Raises:
            ValueError: as `fit`; or the noise is to be learned, which takes all of the data at once.
        """
        first = not hasattr(self, "_natural")
        if not first:
            checks.require_same(self._begun, self)
        if LEARN in self._numbers().values():
            raise ValueError("partial_fit cannot learn noise_scale or dof: give numbers, or use fit.")
        with checks.all_or_nothing(self):
            design, targets = self._read(X, y, reset=first)
            if first:
                if _classifies(self) and classes is None:
                    raise ValueError("the first call of partial_fit needs classes, all labels that there are.")
                self._begin(y, np.asarray(as_numpy(classes)) if _classifies(self) else targets)
            elif not _classifies(self):
                self._begin(y, targets)  # the noise of this batch
            prior = self._prior(design) if first else tuple(part.to(design) for part in self._natural)
            before = 0.0 if first else self.elbo_
            self._learn(X, design, self._encode(targets, design), prior, before=before, more=not first)
        return self

    def _begin(self, y: Any, targets: np.ndarray) -> None:
        """Checks parameters and finds classes."""
        checks.require_one_of(self, likelihood=NAMED, expectation=EXPECTATIONS)
        checks.require_whole(max_iter=self.max_iter)
        checks.require_tolerance(tol=self.tol)
        checks.require_seed(random_state=self.random_state)
        self._begun = {name: getattr(self, name) for name in STRUCTURE}
        for name in ("intercept_precision", "noise_scale", "dof"):
            value = getattr(self, name)
            if value != LEARN and not (isinstance(value, Real) and 0 < float(value) < math.inf):
                raise ValueError(f"{name} must be a positive number, got {value!r}.")
        observation: Any = NAMED[self.likelihood]
        if not observation.classifies:
            self._observation = observation(**{k: 1.0 if v == LEARN else float(v) for k, v in self._numbers().items()})
            return
        check_classification_targets(targets)
        labels = np.unique(targets)
        if len(labels) < 2:
            raise ValueError(f"y has one class only, {labels[0].item()!r}: at least two are needed.")
        if observation is Multinomial:
            self._observation = Multinomial(len(labels))
        elif len(labels) > 2:
            raise ValueError(
                f"Only binary classification is supported. The type of the target is {type_of_target(targets)}: "
                f"use likelihood='multinomial' for {len(labels)} classes."
            )
        else:
            self._observation = observation()
        self.classes_ = torch.as_tensor(labels) if isinstance(y, Tensor) else labels

    def _numbers(self) -> dict[str, Any]:
        """What the likelihood has besides the predictor, as it was given."""
        own = {"gaussian": ("scale",), "student-t": ("scale", "dof")}.get(str(self.likelihood), ())
        return {name: self.noise_scale if name == "scale" else self.dof for name in own}

    def _read(self, X: Any, y: Any, *, reset: bool) -> tuple[Tensor, np.ndarray]:
        options: dict[str, Any] = dict(
            reset=reset, dtype=np.float64, ensure_all_finite=False, y_numeric=not _classifies(self)
        )
        rows, targets = validate_data(self, as_numpy(X), as_numpy(y), **options)
        return as_finite(rows, X), np.asarray(targets)

    def _encode(self, targets: np.ndarray, design: Tensor) -> Tensor:
        if not self._observation.classifies:
            if self.likelihood == "poisson" and targets.min() < 0:
                raise ValueError(f"y must be counts, none below zero, got {targets.min():g}.")
            return torch.as_tensor(np.array(targets, dtype=np.float64)).to(design)
        labels = as_numpy(self.classes_)
        places = np.searchsorted(labels, targets).clip(max=len(labels) - 1)
        if (labels[places] != targets).any():
            unknown = targets[labels[places] != targets][0].item()
            raise ValueError(f"y holds the label {unknown!r}, which is none of classes, {labels.tolist()}.")
        return torch.as_tensor(places).to(design)

    def _prior(self, design: Tensor) -> Parameters:
        """λ of N(0, Λ^-1), the intercept last, for each contrast of classes."""
        precision = checks.require_precision("prior_precision", self.prior_precision, design.shape[1]).to(design)
        if self.fit_intercept:
            precision = torch.block_diag(precision, precision.new_full((1, 1), self.intercept_precision))
        precision = torch.block_diag(*[precision] * self._outputs())
        return NORMAL.of(precision.new_zeros(len(precision)), precision)

    def _outputs(self) -> int:
        return len(self.classes_) - 1 if isinstance(self._observation, Multinomial) else 1

    def _extended(self, design: Tensor) -> Tensor:
        return torch.cat([design, torch.ones_like(design[:, :1])], 1) if self.fit_intercept else design

    def _learn(
        self, X: Any, design: Tensor, y: Tensor, prior: Parameters, *, before: float = 0.0, more: bool = False
    ) -> None:
        design = self._extended(design)
        node = Node(NORMAL, prior, name="weights")
        node.natural = self._start(design, y, prior, more)
        factors: list[Factor] = [Prior(node, prior), *self._factors(node, design, y)]
        learned = [name for name, value in self._numbers().items() if value == LEARN]
        once = self._observation.conjugate and not learned and self.rho == 1

        def tune() -> None:
            z, variance = self._projected(design, node.natural)
            self._observation = tuned(self._observation, learned, z, variance, y)
            if learned and not float(self._observation.scale) > 1e-8 * float(y.abs().max()):
                raise ValueError("noise_scale cannot be learned, X explains y without any noise: give a number.")
            factors[1:] = self._factors(node, design, y)

        if learned:
            tune()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*steps were not enough")
            result = run(
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
                f"max_iter = {self.max_iter} steps were not enough: the bound still moves by {change:.1g}.",
                ConvergenceWarning,
            )
        self.elbos_ = [before + bound for bound in result.elbos]
        self.elbo_, self.n_iter_ = self.elbos_[-1], result.steps
        self._natural = node.natural
        self._publish(X, design)

    def _start(self, design: Tensor, y: Tensor, prior: Parameters, more: bool) -> Parameters:
        """The prior's mean with a precision as if all were known: a broad prior says too much of exp(x'θ)."""
        observation, outputs = self._observation, self._outputs()
        mean = NORMAL.moments(prior)[0].clone()
        if self.fit_intercept and not more and not observation.classifies:
            mean[-1] = observation.start(y).mean()
        z = design @ mean.view(outputs, -1).mT
        weights = observation.information(z if isinstance(observation, Multinomial) else z[:, 0])
        gain = design.mT @ (weights[:, None] * design)
        precision = -2 * prior[1] + torch.block_diag(*[gain] * outputs)
        if observation.least_squares and not more:
            mean = torch.linalg.solve(precision, prior[0] + design.mT @ (weights * y))
        return NORMAL.of(mean, precision)

    def _factors(self, node: Node, design: Tensor, y: Tensor) -> list[Factor]:
        """The likelihood, in as many factors as keep memory small."""
        observation, outputs = self._observation, self._outputs()
        if observation.conjugate:
            return [linear_gaussian(node, design, y, 1 / float(observation.scale) ** 2)]  # pyright: ignore
        rows = max(1, CHUNK // (outputs * (32 if outputs == 1 else 512)))
        factors = []
        for place, (part, targets) in enumerate(zip(design.split(rows), y.split(rows))):
            if isinstance(observation, Multinomial):
                factors.append(
                    MultiLinearPredictorFactor(node, part, GivenLabels(observation, targets), self._rule(place))
                )
            else:
                factors.append(
                    LinearPredictorFactor(node, part, CallableLikelihood(observation, targets), self._rule(place))
                )
        return factors

    def _rule(self, place: int) -> Expectation:
        if self.expectation == "delta":
            return Delta()
        if self.expectation == "mc":
            return MonteCarlo(64, "reparameterised", fixed=True, seed=self.random_state + place)
        return quadrature(self._outputs())

    def _publish(self, X: Any, design: Tensor) -> None:
        """Fitted attributes, of the kind that X is."""
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
        for name in self._numbers():
            setattr(self, {"scale": "noise_scale_"}.get(name, f"{name}_"), float(getattr(self._observation, name)))

    # --- predicting ---

    def _projected(self, design: Tensor, natural: Parameters) -> tuple[Tensor, Tensor]:
        """Mean and variance of x'θ for each row; of a multinomial model means and covariances of contrasts."""
        mean, covariance = NORMAL.moments(natural)
        z, variance = project(design, mean, covariance, self._outputs())
        return (z, variance) if isinstance(self._observation, Multinomial) else (z[:, 0], variance[:, 0, 0])

    def _predicted(self, X: Any, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        check_is_fitted(self, "coef_")
        rows = validate_data(self, as_numpy(X), reset=False, dtype=np.float64, ensure_all_finite=False)
        design = self._extended(as_finite(rows, X))
        natural = tuple(part.to(design) for part in self._natural)
        size = max(1, CHUNK // (512 * self._outputs()))
        return torch.cat([function(*self._projected(part, natural)) for part in design.split(size)])

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """E[y | x] averaged over the belief, or the likeliest class.

        Args:
            return_std: of regressors also the deviation of y, noise included.
        """
        if _classifies(self):
            places = self._predicted(X, self._probabilities).argmax(-1)
            labels = as_numpy(self.classes_)[places.cpu().numpy()]
            tensors = isinstance(X, Tensor) and labels.dtype.kind in "biuf"
            return torch.as_tensor(labels, device=X.device) if tensors else labels
        mean = like(X)(self._predicted(X, lambda z, v: self._observation.predict(z, v).mean))
        if not return_std:
            return mean
        return mean, like(X)(self._predicted(X, self._deviation))

    def _deviation(self, z: Tensor, variance: Tensor) -> Tensor:
        found = self._observation.predict(z, variance)
        return (found.variance + found.noise).sqrt()

    def _probabilities(self, z: Tensor, variance: Tensor) -> Tensor:
        if isinstance(self._observation, Multinomial):
            return self._observation.mean(z, variance)
        p = self._observation.predict(z, variance).mean
        return torch.stack([1 - p, p], 1)

    @available_if(_classifies)
    def predict_proba(self, X: Any) -> Any:
        """Probabilities of `classes_`, (n, C), averaged over the belief."""
        return like(X)(self._predicted(X, self._probabilities))

    def score(self, X: Any, y: Any) -> float:
        """Accuracy of classifiers, R² of regressors."""
        found = as_numpy(self.predict(X))
        return float((accuracy_score if _classifies(self) else r2_score)(as_numpy(y), found))

    def sample_posterior(self, n_samples: int = 1, random_state: int | None = None) -> tuple[Any, Any]:
        """Draws of coefficients and intercept, (n_samples, ...) of what `coef_` and `intercept_` are."""
        check_is_fitted(self, "coef_")
        checks.require_whole(n_samples=n_samples)
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
