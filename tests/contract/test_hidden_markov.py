"""HiddenMarkov: scikit-learn's estimator checks, kinds of sequences, streams, invalid inputs."""

from __future__ import annotations

import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from hmmlearn.hmm import CategoricalHMM, GaussianHMM
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.utils.estimator_checks import estimator_checks_generator
from torch.testing import assert_close

from bayesgrad.models import HiddenMarkov
from bayesgrad.models.markov import Layout

RNG = np.random.default_rng(0)
STATES = np.repeat([0, 1, 0, 1, 1, 0], 10)
X = RNG.normal(size=(60, 2)) + 5 * STATES[:, None]
SYMBOLS = np.where(RNG.random(60) < 0.85, STATES, 2)
ORDER = {"check_methods_sample_order_invariance", "check_methods_subset_invariance"}  # a sequence has an order


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("options", [dict(), dict(method="vb", covariance_type="diag")])
def test_scikit_learns_checks(options: dict) -> None:
    """All but those that shuffle rows; the one for other packages' arrays needs SciPy set up for it."""
    names = []
    for estimator, check in estimator_checks_generator(HiddenMarkov(max_iter=5, **options)):
        name = check.func.__name__
        if name not in ORDER | {"check_array_api_input"}:
            check(estimator)
            names.append(name)
    assert len(names) > 35


@pytest.mark.parametrize("emissions", ["gaussian", "categorical"])
def test_every_kind_of_sequences(emissions: str) -> None:
    """Rows with lengths, a list, tensors: the same numbers, and what comes back is of the same kind."""
    rows = X if emissions == "gaussian" else SYMBOLS
    parts = [rows[:25], rows[25:26], rows[26:]]
    build = dict(n_states=2, emissions=emissions, random_state=0)
    one = HiddenMarkov(**build).fit(rows, lengths=[25, 1, 34])
    many = HiddenMarkov(**build).fit(parts)
    torches = HiddenMarkov(**build).fit([torch.as_tensor(part) for part in parts])
    assert one.elbo_ == many.elbo_ == torches.elbo_
    for name in ("startprob_", "transmat_", *(["means_", "covars_"] if emissions == "gaussian" else ["emissionprob_"])):
        assert isinstance(getattr(one, name), np.ndarray)
        assert isinstance(getattr(torches, name), torch.Tensor)
        assert_close(getattr(one, name), getattr(torches, name).numpy(), rtol=0, atol=0)
    shares, listed = one.predict_proba(rows, [25, 1, 34]), many.predict_proba(parts)
    assert shares.shape == (60, 2)
    assert_close(shares, np.concatenate(listed), rtol=0, atol=0)
    assert [len(part) for part in many.predict(parts)] == [25, 1, 34]
    assert isinstance(torches.predict([torch.as_tensor(rows)])[0], torch.Tensor)
    assert isinstance(one.predict(rows), np.ndarray)
    assert_close(one.log_likelihood(rows, [25, 1, 34]), np.concatenate([one.log_likelihood(part) for part in parts]))
    assert one.score(rows, lengths=[25, 1, 34]) == pytest.approx(one.log_likelihood(parts).sum() / 60, rel=1e-13)
    drawn, states = torches.sample(7)
    assert isinstance(drawn, torch.Tensor)
    assert len(states) == 7
    assert_close(pickle.loads(pickle.dumps(one)).predict_proba(rows), one.predict_proba(rows), rtol=0, atol=0)


def test_states_are_found() -> None:
    found = HiddenMarkov(2, random_state=0).fit(X).predict(X)
    assert (found == STATES).all() or (found == 1 - STATES).all()


def test_missing_observations_are_summed_over() -> None:
    """A likelihood with a row missing is the integral over that row; of symbols, the sum over all that it might be."""
    model = HiddenMarkov(2, emissions="categorical", random_state=0).fit(SYMBOLS)
    row = SYMBOLS.astype(float).copy()
    totals = [model.log_likelihood(np.where(np.arange(60) == 30, symbol, row)).item() for symbol in range(3)]
    row[30] = np.nan
    assert_close(model.log_likelihood(row).item(), np.logaddexp.reduce(totals), rtol=1e-12, atol=0)
    model = HiddenMarkov(2, random_state=0, max_iter=3, tol=0).fit(X[:, :1])
    grid = np.arange(-12, 17, 0.4)
    holed = X[:, :1].copy()
    logs = []
    for value in grid:
        holed[59] = value
        logs.append(model.log_likelihood(holed).item())
    holed[59] = np.nan
    assert_close(model.log_likelihood(holed).item(), np.logaddexp.reduce(logs) + np.log(0.4), rtol=1e-8, atol=0)
    gaps = X.copy()
    gaps[[3, 17, 40]] = np.nan
    assert len(HiddenMarkov(2, random_state=0).fit(gaps).predict(gaps)) == 60


def test_draws_have_the_models_frequencies() -> None:
    """Transitions and symbols of 20,000 steps within five standard errors, and no impossible ones."""
    model = HiddenMarkov(3, emissions="categorical", max_iter=1, tol=0)
    model.set_params(transmat_init=[[0.8, 0.2, 0.0], [0.0, 0.7, 0.3], [0.5, 0.0, 0.5]], random_state=1)
    model.fit(SYMBOLS)
    symbols, states = model.sample(20_000, random_state=0)
    again, _ = model.sample(20_000, random_state=0)
    assert (symbols == again).all()
    for shares, pairs in (
        (model.transmat_, (states[:-1], states[1:])),
        (model.emissionprob_, (states, symbols[:, 0])),
    ):
        counts = np.zeros(shares.shape)
        np.add.at(counts, pairs, 1)
        total = counts.sum(1, keepdims=True)
        assert (counts[shares == 0] == 0).all()
        errors = np.sqrt(shares * (1 - shares) / total)
        assert (np.abs(counts / total - shares) <= 5 * errors + 1e-12).all()
    model = HiddenMarkov(2, random_state=0).fit(X)
    rows, states = model.sample(20_000)
    for k in range(2):
        own = rows[states == k]
        errors = np.sqrt(model.covars_[k].diagonal() / len(own))
        assert (np.abs(own.mean(0) - model.means_[k]) <= 5 * errors).all()


def test_zeros_stay_zero() -> None:
    """A chain from left to right, by EM."""
    model = HiddenMarkov(3, startprob_init=[1, 0, 0], transmat_init=[[0.5, 0.5, 0], [0, 0.5, 0.5], [0, 0, 1]])
    model.set_params(random_state=0, means_init=[[0, 0], [5, 5], [0, 0]]).fit(X[:30])
    assert (model.transmat_[[0, 1, 2, 2], [2, 0, 0, 1]] == 0).all()
    assert model.startprob_.tolist() == [1, 0, 0]
    assert model.predict(X[:30]).tolist() == [0] * 10 + [1] * 10 + [2] * 10
    with pytest.raises(ValueError, match="sequence 1 has probability 0: it needs a start, a transition"):
        HiddenMarkov(2, emissions="categorical", transmat_init=np.eye(2), emissionprob_init=np.eye(2)).fit(
            [np.array([0, 0, 0]), np.array([0, 1, 1])]
        )


def test_states_without_data_are_kept() -> None:
    """More states than clusters, and one that starts far away: no NaN, rows that sum to one."""
    for method in ("em", "vb"):
        model = HiddenMarkov(4, method=method, random_state=0, means_init=[[0, 0], [5, 5], [1e3, 1e3], [1, 1]])
        model.fit(X)
        assert np.isfinite(model.means_).all()
        assert_close(model.transmat_.sum(1), np.ones(4))
        assert np.isfinite(model.elbo_)


def test_states_too_far_apart_are_said_to_be() -> None:
    far = np.concatenate([X[:30], X[:30] + 1e9])
    with pytest.warns(UserWarning, match="fewer than four digits of its covariance are accurate"):
        HiddenMarkov(2, random_state=0, covars_prior=1.0).fit(far)


def test_more_starts_are_no_worse() -> None:
    one = HiddenMarkov(3, emissions="categorical", random_state=3, tol=1e-4).fit(SYMBOLS)
    best = HiddenMarkov(3, emissions="categorical", random_state=3, tol=1e-4, n_init=4).fit(SYMBOLS)
    assert best.elbo_ >= one.elbo_
    assert one.converged_


def test_a_batch_of_all_is_a_sweep() -> None:
    """With rho = 1 and all sequences in the batch a step of a stream is one of EM."""
    options = dict(random_state=0, transmat_init=[[0.9, 0.1], [0.2, 0.8]])
    swept = HiddenMarkov(2, tol=0, max_iter=2, **options).fit([X[:30], X[30:]])
    model = HiddenMarkov(2, offset=0.0, decay=1.0, total_samples=2, **options)
    model.partial_fit([X[:30], X[30:]])
    half = HiddenMarkov(2, tol=0, max_iter=1, **options).fit([X[:30], X[30:]])
    assert_close(model.means_, half.means_, rtol=1e-12, atol=0)
    assert_close(model.elbos_[0], swept.elbos_[0], rtol=1e-12, atol=0)
    model.partial_fit([X[:30], X[30:]])  # rho = 1/2: between the two sweeps
    between = (half.transmat_ - model.transmat_) * (model.transmat_ - swept.transmat_)
    assert (between > 0).all()


@pytest.mark.parametrize("method", ["em", "vb"])
def test_streams_learn_and_keep_nothing(method: str) -> None:
    """60 short sequences one by one reach the states' means; the size of the model does not change."""
    model, sizes = HiddenMarkov(2, method=method, random_state=0, total_samples=60), []
    for _ in range(60):
        states = (RNG.random(12).cumsum() % 4 < 2).astype(int)
        rows = RNG.normal(size=(12, 2)) + 5 * states[:, None]
        model.partial_fit(rows)
        model.elbos_ = model.elbos_[-1:]
        sizes.append(len(pickle.dumps(model)))
    alive = weakref.ref(rows)
    del rows
    gc.collect()
    assert alive() is None
    assert max(sizes[1:]) - min(sizes[1:]) < 64
    assert np.abs(np.sort(model.means_[:, 0]) - [0, 5]).max() < 0.4
    assert model.n_iter_ == 60


def test_too_few_sweeps_warn() -> None:
    with pytest.warns(ConvergenceWarning, match="not converged after max_iter=2 iterations"):
        HiddenMarkov(3, emissions="categorical", max_iter=2, random_state=0).fit(SYMBOLS)


HOLED = np.where(np.arange(120).reshape(60, 2) == 7, np.nan, X)
REFUSED = [
    (HiddenMarkov(2), X, [30, 20], "lengths must sum to the number of rows of X, 60, got 50"),
    (HiddenMarkov(2), X, [60, 0], "lengths must be positive integers"),
    (HiddenMarkov(2), X, [59.5, 0.5], "lengths must be positive integers"),
    (HiddenMarkov(2), [X[:5], X[:0]], None, "sequence 1 is empty: remove it"),
    (HiddenMarkov(2), [X[:5], X[:5, :1]], None, r"sequence 1 has shape \(5, 1\), but sequence 0 has \(5, 2\)"),
    (HiddenMarkov(2), [X[:5]], [5], "a list of sequences cannot be combined with lengths"),
    (HiddenMarkov(2), X, np.ones(60, dtype=int), "all sequences have length 1, so transitions cannot be learned"),
    (HiddenMarkov(7), X[:5], None, "n_states=7 needs at least as many observations, got n_samples=5"),
    (HiddenMarkov(2), HOLED, None, "row 3 of X is partly NaN"),
    (HiddenMarkov(2), np.full((9, 2), np.nan), None, "X contains only NaN"),
    (HiddenMarkov(2), np.full((9, 2), np.inf), None, "infinity"),
    (HiddenMarkov(2), X[:0], None, r"0 sample\(s\)"),
    (HiddenMarkov(2), [], None, "X is empty: pass a list of sequences, or rows"),
    (HiddenMarkov(2, emissions="categorical"), SYMBOLS - 1, None, r"X must contain symbols 0, 1, 2, \.\.\., got -1"),
    (HiddenMarkov(2, emissions="categorical"), SYMBOLS + 0.5, None, r"X must contain symbols 0, 1, 2, \.\.\., got"),
    (HiddenMarkov(2, emissions="categorical"), X, None, "symbols must be one column, got 2"),
    (
        HiddenMarkov(2, emissions="categorical", n_symbols=2),
        SYMBOLS,
        None,
        "but the model has symbols 0 to 1",
    ),
    (HiddenMarkov(0), X, None, "n_states must be a positive integer, got 0"),
    (HiddenMarkov(2, emissions="poisson"), X, None, "emissions must be one of 'gaussian', 'categorical'"),
    (HiddenMarkov(2, method="svi"), X, None, "method must be one of 'em', 'vb', got 'svi'"),
    (HiddenMarkov(2, covariance_type="round"), X, None, "covariance_type must be one of 'full', 'tied', 'diag'"),
    (HiddenMarkov(2, transmat_prior=0.5), X, None, "transmat_prior must be at least 1 where method='em', got 0.5"),
    (HiddenMarkov(2, method="vb", startprob_prior=0.0), X, None, "startprob_prior must be positive numbers, got 0"),
    (HiddenMarkov(2, transmat_prior=np.ones(3)), X, None, r"transmat_prior must be a number or of shape \(2, 2\)"),
    (HiddenMarkov(2, means_prior=[0.0]), X, None, "means_prior must be 2 finite numbers"),
    (HiddenMarkov(2, covars_prior=np.ones(3)), X, None, r"covars_prior must be a number, \(2,\) or \(2, 2\)"),
    (
        HiddenMarkov(2, covars_prior=[[1, 1], [0, 1]]),
        X,
        None,
        "covars_prior must be a symmetric matrix",
    ),
    (HiddenMarkov(2, covars_prior=-1.0), X, None, "covars_prior must be positive semi-definite, got a smallest"),
    (HiddenMarkov(2, means_weight=-1.0), X, None, "means_weight must be a non-negative number, got -1.0"),
    (HiddenMarkov(2, method="vb", means_weight=0), X, None, "means_weight must be a positive number, got 0"),
    (HiddenMarkov(2, method="vb", covars_prior=0), X, None, "covars_prior must be positive definite, got a smallest"),
    (HiddenMarkov(2, method="vb", dof_prior=1), X, None, "dof_prior must be a number greater than 1, got 1"),
    (HiddenMarkov(2, dof_prior="few"), X, None, "dof_prior must be a number greater than 1, got 'few'"),
    (HiddenMarkov(2, startprob_init="a"), X, None, "startprob_init must be a numeric array, got 'a'"),
    (HiddenMarkov(2, transmat_prior=[1, [2]]), X, None, r"transmat_prior must be a numeric array, got \[1, \[2\]\]"),
    (HiddenMarkov(2, init=np.ones(2)), X, None, "init must be one of 'kmeans', 'random', got array"),
    (HiddenMarkov(2, means_init=np.ones((2, 3))), X, None, r"means_init must be finite .* \(2, 2\), got \(2, 3\)"),
    (HiddenMarkov(2, transmat_init=np.ones((2, 2))), X, None, "transmat_init must have shape .* sum to 1"),
    (HiddenMarkov(2, means_init=np.ones((3, 2))), X, None, r"means_init must be finite .* \(2, 2\), got \(3, 2\)"),
    (HiddenMarkov(2, covars_init=np.ones((2, 2))), X, None, r"covars_init must be of shape \(2, 2, 2\), got \(2, 2\)"),
    (HiddenMarkov(2, decay=0.5), X, None, r"decay must be in \(0.5, 1\]"),
]


@pytest.mark.parametrize(("model", "rows", "lengths", "message"), REFUSED, ids=[row[3][:40] for row in REFUSED])
def test_refusals(model: HiddenMarkov, rows, lengths, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        model.fit(rows, lengths=lengths)
    assert str(refused.value).count("\n") == 0
    assert not hasattr(model, "startprob_")


@pytest.mark.parametrize("kind", [np.array, torch.tensor, np.ndarray.tolist, list, "frame"])
@pytest.mark.parametrize("emissions", ["gaussian", "categorical"])
def test_lengths_in_the_place_of_y_are_refused(kind, emissions: str) -> None:
    """In every kind of X whose entries are rows; a y of as many rows is ignored, as in scikit-learn."""
    rows = X if emissions == "gaussian" else SYMBOLS[:, None]
    kind = pytest.importorskip("pandas").DataFrame if kind == "frame" else kind
    given = kind(rows if emissions == "gaussian" or kind is not list else SYMBOLS)
    model = HiddenMarkov(2, emissions=emissions, random_state=0)
    fitted = HiddenMarkov(2, emissions=emissions, random_state=0).fit(given, STATES)
    assert fitted.elbo_ == model.fit(rows).elbo_
    for call in (model.fit, model.partial_fit, fitted.score):
        with pytest.raises(ValueError, match="y is ignored, but has 2 entries for 60 rows: pass lengths by keyword"):
            call(given, [25, 35])


def test_refusals_of_predictions() -> None:
    with pytest.raises(NotFittedError):
        HiddenMarkov().predict(X)
    model = HiddenMarkov(2, emissions="categorical", random_state=0).fit(SYMBOLS)
    with pytest.raises(ValueError, match=r"the symbol 7, but the model has symbols 0 to 2: fit it with n_symbols=8"):
        model.predict([0, 7])
    with pytest.raises(ValueError, match="n_samples must be a positive integer, got 0"):
        model.sample(0)
    with pytest.raises(ValueError, match="y is ignored, but has 2 entries for 60 rows: pass lengths by keyword"):
        HiddenMarkov(2).fit(X, [30, 30])
    with pytest.raises(ValueError, match="expecting 2 features"):
        HiddenMarkov(2, random_state=0).fit(X).predict(X[:, :1])


def test_unseen_symbols() -> None:
    """Symbols that EM has not observed have probability 0; with variational Bayes they do not."""
    seen = np.array([0, 1, 0, 0, 1, 1])
    em = HiddenMarkov(2, emissions="categorical", n_symbols=3, random_state=0).fit(seen)
    assert em.score([0, 2]) == -np.inf
    with pytest.raises(ValueError, match="sequence 0 has probability 0"):
        em.predict_proba([0, 2])
    vb = HiddenMarkov(2, emissions="categorical", n_symbols=3, random_state=0, method="vb").fit(seen)
    assert np.isfinite(vb.score([0, 2]))


def test_pieces_are_about_a_third_of_the_root() -> None:
    assert len(Layout([90_000]).widths) == 100
    assert len(Layout([50] * 1000).widths) == 50


# --- nested lists and known parameters ---


def test_nested_lists_are_the_rows_of_one_sequence() -> None:
    """As for hmmlearn, whose numbers they have; several sequences need lengths, or arrays."""
    symbols = HiddenMarkov(2, emissions="categorical", random_state=0).fit(SYMBOLS)
    column = SYMBOLS[:, None]
    assert symbols.log_likelihood(column.tolist()).tolist() == symbols.log_likelihood(column).tolist()
    assert symbols.predict(column.tolist()).shape == (60,)
    peer = CategoricalHMM(2)
    peer.startprob_, peer.transmat_, peer.emissionprob_ = symbols.startprob_, symbols.transmat_, symbols.emissionprob_
    assert symbols.score(column.tolist()) * 60 == pytest.approx(peer.score(column), rel=1e-10)
    again = HiddenMarkov(2, emissions="categorical", random_state=0).fit(column.tolist())
    assert again.elbo_ == symbols.elbo_
    rows = HiddenMarkov(2, random_state=0).fit(X)
    assert rows.predict(X.tolist()).tolist() == rows.predict(X).tolist()
    with pytest.raises(ValueError, match="X is a nested list of sequences: pass their rows as one array with the len"):
        rows.predict([X[:30].tolist(), X[30:].tolist()])


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical"])
def test_models_of_known_parameters(kind: str) -> None:
    full = np.array([[[2.0, 0.5], [0.5, 1.0]], [[1.0, 0.0], [0.0, 3.0]]])
    covars = {"full": full, "tied": full[0], "diag": full[:, [0, 1], [0, 1]], "spherical": np.array([1.0, 3.0])}[kind]
    peer = GaussianHMM(2, covariance_type=kind)
    peer.startprob_, peer.transmat_ = np.array([0.3, 0.7]), np.array([[0.9, 0.1], [0.0, 1.0]])
    peer.means_, peer.covars_ = np.array([[0.0, 0.0], [3.0, 1.0]]), covars
    model = HiddenMarkov.from_parameters(
        peer.startprob_, peer.transmat_, means=peer.means_, covars=covars, covariance_type=kind
    )
    assert_close(model.log_likelihood(X, [20, 40]).sum(), np.float64(peer.score(X, [20, 40])), rtol=1e-10, atol=0)
    assert_close(model.predict_proba(X), peer.predict_proba(X), rtol=0, atol=1e-10)
    assert_close(model.covars_, covars, rtol=1e-12, atol=1e-14)
    assert model.sample(5)[0].shape == (5, 2)


def test_symbols_of_known_parameters() -> None:
    peer = CategoricalHMM(2)
    peer.startprob_, peer.transmat_ = np.array([0.3, 0.7]), np.array([[0.9, 0.1], [0.2, 0.8]])
    peer.emissionprob_ = np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]])
    model = HiddenMarkov.from_parameters(peer.startprob_, peer.transmat_, emissionprob=peer.emissionprob_)
    assert model.score(SYMBOLS) * 60 == pytest.approx(peer.score(SYMBOLS[:, None]), rel=1e-10)
    with pytest.raises(ValueError, match="pass either emissionprob, or both means and covars"):
        HiddenMarkov.from_parameters(peer.startprob_, peer.transmat_)


@pytest.mark.parametrize("covariance_type", ["full", "diag"])
def test_a_state_without_variance_in_a_direction_is_said_to_have_none(covariance_type: str) -> None:
    """The second column is constant where the first is low; a prior is the remedy."""
    random = np.random.RandomState(0)
    low, high = random.randn(40, 2) * [1, 0], random.randn(40, 2) + 5
    rows = np.concatenate([low, high])
    with pytest.warns(UserWarning, match=r"state \d has .* times the standard .* pass a greater covars_prior"):
        HiddenMarkov(2, covariance_type=covariance_type, random_state=0, covars_prior=1e-6).fit(rows)
    model = HiddenMarkov(2, covariance_type=covariance_type, random_state=0).fit(rows)
    assert model.score(rows + np.array([0, 0.1])) > -1e3
