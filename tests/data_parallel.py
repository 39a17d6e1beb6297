"""What processes that train one model with DistributedDataParallel find, for tests/contract/test_data_parallel.py.

`python data_parallel.py RANK PROCESSES STEPS FOLDER` saves FOLDER/RANK.pt: name -> what was found, or an error message.
Everything runs in one process group, since a process takes seconds to start. More than FEW steps are those of the table
of optimizers alone: other things are found with FEW.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import bayesgrad
from bayesgrad import optim, samplers
from bayesgrad.distributed import independent_draws, independent_processes
from bayesgrad.preconditioners.refresh import INVERTED, MERGED
from cases import CASES, batch, same, small_model, weights

BY_NAME = {case.name: case for case in CASES}
CORRECTED = (("diagonal", "jeffreys"), ("fisher", "flat"), ("kronecker", "flat"), ("kronecker", "jeffreys"))
# Steps: of all runs in the fast suite, with two processes; of variants in the slow one, with four; of plain runs in it.
FEW, SOME, MANY = 4, 8, 20
OWN_DRAWS = ("IVON", "VON", "VOGN", "BayesBiNN", "AdaBayes-drawn")
TIMEOUT = timedelta(hours=1)  # the first process runs everything alone before the others meet it
Result = dict[str, Tensor] | str


def model_of(seed: int = 0) -> nn.Module:
    model = small_model(torch.float64, width=24)
    torch.manual_seed(seed)  # from which optimizers draw their seeds
    return model


@dataclass(frozen=True)
class Run:
    """One training run, in one process or in several.

    Args:
        name: of the run.
        make: model -> optimizer.
        micro: micro-batches of each step, of which all but the last run under `no_sync`.
        each: whether weights are drawn for each micro-batch.
        weighted: whether losses of processes are weighted by the number of examples, for the mean over all.
        uneven: whether processes have batches of different sizes, which change; the loss is the mean of their means.
        clip: the norm of gradients.
        bad: the step in which a number of the first process's inputs is NaN.
        closure: whether to use step(closure).
        scaled: the factor of the loss, which gradients are divided by before the step.
        parts: whether one process runs a backward pass for the rows of each process.
        labels: whether observe() gets labels.
        dtype: of weights and inputs.
        ddp: options of DistributedDataParallel.
    """

    name: str
    make: Callable[[nn.Module], Any]
    model: Callable[[], nn.Module] = model_of
    steps: int | None = None
    micro: int = 1
    each: bool = False
    uneven: bool = False
    weighted: bool = False
    clip: float | None = None
    bad: int | None = None
    closure: bool = False
    scaled: float = 1.0
    parts: bool = False
    labels: bool = False
    dtype: torch.dtype = torch.float64
    ddp: dict[str, Any] = field(default_factory=dict)

    def rows(self, size: int, index: int) -> list[list[Tensor]]:
        """The rows of each micro-batch and process in a step."""
        found = []
        for one in torch.arange(32).chunk(self.micro):
            sizes = [len(one) // size] * size
            if self.uneven and index % 3 == 0:
                sizes[0] += 2
            if self.uneven and index % 3 < 2:  # in the second step, the shapes of some processes are new
                sizes[-1] -= 2
            found.append(list(one[: sum(sizes)].split(sizes)))
        return found

    @property
    def sharded(self) -> bool:
        """Whether it runs with fully_shard too in the fast suite, where tests/sharded_processes.py has plain runs."""
        words = ("accumulated", "clipped", "skips", "raises", "closure", "adapts", "uneven", "float32")
        return any(word in self.name for word in words)


def of(name: str, **options: Any) -> Callable[[nn.Module], Any]:
    case = BY_NAME[name]
    return lambda model: case.of(model, fused=False, **options)


def every_run(steps: int) -> list[Run]:
    return [*plain_runs(), *(replace(run, steps=run.steps or min(steps, SOME)) for run in variants())]


def plain_runs() -> Iterator[Run]:
    """Every optimizer and sampler, in both dtypes."""
    for case in CASES:
        parts = case.name in ("FOOF-backward", "KFAC-backward")  # whose bound is that of micro-batches
        yield Run(case.name, of(case.name), parts=parts)
        # Relaxed samples of BayesBiNN-sharp are steep, so that rounding grows: later, some signs differ. In step 20 of
        # KFAC an input of a ReLU is 8e-7, less than rounding.
        few = {"BayesBiNN-sharp": FEW, "KFAC": 18}.get(case.name)
        yield Run(f"{case.name} float32", of(case.name), parts=parts, dtype=torch.float32, steps=few)
    for fisher in ("exact", "centered", "empirical", "sampled"):
        make = dense_filter(fisher)
        yield Run(f"DenseFilter {fisher}", make, model=tiny, labels=fisher in ("centered", "empirical"))
    yield Run("DenseFilter float32", dense_filter("exact"), model=tiny, dtype=torch.float32)
    for metric in ("identity", "kronecker", "fisher", "empirical"):
        yield Run(f"Langevin {metric}", langevin(metric), model=tiny, labels=metric == "empirical")


def variants() -> Iterator[Run]:
    """Other options, other loops, and other options of DistributedDataParallel."""
    for name in ("FOOF", "KFAC", "KroneckerFilterFP"):
        more = {} if name == "KroneckerFilterFP" else {"max_norm": float("inf")}
        yield Run(f"{name} backward unbounded", of(name, precondition="backward", **more))
    for name in ("VOGN", "KFAC", "KroneckerFilter", "KroneckerFilterFP-prior", "NaturalGradient", "AdaBayes-sampled"):
        yield Run(f"{name} accumulated", of(name), micro=2)
        yield Run(f"{name} uneven", of(name), uneven=True)
    for name in ("FOOF", "FOOF-backward", "VOGGN", "Newton", "VON", "SpikeSlab-newton", "Langevin", "SNGD", "IVON"):
        yield Run(f"{name} accumulated", of(name), micro=2, parts=name == "FOOF-backward")
    for name in ("OGN", "FOOF", "VON", "SNGD", "IVON"):
        yield Run(f"{name} uneven", of(name), uneven=True)
    for name in ("OGN", "KFAC", "Newton", "KroneckerFilterFP-prior", "NaturalGradient"):
        yield Run(f"{name} uneven and weighted", of(name), uneven=True, weighted=True)
    for name in ("IVON", "IVON-natural", "VON", "VOGN", "AdaBayes-drawn", "SpikeSlab", "BayesBiNN"):
        yield Run(f"{name} drawn for each micro-batch", of(name), micro=2, each=True)
    for name in ("OGN", "KroneckerFilterFP-prior", "KroneckerFilter-prior", "FOOF", "IVON", "NaturalGradient"):
        yield Run(f"{name} clipped", of(name), clip=0.05)
        yield Run(f"{name} scaled", of(name), scaled=1024.0)
    for name in ("AdaBayes", "FOOF", "KFAC", "OGN", "VOGGN", "Newton", "NaturalGradient", "AdaBayes-sampled", "SNGD"):
        yield Run(f"{name} skips", of(name, nonfinite="skip"), bad=2)
        if name != "SNGD":  # one process raises where the loss is observed, several at the step, all alike
            yield Run(f"{name} raises", of(name, nonfinite="raise"), bad=2)
    for name in ("KFAC", "VOGN", "Newton", "NaturalGradient", "AdaBayes-sampled", "IVON"):
        yield Run(f"{name} static graph", of(name), ddp={"static_graph": True})
        yield Run(f"{name} bucket view", of(name), ddp={"gradient_as_bucket_view": True})
        yield Run(f"{name} unused parameters", of(name), ddp={"find_unused_parameters": True})
    for name in ("IVON", "VOGN", "VOGGN", "VON"):
        yield Run(f"{name} two draws of a closure", of(name, samples=2), closure=True)
    adapts = of("NaturalGradient", adapt_damping=True, step_size="quadratic", momentum=0.5)
    yield Run("NaturalGradient adapts damping", adapts, closure=True, steps=6)
    yield Run("FOOF singular raises", of("FOOF", damping=0.0, max_norm=1.0))
    yield Run("KFAC reduce", of("KFAC", sharing="reduce"))
    for likelihood in ("gaussian", "bernoulli", "poisson"):
        yield Run(f"Langevin labels {likelihood}", of("Langevin", likelihood=likelihood))
    for metric, correction in CORRECTED:
        make = langevin(metric, correction=correction)
        yield Run(f"Langevin {metric} {correction}", make, model=tiny, steps=3)


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 2), nn.Tanh(), nn.Linear(2, 3)).double()


def dense_filter(fisher: str) -> Callable[[nn.Module], Any]:
    return lambda model: optim.DenseFilter(model, batch_size=32, prior_std=0.3, fisher=fisher, seed=0)


def langevin(metric: str, **options: Any) -> Callable[[nn.Module], Any]:
    options = {"num_data": 1000, "lr": 1e-3, "prior_precision": 1.0, "damping": 0.1, "seed": 0} | options
    return lambda model: samplers.Langevin(model, metric=metric, **options)


def sharded(model: nn.Module) -> Any:
    """Two modules gather parameters; some processes have no part of a small one."""
    if (scale := getattr(model, "scale", None)) is not None:
        model.scale = nn.Parameter(scale.detach().view(1))  # fully_shard does not support scalars
    inner = getattr(model, "wide", None)
    fully_shard(model[0] if inner is None else inner)  # pyright: ignore[reportIndexIssue]
    return fully_shard(model)


def whole(model: nn.Module) -> Result:
    """The weights, of which each process may have a part."""
    return {name: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for name, p in model.named_parameters()}


def train(run: Run, steps: int, rank: int | None, size: int, shards: bool = False) -> Result:
    """Trains with the rows of one process, or of all if `rank` is None."""
    model = run.model().to(run.dtype)
    net: Any = model
    if rank is not None:
        net = sharded(model) if shards else DistributedDataParallel(model, **run.ddp)
    optimizer = run.make(model)
    for index in range(run.steps or steps):
        x, y = batch(index, run.dtype)
        if index == run.bad:
            x[0, 0] = torch.nan
        rows = run.rows(size, index)

        def passes(x: Tensor = x, y: Tensor = y, rows: Any = rows) -> Tensor:
            for turn, parts in enumerate(rows):
                silent = isinstance(net, DistributedDataParallel) and turn < len(rows) - 1
                if shards:
                    net.set_requires_gradient_sync(turn == len(rows) - 1)
                with ExitStack() as stack:
                    stack.enter_context(optimizer.sampled() if run.each else nullcontext())
                    stack.enter_context(net.no_sync() if silent else nullcontext())
                    loss = one_pass(x, y, parts)
            return loss  # pyright: ignore

        def one_pass(x: Tensor, y: Tensor, parts: list[Tensor], number: int = len(rows)) -> Tensor:
            own = torch.cat(parts) if rank is None else parts[rank]
            outputs = net(x[own])
            pieces = outputs.split([len(part) for part in parts]) if rank is None else [outputs]
            labels = [y[part] for part in parts] if rank is None else [y[own]]
            losses = [F.cross_entropy(*pair) for pair in zip(pieces, labels)]
            loss = torch.stack(losses).mean() / number
            if run.weighted and rank is None:
                loss = F.cross_entropy(outputs, y[own]) / number
            elif run.weighted:
                loss = loss * size * len(own) / sum(map(len, parts))
            optimizer.observe(outputs, loss=loss, labels=y[own] if run.labels else None)
            if run.parts and rank is None:
                for one in losses:
                    (one * run.scaled / len(losses) / number).backward(retain_graph=True)
            else:
                (run.scaled * loss).backward()
            return loss

        def closure() -> Tensor:
            optimizer.zero_grad()
            return passes()

        if run.closure:
            optimizer.step(closure)
            continue
        with nullcontext() if run.each else optimizer.sampled():
            closure()
        for p in model.parameters() if run.scaled != 1 else ():
            p.grad.div_(run.scaled)  # pyright: ignore[reportOptionalMemberAccess]
        if run.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        optimizer.step()
    return whole(model)


@contextmanager
def counted() -> Iterator[list[int]]:
    """The sizes in bytes of what is communicated beside DistributedDataParallel's own averages."""
    seen: list[int] = []
    patched = {}

    def count(name: str, number: Callable[..., int]) -> None:
        patched[name] = own = getattr(distributed, name)

        def call(*args: Any, **how: Any) -> Any:
            seen.append(number(*args))
            return own(*args, **how)

        setattr(distributed, name, call)

    count("all_reduce", lambda t, *_: t.nbytes)
    count("broadcast", lambda t, *_: t.nbytes)
    count("all_gather", lambda parts, *_: sum(t.nbytes for t in parts))
    try:
        yield seen
    finally:
        for name, own in patched.items():
            setattr(distributed, name, own)


def communicated(
    name: str, rank: int, size: int, steps: int = 24, **options: Any
) -> list[tuple[int, list[int], list[int]]]:
    """Bytes of each step, and for layers the latest steps in which they were updated and inverted."""
    model = model_of()
    net, optimizer = DistributedDataParallel(model), of(name, **options)(model)
    found = []
    for index in range(steps):
        with counted() as seen:
            x, y = (t.chunk(size)[rank] for t in batch(index, torch.float64))
            with optimizer.sampled():
                optimizer.zero_grad()
                loss = F.cross_entropy(outputs := net(x), y)
                optimizer.observe(outputs, loss=loss)
                loss.backward()
            optimizer.step()
        clocks = [entry["clock"] for entry in optimizer.state.values() if "clock" in entry]
        found.append((sum(seen), *([int(clock[k]) for clock in clocks] for k in (MERGED, INVERTED))))
    return found


def swapped(name: str, rank: int, size: int) -> int:
    """Bytes of gradients and directions that this process sends, in a step with fully_shard."""
    found, own = [], distributed.all_to_all_single

    def count(output: Tensor, given: Tensor, *rest: Any, **how: Any) -> Any:
        found.append(given.nbytes)
        return own(output, given, *rest, **how)

    distributed.all_to_all_single = count
    try:
        train(Run(name, of(name)), 1, rank, size, True)
    finally:
        distributed.all_to_all_single = own
    return sum(found)


def refresh_flops(rank: int | None, size: int) -> int:
    """Operations of one process to form and invert the factors of KFAC, in the first step."""
    torch.manual_seed(0)
    sizes = (200, 150, 150, 150, 10)
    model = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(sizes))).double()
    optimizer = optim.KFAC(model, likelihood="gaussian", seed=0)
    net = model if rank is None else DistributedDataParallel(model)
    x = torch.randn(64, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outputs = net(x if rank is None else x.chunk(size)[rank])
    loss = outputs.square().mean()
    optimizer.observe(outputs, loss=loss)
    loss.backward()
    aten = torch.ops.aten
    work = {
        aten.linalg_cholesky_ex: lambda a, *_, **__: a[0] * a[-1] ** 3 // 3,
        aten.cholesky_inverse: lambda a, *_, **__: a[0] * 2 * a[-1] ** 3 // 3,
    }
    part, total = optimizer.preconditioner, []
    for method in ("share", "_refresh"):
        own = getattr(part, method)

        def within(*args: Any, own: Callable[..., Any] = own) -> Any:
            with FlopCounterMode(display=False, custom_mapping=work) as counter:
                own(*args)
            total.append(counter.get_total_flops())

        setattr(part, method, within)
    optimizer.step()
    return sum(total)


def attempt(found: dict[str, Any], name: str, what: Callable[..., Any], *args: Any) -> None:
    try:
        found[name] = what(*args)
    except (RuntimeError, ValueError, TypeError, ArithmeticError) as error:
        found[name] = f"{type(error).__name__}: {error}"


def own_noise(run: int, index: int, uniform: bool) -> Callable[[Tensor], Tensor]:
    """Noise of one process in one step."""

    def made(p: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(10_000 * run + 100 * index + p.numel() % 97)
        draw = torch.rand if uniform else torch.randn
        return draw(p.shape, generator=generator, dtype=p.dtype)

    return made


def own_draws(name: str, rank: int | None, size: int) -> Result:
    """Another draw in each process; one process draws for the rows of each process in turn."""
    model = model_of()
    exact = {"hessian": "exact"} if name == "VON" else {}  # probes are functions of the number of draws
    with independent_draws():
        optimizer = of(name, **exact)(model)
    net = model if rank is None else DistributedDataParallel(model)
    for index in range(3):
        optimizer.zero_grad()
        for other in range(size) if rank is None else (rank,):
            x, y = (t.chunk(size)[other] for t in batch(index, torch.float64))
            with optimizer.sampled(noise=own_noise(other, index, name == "BayesBiNN")):
                outputs = net(x)
                loss = F.cross_entropy(outputs, y) / (size if rank is None else 1)
                optimizer.observe(outputs, loss=loss)
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return weights(model)


def first_draw(rank: int) -> Result:
    """Sampled weights without noise that is given."""
    model = model_of()
    with independent_draws():
        optimizer: Any = of("IVON")(model)
    with optimizer.sampled():
        return weights(model)


def differing(name: str, rank: int, size: int) -> Result:
    """The first process does not observe what the others do."""
    model = model_of()
    net, optimizer = DistributedDataParallel(model), of(name)(model)
    x, y = (t.chunk(size)[rank] for t in batch(0, torch.float64))
    outputs = net(x)
    loss = F.cross_entropy(outputs, y)
    if rank:
        optimizer.observe(outputs, loss=loss)
    loss.backward()
    before = weights(model)
    try:
        optimizer.step()
    finally:
        assert same(before, weights(model))
    return {}


def empty(rank: int, size: int) -> Result:
    model = model_of()
    optimizer = of("Newton")(model)
    outputs = model(torch.zeros(0, 40, dtype=torch.float64))
    optimizer.observe(outputs, loss=outputs.sum())
    return {}


def in_group(name: str, alone: bool, rank: int, size: int) -> Result:
    """A step of a model in a process group of its own process, or, with `alone`, of all that train models alone."""
    groups = [distributed.new_group([r]) for r in range(size)]
    model = model_of()
    net = DistributedDataParallel(model, process_group=None if alone else groups[rank])
    with independent_processes() if alone else nullcontext():
        optimizer = of(name)(model)
    join_step(optimizer, net, 0, 0, [rank], 1)
    return weights(model)


def late(before: tuple[nn.Module, Any], rank: int, size: int) -> Result:
    """An optimizer that was built before the process group, with another seed in each process."""
    run = Run("late", lambda model: before[1], model=lambda: before[0])
    return train(run, 3, rank, size) | {"seed": torch.tensor(before[1].param_groups[0]["seed"])}


COMMUNICATING = (
    "FOOF",
    "SpectralFOOF",
    "KroneckerFilter",
    "KroneckerFilterFP",
    "NaturalGradient",
    "OGN",
    "VOGN",
    "Newton",
    "VON",
)
COMMUNICATING += ("SpikeSlab-newton", "AdaBayes-sampled", "KalmanMomentum-sampled", "SNGD")
JOINED = ("AdaBayes", "AdaBayesFP", "KalmanMomentum", "AdaBound", "IVON", "BayesBiNN", "STE")
NOT_JOINED = ("KFAC", "OGN", "Newton", "AdaBayes-sampled", "KroneckerFilter", "NaturalGradient", "SNGD")


def joined(name: str, rank: int | None, size: int, state: bool = True) -> Result:
    """Two epochs in which the first process has fewer batches; then weights and state."""
    model = model_of()
    optimizer = of(name)(model)
    net = model if rank is None else DistributedDataParallel(model)
    numbers = [5, *[8] * (size - 1)]  # batches of each process
    for epoch in range(2):
        if rank is None:
            for index in range(max(numbers)):
                active = [r for r in range(size) if index < numbers[r]]
                join_step(optimizer, model, epoch, index, active, size)
            continue
        parts = [net, bayesgrad.joined_state(optimizer)] if state else [net]
        with Join(parts):  # pyright: ignore[reportArgumentType]
            for index in range(numbers[rank]):
                join_step(optimizer, net, epoch, index, [rank], 1)
    found = {f"{k} {key}": v for k, p in enumerate(model.parameters()) for key, v in optimizer.state[p].items()}
    return weights(model) | {key: value for key, value in found.items() if isinstance(value, Tensor)}


def join_step(optimizer: Any, net: nn.Module, epoch: int, index: int, active: list[int], divisor: int) -> None:
    with optimizer.sampled():
        optimizer.zero_grad()
        for r in active:
            x, y = (t[4 * r : 4 * r + 4] for t in batch(10 * epoch + index, torch.float64))
            outputs = net(x)
            loss = F.cross_entropy(outputs, y) / divisor
            optimizer.observe(outputs, loss=loss)
            loss.backward()
    optimizer.step()


def main(rank: int, size: int, steps: int, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    runs = every_run(steps) if size > 2 or steps == FEW else list(plain_runs())
    for run in runs if rank == 0 else ():
        attempt(found, f"alone {run.name}", train, run, steps, None, size)
    for name in OWN_DRAWS if rank == 0 and steps == FEW else ():
        found[f"alone own draws {name}"] = own_draws(name, None, size)
    for name in JOINED if rank == 0 and steps == FEW else ():
        found[f"alone joined {name}"] = joined(name, None, size)
    found["flops alone"] = refresh_flops(None, 1)
    model = model_of(rank)
    before = model, BY_NAME["VOGGN"].of(model, fused=False)
    where = f"file://{folder}/group"
    distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=TIMEOUT)
    for run in runs:
        attempt(found, run.name, train, run, steps, rank, size)
    for run in (run for run in runs if not run.ddp and (run.sharded or steps > FEW)):
        attempt(found, f"sharded {run.name}", train, run, steps, rank, size, True)
    found["flops"] = refresh_flops(rank, size)
    if steps == FEW:
        others(found, before, rank, size)
    distributed.destroy_process_group()
    torch.save(found, folder / f"{rank}.pt")


def others(found: dict[str, Any], before: tuple[nn.Module, Any], rank: int, size: int) -> None:
    """What is found beside weights: draws, refusals, joined processes, what is communicated."""
    for name in OWN_DRAWS:
        attempt(found, f"own draws {name}", own_draws, name, rank, size)
    found["first draw"], found["first draw again"] = first_draw(rank), first_draw(rank)
    attempt(found, "differing", differing, "Newton", rank, size)
    attempt(found, "empty", empty, rank, size)
    for name in JOINED:
        attempt(found, f"joined {name}", joined, name, rank, size)
    for name in NOT_JOINED:
        attempt(found, f"joined {name}", joined, name, rank, size)
    attempt(found, "joined without state", joined, "AdaBayes", rank, size, False)
    for name in ("AdaBayes", "Newton", "FOOF"):
        for alone in (False, True):
            attempt(found, f"in group {name} {alone}", in_group, name, alone, rank, size)
    found["late"] = late(before, rank, size)
    for name in ("AdaBayes", "AdaBayesFP", "IVON", "KalmanMomentum"):
        found[f"bytes {name}"] = communicated(name, rank, size)
    for name in (*COMMUNICATING, "AdaBound", "STE", "BayesBiNN"):
        found[f"bytes {name}"] = communicated(name, rank, size, 1)
    found["bytes KFAC"] = communicated("KFAC", rank, size, update_every=10, stats_every=10)
    found["swapped"] = swapped("FOOF", rank, size)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), Path(sys.argv[4]))
