"""Independent chains, divided among processes, and the posterior of several chains."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import repeat

import torch
from torch import nn

from bayesgrad import distributed, noise
from bayesgrad.posterior.samples import SampledPosterior, posterior_of
from bayesgrad.posterior.store import Samples
from bayesgrad.samplers.ensemble import Ensemble


def run_chains(
    run: Callable[[nn.Module, int], Ensemble], model: nn.Module, *, chains: int, seed: int | None = None
) -> list[Ensemble]:
    """Runs independent chains, divided among the processes of a group, and gives all of them the samples of all chains.

    Chain k runs in process k modulo the number of processes, with a seed that is a function of (seed, k), which torch's
    global generator has at its start too. So the samples do not depend on the number of processes. For their posterior
    see `joint_posterior`, for R-hat and effective sample sizes `diagnose`; both take the list that this returns.

    >>> def run(model, seed):
    ...     nn.init.normal_(model.weight)  # starting points that differ
    ...     ensemble = Ensemble(model)
    ...     ensemble.collect()
    ...     return ensemble
    >>> len(joint_posterior(run_chains(run, nn.Linear(2, 1), chains=3, seed=0)))
    3

    Args:
        run: runs one chain, given a copy of the model and a seed for the sampler. The loader must go through all data,
            because the processes do not share the work of a chain.
        model: the same in all processes.
        chains: their number.
        seed: None draws one from torch's global generator, of the first process.

    Returns:
        The ensembles of all chains. The weights of their models are the last ones of chains that ran in this process.

    Checked by: tests/contract/test_several_processes.py
    """
    if chains < 1:
        raise ValueError(f"chains must be at least 1, got {chains}.")
    size = distributed.joint_processes()
    rank = distributed.process_index() if size > 1 else 0
    seed = int(distributed.from_process(noise.fresh_seed())) if seed is None else seed
    own: dict[int, Ensemble] = {}
    with distributed.errors_of_all() if size > 1 else nullcontext():
        for k in range(rank, chains, size):
            with distributed.independent_processes(), torch.random.fork_rng():
                torch.manual_seed(of_chain := noise.seed32(noise.key(seed, k)[0]))
                own[k] = run(copy.deepcopy(model), of_chain)
            if not isinstance(own[k], Ensemble):
                raise TypeError(f"run() must return an Ensemble, got {type(own[k]).__name__}.")
    return [_received(own.get(k), model, k % size) for k in range(chains)]


def _received(own: Ensemble | None, model: nn.Module, source: int) -> Ensemble:
    """The ensemble of a process, which has it, in all processes."""
    if distributed.joint_processes() == 1:
        assert own is not None
        return own
    blocks = own.samples.blocks() if own else repeat(None)
    header, count = distributed.from_process(own and (own.header(), sum(1 for _ in own.samples.blocks())), source)
    received = (distributed.from_process(next(blocks), source) for _ in range(count))
    if own is None:
        return Ensemble.received(model, header, received)
    deque(received, 0)
    return own


def joint_posterior(
    ensembles: Sequence[Ensemble], model: nn.Module | None = None, *, seed: int = 0
) -> SampledPosterior:
    """The posterior of the samples of several chains, those of the first chain first.

    Args:
        ensembles: of chains of the same model.
        model: to predict with; None for that of the first ensemble.
        seed: of the posterior's samples.
    """
    if not ensembles:
        raise ValueError("joint_posterior needs at least one ensemble, got an empty list.")
    samples = Samples(ensembles[0].samples.limit)
    for ensemble in ensembles:
        for block in ensemble.samples.blocks():
            samples.append(block)
    return posterior_of(samples, ensembles[0].posterior(model).model, seed=seed)
