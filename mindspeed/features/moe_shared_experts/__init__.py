"""Experts that every token goes to, beside those that the router chooses."""
