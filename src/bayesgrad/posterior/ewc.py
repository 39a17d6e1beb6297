"""Elastic weight consolidation: the posterior of earlier tasks as a penalty on later ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesgrad.layers.network import matching_parameters
from bayesgrad.posterior.gaussian import GaussianPosterior
from bayesgrad.posterior.laplace import LaplacePosterior
from bayesgrad.posterior.posterior import Posterior
from bayesgrad.precision import Diagonal
from bayesgrad.structures import DiagonalStructure, Structure
from bayesgrad.structures.structure import check_prior


@dataclass(frozen=True, eq=False)
class QuadraticPenalty:
    """Quadratic forms of the distance to some weights."""

    mean: Mapping[str, Tensor]
    forms: Sequence[Structure]

    def __call__(self, found: Mapping[str, Tensor]) -> Tensor:
        change = {name: found[name].to(mean) - mean for name, mean in self.mean.items()}
        return sum((form.quadratic(change) for form in self.forms), torch.zeros(())) / 2


class EWC:
    r"""A penalty for changes of the weights, which approximates the increase of the loss of earlier tasks.

    .. math::
        \frac{s}{2} (w - w^*)^T H (w - w^*)

    with the posterior's mean w*, s = `strength`, and H the Hessian of the loss *summed* over the old task's data.
    Divide the penalty by N when you add it to the mean loss of a new task of N examples; s = 1 is then Bayes' rule.

        >>> import bayesgrad
        >>> model, old = nn.Linear(2, 3), [(torch.randn(4, 2), torch.tensor([0, 1, 2, 0]))]
        >>> ewc = EWC(bayesgrad.laplace(model, old, likelihood="categorical"))
        >>> x, y = torch.randn(5, 2), torch.tensor([2, 1, 1, 0, 2])
        >>> loss = nn.functional.cross_entropy(model(x), y) + ewc(model) / len(x)

    | posterior | H | over tasks |
    |---|---|---|
    | Laplace, `"diag"`, `"full"` | the diagonal; the full matrix | one sum |
    | Laplace, `"kron"` | A ⊗ E of each layer | one term for each task |
    | Laplace, `"input"` | A ⊗ I of each layer | one sum of the A |
    | Laplace, `"subsampled"` | G G', exactly; v'H v = \|G'v\|^2 from inputs and errors | one term for each task |
    | of OGN, VOGN, IVON | the posterior precision | includes the prior |

    Parameters that are not in the posterior are not penalised. The penalty can be differentiated twice.

    Args:
        posterior: of the old task.
        strength: s.
        prior: whether H includes the prior precision. With True, the penalty replaces the prior, as in Bayes' rule:
            train without weight decay. With False, it is the Hessian of the data alone, to be used with weight decay.
            None is False for Laplace posteriors, and True for others, which cannot separate data and prior.

    Raises:
        TypeError: EWC does not support this class of posterior or precision.
        ValueError: strength is not positive, or the model has other parameters.

    Reference: Benzing 2021, appendices A.2 and C; Kirkpatrick et al., 2017; for `add`, Huszár, 2018, Schwarz et al.,
    2018. Checked by: tests/equations/test_ewc.py.
    """

    def __init__(self, posterior: Posterior, strength: float = 1.0, *, prior: bool | None = None) -> None:
        _check("strength", strength)
        mean, forms = _forms(posterior, prior)
        self.parts: tuple[QuadraticPenalty, ...] = (
            QuadraticPenalty(mean, [form.times(float(strength)) for form in forms]),
        )

    def __call__(self, model: nn.Module) -> Tensor:
        """The penalty at the model's weights."""
        shapes = [{name: mean.shape for name, mean in part.mean.items()} for part in self.parts]
        found = [matching_parameters(model, own, "penalty") for own in shapes]
        return sum((part(own) for part, own in zip(self.parts, found)), torch.zeros(()))

    def add(self, posterior: Posterior, strength: float = 1.0, *, prior: bool | None = None, decay: float = 1.0) -> EWC:
        """The penalty of all tasks after one more was learned: decay H + H', centred at the latest weights.

        The latest weights minimise the new loss plus the old penalty, so the sum is quadratic around them. Hessians are
        summed if the sum needs no more memory than one of them: diagonal, dense, and the input moments of `"input"`.
        Parameters that are not in the new posterior keep their centre.

        Args:
            posterior: of the new task, trained under this penalty.
            strength, prior: as in the constructor.
            decay: factor of the Hessians of earlier tasks; below 1 they are forgotten gradually.
        """
        _check("decay", decay)
        latest = EWC(posterior, strength, prior=prior)
        mean = {name: value for part in (*self.parts, *latest.parts) for name, value in part.mean.items()}
        forms = [form.times(decay) for part in self.parts for form in part.forms]
        for part in latest.parts:
            for name, value in part.mean.items():
                before = next((p.mean[name].shape for p in self.parts if name in p.mean), value.shape)
                if before != value.shape:
                    raise ValueError(f"{name!r} has shape {tuple(value.shape)}, but {tuple(before)} in earlier tasks.")
            forms = _merged(forms, part.forms)
        return self._of(QuadraticPenalty(mean, forms))

    def __add__(self, other: Any) -> EWC:
        """The sum of both penalties, each centred at its own weights."""
        return self._of(*self.parts, *other.parts) if isinstance(other, EWC) else NotImplemented

    def __radd__(self, other: Any) -> EWC:
        return self if isinstance(other, int) and other == 0 else NotImplemented  # where sum() begins

    @staticmethod
    def _of(*parts: QuadraticPenalty) -> EWC:
        made = object.__new__(EWC)
        made.parts = parts
        return made


def _check(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite positive number, got {value!r}.")


def _merged(forms: Iterable[Structure], more: Iterable[Structure]) -> list[Structure]:
    """All forms, with sums where `plus` supports them."""
    found = list(forms)
    for form in more:
        for i, old in enumerate(found):
            total = old.plus(form)
            if total is not None:
                found[i] = total
                break
        else:
            found.append(form)
    return found


def _forms(posterior: Posterior, prior: bool | None) -> tuple[dict[str, Tensor], list[Structure]]:
    """The posterior's mean and quadratic forms."""
    mean = posterior.mean if isinstance(posterior, GaussianPosterior) else {}
    if isinstance(posterior, LaplacePosterior):
        scale = (float(posterior.noise_scale) ** 2) ** -posterior.fit.power
        forms = [hessian.times(scale) for hessian in posterior.hessians]
        if prior:
            for name, value in check_prior(posterior.prior_precision, posterior.noise_scale, mean).items():
                forms = _merged(
                    forms, [DiagonalStructure({name: mean[name].shape}, torch.full_like(mean[name], value))]
                )
        return mean, forms
    if not isinstance(posterior, GaussianPosterior):
        raise TypeError(f"EWC takes a Gaussian posterior, got {type(posterior).__name__}: use bayesgrad.laplace().")
    if prior is False:
        raise ValueError("prior=False needs a Laplace posterior: this one cannot separate data and prior.")
    forms = []
    for name, belief in posterior.beliefs.items():
        if not isinstance(belief.precision, Diagonal):
            kind = type(belief.precision).__name__
            raise TypeError(f"EWC has no quadratic form of {name!r}'s {kind} precision: use bayesgrad.laplace().")
        forms.append(DiagonalStructure({name: belief.mean.shape}, 1 / belief.precision.variance()))
    return mean, forms
