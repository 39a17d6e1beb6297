"""Kronecker filters against transcriptions, their steady state, and AdaBayes for single weights."""

from __future__ import annotations

import copy
import math
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

from bayesgrad.optim import AdaBayes, AdaBayesFP, KroneckerFilter, KroneckerFilterFP
from bayesgrad.posterior import load
from bayesgrad.precision import Kronecker
from bayesgrad.precision.projection import Factors
from bayesgrad.rules import OrnsteinUhlenbeck
from layer_models import Conv1D

D = torch.float64


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 3)).to(D)


def data(index: int, n: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(n, 4, dtype=D, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def close(a: torch.Tensor, b: torch.Tensor, rtol: float = 1e-10) -> None:
    torch.testing.assert_close(a.detach(), b.detach(), rtol=rtol, atol=rtol)


def joined(layer: nn.Module, gradient: bool = False) -> torch.Tensor:
    pair = (layer.weight.grad, layer.bias.grad) if gradient else (layer.weight, layer.bias)
    return torch.cat([pair[0], pair[1][:, None]], 1).detach().clone()


def evidence(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs with an appended one, and per-example errors, of both layers."""
    hidden, outputs = torch.tanh(model[0](x)).detach(), model(x).detach()
    e = outputs.softmax(1) - F.one_hot(y, 3)
    ones = torch.ones(len(x), 1, dtype=D)
    first = (e @ model[2].weight.detach()) * (1 - hidden**2)
    return [(torch.cat([x, ones], 1), first), (torch.cat([hidden, ones], 1), e)]


def steps(model: nn.Sequential, optimizer: torch.optim.Optimizer, indices: range, n: int = 6):
    """Yields the inputs and errors of each step before the step."""
    for index in indices:
        x, y = data(index, n)
        optimizer.zero_grad()
        outputs = model(x)
        optimizer.observe(outputs, labels=y)
        F.cross_entropy(outputs, y).backward()
        seen = evidence(model, x, y)
        yield index, seen
        optimizer.step()


def power(C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, vectors = torch.linalg.eigh(C)
    return values.clamp(min=0), vectors


@pytest.mark.parametrize("rule", [KroneckerFilter, KroneckerFilterFP])
def test_an_average_that_is_switched_on_late_starts_at_the_step(rule: type) -> None:
    """The first step with momentum is that without."""
    moved = []
    for momentum in (0.0, 0.9):
        model = network()
        optimizer = rule(model, 1e-2, batch_size=6, momentum=0.0, prior_std=0.3)
        for index, _ in steps(model, optimizer, range(4)):
            optimizer.param_groups[0]["momentum"] = momentum if index == 3 else 0.0
        moved.append([p.detach().clone() for p in model.parameters()])
    for late, without in zip(*moved):
        close(late, without, 1e-12)


@pytest.mark.parametrize(("how", "whiten"), [("sampled", "both"), ("empirical", "both"), ("sampled", "input")])
@pytest.mark.parametrize("prior", [math.inf, 0.3], ids=["whitening", "prior"])
def test_steady_state_over_steps(prior: float, how: str, whiten: str) -> None:
    """Moments, s_ij, averaged steps and decay; given labels are the empirical errors."""
    model, B, lr, ema, decay = network(), 6, 0.01, 0.8, 0.5
    options = {"batch_size": B, "prior_std": prior, "ema": ema, "weight_decay": decay, "fisher": how, "whiten": whiten}
    optimizer = KroneckerFilterFP(model, lr, update_every=1, stats_every=1, max_step=math.inf, **options)
    moments = [[0.0, 0.0], [0.0, 0.0]]
    momentum = [0.0, 0.0]
    expected: list[torch.Tensor] = []
    for t, seen in steps(model, optimizer, range(1, 5)):
        if expected:
            for k, layer in enumerate((model[0], model[2])):
                close(joined(layer), expected[k])
        expected = []
        for k, layer in enumerate((model[0], model[2])):
            for side, rows in enumerate(seen[k]):
                moments[k][side] = ema * moments[k][side] + (1 - ema) * rows.T @ rows / B
            (cx, Ux), (cd, Ud) = (power(moment / (1 - ema**t)) for moment in moments[k])
            if whiten == "input":
                cd = cd.mean().expand_as(cd)
            if math.isinf(prior):
                cx, cd = (c.maximum(1e-4 * c.max()) for c in (cx, cd))
            half = 1 / (2 * prior**2)
            s = 1 / (half + (half**2 + B * cd[:, None] * cx[None] / lr**2).sqrt())
            step = Ud @ (s * (Ud.T @ (B * joined(layer, True)) @ Ux)) @ Ux.T
            momentum[k] = 0.9 * momentum[k] + 0.1 * step
            expected.append((1 - lr * decay) * joined(layer) - momentum[k] / (1 - 0.9**t))
    for k, layer in enumerate((model[0], model[2])):
        close(joined(layer), expected[k], 1e-9)


@pytest.mark.parametrize("whiten", ["both", "input"])
@pytest.mark.parametrize("prior", [math.inf, 0.3], ids=["whitening", "prior"])
def test_eigenvalues_of_gradients_over_steps(prior: float, whiten: str) -> None:
    """Squares of gradients in the eigenbasis, which turn with it: (V'U)^2 times them, for each side."""
    model, B, lr, ema = network(), 40, 0.01, 0.8
    options = {"batch_size": B, "prior_std": prior, "ema": ema, "fisher": "empirical", "whiten": whiten}
    options |= {"eigenvalues": "gradients", "update_every": 1, "stats_every": 1, "max_step": math.inf}
    optimizer = KroneckerFilterFP(model, lr, momentum=0.0, **options)
    moments, squares = [[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0]
    bases: list[list[torch.Tensor]] = [[], []]
    expected: list[torch.Tensor] = []
    for t, seen in steps(model, optimizer, range(1, 6), B):
        if expected:
            for k, layer in enumerate((model[0], model[2])):
                close(joined(layer), expected[k], 1e-8)
        expected = []
        for k, layer in enumerate((model[0], model[2])):
            for side, rows in enumerate(seen[k]):
                moments[k][side] = ema * moments[k][side] + (1 - ema) * rows.T @ rows / B
            Ux, Ud = (power(moment)[1] for moment in moments[k])
            Ud = torch.eye(len(Ud), dtype=D) if whiten == "input" else Ud
            if t > 1:
                Vx, Vd = bases[k]
                squares[k] = (Ud.T @ Vd) ** 2 @ squares[k] @ ((Ux.T @ Vx) ** 2).T
            bases[k] = [Ux, Ud]
            g = Ud.T @ joined(layer, True) @ Ux
            squares[k] = ema * squares[k] + (1 - ema) * g**2
            v = squares[k] / (1 - ema**t)
            half = 1 / (2 * prior**2)
            s = 1 / (half + (half**2 + B**2 * v.maximum(1e-8 * v.max()) / lr**2).sqrt())
            expected.append(joined(layer) - Ud @ (s * B * g) @ Ux.T)
    for k, layer in enumerate((model[0], model[2])):
        close(joined(layer), expected[k], 1e-8)


def test_eigenvalues_of_gradients_without_a_basis_are_adams() -> None:
    """Where both factors are diagonal, the step is that of Adam without momentum."""
    ours, theirs = network(), network()
    options = {"eigenvalues": "gradients", "fisher": "empirical", "max_factor": 1, "max_step": math.inf}
    optimizer = KroneckerFilterFP(ours, 1e-2, batch_size=6, momentum=0.0, ema=0.9, **options)
    adam = torch.optim.Adam(theirs.parameters(), lr=1e-2, betas=(0.0, 0.9), eps=1e-300)
    for index in range(6):
        x, y = data(index)
        for model, one in ((ours, optimizer), (theirs, adam)):
            one.zero_grad()
            F.cross_entropy(model(x), y).backward()
            one.step()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        close(a, b)


@pytest.mark.parametrize("prior", [math.inf, 0.02], ids=["random walk", "prior"])
def test_the_formula_is_the_fixed_point_of_the_exact_filter(prior: float) -> None:
    """Each eigendirection is a scalar filter with information B c_x c_d per step; to first order in its root."""
    eta, B = 1e-3, 100
    information = B * torch.logspace(-6, 2, 30, dtype=D)
    scalars = OrnsteinUhlenbeck().scalars(process=eta**2, stationary=prior**2)
    r, q = scalars["retain"], scalars["noise"]
    linear = r - 1 - q * information
    v = 2 * q / ((linear**2 + 4 * q * r * information).sqrt() - linear)  # of q/v^2 + linear/v = r h
    predicted = r * v + q
    close(predicted / (1 + predicted * information), v, 1e-9)
    half = 1 / (2 * prior**2)
    formula = 1 / (half + (half**2 + information / eta**2).sqrt())
    x = eta * information.sqrt()
    bound = ((1 + x**2 / 4).sqrt() + x / 2 - 1).maximum(torch.tensor((eta / prior) ** 2 / 4))
    assert bool(((formula / v - 1).abs() <= 1.2 * bound + 1e-6).all())
    assert bool((formula / v - 1).abs()[-1] > 0.5 * bound[-1])  # the bound is not idle


@pytest.mark.parametrize("prior", [math.inf, 0.3], ids=["whitening", "prior"])
def test_equals_adabayes_fp_on_a_single_weight_with_constant_input(prior: float) -> None:
    """Without momentum: AdaBayesFP averages the gradient, this filter the step."""
    model, twin = nn.Linear(1, 1, bias=False).to(D), nn.Linear(1, 1, bias=False).to(D)
    twin.load_state_dict(model.state_dict())
    options = {"fisher": "empirical", "likelihood": "gaussian", "ema": 0.999, "update_every": 1, "weight_decay": 0.1}
    options |= {"batch_size": 1, "prior_std": prior, "momentum": 0.0}
    optimizer = KroneckerFilterFP(model, 1e-2, stats_every=1, max_step=math.inf, **options)
    reference = AdaBayesFP(twin.parameters(), 1e-2, sgd_lr=prior**2, weight_decay=0.1, betas=(0.0, 0.999))
    x, generator = torch.full((1, 1), 1.7, dtype=D), torch.Generator().manual_seed(0)
    for _ in range(50):
        target = torch.randn(1, 1, dtype=D, generator=generator)
        for net, opt in ((model, optimizer), (twin, reference)):
            opt.zero_grad()
            (net(x) - target).square().sum().backward()
            opt.step()
        close(model.weight, twin.weight)


@pytest.mark.parametrize("prior", [math.inf, 0.3], ids=["random walk", "prior"])
def test_filter_over_steps(prior: float) -> None:
    """Drift, update by one example, and mean; the projection is tested elsewhere."""
    model, B, lr = network(), 4, 0.01
    optimizer = KroneckerFilter(model, lr, batch_size=B, prior_std=prior, update_every=1, weight_decay=0.1)
    start = 0.1 / B if math.isinf(prior) else prior**2
    beliefs = [
        Factors(
            *(math.sqrt(start) * torch.eye(k, dtype=D)[None] for k in sizes), torch.ones(2, 1, dtype=D)
        ).with_exact_traces()
        for sizes in ((5, 30), (31, 3))
    ]
    drift = OrnsteinUhlenbeck().scalars(process=lr**2, stationary=prior**2)
    momentum, expected = [0.0, 0.0], []
    for t, seen in steps(model, optimizer, range(1, 6), n=B):
        if expected:
            for k, layer in enumerate((model[0], model[2])):
                close(joined(layer), expected[k], 1e-9)
        expected = []
        for k, layer in enumerate((model[0], model[2])):
            x, d = (rows[None] for rows in seen[k])
            beliefs[k] = beliefs[k].propagate(drift["retain"], drift["noise"]).observe(x, d).with_exact_traces()
            step = beliefs[k].errors[0] @ (B * joined(layer, True)) @ beliefs[k].inputs[0]
            momentum[k] = 0.9 * momentum[k] + 0.1 * step
            expected.append((1 - 0.1 * lr) * joined(layer) - momentum[k] / (1 - 0.9**t))


def test_filter_equals_adabayes_on_a_single_weight() -> None:
    """One weight, one example: the scalar filter, drift included."""
    model, twin = nn.Linear(1, 1, bias=False).to(D), nn.Linear(1, 1, bias=False).to(D)
    twin.load_state_dict(model.state_dict())
    optimizer = KroneckerFilter(
        model, 1e-2, batch_size=1, prior_std=math.sqrt(0.1), momentum=0.0, fisher="empirical", likelihood="gaussian"
    )
    reference = AdaBayes(twin.parameters(), 1e-2, batch_size=1, sgd_lr=0.1, momentum=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        x, target = torch.randn(2, 1, 1, dtype=D, generator=generator)
        for net, opt in ((model, optimizer), (twin, reference)):
            opt.zero_grad()
            (net(x) - target).square().sum().backward()
            opt.step()
        close(model.weight, twin.weight)


@pytest.mark.parametrize("decays", [False, True])
def test_the_decay_of_the_prior_is_that_of_weight_decay(decays: bool) -> None:
    """w <- c w - v G, with c = exp(-eta^2/(2 sigma^2)) in Aitchison 2018, and 1 - eta lambda in Aitchison 2020."""
    model, lr, sigma, x = nn.Linear(1, 1, bias=False).to(D), 0.05, 0.3, 1.7
    c = math.exp(-(lr**2) / (2 * sigma**2))
    optimizer = KroneckerFilter(
        model,
        lr,
        batch_size=1,
        prior_std=sigma,
        weight_decay=(1 - c) / lr if decays else 0.0,
        momentum=0.0,
        fisher="empirical",
        likelihood="gaussian",
    )
    assert abs((1 - c) / lr - lr / (2 * sigma**2)) < 0.01 * lr / (2 * sigma**2)  # the docstring's first-order form
    w, v, generator = model.weight.item(), sigma**2, torch.Generator().manual_seed(0)
    for _ in range(30):
        target = float(torch.randn((), dtype=D, generator=generator))
        optimizer.zero_grad()
        (model(torch.full((1, 1), x, dtype=D)) - target).square().sum().backward()
        optimizer.step()
        g = 2 * x * (w * x - target)
        v = c**2 * v + sigma**2 * (1 - c**2)
        v = v / (1 + v * g**2)
        w = (c if decays else 1.0) * w - v * g
        assert abs(model.weight.item() - w) < 1e-10


def test_centred_errors_lose_the_mean_of_earlier_batches() -> None:
    model, B = network(), 6
    optimizer = KroneckerFilterFP(
        model, 0.01, batch_size=B, fisher="centered", ema=0.0, stats_every=1, max_step=math.inf
    )
    mean = None
    for t, seen in steps(model, optimizer, range(1, 4)):
        e = seen[1][1]
        centred = e if mean is None else e - mean / (1 - 0.99 ** (t - 1))
        mean = 0.99 * (0 if mean is None else mean) + 0.01 * e.mean(0)
        before = t
    assert before == 3
    close(optimizer.state[model[2].weight]["error_moment"][0].tril(), (centred.T @ centred / B).tril())


@pytest.mark.parametrize("rule", [KroneckerFilter, KroneckerFilterFP])
def test_evidence_that_is_not_finite_leaves_factors_alone(rule: type) -> None:
    model = nn.Sequential(nn.Linear(4, 3)).to(D)
    optimizer = rule(model, batch_size=6, likelihood="gaussian", update_every=1)
    for index, bad in enumerate((1.0, 1.0, math.nan, 1e200, 1.0)):
        x, _ = data(index)
        optimizer.zero_grad()
        outputs = model(x)
        optimizer.observe(outputs, labels=torch.full_like(outputs, bad))
        outputs.square().mean().backward()
        before = {k: v.clone() for k, v in optimizer.state[model[0].weight].items() if k.startswith(("inp", "err"))}
        weight = model[0].weight.detach().clone()
        optimizer.step()
        after = {k: v for k, v in optimizer.state[model[0].weight].items() if k.startswith(("inp", "err"))}
        assert bool(torch.isfinite(model[0].weight).all())
        assert not torch.equal(weight, model[0].weight)
        if bad != 1.0:
            assert all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize("rule", [KroneckerFilter, KroneckerFilterFP])
def test_fallback_is_adabayes_with_the_same_prior(rule: type) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)).to(D)
    with pytest.warns(UserWarning, match=rf"{rule.__name__} trains 1.weight, 1.bias by AdaBayes"):
        optimizer = rule(model, 0.01, batch_size=6, prior_std=0.2)
    twin = copy.deepcopy(model[1])
    if rule is KroneckerFilter:
        reference = AdaBayes(twin.parameters(), 0.01, batch_size=6, sgd_lr=0.04 * 6)
    else:
        reference = AdaBayesFP(twin.parameters(), 0.01, betas=(0.9, 0.95), sgd_lr=0.04 * 6)
    for index in range(4):
        x, y = data(index)
        optimizer.zero_grad()
        outputs = model(x)
        optimizer.observe(outputs)
        F.cross_entropy(outputs, y).backward()
        for p, q in zip(model[1].parameters(), twin.parameters()):
            q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
        close(model[1].weight, twin.weight)
    variance = optimizer.posterior(model).variance()["1.bias"]
    named = AdaBayesFP if rule is KroneckerFilterFP else AdaBayes
    extra = {"betas": (0.9, 0.95)} if named is AdaBayesFP else {}
    other = named(twin.parameters(), 0.01, batch_size=6, sgd_lr=0.04 * 6, **extra)
    other.state.update(reference.state)
    close(variance, other.posterior(twin).variance()["bias"])


# --- posterior ---


def trained(rule: type, prior: float, **options) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = network()
    optimizer = rule(model, 0.01, batch_size=6, prior_std=prior, **options)
    for _ in steps(model, optimizer, range(3)):
        pass
    return model, optimizer


@pytest.mark.parametrize("prior", [math.inf, 0.3], ids=["random walk", "prior"])
@pytest.mark.parametrize("rule", [KroneckerFilter, KroneckerFilterFP])
def test_posterior_is_the_matrix_normal_that_moved_the_mean(rule: type, prior: float, tmp_path) -> None:
    """Without momentum, the step is the covariance times B g; also of samples; saving keeps it bit for bit."""
    unbounded = {"max_step": math.inf} if rule is KroneckerFilterFP else {}
    model, optimizer = trained(rule, prior, momentum=0.0, stats_every=100, **unbounded)
    before = joined(model[2])
    for _ in steps(model, optimizer, range(7, 8)):
        pass
    posterior = optimizer.posterior(model)
    belief = posterior.beliefs["2.weight"]
    covariance = torch.linalg.inv(belief.precision.to_dense())
    gradient = 6 * joined(model[2], True)
    close(before - joined(model[2]), (covariance @ gradient.flatten()).view_as(gradient), 1e-8)
    close(belief.join(posterior.variance()).flatten(), covariance.diagonal(), 1e-9)
    close(belief.join(posterior.mean)[0], joined(model[2]))
    draws = belief.join(posterior.sample(4000)).flatten(1)
    white = torch.linalg.solve_triangular(
        torch.linalg.cholesky(covariance), (draws - belief.mean.flatten()).T, upper=False
    )
    assert (white @ white.T / 4000 - torch.eye(len(white), dtype=D)).abs().max() < 5 * math.sqrt(2 / 4000) + 0.02
    posterior.save(tmp_path / "belief.pt")
    again = load(tmp_path / "belief.pt", model)
    one, other = posterior.sample(2, seed=5), again.sample(2, seed=5)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    close(optimizer.posterior(model, scale=4.0).variance()["0.bias"], 4 * posterior.variance()["0.bias"])


def test_linear_predictions_use_the_joint_covariance() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(D)
    optimizer = KroneckerFilterFP(model, 0.01, batch_size=6, likelihood="gaussian", max_step=math.inf)
    x, _ = data(0)
    outputs = model(x)
    optimizer.observe(outputs)
    outputs.square().mean().backward()
    optimizer.step()
    posterior = optimizer.posterior(model)
    precision = posterior.beliefs["weight"].precision
    assert isinstance(precision, Kronecker)
    ones = torch.cat([x, torch.ones(6, 1, dtype=D)], 1)
    spread = torch.einsum("bi,ij,bj->b", ones, precision.right[0], ones)
    expected = spread[:, None] * precision.left[0].diagonal()
    close(posterior.predict(x, method="linear", likelihood="gaussian").variance, expected)


def transposed(kind: str) -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    if kind == "Conv1D":
        body, x = Conv1D(5, 4), torch.randn(6, 4)
    else:
        body, x = nn.ConvTranspose1d(4, 6, 2, stride=2, groups=2, bias=False), torch.randn(6, 4, 3)
    size = body(x).flatten(1).shape[1]
    return nn.Sequential(body, nn.Tanh(), nn.Flatten(), nn.Linear(size, 3)).to(D), x.to(D)


def laid_out(kind: str, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """Values of the first layer as matrices (..., groups, out, in), by hand: the weight is (in, out)."""
    weight = values["0.weight"]
    if kind == "Conv1D":
        return torch.cat([weight.mT, values["0.bias"][..., None]], -1)[..., None, :, :]
    *ahead, _, features, width = weight.shape  # input channels, output channels of a group, kernel
    return weight.reshape(*ahead, 2, 2, features * width).mT


@pytest.mark.parametrize("kind", ["Conv1D", "ConvTranspose1d"])
@pytest.mark.parametrize("rule", [KroneckerFilter, KroneckerFilterFP])
def test_the_posterior_of_a_layer_whose_weight_is_in_by_out(rule: type, kind: str, tmp_path) -> None:
    """Its mean is the weight, its covariance times B g is the step, and predictions are those of explicit Jacobians."""
    model, x = transposed(kind)
    unbounded = {"max_step": math.inf} if rule is KroneckerFilterFP else {}
    optimizer = rule(model, 0.01, batch_size=6, momentum=0.0, prior_std=0.3, stats_every=100, **unbounded)
    before: dict[str, torch.Tensor] = {}
    for _ in range(4):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.zero_grad()
        outputs = model(x)
        optimizer.observe(outputs)
        F.cross_entropy(outputs, torch.arange(6) % 3).backward()
        optimizer.step()
    weights = dict(model.named_parameters())
    posterior = optimizer.posterior(model)
    assert all(torch.equal(posterior.mean[name], p) for name, p in weights.items())
    close(posterior.predict(x, method="mean"), model(x).softmax(1))

    belief = posterior.beliefs["0.weight"]
    covariance = torch.linalg.inv(belief.precision.to_dense())
    steps = laid_out(kind, {name: before[name] - p.detach() for name, p in weights.items()})
    gradient = laid_out(kind, {name: 6 * p.grad for name, p in weights.items() if p.grad is not None})
    close(steps.flatten(), covariance @ gradient.flatten(), 1e-8)
    close(laid_out(kind, posterior.variance()).flatten(), covariance.diagonal(), 1e-9)
    off = {name: draws - posterior.mean[name] for name, draws in posterior.sample(8000).items()}
    draws = laid_out(kind, off).flatten(1)
    deviations = covariance.diagonal().sqrt()
    assert ((draws.T @ draws / 8000 - covariance) / deviations / deviations[:, None]).abs().max() < 0.07

    rows = jacrev(lambda w: functional_call(model, w, (x,)))({name: p.detach() for name, p in weights.items()})
    first = laid_out(kind, rows).flatten(2)
    last = torch.cat([rows["3.weight"], rows["3.bias"][..., None]], -1).flatten(2)
    other = torch.linalg.inv(posterior.beliefs["3.weight"].precision.to_dense())
    expected = first @ covariance @ first.mT + last @ other @ last.mT
    close(posterior.functional_variance(x, joint=True), expected, 1e-8)
    options = dict(method="linear", likelihood="gaussian")
    close(posterior.to_module(x, **options)(x)[1], posterior.predict(x, **options).variance, 1e-8)

    posterior.save(tmp_path / "belief")
    again = load(tmp_path / "belief", model)
    assert all(torch.equal(again.mean[name], p) for name, p in weights.items())
    one, two = posterior.sample(2, seed=5), again.sample(2, seed=5)
    assert all(torch.equal(one[name], two[name]) for name in weights)
    close(again.functional_variance(x, joint=True), expected, 1e-8)
    close(posterior.log_prob(one), again.log_prob(one))


def test_layers_that_were_never_seen_have_the_prior() -> None:
    model = network()
    for rule in (KroneckerFilter, KroneckerFilterFP):
        variance = rule(model, batch_size=20, prior_std=0.2).posterior(model).variance()
        close(variance["0.weight"], torch.full((30, 4), 0.04, dtype=D))
        variance = rule(model, batch_size=20).posterior(model).variance()
        close(variance["0.weight"], torch.full((30, 4), 0.1 / 20, dtype=D))


@pytest.mark.parametrize("place", ["step", "backward"])
@pytest.mark.parametrize("priors", [(math.inf, 1e6), (1e6, math.inf)], ids=str)
def test_a_prior_that_is_given_or_taken_away_leaves_the_momentum(priors: tuple[float, float], place: str) -> None:
    """A step without a gradient goes on with the average of earlier ones, in the units of either prior."""
    moved, before = [], []
    for after in priors:
        model = network()
        optimizer = KroneckerFilterFP(
            model, lr=0.01, batch_size=6, prior_std=priors[0], fisher="empirical", precondition=place
        )
        for index in range(4):
            x, y = data(index)
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) * (index < 3)).backward()
            optimizer.step()
            if index == 2:
                optimizer.param_groups[0]["prior_std"] = after
                before = [p.detach().clone() for p in model.parameters()]
                expected = pytest.raises(RuntimeError, match=r"prior_std was changed to .* since the last step")
                with expected if after != priors[0] else nullcontext():
                    optimizer.posterior(model)
        moved.append([p.detach() - old for p, old in zip(model.parameters(), before)])
    assert all(part.any() for part in moved[0])
    for a, b in zip(*moved):
        close(a, b)


@pytest.mark.parametrize("fisher", ["empirical", "centered", "sampled"])
@pytest.mark.parametrize("by", ["labels", "weights"])
def test_errors_are_averaged_over_the_losses_that_count(fisher: str, by: str) -> None:
    """<delta delta'> with labels that are ignored is that without these rows; it was half of it for half the labels."""
    moments = []
    for ignored in (True, False):
        model = network()
        optimizer = KroneckerFilterFP(model, batch_size=3, fisher=fisher, seed=0)
        x, y = data(0)
        x, y = (x, y.index_fill(0, torch.arange(0, 6, 2), -100)) if ignored else (x[1::2], y[1::2])
        outputs = model(x)
        drawn = by == "weights" and fisher != "sampled"  # labels that are drawn are others for fewer rows
        optimizer.observe(outputs, **({"weights": y != -100} if drawn else {"labels": y}))
        F.cross_entropy(outputs, y).backward()
        optimizer.step()
        moments.append([optimizer.state[model[i].weight]["error_moment"] for i in (0, 2)])
    for a, b in zip(*moments):
        close(a, b)


@pytest.mark.parametrize("kinds", [("factors", "gradients"), ("gradients", "factors")], ids=str)
def test_eigenvalues_are_those_of_each_group(kinds: tuple[str, str]) -> None:
    """One optimizer of two groups, and two optimizers."""
    options, results = {"lr": 0.01, "batch_size": 6, "fisher": "empirical", "stats_every": 1}, []
    for together in (True, False):
        model = network()
        groups = [{"params": list(model[i].parameters()), "eigenvalues": kind} for i, kind in zip((0, 2), kinds)]
        both = [groups] if together else [[group] for group in groups]
        optimizers = [KroneckerFilterFP(model, params=some, **options) for some in both]
        for index in range(4):
            x, y = data(index)
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    for a, b in zip(*results):
        close(a, b)


def test_sides_that_are_too_large() -> None:
    """Large sides and embeddings: the steady state uses a diagonal, the filter its fallback."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(8, 3)).to(D)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fixed = KroneckerFilterFP(model, batch_size=5, max_factor=8)
    with pytest.warns(UserWarning, match=r"trains 0.weight, 2.weight, 2.bias"):
        filtered = KroneckerFilter(model, batch_size=5, max_factor=8)
    for optimizer in (fixed, filtered):
        optimizer.zero_grad()
        outputs = model(torch.randint(0, 7, (5, 2)))
        optimizer.observe(outputs)
        outputs.logsumexp(1).mean().backward()
        optimizer.step()
    assert fixed.state[model[0].weight]["input_root"].shape == (1, 7)
    assert fixed.state[model[2].weight]["input_root"].shape == (1, 9)
    assert "variance" in filtered.state[model[2].weight]
