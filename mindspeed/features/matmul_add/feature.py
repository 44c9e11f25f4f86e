"""Weight gradients added to their buffer by the matrix product itself."""

from __future__ import annotations

from mindspeed import plugins as ms
from mindspeed.plugins.shared_conditions import NO_FSDP, NO_TRANSFORMER_ENGINE_LAYERS

_LAYERS = "megatron.core.tensor_parallel.layers"
_GLUE = "mindspeed.features.matmul_add.layers"


class MatmulAdd(ms.Feature[ms.FeatureArgs]):
    """Fuse gradient accumulation into matrix products.

    This is Megatron's gradient accumulation fusion with the operator ``mindspeed::npu_matmul_add_fp32`` as its kernel.
    """

    spec = ms.FeatureSpec(
        name="matmul-add",
        category=ms.Category.COMPUTE,
        level=1,
        ops=("npu_matmul_add_fp32",),
        megatron_flags=(ms.MegatronFlag("gradient_accumulation_fusion", switch="off", values=(False,)),),
        constraints=(NO_FSDP, NO_TRANSFORMER_ENGINE_LAYERS),
        numerics=ms.Numerics.reordered(
            reason="each product is added to the gradient of earlier micro-batches before rounding. Megatron first rounds the "
            "product to the type of the weight"
        ),
        own_trainer="from mindspeed.ops import npu_matmul_add_fp32",
    )

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        return [
            ms.Wrap(
                f"{_LAYERS}:linear_with_grad_accumulation_and_async_allreduce",
                f"{_GLUE}:with_fusion_by_weight",
                reason="uses fused gradient accumulation only for weights with Megatron's fp32 gradient buffer (main_grad), "
                "and ordinary gradients for others",
                optional=True,
            ),
            ms.Wrap(
                "mindspeed.tensor_parallel.weight_gradient:adds_to_buffer",
                f"{_GLUE}:decided_by_weight",
                reason="also adds weight gradients directly to the fp32 buffer in linear layers that other features define",
                optional=True,
            ),
            ms.Set(
                f"{_LAYERS}:fused_weight_gradient_mlp_cuda",
                ms.Ref(f"{_GLUE}:KERNELS"),
                reason="replaces Apex's CUDA kernel for fused gradient accumulation, which Megatron calls, by an operator of "
                "mindspeed",
            ),
            ms.Set(
                f"{_LAYERS}:_grad_accum_fusion_available",
                True,
                reason="reports to Megatron that fused gradient accumulation is available also without Apex, because an "
                "operator of mindspeed replaces Apex's kernel",
                phase="build",
            ),
            ms.Wrap(
                "megatron.core.utils:drain_embedding_wgrad_compute",
                f"{_GLUE}:with_kernels",
                reason="makes Megatron compute the deferred weight gradient of the output layer by an operator of mindspeed, "
                "because Apex's kernel needs CUDA",
                optional=True,
            ),
        ]
