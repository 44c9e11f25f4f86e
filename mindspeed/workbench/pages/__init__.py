"""Pages of the documentation that are made from what is installed: features and reference."""
