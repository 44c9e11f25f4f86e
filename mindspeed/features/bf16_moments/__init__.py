"""Moments of the optimizer in bf16."""
