r"""A factor's value and messages against Monte Carlo, at the current distributions of its nodes.

With draws x of the nodes, T their sufficient statistics and m the message to a node,

.. math::
    E_q[\log f(x)] = \text{value}, \qquad
    \mathrm{Cov}_q(T)^{-1}\, \mathrm{Cov}_q(T, \log f) = \nabla_\mu E_q[\log f] = m

The second equation says that the message is the regression of log f on the statistics. Both are estimated from
r = log f - Σ ⟨m, T - μ⟩, which has the same mean, and hardly varies if the messages are right.

Reference: Khan and Rue 2023, Eq. 6, for the natural gradient; Salimans and Knowles, 2013, for the regression.
Checked by: tests/equations/test_factor_check.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from bayesgrad.families import MixtureOfGaussians, Parameters, Point
from bayesgrad.inference.node import Node
from bayesgrad.noise import generator_of

MAX_STATISTICS = 500
ROUNDING = 1e-8  # relative to the largest number compared; estimates of conjugate factors have no other error


@dataclass(frozen=True)
class Comparison:
    """One number, or one part of a message, and its Monte Carlo estimate.

    Args:
        name: what is compared.
        found: what the factor computes.
        expected: the estimate, of the same shape.
        error: standard errors of the estimate.
        deviations: allowed number of standard errors.
    """

    name: str
    found: Tensor
    expected: Tensor
    error: Tensor
    deviations: float

    @property
    def agrees(self) -> bool:
        return bool((self._excess() <= 0).all())

    def _excess(self) -> Tensor:
        rounding = ROUNDING * (1 + self.found.abs().amax() + self.expected.abs().amax())
        return (self.found - self.expected).abs() - self.deviations * self.error - rounding

    def __str__(self) -> str:
        place = int(self._excess().argmax())
        found, expected, error = (part.flatten()[place] for part in (self.found, self.expected, self.error))
        where = (
            ""
            if not self.found.dim()
            else f"{[int(i) for i in torch.unravel_index(torch.tensor(place), self.found.shape)]}"
        )
        verdict = "agrees" if self.agrees else "DISAGREES"
        return f"{self.name}{where}: {found:.6g}, Monte Carlo {expected:.6g} +- {error:.2g}: {verdict}"


@dataclass(frozen=True)
class Check:
    """The result of `Factor.check`: the value and each part of each message, beside Monte Carlo estimates."""

    comparisons: list[Comparison]

    @property
    def disagreements(self) -> list[Comparison]:
        return [part for part in self.comparisons if not part.agrees]

    @property
    def agrees(self) -> bool:
        return not self.disagreements

    def __str__(self) -> str:
        return "\n".join(map(str, self.comparisons))


def compare(
    nodes: Sequence[Node],
    value: Tensor,
    messages: Sequence[Parameters],
    log_density: Callable[..., Tensor],
    *,
    samples: int,
    seed: int,
    deviations: float,
) -> Check:
    """Compares E_q[log f] and messages with estimates from draws; see `Factor.check`."""
    for node in nodes:
        if isinstance(node.family, Point | MixtureOfGaussians):
            raise ValueError(f"check draws from q and its statistics, which {node} does not support.")
    draws = [node.family.sample(node.natural, samples, generator_of(seed, place)) for place, node in enumerate(nodes)]
    logs = _evaluate(log_density, draws)
    statistics = [_flat(node.family.statistics(x)) for node, x in zip(nodes, draws)]
    offsets = [t - _flat(node.mean, batch=False) for node, t in zip(nodes, statistics)]
    count = max(t.shape[1] for t in statistics)
    if count > min(MAX_STATISTICS, samples // 10):
        raise ValueError(
            f"check compares at most {MAX_STATISTICS} statistics of a node, with ten samples for each, got {count} and "
            f"{samples} samples: check a smaller factor of the same kind."
        )
    rest = logs - sum(t @ _flat(message, batch=False) for t, message in zip(offsets, messages))
    estimate, error = rest.mean(), rest.std() / samples**0.5
    comparisons = [Comparison("value", value.detach(), estimate, error, deviations)]
    for node, offset, message in zip(nodes, offsets, messages):
        # The regression of what the messages leave unexplained is the difference from the right message.
        centred = offset - offset.mean(0)
        inverse = torch.linalg.pinv(centred.mT @ centred / samples, hermitian=True, rtol=1e-12)
        pulled = centred @ inverse  # (samples, statistics)
        noise = rest - rest.mean()
        change = pulled.mT @ noise / samples
        noise = noise - centred @ change
        spread = ((pulled * noise[:, None]).square().mean(0) / samples).sqrt()
        sizes = [part.numel() for part in message]
        name = node.name or type(node.family).__name__
        for i, (part, more, wide) in enumerate(zip(message, change.split(sizes), spread.split(sizes))):
            estimated = part + more.view_as(part)
            comparisons.append(
                Comparison(f"message to {name}, part {i}", part, estimated, wide.view_as(part), deviations)
            )
    return Check(comparisons)


def _flat(parts: Parameters, *, batch: bool = True) -> Tensor:
    return torch.cat([part.reshape(len(part), -1) if batch else part.flatten() for part in parts], -1)


def _evaluate(log_density: Callable[..., Tensor], draws: Sequence[Tensor]) -> Tensor:
    """log f of each draw, summed over plates, by vmap or else one by one."""

    def one(*x: Tensor) -> Tensor:
        return log_density(*x).sum()

    with torch.no_grad():
        try:
            return vmap(one)(*draws)
        except RuntimeError:
            return torch.stack([one(*x) for x in zip(*draws)])
