"""Experts of a MoE layer spread over ranks."""
