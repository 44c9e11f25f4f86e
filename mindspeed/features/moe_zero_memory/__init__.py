"""Activations of experts computed again in backward, under the transfers."""
