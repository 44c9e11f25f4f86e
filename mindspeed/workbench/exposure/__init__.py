"""Exposed time by simulation: the order in which ranks compute, post transfers and wait for them, on named machines. No torch."""
