"""Fields of a job that sizes follow from: processes, layout, shape of the model, batch, platform. Light, data only."""

from __future__ import annotations

from typing import Annotated

from mindspeed.job import derivations as derive
from mindspeed.job.fact import Fact


class ShapeFields:
    """The sizes of a job, and what it is planned for."""

    # processes and layout
    world_size: Annotated[int, Fact("number of processes", unit="processes")]
    ranks_per_node: Annotated[int, Fact("processes of one node", unit="processes")]
    tp: Annotated[int, Fact("tensor-parallel size", ("tensor_model_parallel_size",), unit="processes")] = 1
    pp: Annotated[int, Fact("pipeline-parallel size (stages)", ("pipeline_model_parallel_size",), unit="stages")] = 1
    vpp: Annotated[
        int,
        Fact(
            "virtual pipeline size (model chunks per stage)",
            ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"),
            ("virtual_pipeline_model_parallel_size",),
            derive.chunks,
            derive.built_chunks,
            unit="chunks",
        ),
    ] = 1
    cp: Annotated[int, Fact("context-parallel size", ("context_parallel_size",), unit="processes")] = 1
    ep: Annotated[int, Fact("expert-parallel size", ("expert_model_parallel_size",), unit="processes")] = 1

    # shape of the model
    num_layers: Annotated[int, Fact("transformer layers", ("num_layers",), unit="layers")]
    hidden_size: Annotated[int, Fact("hidden size", ("hidden_size",), unit="numbers")]
    ffn_hidden_size: Annotated[
        int, Fact("hidden size of the MLP", ("ffn_hidden_size", "hidden_size"), derive=derive.mlp_size, unit="numbers")
    ]
    num_attention_heads: Annotated[int, Fact("attention heads", ("num_attention_heads",), unit="heads")]
    num_query_groups: Annotated[
        int,
        Fact(
            "key/value heads of grouped-query attention",
            ("num_query_groups", "group_query_attention"),
            ("num_query_groups", "num_attention_heads"),
            derive.query_groups,
            derive.built_query_groups,
            unit="heads",
        ),
    ]
    kv_channels: Annotated[int, Fact("width of one attention head", ("kv_channels",), unit="numbers")]
    num_experts: Annotated[
        int,
        Fact(
            "experts of a MoE layer; 0 is a dense model",
            ("num_experts",),
            ("num_moe_experts",),
            derive.number_or_zero,
            least=0,
            unit="experts",
        ),
    ]
    moe_ffn_hidden_size: Annotated[int, Fact("hidden size of one expert", ("moe_ffn_hidden_size",), unit="numbers")]
    router_topk: Annotated[int, Fact("experts of each token in a MoE layer", ("moe_router_topk",), unit="experts")]
    shared_expert_hidden_size: Annotated[
        int,
        Fact(
            "hidden size of the shared expert of a MoE layer; 0 is none",
            ("moe_shared_expert_intermediate_size",),
            derive=derive.number_or_zero,
            least=0,
            unit="numbers",
        ),
    ]
    grouped_experts: Annotated[
        bool,
        Fact(
            "the experts of a MoE layer are one module with grouped products",
            ("moe_grouped_gemm",),
            derive=derive.any_set,
        ),
    ]
    transformer_engine_experts: Annotated[
        bool,
        Fact(
            "the experts of a MoE layer are Transformer Engine's grouped ones",
            ("transformer_impl", "moe_grouped_gemm"),
            (),
            derive.transformer_engine_experts,
            by_platform=("transformer_impl",),
        ),
    ]
    expert_capacity_factor: Annotated[
        float,
        Fact(
            "rows that an expert takes at most, over its balanced share; 0 is no limit",
            ("moe_expert_capacity_factor",),
            least=0,
            unit="shares",
        ),
    ] = 0.0
    padded_experts: Annotated[
        bool,
        Fact(
            "every expert gets as many rows as its capacity",
            ("moe_pad_expert_input_to_capacity",),
        ),
    ] = False
    latent_expert_size: Annotated[
        int,
        Fact(
            "width of the latent vectors that experts work on; 0 is none",
            ("moe_latent_size",),
            least=0,
            since="0.16",
            unit="numbers",
        ),
    ] = 0
    overlapped_micro_batches: Annotated[
        bool,
        Fact(
            "Megatron hides the transfers of experts behind another micro-batch",
            ("overlap_moe_expert_parallel_comm",),
        ),
    ] = False
    vocab_size: Annotated[int, Fact("size of the padded vocabulary", ("padded_vocab_size",), (), unit="tokens")]
    tied_embeddings: Annotated[
        bool,
        Fact(
            "the embedding and the output layer share one weight",
            ("untie_embeddings_and_output_weights",),
            (),
            derive.tied_embeddings,
        ),
    ]
    seq_length: Annotated[int, Fact("tokens per sample", ("seq_length",), (), unit="tokens")]
    micro_batch_size: Annotated[int, Fact("samples per micro-batch", ("micro_batch_size",), (), unit="samples")]
    global_batch_size: Annotated[int, Fact("samples per step over all ranks", ("global_batch_size",), (), unit="samples")]
    normalization: Annotated[str, Fact("LayerNorm or RMSNorm", ("normalization",), words=("LayerNorm", "RMSNorm"))]
    zero_centered_norm: Annotated[
        bool,
        Fact(
            "the weights of the norms are zero-centered (layernorm-1p)",
            (),
            ("layernorm_zero_centered_gamma",),
            derive_built=derive.any_set,
        ),
    ]
    gated_linear_unit: Annotated[
        bool, Fact("the MLP is gated (SwiGLU)", ("swiglu", "quick_geglu"), ("gated_linear_unit",), derive.any_set)
    ]
    linear_bias: Annotated[bool, Fact("linear layers have biases", ("add_bias_linear",))]
    activation: Annotated[
        str,
        Fact(
            "activation function of the MLP: gelu, silu ...",
            ("swiglu", "squared_relu", "quick_geglu"),
            ("activation_func",),
            derive.activation,
            derive.built_activation,
            words=derive.ACTIVATIONS,
        ),
    ]
    rotary: Annotated[
        bool,
        Fact(
            "positions are rotary, not learned",
            ("position_embedding_type", "use_rotary_position_embeddings"),
            (),
            derive.rotary,
        ),
    ]
    multi_latent_attention: Annotated[
        bool, Fact("keys and values are made from a short latent vector (MLA)", ("multi_latent_attention",))
    ]
    q_lora_rank: Annotated[
        int,
        Fact(
            "width of the latent vector of queries (MLA); 0 is none",
            ("q_lora_rank",),
            derive=derive.of_latent_attention,
            least=0,
            unit="numbers",
        ),
    ]
    kv_lora_rank: Annotated[
        int,
        Fact(
            "width of the latent vector of keys and values (MLA)",
            ("kv_lora_rank",),
            derive=derive.of_latent_attention,
            unit="numbers",
        ),
    ]
    qk_head_dim: Annotated[
        int,
        Fact(
            "width of a head of queries and keys without positions (MLA)",
            ("qk_head_dim",),
            derive=derive.of_latent_attention,
            unit="numbers",
        ),
    ]
    qk_pos_emb_head_dim: Annotated[
        int,
        Fact(
            "width of a head of queries and keys with rotary positions (MLA)",
            ("qk_pos_emb_head_dim",),
            derive=derive.of_latent_attention,
            unit="numbers",
        ),
    ]
    v_head_dim: Annotated[
        int, Fact("width of a head of values (MLA)", ("v_head_dim",), derive=derive.of_latent_attention, unit="numbers")
    ]
    mtp_num_layers: Annotated[
        int,
        Fact(
            "layers of multi-token prediction; 0 is none",
            ("mtp_num_layers",),
            derive=derive.number_or_zero,
            least=0,
            unit="layers",
        ),
    ]
    dtype: Annotated[str, Fact("fp32, bf16 or fp16", ("bf16", "fp16"), derive=derive.dtype, words=("fp32", "bf16", "fp16"))]
    low_precision: Annotated[bool, Fact("linear layers multiply in fp8 or fp4", ("fp8", "fp4"), derive=derive.any_set)] = False
    cuda_graphs: Annotated[
        bool,
        Fact(
            "layers are captured as CUDA graphs",
            ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"),
            derive=derive.cuda_graphs,
        ),
    ] = False
    platform: Annotated[str, Fact("npu, cuda or cpu")]
    megatron: Annotated[str, Fact("version of megatron-core")]
