"""Gradients at weights that are sampled from the belief: weights are perturbed in place, and restored afterwards."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from bayesgrad import distributed, kernels, noise, process_limits, shards
from bayesgrad.distributed import Exchange, Sum
from bayesgrad.layers.gradients import factor_between, is_clamped
from bayesgrad.packing import SampledBlock
from bayesgrad.parts import Evidence, Groups, Needs, Noise, Source
from bayesgrad.shards import gradient_of
from bayesgrad.warning import warn

Mark = tuple[Tensor, int] | None
CHANGED = "changed gradients of several draws"  # among what an optimizer has warned of


class Draws(Source):
    """Base class: runs the context of `sampled()` and records which gradients were computed in it."""

    needs = Needs(draws=True)

    def __init__(self) -> None:
        self.active = False  # whether weights are changed now
        self.key: noise.Key | None = None  # of the current draw in training
        self.before: dict[Tensor, Mark] = {}  # gradients at the beginning of the current context, or at zero_grad()
        self.old: set[Tensor] = set()  # parameters with a gradient of earlier passes at the beginning of the context
        self.norms: dict[Tensor, Tensor] = {}  # of those gradients that were not computed at sampled weights
        self.at_zero_grad: dict[Tensor, Mark] = {}
        self.without_grad = 0  # draws under torch.no_grad() since the last draw in training
        self.stored: dict[Tensor, Tensor] = {}  # of several draws of a closure
        self.reset()

    @abstractmethod
    def perturb(self, key: noise.Key, given: Noise | None, training: bool) -> None:
        """Changes the weights."""

    @abstractmethod
    def restore(self, finished: bool) -> None:
        """Restores them, bit for bit. `finished` is False under `torch.no_grad()` and after an error."""

    @abstractmethod
    def perturbed(self) -> Iterator[Tensor]:
        """The parameters whose weights are a sample now."""

    @property
    def differ(self) -> bool:
        """Whether other processes that train the same model have other draws."""
        return self.optimizer.draws_differ and self.processes > 1

    @property
    def drawing(self) -> bool:
        return self.key is not None

    def begin(self, training: bool) -> None:
        """Called before the weights are changed."""

    def end(self) -> None:
        """Called after the weights were restored, in training: finds the gradients that were computed in the context.

        A gradient from before it is gone if `zero_grad()` was called, or if there is another tensor in its place.
        """
        computed = {p for p, earlier in self.before.items() if p.grad is not None and not same(mark(p), earlier)}
        # A backward pass with create_graph=True adds out of place, and its result has a graph.
        tensors = {p: earlier[0] for p, earlier in self.before.items() if earlier}
        kept = {p for p in computed & self.old if p.grad is tensors[p] or gradient_of(p).requires_grad}
        for p in computed - kept:
            self.mixed.pop(p, None)
        self.mixed |= {p: self.norms[p] for p in kept if p in self.norms}
        self.added |= kept & self.sampled
        self.sampled |= computed
        self.computed(computed, kept)

    def computed(self, params: set[Tensor], kept: set[Tensor]) -> None:
        """Called with the parameters whose gradients were computed in a context.

        Args:
            params: these.
            kept: those of them whose gradients were added to gradients of earlier passes.
        """

    def reset(self) -> None:
        self.sampled: set[Tensor] = set()  # parameters whose gradients were computed in sampled()
        self.mixed: dict[Tensor, Tensor] = {}  # those that began with other gradients, and the norms of these
        self.added: set[Tensor] = set()  # those that began with gradients of other draws

    def zeroed(self, stale: bool) -> None:
        self.reset()
        self.old, self.norms = set(), {}
        self.at_zero_grad = self.before = {p: mark(p) for group in self.optimizer.param_groups for p in group["params"]}

    @contextmanager
    def draw(self, noise: Noise | None) -> Iterator[None]:
        if self.active:
            raise RuntimeError("sampled() is already active: leave the context before entering it again.")
        training = torch.is_grad_enabled()
        if training:
            self._note_gradients()
        self.begin(training)
        key = self._next_key(training)
        finished = False
        try:
            self.active, self.key = True, key if training else None
            with torch.no_grad():
                self.perturb(key, noise, training)
            if self.sharded:
                self.optimizer.weights_changed()
            version_of = shards.version if self.sharded else attrgetter("_version")
            versions = [(p, version_of(p)) for p in self.perturbed()]
            yield
            for p, version in versions:
                if version_of(p) != version:
                    raise RuntimeError(
                        f"{self.optimizer.name_of(p)} was changed inside sampled(), which restores the mean at its "
                        "end: change weights outside of it."
                    )
            finished = training
        finally:
            with torch.no_grad():
                self.restore(finished)
            if self.sharded:
                self.optimizer.weights_changed()
            self.active, self.key = False, None
            if finished:
                self.end()
            self.before = {}

    def _note_gradients(self) -> None:
        """Records which gradients exist at the beginning of a context, and which of them are of earlier passes."""
        every = (p for group in self.optimizer.param_groups for p in group["params"])
        self.before = {p: mark(p) for p in every if p.requires_grad}
        zeroed = self.at_zero_grad
        self.old = {p for p, now in self.before.items() if now and not (p in zeroed and same(zeroed[p], now))}
        self.norms = {}
        if not (foreign := self.old - self.sampled):
            return
        foreign = [p for p in foreign if p.numel() and gradient_of(p).layout is torch.strided]
        whole = [p for p in foreign if not shards.is_shard(p)]
        norms = torch._foreach_norm([gradient_of(p).detach() for p in whole], torch.inf) if whole else []
        self.norms = dict(zip(whole, norms))
        for p in (p for p in foreign if shards.is_shard(p)):
            part = gradient_of(p).detach()
            self.norms[p] = part.abs().max() if part.numel() else torch.zeros((), device=part.device)

    def _next_key(self, training: bool) -> noise.Key:
        optimizer, seed = self.optimizer, self.optimizer.param_groups[0]["seed"]
        if not training:
            self.without_grad += 1
            return noise.key(seed, optimizer.draws, self.without_grad)
        draws = optimizer.draws = optimizer.draws + 1
        return noise.key(seed, draws, *([0, 0, distributed.process_index()] if self.differ else []))

    def collect(self, groups: Groups, active: list[list[Tensor]]) -> Evidence:
        missing = next((p for some in active for p in some if p not in self.sampled), None)
        if missing is not None:
            name = self.optimizer.__class__.__name__
            raise RuntimeError(
                f"the gradient of {self.optimizer.name_of(missing)} was not computed at sampled weights: run forward "
                f"and backward passes inside `with optimizer.sampled():`, then call {name}.step(). In a loop that is "
                "not yours, call bayesgrad.integrations.attach(optimizer, model) before it."
            )
        if self._adds([p for p in self.mixed if p.grad is not None]):
            raise RuntimeError(
                "gradients that were not computed at sampled weights, or that a step has used, were not zero when "
                "others were added: call optimizer.zero_grad() before the first pass of a step, and run all of its "
                "passes (micro-batches too) inside `with optimizer.sampled():`, or in one closure."
            )
        return {}

    def _adds(self, mixed: list[Tensor]) -> bool:
        """Whether the gradients to which others were added were not zero, in any process."""
        return any(bool(shards.any_process(self.mixed[p] != 0, [p])) for p in mixed)

    def begin_draws(self) -> None:
        self.stored = {}

    def store_draw(self, samples: int) -> None:
        if self.added or self._adds(list(self.mixed)):
            raise RuntimeError(
                f"a closure that is averaged over samples={samples} draws cannot add to gradients of earlier passes: "
                "call optimizer.zero_grad() in the closure, and run all passes of a step there."
            )

    def merge_draws(self, samples: int) -> None:
        self.reset()
        every = (p for group in self.optimizer.param_groups for p in group["params"])
        self.sampled = {p for p in every if p.grad is not None}


def mark(p: Tensor) -> Mark:
    gradient = p.grad
    if gradient is None:
        return None
    return gradient, gradient._version if type(gradient) is Tensor else shards.version(gradient)


def same(a: Mark, b: Mark) -> bool:
    """Whether a gradient did not change between two marks."""
    return a is b or (a is not None and b is not None and a[0] is b[0] and a[1] == b[1])


class WeightSampling(Draws):
    """Gradients at weights that are sampled from the belief, whose variance is in the state.

    Args:
        evidence: what the curvature needs of a draw beside the gradient: None, the difference between sampled weight
            and mean (`"offset"`), the derivative of the sampled weight by the mean (`"slope"`), or the squared gradient
            of each draw (`"squares"`).
        scalars: param group -> the scalars of the sampling kernel.
        block_type: implements the sampling.
    """

    whole = None

    def __init__(
        self,
        evidence: str | None,
        scalars: Callable[[Mapping[str, Any]], list[float]],
        block_type: type[SampledBlock] = SampledBlock,
    ) -> None:
        self.evidence, self.scalars, self.block_type = evidence, WeakMethod(scalars), block_type
        self.layout: list[SampledBlock] = []
        self.drawn: list[SampledBlock] = []
        self.earlier: dict[Tensor, Tensor] = {}  # gradients of other draws at the beginning of the context
        self.own: dict[Tensor, Tensor] = {}  # gradients of this process in the context, if draws differ
        self.hooks: list[Any] = []
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.offsets: dict[Tensor, Tensor] = {}  # offset (or slope) of a parameter whose gradient is from one draw
        self.sums: dict[Tensor, Tensor] = {}  # sums of contributions, if the gradient is from several draws
        self.seen: dict[Tensor, Tensor | None] = {}  # gradients that belong to these sums
        self.count = 0  # number of draws
        self.unreduced = False  # whether a draw left shards without gradients

    def begin(self, training: bool) -> None:
        self.drawn = self._layout()
        # Offsets of an earlier draw are in buffers that this draw overwrites.
        self.offsets = {p: offset.clone() for p, offset in self.offsets.items()}
        if self.sharded and self.differ and any(shards.is_shard(p) for part in self.drawn for p in part.params):
            raise RuntimeError(
                f"{self.optimizer.__class__.__name__} draws its part of one vector for each DTensor parameter, and "
                "independent draws would be others: build it outside of independent_draws()."
            )
        if training and self.evidence == "squares" and self.differ:
            raise RuntimeError(
                f"{self.optimizer.__class__.__name__} squares the gradient of a draw, which belongs to a part of the "
                "batch if draws are independent: build it outside of independent_draws()."
            )
        if training and self.evidence is not None and self.differ:
            self.own = {}
            drawn = (p for part in self.drawn for p in part.params)
            self.hooks = [p.register_hook(partial(self._add_own, p)) for p in drawn]
        if training and self.evidence is not None:
            self.earlier = {p: gradient_of(p).clone() for p in self.old & self.sampled}

    def perturb(self, key: noise.Key, given: Noise | None, training: bool) -> None:
        elements = sum(part.elements for part in self.drawn)
        state = self.optimizer.state
        for part in self.drawn:
            states = [state[p][self.block_type.state_key] for p in part.params]
            part.perturb(states, self.scalars()(part.group), key, given, elements)  # pyright: ignore[reportOptionalCall]

    def _add_own(self, p: Tensor, gradient: Tensor) -> None:
        """Called with gradients before DistributedDataParallel averages them."""
        self.own[p] = self.own[p] + gradient if p in self.own else gradient.clone()

    def restore(self, finished: bool) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        elements = sum(part.elements for part in self.drawn)
        for part in self.drawn:
            part.restore(self.evidence is not None and finished, elements)

    def perturbed(self) -> Iterator[Tensor]:
        return (p for part in self.drawn for p in part.params)

    def _layout(self) -> list[SampledBlock]:
        """The blocks of parameters to perturb; reused from draw to draw until parameters change."""
        groups, state = self.optimizer.param_groups, self.optimizer.state
        wanted = [(group, [p for p in group["params"] if p.requires_grad]) for group in groups]
        every = [id(p) for _, params in wanted for p in params]  # == of tensors compares their values
        parts = self.layout
        if [id(p) for part in parts for p in part.params] != every or not all(part.fits() for part in parts):
            starts, start = {}, 0
            for group in groups:
                for p in group["params"]:
                    starts[p] = start
                    start += p.numel()
            parts = []
            for group, params in wanted:
                for kind in dict.fromkeys((p.dtype, p.device) for p in params):
                    some = [p for p in params if (p.dtype, p.device) == kind]
                    parts.append(self.block_type(group, some, [starts[p] for p in some]))
            # With several dtypes or devices in a group the order differs; the blocks are then built for each draw.
            self.layout = parts if [id(p) for part in parts for p in part.params] == every else []
        owners = {p: group for group, params in wanted for p in params}
        for part in parts:
            part.group = owners[part.params[0]]  # loading a state replaces groups
        for group, params in wanted:
            key = self.block_type.state_key
            if new := [p for p in params if state.get(p, {}).get(key, _NOTHING).shape != p.shape]:
                with torch.no_grad():
                    self.optimizer.initialise(group, new)
        return parts

    def _contribution(self, gradient: Tensor, offset: Tensor) -> Tensor:
        gradient = gradient.to(kernels.compute_dtype(gradient.dtype))
        return gradient.square() if self.evidence == "squares" else gradient * offset

    def _sum(self, p: Tensor, now: Tensor) -> Tensor:
        """The contributions to a gradient that is `now`; a factor of it since (clipping, unscaling) applies to them.

        So do bounds of values, and entries that were set to zero. Other changes do not: what a term that is added
        contributes has mean zero, and cannot be told from the gradients of single draws.
        """
        if p in self.offsets:
            return self._contribution(now, self.offsets[p])
        if (seen := self.seen[p]) is None:
            return self.sums[p]
        factor = torch.where(is_clamped(now, seen), now / seen, factor_between(now, seen)[0])
        factor = torch.where(now == seen, 1.0, torch.where(now.isfinite() & (now != 0), factor, 0.0))
        return self.sums[p] * (factor * factor if self.evidence == "squares" else factor)

    def computed(self, params: set[Tensor], kept: set[Tensor]) -> None:
        if params and self.unreduced and self.evidence is not None:
            shards.refuse_unreduced(self.optimizer.__class__.__name__)
        self.unreduced = not params and self.sharded and any(map(shards.is_shard, self.before))
        if params & self.old - kept:  # gradients of earlier draws were replaced
            self.count = 0
        self.count += bool(params)
        for p, offset in (pair for part in self.drawn for pair in part.offsets() if self.evidence is not None):
            if p in params and p in self.own:
                before = self._sum(p, self.earlier[p]) if p in kept and p in self.earlier else 0.0
                self.sums[p] = before + self._contribution(self.own[p], offset)
                self.seen[p] = gradient_of(p).clone()
            elif p in kept and p in self.earlier:
                if self.evidence == "squares" and self.processes > 1 and not shards.is_shard(p):
                    process_limits.refuse_several_squares(self.optimizer.__class__.__name__)
                now, earlier = gradient_of(p), self.earlier[p]
                self.sums[p] = self._sum(p, earlier) + self._contribution(now - earlier, offset)
                self.seen[p] = now.clone()
                self.offsets.pop(p, None)
            elif p in params:
                self.offsets[p] = offset
                self.sums.pop(p, None)

    def share(self, exchange: Exchange) -> None:
        """Products of several draws, which are linear in the gradients: the mean over processes.

        The gradient of a draw is the difference of `.grad` before and after it. Under `no_sync` it belongs to the batch
        of one process, and that of the last draw has what all processes had before in addition. The mean is right.
        """
        if self.evidence == "squares":
            return
        drawn = enumerate(p for part in self.drawn for p in part.params)
        own = ((i, p) for i, p in drawn if p in self.sums and not shards.is_shard(p))  # those of shards are averages
        for i, p in own:
            exchange.add(Sum(self.sums[p]), partial(self._receive, p), i)

    def _receive(self, p: Tensor, found: Sum) -> None:
        self.sums[p] = found.total / found.count

    def collect(self, groups: Groups, active: list[list[Tensor]]) -> Evidence:
        super().collect(groups, active)
        if self.evidence is None:
            return {}
        if not self.sums and (self.evidence != "squares" or self.count <= 1):
            return {} if self.evidence == "squares" else {self.evidence: self.offsets}
        self._warn_of_terms([p for some in active for p in some if self.seen.get(p) is not None])
        sums = {p: self._sum(p, gradient_of(p)) for some in active for p in some}
        if self.evidence != "squares":
            return {"product": sums}
        return {"squares": {p: total * self.count for p, total in sums.items()}}

    def _warn_of_terms(self, params: list[Tensor]) -> None:
        """Warns once, by values in steps 1, 2, 4, ..., of changes since the draws that are no factor."""
        steps = [int(self.optimizer.state[p]["step"]) + 1 for p in params if p in self.sums]
        if CHANGED in self.optimizer.warned or not any(n & (n - 1) == 0 for n in steps):
            return
        pairs = [(gradient_of(p), seen) for p in params if p in self.sums and (seen := self.seen[p]) is not None]
        if not all(bool(factor_between(*pair)[1] | is_clamped(*pair)) for pair in pairs):
            self.optimizer.warned.add(CHANGED)
            warn(
                "gradients of several draws of weights were changed before step(), by other than a factor, and the "
                f"curvature of {self.optimizer.__class__.__name__} is estimated without the change: add penalties to "
                "the loss instead of .grad.",
            )

    def store_draw(self, samples: int) -> None:
        super().store_draw(samples)
        for p in (p for part in self.drawn for p in part.params if p in self.offsets or p in self.sums):
            if p.grad is not None:
                part = self._sum(p, gradient_of(p))
                self.stored[p] = self.stored[p] + part if p in self.stored else part

    def merge_draws(self, samples: int) -> None:
        super().merge_draws(samples)
        self.count = 1
        self.sums = {p: value / samples for p, value in self.stored.items()}
        self.seen = dict.fromkeys(self.stored)


_NOTHING = torch.empty(0, 0, 0)
