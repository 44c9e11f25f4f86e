"""Operators on CPU that are written in Python: `KERNELS` of each file maps schema names to kernels."""
