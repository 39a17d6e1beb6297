"""`BeliefOptimizer`, the base class of all optimizers and samplers here.

An optimizer keeps a belief about each weight: a Gaussian whose mean is the parameter and whose precision is in the
optimizer's state. Each step updates both from the gradient. A subclass does not write `step()`. It declares a rule, and
what its hyperparameters mean to it:

    >>> from bayesgrad.rules import NaturalStep, OrnsteinUhlenbeck, SquaredGradient, SteadyState
    >>> class Adam(BeliefOptimizer):
    ...     rule = UpdateRule(
    ...         SquaredGradient(),  # information of a batch: h = g^2
    ...         SteadyState(OrnsteinUhlenbeck()),  # precision: P = sqrt(<h>)
    ...         NaturalStep(),  # mean: w <- w - lr P^-1 <g>
    ...     )
    ...
    ...     def dynamics(self, group):  # arguments of the transition's scalars()
    ...         return {"beta": group["betas"][1]}

    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = Adam([weight], {"lr": 0.1, "betas": (0.9, 0.999)})
    >>> weight.grad = torch.tensor([5.0])
    >>> optimizer.step()
    >>> weight.data
    tensor([0.9000])

An optimizer that needs more than gradients also declares *sources* (`bayesgrad.sources`), and one whose precision is a
matrix a *preconditioner* (`bayesgrad.preconditioners`). docs/design.md says how one step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bayesgrad import distributed, initial_state, joining, kernels, noise, process_limits, shards
from bayesgrad.belief import Joint
from bayesgrad.checkpoint import CheckedOptimizer
from bayesgrad.closures import evaluate
from bayesgrad.directions import Directions
from bayesgrad.finite import FiniteCheck, refuse_sparse
from bayesgrad.layers.observed import check_class_dim, classes_last, known_class_dim
from bayesgrad.packing import Block, Job, Layout
from bayesgrad.parts import Groups, Needs, Noise, Part, Preconditioner, Source, refuse_processes
from bayesgrad.passes import Passes, warned_of_interrupts
from bayesgrad.posterior import Posterior
from bayesgrad.posterior.filtered import filtered_variance, gaussian_posterior, with_likelihood
from bayesgrad.rules.update import UpdateRule, kernel_of
from bayesgrad.schedule import RATES, current_lr, rates_after

PREPARED = "prepared"  # in the groups of a step: what depends on their options alone
PLAIN = frozenset({int, float, bool, str, tuple, type(None)})  # types of options that change by assignment alone
Scales = tuple[float, dict[str, float], float | None]
Prepared = tuple[Scales, tuple[str, ...], tuple[str, ...]]  # and the slots of the optimizer and its preconditioner


class BeliefOptimizer(CheckedOptimizer):
    """A torch optimizer that keeps a Gaussian belief about each weight and updates it with each gradient.

    A subclass sets `rule` as a class attribute, and overrides a few one-line methods:

    | method | meaning | default |
    |---|---|---|
    | `rule_of(group)` | the rule, if an option in `common` selects it | the class attribute |
    | `dynamics(group)` | arguments of the transition's `scalars` | none |
    | `step_scale(group)` | factor of the step | lr |
    | `gradient_scale(group)` | factor of the gradient before it is squared | None, for 1 |
    | `prior_variance(group)` | variance before the first gradient, in the units of the state | 1 |
    | `build_sources()` | what collects evidence beside gradients | none |
    | `build_preconditioner()` | the belief that does not factorise over elements | none |
    | `variance_of(group, p)` | the variance that `posterior()` reports | step_scale P^-1 / `batch_size` |
    | `evaluation_weights()` | parameter -> its weights in evaluation mode, where they differ | none |

    State is in `state[p]`: a `step` counter and one tensor for each slot of the rule. Hyperparameters are in the param
    groups, where schedulers find them; see `CheckedOptimizer`. The methods above are functions of the group's options,
    and are called again if one of these changes.

    Args:
        params: as for any torch optimizer; with a model, parameters or groups of it, or None for all.
        defaults: hyperparameters; `weight_decay`, `nonfinite` and `fused` may be omitted.
        model: for optimizers that use the layers of the model.
    """

    rule: UpdateRule

    def __init__(self, params: Any, defaults: dict[str, Any], model: Any = None) -> None:
        self._reset()
        self.independent, self.draws_differ = distributed.independent(), distributed.draws_differ()
        super().__init__(params, {"weight_decay": 0.0, "nonfinite": "ignore", "fused": None, **defaults}, model)
        self._build()

    def _reset(self) -> None:
        """The attributes of an optimizer that are not saved."""
        self.sources: tuple[Source, ...] = ()
        self.preconditioner: Preconditioner | None = None
        self._parts: tuple[Part, ...] = ()
        self._drawing: Source | None = None  # the source that draws weights
        self._blocks = Layout()
        self._finite = FiniteCheck()
        self._passes = Passes(self)

    def _build(self) -> None:
        """Builds sources and preconditioner; an optimizer that raises in its constructor has changed nothing."""
        for part in self._parts:
            part.close()
        self.rule = self.rule_of(self.param_groups[0])
        self.last_options: list[dict[str, Any]] = []  # options at the last step
        self._prepared: dict[int, Prepared] = {}  # by the number of a group, until its options change
        self.selected = list(map(self.selection, self.param_groups))
        self.sources = tuple(self.build_sources())
        self.preconditioner = self.build_preconditioner()
        self._parts = (*self.sources, *([self.preconditioner] if self.preconditioner else ()))
        refuse_processes(self, self._parts)
        self._bind()
        distributed.fill_seeds(self, noise.fresh_seed)

    def _bind(self) -> None:
        for part in self._parts:
            part.bind(self)
        draws, outputs, loss = (any(part.needs[i] for part in self._parts) for i in range(3))
        self.needs = Needs(draws, outputs, loss, self.model is not None)
        self._drawing = next((source for source in self.sources if source.needs.draws), None)
        self._observing = tuple(part for part in self._parts if part.observes)
        self._gathering = shards.gathering_modules(p for group in self.param_groups for p in group["params"])

    # --- declarations ---

    def build_sources(self) -> Iterable[Source]:
        return ()

    def build_preconditioner(self) -> Preconditioner | None:
        return None

    def rule_of(self, group: Mapping[str, Any]) -> UpdateRule:
        return type(self).rule

    def dynamics(self, group: Mapping[str, Any]) -> dict[str, float]:
        return {}

    def step_scale(self, group: Mapping[str, Any]) -> float:
        return float(group["lr"])

    def gradient_scale(self, group: Mapping[str, Any]) -> float | None:
        return None

    def prior_variance(self, group: Mapping[str, Any]) -> float:
        return 1.0

    def slots(self, group: Mapping[str, Any], rule: UpdateRule) -> tuple[str, ...]:
        """The names of the state tensors of a parameter in this group."""
        return rule.slots(group)

    def scales(self, group: Mapping[str, Any]) -> Scales:
        """What a group gives to the rule; a step computes it anew if an option has changed."""
        return self.step_scale(group), self.dynamics(group), self.gradient_scale(group)

    def scalars(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        """All scalars of one step."""
        scale, dynamics, gradient_scale = group[PREPARED][0] if PREPARED in group else self.scales(group)
        return self.rule.scalars(group, step, scale, dynamics, gradient_scale)

    def finished(self) -> None:
        """Called at the end of a step."""

    def initial(self, slot: str, group: Mapping[str, Any], p: Tensor) -> float | Tensor:
        """The initial value of a state tensor."""
        return self.rule.initial(slot, p, lambda: self.prior_variance(group))

    # --- the training loop ---

    @contextmanager
    def sampled(self, noise: Noise | None = None) -> Iterator[None]:
        """A context in which weights are one sample of the belief; afterwards they are the mean again, bit for bit.

        It does nothing for an optimizer whose gradients are computed at the mean (`needs.draws` is False).

        Run forward and backward passes inside. Call `zero_grad` inside or before it; clip and unscale gradients between
        the context and `step()`. Micro-batches inside one context share the sample; a context for each samples anew.
        Divide losses by the number of micro-batches and draws, as for any gradient accumulation. Frozen parameters
        are not perturbed (by SpikeSlab, if never trained). Draws under `torch.no_grad()` do not affect training.

        What needs the mean is refused inside: `step`, `posterior`, `eval`, copies, state dicts, new groups. A change of
        sampled weights would be lost, so it raises. Copies and state dicts of the *model* inside hold the sample.

        Args:
            noise: noise to use in place of random numbers (standard normal for a Gaussian belief, uniform in (0, 1) for
                binary weights, the masks of units for SpikeSlab), as a dict by parameter or as a function of the
                parameter.
        """
        if self._drawing is None:
            if noise is not None:
                raise ValueError(
                    f"this {type(self).__name__} computes gradients at the mean and takes no noise: call sampled() "
                    "without it, or sample posterior(model)."
                )
            yield
            return
        if not self.param_groups[0]["train_mode"]:
            self.require_training("sampled()")
        if distributed.has_group():
            distributed.agree_on_seed(self)
        self._passes.begin(self._parts)
        with self._passes.noticed(), self._drawing.draw(noise):
            yield
        self._passes.end()

    def observe(
        self, outputs: Any = None, *, loss: Any = None, labels: Any = None, weights: Any = None, class_dim: Any = None
    ) -> None:
        """Collects what the optimizer needs from a forward pass beside gradients; see `needs`.

        Call it before `loss.backward()`. It changes neither the graph nor `.grad` of parameters, and does nothing where
        nothing is needed, and for an empty batch. Several calls before a step act like one call with a larger batch.
        `zero_grad()` discards what was observed for a step that was not taken. As in `torch.autograd.grad`, hooks of
        other tensors, and those with `retain_grad()`, see its backward passes too: call `retain_grad()` after it.

        Args:
            outputs: of the model, with their graph; of the batch of the loss, or of another.
            loss: the mean loss, a tensor with one element, for second derivatives, which are multiplied by what it is
                multiplied by before `backward()`: 1/4 in `(loss / 4).backward()` of a micro-batch. Factors above one
                do not count. With a `GradScaler`, pass it before `scale`, and divided by the number of micro-batches.
            labels: replace the labels that are sampled from the model's predictions; -100 for no loss.
            weights: how often each loss counts, in the shape of labels: `labels != -100` if some have no loss.
            class_dim: the dimension of classes: 1 for outputs (N, C, ...) as in cross entropy; None for the last one,
                which loss, labels or the last layer must show if outputs have more than two dimensions.
        """
        needs, known = self.needs, self.param_groups[0].get("num_data")
        if not self._parts and known is None:
            return
        for name, needed, given in (("outputs", needs.outputs, outputs), ("loss", needs.loss, loss)):
            if needed and given is None:
                how = "observe(outputs)" if name == "outputs" else "observe(loss=loss)"
                raise ValueError(f"{type(self).__name__} needs the {name} of a forward pass: call {how}.")
        if isinstance(outputs, Tensor) and (class_dim is not None or outputs.dim() > 2):
            if (found := known_class_dim(outputs, class_dim, loss, labels)) is not None:
                for recorded in (part.recorded for part in self._parts if part.recorded is not None):
                    recorded.recorder.note_class_dim(outputs, found)
            if needs.outputs and class_dim is None:
                check_class_dim(outputs, self.param_groups[0]["likelihood"], loss, labels, weights)
            outputs = classes_last(outputs, class_dim)
        rows = len(outputs) if isinstance(outputs, Tensor) and outputs.dim() else None
        if rows and known is not None and rows > known:
            self.warn_of_count(rows)
        if several := distributed.has_group():
            self._check_processes(rows)
        parts = self._observing if labels is None and weights is None else self._parts
        if not parts:
            return
        self._passes.begin_observation(self._parts)
        with distributed.unnoticed(outputs, loss) if several else nullcontext():
            for part in () if rows == 0 else parts:
                part.observe(outputs, loss, labels, weights)
        self._passes.end_observation(outputs, loss, labels, weights)

    def _check_processes(self, rows: int | None) -> None:
        """Called in a process group before rows are observed."""
        distributed.agree_on_seed(self)
        process_limits.refuse_empty(rows, self.independent)
        if not self.independent and (self.needs.outputs or self.needs.loss):
            joining.refuse_join(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim; discards recorded passes and draws, and what was observed for a step not taken."""
        stale = bool(self._parts) and self._passes.stale()
        super().zero_grad(set_to_none)
        for part in self._parts:
            part.zeroed(stale)
        if self._parts:
            if self._passes.current:
                self._passes.repeat(() if stale else self._parts)
            self._passes.zeroed(stale)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates weights and state from the gradients in `.grad`, which do not change.

        Args:
            closure: re-evaluates the model, calls backward and returns the loss. It is called once for each of
                `samples` draws, if gradients are computed at sampled weights, and the gradients are averaged. As in
                torch.optim, it sets gradients to zero itself: those that exist before are never discarded.

        Returns:
            The return value of the closure.
        """
        if self.attachment is not None or self.sampling or not all(group["train_mode"] for group in self.param_groups):
            self.require_training("step()")
        if closure is None and not self.state and not self._passes.observed and initial_state.is_requested(self):
            initial_state.create(self)
            return None
        if self._passes.lost or self._passes.forgotten:
            self._passes.check()
        for part in self._parts:
            part.prepare(closure)
        with self._passes.noticed() if closure is not None or distributed.has_group() else nullcontext():
            loss = evaluate(self, self._parts, closure) if closure is not None else self.share()
        groups = [{**group, "lr": current_lr(group)} for group in self.param_groups]
        active = [[p for p in group["params"] if p.grad is not None] for group in groups]
        options = [  # by name alone, if they are objects whose values may change unnoticed
            {k: v if type(v) in PLAIN or k in self.accepts else None for k, v in group.items() if k not in self.records}
            for group in groups
        ]
        if self.last_options != options:
            self.check_changes(groups)
            self.last_options, self.rule, self._prepared = options, self.rule_of(groups[0]), {}
        if any(p.grad.layout is not torch.strided for params in active for p in params):
            refuse_sparse(self, active)
        checked = any(group["nonfinite"] != "ignore" for group in groups)
        if not checked or not self._finite.skips(self, self._parts, active):
            with warned_of_interrupts(f"{type(self).__name__}.step()"):
                self._update(groups, active)
            if self._gathering:
                self.weights_changed()
            for part in self._parts:
                part.finish(closure, loss)
            self.finished()
            self._finite.steps += 1
            if self._finite.steps == self._finite.due:
                self._finite.look(self, active)
        for part in self._parts:
            part.reset()
        if self._parts:
            self._passes.stepped()
        return loss

    def _prepare(self, index: int, group: dict[str, Any]) -> Prepared:
        """What depends on the options of a group alone."""
        other = self.preconditioner.rule.slots(group) if self.preconditioner else ()
        found = self.scales(group), self.slots(group, self.rule), other
        values = [v for name, v in group.items() if name not in ("params", "param_names")]
        if all(type(v) in PLAIN for value in values for v in (value if type(value) is tuple else (value,))):
            self._prepared[index] = found
        return found

    def share(self) -> None:
        """Replaces what parts have collected by that of all processes that train this model."""
        if distributed.has_group() and not joining.trains_alone(self, self._parts):
            refuse = partial(joining.refuse_join, self)
            distributed.exchange(self._parts, self.param_groups[0].get("seed"), self.draws, before=refuse)
            joining.check_join(self)

    def _update(self, groups: Groups, active: list[list[Tensor]]) -> None:
        for index, (now, params) in enumerate(zip(groups, active)):
            if params and now["lr"] > 0 and not (now["lr"] == now["last_lr"] and now.get("unit_lr")):
                now |= rates_after(now)
                self._prepared.pop(index, None)
        directions = self.preconditioner.directions(groups, active) if self.preconditioner else {}
        evidence: dict[str, Mapping[Tensor, Tensor]] = {}
        for source in self.sources:
            evidence |= source.collect(groups, active)
        for index, now in enumerate(groups):
            now[PREPARED] = self._prepared.get(index) or self._prepare(index, now)
        layout = self._layout(groups, active, directions)
        every = [(owner, group, block) for owner, group, blocks in layout for block in blocks]
        elements = sum(block.elements for *_, block in every)
        numbers = [one.rule.begin(one.scalars(g, int(b.step) + 1), b.begins) for one, g, b in every]
        for group, now in zip(self.param_groups, groups):  # up to here, an error has changed no weight and no counter
            group |= {name: now[name] for name in RATES if name in now}
        for (owner, group, block), scalars in zip(every, numbers):
            block.step += 1
            block.begins = ()
            update = kernel_of(owner.rule, tuple(scalars), block.slots, tuple(evidence))
            axpy = None if owner is self else owner.rule.move.axpy_coefficients(scalars, block.slots)
            for rows in block.rows(directions, axpy, list(evidence.values())):
                kernels.run(update, list(scalars.values()), rows, group["fused"], elements)

    def _layout(
        self, groups: Groups, active: list[list[Tensor]], directions: Directions
    ) -> list[tuple[Any, dict[str, Any], list[Block]]]:
        """The blocks of each group, for parameters with and without a direction, and whose rule updates them."""
        jobs: list[Job] = []
        for group, params in zip(groups, active):
            _, slots, others = group[PREPARED]
            jobs.append((self, group, [p for p in params if p not in directions] if directions else params, slots))
            if self.preconditioner is not None:
                jobs.append((self.preconditioner, group, [p for p in params if p in directions], others))

        def initialise(owner: Any, group: dict[str, Any], params: list[Tensor]) -> list[tuple[str, ...]]:
            other = None if owner is self else owner
            late = initial_state.late_slots(self, group, params, other)
            self.initialise(group, params, other)
            return late

        return self._blocks.of(jobs, self.state, initialise)

    def initialise(
        self, group: Mapping[str, Any], params: list[Tensor], preconditioner: Preconditioner | None = None
    ) -> None:
        """Creates missing state tensors, of parameters that follow this optimizer's rule or its preconditioner's."""
        initial_state.initialise(self, group, params, preconditioner)

    def before_reading(self) -> None:
        self._finite.report(self, [group["params"] for group in self.param_groups], gradients=False)

    def nonfinite_error(self, message: str) -> Exception:
        return FloatingPointError(message)

    # --- groups and copies ---

    @property
    def sampling(self) -> bool:
        return self._drawing is not None and self._drawing.active

    def group_added(self) -> None:
        self.selected.append(self.selection(self.param_groups[-1]))
        self._bind()

    def state_loaded(self) -> None:
        self._build()
        if self._parts:
            self._passes.loaded(self.needs.outputs or self.needs.loss)

    def slots_of(self, p: Tensor, group: Mapping[str, Any]) -> tuple[str, ...]:
        if self.preconditioner is not None and self.preconditioner.covers(p):
            return self.preconditioner.rule.slots(group)
        return self.slots(group, self.rule_of(group))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "defaults" in state:  # a copy; load_state_dict() calls this too
            self._reset()
            self._build()

    # --- posterior ---

    def posterior(self, model: nn.Module, scale: float = 1.0, *, likelihood: Any = None) -> Posterior:
        """A copy of the belief about the model's weights, as a `Posterior`.

        Args:
            model: whose parameters the optimizer has. Other and frozen parameters without updates are constants.
            scale: multiplies variances. Choose it by held-out likelihood; docs/choosing.md says why. BayesBiNN divides
                lambda by it; SpikeSlab takes 1 alone.
            likelihood: of `predict`, such as `likelihoods.Gaussian(noise_scale)` for a regression; None for the
                optimizer's own option if it has one, else `"categorical"`.
        """
        return with_likelihood(self.build_posterior(model, scale), likelihood, self.param_groups[0])

    def build_posterior(self, model: nn.Module, scale: float) -> Posterior:
        """The posterior of `posterior`, with any likelihood."""
        return gaussian_posterior(self, model, scale)

    def joint_beliefs(self, names: Mapping[int, str], scale: float) -> Iterable[tuple[str, Joint]]:
        """Joint beliefs about several parameters, by the name of one of them; `names` maps ids to names."""
        return ()

    def variance_of(self, group: Mapping[str, Any], p: Tensor) -> Tensor:
        """The variance of each weight after the last step."""
        return filtered_variance(self, group, p)
