"""The load of experts in the log of every step."""
