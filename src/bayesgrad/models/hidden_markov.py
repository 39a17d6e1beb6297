"""Hidden Markov models by EM, variational Bayes, and from streams."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.utils import Tags, check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from bayesgrad.families import Dirichlet, Family, Parameters, Point
from bayesgrad.inference import Factor, Linear, Node, Prior
from bayesgrad.models import chained, checks, markov
from bayesgrad.models.covariances import COVARIANCES, Covariance
from bayesgrad.models.kalman import Elements, scan
from bayesgrad.models.latent import Latent

EMISSIONS, METHODS, STARTS = ("gaussian", "categorical"), ("em", "vb"), ("kmeans", "random")
SUBSET = 20_000  # maximum number of rows for k-means
SQUARES = 0.01  # Ψ of EM in units of the columns' variances: hmmlearn's covars_prior


@dataclass(eq=False, repr=False)
class HiddenMarkov(Latent):
    r"""Hidden Markov models: observations x_t depend on latent states z_t, which form a Markov chain:

    .. math::
        z_1 \sim \pi, \quad z_t \mid z_{t-1} = i \sim A_i, \quad x_t \mid z_t = k \sim N(m_k, \Lambda_k^{-1})
        \text{ or } \mathrm{Cat}(b_k)

    π, A_i and b_k have Dirichlet posteriors, m_k and Λ_k Normal-Wishart ones. With `"vb"` an iteration sets all of them
    to their optimum given q(z), a chain. With `"em"` they are points, and an iteration is one of Baum and Welch. There
    is no loop over time: see `models.markov`.

    Args:
        n_states: K.
        emissions: `"gaussian"`, or `"categorical"` for symbols 0, 1, 2, ...
        method: `"em"` (maximum likelihood, or maximum posterior density with priors), `"vb"`.
        covariance_type: `"full"`, `"tied"`, `"diag"` or `"spherical"`.
        n_symbols: number of symbols; None for the number in the first data.
        startprob_prior, transmat_prior, emissionprob_prior: concentrations of the Dirichlet priors; None for 1 with
            `"em"`, which is flat, and for 1/K (of symbols 1/V) with `"vb"`.
        means_prior, means_weight: the prior N(m | m_0, (κ_0 Λ)^-1) of means; None for the mean of X, and for 0 with
            `"em"`, 1 with `"vb"`.
        covars_prior, dof_prior: Ψ and nu of the prior W(Λ | nu, Ψ^-1): Ψ is a number, (D,) or (D, D). None for the
            covariance of X with `"vb"`, and with `"em"` for 0.01 times the variances of X, hmmlearn's number in their
            units: it is added to the sums of squares of each state. 0 is maximum likelihood. nu = D, or flat with
            `"em"`.
        init: `"kmeans"` or `"random"`: centres of K clusters, or K rows of X. Symbols start at random.
        startprob_init, transmat_init, means_init, covars_init, emissionprob_init: initial values, any or all of them.
            With `"em"` probabilities that start at zero stay zero: use this for a left-to-right chain.
        n_init, max_iter, tol, random_state, progress, total_samples, offset, decay: see `Latent`; `partial_fit` counts
            sequences, tol is for each observation.

    Attributes:
        startprob_, transmat_, emissionprob_: π, A and b; with `"vb"` their expectations.
        means_, covars_: m_k (K, D) and Λ_k^-1, in the shape of scikit-learn's covariances_; `"vb"`: E[m_k], E[Λ_k]^-1.
        startprob_posterior_, transmat_posterior_, emissionprob_posterior_: concentrations, with `"vb"`.
        means_weight_, dof_: κ_k and nu_k, with `"vb"`.
        elbo_, elbos_, n_iter_, converged_: see `Latent`. The bound of `"em"` has log priors too, as -tr(Ψ Σ_k Λ_k)/2.

    X is (n, D), for symbols (n, 1) or (n,), with the `lengths` of its sequences, one by default; or a list of arrays
    or tensors, one per sequence. Nested lists are the rows of one sequence. A row of NaN is a missing observation.
    Results are NumPy arrays, or tensors if X is a tensor.

    >>> X = np.array([[0.0], [0.2], [5.1], [4.9], [0.1], [5.0], [5.2], [0.0]])
    >>> model = HiddenMarkov(2, random_state=0, covars_prior=0.1).fit(X, lengths=[5, 3])
    >>> model.means_.round(2).ravel().tolist(), model.predict(X, lengths=[5, 3]).tolist()
    ([5.05, 0.08], [1, 1, 0, 0, 1, 0, 0, 1])

    Reference: Khan and Rue 2023, sections 5.2 and 5.3; Rabiner, 1989; Foti et al., 2014, for streams.
    Checked by: tests/equations/test_hidden_markov.py, tests/contract/test_hidden_markov.py.
    """

    startprob_: Any = field(init=False)
    transmat_: Any = field(init=False)
    emissionprob_: Any = field(init=False)
    means_: Any = field(init=False)
    covars_: Any = field(init=False)
    _fixed_settings = ("n_states", "emissions", "method", "covariance_type")
    n_states: int = 2
    _: KW_ONLY
    emissions: str = "gaussian"
    method: str = "em"
    covariance_type: str = "full"
    n_symbols: int | None = None
    startprob_prior: Any = None
    transmat_prior: Any = None
    emissionprob_prior: Any = None
    means_prior: Any = None
    means_weight: float | None = None
    covars_prior: Any = None
    dof_prior: float | None = None
    init: str = "kmeans"
    startprob_init: Any = None
    transmat_init: Any = None
    means_init: Any = None
    covars_init: Any = None
    emissionprob_init: Any = None
    random_state: Any = None
    offset: float = 1.0
    decay: float = 0.7

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.categorical = self.emissions == "categorical"
        return tags

    @classmethod
    def from_parameters(
        cls,
        startprob: Any,
        transmat: Any,
        *,
        means: Any = None,
        covars: Any = None,
        emissionprob: Any = None,
        **settings: Any,
    ) -> HiddenMarkov:
        """A model of known parameters, in the shapes of the attributes, ready to predict and to sample.

        Gaussian emissions have means and covars, symbols have emissionprob. Other settings are the estimator's.
        """
        symbols = emissionprob is not None
        if symbols == (means is not None) or (means is None) != (covars is None):
            raise ValueError("pass either emissionprob, or both means and covars.")
        given = checks.require_numbers("emissionprob" if symbols else "means", emissionprob if symbols else means)
        if given.dim() != 2:
            raise ValueError(f"emissionprob and means must have one row per state, got shape {tuple(given.shape)}.")
        known = dict(startprob_init=startprob, transmat_init=transmat)
        known |= dict(emissionprob_init=emissionprob) if symbols else dict(means_init=means, covars_init=covars)
        model = cls(len(given), emissions="categorical" if symbols else "gaussian", **known, **settings)
        if model.method != "em":
            raise ValueError(f"from_parameters needs method='em', got {model.method!r}.")
        model.set_params(n_symbols=given.shape[1] if symbols else None)
        # As many rows as validation needs; the parameters do not depend on them.
        rows = torch.cat([given, given[:1] + 1]).numpy() if not symbols else np.arange(len(given) + 1.0) % 1
        data = model._read(chained.SequenceInput(rows), reset=True)
        model._nodes = model._start(data, check_random_state(0))
        model._remember_settings()
        model._rows = model._batches = 0
        model._set_attributes(model._nodes)
        return model

    # --- learning ---

    def fit(self, X: Any, y: Any = None, lengths: Any = None) -> HiddenMarkov:
        """Fits X and discards previous fits. y is ignored."""
        chained.check_ignored_y(X, y, self._dims)
        super().fit(chained.SequenceInput(X, lengths))
        if self.method == "em" and self._dims > 1:
            chained.warn_if_degenerate(self._gaussians()[1])
        return self

    def partial_fit(self, X: Any, y: Any = None, lengths: Any = None) -> HiddenMarkov:
        """Updates the parameters with a batch of sequences, which is not stored: online EM, or SVI. y is ignored."""
        chained.check_ignored_y(X, y, self._dims)
        return super().partial_fit(chained.SequenceInput(X, lengths))

    def _read(self, X: Any, *, reset: bool) -> chained.Sequences:
        given: chained.SequenceInput = X
        checks.require_one_of(self, emissions=EMISSIONS, method=METHODS, covariance_type=COVARIANCES, init=STARTS)
        checks.require_positive_integer(n_states=self.n_states)
        rows, lengths = given.concatenated(self._dims)
        rows = self._validated(rows, reset=reset, ensure_all_finite="allow-nan")
        lengths = given.split(len(rows)) if lengths is None else lengths
        missing = np.isnan(rows)
        wrong = missing.any(1) & ~missing.all(1)
        if wrong.any():
            raise ValueError(
                f"row {wrong.argmax()} of X is partly NaN: missing observations must be whole rows; impute it first."
            )
        values = torch.as_tensor(np.require(rows, requirements="W"))
        if reset:
            self._prepare_first(values, lengths)
            self._remember_kind(given.first(self._dims))
        layout = markov.Layout(lengths)
        if self.emissions == "categorical":
            return chained.Sequences(layout, chained.Symbols(self._symbols(values[:, 0])[layout.rows], self._count))
        return chained.Sequences(layout, chained.Rows((values - self._centre)[layout.rows], self._covariance))

    @property
    def _covariance(self) -> Covariance:
        return COVARIANCES[self.covariance_type]

    @property
    def _dims(self) -> int:
        return 1 if self.emissions == "categorical" else 2

    def _symbols(self, values: Tensor) -> Tensor:
        known = values[~values.isnan()]
        if bool(((known < 0) | (known != known.floor())).any()):
            raise ValueError(f"X must contain symbols 0, 1, 2, ..., got {known[(known < 0) | (known % 1 != 0)][0]:g}.")
        most = int(known.max()) if len(known) else 0
        if most >= self._count:
            raise ValueError(
                f"X contains the symbol {most}, but the model has symbols 0 to {self._count - 1}: "
                f"fit it with n_symbols={most + 1} or more."
            )
        return torch.where(values.isnan(), self._count, values).long()

    def _prepare_first(self, values: Tensor, lengths: Sequence[int]) -> None:
        """Determines the number of symbols, the centre of rows and the priors from the first data."""
        known = values[~values[:, 0].isnan()]
        if not len(known):
            raise ValueError("X contains only NaN: there is nothing to learn from.")
        if len(known) < self.n_states:
            raise ValueError(
                f"n_states={self.n_states} needs at least as many observations, got n_samples={len(known)}: use fewer."
            )
        if max(lengths) == 1 and self.n_states > 1:
            raise ValueError("all sequences have length 1, so transitions cannot be learned: use a mixture.")
        K, vb = self.n_states, self.method == "vb"
        if self.emissions == "categorical":
            if values.shape[1] != 1:
                raise ValueError(f"symbols must be one column, got {values.shape[1]}.")
            wanted = self.n_symbols
            if wanted is not None:
                checks.require_positive_integer(n_symbols=wanted)
            self._count = int(known.max()) + 1 if wanted is None else int(wanted)
            emission = self._dirichlet_prior("emissionprob_prior", (K, self._count))
        else:
            self._centre = checks.near_mean(known)
            emission = self._rows_prior(known - self._centre)
        self._prior = [
            self._dirichlet_prior("startprob_prior", (K,)),
            self._dirichlet_prior("transmat_prior", (K, K)),
            emission,
        ]
        families: list[Family] = [Dirichlet(), Dirichlet(), Dirichlet() if self._dims == 1 else self._covariance.family]
        self._families = families if vb else [Point(family) for family in families]

    def _dirichlet_prior(self, name: str, shape: tuple[int, ...]) -> Parameters:
        value, least = getattr(self, name), 0 if self.method == "vb" else 1
        if value is None:
            value = 1 / shape[-1] if self.method == "vb" else 1.0
        alpha = checks.require_numbers(name, value)
        if alpha.dim() > len(shape) or any(a not in (1, b) for a, b in zip(alpha.shape[::-1], shape[::-1])):
            raise ValueError(f"{name} must be a number or of shape {shape}, got shape {tuple(alpha.shape)}.")
        if not (alpha.min() >= least and alpha.min() > 0 and torch.isfinite(alpha).all()):
            known = "positive numbers" if self.method == "vb" else "at least 1 where method='em'"
            raise ValueError(f"{name} must be {known}, got {alpha.min():g}.")
        return Dirichlet().of(alpha.expand(shape))

    def _rows_prior(self, known: Tensor) -> Parameters:
        """Natural parameters of the Normal-Wishart prior of each state, for centred rows."""
        D, vb, mean = known.shape[1], self.method == "vb", known.mean(0)
        known = known - mean
        variance = known.square().mean(0)
        floor = torch.diag((1e-6 if vb else SQUARES) * torch.where(variance > 0, variance, 1))
        weight = (1.0 if vb else 0.0) if self.means_weight is None else self.means_weight
        location = mean
        if self.means_prior is not None:
            given = checks.require_numbers("means_prior", self.means_prior)
            if given.shape != (D,) or not torch.isfinite(given).all():
                raise ValueError(f"means_prior must be {D} finite numbers, got shape {tuple(given.shape)}.")
            location = given - self._centre
        spread = floor + known.mT @ known / len(known) if vb else floor
        if self.covars_prior is not None:
            spread = checks.require_numbers("covars_prior", self.covars_prior)
            if spread.shape not in ((), (D,), (D, D)):
                raise ValueError(f"covars_prior must be a number, ({D},) or ({D}, {D}), got {tuple(spread.shape)}.")
            spread = spread if spread.dim() == 2 else torch.diag(spread.expand(D))
            spread = checks.require_covariance("covars_prior", spread, D, definite=vb)
        if not (checks.is_number(weight) and (weight > 0 or (weight == 0 and not vb))):
            sign = "positive" if vb else "non-negative"
            raise ValueError(f"means_weight must be a {sign} number, got {self.means_weight!r}.")
        degrees = D if self.dof_prior is None else self.dof_prior
        least = D - 1 if self.covariance_type in ("full", "tied") else 0
        if not (checks.is_number(degrees) and degrees > least):
            raise ValueError(f"dof_prior must be a number greater than {least}, got {self.dof_prior!r}.")
        spread = chained.to_covariance_type(self._covariance, spread)
        found = self._covariance.prior(location, weight, degrees, spread, self.n_states)
        return found if vb or self.dof_prior is not None else (*found[:3], torch.zeros_like(found[3]))

    # --- initial values ---

    def _start(self, data: chained.Sequences, random: np.random.RandomState) -> list[Node]:
        """As many pseudo-observations of the initial parameters as there are rows, plus the prior with `"vb"`."""
        K, weight = self.n_states, len(data.layout.rows) / self.n_states
        even, random_rows = np.full(K, 1 / K), self.init == "random" or self._dims == 1
        startprob = self._initial_probabilities("startprob_init", (K,), even)
        transitions = random.dirichlet(np.full(K, 2.0), size=K) if random_rows else (np.eye(K) + 1 / K) / 2
        transmat = self._initial_probabilities("transmat_init", (K, K), transitions)
        if isinstance(data.emissions, chained.Symbols):
            emission = random.dirichlet(np.full(self._count, 2.0), size=K)
            given = self._initial_probabilities("emissionprob_init", (K, self._count), emission)
            messages: Parameters = (weight * given,)
        else:
            messages = self._initial_rows(data.emissions, random, weight)
        added = (len(data) * startprob,), (weight * transmat,), messages
        if self.method == "vb":
            added = [tuple(a + b for a, b in zip(prior, own)) for prior, own in zip(self._prior, added)]
        names = "startprob", "transmat", "emissions"
        return [Node(family, own, name=name) for family, own, name in zip(self._families, added, names)]

    def _initial_probabilities(self, name: str, shape: tuple[int, ...], default: np.ndarray) -> Tensor:
        given = getattr(self, name)
        shares = checks.require_numbers(name, default if given is None else given)
        whole = torch.allclose(shares.sum(-1), torch.ones(()).double())
        if shares.shape != shape or not (shares >= 0).all() or not whole:
            found = f"shape {tuple(shares.shape)}, sums {shares.sum(-1).tolist()}"
            raise ValueError(f"{name} must have shape {shape} and non-negative rows that sum to 1, got {found}.")
        return shares

    def _initial_rows(self, seen: chained.Rows, random: np.random.RandomState, weight: float) -> Parameters:
        known = seen.rows[~seen.rows[:, 0].isnan()]
        K, D = self.n_states, known.shape[1]
        if len(known) > SUBSET:
            known = known[random.choice(len(known), SUBSET, replace=False)]
        spread = torch.cov(known.mT, correction=0).view(D, D)
        if self.means_init is not None:
            means = checks.require_numbers("means_init", self.means_init)
            if means.shape != (K, D) or not torch.isfinite(means).all():
                raise ValueError(f"means_init must be finite numbers of shape {(K, D)}, got {tuple(means.shape)}.")
            means = means - self._centre
        elif self.init == "random":
            means = known[random.choice(len(known), K, replace=False)]
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # fewer distinct points than clusters
                clusters: Any = KMeans(K, n_init=10, random_state=random)  # pyright: ignore[reportArgumentType]
                means = torch.as_tensor(clusters.fit(known.numpy()).cluster_centers_)
        variance = known.var(0, correction=0)
        covars = (spread + torch.diag(1e-6 * torch.where(variance > 0, variance, 1))).expand(K, D, D)
        if self.covars_init is not None:
            covars, shape = checks.require_numbers("covars_init", self.covars_init), self._covariance.shape(K, D)
            if covars.shape != shape:
                raise ValueError(f"covars_init must be of shape {shape}, got {tuple(covars.shape)}.")
            covars = chained.to_full_matrices(self._covariance, covars, K, D)
            if torch.linalg.cholesky_ex(covars)[1].any():
                raise ValueError("covars_init must be positive, or positive definite matrices.")
        return chained.pseudo_statistics(self._covariance, means, covars, weight)

    # --- the methods of Latent ---

    def _priors(self, nodes: Sequence[Node]) -> list[Factor]:
        if self.method == "vb":
            return [Prior(node, natural) for node, natural in zip(nodes, self._prior)]
        pairs = [(node, natural) for node, natural in zip(nodes, self._prior) if any(part.any() for part in natural)]
        return [Linear(node, natural) for node, natural in pairs]

    def _data_factor(
        self, data: chained.Sequences, nodes: Sequence[Node], scale: float = 1.0
    ) -> chained.MarkovChainFactor:
        initial, transitions, emission = nodes
        return chained.MarkovChainFactor(initial, transitions, emission, data, scale=scale)

    def _num_units(self, data: chained.Sequences) -> float:
        return len(data.layout.rows)

    def _set_attributes(self, nodes: Sequence[Node]) -> None:
        for name, node in zip(("startprob", "transmat", "emissionprob"), nodes[: 2 + (self._dims == 1)]):
            if self.method == "vb":
                alpha = node.natural[0] + 1
                self._set(f"{name}_posterior_", alpha)
                self._set(f"{name}_", alpha / alpha.sum(-1, keepdim=True))
            else:
                self._set(f"{name}_", chained.log_shares(node).exp())
        if self._dims == 1:
            return
        remedy = "increase covars_prior, or remove outliers"
        known, _, covariances = self._covariance.summary(nodes[2].natural, self.method == "em", "state", remedy)
        if self.method == "vb":
            self._set("means_weight_", known.confidence)
            self._set("dof_", known.degrees)
        self._set("means_", known.location + self._centre)
        self._set("covars_", covariances)

    def _set(self, name: str, value: Tensor) -> None:
        setattr(self, name, self._kind(value.clone()))

    # --- prediction ---

    def _prepare(
        self, X: Any, lengths: Any
    ) -> tuple[chained.SequenceInput, chained.Sequences, tuple[Tensor, Tensor, Tensor]]:
        check_is_fitted(self, "startprob_")
        given = chained.SequenceInput(X, lengths)
        data = self._read(given, reset=False)
        with torch.no_grad():
            return given, data, self._data_factor(data, self._nodes).logs()

    def log_likelihood(self, X: Any, lengths: Any = None) -> Any:
        """log p of each sequence, (sequences,); with `"vb"` a lower bound on the log predictive density."""
        given, data, logs = self._prepare(X, lengths)
        return checks.like(given.first(self._dims))(markov.smoothed(*logs, data.layout).log_weight)

    def score(self, X: Any, y: Any = None, lengths: Any = None) -> float:
        """The sum of `log_likelihood` divided by the number of rows of X. y is ignored."""
        chained.check_ignored_y(X, y, self._dims)
        _, data, logs = self._prepare(X, lengths)
        return float(markov.smoothed(*logs, data.layout).log_weight.sum()) / len(data.layout.rows)

    def predict_proba(self, X: Any, lengths: Any = None) -> Any:
        """P(z_t = k | X), (n, K), given all observations."""
        given, data, logs = self._prepare(X, lengths)
        found = markov.smoothed(*logs, data.layout)
        chained.check_possible(found.log_weight)
        return given.like(data.layout.unpacked(found.shares).mT.contiguous(), data.layout.lengths, self._dims)

    def decode(self, X: Any, lengths: Any = None) -> tuple[float, Any]:
        """The joint log probability of X and the most probable path of states (Viterbi), and that path."""
        given, data, logs = self._prepare(X, lengths)
        weight, states = markov.best(*logs, data.layout)
        chained.check_possible(weight)
        return float(weight.sum()), given.like(data.layout.unpacked(states), data.layout.lengths, self._dims)

    def predict(self, X: Any, lengths: Any = None) -> Any:
        """The states of `decode`, (n,)."""
        return self.decode(X, lengths)[1]

    def sample(self, n_samples: int = 1, random_state: Any = None) -> tuple[Any, Any]:
        """One sequence from the model, (n_samples, D), and its states; with `"vb"` at the expected parameters."""
        check_is_fitted(self, "startprob_")
        checks.require_positive_integer(n_samples=n_samples)
        seed = check_random_state(self.random_state if random_state is None else random_state).randint(2**31 - 1)
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(n_samples, dtype=torch.float64, generator=generator)
        maps = chained.drawn(_array(self.transmat_), uniform.expand(self.n_states, -1)).mT.contiguous()  # from each
        maps[0] = chained.drawn(_array(self.startprob_), uniform[:1])

        def follow(earlier: Elements, later: Elements) -> Elements:
            return (later[0].gather(1, earlier[0]),)

        states = scan(follow, (maps,))[0][:, 0]
        if self._dims == 1:
            uniform = torch.rand(n_samples, 1, dtype=torch.float64, generator=generator)
            rows = chained.drawn(_array(self.emissionprob_)[states], uniform)
        else:
            means, covars = self._gaussians()
            root = torch.linalg.cholesky(covars)
            noise = torch.randn(n_samples, means.shape[1], dtype=torch.float64, generator=generator)
            rows = means[states] + (root[states] @ noise[..., None])[..., 0]
        return self._kind(rows), self._kind(states)

    def _gaussians(self) -> tuple[Tensor, Tensor]:
        means = _array(self.means_)
        return means, chained.to_full_matrices(self._covariance, _array(self.covars_), *means.shape)


def _array(value: Any) -> Tensor:
    return torch.as_tensor(np.array(checks.as_numpy(value), dtype=np.float64))
