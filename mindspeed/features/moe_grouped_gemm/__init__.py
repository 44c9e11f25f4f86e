"""Experts of a MoE layer as one grouped product."""
