"""Gradient reduction behind the backward pass."""
