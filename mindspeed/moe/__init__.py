"""Mixture of experts over several ranks as a library: grouped products, routing of a call, transfers as autograd nodes."""
