"""LatentDirichlet: scikit-learn's estimator checks, array types, streams, interruptions, invalid inputs."""

from __future__ import annotations

import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from scipy.sparse import coo_array, csc_matrix, csr_matrix
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.utils.estimator_checks import estimator_checks_generator

from bayesgrad.models import LatentDirichlet
from bayesgrad.models.documents import DocumentsFactor

RNG = np.random.default_rng(0)
X = RNG.poisson(0.7, size=(30, 8)) + np.eye(30, 8)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("method", ["svi", "batch"])
def test_scikit_learns_checks(method: str) -> None:
    names = []
    for estimator, check in estimator_checks_generator(LatentDirichlet(2, method=method, max_iter=3, tol=0)):
        name = check.func.__name__
        if name != "check_array_api_input":
            check(estimator)
            names.append(name)
    assert len(names) > 45


def sparse_tensor(rows: np.ndarray) -> torch.Tensor:
    return torch.as_tensor(rows).to_sparse_coo()


@pytest.mark.parametrize("kind", [torch.as_tensor, sparse_tensor, csr_matrix, csc_matrix, coo_array, np.asfortranarray])
def test_kinds_of_counts(kind) -> None:
    settings = dict(max_iter=3, tol=0, batch_size=10, random_state=0)
    model, twin = LatentDirichlet(3, **settings).fit(X), LatentDirichlet(3, **settings).fit(kind(X))
    tensors = isinstance(kind(X), torch.Tensor)
    assert isinstance(twin.components_, torch.Tensor if tensors else np.ndarray)
    assert np.array_equal(np.asarray(twin.components_), model.components_)
    assert model.elbo_ == twin.elbo_
    for result in (twin.transform(kind(X)), twin.bound(kind(X))):
        assert isinstance(result, torch.Tensor if tensors else np.ndarray)
    assert np.array_equal(np.asarray(twin.transform(kind(X))), model.transform(X))
    assert model.score(X) == twin.score(kind(X))
    assert isinstance(twin.sample(2)[1], torch.Tensor if tensors else np.ndarray)


def test_counts_that_are_stored_twice_or_as_zero_are_the_same_counts() -> None:
    rows = csr_matrix((np.array([1.0, 2.0, 0.0, 3.0]), [2, 2, 1, 0], [0, 3, 4]), shape=(2, 3))
    found = LatentDirichlet(2, method="batch", max_iter=2, tol=0, random_state=0).fit(rows)
    plain = LatentDirichlet(2, method="batch", max_iter=2, tol=0, random_state=0).fit(rows.toarray())
    assert np.array_equal(found.components_, plain.components_)
    assert rows.nnz == 4  # what was given is left alone


def test_a_stream_is_not_kept() -> None:
    model, sizes = LatentDirichlet(3, random_state=0), []
    for _ in range(4):
        rows = RNG.poisson(1.0, size=(50, 8)) + 1.0
        model.partial_fit(rows)
        sizes.append(len(pickle.dumps(model)))
    alive = weakref.ref(rows)
    del rows
    gc.collect()
    assert alive() is None
    assert max(sizes) - min(sizes) < 128
    assert model.n_iter_ == len(model.elbos_) == 4


def test_a_stream_survives_pickling() -> None:
    model = LatentDirichlet(3, random_state=0).partial_fit(X[:15])
    twin = pickle.loads(pickle.dumps(model)).partial_fit(X[15:])
    assert np.array_equal(model.partial_fit(X[15:]).components_, twin.components_)


def test_partial_fit_goes_on_from_fit() -> None:
    """With the step sizes that would have come next."""
    model = LatentDirichlet(3, method="svi", batch_size=10, max_iter=2, tol=0, random_state=0).fit(X)
    before = model.components_.copy()
    model.set_params(mean_change_tol=0, total_samples=None).partial_fit(X[:5])
    rho = (7 + 10.0) ** -0.7
    lost = (1 - rho) * before.sum() + rho * (X[:5].sum() * 35 / 5 + 24 / 3)
    assert model.components_.sum() == pytest.approx(lost, rel=1e-12)


def test_too_few_sweeps_warn() -> None:
    with pytest.warns(ConvergenceWarning, match="not converged after max_iter=2 iterations"):
        model = LatentDirichlet(3, method="batch", max_iter=2, tol=1e-6, random_state=0).fit(X)
    assert model.n_iter_ == 2
    assert not model.converged_


@pytest.mark.parametrize("method", ["svi", "batch"])
def test_ctrl_c_keeps_what_is_known(method: str, monkeypatch) -> None:
    evaluate, count = DocumentsFactor.evaluate, 0

    def interrupted(self):
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return evaluate(self)

    monkeypatch.setattr(DocumentsFactor, "evaluate", interrupted)
    model = LatentDirichlet(3, method=method, batch_size=30, random_state=0, tol=1e-9)
    with pytest.warns(UserWarning, match=r"interrupted after \d iterations: the best parameters so far are kept"):
        model.fit(X)
    assert np.isfinite(model.elbo_)
    assert model.transform(X).shape == (30, 3)


def test_empty_documents_are_said_and_count_nothing() -> None:
    rows = np.insert(X, [3, 9], 0.0, axis=0)
    settings = dict(method="batch", max_iter=4, tol=0, random_state=0, mean_change_tol=0)
    with pytest.warns(UserWarning, match="2 of 32 documents have no words, the first in row 3: their proportions are"):
        model = LatentDirichlet(2, **settings).fit(rows)
    with pytest.warns(UserWarning, match="no words"):
        shares = model.transform(rows)
    assert np.allclose(shares[[3, 10]], 0.5)
    with pytest.warns(UserWarning, match="no words"):
        assert model.bound(rows)[[3, 10]] == pytest.approx([0, 0], abs=1e-12)
    assert model.components_.sum() == pytest.approx(X.sum() + 16 / 2)


def test_top_words_and_names() -> None:
    rows = np.kron(np.eye(2), np.array([[4.0, 3, 2, 1]] * 5))
    model = LatentDirichlet(2, method="batch", random_state=0).fit(rows)
    found = model.top_words("abcdefgh", 4)
    assert sorted(found) == [list("abcd"), list("efgh")]
    assert sorted(model.top_words(n=2)) == [[0, 1], [4, 5]]
    assert model.top_words() == model.top_words(n=8)
    assert model.get_feature_names_out().tolist() == ["latentdirichlet0", "latentdirichlet1"]
    assert model.transform(rows, normalize=False).sum(1) == pytest.approx(np.full(10, 10 + 2 / 2))


def test_samples_are_documents_of_the_model() -> None:
    """Their words' frequencies are those of the topics' means, within five standard errors of the shares drawn."""
    model = LatentDirichlet(2, method="batch", random_state=0, doc_topic_prior=1.0).fit(np.repeat(X, 400, axis=0))
    counts, shares = model.sample(2000, 50, random_state=1)
    assert counts.shape == (2000, 8)
    assert np.array_equal(counts.sum(1).A1, np.full(2000, 50))
    assert shares.sum(1) == pytest.approx(np.ones(2000))
    topics = model.components_ / model.components_.sum(1, keepdims=True)
    expected = (shares @ topics).mean(0)
    assert abs(counts.sum(0).A1 / 1e5 - expected).max() < 5 * np.sqrt(0.25 / 1e5) + 5 * 0.5 / np.sqrt(12_000)
    again = model.sample(2000, 50, random_state=1)
    assert (again[0] != counts).nnz == 0


HOLED = np.where(np.arange(240).reshape(30, 8) == 7, np.nan, X)
REFUSED = [
    (LatentDirichlet(), HOLED, "X contains NaN or infinity in 1 of 30 documents"),
    (LatentDirichlet(), X[:0], r"0 sample\(s\)"),
    (LatentDirichlet(), X - 1, "Negative values in data: counts must not be negative, got -1"),
    (LatentDirichlet(), 0 * X, "X contains no words: every count is zero"),
    (LatentDirichlet(0), X, "n_components must be a positive integer, got 0"),
    (LatentDirichlet(method="em"), X, "method must be one of 'svi', 'batch', got 'em'"),
    (LatentDirichlet(method="online"), X, "got 'online': the online method of scikit-learn is called 'svi' here"),
    (LatentDirichlet(), ["some text"], r"counts of words, \(D, V\), got text: .*CountVectorizer first"),
    (LatentDirichlet(doc_topic_prior=0.0), X, "doc_topic_prior must be a positive number, got 0.0"),
    (LatentDirichlet(topic_word_prior=-1.0), X, "topic_word_prior must be a positive number, got -1.0"),
    (LatentDirichlet(doc_topic_prior=[0.1, 0.2]), X, r"doc_topic_prior must be a positive number, got \[0.1, 0.2\]"),
    (LatentDirichlet(learning_decay=0.5), X, r"learning_decay must be in \(0.5, 1\] for convergence, got 0.5"),
    (LatentDirichlet(learning_offset=-1), X, "learning_offset must be a non-negative number, got -1"),
    (LatentDirichlet(batch_size=0), X, "batch_size must be a positive integer, got 0"),
    (LatentDirichlet(total_samples=0), X, "total_samples must be a positive number or None, got 0"),
    (LatentDirichlet(max_doc_update_iter=0), X, "max_doc_update_iter must be a positive integer, got 0"),
    (LatentDirichlet(mean_change_tol=-1), X, "mean_change_tol must be a non-negative number, got -1"),
    (LatentDirichlet(mean_change_tol="no"), X, "mean_change_tol must be a non-negative number, got 'no'"),
    (LatentDirichlet(max_iter=0), X, "max_iter must be a positive integer, got 0"),
]


@pytest.mark.parametrize(("model", "rows", "message"), REFUSED, ids=[row[2][:40] for row in REFUSED])
def test_refusals(model: LatentDirichlet, rows: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        model.fit(rows)
    assert str(refused.value).count("\n") == 0
    assert not hasattr(model, "components_")


def test_refusals_of_fitted_models() -> None:
    with pytest.raises(NotFittedError):
        LatentDirichlet().transform(X)
    model = LatentDirichlet(2, max_iter=1, tol=0).fit(X)
    with pytest.raises(ValueError, match="X has 7 features, but LatentDirichlet is expecting 8"):
        model.transform(X[:, :7])
    with pytest.raises(ValueError, match=r"topics must be \(K, 8\), with the columns of X, got shape \(2, 7\)"):
        model.bound(X, np.ones((2, 7)))
    shares = np.full((2, 8), 1 / 8)
    with pytest.raises(
        ValueError, match=r"topics must be concentrations .* got rows that sum to 1, .* components_ as "
    ):
        LatentDirichlet().bound(X, shares)
    with pytest.raises(ValueError, match=r"components must be concentrations .* got rows that sum to 1"):
        LatentDirichlet.from_parameters(shares)
    with pytest.raises(ValueError, match="topics must be positive concentrations, got 0"):
        model.bound(X, np.zeros((2, 8)))
    with pytest.raises(ValueError, match="vocabulary must have one word per column of X, 8, got 3"):
        model.top_words("abc", 2)
    with pytest.raises(ValueError, match="n must be between 1 and 8, got 9"):
        model.top_words(n=9)
    with pytest.raises(ValueError, match="length must be a positive integer, got 0"):
        model.sample(1, 0)


def test_models_of_known_topics() -> None:
    """They infer documents as the fitted model does."""
    counts = np.random.default_rng(0).poisson(1.0, size=(30, 8))
    fitted = LatentDirichlet(3, random_state=0, max_iter=5, tol=0).fit(counts)
    known = LatentDirichlet.from_parameters(fitted.components_, random_state=0)
    np.testing.assert_array_equal(known.components_, fitted.components_)
    np.testing.assert_array_equal(known.transform(counts), fitted.transform(counts))
    assert known.perplexity(counts) == fitted.perplexity(counts)
    assert known.sample(2, random_state=1)[0].shape == (2, 8)
    known.partial_fit(counts)
    with pytest.raises(ValueError, match="components must be positive numbers"):
        LatentDirichlet.from_parameters(-fitted.components_)
