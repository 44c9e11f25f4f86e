"""Megatron's core attention under context parallelism: its arguments, scale and dropout, and an algorithm's attention."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from mindspeed.context_parallel.documents import are_documents, ends_of_packed, ends_of_rows, is_padded
from mindspeed.context_parallel.position_bias import PositionBias
from mindspeed.job.hybrid_pattern import ATTENTION
from mindspeed.megatron.module_specs import with_modules
from mindspeed.ops.attention_mask import AttentionVisibility, attention_visibility
from mindspeed.plugins import Feature, Fix, MindSpeedError, Problem


class CoreAttention(MegatronModule, ABC):  # type: ignore[misc]  # megatron has no types
    """Replaces Megatron's local core attention, whose constructor accepts only one context-parallel rank.

    A subclass says in `attend` how queries reach the keys of other ranks. A causal mask is never read, as in Transformer
    Engine; any other mask has the rows of this rank and all columns.
    """

    knows_documents: ClassVar[bool] = True

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,  # these two come from multi-latent attention; the tensors have them
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        model_comm_pgs: Any = None,  # its name before Megatron 0.15
        position_bias: PositionBias | None = None,
        *,
        feature: Feature[Any],
    ) -> None:
        """``feature`` is the instance whose layer this is; `with_core_attention` puts it into the parameters of the spec.

        ``attention_number`` counts the attention layers of the model from 1, over all pipeline stages.
        """
        super().__init__(config=config)
        self.feature = feature
        self.layer_number = max(1, layer_number)
        pattern = feature.world.pattern
        self.attention_number = max(1, pattern.count(ATTENTION, layer_number)) if pattern.layers else self.layer_number
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale
        groups = pg_collection or model_comm_pgs
        self.group = getattr(groups, "cp", None) or parallel_state.get_context_parallel_group()
        self.position_bias = None if position_bias is None else position_bias.of_rank(groups)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """``query`` is [tokens here, B, N, D], key and value [tokens here, B, K, D | E]. Gives [tokens here, B, N * E].

        Packed sequences come without B and go without it.
        """
        kind = self.mask_kind(attn_mask_type)
        if attention_bias is not None:
            raise self._refused("the model adds a bias to its attention scores")
        packed = packed_seq_params is not None
        causal = kind == AttnMaskType.causal or (packed and kind == AttnMaskType.padding_causal)
        if packed:
            visibility = attention_visibility(causal, ends=(self._packed(packed_seq_params, query, causal),))
            return self.attend(query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), visibility).flatten(1)
        if are_documents(attention_mask):
            visibility = attention_visibility(causal, ends=ends_of_rows(attention_mask))
        else:
            visibility = attention_visibility(causal, None if causal else attention_mask)
        return self.attend(query, key, value, visibility).flatten(2)

    def mask_kind(self, given: AttnMaskType | None) -> AttnMaskType:
        """Return the kind of mask of a call: the given one, or that of the layer."""
        return self.attn_mask_type if given is None else given

    def _packed(self, packed: Any, query: Tensor, causal: bool) -> tuple[int, ...]:
        """The ends of packed sequences in the row that this rank has a share of."""
        spread = self.group.size() > 1
        wrong = {
            f"packed sequences have the format {packed.qkv_format}, but only thd is supported": query.dim() != 3,
            "packed sequences contain padding, which non-causal attention would include": not causal and is_padded(packed),
            "apply_rope_fusion expects packed sequences in Transformer Engine's layout": spread
            and self.config.apply_rope_fusion,
            "multi-token prediction expects the next tokens of packed sequences in Transformer Engine's layout": (
                spread and bool(getattr(self.config, "mtp_num_layers", None))
            ),
        }
        tokens = query.shape[0] * self.group.size()
        ends, of_keys = ends_of_packed(packed, "q", tokens), ends_of_packed(packed, "kv", tokens)
        wrong["queries and keys have different document ends"] = ends != of_keys
        if any(wrong.values()):
            raise self._refused(next(sentence for sentence, holds in wrong.items() if holds))
        return ends

    def _refused(self, sentence: str) -> MindSpeedError:
        name = self.feature.spec.name
        return MindSpeedError([Problem("MS304", f"{name}: {sentence}", (name,), fix=Fix.give_field("cp", 1))])

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, visibility: AttentionVisibility) -> Tensor:
        """Give the result [tokens here, B, N, E]."""

    @property
    def dropout_p(self) -> float:
        """The probability of dropout, 0 outside of training."""
        return float(self.dropout) if self.training else 0.0

    def slopes_on(self, device: torch.device) -> Tensor | None:
        """The slopes of ALiBi for the heads of this rank, None without it."""
        return None if self.position_bias is None else self.position_bias.slopes_on(device)

    def attention_kwargs(self, visibility: AttentionVisibility, device: torch.device) -> dict[str, Any]:
        """The keyword arguments that ring attention and its like share: visibility, slopes, scale and dropout."""
        seen = {"causal": visibility.causal, "mask": visibility.mask, "ends": visibility.ends}
        return {**seen, "slopes": self.slopes_on(device), "scale": self.scale, "dropout": self.dropout_p}


def with_core_attention(spec: Any, attention: type[CoreAttention], feature: Feature[Any]) -> Any:
    """Exchange every core attention of a block's spec for one of a feature."""
    engine = sys.modules.get("megatron.core.extensions.transformer_engine")
    fused = [cls] if (cls := getattr(engine, "TEDotProductAttention", None)) else []
    return with_modules(spec, dict.fromkeys([DotProductAttention, *fused], ModuleSpec(attention, {"feature": feature})))
