"""Bases of features that compute attention over a sequence spread over ranks. Light."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from mindspeed.context_parallel.conditions import attention_sees_all_keys, softmax_is_vanilla
from mindspeed.context_parallel.costs import Attention
from mindspeed.context_parallel.patches import NO_DATALOADER_MASK, packed_in
from mindspeed.context_parallel.saved import attention_of_micro_batch
from mindspeed.plugins import ArgOverride, Patch, hookimpl
from mindspeed.plugins.constraints import Constraint, Requires
from mindspeed.plugins.feature import ArgsT, Feature
from mindspeed.plugins.saved_tensors import SavedTensors

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

    @hookimpl
    def groups_created(self, sizes: dict[str, int], get_group: Callable[[str], Any]) -> None:
        degree: int = getattr(self.args, "ulysses_degree", None) or 1
        if degree > 1:
            from mindspeed.context_parallel.groups import make_groups

            self.groups = make_groups(get_group("cp"), degree)

    @hookimpl
    def groups_destroyed(self) -> None:
        if self.groups is not None:
            self.groups.destroy()
            self.groups = None
