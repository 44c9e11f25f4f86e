"""Acme's features for mindspeed."""
