"""Operators on one GPU, against a copy, a dense product and peers: the rows of `python -m benchmarks.gpu`."""
