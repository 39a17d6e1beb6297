"""Deep-learning rows of Table 1 of Khan and Rue 2023: the engine on a small network, optimizers, transcriptions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bayesgrad.families import Bernoulli, DiagonalGaussian, FixedGaussian, Gaussian, MixtureOfGaussians
from bayesgrad.inference import Delta, Expected, LogDensity, Node, Prior, step
from bayesgrad.inference.expectation import Expectation, times_root
from bayesgrad.inference.multimodal import MixtureLogDensity
from bayesgrad.optim import STE, BayesBiNN, SpikeSlab
from bayesgrad_lab import khan2023_transcribed as transcribed
from bayesgrad_lab import training
from bayesgrad_lab.khan2023_rows import normal, walked

D = torch.float64
N, B, STEPS = 40, 10, 24
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def perceptron() -> nn.Module:
    """2-3-1 with tanh, 13 weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).to(D)


def linear() -> nn.Module:
    """Logistic regression with 2 weights: its Hessian is never negative."""
    torch.manual_seed(0)
    return nn.Linear(2, 1, bias=False).to(D)


def batches(size: int = B, steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    """In turn, of N examples."""
    X = normal(N, 2)
    y = (X[:, :1] * X[:, 1:] + X[:, :1] + 0.5 * normal(N, 1, seed=1) > 0).to(D)
    pairs = list(zip(X.split(size), y.split(size)))
    for t in range(steps):
        yield pairs[t % len(pairs)]


def plain_batches(size: int = B) -> list[transcribed.Batch]:
    """The same as lists of numbers."""
    return [(x.tolist(), y[:, 0].tolist()) for x, y in batches(size)]


cross_entropy = nn.functional.binary_cross_entropy_with_logits


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def losses(model: nn.Module) -> Loss:
    """The loss of each example, as a function of all weights in one vector."""
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def of(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        parts = theta.split([shape.numel() for shape in shapes.values()])
        weights = {name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items())}
        return cross_entropy(functional_call(model, weights, (x,)), y, reduction="none")[:, 0]

    return of


def minus(loss: Loss, x: Tensor, y: Tensor, reduce: Callable[[Tensor], Tensor] = torch.mean) -> Callable:
    """The logarithm of a batch's density, as a function of all weights."""
    return lambda w: -reduce(loss(w, x, y))


def apart(model: nn.Module, vector: Tensor) -> dict[Tensor, Tensor]:
    """A vector's entries by parameter."""
    parts = vector.split([p.numel() for p in model.parameters()])
    return {p: part.view_as(p) for p, part in zip(model.parameters(), parts)}


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    draws: Callable[[int], Any] | None = None,
    size: int = B,
    read: Callable[[], Tensor] | None = None,
) -> Tensor:
    """The path of the weights, or of what `read` gives, in the usual loop; `draws` gives the noise of a step."""
    loop = training.steps(model, [optimizer], batches(size), cross_entropy, noise=draws)
    return torch.stack([flat(model) if read is None else read().clone() for _ in loop])


@dataclass(frozen=True, eq=False)
class FixedDraws(Expectation):
    """One draw with noise that is known."""

    noise: Tensor
    hessian: str = "gauss-newton"

    def points(self, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        noise = self.noise[None]
        return mean + times_root(root, noise), noise, mean.new_ones(1)


# --- SGD: a Gaussian with a fixed covariance, the delta method, batches, and momentum in its natural parameter ---


def torchs(kind: Callable[..., torch.optim.Optimizer], *settings: Any, make: Callable = perceptron, **options: Any):
    """The path of weights with an optimizer that takes parameters."""
    model = make()
    return trained(model, kind(model.parameters(), *settings, **options))


def sgd() -> Tensor:
    model = perceptron()
    loss = losses(model)
    node = Node(FixedGaussian(1.0), (flat(model),))
    steps = ([LogDensity(node, minus(loss, x, y), Delta())] for x, y in batches())
    return walked(node, steps, 0.3, lambda: node.natural[0], momentum=0.9)


# --- RMSprop and Adam ---


def adaptive(
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    *,
    root: bool = True,
    debias: bool = True,
    make: Callable[[], nn.Module] = perceptron,
    steps: int = STEPS,
) -> Tensor:
    """Two nodes: a diagonal Gaussian whose precision averages squares of a batch's gradient, and a Gaussian whose
    precision is given, that one's root, for the mean.

    Debiasing is a step size: (1 - β)/(1 - β^t) makes an average of what was seen so far, and of nothing else. Adam's
    first average is momentum in λ = D θ, with the metric D of the step before.
    """
    model = make()
    loss, theta, path = losses(model), flat(model), []
    family, metric, last = DiagonalGaussian(), None, theta
    scale = Node(family, family.of(theta, torch.ones_like(theta)))
    for t, (x, y) in enumerate(batches(steps=steps), start=1):
        scale.natural = family.of(theta, -2 * scale.natural[1])
        step(scale, [LogDensity(scale, minus(loss, x, y), Delta("gauss-newton"))], (1 - beta2) / (1 - beta2**t))
        v = -2 * scale.natural[1] * (1.0 if debias else 1 - beta2**t)
        before, metric = metric, (v.sqrt() if root else v) + eps
        gaussian = FixedGaussian(metric)
        mean = Node(gaussian, gaussian.of(theta))
        momentum = beta1 * (1 - beta1 ** (t - 1)) / (1 - beta1**t)
        if before is not None:
            mean.previous = (mean.natural[0] - before * (theta - last),)
        factor = LogDensity(mean, minus(loss, x, y), Delta())
        step(mean, [factor], lr * (1 - beta1) / (1 - beta1**t), momentum=momentum)
        theta, last = mean.family.mode(mean.natural), theta
        path.append(theta)
    return torch.stack(path)


def adam() -> Tensor:
    return adaptive(0.05, 0.9, 0.99, 1e-8)


# --- dropout: a spike and a slab ---

KEEP = 0.7


def masks(t: int) -> Tensor:
    return (torch.rand(2, dtype=D, generator=torch.Generator().manual_seed(t)) < KEEP).to(D)


def spike_slab() -> Tensor:
    model = linear()
    options = {"keep": KEEP, "drop_inputs": True, "update": "newton", "betas": (0.0, 0.0), "eps": 0.0}
    optimizer = SpikeSlab(model, 0.1, hessian="exact", seed=0, **options)
    (weight,) = model.parameters()
    return trained(model, optimizer, lambda t: {weight: masks(t)})


def dropout_by_hand() -> Tensor:
    drawn = [masks(t).tolist() for t in range(STEPS)]
    return transcribed.dropout(flat(linear()).tolist(), plain_batches(), drawn, keep=KEEP, rho=0.1)


def dropout() -> Tensor:
    """The slab alone, with gradients through the mask over its probability."""
    model = linear()
    loss, family = losses(model), DiagonalGaussian()
    node = Node(family, family.of(flat(model), torch.ones(2, dtype=D)))

    def factor(z: Tensor, x: Tensor, y: Tensor) -> LogDensity:
        return LogDensity(node, lambda w: -loss(z * w, x, y).mean() / KEEP, Delta())

    steps = ([factor(masks(t), x, y)] for t, (x, y) in enumerate(batches()))
    return walked(node, steps, 0.1, lambda: node.moments[0])


def responsibility(precision: float) -> float:
    """By how much the slab's message under the whole mixture, spike included, differs from the one that is used, where
    the spike at zero has this precision."""
    model = linear()
    loss, (x, y) = losses(model), next(batches())
    slab, spike = flat(model) + 1, torch.zeros(2, dtype=D)
    precisions = torch.stack([4 * torch.eye(2, dtype=D), precision * torch.eye(2, dtype=D)])
    family = MixtureOfGaussians(torch.tensor([KEEP, 1 - KEEP], dtype=D))
    node = Node(family, family.of(torch.stack([slab, spike]), precisions))
    whole = MixtureLogDensity(node, minus(loss, x, y), Delta()).message(node)
    alone = Node(Gaussian(), Gaussian().of(slab, precisions[0]))
    part = LogDensity(alone, minus(loss, x, y), Delta()).message(alone)
    return max((a[0] - b).abs().max().item() for a, b in zip(whole, part))


# --- a sign for each weight ---


def latent(optimizer: torch.optim.Optimizer, model: nn.Module, slot: str) -> Tensor:
    return torch.cat([optimizer.state[p][slot].flatten() for p in model.parameters()])


@contextmanager
def on_purpose() -> Iterator[None]:
    """Biases are binary here too, as in the transcriptions, and losses may be sums, which have num_data = 1."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* sets all its parameters to -1 or 1|num_data=1 is less than")
        yield


def ste_optimizer() -> Tensor:
    """With weight decay 1, which is what the entropy does; Eq. 48 leaves it out."""
    model = perceptron()
    with on_purpose():
        optimizer = STE(model.parameters(), 0.05, momentum=0.0, weight_decay=1.0)
    return trained(model, optimizer, read=lambda: latent(optimizer, model, "latent"))


def ste_by_hand() -> Tensor:
    return transcribed.straight_through(flat(perceptron()).tolist(), plain_batches(), rho=0.05)


def ste(start: Tensor | None = None) -> Tensor:
    """The derivative by the mean, taken at the sign: the delta method for signs."""
    model = perceptron()
    loss = losses(model)
    node = Node(Bernoulli(), (flat(model) if start is None else start,))

    def straight(mean: tuple) -> Tensor:
        return mean[0] + (torch.where(mean[0] < 0, -1.0, 1.0) - mean[0]).detach()

    def factor(log_density: Callable[[Tensor], Tensor]) -> Expected:
        return Expected(lambda mean: log_density(straight(mean)), node)

    steps = ([factor(minus(loss, x, y))] for x, y in batches())
    return walked(node, steps, 0.05, lambda: node.natural[0])


RELAXATION = 0.7


def uniform(t: int, like: Tensor) -> Tensor:
    return torch.rand(like.shape, dtype=D, generator=torch.Generator().manual_seed(t)).clamp(1e-3, 1 - 1e-3)


def start_of(model: nn.Module) -> Tensor:
    """Weights over their root mean square in each tensor."""
    return torch.cat([(p / p.square().mean().sqrt()).detach().flatten() for p in model.parameters()])


# --- OGN, VOGN, and what comes before and after them ---

RHO = 0.1


def gaussian(
    expectation: Callable[[int], Expectation],
    *,
    each: bool,
    make: Callable[[], nn.Module] = perceptron,
    size: int = B,
    domain: str = "backtrack",
    steps: int = STEPS,
    prior: float = 1.0,
) -> Tensor:
    """A diagonal Gaussian, with a factor for each example of a batch, or one for all of it; means and precisions."""
    model = make()
    loss, family, zero = losses(model), DiagonalGaussian(), torch.zeros_like(flat(model))
    node = Node(family, family.of(flat(model), zero + N + prior))
    priors = [Prior(node, family.of(zero, zero + prior))] if prior else []

    def factors(t: int, x: Tensor, y: Tensor) -> list:
        rule, pairs = expectation(t), zip(x.split(1), y.split(1)) if each else [(x, y)]
        return [LogDensity(node, minus(loss, a, b, torch.sum), rule, scale=N / size) for a, b in pairs]

    every = ([*priors, *factors(t, x, y)] for t, (x, y) in enumerate(batches(size, steps)))
    return walked(node, every, RHO, lambda: torch.cat([node.moments[0], -2 * node.natural[1]]), domain=domain)


def variational(
    kind: type,
    *,
    make: Callable[[], nn.Module] = perceptron,
    size: int = B,
    drawn: bool = False,
    exact: bool = False,
    prior: float = 1.0,
) -> Tensor:
    """The same from an optimizer."""
    model = make()
    options: Mapping[str, Any] = {"hess_init": 1.0, "num_data": N, "prior_precision": prior, "betas": (0.0, 1 - RHO)}
    if exact:
        optimizer = kind(model.parameters(), RHO, hessian="exact", **options)
    else:
        optimizer = kind(model, RHO, **options)
    draws = (lambda t: apart(model, noise(t, model))) if drawn else None

    def read() -> Tensor:
        variance = optimizer.posterior(model).variance()
        return torch.cat([flat(model), *[1 / variance[name].flatten() for name, _ in model.named_parameters()]])

    return trained(model, optimizer, draws, size, read)


def by_hand(
    *,
    make: Callable[[], nn.Module] = perceptron,
    size: int = B,
    drawn: bool = False,
    exact: bool = False,
    prior: float = 1.0,
    retract: bool = False,
) -> Tensor:
    """And from the equations in NumPy."""
    model = make()
    gradients = transcribed.perceptron_gradients if make is perceptron else transcribed.logistic_gradients
    return transcribed.online_newton(
        flat(model).tolist(),
        plain_batches(size),
        gradients,
        size=N,
        rho=RHO,
        delta=prior,
        hessians=transcribed.logistic_hessians if exact else None,
        noise=[noise(t, model).tolist() for t in range(STEPS)] if drawn else None,
        retract=retract,
    )


def noise(t: int, model: nn.Module) -> Tensor:
    return normal(len(flat(model)), seed=100 + t)


def ogn() -> Tensor:
    return gaussian(lambda t: Delta("gauss-newton"), each=True)


def vogn() -> Tensor:
    model = perceptron()
    return gaussian(lambda t: FixedDraws(noise(t, model)), each=True)


# --- BayesBiNN ---


def bayes_binn_optimizer() -> Tensor:
    model = perceptron()
    like = flat(model)
    options = {"relaxation": RELAXATION, "eps": 0.0, "momentum": 0.0, "seed": 0}
    with on_purpose():
        optimizer = BayesBiNN(model.parameters(), 0.05, num_data=N, **options)
    draws = lambda t: apart(model, uniform(t, like))  # noqa: E731
    return trained(model, optimizer, draws, read=lambda: latent(optimizer, model, "natural"))


def bayes_binn_by_hand() -> Tensor:
    model = perceptron()
    draws = [uniform(t, flat(model)).tolist() for t in range(STEPS)]
    start = start_of(model).tolist()
    return transcribed.bayes_binn(start, plain_batches(), draws, size=N, rho=0.05, tau=RELAXATION)


def bayes_binn() -> Tensor:
    """The derivative by the mean of the loss at a relaxed draw; autograd finds the slopes s."""
    model = perceptron()
    loss = losses(model)
    node = Node(Bernoulli(), (start_of(model),))

    def factor(t: int, x: Tensor, y: Tensor) -> Expected:
        shift, value = torch.logit(uniform(t, node.natural[0])) / 2, minus(loss, x, y)
        relaxed = lambda mean: value(torch.tanh((torch.atanh(mean[0]) + shift) / RELAXATION))  # noqa: E731
        return Expected(relaxed, node, scale=N)

    steps = ([factor(t, x, y)] for t, (x, y) in enumerate(batches()))
    return walked(node, steps, 0.05, lambda: node.natural[0])
