"""`fusion_attention` by ``npu_fusion_attention`` and its ``_grad``, or by ``_v2`` and ``_grad_v2`` for bias types 0, 2 and 3.

Masks: modes 0, 1 and 5 hand over the mask, with the window of 0 and the prefixes of 5 drawn into it; the others get the
compressed mask of their own shape, whatever mask the call came with. Statistics have their eight repetitions, those of packed
sequences in the order of tokens. Where rows may be hidden ``inner_precise`` is 2, and their statistics become (-inf, 0); in
backward they go in as (largest, 1), so that every probability of theirs is 0.

torch_npu draws a seed and an offset for dropout from the generator of the device, whose state is on the host. They are the
random state of the call, which backward hands over again.

The reference runs a dropout of everything, fp64, empty tensors, values wider than keys, and what the documentation of torch_npu
excludes (`_supports`).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from mindspeed.ops.attention_arguments import AttentionGradientInputs, AttentionOptions
from mindspeed.ops.attention_layout import head_width, heads_like, lengths_of, probabilities, sizes
from mindspeed.ops.attention_mask import FULL_MASK_MODES, compressed_mask
from mindspeed.ops.fusion_attention import UNBOUNDED, state_like
from mindspeed.ops.npu import TYPES
from mindspeed.ops.numerics import filled
from mindspeed.ops.registration import Kernel

_WIDTH, _WIDTH_V2, _HEADS, _PREFIXES = 768, 512, 256, 32
_HIDES_ROWS: Final = 2
_UNSEEN: Final = -1e30
_LARGEST: Final = torch.finfo(torch.float32).max


class MaskArguments(NamedTuple):
    """The arguments of torch_npu that say which keys a query sees, made of the options and the mask of a call."""

    mask: Tensor | None
    mode: int
    before: int
    after: int
    prefix: list[int] | None
    precise: int
    statistics: str


def _supports(query: Tensor, key: Tensor, value: Tensor, pse: Tensor | None, options: AttentionOptions) -> bool:
    """Return whether torch_npu documents the call."""
    if options.keep_prob == 0 or query.dtype not in TYPES or not filled(query, key, value):
        return False
    groups = heads_like(key, options.layout, query, options.heads)
    width = head_width(query, options.layout, options.heads)
    limit = _WIDTH if pse is None or options.pse_type == 1 else _WIDTH_V2
    if width > limit or head_width(value, options.layout, groups) > width or options.heads > _HEADS:
        return False
    lengths = lengths_of(query, key, options)
    if any((queries and not keys) or (pse is not None and not queries) for queries, keys in lengths):
        return False
    return options.mode not in (5, 6) or len(lengths) <= _PREFIXES


def _full_mask(mask: Tensor, lengths: list[tuple[int, int]], options: AttentionOptions) -> Tensor:
    """``mask`` that also hides what the window of mode 0 or the prefixes of mode 5 do: torch_npu expects to find it there."""
    queries, keys = max(q for q, _ in lengths), max(k for _, k in lengths)
    mask = mask[..., :queries, :keys]
    i, j = torch.arange(queries, device=mask.device)[:, None], torch.arange(keys, device=mask.device)
    if options.mode == 0 and (options.before < queries or options.after < keys):
        mask = mask | (j < i - options.before) | (j > i + options.after)
    if options.mode == 5:
        mask = mask | torch.stack([(j > i + keys - queries) & (j >= prefix) for prefix in options.prefix or []])[:, None]
    if mask.dim() == 4 and mask.shape[1] > 1:
        mask = mask.expand(len(lengths), -1, -1, -1)
    return mask.contiguous()


def mask_arguments(query: Tensor, key: Tensor, mask: Tensor | None, options: AttentionOptions) -> MaskArguments:
    """The mask, mode and tokens of a call."""
    statistics = "TND" if options.layout == "TND" else ""
    if mask is None:
        return MaskArguments(None, 0, UNBOUNDED, UNBOUNDED, None, 0, statistics)
    mode, lengths = options.mode, lengths_of(query, key, options)
    by_formula = mode not in FULL_MASK_MODES
    mask = compressed_mask(query.device, mode == 6) if by_formula else _full_mask(mask, lengths, options)
    prefix = None
    if options.prefix is not None and mode in (5, 6):
        prefix = [max(p, k - q) for p, (q, k) in zip(options.prefix, lengths, strict=True)]
    hides = mode not in (2, 3, 6) or (mode != 2 and any(q > k for q, k in lengths))
    return MaskArguments(mask, mode, options.before, options.after, prefix, _HIDES_ROWS if hides else 0, statistics)


def _spread(pse: Tensor | None, query: Tensor, options: AttentionOptions) -> Tensor | None:
    """The bias; one row for all queries is taken with one entry per sequence only."""
    if pse is None or options.pse_type >= 2 or pse.shape[-2] > 1 or options.layout == "TND":
        return pse
    return pse.expand(sizes(query, options.layout)[0], -1, -1, -1).contiguous()


def _supports_forward(query: Tensor, key: Tensor, value: Tensor, pse: Tensor | None, mask: Any, *rest: Any) -> bool:
    return _supports(query, key, value, pse, AttentionOptions(*rest))


def _supports_backward(*args: Any) -> bool:
    inputs = AttentionGradientInputs.of(*args)
    return _supports(inputs.query, inputs.key, inputs.value, inputs.pse, inputs.options)


def forward(
    query: Tensor, key: Tensor, value: Tensor, pse: Tensor | None, mask: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = AttentionOptions(*rest)
    masking, bias = mask_arguments(query, key, mask, options), _spread(pse, query, options)
    if bias is None or options.pse_type == 1:
        out, maximum, total, _, seed, offset, _ = torch.ops.npu.npu_fusion_attention(
            query,
            key,
            value,
            options.heads,
            options.layout,
            pse=bias,
            atten_mask=masking.mask,
            scale=options.scale,
            keep_prob=options.keep_prob,
            pre_tockens=masking.before,
            next_tockens=masking.after,
            inner_precise=masking.precise,
            prefix=masking.prefix,
            actual_seq_qlen=options.q_ends,
            actual_seq_kvlen=options.kv_ends,
            sparse_mode=masking.mode,
            softmax_layout=masking.statistics,
        )
    else:
        out, maximum, total, _, seed, offset, _ = torch.ops.npu.npu_fusion_attention_v2(
            query,
            key,
            value,
            options.heads,
            options.layout,
            pse=bias,
            atten_mask=masking.mask,
            scale=options.scale,
            keep_prob=options.keep_prob,
            pre_tokens=masking.before,
            next_tokens=masking.after,
            inner_precise=masking.precise,
            prefix=masking.prefix,
            actual_seq_qlen=options.q_ends,
            actual_seq_kvlen=options.kv_ends,
            sparse_mode=masking.mode,
            pse_type=options.pse_type,
            q_start_idx=[options.q_start],
            kv_start_idx=[options.kv_start],
            softmax_layout=masking.statistics,
        )
    if masking.precise == _HIDES_ROWS:
        unseen = (maximum < _UNSEEN) | (total == 0)
        maximum, total = maximum.masked_fill(unseen, -torch.inf), total.masked_fill(unseen, 0.0)
    if options.keep_prob == 1:
        return out, maximum, total, state_like(query, options)
    return out, maximum, total, torch.tensor([seed, offset], dtype=torch.int64)


def backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dout, query, key, value, pse, mask, state, out, maximum, total, of_pse, options = AttentionGradientInputs.of(*args)
    masking, bias = mask_arguments(query, key, mask, options), _spread(pse, query, options)
    if masking.precise == _HIDES_ROWS:
        unseen = total == 0
        maximum, total = maximum.masked_fill(unseen, _LARGEST), total.masked_fill(unseen, 1.0)
    seed, offset = (0, 0) if state is None else state.tolist()
    numels = 0 if state is None else probabilities(query, key, options)
    if bias is None or options.pse_type == 1:
        dq, dk, dv, dpse = torch.ops.npu.npu_fusion_attention_grad(
            query,
            key,
            value,
            dout,
            options.heads,
            options.layout,
            pse=bias,
            atten_mask=masking.mask,
            softmax_max=maximum,
            softmax_sum=total,
            attention_in=out,
            scale_value=options.scale,
            keep_prob=options.keep_prob,
            pre_tockens=masking.before,
            next_tockens=masking.after,
            inner_precise=masking.precise,
            seed=seed,
            offset=offset,
            numels=numels,
            prefix=masking.prefix,
            actual_seq_qlen=options.q_ends,
            actual_seq_kvlen=options.kv_ends,
            sparse_mode=masking.mode,
            softmax_layout=masking.statistics,
        )[:4]
    else:
        dq, dk, dv, dpse = torch.ops.npu.npu_fusion_attention_grad_v2(
            query,
            key,
            value,
            dout,
            options.heads,
            options.layout,
            pse=bias,
            atten_mask=masking.mask,
            softmax_max=maximum,
            softmax_sum=total,
            attention_in=out,
            scale_value=options.scale,
            keep_prob=options.keep_prob,
            pre_tokens=masking.before,
            next_tokens=masking.after,
            inner_precise=masking.precise,
            seed=seed,
            offset=offset,
            numels=numels,
            prefix=masking.prefix,
            actual_seq_qlen=options.q_ends,
            actual_seq_kvlen=options.kv_ends,
            sparse_mode=masking.mode,
            pse_type=options.pse_type,
            q_start_idx=[options.q_start],
            kv_start_idx=[options.kv_start],
            softmax_layout=masking.statistics,
        )[:4]
    return dq, dk, dv, dpse.sum_to_size(pse.shape) if of_pse and pse is not None else query.new_empty(0)


KERNELS: Final[dict[str, Kernel]] = {
    "fusion_attention": Kernel(forward, _supports_forward),
    "fusion_attention_backward": Kernel(backward, _supports_backward),
}
