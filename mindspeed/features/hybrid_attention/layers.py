"""The groups, the core attention that layers are built with, and what a rank holds of batches and position tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from mindspeed.features._shared.context_parallel.core_attention import CoreAttention, with_core_attention
from mindspeed.features._shared.context_parallel.heads import own_heads
from mindspeed.features._shared.context_parallel.layout import Layout, zigzag
from mindspeed.features._shared.context_parallel.ring import ring_attention
from mindspeed.features._shared.context_parallel.sight import Sight
from mindspeed.features._shared.context_parallel.slicing import batch_share, table_share
from mindspeed.features.hybrid_attention.attention import hybrid_attention, nested
from mindspeed.features.hybrid_attention.feature import HybridAttentionArgs
from mindspeed.ops.errors import require


@dataclass(frozen=True, slots=True)
class Groups:
    """The neighbours of this rank that trade heads, and the ranks that are its ring."""

    inner: dist.ProcessGroup
    outer: dist.ProcessGroup

    def layout(self, ranks: int) -> Layout:
        """What each of ``ranks`` context-parallel ranks holds."""
        return nested(zigzag(self.outer.size()), ranks // self.outer.size())


_made: list[Groups] = []


def make_groups(cp_group: dist.ProcessGroup, degree: int) -> None:
    """Cut the context-parallel group of this rank; called by every rank of it."""
    ranks, mine = dist.get_process_group_ranks(cp_group), cp_group.rank()
    first = mine // degree * degree
    inner, outer = ranks[first : first + degree], ranks[mine % degree :: degree]
    groups = [dist.new_group(part, use_local_synchronization=True, group_desc=name) for name, part in _named(inner, outer)]
    _made[:] = [Groups(*groups)]


def forget_groups() -> None:
    """Megatron's groups are about to go, and these with them."""
    for groups in _made:
        dist.destroy_process_group(groups.inner)
        dist.destroy_process_group(groups.outer)
    _made.clear()


def _named(inner: list[int], outer: list[int]) -> list[tuple[str, list[int]]]:
    return [("HYBRID_INNER_GROUP", inner), ("HYBRID_OUTER_GROUP", outer)]


def _groups() -> Groups:
    require(bool(_made), "hybrid_attention", "Megatron's groups do not exist: initialize_model_parallel comes before the model")
    return _made[0]


class HybridCoreAttention(CoreAttention):
    """Core attention by `hybrid_attention` around `ring_attention`."""

    feature = "hybrid-attention"
    args: ClassVar[HybridAttentionArgs] = HybridAttentionArgs()  # type: ignore[call-arg]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sight: Sight) -> Tensor:
        groups = _groups()
        slopes = own_heads(sight.slopes, groups.inner)

        def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ring_attention(
                q,
                k,
                v,
                groups.outer,
                scale=self.scale,
                causal=sight.causal,
                mask=sight.mask,
                ends=sight.ends,
                slopes=slopes,
                dropout=self.drops,
                window=self.args.window,
                layout=zigzag(groups.outer.size()),
            )

        return hybrid_attention(query, key, value, groups.inner, ring)


def with_hybrid_attention(spec: Any, config: Any, args: HybridAttentionArgs) -> Any:
    """The spec of a block with every core attention exchanged for one with these settings."""
    attention = type("HybridCoreAttention", (HybridCoreAttention,), {"args": args, "__module__": __name__})
    return with_core_attention(spec, config, attention)


def share_of_batch(batch: dict[str, Any], cp_group: Any = None) -> dict[str, Any]:
    """Stands for Megatron's slicing of a batch. Of an attention mask it takes the rows that the neighbours hold together."""
    groups = _groups()
    ring, place = zigzag(groups.outer.size()), groups.outer.rank()
    return batch_share(batch, cp_group, groups.layout, lambda mask: ring.take(mask, place, 2))


def share_of_table(pos_emb: Tensor, seq_dim: int, cp_group: Any) -> Tensor:
    """Stands for Megatron's slicing of a position table."""
    return table_share(pos_emb, seq_dim, cp_group, _groups().layout)
