"""Optimizers: each a declaration of parts over the one step of `bayesgrad.filter`."""

from bayesgrad.optim.adabayes import AdaBayes, AdaBayesFP
from bayesgrad.optim.adabound import AdaBound, AMSBound

__all__ = ["AMSBound", "AdaBayes", "AdaBayesFP", "AdaBound"]
