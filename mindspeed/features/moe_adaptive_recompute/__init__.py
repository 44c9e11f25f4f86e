"""Experts recomputed where they have too many tokens."""
