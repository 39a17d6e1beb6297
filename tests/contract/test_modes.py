"""train() and eval(): weights to evaluate with, and back bit for bit; checkpoints of either mode load right."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from bayesgrad import optim
from bayesgrad.optimizer import BeliefOptimizer
from bayesgrad.rules import NaturalStep, OrnsteinUhlenbeck, SquaredGradient, UpdateRule
from cases import CASES, Case, backward, every_case, same, small_model, states, train, weights

AHEAD = [case for case in CASES if case.name.startswith(("KalmanMomentum", "SpikeSlab"))]


class Ahead(BeliefOptimizer):
    """An optimizer whose posterior means are the weights plus one; scalars have none."""

    rule = UpdateRule(SquaredGradient(), OrnsteinUhlenbeck(), NaturalStep())

    def __init__(self, params, lr: float = 0.1) -> None:
        super().__init__(params, dict(lr=lr, batch_size=4))

    def dynamics(self, group) -> dict[str, float]:
        return {"process": 0.01, "stationary": 1.0}

    def evaluation_weights(self) -> dict[Tensor, Tensor]:
        every = [p for group in self.param_groups for p in group["params"]]
        return {p: p.detach().double() + 1 for p in every if p.dim()}


def built(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Ahead]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(dtype)
    model.scale = nn.Parameter(torch.tensor(0.3, dtype=dtype))
    with torch.no_grad():
        model.bias[0] = -0.0
        model.bias[1] = float("nan")
    return model, Ahead(model.parameters())


def bits(model: nn.Module) -> dict[str, Tensor]:
    kinds = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}
    return {name: p.view(kinds[p.dtype]) for name, p in weights(model).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_shows_the_posterior_mean_and_puts_weights_back_bit_for_bit(dtype: torch.dtype) -> None:
    model, optimizer = built(dtype)
    before, plain, pointer = bits(model), weights(model), model.weight.data_ptr()
    for _ in range(2):
        optimizer.eval()  # a second call does nothing
        expected = (plain["weight"].double() + 1).to(dtype)
        assert torch.equal(model.weight, expected)
        assert torch.equal(model.scale, plain["scale"])
        assert not optimizer.training
    for _ in range(2):
        optimizer.train()
        assert same(before, bits(model))
        assert optimizer.training
    assert model.weight.data_ptr() == pointer
    assert not any("training_weight" in entry for entry in optimizer.state.values())
    with pytest.raises(ZeroDivisionError), optimizer.mode(training=False):
        raise ZeroDivisionError
    assert same(before, bits(model))


@pytest.mark.filterwarnings("ignore:.* that are not finite:RuntimeWarning")  # of a bias that is NaN on purpose
def test_what_needs_the_weights_of_training_is_refused_in_evaluation() -> None:
    model, optimizer = built()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    saved, before = optimizer.state_dict(), bits(model)
    attempts = {r"step\(\)": optimizer.step, r"load_state_dict\(\)": lambda: optimizer.load_state_dict(saved)}
    for what, attempt in attempts.items():
        optimizer.eval()
        with pytest.raises(RuntimeError, match=f"^{what} needs the weights to train with: call optimizer.train"):
            attempt()
        optimizer.train()
        assert same(before, bits(model))
        attempt()
        before = bits(model)
    drawing = optim.IVON(model.parameters(), num_data=10)
    drawing.eval()
    with pytest.raises(RuntimeError, match=r"^sampled\(\) needs the weights to train with"), drawing.sampled():
        pass


def test_posteriors_are_around_the_posterior_mean() -> None:
    model, optimizer = built()
    expected = model.weight.detach() + 1
    assert torch.equal(optimizer.posterior(model).mean["weight"], expected)
    optimizer.eval()
    assert torch.equal(optimizer.posterior(model).mean["weight"], expected)
    assert not optimizer.training


@every_case
def test_evaluation_changes_nothing_of_a_run(case: Case) -> None:
    plain, other = small_model(width=30), small_model(width=30)
    alone, evaluated = case.of(plain), case.of(other)
    for index in range(4):
        train(plain, alone, range(index, index + 1))
        evaluated.eval()
        evaluated.train()
        train(other, evaluated, range(index, index + 1))
    assert same(weights(plain), weights(other))
    assert same(states(alone), states(evaluated))


@every_case
@pytest.mark.parametrize("how", ["state_dict", "deepcopy"])
def test_a_checkpoint_written_in_evaluation_mode_resumes_the_same_run(case: Case, how: str) -> None:
    model = small_model(width=30)
    optimizer = case.of(model)
    train(model, optimizer, range(3))
    optimizer.eval()
    if how == "state_dict":
        other = small_model(seed=1, width=30)
        resumed = case.of(other)
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(optimizer.state_dict())
    else:
        other, resumed = copy.deepcopy((model, optimizer))
    assert not resumed.training
    assert same(weights(model), weights(other))
    for one in (optimizer, resumed):
        one.train()
    train(model, optimizer, range(3, 6))
    train(other, resumed, range(3, 6))
    assert same(weights(model), weights(other))
    assert same(states(optimizer), states(resumed))


def test_a_pickle_in_evaluation_mode_resumes_the_same_run() -> None:
    model, optimizer = built()
    optimizer.eval()
    other, copied = pickle.loads(pickle.dumps((model, optimizer)))
    for one in (optimizer, copied):
        assert not one.training
        one.train()
    assert same(bits(model), bits(other))


@pytest.mark.parametrize("case", AHEAD, ids=lambda case: case.name)
def test_evaluation_weights_are_the_mean_of_the_posterior(case: Case) -> None:
    model = small_model(torch.float64, width=30)
    optimizer = case.of(model)
    train(model, optimizer, range(3))
    inside = weights(model)
    optimizer.eval()
    assert not same(inside, weights(model))
    mean = optimizer.posterior(model).mean
    for name, weight in weights(model).items():
        torch.testing.assert_close(weight, mean[name].to(weight), rtol=1e-12, atol=0)


def test_a_group_that_is_added_in_evaluation_mode_waits_for_training() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = optim.KalmanMomentum(model[0].parameters(), batch_size=4)
    optimizer.eval()
    optimizer.add_param_group({"params": list(model[1].parameters())})
    assert not optimizer.training
    optimizer.train()
    assert optimizer.training


@every_case
def test_the_one_loop_trains_with_every_optimizer(case: Case) -> None:
    """The loop of the documentation, without a branch on the optimizer."""
    model = small_model(width=30)
    optimizer = case.of(model)
    before = weights(model)
    for _ in range(3):
        x, y = torch.randn(32, 40), torch.randint(0, 3, (32,))
        with optimizer.sampled():
            optimizer.zero_grad()
            outputs = model(x)
            loss = nn.functional.cross_entropy(outputs, y)
            optimizer.observe(outputs, loss=loss)
            loss.backward()
        optimizer.step()
    assert not same(before, weights(model)) or case.binary
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    optimizer.eval()
    assert bool(torch.isfinite(model(x)).all())


@every_case
def test_a_step_whose_needs_were_not_met_says_what_to_do(case: Case) -> None:
    model = small_model(width=30)
    optimizer = case.of(model)
    needs, before = optimizer.needs, weights(model)
    if needs.outputs:
        with pytest.raises(ValueError, match=r"needs the outputs of a forward pass: call observe\(outputs\)\.$"):
            optimizer.observe(loss=torch.ones(()))
    if needs.loss:
        with pytest.raises(ValueError, match=r"needs the loss of a forward pass: call observe\(loss=loss\)\.$"):
            optimizer.observe(torch.ones(2, 3))
    optimizer.zero_grad()
    if not (needs.draws or needs.outputs or needs.loss):
        optimizer.observe()
        backward(model, 0)
        optimizer.step()
        return
    backward(model, 0)
    with pytest.raises(RuntimeError, match=r"sampled\(\)|observe\("):
        optimizer.step()
    assert same(before, weights(model))


@every_case
def test_noise_is_refused_where_nothing_is_drawn(case: Case) -> None:
    optimizer = case.of(small_model(width=30))
    if optimizer.needs.draws:
        return
    with optimizer.sampled():
        pass
    with pytest.raises(ValueError, match="computes gradients at the mean and takes no noise"), optimizer.sampled({}):
        pass


def test_a_state_names_its_rule_and_is_refused_by_another() -> None:
    for make, other, options in (
        (optim.KFAC, optim.FOOF, {}),
        (optim.OGN, optim.VOGN, {"num_data": 32}),
        (optim.AMSBound, optim.AdaBound, {}),
    ):
        model = nn.Linear(40, 3)
        optimizer = make(model if make.takes_model else model.parameters(), **options)
        outputs = model(torch.randn(8, 40))
        optimizer.observe(outputs)
        outputs.square().mean().backward()
        optimizer.step()
        refusing = other(model if make.takes_model else model.parameters(), **options)
        words = f"the saved state is that of {make.__name__}, but this optimizer is {other.__name__}."
        with pytest.raises(ValueError, match=f"^{words}$"):
            refusing.load_state_dict(optimizer.state_dict())
        words = "the saved state is that of another optimizer, as of torch.optim: its groups name no rule, but this"
        with pytest.raises(ValueError, match=words):
            refusing.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())


def test_an_option_that_selects_what_is_collected_cannot_change_during_a_run() -> None:
    model = nn.Linear(4, 3)
    optimizer = optim.AdaBayes(model.parameters(), batch_size=2)
    before = weights(model)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.param_groups[0]["fisher"] = "sampled"
    words = "fisher cannot change during a run, from 'empirical' to 'sampled': build a new optimizer"
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    assert same(before, weights(model))
    optimizer.param_groups[0]["fisher"] = "empirical"
    optimizer.step()
    assert not same(before, weights(model))


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_in_evaluation_mode_returns_to_the_running_statistics_of_training(copier) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = optim.KalmanMomentum(model.parameters(), batch_size=8)
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    former = model[1].running_mean.clone()
    optimizer.eval(model, statistics=[torch.randn(8, 4)])
    estimated = model[1].running_mean.clone()
    twin, copied = copier((model, optimizer))
    copied.train()
    assert torch.equal(twin[1].running_mean, former)
    assert torch.equal(model[1].running_mean, estimated)
    assert not torch.equal(former, estimated)
