"""Optimizer state sharded over the replicas."""
