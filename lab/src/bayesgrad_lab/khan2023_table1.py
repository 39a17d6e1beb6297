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
from bayesgrad_lab.khan2023_rows import Row, difference
from bayesgrad_lab.report import Report
from bayesgrad_lab.study import Context

PARTS = ("Optimization", "Deep learning", "Approximate Bayesian inference")
TO_SIGNS = ((0.3, 1e-10), (0.03, 1.0), (1e-3, 1e3), (1e-4, 1e6))  # relaxation and eps
EXPONENTIAL = "exponential family"

ROWS = (
    Row(
        PARTS[0],
        "Gradient descent",
        "Gaussian (fixed cov.)",
        "delta method",
        "1.3.1",
        rows.descent,
        rows.descent_by_hand,
        "NumPy",
    ),
    Row(PARTS[0], "Newton's method", "Gaussian", "delta method", "1.3.2", rows.newton, rows.newton_by_hand, "NumPy"),
    Row(
        PARTS[0],
        "Multimodal optimization",
        "mixture of Gaussians",
        "delta method",
        "3.2",
        rows.multimodal,
        rows.multimodal_by_hand,
        "NumPy, Eqs. 29-32",
    ),
    Row(
        PARTS[1],
        "SGD",
        "Gaussian (fixed cov.)",
        "delta method, stochastic approx.",
        "4.1",
        deep.sgd,
        deep.torchs_sgd,
        "torch.optim.SGD, momentum 0.9",
    ),
    Row(
        PARTS[1],
        "RMSprop/Adam",
        "Gaussian (diagonal cov.)",
        "delta method, stochastic approx., Hessian approx., square-root scaling, slow-moving scale vectors",
        "4.2",
        deep.adam,
        deep.torchs_adam,
        "torch.optim.Adam",
    ),
    Row(
        PARTS[1],
        "Dropout",
        "mixture of Gaussians",
        "delta method, stochastic approx., responsibility approx.",
        "4.3",
        deep.dropout,
        deep.spike_slab,
        "optim.SpikeSlab",
    ),
    Row(
        PARTS[1],
        "STE",
        "Bernoulli",
        "delta method, stochastic approx.",
        "4.5",
        deep.ste,
        deep.ste_optimizer,
        "optim.STE, weight decay 1",
    ),
    Row(
        PARTS[1],
        "Online Gauss-Newton (OGN)",
        "Gaussian (diagonal cov.)",
        "Gauss-Newton Hessian approx. in Adam, no square-root scaling",
        "4.4",
        deep.ogn,
        partial(deep.variational, OGN),
        "optim.OGN",
    ),
    Row(
        PARTS[1],
        "Variational OGN",
        "Gaussian (diagonal cov.)",
        "OGN's, without the delta method",
        "4.4",
        deep.vogn,
        partial(deep.variational, VOGN, drawn=True),
        "optim.VOGN",
    ),
    Row(
        PARTS[1],
        "BayesBiNN",
        "Bernoulli",
        "STE's, without the delta method",
        "4.5",
        deep.bayes_binn,
        deep.bayes_binn_optimizer,
        "optim.BayesBiNN",
    ),
    Row(
        PARTS[2],
        "Conjugate Bayes",
        EXPONENTIAL,
        "rho = 1",
        "5.1",
        bayes.conjugate,
        bayes.ridge,
        "Ridge, SciPy's density",
    ),
    Row(
        PARTS[2],
        "Laplace's method",
        "Gaussian",
        "delta method",
        "4.4",
        bayes.laplace,
        bayes.laplace_by_hand,
        "LogisticRegression, NumPy",
    ),
    Row(
        PARTS[2],
        "Expectation-Maximization",
        "exponential family and Gaussian",
        "delta method for the parameters",
        "5.2",
        bayes.expectation_maximization,
        partial(bayes.scikit_learns_mixture, False),
        "GaussianMixture",
    ),
    Row(
        PARTS[2],
        "Stochastic variational inference (SVI)",
        "exponential family (mean-field)",
        "stochastic approx., local rho = 1",
        "5.3",
        bayes.stochastic,
        bayes.stochastic_by_hand,
        "NumPy, Hoffman et al.",
    ),
    Row(
        PARTS[2],
        "Variational message passing (VMP)",
        "exponential family (mean-field)",
        "rho = 1 for all nodes",
        "5.3",
        bayes.message_passing,
        partial(bayes.scikit_learns_mixture, True),
        "BayesianGaussianMixture",
    ),
    Row(
        PARTS[2],
        "Non-conjugate VMP",
        "exponential family (mean-field)",
        "rho = 1 for all nodes",
        "5.3",
        bayes.nonconjugate_messages,
        bayes.knowles_and_minka,
        "Knowles and Minka's update, with the Fisher matrix",
    ),
    Row(
        PARTS[2],
        "Non-conjugate variational inference",
        "mixture of exponential family",
        "none",
        "5.4",
        bayes.nonconjugate,
        bayes.nonconjugate_by_search,
        "BFGS on the bound, by a fine grid",
        1e-5,
    ),
)


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


def torchs_rmsprop() -> Tensor:
    model = deep.linear()
    return deep.trained(model, torch.optim.RMSprop(model.parameters(), 0.05, 0.9, 1e-2))


def torchs_adam() -> Tensor:
    model = deep.linear()
    return deep.trained(model, torch.optim.Adam(model.parameters(), 0.05, (0.9, 0.9), 1e-2))


Rung = tuple[str, str, Callable[..., Tensor], Callable[[], Tensor]]


def ladder() -> list[Rung]:
    """What is dropped, which rule that is, the engine's path (with more steps where asked), and the rule's."""
    model = deep.linear()
    gaussian = partial(deep.gaussian, make=deep.linear, size=deep.N, each=False)
    optimizer = partial(deep.variational, make=deep.linear)
    adaptive = partial(deep.adaptive, make=deep.linear)
    drawn = partial(gaussian, lambda t: deep.FixedDraws(deep.noise(t, model), "exact"), domain="retract")
    return [
        (
            "expectations by quadrature",
            "the best Gaussian",
            partial(gaussian, lambda t: GaussHermite(16)),
            best_gaussian,
        ),
        ("by one draw", "optim.VON", drawn, partial(optimizer, VON, size=deep.N, drawn=True, hear=True)),
        (
            "delta method",
            "optim.Newton",
            partial(gaussian, lambda t: Delta()),
            partial(optimizer, Newton, size=deep.N, hear=True),
        ),
        (
            "and batches",
            "optim.Newton",
            partial(gaussian, lambda t: Delta(), size=deep.B),
            partial(optimizer, Newton, hear=True),
        ),
        (
            "and squares of each gradient for the Hessian",
            "optim.OGN",
            partial(gaussian, lambda t: Delta("gauss-newton"), size=deep.B, each=True),
            partial(optimizer, OGN),
        ),
        (
            "and no prior",
            "optim.OGN",
            partial(gaussian, lambda t: Delta("gauss-newton"), size=deep.B, each=True, prior=0.0),
            partial(optimizer, OGN, prior=0.0),
        ),
        (
            "and the square of their mean",
            "a loop",
            partial(adaptive, 0.1, 0.0, 0.9, 1e-2, root=False, debias=False),
            partial(by_hand, 0.1, 0.9, 1e-2, root=False),
        ),
        (
            "and another rate for the mean",
            "a loop",
            partial(adaptive, 0.01, 0.0, 0.9, 1e-2, root=False, debias=False),
            partial(by_hand, 0.01, 0.9, 1e-2, root=False),
        ),
        (
            "and a square root",
            "torch.optim.RMSprop",
            partial(adaptive, 0.05, 0.0, 0.9, 1e-2, debias=False),
            torchs_rmsprop,
        ),
        ("and momentum, debiased", "torch.optim.Adam", partial(adaptive, 0.05, 0.9, 0.9, 1e-2), torchs_adam),
    ]


def rung_difference(rung: Rung) -> float:
    """Over the path; for the first, at its end."""
    _, name, ours, theirs = rung
    other = theirs()
    path = ours(steps=400)[-1] if name == "the best Gaussian" else ours()
    return difference(path, other)


def signs(relaxation: float, eps: float) -> float:
    """How far BayesBiNN without noise is from STE with the same entropy term: slopes are nearly eps/eps."""
    model = deep.perceptron()
    optimizer = BayesBiNN(model.parameters(), 0.05, num_data=1, relaxation=relaxation, eps=eps, momentum=0.0)
    half = deep.apart(model, torch.full_like(deep.flat(model), 0.5))
    path = deep.trained(
        model,
        optimizer,
        lambda t: optimizer.sampled(noise=half),
        read=lambda: deep.latent(optimizer, model, "natural"),
    )
    return (path - deep.ste(deep.start_of(deep.perceptron()))).abs().max().item()


def table1(context: Context) -> Report:
    """Differences and times of all rows, and what each approximation does."""
    rounds, long = {"smoke": (1, 30), "laptop": (5, 400), "paper": (9, 2000)}[context.scale]
    cells, worst = [], []
    for row in ROWS:
        context.say(f"{row.part}: {row.algorithm}")
        gap = difference(row.ours(), row.theirs())
        ours, theirs = [], []
        for _ in range(rounds):
            ours.append(_seconds(row.ours))
            theirs.append(_seconds(row.theirs))
        worst.append(gap <= row.tolerance)
        a, b = (1e3 * statistics.median(part) for part in (ours, theirs))
        cells.append(
            [
                row.algorithm,
                row.section,
                row.candidate,
                row.approximations,
                row.peer,
                f"{gap:.1g}",
                f"{a:.0f}",
                f"{b:.1f}",
            ]
        )
    report = Report(
        "khan2023-table1: every algorithm of the table as one step",
        claim="The algorithms of Table 1 are instances of the Bayesian learning rule, for the candidate distributions "
        "and approximations listed there (Khan and Rue 2023, Table 1). Here: do the engine's families, factors and one "
        "step, put together as each row says, give the same numbers as an independent implementation?",
        verdict=f"{'Holds' if all(worst) else 'Holds in part'}: {sum(worst)} of {len(ROWS)} rows agree, all steps of a "
        "path included, within 1e-9 (the last row, where the other implementation is a numerical search, within 1e-5). "
        "Differences are relative where numbers exceed 1. The engine is general and differentiates its factors; the "
        "last two columns compare its time with that of code for one algorithm.",
    )
    columns = [
        "algorithm",
        "section",
        "posterior",
        "natural gradient",
        "compared with",
        "max. difference",
        "ms",
        "ms of the other",
    ]
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
