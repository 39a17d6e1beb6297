"""The contract of optimizers that use layers: recorded inputs and errors, names, fallbacks, error messages."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bayesgrad.optim import FOOF, KFAC, KroneckerFilter, KroneckerFilterFP, NaturalGradient
from bayesgrad.preconditioners import layered as layer_block
from cases import LAYERWISE, Case, layerwise_case, observe, same, states, weights

RULES = [FOOF, KFAC, NaturalGradient]
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)


def collected(optimizer: Any) -> int:
    """The number of layers and parameters of which something was collected in backward passes."""
    part = optimizer.preconditioner
    names = ("from_passes", "kept", "projections")
    return sum(len(getattr(part, name, ())) for name in names)


def network(seed: int = 0) -> nn.Sequential:
    """A network wide enough that preconditioning inputs and errors is cheaper than preconditioning the gradient."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)).double()


def data(index: int = 0, n: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(n, 6, dtype=torch.float64, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def passes(model: Callable, optimizer: torch.optim.Optimizer, index: int, change: Callable | None = None) -> None:
    """A forward and backward pass; the loss can be modified before backward()."""
    x, y = data(index)
    outputs = model(x)
    observe(optimizer, outputs, y)
    loss = F.cross_entropy(outputs, y)
    (change(loss) if change else loss).backward()


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the layers whose direction is computed from inputs and errors."""
    used: list[str] = []
    original = layer_block.from_rows

    def counted(layer, *args):
        used.append(layer.names[0])
        return original(layer, *args)

    monkeypatch.setattr(layer_block, "from_rows", counted)
    return used


CHANGES = {
    "nothing": lambda model: None,
    "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-2),
    "one value": lambda model: model[2].weight.grad[3, 5].mul_(0.9),
    "penalty": lambda model: [p.grad.add_(p.detach(), alpha=0.1) for p in model.parameters()],
    "mask": lambda model: [setattr(p, "grad", p.grad * (p > 0)) for p in model.parameters()],
}


@pytest.mark.filterwarnings("ignore:gradients were changed between")
@layerwise_case
@pytest.mark.parametrize("name", CHANGES)
def test_whatever_is_done_to_gradients_acts_as_if_the_final_one_were_solved(
    case: Case, name: str, fast: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = network(), network()
    optimizer, reference = case.of(model), case.of(other)
    for index in range(3):
        for net, opt in ((model, optimizer), (other, reference)):
            opt.zero_grad()
            passes(net, opt, index)
            CHANGES[name](net)
        fast.clear()
        optimizer.step()
        used = list(fast)
        with monkeypatch.context() as patch:
            patch.setattr(layer_block.LayerPreconditioner, "is_kronecker", lambda *_: False)
            reference.preconditioner.kept = {}
            patch.setattr("bayesgrad.preconditioners.woodbury.common_factor", lambda *_: None)
            reference.step()
        for p, q in zip(model.parameters(), other.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10)
        if case.name in ("FOOF", "FOOF-momentum", "KFAC"):
            assert ("2" in used) == (name == "nothing")


@layerwise_case
def test_grad_scaler_acts_as_if_the_final_gradient_were_solved(case: Case) -> None:
    model, other = network(), network()
    optimizer, reference = case.of(model), case.of(other)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for index in range(3):
        optimizer.zero_grad()
        passes(model, optimizer, index, scaler.scale)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        scaler.step(optimizer)
        scaler.update()
        reference.zero_grad()
        passes(other, reference, index)
        nn.utils.clip_grad_norm_(other.parameters(), 1e-2)
        reference.step()
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10)


@layerwise_case
def test_four_micro_batches_act_like_one_batch(case: Case) -> None:
    model, other = network(), network()
    optimizer, whole = case.of(model), case.of(other)
    for index in range(3):
        optimizer.zero_grad()
        x, y = data(index)
        for part in range(4):
            outputs = model(x[part::4])
            observe(optimizer, outputs, y[part::4])
            (F.cross_entropy(outputs, y[part::4]) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        whole.zero_grad()
        passes(other, whole, index)
        nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        whole.step()
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10)


# --- evidence ---


class Twice(nn.Module):
    """A layer that is called twice, and another that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6).double()
        self.tied = nn.Linear(6, 6).double()
        self.tied.weight, self.tied.bias = self.first.weight, self.first.bias
        self.out = nn.Linear(6, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.tied(self.first(torch.tanh(self.first(x)))))


def test_uses_of_a_shared_layer_add_up() -> None:
    """A = (1/N) sum over all calls of the second moment of their inputs."""
    model = Twice()
    optimizer = FOOF(model, lr=0.1, damping=0.3, damping_mode="absolute", max_norm=math.inf)
    x, y = data()
    first = model.first(x)
    inputs = [x, torch.tanh(first), model.first(torch.tanh(first))]
    moment = sum((a := torch.cat([i, torch.ones(8, 1).double()], 1)).T @ a for i in inputs) / 8
    before = weights(model)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    gradient = torch.cat([model.first.weight.grad, model.first.bias.grad[:, None]], 1)
    expected = gradient @ torch.linalg.inv(moment + 0.3 * torch.eye(7).double())
    torch.testing.assert_close(before["first.weight"] - 0.1 * expected[:, :-1], model.first.weight.detach())
    torch.testing.assert_close(before["first.bias"] - 0.1 * expected[:, -1], model.first.bias.detach())


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_calls_of_a_shared_layer_add_up_under_checkpointing(reentrant: bool | None) -> None:
    """Each call has a checkpoint of its own, whose graph is freed before the next one is computed again."""
    torch.manual_seed(0)
    shared, head = nn.Linear(6, 6).double(), nn.Linear(6, 3).double()
    x, y = data()
    inputs = [x.requires_grad_()]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.head = shared, head

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(4):
                x = self.shared(x) if reentrant is None else checkpoint(self.shared, x, use_reentrant=reentrant)
            return self.head(x)

    model = Model()
    optimizer = FOOF(model)
    for _ in range(3):
        inputs.append(shared(inputs[-1]))
    moment = sum((a := torch.cat([i, torch.ones(8, 1).double()], 1)).T @ a for i in inputs) / 8
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    found = optimizer.state[shared.weight]["input_moment"][0]
    torch.testing.assert_close(found.tril(), moment.detach().tril())  # the other triangle is not stored


class Wrapped(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.net, self.how = network(), how
        if how == "in place":
            self.net[1] = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "checkpoint":
            return checkpoint(self.net, x, use_reentrant=False)
        if self.how == "reentrant":
            return checkpoint(self.net, x.requires_grad_(), use_reentrant=True)
        return self.net(x)


@layerwise_case
@pytest.mark.parametrize("how", ["in place", "checkpoint", "reentrant"])
def test_in_place_activations_and_checkpointing_change_nothing(case: Case, how: str) -> None:
    model, plain = Wrapped(how), Wrapped("plain")
    optimizer, reference = case.of(model), case.of(plain)
    if how == "reentrant" and optimizer.needs.outputs:
        with pytest.raises(RuntimeError, match=r"reentrant activation checkpointing hides .*use_reentrant=False"):
            passes(model, optimizer, 0)
        return
    for index in range(3):
        for net, opt in ((model, optimizer), (plain, reference)):
            opt.zero_grad()
            passes(net, opt, index)
            opt.step()
    assert same(weights(model), weights(plain))


@every_rule
def test_passes_that_nobody_differentiates_leave_no_trace(rule: type) -> None:
    model, other = network(), network()
    optimizer, reference = rule(model), rule(other)
    for index in range(2):
        model(data(90)[0])
        with torch.no_grad():
            model(data(91)[0])
        F.cross_entropy(model(data(92)[0]), data(92)[1]).backward()
        optimizer.zero_grad()
        reference.zero_grad()
        for net, opt in ((model, optimizer), (other, reference)):
            passes(net, opt, index)
            opt.step()
        assert not collected(optimizer)
    assert same(weights(model), weights(other))
    F.cross_entropy(model(data(93)[0]), data(93)[1]).backward()
    for p in model.parameters():
        p.grad = None
    reference.zero_grad()
    passes(model, optimizer, 3)
    passes(other, reference, 3)
    optimizer.step()
    reference.step()
    assert same(weights(model), weights(other))


@every_rule
def test_evidence_is_let_go_with_the_optimizer_and_copies_of_the_model_listen_to_nothing(rule: type) -> None:
    model = network()
    optimizer = rule(model)
    twin = copy.deepcopy(model)
    F.cross_entropy(twin(data()[0]), data()[1]).backward()
    assert not collected(optimizer)
    passes(model, optimizer, 0)
    optimizer.step()
    optimizer.zero_grad()
    del optimizer
    F.cross_entropy(model(data()[0]), data()[1]).backward()
    another = rule(model)
    passes(model, another, 0)
    another.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_rule
def test_autocast(rule: type, dtype: torch.dtype) -> None:
    model, plain = network().float(), network().float()
    options = {"lr": 0.03, "damping": 0.01, "damping_mode": "absolute"} if rule is KFAC else {}
    optimizer, reference = rule(model, max_norm=math.inf, **options), rule(plain, max_norm=math.inf, **options)
    x, y = data()
    with torch.autocast("cpu", dtype=dtype):
        outputs = model(x.float())
        observe(optimizer, outputs, y)
        loss = F.cross_entropy(outputs, y)
    loss.backward()
    optimizer.step()
    outputs = plain(x.float())
    observe(reference, outputs, y)
    F.cross_entropy(outputs, y).backward()
    reference.step()
    start = network().float().parameters()
    moved = [(p - q).norm() / (q - r).norm() for p, q, r in zip(model.parameters(), plain.parameters(), start)]
    assert max(moved) < 0.05


@pytest.mark.parametrize("how", ["sampled", "empirical", "centered"])
@pytest.mark.parametrize("rule", [KroneckerFilter, KroneckerFilterFP], ids=lambda rule: rule.__name__)
def test_kronecker_filters_of_float16_weights(rule: type, how: str) -> None:
    """Their inputs and errors are float16, in which most squares overflow; moments are float32."""
    moved = []
    for dtype in (torch.float64, torch.float16):
        model = network().half().to(dtype)
        start, optimizer = weights(model), rule(model, 0.03, batch_size=8, prior_std=0.5, fisher=how)
        for index in range(3):
            x, y = data(index)
            optimizer.zero_grad()
            outputs = model(x.half().to(dtype))
            observe(optimizer, outputs, y)
            F.cross_entropy(outputs, y).backward()
            optimizer.step()
        moved.append({name: (w - start[name]).double() for name, w in weights(model).items()})
    assert max((moved[1][name] - step).norm() / step.norm() for name, step in moved[0].items()) < 0.05


@every_rule
def test_observing_leaves_graph_and_gradients_alone(rule: type) -> None:
    if rule is FOOF:
        return
    model = network()
    optimizer = rule(model)
    x, y = data()
    F.cross_entropy(model(x), y).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    outputs = model(x)
    optimizer.observe(outputs)
    assert same(before, {name: p.grad for name, p in model.named_parameters()})
    F.cross_entropy(outputs, y).backward()
    assert same({k: 2 * v for k, v in before.items()}, {name: p.grad for name, p in model.named_parameters()})
    with pytest.raises(RuntimeError, match=r"has freed the graph .* call observe\(\) before loss.backward\(\)"):
        optimizer.observe(outputs)
    with pytest.raises(RuntimeError, match="the outputs have no autograd graph"):
        optimizer.observe(outputs.detach())


def test_observing_does_nothing_when_no_statistics_are_due() -> None:
    for optimizer in (KFAC(network(), stats_every=3), NaturalGradient(network(), update_every=3)):
        drawn = []
        for index in range(7):
            optimizer.zero_grad()
            x, y = data(index)
            outputs = optimizer.model(x)
            optimizer.observe(outputs)
            F.cross_entropy(outputs, y).backward()
            optimizer.step()
            drawn.append(optimizer.param_groups[0]["draws"])
        assert drawn == [1, 2, 3, 3, 3, 4, 4]


def test_labels_depend_on_seed_and_draw_alone() -> None:
    def run(seed: int, noise: int) -> dict:
        torch.manual_seed(noise)
        torch.rand(noise)
        model = network()
        optimizer = KFAC(model, seed=seed)
        for index in range(3):
            optimizer.zero_grad()
            outputs = model(data(index)[0])
            optimizer.observe(outputs)
            F.cross_entropy(outputs, data(index)[1]).backward()
            optimizer.step()
        return weights(model)

    assert same(run(0, 1), run(0, 2))
    assert not same(run(0, 1), run(1, 1))


# --- groups, frozen layers, fallbacks ---


@every_rule
def test_weight_and_bias_may_be_in_different_groups(rule: type) -> None:
    """The layer is one block; each parameter has its own lr and weight decay."""
    model, plain = network(), network()
    named = dict(model.named_parameters())
    some = [{"params": [p for n, p in named.items() if n.endswith("weight")], "lr": 0.1, "weight_decay": 0.5}]
    some += [{"params": [p for n, p in named.items() if n.endswith("bias")], "lr": 0.2}]
    optimizer, reference = rule(model, params=some), rule(plain, lr=1.0)
    start = weights(plain)
    passes(model, optimizer, 0)
    optimizer.step()
    passes(plain, reference, 0)
    reference.step()
    for name, p in plain.named_parameters():
        lr, decay = (0.1, 0.5) if name.endswith("weight") else (0.2, 0.0)
        expected = start[name] * (1 - lr * decay) + lr * (p.detach() - start[name])
        torch.testing.assert_close(named[name].detach(), expected, rtol=1e-9, atol=1e-12)


FILTERS: dict[str, Any] = {"batch_size": 8, "fisher": "empirical"}
OF_A_LAYER = [
    (FOOF, {}, "damping", (0.1, 1.0)),
    (FOOF, {}, "ema", (0.9, 0.5)),
    (KFAC, {}, "stats_every", (10, 5)),
    (KFAC, {}, "update_every", (100, 50)),
    (NaturalGradient, {"blocks": "layer"}, "damping", (0.1, 1.0)),
    (NaturalGradient, {}, "damping", (0.1, 1.0)),
    (KroneckerFilter, FILTERS, "lr", (1e-2, 1e-3)),
    (KroneckerFilter, FILTERS, "max_lr", (1e-2, 1e-1)),
    (KroneckerFilter, FILTERS, "prior_std", (0.1, 0.2)),
    (KroneckerFilterFP, {**FILTERS, "prior_std": 0.1}, "lr", (1e-2, 1e-3)),
    (KroneckerFilterFP, FILTERS, "prior_std", (math.inf, 0.2)),
    (KroneckerFilterFP, FILTERS, "batch_size", (8, 16)),
    (KroneckerFilterFP, FILTERS, "max_step", (1.0, 2.0)),
]


@pytest.mark.parametrize(("rule", "options", "name", "values"), OF_A_LAYER)
def test_options_of_a_layer_are_the_same_for_weight_and_bias(
    rule: type, options: dict[str, Any], name: str, values: tuple[Any, Any]
) -> None:
    """A layer has one belief: a bias in a group of its own, whose option would not count, is refused."""
    message = (
        f"parameter '0.weight' and parameter '0.bias' are preconditioned together and need the same {name}, got "
        f"{values[0]!r} and {values[1]!r}: set one {name} in their param groups"
    )
    model = network()
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    rest = [p for n, p in model.named_parameters() if n.endswith("weight")]
    optimizer = rule(model, params=[{"params": rest}, {"params": biases}], **options)
    model[0].bias.requires_grad_(False)
    for group in optimizer.param_groups:
        group[name] = values[0]
    passes(model, optimizer, 0)
    optimizer.step()
    before, state = weights(model), states(optimizer)
    optimizer.param_groups[1][name] = values[1]  # during a run, and for a bias that is thawed
    for p in biases:
        p.requires_grad_(p is model[0].bias)
    passes(model, optimizer, 1)
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer.step()
    assert same(weights(model), before)
    assert same(states(optimizer), state)


def test_layers_may_differ_in_their_options() -> None:
    model = network()
    groups = [{"params": model[i].parameters(), "lr": 0.1 + i, "prior_std": 0.1} for i in (0, 2, 4)]
    optimizer = KroneckerFilter(model, params=groups, **FILTERS)
    passes(model, optimizer, 0)
    optimizer.step()


@layerwise_case
def test_frozen_layers_stay_and_may_be_thawed(case: Case) -> None:
    model = network()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    optimizer = case.of(model)
    before = weights(model)
    for index in range(2):
        optimizer.zero_grad()
        passes(model, optimizer, index)
        optimizer.step()
    after = weights(model)
    assert [name for name in before if torch.equal(before[name], after[name])] == ["0.weight", "0.bias", "2.bias"]


@every_rule
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_fallback_is_adam_with_a_rate_that_follows_lr(rule: type, momentum: float) -> None:
    model = network()
    model.register_parameter("scale", nn.Parameter(torch.tensor([0.5, 2.0]).double()))
    with pytest.warns(UserWarning, match=f"{rule.__name__} trains scale by Adam with learning rate") as told:
        optimizer = rule(model, lr=0.1, fallback_lr=0.02, ema=0.9, momentum=momentum)
    assert [one.filename for one in told] == [__file__]
    twin = nn.Parameter(model.scale.detach().clone())
    adam = torch.optim.Adam([twin], lr=0.02, betas=(momentum, 0.9), eps=0.0)
    for step, g in enumerate(([0.3, -1.0], [0.1, 2.0], [1e-3, 1.0])):
        optimizer.zero_grad()
        passes(model, optimizer, step)
        model.scale.grad = torch.tensor(g).double()
        twin.grad = model.scale.grad.clone()
        optimizer.param_groups[0]["lr"], adam.param_groups[0]["lr"] = 0.1 / 2**step, 0.02 / 2**step
        optimizer.step()
        adam.step()
        torch.testing.assert_close(model.scale.detach(), twin.detach(), rtol=1e-12, atol=0)


def test_everything_is_trained_and_named_once() -> None:
    """LayerNorm and BatchNorm in training mode: each is trained, and warned about once. Attention is known."""
    torch.manual_seed(0)
    attention = nn.Sequential(nn.Embedding(7, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0))
    resnet = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8))
    tokens, images = torch.randint(0, 7, (5, 4)), torch.randn(5, 1, 4, 4)
    fallback = {
        (FOOF, "attention"): {"1.norm1.weight", "1.norm1.bias", "1.norm2.weight", "1.norm2.bias"},
        (KFAC, "attention"): {"1.norm1.weight", "1.norm1.bias", "1.norm2.weight", "1.norm2.bias"},
        (NaturalGradient, "attention"): set(),
        (FOOF, "resnet"): {"1.weight", "1.bias"},
        (KFAC, "resnet"): {"1.weight", "1.bias"},
    }
    for (rule, kind), expected in fallback.items():
        model = copy.deepcopy(attention if kind == "attention" else resnet)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer = rule(model)
            for _ in range(2):
                optimizer.zero_grad()
                outputs = model(tokens if kind == "attention" else images)
                observe(optimizer, outputs, None)
                outputs.logsumexp(-1).mean().backward()
                before = weights(model)
                optimizer.step()
                unmoved = [name for name, p in model.named_parameters() if torch.equal(before[name], p)]
                assert not [name for name in unmoved if dict(model.named_parameters())[name].grad.any()], rule
        named = " ".join(str(w.message) for w in caught if f"{rule.__name__} trains" in str(w.message))
        assert named.count("trains") == bool(expected)
        words = set(named.replace(",", "").replace(":", "").split())
        assert words & {name for name, _ in model.named_parameters()} == expected


# --- checkpoints ---


@layerwise_case
def test_state_is_loaded_by_name_whatever_is_wrapped_around_the_model(case: Case) -> None:
    model = network()
    wrapped = nn.DataParallel(model) if not torch.cuda.is_available() else model
    optimizer = case.of(wrapped)
    for index in range(3):
        optimizer.zero_grad()
        passes(model, optimizer, index)
        optimizer.step()
    assert optimizer.param_groups[0]["param_names"][0] == "0.weight"
    saved, start = optimizer.state_dict(), copy.deepcopy(model.state_dict())
    for group in saved["param_groups"]:
        group["param_names"] = [f"module._orig_mod.{name}" for name in group["param_names"]]
    other = network(1)
    other.load_state_dict(start)
    backwards = list(other.parameters())[::-1]
    resumed = case.of(other, params=backwards)
    resumed.load_state_dict(saved)
    for index in range(3, 6):
        for net, opt in ((model, optimizer), (other, resumed)):
            opt.zero_grad()
            passes(net, opt, index)
            opt.step()
    assert same(weights(model), weights(other))


@pytest.mark.parametrize("case", [c for c in LAYERWISE if c.name in ("FOOF", "KFAC")], ids=lambda c: c.name)
def test_state_of_another_model_is_refused_and_nothing_is_lost(case: Case) -> None:
    model = network()
    optimizer = case.of(model)
    passes(model, optimizer, 0)
    optimizer.step()
    known = states(optimizer)
    good = optimizer.state_dict()

    def spoilt(change: Callable) -> dict:
        bad = copy.deepcopy(good)
        change(bad)
        return bad

    for bad, message in (
        (
            spoilt(lambda s: s["param_groups"][0]["param_names"].__setitem__(0, "stem.weight")),
            "see 0.weight, stem.weight",
        ),
        (spoilt(lambda s: s["state"][0].pop("input_moment")), r"has \['input_moment'\], which were not read"),
        (spoilt(lambda s: s["state"][2].update(input_moment=torch.zeros(1, 2, 2))), r"layer '2' has shape \(1, 2, 2\)"),
        ({"state": {}}, "must have 'state' and 'param_groups'"),
        ([], "must be a dict, got list"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(bad)
        assert same(known, states(optimizer))


# --- refusals ---


@every_rule
def test_step_before_any_pass_is_one_clear_error(rule: type) -> None:
    model = network()
    optimizer = rule(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = weights(model)
    with pytest.raises(
        RuntimeError, match=f"(no inputs were recorded for layers|observe\\(\\) was never called).*{rule.__name__}"
    ):
        optimizer.step()
    assert same(before, weights(model))


@every_rule
def test_a_model_may_be_compiled_before(rule: type) -> None:
    model, other = network(), network()
    compiled = torch.compile(model, backend="eager")
    compiled(data()[0])
    optimizer, reference = rule(compiled), rule(other)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        for index in range(3):
            for net, opt in ((compiled, optimizer), (other, reference)):
                opt.zero_grad()
                passes(net, opt, index)
                opt.step()
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10)


@every_rule
def test_parameters_and_models_are_not_confused(rule: type) -> None:
    with pytest.raises(TypeError, match=f"{rule.__name__} takes the model, not its parameters"):
        rule(network().parameters())
    with pytest.raises(ValueError, match=r"params must be parameters of the model, got one of shape \(2,\)"):
        rule(network(), params=[nn.Parameter(torch.zeros(2))])


@every_rule
def test_parameters_that_were_reshaped_or_replaced_are_named(rule: type) -> None:
    model = network()
    optimizer = rule(model)
    passes(model, optimizer, 0)
    optimizer.step()
    optimizer.zero_grad()
    old, model[2] = model[2], nn.Linear(model[2].in_features, model[2].out_features).double()
    passes(model, optimizer, 1)
    words = f"the model no longer has parameter '2.weight', parameter '2.bias', .*build a new {rule.__name__}"
    with pytest.warns(UserWarning, match=words):
        optimizer.step()
    model[2] = old
    old.bias.data = torch.zeros(7, dtype=torch.float64)
    with pytest.raises(ValueError, match=rf"parameter '2.bias' has shape \(7,\), but had .* when {rule.__name__} was"):
        optimizer.step()


def test_a_singular_factor_is_one_clear_error() -> None:
    for rule in (FOOF, KFAC):
        model = network()
        optimizer = rule(model, damping=0.0)
        passes(model, optimizer, 0)
        with pytest.raises(ValueError, match=r"factor of layer '[02]' is singular with damping 0: raise damping"):
            optimizer.step()
    model = network()
    optimizer = KFAC(model, damping=0.0, exact_damping=True)
    passes(model, optimizer, 0)
    with pytest.raises(ValueError, match="Fisher of layer '0' is singular with damping 0"):
        optimizer.step()


def test_natural_gradients_refuse_what_has_no_gradients_of_single_examples() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    with pytest.raises(ValueError, match=r"1 \(BatchNorm1d\) mixes the examples of a batch.*model.eval\(\)"):
        NaturalGradient(model)
    optimizer = NaturalGradient(model.eval())
    model.train()
    with pytest.raises(ValueError, match="mixes the examples"):
        optimizer.observe(model(data()[0]))


def test_batches_of_different_shape_cannot_be_observed_together() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3))
    optimizer = NaturalGradient(model)
    optimizer.observe(model(torch.zeros(2, 5, dtype=torch.long)))
    optimizer.observe(model(torch.zeros(2, 6, dtype=torch.long)))
    model(torch.zeros(2, 5, dtype=torch.long)).logsumexp(-1).mean().backward()
    known = states(optimizer)
    with pytest.raises(ValueError, match="batches that were observed together must have the same shape"):
        optimizer.step()
    assert same(known, states(optimizer))
    with pytest.raises(ValueError, match=r"labels must be whole numbers of shape \(2, 5\)"):
        optimizer.observe(model(torch.zeros(2, 5, dtype=torch.long)), labels=torch.zeros(2, dtype=torch.long))
