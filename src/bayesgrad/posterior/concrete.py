"""Dropout with a learned probability, by a continuous relaxation of its masks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from bayesgrad import noise
from bayesgrad.kernels import compute_dtype
from bayesgrad.posterior.units import units_of


class ConcreteDropout(nn.Module):
    r"""Dropout before a Linear or convolution layer, with a learned probability of keeping a unit.

    .. math::
        z = \mathrm{sigmoid}\left(\frac{\mathrm{logit}(\pi_1) + \log u - \log(1 - u)}{t}\right), \quad
        u \sim U(0, 1), \quad x \mapsto x\, z/\pi_1

    with pi_1 = sigmoid(`logit`), a parameter, and t = `temperature`; for t -> 0 this is a Bernoulli mask, because
    logit(u) exceeds -logit(pi_1) with probability pi_1. Division by pi_1 keeps the mean, as in torch's dropout, so that
    in evaluation mode the module does nothing. One mask value for each example and unit.

    pi_1 is learned by minimising the negative ELBO, E_q[loss] + KL(q, prior)/N: add `penalty` to the mean loss.

    >>> dropout, layer = ConcreteDropout(), nn.Linear(4, 1)
    >>> loss = layer(dropout(torch.ones(8, 4))).square().mean() + dropout.penalty(layer, num_data=100)
    >>> loss.backward()
    >>> round(dropout.keep.item(), 3), dropout.logit.grad is not None
    (0.9, True)

    Args:
        keep: the initial pi_1.
        dim: the dimension of units in the input: -1 for a Linear, 1 for a convolution. The first dimension is that of
            examples; masks are constant along all others.
        temperature: t.
        seed: masks are a function of it, of the number of forward passes in training mode (a buffer, saved with the
            model) and of the position. Each module needs a different seed. Activation checkpointing, which runs a
            forward pass twice, is not supported.

    Reference: Gal, Hron and Kendall, 2017; Maddison et al., 2017; Khan and Rue 2023, section 4.3, on learning pi_1.
    Checked by: tests/equations/test_dropout.py, by finite differences and quadrature.
    """

    draws: Tensor

    def __init__(
        self,
        keep: float = 0.9,
        *,
        dim: int = -1,
        temperature: float = 0.1,
        seed: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 0 < keep < 1:
            raise ValueError(f"keep must be in (0, 1), got {keep!r}.")
        if not temperature > 0:
            raise ValueError(f"temperature must be a positive number, got {temperature!r}.")
        self.dim, self.temperature, self.seed = dim, temperature, seed
        self.logit = nn.Parameter(torch.tensor(math.log(keep / (1 - keep)), device=device, dtype=dtype))
        self.register_buffer("draws", torch.zeros((), dtype=torch.int32, device=device))
        self.given_key: noise.Key | None = None  # set by a posterior for its samples; leaves `draws` unchanged

    @property
    def keep(self) -> Tensor:
        """pi_1, a scalar with a gradient."""
        return torch.sigmoid(self.logit)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * (self.mask(x) / self.keep).to(x.dtype)

    def mask(self, x: Tensor) -> Tensor:
        """The next relaxed mask for an input, (examples, 1, ..., units, ..., 1)."""
        key = self.given_key
        if key is None:
            self.draws += 1
            first, second = noise.bits(self.draws, *noise.key(self.seed))
        else:
            first, second = key
        dim = self.dim % x.dim()
        shape = [size if i in (0, dim) else 1 for i, size in enumerate(x.shape)]
        position = torch.arange(math.prod(shape), dtype=torch.int32, device=x.device)
        logistic = noise.logistic(position, first, second).view(shape)
        dtype = compute_dtype(x.dtype)
        return torch.sigmoid((self.logit.to(dtype) + logistic.to(dtype)) / self.temperature)

    def penalty(self, layer: nn.Module, num_data: float, prior_precision: float = 1.0) -> Tensor:
        r"""KL(q, prior)/N of the next layer, up to a constant.

        q is spike and slab, pi_1 N(m_j, s^2 I) + (1-pi_1) N(0, s^2 I) for the outgoing weights m_j of unit j, and the
        prior is N(0, I/lambda). For well separated components, E_q[log q] is the entropy of the choice between them and
        a constant, and E_q[log prior] = -lambda/2 (pi_1 |m_j|^2 + d s^2) + constant, so that

        .. math::
            KL = \sum_j \left[\frac{\lambda \pi_1}{2} |m_j|^2 - H(\pi_1)\right] + c
               = \frac{\lambda}{2 \pi_1} |W|^2 - K\, H(\pi_1) + c

        for K units with entropy H in nats. W = pi_1 m is what the layer stores, because x is divided by pi_1.
        c = K d (lambda s^2 - 1 - log(lambda s^2))/2, with d weights per unit, does not depend on learned parameters.

        Args:
            layer: the Linear or convolution whose input is this module's output.
            num_data: N. The penalty is in the units of a mean loss, a negative log-likelihood in nats.
            prior_precision: lambda.
        """
        units = units_of(layer)
        if units is None:
            raise TypeError(f"layer must be the Linear or convolution after the dropout, got {type(layer).__name__}.")
        weight: Any = layer.weight
        log_keep, log_drop = nn.functional.logsigmoid(self.logit), nn.functional.logsigmoid(-self.logit)
        entropy = -(self.keep * log_keep + (1 - self.keep) * log_drop)
        slab = prior_precision * weight.square().sum() / (2 * self.keep)
        return (slab - units.count(weight.shape) * entropy) / num_data

    def extra_repr(self) -> str:
        return f"dim={self.dim}, temperature={self.temperature:g}, seed={self.seed}"
