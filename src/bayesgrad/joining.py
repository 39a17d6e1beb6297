"""Processes of which some have fewer batches than others, in the context `Join` of torch.distributed.algorithms."""

from __future__ import annotations

import gc
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from bayesgrad import distributed

_replicas: WeakKeyDictionary[Any, WeakSet[Any]] = WeakKeyDictionary()
_states: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def joined_state(optimizer: Any) -> Any:
    """Keeps the state of an optimizer equal in all processes if some have fewer batches: `Join([net, this])`.

    In `torch.distributed.algorithms.Join`, a process that has no more batches takes no more steps. At the end of the
    context it receives the weights from DistributedDataParallel, and by this the optimizer's state, from a process that
    has taken all steps. This is for optimizers that communicate nothing else; others are refused in this context.

    Args:
        optimizer: of the parameters of the `DistributedDataParallel` that comes first in the list.

    Checked by: tests/contract/test_data_parallel.py
    """
    from torch.distributed.algorithms.join import Joinable, JoinHook

    class JoinedState(Joinable, JoinHook):
        def __init__(self) -> None:
            super().__init__()

        @property
        def join_device(self) -> torch.device:
            return optimizer.param_groups[0]["params"][0].device

        @property
        def join_process_group(self) -> Any:
            return torch.distributed.group.WORLD

        def join_hook(self, **kwargs: Any) -> Any:
            return self

        def post_hook(self, is_last_joiner: bool) -> None:
            own = distributed.process_index()
            source = distributed.largest(own if is_last_joiner else -1, self.join_device)
            state = distributed.from_process(optimizer.state_dict() if own == source else None, source)
            if not is_last_joiner:
                optimizer.load_state_dict(state)

    found = _states[optimizer] = JoinedState()
    return found


def _keeps_state(optimizer: Any) -> bool:
    return optimizer in _states and _states[optimizer]._join_config.enable


def in_join(optimizer: Any) -> bool:
    """Whether DistributedDataParallel expects that some processes have fewer batches than others."""
    if distributed.joint_processes() == 1:
        return False
    if (found := _replicas.get(optimizer)) is None:
        # Neither a parameter nor a model knows of the module that averages its gradients.
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        kind = nn.parallel.DistributedDataParallel
        known = [one for one in gc.get_objects() if issubclass(type(one), kind)]
        found = _replicas[optimizer] = WeakSet(one for one in known if mine & {id(p) for p in one.parameters()})
    return any(one._join_config.enable for one in found)


def check_join(optimizer: Any) -> None:
    """Raises if processes may stop to take steps, and their state would differ from then on."""
    if in_join(optimizer) and not _keeps_state(optimizer):
        raise RuntimeError(
            f"in join(), a process without batches would miss steps of {type(optimizer).__name__}, and its state would "
            "differ: use `with Join([net, bayesgrad.joined_state(optimizer)]):`, with Join of "
            "torch.distributed.algorithms."
        )


def refuse_join(optimizer: Any) -> None:
    """Raises if processes may stop to take steps, and this optimizer would wait for what they have collected."""
    if in_join(optimizer):
        raise RuntimeError(
            f"{type(optimizer).__name__} exchanges more than gradients, and cannot go on without the processes that "
            "have no more batches: use no join(), and give all processes the same number of batches, for example by "
            "drop_last=True."
        )
