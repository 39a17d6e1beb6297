"""Table 1 of Khan and Rue 2023: every algorithm out of one step, beside a plain implementation or a package."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bayesgrad.inference import Delta, GaussHermite
from bayesgrad.optim import OGN, VOGN, VON, BayesBiNN, Newton
from bayesgrad_lab import khan2023_bayes as bayes
from bayesgrad_lab import khan2023_deep as deep
from bayesgrad_lab import khan2023_rows as rows
from bayesgrad_lab.context import Context
from bayesgrad_lab.khan2023_rows import Row, difference
from bayesgrad_lab.report import Report

TO_SIGNS = ((0.3, 1e-10), (0.03, 1.0), (1e-3, 1e3), (1e-4, 1e6))  # relaxation and eps

# Under each part: algorithm, section, the paper's posterior and approximations, and what ours is compared with.
PRINTED = """
Optimization
  Gradient descent | 1.3.1 | Gaussian (fixed cov.) | delta method | NumPy
  Newton's method | 1.3.2 | Gaussian | delta method | NumPy
  Multimodal optimization | 3.2 | mixture of Gaussians | delta method | NumPy, Eqs. 29-32
Deep learning
  SGD | 4.1 | Gaussian (fixed cov.) | delta method, stochastic approx. | torch.optim.SGD, momentum 0.9
  RMSprop/Adam | 4.2 | Gaussian (diagonal cov.) | delta method, stochastic approx., Hessian approx., \
square-root scaling, slow-moving scale vectors | torch.optim.Adam
  Dropout | 4.3 | mixture of Gaussians | delta method, stochastic approx., responsibility approx. | \
NumPy, Eqs. 42-43; optim.SpikeSlab too
  STE | 4.5 | Bernoulli | delta method, stochastic approx. | \
NumPy, Eq. 48 with the decay of Eq. 49; optim.STE too
  Online Gauss-Newton (OGN) | 4.4 | Gaussian (diagonal cov.) | \
Gauss-Newton Hessian approx. in Adam, no square-root scaling | NumPy, Eqs. 44-45; optim.OGN too
  Variational OGN | 4.4 | Gaussian (diagonal cov.) | OGN's, without the delta method | \
NumPy, Eqs. 45-46; optim.VOGN too
  BayesBiNN | 4.5 | Bernoulli | STE's, without the delta method | \
NumPy, Eqs. 50-52; optim.BayesBiNN too
Approximate Bayesian inference
  Conjugate Bayes | 5.1 | exponential family | rho = 1 | Ridge, SciPy's density
  Laplace's method | 4.4 | Gaussian | delta method | LogisticRegression, NumPy
  Expectation-Maximization | 5.2 | exponential family and Gaussian | delta method for the parameters | GaussianMixture
  Stochastic variational inference (SVI) | 5.3 | exponential family (mean-field) | \
stochastic approx., local rho = 1 | NumPy, Hoffman et al.
  Variational message passing (VMP) | 5.3 | exponential family (mean-field) | rho = 1 for all nodes | \
BayesianGaussianMixture
  Non-conjugate VMP | 5.3 | exponential family (mean-field) | rho = 1 for all nodes | \
Knowles and Minka's update, with the Fisher matrix
  Non-conjugate variational inference | 5.4 | mixture of exponential family | none | BFGS on the bound, by a fine grid
"""
PAIRS: tuple[tuple[Callable[[], Tensor], ...], ...] = (
    (rows.descent, rows.descent_by_hand),
    (rows.newton, rows.newton_by_hand),
    (rows.multimodal, rows.multimodal_by_hand),
    (deep.sgd, partial(deep.torchs, torch.optim.SGD, 0.3, momentum=0.9)),
    (deep.adam, partial(deep.torchs, torch.optim.Adam, 0.05, (0.9, 0.99), 1e-8)),
    (deep.dropout, deep.dropout_by_hand, deep.spike_slab),
    (deep.ste, deep.ste_by_hand, deep.ste_optimizer),
    (deep.ogn, deep.by_hand, partial(deep.variational, OGN)),
    (deep.vogn, partial(deep.by_hand, drawn=True), partial(deep.variational, VOGN, drawn=True)),
    (deep.bayes_binn, deep.bayes_binn_by_hand, deep.bayes_binn_optimizer),
    (bayes.conjugate, bayes.ridge),
    (bayes.laplace, bayes.laplace_by_hand),
    (bayes.expectation_maximization, partial(bayes.scikit_learns_mixture, False)),
    (bayes.stochastic, bayes.stochastic_by_hand),
    (bayes.message_passing, partial(bayes.scikit_learns_mixture, True)),
    (bayes.nonconjugate_messages, bayes.knowles_and_minka),
    (bayes.nonconjugate, bayes.nonconjugate_by_search),
)  # the engine's numbers, the other's and the optimizer's, for each row
SEARCHED = {"Non-conjugate variational inference": 1e-5}  # tolerances where the other is a numerical search


def table_rows() -> list[Row]:
    """The printed table, with its functions."""
    found, part, pairs = [], "", iter(PAIRS)
    for line in PRINTED.strip().splitlines():
        if not line.startswith(" "):
            part = line
            continue
        name, *words = (cell.strip() for cell in line.split("|"))
        ours, theirs, *also = next(pairs)
        found.append(Row(part, name, *words, ours, theirs, SEARCHED.get(name, 1e-9), *also))  # pyright: ignore
    return found


ROWS = table_rows()
PARTS = tuple(dict.fromkeys(row.part for row in ROWS))


# --- one approximation at a time ---


def best_gaussian() -> Tensor:
    """Mean and precision of the best diagonal Gaussian for all data, by BFGS on its bound, with quadrature."""
    from scipy.optimize import minimize

    model = deep.linear()
    loss, (x, y) = deep.losses(model), next(deep.batches(deep.N))
    rule = GaussHermite(16)

    def both(free: np.ndarray) -> tuple[float, np.ndarray]:
        at = torch.as_tensor(free).requires_grad_()
        mean, log_precision = at[:2], at[2:]
        points, _, weights = rule.points(mean, torch.diag((-log_precision / 2).exp()))
        energy = torch.stack([loss(point, x, y).sum() + point.square().sum() / 2 for point in points])
        value = weights @ energy + log_precision.sum() / 2
        return value.item(), torch.autograd.grad(value, at)[0].numpy()

    found = torch.as_tensor(minimize(both, np.array([0.0, 0, 2, 2]), jac=True, options={"gtol": 1e-10}).x)
    return torch.cat([found[:2], found[2:].exp()])


def by_hand(lr: float, beta: float, eps: float, *, root: bool) -> Tensor:
    """Squares of a batch's gradient, averaged, as the scale of a step, or their root."""
    model = deep.linear()
    loss, w = deep.losses(model), deep.flat(model)
    v, path = torch.zeros_like(w), []
    for x, y in deep.batches():
        g = torch.func.grad(lambda w: loss(w, x, y).mean())(w)  # noqa: B023
        v = beta * v + (1 - beta) * g**2
        w = w - lr * g / ((v.sqrt() if root else v) + eps)
        path.append(w)
    return torch.stack(path)


Rung = tuple[str, str, Callable[..., Tensor], tuple[Callable[[], Tensor], ...]]


def ladder() -> list[Rung]:
    """What is dropped, which rule that is, the engine's path (with more steps where asked), and other ones of it.

    The others are an optimizer, of torch or of this library, and for those of this library NumPy too.
    """
    model, few = deep.linear(), {"size": deep.B}
    gaussian = partial(deep.gaussian, make=deep.linear, size=deep.N, each=False)
    squared = partial(gaussian, lambda t: Delta("gauss-newton"), **few, each=True)
    drawn = partial(gaussian, lambda t: deep.FixedDraws(deep.noise(t, model), "exact"), domain="retract")
    adaptive = partial(deep.adaptive, make=deep.linear)
    plain = {"root": False, "debias": False}
    made = deep.variational, deep.torchs, deep.by_hand
    optimizer, torchs, hand = (partial(path, make=deep.linear) for path in made)
    all_data, exact = {"size": deep.N}, {"exact": True}
    newton, von = partial(optimizer, Newton, **exact), partial(optimizer, VON, drawn=True, **all_data, **exact)
    rmsprop = partial(torchs, torch.optim.RMSprop, 0.05, 0.9, 1e-2)
    adam = partial(torchs, torch.optim.Adam, 0.05, (0.9, 0.9), 1e-2)
    by_quadrature, by_delta = partial(gaussian, lambda t: GaussHermite(16)), partial(gaussian, lambda t: Delta())
    squares, slower = (partial(adaptive, lr, 0.0, 0.9, 1e-2, **plain) for lr in (0.1, 0.01))
    loops = tuple(partial(by_hand, lr, 0.9, 1e-2, root=False) for lr in (0.1, 0.01))
    by_draw = partial(hand, drawn=True, retract=True, **all_data, **exact), von
    by_mean = partial(hand, **all_data, **exact), partial(newton, **all_data)
    flat = partial(hand, prior=0.0), partial(optimizer, OGN, prior=0.0)
    return [
        ("expectations by quadrature", "the best Gaussian", by_quadrature, (best_gaussian,)),
        ("by one draw", "NumPy, optim.VON", drawn, by_draw),
        ("delta method", "NumPy, optim.Newton", by_delta, by_mean),
        ("and batches", "NumPy, optim.Newton", partial(by_delta, **few), (partial(hand, **exact), newton)),
        ("and squares of each gradient for the Hessian", "NumPy, optim.OGN", squared, (hand, partial(optimizer, OGN))),
        ("and no prior", "NumPy, optim.OGN", partial(squared, prior=0.0), flat),
        ("and the square of their mean", "a loop", squares, loops[:1]),
        ("and another rate for the mean", "a loop", slower, loops[1:]),
        ("and a square root", "torch.optim.RMSprop", partial(adaptive, 0.05, 0.0, 0.9, 1e-2, debias=False), (rmsprop,)),
        ("and momentum, debiased", "torch.optim.Adam", partial(adaptive, 0.05, 0.9, 0.9, 1e-2), (adam,)),
    ]


def rung_difference(rung: Rung) -> float:
    """Over the path; for the first, at its end."""
    _, name, ours, others = rung
    path = ours(steps=400)[-1] if name == "the best Gaussian" else ours()
    return max(difference(path, other()) for other in others)


def signs(relaxation: float, eps: float) -> float:
    """How far BayesBiNN without noise is from STE with the same entropy term: slopes are nearly eps/eps."""
    model = deep.perceptron()
    optimizer = BayesBiNN(model.parameters(), 0.05, num_data=1, relaxation=relaxation, eps=eps, momentum=0.0, seed=0)
    half = deep.apart(model, torch.full_like(deep.flat(model), 0.5))
    path = deep.trained(
        model,
        optimizer,
        lambda t: half,
        read=lambda: deep.latent(optimizer, model, "natural"),
    )
    return (path - deep.ste(deep.start_of(deep.perceptron()))).abs().max().item()


def table1(context: Context) -> Report:
    """Differences and times of all rows, and what each approximation does."""
    rounds, long = {"smoke": (1, 30), "laptop": (5, 400), "paper": (9, 2000)}[context.scale]
    cells, worst = [], []
    for row in ROWS:
        context.say(f"{row.part}: {row.algorithm}")
        gap = row.gap()
        times = [(_seconds(row.ours), _seconds(row.theirs)) for _ in range(rounds)]
        worst.append(gap <= row.tolerance)
        a, b = (1e3 * statistics.median(part) for part in zip(*times))
        words = [row.algorithm, row.section, row.candidate, row.approximations, row.peer]
        cells.append([*words, f"{gap:.1g}", f"{a:.0f}", f"{b:.1f}"])
    report = Report.of("khan2023-table1")
    report.verdict = (
        f"{'Holds' if all(worst) else 'Holds in part'}: {sum(worst)} of {len(ROWS)} rows agree, all steps of a "
        "path included, within 1e-9 (the last row, where the other implementation is a numerical search, within 1e-5). "
        "Differences are relative where numbers exceed 1. The engine is general and differentiates its factors; the "
        "last two columns compare its time with that of code for one algorithm."
    )
    words = ["algorithm", "section", "posterior", "natural gradient", "compared with"]
    columns = [*words, "max. difference", "ms", "ms of the other"]
    for part in PARTS:
        report.add_table(part, columns, [c for c, row in zip(cells, ROWS) if row.part == part])
    _add_ladder(report, context, long)
    report.settings["timing"] = f"one thread, CPU time, median of {rounds} interleaved rounds after a warm-up"
    return report


def _add_ladder(report: Report, context: Context, long: int) -> None:
    best = best_gaussian()
    deviations = best[2:].rsqrt()
    cells = []
    for rung in ladder():
        dropped, name, ours, _ = rung
        context.say(f"one at a time: {dropped}")
        end = ours(steps=long)[-long // 4 :].mean(0)
        off = ((end[:2] - best[:2]) / deviations).abs().max().item()
        ratio = "" if len(end) == 2 else f"{(end[2:].rsqrt() / deviations).mean().item():.3f}"
        cells.append([dropped, name, f"{rung_difference(rung):.1g}", f"{off:.3f}", ratio])
    report.add_table(
        f"From the best diagonal Gaussian to Adam, one approximation at a time: logistic regression with 2 weights, "
        f"{deep.N} examples, batches of {deep.B}",
        ["what is approximated", "is", "max. difference", "mean, off by deviations", "deviation over the best"],
        cells,
    )
    report.add_table(
        "Dropout's responsibilities: the slab's message under the whole mixture, less the one that is used",
        ["precision of the spike", "difference"],
        [[f"{s:g}", f"{deep.responsibility(s):.1g}"] for s in (1.0, 10.0, 100.0)],
    )
    report.add_table(
        "BayesBiNN without noise becomes STE: difference of natural parameters",
        ["relaxation", "eps of slopes", "difference"],
        [[f"{t:g}", f"{e:g}", f"{signs(t, e):.1g}"] for t, e in TO_SIGNS],
    )


def _seconds(function: Callable[[], Tensor]) -> float:
    begin = time.process_time()
    function()
    return time.process_time() - begin
