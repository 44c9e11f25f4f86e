"""Sparse attention over latent vectors: the up-projection is absorbed into queries and outputs. Plain torch.

S tokens, B batch, H heads of a rank, N keys that an indexer selected for each query. Widths: K of a key without its rotary
part, V of a value, R of a latent vector, C of a latent vector with the rotary part that all heads share.

The score of a query and a latent vector c is ``q (W c) = (q W) c`` with the rows W of the up-projection for the keys of a head.
The right side has one key for all heads. The weighted sum is one of latent vectors too, and the rows for values project it.
So keys and values of heads do not exist, and a gathered key serves all heads. Queries are processed in blocks of bounded
memory, and backward repeats forward block by block. Products and sums are computed in fp32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from mindspeed.ops.registration import define

BLOCK: Final = 2**24
"""Largest number of elements of the absorbed queries of a block, or of its keys and scores."""
GATHER: Final = 4
"""A gathered key costs as much time as this number of keys that are read in place: 4 with 32 heads, 8 with 8 heads on a CPU."""

Target = Literal["none", "selected", "all"]
"""Keys over which the distribution for the indexer's loss is computed: the selected ones, or all up to the query."""
Handover: TypeAlias = Callable[[Tensor], Tensor | None]
"""From the gradient of a weight to what autograd gets: that tensor, or None where it has been added to a buffer."""


@dataclass(frozen=True, slots=True)
class Absorption:
    """The width K, the scale of scores, the target for the indexer, and what becomes of the weight's gradient."""

    width: int
    scale: float
    target: Target = "none"
    hand_over: Handover = lambda gradient: gradient


class _Rows(NamedTuple):
    """The rows of the up-projection for keys [H, K, R] and for values [H, V, R]."""

    keys: Tensor
    values: Tensor


class _Block(NamedTuple):
    """T queries of one sample. Their keys are gathered, or they read all E keys up to the last query in place."""

    sample: int
    rows: slice
    gathers: bool


def sparse_attention(
    query: Tensor, keys: Tensor, weight: Tensor, selected: Tensor, absorption: Absorption
) -> tuple[Tensor, Tensor | None]:
    """Return the output [S, B, H x V] of causal attention to the selected keys, and the target for the indexer.

    ``query`` [S, B, H, K + rope] is not absorbed yet, ``keys`` [S, B, C] are latent vectors with rotary parts, ``weight``
    [H x (K + V), R] has Megatron's order of rows, and ``selected`` [B, S, N] are indices of keys. The target is the sum of the
    heads' probabilities, [B, S, N] for the selected keys or [B, S, S] for all. It has no gradient.
    """
    made: tuple[Tensor, Tensor | None] = _SparseAttention.apply(query, keys, weight, selected, absorption)  # type: ignore[no-untyped-call]
    return made


def divergence(index_scores: Tensor, target: Tensor) -> Tensor:
    """Return the KL divergence of the indexer's probabilities [..., N] from the target, as the mean over queries."""
    predicted = index_scores.softmax(-1, dtype=torch.float32)
    expected = target / target.sum(-1, keepdim=True)
    return (expected * ((expected + _TINY).log() - (predicted + _TINY).log())).sum(-1).mean()


_TINY: Final = 1e-10
"""Megatron's addend of logarithms."""


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, weight: Tensor, selected: Tensor, absorption: Absorption
    ) -> tuple[Tensor, Tensor | None]:
        ctx.absorption = absorption
        ctx.save_for_backward(query, keys, weight, selected)
        output, target = torch.ops.mindspeed.sparse_latent_attention(
            query, keys, weight, selected, absorption.width, absorption.scale, absorption.target
        )
        if absorption.target == "none":
            return output, None
        ctx.mark_non_differentiable(target)
        return output, target

    @staticmethod
    def backward(ctx: Any, g_output: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        absorption: Absorption = ctx.absorption
        inputs = ctx.saved_tensors
        g_query, g_keys, g_weight = torch.ops.mindspeed.sparse_latent_attention_backward(
            g_output, *inputs, absorption.width, absorption.scale
        )
        return g_query, g_keys, absorption.hand_over(g_weight) if ctx.needs_input_grad[2] else None, None, None


def _forward(
    query: Tensor, keys: Tensor, weight: Tensor, selected: Tensor, width: int, scale: float, kind: Target
) -> tuple[Tensor, Tensor]:
    """Return the output and the target; ``width`` is K."""
    rows, keys = _rows(weight, query.shape[2], width), _wide(keys)
    output, target = _forward_shapes(query, keys, weight, selected, width, scale, kind)
    target.zero_()
    of_heads = output.view(*query.shape[:3], -1)
    for block in _blocks(query, keys, selected, may_gather=kind != "all"):
        chosen = selected[block.sample, block.rows]
        _, absorbed, block_keys = _absorbed(query, keys, rows, chosen, block)
        scores = absorbed.matmul(block_keys.mT).mul_(scale)
        probabilities = _softmax(scores, _masked(chosen, len(query), block))
        attended = probabilities.matmul(block_keys[..., : weight.shape[-1]])
        of_heads[block.rows, block.sample] = torch.einsum("thr,hvr->thv", attended, rows.values).to(query.dtype)
        if kind != "none":
            probabilities = _softmax(scores, _future(chosen, block)) if kind == "all" else probabilities
            _fill(target[block.sample, block.rows], probabilities.sum(1), kind, chosen, block)
    return output, target


def _forward_shapes(
    query: Tensor, keys: Tensor, weight: Tensor, selected: Tensor, width: int, scale: float, kind: Target
) -> tuple[Tensor, Tensor]:
    tokens, batch, heads, _ = query.shape
    targets = {"none": 0, "selected": selected.shape[-1], "all": tokens}
    output = query.new_empty(tokens, batch, weight.shape[0] - heads * width)
    return output, keys.new_empty(batch, tokens, targets[kind], dtype=_wide_type(keys))


def _backward(
    g_output: Tensor, query: Tensor, keys: Tensor, weight: Tensor, selected: Tensor, width: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and the weight, the last in the precision of sums."""
    rows, wide, rank = _rows(weight, query.shape[2], width), _wide(keys), weight.shape[-1]
    g_query, g_keys, g_rows = torch.empty_like(query), torch.zeros_like(wide), _Rows(*map(torch.zeros_like, rows))
    g_output = g_output.reshape(*query.shape[:3], -1)
    for block in _blocks(query, keys, selected):
        chosen = selected[block.sample, block.rows]
        part, absorbed, block_keys = _absorbed(query, wide, rows, chosen, block)
        scores = absorbed.matmul(block_keys.mT).mul_(scale)
        probabilities = _softmax(scores, _masked(chosen, len(query), block))
        latent = block_keys[..., :rank]
        attended = probabilities.matmul(latent)
        g_part = _wide(g_output[block.rows, block.sample])
        g_attended = torch.einsum("thv,hvr->thr", g_part, rows.values)
        g_scores = g_attended.matmul(latent.mT) - (g_attended * attended).sum(-1, keepdim=True)
        g_scores.mul_(probabilities).mul_(scale)
        g_absorbed = g_scores.matmul(block_keys)
        g_rows.values.add_(torch.einsum("thv,thr->hvr", g_part, attended))
        g_rows.keys.add_(torch.einsum("thk,thr->hkr", part[..., :width], g_absorbed[..., :rank]))
        g_plain = torch.einsum("thr,hkr->thk", g_absorbed[..., :rank], rows.keys)
        g_query[block.rows, block.sample] = torch.cat([g_plain, g_absorbed[..., rank:]], dim=-1).to(query.dtype)
        _add_key_gradients(g_keys[:, block.sample], (g_scores, absorbed), (probabilities, g_attended), chosen, block)
    return g_query, g_keys.to(keys.dtype), torch.cat(g_rows, dim=1).view(weight.shape)


def _backward_shapes(
    g_output: Tensor, query: Tensor, keys: Tensor, weight: Tensor, selected: Tensor, width: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(keys), torch.empty_like(weight, dtype=_wide_type(weight))


def _operations(query: Tensor, keys: Tensor, weight: Tensor, selected: Tensor, *rest: object) -> int:
    """Count the products of queries, scores and sums over selected keys, and of the output."""
    pairs = query.shape[:3].numel() * selected.shape[-1]
    return 2 * len(query) * query.shape[1] * weight.numel() + 2 * pairs * (keys.shape[-1] + weight.shape[-1])


def _blocks(query: Tensor, keys: Tensor, selected: Tensor, may_gather: bool = True) -> Iterator[_Block]:
    """Yield the blocks of all samples. Keys are gathered for the queries after which that takes less time than to read all."""
    tokens, batch, heads, _ = query.shape
    count = selected.shape[-1]
    first = min(tokens, GATHER * count) if may_gather else tokens
    for sample in range(batch):
        start = 0
        while start < tokens:
            gathers = start >= first
            elements = max(heads * keys.shape[-1], count * (keys.shape[-1] + heads) if gathers else tokens * heads)
            end = min(tokens if gathers else first, start + max(1, BLOCK // elements))
            yield _Block(sample, slice(start, end), gathers)
            start = end


def _absorbed(query: Tensor, keys: Tensor, rows: _Rows, chosen: Tensor, block: _Block) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries [T, H, K + rope] of a block, the same absorbed [T, H, C], and their keys [T, N, C] or [E, C]."""
    part, own = _wide(query[block.rows, block.sample]), keys[:, block.sample]
    width = rows.keys.shape[1]
    absorbed = torch.cat([torch.einsum("thk,hkr->thr", part[..., :width], rows.keys), part[..., width:]], dim=-1)
    return part, absorbed, own[chosen] if block.gathers else own[: block.rows.stop]


def _masked(chosen: Tensor, tokens: int, block: _Block) -> Tensor:
    """Return which keys of a block are not attended to: [T, N] or [T, E]."""
    if block.gathers:
        return chosen > _positions(chosen, block.rows)
    others = torch.ones(len(chosen), tokens, dtype=torch.bool, device=chosen.device).scatter_(1, chosen, False)
    return others[:, : block.rows.stop] | _future(chosen, block)


def _future(like: Tensor, block: _Block) -> Tensor:
    """Return which of the keys [T, E] come after their query."""
    return torch.arange(block.rows.stop, device=like.device) > _positions(like, block.rows)


def _positions(like: Tensor, rows: slice) -> Tensor:
    return torch.arange(rows.start, rows.stop, device=like.device).unsqueeze(-1)


def _softmax(scores: Tensor, masked: Tensor) -> Tensor:
    return scores.masked_fill(masked.unsqueeze(1), -torch.inf).softmax(-1)


def _fill(target: Tensor, shares: Tensor, kind: Target, chosen: Tensor, block: _Block) -> None:
    """Write the sums of probabilities of a block into the target of its queries."""
    if kind == "all":
        target[:, : block.rows.stop] = shares
    elif block.gathers:
        target.copy_(shares)
    else:  # a selected key after the last query has none
        is_read = chosen < block.rows.stop
        target.copy_(shares.gather(1, chosen.where(is_read, 0)) * is_read)


def _add_key_gradients(
    g_keys: Tensor, by_scores: tuple[Tensor, Tensor], by_values: tuple[Tensor, Tensor], chosen: Tensor, block: _Block
) -> None:
    """Add the gradients of a block's keys: by the scores of absorbed queries, and as latent vectors that are summed up."""
    (g_scores, absorbed), (probabilities, g_attended) = by_scores, by_values
    if not block.gathers:  # one product over queries and heads
        g_scores, absorbed, probabilities, g_attended = (
            tensor.flatten(0, 1) for tensor in (g_scores, absorbed, probabilities, g_attended)
        )
    made = g_scores.mT.matmul(absorbed)
    made[..., : g_attended.shape[-1]] += probabilities.mT.matmul(g_attended)
    if block.gathers:
        g_keys.index_add_(0, chosen.flatten(), made.flatten(0, 1))
    else:
        g_keys[: block.rows.stop] += made


def _rows(weight: Tensor, heads: int, width: int) -> _Rows:
    rows = _wide(weight).view(heads, -1, weight.shape[-1])
    return _Rows(rows[:, :width], rows[:, width:])


def _wide_type(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _wide(x: Tensor) -> Tensor:
    return x.to(_wide_type(x))


_INPUTS: Final = "Tensor query, Tensor keys, Tensor weight, Tensor selected, int width, float scale"
define(f"sparse_latent_attention({_INPUTS}, str kind) -> (Tensor, Tensor)", _forward, _forward_shapes, operations=_operations)
define(
    f"sparse_latent_attention_backward(Tensor g_output, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_shapes,
    operations=lambda g_output, *inputs: 3 * _operations(*inputs),
)
