"""Places of a pipeline that stay empty."""
