"""Blocks of weights: elementwise blocks, the matrix of one layer, and weights that are sampled together."""

from bayesgrad.block.elementwise import Block, Directions, Product, gradient_of

__all__ = ["Block", "Directions", "Product", "gradient_of"]
