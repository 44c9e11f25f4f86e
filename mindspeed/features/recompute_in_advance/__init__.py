"""Recomputation that runs while the gradient is on its way."""
