"""Norms recomputed in the backward pass."""
