"""Experiments of Aitchison 2018: where the filter is Adam, and the limits of its Kronecker factors."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from bayesgrad import optim
from bayesgrad.precision.projection import Factors
from bayesgrad_lab import datasets, figures, networks
from bayesgrad_lab.context import Context
from bayesgrad_lab.report import Report
from bayesgrad_lab.results import mean_and_error, shown
from bayesgrad_lab.training import steps

# --- where the filter is Adam, RMSProp or neither ---

AGREES, SHARE = 0.1, 0.9  # what counts as Adam or RMSProp: displacement within 10 %, and 90 % of it by one of two ways
REGIONS = ("Adam", "RMSProp", "neither")
POINTS = (
    (1e-2, 0.3),
    (1e-2, 0.1),
    (0.1, 0.1),
    (0.3, 0.01),
    (1.0, 0.1),
    (1.0, 0.01),
    (2.0, 0.001),
    (3.0, 0.003),
    (10.0, 0.1),
)  # eta rms and eta_p
BIAS = 0.3  # the mean of drawn gradients, relative to their rms


def steady(x: Tensor, eta_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """S_ww, S_wp and S_pp after the evidence of a step, for constant e^2, in units in which eta = 1 and e = x.

    The Riccati equation of the 2x2 filter, by doubling.
    """
    x, eta_p = torch.broadcast_tensors(x.double(), eta_p.double())
    zero, one = torch.zeros_like(x), torch.ones_like(x)

    def matrix(*entries: Tensor) -> Tensor:
        return torch.stack(entries, -1).unflatten(-1, (2, 2))

    transition = matrix(one, zero, one, 1 - eta_p)  # transposed
    information, prior = matrix(x * x, zero, zero, zero), matrix(zero, zero, zero, eta_p * eta_p)
    eye = torch.eye(2, dtype=torch.float64)
    for _ in range(40):
        inverse = torch.linalg.inv(eye + information @ prior)
        information, prior, transition = (
            information + transition @ inverse @ information @ transition.mT,
            prior + transition.mT @ prior @ inverse @ transition,
            transition @ inverse @ transition,
        )
    gain = 1 + x * x * prior[..., 0, 0]
    wp = prior[..., 0, 1]
    return prior[..., 0, 0] / gain, wp / gain, prior[..., 1, 1] - x * x * wp * wp / gain


def closed_form(x: Tensor, eta_p: Tensor) -> tuple[Tensor, Tensor]:
    """S_ww and S_wp to first order in the step, for any r = eta_p/x."""
    half = eta_p / (2 * x)
    phi = (1 + half).sqrt() - half.sqrt()
    return (2 * eta_p).sqrt() * x**-1.5 * phi, eta_p / x * phi**2


def displacement(ww: Tensor, wp: Tensor, x: Tensor, eta_p: Tensor) -> tuple[Tensor, Tensor]:
    """A step under a constant gradient of size rms, over eta, which is Adam's; and the momentum's share of it."""
    direct, by_momentum = x * ww, x * wp / eta_p
    return direct + by_momentum, by_momentum / (direct + by_momentum)


def region(moved: Tensor, share: Tensor) -> Tensor:
    """Which of `REGIONS`."""
    close = (moved - 1).abs() < AGREES
    return torch.where(close & (share > SHARE), 0, torch.where(close & (share < 1 - SHARE), 1, 2))


def drawn_steps(x: float, eta_p: float, weights: int, seed: int, gaussian: bool) -> dict[str, Tensor]:
    """The optimizer itself on drawn gradients: mean displacement of each weight, and that by its momentum.

    Gradients are rms or -rms, so that the information is the same in each step, or Gaussian with that rms.
    """
    lr, batch = 1e-3, 10
    rms = x / (lr * batch)  # of the mean gradient
    weight = nn.Parameter(torch.zeros(weights, dtype=torch.float64))
    optimizer = optim.KalmanMomentum([weight], lr=lr, batch_size=batch, momentum_decay=eta_p, fused=False)
    generator = torch.Generator().manual_seed(seed)
    settle = min(8000, int(20 / min(x, eta_p)))
    by_momentum, start = torch.zeros_like(weight), weight.detach().clone()
    for step in range(2 * settle):
        if step == settle:
            start, by_momentum = weight.detach().clone(), torch.zeros_like(start)
        if gaussian:
            noise = torch.randn(weights, generator=generator, dtype=torch.float64)
            weight.grad = rms * (BIAS + math.sqrt(1 - BIAS**2) * noise)
        else:
            chosen = torch.rand(weights, generator=generator, dtype=torch.float64) < (1 + BIAS) / 2
            weight.grad = rms * (2 * chosen.double() - 1)
        optimizer.step()
        by_momentum -= lr * optimizer.state[weight]["momentum"]
    unit = settle * BIAS * lr
    return {"moved": (start - weight.detach()) / unit, "by_momentum": by_momentum.detach() / unit}


def of_network(count: int, seed: int) -> dict[str, Tensor]:
    """eta rms of the weights of a perceptron that is trained on digits by Adam's usual settings, for so many steps."""
    data = datasets.load("digits")
    model, lr, batch = networks.build("mlp", data, seed), 1e-3, 128
    optimizer = optim.KalmanMomentum(model.parameters(), lr=lr, batch_size=batch, fused=False)
    generator, total = torch.Generator().manual_seed(seed), []
    rows = (torch.randint(len(data.train_x), (batch,), generator=generator) for _ in range(count))
    for step in steps(model, [optimizer], ((data.train_x[some], data.train_y[some]) for some in rows)):
        if 2 * step.number >= count:
            total.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).square())
    rms = torch.stack(total).mean(0).sqrt()
    return {"x": lr * batch * rms[rms > 0]}


def momentum(context: Context) -> Report:
    """The filter's steady state over the map eta rms by eta_p: Adam, RMSProp or neither."""
    across, weights, points, count = {
        "smoke": (15, 50, POINTS[1:3], 20),
        "laptop": (141, 400, POINTS, 400),
        "paper": (241, 4000, POINTS, 4000),
    }[context.scale]
    x = torch.logspace(-5, 2, across, dtype=torch.float64)
    eta_p = torch.logspace(-4, math.log10(0.5), across, dtype=torch.float64)[:, None]
    ww, wp, _ = steady(x, eta_p)
    closed_ww, closed_wp = closed_form(x, eta_p)
    moved, share = displacement(ww, wp, x, eta_p)
    where = region(moved, share)
    shares = [(where[:, x > 0.999e-3] == i).double().mean().item() for i in range(3)]
    printed = wp * x / eta_p  # over Eq. 21
    small = (x * x * ww < 0.03) & (eta_p <= 0.01)
    worst = max((closed_wp / wp - 1)[small].abs().max().item(), (closed_ww / ww - 1)[small].abs().max().item())

    rows, held, dots, smaller = [], [], [], []
    for a, b in points:
        at = torch.tensor(a).double(), torch.tensor(b).double()
        predicted, portion = (v.item() for v in displacement(*steady(*at)[:2], *at))
        cells = [f"{a:g}", f"{b:g}", REGIONS[int(region(*displacement(*steady(*at)[:2], *at)))], f"{predicted:.3f}"]
        parts = [f"{portion:.3f}"]
        for gaussian in (False, True):
            kind = "gaussian" if gaussian else "signs"
            found = [
                context.once(f"{kind}-{a:g}-{b:g}-seed{s}", partial(drawn_steps, a, b, weights, s, gaussian))
                for s in range(context.seeds)
            ]
            everything = [torch.cat([run[name] for run in found]) for name in ("moved", "by_momentum")]
            (mean, error), (part, _) = ((v.mean().item(), v.std().item() / len(v) ** 0.5) for v in everything)
            cells.append(f"{mean:.3f} ± {error:.3f}")
            parts.append(f"{part / mean:.3f}")
            if gaussian:
                smaller.append(1 - mean / predicted)
                continue
            dots.append((a, b, mean))
            held.append(abs(mean - predicted) < 4 * error + 0.01 * predicted and abs(part / mean - portion) < 0.02)
        rows.append([*cells, *parts])
    networks_x = torch.cat(
        [context.once(f"digits-seed{s}", partial(of_network, count, s))["x"] for s in range(context.seeds)]
    )
    low, middle, high = networks_x.quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
    usual = torch.tensor([low, middle, high]).double(), torch.tensor(0.1).double()
    parts = displacement(*steady(*usual)[:2], *usual)[1].tolist()
    best = {p: printed[int((eta_p[:, 0] - p).abs().argmin())].max().item() for p in (0.1, 0.01, 1e-3)}
    narrow = shares[0] < 0.5
    report = Report.of("aitchison2018-momentum")
    report.verdict = (
        f"Holds on {'a part of the map only' if narrow else 'most of the map'}: of the map (eta rms from 1e-3 "
        f"to 100, eta_p from 1e-4 to 0.5, logarithmic) the filter is Adam on {100 * shares[0]:.0f} %, RMSProp on "
        f"{100 * shares[1]:.0f} %, and neither on {100 * shares[2]:.0f} %. At the usual eta_p = 0.1 it is Adam nowhere "
        f"on the map: S_wp reaches at best {best[0.1]:.2f} of Eq. 21 ({best[0.01]:.2f} at 0.01, {best[1e-3]:.2f} at "
        f"1e-3). The closed form that replaces Eq. 21 is within {100 * worst:.1f} % of the exact steady state where "
        "eta_p <= 0.01 and a step removes less than 3 % of the variance. On drawn gradients of one size the "
        f"optimizer's step and the momentum's share of it are the theory's at {sum(held)} of {len(held)} points (1 % "
        f"and four standard errors; 0.02); on Gaussian ones steps are smaller, by {100 * min(smaller):.0f} to "
        f"{100 * max(smaller):.0f} %, since a large gradient also carries much information. The weights of a "
        f"perceptron trained at lr 1e-3 lie at eta rms {middle:.1g} (median; {low:.1g} to {high:.1g} are 90 %), where "
        f"with eta_p = 0.1 the momentum carries {100 * parts[1]:.2g} % of the displacement ({100 * parts[0]:.1g} to "
        f"{100 * parts[2]:.2g} %): there the filter is RMSProp."
    )
    if (where[int((eta_p[:, 0] - 0.1).abs().argmin())] == 0).any():
        report.verdict = report.verdict.replace("it is Adam nowhere on the map: ", "")
    report.add_table(
        f"KalmanMomentum on drawn gradients, {weights} weights for each of {context.seeds} seeds",
        [
            "eta rms",
            "eta_p",
            "is, by theory",
            "step/eta, theory",
            "gradients ± rms",
            "Gaussian gradients",
            "momentum's share, theory",
            "gradients ± rms",
            "Gaussian gradients",
        ],
        rows,
    )
    table = []
    for p in (0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4):
        row = int((eta_p[:, 0] - p).abs().argmin())
        adam, rmsprop = x[where[row] == 0], x[where[row] == 1]
        table.append(
            {
                "eta_p": f"{eta_p[row].item():.2g}",
                "S_wp/Eq. 21": f"{printed[row].max().item():.2f}",
                "at eta rms": f"{x[printed[row].argmax()].item():.2g}",
                "Adam at eta rms": f"{adam.min().item():.2g} to {adam.max().item():.2g}" if len(adam) else "nowhere",
                "RMSProp at eta rms": f"below {rmsprop.max().item():.2g}" if len(rmsprop) else "nowhere",
            }
        )
    report.add_rows("By eta_p: the exact S_wp over Eq. 21 at its best, and the regions of both rules", table)
    report.draw(
        context.folder / "map.png",
        figures.regions,
        x.numpy(),
        eta_p[:, 0].numpy(),
        where.numpy(),
        REGIONS,
        {
            "step of the filter / step of Adam": (moved.numpy(), (0.3, 0.5, 0.7, 0.9, 1.1)),
            "exact S_wp / Eq. 21": (printed.numpy(), (0.01, 0.1, 0.3, 0.5, 0.7, 0.9)),
            "closed form / exact S_wp": ((closed_wp / wp).numpy(), (1.02, 1.1, 1.5, 3.0)),
        },
        dots,
        (low, middle, high),
        ("η · rms of the summed gradient", "$η_p$"),
    )
    report.add_protocol(across=across, bias=BIAS, count=count)
    return report


# --- Kronecker factors ---

DRIFTS = {0.01: 1.04, 0.025: 1.08, 0.091: 1.28, 0.3: 1.83}  # eta sqrt(tr Cx tr Cd) -> trace ratio, computed beforehand
TIMES = {400: 0.185, 4000: 0.066, 40_000: 0.021}  # examples -> relative error, computed beforehand
SIDES = (4, 3)


def moments(size: int, seed: int) -> Tensor:
    """A covariance with eigenvalues between 0.3 and 3."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    return (basis * torch.logspace(math.log10(0.3), math.log10(3), size, dtype=torch.float64)) @ basis.mT


def power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values**exponent) @ vectors.mT


def product(belief: Factors) -> Tensor:
    """Σ_x ⊗ Σ_δ in each group, dense."""
    return torch.einsum("gij,gkl->gikjl", belief.inputs, belief.errors).flatten(3).flatten(1, 2)


def simulate(eta: float, steps: int, skip: int, chains: int, seed: int, at: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """Examples one by one, from independent Gaussian inputs and errors; drift before each.

    Returns:
        mean: of Σ_x ⊗ Σ_δ over time after `skip` steps and over chains; at: Σ after so many steps, (times, chains, ..).
    """
    roots = [power(moments(size, i), 0.5) for i, size in enumerate(SIDES)]
    generator = torch.Generator().manual_seed(seed)
    eyes = [torch.eye(size, dtype=torch.float64).expand(chains, size, size) for size in SIDES]
    belief = Factors(eyes[0], eyes[1], torch.ones(2, chains, dtype=torch.float64))
    total, found = torch.zeros(SIDES[0] * SIDES[1], SIDES[0] * SIDES[1], dtype=torch.float64), []
    for step in range(1, steps + 1):
        x, d = (torch.randn(chains, 1, len(r), generator=generator, dtype=torch.float64) @ r for r in roots)
        if eta:
            belief = belief.with_exact_traces().propagate(1.0, eta * eta)
        belief = belief.observe(x, d)
        if step > skip and step % 5 == 0:
            total += product(belief).mean(0)
        if step in at:
            found.append(product(belief))
    return {"mean": total / max(1, (steps // 5) - skip // 5), "at": torch.stack(found) if found else torch.zeros(1)}


def kronecker(context: Context) -> Report:
    """Factors with process noise tend to inverse square roots of the moments, without it to inverses over time."""
    chains, length, longest = {"smoke": (4, 2, 400), "laptop": (16, 10, 40_000), "paper": (200, 60, 400_000)}[
        context.scale
    ]
    moment = [moments(size, i) for i, size in enumerate(SIDES)]
    scale = math.sqrt(moment[0].trace() * moment[1].trace())
    whitening = torch.kron(power(moment[0], -0.5), power(moment[1], -0.5))
    inverse = torch.kron(power(moment[0], -1.0), power(moment[1], -1.0))
    rows, ratios, shapes = [], {}, {}
    for drift, target in DRIFTS.items():
        if context.scale == "smoke" and drift < 0.09:
            continue
        eta = drift / scale
        steps = int(length * scale / drift)
        found = [
            context.once(f"drift{drift:g}-seed{s}", partial(simulate, eta, 2 * steps, steps, chains, s))["mean"]
            for s in range(context.seeds)
        ]
        values = [(one.trace() / (eta * whitening.trace())).item() for one in found]
        wrong = [_shape_error(one, whitening) for one in found]
        against = [_shape_error(one, inverse) for one in found]
        ratios[drift], shapes[drift] = mean_and_error(values), mean_and_error(wrong)
        rows.append(
            {
                "eta sqrt(tr Cx tr Cd)": f"{drift:g}",
                "trace ratio": _shown(values),
                "target": f"{target:g}",
                "error of the shape": _shown(wrong),
                "error of the shape if it were Cx^-1 (x) Cd^-1": _shown(against),
            }
        )
    times = tuple(t for t in TIMES if t <= longest) or (longest,)
    runs = [
        context.once(f"static-seed{s}", partial(simulate, 0.0, max(times), max(times), chains, s, times))["at"]
        for s in range(context.seeds)
    ]
    late, errors, means = [], {}, {}
    for i, t in enumerate(times):
        relative = [[(one * t - inverse).norm().item() / inverse.norm().item() for one in run[i]] for run in runs]
        errors[t] = [float(np.mean(some)) for some in relative]
        means[t] = [((run[i].mean(0) * t - inverse).norm() / inverse.norm()).item() for run in runs]
        against = [_shape_error(run[i].mean(0), whitening) for run in runs]
        late.append(
            {
                "examples t": f"{t:,}",
                "relative error of a run": _shown(errors[t]),
                "target": f"{TIMES.get(t, math.nan):g}",
                "of the mean over runs": _shown(means[t]),
                "error of the shape if it were Cx^-1/2 (x) Cd^-1/2": _shown(against),
            }
        )
    first, last = min(ratios), times[-1]
    good = abs(ratios[first][0] - DRIFTS[first]) < 0.05 and np.mean(errors[last]) < 1.5 * TIMES.get(last, 1.0)
    report = Report.of("aitchison2018-kronecker")
    report.verdict = (
        f"{'Holds' if good else 'Does not hold'}, with a bias that vanishes with eta. With process noise the "
        "trace is "
        + ", ".join(f"{m:.3f} times the formula's at {d:g}" for d, (m, _) in ratios.items())
        + f"; its shape differs by {100 * shapes[first][0]:.1f} % at the smallest. Without, the belief of a single run "
        "is off by " + ", ".join(f"{100 * np.mean(e):.1f} % after {t:,} examples" for t, e in errors.items()) + "."
    )
    report.add_rows("With process noise: Σ averaged over time, against eta Cx^-1/2 (x) Cd^-1/2", rows)
    report.add_rows("Without: Σ t against Cx^-1 (x) Cd^-1", late)
    traces = {
        "simulated": (list(ratios), [[m] for m, _ in ratios.values()]),
        "target": (list(ratios), [[DRIFTS[d]] for d in ratios]),
    }
    report.draw(
        context.folder / "kronecker.png",
        figures.lines,
        {"with process noise": traces},
        "η √(tr Cx tr Cδ)",
        "trace / formula",
    )
    relative = {
        "simulated": (list(times), [errors[t] for t in times]),
        "target": (list(times), [[TIMES.get(t, math.nan)] for t in times]),
    }
    panels = {"without process noise": relative}
    report.draw(context.folder / "static.png", figures.lines, panels, "examples", "relative error")
    report.add_protocol(sides=SIDES, chains=chains, length=length)
    return report


def _shape_error(found: Tensor, formula: Tensor) -> float:
    """Relative difference once traces are equal."""
    return (found / found.trace() - formula / formula.trace()).norm().item() / (formula / formula.trace()).norm().item()


def _shown(values: list[float]) -> str:
    return shown(mean_and_error(values))
