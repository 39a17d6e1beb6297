"""Bad input to Laplace's method: one clear error, and the model as it was."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import bayesgrad
from equations.test_laplace import STRUCTURES, data, fitted, flat, mlp, normed

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no batches": (dict(loader=iter(())), "the loader gave no examples"),
    "labels": (dict(loader=[(data()[0], data()[1] + 1)]), "labels must be in 0..2, got 1 to 3"),
    "labels' shape": (dict(loader=[(data()[0], data()[1][:, None])]), "labels must be whole numbers of shape"),
    "negative prior": (dict(prior_precision=-1.0), "prior_precision must be a finite positive number, got -1.0"),
    "no prior": (dict(prior_precision=0), "prior_precision must be a finite positive number, got 0"),
    "prior's names": (dict(prior_precision={"0.weight": 1.0}), "prior_precision must have the names"),
    "noise_scale": (dict(noise_scale=float("nan")), "noise_scale must be a finite positive number, got nan"),
    "structure": (dict(structure="lowrank"), "structure must be one of 'diag', 'kron', .*, got 'lowrank'"),
    "fisher": (dict(fisher="true"), "fisher must be one of .*, got 'true'"),
    "bias": (dict(bias="none"), "bias must be 'joint' or 'separate', got 'none'"),
    "likelihood": (dict(likelihood="cauchy"), "likelihood must be one of .*, got 'cauchy'"),
    "other likelihood": (dict(likelihood="gaussian"), r"labels must have the outputs' shape \(12, 3\), got \(12,\)"),
    "subsample": (dict(subsample=0), "subsample must be None or a number >= 1, got 0"),
    "num_data": (dict(num_data=-5), "num_data must be None or a number >= 1, got -5"),
    "params": (dict(params=["3.weight"]), "the model has no parameter or module '3.weight'"),
    "inputs": (dict(loader=[(data()[0] * math.nan, data()[1])]), "the model's outputs are not finite"),
    "pairs": (dict(loader=[data()[0]]), "the loader must give pairs"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    options, message = BAD[case]
    model = mlp()
    before = flat(dict(model.named_parameters())).detach().clone()
    arguments = {"loader": [data()], "likelihood": "categorical", **options}
    with pytest.raises((ValueError, TypeError), match=message):
        bayesgrad.laplace(model, **arguments)
    assert torch.equal(flat(dict(model.named_parameters())), before)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_bad_models_and_loaders_leave_the_model_as_it_was() -> None:
    """Bit for bit, flags and hooks included, also where a loader fails half-way."""

    def fails() -> Any:
        yield data()
        raise OSError("the disk is gone")

    def poisoned() -> nn.Module:
        model = mlp()
        model[2].bias.data[1] = math.nan
        return model

    cases: list[tuple[nn.Module, Any, str]] = [
        (poisoned(), [data()], r"2.bias has entries that are not finite"),
        (mlp(), fails(), "the disk is gone"),
        (mlp(1), [data()], "for one logit use 'bernoulli'"),
        (mlp(2), [data()], "labels must be in 0..1, got 0 to 2"),
        (mlp(), [(data()[0].float(), data()[1])], "dtype"),
    ]
    for model, loader, message in cases:
        model[0].bias.requires_grad_(False)
        before = [p.detach().clone().view(torch.int64) for p in model.parameters()]
        for structure in STRUCTURES:
            with pytest.raises((ValueError, OSError, RuntimeError), match=message):
                bayesgrad.laplace(model, loader, likelihood="categorical", structure=structure)
            if not isinstance(loader, list):  # which can fail but once
                break
        assert all(torch.equal(p.view(torch.int64), old) for p, old in zip(model.parameters(), before))
        assert [p.requires_grad for p in model.parameters()] == [True, False, True, True]
        assert all(p.grad is None for p in model.parameters())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_models_that_have_no_posterior() -> None:
    model = normed().train()
    with pytest.raises(ValueError, match=r"3 \(BatchNorm1d\) mixes the examples .*: call model.eval\(\)"):
        bayesgrad.laplace(model, [data()], likelihood="categorical")
    with pytest.raises(ValueError, match=r"0 \(Dropout\) is in training mode: call model.eval\(\)"):
        bayesgrad.laplace(nn.Sequential(nn.Dropout(), mlp()), [data()], likelihood="categorical")
    with pytest.raises(ValueError, match=r"at least two classes .* shape \(5, 1\): for one logit use 'bernoulli'"):
        fitted(mlp(1), "diag")
    with pytest.raises(ValueError, match="structure='full' needs a dense 40401 x 40401 matrix"):
        fitted(nn.Linear(200, 201), "full")
    broken = mlp()
    broken[0].weight.data[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"0.weight has entries that are not finite"):
        fitted(broken, "diag")
    posterior = fitted(mlp(), "full")
    with pytest.raises(ValueError, match="a categorical likelihood has no noise to tune"):
        posterior.tune_prior(noise_scale=True)
    with pytest.raises(ValueError, match="per must be one of 'model', 'layer', 'parameter', got 'weight'"):
        posterior.tune_prior("weight")
