"""`BeliefOptimizer`, the base class of all optimizers here.

An optimizer keeps a belief about each weight: a Gaussian whose mean is the parameter and whose precision is in the
optimizer's state. Each step updates both from the gradient. A subclass does not write `step()`. It declares three
parts, and what its hyperparameters mean to them:

    >>> from bayesgrad.curvature import SquaredGradient
    >>> from bayesgrad.rule import NaturalGradient
    >>> from bayesgrad.transition import OrnsteinUhlenbeck, SteadyState
    >>> class Adam(BeliefOptimizer):
    ...     curvature = SquaredGradient()  # information of a batch: h = g^2
    ...     transition = SteadyState(OrnsteinUhlenbeck())  # precision: P = sqrt(<h>)
    ...     rule = NaturalGradient()  # mean: w <- w - lr P^-1 <g>
    ...
    ...     def dynamics(self, group, step):  # arguments of transition.scalars()
    ...         return {"beta": group["betas"][1], "step": step}

    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = Adam([weight], {"lr": 0.1, "betas": (0.9, 0.999)})
    >>> weight.grad = torch.tensor([5.0])
    >>> optimizer.step()
    >>> weight.data
    tensor([0.9000])

The parts are described in `bayesgrad.curvature`, `bayesgrad.transition` and `bayesgrad.rule`. `step()` does this:

1. `_check` validates the param groups, and `_skips` handles gradients that are not finite.
2. `directions` preconditions the gradients of parameters whose precision is a matrix (KFAC, FOOF); others: None.
3. `evidence` collects what the curvature needs beside `.grad`, such as per-example squares (OGN) or Hessians (Newton).
4. `_layout` groups parameters into blocks that one kernel call updates.
5. For each block, `scalars` computes the hyperparameters of this step, and `kernels.run` applies `update`, the three
   parts as one elementwise function, in place.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayesgrad import kernels
from bayesgrad.belief import Belief, Joint
from bayesgrad.block import Block, Directions, gradient_of
from bayesgrad.block.elementwise import blocks_fit
from bayesgrad.curvature import Curvature
from bayesgrad.layers.network import parameters_of
from bayesgrad.optimizer.checkpoint import check_saved, copied, unshared
from bayesgrad.optimizer.constraints import (
    FRACTION,
    FRACTIONS,
    NONNEGATIVE,
    OPTIONAL_BOOLEAN,
    POSITIVE,
    Constraint,
    one_of,
)
from bayesgrad.optimizer.update import Parts, Update
from bayesgrad.posterior import GaussianPosterior, Posterior
from bayesgrad.precision import Diagonal
from bayesgrad.rule import Rule
from bayesgrad.transition import Transition

NONFINITE = ("ignore", "raise", "skip")
# State that Python reads:
ON_CPU = ("step", "clock", "damped", "traces", "input_waits", "error_waits", "dual_damping", "gram_of", "ahead")


class BeliefOptimizer(torch.optim.Optimizer):
    """A torch optimizer that keeps a Gaussian belief about each weight and updates it with each gradient.

    A subclass sets `curvature`, `transition` and `rule` as class attributes, and overrides a few one-line methods:

    | method | meaning | default |
    |---|---|---|
    | `parts(group)` | the three parts, if an option changes them | the class attributes |
    | `dynamics(group, step)` | arguments of the transition's `scalars` | none |
    | `step_scale(group)` | factor of the step | lr |
    | `gradient_scale(group)` | factor of the gradient before it is squared | None, for 1 |
    | `prior_variance(group)` | variance before the first gradient, in the units of the state | 1 |

    State is in `state[p]`: a `step` counter and one tensor for each slot of the parts. Hyperparameters are in the
    param groups, where schedulers find them. There, `base_lr` is the initial lr of the group and `last_lr` the last
    positive one. `accepts` maps the name of a hyperparameter to the values that it may have.

    Args:
        params: as for any torch optimizer.
        defaults: hyperparameters; `weight_decay`, `nonfinite` and `fused` may be omitted.
    """

    curvature: ClassVar[Curvature | None] = None
    transition: ClassVar[Transition]
    rule: ClassVar[Rule]
    accepts: ClassVar[Mapping[str, Constraint]] = {
        "lr": NONNEGATIVE,
        "weight_decay": NONNEGATIVE,
        "momentum": FRACTION,
        "betas": FRACTIONS,
        "damping": NONNEGATIVE,
        "nonfinite": one_of(*NONFINITE),
        "fused": OPTIONAL_BOOLEAN,
        "base_lr": NONNEGATIVE,
        "last_lr": NONNEGATIVE,
    }

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, {"weight_decay": 0.0, "nonfinite": "ignore", "fused": None, **defaults})

    def parts(self, group: Mapping[str, Any]) -> Parts:
        return Parts(self.curvature, self.transition, self.rule)

    def dynamics(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        return {}

    def step_scale(self, group: Mapping[str, Any]) -> float:
        return float(group["lr"])

    def gradient_scale(self, group: Mapping[str, Any]) -> float | None:
        return None

    def prior_variance(self, group: Mapping[str, Any]) -> float:
        return 1.0

    def scalars(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        """All scalars of one step. Kernels never combine two scalars, so eager and compiled steps round alike."""
        curvature, transition, rule = self.parts(group)
        n = rule.scalars(group, step, self.step_scale(group))
        if curvature is not None:
            n |= curvature.scalars(step) | transition.scalars(**self.dynamics(group, step))
            if (gradient_scale := self.gradient_scale(group)) is not None:
                n["gradient_scale"] = gradient_scale
        if group["weight_decay"]:
            n["shrink"] = 1 - float(group["lr"]) * group["weight_decay"]
        if group.get("damping"):
            n["damping"] = group["damping"]
        return n

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of the state tensors of a parameter in this group."""
        curvature, transition, rule = self.parts(group)
        learnt = () if curvature is None else (*curvature.slots, *transition.slots)
        return (*learnt, *rule.slots(group))

    # --- the step ---

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates weights and state from the gradients in `.grad`, which do not change.

        Args:
            closure: re-evaluates the model, calls backward and returns the loss.

        Returns:
            The return value of the closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [{**group, "lr": _rate(group)} for group in self.param_groups]
        active = [[p for p in group["params"] if p.grad is not None] for group in groups]
        for group in groups:
            self._check(group)
        if self._skips(active):
            return loss
        for group, now, params in zip(self.param_groups, groups, active):
            if params and now["lr"] > 0:
                now["base_lr"] = group["base_lr"] = group["base_lr"] or now["lr"]
                now["last_lr"] = group["last_lr"] = now["lr"]
        directions = self.directions(groups, active)
        if directions is not None:  # parameters with and without a preconditioned gradient take different steps
            groups = [
                {**group, "preconditioned": preconditioned} for group in groups for preconditioned in (False, True)
            ]
            active = [
                [p for p in params if (p in directions) == preconditioned]
                for params in active
                for preconditioned in (False, True)
            ]
        evidence = self.evidence(groups, active)
        layout = self._layout(groups, active)
        elements = sum(block.elements for blocks in layout for block in blocks)
        for group, blocks in zip(groups, layout):
            for block in blocks:
                block.step += 1
                scalars = self.scalars(group, int(block.step))
                update = self.update(group, tuple(scalars), block.slots, tuple(evidence))
                fused = kernels.should_compile(block.device, elements) if group["fused"] is None else group["fused"]
                plain = group.get("preconditioned") and block.slots in ((), ("momentum",))
                axpy_coefficients = self.rule.axpy_coefficients(scalars) if plain else None
                for rows in block.rows(directions or {}, axpy_coefficients, list(evidence.values())):
                    kernels.run(update, list(scalars.values()), rows, fused)
        return loss

    def update(
        self, group: Mapping[str, Any], names: tuple[str, ...], slots: tuple[str, ...], evidence: tuple[str, ...]
    ) -> Update:
        """The elementwise step of a group, for scalars, state tensors and evidence with these names."""
        return Update(self.parts(group), names, slots, evidence)

    def directions(self, groups: list[dict[str, Any]], active: list[list[Tensor]]) -> Directions | None:
        """Preconditioned gradients of the parameters whose precision is a matrix.

        The elementwise step of such a parameter uses its direction in place of its gradient, in a group with
        `preconditioned` = True. All other parameters are in a group with `preconditioned` = False. None if the
        precision of all parameters is elementwise.
        """
        return None

    def evidence(self, groups: list[dict[str, Any]], active: list[list[Tensor]]) -> dict[str, Mapping[Tensor, Tensor]]:
        """What the curvature needs beside gradients: name -> parameter -> tensor, for parameters with a gradient."""
        return {}

    def _layout(self, groups: list[dict[str, Any]], active: list[list[Tensor]]) -> list[list[Block]]:
        """The blocks of each group; reused from step to step until parameters or state tensors are replaced."""
        kept: list[list[Block]] = self.__dict__.get("_blocks", [])
        layout = []
        for index, (group, params) in enumerate(zip(groups, active)):
            slots = self.slots(group)
            blocks = kept[index] if index < len(kept) else []
            if not blocks_fit(blocks, params, self.state, slots):
                self._initialise(group, params, slots)
                keys = [(p.dtype, p.device, float(self.state[p]["step"])) for p in params]
                blocks = [
                    Block([p for p, k in zip(params, keys) if k == key], self.state, slots)
                    for key in dict.fromkeys(keys)
                ]
            layout.append(blocks)
        self._blocks = layout
        return layout

    def _initialise(self, group: Mapping[str, Any], params: list[Tensor], slots: tuple[str, ...]) -> None:
        """Creates missing state tensors."""
        curvature, _, rule = self.parts(group)
        averages = {*(curvature.slots if curvature else ()), *rule.averages(group)}
        if group.get("preconditioned"):  # averages of directions, which are not in the units of the gradient
            averages = set()
        for p in params:
            entry = self.state[p]
            if "step" not in entry:
                entry["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            entry["step"] = entry["step"].to("cpu", torch.float32)
            for slot in slots:
                if slot not in entry:
                    entry[slot] = torch.empty_like(p, dtype=kernels.compute_dtype(p.dtype))
                    value = self.initial(slot, group, p)
                    entry[slot].copy_(value) if isinstance(value, Tensor) else entry[slot].fill_(value)
                    if slot in averages and entry["step"] > 0:
                        entry[slot].copy_(gradient_of(p))
                if entry[slot].shape != p.shape:
                    raise ValueError(
                        f"{slot} of a parameter has shape {tuple(entry[slot].shape)}, but the parameter now has "
                        f"{tuple(p.shape)}: build a new optimizer after reshaping parameters."
                    )

    def initial(self, slot: str, group: Mapping[str, Any], p: Tensor) -> float | Tensor:
        """The initial value of a state tensor."""
        if slot == "last_mean":
            return p
        return self.prior_variance(group) if slot in ("variance", "last_variance") else 0.0

    def _mark(self) -> list[tuple[int, int]]:
        """Identity and version of all gradients: two equal results mean that no gradient changed in between."""
        every = (p for group in self.param_groups for p in group["params"])
        return [(id(p.grad), p.grad._version) for p in every if p.grad is not None]

    # --- bad gradients ---

    def _skips(self, active: list[list[Tensor]]) -> bool:
        """Whether to skip this step because of a gradient that is not finite; called before anything changes."""
        for index, (group, params) in enumerate(zip(self.param_groups, active)):
            for p in params:
                if gradient_of(p).layout is not torch.strided:
                    raise RuntimeError(
                        f"{type(self).__name__} needs dense gradients, but that of {self._name(index, p)} is sparse: "
                        "build the embedding with sparse=False."
                    )
            if group["nonfinite"] == "ignore" or not params:
                continue
            # The largest magnitude is finite if and only if all entries are; a finite sum could overflow.
            gradients = [gradient_of(p) for p in params if p.numel()]
            norms = torch._foreach_norm(gradients, math.inf) if gradients else []
            if not norms or bool(torch.stack([norm.isfinite().to(norms[0].device) for norm in norms]).all()):
                continue
            if group["nonfinite"] == "skip":
                return True
            for p in params:
                bad = int((~torch.isfinite(gradient_of(p))).sum())
                if bad:
                    raise FloatingPointError(
                        f"the gradient of {self._name(index, p)} has {bad} entries of {p.numel()} that are not finite; "
                        "nothing was changed. Lower lr, clip gradients, or pass nonfinite='skip'."
                    )
        return False

    def _name(self, index: int, p: Tensor) -> str:
        group = self.param_groups[index]
        position = next(i for i, q in enumerate(group["params"]) if q is p)
        if "param_names" in group:
            return f"parameter {group['param_names'][position]!r}"
        return f"parameter {position} of group {index} (shape {tuple(p.shape)})"

    # --- groups and checkpoints ---

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group, as in torch.optim; omitted hyperparameters have their default values."""
        self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for position, p in enumerate(group["params"]):
            if p.is_complex():
                self.param_groups.pop()
                raise ValueError(
                    f"parameter {position} is {p.dtype}: complex weights are not supported, keep a real parameter "
                    "and use torch.view_as_complex in the forward pass."
                )
        group.setdefault("base_lr", float(group["lr"]))
        group.setdefault("last_lr", group["base_lr"])

    def _check(self, group: Mapping[str, Any]) -> None:
        for name, (words, holds) in self.accepts.items():
            if name not in group:
                continue
            try:
                good = bool(holds(group[name]))
            except (TypeError, ValueError, RuntimeError):
                good = False
            if not good:
                raise ValueError(f"{name} must be {words}, got {group[name]!r}.")

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim, but with copies of all tensors: later steps do not change it."""
        saved = super().state_dict()
        saved["state"] = {key: copied(entry) for key, entry in saved["state"].items()}
        saved["param_groups"] = [copied(group) for group in saved["param_groups"]]
        return saved

    def __getstate__(self) -> dict[str, Any]:
        kept = super().__getstate__()
        state = defaultdict(dict, {p: unshared(entry) for p, entry in kept["state"].items()})
        return {**kept, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a run bit for bit, or raises and changes nothing.

        Unlike torch.optim, state keeps its dtype (float32 beside bfloat16 weights) and is copied.
        """
        loaded: dict[str, Any] = {}
        if not isinstance(state_dict, dict):
            raise ValueError(f"the state of {type(self).__name__} must be a dict, got {type(state_dict).__name__}.")

        def check(_: Any, given: dict[str, Any]) -> None:
            self._check_loaded(given)
            loaded.update(given)

        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for p, saved in self._pairs(loaded):
            for name, value in saved.items():
                device = "cpu" if name in ON_CPU else p.device
                self.state[p][name] = value.detach().to(device, copy=True)

    def _pairs(self, saved: Mapping[str, Any]) -> Iterable[tuple[Tensor, dict[str, Tensor]]]:
        for group, given in zip(self.param_groups, saved["param_groups"]):
            for p, key in zip(group["params"], given["params"]):
                if key in saved["state"]:
                    yield p, saved["state"][key]

    def _check_loaded(self, saved: Mapping[str, Any]) -> None:
        """Raises ValueError if `saved` is not a state of this optimizer."""
        check_saved(self, saved)

    def _is_partial(self, entry: Mapping[str, Tensor]) -> bool:
        """Whether an entry without all slots is valid: that of a parameter that has not taken a step."""
        return False

    def _slots_of(self, p: Tensor, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The state tensors that a parameter must have after its first step."""
        return self.slots(group)

    # --- posterior ---

    def posterior(self, model: nn.Module, scale: float = 1.0) -> Posterior:
        """A copy of the belief about the model's weights, as a `Posterior`.

        Args:
            model: the model whose parameters were given to the optimizer. Its other parameters, and frozen parameters
                that were never updated, are constants.
            scale: multiplies every variance. Choose it by held-out likelihood; docs/choosing.md says why.
        """
        if not POSITIVE.holds(scale) or math.isinf(scale):
            raise ValueError(f"scale must be a finite positive number, got {scale!r}.")
        names = {id(p): name for name, p in parameters_of(model).items()}
        beliefs: dict[str, Belief] = dict(self._joint(names, scale))
        joint = {name for belief in beliefs.values() if isinstance(belief, Joint) for name in belief.shapes}
        for index, group in enumerate(self.param_groups):
            for p in group["params"]:
                if names.get(id(p)) in joint:
                    continue
                if id(p) not in names:
                    raise ValueError(f"{self._name(index, p)} is not in the model: pass the model that was optimised.")
                if not p.requires_grad and not self.state.get(p):
                    continue
                variance = self._variance(group, p) * scale
                beliefs[names[id(p)]] = Belief(p.detach().clone(), Diagonal(variance))
        return GaussianPosterior(beliefs, model)

    def _joint(self, names: Mapping[int, str], scale: float) -> Iterable[tuple[str, Joint]]:
        """Joint beliefs about several parameters, by the name of one of them; `names` maps ids to names."""
        return ()

    def _variance(self, group: Mapping[str, Any], p: Tensor) -> Tensor:
        """sigma_post^2 of each weight after the last step.

        The mean moves by step_scale P^-1 g for the mean gradient g, and by sigma_post^2 (B g), so
        sigma_post^2 = step_scale P^-1 / B.
        """
        curvature, transition, _ = self.parts(group)
        if curvature is None or "batch_size" not in group:
            raise TypeError(f"{type(self).__name__} has no posterior: it does not estimate the variance of weights.")
        if group["batch_size"] is None:
            raise ValueError(
                f"a posterior needs the number of examples in a gradient: pass batch_size= to {type(self).__name__}."
            )
        # Before the first step with lr > 0 the belief is the prior, which does not depend on this choice of lr.
        then = {**group, "lr": group["last_lr"] or 1.0, "base_lr": group["base_lr"] or 1.0}
        step_scale = self.step_scale(then) / group["batch_size"]
        entry = self.state.get(p)
        if not entry:
            return torch.full_like(p, step_scale * self.prior_variance(then), dtype=kernels.compute_dtype(p.dtype))
        scalars = transition.scalars(**self.dynamics(then, int(entry["step"])))
        return step_scale * transition.current_precision(entry, scalars).variance()


def settings(arguments: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The hyperparameters among the arguments of a constructor, given as its `locals()`."""
    others = ("self", "__class__", "params", "model", "prior")
    return {name: value for name, value in arguments.items() if name not in others} | more


def _rate(group: Mapping[str, Any]) -> float:
    """The learning rate; zero if a schedule ended at zero minus a rounding error."""
    lr = float(group["lr"])
    return 0.0 if -1e-9 * group["base_lr"] < lr < 0 else lr
