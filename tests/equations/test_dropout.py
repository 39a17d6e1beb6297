"""SpikeSlab: against a transcription, torch's optimizers, and the enumeration of all masks."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from bayesgrad.optim import SpikeSlab
from bayesgrad.posterior import ConcreteDropout, DropoutPosterior, Posterior, mc_dropout
from bayesgrad.posterior.units import Units, units_of
from cases import diagonals, same, states, weights

D = torch.float64
every_update = pytest.mark.parametrize("update", ["adam", "rmsprop", "newton"])


def network(seed: int = 0, first: int = 4, second: int = 5) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(3, first), nn.Tanh(), nn.Linear(first, second), nn.Tanh(), nn.Linear(second, 2)]
    return nn.Sequential(*layers).to(D)


def data(index: int = 0, n: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randn(n, 3, generator=generator, dtype=D), torch.randint(0, 2, (n,), generator=generator)


def loss_of(model: Callable[[Tensor], Tensor], index: int = 0) -> Tensor:
    x, y = data(index)
    return nn.functional.cross_entropy(model(x), y)


def take(model: nn.Module, optimizer: SpikeSlab, index: int, masks=None) -> None:
    optimizer.zero_grad()
    with optimizer.sampled(masks):
        loss = loss_of(model, index)
        optimizer.observe(loss=loss)
        loss.backward()
    optimizer.step()


class Single(nn.Module):
    """A loss that is a function of the two weights of a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False).to(D)
        with torch.no_grad():
            self.layer.weight.copy_(torch.tensor([[0.7, -1.2]], dtype=D))

    def forward(self) -> Tensor:
        w = self.layer.weight[0]
        return torch.sin(2 * w[0]) + w[1] ** 3 + w[0] * w[1] * 2


# --- the rule ---


def test_the_gradient_of_the_toy_is_unbiased_for_the_slabs() -> None:
    """(1/pi_1) E[z grad] = E[grad | z = 1], the target (-1.100, 5.16) of the corrected equations, by all four masks."""
    model, keep = Single(), 0.6
    optimizer = SpikeSlab(model, keep=keep, drop_inputs=True)
    total = torch.zeros(1, 2, dtype=D)
    for z in itertools.product([0.0, 1.0], repeat=2):
        optimizer.zero_grad()
        with optimizer.sampled({model.layer.weight: torch.tensor(z)}):
            model().backward()
        total += math.prod(keep if b else 1 - keep for b in z) * model.layer.weight.grad
    assert torch.allclose(total, torch.tensor([[-1.1000657141995178, 5.16]], dtype=D), rtol=1e-12)


def test_gradient_and_hessian_of_a_network_are_those_with_the_unit_there() -> None:
    """E[g] and E[h] over all 2^5 masks, against the average over masks that keep the weight's own unit."""
    model = network(first=2, second=3)
    keep = {"2": 0.7, "4": 0.4}
    optimizer = SpikeSlab(model, keep=keep, update="newton", hessian="exact")
    first, second = model[2].weight, model[4].weight
    seen = {p: [torch.zeros_like(p), torch.zeros_like(p)] for p in (first, second)}
    wanted = {p: [torch.zeros_like(p), torch.zeros_like(p)] for p in (first, second)}
    for bits in itertools.product([0.0, 1.0], repeat=5):
        masks = {first: torch.tensor(bits[:2], dtype=D), second: torch.tensor(bits[2:], dtype=D)}
        chance = math.prod(
            (keep["2"] if i < 2 else keep["4"]) if b else 1 - (keep["2"] if i < 2 else keep["4"])
            for i, b in enumerate(bits)
        )
        optimizer.zero_grad()
        with optimizer.sampled(masks):
            loss = loss_of(model)
            optimizer.observe(loss=loss)
            loss.backward()
        dropped = {"2.weight": first.detach() * masks[first], "4.weight": second.detach() * masks[second]}
        dropped = {name: w.requires_grad_() for name, w in dropped.items()}
        loss = loss_of(lambda x: functional_call(model, dropped, (x,)))  # noqa: B023
        gradients = torch.autograd.grad(loss, list(dropped.values()), create_graph=True)
        for (p, k), w, gradient in zip(((first, 0.7), (second, 0.4)), dropped.values(), gradients):
            hessian = torch.stack([torch.autograd.grad(g, w, retain_graph=True)[0] for g in gradient.flatten()])
            diagonal = hessian.flatten(1).diagonal().view_as(w)
            there = masks[p] / k  # the probability of the other units
            for sums, values in zip(wanted[p], (gradient.detach(), diagonal)):
                sums += chance * there * values
            seen[p][0] += chance * p.grad
            seen[p][1] += chance * diagonals(optimizer)[p]
    for p in (first, second):
        for a, b in zip(seen[p], wanted[p]):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@every_update
def test_steps_are_those_of_a_transcription(update: str) -> None:
    """Six steps with injected masks, gradients and Hessians by torch.func at z*m."""
    model = network()
    keep, lr, b1, b2, eps = 0.6, 0.05, 0.8, 0.9, 1e-3
    betas = (b1, b2)
    optimizer = SpikeSlab(model, lr, keep=keep, update=update, betas=betas, eps=eps, hess_init=0.3, hessian="exact")
    m = {name: p.detach().clone() for name, p in model.named_parameters()}
    s = {name: torch.full_like(p, 0.3 if update == "newton" else 0.0) for name, p in m.items()}
    average = {name: torch.zeros_like(p) for name, p in m.items()}
    generator = torch.Generator().manual_seed(5)
    for t in range(1, 7):
        z = {
            name: (torch.rand(m[name].shape[1], generator=generator) < keep).to(D) for name in ("2.weight", "4.weight")
        }
        take(model, optimizer, t, {p: z[name] for name, p in model.named_parameters() if name in z})

        factor = {name: z.get(name, torch.ones(1, dtype=D)) for name in m}
        pi = {name: keep if name in z else 1.0 for name in m}

        def through(slab: dict[str, Tensor], t: int = t, factor: dict = factor) -> Tensor:
            dropped = {name: w * factor[name] for name, w in slab.items()}
            return loss_of(lambda x: functional_call(model, dropped, (x,)), t)

        gradient = torch.func.grad(through)(m)
        hessian = jacrev(jacrev(through))(m)
        for name in m:
            g = gradient[name] / pi[name]
            size = m[name].numel()
            h = hessian[name][name].reshape(size, size).diagonal().view_as(m[name]) / pi[name]
            if update == "newton":
                s[name] = (1 - lr) * s[name] + lr * h.abs()
                scale = s[name] + eps
            else:
                s[name] = b2 * s[name] + (1 - b2) * g**2
                scale = (s[name] / (1 - b2**t if update == "adam" else 1.0)).sqrt() + eps
            average[name] = b1 * average[name] + (1 - b1) * g
            m[name] = m[name] - lr * average[name] / (1 - b1**t) / scale
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), m[name], rtol=1e-10, atol=1e-10)


def test_without_dropping_it_is_adam_rmsprop_and_newton() -> None:
    for update, make in (
        ("adam", lambda params: torch.optim.Adam(params, 0.01)),
        ("rmsprop", lambda params: torch.optim.RMSprop(params, 0.01)),
    ):
        model, other = network(), network()
        optimizer, peer = SpikeSlab(model, 0.01, keep=1.0, update=update), make(other.parameters())
        for index in range(10):
            take(model, optimizer, index)
            peer.zero_grad()
            loss_of(other, index).backward()
            peer.step()
        for p, q in zip(model.parameters(), other.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10)
    # Newton's method with rate 1 and no momentum ends at the minimum of a separable quadratic in one step.
    layer = nn.Linear(5, 1, bias=False).to(D)
    optimizer = SpikeSlab(layer, 1.0, keep=1.0, update="newton", betas=(0.0, 0.0), eps=0.0, hessian="exact")
    curvature = torch.arange(1, 6, dtype=D)
    with optimizer.sampled():
        loss = (curvature * (layer.weight - 3) ** 2).sum()
        optimizer.observe(loss=loss)
        loss.backward()
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), torch.full((1, 5), 3.0, dtype=D), rtol=1e-12, atol=0)


def test_hutchinson_is_unbiased_and_exact_for_a_diagonal_hessian() -> None:
    layer = nn.Linear(5, 1, bias=False).to(D)
    optimizer = SpikeSlab(layer, keep=0.5, drop_inputs=True, update="newton")
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0], dtype=D)
    curvature = torch.arange(1, 6, dtype=D)
    with optimizer.sampled({layer.weight: mask}):
        optimizer.observe(loss=(curvature * layer.weight**2).sum())
    torch.testing.assert_close(
        diagonals(optimizer)[layer.weight], 2 * curvature * mask / 0.5 * torch.ones(1, 1, dtype=D)
    )
    torch.manual_seed(0)
    root = torch.randn(5, 5, dtype=D)
    full = root @ root.T
    optimizer = SpikeSlab(layer, keep=0.5, drop_inputs=True, update="newton", probes=400)
    with optimizer.sampled(lambda p: torch.ones(5)):
        optimizer.observe(loss=0.5 * layer.weight[0] @ full @ layer.weight[0])
    error = diagonals(optimizer)[layer.weight][0] - full.diagonal() / 0.5
    spread = 2 * ((full**2).sum(1) - full.diagonal() ** 2).sqrt() / math.sqrt(400)
    assert bool((error.abs() < 5 * spread).all())


def test_newton_needs_second_derivatives() -> None:
    model = network()
    optimizer = SpikeSlab(model, update="newton")
    with optimizer.sampled():
        loss_of(model).backward()
    with pytest.raises(RuntimeError, match=r"call optimizer.observe\(loss=loss\)"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"call observe\(loss=loss\) inside"):
        optimizer.observe(loss=loss_of(model))


# --- masks ---


def test_a_mask_drops_what_a_unit_sends_in_layers_of_every_kind() -> None:
    """Zero weights are the same as zero inputs, in Linear, grouped and transposed convolutions."""
    torch.manual_seed(0)
    cases = [
        (nn.Linear(6, 4, bias=False), torch.randn(3, 6), -1),
        (nn.Conv1d(6, 4, 3, bias=False), torch.randn(3, 6, 8), 1),
        (nn.Conv2d(6, 4, 3, groups=2, bias=False), torch.randn(3, 6, 5, 5), 1),
        (nn.Conv2d(6, 12, 3, groups=6, bias=False), torch.randn(3, 6, 5, 5), 1),
        (nn.ConvTranspose2d(6, 4, 3, groups=2, bias=False), torch.randn(3, 6, 5, 5), 1),
    ]
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    for layer, x, dim in cases:
        optimizer = SpikeSlab(layer, keep=0.5, drop_inputs=True)
        shape = [1] * x.dim()
        shape[dim] = 6
        expected = layer(x * mask.view(shape))
        with optimizer.sampled({layer.weight: mask}):
            torch.testing.assert_close(layer(x), expected)


def test_masks_are_functions_of_seed_draw_and_position_and_have_the_right_mean() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(20_000, 1, bias=False)
    nn.init.ones_(layer.weight)
    state = torch.get_rng_state()
    masks = []
    for seed in (0, 0, 1):
        optimizer = SpikeSlab(layer, keep=0.3, drop_inputs=True, seed=seed)
        for _ in range(2):
            with optimizer.sampled():
                masks.append(layer.weight.detach().clone())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(masks[0], masks[2])
    for a, b in itertools.combinations([masks[0], masks[1], masks[4], masks[5]], 2):
        assert abs((a * b).mean().item() - 0.09) < 5 * math.sqrt(0.09 * 0.91 / 20_000)
    for mask in masks:
        assert abs(mask.mean().item() - 0.3) < 5 * math.sqrt(0.21 / 20_000)
        assert set(mask.unique().tolist()) == {0.0, 1.0}


def test_the_first_layer_biases_and_shared_weights_are_not_dropped() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.hidden, self.out = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)
            self.middle = nn.Linear(4, 4)
            self.out.weight = self.embed.weight

    model = Tied()
    before = weights(model)
    for options, dropped in (
        ({}, {"middle.weight"}),
        ({"drop_inputs": True}, {"hidden.weight", "middle.weight"}),
        ({"keep": {"hidden": 1e-6}}, {"hidden.weight"}),
    ):
        optimizer = SpikeSlab(model, **{"keep": 1e-6, **options})
        with optimizer.sampled():
            assert {name for name, p in model.named_parameters() if bool((p == 0).all())} == dropped
            assert same(
                {k: v for k, v in before.items() if k not in dropped},
                {k: v for k, v in weights(model).items() if k not in dropped},
            )
        assert set(optimizer.posterior(model).keep) == dropped
        assert same(before, weights(model))


# --- the contract of sampled() ---


def test_weights_are_back_whatever_happens() -> None:
    model = network()
    optimizer = SpikeSlab(model, keep=0.5)
    before = weights(model)
    with pytest.raises(IndexError), optimizer.sampled():  # a batch with one label too many
        nn.functional.cross_entropy(model(data()[0]), torch.full((7,), 2)).backward()
    assert same(before, weights(model))
    assert all(not p._backward_hooks for p in model.parameters())
    with pytest.raises(ValueError, match=r"the mask of .* must have shape"), optimizer.sampled(lambda p: torch.ones(3)):
        pass
    assert same(before, weights(model))
    with optimizer.sampled():
        with pytest.raises(RuntimeError, match="already active"), optimizer.sampled():
            pass
        assert not same(before, weights(model))
    assert same(before, weights(model))


def test_a_look_without_gradients_leaves_no_trace() -> None:
    model, other = network(), network()
    optimizer, plain = SpikeSlab(model, keep=0.5), SpikeSlab(other, keep=0.5)
    for index in range(3):
        with torch.no_grad(), optimizer.sampled():
            loss_of(model, index)
        take(model, optimizer, index)
        take(other, plain, index)
    assert same(weights(model), weights(other))
    assert optimizer.state_dict()["param_groups"] == plain.state_dict()["param_groups"]


@every_update
def test_resumes_bit_for_bit(update: str, tmp_path: Path) -> None:
    model = network()
    optimizer = SpikeSlab(model, keep={"2": 0.5, "4": 0.7}, update=update, seed=3)
    for index in range(3):
        take(model, optimizer, index)
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "run.pt")
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    other = network(1)
    resumed = SpikeSlab(other, update=update)
    for target, saved in zip((other, resumed), torch.load(tmp_path / "run.pt", weights_only=True)):
        target.load_state_dict(saved)
    for index in range(3, 6):
        for net, opt in ((model, optimizer), (other, resumed), (twin, twin_optimizer)):
            take(net, opt, index)
    assert same(weights(model), weights(other))
    assert same(weights(model), weights(twin))
    assert same(states(optimizer), states(resumed))


def test_frozen_parameters_are_neither_dropped_nor_updated_and_leave_the_masks_of_others_alone() -> None:
    model = network()
    optimizer = SpikeSlab(model, keep=0.5)
    reference = SpikeSlab(network(), keep=0.5)
    model[2].weight.requires_grad_(False)
    frozen = model[2].weight.detach().clone()
    with optimizer.sampled(), reference.sampled():
        assert torch.equal(model[2].weight, frozen)
        assert torch.equal(model[4].weight == 0, reference.model[4].weight == 0)
        loss_of(model).backward()
    optimizer.step()
    assert torch.equal(model[2].weight, frozen)
    assert not optimizer.state.get(model[2].weight)
    assert set(optimizer.posterior(model).keep) == {"4.weight"}


@every_update
def test_what_is_frozen_after_it_was_trained_is_dropped_and_evaluated_as_before(update: str) -> None:
    """Layer 2 alone, or all: masks are those of a run without frozen layers, and so are weights to evaluate with."""
    for frozen in ("2", ""):
        model, reference = network(), network()
        optimizer, peer = (SpikeSlab(net, keep=0.5, update=update, seed=0) for net in (model, reference))
        for index in range(2):
            take(model, optimizer, index)
            take(reference, peer, index)
        model.get_submodule(frozen).requires_grad_(False)
        kept = model[2].weight.detach().clone()
        with optimizer.sampled(), peer.sampled():
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters()))
            assert bool((model[2].weight == 0).any())
        if frozen:
            take(model, optimizer, 2)
        assert torch.equal(model[2].weight, kept)
        optimizer.eval()
        assert torch.equal(model[2].weight, 0.5 * kept)
        assert set(optimizer.posterior(model).keep) == {"2.weight", "4.weight"}
        optimizer.train()
        assert torch.equal(model[2].weight, kept)


@pytest.mark.filterwarnings("ignore:the model's BatchNorm")
def test_a_posterior_in_evaluation_mode_is_that_of_training_and_leaves_the_model_alone() -> None:
    """Weights and estimated statistics stay; weights that were loaded since are those of the posterior."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).to(D)
    optimizer = SpikeSlab(model, keep=0.8, seed=0)
    for index in range(3):
        take(model, optimizer, index)
    expected = optimizer.posterior(model)
    former = model[1].running_mean.clone()
    optimizer.eval(model, statistics=data()[0])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = optimizer.posterior(model)
    assert same(found.slab, expected.slab)
    assert same(found.keep, expected.keep)
    assert not torch.equal(model[1].running_mean, former)
    assert same(before, model.state_dict())
    with torch.no_grad():
        model[3].weight.fill_(3)
    assert same(optimizer.posterior(model).slab, expected.slab | {"3.weight": torch.full((2, 6), 3, dtype=D)})
    with pytest.warns(UserWarning, match="was changed since eval"):
        optimizer.train()
    assert torch.equal(model[1].running_mean, former)


def test_several_draws_add_up_and_clipping_acts_on_what_the_step_sees() -> None:
    """Two draws by hand, by a closure, and by gradients through explicit masks, then clipped."""
    masks = [lambda p, s=s: (torch.arange(p.shape[1]) % 2 == s).to(D) for s in (0, 1)]
    model, other = network(), network()
    optimizer, peer = SpikeSlab(model, keep=0.5), torch.optim.Adam(other.parameters())
    for index in range(3):
        optimizer.zero_grad()
        peer.zero_grad()
        for mask in masks:
            with optimizer.sampled(mask):
                (loss_of(model, index) / 2).backward()
            held = {f"{i}.weight": other[i].weight * mask(other[i].weight) for i in (2, 4)}
            (loss_of(lambda x: functional_call(other, held, (x,)), index) / 2).backward()  # noqa: B023
        for i in (2, 4):
            other[i].weight.grad /= 0.5
        for net in (model, other):
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        peer.step()
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)

    model, other = network(), network()
    for update in ("adam", "newton"):
        optimizer = SpikeSlab(model, keep=0.5, samples=3, update=update, hessian="exact")
        by_hand = SpikeSlab(other, keep=0.5, update=update, hessian="exact")

        def closure(optimizer: SpikeSlab = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            optimizer.observe(loss=loss)
            loss.backward()
            return loss

        optimizer.step(closure)
        for _ in range(3):
            with by_hand.sampled():
                loss = loss_of(other) / 3
                by_hand.observe(loss=loss)
                loss.backward()
        by_hand.step()
        by_hand.zero_grad()
        for p, q in zip(model.parameters(), other.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_gradients_outside_of_the_context_are_refused() -> None:
    model = network()
    optimizer = SpikeSlab(model)
    loss_of(model).backward()
    before = weights(model)
    with pytest.raises(RuntimeError, match="was not computed at sampled weights"):
        optimizer.step()
    assert same(before, weights(model))
    with optimizer.sampled():
        optimizer.zero_grad()
    optimizer.zero_grad()
    with pytest.raises(TypeError, match="takes the model, not its parameters"):
        SpikeSlab(model.parameters())


# --- posteriors ---


def enumerated(posterior: DropoutPosterior, outputs: Callable[[dict[str, Tensor]], Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and variance of some outputs over all masks."""
    names = list(posterior.keep)
    sizes = [len(posterior.keep[name]) for name in names]
    keep = torch.cat([posterior.keep[name] for name in names])
    total = square = 0.0
    for bits in itertools.product([0.0, 1.0], repeat=sum(sizes)):
        z = torch.tensor(bits, dtype=D)
        chance = torch.where(z > 0, keep, 1 - keep).prod()
        value = outputs(posterior._masked(dict(zip(names, z.split(sizes)))))
        total, square = total + chance * value, square + chance * value**2
    return total, square - total**2


def test_moments_and_predictions_are_those_over_all_masks() -> None:
    model = network()
    posterior = SpikeSlab(model, keep={"2": 0.7, "4": 0.4}).posterior(model)
    for name in model.state_dict():
        mean, variance = enumerated(posterior, lambda w: w[name])  # noqa: B023
        torch.testing.assert_close(posterior.mean[name], mean)
        torch.testing.assert_close(posterior.variance()[name], variance, rtol=1e-10, atol=1e-14)
    x, _ = data()
    mean, variance = enumerated(posterior, lambda w: functional_call(model, w, (x,)))
    _, of_squares = enumerated(posterior, lambda w: (functional_call(model, w, (x,)) - mean) ** 2)
    found = posterior.predict(x, samples=1000, likelihood="gaussian")
    assert bool(((found.mean - mean).abs() < 5 * (variance / 1000).sqrt()).all())
    assert bool(((found.variance - variance).abs() < 5 * (of_squares / 1000).sqrt() + variance / 1000).all())
    flat = nn.Linear(3, 2).to(D)  # for which the linearisation is exact, with correlations within a column
    posterior = SpikeSlab(flat, keep=0.3, drop_inputs=True).posterior(flat)
    mean, variance = enumerated(posterior, lambda w: functional_call(flat, w, (x,)))
    found = posterior.predict(x, method="linear", likelihood="gaussian")
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(found.variance, variance)
    found = posterior.predict(x, method="mean", likelihood="gaussian")
    torch.testing.assert_close(found.mean, functional_call(flat, posterior.mean, (x,)))


def test_a_dropout_posterior_is_saved_and_read(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Conv1d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 2))
    posterior = SpikeSlab(model, keep=0.5).posterior(model)
    posterior.save(tmp_path / "posterior.safetensors")
    again = Posterior.load(tmp_path / "posterior.safetensors", model)
    assert isinstance(again, DropoutPosterior)
    x = torch.randn(5, 2, 8)
    assert torch.equal(posterior.predict(x), again.predict(x))
    assert same(posterior.sample(3), again.sample(3))
    draw = again.sample(200)["1.weight"]
    dropped = (draw == 0).all(dim=3)  # (draws, out, units of a group)
    assert torch.equal(dropped[:, 0], dropped[:, 1])
    assert not torch.equal(dropped[:, 0], dropped[:, 2])
    with pytest.raises(ValueError, match="scale must be 1"):
        SpikeSlab(model).posterior(model, scale=2.0)
    with pytest.raises(ValueError, match="but there are 4 units"):
        DropoutPosterior({"w": torch.ones(1, 4)}, {"w": torch.ones(3)}, {"w": Units(1)})


def test_dropout_modules_give_predictions_that_leave_no_trace() -> None:
    """For one Dropout before a Linear layer: mean W x, variance sum_j (W_j x_j)^2 p/(1-p)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Linear(6, 2))
    model[0].running_mean.normal_()
    x = torch.randn(3, 6)
    posterior = mc_dropout(model, seed=1)
    state, buffers = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    model.train()
    model[1].eval()
    found = posterior.predict(x, samples=1000, likelihood="gaussian")
    assert [module.training for module in model] == [True, False, True]
    assert torch.equal(torch.get_rng_state(), state)
    assert same(buffers, model.state_dict())
    again = mc_dropout(model, seed=1).predict(x, samples=1000, likelihood="gaussian")
    assert torch.equal(found.mean, again.mean)
    model.eval()
    expected = model(x)
    parts = ((model[0](x)[:, None] * model[2].weight) ** 2).detach()
    variance = parts.sum(2) * 0.4 / 0.6
    fourth = 3 * variance**2 + (parts**2).sum(2) * 0.4 / 0.6**3 * (1 - 6 * 0.4 * 0.6)  # cumulants add up
    assert bool(((found.mean - expected).abs() < 5 * (variance / 1000).sqrt()).all())
    error = ((fourth - variance**2) / 1000).sqrt()
    assert bool(((found.variance - variance).abs() < 5 * error + variance / 1000).all())
    torch.testing.assert_close(posterior.predict(x, method="mean", likelihood="gaussian").mean, expected.detach())
    with posterior.sampled(seed=4):
        one = model(x)
    with posterior.sampled(seed=4):
        assert torch.equal(one, model(x))
    assert not torch.equal(one, expected)
    with pytest.raises(ValueError, match="no dropout module"):
        mc_dropout(nn.Sequential(nn.Dropout(0.0), nn.Linear(2, 2)))


def test_attention_drops_in_an_encoder_too() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True).eval()
    found = mc_dropout(model).predict(torch.randn(2, 3, 8), samples=4, likelihood="gaussian")
    assert bool((found.variance > 0).all())
    assert not any(module.training for module in model.modules())


# --- learning what to keep ---


def test_the_relaxed_mask_and_its_gradient() -> None:
    dropout = ConcreteDropout(0.7, seed=5, dtype=D)
    x = torch.randn(50, 200, dtype=D)
    dropout.given_key = (1, 2)
    mask = dropout.mask(x)
    (found,) = torch.autograd.grad(mask.sum(), dropout.logit)
    torch.testing.assert_close(found, (mask * (1 - mask) / 0.1).sum(), rtol=1e-12, atol=0)

    def outputs(logit: Tensor) -> Tensor:
        return functional_call(dropout, {"logit": logit}, (x[:2, :5],))

    assert torch.autograd.gradcheck(outputs, dropout.logit.detach().clone().requires_grad_())
    hard = (mask > 0.5).to(D).mean()  # log u - log(1-u) > -logit(keep) has probability keep, at any temperature
    assert abs(hard.item() - 0.7) < 5 * math.sqrt(0.21 / mask.numel())


def test_masks_of_a_module_follow_seed_and_count_and_are_shared_along_positions() -> None:
    x = torch.ones(4, 6, 5)
    first, second = ConcreteDropout(0.5, dim=1, seed=1), ConcreteDropout(0.5, dim=1, seed=1)
    a, b = first(x), first(x)
    assert not torch.equal(a, b)
    assert torch.equal(a, second(x))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x), second(x))
    assert torch.equal(a, a[:, :, :1].expand_as(a))
    assert first.eval()(x) is x
    model = nn.Sequential(nn.Linear(3, 8), ConcreteDropout(0.5), nn.Linear(8, 2))
    before = copy.deepcopy(model.state_dict())
    found = mc_dropout(model).predict(torch.randn(5, 3), samples=8, likelihood="gaussian")
    assert bool((found.variance > 0).all())
    assert same(before, model.state_dict())


def test_the_penalty_is_the_divergence_but_for_a_constant() -> None:
    """KL of pi N(m, s^2) + (1-pi) N(0, s^2) from N(0, 1/lambda), by quadrature; c = (lambda s^2 - 1 - log(...))/2."""
    s, precision = 0.01, 2.5
    for keep, m in ((0.9, 1.3), (0.4, -0.7), (0.6, 0.2)):
        points = torch.cat([centre + s * torch.linspace(-9, 9, 20_001, dtype=D) for centre in (0.0, m)])
        cell = torch.full_like(points, s * 18 / 20_000)
        normal = lambda x, mean, sd: torch.exp(-0.5 * ((x - mean) / sd) ** 2) / (sd * math.sqrt(2 * math.pi))  # noqa: E731
        q = keep * normal(points, m, s) + (1 - keep) * normal(points, 0.0, s)
        prior = normal(points, 0.0, precision**-0.5)
        exact = (cell * q * (q.log() - prior.log())).sum()
        layer = nn.Linear(1, 1, bias=False).to(D)
        nn.init.constant_(layer.weight, keep * m)
        found = 100 * ConcreteDropout(keep, dtype=D).penalty(layer, num_data=100, prior_precision=precision)
        constant = (precision * s**2 - 1 - math.log(precision * s**2)) / 2
        torch.testing.assert_close(found.detach(), exact - constant, rtol=1e-8, atol=1e-8)
    with pytest.raises(TypeError, match="got ReLU"):
        ConcreteDropout().penalty(nn.ReLU(), 10)
    assert units_of(nn.Conv2d(6, 4, 3, groups=2)).count(torch.Size([4, 3, 3, 3])) == 6


def test_more_data_are_kept_more_of() -> None:
    """Regression with known noise: the learnt keep is near the minimum of the bound, which is known in closed form.

    The expected squared error of hard masks is (y - W x)^2 + sum_j x_j^2 W_j^2 (1-pi)/pi.
    """
    features, noise = 8, 2.0
    learnt = []
    for n in (4, 20, 100):
        generator = torch.Generator().manual_seed(0)
        truth = torch.randn(features, generator=generator)
        x = torch.randn(n, features, generator=generator)
        y = x @ truth + noise * torch.randn(n, generator=generator)
        ends = []
        for exact in (False, True):
            dropout, layer = ConcreteDropout(0.5), nn.Linear(features, 1, bias=False)
            nn.init.zeros_(layer.weight)
            optimizer = torch.optim.Adam([*dropout.parameters(), *layer.parameters()], lr=0.06)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
            for _ in range(300):
                optimizer.zero_grad()
                error = (layer(x if exact else dropout(x))[:, 0] - y).square()
                if exact:
                    error = error + (x * layer.weight).square().sum(1) * (1 - dropout.keep) / dropout.keep
                (error.mean() / (2 * noise**2) + dropout.penalty(layer, num_data=n)).backward()
                optimizer.step()
                scheduler.step()
            ends.append(dropout.keep.item())
        assert abs(ends[0] - ends[1]) < 0.05
        learnt.append(ends[0])
    assert learnt[0] + 0.05 < learnt[1] < learnt[2] - 0.05
