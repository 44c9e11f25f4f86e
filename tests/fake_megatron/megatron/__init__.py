"""A small stand-in for Megatron."""
