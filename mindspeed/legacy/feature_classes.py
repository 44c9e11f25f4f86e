"""Class names of MindSpeed's features: which features of the framework each stands for, or why none is needed or exists."""

from __future__ import annotations

import functools
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import ClassVar, Final

from mindspeed.legacy.feature import MindSpeedFeature, OwnFeature
from mindspeed.megatron_lm.old_flags.flags import BY_FLAG, register_old_flags

PACKAGE: Final = "mindspeed.features_manager"


@dataclass(frozen=True, slots=True)
class OldClass:
    """Describe a feature class of MindSpeed: its module, the name and level it gives itself, and what it stands for.

    ``reason`` says why it stands for no feature. ``flags`` are those that it registers and that no feature of ours has.
    """

    module: str
    name: str
    features: tuple[str, ...] = ()
    reason: str = ""
    level: int = 2
    flags: tuple[str, ...] = ()


_PLATFORM: Final = "the platform of every plan does its work"
_NOTHING: Final = "nothing here replaces it"
_MEGATRON: Final = "Megatron has it"

CLASSES: Final[dict[str, OldClass]] = {
    "AdaptiveContextParallelFeature": OldClass(
        "context_parallel.adaptive_context_parallel", "context-parallel-size", ("adaptive-cp",)
    ),
    "AffinityFeature": OldClass("affinity.affinity", "affinity", reason=_PLATFORM, level=1),
    "AlibiFeature": OldClass("transformer.flash_attention.alibi_feature", "position-embedding-type", ("alibi",)),
    "AnsCompressTensorFeature": OldClass(
        "compress_dense.compress_dense", "compress-dense", reason=_NOTHING, flags=("--compress-dense",)
    ),
    "AsyncLogAllreduceFeature": OldClass(
        "data_parallel.async_log_allreduce", "async-log-allreduce", reason=_NOTHING, flags=("--async-log-allreduce",)
    ),
    "AutoSettingsFeature": OldClass("auto_settings.auto_settings_feature", "auto-settings", ("auto-tuning",)),
    "BalancedMoEFeature": OldClass(
        "moe.balanced_moe", "balanced-moe-experts", reason=_NOTHING, flags=("--balanced-moe-experts",)
    ),
    "BufferPadFeature": OldClass(
        "distributed.buffer_pad", "param-and-grad-buffer-pad", reason=_NOTHING, flags=("--param-and-grad-buffer-pad",)
    ),
    "BuildTokenizerFeature": OldClass(
        "tokenizer.build_tokenizer",
        "tokenizer-type",
        reason=_MEGATRON,
        flags=("--tokenizer-name-or-path", "--tokenizer-not-use-fast"),
    ),
    "CkptAccelerationFeature": OldClass("ckpt_acceleration.ckpt_acceleration", "ckpt-acceleration", reason=_MEGATRON, level=0),
    "CoCFeature": OldClass("tensor_parallel.locl_coc", "use-ascend-coc", ("coc",)),
    "CompressActivationFeature": OldClass(
        "compress.compress", "compress-activation", reason=_NOTHING, flags=("--compress-activation",)
    ),
    "CompressOptimizerFeature": OldClass(
        "compress.compress", "compress-optimizer", reason=_NOTHING, flags=("--compress-optimizer",)
    ),
    "ContextParallelFeature": OldClass(
        "context_parallel.context_parallel_feature",
        "context-parallel-size",
        ("ring-attention", "ring-attention-update", "context-parallel", "kv-allgather-cp"),
    ),
    "ContextParallelKvCacheFeature": OldClass(
        "context_parallel.context_parallel_kv_cache",
        "context-parallel-kv-cache-policy",
        ("ring-attention", "ulysses-attention", "hybrid-attention"),
    ),
    "CustomFSDPFeature": OldClass("custom_fsdp.custom_fsdp_feature", "use-custom-fsdp", reason=_MEGATRON),
    "DeepSeekSparseAttention": OldClass(
        "transformer.experimental_attention_variant.dsa",
        "experimental_attention_variant",
        reason=_NOTHING,
        flags=("--experimental-attention-variant", "--use-dsa-absorb"),
    ),
    "DisableGlooGroupFeature": OldClass(
        "disable_gloo_group.disable_gloo_group_feature", "disable-gloo-group", ("gloo-free-checkpoint",)
    ),
    "DistTrainFeature": OldClass("dist_train.dist_train_feature", "dist-train", reason=_NOTHING, flags=("--dist-train",)),
    "DualpipeVFeature": OldClass(
        "pipeline_parallel.dualpipev_feature",
        "schedules-method",
        reason=f"{_NOTHING}: zero-bubble is the schedule here that has a V",
        flags=("--schedules-method", "--dualpipev-dw-detach"),
    ),
    "EnableRecomputeLayersPerPPRank": OldClass(
        "recompute.enable_recompute_layers_per_pp_rank",
        "enable-recompute-layers-per-pp-rank",
        reason="Megatron counts recomputed layers per chunk of a stage",
        flags=("--enable-recompute-layers-per-pp-rank",),
    ),
    "ExpertsPlacementFeature": OldClass(
        "moe.experts_placement", "enable-expert-placement", reason=_NOTHING, flags=("--enable-expert-placement",)
    ),
    "FusedEmaAdamwFeature": OldClass(
        "optimizer.fused_ema_adamw_feature", "optimizer-selection", reason=_NOTHING, flags=("--ema-decay",)
    ),
    "FusedMoEPermuteFeature": OldClass("fusions.fused_moe_permute", "moe-permute-fusion", ("moe-token-permute",)),
    "FusedRoPEFeature": OldClass("fusions.fused_rope", "use-fused-rotary-pos-emb", ("rotary-embedding",), level=0),
    "FusedSoftmaxFeature": OldClass("fusions.fused_softmax", "fused-softmax", reason=_PLATFORM, level=0),
    "FusedSwigluFeature": OldClass("fusions.fused_bias_swiglu", "use-swiglu", ("swiglu",), level=0),
    "FusionAttentionFeature": OldClass(
        "transformer.flash_attention.fusion_attention_v1_feature", "use-flash-attn", ("flash-attention",)
    ),
    "FusionAttentionV2Feature": OldClass(
        "transformer.flash_attention.fusion_attention_v2_feature", "use-fusion-attn-v2", ("flash-attention",)
    ),
    "GenerateMaskFeature": OldClass(
        "transformer.flash_attention.generate_mask_feature",
        "no-create-attention-mask-in-dataloader",
        ("shared-attention-mask",),
    ),
    "GroupedMatmulFeature": OldClass("fusions.grouped_matmul", "grouped-matmul", ("moe-grouped-gemm",), level=0),
    "HcclBufferAdaptiveFeature": OldClass(
        "hccl_buffer.hccl_buffer_adaptive",
        "hccl-group-buffer-adaptive",
        reason=_NOTHING,
        flags=("--hccl-group-buffer-adaptive", "--hccl-ep-group-buffer-adaptive-factor"),
    ),
    "HcclBufferSetFeature": OldClass(
        "hccl_buffer.hccl_buffer_set", "hccl-group-buffer", reason=_NOTHING, flags=("--hccl-group-buffer",)
    ),
    "HcclOpModeSetFeature": OldClass(
        "hccl_buffer.hccl_op_mode_set", "hccl-op-mode", reason=_NOTHING, flags=("--hccl-op-mode",)
    ),
    "LayerZeroFeature": OldClass(
        "distributed.layerzero", "layerzero", reason=_NOTHING, flags=("--layerzero", "--layerzero-config")
    ),
    "LlavaModel": OldClass("llava.llava_multimodal", "llava-multimodal", reason=_NOTHING, level=0),
    "LowPrecisionOptimizerFeature": OldClass(
        "optimizer.low_precision_optimizer_feature",
        "low-precision-optimizer",
        reason=f"{_NOTHING}: Megatron has --use-precision-aware-optimizer",
        level=0,
        flags=("--quant-states", "--quant-grads"),
    ),
    "MC2Feature": OldClass("tensor_parallel.mc2", "use-ascend-mc2", ("mc2",)),
    "MLAFeature": OldClass(
        "transformer.multi_head_latent_attention.mla_feature",
        "multi-latent-attention",
        reason=_MEGATRON,
        flags=("--multi-head-latent-attention", "--qk-rope-head-dim", "--qk-nope-head-dim"),
    ),
    "MegatronBasicFeature": OldClass(
        "megatron_basic.megatron_basic", "megatron-basic", ("rms-norm", "swiglu"), reason=_PLATFORM, level=0
    ),
    "MegatronMcoreRearrangeFeature": OldClass(
        "transformer.module_rearrange.mcore_rearrange", "mcore-rearrange", reason=_PLATFORM, level=0
    ),
    "MindSporePatchFeature": OldClass(
        "ai_framework.ms_patch_feature", "mindspore-patch", reason=_NOTHING, level=0, flags=("--ai-framework",)
    ),
    "MoEAllGatherOverLapFeature": OldClass(
        "moe.moe_allgather_overlap", "moe-allgather-overlap-comm", ("moe-allgather-overlap",)
    ),
    "MoEAlltoAllMC2Feature": OldClass(
        "moe.moe_alltoall_mc2",
        "moe-alltoall-mc2",
        reason=f"{_NOTHING}: moe-alltoall-overlap hides the exchange",
        flags=("--moe-alltoall-mc2",),
    ),
    "MoEAlltoAllOverLapFeature": OldClass("moe.moe_alltoall_overlap", "moe-alltoall-overlap-comm", ("moe-alltoall-overlap",)),
    "MoEFixRouterFeature": OldClass("moe.moe_fix_router", "fix-router", reason=_NOTHING, level=0, flags=("--fix-router",)),
    "MoEFwdBwdOverlapFeature": OldClass(
        "moe.fb_overlap",
        "moe-fb-overlap",
        reason=f"{_NOTHING}: moe-alltoall-overlap hides the all-to-alls inside a micro-batch",
        flags=("--moe-fb-overlap", "--moe-unperm2-mem-optim-swap"),
    ),
    "MoEGmmFeature": OldClass("moe.gmm", "moe-grouped-gemm", ("moe-grouped-gemm", "grouped-matmul-add")),
    "MoESharedExpertsFeature": OldClass("moe.shared_expert", "n-shared-experts", ("moe-shared-experts",), level=0),
    "MoETpExtendEpFeature": OldClass(
        "moe.tp_extend_ep",
        "moe-tp-extend-ep",
        ("moe-tp-extend-ep", "moe-allgather-dispatcher", "moe-alltoall-dispatcher"),
    ),
    "MoEZeroMemoryFeature": OldClass("moe.moe_zero_memory", "moe-zero-memory", ("moe-zero-memory",)),
    "MultiParameterFeature": OldClass(
        "pipeline_parallel.multi_parameter",
        "use-multiparameter-pipeline-model-parallel",
        reason=_NOTHING,
        flags=("--use-multiparameter-pipeline-model-parallel",),
    ),
    "MuonOptimizerFeature": OldClass(
        "optimizer.muon_optimizer_feature",
        "muon-optimizer",
        reason=f"{_NOTHING}: Megatron 0.16 and later have --optimizer muon",
        level=0,
    ),
    "NPUDataDumpFeature": OldClass(
        "functional.npu_datadump", "npu-datadump", reason=f"{_NOTHING}: call msprobe in the script", flags=("--npu-datadump",)
    ),
    "NPUDeterministicFeature": OldClass("functional.npu_deterministic", "npu-deterministic", ("deterministic",)),
    "NoopLayersFeature": OldClass("pipeline_parallel.noop_layers", "noop-layers", ("noop-layers",)),
    "OptimizeP2PCommFeature": OldClass("pipeline_parallel.optimize_p2p_comm", "optimize-p2p-comm", reason=_MEGATRON),
    "OptimizeSendRecvCommFeature": OldClass(
        "pipeline_parallel.optimize_send_recv_comm",
        "optimize-send-recv-comm",
        reason=_NOTHING,
        flags=("--optimize-send-recv-comm",),
    ),
    "PipelineModelParallelLayoutFeature": OldClass(
        "pipeline_parallel.pipeline_model_parallel_layout_feature", "pipeline-model-parallel-layout", reason=_MEGATRON
    ),
    "ProfileFeature": OldClass("functional.profile", "profile", ("profiler",)),
    "ProfilerDefaultFeature": OldClass("functional.profiler_default", "profiler-default", ("profiler",), level=0),
    "QADQuantEngineFeature": OldClass(
        "qad.qad_quant_engine", "qad-quant-engine", reason=_NOTHING, level=0, flags=("--qad-enable",)
    ),
    "QATQuantEngineFeature": OldClass(
        "qat.qat_quant_engine", "qat-quant-engine", reason=_NOTHING, flags=("--qat-scheme", "--qat-quant-block-size")
    ),
    "QosFeature": OldClass("qos.qos_feature", "aiqos", reason=_NOTHING, flags=("--aiqos", "--aiqos-mode", "--aiqos-schedule")),
    "RecomputeActivationFeature": OldClass(
        "recompute.activation_function", "recompute-activation-function", ("activation-recompute",)
    ),
    "RecomputeMethodFeature": OldClass("recompute.recompute_method", "recompute-method", reason=_MEGATRON),
    "RecomputeNormFeature": OldClass("recompute.norm_function", "recompute-norm", ("norm-recompute",)),
    "ReplaceIndexPutFeature": OldClass("tensor_parallel.vocab_parallel", "vocab-parallel", reason=_PLATFORM),
    "RequirementsBasicFeature": OldClass(
        "megatron_basic.requirements_basic",
        "requirements-basic",
        reason=_PLATFORM,
        level=0,
        flags=("--optimizer-selection",),
    ),
    "ResetAttentionMaskFeature": OldClass(
        "transformer.flash_attention.reset_attention_mask_feature", "reset-attention-mask", ("eod-reset",)
    ),
    "ResetBucketGroupOrderFeature": OldClass(
        "distributed.reset_bucket_group_order_feature",
        "reset-bucket-group-order",
        reason=_NOTHING,
        flags=("--reset-bucket-group-order",),
    ),
    "ReuseFP32Param": OldClass("memory.reuse_fp32_param", "reuse-fp32-param", ("reuse-fp32-param",)),
    "RiPipeSchedulesAdvanceFeature": OldClass(
        "pipeline_parallel.ripipe_schedules_feature", "recompute-in-advance", ("recompute-in-advance",)
    ),
    "RiPipeSchedulesBubbleFeature": OldClass(
        "pipeline_parallel.ripipe_schedules_feature", "recompute-in-bubble", ("recompute-in-bubble",)
    ),
    "SmartSwapFeature": OldClass(
        "memory.smart_swap",
        "smart-swap",
        reason=f"{_NOTHING}: swap-attention, swap-optimizer and adaptive-recompute move tensors to the host",
        flags=("--smart-swap",),
    ),
    "SwapAttentionFeature": OldClass("memory.swap_attention", "swap-attention", ("swap-attention",)),
    "SwapLayerInputFeature": OldClass(
        "memory.swap_layer_input", "swap-layer-input", reason=_NOTHING, flags=("--swap-layer-input",)
    ),
    "SwapOptimizerFeature": OldClass("optimizer.swap_optimizer_feature", "swap-optimizer", ("swap-optimizer",)),
    "TP2dFeature": OldClass("tensor_parallel.tp_2d", "tp-2d", ("tensor-parallel-2d",)),
    "TTPFeature": OldClass("ttp.ttp_feature", "ttp_enabled", reason=_NOTHING, flags=("--ttp-enabled",)),
    "TflopsCalculateFeature": OldClass("functional.tflops_calculate", "op-cal-tflops", ("tflops",)),
    "TorchFullyShardedDataParallelFeature": OldClass(
        "distributed.torch_fully_sharded_data_parallel", "use-torch-fsdp2", reason=_MEGATRON, flags=("--fsdp2-config-path",)
    ),
    "TransformerEngineBasicFeature": OldClass(
        "megatron_basic.transformer_engine_basic",
        "transformer-engine-basic",
        reason="Megatron's local layers are used, and features act on them",
        level=0,
    ),
    "UlyssesContextParallelFeature": OldClass(
        "context_parallel.ulysses_context_parallel", "context-parallel-size", ("ulysses-attention", "hybrid-attention")
    ),
    "UnalignedLinearFeature": OldClass(
        "tensor_parallel.unaligned_linear_feature", "unaligned-linear", reason=_NOTHING, flags=("--unaligned-linear",)
    ),
    "UnalignedPipelineFeature": OldClass(
        "pipeline_parallel.unaligned_pineline_feature",
        "pipeline-num-transformer-layers",
        reason="Megatron has --pipeline-model-parallel-layout",
        flags=("--pipeline-num-transformer-layers",),
    ),
    "VariableSequenceLengthFeature": OldClass(
        "pipeline_parallel.variable_seq_length", "variable-seq-lengths", ("dynamic-shapes",)
    ),
    "VirtualOptimizerFeature": OldClass(
        "optimizer.virtual_optimizer",
        "virtual-optimizer",
        reason=f"{_NOTHING}: swap-optimizer keeps the optimizer state on the host",
        flags=("--virtual-optimizer",),
    ),
}
"""Feature classes of MindSpeed by name."""


class StandIn(OwnFeature):
    """Base of the classes with MindSpeed's names. A consumer may list them, and derive from them to add patches of its own."""

    old: ClassVar[OldClass]

    def __init__(self, feature_name: str = "", optimization_level: int | None = None) -> None:
        level = self.old.level if optimization_level is None else optimization_level
        MindSpeedFeature.__init__(self, feature_name or self.old.name, level)
        self.names = self.old.features

    def register_args(self, parser: ArgumentParser) -> None:
        for name in self.names:
            register_old_flags(parser, name)
        for flag in self.old.flags:
            if flag in BY_FLAG and flag not in parser._option_string_actions:
                takes_value = BY_FLAG[flag].takes != "nothing"
                parser.add_argument(
                    flag, help=self.old.reason, **({"default": None} if takes_value else {"action": "store_true"})
                )

    def is_need_apply(self, args: Namespace) -> bool:
        return MindSpeedFeature.is_need_apply(self, args)


@functools.cache
def stand_in(name: str) -> type[StandIn]:
    """Return the class with a name of MindSpeed's. Raises KeyError for other names."""
    old = CLASSES[name]
    does = f"stands for {' and '.join(old.features)}" if old.features else f"stands for nothing: {old.reason}"
    entries = {"old": old, "__doc__": f"{name} of MindSpeed {does}.", "__module__": f"{PACKAGE}.{old.module}"}
    return type(name, (StandIn,), entries)


def classes_in(module: str) -> list[str]:
    """Return the class names of a module of MindSpeed's features, or of a package above it."""
    inner = module.removeprefix(PACKAGE).removeprefix(".")
    return [name for name, old in CLASSES.items() if not inner or f"{old.module}.".startswith(f"{inner}.")]
