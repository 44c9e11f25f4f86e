"""The core attention that layers are built with, and its place in Megatron's specs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from mindspeed import plugins as ms
from mindspeed.context_parallel.documents import are_documents, ends_of_packed, ends_of_rows, in_one_row, is_padded
from mindspeed.context_parallel.fused_attention import ALL, BAND, CAUSAL, FULL_MASK, SparseMode, attend, attend_packed
from mindspeed.context_parallel.position_bias import PositionBias
from mindspeed.megatron.module_specs import is_unpatched, with_modules
from mindspeed.ops.fusion_attention import UNBOUNDED
from mindspeed.ops.numerics import unflatten

if TYPE_CHECKING:
    from mindspeed.features.flash_attention.feature import FlashAttentionArgs


def with_flash_attention(spec: Any, args: FlashAttentionArgs) -> Any:
    """The spec of a block with every local core attention exchanged for one with these settings.

    Where the forward of Megatron's is patched, the spec stays as it is: a subclass would never call the patch.
    """
    if not is_unpatched(DotProductAttention.forward, DotProductAttention):
        return spec
    return with_modules(spec, {DotProductAttention: ModuleSpec(FlashCoreAttention, {"settings": args})})


class FlashCoreAttention(DotProductAttention):  # type: ignore[misc]  # megatron has no types
    """Megatron's local core attention, whose arguments, scale and dropout it has, without the score matrix.

    Beyond it: packed sequences. Queries that see no key give zeros, where Megatron gives the mean of all values.
    """

    knows_documents: ClassVar[bool] = True

    def __init__(
        self, *args: Any, settings: FlashAttentionArgs, position_bias: PositionBias | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.settings = settings
        groups = kwargs.get("pg_collection") or kwargs.get("model_comm_pgs")  # its name before Megatron 0.15
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
        """``query`` is [S, B, N, D], key and value [T, B, K, D | E]; of packed sequences [T, N, D]. Gives [S, B, N * E]."""
        if attention_bias is not None:
            raise ms.MindSpeedError([_problem("the model adds a bias to its attention scores", "remove flash-attention")])
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        keep = 1 - self.attention_dropout.p if self.training else 1.0
        rows = are_documents(attention_mask)
        packed = rows or (packed_seq_params is not None and query.dim() == 3)
        if packed and self.position_bias is not None and self.position_bias.matrix:
            sentence = "packed sequences support a position bias from slopes, but not from a matrix"
            raise ms.MindSpeedError([_problem(sentence, "--set alibi.fused_type=2, without square, opposite and fill")])
        sparse = self._sparse_mode(kind, None if rows else attention_mask, packed)
        if packed and not rows and sparse.mode == ALL and is_padded(packed_seq_params):
            text = "flash-attention: packed sequences contain padding, which non-causal attention would include"
            raise ms.MindSpeedError(
                [ms.Problem("MS337", text, ("flash-attention",), fix=ms.Fix.advise("give packed sequences without padding"))]
            )
        with self._random(keep):
            if are_documents(attention_mask):
                q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
                ends = in_one_row(ends_of_rows(attention_mask))
                out = attend_packed(q, k, v, (ends, ends), sparse, self._scale(), keep, self.position_bias)
                return unflatten(out, 0, (query.shape[1], -1)).transpose(0, 1).flatten(2)
            if packed:
                ends_q = [*ends_of_packed(packed_seq_params, "q", query.shape[0])]
                ends_kv = [*ends_of_packed(packed_seq_params, "kv", key.shape[0])]
                return attend_packed(query, key, value, (ends_q, ends_kv), sparse, self._scale(), keep, self.position_bias)
            return attend(query, key, value, sparse, self._scale(), keep, self.position_bias)

    def _sparse_mode(self, kind: AttnMaskType, mask: Tensor | None, packed: bool) -> SparseMode:
        """The setting, else the window of this layer, else the mask that was given, else what the type of the mask says."""
        window = getattr(self.scale_mask_softmax, "window_size", None)
        mode = self.settings.sparse_mode
        if mode is not None and kind != AttnMaskType.no_mask and (mode not in FULL_MASK or mask is not None):
            return SparseMode(mode, self.settings.pre_tokens, self.settings.next_tokens, mask)
        if window is not None:
            before, after = (UNBOUNDED if side < 0 else side for side in window)
            return SparseMode(BAND, before, after)
        if mask is not None and not packed:
            return SparseMode(ALL, mask=mask)
        causal = kind == AttnMaskType.causal or (packed and kind == AttnMaskType.padding_causal)
        return SparseMode(CAUSAL) if causal else SparseMode(ALL)

    def _scale(self) -> float:
        """Megatron divides the scale by the number of the layer and multiplies the scores by it again, against overflow."""
        scale: float = self.softmax_scale
        return scale * self.layer_number if self.config.apply_query_key_layer_scaling else scale

    def _random(self, keep: float) -> AbstractContextManager[Any]:
        """The random state for dropout: one of each tensor-parallel rank, for each has other heads."""
        shared = keep == 1 or self.config.sequence_parallel
        random: AbstractContextManager[Any] = nullcontext() if shared else get_cuda_rng_tracker().fork()
        return random


def _problem(sentence: str, fix: str) -> ms.Problem:
    return ms.Problem("MS304", f"flash-attention: {sentence}", ("flash-attention",), fix=ms.Fix.advise(fix))
