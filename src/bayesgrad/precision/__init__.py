"""Precisions (inverse covariances) of weights: symmetric positive operators with a common interface.

| structure | what it stores | size |
|---|---|---|
| `Scalar` | one variance for all weights | 1 |
| `Diagonal` | a variance for each weight | n |
| `Pair` | a covariance of each weight and its momentum | 3 n |
| `Kronecker` | a covariance of rows and one of columns | out^2 + in^2 |
| `Spectral` | a Kronecker product in its eigenbasis, with a precision for each entry | out^2 + in^2 + n |
| `LowRank` | a multiple of the identity, and products with k directions | k^2 |
| `Rescaled` | the same with a prior precision for each weight | k^2 + n |
| `Dense` | the covariance of every pair of weights | n^2 |
| `Blocks` | the Cholesky factor of a precision, for one or several blocks of weights | n^2, n k |
"""

from bayesgrad.precision.algebra import Precision
from bayesgrad.precision.blocks import Blocks
from bayesgrad.precision.dense import Dense
from bayesgrad.precision.diagonal import Diagonal
from bayesgrad.precision.kronecker import Kronecker, Spectral
from bayesgrad.precision.low_rank import LowRank, Rescaled
from bayesgrad.precision.pair import Pair
from bayesgrad.precision.scalar import Scalar

__all__ = ["Blocks", "Dense", "Diagonal", "Kronecker", "LowRank", "Pair", "Precision", "Rescaled", "Scalar", "Spectral"]
