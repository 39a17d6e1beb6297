"""Continual learning: tasks that come one after the other, and what is kept of those that are gone."""

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

from bayesgrad import optim
from bayesgrad.laplace import laplace
from bayesgrad.posterior import EWC, Posterior
from bayesgrad.structures import Structure, SubsampledStructure
from bayesgrad_lab import figures, networks
from bayesgrad_lab.context import Context, Trial
from bayesgrad_lab.dataset import Dataset
from bayesgrad_lab.methods import Method, Setup, built
from bayesgrad_lab.report import Report
from bayesgrad_lab.results import Results, attempts, margin, shown, sign
from bayesgrad_lab.studies import Setting, chosen, each
from bayesgrad_lab.task import Task, cross_entropy
from bayesgrad_lab.training import epoch_seconds, fit, in_batches

HESS = 0.3  # where VOGN's curvature begins
COMPILED = 20_000  # weights from which a compiled step saves time over a whole run
AT_ONCE = 250  # examples of a pass of laplace()
TESTED = 2500  # examples of a prediction
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

    def part(self, index: int, seed: int) -> Dataset:
        """The data of a task; permutations are a function of the seed, pairs of classes are the same for all."""
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
        with networks.seeded(seed):
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


def _vogn(model: Network, setup: Setup, prior: Posterior | None = None) -> optim.VOGN:
    chained = _chained(model, setup, prior)
    return optim.VOGN(model, params=model.named(), hess_init=HESS, betas=(0.9, 0.99), **chained)


def _bayesbinn(model: Network, setup: Setup, prior: Posterior | None = None) -> optim.BayesBiNN:
    return optim.BayesBiNN(model.named(), **_chained(model, setup, prior))


def _chained(model: Network, setup: Setup, prior: Posterior | None) -> dict[str, Any]:
    fused = sum(p.numel() for p in model.parameters()) > COMPILED or None
    return dict(lr=setup.lr, num_data=setup.num_data, prior=prior, seed=setup.seed, fused=fused)


PENALTIES = (1.0, 4.0, 16.0, 64.0)
LIGHT = (0.25, 1.0, 4.0, 16.0)
FIRM = (100.0, 1e3, 1e4, 1e5)
INPUT = (1e-3, 4e-3, 0.016, 0.064)
_ADAM = 3e-3, built(torch.optim.Adam, fused=True)
# Strengths are what the Hessians of earlier tasks, or the natural parameters of the prior, are multiplied by.
METHODS = tuple(
    Method(kind, title, (lr,), make, "strength", strengths)
    for kind, title, (lr, make), strengths in (
        ("none", "nothing", _ADAM, (1.0,)),
        ("ewc-diag-few", "EWC, diagonal, few examples", _ADAM, PENALTIES),
        ("ewc-diag", "EWC, diagonal, all examples", _ADAM, PENALTIES),
        ("ewc-subsampled-few", "EWC, subsampled Fisher, few examples", _ADAM, PENALTIES),
        ("ewc-subsampled-exact-few", "EWC, subsampled exact Fisher, few examples", _ADAM, PENALTIES),
        ("ewc-subsampled-same", "EWC, subsampled Fisher, a diagonal's room", _ADAM, PENALTIES),
        ("ewc-kron", "EWC, Kronecker", _ADAM, LIGHT),
        ("ewc-input", "EWC, input factor", _ADAM, INPUT),
        ("vogn", "VOGN, chained", (0.1, _vogn), LIGHT),
        ("bayesbinn", "BayesBiNN, chained", (0.01, _bayesbinn), LIGHT),
    )
)
SPLIT = {"ewc-diag-few": FIRM, "ewc-diag": FIRM, "ewc-kron": PENALTIES}  # strengths on split tasks, where others
CHAINED = ("vogn", "bayesbinn")
FISHERS = {
    "ewc-diag-few": ("diag", "few", "exact"),
    "ewc-diag": ("diag", "", "exact"),
    "ewc-subsampled-few": ("subsampled", "few", "sampled"),
    "ewc-subsampled-exact-few": ("subsampled", "few", "exact"),
    "ewc-subsampled-same": ("subsampled", SAME, "sampled"),
    "ewc-kron": ("kron", "", "exact"),
    "ewc-input": ("input", "", "exact"),
}  # structure; examples: "few" (the stream's number), `SAME`, or all for ""; exact, or with one drawn label of each


class Memory:
    """What a method keeps from task to task."""

    def __init__(self, stream: Stream, method: Method, strength: float, seed: int) -> None:
        self.stream, self.method, self.strength, self.seed = stream, method, strength, seed
        self.ewc: EWC | None = None
        self.prior: Posterior | None = None

    def optimizer(self, model: Network, task: Task) -> Any:
        """A new one for each task."""
        options = {"prior": self.prior} if self.method.kind in CHAINED else {}
        return replace(self.method, options=options).build(model, task, self.method.lr, self.seed + model.task)[0]

    def loss(self, model: Network, count: int, outputs: Tensor, labels: Tensor) -> Tensor:
        value = cross_entropy(outputs, labels)
        return value if self.ewc is None else value + self.ewc(model) / count

    def keep(self, model: Network, optimizer: Any, data: Dataset, device: str) -> None:
        """Takes from a task that was learned what later ones will see of it."""
        if self.method.kind in CHAINED:
            self.prior = optimizer.posterior(model, scale=1 / self.strength)
        elif self.method.kind in FISHERS:
            posterior = self._posterior(model.eval(), data, device)
            self.ewc = EWC(posterior, self.strength) if self.ewc is None else self.ewc.add(posterior, self.strength)

    def _posterior(self, model: Network, data: Dataset, device: str) -> Any:
        structure, examples, fisher = FISHERS[self.method.kind]
        count = {"few": self.stream.examples, "": None}.get(examples, 1)
        x, y = data.train_x.to(device), data.train_y.to(device)
        batches, seed = list(zip(x.split(AT_ONCE), y.split(AT_ONCE))), self.seed + model.task
        options = dict(likelihood="categorical", structure=structure, fisher=fisher, seed=seed, progress=False)
        made = partial(laplace, model, batches, **options)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "structure=")  # heads of other tasks, whose Hessian is zero
            if examples == SAME:  # as many as take the room of a diagonal
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


def run(
    context: Context, stream: Stream, method: Method, strength: float, seed: int, purpose: str = "final"
) -> dict[str, Tensor]:
    """One pass over all tasks, from the run's folder where it is there.

    Accuracies (tasks learned, task), nan of what was not there yet; processor seconds; and numbers kept. Of test data
    in finals; in a search of data that are held out of the training part.
    """
    trial = Trial(purpose, stream.key, method.kind, {"strength": strength}, seed)

    def compute() -> dict[str, Tensor]:
        model: Any = stream.model(seed, method.kind == "bayesbinn").to(context.device)
        memory = Memory(stream, method, strength, seed)
        accuracy, seconds = torch.full((stream.tasks, stream.tasks), math.nan), torch.zeros(stream.tasks)
        parts = [stream.part(index, seed) for index in range(stream.tasks)]
        parts = parts if purpose == "final" else [data.validation() for data in parts]
        for index, data in enumerate(parts):
            model.task = index
            loss = partial(memory.loss, model, len(data.train_x))
            task = Task(data, "mlp", stream.epochs, stream.batch, stream.widths, loss=loss)
            optimizer = memory.optimizer(model, task)
            named = replace(trial, purpose=f"{purpose}, task {index + 1}")
            times = epoch_seconds(fit(context, named, task, model, [optimizer]), task)
            if not bool(torch.isfinite(times).all()):
                break
            seconds[index] = times.sum()
            accuracy[index, : index + 1] = torch.tensor(
                [_tested(context, model, i, parts[i]) for i in range(index + 1)]
            )
            model.task = index
            if index + 1 < stream.tasks:
                memory.keep(model, optimizer, data, context.device)
        return {"accuracy": accuracy, "seconds": seconds, "kept": torch.tensor(float(memory.size()))}

    return context.once(trial, compute)


def _tested(context: Context, model: Network, index: int, data: Dataset) -> float:
    """The accuracy on one task."""
    model.eval()
    model.task = index
    found = in_batches(lambda x: model(x).argmax(1), data.test_x, context.device, TESTED)
    return (found == data.test_y).double().mean().item()


def score(found: Mapping[str, Tensor], name: str) -> float:
    """The mean accuracy over tasks at the end, when each was just learned, or how much was lost; seconds of all."""
    accuracy = found["accuracy"].double()
    if name == "seconds":
        return found["seconds"].sum().item()
    if name == "end":
        return accuracy[-1].mean().item()
    learned = accuracy.diagonal()
    return learned.mean().item() if name == "learned" else (learned - accuracy[-1])[:-1].mean().item()


def path(one: Results) -> list[list[float]]:
    """For each seed, the mean accuracy in % over tasks so far, after each task."""
    return [[100 * row.nanmean().item() for row in found["accuracy"]] for found in one.runs]


def finals(context: Context, stream: Stream, method: Method) -> Results:
    """The method at the strength of best mean validation accuracy after all tasks, for all seeds."""
    strengths = SPLIT.get(method.kind, method.seconds) if stream.kind == "split" else method.seconds
    settings = [(strength,) for strength in (strengths[:2] if context.scale == "smoke" else strengths)]

    def lacking(setting: Setting, seed: int, *_: Any) -> float:
        value = run(context, stream, method, setting[0], seed, "search")["accuracy"][-1].mean().item()
        return -value if math.isfinite(value) else 0.0

    study, title = f"{stream.key}-{method.kind}", f"{stream.title}, {method.title}"
    (strength,), tried = settings[0], {}
    if len(settings) > 1:
        (strength,), tried = chosen(context, study, title, ["strength"], settings, lacking)
    settings, seeds = method.named((method.lr,)) | {"strength": strength}, range(context.seeds)

    def final(seed: int) -> dict[str, Tensor]:
        return run(context, stream, method, strength, seed)

    runs = each(context, study, settings, seeds, final, lambda one: -score(one, "end"))
    return Results(method.title, runs, score, settings, tried)


# --- the report ---


def streams(context: Context) -> list[Stream]:
    if context.scale == "smoke":
        data = context.load("digits", 200)
        return [Stream(kind, data, 2, (12,), 2, 25, 20) for kind in ("permuted", "split")]
    data = context.load("mnist")
    if context.scale == "laptop":
        return [
            Stream(kind, data.part(6000), 5, (100, 100), n, 100, 300) for kind, n in (("permuted", 3), ("split", 3))
        ]
    return [
        Stream("permuted", data, 10, (400, 400), 20, 100, 1000),
        Stream("split", data, 5, (256, 256), 50, 100, 1000),
    ]


def continual(context: Context) -> Report:
    """Permuted and split tasks: nothing kept, penalties of many kinds, and beliefs that are handed on."""
    report = Report.of("continual-mnist")
    paths, words, held = {}, [], []
    for stream in streams(context):
        results = {method.kind: finals(context, stream, method) for method in METHODS}
        report.add_rows(stream.title, [_row(one) for one in results.values()])
        tried = {one.title: one for one in results.values() if one.tried}
        title = f"{stream.title}: validation accuracy % after all tasks, of each strength tried"
        report.add_table(title, **attempts(tried, ".1f", -100))
        paths[stream.title] = {one.title: path(one) for one in results.values()}
        met, sentence = _compared(results)
        held.append((stream.title, *met))
        words.append(f"{stream.title}: {sentence}")
        report.settings[f"protocol of {stream.title}"] = _protocol(stream, context.seeds)
    title, drawn, exact = held[0]
    outcome = (
        "Holds" if drawn else "Holds for the exact Fisher only, not for drawn labels," if exact else "Does not hold"
    )
    report.verdict = f"{outcome} on {title}. {' '.join(words)}"
    report.draw(context.folder / "accuracy.png", figures.curves, paths, "tasks learned", "mean accuracy (%)")
    return report


def _row(one: Results) -> dict[str, str]:
    """Of a table, by column."""
    end, learned, lost = (shown(one.mean(name), ".2f", 100) for name in ("end", "learned", "lost"))
    return {
        "kept from earlier tasks": one.title,
        "strength": f"{one.settings['strength']:g}" if one.tried else "-",
        "accuracy % after all tasks": end,
        "directly after training": learned,
        "lost on earlier tasks": lost,
        "numbers kept": f"{int(one.runs[0]['kept']):,}",
        "CPU s for all tasks": f"{one.mean('seconds')[0]:.1f}",
    }


def _compared(results: Mapping[str, Results]) -> tuple[list[bool], str]:
    """Whether the target is met with drawn labels and with all, and differences between methods in words."""
    pairs = (
        ("ewc-subsampled-few", "ewc-diag-few"),
        ("ewc-subsampled-exact-few", "ewc-diag-few"),
        ("ewc-subsampled-same", "ewc-diag"),
        ("ewc-input", "ewc-kron"),
        ("ewc-kron", "ewc-diag"),
    )
    words, met = [], []
    for one, other in pairs:
        a, b = results[one], results[other]
        lost, end = a.less(b, "lost"), a.less(b, "end")
        met.append(sign(lost) < 0 and end[0] + margin(end) >= 0)
        words.append(
            f"{a.title}, less {b.title}: lost {shown(lost, '.2f', 100)} points, accuracy after all tasks "
            f"{shown(end, '.2f', 100)} points."
        )
    return met[:2], " ".join(words)


def _protocol(stream: Stream, seeds: int) -> str:
    count = len(stream.data.train_x)
    rates = [f"{m.lr:g} ({m.title})" for m in METHODS if m.kind not in FISHERS]
    tasks = (
        f"{stream.tasks} tasks, the same {count:,} images under permutations of their pixels, one head"
        if stream.kind == "permuted"
        else f"{stream.tasks} tasks of two classes each, out of {count:,} images, a head of its own for each"
    )
    return (
        f"{tasks}; hidden layers of {stream.widths}, {stream.weights:,} weights; {stream.epochs} epochs of each, "
        f"batches of {stream.batch}, cosine schedule; a new Adam for each task, except for VOGN and BayesBiNN; lr "
        f'{", ".join(rates)}; "few examples" are {stream.examples} of each task, the same for diagonals (exact '
        "Fisher) and for subsampled Fishers (one drawn label each, or exact if named so); strength chosen by the mean "
        f"accuracy after all tasks on 20 % held out of the training data, {len(PENALTIES)} for each method, with a "
        f"separate seed; {seeds} paired seeds; test data were used in final runs only"
    )
