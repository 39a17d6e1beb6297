"""What processes that have parts of the parameters do together, for tests/contract/test_sharded.py.

`python sharded_processes.py RANK PROCESSES SAVED_BY FOLDER` saves what it found as FOLDER/RANK.pt: name -> tensors, or
an error message. Distributed checkpoints are read by the processes that have saved them, and, if SAVED_BY is FOUR,
those of four processes too, which have to run first.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recompute

from bayesgrad import optim, packing
from bayesgrad.distributed import independent_draws, independent_processes
from cases import CASES, Case, batch, small_model
from data_parallel import TIMEOUT, attempt

ROWS = 24  # of a batch: divisible by the numbers of processes
STEPS, LATER = range(5), range(5, 8)  # tests/data_parallel.py compares weights after twenty
SHARDED = (*CASES, Case("DenseFilter", optim.DenseFilter, {"batch_size": ROWS, "prior_std": 0.5}, (), layers=True))
BY_NAME = {case.name: case for case in SHARDED}
CHECKPOINTED = ("AdaBayesFP-centered", "KalmanMomentum-prior", "BayesBiNN", "IVON", "AMSBound", "KFAC", "OGN")
CHECKPOINTED += ("DenseFilter",)
ITSELF, FOUR = "itself", "four"
BOTH, LAYERED = ("AdaBayes", "IVON"), ("KFAC", "OGN")
MODES = ("KalmanMomentum", "DenseFilter")
Result = dict[str, Tensor] | str


def model_of() -> nn.Module:
    """Odd numbers of rows, and fewer rows than processes: some have no part of a parameter."""
    model = small_model(torch.float64, width=21)
    model.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))  # fully_shard does not support scalars
    torch.manual_seed(0)  # from which optimizers draw their seeds
    return model


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    fully_shard(model.wide, **options)  # the parameters of the root are gathered by another call
    return fully_shard(model, **options)


def eager(case: Case) -> dict[str, Any]:
    """Options by which kernels are not compiled."""
    return {} if case.make is optim.DenseFilter else {"fused": False}


def optimizer_of(name: str, model: nn.Module, **options: Any) -> Any:
    return BY_NAME[name].of(model, **eager(BY_NAME[name]), **options)


def run(net: nn.Module, optimizer: Any, part: slice, steps: range = STEPS) -> None:
    """Steps on a part of each batch."""
    for index in steps:
        x, y = (t[:ROWS][part] for t in batch(index, torch.float64))
        with optimizer.sampled():
            optimizer.zero_grad()
            loss = F.cross_entropy(outputs := net(x), y)
            optimizer.observe(outputs, loss=loss)
            loss.backward()
        optimizer.step()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def found_in(model: nn.Module, optimizer: Any) -> Result:
    """All weights and state tensors."""
    weights = {name: whole(p.detach()) for name, p in model.named_parameters()}
    names = {id(p): name for name, p in model.named_parameters()}
    entries = {names[id(p)]: entry for p, entry in optimizer.state.items()}
    slots = {f"{name} {slot}": whole(v) for name, entry in entries.items() for slot, v in entry.items()}
    # Moments are in the lower triangle.
    return weights | {name: v.tril() if name.endswith("_moment") and v.dim() == 3 else v for name, v in slots.items()}


def train(case: Case, part: slice | None) -> Result:
    """Parts of parameters and of batches, or all of them if `part` is None."""
    model = model_of() if part is None else sharded(model_of())
    # The bound of a step whose gradient is never formed depends on the number of passes.
    options = {"max_norm": float("inf")} if case.name in ("FOOF-backward", "KFAC-backward") else {}
    optimizer = optimizer_of(case.name, model, **options)
    run(model, optimizer, part or slice(None), range(20) if case.name == "BayesBiNN-sharp" else STEPS)
    return found_in(model, optimizer)


@contextmanager
def all_large() -> Any:
    """Tensors are not packed, so that noise is by the position of the first element of a part."""
    small, packing.SMALL = packing.SMALL, 0
    try:
        yield
    finally:
        packing.SMALL = small


def large(name: str, part: slice | None) -> Result:
    with all_large():
        return train(BY_NAME[name], part)


def replicated_shards(name: str, part: slice, processes: int) -> Result:
    """Shards in groups of processes that have the same: hybrid sharding."""
    mesh = init_device_mesh("cpu", (processes // 2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(model_of(), mesh=mesh)
    optimizer = optimizer_of(name, model)
    run(model, optimizer, part)
    return found_in(model, optimizer)


# --- the training loop ---


def loop(name: str, part: slice | None, kind: str, processes: int) -> Result:
    """Accumulation, clipping, several draws, gradients that are not finite; on all data if `part` is None."""
    options = {"closure": {"samples": 2}, "skip": {"nonfinite": "skip"}, "raise": {"nonfinite": "raise"}}
    model = model_of() if part is None else sharded(model_of())
    optimizer = optimizer_of(name, model, **options.get(kind, {}))
    for index in range(5):
        x, y = (t[:ROWS][part or slice(None)] for t in batch(index, torch.float64))
        # Micro-batches of one process have the examples of all.
        split = torch.arange(len(x)).view(processes if part is None else 1, 2, -1).transpose(0, 1).flatten(1)

        def loss_of(rows: Any, x: Tensor = x, y: Tensor = y) -> Tensor:
            return F.cross_entropy(model(x[rows]), y[rows])

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(slice(None))
            loss.backward()
            return loss

        if kind == "closure":
            optimizer.step(closure)
            continue
        optimizer.zero_grad()
        if kind in ("accumulated", "unreduced", "several"):
            with optimizer.sampled() if kind == "accumulated" else nullcontext():
                for turn, rows in enumerate(split):
                    if part is not None and kind != "several":
                        model.set_requires_gradient_sync(turn == 1)
                    with optimizer.sampled() if kind != "accumulated" else nullcontext():
                        (loss_of(rows) / 2).backward()
        else:
            with optimizer.sampled():
                loss_of(slice(None)).backward()
        if kind == "loaded" and index == 2:
            optimizer.load_state_dict(optimizer.state_dict())
        if kind == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if kind in ("skip", "raise", "ignore") and index == 2:
            # One element of the whole model: in one process.
            gradient = model.wide.weight.grad
            mine = gradient if part is None else gradient.to_local()
            if part is None or part.start == 0:
                mine[0, 0] = float("inf")
        optimizer.step()
    return found_in(model, optimizer)


def drawn(name: str) -> Result:
    """The weights that forward passes use inside and outside of sampled(), also after passes without gradients."""
    model, x = sharded(model_of()), batch(0, torch.float64)[0]
    optimizer = optimizer_of(name, model)
    run(model, optimizer, slice(None), range(2))
    before = {name: whole(p.detach()) for name, p in model.named_parameters()}
    reference = model_of()

    # A module has gathered parameters between a forward and a backward pass, the optimizer those that it draws.
    mine = [pair for group in optimizer.param_groups for pair in zip(group["param_names"], group["params"])]
    found: dict[str, Tensor] = {}
    for turn in range(3):
        with torch.no_grad():
            model(x)  # leaves the gathered parameters of the root
        with torch.set_grad_enabled(turn == 2), optimizer.sampled():
            sample = {name: whole(p.detach()) for name, p in mine}
            outputs = model(x).detach()
            found[f"difference {turn}"] = outputs - torch.func.functional_call(reference, sample, (x,)).detach()
        found |= {f"{name} {turn}": value for name, value in sample.items()}
    return found | {f"{name} restored": whole(p.detach()) - before[name] for name, p in mine}


def modes(name: str, part: slice | None) -> Result:
    """Outputs in evaluation mode, and training that goes on."""
    model, x = (model_of() if part is None else sharded(model_of())), batch(0, torch.float64)[0]
    optimizer = optimizer_of(name, model)
    run(model, optimizer, part or slice(None), range(3))
    with torch.no_grad():
        plain = model(x)
        optimizer.eval()
        outputs = model(x)
        optimizer.train()
        again = model(x)
    run(model, optimizer, part or slice(None), range(3, 6))
    return {"plain": plain, "outputs": outputs, "again": again} | found_in(model, optimizer)


def mixed_precision(name: str, part: slice) -> Result:
    """Forward and backward passes in float32, weights and state in float64."""
    model = sharded(model_of(), mp_policy=MixedPrecisionPolicy(torch.float32, torch.float64))
    optimizer = optimizer_of(name, model)
    run(model, optimizer, part)
    return found_in(model, optimizer)


def single_precision(name: str) -> Result:
    """The same in one process: the model is called with copies of the weights."""
    model = model_of()
    optimizer = optimizer_of(name, model)

    def net(x: Tensor) -> Tensor:
        return torch.func.functional_call(model, {n: p.float() for n, p in model.named_parameters()}, (x.float(),))

    run(net, optimizer, slice(None))  # pyright: ignore[reportArgumentType]
    return found_in(model, optimizer)


def double_precision(name: str) -> Result:
    """The same without mixed precision: passes with copies of the weights are not recorded."""
    model = model_of()
    optimizer = optimizer_of(name, model)
    run(model, optimizer, slice(None), range(5))
    return found_in(model, optimizer)


def built_before(part: slice) -> Result:
    """An optimizer that has the parameters which fully_shard replaces."""
    model = model_of()
    optimizer = optimizer_of("KFAC", model)
    run(sharded(model), optimizer, part, range(1))
    return {}


def built_apart() -> Result:
    """An optimizer that does not exchange what the passes of other processes have given."""
    with independent_processes():
        optimizer_of("KFAC", sharded(model_of()))
    return {}


def penalised(part: slice) -> Result:
    """A penalty of the DTensors themselves, whose gradient is added to one that is preconditioned."""
    model = sharded(model_of())
    optimizer = optimizer_of("FOOF", model, precondition="backward")
    run(model, optimizer, part, range(2))
    optimizer.zero_grad()
    x, y = (t[:ROWS][part] for t in batch(2, torch.float64))
    F.cross_entropy(model(x), y).backward()
    model.wide.weight.square().sum().backward()
    optimizer.step()
    return {}


class Recomputed(nn.Module):
    """Two blocks whose activations are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(40, 40), nn.Tanh()) for _ in range(2)])
        self.out = nn.Linear(40, 3)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(0.2 * torch.randn(p.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = recompute(block, x, use_reentrant=False)
        return self.out(x)


def activation_checkpointing(name: str, part: slice | None) -> Result:
    torch.manual_seed(0)
    model = Recomputed().double()
    if part is not None:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = optimizer_of(name, model)
    run(model, optimizer, part or slice(None), range(5))
    return found_in(model, optimizer)


def independently_drawn() -> Result:
    with independent_draws():
        optimizer = optimizer_of("IVON", sharded(model_of()))
    with optimizer.sampled():
        return {}


def posterior() -> Result:
    model = sharded(model_of())
    optimizer_of("IVON", model).posterior(model)
    return {}


def replaced(name: str) -> Result:
    """As by accelerate: the groups of an optimizer get the shards of the parameters that it was built for."""
    model = model_of()
    optimizer = optimizer_of(name, model)
    model = sharded(model)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    run(model, optimizer, slice(None))
    return {}


def tensor_parallel(name: str, processes: int, part: slice | None, two_dimensional: bool = False) -> Result:
    """Columns of the first layer and rows of the second; with `two_dimensional`, shards of these as well."""
    torch.manual_seed(0)
    model = Recomputed().double()
    if processes:
        shape = (processes // 2, 2) if two_dimensional else (processes,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor")[-len(shape) :])
        plan = {"blocks.0.0": ColwiseParallel(use_local_output=False), "blocks.1.0": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
        if two_dimensional:
            fully_shard(model, mesh=mesh["data"])
    optimizer = optimizer_of(name, model) if name in BY_NAME else None
    run(model, optimizer, part or slice(None), range(5))
    return found_in(model, optimizer)


# --- checkpoints ---


def saved(name: str, part: slice, folder: Path) -> Result:
    """Saves a run after some steps, and goes on."""
    model = sharded(model_of())
    optimizer = optimizer_of(name, model)
    run(model, optimizer, part)
    states = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    checkpoint.save(states, checkpoint_id=folder / name)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    if distributed.get_rank() == 0:
        torch.save(full, folder / f"{name}.pt")
    run(model, optimizer, part, LATER)
    return found_in(model, optimizer)


def resumed(name: str, part: slice, folder: Path, kind: str) -> Result:
    """Loads a run into a model with another seed and an optimizer without state, and goes on."""
    model = small_model(torch.float64, seed=1, width=21)
    model.scale = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    model = model if kind == "one process" else sharded(model)
    torch.manual_seed(5)
    with independent_processes() if kind == "one process" else nullcontext():
        optimizer = optimizer_of(name, model)
    if kind == "sharded":
        states = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        checkpoint.load(states, checkpoint_id=folder / name)
        set_model_state_dict(model, states["model"])
        set_optimizer_state_dict(model, optimizer, states["optimizer"])
    else:
        full = torch.load(folder / f"{name}.pt")
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, full["model"], options=options)
        set_optimizer_state_dict(model, optimizer, full["optimizer"], options=options)
    run(model, optimizer, slice(None) if kind == "one process" else part, LATER)
    return found_in(model, optimizer)


def from_replicas(name: str, part: slice, folder: Path) -> Result:
    """The state dict of DistributedDataParallel, loaded in a process of its own."""
    model = model_of()
    optimizer = optimizer_of(name, model)
    run(DistributedDataParallel(model), optimizer, part)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "replicas.pt")
    distributed.barrier()
    other = model_of()
    resumed = optimizer_of(name, other)
    states = torch.load(folder / "replicas.pt")
    other.load_state_dict(states["model"])
    resumed.load_state_dict(states["optimizer"])
    run(other, resumed, slice(None), LATER)
    return found_in(other, resumed)


def later(name: str) -> Result:
    """One process that is never interrupted."""
    model = model_of()
    optimizer = optimizer_of(name, model)
    run(model, optimizer, slice(None), range(LATER.stop))
    return found_in(model, optimizer)


def alone(found: dict[str, Result], processes: int) -> None:
    """What one process gives."""
    for case in SHARDED:
        attempt(found, f"alone {case.name}", train, case, None)
    for name in CHECKPOINTED:
        attempt(found, f"alone later {name}", later, name)
    for kind in ("accumulated", "several", "clipped", "skip", "closure"):
        attempt(found, f"alone {kind}", loop, "IVON", None, kind, processes)
    for name in BOTH:
        attempt(found, f"alone mixed {name}", single_precision, name)
    for name in LAYERED:
        attempt(found, f"alone mixed {name}", double_precision, name)
    for name in (*BOTH, *LAYERED):
        attempt(found, f"alone recomputed {name}", activation_checkpointing, name, None)
    attempt(found, "alone large IVON", large, "IVON", None)
    for name in MODES:
        attempt(found, f"alone modes {name}", modes, name, None)


def main(rank: int, processes: int, saved_by: str, folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Result] = {}
    everything = processes != 2 or saved_by == ITSELF  # two processes do the rest in the fast suite
    if rank == 0 and everything:
        alone(found, processes)
    where = f"file://{folder}/group"
    distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=processes, timeout=TIMEOUT)
    rows = ROWS // processes
    part = slice(rows * rank, rows * rank + rows)
    if everything:
        together(found, rank, processes, part)
    checkpoints(found, processes, part, saved_by, folder.parent / f"checkpoints_{saved_by}")
    distributed.destroy_process_group()
    torch.save(found, folder / f"{rank}.pt")


def together(found: dict[str, Result], rank: int, processes: int, part: slice) -> None:
    """What all processes give, beside checkpoints."""
    rows = ROWS // processes
    for case in SHARDED:
        attempt(found, f"fsdp2 {case.name}", train, case, part)
    for kind in ("accumulated", "several", "unreduced", "clipped", "skip", "raise", "closure", "loaded"):
        attempt(found, f"fsdp2 {kind}", loop, "IVON", part, kind, processes)
    for name in (*BOTH, *LAYERED):
        attempt(found, f"fsdp2 mixed {name}", mixed_precision, name, part)
        attempt(found, f"fsdp2 recomputed {name}", activation_checkpointing, name, part)
        attempt(found, f"tensor recomputed {name}", tensor_parallel, name, processes, None)
        if processes % 2 == 0:
            attempt(found, f"hybrid {name}", replicated_shards, name, part, processes)
            half = slice(2 * rows * (rank // 2), 2 * rows * (rank // 2 + 1))
            attempt(found, f"tensor and fsdp2 recomputed {name}", tensor_parallel, name, processes, half, True)
    attempt(found, "before", built_before, part)
    attempt(found, "apart", built_apart)
    attempt(found, "penalised", penalised, part)
    attempt(found, "fsdp2 large IVON", large, "IVON", part)
    for name in MODES:
        attempt(found, f"fsdp2 modes {name}", modes, name, part)
    attempt(found, "drawn", drawn, "IVON")
    attempt(found, "posterior", posterior)
    for name in ("IVON", "KFAC", "AdaBayes"):
        attempt(found, f"replaced {name}", replaced, name)
    attempt(found, "independent draws", independently_drawn)


def checkpoints(found: dict[str, Result], processes: int, part: slice, saved_by: str, folder: Path) -> None:
    (own := folder / str(processes)).mkdir(parents=True, exist_ok=True)
    for name in CHECKPOINTED:
        attempt(found, f"saved {name}", saved, name, part, own)
        for other in sorted({processes, 4} if saved_by == FOUR else {processes}):
            for kind in ("sharded", "full", "one process"):
                attempt(found, f"resumed from {other} {kind} {name}", resumed, name, part, folder / str(other), kind)
    attempt(found, "replicas", from_replicas, "IVON", part, own)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
