"""Norms and dropout on a share of the sequence."""
