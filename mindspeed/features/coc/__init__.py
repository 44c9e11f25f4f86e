"""Linear layers in parts, with the collective of one part behind the product of another."""
