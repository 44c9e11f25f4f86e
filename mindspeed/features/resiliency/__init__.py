"""Hangs of a job that name the rank, its section and its last collective."""
