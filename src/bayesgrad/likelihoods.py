"""Likelihoods: how the outputs of a network predict labels.

A likelihood computes predictions, samples labels, and gives the loss with its first three derivatives by the outputs.
It is an object, or a string where it has no parameters: `"categorical"` (logits over classes in the last dimension),
`"bernoulli"` (one logit for each label), `"gaussian"` (the outputs are means; the noise has standard deviation 1, or
the `noise_scale` of the function that receives the name) or `"poisson"` (the outputs are logarithms of rates).
`Gaussian(noise_scale=0.3)` is accepted wherever these names are.

The loss of an example is its negative log-likelihood, summed over all dimensions of the outputs after the first. For
`Gaussian` it is the squared error over 2 noise_scale^2, without the constant that depends on the noise alone.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from bayesgrad.lognormal import log_poisson_lognormal
from bayesgrad.predictions import Decomposed, Moments, NoisyMoments

IGNORED = -100  # a label without a loss, as in torch's cross entropy


class Likelihood(ABC):
    """The distribution of labels given the outputs f of a network."""

    kind: ClassVar[str]  # the name without parameters
    noise_scale: float = 1.0  # the standard deviation of the data, if it is a parameter
    has_noise: ClassVar[bool] = False  # whether it is
    closed_form: ClassVar[bool] = False  # whether predictions for Gaussian outputs are exact
    has_classes: ClassVar[bool] = False  # whether a loss is about the last dimension, and not about a whole example
    needs_samples: ClassVar[bool] = False  # whether predictions for Gaussian outputs are averages over samples of them
    kinds: ClassVar[dict[str, type[Likelihood]]] = {}

    def __init_subclass__(cls) -> None:
        if "kind" in cls.__dict__:
            Likelihood.kinds[cls.kind] = cls

    @property
    def name(self) -> str:
        """What `named` turns into an equal likelihood again; a state dict has this string and not the object.

        It is the kind, with the fields of a dataclass that do not have their default.
        """
        own = {f.name: (getattr(self, f.name), f.default) for f in fields(self)} if is_dataclass(self) else {}
        given = ", ".join(f"{key}={value!r}" for key, (value, default) in own.items() if value != default)
        return f"{self.kind}({given})" if given else self.kind

    def with_noise(self, noise_scale: float) -> Likelihood:
        """This likelihood with another standard deviation of the data, if it has one."""
        return self

    @abstractmethod
    def link(self, outputs: Tensor) -> Tensor:
        """The quantity that predictions average over weights: probabilities, rates, or the outputs themselves."""

    def from_moments(self, mean: Tensor, variance: Tensor) -> Tensor | Moments | NoisyMoments:
        """The prediction from the mean and variance of link(f) over weights."""
        return mean

    @abstractmethod
    def from_gaussian(self, mean: Tensor, variance: Tensor) -> Tensor | Moments | NoisyMoments:
        """The prediction if the outputs f are independent Gaussians N(mean, variance)."""

    @abstractmethod
    def log_density(self, mean: Tensor, variance: Tensor, labels: Tensor) -> Tensor:
        """log p(labels) of each example, (N,), if the outputs are independent Gaussians N(mean, variance)."""

    @abstractmethod
    def aleatoric(self, value: Tensor) -> Tensor:
        """The uncertainty of labels given link(f): their entropy or their variance."""

    def decompose(self, mean: Tensor, variance: Tensor, aleatoric: Tensor) -> Decomposed:
        """The prediction and its parts, given mean and variance of link(f), and the mean of `within`, over weights."""
        return Decomposed(self.from_moments(mean, variance), aleatoric, variance)

    def decompose_gaussian(self, mean: Tensor, variance: Tensor) -> Decomposed:
        """As `decompose`, for Gaussian outputs N(mean, variance); only if `closed_form`."""
        raise NotImplementedError

    @abstractmethod
    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Labels sampled from the model's predictions, with a CPU generator for the same labels on any device."""

    @abstractmethod
    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of each example, (N,).

        Raises:
            ValueError: labels or outputs do not fit this likelihood.
        """

    def each_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """`loss`, checked: users may define it as a mean or a sum."""
        found = self.loss(outputs, labels)
        if found.shape != outputs.shape[:1]:
            raise ValueError(
                f"{self.kind}.loss must return one number for each of {len(outputs)} examples, summed over its "
                f"outputs, got shape {tuple(found.shape)}."
            )
        return found

    def log_likelihood(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """log p(labels | outputs) of each example, (N,)."""
        return -self.each_loss(outputs, labels)

    def residual(self, outputs: Tensor, labels: Tensor, check: bool = True) -> Tensor:
        """The derivative of each example's loss by the outputs; `check` is False for labels that were sampled here."""
        return self.link(outputs.detach()) - _real(labels, outputs)

    @abstractmethod
    def hessian_roots(self, outputs: Tensor) -> Iterator[Tensor]:
        """Vectors s with sum s s' = H, the Hessian of each example's loss by the outputs, which is also the Fisher."""

    @abstractmethod
    def hessian_product(self, outputs: Tensor, vector: Tensor) -> Tensor:
        """H v, with H the Hessian of each example's loss by the outputs; differentiable in both arguments."""

    @abstractmethod
    def third_product(self, outputs: Tensor, vector: Tensor) -> Tensor:
        """The derivative of H v along v, equal to that of v'H v by the outputs; v may have extra leading dimensions."""

    def losses(self, outputs: Tensor) -> int:
        """The number of terms in a mean loss over these outputs: examples, or positions that each have a label."""
        return len(outputs)

    def mask(self, labels: Tensor | None) -> Tensor | None:
        """Which labels have a loss; None for all of them."""
        return None


class Categorical(Likelihood):
    """Softmax over the last dimension. Gaussian logits use MacKay's probit approximation."""

    kind = "categorical"
    has_classes = True

    def link(self, outputs: Tensor) -> Tensor:
        _check_classes(outputs)
        return outputs.softmax(-1)

    def losses(self, outputs: Tensor) -> int:
        return outputs.shape[:-1].numel()

    def from_gaussian(self, mean: Tensor, variance: Tensor) -> Tensor:
        return self.link(mean / (1 + math.pi / 8 * variance).sqrt())

    def log_density(self, mean: Tensor, variance: Tensor, labels: Tensor) -> Tensor:
        return -self.loss(mean / (1 + math.pi / 8 * variance).sqrt(), labels)

    def aleatoric(self, value: Tensor) -> Tensor:
        return torch.special.entr(value).sum(-1)

    def decompose(self, mean: Tensor, variance: Tensor, aleatoric: Tensor) -> Decomposed:
        return Decomposed(mean, aleatoric, (self.aleatoric(mean) - aleatoric).clamp(min=0))

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        _check_classes(outputs)
        p = self.link(outputs.detach().float() if outputs.dtype.itemsize < 4 else outputs.detach())
        u = torch.rand(p.shape[:-1], dtype=torch.float64, generator=generator).to(p)[..., None]
        return (p.cumsum(-1) <= u).sum(-1).clamp_(max=p.shape[-1] - 1)

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        _check_tensor(labels)
        kept = labels != IGNORED
        labels = torch.where(kept, labels, 0)
        self._check(outputs, labels)
        at_label = outputs.log_softmax(-1).gather(-1, labels[..., None].long())[..., 0]
        return -torch.where(kept, at_label, 0).reshape(len(outputs), -1).sum(1)

    def residual(self, outputs: Tensor, labels: Tensor, check: bool = True) -> Tensor:
        if check:
            self._check(outputs, labels)
        error = outputs.detach().softmax(-1)
        ones = torch.ones_like(labels[..., None], dtype=error.dtype)
        return error.scatter_add(-1, labels[..., None].long(), -ones)

    @staticmethod
    def _check(outputs: Tensor, labels: Tensor) -> None:
        classes = outputs.shape[-1]
        _check_tensor(labels)
        _check_classes(outputs)
        if labels.shape != outputs.shape[:-1] and labels.shape == outputs.shape[:1] + outputs.shape[2:]:
            raise ValueError(classes_second(outputs, f"labels of shape {tuple(labels.shape)} fit"))
        if labels.shape != outputs.shape[:-1] or labels.is_floating_point() or labels.is_complex():
            raise ValueError(
                f"labels must be whole numbers of shape {tuple(outputs.shape[:-1])} for outputs of shape "
                f"{tuple(outputs.shape)}, got {labels.dtype} of shape {tuple(labels.shape)}."
            )
        if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise ValueError(
                f"labels must be in 0..{classes - 1}, got {int(labels.min())} to {int(labels.max())}: "
                "leave out examples without a label."
            )

    def mask(self, labels: Tensor | None) -> Tensor | None:
        return None if labels is None else labels != IGNORED

    def hessian_roots(self, outputs: Tensor) -> Iterator[Tensor]:
        _check_classes(outputs)
        p = outputs.detach().softmax(-1)
        for position in range(p[0, ..., 0].numel()):
            for c in range(p.shape[-1]):
                at = torch.zeros_like(p).flatten(1, -2) if p.dim() > 2 else torch.zeros_like(p)[:, None]
                here = p.reshape(at.shape)[:, position]
                at[:, position] = -here * here[:, c, None].sqrt()
                at[:, position, c] += here[:, c].sqrt()
                yield at.view(p.shape)

    def hessian_product(self, outputs: Tensor, vector: Tensor) -> Tensor:
        p = outputs.softmax(-1)
        return p * (vector - (p * vector).sum(-1, keepdim=True))

    def third_product(self, outputs: Tensor, vector: Tensor) -> Tensor:
        p = outputs.softmax(-1)
        square = (vector - (p * vector).sum(-1, keepdim=True)).square()
        return p * (square - (p * square).sum(-1, keepdim=True))


class Bernoulli(Categorical):
    """A logistic probability for each output."""

    kind = "bernoulli"
    has_classes = False

    def link(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def losses(self, outputs: Tensor) -> int:
        return len(outputs)

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        p = outputs.detach().sigmoid()
        return (torch.rand(p.shape, dtype=torch.float64, generator=generator).to(p.device) < p).to(p)

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        labels = _real(labels, outputs)
        if bool(((labels < 0) | (labels > 1)).any()):
            raise ValueError(f"labels must be in [0, 1], got {labels.min():g} to {labels.max():g}.")
        return (softplus(outputs) - labels * outputs).reshape(len(outputs), -1).sum(1)

    residual, mask = Likelihood.residual, Likelihood.mask

    def hessian_roots(self, outputs: Tensor) -> Iterator[Tensor]:
        p = outputs.detach().sigmoid()
        yield from one_by_one((p * (1 - p)).sqrt())

    def hessian_product(self, outputs: Tensor, vector: Tensor) -> Tensor:
        p = outputs.sigmoid()
        return p * (1 - p) * vector

    def third_product(self, outputs: Tensor, vector: Tensor) -> Tensor:
        p = outputs.sigmoid()
        return p * (1 - p) * (1 - 2 * p) * vector.square()

    def aleatoric(self, value: Tensor) -> Tensor:
        return torch.special.entr(value) + torch.special.entr(1 - value)


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """Outputs are means of real-valued targets with noise of a known standard deviation s: loss |f - y|^2/(2 s^2).

    Args:
        noise_scale: s.

    Example:
        >>> loss = Gaussian(noise_scale=0.5).loss(torch.zeros(1, 2), torch.ones(1, 2))
        >>> float(loss)
        4.0
    """

    kind = "gaussian"
    has_noise = True
    closed_form = True
    noise_scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < float(self.noise_scale) < math.inf:
            raise ValueError(f"noise_scale must be a finite positive number, got {self.noise_scale!r}.")
        object.__setattr__(self, "noise_scale", float(self.noise_scale))

    def with_noise(self, noise_scale: float) -> Gaussian:
        return Gaussian(noise_scale)

    @property
    def _precision(self) -> float:
        return self.noise_scale**-2

    def link(self, outputs: Tensor) -> Tensor:
        return outputs

    def from_moments(self, mean: Tensor, variance: Tensor) -> Moments:
        return Moments(mean, variance)

    from_gaussian = from_moments

    def log_density(self, mean: Tensor, variance: Tensor, labels: Tensor) -> Tensor:
        spread = variance + self.noise_scale**2
        each = (mean - _real(labels, mean)).square() / spread + (2 * math.pi * spread).log()
        return -each.reshape(len(mean), -1).sum(1) / 2

    def aleatoric(self, value: Tensor) -> Tensor:
        return torch.full_like(value, self.noise_scale**2)

    def decompose_gaussian(self, mean: Tensor, variance: Tensor) -> Decomposed:
        return self.decompose(mean, variance, self.aleatoric(mean))

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(outputs.shape, dtype=torch.float64, generator=generator).to(outputs)
        return outputs.detach() + self.noise_scale * noise

    def log_likelihood(self, outputs: Tensor, labels: Tensor) -> Tensor:
        constant = outputs[0].numel() / 2 * math.log(2 * math.pi * self.noise_scale**2)
        return -self.loss(outputs, labels) - constant

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        square = (outputs - _real(labels, outputs)).square().reshape(len(outputs), -1).sum(1)
        return square / 2 * self._precision

    def residual(self, outputs: Tensor, labels: Tensor, check: bool = True) -> Tensor:
        return super().residual(outputs, labels, check) * self._precision

    def hessian_roots(self, outputs: Tensor) -> Iterator[Tensor]:
        yield from one_by_one(torch.full_like(outputs, 1 / self.noise_scale))

    def hessian_product(self, outputs: Tensor, vector: Tensor) -> Tensor:
        return vector * self._precision

    def third_product(self, outputs: Tensor, vector: Tensor) -> Tensor:
        return torch.zeros_like(vector)


class Poisson(Likelihood):
    """Outputs are logarithms of the rates of counts."""

    kind = "poisson"
    closed_form = True

    def link(self, outputs: Tensor) -> Tensor:
        return outputs.exp()

    def from_gaussian(self, mean: Tensor, variance: Tensor) -> Tensor:
        return (mean + variance / 2).exp()

    def log_density(self, mean: Tensor, variance: Tensor, labels: Tensor) -> Tensor:
        """By quadrature over each log-rate."""
        y = _real(labels, mean).double()
        each = log_poisson_lognormal(mean.double(), variance.double(), y) - (y + 1).lgamma()
        return each.to(mean).reshape(len(mean), -1).sum(1)

    def aleatoric(self, value: Tensor) -> Tensor:
        return value

    def decompose_gaussian(self, mean: Tensor, variance: Tensor) -> Decomposed:
        rate = self.from_gaussian(mean, variance)
        return self.decompose(rate, variance.expm1() * rate.square(), rate)

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        return torch.poisson(outputs.detach().exp().cpu(), generator).to(outputs)

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        labels = _real(labels, outputs)
        if bool((labels < 0).any()):
            raise ValueError(f"labels must be counts, got {labels.min():g}.")
        return (outputs.exp() - labels * outputs + (labels + 1).lgamma()).reshape(len(outputs), -1).sum(1)

    def hessian_roots(self, outputs: Tensor) -> Iterator[Tensor]:
        yield from one_by_one((outputs.detach() / 2).exp())

    def hessian_product(self, outputs: Tensor, vector: Tensor) -> Tensor:
        return outputs.exp() * vector

    def third_product(self, outputs: Tensor, vector: Tensor) -> Tensor:
        return outputs.exp() * vector.square()


def _check_classes(outputs: Tensor) -> None:
    if outputs.dim() < 2 or outputs.shape[-1] < 2:
        raise ValueError(
            "a categorical likelihood needs logits of at least two classes in the outputs' last dimension, got "
            f"outputs of shape {tuple(outputs.shape)}: for one logit use 'bernoulli', for a regression 'gaussian'."
        )


def classes_second(outputs: Tensor, why: str) -> str:
    """The error of outputs whose classes are in dimension 1."""
    return (
        f"{why} classes in dimension 1 of outputs of shape {tuple(outputs.shape)}, and classes are expected in the "
        "last one: pass class_dim=1 to observe() or SubsampledFisher, or let the model return outputs.movedim(1, -1)."
    )


def _check_tensor(labels: object) -> None:
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a tensor, got {type(labels).__name__}.")


def _real(labels: Tensor, outputs: Tensor) -> Tensor:
    _check_tensor(labels)
    if labels.shape != outputs.shape:
        end = ": use y[:, None]." if outputs.shape == (len(outputs), 1) == (*labels.shape, 1) else "."
        raise ValueError(f"labels must have the outputs' shape {tuple(outputs.shape)}, got {tuple(labels.shape)}{end}")
    return labels.to(outputs)


def one_by_one(scale: Tensor) -> Iterator[Tensor]:
    """For each output a tensor that is `scale` there and zero elsewhere."""
    rows = scale.reshape(len(scale), -1)
    for k in range(rows.shape[1]):
        at = torch.zeros_like(rows)
        at[:, k] = rows[:, k]
        yield at.view(scale.shape)


_BY_NAME: dict[str, Likelihood] = {one.kind: one for one in (Categorical(), Bernoulli(), Gaussian(), Poisson())}
_NAME = re.compile(r"(\w+)(?:\(((?:\w+=[0-9.e+-]+(?:, )?)+)\))?")  # `Likelihood.name`


def named(likelihood: str | Likelihood, noise_scale: float | None = None) -> Likelihood:
    """A likelihood from its name, or the likelihood itself.

    Args:
        noise_scale: the standard deviation of the data under the name `"gaussian"`; None for 1. A likelihood with its
            own must have the same.
    """
    if isinstance(likelihood, str) and likelihood in _BY_NAME:
        found = _BY_NAME[likelihood]
        return found if noise_scale is None else found.with_noise(noise_scale)
    if isinstance(likelihood, Likelihood):
        found = likelihood
    elif isinstance(likelihood, str) and (match := _NAME.fullmatch(likelihood)) and match[1] in Likelihood.kinds:
        given = (part.split("=") for part in (match[2] or "").split(", ") if part)
        found = Likelihood.kinds[match[1]](**{key: float(value) for key, value in given})
    else:
        known = ", ".join(map(repr, _BY_NAME))
        raise ValueError(f"likelihood must be one of {known}, or an object such as Gaussian(0.3), got {likelihood!r}.")
    if noise_scale is not None and found.with_noise(noise_scale) != found:
        raise ValueError(f"{found!r} has its own noise and cannot have noise_scale={noise_scale!r}: give one of them.")
    return found
