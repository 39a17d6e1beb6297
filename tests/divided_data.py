"""What processes find that have parts of the data, or chains of their own, for tests/contract/test_divided_data.py.

`python divided_data.py RANK PROCESSES FOLDER` saves FOLDER/RANK.pt: name -> tensors, or an error message. The first
process also saves what it found alone with all data, before it joined the others.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, TensorDataset

import bayesgrad
from bayesgrad import DataShard
from bayesgrad.distributed import independent_processes, joint_processes
from bayesgrad.samplers import SNGD, Ensemble, Langevin, diagnose, joint_posterior, run_chains
from cases import small_model
from data_parallel import attempt

EXAMPLES = 31  # two, three and four processes repeat one or two of them
CHAINS = 5
TIMEOUT = timedelta(seconds=600)


def examples(count: int = EXAMPLES, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 40, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (count,), generator=generator)


def classifier() -> nn.Module:
    return small_model(torch.float64, width=12).eval()


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(6, 4).double(), nn.Linear(4, 3).double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.table(tokens).tanh().mean(1))


@dataclass(frozen=True)
class Case:
    """A posterior of data that are divided.

    Args:
        options: of `laplace`.
        model: builds it.
        labels: from labels 0, 1, 2 to those of the likelihood.
        inputs: from inputs to those of the model.
        sampler: options of DistributedSampler.
        loader: options of DataLoader.
        alone: the rows that one process uses; None for all.
        explicit: whether each process has a list of batches instead.
        mapping: whether batches are mappings.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = classifier
    labels: Callable[[Tensor], Tensor] = lambda y: y
    inputs: Callable[[Tensor], Tensor] = lambda x: x
    sampler: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    alone: Callable[[int], Tensor] | None = None
    explicit: bool = False
    mapping: bool = False


def one_hot(y: Tensor) -> Tensor:
    return F.one_hot(y, 3).double()


def without_last_batches(size: int) -> Tensor:
    """The examples of whole batches of four: process r has k processes + r."""
    count = -(-EXAMPLES // size) // 4 * 4
    return torch.tensor([k * size + r for k in range(count) for r in range(size) if k * size + r < EXAMPLES])


CASES = [
    *(Case(f"{structure} {fisher}", {"structure": structure, "fisher": fisher})
      for structure in ("diag", "kron", "input", "full", "subsampled") for fisher in ("exact", "empirical")),
    Case("sampled labels", {"structure": "kron", "fisher": "sampled"}),
    Case("sampled flags", {"structure": "diag", "fisher": "sampled", "likelihood": "bernoulli"}, labels=one_hot),
    Case("separate biases", {"structure": "kron", "bias": "separate"}),
    Case("input, separate biases", {"structure": "input", "bias": "separate"}),
    Case("words", {"structure": "kron"}, Text, inputs=lambda x: x[:, :5].abs().long().clamp(max=5)),
    Case("words subsampled", {"structure": "subsampled"}, Text, inputs=lambda x: x[:, :5].abs().long().clamp(max=5)),
    Case("regression", {"structure": "full", "likelihood": "gaussian"}, labels=one_hot),
    Case("subsample", {"structure": "diag", "subsample": 9}),
    Case("subsample of sampled labels", {"structure": "subsampled", "subsample": 9, "fisher": "sampled"}),
    Case("shuffled", {"structure": "full"}, sampler={"shuffle": True, "seed": 3}),
    Case("workers", {"structure": "diag"}, loader={"num_workers": 1}),
    Case("extrapolated", {"structure": "full", "num_data": 1000}),
    Case("sampler drops", {"structure": "full"}, sampler={"drop_last": True},
         alone=lambda size: torch.arange(EXAMPLES // size * size)),
    Case("loader drops", {"structure": "full"}, loader={"drop_last": True}, alone=without_last_batches),
    Case("explicit", {"structure": "kron"}, explicit=True),
    Case("mappings", {"structure": "full"}, mapping=True),
]  # fmt: skip


class Mappings(Dataset):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"labels": self.y[index], "x": self.x[index]}


def loader_of(case: Case, rank: int | None, size: int) -> Iterable:
    x, y = examples()
    x, y = case.inputs(x), case.labels(y)
    if rank is None and case.alone is not None:
        x, y = x[case.alone(size)], y[case.alone(size)]
    if case.explicit and rank is not None:  # uneven, and not in order
        rows = torch.arange(EXAMPLES)[rank::size].flip(0)
        return DataShard([(x[some], y[some]) for some in rows.split(3 + rank)])
    data: Dataset = Mappings(x, y) if case.mapping else TensorDataset(x, y)
    if rank is None:
        return DataLoader(data, batch_size=8)
    sampler = DistributedSampler(data, size, rank, **{"shuffle": False, **case.sampler})
    return DataLoader(data, batch_size=4, sampler=sampler, **case.loader)


def summary(posterior: Any, x: Tensor) -> dict[str, Tensor]:
    """What defines a posterior, beside the basis of its eigenvectors."""
    found = {f"variance {name}": v for name, v in posterior.variance().items()}
    found |= {f"hessian {i}": h.dense() for i, h in enumerate(posterior.hessians)}
    fit, predicted = posterior.fit, posterior.predict(x)
    found["fit"] = torch.tensor([fit.loss, fit.outputs], dtype=torch.float64)
    found["evidence"] = posterior.log_marginal_likelihood()
    return found | {
        f"prediction {i}": p for i, p in enumerate(predicted if isinstance(predicted, tuple) else [predicted])
    }


def posterior_of(case: Case, rank: int | None, size: int) -> dict[str, Tensor]:
    options = {"likelihood": "categorical", "seed": 7, **case.options}
    posterior = bayesgrad.laplace(case.model(), loader_of(case, rank, size), **options)
    x = case.inputs(examples(5, seed=1)[0])
    return summary(posterior, {"x": x} if case.mapping else x)


PLAIN = Case("plain")


def tuned(rank: int | None, size: int) -> dict[str, Tensor]:
    """Prior by held-out labels, and the ELBO, of data that are divided."""
    posterior = bayesgrad.laplace(classifier(), loader_of(PLAIN, rank, size), likelihood="categorical", seed=7)
    bound = posterior.elbo(loader_of(PLAIN, rank, size), prior_precision=2.0, samples=4, seed=1)
    posterior.tune_prior("layer", method="heldout", heldout=loader_of(PLAIN, rank, size), steps=12)
    prior = {name: torch.tensor(value) for name, value in posterior.prior_precision.items()}  # pyright: ignore
    return {**prior, "bound": torch.tensor(bound, dtype=torch.float64)}


def predicted(rank: int | None, size: int) -> dict[str, Tensor]:
    """Predictions of all processes, in the order of the data."""
    x, y = examples()
    posterior = bayesgrad.laplace(classifier(), [(x, y)], likelihood="categorical", structure="diag", seed=7)
    if rank is None:
        parts = {"all": posterior.predict(x), "shuffled": posterior.predict(x), "explicit": posterior.predict(x)}
        both = posterior.predict(x, method="mc", decompose=True)
        return parts | {"total": both.total, "epistemic": both.epistemic}  # pyright: ignore
    found = {}
    for name, case in {"all": PLAIN, "shuffled": Case("", sampler={"shuffle": True})}.items():
        shard = DataShard(loader_of(case, rank, size))
        found[name] = shard.gather([posterior.predict(x) for x, _ in shard])
    both = shard.gather([posterior.predict(x, method="mc", decompose=True) for x, _ in shard])
    first = sum(len(x.chunk(size)[r]) for x in (examples()[0],) for r in range(rank))
    own = x.chunk(size)[rank]
    assert torch.equal(own, x[first : first + len(own)])
    shard = DataShard([(own, y[first : first + len(own)])])
    found["explicit"] = shard.gather([posterior.predict(x) for x, _ in shard])
    return found | {"total": both.total, "epistemic": both.epistemic}


def chains(sampler: str) -> dict[str, Tensor]:
    """Samples of several chains, their posterior and their diagnostics."""
    x, y = examples()

    def run(model: nn.Module, seed: int) -> Ensemble:
        assert joint_processes() == 1
        for p in model.parameters():
            nn.init.normal_(p, std=0.1)
        if sampler == "SNGD":
            optimizer: Any = SNGD(model, num_data=EXAMPLES, batch_size=8, lr=0.1, prior_precision=1.0, seed=seed)
        else:
            optimizer = Langevin(model, metric="identity", num_data=EXAMPLES, lr=1e-3, prior_precision=1.0, seed=seed)
        ensemble = Ensemble(model, burn_in=2, sampler=optimizer, limit=4_000 if sampler == "SNGD" else None)
        for _ in range(12):
            rows = torch.randint(EXAMPLES, (8,))
            optimizer.zero_grad()
            outputs = model(x[rows])
            loss = F.cross_entropy(outputs, y[rows])
            optimizer.observe(outputs, loss=loss)
            loss.backward()
            optimizer.step()
            ensemble.collect(loss)
        return ensemble

    before = torch.get_rng_state()
    model = nn.Linear(40, 3).double() if sampler == "SNGD" else classifier()
    torch.set_rng_state(before)
    ensembles = run_chains(run, model, chains=CHAINS, seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    posterior, found = joint_posterior(ensembles), diagnose(ensembles)
    members = {f"members {name}": member for name, member in posterior.members.items()}
    losses = {f"losses {k}": torch.tensor(ensemble.losses) for k, ensemble in enumerate(ensembles)}
    numbers = {"rhat": torch.tensor(found.worst), "predicted": posterior.predict(x), "steps": torch.tensor(12)}
    return {**members, **losses, **numbers}


def refused(how: str, rank: int, size: int) -> dict[str, Tensor]:
    """What all processes refuse together."""
    x, y = examples()
    model, options, data = classifier(), {"likelihood": "categorical", "structure": "diag"}, TensorDataset(x, y)
    sampler = DistributedSampler(data, shuffle=False)
    loader: Any = DataLoader(data, batch_size=4, sampler=sampler)
    if how == "an error of one":
        data.tensors[0][1] = torch.nan
    elif how == "other weights":
        with torch.no_grad():
            next(model.parameters()).mul_(1 + rank * 1e-15)
    elif how == "the sampler of another process":
        loader = DataLoader(data, sampler=DistributedSampler(data, size, 0))
    elif how == "too few examples":
        loader = DataLoader(few := TensorDataset(x[:1], y[:1]), sampler=DistributedSampler(few))
    elif how == "rows that are no examples":
        loader = DataLoader(
            data, sampler=sampler, collate_fn=lambda some: tuple(torch.cat([torch.stack(t)] * 2) for t in zip(*some))
        )
    elif how == "another order":

        class Backwards(BatchSampler):
            def __iter__(self) -> Any:
                return reversed(list(super().__iter__()))

        loader = DataLoader(data, batch_sampler=Backwards(sampler, 4, False))
    elif how == "parts of another size":
        loader = DataLoader(data, sampler=DistributedSampler(data, size + 1, rank))
    elif how == "parts of an unknown kind":
        loader = DataLoader(data)
        loader.dataset.num_processes = size
        loader = DataShard(loader)
    elif how == "a small subsample":
        options["subsample"] = size - 1
    elif how == "a chain diverges":
        run_chains(lambda model, seed: 1 // rank, model, chains=1)
    elif how == "no ensemble":
        run_chains(lambda model, seed: None, model, chains=size)  # pyright: ignore
    bayesgrad.laplace(model, loader, **options)
    return {}


REFUSED = {
    "an error of one": "ValueError: the model's outputs are not finite",
    "other weights": "RuntimeError: processes that train one model differ in the weights of the model or the seed",
    "the sampler of another process": "ValueError: the sampler of this loader is of part 0 of",
    "too few examples": "ValueError: the loader gave no examples",
    "rows that are no examples": "ValueError: batches have",
    "another order": "ValueError: the order in which this loader gives the examples",
    "parts of another size": "ValueError: the sampler of this loader is of part",
    "parts of an unknown kind": "ValueError: the loader divides examples among processes in a way that is not known",
    "a small subsample": "ValueError: subsample must be at least the number of processes",
    "a chain diverges": "ZeroDivisionError: integer division or modulo by zero",
    "no ensemble": "TypeError: run() must return an Ensemble, got NoneType",
}


def own_posterior(rank: int, size: int) -> dict[str, Tensor]:
    """A process of its own takes its part for all data."""
    with independent_processes():
        return posterior_of(PLAIN, rank, size)


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    runs: dict[str, Callable[..., Any]] = {case.name: partial(posterior_of, case) for case in CASES}
    runs |= {"tuned": tuned, "predicted": predicted}
    runs |= {name: lambda *_, name=name: chains(name) for name in ("SNGD", "Langevin")}
    for name, run in runs.items() if rank == 0 else ():
        found[f"alone {name}"] = run(None, size)
    where = f"file://{folder}/group"
    distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=TIMEOUT)
    for name, run in runs.items():
        attempt(found, name, run, rank, size)
    for how in REFUSED:
        attempt(found, how, refused, how, rank, size)
    attempt(found, "own", own_posterior, rank, size)
    distributed.destroy_process_group()
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]), Path(sys.argv[3]))
