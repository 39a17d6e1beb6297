"""What models with hidden variables share: restarts, interruptions, streams, pickles; on Gaussian mixtures."""

from __future__ import annotations

import gc
import pickle
import tracemalloc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning

from bayesgrad.inference import OutsideDomain, elbo
from bayesgrad.models import FactorAnalysis, GaussianMixture, HiddenMarkov, LatentDirichlet, LinearStateSpace
from bayesgrad.models.mixture_factor import MixtureFactor

RNG = np.random.default_rng(0)
X = RNG.normal(size=(80, 2)) + 3 * RNG.normal(size=(4, 2))[np.arange(80) % 4]
METHODS = ("em", "vmp", "svi")


def model(method: str = "vmp", **settings: Any) -> GaussianMixture:
    given: dict[str, Any] = dict(init_params="random", batch_size=20, tol=1e-2 if method == "svi" else 1e-3)
    return GaussianMixture(4, method=method, **(given | settings))


@pytest.mark.parametrize("method", METHODS)
def test_the_best_of_several_starts_is_kept(method: str) -> None:
    """The starts are those that single fits make of the same stream of random numbers."""
    random, bounds = np.random.RandomState(3), []
    for _ in range(4):
        bounds.append(model(method, random_state=random).fit(X).elbo_)
    best = model(method, n_init=4, random_state=3).fit(X)
    assert len({round(bound, 3) for bound in bounds}) > 1
    assert best.elbo_ == max(bounds)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_fit(method: str) -> None:
    first, again, other = (model(method, random_state=seed).fit(X) for seed in (0, 0, 1))
    assert np.array_equal(first.means_, again.means_)
    assert first.elbos_ == again.elbos_
    assert not np.array_equal(first.means_, other.means_)


@pytest.mark.parametrize("method", METHODS)
def test_what_a_fit_says_of_itself(method: str) -> None:
    found = model(method, tol=2e-3, init_params="kmeans").fit(X)
    assert found.converged_
    assert found.n_iter_ == len(found.elbos_) - 1
    assert found.elbo_ == found.elbos_[-1]
    assert abs(found.elbos_[-1] - found.elbos_[-2]) <= found.tol * len(X) < abs(found.elbos_[-2] - found.elbos_[-3])
    with pytest.warns(ConvergenceWarning, match="not converged after max_iter=2 iterations .tol=1e-09.: increase"):
        short = model(method, max_iter=2, tol=1e-9).fit(X)
    assert not short.converged_
    assert short.n_iter_ == 2
    assert model(method, max_iter=2, tol=0).fit(X).n_iter_ == 2  # tol=0: no warning


def interrupt_after(monkeypatch: pytest.MonkeyPatch, evaluations: int) -> None:
    """Ctrl-C during an evaluation of the data's factor."""
    calls, evaluate = [0], MixtureFactor.evaluate

    def counting(self: MixtureFactor) -> Any:
        calls[0] += 1
        if calls[0] == evaluations:
            raise KeyboardInterrupt
        return evaluate(self)

    monkeypatch.setattr(MixtureFactor, "evaluate", counting)


@pytest.mark.parametrize("method", ["em", "vmp"])
def test_an_interrupted_fit_keeps_the_best_so_far(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One evaluation at the start and one after each iteration: the fifth is not kept."""
    three = model(method, max_iter=3, tol=0).fit(X)
    interrupt_after(monkeypatch, 5)
    with pytest.warns(UserWarning, match="interrupted after 3 iterations: the best parameters so far are kept"):
        stopped = model(method, n_init=9).fit(X)
    assert stopped.elbos_ == three.elbos_
    assert np.array_equal(stopped.means_, three.means_)
    assert not stopped.converged_
    assert np.isfinite(stopped.score(X))


@pytest.mark.parametrize("late", [2, 3])
def test_an_interruption_of_a_later_start_keeps_an_earlier_one(monkeypatch: pytest.MonkeyPatch, late: int) -> None:
    """During its first evaluation, and after its first iteration."""
    whole = model(tol=1e-6).fit(X)
    interrupt_after(monkeypatch, whole.n_iter_ + late)
    with pytest.warns(UserWarning, match="the best parameters so far are kept"):
        stopped = model(tol=1e-6, n_init=3).fit(X)
    assert stopped.elbo_ == whole.elbo_


def test_interrupted_passes_keep_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four batches a pass, one evaluation of all rows before the first and after each: the ninth is that of the third
    batch of the second pass, after which the bound is computed once more."""
    with pytest.warns(ConvergenceWarning, match="not converged after max_iter=1 iterations"):
        one = model("svi", max_iter=1, tol=1e-12).fit(X)
    interrupt_after(monkeypatch, 9)
    with pytest.warns(UserWarning, match="interrupted after 1 iterations"):
        stopped = model("svi", tol=1e-12).fit(X)
    assert stopped.elbos_[:2] == one.elbos_
    assert len(stopped.elbos_) == 3
    nodes = stopped._nodes
    rows = stopped._read(X, reset=False)
    bound = elbo(nodes, [*stopped._priors(nodes), stopped._data_factor(rows, nodes)])
    np.testing.assert_allclose(stopped.elbo_, float(bound), rtol=1e-13)


@pytest.mark.parametrize("method", METHODS)
def test_progress_is_shown_where_it_is_wanted(
    method: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    model(method, max_iter=3, tol=0, progress=True).fit(X)
    shown = capsys.readouterr().err
    assert "step 1/3" in shown
    assert shown.endswith("\n")
    model(method, max_iter=3, tol=0).fit(X)  # no terminal
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("method", METHODS)
def test_streams_keep_no_data(method: str) -> None:
    """The pickle has one number more for each batch, and nothing holds on to rows."""
    stream, sizes = model(method), []
    for _ in range(5):
        rows = RNG.normal(size=(200, 2))
        stream.partial_fit(rows)
        sizes.append(len(pickle.dumps(stream)))
    assert np.diff(sizes).max() < 32
    kept = torch.as_tensor(rows)
    alive = weakref.ref(kept)
    stream.partial_fit(kept)
    del kept
    gc.collect()
    assert alive() is None


def test_the_memory_of_a_long_stream_is_flat() -> None:
    """Python's own memory after 20 and after 120 batches, of which each is 8 kB."""
    rows = RNG.normal(size=(10_000, 2))
    stream = model().partial_fit(rows[:500])

    def run(count: int) -> int:
        for _ in range(count):
            stream.partial_fit(rows[500 * (stream.n_iter_ % 20) :][:500])
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        first = run(20)
        assert run(100) - first < 20_000
    finally:
        tracemalloc.stop()
    assert stream.n_iter_ == 121


@pytest.mark.parametrize("method", METHODS)
def test_a_pickled_stream_goes_on_as_it_would_have(method: str) -> None:
    stream = model(method).partial_fit(X[:40])
    twin = pickle.loads(pickle.dumps(stream))
    for other in (stream, twin):
        other.partial_fit(X[40:])
    assert np.array_equal(stream.means_, twin.means_)
    assert stream.elbos_ == twin.elbos_
    assert np.array_equal(stream.predict_proba(X), twin.predict_proba(X))


def test_steps_of_streams() -> None:
    """λ_t = (1 - rho_t) λ_{t-1} + rho_t (prior + N/B statistics), with rho_t = (t + offset)^-decay, here for the
    weights' concentration: one component has all of every batch."""
    stream = GaussianMixture(1, method="svi", offset=2.0, decay=0.9, total_samples=100, weight_concentration_prior=3.0)
    stream.partial_fit(X[:20])
    concentration = 3.0 + 100
    for t, batch in enumerate((X[:20], X[20:30], X[30:80]), start=1):
        if t > 1:
            stream.partial_fit(batch)
        concentration += (t + 2.0) ** -0.9 * (3.0 + 100 - concentration)
        np.testing.assert_allclose(stream.weight_concentration_, [concentration], rtol=1e-12)
    growing = GaussianMixture(1, method="svi", offset=0.0, decay=1.0, weight_concentration_prior=3.0)
    for t, rows in enumerate((X[:20], X[20:30], X[30:80]), start=1):
        growing.partial_fit(rows)
        seen = (20, 30, 80)[t - 1]
        concentration = 3.0 + seen if t == 1 else concentration + (3.0 + seen - concentration) / t
        np.testing.assert_allclose(growing.weight_concentration_, [concentration], rtol=1e-12)


def test_starts_that_lead_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that fails is skipped; if all fail, fit raises."""
    tries, start = [0], GaussianMixture._start

    def sometimes(self: GaussianMixture, data: Any, random: Any) -> Any:
        tries[0] += 1
        if tries[0] < 3:
            raise OutsideDomain("no way")
        return start(self, data, random)

    monkeypatch.setattr(GaussianMixture, "_start", sometimes)
    assert np.isfinite(model(n_init=3).fit(X).elbo_)
    tries[0] = 0
    with pytest.raises(ValueError, match="none of 2 starts led to a valid distribution"):
        model(n_init=2).fit(X)


def test_settings_are_kept_as_given() -> None:
    given = model("em", n_init=2, tol=0.5)
    assert clone(given).get_params() == given.get_params()
    given.fit(X)
    assert clone(given).get_params() == given.get_params()


REFUSED = [
    (dict(n_init=0), "n_init must be a positive integer, got 0"),
    (dict(max_iter=0), "max_iter must be a positive integer, got 0"),
    (dict(tol=-1.0), "tol must be a non-negative number, got -1.0"),
    (dict(decay=0.5), r"decay must be in \(0.5, 1\] for convergence, got 0.5"),
    (dict(decay=1.1), r"decay must be in \(0.5, 1\] for convergence, got 1.1"),
    (dict(offset=-1.0), "offset must be a non-negative number, got -1.0"),
    (dict(offset="late"), "offset must be a non-negative number, got 'late'"),
    (dict(decay=None), r"decay must be in \(0.5, 1\] for convergence, got None"),
    (dict(batch_size=0), "batch_size must be a positive integer, got 0"),
    (dict(total_samples=0), "total_samples must be a positive number or None, got 0"),
    (dict(total_samples=np.inf), "total_samples must be a positive number or None, got inf"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[row[1][:30] for row in REFUSED])
def test_refusals(settings: dict[str, Any], message: str) -> None:
    for verb in ("fit", "partial_fit"):
        with pytest.raises(ValueError, match=message):
            getattr(model(**settings), verb)(X)


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_that_leads_nowhere(method: str) -> None:
    known = model(method).partial_fit(X)
    before = known.score(X)
    with pytest.raises(ValueError, match="this batch leads to an invalid distribution and was ignored"):
        known.partial_fit(1e200 * X)
    assert known.score(X) == before


def test_a_fit_that_fails_leaves_what_was_known(monkeypatch: pytest.MonkeyPatch) -> None:
    known = model("vmp").fit(X)
    before = known.score(X)
    with pytest.raises(ValueError, match="degrees_of_freedom_prior"):
        known.set_params(degrees_of_freedom_prior=-1).fit(X + 1e3)
    assert known.score(X) == before
    with pytest.raises(ValueError, match="NaN"):
        known.fit(np.full((3, 3), np.nan))
    assert known.n_features_in_ == X.shape[1]
    known.set_params(degrees_of_freedom_prior=None)
    interrupt_after(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        known.fit(X + 1e3)
    assert known.score(X) == before


@pytest.mark.parametrize("method", ["em", "vmp"])
def test_a_batch_after_a_fit_counts_for_what_it_is(method: str) -> None:
    """One row of as many as the fit had moves little, and `elbos_` starts again."""
    known = model(method).fit(X)
    weights, score = known.weights_.copy(), known.score(X)
    known.partial_fit(X[:1])
    assert np.abs(known.weights_ - weights).max() < 0.1
    assert known.score(X) > score - 0.1
    assert len(known.elbos_) == 1
    assert not hasattr(known, "converged_")


COUNTS = RNG.poisson(2.0, size=(40, 6))
STREAMS: list[tuple[Any, np.ndarray, dict[str, Any], str]] = [
    (GaussianMixture(2), X, {"n_components": 3}, "n_components was 2 in the first call and is 3 now"),
    (GaussianMixture(2), X, {"method": "vmp"}, "method was 'em' in the first call and is 'vmp' now"),
    (GaussianMixture(2), X, {"covariance_type": "diag"}, "covariance_type was 'full'"),
    (LatentDirichlet(2), COUNTS, {"n_components": 3}, "n_components was 2"),
    (HiddenMarkov(2, random_state=0), X, {"n_states": 3}, "n_states was 2"),
    (FactorAnalysis(1), X, {"n_components": 2}, "n_components was 1"),
]


@pytest.mark.parametrize(("stream", "rows", "change", "message"), STREAMS)
def test_a_stream_keeps_its_structure(stream: Any, rows: np.ndarray, change: dict[str, Any], message: str) -> None:
    stream = clone(stream).partial_fit(rows)
    before = stream.elbos_[:]
    (name,) = change
    kept = getattr(stream, name)
    with pytest.raises(ValueError, match=f"{message}.*: restore it, or start again"):
        stream.set_params(**change).partial_fit(rows)
    assert stream.elbos_ == before
    stream.set_params(**{name: kept}).partial_fit(rows)
    assert len(stream.elbos_) == len(before) + 1
    stream.set_params(**change).fit(rows)  # forgets what was known


@pytest.mark.parametrize("estimator", [GaussianMixture(2), LatentDirichlet(2, random_state=0), FactorAnalysis(1)])
def test_half_precision_is_read(estimator: Any) -> None:
    """bfloat16, which NumPy does not support, represents these counts exactly."""
    rows = torch.as_tensor(COUNTS)
    half, whole = (clone(estimator).fit(rows.to(dtype)) for dtype in (torch.bfloat16, torch.float64))
    assert half.elbo_ == whole.elbo_
    assert half.score(rows.bfloat16()) == whole.score(rows.double())


def _sampled(estimator: Any, rows: np.ndarray, **wanted: Any) -> None:
    clone(estimator).fit(rows).sample(**wanted)


@pytest.mark.parametrize("wanted", [0, 2.5, True, "2"])
@pytest.mark.parametrize(
    ("estimator", "rows"),
    [
        (GaussianMixture(2), X),
        (LatentDirichlet(2, max_iter=1, tol=0), COUNTS),
        (HiddenMarkov(2, random_state=0), X),
        (FactorAnalysis(1), X),
    ],
)
def test_draws_are_whole_numbers(estimator: Any, rows: np.ndarray, wanted: Any) -> None:
    with pytest.raises(ValueError, match=f"n_samples must be a positive integer, got {wanted!r}"):
        _sampled(estimator, rows, n_samples=wanted)


def test_warnings_point_at_the_line_that_asked() -> None:
    """For fit and partial_fit, at any depth of the call stack."""
    some = np.concatenate([COUNTS, np.zeros((1, 6), dtype=int)])
    line = LinearStateSpace(np.eye(1), np.eye(1), np.eye(1), np.eye(1))
    for ask, kind in (
        (lambda: model(max_iter=1, tol=1e-9).fit(X), ConvergenceWarning),
        (lambda: LatentDirichlet(2, max_iter=1, tol=0).fit(some), UserWarning),
        (lambda: LatentDirichlet(2).partial_fit(some), UserWarning),
        (lambda: LatentDirichlet(2, max_iter=1, tol=0).fit(COUNTS).transform(some), UserWarning),
        (lambda: line.fit(X[:, 0], learn="all", max_iter=1, tol=1e-9), UserWarning),
    ):
        with pytest.warns(kind) as seen:
            ask()
        assert [warning.filename for warning in seen] == [__file__]


def test_a_line_without_observations_says_so() -> None:
    line, nothing = LinearStateSpace(np.eye(1), np.eye(1), np.eye(1), np.eye(1)), np.full(9, np.nan)
    with pytest.raises(ValueError, match="y contains only NaN: there is nothing to learn from"):
        line.fit(nothing, learn="all")
    with pytest.raises(ValueError, match="X contains only NaN: there is nothing to score"):
        line.score(nothing)
