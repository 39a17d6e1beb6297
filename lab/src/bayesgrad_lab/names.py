"""Errors about names, with the nearest one there is."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

FEW = 20  # names that a sentence can hold


def unknown(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """What to raise for a name that nobody has."""
    known = list(known)
    nearest = get_close_matches(name.lower(), known, 1, 0.5)
    if nearest and len(known) > FEW:
        return ValueError(f"no {kind} is called {name!r}; did you mean {nearest[0]!r}?")
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
    return ValueError(f"no {kind} is called {name!r}{hint} There are: {', '.join(known)}.")
