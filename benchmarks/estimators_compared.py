"""What estimators.py compares: the sets, and every estimator of `bayesgrad.models` with its counterpart."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from hmmlearn.hmm import GaussianHMM
from scipy.stats import norm
from sklearn import decomposition, linear_model, mixture
from sklearn.datasets import load_digits, load_iris, load_wine
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process import kernels as peers
from statsmodels import datasets as econometrics
from statsmodels.api import add_constant
from statsmodels.discrete.discrete_model import Poisson, Probit
from statsmodels.miscmodels.tmodel import TLinearModel
from statsmodels.tsa.statespace.structural import UnobservedComponents

from bayesgrad.models import (
    GLM,
    FactorAnalysis,
    GaussianMixture,
    GaussianProcess,
    HiddenMarkov,
    LatentDirichlet,
    LinearStateSpace,
)
from bayesgrad.models.observations import Gaussian
from bayesgrad_lab import tables, uci
from bayesgrad_lab.corpora import associated_press
from bayesgrad_lab.tables import Table

ROWS = 300  # of training, for Gaussian processes
RANGE, SQUARES = (1e-5, 1e5), (1e-10, 1e10)  # of hyperparameters, as in GaussianProcess
SEED = 0
Scores = dict[str, float]


# --- sets ---


def uci_table(name: str, data_dir: str | None) -> Table:
    found = uci.read(name, 0, data_dir)
    parts = [np.asarray(part) for part in (found.train_x, found.train_y[:, 0], found.test_x, found.test_y[:, 0])]
    return tables.of_parts(name, (parts[0], parts[1]), (parts[2], parts[3]))


def wine_quality(data_dir: str | None) -> Table:
    found = uci.read("wine-red", 0, data_dir)
    train, test = (np.rint(np.asarray(y)[:, 0] * found.unit) for y in (found.train_y, found.test_y))
    least = min(train.min(), test.min())
    return tables.of_parts(
        "wine quality", (np.asarray(found.train_x), train - least), (np.asarray(found.test_x), test - least)
    )


def doctor_visits() -> Table:
    data: Any = econometrics.randhie.load_pandas().data
    found = data.to_numpy(dtype=float)
    return tables.split("doctor visits", found[::5, 1:], found[::5, 0]).standardised(targets=False)


def documents(name: str, X: Any) -> Table:
    order = np.random.RandomState(0).permutation(X.shape[0])
    held, none = round(tables.HELD * X.shape[0]), np.zeros(0)
    return Table(name, X[order[held:]], none, X[order[:held]], none)


def time_series(name: str, values: np.ndarray) -> Table:
    cut = round((1 - tables.HELD) * len(values))
    y = (values - values[:cut].mean()) / values[:cut].std()
    return Table(name, y[:cut, None], y[:cut], y[cut:, None], y[cut:])


def sets(data_dir: str | None) -> dict[str, dict[str, Callable[[], Table]]]:
    """Groups of sets, each a function that reads it."""
    binary = {
        name: lambda read=read: read().standardised(targets=False) for name, read in tables.binary(data_dir).items()
    }
    small = {
        name: lambda name=name, pair=pair: tables.split(name, *pair).standardised(targets=True)
        for name, pair in tables.regressions().items()
    }
    several = {
        name: lambda name=name, load=load: tables.split(
            name, *map(np.asarray, load(return_X_y=True)), classes=True
        ).standardised(targets=False)
        for name, load in (("iris", load_iris), ("wine", load_wine), ("digits", load_digits))
    }
    digits, labels = load_digits(return_X_y=True)
    texts: dict[str, Callable[[], Table]] = {"digits": lambda: documents("digits", digits)}
    for digit in range(10):
        own = digits[labels == digit]
        texts[f"digit {digit}"] = lambda own=own, digit=digit: documents(f"digit {digit}", own)
    texts["ap"] = lambda: documents("ap", associated_press(data_dir).counts)
    return {
        "binary": binary,
        "regression": small,
        "UCI": {name: partial(uci_table, name, data_dir) for name in uci.FOLDERS},
        "classes": several,
        "counts": {"wine quality": partial(wine_quality, data_dir), "doctor visits": doctor_visits},
        "series": {name: partial(time_series, name, values) for name, values in tables.series().items()},
        "documents": texts,
    }


# --- what is compared ---


@dataclass(frozen=True)
class Comparison:
    """An estimator and its counterpart.

    Args:
        ours, theirs: their names, with all settings that are not defaults.
        groups: the sets that it applies to.
        fit, fit_theirs: table -> scores. "score" is subject to the rule; "evidence" is reported beside it.
        differs: how the two differ by design; empty if they fit the same model.
        rows: maximum number of training rows.
    """

    ours: str
    theirs: str
    groups: tuple[str, ...]
    fit: Callable[[Table], Scores]
    fit_theirs: Callable[[Table], Scores] | None
    differs: str = ""
    rows: int | None = None


def chosen(log_probabilities: np.ndarray, labels: np.ndarray) -> Scores:
    return {"score": float(np.mean(log_probabilities[np.arange(len(labels)), labels.astype(int)]))}


def classified(model: Any, t: Table) -> Scores:
    model.fit(t.train_x, t.train_y)
    with np.errstate(divide="ignore"):
        return chosen(np.log(model.predict_proba(t.test_x)), t.test_y)


def plugged_in(model: Any, t: Table) -> Scores:
    """Probabilities of a logistic model at its coefficients."""
    model.fit(t.train_x, t.train_y)
    z = t.test_x @ model.coef_[0] + model.intercept_[0]
    return {"score": float(-np.logaddexp(0, np.where(t.test_y == 1, -z, z)).mean())}


def predicted(model: Any, t: Table) -> Scores:
    mean, deviation = model.fit(t.train_x, t.train_y).predict(t.test_x, return_std=True)
    return {"score": float(norm.logpdf(t.test_y, mean, deviation).mean())}


def ridge(t: Table, model: Any = None) -> Scores:
    model = (linear_model.Ridge(alpha=1.0) if model is None else model).fit(t.train_x, t.train_y)
    return {"score": float(norm.logpdf(t.test_y, model.predict(t.test_x), 1.0).mean())}


def evidence_ours(prior: str, intercept: bool, t: Table) -> Scores:
    return predicted(GLM(noise_scale="learn", prior_precision=prior, fit_intercept=intercept), t)


def evidence_peer(kind: Any, intercept: bool, t: Table) -> Scores:
    return predicted(kind(fit_intercept=intercept), t)


def robust(t: Table) -> Scores:
    from scipy.stats import t as student

    model: Any = GLM("student-t", noise_scale="learn", dof="learn").fit(t.train_x, t.train_y)
    mean = model.predict(t.test_x)
    return {"score": float(student.logpdf(t.test_y, model.dof_, mean, model.noise_scale_).mean())}


def robust_peer(t: Table) -> Scores:
    from scipy.stats import t as student

    found = TLinearModel(t.train_y, add_constant(t.train_x)).fit(disp=0)
    *weights, dof, scale = found.params
    mean = add_constant(t.test_x, has_constant="add") @ np.array(weights)
    return {"score": float(student.logpdf(t.test_y, dof, mean, abs(scale)).mean())}


def probit_peer(t: Table) -> Scores:
    found = Probit(t.train_y, add_constant(t.train_x)).fit(disp=0)
    z = add_constant(t.test_x, has_constant="add") @ found.params
    return {"score": float(norm.logcdf(np.where(t.test_y == 1, z, -z)).mean())}


def poisson_score(rates: np.ndarray, y: np.ndarray) -> Scores:
    from scipy.stats import poisson

    return {"score": float(poisson.logpmf(y, rates).mean())}


def poisson_ours(t: Table) -> Scores:
    return poisson_score(GLM("poisson").fit(t.train_x, t.train_y).predict(t.test_x), t.test_y)


def poisson_peer(t: Table) -> Scores:
    found = Poisson(t.train_y, add_constant(t.train_x)).fit(disp=0)
    return poisson_score(found.predict(add_constant(t.test_x, has_constant="add")), t.test_y)


def process_ours(t: Table, **settings: Any) -> Scores:
    model = GaussianProcess(**settings).fit(t.train_x, t.train_y)
    return {"score": float(model.log_predictive(t.test_x, t.test_y).mean()), "evidence": model.elbo_ / len(t.train_y)}


def process_peer(t: Table, **settings: Any) -> Scores:
    model: Any = GaussianProcessRegressor(random_state=SEED, **settings).fit(t.train_x, t.train_y)
    found: Any = model.predict(t.test_x, return_std=True)
    score = float(norm.logpdf(t.test_y, *found).mean())
    return {"score": score, "evidence": float(model.log_marginal_likelihood_value_) / len(t.train_y)}


def noisy_kernel() -> Any:
    white = peers.WhiteKernel(float(Gaussian().scale) ** 2, SQUARES)
    return peers.ConstantKernel(1.0, RANGE) * peers.RBF(1.0, RANGE) + white


def class_kernel() -> Any:
    return peers.ConstantKernel(1.0, RANGE) * peers.RBF(1.0, RANGE)


def density(model: Any, t: Table) -> Scores:
    model.fit(t.train_x)
    return {"score": float(model.score(t.test_x)), "evidence": float(model.score(t.train_x))}


def mixture_ours(t: Table) -> Scores:
    """Without a score of the training rows: what both maximise is a bound, and scikit-learn's lacks constants."""
    return {"score": density(GaussianMixture(3, method="vmp", random_state=SEED), t)["score"]}


def mixture_peer(t: Table) -> Scores:
    return {"score": at_expectations(bayesian_mixture(), t)["score"]}


def bayesian_mixture(**settings: Any) -> mixture.BayesianGaussianMixture:
    kind: Any = "dirichlet_distribution"
    return mixture.BayesianGaussianMixture(
        n_components=3, weight_concentration_prior_type=kind, random_state=SEED, **settings
    )


def at_expectations(model: Any, t: Table) -> Scores:
    """The density at the expected parameters, because BayesianGaussianMixture.score is none."""
    model.fit(t.train_x)
    judge = mixture.GaussianMixture(3)
    judge.weights_, judge.means_, judge.covariances_ = model.weights_, model.means_, model.covariances_
    judge.precisions_cholesky_ = model.precisions_cholesky_
    return {"score": float(judge.score(t.test_x)), "evidence": float(judge.score(t.train_x))}


SWEEPS: Any = dict(max_iter=100, tol=0)


def spread(t: Table) -> np.ndarray:
    """The covariance of all rows with a hundredth added to their variances, because some columns are collinear."""
    X = t.train_x
    return np.cov(X.T, bias=True).reshape(X.shape[1], -1) + 0.01 * np.diag(X.var(0))


def mixture_same(t: Table) -> Scores:
    """With the largest difference of parameters to scikit-learn's, in units of the largest of each kind."""
    prior = spread(t)
    model = GaussianMixture(3, method="vmp", random_state=SEED, reg_covar=0.0, covariance_prior=prior, **SWEEPS)
    found, peer = at_expectations(model, t), bayesian_mixture(reg_covar=0.0, covariance_prior=prior, **SWEEPS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of theirs
        at_expectations(peer, t)
    order = np.argsort(-np.asarray(peer.weight_concentration_), kind="stable")
    pairs = [(getattr(model, name), getattr(peer, name)[order]) for name in ("weights_", "means_", "covariances_")]
    return {**found, "difference": float(max(np.abs(a - b).max() / np.abs(b).max() for a, b in pairs))}


def mixture_same_peer(t: Table) -> Scores:
    return at_expectations(bayesian_mixture(reg_covar=0.0, covariance_prior=spread(t), **SWEEPS), t)


def markov_ours(t: Table, **settings: Any) -> Scores:
    return density(HiddenMarkov(2, random_state=SEED, **settings), t)


def markov_start(t: Table, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Transitions, means and covariances."""
    X = t.train_x
    every = spread(t) if kind == "full" else np.diag(spread(t))
    halves = np.array_split(np.argsort(X[:, 0], kind="stable"), 2)
    means = np.stack([X[rows].mean(0) for rows in halves])
    return np.array([[0.75, 0.25], [0.25, 0.75]]), means, np.stack([every, every])


def markov_same(t: Table, kind: str) -> Scores:
    transitions, means, covariances = markov_start(t, kind)
    start: Any = dict(startprob_init=[0.5, 0.5], transmat_init=transitions, means_init=means, covars_init=covariances)
    return markov_ours(t, **start, covariance_type=kind, **SWEEPS)


def markov_same_peer(t: Table, kind: str) -> Scores:
    """hmmlearn adds a number to all elements of a matrix; the prior is that of its variances."""
    prior = 0.01 * t.train_x.var(0)
    options: Any = dict(covariance_type=kind, covars_prior=np.diag(prior) if kind == "full" else prior, min_covar=0.0)
    model = GaussianHMM(2, n_iter=100, tol=-np.inf, init_params="", **options)
    model.startprob_ = np.array([0.5, 0.5])
    model.transmat_, model.means_, model.covars_ = markov_start(t, kind)
    return markov_score(model.fit(t.train_x), t)


def markov_peer(t: Table, **settings: Any) -> Scores:
    return markov_score(GaussianHMM(2, random_state=SEED, **settings).fit(t.train_x), t)


def markov_score(model: Any, t: Table) -> Scores:
    return {
        "score": model.score(t.test_x) / len(t.test_x),
        "evidence": model.score(t.train_x) / len(t.train_x),
    }


def topics_ours(t: Table, **settings: Any) -> Scores:
    model = LatentDirichlet(random_state=SEED, **settings).fit(t.train_x)
    return topics_score(model.components_, t)


def topics_peer(t: Table) -> Scores:
    return topics_score(decomposition.LatentDirichletAllocation(random_state=SEED).fit(t.train_x).components_, t)


def topics_score(components: Any, t: Table) -> Scores:
    judge = LatentDirichlet()
    return {"score": float(judge.bound(t.test_x, components).sum() / t.test_x.sum())}


TREND = {
    "level": ([[1.0]], [[1.0]], [[1.0]]),
    "trend": ([[1.0, 1.0], [0.0, 1.0]], np.eye(2).tolist(), [[1.0, 0.0]]),
}
PEER_TREND = {"level": "local level", "trend": "local linear trend"}


def states_ours(t: Table, kind: str) -> Scores:
    F, Q, H = TREND[kind]
    model = LinearStateSpace(F, Q, H, [[1.0]], diffuse=True)
    model.fit(t.train_y, learn=("process_covariance", "observation_covariance"))
    return states_score(model, t)


def states_score(model: LinearStateSpace, t: Table) -> Scores:
    first, both = (float(model.log_likelihood(y)) for y in (t.train_y, np.concatenate([t.train_y, t.test_y])))
    return {"score": (both - first) / len(t.test_y), "evidence": first / len(t.train_y)}


def structural(t: Table, kind: str) -> Any:
    model = UnobservedComponents(t.train_y, PEER_TREND[kind], use_exact_diffuse=True)  # pyright: ignore[reportArgumentType]
    return model.fit(disp=0)


def states_peer(t: Table, kind: str) -> Scores:
    found = structural(t, kind)
    both = found.apply(np.concatenate([t.train_y, t.test_y]))
    return {"score": float(both.llf_obs[len(t.train_y) :].mean()), "evidence": float(found.llf) / len(t.train_y)}


def states_same(t: Table, kind: str) -> Scores:
    """Ours at the variances that statsmodels found."""
    noise, *process = structural(t, kind).params
    F, _, H = TREND[kind]
    floor = 1e-12  # a covariance of observations must be positive
    return states_score(LinearStateSpace(F, np.diag(process), H, [[max(noise, floor)]], diffuse=True), t)


TABLES = ("binary", "regression", "UCI")
REGRESSIONS = ("regression", "UCI")
AVERAGED = "ours averages over the posterior, theirs uses the mode"


def logistic(**settings: Any) -> linear_model.LogisticRegression:
    return linear_model.LogisticRegression(**settings)


COMPARISONS = [
    Comparison(
        'GLM("logistic")', "LogisticRegression()", ("binary",),
        lambda t: classified(GLM("logistic"), t), lambda t: classified(logistic(), t), AVERAGED,
    ),
    Comparison(
        'GLM("logistic", expectation="delta"), at coef_', "LogisticRegression(tol=1e-8, max_iter=10000)", ("binary",),
        lambda t: plugged_in(GLM("logistic", expectation="delta"), t),
        lambda t: plugged_in(logistic(tol=1e-8, max_iter=10000), t),
    ),
    Comparison(
        'GLM("logistic", prior_precision="learn")', "LogisticRegression()", ("binary",),
        lambda t: classified(GLM("logistic", prior_precision="learn"), t), lambda t: classified(logistic(), t),
        "ours learns its prior",
    ),
    Comparison(
        'GLM("probit")', "statsmodels Probit", ("binary",), lambda t: classified(GLM("probit"), t), probit_peer,
        "theirs has no prior",
    ),
    Comparison(
        'GLM("multinomial")', "LogisticRegression()", ("classes",),
        lambda t: classified(GLM("multinomial"), t), lambda t: classified(logistic(), t), AVERAGED,
    ),
    Comparison(
        'GLM("gaussian")', "Ridge(), noise of scale 1", REGRESSIONS, lambda t: predicted(GLM(), t), ridge,
        "ours adds the variance of the posterior to that of the noise",
    ),
    Comparison(
        'GLM("gaussian"), at coef_', "Ridge(), noise of scale 1", REGRESSIONS, lambda t: ridge(t, GLM()), ridge
    ),
    *(
        Comparison(
            f'GLM(noise_scale="learn", prior_precision="{prior}"{", fit_intercept=False" * (not intercept)})',
            f"{peer.__name__}({'' if intercept else 'fit_intercept=False'})", REGRESSIONS,
            partial(evidence_ours, prior, intercept), partial(evidence_peer, peer, intercept),
            "theirs treats the intercept as known" if intercept else "",
        )
        for prior, peer in (("learn", linear_model.BayesianRidge), ("ard", linear_model.ARDRegression))
        for intercept in (True, False)
    ),
    Comparison(
        'GLM("student-t", noise_scale="learn", dof="learn")', "statsmodels TLinearModel", REGRESSIONS, robust,
        robust_peer, "theirs has no prior",
    ),
    Comparison('GLM("poisson")', "statsmodels Poisson", ("counts",), poisson_ours, poisson_peer, "theirs has no prior"),
    Comparison(
        "GaussianProcess()", "GaussianProcessRegressor()", REGRESSIONS, process_ours, process_peer,
        "theirs keeps its kernel, and has no noise", ROWS,
    ),
    Comparison(
        "GaussianProcess()", "GaussianProcessRegressor with the same kernel and noise", REGRESSIONS, process_ours,
        lambda t: process_peer(t, kernel=noisy_kernel(), alpha=0.0), rows=ROWS,
    ),
    Comparison(
        'GaussianProcess(likelihood="student-t")', "", REGRESSIONS, partial(process_ours, likelihood="student-t"), None,
        rows=ROWS,
    ),
    Comparison(
        'GaussianProcess(likelihood="logistic")', "GaussianProcessClassifier()", ("binary", "classes"),
        partial(process_ours, likelihood="logistic"),
        lambda t: classified(GaussianProcessClassifier(random_state=SEED), t), "theirs keeps its kernel", ROWS,
    ),
    Comparison(
        'GaussianProcess(likelihood="logistic")', "GaussianProcessClassifier with the same kernel", ("binary",),
        partial(process_ours, likelihood="logistic"),
        lambda t: classified(GaussianProcessClassifier(class_kernel(), random_state=SEED), t),
        "theirs is Laplace's approximation", ROWS,
    ),
    Comparison(
        'GaussianProcess(likelihood="probit")', "GaussianProcessClassifier()", ("binary",),
        partial(process_ours, likelihood="probit"),
        lambda t: classified(GaussianProcessClassifier(random_state=SEED), t),
        "theirs is logistic and keeps its kernel", ROWS,
    ),
    Comparison(
        "GaussianMixture()", "GaussianMixture()", TABLES,
        lambda t: density(GaussianMixture(random_state=SEED), t),
        lambda t: density(mixture.GaussianMixture(random_state=SEED), t),
    ),
    Comparison(
        "GaussianMixture(3)", "GaussianMixture(3)", TABLES,
        lambda t: density(GaussianMixture(3, random_state=SEED), t),
        lambda t: density(mixture.GaussianMixture(3, random_state=SEED), t),
        "theirs stops at a change of the likelihood of a row by 1e-3, ours by 1e-5",
    ),
    Comparison(
        "GaussianMixture(3, tol=1e-8, max_iter=2000)", "GaussianMixture(3, tol=1e-8, max_iter=2000)", TABLES,
        lambda t: density(GaussianMixture(3, random_state=SEED, tol=1e-8, max_iter=2000), t),
        lambda t: density(mixture.GaussianMixture(3, random_state=SEED, tol=1e-8, max_iter=2000), t),
    ),
    Comparison(
        'GaussianMixture(3, method="vmp")', "BayesianGaussianMixture(3), at the expected parameters", TABLES,
        mixture_ours, mixture_peer,
        "ours averages over the posterior, and stops at a change of the bound of a row by 1e-5, theirs by 1e-3",
    ),
    Comparison(
        'GaussianMixture(3, method="vmp", reg_covar=0), 100 iterations, at the expected parameters',
        "BayesianGaussianMixture(3, reg_covar=0), the same start, priors and iterations", TABLES, mixture_same,
        mixture_same_peer,
    ),
    Comparison(
        "FactorAnalysis()", "FactorAnalysis()", TABLES,
        lambda t: density(FactorAnalysis(random_state=SEED), t),
        lambda t: density(decomposition.FactorAnalysis(random_state=SEED), t),
        "theirs stops after a few iterations, below the maximum",
    ),
    Comparison(
        "FactorAnalysis(1)", "FactorAnalysis(1)", TABLES,
        lambda t: density(FactorAnalysis(1, random_state=SEED), t),
        lambda t: density(decomposition.FactorAnalysis(1, random_state=SEED), t),
    ),
    Comparison(
        "HiddenMarkov(2)", "hmmlearn GaussianHMM(2, covariance_type=\"full\")", (*TABLES, "series"), markov_ours,
        partial(markov_peer, covariance_type="full"),
        "theirs stops after ten iterations, and adds its prior to all elements of covariances",
    ),
    Comparison(
        'HiddenMarkov(2, covariance_type="diag")', "hmmlearn GaussianHMM(2)", (*TABLES, "series"),
        partial(markov_ours, covariance_type="diag"), markov_peer, "theirs stops after ten iterations",
    ),
    *(
        Comparison(
            f"HiddenMarkov(2{settings}), 100 iterations from a given start",
            "hmmlearn, the same start, prior and iterations", (*TABLES, "series"), partial(markov_same, kind=kind),
            partial(markov_same_peer, kind=kind),
        )
        for kind, settings in (("full", ""), ("diag", ', covariance_type="diag"'))
    ),
    Comparison("LatentDirichlet()", "LatentDirichletAllocation()", ("documents",), topics_ours, topics_peer),
    *(
        Comparison(
            f"LinearStateSpace, {PEER_TREND[kind]}, learned", f"statsmodels, {PEER_TREND[kind]}", ("series",),
            partial(states_ours, kind=kind), partial(states_peer, kind=kind),
        )
        for kind in TREND
    ),
    *(
        Comparison(
            f"LinearStateSpace, {PEER_TREND[kind]}, at the variances of statsmodels",
            f"statsmodels, {PEER_TREND[kind]}", ("series",), partial(states_same, kind=kind),
            partial(states_peer, kind=kind),
        )
        for kind in TREND
    ),
]  # fmt: skip
