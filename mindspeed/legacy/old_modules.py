"""Import names of MindSpeed that have no counterpart here, and what does their work instead."""

from __future__ import annotations

from typing import Final

NOTHING: Final = "nothing here replaces it"

OLD_MODULES: Final[dict[str, tuple[str, ...] | str]] = {
    "mindspeed.args_utils": "get_mindspeed_args, get_full_args and process_args are the names that exist in it",
    "mindspeed.arguments": "process_args is the name that exists in it; Megatron-LM's parser reads everything else",
    "mindspeed.auto_settings": ("auto-tuning",),
    "mindspeed.auto_tuning": ("auto-tuning",),
    "mindspeed.checkpointing": "Megatron writes the checkpoints; features add to them by the hooks save_extra and load_extra",
    "mindspeed.core": "'mindspeed features list' shows the features, which do the work of its modules",
    "mindspeed.core.auto_parallel": ("auto-tuning",),
    "mindspeed.core.auto_parallel.mm_search": f"{NOTHING}: auto-tuning searches layouts of language models only",
    "mindspeed.core.context_parallel": ("context-parallel",),
    "mindspeed.core.context_parallel.adaptive_context_parallel": ("adaptive-cp",),
    "mindspeed.core.context_parallel.adaptor": "context-parallel and its algorithm patch Megatron's core attention themselves",
    "mindspeed.core.context_parallel.dot_product_attention": "context-parallel patches Megatron's core attention itself",
    "mindspeed.core.context_parallel.get_batch_utils": (
        "context-parallel slices every batch, and eod-reset reads from the batch where documents end: nothing has to be set"
    ),
    "mindspeed.core.context_parallel.model_parallel_utils": (
        "ring-attention and hybrid-attention make their groups themselves, and mindspeed.context_parallel.groups has the layout"
    ),
    "mindspeed.core.context_parallel.ring_context_parallel": (
        "--features ring-attention, or mindspeed.context_parallel.ring in a trainer of your own"
    ),
    "mindspeed.core.context_parallel.ring_context_parallel.context_parallel_kv_cache": (
        "the settings keep and interval of ring-attention, ulysses-attention and hybrid-attention"
    ),
    "mindspeed.core.context_parallel.rotary_pos_embedding_utils": "context-parallel gives every rank its part of the positions",
    "mindspeed.core.context_parallel.ulysses_context_parallel": ("ulysses-attention",),
    "mindspeed.core.context_parallel.ulysses_context_parallel.unaligned_cp": (
        "mindspeed.context_parallel.heads exchanges the sequence for heads between ranks"
    ),
    "mindspeed.core.context_parallel.utils": "mindspeed.context_parallel has the algorithms in plain torch",
    "mindspeed.core.distributed": "Megatron's own data parallelism; async-ddp and async-param-gather overlap its communication",
    "mindspeed.core.distributed.custom_fsdp": f"{NOTHING}: Megatron has --use-megatron-fsdp",
    "mindspeed.core.distributed.layerzero": NOTHING,
    "mindspeed.core.fp8_utils": f"{NOTHING}: the features compute in fp32, bf16 and fp16",
    "mindspeed.core.fusions": "the operators of mindspeed.ops",
    "mindspeed.core.fusions.fused_bias_swiglu": "--features swiglu, or mindspeed.ops.swiglu",
    "mindspeed.core.fusions.fused_moe_permute": ("moe-token-permute",),
    "mindspeed.core.fusions.fused_rms_norm": "--features rms-norm, or mindspeed.ops.rms_norm",
    "mindspeed.core.fusions.fused_rope": "--features rotary-embedding, or mindspeed.ops.npu_rotary_position_embedding",
    "mindspeed.core.fusions.grouped_matmul": "--features moe-grouped-gemm, or mindspeed.ops.npu_gmm",
    "mindspeed.core.fusions.ring_attn_update": "--features ring-attention-update, or mindspeed.ops.npu_ring_attention_update",
    "mindspeed.core.fusions.rms_norm": "--features rms-norm, or mindspeed.ops.rms_norm",
    "mindspeed.core.megatron_basic": "the platform of every plan makes Megatron run on the device",
    "mindspeed.core.megatron_basic.count_zero_fix": "Megatron's own optimizers count the zeros of gradients",
    "mindspeed.core.memory": "the features adaptive-recompute, swap-attention and swap-optimizer move memory to the host",
    "mindspeed.core.memory.adaptive_recomputing": ("adaptive-recompute",),
    "mindspeed.core.memory.reuse_param": ("reuse-fp32-param",),
    "mindspeed.core.memory.swap_attention": ("swap-attention",),
    "mindspeed.core.memory.swap_layer_input": f"{NOTHING}: swap-attention moves activations of attention, not inputs of layers",
    "mindspeed.core.models": "Megatron's own models; features exchange modules by the hook layer_spec",
    "mindspeed.core.multi_modal": NOTHING,
    "mindspeed.core.optimizer": "Megatron's own optimizers, with distributed-optimizer, reuse-fp32-param and swap-optimizer",
    "mindspeed.core.optimizer.adamw": "torch.optim.AdamW",
    "mindspeed.core.optimizer.low_precision": f"{NOTHING}: Megatron has --use-precision-aware-optimizer",
    "mindspeed.core.optimizer.muon": f"{NOTHING}: Megatron 0.16 and later have --optimizer muon",
    "mindspeed.core.optimizer.swap_optimizer": ("swap-optimizer",),
    "mindspeed.core.parallel_state": "megatron.core.parallel_state; features make further groups by the hook groups_created",
    "mindspeed.core.performance": NOTHING,
    "mindspeed.core.pipeline_parallel": ("pipeline-parallel", "virtual-pipeline", "nano-pipe", "zero-bubble"),
    "mindspeed.core.pipeline_parallel.dualpipev": f"{NOTHING}: zero-bubble is the schedule here that has a V",
    "mindspeed.core.pipeline_parallel.fb_overlap": f"{NOTHING}: moe-alltoall-overlap hides all-to-alls inside a micro-batch",
    "mindspeed.core.pipeline_parallel.noop_layers": ("noop-layers",),
    "mindspeed.core.pipeline_parallel.ripipe_schedules": ("recompute-in-bubble", "recompute-in-advance"),
    "mindspeed.core.pipeline_parallel.variable_seq_length": ("dynamic-shapes",),
    "mindspeed.core.qat": NOTHING,
    "mindspeed.core.simple_parallel_cfg": "World of mindspeed.job.world holds the sizes of a job",
    "mindspeed.core.singleton_meta": NOTHING,
    "mindspeed.core.ssm": NOTHING,
    "mindspeed.core.tensor_parallel": ("tensor-parallel", "sequence-parallel"),
    "mindspeed.core.tensor_parallel.ascend_turbo": ("mc2",),
    "mindspeed.core.tensor_parallel.coc_feature": ("coc",),
    "mindspeed.core.tensor_parallel.lcal_coc": ("coc",),
    "mindspeed.core.tensor_parallel.mc2_feature": ("mc2",),
    "mindspeed.core.tensor_parallel.random": (
        "megatron.core.tensor_parallel.random has one; activation-recompute and norm-recompute are the features"
    ),
    "mindspeed.core.tensor_parallel.tp_2d": ("tensor-parallel-2d",),
    "mindspeed.core.tensor_parallel_y_union_cp": ("tensor-parallel-2d",),
    "mindspeed.core.transformer": "Megatron's own transformer; features exchange modules by the hook layer_spec",
    "mindspeed.core.transformer.flash_attention": ("flash-attention",),
    "mindspeed.core.transformer.flash_attention.alibi": ("alibi",),
    "mindspeed.core.transformer.flash_attention.generate_mask": ("shared-attention-mask",),
    "mindspeed.core.transformer.flash_attention.reset_attention_mask": ("eod-reset",),
    "mindspeed.core.transformer.moe": "Megatron's own experts, with the features whose names begin with moe-",
    "mindspeed.core.transformer.moe.moe_feature.fb_overlap": (
        f"{NOTHING}: moe-alltoall-overlap hides all-to-alls inside a micro-batch"
    ),
    "mindspeed.core.transformer.moe.moe_feature.overlap": ("moe-alltoall-overlap", "moe-allgather-overlap"),
    "mindspeed.core.transformer.moe.moe_feature.tp_extend_ep": ("moe-tp-extend-ep",),
    "mindspeed.core.transformer.moe.moe_layer_overlap_all2all": ("moe-alltoall-overlap",),
    "mindspeed.core.transformer.moe.moe_layer_overlap_allgather": ("moe-allgather-overlap",),
    "mindspeed.core.transformer.transformer": ("norm-recompute", "activation-recompute"),
    "mindspeed.deprecate": "AutoExecuteFunction and NoExecuteFunction are the names that exist in it",
    "mindspeed.features_manager": "'mindspeed features list' shows the features; MindSpeed's list has no class of this name",
    "mindspeed.fsdp": f"{NOTHING}: torch and Megatron have fully sharded data parallelism of their own",
    "mindspeed.functional": "deterministic, profiler and tflops are the features",
    "mindspeed.functional.npu_datadump": f"{NOTHING}: call msprobe in the training script",
    "mindspeed.functional.npu_deterministic": ("deterministic",),
    "mindspeed.functional.profile": ("profiler",),
    "mindspeed.functional.profiler": ("profiler",),
    "mindspeed.functional.tflops_calculate": ("tflops",),
    "mindspeed.initialize": "Megatron initializes, and features take part by the hook groups_created",
    "mindspeed.lite": f"{NOTHING}; operators are in mindspeed.ops, also without Megatron",
    "mindspeed.log_config": "the loggers of mindspeed have the names of its modules",
    "mindspeed.megatron_adaptor": "repatch and get_mindspeed_args are the names that exist in it",
    "mindspeed.mindspore": f"{NOTHING}: the features are for PyTorch",
    "mindspeed.model": "Megatron's own models; features exchange modules by the hook layer_spec",
    "mindspeed.model.transformer": (
        "shared-attention-mask makes the mask, activation-recompute and norm-recompute choose their layers by their settings"
    ),
    "mindspeed.moe": ("deepspeed-moe",),
    "mindspeed.multi_modal": NOTHING,
    "mindspeed.op_builder": "'mindspeed ops build' compiles every operator at once, and mindspeed.ops has them",
    "mindspeed.ops.gmm_mxfp8": f"{NOTHING}: npu_gmm multiplies in fp32, bf16 and fp16",
    "mindspeed.ops.gmm_w4a8": f"{NOTHING}: quant_gmm multiplies int8",
    "mindspeed.ops.grouped_matmul_mc2": f"{NOTHING}: npu_gmm multiplies, and moe-alltoall-overlap hides the exchange",
    "mindspeed.ops.lcal_functional": "mindspeed.ops.lcal_coc has the products that are fused with a collective",
    "mindspeed.ops.npu_apply_fused_adamw_v2": f"{NOTHING}: torch.optim.AdamW(fused=True)",
    "mindspeed.ops.npu_apply_fused_ema_adamw": NOTHING,
    "mindspeed.ops.npu_sparse_lightning_indexer_grad_kl_loss": NOTHING,
    "mindspeed.ops.triton": f"{NOTHING}: the operators that it has are those of gated delta nets",
    "mindspeed.ops.weight_quant_gmm": f"{NOTHING}: quant_gmm takes int8 activations too",
    "mindspeed.optimizer": "Megatron's own optimizers",
    "mindspeed.patch_utils": "MindSpeedPatchesManager, Patch and is_megatron_training_available are the names that exist in it",
    "mindspeed.run": "'mindspeed run' launches a script",
    "mindspeed.te": "Megatron's local layers are used, and features act on them",
    "mindspeed.te.pytorch.attention": "Megatron's core attention is used; context-parallel and flash-attention act on it",
    "mindspeed.te.pytorch.fp8": f"{NOTHING}: the features compute in fp32, bf16 and fp16",
    "mindspeed.te.pytorch.module.checkpoint": "Megatron's own checkpointing; the feature recompute sets it",
    "mindspeed.te.pytorch.module.grouped_linear": ("moe-grouped-gemm",),
    "mindspeed.te.pytorch.module.performance_grouped_linear": ("moe-grouped-gemm",),
    "mindspeed.tokenizer": "Megatron-LM's own tokenizers: --tokenizer-type HuggingFaceTokenizer --tokenizer-model PATH",
    "mindspeed.training": "Megatron-LM's own training loop, and the hooks of features in it",
    "mindspeed.utils": (
        "context-parallel slices every batch, and eod-reset reads from the batch where documents end: nothing has to be set"
    ),
    "mindspeed.utils._gather_hccl": ("gloo-free-checkpoint",),
    "mindspeed.yaml_arguments": "Megatron-LM's own --yaml-cfg",
}
"""Old modules by prefix, of which the longest counts: the features that do its work, or a sentence."""


def replacement(prefix: str) -> str:
    """Describe the replacement of an old module of the table."""
    features = OLD_MODULES[prefix]
    if isinstance(features, str):
        return features
    if len(features) == 1:
        return f"--features {features[0]} takes its place"
    return f"the features {', '.join(features[:-1])} and {features[-1]} take its place"
