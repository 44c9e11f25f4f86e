"""Calls of `fusion_attention` for each sparse mode, and what they are held to."""

import torch

from mindspeed.ops import fusion_attention
from mindspeed.ops.cpu import fusion_attention as flash
from tests.ops.attention_formula import (
    KV_LENGTHS,
    MASKS,
    PREFIX,
    Q_LENGTHS,
    B,
    N,
    S,
    T,
    bias_of,
    dense,
    ends,
    full_mask,
    qkv,
    sight,
    to_layout,
)
from tests.ops.operator_checks import randn

KERNELS = ("reference", "flash")
"""The two ways in which a call can be computed on CPU."""


def choose(kernel, monkeypatch):
    """Let the reference take every call, or the flash kernel all that it can."""
    if kernel == "reference":
        monkeypatch.setattr(flash, "_supports", lambda *inputs: False)


def masks(mode, queries=S, keys=T):
    return full_mask(queries, keys) if mode in (0, 1) else torch.zeros(queries, keys) > 0 if mode == 5 else MASKS[mode]


def options(mode, **more):
    given = {"sparse_mode": mode, "atten_mask": masks(mode), "scale": 0.5, "pre_tokens": 2, "next_tokens": 1}
    return given | ({"prefix": PREFIX} if mode in (5, 6) else {}) | more


def seen_by(mode, queries=S, keys=T):
    """[B, 1, queries, keys]."""
    mask = full_mask(queries, keys) if mode in (0, 1) else None
    return torch.stack([sight(mode, queries, keys, prefix=PREFIX[b], mask=mask) for b in range(B)])[:, None]


def logsumexp(maximum, total):
    """What both statistics say together, whichever of the two a kernel gives as it likes; hidden rows are fixed."""
    assert torch.equal(maximum == -torch.inf, total == 0)
    return maximum + total.log()


def assert_agrees(function, reference, inputs, tolerance=1e-10):
    """Values of all three results and gradients of the first one."""
    got, expected = function(*inputs), reference(*inputs)
    for value, other in zip((got[0], logsumexp(*got[1:])), (expected[0], logsumexp(*expected[1:])), strict=True):
        torch.testing.assert_close(value, other, rtol=tolerance, atol=tolerance)
    cotangent = randn(*expected[0].shape, seed=9, grad=False)
    wanted = [x for x in inputs if x.requires_grad]
    pairs = (torch.autograd.grad(results[0], wanted, cotangent) for results in (got, expected))
    for value, other in zip(*pairs, strict=True):
        torch.testing.assert_close(value, other, rtol=tolerance, atol=tolerance)


def check_dense(layout, mode, pse_type):
    q, k, v = qkv()
    slopes = randn(B, N, seed=6, grad=False).abs()
    pse = {None: None, 0: randn(B, N, S, T, seed=5), 1: randn(1, N, S, T, seed=5)}.get(pse_type, slopes)

    def fused(q, k, v, *pse):
        more = {"pse": pse[0], "pse_type": pse_type} if pse else {}
        call = fusion_attention(*(to_layout(x, layout) for x in (q, k, v)), N, layout.lower(), **options(mode, **more))
        return call[0], *(stat[..., 0] for stat in call[1:3])

    def expected(q, k, v, *pse):
        bias = bias_of(pse[0], pse_type, S, T) if pse else None
        out, *stats = dense(q, k, v, seen_by(mode), bias, pse_type)
        return to_layout(out, layout), *stats

    assert_agrees(fused, expected, (q, k, v, *([] if pse is None else [pse])))


def packed_call(mode, q_lengths=Q_LENGTHS, kv_lengths=KV_LENGTHS, **more):
    lengths = {"actual_seq_qlen": ends(q_lengths), "actual_seq_kvlen": ends(kv_lengths), "softmax_layout": "TND"}
    given = options(mode, **lengths) | ({"prefix": [1, 2, 3, 4, 0]} if mode == 6 else {})
    given |= {"atten_mask": full_mask(8, 8)} if mode in (0, 1) else {}

    def call(q, k, v):
        out, *stats = fusion_attention(q, k, v, N, "tnd", **(given | more))[:3]
        return out, *(stat[..., 0] for stat in stats)

    return call


def packed_sight(mode, q_lengths=Q_LENGTHS, kv_lengths=KV_LENGTHS):
    filled = [n for n, length in enumerate(q_lengths) if length]
    edge = {7: filled[-1], 8: filled[0]}.get(mode)
    mask = full_mask(8, 8) if mode in (0, 1) else None
    sizes = list(zip(q_lengths, kv_lengths, strict=True))
    return lambda n: sight(mode, *sizes[n], prefix=[1, 2, 3, 4, 0][n], edge=n == edge, mask=mask)
