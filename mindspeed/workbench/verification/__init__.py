"""The proof that a feature does what it claims: one tiny model trained with and without it, and compared."""
