"""IVON against ivon-opt, against its equations, and against the exact optimum of a logistic regression."""

from __future__ import annotations

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from bayesgrad import noise
from bayesgrad.optim import IVON, VON
from cases import small_model

pytestmark = pytest.mark.filterwarnings("ignore")
F64 = {"dtype": torch.float64}


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize(
    ("curvature", "rescale", "radius", "tau"),
    [
        ("reparameterised", True, math.inf, 1.0),
        ("reparameterised", True, math.inf, 0.4),
        ("gradsq", False, 0.01, 1.0),
    ],
)
def test_follows_ivon_opt_given_the_same_noise(
    curvature: str, rescale: bool, radius: float, tau: float, samples: int
) -> None:
    """kl_weight is the effective sample size N/tau of ivon-opt, with the weight decay tau delta/N."""
    ivon = pytest.importorskip("ivon")
    torch.manual_seed(0)
    x, y = torch.randn(40, 5, **F64), torch.randint(0, 3, (40,))
    mine, theirs = network(), network()
    size, delta = 40, 2.0
    optimizer = IVON(
        mine.parameters(),
        lr=0.1,
        num_data=size,
        prior_precision=delta,
        hess_init=0.3,
        betas=(0.9, 0.99),
        kl_weight=tau,
        curvature=curvature,
        rescale_lr=rescale,
        clip_radius=radius,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    other = ivon.IVON(
        theirs.parameters(),
        lr=0.1,
        ess=size / tau,
        weight_decay=tau * delta / size,
        hess_init=0.3,
        beta1=0.9,
        beta2=0.99,
        hess_approx="price" if curvature == "reparameterised" else curvature,  # their name
        rescale_lr=rescale,
        clip_radius=radius,
        mc_samples=samples,
    )
    params = list(mine.parameters())
    sizes = [p.numel() for p in params]
    for step in range(50):
        optimizer.zero_grad()
        for draw in range(samples):
            torch.manual_seed(100 * step + draw)
            flat = torch.randn(sum(sizes))
            given = {p: part.view(p.shape) for p, part in zip(params, flat.split(sizes))}
            with optimizer.sampled(noise=given):
                (nn.functional.cross_entropy(mine(x), y) / samples).backward()
            torch.manual_seed(100 * step + draw)
            with other.sampled_params(train=True):
                other.zero_grad()
                nn.functional.cross_entropy(theirs(x), y).backward()
        optimizer.step()
        other.step()
    torch.set_default_dtype(default)
    for p, q in zip(mine.parameters(), theirs.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("curvature", ["reparameterised", "gradsq"])
@pytest.mark.parametrize("tau", [1.0, 0.3, 4.0])
def test_is_its_equations(tau: float, curvature: str) -> None:
    """Twenty steps against the equations in h, with given noise, a tempered prior and momentum."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(7, **F64))
    lr, size, delta, b1, b2 = 0.2, 50, 3.0, 0.8, 0.95
    options = dict(num_data=size, prior_precision=delta, kl_weight=tau, hess_init=0.7, betas=(b1, b2))
    options |= {"clip_radius": math.inf}
    optimizer = IVON([weight], lr, curvature=curvature, **options)
    m, h, average = weight.detach().clone(), torch.full((7,), 0.7, **F64), torch.zeros(7, **F64)
    target = torch.randn(7, **F64)
    for t in range(1, 21):
        eps = torch.randn(7, **F64)
        with optimizer.sampled(noise=lambda p, eps=eps: eps):
            optimizer.zero_grad()
            (weight - target).cosh().sum().backward()
        optimizer.step()
        wd = tau * delta / size
        sd = (tau / (size * (h + wd))).sqrt()
        g = (m + sd * eps - target).sinh()
        hat = g * eps / sd if curvature == "reparameterised" else size * g**2
        average = b1 * average + (1 - b1) * g
        h = b2 * h + (1 - b2) * hat + 0.5 * (1 - b2) ** 2 * (h - hat) ** 2 / (h + wd)
        m = m - lr * (0.7 + wd) * (average / (1 - b1**t) + wd * m) / (h + wd)
        torch.testing.assert_close(weight.detach(), m, rtol=1e-10, atol=1e-12)
        variance = optimizer.variance_of(optimizer.param_groups[0], weight)
        torch.testing.assert_close(variance, tau / (size * (h + wd)), rtol=1e-10, atol=0)


@pytest.mark.parametrize("h", [-1e6, -1.0, 0.0, 1e6])
def test_precisions_at_least_half_whatever_comes(h: float) -> None:
    weight = nn.Parameter(torch.zeros(1, **F64))
    optimizer = IVON([weight], 0.0, num_data=10, hess_init=1.0, betas=(0.0, 0.1))
    old = 1 / (10 * (1.0 + 0.1))
    with optimizer.sampled(noise=lambda p: torch.ones(1, **F64)):
        weight.grad = torch.full((1,), h * math.sqrt(old), **F64)
    optimizer.step()
    new = optimizer.variance_of(optimizer.param_groups[0], weight).item()
    x = 0.9 * ((h + 0.1) / 1.1 - 1)
    assert new == pytest.approx(old / (1 + x + x * x / 2), rel=1e-10)
    assert new <= 2 * old * (1 + 1e-12)


def toy() -> tuple[np.ndarray, np.ndarray]:
    """A logistic regression with one weight, prior N(0, 1)."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=40)
    y = (generator.random(40) < 1 / (1 + np.exp(-1.5 * x))) * 2.0 - 1
    return x, y


def best_gaussian(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Mean and precision of the variational optimum, by Gauss-Hermite quadrature and a fixed-point iteration."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()
    m, s = 0.0, 1.0
    for _ in range(2000):
        w = m + nodes / np.sqrt(s)
        p = 1 / (1 + np.exp(y[:, None] * x[:, None] * w))
        gradient = weights @ (-(y * x)[:, None] * p).sum(0) + m
        hessian = weights @ ((x**2)[:, None] * p * (1 - p)).sum(0) + 1
        s = 0.5 * s + 0.5 * hessian
        m = m - 0.5 * gradient / s
    return m, s


@pytest.mark.parametrize(("beta2", "samples", "steps"), [(0.995, 4, 100)])
def test_finds_the_best_gaussian_of_a_logistic_regression(beta2: float, samples: int, steps: int) -> None:
    """Means within 0.02, s within 3 %, averaged over time and 30 weights, each with a loss of its own."""
    x, y = toy()
    m, s = best_gaussian(x, y)
    data, labels = torch.tensor(x)[:, None], torch.tensor(y)[:, None]
    weight = nn.Parameter(torch.zeros(30, **F64))
    optimizer = IVON([weight], 0.02, num_data=40, hess_init=0.3, betas=(0.9, beta2), samples=samples, rescale_lr=False)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.softplus(-labels * data * weight).sum(1).mean()
        loss.backward()
        return loss

    found = []
    for step in range(steps + 1000):
        optimizer.step(closure)
        if step >= 1000:
            variance = optimizer.variance_of(optimizer.param_groups[0], weight)
            found.append((weight.mean().item(), (1 / variance).mean().item()))
    mean, precision = np.mean(found, 0)
    assert mean == pytest.approx(m, abs=0.02)
    assert precision == pytest.approx(s, rel=0.03)


def stationary(optimizer: IVON | VON, weight: nn.Parameter, curvature: float, noise: float, rho: float) -> np.ndarray:
    """Stationary means of precision and variance of independent weights, over the right ones: (2, weights).

    Each weight has the mean loss l(w) = (curvature/2) w^2 + (noise xi) w with xi ~ N(0, 1), as from a batch; for VON,
    which observes Hessians, the curvature is multiplied by the square of another standard normal number.
    """
    generator = torch.Generator().manual_seed(0)
    exact = optimizer.initial("variance", optimizer.param_groups[0], weight)  # hess_init is the curvature
    sums, steps = torch.zeros(2, weight.numel(), **F64), int(10 / rho)
    for step in range(int(8 / rho) + steps):
        optimizer.zero_grad()
        with optimizer.sampled():
            first, second = torch.randn(2, weight.numel(), generator=generator, **F64)
            factor = curvature * second**2 if isinstance(optimizer, VON) else curvature
            loss = (factor / 2 * weight.square() + noise * first * weight).sum()
            optimizer.observe(loss=loss)
            loss.backward()
        optimizer.step()
        if step >= int(8 / rho):
            variance = optimizer.state[weight]["variance"] / exact
            sums += torch.stack([1 / variance, variance]) / steps
    return sums.numpy()


@pytest.mark.parametrize(
    ("rho", "delta", "batches", "tau"),
    [(0.1, 0.0, 0.0, 1.0), (0.05, 0.0, 0.0, 0.5), (0.05, 100.0, 0.0, 1.0), (0.04, 0.0, 8.0, 2.0)],
)
def test_the_stationary_precision_is_inflated_and_the_variance_is_not(
    rho: float, delta: float, batches: float, tau: float
) -> None:
    """On a quadratic, E[P]/P* = (1 + rho (V-1)/2)/(1 - rho/2) and E[P*/P] = 1 + rho^2 M/6, for the exact precision P*.

    With x = rho (p - P)/P, P <- P (1 + x + x^2/2) has a stationary mean if E[p - P] + rho/2 E[(p - P)^2/P] = 0, and
    log P <- log P + x - x^3/6 + ... if E[x] = E[x^3]/6. V and M are the second and third central moments of p/P*. For
    r = h/P*, draws have the moments 2 r^2 and 8 r^3; gradients whose variance over batches is c h/N add c/tau and
    6 r c/tau. (c = N/B, if that variance is the Fisher information over B.)
    """
    h, size = 2.0, 100.0
    weight = nn.Parameter(torch.zeros(4_000, **F64))
    options = dict(num_data=size, prior_precision=delta, kl_weight=tau, hess_init=h, betas=(0.0, 1 - rho))
    optimizer = IVON([weight], 0.0, **options)
    found = stationary(optimizer, weight, h, math.sqrt(h * batches / size), rho)
    (precision, variance), errors = found.mean(1), found.std(1) / math.sqrt(weight.numel())
    r, c = h / (h + tau * delta / size), batches / tau
    second, third = 2 * r**2 + c, 8 * r**3 + 6 * r * c
    inflated, higher = (1 + rho * (second - 1) / 2) / (1 - rho / 2), rho**2 * third / 6
    assert precision == pytest.approx(inflated, abs=5 * errors[0] + 3 * rho * higher)
    assert variance == pytest.approx(1 + higher, abs=5 * errors[1] + higher / 2)
    assert inflated - 1 > 10 * (errors[0] + higher * rho)  # the inflation is larger than what the tolerance allows


def test_without_the_last_term_the_variance_is_inflated_instead() -> None:
    """VON with Hessians h xi^2, whose V is 2: with the term E[P] = (1 + rho/2)/(1 - rho/2), without it E[1/P] > 1."""
    rho, found = 0.05, {}
    for improved in (True, False):
        weight = nn.Parameter(torch.zeros(4_000, **F64))
        options = dict(num_data=100, prior_precision=0.0, hess_init=2.0, betas=(0.0, 1 - rho), hessian="hutchinson")
        optimizer = VON([weight], 0.0, improved=improved, **options)
        found[improved] = stationary(optimizer, weight, 2.0, 0.0, rho).mean(1)
    assert found[True] == pytest.approx([(1 + rho / 2) / (1 - rho / 2), 1.0], abs=0.008)
    assert found[False] == pytest.approx([1.0, 1 + rho], abs=0.008)


def test_a_draw_is_one_of_the_belief() -> None:
    """Mean and variance of many samples of each weight, within four standard errors."""
    torch.manual_seed(0)
    model = small_model()
    optimizer = IVON(model.parameters(), num_data=100, hess_init=0.5)
    means = [p.detach().clone() for p in model.parameters()]
    sums = [torch.zeros_like(p) for p in means]
    squares = [torch.zeros_like(p) for p in means]
    count = 400
    with torch.no_grad():
        for _ in range(count):
            with optimizer.sampled():
                for p, m, total, square in zip(model.parameters(), means, sums, squares):
                    total += p - m
                    square += (p - m) ** 2
    sd = 1 / math.sqrt(100 * 0.5 + 1)
    scores = torch.cat([(total / count / (sd / math.sqrt(count))).flatten() for total in sums])
    assert scores.abs().max() < 5.5
    assert scores.std().item() == pytest.approx(1, abs=0.02)
    ratio = torch.cat([(square / count / sd**2).flatten() for square in squares])
    assert ratio.mean().item() == pytest.approx(1, abs=4 * math.sqrt(2 / count / len(ratio)))


def test_noise_is_standard_normal_and_independent_between_draws() -> None:
    position = torch.arange(1 << 20, dtype=torch.int32)
    draws = []
    for draw in range(3):
        square, cosine = noise.normal_parts(position, *noise.key(0, draw))
        draws.append((square.sqrt() * cosine).double())
    n = len(position)
    for z in draws:
        assert abs(z.mean()) < 4 / math.sqrt(n)
        assert abs(z.var() - 1) < 4 * math.sqrt(2 / n)
        assert abs((z**4).mean() - 3) < 4 * math.sqrt(96 / n)
        for lag in (1, 2, 64, 1000):
            assert abs((z[lag:] * z[:-lag]).mean()) < 4 / math.sqrt(n)
        grid = torch.linspace(-3, 3, 13, **F64)
        empirical = torch.searchsorted(z.sort().values, grid) / n
        exact = torch.special.ndtr(grid)
        assert ((empirical - exact).abs() < 4 * (exact * (1 - exact) / n).sqrt()).all()
    assert abs((draws[0] * draws[1]).mean()) < 4 / math.sqrt(n)
    u = noise.fraction(torch.tensor([-1, 0, 2**31 - 1, -(2**31)], dtype=torch.int32))
    assert bool(((u > 0) & (u < 1)).all())


def test_logarithms_are_right() -> None:
    u = torch.cat([torch.logspace(-7, -0.0001, 4000), 1 - torch.logspace(-7, -1, 1000)])
    exact = u.double().log()
    assert ((noise.log(u).double() - exact).abs() <= 3e-7 * exact.abs()).all()


@pytest.mark.parametrize("rescale", [True, False])
def test_by_default_no_weight_moves_by_more_than_a_fraction_of_lr(rescale: bool) -> None:
    """|step| <= 0.3 lr for any gradient and any hess_init, and exactly that for large gradients."""
    for hess_init in (1e-3, 1.0, 50.0):
        weight = nn.Parameter(torch.zeros(3, **F64))
        optimizer = IVON([weight], 0.2, num_data=100, hess_init=hess_init, rescale_lr=rescale)
        with optimizer.sampled(noise=torch.zeros_like):
            weight.grad = torch.tensor([1e6, -1e6, 1e-9], **F64)
        optimizer.step()
        torch.testing.assert_close(weight.detach()[:2], torch.tensor([-0.06, 0.06], **F64), rtol=1e-10, atol=0)
        assert 0 < float(-weight.detach()[2]) < 0.06


@pytest.mark.parametrize("gammas", [(0.3,) * 6, (0.0, 0.0, 0.3, 0.3), (0.3, 0.3, 0.0, 0.0, 0.3, 0.3)], ids=str)
def test_natural_momentum_is_momentum_of_natural_parameters(gammas: tuple[float, ...]) -> None:
    """The image of lambda <- lambda + rho (...) + gamma (lambda - lambda_old), on a quadratic.

    Where gamma is switched on, lambda_old is the lambda of that time.
    """
    rho, size = 0.1, 10.0
    weight = nn.Parameter(torch.tensor([0.4], **F64))
    optimizer = IVON(
        [weight], rho, num_data=size, prior_precision=0.0, hess_init=1.0, betas=(0.0, 1 - rho),
        rescale_lr=False, natural_momentum=gammas[0], curvature="gradsq", clip_radius=math.inf,
    )  # fmt: skip
    s, s_old, w, w_old = 1.0, 1.0, 0.4, 0.4
    for before, gamma in zip((0.0, *gammas), gammas):
        optimizer.param_groups[0]["natural_momentum"] = gamma
        s_old, w_old = (s_old, w_old) if before else (s, w)
        g = 2 * (w - 1.0)
        with optimizer.sampled(noise=lambda p: torch.zeros(1, **F64)):
            optimizer.zero_grad()
            ((weight - 1.0) ** 2).sum().backward()
        optimizer.step()
        h = size * g * g
        x = rho * (h - s) / s
        s_new = s * (1 + x + x * x / 2) + gamma * (s - s_old)
        # In natural parameters: (s w)_new = s_new w_new.
        w_new = w - rho * g / s_new + gamma * (s_old / s_new) * (w - w_old)
        s_old, s, w_old, w = s, s_new, w, w_new
        assert weight.item() == pytest.approx(w, rel=1e-10)
        assert 1 / optimizer.state[weight]["variance"].item() == pytest.approx(s, rel=1e-10)


def test_natural_momentum_is_that_of_steps_if_weights_are_loaded_between_them() -> None:
    """gamma (P_old/P) (w - w_old) with the last step in place of the distance to other weights."""
    moved = []
    for loaded in (0.0, 5.0):
        weight = nn.Parameter(torch.tensor([0.4, -0.2], **F64))
        optimizer = IVON([weight], 0.1, num_data=10, prior_precision=0.0, natural_momentum=0.5)
        for index in range(4):
            with torch.no_grad():
                weight.add_(loaded if index == 3 else 0.0)
            before = weight.detach().clone()
            with optimizer.sampled(noise=torch.ones_like):
                weight.grad = torch.tensor([1.0, -0.5], **F64)
            optimizer.step()
        moved.append(weight.detach() - before)
    torch.testing.assert_close(*moved, rtol=1e-10, atol=1e-12)


def test_warns_where_the_hessian_has_not_moved() -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = IVON([weight], num_data=100, betas=(0.9, 0.99999))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(1001):
            with optimizer.sampled():
                weight.grad = torch.full((3,), 1e-4)
            optimizer.step()
    assert [str(w.message) for w in caught if "Hessian has changed" in str(w.message)] != []
    assert sum("Hessian has changed" in str(w.message) for w in caught) == 1


def test_a_prior_from_an_earlier_task_pulls_and_holds() -> None:
    model = small_model(torch.float64)
    first = IVON(model.named_parameters(), num_data=100)
    posterior = first.posterior(model)
    optimizer = IVON(model.named_parameters(), 0.1, num_data=50, prior=posterior, betas=(0.0, 0.9))
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    with optimizer.sampled(noise=torch.zeros_like):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
    optimizer.step()
    precision = 100 * 1.0 + 1.0
    wd = precision / 50
    h = 0.9 * 1.0 + 0.5 * 0.01 * 1.0 / (1.0 + wd)
    for name, p in model.named_parameters():
        expected = start[name] + 0.1 - 0.1 * (1.0 + 1 / 50) * wd * 0.1 / (h + wd)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="needs named parameters"):
        IVON(model.parameters(), num_data=50, prior=posterior)
    twin = IVON(model.named_parameters(), num_data=50, prior=posterior)
    twin.load_state_dict(optimizer.state_dict())


def precisions(model: nn.Module, optimizer: IVON) -> dict[str, float]:
    return {
        name.replace("_orig_mod.", ""): float(optimizer.state[p]["prior_precision"].mean())
        for name, p in model.named_parameters()
    }


def test_a_prior_is_that_of_a_parameter_in_a_compiled_submodule() -> None:
    model = network()
    earlier = IVON(model.named_parameters(), num_data=1000).posterior(model)  # 1001, in place of 1
    model[0] = torch.compile(model[0])  # which is not called
    optimizer = IVON(model.named_parameters(), num_data=10, prior=earlier)
    assert precisions(model, optimizer) == pytest.approx(dict.fromkeys(earlier.mean, 1001.0), rel=1e-12)


@pytest.mark.parametrize("copied", [False, True])
def test_a_prior_is_that_of_a_group_which_is_added_later(copied: bool) -> None:
    """The steps are those of an optimizer that had both groups from the beginning; a head without a prior is taken."""
    first = network()
    earlier = IVON(first.named_parameters(), num_data=1000).posterior(first)
    ends = []
    for late in (False, True):
        model = network()
        body, head = list(model.named_parameters())[:2], list(model.named_parameters())[2:]
        new = [("new", nn.Parameter(torch.ones(2, **F64)))]
        groups = [{"params": some} for some in (head, body, new)]
        optimizer = IVON(groups[:1] if late else groups, num_data=10, prior=earlier, seed=0)
        if late and copied:
            model, new, optimizer = copy.deepcopy((model, new, optimizer))
            groups = [{}, {"params": list(model.named_parameters())[:2]}, {"params": new}]
        for group in groups[1:] if late else ():
            optimizer.add_param_group(group)
        with optimizer.sampled(noise=torch.zeros_like):
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                p.grad = torch.ones_like(p)
        optimizer.step()
        assert precisions(model, optimizer) == pytest.approx(dict.fromkeys(earlier.mean, 1001.0), rel=1e-12)
        assert float(optimizer.state[new[0][1]]["prior_precision"].mean()) == 1
        ends.append([p.detach().clone() for p in (*model.parameters(), new[0][1])])
    assert all(map(torch.equal, *ends))
    optimizer = IVON(list(network().named_parameters())[2:], num_data=10, prior=earlier)
    with pytest.raises(ValueError, match=r"'0.bias' must have the shape \(2,\) in the prior, got \(8,\)"):
        optimizer.add_param_group({"params": [("0.bias", nn.Parameter(torch.ones(2, **F64)))]})
    assert len(optimizer.param_groups) == 1


def test_a_frozen_layer_is_a_constant_of_the_posterior_with_a_prior_too() -> None:
    """Until it was trained: then it has the variance of its last step."""
    model = small_model(torch.float64)
    earlier = IVON(model.named_parameters(), num_data=100).posterior(model)
    named = dict(model.named_parameters())
    first, *others = named
    for prior in (None, earlier):
        for trained in (False, True):
            optimizer = IVON(model.named_parameters(), num_data=100, prior=prior, seed=0)
            for frozen in (not trained, True):
                named[first].requires_grad_(not frozen)
                with optimizer.sampled():
                    for p in model.parameters():
                        p.grad = torch.ones_like(p) if p.requires_grad else None
                optimizer.step()
            assert set(optimizer.posterior(model).variance()) == {*([first] if trained else []), *others}
            named[first].requires_grad_(True)


@pytest.mark.parametrize("curvature", ["reparameterised", "gradsq"])
@pytest.mark.parametrize(("value", "rounds"), [(8.0, True), (0.5, False)])
def test_weights_that_cannot_hold_the_noise_are_named_once(value: float, rounds: bool, curvature: str) -> None:
    """sigma = 0.01; bfloat16 numbers are 0.06 apart at 8, and 0.004 at 0.5. Squares do not divide by the noise."""
    weight = nn.Parameter(torch.full((30,), value, dtype=torch.bfloat16))
    optimizer = IVON([weight], num_data=10_000, hess_init=1.0, curvature=curvature, seed=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            with optimizer.sampled():
                optimizer.zero_grad()
                (weight.float() - value).square().sum().backward()
            optimizer.step()
    found = [str(w.message) for w in caught if "spacing of torch.bfloat16 numbers" in str(w.message)]
    assert len(found) == (rounds and curvature == "reparameterised")
