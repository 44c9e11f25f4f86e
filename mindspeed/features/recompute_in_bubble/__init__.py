"""Recomputation of as few activations as a limit allows."""
