"""Structures of the Hessian of a loss: what `bayesgrad.laplace` accumulates, and what posteriors and EWC compute with.

| name | approximation | stored for a layer |
|---|---|---|
| `"diag"` | the diagonal | n |
| `"kron"` | A ⊗ E: second moments of inputs and errors | out^2 + in^2 |
| `"input"` | A ⊗ I: second moments of inputs | in^2 |
| `"full"` | the dense matrix of all weights | |
| `"subsampled"` | exact for some examples, as products with their gradients | examples (in + out) |
"""

# isort: off
from bayesgrad.structures.structure import Structure
from bayesgrad.structures.diag import DiagonalStructure  # registered in the order of the table
from bayesgrad.structures.kron import KroneckerStructure
from bayesgrad.structures.input import InputStructure
from bayesgrad.structures.full import FullStructure
from bayesgrad.structures.subsampled import SubsampledStructure
# isort: on

__all__ = [
    "DiagonalStructure",
    "FullStructure",
    "InputStructure",
    "KroneckerStructure",
    "Structure",
    "SubsampledStructure",
]
