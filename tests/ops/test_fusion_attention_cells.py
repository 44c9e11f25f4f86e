"""Layout x sparse mode x bias: every cell is computed by both kernels and compared with the dense formula, or refused."""

import pytest
import torch

from mindspeed.ops import fusion_attention
from tests.ops.attention_calls import (
    KERNELS,
    assert_agrees,
    check_dense,
    choose,
    masks,
    options,
    packed_call,
    packed_sight,
    seen_by,
)
from tests.ops.attention_formula import (
    KV_LENGTHS,
    PREFIX,
    Q_LENGTHS,
    B,
    N,
    S,
    T,
    bias_of,
    dense,
    full_mask,
    packed_dense,
    packed_qkv,
    qkv,
    sight,
    to_layout,
)
from tests.ops.operator_checks import randn, refused

EVERY = (None, 0, 1, 2, 3)
DENSE = dict.fromkeys(range(7), EVERY)
PACKED = dict.fromkeys((0, 2, 3), EVERY) | dict.fromkeys((1, 4, 6), (None, 2, 3)) | dict.fromkeys((7, 8), (None,))
ALLOWED = dict.fromkeys(("SBH", "BSH", "BSND", "BNSD"), DENSE) | {"TND": PACKED}
"""``{layout: {sparse mode: types of the bias}}``, None being no bias."""
CELLS = [(layout, mode, pse) for layout in ALLOWED for mode in range(9) for pse in EVERY]
TAKEN = [cell for cell in CELLS if cell[2] in ALLOWED[cell[0]].get(cell[1], ())]
REFUSED = [cell for cell in CELLS if cell not in TAKEN]


@pytest.fixture(params=KERNELS, autouse=True)
def kernel(request, monkeypatch):
    choose(request.param, monkeypatch)


def check_packed(mode, pse_type):
    slopes = randn(len(Q_LENGTHS), N, seed=6, grad=False).abs()
    more = {} if pse_type is None else {"pse": slopes, "pse_type": pse_type}
    bias = None if pse_type is None else lambda n: bias_of(slopes[n], pse_type, Q_LENGTHS[n], KV_LENGTHS[n])

    def expected(q, k, v):
        return packed_dense(q, k, v, Q_LENGTHS, KV_LENGTHS, packed_sight(mode), bias, pse_type)

    assert_agrees(packed_call(mode, **more), expected, packed_qkv())


def check_packed_with_1024_rows(mode, pse_type):
    """A bias of distance alone: rows of any sequence are rows of the longest, moved along the diagonal."""
    lengths = [0, 3, 5, 1, 0]
    slopes, rows = randn(5, N, 1, 1, seed=6, grad=False), torch.arange(1024)[:, None] - 1024 + 5
    pse = (slopes * (torch.arange(5) - rows)).detach()
    mask = torch.ones(8, 8).triu(1) > 0
    more = {"pse": pse, "pse_type": pse_type} | ({"atten_mask": mask, "next_tokens": 0} if mode == 0 else {})

    def seen(n):
        return sight(mode, lengths[n], lengths[n], post=0, mask=mask if mode == 0 else None)

    def bias(n):
        return slopes[n : n + 1] * (torch.arange(lengths[n]) - torch.arange(lengths[n])[:, None])

    def expected(q, k, v):
        return packed_dense(q, k, v, lengths, lengths, seen, bias, pse_type)

    inputs = packed_qkv(q_lengths=lengths, kv_lengths=lengths)
    assert_agrees(packed_call(mode, lengths, lengths, **more), expected, inputs)


@pytest.mark.parametrize(("layout", "mode", "pse_type"), TAKEN)
def test_every_allowed_cell_agrees_with_the_dense_formula(layout, mode, pse_type):
    if layout != "TND":
        check_dense(layout, mode, pse_type)
    elif pse_type in (0, 1):
        check_packed_with_1024_rows(mode, pse_type)
    else:
        check_packed(mode, pse_type)


@pytest.mark.parametrize("mode", range(7))
@pytest.mark.parametrize("pse_type", [0, 1])
def test_a_bias_that_needs_no_gradient_agrees_too(mode, pse_type):
    q, k, v = qkv(width=4)
    pse = randn(B, N, S, T, seed=5, grad=False)

    def fused(*inputs):
        call = fusion_attention(*inputs, N, "BNSD", pse=pse, pse_type=pse_type, **options(mode))
        return call[0], *(stat[..., 0] for stat in call[1:3])

    assert_agrees(fused, lambda *inputs: dense(*inputs, seen_by(mode), pse, pse_type), (q, k, v))


@pytest.mark.parametrize("mode", range(7))
@pytest.mark.parametrize("pse_type", EVERY)
def test_masks_and_prefixes_of_each_sequence_agree_with_a_bias_that_all_share(mode, pse_type):
    each = torch.stack([full_mask(S, T), full_mask(S, T).flip(0)])[:, None]
    mask = each if mode in (0, 1) else masks(mode)
    seen = torch.stack([sight(mode, S, T, prefix=PREFIX[b], mask=each[b, 0] if mode in (0, 1) else None) for b in range(B)])[
        :, None
    ]
    slopes = randn(N, seed=6, grad=False).abs()
    pse = None if pse_type is None else slopes if pse_type >= 2 else randn(1, N, S, T, seed=5, grad=False)
    more = {} if pse is None else {"pse": pse, "pse_type": pse_type}

    def fused(*inputs):
        call = fusion_attention(*inputs, N, "BNSD", **options(mode, atten_mask=mask, **more))
        return call[0], *(stat[..., 0] for stat in call[1:3])

    bias = None if pse is None else bias_of(pse, pse_type, S, T)
    assert_agrees(fused, lambda *inputs: dense(*inputs, seen, bias, pse_type), qkv(width=4))


def refusal(layout, mode, pse_type):
    if mode not in ALLOWED[layout]:
        modes = "0 to 4 and 6 to 8" if layout == "TND" else "0 to 6"
        return f"sparse_mode is {mode}, but the layout {layout} supports {modes}"
    if mode in (7, 8):
        return f"sparse_mode {mode} does not support pse"
    return "a pse of 1024 rows needs as many keys as queries and sparse_mode 0, 2 or 3"


@pytest.mark.parametrize(("layout", "mode", "pse_type"), REFUSED)
def test_every_other_cell_is_refused(layout, mode, pse_type):
    more = {"sparse_mode": mode, "prefix": PREFIX}
    if layout == "TND":
        q, k, v = packed_qkv(q_lengths=[3, 5], kv_lengths=[3, 5])
        more |= {"actual_seq_qlen": [3, 8], "actual_seq_kvlen": [3, 8], "prefix": [1, 1]}
        full = torch.ones(1, N, 1024, 5, dtype=q.dtype)
    else:
        q, k, v = (to_layout(x, layout) for x in qkv())
        full = torch.ones(1, N, S, T, dtype=q.dtype)
    if pse_type is not None:
        more |= {"pse_type": pse_type, "pse": full if pse_type < 2 else torch.ones(N)}
    with refused(f"fusion_attention: {refusal(layout, mode, pse_type)}"):
        fusion_attention(q, k, v, N, layout, **more)
