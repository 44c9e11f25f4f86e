"""Fixes for places where Megatron assumes more than a device: Apex, Transformer Engine, Triton, a C++ compiler."""
