"""The base class of Langevin and SNGD: metric, corrections and steps."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayesgrad import layers, likelihoods, noise
from bayesgrad.block import Directions, gradient_of
from bayesgrad.curvature.gradients import average
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.fisher import check_batch_mixing, check_outputs
from bayesgrad.optimizer.constraints import COUNT, NONNEGATIVE, Constraint, one_of
from bayesgrad.optimizer.factored import MERGED, MERGES
from bayesgrad.optimizer.layerwise import LayerwiseOptimizer
from bayesgrad.rule import Langevin as LangevinRule
from bayesgrad.samplers.correction import CORRECTIONS, Batch
from bayesgrad.samplers.metric import (
    METRICS,
    DenseFisher,
    MetricBlock,
    ObservedBatch,
    ParameterSpace,
    metric_by_name,
    root_columns,
)

COLUMNS = 100  # of R, up to which corrections are exact
LIMIT = 10_000  # weights of a dense metric
NOISE, SIGNS = 1, 2  # words of the random key, for different uses
PROBES = Constraint("None or a whole number >= 1", lambda x: x is None or (x == int(x) and x >= 1))


class Diverged(RuntimeError, FloatingPointError):
    """A chain has diverged; the weights are the last finite ones.

    Attributes:
        step: the number of the step that failed.
        temperature: of the chain.
        loss: the last finite loss; None if no loss was given.
    """

    def __init__(self, message: str, step: int, temperature: float, loss: float | None) -> None:
        super().__init__(message)
        self.step, self.temperature, self.loss = step, temperature, loss

    def __reduce__(self) -> tuple:
        return Diverged, (*self.args, self.step, self.temperature, self.loss)


class Sampler(LayerwiseOptimizer):
    """An optimizer whose weights sample from a posterior instead of converging.

    Attributes:
        metric: the preconditioner G.
        correction_form: how the correction is computed: "none", "zero" (the metric is constant), "closed",
            "exact" (by automatic differentiation) or "estimated" (without bias, from random directions).
    """

    rule: ClassVar[LangevinRule] = LangevinRule()  # pyright: ignore[reportIncompatibleVariableOverride]
    by_layer = False
    recorded = (layers.is_matrix, layers.is_norm)
    records_backward = False
    observes = True
    accepts = {
        **LayerwiseOptimizer.accepts,
        "num_data": COUNT,
        "temperature": NONNEGATIVE,
        "batch_size": COUNT,
        "prior_precision": NONNEGATIVE,
        "correction": one_of(*CORRECTIONS),
        "metric": one_of(*METRICS, "callable"),
        "fisher": one_of("exact", "sampled"),
        "probes": PROBES,
        "likelihood": one_of("categorical", "bernoulli", "gaussian", "poisson"),
    }

    def __init__(self, model: nn.Module, params: Any, metric: Any, defaults: dict[str, Any]) -> None:
        name, self.metric = metric_by_name(metric)
        super().__init__(model, params, {**defaults, "metric": name})
        size = sum(p.numel() for p in self._in_model_order())
        if isinstance(self.metric, DenseFisher) and size > LIMIT:
            raise ValueError(
                f"metric={name!r} stores a dense matrix and supports at most {LIMIT} weights, got {size}: "
                "use metric='kronecker' or 'diagonal', or restrict params= to a part of the model."
            )

    @abstractmethod
    def scaled_temperature(self, group: Mapping[str, Any]) -> float:
        """T/N."""

    def temperature(self) -> float:
        """The current temperature T of the first group."""
        group = self.param_groups[0]
        return self.scaled_temperature(group) * float(group["num_data"])

    # --- parameters ---

    def _bind(self) -> None:
        super()._bind()
        self._parts: tuple[Any, list[MetricBlock]] | None = None
        self._left: dict[Any, set[int]] = {}

    @property
    def remembers(self) -> bool:
        return self.param_groups[0]["correction"] is not None and self.metric.needs_observe

    def _is_recorded(self, module: nn.Module, mine: set[int]) -> bool:
        return self.metric.needs_observe and super()._is_recorded(module, mine)

    def _unmodelled(self) -> list[Tensor]:
        return []

    def step_scale(self, group: Mapping[str, Any]) -> float:
        """1: the direction already contains the learning rate."""
        return 1.0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters of the model. Only lr and prior_precision may differ from the first group."""
        super().add_param_group(param_group)
        self.param_groups[-1].setdefault("last_loss", None)
        for name in ("metric", "correction", "num_data", "temperature", "batch_size", "damping"):
            given, first = (group.get(name) for group in (self.param_groups[-1], self.param_groups[0]))
            if given != first:
                self.param_groups.pop()
                raise ValueError(f"{name} must be the same in all groups, got {given!r} and {first!r}.")

    # --- observations ---

    def observe(self, outputs: Tensor, labels: Tensor | None = None) -> None:
        """Updates the metric from this batch at the next step, if an update is due (see `update_every`).

        Call it before `loss.backward()`, with the outputs for all data, for an independent batch, or for the batch of
        the gradients. Several calls before a step act like one call with a larger batch. The identity and callable
        metrics need no call.

        Args:
            outputs: of the model, with their graph. The graph and `.grad` stay unchanged.
            labels: for metric="empirical"; with fisher="sampled", instead of sampled ones.
        """
        group = self.param_groups[0]
        clock = self.state.get(self._in_model_order()[0], {}).get("clock")
        if not self.metric.needs_observe:
            return
        if clock is not None and self._steps_taken() + 1 - int(clock[MERGED]) < group["update_every"]:
            return
        check_batch_mixing(self.model)
        check_outputs(outputs)
        kind = likelihoods.named(group["likelihood"])
        empirical = group["metric"] == "empirical"
        if empirical and labels is None:
            raise ValueError("metric='empirical' needs labels: call observe(outputs, labels).")
        if labels is not None and not empirical and group["fisher"] == "exact":
            raise ValueError("fisher='exact' is an expectation over labels and takes none: call observe(outputs).")
        if labels is None and group["fisher"] == "exact":
            directions = kind.hessian_roots(outputs)
        else:
            directions = iter([kind.residual(outputs, labels if labels is not None else self.draw(outputs))])
        order = self._in_model_order()
        read = self.metric.read(ObservedBatch(self.recorder.trace(outputs), directions, order, self.layers, self._left))
        self._observed.append((read, len(outputs), self._batch(outputs, labels if empirical else None)))
        self._marked = self._mark()

    def _batch(self, outputs: Tensor, labels: Tensor | None) -> Batch | None:
        if not self.remembers:
            return None
        args, kwargs = self.recorder.arguments(outputs)
        names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        order = self._in_model_order()
        kind = likelihoods.named(self.param_groups[0]["likelihood"])
        mine = tuple(names[p] for p in order), tuple(p.shape for p in order)
        return Batch(self.model, *mine, args, kwargs, labels, kind, len(outputs))

    def _merge(self) -> list[Batch] | None:
        """Updates the state from the observed batches; returns None if there are none."""
        if not self._observed:
            return None
        observed, self._observed = self._observed, []
        total = sum(count for _, count, _ in observed)
        clock = self.state[self._in_model_order()[0]].setdefault("clock", torch.zeros(3, dtype=torch.int64))
        clock[MERGES] += 1
        clock[MERGED] = self._steps_taken() + 1
        keep, take = average(self.param_groups[0]["ema"], int(clock[MERGES]))
        for p in observed[0][0]:
            entry = self.state[p]
            for slot in observed[0][0][p]:
                fresh = sum(read[p][slot] * (count / total) for read, count, _ in observed)
                old = entry.get(slot)
                entry[slot] = fresh if old is None or not keep else keep * old + take * fresh  # pyright: ignore
        self._parts = None
        return [batch for _, _, batch in observed if batch is not None]

    # --- the step ---

    def step(self, closure: Callable[[], Any] | None = None, *, loss: Any = None) -> Any:
        """Moves the weights to the next sample; see `BeliefOptimizer.step`.

        Args:
            closure: re-evaluates the model, calls backward and returns the loss.
            loss: of the current gradients, if there is no closure; for the message if the chain diverges.

        Raises:
            Diverged: the loss, a gradient or the step is not finite and `nonfinite` is "raise". Nothing was changed.
        """
        if loss is not None:
            self._note(loss)

        def noted() -> Any:
            found = closure() if closure is not None else None
            if found is not None:
                self._note(found)
            return found

        try:
            return super().step(noted if closure is not None else None)
        except FloatingPointError as error:
            if isinstance(error, Diverged):
                raise
            raise self._diverged(str(error)) from error

    def _note(self, loss: Any) -> None:
        value = float(loss.detach() if isinstance(loss, Tensor) else loss)
        if math.isfinite(value):
            self.param_groups[0]["last_loss"] = value
        elif self.param_groups[0]["nonfinite"] == "raise":
            raise self._diverged(f"the loss is {value}")

    def _diverged(self, what: str) -> Diverged:
        step, temperature = self._steps_taken() + 1, self.temperature()
        loss = self.param_groups[0]["last_loss"]
        known = (
            "no loss was given: use step(closure) or step(loss=loss)" if loss is None else f"last finite loss {loss:g}"
        )
        return Diverged(
            f"the chain diverged at step {step}, temperature {temperature:g}, {known}. {what.rstrip('.')}. Lower lr="
            f"{float(self.param_groups[0]['lr']):g} or raise damping={self.param_groups[0]['damping']:g}.",
            step,
            temperature,
            loss,
        )

    def directions(self, groups: list[dict[str, Any]], active: list[list[Tensor]]) -> Directions:
        owners = {p: group for group, params in zip(groups, active) for p in params}
        if not owners:
            return {}
        order = self._in_model_order()
        space = ParameterSpace(tuple(p for p in order if p in owners), tuple(order), tuple(self.layers))
        fresh = self._merge()
        if self.metric.needs_observe and "clock" not in self.state.get(order[0], {}):
            raise self.missing_observation(
                "nothing was ever observed", "call observe(outputs), before loss.backward(), on outputs"
            )
        parts = self._precisions(space, float(groups[0]["damping"]))
        corrections = self._corrections(space, parts, fresh)
        key, starts = noise.key(groups[0]["seed"], self._steps_taken() + 1, NOISE), self._starts()
        found: dict[Tensor, Tensor] = {}
        for part in parts:
            group = owners[part.members[0]]
            if len({float(owners[p]["lr"]) for p in part.members}) > 1:
                raise ValueError(
                    "parameters with a common metric must have the same lr: use the same lr in their groups."
                )
            pulls = {p: owners[p]["prior_precision"] / owners[p]["num_data"] for p in part.members}
            pull: Any = pulls[part.members[0]]
            if len(set(pulls.values())) > 1:
                pull = part.join({p: torch.full_like(p, pulls[p]) for p in part.members})
            n = {"lr": float(group["lr"]), "heat": self.scaled_temperature(group), "pull": pull}
            change = self.rule.change(
                part.join({p: p.detach() for p in part.members}),
                part.join({p: gradient_of(p) for p in part.members}),
                part.precision,
                part.join(corrections) if corrections else None,
                part.join({p: _normal(p, starts[p], key) for p in part.members}) if self.rule.injected else None,
                n,
            )
            found |= part.parted(change)
        if groups[0]["nonfinite"] == "raise" and not all(bool(torch.isfinite(d).all()) for d in found.values()):
            raise FloatingPointError("the step is not finite; nothing was changed")
        return found

    def _starts(self) -> dict[Tensor, int]:
        """The position of each parameter's first weight; noise is a function of positions."""
        starts, start = {}, 0
        for group in self.param_groups:
            for p in group["params"]:
                starts[p] = noise.signed(start)
                start += p.numel()
        return starts

    def _precisions(self, space: ParameterSpace, damping: float) -> list[MetricBlock]:
        """The metric of these weights; cached until the next observation."""
        key = (*map(id, space.params), damping)
        if self._parts is not None and self.metric.needs_observe and self._parts[0] == key:
            return self._parts[1]
        parts = self.metric.parts(self.state, space, damping)
        self._parts = (key, parts)
        return parts

    # --- corrections ---

    @property
    def correction_form(self) -> str:
        if self.param_groups[0]["correction"] is None:
            return "none"
        form = self.metric.form(self.model)
        return "estimated" if form != "zero" and self._estimates() else form

    def _estimates(self) -> bool:
        known = self._parts[1] if self._parts is not None else []
        columns = sum(part.columns for part in known) if known else sum(p.numel() for p in self._in_model_order())
        return self.param_groups[0]["probes"] is not None or columns > COLUMNS

    def _corrections(
        self, space: ParameterSpace, parts: list[MetricBlock], fresh: list[Batch] | None
    ) -> dict[Tensor, Tensor] | None:
        """G^-1 (-u) or G^-1 (-u + t/2); stored in the state until the metric changes."""
        group = self.param_groups[0]
        if group["correction"] is None or self.metric.form(self.model) == "zero":
            return None
        if self.metric.needs_observe and fresh is None:
            if any("correction" not in self.state[p] for p in space.params):
                raise RuntimeError(
                    "a parameter has a gradient for the first time: call observe(outputs) before step()."
                )
            return {p: self.state[p]["correction"] for p in space.params}
        probes = int(group["probes"] or 1) if self._estimates() else None
        columns = root_columns(parts, space.params, None if probes is None else self._signs(probes))
        names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        chosen = {"names": tuple(names[p] for p in space.params), "shapes": tuple(p.shape for p in space.params)}
        batches = [replace(batch, **chosen) for batch in fresh or ()]
        drift = self.metric.drift(batches, space, columns, group["correction"]) / (probes or 1)
        pieces = drift.detach().split([p.numel() for p in space.params])
        by_name = {p: piece.view(p.shape) for p, piece in zip(space.params, pieces)}
        found: dict[Tensor, Tensor] = {}
        for part in parts:
            found |= part.parted(part.precision.solve(part.join(by_name)))
        if self.metric.needs_observe:
            for p in space.params:
                self.state[p]["correction"] = found[p]
        return found

    def _signs(self, probes: int) -> Callable[[Tensor], Tensor]:
        seed, step, starts = self.param_groups[0]["seed"], self._steps_taken() + 1, self._starts()

        def signs(p: Tensor) -> Tensor:
            keys = [noise.key(seed, step, SIGNS, probe) for probe in range(probes)]
            hashed = [noise.bits(noise.positions(starts[p], p), *key)[0] for key in keys]
            return torch.stack([(1 - 2 * (h & 1)).view(p.shape) for h in hashed])

        return signs

    # --- copies and checkpoints ---

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "metric": self.metric}

    def _check_loaded(self, saved: Mapping[str, Any]) -> None:
        super()._check_loaded(saved)
        mine, given = (group["metric"] for group in (self.param_groups[0], saved["param_groups"][0]))
        if mine != given:
            raise ValueError(
                f"the saved state must have metric={mine!r}, as this {type(self).__name__}, got {given!r}."
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a chain bit for bit, by the names of parameters, or raises and changes nothing."""
        super().load_state_dict(state_dict)
        self._bind()


def _normal(p: Tensor, start: int, key: noise.Key) -> Tensor:
    """Standard normal numbers, as a function of key and position."""
    square, cosine = noise.normal_parts(noise.positions(start, p), *key)
    dtype = compute_dtype(p.dtype)
    return (square.to(dtype).sqrt() * cosine.to(dtype)).view(p.shape)
