"""Context parallelism for any mask: only blocks that are needed travel and are computed."""
