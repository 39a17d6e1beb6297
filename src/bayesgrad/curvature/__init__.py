"""Sums of the curvature of a loss over batches, for `laplace`."""
