"""Bad input to Laplace's method: one clear error, and the model as it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm

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
    "other likelihood": (dict(likelihood="gaussian"), r"labels must have the outputs' shape \(12, 3\), got \(12,\)\."),
    "subsample": (dict(subsample=0), "subsample must be None or a number >= 1, got 0"),
    "num_data": (dict(num_data=-5), "num_data must be None or a number >= 1, got -5"),
    "params": (dict(params=["3.weight"]), "the model has no parameter or module '3.weight'"),
    "inputs": (dict(loader=[(data()[0] * math.nan, data()[1])]), "the model's outputs are not finite"),
    "pairs": (dict(loader=[data()[0]]), "the loader must give pairs"),
}


def test_labels_that_are_nan_are_refused() -> None:
    """By Laplace's method, and by tuning on held-out labels, which leaves the prior as it was and the noise unknown."""
    x, y = data()[0], data()[0][:, :1].clone()
    for fisher in ("exact", "empirical"):
        missing = y.clone()
        missing[3] = math.nan
        with pytest.raises(ValueError, match=r"the loss of a batch is NaN, .*: leave out examples without a label\."):
            bayesgrad.laplace(mlp(1), [(x, y), (x, missing)], likelihood="gaussian", fisher=fisher)
        for structure in ("kron", "full"):
            posterior = bayesgrad.laplace(mlp(1), [(x, y)], likelihood="gaussian", structure=structure)
            with pytest.raises(ValueError, match=r"the log-density of the held-out labels is NaN, .*: leave out"):
                posterior.tune_prior(method="heldout", heldout=[(x, y), (x, missing)])
            assert (posterior.prior_precision, posterior.noise_scale, posterior.noise_chosen) == (1.0, 1.0, False)


@pytest.mark.parametrize("several", [False, True])
def test_a_subsample_is_given_to_forward_as_batches_are(several: bool) -> None:
    """A tensor is a tensor, and a tuple a tuple; of all examples it is the posterior without a subsample."""
    x, y = data()
    inputs = (x[:, :2], x[:, 2:]) if several else x

    def forward(model: nn.Module, given: Any) -> torch.Tensor:
        assert type(given) is type(inputs)
        return model(torch.cat(given, 1) if several else given)

    options = dict(likelihood="categorical", structure="diag", seed=0, forward=forward)
    one, two = (bayesgrad.laplace(mlp(), [(inputs, y)], subsample=n, **options) for n in (None, len(y)))  # pyright: ignore
    torch.testing.assert_close(one.variance(), two.variance())


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


def test_labels_without_the_dimension_of_outputs_name_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"labels must have .* \(12, 1\), got \(12,\): use y\[:, None\]\."):
        bayesgrad.laplace(mlp(1), [(data()[0], data()[0][:, 0])], likelihood="gaussian")


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


class Ordered(nn.Module):
    """Layers that are registered in one order and called in another."""

    def __init__(self, called: str, **registered: nn.Module) -> None:
        super().__init__()
        self.order = called.split()
        for name, module in registered.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.order:
            x = getattr(self, name)(x).tanh() if name != "lstm" else getattr(self, name)(x)[0]
        return x


def attention() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 5, batch_first=True), 1)


ORDERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "head first": (lambda: Ordered("body head", head=nn.Linear(8, 3), body=nn.Linear(4, 8)), "body"),
    "unused": (
        lambda: Ordered("body head", body=nn.Linear(4, 8), head=nn.Linear(8, 3), auxiliary=nn.Linear(8, 2)),
        "auxiliary",
    ),
    "lstm last": (
        lambda: Ordered("lstm head", head=nn.Linear(5, 3), lstm=nn.LSTM(4, 5, batch_first=True)),
        "lstm",
    ),
    "compiled, head first": (
        lambda: Ordered("body head", head=torch.compile(nn.Linear(8, 3), backend="eager"), body=nn.Linear(4, 8)),
        "body",
    ),
    "lstm": (lambda: Ordered("lstm head", lstm=nn.LSTM(4, 5, batch_first=True), head=nn.Linear(5, 3)), "head."),
    "lstm alone": (lambda: Ordered("lstm", lstm=nn.LSTM(4, 3, batch_first=True)), "lstm.*_hh_l0"),
    "attention": (lambda: nn.Sequential(nn.Linear(4, 4), attention()), "1.layers.0.linear2."),
    "twice": (lambda: Ordered("head body head", body=nn.Linear(4, 4), head=nn.Linear(4, 4)), "head."),
}


@pytest.mark.parametrize("case", ORDERS)
def test_the_last_layer_is_the_one_that_is_called_last(case: str) -> None:
    """A model that registers another one last is refused, with the names of both, as it was before.

    Each case has the name of that one, or a pattern of the parameters of the last layer.
    """
    torch.manual_seed(0)
    build, other = ORDERS[case]
    model = build().eval()
    x = torch.randn(12, 2, 4) if "lstm" in case or case == "attention" else torch.randn(12, 4)
    labels = torch.randint(3, x.shape[:-1])

    def fit(params: str) -> set[str]:
        options = dict(likelihood="categorical", structure="diag", seed=0)
        return set(bayesgrad.laplace(model, [(x, labels)], params=params, **options).mean)  # pyright: ignore

    if "." in other:
        assert [fnmatch(name, f"{other}*") for name in fit("last_layer")] == [True, True]
    else:
        with pytest.raises(ValueError, match=f"is registered last, '{other}', but the model calls 'head' last: pass"):
            fit("last_layer")
        if not case.startswith("compiled"):  # whose gradients torch cannot trace
            assert fit("head") == {"head.weight", "head.bias"}
    assert not any(module._forward_hooks for module in model.modules())


# --- the model as it was ---


class Counter(nn.Module):
    """Changes one buffer in place and replaces another, in every mode."""

    count: torch.Tensor
    last: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", torch.zeros(5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.last = x.detach().sum(-2)
        return x


def converged(module: nn.Module) -> nn.Module:
    """A module of which a pass in training mode changes singular vectors by rounding alone."""
    for _ in range(200):
        module(torch.ones(1, 4))
    return module


def repeated(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), module, nn.Tanh(), module, nn.Linear(5, 3))


STATEFUL: dict[str, Any] = {
    "BatchNorm": lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).eval(),
    "spectral norm": lambda: nn.Sequential(converged(spectral_norm(nn.Linear(4, 5))), nn.Linear(5, 3)),
    "old spectral norm": lambda: nn.Sequential(converged(old_spectral_norm(nn.Linear(4, 5))), nn.Linear(5, 3)),
    "counter": lambda: nn.Sequential(nn.Linear(4, 5), Counter(), nn.Linear(5, 3)),
    "a counter with two names": lambda: repeated(Counter()),
    "a layer with two names": lambda: repeated(nn.Linear(5, 5)),
}


def everything(model: nn.Module) -> dict[str, Any]:
    """Values and identities of all tensors, gradients, flags, modes and hooks."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found: dict[str, Any] = {name: (id(t), t.tolist(), t.requires_grad) for name, t in tensors.items()}
    found["grads"] = {name: (id(p.grad), None if p.grad is None else p.grad.tolist()) for name, p in tensors.items()}
    for name, module in model.named_modules():
        hooks = [len(value) for key, value in sorted(vars(module).items()) if key.endswith("_hooks")]
        found[f"module {name}"] = module.training, hooks, sorted(vars(module)), list(module._buffers)
    return found


@pytest.mark.filterwarnings("ignore:.*they get a diagonal:UserWarning")
@pytest.mark.parametrize("subsample", [None, 8])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("case", STATEFUL)
def test_a_model_with_state_is_left_as_it_was(case: str, structure: str, subsample: int | None) -> None:
    """Curvature, and every kind of prediction, of a model whose forward pass changes its buffers."""
    torch.manual_seed(0)
    model = STATEFUL[case]().double()
    x, y = torch.randn(12, 4, dtype=torch.float64), torch.arange(12) % 3
    model[0].bias.requires_grad_(False)
    model[-1].weight.grad = torch.ones_like(model[-1].weight)
    before = everything(model)
    loader = [(x[:6], y[:6]), (x[6:], y[6:])]
    posterior = bayesgrad.laplace(model, loader, likelihood="categorical", structure=structure, subsample=subsample)
    assert everything(model) == before
    for method in ("linear", "mc", "mean"):
        posterior.predict(x, 2, method, statistics="running")
    posterior.predictive_samples(x, 2, statistics="running")
    posterior.functional_samples(x, 2)
    posterior.functional_variance(x)
    posterior.elbo([(x, y)], prior_precision=1.0, samples=2)
    posterior.tune_prior(method="heldout", heldout=[(x, y)], steps=2)
    assert everything(model) == before
    posterior.predict(x, 2, "linear", statistics=x)
    assert everything(model) == before


class Sequences(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attention = isinstance(self.inner, nn.MultiheadAttention)
        found = self.inner(x, x, x, need_weights=False) if attention else self.inner(x)
        return self.head(found[0][:, -1] if isinstance(found, tuple) else found[:, -1])


RANDOM: dict[str, Any] = {
    "dropout of an LSTM": lambda: nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True),
    "dropout of attention": lambda: nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True),
    "random slopes": nn.RReLU,
    "statistics": lambda: nn.InstanceNorm1d(6, track_running_stats=True),
}


@pytest.mark.parametrize("case", RANDOM)
def test_outputs_that_depend_on_the_mode_are_refused(case: str) -> None:
    """In training mode the curvature would be that of another function than the one that predicts."""
    torch.manual_seed(0)
    model = Sequences(RANDOM[case]())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loader = [(torch.randn(9, 6, 4), torch.arange(9) % 3)]
    with pytest.raises(ValueError, match=r"outputs in training mode are not those in evaluation mode.*model.eval\(\)"):
        bayesgrad.laplace(model, loader, likelihood="categorical")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    bayesgrad.laplace(model.eval(), loader, likelihood="categorical")


def test_an_embedding_that_rescales_its_rows_is_refused_before_it_does() -> None:
    model = nn.Sequential(nn.Embedding(7, 4, max_norm=0.1), nn.Flatten(), nn.Linear(8, 3))
    before = model[0].weight.detach().clone()
    with pytest.raises(ValueError, match=r"0 has max_norm=0.1, which rescales its rows in place"):
        bayesgrad.laplace(model, [(torch.randint(7, (6, 2)), torch.arange(6) % 3)], likelihood="categorical")
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize(("hidden", "expected"), [(333, "full"), (334, "kron")])
def test_the_default_structure_is_the_whole_matrix_for_up_to_a_thousand_weights(hidden: int, expected: str) -> None:
    """3 hidden + 1 weights: 1,000 and 1,003."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1))
    batch = (torch.randn(4, 1), torch.randn(4, 1))
    found = bayesgrad.laplace(model, [batch], likelihood="gaussian", seed=0)
    same = bayesgrad.laplace(model, [batch], likelihood="gaussian", structure=expected, seed=0)
    assert repr(found) == repr(same)
    assert torch.equal(found.predict(batch[0]).variance, same.predict(batch[0]).variance)
