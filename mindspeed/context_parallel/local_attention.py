"""Attention of one process that has all tokens it needs: the same scoring, tiles and operator as between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mindspeed.context_parallel.blocks import (
    BlockCall,
    Scoring,
    Statistics,
    accumulate_block,
    attend,
    gradients,
    parts,
    start,
    statistics,
)
from mindspeed.context_parallel.layout import Span


def attention(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, queries: Sequence[Span], keys: Sequence[Span]
) -> Tensor:
    """Queries and keys [tokens, batch, heads, width] of the given global ranges; differentiable."""
    with scoring.own_numbers(query.device):
        result: Tensor = _Local.apply(query, key, value, scoring, queries, keys)  # type: ignore[no-untyped-call]
    return result


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, queries: Sequence[Span], keys: Sequence[Span]
    ) -> Tensor:
        out, lse, ctx.work = local_attention(query, key, value, scoring, queries, keys)
        ctx.scoring = scoring
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return *gradients_of(ctx.scoring, ctx.work, dout, *ctx.saved_tensors), None, None, None


def local_attention(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, queries: Sequence[Span], keys: Sequence[Span]
) -> tuple[Tensor, Tensor, list[BlockCall]]:
    """The result, the logarithm of the softmax's denominators, and the parts with the random states of their dropout."""
    work = list(parts(scoring, queries, keys, query.device))
    if len(work) == 1 and work[0].covers(query, key):
        out, found, state = attend(scoring, work[0], query, key, value)
        return out, found.lse, [replace(work[0], state=state)]
    running = start(query, value.shape[-1])
    work = [accumulate_block(running, scoring, part, query, key, value) for part in work]
    return running.out.to(query.dtype), running.statistics.lse, work


def gradients_of(scoring: Scoring, work: Sequence[BlockCall], dout: Tensor, *saved: Tensor) -> list[Tensor]:
    """Gradients of query, key and value, in their types; ``saved`` are query, key, value, result and denominators."""
    query, key, value, out, lse = saved
    found = statistics(lse)
    if len(work) == 1 and work[0].covers(query, key):
        return [*gradients(scoring, work[0], dout, query, key, value, out, found)]
    sums = [torch.zeros_like(x, dtype=lse.dtype) for x in (query, key, value)]
    add_gradients(sums, scoring, work, dout, query, key, value, out, found)
    return [total.to(x.dtype) for total, x in zip(sums, (query, key, value), strict=True)]


def add_gradients(
    sums: Sequence[Tensor],
    scoring: Scoring,
    work: Sequence[BlockCall],
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    found: Statistics,
) -> None:
    """Add the shares of all parts to the wide gradients of query, key and value; the tensors are as `gradients` takes them."""
    for part in work:
        here, there = slice(*part.tile.rows), slice(*part.tile.columns)
        shares = gradients(scoring, part, dout, query, key, value, out, found)
        for total, share, place in zip(sums, shares, (here, there, there), strict=True):
            total[place, part.batch].add_(share)  # += would copy the slice onto itself
