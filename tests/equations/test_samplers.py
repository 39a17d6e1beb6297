"""Samplers: densities whose flux vanishes, steps as transcribed, temperatures and covariances in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.linalg import solve_discrete_lyapunov
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, vmap

from bayesgrad import likelihoods, noise, samplers
from bayesgrad.samplers import SNGD, Langevin
from bayesgrad.samplers.move import LangevinStep

NUM_DATA, TEMPERATURE, PRIOR, DAMPING, LR = 50, 0.7, 0.4, 0.05, 0.01


def shallow(width: int, classes: int = 1) -> nn.Module:
    return nn.Linear(width, classes, bias=False)


def deep(bias: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(1, 1, bias=bias), nn.Tanh(), nn.Linear(1, 1, bias=False))


# name: model, likelihood; in one, two and three dimensions
MODELS = {
    "1": (lambda: shallow(1), "bernoulli"),
    "2": (lambda: shallow(2), "bernoulli"),
    "2, deep": (lambda: deep(False), "bernoulli"),
    "3, classes": (lambda: shallow(1, 3), "categorical"),
    "3, counts": (lambda: shallow(3), "poisson"),
    "3, deep": (lambda: deep(True), "bernoulli"),
    "3, regression": (lambda: deep(True), "gaussian"),
}


class Problem:
    """A small model with data, as plain functions of its flat weights."""

    def __init__(self, name: str, seed: int = 0) -> None:
        make, self.likelihood = MODELS[name]
        generator = torch.Generator().manual_seed(seed)
        self.model = make().double()
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(0.7 * torch.randn(p.shape, dtype=torch.float64, generator=generator))
        width = next(self.model.parameters()).shape[1]
        self.x = torch.randn(12, width, dtype=torch.float64, generator=generator)
        self.y = likelihoods.named(self.likelihood).sample(self.model(self.x), generator)
        self.names = [n for n, _ in self.model.named_parameters()]
        self.shapes = [p.shape for p in self.model.parameters()]

    @property
    def w(self) -> torch.Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()

    def outputs(self, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        parts = w.split([s.numel() for s in self.shapes])
        return functional_call(self.model, {n: p.view(s) for n, p, s in zip(self.names, parts, self.shapes)}, (x,))

    def loss(self, f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Of one example."""
        if self.likelihood == "categorical":
            return torch.logsumexp(f, -1) - (f * torch.eye(f.shape[-1], dtype=f.dtype)[y]).sum()
        if self.likelihood == "gaussian":
            return (f - y).square().sum() / 2
        if self.likelihood == "poisson":
            return (f.exp() - y * f).sum()
        return (torch.log1p(f.exp()) - y * f).sum()

    def cost(self, w: torch.Tensor) -> torch.Tensor:
        """N times the mean loss, and the prior."""
        losses = vmap(lambda x, y: self.loss(self.outputs(w, x), y))(self.x, self.y)
        return NUM_DATA * losses.mean() + PRIOR / 2 * w.square().sum()

    def fisher(self, w: torch.Tensor) -> torch.Tensor:
        slopes = vmap(lambda x: jacfwd(lambda w: self.outputs(w, x))(w))(self.x)
        curves = vmap(lambda x, y: hessian(lambda f: self.loss(f, y))(self.outputs(w, x)))(self.x, self.y)
        return torch.einsum("eki,ekl,elj->ij", slopes, curves, slopes) / len(self.x)

    def empirical(self, w: torch.Tensor) -> torch.Tensor:
        rows = vmap(lambda x, y: jacfwd(lambda w: self.loss(self.outputs(w, x), y))(w))(self.x, self.y)
        return rows.T @ rows / len(self.x)

    def kronecker(self, w: torch.Tensor) -> torch.Tensor:
        if isinstance(self.model, nn.Linear):
            curves = vmap(lambda x, y: hessian(lambda f: self.loss(f, y))(self.outputs(w, x)))(self.x, self.y)
            return torch.kron(curves.mean(0), self.x.T @ self.x / len(self.x))
        bias = self.model[0].bias is not None
        hidden = torch.tanh(w[0] * self.x + (w[1] if bias else 0.0))  # (N, 1)
        outputs = w[-1] * hidden
        curves = torch.ones_like(outputs) if self.likelihood == "gaussian" else outputs.sigmoid() * (-outputs).sigmoid()
        back = w[-1] * (1 - hidden**2)
        inputs = torch.cat([self.x, torch.ones_like(self.x)], 1) if bias else self.x
        first = (back**2 * curves).mean() * inputs.T @ inputs / len(inputs)
        last = curves.mean() * (hidden**2).mean()
        lower = torch.cat([torch.zeros(1, len(first), dtype=w.dtype), last.reshape(1, 1)], 1)
        return torch.cat([torch.cat([first, torch.zeros(len(first), 1, dtype=w.dtype)], 1), lower])

    def curved(self, w: torch.Tensor) -> torch.Tensor:
        """A metric that has nothing to do with the model."""
        n = len(w)
        mixing = torch.sin(torch.arange(2.0 * n * n, dtype=w.dtype)).view(2, n, n)
        root = torch.tanh(mixing[0] @ w)[:, None] * mixing[1] + torch.diag(w.cos())
        return torch.eye(n, dtype=w.dtype) + root @ root.T

    def metric(self, name: str) -> tuple:
        """As samplers take it, and as a matrix."""
        functions = {
            "identity": lambda w: torch.eye(len(w), dtype=w.dtype),
            "fisher": self.fisher,
            "empirical": self.empirical,
            "diagonal": lambda w: torch.diag(self.fisher(w).diagonal()),
            "kronecker": self.kronecker,
            "function": self.curved,
            "function, diagonal": lambda w: torch.diag(self.curved(w).diagonal()),
        }
        given = {"function": self.curved, "function, diagonal": lambda w: self.curved(w).diagonal()}.get(name, name)
        return given, lambda w: functions[name](w) + DAMPING * torch.eye(len(w), dtype=w.dtype)

    def step(self, sampler: torch.optim.Optimizer, name: str) -> torch.Tensor:
        """What a step adds to the weights."""
        before = self.w
        sampler.zero_grad()
        outputs = self.model(self.x)
        sampler.observe(outputs, labels=self.y if name == "empirical" else None)
        gradient = (grad(self.cost)(before) - PRIOR * before) / NUM_DATA
        for p, part in zip(self.model.parameters(), gradient.split([s.numel() for s in self.shapes])):
            p.grad = part.view(p.shape)
        sampler.step()
        return self.w - before


def drawn(size: int, seed: int, step: int) -> torch.Tensor:
    """The sampler's own noise, as a function of seed, step and position."""
    square, cosine = noise.normal_parts(torch.arange(size, dtype=torch.int32), *noise.key(seed, step, 1))
    return square.double().sqrt() * cosine.double()


def langevin(problem: Problem, metric, **options) -> Langevin:
    settings = dict(lr=LR, num_data=NUM_DATA, temperature=TEMPERATURE, prior_precision=PRIOR, damping=DAMPING)
    return Langevin(problem.model, **{**settings, **options}, metric=metric, likelihood=problem.likelihood)


def residual(drift: torch.Tensor, problem: Problem, G, w: torch.Tensor, power: float) -> float:
    """f_i - sum_j d_j D_ij - sum_j D_ij d_j log p, which is zero where p is stationary."""

    def D(w: torch.Tensor) -> torch.Tensor:
        return TEMPERATURE / NUM_DATA * torch.linalg.inv(G(w))

    def log_density(w: torch.Tensor) -> torch.Tensor:
        return -problem.cost(w) / TEMPERATURE + power * torch.linalg.slogdet(G(w))[1]

    divergence = torch.einsum("ijj->i", jacrev(D)(w))
    return float((drift - divergence - D(w) @ grad(log_density)(w)).abs().max())


METRICS = ("identity", "fisher", "empirical", "diagonal", "kronecker", "function", "function, diagonal")


RARE = ("3, counts", "3, regression")  # two metrics are enough for these


@pytest.mark.parametrize(
    ("case", "name"), [(c, m) for c in MODELS for m in METRICS if c not in RARE or m in ("fisher", "diagonal")]
)
def test_what_is_claimed_to_be_sampled_is_stationary(case: str, name: str) -> None:
    """The probability flux vanishes everywhere, for both corrections."""
    for seed, correction, power in ((0, "flat", 0.0), (1, "jeffreys", 0.5)):
        problem = Problem(case, seed)
        given, G = problem.metric(name)
        w = problem.w
        sampler = langevin(problem, given, correction=correction)
        change = problem.step(sampler, name)
        spread = math.sqrt(2 * LR * TEMPERATURE / NUM_DATA)
        if name == "kronecker":  # whose root is another one: look at the drift alone
            injected = sum_of_parts(sampler, problem, drawn(len(w), 0, 1))
        else:
            injected = torch.linalg.solve(torch.linalg.cholesky(G(w)).mT, drawn(len(w), 0, 1))
        drift = (change - spread * injected) / LR
        assert residual(drift, problem, G, w, power) < 1e-10
        assert sampler.correction_form == form(problem, name)


@pytest.mark.parametrize("case", ["1", "2", "2, deep", "3, classes", "3, deep"])
def test_the_forms_that_the_paper_prints_are_not_stationary(case: str) -> None:
    """Eq. 6 and 7 with their signs, and Eq. 2: of the same flux as above, several orders of magnitude are left."""
    problem = Problem(case)
    for G in (problem.metric("fisher")[1], problem.metric("function")[1]):
        w = problem.w
        V, Tv = terms(G, w)
        plain = -torch.linalg.solve(G(w), grad(problem.cost)(w)) / NUM_DATA
        heat = TEMPERATURE / NUM_DATA
        forms = {"Eq. 6": (1, -0.5, 0.5), "Eq. 7": (1, 0, 0.0), "Eq. 2": (1, 0.5, 0.5)}
        for a, b, power in forms.values():
            assert residual(plain + heat * (a * V + b * Tv), problem, G, w, power) > 1e-4
        for a, b, power in ((-1, 0.5, 0.5), (-1, 0, 0.0)):
            assert residual(plain + heat * (a * V + b * Tv), problem, G, w, power) < 1e-12


def terms(G, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """V and Tv of the corrected equations, with the derivative of the metric written down."""
    inverse, dG = torch.linalg.inv(G(w)), jacfwd(G)(w).permute(2, 0, 1)
    V = torch.einsum("ia,jab,bj->i", inverse, dG, inverse)
    return V, inverse @ torch.einsum("ab,jba->j", inverse, dG)


@pytest.mark.parametrize("name", ["fisher", "empirical", "diagonal", "kronecker", "function"])
@pytest.mark.parametrize("case", ["2", "3, classes", "3, deep"])
def test_sngd_takes_the_step_of_the_corrected_equation(case: str, name: str) -> None:
    """w <- w - eps G^-1 (g + delta w/N + n) + (eps^2/2B)(1 - B/N)(-V + Tv/2); without the second term, plain NGD.

    n is the noise of the damping, of variance 2 T damping/(eps N).
    """
    for correction, a, b, noisy in ((None, 0, 0, False), ("flat", -1, 0, False), ("jeffreys", -1, 0.5, True)):
        problem = Problem(case)
        given, G = problem.metric(name)
        w, B, lr = problem.w, 4, 0.1
        V, Tv = terms(G, w)
        settings = dict(prior_precision=PRIOR, damping=DAMPING, correction=correction, likelihood=problem.likelihood)
        settings |= {} if noisy else {"damping_noise": False}
        sampler = SNGD(problem.model, lr, num_data=NUM_DATA, batch_size=B, metric=given, seed=0, **settings)
        expected = -lr * torch.linalg.solve(G(w), grad(problem.cost)(w)) / NUM_DATA
        expected += lr**2 / (2 * B) * (1 - B / NUM_DATA) * (a * V + b * Tv)
        if noisy:
            deviation = math.sqrt(2 * samplers.temperature(lr, NUM_DATA, B) * DAMPING / (lr * NUM_DATA))
            expected -= lr * torch.linalg.solve(G(w), deviation * drawn(len(w), 0, 1))
        torch.testing.assert_close(problem.step(sampler, name), expected, rtol=1e-12, atol=1e-13)
        assert sampler.temperature() == pytest.approx(samplers.temperature(lr, NUM_DATA, B), rel=1e-14)


def form(problem: Problem, name: str) -> str:
    if name == "identity":
        return "zero"
    return "closed" if name in ("fisher", "empirical") and isinstance(problem.model, nn.Linear) else "exact"


def sum_of_parts(sampler: Langevin, problem: Problem, normal: torch.Tensor) -> torch.Tensor:
    pieces = dict(zip(problem.model.parameters(), normal.split([s.numel() for s in problem.shapes])))
    found = {}
    for part in sampler.preconditioner.parts[1]:
        found |= part.parted(part.precision.sample(part.join({p: v.view(p.shape) for p, v in pieces.items()})))
    return torch.cat([found[p].flatten() for p in problem.model.parameters()])


def test_an_estimated_correction_has_the_exact_one_for_its_mean() -> None:
    """Over all signs of the three weights, which is all there is to expect."""
    problem = Problem("3, deep")
    for name in ("fisher", "diagonal", "kronecker", "function"):
        given, _ = problem.metric(name)
        for correction in ("flat", "jeffreys"):
            sampler = langevin(problem, given, correction=correction)
            exact, mean = corrections(sampler, problem, name), 0.0
            for k in range(8):
                signs = torch.tensor([1.0 - 2 * (k >> i & 1) for i in range(3)], dtype=torch.float64)
                estimated = langevin(problem, given, correction=correction, probes=1)
                estimated.preconditioner._signs = lambda probes, signs=signs: lambda p: cut(problem, signs)[p][None]
                mean = mean + corrections(estimated, problem, name) / 8
                assert estimated.correction_form == "estimated"
            torch.testing.assert_close(mean, exact, rtol=1e-10, atol=1e-12)


def cut(problem: Problem, flat: torch.Tensor) -> dict[torch.Tensor, torch.Tensor]:
    pieces = flat.split([s.numel() for s in problem.shapes])
    return {p: piece.view(p.shape) for p, piece in zip(problem.model.parameters(), pieces)}


def corrections(sampler: Langevin, problem: Problem, name: str) -> torch.Tensor:
    """The step without gradient, prior and noise, which leaves the correction."""
    before = problem.w
    sampler.preconditioner.move = LangevinStep(injected=False)
    sampler.param_groups[0]["prior_precision"] = 0.0
    sampler.observe(problem.model(problem.x))
    for p in problem.model.parameters():
        p.grad = torch.zeros_like(p)
    sampler.step()
    change = problem.w - before
    with torch.no_grad():
        nn.utils.vector_to_parameters(before, problem.model.parameters())
    return change


class WrittenOut(nn.Module):
    """A norm over all features of an example, as a formula."""

    def __init__(self, width: int, affine: bool) -> None:
        super().__init__()
        if affine:
            self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.affine = affine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centered = x - x.mean(-1, keepdim=True)
        x = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return x * self.weight + self.bias if self.affine else x


class InstanceNorm(nn.Module):
    """The same by an instance norm of one channel."""

    def __init__(self, width: int, affine: bool) -> None:
        super().__init__()
        self.inner, self.outer = nn.InstanceNorm1d(1), WrittenOut(width, affine)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x[:, None])[:, 0]
        return x * self.outer.weight + self.outer.bias if self.outer.affine else x


NORMS = {
    "written out": WrittenOut,
    "layer": lambda width, affine: nn.LayerNorm(width, elementwise_affine=affine),
    "group": lambda width, affine: nn.GroupNorm(1, width, affine=affine),
    "instance": InstanceNorm,
}


@pytest.mark.parametrize("metric", ["fisher", "empirical", "diagonal", "kronecker"])
@pytest.mark.parametrize("correction", ["flat", "jeffreys"])
def test_corrections_of_norms_are_those_of_their_formula(metric: str, correction: str) -> None:
    """Second derivatives of layer_norm and instance_norm by torch are wrong in forward mode."""
    x = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    changes = {}
    for name, norm in NORMS.items():
        torch.manual_seed(0)
        layers = nn.Linear(2, 3), norm(3, metric != "kronecker"), nn.Tanh(), nn.Linear(3, 2)
        model = nn.Sequential(*layers).double()
        settings = {"damping": DAMPING, "limit_step": False, "temperature": 1.0, "seed": 0}
        sampler = Langevin(model, 0.1, num_data=5, metric=metric, correction=correction, **settings)
        sampler.observe(model(x), labels=torch.arange(5) % 2 if metric == "empirical" else None)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        before = nn.utils.parameters_to_vector(model.parameters()).detach()
        sampler.step()
        changes[name] = nn.utils.parameters_to_vector(model.parameters()).detach() - before
    for name in NORMS:
        torch.testing.assert_close(changes[name], changes["written out"], rtol=1e-10, atol=1e-10)


# --- arithmetic ---


def test_temperatures_and_batch_sizes_are_the_papers() -> None:
    """Sec. 6: N = 1000, eps = 0.1; N = 1024, eps = 1/8; B = N/(2T/eps + 1)."""
    assert samplers.temperature(0.1, 1000, 50) == pytest.approx(1 - 0.1 / 2)
    assert samplers.temperature(1 / 8, 1024, 64) == pytest.approx(1 - 1 / 16)
    assert samplers.temperature(0.1, 1000, 1000) == 0
    assert samplers.temperature(0.1, 200, 10, exact=True) == pytest.approx(0.1 * 200 / 2 * 190 / 199 / 10)
    assert samplers.batch_noise(200, 10) == pytest.approx(0.09548, abs=5e-6)
    assert samplers.batch_size(1.0, 0.05, 8192) == round(8192 / 41)
    assert samplers.batch_size(1e6, 0.1, 1000) == 1
    for T, N, B in ((1.0, 1000, 50), (0.3, 64, 7)):
        lr = samplers.learning_rate(T, N, B)
        assert samplers.temperature(lr, N, B) == pytest.approx(T, rel=1e-14)
        assert samplers.batch_size(T, lr, N) == B
    assert samplers.step_inflation(0.1) == pytest.approx(1.0526, abs=5e-5)
    assert samplers.step_inflation(0.5) == pytest.approx(1.3333, abs=5e-5)
    assert samplers.damping_bias(3.5e-4, 1e-4) == pytest.approx(0.7778, abs=5e-5)


def test_arithmetic_refuses_what_means_nothing() -> None:
    for call, message in (
        (lambda: samplers.temperature(0.1, 10, 20), "batch_size must be at most num_data=10, got 20."),
        (lambda: samplers.temperature(-0.1, 10, 2), "lr must be a finite positive number, got -0.1."),
        (lambda: samplers.batch_size(1.0, 0.1, 0), "num_data must be a number >= 1, got 0."),
        (lambda: samplers.learning_rate(1.0, 10, 10), "batch_size must be less than num_data=10, got 10: there is no"),
        (lambda: samplers.step_inflation(2.5), "lr must be below 2, got 2.5"),
        (
            lambda: samplers.langevin_covariance(torch.eye(2), lr=3.0, num_data=5),
            "must be in \\(0, 2\\) for a stationary covariance",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_stationary_covariances_solve_lyapunovs_equation() -> None:
    """Against scipy, for a Hessian, a metric and a noise that have nothing to do with each other."""
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, 4, 4, dtype=torch.float64, generator=generator)
    H, G, Sigma = matrices @ matrices.mT + 0.5 * torch.eye(4, dtype=torch.float64)
    lr, N, B, damping = 0.05, 100, 8, 0.3
    damped = G + damping * torch.eye(4, dtype=torch.float64)
    inverse = np.linalg.inv(damped.numpy())
    K = np.eye(4) - lr * inverse @ H.numpy()
    noise = lr**2 * inverse @ Sigma.numpy() @ inverse / B * (N - B) / (N - 1)
    settings = dict(lr=lr, num_data=N, metric=G, damping=damping)
    found = samplers.minibatch_covariance(H, Sigma, batch_size=B, damping_noise=False, **settings)
    np.testing.assert_allclose(found, solve_discrete_lyapunov(K, noise), rtol=1e-10)
    noise += lr**2 * 2 * samplers.temperature(lr, N, B) * damping / (lr * N) * inverse @ inverse
    found = samplers.minibatch_covariance(H, Sigma, batch_size=B, **settings)
    np.testing.assert_allclose(found, solve_discrete_lyapunov(K, noise), rtol=1e-10)
    found = samplers.langevin_covariance(H, temperature=0.7, **settings)
    np.testing.assert_allclose(found, solve_discrete_lyapunov(K, 2 * lr * 0.7 / N * inverse), rtol=1e-10)


def test_stationary_covariances_of_a_quadratic_cost_have_the_known_factors() -> None:
    """1/(1 - eps/2) for Langevin; exactly 1 for minibatches of eps N/2, up to N/(N - 1); f/(f + delta) for damping."""
    F = torch.tensor([[2.0, 0.3], [0.3, 0.5]], dtype=torch.float64)
    lr, N = 0.1, 1000
    laplace = torch.linalg.inv(N * F)
    found = samplers.langevin_covariance(F, lr=lr, num_data=N)
    torch.testing.assert_close(found, laplace * samplers.step_inflation(lr), rtol=1e-12, atol=0)
    found = samplers.minibatch_covariance(F, F, lr=lr, num_data=N, batch_size=lr * N / 2)
    torch.testing.assert_close(found, laplace * N / (N - 1), rtol=1e-12, atol=0)
    small = torch.diag(torch.tensor([1.0, 1e-3], dtype=torch.float64))
    found = samplers.minibatch_covariance(
        small, small, lr=1e-3, num_data=N, batch_size=0.5 * 1e-3 * N + 0.5, damping=1e-3, damping_noise=False
    )
    bias = samplers.damping_bias(small.diagonal(), 1e-3)
    heat = samplers.temperature(1e-3, N, 0.5 * 1e-3 * N + 0.5)
    torch.testing.assert_close(found.diagonal() * N * small.diagonal() / heat, bias, rtol=2e-3, atol=0)
