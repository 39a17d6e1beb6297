"""BatchNorm's running statistics in predictions: those of the weights that predict, or a warning."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, TensorDataset

from bayesgrad.belief import Belief
from bayesgrad.layers.running_statistics import SPREAD, spread
from bayesgrad.optim import STE, BayesBiNN, KalmanMomentum, SpikeSlab
from bayesgrad.posterior import (
    BernoulliPosterior,
    DropoutPosterior,
    GaussianPosterior,
    Posterior,
    SampledPosterior,
    mc_dropout,
)
from bayesgrad.posterior.units import Units
from bayesgrad.precision import Diagonal

D = torch.float64
WARNING = "running statistics of other weights than those to predict with"


def network(norm: bool = True, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(6, **options) if norm else nn.LayerNorm(6)
    return nn.Sequential(nn.Linear(4, 6), middle, nn.Tanh(), nn.Linear(6, 3)).double()


def inputs(count: int = 24) -> Tensor:
    return torch.randn(count, 4, dtype=D, generator=torch.Generator().manual_seed(1))


def gaussian(model: nn.Module, variance: float = 0.1) -> GaussianPosterior:
    params = model.named_parameters()
    return GaussianPosterior({n: Belief(p.detach(), Diagonal(torch.full_like(p, variance))) for n, p in params}, model)


def bernoulli(model: nn.Module) -> BernoulliPosterior:
    return BernoulliPosterior({"0.weight": model.get_parameter("0.weight")}, model)


def dropout(model: nn.Module, keep: float = 0.5) -> DropoutPosterior:
    slab = {"0.weight": model.get_parameter("0.weight").detach()}
    return DropoutPosterior(slab, {"0.weight": torch.full((4,), keep)}, {"0.weight": Units(1)}, model)


def members(model: nn.Module) -> SampledPosterior:
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return SampledPosterior([weights, {name: -w for name, w in weights.items()}], model)


def by_update_bn(posterior: Posterior, weights: dict[str, Tensor], loader: Any, x: Tensor) -> Tensor:
    """Probabilities of a copy of the model with these weights, its statistics by torch's own function."""
    assert posterior.model is not None
    model = copy.deepcopy(posterior.model)
    model.load_state_dict({**model.state_dict(), **weights})
    update_bn(loader, model)
    return model.eval()(x).softmax(1).detach()


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("make", [gaussian, bernoulli, dropout, members])
def test_statistics_of_a_loader_are_those_of_update_bn_at_each_sample(
    make: Callable[[nn.Module], Posterior], momentum: float | None
) -> None:
    """Averages over batches of unequal size, for every sample; the model is afterwards as before."""
    model, x = network(momentum=momentum), inputs()
    model(x[:8])  # statistics of other weights, and a count of batches
    posterior, before = make(model), copy.deepcopy(model.state_dict())
    loader = DataLoader(TensorDataset(x, torch.zeros(24)), batch_size=10)
    samples = posterior._choose(3, posterior.seed)
    wanted = torch.stack([by_update_bn(posterior, weights, loader, x[:5]) for weights in samples]).mean(0)
    found = posterior.predict(x[:5], 3, statistics=loader)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[1].momentum == momentum
    assert model.training
    assert model[1].training
    for method in set(posterior.methods) - {"mc", "linear"}:
        wanted = by_update_bn(posterior, getattr(posterior, method), [x], x[:5])
        torch.testing.assert_close(posterior.predict(x[:5], method=method, statistics=x), wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("make", [gaussian, dropout])
def test_statistics_are_constants_of_linearised_predictions(make: Callable[[nn.Module], Posterior]) -> None:
    """Those of the mean weights, which do not follow the weights in the Jacobian."""
    model, x = network(), inputs()
    found = make(model).predict(x[:5], method="linear", statistics=[x[:10], x[10:]], likelihood="gaussian")
    posterior, other = make(model), copy.deepcopy(model)
    other.load_state_dict({**other.state_dict(), **posterior.mean})
    update_bn([x[:10], x[10:]], other)
    model.load_state_dict({**model.state_dict(), **dict(other.named_buffers())})
    wanted = posterior.predict(x[:5], method="linear", statistics="running", likelihood="gaussian")
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_batches_without_labels_and_models_of_several_arguments() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.inner(a + b)

    model, x = Two(), inputs()
    posterior, zero = gaussian(model), torch.zeros_like(x)
    wanted = posterior.predict((x, zero), 2, statistics=(x, zero))
    batches = [((x, zero), torch.zeros(24))]
    torch.testing.assert_close(posterior.predict((x, zero), 2, statistics=batches), wanted, rtol=0, atol=0)
    alone = gaussian(network())
    torch.testing.assert_close(
        alone.predict(x, 2, statistics=[x[:10], x[10:]]),
        alone.predict(x, 2, statistics=[(x[:10], 0), (x[10:], 0)]),
        rtol=0,
        atol=0,
    )


def test_instance_norm_and_a_layer_in_training_mode_elsewhere() -> None:
    """InstanceNorm's statistics are averaged too, though torch gives it no cumulative average."""
    torch.manual_seed(0)
    norm = nn.InstanceNorm1d(2, track_running_stats=True)
    model = nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 2, 1), norm, nn.Flatten(), nn.Linear(4, 3)).double()
    x, posterior = inputs(), gaussian(model)
    (weights,) = posterior._choose(1, 0)
    found = posterior.predict(x[:5], 1, statistics=[x[:12], x[12:]])
    model.load_state_dict({**model.state_dict(), **weights})
    with torch.no_grad():
        hidden = [model[1](model[0](part)) for part in (x[:12], x[12:])]
        norm.running_mean.copy_(torch.stack([h.mean((0, 2)) for h in hidden]).mean(0))
        norm.running_var.copy_(torch.stack([h.var(2).mean(0) for h in hidden]).mean(0))
        torch.testing.assert_close(found, model.eval()(x[:5]).softmax(1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("given", [iter([1]), 3, "batch"])
def test_statistics_that_cannot_be_read_for_each_sample_are_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="statistics must be training inputs, or a loader"):
        gaussian(network()).predict(inputs(), statistics=given)


def test_no_batches_are_refused_and_nothing_is_left_behind() -> None:
    model = network()
    with pytest.raises(ValueError, match="at least one batch"):
        gaussian(model).predict(inputs(), statistics=[])
    with pytest.raises(RuntimeError):
        gaussian(model).predict(inputs(), statistics=torch.zeros(4, 5, dtype=D))
    assert (model[1].training, model[1].momentum) == (True, 0.1)


# --- the warning ---


def loud(call: Callable[..., Any], *arguments: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*arguments, **options)
    return [str(w.message) for w in caught]


CASES = [  # posterior, and the methods whose weights are not those of the statistics
    (gaussian, {"mc"}),
    (bernoulli, {"mc", "mean", "mode"}),
    (dropout, {"mc", "mean", "linear"}),
    (members, {"mc", "mean"}),
]


@pytest.mark.parametrize(("make", "wrong"), CASES)
def test_one_warning_where_weights_vary(make: Callable[[nn.Module], Posterior], wrong: set[str]) -> None:
    x = inputs()
    for method in set(make(network()).methods) - ({"linear"} if make is members else set()):
        model = network()
        heard = loud(make(model).predict, x, 2, method)
        assert len(heard) == (method in wrong)
        assert all(WARNING in text and "statistics=" in text for text in heard)
        assert not loud(make(model).predict, x, 2, method)  # of another posterior of the same model
        quiet = network(norm=False), network(track_running_stats=False)
        if method != "linear":  # which refuses layers that mix examples
            assert not any(loud(make(other).predict, x, 2, method) for other in quiet)
        for known in ("running", x):
            assert not loud(make(network()).predict, x, 2, method, statistics=known)


def test_no_warning_where_weights_hardly_vary_or_only_activations_are_masked() -> None:
    x = inputs()
    assert not loud(gaussian(network(), 1e-6).predict, x, 2)
    assert not loud(dropout(network(), 0.99).predict, x, 2)
    model = network().append(nn.Dropout(0.5))
    assert not loud(mc_dropout(model).predict, x, 2)


def test_spread_is_the_largest_fraction_of_variance() -> None:
    mean = {"a": torch.tensor([[3.0, 1.0]]), "b": torch.zeros(2), "c": torch.zeros(1, 1)}
    variance = {"a": torch.tensor([[1.0, 1.0]]), "b": torch.ones(2), "c": torch.zeros(1, 1)}
    assert spread(mean, variance) == pytest.approx(2 / 12)  # vectors do not count
    assert spread({}, {}) == 0.0


# --- optimizers ---


def trained(make: Callable[[nn.Module], Any], norm: bool = True) -> tuple[nn.Sequential, Any]:
    model, x = network(norm, affine=False) if norm else network(norm), inputs()
    optimizer = make(model)
    for _ in range(3):
        with optimizer.sampled():
            optimizer.zero_grad()
            cross_entropy(model(x), torch.arange(24) % 3).backward()
        optimizer.step()
    return model, optimizer


def weights_of(model: nn.Sequential) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.ndim > 1)


def bayes_binn(model: nn.Sequential) -> BayesBiNN:
    return BayesBiNN(weights_of(model), num_data=24)


def spike_slab(model: nn.Sequential) -> SpikeSlab:
    return SpikeSlab(model, keep=0.8)


@pytest.mark.parametrize("make", [bayes_binn, spike_slab])
def test_eval_estimates_statistics_and_train_restores_them(make: Callable[[nn.Sequential], Any]) -> None:
    """With data, those of update_bn at the weights to evaluate with; modes and further training are not affected."""
    (model, optimizer), (other, plain), x = trained(make), trained(make), inputs()
    before, loader = copy.deepcopy(model.state_dict()), [x[:10], x[10:]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain.eval()
    update_bn(loader, other)
    for _ in range(2):  # again in evaluation mode
        assert not loud(optimizer.eval, model, statistics=loader)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-12, atol=1e-12)
    assert not loud(optimizer.eval, model)  # statistics fit already
    assert model.training
    assert (model[1].training, model[1].momentum) == (True, 0.1)
    optimizer.train()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_eval_warns_once_if_it_knows_a_model_whose_statistics_do_not_fit() -> None:
    model, optimizer = trained(bayes_binn)
    assert not loud(optimizer.eval)  # the model is not known
    (text,) = loud(optimizer.eval, model)
    assert WARNING in text
    assert "optimizer.eval(model, statistics=)" in text
    optimizer.train()
    assert not loud(optimizer.eval, model)
    _, optimizer = trained(spike_slab)
    assert len(loud(optimizer.eval)) == 1
    optimizer.train()
    assert not loud(optimizer.eval)


def test_eval_does_not_warn_without_batch_norm_or_where_the_weights_are_those_of_training() -> None:
    for make in (bayes_binn, spike_slab):
        model, optimizer = trained(make, norm=False)
        assert not loud(optimizer.eval, model)
    for make in (lambda m: STE(weights_of(m)), lambda m: KalmanMomentum(m.parameters(), batch_size=24)):
        model, optimizer = trained(make)
        assert not loud(optimizer.eval, model)
    model, optimizer = trained(lambda m: SpikeSlab(m, keep=1 - SPREAD / 2))
    assert not loud(optimizer.eval)


def test_eval_that_raises_changes_nothing_and_wrappers_are_opened() -> None:
    model, optimizer = trained(spike_slab)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError):
        optimizer.eval(model, statistics=torch.zeros(4, 5, dtype=D))
    assert optimizer.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.eval(model, statistics=inputs())
    wanted = copy.deepcopy(model.state_dict())
    optimizer.train()
    optimizer.eval(nn.DataParallel(model), statistics=inputs())
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


def test_eval_with_statistics_needs_the_model() -> None:
    _, optimizer = trained(bayes_binn)
    with pytest.raises(ValueError, match="needs the model"):
        optimizer.eval(statistics=inputs())
    assert optimizer.training
