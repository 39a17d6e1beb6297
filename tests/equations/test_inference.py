"""The engine against closed forms, packages and quadrature."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.linear_model import LogisticRegression, Ridge
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.testing import assert_close

from bayesgrad.families import Categorical, DiagonalGaussian, FixedGaussian, Gaussian
from bayesgrad.inference import (
    Delta,
    Expected,
    GaussHermite,
    Linear,
    LinearPredictorFactor,
    LogDensity,
    MonteCarlo,
    Node,
    OutsideDomain,
    Prior,
    Sites,
    elbo,
    linear_gaussian,
    message,
    minimize,
    online,
    run,
    step,
)

NORMAL = Gaussian()


def gaussian(size: int, precision: float = 1.0, mean: float = 0.0, **options) -> Node:
    weights = torch.full((size,), mean, dtype=torch.float64)
    return Node(NORMAL, NORMAL.of(weights, precision * torch.eye(size, dtype=torch.float64)), **options)


def random_gaussian(size: int, seed: int = 0) -> Node:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2 * size, size, dtype=torch.float64, generator=generator)
    mean = torch.randn(size, dtype=torch.float64, generator=generator)
    return Node(NORMAL, NORMAL.of(mean, rows.mT @ rows))


def diabetes() -> tuple[Tensor, Tensor]:
    X, y = load_diabetes(return_X_y=True)
    return torch.as_tensor(X), torch.as_tensor((y - y.mean()) / y.std())


def breast_cancer() -> tuple[Tensor, Tensor]:
    X, y = load_breast_cancer(return_X_y=True)
    X = np.c_[(X - X.mean(0)) / X.std(0), np.ones(len(X))]
    return torch.as_tensor(X), torch.as_tensor(2.0 * y - 1)


# --- conjugate models: one step, whatever the start ---


def test_ridge_regression_in_one_step() -> None:
    """The posterior is scikit-learn's ridge, the bound the log density of y under N(0, I + XX'/delta)."""
    (X, y), delta = diabetes(), 0.1
    node = random_gaussian(X.shape[1])
    prior = Prior(node, NORMAL.of(torch.zeros_like(node.natural[0]), delta * torch.eye(10, dtype=torch.float64)))
    factors = [prior, linear_gaussian(node, X, y)]
    step(node, factors)
    expected = Ridge(alpha=delta, fit_intercept=False).fit(X.numpy(), y.numpy()).coef_
    assert_close(node.mean[0], torch.as_tensor(expected), rtol=0, atol=4e-13)
    covariance = np.eye(len(y)) + X.numpy() @ X.numpy().T / delta
    evidence = stats.multivariate_normal(np.zeros(len(y)), covariance).logpdf(y.numpy())
    assert_close(elbo([node], factors).item(), evidence, rtol=0, atol=1e-9)
    assert_close(elbo([node], factors).item(), -529.0749117867726, rtol=0, atol=1e-9)
    once = node.natural
    step(node, factors)
    assert_close(node.natural, once, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("start", [-3.0, 0.0, 50.0])
def test_conjugate_gaussian(start: float) -> None:
    """x ~ N(0, 1), y | x ~ N(x, 1/4), y = 10: N(8, 0.2)."""
    node = gaussian(1, precision=0.3, mean=start)
    prior = Prior(node, NORMAL.of(torch.zeros(1).double(), torch.eye(1).double()))
    step(node, [prior, linear_gaussian(node, torch.ones(1, 1).double(), torch.tensor([10.0]).double(), 4.0)])
    mean, covariance = NORMAL.moments(node.natural)
    assert_close((mean.item(), covariance.item()), (8.0, 0.2), rtol=1e-12, atol=0)


def test_quadrature_of_a_gaussian_likelihood_is_the_conjugate_step() -> None:
    X, y = diabetes()
    node = random_gaussian(X.shape[1])
    exact = linear_gaussian(node, X, y, 2.0)
    other = LinearPredictorFactor(node, X, lambda z: stats_normal(y, z, 2.0), GaussHermite(8))
    assert_close(other.message(node), exact.message(node), rtol=1e-10, atol=1e-9)
    assert_close(other.value(), exact.value(), rtol=1e-12, atol=0)


def stats_normal(y: Tensor, z: Tensor, precision: float) -> Tensor:
    return -precision * (y - z).square() / 2 + np.log(precision / (2 * np.pi)) / 2


# --- Newton and Laplace ---


def logistic(node: Node, X: Tensor, y: Tensor, expectation=None) -> list:
    size = X.shape[1]
    prior = Prior(node, NORMAL.of(torch.zeros(size).double(), torch.eye(size).double()))
    return [prior, LinearPredictorFactor(node, X, lambda z: logsigmoid(y * z), expectation)]


def test_delta_steps_are_newton_steps() -> None:
    """Iterates, the optimum and Laplace's evidence of logistic regression (breast cancer)."""
    X, y = breast_cancer()
    node = gaussian(X.shape[1])
    factors = logistic(node, X, y, Delta())
    weights = np.zeros(X.shape[1])
    for _ in range(6):
        step(node, factors)
        p = 1 / (1 + np.exp(-X.numpy() @ weights))
        hessian = (X.numpy().T * (p * (1 - p))) @ X.numpy() + np.eye(len(weights))
        gradient = X.numpy().T @ (p - (y.numpy() + 1) / 2) + weights
        weights = weights - np.linalg.solve(hessian, gradient)
        assert_close(node.mean[0].numpy(), weights, rtol=0, atol=1e-12)
    result = run(node, factors, steps=20)
    assert result.converged
    mean = node.mean[0]
    objective = (-logsigmoid(y * (X @ mean))).sum() + mean.square().sum() / 2
    assert_close(objective.item(), 37.7782257, rtol=0, atol=5e-8)
    assert_close(result.elbo, -55.6319706, rtol=0, atol=5e-8)
    peer = LogisticRegression(C=1, fit_intercept=False, tol=1e-12, solver="newton-cholesky").fit(X.numpy(), y.numpy())
    assert_close(mean.numpy(), peer.coef_[0], rtol=0, atol=1e-6)


def test_variational_logistic_regression_is_at_its_optimum() -> None:
    """No direction in (m, log of a Cholesky factor) raises the bound, by autograd of an independent transcription."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(40, 3, dtype=torch.float64, generator=generator)
    y = (X @ torch.tensor([1.0, -2.0, 0.5]).double() > 0).double() * 2 - 1
    node = gaussian(3)
    result = run(node, logistic(node, X, y, GaussHermite(48)), steps=200, rho=0.5, tolerance=1e-14)
    mean, covariance = (part.clone().requires_grad_() for part in NORMAL.moments(node.natural))
    nodes, weights = np.polynomial.hermite.hermgauss(48)
    spread = (2 * ((X @ covariance) * X).sum(1)).sqrt()
    z = X @ mean + torch.as_tensor(nodes)[:, None] * spread
    likelihood = (torch.as_tensor(weights)[:, None] * logsigmoid(y * z)).sum() / np.sqrt(np.pi)
    identity = torch.distributions.MultivariateNormal(torch.zeros(3).double(), torch.eye(3).double())
    own = torch.distributions.MultivariateNormal(mean, covariance)
    bound = likelihood - torch.distributions.kl_divergence(own, identity)
    assert_close(bound.item(), result.elbo, rtol=1e-11, atol=0)
    for gradient in torch.autograd.grad(bound, (mean, covariance)):
        assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-6)


# --- expectations ---


def quartic(theta: Tensor) -> Tensor:
    return -(theta**4).sum() / 8 - theta[0] * theta[1] - (theta[0] - 1).square()


def exact_quartic(mean) -> Tensor:
    """E[quartic] in the expectation parameters, by E[x^4] = m^4 + 6 m^2 v + 3 v^2."""
    first, second = mean
    m, v = first, (second - first[:, None] * first).diagonal()
    fourth = (m**4 + 6 * m**2 * v + 3 * v**2).sum()
    return -fourth / 8 - second[0, 1] - (second[0, 0] - 2 * first[0] + 1)


def test_messages_are_gradients_by_expectation_parameters() -> None:
    node = random_gaussian(2)
    expected, found = Expected(exact_quartic, node), LogDensity(node, quartic, GaussHermite(6))
    assert_close(found.value(), expected.value(), rtol=1e-11, atol=0)
    assert_close(found.message(node), expected.message(node), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("hessian", ["exact", "reparameterised"])
def test_monte_carlo_messages_are_unbiased(hessian: str) -> None:
    """Over 200 calls, within five of their standard errors."""
    node = random_gaussian(2)
    expected, calls = Expected(exact_quartic, node).message(node), MonteCarlo(64, hessian)
    drawn = [LogDensity(node, quartic, calls).message(node) for _ in range(200)]
    for want, *parts in zip(expected, *drawn):
        values = torch.stack(parts)
        assert ((values.mean(0) - want).abs() <= 5 * values.std(0) / 200**0.5 + 1e-12).all()
        assert values.std(0).max() > 0


def test_fixed_draws_are_the_same_in_each_call() -> None:
    node = random_gaussian(2)
    for fixed in (True, False):
        calls = MonteCarlo(8, fixed=fixed)
        first, second = (LogDensity(node, quartic, calls).message(node) for _ in range(2))
        assert torch.equal(first[1], second[1]) == fixed


def test_projections_are_the_log_density_of_their_sum() -> None:
    X = torch.tensor([[1.0, 0.5], [-0.3, 2.0], [0.7, -1.0]]).double()
    for family in (NORMAL, DiagonalGaussian(), FixedGaussian(2.0)):
        mean = torch.tensor([0.3, -0.2]).double()
        extra = () if isinstance(family, FixedGaussian) else (torch.eye(2) if family is NORMAL else torch.ones(2),)
        node = Node(family, family.of(mean, *[3 * part.double() for part in extra]))
        one = LinearPredictorFactor(node, X, lambda z: logsigmoid(z), GaussHermite(40))
        other = LogDensity(node, lambda theta: logsigmoid(X @ theta).sum(), GaussHermite(40))
        assert_close(one.value(), other.value(), rtol=1e-8, atol=0)
        for a, b in zip(one.message(node), other.message(node)):
            assert_close(a, b, rtol=1e-7, atol=1e-8)


# --- forms, momentum, domains ---


def test_local_form_is_the_global_form() -> None:
    """Under one rho for all factors (Khan and Rue 2023, Eq. 60 against 58)."""
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(30, 2, dtype=torch.float64, generator=generator)
    y = torch.randn(30, dtype=torch.float64, generator=generator).sign()
    lazy, greedy = random_gaussian(2), random_gaussian(2)
    parts = [[*logistic(n, X[:10], y[:10]), *logistic(n, X[10:], y[10:])[1:]] for n in (lazy, greedy)]
    sites = Sites()
    for _ in range(5):
        step(lazy, parts[0], rho=0.3, sites=sites)
        step(greedy, parts[1], rho=0.3)
        assert_close(lazy.natural, greedy.natural, rtol=1e-11, atol=1e-12)


def test_fixed_covariance_with_momentum_is_heavy_ball() -> None:
    """Natural momentum on FixedGaussian(I) is torch's SGD(momentum)."""
    target = torch.tensor([1.0, -2.0, 3.0]).double()
    curvature = torch.tensor([1.0, 0.3, 2.0]).double()

    def loss(theta: Tensor) -> Tensor:
        return (curvature * (theta - target).square()).sum() / 2 + theta.sin().sum()

    node = Node(FixedGaussian(), (torch.zeros(3).double(),))
    factor = LogDensity(node, lambda theta: -loss(theta), Delta())
    weights = torch.zeros(3).double().requires_grad_()
    optimizer = torch.optim.SGD([weights], lr=0.1, momentum=0.9)
    for _ in range(20):
        step(node, [factor], rho=0.1, momentum=0.9)
        optimizer.zero_grad()
        loss(weights).backward()
        optimizer.step()
        assert_close(node.mean[0], weights.detach(), rtol=0, atol=1e-13)


def test_diagonal_momentum() -> None:
    """The precision is s' = (1-rho) s + rho h + gamma (s - s_old); the mean's part weighs s_old/s'."""
    family, rho, gamma = DiagonalGaussian(), 0.2, 0.3
    node = Node(family, family.of(torch.tensor([0.5]).double(), torch.tensor([2.0]).double()))
    factor = LogDensity(node, lambda theta: -(theta**4 / 12 + theta.square() - theta).sum(), Delta())
    s, s_old, w, w_old = 2.0, None, 0.5, None
    for _ in range(4):
        step(node, [factor], rho=rho, momentum=gamma)
        g, h = w**3 / 3 + 2 * w - 1, w**2 + 2
        new = (1 - rho) * s + rho * h + (gamma * (s - s_old) if s_old is not None else 0)
        moved = w - rho * g / new + (gamma * s_old / new * (w - w_old) if s_old is not None else 0)
        s, s_old, w, w_old = new, s, moved, w
        mean, variance = family.moments(node.natural)
        assert_close((mean.item(), 1 / variance.item()), (w, s), rtol=1e-12, atol=0)


def double_well(theta: Tensor) -> Tensor:
    return -(theta.square() - 1).square().sum() * 4


def test_steps_never_leave_the_domain() -> None:
    """Between two wells the Hessian gives a negative precision."""
    for domain in ("backtrack", "retract", "search"):
        node = gaussian(1, precision=50.0, mean=0.05)
        factor = LogDensity(node, double_well, GaussHermite(20))
        before = elbo([node], [factor])
        for _ in range(100):
            step(node, [factor], rho=0.3, domain=domain)
            assert NORMAL.in_domain(node.natural).all()
            if domain == "search":
                after = elbo([node], [factor])
                assert after >= before - 1e-10
                before = after
    node = gaussian(1, precision=0.5, mean=0.05)
    with pytest.raises(OutsideDomain, match="use a smaller rho or domain='backtrack'"):
        step(node, [LogDensity(node, double_well, Delta())], rho=1.0, domain="raise")
    assert_close(node.natural[1].item(), -0.25)


def test_retraction_agrees_to_second_order() -> None:
    node, other = random_gaussian(2), random_gaussian(2)
    factors = [LogDensity(n, quartic, GaussHermite(8)) for n in (node, other)]
    start = node.natural
    gaps = []
    for rho in (0.02, 0.01):
        node.natural = other.natural = start
        step(node, factors[:1], rho=rho)
        step(other, factors[1:], rho=rho, domain="retract")
        gaps.append(max((a - b).abs().max().item() for a, b in zip(node.natural, other.natural)))
    assert 3.9 < gaps[0] / gaps[1] < 4.1


def test_scales_count_examples() -> None:
    """A batch of one tenth with scale 10 is ten copies of it; a node's own scale divides its messages."""
    X, y = diabetes()
    one, ten = gaussian(10), gaussian(10)
    scaled = linear_gaussian(one, X[:20], y[:20])
    scaled.scale = 10.0
    copied = linear_gaussian(ten, X[:20].repeat(10, 1), y[:20].repeat(10))
    assert_close(message(one, [scaled]), message(ten, [copied]), rtol=1e-12, atol=1e-12)
    assert_close(elbo([one], [scaled]), elbo([ten], [copied]), rtol=1e-12, atol=0)
    one.scale = 5.0
    assert_close(message(one, [scaled])[0] * 5, message(ten, [copied])[0], rtol=1e-12, atol=1e-12)


# --- as an optimizer, and online ---


def rosenbrock(theta: Tensor) -> Tensor:
    return (1 - theta[0]).square() + 5 * (theta[1] - theta[0].square()).square()


def test_minimize_by_gradient_descent_and_newton() -> None:
    node = Node(FixedGaussian(), (torch.tensor([-0.5, 0.5]).double(),))
    theta = torch.tensor([-0.5, 0.5]).double()
    found = minimize(rosenbrock, node, rho=0.01, steps=50, tolerance=0)
    for _ in range(50):
        theta = theta - 0.01 * torch.func.grad(rosenbrock)(theta)
    assert_close(found.point, theta, rtol=1e-12, atol=0)
    assert_close(found.loss, rosenbrock(theta).item(), rtol=1e-12, atol=0)
    node = gaussian(2, precision=10.0)
    found = minimize(rosenbrock, node, steps=100)
    assert_close(found.point, torch.ones(2).double(), rtol=0, atol=1e-6)
    hessian = torch.autograd.functional.hessian(rosenbrock, torch.ones(2).double())
    assert_close(-2 * node.natural[1], hessian, rtol=1e-5, atol=0)  # Eqs. 24 and 26: the precision is the Hessian


def test_variational_newton_satisfies_its_optimality_conditions() -> None:
    """E[∇l] = 0 and E[∇² l] = S (Khan and Rue 2023, Eqs. 25, 26), by quadrature with other points."""
    node = gaussian(2, precision=3.0)
    minimize(rosenbrock, node, expectation=GaussHermite(12), rho=0.5, steps=500, tolerance=1e-15)
    factor = LogDensity(node, rosenbrock, GaussHermite(17))
    _, gradient, hessian = factor.moments()
    assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-6)
    assert_close(hessian, -2 * node.natural[1], rtol=1e-6, atol=0)


def test_mirror_descent_is_the_same_step() -> None:
    """argmin <∇_mu L, mu> + KL(q, q_t)/rho, over (m, log-Cholesky): one step (Khan and Rue 2023, section 2)."""
    node = random_gaussian(2)
    factor = LogDensity(node, quartic, GaussHermite(8))
    gradient = tuple(a + b for a, b in zip(factor.message(node), NORMAL.entropy_gradient(node.natural)))
    start, rho = node.natural, 0.05
    m, raw = torch.zeros(2).double().requires_grad_(), torch.zeros(2, 2).double().requires_grad_()

    def objective() -> Tensor:
        factor = raw.tril(-1) + torch.diag(raw.diagonal().exp())
        natural = NORMAL.of(m, factor @ factor.mT)
        return -NORMAL.dot(gradient, NORMAL.mean(natural)) + NORMAL.divergence(natural, start) / rho

    optimizer = torch.optim.LBFGS(
        [m, raw], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = objective()
        value.backward()
        return value

    optimizer.step(closure)
    step(node, [factor], rho=rho)
    root = (raw.tril(-1) + torch.diag(raw.diagonal().exp())).detach()
    assert_close(NORMAL.of(m.detach(), root @ root.mT), node.natural, rtol=1e-6, atol=1e-6)


def test_online_gradient_descent_and_newton() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, signs = torch.randn(20, 3, dtype=torch.float64, generator=generator), [1.0, -1.0] * 10
    first, second = Node(FixedGaussian(), (torch.zeros(3).double(),)), gaussian(3, precision=0.2)
    descent, newton, matrix = np.zeros(3), np.zeros(3), np.eye(3)  # S/rho: 0.2/0.2
    for row, sign in zip(rows, signs):

        def loss(theta, row=row, sign=sign):
            return -logsigmoid(sign * (row @ theta))

        online(first, LogDensity(first, lambda theta, f=loss: -f(theta), Delta()), rho=0.5)
        online(second, LogDensity(second, lambda theta, f=loss: -f(theta), Delta("gauss-newton")), rho=0.2)
        x = row.numpy()
        descent = descent + 0.5 * sign * x / (1 + np.exp(sign * x @ descent))
        gradient = -sign * x / (1 + np.exp(sign * x @ newton))
        matrix = matrix + np.outer(gradient, gradient)
        newton = newton - np.linalg.solve(matrix, gradient)
        assert_close(first.mean[0].numpy(), descent, rtol=0, atol=1e-12)
        assert_close(second.mean[0].numpy(), newton, rtol=0, atol=1e-12)


def test_hedge_is_multiplicative_weights() -> None:
    """A Categorical node and losses of experts: p <- p exp(-rho loss), normalised."""
    losses = torch.rand(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    node = Node(Categorical(), (torch.zeros(4).double(),))
    weights = np.full(4, 0.25)
    for loss in losses:
        online(node, Linear(node, (-loss,)), rho=0.3)
        weights = weights * np.exp(-0.3 * loss.numpy())
        weights = weights / weights.sum()
        assert_close(node.mean[0].numpy(), weights, rtol=0, atol=1e-15)


def test_exact_online_step_is_the_proximal_point() -> None:
    """argmin E[l] + KL/rho for a quadratic loss: precisions add, in closed form."""
    node = gaussian(2, precision=2.0, mean=1.0)
    H, target = torch.tensor([[3.0, 1.0], [1.0, 2.0]]).double(), torch.tensor([-1.0, 4.0]).double()
    loss = lambda theta: (theta - target) @ H @ (theta - target) / 2  # noqa: E731
    before = NORMAL.moments(node.natural)[0]
    online(node, LogDensity(node, lambda theta: -loss(theta), GaussHermite(3)), rho=0.7, exact=True)
    precision = 2 * torch.eye(2).double() + 0.7 * H
    mean = torch.linalg.solve(precision, 2 * before + 0.7 * H @ target)
    assert_close(NORMAL.moments(node.natural)[0], mean, rtol=1e-10, atol=0)
    assert_close(-2 * node.natural[1], precision, rtol=1e-10, atol=0)


# --- invalid inputs ---


def test_refusals() -> None:
    node, other = gaussian(2, name="weights"), gaussian(2)
    factor = LogDensity(node, quartic, Delta())
    for rho in (0.0, 1.5, float("nan"), -1.0):
        with pytest.raises(ValueError, match=r"rho must be in \(0, 1\], got"):
            step(node, [factor], rho=rho)
    with pytest.raises(ValueError, match="not on Node"):
        factor.message(other)
    with pytest.raises(ValueError, match="no factor depends on Node"):
        step(other, [factor])
    with pytest.raises(ValueError, match="does not depend on Node"):
        Expected(lambda mean: torch.zeros(()), node).message(node)
    with pytest.raises(ValueError, match="design contains NaN"):
        LinearPredictorFactor(node, torch.full((3, 2), torch.nan), logsigmoid)
    with pytest.raises(ValueError, match="design must not be empty"):
        linear_gaussian(node, torch.empty(0, 2), torch.empty(0))
    with pytest.raises(ValueError, match="design must have 2 columns"):
        LinearPredictorFactor(node, torch.ones(3, 4), logsigmoid)
    with pytest.raises(ValueError, match="prior parameters of Gaussian must define a distribution"):
        Prior(node, NORMAL.of(torch.zeros(2).double(), -torch.eye(2).double()))
    with pytest.raises(TypeError, match="needs a Gaussian node"):
        linear_gaussian(Node(FixedGaussian(), (torch.zeros(2),)), torch.ones(1, 2), torch.ones(1))


def test_a_run_that_does_not_converge_warns() -> None:
    X, y = breast_cancer()
    node = gaussian(X.shape[1])
    with pytest.warns(UserWarning, match="not converged after 2 steps"):
        result = run(node, logistic(node, X, y), steps=2)
    assert not result.converged
    assert result.steps == 2
