"""Activations of attention on the host between forward and backward."""
