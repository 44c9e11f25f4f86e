"""Activation functions recomputed in the backward pass."""
