"""Micro-batches of any length in a pipeline."""
