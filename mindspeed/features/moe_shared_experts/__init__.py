"""Experts that process every token, in addition to those that the router selects."""
