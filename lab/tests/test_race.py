"""The race: every optimizer on every workload, the protocol's numbers by hand, and the command from targets to page."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from bayesgrad.products import mm
from bayesgrad_lab import race, race_page
from bayesgrad_lab.cli import main
from bayesgrad_lab.context import Context, Trial
from bayesgrad_lab.methods import peer
from bayesgrad_lab.race import (
    LOSS,
    SCALES,
    Clock,
    Finish,
    Protocol,
    Race,
    at,
    races,
    slowness,
    steps_to,
    time_to,
    within,
)
from bayesgrad_lab.race_entrants import ENTRANTS, Muon, orthogonalised
from bayesgrad_lab.race_flops import counted
from bayesgrad_lab.race_record import keep, recorded
from bayesgrad_lab.race_workloads import WORKLOADS, Recurrent
from bayesgrad_lab.report import load

from .conftest import at_smoke_scale

PEERS, OURS = ([one.kind for one in ENTRANTS.values() if one.ours == ours] for ours in (False, True))


def test_who_takes_part_and_what_is_held_out() -> None:
    assert PEERS == ["sgd", "adamw", "schedulefree", "muon", "soap", "shampoo"]
    assert OURS == ["spectralfoof", "foof", "kfac", "kroneckerfilterfp", "adabayesfp", "ivon"]
    assert [one.name for one in WORKLOADS.values() if one.held_out] == ["lstm", "picture"]
    assert len(WORKLOADS) == 6


@torch.no_grad()
def training_loss(one: Race, model: nn.Module) -> float:
    return one.task.loss(model(one.task.data.train_x), one.task.data.train_y).item()


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.filterwarnings("ignore:.*trains")
def test_every_optimizer_trains_every_workload(workload: str, tmp_path: Path) -> None:
    """Steps at the usual setting lower the training loss, and what a validation changes is undone after it."""
    for one in races(at_smoke_scale(tmp_path), [workload], list(ENTRANTS)):
        model, optimizers = one.build(one.protocol.usual(one.entrant), 0)
        losses = [training_loss(one, model)]
        for step in one._steps(model, optimizers, [], 0, 6):
            assert not step.lost
            losses.append(training_loss(one, model))
            before = {name: value.clone() for name, value in model.state_dict().items()}
            momentum = [getattr(module, "momentum", None) for module in model.modules()]
            assert all(map(math.isfinite, one._validate(model, optimizers)))
            after = model.state_dict()
            for name, value in before.items():
                torch.testing.assert_close(after[name], value, rtol=1e-5, atol=1e-6)
            assert momentum == [getattr(module, "momentum", None) for module in model.modules()]
            assert model.training
        assert min(losses) < losses[0], one.entrant.kind


# --- optimizers ---


def test_muon_is_its_equations() -> None:
    """Jordan et al., 2024: B <- mu B + (1 - mu) G; W <- (1 - lr wd) W - lr sqrt(max(1, m/n)) NS((1 - mu) G + mu B)."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 2, 2, dtype=torch.float64))
    optimizer, expected, buffer = Muon([weight], 0.1, 0.9, 0.5), weight.detach().view(6, 4).clone(), torch.zeros(6, 4)
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        gradient = weight.grad.view(6, 4)
        buffer = 0.9 * buffer + 0.1 * gradient
        x = (0.1 * gradient + 0.9 * buffer).T
        x = x / x.norm()
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x - 4.7750 * a @ x + 2.0315 * a @ a @ x
        expected = (1 - 0.05) * expected - 0.1 * math.sqrt(6 / 4) * x.T
        optimizer.step()
        torch.testing.assert_close(weight.detach().view(6, 4), expected, rtol=1e-10, atol=1e-12)
    assert orthogonalised(torch.randn(8, 4)).dtype == torch.float32
    sizes = torch.linalg.svdvals(orthogonalised(torch.randn(40, 30)))
    assert 0.6 < sizes.min() < sizes.max() < 1.3


def _powers(matrix: torch.Tensor, power: float) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values**power) @ vectors.T


def test_shampoo_is_its_equations() -> None:
    """Anil et al., 2020: L^(-1/4) G R^(-1/4), as long as RMSProp's step, from averages; roots by an iteration."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(30, 20, dtype=torch.float64))
    optimizer = peer("ScalableShampoo")(
        [weight],
        lr=0.1,
        betas=(0.9, 0.99),
        moving_average_for_momentum=True,
        decoupled_weight_decay=True,
        start_preconditioning_step=1,
        preconditioning_compute_steps=1,
        graft_type=3,
        nesterov=False,
    )
    left, right = (1e-6 * torch.eye(n, dtype=torch.float64) for n in (30, 20))
    squares, momentum, expected = torch.zeros(30, 20), torch.zeros(30, 20), weight.detach().clone()
    for _ in range(40):
        gradient = weight.grad = torch.randn(30, 20, dtype=torch.float64)
        left, right = 0.99 * left + 0.01 * gradient @ gradient.T, 0.99 * right + 0.01 * gradient.T @ gradient
        squares = 0.99 * squares + 0.01 * gradient**2
        step = _powers(left, -0.25) @ gradient @ _powers(right, -0.25)
        step *= (gradient / squares.sqrt()).norm() / step.norm()
        momentum = 0.9 * momentum + 0.1 * step
        expected = expected - 0.1 * momentum
        optimizer.step()
    moved = (weight.detach() - expected).norm() / momentum.norm()
    assert moved < 0.02  # of one step, after forty: the roots have a ridge


def test_schedule_free_adamw_averages_what_it_evaluates() -> None:
    """Defazio et al., 2024: z <- z - lr g/(sqrt(v) + eps) at y = (1 - b) z + b x; x is the mean of z, and evaluated."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(5, dtype=torch.float64))
    optimizer = peer("ScheduleFreeAdamW")([weight], lr=0.1, betas=(0.9, 0.99))
    z = x = weight.detach().clone()
    second = torch.zeros(5, dtype=torch.float64)
    for t in range(1, 6):
        torch.testing.assert_close(weight.detach(), 0.1 * z + 0.9 * x, rtol=1e-10, atol=1e-12)
        weight.grad = torch.randn(5, dtype=torch.float64)
        second = 0.99 * second + 0.01 * weight.grad**2
        z = z - 0.1 * weight.grad / ((second / (1 - 0.99**t)).sqrt() + 1e-8)
        x = (1 - 1 / t) * x + z / t
        optimizer.step()
    optimizer.eval()  # pyright: ignore[reportAttributeAccessIssue]
    torch.testing.assert_close(weight.detach(), x, rtol=1e-10, atol=1e-12)


# --- the protocol ---


def test_all_optimizers_try_the_same_multiples() -> None:
    protocol = Protocol()
    found = {kind: protocol.points(one) for kind, one in ENTRANTS.items()}
    for kind, points in found.items():
        assert len({point["lr"] for point in points}) == 8
        for point, other in zip(points, found["adamw"]):
            assert point["lr"] / ENTRANTS[kind].lr == pytest.approx(other["lr"] / 1e-3, rel=1e-3)
            assert 0.1 <= other["lr"] / 1e-3 <= 10
            assert (point["decay"], point["horizon"]) == (other["decay"], other["horizon"])
            assert 0.3 <= point["horizon"] <= 1
    assert protocol.usual(ENTRANTS["adamw"]) == {"lr": 1e-3, "decay": 1e-4, "horizon": 1.0}


def test_the_usual_adamw_is_that_of_torch(tmp_path: Path) -> None:
    (one,) = races(at_smoke_scale(tmp_path), ["cnn"], ["adamw"])
    _, (optimizer,) = one.build(one.protocol.usual(one.entrant), 0)
    default = torch.optim.AdamW([torch.zeros(1)]).defaults
    assert {name: optimizer.defaults[name] for name in ("lr", "betas", "eps")} == {
        name: default[name] for name in ("lr", "betas", "eps")
    }
    assert optimizer.defaults["weight_decay"] == pytest.approx(default["weight_decay"])


def test_schedules_are_in_seconds() -> None:
    """Warm-up in a twentieth of 20 s, then a cosine; whatever the number of the step."""

    def factor(seconds: float, cosine: bool = True) -> float:
        return Clock(seconds).factor(20.0, 0.05, cosine, 7)

    assert [factor(s) for s in (0.0, 0.5, 1.0)] == [0.02, 0.5, 1.0]
    assert factor(10.5) == pytest.approx(0.5)
    assert factor(1 + 19 / 3) == pytest.approx(0.75)
    assert factor(20.0) == factor(99.0) == 0.02
    assert factor(19.0, cosine=False) == 1.0


def test_what_a_curve_says() -> None:
    curve = torch.tensor([[1.0, 10, 0.5, 2.0], [2.0, 20, 0.3, 1.5], [3.0, 30, 0.4, 1.8], [4.0, 40, 0.2, 1.4]])
    assert (time_to(curve, 0.3), steps_to(curve, 0.3)) == (2.0, 20.0)
    assert (time_to(curve, 0.35), steps_to(curve, 0.35)) == (pytest.approx(1.75), pytest.approx(17.5))
    assert time_to(curve, 0.6) == 1.0
    assert time_to(curve, 0.1) == math.inf
    assert within(curve, 3.5) == pytest.approx(0.3)
    assert at(curve, 3.5) == pytest.approx(1.8)
    assert at(curve[:0], 3.5) == within(curve[:0], 3.5, LOSS) == math.inf
    scores = [slowness(curve, target, 6.0) for target in (0.4, 0.2, 0.15, 0.1)]
    assert scores == sorted(scores)
    assert scores[1] == 4.0 < 6.0 < scores[2]


def test_operations_by_hand() -> None:
    """Forward and backward of a linear layer and an LSTM, whose inputs need no gradient; and decompositions."""
    linear, x = nn.Linear(5, 7), torch.randn(3, 5)
    with counted() as total:
        linear(x).sum().backward()
    assert total() == 2 * (2 * 3 * 5 * 7)
    model, words = Recurrent(11, 4, 6), torch.zeros(2, 8, dtype=torch.long)
    with counted() as total:
        model(words).sum().backward()
    assert total() == 3 * 2 * 16 * (4 * 24 + 6 * 24 + 6 * 11)
    wide = torch.randn(200, 300)
    with counted() as total:
        mm(wide, wide.mT)  # by oneDNN, where that is faster
    assert total() == 2 * 200 * 300 * 200
    matrix = torch.eye(9)
    for function, factor in ((torch.linalg.cholesky, 1 / 3), (torch.linalg.eigh, 9), (torch.linalg.qr, 8 / 3)):
        with counted() as total:
            function(matrix)
        assert total() == int(factor * 9**3)


def test_the_plan_is_shorter_than_fifteen_hours() -> None:
    hours = race.plan("laptop", 5, list(WORKLOADS), list(ENTRANTS))
    assert race.OVERHEAD * sum(hours.values()) / 2 < 15  # with two processes
    assert hours["gpt"] == pytest.approx((11 * (8 + 5 + 5) * 1.5 + (8 + 5 + 5) + 5 * 1.5) * 60 / 3600)


# --- the verdict ---


def tracks(own: dict[str, float], usual: dict[str, float]) -> tuple[race.Finishes, race.Finishes]:
    """FOOF takes these multiples of AdamW's time, with a search and without; all others take twice as long."""
    found = []
    for times in (own, usual):
        track = {}
        for name, workload in WORKLOADS.items():
            for kind, one in ENTRANTS.items():
                time = {"adamw": 10.0, "foof": 10.0 * times[name]}.get(kind, 20.0)
                track[name, kind] = Finish(workload, one, {}, 0.0, [time] * 5, [1.0] * 5, [1.0] * 5, 1.0)
        found.append(track)
    return found[0], found[1]


@pytest.mark.parametrize(
    ("own", "usual", "begins"),
    [
        ([0.7, 0.6, 0.5, 1.1, 3, 3], [0.9, 0.9, 0.9, 0.9, 0.9, 2], "Holds:"),
        ([0.7, 0.6, 0.5, 0.5, 3, 3], [0.9, 0.9, 0.9, 0.9, 0.9, 2], "Holds:"),
        ([0.7, 0.6, 0.5, 1.2, 3, 3], [0.9, 0.9, 0.9, 0.9, 0.9, 2], "Holds in part:"),
        ([0.7, 0.6, 0.5, 1.1, 3, 3], [0.9, 0.9, 0.9, 0.9, 2, 2], "Holds in part:"),
        ([0.7, 0.6, 0.8, 1.1, 1, 1], [0.9, 0.9, 0.9, 0.9, 2, 2], "Does not hold:"),
    ],
)
def test_the_verdict_follows_its_rule(own: list[float], usual: list[float], begins: str) -> None:
    words = race_page.verdict(*tracks(dict(zip(WORKLOADS, own)), dict(zip(WORKLOADS, usual))))
    assert words.startswith(begins)
    assert f"gpt {own[0]:.2f}" in words


def test_a_race_of_some_has_no_verdict_and_profiles_count_what_was_not_reached() -> None:
    tuned, usual = tracks(dict.fromkeys(WORKLOADS, 0.5), dict.fromkeys(WORKLOADS, math.inf))
    some = {key: one for key, one in tuned.items() if key[0] != "gpt"}
    assert race_page.verdict(some, usual).startswith("Not resolved")
    some = {key: one for key, one in tuned.items() if key != ("gpt", "sgd")}
    assert race_page.verdict(tuned, some).startswith("Not resolved")
    found = race_page.profiles(usual)
    assert found["FOOF"] == [math.inf] * 6
    assert found["AdamW"] == [1.0] * 6
    assert found["SGD"] == [2.0] * 6
    assert "IVON" not in found
    assert race_page.shown([1.0, 2.0, math.inf, 3.0, 4.0]) == "3.0 [1.0, not reached]"
    assert race_page.shown([1.0, 2.0, math.inf, math.inf, math.inf]) == "not reached (2 of 5)"


# --- the command ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets of two workloads, and a race of three optimizers on them."""
    out = tmp_path_factory.mktemp("race")
    command = ["--scale", "smoke", "--workloads", "cnn,picture", "--seeds", "2", "--out", str(out), "--quiet"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["race", "targets", *command]) == 0
        assert main(["race", "run", *command, "--optimizers", "adamw,foof,ivon"]) == 0
    return out / "race-smoke"


def test_the_page_has_all_that_was_fixed(folder: Path) -> None:
    report = load(folder)
    assert report.verdict == "Smoke run: no verdict."
    assert report.settings["held out, for reporting only"] == "lstm, picture"
    assert SCALES["smoke"].digest() in report.settings["protocol version"]
    titles = [table["title"] for table in report.tables]
    assert titles[:2] == ["Targets", "With a search: seconds to the target"]
    assert "Validation loss at the end of the budget" in titles
    assert [row[0] for row in report.tables[1]["rows"]] == ["AdamW", "FOOF"]
    assert report.figures


def test_a_second_run_measures_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(Race, "_run", measured)
    before = load(folder)
    context = Context(folder, "smoke", 2, say=lambda words: None)
    again = race_page.run(context, ["cnn", "picture"], ["adamw", "foof", "ivon"])
    assert again.tables == before.tables


def test_targets_are_those_that_all_seeds_reach(folder: Path) -> None:
    for name, entry in json.loads((folder / race.TARGETS).read_text()).items():
        (one,) = races(at_smoke_scale(folder), [name], ["adamw"])
        curves = [one.run(entry["setting"], seed, -math.inf) for seed in range(2)]
        assert entry["target"] == max(within(curve, one.budget) for curve in curves)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda entry: {**entry, "protocol": "other"}, "is of other protocol"),
        (lambda entry: {**entry, "data": "other"}, "is of other data"),
        (lambda entry: None, "has no target for cnn: run 'bayesgrad race targets --workloads cnn' first"),
    ],
)
def test_a_race_without_its_targets_is_refused(change: Callable, words: str, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / race.TARGETS
    found = json.loads((folder / race.TARGETS).read_text())
    path.write_text(json.dumps({"cnn": change(found["cnn"])}))
    (one,) = races(at_smoke_scale(tmp_path), ["cnn"], ["foof"])
    with pytest.raises(ValueError, match=words):
        race.target_of(one, path)
    with pytest.raises(ValueError, match=words):
        race_page.run(at_smoke_scale(tmp_path), ["cnn"], ["foof"])


def test_names_and_phases_are_checked_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--scale", "smoke", "--out", str(tmp_path / "x")]
    assert main(["race", "run", *out]) == 2
    assert "has no targets: run 'bayesgrad race targets' first" in capsys.readouterr().err
    assert main(["race", "targets", *out, "--workloads", "nonesuch"]) == 2
    assert "nonesuch" in capsys.readouterr().err
    assert main(["race", "plan"]) == 0
    assert "processor hours" in capsys.readouterr().out
    assert not (tmp_path / "x").exists()


def test_a_run_stops_at_its_target_but_the_baseline_does_not(tmp_path: Path) -> None:
    context = at_smoke_scale(tmp_path)
    for one, stops in zip(races(context, ["cnn"], ["sgd", "adamw", "ivon"]), (True, False, False)):
        curve = one.run(one.protocol.usual(one.entrant), 0, math.inf)
        assert (len(curve) == 1) == stops
        missed = replace(one, context=replace(context, folder=tmp_path / "missed"))
        missed.context.folder.joinpath("trials").mkdir(parents=True, exist_ok=True)
        longer = missed.run(one.protocol.usual(one.entrant), 0, -math.inf)
        assert longer[-1, 0] >= 0.8 * (one.budget if one.entrant.kind == "ivon" else one.protocol.limit * one.budget)


def test_a_search_ends_runs_that_another_setting_has_beaten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same setting is chosen as by runs up to the limit."""
    context, limits = at_smoke_scale(tmp_path), []
    (one,) = races(context, ["cnn"], ["sgd"])
    times = {point["lr"]: 0.02 + 0.01 * i for i, point in enumerate(one.protocol.points(one.entrant))}

    def run(self: Race, trial: Trial, target: float, limit: float) -> torch.Tensor:
        limits.append(limit)
        seconds = times[trial.settings["lr"]]
        return torch.tensor([[seconds, 1.0, 0.0, 0.0]] if seconds < limit else [[limit, 1.0, 9.0, 9.0]])

    monkeypatch.setattr(Race, "_run", run)
    found = race.track(one, 0.5, searched=True).work()
    assert found is not None
    assert found[0]["lr"] == min(times, key=times.__getitem__)
    assert limits[:2] == [math.inf, pytest.approx(0.02)]
    assert limits[2:] == [math.inf] * context.seeds


@pytest.mark.parametrize(("target", "seeds"), [(-1.0, 3), (0.5, 5)])
def test_seeds_that_cannot_change_a_median_are_not_run(
    target: float, seeds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of five that miss the target decide; the baseline and IVON run all, because their losses count."""
    context = replace(at_smoke_scale(tmp_path), seeds=5)
    monkeypatch.setattr(Race, "_run", lambda *_: torch.tensor([[0.01, 1.0, 0.5, 0.5]]))
    for one in races(context, ["cnn"], ["sgd", "adamw", "ivon"]):
        found = race.track(one, target, searched=False).work()
        assert found is not None
        assert len(found[1]) == (seeds if one.entrant.kind == "sgd" else 5)


def test_workloads_of_different_times_make_one_page(folder: Path, tmp_path: Path) -> None:
    """A record has what each workload found, infinite times too; one of another protocol or target is refused."""
    context, path = Context(folder, "smoke", 2, say=lambda words: None), tmp_path / "all.json"
    for name in ("picture", "cnn"):
        report = race_page.run(context, [name], ["adamw", "foof", "ivon"], path)
    assert report.tables == load(folder).tables  # pyright: ignore[reportPossiblyUnboundVariable]
    some = tmp_path / "some.json"  # of optimizers that are not the same on all workloads
    race_page.run(context, ["cnn"], ["adamw"], some)
    report = race_page.run(context, ["picture"], ["adamw", "foof"], some)
    times = next(table["rows"] for table in report.tables if "seconds" in table["title"])
    assert [(row[0], row[1] == "not run") for row in times] == [("AdamW", False), ("FOOF", True)]
    tuned, _ = tracks(dict.fromkeys(WORKLOADS, math.inf), dict.fromkeys(WORKLOADS, 1.0))
    found = race_page.profiles({key: one for key, one in tuned.items() if key != ("cnn", "foof")})
    assert "AdamW" in found
    assert "FOOF" not in found
    protocol, slow = SCALES["smoke"], tuned["cnn", "foof"]
    keep(tmp_path / "slow.json", protocol, {"target": 1.0}, True, slow)
    found, targets, conditions = recorded(tmp_path / "slow.json", protocol)
    assert (found["With a search"]["cnn", "foof"], targets) == (slow, {"cnn": {"target": 1.0}})
    assert [one["torch"] for one in conditions["cnn"]] == [torch.__version__]
    with pytest.raises(ValueError, match="with another target"):
        keep(tmp_path / "slow.json", protocol, {"target": 2.0}, True, slow)
    with pytest.raises(ValueError, match="of another protocol"):
        recorded(path, SCALES["laptop"])
