"""Fields of a job that sizes follow from: processes, layout, shape of the model, batch, platform. Light, data only."""

from functools import partial

from mindspeed.job import derivations as derive
from mindspeed.job.fact import fact, flag

_latent = partial(fact, derive=derive.of_latent_attention, unit="numbers")
"""Declare a width of multi-latent attention."""


class ShapeFields:
    """The sizes of a job, and what it is planned for."""

    # processes and layout
    world_size: int = fact("number of processes", unit="processes")
    ranks_per_node: int = fact("number of processes per node", unit="processes")
    tp: int = fact("tensor-parallel size", "tensor_model_parallel_size", unit="processes", default=1)
    pp: int = fact("pipeline-parallel size (number of stages)", "pipeline_model_parallel_size", unit="stages", default=1)
    vpp: int = fact(
        "virtual pipeline size (number of model chunks per stage)",
        "num_virtual_stages_per_pipeline_rank",
        "num_layers_per_virtual_pipeline_stage",
        attributes=("virtual_pipeline_model_parallel_size",),
        derive=derive.chunks,
        derive_built=derive.built_chunks,
        unit="chunks",
        default=1,
    )
    cp: int = fact("context-parallel size", "context_parallel_size", unit="processes", default=1)
    ep: int = fact("expert-parallel size", "expert_model_parallel_size", unit="processes", default=1)

    # shape of the model
    num_layers: int = fact("transformer layers, or layers of a hybrid pattern", "num_layers", unit="layers")
    hybrid_layer_pattern: str = fact(
        "pattern of a HybridModel, one character per layer; empty = a GPTModel",
        "hybrid_layer_pattern",
        attributes=(),
        since="0.17",
        default="",
    )
    hidden_size: int = fact("hidden size", "hidden_size", unit="numbers")
    ffn_hidden_size: int = fact(
        "hidden size of the MLP", "ffn_hidden_size", "hidden_size", derive=derive.mlp_size, unit="numbers"
    )
    num_attention_heads: int = fact("attention heads", "num_attention_heads", unit="heads")
    num_query_groups: int = fact(
        "number of key/value heads of grouped-query attention",
        "num_query_groups",
        "group_query_attention",
        attributes=("num_query_groups", "num_attention_heads"),
        derive=derive.query_groups,
        derive_built=derive.built_query_groups,
        unit="heads",
    )
    kv_channels: int = fact("width of one attention head", "kv_channels", unit="numbers")
    num_experts: int = fact(
        "number of experts of a MoE layer; 0 = a dense model",
        "num_experts",
        attributes=("num_moe_experts",),
        derive=derive.number_or_zero,
        unit="experts",
        least=0,
    )
    moe_ffn_hidden_size: int = fact(
        "hidden size of one expert",
        "moe_ffn_hidden_size",
        "ffn_hidden_size",
        "hidden_size",
        attributes=("moe_ffn_hidden_size",),
        derive=derive.expert_size,
        unit="numbers",
    )
    router_topk: int = fact("number of experts per token in a MoE layer", "moe_router_topk", unit="experts")
    shared_expert_hidden_size: int = fact(
        "hidden size of the shared experts of a MoE layer; 0 = none",
        "moe_shared_expert_intermediate_size",
        derive=derive.number_or_zero,
        unit="numbers",
        least=0,
    )
    grouped_experts: bool = fact(
        "the experts of a MoE layer are grouped into one module", "moe_grouped_gemm", derive=derive.any_set
    )
    transformer_engine_experts: bool = fact(
        "the experts of a MoE layer are Transformer Engine's grouped experts",
        "transformer_impl",
        "moe_grouped_gemm",
        attributes=(),
        derive=derive.transformer_engine_experts,
    )
    expert_capacity_factor: float = fact(
        "maximum number of tokens of an expert, as a multiple of its balanced share; 0 = unlimited",
        "moe_expert_capacity_factor",
        unit="shares",
        least=0,
        default=0.0,
    )
    padded_experts: bool = flag("every expert input is padded to the expert's capacity", "moe_pad_expert_input_to_capacity")
    latent_expert_size: int = fact(
        "width of the latent vectors that experts process; 0 = none",
        "moe_latent_size",
        unit="numbers",
        least=0,
        since="0.16",
        default=0,
    )
    overlapped_micro_batches: bool = flag(
        "Megatron overlaps expert all-to-alls with compute of another micro-batch", "overlap_moe_expert_parallel_comm"
    )
    vocab_size: int = fact("vocabulary size after padding", "padded_vocab_size", attributes=(), unit="tokens")
    tied_embeddings: bool = fact(
        "the embedding and the output layer share one weight",
        "untie_embeddings_and_output_weights",
        attributes=(),
        derive=derive.tied_embeddings,
    )
    seq_length: int = fact("number of tokens per sample", "seq_length", attributes=(), unit="tokens")
    micro_batch_size: int = fact("number of samples per micro-batch", "micro_batch_size", attributes=(), unit="samples")
    global_batch_size: int = fact(
        "number of samples per step over all ranks", "global_batch_size", attributes=(), unit="samples"
    )
    normalization: str = fact("normalization: LayerNorm or RMSNorm", "normalization", words=("LayerNorm", "RMSNorm"))
    zero_centered_norm: bool = fact(
        "norms multiply by 1 + weight, so weights are zero-centered (layernorm-1p)",
        attributes=("layernorm_zero_centered_gamma",),
        derive_built=derive.any_set,
    )
    gated_linear_unit: bool = fact(
        "the MLP is gated (SwiGLU)", "swiglu", "quick_geglu", attributes=("gated_linear_unit",), derive=derive.any_set
    )
    linear_bias: bool = fact("linear layers have biases", "add_bias_linear")
    activation: str = fact(
        "activation function of the MLP: gelu, silu ...",
        "swiglu",
        "squared_relu",
        "quick_geglu",
        attributes=("activation_func",),
        derive=derive.activation,
        derive_built=derive.built_activation,
        words=derive.ACTIVATIONS,
    )
    rotary: bool = fact(
        "positions are rotary, not learned",
        "position_embedding_type",
        "use_rotary_position_embeddings",
        attributes=(),
        derive=derive.rotary,
    )
    multi_latent_attention: bool = fact(
        "keys and values are computed from a short latent vector (multi-latent attention)", "multi_latent_attention"
    )
    q_lora_rank: int = _latent(
        "width of the latent vector of queries (multi-latent attention); 0 = none", "q_lora_rank", least=0
    )
    kv_lora_rank: int = _latent("width of the latent vector of keys and values (multi-latent attention)", "kv_lora_rank")
    qk_head_dim: int = _latent("width per head of queries and keys, non-rotary part (multi-latent attention)", "qk_head_dim")
    qk_pos_emb_head_dim: int = _latent(
        "width per head of queries and keys with rotary positions (multi-latent attention)", "qk_pos_emb_head_dim"
    )
    v_head_dim: int = _latent("width per head of values (multi-latent attention)", "v_head_dim")
    mtp_num_layers: int = fact(
        "number of layers for multi-token prediction, or depths of a hybrid pattern; 0 = none",
        "mtp_num_layers",
        derive=derive.number_or_zero,
        unit="layers",
        least=0,
    )
    dtype: str = fact("data type: fp32, bf16 or fp16", "bf16", "fp16", derive=derive.dtype, words=("fp32", "bf16", "fp16"))
    low_precision: bool = flag("linear layers multiply in fp8 or fp4", "fp8", "fp4", derive=derive.any_set)
    low_precision_recipe: str = fact(
        "recipe by which linear layers multiply in fp8: delayed, tensorwise, blockwise, mxfp8 or custom; or fp4, or none",
        "fp8_recipe",
        "fp8",
        "fp4",
        derive=derive.low_precision_recipe,
        default="none",
    )
    cuda_graphs: bool = flag(
        "layers are captured as CUDA graphs",
        "cuda_graph_impl",
        "enable_cuda_graph",
        "external_cuda_graph",
        derive=derive.cuda_graphs,
    )
    platform: str = fact("platform: npu, cuda or cpu")
    megatron: str = fact("version of megatron-core")
