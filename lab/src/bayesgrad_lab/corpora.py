"""Documents as counts of words, from files in the lda-c format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bayesgrad_lab.datasets import Files


@dataclass(frozen=True)
class Corpus:
    """How often each word of a vocabulary is in each document.

    Args:
        counts: (D, V), scipy's csr_matrix.
        note: for people.
    """

    name: str
    counts: Any
    vocabulary: list[str]
    note: str

    def __getitem__(self, rows: Any) -> Any:
        return self.counts[rows]


def associated_press(data_dir: str | None = None) -> Corpus:
    """2,246 articles of the Associated Press, of TREC-1, as they come with lda-c: ap.dat and vocab.txt.

    Raises:
        FileNotFoundError: they are not there.
        ValueError: they are damaged.
    """
    files = Files("ap", data_dir, False)
    path, words = files.need("ap.dat"), files.need("vocab.txt")
    vocabulary = _text(words).split()
    counts = read_ldac(path, len(vocabulary))
    note = f"ap: {counts.shape[0]:,} documents, {len(vocabulary):,} words, {counts.sum():,.0f} tokens"
    return Corpus("ap", counts, vocabulary, note)


def read_ldac(path: Path, words: int) -> Any:
    """Counts (D, V) from lines of `n id:count id:count ...`."""
    from scipy.sparse import csr_matrix

    indices, counts, begins = [], [], [0]
    for number, line in enumerate(_text(path).splitlines(), 1):
        head, *pairs = line.split() or [""]
        try:
            found = [tuple(map(int, pair.split(":"))) for pair in pairs]
            places, values = zip(*found) if found else ((), ())
            if int(head) != len(pairs) or (places and not 0 <= min(places) <= max(places) < words):
                raise ValueError("a count of pairs or the number of a word is off")
            if values and not 1 <= min(values) <= max(values) < 1 << 53:
                raise ValueError("a word must be counted at least once")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged in line {number} ({error}); get it again.") from error
        indices.extend(places)
        counts.extend(values)
        begins.append(len(indices))
    return csr_matrix((np.array(counts, dtype=np.float64), indices, begins), shape=(len(begins) - 1, words))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged: it is not UTF-8 text; get it again.") from error


def invented(documents: int = 60, words: int = 40, topics: int = 4, seed: int = 0) -> Corpus:
    """Documents drawn from topics that share no word, so that methods can be tried without any file."""
    from scipy.sparse import csr_matrix

    random = np.random.default_rng(seed)
    own = np.kron(np.eye(topics), np.ones(words // topics) * topics / words)
    shares = random.dirichlet(np.full(topics, 0.2), documents)
    counts = random.multinomial(50, shares @ own)
    return Corpus("invented", csr_matrix(counts.astype(np.float64)), [f"w{i}" for i in range(words)], "invented")
