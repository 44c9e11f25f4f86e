"""The model's side: core attentions that support documents, and a batch that contains their ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mindspeed import plugins as ms
from mindspeed.context_parallel.blocks import Scoring
from mindspeed.context_parallel.core_attention import CoreAttention, with_core_attention
from mindspeed.context_parallel.documents import are_documents
from mindspeed.context_parallel.local_attention import attention
from mindspeed.features.eod_reset.batches import ends_of_positions, for_model
from mindspeed.megatron.module_specs import with_parts
from mindspeed.ops.attention_mask import AttentionVisibility

_NAME = "eod-reset"


class DocumentAttention(CoreAttention):
    """Core attention of one rank by the tiles and the operator of context parallelism."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visibility: AttentionVisibility) -> Tensor:
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        scoring = Scoring(scale, visibility, self.slopes_on(query.device), self.dropout_p, dist.get_rank())
        whole = [(0, query.shape[0])]
        return attention(query, key, value, scoring, whole, whole)


def with_documents(spec: Any, feature: ms.Feature[Any]) -> Any:
    """The spec of a block in which no core attention ignores documents: Megatron's own is exchanged."""
    return with_core_attention(spec, DocumentAttention, feature) if _ranks() == 1 and _ignorant(spec) else spec


def attention_without_documents(feature: ms.Feature[Any], spec: Any, config: Any) -> Iterator[str]:
    """Name the core attentions of a spec that ignore documents, and that no feature exchanges for one that does not."""
    for name in sorted(_ignorant(with_core_attention(spec, DocumentAttention, feature))):
        yield f"the core attention {name} of the model ignores document ends"
    if _ranks() == 1 and config.window_size is not None and ms.active_feature("flash-attention") is None:
        yield "window_size is set, but packed documents with a sliding window need flash-attention"


def _ignorant(spec: Any) -> set[str]:
    """Return the names of core attentions in a spec that would not read where documents end."""
    found: set[str] = set()

    def look(name: str, part: Any) -> Any:
        core = getattr(part, "module", part) if name == "core_attention" else None
        if isinstance(core, type) and not getattr(core, "knows_documents", False):
            found.add(core.__name__)
        return part

    with_parts(spec, look)
    return found


def with_documents_required(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``forward(model, tokens, position_ids, attention_mask, ...)`` of a GPTModel or HybridModel.

    Raises MS335 for a batch that does not say where its documents end; packed sequences say it themselves.
    """

    @wraps(forward)
    def wrapped(
        model: Any, input_ids: Any, position_ids: Any = None, attention_mask: Any = None, *rest: Any, **named: Any
    ) -> Any:
        says = are_documents(attention_mask) or named.get("packed_seq_params") is not None
        infers = named.get("inference_context") is not None or named.get("inference_params") is not None
        if not says and not infers:
            if position_ids is None or _ranks() > 1:
                raise ms.MindSpeedError([_unknown()])
            attention_mask, position_ids = ends_of_positions(position_ids), for_model(position_ids)
        return forward(model, input_ids, position_ids, attention_mask, *rest, **named)

    return wrapped


def _unknown() -> ms.Problem:
    text = "the model received a batch without document ends"
    fix = (
        "call megatron.core.utils.get_batch_on_this_cp_rank(batch) on every stage. In batch, give position_ids, and None as "
        "attention_mask. The function returns the document ends as attention_mask; pass this attention_mask to the model"
    )
    return ms.Problem("MS335", text, (_NAME,), fix=ms.Fix.advise(fix))


def _ranks() -> int:
    return int(parallel_state.get_context_parallel_world_size())
