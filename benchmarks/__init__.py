"""One file per question; each has ``rows() -> list[Row]`` and runs alone: ``python -m benchmarks.resolver``."""
