"""Gathers and scatters of tokens behind shared experts and weight gradients."""
