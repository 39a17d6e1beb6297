"""How sure a belief is: symmetric positive operators with one small algebra.

| structure | what it stores | size |
|---|---|---|
| `Scalar` | one variance for all weights | 1 |
| `Diagonal` | a variance for each weight | n |
"""

from bayesgrad.precision.algebra import Precision
from bayesgrad.precision.diagonal import Diagonal
from bayesgrad.precision.scalar import Scalar

__all__ = ["Diagonal", "Precision", "Scalar"]
