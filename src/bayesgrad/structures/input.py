"""Second moments of the inputs of each layer."""

from __future__ import annotations

from bayesgrad.structures.kron import KroneckerStructure


class InputStructure(KroneckerStructure):
    """A ⊗ I for each layer, with the second moments A of its inputs, and a diagonal for all other parameters.

    Reference: Benzing 2021, appendix C.
    """

    name = "input"
    sides = ("input",)
    one_direction = True
