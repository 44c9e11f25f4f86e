"""Measure the peak memory and the communicated bytes of training steps."""
