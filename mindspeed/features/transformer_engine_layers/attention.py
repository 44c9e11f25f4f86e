"""The role of core attention."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Final

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.dot_product_attention import DotProductAttention as LocalAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from mindspeed.context_parallel.documents import ends_of_packed, is_padded
from mindspeed.context_parallel.fused_attention import ALL, BAND, CAUSAL, SparseMode, attend_packed
from mindspeed.features.transformer_engine_layers.interface import refuse, refuse_options, refuse_unknown
from mindspeed.features.transformer_engine_layers.modules import DotProductAttention, accept_missing_extra_state
from mindspeed.features.transformer_engine_layers.sharding import sharded_parameters
from mindspeed.ops.fusion_attention import UNBOUNDED

_CAUSAL_KINDS: Final = (AttnMaskType.causal, AttnMaskType.padding_causal)


class TEDotProductAttention(DotProductAttention, LocalAttention):  # type: ignore[misc]  # megatron has no types
    """Megatron's local core attention in the role of Transformer Engine's.

    Packed sequences (thd), which the local one does not have, are computed by ``mindspeed::fusion_attention``.
    """

    config: Any
    scale_mask_softmax: Any
    attention_dropout: Any
    softmax_offset: Any
    softmax_scale: float
    layer_number: int
    hidden_size_per_attention_head: int
    num_attention_heads_per_partition: int
    stands_for = LocalAttention
    knows_documents: ClassVar[bool] = False
    cp_stream: ClassVar[Any] = None

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = "p2p",
        pg_collection: Any = None,
        model_comm_pgs: Any = None,  # its name before Megatron 0.15
        **newer: Any,
    ) -> None:
        role = "TEDotProductAttention"
        refuse_unknown(role, newer | {"num_splits": num_splits})
        refuse_options(role, config)
        for option in ("qk_clip", "log_max_attention_logit"):
            if getattr(config, option, False):
                refuse(role, f"does not return the largest attention logits ({option})", f"remove {option}")
        groups = {"pg_collection": pg_collection, "model_comm_pgs": model_comm_pgs}
        LocalAttention.__init__(
            self,
            config,
            layer_number,
            attn_mask_type,
            attention_type,
            attention_dropout=attention_dropout,
            softmax_scale=softmax_scale,
            **{name: group for name, group in groups.items() if group is not None},
        )
        if k_channels is not None and softmax_scale is None:
            self.softmax_scale *= (self.hidden_size_per_attention_head / k_channels) ** 0.5
        if v_channels is not None:
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels
        self._tp_group = getattr(self, "tp_group", None)
        self.window_size = _window(self._local_window(), attn_mask_type)
        self.qkv_format = "sbhd"
        accept_missing_extra_state(self)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """``query`` is [S, B, N, D], key and value [T, B, K, D | E]; of packed sequences [T, N, D]. Gives [S, B, N * E]."""
        refuse_unknown("TEDotProductAttention", {"num_splits": num_splits})
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        if attention_bias is not None:
            return self._with_bias(query, key, value, attention_mask, kind, attention_bias)
        if packed_seq_params is not None and query.dim() == 3:
            return self._packed(query, key, value, kind, packed_seq_params)
        self.scale_mask_softmax.attn_mask_type = kind
        result: Tensor = LocalAttention.forward(self, query, key, value, attention_mask)
        return result

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, kind: AttnMaskType, packed: Any) -> Tensor:
        """Attend within each of the packed sequences; padding behind one counts as its last tokens."""
        if (kind_of_softmax := getattr(self.config, "softmax_type", "vanilla")) != "vanilla":
            text = f"does not support softmax_type {kind_of_softmax} for packed sequences"
            refuse("TEDotProductAttention", text, "use one sequence per row")
        causal = kind in _CAUSAL_KINDS
        if not causal and is_padded(packed):
            text = "does not support padded packed sequences with attention that is not causal"
            refuse("TEDotProductAttention", text, "give packed sequences without padding")
        sparse = SparseMode(CAUSAL) if causal else SparseMode(ALL)
        if (window := self._local_window()) is not None:
            before, after = (UNBOUNDED if side < 0 else side for side in window)
            sparse = SparseMode(BAND, before, after)
        keep = 1 - self.attention_dropout.p if self.training else 1.0
        ends_q = [*ends_of_packed(packed, "q", query.shape[0])]
        ends_kv = [*ends_of_packed(packed, "kv", key.shape[0])]
        with self._random(keep):
            return attend_packed(query, key, value, (ends_q, ends_kv), sparse, self._scale, keep).flatten(1)

    def _with_bias(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kind: AttnMaskType, bias: Tensor
    ) -> Tensor:
        """Attend with a bias [B | 1, N | 1, S, T] that is added to the scaled scores."""
        if key.shape[2] != query.shape[2]:
            key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
        scores = torch.einsum("sbnd,tbnd->bnst", query, key) * self._scale + bias
        self.scale_mask_softmax.attn_mask_type = kind
        softmax = self.scale_mask_softmax
        scale, softmax.scale = softmax.scale, None
        try:
            probabilities = softmax.forward_torch_softmax(scores, mask, self.softmax_offset)
        finally:
            softmax.scale = scale
        with self._random(1 - self.attention_dropout.p):
            probabilities = self.attention_dropout(probabilities)
        return torch.einsum("bnst,tbne->sbne", probabilities, value).flatten(2)

    @property
    def _scale(self) -> float:
        """Megatron divides the scale by the number of the layer and multiplies the scores by it again, against overflow."""
        layers = self.layer_number if self.config.apply_query_key_layer_scaling else 1
        return self.softmax_scale * layers

    def _random(self, keep: float) -> AbstractContextManager[Any]:
        """The random state for dropout: one of each tensor-parallel rank, for each has other heads."""
        shared = keep == 1 or self.config.sequence_parallel
        random: AbstractContextManager[Any] = nullcontext() if shared else get_cuda_rng_tracker().fork()
        return random

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the learnable softmax offset, split over tensor-parallel ranks; nothing without one."""
        learnable = getattr(self.config, "softmax_type", "vanilla") == "learnable"  # a field since Megatron 0.15
        state: dict[str, Any] | None = None if learnable else {}
        return sharded_parameters(self, {"softmax_offset": 0}, prefix, sharded_offsets, metadata, state)

    def _local_window(self) -> tuple[int, int] | None:
        """Return the window of this layer; local attention has none before Megatron 0.15."""
        if hasattr(self.scale_mask_softmax, "window_size"):
            window: tuple[int, int] | None = self.scale_mask_softmax.window_size
            return window
        if self.config.window_size is not None:
            refuse(
                "TEDotProductAttention", "does not support window_size with this Megatron", "use megatron-core 0.15 or newer"
            )
        return None


def _window(given: tuple[int, int] | None, kind: AttnMaskType) -> tuple[int, int]:
    """Return the tokens before and after each one that it attends to, as Transformer Engine names them; -1 is all."""
    if given is None:
        return (-1, 0 if "causal" in kind.name else -1)
    if not isinstance(given, tuple | list) or len(given) != 2:
        refuse("TEDotProductAttention", f"needs two sides of window_size, but it is {given}", "set window_size to a pair")
    return (given[0], given[1])
