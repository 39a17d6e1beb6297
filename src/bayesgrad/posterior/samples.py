"""A posterior that is a bag of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from bayesgrad.posterior.network import Network, clean
from bayesgrad.posterior.posterior import Posterior


class SampledPosterior(Posterior):
    """Equally weighted samples: an ensemble, or the states of a sampler.

    `predict` averages over every member once where `samples` is at least their number, and over a random choice
    without replacement otherwise. `variance` is the unbiased estimate, zero for a single member; a prediction's
    variance is that among the members it averages.

    >>> SampledPosterior([{"w": torch.zeros(2)}, {"w": torch.ones(2)}]).mean["w"]
    tensor([0.5000, 0.5000])

    Args:
        members: one state of the weights each, name -> tensor (`dict(model.named_parameters())` will do).
        model, seed: see `Posterior`.
    """

    kind = "samples"

    def __init__(
        self, members: Sequence[Mapping[str, Tensor]], model: nn.Module | None = None, *, seed: int = 0
    ) -> None:
        super().__init__(model, seed=seed)
        if isinstance(members, Mapping) or not members or not members[0]:
            raise ValueError("a bag of samples needs a list of at least one member, each name -> tensor.")
        first = members[0]
        for i, member in enumerate(members):
            if set(member) != set(first):
                raise ValueError(f"member {i} names other tensors than member 0: {sorted(set(first) ^ set(member))}.")
            odd = next((name for name in first if member[name].shape != first[name].shape), None)
            if odd is not None:
                raise ValueError(f"{odd!r} has shape {tuple(member[odd].shape)} in member {i}, not that of member 0.")
        inner = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
        self.members = {
            (clean(name).removeprefix("module.") if inner else clean(name)): torch.stack(
                [member[name].detach() for member in members]
            )
            for name in first
        }

    def __len__(self) -> int:
        return len(next(iter(self.members.values())))

    @property
    def mean(self) -> dict[str, Tensor]:
        return {name: members.mean(0) for name, members in self.members.items()}

    def variance(self) -> dict[str, Tensor]:
        return {name: members.var(0, correction=min(1, len(self) - 1)) for name, members in self.members.items()}

    def _shapes(self) -> dict[str, torch.Size]:
        return {name: members.shape[1:] for name, members in self.members.items()}

    def _draw(self, generators: list[torch.Generator]) -> Iterator[dict[str, Tensor]]:
        for generator in generators:
            yield self._member(int(torch.randint(len(self), (), generator=generator, device="cpu")))

    def _member(self, index: int) -> dict[str, Tensor]:
        return {name: members[index] for name, members in self.members.items()}

    def _choose(self, samples: int, seed: int) -> Iterator[dict[str, Tensor]]:
        # Members are exchangeable: visiting each at most once has less variance than drawing with replacement.
        (generator,) = self._generators(1, seed)
        order = torch.randperm(len(self), generator=generator, device="cpu")[:samples]
        return (self._member(index) for index in sorted(order.tolist()))

    def _linear(self, network: Network, together: bool) -> tuple[Tensor, Tensor]:
        raise ValueError("a bag of samples has no linearised prediction: use method='mc'.")

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        return {"members": self.members}

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Mapping[str, Tensor]], model: nn.Module | None) -> SampledPosterior:
        members = tensors["members"]
        count = len(next(iter(members.values())))
        return cls([{name: tensor[i] for name, tensor in members.items()} for i in range(count)], model)
