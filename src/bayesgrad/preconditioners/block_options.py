"""Options that belong to a block of parameters, whose members may be in several param groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from bayesgrad.layers.modules import Layer
from bayesgrad.parts import Host

Group = Mapping[str, Any]
# What a layer has once: its factors, their inverses, and the bound of its step. lr, momentum and weight_decay are of
# each parameter, unless the factors depend on them.
LAYER_OPTIONS = (
    *("damping", "damping_mode", "ema", "batch_size", "prior_std", "update_every", "stats_every", "max_step"),
    *("stats_rows", "losses_per_example", "max_factor", "fisher", "whiten", "eigenvalues", "precondition", "sharing"),
)


def check_block(
    host: Host, members: Iterable[Tensor], owners: Mapping[Tensor, Group], options: Iterable[str], else_: str = ""
) -> None:
    """Raises if parameters that are preconditioned together differ in an option.

    Args:
        host: the optimizer, which names parameters.
        members: the parameters of the block.
        owners: the param group of each parameter.
        options: names; a rule need not have all of them.
        else_: another remedy, in words.
    """
    first, *others = members
    for p in (p for p in others if owners[p] is not owners[first]):
        for name in options:
            values = owners[first].get(name), owners[p].get(name)
            if values[0] != values[1]:
                raise ValueError(
                    f"{host.name_of(first)} and {host.name_of(p)} are preconditioned together and need the same "
                    f"{name}, got {values[0]!r} and {values[1]!r}: set one {name} in their param groups{else_}."
                )


class LayerOptions:
    """Compares the options of weight and bias of each layer, and again when options or layers have changed."""

    def __init__(self) -> None:
        self.compared: tuple[Any, Any] = None, None

    def check(
        self, host: Host, layers: list[Layer], groups: Iterable[Group], names: Callable[[Group], Iterable[str]]
    ) -> None:
        """Raises if they differ.

        Args:
            host: the optimizer.
            layers: a list that is replaced when layers change.
            groups: the param groups.
            names: param group -> the options that a layer has once.
        """
        if self.compared[0] is host.last_options and self.compared[1] is layers:
            return
        owners = {p: group for group in groups for p in group["params"]}
        for layer in layers:
            check_block(host, layer.members, owners, names(owners[layer.owner]))
        self.compared = host.last_options, layers
