"""Every field of the job, declared once: type, meaning, Megatron's default, and Megatron's names for it. Light, data only.

A field without a default is unknown until somebody gives it. One with a default has it in every release and on every platform
that is supported. The command line's options, the reading of Megatron-LM's arguments and of configurations follow from here.
The classes are plain, for a help text needs no pydantic; `mindspeed.job.world.World` is the model.
"""

from typing import Any, Final

from mindspeed.job import derivations as derive
from mindspeed.job.fact import Field, declared, fact, flag
from mindspeed.job.shape_fields import ShapeFields

PLATFORMS: Final = ("npu", "cuda", "cpu")
"""The devices that features run on."""


def _indexer(meaning: str, argument: str, **more: Any) -> Any:
    """Declare a size of the indexer of sparse attention, 0 where attention is not sparse."""
    names = ("experimental_attention_variant", argument)
    return fact(meaning, *names, derive=derive.of_sparse_attention, least=0, since="0.16", default=0, **more)


class Fields(ShapeFields):
    """The values that describe a job."""

    # layers and how they are dealt out
    transformer_engine_layers: bool = fact(
        "layers are Transformer Engine's",
        "transformer_impl",
        attributes=(),
        derive=derive.transformer_engine_layers,
    )
    engine_over_local: bool = flag(
        "Megatron's layer specs for Transformer Engine are used, but an active feature replaces their layers by local ones. "
        "Transformer Engine need not be installed"
    )
    engine_installed: bool = flag("Transformer Engine can be imported on every rank")
    sequence_parallel: bool = flag(
        "tensor-parallel ranks split the sequence outside of linear layers",
        "sequence_parallel",
        derive=derive.sequence_parallel,
    )
    tensor_parallel_overlap: bool = flag(
        "Transformer Engine overlaps tensor-parallel collectives with matrix products", "tp_comm_overlap"
    )
    weight_shards: int = fact(
        "number of ranks over which Megatron's GTP splits each tensor-parallel shard of a weight again; 1 = not split",
        "tensor_parallel_num_weight_shards",
        attributes=("gtp_weight_remat_size",),
        derive=derive.weight_shards,
        derive_built=derive.built_weight_shards,
        since="0.19",
        default=1,
    )
    fsdp: bool = flag(
        "parameters are sharded over data-parallel ranks (FSDP)",
        "use_megatron_fsdp",
        "use_torch_fsdp2",
        attributes=("use_megatron_fsdp",),
        derive=derive.any_set,
    )
    pipeline_layout: bool = flag(
        "layers are assigned to pipeline stages by a layout (pipeline_model_parallel_layout)",
        "pipeline_model_parallel_layout",
        derive=derive.any_set,
    )
    v_placement: bool = flag(
        "stages are placed as a V: each pipeline rank has two model chunks, the second in reverse order of ranks"
    )
    mtp_standalone: bool = flag(
        "the layout has multi-token prediction in an earlier pipeline stage than the output layer",
        "pipeline_model_parallel_layout",
        derive=derive.mtp_standalone,
    )
    first_stage_layers: int = fact(
        "number of layers in the first pipeline stage; 0 = an equal share",
        "decoder_first_pipeline_num_layers",
        attributes=("num_layers_in_first_pipeline_stage",),
        unit="layers",
        least=0,
        default=0,
    )
    last_stage_layers: int = fact(
        "number of layers in the last pipeline stage; 0 = an equal share",
        "decoder_last_pipeline_num_layers",
        attributes=("num_layers_in_last_pipeline_stage",),
        unit="layers",
        least=0,
        default=0,
    )
    embedding_is_layer: bool = flag(
        "the embedding counts as a layer of the first stage", "account_for_embedding_in_pipeline_split"
    )
    loss_is_layer: bool = flag("the output layer counts as a layer of the last stage", "account_for_loss_in_pipeline_split")
    micro_batch_group: int = fact(
        "number of consecutive micro-batches per model chunk with virtual pipelining; 0 = the number of stages",
        "microbatch_group_size_per_vp_stage",
        attributes=(),
        unit="micro-batches",
        least=0,
        default=0,
    )
    ring_exchange: bool = flag("pipeline stages send and receive at the same time (ring exchange)", "use_ring_exchange_p2p")
    delayed_weight_gradients: bool = flag("Megatron delays weight gradients (delay_wgrad_compute)", "delay_wgrad_compute")
    deferred_embedding_gradients: bool = flag(
        "Megatron defers the weight gradient of the output layer (defer_embedding_wgrad_compute)",
        "defer_embedding_wgrad_compute",
    )

    # recomputation and offloading
    recompute_granularity: str = fact(
        "kind of recomputation in backward: none, selective or full",
        "recompute_granularity",
        "recompute_activations",
        derive=derive.recompute_granularity,
        words=("none", "selective", "full"),
        default="none",
    )
    recompute_method: str = fact(
        "how full recomputation selects layers: uniform (all, in equal groups), block (the first ones of a stage) or none",
        "recompute_method",
        words=("none", "uniform", "block"),
        default="none",
    )
    recompute_num_layers: int = fact(
        "full recomputation: number of layers per group (uniform) or of recomputed layers per stage (block); 0 = not set",
        "recompute_num_layers",
        unit="layers",
        least=0,
        default=0,
    )
    recompute_per_rank: bool = flag("block recomputation counts the layers of all model chunks of a rank together")
    recompute_modules: tuple[str, ...] = fact(
        "modules that selective recomputation recomputes",
        "recompute_modules",
        derive=derive.recompute_modules,
        default=("core_attn",),
    )
    partial_checkpoints: bool = flag(
        "activations are recomputed in only some micro-batches",
        attributes=("num_microbatches_with_partial_activation_checkpoints",),
        derive_built=derive.any_given,
    )
    cpu_offloading: bool = flag(
        "Megatron offloads activations of layers to host memory",
        "cpu_offloading_num_layers",
        attributes=("cpu_offloading",),
        derive=derive.any_set,
        since="0.16",
    )
    fine_grained_offloading: bool = flag(
        "Megatron offloads activations of single modules to host memory", "fine_grained_activation_offloading", since="0.16"
    )

    # attention
    windowed_attention: bool = flag(
        "attention uses a sliding window of keys", "window_size", derive=derive.any_given, since="0.15"
    )
    softmax_type: str = fact(
        "softmax of attention: vanilla, off-by-one or learnable",
        "softmax_type",
        words=("vanilla", "off-by-one", "learnable"),
        since="0.15",
        default="vanilla",
    )
    indexer_topk: int = _indexer(
        "number of keys that the indexer of sparse attention (DSA) selects for each query; 0 = attention is not sparse",
        "dsa_indexer_topk",
        unit="keys",
    )
    indexer_heads: int = _indexer("heads of the indexer of sparse attention (DSA)", "dsa_indexer_n_heads", unit="heads")
    indexer_head_dim: int = _indexer(
        "width per head of the indexer of sparse attention (DSA)", "dsa_indexer_head_dim", unit="numbers"
    )
    gated_attention: bool = flag("the attention output is gated", "attention_output_gate", since="0.16")
    qk_clip: bool = flag("query and key weights are clipped between steps (QK clipping)", "qk_clip", since="0.16")
    logged_attention_logits: bool = flag("the largest attention logit is logged", "log_max_attention_logit", since="0.16")
    qk_norm: bool = flag("queries and keys are normalized", "qk_layernorm")
    qkv_bias: bool = flag("the projection of queries, keys and values has a bias", "add_qkv_bias", derive=derive.qkv_bias)
    hybrid_context_parallel: bool = flag(
        "packed samples of different lengths are balanced over context-parallel ranks", "hybrid_context_parallel", since="0.16"
    )

    packed_samples: bool = flag(
        "attention receives documents that are packed into one sequence, with their lengths", "sft", attributes=()
    )

    # MLP and experts
    clamped_activation: bool = flag(
        "the input of the activation function is clamped", "activation_func_clamp_value", derive=derive.any_given, since="0.15"
    )
    shifted_gate: bool = flag(
        "an offset is added to the linear part of gated units", "glu_linear_offset", derive=derive.any_set, since="0.15"
    )
    low_precision_activation_input: bool = flag(
        "the input of the activation function is stored in fp8",
        attributes=("activation_func_fp8_input_store",),
        derive_built=derive.any_set,
    )
    transformer_engine_activation: bool = flag(
        "the activation function is Transformer Engine's", "use_te_activation_func", since="0.15"
    )
    dispatcher: str = fact(
        "how tokens are sent to experts: allgather, alltoall or flex",
        "moe_token_dispatcher_type",
        words=("allgather", "alltoall", "flex"),
    )
    expert_tensor_size: int = fact(
        "number of tensor-parallel ranks that share an expert", "expert_tensor_parallel_size", unit="processes"
    )
    shared_expert_overlap: bool = flag(
        "shared-expert compute is overlapped with the transfers of routed experts", "moe_shared_expert_overlap"
    )
    router_balancing: tuple[str, ...] = fact(
        "how the router balances experts: aux_loss, sinkhorn, none ...",
        "moe_router_load_balancing_type",
        derive=derive.balancing,
        default=("aux_loss",),
    )
    router_score: str = fact("score function of the router: softmax or sigmoid", "moe_router_score_function", default="softmax")
    router_dtype: str = fact(
        "data type of the router; none = that of the model",
        "moe_router_dtype",
        words=("none", "fp32", "fp64"),
        default="none",
    )
    router_groups: int = fact(
        "number of expert groups that the router selects from; 0 = none",
        "moe_router_num_groups",
        unit="groups",
        least=0,
        default=0,
    )
    router_scaling: float = fact(
        "scaling factor of the scores of selected experts; 0 = none",
        "moe_router_topk_scaling_factor",
        unit="factor",
        least=0,
        default=0.0,
    )
    router_bias: bool = flag("the router balances experts by a bias per expert", "moe_router_enable_expert_bias")
    forced_balancing: bool = flag("the router distributes tokens evenly and ignores scores", "moe_router_force_load_balancing")
    padded_routing: bool = flag(
        "inputs of experts are padded for fp8 or fp4 matrix products",
        "moe_router_padding_for_quantization",
        "moe_router_padding_for_fp8",
        derive=derive.any_set,
    )
    probabilities_on_input: bool = flag(
        "expert inputs are multiplied by the router's probabilities", "moe_apply_probs_on_input"
    )
    drop_policy: str = fact(
        "tokens that a full expert drops: those of the lowest probability (probs) or the last ones (position)",
        "moe_token_drop_policy",
        words=("probs", "position"),
        default="probs",
    )
    moe_layers: int = fact(
        "number of layers with experts, E in a hybrid pattern; not set = all layers",
        "moe_layer_freq",
        "num_layers",
        "num_experts",
        attributes=("moe_layer_freq", "num_layers", "num_moe_experts"),
        derive=derive.layers_with_experts,
        unit="layers",
        least=0,
    )

    # optimizer
    optimizer: str = fact("optimizer: adam, sgd or another one of Megatron", "optimizer", derive=derive.optimizer)
    distributed_optimizer: bool = flag(
        "optimizer states are sharded over data-parallel ranks",
        "use_distributed_optimizer",
        derive=derive.distributed_optimizer,
    )
    precision_aware_optimizer: bool = flag(
        "precision-aware optimizer of Transformer Engine, which stores main weights itself", "use_precision_aware_optimizer"
    )
    offloaded_optimizer: bool = flag("the optimizer keeps main weights and states in host memory", "optimizer_cpu_offload")
    shared_gradient_buffer: bool = flag(
        "the all-gather of mxfp8 weights uses the gradient buffer",
        "reuse_grad_buf_for_mxfp8_param_ag",
        derive=derive.shared_gradient_buffer,
    )
    low_precision_weights: bool = flag(
        "weights are stored in fp8 or fp4",
        "fp8_param_gather",
        "fp4_param_gather",
        "fp4_param",
        attributes=("fp8_param", "fp4_param"),
        derive=derive.low_precision_weights,
    )
    meta_device: bool = flag("weights are created on the meta device", "init_model_with_meta_device")
    symmetric_reduction: bool = flag(
        "tensor-parallel sums go through symmetric memory", "symmetric_ar_type", derive=derive.any_given
    )
    checkpoint_format: str = fact(
        "checkpoint format: torch_dist, torch or another one of Megatron", "ckpt_format", attributes=(), default="torch_dist"
    )


FIELDS: Final[dict[str, Field]] = declared(Fields)
"""Every field of a job, by name."""

LATENT_WIDTHS: Final = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
"""Fields that a model with multi-latent attention has beside ``q_lora_rank``."""
