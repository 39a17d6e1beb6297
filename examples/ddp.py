"""DistributedDataParallel: a small GPT, trained by several processes; a run that was interrupted goes on.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/ddp.py

The result does not depend on the number of processes, but for rounding, nor on interruptions. A checkpoint is an
ordinary state dict: a run may go on with another number of processes, or with one, without torchrun.
"""

from __future__ import annotations

import os

import torch
from small_gpt import GPT, arguments, batch, checksum, loss_of, mean_of, read_text, start_processes, write_atomically
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import bayesgrad
from bayesgrad import optim


def main() -> None:
    options = arguments(str(__doc__))
    several = "RANK" in os.environ
    if several:
        start_processes()
    rank, processes = (distributed.get_rank(), distributed.get_world_size()) if several else (0, 1)
    text, characters = read_text(options.text)
    torch.manual_seed(0)
    model = GPT(characters)
    optimizer = make(options.optimizer, model, len(text))
    net = DistributedDataParallel(model) if several else model
    checkpoint, first = options.folder / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    with bayesgrad.name_lost_processes():
        for step in range(first, options.steps):
            x, y = batch(text, step, options.batch, rank, processes)
            with optimizer.sampled():
                optimizer.zero_grad()
                outputs = net(x)
                loss = loss_of(outputs, y)
                optimizer.observe(outputs, loss=loss)
                loss.backward()
            optimizer.step()
            if (step + 1) % options.save_every:
                continue
            average = mean_of(loss)
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                options.folder.mkdir(parents=True, exist_ok=True)
                write_atomically(checkpoint, lambda path, state=state: torch.save(state, path))
                print(f"step {step + 1}: loss {average:.4f}", flush=True)
    if rank == 0:
        print(f"done: weights {checksum(model.state_dict())}", flush=True)
    if several:
        distributed.destroy_process_group()


def make(name: str, model: torch.nn.Module, count: int) -> torch.optim.Optimizer:
    """An optimizer of this name, with a seed, so that a run can be repeated."""
    if name == "IVON":
        return optim.IVON(model.parameters(), lr=0.1, num_data=count, seed=0)
    return getattr(optim, name)(model, seed=0)  # those that use layers, as KFAC


if __name__ == "__main__":
    main()
