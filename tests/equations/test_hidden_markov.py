"""Hidden Markov models against hmmlearn, transcriptions in NumPy, and the engine with an explicit node for paths."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import numpy as np
import pytest
import torch
from hmmlearn.hmm import CategoricalHMM, GaussianHMM
from hmmlearn.vhmm import VariationalCategoricalHMM
from scipy.special import digamma
from torch.testing import assert_close

from bayesgrad.families import Categorical, Dirichlet, NormalWishart, Point
from bayesgrad.inference import Expected, Node, Prior, elbo, step
from bayesgrad.models import HiddenMarkov
from bayesgrad.models.chained import MarkovChainFactor, Rows, Sequences, Symbols
from bayesgrad.models.covariances import Full
from bayesgrad.models.markov import Layout

logging.getLogger("hmmlearn").setLevel(logging.CRITICAL)
LENGTHS = [120, 1, 60, 200]


def chain(seed: int = 0, states: int = 3, columns: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Rows and symbols of a sticky chain."""
    rng, n = np.random.default_rng(seed), sum(LENGTHS)
    z = np.zeros(n, dtype=int)
    for t in range(1, n):
        z[t] = z[t - 1] if rng.random() < 0.85 else rng.integers(states)
    return rng.normal(size=(n, columns)) + 2 * z[:, None] * [1, -0.5], (rng.random(n) * 4 + z).astype(int)


def random_start(seed: int, kind: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    start = dict(startprob_init=rng.dirichlet(np.ones(3)), transmat_init=rng.dirichlet(np.full(3, 3.0), size=3))
    if kind == "categorical":
        return dict(start, emissionprob_init=rng.dirichlet(np.ones(6), size=3))
    full = np.array([1.0, 2.0, 3.0])[:, None, None] * np.eye(2)
    covars = {"full": full, "tied": full[1], "spherical": np.array([1.0, 2.0, 3.0])}.get(
        kind, rng.uniform(1, 2, (3, 2))
    )
    return dict(start, means_init=2 * rng.normal(size=(3, 2)), covars_init=covars)


def peer_of(kind: str, start: dict[str, np.ndarray], sweeps: int) -> Any:
    common: dict[str, Any] = dict(n_iter=sweeps, tol=-np.inf, init_params="")
    if kind == "categorical":
        peer = CategoricalHMM(3, n_features=6, **common)
    else:
        peer = GaussianHMM(3, kind, covars_prior=0, min_covar=0, **common)
    for name, value in start.items():
        setattr(peer, name.removesuffix("init"), value)
    return peer


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical", "categorical"])
def test_iterates_are_hmmlearns(kind: str) -> None:
    """Bounds before each sweep and parameters after twelve; then scores, smoothed states and paths."""
    rows, symbols = chain()
    start = random_start(0, kind)
    model = HiddenMarkov(3, tol=0, max_iter=12, covars_prior=0.0, n_symbols=6, **start)
    model.set_params(**(dict(emissions=kind) if kind == "categorical" else dict(covariance_type=kind)))
    X = symbols[:, None] if kind == "categorical" else rows
    peer = peer_of(kind, start, 12).fit(X, LENGTHS)
    model.fit(X, lengths=LENGTHS)
    assert_close(np.array(model.elbos_[:12]), np.array(peer.monitor_.history)[-12:], rtol=1e-8, atol=0)
    names = ["startprob_", "transmat_", *(["emissionprob_"] if kind == "categorical" else ["means_"])]
    for name in names:
        assert_close(getattr(model, name), getattr(peer, name), rtol=0, atol=1e-8)
    if kind != "categorical":
        covars = peer._covars_.mean(1) if kind == "spherical" else peer._covars_
        assert_close(model.covars_, covars, rtol=0, atol=1e-8)
    assert_close(model.log_likelihood(X, LENGTHS).sum(), np.float64(peer.score(X, LENGTHS)), rtol=1e-10, atol=0)
    assert_close(model.predict_proba(X, LENGTHS), peer.predict_proba(X, LENGTHS), rtol=0, atol=1e-8)
    height, states = model.decode(X, LENGTHS)
    want, path = peer.decode(X, LENGTHS)
    assert_close(height, want, rtol=1e-10, atol=0)
    assert (states == path).all()


def test_variational_symbols_are_hmmlearns() -> None:
    """Concentrations after ten sweeps from the same ones."""
    _, symbols = chain(1)
    start = random_start(1, "categorical")
    model = HiddenMarkov(
        3, emissions="categorical", method="vb", n_symbols=6, tol=0, max_iter=10, startprob_prior=0.5,
        transmat_prior=0.7, emissionprob_prior=0.4, **start,
    )  # fmt: skip
    model.fit(symbols, lengths=LENGTHS)
    peer = VariationalCategoricalHMM(
        3, n_features=6, startprob_prior=0.5, transmat_prior=0.7, emissionprob_prior=0.4, n_iter=10, tol=-np.inf,
        init_params="",
    )  # fmt: skip
    n = len(symbols) / 3
    peer.startprob_prior_, peer.transmat_prior_ = np.full(3, 0.5), np.full((3, 3), 0.7)
    peer.emissionprob_prior_ = np.full((3, 6), 0.4)
    peer.startprob_posterior_ = 0.5 + 4 * start["startprob_init"]
    peer.transmat_posterior_ = 0.7 + n * start["transmat_init"]
    peer.emissionprob_posterior_ = 0.4 + n * start["emissionprob_init"]
    peer.fit(symbols[:, None], LENGTHS)
    for name in ("startprob_posterior_", "transmat_posterior_", "emissionprob_posterior_"):
        assert_close(getattr(model, name), getattr(peer, name), rtol=1e-8, atol=1e-8)
    shares = model.transmat_posterior_ / model.transmat_posterior_.sum(1, keepdims=True)
    assert_close(model.transmat_, shares)


# --- the bound, and an explicit node for paths ---


def small(kind: str, method: str) -> tuple[list[Node], Sequences]:
    """Two states, four steps; nodes away from where they will end."""
    rng = np.random.default_rng(5)
    layout = Layout([4])
    wrap = Point if method == "em" else lambda family: family
    counts = [torch.as_tensor(rng.uniform(1, 3, size=shape)) for shape in ((2,), (2, 2), (2, 3))]
    nodes = [Node(wrap(Dirichlet()), (part,)) for part in counts[:2]]
    if kind == "categorical":
        nodes.append(Node(wrap(Dirichlet()), (counts[2],)))
        return nodes, Sequences(layout, Symbols(torch.tensor([0, 2, 1, 0])[layout.rows], 3))
    rows = torch.as_tensor(rng.normal(size=(4, 2)))
    location = torch.as_tensor(rng.normal(size=(2, 2)))
    confidence, degrees = torch.tensor([2.0, 3.0]).double(), torch.tensor([5.0, 6.0]).double()
    natural = NormalWishart().of(location, confidence, degrees, torch.eye(2).double().expand(2, 2, 2) / 5)
    nodes.append(Node(wrap(NormalWishart()), natural))
    return nodes, Sequences(layout, Rows(rows[layout.rows], Full()))


def explicit(nodes: list[Node], data: Sequences) -> tuple[Node, Expected]:
    """A node over all 16 paths, and E[log p(x, z | θ)] as a function of its probabilities and the others' means."""
    paths = torch.tensor(list(itertools.product(range(2), repeat=4)))
    node = Node(Categorical(), (torch.linspace(0, 1, 16).double(),), name="paths")
    values = data.emissions.rows if isinstance(data.emissions, Rows) else data.emissions.symbols
    order = torch.argsort(data.layout.rows)
    values = values[order]

    def joint(q: Any, initial: Any, moves: Any, shown: Any) -> torch.Tensor:
        logs = initial[0][paths[:, 0]] + sum(moves[0][paths[:, t], paths[:, t + 1]] for t in range(3))
        for t in range(4):
            k = paths[:, t]
            if isinstance(data.emissions, Symbols):
                logs = logs + shown[0][k, values[t]]
            else:
                x, (push, square, precision, volume) = values[t], shown
                inner = push[k] @ x - square[k] / 2 - ((precision[k] @ x) * x).sum(-1) / 2 + volume[k] / 2
                logs = logs + inner - np.log(2 * np.pi)
        return (q[0] * logs).sum()

    return node, Expected(joint, node, *nodes)


@pytest.mark.parametrize("method", ["em", "vb"])
@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_an_explicit_node_for_paths_gives_the_same(kind: str, method: str) -> None:
    """Bound and all messages, through three sweeps: local node with rho = 1, then the others in parallel."""
    nodes, data = small(kind, method)
    twins, _ = small(kind, method)
    paths, joint = explicit(nodes, data)
    folded = MarkovChainFactor(*twins, data)
    priors = [] if method == "em" else [[Prior(node, node.natural) for node in group] for group in (nodes, twins)]
    own, other = priors or ([], [])
    for _ in range(3):
        step(paths, [joint])
        assert_close(elbo([paths, *nodes], [joint, *own]), elbo(twins, [folded, *other]), rtol=1e-11, atol=1e-11)
        for node, twin in zip(nodes, twins):
            for a, b in zip(joint.message(node), folded.message(twin)):
                assert_close(a, b, rtol=0, atol=1e-11)
        step(nodes, [joint, *own], 0.5, schedule="parallel")
        step(twins, [folded, *other], 0.5, schedule="parallel")


def test_the_bound_is_complete() -> None:
    """Of symbols, where the evidence is a sum over paths of Dirichlet-multinomials: below it, and close."""
    from scipy.special import gammaln

    def evidence(counts: np.ndarray, alpha: float) -> float:
        total = gammaln(alpha * counts.shape[-1]) - gammaln(alpha * counts.shape[-1] + counts.sum(-1))
        return float((total + (gammaln(alpha + counts) - gammaln(alpha)).sum(-1)).sum())

    symbols, logs = np.array([0, 0, 1, 1, 0, 0, 1]), []
    for z in itertools.product(range(2), repeat=7):
        moves, shown, first = np.zeros((2, 2)), np.zeros((2, 2)), np.eye(2)[z[0]]
        for a, b in itertools.pairwise(z):
            moves[a, b] += 1
        for k, x in zip(z, symbols):
            shown[k, x] += 1
        logs.append(evidence(first, 2.0) + evidence(moves, 2.0) + evidence(shown, 2.0))
    exact = np.logaddexp.reduce(logs)
    model = HiddenMarkov(
        2, emissions="categorical", method="vb", startprob_prior=2.0, transmat_prior=2.0, emissionprob_prior=2.0,
        tol=1e-12, max_iter=5000, random_state=0, n_init=3,
    )  # fmt: skip
    model.fit(symbols)
    assert exact - 2 < model.elbo_ < exact
    single = HiddenMarkov(
        1, emissions="categorical", method="vb", startprob_prior=2.0, transmat_prior=2.0, emissionprob_prior=2.0
    ).fit(symbols)
    assert_close(single.elbo_, evidence(np.array([4.0, 3.0]), 2.0), rtol=1e-12, atol=0)


def test_one_sweep_of_variational_rows_in_numpy() -> None:
    """Forward and backward with exp(E[log A]) and expected log densities, then the conjugate updates, in words of the
    books: Bishop, Eqs. 10.60 to 10.65."""
    rows, _ = chain(2)
    rows, K, D = rows[:40], 3, 2
    model = HiddenMarkov(3, method="vb", tol=0, max_iter=1, **random_start(2, "full")).fit(rows)
    centre, n = rows.mean(0), 40 / 3
    start = random_start(2, "full")
    prior_scale = np.cov(rows.T, bias=True) + np.diag(1e-6 * rows.var(0))
    m, kappa, nu = start["means_init"] * n + centre, 1 + n, D + n
    m = m / kappa
    W = [
        np.linalg.inv(
            prior_scale + n * start["covars_init"][k]
            + n / (1 + n) * np.outer(start["means_init"][k] - centre, start["means_init"][k] - centre)
        )
        for k in range(K)
    ]  # fmt: skip
    alpha, concentration = 1 / 3 + start["startprob_init"], 1 / 3 + n * start["transmat_init"]
    pi = np.exp(digamma(alpha) - digamma(alpha.sum()))
    A = np.exp(digamma(concentration) - digamma(concentration.sum(1, keepdims=True)))
    b = np.zeros((40, K))
    for k in range(K):
        volume = digamma((nu - np.arange(D)) / 2).sum() + D * np.log(2) + np.linalg.slogdet(W[k])[1]
        error = rows - m[k]
        b[:, k] = (volume - D * np.log(2 * np.pi) - D / kappa - nu * (error @ W[k] * error).sum(1)) / 2
    b = np.exp(b)
    forward, backward = np.zeros((40, K)), np.ones((40, K))
    forward[0] = pi * b[0]
    for t in range(1, 40):
        forward[t] = forward[t - 1] @ A * b[t]
    for t in range(38, -1, -1):
        backward[t] = A @ (b[t + 1] * backward[t + 1])
    shares = forward * backward
    shares /= shares.sum(1, keepdims=True)
    pairs = np.einsum("ti,ij,tj->ij", forward[:-1], A, b[1:] * backward[1:]) / forward[-1].sum()
    counts = shares.sum(0)
    means = shares.T @ rows / counts[:, None]
    assert_close(model.startprob_posterior_, 1 / 3 + shares[0], rtol=1e-10, atol=0)
    assert_close(model.transmat_posterior_, 1 / 3 + pairs, rtol=1e-10, atol=0)
    assert_close(model.means_weight_, 1 + counts, rtol=1e-10, atol=0)
    assert_close(model.dof_, D + counts, rtol=1e-10, atol=0)
    assert_close(model.means_, (centre + counts[:, None] * means) / (1 + counts)[:, None], rtol=1e-9, atol=1e-10)
    for k in range(K):
        error, gap = rows - means[k], means[k] - centre
        spread = prior_scale + (shares[:, k, None] * error).T @ error + counts[k] / (1 + counts[k]) * np.outer(gap, gap)
        assert_close(model.covars_[k], spread / (D + counts[k]), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical"])
def test_the_default_prior_is_hmmlearns_in_units_of_the_columns(kind: str) -> None:
    """0.01 times the variances, added to sums of squares. The score is the likelihood; the bound has the prior too."""
    X, start, units = chain()[0], random_start(1, kind), np.array([1.0, 30.0])
    one, other = (HiddenMarkov(3, covariance_type=kind, tol=0, max_iter=12, **start) for _ in range(2))
    one.fit(X, lengths=LENGTHS)
    spread = 0.01 * X.var(0)
    given = {"diag": spread, "spherical": spread.mean() / 2}  # once for the squares of both columns
    peer = peer_of(kind, start, 12)
    peer.set_params(covars_prior=given.get(kind, np.diag(spread)))
    peer.fit(X, LENGTHS)
    assert_close(one.means_, peer.means_, rtol=1e-9, atol=1e-10)
    covars = peer._covars_[:, 0] if kind == "spherical" else peer._covars_
    assert_close(one.covars_, covars, rtol=1e-8, atol=1e-10)
    likelihood = peer.score(X, LENGTHS)
    assert one.score(X, lengths=LENGTHS) * len(X) == pytest.approx(likelihood, rel=1e-10)
    if kind == "full":
        prior = -np.trace(spread[:, None] * np.linalg.inv(covars).sum(0)) / 2
        assert one.elbo_ == pytest.approx(likelihood + prior, rel=1e-10)
    if kind != "spherical":
        scale = {"full": np.outer(units, units), "tied": np.outer(units, units), "diag": units**2}[kind]
        other.set_params(means_init=start["means_init"] * units, covars_init=start["covars_init"] * scale)
        assert_close(other.fit(X * units, lengths=LENGTHS).covars_, one.covars_ * scale, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", ["full", "diag"])
def test_em_raises_the_likelihood_with_its_prior(kind: str) -> None:
    """From the maximum of the likelihood, which falls while the bound rises."""
    rng = np.random.default_rng(0)
    X = np.concatenate([rng.normal(size=(30, 3)), 4 + rng.normal(size=(5, 3)) * [1, 0.1, 0.01]])
    most = HiddenMarkov(2, covariance_type=kind, covars_prior=0.0, random_state=0, tol=1e-10).fit(X)
    start: dict[str, Any] = dict(startprob_init=most.startprob_, transmat_init=most.transmat_)
    start |= dict(means_init=most.means_, covars_init=most.covars_)
    fits = [HiddenMarkov(2, covariance_type=kind, tol=0, max_iter=n, **start).fit(X) for n in (1, 2, 5, 20)]
    assert most.score(X) > max(model.score(X) for model in fits) + 0.01
    rises = np.diff(fits[-1].elbos_)
    assert rises.min() > -1e-9 * abs(fits[-1].elbo_)
    assert rises.max() > 0.1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", ["em", "vb"])
@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical", "categorical"])
def test_the_bound_never_falls(kind: str, method: str, seed: int) -> None:
    """Over random data, starts, priors and missing observations."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(60, 2)) * rng.uniform(0.1, 3) + rng.integers(3, size=60)[:, None] * 3
    if kind == "categorical":
        X = rng.integers(4, size=(60, 1)).astype(float)
    X[rng.random(60) < 0.1] = np.nan
    strength = rng.uniform(1, 2) if method == "em" else rng.uniform(0.05, 2)
    model = HiddenMarkov(
        int(rng.integers(1, 5)), method=method, init=["kmeans", "random"][seed % 2], tol=0, max_iter=25,
        transmat_prior=strength, startprob_prior=strength, emissionprob_prior=strength, random_state=seed,
    )  # fmt: skip
    model.set_params(**(dict(emissions=kind) if kind == "categorical" else dict(covariance_type=kind)))
    model.fit(X, lengths=[20, 1, 30, 9])
    rises = np.diff(model.elbos_)
    assert len(rises) == 25
    assert rises.min() > -1e-9 * abs(model.elbo_)
    assert rises.max() > 1e-6


def test_the_default_start_finds_states_that_differ_in_their_covariances() -> None:
    """Two long ellipses around the same mean: likelier than the truth. From the covariance within clusters, EM ended
    1.9 nats per row lower."""
    rng, states = np.random.default_rng(0), np.zeros(300, dtype=int)
    for t in range(1, 300):
        states[t] = states[t - 1] if rng.random() < 0.9 else 1 - states[t - 1]
    roots = [np.linalg.qr(rng.normal(size=(3, 3)))[0] * np.geomspace(0.1, 3, 3) for _ in range(2)]
    X = np.stack([roots[state] @ rng.normal(size=3) for state in states])
    truth = HiddenMarkov.from_parameters(
        [1.0, 0.0], [[0.9, 0.1], [0.1, 0.9]], means=np.zeros((2, 3)), covars=[root @ root.T for root in roots]
    )
    assert HiddenMarkov(2, random_state=0).fit(X).score(X) > truth.score(X)
