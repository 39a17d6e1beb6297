"""The preconditioner of DenseFilter: the Kalman filter with the covariance of all weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bayesgrad import layers
from bayesgrad.directions import Directions
from bayesgrad.distributed import Exchange, Sum
from bayesgrad.layers.fisher import check_batch_mixing, gather_gradients
from bayesgrad.layers.functional import gradients_one_by_one
from bayesgrad.layers.recorder import check_outputs
from bayesgrad.parts import Groups, Host, Needs, entries
from bayesgrad.precision import Dense
from bayesgrad.precision.low_rank import Matrix
from bayesgrad.preconditioners.network import NetworkPreconditioner
from bayesgrad.rules.transition import OrnsteinUhlenbeck
from bayesgrad.saved_state import saved_entry
from bayesgrad.shards import gradient_of, part_of, placed, placed_like, whole
from bayesgrad.sources.recorded_layers import RecordedLayers

LIMIT = 10_000  # entries of the state: their covariance has 0.8 GB, a step takes seconds
DEFAULT_SGD_LR = 0.1  # the first step with prior_std = inf, as in AdaBayes
ORDER = "order"  # in the first group: the names of the parameters in the order of the covariance


class DenseKalman(NetworkPreconditioner):
    """The covariance of all weights and latent values, in float64, in the state of the first parameter.

    The parameters are the predicted mean, where the next gradient is taken; the direction is the difference between
    this predicted mean and the next one.
    """

    needs = Needs(outputs=True)
    observes = True
    ou = OrnsteinUhlenbeck()

    def bind(self, optimizer: Host) -> None:
        if any("covariance" in entry for _, entry in entries(optimizer)) and self.recorded is not None:
            optimizer.param_groups.pop()
            raise ValueError(
                "parameters cannot be added after the first step of a joint covariance: build a new optimizer."
            )
        super().bind(optimizer)
        self.stepped: dict[Tensor, Tensor] = {}  # weights after the last step
        self.layouts = self.row_layouts()
        self.size()
        self.optimizer.param_groups[0][ORDER] = self._names()

    def record(self, optimizer: Host) -> RecordedLayers:
        # Gradients outside of the known layers are computed one example at a time.
        check_batch_mixing(optimizer.model)  # pyright: ignore[reportArgumentType]
        known = (layers.is_matrix, layers.is_norm)
        return RecordedLayers(optimizer, None, known, by_layer=False)

    def step_scale(self, group: Mapping[str, Any]) -> float:
        """The direction is the whole step; the weight decay follows it."""
        return 1 - float(group["lr"]) * group["weight_decay"]

    def size(self, group: Mapping[str, Any] | None = None) -> int:
        """The number of weights and latent values."""
        group = self.optimizer.param_groups[0] if group is None else group
        size = weights = sum(p.numel() for p in self.params)
        if group["transition"] is not None:
            size = len(group["transition"][0])
            if size % weights:
                raise ValueError(
                    f"A and Q of transition must have {weights} rows, one for each weight, or a multiple of that for "
                    f"latent values; got {size}."
                )
        if size > LIMIT:
            raise ValueError(
                f"DenseFilter stores a covariance matrix of at most {LIMIT} values, got {size}: pass some of "
                "the parameters as params=, or use NaturalGradient or KFAC."
            )
        given = group["prior_covariance"]
        if given is not None and len(given) != size:
            raise ValueError(f"prior_covariance must have shape {(size, size)}, got {tuple(given.shape)}.")
        return size

    # --- evidence ---

    def observe(self, outputs: Any, loss: Any, labels: Any, weights: Any) -> None:
        check_batch_mixing(self.recorded.model)
        check_outputs(outputs)
        group = self.optimizer.param_groups[0]
        fisher = group["fisher"]
        if labels is None and fisher in ("empirical", "centered"):
            raise ValueError(f"fisher={fisher!r} needs labels: call observe(outputs, labels=labels).")
        if labels is not None and fisher == "exact":
            raise ValueError("fisher='exact' sums over all labels: call observe(outputs) without labels.")
        trace = self.recorded.recorder.trace(outputs)
        directions = list(self.output_directions(outputs, labels, weights, fisher == "exact"))
        forward, share = self.observed_pass(outputs, labels, weights)
        losses = share * forward.losses(group["losses_per_example"])
        columns, _ = gather_gradients(trace, directions, self.layouts)
        order = self.params
        rest = [p for p in order if id(p) not in columns and id(p) in trace.read_counts]
        written = dict(zip(rest, gradients_one_by_one(outputs, rest, directions, order)))
        count = len(outputs) * len(directions)
        parts = []
        for p in order:
            rows = written[p] if p in written else outputs.new_zeros(count, p.numel())
            rows = columns[id(p)].rows() if id(p) in columns else rows
            parts.append(rows.detach().reshape(count, -1).to(order[0].device, torch.float64))
        self.observed.append((torch.cat(parts, 1), len(outputs), losses))

    def share(self, exchange: Exchange) -> None:
        """Gathers the gradients of all examples."""
        exchange.expect(self.params[0])
        observed, self.observed = self.observed, []
        for rows, count, losses in observed:
            every: list[list[Tensor]] = []
            exchange.gather(rows, every.append)
            numbers: list[Sum] = []
            exchange.add(Sum(rows.new_tensor([count, losses])), numbers.append)
            exchange.after(partial(self._receive, every, numbers))

    def _receive(self, every: list[list[Tensor]], numbers: list[Sum]) -> None:
        count, losses = numbers[0].total.tolist()
        self.observed.append((torch.cat(every[0]), round(count), losses))

    def _columns(self) -> Tensor:
        """U', (columns, weights), from all calls of observe() since the last step."""
        group = self.optimizer.param_groups[0]
        if not self.observed:
            raise self.recorded.missing_observation(
                "nothing was observed since the last step",
                "call observe(outputs), before loss.backward(), on outputs",
            )
        parts, counts, losses = zip(*self.observed)
        self.observed = []
        rows, count = torch.cat(parts), sum(counts)
        if group["fisher"] == "centered":
            if count < 2:
                raise ValueError("fisher='centered' needs at least two examples in a step, got 1.")
            rows = (rows - rows.mean(0)) * math.sqrt(count / (count - 1))
        return rows * math.sqrt(group["batch_size"] / sum(losses))

    def nonfinite(self, index: int, params: list[Tensor]) -> str | None:
        good = index > 0 or all(bool(torch.isfinite(rows).all()) for rows, *_ in self.observed)
        return None if good else "observe() found per-example gradients that are not finite"

    # --- the step ---

    def directions(self, groups: Groups, active: list[list[Tensor]]) -> Directions:
        owners = {p: group for group, params in zip(groups, active) for p in params}
        if not owners:
            return {}
        order = self.params
        entry = self.optimizer.state[order[0]]
        still = self._without_gradient(order, owners)
        U = self._columns().masked_fill_(still, 0.0).mT
        prior, latent = self._predicted()
        size, count = len(prior.covariance), len(U)
        U = torch.cat([U, U.new_zeros(size - count, U.shape[1])])
        state = torch.cat([*(whole(p.detach()).flatten().to(latent) for p in order), latent])
        gradient = torch.zeros_like(state)
        batch_size = float(groups[0]["batch_size"])
        parts = [
            batch_size * whole(placed(gradient_of(p), p)).flatten().to(latent)
            if p in owners
            else latent.new_zeros(p.numel())
            for p in order
        ]
        gradient[:count] = torch.cat(parts)
        if bool(torch.isfinite(U).all() & torch.isfinite(gradient).all()):
            belief = self._updated(prior, U, still, owners)
            step = belief.solve(gradient)
            step[:count].masked_fill_(still, 0.0)
            self.count_merge()
            entry.update(covariance=belief.covariance, mean=state - step)
            change = self._drifted(entry, state, step, owners)
        else:  # gradients that are not finite change the weights, as in torch.optim
            change = prior.solve(gradient)
        pieces = change[:count].split([p.numel() for p in order])
        return {p: part_of(piece.view(p.shape), p).to(p.device) for p, piece in zip(order, pieces) if p in owners}

    def _names(self) -> list[str]:
        """The names of the parameters, in the order of the covariance."""
        names = {p: n for group in self.optimizer.param_groups for n, p in zip(group["param_names"], group["params"])}
        return [names[p] for p in self.params]

    def _without_gradient(self, order: Sequence[Tensor], owners: Mapping[Tensor, Any]) -> Tensor:
        """A mask of the weights without a gradient, (weights,)."""
        missing = [p not in owners for p in order]
        if any(missing) and self.optimizer.param_groups[0]["transition"] is not None:
            raise ValueError(
                f"transition=(A, Q) needs a gradient of every parameter, but {self._names()[missing.index(True)]} has "
                "none: pass params= without it."
            )
        sizes = torch.tensor([p.numel() for p in order])
        return torch.tensor(missing).repeat_interleave(sizes).to(order[0].device)

    def _updated(self, prior: Dense, U: Tensor, still: Tensor, owners: Mapping[Tensor, Any]) -> Dense:
        """The posterior; weights without a gradient have a Kalman gain of zero (Schmidt-Kalman filter)."""
        belief = prior.add(Matrix(U))
        if len(owners) < len(self.params):
            kept = still.nonzero()[:, 0]
            belief.covariance[kept[:, None], kept] = prior.covariance[kept[:, None], kept]
        return belief

    def _drifted(
        self, entry: dict[str, Tensor], state: Tensor, step: Tensor, owners: Mapping[Tensor, Mapping[str, Any]]
    ) -> Tensor:
        """state - (I - A)(state - step): the difference between this predicted mean and the next one."""
        transition = self.optimizer.param_groups[0]["transition"]
        if transition is not None:
            return step + transition[0].to(state) @ (state - step)
        retain, noise = [], []  # stored with the lr of this step; the covariance is propagated at the next step
        for p in self.params:
            n = {"retain": 1.0, "noise": 0.0}
            if p in owners:
                lr, prior_std = float(owners[p]["lr"]), float(owners[p]["prior_std"])
                n = self.ou.scalars(process=lr**2, stationary=prior_std**2)
            retain.append(state.new_full((p.numel(),), n["retain"]))
            noise.append(state.new_full((p.numel(),), n["noise"]))
        entry.update(retain=torch.cat(retain), noise=torch.cat(noise))
        root = entry["retain"].sqrt()
        return root * step + (1 - root) * state

    # --- posterior ---

    def _posterior_covariance(self) -> Dense:
        """The posterior covariance of weights and latent values; before the first step, the prior's."""
        order, size = self.params, self.size()
        group = self.optimizer.param_groups[0]
        if self.clock() is not None:
            return Dense(self.optimizer.state[order[0]]["covariance"], (size,))
        if group["prior_covariance"] is not None:
            return Dense(group["prior_covariance"].to(order[0].device), (size,))
        variances = torch.zeros(size, dtype=torch.float64, device=order[0].device)
        owners = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        start = 0
        for p in order:
            sigma = float(owners[p]["prior_std"])
            variance = DEFAULT_SGD_LR / float(group["batch_size"]) if math.isinf(sigma) else sigma**2
            variances[start : start + p.numel()] = variance
            start += p.numel()
        return Dense(torch.diag(variances), (size,))

    def _predicted(self) -> tuple[Dense, Tensor]:
        """The predicted covariance, and the predicted mean of latent values, (latent,)."""
        order, believed = self.params, self._posterior_covariance()
        entry, transition = self.optimizer.state.get(order[0], {}), self.optimizer.param_groups[0]["transition"]
        weights = sum(p.numel() for p in order)
        if self.clock() is None:
            return believed, believed.covariance.new_zeros(len(believed.covariance) - weights)
        if transition is None:
            return believed.propagate(entry["retain"], entry["noise"]), entry["mean"][weights:]
        A, Q = (matrix.to(entry["mean"]) for matrix in transition)
        return believed.transform(A, Q), (entry["mean"] - A @ entry["mean"])[weights:]

    def finish(self, closure: Callable[[], Any] | None, loss: Any) -> None:
        super().finish(closure, loss)
        self.stepped = {p: p.detach().clone() for p in self.params}

    def posterior_means(self) -> dict[Tensor, Tensor]:
        """mu_post, moved as far as weights were since the last step, by averages or new values."""
        order = self.params
        if self.clock() is None:
            return {}
        mean, sizes = self.optimizer.state[order[0]]["mean"], [p.numel() for p in order]
        pieces = zip(order, mean[: sum(sizes)].split(sizes))
        means = {p: placed_like(piece.view(p.shape), p) for p, piece in pieces}
        return {p: own + (p.detach() - self.stepped.get(p, p.detach())).to(own.dtype) for p, own in means.items()}

    def covariance(self) -> Tensor:
        """A copy of Sigma_post of the weights, in the order of `torch.nn.utils.parameters_to_vector`; float64."""
        weights = sum(p.numel() for p in self.params)
        return self._posterior_covariance().covariance[:weights, :weights].clone()

    # --- checkpoints ---

    def _shapes(self, group: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Of the tensors in the state of the first parameter."""
        size = self.size(group)
        drift = {} if group["transition"] is not None else {"retain": (size,), "noise": (size,)}
        return {"covariance": (size, size), "mean": (size,), **drift}

    def initialise_state(self) -> None:
        super().initialise_state()
        first = self.params[0]
        like = {"dtype": torch.float64, "device": first.device}
        shapes = self._shapes(self.optimizer.param_groups[0])
        self.optimizer.state[first] |= {name: torch.zeros(shape, **like) for name, shape in shapes.items()}

    def has_own_shape(self, name: str) -> bool:
        return name in self._shapes(self.optimizer.param_groups[0])

    def check_loaded(self, saved: Mapping[str, Any]) -> None:
        self.stepped = {}
        group = saved["param_groups"][0]
        own, given = self._names(), list(group.get(ORDER, self._names()))
        if given != own:
            first = next((a, b) for a, b in zip(given, own) if a != b)
            raise ValueError(
                f"the covariance in the saved state has {first[0]} where this model has {first[1]}: build a model "
                "whose modules are defined in the order of the saved one."
            )
        entry, _ = saved_entry(self.optimizer, saved, self.params[0])
        shapes = {"clock": (3,), **self._shapes(group)}
        lost = sorted(set(shapes) - set(entry))
        if 0 < len(lost) < len(shapes):
            raise ValueError(f"the saved state lacks {lost}: it is not a state of DenseFilter, or it is truncated.")
        for name, shape in shapes.items():
            if name in entry and entry[name].shape != shape:
                raise ValueError(
                    f"{name} has shape {tuple(entry[name].shape)} in the saved state, but {shape} is needed: load it "
                    "into the model it came from."
                )
