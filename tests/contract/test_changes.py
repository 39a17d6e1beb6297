"""Options, state and model that change during a run: a change is followed, or refused in a sentence."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from bayesgrad import kernels, optim
from cases import (
    CASES,
    Case,
    batch,
    elementwise_case,
    every_case,
    observe,
    same,
    small_model,
    states,
    still,
    train,
    weights,
)


def grouped(case: Case, model: nn.Module, options: list[dict[str, Any]]) -> Any:
    """The optimizer with so many param groups, of parameters one after the other."""
    named = list(model.named_parameters())
    size = -(-len(named) // len(options))
    groups = [{"params": named[size * i : size * (i + 1)], **some} for i, some in enumerate(options)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* trains .* by |lr=.* (samples at temperature|is not small)")
        return case(model, params=groups) if case.layers else case(groups)


@contextmanager
def refusals(words: str) -> Iterator[list[str]]:
    """A context that ends with an error of these words, which are then in the list, or without an error."""
    found: list[str] = []
    try:
        yield found
    except RuntimeError as error:
        found.append(str(error))
    assert all(re.search(words, message) for message in found)


NO_POSTERIOR = ("STE", "AdaBound", "AMSBound", "FOOF", "SpectralFOOF", "KFAC", "NaturalGradient", "Langevin", "SNGD")


@pytest.mark.parametrize("case", [c for c in CASES if not c.name.startswith(NO_POSTERIOR)], ids=lambda case: case.name)
def test_a_posterior_is_a_copy_of_the_belief(case: Case) -> None:
    model = small_model(width=30)
    optimizer = case.of(model, **({"batch_size": 32} if "AdaBayesFP" in case.name else {}))
    train(model, optimizer, range(3))
    posterior = optimizer.posterior(model)
    before = posterior.sample(2, seed=0), posterior.variance()
    train(model, optimizer, range(3, 7))
    for then, now in zip(before, (posterior.sample(2, seed=0), posterior.variance())):
        assert all(torch.equal(then[name], now[name]) for name in then)
    other = optimizer.posterior(model).variance()
    assert any(not torch.equal(other[name], posterior.variance()[name]) for name in other)


FIXED = [
    ("AdaBayes", "follow_lr", False),
    ("FOOF", "max_factor", 5),
    ("KFAC", "max_factor", 5),
    ("KFAC", "exact_damping", True),
    ("KroneckerFilter", "max_factor", 5),
    ("KroneckerFilter-prior", "fisher", "sampled"),
    ("KroneckerFilterFP", "max_factor", 5),
    ("KroneckerFilterFP", "whiten", "input"),
    ("KroneckerFilterFP-prior", "fisher", "sampled"),
]


@pytest.mark.parametrize(("name", "option", "value"), FIXED, ids=lambda value: str(value))
def test_what_decides_the_meaning_of_the_state_cannot_change_in_any_group(name: str, option: str, value: Any) -> None:
    """Some were taken without a word: moments of another shape began at zero, and labels were never observed."""
    case = next(case for case in CASES if case.name == name)
    model = small_model(width=30)
    optimizer = grouped(case, model, [{}, {}])
    train(model, optimizer, range(4))
    before, earlier = weights(model), optimizer.param_groups[1][option]
    optimizer.param_groups[1][option] = value
    with pytest.raises(ValueError, match=f"^{option} cannot change during a run, from {earlier!r} to {value!r}: build"):
        train(model, optimizer, range(4, 5))
    assert same(before, weights(model))
    optimizer.param_groups[1][option] = earlier
    train(model, optimizer, range(4, 5))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(5, 6))


@pytest.mark.parametrize(
    ("name", "option"),
    [
        *[("Langevin", "damping"), ("SNGD", "batch_size"), ("KFAC", "max_norm"), ("NaturalGradient", "update_every")],
        *[("IVON", "samples"), ("Newton", "probes"), ("OGN", "losses_per_example"), ("SNGD", "update_every")],
    ],
)
def test_options_of_all_groups_change_together(name: str, option: str) -> None:
    """The first group's value was used for all."""
    case = next(case for case in CASES if case.name == name)
    model = small_model(width=30)
    optimizer = grouped(case, model, [{}, {}])
    train(model, optimizer, range(2))
    for changed in (0, 1):
        optimizer.param_groups[changed][option] = 40 + changed
        with pytest.raises(ValueError, match=f"^{option} must be the same in all groups, got "):
            train(model, optimizer, range(2, 3))
        optimizer.param_groups[1 - changed][option] = 40 + changed
        train(model, optimizer, range(2, 3))


@pytest.mark.parametrize("name", ["IVON", "OGN", "VOGN", "Newton", "VON"])
@pytest.mark.parametrize("option", ["kl_weight", "num_data", "prior_precision"])
def test_what_is_averaged_with_the_curvature_is_named_once_if_it_changes(name: str, option: str) -> None:
    case = next(case for case in CASES if case.name == name)
    model = small_model(width=30)
    optimizer = case.of(model)
    train(model, optimizer, range(2))
    earlier = optimizer.param_groups[0][option]
    optimizer.param_groups[0][option] = 2 * earlier
    with pytest.warns(UserWarning, match=f"^{option} changed from {earlier:g} to {2 * earlier:g} during a run"):
        train(model, optimizer, range(2, 3))
    optimizer.param_groups[0][option] = earlier
    train(model, optimizer, range(3, 4))
    other = small_model(width=30)
    resumed = case.of(other, **{option: 3 * earlier})
    train(other, resumed, range(1))
    resumed.load_state_dict(optimizer.state_dict())  # options of a state are no change
    train(other, resumed, range(1))


@pytest.mark.parametrize("name", ["IVON", "BayesBiNN"])
def test_a_draw_that_an_error_ends_restores_the_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that were not drawn yet were overwritten by uninitialised memory, or by the offsets of the last draw."""
    case = next(case for case in CASES if case.name == name)
    model = nn.Sequential(nn.Linear(40, 1000), nn.Linear(1000, 200), nn.Linear(200, 3))
    optimizer = case.of(model, fused=False)
    run = kernels.run
    for warm in range(2):
        train(model, optimizer, range(warm))
        before = weights(model)
        for last in range(5):
            calls = iter(range(last))

            def limited(*args: Any, left: Any = calls, **more: Any) -> None:
                if next(left, None) is None:
                    raise ZeroDivisionError
                run(*args, **more)

            monkeypatch.setattr(kernels, "run", limited)
            with pytest.raises(ZeroDivisionError), optimizer.sampled():
                raise ZeroDivisionError
            monkeypatch.undo()
            assert same(before, weights(model))


def test_a_draw_that_is_interrupted_inside_of_a_weight_restores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels process large weights in pieces, of which some are drawn and some are not."""
    model = nn.Linear(1000, 1000, bias=False)
    optimizer = optim.IVON(model.parameters(), num_data=10, fused=False)
    before, write = weights(model), kernels._write
    for pieces in (1, 3):
        calls = iter(range(pieces))

        def limited(*args: Any, left: Any = calls) -> None:
            write(*args)
            if next(left, None) is None:
                raise KeyboardInterrupt

        monkeypatch.setattr(kernels, "_write", limited)
        with pytest.raises(KeyboardInterrupt), optimizer.sampled():
            raise AssertionError("the draw was not interrupted")
        monkeypatch.undo()
        assert same(before, weights(model))


@elementwise_case
@pytest.mark.filterwarnings("ignore:lr=.* for which Broken was given its options")
def test_a_step_whose_numbers_cannot_be_computed_changes_nothing(case: Case) -> None:
    """The step counters had been increased, and those of the first group's weights updated."""

    def scalars(self: Any, group: Any, step: int) -> dict[str, float]:
        if step == 3 and group["lr"] == 0.02:
            raise ZeroDivisionError
        return case.make.scalars(self, group, step)  # pyright: ignore

    broken = replace(case, make=type("Broken", (case.make,), {"scalars": scalars}))  # pyright: ignore
    model = small_model(width=30)
    optimizer = grouped(broken, model, [{}, {}])
    train(model, optimizer, range(2))
    before, known, groups = weights(model), states(optimizer), optimizer.state_dict()["param_groups"]
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    optimizer.param_groups[1]["lr"] = 0.02
    with pytest.raises(ZeroDivisionError):
        train(model, optimizer, range(2, 3))
    assert same(before, weights(model))
    assert same(known, states(optimizer))
    for then, now in zip(groups, optimizer.param_groups):
        assert (then["base_lr"], then["last_lr"]) == (now["base_lr"], now["last_lr"])


def test_an_interrupt_of_an_update_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(width=30)
    optimizer = grouped(CASES[0], model, [{}, {}])
    train(model, optimizer, range(1))

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "run", interrupted)
    words = r"^AdaBayes\.step\(\) was interrupted: some "
    with pytest.warns(RuntimeWarning, match=words), pytest.raises(KeyboardInterrupt):
        train(model, optimizer, range(1, 2))


@every_case
@pytest.mark.parametrize("moment", ["forward", "observe"])
def test_a_state_that_is_loaded_inside_of_a_pass_changes_no_number_in_silence(case: Case, moment: str) -> None:
    """KFAC, Kronecker filters and samplers took steps without the batch whose observation was discarded."""
    model, other = small_model(torch.float64, width=8), small_model(torch.float64, width=8)
    plain, loaded = case.of(model), case.of(other)
    if loaded.needs.draws:
        pytest.skip("state dicts are refused inside of sampled()")
    train(model, plain, range(6))
    train(other, loaded, range(3))
    x, y = batch(3, torch.float64)
    loaded.zero_grad()
    outputs = other(x)
    loss = nn.functional.cross_entropy(outputs, y)
    words = "load_state_dict|was loaded|(inputs were|pass was) recorded|inplace"
    with refusals(words) as refused:
        if moment == "forward":
            loaded.load_state_dict(loaded.state_dict())
        observe(loaded, outputs, y, loss)
        if moment == "observe":
            loaded.load_state_dict(loaded.state_dict())
        loss.backward()
        loaded.step()
    if refused:
        return
    train(other, loaded, range(4, 6))
    for name, value in weights(model).items():
        torch.testing.assert_close(value, weights(other)[name], rtol=1e-10, atol=1e-12)


@elementwise_case
@pytest.mark.parametrize("width", [5, 2000])
def test_a_state_whose_data_were_replaced_is_the_state(case: Case, width: int) -> None:
    """As in torch.optim, for tensors that are packed and for those that are not: the run is that without it."""
    runs = []
    for replaced in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(width, 20)), nn.Parameter(torch.randn(width)), nn.Parameter(torch.ones(3))]
        optimizer = case(params)
        for index in range(4):
            with still(optimizer):
                for p in params:
                    p.grad = torch.full_like(p, 1.0 + index)
            optimizer.step()
            for value in (v for entry in optimizer.state.values() for v in entry.values()) if replaced else ():
                value.data = value.data.clone()
        runs.append((list(params), optimizer.state_dict()["state"]))
    (plain, expected), (moved, found) = runs
    assert all(torch.equal(p, q) for p, q in zip(plain, moved))
    assert all(same(expected[key], found[key]) for key in expected)
