"""`seed=None` draws one number from torch's global generator when an optimizer is built; a number fixes the draws."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import bayesgrad
from bayesgrad import noise
from bayesgrad.layers.fisher import SubsampledFisher
from bayesgrad.samplers import Chains
from cases import CASES, Case, batch, same, states, weights

fresh_seed = noise.fresh_seed  # other tests run with a seed of 0 in place of None
SEEDED = [case for case in CASES if "seed" in inspect.signature(case.make).parameters]
# Those whose steps depend on random numbers under the options of the table, without given labels.
RANDOM = [
    case
    for case in SEEDED
    if case.of(nn.Linear(40, 3)).needs.draws
    or case.name in ("KFAC", "NaturalGradient", "KroneckerFilter", "AdaBayes-sampled", "Newton", "Langevin", "SNGD")
]
random_case = pytest.mark.parametrize("case", RANDOM, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def _drawn_seeds(_fixed_seed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "fresh_seed", fresh_seed)


def network() -> nn.Module:
    model = nn.Sequential(nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-0.3, 0.3, p.numel()).view_as(p))
    return model


def options(case: Case) -> dict:
    return {"hessian": "hutchinson"} if case.name == "Newton" else {}


def train(model: nn.Module, optimizer, steps: range) -> dict[str, torch.Tensor]:
    """The loop of every optimizer, with sampled labels."""
    for index in steps:
        x, y = batch(index)
        with optimizer.sampled():
            optimizer.zero_grad()
            outputs = model(x)
            loss = nn.functional.cross_entropy(outputs, y)
            optimizer.observe(outputs, loss=loss)
            loss.backward()
        optimizer.step()
    return weights(model)


def run(case: Case, manual_seed: int, **more) -> dict[str, torch.Tensor]:
    torch.manual_seed(manual_seed)
    model = network()
    return train(model, case.of(model, **options(case), **more), range(3))


@random_case
def test_manual_seed_determines_a_run_and_a_number_is_independent_of_it(case: Case) -> None:
    first = run(case, 1)
    assert same(first, run(case, 1))
    assert not same(first, run(case, 2))
    assert same(run(case, 1, seed=7), run(case, 2, seed=7))
    assert not same(run(case, 1, seed=7), run(case, 1, seed=8))


@random_case
def test_optimizers_built_one_after_another_have_other_streams(case: Case) -> None:
    torch.manual_seed(0)
    models = [network(), network()]
    optimizers = [case.of(model, **options(case)) for model in models]
    assert not same(*(train(model, optimizer, range(2)) for model, optimizer in zip(models, optimizers)))


@pytest.mark.parametrize("case", SEEDED, ids=lambda case: case.name)
def test_building_takes_one_number_of_the_global_stream_and_steps_take_none(case: Case) -> None:
    model = network()
    torch.manual_seed(3)
    expected = int(torch.randint(2**32, (), dtype=torch.int64))
    after = torch.get_rng_state()
    torch.manual_seed(3)
    optimizer = case.of(model)
    assert torch.equal(torch.get_rng_state(), after)
    assert optimizer.param_groups[0]["seed"] == optimizer.defaults["seed"] == expected
    train(model, optimizer, range(1))
    assert torch.equal(torch.get_rng_state(), after)
    case.of(model, seed=5)
    with pytest.raises(ValueError, match="lr must be"):
        case.of(model, lr=-1.0)
    assert torch.equal(torch.get_rng_state(), after)


@random_case
def test_a_checkpoint_continues_the_stream(case: Case, tmp_path: Path) -> None:
    """Also one that was written before the first step, and into an optimizer with a seed of its own."""
    for steps in (0, 2):
        torch.manual_seed(steps)
        model = network()
        optimizer = case.of(model, **options(case))
        train(model, optimizer, range(steps))
        torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "checkpoint.pt")
        end = train(model, optimizer, range(steps, steps + 3))
        for seed in (None, 12):
            torch.manual_seed(100)
            other = network()
            resumed = case.of(other, seed=seed, **options(case))
            saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
            other.load_state_dict(saved[0])
            resumed.load_state_dict(saved[1])
            assert same(end, train(other, resumed, range(steps, steps + 3)))
            assert same(states(optimizer), states(resumed))


def test_the_seed_of_the_first_group_is_that_of_all() -> None:
    torch.manual_seed(0)
    first, second, third = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    state = torch.get_rng_state()
    optimizer = bayesgrad.optim.IVON([{"params": [first], "seed": 4}, {"params": [second]}], num_data=10)
    optimizer.add_param_group({"params": [third]})
    assert [group["seed"] for group in optimizer.param_groups] == [4, 4, 4]
    assert torch.equal(state, torch.get_rng_state())


def test_an_optimizer_is_built_without_values() -> None:
    torch.manual_seed(0)
    expected = fresh_seed()
    torch.manual_seed(0)
    with FakeTensorMode(), torch.device("meta"):
        assert fresh_seed() == expected


def test_other_draws_follow_the_global_generator_too() -> None:
    model = network()
    x, y = batch(0)

    def draws(seed: int | None) -> list[torch.Tensor]:
        chains = Chains(model, 2, spread=1.0, seed=seed)
        fisher = SubsampledFisher(model, x, seed=seed)
        posterior = bayesgrad.laplace(model, [(x, y)], likelihood="categorical", structure="diag", seed=seed)
        assert fisher.labels is not None
        return [next(chains.parameters()), fisher.labels, next(iter(posterior.sample().values()))]

    torch.manual_seed(1)
    first, second = draws(None), draws(None)
    torch.manual_seed(1)
    again = draws(None)
    fixed = [draws(3), draws(3)]
    for k in range(3):
        assert torch.equal(first[k], again[k])
        assert not torch.equal(first[k], second[k])
        assert torch.equal(fixed[0][k], fixed[1][k])


SCRIPT = """
import os, sys
import torch
from torch import nn
from bayesgrad.optim import IVON

rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
torch.manual_seed(rank)  # every process has another global generator
mine = IVON([nn.Parameter(torch.zeros(4))], num_data=10).param_groups[0]["seed"]
fixed = IVON([nn.Parameter(torch.zeros(4))], num_data=10, seed=7).param_groups[0]["seed"]
print(mine, fixed)
torch.distributed.destroy_process_group()
"""


def test_ranks_use_the_seed_of_rank_0(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = fresh_seed()
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), "2", str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    for done in ranks:
        out, error = done.communicate(timeout=120)
        assert out.split() == [str(expected), "7"], error
