"""The diagonal of the Hessian of a loss, by differentiating twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bayesgrad import noise
from bayesgrad.constraints import POSITIVE_INTEGER, Constraint, one_of
from bayesgrad.distributed import Exchange, Sum
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.call import Through, adds_to_gradient, without_hooks
from bayesgrad.layers.graph import check_visible, graph_nodes
from bayesgrad.parts import Evidence, Groups, Needs, Source, weak
from bayesgrad.passes import gradient_versions
from bayesgrad.shards import any_process, count_of, gathered, has_gradient, part_of, unreduced

ROWS = 64  # rows of an exact Hessian that are computed at once
EXACT_LIMIT = 1000  # weights up to which "auto" is "exact"
GROUP_NORM = "NativeGroupNormBackward0"  # batches of its second derivatives are wrong in torch, or raise
HESSIAN: Mapping[str, Constraint] = {"hessian": one_of("auto", "exact", "hutchinson"), "probes": POSITIVE_INTEGER}


class Observation:
    """The diagonal of the Hessian of one loss, by parameter.

    Attributes:
        factor: the derivative, by this loss, of what `backward()` differentiates; None before a backward pass.
        zeroed: whether gradients were set to zero since.
    """

    zeroed = False

    def __init__(self, loss: Tensor, diagonals: dict[Tensor, Tensor]) -> None:
        self.diagonals = diagonals
        self.params = list(gathered(diagonals).values())
        self.factor: Tensor | None = None
        loss.register_hook(self._differentiated)

    def _differentiated(self, factor: Tensor) -> None:
        if any(map(adds_to_gradient, self.params)):
            factor = factor.detach().reshape(())
            self.factor = factor if self.factor is None else self.factor + factor


class HessianDiagonal(Source):
    """The diagonal of the Hessian of the loss, computed by `observe(loss=loss)`.

    Call it before `loss.backward()`. Hessians add up like gradients: that of a micro-batch is multiplied by the number
    that its loss is multiplied by before the backward pass, such as 1/4 in `(loss / 4).backward()`. A number above one
    is the scale of a `GradScaler`, which does not count. Clipping gradients does not change the Hessian. Losses that
    were not differentiated, while another was, belong to an abandoned pass. Probes are a function of seed, step (or
    draw) and position: the micro-batches of a step share them. `hessian`, `probes`, `seed` and the number of `draws`
    are those of the first param group.

    Args:
        factor: param group and parameter -> the factor of second derivatives; None for 1.
    """

    needs = Needs(loss=True)
    observes = True
    whole = "second derivatives"

    def __init__(self, factor: Callable[[Mapping[str, Any], Tensor], float] | None = None) -> None:
        self.factor = weak(factor) if factor else None
        self.stored: dict[Tensor, Tensor] = {}  # sums over the draws of a closure
        self.reset()

    def reset(self) -> None:
        self.totals: dict[Tensor, Tensor] = {}  # of earlier backward passes
        self.waiting: list[Observation] = []  # since the gradients last changed
        self.gradients: list[tuple[int, int]] = []  # at the last observation

    def zeroed(self, stale: bool) -> None:
        self.totals = {}
        self.waiting = [] if stale else [seen for seen in self.waiting if seen.factor is None]
        for seen in self.waiting:
            seen.zeroed = True
        self.gradients = gradient_versions(self.optimizer.param_groups)

    @property
    def diagonals(self) -> dict[Tensor, Tensor]:
        """The sum over the losses of a step."""
        total = dict(self.totals)
        for seen in self._counted(several=bool(self.totals)):
            for p, diagonal in seen.diagonals.items():
                if seen.factor is not None:
                    diagonal = diagonal * seen.factor.clamp(max=1).to(diagonal)
                total[p] = total[p] + diagonal if p in total else diagonal
        return total

    def _counted(self, several: bool) -> list[Observation]:
        """The losses that were differentiated; if none was, as for gradients that are assigned, the one observed last.

        Args:
            several: whether there are others in the step, so that the weight of each must be known.
        """
        if found := [seen for seen in self.waiting if seen.factor is not None]:
            return found
        found = [seen for seen in self.waiting if not seen.zeroed] or self.waiting
        if (several and found) or len(found) > 1:
            raise RuntimeError(
                "several losses of a step were observed, and one of them was not differentiated by backward(), so that "
                "the weight of its Hessian is not known: pass the very tensor that is differentiated, or of which a "
                "multiple is, to observe(loss=loss)."
            )
        return found

    def observe(self, outputs: Any, loss: Any, labels: Any, weights: Any) -> None:
        wanted, start = [], 0
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad and p.numel():
                    wanted.append((group, p, start))
                start += p.numel()
        known = gathered(p for _, p, _ in wanted)
        wanted = [(group, p, start) for group, p, start in wanted if p in known]
        if wanted:
            with unreduced(known, keep=True):
                self._differentiate(loss, wanted, [known[p] for _, p, _ in wanted])

    def _differentiate(
        self, loss: Any, wanted: Sequence[tuple[Mapping[str, Any], Tensor, int]], params: Sequence[Tensor]
    ) -> None:
        """Observes a loss.

        Args:
            wanted: group, parameter, and the position of its first weight.
            params: that passes use in the place of these parameters.
        """
        optimizer = self.optimizer
        starts = [start for *_, start in wanted]
        gradients = gradients_of(loss, params)
        drawing = next((source for source in optimizer.sources if source.needs.draws), None)
        if drawing is not None and not drawing.drawing:
            raise RuntimeError("call observe(loss=loss) inside `with optimizer.sampled():`, before loss.backward().")
        now = gradient_versions(self.optimizer.param_groups)
        if now != self.gradients or any(seen.factor is not None for seen in self.waiting):
            self._counted(several=any(has_gradient(p) for _, p, _ in wanted))
            self.totals, self.waiting = self.diagonals, []
        self.gradients = now
        self.totals = {p: total for p, total in self.totals.items() if has_gradient(p)}
        if drawing is None and not self.totals and not self.waiting:
            optimizer.draws += 1
        first = optimizer.param_groups[0]
        few = sum(p.numel() for p in params) <= EXACT_LIMIT
        if first["hessian"] == "exact" or (first["hessian"] == "auto" and few):
            found = [exact(gradient, p, params) for gradient, p in zip(gradients, params)]
        else:
            keys = [noise.key(first["seed"], optimizer.draws, 0, probe) for probe in range(int(first["probes"]))]
            found = hutchinson(gradients, params, starts, keys)
        factor = self.factor or (lambda group, p: 1.0)
        diagonals = {
            p: d.detach().to(compute_dtype(p.dtype)) * factor(group, p) for (group, p, _), d in zip(wanted, found)
        }
        self.waiting.append(Observation(loss, diagonals))

    def begin_draws(self) -> None:
        self.stored = {}

    def store_draw(self, samples: int) -> None:
        for p, diagonal in self.diagonals.items():
            part = diagonal / samples
            self.stored[p] = self.stored[p] + part if p in self.stored else part

    def merge_draws(self, samples: int) -> None:
        self.totals, self.waiting = self.stored, []

    def share(self, exchange: Exchange) -> None:
        """The Hessian of the mean of the losses of all processes."""
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        exchange.expect(params[0])
        self.totals, self.waiting = self.diagonals, []

        def receive(p: Tensor, found: Sum) -> None:
            self.totals[p] = part_of(found.total, p) / found.count

        for i, p in ((i, p) for i, p in enumerate(params) if p in self.totals):
            exchange.add(Sum(self.totals[p]), partial(receive, p), i)

    def collect(self, groups: Groups, active: list[list[Tensor]]) -> Evidence:
        params, diagonals = [p for some in active for p in some], self.diagonals
        if any(p.numel() and p not in diagonals for p in params):
            raise RuntimeError(
                f"{self.optimizer.__class__.__name__} needs second derivatives: call optimizer.observe(loss=loss) "
                "before loss.backward(), where the loss is computed, and take no step for an empty batch."
            )
        return {"hessian": {p: part_of(diagonals[p], p) if p.numel() else torch.zeros_like(p) for p in params}}

    def nonfinite(self, index: int, params: list[Tensor]) -> str | None:
        known = self.diagonals
        parts = {p: part_of(known[p], p) for p in params if p in known}
        bad = [~torch.isfinite(part).all() for part in parts.values()]
        if bad and bool(any_process(torch.stack(bad).any(), params)):
            for p, part in parts.items():
                if count := int(count_of((~torch.isfinite(part)).sum(), p)):
                    name = self.optimizer.name_of(p)
                    return f"the Hessian of {name} has {count} entries of {p.numel()} that are not finite"
        return None


def gradients_of(loss: Tensor, params: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of a loss, with a graph for second derivatives. Leaves the loss's graph and `.grad` unchanged.

    Raises:
        TypeError, ValueError: the loss is not a single number with a graph.
        RuntimeError: the graph has been freed, or checkpointing hides a part of it.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss must be a tensor, got {type(loss).__name__}.")
    if loss.numel() != 1:
        raise ValueError(f"loss must be a single number, got shape {tuple(loss.shape)}: average it over the batch.")
    if not loss.requires_grad:
        raise ValueError("the loss has no graph: compute it with gradients enabled and do not detach it.")
    check_visible(loss)
    return _grad(loss.reshape(()), params, None, create_graph=True)


def exact(gradient: Tensor, p: Tensor, params: Sequence[Tensor] = ()) -> Tensor:
    """dg_i/dp_i for each i, in the shape of p. Each row of the Hessian costs a backward pass.

    Args:
        gradient: g, of the loss by p, with its graph.
        p: to differentiate by.
        params: all parameters.
    """
    if not gradient.requires_grad:  # for example of a loss that is linear in p
        return torch.zeros_like(p)
    if any(node.name() == GROUP_NORM for node in graph_nodes(gradient)):
        return _one_by_one(gradient, p, params)
    found = []
    for start in range(0, p.numel(), ROWS):
        index = torch.arange(start, min(start + ROWS, p.numel()), device=p.device)
        rows = torch.zeros(len(index), p.numel(), dtype=gradient.dtype, device=p.device)
        rows[torch.arange(len(index), device=p.device), index] = 1
        try:
            (products,) = _grad(gradient, [p], rows.view(-1, *p.shape), retain_graph=True, is_grads_batched=True)
        except RuntimeError:  # operations, hooks and retain_grad() need not support batches
            return _one_by_one(gradient, p, params)
        if (
            products.shape == p.shape
        ):  # autograd returns zeros without a batch dimension if the gradient does not depend on p
            return torch.zeros_like(p)
        found.append(products.reshape(len(index), -1).gather(1, index[:, None])[:, 0])
    return torch.cat(found).view(p.shape)


def _one_by_one(gradient: Tensor, p: Tensor, params: Sequence[Tensor]) -> Tensor:
    """As `exact`, without batches of rows."""
    every = [p, *params]  # torch crashes for the bias alone of a GroupNorm with channels last
    rows = (_grad(entry, every, None, retain_graph=True)[0] for entry in gradient.reshape(-1).unbind())
    return torch.stack([row.reshape(-1)[i] for i, row in enumerate(rows)]).view(p.shape)


def hutchinson(
    gradients: Sequence[Tensor], params: Sequence[Tensor], starts: Sequence[int], keys: Sequence[noise.Key]
) -> list[Tensor]:
    """The mean of v * (H v) over random signs v, one v for each key: E[v_i sum_j H_ij v_j] = H_ii.

    Its variance for one v is sum_{j != i} H_ij^2, which is zero for a diagonal Hessian.

    Args:
        gradients: of the loss, with their graph.
        params: to differentiate by.
        starts: the position of each parameter's first weight among all weights; signs are a function of it.
        keys: one random key for each v.
    """
    total = [torch.zeros_like(p) for p in params]
    for key in keys:
        signs = [_signs(p, start, key) for p, start in zip(params, starts)]
        products = hessian_products(gradients, params, signs)
        total = [t + v * product / len(keys) for t, v, product in zip(total, signs, products)]
    return total


def _signs(p: Tensor, start: int, key: noise.Key) -> Tensor:
    hashed, _ = noise.bits(noise.positions(noise.signed(start), p), *key)
    return (1 - 2 * (hashed & 1)).view(p.shape).to(p.dtype)


def hessian_products(gradients: Sequence[Tensor], params: Sequence[Tensor], vectors: Sequence[Tensor]) -> list[Tensor]:
    """H v; zero for a loss that is linear in all parameters, whose gradients have no graph."""
    curved = [(gradient, v) for gradient, v in zip(gradients, vectors) if gradient.requires_grad]
    if not curved:
        return [torch.zeros_like(p) for p in params]
    outputs, weights = zip(*curved)
    return list(_grad(outputs, params, weights, retain_graph=True))


def _grad(outputs: Tensor | Sequence[Tensor], params: Sequence[Tensor], weights: object, **how: bool) -> tuple:
    try:
        with without_hooks(params, but=Through):
            return torch.autograd.grad(  # pyright: ignore[reportCallIssue]
                outputs,  # pyright: ignore[reportArgumentType]
                params,
                weights,  # pyright: ignore[reportArgumentType]
                allow_unused=True,
                materialize_grads=True,
                **how,
            )
    except RuntimeError as error:
        raise RuntimeError(
            "the loss cannot be differentiated twice: call observe(loss=loss) before loss.backward(), and use "
            f"operations with second derivatives only. The error of torch: {error}"
        ) from error
