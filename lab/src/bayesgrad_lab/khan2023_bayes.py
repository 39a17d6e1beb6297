"""Approximate Bayesian inference in Table 1 of Khan and Rue 2023: the engine beside NumPy and packages."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from bayesgrad.families import (
    Categorical,
    DiagonalGaussian,
    Dirichlet,
    Gaussian,
    MixtureOfGaussians,
    NormalWishart,
    Point,
)
from bayesgrad.families.gaussian import LOG_2PI
from bayesgrad.inference import (
    Delta,
    Expected,
    GaussHermite,
    LinearPredictorFactor,
    Node,
    Prior,
    elbo,
    linear_gaussian,
    step,
)
from bayesgrad.inference.multimodal import MixtureLogDensity
from bayesgrad_lab.khan2023_rows import normal, walked

D = torch.float64
STEPS = 30


# --- Bayes' rule and Laplace's method ---


@cache
def diabetes() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_diabetes

    X, y = map(np.asarray, load_diabetes(return_X_y=True))
    return torch.as_tensor(X), torch.as_tensor((y - y.mean()) / y.std())


def conjugate() -> Tensor:
    """The posterior mean after one step from anywhere, and the evidence."""
    X, y = diabetes()
    root = normal(10, 10)
    node = Node(Gaussian(), Gaussian().of(normal(10), root @ root.mT + torch.eye(10, dtype=D)))
    prior = Prior(node, Gaussian().of(torch.zeros(10, dtype=D), 0.1 * torch.eye(10, dtype=D)))
    factors = [prior, linear_gaussian(node, X, y)]
    step(node, factors)
    return torch.cat([node.family.mode(node.natural), elbo([node], factors)[None]])


def ridge() -> Tensor:
    from scipy.stats import multivariate_normal
    from sklearn.linear_model import Ridge

    X, y = (part.numpy() for part in diabetes())
    found = Ridge(0.1, fit_intercept=False).fit(X, y).coef_
    evidence = multivariate_normal(np.zeros(len(y)), np.eye(len(y)) + X @ X.T / 0.1).logpdf(y)
    return torch.as_tensor(np.append(found, evidence))


@cache
def cancer() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_breast_cancer

    X, y = map(np.asarray, load_breast_cancer(return_X_y=True))
    X = np.column_stack([(X - X.mean(0)) / X.std(0), np.ones(len(X))])
    return torch.as_tensor(X), torch.as_tensor(2.0 * y - 1)


def laplace() -> Tensor:
    """Mean, precisions and log evidence where the delta method settles."""
    X, y = cancer()
    eye = torch.eye(X.shape[1], dtype=D)
    node = Node(Gaussian(), Gaussian().of(torch.zeros_like(X[0]), eye))
    factors = [
        Prior(node, Gaussian().of(torch.zeros_like(X[0]), eye)),
        LinearPredictorFactor(node, X, lambda z: -torch.nn.functional.softplus(-y * z), Delta()),
    ]
    for _ in range(20):
        step(node, factors)
    S = -2 * node.natural[1]
    return torch.cat([node.moments[0], S.diagonal(), elbo([node], factors)[None]])


def laplace_by_hand() -> Tensor:
    from sklearn.linear_model import LogisticRegression

    X, y = (part.numpy() for part in cancer())
    theta = LogisticRegression(C=1.0, fit_intercept=False, solver="newton-cholesky", tol=1e-14).fit(X, y).coef_[0]
    p = 1 / (1 + np.exp(y * (X @ theta)))
    S = np.eye(len(theta)) + X.T @ ((p * (1 - p))[:, None] * X)
    log_joint = np.log1p(-p).sum() - theta @ theta / 2
    return torch.as_tensor(np.concatenate([theta, np.diag(S), [log_joint - np.linalg.slogdet(S)[1] / 2]]))


# --- EM and VMP: mixtures of Gaussians on iris, with a node for the indicator of each flower ---

SWEEPS, K = 10, 3


@cache
def iris() -> tuple[Tensor, Tensor]:
    """Flowers, and shares at random as scikit-learn draws them."""
    from sklearn.datasets import load_iris

    drawn = np.random.RandomState(0).uniform(size=(150, K))
    return torch.as_tensor(np.asarray(load_iris(return_X_y=True)[0])), torch.as_tensor(
        drawn / drawn.sum(1, keepdims=True)
    )


def mixture_log_joint(X: Tensor) -> Callable[..., Tensor]:
    def expected(z: tuple, shares: tuple, parts: tuple) -> Tensor:
        pull, size, precision, volume = parts
        square = torch.einsum("ni,kij,nj->nk", X, precision, X) - 2 * X @ pull.mT + size
        return (z[0] * (shares[0] + (volume - square - X.shape[1] * LOG_2PI) / 2)).sum()

    return expected


def mixture(point: bool) -> tuple[Node, list[Node], list]:
    """A node for what is hidden, nodes of parameters, and factors, after the first update of the parameters."""
    X, responsibilities = iris()
    wishart, P = NormalWishart(), X.shape[1]
    prior = torch.full((K,), 1 / K, dtype=D)
    one, scale = torch.tensor(1.0, dtype=D), torch.linalg.inv(torch.cov(X.mT))  # priors are scikit-learn's
    shape = wishart.of(X.mean(0), one, P * one, scale)
    start = tuple(part.expand(K, *part.shape) for part in wishart.of(X.mean(0), one, 20 * one, scale))
    hidden = Node(Categorical(), Categorical().of(responsibilities), name="z")
    shares = Node(Point(Dirichlet()) if point else Dirichlet(), Dirichlet().of(10 + prior), name="weights")
    parts = Node(Point(wishart) if point else wishart, start, name="components")
    factors: list = [Expected(mixture_log_joint(X), hidden, shares, parts)]
    if not point:
        factors += [Prior(shares, Dirichlet().of(prior)), Prior(parts, shape)]
    step([shares, parts], factors)
    return hidden, [shares, parts], factors


def swept(point: bool) -> list[Node]:
    """Nodes of parameters after all sweeps."""
    hidden, nodes, factors = mixture(point)
    for _ in range(SWEEPS):
        step([hidden, *nodes], factors)
    return nodes


def expectation_maximization() -> Tensor:
    shares, parts = swept(point=True)
    means, precisions = NormalWishart().unpack(parts.family.mode(parts.natural))
    return _listed(shares.family.mode(shares.natural), means, torch.linalg.inv(precisions))


def message_passing() -> Tensor:
    shares, parts = swept(point=False)
    location, confidence, degrees, scale = NormalWishart().standard_parameters(parts.natural)
    covariances = torch.linalg.inv(scale) / degrees[:, None, None]
    return _listed(shares.natural[0] + 1, location, covariances, confidence, degrees)


def _listed(*parts: Tensor) -> Tensor:
    """Components in the order of their first mean, in one row."""
    order = parts[1][:, 0].argsort()
    return torch.cat([part[order].flatten() for part in parts])


def scikit_learns_mixture(bayesian: bool) -> Tensor:
    from sklearn.mixture import BayesianGaussianMixture, GaussianMixture

    options = {"init_params": "random", "random_state": 0, "reg_covar": 0, "max_iter": SWEEPS, "tol": 0}
    X = iris()[0].numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not bayesian:
            model = GaussianMixture(K, **options).fit(X)
            return _listed(*map(torch.as_tensor, (model.weights_, model.means_, model.covariances_)))
        kind = "dirichlet_distribution"
        model = BayesianGaussianMixture(
            n_components=K, weight_concentration_prior_type=kind, weight_concentration_prior=1 / K, **options
        ).fit(X)
    names = ("weight_concentration_", "means_", "covariances_", "mean_precision_", "degrees_of_freedom_")
    return _listed(*(torch.as_tensor(getattr(model, name)) for name in names))


# --- SVI: a mixture of multinomials, in batches ---

BATCH, TOPICS, WORDS = 20, 3, 8


@cache
def counts() -> Tensor:
    rng = np.random.default_rng(0)
    topics = rng.dirichlet(np.full(WORDS, 0.5), TOPICS)
    return torch.as_tensor(np.array([rng.multinomial(30, topics[k]) for k in rng.integers(TOPICS, size=200)]) / 1.0)


def stochastic() -> Tensor:
    """Local nodes move with rho = 1, the others by (t + 1)^-0.7, each batch counted N/B times."""
    X = counts()
    N = len(X)
    shares = Node(Dirichlet(), Dirichlet().of(torch.ones(TOPICS, dtype=D)))
    topics = Node(Dirichlet(), Dirichlet().of(1 + normal(TOPICS, WORDS).abs()))
    priors = [Prior(node, Dirichlet().of(torch.full_like(node.natural[0], 0.5))) for node in (shares, topics)]
    for t, batch in enumerate(X.split(BATCH) * 2):
        zero = torch.zeros(BATCH, TOPICS, dtype=D)
        hidden = Node(Categorical(), (zero,), scale=N / BATCH)

        def expected(z: tuple, weights: tuple, words: tuple, batch: Tensor = batch) -> Tensor:
            return (z[0] * (weights[0] + batch @ words[0].mT)).sum()

        factors = [Expected(expected, hidden, shares, topics, scale=N / BATCH), *priors]
        step(hidden, factors)
        step([shares, topics], factors, (t + 2) ** -0.7, schedule="parallel")
    return torch.cat([shares.natural[0] + 1, topics.natural[0].flatten() + 1])


def stochastic_by_hand() -> Tensor:
    """Hoffman et al., 2013, figure 4, in NumPy."""
    from scipy.special import digamma, logsumexp

    X = counts().numpy()
    N, gamma, beta = len(X), np.ones(TOPICS), 1 + normal(TOPICS, WORDS).abs().numpy()
    for t, first in enumerate(list(range(0, N, BATCH)) * 2):
        batch, rho = X[first : first + BATCH], (t + 2) ** -0.7
        logits = digamma(gamma) - digamma(gamma.sum()) + batch @ (digamma(beta) - digamma(beta.sum(1))[:, None]).T
        r = np.exp(logits - logsumexp(logits, axis=1, keepdims=True))
        gamma = (1 - rho) * gamma + rho * (0.5 + N / BATCH * r.sum(0))
        beta = (1 - rho) * beta + rho * (0.5 + N / BATCH * r.T @ batch)
    return torch.as_tensor(np.concatenate([gamma, beta.ravel()]))


# --- factors that are not conjugate ---


@cache
def poisson() -> tuple[Tensor, Tensor]:
    X = normal(40, 3) / 2
    rate = (X @ torch.tensor([0.5, -1.0, 0.3], dtype=D) + 1).exp()
    return X, torch.poisson(rate, generator=torch.Generator().manual_seed(0))


def poisson_expected(m: Tensor, v: Tensor) -> Tensor:
    """E[log p(y)] for weights N(m, diag(v)), but for log y!."""
    X, y = poisson()
    return (y * (X @ m) - (X @ m + X.square() @ v / 2).exp()).sum()


START = (10 * torch.tensor([0.4, -0.9, 0.2], dtype=D), torch.full((3,), -5.0, dtype=D))  # natural parameters


def nonconjugate_messages() -> Tensor:
    family = DiagonalGaussian()
    node = Node(family, START)
    prior = Prior(node, family.of(torch.zeros(3, dtype=D), torch.ones(3, dtype=D)))
    factor = Expected(lambda mean: poisson_expected(mean[0], mean[1] - mean[0].square()), node)
    return walked(node, repeat([prior, factor], STEPS), read=lambda: torch.cat(node.natural))


def knowles_and_minka() -> Tensor:
    """λ <- λ_0 + (∇²A)^-1 ∇_λ E[log f], with A's Hessian as it is (2011, Eq. 9)."""
    natural = torch.cat(START)

    def log_partition(both: Tensor) -> Tensor:
        return (-both[:3].square() / both[3:] / 4 - (-2 * both[3:]).log() / 2).sum()

    def value(both: Tensor) -> Tensor:
        variance = -0.5 / both[3:]
        return poisson_expected(variance * both[:3], variance)

    prior, path = torch.cat([torch.zeros(3), torch.full((3,), -0.5)]).to(D), []
    for _ in range(STEPS):
        fisher = torch.autograd.functional.hessian(log_partition, natural)
        natural = prior + torch.linalg.solve(fisher, torch.func.grad(value)(natural))  # pyright: ignore[reportArgumentType]
        path.append(natural)
    return torch.stack(path)


def bimodal(theta: Tensor) -> Tensor:
    """log f of one number: two unequal bumps, neither of them a Gaussian."""
    x = theta[0]
    return torch.logsumexp(torch.stack([-(x + 2).square() - 0.1 * x**4 / 4, -(x - 1.5).square() / 2 - 0.3]), 0)


def nonconjugate() -> Tensor:
    """A mixture of two Gaussians, with no approximation but quadrature: weights, means and precisions."""
    family = MixtureOfGaussians()
    node = Node(family, family.of(torch.tensor([[-1.5], [1.0]], dtype=D), torch.ones(2, 1, 1, dtype=D)))
    factor = MixtureLogDensity(node, bimodal, GaussHermite(160))
    for _ in range(100):
        step(node, [factor], 0.7)
    weights, means, covariances = family.moments(node.natural)
    return torch.cat([weights, means.flatten(), 1 / covariances.flatten()])


def nonconjugate_by_search() -> Tensor:
    """The same bound, as an integral over a fine grid, by BFGS."""
    from scipy.optimize import minimize

    x = torch.linspace(-9, 9, 4001, dtype=D)
    target = torch.func.vmap(bimodal)(x[:, None])

    def divergence(free: Tensor) -> Tensor:
        log_weights = torch.stack([free[0], -free[0]]).log_softmax(0)
        parts = -(x[:, None] - free[1:3]).square() * free[3:].exp() / 2 + (free[3:] - LOG_2PI) / 2
        log_q = torch.logsumexp(log_weights + parts, 1)
        return (log_q.exp() * (log_q - target)).sum() * (x[1] - x[0])

    def both(free: np.ndarray) -> tuple[float, np.ndarray]:
        at = torch.as_tensor(free).requires_grad_()
        value = divergence(at)
        return value.item(), torch.autograd.grad(value, at)[0].numpy()

    start = np.array([0.0, -1.5, 1.0, 0.0, 0.0])
    found = torch.as_tensor(minimize(both, start, jac=True, method="BFGS", options={"gtol": 1e-10}).x)
    return torch.cat([torch.stack([found[0], -found[0]]).softmax(0), found[1:3], found[3:].exp()])
