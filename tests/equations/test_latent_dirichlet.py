"""Topics of documents: against a transcription, explicit nodes, exact limits and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from scipy.special import gammaln, psi
from sklearn.datasets import load_digits
from sklearn.decomposition import LatentDirichletAllocation
from torch import Tensor
from torch.testing import assert_close

from bayesgrad.families import Categorical, Dirichlet
from bayesgrad.inference import Expected, Node, Prior, elbo, message, step
from bayesgrad.models import LatentDirichlet, documents
from bayesgrad.models.documents import Counts, DocumentsFactor

ALPHA, ETA = 0.3, 0.2


def corpus(size: int = 12, words: int = 15, length: int = 12, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    own = random.dirichlet(np.full(words, 0.2), 3)
    lengths = random.integers(1, 2 * length, size)
    return np.stack([random.multinomial(n, p) for n, p in zip(lengths, random.dirichlet(np.ones(3), size) @ own)])


def kept(X: np.ndarray) -> Counts:
    return Counts.read(X)


def node(topics: np.ndarray) -> Node:
    return Node(Dirichlet(), Dirichlet().of(torch.as_tensor(topics)))


def transcribed(X: np.ndarray, topics: np.ndarray, start: np.ndarray, max_iter: int, alpha: float = ALPHA):
    """Blei et al.'s Eqs. 6, 7 and 15, document by document and word by word, with φ written out."""
    logs = psi(topics) - psi(topics.sum(1, keepdims=True))
    K = len(topics)
    sums, bounds, shares = np.zeros_like(topics), [], []
    for counts, gamma in zip(X, start):
        words = np.flatnonzero(counts)

        def phis(gamma: np.ndarray, words: np.ndarray = words) -> np.ndarray:
            score = (psi(gamma) - psi(gamma.sum()))[:, None] + logs[:, words]
            weights = np.exp(score - score.max(0))
            return weights / weights.sum(0)

        for _ in range(max_iter):
            gamma = alpha + phis(gamma) @ counts[words]
        phi = phis(gamma)
        mean = psi(gamma) - psi(gamma.sum())
        likelihood = (counts[words] * phi * (mean[:, None] + logs[:, words] - np.log(phi))).sum()
        prior = gammaln(K * alpha) - K * gammaln(alpha) + (alpha - 1) * mean.sum()
        entropy = gammaln(gamma).sum() - gammaln(gamma.sum()) - ((gamma - 1) * mean).sum()
        bounds.append(likelihood + prior + entropy)
        sums[:, words] += counts[words] * phi
        shares.append(gamma)
    return np.array(bounds), sums, np.array(shares)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("chunk", [1, 100, 1 << 19])
def test_the_factor_is_its_transcription(dense: bool, chunk: int, monkeypatch) -> None:
    """As one matrix and as padded chunks, of one document or of all of them."""
    monkeypatch.setattr(documents, "DENSE", 0.0 if dense else 2.0)
    monkeypatch.setattr(documents, "CHUNK", chunk)
    random = np.random.default_rng(1)
    X, topics, start = corpus(), random.gamma(1.0, 1.0, (3, 15)), random.gamma(5.0, 0.2, (12, 3))
    X[:, 4] = 0  # a word that nobody uses
    bounds, sums, shares = transcribed(X, topics, start, 7)
    own = node(topics)
    factor = DocumentsFactor(own, kept(X), ALPHA, torch.as_tensor(start), max_iter=7, tolerance=0)
    value, messages = factor.evaluate()
    assert_close(factor.bounds, torch.as_tensor(bounds), rtol=1e-12, atol=1e-12)
    assert_close(value, torch.as_tensor(bounds.sum()), rtol=1e-12, atol=0)
    assert_close(messages[own][0], torch.as_tensor(sums), rtol=1e-11, atol=1e-11)
    assert_close(factor.shares, torch.as_tensor(shares), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dense", [True, False])
def test_documents_that_settle_early_leave_their_chunk(dense: bool, monkeypatch) -> None:
    """Independently of the other documents in a chunk and of how often chunks are rebuilt."""
    monkeypatch.setattr(documents, "DENSE", 0.0 if dense else 2.0)
    monkeypatch.setattr(documents, "ROUNDS", (6, 9, 15, 30))
    random = np.random.default_rng(2)
    X, topics, start = corpus(40), random.gamma(1.0, 1.0, (3, 15)), np.ones((40, 3))
    own = node(topics)
    factor = DocumentsFactor(own, kept(X), ALPHA, torch.as_tensor(start), max_iter=1000, tolerance=1e-4)
    value, messages = factor.evaluate()
    alone = []
    for row in range(len(X)):
        single = DocumentsFactor(
            own, kept(X[row : row + 1]), ALPHA, torch.as_tensor(start[:1]), max_iter=1000, tolerance=1e-4
        )
        single.evaluate()
        alone.append(single.shares[0])
    assert_close(factor.shares, torch.stack(alone), rtol=1e-10, atol=1e-10)
    bounds, sums, _ = transcribed(X, topics, factor.shares.numpy(), 0)
    assert_close(value, torch.as_tensor(bounds.sum()), rtol=1e-12, atol=0)
    assert_close(messages[own][0], torch.as_tensor(sums), rtol=1e-10, atol=1e-10)


def test_jumps_end_where_turns_do() -> None:
    random = np.random.default_rng(3)
    X, topics, start = corpus(30), random.gamma(1.0, 1.0, (3, 15)), np.ones((30, 3))
    found, plain = (
        DocumentsFactor(node(topics), kept(X), ALPHA, torch.as_tensor(start), max_iter=max_iter, tolerance=tolerance)
        for max_iter, tolerance in ((2000, 1e-13), (3000, 0))
    )
    found.evaluate()
    plain.evaluate()
    assert_close(found.shares, plain.shares, rtol=1e-8, atol=1e-8)


def test_explicit_nodes_give_the_same_numbers() -> None:
    """Shares and topics of words as nodes of the engine that take whole steps; a word's node counts as often as the
    word, in its factors and in its entropy."""
    X = corpus(4, 6, 5, seed=4)
    random = np.random.default_rng(5)
    topics = node(random.gamma(2.0, 0.5, (2, 6)))
    rows, words = np.nonzero(X)
    counts = torch.as_tensor(X[rows, words]).double()
    shares = Node(Dirichlet(), (torch.zeros(4, 2).double(),))
    labels = Node(Categorical(), (torch.zeros(len(rows), 2).double(),), scale=counts)

    def joint(own: tuple[Tensor], theta: tuple[Tensor], beta: tuple[Tensor]) -> Tensor:
        return (counts[:, None] * own[0] * (theta[0][rows] + beta[0][:, words].mT)).sum()

    factors = [
        Prior(topics, Dirichlet().of(torch.full((1, 6), ETA, dtype=torch.float64))),
        Prior(shares, Dirichlet().of(torch.full((1, 2), ALPHA, dtype=torch.float64))),
        Expected(joint, labels, shares, topics),
    ]
    for _ in range(20):
        step([labels, shares], factors)
    step(labels, factors)
    collapsed = DocumentsFactor(topics, kept(X), ALPHA, torch.ones(4, 2).double(), max_iter=20, tolerance=0)
    pair = [factors[0], collapsed]
    assert_close(elbo([topics], pair), elbo([topics, shares, labels], factors), rtol=1e-12, atol=0)
    assert_close(message(topics, pair)[0], message(topics, factors)[0], rtol=1e-12, atol=1e-12)


def test_one_topic_has_an_exact_evidence() -> None:
    """Without a choice of topics nothing is hidden: the bound is Polya's distribution."""
    X = corpus()
    model = LatentDirichlet(1, method="batch", topic_word_prior=ETA, max_iter=2, tol=0).fit(X)
    counts, V = X.sum(0), X.shape[1]
    exact = gammaln(V * ETA) - V * gammaln(ETA) + gammaln(ETA + counts).sum() - gammaln(V * ETA + counts.sum())
    assert model.elbo_ == pytest.approx(exact, rel=1e-13)
    assert np.allclose(model.components_, ETA + counts, rtol=1e-13)


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_never_falls(seed: int) -> None:
    """Also with one iteration per document, after which a new start may be lower than the last result."""
    random = np.random.default_rng(seed)
    X = corpus(20, 12, int(random.integers(2, 40)), seed)
    model = LatentDirichlet(
        int(random.integers(2, 6)),
        method="batch",
        doc_topic_prior=random.uniform(0.01, 2),
        topic_word_prior=random.uniform(0.01, 2),
        max_doc_update_iter=[1, 2, 5, 100][seed % 4],
        mean_change_tol=[0.0, 1e-3, 0.5][seed % 3],
        max_iter=30,
        tol=0,
        random_state=seed,
    ).fit(X)
    gains = np.diff(model.elbos_)
    assert gains[0] > 0
    assert (gains > -1e-10 * abs(model.elbo_)).all()


def rough_psi(x: Tensor) -> Tensor:
    """ψ as scikit-learn's LDA computes it (Bernardo's AS 103, three terms after x >= 6): right to 3e-9."""
    steps = torch.arange(6.0, dtype=x.dtype)
    first = x[..., None] + steps  # x, x + 1, ..
    low = torch.where(first < 6, 1 / first, 0.0).sum(-1)
    y = x + (first < 6).sum(-1)
    square = y**-2
    series = square * (1 / 12 - square * (1 / 120 - square / 252))
    return y.log() - 0.5 / y - series - low


@pytest.mark.parametrize(("exact", "first", "fifth"), [(True, 3e-8, 1.25e-7), (False, 3e-13, 3e-10)])
def test_oracle_of_streams(exact: bool, first: float, fifth: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """scikit-learn's online LDA on digits, with one stream of random numbers. Its ψ is what lies between: with that one
    in ours, almost all digits agree."""
    if not exact:
        monkeypatch.setattr(torch, "digamma", rough_psi)
    X = load_digits().data
    settings = dict(doc_topic_prior=0.1, topic_word_prior=0.01, learning_offset=10.0, learning_decay=0.7)
    settings |= dict(mean_change_tol=0, max_doc_update_iter=100, total_samples=len(X), random_state=0)
    model, peer = (
        LatentDirichlet(10, method="svi", **settings),
        LatentDirichletAllocation(10, learning_method="online", **settings),
    )
    apart = []
    for batch in np.split(X[: 5 * 128], 5):
        peer.partial_fit(batch)
        model.partial_fit(batch)
        apart.append(abs(model.components_ / peer.components_ - 1).max())
    assert apart[0] < first
    assert apart[4] < fifth


def test_bounds_are_scikit_learns_where_both_are_exact() -> None:
    """Its score adds what topics cost, which `elbo_` does and `score` does not."""
    X, settings = corpus(40), dict(doc_topic_prior=ALPHA, topic_word_prior=ETA, mean_change_tol=0)
    peer = LatentDirichletAllocation(3, max_iter=3, random_state=0, **settings).fit(X)
    topics = torch.as_tensor(peer.components_)
    own = node(peer.components_)
    prior = Prior(own, Dirichlet().of(torch.full((1, 15), ETA, dtype=torch.float64)))
    bounds = LatentDirichlet(3, **settings).bound(X, peer.components_)
    assert bounds.shape == (40,)
    assert bounds.sum() + float(elbo([own], [prior])) == pytest.approx(peer.score(X), rel=1e-9)
    model = LatentDirichlet(3, **settings).fit(X)
    model.components_ = topics.numpy()
    assert np.allclose(model.transform(X), peer.transform(X), rtol=0, atol=1e-7)
    assert model.score(X) == pytest.approx(bounds.mean(), rel=1e-12)
    assert model.perplexity(X) == pytest.approx(np.exp(-bounds.sum() / X.sum()), rel=1e-12)


def test_a_whole_step_of_a_stream_is_a_sweep() -> None:
    """From random initial values of the documents, and with their number as the total."""
    X, settings = corpus(), dict(random_state=0, doc_topic_prior=ALPHA, topic_word_prior=ETA, total_samples=None)
    model = LatentDirichlet(3, learning_offset=0.0, learning_decay=1.0, mean_change_tol=0, **settings).partial_fit(X)
    random = np.random.RandomState(0)
    topics, start = random.gamma(100.0, 0.01, (3, X.shape[1])), random.gamma(100.0, 0.01, (len(X), 3))
    assert_close(model.components_, ETA + transcribed(X, topics, start, 100)[1], rtol=1e-12, atol=0)


def test_a_pass_is_steps_towards_unbiased_messages() -> None:
    """λ moves by (t + offset)^-decay towards η + N/B of what a batch shows; over the batches of a pass these parts are
    those of all documents together."""
    X = csr_matrix(corpus(90, 30, 30))
    settings = dict(doc_topic_prior=ALPHA, topic_word_prior=ETA, mean_change_tol=0, random_state=0)
    model = LatentDirichlet(
        3, method="svi", batch_size=30, max_iter=1, tol=0, learning_offset=3.0, learning_decay=0.8, **settings
    )
    model.fit(X)
    random = np.random.RandomState(0)
    topics = begin = random.gamma(100.0, 0.01, (3, 30))
    random.gamma(100.0, 0.01, (90, 3))  # the factor of all documents is made first
    order, parts = random.permutation(90), 0
    whole = transcribed(X.toarray(), topics, np.ones((90, 3)), 100, ALPHA)[1]
    for count, rows in enumerate(np.split(order, 3), 1):
        parts = parts + transcribed(X[rows].toarray(), begin, np.ones((30, 3)), 100, ALPHA)[1]
        sums = transcribed(X[rows].toarray(), topics, random.gamma(100.0, 0.01, (30, 3)), 100, ALPHA)[1]
        topics = topics + (count + 3.0) ** -0.8 * (ETA + 3 * sums - topics)
    assert np.allclose(parts, whole, rtol=1e-12)
    assert np.allclose(model.components_, topics, rtol=1e-9)


@pytest.mark.parametrize("prior", [1e-4, 1e3])
def test_extreme_priors(prior: float) -> None:
    X = corpus(20, length=200)
    model = LatentDirichlet(4, method="batch", doc_topic_prior=prior, topic_word_prior=prior, max_iter=20, tol=0)
    model.set_params(random_state=0).fit(X)
    assert np.isfinite(model.elbos_).all()
    assert (np.diff(model.elbos_) > -1e-9 * abs(model.elbo_)).all()
    assert np.isclose(model.components_.sum() - prior * model.components_.size, X.sum(), rtol=1e-6)


def test_full_iterations_use_few_document_iterations_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation n uses 3n iterations (before the seventh nothing jumps ahead), unless the tolerance is 0; so do
    full iterations and streams, but not streams after them or of known topics, passes and predictions."""
    X, topics = corpus(), np.random.default_rng(1).gamma(2.0, 1.0, (3, 15))
    start = torch.ones(len(X), 3, dtype=torch.float64)
    early = DocumentsFactor(node(topics), kept(X), ALPHA, start, tolerance=1e-300, ramp_up=True)
    for max_iter in (3, 6):
        early.evaluate()
        early.known = False  # none keeps what it had
        assert_close(early.shares.numpy(), transcribed(X, topics, start.numpy(), max_iter)[2], rtol=1e-12, atol=0)
    patient = DocumentsFactor(node(topics), kept(X), ALPHA, start, max_iter=20, tolerance=0, ramp_up=True)
    patient.evaluate()
    assert_close(patient.shares.numpy(), transcribed(X, topics, start.numpy(), 20)[2], rtol=1e-12, atol=0)

    seen, read = [], LatentDirichlet._documents
    monkeypatch.setattr(LatentDirichlet, "_documents", lambda *given: seen.append(read(*given)) or seen[-1])
    model = LatentDirichlet(2, method="batch", max_iter=5, tol=0, random_state=0).fit(X)
    model.partial_fit(X)
    model.transform(X)
    assert [factor.ramp_up for factor in seen] == [True, False, False]
    assert seen[0].evaluations == 6

    seen.clear()
    LatentDirichlet(2, method="svi", batch_size=len(X) // 2, max_iter=1, tol=0, random_state=0).fit(X)
    stream = LatentDirichlet(2, random_state=0).partial_fit(X).partial_fit(X)
    assert [factor.ramp_up for factor in seen] == [False, False, False, True, True]
    assert [factor.evaluations for factor in seen[3:]] == [1, 2]
    seen.clear()
    LatentDirichlet.from_parameters(stream.components_).partial_fit(X)
    assert not seen[0].ramp_up
