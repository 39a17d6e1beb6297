"""Topics of documents: latent Dirichlet allocation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.sparse import csr_matrix
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags, check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from bayesgrad.families import Dirichlet
from bayesgrad.inference import Factor, Node, Prior
from bayesgrad.models import checks
from bayesgrad.models.documents import Counts, DocumentsFactor
from bayesgrad.models.latent import Latent
from bayesgrad.warning import warn

METHODS = ("svi", "batch")
DIRICHLET = Dirichlet()
NORMALISED = 1e-4  # the largest deviation of sums from 1; float32 rounds by less


@dataclass(eq=False, repr=False)
class LatentDirichlet(ClassNamePrefixFeaturesOutMixin, TransformerMixin, Latent):
    r"""Latent Dirichlet allocation: documents as mixtures of topics, which are distributions over words:

    .. math::
        \beta_k \sim \mathrm{Dir}(\eta), \quad \theta_d \sim \mathrm{Dir}(\alpha), \quad
        w_{dn} \sim \sum_k \theta_{dk} \beta_k

    and q(β_k) = Dir(λ_k), by variational message passing. The latent variables of a document, its topic proportions
    and the topics of its words, are optimised given λ before each update of λ (`documents.DocumentsFactor`):

    .. math::
        \lambda \leftarrow (1 - \rho)\, \lambda + \rho \left(\eta + \frac{N}{B} \sum_d n_{dw} \phi_{dwk}\right)

    Args:
        n_components: number of topics, K.
        method: `"batch"`: iterations over all documents with rho = 1, in which the bound never decreases; `"svi"`:
            passes over shuffled batches of documents, with rho = (t + learning_offset)^-learning_decay, for tens of
            thousands of documents and more.
        doc_topic_prior, topic_word_prior: alpha and η; None for 1/K.
        learning_decay, learning_offset: for `"svi"` and `partial_fit`.
        batch_size: number of documents per step of `"svi"`.
        total_samples: number of documents that `partial_fit` takes the posterior to be of, as in scikit-learn. None for
            the number so far, with which the first batches count little, and topics form late.
        max_doc_update_iter: maximum number of iterations within a document.
            Iteration n of `"batch"`, and batch n of `partial_fit`, use at most 3n.
        mean_change_tol: stop them when the mean change of a document's concentrations is below this; 0 never stops.
        max_iter: maximum number of passes or iterations.
        tol: stop when the change of the bound per word is below this; 0 never stops, and `"svi"` then computes the
            bound only at the end.
        n_init: number of starts; the one with the highest bound is kept.
        random_state: as in scikit-learn; topics, and documents of `"svi"`, have the same initial values as there.
        progress: whether to print a progress line; None prints one in a terminal, after two seconds.

    Attributes:
        components_: λ, the concentrations of the topics, (K, V).
        elbo_: the bound on log p(words), with all constants, for words in order.
        elbos_, n_iter_, converged_: see `Latent`.
        doc_topic_prior_, topic_word_prior_: the values that were used.
        n_features_in_, feature_names_in_: as in scikit-learn.

    X is (D, V), the count of each word in each document: a dense array or tensor, or a sparse matrix of SciPy or
    torch. Counts need not be integers. Results are NumPy arrays, or tensors if X is a tensor. Computations use
    float64.

    >>> documents = torch.tensor([[3, 2, 0, 0], [0, 0, 2, 4], [4, 3, 1, 0], [0, 1, 3, 2]])
    >>> model = LatentDirichlet(2, method="batch", random_state=0).fit(documents)
    >>> model.top_words(["ball", "goal", "tax", "vote"], 2)
    [['ball', 'goal'], ['vote', 'tax']]
    >>> model.transform(documents).argmax(1).tolist()
    [0, 1, 0, 1]

    Reference: Khan and Rue 2023, section 5.3; Blei, Ng and Jordan, 2003; Hoffman, Blei and Bach, 2010.
    Differs from scikit-learn: `"svi"` shuffles. The first batches of `partial_fit` use few iterations within documents.
    `score` is a mean over documents. It and `perplexity` are those of documents given the posterior of the topics; they
    do not include the divergence of the topics from their prior. In `"batch"` documents start with equal proportions,
    keep those of the last iteration if they were better, and use few iterations within documents at first.
    Checked by: tests/equations/test_latent_dirichlet.py, tests/contract/test_latent_dirichlet.py.
    """

    _fixed_settings = ("n_components",)
    _schedule_names: ClassVar[tuple[str, str]] = ("learning_offset", "learning_decay")
    n_components: int = 10
    _: KW_ONLY
    method: str = "batch"
    doc_topic_prior: float | None = None
    topic_word_prior: float | None = None
    learning_decay: float = 0.7
    learning_offset: float = 10.0
    batch_size: int = 128
    max_doc_update_iter: int = 100
    mean_change_tol: float = 1e-3
    max_iter: int = 100
    total_samples: float | None = 1e6
    tol: float = 1e-3
    random_state: Any = None

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = ["float64"]  # pyright: ignore[reportOptionalMemberAccess]
        return tags

    @classmethod
    def from_parameters(cls, components: Any, **settings: Any) -> LatentDirichlet:
        """A model of known topics, ready to transform, to score and to sample.

        Args:
            components: concentrations of the words of each topic, (K, V), as `components_`; for known probabilities
                these times a large number.
            settings: of the estimator.
        """
        given = checks.require_numbers("components", components)
        if given.dim() != 2 or not ((given > 0) & torch.isfinite(given)).all():
            raise ValueError(f"components must be positive numbers of shape (K, V), got shape {tuple(given.shape)}.")
        _refuse_probabilities("components", given)
        model = cls(len(given), **settings)
        model._check_settings()
        model.n_features_in_, model._device = given.shape[1], None
        model._random, model._formed = check_random_state(model.random_state), True
        return model._begun_with([Node(DIRICHLET, DIRICHLET.of(given), name="topics")])

    # --- the methods of `Latent` ---

    def _read(self, X: Any, *, reset: bool) -> Counts:
        if reset:
            self._check_settings()
        counts = self._counts(X, reset=reset)
        self._remember_kind(X)
        return counts

    def _check_settings(self) -> None:
        if self.method == "online":
            raise ValueError(
                "method must be one of 'svi', 'batch', got 'online': the online method of scikit-learn is called 'svi' "
                "here."
            )
        checks.require_one_of(self, method=METHODS)
        checks.require_positive_integer(n_components=self.n_components, max_doc_update_iter=self.max_doc_update_iter)
        checks.require_non_negative(mean_change_tol=self.mean_change_tol)
        for name in ("doc_topic_prior", "topic_word_prior"):
            value = self._prior(name)
            if not (checks.is_number(value) and value > 0):
                raise ValueError(f"{name} must be a positive number, got {value!r}.")

    def _prior(self, name: str) -> float:
        given = getattr(self, name)
        return 1 / self.n_components if given is None else given

    def _counts(self, X: Any, *, reset: bool) -> Counts:
        """Validated counts.

        Raises:
            ValueError: they are not valid counts of words.
        """
        sparse = isinstance(X, Tensor) and X.layout != torch.strided
        plain: Any = Counts.read(X).matrix if sparse else checks.as_numpy(X)
        try:
            matrix = Counts.read(self._validated(plain, reset=reset, accept_sparse="csr")).matrix
        except ValueError as error:
            if "could not convert string to float" not in str(error):
                raise
            raise ValueError(
                "X must be counts of words, (D, V), got text: count words with "
                "sklearn.feature_extraction.text.CountVectorizer first."
            ) from error
        count = len(np.diff(matrix.indptr))
        if not np.isfinite(matrix.data).all():
            wrong = len(np.unique(matrix.nonzero()[0][~np.isfinite(matrix.data)]))
            raise ValueError(f"X contains NaN or infinity in {wrong} of {count} documents: remove them first.")
        if matrix.nnz and matrix.data.min() < 0:
            raise ValueError(f"Negative values in data: counts must not be negative, got {matrix.data.min():g}.")
        empty = np.flatnonzero(np.diff(matrix.indptr) == 0)
        if len(empty) == count:
            raise ValueError("X contains no words: every count is zero.")
        if len(empty):
            few = f"{len(empty)} of {count} documents have no words, the first in row {empty[0]}"
            warn(f"{few}: their proportions are those of the prior, and they do not affect the topics.")
        return Counts(matrix, X.device if isinstance(X, Tensor) else None)

    def _start(self, data: Counts, random: np.random.RandomState) -> list[Node]:
        # Initial values of documents come from the same stream. Topics are formed when full iterations have ended.
        self._random, self._formed = random, False
        drawn = random.gamma(100.0, 0.01, (self.n_components, self.n_features_in_))
        return [Node(DIRICHLET, DIRICHLET.of(torch.as_tensor(drawn, device=data.device)), name="topics")]

    def _priors(self, nodes: Sequence[Node]) -> list[Factor]:
        (topics,) = nodes
        like_one = torch.full_like(topics.natural[0][:1], self._prior("topic_word_prior"))
        return [Prior(topics, DIRICHLET.of(like_one))]

    def _data_factor(self, data: Counts, nodes: Sequence[Node], scale: float = 1.0) -> DocumentsFactor:
        # Iterations evaluate a document repeatedly: the same random start would lead to the same bad maximum.
        random = self.method == "svi"
        return self._documents(
            data, nodes[0], self._drawn(data) if random else torch.ones(len(data), self.n_components), scale
        )

    def _stream_factor(self, data: Counts, nodes: Sequence[Node], scale: float) -> DocumentsFactor:
        factor = self._documents(data, nodes[0], self._drawn(data), scale)
        factor.ramp_up, factor.evaluations = not self._formed, self._batches - 1
        return factor

    def _drawn(self, data: Counts) -> Tensor:
        """Random initial values of documents."""
        return torch.as_tensor(self._random.gamma(100.0, 0.01, (len(data), self.n_components)))

    def _full_data_factor(self, data: Counts, nodes: Sequence[Node]) -> DocumentsFactor:
        factor = self._data_factor(data, nodes)
        factor.ramp_up = self._formed = True
        return factor

    def _documents(self, data: Counts, topics: Node, start: Tensor, scale: float = 1.0) -> DocumentsFactor:
        max_iter, tolerance, prior = self.max_doc_update_iter, self.mean_change_tol, self._prior("doc_topic_prior")
        return DocumentsFactor(topics, data, prior, start, max_iter=max_iter, tolerance=tolerance, scale=scale)

    def _set_attributes(self, nodes: Sequence[Node]) -> None:
        (concentration,) = DIRICHLET.standard_parameters(nodes[0].natural)
        self.doc_topic_prior_ = float(self._prior("doc_topic_prior"))
        self.topic_word_prior_ = float(self._prior("topic_word_prior"))
        self.components_ = self._kind(concentration)

    def _num_units(self, data: Counts) -> float:
        return data.words

    # --- inference for documents ---

    def _inferred(self, X: Any, topics: Any = None) -> tuple[Counts, DocumentsFactor]:
        """The factor of new documents, optimised; each starts with equal proportions, independently of the others."""
        if own := topics is None:
            check_is_fitted(self, "components_")
            counts, topics = self._counts(X, reset=False), self.components_
        else:
            self._check_settings()
            counts = LatentDirichlet()._counts(X, reset=True)  # this estimator may have another vocabulary, or none
        given, width = checks.require_numbers("topics", topics), counts.matrix.shape[1]  # pyright: ignore
        if given.dim() != 2 or given.shape[1] != width:
            raise ValueError(f"topics must be (K, {width}), with the columns of X, got shape {tuple(given.shape)}.")
        if not ((given > 0) & torch.isfinite(given)).all():
            raise ValueError(f"topics must be positive concentrations, got {given.min().item():g}.")
        if not own:
            _refuse_probabilities("topics", given)
        node = Node(DIRICHLET, DIRICHLET.of(given.to(counts.device or "cpu")), name="topics")
        factor = self._documents(counts, node, torch.ones(len(counts), len(given), dtype=torch.float64))
        factor.evaluate_cached()
        return counts, factor

    def transform(self, X: Any, *, normalize: bool = True) -> Any:
        """Mean topic proportions of each document, (D, K).

        Args:
            normalize: False returns the concentrations instead.
        """
        shares = self._inferred(X)[1].shares
        return checks.like(X)(shares / shares.sum(1, keepdim=True) if normalize else shares)

    def bound(self, X: Any, topics: Any = None) -> Any:
        """A bound on log p(words) of each document, (D,), given the posterior of the topics.

        Args:
            topics: concentrations (K, V) of Dirichlet distributions, as `components_` of scikit-learn's estimator; None
                for those of this one. Probabilities are refused: multiply them by the number of words that each topic
                was estimated from, or by a large number if they are known. With topics, the estimator need not be
                fitted: only doc_topic_prior, max_doc_update_iter and mean_change_tol are used.

        Raises:
            ValueError: all rows of topics sum to 1.
        """
        return checks.like(X)(self._inferred(X, topics)[1].bounds)

    def score(self, X: Any, y: Any = None) -> float:
        """The mean of `bound` over documents, in nats."""
        return float(checks.as_numpy(self.bound(X)).mean())

    def perplexity(self, X: Any) -> float:
        """exp(-bound per word)."""
        counts, factor = self._inferred(X)
        return math.exp(-float(factor.bounds.sum()) / counts.words)

    def top_words(self, vocabulary: Sequence[str] | None = None, n: int | None = None) -> list[list[Any]]:
        """The n most probable words of each topic.

        Args:
            vocabulary: the word of each column of X; None for `feature_names_in_`, or the column numbers.
            n: None for 10, or for all words if there are fewer.
        """
        check_is_fitted(self, "components_")
        n = min(10, self.n_features_in_) if n is None else n
        if not 1 <= n <= self.n_features_in_:
            raise ValueError(f"n must be between 1 and {self.n_features_in_}, got {n!r}.")
        columns = getattr(self, "feature_names_in_", range(self.n_features_in_))
        words = list(columns if vocabulary is None else vocabulary)
        if len(words) != self.n_features_in_:
            raise ValueError(f"vocabulary must have one word per column of X, {self.n_features_in_}, got {len(words)}.")
        order = np.argsort(-checks.as_numpy(self.components_), axis=1, kind="stable")[:, :n]
        return [[words[place] for place in row] for row in order]

    def sample(self, n_samples: int = 1, length: int = 100, random_state: Any = None) -> tuple[Any, Any]:
        """New documents from one sample of the topics: counts (n_samples, V), sparse, and proportions (n_samples, K).

        Args:
            length: number of words in each.
        """
        check_is_fitted(self, "components_")
        checks.require_positive_integer(n_samples=n_samples, length=length)
        random = check_random_state(self.random_state if random_state is None else random_state)
        generator = torch.Generator().manual_seed(int(random.randint(2**31 - 1)))
        alpha = torch.full((self.n_components,), self.doc_topic_prior_, dtype=torch.float64)
        components = torch.as_tensor(checks.as_numpy(self.components_))
        topics = DIRICHLET.sample(DIRICHLET.of(components), 1, generator)[0]
        shares = DIRICHLET.sample(DIRICHLET.of(alpha), n_samples, generator)
        drawn = [torch.multinomial(row @ topics, length, replacement=True, generator=generator) for row in shares]
        rows = np.repeat(np.arange(n_samples), length)
        entries = (np.ones(len(rows)), (rows, torch.cat(drawn).numpy()))
        counts = csr_matrix(entries, shape=(n_samples, self.n_features_in_))
        counts.sum_duplicates()
        return counts, checks.like(self.components_)(shares)


def _refuse_probabilities(name: str, given: Tensor) -> None:
    """Raises if all rows sum to 1: as concentrations, they would be topics of which nearly nothing is known."""
    if len(given) and bool(((given.sum(1) - 1).abs() < NORMALISED).all()):
        raise ValueError(
            f"{name} must be concentrations of Dirichlet distributions, got rows that sum to 1, as probabilities do: "
            "pass components_ as scikit-learn has them, or multiply each row by the number of words in its topic (by a "
            "large number, such as 1e6, if probabilities are known)."
        )
