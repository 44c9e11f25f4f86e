"""Tiny models that features are proven on, and what one training run of such a model is. Light: no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from mindspeed.job.hybrid_pattern import EXPERTS, pattern_of
from mindspeed.job.world import FIELDS, LATENT_WIDTHS, PARALLEL_SIZES, World

Options = tuple[tuple[str, Any], ...]
"""Names and values, sorted by name."""


LATENT: Final = {
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 10,
    "original_max_position_embeddings": 16,
    "rotary_scaling_factor": 4,
    "mscale_all_dim": 0.5,
}
"""Multi-latent attention in which every width is another one, and positions are stretched (YaRN) with a softmax scale."""

INDEXER: Final = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 8,
    "dsa_indexer_head_dim": 8,
    "dsa_indexer_loss_coeff": 0.5,
    "transformer_impl": "transformer_engine",
}
"""Sparse attention, whose indexer learns from a loss of its own. With several heads, few scores are exactly 0."""
INDEXER_SIZES: Final = {"indexer_heads": "dsa_indexer_n_heads", "indexer_head_dim": "dsa_indexer_head_dim"}
"""Fields of the world that a shape has among its options, by Megatron's names."""


@dataclass(frozen=True, slots=True)
class GptShape:
    """A GPT-like model, by the names of `mindspeed.job.world.FIELDS` where they exist.

    ``kv_channels`` 0 is an equal share of the hidden size, ``moe_ffn_hidden_size`` 0 the size of the MLP. ``dropout`` is used
    in attention and behind both residual branches. With ``multi_latent_attention`` positions are rotary inside attention, and
    the key heads are as many as the query heads. With ``indexer_topk`` it is sparse.
    ``options`` are fields of Megatron's TransformerConfig beside those that the shape sets itself.
    """

    name: str
    num_layers: int = 4
    hidden_size: int = 32
    ffn_hidden_size: int = 64
    num_attention_heads: int = 4
    num_query_groups: int = 4
    kv_channels: int = 0
    num_experts: int = 0
    moe_ffn_hidden_size: int = 0
    grouped_experts: bool = False
    vocab_size: int = 64
    seq_length: int = 24
    normalization: str = "LayerNorm"
    gated_linear_unit: bool = False
    activation: str = "gelu"
    linear_bias: bool = True
    rotary: bool = False
    multi_latent_attention: bool = False
    indexer_topk: int = 0
    tied_embeddings: bool = True
    router_topk: int = 2
    shared_expert_hidden_size: int = 0
    expert_capacity_factor: float = 0.0
    padded_experts: bool = False
    mtp_num_layers: int = 0
    hybrid_layer_pattern: str = ""
    dropout: float = 0.0
    options: Options = ()

    def world(self) -> dict[str, Any]:
        """The fields of this shape that a plan's world knows."""
        known = {field.name: getattr(self, field.name) for field in fields(self) if field.name in FIELDS}
        known["kv_channels"] = self.kv_channels or self.hidden_size // self.num_attention_heads
        known["moe_ffn_hidden_size"] = self.moe_ffn_hidden_size or (self.ffn_hidden_size if self.num_experts else None)
        latent = LATENT | dict(self.options) if self.multi_latent_attention else {}
        known |= {name: latent[name] or 0 for name in ("q_lora_rank", *LATENT_WIDTHS) if latent}
        indexer = INDEXER | dict(self.options) if self.indexer_topk else {}
        return known | {name: indexer[option] for name, option in INDEXER_SIZES.items() if indexer}

    def changed(self, world: Mapping[str, Any]) -> GptShape:
        """This shape with the values of ``world`` that describe a model."""
        own = {field.name for field in fields(self)} & FIELDS.keys()
        shape = replace(self, **{name: value for name, value in world.items() if name in own and value is not None})
        widths = ("q_lora_rank", *LATENT_WIDTHS) if shape.multi_latent_attention else ()
        options = {name: world[name] or None for name in widths if name in world}
        if shape.indexer_topk:
            options |= {option: world[name] for name, option in INDEXER_SIZES.items() if name in world}
        return shape.with_options(options)

    def as_hybrid(self, pattern: str = "", chunks: int = 1) -> GptShape:
        """Return the HybridModel with these layers, those of a pattern or the own ones one by one in equal segments."""
        if not pattern:
            pair = ("+" if self.multi_latent_attention else "*") + ("E" if self.num_experts else "-")
            segments = [pair * max(1, self.num_layers // chunks)] * chunks
            pattern = "|".join(segments) + f"/{pair}" * self.mtp_num_layers
        read = pattern_of(pattern)
        sparse = EXPERTS in pattern
        return replace(
            self,
            name=f"hybrid {self.name}",
            hybrid_layer_pattern=pattern,
            num_layers=len(read.layers),
            num_experts=(self.num_experts or MOE.num_experts) if sparse else 0,
            grouped_experts=sparse,
            mtp_num_layers=len(read.predictions),
        )

    def of_one_stage(self) -> GptShape:
        """Return the shape of the same model whose layers are all on one pipeline stage."""
        return replace(self, hybrid_layer_pattern=self.hybrid_layer_pattern.replace("|", ""))

    def with_options(self, options: Mapping[str, Any]) -> GptShape:
        """This shape with further fields of Megatron's configuration; lists become tuples."""
        frozen = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        return replace(self, options=tuple(sorted({**dict(self.options), **frozen}.items())))


GPT: Final = GptShape("gpt")
LLAMA: Final = GptShape(
    "llama",
    num_query_groups=2,
    normalization="RMSNorm",
    gated_linear_unit=True,
    activation="silu",
    linear_bias=False,
    rotary=True,
    tied_embeddings=False,
)
MOE: Final = replace(LLAMA, name="moe", num_experts=4, ffn_hidden_size=32)
SHAPES: Final = (
    GPT,
    LLAMA,
    MOE,
    replace(LLAMA, name="llama-learned", rotary=False),
    replace(MOE, name="moe-learned", rotary=False),
    replace(MOE, name="moe-grouped", grouped_experts=True),
    replace(MOE, name="moe-grouped-learned", grouped_experts=True, rotary=False),
    replace(LLAMA, name="llama-tied", tied_embeddings=True),
    replace(GPT, name="gpt-untied", tied_embeddings=False),
    replace(LLAMA, name="mla", num_query_groups=4, multi_latent_attention=True),
    replace(LLAMA, name="mtp", mtp_num_layers=1),
    replace(MOE, name="moe-mla", num_query_groups=4, multi_latent_attention=True),
    replace(MOE, name="moe-mla-grouped", num_query_groups=4, multi_latent_attention=True, grouped_experts=True),
)
"""In the order in which a feature tries them: the first to which it applies is taken."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A training run: ``steps`` optimizer steps over ``global_batch_size`` samples each, in ``dtype`` fp32 or bf16.

    With ``documents`` samples are packed documents that do not see one another, and with ``restart`` positions begin anew
    with each of them. With ``ragged`` micro-batches have different lengths, see `length_of`. The optimizer is steepest descent,
    with ``adam`` plain Adam with clipping and decay.
    """

    shape: GptShape
    dtype: str = "fp32"
    steps: int = 5
    micro_batch_size: int = 1
    global_batch_size: int = 8
    seed: int = 1234
    documents: bool = False
    restart: bool = False
    ragged: bool = False
    adam: bool = False

    def length_of(self, number: int) -> int:
        """Tokens in a sample of a micro-batch: the whole sequence, or about a third, two thirds and all of it in turn.

        Multiples of 8 divide among the ranks of tensor and context parallelism.
        """
        part = self.shape.seq_length * (number % 3 + 1) // 3
        return (part // 8 * 8 or part) if self.ragged else self.shape.seq_length

    @property
    def repeats_routing(self) -> bool:
        """Return whether both runs of a proof must choose the same experts, for scores tie in few bits."""
        return self.dtype == "bf16" and self.shape.num_experts > 0

    def world(self) -> dict[str, Any]:
        """Values that the recipe adds to a plan's world."""
        batch = {"micro_batch_size": self.micro_batch_size, "global_batch_size": self.global_batch_size}
        return {**self.shape.world(), **batch, "dtype": self.dtype}


def recipe_of(world: World) -> Recipe:
    """Return the recipe of one step of the model of a world, whose sizes are all known."""
    known = world.known()
    shape = (MOE if known.get("num_experts") else GPT).changed(known)
    batch = {name: known[name] for name in ("dtype", "micro_batch_size", "global_batch_size")}
    return Recipe(shape, steps=1, **batch)


def options_of(world: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Megatron's configuration for the given values of a world that no `GptShape` has.

    These are the fields that are the value of one attribute. Those that Megatron derives are `not_built`.
    """
    return {FIELDS[name].built_names[0]: value for name, value in _beside_shapes(world) if _stands_alone(name)}


def not_built(world: Mapping[str, Any]) -> list[str]:
    """Return the given fields that the tiny model cannot have."""
    return [name for name, _ in _beside_shapes(world) if not _stands_alone(name)]


def _beside_shapes(world: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the given values other than Megatron's default that describe a model, and that no shape has."""
    known = {field.name for field in fields(GptShape)} | {"q_lora_rank", *LATENT_WIDTHS, *INDEXER_SIZES}
    known |= {*_AROUND, *PARALLEL_SIZES}
    for name, value in world.items():
        if name not in known and value is not None and value != FIELDS[name].default:
            yield name, value


def _stands_alone(name: str) -> bool:
    """Return whether a field is the value of one attribute of a configuration."""
    field = FIELDS[name]
    return len(field.built_names) == 1 and field.derive is field.derive_built is None


_AROUND: Final = ("world_size", "ranks_per_node", "platform", "megatron", "dtype", "micro_batch_size", "global_batch_size")
"""Fields that are not of the model."""
