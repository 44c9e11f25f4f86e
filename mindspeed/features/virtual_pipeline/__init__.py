"""Several model chunks per pipeline stage."""
