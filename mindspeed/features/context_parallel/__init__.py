"""A sequence spread over ranks: the group and per-token loss scaling."""
