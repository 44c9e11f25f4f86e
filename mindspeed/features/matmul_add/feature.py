"""Weight gradients added to their buffer by the matrix product itself."""

from __future__ import annotations

from mindspeed.plugins import (
    Category,
    Feature,
    FeatureArgs,
    FeatureSpec,
    MegatronFlag,
    Numerics,
    Patch,
    Ref,
    Set,
    Wrap,
    hookimpl,
)
from mindspeed.plugins.shared_conditions import NO_FSDP, NO_TRANSFORMER_ENGINE_LAYERS

_LAYERS = "megatron.core.tensor_parallel.layers"
_GLUE = "mindspeed.features.matmul_add.layers"


class MatmulAdd(Feature[FeatureArgs]):
    """Fuse gradient accumulation into matrix products.

    This is Megatron's gradient accumulation fusion with the operator ``mindspeed::npu_matmul_add_fp32`` as its kernel.
    """

    spec = FeatureSpec(
        name="matmul-add",
        category=Category.COMPUTE,
        level=1,
        ops=("npu_matmul_add_fp32",),
        megatron_flags=(MegatronFlag("gradient_accumulation_fusion", switch="off", values=(False,)),),
        constraints=(NO_FSDP, NO_TRANSFORMER_ENGINE_LAYERS),
        numerics=Numerics.reordered(reason="each product is added to the sum of earlier micro-batches before it is rounded"),
    )

    @hookimpl
    def patches(self) -> list[Patch]:
        return [
            Wrap(
                f"{_LAYERS}:linear_with_grad_accumulation_and_async_allreduce",
                f"{_GLUE}:with_fusion_by_weight",
                reason="fuses gradient accumulation only for weights that have Megatron's main_grad buffer",
                optional=True,
            ),
            Wrap(
                "mindspeed.tensor_parallel.weight_gradient:adds_to_buffer",
                f"{_GLUE}:decided_by_weight",
                reason="lets linear layers of other features fuse gradient accumulation too",
                optional=True,
            ),
            Set(
                f"{_LAYERS}:fused_weight_gradient_mlp_cuda",
                Ref(f"{_GLUE}:KERNELS"),
                reason="replaces Apex's CUDA module, which Megatron calls for fused gradient accumulation",
            ),
            Set(
                f"{_LAYERS}:_grad_accum_fusion_available",
                True,
                reason="reports to Megatron that fused gradient accumulation is available",
                phase="build",
            ),
            Wrap(
                "megatron.core.utils:drain_embedding_wgrad_compute",
                f"{_GLUE}:with_kernels",
                reason="replaces Apex's CUDA module, which this function imports, for the deferred output-layer gradient",
                optional=True,
            ),
        ]
