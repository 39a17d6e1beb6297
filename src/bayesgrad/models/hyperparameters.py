"""The search for the hyperparameters of a kernel and a likelihood that maximise a bound."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from bayesgrad.inference import OutsideDomain
from bayesgrad.models.kernels import Kernel
from bayesgrad.models.observations import Observation
from bayesgrad.models.tunable import Tunable
from bayesgrad.noise import seed32
from bayesgrad.warning import warn

LOG_LIMIT = math.log(1e5)  # hyperparameters are searched in 1e-5 to 1e5
NEAR = math.log(100)  # restarts are drawn within a factor of 100 of the given hyperparameters


@dataclass(frozen=True, eq=False)
class ProcessModel(Tunable):
    """A kernel and a likelihood; their hyperparameters have the prefixes `kernel.` and `likelihood.`."""

    hyperparameter_names = ("kernel", "likelihood")
    kernel: Kernel
    likelihood: Observation

    def log_hyperparameters(self, device: torch.device) -> dict[str, Tensor]:
        """Logarithms of all hyperparameters as leaf tensors, by name."""
        numbers = self.hyperparameters().items()
        return {name: number.log().to(device).clone().requires_grad_() for name, number in numbers}

    def with_log_hyperparameters(self, logs: dict[str, Tensor]) -> ProcessModel:
        """The kernel and the likelihood with hyperparameters exp(logs), limited to 1e-5 to 1e5."""
        return self.with_hyperparameters({name: log.clamp(-LOG_LIMIT, LOG_LIMIT).exp() for name, log in logs.items()})


@dataclass
class _Search:
    """Evaluations of -bound at logarithms of hyperparameters, squared if they are standard deviations, as in
    scikit-learn; the best of them is kept.

    Where the bound cannot be computed, or is not finite, the value is a paraboloid around the best point, above all
    values so far: a line search then turns back.
    """

    model: ProcessModel
    loss: Callable[[ProcessModel], Tensor]
    state: Callable[[], Any]
    logs: dict[str, Tensor]
    best: float = math.inf
    worst: float = -math.inf
    kept: Any = None
    names: list[str] = field(init=False)
    powers: np.ndarray = field(init=False)
    point: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.names = [name for name, log in self.logs.items() for _ in range(log.numel())]
        self.powers = np.array([2.0 if name.endswith("scale") else 1.0 for name in self.names])
        self.point = self._flat(log.detach() for log in self.logs.values()) * self.powers

    @staticmethod
    def _flat(parts: Iterable[Tensor]) -> np.ndarray:
        return torch.cat([part.flatten() for part in parts]).double().cpu().numpy()

    def __call__(self, point: np.ndarray) -> tuple[float, np.ndarray]:
        self._set(point)
        try:
            loss = self.loss(self.model.with_log_hyperparameters(self.logs))
            found = torch.autograd.grad(loss, list(self.logs.values()), allow_unused=True)
            slopes = [torch.zeros_like(log) if g is None else g for g, log in zip(found, self.logs.values())]
            value, slope = float(loss.detach()), self._flat(slopes) / self.powers
        except (OutsideDomain, ValueError, torch.linalg.LinAlgError):
            value, slope = math.nan, point
        if not (math.isfinite(value) and np.isfinite(slope).all()):
            away, top = point - self.point, self.worst if math.isfinite(self.worst) else 1e10
            return top + 1 + float(away @ away), 2 * away
        self.worst = max(self.worst, value)
        if value < self.best:
            self.best, self.point, self.kept = value, point.copy(), self.state()
        return value, slope

    def _set(self, point: np.ndarray) -> None:
        pieces = torch.as_tensor(point / self.powers).split([log.numel() for log in self.logs.values()])
        with torch.no_grad():
            for log, piece in zip(self.logs.values(), pieces):
                log.copy_(piece.view_as(log))

    def result(self) -> ProcessModel:
        self._set(self.point)
        return self.model.with_log_hyperparameters(self.logs).detached()


def maximise(
    model: ProcessModel,
    loss: Callable[[ProcessModel], Tensor],
    state: Callable[[], Any],
    device: torch.device,
    *,
    max_eval: int,
    restarts: int,
    random_state: int,
) -> tuple[ProcessModel, Any]:
    """The best hyperparameters seen by L-BFGS-B in their logarithms, and the value of `state` for them.

    Args:
        loss: -bound, differentiable.
        state: called after an evaluation that is better than all before.
        max_eval: maximum number of evaluations from each start.
        restarts: number of random starts beside the given hyperparameters.
    """
    search = _Search(model, loss, state, model.log_hyperparameters(device))
    rng, given, limits = np.random.default_rng(seed32(random_state)), search.point.copy(), LOG_LIMIT * search.powers
    starts = [given, *(given + rng.uniform(-NEAR, NEAR, len(given)) for _ in range(restarts))]
    bounds = list(zip(-limits, limits))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not converged after.*")
        for start in starts:
            inside = start.clip(-limits, limits)
            minimize(search, inside, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxfun": max_eval})
    if search.kept is None:
        raise ValueError("the bound is not finite for any hyperparameters that were tried: rescale X and y.")
    # A vanishing noise or an infinite length is a valid solution; a scale or variance at the limit is not.
    far = [name for name, at, end in zip(search.names, search.point, limits) if at >= end and "length" not in name]
    if far:
        names = ", ".join(dict.fromkeys(far))
        warn(
            f"{names} reached the end of the range, 1e5: rescale y to unit variance, or add kernels.Linear() for a "
            "trend."
        )
    return search.result(), search.kept
