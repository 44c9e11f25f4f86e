"""Rows of ``python -m benchmarks.ops``."""
