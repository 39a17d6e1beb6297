"""Which process was lost, where communication fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bayesgrad.distributed import joint_processes, process_index

POLL = 0.1  # seconds
SIGNS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")  # of a failed collective


@contextmanager
def name_lost_processes(wait: float = 10.0) -> Iterator[None]:
    """A context for training in which a failure of communication says which process was lost.

    If a process is killed or raises an error, the others fail in their next collective, with a message about a socket.
    Each process that leaves this context by an error notes it in the store of the process group. After a failed
    collective, the others wait for such notes, and raise a RuntimeError with the number of each process that has left
    none, or with the error of those that have. Leave it as it is under torchrun, which ends all processes when one
    fails, and names the one that failed first itself.

    Args:
        wait: seconds in which other processes must notice the failure, too. With NCCL they may need the timeout of the
            process group; raise it accordingly.

    Checked by: tests/contract/test_lost_processes.py
    """
    try:
        yield
    except Exception as error:
        if joint_processes() == 1:
            raise
        failed = isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
        failed = failed or isinstance(error, torch.distributed.DistError)
        try:
            store: Any = torch.distributed.distributed_c10d._get_default_store()
            store.set(_key(process_index()), "" if failed else f"{type(error).__name__}: {error}")
            words = _words(store, wait) if failed else None
        except RuntimeError:  # the process that has the store was lost
            words = "the store of the process group does not answer: the process that has it was lost"
        if not failed:
            raise
        raise RuntimeError(f"{words}; start all processes again from the last checkpoint.") from error


def _key(rank: int) -> str:
    return f"bayesgrad/failed/{rank}"


def _words(store: Any, wait: float) -> str:
    """What the notes of other processes say, once all have left one or time is over."""
    size, end = joint_processes(), time.monotonic() + wait
    missing = set(range(size))
    while missing and time.monotonic() < end:
        missing -= {rank for rank in missing if store.check([_key(rank)])}
        time.sleep(POLL if missing else 0)
    notes = {rank: store.get(_key(rank)).decode() for rank in sorted(set(range(size)) - missing)}
    found = [f"process {rank} of {size} was lost: it was killed, or does not answer" for rank in sorted(missing)]
    found += [f"process {rank} of {size} raised {note}" for rank, note in notes.items() if note]
    return " and ".join(found) or f"the connection of {size} processes, none of which was lost, has failed"
