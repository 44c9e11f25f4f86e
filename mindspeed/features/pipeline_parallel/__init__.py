"""Consecutive layers on consecutive ranks."""
