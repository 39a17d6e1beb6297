"""The preconditioner of samplers: a metric, with noise and corrections that fit it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from bayesgrad import distributed, layers, likelihoods, noise, shards
from bayesgrad.directions import Directions
from bayesgrad.distributed import Exchange, Sum
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.fisher import check_batch_mixing
from bayesgrad.layers.observed import loss_weights
from bayesgrad.layers.recorder import check_outputs
from bayesgrad.parts import Groups, Host, Needs, weak
from bayesgrad.preconditioners.network import NetworkPreconditioner
from bayesgrad.rules.transition import Static, average
from bayesgrad.rules.update import UpdateRule
from bayesgrad.samplers.correction import Batch
from bayesgrad.samplers.curvature import StepCheck, is_due, largest_eigenvalue, loss_scale, stable_lr
from bayesgrad.samplers.metric import Metric, ObservedBatch, State, Statistics
from bayesgrad.samplers.metric_blocks import MetricBlock, ParameterSpace, root_columns, solve_blocks
from bayesgrad.samplers.move import LangevinStep
from bayesgrad.shards import gradient_of
from bayesgrad.sources.hessian_diagonal import gradients_of, hessian_products
from bayesgrad.sources.recorded_layers import RecordedLayers

COLUMNS = 100  # of R, up to which corrections are exact
NOISE, SIGNS, START = 1, 2, 3  # words of the random key, for different uses
DAMPING = 0.1  # of a Fisher, if none is given


Observed = tuple[Statistics, tuple[float, int], list[Batch]]  # statistics, numbers of losses and of examples


class MetricPreconditioner(NetworkPreconditioner):
    """Turns gradients into steps of a Langevin equation, with noise and corrections.

    `observe(outputs)` updates the metric from a batch at the next step, if an update is due or the metric has nothing
    of some weights: of all data, of an independent batch, or of the batch of the gradients. Weights that a batch does
    not use (another head) keep their metric. The identity and callable metrics need no call.

    Args:
        metric: the matrix G.
        move: the step.
        scaled_temperature: param group -> T/N.
    """

    rule = UpdateRule(None, Static(), LangevinStep())
    observes = True

    def __init__(
        self, metric: Metric, move: LangevinStep, scaled_temperature: Callable[[Mapping[str, Any]], float]
    ) -> None:
        self.metric, self.move, self.scaled_temperature = metric, move, weak(scaled_temperature)
        self.check = StepCheck()
        self.unseen: set[Tensor] | None = None  # that the metric has nothing of; None until the state is read
        self.needs = Needs(outputs=metric.needs_observe)

    def bind(self, optimizer: Host) -> None:
        super().bind(optimizer)
        group = self.optimizer.param_groups[0]
        if group["correction"] is not None and any(map(shards.is_shard, self.params)):
            raise TypeError(
                f"correction={group['correction']!r} needs whole parameters in each process, got DTensors "
                "(fully_shard): use DistributedDataParallel, or correction=None."
            )
        for p in self.params[1:] if self.metric.joint else ():  # that was the first before others were added
            self.optimizer.state.get(p, {}).pop("fisher", None)
        self.parts: tuple[Any, list[MetricBlock]] | None = None
        self.unseen = None
        self.check.reset()
        self.layouts = self.row_layouts()

    def record(self, optimizer: Host) -> RecordedLayers:
        kinds = (layers.is_matrix, layers.is_norm) if self.metric.needs_observe else ()
        return RecordedLayers(optimizer, None, kinds, by_layer=False, record_arguments=self.remembers())

    def remembers(self) -> bool:
        """Whether the arguments of the model's last call are needed."""
        return self.optimizer.param_groups[0]["correction"] is not None and self.metric.needs_observe

    def initialise_state(self) -> None:
        super().initialise_state()
        for p, shapes in self._shapes().items():
            like = {"dtype": compute_dtype(p.dtype), "device": p.device}
            self.optimizer.state[p] |= {name: torch.zeros(shape, **like) for name, shape in shapes.items()}

    def _shapes(self) -> dict[Tensor, dict[str, tuple[int, ...]]]:
        return self.metric.shapes(self._space(self.params))

    def has_own_shape(self, name: str) -> bool:
        return any(name in shapes for shapes in self._shapes().values())  # all processes have the whole metric

    def step_scale(self, group: Mapping[str, Any]) -> float:
        return 1.0  # the direction already contains the learning rate

    # --- observations ---

    def observe(self, outputs: Any, loss: Any, labels: Any, weights: Any) -> None:
        if loss is not None:
            self.note_loss(loss)
        read = self._read(outputs, labels, weights)
        if isinstance(loss, Tensor) and loss.requires_grad and is_due(self.steps_taken() + 1):
            with shards.unreduced(self.params, keep=True):
                self._measure(loss, outputs, labels, weights, self.optimizer.state if read is None else read)

    def _read(self, outputs: Any, labels: Any, weights: Any) -> Statistics | None:
        """The statistics of a batch, which are kept for the next step; None if none are needed."""
        group = self.optimizer.param_groups[0]
        if not self.metric.needs_observe or not (self.due(group["update_every"]) or self._reads_new(outputs)):
            return None
        check_batch_mixing(self.recorded.model)
        check_outputs(outputs)
        self.recorded.update_trainable()
        empirical = group["metric"] == "empirical"
        if empirical and labels is None:
            raise ValueError("metric='empirical' needs labels: call observe(outputs, labels=labels).")
        if labels is not None and not empirical and group["fisher"] == "exact":
            raise ValueError("fisher='exact' is an expectation over labels and takes none: call observe(outputs).")
        losses = self._losses(outputs, labels, weights)
        scale = math.sqrt(len(outputs) / losses)  # statistics are means over examples, and gradients over losses
        directions = self.output_directions(outputs, labels, weights, group["fisher"] == "exact")
        scaled = directions if scale == 1 else (scale * direction for direction in directions)
        trace = self.recorded.recorder.trace(outputs)
        params = [p for p in self.params if p.requires_grad or self.metric.joint]  # statistics of frozen ones are zero
        read = self.metric.read(ObservedBatch(trace, scaled, params, self.recorded.layers, self.layouts))
        batch = self._batch(outputs, labels if empirical else None, losses)
        self.observed.append((read, (losses, len(outputs)), [] if batch is None else [batch]))
        return read

    def _without_statistics(self) -> set[Tensor]:
        """The parameters that no observed outputs depended on so far: thawed, added, or of a head that was not used."""
        if self.unseen is None:
            self.unseen = set(self.params) - self.metric.seen(self.optimizer.state, self._space(self.params))
        return self.unseen

    def _space(self, params: Sequence[Tensor]) -> ParameterSpace:
        return ParameterSpace(tuple(params), tuple(self.params), tuple(self.recorded.layers))

    def _reads_new(self, outputs: Any) -> bool:
        """Whether outputs depend on trained parameters that the metric has nothing of."""
        new = {id(p) for p in self._without_statistics() if p.requires_grad}
        if not new:
            return False
        check_outputs(outputs)
        return bool(new & self.recorded.recorder.trace(outputs).read_counts.keys())

    def _losses(self, outputs: Tensor, labels: Tensor | None, weights: Tensor | None) -> float:
        """The number of losses of the observed outputs whose mean is the loss."""
        forward, share = self.observed_pass(outputs, labels, weights)
        return share * forward.losses(self.optimizer.param_groups[0]["losses_per_example"])

    def _measure(self, loss: Tensor, outputs: Any, labels: Any, weights: Any, state: State) -> None:
        """Compares the curvature of the loss with the likelihood and with the metric; see `samplers.curvature`."""
        scale = largest = None
        if self.metric.needs_observe:
            kind = likelihoods.named(self.optimizer.param_groups[0]["likelihood"])
            losses, each = self._losses(outputs, labels, weights), loss_weights(kind, outputs, labels, weights)
            with self.check.unmeasured("its scale is not compared with the likelihood's"):
                scale = loss_scale(loss, outputs, kind, losses, each, self.processes > 1)
        if self._shortens():
            params = [p for p in self.params if p.requires_grad]
            space = self._space(params)
            used = list(shards.gathered(params).values())
            with self.check.unmeasured("steps are not shortened"):
                with torch.enable_grad():
                    gradients = gradients_of(loss, used)
                largest = self._largest(gradients, used, space, self._joint(state, outputs, labels, weights))
        self.check.measured.append((scale, largest))

    def _joint(self, state: State, outputs: Any, labels: Any, weights: Any) -> State:
        """The statistics of the batches of all processes, if these are those of a batch; else the state."""
        if self.processes == 1 or state is self.optimizer.state:
            return state
        values = (value for entry in state.values() for value in entry.values())
        mean = iter(self._averaged(self._losses(outputs, labels, weights), *values))
        return {p: {slot: next(mean) for slot in entry} for p, entry in state.items()}

    def _averaged(self, losses: float, *means: Tensor) -> list[Tensor]:
        """Means over the losses of all processes, from those of each and the number of its losses."""
        if self.processes == 1:
            return list(means)
        number = means[0].new_tensor(losses, dtype=torch.float64)
        total, *found = distributed.average(number, *(mean.detach() * losses for mean in means))
        return [mean / float(total) for mean in found]

    def _largest(
        self, gradients: tuple[Tensor, ...], params: list[Tensor], space: ParameterSpace, state: State
    ) -> float:
        """The largest eigenvalue of G^-1 H, with the prior in H; `params` are those of the gradients."""
        parts = self.metric.parts(state, space, self._damping())
        pulls = {p: self._pull(group) for group in self.optimizer.param_groups for p in group["params"]}

        def by_parameter(flat: Tensor) -> dict[Tensor, Tensor]:
            pieces = flat.split([p.numel() for p in space.params])
            return {p: piece.view(p.shape).to(p.device, p.dtype) for p, piece in zip(space.params, pieces)}

        def product(flat: Tensor) -> Tensor:
            vectors = by_parameter(flat)
            found = hessian_products(gradients, params, list(vectors.values()))
            pairs = zip(distributed.average(*found) if self.processes > 1 else found, vectors.items())
            return torch.cat([(h + pulls[p] * v).flatten().to(flat) for h, (p, v) in pairs])

        def solve(flat: Tensor) -> Tensor:
            found = solve_blocks(parts, by_parameter(flat))
            return torch.cat([found[p].flatten().to(flat) for p in space.params])

        key, starts = noise.key(self.optimizer.param_groups[0]["seed"], self.steps_taken() + 1, START), self._starts()
        start = torch.cat([_normal(p, starts[p], key).flatten().to(space.flat()) for p in space.params])
        return largest_eigenvalue(product, solve, start)

    def _shortens(self) -> bool:
        return self.move.injected and self.optimizer.param_groups[0]["limit_step"]

    @staticmethod
    def _pull(group: Mapping[str, Any]) -> float:
        return group["prior_precision"] / group["num_data"]

    def forget(self, observed: bool) -> None:
        super().forget(observed)
        if observed:
            self.check.measured = []

    def _batch(self, outputs: Tensor, labels: Tensor | None, losses: float) -> Batch | None:
        if not self.remembers():
            return None
        # The step reads them, when the caller may have overwritten them.
        given = (*self.recorded.recorder.arguments(outputs), labels)
        args, kwargs, labels = tree_map_only(Tensor, Tensor.clone, given)
        names: dict[Tensor, str] = {p: name for name, p in self.recorded.model.named_parameters()}
        order = self.params
        kind = likelihoods.named(self.optimizer.param_groups[0]["likelihood"])
        mine = tuple(names[p] for p in order), tuple(p.shape for p in order)
        return Batch(self.recorded.model, *mine, args, kwargs, labels, kind, losses, outputs.detach().clone())

    def _merge(self) -> list[Batch] | None:
        """Updates the state from the observed batches; returns None if there are none."""
        if not self.observed:
            return None
        observed, self.observed = self.observed, []
        keep, take = average(self.optimizer.param_groups[0]["ema"], self.count_merge())
        fresh: Statistics = {}
        for p, slot, total, count in self._sums(observed):
            fresh.setdefault(p, {})[slot] = total / (count or 1.0)
        for p, entry in fresh.items():
            self.metric.merge(self.optimizer.state[p], entry, keep, take, self._space(self.params))
        self.parts = self.unseen = None
        return [batch for *_, batches in observed for batch in batches]

    def share(self, exchange: Exchange) -> None:
        """Statistics are means over examples; the batches stay, for `_corrections`."""
        if self.metric.needs_observe and self.due(self.optimizer.param_groups[0]["update_every"]):
            exchange.expect(self.params[0])
        observed, self.observed = self.observed, []
        read: Statistics = {}
        order = {p: i for i, p in enumerate(self.params)}
        for p, slot, total, count in self._sums(observed):
            exchange.add(Sum(total, count), partial(self._receive, read.setdefault(p, {}), slot), (order[p], slot))
        if observed:
            self.observed = [(read, (1.0, 1), [batch for *_, batches in observed for batch in batches])]

    def _sums(self, observed: Sequence[Observed]) -> Iterator[tuple[Tensor, str, Tensor, float]]:
        """Sums of statistics over batches, and what they are divided by; those that a batch does not have are zero."""
        names = ((p, slot) for read, *_ in observed for p, slots in read.items() for slot in slots)
        for p, slot in dict.fromkeys(names):
            parts, count = [], 0.0
            for read, sizes, _ in observed:
                value = read.get(p, {}).get(slot)
                alone = len(observed) == 1 and self.processes == 1
                used = value is not None and (alone or bool(value.any()))
                weight = self.metric.weight(slot, *sizes, used)
                parts += [] if value is None else [value * weight]
                count += weight
            yield p, slot, torch.stack(parts).sum(0), count

    @staticmethod
    def _receive(entry: dict[str, Tensor], slot: str, found: Sum) -> None:
        entry[slot] = found.total / (float(found.count) or 1.0)  # none, and zero, if no process uses it

    # --- the step ---

    def note_loss(self, loss: Any) -> None:
        first = self.optimizer.param_groups[0]
        if first["nonfinite"] == "ignore":
            return  # reading the loss would make the host wait for it
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ValueError(f"loss must be a single number, got shape {tuple(loss.shape)}: average it over the batch.")
        value = float(loss.detach() if isinstance(loss, Tensor) else loss)
        if math.isfinite(value):
            first["last_loss"] = value
        elif first["nonfinite"] == "raise" and self.processes == 1:  # gradients tell all processes alike
            raise self.optimizer.nonfinite_error(f"the loss is {value}")

    def directions(self, groups: Groups, active: list[list[Tensor]]) -> Directions:
        owners = {p: group for group, params in zip(groups, active) for p in params}
        if not owners:
            return {}
        space = self._space([p for p in self.params if p in owners])
        self._settle_check()
        fresh = self._merge()
        if self.metric.needs_observe and self.clock() is None:
            raise self.recorded.missing_observation(
                "nothing was ever observed", "call observe(outputs), before loss.backward(), on outputs"
            )
        self._refuse_unobserved(space)
        damping = self._damping()
        parts = self._precisions(space, damping)
        corrections = self._corrections(space, parts, fresh)
        key, starts = noise.key(groups[0]["seed"], self.steps_taken() + 1, NOISE), self._starts()
        found: dict[Tensor, Tensor] = {}
        secants: list[tuple[Tensor, Tensor, Tensor]] = []
        for part in parts:
            group = owners[part.members[0]]
            if len({float(owners[p]["lr"]) for p in part.members}) > 1:
                raise ValueError(
                    "parameters with a common metric must have the same lr: use the same lr in their groups."
                )
            pulls = {p: self._pull(owners[p]) for p in part.members}
            pull: Any = pulls[part.members[0]]
            if len(set(pulls.values())) > 1:
                pull = part.join({p: torch.full(p.shape, pulls[p], dtype=p.dtype) for p in part.members})
            lr = float(group["lr"])
            n: dict[str, Any] = {"lr": stable_lr(lr, self.optimizer.param_groups[0]) if self._shortens() else lr}
            n |= {"heat": self.scaled_temperature(group), "pull": pull, "damping": damping}
            weight = part.join({p: shards.whole(p.detach()) for p in part.members})
            gradient = part.join({p: shards.whole(shards.placed(gradient_of(p), p)) for p in part.members})
            noisy = self.move.injected or (group["damping_noise"] and damping > 0 and lr > 0)
            normal = part.join({p: _normal(p, starts[p], key) for p in part.members}) if noisy else None
            correction = part.join(corrections) if corrections else None
            change = self.move.change(weight, gradient, part.precision, correction, normal, n)
            if groups[0]["nonfinite"] == "raise" and not bool(torch.isfinite(change).all()):
                raise self.optimizer.nonfinite_error("the step is not finite; nothing was changed")
            found |= {p: shards.part_of(d, p) for p, d in part.parted(change).items()}
            if self.check.secants.active and normal is not None:
                added, whole = self.move.added(part.precision, normal, n), gradient + pull * weight
                own = 2 * n["lr"] * n["heat"] * normal.square().sum()
                secants.append((added, whole, torch.stack([own - n["lr"] * (added * whole).sum(), own])))
        if secants:
            self.check.add_secants(secants, self.optimizer.param_groups[0])
        return found

    def _refuse_unobserved(self, space: ParameterSpace) -> None:
        """A gradient without a metric would be divided by the damping alone."""
        for p in space.params if self.metric.needs_observe else ():
            if p in self._without_statistics() and bool(shards.whole(shards.placed(gradient_of(p), p)).any()):
                name = next(name for name, one in self.recorded.model.named_parameters() if one is p)
                raise RuntimeError(
                    f"{name} has a gradient, but no observed outputs depend on it: call observe(outputs) on outputs "
                    "that do, or leave it out of params."
                )

    def _settle_check(self) -> None:
        group = self.optimizer.param_groups[0]
        self.check.settle(group, self.move.injected, self._shortens())
        unknown = group["loss_scale"] is None and self.metric.needs_observe and group["correction"] is None
        if unknown and self.move.injected and not self.check.secants.active and is_due(self.steps_taken() + 1):
            self.check.secants.begin()

    def _starts(self) -> dict[Tensor, int]:
        """The position of each parameter's first weight; noise is a function of positions."""
        starts, start = {}, 0
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                starts[p] = noise.signed(start)
                start += p.numel()
        return starts

    def _precisions(self, space: ParameterSpace, damping: float) -> list[MetricBlock]:
        """The metric of these weights; cached until the next observation."""
        key = (*map(id, space.params), damping)
        if self.parts is not None and self.metric.needs_observe and self.parts[0] == key:
            return self.parts[1]
        parts = self.metric.parts(self.optimizer.state, space, damping)
        self.parts = (key, parts)
        return parts

    def _damping(self) -> float:
        given = self.optimizer.param_groups[0]["damping"]
        return float(given) if given is not None else DAMPING if self.metric.needs_observe else 0.0

    # --- corrections ---

    def correction_form(self) -> str:
        if self.optimizer.param_groups[0]["correction"] is None:
            return "none"
        form = self.metric.form(self.recorded.model)
        return "estimated" if form != "zero" and self._estimates() else form

    def _estimates(self) -> bool:
        known = self.parts[1] if self.parts is not None else []
        columns = sum(part.columns for part in known) if known else sum(p.numel() for p in self.params)
        return self.optimizer.param_groups[0]["probes"] is not None or columns > COLUMNS

    def _corrections(
        self, space: ParameterSpace, parts: list[MetricBlock], fresh: list[Batch] | None
    ) -> dict[Tensor, Tensor] | None:
        """G^-1 (-u) or G^-1 (-u + t/2); stored in the state until the metric changes."""
        group = self.optimizer.param_groups[0]
        if group["correction"] is None or self.metric.form(self.recorded.model) == "zero":
            return None
        if self.metric.needs_observe and fresh is None:
            if any("correction" not in self.optimizer.state[p] for p in space.params):
                raise RuntimeError(
                    "a parameter has a gradient for the first time: call observe(outputs) before step()."
                )
            return {p: self.optimizer.state[p]["correction"] for p in space.params}
        probes = int(group["probes"] or 1) if self._estimates() else None
        columns = root_columns(parts, space.params, None if probes is None else self._signs(probes))
        names: dict[Tensor, str] = {p: name for name, p in self.recorded.model.named_parameters()}
        chosen = {"names": tuple(names[p] for p in space.params), "shapes": tuple(p.shape for p in space.params)}
        batches = [replace(batch, **chosen) for batch in fresh or ()]
        for batch in batches:
            batch.check(space.flat())
        mean = partial(self._averaged, float(sum(batch.count for batch in batches)))
        drift = self.metric.drift(batches, space, columns, group["correction"], mean) / (probes or 1)
        drift = mean(drift)[0] if batches else drift
        pieces = drift.detach().split([p.numel() for p in space.params])
        by_name = {p: piece.view(p.shape) for p, piece in zip(space.params, pieces)}
        found = solve_blocks(parts, by_name)
        if self.metric.needs_observe:
            for p in space.params:
                self.optimizer.state[p]["correction"] = found[p]
        return found

    def _signs(self, probes: int) -> Callable[[Tensor], Tensor]:
        seed, step, starts = self.optimizer.param_groups[0]["seed"], self.steps_taken() + 1, self._starts()

        def signs(p: Tensor) -> Tensor:
            keys = [noise.key(seed, step, SIGNS, probe) for probe in range(probes)]
            hashed = [noise.bits(noise.positions(starts[p], p), *key)[0] for key in keys]
            return torch.stack([(1 - 2 * (h & 1)).view(p.shape) for h in hashed])

        return signs


def _normal(p: Tensor, start: int, key: noise.Key) -> Tensor:
    """Standard normal numbers, as a function of key and position."""
    square, cosine = noise.normal_parts(noise.positions(start, p), *key)
    dtype = compute_dtype(p.dtype)
    return (square.to(dtype).sqrt() * cosine.to(dtype)).view(p.shape)
