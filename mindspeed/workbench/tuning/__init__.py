"""The search of the fastest layout that fits: pure numpy, no torch."""
