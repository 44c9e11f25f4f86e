"""Expert all-to-alls of one micro-batch overlapped with the computation of another."""
