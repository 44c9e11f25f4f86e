"""Bit-identical reruns."""
