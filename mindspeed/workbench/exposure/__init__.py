"""Simulation of exposed time: ranks compute, post transfers and wait for them in a given order, on named machines. No torch."""
