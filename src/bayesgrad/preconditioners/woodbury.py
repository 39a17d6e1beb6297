"""The preconditioner of NaturalGradient: the inverse of a batch's damped Fisher matrix, by the Woodbury identity."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bayesgrad import layers, shards
from bayesgrad.directions import Direction, Directions, Product, Scaled, dense
from bayesgrad.distributed import Exchange, Sum, average
from bayesgrad.layers.call import LayerCall
from bayesgrad.layers.combination import concatenated
from bayesgrad.layers.fisher import check_batch_mixing, gather_gradients
from bayesgrad.layers.per_example import OuterProducts, PerExampleGradients, is_stored, restored
from bayesgrad.layers.recorder import check_outputs
from bayesgrad.parts import Groups, Host, Needs
from bayesgrad.precision.linalg import cholesky
from bayesgrad.preconditioners.block_options import check_block
from bayesgrad.preconditioners.gradient_factor import common_factor, dot, kind, size_bound
from bayesgrad.preconditioners.network import MERGED, NetworkPreconditioner
from bayesgrad.preconditioners.rows import InnerProduct
from bayesgrad.preconditioners.stability import inner_product, limit_norm, with_growing_damping
from bayesgrad.products import mm
from bayesgrad.rules.update import MOMENTUM
from bayesgrad.saved_state import NAMES, saved_entry, written_names
from bayesgrad.shards import gradient_of, has_nonzero_gradient, part_of, summed
from bayesgrad.sources.recorded_layers import RecordedLayers

ADAPT_EVERY = 5  # steps between changes of the damping, as in Martens and Grosse, 2015, section 6.5
ADAPT_FACTOR = (19 / 20) ** ADAPT_EVERY
BATCH = ("gram", "gram_of", "dual", "dual_damping")  # beside inputs and errors: their inner products


class Woodbury(NetworkPreconditioner):
    """(F + damping I)^-1 for the Fisher matrix F = G G' of the observed batch; G is never formed.

    The state has the inputs and errors of each layer, which `observe(outputs)` replaces if an update is due. Any state
    that gives the same steps determines the gradients of these examples, so a checkpoint cannot do without them and
    restore a run bit for bit; see `without_examples`.
    """

    needs = Needs(outputs=True)
    observes = True
    on_cpu = ("clock", "dual_damping", "gram_of")

    def __init__(self, fallback: str) -> None:
        self.fallback = fallback

    def bind(self, optimizer: Host) -> None:
        super().bind(optimizer)
        self.gradient_factor: Tensor | None = None
        self.layouts = self.row_layouts()
        self.unexplained: set[int] = set()
        self.dampings: dict[Tensor, float] = {}  # λ, by parameter
        self.warned: set[str] = set()
        self.predicted_change: float | None = None  # of the loss, by the quadratic model
        self.momentum = 0.0  # by the quadratic model

    def due(self, every: int) -> bool:
        """After `every` steps; early in a run at steps 1, 2, 3, 6, 12 and so on; and without a matrix."""
        clock = self.clock()
        if clock is None or not any(_is_batch(name) for p in self.params for name in self.optimizer.state.get(p, {})):
            return True
        last = int(clock[MERGED])
        return super().due(min(last if last >= 3 else 1, every))

    def covers(self, p: Tensor) -> bool:
        return p in self._recorded()

    def _recorded(self) -> set[Tensor]:
        modules = self.recorded.recorder.layers.values()
        return {p for module in modules for p in layers.own_parameters(module).values()}

    def record(self, optimizer: Host) -> RecordedLayers:
        check_batch_mixing(optimizer.model)  # pyright: ignore[reportArgumentType]
        known = (layers.is_matrix, layers.is_norm)
        return RecordedLayers(optimizer, self.fallback, known, by_layer=False, receiver=self)

    def forget(self, observed: bool) -> None:
        super().forget(observed)
        if observed:
            self.left: set[int] = set()  # unexplained in these observations, which NaN in a batch may be the reason for
        self.projections: dict[Tensor, Tensor | None] = {}  # G'g of a parameter, as far as backward passes have given g

    # --- observations ---

    def receive(self, call: LayerCall, restarted: bool) -> None:
        """Adds to G'g: inner products with the columns of G, once they are merged, follow from inputs and errors."""
        own = layers.own_parameters(call.module)
        if restarted:
            for p in own.values():
                self.projections.pop(p, None)
        entries = {name: self.optimizer.state.get(p, {}) for name, p in own.items() if p.requires_grad}
        columns = {name: restored(entry, own[name].shape) for name, entry in entries.items()}
        weight = columns.get("weight")
        several = call.input.dim() > 2 or self.observed or layers.is_transposed(call.module) or self.processes > 1
        if several or not isinstance(weight, OuterProducts) or weight.inputs.shape[2] > 1:
            self.projections |= dict.fromkeys(own.values())  # these follow from the gradients
            return
        inputs, errors = (rows[0, :, 0] for rows in (weight.inputs, weight.errors))
        products = mm(errors, call.error.to(errors).T)
        found = {"weight": mm(inputs, call.input.to(inputs).T).mul_(products).sum(1), "bias": products.sum(1)}
        for name in columns:
            before = self.projections.get(own[name], 0)
            self.projections[own[name]] = None if before is None else before + found[name]

    def observe(self, outputs: Any, loss: Any, labels: Any, weights: Any) -> None:
        check_batch_mixing(self.recorded.model)
        check_outputs(outputs)
        group = self.optimizer.param_groups[0]
        if not len(outputs) or not self.due(group["update_every"]):
            return
        trace = self.recorded.recorder.trace(outputs)
        directions = list(self.output_directions(outputs, labels, weights))
        forward, share = self.observed_pass(outputs, labels, weights)
        per_example = group["losses_per_example"]
        columns, left = gather_gradients(trace, directions, self.layouts, forward.group(per_example))
        self.left |= left
        known = {key: c for key, c in columns.items() if key not in self.unexplained | left}
        given = labels is not None and weights is None
        self.observed.append((known, given, share * forward.losses(per_example)))

    def share(self, exchange: Exchange) -> None:
        """Gathers the gradients of all examples."""
        if not self.due(self.optimizer.param_groups[0]["update_every"]):
            return
        observed, self.observed = self.observed, []
        for columns, given, losses in observed:
            every: dict[int, PerExampleGradients] = {}
            for i, p in ((i, p) for i, p in enumerate(self.params) if id(p) in columns):
                names, tensors = zip(*columns[id(p)].tensors().items())
                parts: list[list[Tensor]] = []
                for tensor in tensors:
                    exchange.gather(tensor, parts.append, i)
                exchange.after(partial(self._join, every, p, names, parts))
            exchange.add(Sum(shards.local(self.params[0]).new_zeros(()), losses), partial(self._receive, every, given))
        self.recorded.marks.share(exchange)

    @staticmethod
    def _join(
        every: dict[int, PerExampleGradients], p: Tensor, names: tuple[str, ...], parts: list[list[Tensor]]
    ) -> None:
        own = [restored(dict(zip(names, tensors)), p.shape) for tensors in zip(*parts)]
        every[id(p)] = concatenated([columns for columns in own if columns is not None])

    def _receive(self, every: dict[int, PerExampleGradients], given: bool, found: Sum) -> None:
        self.observed.append((every, given, float(found.count)))

    def _finite(self) -> list[tuple[dict[int, PerExampleGradients], bool, float]]:
        """The observations whose gradients and their inner products are finite; the host reads one tensor."""
        flags = [
            torch.stack([size_bound(own).square().isfinite().cpu() for own in columns.values()]).all()
            for columns, *_ in self.observed
            if columns
        ]
        good = iter(torch.stack(flags).tolist() if flags else [])
        return [one for one in self.observed if not one[0] or next(good)]

    def nonfinite(self, index: int, params: list[Tensor]) -> str | None:
        good = index > 0 or len(self._finite()) == len(self.observed)
        return None if good else "observe() found per-example gradients that are not finite"

    def has_own_shape(self, name: str) -> bool:
        return _is_batch(name)

    def check_loaded(self, saved: Mapping[str, Any]) -> None:
        for p in self.params:
            entry, _ = saved_entry(self.optimizer, saved, p)
            columns = restored(entry, p.shape)
            if columns is not None and not columns.fits():
                raise ValueError(
                    f"the per-example gradients of {self.optimizer.name_of(p)} in the saved state must fit its shape "
                    f"{tuple(p.shape)}, but do not: load the state into the model it came from."
                )

    # --- the step ---

    def directions(self, groups: Groups, active: list[list[Tensor]]) -> Directions:
        owners = {p: group for group, params in zip(groups, active) for p in params}
        recorded = self._recorded()
        remedy = ", or use blocks='layer'" if groups[0]["blocks"] == "full" else ""
        for block in self._blocks_of({p: None for p in owners if p in recorded}, groups[0]):
            check_block(self.optimizer, block, owners, ("damping",), remedy)
        self.predicted_change = None
        fresh = self._merge()
        columns = {
            p: c
            for p in self.params
            if p in owners
            and p not in self.recorded.read_elsewhere
            and (c := restored(self.optimizer.state.get(p, {}), p.shape)) is not None
        }
        seen = self.clock() is not None and (self.unexplained or self.recorded.read_elsewhere)
        if not columns and not seen and any(has_nonzero_gradient(p) for p in owners if p in recorded):
            raise self.recorded.missing_observation(
                "observe() was never called", "call observe(outputs), before loss.backward(), on outputs"
            )
        lost = (p for p in owners if p not in columns and p not in self.optimizer.warned)
        self.recorded.warn_fallback({p for p in lost if has_nonzero_gradient(p)})
        projected = [p for p in self.projections if self.recorded.marks.untouched([p])]
        self.gradient_factor = self.recorded.marks.factor(projected) if projected else None
        found: dict[Tensor, Direction] = {}
        by_model, limit = groups[0]["step_size"] == "quadratic", groups[0]["max_norm"]
        inner = InnerProduct(not by_model and math.isfinite(limit))
        for block in self._blocks_of(columns, groups[0]):
            own = {p: columns[p] for p in block}
            found |= self._solved(own, owners[block[0]], fresh, inner)
        if by_model:
            bounded: Directions = self._scaled_by_model({p: dense(d) for p, d in found.items()}, columns)
        else:
            bounded = limit_norm(found, limit, inner.total)
        if groups[0]["adapt_damping"]:
            self._predict({p: dense(d) for p, d in bounded.items()}, columns, owners)
        return bounded

    def _merge(self) -> bool:
        """Replaces the Fisher matrix by the observed one; True if labels were given, perhaps those of this batch."""
        if not self.observed:
            return False
        observed, self.observed = self._finite(), []
        if not observed:  # the Fisher matrix of an earlier batch stays
            if self.clock() is None:
                raise self.optimizer.nonfinite_error(
                    "observe() found per-example gradients that are not finite: training has diverged or inputs "
                    "overflow; lower lr."
                )
            return False
        self.projections = {}
        self.unexplained |= self.left
        named = {id(p): p for group in self.optimizer.param_groups for p in group["params"]}
        keys = [key for key in observed[0][0] if key in named and all(key in columns for columns, *_ in observed)]
        losses = sum(number for *_, number in observed)
        merged = {}
        for key in keys:
            columns = concatenated([columns[key] for columns, *_ in observed])
            # The state has no number of losses: F is the mean over examples of gg' for these columns g.
            merged[named[key]] = (
                columns if columns.count == losses else columns.scale(math.sqrt(columns.count / losses))
            )
        for p in named.values():
            entry = self.optimizer.state[p]
            for key in [key for key in entry if _is_batch(key)]:
                del entry[key]
        for p, columns in merged.items():
            self.optimizer.state[p].update({name: value.detach() for name, value in columns.tensors().items()})
        self.count_merge()
        return all(given for _, given, _ in observed)

    def _blocks_of(self, columns: Mapping[Tensor, Any], group: Mapping[str, Any]) -> list[list[Tensor]]:
        if not columns:
            return []
        if group["blocks"] == "full":
            return [list(columns)]
        blocks, seen = [], set()
        for module in self.recorded.recorder.layers.values():
            own = [p for p in layers.own_parameters(module).values() if p in columns and p not in seen]
            seen.update(own)
            blocks += [own] if own else []
        return blocks

    def _solved(
        self, columns: Mapping[Tensor, PerExampleGradients], group: Mapping[str, Any], fresh: bool, inner: InnerProduct
    ) -> dict[Tensor, Direction]:
        """The preconditioned gradient d of one block; d·g is added to `inner`."""
        params = list(columns)
        count = columns[params[0]].count
        scale = 1 / math.sqrt(count)
        factor, damping = self._dual(columns, float(group["damping"]), scale**2)
        self.dampings |= dict.fromkeys(params, damping)
        if fresh and (c := common_factor(columns)) is not None:
            rest = torch.full((count, 1), c / scale, dtype=factor.dtype, device=factor.device)
            weights = scale * torch.cholesky_solve(rest, factor)[:, 0]
            directions = {p: part_of(own.combine(weights.to(kind(own))), p) for p, own in columns.items()}
            products = [inner_product(d, gradient_of(p)) for p, d in directions.items()]
            for product in summed(products, params) if inner.needed else ():
                inner.include(product)
            return dict(directions)
        projection = scale * torch.stack([self._projected(p, own).to(factor) for p, own in columns.items()]).sum(0)
        dual = torch.cholesky_solve(projection[:, None], factor)[:, 0]
        fits = torch.isfinite(dual).all()  # if the gradient is too large for this dtype, the step is zero
        weights, share = (torch.where(fits, x / damping, 0.0) for x in (-scale * dual, torch.ones_like(dual[0])))
        solved: dict[Tensor, Direction] = {}
        for p, own in columns.items():
            gradient, rest = gradient_of(p).to(kind(own)), own.combination(weights.to(kind(own)))
            if shards.is_shard(p):
                solved[p] = torch.addcmul(part_of(dense(rest), p), gradient, share.to(gradient))
            elif isinstance(rest, Product):
                solved[p] = Scaled(gradient, share, rest)
            else:
                solved[p] = rest.addcmul_(gradient, share.to(gradient))
        if inner.needed:  # d·g = λ d·d + u·u, with the dual u = G'd, and λ^2 d·d = g·g - u·G'g - λ u·u
            products = summed([inner_product(g, g).to(factor) for g in map(gradient_of, columns)], params)
            total = torch.stack(products).sum()
            square = dual.square().sum()
            inner.include(square + (total - dual @ projection - damping * square).clamp(min=0) / damping)
        return solved

    def _projected(self, p: Tensor, columns: PerExampleGradients) -> Tensor:
        """G'g."""
        marks, found = self.recorded.marks, self.projections.get(p)
        if found is None or p in marks.unexplained or not marks.untouched([p]):
            return columns.project(shards.whole(shards.placed(gradient_of(p).to(kind(columns)), p)))
        factor = self.gradient_factor
        return found if factor is None else found * factor.to(found)

    def _dual(
        self, columns: Mapping[Tensor, PerExampleGradients], damping: float, weight: float
    ) -> tuple[Tensor, float]:
        """The Cholesky factor of λI + G'G, cached in the state of the block's first parameter, and λ."""
        owner = next(iter(columns))
        entry, device = self.optimizer.state[owner], owner.device
        order = self.params
        members = torch.tensor([i for i, p in enumerate(order) if p in columns])
        if "gram" not in entry or not torch.equal(entry["gram_of"], members):
            grams = [own.gram() for own in columns.values()]
            dtype = torch.float64 if any(g.dtype == torch.float64 for g in grams) else grams[0].dtype
            entry["gram"] = torch.stack([g.to(device, dtype) for g in grams]).sum(0) * weight
            entry["gram_of"] = members
            entry.pop("dual", None)
        if "dual" not in entry or float(entry["dual_damping"][0]) != damping:
            name = "the Gram matrix of the gradients"
            entry["dual"], used = with_growing_damping(cholesky, entry["gram"], damping, name, self.warned)
            entry["dual_damping"] = torch.tensor([damping, used], dtype=torch.float64)  # asked for, and used
        return entry["dual"], float(entry["dual_damping"][1])

    # --- the quadratic model ---

    def _fisher_products(
        self, vectors: list[dict[Tensor, Tensor]], columns: Mapping[Tensor, PerExampleGradients]
    ) -> Tensor:
        """v'F u for all pairs of vectors, in float64."""
        count = next(iter(columns.values())).count
        blocks = self._blocks_of(columns, self.optimizer.param_groups[0])
        total = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
        for block in blocks:
            rows = torch.stack(
                [sum(self._product(columns[p], p, v[p]) for p in block) for v in vectors]  # pyright: ignore
            )
            total += (rows @ rows.T / count).cpu()
        return total

    @staticmethod
    def _product(columns: PerExampleGradients, p: Tensor, vector: Tensor) -> Tensor:
        """G'v, for the part of v that this process has."""
        return columns.project(shards.whole(shards.placed(vector.to(kind(columns)), p))).double()

    def _scaled_by_model(
        self, found: dict[Tensor, Tensor], columns: Mapping[Tensor, PerExampleGradients]
    ) -> dict[Tensor, Tensor]:
        """Scales direction and momentum buffer to the minimum of g'δ + δ'(F + λI)δ/2 over δ = -(a d + m b)."""
        if not found:
            return {}
        state = self.optimizer.state
        buffers = {p: shards.local(state[p][MOMENTUM]) for p in found if MOMENTUM in state.get(p, {})}
        full = len(buffers) == len(found)
        moving = full and bool(
            shards.any_process(torch.stack([b.any().cpu() for b in buffers.values()]).any(), buffers)
        )
        vectors = [found, buffers] if moving else [found]
        inner = torch.stack([dot({p: gradient_of(p) for p in found}, v) for v in vectors])
        damped = [{p: self.dampings[p] * v[p] for p in found} for v in vectors]
        norms = torch.stack([torch.stack([dot(a, b) for a in damped]) for b in vectors])
        matrix = self._fisher_products(vectors, columns) + norms
        if not bool(torch.isfinite(matrix).all() & torch.isfinite(inner).all()):
            raise self.optimizer.nonfinite_error(
                "the quadratic model of this step is not finite: lower lr, scale the inputs, or use step_size='lr'."
            )
        # Direction and buffer may differ by many orders of magnitude; in units of their norms, the scales are alike.
        unit = matrix.diagonal().clamp(min=torch.finfo(matrix.dtype).tiny).rsqrt()
        best = (unit * (torch.linalg.pinv(unit[:, None] * matrix * unit, hermitian=True) @ (unit * inner))).tolist()
        self.momentum = best[1] if len(best) > 1 else 0.0
        return {p: best[0] * d for p, d in found.items()}

    def scalars(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        n = super().scalars(group, step)
        if group["step_size"] == "quadratic" and "momentum" in n:
            n["momentum"] = self.momentum
        return n

    def _predict(
        self, found: Mapping[Tensor, Tensor], columns: Mapping[Tensor, PerExampleGradients], owners: Mapping
    ) -> None:
        """Stores the change of the loss that the undamped quadratic model predicts for this step."""
        steps = {}
        for p, d in found.items():
            group = owners[p]
            buffer = self.optimizer.state.get(p, {}).get(MOMENTUM)
            momentum = self.momentum if group["step_size"] == "quadratic" else group["momentum"]
            moved = d if buffer is None or not group["momentum"] else d + momentum * shards.local(buffer)
            steps[p] = -float(group["lr"]) * (moved + group["weight_decay"] * shards.local(p.detach()).to(d))
        if steps:
            linear = dot({p: gradient_of(p) for p in steps}, steps)
            self.predicted_change = (linear + self._fisher_products([steps], columns)[0, 0] / 2).item()

    def prepare(self, closure: Callable[[], Any] | None) -> None:
        super().prepare(closure)
        self.adapts = any(group["adapt_damping"] for group in self.optimizer.param_groups)
        if self.adapts and closure is None:
            raise ValueError("adapt_damping=True compares losses before and after a step: use step(closure).")

    def finish(self, closure: Callable[[], Any] | None, loss: Any) -> None:
        super().finish(closure, loss)
        due = self.adapts and self.predicted_change is not None and self.steps_taken() % ADAPT_EVERY == 0
        if due and closure is not None:
            self._adapt(closure, self._mean(loss))

    def _mean(self, loss: Any) -> float:
        """The mean of a loss over processes."""
        value = loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss, device=self.params[0].device)
        return float(average(value)[0] if self.processes > 1 else value)

    def _adapt(self, closure: Callable[[], Any], before: float) -> None:
        """Levenberg-Marquardt: decreases damping if the quadratic model predicted the loss well, else increases it."""
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = [None if p.grad is None else p.grad.clone() for p in params]
        draws = self.optimizer.draws
        with torch.enable_grad():
            loss = closure()
        after = self._mean(loss)
        for p, gradient in zip(params, gradients):
            p.grad = gradient
        self.observed = []  # discard what this evaluation observed
        self.optimizer.draws = draws
        # Momentum can carry a step uphill. A rise of the loss is no success, even where the model predicted it.
        predicted = self.predicted_change or 0.0
        ratio = (after - before) / predicted if predicted < 0 else 0.0
        change = ADAPT_FACTOR if ratio > 0.75 else 1 / ADAPT_FACTOR if ratio < 0.25 else 1.0
        for group in self.optimizer.param_groups:
            group["damping"] = float(group["damping"]) * change


def without_examples(saved: dict[str, Any]) -> dict[str, Any]:
    """A state dict without what belongs to the observed batch: inputs, errors, and products of them."""

    def kept(entry: Any) -> Any:
        return {n: v for n, v in entry.items() if not _is_batch(n)} if isinstance(entry, dict) else entry

    state = {key: kept(entry) for key, entry in saved["state"].items()}
    groups = [{**group, NAMES: written_names(group, state)} for group in saved["param_groups"]]
    return {**saved, "state": state, "param_groups": groups}


def _is_batch(name: str) -> bool:
    """Whether a state tensor of this name belongs to the observed batch."""
    return name in BATCH or is_stored(name)
