"""Samplers as optimizers: chains that resume, diverge and refuse what they cannot do."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn

from bayesgrad import SubsampledFisher, samplers
from bayesgrad.samplers import SNGD, Diverged, Langevin

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(20, 3, generator=GENERATOR), torch.randint(0, 2, (20,), generator=GENERATOR)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def run(model: nn.Module, sampler: torch.optim.Optimizer, steps: int, labels: bool = False) -> torch.Tensor:
    for _ in range(steps):
        sampler.zero_grad()
        outputs = model(X)
        sampler.observe(outputs, labels=Y if labels else None)
        nn.functional.cross_entropy(outputs, Y).backward()
        sampler.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


OPTIONS = {
    "identity": {"metric": "identity"},
    "fisher": {"metric": "fisher", "correction": "jeffreys", "update_every": 3, "ema": 0.5},
    "empirical": {"metric": "empirical", "correction": "flat"},
    "diagonal": {"metric": "diagonal", "correction": "flat", "probes": 2, "fisher": "sampled", "update_every": 2},
    "kronecker": {"metric": "kronecker", "correction": "jeffreys", "probes": 1, "fisher": "sampled", "ema": 0.5},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_chain_resumes_with_the_same_stream(name: str) -> None:
    options = {"lr": 0.05, "num_data": 20, "prior_precision": 1.0, "damping": 0.1, **OPTIONS[name]}
    model, labels = network(), name == "empirical"
    sampler = Langevin(model, **options)
    start = run(model, sampler, 4, labels)
    twin, copied = copy.deepcopy((model, sampler))
    other = network()
    resumed = Langevin(other, **{**options, "seed": 9})
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(sampler.state_dict())
    expected = run(model, sampler, 5, labels)
    assert torch.equal(run(other, resumed, 5, labels), expected)
    assert torch.equal(run(twin, copied, 5, labels), expected)
    assert not torch.equal(start, expected)
    other = network()
    run(other, Langevin(other, **{**options, "seed": 9}), 4, labels)
    assert not torch.equal(nn.utils.parameters_to_vector(other.parameters()), start)


def test_moving_averages_and_stale_metrics_are_what_they_say() -> None:
    """<F> <- ema <F> + (1 - ema) F, debiased, over the networks that were observed; a stale one is the first."""
    for options in ({"ema": 0.9}, {"update_every": 100}):
        model = network()
        sampler = SNGD(model, 0.1, num_data=20, batch_size=1, damping=0.1, **options)
        seen = []
        for _ in range(3):
            seen.append(SubsampledFisher(model, X, fisher="exact").dense())
            run(model, sampler, 1)
        (found,) = [entry["fisher"] for entry in sampler.state.values() if "fisher" in entry]
        total = 0.81 * seen[0] + 0.9 * seen[1] + seen[2]
        expected = seen[0] if "update_every" in options else total / (0.81 + 0.9 + 1)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert float((found - seen[2]).abs().max()) > 1e-4


def test_a_chain_that_diverges_says_where_and_keeps_the_last_finite_weights() -> None:
    model = nn.Linear(1, 1, bias=False)
    sampler = Langevin(model, lr=1e3, num_data=4, temperature=0.5, metric="identity", likelihood="gaussian")
    x = torch.ones(4, 1)

    def closure() -> torch.Tensor:
        sampler.zero_grad()
        loss = (model(x) - 1).square().mean() / 2
        loss.backward()
        return loss

    losses = []

    def chain() -> None:
        for _ in range(100):
            losses.append(sampler.step(closure).item())

    with pytest.raises(Diverged, match=r"diverged at step \d+, temperature 0.5, last finite loss \d") as caught:
        chain()
    assert caught.value.step == len(losses) + 1
    assert caught.value.loss == losses[-1]
    assert caught.value.temperature == 0.5
    assert bool(torch.isfinite(model.weight).all())
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.step, again.loss, str(again)) == (caught.value.step, caught.value.loss, str(caught.value))
    model.weight.grad = torch.full_like(model.weight, torch.nan)
    with pytest.raises(Diverged, match="has 1 entries of 1 that are not finite; nothing was changed"):
        sampler.step()
    model.weight.grad = torch.zeros_like(model.weight)
    with pytest.raises(Diverged, match="the loss is nan"):
        sampler.observe(loss=torch.tensor(torch.nan))
    fresh = Langevin(nn.Linear(1, 1), lr=0.1, num_data=4, metric="identity")
    with pytest.raises(Diverged, match=r"no finite loss was given by step\(closure\) or observe\(outputs, loss=loss\)"):
        fresh.observe(loss=torch.inf)
    with pytest.raises(ValueError, match=r"loss must be a single number, got shape \(3,\): average it"):
        fresh.observe(loss=torch.ones(3))


def test_temperatures_far_from_one_and_long_steps_are_warned_of() -> None:
    model = nn.Linear(3, 2)
    message = (
        "lr=0.1 with batch_size=4 of num_data=1000 samples at temperature 12.4, not 1: to sample the posterior use "
    )
    with pytest.warns(UserWarning, match=re.escape(f"{message}batch_size=48 or lr=0.00803.")):
        SNGD(model, 0.1, num_data=1000, batch_size=4)
    with pytest.warns(UserWarning, match=r"lr=0.5 is not small: variances are 33% too large in units of the metric."):
        Langevin(model, 0.5, num_data=1000, metric="fisher")
    SNGD(model, 0.1, num_data=1000, batch_size=samplers.batch_size(1.0, 0.1, 1000))
    Langevin(model, 0.5, num_data=1000, metric="identity")  # in units that nobody knows


def test_refusals_of_samplers() -> None:
    model = network()
    sampler = Langevin(model, num_data=20, metric="fisher", damping=0.1, correction="flat")
    model(X).sum().backward()
    with pytest.raises(RuntimeError, match=r"nothing was ever observed: call observe\(outputs\)"):
        sampler.step()
    with pytest.raises(ValueError, match="fisher='exact' is an expectation over labels and takes none"):
        sampler.observe(model(X), labels=Y)
    with pytest.raises(
        RuntimeError, match=r"observe\(\) must receive the tensor that the model's last forward pass returned"
    ):
        sampler.observe(model(X) * 1)
    with pytest.raises(ValueError, match="metric='empirical' needs labels"):
        Langevin(model, num_data=20, metric="empirical").observe(model(X))
    with pytest.raises(ValueError, match="the saved state must have metric='fisher', as this Langevin, got 'identity'"):
        sampler.load_state_dict(Langevin(network(), num_data=20, metric="identity").state_dict())
    with pytest.raises(ValueError, match="at most 10000 weights, got 20100: use metric='kronecker' or 'diagonal'"):
        Langevin(nn.Linear(200, 100), num_data=20, metric="fisher")
    with pytest.raises(ValueError, match="the Fisher is singular with damping 0: raise damping"):
        run(model, Langevin(model, num_data=20, metric="fisher", damping=0.0), 1)
    given = Langevin(model, num_data=20, metric=lambda w: torch.ones(3))
    model(X).sum().backward()
    with pytest.raises(ValueError, match=r"a metric of 26 weights must have shape \(26,\), \(26, 26\) or \(m, k, k\)"):
        given.step()
    normed = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    with pytest.raises(ValueError, match=r"got .*: leave it out of params=, or use another metric"):
        run(normed, Langevin(normed, num_data=20, metric="kronecker", damping=0.1, correction="flat"), 1)
    with pytest.raises(TypeError, match="has no posterior: it does not estimate the variance"):
        sampler.posterior(model)


@pytest.mark.parametrize("correction", ["flat", "jeffreys"])
def test_kronecker_corrections_of_layers_with_one_weight_are_refused(correction: str) -> None:
    """The factors are sums over both layers, of which the correction read the first."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight, model[2].bias = model[0].weight, model[0].bias
    options = {"metric": "kronecker", "damping": 0.1, "correction": correction}
    with pytest.raises(ValueError, match=r"layers '0', '2' have the same weight: .* Use metric='fisher' or 'diagonal'"):
        run(model, Langevin(model, num_data=20, **options), 1)
    run(model, Langevin(model, num_data=20, **{**options, "metric": "diagonal"}), 1)


class Recurrent(nn.Module):
    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.inner, self.head = nn.GRU(3, 2, batch_first=True), nn.Linear(2, 2)
        self.gated = gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = self.inner(x[:, None])[0][:, -1]
        return nn.functional.glu(torch.cat([last, self.head(last)], -1)) if self.gated else self.head(last)


@pytest.mark.parametrize(
    ("metric", "gated", "words"),
    [
        (
            "diagonal",
            False,
            r"which fails here, as with recurrent layers \(.*\): use metric='fisher'",
        ),
        (
            "fisher",
            True,
            r"torch lacks one for this model \(.*glu_jvp.*\): replace the operation, or use correction=None",
        ),
    ],
)
def test_corrections_that_torch_cannot_compute_are_refused(metric: str, gated: bool, words: str) -> None:
    model = Recurrent(gated)
    sampler = Langevin(model, num_data=20, metric=metric, correction="flat")
    with pytest.raises(ValueError, match=words):
        run(model, sampler, 1)
    if metric == "diagonal":
        run(model, Langevin(model, num_data=20, metric="fisher", correction="flat"), 1)


def test_parameters_without_gradient_are_left_alone_also_by_noise() -> None:
    for metric in ("identity", "diagonal", "kronecker", "fisher"):
        model = network()
        sampler = Langevin(model, 0.1, num_data=20, metric=metric, damping=0.1, prior_precision=1.0)
        frozen = model[0].weight.detach().clone()
        sampler.observe(model(X))
        nn.functional.cross_entropy(model(X), Y).backward()
        model[0].weight.grad = model[0].bias.grad = None
        before = model[2].weight.detach().clone()
        sampler.step()
        assert torch.equal(model[0].weight, frozen)
        assert not torch.equal(model[2].weight, before)


class Scaled(nn.Module):
    """A linear model whose outputs are multiplied by a parameter of the given shape, with one element."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scale = nn.Linear(3, 2), nn.Parameter(torch.full(shape, 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


@pytest.mark.parametrize("metric", ["fisher", "diagonal"])
@pytest.mark.parametrize("probes", [None, 3])
def test_a_scalar_parameter_moves_as_one_of_shape_one(metric: str, probes: int | None) -> None:
    ends = []
    for shape in ((), (1,)):
        model = Scaled(shape).double()
        options = {"metric": metric, "correction": "flat", "probes": probes, "damping": 0.1, "seed": 1}
        sampler = Langevin(model, lr=0.01, num_data=20, **options)
        for _ in range(3):
            sampler.zero_grad()
            outputs = model(X.double())
            sampler.observe(outputs)
            nn.functional.cross_entropy(outputs, Y).backward()
            sampler.step()
        ends.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("ema", [0.0, 0.9])
@pytest.mark.parametrize("metric", ["kronecker", "diagonal"])
@pytest.mark.parametrize("name", ["2", "0.weight", "2.bias"])
def test_layers_that_are_frozen_for_a_while_keep_their_metric(name: str, metric: str, ema: float) -> None:
    """The first step after thawing is that of a sampler built there, and a resumed run is the uninterrupted one."""

    def build(model: nn.Module) -> Any:
        options: dict[str, Any] = {"temperature": 0.0, "limit_step": False, "ema": ema}
        return samplers.Langevin(model, lr=0.05, num_data=50, metric=metric, **options)

    def step(model: nn.Module, sampler: Any, index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        outputs = model(torch.randn(8, 4, generator=generator, dtype=torch.float64))
        labels = torch.randint(0, 3, (8,), generator=generator)
        sampler.zero_grad()
        sampler.observe(outputs)
        nn.functional.cross_entropy(outputs, labels).backward()
        sampler.step()

    results = []
    for resumed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        for index, trained in enumerate((False, False, True, True, False, True, True)):
            for p in (p for key, p in model.named_parameters() if key.startswith(name)):
                p.requires_grad_(trained)
            if index == 0:
                sampler = build(model)
            elif resumed and index in (3, 6):
                saved, model = sampler.state_dict(), copy.deepcopy(model)
                sampler = build(model)
                sampler.load_state_dict(saved)
            other = copy.deepcopy(model)
            step(model, sampler, index)
            if index == 2 and not ema:
                step(other, build(other), index)
                assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters()))
        results.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*results))


@pytest.mark.parametrize("metric", ["diagonal", "kronecker", "fisher"])
@pytest.mark.parametrize("added", [False, True], ids=["thawed", "added"])
def test_new_weights_get_a_metric_before_the_next_update(metric: str, added: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    options: dict[str, Any] = {"metric": metric, "temperature": 0.0, "limit_step": False, "update_every": 5}
    model[2].requires_grad_(False)
    sampler = Langevin(model, lr=0.01, num_data=60, params=model[0].parameters() if added else None, **options)
    x, labels = torch.randn(60, 4).double(), torch.randint(0, 3, (60,))
    for index in range(3):
        if index == 2:
            model[2].requires_grad_(True)
            if added:
                sampler.add_param_group({"params": list(model[2].named_parameters())})
        other = copy.deepcopy(model)
        pairs = [(model, sampler), (other, Langevin(other, lr=0.01, num_data=60, **options))]
        for network, one in pairs if index == 2 else pairs[:1]:
            one.zero_grad()
            outputs = network(x)
            one.observe(outputs)
            nn.functional.cross_entropy(outputs, labels).backward()
            one.step()
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("metric", ["diagonal", "kronecker", "fisher"])
def test_weights_that_are_added_before_others_leave_their_moving_average(metric: str) -> None:
    """The number of updates, by which the average is debiased, is in the state of the model's first parameter."""
    states = []
    for added in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        options: dict[str, Any] = {"metric": metric, "temperature": 0.0, "limit_step": False, "ema": 0.9}
        sampler = Langevin(model, lr=0.01, num_data=60, params=model[2].parameters(), **options)
        for index in range(6):
            if added and index == 3:
                sampler.add_param_group({"params": list(model[0].parameters())})
            outputs = model(torch.randn(16, 4).double())
            sampler.zero_grad()
            sampler.observe(outputs)
            nn.functional.cross_entropy(outputs, torch.randint(3, (16,))).backward()
            model[0].weight.grad = model[0].bias.grad = None
            sampler.step()
        first = model[0 if added else 2].weight
        assert sampler.state[first]["clock"][0] == 6
        assert [p.shape for p in sampler.state if "clock" in sampler.state[p]] == [first.shape]
        if metric == "fisher":  # one matrix, whose size has changed
            assert [p.shape for p in sampler.state if "fisher" in sampler.state[p]] == [first.shape]
        else:
            own = (sampler.state[p] for p in model[2].parameters())
            states.append([entry[name] for entry in own for name in sorted(set(entry) - {"clock"})])
    for alone, beside in zip(*states) if states else ():
        torch.testing.assert_close(beside, alone, rtol=1e-12, atol=1e-14)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.heads = nn.Linear(4, 6), nn.ModuleList(nn.Linear(6, 3) for _ in range(2))
        self.double()

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](torch.tanh(self.trunk(x)))


@pytest.mark.parametrize("ema", [0.0, 0.9])
@pytest.mark.parametrize("metric", ["diagonal", "kronecker", "fisher"])
def test_a_head_that_a_batch_does_not_use_keeps_its_metric(metric: str, ema: float) -> None:
    """The head of the first batch moves by the metric of that batch after another head was observed."""
    model = TwoHeads()
    options: dict[str, Any] = {"temperature": 0.0, "limit_step": False, "update_every": 100, "ema": ema}
    sampler = Langevin(model, lr=0.01, num_data=60, metric=metric, damping=1e-3, **options)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=generator).double(), torch.randint(3, (60,), generator=generator)

    def step(model: TwoHeads, sampler: Any, head: int) -> dict[str, torch.Tensor]:
        sampler.zero_grad()
        outputs = model(x, head)
        sampler.observe(outputs)
        nn.functional.cross_entropy(outputs, y).backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        sampler.step()
        return {name: p.detach() - before[name] for name, p in model.named_parameters()}

    step(model, sampler, 0)
    other = copy.deepcopy(model)
    alone = Langevin(other, lr=0.01, num_data=60, metric=metric, damping=1e-3, **options)
    alone.load_state_dict(sampler.state_dict())
    step(model, sampler, 1)  # the metric has nothing of this head, so it is updated, although no update is due
    with torch.no_grad():
        for p, q in zip(model.parameters(), other.parameters()):
            p.copy_(q)
    moved, found = step(other, alone, 0), step(model, sampler, 0)
    if metric != "fisher":  # which has products of trunk and head in the former
        for name in ("heads.0.weight", "heads.0.bias"):
            torch.testing.assert_close(found[name], moved[name], rtol=1e-9, atol=1e-12)
    else:
        matrix, at = sampler.state[next(model.parameters())]["fisher"], 30
        mine = alone.state[next(other.parameters())]["fisher"]
        torch.testing.assert_close(matrix[at : at + 21, at : at + 21], mine[at : at + 21, at : at + 21])
        assert not matrix[:at, at : at + 21].any()
    copied = copy.deepcopy(model)
    again = Langevin(copied, lr=0.01, num_data=60, metric=metric, damping=1e-3, **options)
    again.load_state_dict(sampler.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(step(model, sampler, 1).values(), step(copied, again, 1).values()))


@pytest.mark.parametrize("metric", ["diagonal", "kronecker", "fisher"])
def test_a_gradient_of_weights_that_were_never_observed_is_refused(metric: str) -> None:
    model, x = TwoHeads(), torch.ones(5, 4, dtype=torch.float64)
    sampler = Langevin(model, lr=0.01, num_data=5, metric=metric)
    sampler.observe(model(x, 0))
    nn.functional.cross_entropy(model(x, 1), torch.arange(5) % 3).backward()
    with pytest.raises(RuntimeError, match=r"heads\.1\.weight has a gradient, but no observed outputs depend on it"):
        sampler.step()


@pytest.mark.parametrize("metric", ["kronecker", "diagonal", "fisher", "identity"])
def test_rounding_does_not_change_the_noise(metric: str) -> None:
    """The order of a batch changes metrics by rounding; eigenvectors of a null space may then be any others."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 20, dtype=torch.float64, generator=generator)  # fewer examples than inputs
    y = torch.randint(3, (8,), generator=generator)
    runs = []
    for order in (torch.arange(8), torch.arange(8).flip(0)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        sampler = Langevin(model, lr=0.01, num_data=1000, metric=metric, limit_step=False, seed=0)
        for _ in range(4):
            sampler.zero_grad()
            outputs = model(x[order])
            sampler.observe(outputs)
            nn.functional.cross_entropy(outputs, y[order]).backward()
            sampler.step()
        runs.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(*runs, rtol=1e-9, atol=1e-9)
