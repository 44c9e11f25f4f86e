"""Capacity-gated experts: DeepSpeed's MoE layer in Megatron models."""
