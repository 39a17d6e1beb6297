"""The family of Langevin and SNGD: optimizers whose weights sample from a posterior."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from bayesgrad.constraints import (
    BOOLEAN,
    COUNT,
    LAYER_OPTIONS,
    NONNEGATIVE,
    PRIOR_DECAYS,
    Constraint,
    likelihood_of,
    one_of,
)
from bayesgrad.optimizer import BeliefOptimizer
from bayesgrad.rules.transition import Static
from bayesgrad.rules.update import UpdateRule
from bayesgrad.samplers.correction import CORRECTIONS
from bayesgrad.samplers.metric import METRICS, DenseFisher, metric_by_name
from bayesgrad.samplers.move import LangevinStep
from bayesgrad.samplers.preconditioner import MetricPreconditioner

LIMIT = 10_000  # weights of a dense metric
OTHER = {"limit_step": False, "damping_noise": False}  # options that not every sampler has
OPTIONAL_DAMPING = Constraint("None or a finite number >= 0", lambda x: x is None or NONNEGATIVE.holds(x))
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


RECORDS = ("last_loss", "curvature", "loss_scale")  # in groups: the last loss, and what `StepCheck` has measured


class Sampler(BeliefOptimizer):
    """An optimizer whose weights sample from a posterior instead of converging.

    Groups may have different lr and prior_precision. A loss, gradient or step that is not finite raises `Diverged`; for
    the last finite loss in its message, pass the loss to `observe(outputs, loss=loss)` or use `step(closure)`.

    Attributes:
        metric: the preconditioner G.
    """

    takes_model = True
    move: ClassVar[LangevinStep]
    rule = UpdateRule(None, Static(), LangevinStep())
    kept = (*BeliefOptimizer.kept, "metric")
    records = (*BeliefOptimizer.records, *RECORDS)
    common = ("metric", "correction", "num_data", "temperature", "batch_size", "damping")
    of_all_groups = (
        *BeliefOptimizer.of_all_groups,
        *("fisher", "ema", "update_every", "losses_per_example", "limit_step", "damping_noise"),
    )
    accepts = {
        **BeliefOptimizer.accepts,
        **LAYER_OPTIONS,
        "weight_decay": PRIOR_DECAYS,
        "num_data": COUNT,
        "temperature": NONNEGATIVE,
        "batch_size": COUNT,
        "prior_precision": NONNEGATIVE,
        "correction": one_of(*CORRECTIONS),
        "metric": one_of(*METRICS, "callable"),
        "fisher": one_of("exact", "sampled"),
        "probes": PROBES,
        "damping": OPTIONAL_DAMPING,
        "limit_step": BOOLEAN,
        "damping_noise": BOOLEAN,
        "likelihood": likelihood_of("categorical", "bernoulli", "gaussian", "poisson"),
    }

    def __init__(self, model: nn.Module, params: Any, metric: Any, defaults: dict[str, Any]) -> None:
        name, self.metric = metric_by_name(metric)
        super().__init__(
            params,
            {**OTHER, **defaults, "metric": name, **dict.fromkeys(RECORDS)},
            model,
        )
        size = sum(p.numel() for group in self.param_groups for p in group["params"])
        if isinstance(self.metric, DenseFisher) and size > LIMIT:
            raise ValueError(
                f"metric={name!r} stores a dense matrix and supports at most {LIMIT} weights, got {size}: "
                "use metric='kronecker' or 'diagonal', or restrict params= to a part of the model."
            )

    def build_preconditioner(self) -> MetricPreconditioner:
        return MetricPreconditioner(self.metric, self.move, self.scaled_temperature)

    @abstractmethod
    def scaled_temperature(self, group: Mapping[str, Any]) -> float:
        """T/N."""

    def temperature(self) -> float:
        """The current temperature T of the first group."""
        group = self.param_groups[0]
        return self.scaled_temperature(group) * float(group["num_data"])

    @property
    def correction_form(self) -> str:
        """How the correction is computed: "none", "zero" (the metric is constant), "closed", "exact" (by automatic
        differentiation) or "estimated" (without bias, from random directions)."""
        assert isinstance(self.preconditioner, MetricPreconditioner)
        return self.preconditioner.correction_form()

    def nonfinite_error(self, message: str) -> Exception:
        assert isinstance(self.preconditioner, MetricPreconditioner)
        step, temperature, group = self.preconditioner.steps_taken() + 1, self.temperature(), self.param_groups[0]
        loss = group["last_loss"]
        known = (
            "no finite loss was given by step(closure) or observe(outputs, loss=loss)"
            if loss is None
            else f"last finite loss {loss:g}"
        )
        damping = "" if group["damping"] is None else f"={group['damping']:g}"
        return Diverged(
            f"the chain diverged at step {step}, temperature {temperature:g}, {known}. {message.rstrip('.')}. "
            f"Check the batch and the loss, lower lr={float(group['lr']):g}, or raise damping{damping}.",
            step,
            temperature,
            loss,
        )

    def check_loaded(self, saved: Mapping[str, Any]) -> None:
        super().check_loaded(saved)
        mine, given = (group["metric"] for group in (self.param_groups[0], saved["param_groups"][0]))
        if mine != given:
            raise ValueError(
                f"the saved state must have metric={mine!r}, as this {type(self).__name__}, got {given!r}."
            )
