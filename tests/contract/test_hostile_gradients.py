"""Elementwise rules under hostile sequences of gradients: beliefs stay finite and positive, and nothing is lost.

Each element of a parameter is a sequence of its own. `make test` runs some thousands of sequences per optimizer, and
`make soak` a million.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bayesgrad import optim
from cases import ELEMENTWISE, MASKED, SECOND, SHOWN, Case, same, states, weights
from hostile import KINDS, MODERATE, Sequences

pytestmark = [  # schedules are hostile, too, and weights are so large that bfloat16 cannot hold the noise of samples
    pytest.mark.filterwarnings("ignore:lr=.* times the .* for which"),
    pytest.mark.filterwarnings("ignore:the standard deviation of .* is below the spacing of torch.bfloat16"),
]

IMPROPER = {"num_data": 1000, "prior_precision": 0.0}
CASES = (
    *ELEMENTWISE,
    *SECOND,
    *SHOWN,
    *MASKED,
    # Without a prior and with a short memory, precisions fall and rise by many orders of magnitude.
    Case("IVON-improper", optim.IVON, {**IMPROPER, "betas": (0.9, 0.5)}, decays=False),
    Case("IVON-momentum", optim.IVON, {**IMPROPER, "betas": (0.0, 0.5), "natural_momentum": 0.9}, decays=False),
    Case("Newton-improper", optim.Newton, {**IMPROPER, "betas": (0.9, 0.1)}, decays=False),
    Case("VON-improper", optim.VON, {**IMPROPER, "betas": (0.9, 0.5)}, decays=False),
    Case("VON-momentum", optim.VON, {**IMPROPER, "improved": False, "natural_momentum": 0.9}, decays=False),
)
every_hostile_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
# No posterior, or one whose variance may be zero (of a sign that is certain) or is the square of the weight.
WITHOUT_VARIANCE = ("STE", "BayesBiNN", "AdaBound", "AMSBound", "SpikeSlab")
POSITIVE = ("variance", "last_variance", "momentum_variance")
NONNEGATIVE = ("moment", "peak")


@dataclass(frozen=True)
class Setting:
    """How a run is made: factors of lr in turn, weight decay, and whether the step is compiled."""

    dtype: torch.dtype
    rates: tuple[float, ...] = (1.0,)
    weight_decay: float = 0.0
    fused: bool = False


SETTINGS = (
    Setting(torch.float32, (1.0, 0.1, 0.0, 3.0), 0.1),
    Setting(torch.float64),
    Setting(torch.bfloat16, (1.0, 1.0, 0.0), 0.01),
    Setting(torch.float32),
    Setting(torch.float64, (1.0, 0.0, 1e-3, 2.0), 0.1),
    Setting(torch.bfloat16),
)


class Run:
    """An optimizer, its model, and the gradients (and Hessians) that it receives, whatever the weights are."""

    def __init__(self, case: Case, setting: Setting, count: int, steps: int, seed: int, **span: Any) -> None:
        self.case, self.setting, self.count, self.steps, self.seed, self.span = case, setting, count, steps, seed, span
        units = -(-count // 4)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(1, units), nn.Linear(1, units)).to(setting.dtype)  # it is never called
        options: dict[str, Any] = {"batch_size": 32} if case.name.startswith("AdaBayesFP") else {}
        if case.make in (optim.Newton, optim.VON):
            options["hessian"] = "hutchinson"  # exact for a diagonal Hessian
        self.optimizer: Any = case.of(
            self.model, nonfinite="skip", fused=setting.fused, weight_decay=setting.weight_decay, **options
        )
        self.base = self.optimizer.param_groups[0]["lr"]
        self.params = list(self.model.parameters())
        self.total = sum(p.numel() for p in self.params)
        self.gradients = Sequences(self.total, setting.dtype, steps, seed, **span)
        self.hessians = Sequences(self.total, setting.dtype, steps, seed + 1, **span)
        self.shuffle = torch.randperm(self.total, generator=torch.Generator().manual_seed(seed))

    def of(self, values: Tensor) -> list[Tensor]:
        """One value for each sequence, in the shapes of the parameters."""
        parts = values.to(self.setting.dtype).split([p.numel() for p in self.params])
        return [part.view_as(p) for part, p in zip(parts, self.params)]

    def observe(self, gradients: list[Tensor], hessians: list[Tensor]) -> None:
        """Observes a loss with these gradients and this diagonal Hessian."""
        linear = quadratic = torch.zeros((), dtype=self.setting.dtype)
        for p, g, h in zip(self.params, gradients, hessians):
            d = p - p.detach()
            linear, quadratic = linear + (g * d).sum(), quadratic + (h * d * d).sum() / 2
        # The error of two equal logits is (-1/2, 1/2).
        logits = torch.stack([-2 * linear, torch.zeros_like(linear)])[None]
        self.optimizer.observe(logits, loss=linear + quadratic, labels=torch.tensor([0]))

    def step(self, gradients: list[Tensor], hessians: list[Tensor]) -> None:
        self.optimizer.zero_grad()
        with self.optimizer.sampled():
            needs = self.optimizer.needs
            if needs.loss or needs.outputs:
                self.observe(gradients, hessians)
            for p, g in zip(self.params, gradients):
                p.grad = g.clone()
        self.optimizer.step()

    def next(self) -> tuple[list[Tensor], list[Tensor]]:
        """Sets lr, and returns gradients and Hessians of the next step; those of Hessians may be divided by keep^2."""
        rates = self.setting.rates
        self.optimizer.param_groups[0]["lr"] = self.base * rates[self.gradients.step % len(rates)]
        return self.of(self.gradients.next()), self.of(self.hessians.next()[self.shuffle] / 4)

    def copy(self) -> Run:
        """Continues in another process, as it were: from a file, in other objects."""
        file = io.BytesIO()
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], file)
        file.seek(0)
        other = Run(self.case, self.setting, self.count, self.steps, self.seed, **self.span)
        for part, value in zip((other.model, other.optimizer), torch.load(file, weights_only=True)):
            part.load_state_dict(value)
        return other

    def image(self) -> dict[str, Tensor]:
        return {**weights(self.model), **states(self.optimizer)}

    def faults(self, before: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """What must not be, and where it is."""
        for p, old in zip(self.params, before):
            entry = self.optimizer.state[p]
            yield "a weight that is not finite", ~torch.isfinite(p.detach())
            for slot, value in entry.items():
                if value.shape == p.shape:
                    yield f"{slot} that is not finite", ~torch.isfinite(value)
                if slot in POSITIVE:
                    yield f"{slot} that is not positive", value <= 0
                if slot in NONNEGATIVE:
                    yield f"{slot} that is negative", value < 0
            if "cross" in entry:
                ww, wp, pp = (entry[slot].double() for slot in ("variance", "cross", "momentum_variance"))
                yield "a covariance that is not positive", wp * wp > ww * pp * (1 + 1e-5)
            if self.case.binary:
                yield "a weight that is not binary", p.detach().abs() != 1
            elif self.optimizer.param_groups[0]["lr"] == 0:
                yield "a weight that moved at lr = 0", p.detach() != old
            group, moved = self.optimizer.param_groups[0], (p.detach().double() - old.double()).abs()
            if (bound := self.bound(group, int(entry["step"]))) < math.inf:
                slack = (torch.finfo(p.dtype).eps + group["lr"] * group["weight_decay"]) * old.double().abs()
                yield "a step beyond its bound", moved > bound * (1 + 1e-2) + 2 * slack
            if self.case.name in ("AdaBayes", "AdaBayes-plain", "AdaBayes-centered", "AdaBayes-drawn"):
                prior = self.optimizer.prior_variance(group)
                yield "a variance above the prior's", entry["variance"] > prior * (1 + 1e-5)

    def bound(self, group: dict[str, Any], step: int) -> float:
        """The largest step that the equations of a rule allow, without weight decay."""
        lr = group["lr"]
        if self.case.name == "AdaBayes-plain":  # sqrt(sigma^2_prior)/2
            return math.sqrt(group["sgd_lr"] / group["batch_size"] * lr / self.base) / 2
        if self.case.name in ("AdaBayesFP", "AdaBayesFP-adamw", "SpikeSlab"):
            # Cauchy-Schwarz: (sum a g)^2 <= (sum a^2/b) (sum b g^2), with the weights of the two averages.
            weights = []
            for beta in group["betas"]:
                powers = [beta**i * (1 - beta) / (1 - beta**step) for i in range(step)]
                weights.append(powers)
            return lr * math.sqrt(sum(a * a / b for a, b in zip(*weights)))
        radius = self.optimizer.clip_radius(group) if "clip_radius" in group else math.inf
        if math.isfinite(radius) and not group["natural_momentum"]:
            return self.optimizer.step_scale(group) * radius
        return math.inf

    def check(self, before: list[Tensor]) -> None:
        for what, where in self.faults(before):
            assert not bool(where.any()), (
                f"{self.case.name}, {self.setting}, seed {self.seed}, step {self.gradients.step}: {what}, at "
                f"{int(where.sum())} of {where.numel()} elements, the first at {int(where.flatten().nonzero()[0])}"
            )

    def check_variance(self) -> None:
        """The posterior has variances that are positive and finite."""
        if self.case.name.split("-")[0] not in WITHOUT_VARIANCE:
            for name, variance in self.optimizer.posterior(self.model).variance().items():
                assert bool(((variance > 0) & (variance < math.inf)).all()), (self.case.name, self.setting, name)


def check(case: Case, setting: Setting, count: int, steps: int, seed: int) -> int:
    """One run, with a resume in the middle and steps that are skipped or refused; returns the number of sequences."""
    run, other = Run(case, setting, count, steps, seed), None
    for index in range(steps):
        before = [p.detach().clone() for p in run.params]
        gradients, hessians = run.next()
        run.step(gradients, hessians)
        run.check(before)
        if other is not None:
            other.optimizer.param_groups[0]["lr"] = run.optimizer.param_groups[0]["lr"]
            other.step(gradients, hessians)
        if index == steps // 2:
            refuse(run, gradients, hessians)
            other = run.copy()
        if index == steps // 2 + 10:
            assert other is not None
            assert same(run.image(), other.image()), f"{case.name}, {setting}: not the same after a resume"
            other = None
    run.check_variance()
    return run.total


def refuse(run: Run, gradients: list[Tensor], hessians: list[Tensor]) -> None:
    """A gradient with one bad entry changes nothing."""
    before, (group,) = run.image(), run.optimizer.param_groups
    for bad in (math.nan, math.inf, -math.inf):
        broken = [gradients[0].clone(), *gradients[1:]]
        broken[0].view(-1)[-1] = bad
        for answer in ("skip", "raise"):
            group["nonfinite"] = answer
            run.optimizer.zero_grad()
            with run.optimizer.sampled():
                if run.optimizer.needs.loss or run.optimizer.needs.outputs:
                    run.observe(gradients, hessians)
                for p, g in zip(run.params, broken):
                    p.grad = g.clone()
            if answer == "skip":
                run.optimizer.step()
            else:
                with pytest.raises(FloatingPointError, match="nothing was changed"):
                    run.optimizer.step()
            assert same(before, run.image()), (run.case.name, run.setting, bad, answer)
    group["nonfinite"] = "skip"


@every_hostile_case
def test_thousands_of_hostile_sequences(case: Case) -> None:
    for seed, setting in enumerate(SETTINGS[:3]):
        check(case, setting, 100 * len(KINDS), 24, seed)


def paths(case: Case, settings: tuple[Setting, Setting], count: int, steps: int, **span: Any) -> list[Tensor]:
    """The weights (of binary rules, the latent ones) after the same sequences, and the length of the second path."""
    ends, length = [], torch.zeros(())
    for setting in settings:
        run = Run(case, setting, count, steps, 0, **span)
        gradients = Sequences(run.total, torch.float32, steps, 0, **span)
        latent, old = getattr(run.optimizer.rule, "latent", None), None
        length = torch.zeros(())
        for _ in range(steps):
            run.next()
            values = run.of(gradients.next())
            run.step(values, [g.abs() for g in values])
            new = [run.optimizer.state[p][latent] if latent else p.detach() for p in run.params]
            now = torch.cat([value.double().flatten() for value in new])
            length = length + (0 if old is None else (now - old).abs())
            old = now
        ends.append(old)
    return [*ends, length]


# Others amplify rounding errors: the variance of equal gradients is one, as is a Hessian that is estimated from samples
# where it is small, and without a prior nothing bounds a step.
SMOOTH = [
    case
    for case in CASES
    if case.make not in (optim.IVON, optim.VON, optim.BayesBiNN)
    and not case.name.endswith(("centered", "prior", "improper"))
]


@pytest.mark.parametrize("case", SMOOTH, ids=lambda case: case.name)
def test_float32_agrees_with_float64(case: Case) -> None:
    """To 1e-3 of the length of the path and one rounding error per step, for gradients between 1e-8 and 1e8."""
    settings, steps = (Setting(torch.float32), Setting(torch.float64)), 30
    single, double, length = paths(case, settings, 40 * len(MODERATE), steps, decades=8, kinds=MODERATE)
    rounding = steps * torch.finfo(torch.float32).eps * double.abs()
    assert bool(((single - double).abs() <= 1e-3 * length + rounding + 1e-9).all())


@pytest.mark.compiled
def test_compiled_steps_are_those_of_eager_mode() -> None:
    check_compiled(CASES[0], torch.float32)


def check_compiled(case: Case, *dtypes: torch.dtype) -> None:
    for dtype in dtypes:
        runs = [
            Run(case, Setting(dtype, (1.0, 0.1, 0.0), 0.1, fused), 64 * len(KINDS), 20, 7) for fused in (False, True)
        ]
        for _ in range(20):
            for run in runs:
                run.step(*run.next())
        assert same(*(run.image() for run in runs)), (case.name, dtype)


@pytest.mark.soak
@every_hostile_case
def test_compiled_steps_of_every_rule_are_those_of_eager_mode(case: Case) -> None:
    check_compiled(case, torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.soak
@every_hostile_case
def test_a_million_hostile_sequences(case: Case) -> None:
    done = seed = 0
    while done < 1_000_000:
        done += check(case, SETTINGS[seed % len(SETTINGS)], 100_000, 100, seed)
        seed += 1
