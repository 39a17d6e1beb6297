"""Names of the old laboratory, until all experiments are converted."""

from bayesgrad_lab.context import Context  # noqa: F401
from bayesgrad_lab.results import mean_and_error  # noqa: F401
