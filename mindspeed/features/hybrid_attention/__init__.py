"""Hybrid attention: Ulysses inside, a ring outside."""
