"""Random histories of training: whatever interrupts them, the end is that of the one that nothing interrupted."""

from __future__ import annotations

import copy
import io
import os
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from cases import CASES, Case, every_case, same, states, train, weights

pytestmark = pytest.mark.filterwarnings("ignore:lr=.* (samples at temperature|is not small|is .* times the )")

Pair = tuple[nn.Module, Any]


def begun(case: Case, width: int, dtype: torch.dtype, seed: int) -> Pair:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, width), nn.Tanh(), nn.Linear(width, 3)).to(dtype)
    return model, case.of(model, lr=0.01)


def through_a_file(pair: Pair, fresh: Callable[[], Pair]) -> Pair:
    file = io.BytesIO()
    torch.save([part.state_dict() for part in pair], file)
    file.seek(0)
    other = fresh()
    for part, value in zip(other, torch.load(file, weights_only=True)):
        part.load_state_dict(value)
    return other


def back_into_itself(pair: Pair, fresh: Callable[[], Pair]) -> Pair:
    """A step is taken back."""
    saved = [copy.deepcopy(part.state_dict()) for part in pair]
    train(*pair, range(90, 91))
    for part, value in zip(pair, saved):
        part.load_state_dict(value)
    return pair


INTERRUPTIONS: dict[str, Callable[[Pair, Callable[[], Pair]], Pair]] = {
    "none": lambda pair, fresh: pair,
    "file": through_a_file,
    "deepcopy": lambda pair, fresh: copy.deepcopy(pair),
    "pickle": lambda pair, fresh: pickle.loads(pickle.dumps(pair)),
    "back": back_into_itself,
}
step = st.tuples(st.sampled_from([0.0, 1e-8, 1e-4, 1e-3, 1e-2]), st.sampled_from(sorted(INTERRUPTIONS)))
histories = given(
    history=st.lists(step, min_size=2, max_size=8),
    width=st.sampled_from([1, 2, 17, 100]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)


def check(case: Case, history: list[tuple[float, str]], width: int, dtype: torch.dtype, seed: int) -> None:
    whole, disturbed = begun(case, width, dtype, seed), begun(case, width, dtype, seed)
    for index, (lr, interruption) in enumerate(history):
        disturbed = INTERRUPTIONS[interruption](disturbed, lambda: begun(case, width, dtype, seed + 1))
        for model, optimizer in (whole, disturbed):
            optimizer.param_groups[0]["lr"] = lr
            train(model, optimizer, range(index, index + 1))
    assert same(weights(whole[0]), weights(disturbed[0]))
    assert same(states(whole[1]), states(disturbed[1]))
    assert all(bool(torch.isfinite(value).all()) for value in weights(whole[0]).values())


def fuzzed(case: Case, **options: Any) -> Callable[[], None]:
    @settings(deadline=None, suppress_health_check=list(HealthCheck), **options)
    @histories
    def some(history: list, width: int, dtype: torch.dtype, seed: int) -> None:
        check(case, history, width, dtype, seed)

    return some


@every_case
def test_a_few_histories(case: Case) -> None:
    fuzzed(case, max_examples=3, derandomize=True, phases=[Phase.generate])()


@every_case
def test_a_state_can_be_loaded_twice(case: Case) -> None:
    """torch adds a default, 'differentiable', when it loads; the next load must not ask for it."""
    pair = begun(case, 2, torch.float32, 0)
    train(*pair, range(2))
    before = weights(pair[0]), states(pair[1])
    for _ in range(2):
        back_into_itself(pair, lambda: pair)
        assert same(weights(pair[0]), before[0])
        assert same(states(pair[1]), before[1])


@pytest.mark.soak
@every_case
def test_histories_for_as_long_as_there_is_time(case: Case) -> None:
    """Other ones in each run; SOAK_MINUTES is for all optimizers together, on one core."""
    end = time.monotonic() + 60 * float(os.environ.get("SOAK_MINUTES", "60")) / len(CASES)
    while time.monotonic() < end:
        fuzzed(case, max_examples=50, derandomize=False, database=None)()
