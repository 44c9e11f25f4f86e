"""Attention over a sequence that ranks share, timed where there are more ranks than cores."""
