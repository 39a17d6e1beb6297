"""Files of posteriors: every kind comes back bit for bit, and what is no whole posterior gets one sentence."""

from __future__ import annotations

import builtins
import json
import pickle
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import bayesgrad
from bayesgrad import Posterior, optim
from bayesgrad.posterior import BernoulliPosterior, SampledPosterior, load, mc_dropout, storage
from mutations import mutated, survives


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3)).eval()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(9, 4, generator=generator), torch.randint(3, (9,), generator=generator)


def trained(optimizer: Any, model: nn.Module) -> Posterior:
    x, y = data()
    outputs = model(x)
    if hasattr(optimizer, "observe"):
        optimizer.observe(outputs)
    nn.functional.cross_entropy(outputs, y).backward()
    optimizer.step()
    return optimizer.posterior(model)


def structured(structure: str, **options: Any) -> Callable[[nn.Module], Posterior]:
    return lambda model: bayesgrad.laplace(model, [data()], likelihood="categorical", structure=structure, **options)


def bag(model: nn.Module) -> Posterior:
    return SampledPosterior([{n: torch.randn_like(p) for n, p in model.named_parameters()} for _ in range(3)], model)


PRIORS = {"0.weight": 0.5, "0.bias": 1.5, "3.weight": 2.5, "3.bias": 3.5}
KINDS: dict[str, Callable[[nn.Module], Posterior]] = {
    "gaussian": lambda model: trained(optim.AdaBayes(model.parameters(), batch_size=9), model),
    "dense": lambda model: trained(optim.DenseFilter(model, batch_size=9), model),
    "kronecker": lambda model: trained(optim.KroneckerFilter(model, batch_size=9), model),
    "whitened": lambda model: trained(optim.KroneckerFilterFP(model, batch_size=9), model),
    "bernoulli": lambda model: BernoulliPosterior({n: p.detach() for n, p in model.named_parameters()}, model, seed=5),
    "dropout": lambda model: optim.SpikeSlab(model, keep=0.5).posterior(model),
    "mc_dropout": lambda model: mc_dropout(model, seed=2),
    "samples": bag,
    "laplace diag": structured("diag"),
    "laplace kron": structured("kron", bias="separate"),
    "laplace input": structured("input"),
    "laplace full": structured("full"),
    "laplace subsampled": structured("subsampled", seed=4),
    "laplace by name": structured("subsampled", prior_precision=PRIORS, subsample=5),
    "laplace last layer": structured("kron", params="last_layer"),
}


def same(posterior: Posterior, loaded: Posterior, x: torch.Tensor) -> None:
    assert type(loaded) is type(posterior)
    assert list(loaded.mean) == list(posterior.mean)
    pairs = [(posterior.mean, loaded.mean), (posterior.variance(), loaded.variance())]
    if posterior.mean:
        pairs.append((posterior.sample(2), loaded.sample(2)))
    assert all(torch.equal(a[name], b[name]) for a, b in pairs for name in a)
    assert torch.equal(posterior.predict(x, 4), loaded.predict(x, 4))


def checksum(path: Path) -> str:
    with safe_open(path, "pt") as file:
        return file.metadata()["sha256"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_comes_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """Seed and number of draws included, so that draws go on where they were; and saved again, it is the same."""
    model = network()
    posterior, x = KINDS[kind](model), data()[0]
    if posterior.mean:
        posterior.sample(3)
    posterior.save(tmp_path / "one")
    loaded = Posterior.load(tmp_path / "one", model)
    loaded.save(tmp_path / "two")
    assert checksum(tmp_path / "one") == checksum(tmp_path / "two")
    same(posterior, loaded, x)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


@pytest.mark.parametrize("kind", ["gaussian", "kronecker", "bernoulli", "dropout", "mc_dropout", "samples"])
def test_the_noise_of_the_data_comes_back(kind: str, tmp_path: Path) -> None:
    """With it the intervals of labels; a state without it, as those of 0.1, has the noise 1."""
    model = network()
    posterior, x = KINDS[kind](model), data()[0]
    posterior.likelihood, posterior.noise_scale = "gaussian", 0.1
    posterior.save(tmp_path / "one")
    loaded, state = Posterior.load(tmp_path / "one", model), posterior.state_dict()
    assert loaded.noise_scale == 0.1
    one, two = (found.interval(x, samples=4, seed=0, statistics="running") for found in (posterior, loaded))
    assert torch.equal(one.lower, two.lower)
    assert torch.equal(one.upper, two.upper)
    del state["noise_scale"]
    assert Posterior.from_state_dict(state, model).noise_scale == 1.0


def test_in_a_new_process(tmp_path: Path) -> None:
    model = network()
    posterior = KINDS["laplace subsampled"](model)
    posterior.sample(1)
    posterior.save(tmp_path / "posterior")
    code = (
        "import sys, torch; from bayesgrad.posterior import load; p = load(sys.argv[1]);"
        "draw = p.sample(1)['0.weight']; sys.stdout.buffer.write(draw.numpy().tobytes())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "posterior")], capture_output=True, check=True)
    assert done.stdout == posterior.sample(1)["0.weight"].numpy().tobytes()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    posterior = KINDS["laplace diag"](network())
    posterior.save(tmp_path / "posterior")
    return tmp_path / "posterior"


def rewritten(path: Path, change: Callable[[dict[str, str], dict[str, torch.Tensor]], None]) -> None:
    """The file with other contents, its checksum as it was."""
    with safe_open(path, "pt") as file:
        header, tensors = dict(file.metadata()), {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    change(header, tensors)
    save_file(tensors, path, metadata=header)


def test_files_cut_short_or_altered(saved: Path) -> None:
    whole = saved.read_bytes()
    for length in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        saved.write_bytes(whole[:length])
        with pytest.raises(
            ValueError, match="cannot be read as a posterior: it is damaged, truncated or not a safetensors"
        ):
            load(saved)
    step = len(whole) // 40
    for place in range(len(whole) - 1, 8, -step):  # a bit anywhere in header and tensors
        saved.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"cannot be read|was altered|is not a file of a posterior|has version"):
            load(saved)
    saved.write_bytes(whole)
    load(saved)


def test_files_of_others(saved: Path, tmp_path: Path) -> None:
    rewritten(saved, lambda header, tensors: header.update(version="2"))
    with pytest.raises(ValueError, match="has version '2' of the format, but this bayesgrad reads 1: read it with"):
        load(saved)
    save_file({"w": torch.ones(2)}, saved)
    with pytest.raises(ValueError, match="is not a file of a posterior"):
        load(saved)
    torch.save({"kind": "gaussian"}, saved)
    with pytest.raises(ValueError, match="not a safetensors file"):
        load(saved)

    class Trap:
        def __reduce__(self) -> Any:
            return (tmp_path / "sprung").touch, ()

    saved.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match="cannot be read as a posterior"):
        load(saved)
    assert not (tmp_path / "sprung").exists()
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nowhere")


def test_states_that_are_not_whole(tmp_path: Path) -> None:
    state = KINDS["gaussian"](network()).state_dict()
    with pytest.raises(ValueError, match="needs the keys 'seed', 'draws', 'tensors'"):
        Posterior.from_state_dict({"kind": "gaussian"})
    with pytest.raises(ValueError, match="got 'mystery'"):
        Posterior.from_state_dict({**state, "kind": "mystery"})
    storage.write(tmp_path / "partial", {**state, "tensors": {"mean": {}}})  # with a checksum that is right
    with pytest.raises(ValueError, match="is incomplete: it lacks 'variance'"):
        load(tmp_path / "partial")


def test_models_of_another_architecture(tmp_path: Path) -> None:
    model = network()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    KINDS["laplace last layer"](model).save(tmp_path / "posterior")
    wider = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(), nn.Linear(6, 3), nn.Linear(3, 3, bias=False))
    message = r"it lacks '3.bias', has '0.weight' with shape \[5, 3\] instead of \[5, 4\]\."
    other = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(), nn.Linear(5, 3, bias=False))
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "posterior", other)
    with pytest.raises(
        ValueError, match=r"it has the extra parameter '4.weight', has '0.weight' with shape .* and 1 more\."
    ):
        load(tmp_path / "posterior", wider)
    with pytest.raises(ValueError, match=r"a parameter '3\.weight' that the model lacks"):
        load(tmp_path / "posterior").predict(data()[0], model=nn.Linear(4, 3))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_failed_write_leaves_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = saved.read_bytes()

    def fails(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(storage.os, "replace", fails)
    with pytest.raises(OSError, match="no space"):
        KINDS["laplace full"](network()).save(saved)
    assert saved.read_bytes() == whole
    assert [path.name for path in saved.parent.iterdir()] == ["posterior"]


def test_without_the_package(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return found(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"needs safetensors: pip install safetensors"):
        load(saved)


def test_the_header_is_readable_by_others(saved: Path) -> None:
    with safe_open(saved, "pt") as file:
        header, names = file.metadata(), list(file.keys())
    assert (header["format"], header["version"]) == ("bayesgrad posterior", "1")
    assert json.loads(header["state"])["kind"] == "laplace"
    assert json.dumps(["mean", "0.weight"]) in names


def resealed(whole: bytes, source: random.Random) -> bytes:
    """Damages what the header says of the posterior, and corrects the checksum, as somebody might on purpose."""
    length = int.from_bytes(whole[:8], "little")
    header = dict(json.loads(whole[8 : 8 + length])["__metadata__"])
    tensors = safetensors.torch.load(whole)
    key = source.choice(("state", "order", "layout"))
    header[key] = mutated(header[key].encode(), source).decode("latin-1")
    if tensors and source.random() < 0.3:
        name = source.choice(list(tensors))
        tensor = tensors[name]
        tensors[name] = source.choice((tensor.reshape(-1)[:0].clone(), tensor.to(torch.int8), torch.ones(3)))
    header.pop("sha256")
    header["sha256"] = storage._checksum(header, tensors)
    return safetensors.torch.save(tensors, header)


@pytest.mark.parametrize("count", [50, pytest.param(10_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("mutate", [mutated, resealed])
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_read_or_refused(kind: str, mutate: Any, count: int, tmp_path: Path) -> None:
    model = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        KINDS[kind](model).save(tmp_path / "posterior.st")
    path = tmp_path / "posterior.st"
    load(path, model)
    _, refused = survives(path, lambda: load(path, model), count, mutate)
    assert refused > count / 4
