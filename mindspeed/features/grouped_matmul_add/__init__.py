"""Experts of a MoE layer as one grouped product, their weight gradients added to their buffer by it."""
