"""Context parallelism that gathers all keys and values."""
