"""Bases of features that compute attention over a sequence spread over ranks, and the patches that they share. Light."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from mindspeed.context_parallel.communicators import INNER_GROUP, OUTER_GROUP
from mindspeed.context_parallel.conditions import attention_sees_all_keys, softmax_is_vanilla
from mindspeed.context_parallel.costs import Attention, attention_of_micro_batch
from mindspeed.plugins import ArgOverride, Patch, Replace, When, Wrap, hookimpl
from mindspeed.plugins.constraints import Constraint, Requires
from mindspeed.plugins.feature import ArgsT, Feature
from mindspeed.plugins.saved_tensors import SavedTensors

_EMBEDDINGS: Final = "megatron.core.models.common.embeddings"

_PACKED_SLICERS: Final = (
    # (function of megatron.core.utils that slices rows of packed sequences, its stand-in, the releases that have it)
    ("get_thd_batch_on_this_cp_rank", "share_of_packed", ">=0.16,<0.18"),
    ("get_sft_batch_on_this_cp_rank", "share_of_documents", ">=0.18,<0.19"),
    ("_get_batch_on_this_cp_rank_per_document_balancing", "share_of_documents", ">=0.19"),
)

NO_DATALOADER_MASK: Final = ArgOverride(
    "create_attention_mask_in_dataloader",
    False,
    "creates no mask in the data loader, which would have seq_length x seq_length elements; attention is causal by itself",
)


def sliced_by(batch: str, table: str, order: str) -> list[Patch]:
    """Two functions, ``module:name``, in the place of Megatron's that slice a batch and a position table.

    ``order`` says which tokens a rank gets.
    """
    tables = ("rotary_pos_embedding:RotaryEmbedding", "yarn_rotary_pos_embedding:YarnRotaryEmbedding")
    clears = tuple(f"{_EMBEDDINGS}.{name}.forward" for name in tables)
    return [
        Replace("megatron.core.utils:get_batch_on_this_cp_rank", batch, f"gives each rank {order}", optional=True),
        Replace(
            f"{_EMBEDDINGS}.rope_utils:get_pos_emb_on_this_cp_rank",
            table,
            f"gives each rank the rotary embeddings of its tokens. Each rank gets {order}",
            optional=True,
            clears=clears,
        ),
    ]


def packed_in(module: str = "mindspeed.context_parallel.packed") -> list[Patch]:
    """``share_of_packed`` and ``rope_of_packed`` of a module, by default those of zig-zag, in the place of Megatron's."""
    split = (
        "splits packed sequences over context-parallel ranks without padding each sequence; "
        "Megatron's function pads them and needs Transformer Engine"
    )
    rotary = (
        "applies rotary embedding to this rank's tokens. This feature splits a whole row of packed sequences over ranks, but "
        "Megatron's function expects that every sequence in the row is split"
    )
    turner = f"{_EMBEDDINGS}.rope_utils:_apply_rotary_pos_emb_thd"
    return [
        *(
            Replace(f"megatron.core.utils:{slicer}", f"{module}:{share}", split, optional=True, when=When(megatron=versions))
            for slicer, share, versions in _PACKED_SLICERS
        ),
        Replace(turner, f"{module}:rope_of_packed", rotary, optional=True),
    ]


def any_length() -> Patch:
    """Lets Megatron-LM take a sequence of any length that the algorithm takes."""
    wrapper = "mindspeed.context_parallel.lengths:take_any_length"
    reason = "skips Megatron-LM's check that the sequence length is a multiple of 2 x cp, which this feature does not need"
    return Wrap("megatron.training.arguments:validate_args", wrapper, reason, phase="setup", optional=True)


if TYPE_CHECKING:
    from mindspeed.context_parallel.core_attention import CoreAttention
    from mindspeed.context_parallel.groups import Groups


ALGORITHM: Final[tuple[Constraint, ...]] = (
    Requires("context-parallel", reason="context-parallel splits the sequences and sums the loss over the ranks"),
    softmax_is_vanilla,
    attention_sees_all_keys,
)
"""Requirement of every algorithm: the feature that makes the groups."""


class AlgorithmFeature(Feature[ArgsT], ABC):
    """Base of an algorithm: its core attention replaces Megatron's. Not called where one rank has the whole sequence."""

    @abstractmethod
    def core_attention(self) -> type[CoreAttention]:
        """Return the class of the core attention."""

    def kept(self, tensors: SavedTensors, a: Attention) -> SavedTensors:
        """Return what layers keep for backward with the attention ``a`` of a layer for a micro-batch on a rank."""
        return tensors

    @hookimpl
    def saved_tensors(self, tensors: SavedTensors) -> SavedTensors | None:
        return None if self.world.cp == 1 else self.kept(tensors, attention_of_micro_batch(self.world))

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        return [NO_DATALOADER_MASK]

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.context_parallel.core_attention import with_core_attention

        return with_core_attention(spec, self.core_attention(), self)

    @hookimpl
    def patches(self) -> list[Patch]:
        return self.slicing()

    def slicing(self) -> list[Patch]:
        """Return the patches that slice the sequence; by default those of packed rows in Megatron's zig-zag."""
        return packed_in()


class TwoLevelFeature(AlgorithmFeature[ArgsT]):
    """Base of an algorithm in which ``ulysses_degree`` neighbouring ranks exchange tokens for heads."""

    groups: Groups | None = None
    """The groups of this rank, from the time when Megatron has its own."""

    def degree(self) -> int:
        """Return the number of neighbours; 1 is no exchange."""
        degree: int = getattr(self.args, "ulysses_degree", None) or 1
        return degree

    @hookimpl
    def communicators(self) -> Sequence[str]:
        sizes = {INNER_GROUP: self.degree(), OUTER_GROUP: self.world.cp // self.degree()} if self.degree() > 1 else {}
        return [name for name, ranks in sizes.items() if ranks > 1]

    @hookimpl
    def groups_created(self, sizes: dict[str, int], get_group: Callable[[str], Any]) -> None:
        if self.degree() > 1:
            from mindspeed.context_parallel.groups import make_groups

            self.groups = make_groups(get_group("cp"), self.degree())

    @hookimpl
    def groups_destroyed(self) -> None:
        if self.groups is not None:
            self.groups.destroy()
            self.groups = None
