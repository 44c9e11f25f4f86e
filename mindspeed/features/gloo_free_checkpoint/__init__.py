"""Optimizer checkpoints over the groups of the device."""
