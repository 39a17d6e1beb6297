"""FSDP2: the weights and the state of a small GPT are divided among processes; a run that was interrupted goes on.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/fsdp.py

Checkpoints are written by torch.distributed.checkpoint: a run may go on with another number of processes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from small_gpt import GPT, arguments, batch, checksum, loss_of, mean_of, read_text, start_processes, write_atomically
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import bayesgrad
from bayesgrad.optim import IVON


def main() -> None:
    options = arguments(str(__doc__))
    start_processes()
    rank, processes = distributed.get_rank(), distributed.get_world_size()
    text, characters = read_text(options.text)
    torch.manual_seed(0)
    model = GPT(characters)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = IVON(model.named_parameters(), lr=0.1, num_data=len(text), seed=0)
    first = load(model, optimizer, options.folder)
    with bayesgrad.name_lost_processes():
        for step in range(first, options.steps):
            x, y = batch(text, step, options.batch, rank, processes)
            with optimizer.sampled():
                optimizer.zero_grad()
                loss = loss_of(model(x), y)
                loss.backward()
            optimizer.step()
            if (step + 1) % options.save_every == 0:
                save(model, optimizer, options.folder, step + 1)
                average = mean_of(loss)
                if rank == 0:
                    print(f"step {step + 1}: loss {average:.4f}", flush=True)
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        print(f"done: weights {checksum(weights)}", flush=True)
    distributed.destroy_process_group()


def save(model: nn.Module, optimizer: IVON, folder: Path, step: int) -> None:
    """Writes a folder for this step, then its name into a file, which is replaced at once."""
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder / f"step-{step}")
    if distributed.get_rank() == 0:  # all processes have written their parts
        write_atomically(folder / "latest", lambda path: path.write_text(str(step)))
        for old in set(folder.glob("step-*")) - {folder / f"step-{step}"}:
            shutil.rmtree(old)
    distributed.barrier()


def load(model: nn.Module, optimizer: IVON, folder: Path) -> int:
    """Reads the last complete checkpoint; returns its step, 0 if there is none."""
    if not (folder / "latest").exists():
        return 0
    step = int((folder / "latest").read_text())
    weights, state = get_state_dict(model, optimizer)
    checkpoint.load({"model": weights, "optimizer": state}, checkpoint_id=folder / f"step-{step}")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return step


if __name__ == "__main__":
    main()
