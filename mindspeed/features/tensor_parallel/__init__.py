"""Weights of every layer split over ranks."""
