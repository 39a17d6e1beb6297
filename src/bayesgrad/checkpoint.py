"""`CheckedOptimizer`, the part of `BeliefOptimizer` beside its step: param groups, state dicts, copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayesgrad import likelihoods, shards
from bayesgrad.constraints import FRACTION, FRACTIONS, NONNEGATIVE, OPTIONAL_BOOLEAN, POSITIVE, Constraint, one_of
from bayesgrad.layers.network import evaluation_mode, named_groups, unwrap
from bayesgrad.layers.running_statistics import estimated, warn_of_statistics
from bayesgrad.parts import Part, entries
from bayesgrad.saved_state import NAMES, check_rule, check_saved, copied, in_order, pairs, unshared, written_names
from bayesgrad.schedule import RATES, warn_above_reference
from bayesgrad.warning import warn

NONFINITE = ("ignore", "raise", "skip")
DRAWS = "draws"  # in the first group: the number of random draws so far
NOTES = (*RATES, "rule", "train_mode", "informed", NAMES)  # in groups, about a run of one optimizer, beside `records`
TRAINING_WEIGHT = "training_weight"  # in the state of a parameter in evaluation mode


class CheckedOptimizer(torch.optim.Optimizer):
    """A torch optimizer with checked hyperparameters, whose state is restored bit for bit or refused.

    `accepts` maps the name of a hyperparameter to the values that it may have; those in `common` must be the same in
    all groups, and those in `fixed`, like words and truth values in `common`, cannot change during a run. Those in
    `of_all_groups` are read in the first group; a later one has the same, or is refused. A `seed` of None is replaced,
    when the optimizer is built, by a number that is drawn from torch's global generator and saved with the state:
    `torch.manual_seed` determines it, and a resumed run continues its draws. In a process group it is that of rank 0,
    and all ranks have to build the optimizer. Groups have a few entries beside hyperparameters: `base_lr`, the initial
    lr, and `max_lr`, if a scheduler sets it (see `bayesgrad.schedule`); `last_lr`, the last positive lr; `unit_lr`, the
    reference in the first step with a positive lr, 0 before; `draws` (of the first group), the number of random draws
    so far; `rule`, the name of the class; `train_mode`, whether weights are those to train with.

    Args:
        params: as for any torch optimizer; with a model, parameters or groups of it, or None for all.
        defaults: hyperparameters.
        model: for classes with `takes_model`.
    """

    takes_model: ClassVar[bool] = False
    kept: ClassVar[tuple[str, ...]] = (  # attributes that a copy has
        *("model", "warned", "independent", "draws_differ", "_statistics"),
    )
    common: ClassVar[tuple[str, ...]] = ()
    fixed: ClassVar[tuple[str, ...]] = ()  # options that decide what state tensors mean, or which shapes they have
    of_all_groups: ClassVar[tuple[str, ...]] = ("samples", "seed", "likelihood", "hessian", "probes")
    records: ClassVar[tuple[str, ...]] = (DRAWS,)  # what steps write into groups, beside options
    scaled_by_lr: ClassVar[tuple[str, ...]] = ()  # options that are given for a reference lr, see `schedule`
    _raised: bool = False  # whether a warning has said that lr raises other options
    _parts: tuple[Part, ...] = ()  # sources and preconditioner
    _gathering: Sequence[nn.Module] = ()  # modules whose forward passes gather parameters from other processes
    _statistics: tuple[tuple[Tensor, Tensor], ...] = ()  # buffers of the model and their values before `eval()`
    _evaluated: tuple[tuple[Tensor, str], ...] = ()  # weights after `eval()`, and their fingerprints
    attachment: Any = None  # by which passes of a model draw and observe, see `bayesgrad.integrations.attach`
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
        "max_lr": POSITIVE,
        "unit_lr": NONNEGATIVE,
    }

    def __init__(self, params: Any, defaults: dict[str, Any], model: Any) -> None:
        self.model: nn.Module | None = None
        self.warned: set[Any] = set()  # parameters that a warning has named, and options
        self.selected: list[dict[str, Any]] = []  # of each group, the options that cannot change
        if self.takes_model:
            if not isinstance(model, nn.Module):
                name = type(self).__name__
                raise TypeError(
                    f"{name} takes the model, not its parameters, got {type(model).__name__}: "
                    f"use {name}(model, params=...)."
                )
            self.model = unwrap(model)
            params = named_groups(self.model, params)
        elif isinstance(params, nn.Module):
            params = params.named_parameters()
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group, as in torch.optim; omitted hyperparameters have their default values."""
        self.require_mean("add_param_group()")
        if self.model is not None:
            (param_group,) = named_groups(self.model, [param_group])
        if "rule" in param_group:  # another optimizer has this dict
            param_group = {k: v for k, v in param_group.items() if k not in (*NOTES, *self.records)}
        shared = self.param_groups[0] if self.param_groups else {}
        for name in shared.keys() & set(self.of_all_groups):
            param_group.setdefault(name, shared[name])
        given = {**self.defaults, **param_group}
        self.check_group(given)
        if "likelihood" in given:
            param_group["likelihood"] = given["likelihood"] = likelihoods.named(given["likelihood"]).name  # for files
        if shared:
            self._check_common(given, (*self.common, *self.of_all_groups))
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for position, p in enumerate(group["params"]):
            if p.is_complex():
                self.param_groups.pop()
                raise ValueError(
                    f"parameter {position} is {p.dtype}: complex weights are not supported, keep a real parameter "
                    "and use torch.view_as_complex in the forward pass."
                )
        if pair := overlapping([p for group in self.param_groups for p in group["params"]]):
            names = " and ".join(map(self.name_of, pair))
            self.param_groups.pop()
            raise ValueError(
                f"{names} share memory, so the update of one would undo that of the other: tie weights by using one "
                "parameter in both places, or pass one of them only."
            )
        group.setdefault("base_lr", float(group["lr"]))
        for name, value in self._bookkeeping(group).items():
            group.setdefault(name, value)
        self.group_added()

    def _check_common(self, group: Mapping[str, Any], names: Iterable[str]) -> None:
        for name in names:
            first = self.param_groups[0].get(name)
            if group.get(name) != first:
                raise ValueError(f"{name} must be the same in all groups, got {group.get(name)!r} beside {first!r}.")

    def _bookkeeping(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """What a group has beside hyperparameters."""
        first = self.param_groups[0]
        mode = first.get("train_mode", True)
        found = {"last_lr": group["base_lr"], "unit_lr": 0.0, DRAWS: 0}
        return found | {"rule": type(self).__name__, "train_mode": mode}

    def group_added(self) -> None:
        """Called after a group was added."""

    def state_loaded(self) -> None:
        """Called after a state was loaded."""

    def weights_changed(self) -> None:
        """Called after weights were changed: copies that a forward pass has gathered from other processes are old."""
        for module in self._gathering:
            module.reshard()  # pyright: ignore[reportCallIssue]

    def before_reading(self) -> None:
        """Called before weights or state are read out."""

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Raises if a hyperparameter is not valid."""
        for name, (words, holds) in self.accepts.items():
            if name not in group:
                continue
            try:
                good = bool(holds(group[name]))
            except (TypeError, ValueError, RuntimeError, OverflowError):
                good = False
            if not good:
                raise ValueError(f"{name} must be {words}, got {group[name]!r}.")
        self.check_options(group)

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Raises if the hyperparameters of a group do not fit together; each of them is valid."""

    def selection(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a group that cannot change during a run."""
        kinds = {name: group[name] for name in self.common if isinstance(group.get(name), (str, bool))}
        return kinds | {name: group[name] for name in self.fixed}

    def check_changes(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Called in a step if options of param groups have changed: raises if they are not valid any more."""
        for group, built in zip(groups, self.selected):
            self.check_group(group)
            for name in (name for name, value in built.items() if group[name] != value):
                raise ValueError(
                    f"{name} cannot change during a run, from {built[name]!r} to {group[name]!r}: build a new "
                    "optimizer."
                )
            self._check_common(group, (*self.common, *self.of_all_groups))
            self._raised = self._raised or warn_above_reference(type(self).__name__, group, self.scaled_by_lr)

    def warn_of_count(self, examples: int) -> None:
        """Warns once of a batch with more examples than there are data; a loss that is a sum may have num_data=1."""
        if "num_data" not in self.warned:
            self.warned.add("num_data")
            warn(
                f"num_data={self.param_groups[0]['num_data']:g} is less than the {examples} examples of a batch: it is "
                "the number of training examples, and the loss is a mean over examples. Pass num_data=len(dataset).",
            )

    @property
    def draws(self) -> int:
        """The number of random draws so far."""
        return self.param_groups[0][DRAWS]

    @draws.setter
    def draws(self, number: int) -> None:
        self.param_groups[0][DRAWS] = number

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim, but with copies of all tensors: later steps do not change it.

        It is refused inside `sampled()`, where a state dict of the model would hold the sample.
        """
        self.require_mean("state_dict()")
        self.before_reading()
        saved = super().state_dict()
        saved["state"] = {key: copied(e) if isinstance(e, dict) else e for key, e in saved["state"].items()}
        saved["param_groups"] = [copied(group) for group in saved["param_groups"]]
        for group in saved["param_groups"]:
            group[NAMES] = written_names(group, saved["state"])
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a run bit for bit, or raises and changes nothing.

        Unlike torch.optim, state keeps its dtype (float32 beside bfloat16 weights) and is copied. Parameters with the
        same names in both are matched by name within their groups; other groups are refused. An optimizer that uses the
        layers of its model refuses other names.
        """
        self.require_training("load_state_dict()")
        if not isinstance(state_dict, dict):
            raise ValueError(f"the state of {type(self).__name__} must be a dict, got {type(state_dict).__name__}.")
        check_rule(self, state_dict)
        loaded: dict[str, Any] = {}

        def check(_: Any, given: dict[str, Any]) -> None:
            self.check_loaded(given)
            loaded.update(given)

        ordered = in_order(self, state_dict)
        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(ordered)
        finally:
            handle.remove()
        on_cpu = self.on_cpu()
        for p, entry in pairs(self.param_groups, loaded):
            for name, value in entry.items():
                value = value.detach().to("cpu" if name in on_cpu else p.device, copy=True)
                elementwise = value.shape == p.shape and name not in on_cpu and not self.has_own_shape(name)
                self.state[p][name] = shards.placed_like(value, p) if elementwise else value
        for group in self.param_groups:
            group.pop(NAMES, None)
        self.state_loaded()

    def is_partial(self, entry: Mapping[str, Tensor]) -> bool:
        """Whether an entry without all slots is valid: that of a parameter that has not taken a step."""
        return set(entry) <= {TRAINING_WEIGHT} or ("step" not in entry and self.model is not None)

    def on_cpu(self) -> set[str]:
        """The names of state tensors that Python reads."""
        return {"step", *(name for part in self._parts for name in part.on_cpu)}

    def has_own_shape(self, name: str) -> bool:
        """Whether a state tensor of this name belongs to a layer or to the network, whatever shape it has."""
        return any(part.has_own_shape(name) for part in self._parts)

    def slots_of(self, p: Tensor, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The state tensors that a parameter must have after its first step."""
        return ()

    def check_loaded(self, saved: Mapping[str, Any]) -> None:
        """Raises ValueError if `saved` is not a state of this optimizer."""
        check_saved(self, saved)
        for part in self._parts:
            part.check_loaded(saved)

    def __getstate__(self) -> dict[str, Any]:
        self.require_mean("a copy")
        kept = super().__getstate__()
        state = {key: unshared(e) if isinstance(e, dict) else e for key, e in kept["state"].items()}
        return {**kept, "state": defaultdict(dict, state), **{name: getattr(self, name) for name in self.kept}}

    # --- training and evaluation ---

    def evaluation_weights(self) -> Mapping[Tensor, Tensor]:
        """Parameter -> its weights in evaluation mode, where they differ from those to train with."""
        return {}

    @property
    def training(self) -> bool:
        """Whether the weights are those to train with."""
        return all(group["train_mode"] for group in self.param_groups)

    def spread_in_training(self) -> float:
        """How much weights vary in training around those to evaluate with, as a fraction of their mean square.

        Only for rules whose means are so far from the samples that running statistics of BatchNorm do not fit them.
        """
        return 0.0

    @torch.no_grad()
    def eval(self, model: nn.Module | None = None, *, statistics: Any = None) -> None:
        """Sets the weights to those to evaluate the model with: their posterior mean, where it is another value.

        Call `train()` before the next step. A checkpoint of model and optimizer may be written in either mode.

        Args:
            model: the model to evaluate, if the optimizer was built from parameters. One with BatchNorm, whose running
                statistics do not fit the weights to evaluate with, gives a warning once, unless there are `statistics`.
            statistics: training inputs, or a loader as for torch.optim.swa_utils.update_bn, from which the model's
                running statistics are estimated at these weights; `train()` restores the former ones. They are not in
                a state dict: after loading one that was written with `statistics`, the estimated ones stay.
        """
        model = self.model if model is None else unwrap(model)
        if statistics is not None and model is None:
            raise ValueError("statistics= needs the model whose running statistics to estimate: eval(model, ...).")
        switched = self.training
        if switched:
            self.require_mean("eval()")
            self.before_reading()
            for p, mean in self.evaluation_weights().items():
                self.state[p][TRAINING_WEIGHT] = p.detach().clone()
                p.copy_(mean)
                self._evaluated += ((p, fingerprint(p)),)
            self.weights_changed()
            for group in self.param_groups:
                group["train_mode"] = False
        if statistics is not None:
            try:
                self._estimate_statistics(model, statistics)
            except BaseException:
                if switched:
                    self.train()
                raise
        elif model is not None and not self._statistics:
            remedy = "pass training inputs, or a loader, to optimizer.eval(model, statistics=)"
            warn_of_statistics(model, self.spread_in_training, remedy)

    def _estimate_statistics(self, model: Any, statistics: Any) -> None:
        """Sets the running statistics of the model to those of its weights, and keeps the former ones for `train()`."""
        with evaluation_mode(model):
            fresh = estimated(model, {}, statistics)
        for name, value in fresh.items():
            buffer = model.get_buffer(name)
            if not any(buffer is other for other, _ in self._statistics):
                self._statistics = (*self._statistics, (buffer, buffer.clone()))
            buffer.copy_(value)

    @torch.no_grad()
    def train(self) -> None:
        """Sets the weights to those to train with, bit for bit as they were before `eval()`.

        Weights that were changed since, as by loading a checkpoint into the model, are kept, with a warning.
        """
        changed = [p for p, seen in self._evaluated if seen != fingerprint(p)]
        self._evaluated, kept = (), set(map(id, changed))
        for p, entry in entries(self):
            trained = entry.pop(TRAINING_WEIGHT, None)
            if trained is not None and id(p) not in kept:
                p.copy_(trained)
        if changed:
            warn(
                f"{self.name_of(changed[0])} was changed since eval(): train() keeps the new weights, in place of "
                "those before eval(). Call train() before loading a checkpoint.",
            )
        self.weights_changed()
        for buffer, value in self._statistics:
            buffer.copy_(value)
        self._statistics = ()
        for group in self.param_groups:
            group["train_mode"] = True

    @property
    def sampling(self) -> bool:
        """Whether the weights are a sample now, inside `sampled()`."""
        return False

    def require_mean(self, what: str) -> None:
        """Raises inside `sampled()`; ends a draw that a forward pass of an attached model began."""
        if self.attachment is not None:
            self.attachment.leave()
        if self.sampling:
            raise RuntimeError(
                f"{what} needs the mean of the weights, which are a sample now: leave optimizer.sampled() before it."
            )

    def require_training(self, what: str) -> None:
        """Raises if the weights are not those to train with."""
        self.require_mean(what)
        if not self.training:
            raise RuntimeError(f"{what} needs the weights to train with: call optimizer.train() before it.")

    @contextmanager
    def mode(self, training: bool) -> Iterator[None]:
        """A context in which the weights are those of one mode."""
        before = self.training
        self.train() if training else self.eval()
        try:
            yield
        finally:
            self.train() if before else self.eval()

    # --- words ---

    def name_of(self, p: Tensor) -> str:
        """A parameter in words, for messages."""
        for index, group in enumerate(self.param_groups):
            for position, other in enumerate(group["params"]):
                if other is p and "param_names" in group:
                    return f"parameter {group['param_names'][position]!r}"
                if other is p:
                    return f"parameter {position} of group {index} (shape {tuple(p.shape)})"
        return f"a parameter of shape {tuple(p.shape)}"


def fingerprint(p: Tensor) -> str:
    """Sum and sum of squares as text: equal for equal weights, also with NaN, and hardly ever for others."""
    values = shards.local(p.detach()).double()
    return f"{float(values.sum())!r} {float(values.square().sum())!r}"


def overlapping(params: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Two of these parameters that have an element in common, as after `a.data = b.data`; None if there are none."""
    spans = []  # memory, and the first and last byte in it
    for p in dict.fromkeys(params):  # torch warns of a parameter that is given twice
        ordinary = type(p) in (Tensor, nn.Parameter) and p.layout is torch.strided  # subclasses may have no memory
        if ordinary and p.numel() and p.untyped_storage().data_ptr():
            length = 1 + sum((size - 1) * stride for size, stride in zip(p.shape, p.stride()))
            first = p.storage_offset() * p.element_size()
            spans.append((p.untyped_storage().data_ptr(), first, first + length * p.element_size() - 1, p))
    spans.sort(key=lambda span: span[:3])
    for i, (memory, first, last, p) in enumerate(spans):
        for j in range(i + 1, len(spans)):
            other, start, end, q = spans[j]
            if other != memory or start > last:
                break
            used = torch.zeros((max(last, end) + 1 - first) // p.element_size(), dtype=torch.uint8)
            used.as_strided(p.shape, p.stride()).fill_(1)
            offset = (start - first) // p.element_size()
            if p.dtype != q.dtype or bool(used.as_strided(q.shape, q.stride(), offset).any()):
                return p, q
    return None


def settings(arguments: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The hyperparameters among the arguments of a constructor, given as its `locals()`."""
    others = ("self", "__class__", "params", "model", "prior")
    return {name: value for name, value in arguments.items() if name not in others} | more
