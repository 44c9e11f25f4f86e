"""Attention of one process that has all tokens it needs: the same rule, tiles and operator as between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed.context_parallel.blocks import Part, Rule, accumulate_block, gradients, parts, start
from mindspeed.context_parallel.layout import Span


def attention(query: Tensor, key: Tensor, value: Tensor, rule: Rule, queries: Sequence[Span], keys: Sequence[Span]) -> Tensor:
    """Queries and keys [tokens, batch, heads, width] of the given global ranges; differentiable."""
    result: Tensor = _Local.apply(query, key, value, rule, queries, keys)  # type: ignore[no-untyped-call]
    return result


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, rule: Rule, queries: Sequence[Span], keys: Sequence[Span]
    ) -> Tensor:
        out, lse, ctx.work = local_attention(query, key, value, rule, queries, keys)
        ctx.rule = rule
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return *gradients_of(ctx.rule, ctx.work, dout, *ctx.saved_tensors), None, None, None


def local_attention(
    query: Tensor, key: Tensor, value: Tensor, rule: Rule, queries: Sequence[Span], keys: Sequence[Span]
) -> tuple[Tensor, Tensor, list[Part]]:
    """The result, the logarithm of the softmax's denominators, and the parts, which know the seeds of their dropout."""
    running, work = start(query, value.shape[-1]), list(parts(rule, queries, keys, query.device))
    for part in work:
        accumulate_block(running, rule, part, query, key, value)
    return running.out.to(query.dtype), running.lse, work


def gradients_of(rule: Rule, work: Sequence[Part], dout: Tensor, *saved: Tensor) -> list[Tensor]:
    """Gradients of query, key and value, in their types; ``saved`` are query, key, value, result and denominators."""
    sums = [torch.zeros_like(x, dtype=saved[4].dtype) for x in saved[:3]]
    add_gradients(sums, rule, work, dout, *saved)
    return [total.to(x.dtype) for total, x in zip(sums, saved[:3], strict=True)]


def add_gradients(sums: Sequence[Tensor], rule: Rule, work: Sequence[Part], dout: Tensor, *saved: Tensor) -> None:
    """Add the shares of all parts to the wide gradients of query, key and value; ``saved`` as `gradients` takes them."""
    for part in work:
        here, there = slice(*part.tile.rows), slice(*part.tile.columns)
        for total, share, place in zip(sums, gradients(rule, part, dout, *saved), (here, there, there), strict=True):
            total[place, part.batch] += share
