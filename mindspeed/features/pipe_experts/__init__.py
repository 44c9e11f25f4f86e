"""Capacity-gated experts one after another, while the rows of the others travel."""
