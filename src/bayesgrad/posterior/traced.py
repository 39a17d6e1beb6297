"""Predictions as modules that consist of tensor operations alone, for `torch.export`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from bayesgrad.belief import Belief, Joint
from bayesgrad.layers.network import Network
from bayesgrad.likelihoods import Likelihood
from bayesgrad.precision import LowRank, Rescaled


def traced_average(network: Network, weights: Sequence[Mapping[str, Tensor]], reading: Likelihood) -> nn.Module:
    """The prediction averaged over these weights."""

    several = weights, [network.estimated_statistics(own) for own in weights]
    stacked = [{name: torch.stack([own[name] for own in some]) for name in some[0]} for some in several]

    def predict(*inputs: Tensor) -> Any:
        if any(stacked):
            outputs = vmap(lambda own, statistics: network.at(own, statistics)(*inputs))(*stacked)
        else:
            outputs = network.at({})(*inputs)[None]
        value = reading.link(outputs)
        mean = value.mean(0)
        return reading.from_moments(mean, (value - mean).square().mean(0))

    return _traced(predict, network.inputs)


def traced_linear(
    network: Network, mean: Mapping[str, Tensor], beliefs: Mapping[str, Belief], reading: Likelihood
) -> nn.Module:
    """The prediction of the network linearised at the mean, for independent Gaussians of blocks of weights."""
    if reading.needs_samples or any(isinstance(b.precision, LowRank | Rescaled) for b in beliefs.values()):
        raise ValueError(
            "a linearised prediction can be traced for the structures 'diag', 'kron', 'input' and 'full', and for "
            f"likelihoods without samples of outputs, and this likelihood is {reading.kind!r}: use method='mc'."
        )

    statistics = network.estimated_statistics(mean)

    def one(weights: Mapping[str, Tensor], *example: Tensor) -> Tensor:
        return network.at(weights, statistics)(*(part[None] for part in example))[0]

    def predict(*inputs: Tensor) -> Any:
        centre = network.at(mean, statistics)(*inputs)
        rows = vmap(jacrev(one), in_dims=(None, *[0] * len(inputs)))(dict(mean), *inputs)
        variance = torch.zeros_like(centre)
        for name, belief in beliefs.items():
            block = (belief.join(rows) if isinstance(belief, Joint) else rows[name]).to(belief.mean)
            each = block * belief.precision.solve(block)
            variance = variance + each.flatten(centre.dim()).sum(-1).to(centre)
        return reading.from_gaussian(centre, variance)

    return _traced(predict, network.inputs)


class FixedBatch(nn.Module):
    """A traced function for inputs of certain shapes."""

    def __init__(self, program: nn.Module, shapes: Sequence[torch.Size]) -> None:
        super().__init__()
        self.program, self.shapes = program, tuple(shapes)

    def forward(self, *inputs: Tensor) -> Any:
        found = tuple(x.shape for x in inputs)
        if found != self.shapes:
            raise ValueError(
                f"this module was traced for inputs of shapes {[tuple(s) for s in self.shapes]}, got "
                f"{[tuple(s) for s in found]}: call to_module() with inputs of these shapes."
            )
        return self.program(*inputs)


@torch.no_grad()
def _traced(predict: Callable[..., Any], inputs: tuple[Tensor, ...]) -> nn.Module:
    """The operations of a function, for any number of inputs if torch can trace that."""
    from torch.fx.experimental.proxy_tensor import make_fx  # imports sympy

    more = tuple(torch.cat([x, x[:1], x[:1]]) for x in inputs)  # sizes of 0 and 1 would be constants
    try:
        with _quiet():
            module = _with_buffers(make_fx(predict, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*more))
            found = module(*(x[1:] for x in more))
        expected = predict(*(x[1:] for x in more))
        if all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(_tensors(found), _tensors(expected))):
            return module
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError):
        pass  # an operation has the number of inputs as a constant
    return FixedBatch(_with_buffers(make_fx(predict)(*inputs)), [x.shape for x in inputs])


def _tensors(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


def _with_buffers(module: nn.Module) -> nn.Module:
    """The constants of a traced function as buffers, which `to()` moves."""
    for name, value in [(name, value) for name, value in vars(module).items() if isinstance(value, Tensor)]:
        delattr(module, name)
        module.register_buffer(name, value.detach())
    for name, value in list(module.named_parameters()):
        delattr(module, name)
        module.register_buffer(name, value.detach())
    return module


@contextmanager
def _quiet() -> Iterator[None]:
    """torch logs operations that it cannot trace as errors."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
