"""Attention without the score matrix: all layouts, sparse modes, position biases, shared key heads, regenerated dropout.

``P = softmax(masked logits)``, logits ``scale (Q K^T + pse)`` for type 1 and ``scale Q K^T + pse`` otherwise,
``out = dropout(P) V``; a query that sees no key gives zeros, maximum -inf and sum 0. Computed in fp32 (fp64 for fp64 input) in
strips of queries and rounded once. Saved for backward: query, key, value, bias, mask, the result, the maximum and the sum
of each row, and the random state of the dropout mask; never probabilities or the mask of the dropout.

The statistics of the operator have the lanes of the device's kernel, equal numbers: see `lanes`. With ``keep_prob`` below 1 it
draws from the generator of the device, and its last result (int64, a seed and an offset) makes the mask again in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from mindspeed.ops.attention_arguments import AttentionGradientInputs, AttentionOptions
from mindspeed.ops.attention_checks import check_call, check_results
from mindspeed.ops.attention_layout import (
    head_view,
    head_width,
    heads_like,
    lengths_of,
    packed_view,
    probabilities,
    sizes,
)
from mindspeed.ops.attention_mask import compressed_mask, sequence_at_edge, visible_pairs
from mindspeed.ops.attention_scores import AttentionBatch, AttentionScores, Dropout, Span, scores_of
from mindspeed.ops.autocast import in_autocast_type
from mindspeed.ops.npu_ring_attention_update import sequence_major, token_major
from mindspeed.ops.numerics import unflatten, wide, wide_type
from mindspeed.ops.registration import define

_NUMBERS: Final = 1 << 22
"""Probabilities in one strip, unless that would leave fewer than ``_ROWS`` queries."""
_ROWS: Final = 64


def _strips(q_BKGSD: Tensor, scores: AttentionScores) -> Iterator[tuple[Span, Span]]:
    """Ranges of queries, each with the range of keys that they may see."""
    b, k, g, queries, _ = q_BKGSD.shape
    rows = max(_ROWS, _NUMBERS // max(b * k * g * scores.size[1], 1))
    for start in range(0, queries, rows):
        end = min(start + rows, queries)
        yield (start, end), scores.visibility.columns(start, end, scores.size[1])


def _product(x_BKGSD: Tensor, y_BKDT: Tensor) -> Tensor:
    """Matrix product of all the heads of a group with what they share."""
    b, k, g, s, _ = x_BKGSD.shape
    return (x_BKGSD.flatten(2, 3) @ y_BKDT).view(b, k, g, s, y_BKDT.shape[-1])


def _shifted(logits: Tensor, maximum: Tensor) -> Tensor:
    """``exp(logits - maximum)``; in a row that sees no key the maximum is -inf and all of it is zero."""
    return torch.exp(logits - maximum.masked_fill(maximum == -torch.inf, 0)[..., None])


def forward(part: AttentionBatch) -> None:
    """Write the result, and the maximum and the sum of each row's softmax, [B, K, G, S]."""
    (q_BKGSD, out_BKGSE), (k_BKTD, v_BKTE), (maximum, total), scores = part.by_group
    k_wide, v_wide = wide(k_BKTD), wide(v_BKTE)
    for rows, columns in _strips(q_BKGSD, scores):
        here, there = slice(*rows), slice(*columns)
        if columns[0] == columns[1]:
            out_BKGSE[..., here, :], maximum[..., here], total[..., here] = 0.0, -torch.inf, 0.0
            continue
        products = _product(wide(q_BKGSD[..., here, :]), k_wide[:, :, there].transpose(-1, -2))
        logits = scores.logits(products, rows, columns)
        maximum[..., here] = logits.amax(-1)
        weights = _shifted(logits, maximum[..., here])
        total[..., here] = weights.sum(-1)
        if scores.dropout is not None:
            weights = weights * scores.dropout.factors(rows, columns, weights.dtype)
        sums = total[..., here, None]
        out_BKGSE[..., here, :] = _product(weights, v_wide[:, :, there]) / sums.masked_fill(sums == 0, 1)


def backward(part: AttentionBatch, dbias: Tensor | None) -> None:
    """Write the gradients of queries, keys and values, and add that of the bias to ``dbias``, if there is one.

    With P the probabilities and M the dropout factors: ``dV = (P M)^T dO``, ``dP = (dO V^T) M``,
    ``dS = P (dP - rowsum(dO O))``, ``dQ = scale dS K``, ``dK = scale dS^T Q``.
    """
    (q_BKGSD, out_BKGSE, dout_BKGSE, dq), (k_BKTD, v_BKTE, dk, dv), (maximum, total), scores = part.by_group
    k_wide, v_wide = wide(k_BKTD), wide(v_BKTE)
    dk_wide, dv_wide = torch.zeros_like(k_wide), torch.zeros_like(v_wide)
    for rows, columns in _strips(q_BKGSD, scores):
        here, there = slice(*rows), slice(*columns)
        if columns[0] == columns[1]:
            dq[..., here, :] = 0.0
            continue
        q_strip, dout_strip = wide(q_BKGSD[..., here, :]), wide(dout_BKGSE[..., here, :])
        logits = scores.logits(_product(q_strip, k_wide[:, :, there].transpose(-1, -2)), rows, columns)
        sums = total[..., here, None]
        weights = _shifted(logits, maximum[..., here]) / sums.masked_fill(sums == 0, 1)
        dweights = _product(dout_strip, v_wide[:, :, there].transpose(-1, -2))
        kept = weights
        if scores.dropout is not None:
            factors = scores.dropout.factors(rows, columns, weights.dtype)
            kept, dweights = weights * factors, dweights * factors
        delta = (dout_strip * wide(out_BKGSE[..., here, :])).sum(-1, keepdim=True)
        dlogits = weights * (dweights - delta)
        if dbias is not None and scores.bias is not None:
            scaled = dlogits * scores.scale if scores.bias.kind == 1 else dlogits
            scores.bias.add_gradient(dbias, scaled, rows, columns)
        dq[..., here, :] = _product(dlogits, k_wide[:, :, there]) * scores.scale
        dk_wide[:, :, there] += dlogits.flatten(2, 3).transpose(-1, -2) @ q_strip.flatten(2, 3) * scores.scale
        dv_wide[:, :, there] += kept.flatten(2, 3).transpose(-1, -2) @ dout_strip.flatten(2, 3)
    dk.copy_(dk_wide)
    dv.copy_(dv_wide)


_CAUSAL: Final = 3
"""Sparse mode in which the last query sees every key."""
LANES = 8
"""Repetitions in the statistics of the public functions."""
UNBOUNDED = 2147483647


LANES_OF: Final = {"npu": LANES}
"""Repetitions in the statistics of the operator by type of device: as many as its kernel makes and reads."""


def lanes(device: torch.device) -> int:
    """Return the repetitions in the statistics of the operator on a device; one, unless its kernel has more."""
    return LANES_OF.get(device.type, 1)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str = "BSND",
    *,
    causal: bool = True,
    scale: float | None = None,
    keep_prob: float = 1.0,
) -> Tensor:
    """Give the output of attention, causal unless ``causal`` is false, in the layout of ``query``.

    Layouts are those of `fusion_attention`, without TND. With fewer queries than keys, the last query sees every key.
    ``scale`` is one over the root of the width of a head unless it is given. Raises OperatorError for other shapes and types.
    """
    width = query.shape[-1] if input_layout.upper() in ("BSND", "BNSD") else query.shape[-1] // max(1, head_num)
    options: dict[str, Any] = {"scale": width**-0.5 if scale is None else scale, "keep_prob": keep_prob}
    if causal:
        options |= {"atten_mask": compressed_mask(query.device), "sparse_mode": _CAUSAL}
    return fusion_attention(query, key, value, head_num, input_layout, **options)[0]


@in_autocast_type("query", "key", "value")
def fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tokens: int = UNBOUNDED,
    next_tokens: int = UNBOUNDED,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | Tensor | None = None,
    actual_seq_kvlen: Sequence[int] | Tensor | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    pse_type: int = 1,
    q_start_idx: Sequence[int] | None = None,
    kv_start_idx: Sequence[int] | None = None,
    softmax_layout: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | int, Tensor | int, int]:
    """Give ``(out, softmax_max, softmax_sum, reserved, seed, offset, numels)``.

    Layouts: SBH and BSH with H = N D, BSND, BNSD, and TND of packed sequences with cumulative ``actual_seq_qlen`` and
    ``actual_seq_kvlen``. Key and value may have fewer heads, value another width. Statistics are [B, N, S, 8] (TND: [T, N, 8],
    the memory of each sequence holding [N, length, 8] unless ``softmax_layout`` is TND), the last dimension a repetition;
    ``max + log(sum)`` is the logsumexp of a row's logits: its maximum and sum, or, from flash kernels, (logsumexp, 1).

    ``atten_mask`` is bool or uint8, 1 hidden. WITHOUT IT EVERY KEY IS SEEN, whatever sparse_mode and the tokens say. With it,
    query i sees key j, d being keys minus queries: mode 0 where the mask lets it and ``i - pre <= j <= i + next``; 1 where the
    mask lets it; 2 ``j <= i``; 3 ``j <= i + d``; 4 ``i + d - pre <= j <= i + d + next``; 5 and 6 ``j <= i + d`` or
    ``j < prefix[b]``; 7 as 3, the last sequence that is not empty as 4; 8 as 2, the first one as 4. Modes 2, 3, 4, 6, 7, 8 do
    not read the mask: it may be the compressed one of [2048, 2048] (6: [3072, 2048]) or full.

    ``pse_type`` 0 and 1 take ``pse`` as a bias [B | 1, N, S | 1, keys] or its last 1024 rows (causal modes), 2 and 3 take
    fp32 slopes [N] or [B, N] of the distance ``-slope |i + q_start - j - kv_start|`` and of its root. ``seed`` and ``offset``
    are what the dropout mask is made from (0 without dropout). ``inner_precise``, ``gen_mask_parallel`` and ``sync`` change
    nothing. Raises OperatorError for other shapes, types, layouts and modes.
    """
    options = _options(
        (head_num, input_layout.upper(), scale, keep_prob, pre_tokens, next_tokens),
        (prefix, actual_seq_qlen, actual_seq_kvlen),
        (sparse_mode, pse_type),
        (q_start_idx, kv_start_idx),
    )
    check_call(query, key, value, pse, atten_mask, padding_mask, softmax_layout, options)
    mask = None if atten_mask is None else atten_mask.bool()
    out, maximum, total, state = torch.ops.mindspeed.fusion_attention(query, key, value, pse, mask, *options)
    stats = [stat.expand(*stat.shape[:-1], LANES).contiguous() for stat in (maximum, total)]
    if options.layout == "TND" and softmax_layout == "":
        stats = [sequence_major(stat, options.q_ends or []) for stat in stats]
    reserved = query.new_empty(0)
    if keep_prob == 1:
        return out, stats[0], stats[1], reserved, 0, 0, 0
    return out, stats[0], stats[1], reserved, state[0], state[1], probabilities(query, key, options)


npu_fusion_attention = fusion_attention


def fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    attention_in: Tensor,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tokens: int = UNBOUNDED,
    next_tokens: int = UNBOUNDED,
    seed: Tensor | int = 0,
    offset: Tensor | int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | Tensor | None = None,
    actual_seq_kvlen: Sequence[int] | Tensor | None = None,
    sparse_mode: int = 0,
    pse_type: int = 1,
    q_start_idx: Sequence[int] | None = None,
    kv_start_idx: Sequence[int] | None = None,
    softmax_layout: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and, if there is an external one, of the bias; what context parallelism calls per block.

    ``dy`` and the result ``attention_in`` are like the result of `fusion_attention`, the statistics, ``seed`` and ``offset`` as
    it gave them. All three may come from more keys than ``key`` has: the gradients are then this block's share. Raises
    OperatorError.
    """
    options = _options(
        (head_num, input_layout.upper(), scale_value, keep_prob, pre_tokens, next_tokens),
        (prefix, actual_seq_qlen, actual_seq_kvlen),
        (sparse_mode, pse_type),
        (q_start_idx, kv_start_idx),
    )
    check_call(query, key, value, pse, atten_mask, padding_mask, softmax_layout, options)
    check_results(dy, attention_in, softmax_max, softmax_sum, _out_like(query, key, value, options), options)
    stats = [softmax_max, softmax_sum]
    if options.layout == "TND" and softmax_layout == "":
        stats = [token_major(stat, torch.tensor(options.q_ends)) for stat in stats]
    state = torch.stack([torch.as_tensor(number, dtype=torch.int64) for number in (seed, offset)]) if keep_prob < 1 else None
    mask, of_pse = None if atten_mask is None else atten_mask.bool(), pse is not None and pse_type < 2
    # the keys of this call may be visible to a row that saw none of all keys, which then has no gradient
    unseen = stats[1] == 0
    stats = [stats[0].masked_fill(unseen, torch.finfo(stats[0].dtype).max), stats[1].masked_fill(unseen, 1.0)]
    made = [stat[..., : lanes(query.device)].contiguous() for stat in stats]
    dq, dk, dv, dpse = torch.ops.mindspeed.fusion_attention_backward(
        dy, query, key, value, pse, mask, state, attention_in, *made, of_pse, *options
    )
    return dq, dk, dv, dpse if of_pse else None


npu_fusion_attention_grad = fusion_attention_grad


def _options(
    sizes: tuple[Any, ...], lists: tuple[Any, ...], modes: tuple[int, int], starts: tuple[Any, Any]
) -> AttentionOptions:
    """The options from the arguments of a call: lists of tensors or sequences, starts as numbers (others are refused later)."""
    integers = [_integers(start) for start in starts]
    numbers = [0 if start is None else start[0] if len(start) == 1 else start for start in integers]
    values: list[Any] = [*sizes, *map(_integers, lists), *modes, *numbers]
    return AttentionOptions._make(values)


def _integers(values: Sequence[int] | Tensor | None) -> list[int] | None:
    if values is None:
        return None
    return values.tolist() if isinstance(values, Tensor) else list(values)


def _parts(
    query_side: list[Tensor],
    key_side: list[Tensor],
    stats: list[Tensor],
    optional: Sequence[Tensor | None],
    options: AttentionOptions,
) -> Iterator[AttentionBatch]:
    """Views of the query and key side tensors and of the statistics, with the scores: one part, or one per packed sequence.

    ``optional`` are bias, mask and the random state of dropout.
    """
    pse, mask, state = optional
    seed = None if state is None or options.keep_prob == 1 else state[0].to(query_side[0].device)
    stats = [stat[..., 0] for stat in stats]
    heads, layout = options.heads, options.layout
    groups = heads_like(key_side[0], layout, query_side[0], heads)
    split = (groups, heads // groups)
    if layout != "TND":
        queries = [head_view(x, layout, heads) for x in query_side]
        keys = [head_view(x, layout, groups) for x in key_side]
        b, _, s, _ = queries[0].shape
        dropout = None if seed is None else Dropout(options.keep_prob, seed, 0, (b, *split, s, keys[0].shape[2]))
        prefix = None if options.prefix is None else tuple(options.prefix)
        scores = scores_of(s, keys[0].shape[2], prefix, False, pse, mask, dropout, split, options)
        yield AttentionBatch(queries, keys, stats, scores)
        return
    first, lengths = 0, lengths_of(query_side[0], key_side[0], options)
    q_lengths, kv_lengths = ([length[side] for length in lengths] for side in (0, 1))
    by_sequence = zip(
        zip(*(packed_view(x).split_with_sizes(q_lengths, 2) for x in query_side), strict=True),
        zip(*(packed_view(x).split_with_sizes(kv_lengths, 2) for x in key_side), strict=True),
        zip(*(stat.t()[None].split_with_sizes(q_lengths, 2) for stat in stats), strict=True),
        strict=True,
    )
    edge = sequence_at_edge(lengths, options.mode)
    for n, sides in enumerate(by_sequence):
        shape = (1, *split, *lengths[n])
        dropout = None if seed is None else Dropout(options.keep_prob, seed, first, shape)
        first += heads * shape[3] * shape[4]
        prefix = None if options.prefix is None else (options.prefix[n],)
        own = pse[n : n + 1] if pse is not None and pse.dim() > 1 and pse.shape[0] > 1 else pse
        scores = scores_of(*shape[3:], prefix, n == edge, own, mask, dropout, split, options)
        yield AttentionBatch(*sides, scores)


def _out_like(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    groups = heads_like(key, options.layout, query, options.heads)
    width = head_width(value, options.layout, groups)
    last = options.heads * width if options.layout in ("SBH", "BSH") else width
    return query.new_empty((*query.shape[:-1], last))


def _stats_like(query: Tensor, options: AttentionOptions, repetitions: int) -> Tensor:
    rows: tuple[int, ...] = tuple(query.shape[:2])
    if options.layout != "TND":
        batch, length = sizes(query, options.layout)
        rows = (batch, options.heads, length)
    return query.new_empty((*rows, repetitions), dtype=wide_type(query.dtype))


def state_like(query: Tensor, options: AttentionOptions) -> Tensor:
    """Make an empty random state, without elements where nothing is dropped. That of an NPU's kernels is on the host."""
    device = torch.device("cpu") if query.device.type == "npu" else query.device
    return query.new_empty(2 if options.keep_prob < 1 else 0, dtype=torch.int64, device=device)


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reference: the result, the statistics, [B, N, S, lanes] or [T, N, lanes], and the random state."""
    return by_parts(forward, *args)


def by_parts(write: Callable[[AttentionBatch], None], *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Give the result, statistics and random state.

    ``write`` fills the first ones for each batch of equal sequences.
    """
    query, key, value, pse, mask = args[:5]
    options = AttentionOptions(*args[5:])
    out, maximum = _out_like(query, key, value, options), _stats_like(query, options, 1)
    total = torch.empty_like(maximum)
    state = state_like(query, options)
    if state.numel():
        state[0] = torch.randint(1 << 62, (), dtype=torch.int64, device=query.device)
        state[1] = 0
    for part in _parts([query, out], [key, value], [maximum, total], (pse, mask, state), options):
        write(part)
    shape = (*maximum.shape[:-1], lanes(query.device))
    return out, maximum.expand(shape).contiguous(), total.expand(shape).contiguous(), state


def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reference: gradients of query, key, value and, with ``of_pse``, of the bias (else empty)."""
    return gradients_by_parts(backward, *args)


def gradients_by_parts(
    write: Callable[[AttentionBatch, Tensor | None], None], *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Give the gradients of `_backward`, which ``write`` fills for each batch, that of a bias being added to the second."""
    dout, query, key, value, pse, mask, state, out, maximum, total, of_pse, options = AttentionGradientInputs.of(*args)
    dq, dk, dv = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
    dpse = None if pse is None or not of_pse else pse.new_zeros(pse.shape, dtype=wide_type(pse.dtype))
    query_side, key_side = [query, out, dout, dq], [key, value, dk, dv]
    for n, part in enumerate(_parts(query_side, key_side, [maximum, total], (pse, mask, state), options)):
        dbias = None
        if dpse is not None:
            own = dpse[n : n + 1] if options.layout == "TND" and dpse.shape[0] > 1 else dpse
            heads, groups = part.query_side[0].shape[1], part.key_side[0].shape[1]
            dbias = unflatten(own, 1, (groups, heads // groups))
        write(part, dbias)
    return dq, dk, dv, query.new_empty(0) if pse is None or dpse is None else dpse.to(pse.dtype)


def _forward_shapes(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = AttentionOptions(*rest[2:])
    maximum = _stats_like(query, options, lanes(query.device))
    out = _out_like(query, key, value, options)
    return out, maximum, maximum.new_empty(maximum.shape), state_like(query, options)


def _backward_shapes(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, pse: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_pse = rest[5]
    dpse = pse.new_empty(pse.shape) if pse is not None and of_pse else query.new_empty(0)
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape), dpse


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    *results, state = output
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else zeros are made for each of them
    ctx.of_pse = ctx.needs_input_grad[3]
    ctx.options = inputs[5:]
    ctx.save_for_backward(*inputs[:5], state if state.numel() else None, *results)


def _gradient(ctx: Any, dout: Tensor | None, *_: Tensor) -> tuple[Tensor | None, ...]:
    if dout is None:
        return None, None, None, None, None, *(None for _ in ctx.options)
    dq, dk, dv, dpse = torch.ops.mindspeed.fusion_attention_backward(dout, *ctx.saved_tensors, ctx.of_pse, *ctx.options)
    return dq, dk, dv, dpse if ctx.of_pse else None, None, *(None for _ in ctx.options)


def _forward_operations(query: Tensor, key: Tensor, value: Tensor, pse: Tensor | None, mask: Tensor | None, *rest: Any) -> int:
    """Count ``Q K^T`` and ``P V`` of the pairs that mask and sparse mode let see."""
    options = AttentionOptions(*rest)
    groups = heads_like(key, options.layout, query, options.heads)
    widths = head_width(query, options.layout, options.heads) + head_width(value, options.layout, groups)
    return 2 * widths * visible_pairs(query, key, mask, options)


def _backward_operations(dout: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> int:
    """Count two products for each of the forward pass; scores that kernels compute again are no recomputation of a layer."""
    return 2 * _forward_operations(query, key, value, *rest[:2], *rest[7:])


_OPTIONS = (
    "int heads, str layout, float scale, float keep_prob, int before, int after, int[]? prefix, int[]? q_ends, int[]? kv_ends, "
    "int mode, int pse_type, int q_start, int kv_start"
)

define(
    f"fusion_attention(Tensor query, Tensor key, Tensor value, Tensor? pse, Tensor? mask, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_shapes,
    _save,
    _gradient,
    _forward_operations,
    draws=True,
)
define(
    "fusion_attention_backward(Tensor dout, Tensor query, Tensor key, Tensor value, Tensor? pse, Tensor? mask, Tensor? state, "
    f"Tensor out, Tensor maximum, Tensor total, bool of_pse, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_shapes,
    operations=_backward_operations,
)
