"""Laplace's method: a posterior from a trained model, whichever optimizer trained it."""

from __future__ import annotations

import inspect
import math
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from bayesgrad import distributed, layers, likelihoods, noise
from bayesgrad.custom_likelihoods import CustomLikelihood
from bayesgrad.data_shards import DataShard, data_of
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.batches import LABELS, Call, Forward, Inputs, Output, batches_on, with_progress
from bayesgrad.layers.composite import owners
from bayesgrad.layers.examples import RowLayouts
from bayesgrad.layers.fisher import FISHERS, batch_gradients, check_batch_mixing
from bayesgrad.layers.functional import refuse_renorm
from bayesgrad.layers.network import clean_name, evaluation_mode, parameters_of, requires_grad_only, unwrap
from bayesgrad.layers.recorder import check_outputs
from bayesgrad.layers.stateless import copied_buffers
from bayesgrad.posterior.laplace import Fit, LaplacePosterior
from bayesgrad.structures.structure import Accumulator, Structure, check_prior

BIASES = ("joint", "separate")
DIRECTIONS = 16  # output directions whose gradients are in memory at once
PASS = 256  # examples of a subsample that are processed at once
FULL = 1000  # weights up to which the whole matrix is the default: it is exact, and as fast as its factors
OWN_LOSS = 0.01  # relative difference of the mean loss from the model's own; half precision rounds by less
MODES = 0.01  # of the outputs in training mode from those in evaluation mode


def laplace(
    model: nn.Module,
    loader: Iterable,
    *,
    likelihood: str | likelihoods.Likelihood,
    structure: str | None = None,
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
    forward: Forward | None = None,
    output: Output | None = None,
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

    The model stays in its mode, which must be evaluation mode if it has BatchNorm, dropout or anything else that makes
    a difference. Weights, gradients and buffers, such as statistics, do not change. Parameters that are not in a layer
    with a matrix (normalisation, raw parameters; see docs/layers.md) get a diagonal under `"kron"` and `"input"`, with
    a warning.

    Args:
        model: the trained model.
        loader: batches (inputs, labels); inputs are a tensor, a tuple of several arguments, or a mapping of keyword
            arguments. A batch may also be a mapping of keyword arguments with the key `"labels"`, which the model does
            not receive. Labels of -100 have no loss, as those of padding. With a `DistributedSampler`, or as a
            `bayesgrad.DataShard`, it has the part of the data that belongs to a process: all processes call this, and
            have the same posterior of all data.
        likelihood: `"categorical"`, `"bernoulli"`, `"gaussian"` or `"poisson"`, or an object of
            `bayesgrad.likelihoods`.
        structure: as in the table. None for `"full"` for up to 1,000 weights, and `"kron"` for more.
        fisher: `"exact"`, `"sampled"` (one label for each example, drawn from the model) or `"empirical"` (the given
            labels).
        bias: `"joint"` for one block of weight and bias under `"kron"` and `"input"`, `"separate"` for two.
        prior_precision: of zero-mean weights; one number for all, or one for each parameter by name.
        noise_scale: the standard deviation of Gaussian data; None for that of the likelihood, 1 for `"gaussian"`, which
            `tune_prior` then tunes together with the prior.
        temperature: T of the Gaussian of exp(-loss/T), where the loss includes the prior. It multiplies the covariance.
        num_data: N, if the loader does not go through all data exactly once.
        subsample: the number of examples, drawn at random, from which H is computed. The loss uses all examples.
        seed: of drawn labels, of the subsample, and of the posterior's samples; None draws one from torch's global
            generator.
        params: names of parameters or modules to which the posterior is restricted; `"last_layer"` for the last
            layer with a matrix, such as Linear or Conv, if the one that is registered last is called last. All other
            parameters are fixed.
        progress: whether to show a progress bar (needs rich); None shows it in a terminal.
        forward: `forward(model, inputs)` calls the model; None for `model(x)`, or `model(**inputs)` for a mapping.
            Examples are along the first dimension of every tensor.
        output: a function from what the model returns to the tensor of outputs; None for a tensor itself, the `logits`
            of a mapping or an object, or the only floating-point tensor of a tuple. The posterior keeps both functions
            for its predictions, but not in files.

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
    for name, value, known in (("structure", structure or "full", Structure.by_name), ("fisher", fisher, FISHERS)):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}.")
    if bias not in BIASES:
        raise ValueError(f"bias must be 'joint' or 'separate', got {bias!r}.")
    for name, value in (("num_data", num_data), ("subsample", subsample)):
        if value is not None and not value >= 1:
            raise ValueError(f"{name} must be None or a number >= 1, got {value!r}.")
    data = data_of("laplace", loader, num_data)
    if subsample and subsample < data.size:
        raise ValueError(f"subsample must be at least the number of processes, {data.size}, got {subsample}.")
    network = unwrap(model)
    chosen = _select(network, params)
    check_prior(prior_precision, 1.0 if noise_scale is None else noise_scale, chosen, temperature)
    if noise_scale not in (None, 1.0) and not kind.has_noise:
        raise ValueError(f"the likelihood {kind.kind!r} has no noise: leave noise_scale out, got {noise_scale!r}.")
    full, kind = likelihoods.named(likelihood, noise_scale), kind.with_noise(1.0)  # the noise enters with the prior
    _check_layers(network)
    _check_weights(parameters_of(network))
    if structure is None:
        structure = "full" if sum(p.numel() for p in chosen.values()) <= FULL else "kron"
    kept = Structure.by_name[structure]
    kept.check(chosen)
    if seed is None:
        seed = int(noise.fresh_seed() if data.size == 1 else distributed.from_process(noise.fresh_seed()))
    generator, other = (torch.Generator().manual_seed(noise.seed32(seed) + i) for i in range(2))
    pool = RandomSubset(subsample, partial(data.uniform, generator=other)) if subsample else None
    draw = partial(data.labels, kind, generator=generator)
    blocks: list[Accumulator] = []
    device = next(iter(chosen.values())).device
    at_once = None if kept.stores_gradients else 1 if kept.one_direction else DIRECTIONS
    layouts = RowLayouts()
    examples = used = 0
    loss, numbers = 0.0, 0

    call = Call(forward, output)

    def accumulate(inputs: Inputs, labels: Tensor) -> Tensor:
        counted, outputs = kind.mask(labels), labels
        given = None if fisher != "empirical" else labels if counted is None else labels.where(counted, 0)
        called, tensors = call(network, inputs)
        found = batch_gradients(called, tensors, kind, fisher, given, draw, at_once, layouts, counted=counted)
        with closing(found) as parts:
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
        with data.together():
            for inputs, labels in batches_on(with_progress(data, progress, "laplace"), device):
                if params == "last_layer" and not examples:
                    _check_last(network, chosen, lambda inputs=inputs: _outputs(*call(network, inputs)))
                if pool is None:
                    outputs = accumulate(inputs, labels)
                else:
                    outputs = _outputs(*call(network, inputs))
                    pool.add(inputs, labels)
                if not examples:
                    _check_mode(*call(network, inputs), outputs)
                    if forward is None and output is None:
                        _check_own_loss(network, inputs, labels, kind, outputs)
                own = float(kind.each_loss(outputs, labels).double().sum())
                if math.isnan(own):
                    raise ValueError(
                        "the loss of a batch is NaN, as of labels that are NaN: leave out examples without a label."
                    )
                loss += own
                numbers += outputs.numel()
                examples += len(outputs)
            if not examples:
                raise ValueError(
                    "the loader gave no examples: pass one with at least one batch (inputs, labels), not exhausted."
                )
        if pool is not None:
            pool.share(data)
            with data.together():
                for inputs, labels in pool.passes():
                    used += len(accumulate(inputs, labels))
    data.share(blocks, seed, *(_fingerprint(p) for p in chosen.values() if data.size > 1))
    loss, *counts = data.total([loss, numbers, examples, used], device)
    numbers, examples, used = map(int, counts)
    total = num_data or examples
    hessians = [block.finish(total, used or examples) for block in blocks]
    power = 0 if not full.has_noise else 2 if fisher == "empirical" else 1
    fit = Fit(loss * total / examples, numbers * total / examples, power)
    mean = {name: p.detach().to(compute_dtype(p.dtype), copy=True) for name, p in chosen.items()}
    posterior = LaplacePosterior(
        hessians,
        mean,
        fit,
        likelihood=full if isinstance(full, CustomLikelihood) else full.kind,
        prior_precision=prior_precision,
        noise_scale=full.noise_scale,
        temperature=temperature,
        noise_known=noise_scale is not None or not isinstance(likelihood, str),
        model=model,
        seed=seed,
    )
    posterior.forward, posterior.output = forward, output
    return posterior


# --- data ---


@dataclass
class RandomSubset:
    """A uniform random subset of `size` examples from a stream of batches (reservoir sampling by random keys).

    Args:
        size: the number of examples.
        uniform: random keys for so many examples.
    """

    size: int
    uniform: Callable[[int], Tensor]
    keys: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))
    held: dict[Any, Tensor] = field(default_factory=dict)  # tensors of the inputs, and labels
    fixed: dict[str, Any] | None = None  # arguments that are no tensors of examples, of inputs that are mappings
    single: bool = False  # whether inputs are one tensor, and no tuple

    def add(self, inputs: Inputs, labels: Tensor) -> None:
        parts: dict[Any, Any] = dict(inputs) if isinstance(inputs, Mapping) else dict(enumerate(_several(inputs)))
        self.single = isinstance(inputs, Tensor)
        batch = {key: x for key, x in parts.items() if isinstance(x, Tensor) and len(x) == len(labels)}
        if isinstance(inputs, Mapping):
            self.fixed = {key: x for key, x in parts.items() if key not in batch}
        batch[LABELS] = labels
        keys = torch.cat([self.keys, self.uniform(len(labels))])
        if self.held and any(self.held[key].shape[1:] != x.shape[1:] for key, x in batch.items()):
            raise ValueError(
                "subsample= needs examples of one shape, and batches have different ones: pad all batches to the same "
                "length, or pass fewer examples without subsample=."
            )
        joint = {key: torch.cat([self.held[key], new]) for key, new in batch.items()} if self.held else batch
        self._keep(keys, joint, slice(self.size))

    def _keep(self, keys: Tensor, held: Mapping[Any, Tensor], which: slice) -> None:
        """Keeps some examples, counted in the order of their keys."""
        keep = keys.argsort()[: self.size][which]
        self.keys, self.held = keys[keep], {key: part[keep.to(part.device)] for key, part in held.items()}

    def share(self, data: DataShard) -> None:
        """Replaces what each process has by its part of a subset of all data, which is the subset of one process."""
        if data.size > 1:
            held = list(self.held.values())
            keys, *parts = distributed.gathered(self.keys.to(held[0].device), *held)
            self._keep(keys.cpu(), dict(zip(self.held, parts)), slice(data.rank, None, data.size))

    def passes(self) -> Iterator[tuple[Inputs, Tensor]]:
        for parts in zip(*[part.split(PASS) for part in self.held.values()]):
            batch = dict(zip(self.held, parts))
            labels = batch.pop(LABELS)
            several = tuple(batch.values()) if self.fixed is None else {**self.fixed, **batch}
            yield batch[0] if self.single else several, labels


def _several(inputs: Any) -> tuple[Any, ...]:
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)


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


def _check_last(model: nn.Module, chosen: Mapping[str, nn.Parameter], run: Callable[[], Any]) -> None:
    """Raises if the layer of these parameters, which is registered last, is not the one that `run` calls last.

    Parts of recurrent layers and attention are not called; the modules that have them are.
    """
    names = {module: clean_name(f"{name}.")[:-1] for name, module in model.named_modules()}
    found = [one for _, part in layers.known_layers(model) if layers.is_matrix(part) for one in owners(part) or [part]]
    called: list[nn.Module] = []
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # compiled code need not look at hooks
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in dict.fromkeys(found):
            stack.callback(module.register_forward_hook(lambda one, *_: called.append(one)).remove)
        run()
    own = {id(p) for p in chosen.values()}
    if called and not own <= {id(p) for p in called[-1].parameters()}:
        raise ValueError(
            f"params='last_layer' is the layer that is registered last, {names[found[-1]]!r}, but the model calls "
            f"{names[called[-1]]!r} last: pass the name of the layer, params={names[called[-1]]!r}."
        )


def _belongs(own: str, name: str) -> bool:
    return own == name or own.startswith(f"{name}.")


def _check_layers(model: nn.Module) -> None:
    check_batch_mixing(model)
    refuse_renorm(model)
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.training and module.p > 0:
            raise ValueError(
                f"{name} ({type(module).__name__}) is in training mode: call model.eval() before laplace()."
            )


def _check_mode(model: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
    """Raises if the outputs are other ones than those in evaluation mode, in which the posterior predicts."""
    if not any(module.training for module in model.modules()):
        return
    with evaluation_mode(model):
        difference = (outputs - _outputs(model, inputs)).norm()
    if bool(difference > MODES * outputs.norm()):
        raise ValueError(
            f"the model's outputs in training mode are not those in evaluation mode, in which it predicts: they differ "
            f"by {float(difference / outputs.norm()):.2g} of their norm; call model.eval() before laplace()."
        )


def _fingerprint(p: Tensor) -> int:
    return zlib.crc32(p.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())


def _check_weights(parameters: Mapping[str, nn.Parameter]) -> None:
    for name, p in parameters.items():
        if not bool(torch.isfinite(p).all()):
            raise ValueError(f"{name} has entries that are not finite: training has diverged; train again.")


def _outputs(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    with torch.no_grad(), copied_buffers(model):
        outputs = model(*inputs)
    check_outputs(outputs)
    _check_finite(outputs)
    return outputs


def _check_own_loss(model: nn.Module, inputs: Inputs, labels: Tensor, kind: Any, outputs: Tensor) -> None:
    """Raises if a model that computes a loss itself, from labels, has another one: it may shift labels by a token."""
    if not isinstance(inputs, Mapping) or not kind.has_classes or LABELS not in _arguments(model):
        return
    with torch.no_grad(), copied_buffers(model):
        own = getattr(model(**{**inputs, LABELS: labels}), "loss", None)
    if own is None:
        return
    counted = kind.mask(labels)
    count = kind.losses(outputs) if counted is None else int(counted.sum())
    mean = float(kind.each_loss(outputs, labels).double().sum()) / max(1, count)
    if abs(float(own) - mean) > OWN_LOSS * (1 + abs(mean)):
        raise ValueError(
            f"the model's own loss of a batch is {float(own):.4g}, but its outputs and labels have {mean:.4g}: pass "
            "output=, and labels that fit it; for a language model output=lambda o: o.logits[:, :-1] and "
            "labels[:, 1:]."
        )


def _arguments(model: nn.Module) -> Mapping[str, Any]:
    return inspect.signature(model.forward).parameters


def _check_finite(outputs: Tensor) -> None:
    if not bool(torch.isfinite(outputs).all()):
        raise ValueError("the model's outputs are not finite: check its weights and inputs.")
