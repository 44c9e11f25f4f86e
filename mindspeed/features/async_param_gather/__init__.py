"""Weight gathering behind the forward pass."""
