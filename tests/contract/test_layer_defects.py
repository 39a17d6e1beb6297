"""Layers in unusual models and loops: subclasses, masks, split losses, late readers, derived weights, odd batches.

References are per-example gradients by torch.func, dense solves, or the same run in the usual loop.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import remove_parametrizations
from torch.utils.checkpoint import checkpoint

from bayesgrad import SubsampledFisher, layers
from bayesgrad.optim import FOOF, KFAC, OGN, VOGN, KroneckerFilter, KroneckerFilterFP, NaturalGradient
from cases import observe, same, states, weights

D = torch.float64
EACH: dict[str, Any] = {"stats_every": 1, "update_every": 1}
LINEAR: dict[str, Any] = {"max_norm": math.inf}
RULES: dict[str, Callable[..., Any]] = {
    "FOOF": lambda model, **o: FOOF(model, **{**EACH, **LINEAR, **o}),
    "FOOF backward": lambda model, **o: FOOF(model, precondition="backward", **{**EACH, **LINEAR, **o}),
    "KFAC": lambda model, **o: KFAC(model, **{**EACH, **LINEAR, **o}),
    "KFAC exact": lambda model, **o: KFAC(model, exact_damping=True, **{**EACH, **LINEAR, **o}),
    "NaturalGradient": lambda model, **o: NaturalGradient(model, update_every=1, **{**LINEAR, "momentum": 0.0, **o}),
    "OGN": lambda model, **o: OGN(model, num_data=100, betas=(0.9, 0.5), **o),
    "VOGN": lambda model, **o: VOGN(model, num_data=100, betas=(0.9, 0.5), **o),
    "OGN sampled": lambda model, **o: OGN(model, num_data=100, betas=(0.9, 0.5), fisher="sampled", **o),
    "KroneckerFilter": lambda model, **o: KroneckerFilter(model, batch_size=8, **o),
    "KroneckerFilter empirical": lambda model, **o: KroneckerFilter(model, batch_size=8, fisher="empirical", **o),
    "KroneckerFilter centered": lambda model, **o: KroneckerFilter(model, batch_size=8, fisher="centered", **o),
    "FP": lambda model, **o: KroneckerFilterFP(model, batch_size=8, **{**EACH, **o}),
    "FP empirical": lambda model, **o: KroneckerFilterFP(model, batch_size=8, fisher="empirical", **{**EACH, **o}),
    "FP centered": lambda model, **o: KroneckerFilterFP(model, batch_size=8, fisher="centered", **{**EACH, **o}),
}
every_rule = pytest.mark.parametrize("name", list(RULES))


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)).double()


def data(index: int = 0, n: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(n, 6, dtype=D, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def passes(
    model: Callable, optimizer: Any, index: int, differentiate: Callable | None = None, x: Tensor | None = None
) -> None:
    """Forward and backward passes of a batch; noise, if any, is constant."""
    inputs, y = data(index)
    noise = (lambda p: torch.full_like(p, 0.5)) if optimizer.needs.draws else None
    optimizer.zero_grad()
    with optimizer.sampled(noise=noise):
        outputs = model(inputs if x is None else x)
        observe(optimizer, outputs, y)
        if differentiate is None:
            F.cross_entropy(outputs, y).backward()
        else:
            differentiate(outputs, y)


def assert_same_step(model: nn.Module, other: nn.Module, rtol: float = 1e-9) -> None:
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=rtol, atol=1e-11)


def per_example(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Gradients of the examples' losses, (N, *shape)."""

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])

    return vmap(grad(loss), (None, 0, 0))({n: p.detach() for n, p in model.named_parameters()}, x, y)


def squares(optimizer: Any, model: nn.Module) -> dict[str, Tensor]:
    found = optimizer.sources[-1]._squares([p for p in model.parameters() if p.grad is not None])
    return {n: found[p] for n, p in model.named_parameters() if p in found}


# --- subclasses of torch's layers ---


class BatchNormAct2d(nn.BatchNorm2d):
    """As in timm: normalisation and activation."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class LayerNorm2d(nn.LayerNorm):
    """As in timm: over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class StandardisedConv2d(nn.Conv2d):
    """As in timm: the weight is standardised first."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight - weight.mean((1, 2, 3), keepdim=True), bias)


class SquaredLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.square(), self.bias)


class Scaled(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Plain(nn.Linear):
    """A subclass whose forward pass is that of torch."""


class Subclasses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.conv, self.norm = Scaled(7, 9), StandardisedConv2d(1, 4, 2), LayerNorm2d(4)
        self.act, self.hidden, self.out = BatchNormAct2d(4), SquaredLinear(16, 5), Plain(5, 3)
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        images = self.table(x).view(len(x), 1, 3, 3)
        return self.out(self.hidden(self.act(self.norm(self.conv(images))).flatten(1)).tanh())


def test_a_subclass_with_another_forward_pass_is_not_taken_for_a_layer() -> None:
    """Fisher matrix by torch.func; per-example squares where they are known, else the fallback."""
    model, x = Subclasses(), torch.arange(6) % 7
    y = torch.arange(6) % 3
    known = {name for name, m in model.named_modules() if layers.is_matrix(m) or layers.normalises(m)}
    assert known == {"out"}
    rows = per_example(model, x, y)
    flat = torch.cat([rows[n].flatten(1) for n, _ in model.named_parameters()], 1)
    fisher = SubsampledFisher(model, x, fisher="empirical", labels=y)
    torch.testing.assert_close(fisher.dense(), flat.T @ flat / 6, rtol=1e-10, atol=1e-14)
    with pytest.warns(UserWarning, match=r"OGN trains table.weight, conv.weight, .*, hidden.bias by"):
        optimizer = OGN(model, num_data=10)
    F.cross_entropy(model(x), y).backward()
    found = squares(optimizer, model)
    for name, p in model.named_parameters():
        expected = rows[name].square().mean(0) if name.startswith("out") else 6 * p.grad.square()
        torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-16)


@pytest.mark.parametrize("rule", [FOOF, KFAC, NaturalGradient])
def test_the_weights_of_such_a_subclass_are_trained_by_the_fallback(rule: type) -> None:
    model, x = Subclasses(), torch.arange(6) % 7
    with pytest.warns(UserWarning, match=r"trains table.weight, conv.weight, .*, hidden.bias by"):
        optimizer = rule(model, lr=0.1, fallback_lr=0.02)
    before = weights(model)
    outputs = model(x)
    observe(optimizer, outputs, torch.arange(6) % 3)
    F.cross_entropy(outputs, torch.arange(6) % 3).backward()
    optimizer.step()
    for name, p in model.named_parameters():
        if not name.startswith("out"):  # the first step of Adam
            torch.testing.assert_close(p.detach(), before[name] - 0.02 * p.grad.sign() * (p.grad != 0))


# --- the fallback of OGN ---


@pytest.mark.parametrize("fisher", ["empirical", "sampled", "exact"])
def test_the_fallback_of_ogn_is_the_squared_mean_gradient_times_the_batch_size(fisher: str) -> None:
    """Also for micro-batches: B is the number of examples of the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), SquaredLinear(5, 3)).double()
    with pytest.warns(UserWarning, match="squares of their mean gradients, times the batch size"):
        optimizer = OGN(model, num_data=10, fisher=fisher)
    x, y = data()
    for part in (slice(0, 3), slice(3, 8)):
        outputs = model(x[part])
        observe(optimizer, outputs, None if fisher == "exact" else y[part])
        (F.cross_entropy(outputs, y[part], reduction="sum") / 8).backward()
    mean = {n: rows.mean(0) for n, rows in per_example(model, x, y).items()}
    found = squares(optimizer, model)
    for name in ("2.weight", "2.bias"):
        torch.testing.assert_close(found[name], 8 * mean[name].square(), rtol=1e-10, atol=0)


# --- gradients that were replaced ---


def masked(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = p.grad * (torch.arange(p.numel()).view(p.shape) % 3 > 0)


def test_a_masked_gradient_is_what_foof_and_natural_gradient_solve() -> None:
    model = network()
    optimizer = RULES["FOOF"](model, lr=0.1, damping=0.3, damping_mode="absolute")
    before, (x, _) = weights(model), data()
    passes(model, optimizer, 0)
    masked(model)
    optimizer.step()
    inputs = x
    for i in (0, 2, 4):
        a = torch.cat([inputs, torch.ones(8, 1, dtype=D)], 1)
        gradient = torch.cat([model[i].weight.grad, model[i].bias.grad[:, None]], 1)
        step = gradient @ torch.linalg.inv(a.T @ a / 8 + 0.3 * torch.eye(a.shape[1], dtype=D))
        torch.testing.assert_close(model[i].weight.detach(), before[f"{i}.weight"] - 0.1 * step[:, :-1])
        torch.testing.assert_close(model[i].bias.detach(), before[f"{i}.bias"] - 0.1 * step[:, -1])
        linear = F.linear(inputs, before[f"{i}.weight"], before[f"{i}.bias"])
        inputs = linear.relu() if i == 0 else linear.tanh()

    model = network()
    rows = torch.cat([r.flatten(1) for r in per_example(model, *data()).values()], 1)
    optimizer = RULES["NaturalGradient"](model, lr=0.1, damping=0.05)
    start = nn.utils.parameters_to_vector(model.parameters()).detach()
    passes(model, optimizer, 0)
    masked(model)
    optimizer.step()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    step = torch.linalg.solve(rows.T @ rows / 8 + 0.05 * torch.eye(rows.shape[1], dtype=D), gradient)
    torch.testing.assert_close(nn.utils.parameters_to_vector(model.parameters()).detach(), start - 0.1 * step)


@every_rule
def test_a_gradient_that_was_replaced_acts_like_one_that_was_changed_in_place(name: str) -> None:
    """Where rows of inputs and errors could take the place of the gradient, too."""
    model, other = network(), network()
    optimizer, reference = RULES[name](model), RULES[name](other)
    for index in range(3):
        passes(model, optimizer, index)
        masked(model)
        optimizer.step()
        passes(other, reference, index)
        with torch.no_grad():
            for p in other.parameters():
                p.grad.mul_(torch.arange(p.numel()).view(p.shape) % 3 > 0)
        for part in ("kept", "projections"):  # no rows
            if hasattr(reference.preconditioner, part):
                setattr(reference.preconditioner, part, {})
        reference.step()
    assert same(weights(model), weights(other))


def test_a_mask_leaves_the_squares_of_ogn_alone() -> None:
    """A factor common to all entries scales squares; entries that are zero say nothing about it."""
    for scale in (1.0, 0.25):
        model = network()
        optimizer = RULES["OGN"](model)
        expected = {n: rows.square().mean(0) for n, rows in per_example(model, *data()).items()}
        passes(model, optimizer, 0)
        masked(model)
        with torch.no_grad():
            for p in model.parameters():
                p.grad.mul_(scale)
        for name, found in squares(optimizer, model).items():
            torch.testing.assert_close(found, scale**2 * expected[name], rtol=1e-10, atol=0)


# --- damping that changes ---


@pytest.mark.parametrize(("rule", "options"), [(FOOF, {}), (KFAC, {}), (KFAC, {"exact_damping": True})])
def test_a_schedule_of_damping_inverts_again_for_changes_of_more_than_a_tenth(
    rule: type, options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Smaller changes take effect at the next inversion; the state has the damping in use."""
    model = network()
    optimizer = rule(model, **options)
    inverted: list[str] = []
    kind = type(optimizer.preconditioner)
    original = kind.inversions

    def counted(self: Any, layer: Any, *args: Any) -> Any:
        inverted.append(layer.names[0])
        return original(self, layer, *args)

    monkeypatch.setattr(kind, "inversions", counted)
    for index in range(400):
        if index == 200:
            inverted.clear()
        optimizer.param_groups[0]["damping"] = 3.0 * 0.99 ** max(0, index - 199)
        passes(model, optimizer, index % 5)
        optimizer.step()
        if index >= 200:
            damped = [float(optimizer.state[model[i].weight]["damped"]) for i in (0, 2, 4)]
            assert all(abs(optimizer.param_groups[0]["damping"] - d) <= 0.1 * d for d in damped)
    # 0.99^11 < 0.9: every 11 steps, or earlier because of the two inversions in 200 steps that are due anyway.
    for name in ("0", "2", "4"):
        assert 18 <= inverted.count(name) <= 21
    model, other = network(), network()
    optimizer, reference = (rule(net, damping=d, **EACH, **options) for net, d in ((model, 1.0), (other, 2.0)))
    passes(model, optimizer, 0)
    passes(other, reference, 0)
    optimizer.param_groups[0]["damping"] = 2.0
    optimizer.step()
    reference.step()
    assert same(weights(model), weights(other))


# --- batches that are not finite ---

FACTORS = ("moment", "inverse", "root", "values", "basis", "covariance", "spectrum", "gram", "dual", "outerproducts")
by_layer = pytest.mark.parametrize("name", [name for name in RULES if "OGN" not in name])


def factors(optimizer: Any) -> dict[str, Tensor]:
    found = {key: value for key, value in states(optimizer).items() if any(word in key for word in FACTORS)}
    return {key: value for key, value in found.items() if not key.endswith("momentum")}


@by_layer
@pytest.mark.parametrize("bad", [math.inf, math.nan, 1e200])
def test_a_batch_that_is_not_finite_does_not_change_factors(name: str, bad: float) -> None:
    """Once the weights are restored, the run goes on as if the batch had not been there."""
    model, other = network(), network()
    options = {"momentum": 0.0, "seed": 3} if "FOOF" not in name else {}
    optimizer, reference = RULES[name](model, **options), RULES[name](other, **options)
    for index in range(3):
        for net, opt in ((model, optimizer), (other, reference)):
            passes(net, opt, index)
            opt.step()
    x, start, kept = data(9)[0], weights(model), factors(optimizer)
    x[2, 1] = bad
    passes(model, optimizer, 9, x=x)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        optimizer.step()
    assert bad == 1e200 or any("not finite, found at step 4" in str(warning.message) for warning in found)
    touched = factors(optimizer)
    assert all(value.isfinite().all() for value in touched.values())
    if bad != 1e200:  # else some layers saw numbers whose squares are finite
        fixed = [key for key in kept if "moment" in key or "outerproducts" in key]
        assert all(torch.equal(touched[key], kept[key]) for key in fixed)
    model.load_state_dict(start)
    passes(model, optimizer, 4)
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    if bad != 1e200 and name in ("FOOF", "KFAC", "KFAC exact", "NaturalGradient"):
        passes(other, reference, 4)
        reference.step()
        assert_same_step(model, other)


@every_rule
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_batch_that_is_not_finite_is_refused_before_anything_changes(name: str, nonfinite: str) -> None:
    model = network()
    optimizer = RULES[name](model, nonfinite=nonfinite)
    passes(model, optimizer, 0)
    optimizer.step()
    before, kept = weights(model), states(optimizer)
    x = data(1)[0]
    x[0, 0] = math.inf
    passes(model, optimizer, 1, x=x)
    if nonfinite == "raise":
        with pytest.raises(FloatingPointError, match="not finite; nothing was changed"):
            optimizer.step()
    else:
        optimizer.step()
    assert same(before, weights(model))
    assert same(kept, states(optimizer))
    passes(model, optimizer, 2)
    optimizer.step()
    assert not same(before, weights(model))


@pytest.mark.parametrize("name", ["KFAC", "NaturalGradient", "FP"])
def test_observations_that_are_not_finite_are_refused_beside_finite_gradients(name: str) -> None:
    model = network()
    optimizer = RULES[name](model, nonfinite="raise")
    x, y = data(1)
    optimizer.observe(model(x * math.inf), labels=y)
    F.cross_entropy(model(x), y).backward()
    before = weights(model)
    with pytest.raises(FloatingPointError, match=r"(inputs of layer '0'|observe\(\) found).* not finite; nothing was"):
        optimizer.step()
    assert same(before, weights(model))
    assert not states(optimizer)


@every_rule
@pytest.mark.parametrize("sizes", [(0, 4), (6, 0)])
@pytest.mark.filterwarnings("ignore:.* trains .* by ", "ignore:Initializing zero-element tensors")
def test_a_layer_of_no_features_is_left_to_the_fallback(name: str, sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(*sizes), nn.Tanh(), nn.Linear(sizes[1], 3), nn.Linear(3, 3)).double()
    optimizer, before = RULES[name](model), weights(model)
    for index in range(2):
        passes(model, optimizer, index, x=data(index)[0][:, : sizes[0]])
        optimizer.step()
        optimizer.zero_grad()
    assert not any(torch.equal(p, before[key]) for key, p in model.named_parameters() if p.numel())


# --- readers of a weight beside its layer ---


class Reader(nn.Module):
    """Reads the weight of its last layer a second time, if `reads` is True."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.hidden, self.last = nn.Linear(6, 40), nn.Linear(40, 40), nn.Linear(40, 3)
        self.before, self.reads = before, False
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(self.hidden(self.first(x).relu()).tanh())
        if not self.reads:
            return self.last(hidden)
        extra = 3 * F.linear(hidden.tanh(), self.last.weight)
        return extra + self.last(hidden) if self.before else self.last(hidden) + extra


LOOPS: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda model: None,
    "clip": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "replace": lambda model: [setattr(p, "grad", 0.5 * p.grad) for p in model.parameters()],
}


@every_rule
@pytest.mark.parametrize("loop", list(LOOPS))
@pytest.mark.parametrize("start", [0, 5])
def test_another_reader_of_a_weight_is_found_when_it_appears(name: str, loop: str, start: int) -> None:
    """At once where it matters, else in the following pass; it takes the fallback, with a warning.

    Until then the gradient is preconditioned as it is, or refused if that was done with a part of it.
    """
    model = Reader(before=start == 0)
    optimizer = RULES[name](model)
    for index in range(start):
        passes(model, optimizer, index)
        LOOPS[loop](model)
        optimizer.step()
    model.reads = True
    at_once = start == 0 or name == "NaturalGradient" or "OGN" in name
    refused = pytest.raises(RuntimeError, match=r"gradient of layer 'last' is a sum of terms of which .*'step'")
    for _ in range(0 if at_once else 1 + (name == "FOOF backward")):
        passes(model, optimizer, start)
        LOOPS[loop](model)
        with refused if name == "FOOF backward" else nullcontext():
            optimizer.step()
    passes(model, optimizer, start)
    LOOPS[loop](model)
    with pytest.warns(UserWarning, match=r"trains last\.weight(, last\.bias)? by"):
        optimizer.step()
    for index in range(start, start + 3):  # the bias may still be a layer of its own
        passes(model, optimizer, index)
        LOOPS[loop](model)
        optimizer.step()
        if name == "OGN":
            assert model.last.weight in optimizer.sources[-1].recorded.read_elsewhere


def test_squares_of_a_weight_with_a_late_reader_are_the_fallback() -> None:
    for name in ("OGN", "OGN sampled"):
        model = Reader(before=False)
        optimizer = RULES[name](model)
        for index in range(8):
            model.reads = index >= 5
            passes(model, optimizer, index)
            expected = {n: rows.square().mean(0) for n, rows in per_example(model, *data(index)).items()}
            if model.reads:
                expected["last.weight"] = 8 * model.last.weight.grad.square()
            with pytest.warns() if index == 5 else nullcontext():
                found = squares(optimizer, model)
            for key, value in found.items():
                torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-16)
            optimizer.zero_grad()


class WideReader(nn.Module):
    """Its second layer is so wide that rows of inputs and errors take the place of the gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.wide, self.last, self.reads = nn.Linear(6, 40), nn.Linear(40, 40), nn.Linear(40, 3), False
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        extra = 3 * F.linear(hidden.tanh(), self.wide.weight) if self.reads else 0
        return self.last(self.wide(hidden) + extra)


def test_the_gradient_is_what_is_solved_in_the_step_in_which_a_reader_appears() -> None:
    model, before = WideReader(), {}
    optimizer = RULES["FOOF"](model, lr=0.1, damping=0.3, damping_mode="absolute", ema=0.0)
    for index in range(6):
        model.reads = index == 5
        passes(model, optimizer, index)
        before = weights(model)
        optimizer.step()
    hidden = F.linear(data(5)[0], before["first.weight"], before["first.bias"]).relu()
    a = torch.cat([hidden, torch.ones(8, 1, dtype=D)], 1)
    gradient = torch.cat([model.wide.weight.grad, model.wide.bias.grad[:, None]], 1)
    step = gradient @ torch.linalg.inv(a.T @ a / 8 + 0.3 * torch.eye(41, dtype=D))
    torch.testing.assert_close(model.wide.weight.detach(), before["wide.weight"] - 0.1 * step[:, :-1])


def test_gradients_that_are_zeroed_in_place_are_compared_every_ten_passes() -> None:
    model = Reader(before=False)
    optimizer = RULES["FOOF"](model)

    def run(steps: range) -> None:
        for index in steps:
            F.cross_entropy(model(data(index)[0]), data(index)[1]).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    run(range(12))
    assert not optimizer.preconditioner.recorded.read_elsewhere
    model.reads = True
    with pytest.warns(UserWarning, match=r"trains last\.weight"):
        run(range(12, 24))
    assert optimizer.preconditioner.recorded.read_elsewhere == {model.last.weight}
    model.reads = False
    run(range(24, 36))
    assert not optimizer.preconditioner.recorded.read_elsewhere


# --- weights that are not the model's own ---


def doubled(model: nn.Module, params: Any, x: Tensor, which: tuple[str, ...]) -> Tensor:
    return functional_call(model, {**params, **{name: 2 * params[name] for name in which}}, (x,))


@every_rule
def test_passes_with_derived_weights_are_refused_or_take_the_fallback(name: str) -> None:
    """The gradient of a layer's weight is not that of the parameter from which it is computed."""
    model = network()
    optimizer, own = RULES[name](model), dict(model.named_parameters())
    before = weights(model)
    passes(lambda x: doubled(model, own, x, tuple(own)), optimizer, 0)
    if name == "OGN sampled":  # the fallback needs only the number of examples
        with pytest.warns(UserWarning, match=r"trains 0\.weight, .*, 4\.bias by"):
            optimizer.step()
        return
    with pytest.raises(RuntimeError, match=r"Passes with other weights than the model's own \(functional_call\) are"):
        optimizer.step()
    assert same(before, weights(model))


@every_rule
@pytest.mark.parametrize("which", [("2.weight",), ("2.weight", "2.bias")])
def test_a_layer_with_derived_weights_takes_the_fallback(name: str, which: tuple[str, ...]) -> None:
    model = network()
    optimizer, own = RULES[name](model), dict(model.named_parameters())
    passes(lambda x: doubled(model, own, x, which), optimizer, 0)
    with pytest.warns(UserWarning, match=r"trains 2\.weight(, 2\.bias)? by"):
        optimizer.step()


@pytest.mark.parametrize("which", [("2.weight",), ("2.weight", "2.bias")])
def test_derived_weights_of_one_layer_leave_the_others_exact(which: tuple[str, ...]) -> None:
    """Squares of OGN, and the Fisher matrix of NaturalGradient, by torch.func."""
    model, (x, y) = network(), data()
    start = weights(model)
    loss = lambda params, x, y: F.cross_entropy(doubled(model, params, x[None], which), y[None])  # noqa: E731
    rows = vmap(grad(loss), (None, 0, 0))(start, x, y)
    for name in ("OGN", "OGN sampled"):
        model = network()
        optimizer, own = RULES[name](model), dict(model.named_parameters())
        passes(lambda x, model=model, own=own: doubled(model, own, x, which), optimizer, 0)
        lost = ("2.weight", "2.bias")  # the layer is not recorded
        with pytest.warns(UserWarning, match="trains " + ", ".join(lost)):
            found = squares(optimizer, model)
        for key, value in found.items():
            expected = 8 * rows[key].mean(0).square() if key in lost else rows[key].square().mean(0)
            torch.testing.assert_close(value, expected, rtol=1e-10, atol=0)

    model = network()
    optimizer, own = RULES["NaturalGradient"](model, lr=0.1, damping=0.05), dict(model.named_parameters())
    passes(lambda x: doubled(model, own, x, which), optimizer, 0)
    with pytest.warns(UserWarning, match="trains 2.weight, 2.bias"):
        optimizer.step()
    known = [n for n in rows if not n.startswith("2")]
    flat = torch.cat([rows[n].flatten(1) for n in known], 1)
    step = torch.linalg.solve(flat.T @ flat / 8 + 0.05 * torch.eye(flat.shape[1], dtype=D), flat.mean(0))
    moved = torch.cat([(start[n] - model.get_parameter(n).detach()).flatten() for n in known])
    torch.testing.assert_close(moved, 0.1 * step, rtol=1e-8, atol=1e-12)


@every_rule
def test_a_parameter_that_was_added_to_a_layer_does_not_hide_it(name: str) -> None:
    model, other = network(), network()
    model[2].register_parameter("extra", nn.Parameter(torch.ones(2, dtype=D)))
    names = [n for n, _ in other.named_parameters()]
    optimizer = RULES[name](model, params=[model.get_parameter(n) for n in names])
    reference = RULES[name](other)
    for net, opt in ((model, optimizer), (other, reference)):
        passes(net, opt, 0)
        opt.step()
    assert all(torch.equal(model.get_parameter(n), other.get_parameter(n)) for n in names)


# --- losses that are differentiated in parts ---


def halves(outputs: Tensor, y: Tensor) -> None:
    """Of the examples."""
    losses = F.cross_entropy(outputs, y, reduction="none") / len(y)
    losses[:3].sum().backward(retain_graph=True)
    losses[3:].sum().backward()


def terms(outputs: Tensor, y: Tensor, share: float = 1.0) -> None:
    (share * outputs.logsumexp(1).mean()).backward(retain_graph=True)
    (-share * outputs.gather(1, y[:, None]).mean()).backward()


def thirds(outputs: Tensor, y: Tensor) -> None:
    for number in range(3):
        (F.cross_entropy(outputs, y) / 3).backward(retain_graph=number < 2)


class Called(nn.Module):
    """A layer that is called twice, by a model whose forward pass is not called by its name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice, self.last = nn.Linear(6, 40), nn.Linear(40, 40), nn.Linear(40, 3)
        self.double()

    def run(self, x: Tensor) -> Tensor:
        return self.last(self.twice(self.twice(self.first(x).relu()).tanh()))


@every_rule
@pytest.mark.parametrize("split", [halves, terms, thirds])
@pytest.mark.parametrize("called", [False, True], ids=["model", "function"])
def test_a_loss_that_is_differentiated_in_parts_is_one_loss(name: str, split: Callable, called: bool) -> None:
    model, other = (Called(), Called()) if called else (network(), network())
    run, run_other = (model.run, other.run) if called else (model, other)
    optimizer, reference = RULES[name](model), RULES[name](other)
    for index in range(3):
        passes(run, optimizer, index, split)
        optimizer.step()
        passes(run_other, reference, index)
        reference.step()
    assert_same_step(model, other)


@every_rule
@pytest.mark.parametrize("called", [False, True], ids=["model", "function"])
def test_micro_batches_in_parts_act_like_one_batch(name: str, called: bool) -> None:
    model, other = (Called(), Called()) if called else (network(), network())
    run, run_other = (model.run, other.run) if called else (model, other)
    optimizer, reference = RULES[name](model), RULES[name](other)
    for index in range(3):
        x, y = data(index)
        optimizer.zero_grad()
        with optimizer.sampled(noise=(lambda p: torch.full_like(p, 0.5)) if optimizer.needs.draws else None):
            for part in (slice(0, 4), slice(4, 8)):
                outputs = run(x[part])
                observe(optimizer, outputs, y[part])
                terms(outputs, y[part], 0.5)
        optimizer.step()
        passes(run_other, reference, index)
        reference.step()
    assert_same_step(model, other)


class Recurrent(nn.Module):
    """Sequences of three inputs, whose last output is classified."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"proj_size": 3} if kind == "LSTM" else {"bidirectional": True}
        self.body = getattr(nn, kind)(2, 4, batch_first=True, **options)
        self.head = nn.LazyLinear(3)
        self.double()(data()[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.unflatten(1, (3, 2)))[0][:, -1])


@every_rule
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_the_loss_of_a_recurrent_network_in_parts_is_one_loss(name: str, kind: str) -> None:
    model, other = Recurrent(kind), Recurrent(kind)
    optimizer, reference = RULES[name](model), RULES[name](other)
    for index in range(3):
        passes(model, optimizer, index, terms)
        optimizer.step()
        passes(other, reference, index)
        reference.step()
    assert_same_step(model, other)


@pytest.mark.parametrize("name", ["OGN", "VOGN", "FP empirical"])
def test_parts_of_two_losses_in_turn_are_refused(name: str) -> None:
    model = network()
    optimizer = RULES[name](model)

    def in_turn(outputs: Tensor, y: Tensor) -> None:
        more = model(data(1)[0])
        for part, last in ((0, False), (1, True)):
            for one in (outputs, more):
                F.cross_entropy(one[4 * part : 4 * part + 4], y[:4]).backward(retain_graph=not last)

    before = weights(model)
    passes(model, optimizer, 0, in_turn)
    with pytest.raises(ValueError, match=r"differentiated in several backward passes, .*: call backward\(\) once"):
        optimizer.step()
    assert same(before, weights(model))


@pytest.mark.parametrize("name", ["OGN", "FP empirical"])
@pytest.mark.parametrize("kind", ["parts", "two forward passes", "compiled layers"])
def test_passes_of_compiled_models_are_told_apart(name: str, kind: str) -> None:
    model, other = network(), network()
    optimizer, reference = RULES[name](model), RULES[name](other)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    if kind == "compiled layers":
        compiled = nn.Sequential(*(torch.compile(layer, backend="aot_eager") for layer in model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        for index in range(3):
            x, y = data(index)
            optimizer.zero_grad()
            if kind == "parts":
                terms(compiled(x), y)
            elif kind == "two forward passes":
                F.cross_entropy(torch.cat([compiled(x[:4]), compiled(x[4:])]), y).backward()
            else:
                for part in (slice(0, 4), slice(4, 8)):
                    (F.cross_entropy(compiled(x[part]), y[part]) / 2).backward()
            optimizer.step()
            passes(other, reference, index)
            reference.step()
    assert_same_step(model, other)


class Uncompiled(nn.Module):
    """A layer that torch.compile does not trace, so that the graph breaks."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def in_graphs(model: nn.Module, kind: str) -> nn.Module:
    """A model of which torch.compile traces a part, or several parts by themselves."""
    if kind == "some layers":
        model[0].compile(backend="aot_eager")
    elif kind == "forward":
        model.forward = torch.compile(model.forward, backend="aot_eager")
    else:
        return torch.compile(model, backend="aot_eager")
    return model


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")  # those of the compiler
@pytest.mark.parametrize("loop", ["one pass", "two forward passes", "two backward passes", "frozen"])
@pytest.mark.parametrize("name", ["FOOF", "OGN"])
@pytest.mark.parametrize("kind", ["break", "some layers", "forward", "limit"])
def test_models_of_which_some_layers_are_compiled_train_as_eager_ones(kind: str, name: str, loop: str) -> None:
    """The outputs are means over three positions, so that rows of layers are not the losses of the pass."""
    torch._dynamo.reset()
    limit = 8
    if kind == "limit":  # what was compiled for another model, in parts, is used, and only one graph is added
        other, limit = nn.Sequential(nn.Linear(6, 5), Uncompiled(nn.Linear(5, 3))).double(), 1
        earlier = RULES[name](other)
        passes(torch.compile(other, backend="aot_eager"), earlier, 0)
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        last = nn.Linear(5, 3)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), Uncompiled(last) if kind == "break" else last).double()
        model.register_forward_hook(lambda module, args, output: output.mean(1))
        optimizer = RULES[name](model)
        net = in_graphs(model, kind) if compiled else model
        for index in range(4):
            x, y = torch.randn(8, 3, 6, dtype=D), torch.randint(0, 3, (8,))
            if loop == "frozen":
                last.bias.requires_grad_(index not in (1, 2))
            optimizer.zero_grad()
            with torch._dynamo.config.patch(recompile_limit=limit):
                outputs = torch.cat([net(x[:4]), net(x[4:])]) if loop == "two forward passes" else net(x)
            observe(optimizer, outputs, y)
            if loop == "two backward passes":
                (F.cross_entropy(outputs[:4], y[:4]) / 2).backward(retain_graph=True)
                (F.cross_entropy(outputs[4:], y[4:]) / 2).backward()
            else:
                F.cross_entropy(outputs, y).backward()
            optimizer.step()
        results.append(weights(model))
    torch._dynamo.reset()
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)


class Towers(nn.Module):
    """Two inputs, and one encoder, whose outputs have losses of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.trunk(x), self.trunk(10 * x.flip(0))


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")  # those of the compiler
@pytest.mark.parametrize("graph", ["layer", "model"])
@pytest.mark.parametrize("name", ["FOOF", "FP empirical"])
def test_calls_of_a_compiled_layer_in_one_pass_are_told_apart(name: str, graph: str) -> None:
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Towers()
        optimizer = RULES[name](model)
        if compiled:
            (model.trunk if graph == "layer" else model).compile(backend="aot_eager", fullgraph=True)
        for index in range(3):
            optimizer.zero_grad()
            x, _ = data(index)
            u, v = model(x)
            u.square().mean().backward(retain_graph=True)
            v.square().mean().backward(retain_graph=True)
            u.sin().mean().backward()  # another term of the first loss
            optimizer.step()
        results.append(weights(model))
    torch._dynamo.reset()
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)


class Tagger(nn.Module):
    """A loss for each position, and two blocks in activation checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
        return self.head(x)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")  # those of the compiler
@pytest.mark.parametrize("loop", ["one pass", "two forward passes", "two backward passes"])
@pytest.mark.parametrize("name", ["FOOF", "FP empirical"])
def test_compiled_blocks_in_checkpoints_train_as_eager_ones(name: str, loop: str) -> None:
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Tagger()
        optimizer = RULES[name](model)
        for block in model.blocks if compiled else ():
            block.compile(backend="aot_eager")
        for _ in range(3):
            x, y = torch.randn(4, 5, 6, dtype=D), torch.randint(0, 3, (4, 5))
            optimizer.zero_grad()
            parts = [model(one) for one in (x.split(2) if loop == "two forward passes" else [x])]
            if loop == "two backward passes":
                terms(parts[0].flatten(0, 1), y.flatten())
            else:
                for outputs, labels in zip(parts, y.split(4 // len(parts))):
                    (F.cross_entropy(outputs.flatten(0, 1), labels.flatten()) / len(parts)).backward()
            optimizer.step()
        results.append(weights(model))
    torch._dynamo.reset()
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)


# --- odd batches and models ---


class Bare(nn.Module):
    """No layer that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.linspace(-1, 1, 18, dtype=D).view(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


@every_rule
def test_a_model_without_known_layers_is_trained_by_the_fallback_or_refused(name: str) -> None:
    model = Bare()
    with pytest.warns(UserWarning, match="trains matrix by"):
        optimizer = RULES[name](model)
    before = model.matrix.detach().clone()
    passes(model, optimizer, 0)
    if name in ("OGN", "VOGN"):
        with pytest.raises(ValueError, match=r"counts examples at Linear, .* none of them that is trained: use IVON"):
            optimizer.step()
        return
    if name == "OGN sampled":
        torch.testing.assert_close(squares(optimizer, model)["matrix"], 8 * model.matrix.grad.square())
        passes(model, optimizer, 0)
    optimizer.step()
    if name in ("FOOF", "FOOF backward", "KFAC", "KFAC exact", "NaturalGradient"):  # the first step of Adam
        torch.testing.assert_close(model.matrix.detach(), before - 1e-3 * model.matrix.grad.sign())
    assert not torch.equal(before, model.matrix)


@every_rule
@pytest.mark.parametrize("start", [0, 2])
def test_an_empty_batch_changes_no_factors(name: str, start: int) -> None:
    model, other = network(), network()
    optimizer, reference = RULES[name](model), RULES[name](other)
    for index in range(start):
        for net, opt in ((model, optimizer), (other, reference)):
            passes(net, opt, index)
            opt.step()
    kept = {key: value for key, value in factors(optimizer).items() if "covariance" not in key}  # which drift
    optimizer.zero_grad()
    with optimizer.sampled(noise=(lambda p: torch.full_like(p, 0.5)) if optimizer.needs.draws else None):
        outputs = model(data()[0][:0])
        observe(optimizer, outputs, data()[1][:0])
        F.cross_entropy(outputs, data()[1][:0], reduction="sum").backward()
    optimizer.step()
    assert all(torch.equal(value, factors(optimizer)[key]) for key, value in kept.items())
    assert all(value.isfinite().all() for value in (*states(optimizer).values(), *model.parameters()))
    for index in range(start, start + 2):
        for net, opt in ((model, optimizer), (other, reference)):
            passes(net, opt, index)
            opt.step()
    if name in ("FOOF", "FOOF backward", "KFAC", "KFAC exact", "NaturalGradient"):
        assert_same_step(model, other)


class Doubling(nn.Module):
    """A layer that sees the batch, and twice the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.out = nn.Linear(6, 5), nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        twice = self.layer(torch.cat([x, x])).view(2, len(x), -1)
        return self.out(self.layer(x).tanh() + twice[0] - 0.3 * twice[1])


@pytest.mark.parametrize("name", ["OGN", "OGN sampled"])
def test_squares_of_a_layer_that_receives_examples_once_and_twice(name: str) -> None:
    model, (x, y) = Doubling(), data(0)
    optimizer = RULES[name](model)
    passes(model, optimizer, 0)
    expected = per_example(model, x, y)
    for n, found in squares(optimizer, model).items():
        torch.testing.assert_close(found, expected[n].square().mean(0), rtol=1e-10, atol=1e-12)


# --- hooks of parameters, checkpoints around the model, thawed layers ---


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ["FOOF", "KFAC", "NaturalGradient", "KroneckerFilter", "FP"])
def test_a_hook_that_clips_acts_like_clipping_after_the_pass(name: str, in_place: bool) -> None:
    """The hook changes nothing at first, when layers are compared with gradients, and clips one batch later on."""
    clip: Any = Tensor.clamp_ if in_place else Tensor.clamp
    model, other = network(), network()
    for p in model.parameters():
        p.register_hook(lambda gradient: clip(gradient, -1e-2, 1e-2))
    optimizer, reference = RULES[name](model), RULES[name](other)
    for index in range(6):
        scale = 1.0 if index == 4 else 1e-3
        for net, opt in ((model, optimizer), (other, reference)):
            passes(net, opt, index, lambda outputs, y: (scale * F.cross_entropy(outputs, y)).backward())  # noqa: B023
        nn.utils.clip_grad_value_(other.parameters(), 1e-2)
        optimizer.step()
        reference.step()
        assert_same_step(model, other)


@every_rule
def test_a_checkpoint_around_the_whole_model_changes_nothing(name: str) -> None:
    model, other = network(), network()
    optimizer, reference = RULES[name](model), RULES[name](other)
    for index in range(3):
        passes(lambda x: checkpoint(model, x, use_reentrant=False), optimizer, index)
        passes(other, reference, index)
        optimizer.step()
        reference.step()
    assert same(weights(model), weights(other))


# Not NaturalGradient, whose Fisher matrix has all weights that are trained, and VOGN, which does not draw frozen ones.
@pytest.mark.parametrize("name", [name for name in RULES if name not in ("NaturalGradient", "VOGN")])
@pytest.mark.parametrize("frozen", [(0, 1), (2, 3)])
def test_a_layer_that_is_frozen_for_some_steps_trains_as_without_gradients_in_them(
    name: str, frozen: tuple[int, int]
) -> None:
    model, other = network(), network()
    optimizer, reference = RULES[name](model), RULES[name](other)
    for index in range(5):
        model[0].requires_grad_(index not in frozen)
        passes(model, optimizer, index)
        passes(other, reference, index)
        for p in other[0].parameters():
            p.grad = None if index in frozen else p.grad
        optimizer.step()
        reference.step()
        assert_same_step(model, other)


@pytest.mark.parametrize("name", ["NaturalGradient", "FOOF", "KFAC"])
def test_the_fallback_trains_what_hooks_change_in_every_pass_and_a_warning_says_why(name: str) -> None:
    model = network()
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient / 2)
    optimizer = RULES[name](model)
    before = weights(model)

    def step_twice() -> None:
        for index in range(2):
            passes(model, optimizer, index)
            optimizer.step()

    why = "hooks change their gradients"
    with pytest.warns(UserWarning, match=f"{name} trains 0.weight, .* by Adam.*: {why}"):
        step_twice()
    assert not any(torch.equal(before[name], value) for name, value in weights(model).items())


@pytest.mark.parametrize("mode", ["relative", "absolute"])
@pytest.mark.parametrize("exact", [True, False], ids=["product", "factors"])
def test_a_layer_of_dead_units_stops_neither_its_own_training_nor_that_of_others(exact: bool, mode: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    x, y = torch.randn(8, 4).double(), torch.arange(8) % 3
    with torch.no_grad():
        model[0].bias.fill_(-100)
    before, last = weights(model), model[2]
    options: dict[str, Any] = {"exact_damping": exact, "damping_mode": mode, "damping": 0.25}
    optimizer = KFAC(model, lr=0.1, max_norm=math.inf, **options)
    outputs = model(x)
    optimizer.observe(outputs, labels=y)
    F.cross_entropy(outputs, y).backward()
    optimizer.step()
    assert torch.equal(model[0].weight, before["0.weight"])
    assert torch.equal(model[0].bias, before["0.bias"])
    errors = outputs.detach().softmax(1) - F.one_hot(y, 3)
    E, A = errors.T @ errors / 8, torch.zeros(6, 6).double()
    A[5, 5] = 1  # all inputs of the last layer but that of the bias are zero
    a, e = A.trace() / 6, E.trace() / 3
    gradient = torch.cat([last.weight.grad, last.bias.grad[:, None]], 1)
    if exact:
        damping = 0.25 * a * e if mode == "relative" else 0.25
        D = torch.linalg.solve(torch.kron(E, A) + damping * torch.eye(18).double(), gradient.flatten()).view(3, 6)
    else:
        left, right = (0.5 * e, 0.5 * a) if mode == "relative" else (0.5 * (e / a).sqrt(), 0.5 * (a / e).sqrt())
        D = (
            torch.linalg.inv(E + left * torch.eye(3).double())
            @ gradient
            @ torch.linalg.inv(A + right * torch.eye(6).double())
        )
    expected = torch.cat([before["2.weight"], before["2.bias"][:, None]], 1) - 0.1 * D
    torch.testing.assert_close(torch.cat([last.weight, last.bias[:, None]], 1), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("how", ["class_dim", "labels", "loss", "layer"])
@pytest.mark.parametrize("rule", ["FOOF", "OGN", "KroneckerFilterFP"])
def test_classes_in_dimension_one_of_outputs_without_a_convolution(rule: str, how: str) -> None:
    """The number of losses of outputs (N, C, T) is N T, as for outputs (N, T, C); the last layer shows it."""
    make = {
        "FOOF": lambda model: FOOF(model, **EACH, **LINEAR),
        "OGN": lambda model: OGN(model, num_data=30, betas=(0.0, 0.5)),
        "KroneckerFilterFP": lambda model: KroneckerFilterFP(model, batch_size=15, fisher="empirical", **EACH),
    }[rule]

    class Classifier(nn.Module):
        def __init__(self, second: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.second = nn.Linear(2, 4, dtype=D), second

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).movedim(-1, 1) if self.second else self.layer(x)

    found = []
    for second in (False, True):
        model = Classifier(second)
        optimizer = make(model)
        for index in range(2):
            torch.manual_seed(index)
            x, y = torch.randn(5, 3, 2, dtype=D), torch.randint(4, (5, 3))
            optimizer.zero_grad()
            outputs = model(x)
            loss = F.cross_entropy(outputs if second else outputs.movedim(-1, 1), y)
            if second and how != "layer":
                optimizer.observe(
                    outputs, **{"class_dim": {"class_dim": 1}, "labels": {"labels": y}}.get(how, {"loss": loss})
                )
            loss.backward()
            optimizer.step()
        found.append(model.layer.weight.detach())
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["FOOF", "FOOF backward", "KFAC", "KFAC exact", "KroneckerFilter", "FP"])
def test_a_pass_with_other_weights_after_a_layer_was_frozen_changes_nothing(name: str) -> None:
    """In functional_call the layers have other parameters; they are still known in the next pass of the model."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 4, dtype=D), torch.randint(0, 3, (8,))
    results = []
    for other in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).to(D)
        optimizer = RULES[name](model)
        for index in range(3):
            model[0].weight.requires_grad_(index != 1)
            if other:
                functional_call(model, {key: p.detach() for key, p in model.named_parameters()}, (x,))
            optimizer.zero_grad()
            outputs = model(x)
            observe(optimizer, outputs, y)
            F.cross_entropy(outputs, y).backward()
            optimizer.step()
        results.append(weights(model) | states(optimizer))
    assert same(*results)


@pytest.mark.parametrize("name", ["FOOF", "FOOF backward", "KFAC", "KFAC exact", "KroneckerFilter", "FP"])
@pytest.mark.parametrize("frozen", [["0.weight"], ["0.bias"], ["0.weight", "0.bias"]])
def test_a_checkpoint_with_a_layer_that_was_trained_and_then_frozen_resumes(name: str, frozen: list[str]) -> None:
    x, y = torch.randn(8, 4, dtype=D), torch.randint(0, 3, (8,))

    def run(model: nn.Module, optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            outputs = model(x)
            observe(optimizer, outputs, y)
            F.cross_entropy(outputs, y).backward()
            optimizer.step()

    models = [nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).to(D) for _ in range(2)]
    first = RULES[name](models[0])
    early = RULES[name](models[1])
    run(models[0], first, 2)
    for model in models:
        for key, p in model.named_parameters():
            p.requires_grad_(key not in frozen)
            p.grad = None
    run(models[0], first, 2)
    models[1].load_state_dict(models[0].state_dict())
    early.load_state_dict(first.state_dict())  # it was built before the layer was frozen
    del early  # two optimizers of one model would both precondition
    optimizers = first, RULES[name](models[1])
    optimizers[1].load_state_dict(first.state_dict())
    for model, optimizer in zip(models, optimizers):
        run(model, optimizer, 1)
        model.requires_grad_(True)
        run(model, optimizer, 2)
    assert same(*(weights(model) | states(optimizer) for model, optimizer in zip(models, optimizers)))


@pytest.mark.parametrize("blocks", ["full", "layer"])
def test_a_skipped_batch_with_nan_leaves_the_layers_of_natural_gradient_known(blocks: str) -> None:
    """Rows of NaN do not show to which examples they belong; those of the next batch do."""
    x, y = torch.randn(8, 4, dtype=D), torch.randint(0, 3, (8,))
    bad = torch.where(torch.arange(8)[:, None] == 2, torch.nan, x)
    results = []
    for batches in ([x, x], [bad, x, x]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).to(D)
        optimizer = NaturalGradient(model, lr=0.1, blocks=blocks, nonfinite="skip")
        for inputs in batches:
            optimizer.zero_grad()
            outputs = model(inputs)
            optimizer.observe(outputs, labels=y)
            F.cross_entropy(outputs, y).backward()
            optimizer.step()
        results.append(weights(model))
    assert same(*results)


@pytest.mark.parametrize("rule", ["OGN", "VOGN"])
def test_squares_without_a_layer_that_is_trained_are_refused(rule: str) -> None:
    """As with an IA3 adapter, which multiplies activations: nothing shows how many examples there are."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = (
                nn.Linear(6, 3).double().requires_grad_(False),
                nn.Parameter(torch.ones(3).double()),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale

    model = Scaled()
    with pytest.warns(UserWarning, match=r"trains scale"):
        optimizer = RULES[rule](model)
    passes(model, optimizer, 0)
    with pytest.raises(ValueError, match=r"found none of them that is trained: use IVON, or fisher='sampled'"):
        optimizer.step()


FIRST = ("FOOF", "FOOF backward", "KFAC", "KFAC exact", "NaturalGradient", "FP", "FP empirical")
CHANGES: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any]]] = {
    "pruned weight": (lambda m: prune.l1_unstructured(m, "weight", 0.3), lambda m: prune.remove(m, "weight")),
    "pruned bias": (lambda m: prune.l1_unstructured(m, "bias", 0.3), lambda m: prune.remove(m, "bias")),
    "spectral norm": (parametrizations.spectral_norm, lambda m: remove_parametrizations(m, "weight")),
}


@pytest.mark.parametrize("name", [name for name in RULES if "OGN" not in name])
@pytest.mark.parametrize("change", list(CHANGES))
def test_a_layer_that_is_pruned_or_parametrised_during_a_run_takes_the_fallback(name: str, change: str) -> None:
    """Its factors are those of another layer, and are not updated any more; with its own weight it is known again."""
    model = network()
    optimizer = RULES[name](model)

    def steps(start: int, stop: int) -> None:
        for index in range(start, stop):
            passes(model, optimizer, index)
            optimizer.step()

    derive, restore = CHANGES[change]
    steps(0, 3)
    derive(model[2])
    before = {p: p.detach().clone() for p in model[2].parameters()}
    with pytest.warns(UserWarning, match=r"trains 2\.weight, 2\.bias by"):
        steps(3, 4)
    for p, then in before.items() if name in FIRST else ():  # the first step of Adam, without momentum of directions
        torch.testing.assert_close(p.detach(), then - 1e-3 * p.grad.sign(), rtol=0.0, atol=1e-7)
    steps(4, 6)
    assert optimizer.preconditioner.recorded.read_elsewhere == set(before)
    restore(model[2])
    steps(6, 9)
    assert not optimizer.preconditioner.recorded.read_elsewhere


def test_a_pruned_layer_is_not_asked_for_statistics_when_others_have_none() -> None:
    """Those of its own are due in each step, since it never gets any."""
    model = network()
    optimizer = FOOF(model, stats_every=10)
    for index in range(12):
        if index == 4:
            prune.l1_unstructured(model[2], "weight", 0.3)
        passes(model, optimizer, index)
        with pytest.warns(UserWarning, match="trains 2.weight, 2.bias") if index == 4 else nullcontext():
            optimizer.step()
