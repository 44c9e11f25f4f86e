"""Configurations and optimizers of Megatron whose main weights and states cannot be taken away. Light, without torch."""

from __future__ import annotations

from typing import Any, Final

_ELEMENTWISE: Final = ("adam", "sgd")


def config_refusals(config: Any) -> list[str]:
    """List what a model configuration has that reads or writes main weights outside of the optimizer step."""
    wrong = {
        "QK clipping writes main weights between steps": getattr(config, "qk_clip", False),  # since Megatron 0.15
        "fp8 weights have no bf16 form": bool(getattr(config, "fp8", None)) and bool(getattr(config, "fp8_param", False)),
        "fp4 weights have no bf16 form": bool(getattr(config, "fp4", None)) and bool(getattr(config, "fp4_param", False)),
    }
    return [sentence for sentence, holds in wrong.items() if holds]


def optimizer_refusals(optimizer: Any) -> list[str]:
    """List what an optimizer of Megatron, chained or not, does that windows cannot."""
    config = optimizer.config
    every = [optimizer, *getattr(optimizer, "chained_optimizers", ())]
    layer_wise = any(type(member).__name__ == "LayerWiseDistributedOptimizer" for member in every)
    sharded = any(getattr(getattr(member, "ddp_config", None), "use_megatron_fsdp", False) for member in every)
    wrong = {
        f"the optimizer {config.optimizer} does not update each element by itself": config.optimizer not in _ELEMENTWISE
        or layer_wise,
        "the precision-aware optimizer keeps main weights by itself": getattr(config, "use_precision_aware_optimizer", False),
        "optimizer_cpu_offload keeps main weights and states on the host by itself": getattr(
            config, "optimizer_cpu_offload", False
        ),
        "Megatron FSDP keeps main weights by itself": sharded,
        "the mxfp8 weights of reuse_grad_buf_for_mxfp8_param_ag are made from all main weights": getattr(
            config, "reuse_grad_buf_for_mxfp8_param_ag", False
        ),
    }
    return [sentence for sentence, holds in wrong.items() if holds]
