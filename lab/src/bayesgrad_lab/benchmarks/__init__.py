"""Timings of whole steps beside torch.optim, as `bayesgrad bench` runs them. Keep the machine idle meanwhile."""
