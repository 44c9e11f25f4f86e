"""What torch's flash attention for CUDA computes, in plain torch on the CPU: to test the calls that are made of it.

[B, S, N, D] tensors, or [T, N, D] with cumulative lengths; key heads may be fewer. Query i sees key j if
``i + d - left <= j <= i + d + right`` with d keys minus queries. Sums in fp32. It refuses what the kernel refuses.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mindspeed.ops.attention_scores import Dropout


def _window(causal, left, right, keys):
    left = -1 if left is None or left >= keys else left
    right = -1 if right is None or right >= keys else right
    return left, 0 if causal else right


def _hidden(queries, keys, left, right):
    i, j, d = torch.arange(queries)[:, None], torch.arange(keys), keys - queries
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if left >= 0:
        hidden |= j < i + d - left
    if right >= 0:
        hidden |= j > i + d + right
    return hidden


def _logits(q, k, scale, window):
    """[N, S, T] of one sequence."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = torch.einsum("snd,tnd->nst", q.float(), k.float()) * scale
    return logits.masked_fill(_hidden(q.shape[0], k.shape[0], *window), -torch.inf)


def _factors(state, dropout, logits, first):
    """What probabilities [N, S, T] are multiplied by; ``first`` counts the rows of earlier sequences."""
    if not dropout:
        return 1.0
    heads, queries, keys = logits.shape
    drop = Dropout(1 - dropout, state.view(torch.int64)[0], first, (1, heads, 1, queries, keys))
    return drop.factors((0, queries), (0, keys), logits.dtype)[0, :, 0]


def _rows(logits, packed):
    """By how much the rows of the next sequence are counted on, as `Dropout` does."""
    return logits.numel() if packed is not None else logits.shape[0] * logits.shape[1]


def _check(q, k, v, cum_q, cum_k):
    assert all(x.stride(-1) == 1 and x.shape[-1] == q.shape[-1] for x in (q, k, v))
    assert q.shape[-1] % 8 == 0
    assert q.shape[-1] <= 256
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert q.dim() == (4 if cum_q is None else 3)
    assert cum_q is None or cum_q.dtype == cum_k.dtype == torch.int32


def _sequences(cum_q, cum_k, *tensors):
    """``(part of each tensor)``: the first two are of queries if their number tells so."""
    if cum_q is None:
        yield from zip(*tensors, strict=True)
        return
    for (q0, q1), (k0, k1) in zip(*(zip(c[:-1].tolist(), c[1:].tolist(), strict=True) for c in (cum_q, cum_k)), strict=True):
        yield tuple(x[k0:k1] if n in (1, 2) else x[q0:q1] for n, x in enumerate(tensors))


def forward(
    q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale=None, window_size_left=None, window_size_right=None
):
    _check(q, k, v, cum_q, cum_k)
    window, outs, stats = _window(causal, window_size_left, window_size_right, max_k), [], []
    state, first = torch.zeros(2, dtype=torch.int64), 0
    if dropout:
        state[0] = torch.randint(1 << 62, (), dtype=torch.int64)
    for one_q, one_k, one_v in _sequences(cum_q, cum_k, q, k, v):
        logits = _logits(one_q, one_k, scale, window)
        values = one_v.float().repeat_interleave(q.shape[-2] // k.shape[-2], 1)
        kept = logits.softmax(-1) * _factors(state, dropout, logits, first)
        outs.append(torch.einsum("nst,tnd->snd", kept, values))
        stats.append(logits.logsumexp(-1))
        first += _rows(logits, cum_q)
    join = torch.stack if cum_q is None else torch.cat
    out, stat = torch.empty_like(q), torch.stack(stats) if cum_q is None else torch.cat(stats, 1)
    out.copy_(join(outs))
    return out, stat, state.view(torch.uint64), torch.empty((), dtype=torch.uint64), q.new_empty(0)


def backward(
    dout, q, k, v, out, stat, cum_q, cum_k, max_q, max_k, dropout, causal, state, unused, *, scale=None, window_size_left=None,
    window_size_right=None,
):  # fmt: skip
    _check(q, k, v, cum_q, cum_k)
    assert dout.shape == out.shape == q.shape
    window, grads = _window(causal, window_size_left, window_size_right, max_k), [torch.empty_like(x) for x in (q, k, v)]
    stats = stat if cum_q is None else stat.t()
    stats = stats if cum_q is None else stats[:, :, None]
    parts, first = _sequences(cum_q, cum_k, q, k, v, out, dout, stats), 0
    for n, (one_q, one_k, one_v, o, do, lse) in enumerate(parts):
        lse = lse if cum_q is None else lse[..., 0].t()
        group = q.shape[-2] // k.shape[-2]
        logits = _logits(one_q, one_k, scale, window)
        p, factors = torch.exp(logits - lse[..., None]), _factors(state, dropout, logits, first)
        first += _rows(logits, cum_q)
        keys, values = (x.float().repeat_interleave(group, 1) for x in (one_k, one_v))
        dp = torch.einsum("snd,tnd->nst", do.float(), values) * factors
        ds = p * (dp - (do.float() * o.float()).sum(-1).t()[..., None])
        found = (
            torch.einsum("nst,tnd->snd", ds, keys) * scale,
            torch.einsum("nst,snd->tnd", ds, one_q.float()).unflatten(1, (-1, group)).sum(2) * scale,
            torch.einsum("nst,snd->tnd", p * factors, do.float()).unflatten(1, (-1, group)).sum(2),
        )
        if cum_q is None:
            for grad, value in zip(grads, found, strict=True):
                grad[n].copy_(value)
        else:
            ends = cum_q[n : n + 2].tolist(), cum_k[n : n + 2].tolist()
            for grad, value, (a, b) in zip(grads, found, (ends[0], ends[1], ends[1]), strict=True):
                grad[a:b].copy_(value)
    return tuple(grads)


@contextmanager
def flash_on_cpu() -> Iterator[list[str]]:
    """The two operators of torch on the CPU; gives the names of those called."""
    called: list[str] = []

    def noted(name, function):
        def body(*args, **kwargs):
            called.append(name)
            return function(*args, **kwargs)

        return body

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", noted("forward", forward), "CPU")
        library.impl("_flash_attention_backward", noted("backward", backward), "CPU")
        yield called
