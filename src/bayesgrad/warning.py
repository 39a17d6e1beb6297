"""Warnings that name the line of the user."""

from __future__ import annotations

import sys
import warnings

INTERNAL_PACKAGES = ("bayesgrad", "contextlib", "sklearn", "torch")  # what is between a caller and this package


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns with the line number of the first caller outside of this package, scikit-learn and torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in INTERNAL_PACKAGES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
