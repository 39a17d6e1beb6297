"""Runs over tasks that come one after the other: the tasks, what is kept of each, and how it is chosen."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesgrad import optim
from bayesgrad.laplace import laplace
from bayesgrad.posterior import EWC, Posterior
from bayesgrad.structures import Structure, SubsampledStructure
from bayesgrad_lab.dataset import Dataset
from bayesgrad_lab.khan2023_training import SEARCH_SEED, fit, in_batches, on_edge
from bayesgrad_lab.runner import Trial
from bayesgrad_lab.study import Context, mean_and_error

HESS = 0.3  # where VOGN's curvature begins
COMPILED = 20_000  # weights from which a compiled step saves time over a whole run
AT_ONCE = 250  # examples of a pass of laplace()
SAME = "as many numbers as a diagonal"  # in place of a number of examples


# --- tasks ---


@dataclass(frozen=True)
class Stream:
    """Tasks made of one data set: permutations of its pixels with one head, or pairs of its classes with one head each.

    Args:
        kind: "permuted" or "split".
        tasks: how many.
        widths: of the hidden layers.
        examples: of a task that a subsampled Fisher is made of.
    """

    kind: str
    data: Dataset
    tasks: int
    widths: tuple[int, ...]
    epochs: int
    batch: int
    examples: int

    @property
    def title(self) -> str:
        return f"{self.kind} {self.data.name}"

    @property
    def key(self) -> str:
        sizes = "-".join(map(str, self.widths))
        return (
            f"{self.kind}-{self.data.name}-{len(self.data.train_x)}-mlp-{sizes}-tasks{self.tasks}-epochs{self.epochs}"
        )

    @property
    def outputs(self) -> int:
        return self.data.classes if self.kind == "permuted" else 2

    def task(self, index: int, seed: int) -> Dataset:
        """One of them; permutations are a function of the seed, pairs of classes are the same for all."""
        data = replace(self.data, train_x=self.data.train_x.flatten(1), test_x=self.data.test_x.flatten(1))
        if self.kind == "permuted":
            generator = torch.Generator().manual_seed(1000 * seed + index)
            order = torch.randperm(data.train_x.shape[1], generator=generator)
            return replace(data, train_x=data.train_x[:, order], test_x=data.test_x[:, order])
        train, test = (y // 2 == index for y in (data.train_y, data.test_y))
        return replace(
            data,
            train_x=data.train_x[train],
            train_y=data.train_y[train] % 2,
            test_x=data.test_x[test],
            test_y=data.test_y[test] % 2,
            classes=2,
        )

    def model(self, seed: int, binary: bool = False) -> Network:
        """The network, its weights a function of the seed."""
        inputs = math.prod(self.data.train_x.shape[1:])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Network((inputs, *self.widths), self.outputs, self.tasks if self.kind == "split" else 1, binary)

    @cached_property
    def weights(self) -> int:
        return sum(p.numel() for p in self.model(0).parameters())


class Network(nn.Module):
    """A perceptron with a head for each task, or one for all.

    Args:
        binary: for weights that are -1 or 1: no biases, and hidden layers are normalised, example by example.
    """

    def __init__(self, widths: Sequence[int], outputs: int, heads: int, binary: bool) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for a, b in itertools.pairwise(widths):
            parts += [nn.Linear(a, b, bias=not binary)]
            parts += [nn.LayerNorm(b, elementwise_affine=False)] if binary else []
            parts += [nn.ReLU()]
        self.body = nn.Sequential(*parts)
        self.heads = nn.ModuleList(nn.Linear(widths[-1], outputs, bias=not binary) for _ in range(heads))
        self.scale = widths[-1] ** -0.5 if binary else 1.0
        self.task = 0

    @property
    def head(self) -> int:
        return self.task if len(self.heads) > 1 else 0

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.heads[self.head](self.body(x))

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that the present task uses."""
        own = (f"heads.{self.head}.", "body.")
        return [(name, p) for name, p in self.named_parameters() if name.startswith(own)]


# --- methods ---


@dataclass(frozen=True)
class Method:
    """A way to remember, and the values that a search may choose from: as many for each.

    Args:
        kind: "none", "ewc", "vogn" or "bayesbinn".
        strengths: what the Hessians of earlier tasks, or the natural parameters of the prior, are multiplied by.
        split: the same for split tasks, where it is to be searched for elsewhere.
        structure: of the Hessian.
        examples: that the Hessian is made of: "few" (the stream's number), `SAME`, or all for "".
        fisher: "exact", or "sampled" for one drawn label of each example.
    """

    title: str
    kind: str
    strengths: tuple[float, ...]
    split: tuple[float, ...] = ()
    lr: float = 3e-3
    structure: str = ""
    examples: str = ""
    fisher: str = "exact"

    @property
    def key(self) -> str:
        count = "same" if self.examples == SAME else self.examples
        exact = "exact" if self.structure == "subsampled" and self.fisher == "exact" else ""
        return "-".join(filter(None, (self.kind, self.structure, exact, count)))


PENALTIES = (1.0, 4.0, 16.0, 64.0)
FIRM = (100.0, 1e3, 1e4, 1e5)
METHODS = (
    Method("nothing", "none", (1.0,)),
    Method("EWC, diagonal, few examples", "ewc", PENALTIES, split=FIRM, structure="diag", examples="few"),
    Method("EWC, diagonal, all examples", "ewc", PENALTIES, split=FIRM, structure="diag"),
    Method("EWC, subsampled Fisher, few examples", "ewc", PENALTIES, (), 3e-3, "subsampled", "few", "sampled"),
    Method("EWC, subsampled exact Fisher, few examples", "ewc", PENALTIES, (), 3e-3, "subsampled", "few"),
    Method("EWC, subsampled Fisher, a diagonal's room", "ewc", PENALTIES, (), 3e-3, "subsampled", SAME, "sampled"),
    Method("EWC, Kronecker", "ewc", (0.25, 1.0, 4.0, 16.0), split=PENALTIES, structure="kron"),
    Method("EWC, input factor", "ewc", (1e-3, 4e-3, 0.016, 0.064), structure="input"),
    Method("VOGN, chained", "vogn", (0.25, 1.0, 4.0, 16.0), lr=0.1),
    Method("BayesBiNN, chained", "bayesbinn", (0.25, 1.0, 4.0, 16.0), lr=0.01),
)


class Memory:
    """What a method keeps from task to task."""

    def __init__(self, stream: Stream, method: Method, strength: float, seed: int) -> None:
        self.stream, self.method, self.strength, self.seed = stream, method, strength, seed
        self.ewc: EWC | None = None
        self.prior: Posterior | None = None

    def optimizer(self, model: Network, count: int) -> Any:
        """A new one for each task."""
        fused = self.stream.weights > COMPILED or None
        if self.method.kind == "vogn":
            return optim.VOGN(
                model,
                lr=self.method.lr,
                params=model.named(),
                num_data=count,
                hess_init=HESS,
                betas=(0.9, 0.99),
                prior=self.prior,
                seed=self.seed + model.task,
                fused=fused,
            )
        if self.method.kind == "bayesbinn":
            return optim.BayesBiNN(
                model.named(),
                lr=self.method.lr,
                num_data=count,
                prior=self.prior,
                seed=self.seed + model.task,
                fused=fused,
            )
        return torch.optim.Adam(model.parameters(), lr=self.method.lr, fused=True)

    def loss(self, model: Network, count: int, outputs: Tensor, labels: Tensor) -> Tensor:
        value = F.cross_entropy(outputs, labels)
        return value if self.ewc is None else value + self.ewc(model) / count

    def keep(self, model: Network, optimizer: Any, data: Dataset, device: str) -> None:
        """Takes from a task that was learned what later ones will see of it."""
        if self.method.kind in ("vogn", "bayesbinn"):
            self.prior = optimizer.posterior(model, scale=1 / self.strength)
        elif self.method.kind == "ewc":
            posterior = self._posterior(model.eval(), data, device)
            if self.ewc is None:
                self.ewc = EWC(posterior, self.strength)
            else:
                self.ewc = self.ewc.add(posterior, self.strength)

    def _posterior(self, model: Network, data: Dataset, device: str) -> Any:
        count = {"few": self.stream.examples, "": None}.get(self.method.examples, 1)
        x, y = data.train_x.to(device), data.train_y.to(device)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "structure=")  # heads of other tasks, whose Hessian is zero
            made = partial(
                laplace,
                model,
                list(zip(x.split(AT_ONCE), y.split(AT_ONCE))),
                likelihood="categorical",
                structure=self.method.structure,
                fisher=self.method.fisher,
                seed=self.seed + model.task,
                progress=False,
            )
            if self.method.examples == SAME:  # as many as take the room of a diagonal
                each = sum(map(_kept, EWC(made(subsample=1)).parts[0].forms))
                count = max(1, self.stream.weights // each)
            return made(subsample=count)

    def size(self) -> int:
        """How many numbers are kept from earlier tasks."""
        if self.prior is not None:
            shapes = [mean.numel() for mean in self.prior.mean.values()]
            return sum(shapes) * (2 if self.method.kind == "vogn" else 1)
        if self.ewc is None:
            return 0
        means = [mean.numel() for part in self.ewc.parts for mean in part.mean.values()]
        return sum(means) + sum(_kept(form) for part in self.ewc.parts for form in part.forms)


def _kept(form: Structure) -> int:
    """How many numbers a quadratic form consists of."""
    zeros = not isinstance(form, SubsampledStructure)  # gradients of the heads of other tasks are not counted
    return sum(tensor.numel() for tensor in form.tensors().values() if zeros or bool(tensor.any()))


# --- runs ---


def run(context: Context, stream: Stream, method: Method, strength: float, seed: int, final: bool) -> dict:
    """One pass over all tasks, from the run's folder where it is there; see `_run`."""
    purpose = "final" if final else "search"
    key = f"{purpose}-{stream.key}-{method.key}-strength{strength:g}-seed{seed}"
    return context.once(key, partial(_run, context, stream, method, strength, seed, final))


def _run(
    context: Context, stream: Stream, method: Method, strength: float, seed: int, final: bool
) -> dict[str, Tensor]:
    """Accuracies (tasks learned, task), nan of what was not there yet; processor seconds; and numbers kept.

    Of test data in finals; in a search of data that are held out of the training part.
    """
    model = stream.model(seed, method.kind == "bayesbinn").to(context.device)
    memory = Memory(stream, method, strength, seed)
    accuracy, seconds = torch.full((stream.tasks, stream.tasks), math.nan), torch.zeros(stream.tasks)
    label = f"{method.key} strength {strength:g}"
    tasks = [stream.task(index, seed) for index in range(stream.tasks)]
    tasks = tasks if final else [data.validation() for data in tasks]
    for index, data in enumerate(tasks):
        model.task = index
        count = len(data.train_x)
        optimizer = memory.optimizer(model, count)
        purpose = f"{'final' if final else 'search'}, task {index + 1}"
        trial = Trial(stream.key, label, method.lr, seed, stream.epochs, stream.batch, purpose=purpose)
        with context.hearing():
            loss = partial(memory.loss, model, count)
            times = fit(context, trial, model, optimizer, data.train_x, data.train_y, loss)
        if not bool(torch.isfinite(times).all()):
            break
        seconds[index] = times.sum()
        accuracy[index, : index + 1] = torch.tensor([_tested(context, model, i, tasks[i]) for i in range(index + 1)])
        model.task = index
        if index + 1 < stream.tasks:
            memory.keep(model, optimizer, data, context.device)
    return {"accuracy": accuracy, "seconds": seconds, "kept": torch.tensor(float(memory.size()))}


@torch.no_grad()
def _tested(context: Context, model: Network, index: int, data: Dataset) -> float:
    """The accuracy on one task."""
    model.eval()
    model.task = index
    found = in_batches(lambda x: model(x).argmax(1), data.test_x, context.device)
    return (found == data.test_y).double().mean().item()


@dataclass(frozen=True)
class Finals:
    """A method at the strength that was chosen: a run for each seed, and what was tried."""

    method: Method
    strength: float
    runs: list[dict[str, Tensor]]
    tried: Mapping[float, float]

    def scores(self, name: str) -> list[float]:
        """For each seed: the mean accuracy over tasks at the end, when each was just learned, or how much was lost."""
        every = [run["accuracy"].double() for run in self.runs]
        if name == "end":
            return [a[-1].mean().item() for a in every]
        if name == "learned":
            return [a.diagonal().mean().item() for a in every]
        return [(a.diagonal() - a[-1])[:-1].mean().item() for a in every]

    def mean(self, name: str) -> tuple[float, float]:
        return mean_and_error(self.scores(name))

    def less(self, other: Finals, name: str) -> tuple[float, float]:
        """Mean and standard error over paired seeds of this score less the other's."""
        return mean_and_error([a - b for a, b in zip(self.scores(name), other.scores(name))])

    def path(self) -> list[list[float]]:
        """For each seed, the mean accuracy in % over tasks so far, after each task."""
        return [[100 * row.nanmean().item() for row in run["accuracy"]] for run in self.runs]


def finals(context: Context, stream: Stream, method: Method) -> Finals:
    """The method at the strength of best mean validation accuracy after all tasks, for all seeds."""
    strengths = list((stream.kind == "split" and method.split) or method.strengths)
    tried: dict[float, float] = {}
    if len(strengths) > 1:
        for strength in strengths:
            value = run(context, stream, method, strength, SEARCH_SEED, False)["accuracy"][-1].mean().item()
            tried[strength] = value if math.isfinite(value) else 0.0
    strength = max(strengths, key=lambda s: tried.get(s, 0.0))
    if on_edge(strength, strengths):
        context.say(f"{stream.title}, {method.title}: strength {strength:g} is at the edge of the search")
    runs = [run(context, stream, method, strength, seed, True) for seed in range(context.seeds)]
    return Finals(method, strength, runs, tried)
