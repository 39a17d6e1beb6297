"""Dropout posteriors: each unit is kept with some probability, or all its outgoing weights are zero."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from bayesgrad import noise
from bayesgrad.belief import Belief
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.functional import warn_of_loop
from bayesgrad.layers.network import Network, evaluation_mode, unwrap
from bayesgrad.posterior.concrete import ConcreteDropout
from bayesgrad.posterior.posterior import Posterior
from bayesgrad.posterior.units import Units

# Modules whose training mode affects dropout alone. TransformerEncoderLayer is among them, because in evaluation mode
# its fast path would skip the dropout modules inside of it.
DROPOUT_MODULES = (
    nn.modules.dropout._DropoutNd,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.TransformerEncoderLayer,
    ConcreteDropout,
)


class DropoutPosterior(Posterior):
    r"""Spike and slab over the outgoing weights of each unit: m with probability `keep`, else all zero.

    .. math::
        \theta_j = z_j m_j, \quad z_j \sim \mathrm{Bernoulli}(\pi_1), \quad
        E[\theta_j] = \pi_1 m_j, \quad \mathrm{Var}[\theta_j] = \pi_1 (1 - \pi_1) m_j^2

    The outgoing weights of a unit are all dropped or all kept. `predict` with `method="mc"` is MC dropout, with one
    mask for all examples of a batch; `"mean"` uses pi_1 m; `"linear"` linearises the network in the masks, and so
    includes the correlations of weights.

    >>> posterior = DropoutPosterior({"w": torch.ones(1, 2)}, {"w": torch.tensor([0.5, 1.0])}, {"w": Units(1)})
    >>> posterior.mean["w"], posterior.variance()["w"]
    (tensor([[0.5000, 1.0000]]), tensor([[0.2500, 0.0000]]))

    Args:
        slab: name -> m.
        keep: name -> pi_1 of each unit, (units,); weights without an entry are never dropped.
        units: name -> the place of these units in the weight.
        model, seed: see `Posterior`.

    Reference: Khan and Rue 2023, Eq. 41; Gal and Ghahramani, 2016.
    Differs from the paper: spike and slab have no width, as in its Eq. 84 (the delta method).
    Checked by: tests/equations/test_dropout.py, by enumeration of all masks.
    """

    kind = "dropout"
    central = ()  # training drops units

    def __init__(
        self,
        slab: Mapping[str, Tensor],
        keep: Mapping[str, Tensor],
        units: Mapping[str, Units],
        model: nn.Module | None = None,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__(model, seed=seed)
        for name, probability in keep.items():
            if name not in slab or name not in units:
                raise ValueError(f"slab and units must have an entry for {name!r}, as keep does.")
            count = units[name].count(slab[name].shape)
            if probability.shape != (count,):
                raise ValueError(f"keep of {name!r} has shape {tuple(probability.shape)}, but there are {count} units.")
        self.slab, self.keep, self.units = dict(slab), dict(keep), {name: units[name] for name in keep}

    @property
    def mean(self) -> dict[str, Tensor]:
        return self._masked(self.keep)

    def variance(self) -> dict[str, Tensor]:
        zero = {name: torch.zeros_like(m) for name, m in self.slab.items() if name not in self.keep}
        spread = {name: self._factor(name, p * (1 - p)) * self.slab[name].square() for name, p in self.keep.items()}
        return {name: (zero | spread)[name] for name in self.slab}

    def _factor(self, name: str, values: Tensor) -> Tensor:
        return self.units[name].spread(values, self.slab[name].shape).to(self.slab[name])

    def _masked(self, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: m * self._factor(name, masks[name]) if name in masks else m for name, m in self.slab.items()}

    def _shapes(self) -> dict[str, torch.Size]:
        return {name: m.shape for name, m in self.slab.items()}

    def _draw(self, generators: list[torch.Generator]) -> Iterator[dict[str, Tensor]]:
        for generator in generators:
            # On the CPU, so that a seed gives the same masks on every device; uniform in [0, 1).
            yield self._masked(
                {
                    name: (torch.rand(keep.shape, generator=generator, device="cpu").to(keep.device) < keep).to(keep)
                    for name, keep in self.keep.items()
                }
            )

    def _linear_moments(self, network: Network, joint: bool) -> tuple[Tensor, Tensor]:
        """Outputs at the mean, and their variance sum_j (df/dz_j)^2 keep_j (1 - keep_j)."""
        keep = {name: p.to(compute_dtype(self.slab[name].dtype)) for name, p in self.keep.items()}
        centre = network(self._cast(self.mean, network.model))
        count = centre[:1].numel()
        if not len(centre) or not keep:
            return centre, centre.new_zeros(len(centre), count, count) if joint else torch.zeros_like(centre)
        spread = torch.cat([p * (1 - p) for p in keep.values()])

        def one(*example: Tensor) -> Tensor:
            alone = [part[None] for part in example]
            masked = jacrev(lambda z: network.at(self._cast(self._masked(z), network.model))(*alone).flatten())(keep)
            jacobian = torch.cat([masked[name] for name in keep], 1)
            return (jacobian * spread) @ jacobian.mT if joint else (jacobian.square() * spread).sum(1)

        with torch.enable_grad():
            try:
                found = vmap(one, chunk_size=16)(*network.inputs).detach()
            except RuntimeError as error:
                found = torch.stack([one(*row).detach() for row in zip(*network.inputs)])
                warn_of_loop(network.model, error)
        return centre, found if joint else found.view_as(centre)

    def _beliefs(self) -> Mapping[str, Belief]:
        raise ValueError("the linearised prediction of dropped units cannot be traced: use method='mc'.")

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        units = {name: torch.tensor([units.dim, units.groups]) for name, units in self.units.items()}
        return {"slab": self.slab, "keep": self.keep, "units": units}

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Mapping[str, Tensor]], model: nn.Module | None) -> DropoutPosterior:
        units = {name: Units(*values.tolist()) for name, values in tensors["units"].items()}
        return cls(tensors["slab"], tensors["keep"], units, model)


class MCDropout(Posterior):
    """Predictions of a model with dropout modules, averaged over their masks; see `mc_dropout`.

    Masks apply to activations, not to weights, so there are no weights to sample: `mean` and `variance` are empty.
    """

    kind = "mc_dropout"

    @property
    def mean(self) -> dict[str, Tensor]:
        return {}

    def variance(self) -> dict[str, Tensor]:
        return {}

    def _shapes(self) -> dict[str, torch.Size]:
        return {}

    def _draw(self, generators: list[torch.Generator]) -> Iterator[dict[str, Tensor]]:
        return ({} for _ in generators)

    def sample(self, n: int = 1, *, seed: int | None = None) -> dict[str, Tensor]:
        raise TypeError("MC dropout masks activations and has no weights to sample: use sampled() or predict().")

    @contextmanager
    def sampled(self, model: nn.Module | None = None, *, seed: int | None = None) -> Iterator[nn.Module]:
        """Within the context dropout is active and all else is in evaluation mode; the global generator is restored."""
        model = self._model(model)
        (generator,) = self._generators(1, seed)
        with evaluation_mode(model), dropout_active(unwrap(model), generator.initial_seed()):
            yield model

    def _outputs(self, network: Network, samples: int, seed: int | None) -> Iterator[Tensor]:
        network = replace(network, chunk=None)  # a mask is drawn for the whole batch
        for generator in self._generators(samples, self._seed(seed)):
            with dropout_active(network.model, generator.initial_seed()):
                outputs = network({})
            yield outputs

    def _choose(self, samples: int, seed: int) -> Iterator[dict[str, Tensor]]:
        raise ValueError("MC dropout masks activations and has no weights to export: use method='mean'.")

    def _centre(self, network: Network) -> dict[str, Tensor]:
        raise ValueError("MC dropout has no linearised prediction: use method='mc'.")

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        return {}

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Mapping[str, Tensor]], model: nn.Module | None) -> MCDropout:
        return cls(model)


def mc_dropout(model: nn.Module, *, seed: int = 0) -> MCDropout:
    """MC dropout for a model that was trained with dropout modules.

    torch's dropout divides kept activations by pi_1 = 1 - p, so that the stored weight is pi_1 m, the posterior mean:
    `predict(x, method="mean")` is the model in evaluation mode. `method="mc"` sets only dropout modules to training
    mode, with masks that are functions of the seed and the sample; the global generator and every module's mode are
    restored. Unlike in `DropoutPosterior`, each example has its own masks.

    >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    >>> mc_dropout(model).predict(torch.ones(5, 2), samples=4).shape
    torch.Size([5, 3])

    Args:
        model: with nn.Dropout (of any kind), ConcreteDropout, or dropout inside of attention or recurrent layers. Calls
            of `functional.dropout` in the forward pass of a user's module are not found.
        seed: of the masks.

    Reference: Gal and Ghahramani, 2016.
    Checked by: tests/equations/test_dropout.py.
    """
    if not any(_has_dropout(module) for module in model.modules()):
        raise ValueError("the model has no dropout module with p > 0: there are no masks to average over.")
    return MCDropout(model, seed=seed)


def _has_dropout(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.dropout > 0
    return isinstance(module, ConcreteDropout)


@contextmanager
def dropout_active(model: nn.Module, seed: int) -> Iterator[None]:
    """Sets dropout modules alone to training mode, with random numbers from `seed`; restores modes and generators."""
    modules = [module for module in model.modules() if isinstance(module, DROPOUT_MODULES)]
    modes = [module.training for module in modules]
    concrete: list[Any] = [module for module in modules if isinstance(module, ConcreteDropout)]
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    with ExitStack() as forks:
        for device in devices:
            forks.enter_context(torch.random.fork_rng(devices=[device.index], device_type=device.type))
        state = torch.get_rng_state()
        try:
            # torch.manual_seed searches for devices of every kind, which takes longer than a small model.
            torch.manual_seed(seed) if devices else torch.default_generator.manual_seed(seed)
            for module in modules:
                module.training = True
            for index, module in enumerate(concrete):
                module.given_key = noise.key(seed, index)
            yield
        finally:
            torch.set_rng_state(state)
            for module in concrete:
                module.given_key = None
            for module, mode in zip(modules, modes):
                module.training = mode
