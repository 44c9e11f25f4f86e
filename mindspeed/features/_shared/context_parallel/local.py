"""Attention of one process that has all tokens it needs: the same rule, tiles and operator as between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed.features._shared.context_parallel.blocks import Rule, gradients, parts, see, start
from mindspeed.features._shared.context_parallel.layout import Span


def attention(query: Tensor, key: Tensor, value: Tensor, rule: Rule, queries: Sequence[Span], keys: Sequence[Span]) -> Tensor:
    """Queries and keys [tokens, batch, heads, width] of the given global ranges; differentiable."""
    result: Tensor = _Local.apply(query, key, value, rule, queries, keys)  # type: ignore[no-untyped-call]
    return result


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, rule: Rule, queries: Sequence[Span], keys: Sequence[Span]
    ) -> Tensor:
        running = start(query, value.shape[-1])
        ctx.rule, ctx.work = rule, list(parts(rule, queries, keys, query.device))
        for part in ctx.work:
            see(running, rule, part, query, key, value)
        out = running.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, running.lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors[:3]
        sums = [torch.zeros_like(x, dtype=ctx.saved_tensors[4].dtype) for x in inputs]
        add_gradients(sums, ctx.rule, ctx.work, dout, *ctx.saved_tensors)
        return *(total.to(x.dtype) for total, x in zip(sums, inputs, strict=True)), None, None, None


def add_gradients(sums: Sequence[Tensor], rule: Rule, work: Sequence[Any], dout: Tensor, *saved: Tensor) -> None:
    """Add the shares of all parts to the wide gradients of query, key and value; ``saved`` as `gradients` takes them."""
    for part in work:
        here, there = slice(*part.tile.rows), slice(*part.tile.columns)
        for total, share, place in zip(sums, gradients(rule, part, dout, *saved), (here, there, there), strict=True):
            total[place, part.batch] += share
