"""Learning rates that change, also to zero and back."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from bayesgrad import optim
from bayesgrad.optim import AdaBayes, AdaBayesFP, KalmanMomentum
from bayesgrad.optim.variational import VariationalOptimizer
from cases import Case, backward, elementwise_case, every_case, same, small_model, states, train, weights


def _cycles(optimizer: torch.optim.Optimizer) -> bool:
    return "momentum" in optimizer.defaults or "betas" in optimizer.defaults


# Schedules between 0 and the lr of the constructor; OneCycleLR, which ignores it, up to 1e-2.
SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: min(t / 4, 1)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 1 / 25, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(
        o, 0.01 * o.defaults["lr"], o.defaults["lr"], step_size_up=3, cycle_momentum=_cycles(o)
    ),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=10, cycle_momentum=_cycles(o)),
    "OneCycleLR-constant-momentum": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=10, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)]
    ),
    "SWALR": lambda o: SWALR(o, 0.1 * o.defaults["lr"], anneal_epochs=4),
}
every_scheduler = pytest.mark.parametrize("name", SCHEDULERS)
WIDTH = 50  # some rules decompose square matrices of this side in every step


def follow(scheduler: Any) -> None:
    scheduler.step(1.0) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()


@every_case
@every_scheduler
def test_every_scheduler_gives_the_steps_of_setting_lr_by_hand(case: Case, name: str) -> None:
    """An optimizer that is built with the highest rate of OneCycleLR takes its steps."""
    model = small_model(width=WIDTH)
    optimizer = case.of(model)
    scheduler = SCHEDULERS[name](optimizer)
    settings = []
    for index in range(9):
        settings.append({k: v for k, v in optimizer.param_groups[0].items() if k in ("lr", "momentum", "betas")})
        train(model, optimizer, range(index, index + 1))
        follow(scheduler)
    assert len({setting["lr"] for setting in settings}) > 1

    other = small_model(width=WIDTH)
    by_hand = case.of(other, **({"lr": 1e-2} if "OneCycle" in name else {}))
    for index, setting in enumerate(settings):
        by_hand.param_groups[0].update(setting)
        train(other, by_hand, range(index, index + 1))
    assert all(bool(torch.isfinite(value).all()) for value in weights(model).values())
    assert same(weights(model), weights(other))


def test_the_list_of_schedulers_is_complete() -> None:
    public = {
        name
        for name, member in vars(lr_scheduler).items()
        if inspect.isclass(member) and issubclass(member, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert public - {"LRScheduler"} <= set(SCHEDULERS)


@every_scheduler
@pytest.mark.parametrize("sgd_lr", [0.1, math.inf])
def test_a_schedule_multiplies_both_rates_of_adabayes_fp(name: str, sgd_lr: float) -> None:
    """Aitchison 2020, Eq. 21, with sgd_lr times lr/reference; for sgd_lr = inf also torch's AdamW.

    Under a cycle of momentum the weights of the gradients in <g> sum to one, which those of torch's AdamW do not.
    """
    weight = torch.linspace(-1, 1, 5, dtype=torch.float64).requires_grad_()
    optimizer = AdaBayesFP([weight], lr=1e-3, sgd_lr=sgd_lr)
    adam_weight = weight.detach().clone().requires_grad_()
    adam = torch.optim.AdamW([adam_weight], lr=1e-3, eps=0.0, weight_decay=0.0)
    schedulers = [SCHEDULERS[name](o) for o in (optimizer, adam)]
    expected, average, square = weight.detach().clone(), torch.zeros(5), torch.zeros(5)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 10):
        group = optimizer.param_groups[0]
        beta1, beta2 = group["betas"]
        sgd_lr_now = sgd_lr * group["lr"] / (1e-2 if "OneCycle" in name else 1e-3)
        gradient = 10 ** torch.linspace(-6, 1, 5, dtype=torch.float64) * torch.randn(5, generator=generator).double()
        average = average + (1 - beta1) / (1 - beta1**step) * (gradient - average)
        square = beta2 * square + (1 - beta2) * gradient**2
        mean_square = square / (1 - beta2**step)
        if group["lr"]:
            k = group["lr"] / (2 * sgd_lr_now)
            expected = expected - group["lr"] * average / (k + (k**2 + mean_square).sqrt())
        for p, o in ((weight, optimizer), (adam_weight, adam)):
            p.grad = gradient.clone()
            o.step()
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-10, atol=1e-14)
        if math.isinf(sgd_lr) and name not in ("CyclicLR", "OneCycleLR"):
            torch.testing.assert_close(weight, adam_weight, rtol=1e-10, atol=1e-14)
        for scheduler in schedulers:
            follow(scheduler)


@every_scheduler
def test_the_step_of_a_weak_gradient_has_the_given_sgd_lr_at_the_peak_and_never_more(name: str) -> None:
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = AdaBayes([weight], lr=1e-3, batch_size=10, sgd_lr=0.1, momentum=0.0)
    scheduler = SCHEDULERS[name](optimizer)
    optimizer.param_groups[0]["momentum"] = 0.0
    reached = []
    for _ in range(9):
        before = weight.item()
        lr = optimizer.param_groups[0]["lr"]
        weight.grad = torch.full_like(weight, 1e-9)
        optimizer.step()
        reached.append((before - weight.item()) / 1e-9)
        assert reached[-1] == pytest.approx(0.1 * lr / (1e-2 if "OneCycle" in name else 1e-3), rel=1e-6, abs=1e-12)
        follow(scheduler)
        optimizer.param_groups[0]["momentum"] = 0.0
    if name not in ("ChainedScheduler", "SequentialLR"):  # which halve lr before their warm-up has ended
        assert max(reached) == pytest.approx(0.1, rel=0.05)


@every_case
@pytest.mark.parametrize("cyclic", [True, False])
def test_a_cycle_of_momentum_is_followed_or_refused_by_torch(case: Case, cyclic: bool) -> None:
    """The schedulers' default; KalmanMomentum and the samplers have no momentum of this name."""
    optimizer = case.of(small_model(width=WIDTH))

    def build() -> Any:
        if cyclic:
            return lr_scheduler.CyclicLR(optimizer, 0.0, optimizer.defaults["lr"], step_size_up=3)
        return lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10)

    if not _cycles(optimizer):
        with pytest.raises(ValueError, match="optimizer must support momentum or beta1 with `cycle_momentum` option"):
            build()
        return
    build()
    group = optimizer.param_groups[0]
    assert (group["betas"][0] if "betas" in group else group["momentum"]) == (0.9 if cyclic else 0.95)


@every_case
def test_a_cycle_is_resumed_bit_for_bit(case: Case) -> None:
    def built() -> tuple[Any, Any, Any]:
        model = small_model(width=WIDTH)
        optimizer = case.of(model)
        return model, optimizer, SCHEDULERS["OneCycleLR"](optimizer)

    def run(model: Any, optimizer: Any, scheduler: Any, steps: range) -> None:
        for index in steps:
            train(model, optimizer, range(index, index + 1))
            follow(scheduler)

    whole, first, second = built(), built(), built()
    run(*whole, range(6))
    run(*first, range(3))
    for part, saved in zip(second, first):
        part.load_state_dict(saved.state_dict())
    run(*second, range(3, 6))
    assert same(weights(whole[0]), weights(second[0]))


SCALED = {
    "AdaBayes": "sgd_lr=0.1 to 1",
    "AdaBayesFP": "sgd_lr=0.1 to 1",
    "KalmanMomentum-prior": "weight_noise=0.001 to 0.01",
    "AdaBound": "final_lr=0.1 to 1",
    "FOOF": "fallback_lr=0.001 to 0.01",
}


@every_case
def test_a_rate_above_the_reference_is_named_once_where_it_raises_another(case: Case) -> None:
    model = small_model(width=WIDTH)
    optimizer = case.of(model, lr=1e-3)
    train(model, optimizer, range(1))
    optimizer.param_groups[0]["lr"] = 1e-2
    if not any(0 < optimizer.defaults[name] < math.inf for name in optimizer.scaled_by_lr):
        assert case.name not in SCALED
        train(model, optimizer, range(1, 3))
        return
    optimizer.zero_grad()
    backward(model, 1, optimizer)
    before = weights(model)
    name = type(optimizer).__name__
    words = f"lr=0.01 is 10 times the 0.001 for which {name} was given its options, and scales "
    words += SCALED.get(case.name, "")
    with pytest.raises(UserWarning, match=words):  # an error here: nothing has changed
        optimizer.step()
    assert same(before, weights(model))
    with pytest.warns(UserWarning, match=words):
        optimizer.step()
    train(model, optimizer, range(2, 4))

    other = small_model(width=WIDTH)
    quiet = case.of(other, lr=1e-3)
    quiet.param_groups[0].update(lr=1e-2, max_lr=1e-2)
    train(other, quiet, range(2))


def test_weight_noise_that_a_schedule_raises_to_the_prior_is_refused() -> None:
    weight = torch.zeros(3, requires_grad=True)
    optimizer = KalmanMomentum([weight], lr=1e-3, batch_size=1, prior_std=0.1, weight_noise=0.02)
    optimizer.param_groups[0]["lr"] = 5e-3
    weight.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"prior_std=0\.1 must be larger than lr=0.005 and weight_noise=0.1, the"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:KroneckerFilter trains scale")
@pytest.mark.parametrize("name", ["AdaBayes", "KalmanMomentum", "KroneckerFilter"])
def test_a_reference_that_changes_during_a_run_changes_no_belief(name: str) -> None:
    """A scheduler that is built for a second phase: the belief follows lr, and options are given for `max_lr`."""
    variances, steps = [], []
    for late in (False, True):
        model = small_model(torch.float64, width=WIDTH)
        options = {"lr": 1e-2, "batch_size": 32, "prior_std" if name != "AdaBayes" else "sgd_lr": 0.3}
        rule = getattr(optim, name)
        optimizer = rule(model if name == "KroneckerFilter" else model.parameters(), **options)
        train(model, optimizer, range(3))
        before = weights(model)
        if late:
            lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=50, cycle_momentum=False)
        optimizer.param_groups[0]["lr"] = 4e-3
        variances.append(optimizer.posterior(model).variance())
        train(model, optimizer, range(3, 4))
        steps.append({key: after - before[key] for key, after in weights(model).items()})
    torch.testing.assert_close(*variances, rtol=1e-12, atol=0)
    if name != "AdaBayes":  # whose sgd_lr is given for another lr now, and with it the variance it tends to
        torch.testing.assert_close(*steps, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("bad", [0.0, -1.0, "high"])
def test_a_reference_that_is_not_positive_is_refused(bad: Any) -> None:
    optimizer = AdaBayesFP([torch.zeros(3, requires_grad=True)])
    optimizer.param_groups[0]["max_lr"] = bad
    with pytest.raises(ValueError, match="max_lr must be a positive number, got"):
        optimizer.step()


@every_case
def test_lr_zero_changes_no_weight_and_no_belief(case: Case) -> None:
    model = small_model()
    optimizer = case.of(model, lr=0.01)
    optimizer.param_groups[0]["lr"] = 0.0
    start = weights(model)
    train(model, optimizer, range(1))
    assert same(start, weights(model))
    optimizer.param_groups[0]["lr"] = 0.01
    train(model, optimizer, range(1, 4))
    believed = [e for e in optimizer.state.values() if "variance" in e]
    before, variances = weights(model), [e["variance"].clone() for e in believed]
    assert not same(start, before)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, range(4, 6))
    assert same(before, weights(model))
    if not isinstance(optimizer, VariationalOptimizer):  # which update the curvature while the mean is constant
        for old, entry in zip(variances, believed):
            torch.testing.assert_close(entry["variance"], old, rtol=1e-6, atol=0)
    assert all(bool(torch.isfinite(value).all()) for value in states(optimizer).values())


@every_case
def test_an_optimizer_built_with_lr_zero_takes_its_ratios_from_the_first_lr(case: Case) -> None:
    model, other = small_model(), small_model()
    optimizer, late = case.of(model, lr=0.01), case.of(other, lr=0.0)
    late.param_groups[0]["lr"] = 0.01
    train(model, optimizer, range(3))
    train(other, late, range(3))
    assert same(weights(model), weights(other))


@elementwise_case
def test_steps_at_lr_zero_before_the_first_positive_lr_keep_the_prior(case: Case) -> None:
    """The averages may differ, so the gradient is the same at every step."""
    model, other = small_model(), small_model()
    optimizer, late = case.of(model, lr=0.01), case.of(other, lr=0.0)
    for p, q in zip(model.parameters(), other.parameters()):
        p.grad, q.grad = torch.full_like(p, 1e-3), torch.full_like(q, 1e-3)
    if "gradient_mean" in case.slots or optimizer.needs.draws:
        return  # the information of a second equal gradient differs from that of the first
    late.step()
    late.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] = 0.01
    late.step()
    optimizer.step()
    if "Bound" not in case.name:  # whose range depends on the number of steps
        for p, q in zip(model.parameters(), other.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    assert all(bool(torch.isfinite(q).all()) for q in other.parameters())


@every_case
def test_a_schedule_that_rounds_below_zero_ends_at_zero_and_worse_is_refused(case: Case) -> None:
    model = small_model()
    optimizer = case.of(model, lr=1e-3)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    backward(model, 2, optimizer)
    before, known = weights(model), states(optimizer)
    for bad, message in ((-0.5, "got -0.5"), (float("nan"), "got nan")):
        optimizer.param_groups[0]["lr"] = bad
        with pytest.raises(ValueError, match=message):
            optimizer.step()
        assert same(before, weights(model))
        assert same(known, states(optimizer))
    optimizer.param_groups[0]["lr"] = -1.9e-19
    optimizer.step()
    assert same(before, weights(model))


@every_case
def test_a_learning_rate_may_be_a_tensor(case: Case) -> None:
    model, other = small_model(), small_model()
    train(model, case.of(model, lr=0.01), range(3))
    train(other, case.of(other, lr=torch.tensor(0.01, dtype=torch.float64)), range(3))
    assert same(weights(model), weights(other))
