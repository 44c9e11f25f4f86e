"""Trace chosen steps on chosen ranks."""
