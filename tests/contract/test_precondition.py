"""Both places to precondition gradients, against the gradient of torch.func and dense products with the factors."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bayesgrad.optim import FOOF, KFAC, KroneckerFilterFP

CLASSES, BATCH = 3, 8


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


class Network(nn.Module):
    """Layers in sequence, of which the second is called twice on request."""

    def __init__(self, *layers: nn.Module, twice: bool = False, checkpoints: bool | None = None) -> None:
        super().__init__()
        self.layers, self.twice, self.checkpoints = nn.Sequential(*layers), twice, checkpoints

    def run(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if self.twice and index == 2:
                x = layer(torch.tanh(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoints is None:
            return self.run(x)
        x = x.requires_grad_() if self.checkpoints else x
        return checkpoint(self.run, x, use_reentrant=self.checkpoints)  # pyright: ignore[reportReturnType]


def mlp(**options: Any) -> Network:
    inplace = options.pop("inplace", False)
    relu = nn.ReLU(inplace=inplace)
    return Network(nn.Linear(5, 20), relu, nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, CLASSES), **options)


def cnn(**options: Any) -> Network:
    conv = nn.Conv2d(2, 4, 3, **options)
    return Network(conv, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES))


def images(n: int) -> Tensor:
    return torch.randn(n, 2, 7, 6)


VECTORS: Callable[[int], Tensor] = lambda n: torch.randn(n, 5)  # noqa: E731
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "plain": (mlp, VECTORS),
    "in place": (lambda: mlp(inplace=True), VECTORS),
    "repeated calls": (lambda: mlp(twice=True), VECTORS),
    "checkpoint": (lambda: mlp(checkpoints=False), VECTORS),
    "reentrant checkpoint": (lambda: mlp(checkpoints=True), VECTORS),
    "convolution": (lambda: cnn(padding=1), images),
    "strides": (lambda: cnn(stride=2, dilation=2, padding=(2, 1)), images),
    "groups": (lambda: cnn(groups=2, bias=False), images),
    "circular": (lambda: cnn(padding=1, padding_mode="circular"), images),
    "same": (
        lambda: Network(nn.Conv1d(5, 3, 2, padding="same"), nn.Flatten(), nn.Linear(12, CLASSES)),
        lambda n: torch.randn(n, 5, 4),
    ),
    "embedding": (
        lambda: Network(nn.Embedding(9, 6, padding_idx=2), nn.Flatten(), nn.Linear(24, CLASSES)),
        lambda n: torch.randint(9, (n, 4)),
    ),
    "sequence": (
        lambda: Network(nn.Linear(5, 6), nn.Tanh(), nn.Flatten(), nn.Linear(24, CLASSES)),
        lambda n: torch.randn(n, 4, 5),
    ),
}
RULES: dict[str, Callable[..., Any]] = {
    "FOOF": lambda m, **k: FOOF(m, lr=0.1, damping=0.3, stats_every=1, **{"max_norm": math.inf, **k}),
    "KFAC": lambda m, **k: KFAC(m, lr=0.1, damping=0.3, stats_every=1, **{"max_norm": math.inf, **k}),
    "KroneckerFilterFP": lambda m, **k: KroneckerFilterFP(
        m,
        lr=0.01,
        batch_size=BATCH,
        stats_every=1,
        fisher="empirical",
        **{"max_step": math.inf, "momentum": 0.0, **k},
    ),
}


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """By torch.func, of a copy of the model that nothing records."""
    twin = copy.deepcopy(model)
    if isinstance(twin, Network):
        twin.checkpoints = None
    params = {name: p.detach() for name, p in twin.named_parameters()}

    def loss(params: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(twin, params, (x,)), y)

    return torch.func.grad(loss)(params)


def factors(optimizer: Any, layer: Any) -> tuple[Tensor | None, Tensor | None]:
    entry = optimizer.state.get(layer.owner, {})
    kind = "root" if isinstance(optimizer, KroneckerFilterFP) else "inverse"
    sides = [entry.get(f"{side}_{kind}") for side in ("input", "error")]
    sides = [None if side is None else torch.diag_embed(side) if side.dim() == 2 else side.clone() for side in sides]
    left, right = sides if layer.lookup else sides[::-1]
    return left, right


def solved(layer: Any, names: dict[int, str], gradient: dict[str, Tensor], sides: tuple) -> dict[str, Tensor]:
    """L G R, by dense products."""
    groups, fan_out, _ = layer.shape
    matrix = torch.cat([gradient[names[id(p)]].reshape(groups, fan_out, -1) for p in layer.members], -1)
    left, right = sides
    matrix = matrix if left is None else left @ matrix
    matrix = matrix if right is None else matrix @ right
    parts = matrix.split([p.numel() // (groups * fan_out) for p in layer.members], -1)
    return {names[id(p)]: part.reshape(p.shape) for p, part in zip(layer.members, parts)}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("place", ["step", "backward"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_multiplied_by_the_factors(name: str, rule: str, place: str, micro: int) -> None:
    if name == "reentrant checkpoint" and rule == "KFAC":
        pytest.skip("observe() refuses it, see test_layers")
    torch.manual_seed(0)
    make, data = MODELS[name]
    model = make()
    optimizer = RULES[rule](model, precondition=place)
    names = {id(p): name for name, p in model.named_parameters()}
    known = optimizer.preconditioner.recorded.layers
    assert {id(p) for layer in known for p in layer.members} == set(names)
    scale = 0.01 * math.sqrt(BATCH) if rule == "KroneckerFilterFP" else 0.1
    for step in range(4):
        x, y = data(BATCH), torch.randint(CLASSES, (BATCH,))
        wanted = gradients(model, x, y)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        sides = {layer: factors(optimizer, layer) for layer in known}
        optimizer.zero_grad()
        for part in range(micro):
            outputs = model(x[part::micro])
            optimizer.observe(outputs)
            (F.cross_entropy(outputs, y[part::micro]) / micro).backward()
        if place == "backward":
            for layer in known:
                expected = solved(layer, names, wanted, sides[layer])
                for p in layer.members:
                    torch.testing.assert_close(p.grad, expected[names[id(p)]], rtol=1e-10, atol=1e-10)
        optimizer.step()
        if place == "step" or step == 0:
            sides = {layer: factors(optimizer, layer) for layer in known}
        for layer in known:
            expected = solved(layer, names, wanted, sides[layer])
            for p in layer.members:
                moved = (before[names[id(p)]] - p.detach()) / scale
                torch.testing.assert_close(moved, expected[names[id(p)]], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("place", ["step", "backward"])
@pytest.mark.parametrize("rule", RULES)
def test_under_autocast_within_its_rounding(rule: str, place: str) -> None:
    torch.manual_seed(0)
    model = mlp().float()
    optimizer = RULES[rule](model, precondition=place, update_every=1)
    names = {id(p): name for name, p in model.named_parameters()}
    scale = 0.01 * math.sqrt(BATCH) if rule == "KroneckerFilterFP" else 0.1
    for step in range(3):
        x, y = VECTORS(BATCH).float(), torch.randint(CLASSES, (BATCH,))
        before = copy.deepcopy(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            F.cross_entropy(before(x), y).backward()
        gradient: dict[str, Any] = {name: p.grad for name, p in before.named_parameters()}
        sides = {layer: factors(optimizer, layer) for layer in optimizer.preconditioner.recorded.layers}
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(x)
            loss = F.cross_entropy(outputs, y)
        optimizer.observe(outputs)
        loss.backward()
        optimizer.step()
        for layer, old in sides.items():
            left, right = old if place == "backward" and step else factors(optimizer, layer)
            expected = solved(layer, names, gradient, (left, right))
            size = math.prod(1 if s is None else float(torch.linalg.matrix_norm(s, 2)) for s in (left, right))
            size *= math.sqrt(sum(float(gradient[names[id(p)]].square().sum()) for p in layer.members))
            for p in layer.members:
                assert p.dtype == torch.float32
                moved = (before.get_parameter(names[id(p)]) - p).detach() / scale
                assert float((moved - expected[names[id(p)]]).norm()) < 4 * 2**-8 * size


@pytest.mark.parametrize("place", ["step", "backward"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("rule", ["FOOF", "KFAC"])
def test_a_model_compiled_in_one_graph_gives_the_eager_numbers(rule: str, backend: str, place: str) -> None:
    torch.manual_seed(0)
    model, other = mlp(inplace=True, twice=True), mlp(inplace=True, twice=True)
    other.load_state_dict(model.state_dict())
    optimizer = RULES[rule](model, precondition=place, update_every=2)
    reference = RULES[rule](other, precondition=place, update_every=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        for _ in range(4):
            x, y = torch.randn(BATCH, 5), torch.randint(CLASSES, (BATCH,))
            for net, opt in ((compiled, optimizer), (other, reference)):
                opt.zero_grad()
                outputs = net(x)
                opt.observe(outputs)
                F.cross_entropy(outputs, y).backward()
                opt.step()
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("place", ["step", "backward"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["plain", "repeated calls", "convolution", "groups", "embedding"])
def test_steps_are_bounded_alike_in_both_places(name: str, rule: str, place: str, momentum: float) -> None:
    """By sqrt(d·g) over all layers, or by the root mean square of d in each layer."""
    torch.manual_seed(0)
    make, data = MODELS[name]
    model = make()
    limit = 0.01
    bound = {"max_step": limit} if rule == "KroneckerFilterFP" else {"max_norm": limit}
    optimizer = RULES[rule](model, precondition=place, **bound, momentum=momentum)
    names = {id(p): name for name, p in model.named_parameters()}
    known = optimizer.preconditioner.recorded.layers
    scale = 0.01 * math.sqrt(BATCH) if rule == "KroneckerFilterFP" else 0.1
    for step in range(3):
        x, y = data(BATCH), torch.randint(CLASSES, (BATCH,))
        wanted = gradients(model, x, y)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        sides = {layer: factors(optimizer, layer) for layer in known}
        old = {p: optimizer.state[p]["momentum"].clone() for p in optimizer.state if "momentum" in optimizer.state[p]}
        optimizer.zero_grad()
        outputs = model(x)
        optimizer.observe(outputs)
        F.cross_entropy(outputs, y).backward()
        optimizer.step()
        if place == "step" or step == 0:
            sides = {layer: factors(optimizer, layer) for layer in known}
        found = {layer: solved(layer, names, wanted, sides[layer]) for layer in known}
        square = sum(float((d * wanted[name]).sum()) for own in found.values() for name, d in own.items())
        assert square > limit**2
        for layer, own in found.items():
            size = math.sqrt(sum(float(d.square().sum()) for d in own.values()) / sum(d.numel() for d in own.values()))
            factor = limit / math.sqrt(square)
            if rule == "KroneckerFilterFP":
                factor = min(1.0, limit / math.sqrt(BATCH) / size)
            elif name == "repeated calls" and place == "backward" and step:  # the sum of norms is an upper bound
                p, exact = layer.members[0], factor
                fresh = optimizer.state[p]["momentum"] - momentum * old[p] if momentum else before[names[id(p)]] - p
                fresh = fresh.detach() / (1 if momentum else scale)
                factor = float((fresh * own[names[id(p)]]).sum() / own[names[id(p)]].square().sum())
                assert 0.3 * exact < factor <= exact * (1 + 1e-9)
            for p in layer.members if not momentum else ():
                moved = (before[names[id(p)]] - p.detach()) / scale
                torch.testing.assert_close(moved, factor * own[names[id(p)]], rtol=1e-7, atol=1e-9)
            for p in layer.members if momentum and rule != "KroneckerFilterFP" and old else ():
                wanted_momentum = momentum * old[p] + factor * own[names[id(p)]]
                torch.testing.assert_close(optimizer.state[p]["momentum"], wanted_momentum, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("place", ["step", "backward"])
@pytest.mark.parametrize("rule", RULES)
def test_a_scaled_loss_and_discarded_passes_change_no_bound(rule: str, place: str) -> None:
    torch.manual_seed(0)
    model, other = mlp(), mlp()
    other.load_state_dict(model.state_dict())
    bound = {"max_step": 0.01} if rule == "KroneckerFilterFP" else {"max_norm": 0.01}
    optimizer, reference = (RULES[rule](net, precondition=place, **bound) for net in (model, other))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(3):
        x, y = VECTORS(BATCH), torch.randint(CLASSES, (BATCH,))
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            p.grad = None  # without the optimizer's knowledge
        outputs = model(x)
        optimizer.observe(outputs)
        scaler.scale(F.cross_entropy(outputs, y)).backward()
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
        reference.zero_grad()
        outputs = other(x)
        reference.observe(outputs)
        F.cross_entropy(outputs, y).backward()
        reference.step()
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)


@pytest.mark.filterwarnings(r"ignore:Using backward\(\) with create_graph=True")
def test_gradients_with_derivatives_are_preconditioned_in_the_step() -> None:
    """Derivatives of a preconditioned gradient would not be those of the loss; later gradients are preconditioned."""
    model = mlp()
    optimizer = FOOF(model, precondition="backward")
    for create_graph in (False, True, False):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(VECTORS(BATCH)), torch.zeros(BATCH, dtype=torch.long))
        expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward(create_graph=create_graph)
        found = [p.grad.detach() for p in model.parameters()]  # pyright: ignore[reportOptionalMemberAccess]
        raw = all(torch.allclose(one, other) for one, other in zip(found, expected))
        assert raw == (create_graph or not optimizer.state)
        for p, value in zip(model.parameters(), found):
            p.grad = value
        optimizer.step()


def test_second_derivatives_pass_through_recorded_layers() -> None:
    torch.manual_seed(0)
    for name in ("plain", "convolution", "embedding"):
        make, data = MODELS[name]
        model = make()
        twin = copy.deepcopy(model)
        optimizer = FOOF(model)
        x, y = data(BATCH), torch.randint(CLASSES, (BATCH,))
        found = []
        for net in (model, twin):
            grads = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()), create_graph=True)
            square = sum(g.square().sum() for g in grads)
            found.append(torch.autograd.grad(square, list(net.parameters())))  # pyright: ignore
        torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)
        assert not optimizer.preconditioner.from_passes


@pytest.mark.parametrize("rule", [FOOF, KFAC, KroneckerFilterFP])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_in_the_backward_pass_after_the_model_was_cast(rule: Any, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Factors are cast before the backward pass reads them; the run is that of one dtype, but for rounding."""

    def run(*kinds: torch.dtype) -> Tensor:
        torch.manual_seed(0)
        model = mlp()
        options = {"batch_size": BATCH} if rule is KroneckerFilterFP else {}
        optimizer = rule(model, precondition="backward", **options, **({} if rule is FOOF else {"seed": 0}))
        for kind in kinds:
            model.to(kind)
            for _ in range(4):
                optimizer.zero_grad()
                outputs = model(torch.randn(BATCH, 5).to(kind))
                optimizer.observe(outputs)
                F.cross_entropy(outputs, torch.randint(0, CLASSES, (BATCH,))).backward()
                optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).detach().double()

    torch.testing.assert_close(run(*dtypes), run(torch.float64, torch.float64), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rule", [FOOF, KFAC])
@pytest.mark.parametrize("place", ["step", "backward"])
@pytest.mark.parametrize("steps", [3, 5])  # when statistics of the other layers are not due, and when they are
def test_a_layer_that_is_unfrozen_is_preconditioned_from_then_on(rule: Any, place: str, steps: int) -> None:
    torch.manual_seed(0)
    model = mlp()
    first = model.layers[0]
    assert isinstance(first, nn.Linear)
    first.requires_grad_(False)
    optimizer = rule(model, precondition=place, **({} if rule is FOOF else {"seed": 0}))

    def step() -> None:
        optimizer.zero_grad()
        outputs = model(torch.randn(BATCH, 5))
        optimizer.observe(outputs)
        F.cross_entropy(outputs, torch.randint(0, CLASSES, (BATCH,))).backward()
        optimizer.step()

    for _ in range(steps):
        step()
    first.requires_grad_(True)
    for _ in range(2):
        before = first.weight.detach().clone()
        step()  # a warning that the layer is not supported would be an error
        assert not torch.equal(first.weight, before)
        assert "input_inverse" in optimizer.state[first.weight]


@pytest.mark.parametrize("rule", [FOOF, KFAC, KroneckerFilterFP])
@pytest.mark.parametrize("thawed", [False, True])
def test_the_backward_pass_does_not_use_the_factors_of_other_parameters_of_a_layer(rule: Any, thawed: bool) -> None:
    """A bias is thawed, or frozen, so that the layer begins anew: that step is the one of a copy with place "step"."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, CLASSES))
    x, y = torch.randn(BATCH, 4), torch.randint(0, CLASSES, (BATCH,))
    options: Any = {"batch_size": BATCH, "momentum": 0.0} if rule is KroneckerFilterFP else {"max_norm": math.inf}

    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        outputs = model(x)
        optimizer.observe(outputs, labels=y)
        F.cross_entropy(outputs, y).backward()
        optimizer.step()

    model[2].bias.requires_grad_(not thawed)
    optimizer = rule(model, precondition="backward", **options)
    step(model, optimizer)
    model[2].bias.requires_grad_(thawed)
    model[2].bias.grad = None
    other = copy.deepcopy(model)
    step(model, optimizer)
    step(other, rule(other, **options))
    for p, q in zip(model[2].parameters(), other[2].parameters()):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("part", ["weight", "bias"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["plain", "repeated calls", "convolution", "groups", "embedding"])
def test_parameters_of_a_layer_that_another_optimizer_has_get_their_own_gradients(
    name: str, rule: str, part: str
) -> None:
    """Those of `params=` are preconditioned in the backward pass; the others had no gradient after the first step."""
    torch.manual_seed(0)
    make, data = MODELS[name]
    model = make()
    optimizer = RULES[rule](model, params=[p for n, p in model.named_parameters() if n.endswith(part)])
    for group in optimizer.param_groups:
        group["precondition"] = "backward"
    for _ in range(3):
        x, y = data(BATCH), torch.randint(CLASSES, (BATCH,))
        wanted = gradients(model, x, y)
        model.zero_grad()
        outputs = model(x)
        optimizer.observe(outputs)
        F.cross_entropy(outputs, y).backward()
        for other, p in model.named_parameters():
            if not other.endswith(part):
                torch.testing.assert_close(p.grad, wanted[other], rtol=1e-10, atol=1e-12)
        optimizer.step()


def test_a_bias_that_layers_share_is_trained_beside_gradients_of_the_backward_pass() -> None:
    """It belongs to no layer, and takes the fallback."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, CLASSES))
    model[2].bias = model[0].bias
    with pytest.warns(UserWarning, match=r"FOOF trains 0\.bias by Adam"):
        optimizer = FOOF(model, lr=0.1, precondition="backward")
    for _ in range(3):
        x, y = torch.randn(BATCH, 4), torch.randint(CLASSES, (BATCH,))
        wanted = gradients(model, x, y)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        torch.testing.assert_close(model[0].bias.grad, wanted["0.bias"], rtol=1e-10, atol=1e-12)
        optimizer.step()


@pytest.mark.parametrize("place", ["step", "backward"])
def test_two_optimizers_of_a_layer_do_not_precondition_it_in_the_backward_pass(place: str) -> None:
    """As one that is not used any more, and that a scheduler keeps."""
    torch.manual_seed(0)
    model = mlp()
    x, y = VECTORS(BATCH), torch.randint(CLASSES, (BATCH,))

    def step(optimizer: Any) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    old = FOOF(model, lr=0.1, precondition="backward")
    schedule = torch.optim.lr_scheduler.StepLR(old, 1)
    for _ in range(2):
        step(old)
    old = FOOF(model, lr=0.1, precondition=place)
    with pytest.raises(RuntimeError, match=r"two optimizers have the weight .* schedulers that refer to it"):
        step(old)
    del schedule
    step(old)
