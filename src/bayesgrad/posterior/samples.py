"""Posteriors that consist of samples of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bayesgrad.layers.network import Network, clean_name
from bayesgrad.posterior.posterior import Posterior
from bayesgrad.posterior.store import Samples


class SampledPosterior(Posterior):
    """Equally weighted samples: an ensemble, or the states of a sampler.

    `predict` averages over every member once if `samples` is at least their number, and else over a random subset.
    `variance` is the unbiased estimate, zero for a single member; the variance of a prediction is that among the
    members it averages.

    >>> SampledPosterior([{"w": torch.zeros(2)}, {"w": torch.ones(2)}]).mean["w"]
    tensor([0.5000, 0.5000])

    Args:
        members: for each sample the weights, name -> tensor, for example `dict(model.named_parameters())`.
        model, seed: see `Posterior`.
    """

    kind = "samples"
    central = ()  # each sample has statistics of its own

    def __init__(
        self, members: Sequence[Mapping[str, Tensor]], model: nn.Module | None = None, *, seed: int = 0
    ) -> None:
        super().__init__(model, seed=seed)
        if isinstance(members, Mapping) or not members or not members[0]:
            raise ValueError("members must be a list of at least one member, each a mapping name -> tensor.")
        first = members[0]
        for i, member in enumerate(members):
            if set(member) != set(first):
                raise ValueError(f"member {i} has other names than member 0: {sorted(set(first) ^ set(member))}.")
            odd = next((name for name in first if member[name].shape != first[name].shape), None)
            if odd is not None:
                raise ValueError(f"{odd!r} has shape {tuple(member[odd].shape)} in member {i}, not that of member 0.")
        inner = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
        self.members = {
            (clean_name(name).removeprefix("module.") if inner else clean_name(name)): torch.stack(
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
        # Without replacement, which has less variance than with.
        (generator,) = self._generators(1, seed)
        order = torch.randperm(len(self), generator=generator, device="cpu")[:samples]
        return (self._member(index) for index in sorted(order.tolist()))

    def _centre(self, network: Network) -> dict[str, Tensor]:
        raise ValueError("a posterior of samples has no linearised prediction: use method='mc'.")

    def _summary(self) -> dict[str, Any]:
        return {"samples": len(self), **super()._summary()}

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        return {"members": self.members}

    @classmethod
    def _from_tensors(
        cls, tensors: Mapping[str, Mapping[str, Tensor]], model: nn.Module | None, *, seed: int = 0
    ) -> SampledPosterior:
        members = tensors["members"]
        count = len(next(iter(members.values())))
        rows = [{name: tensor[i] for name, tensor in members.items()} for i in range(count)]
        return SampledPosterior(rows, model, seed=seed)


class StoredPosterior(SampledPosterior):
    """Samples of which some are in files. Each is read when it is needed and not kept in memory.

    `members`, `state_dict` and `save` read all of them at once; a saved one loads as a `SampledPosterior`.

    Args:
        samples: the samples, in memory and in files.
        model, seed: see `Posterior`.
    """

    kind = "stored"

    def __init__(self, samples: Samples, model: nn.Module | None = None, *, seed: int = 0) -> None:
        Posterior.__init__(self, model, seed=seed)
        if not len(samples):
            raise ValueError("a posterior needs at least one sample: none has been kept yet; sample longer.")
        self.samples = samples.snapshot()

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def members(self) -> dict[str, Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        blocks = list(self.samples.blocks())
        return {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}

    @property
    def mean(self) -> dict[str, Tensor]:
        return self._moments()[0]

    def variance(self) -> dict[str, Tensor]:
        return {name: square / max(1, len(self) - 1) for name, square in self._moments()[1].items()}

    def _moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Means and sums of squared deviations, a file at a time (Chan, Golub and LeVeque's merging)."""
        mean: dict[str, Tensor] = {}
        squares: dict[str, Tensor] = {}
        seen = 0
        for block in self.samples.blocks():
            for name, rows in block.items():
                centre, count = rows.mean(0), len(rows)
                inner = (rows - centre).square().sum(0)
                if seen:
                    off = centre - mean[name]
                    inner = inner + squares[name] + off.square() * (seen * count / (seen + count))
                    centre = mean[name] + off * (count / (seen + count))
                mean[name], squares[name] = centre, inner
            seen += len(next(iter(block.values())))
        return mean, squares

    def _shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self._member(0).items()}

    def _member(self, index: int) -> dict[str, Tensor]:
        return self.samples.row(index)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "kind": SampledPosterior.kind}


def posterior_of(samples: Samples, model: nn.Module | None = None, *, seed: int = 0) -> SampledPosterior:
    """The posterior of these samples: in memory if all of them are, else read from their files."""
    if samples.stored or not len(samples):
        return StoredPosterior(samples, model, seed=seed)
    (block,) = samples.blocks()
    return SampledPosterior._from_tensors({"members": block}, model, seed=seed)
