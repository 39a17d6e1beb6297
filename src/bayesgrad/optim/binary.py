"""STE and BayesBiNN: optimizers for networks with weights -1 or 1."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesgrad import process_limits, shards
from bayesgrad.checkpoint import settings
from bayesgrad.constraints import COUNT, FINITE, NONNEGATIVE, OPTIONAL_INTEGER, POSITIVE_INTEGER, PRIOR_DECAYS
from bayesgrad.finite import readable
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.gradients import is_compared
from bayesgrad.layers.running_statistics import spread
from bayesgrad.optim.variational import NamedPrior
from bayesgrad.optimizer import BeliefOptimizer
from bayesgrad.parts import Groups, Source, entries
from bayesgrad.posterior import BernoulliPosterior, Posterior
from bayesgrad.posterior.filtered import check_scale, names_in
from bayesgrad.rules import Move, NaturalStep, Static, UpdateRule
from bayesgrad.rules.transition import Memory
from bayesgrad.sources import WeightSampling
from bayesgrad.sources.relaxed import Relaxed
from bayesgrad.warning import warn

PRIOR_NATURAL = "prior_natural"  # a slot: the natural parameter of a prior that is an earlier posterior


@dataclass(frozen=True)
class BinaryRule(UpdateRule):
    """A rule for a latent value whose sign is the weight, sign(0) = 1; it has no curvature.

    The gradient with respect to the weight replaces that with respect to the latent value. It is multiplied by the
    slope between the two, if the evidence has one, and by the scalar `gradient_scale`. A slot `PRIOR_NATURAL` is
    subtracted from it.

    Args:
        latent: the slot of the latent value.
    """

    latent: str = "latent"

    @classmethod
    def of(cls, move: Move, latent: str) -> BinaryRule:
        return cls(None, Static(), move, latent)

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return (self.latent, *super().slots(group))

    def __call__(
        self, n: dict[str, Any], weight: Tensor, gradient: Tensor, evidence: Mapping[str, Tensor], memory: Memory
    ) -> Tensor:
        latent = memory[self.latent]
        gradient = gradient.to(latent.dtype)
        if "product" in evidence:
            gradient = evidence["product"].to(latent.dtype)
        elif "slope" in evidence:
            gradient = gradient * evidence["slope"].to(latent.dtype)
        if "gradient_scale" in n:
            largest = torch.finfo(latent.dtype).max / 4  # an infinite latent value would never change again
            gradient = (gradient * n["gradient_scale"]).clamp(-largest, largest)
        if PRIOR_NATURAL in memory:
            gradient = gradient - memory[PRIOR_NATURAL]
        moved = memory[self.latent] = super().__call__(n, latent, gradient, {}, memory)
        return signs(moved)


def signs(latent: Tensor) -> Tensor:
    """-1 or 1."""
    return torch.where(latent < 0, -1.0, 1.0)


class BinaryOptimizer(BeliefOptimizer):
    """An optimizer whose parameters are all binary: its constructor sets them to -1 or 1.

    Parameters that do not require gradients are not changed until they do. Biases and BatchNorm's weights among them
    are binary too, with a warning.
    """

    rule: BinaryRule  # pyright: ignore[reportIncompatibleVariableOverride]
    _complete = True

    def _reset(self) -> None:
        super()._reset()
        self._versions: dict[Tensor, int] = {}  # of the weights when they were last seen to be signs of latent values
        self._steps, self._new = 0, False  # and whether parameters were set to signs that have taken no step

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._complete = False  # a constructor that raises changes no weights
        super().__init__(params, defaults)
        self._complete = True
        every = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        vectors = [p for p in every if p.dim() < 2]
        if 0 < len(vectors) < len(every):
            warn(
                f"{type(self).__name__} sets all its parameters to -1 or 1, and {len(vectors)} of them have fewer than "
                f"two dimensions, as biases and BatchNorm's weights do: see {self.name_of(vectors[0])}. Build layers "
                "without them, or give them to another optimizer.",
            )

    def binarise(self) -> None:
        process_limits.refuse_partition(type(self).__name__)
        for group in self.param_groups:
            new = [p for p in group["params"] if p.requires_grad and self.rule.latent not in self.state.get(p, {})]
            self.initialise(group, new)

    def group_added(self) -> None:
        super().group_added()
        if self._complete:
            self.binarise()

    @torch.no_grad()
    def initialise(self, group: Mapping[str, Any], params: list[Tensor], preconditioner: Any = None) -> None:
        new = [p for p in params if self.rule.latent not in self.state.get(p, {})]
        super().initialise(group, params, preconditioner)
        for p in new:
            p.copy_(signs(self.state[p][self.rule.latent]))
        self.note_weights(new)
        self._new = self._new or bool(new)
        self.weights_changed()

    def _update(self, groups: Groups, active: list[list[Tensor]]) -> None:
        """As in `BeliefOptimizer`; a step replaces weights by signs, so it refuses those that were changed.

        A change through `.data` increments no version counter: values are compared before the first step of a
        parameter, and in steps 1, 2, 4, ... and every 100th.
        """
        every = [p for params in active for p in params]
        self.check_weights(every, (self._new or is_compared(self._steps + 1)) and readable(every))
        self._steps, self._new = self._steps + 1, False
        super()._update(groups, active)
        self.note_weights(every)

    def note_weights(self, params: Iterable[Tensor]) -> None:
        self._versions |= {p: shards.version(p) for p in params}

    def check_weights(self, params: Iterable[Tensor], by_value: bool = False) -> None:
        """Raises if weights were changed since they were set to the signs of latent values, as by loading others.

        Args:
            params: of the optimizer.
            by_value: whether to look at all of them, in place of those with another version.
        """
        own = type(self).__name__
        for p in (p for p in params if by_value or self._versions.get(p) != shards.version(p)):
            entry = self.state.get(p, {})
            latent = entry.get(self.rule.latent)
            if latent is None or latent.shape != p.shape:  # another shape is refused by the step
                continue
            if not torch.equal(shards.local(p), signs(shards.local(latent)).to(p.dtype)):
                if not entry.get("step", 0):
                    raise RuntimeError(
                        f"weights of {self.name_of(p)} were changed after {own} was built, which copied them to its "
                        "state: load or initialise weights before building it."
                    )
                raise RuntimeError(
                    f"weights of {self.name_of(p)} were changed since the last step of {own}, whose state has their "
                    f"latent values: load the state of the optimizer too, or build a new {own}."
                )

    def initial(self, slot: str, group: Mapping[str, Any], p: Tensor) -> float | Tensor:
        return p if slot == self.rule.latent else super().initial(slot, group, p)

    def state_loaded(self) -> None:
        """Sets the weights to the signs of the loaded latent values."""
        super().state_loaded()
        with torch.no_grad():
            for p, entry in entries(self):
                if self.rule.latent in entry:
                    p.copy_(signs(entry[self.rule.latent]))
        self.weights_changed()


class BinarySampling(WeightSampling):
    """As `WeightSampling`; refuses weights that were changed, of which a draw knows nothing."""

    optimizer: BinaryOptimizer  # pyright: ignore[reportIncompatibleVariableOverride]

    def begin(self, training: bool) -> None:
        self.optimizer.check_weights(p for group in self.optimizer.param_groups for p in group["params"])
        super().begin(training)

    def restore(self, finished: bool) -> None:
        drawn = list(self.perturbed())
        super().restore(finished)
        self.optimizer.note_weights(drawn)


class STE(BinaryOptimizer):
    r"""The straight-through estimator: gradients at binary weights update latent weights; the weights are their signs.

    .. math::
        w = \mathrm{sign}(\theta), \quad
        \theta \leftarrow (1 - \eta\lambda)\, \theta - \eta\, \langle \nabla \bar\ell(w) \rangle

    with the mean loss of a batch, eta = `lr`, lambda = `weight_decay`, and <> a debiased moving average with decay
    `momentum`. The constructor copies the parameters to the latent weights and replaces each parameter by its sign
    (sign(0) = 1). So pass only the parameters that are to be binary, and load weights before building the optimizer.
    The training loop is that of any torch optimizer.

        >>> weight = torch.nn.Parameter(torch.tensor([0.3, -0.2]))
        >>> optimizer = STE([weight], lr=0.1)
        >>> weight.detach()
        tensor([ 1., -1.])
        >>> (weight * torch.tensor([5.0, 1.0])).sum().backward()
        >>> optimizer.step()
        >>> weight.detach(), optimizer.state[weight]["latent"]
        (tensor([-1., -1.]), tensor([-0.2000, -0.3000]))

    Args:
        params: parameters, named parameters or param groups. All that require gradients become binary.
        lr: eta, in units of the latent weights. Chosen on digits, with BatchNorm; without it, try a tenth. On MNIST,
            `lr=1, weight_decay=0.01` had half the error: search 0.03 to 3.
        momentum: decay of the gradient's average.
        weight_decay: lambda, of the latent weights. Without it they may grow until no gradient changes their sign.
        nonfinite: what to do if a gradient has infinite or NaN entries: `"ignore"`, `"raise"`, or `"skip"`.
        fused: compile the step (`True`), run it eagerly (`False`), or compile it for large models only (`None`).

    Reference: Khan and Rue 2023, Eq. 48; Bengio et al., 2013.
    Differs from the paper: the gradient is that of the mean loss, and a moving average of it is used.
    Checked by: tests/equations/test_binary.py, also as the noise-free limit of BayesBiNN.
    """

    rule = BinaryRule.of(NaturalStep(), "latent")

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, settings(locals()))
        self.binarise()


class BayesBiNN(BinaryOptimizer):
    r"""The Bayesian learning rule for binary weights: a Bernoulli belief about each sign, from relaxed samples.

    .. math::
        \tilde w &= \tanh((\lambda + \tfrac12 \log\tfrac{u}{1-u})/\tau), \quad u \sim U(0, 1), \quad
        s = \frac{1 - \tilde w^2 + \epsilon}{\tau (1 - \tanh^2 \lambda) + \epsilon} \\
        \lambda &\leftarrow (1-\rho)\, \lambda - \rho\, \langle N s\, \nabla \bar\ell(\tilde w) - \lambda_0 \rangle

    with the mean loss of a batch, rho = `lr`, N = `num_data`, tau = `relaxation`, epsilon = `eps`, and lambda_0 the
    natural parameter of the prior, zero without a prior. <> is a debiased moving average of the whole bracket (the
    natural gradient without the term in lambda) with decay `momentum`. A weight is 1 with probability
    1/(1 + exp(-2 lambda)).

    Outside `sampled()` the parameters are sign(lambda), the most probable weights (sign(0) = 1), also directly after
    construction. The initial lambda is `natural_init` times the given weights divided by their root mean square in each
    tensor; with a prior, it is lambda_0. Compute gradients inside `sampled()`:

        >>> weight = torch.nn.Parameter(torch.tensor([0.3, -0.2]))
        >>> optimizer = BayesBiNN([weight], num_data=100)
        >>> with optimizer.sampled():
        ...     optimizer.zero_grad()
        ...     ((weight + 1) ** 2).sum().backward()
        >>> optimizer.step()
        >>> weight.detach().abs()
        tensor([1., 1.])

    Args:
        params: parameters, named parameters or param groups. All that require gradients become binary, so pass only
            those. Load weights before building the optimizer.
        lr: rho, at most 1: the fraction of lambda that is replaced in a step. Chosen on digits, with BatchNorm.
        num_data: N, the number of training examples.
        relaxation: tau. For small values the sampled weights are close to -1 and 1 and the slopes s have a larger
            variance; for very small ones s = eps/eps = 1 for nearly every weight, which is STE at random signs. Chosen
            on digits.
        eps: bounds s, and keeps it above zero for weights whose sign is certain.
        momentum: decay of the natural gradient's average.
        natural_init: root mean square of the initial lambda.
        samples: number of weight samples that `step(closure)` averages over.
        prior: the `BernoulliPosterior` of an earlier task, used as the prior of this one; parameters must be named,
            also in groups that are added. Parameters that it does not contain have the uniform prior.
        seed: noise is a function of the seed, the number of earlier draws and the position of a weight; None draws one
            from torch's global generator.
        nonfinite: what to do if a gradient has infinite or NaN entries: `"ignore"`, `"raise"`, or `"skip"`.
        fused: compile the step (`True`), run it eagerly (`False`), or compile it for large models only (`None`).

    In the stationary state, lambda - lambda_0 is -N times the gradient of the expected loss with respect to the mean
    tanh(lambda). This minimises N E[loss] + KL(q, prior), except for the bias of the relaxation.

    Reference: Khan and Rue 2023, Eq. 49-52; Meng et al., 2020.
    Differs from the paper: Eq. 49 and 52 lack the factor N/M of the sum over a minibatch of M, which N times the mean
    has; Eq. 53 lacks a minus sign.
    Checked by: tests/equations/test_binary.py, by enumeration of all weights and by automatic differentiation.
    """

    rule = BinaryRule.of(NaturalStep(), Relaxed.state_key)
    kept = (*BeliefOptimizer.kept, "_prior")
    _prior: NamedPrior | None = None
    accepts = {
        **BeliefOptimizer.accepts,
        "weight_decay": PRIOR_DECAYS,
        "num_data": COUNT,
        "relaxation": FINITE,
        "eps": NONNEGATIVE,
        "natural_init": NONNEGATIVE,
        "samples": POSITIVE_INTEGER,
        "seed": OPTIONAL_INTEGER,
    }

    def __init__(
        self,
        params: Any,
        lr: float = 3e-3,
        *,
        num_data: float,
        relaxation: float = 0.3,
        eps: float = 1e-10,
        momentum: float = 0.9,
        natural_init: float = 1.0,
        samples: int = 1,
        prior: Posterior | None = None,
        seed: int | None = None,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, settings(locals()))
        if prior is not None:
            self._load_prior(prior)
        self.binarise()

    def _load_prior(self, prior: Posterior) -> None:
        if not isinstance(prior, BernoulliPosterior):
            raise TypeError(
                f"prior must be a BernoulliPosterior (as from BayesBiNN.posterior), got {type(prior).__name__}."
            )
        self._prior = NamedPrior({name: (natural,) for name, natural in prior.natural.items()})
        self._prior.inform(self)

    def group_added(self) -> None:
        if self._prior is not None:
            self._prior.inform_last(self)
        super().group_added()

    def inform(self, group: dict[str, Any], known: Mapping[Tensor, tuple[Tensor, ...]]) -> None:
        """Copies the prior of a group to the state, where it is known."""
        for p, (given,) in known.items():
            natural = torch.empty_like(p, dtype=compute_dtype(p.dtype))
            natural.copy_(shards.placed_like(given, p))
            self.state[p][PRIOR_NATURAL] = natural

    def build_sources(self) -> Iterator[Source]:
        yield BinarySampling("slope", self._sampling_scalars, Relaxed)

    def check_options(self, group: Mapping[str, Any]) -> None:
        if group["lr"] > 1:
            raise ValueError(
                f"lr must be at most 1, got {group['lr']!r}: it is the fraction of lambda that a step replaces."
            )

    def slots(self, group: Mapping[str, Any], rule: UpdateRule) -> tuple[str, ...]:
        return (*super().slots(group, rule), *((PRIOR_NATURAL,) if group.get("informed") else ()))

    def is_partial(self, entry: Mapping[str, Tensor]) -> bool:
        return "step" not in entry

    def initial(self, slot: str, group: Mapping[str, Any], p: Tensor) -> float | Tensor:
        if slot != self.rule.latent:
            return super().initial(slot, group, p)
        if PRIOR_NATURAL in self.state[p]:
            return self.state[p][PRIOR_NATURAL]
        weights = p.detach().to(compute_dtype(p.dtype))
        size = weights.square().mean().sqrt()
        return group["natural_init"] * torch.where(size > 0, weights / size, weights)

    def scalars(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        """As in `BeliefOptimizer`; the natural gradient of the entropy is lambda, which acts as a decay."""
        return {**super().scalars(group, step), "shrink": 1 - float(group["lr"]), "gradient_scale": group["num_data"]}

    def _sampling_scalars(self, group: Mapping[str, Any]) -> list[float]:
        return [1 / group["relaxation"], group["relaxation"], *([group["eps"]] if group["eps"] else [])]

    def spread_in_training(self) -> float:
        naturals = {p: entry[self.rule.latent] for p, entry in self.state.items() if self.rule.latent in entry}
        found = BernoulliPosterior({str(k): natural for k, natural in enumerate(naturals.values())})
        return spread(found.mean, found.variance())

    def build_posterior(self, model: nn.Module, scale: float) -> BernoulliPosterior:
        """A distribution whose samples are -1 or 1; scale divides lambda."""
        check_scale(scale)
        names, latent = names_in(self, model), self.rule.latent
        every = (p for group in self.param_groups for p in group["params"])
        natural = {names[id(p)]: self.state[p][latent] / scale for p in every if latent in self.state.get(p, {})}
        return BernoulliPosterior(natural, model)
