"""Predictions for loaders, intervals, scores of unusual inputs and exported predictions, for all posteriors."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesgrad
from bayesgrad.belief import Belief
from bayesgrad.posterior import BernoulliPosterior, GaussianPosterior, Posterior, SampledPosterior, mc_dropout
from bayesgrad.precision import Diagonal
from bayesgrad.predictions import Decomposed


def data(n: int = 30, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=generator)


def network(outputs: int = 3) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double().eval()


def laplace(structure: str, likelihood: str = "categorical") -> Posterior:
    x, y = data()
    targets = y if likelihood == "categorical" else torch.stack([y, -y, y], 1).double()
    noise = {"noise_scale": 0.3} if likelihood == "gaussian" else {}
    return bayesgrad.laplace(network(), [(x, targets)], likelihood=likelihood, structure=structure, seed=0, **noise)


def sampled() -> Posterior:
    return SampledPosterior([dict(network().state_dict()) for _ in range(3)], network())


def diagonal() -> Posterior:
    model = network()
    return GaussianPosterior(
        {n: Belief(p.detach(), Diagonal(torch.full_like(p, 0.01))) for n, p in model.named_parameters()}, model
    )


def binary() -> Posterior:
    model = network()
    return BernoulliPosterior({name: p.detach().tanh() for name, p in model.named_parameters()}, model)


POSTERIORS: dict[str, Callable[[], Posterior]] = {
    **{s: lambda s=s: laplace(s) for s in ("diag", "kron", "input", "full")},
    "gaussian likelihood": lambda: laplace("kron", "gaussian"),
    "diagonal": diagonal,
    "samples": sampled,
    "binary": binary,
}


def parts(prediction: object) -> list[Tensor]:
    if isinstance(prediction, Tensor):
        return [prediction]
    return [tensor for field in prediction for tensor in parts(field)]  # pyright: ignore


@pytest.mark.parametrize("name", POSTERIORS)
@pytest.mark.parametrize("decompose", [False, True])
def test_a_loader_has_the_predictions_of_its_batches_in_one(name: str, decompose: bool) -> None:
    posterior = POSTERIORS[name]()
    x, y = data(11, seed=2)
    options = {} if decompose is False or name == "gaussian likelihood" else {"method": "mc"}
    expected = posterior.predict(x, decompose=decompose, **options)
    for loader in (DataLoader(TensorDataset(x, y), 4), DataLoader(TensorDataset(x), 4), [(x[:5], None), (x[5:], None)]):
        found = posterior.predict(loader, decompose=decompose, **options)
        assert type(found) is type(expected)
        for a, b in zip(parts(found), parts(expected), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_batches_of_a_loader_may_be_mappings_and_tuples_of_arguments() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = network()

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.first(a + 2 * b)

    a, b, y = data(9)[0], data(9, 1)[0], data(9)[1]
    model = Two()
    posterior = bayesgrad.laplace(model, [((a, b), y)], likelihood="categorical", seed=0)
    expected = posterior.predict((a, b))
    for loader in (
        iter([((a[:4], b[:4]), y[:4]), ((a[4:], b[4:]), y[4:])]),
        [{"a": a, "b": b, "labels": y}],
        [{"b": b, "a": a}],
    ):
        torch.testing.assert_close(posterior.predict(loader), expected, rtol=1e-10, atol=0)
    with pytest.raises(TypeError, match=r"got 3 parts: put several arguments"):
        posterior.predict([(a, b, y)])
    with pytest.raises(ValueError, match="gave no batches"):
        posterior.predict(iter([]))


def test_intervals_have_the_noise_of_the_data() -> None:
    posterior = laplace("full", "gaussian")
    x = data(7, 3)[0]
    mean, variance = posterior.predict(x, likelihood="gaussian")
    lower, upper = posterior.interval([(x[:3],), (x[3:],)], level=0.95)
    z = math.sqrt(2) * torch.special.erfinv(torch.tensor(0.95, dtype=torch.float64))
    torch.testing.assert_close(upper - lower, 2 * z * (variance + 0.09).sqrt(), rtol=1e-10, atol=0)
    torch.testing.assert_close((upper + lower) / 2, mean, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="likelihood is 'categorical'"):
        laplace("full").interval(x)
    with pytest.raises(ValueError, match=r"between 0 and 1, got 95"):
        posterior.interval(x, level=95)


def test_scores_are_the_parts_of_the_uncertainty() -> None:
    posterior, x = laplace("full"), data(7, 3)[0]
    parts = posterior.predict(x, decompose=True)
    assert isinstance(parts, Decomposed)
    assert isinstance(parts.prediction, Tensor)
    torch.testing.assert_close(posterior.ood_score(x), parts.epistemic)
    torch.testing.assert_close(posterior.ood_score(x, "entropy"), torch.special.entr(parts.prediction).sum(1))
    torch.testing.assert_close(posterior.ood_score(x, "max_probability"), 1 - parts.prediction.amax(1))
    assert float(posterior.ood_score(100 * x).mean()) > 3 * float(posterior.ood_score(x).mean())
    regression = laplace("full", "gaussian")
    variance = regression.predict(x, likelihood="gaussian").variance
    torch.testing.assert_close(regression.ood_score(x), variance.mean(1))
    assert posterior.ood_score(x[:0]).shape == regression.ood_score(x[:0]).shape == (0,)
    with pytest.raises(ValueError, match="score='entropy' is for classes, and the likelihood is 'gaussian'"):
        regression.ood_score(x, "entropy")
    with pytest.raises(ValueError, match="got 'energy'"):
        posterior.ood_score(x, "energy")


@pytest.mark.parametrize("name", POSTERIORS)
def test_an_exported_prediction_is_the_prediction(name: str) -> None:
    posterior = POSTERIORS[name]()
    x, other = data(5, 3)[0], data(8, 4)[0]
    module = posterior.to_module(x, samples=4, seed=3)
    size = torch.export.Dim("examples", min=2, max=1000)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: size},))
    expected = posterior.predict(other, samples=4, seed=3)
    for found in (module(other), program.module()(other)):
        for a, b in zip(parts(found), parts(expected), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_convolutions_are_exported_for_a_number_of_inputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)).double().eval()
    x, y = torch.randn(20, 1, 6, 6, dtype=torch.float64), torch.randint(3, (20,))
    posterior = bayesgrad.laplace(model, [(x, y)], likelihood="categorical", structure="kron", seed=0)
    module = posterior.to_module(x[:4])
    torch.testing.assert_close(module(x[4:8]), posterior.predict(x[4:8]), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(torch.export.export(module, (x[:4],)).module()(x[4:8]), posterior.predict(x[4:8]))
    with pytest.raises(ValueError, match=r"shapes \[\(4, 1, 6, 6\)\], got \[\(5, 1, 6, 6\)\]"):
        module(x[:5])
    average = posterior.to_module(x[:4], samples=4, method="mc", seed=1)
    expected = posterior.predict(x, samples=4, method="mc", seed=1)
    torch.testing.assert_close(average(x), expected, rtol=1e-9, atol=1e-11)


def test_exported_averages_have_statistics_of_their_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = data(40)
    optimizer = bayesgrad.optim.BayesBiNN([model[0].weight, model[3].weight], num_data=40, seed=0)
    for _ in range(3):
        optimizer.zero_grad()
        with optimizer.sampled():
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    posterior = optimizer.posterior(model.eval())
    with pytest.warns(UserWarning, match="BatchNorm has running statistics of other weights") as found:
        posterior.to_module(x[:4], samples=4, seed=1)
    assert found[0].filename == __file__
    module = posterior.to_module(x, samples=4, seed=1, statistics=x)
    expected = posterior.predict(x, samples=4, seed=1, statistics=x)
    torch.testing.assert_close(module(x), expected, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(module(x), posterior.predict(x, samples=4, seed=1, statistics="running"), atol=1e-3)


def test_what_cannot_be_exported_is_refused() -> None:
    x, y = data()
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    with pytest.raises(ValueError, match="no weights to export"):
        mc_dropout(model).to_module(x, method="mc")
    subsampled = bayesgrad.laplace(network(), [(x, y)], likelihood="categorical", structure="subsampled", seed=0)
    with pytest.raises(ValueError, match="use method='mc'"):
        subsampled.to_module(x)
