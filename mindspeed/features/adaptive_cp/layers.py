"""The core attention that layers are built with, and what a rank holds of batches and position tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from mindspeed import plugins as ms
from mindspeed.context_parallel.attention_mask import mask_of
from mindspeed.context_parallel.core_attention import CoreAttention
from mindspeed.context_parallel.groups import require_groups
from mindspeed.context_parallel.heads import attention_by_heads
from mindspeed.context_parallel.layout import Layout, contiguous, nested
from mindspeed.context_parallel.mask_rules import MaskRule
from mindspeed.context_parallel.slicing import batch_share, batch_slicer, table_share
from mindspeed.features.adaptive_cp.attention import AdaptivePlan, adaptive_attention, best_layout, plan_mask
from mindspeed.features.adaptive_cp.masks import Mask, RuleMask, WholeMask
from mindspeed.ops.attention_mask import AttentionVisibility

if TYPE_CHECKING:
    from mindspeed.features.adaptive_cp.feature import AdaptiveCp, AdaptiveCpArgs

_NAME = "adaptive-cp"


@lru_cache(maxsize=4)
def plan_of_rule(rule: MaskRule, args: AdaptiveCpArgs, tokens: int, ranks: int, device: torch.device) -> AdaptivePlan:
    """The plan of the shared mask over ``ranks`` that hold whole heads."""
    mask: Mask = WholeMask(mask_of(rule, tokens, device)) if rule.is_own else RuleMask(rule, tokens)
    pieces = tokens if args.without_coarse else args.coarse
    return plan_mask(mask, ranks, None if args.only_reschedule else best_layout(mask, ranks, pieces, args.ulysses_degree))


def _shared_plan(args: AdaptiveCpArgs, tokens: int, ranks: int, device: torch.device) -> AdaptivePlan:
    shared = ms.active_feature("shared-attention-mask").args
    return plan_of_rule(MaskRule(shared.kind, shared.width, shared.prefix), args, tokens, ranks, device)


class AdaptiveCoreAttention(CoreAttention):
    """Core attention by `adaptive_attention`, inside head all-to-alls between neighbouring ranks if there are any."""

    feature: AdaptiveCp
    knows_documents = False

    def mask_kind(self, given: AttnMaskType | None) -> AttnMaskType:
        """Return the kind of mask; one that comes with the batch is read whatever its kind."""
        return AttnMaskType.arbitrary if self.feature.args.dynamic_mask else super().mask_kind(given)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visibility: AttentionVisibility) -> Tensor:
        if visibility.ends or self.position_bias is not None:
            what = "packed documents" if visibility.ends else "a position bias (ALiBi)"
            raise _refused(
                f"adaptive-cp does not support {what}",
                "use ring-attention, ulysses-attention or another context-parallel algorithm",
            )
        degree, outer = self.feature.args.ulysses_degree, self.group
        if degree > 1:
            groups = require_groups(self.feature.groups, _NAME)
            outer = groups.outer
        plan = self._plan(visibility, query.shape[0] * self.group.size(), outer.size(), query.device)

        def across(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return adaptive_attention(q, k, v, outer, plan, scale=self.scale, dropout=self.dropout_p)

        return across(query, key, value) if degree == 1 else attention_by_heads(query, key, value, groups.inner, across, _NAME)

    def _plan(self, visibility: AttentionVisibility, tokens: int, ranks: int, device: torch.device) -> AdaptivePlan:
        if self.feature.args.dynamic_mask:
            if visibility.mask is None:
                raise _refused("a batch has no attention mask", "remove --no-create-attention-mask-in-dataloader")
            return self.feature.plans.of(visibility.mask, tokens, ranks)
        if not visibility.causal:
            raise _refused(
                "the attention is not causal, but no shared attention mask is configured", "--set adaptive-cp.dynamic_mask=true"
            )
        return _shared_plan(self.feature.args, tokens, ranks, device)


@batch_slicer
def share_of_batch(batch: dict[str, Any], cp_group: Any) -> dict[str, Any]:
    """Replaces Megatron's slicing of a batch. The attention mask is kept whole, for blocks of any rank are computed."""
    some = next((value for name, value in batch.items() if value is not None and name != "attention_mask"), None)
    return batch if some is None else batch_share(batch, cp_group, _layout_of(some, 1), lambda mask: mask)


def share_of_table(pos_emb: Tensor, seq_dim: int, cp_group: Any) -> Tensor:
    """Replaces Megatron's slicing of a position table."""
    return table_share(pos_emb, seq_dim, cp_group, _layout_of(pos_emb, seq_dim))


def _layout_of(whole: Tensor, dim: int) -> Callable[[int], Layout]:
    """Give the layout of a tensor with all tokens in a dimension, as a function of the number of ranks."""

    def layout(ranks: int) -> Layout:
        args: AdaptiveCpArgs = ms.active_feature(_NAME).args
        outer = ranks // args.ulysses_degree
        order = contiguous(outer) if args.dynamic_mask else _shared_plan(args, whole.shape[dim], outer, whole.device).layout
        return nested(order, args.ulysses_degree)

    return layout


def _refused(sentence: str, fix: str) -> ms.MindSpeedError:
    return ms.MindSpeedError([ms.Problem("MS333", f"{_NAME}: {sentence}", (_NAME,), fix=ms.Fix.advise(fix))])
