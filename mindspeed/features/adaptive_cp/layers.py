"""The core attention that layers are built with, and what a rank holds of batches and position tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from mindspeed.context_parallel.attention_mask import MaskRule, mask_of, shared
from mindspeed.context_parallel.core_attention import CoreAttention, with_core_attention
from mindspeed.context_parallel.groups import forget_groups, made_groups, make_groups
from mindspeed.context_parallel.heads import attention_by_heads
from mindspeed.context_parallel.layout import Layout, contiguous, nested
from mindspeed.context_parallel.sight import Sight
from mindspeed.context_parallel.slicing import batch_share, table_share
from mindspeed.features.adaptive_cp.attention import AdaptivePlan, adaptive_attention, best_layout, plan_mask
from mindspeed.features.adaptive_cp.feature import AdaptiveCpArgs
from mindspeed.features.adaptive_cp.masks import Mask, RuleMask, WholeMask
from mindspeed.features.adaptive_cp.plans import Plans
from mindspeed.plugins import MindSpeedError, Problem

_NAME = "adaptive-cp"
_active: list[AdaptiveCpArgs] = []
_arrived = Plans()
"""Plans of masks that came with batches: what is kept follows from a mask alone, so any micro-batch finds its own."""


def begin(args: AdaptiveCpArgs, cp_group: dist.ProcessGroup) -> None:
    """Megatron's groups exist; called by every rank."""
    _active[:] = [args]
    if args.ulysses_degree > 1 and cp_group.size() > 1:
        make_groups(cp_group, args.ulysses_degree)


def end() -> None:
    """Megatron's groups are about to go."""
    forget_groups()
    _active.clear()
    _fixed.cache_clear()
    _arrived.clear()


@lru_cache(maxsize=4)
def _fixed(rule: MaskRule, args: AdaptiveCpArgs, tokens: int, ranks: int, device: torch.device) -> AdaptivePlan:
    """The plan of the shared mask over ``ranks`` that hold whole heads."""
    mask: Mask = WholeMask(mask_of(rule, tokens, device)) if rule.is_own else RuleMask(rule, tokens)
    pieces = tokens if args.without_coarse else args.coarse
    return plan_mask(mask, ranks, None if args.only_reschedule else best_layout(mask, ranks, pieces, args.ulysses_degree))


def _plan(tokens: int, ranks: int, device: torch.device) -> AdaptivePlan:
    rule = shared()
    if rule is None or not _active:
        raise _refused("no mask is known", "call initialize_model_parallel before the model and the batches")
    return _fixed(rule, _active[0], tokens, ranks, device)


class AdaptiveCoreAttention(CoreAttention):
    """Core attention by `adaptive_attention`, between neighbours that trade heads if there are any."""

    feature = _NAME
    knows_documents = False
    args: ClassVar[AdaptiveCpArgs] = AdaptiveCpArgs()  # type: ignore[call-arg]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        *rest: Any,
        **named: Any,
    ) -> Tensor:
        """As that of `CoreAttention`; a mask that comes with the batch is read whatever its kind."""
        kind = AttnMaskType.arbitrary if self.args.dynamic_mask else attn_mask_type
        return super().forward(query, key, value, attention_mask, kind, *rest, **named)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sight: Sight) -> Tensor:
        if sight.ends or sight.slopes is not None:
            what = "packed documents" if sight.ends else "a bias by position (ALiBi)"
            raise _refused(f"it takes no {what}", "ring-attention, ulysses-attention or another algorithm instead")
        degree, outer = self.args.ulysses_degree, self.group
        if degree > 1:
            groups = made_groups(_NAME)
            outer = groups.outer
        plan = self._plan(sight, query.shape[0] * self.group.size(), outer.size(), query.device)

        def across(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return adaptive_attention(q, k, v, outer, plan, scale=self.scale, dropout=self.drops)

        return across(query, key, value) if degree == 1 else attention_by_heads(query, key, value, groups.inner, across, _NAME)

    def _plan(self, sight: Sight, tokens: int, ranks: int, device: torch.device) -> AdaptivePlan:
        if self.args.dynamic_mask:
            if sight.mask is None:
                raise _refused("a batch came without a mask", "take out --no-create-attention-mask-in-dataloader")
            return _arrived.of(sight.mask, tokens, ranks)
        if not sight.causal:
            raise _refused("attention that is not causal has no shared mask", "--set adaptive-cp.dynamic_mask=true")
        return _plan(tokens, ranks, device)


def with_adaptive_attention(spec: Any, config: Any, args: AdaptiveCpArgs) -> Any:
    """The spec of a block with every core attention exchanged for one with these settings."""
    attention = type("AdaptiveCoreAttention", (AdaptiveCoreAttention,), {"args": args, "__module__": __name__})
    return with_core_attention(spec, config, attention)


def share_of_batch(batch: dict[str, Any], cp_group: Any = None) -> dict[str, Any]:
    """Stands for Megatron's slicing of a batch. An attention mask stays whole, for blocks of any ranks are computed here."""
    some = next((value for name, value in batch.items() if value is not None and name != "attention_mask"), None)
    return batch if some is None else batch_share(batch, cp_group, _layout_of(some, 1), lambda mask: mask)


def share_of_table(pos_emb: Tensor, seq_dim: int, cp_group: Any) -> Tensor:
    """Stands for Megatron's slicing of a position table."""
    return table_share(pos_emb, seq_dim, cp_group, _layout_of(pos_emb, seq_dim))


def _layout_of(whole: Tensor, dim: int) -> Callable[[int], Layout]:
    """What each of a number of context-parallel ranks holds of a tensor with all tokens in a dimension."""

    def layout(ranks: int) -> Layout:
        args = _active[0] if _active else AdaptiveCpArgs()  # type: ignore[call-arg]
        outer = ranks // args.ulysses_degree
        order = contiguous(outer) if args.dynamic_mask else _plan(whole.shape[dim], outer, whole.device).layout
        return nested(order, args.ulysses_degree)

    return layout


def _refused(sentence: str, fix: str) -> MindSpeedError:
    return MindSpeedError([Problem("MS333", f"{_NAME}: {sentence}", (_NAME,), fix=fix)])
