"""Outputs of a network that is linearised at given weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.network import Network
from bayesgrad.warning import warn


def linearised_outputs(
    network: Network, mean: Mapping[str, Tensor], changes: Iterable[Mapping[str, Tensor]]
) -> Iterator[Tensor]:
    """f(m) + J v for each change v of the weights m by name, with the Jacobian J of all outputs.

    J v is the derivative of the product u'J by u, which a second backward pass gives: no rows of J are formed, and
    every model is supported that can be differentiated twice. Outputs in half precision become float32, in which small
    changes are not rounded away.
    """
    with torch.inference_mode(False), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        network = replace(network, inputs=tuple(x.clone() if x.is_inference() else x for x in network.inputs))
        weights = {name: weight.detach().clone().requires_grad_() for name, weight in mean.items()}
        outputs = network(weights)
        left = torch.zeros_like(outputs, requires_grad=True)
        products = torch.autograd.grad(outputs, list(weights.values()), left, create_graph=True, allow_unused=True)
        used = {name: product for name, product in zip(weights, products) if product is not None}
    centre = outputs.detach().to(compute_dtype(outputs.dtype))
    for change in changes:
        if not used:
            yield centre
            continue
        given = [change[name].to(product) for name, product in used.items()]
        (found,) = torch.autograd.grad(list(used.values()), left, given, retain_graph=True)
        yield centre + found


def gaussian_outputs(mean: Tensor, covariance: Tensor, generators: Iterable[torch.Generator]) -> Iterator[Tensor]:
    """Samples of outputs with this mean, (examples, *outputs), and a covariance of each example's outputs."""
    values, vectors = torch.linalg.eigh(covariance)  # which may be singular
    root = vectors * values.clamp(min=0).sqrt()[:, None, :]  # (examples, outputs, outputs)
    for generator in generators:
        noise = torch.randn(root.shape[:2], dtype=root.dtype, generator=generator, device="cpu").to(root.device)
        yield mean + (root @ noise[..., None]).view_as(mean)


def warn_of_samples(error: Exception) -> None:
    """Warns that a model cannot be linearised."""
    reason = str(error).strip().split("\n")[0]
    warn(
        f"the model cannot be linearised ({reason}), so the prediction averages over samples of the weights, which is "
        "often much worse: pass method='mc' if that is wanted.",
    )


def refuse_export() -> None:
    """Raises within torch.export: an exported generator goes on from call to call, and ignores the seed."""
    if torch.compiler.is_exporting():
        raise RuntimeError(
            "torch.export supports predict(method='mean') alone, since exported samples would ignore their seed after "
            "the first call: draw weights before, with posterior.sample(n, seed=...), and export their average."
        )
