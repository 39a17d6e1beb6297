"""Gradients, weights and state that are not finite: refused, skipped or reported, as the option `nonfinite` says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from bayesgrad.kernels import compute_dtype
from bayesgrad.parts import Host, Part
from bayesgrad.shards import any_process, count_of, gradient_of, local
from bayesgrad.warning import warn

EVERY = 1000  # steps between two checks with nonfinite="ignore"


class FiniteCheck:
    """Checks the gradients of an optimizer before a step, or, with `nonfinite="ignore"`, looks for NaN now and then.

    With "ignore", other steps never wait for the device to say what is finite. Gradients, weights and state are checked
    after steps 1, 2, 4, 8, ..., after every 1000th step, and before weights or state are read out (`eval`, `posterior`,
    `state_dict`). One warning names the first parameter that is not finite.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.due = 1  # the next step to check
        self.warned = False

    def skips(self, optimizer: Host, parts: Iterable[Part], active: list[list[Tensor]]) -> bool:
        """Whether to skip this step because something is not finite; called before anything changes."""
        for index, (group, params) in enumerate(zip(optimizer.param_groups, active)):
            if group["nonfinite"] == "ignore" or not params:
                continue
            # What parts have collected is nearer to the cause than the gradient.
            bad = next((words for part in parts if (words := part.nonfinite(index, params))), None)
            look = _nonfinite(optimizer, params, [gradient_of(p) for p in params], "the gradient of ", alike=True)
            bad = bad or next(look, None)
            if bad and group["nonfinite"] == "skip":
                return True
            if bad:
                raise optimizer.nonfinite_error(
                    f"{bad}; nothing was changed. Check the batch and the loss, lower lr, or pass nonfinite='skip'."
                )
        return False

    def look(self, optimizer: Host, active: list[list[Tensor]]) -> None:
        """Called after step `due`: warns if something is not finite."""
        self.due = min(1 << self.steps.bit_length(), (self.steps // EVERY + 1) * EVERY)
        self.report(optimizer, active, gradients=True)

    def report(self, optimizer: Host, active: list[list[Tensor]], gradients: bool) -> None:
        """Warns once if a weight of these parameters is not finite, or a state tensor has NaN.

        Args:
            gradients: whether to check them too: if they were used by a step. A GradScaler skips those that overflow.
        """
        chosen = [p for g, some in zip(optimizer.param_groups, active) if g["nonfinite"] == "ignore" for p in some]
        if self.warned or not self.steps or not chosen or not readable(chosen):
            return
        given = chosen if gradients else []
        entries = ((p, optimizer.state.get(p, {})) for p in chosen)
        # An infinite variance is a valid state; NaN is not, and signs of it would look like weights.
        slots = [
            (p, local(v))
            for p, entry in entries
            for v in entry.values()
            if v.shape == p.shape and v.is_floating_point()
        ]
        looks = (
            _nonfinite(optimizer, given, [gradient_of(p) for p in given], "the gradient of "),
            _nonfinite(optimizer, chosen, [local(p).detach() for p in chosen], ""),
            _nonfinite(optimizer, [p for p, _ in slots], [local(v) for _, v in slots], "the state of ", torch.isnan),
        )
        bad = next((words for look in looks for words in look), None)
        if bad is not None:
            self.warned = True
            warn(
                f"{optimizer.__class__.__name__}: {bad}, found at step {self.steps}. With nonfinite='ignore' it "
                "spreads to all weights, as in torch.optim: go back to the last good checkpoint, check the batch and "
                "the loss, and pass nonfinite='raise' or nonfinite='skip'.",
                RuntimeWarning,
            )


def _infinite(x: Tensor) -> Tensor:
    return ~torch.isfinite(x)


def _nonfinite(
    optimizer: Host,
    params: list[Tensor],
    values: list[Tensor],
    what: str,
    wrong: Callable[[Tensor], Tensor] = _infinite,
    alike: bool = False,
) -> Iterator[str]:
    """What is not finite, in words, for the first parameter; the host reads one tensor if all is well.

    With `alike`, all processes that have parts of the parameters say the same, and all have to call this.
    """
    full = [value for value in values if value.numel()]
    # A sum is not finite if an entry is not. It may also overflow, so that entries decide; norms would be slower.
    sums = [value.sum(dtype=compute_dtype(value.dtype)) for value in full]
    flags = [wrong(one).to(sums[0].device) for one in sums] or [torch.zeros((), dtype=torch.bool)]
    found = torch.stack(flags).any()
    if bool(any_process(found, params) if alike else found):
        for p, value in zip(params, values):
            number = wrong(value).sum()
            if count := int(count_of(number, p) if alike else number):
                kind = "NaN" if wrong is torch.isnan else "not finite"
                yield f"{what}{optimizer.name_of(p)} has {count} entries of {p.numel()} that are {kind}"


def readable(params: list[Tensor]) -> bool:
    """Whether tensors have values that the host may read: not in a trace, a capture or on the meta device."""
    if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return False
    return all(type(w) in (Tensor, torch.nn.Parameter) and w.device.type != "meta" for w in map(local, params))


def refuse_sparse(optimizer: Host, active: Iterable[Iterable[Tensor]]) -> None:
    """Raises for sparse gradients."""
    for p in (p for params in active for p in params):
        if p.grad is not None and p.grad.layout is not torch.strided:
            raise RuntimeError(
                f"{optimizer.__class__.__name__} needs dense gradients, but that of {optimizer.name_of(p)} is sparse: "
                "build the embedding with sparse=False."
            )
