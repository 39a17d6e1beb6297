"""Every optimizer of this package is a `BeliefOptimizer`: parts that say what is believed, and the one `step()`."""

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
from bayesgrad.curvature import Curvature
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
from bayesgrad.posterior.network import parameters_of
from bayesgrad.precision import Diagonal
from bayesgrad.rule import Rule
from bayesgrad.transition import Transition

NONFINITE = ("ignore", "raise", "skip")
# State that Python reads:
ON_CPU = ("step", "clock", "damped", "traces", "input_waits", "error_waits", "dual_damping", "gram_of", "ahead")


class BeliefOptimizer(torch.optim.Optimizer):
    """A belief about each weight, updated by each gradient: the base of all optimizers here.

    A named optimizer is a declaration. It names its parts as class attributes and says, in a few one-line methods,
    what its hyper-parameters mean to them:

    | method | meaning | default |
    |---|---|---|
    | `parts(group)` | the parts, where an option changes them | the class attributes |
    | `dynamics(group, step)` | what the transition's `scalars` asks for | nothing |
    | `step_scale(group)` | what multiplies the step | lr |
    | `gradient_scale(group)` | what multiplies the gradient before it is squared | 1, as None |
    | `prior_variance(group)` | the variance before any evidence, in the units of the state | 1 |

    State is in `state[p]`: a `step` counter and one tensor for each slot of the parts. Hyper-parameters are in the
    param groups, where schedulers find them; `base_lr` there is the lr the group began with.

    Args:
        params: as for any torch optimizer.
        defaults: hyper-parameters; `weight_decay`, `nonfinite` and `fused` may be left out.
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
        """All scalars of one step. Kernels never combine two of them, so that both ways of running round alike."""
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
        curvature, transition, rule = self.parts(group)
        learnt = () if curvature is None else (*curvature.slots, *transition.slots)
        return (*learnt, *rule.slots(group))

    # --- the step ---

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every belief by the gradients in `.grad`, which are left as they are.

        Args:
            closure: re-evaluates the model, calls backward and returns the loss.

        Returns:
            What the closure returned.
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
        if directions is not None:  # what is solved and what is not take different steps
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
        """The elementwise step of a group, for scalars, state and evidence of these names."""
        return Update(self.parts(group), names, slots, evidence)

    def directions(self, groups: list[dict[str, Any]], active: list[list[Tensor]]) -> Directions | None:
        """For parameters whose belief does not factorise over elements: the gradient, solved by its precision.

        Their elementwise step takes the direction for the gradient, in a group whose `preconditioned` is True; all
        others are in a group whose `preconditioned` is False. None where beliefs always factorise.
        """
        return None

    def evidence(self, groups: list[dict[str, Any]], active: list[list[Tensor]]) -> dict[str, Mapping[Tensor, Tensor]]:
        """What a curvature asks for beside gradients, by name: a tensor for each parameter that has a gradient."""
        return {}

    def _layout(self, groups: list[dict[str, Any]], active: list[list[Tensor]]) -> list[list[Block]]:
        """The blocks of each group, kept from step to step for as long as they fit."""
        kept: list[list[Block]] = self.__dict__.get("_blocks", [])
        layout = []
        for index, (group, params) in enumerate(zip(groups, active)):
            slots = self.slots(group)
            blocks = kept[index] if index < len(kept) else []
            if not self._fits(blocks, params, slots):
                self._initialise(group, params, slots)
                keys = [(p.dtype, p.device, float(self.state[p]["step"])) for p in params]
                blocks = [
                    Block([p for p, k in zip(params, keys) if k == key], self.state, slots)
                    for key in dict.fromkeys(keys)
                ]
            layout.append(blocks)
        self._blocks = layout
        return layout

    def _fits(self, blocks: list[Block], params: list[Tensor], slots: tuple[str, ...]) -> bool:
        if len(blocks) == 1:  # the usual case keeps the order of the parameters
            return blocks[0].slots == slots and blocks[0].holds(params, self.state)
        mine = {id(p) for block in blocks for p in block.params}
        return mine == {id(p) for p in params} and all(
            block.slots == slots and block.holds(block.params, self.state) for block in blocks
        )

    def _initialise(self, group: Mapping[str, Any], params: list[Tensor], slots: tuple[str, ...]) -> None:
        curvature, _, rule = self.parts(group)
        averages = {*(curvature.slots if curvature else ()), *rule.averages(group)}
        averages = (
            set() if group.get("preconditioned") else averages
        )  # of directions, which are not in the gradient's units
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
        """What a slot starts from."""
        if slot == "last_mean":
            return p
        return self.prior_variance(group) if slot in ("variance", "last_variance") else 0.0

    def _mark(self) -> list[tuple[int, int]]:
        """Tells whether gradients have changed in between."""
        every = (p for group in self.param_groups for p in group["params"])
        return [(id(p.grad), p.grad._version) for p in every if p.grad is not None]

    # --- bad gradients ---

    def _skips(self, active: list[list[Tensor]]) -> bool:
        """Whether this step is to be skipped; raises where that is wanted. Nothing has been changed so far."""
        for index, (group, params) in enumerate(zip(self.param_groups, active)):
            for p in params:
                if gradient_of(p).layout is not torch.strided:
                    raise RuntimeError(
                        f"{type(self).__name__} takes no sparse gradients, but {self._name(index, p)} has one: "
                        "build the embedding with sparse=False."
                    )
            if group["nonfinite"] == "ignore" or not params:
                continue
            # The largest magnitude is infinite or NaN exactly where an entry is; a sum could overflow by itself.
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
        """Adds a param group, as in torch.optim; hyper-parameters it does not name are the defaults."""
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
        """As in torch.optim, but a snapshot: later steps leave it alone."""
        saved = super().state_dict()
        saved["state"] = {key: _copied(entry) for key, entry in saved["state"].items()}
        saved["param_groups"] = [_copied(group) for group in saved["param_groups"]]
        return saved

    def __getstate__(self) -> dict[str, Any]:
        kept = super().__getstate__()
        state = defaultdict(dict, {p: _unshared(entry) for p, entry in kept["state"].items()})
        return {**kept, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a run bit for bit, or raises and changes nothing.

        Unlike torch.optim, state keeps its dtype (float32 beside bfloat16 weights) and is copied.
        """
        loaded: dict[str, Any] = {}
        if not isinstance(state_dict, dict):
            raise ValueError(f"this is no state of {type(self).__name__} but a {type(state_dict).__name__}.")

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
        name = type(self).__name__
        groups = saved.get("param_groups")
        whole = isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups)
        if not whole or not isinstance(saved.get("state"), Mapping):
            raise ValueError(f"this is no state of {name}: it lacks 'state' or 'param_groups'; was the file cut short?")
        sizes = [len(group["params"]) for group in self.param_groups]
        given = [len(group.get("params", ())) for group in saved["param_groups"]]
        if sizes != given:
            raise ValueError(f"the saved state has param groups of {given} parameters, this {name} of {sizes}.")
        for index, (group, given_group) in enumerate(zip(self.param_groups, saved["param_groups"])):
            missing = sorted({*self.defaults, "base_lr", "last_lr"} - set(given_group))
            if missing:
                raise ValueError(f"group {index} of the saved state lacks {missing}: it is not {name}'s, or cut short.")
            self._check(given_group)
            for position, (p, key) in enumerate(zip(group["params"], given_group["params"])):
                where = f"parameter {position} of group {index}"
                entry = saved["state"].get(key, {})
                slots = self._slots_of(p, given_group)
                odd = next((k for k, value in entry.items() if not isinstance(value, Tensor)), None)
                if odd is not None or ("step" in entry and entry["step"].numel() != 1):
                    raise ValueError(f"{odd or 'step'} in the saved state of {where} is no tensor of its kind.")
                if entry and not {"step", *slots} <= set(entry) and not self._is_partial(entry):
                    lost = sorted({"step", *slots} - set(entry))
                    raise ValueError(f"the saved state of {where} lacks {lost}: it is not {name}'s, or cut short.")
                for slot in slots:
                    if slot in entry and entry[slot].shape != p.shape:
                        raise ValueError(
                            f"{slot} of {where} has shape {tuple(entry[slot].shape)} in the saved state, "
                            f"but the parameter has {tuple(p.shape)}: load it into the model it came from."
                        )

    def _is_partial(self, entry: Mapping[str, Tensor]) -> bool:
        """Whether this is the state of a parameter that has not taken a step, and is whole all the same."""
        return False

    def _slots_of(self, p: Tensor, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The elementwise state that a parameter has at least."""
        return self.slots(group)

    # --- what is believed ---

    def posterior(self, model: nn.Module, scale: float = 1.0) -> Posterior:
        """The belief about the model's weights as a `Posterior`, a copy.

        Args:
            model: the model whose parameters were given to the optimizer. Its other parameters, and frozen ones that
                were never updated, are held fixed.
            scale: multiplies every variance. Choose it on held-out likelihood; see docs/choosing.md for why.
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
        """Beliefs about several parameters at once, by the name of one of them; `names` has all by id."""
        return ()

    def _variance(self, group: Mapping[str, Any], p: Tensor) -> Tensor:
        """sigma_post^2 of each weight, as of the last step.

        The mean moves by step_scale P^-1 g for the mean gradient g, and by sigma_post^2 (B g), so
        sigma_post^2 = step_scale P^-1 / B.
        """
        curvature, transition, _ = self.parts(group)
        if curvature is None or "batch_size" not in group:
            raise TypeError(f"{type(self).__name__} holds no belief about its weights: it has no posterior.")
        if group["batch_size"] is None:
            raise ValueError(
                f"a posterior needs the number of examples in a gradient: pass batch_size= to {type(self).__name__}."
            )
        # Before the first step at a positive lr any unit will do: the belief is the prior, which does not depend on it.
        then = {**group, "lr": group["last_lr"] or 1.0, "base_lr": group["base_lr"] or 1.0}
        step_scale = self.step_scale(then) / group["batch_size"]
        entry = self.state.get(p)
        if not entry:
            return torch.full_like(p, step_scale * self.prior_variance(then), dtype=kernels.compute_dtype(p.dtype))
        scalars = transition.scalars(**self.dynamics(then, int(entry["step"])))
        return step_scale * transition.current_precision(entry, scalars).variance()


def settings(arguments: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The hyper-parameters among the arguments of a declaration, `locals()` at its beginning."""
    others = ("self", "__class__", "params", "model", "prior")
    return {name: value for name, value in arguments.items() if name not in others} | more


def _rate(group: Mapping[str, Any]) -> float:
    """The learning rate, zero where a schedule has come to zero but for rounding."""
    lr = float(group["lr"])
    return 0.0 if -1e-9 * group["base_lr"] < lr < 0 else lr


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}


def _unshared(entry: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that are views into a larger storage, copied: pickling them would store all of it each time."""
    return {
        name: value.clone() if value.untyped_storage().nbytes() > value.numel() * value.element_size() else value
        for name, value in entry.items()
    }
