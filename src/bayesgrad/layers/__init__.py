"""The layers of a model: which are known, what is recorded of them, and what follows for gradients and curvature."""

from bayesgrad.layers.modules import (
    CONVOLUTIONS,
    errors_of,
    examples_in,
    gradients_of_calls,
    groups_of,
    inputs_of,
    is_lookup,
    is_matrix,
    is_norm,
    lookups_of,
    mixes_examples,
    normalises,
    own_parameters,
    per_example_gradients,
    rows_in,
    weight_of,
)

__all__ = [
    "CONVOLUTIONS",
    "errors_of",
    "examples_in",
    "gradients_of_calls",
    "groups_of",
    "inputs_of",
    "is_lookup",
    "is_matrix",
    "is_norm",
    "lookups_of",
    "mixes_examples",
    "normalises",
    "own_parameters",
    "per_example_gradients",
    "rows_in",
    "weight_of",
]
