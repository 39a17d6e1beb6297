"""Several chains in one process: copies of a network with stacked weights, evaluated by vmap."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import stack_module_state, vmap

from bayesgrad import noise
from bayesgrad.layers.network import parameters_of
from bayesgrad.layers.stateless import functional_call


class Chains(nn.Module):
    """`count` copies of a model as one module: parameters (count, *shape), outputs (count, batch, ...).

    An elementwise rule (a sampler with the identity or a diagonal callable as its metric, Adam) then runs `count`
    chains at once: sum the mean losses of the copies, as `loss` does, and each copy has the gradient that it would have
    alone. Noise differs between chains, because it is a function of a weight's position. Rules that use layers or the
    Fisher of a network do not support stacked copies: run one process or one loop for each chain.

    >>> chains = Chains(torch.nn.Linear(3, 2), 4)
    >>> chains(torch.ones(5, 3)).shape
    torch.Size([4, 5, 2])

    Args:
        model: without buffers that change in training (BatchNorm) and without dropout; it is copied. Weights that are
            not trained (`requires_grad=False`) stay as they are in all copies.
        count: the number of chains.
        spread: standard deviation of noise that is added to each copy's weights; R-hat needs different starting points.
        seed: of that noise; None draws one from torch's global generator.

    Checked by: tests/equations/test_ensemble.py::test_chains_side_by_side_are_chains_alone
    """

    def __init__(self, model: nn.Module, count: int, *, spread: float = 0.0, seed: int | None = None) -> None:
        super().__init__()
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}.")
        if spread < 0:
            raise ValueError(f"spread must not be negative, got {spread}.")
        odd = [name for name, part in model.named_modules() if isinstance(part, _REFUSED)]
        if odd:
            raise ValueError(f"Chains does not support {', '.join(odd)}: run the chains one after another.")
        copies = [copy.deepcopy(model) for _ in range(count)]
        stacked, buffers = stack_module_state(copies)  # pyright: ignore[reportArgumentType]
        self.count = count
        self.names = {name.replace(".", "/"): name for name in stacked}
        self._template = [copies[0].to("meta")]  # in a list, so that it is not registered as a submodule
        self._buffers_of = {name: value[0] for name, value in buffers.items()}
        for i, (own, name) in enumerate(self.names.items()):
            value, trained = stacked[name].detach(), stacked[name].requires_grad
            if spread and trained:
                seed = noise.fresh_seed() if seed is None else seed
                first, second = noise.key(seed, i)
                square, angle = noise.normal_parts(noise.positions(0, value), first, second)
                value = value + spread * (square.sqrt() * angle).to(value).view_as(value)
            self.register_parameter(own, nn.Parameter(value.clone(), requires_grad=trained))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Outputs (count, batch, ...) of all copies for the same inputs."""
        weights: dict[str, Tensor] = {name: self.get_parameter(own) for own, name in self.names.items()}

        def one(weights: dict[str, Tensor]) -> Any:
            return functional_call(self._template[0], {**weights, **self._buffers_of}, inputs)

        return vmap(one)(weights)

    def loss(self, outputs: Tensor, labels: Tensor, criterion: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The sum over copies of criterion(outputs, labels), the mean loss of a batch."""
        return vmap(criterion, in_dims=(0, None))(outputs, labels).sum()

    def weights(self) -> dict[str, Tensor]:
        """Name in the model -> (count, *shape), of the weights that are trained."""
        stacked = {name: self.get_parameter(own) for own, name in self.names.items()}
        return {name: weight.detach() for name, weight in stacked.items() if weight.requires_grad}


_REFUSED = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Name -> (chains, *shape): the weights of a model, as a single chain, or of `Chains`."""
    if isinstance(model, Chains):
        return model.weights()
    return {name: p.detach()[None] for name, p in parameters_of(model).items() if p.requires_grad}


def finite(weights: dict[str, Tensor]) -> bool:
    """Whether all weights are finite; a sum that overflows counts as not finite."""
    return bool(torch.isfinite(sum(weight.double().sum() for weight in weights.values())))  # pyright: ignore
