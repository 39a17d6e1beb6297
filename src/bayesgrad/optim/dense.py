"""DenseFilter: the Kalman filter with the full covariance of all weights, for small models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bayesgrad import layers, likelihoods
from bayesgrad.belief import Joint
from bayesgrad.block import Directions, gradient_of
from bayesgrad.layers.fisher import check_batch_mixing, check_outputs, gather_gradients
from bayesgrad.layers.per_example import gradients_one_by_one
from bayesgrad.optim.adabayes import DEFAULT_SGD_LR
from bayesgrad.optimizer.base import settings
from bayesgrad.optimizer.constraints import COUNT, POSITIVE, covariance_matrix, one_of, square_matrix
from bayesgrad.optimizer.layerwise import LayerwiseOptimizer
from bayesgrad.optimizer.predicted_mean import PredictedMean
from bayesgrad.precision import Dense
from bayesgrad.precision.low_rank import Matrix
from bayesgrad.transition import OrnsteinUhlenbeck

LIMIT = 10_000  # entries of the state: their covariance has 0.8 GB, a step takes seconds


class DenseFilter(PredictedMean, LayerwiseOptimizer):
    r"""Bayesian filtering with the full covariance of all weights; on linear-Gaussian models, the Kalman filter.

    .. math::
        \Sigma_{post} &= \Sigma_{prior} - \Sigma_{prior} U (I + U^T \Sigma_{prior} U)^{-1} U^T \Sigma_{prior} \\
        \mu_{post} &= \mu_{prior} - \Sigma_{post}\, B \nabla(\mu_{prior}) \\
        \mu_{prior} &\leftarrow (1 - \eta\lambda)(I - A)\, \mu_{post}, \quad
        \Sigma_{prior} \leftarrow (I - A)\, \Sigma_{post} (I - A)^T + Q

    with the gradient of the mean loss (`.grad`), B = `batch_size`, lambda = `weight_decay` and U U' the Fisher
    information of the batch, one column for each example (and output), from `observe(outputs)` before
    `loss.backward()`. The parameters are mu_prior, where the next gradient is taken. Inside `with
    optimizer.posterior_mean():` they are mu_post; `covariance()` returns Sigma_post.

    By default the optimum of each weight drifts independently, with eta = `lr` and sigma = `prior_std`: I - A =
    sqrt(r) I and Q = sigma^2 (1 - r) I with r = exp(-eta^2/sigma^2). For sigma = inf it is a random walk, A = 0 and
    Q = eta^2 I. A schedule of lr scales Q. With lr = 0 there is no drift: the precision only grows, and steps decrease
    as 1/t.

    Any other drift is given by `transition=(A, Q)`, which does not depend on lr. For n weights, matrices of size k n
    describe (k - 1) n latent values (such as momentum) after the weights. They have no gradient and start at zero.

    The state is float64 for weights of any dtype. Sigma_post is a difference, which in float32 loses its sign if the
    precision of a batch is 1e6 times that of the prior (float64: 1e13).

    Args:
        model: the network; BatchNorm must be in evaluation mode.
        lr: eta, the drift of a weight's optimum in one step.
        params: parameters or param groups of the model; None for all. Groups may have their own lr, prior_std and
            weight_decay; other options are those of the first group.
        batch_size: B, the number of losses whose mean is differentiated, over all micro-batches (and tokens). The
            Fisher information of the observed outputs is scaled to B losses. Drop a smaller last batch.
        prior_std: sigma, also the standard deviation before the first gradient. With `inf` the initial variance is
            0.1/B, so the first step is at most that of SGD with learning rate 0.1.
        transition: (A, Q) in the order of `torch.nn.utils.parameters_to_vector`, Q symmetric and positive
            semi-definite. Every parameter must then have a gradient in every step.
        prior_covariance: the covariance before the first gradient, of the size of Q; None for prior_std^2 for each
            weight and zero for latent values.
        likelihood: "categorical", "bernoulli" or "gaussian"; the loss must be its mean negative log-likelihood, for
            "gaussian" half the squared error.
        fisher: which gradients are the columns of U: "exact", those of all labels, weighted by the model's predictions
            (Gauss-Newton); "sampled", of one sampled label per example; "empirical", of the labels given to
            `observe(outputs, labels)`; "centered", the same minus their mean over the batch, times sqrt(N/(N-1)), so
            that U U' is an unbiased estimate of N times the covariance of the gradients.
        weight_decay: decoupled, applied after the prediction.
        seed: seed of the sampled labels.
        losses_per_example: the number of losses per example in the mean loss, as in `NaturalGradient`.
        nonfinite: as in `AdaBayes`; also checks the observed gradients. With "ignore", gradients that are not finite
            change all weights, but not the covariance.

    A parameter without a gradient keeps its mean, its variance, and its covariance with other such parameters.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = DenseFilter(model, lr=0.01, batch_size=8)
        >>> outputs = model(torch.randn(8, 3))
        >>> optimizer.observe(outputs)
        >>> torch.nn.functional.cross_entropy(outputs, torch.zeros(8, dtype=torch.long)).backward()
        >>> optimizer.step()
        >>> optimizer.covariance().shape
        torch.Size([8, 8])

    Reference: Aitchison 2018, Eq. 1-7.
    Differs from the paper: the denominator of Eq. 7 is a number for one column of U, and the matrix above for several;
    the default drift is discretised exactly.
    Checked by: tests/equations/test_dense_filter.py, against filterpy and closed forms.
    """

    by_layer = False
    recorded = (layers.is_matrix, layers.is_norm)
    records_backward = False
    observes = True
    drift = OrnsteinUhlenbeck()
    accepts = {
        **LayerwiseOptimizer.accepts,
        "batch_size": COUNT,
        "prior_std": POSITIVE,
        "fisher": one_of("exact", "sampled", "empirical", "centered"),
    }

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        params: Any = None,
        batch_size: float,
        prior_std: float = math.inf,
        transition: tuple[Tensor, Tensor] | None = None,
        prior_covariance: Tensor | None = None,
        likelihood: str = "categorical",
        fisher: str = "exact",
        weight_decay: float = 0.0,
        seed: int = 0,
        losses_per_example: int = 1,
        nonfinite: str = "ignore",
    ) -> None:
        if transition is not None:
            if not isinstance(transition, (tuple, list)) or len(transition) != 2:
                raise TypeError(f"transition must be None or a pair of matrices (A, Q), got {transition!r}.")
            transition = (
                square_matrix(transition[0], "A of transition"),
                covariance_matrix(transition[1], "Q of transition"),
            )
            if transition[0].shape != transition[1].shape:
                sizes = " and ".join(str(tuple(matrix.shape)) for matrix in transition)
                raise ValueError(f"A and Q of transition must have the same shape, got {sizes}.")
        if prior_covariance is not None:
            prior_covariance = covariance_matrix(prior_covariance, "prior_covariance")
        super().__init__(model, params, settings(locals()))
        self._size()

    # --- parameters ---

    def _check_model(self) -> None:
        check_batch_mixing(self.model)

    def _unmodelled(self) -> list[Tensor]:
        return []  # gradients outside of the known layers are computed one example at a time

    def step_scale(self, group: Mapping[str, Any]) -> float:
        """The direction is the whole step; the weight decay follows it."""
        return 1 - float(group["lr"]) * group["weight_decay"]

    def _size(self, group: Mapping[str, Any] | None = None) -> int:
        """The number of weights and latent values."""
        group = self.param_groups[0] if group is None else group
        size = weights = sum(p.numel() for p in self._in_model_order())
        if group["transition"] is not None:
            size = len(group["transition"][0])
            if size % weights:
                raise ValueError(
                    f"A and Q of transition must have {weights} rows, one for each weight, or a multiple of that for "
                    f"latent values; got {size}."
                )
        if size > LIMIT:
            raise ValueError(
                f"{type(self).__name__} stores a covariance matrix of at most {LIMIT} values, got {size}: pass some of "
                "the parameters as params=, or use NaturalGradient or KFAC."
            )
        given = group["prior_covariance"]
        if given is not None and len(given) != size:
            raise ValueError(f"prior_covariance must have shape {(size, size)}, got {tuple(given.shape)}.")
        return size

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group of the model's parameters, before the first step."""
        if any("covariance" in entry for entry in self.state.values()):
            raise ValueError(
                "parameters cannot be added after the first step of a joint covariance: build a new optimizer."
            )
        super().add_param_group(param_group)
        if "recorder" in self.__dict__:
            self._size()

    # --- evidence ---

    def observe(self, outputs: Tensor, labels: Tensor | None = None) -> None:
        """Computes the Fisher information of this batch for the next step.

        Several calls before a step act like one call with a larger batch. `zero_grad()` discards the result if
        gradients were computed since.

        Args:
            outputs: outputs of the model with their graph; neither the graph nor `.grad` is changed.
            labels: for fisher="empirical" and "centered"; for "sampled" they replace the sampled labels.
        """
        check_batch_mixing(self.model)
        check_outputs(outputs)
        group = self.param_groups[0]
        kind, fisher = likelihoods.named(group["likelihood"]), group["fisher"]
        if labels is None and fisher in ("empirical", "centered"):
            raise ValueError(f"fisher={fisher!r} needs labels: call observe(outputs, labels).")
        if labels is not None and fisher == "exact":
            raise ValueError("fisher='exact' sums over all labels: call observe(outputs) without labels.")
        trace = self.recorder.trace(outputs)
        if fisher == "exact":
            directions = list(kind.hessian_roots(outputs))
        else:
            directions = [kind.residual(outputs, labels if labels is not None else self.draw(outputs))]
        columns, _ = gather_gradients(trace, directions)
        order = self._in_model_order()
        rest = [p for p in order if id(p) not in columns and id(p) in trace.read_counts]
        written = dict(zip(rest, gradients_one_by_one(outputs, rest, directions)))
        count = len(outputs) * len(directions)
        parts = []
        for p in order:
            rows = columns[id(p)].rows() if id(p) in columns else written.get(p, p.new_zeros(count, p.numel()))
            parts.append(rows.detach().reshape(count, -1).to(order[0].device, torch.float64))
        self._observed.append((torch.cat(parts, 1), len(outputs)))
        self._marked = self._mark()

    def _columns(self) -> Tensor:
        """U', (columns, weights), from all calls of observe() since the last step."""
        group = self.param_groups[0]
        if not self._observed:
            raise self.missing_observation(
                "observe() was not called since the last step",
                "call observe(outputs), before loss.backward(), on outputs",
            )
        parts, counts = zip(*self._observed)
        self._observed = []
        rows, count = torch.cat(parts), sum(counts)
        if group["fisher"] == "centered":
            if count < 2:
                raise ValueError("fisher='centered' needs at least two examples in a step, got 1.")
            rows = (rows - rows.mean(0)) * math.sqrt(count / (count - 1))
        return rows * math.sqrt(group["batch_size"] / (group["losses_per_example"] * count))

    def _skips(self, active: list[list[Tensor]]) -> bool:
        if super()._skips(active):
            return True
        option = self.param_groups[0]["nonfinite"]
        if option == "ignore" or all(bool(torch.isfinite(rows).all()) for rows, _ in self._observed):
            return False
        if option == "raise":
            raise FloatingPointError(
                "observe() found per-example gradients that are not finite; nothing was changed. "
                "Lower lr, or pass nonfinite='skip'."
            )
        self._observed = []
        return True

    # --- the step ---

    def directions(self, groups: list[dict[str, Any]], active: list[list[Tensor]]) -> Directions:
        owners = {p: group for group, params in zip(groups, active) for p in params}
        if not owners:
            return {}
        order = self._in_model_order()
        entry = self.state[order[0]]
        still = self._without_gradient(order, owners)
        U = self._columns().masked_fill_(still, 0.0).mT
        prior, latent = self._predicted()
        size, count = len(prior.covariance), len(U)
        U = torch.cat([U, U.new_zeros(size - count, U.shape[1])])
        state = torch.cat([*(p.detach().flatten().to(latent) for p in order), latent])
        gradient = torch.zeros_like(state)
        batch_size = float(groups[0]["batch_size"])
        parts = [
            batch_size * gradient_of(p).flatten().to(latent) if p in owners else latent.new_zeros(p.numel())
            for p in order
        ]
        gradient[:count] = torch.cat(parts)
        if bool(torch.isfinite(U).all() & torch.isfinite(gradient).all()):
            belief = self._updated(prior, U, still)
            step = belief.solve(gradient)
            step[:count].masked_fill_(still, 0.0)
            entry.update(covariance=belief.covariance, mean=state - step)
            change = self._drifted(entry, state, step, owners)
        else:  # gradients that are not finite change the weights, as in torch.optim
            change = prior.solve(gradient)
        pieces = change[:count].split([p.numel() for p in order])
        return {p: piece.view(p.shape).to(p.device) for p, piece in zip(order, pieces) if p in owners}

    def _without_gradient(self, order: Sequence[Tensor], owners: Mapping[Tensor, Any]) -> Tensor:
        """A mask of the weights without a gradient, (weights,)."""
        missing = [p not in owners for p in order]
        if any(missing) and self.param_groups[0]["transition"] is not None:
            names = {p: n for group in self.param_groups for n, p in zip(group["param_names"], group["params"])}
            raise ValueError(
                f"transition=(A, Q) needs a gradient of every parameter, but {names[order[missing.index(True)]]} has "
                "none: pass params= without it."
            )
        sizes = torch.tensor([p.numel() for p in order])
        return torch.tensor(missing).repeat_interleave(sizes).to(order[0].device)

    def _updated(self, prior: Dense, U: Tensor, still: Tensor) -> Dense:
        """The posterior; weights without a gradient have a Kalman gain of zero (Schmidt-Kalman filter)."""
        belief = prior.add(Matrix(U))
        if bool(still.any()):
            kept = still.nonzero()[:, 0]
            belief.covariance[kept[:, None], kept] = prior.covariance[kept[:, None], kept]
        return belief

    def _drifted(
        self, entry: dict[str, Tensor], state: Tensor, step: Tensor, owners: Mapping[Tensor, Mapping[str, Any]]
    ) -> Tensor:
        """state - (I - A)(state - step): the difference between this predicted mean and the next one."""
        transition = self.param_groups[0]["transition"]
        if transition is not None:
            return step + transition[0].to(state) @ (state - step)
        retain, noise = [], []  # stored with the lr of this step; the covariance is propagated at the next step
        for p in self._in_model_order():
            n = {"retain": 1.0, "noise": 0.0}
            if p in owners:
                lr, prior_std = float(owners[p]["lr"]), float(owners[p]["prior_std"])
                n = self.drift.scalars(process=lr**2, stationary=prior_std**2)
            retain.append(state.new_full((p.numel(),), n["retain"]))
            noise.append(state.new_full((p.numel(),), n["noise"]))
        entry.update(retain=torch.cat(retain), noise=torch.cat(noise))
        root = entry["retain"].sqrt()
        return root * step + (1 - root) * state

    # --- posterior ---

    def _posterior_covariance(self) -> Dense:
        """The posterior covariance of weights and latent values; before the first step, the prior's."""
        order, size = self._in_model_order(), self._size()
        entry, group = self.state.get(order[0], {}), self.param_groups[0]
        if "covariance" in entry:
            return Dense(entry["covariance"], (size,))
        if group["prior_covariance"] is not None:
            return Dense(group["prior_covariance"].to(order[0].device), (size,))
        variances = torch.zeros(size, dtype=torch.float64, device=order[0].device)
        owners = {p: group for group in self.param_groups for p in group["params"]}
        start = 0
        for p in order:
            sigma = float(owners[p]["prior_std"])
            variance = DEFAULT_SGD_LR / float(group["batch_size"]) if math.isinf(sigma) else sigma**2
            variances[start : start + p.numel()] = variance
            start += p.numel()
        return Dense(torch.diag(variances), (size,))

    def _predicted(self) -> tuple[Dense, Tensor]:
        """The predicted covariance, and the predicted mean of latent values, (latent,)."""
        order, believed = self._in_model_order(), self._posterior_covariance()
        entry, transition = self.state.get(order[0], {}), self.param_groups[0]["transition"]
        weights = sum(p.numel() for p in order)
        if "covariance" not in entry:
            return believed, believed.covariance.new_zeros(len(believed.covariance) - weights)
        if transition is None:
            return believed.propagate(entry["retain"], entry["noise"]), entry["mean"][weights:]
        A, Q = (matrix.to(entry["mean"]) for matrix in transition)
        return believed.transform(A, Q), (entry["mean"] - A @ entry["mean"])[weights:]

    def _posterior_means(self) -> dict[Tensor, Tensor]:
        order = self._in_model_order()
        mean = self.state.get(order[0], {}).get("mean")
        if mean is None:
            return {}
        sizes = [p.numel() for p in order]
        return {p: piece.view(p.shape) for p, piece in zip(order, mean[: sum(sizes)].split(sizes))}

    def covariance(self) -> Tensor:
        """A copy of Sigma_post of the weights, in the order of `torch.nn.utils.parameters_to_vector`; float64."""
        weights = sum(p.numel() for p in self._in_model_order())
        return self._posterior_covariance().covariance[:weights, :weights].clone()

    def _joint(self, names: Mapping[int, str], scale: float) -> list[tuple[str, Joint]]:
        order = self._in_model_order()
        if any(id(p) not in names for p in order):
            return []  # posterior() raises an error that names the parameter
        mean = torch.cat([p.detach().double().flatten() for p in order])
        belief = Dense(scale * self.covariance(), tuple(mean.shape))
        return [(names[id(order[0])], Joint(mean, belief, {names[id(p)]: p.shape for p in order}))]

    # --- checkpoints ---

    def _check_loaded(self, saved: Mapping[str, Any]) -> None:
        super()._check_loaded(saved)
        group = saved["param_groups"][0]
        size = self._size(group)
        names = {p: n for group in self.param_groups for n, p in zip(group["param_names"], group["params"])}
        keys = {n: key for group in saved["param_groups"] for n, key in zip(group["param_names"], group["params"])}
        entry = saved["state"].get(keys[names[self._in_model_order()[0]]], {})
        shapes = {"covariance": (size, size), "mean": (size,)}
        if group["transition"] is None:
            shapes |= {"retain": (size,), "noise": (size,)}
        lost = sorted(set(shapes) - set(entry))
        if 0 < len(lost) < len(shapes):
            raise ValueError(
                f"the saved state lacks {lost}: it is not a state of {type(self).__name__}, or it is truncated."
            )
        for name, shape in shapes.items():
            if name in entry and entry[name].shape != shape:
                raise ValueError(
                    f"{name} has shape {tuple(entry[name].shape)} in the saved state, but {shape} is needed: load it "
                    "into the model it came from."
                )
