"""The world a plan is made for: sizes, model shape, platform and versions. Unknown is not None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

PLATFORMS: Final = ("npu", "cuda", "cpu")
"""The devices that features run on."""

PARALLEL_SIZES: Final = ("tp", "pp", "vpp", "cp", "ep")
"""Parallel sizes that a user can set; each defaults to 1."""

FIELDS: Final[dict[str, tuple[type, str]]] = {
    "world_size": (int, "number of processes"),
    "ranks_per_node": (int, "processes of one node"),
    "tp": (int, "tensor-parallel size"),
    "pp": (int, "pipeline-parallel size (stages)"),
    "vpp": (int, "virtual pipeline size (model chunks per stage)"),
    "cp": (int, "context-parallel size"),
    "ep": (int, "expert-parallel size"),
    "num_layers": (int, "transformer layers"),
    "hidden_size": (int, "hidden size"),
    "ffn_hidden_size": (int, "hidden size of the MLP"),
    "num_attention_heads": (int, "attention heads"),
    "num_query_groups": (int, "key/value heads of grouped-query attention"),
    "kv_channels": (int, "width of one attention head"),
    "num_experts": (int, "experts of a MoE layer; 0 is a dense model"),
    "moe_ffn_hidden_size": (int, "hidden size of one expert"),
    "router_topk": (int, "experts of each token in a MoE layer"),
    "shared_expert_hidden_size": (int, "hidden size of the shared expert of a MoE layer; 0 is none"),
    "grouped_experts": (bool, "the experts of a MoE layer are one module with grouped products"),
    "transformer_engine_experts": (bool, "the experts of a MoE layer are Transformer Engine's grouped ones"),
    "expert_capacity_factor": (float, "rows that an expert takes at most, over its balanced share; 0 is no limit"),
    "padded_experts": (bool, "every expert gets as many rows as its capacity"),
    "latent_expert_size": (int, "width of the latent vectors that experts work on; 0 is none"),
    "overlapped_micro_batches": (bool, "Megatron hides the transfers of experts behind another micro-batch"),
    "vocab_size": (int, "size of the padded vocabulary"),
    "tied_embeddings": (bool, "the embedding and the output layer share one weight"),
    "seq_length": (int, "tokens per sample"),
    "micro_batch_size": (int, "samples per micro-batch"),
    "global_batch_size": (int, "samples per step over all ranks"),
    "normalization": (str, "LayerNorm or RMSNorm"),
    "zero_centered_norm": (bool, "the weights of the norms are zero-centered (layernorm-1p)"),
    "gated_linear_unit": (bool, "the MLP is gated (SwiGLU)"),
    "linear_bias": (bool, "linear layers have biases"),
    "activation": (str, "activation function of the MLP: gelu, silu ..."),
    "rotary": (bool, "positions are rotary, not learned"),
    "multi_latent_attention": (bool, "keys and values are made from a short latent vector (MLA)"),
    "q_lora_rank": (int, "width of the latent vector of queries (MLA); 0 is none"),
    "kv_lora_rank": (int, "width of the latent vector of keys and values (MLA)"),
    "qk_head_dim": (int, "width of a head of queries and keys without positions (MLA)"),
    "qk_pos_emb_head_dim": (int, "width of a head of queries and keys with rotary positions (MLA)"),
    "v_head_dim": (int, "width of a head of values (MLA)"),
    "mtp_num_layers": (int, "layers of multi-token prediction; 0 is none"),
    "dtype": (str, "fp32, bf16 or fp16"),
    "low_precision": (bool, "linear layers multiply in fp8 or fp4"),
    "cuda_graphs": (bool, "layers are captured as CUDA graphs"),
    "platform": (str, "npu, cuda or cpu"),
    "megatron": (str, "version of megatron-core"),
}
"""Every field of a world: its type and meaning. The command line makes its options from this table."""


MAY_BE_ZERO: Final = ("num_experts", "mtp_num_layers", "shared_expert_hidden_size", "latent_expert_size", "q_lora_rank")
"""Whole numbers of which 0 is one; the others are at least 1."""

LATENT_WIDTHS: Final = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
"""Fields that a model with multi-latent attention has beside ``q_lora_rank``."""

WORDS: Final[dict[str, tuple[str, ...]]] = {
    "normalization": ("LayerNorm", "RMSNorm"),
    "activation": ("gelu", "silu", "relu", "squared_relu", "quick_gelu"),
    "dtype": ("fp32", "bf16", "fp16"),
}
"""Fields that are one of a few words."""


def size_name(size: str) -> str:
    """Return a parallel size of the world, or the derived ``dp``, in words."""
    return "data-parallel size" if size == "dp" else FIELDS[size][1]


class UnknownValue(Exception):  # noqa: N818 - a signal to the resolver, not an error
    """Fields were read that nobody gave. The resolver turns the first into a 'not checked' row."""

    def __init__(self, *fields: str) -> None:
        self.fields = fields
        self.field = fields[0]
        super().__init__(f"{', '.join(fields)} is not known")


class World:
    """Frozen set of known values. Reading an unknown one raises `UnknownValue`, so no check ever sees None.

    Derived: ``dp`` = world_size / (tp * pp * cp), ``num_micro_batches`` = global_batch_size / (micro_batch_size * dp).
    ``layer_split`` has the layers of each model chunk, in the order of the model, where a feature deals them out unevenly.
    """

    __slots__ = ("_known", "layer_split")

    layer_split: tuple[int, ...]

    def __init__(self, values: Mapping[str, Any], layer_split: Sequence[int] = ()) -> None:
        known = dict.fromkeys(PARALLEL_SIZES, 1) | {k: v for k, v in values.items() if v is not None}
        if unknown := known.keys() - FIELDS.keys():
            raise KeyError(f"not a field of a world: {', '.join(sorted(unknown))}")
        object.__setattr__(self, "_known", known)
        object.__setattr__(self, "layer_split", tuple(layer_split))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a World is frozen")

    def __getattr__(self, name: str) -> Any:
        if name not in FIELDS:
            raise AttributeError(name)
        if name not in self._known:
            raise UnknownValue(name)
        return self._known[name]

    @property
    def dp(self) -> int:
        """Data-parallel size, at least 1; floor division, the resolver reports a remainder."""
        return max(1, int(self.world_size) // int(self.tp * self.pp * self.cp))

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per step and pipeline."""
        return int(self.global_batch_size) // int(self.micro_batch_size * self.dp)

    @property
    def layers_per_chunk(self) -> tuple[int, ...]:
        """Layers of each model chunk, in the order of the model: equal shares where no feature deals them out."""
        chunks = int(self.pp * self.vpp)
        return self.layer_split or (int(self.num_layers) // chunks,) * chunks

    def need(self, *names: str) -> None:
        """Raise `UnknownValue` for all of these that nobody gave, so that a reader learns of them at once."""
        if unknown := [name for name in names if not self.knows(name)]:
            raise UnknownValue(*unknown)

    def knows(self, name: str) -> bool:
        """Return whether ``name`` has a value, also for the derived ones."""
        try:
            getattr(self, name)
        except UnknownValue:
            return False
        return True

    def is_set(self, name: str) -> bool:
        """Return whether ``name`` is known and neither false nor 0."""
        return bool(self.knows(name) and getattr(self, name))

    def known(self) -> dict[str, Any]:
        """The given values, in the order of `FIELDS`."""
        return {name: self._known[name] for name in FIELDS if name in self._known}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, World) and (self._known, self.layer_split) == (other._known, other.layer_split)

    def __hash__(self) -> int:
        return hash(tuple(self.known().items()))

    def __repr__(self) -> str:
        return f"World({self.known()})"
