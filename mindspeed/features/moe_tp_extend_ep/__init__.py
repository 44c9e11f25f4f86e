"""Whole experts on tensor-parallel ranks."""
