"""Tokens to the places of capacity-gated experts by index instead of products with masks."""
