"""Follows the gradients of layers: what is added to `.grad` in backward passes, and whether it was changed since.

Between `backward()` and `step()`, clipping and penalties change `.grad` in place, which increments its version counter.
`GradScaler.unscale_` multiplies all gradients by one number without incrementing it, so some entries of each gradient
are copied in the backward pass, and the factor follows from them. No value is read by the host, but in the first pass.
In several processes, entries are copied when DistributedDataParallel has averaged the gradients, or `fully_shard` has
reduced them. What layers return is then added to the gradient of the gathered parameter (`shards.gathered`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from bayesgrad.distributed import Exchange, Sum, after_averaging, has_group, joint_processes
from bayesgrad.kernels import compute_dtype
from bayesgrad.shards import any_process, gathered, gradient_of, is_shard, local, owner, summed
from bayesgrad.shards import version as version_of
from bayesgrad.warning import warn

SAMPLE = 256  # entries of a gradient that are copied
CHECK_EVERY = 10  # passes between comparisons of values, if memory does not show who contributed to a gradient
NO_FACTOR = 0.03  # of a gradient's norm: the part that is no multiple of what it was
UNEXPLAINED = 0.1  # of a gradient's norm; larger differences are not rounding in half precision

NOTHING = (-1, 0, None, False, (0, 0))  # of a parameter whose layers were not called


class Mark(NamedTuple):
    """A gradient at the end of a backward pass.

    Args:
        gradient: returns it while it exists.
        version: its version counter.
        sample: a copy of some entries.
        passes: the number of backward passes that added to it since it was zero.
    """

    gradient: Any
    version: int
    sample: Tensor
    passes: int

    def untouched(self, gradient: Tensor | None) -> bool:
        return (
            gradient is not None
            and self.gradient() is gradient
            and (gradient._version if type(gradient) is Tensor else version_of(gradient)) == self.version
        )

    def may_be(self, gradient: Tensor | None) -> bool:
        """Whether it is this gradient, unchanged as far as is known."""
        return self.untouched(gradient) or (self.version < 0 and gradient is not None and self.gradient() is gradient)


def is_compared(step: int) -> bool:
    """Whether values are compared in this step, counted from 1, to find changes that increment no version counter."""
    return not (step & (step - 1) and step % 100)


class GradientMarks:
    """What happened to the gradients of some parameters since their last backward pass.

    Args:
        params: leaf tensors; those that require gradients, now or at a later call of `follow`, are followed.

    Attributes:
        unexplained: parameters whose gradient has more terms than those of their layers, as far as is known: a tied
            weight, or one that the model also uses directly. It is found in the first pass by comparing values, and
            again in the pass that follows one in which the layers were called more or less often, or whose gradient is
            not in the memory of what a layer returned, changed as often as there are further calls. If it never is
            (gradients that are zeroed in place, autocast), values are compared every ten passes, and the gradient never
            counts as untouched: any of them may have a term that the others do not have.
        twice: parameters of layers that passed on an error with `create_graph=True`. A pass that differentiates it, as
            that of a gradient penalty, adds terms that the layers do not know.
        extended: parameters whose gradient has further terms by its value in the latest pass that began at zero. It is
            compared in passes with derivatives of gradients, and if it is not in the memory of what the only call of a
            layer returned: a penalty that some steps have is no reason for the fallback.
        foreign: parameters with a term of a pass in which their layers were not called, as that of a penalty.
        close: removes the hooks.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.marks: dict[Tensor, Mark] = {}
        self._every = list(params)
        self.params: list[Tensor] = []  # those that are followed
        self._others = set(map(id, self._every))
        self.sharded = any(map(is_shard, self._every))
        self._unexplained: set[Tensor] = set()  # in this process
        self._agreed: set[Tensor] | None = None  # in any process, at the last exchange
        # A pass, and parameters whose gradients were not changed before they are averaged at its end.
        self._averaged: tuple[int, set[Tensor]] = -1, set()
        self.twice: set[Tensor] = set()
        self.extended: set[Tensor] = set()
        self.foreign: set[Tensor] = set()
        self.by_value = False  # whether gradients were changed through `.grad.data`, which has no version
        self._steps = 0
        self._compares, self._warned = False, False  # whether values are compared in this step; of other changes
        self._calls: dict[Tensor, int] = {}  # calls of its layers in the pass that was checked
        self._opaque: dict[Tensor, int] = {}  # passes since the last check, where memory does not show who contributed
        # backward pass, calls, sum of their gradients, whether the gradient was zero before, memory of the first
        self._sums: dict[Tensor, tuple[int, int, Tensor | None, bool, tuple[int, int]]] = {}
        self._watched: dict[Tensor, Tensor] = {}  # DTensor -> its gathered parameter, which has a hook
        self._gathered: dict[Tensor, int] = {}  # passes of gathered parameters since their gradients were reduced
        reference = weakref.ref(self)

        def note(p: Tensor) -> None:
            if (own := reference()) is not None:
                (own._reduced if own.sharded and is_shard(p) else own._accumulated)(p)

        self._note, self._handles = note, []
        self.close = weakref.finalize(self, _remove, self._handles)
        self.follow()

    def follow(self, some: Iterable[Tensor] | None = None) -> None:
        """Follows from now on, too, what requires gradients by now.

        Args:
            some: parameters that may have been thawed, of this model; None for all.
        """
        if self._others:
            new = [p for p in (self._every if some is None else some) if p.requires_grad and id(p) in self._others]
            if not new:
                return
            self._others.difference_update(map(id, new))
            self._handles.extend(p.register_post_accumulate_grad_hook(self._note) for p in new)
            self.params = [p for p in self._every if id(p) not in self._others]

    def check_again(self) -> None:
        """Lets the next pass compare values, as the first one."""
        self._calls, self._opaque = {}, {}

    @property
    def unexplained(self) -> set[Tensor]:
        return self._unexplained if self._agreed is None else self._agreed

    def exclude(self, params: Iterable[Tensor]) -> None:
        """Counts gradients as unexplained that layers have no part in."""
        self._unexplained.update(some := set(params))
        if self._agreed is not None:
            self._agreed |= some

    def share(self, exchange: Exchange) -> None:
        """Lets all processes know which gradients have more terms than those of their layers."""

        def receive(found: Sum) -> None:
            self._agreed = {p for p, number in zip(self._every, found.total.tolist()) if number}

        if self._every:  # processes may follow different ones, if some have not used a layer that was thawed
            flags, first = [float(p in self._unexplained) for p in self._every], self._every[0]
            exchange.add(Sum(local(first).new_tensor(flags, dtype=compute_dtype(first.dtype))), receive)

    def returned(self, module: nn.Module, gradients: Sequence[Tensor | None], task: int) -> None:
        """Called with the gradients that a layer returns for its weight and bias."""
        for name, gradient in zip(("weight", "bias"), gradients):
            p = module._parameters.get(name)
            if gradient is None or p is None:
                continue
            p = owner(p) if self.sharded else p
            before, calls, total, from_zero, first = self._sums.get(p, NOTHING)
            if before != task:
                calls, total, from_zero = 0, None, self._is_zero(p)
                first = gradient.data_ptr(), gradient._version
            if p not in self._calls or p in self.twice:
                gradient = gradient.detach().clone() if p._backward_hooks else gradient.detach()  # hooks may change it
                total = gradient if total is None else total + gradient
            else:  # of a single call, compared only if autograd adds another term, which it then does in other memory
                opaque = calls or p in self._opaque or p in self._unexplained or p._backward_hooks
                total = None if opaque else gradient.detach()
            self._sums[p] = task, calls + 1, total, from_zero, first

    def differentiable(self, module: nn.Module) -> None:
        """Called when a layer passes on an error with `create_graph=True`."""
        self.twice.update(owner(p) for p in module._parameters.values() if p is not None)

    def accumulated_twice(self, p: Tensor) -> bool:
        """Whether a gradient has several passes, of which a later one may have derivatives of gradients."""
        return p in self.twice and p in self.marks and self.marks[p].passes > 1

    def _is_zero(self, p: Tensor) -> bool:
        """Whether a gradient is known to be None or zero."""
        if self.sharded and is_shard(p):
            if p not in self._watched:
                self._watched[p] = gathered([p])[p]
                self._handles.append(self._watched[p].register_post_accumulate_grad_hook(self._note))
            return self._watched[p].grad is None
        mark = self.marks.get(p)
        return p.grad is None or (mark is not None and not mark.passes and mark.untouched(p.grad))

    def _reduced(self, p: Tensor) -> None:
        """Called when `fully_shard` has added to the gradient of a DTensor."""
        if (gradient := p.grad) is not None:
            self.foreign |= set() if self._gathered.get(p) else {p}  # a pass of the DTensor itself
            old, new = self.marks.get(p), max(1, self._gathered.get(p, 0))
            passes = new if old is None or old.gradient() is not gradient else old.passes + new
            self._gathered[p] = 0
            self.marks[p] = Mark(TensorWeakRef(gradient), version_of(gradient), _sample(gradient).clone(), passes)

    def _accumulated(self, whole: Tensor) -> None:
        gradient, p = whole.grad, owner(whole) if self.sharded else whole
        if gradient is None or gradient.layout is not torch.strided:
            return
        old = self.marks.get(p)
        task, calls, total, from_zero, (memory, version) = self._sums.pop(p, NOTHING)
        passes = 1 if from_zero else 2 if old is None else old.passes + 1
        called = task == torch._C._current_graph_task_id()
        self.foreign |= set() if called else {p}
        # A pass without its layers, as that of a penalty, adds a term that they do not know, and so may the derivative
        # of a gradient. It remains in the gradient until that is zero.
        known = called and (from_zero or (p not in self.twice and (old is None or old.version >= 0)))
        if from_zero and called:
            # Autograd adds further terms in place, or to a copy.
            alone = gradient.data_ptr() == memory and gradient._version == version + calls - 1
            known = alone and calls == self._calls.get(p, calls)
            explained, checked = True, p not in self._calls
            if total is not None and (checked or p in self.twice or not alone):
                rest = (gradient - total.to(gradient)).norm()
                eps = max(torch.finfo(t.dtype).eps for t in (gradient, total))
                explained = not bool(rest > min(UNEXPLAINED, 10 * math.sqrt(eps)) * gradient.norm())
            (self.extended.discard if explained else self.extended.add)(p)
            if checked:
                self._calls[p] = calls
                (self._unexplained.discard if explained else self._unexplained.add)(p)
            elif self._is_check_due(p, calls, alone):
                self._calls.pop(p, None)
        if whole is not p:
            self._gathered[p] = self._gathered.get(p, 0) + 1
            return
        # A hook (Tensor.register_hook) may change any gradient, which is then not what the layers returned.
        version = gradient._version if known and not p._backward_hooks else -1
        self.marks[p] = Mark(TensorWeakRef(gradient), version, _sample(gradient).clone(), passes)
        if has_group() and joint_processes() > 1:
            if self._averaged[0] != (now := torch._C._current_graph_task_id()):
                self._averaged = now, {q for q, mark in self.marks.items() if mark.passes and mark.may_be(q.grad)}
                after_averaging(self._mark_averages)
            self._averaged[1].add(p)

    def _mark_averages(self) -> None:
        """Marks the gradients as they are now: the averages over processes.

        Also those of layers that this process has used in an earlier pass of the step, or only others have.
        """
        for p, gradient in ((p, g) for p in self.params if (g := p.grad) is not None and g.layout is torch.strided):
            old = self.marks.get(p)
            mine = old is not None and p in self._averaged[1]
            if not is_shard(p) and (mine or old is None or old.gradient() is not gradient):
                version, passes = (
                    (-1 if old.version < 0 else gradient._version, old.passes) if old and mine else (-1, 1)
                )
                self.marks[p] = Mark(TensorWeakRef(gradient), version, _sample(gradient).clone(), passes)

    def _is_check_due(self, p: Tensor, calls: int, alone: bool) -> bool:
        """Whether the values of a gradient are compared in the next pass, because it may have other terms than before.

        Args:
            calls: of its layers.
            alone: whether it consists of their gradients alone; if False, this is not known.
        """
        due = calls != self._calls.get(p)
        if alone:
            self._opaque.pop(p, None)
            return due or p in self._unexplained
        if p in self._opaque:
            self._opaque[p] = (self._opaque[p] + 1) % CHECK_EVERY
            return due or not self._opaque[p]
        due = due or p not in self._unexplained
        self._opaque |= {p: 0} if due else {}
        return due

    def is_marked(self, p: Tensor) -> bool:
        """Whether a gradient is the tensor that the last pass has added to."""
        return p in self.marks and self.marks[p].gradient() is p.grad

    def restarted(self, params: Sequence[Tensor]) -> bool:
        """Whether these gradients are None or zero, so that what was recorded before belongs to no gradient."""
        for p in params:
            gradient, mark = p.grad, self.marks.get(p)
            if self._gathered.get(p):  # by `fully_shard`, without synchronisation
                return False
            if gradient is None:
                continue
            if mark is not None and mark.untouched(gradient):
                if mark.passes:
                    return False
            elif bool(any_process(local(gradient).any(), [gradient])):
                return False
        self.foreign.difference_update(params)
        return True

    def untouched(self, params: Iterable[Tensor]) -> bool:
        """Whether one backward pass of their layers made these gradients, which were not changed since.

        It is not known of further passes, whose terms are added to the same memory, and of DTensors, which other
        processes may have changed.
        """
        found = [(None if self.sharded and is_shard(p) else self.marks.get(p), p.grad) for p in params]
        return not self.by_value and all(
            mark is not None and mark.untouched(gradient) and mark.passes == 1 for mark, gradient in found
        )

    def check_values(self) -> None:
        """Called in each step: in steps 1, 2, 4, ... and every 100th, compares gradients with what passes have given.

        A change through `.grad.data`, or by NumPy, increments no version counter. If there is one, but for a common
        factor, no gradient counts as untouched from now on.
        """
        self._steps += 1
        self._compares = is_compared(self._steps)
        if self.by_value or self.sharded or not self._compares:
            return
        same = {p: mark for p, mark in self.marks.items() if mark.untouched(p.grad)}
        if (factor := self.factor(same)) is None:
            return
        for p, mark in same.items():
            gradient = gradient_of(p)
            then, now = mark.sample.double(), _sample(gradient).double()
            rounding = 16 * torch.finfo(gradient.dtype).eps * now.abs().max() if now.numel() else 0
            if then.shape != now.shape or bool(((now - factor.double() * then).abs() > rounding).any()):
                self.by_value = True
                return

    def factor(self, params: Iterable[Tensor]) -> Tensor | None:
        """The number by which these gradients were multiplied since their last pass, as a tensor.

        1 if they are zero or not finite; None if no gradient is known. If they were changed in another way, it is the
        least-squares fit. Entries that are zero now are left out, so that a mask does not count as a factor.
        """
        (found,) = self._products([params])
        return None if found is None else _quotient(found)

    def factors(self, several: Sequence[Iterable[Tensor]], what: str) -> list[Tensor | None]:
        """As `factor`, for the gradients of some parameters each; all processes have to call this.

        Gradients that are zero have the factor of all of them together. In steps 1, 2, 4, ... and every 100th, those
        that were changed in another way are warned of, once.

        Args:
            several: parameters whose gradients have one factor.
            what: is multiplied by the factors, for the warning.
        """
        found = self._products(several)
        if not (totals := [total for total in found if total is not None]):
            return [None] * len(several)
        if self._compares and not self._warned and any(bool(_differs(total)) for total in totals):
            self._warned = True
            warn(
                "gradients were changed between backward() and step(), by other than a factor for each layer, and "
                f"{what} are multiplied by the factors that fit best: add penalties to the loss instead of .grad, and "
                "clip norms instead of values.",
            )
        common = _quotient(_total(totals))
        return [
            None if total is None else torch.where(total[1] > 0, _quotient(total), common.to(total)) for total in found
        ]

    def _products(self, several: Sequence[Iterable[Tensor]]) -> list[Tensor | None]:
        """`_inner_products` of entries of gradients now and then, over some parameters each."""
        sets = [[p for p in some if p in self.marks and p.grad is not None] for some in several]
        pairs = {p: (_sample(gradient_of(p)), self.marks[p].sample) for some in sets for p in some}
        pairs = {p: (now, then) for p, (now, then) in pairs.items() if now.shape == then.shape}
        sets = [[p for p in some if p in pairs] for some in sets]
        if not self.sharded:
            return [_inner_products(*map(_joined, zip(*[pairs[p] for p in some]))) if some else None for some in sets]
        single = dict(zip(pairs, summed([_inner_products(*pair) for pair in pairs.values()], list(pairs))))
        return [_total([single[p] for p in some]) if some else None for some in sets]

    def zeroed(self) -> None:
        """Called when the gradients were set to zero or None."""
        self.foreign = set()
        marks = ((p, p.grad) for p in self.marks)
        self.marks = {p: Mark(TensorWeakRef(g), version_of(g), _sample(g), 0) for p, g in marks if g is not None}


def factor_between(now: Tensor, then: Tensor) -> tuple[Tensor, Tensor]:
    """The factor by which a gradient was multiplied, and whether it was; 1 if it was changed in another way.

    Entries that are zero now, or not finite, are left out.
    """
    total = _inner_products(*(torch.where(now.isfinite(), t, 0.0).flatten() for t in (now, then)))
    multiple = ~_differs(total)
    return torch.where(multiple, _quotient(total), 1.0), multiple


def is_clamped(now: Tensor, then: Tensor) -> Tensor:
    """Whether the entries of a gradient were bounded by one number."""
    bound = now.abs().max() if now.numel() else now.sum()
    return (now == then.clamp(-bound, bound)).all()


def _total(products: Sequence[Tensor]) -> Tensor:
    return torch.stack([one.to(products[0]) for one in products]).sum(0)


def _joined(several: Sequence[Tensor]) -> Tensor:
    """Vectors one after the other; those of half precision in float32, because products lose digits."""
    several = [_precise(one) for one in several]
    return torch.cat([one.to(several[0]) for one in several])


def _precise(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _quotient(total: Tensor) -> Tensor:
    return (total[0] / total[1]).nan_to_num_(1.0, 1.0, 1.0)


def _inner_products(now: Tensor, then: Tensor) -> Tensor:
    """now·then, then·then and now·now of vectors, over entries that are not zero now."""
    now = _precise(now).contiguous()  # products of equal numbers are rounded alike: a factor of 1 is exact
    then = torch.where(now == 0, 0.0, _precise(then))
    return torch.stack([torch.dot(now, then), torch.dot(then, then), torch.dot(now, now)])


def _differs(total: Tensor) -> Tensor:
    """Whether gradients now are no multiple of those then, by more than rounding in half precision."""
    both, then, now = total
    return both.abs() < math.sqrt(1 - NO_FACTOR**2) * then.sqrt() * now.sqrt()


def _sample(gradient: Tensor) -> Tensor:
    """Some entries of a gradient, as a view where that is possible; of a DTensor, of this process's part."""
    gradient = gradient if type(gradient) is Tensor else local(gradient)
    return gradient.reshape(-1)[:: 1 + gradient.numel() // SAMPLE]


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
