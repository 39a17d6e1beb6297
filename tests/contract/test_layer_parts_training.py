"""Training with layers that are known by their parts: checkpoints, copies, transforms, fallbacks, adapters."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from bayesgrad.layers import known_layers
from bayesgrad.layers.call import LayerCall
from bayesgrad.layers.fisher import recorded_layers
from bayesgrad.layers.recorder import LayerRecorder
from bayesgrad.optim import FOOF, KFAC, OGN, VOGN, KroneckerFilter, KroneckerFilterFP, NaturalGradient
from bayesgrad.samplers import SNGD
from layer_models import CLASSES, N, Sequences, Words, build, close


@pytest.fixture(autouse=True)
def _double(request: pytest.FixtureRequest) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def test_second_derivatives() -> None:
    """A penalty on gradients, by torch's own implementation of the recurrent layer."""
    model, x, _ = build("LSTM")
    plain = copy.deepcopy(model)
    recorder = LayerRecorder(model, recorded_layers(model))
    for one in (model, plain):
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(one(inputs).square().sum(), inputs, create_graph=True)
        slope.square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters()):
        close(mine.grad, theirs.grad, 1e-11)
    recorder.close()


@pytest.mark.parametrize("name", ["LSTM, projected", "GRU", "decoder"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations(name: str, reentrant: bool) -> None:
    model, x, y = build(name)
    plain = copy.deepcopy(model)
    calls: list[LayerCall] = []
    recorder = LayerRecorder(model, recorded_layers(model), lambda call: calls.append(call))
    F.cross_entropy(checkpoint(model, x.requires_grad_(), use_reentrant=reentrant), y).backward()
    F.cross_entropy(plain(x), y).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters()):
        close(mine.grad, theirs.grad, 1e-12)
    assert {call.name for call in calls} == set(recorder.layers)
    recorder.close()


@pytest.mark.parametrize("name", ["LSTM", "GRU", "attention", "Bilinear", "EmbeddingBag, sum", "Conv1D"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_and_other_parameters(name: str) -> None:
    """functional_call uses the given tensors and records nothing of them; torch.func sees the plain layers."""
    model, x, y = build(name)
    plain = copy.deepcopy(model)
    calls: list[LayerCall] = []
    recorder = LayerRecorder(model, recorded_layers(model), lambda call: calls.append(call))
    values = {key: (p.detach() + 0.1).requires_grad_() for key, p in model.named_parameters()}
    loss = F.cross_entropy(functional_call(model, values, (x,)), y)
    mine = torch.autograd.grad(loss, list(values.values()))
    theirs = torch.autograd.grad(F.cross_entropy(functional_call(plain, values, (x,)), y), list(values.values()))
    for one, other in zip(mine, theirs):
        close(one, other, 1e-12)
    F.cross_entropy(functional_call(model, values, (x,)), y).backward()
    assert not calls
    if name not in ("LSTM", "GRU"):  # which vmap does not support
        frozen = {key: p.detach() for key, p in model.named_parameters()}
        one = vmap(lambda row: functional_call(model, frozen, (row[None],))[0])(x)
        close(one, plain(x), 1e-12)
        grad(lambda values: functional_call(model, values, (x,)).square().sum())(frozen)
    with torch.no_grad():
        close(model(x), plain(x), 1e-12)
    assert not calls
    recorder.close()


@pytest.mark.parametrize("name", ["LSTM", "attention", "Bilinear", "EmbeddingBag, sum", "Conv1D", "ConvTranspose1d"])
def test_copies_are_plain_models(name: str) -> None:
    model, x, y = build(name)
    keys = list(model.state_dict())
    calls: list[LayerCall] = []
    recorder = LayerRecorder(model, recorded_layers(model), lambda call: calls.append(call))
    copies = [copy.deepcopy(model)]
    if name != "Conv1D":  # its class is not where its name says
        copies.append(pickle.loads(pickle.dumps(model)))
    for one in copies:
        F.cross_entropy(one(x), y).backward()
        assert not calls
        close(one(x), model(x), 1e-12)
        assert list(one.state_dict()) == keys
        LayerRecorder(one, recorded_layers(one), lambda call: calls.append(call)).close()
    assert list(model.state_dict()) == keys
    assert [key for key, _ in model.named_parameters()] == keys
    recorder.close()


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
def test_autocast(kind: str) -> None:
    layer = getattr(nn, kind)(3, 4, batch_first=True).float()
    plain = copy.deepcopy(layer)
    recorder = LayerRecorder(layer, recorded_layers(layer))
    x = torch.randn(2, 5, 3, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)[0].float().square().sum().backward()
    plain(x)[0].square().sum().backward()
    for mine, theirs in zip(layer.parameters(), plain.parameters()):
        assert mine.grad.dtype == torch.float32
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.1, atol=0.05)
    recorder.close()


# --- training ---

RULES: dict[str, Callable[[nn.Module], Any]] = {
    "FOOF": lambda model: FOOF(model),
    "FOOF, backward": lambda model: FOOF(model, precondition="backward"),
    "KFAC": lambda model: KFAC(model),
    "NaturalGradient": lambda model: NaturalGradient(model),
    "KroneckerFilter": lambda model: KroneckerFilter(model, batch_size=N),
    "KroneckerFilterFP": lambda model: KroneckerFilterFP(model, batch_size=N),
    "OGN": lambda model: OGN(model, num_data=N),
    "VOGN": lambda model: VOGN(model, num_data=N, seed=0),
}


def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, steps: int) -> None:
    for _ in range(steps):
        with optimizer.sampled():
            optimizer.zero_grad()
            outputs = model(x)
            loss = F.cross_entropy(outputs, y)
            optimizer.observe(outputs, loss=loss)
            loss.backward()
        optimizer.step()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "name", ["LSTM, two layers, both directions", "decoder", "ConvTranspose1d", "EmbeddingBag, mean"]
)
@pytest.mark.filterwarnings("ignore:.* trains .* by ")
def test_a_resumed_run_is_the_same(rule: str, name: str) -> None:
    model, x, y = build(name)
    optimizer = RULES[rule](model)
    train(model, optimizer, x, y, 3)
    other, _, _ = build(name)
    other.load_state_dict(model.state_dict())
    resumed = RULES[rule](other)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, by in ((model, optimizer), (other, resumed)):
        train(one, by, x, y, 3)
    for mine, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(mine, theirs)


def test_inputs_may_be_overwritten_after_the_backward_pass() -> None:
    x, y, found = torch.randn(1, 2, 12), torch.randint(CLASSES, (1,)), []
    for overwrite in (False, True):
        torch.manual_seed(0)
        model, given = Sequences(nn.GRU(12, 8, batch_first=True)), x.clone()
        optimizer = FOOF(model)
        F.cross_entropy(model(given), y).backward()
        if overwrite:
            given.zero_()
        optimizer.step()
        found.append(list(model.parameters()))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found))


@pytest.mark.parametrize("rule", ["FOOF", "KFAC", "NaturalGradient", "OGN"])
@pytest.mark.parametrize("name", ["LSTM, two layers, both directions", "GRU", "Bilinear", "Conv1D"])
def test_nothing_is_left_to_the_fallback(rule: str, name: str) -> None:
    """Warnings are errors, so none was given."""
    model, x, y = build(name)
    optimizer = RULES[rule](model)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, x, y, 2)
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before))


def test_packed_sequences_are_left_to_the_fallback() -> None:
    """They are not recorded: the gradients are torch's, the warning names the layer, and all is trained."""

    class Packed(Sequences):
        def forward(self, x: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, torch.tensor([4, 4, 3, 2, 1]), batch_first=True)
            return self.head(self.layer(packed)[1][0][-1])

    model, x, y = Packed(nn.LSTM(3, 4, batch_first=True)), torch.randn(N, 4, 3), torch.randint(CLASSES, (N,))
    optimizer = FOOF(model)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.warns(UserWarning, match=r"FOOF trains layer.weight_ih_l0, .* by Adam"):
        train(model, optimizer, x, y, 1)
    train(model, optimizer, x, y, 1)
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before))


def test_a_frozen_projection_is_skipped() -> None:
    model, x, y = build("LSTM")
    model.layer.weight_hh_l0.requires_grad_(False)
    model.layer.bias_hh_l0.requires_grad_(False)
    plain = copy.deepcopy(model)
    calls: list[LayerCall] = []
    recorder = LayerRecorder(model, recorded_layers(model), lambda call: calls.append(call))
    for one in (model, plain):
        F.cross_entropy(one(x), y).backward()
    assert {call.name for call in calls} == {"layer.ih_l0", "head"}
    for mine, theirs in zip(model.parameters(), plain.parameters()):
        if mine.requires_grad:
            close(mine.grad, theirs.grad, 1e-12)
        else:
            assert mine.grad is None
    recorder.close()


def test_a_layer_that_is_pruned_later_is_trained_by_the_fallback() -> None:
    model, x, y = build("GRU")
    plain = copy.deepcopy(model)
    optimizer = FOOF(model)
    for one in (model, plain):
        prune.l1_unstructured(one.layer, "weight_hh_l0", 0.5)
    F.cross_entropy(plain(x), y).backward()
    F.cross_entropy(model(x), y).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters()):
        close(mine.grad, theirs.grad, 1e-12)
    with pytest.warns(UserWarning, match=r"FOOF trains layer\.weight_ih_l0"):
        optimizer.step()


class Last(nn.Module):
    """A recurrent layer or attention, without its state or weights."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(*(x,) * (3 if isinstance(self.layer, nn.MultiheadAttention) else 1))[0]


class Sizes(nn.Module):
    """Attention to keys of another size than queries, whose three biases are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 2, kdim=3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x[..., :3], x)[0]


BIASES: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "Linear": (lambda: nn.Linear(4, 4), "", "bias"),
    "Conv": (lambda: nn.Conv1d(3, 3, 1), "", "bias"),
    "LayerNorm": (lambda: nn.LayerNorm(4), "", "bias"),
    "BatchNorm": (lambda: nn.BatchNorm1d(3), "", "bias"),
    "LSTM": (lambda: Last(nn.LSTM(4, 4, batch_first=True)), "layer", "bias_ih_l0"),
    "attention in": (lambda: Last(nn.MultiheadAttention(4, 2, batch_first=True)), "layer", "in_proj_bias"),
    "attention out": (lambda: Last(nn.MultiheadAttention(4, 2, batch_first=True)), "layer.out_proj", "bias"),
    "attention sizes": (lambda: Sizes(), "layer", "in_proj_bias"),
}
DERIVED: dict[str, Callable[[nn.Module, str], Any]] = {
    "pruned": lambda module, name: prune.l1_unstructured(module, name, 2),
    "parametrised": lambda module, name: parametrize.register_parametrization(module, name, nn.Tanh()),
}


@pytest.mark.parametrize("layer", list(BIASES))
@pytest.mark.parametrize(("how", "when"), [*product(("pruned", "parametrised"), ("before", "after"))])
@pytest.mark.parametrize("rule", [FOOF, OGN])
def test_a_bias_that_is_computed_stays_in_the_forward_pass(layer: str, how: str, when: str, rule: Any) -> None:
    """Outputs and gradients are those of the same model without an optimizer, and the fallback trains the layer."""
    build, path, name = BIASES[layer]
    model = nn.Sequential(build(), nn.Flatten(), nn.Linear(12, CLASSES))
    nn.init.normal_(getattr(model[0].get_submodule(path), name), 1.0)
    plain = copy.deepcopy(model)
    x, y = torch.randn(N, 3, 4), torch.arange(N) % CLASSES
    options: Any = {} if rule is FOOF else {"num_data": 100}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer = rule(model, **options) if when == "after" else None
        for one in (model, plain):
            DERIVED[how](one[0].get_submodule(path), name)
        optimizer = optimizer or rule(model, **options)
        for one in (plain, model):
            outputs = one(x)
            F.cross_entropy(outputs, y).backward()
        close(outputs, plain(x), 1e-12)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            close(mine.grad, theirs.grad, 1e-12)
        optimizer.step()
    assert any("trains" in str(one.message) for one in told)


def test_a_bias_that_is_a_buffer_stays_in_the_forward_pass() -> None:
    layer, x = nn.Linear(4, 2), torch.randn(N, 4)
    del layer.bias
    layer.register_buffer("bias", torch.tensor([1.0, 2.0]))
    with pytest.warns(UserWarning, match="FOOF trains weight"):
        optimizer = FOOF(layer)
    close(layer(x), x @ layer.weight.T + layer.bias, 1e-12)
    optimizer.zero_grad()


def test_names_of_parts() -> None:
    def names(model: nn.Module) -> list[str]:
        return [name for name, _ in known_layers(model)]

    assert names(nn.LSTM(2, 3, proj_size=1)) == ["", "ih_l0", "hh_l0", "hr_l0"]
    assert names(nn.Sequential(nn.GRU(2, 3, bidirectional=True))) == [
        "", "0", "0.ih_l0", "0.hh_l0", "0.ih_l0_reverse", "0.hh_l0_reverse",
    ]  # fmt: skip
    assert names(nn.MultiheadAttention(4, 2)) == ["", "in_proj", "out_proj", "out_proj"]
    other_sizes = nn.MultiheadAttention(4, 2, kdim=3)
    assert [name for name in names(other_sizes) if name] == ["q_proj", "k_proj", "v_proj", "out_proj", "out_proj"]
    for unknown in (nn.MultiheadAttention(4, 2, add_zero_attn=True), nn.EmbeddingBag(3, 2, mode="max")):
        assert len(names(unknown)) == len(list(unknown.modules()))

    class Other(nn.LSTM):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[0]

    assert names(Other(2, 3)) == [""]


@pytest.mark.filterwarnings("ignore:lr=.* samples at temperature")
def test_corrections_of_samplers_refuse_parts_by_name() -> None:
    """They run the model inside of torch.func and read layers there, where parts are not called."""
    model, x, y = build("LSTM")
    sampler = SNGD(model, 1e-3, num_data=N, batch_size=N, metric="kronecker", damping=0.1, correction="flat")
    outputs = model(x)
    sampler.observe(outputs)
    F.cross_entropy(outputs, y).backward()
    with pytest.raises(ValueError, match=r"supports parameters of Linear and Conv layers, got layer\."):
        sampler.step()


# --- tied weights and adapters ---


def test_a_tied_table_is_trained_by_the_fallback_with_one_warning() -> None:
    """Its two uses have different factors, so that FOOF and KFAC train it by Adam; exact rules know both uses."""
    for rule in ("FOOF", "KFAC", "KroneckerFilterFP"):
        model, x, y = Words(), torch.randint(6, (N, 3)), torch.randint(6, (N,))
        with pytest.warns(UserWarning, match=r"trains table\.weight, head\.bias by"):
            optimizer = RULES[rule](model)
        before = model.table.weight.detach().clone()
        train(model, optimizer, x, y, 3)  # a second warning would be an error
        assert not torch.equal(before, model.table.weight)
        assert "input_moment" not in optimizer.state[model.table.weight]
        assert "input_moment" in optimizer.state[model.inner.weight]


class LoRA(nn.Module):
    """As peft's adapter of a Linear layer: plain Linear layers beside a frozen one."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2.0 * self.lora_B["default"](self.lora_A["default"](x))


@pytest.mark.parametrize("rule", RULES)
def test_adapters(rule: str) -> None:
    """The layers of adapters are found, the frozen one is not recorded, and gradients are exact."""
    model = nn.Sequential(LoRA(nn.Linear(4, 6), 2), nn.Tanh(), LoRA(nn.Linear(6, CLASSES), 2))
    x, y = torch.randn(N, 4), torch.randint(CLASSES, (N,))
    assert set(recorded_layers(model)) == {f"{i}.lora_{side}.default" for i, side in product((0, 2), "AB")}
    optimizer = RULES[rule](model)
    frozen = [p.detach().clone() for p in model.parameters() if not p.requires_grad]
    before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    train(model, optimizer, x, y, 2)
    assert all(torch.equal(p, old) for p, old in zip((p for p in model.parameters() if not p.requires_grad), frozen))
    assert not any(torch.equal(p, old) for p, old in zip((p for p in model.parameters() if p.requires_grad), before))


# --- torch.compile ---


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["attention", "decoder", "Bilinear", "EmbeddingBag, mean", "ConvTranspose1d", "LSTM"])
def test_compiled_models_train_as_eager_ones(name: str) -> None:
    """In one graph, but for recurrent layers, which torch.compile does not trace by default."""
    model, x, y = build(name)
    other = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, and those of fallbacks
        optimizer, reference = FOOF(model), FOOF(other)
        compiled = torch.compile(model, fullgraph=name != "LSTM", backend="aot_eager")
        train(compiled, optimizer, x, y, 3)
        train(other, reference, x, y, 3)
    for mine, theirs in zip(model.parameters(), other.parameters()):
        close(mine, theirs)
        assert optimizer.state[mine].keys() == reference.state[theirs].keys()
    torch.compiler.reset()


class Tagger(nn.Module):
    """Has outputs, and so losses, at each position of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")  # the compiler's own, and those of fallbacks
def test_losses_of_positions_are_counted_in_models_with_recurrent_layers_that_are_compiled() -> None:
    results = []
    for compiled in (False, True):
        model = Tagger().double()
        optimizer = FOOF(model, stats_every=1, update_every=1)
        net = torch.compile(model, backend="aot_eager") if compiled else model
        for _ in range(3):
            x, y = torch.randn(8, 4, 5).double(), torch.randint(0, 3, (8, 4))
            optimizer.zero_grad()
            F.cross_entropy(net(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()
        results.append(list(model.parameters()))
    torch.compiler.reset()
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)
