"""Up-projections of multi-latent attention without copies of queries and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from mindspeed import plugins as ms
from mindspeed.plugins.saved_tensors import SavedTensor, SavedTensors, in_backward, leave
from mindspeed.plugins.shared_conditions import (
    NO_CPU_OFFLOADING,
    NO_CUDA_GRAPHS,
    NO_FINE_GRAINED_OFFLOADING,
    NO_FSDP,
    NO_LOW_PRECISION,
    NO_OVERLAPPED_MICRO_BATCHES,
    NO_TRANSFORMER_ENGINE_LAYERS,
)

_KEEP = (ms.Fix.give_setting("offload_output", False), ms.Fix.remove_feature())
_PROJECT = (ms.Fix.give_setting("absorb", False), ms.Fix.remove_feature())


class MlaSplitArgs(ms.FeatureArgs):
    absorb: bool = ms.Field(
        False,
        description="Absorb the up-projection of keys and values into the queries and the output of sparse attention (DSA), "
        "which then reads latent vectors. Keys and values of heads are not computed",
    )
    offload_output: bool = ms.Field(
        False,
        description="Offload the output of core attention to host memory between forward and backward. Both copies overlap "
        "with the rest of the layer",
    )


def _offloads(args: MlaSplitArgs, world: ms.World) -> bool:
    """Return whether the output of core attention is offloaded."""
    return args.offload_output


def _absorbs(args: MlaSplitArgs, world: ms.World) -> bool:
    """Return whether sparse attention reads latent vectors."""
    return args.absorb


def _owns_inputs(args: MlaSplitArgs, world: ms.World) -> bool:
    """Return whether the output of core attention is offloaded, or sparse attention reads latent vectors."""
    return args.offload_output or args.absorb


@ms.condition(
    "attention is not sparse (DSA), and absorb changes only sparse attention",
    fix=(ms.Fix.give_setting("absorb", False), ms.Fix.give_field("indexer_topk", or_more=True)),
    when=_absorbs,
)
def attention_is_sparse(args: Any, world: ms.World) -> bool:
    """Check that an indexer selects the keys of each query."""
    return world.indexer_topk > 0


_ABSORBED_MEGATRON = ">=0.16,<0.17"


@ms.condition(
    "absorb supports the sparse attention of Megatron 0.16, but the version is {world.megatron}. Megatron 0.17 and 0.18 "
    "recompute their indexer from keys of heads, and later releases absorb the up-projection themselves",
    fix=_PROJECT,
    when=_absorbs,
)
def megatron_has_keys_of_heads(args: Any, world: ms.World) -> bool:
    """Check that sparse attention of this release gets keys of heads, and its indexer's loss apart."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(_ABSORBED_MEGATRON).contains(world.megatron, prereleases=True)


@ms.condition(
    "attention is not multi-latent, so it has no up-projections",
    fix=(ms.Fix.remove_feature(), ms.Fix.give_field("multi_latent_attention", True)),
    selects=True,
)
def attention_is_latent(args: Any, world: ms.World) -> bool:
    """Check that attention is multi-latent."""
    return world.is_set("multi_latent_attention")


def absorbed_tensors(tensors: SavedTensors, world: ms.World) -> Iterator[SavedTensor]:
    """Yield the tensors that sparse attention to latent vectors keeps: its inputs, of which keys are shared by all heads.

    Megatron drops the indices of selected keys once it has made a mask of them. The operator keeps them instead of scores.
    """
    size, tokens = 4 if world.dtype == "fp32" else 2, world.seq_length * world.micro_batch_size
    heads, latent = world.num_attention_heads // world.tp, world.kv_lora_rank + world.qk_pos_emb_head_dim
    for tensor in tensors:
        if tensor.name == "sparse attention: queries, keys, values":
            width = heads * (world.qk_head_dim + world.qk_pos_emb_head_dim) + latent
            yield replace(tensor, name="attention: queries, keys, values", bytes=tokens * width * size)
            indices = tokens * min(world.indexer_topk, world.seq_length)
            yield replace(tensor, name="indexer: selected keys", bytes=8 * indices)
        elif tensor.name == "attention: latent vectors":
            queries = world.q_lora_rank if world.knows("q_lora_rank") else 0
            yield replace(tensor, bytes=tensor.bytes * queries // (queries + latent))
        elif tensor.name != "sparse attention: softmax":
            yield tensor


class MlaSplit(ms.Feature[MlaSplitArgs]):
    """Split the up-projections of latent attention.

    Keys and values are separate products of the latent vector, and queries are rotated in place, so values and queries are not
    copied. Under sequence parallelism, the gather of the queries' latent vectors overlaps with the product of keys and values.
    """

    spec = ms.FeatureSpec(
        name="mla-split",
        category=ms.Category.COMPUTE,
        megatron=">=0.16",
        slots={ms.Slot.LINEAR},
        constraints=(
            attention_is_latent,
            attention_is_sparse,
            megatron_has_keys_of_heads,
            NO_LOW_PRECISION,
            NO_TRANSFORMER_ENGINE_LAYERS,
            NO_FSDP,
            *(
                replace(condition, fix=_KEEP, when=_offloads)
                for condition in (
                    NO_CPU_OFFLOADING,
                    NO_CUDA_GRAPHS,
                    NO_OVERLAPPED_MICRO_BATCHES,
                )
            ),
            replace(NO_FINE_GRAINED_OFFLOADING, when=_owns_inputs),
            ms.Conflicts(
                ms.Slot.RECOMPUTE_POLICY,
                reason="mla-split.offload_output offloads what recomputation of whole layers does not keep",
                when=_offloads,
            ),
            ms.Conflicts(
                "swap-attention",
                reason="swap-attention already offloads the output of core attention",
                when=_offloads,
                fix=(ms.Fix.give_setting("offload_output", False),),
            ),
        ),
        numerics=ms.Numerics.reordered(
            reason="keys and values are separate products instead of a common one, for which the summation order of a matrix "
            "library may differ"
        ),
        verify_with=ms.VerifyWith(
            algorithm=("mindspeed.features.mla_split.projections",), features=("sequence-parallel",), world={"tp": 2}
        ),
        own_trainer="from mindspeed.features.mla_split.projections import queries, keys_and_values",
    )

    handles: Sequence[Any] = ()

    @ms.hookimpl
    def saved_tensors(self, tensors: SavedTensors) -> SavedTensors:
        if self.args.absorb:
            tensors = tuple(absorbed_tensors(tensors, self.world))
        if not self.args.offload_output:
            return tensors
        return in_backward(leave(tensors, ["attention: output"], "swapped", self.spec.name), self.spec.name)

    @ms.hookimpl
    def model_built(self, chunks: Sequence[Any]) -> None:
        if not self.args.offload_output:
            return
        from mindspeed.features.mla_split.output import OffloadedOutput
        from mindspeed.memory.model_layers import chosen_layers
        from mindspeed.memory.on_host import HostBuffers

        buffers = HostBuffers()
        offloaded = [OffloadedOutput(layer, buffers, self.spec.name) for layer in chosen_layers(chunks, None, "self_attention")]
        self.handles = [handle for layer in offloaded for handle in layer.handles]

    @ms.hookimpl
    def deactivated(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = ()

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        return [
            ms.ArgOverride(
                "apply_rope_fusion",
                False,
                "makes Megatron prepare angles for its unfused function of rotary positions, which works on queries in place",
            )
        ]

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        target = "megatron.core.transformer.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors"
        if not self.args.absorb:
            return [
                ms.Wrap(
                    target,
                    "mindspeed.features.mla_split.layers:with_products_in_place",
                    reason="computes queries, keys and values in the tensors that attention reads, instead of concatenating "
                    "them from parts of two products",
                )
            ]
        return [
            ms.Wrap(
                target,
                "mindspeed.features.mla_split.layers:with_latent_keys",
                reason="returns latent vectors as the keys of all heads, instead of keys and values of each head",
            ),
            ms.Wrap(
                "megatron.core.transformer.experimental_attention_variant.dsa:DSAttention.forward",
                "mindspeed.features.mla_split.sparse:attention_to_latents",
                reason="attends to latent vectors with absorbed queries, and computes the target of the indexer with them",
                when=ms.When(megatron=_ABSORBED_MEGATRON),
            ),
        ]
