"""Every small architecture through the rules that use layers, against curvature by plain autograd, in float64.

A rule may be exact. It may treat parameters in another way, if a warning names them. It may refuse, in an error that
names a module or parameter. What it does not name must equal the reference, to 1e-8 of each parameter's largest entry.

`python tests/contract/test_architectures.py` prints the outcome for each architecture and rule, and the share of
parameters that FOOF and KFAC model.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import reference as ref
from architectures import BY_NAME
from bayesgrad import SubsampledFisher, laplace, likelihoods
from bayesgrad.layers.fisher import batch_gradients
from bayesgrad.layers.modules import Layer
from bayesgrad.layers.per_example import EmbeddingGradients, OuterProducts
from bayesgrad.optim import FOOF, KFAC, OGN, VOGN, NaturalGradient
from bayesgrad.optimizer import BeliefOptimizer
from bayesgrad.structures import DiagonalStructure, KroneckerStructure
from reference import Problem, WrongNumber, check

DAMPING = 0.3
OPTIONS: dict[str, Any] = {"damping": DAMPING, "max_norm": math.inf, "losses_per_example": 1}
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
TORCH_WARNINGS = (
    "torch.func.vmap does not support this model",
    "Using padding='same' with even kernel lengths",
    "There is a performance drop because we have not yet",
)


@dataclass(frozen=True)
class Outcome:
    """What a rule did with an architecture.

    Args:
        kind: "exact", "fallback", "refused", "wrong" or "unexplained" (a refusal that names nothing).
        detail: names of parameters, or a message.
        fallback: the parameters that warnings have named.
    """

    kind: str
    detail: str = ""
    fallback: frozenset[str] = frozenset()


@cache
def problem(name: str) -> Problem:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Problem(BY_NAME[name])


def named_parameters(messages: Iterable[str], model: nn.Module) -> frozenset[str]:
    """The parameters that warnings name; each must name some."""
    known, names = {name for name, _ in model.named_parameters()}, set[str]()
    for message in messages:
        if not message.startswith(TORCH_WARNINGS):
            found = re.search(r"(?:trains|does not support) (.*?)(?: by|: they)", message)
            assert found, f"a warning that names no parameter: {message}"
            own = set(found[1].split(", "))
            assert own <= known, f"{own - known} are no parameters: {message}"
            names |= own
    return frozenset(names)


# --- the rules: each acts on a model, and returns what checks the result, given the parameters that warnings named ---

Check = Callable[[Collection[str]], None]


def subsampled_fisher(p: Problem, model: nn.Module) -> Check:
    """F = G G' of the given labels, in three ways."""
    fisher = SubsampledFisher(model, p.inputs, likelihood=p.case.likelihood, fisher="empirical", labels=p.labels)
    rows = p.rows / math.sqrt(len(p.rows))
    vector = torch.randn(rows.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    dense, diagonal, product = fisher.dense(), fisher.diagonal(), fisher.matvec(vector)

    def verify(_: Collection[str]) -> None:
        assert fisher.names == p.names
        for name, at in p.places.items():
            own = rows[:, at]
            check(f"dense() of {name}", dense[at][:, at], own.T @ own)
            check(f"diagonal() of {name}", diagonal[at], own.square().sum(0))
            check(f"matvec() of {name}", product[at], own.T @ (rows @ vector))
        check("dense()", dense, rows.T @ rows)

    return verify


def laplace_structure(structure: str, p: Problem, model: nn.Module) -> Check:
    """The Hessian is the Gauss-Newton matrix, its diagonal, or Kronecker factors of layers."""
    fitted = laplace(model, [(p.inputs, p.labels)], likelihood=p.case.likelihood, structure=structure)

    def verify(named: Collection[str]) -> None:
        blocks = {name: block for block in fitted.hessians for name in block.shapes}
        assert set(blocks) == set(p.names)
        for name, at in p.places.items():
            block, exact = blocks[name], p.gauss_newton[at][:, at]
            if isinstance(block, KroneckerStructure):
                if next(iter(block.shapes)) == name:
                    _check_kronecker(p, model, block, exact)
            elif isinstance(block, DiagonalStructure):
                if structure != "diag" and name not in named:
                    raise WrongNumber(f"{name} has a diagonal, but no warning names it")
                check(f"the diagonal of {name}", block.values.flatten(), exact.diagonal())
            else:
                check(f"the block of {name}", block.dense()[at][:, at], exact)
                check("the matrix", block.dense(), p.gauss_newton)

    return verify


def _check_kronecker(p: Problem, model: nn.Module, block: KroneckerStructure, exact: Tensor) -> None:
    """A ⊗ E, with A = Σ aa' over all rows, and E the mean of Σ ee' over directions."""
    first, *others = block.shapes
    owners = [
        (name, module)
        for name, module in model.named_modules()
        if any(w is dict(model.named_parameters())[first] for w in module.parameters(recurse=False))
    ]
    names = [name for name, _ in owners]
    if len(block.shapes[first]) == 1:  # a bias, whose input is one at each position of the outputs
        positions = sum(p.output_elements(name) for name in names) // len(exact)
        check(
            f"the block of {first}",
            block.dense(),
            exact if "error" in block.sides else positions * torch.eye(len(exact)),
        )
        return
    rows = p.rows_of(names, None)
    plain = rows is not None
    if rows is None:
        rows = _claimed_rows(p, first, None)
    else:
        p.check_gradient(first, p.rows_of(names, p.others))
    if rows.shared:
        raise WrongNumber(f"{first} has Kronecker factors, but its rows belong to no single example")
    padding = getattr(owners[0][1], "padding_idx", None)
    if padding is not None:  # its row of an Embedding has no gradient, and its lookups do not count
        kept = rows.inputs[0, :, padding] == 0
        rows = ref.Rows(rows.inputs[:, kept], [errors[:, kept] for errors in rows.errors])
    inputs = ref.with_ones(rows.inputs) if others else rows.inputs
    errors = torch.stack([e.mT @ e for e in rows.errors]).sum(0) / inputs.shape[1]
    if "error" not in block.sides:
        errors = torch.eye(errors.shape[-1], dtype=errors.dtype).expand_as(errors)
    expected = (errors, inputs.mT @ inputs)
    orders = [expected[::-1]] if isinstance(owners[0][1], nn.Embedding) else [expected]
    orders = orders if plain else [expected, expected[::-1]]  # a weight may be (out, in) or (in, out)
    found = torch.stack(list(map(torch.kron, *block._product.matrices())))
    gaps = [ref.difference(found, torch.stack(list(map(torch.kron, *order)))) for order in orders]
    if min(gaps) > ref.TOLERANCE:
        raise WrongNumber(f"the Kronecker factors of {first} differ by {min(gaps):.1e} of their largest entry")


def _claimed_rows(p: Problem, weight: str, labels: Tensor | None) -> ref.Rows:
    """The library's own rows of a layer that is not plain; they must give the per-example gradients."""
    model = p.case.build()
    kind = likelihoods.named(p.case.likelihood)
    fisher = "exact" if labels is None else "empirical"
    (seen,) = batch_gradients(model, p.inputs, kind, fisher, labels, partial(kind.sample, generator=torch.Generator()))
    columns = seen.columns[weight]
    if labels is not None:
        own = ref.by_name(p.model, p.gradients(labels))[weight]
        check(f"the per-example gradients of {weight}", columns.rows(), own)
    if isinstance(columns, EmbeddingGradients):
        inputs = F.one_hot(columns.indices.flatten(), columns.shape[0]).double()[None]
        return ref.Rows(inputs, [columns.errors.flatten(0, 1)[None]])
    if isinstance(columns, OuterProducts):
        inputs, errors = columns.inputs, columns.errors
        directions = columns.count // len(p.outputs)  # those of an example are consecutive
        owner = model.get_submodule(weight.rpartition(".")[0])
        if isinstance(owner, TRANSPOSED) or type(owner).__name__ == "Conv1D":  # the weight is (in, out)
            inputs, errors = errors[:, ::directions], inputs
        return ref.Rows(inputs.flatten(1, 2), [errors[:, k::directions].flatten(1, 2) for k in range(directions)])
    raise WrongNumber(f"{weight} has Kronecker factors, but there is nothing to compare them with")


def one_step(p: Problem, model: nn.Module, optimizer: BeliefOptimizer, labels: Tensor) -> dict[str, Tensor]:
    """By how much a step moves each parameter, against the gradient."""
    outputs, loss = p.loss(model)
    optimizer.observe(outputs, labels=labels)
    loss.backward()
    before = {name: w.detach().clone() for name, w in model.named_parameters()}
    optimizer.step()
    return {name: before[name] - w.detach() for name, w in model.named_parameters()}


def _check_adam(p: Problem, moved: dict[str, Tensor], names: Collection[str]) -> None:
    """Adam's first step is the sign of the gradient, times its learning rate."""
    for name in names:
        large = p.mean[name].abs() > 1e-3
        gap = (moved[name] - 1e-3 * p.mean[name].sign())[large].abs()
        if len(gap) and gap.max() > 1e-8:
            raise WrongNumber(f"the step of {name}, which a warning names, differs from Adam's by {gap.max():.1e}")


def natural_gradient(own_labels: bool, p: Problem, model: nn.Module) -> Check:
    """D = (F + damping)^-1 g in the parameters that are not named."""
    labels = p.labels if own_labels else p.others
    optimizer = NaturalGradient(model, 1.0, **OPTIONS, likelihood=p.case.likelihood)
    moved = one_step(p, model, optimizer, labels)

    def verify(named: Collection[str]) -> None:
        modelled = [name for name in p.names if name not in named]
        at = torch.cat([p.places[name] for name in modelled]) if modelled else torch.zeros(0, dtype=torch.long)
        rows = p.gradients(labels)[:, at] / math.sqrt(len(labels))
        matrix = rows.T @ rows + DAMPING * torch.eye(len(at), dtype=torch.float64)
        solved = torch.zeros_like(p.rows[0])
        solved[at] = torch.linalg.solve(matrix, p.rows.mean(0)[at])
        for name in modelled:
            check(f"the direction of {name}", moved[name].flatten(), solved[p.places[name]])
        _check_adam(p, moved, named)

    return verify


def per_example_squares(make: type[OGN] | type[VOGN], p: Problem, model: nn.Module) -> Check:
    """h = (1 + mean of squares)/2, read from the variance 1/(N (h + 1/N)) with N = 100."""
    optimizer = make(model, num_data=100, betas=(0.0, 0.5), losses_per_example=1, likelihood=p.case.likelihood)
    with optimizer.sampled():
        optimizer.zero_grad()
        weights = {name: w.detach().clone() for name, w in model.named_parameters()}
        p.loss(model)[1].backward()
    optimizer.step()
    variance = optimizer.posterior(model).variance()

    def verify(named: Collection[str]) -> None:
        rows = p.rows if make is OGN else p.gradients_at(weights)
        for name, own in ref.by_name(p.model, rows).items():
            found = 2 * (1 / (100 * variance[name]) - 0.01) - 1
            fallback = own.mean(0).square() * len(own)
            check(f"the squares of {name}", found, fallback if name in named else own.square().mean(0))

    return verify


def layer_step(make: type[FOOF] | type[KFAC], p: Problem, model: nn.Module) -> Check:
    """D = (E + e)^-1 G (A + a)^-1 with the second moments of layers; E + e = 1 for FOOF."""
    options = OPTIONS | ({"likelihood": p.case.likelihood} if make is KFAC else {"damping_mode": "absolute"})
    optimizer = make(model, 1.0, **options)
    moved = one_step(p, model, optimizer, p.others)
    names = {id(w): name for name, w in model.named_parameters()}

    def verify(named: Collection[str]) -> None:
        covered = set(named)
        for layer in optimizer.preconditioner.recorded.layers:
            own = [names[id(w)] for w in layer.members]
            if set(own) <= set(named):
                continue
            covered |= set(own)
            for name, part in zip(own, layer.parted(_direction(p, layer, own, make is KFAC))):
                check(f"the direction of {name}", moved[name], part)
        if odd := sorted(set(p.names) - covered):
            raise WrongNumber(f"no warning names {odd}, which belong to no layer")
        _check_adam(p, moved, named)

    return verify


def _direction(p: Problem, layer: Layer, own: list[str], both: bool) -> Tensor:
    rows = p.rows_of(layer.names, p.others)
    if rows is None:
        rows = _claimed_rows(p, own[0], p.others)
    elif layer.weight is not None:
        p.check_gradient(own[0], rows)
    inputs = rows.inputs if layer.weight is not None else rows.inputs[..., :0]
    inputs = ref.with_ones(inputs) if layer.bias is not None else inputs
    # What a layer computes once for all examples is an input of each of them, but has the sum of their errors, whose
    # second moment is that of N examples.
    a = inputs.mT @ inputs / (1 if rows.shared and not both else len(p.outputs))
    padding = getattr(layer.module, "padding_idx", None) if layer.lookup else None  # whose lookups do not count
    padded = 0 if padding is None else int(rows.inputs[..., padding].sum())
    e = rows.errors[0].mT @ rows.errors[0] / max(1, inputs.shape[1] - padded)
    dampings = (math.sqrt(DAMPING) * _mean(a), math.sqrt(DAMPING) * _mean(e)) if both else (DAMPING, 1.0)
    a, e = (m + d * torch.eye(m.shape[-1], dtype=m.dtype) for m, d in zip((a, e if both else 0 * e), dampings))
    left, right = (a, e) if layer.lookup else (e, a)
    matrix = layer.join([p.mean[name] for name in own])
    return torch.linalg.solve(left, torch.linalg.solve(right, matrix.mT).mT)


def _mean(moment: Tensor) -> float:
    return moment.diagonal(dim1=1, dim2=2).mean().item() or 1.0  # 1 for a layer without errors


RULES: dict[str, Callable[[Problem, nn.Module], Check]] = {
    "SubsampledFisher": subsampled_fisher,
    **{f"laplace {name}": partial(laplace_structure, name) for name in ("diag", "kron", "input", "full", "subsampled")},
    "NaturalGradient": partial(natural_gradient, True),
    "NaturalGradient, other labels": partial(natural_gradient, False),
    "OGN": partial(per_example_squares, OGN),
    "VOGN": partial(per_example_squares, VOGN),
    "FOOF": partial(layer_step, FOOF),
    "KFAC": partial(layer_step, KFAC),
}


# --- outcomes ---


@cache
def outcome(name: str, rule: str) -> Outcome:
    p = problem(name)
    model = p.case.build()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            verify = RULES[rule](p, model)
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            known = [n for n, _ in (*model.named_modules(), *model.named_parameters()) if n]
            explained = any(re.search(rf"(?<![\w.]){re.escape(n)}(?![\w])", str(error)) for n in known)
            return Outcome("refused" if explained else "unexplained", f"{type(error).__name__}: {error}")
    named = named_parameters((str(w.message) for w in seen), model)
    try:
        verify(named)
    except WrongNumber as error:
        return Outcome("wrong", str(error), named)
    return Outcome("fallback" if named else "exact", ", ".join(sorted(named)), named)


@cache
def share(name: str, rule: str) -> float:
    """The share of trained numbers that FOOF or KFAC models, after a step; of the wide model, if there is one."""
    case, p = BY_NAME[name], problem(name)
    model = case.build(case.wide)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer = (FOOF if rule == "FOOF" else KFAC)(
            model, **({} if rule == "FOOF" else dict(likelihood=case.likelihood))
        )
        one_step(p, model, optimizer, p.labels)
    named = named_parameters((str(w.message) for w in seen), model)
    sizes = {n: w.numel() for n, w in ref.trained(model).items()}
    return sum(size for n, size in sizes.items() if n not in named) / sum(sizes.values())


# The outputs do not depend on these: they are subtracted again, or cancel in a softmax, or belong to an unused expert.
WITHOUT_GRADIENT = {
    "BERT": ("key.bias",),
    "PoolFormer": ("1.norm1.bias",),
    "Perceiver": ("key.bias",),
    "siamese": ("encoder.2.bias", "encoder.3.bias"),
    "siamese, stacked": ("encoder.2.bias", "encoder.3.bias"),
    "mixture of experts, routed": tuple(f"experts.1.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")),
    "transformers BERT": ("model.bert.encoder.layer.0.attention.self.key.bias",),
    "transformers ViT": ("model.vit.layers.0.attention.k_proj.bias",),
}
every_architecture = pytest.mark.parametrize("name", BY_NAME)


@every_architecture
def test_every_parameter_has_a_gradient(name: str) -> None:
    """Else the other tests would compare zeros."""
    zero = tuple(n for n, g in problem(name).mean.items() if g.abs().max() < 1e-7)
    assert zero == WITHOUT_GRADIENT.get(name, ())


@every_architecture
@pytest.mark.parametrize("rule", RULES)
def test_what_is_not_named_is_exact(name: str, rule: str) -> None:
    found = outcome(name, rule)
    assert found.kind in ("exact", "fallback", "refused"), found.detail


class Places(nn.Module):
    """Words and positions; positions are looked up in the shape (T,), (1, T) or (N, T)."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.places, self.head, self.shape = nn.Embedding(5, 3), nn.Embedding(4, 3), nn.Linear(3, 2), shape
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        places = {"(T,)": places, "(1, T)": places[None], "(N, T)": places.expand_as(x)}[self.shape]
        return self.head((self.table(x) + self.places(places)).tanh().sum(1))


@pytest.mark.parametrize("shape", ["(T,)", "(1, T)"])
def test_foof_does_not_see_whether_positions_are_looked_up_once_or_for_each_example(shape: str) -> None:
    """The function is the same, so its step is."""
    moved = []
    for model in (Places("(N, T)"), Places(shape)):
        optimizer = FOOF(model, 1.0, **OPTIONS, damping_mode="absolute")
        outputs = model(torch.arange(12).view(3, 4) % 5)
        F.cross_entropy(outputs, torch.tensor([0, 1, 1])).backward()
        optimizer.step()
        moved.append(model.places.weight.detach())
    torch.testing.assert_close(*moved, rtol=1e-10, atol=1e-12)


GOALS = [
    ("ViT", 0.95),
    ("BERT", 0.95),
    ("LSTM language model", 0.9),
    ("transformers ViT", 0.95),
    ("transformers BERT", 0.95),
    ("transformers GPT-2", 0.95),
]


@pytest.mark.parametrize("rule", ["FOOF", "KFAC"])
@pytest.mark.parametrize(("name", "goal"), GOALS)
def test_most_parameters_are_modelled(name: str, goal: float, rule: str) -> None:
    assert share(name, rule) >= goal


def report() -> None:
    """Prints the outcome of each rule for each architecture, and the share of parameters that FOOF and KFAC model."""
    for name, case in BY_NAME.items():
        if case.missing():
            print(f"{name}: skipped, {case.needs} is not installed")
            continue
        for rule in RULES:
            found = outcome(name, rule)
            print(f"{name:42s} {rule:30s} {found.kind:11s} {found.detail}")
        print(f"{name:42s} {'share':30s} FOOF {share(name, 'FOOF'):.1%}, KFAC {share(name, 'KFAC'):.1%}")


if __name__ == "__main__":
    report()
