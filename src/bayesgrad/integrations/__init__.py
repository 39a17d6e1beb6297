"""Optimizers of this package in other people's training loops; each integration runs the loop of `BeliefOptimizer`.

`attach` serves every loop. `integrations.huggingface`, `integrations.lightning` and `integrations.skorch` have the
callbacks and classes of these packages, which they import when they are imported; `docs/loops.md` shows all.
"""

from bayesgrad.integrations.automatic import Attachment, attach
from bayesgrad.integrations.building import batch_to, build_optimizer, counts, parameter_groups
from bayesgrad.integrations.monitoring import diagnostics
from bayesgrad.integrations.pruning import report

__all__ = [
    "Attachment",
    "attach",
    "batch_to",
    "build_optimizer",
    "counts",
    "diagnostics",
    "parameter_groups",
    "report",
]
