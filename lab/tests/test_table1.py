"""Table 1 of Khan and Rue 2023: each algorithm out of the engine is the algorithm."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from bayesgrad.families import Gamma, Gaussian
from bayesgrad.inference import Expected, Node, Prior, elbo, run, step
from bayesgrad.optim import AdaBayesFP
from bayesgrad_lab import khan2023_deep as deep
from bayesgrad_lab import khan2023_table1 as table
from bayesgrad_lab.context import Context
from bayesgrad_lab.khan2023_rows import difference

PRINTED = [
    "Gradient descent",
    "Newton's method",
    "Multimodal optimization",
    "SGD",
    "RMSprop/Adam",
    "Dropout",
    "STE",
    "Online Gauss-Newton (OGN)",
    "Variational OGN",
    "BayesBiNN",
    "Conjugate Bayes",
    "Laplace's method",
    "Expectation-Maximization",
    "Stochastic variational inference (SVI)",
    "Variational message passing (VMP)",
    "Non-conjugate VMP",
    "Non-conjugate variational inference",
]


def test_no_row_is_left_out() -> None:
    assert [row.algorithm for row in table.ROWS] == PRINTED


@pytest.mark.parametrize("row", table.ROWS, ids=PRINTED)
def test_the_engine_gives_the_algorithms_numbers(row: table.Row) -> None:
    ours, theirs = row.ours(), row.theirs()
    assert ours.shape == theirs.shape
    assert torch.isfinite(theirs).all()
    assert difference(ours, theirs) < row.tolerance <= 1e-5


BY_HAND = {row.algorithm: (row.also, row.theirs) for row in table.ROWS if row.also is not None}
BY_HAND |= {f"{dropped}: {name}": (others[1], others[0]) for dropped, name, _, others in table.ladder()[1:6]}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_optimizers_are_their_equations(name: str) -> None:
    """Each beside the printed equations in NumPy, corrected; these use nothing of the library."""
    optimizer, by_hand = BY_HAND[name]
    assert difference(optimizer(), by_hand()) < 1e-9


def test_every_optimizer_of_the_library_has_a_transcription() -> None:
    """No row compares the library with itself."""
    assert len(BY_HAND) == 10
    for row in table.ROWS:
        assert ("optim." in row.peer.replace("torch.optim", "")) == (row.also is not None)
        assert row.also is None or row.peer.startswith("NumPy")
    source = Path(table.deep.transcribed.__file__).read_text()
    assert "import bayesgrad" not in source
    assert "from bayesgrad" not in source


@pytest.mark.parametrize("row", [row for row in table.ROWS if row.part == "Deep learning"], ids=lambda r: r.algorithm)
def test_paths_go_somewhere(row: table.Row) -> None:
    """Weights that stay where they were would agree with anything."""
    path = row.theirs()
    assert len(path) == deep.STEPS
    assert (path[-1] - path[0]).abs().max() > 0.1


RUNGS = table.ladder()


@pytest.mark.parametrize("rung", RUNGS[1:], ids=[f"{dropped}: {name}" for dropped, name, *_ in RUNGS[1:]])
def test_one_approximation_at_a_time(rung: table.Rung) -> None:
    assert table.rung_difference(rung) < 1e-9


def test_neighbouring_rungs_differ() -> None:
    """Each approximation is one: the next rule does something else."""
    ends = [ours()[-1][:2] for _, _, ours, _ in RUNGS]
    for before, after in pairwise(ends):
        assert (before - after).abs().max() > 1e-3


def test_adabayes_for_a_wide_prior_is_the_engines_adam() -> None:
    """Weights whose prior has no width: the same rule, with eps = 0."""
    limit = deep.torchs(AdaBayesFP, 0.05, sgd_lr=math.inf, betas=(0.9, 0.99))
    torch.testing.assert_close(limit, deep.adaptive(0.05, 0.9, 0.99, 0.0), rtol=1e-9, atol=1e-9)


def test_responsibilities_vanish_with_the_width_of_the_spike() -> None:
    wide, narrow, point = (deep.responsibility(precision) for precision in (1.0, 10.0, 100.0))
    assert wide > 0.1
    assert 1e-5 < narrow < 1e-3
    assert point < 1e-12


def test_signs_without_noise_are_straight_through() -> None:
    gaps = [table.signs(*pair) for pair in table.TO_SIGNS]
    assert gaps[0] > 0.1
    assert gaps[-1] < 1e-10


def test_known_answers_of_message_passing() -> None:
    """Iris by EM, log-likelihoods before the M-step of sweeps 1, 10 and 100; the complete bound of the Bayesian mixture
    after 25 sweeps, which has risen at each; a Gaussian's mean and precision, as BayesPy has them."""
    hidden, nodes, factors = table.bayes.mixture(point=True)
    seen = {}
    for sweep in range(1, 101):
        step(hidden, factors)
        seen[sweep] = elbo([hidden, *nodes], factors).item()
        step(nodes, factors)
    assert [seen[sweep] for sweep in (1, 10, 100)] == pytest.approx(
        [-379.2357579, -291.1791769, -189.5025724], abs=5e-8
    )

    hidden, nodes, factors = table.bayes.mixture(point=False)
    bounds = []
    for _ in range(25):
        step([hidden, *nodes], factors)
        bounds.append(elbo([hidden, *nodes], factors).item())
    assert bounds[-1] == pytest.approx(-330.2965369, abs=5e-8)
    assert min(b - a for a, b in pairwise(bounds)) > 0

    y = torch.tensor([1, 2, 4, 3, 7, 5, 6, 2.5, 3.5, 4.5], dtype=torch.float64)
    small = torch.tensor([1e-2], dtype=torch.float64)
    mean = Node(Gaussian(), Gaussian().of(0 * small, small[:, None]))
    noise = Node(Gamma(), Gamma().of(small[0], small[0]))

    def observed(m: tuple, tau: tuple) -> torch.Tensor:
        return (tau[0] - math.log(2 * math.pi) - tau[1] * (y**2 - 2 * y * m[0] + m[1][0])).sum() / 2

    factors = [Expected(observed, mean, noise), Prior(mean, mean.natural), Prior(noise, noise.natural)]
    found = run([mean, noise], factors, tolerance=1e-14)
    assert found.elbo == pytest.approx(-27.2456174792, abs=5e-11)
    assert (mean.moments[0].item(), noise.mean[1].item()) == pytest.approx((3.83701063, 0.29539615), abs=5e-9)


def test_the_report_says_what_does_not_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = table.ROWS[1], replace(table.ROWS[10], theirs=lambda: table.bayes.ridge() + 1e-3)
    rungs = table.ladder()[-2:]
    monkeypatch.setattr(table, "ROWS", rows)
    monkeypatch.setattr(table, "ladder", lambda: rungs)
    report = table.table1(Context(tmp_path, "smoke", say=lambda line: None))
    assert report.verdict.startswith("Holds in part: 1 of 2 rows agree")
    assert [len(part["rows"]) for part in report.tables] == [1, 0, 1, 2, 3, 4]
    assert report.tables[2]["rows"][0][5] == "0.001"
