"""Every optimizer of this package is a `Filter`; those that look at layers are a `LayerFilter`."""

from bayesgrad.filter.filter import Filter, Parts

__all__ = ["Filter", "Parts"]
