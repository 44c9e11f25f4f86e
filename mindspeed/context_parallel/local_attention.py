"""Attention of one process that has all tokens it needs: the same scoring, tiles and operator as between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed.context_parallel.blocks import BlockCall, Scoring, accumulate_block, gradients, parts, start
from mindspeed.context_parallel.layout import Span


def attention(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, queries: Sequence[Span], keys: Sequence[Span]
) -> Tensor:
    """Queries and keys [tokens, batch, heads, width] of the given global ranges; differentiable."""
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
    """The result, the logarithm of the softmax's denominators, and the parts, which know the seeds of their dropout."""
    running, work = start(query, value.shape[-1]), list(parts(scoring, queries, keys, query.device))
    for part in work:
        accumulate_block(running, scoring, part, query, key, value)
    return running.out.to(query.dtype), running.lse, work


def gradients_of(scoring: Scoring, work: Sequence[BlockCall], dout: Tensor, *saved: Tensor) -> list[Tensor]:
    """Gradients of query, key and value, in their types; ``saved`` are query, key, value, result and denominators."""
    sums = [torch.zeros_like(x, dtype=saved[4].dtype) for x in saved[:3]]
    add_gradients(sums, scoring, work, dout, *saved)
    return [total.to(x.dtype) for total, x in zip(sums, saved[:3], strict=True)]


def add_gradients(sums: Sequence[Tensor], scoring: Scoring, work: Sequence[BlockCall], dout: Tensor, *saved: Tensor) -> None:
    """Add the shares of all parts to the wide gradients of query, key and value; ``saved`` as `gradients` takes them."""
    for part in work:
        here, there = slice(*part.tile.rows), slice(*part.tile.columns)
        for total, share, place in zip(sums, gradients(scoring, part, dout, *saved), (here, there, there), strict=True):
            total[place, part.batch] += share
