"""The Fisher information of a batch as a linear operator, and per-example gradients of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from bayesgrad import layers, likelihoods, noise
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.batches import LABELS, Call, Forward, Inputs, Output
from bayesgrad.layers.call import LayerCall
from bayesgrad.layers.examples import RowLayouts
from bayesgrad.layers.functional import gradients_by_vmap
from bayesgrad.layers.layout import RowLayout
from bayesgrad.layers.network import clean_name, parameters_of, unwrap
from bayesgrad.layers.observed import classes_last
from bayesgrad.layers.per_example import PerExampleGradients, StoredGradients
from bayesgrad.layers.recorder import LayerRecorder, Trace, check_outputs
from bayesgrad.layers.stateless import copied_buffers
from bayesgrad.precision import LowRank

FISHERS = ("sampled", "exact", "empirical")


@dataclass(frozen=True, eq=False)
class Gradients:
    """The gradients of N examples by all parameters: the G of F = G G', with columns scale * g_j.

    Args:
        columns: name -> per-example gradients, for the same examples.
        scale: one number for all, or one for each name.
    """

    columns: Mapping[str, PerExampleGradients]
    scale: float | Mapping[str, float]

    def _scale(self, name: str) -> float:
        return self.scale[name] if isinstance(self.scale, Mapping) else self.scale

    def project(self, vector: Mapping[str, Tensor]) -> Tensor:
        return sum_terms(c.project(vector[name]).mul_(self._scale(name)) for name, c in self.columns.items())

    def combine(self, weights: Tensor) -> dict[str, Tensor]:
        return {name: c.combine(self._scale(name) * weights) for name, c in self.columns.items()}

    def weighted_diagonal(self, factor: Tensor) -> dict[str, Tensor]:
        """The diagonal of G (L L')^-1 G' by name, for a lower factor L."""
        return {name: c.weighted_diagonal(factor).mul_(self._scale(name) ** 2) for name, c in self.columns.items()}

    def gram(self) -> Tensor:
        return sum_terms(c.gram().mul_(self._scale(name) ** 2) for name, c in self.columns.items())


def sum_terms(terms: Iterable[Tensor]) -> Tensor:
    """The sum of tensors in their widest dtype, on the device of the first, one term at a time."""
    total: Tensor | None = None
    for term in terms:
        if total is None:
            total = term
        elif total.dtype == torch.promote_types(total.dtype, term.dtype):
            total.add_(term.to(total.device))
        else:
            total = total + term.to(total.device)
    if total is None:
        raise ValueError("there are no gradients to sum.")
    return total


class SubsampledFisher:
    r"""F = (1/N) Σ_j g_j g_j' over N data points, exactly, without forming per-example gradients.

    g_j is the gradient of example j's loss (negative log-likelihood, summed over positions), at a label drawn from the
    model, at a given one, or, for the exact Fisher, over all labels: F = (1/N) Σ_j J_j' H_j J_j, the Gauss-Newton
    matrix.

    .. math::
        (F + \lambda I)^{-1} v = \frac{1}{\lambda} \left(v - G (\lambda I + G^T G)^{-1} G^T v\right), \quad F = G G^T

    Vectors are flat, in the order of `torch.nn.utils.parameters_to_vector` over the trainable parameters, or dicts by
    name; results have the same form. Weight gradients of layers with a matrix (Linear, Conv, Embedding, recurrent
    layers, attention: see docs/layers.md) are stored as inputs and errors. Per-example gradients of parameters outside
    of these and of normalisation layers (bare parameters) are computed by `torch.func` and stored.

    Args:
        model: in the mode in which to differentiate it; BatchNorm must be in evaluation mode.
        inputs: N examples along the first dimension; a tuple for several arguments, a mapping for keyword arguments.
            The key `"labels"` is no argument of the model, and has the labels of `fisher="empirical"`.
        likelihood: a name or an object of `bayesgrad.likelihoods`; `"gaussian"` has unit variance.
        fisher: "sampled" (one label for each example, drawn with `seed`), "exact" or "empirical" (needs `labels`).
        labels: the targets for "empirical", or labels to use instead of sampled ones.
        seed: of sampled labels; None draws one from torch's global generator if they are sampled.
        class_dim: the dimension of classes in the outputs: 1 for (N, C, ...); None for the last one.
        forward, output: how the model is called, and which of its outputs is meant; see `bayesgrad.laplace`.

    Attributes:
        labels: the labels that were used, None for the exact Fisher.
        names: of the parameters, in flat order.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> fisher = SubsampledFisher(model, torch.randn(5, 3))
        >>> v = torch.ones(8)
        >>> residual = fisher.matvec(fisher.solve(v, damping=0.1)) + 0.1 * fisher.solve(v, damping=0.1) - v
        >>> bool(residual.abs().max() < 1e-4)
        True

    Reference: Benzing 2021, Eq. 17-21 and appendix E.
    Differs from the paper: Eq. 19-21 lack factors of the batch size.
    Checked by: tests/equations/test_fisher.py, against torch.func's per-example gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        *,
        likelihood: str | likelihoods.Likelihood = "categorical",
        fisher: str = "sampled",
        labels: Tensor | None = None,
        seed: int | None = None,
        class_dim: int | None = None,
        forward: Forward | None = None,
        output: Output | None = None,
    ) -> None:
        if fisher not in FISHERS:
            raise ValueError(f"fisher must be one of {', '.join(map(repr, FISHERS))}, got {fisher!r}.")
        if isinstance(inputs, Mapping) and fisher == "empirical" and labels is None:
            labels = inputs.get(LABELS)
        if (fisher == "empirical") != (labels is not None) and fisher != "sampled":
            need = "needs labels=" if labels is None else "takes no labels"
            raise ValueError(f"fisher={fisher!r} {need}.")
        kind = likelihoods.named(likelihood)
        if seed is None and fisher == "sampled" and labels is None:
            seed = noise.fresh_seed()
        generator = torch.Generator().manual_seed(noise.seed32(seed or 0))
        called, tensors = Call(forward, output)(model, inputs)
        draw = partial(kind.sample, generator=generator)
        (seen,) = batch_gradients(called, tensors, kind, fisher, labels, draw, class_dim=class_dim)
        self._parameters = {name: p for name, p in parameters_of(unwrap(model)).items() if p.requires_grad}
        self.names = list(self._parameters)
        self.labels = seen.labels
        self._scale = 1 / math.sqrt(len(seen.outputs))
        self._gradients = Gradients(seen.columns, self._scale)
        self._gram: Tensor | None = None
        self._last: LowRank | None = None

    def matvec(self, v: Any) -> Any:
        """F v."""
        vector, back = self._unpacked(v)
        return back(self._gradients.combine(self._gradients.project(vector)))

    def solve(self, v: Any, damping: float | Mapping[str, float]) -> Any:
        """(F + damping I)^-1 v; with a damping for each parameter by name, (F + D)^-1 v for the diagonal D of those.

        Raises:
            ValueError: damping is not positive, or names other parameters.
        """
        vector, back = self._unpacked(v)
        if isinstance(damping, Mapping):
            return back(self._solve_by_name(vector, damping))
        if not 0 < damping < math.inf:
            raise ValueError(f"damping must be a finite positive number, got {damping!r}.")
        if self._last is None or self._last.floor != damping:
            self._last = LowRank(float(damping), self)
        return back(self._last.solve(vector))

    def _solve_by_name(self, vector: dict[str, Tensor], damping: Mapping[str, float]) -> dict[str, Tensor]:
        """D^-1/2 (I + D^-1/2 F D^-1/2)^-1 D^-1/2 v."""
        if set(damping) != set(self.names) or not all(0 < d < math.inf for d in damping.values()):
            raise ValueError(f"damping by name must be a finite positive number for each of {self.names}.")
        roots = {name: damping[name] ** -0.5 for name in self.names}
        scaled = Gradients(self._gradients.columns, {name: self._scale * root for name, root in roots.items()})
        solved = LowRank(1.0, scaled).solve({name: roots[name] * part for name, part in vector.items()})
        return {name: roots[name] * part for name, part in solved.items()}

    # The interface that LowRank needs: products with the gradients, and a cached Gram matrix.

    def project(self, vector: Mapping[str, Tensor]) -> Tensor:
        """G'v, (N,), for v by name."""
        return self._gradients.project(vector)

    def combine(self, weights: Tensor) -> dict[str, Tensor]:
        """G w by name, for w (N,)."""
        return self._gradients.combine(weights)

    def gram(self) -> Tensor:
        """G'G, (N, N), which has the nonzero eigenvalues of F."""
        if self._gram is None:
            self._gram = self._gradients.gram()
        return self._gram

    def quadratic(self, v: Any) -> Tensor:
        """v'F v."""
        vector, _ = self._unpacked(v)
        return self._gradients.project(vector).square().sum()

    def diagonal(self) -> Tensor:
        """The diagonal of F, flat."""
        scale = self._scale**2
        return torch.cat([scale * c.squares().flatten() for c in self._gradients.columns.values()])

    def dense(self) -> Tensor:
        """F as a matrix; for small models."""
        columns = self._gradients.columns.values()
        rows = torch.cat([self._scale * c.rows().reshape(c.count, -1) for c in columns], 1)
        return rows.T @ rows

    def _unpacked(self, v: Any) -> tuple[dict[str, Tensor], Callable[[dict[str, Tensor]], Any]]:
        if isinstance(v, Mapping):
            if set(v) != set(self.names):
                odd = sorted(set(v) ^ set(self.names))
                raise ValueError(
                    f"a vector by name needs the names of the trainable parameters; {odd[:3]} do not match."
                )
            for name, p in self._parameters.items():
                if v[name].shape != p.shape:
                    raise ValueError(f"{name} must have shape {tuple(p.shape)}, got {tuple(v[name].shape)}.")
            return {name: v[name].detach() for name in self.names}, lambda d: d
        sizes = [p.numel() for p in self._parameters.values()]
        if v.shape != (sum(sizes),):
            raise ValueError(f"a flat vector must have shape ({sum(sizes)},), got {tuple(v.shape)}.")
        parts = v.detach().split(sizes)
        vector = {name: part.view(p.shape) for part, (name, p) in zip(parts, self._parameters.items())}
        return vector, lambda d: torch.cat([d[name].flatten() for name in self.names])


@dataclass(frozen=True, eq=False)
class BatchGradients:
    """Per-example gradients of one batch, for some directions of the outputs.

    Args:
        columns: name -> per-example gradients; the directions of one example are consecutive.
        outputs: of the model.
        labels: the labels that were used, None for the exact Fisher.
        first: whether these are the first directions of the batch.
    """

    columns: Mapping[str, PerExampleGradients]
    outputs: Tensor
    labels: Tensor | None
    first: bool = True


def batch_gradients(
    model: nn.Module,
    inputs: Tensor | tuple[Tensor, ...],
    kind: likelihoods.Likelihood,
    fisher: str,
    labels: Tensor | None,
    draw: Callable[[Tensor], Tensor],
    at_once: int | None = None,
    layouts: RowLayouts | None = None,
    class_dim: int | None = None,
    counted: Tensor | None = None,
) -> Generator[BatchGradients, None, None]:
    """Per-example gradients of every trainable parameter, for `at_once` directions at a time; see `SubsampledFisher`.

    Args:
        draw: samples labels for outputs, for `fisher="sampled"`.
        layouts: those of earlier batches.
        class_dim: the dimension of classes in the model's outputs; None for the last one.
        counted: which outputs have a loss, in the shape of labels; None for all.

    Raises:
        ValueError: the model mixes the examples of a batch, or labels do not fit.
    """
    used = labels

    def directions(outputs: Tensor) -> Iterator[Tensor]:
        nonlocal used
        if used is None and fisher == "sampled":
            used = draw(outputs)
        found = kind.hessian_roots(outputs) if used is None else iter([kind.residual(outputs, used)])
        if (
            counted is None or counted.shape != outputs.shape[:-1]
        ):  # other shapes are refused where the loss is computed
            return found
        return (direction * counted[..., None] for direction in found)

    with closing(directional_gradients(model, inputs, directions, at_once, layouts, class_dim)) as parts:
        for seen in parts:
            yield replace(seen, labels=used)


def directional_gradients(
    model: nn.Module,
    inputs: Tensor | tuple[Tensor, ...],
    directions: Callable[[Tensor], Iterator[Tensor]],
    at_once: int | None = None,
    layouts: RowLayouts | None = None,
    class_dim: int | None = None,
    copies: int = 1,
) -> Generator[BatchGradients, None, None]:
    """Per-example gradients of every trainable parameter, for `at_once` directions of the outputs at a time.

    Args:
        directions: of the outputs, given these: derivatives of some loss by the outputs.
        layouts, class_dim: as in `batch_gradients`.
        copies: how often each example goes through the model, so that one backward pass has so many directions. A
            backward pass of few examples takes about as long.

    Raises:
        ValueError: the model mixes the examples of a batch.
    """
    model = unwrap(model)
    check_batch_mixing(model)
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    parameters = {name: p for name, p in parameters_of(model).items() if p.requires_grad}
    if not parameters:
        raise ValueError("the model has no trainable parameters.")
    recorder = LayerRecorder(model, recorded_layers(model))
    try:
        with torch.enable_grad(), copied_buffers(model):
            repeated = model(*[x.repeat_interleave(copies, 0) for x in arguments] if copies > 1 else arguments)
            check_outputs(repeated)
            if repeated.shape[:1] != (copies * len(arguments[0]),):
                raise ValueError(
                    f"the first dimension of inputs and outputs must be that of examples, got {len(arguments[0])} "
                    f"inputs and outputs of shape {tuple(repeated.shape)}."
                )
            repeated = classes_last(repeated, class_dim)
            trace = recorder.trace(repeated)
        outputs = repeated[::copies]
        given = directions(outputs)
        ids = {id(p): name for name, p in parameters.items()}
        layouts = RowLayouts() if layouts is None else layouts
        first = True
        while some := list(islice(given, at_once)):
            columns, left = gather_gradients(trace, some, layouts, copies=copies)
            named = {ids[key]: value for key, value in columns.items() if key in ids}
            read = {*trace.read_counts, *left}
            rest = {name: p for name, p in parameters.items() if name not in named and id(p) in read}
            if rest:
                named |= gradients_by_vmap(model, rest, arguments, some, outputs.detach(), class_dim)
            for name, p in parameters.items():
                if name not in named:  # the outputs do not depend on it
                    zeros = torch.zeros(len(outputs) * len(some), *p.shape, dtype=compute_dtype(p.dtype))
                    named[name] = StoredGradients(p.shape, zeros.to(p.device))
            yield BatchGradients({name: named[name] for name in parameters}, outputs.detach(), None, first)
            first = False
    finally:
        recorder.close()


# --- per-example gradients of a batch ---


def recorded_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers with trainable parameters whose per-example gradients follow from inputs and errors."""
    return {
        name: module
        for name, module in layers.known_layers(model)
        if (layers.is_matrix(module) or layers.is_norm(module))
        and any(p.requires_grad for p in layers.own_parameters(module).values())
    }


def check_batch_mixing(model: nn.Module) -> None:
    """Raises if a layer mixes the examples of a batch (BatchNorm in training mode)."""
    for name, module in model.named_modules():
        if layers.mixes_examples(module):
            raise ValueError(
                f"{clean_name(name)} ({type(module).__name__}) mixes the examples of a batch, so it has no per-example "
                "gradients: call model.eval(), or use a normalisation of single examples."
            )


def gather_gradients(
    trace: Trace, directions: Sequence[Tensor], layouts: RowLayouts, group: int = 1, copies: int = 1
) -> tuple[dict[int, PerExampleGradients], set[int]]:
    """Per-example gradients by the id of the parameter, and the ids of parameters for which they cannot be computed.

    They can be computed if only recorded layers use the parameter, and these layers keep examples separate.

    Args:
        trace: of the outputs.
        directions: of the outputs; each gives as many gradients as there are examples.
        layouts: which rows of the layers belong to which example, as far as it is known.
        group: the number of rows of the outputs that are one example.
        copies: of each example in the outputs of the trace, and of none in the directions.
    """
    grouped = _grouped(directions, copies)
    back = trace.recorder.backpropagate
    # What is stored of a batch may be read after the caller has overwritten its tensors.
    found = [call.kept() for call in layouts.attach(trace.backpropagate(grouped[0]), trace.outputs, back, group)]
    several = len(directions) > 1 or copies > 1
    calls = [layers.batch_first(call) for call in found] if several else found
    left = trace.used_elsewhere() | layers.mixed_parameters(calls)
    if several:
        known = [call.layout for call in found]
        calls = _with_directions(trace, grouped, calls, known, left, len(directions), copies)
    return {id(p): columns for p, columns in layers.gradients_of_calls(calls, left).items()}, left


def _grouped(directions: Sequence[Tensor], copies: int) -> list[Tensor]:
    """So many directions in each tensor, one for each copy of an example; the last ones are repeated where needed."""
    if copies == 1:
        return list(directions)
    groups = [directions[k : k + copies] for k in range(0, len(directions), copies)]
    return [torch.stack([*some, *[some[-1]] * (copies - len(some))], 1).flatten(0, 1) for some in groups]


def _with_directions(
    trace: Trace,
    grouped: Sequence[Tensor],
    first: Sequence[LayerCall],
    layouts: Sequence[RowLayout | None],
    left: set[int],
    directions: int,
    copies: int,
) -> list[LayerCall]:
    """Calls whose inputs are stored once, with the errors of all directions: those of an example are consecutive.

    Args:
        grouped: directions for all copies of examples.
        first: the calls with the errors of the first of these, batch first.
        layouts: of these calls before.
        left: the ids of parameters whose layers are not needed.
        directions: their number.
        copies: of each example.
    """
    examples = len(trace.outputs) // copies
    errors: list[Tensor | None] = []
    for call in first:
        needed = any(id(p) not in left for p in layers.own_parameters(call.module).values())
        size = call.error.numel() // (examples * copies)
        errors.append(call.error.new_empty(examples, directions, size) if needed else None)
    for k, direction in enumerate(grouped):
        start, stop = k * copies, min((k + 1) * copies, directions)
        calls = trace.backpropagate(direction) if k else first
        for call, layout, into in zip(calls, layouts, errors, strict=True):
            if into is not None:
                error = layers.batch_first(replace(call, layout=layout)).error if k else call.error
                into[:, start:stop] = error.reshape(examples, copies, -1)[:, : stop - start]
    found = []
    for call, into in zip(first, errors):
        if into is not None:
            alone = layers.is_unbatched(call.module, call.input)
            x = call.input[None] if alone else call.input[::copies]
            found.append(replace(call, input=x, error=into.view(-1, *call.error.shape[not alone :])))
    return found
