"""Every field of the job, declared once: type, meaning, Megatron's default, and Megatron's names for it. Light, data only.

A field without a default is unknown until somebody gives it. One with a default has it in every release and on every platform
that is supported. The command line's options, the reading of Megatron-LM's arguments and of configurations follow from here.
The classes are plain, for a help text needs no pydantic; `mindspeed.job.world.World` is the model.
"""

from __future__ import annotations

from typing import Annotated, Final

from mindspeed.job import derivations as derive
from mindspeed.job.fact import Fact, Field, declared
from mindspeed.job.shape_fields import ShapeFields

PLATFORMS: Final = ("npu", "cuda", "cpu")
"""The devices that features run on."""


class Fields(ShapeFields):
    """The values that describe a job."""

    # layers and how they are dealt out
    transformer_engine_layers: Annotated[
        bool,
        Fact(
            "layers are those of Transformer Engine",
            ("transformer_impl",),
            (),
            derive.transformer_engine_layers,
            by_platform=("transformer_impl",),
        ),
    ]
    sequence_parallel: Annotated[
        bool, Fact("tensor-parallel ranks split the sequence outside of linear layers", ("sequence_parallel",))
    ] = False
    tensor_parallel_overlap: Annotated[
        bool,
        Fact("Transformer Engine overlaps collectives of tensor parallelism with products", ("tp_comm_overlap",)),
    ] = False
    weight_shards: Annotated[
        int,
        Fact(
            "ranks that share the weight of a linear layer beside tensor parallelism; 1 is none",
            ("tensor_parallel_num_weight_shards",),
            ("gtp_weight_remat_size",),
            since="0.19",
        ),
    ] = 1
    fsdp: Annotated[
        bool,
        Fact(
            "parameters are sharded over data-parallel ranks (FSDP)",
            ("use_megatron_fsdp", "use_torch_fsdp2"),
            ("use_megatron_fsdp",),
            derive.any_set,
        ),
    ] = False
    pipeline_layout: Annotated[
        bool, Fact("layers are dealt out to stages by a layout", ("pipeline_model_parallel_layout",), derive=derive.any_set)
    ] = False
    first_stage_layers: Annotated[
        int,
        Fact(
            "layers of the first pipeline stage where it has a number of its own; 0 is an equal share",
            ("decoder_first_pipeline_num_layers",),
            ("num_layers_in_first_pipeline_stage",),
            least=0,
            unit="layers",
        ),
    ] = 0
    last_stage_layers: Annotated[
        int,
        Fact(
            "layers of the last pipeline stage where it has a number of its own; 0 is an equal share",
            ("decoder_last_pipeline_num_layers",),
            ("num_layers_in_last_pipeline_stage",),
            least=0,
            unit="layers",
        ),
    ] = 0
    embedding_is_layer: Annotated[
        bool, Fact("the embedding counts as a layer of the first stage", ("account_for_embedding_in_pipeline_split",))
    ] = False
    loss_is_layer: Annotated[
        bool, Fact("the output layer counts as a layer of the last stage", ("account_for_loss_in_pipeline_split",))
    ] = False
    ring_exchange: Annotated[
        bool, Fact("pipeline stages send and receive at once (ring exchange)", ("use_ring_exchange_p2p",))
    ] = False
    delayed_weight_gradients: Annotated[
        bool, Fact("Megatron delays weight gradients with a queue of its own", ("delay_wgrad_compute",))
    ] = False
    deferred_embedding_gradients: Annotated[
        bool, Fact("Megatron defers the weight gradient of the output layer", ("defer_embedding_wgrad_compute",))
    ] = False

    # recomputation and offloading
    recompute_granularity: Annotated[
        str,
        Fact(
            "what is recomputed in the backward pass: none, selective or full",
            ("recompute_granularity", "recompute_activations"),
            derive=derive.recompute_granularity,
            words=("none", "selective", "full"),
        ),
    ] = "none"
    recompute_method: Annotated[
        str,
        Fact(
            "how full recomputation takes layers: none, uniform or block",
            ("recompute_method",),
            words=("none", "uniform", "block"),
        ),
    ] = "none"
    recompute_num_layers: Annotated[
        int,
        Fact("layers of each unit of full recomputation; 0 is not given", ("recompute_num_layers",), least=0, unit="layers"),
    ] = 0
    recompute_modules: Annotated[
        tuple[str, ...],
        Fact("modules that selective recomputation takes", ("recompute_modules",), derive=derive.recompute_modules),
    ] = ("core_attn",)
    partial_checkpoints: Annotated[
        bool,
        Fact(
            "a number of micro-batches alone is recomputed",
            (),
            ("num_microbatches_with_partial_activation_checkpoints",),
            derive_built=derive.any_given,
        ),
    ] = False
    cpu_offloading: Annotated[
        bool,
        Fact(
            "Megatron moves activations of layers to the host",
            ("cpu_offloading_num_layers",),
            ("cpu_offloading",),
            derive.any_set,
            since="0.16",
        ),
    ] = False
    fine_grained_offloading: Annotated[
        bool, Fact("Megatron moves activations of modules to the host", ("fine_grained_activation_offloading",), since="0.16")
    ] = False

    # attention
    windowed_attention: Annotated[
        bool, Fact("attention sees a window of keys", ("window_size",), derive=derive.any_given, since="0.15")
    ] = False
    softmax_type: Annotated[
        str,
        Fact(
            "softmax of attention: vanilla, off-by-one or learnable",
            ("softmax_type",),
            words=("vanilla", "off-by-one", "learnable"),
            since="0.15",
        ),
    ] = "vanilla"
    gated_attention: Annotated[bool, Fact("the output of attention has a gate", ("attention_output_gate",), since="0.16")] = (
        False
    )
    qk_clip: Annotated[bool, Fact("the weights of queries and keys are clipped between steps", ("qk_clip",), since="0.16")] = (
        False
    )
    logged_attention_logits: Annotated[
        bool, Fact("the largest attention logit is logged", ("log_max_attention_logit",), since="0.16")
    ] = False
    qk_norm: Annotated[bool, Fact("queries and keys are normalized", ("qk_layernorm",))] = False
    qkv_bias: Annotated[bool, Fact("the projection of queries, keys and values has a bias", ("add_qkv_bias",))] = False
    hybrid_context_parallel: Annotated[
        bool, Fact("micro-batches are spread over context-parallel ranks by length", ("hybrid_context_parallel",), since="0.16")
    ] = False

    # MLP and experts
    clamped_activation: Annotated[
        bool,
        Fact(
            "the input of the activation function is clamped",
            ("activation_func_clamp_value",),
            derive=derive.any_given,
            since="0.15",
        ),
    ] = False
    shifted_gate: Annotated[
        bool,
        Fact(
            "an offset is added to the linear part of gated units", ("glu_linear_offset",), derive=derive.any_set, since="0.15"
        ),
    ] = False
    low_precision_activation_input: Annotated[
        bool,
        Fact(
            "the input of the activation function is kept in fp8",
            (),
            ("activation_func_fp8_input_store",),
            derive_built=derive.any_set,
        ),
    ] = False
    transformer_engine_activation: Annotated[
        bool, Fact("the activation function is Transformer Engine's", ("use_te_activation_func",), since="0.15")
    ] = False
    dispatcher: Annotated[
        str,
        Fact(
            "how tokens go to experts: allgather, alltoall or flex",
            ("moe_token_dispatcher_type",),
            words=("allgather", "alltoall", "flex"),
        ),
    ]
    expert_tensor_size: Annotated[
        int, Fact("tensor-parallel size of experts", ("expert_tensor_parallel_size",), unit="processes")
    ]
    shared_expert_overlap: Annotated[
        bool, Fact("the shared expert is computed under the transfers of the routed ones", ("moe_shared_expert_overlap",))
    ] = False
    router_balancing: Annotated[
        tuple[str, ...],
        Fact(
            "how the router balances experts: aux_loss, sinkhorn, none ...",
            ("moe_router_load_balancing_type",),
            derive=derive.balancing,
        ),
    ] = ("aux_loss",)
    router_score: Annotated[str, Fact("scores of the router: softmax or sigmoid", ("moe_router_score_function",))] = "softmax"
    router_dtype: Annotated[
        str,
        Fact(
            "type that the router computes in: none is that of the model", ("moe_router_dtype",), words=("none", "fp32", "fp64")
        ),
    ] = "none"
    router_groups: Annotated[
        int,
        Fact("groups of experts that the router chooses among; 0 is none", ("moe_router_num_groups",), least=0, unit="groups"),
    ] = 0
    router_scaling: Annotated[
        float,
        Fact("factor of the scores of chosen experts; 0 is none", ("moe_router_topk_scaling_factor",), least=0, unit="factor"),
    ] = 0.0
    router_bias: Annotated[
        bool, Fact("the router has a bias for each expert that balances them", ("moe_router_enable_expert_bias",))
    ] = False
    forced_balancing: Annotated[
        bool, Fact("the router spreads tokens evenly whatever the scores", ("moe_router_force_load_balancing",))
    ] = False
    padded_routing: Annotated[
        bool,
        Fact(
            "tokens of experts are padded for low precision",
            ("moe_router_padding_for_quantization", "moe_router_padding_for_fp8"),
            derive=derive.any_set,
        ),
    ] = False
    probabilities_on_input: Annotated[
        bool, Fact("the probabilities of experts scale their input", ("moe_apply_probs_on_input",))
    ] = False
    drop_policy: Annotated[
        str,
        Fact("tokens that a full expert drops: by probs or position", ("moe_token_drop_policy",), words=("probs", "position")),
    ] = "probs"
    moe_layers: Annotated[
        int,
        Fact(
            "layers with experts where others are dense; all where not given",
            ("moe_layer_freq", "num_layers", "num_experts"),
            ("moe_layer_freq", "num_layers", "num_moe_experts"),
            derive.layers_with_experts,
            least=0,
            unit="layers",
        ),
    ]

    # optimizer
    optimizer: Annotated[str, Fact("optimizer: adam, sgd or another of Megatron", ("optimizer",))]
    distributed_optimizer: Annotated[
        bool, Fact("optimizer states are split over data-parallel ranks", ("use_distributed_optimizer",))
    ] = False
    precision_aware_optimizer: Annotated[
        bool, Fact("the optimizer keeps main weights by itself", ("use_precision_aware_optimizer",))
    ] = False
    offloaded_optimizer: Annotated[
        bool, Fact("the optimizer keeps main weights and states on the host", ("optimizer_cpu_offload",))
    ] = False
    shared_gradient_buffer: Annotated[
        bool, Fact("weights in mxfp8 are gathered in the buffer of gradients", ("reuse_grad_buf_for_mxfp8_param_ag",))
    ] = False
    low_precision_weights: Annotated[
        bool,
        Fact(
            "weights are kept in fp8 or fp4",
            ("fp8_param_gather", "fp4_param_gather", "fp4_param"),
            ("fp8_param", "fp4_param"),
            derive.low_precision_weights,
        ),
    ] = False


FIELDS: Final[dict[str, Field]] = declared(Fields)
"""Every field of a job, by name."""

LATENT_WIDTHS: Final = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
"""Fields that a model with multi-latent attention has beside ``q_lora_rank``."""
