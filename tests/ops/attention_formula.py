"""Attention as its definition says, with the whole score matrix: what `fusion_attention` is compared with."""

import torch

from tests.ops.operator_checks import randn

B, N, S, D, T = 2, 4, 7, 4, 9
PREFIX = [5, 8]
Q_LENGTHS, KV_LENGTHS = [0, 3, 5, 1, 0], [0, 5, 4, 6, 0]
MASKS = {mode: torch.ones(2048, 2048, dtype=torch.bool).triu(1) for mode in (2,)}
MASKS |= dict.fromkeys((3, 4, 7, 8), MASKS[2]) | {6: torch.ones(3072, 2048, dtype=torch.bool)}


def full_mask(queries, keys):
    mask = torch.rand(queries, keys, generator=torch.Generator().manual_seed(5)) < 0.3
    mask[1] = True  # one query sees nothing
    return mask


def visible(mode, i, j, shift, pre, post, prefix, edge):
    if mode == 0:
        return i - pre <= j <= i + post
    if mode == 1:
        return True
    if mode == 4 or (mode in (7, 8) and edge):
        return i + shift - pre <= j <= i + shift + post
    if mode in (5, 6):
        return j <= i + shift or j < prefix
    return j <= i + (shift if mode in (3, 7) else 0)


def sight(mode, queries, keys, pre=2, post=1, prefix=0, edge=False, mask=None):
    shift = keys - queries
    seen = [[visible(mode, i, j, shift, pre, post, prefix, edge) for j in range(keys)] for i in range(queries)]
    seen = torch.tensor(seen, dtype=torch.bool).view(queries, keys)
    return seen if mask is None else seen & ~mask[..., :queries, :keys]


def distance(queries, keys, q_start=0, kv_start=0):
    return ((torch.arange(queries)[:, None] + q_start) - (torch.arange(keys) + kv_start)).abs().double()


def bias_of(pse, pse_type, queries, keys, q_start=0, kv_start=0):
    """[B | 1, N, queries, keys] as it is added to the product, before or after scaling."""
    if pse_type < 2:
        return pse
    far = distance(queries, keys, q_start, kv_start)
    return -pse.double().view(-1, pse.shape[-1], 1, 1) * (far if pse_type == 2 else far.sqrt())


def dense(q, k, v, seen, bias=None, pse_type=1, scale=0.5, factors=None):
    """(out, max, sum) for q [B, N, S, D], k and v with fewer heads, ``seen`` a bool that broadcasts to the scores."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    logits = q @ k.transpose(-1, -2)
    before, after = (bias, 0) if pse_type == 1 else (0, bias)
    logits = logits * scale if bias is None else (logits + before) * scale + after
    logits = torch.where(seen, logits, -torch.inf)
    empty = ~seen.expand_as(logits).any(-1)
    safe = logits.masked_fill(empty[..., None], 0)
    weights = torch.softmax(safe, -1).masked_fill(empty[..., None], 0) if logits.shape[-1] else logits
    weights = weights if factors is None else weights * factors
    maximum = safe.amax(-1) if logits.shape[-1] else torch.zeros(logits.shape[:-1], dtype=logits.dtype)
    total = torch.exp(safe - maximum[..., None]).sum(-1)
    return weights @ v, maximum.masked_fill(empty, -torch.inf).detach(), total.masked_fill(empty, 0).detach()


def to_layout(x, layout):
    """[B, N, S, D] in another layout, contiguous."""
    order = {"SBH": (2, 0, 1, 3), "BSH": (0, 2, 1, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}[layout]
    x = x.permute(order)
    return (x.flatten(2) if layout in ("SBH", "BSH") else x).contiguous()


def qkv(groups=2, width=6, queries=S, keys=T, dtype=torch.float64):
    shapes = (B, N, queries, D), (B, groups, keys, D), (B, groups, keys, width)
    return tuple(randn(*shape, dtype=dtype, seed=n + 1) for n, shape in enumerate(shapes))


def packed_qkv(groups=2, width=6, dtype=torch.float64, q_lengths=None, kv_lengths=None):
    tokens, keys = sum(q_lengths or Q_LENGTHS), sum(kv_lengths or KV_LENGTHS)
    shapes = (tokens, N, D), (keys, groups, D), (keys, groups, width)
    return tuple(randn(*shape, dtype=dtype, seed=n + 1) for n, shape in enumerate(shapes))


def ends(lengths):
    return torch.tensor(lengths).cumsum(0).tolist()


def packed_dense(q, k, v, q_lengths, kv_lengths, seen, bias=None, pse_type=1, factors=None):
    """`dense` sequence by sequence; ``seen(n)``, ``bias(n)`` and ``factors(n)`` give what belongs to the n-th."""
    outs, maxima, totals = [], [], []
    parts = zip(q.split(q_lengths), k.split(kv_lengths), v.split(kv_lengths), strict=True)
    for n, part in enumerate(parts):
        q1, k1, v1 = (x.transpose(0, 1)[None] for x in part)
        out, m, s = dense(q1, k1, v1, seen(n), bias and bias(n), pse_type, factors=factors and factors(n))
        outs.append(out[0].transpose(0, 1))
        maxima.append(m[0].t())
        totals.append(s[0].t())
    return torch.cat(outs), torch.cat(maxima), torch.cat(totals)
