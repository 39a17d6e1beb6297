"""Small networks that use their layers in unusual ways."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from sequence_networks import WORDS
from vision_networks import Apply


class Siamese(nn.Module):
    """One encoder, called for both inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.LayerNorm(5), nn.Linear(5, 3))
        self.head = nn.Linear(3, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head((self.encoder(a) - self.encoder(b)).abs())


class StackedSiamese(Siamese):
    """Both inputs in one batch of twice the size."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        left, right = self.encoder(torch.cat([a, b])).chunk(2)
        return self.head((left - right).abs())


class DeepSets(nn.Module):
    """A sum over the elements of a set; optionally examples and elements in one dimension."""

    def __init__(self, merged: bool = False) -> None:
        super().__init__()
        self.merged = merged
        self.inner = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
        self.outer = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return self.outer(self.inner(x.flatten(0, 1)).unflatten(0, x.shape[:2]).sum(1))
        return self.outer(self.inner(x).sum(1))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return (self.gate(x).softmax(-1)[..., None] * outputs).sum(1)


class RoutedExperts(Experts):
    """Each example goes to one expert, so experts see different numbers of examples."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        outputs = torch.zeros(len(x), 3, dtype=x.dtype)
        for i, expert in enumerate(self.experts):
            outputs = outputs.index_add(0, (where := (chosen == i).nonzero()[:, 0]), expert(x[where]))
        return weights[:, None] * outputs


class HyperNetwork(nn.Module):
    """The weights of a layer are computed by another network; `each` for every example its own."""

    def __init__(self, each: bool) -> None:
        super().__init__()
        self.each, self.code = each, nn.Parameter(torch.randn(3))
        self.make, self.target, self.head = nn.Linear(3, 4 * 5 + 5), nn.Linear(4, 5), nn.Linear(5, 3)
        if not each:
            self.target.requires_grad_(False)

    def forward(self, x: Tensor, code: Tensor) -> Tensor:
        if self.each:
            made = self.make(code + self.code)
            h = (made[:, :20].unflatten(1, (5, 4)) @ x[..., None])[..., 0] + made[:, 20:] + self.target(x)
        else:
            made = self.make(self.code)
            h = functional_call(self.target, {"weight": made[:20].view(5, 4), "bias": made[20:]}, (x,))
        return self.head(h.tanh())


class Repeated(nn.Module):
    """One block, applied several times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.head = nn.Linear(3, 4), nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for i in range(4):
            time = torch.full_like(h[:, :1], i / 4)
            h = h + 0.25 * self.block(torch.cat([h, time], 1)).tanh()
        return self.head(h)


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(3, 3), nn.Linear(2, 2), nn.Bilinear(3, 2, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(self.left(a).tanh(), self.right(b).tanh())


class Recommender(nn.Module):
    """A user, and a bag of items."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(6, 3), nn.EmbeddingBag(8, 3, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, user: Tensor, items: Tensor) -> Tensor:
        return self.mlp(torch.cat([self.users(user), self.items(items)], 1))


class NeRF(nn.Module):
    """Fourier features of points along a ray, an MLP with a skip connection, and a weighted sum along the ray."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(12, 6), nn.Linear(6, 6), nn.Linear(18, 6)
        self.density, self.colour = nn.Linear(6, 1), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        code = torch.cat([f(2**k * x) for f in (torch.sin, torch.cos) for k in range(2)], -1)
        h = F.relu(self.second(F.relu(self.first(code))))
        h = F.relu(self.third(torch.cat([h, code], -1)))
        weights = F.softplus(self.density(h)).softmax(1)
        return (weights * self.colour(h).sigmoid()).sum(1)


def weight_normed() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def spectral_normed() -> nn.Module:
    return nn.Sequential(spectral_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))


def mlp(fan_in: int, out: int, act: type[nn.Module] = nn.Tanh) -> nn.Module:
    return nn.Sequential(nn.Linear(fan_in, 6), act(), nn.Linear(6, 5), act(), nn.Linear(5, out))


class LowRankUpdate(nn.Module):
    """A trained layer whose weight gets an update by another network, through functional_call."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.make = nn.Parameter(torch.randn(1, 3)), nn.Linear(3, 5)
        self.target, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        made = self.make(self.code)
        weights = {"weight": self.target.weight + made.T * x.new_ones(4), "bias": self.target.bias}
        return self.head((functional_call(self.target, weights, (x,)) + made).tanh())


class ScaledWeight(nn.Module):
    """A layer whose weight is replaced by a function of itself, through functional_call."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.scale, self.target, self.head = nn.Parameter(torch.tensor(0.3)), nn.Linear(4, 5), nn.Linear(5, 3)
        self.both = both

    def forward(self, x: Tensor) -> Tensor:
        weights = {"weight": self.target.weight * self.scale.exp()}
        if self.both:
            weights["bias"] = self.target.bias.tanh()
        return self.head(functional_call(self.target, weights, (x,)).tanh())


class Permuted(nn.Module):
    """The second call of the encoder has the examples in another order, as after sorting by length."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        second = self.encoder(x.square()[order])[order.argsort()]
        return self.head(self.encoder(x).tanh() * second)


class SharedLayers(nn.Module):
    """Two modules with one weight and two biases; the third reads the weight directly, to a small part."""

    def __init__(self, direct: float) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight, self.direct = self.first.weight, direct

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(x).tanh()).tanh()
        return self.head(h + self.direct * (x @ self.first.weight) if self.direct else h)


class Perceiver(nn.Module):
    """Latents that are projected once for all examples attend to the inputs; as many latents as examples."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.latents, self.query = nn.Parameter(torch.randn(4, width)), nn.Linear(width, width)
        self.key, self.value, self.head = nn.Linear(3, width), nn.Linear(3, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(self.latents)
        return self.head((query @ self.key(x).mT).softmax(-1) @ self.value(x)).tanh().mean(1)


class GraphNetwork(nn.Module):
    """Features of nodes, (N, nodes, features), and an adjacency matrix for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(2, 5), nn.Linear(5, 4), nn.Linear(4, 3)
        self.act = nn.PReLU(5)

    def forward(self, x: Tensor, links: Tensor) -> Tensor:
        links = links.softmax(-1)
        h = self.act((links @ self.first(x)).mT).mT
        return self.head((links @ self.second(h)).sum(1))


def pruned() -> nn.Module:
    model = mlp(4, 3)
    prune.l1_unstructured(model[2], "weight", 0.4)
    return model


def hooked() -> nn.Module:
    """Hooks that change the input and the output of a layer."""
    model = mlp(4, 3)
    model[2].register_forward_pre_hook(lambda module, args: (2 * args[0],))
    model[2].register_forward_hook(lambda module, args, output: output.square())
    return model


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = mlp(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=False))


def biases_only() -> nn.Module:
    """BitFit: weights are frozen."""
    model = nn.Sequential(nn.Embedding(WORDS, 3), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh())
    model.extend([Apply(lambda x: x.mean(1)), nn.Linear(5, 3)])
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    return model
