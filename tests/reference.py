"""Curvature of a model by plain autograd, without anything of the library: Jacobians, Gauss-Newton, layer factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from architectures import Architecture

TOLERANCE = 1e-8
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
PLAIN = (nn.Linear, nn.Embedding, *CONVOLUTIONS)
LOSSES = {
    "categorical": lambda f, y: F.cross_entropy(f.flatten(0, -2), y.flatten(), reduction="sum"),
    "bernoulli": lambda f, y: F.binary_cross_entropy_with_logits(f, y, reduction="sum"),
    "gaussian": lambda f, y: 0.5 * F.mse_loss(f, y, reduction="sum"),
}


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def jacobian(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """The derivatives of each example's outputs, (N, outputs, parameters), with each example in a pass of its own."""
    values = {name: p.detach() for name, p in trained(model).items()}

    def run(weights: dict[str, Tensor], *example: Tensor) -> Tensor:
        return functional_call(model, weights, tuple(x[None] for x in example))[0].flatten()

    try:
        with sdpa_kernel(SDPBackend.MATH):
            found = vmap(jacrev(run), (None, *[0] * len(inputs)))(values, *inputs)
        return torch.cat([part.reshape(*part.shape[:2], -1) for part in found.values()], 2)
    except (RuntimeError, ValueError):  # recurrent layers, indices that depend on data
        rows = []
        for example in zip(*inputs):
            params = list(trained(model).values())
            outputs = model(*(x[None] for x in example)).flatten()
            found = [torch.autograd.grad(o, params, retain_graph=True, allow_unused=True) for o in outputs]
            rows.append(torch.stack([flat(one, params) for one in found]))
        return torch.stack(rows)


def flat(gradients: Sequence[Tensor | None], params: Sequence[Tensor]) -> Tensor:
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(gradients, params)])


def residuals(likelihood: str, outputs: Tensor, labels: Tensor) -> Tensor:
    """The derivatives of the summed loss by the outputs."""
    free = outputs.detach().requires_grad_()
    return torch.autograd.grad(LOSSES[likelihood](free, labels), free)[0]


def hessians(likelihood: str, outputs: Tensor) -> Tensor:
    """The Hessian of each example's loss by its flat outputs, (N, outputs, outputs); the labels do not matter."""
    n, size = len(outputs), outputs[0].numel()
    if likelihood == "gaussian":
        return torch.eye(size, dtype=outputs.dtype).expand(n, -1, -1)
    if likelihood == "bernoulli":
        p = outputs.detach().sigmoid().reshape(n, -1)
        return torch.diag_embed(p * (1 - p))
    p = outputs.detach().softmax(-1)
    blocks = torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
    return torch.stack([torch.block_diag(*example) for example in blocks.reshape(n, -1, *blocks.shape[-2:])])


# --- layers ---


@dataclass
class Rows:
    """What a layer received in one pass, and the derivatives at its outputs, for several directions of these.

    Args:
        inputs: (groups, rows, in), without ones for the bias; one-hot for an Embedding.
        errors: a tensor (groups, rows, out) for each direction.
        shared: whether its rows belong to no single example.
    """

    inputs: Tensor
    errors: list[Tensor] = field(default_factory=list)
    shared: bool = False

    def joined(self, other: Rows) -> Rows:
        errors = [torch.cat(pair, 1) for pair in zip(self.errors, other.errors)]
        return Rows(torch.cat([self.inputs, other.inputs], 1), errors, self.shared or other.shared)


def is_plain(module: nn.Module) -> bool:
    """Whether a module is a Linear, Conv or Embedding layer with its own forward pass and weight."""
    kind = next((kind for kind in PLAIN if isinstance(module, kind)), None)
    return (
        kind is not None
        and type(module).forward is kind.forward
        and not isinstance(module, NonDynamicallyQuantizableLinear)
        and isinstance(module._parameters.get("weight"), Tensor)
        and any(p.requires_grad for p in module.parameters(recurse=False))
    )


def input_rows(module: nn.Module, x: Tensor) -> Tensor:
    """(groups, rows, in), with patches cut out by a convolution with unit kernels."""
    if isinstance(module, nn.Embedding):
        return F.one_hot(x.flatten(), module.num_embeddings).double()[None]
    if isinstance(module, nn.Linear):
        return x.reshape(1, -1, x.shape[-1])
    assert isinstance(module, CONVOLUTIONS)
    size = module.weight[0].numel()
    copy = type(module)(
        module.in_channels, module.groups * size, module.kernel_size, module.stride, module.padding, module.dilation,
        module.groups, False, module.padding_mode, dtype=x.dtype,
    )  # fmt: skip
    copy.weight = nn.Parameter(torch.eye(size, dtype=x.dtype).view(size, *module.weight.shape[1:]).repeat(
        module.groups, *[1] * len(module.weight.shape[1:])
    ), requires_grad=False)  # fmt: skip
    return error_rows(copy, copy(x))


def error_rows(module: nn.Module, error: Tensor) -> Tensor:
    """(groups, rows, out)."""
    if not isinstance(module, CONVOLUTIONS):
        return error.reshape(1, -1, error.shape[-1])
    error = error if error.dim() == len(module.kernel_size) + 2 else error[None]
    return error.flatten(2).unflatten(1, (module.groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)


def layer_rows(model: nn.Module, inputs: tuple[Tensor, ...], directions: Sequence[Tensor]) -> dict[str, Rows]:
    """The rows of each plain layer by its name; several calls are one after the other."""
    calls: list[tuple[str, nn.Module, Tensor, Tensor]] = []

    def note(name: str):
        def hook(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            calls.append((name, module, args[0].detach().clone(), output))
            return output.clone()  # which may be overwritten

        return hook

    handles = [m.register_forward_hook(note(name), prepend=True) for name, m in model.named_modules() if is_plain(m)]
    try:
        outputs = model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    calls = [call for call in calls if call[3].requires_grad]
    taken = [call[3] for call in calls]

    def errors(direction: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(outputs, taken, direction, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(t) if e is None else e for e, t in zip(found, taken)]

    # An error that belongs to one example is multiplied by the weight of that example, each row by one weight.
    weights = torch.linspace(0.5, 1.5, len(outputs), dtype=outputs.dtype)
    weighted = errors(directions[0] * weights.view(-1, *[1] * (outputs.dim() - 1)))
    every = [errors(direction) for direction in directions]
    rows: dict[str, Rows] = {}
    for i, (name, module, x, _) in enumerate(calls):
        own = [error_rows(module, part[i]) for part in every]
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            padded = (x.flatten() == module.padding_idx)[None, :, None]
            own = [part.masked_fill(padded, 0.0) for part in own]
        one = Rows(input_rows(module, x), own, _is_shared(every[0][i], weighted[i], weights))
        rows[name] = rows[name].joined(one) if name in rows else one
    return rows


def _is_shared(plain: Tensor, weighted: Tensor, weights: Tensor) -> bool:
    """Whether an error is multiplied by none of the weights."""
    if not plain.numel():
        return False
    ratio = (weighted / plain)[plain.abs() > 1e-6 * plain.abs().max()]
    return bool(((ratio[:, None] - weights).abs().amin(1) > 1e-6).any())


def with_ones(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], -1)


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    if found.shape != expected.shape:
        return float("inf")
    size = max(expected.abs().max().item(), 1e-5) if expected.numel() else 1.0
    gap = (found - expected).abs().max().item() if expected.numel() else 0.0
    return gap / size if gap == gap else float("inf")


def by_name(model: nn.Module, flat: Tensor) -> Mapping[str, Tensor]:
    """The parts of a flat tensor (..., parameters), in the shape (..., *shape)."""
    params = trained(model)
    parts = flat.split([p.numel() for p in params.values()], -1)
    return {name: part.reshape((*flat.shape[:-1], *p.shape)) for (name, p), part in zip(params.items(), parts)}


# --- an architecture ---


class WrongNumber(AssertionError):
    """A number that the library gives without a warning and that differs from the reference."""


def check(what: str, found: Tensor, expected: Tensor) -> None:
    if (gap := difference(found.detach(), expected.detach())) > TOLERANCE:
        raise WrongNumber(f"{what} differs by {gap:.1e} of its largest entry")


class Problem:
    """An architecture with its data, and its curvature by plain autograd."""

    def __init__(self, case: Architecture) -> None:
        self.case, self.model, self.inputs = case, case.build(), case.inputs()
        self.outputs = self.model(*self.inputs).detach()
        self.labels, self.others = (case.labels(self.outputs, seed) for seed in (4, 5))
        self.jacobian = jacobian(self.model, self.inputs)  # (N, outputs, P)
        self.hessians = hessians(case.likelihood, self.outputs)
        self.names = list(trained(self.model))
        sizes = [w.numel() for w in trained(self.model).values()]
        self.places = dict(zip(self.names, torch.arange(sum(sizes)).split(sizes)))
        self._rows: dict[int, dict[str, Rows]] = {}
        self.rows = self.gradients(self.labels)  # (N, P)
        self.mean = by_name(self.model, self.rows.mean(0))

    @cached_property
    def gauss_newton(self) -> Tensor:
        products = (self.hessians @ self.jacobian).flatten(0, 1)
        return self.jacobian.flatten(0, 1).T @ products

    def gradients(self, labels: Tensor) -> Tensor:
        """Of each example's loss, (N, P)."""
        residual = residuals(self.case.likelihood, self.outputs, labels).flatten(1)
        return (residual[:, None] @ self.jacobian)[:, 0]

    def gradients_at(self, weights: dict[str, Tensor]) -> Tensor:
        """The same at other weights, by one backward pass for each example."""
        model = self.case.build()
        model.load_state_dict(weights, strict=False)
        params, found = list(trained(model).values()), []
        for i in range(len(self.labels)):
            outputs = model(*(x[i : i + 1] for x in self.inputs))
            loss = LOSSES[self.case.likelihood](outputs, self.labels[i : i + 1])
            found.append(flat(torch.autograd.grad(loss, params, allow_unused=True), params))
        return torch.stack(found)

    def rows_of(self, names: Sequence[str], labels: Tensor | None) -> Rows | None:
        """What these plain layers of the same kind received; None if they are not plain.

        Args:
            labels: errors are derivatives of their loss; for None, roots of the loss's Hessian.
        """
        known = dict(self.model.named_modules())
        modules = [known.get(name) for name in names]
        if not all(module is not None and is_plain(module) for module in modules) or len(set(map(type, modules))) > 1:
            return None
        if (key := id(labels)) not in self._rows:
            if labels is not None:
                directions = [residuals(self.case.likelihood, self.outputs, labels)]
            else:
                values, vectors = torch.linalg.eigh(self.hessians)
                roots = vectors * values.clamp(min=0).sqrt()[:, None]
                directions = [root.view_as(self.outputs) for root in roots.unbind(-1)]
            self._rows[key] = layer_rows(self.model, self.inputs, directions)
        found = [self._rows[key][name] for name in names if name in self._rows[key]]  # the others were not called
        return reduce(Rows.joined, found) if found else None

    def output_elements(self, name: str) -> int:
        """The number of elements of a module's outputs in one pass."""
        sizes: list[int] = []
        handle = self.model.get_submodule(name).register_forward_hook(lambda *args: sizes.append(args[2].numel()))
        self.model(*self.inputs)
        handle.remove()
        return sum(sizes)

    def check_gradient(self, weight: str, rows: Rows) -> None:
        """The rows must be all that the gradient consists of.

        Args:
            rows: for the labels `others`.
        """
        found = rows.errors[0].mT @ rows.inputs
        total = by_name(self.model, self.gradients(self.others).sum(0))[weight]
        parts = (found, found.mT)
        if all(difference(part.flatten(), total.flatten()) > TOLERANCE for part in parts):
            raise WrongNumber(f"{weight} has the factors of a layer, which do not explain its gradient")

    def loss(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        outputs = model(*self.inputs)
        return outputs, LOSSES[self.case.likelihood](outputs, self.labels) / len(outputs)
