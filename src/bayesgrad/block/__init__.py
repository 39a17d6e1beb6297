"""What a belief factorises over: single weights, one layer's matrix, or the whole network."""

from bayesgrad.block.elementwise import Block, Directions, Product, gradient_of

__all__ = ["Block", "Directions", "Product", "gradient_of"]
