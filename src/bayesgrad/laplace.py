"""Laplace's method: a posterior from a trained model, whichever optimizer trained it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from bayesgrad import distributed, layers, likelihoods
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.examples import RowLayouts
from bayesgrad.layers.fisher import FISHERS, batch_gradients, check_batch_mixing, check_outputs
from bayesgrad.layers.network import parameters_of, requires_grad_only, unwrap
from bayesgrad.noise import seed32
from bayesgrad.posterior.laplace import Fit, LaplacePosterior
from bayesgrad.structures.structure import Accumulator, Structure, check_prior

BIASES = ("joint", "separate")
DIRECTIONS = 16  # output directions whose gradients are in memory at once
PASS = 256  # examples of a subsample that are processed at once


def laplace(
    model: nn.Module,
    loader: Iterable,
    *,
    likelihood: str | likelihoods.Likelihood,
    structure: str = "diag",
    fisher: str = "exact",
    bias: str = "joint",
    prior_precision: float | Mapping[str, float] = 1.0,
    noise_scale: float | None = None,
    temperature: float = 1.0,
    num_data: float | None = None,
    subsample: int | None = None,
    seed: int | None = None,
    params: str | Iterable[str] | None = None,
    progress: bool | None = None,
) -> LaplacePosterior:
    r"""Approximates the posterior by a Gaussian at the trained weights w, with the curvature of the loss there.

    .. math::
        p(w' | D) \approx N\left(w, (H + \delta I)^{-1}\right), \quad
        H = \frac{N}{n} \sum_{j \le n} J_j^T \nabla^2 \ell_j J_j

    for the n examples of a loader, prior precision δ = `prior_precision` and N = `num_data`. J_j is the Jacobian of the
    outputs, and the factor between the Jacobians is the Hessian of the loss by the outputs. H is therefore the
    Gauss-Newton matrix, which equals the Fisher.

    | structure | approximation of H |
    |---|---|
    | `"diag"` | the diagonal |
    | `"kron"` | A ⊗ E for each layer: second moments of inputs and errors; the prior is added in their eigenbasis |
    | `"input"` | A ⊗ I for each layer: second moments of inputs alone |
    | `"full"` | the dense matrix |
    | `"subsampled"` | exact for the examples of a subsample, as products with their gradients |

    The model stays in its mode, which must be evaluation mode if it has BatchNorm or dropout. Weights, gradients and
    statistics do not change. Parameters that are not in a layer with a matrix (normalisation, raw parameters; see
    docs/layers.md) get a diagonal under `"kron"` and `"input"`, with a warning.

    Args:
        model: the trained model.
        loader: batches (inputs, labels); inputs are a tensor, or a tuple of several arguments.
        likelihood: `"categorical"`, `"bernoulli"`, `"gaussian"` or `"poisson"`, or an object of
            `bayesgrad.likelihoods`.
        fisher: `"exact"`, `"sampled"` (one label for each example, drawn from the model) or `"empirical"` (the given
            labels).
        bias: `"joint"` for one block of weight and bias under `"kron"` and `"input"`, `"separate"` for two.
        prior_precision: of zero-mean weights; one number for all, or one for each parameter by name.
        noise_scale: the standard deviation of Gaussian data; None for that of the likelihood, 1 for `"gaussian"`.
        temperature: T of the Gaussian of exp(-loss/T), where the loss includes the prior. It multiplies the covariance.
        num_data: N, if the loader does not go through all data exactly once.
        subsample: the number of examples, drawn at random, from which H is computed. The loss uses all examples.
        seed: of drawn labels, of the subsample, and of the posterior's samples.
        params: names of parameters or modules to which the posterior is restricted; `"last_layer"` for the last
            layer with a matrix, such as Linear or Conv. All other parameters are fixed.
        progress: whether to show a progress bar (needs rich); None shows it in a terminal.

    Raises:
        ValueError: an argument, the model or the data cannot be used. The model is unchanged.

    Example:
        >>> model = torch.nn.Linear(2, 3)
        >>> posterior = laplace(model, [(torch.randn(4, 2), torch.tensor([0, 1, 2, 0]))], likelihood="categorical")
        >>> posterior.predict(torch.randn(5, 2), samples=8).shape
        torch.Size([5, 3])

    Reference: Benzing 2021, appendices A.1 and C; Ritter et al., 2018, for Kronecker factors.
    Differs from the paper: the Fisher is multiplied by N, not by the size of the subsample (A.1).
    Checked by: tests/equations/test_laplace.py, against explicit Jacobians and laplace-torch.
    """
    kind = likelihoods.named(likelihood)
    for name, value, known in (("structure", structure, Structure.by_name), ("fisher", fisher, FISHERS)):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}.")
    if bias not in BIASES:
        raise ValueError(f"bias must be 'joint' or 'separate', got {bias!r}.")
    for name, value in (("num_data", num_data), ("subsample", subsample)):
        if value is not None and not value >= 1:
            raise ValueError(f"{name} must be None or a number >= 1, got {value!r}.")
    distributed.refuse_shard_of_data("laplace", loader, num_data)
    network = unwrap(model)
    chosen = _select(network, params)
    check_prior(prior_precision, 1.0 if noise_scale is None else noise_scale, chosen, temperature)
    full, kind = likelihoods.named(likelihood, noise_scale), kind.with_noise(1.0)  # the noise enters with the prior
    _check_modes(network)
    _check_weights(parameters_of(network))
    kept = Structure.by_name[structure]
    kept.check(chosen)
    generator, other = (torch.Generator().manual_seed(seed32(seed or 0) + i) for i in range(2))
    pool = RandomSubset(subsample, other) if subsample else None
    blocks: list[Accumulator] = []
    device = next(iter(chosen.values())).device
    at_once = None if kept.stores_gradients else 1 if kept.one_direction else DIRECTIONS
    layouts = RowLayouts()
    examples = used = 0
    loss, numbers = 0.0, 0

    def accumulate(inputs: tuple[Tensor, ...], labels: Tensor) -> Tensor:
        given, outputs = labels if fisher == "empirical" else None, labels
        with closing(batch_gradients(network, inputs, kind, fisher, given, generator, at_once, layouts)) as parts:
            for seen in parts:
                outputs = seen.outputs
                _check_finite(outputs)
                if not blocks:
                    blocks.extend(kept.blocks(chosen, network, bias == "joint", seen))
                for block in blocks:
                    block.add(seen)
                if all(block.one_direction for block in blocks):
                    break
        return outputs

    with requires_grad_only(network, chosen):
        for inputs, labels in _batches(_with_progress(loader, progress), device):
            if pool is None:
                outputs = accumulate(inputs, labels)
            else:
                outputs = _outputs(network, inputs)
                pool.add(inputs, labels)
            loss += float(kind.loss(outputs, labels).double().sum())
            numbers += outputs.numel()
            examples += len(outputs)
        if not examples:
            raise ValueError(
                "the loader gave no examples: pass a loader with at least one batch (inputs, labels), not exhausted."
            )
        if pool is not None:
            for inputs, labels in pool.passes():
                used += len(accumulate(inputs, labels))
    total = num_data or examples
    hessians = [block.finish(total, used or examples) for block in blocks]
    power = 0 if not full.has_noise else 2 if fisher == "empirical" else 1
    fit = Fit(loss * total / examples, numbers * total / examples, power)
    mean = {name: p.detach().to(compute_dtype(p.dtype), copy=True) for name, p in chosen.items()}
    return LaplacePosterior(
        hessians,
        mean,
        fit,
        likelihood=full.kind,
        prior_precision=prior_precision,
        noise_scale=full.noise_scale,
        temperature=temperature,
        model=model,
        seed=seed or 0,
    )


# --- data ---


@dataclass
class RandomSubset:
    """A uniform random subset of `size` examples from a stream of batches (reservoir sampling by random keys)."""

    size: int
    generator: torch.Generator
    keys: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))
    held: tuple[Tensor, ...] = ()

    def add(self, inputs: tuple[Tensor, ...], labels: Tensor) -> None:
        batch = (*inputs, labels)
        keys = torch.cat([self.keys, torch.rand(len(labels), dtype=torch.float64, generator=self.generator)])
        keep = keys.argsort()[: self.size]
        joint = [torch.cat([old, new]) for old, new in zip(self.held, batch)] if self.held else batch
        self.keys, self.held = keys[keep], tuple(part[keep.to(part.device)] for part in joint)

    def passes(self) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
        for parts in zip(*[part.split(PASS) for part in self.held]):
            yield parts[:-1], parts[-1]


def _batches(loader: Iterable, device: torch.device) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
    for batch in loader:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not isinstance(batch[1], Tensor):
            raise TypeError(f"the loader must give pairs (inputs, labels) of tensors, got a {type(batch).__name__}.")
        inputs = tuple(batch[0]) if isinstance(batch[0], (tuple, list)) else (batch[0],)
        if not all(isinstance(x, Tensor) for x in inputs):
            raise TypeError(f"inputs must be a tensor or a tuple of tensors, got {type(batch[0]).__name__}.")
        if len(inputs[0]):
            yield tuple(x.to(device) for x in inputs), batch[1].to(device)


def _with_progress(loader: Iterable, progress: bool | None) -> Iterable:
    """The loader, with a progress bar if one is wanted and rich is installed."""
    if progress is False or (progress is None and not sys.stderr.isatty()):
        return loader
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return loader
    total = len(loader) if hasattr(loader, "__len__") else None  # pyright: ignore[reportArgumentType]
    return track(loader, "laplace", total=total, console=Console(stderr=True), transient=True)


# --- model ---


def _select(model: nn.Module, params: str | Iterable[str] | None) -> dict[str, nn.Parameter]:
    """The parameters that the posterior is about, in the order of the model."""
    known = parameters_of(model)
    if params is None:
        found = {name: p for name, p in known.items() if p.requires_grad}
        if not found:
            raise ValueError("the model has no trainable parameters.")
        return found
    if params == "last_layer":
        last = [module for _, module in layers.known_layers(model) if layers.is_matrix(module)][-1:]
        own = {id(p) for module in last for p in layers.own_parameters(module).values()}
        if not own:
            raise ValueError("the model has no Linear, Conv or Embedding layer: name parameters in params= instead.")
        return {name: p for name, p in known.items() if id(p) in own}
    wanted = [params] if isinstance(params, str) else list(params)
    for name in wanted:
        if not any(_belongs(own, name) for own in known):
            raise ValueError(f"the model has no parameter or module {name!r} with parameters; see named_parameters().")
    return {own: p for own, p in known.items() if any(_belongs(own, name) for name in wanted)}


def _belongs(own: str, name: str) -> bool:
    return own == name or own.startswith(f"{name}.")


def _check_modes(model: nn.Module) -> None:
    check_batch_mixing(model)
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.training and module.p > 0:
            raise ValueError(
                f"{name} ({type(module).__name__}) is in training mode: call model.eval() before laplace()."
            )


def _check_weights(parameters: Mapping[str, nn.Parameter]) -> None:
    for name, p in parameters.items():
        if not bool(torch.isfinite(p).all()):
            raise ValueError(f"{name} has entries that are not finite: training has diverged; train again.")


def _outputs(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    with torch.no_grad():
        outputs = model(*inputs)
    check_outputs(outputs)
    _check_finite(outputs)
    return outputs


def _check_finite(outputs: Tensor) -> None:
    if not bool(torch.isfinite(outputs).all()):
        raise ValueError("the model's outputs are not finite: check its weights and inputs.")
