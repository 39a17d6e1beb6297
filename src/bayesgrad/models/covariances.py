"""Covariance types of Gaussian mixtures."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from bayesgrad.families import NormalWishart, Parameters, TiedNormalWishart
from bayesgrad.families.gaussian import LOG_2PI
from bayesgrad.models.designs import weighted_gram
from bayesgrad.warning import warn

WIDE = 2  # columns per component above which quadratic forms are computed directly: measured
FAR = 1e6  # standard deviations: the square times the precision of a float64 is 2e-4
CHUNK = 1 << 18  # number of features processed at a time: they fit into the cache


class Components(NamedTuple):
    """The standard parameters of K components.

    Args:
        location: of the mean, (K, P).
        confidence: the number of rows that the location counts as, (K,).
        degrees: of freedom, (K,).
        weight: twice the last natural parameter, (K,): `spread / weight` is the covariance at the mode.
        spread: V^-1, in the shape of scikit-learn's covariances; `spread / degrees` is E[Λ]^-1.
    """

    location: Tensor
    confidence: Tensor
    degrees: Tensor
    weight: Tensor
    spread: Tensor


class Covariance(ABC):
    """A family of K means and precisions, and the features of a row whose sums are the sufficient statistics.

    E[log N(x | component k)] is linear in a few features of x, and messages are weighted sums of features: two matrix
    products per evaluation. The first P + 1 features are 1 and x. Rows are passed as columns (P, n), so that operations
    on rows run along the last dimension.
    """

    family: ClassVar[NormalWishart | TiedNormalWishart]

    @abstractmethod
    def width(self, size: int) -> int:
        """D, the number of features of a row with P columns."""

    @abstractmethod
    def fill(self, squares: Tensor, columns: Tensor, blur: float) -> None:
        """Writes the features beyond x, (D - P - 1, n): expected squares of x + e, e ~ N(0, blur I)."""

    def features(self, columns: Tensor, blur: float, out: Tensor | None = None) -> Tensor:
        """(D, n), written to `out` if it is given: allocating memory takes longer than the sums."""
        size, count = columns.shape
        out = self.buffer(columns) if out is None else out[:, :count]
        out[1 : size + 1] = columns
        return self.completed(out, size, blur)

    def completed(self, out: Tensor, size: int, blur: float) -> Tensor:
        """Features of which x, (P, n), has been written."""
        out[0] = 1
        self.fill(out[size + 1 :], out[1 : size + 1], blur)
        return out

    def buffer(self, columns: Tensor) -> Tensor:
        """Memory for the features of columns, in the layout in which x and its squares are written fastest."""
        return columns.new_empty(columns.shape[1], self.width(len(columns))).mT

    @abstractmethod
    def coefficients(self, mean: Parameters) -> Tensor:
        """(K, D): coefficients of the features in E[log N(x | component)], (K, n)."""

    @abstractmethod
    def message(self, sums: Tensor, size: int) -> Parameters:
        """The message of features summed over the rows of each component, (K, D); size is P."""

    @abstractmethod
    def prior(self, location: Tensor, confidence: float, degrees: float, spread: Tensor, count: int) -> Parameters:
        """Natural parameters of the prior for each component, or for all `count` of them."""

    @abstractmethod
    def known(self, natural: Parameters) -> Components:
        """The standard parameters for natural parameters λ."""

    @abstractmethod
    def whitened(self, columns: Tensor, known: Components) -> tuple[Tensor, Tensor]:
        """(x - m)' V (x - m) and -log |V|, (K, B, n) and (K, B, 1), for B blocks of independent coordinates."""

    def coloured(self, noise: Tensor, known: Components, component: int) -> Tensor:
        """Transforms standard noise (n, P) to the covariance `spread` of a component."""
        return noise * known.spread[component].sqrt()

    @abstractmethod
    def default_spread(self, columns: Tensor) -> Tensor:
        """The covariance of all rows."""

    @abstractmethod
    def shape(self, components: int, size: int) -> tuple[int, ...]:
        """The shape of covariances, as in scikit-learn."""

    def chunks(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Rows as columns, (P, n) each, in chunks of about CHUNK features."""
        return rows.mT.split(max(256, CHUNK // self.width(rows.shape[1])), 1)

    def sums(self, rows: Tensor, shares: Tensor, blur: float) -> Tensor:
        """Features of rows summed with weights `shares` (K, n), (K, D)."""
        columns = self.chunks(rows)
        parts = zip(columns, shares.split(columns[0].shape[1], 1))
        return torch.stack([own @ self.features(part, blur).mT for part, own in parts]).sum(0)

    def ordered(self, natural: Parameters, order: Tensor) -> Parameters:
        """Natural parameters with the components in another order."""
        return tuple(part[order] for part in natural)

    def distance(self, natural: Parameters) -> float:
        """The distance of a component's rows from zero in units of its smallest standard deviation, with columns scaled
        by their root mean squares. A covariance computed from squares of rows loses the digits of its square."""
        square = -natural[2]
        scale = square.diagonal(dim1=-2, dim2=-1).rsqrt()
        own = -self.family.parts(natural)[2][1] * scale[..., :, None] * scale[..., None, :]
        least = (own if own.shape[-1] == 1 else torch.linalg.eigvalsh(own)).min().item()
        return least**-0.5 if least > 0 else math.inf

    def summary(self, natural: Parameters, point: bool, name: str, remedy: str) -> tuple[Components, Tensor, Tensor]:
        """The components, the number that each spread is divided by, and their covariances; at the mode if `point`,
        else E[Λ]^-1. Warns if few digits of a covariance are accurate, with the name of a component and a remedy."""
        if not (distance := self.distance(natural)) < FAR:
            warn(
                f"rows of a {name} are {distance:.0e} of its smallest standard deviations from the mean of X, so fewer "
                f"than four digits of its covariance are accurate: {remedy}."
            )
        known = self.known(natural)
        count = known.weight if point else known.degrees
        if isinstance(self, Tied):
            count = count[0]
        return known, count, known.spread / count.view(-1, *[1] * (known.spread.dim() - 1))

    def free(self, known: Components, size: int) -> Tensor:
        """Degrees of freedom of the predictive t distribution, (K,)."""
        return known.degrees

    def log_density(self, columns: Tensor, known: Components, point: bool) -> Tensor:
        r"""log p(x | component), (K, n): normal at the mode if `point`, else averaged over the posterior, which is

        .. math::
            \mathrm{St}\left(x \mid m_0,\ \tfrac{\kappa + 1}{\kappa f} V^{-1},\ f\right), \quad f = \nu + 1 - P

        Reference: Bishop, 2006, Eqs. 10.81 and 10.82.
        """
        squares, volume = self.whitened(columns, known)
        size = len(columns) // squares.shape[1]
        if point:
            weight = known.weight[:, None, None]
            return ((size * (weight.log() - LOG_2PI) - volume - weight * squares) / 2).sum(1)
        wide, free = (1 + 1 / known.confidence)[:, None, None], self.free(known, size)[:, None, None]
        height = torch.lgamma((free + size) / 2) - torch.lgamma(free / 2) - size / 2 * (math.pi * wide).log()
        return (height - volume / 2 - (free + size) / 2 * torch.log1p(squares / wide)).sum(1)


class Full(Covariance):
    """One matrix per component."""

    family = NormalWishart()

    def width(self, size: int) -> int:
        return 1 + size + size * (size + 1) // 2

    def buffer(self, columns: Tensor) -> Tensor:
        return columns.new_empty(self.width(len(columns)), columns.shape[1])  # a product of two columns is a row

    def fill(self, squares: Tensor, columns: Tensor, blur: float) -> None:
        size, place = len(columns), 0
        for i in range(size):
            torch.mul(columns[i : i + 1], columns[i:], out=squares[place : place + size - i])
            squares[place] += blur
            place += size - i

    def sums(self, rows: Tensor, shares: Tensor, blur: float) -> Tensor:
        if rows.shape[1] <= WIDE * len(shares):
            return super().sums(rows, shares, blur)
        second = torch.stack([weighted_gram(rows, own) for own in shares])
        return packed(torch.cat([shares.sum(1, keepdim=True), shares @ rows], 1), second, blur)

    def coefficients(self, mean: Parameters) -> Tensor:
        push, square, precision, volume = mean
        triangle = triangle_of(push.shape[-1], push.device)
        constant = (volume - square - push.shape[-1] * LOG_2PI) / 2
        return torch.cat([constant[:, None], push, precision.flatten(1)[:, triangle.packed] * triangle.weight], 1)

    def message(self, sums: Tensor, size: int) -> Parameters:
        half = sums[:, 0] / 2
        square = sums[:, triangle_of(size, sums.device).unpacked].view(-1, size, size)
        return sums[:, 1 : size + 1], -half, square / -2, half

    def prior(self, location: Tensor, confidence: float, degrees: float, spread: Tensor, count: int) -> Parameters:
        first, P = confidence * location, len(location)
        half = location.new_tensor(confidence / 2)
        return first, -half, -(spread + first[:, None] * location) / 2, location.new_tensor((degrees - P) / 2)

    def known(self, natural: Parameters) -> Components:
        location, confidence, (half, spread) = self.family.parts(natural)
        return Components(location, confidence, 2 * half + location.shape[-1] + 1, 2 * natural[3], -2 * spread)

    def whitened(self, columns: Tensor, known: Components) -> tuple[Tensor, Tensor]:
        root = torch.linalg.cholesky(known.spread)
        white = torch.linalg.solve_triangular(root, columns - known.location[..., None], upper=False)
        volume = 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return white.square().sum(1, keepdim=True), volume.expand(len(white))[:, None, None]

    def coloured(self, noise: Tensor, known: Components, component: int) -> Tensor:
        return noise @ torch.linalg.cholesky(known.spread[component]).mT

    def default_spread(self, columns: Tensor) -> Tensor:
        return torch.cov(columns).reshape(len(columns), len(columns))

    def shape(self, components: int, size: int) -> tuple[int, ...]:
        return components, size, size

    def free(self, known: Components, size: int) -> Tensor:
        return known.degrees + 1 - size


class Tied(Full):
    """One matrix for all components."""

    family = TiedNormalWishart()

    def coefficients(self, mean: Parameters) -> Tensor:
        push, square, precision, volume = mean
        return super().coefficients((push, square, precision.expand(len(push), -1, -1), volume))

    def message(self, sums: Tensor, size: int) -> Parameters:
        first, half, square, volume = super().message(sums, size)
        return first, half, square.sum(0), volume.sum()

    def prior(self, location: Tensor, confidence: float, degrees: float, spread: Tensor, count: int) -> Parameters:
        P, first = len(location), (confidence * location).expand(count, -1)
        half = location.new_full((count,), confidence / 2)
        square = -(spread + first.mT @ location.expand(count, -1)) / 2
        return first, -half, square, location.new_tensor((degrees - P - 1 + count) / 2)

    def known(self, natural: Parameters) -> Components:
        location, confidence, (half, spread) = self.family.parts(natural)
        degrees, count = 2 * half + location.shape[-1] + 1, 2 * natural[3]
        return Components(location, confidence, degrees.expand(len(location)), count.expand(len(location)), -2 * spread)

    def coloured(self, noise: Tensor, known: Components, component: int) -> Tensor:
        return noise @ torch.linalg.cholesky(known.spread).mT

    def shape(self, components: int, size: int) -> tuple[int, ...]:
        return size, size

    def ordered(self, natural: Parameters, order: Tensor) -> Parameters:
        return natural[0][order], natural[1][order], *natural[2:]


class Diag(Covariance):
    """One variance per component and column: one-dimensional families with plates (K, P)."""

    family = NormalWishart()

    def width(self, size: int) -> int:
        return 1 + 2 * size

    def fill(self, squares: Tensor, columns: Tensor, blur: float) -> None:
        torch.square(columns, out=squares).add_(blur)

    def coefficients(self, mean: Parameters) -> Tensor:
        push, square, precision, volume = mean
        constant = (volume - square - LOG_2PI).sum(1, keepdim=True) / 2
        return torch.cat([constant, push[..., 0], precision[..., 0, 0] / -2], 1)

    def message(self, sums: Tensor, size: int) -> Parameters:
        half = (sums[:, :1] / 2).expand(-1, size)
        return sums[:, 1 : size + 1, None], -half, sums[:, size + 1 :, None, None] / -2, half

    def prior(self, location: Tensor, confidence: float, degrees: float, spread: Tensor, count: int) -> Parameters:
        half = torch.full_like(location, confidence / 2)
        square = -(spread + confidence * location.square()) / 2
        return (confidence * location)[:, None], -half, square[:, None, None], torch.full_like(half, (degrees - 1) / 2)

    def known(self, natural: Parameters) -> Components:
        location, confidence, (half, spread) = self.family.parts(natural)
        count = 2 * natural[3][:, 0]
        return Components(location[..., 0], confidence[:, 0], 2 * half[:, 0] + 2, count, -2 * spread[..., 0, 0])

    def whitened(self, columns: Tensor, known: Components) -> tuple[Tensor, Tensor]:
        squares = (columns - known.location[..., None]).square() / known.spread[..., None]
        return squares, known.spread.log()[..., None]

    def default_spread(self, columns: Tensor) -> Tensor:
        return columns.var(1)

    def shape(self, components: int, size: int) -> tuple[int, ...]:
        return components, size


class Spherical(Covariance):
    """One variance per component: columns are one-dimensional groups that share it."""

    family = TiedNormalWishart()

    def width(self, size: int) -> int:
        return 2 + size

    def fill(self, squares: Tensor, columns: Tensor, blur: float) -> None:
        squares[0] = columns.square().sum(0) + len(columns) * blur

    def coefficients(self, mean: Parameters) -> Tensor:
        push, square, precision, volume = mean
        constant = (push.shape[1] * (volume - LOG_2PI) - square.sum(1))[:, None] / 2
        return torch.cat([constant, push[..., 0], precision[..., 0] / -2], 1)

    def message(self, sums: Tensor, size: int) -> Parameters:
        half = sums[:, 0] / 2
        return sums[:, 1 : size + 1, None], -half[:, None].expand(-1, size), sums[:, -1:, None] / -2, size * half

    def prior(self, location: Tensor, confidence: float, degrees: float, spread: Tensor, count: int) -> Parameters:
        half = torch.full_like(location, confidence / 2)
        square = -(spread + confidence * location.square().sum()) / 2
        freedom = location.new_tensor((degrees - 2 + len(location)) / 2)
        return (confidence * location)[:, None], -half, square.view(1, 1), freedom

    def known(self, natural: Parameters) -> Components:
        location, confidence, (half, spread) = self.family.parts(natural)
        return Components(location[..., 0], confidence[:, 0], 2 * half + 2, 2 * natural[3], -2 * spread[:, 0, 0])

    def whitened(self, columns: Tensor, known: Components) -> tuple[Tensor, Tensor]:
        squares = (columns - known.location[..., None]).square().sum(1, keepdim=True) / known.spread[:, None, None]
        return squares, len(columns) * known.spread.log()[:, None, None]

    def default_spread(self, columns: Tensor) -> Tensor:
        return columns.var(1).mean()

    def shape(self, components: int, size: int) -> tuple[int, ...]:
        return (components,)


def packed(first: Tensor, second: Tensor, blur: float) -> Tensor:
    """Weighted sums of features, from those of 1 and x, (K, P + 1), and of x x', (K, P, P), which is modified."""
    second.diagonal(dim1=-2, dim2=-1).add_(blur * first[:, :1])
    return torch.cat([first, second.flatten(1)[:, triangle_of(second.shape[-1], second.device).packed]], 1)


class Triangle(NamedTuple):
    """Indices of the upper triangle of a symmetric matrix, row by row.

    Args:
        packed: indices of its entries in the flattened matrix, (P (P + 1)/2,).
        unpacked: indices of the flattened matrix's entries among the features, (P P,).
        weight: of each feature in -x'Λx/2.
    """

    packed: Tensor
    unpacked: Tensor
    weight: Tensor


@cache
def triangle_of(size: int, device: torch.device) -> Triangle:
    row, column = torch.triu_indices(size, size, device=device)
    place = torch.empty(size, size, dtype=torch.long, device=device)
    place[row, column] = place[column, row] = torch.arange(len(row), device=device)
    weight = torch.where(row == column, -0.5, -1.0).to(torch.float64)
    return Triangle(row * size + column, place.flatten() + size + 1, weight)


COVARIANCES: dict[str, Covariance] = {"full": Full(), "tied": Tied(), "diag": Diag(), "spherical": Spherical()}
