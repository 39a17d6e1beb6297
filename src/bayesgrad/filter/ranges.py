"""What hyper-parameters may be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple


class Range(NamedTuple):
    """What a hyper-parameter may be, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


NONNEGATIVE = Range("a finite number >= 0", lambda x: 0 <= x < math.inf)
POSITIVE = Range("a positive number", lambda x: x > 0)
FRACTION = Range("in [0, 1)", lambda x: 0 <= x < 1)
OPEN_FRACTION = Range("in (0, 1)", lambda x: 0 < x < 1)
FRACTIONS = Range("two numbers in [0, 1)", lambda x: len(x) == 2 and all(0 <= b < 1 for b in x))
COUNT = Range("a number >= 1", lambda x: 1 <= x < math.inf)
OPTIONAL_COUNT = Range("None or a number >= 1", lambda x: x is None or 1 <= x < math.inf)
WHOLE = Range("a whole number >= 1", lambda x: x == int(x) and x >= 1)
WHOLE_NUMBER = Range("a whole number", lambda x: x == int(x))
FLAG = Range("True or False", lambda x: x is True or x is False)
OPTIONAL_FLAG = Range("None, True or False", lambda x: x is None or x is True or x is False)


def one_of(*choices: Any) -> Range:
    """One of a few values."""
    return Range(" or ".join(map(repr, choices)), lambda x: x in choices)
