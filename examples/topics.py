"""Topics of documents by latent Dirichlet allocation: at once, and from a stream of documents.

    python examples/topics.py

Documents are generated, so that the topics are known.
"""

from __future__ import annotations

import numpy as np
from digits import small

from bayesgrad.models import LatentDirichlet

THEMES = {
    "sport": "ball goal team coach match league",
    "politics": "tax vote law party minister budget",
    "music": "song band piano concert album singer",
    "science": "theory data cell energy planet model",
}
WORDS = " ".join(THEMES.values()).split()


def documents(count: int, seed: int) -> np.ndarray:
    """Counts of words, (documents, words); a document is about one or two themes."""
    rng = np.random.default_rng(seed)
    topics = np.array([[1.0 if word in text.split() else 0.05 for word in WORDS] for text in THEMES.values()])
    topics /= topics.sum(1, keepdims=True)
    return np.stack([rng.multinomial(60, share @ topics) for share in rng.dirichlet([0.2] * len(THEMES), size=count)])


def recovered(model: LatentDirichlet) -> float:
    """The share of themes whose six words are the six most probable words of a topic."""
    found = {frozenset(row) for row in model.top_words(WORDS, 6)}
    return sum(frozenset(text.split()) in found for text in THEMES.values()) / len(THEMES)


def main(count: int) -> None:
    X, new = documents(count, 0), documents(200, 1)
    model = LatentDirichlet(4, method="batch", n_init=3, random_state=0).fit(X)
    for row in model.top_words(WORDS, 6):
        print("topic:", ", ".join(row))
    print("shares of a document:", model.transform(new[:1]).round(2)[0])
    stream = LatentDirichlet(4, total_samples=count, random_state=1)
    for part in np.array_split(X, max(1, count // 50)):
        stream.partial_fit(part)
    alone = np.exp(-(new * np.log(X.sum(0) / X.sum())).sum() / new.sum())  # every document with the same words
    scores = model.perplexity(new), stream.perplexity(new), alone
    print("perplexity {:.2f}, of one pass over the stream {:.2f}, without topics {:.2f}".format(*scores))
    print(f"themes recovered {recovered(model):.2f}")


if __name__ == "__main__":
    main(count=300 if small() else 3000)
