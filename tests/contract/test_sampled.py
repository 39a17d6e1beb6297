"""The contract of `sampled()`: one test for each sentence of its documentation."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesgrad.optim import IVON, VOGN
from cases import CASES, Case, batch, same, small_model, states, train, weights

pytestmark = pytest.mark.filterwarnings("ignore:.* trains .* by ")
MAKERS = {
    "IVON": lambda model, **options: IVON(model.named_parameters(), 0.1, num_data=1000, **options),
    "VOGN": lambda model, **options: VOGN(model, 0.1, num_data=1000, **options),
}
each = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def loss(model: nn.Module, index: int = 0, part: slice = slice(None)) -> torch.Tensor:
    x, y = batch(index, next(model.parameters()).dtype)
    return F.cross_entropy(model(x[part]), y[part])


@each
def test_weights_differ_inside_and_are_the_mean_again_outside(make) -> None:
    model = small_model()
    optimizer, before = make(model), weights(small_model())
    with optimizer.sampled():
        inside = weights(model)
        assert all(bool((inside[name] != before[name]).all()) for name in before)
    assert same(before, weights(model))

    def fail() -> None:
        with optimizer.sampled():
            loss(model).backward()
            raise KeyError("the user's own")

    with pytest.raises(KeyError, match="own"):
        fail()
    assert same(before, weights(model))


@each
def test_a_context_is_a_draw_and_a_nested_one_is_refused(make) -> None:
    model = small_model()
    optimizer = make(model)
    draws = []
    for _ in range(2):
        with optimizer.sampled():
            draws.append(weights(model))
    assert not same(*draws)
    with optimizer.sampled(), pytest.raises(RuntimeError, match="already active"), optimizer.sampled():
        pass


@each
def test_micro_batches_inside_hold_the_draw(make) -> None:
    model, other = small_model(torch.float64), small_model(torch.float64)
    optimizer, whole = make(model), make(other)
    for index in range(3):
        optimizer.zero_grad()
        with optimizer.sampled():
            for part in range(4):
                (loss(model, index, slice(part, None, 4)) / 4).backward()
        optimizer.step()
        with whole.sampled():
            whole.zero_grad()
            loss(other, index).backward()
        whole.step()
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_a_context_inside_the_loop_draws_anew_and_hessians_add_up() -> None:
    model = small_model(torch.float64)
    optimizer = IVON(model.parameters(), 0.0, num_data=1000, betas=(0.0, 0.9))
    params, expected = list(model.parameters()), {}
    start, sd2 = weights(model), 1 / (1000 * (1 + 1e-3))
    optimizer.zero_grad()
    total = {p: torch.zeros_like(p) for p in params}
    for part in range(4):
        with optimizer.sampled():
            inside = weights(model)
            before = {p: torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params}
            (loss(model, 0, slice(part, None, 4)) / 4).backward()
        for name, p in model.named_parameters():
            total[p] += (p.grad - before[p]) * (inside[name] - start[name]) / sd2
    optimizer.step()
    for p in params:
        h, wd = total[p], 1e-3
        expected = 0.9 * 1.0 + 0.1 * h + 0.5 * 0.01 * (1.0 - h) ** 2 / (1 + wd)
        torch.testing.assert_close(1 / optimizer.state[p]["variance"], expected + wd, rtol=1e-8, atol=0)


@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize("how", ["norm", "value", "scaler"])
def test_clipping_and_unscaling_act_on_mean_and_hessian_alike(how: str, draws: int) -> None:
    model, other = small_model(torch.float64), small_model(torch.float64)
    optimizer = IVON(model.parameters(), 0.1, num_data=1000, betas=(0.0, 0.9))
    reference = IVON(other.parameters(), 0.1, num_data=1000, betas=(0.0, 0.9))
    scale = 1024.0 if how == "scaler" else 1.0
    for k in range(draws):
        with optimizer.sampled():
            (scale * loss(model, k) / draws).backward()
        with reference.sampled():
            (loss(other, k) / draws).backward()
    if how == "norm":
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    elif how == "value":
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    else:
        for p in model.parameters():
            p.grad.div_(scale)
    # By hand: the sum over draws, times the factor that each element of the gradient was multiplied by.
    evidence = reference.sources[0].collect([], [list(other.parameters())])
    for p, q in zip(model.parameters(), other.parameters()):
        factor = torch.where(q.grad == 0, 0.0, p.grad / q.grad)
        product = evidence["product"][q] if draws > 1 else q.grad * evidence["offset"][q]
        h, wd = product * factor * 1000 * (1 + 1e-3), 1e-3
        reference.state[q]["expected"] = 0.9 + 0.1 * h + 0.005 * (1 - h) ** 2 / (1 + wd) + wd
    optimizer.step()
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(
            1 / optimizer.state[p]["variance"], reference.state[q]["expected"], rtol=1e-8, atol=0
        )


@each
def test_zero_grad_may_stand_inside_or_outside(make) -> None:
    ends = []
    for inside in (True, False):
        model = small_model()
        optimizer = make(model)
        for index in range(3):
            if not inside:
                optimizer.zero_grad(set_to_none=index != 1)
            with optimizer.sampled():
                if inside:
                    optimizer.zero_grad(set_to_none=index != 1)
                loss(model, index).backward()
            optimizer.step()
        ends.append((weights(model), states(optimizer)))
    assert same(ends[0][0], ends[1][0])
    assert same(ends[0][1], ends[1][1])


def test_zero_grad_forgets_draws() -> None:
    model, other = small_model(), small_model()
    optimizer, plain = MAKERS["IVON"](model), MAKERS["IVON"](other)
    with optimizer.sampled():
        loss(model, 7).backward()
    optimizer.zero_grad()
    plain.param_groups[0]["draws"] = 1
    for one, network in ((optimizer, model), (plain, other)):
        with one.sampled():
            loss(network).backward()
        one.step()
    assert same(weights(model), weights(other))


@each
def test_under_no_grad_a_draw_leaves_no_trace(make) -> None:
    model, other = small_model(), small_model()
    optimizer, plain = make(model), make(other)
    for index in range(3):
        seen = []
        for _ in range(3):
            with torch.no_grad(), optimizer.sampled():
                seen.append(model(batch(0)[0]))
        assert not torch.equal(seen[0], seen[1])
        train(model, optimizer, range(index, index + 1))
        train(other, plain, range(index, index + 1))
    assert same(weights(model), weights(other))
    assert same(states(optimizer), states(plain))


@each
def test_frozen_parameters_are_never_perturbed_and_those_without_gradient_stay(make) -> None:
    model = small_model()
    model.wide.requires_grad_(False)
    optimizer, before = make(model), weights(model)
    with optimizer.sampled():
        assert torch.equal(model.wide.weight, before["wide.weight"])
        assert not torch.equal(model.out.weight, before["out.weight"])
        loss(model).backward()
    model.conv.weight.grad = None
    optimizer.step()
    after = weights(model)
    for name in ("wide.weight", "wide.bias", "conv.weight"):
        assert torch.equal(after[name], before[name])
    assert not torch.equal(after["out.weight"], before["out.weight"])
    assert "wide.weight" not in optimizer.posterior(model).mean
    model.wide.requires_grad_(True)
    train(model, optimizer, range(1, 3))
    assert not torch.equal(weights(model)["wide.weight"], before["wide.weight"])


@each
def test_noise_is_part_of_what_is_resumed(make) -> None:
    model = small_model()
    optimizer = make(model)
    train(model, optimizer, range(3))
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    train(model, optimizer, range(3, 6))
    other = small_model(seed=1)
    resumed = make(other, seed=5)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(other, resumed, range(3, 6))
    assert same(weights(model), weights(other))
    assert same(states(optimizer), states(resumed))


@each
def test_the_global_generator_is_left_alone_and_seeds_matter(make) -> None:
    models = [small_model() for _ in range(3)]
    state = torch.get_rng_state()
    ends = []
    for seed, model in zip((0, 0, 1), models):
        train(model, make(model, seed=seed), range(2))
        ends.append(weights(model))
    assert torch.equal(state, torch.get_rng_state())
    assert same(ends[0], ends[1])
    assert not same(ends[0], ends[2])


@each
def test_gradients_at_the_mean_are_refused(make) -> None:
    model = small_model()
    optimizer, before = make(model), weights(model)
    loss(model).backward()
    with pytest.raises(RuntimeError, match=r"not computed at sampled weights: run forward and backward passes inside"):
        optimizer.step()
    assert same(before, weights(model))


@each
def test_a_backward_pass_after_the_context_is_an_error_of_autograd(make) -> None:
    model = nn.Sequential(nn.Linear(40, 1000), nn.ReLU(), nn.Linear(1000, 3))
    optimizer = make(model)
    with optimizer.sampled():
        late = loss(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


@each
def test_a_closure_is_averaged_over_draws(make) -> None:
    model = nn.Sequential(nn.Linear(40, 900), nn.Tanh(), nn.Linear(900, 3)).double()
    other = copy.deepcopy(model)
    optimizer, plain = make(model, samples=3), make(other)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        return value

    value = optimizer.step(closure)
    by_hand = []
    for _ in range(3):
        with plain.sampled():
            one = loss(other) / 3
            one.backward()
        by_hand.append(one.item())
    plain.step()
    assert value.item() == pytest.approx(sum(by_hand), rel=1e-12)
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_several_groups_and_dtypes_draw_by_their_own_settings() -> None:
    model = nn.Sequential(nn.Linear(40, 1000), nn.Linear(1000, 3))
    model[1].double()
    groups = [
        {"params": list(model[0].parameters()), "hess_init": 100.0},
        {"params": list(model[1].parameters()), "num_data": 10},
    ]
    optimizer = IVON(groups, num_data=1000)
    before = weights(model)
    with torch.no_grad(), optimizer.sampled():
        after = weights(model)
    for name, expected in (("0.weight", 1 / (1000 * 100 + 1)), ("1.weight", 1 / (10 * 1 + 1))):
        change = (after[name] - before[name]).double()
        error = (2 / change.numel()) ** 0.5  # relative standard error of a variance estimate
        assert change.var().item() == pytest.approx(expected, rel=5 * error)
    assert after["1.weight"].dtype == torch.float64


def test_batch_norm_statistics_are_frozen_or_estimated_anew_in_prediction() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    x = torch.randn(64, 5, dtype=torch.float64)
    optimizer = VOGN(model, num_data=64)
    for _ in range(5):
        with optimizer.sampled():
            optimizer.zero_grad()
            F.cross_entropy(model(x), torch.arange(64) % 3).backward()
        optimizer.step()
    posterior, buffers = optimizer.posterior(model), copy.deepcopy(dict(model.named_buffers()))
    frozen = posterior.predict(x[:4], samples=3, statistics="running")
    anew = posterior.predict(x[:4], samples=3, statistics=x)
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert model[1].momentum == 0.1
    assert model.training
    by_hand = []
    for k in range(3):
        other = copy.deepcopy(model)
        generators = posterior._generators(3, posterior.seed)
        draw = list(posterior._draw(generators))[k]
        other.load_state_dict({**other.state_dict(), **draw})
        hidden = other[0](x).detach()
        other[1].running_mean.copy_(hidden.mean(0))
        other[1].running_var.copy_(hidden.var(0))
        by_hand.append(other.eval()(x[:4]).softmax(1).detach())
    torch.testing.assert_close(anew, torch.stack(by_hand).mean(0), rtol=1e-10, atol=1e-12)
    assert not torch.allclose(anew, frozen)


DRAWING = [case for case in CASES if case.of(nn.Linear(2, 2)).needs.draws]
drawing_case = pytest.mark.parametrize("case", DRAWING, ids=lambda case: case.name)
NEEDS_MEAN = {
    "step()": lambda model, optimizer, saved: optimizer.step(),
    "posterior()": lambda model, optimizer, saved: optimizer.posterior(model),
    "state_dict()": lambda model, optimizer, saved: optimizer.state_dict(),
    "load_state_dict()": lambda model, optimizer, saved: optimizer.load_state_dict(saved),
    "a copy": lambda model, optimizer, saved: copy.deepcopy((model, optimizer)),
    "a copy ": lambda model, optimizer, saved: pickle.dumps(optimizer),
    "eval()": lambda model, optimizer, saved: optimizer.eval(),
    "add_param_group()": lambda model, optimizer, saved: optimizer.add_param_group({"params": []}),
}


@drawing_case
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_what_needs_the_mean_is_refused_inside_and_changes_nothing(case: Case, grad: bool) -> None:
    """Each of them would use, or save beside the model, the sample; run until the end, the loop goes on as without."""
    ends = []
    for tries in (False, True):
        model = nn.Sequential(nn.Linear(40, 20), nn.Linear(20, 3))
        model.load_state_dict({name: torch.linspace(-1, 1, p.numel()).view_as(p) for name, p in weights(model).items()})
        optimizer = case.of(model)
        train(model, optimizer, range(2))
        saved = optimizer.state_dict()
        with torch.set_grad_enabled(grad), optimizer.sampled():
            for what, call in NEEDS_MEAN.items() if tries else ():
                message = re.escape(f"{what.strip()} needs the mean of the weights, which are a sample now")
                with pytest.raises(RuntimeError, match=message):
                    call(model, optimizer, saved)
            optimizer.train()  # as they are; accelerate and Trainer call it before each step
            optimizer.zero_grad()
        train(model, optimizer, range(2, 4))
        ends.append((weights(model), states(optimizer), optimizer.posterior(model).mean))
    assert all(same(a, b) for a, b in zip(*ends))


@drawing_case
def test_a_change_of_weights_inside_is_refused_and_the_mean_restored(case: Case) -> None:
    """It would be lost without a word, since the mean is restored at the end."""
    model = nn.Sequential(nn.Linear(40, 20), nn.Linear(20, 3))
    optimizer = case.of(model)
    train(model, optimizer, range(1))
    before = weights(model)

    def load() -> None:
        with optimizer.sampled():
            model.load_state_dict({name: p + 1 for name, p in before.items()})

    with optimizer.sampled():
        perturbed = {
            name for name, p in model.named_parameters() if any(p is q for q in optimizer.sources[0].perturbed())
        }
    with pytest.raises(RuntimeError, match=r"parameter '.*' was changed inside sampled\(\)"):
        load()
    assert perturbed
    after = weights(model)
    assert same({name: before[name] for name in perturbed}, {name: after[name] for name in perturbed})
    train(model, optimizer, range(1, 2))


@pytest.mark.parametrize("case", [c for c in CASES if c not in DRAWING], ids=lambda case: case.name)
def test_nothing_is_refused_inside_where_nothing_is_drawn(case: Case) -> None:
    model = nn.Sequential(nn.Linear(40, 20), nn.Linear(20, 3))
    optimizer = case.of(model)
    with optimizer.sampled():
        train(model, optimizer, range(1))
        copy.deepcopy((model, optimizer))
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.eval()
