"""Values on the CPU of Megatron's arguments whose defaults need CUDA."""

from __future__ import annotations

from typing import Final

ARGUMENTS: Final[tuple[tuple[str, str | bool, str], ...]] = (
    # (argument of Megatron-LM, value, why its own default cannot hold)
    ("distributed_backend", "gloo", "nccl needs CUDA devices"),
    ("transformer_impl", "local", "Transformer Engine needs CUDA"),
    ("gradient_accumulation_fusion", False, "the fused kernel is Apex's and needs CUDA"),
    ("masked_softmax_fusion", False, "the fused kernel needs CUDA"),
    ("apply_rope_fusion", False, "the fused kernel is Transformer Engine's and needs CUDA"),
    ("dist_ckpt_optim_fully_reshardable", True, "the other format of a distributed optimizer loses the step of torch's Adam"),
    ("persist_layer_norm", False, "the persistent kernel is Apex's and needs CUDA"),
)
