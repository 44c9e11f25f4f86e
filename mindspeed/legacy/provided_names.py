"""Import names of MindSpeed that work here: the object that each stands for."""

from __future__ import annotations

from typing import Final

_CORE, _TRANSFORMER = "megatron.core", "megatron.core.transformer"
_LAYERS = "megatron.core.tensor_parallel.layers"
_OLD = "mindspeed.legacy"

PROVIDED: Final[dict[str, dict[str, str]]] = {
    # the interface of MindSpeed
    "mindspeed.args_utils": {
        name: f"{_OLD}.arguments:{name}" for name in ("get_full_args", "get_mindspeed_args", "process_args")
    },
    "mindspeed.arguments": {"process_args": f"{_OLD}.arguments:process_args"},
    "mindspeed.features_manager": {
        "FEATURES_LIST": f"{_OLD}.manager:MindSpeedFeaturesManager.FEATURES_LIST",
        "MindSpeedFeature": f"{_OLD}.feature:MindSpeedFeature",
        "MindSpeedFeaturesManager": f"{_OLD}.manager:MindSpeedFeaturesManager",
        "create_features_list": f"{_OLD}.feature:create_features_list",
    },
    "mindspeed.features_manager.feature": {"MindSpeedFeature": f"{_OLD}.feature:MindSpeedFeature"},
    "mindspeed.features_manager.features_manager": {"MindSpeedFeaturesManager": f"{_OLD}.manager:MindSpeedFeaturesManager"},
    "mindspeed.patch_utils": {
        "MindSpeedPatchesManager": f"{_OLD}.patches:MindSpeedPatchesManager",
        "Patch": f"{_OLD}.patches:PatchInfo",
        "is_megatron_training_available": f"{_OLD}.patches:is_megatron_training_available",
    },
    # names of Megatron, which MindSpeed's packages import and their users take from there
    "mindspeed.core.context_parallel": {
        "AttnMaskType": f"{_TRANSFORMER}.enums:AttnMaskType",
        "DotProductAttention": f"{_TRANSFORMER}.dot_product_attention:DotProductAttention",
        "FusedScaleMaskSoftmax": f"{_CORE}.fusions.fused_softmax:FusedScaleMaskSoftmax",
        "divide": f"{_CORE}.utils:divide",
        "mpu": f"{_CORE}.parallel_state",
    },
    "mindspeed.core.pipeline_parallel.fb_overlap": {
        "ColumnParallelLinear": f"{_LAYERS}:ColumnParallelLinear",
        "RowParallelLinear": f"{_LAYERS}:RowParallelLinear",
    },
    "mindspeed.core.transformer.moe": {"moe_utils": f"{_TRANSFORMER}.moe.moe_utils"},
    "mindspeed.core.transformer.moe.layers": {
        "ColumnParallelLinear": f"{_LAYERS}:ColumnParallelLinear",
        "RowParallelLinear": f"{_LAYERS}:RowParallelLinear",
        "linear_with_frozen_weight": f"{_LAYERS}:linear_with_frozen_weight",
    },
    "mindspeed.core.transformer.moe.moe_feature": {
        "MoELayer": f"{_TRANSFORMER}.moe.moe_layer:MoELayer",
        "TopKRouter": f"{_TRANSFORMER}.moe.router:TopKRouter",
        "build_module": f"{_TRANSFORMER}.spec_utils:build_module",
        "gather_from_sequence_parallel_region": f"{_CORE}.tensor_parallel:gather_from_sequence_parallel_region",
        "get_capacity": f"{_TRANSFORMER}.moe.moe_utils:get_capacity",
        "parallel_state": f"{_CORE}.parallel_state",
        "permute": f"{_TRANSFORMER}.moe.moe_utils:permute",
        "sort_chunks_by_idxs": f"{_TRANSFORMER}.moe.moe_utils:sort_chunks_by_idxs",
        "tensor_parallel": f"{_CORE}.tensor_parallel",
    },
    "mindspeed.moe.utils": {"MoEAuxLossAutoScaler": f"{_TRANSFORMER}.moe.moe_utils:MoEAuxLossAutoScaler"},
    # what frameworks on top call
    "mindspeed.core.ssm.gated_delta_net": {
        "tensor_a2a_cp2hp": f"{_OLD}.delta_net:tensor_a2a_cp2hp",
        "tensor_a2a_hp2cp": f"{_OLD}.delta_net:tensor_a2a_hp2cp",
    },
    "mindspeed.core.context_parallel.ulysses_context_parallel.unaligned_cp.mapping": {
        name: f"{_OLD}.uneven_exchange:{name}"
        for name in ("all_to_all", "cal_split_sizes", "gather_forward_split_backward", "split_forward_gather_backward")
    },
    "mindspeed.deprecate": {
        "AutoExecuteFunction": f"{_OLD}.deprecation:AutoExecuteFunction",
        "NoExecuteFunction": f"{_OLD}.deprecation:NoExecuteFunction",
    },
    # operators
    "mindspeed.ops.dropout_add_layer_norm": {
        "npu_dropout_add_layer_norm": "mindspeed.ops.npu_dropout_add_layer_norm:npu_dropout_add_layer_norm"
    },
    "mindspeed.ops.dropout_add_rms_norm": {
        "npu_dropout_add_rms_norm": "mindspeed.ops.npu_dropout_add_layer_norm:npu_dropout_add_rms_norm"
    },
    "mindspeed.ops.fusion_attention_v2": {
        "npu_fusion_attention": "mindspeed.ops.fusion_attention:npu_fusion_attention",
        "npu_fusion_attention_grad": f"{_OLD}.operators:npu_fusion_attention_grad",
    },
    "mindspeed.ops.gmm": {
        "npu_gmm": "mindspeed.ops.npu_gmm:npu_gmm",
        "npu_gmm_v2": "mindspeed.ops.npu_gmm:npu_gmm_v2",
        "_npu_gmm": f"{_OLD}.operators:npu_gmm_of_parameter",
        "_npu_gmm_v2": f"{_OLD}.operators:npu_gmm_v2_of_parameter",
    },
    "mindspeed.ops.grouped_matmul": {
        "eager_grouped_matmul": f"{_OLD}.operators:grouped_matmul",
        "fused_grouped_matmul": f"{_OLD}.operators:grouped_matmul",
    },
    "mindspeed.ops.npu_groupmatmul_add": {
        "npu_groupmatmul_add_fp32": "mindspeed.ops.npu_groupmatmul_add_fp32:npu_groupmatmul_add_fp32"
    },
    "mindspeed.ops.npu_matmul_add": {
        "npu_matmul_add_fp32": "mindspeed.ops.npu_matmul_add_fp32:npu_matmul_add_fp32",
        "npu_matmul_add_fp16": f"{_OLD}.operators:npu_matmul_add_fp16",
    },
    "mindspeed.ops.npu_moe_token_permute": {
        "npu_moe_token_permute": "mindspeed.ops.npu_fused_moe_token_permute:npu_fused_moe_token_permute"
    },
    "mindspeed.ops.npu_moe_token_unpermute": {
        "npu_moe_token_unpermute": "mindspeed.ops.npu_fused_moe_token_unpermute:npu_fused_moe_token_unpermute"
    },
}
"""Modules that exist in MindSpeed alone, and their names; ``"module"`` or ``"module:name"`` is what a name stands for."""

RENAMED: Final[dict[str, str]] = {"mindspeed.plugins.testing": "mindspeed.conformance.testing"}
"""Public modules of this framework that have another name now."""

VARIABLES: Final[dict[str, dict[str, None]]] = {"mindspeed.args_utils": {"_MINDSPEED_ARGS": None}}
"""Variables of old modules, with their first values; consumers write to them."""

BUILDERS: Final[dict[str, tuple[str, ...]]] = {
    "AllToAllAllGatherBatchMatMulOpBuilder": ("npu_all_to_all_all_gather_bmm:npu_alltoall_allgather_bmm",),
    "BatchMatMulReduceScatterAlltoAllOpBuilder": ("npu_bmm_reduce_scatter_all_to_all:npu_bmm_reducescatter_alltoall",),
    "FFNOpBuilder": ("ffn:npu_ffn",),
    "FusionAttentionV2OpBuilder": ("fusion_attention:npu_fusion_attention", "fusion_attention:npu_fusion_attention_grad"),
    "GMMOpBuilder": ("npu_gmm:npu_gmm",),
    "GMMV2OpBuilder": ("npu_gmm:npu_gmm_v2",),
    "GroupMatmulAddOpBuilder": ("npu_groupmatmul_add_fp32:npu_groupmatmul_add_fp32",),
    "GroupedMatMulAllReduceOpBuilder": ("npu_grouped_mat_mul_all_reduce:npu_grouped_mat_mul_all_reduce",),
    "InplaceMatmulAllReduceAddRmsNormOpBuilder": ("npu_mm_all_reduce_add_rms_norm_:npu_mm_all_reduce_add_rms_norm_",),
    "LcalOpBuilder": (
        "lcal_coc:matmul_all_reduce",
        "lcal_coc:all_gather_matmul",
        "lcal_coc:all_gather_matmul_v2",
        "lcal_coc:matmul_reduce_scatter",
    ),
    "MatmulAddOpBuilder": ("npu_matmul_add_fp32:npu_matmul_add_fp32",),
    "MatmulAllReduceAddRmsNormOpBuilder": ("npu_mm_all_reduce_add_rms_norm:npu_mm_all_reduce_add_rms_norm",),
    "MoeTokenPermuteOpBuilder": ("npu_moe_token_permute:npu_moe_token_permute",),
    "MoeTokenUnpermuteOpBuilder": ("npu_moe_token_unpermute:npu_moe_token_unpermute",),
    "NpuDropoutAddLayerNormOpBuilder": ("npu_dropout_add_layer_norm:npu_dropout_add_layer_norm",),
    "QuantGMMOpBuilder": ("quant_gmm:npu_quant_gmm", "quant_gmm:npu_quant_gmm_v2"),
    "RingAttentionUpdateOpBuilder": ("npu_ring_attention_update:npu_ring_attention_update",),
    "RmsNormOpBuilder": ("rms_norm:rms_norm",),
    "RotaryPositionEmbeddingOpBuilder": ("npu_rotary_position_embedding:npu_rotary_position_embedding",),
    "SwigluOpBuilder": ("swiglu:swiglu",),
}
"""MindSpeed's builders that have operators here: the functions, below ``mindspeed.ops``, that their ``load`` gives."""

BUILDERS_OF_FEATURES: Final[dict[str, str]] = {
    "AdaptiveCpOpBuilder": "--features adaptive-cp finds its masks without a library",
    "AdaptiveRecomputingPluggableAllocatorBuilder": "--features adaptive-recompute uses the allocator of torch",
    "AlgorithmOpBuilder": "--features reuse-fp32-param shares the storage of parameters without a library",
    "AtbOpBuilder": "the operators of ATB are called by mindspeed.ops",
    "FusedEmaAdamWOpBuilder": "nothing here replaces it",
    "SmartSwapBuilder": "nothing here replaces it: swap-attention and swap-optimizer move tensors to the host",
    "WeightQuantGMMOpBuilder": "nothing here replaces it: quant_gmm takes int8 activations too",
}
"""MindSpeed's builders whose library has no functions here, and the reason."""
