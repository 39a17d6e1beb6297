"""The model of a posterior: its parameters by name, and its outputs as a function of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.running_statistics import estimated
from bayesgrad.layers.stateless import functional_call

WRAPPED = "_wrapped"  # the model inside of an `Adapter`


@dataclass(frozen=True, eq=False)
class Network:
    """A model's outputs for given inputs, as a function of its weights.

    Args:
        model: without wrappers.
        inputs: its arguments.
        statistics: training inputs or a loader, from which BatchNorm's statistics are estimated; None for the running
            statistics.
        chunk: the number of inputs that are processed at once; None for all.
    """

    model: nn.Module
    inputs: tuple[Tensor, ...]
    statistics: Any = None
    chunk: int | None = None

    def __call__(self, weights: Mapping[str, Tensor]) -> Tensor:
        """The outputs for all inputs with these weights."""
        run = self.at(weights)
        if self.chunk is None or len(self.inputs[0]) <= self.chunk:
            return run(*self.inputs)
        return torch.cat([run(*parts) for parts in zip(*[x.split(self.chunk) for x in self.inputs])])

    def at(
        self, weights: Mapping[str, Tensor], statistics: Mapping[str, Tensor] | None = None
    ) -> Callable[..., Tensor]:
        """The model as a function of inputs, with these weights by name and its own values for all others.

        Args:
            weights: by name.
            statistics: of BatchNorm for these weights; None to estimate them here.
        """
        found = self.estimated_statistics(weights) if statistics is None else statistics
        values = {**with_full_names(self.model, weights), **found}

        def run(*inputs: Tensor) -> Tensor:
            own = {name: buffer.clone() for name, buffer in self.model.named_buffers() if name not in values}
            found = functional_call(self.model, {**own, **values}, inputs)  # the model may change buffers in place
            return found.to(compute_dtype(found.dtype))  # half precision would not suffice for averages

        return run

    def estimated_statistics(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """BatchNorm's buffers by name, estimated with these weights; empty where running statistics are used."""
        if self.statistics is None:
            return {}
        return estimated(self.model, with_full_names(self.model, weights), self.statistics)


def unwrap(model: nn.Module) -> nn.Module:
    """The model without the wrappers of torch.compile and data parallelism."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while isinstance(model, wrappers) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, wrappers) else model._orig_mod  # pyright: ignore
    return model


def clean_name(name: str) -> str:
    """A parameter's or module's name without the prefixes of compiled submodules and of an `Adapter`."""
    return name.replace("_orig_mod.", "").removeprefix(f"{WRAPPED}.")


def with_full_names(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values of parameters by the names that `functional_call` expects."""
    names = {clean_name(name): name for name, _ in model.named_parameters()}
    return {names[name]: value for name, value in values.items()}


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's parameters by their names without wrappers."""
    return {clean_name(name): parameter for name, parameter in unwrap(model).named_parameters()}


def named_groups(model: nn.Module, params: Any) -> list[dict[str, Any]]:
    """Param groups of (name, parameter) pairs, from parameters, named parameters or groups; None for all."""
    names = {id(p): name for name, p in parameters_of(model).items()}
    given: list[Any] = list(parameters_of(model).values()) if params is None else list(params)
    if not given:
        raise ValueError("optimizer got an empty parameter list")
    groups = given if isinstance(given[0], dict) else [{"params": given}]
    named = []
    for group in groups:
        some = group["params"]
        members: list[Any] = [some] if isinstance(some, Tensor) else list(some)
        members = [p[1] if isinstance(p, tuple) else p for p in members]
        for p in members:
            if id(p) not in names:
                raise ValueError(
                    f"params must be parameters of the model, got one of shape {tuple(p.shape)} that is not."
                )
        named.append({**group, "params": [(names[id(p)], p) for p in members]})
    return named


def matching_parameters(model: nn.Module, shapes: Mapping[str, torch.Size], whose: str) -> dict[str, nn.Parameter]:
    """The model's parameters with these names, which must have these shapes.

    Args:
        whose: names and shapes, for the error.
    """
    found = parameters_of(model)
    for name, shape in shapes.items():
        if name not in found:
            raise ValueError(f"the {whose} has a parameter {name!r} that the model lacks: build the same architecture.")
        if found[name].shape != shape:
            raise ValueError(
                f"parameter {name!r} has shape {tuple(found[name].shape)} in the model and {tuple(shape)} in the "
                f"{whose}: build the same architecture."
            )
    return {name: found[name] for name in shapes}


def architecture(model: nn.Module) -> dict[str, list[int]]:
    """The shape of each parameter."""
    return {name: list(p.shape) for name, p in parameters_of(model).items()}


def check_architecture(model: nn.Module, expected: Mapping[str, list[int]]) -> None:
    """Raises if a model's parameters do not have the expected names and shapes."""
    found = architecture(model)
    shapes = [
        f"{n!r} with shape {found[n]} instead of {s}" for n, s in expected.items() if n in found and found[n] != s
    ]
    wrong = [
        *[f"lacks {name!r}" for name in expected if name not in found],
        *[f"has the extra parameter {name!r}" for name in found if name not in expected],
        *[f"has {shape}" for shape in shapes],
    ]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"the model does not have the architecture of the posterior: it {', '.join(wrong[:3])}{more}.")


@contextmanager
def temporary_weights(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Sets parameters, or buffers, to these values within the context, and restores them bit for bit afterwards."""
    saved = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(values[name])
        yield
    finally:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(saved[name])


@contextmanager
def requires_grad_only(model: nn.Module, chosen: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Sets requires_grad for these parameters alone within the context, and restores it afterwards."""
    flags = [(p, p.requires_grad) for p in model.parameters()]
    own = {id(p) for p in chosen.values()}
    try:
        for p, _ in flags:
            p.requires_grad_(id(p) in own)
        yield
    finally:
        for p, flag in flags:
            p.requires_grad_(flag)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Sets evaluation mode within the context, and restores each module's mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
