import sys

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint

from mindspeed.ops import attention, fusion_attention, fusion_attention_grad, npu_fusion_attention, npu_ring_attention_update
from mindspeed.ops.attention_mask import compressed_mask, forget_compressed_masks
from mindspeed.ops.attention_scores import Dropout
from mindspeed.ops.cpu import fusion_attention as flash
from mindspeed.ops.npu_ring_attention_update import sequence_major
from tests.ops.attention_calls import KERNELS, assert_agrees, check_dense, choose, logsumexp, options, seen_by
from tests.ops.attention_formula import (
    KV_LENGTHS,
    MASKS,
    Q_LENGTHS,
    B,
    D,
    N,
    S,
    T,
    bias_of,
    dense,
    ends,
    full_mask,
    packed_dense,
    packed_qkv,
    qkv,
    to_layout,
)
from tests.ops.operator_checks import (
    TOLERANCE,
    assert_same_in_inference_mode,
    assert_same_when_compiled,
    assert_same_when_recomputed,
    randn,
    refused,
    strided,
)


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    choose(request.param, monkeypatch)
    return request.param


@pytest.mark.parametrize("pse_type", [0, 1])
def test_a_bias_of_1024_rows_stands_for_all_rows_and_gets_their_gradient(pse_type):
    length = 1030
    q, k, v = (randn(1, 2, length, 2, seed=s, grad=False, dtype=torch.float32) for s in (1, 2, 3))
    slope = torch.tensor([0.01, 0.2]).view(1, 2, 1, 1).requires_grad_()
    relative = torch.arange(length) - torch.arange(length)[:, None]
    results = []
    for rows in (1024, length):
        out = fusion_attention(
            q, k, v, 2, "BNSD", pse=slope * relative[-rows:], pse_type=pse_type, atten_mask=MASKS[3], sparse_mode=3
        )[0]
        results.append((out, *torch.autograd.grad(out.square().sum(), slope)))
    for compressed, full in zip(*results, strict=True):
        torch.testing.assert_close(compressed, full, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(B, N, 1, T), (1, N, S, T), (B, N, S, T)])
def test_a_bias_may_be_shared_by_rows_or_by_the_batch_and_gets_its_gradient(shape):
    q, k, v = qkv()
    pse = randn(*shape, seed=5)

    def fused(q, k, v, pse):
        return fusion_attention(q, k, v, N, "BNSD", pse=pse, pse_type=0, **options(3))[0]

    torch.testing.assert_close(fused(q, k, v, pse), dense(q, k, v, seen_by(3), pse, 0)[0])
    assert torch.autograd.gradcheck(fused, (q, k, v, pse), fast_mode=True)


@pytest.mark.parametrize("pse_type", [2, 3])
def test_slopes_per_head_and_a_moved_diagonal(pse_type):
    q, k, v = qkv()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    call = fusion_attention(q, k, v, N, "BNSD", pse=slopes, pse_type=pse_type, q_start_idx=[3], kv_start_idx=[1], **options(2))
    bias = bias_of(slopes, pse_type, S, T, 3, 1)
    torch.testing.assert_close(call[0], dense(q, k, v, seen_by(2), bias, pse_type)[0])


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("width", [1, 4, 6])
def test_shared_key_heads_and_other_widths_of_the_value(kernel, groups, width):
    q, k, v = qkv(groups, width)
    out, *stats = fusion_attention(q, k, v, N, "BNSD", **options(2))[:3]
    expected, *_ = dense(q, k, v, seen_by(2))
    torch.testing.assert_close(out, expected)
    assert [stat.shape for stat in stats] == [(B, N, S, 8)] * 2
    assert torch.autograd.gradcheck(lambda *x: fusion_attention(*x, N, "BNSD", **options(2))[0], (q, k, v), fast_mode=True)


def test_it_agrees_with_torch():
    q, k, v = (randn(2, 4, 33, 16, dtype=torch.float32, seed=s) for s in (1, 2, 3))
    out = fusion_attention(q, k, v, 4, "BNSD", scale=0.25, atten_mask=MASKS[2], sparse_mode=2)[0]
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True), rtol=1e-5, atol=1e-5)


def test_without_a_mask_every_key_is_seen():
    q, k, v = qkv()
    out = fusion_attention(q, k, v, N, "BNSD", scale=0.5, sparse_mode=2, pre_tokens=0, next_tokens=0)[0]
    torch.testing.assert_close(out, dense(q, k, v, torch.ones(S, T, dtype=torch.bool))[0])


@pytest.mark.parametrize("shape", [(B, N, S, T), (B, 1, S, T), (1, 1, S, T), (S, T)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_masks_of_every_shape(shape, dtype):
    q, k, v = qkv()
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    out = fusion_attention(q, k, v, N, "BNSD", scale=0.5, atten_mask=mask.to(dtype))[0]
    torch.testing.assert_close(out, dense(q, k, v, ~mask)[0])


@pytest.mark.parametrize("length", [1, 2047, 2048, 2049])
def test_the_compressed_causal_mask_is_the_full_one_at_any_length(length):
    q, k, v = (randn(1, 1, length, 2, seed=s, grad=False, dtype=torch.float32) for s in (1, 2, 3))
    compressed = fusion_attention(q, k, v, 1, "BNSD", atten_mask=MASKS[2], sparse_mode=2)[0]
    full = torch.ones(length, length, dtype=torch.bool).triu(1)
    assert torch.equal(compressed, fusion_attention(q, k, v, 1, "BNSD", atten_mask=full, sparse_mode=2)[0])
    torch.testing.assert_close(compressed, fusion_attention(q, k, v, 1, "BNSD", atten_mask=full, sparse_mode=1)[0])


def test_a_query_that_sees_nothing_gives_zeros_and_gets_no_gradient(kernel):
    q, k, v = qkv(keys=4)
    out, maximum, total, *_ = fusion_attention(q, k, v, N, "BNSD", atten_mask=MASKS[3], sparse_mode=3)
    assert torch.equal(out[:, :, :3], torch.zeros_like(out[:, :, :3]))
    assert (maximum[:, :, :3] == -torch.inf).all()
    assert (total[:, :, :3] == 0).all()
    out.sum().backward()
    assert not q.grad[:, :, :3].any()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))


def test_documents_of_one_packed_sequence_do_not_see_each_other():
    q, k, v = packed_qkv(q_lengths=[3, 5], kv_lengths=[3, 5])
    lengths = {"actual_seq_qlen": [3, 8], "actual_seq_kvlen": torch.tensor([3, 8])}
    fusion_attention(q, k, v, N, "TND", atten_mask=MASKS[2], sparse_mode=2, **lengths)[0][:3].sum().backward()
    assert all(x.grad[:3].any() and not x.grad[3:].any() for x in (k, v))


@pytest.mark.parametrize(("batch", "queries"), [(0, 3), (2, 0)])
@pytest.mark.parametrize("layout", ["SBH", "BSH", "BSND", "BNSD"])
def test_no_batch_and_no_query_are_no_problem(kernel, layout, batch, queries):
    shapes = (batch, N, queries, D), (batch, N, T, D), (batch, N, T, D)
    q, k, v = inputs = [to_layout(randn(*s, grad=False), layout).requires_grad_() for s in shapes]
    out = fusion_attention(q, k, v, N, layout)[0]
    assert out.shape == q.shape
    out.sum().backward()
    assert all(x.grad.shape == x.shape for x in inputs)
    assert not k.grad.any()


def test_statistics_of_packed_sequences_lie_in_memory_by_sequence_then_head():
    q, k, v = packed_qkv()
    lengths = {"actual_seq_qlen": ends(Q_LENGTHS), "actual_seq_kvlen": ends(KV_LENGTHS)}
    natural = fusion_attention(q, k, v, N, "TND", softmax_layout="TND", **lengths)
    by_sequence = fusion_attention(q, k, v, N, "TND", **lengths)
    assert natural[1].shape == (sum(Q_LENGTHS), N, 8)
    for n in (1, 2):
        assert torch.equal(sequence_major(natural[n], ends(Q_LENGTHS)), by_sequence[n])


@pytest.mark.parametrize("layout", ["SBH", "TND"])
def test_two_blocks_of_keys_merge_to_attention_over_all(layout, kernel):
    if layout == "TND":
        (q, k, v), more = packed_qkv(2, 4), {"actual_seq_qlen": [6, 9], "actual_seq_kvlen": [7, 15]}
        blocks = [([*range(4), *range(7, 11)], [4, 8]), ([*range(4, 7), *range(11, 15)], [3, 7])]
        calls = [(k, v, more)] + [(k[i], v[i], more | {"actual_seq_kvlen": e}) for i, e in blocks]
        merged = {"actual_seq_qlen": [0, 6, 9], "layout": "TND"}
    else:
        q, k, v = (to_layout(x, "SBH") for x in qkv(width=4))
        calls = [(k, v, {}), (k[:4], v[:4], {}), (k[4:], v[4:], {})]
        merged = {}
    whole, first, second = (fusion_attention(q, *kv, N, layout, **more)[:3] for *kv, more in calls)
    with torch.no_grad():
        out, *stats = npu_ring_attention_update(*first, *second, **merged)
        torch.testing.assert_close(out, whole[0])
        torch.testing.assert_close(logsumexp(*stats), logsumexp(*whole[1:]))


@pytest.mark.parametrize("layout", ["SBH", "TND"])
def test_gradients_of_blocks_of_keys_add_up_to_those_of_all(layout, kernel):
    if layout == "TND":
        (q, k, v), more = packed_qkv(2, 4), {"actual_seq_qlen": [6, 9], "actual_seq_kvlen": [7, 15]}
        blocks = [([*range(4), *range(7, 11)], [4, 8]), ([*range(4, 7), *range(11, 15)], [3, 7])]
        blocks = [(torch.tensor(index), more | {"actual_seq_kvlen": lengths}) for index, lengths in blocks]
    else:
        (q, k, v), more = (to_layout(x.detach(), "SBH").requires_grad_() for x in qkv(width=4)), {}
        blocks = [(torch.arange(4), {}), (torch.arange(4, T), {})]
    out, maximum, total, *_ = fusion_attention(q, k, v, N, layout, scale=0.5, **more)
    dy = randn(*out.shape, seed=9, grad=False)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dy)
    results = {"softmax_max": maximum, "softmax_sum": total, "attention_in": out.detach(), "scale_value": 0.5}
    sums = torch.zeros_like(dq)
    for index, lengths in blocks:
        own = fusion_attention_grad(q.detach(), k.detach()[index], v.detach()[index], dy, N, layout, **results, **lengths)
        sums += own[0]
        torch.testing.assert_close(own[1:3], (dk[index], dv[index]))
        assert own[3] is None
    torch.testing.assert_close(sums, dq)


def test_the_gradient_function_regenerates_dropout_and_gives_that_of_the_bias():
    q, k, v = inputs = qkv()
    pse = randn(1, N, S, T, seed=5)
    more = {"keep_prob": 0.7, "pse": pse} | options(2)
    out, maximum, total, _, seed, *_ = fusion_attention(*inputs, N, "BNSD", **more)
    dy = randn(*out.shape, seed=9, grad=False)
    expected = torch.autograd.grad(out, (*inputs, pse), dy)
    more["scale_value"] = more.pop("scale")
    results = {"softmax_max": maximum, "softmax_sum": total, "attention_in": out, "seed": int(seed)}
    with torch.no_grad():
        got = fusion_attention_grad(q, k, v, dy, N, "BNSD", **results, **more)
        torch.testing.assert_close(got, expected)
        shapes = "dy and attention_in have shapes (1, 4, 7, 6) and (2, 4, 7, 6)"
        with refused(f"fusion_attention_grad: {shapes}; both are torch.float64 of shape (2, 4, 7, 6)"):
            fusion_attention_grad(q, k, v, dy[1:], N, "BNSD", **results, **more)


def drop_factors(seed, keep, shape, first=0):
    b, n, s, t = shape
    factors = Dropout(keep, torch.as_tensor(seed), first, (b, n, 1, s, t)).factors((0, s), (0, t), torch.float64)
    return factors.view(shape)


@pytest.mark.parametrize("keep", [0.7, 0.0])
def test_dropout_is_regenerated_from_its_seed(keep):
    inputs = qkv()

    def fused(q, k, v):
        torch.manual_seed(4)
        return fusion_attention(q, k, v, N, "BNSD", keep_prob=keep, **options(2))

    *_, seed, offset, numels = fused(*inputs)
    assert (offset, numels) == (0, B * N * S * T)
    factors = drop_factors(seed, keep, (B, N, S, T))
    assert_agrees(
        lambda *x: (fused(*x)[0], *(s[..., 0] for s in fused(*x)[1:3])),
        lambda *x: dense(*x, seen_by(2), factors=factors),
        inputs,
    )


def test_dropout_of_packed_sequences_counts_on_from_one_to_the_next():
    inputs = packed_qkv()
    sizes = [q * k * N for q, k in zip(Q_LENGTHS, KV_LENGTHS, strict=True)]

    def fused(q, k, v):
        torch.manual_seed(4)
        lengths = {"actual_seq_qlen": ends(Q_LENGTHS), "actual_seq_kvlen": ends(KV_LENGTHS)}
        return fusion_attention(q, k, v, N, "TND", keep_prob=0.6, scale=0.5, **lengths)

    *_, seed, _, numels = fused(*inputs)
    assert numels == sum(sizes)

    def factors(n):
        return drop_factors(seed, 0.6, (1, N, Q_LENGTHS[n], KV_LENGTHS[n]), sum(sizes[:n]))

    def everything(n):
        return torch.ones(Q_LENGTHS[n], KV_LENGTHS[n], dtype=torch.bool)

    expected = packed_dense(*inputs, Q_LENGTHS, KV_LENGTHS, everything, factors=factors)
    torch.testing.assert_close(fused(*inputs)[0], expected[0])


def test_dropout_keeps_its_share_and_does_not_repeat():
    factors = drop_factors(1234567, 0.8, (2, 4, 256, 256))
    assert factors.unique().tolist() == [0.0, 1.25]
    kept = (factors > 0).double()
    assert abs(kept.mean() - 0.8) < 2e-3
    for shifted in (kept.roll(1, -1), kept.roll(1, -2), kept.roll(1, 1), kept.roll(1, 0)):
        assert abs((kept * shifted).mean() - 0.64) < 3e-3
    other = drop_factors(1234568, 0.8, (2, 4, 256, 256)) > 0
    assert abs((kept * other).mean() - 0.64) < 3e-3


def test_another_call_drops_other_elements_unless_the_generator_is_set_back():
    q, k, v = qkv()
    torch.manual_seed(1)
    first, second = (fusion_attention(q, k, v, N, "BNSD", keep_prob=0.5)[0] for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(first, fusion_attention(q, k, v, N, "BNSD", keep_prob=0.5)[0])
    assert not torch.equal(first, second)


def test_blocks_of_a_dropout_mask_are_parts_of_the_whole():
    drop = Dropout(0.5, torch.tensor(7), 100, (2, 2, 1, 8, 10))
    whole = drop.factors((0, 8), (0, 10), torch.float32)
    assert torch.equal(whole[..., 3:5, 2:9], drop.factors((3, 5), (2, 9), torch.float32))


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("pse_type", [None, 1, 2, 3])
@pytest.mark.parametrize("mode", [0, 2, 4, 6])
def test_the_size_of_the_strips_does_not_matter(monkeypatch, kernel, mode, pse_type, rows):
    for module in (sys.modules["mindspeed.ops.fusion_attention"], flash):
        monkeypatch.setattr(module, "_ROWS", rows)
        monkeypatch.setattr(module, "_NUMBERS", 1)
    monkeypatch.setattr(flash, "_RELATIVE_ROWS", rows)
    check_dense("SBH", mode, pse_type)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values_and_gradients_are_close_to_the_fp64_formula(dtype, kernel):
    inputs = [x.detach().to(dtype).requires_grad_() for x in qkv(2, 4, 65, 65)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    mask = full_mask(65, 65)
    out, maximum, total, *_ = fusion_attention(*inputs, N, "BNSD", scale=0.5, atten_mask=mask)
    expected = dense(*exact, ~mask)
    assert out.dtype == dtype
    assert maximum.dtype == total.dtype == torch.float32
    dout = randn(*out.shape, seed=8, grad=False).to(dtype)
    out.backward(dout)
    expected[0].backward(dout.double())
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), expected[0], rtol=tolerance, atol=tolerance)
    stats = [stat[..., 0].double() for stat in (maximum, total)]
    torch.testing.assert_close(logsumexp(*stats), logsumexp(*expected[1:]), rtol=1e-4, atol=1e-4)
    for x, reference in zip(inputs, exact, strict=True):
        scale = float(reference.grad.abs().max())
        torch.testing.assert_close(x.grad.double(), reference.grad, rtol=tolerance, atol=tolerance * scale)


def test_the_reference_gives_the_maximum_and_the_sum_of_each_row(monkeypatch):
    choose("reference", monkeypatch)
    q, k, v = qkv()
    call, expected = fusion_attention(q, k, v, N, "BNSD", **options(3)), dense(q, k, v, seen_by(3))
    for stat, reference in zip(call[1:3], expected[1:], strict=True):
        torch.testing.assert_close(stat[..., 0], reference)


def test_a_half_precision_result_of_the_reference_is_rounded_once(monkeypatch):
    choose("reference", monkeypatch)
    q, k, v = (x.detach() for x in qkv(dtype=torch.bfloat16))
    expected, *_ = dense(q.double(), k.double(), v.double(), seen_by(2))
    out = fusion_attention(q, k, v, N, "BNSD", **options(2))[0]
    assert (out == expected.to(torch.bfloat16)).float().mean() > 0.995


def test_strided_tensors_give_the_same(kernel):
    shapes = (S, B, N * D), (T, B, 2 * D), (T, B, 2 * 6)
    inputs = [strided(*shape, seed=n) for n, shape in enumerate(shapes)]
    assert not any(x.is_contiguous() for x in inputs)
    plain = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in inputs]
    outs = [fusion_attention(*x, N, "SBH", **options(3))[0] for x in (inputs, plain)]
    torch.testing.assert_close(*outs)
    for out in outs:
        out.sum().backward()
    for ours, other in zip(inputs, plain, strict=True):
        torch.testing.assert_close(ours.grad, other.grad)


def test_backward_keeps_inputs_results_and_statistics_alone():
    q, k, v = qkv(dtype=torch.bfloat16)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fusion_attention(q, k, v, N, "BNSD", keep_prob=0.9, **options(2))
    shapes = [tuple(t.shape) for t in saved if t.dtype not in (torch.bool, torch.int64)]
    assert sorted(shapes) == sorted([*(tuple(x.shape) for x in (q, k, v)), (B, N, S, 6), (B, N, S, 1), (B, N, S, 1)])


@pytest.mark.parametrize("layout", ["SBH", "TND"])
def test_it_is_the_same_compiled_recomputed_and_in_inference_mode(layout, kernel):
    if layout == "TND":
        inputs, more = (
            packed_qkv(dtype=torch.bfloat16),
            {"actual_seq_qlen": ends(Q_LENGTHS), "actual_seq_kvlen": ends(KV_LENGTHS)},
        )
    else:
        inputs, more = [to_layout(x.detach(), "SBH").requires_grad_() for x in qkv(dtype=torch.bfloat16)], {}

    def attend(q, k, v):
        return fusion_attention(q, k, v, N, layout, **options(3), **more)[:3]

    assert_same_when_compiled(attend, *inputs)
    assert_same_when_recomputed(attend, *inputs)
    assert_same_in_inference_mode(attend, *inputs)


def test_recomputing_drops_the_same_elements():
    def attend(q, k, v):
        return fusion_attention(q, k, v, N, "BNSD", keep_prob=0.7, **options(2))[0]

    grads = []
    for call in (attend, lambda *x: checkpoint(attend, *x, use_reentrant=False)):
        inputs = qkv()
        torch.manual_seed(3)
        grads.append(torch.autograd.grad(call(*inputs).square().sum(), inputs))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_dropout_compiles_without_a_graph_break():
    torch.compiler.reset()
    q, k, v = qkv()
    attend = torch.compile(lambda *x: fusion_attention(*x, N, "BNSD", keep_prob=0.5)[0], fullgraph=True, backend="aot_eager")
    attend(q, k, v).sum().backward()
    assert torch.isfinite(q.grad).all()


def test_the_operators_are_registered_as_pytorch_wants_it():
    q, k, v = (to_layout(x.detach().float(), "SBH") for x in qkv())
    how = (N, "SBH", 0.5, 0.5, 2, 1, None, None, None, 2, 1, 0, 0)
    pse = randn(1, N, S, T, dtype=torch.float32)
    op = torch.ops.mindspeed.fusion_attention.default
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(op, (*inputs, pse, MASKS[2], *how))
    pse = pse.detach()
    *results, state = op(q, k, v, pse, MASKS[2], *how)
    backward = torch.ops.mindspeed.fusion_attention_backward.default
    torch.library.opcheck(backward, (torch.ones_like(results[0]), q, k, v, pse, MASKS[2], state, *results, True, *how))
    lengths = ends(Q_LENGTHS), ends(KV_LENGTHS)
    packed = (N, "TND", 0.5, 1.0, 2, 1, None, *lengths, 8, 1, 0, 0)
    inputs = [x.float().detach().requires_grad_() for x in packed_qkv()]
    torch.library.opcheck(op, (*inputs, None, MASKS[8], *packed))


def test_a_mask_that_was_made_of_fake_tensors_is_not_kept():
    forget_compressed_masks()
    device = torch.device("cpu")
    with FakeTensorMode():
        assert isinstance(compressed_mask(device), FakeTensor)
        assert compressed_mask(device) is compressed_mask(device)
    real = compressed_mask(device)
    assert not isinstance(real, FakeTensor)
    assert compressed_mask(device) is real
    with FakeTensorMode():
        assert isinstance(compressed_mask(device), FakeTensor)


def test_the_mask_of_prefixes_ends_with_the_keys_behind_them():
    mask = compressed_mask(torch.device("cpu"), with_prefix=True)
    assert mask.shape == (3072, 2048)
    assert torch.equal(mask[:2048], compressed_mask(torch.device("cpu")))
    assert mask[2048:, 1024:].all()
    assert not mask[2048:, :1024].any()


def test_the_name_of_mindspeed_is_the_same_function():
    assert npu_fusion_attention is fusion_attention


def ones(*shape):
    return torch.ones(shape)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_layout": "NBSD"}, "input_layout is NBSD, but must be one of SBH, BSH, BSND, BNSD, TND"),
        ({"head_num": 3}, "query of shape (2, 4, 7, 4) in the layout BNSD does not have 3 heads"),
        ({"input_layout": "BSND"}, "query of shape (2, 4, 7, 4) in the layout BSND does not have 4 heads"),
        (
            {"query": ones(2, 4, 4)},
            "query, key and value have shapes [(2, 4, 4), (2, 2, 9, 4), (2, 2, 9, 6)], but BNSD needs 4 dimensions",
        ),
        (
            {"query": ones(2, 4, 7, 4).half()},
            "query, key and value are torch.float16, torch.float32 and torch.float32, but must have one floating-point type",
        ),
        ({"key": ones(2, 3, 9, 4)}, "4 query heads are not divisible by 3 key heads"),
        ({"key": ones(2, 2, 9, 5)}, "key of shape (2, 2, 9, 5) does not have heads of width 4"),
        ({"value": ones(2, 4, 9, 6)}, "value of shape (2, 4, 9, 6) does not have the 2 heads of the key"),
        (
            {"value": ones(2, 2, 8, 6)},
            "query, key and value have shapes [(2, 4, 7, 4), (2, 2, 9, 4), (2, 2, 8, 6)], whose sizes do not match",
        ),
        ({"sparse_mode": 7}, "sparse_mode is 7, but the layout BNSD supports 0 to 6"),
        ({"sparse_mode": 5}, "prefix is None, but must be 2 numbers of keys from 0 to 9"),
        ({"sparse_mode": 6, "prefix": [1, 10]}, "prefix is [1, 10], but must be 2 numbers of keys from 0 to 9"),
        ({"keep_prob": 1.2}, "keep_prob is 1.2, but must be between 0 and 1"),
        ({"padding_mask": ones(1)}, "padding_mask is reserved and must be None"),
        ({"softmax_layout": "BSN"}, "softmax_layout is BSN, but must be empty or TND"),
        ({"q_start_idx": [1, 2]}, "q_start_idx is [1, 2], but must be a list of one integer"),
        ({"atten_mask": ones(7, 9)}, "atten_mask is torch.float32, but must be bool or uint8"),
        (
            {"atten_mask": ones(9, 7).bool()},
            "atten_mask has shape (9, 7); sparse_mode 0 needs a full mask of 7 x 9",
        ),
        (
            {"atten_mask": ones(9, 7).bool(), "sparse_mode": 2},
            "atten_mask has shape (9, 7); sparse_mode 2 needs [2048, 2048] or a full mask of 7 x 9",
        ),
        ({"pse": ones(1, 4, 7, 9).half()}, "pse is torch.float16, but the query is torch.float32"),
        ({"pse": ones(1, 4, 9, 7)}, "pse has shape (1, 4, 9, 7), but a bias must be [2 | 1, 4, 1 | 7, 9]"),
        ({"pse": ones(4), "pse_type": 4}, "pse_type is 4, but must be 0, 1, 2 or 3"),
        ({"pse": ones(3), "pse_type": 2}, "pse has shape (3,), but slopes must be [4] or [2, 4]"),
        ({"pse": ones(4).half(), "pse_type": 3}, "pse is torch.float16, but slopes must be fp32"),
        ({"actual_seq_qlen": [7]}, "actual_seq_qlen and actual_seq_kvlen are supported in the layout TND, but not in BNSD"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    arguments = {"query": ones(2, 4, 7, 4), "key": ones(2, 2, 9, 4), "value": ones(2, 2, 9, 6), "head_num": 4}
    with refused(f"fusion_attention: {message}"):
        fusion_attention(**{**arguments, "input_layout": "BNSD", **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparse_mode": 5}, "sparse_mode is 5, but the layout TND supports 0 to 4 and 6 to 8"),
        ({"actual_seq_qlen": None}, "actual_seq_qlen is None, but the layout TND needs ascending ends up to 9"),
        ({"actual_seq_kvlen": [15, 14]}, "actual_seq_kvlen is [15, 14], but the layout TND needs ascending ends up to 15"),
        ({"actual_seq_kvlen": [15]}, "actual_seq_qlen and actual_seq_kvlen have different numbers of sequences, 2 and 1"),
        ({"sparse_mode": 7, "pse": torch.ones(4), "pse_type": 2}, "sparse_mode 7 does not support pse"),
        ({"pse": torch.ones(1, 4, 9, 9)}, "pse has shape (1, 4, 9, 9), but a bias must be [2 | 1, 4, 1024, 9]"),
        (
            {"pse": torch.ones(1, 4, 1024, 9), "sparse_mode": 3},
            "a pse of 1024 rows needs as many keys as queries and sparse_mode 0, 2 or 3",
        ),
    ],
)
def test_wrong_packed_arguments_are_refused(change, message):
    arguments = {"actual_seq_qlen": [3, 9], "actual_seq_kvlen": [6, 15]}
    q, k, v = (x.detach().float() for x in packed_qkv())
    with refused(f"fusion_attention: {message}"):
        fusion_attention(q, k, v, N, "TND", **{**arguments, **change})


HEADS_FIRST = {
    "BSND": lambda x: x.transpose(1, 2),
    "BNSD": lambda x: x,
    "SBH": lambda x: x.unflatten(2, (3, 4)).permute(1, 2, 0, 3),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("layout", "shape"), [("BSND", (2, 5, 3, 4)), ("BNSD", (2, 3, 5, 4)), ("SBH", (5, 2, 12))])
def test_attention_for_people_is_causal_unless_it_is_told_otherwise(layout, shape, causal):
    q, k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    expected = F.scaled_dot_product_attention(*map(HEADS_FIRST[layout], (q, k, v)), is_causal=causal)
    torch.testing.assert_close(HEADS_FIRST[layout](attention(q, k, v, 3, layout, causal=causal)), expected)
