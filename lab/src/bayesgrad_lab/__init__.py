"""The laboratory of bayesgrad: the experiments of the papers, data sets, comparisons and the command line."""

__version__ = "0.2.0"
