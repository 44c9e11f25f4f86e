"""Transformer Engine's roles as classes over Megatron's local layers."""
