"""Ensembles: what is kept and where, running predictions, chains side by side, and diagnostics against ArviZ."""

from __future__ import annotations

import gc
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from bayesgrad.posterior import Posterior, SampledPosterior, Samples, StoredPosterior
from bayesgrad.samplers import Chains, Diverged, Ensemble, Langevin, Predictive, diagnose, inference_data, trace_plot


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def stepped(model: nn.Module, step: int) -> None:
    """A chain: noise that is a function of the step."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9).add_(torch.randn(p.shape, generator=generator, dtype=p.dtype))


def walked(steps: int, **options) -> tuple[Ensemble, list[dict[str, Tensor]]]:
    model = network()
    ensemble = Ensemble(model, **options)
    states = []
    for step in range(1, steps + 1):
        stepped(model, step)
        ensemble.collect(float(step))
        states.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return ensemble, states


def test_burn_in_and_thinning_keep_the_steps_they_should() -> None:
    ensemble, states = walked(20, burn_in=7, thin=4)
    expected = [states[step - 1] for step in (11, 15, 19)]
    posterior = ensemble.posterior()
    assert len(posterior) == len(ensemble) == 3
    for name, members in posterior.members.items():
        assert torch.equal(members, torch.stack([state[name] for state in expected]))
    assert ensemble.losses == [11.0, 15.0, 19.0]


def test_weights_that_are_not_trained_are_not_kept() -> None:
    model = network()
    model[0].requires_grad_(False)  # pyright: ignore[reportIndexIssue]
    ensemble = Ensemble(model)
    ensemble.collect()
    assert set(ensemble.posterior().members) == {"2.weight", "2.bias"}


@pytest.mark.parametrize("folder", [True, False], ids=["named", "temporary"])
def test_samples_beyond_the_limit_are_in_files_and_count_the_same(folder: bool, tmp_path: Path) -> None:
    one = 8 * sum(p.numel() for p in network().parameters())
    everything, _ = walked(23)
    ensemble, _ = walked(23, limit=10 * one, folder=tmp_path if folder else None)
    plain, stored = everything.posterior(), ensemble.posterior()
    where = ensemble.samples.folder
    assert where is not None
    files = sorted(where.iterdir())
    assert [len(next(iter(load_file(file).values()))) for file in files] == [6, 6, 6]
    assert isinstance(stored, StoredPosterior)
    assert not isinstance(plain, StoredPosterior)
    assert sum(t.nbytes for block in ensemble.samples._rows for t in block.values()) == 5 * one
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).double()
    for name, members in plain.members.items():
        assert torch.equal(stored.members[name], members)
        assert_close(stored.mean[name], members.mean(0), rtol=1e-12, atol=1e-14)
        assert_close(stored.variance()[name], members.var(0), rtol=1e-12, atol=1e-14)
    for samples in (5, 23):
        assert torch.equal(stored.predict(x, samples=samples), plain.predict(x, samples=samples))
    assert torch.equal(stored.sample(4, seed=3)["0.bias"], plain.sample(4, seed=3)["0.bias"])
    ensemble.collect()
    assert (len(ensemble), len(stored)) == (24, 23)  # what comes later is none of it
    del ensemble, stored
    gc.collect()
    assert where.exists() is folder
    if folder:
        assert len(Samples.open(where)) == 24


def test_a_stored_bag_is_saved_and_loads_as_one_in_memory(tmp_path: Path) -> None:
    ensemble, _ = walked(9, limit=1, folder=tmp_path / "samples")
    ensemble.posterior().save(tmp_path / "bag.pt")
    loaded = Posterior.load(tmp_path / "bag.pt", network())
    assert type(loaded) is SampledPosterior
    assert torch.equal(loaded.members["0.bias"], ensemble.posterior().members["0.bias"])


def test_a_killed_run_goes_on_with_the_same_samples(tmp_path: Path) -> None:
    """The checkpoint is of step 12; the process went on to step 17 and wrote files that are written anew."""
    whole, _ = walked(30, burn_in=3, limit=1000, folder=tmp_path / "whole")
    model = network()
    ensemble = Ensemble(model, burn_in=3, limit=1000, folder=tmp_path / "killed")
    buffer = io.BytesIO()
    for step in range(1, 18):
        stepped(model, step)
        ensemble.collect(float(step))
        if step == 12:
            torch.save({"model": model.state_dict(), "ensemble": ensemble.state_dict()}, buffer)
    files = len(list((tmp_path / "killed").iterdir()))
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    model = network(1)
    with pytest.raises(ValueError, match="samples of another run: load its state"):
        Ensemble(model, folder=tmp_path / "killed").collect()
    again = Ensemble(model, burn_in=3, limit=1000, folder=tmp_path / "killed")
    model.load_state_dict(saved["model"])
    again.load_state_dict(saved["ensemble"])
    assert len(again.state_dict()["samples"]["files"]) < files
    for step in range(13, 31):
        stepped(model, step)
        again.collect(float(step))
    assert again.losses == whole.losses
    for name, members in whole.posterior().members.items():
        assert torch.equal(again.posterior().members[name], members)


def test_a_run_in_a_temporary_folder_says_that_it_cannot_be_resumed(tmp_path: Path) -> None:
    ensemble, _ = walked(9, limit=100)
    with pytest.raises(ValueError, match="pass folder="):
        ensemble.state_dict()
    ensemble, _ = walked(9, limit=100, folder=tmp_path)
    state = ensemble.state_dict()
    next(tmp_path.iterdir()).write_bytes(b"cut")
    with pytest.raises(ValueError, match="missing or damaged"):
        Ensemble(network(), folder=tmp_path).load_state_dict(state)
    with pytest.raises(ValueError, match="missing or damaged"):
        ensemble.posterior().mean  # noqa: B018


@pytest.mark.parametrize("what", ["The loss", "A weight"])
def test_a_chain_that_diverges_says_where_and_keeps_its_samples(what: str) -> None:
    model = network()
    sampler = Langevin(model, lr=0.1, num_data=10, temperature=2.5)
    ensemble = Ensemble(model, sampler=sampler)
    for step in range(4):
        ensemble.collect(10.0 - step)
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")  # pyright: ignore[reportIndexIssue]
    words = f"diverged at step 5, temperature 2.5, last finite loss 7. {what} is not finite. 4 samples are kept"
    with pytest.raises(Diverged, match=words) as caught:
        ensemble.collect(float("inf") if what == "The loss" else 6.0)
    assert (caught.value.step, caught.value.temperature, caught.value.loss) == (5, 2.5, 7.0)
    assert len(ensemble.posterior()) == 4


def sampled(model: nn.Module, steps: range, sampler: Langevin, ensemble: Ensemble, running: Predictive) -> None:
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)).double()
    y = (x[:, 0] > 0).long()
    for _ in steps:
        sampler.zero_grad()
        outputs = model(x)
        loss = F.cross_entropy(outputs, y)
        sampler.observe(outputs, loss=loss)
        loss.backward()
        sampler.step()
        if ensemble.collect(loss):
            running.collect()


def test_a_killed_sampler_resumes_with_the_same_stream() -> None:
    """Model, sampler, ensemble and running prediction from one checkpoint: samples and predictions bit for bit."""
    options = dict(lr=0.1, num_data=20, prior_precision=1.0, metric="fisher", damping=0.1, fisher="sampled")
    x = torch.ones(2, 3).double()
    found = []
    for killed in (False, True):
        model = network()
        sampler, ensemble = Langevin(model, **options), Ensemble(model, burn_in=2)
        running = Predictive(model, x)
        sampled(model, range(5 if killed else 12), sampler, ensemble, running)
        if killed:
            buffer = io.BytesIO()
            torch.save([part.state_dict() for part in (model, sampler, ensemble, running)], buffer)
            buffer.seek(0)
            model = network(1)
            sampler, ensemble = Langevin(model, **options), Ensemble(model, burn_in=2)
            running = Predictive(model, x)
            for part, state in zip((model, sampler, ensemble, running), torch.load(buffer, weights_only=True)):
                part.load_state_dict(state)
            sampled(model, range(7), sampler, ensemble, running)
        found.append((ensemble.posterior().members, running.prediction(), ensemble.losses))
    (whole, average, losses), (resumed, again, others) = found
    assert len(whole["0.bias"]) == 10
    assert losses == others
    assert torch.equal(average, again)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_running_predictions_are_those_of_the_bag(likelihood: str) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).double()
    model = network()
    ensemble, running = Ensemble(model, burn_in=2), Predictive(model, x, likelihood=likelihood)
    for step in range(12):
        stepped(model, step)
        if ensemble.collect():
            last = running.collect()
            if step == 6:
                state = running.state_dict()
                running = Predictive(model, x, likelihood=likelihood)
                running.load_state_dict(state)
    found, expected = running.prediction(), ensemble.posterior().predict(x, 10, likelihood=likelihood)  # pyright: ignore
    assert running.count == 10
    assert_close(last, running.reading.link(model(x).detach()))
    assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_chains_side_by_side_are_chains_alone() -> None:
    """Adam looks at each weight by itself: three networks in one vmap end where three in a loop do."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 3, generator=generator).double(), torch.randint(2, (20,), generator=generator)
    chains = Chains(network(), 3, spread=0.5, seed=4)
    starts = {name: w.clone() for name, w in chains.weights().items()}
    ensemble = Ensemble(chains, thin=2)
    running = Predictive(chains, x)
    optimizer = torch.optim.Adam(chains.parameters(), lr=0.05)
    for _ in range(10):
        optimizer.zero_grad()
        chains.loss(chains(x), y, F.cross_entropy).backward()
        optimizer.step()
        if ensemble.collect():
            running.collect()
    assert {name: tuple(w.shape) for name, w in ensemble.draws().items()}["0.weight"] == (3, 5, 4, 3)
    for chain in range(3):
        model = network()
        model.load_state_dict({name: w[chain] for name, w in starts.items()})
        alone = torch.optim.Adam(model.parameters(), lr=0.05)
        for _ in range(10):
            alone.zero_grad()
            F.cross_entropy(model(x), y).backward()
            alone.step()
        for name, p in model.named_parameters():
            assert_close(chains.weights()[name][chain], p.detach(), rtol=1e-9, atol=1e-12)
            assert torch.equal(ensemble.draws()[name][chain, -1], chains.weights()[name][chain])
    bag = ensemble.posterior(network())
    assert len(bag) == 15
    langevin = Langevin(chains, lr=0.1, num_data=20, metric="identity")  # which needs no layers, only weights
    chains.loss(chains(x), y, F.cross_entropy).backward()
    langevin.step()
    moved = chains.weights()["0.weight"] - ensemble.draws()["0.weight"][:, -1]
    assert not torch.equal(moved[0], moved[1])
    assert_close(running.prediction(), bag.predict(x, 15), rtol=1e-12, atol=1e-14)


def test_chains_start_around_the_model() -> None:
    """Five standard errors of means and variances of 10,400 numbers; no two weights or chains share them."""
    model, spread = network(), 0.5
    started = Chains(model, 400, spread=spread, seed=4).weights()
    z = torch.cat([((started[name] - p) / spread).flatten(1) for name, p in model.named_parameters()], 1).detach()
    assert z.shape == (400, 26)
    assert abs(float(z.mean())) < 5 / z.numel() ** 0.5
    assert abs(float(z.var()) - 1) < 5 * (2 / z.numel()) ** 0.5
    assert float(z.flatten().sort().values.diff().min()) > 1e-12  # none is drawn twice, but for rounding
    for products, count in ((z.mT @ z, 400), (z @ z.mT, 26)):
        apart = products - torch.diag(products.diagonal())
        assert float(apart.abs().max()) < 6 * count**0.5  # the largest of up to 80,000
    assert all(torch.equal(w[2], p) for w, p in zip(Chains(model, 3).weights().values(), model.parameters()))


def test_chains_keep_weights_that_are_not_trained() -> None:
    """A frozen layer is the model's in all copies, at the start and after steps; others start as before."""
    model, everything = network(), Chains(network(), 3, spread=0.5, seed=1).weights()
    frozen = model[0].requires_grad_(False)  # pyright: ignore[reportIndexIssue]
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 3, generator=generator).double(), torch.randint(2, (20,), generator=generator)
    chains = Chains(model, 3, spread=0.5, seed=1)
    started = chains.weights()
    assert set(started) == {"2.weight", "2.bias"}
    for name, weights in started.items():
        assert torch.equal(weights, everything[name])
    started = {name: weights.clone() for name, weights in started.items()}
    ensemble, sampler = Ensemble(chains), Langevin(chains, lr=0.01, num_data=20, metric="identity", seed=0)
    for _ in range(3):
        sampler.zero_grad()
        chains.loss(chains(x), y, F.cross_entropy).backward()
        sampler.step()
        ensemble.collect()
    for name, p in frozen.named_parameters():
        assert torch.equal(chains.get_parameter(f"0/{name}"), p.expand(3, *p.shape))
    assert set(ensemble.posterior(model).members) == set(started)
    assert all(not torch.equal(weights, started[name]) for name, weights in chains.weights().items())
    assert {name for name, p in chains.named_parameters() if p.requires_grad} == {"2/weight", "2/bias"}


def test_chains_refuse_what_copies_would_share() -> None:
    with pytest.raises(ValueError, match="Chains does not support 1: "):
        Chains(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), 2)
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        Chains(nn.Linear(2, 2), 0)


class Weights(nn.Module):
    def __init__(self, values: np.ndarray) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values))


def recorded(paths: np.ndarray) -> list[Ensemble]:
    """An ensemble for each chain of (chains, steps, weights)."""
    found = []
    for chain in paths:
        ensemble = Ensemble(Weights(chain[0]))
        ensemble.samples.append({"w": torch.tensor(chain)})
        ensemble.losses = chain.sum(1).tolist()
        found.append(ensemble)
    return found


def autoregressive(r: float, shape: tuple[int, int, int]) -> np.ndarray:
    draws = np.random.default_rng(0).standard_normal(shape)
    paths = np.empty(shape)
    paths[:, 0] = draws[:, 0]
    for t in range(1, shape[1]):
        paths[:, t] = r * paths[:, t - 1] + np.sqrt(1 - r * r) * draws[:, t]
    return paths


@pytest.mark.parametrize("r", [0.0, 0.5, 0.9])
def test_autocorrelation_time_of_an_autoregressive_process(r: float) -> None:
    """(1 + r)/(1 - r), in the mean over 40 independent weights, within five of its standard errors and 3 %."""
    found = diagnose(recorded(autoregressive(r, (4, 1000, 40))))
    time = found.time["w"]
    error = time.std(ddof=1) / np.sqrt(len(time))
    assert found.samples == 4000
    assert abs(time.mean() - (1 + r) / (1 - r)) < 5 * error + 0.03 * (1 + r) / (1 - r)
    assert_close(found.ess["w"] * time, np.full(40, 4000.0))
    assert found.worst[1] < 1.05


def test_split_r_hat_by_its_definition_and_of_arviz() -> None:
    """Halves of chains: R^2 = ((n - 1)/n W + B/n)/W (Gelman et al., 2013)."""
    import arviz

    paths = autoregressive(0.5, (3, 200, 5)) + np.arange(3)[:, None, None] * np.linspace(0, 1, 5)
    found = diagnose(recorded(paths))
    halves = np.concatenate([paths[:, :100], paths[:, 100:]])  # (6, 100, 5)
    within, between = halves.var(1, ddof=1).mean(0), 100 * halves.mean(1).var(0, ddof=1)
    assert_close(found.rhat["w"], np.sqrt((0.99 * within + between / 100) / within), rtol=1e-10, atol=0)
    assert found.worst[1] == found.rhat["w"].max() > 1.2
    assert_close(found.ess["w"][2].item(), arviz.ess(paths[:, :, 2], method="mean").item(), rtol=1e-10, atol=0)


def test_r_hat_of_a_single_chain_compares_its_halves() -> None:
    """ArviZ computes none for a single chain. The middle one of 201 samples is in neither half."""
    path = autoregressive(0.5, (1, 201, 5)) + np.linspace(0, 2, 201)[:, None]
    found = diagnose(recorded(path))
    halves = np.concatenate([path[:, :100], path[:, 101:]])
    within, between = halves.var(1, ddof=1).mean(0), 100 * halves.mean(1).var(0, ddof=1)
    assert_close(found.rhat["w"], np.sqrt((0.99 * within + between / 100) / within), rtol=1e-10, atol=0)
    assert found.worst[1] == found.rhat["w"].max() > 1.2
    assert np.isnan(diagnose(recorded(path[:, :7])).rhat["w"]).all()


def test_export_to_arviz_has_chains_draws_and_losses() -> None:
    paths = autoregressive(0.5, (2, 30, 7))
    ensembles = recorded(paths)
    ensembles[1].collect(1.0)  # a longer chain: what all have is taken
    data = inference_data(ensembles, weights=None)
    assert_close(data.posterior["w"].values, paths)
    assert_close(data.sample_stats["loss"].values, paths.sum(2))
    assert inference_data(ensembles, weights=3).posterior["w"].shape == (2, 30, 3)
    assert_close(inference_data(ensembles, weights=3).posterior["w"].values, paths[:, :, ::3])


def test_traces_are_drawn(tmp_path: Path) -> None:
    trace_plot(tmp_path / "trace.png", recorded(autoregressive(0.5, (2, 30, 2))))
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


def test_too_little_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="no sample was kept in 0 steps"):
        diagnose(Ensemble(network()))
    with pytest.raises(ValueError, match="at least 4 samples of each chain, got 3"):
        diagnose(walked(3)[0])
    with pytest.raises(ValueError, match="none has been kept"):
        Ensemble(network()).posterior()
    with pytest.raises(ValueError, match="the ensemble stored no weights"):
        walked(3, keep=False)[0].posterior()
    with pytest.raises(ValueError, match="thin must be at least 1, got 0"):
        Ensemble(network(), thin=0)
    with pytest.raises(ValueError, match="there is no prediction yet"):
        Predictive(network(), torch.ones(1, 3)).prediction()
