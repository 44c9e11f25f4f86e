"""Tokens to experts and back through two operators."""
