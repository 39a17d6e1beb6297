"""The parts of an optimizer beside its rule: sources of evidence and preconditioners."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from bayesgrad import distributed, likelihoods, process_limits, shards
from bayesgrad.directions import Directions
from bayesgrad.layers.call import LayerCall, Pair
from bayesgrad.layers.examples import RowLayouts
from bayesgrad.layers.layout import ForwardPass
from bayesgrad.layers.observed import loss_weights, residual
from bayesgrad.noise import generator_of
from bayesgrad.rules.transition import Static
from bayesgrad.rules.update import NaturalStep, UpdateRule

Groups = list[dict[str, Any]]
Noise = Mapping[Any, Tensor] | Callable[[Tensor], Tensor]
Evidence = dict[str, Mapping[Tensor, Tensor]]


class Needs(NamedTuple):
    """What a training loop has to do for an optimizer beside calling `backward()` and `step()`.

    Args:
        draws: whether forward and backward passes must run inside `sampled()`.
        outputs: whether `observe` needs the outputs of the model.
        loss: whether `observe` needs the loss.
        model: whether the optimizer was built from the model.
    """

    draws: bool = False
    outputs: bool = False
    loss: bool = False
    model: bool = False


def weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method that does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        assert bound is not None, "the object of this method was deleted"
        return bound(*args)

    return call


class Host(Protocol):
    """What a part may use of the optimizer that it belongs to; `BeliefOptimizer` explains each of them."""

    model: nn.Module | None
    param_groups: list[dict[str, Any]]
    state: Any
    sources: tuple[Source, ...]
    independent: bool  # whether other processes train other models
    draws_differ: bool  # whether other processes draw other weights
    warned: set[Any]  # parameters that a warning has named, and options
    last_options: list[dict[str, Any]]  # at the last step, or at this one; a new list when options change

    @property
    def draws(self) -> int: ...

    @draws.setter
    def draws(self, number: int) -> None: ...

    def initialise(self, group: Mapping[str, Any], params: list[Tensor]) -> None: ...

    def name_of(self, p: Tensor) -> str: ...

    def nonfinite_error(self, message: str) -> Exception: ...

    def weights_changed(self) -> None: ...


def entries(optimizer: Host | torch.optim.Optimizer) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """The parameters that have state, and their state; users may store other objects under other keys."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if entry := optimizer.state.get(p):
            yield p, entry


class Part:
    """What sources and preconditioners have in common. Methods that a part does not need do nothing.

    Attributes:
        needs: what the training loop has to do for this part.
        observes: whether `observe` does anything without labels and weights.
        counts_losses: whether labels and weights of `observe`, which is not needed otherwise, say which losses count.
        whole: what passes with whole parameters give it, as with `fully_shard`, in words; None if parts of parameters
            (DTensors) of any kind will do.
        on_cpu: names of its tensors in the optimizer's state that Python reads, which stay on the CPU.
        optimizer: the optimizer that it belongs to; its groups and state are read there.
        sharded: whether each process has a part of parameters.
        recorded: the layers of the model (`RecordedLayers`), for parts that use them.
        observed: what `observe` has collected since the last step, for parts that keep it as a list.
    """

    needs: Needs = Needs()
    observes: bool = False
    counts_losses: bool = False
    whole: str | None = "the layers of the model"
    on_cpu: tuple[str, ...] = ()
    optimizer: Host
    sharded: bool = False
    recorded: Any = None
    observed: list[Any]

    def bind(self, optimizer: Host) -> None:
        """Called when the optimizer is built, copied or loaded, and when a param group was added.

        A part does not keep its optimizer alive: else memory and hooks would be freed late, by the garbage collector.
        """
        self.optimizer = weakref.proxy(optimizer)
        self.sharded = any(shards.is_shard(p) for group in optimizer.param_groups for p in group["params"])

    def observe(self, outputs: Any, loss: Any, labels: Any, weights: Any) -> None:
        """Collects from a forward pass, before `loss.backward()`; arguments are those of `BeliefOptimizer.observe`."""

    def output_directions(
        self, outputs: Tensor, labels: Tensor | None, weights: Tensor | None, exact: bool = False, group: int = 1
    ) -> Iterator[Tensor]:
        """Vectors s of the outputs, whose ss' are summed: one for all losses, or, for the exact Fisher, several.

        Args:
            labels: at which the loss is differentiated; None for sampled ones.
            weights: how often each loss counts.
            exact: whether to sum over all labels if none are given.
            group: the number of rows of the outputs that are one example, whose losses have directions of their own.
        """
        likelihood = likelihoods.named(self.optimizer.param_groups[0]["likelihood"])
        if labels is not None:
            found = iter([residual(likelihood, outputs, labels)])
        elif exact:
            examples = outputs.unflatten(0, (-1, group)) if group > 1 else outputs
            found = (root.reshape(outputs.shape) for root in likelihood.hessian_roots(examples))
        else:
            seed, draw = self.optimizer.param_groups[0]["seed"], self.optimizer.draws
            self.optimizer.draws += 1
            drawn = (_drawn_rows if self.processes > 1 else _draw)(likelihood, outputs, seed, draw)
            found = iter([likelihood.residual(outputs, drawn, check=False)])
        if weights is None:  # ignored labels have no residual
            return found
        each = loss_weights(likelihood, outputs, labels, weights)
        return (direction * each.sqrt() for direction in found)  # pyright: ignore[reportOptionalMemberAccess]

    def observed_pass(
        self, outputs: Tensor, labels: Tensor | None, weights: Tensor | None
    ) -> tuple[ForwardPass, float]:
        """The shapes of the forward pass of these outputs, and the part of its losses that is observed."""
        likelihood = likelihoods.named(self.optimizer.param_groups[0]["likelihood"])
        known, shape, share = self.recorded.recorder.pass_of(outputs), outputs.shape, 1.0
        if known is not None and known.outputs[1:] == shape[1:] and known.outputs[0] > shape[0]:
            shape, share = known.outputs, shape[0] / known.outputs[0]
        each = loss_weights(likelihood, outputs, labels, weights)
        share = share if each is None else share * float(each.mean())
        if not share > 0:
            raise ValueError("observe() needs at least one loss that counts: all labels are ignored, or have weight 0.")
        arguments = torch.Size() if known is None else known.arguments
        class_dim = -1 if likelihood.has_classes else None
        return ForwardPass(shape, arguments, class_dim, single=likelihood.has_classes), share

    def note_loss(self, loss: Any) -> None:
        """Called with the loss that a closure returns."""

    def zeroed(self, stale: bool) -> None:
        """Called after `zero_grad()`.

        Args:
            stale: whether gradients were computed since the last observation: it belongs to a step that was not taken.
        """
        self.forget(stale)
        if self.recorded is not None:
            self.recorded.marks.zeroed()

    def forget(self, observed: bool) -> None:
        """Discards what backward passes have given, and what was observed if `observed` is True."""
        if observed:
            self.observed = []

    def receive(self, call: LayerCall, restarted: bool) -> Pair | None:
        """Called with each call of a recorded layer in a backward pass, for parts that pass it to `RecordedLayers`.

        Args:
            call: with the layer's input and error.
            restarted: whether what was received before for the layer's parameters belongs to discarded gradients.

        Returns:
            The gradients of weight and bias to use instead of the layer's own; None to use those.
        """
        return None

    def prepare(self, closure: Callable[[], Any] | None) -> None:
        """Raises if a step cannot be taken; called before anything changes."""
        if distributed.has_group() and not self.sharded:
            shards.refuse_replaced(self.optimizer)
        if self.recorded is not None:
            self.recorded.check_model()

    @property
    def processes(self) -> int:
        """How many processes train this model, with the batch of each step divided between them."""
        alone = self.optimizer.independent or not distributed.has_group()
        return 1 if alone else distributed.joint_processes()

    def row_layouts(self) -> RowLayouts:
        """For layers of the model; processes that gather parameters in a pass run the same passes."""
        params = [p for group in self.optimizer.param_groups for p in group["params"]]

        def anywhere(flag: bool) -> bool:
            return bool(shards.any_process(torch.tensor(flag, device=params[0].device), params))

        return RowLayouts(anywhere=anywhere if any(map(shards.is_shard, params)) else bool)

    def share(self, exchange: distributed.Exchange) -> None:
        """Replaces what was collected from the batch of this process by that of all processes, before it is read.

        Called once before a step in several processes; for each draw of a closure, if there are several. What is added
        to the exchange may depend on state and options, which all processes have alike, not on the batch.
        """

    def nonfinite(self, index: int, params: list[Tensor]) -> str | None:
        """What was collected for the parameters of a group and is not finite, in words; None if all is finite."""
        return None

    def collect(self, groups: Groups, active: list[list[Tensor]]) -> Evidence:
        """What the curvature needs beside gradients: name -> parameter -> tensor, for parameters with a gradient.

        Args:
            groups: the param groups, with lr as a number.
            active: the parameters of each group that have a gradient.
        """
        return {}

    def reset(self) -> None:
        """Discards what was collected; called after every step, and after one that was skipped."""
        self.forget(observed=True)

    def begin_draws(self) -> None:
        """Called before the draws of a closure: forgets those of a closure that raised."""

    def store_draw(self, samples: int) -> None:
        """Stores what one of several draws of a closure gives beside gradients."""

    def merge_draws(self, samples: int) -> None:
        """Replaces what was collected by the average over the stored draws; gradients are averaged already."""

    def finish(self, closure: Callable[[], Any] | None, loss: Any) -> None:
        """Called at the end of a step."""

    def initialise_state(self) -> None:
        """Creates the part's tensors in the optimizer's state, with the shapes that they have after a step."""

    def has_own_shape(self, name: str) -> bool:
        """Whether the part's tensor of this name in the optimizer's state is not one number for each weight."""
        return False

    def check_loaded(self, saved: Mapping[str, Any]) -> None:
        """Raises ValueError if a state dict does not fit."""

    def close(self) -> None:
        """Removes hooks."""
        if self.recorded is not None:
            self.recorded.close()


def _draw(likelihood: likelihoods.Likelihood, outputs: Tensor, seed: int, draws: int) -> Tensor:
    """Labels sampled from the model's predictions; a function of the seed and the number of earlier draws."""
    return likelihood.sample(outputs, generator_of(seed, draws))


def _drawn_rows(likelihood: likelihoods.Likelihood, outputs: Tensor, seed: int, draws: int) -> Tensor:
    """As `_draw`, if other processes have other rows: each label is what one process would draw for all."""
    before, generator = distributed.position(outputs), generator_of(seed, draws)
    # These take one number of the generator for each label, in order. Others are given the outputs of all processes.
    labels = {likelihoods.Categorical: outputs.shape[1:-1], likelihoods.Bernoulli: outputs.shape[1:]}
    if (shape := labels.get(type(likelihood))) is not None:
        torch.rand(before * shape.numel(), dtype=torch.float64, generator=generator)
        return likelihood.sample(outputs, generator)
    return likelihood.sample(distributed.gather(outputs.detach()), generator)[before : before + len(outputs)]


class Source(Part):
    """Collects evidence for the curvature beside `.grad`: draws of weights, labels, Hessians, per-example squares.

    Attributes:
        active: whether weights are a sample now.
    """

    active: bool = False

    @property
    def drawing(self) -> bool:
        """Whether weights are a sample now, in training."""
        return False

    def draw(self, noise: Noise | None) -> AbstractContextManager[None]:
        """A context in which weights are a sample; of sources with `needs.draws`."""
        raise NotImplementedError(f"{type(self).__name__} does not draw weights.")


class Preconditioner(Part, ABC):
    """A belief that does not factorise over elements: it turns gradients into directions.

    The elementwise step of a parameter with a direction uses that direction in place of its gradient, by `rule`. All
    other parameters follow the rule of the optimizer.
    """

    rule: ClassVar[UpdateRule] = UpdateRule(None, Static(), NaturalStep(heavy_ball=True))

    @abstractmethod
    def covers(self, p: Tensor) -> bool:
        """Whether the state of this parameter is that of a parameter with directions."""

    @abstractmethod
    def directions(self, groups: Groups, active: list[list[Tensor]]) -> Directions:
        """The preconditioned gradients, by parameter."""

    def step_scale(self, group: Mapping[str, Any]) -> float:
        return float(group["lr"])

    def scalars(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        """As in `BeliefOptimizer`; directions are already damped."""
        return self.rule.scalars({**group, "damping": 0.0}, step, self.step_scale(group))


def refuse_processes(optimizer: Host, parts: Iterable[Part]) -> None:
    """Raises if other processes train the same model, or have parts of it, and a part does not support it."""
    name, params = optimizer.__class__.__name__, [p for group in optimizer.param_groups for p in group["params"]]
    for part in parts:
        if part.whole is not None:
            processes = 1 if optimizer.independent else distributed.joint_processes()
            shards.refuse(name, part.whole, params, processes)
        if part.needs.draws and not optimizer.independent:
            process_limits.refuse_shards(name, params)
