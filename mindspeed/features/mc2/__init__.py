"""Linear layers of tensor parallelism whose products are one call with their collectives."""
