import pytest
import torch

from mindspeed.ops import npu_ring_attention_update as update
from mindspeed.ops.npu_ring_attention_update import sequence_major
from tests.ops.operator_checks import randn, refused

S, B, N, D, KEYS = 5, 2, 3, 4, 12
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def attention(logits, value):
    """(out, max, sum) of rows of logits; a row of -inf alone gives zeros."""
    maximum = logits.amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], -torch.inf)
    weights = torch.exp(logits - torch.where(maximum > -torch.inf, maximum, 0)[..., None])
    total = weights.sum(-1)
    return (weights @ value) / torch.where(total > 0, total, 1)[..., None], maximum, total


def sides(cuts, dtype=torch.float64, stat_dtype=torch.float64, hidden=(), lanes=8):
    """SBH results of attention over KEYS keys cut into consecutive ranges, and over all of them."""
    logits, value = 3 * randn(B, N, S, KEYS, grad=False), randn(B, N, KEYS, D, seed=2, grad=False)
    for row, start, end in hidden:
        logits[:, :, row, start:end] = -torch.inf
    ranges = [(0, KEYS), *zip([0, *cuts], [*cuts, KEYS], strict=True)]
    results = []
    for start, end in ranges:
        out, maximum, total = attention(logits[..., start:end], value[:, :, start:end])
        out = out.permute(2, 0, 1, 3).reshape(S, B, N * D).to(dtype)
        results.append((out, *(stat.to(stat_dtype)[..., None].repeat(1, 1, 1, lanes) for stat in (maximum, total))))
    return results


def assert_all_close(got, expected, tolerance):
    for value, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(value.double(), reference.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("cut", [0, 1, 7])
def test_merging_two_halves_gives_attention_over_all_keys(cut, dtype):
    stat_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    whole, first, second = sides([cut], dtype, stat_dtype)
    merged = update(*first, *second)
    assert [t.dtype for t in merged] == [dtype, stat_dtype, stat_dtype]
    assert_all_close(merged, whole, TOLERANCE[dtype])


def test_the_order_of_merging_does_not_matter():
    whole, a, b, c = sides([3, 8])
    left, right = update(*update(*a, *b), *c), update(*a, *update(*c, *b))
    assert_all_close(left, right, 1e-12)
    assert_all_close(left, whole, 1e-12)


def test_rows_hidden_on_one_side_or_on_both_stay_finite():
    whole, first, second = sides([6], hidden=[(0, 0, 6), (1, 6, 12), (2, 0, 12)])
    out, maximum, total = update(*first, *second)
    assert_all_close((out, maximum, total), whole, 1e-12)
    assert torch.equal(out[2], torch.zeros_like(out[2]))
    assert (maximum[:, :, 2] == -torch.inf).all()
    assert (total[:, :, 2] == 0).all()


@pytest.mark.parametrize("lanes", [1, 8])
def test_the_repetition_of_statistics_may_have_any_size(lanes):
    whole, first, second = sides([5], lanes=lanes)
    assert_all_close(update(*first, *second), whole, 1e-12)


def test_strided_operands_give_the_same():
    whole, first, second = sides([5])
    strided = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in first]
    assert not strided[0].is_contiguous()
    assert_all_close(update(*strided, *second), whole, 1e-12)


def packed(result, lanes=8):
    """The SBH result as TND: the batch becomes the sequences, each of S tokens."""
    out, *stats = result
    tokens = out.transpose(0, 1).reshape(B * S, N, D)
    return tokens, *(stat.transpose(1, 2).reshape(B * S, N, lanes) for stat in stats)


@pytest.mark.parametrize("ends", [[S, 2 * S], [0, S, 2 * S], [S, S, 2 * S], [2, 3, 2 * S]])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_packed_statistics_lie_in_memory_by_sequence_then_head(ends, as_tensor):
    whole, first, second = map(packed, sides([5]))
    arranged = [(out, *(sequence_major(stat, ends) for stat in stats)) for out, *stats in (first, second)]
    lengths = torch.tensor(ends) if as_tensor else ends
    out, *stats = update(*arranged[0], *arranged[1], lengths, "TND")
    assert_all_close((out, *stats), (whole[0], *(sequence_major(stat, ends) for stat in whole[1:])), 1e-12)


def test_one_sequence_lies_in_memory_head_by_head():
    stats = torch.arange(S * N).view(S, N, 1).repeat(1, 1, 8)
    assert torch.equal(sequence_major(stats, [S]).view(N, S, 8)[:, :, 0], torch.arange(S * N).view(S, N).T)


def test_packed_statistics_may_be_in_the_order_of_the_tokens():
    whole, first, second = map(packed, sides([5]))
    assert_all_close(update(*first, *second, layout="tnd", softmax_layout="TND"), whole, 1e-12)


def test_no_row_is_no_problem():
    out, stat = torch.ones(0, 2, 8), torch.ones(2, 4, 0, 8)
    assert [t.shape for t in update(out, stat, stat, out, stat, stat)] == [(0, 2, 8), (2, 4, 0, 8), (2, 4, 0, 8)]
    out, stat = torch.ones(0, 4, 2), torch.ones(0, 4, 8)
    assert update(out, stat, stat, out, stat, stat, [], "TND")[0].shape == (0, 4, 2)


def test_it_leaves_its_arguments_alone():
    _, first, second = sides([5])
    copies = [t.clone() for t in (*first, *second)]
    update(*first, *second)
    assert all(torch.equal(a, b) for a, b in zip(copies, (*first, *second), strict=True))


def test_backward_through_it_says_that_it_has_none():
    _, first, second = sides([5])
    first[0].requires_grad_()
    with refused(
        "npu_ring_attention_update: the operator has no gradient; call it on tensors that need none, or under torch.no_grad()"
    ):
        update(*first, *second)[0].sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "BSND"}, "layout is BSND, but must be SBH or TND"),
        ({"softmax_layout": "NTD"}, "softmax_layout is NTD, but must be empty or TND"),
        ({"out": torch.ones(3, 2, 8)}, "the outputs have different shapes, (5, 2, 12) and (3, 2, 8)"),
        ({"out": torch.ones(S, B, N * D).half()}, "the outputs have different types, torch.float32 and torch.float16"),
        ({"stat": torch.ones(B, N, S, 1)}, "the four statistics must have the same shape and floating-point type"),
        ({"layout": "TND"}, "statistics of shape (2, 3, 5, 8) do not match TND outputs of shape (5, 2, 12)"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    out, stat = torch.ones(S, B, N * D), torch.ones(B, N, S, 8)
    other, last = change.pop("out", out), change.pop("stat", stat)
    with refused(f"npu_ring_attention_update: {message}"):
        update(out, stat, stat, other, stat, last, **change)


def test_packed_statistics_without_lengths_are_refused():
    out, stat = torch.ones(5, 3, 4), torch.ones(5, 3, 8)
    with refused("npu_ring_attention_update: the layout TND needs actual_seq_qlen, unless softmax_layout is TND"):
        update(out, stat, stat, out, stat, stat, layout="TND")
    with refused("npu_ring_attention_update: actual_seq_qlen ends at 4, not at 5"):
        update(out, stat, stat, out, stat, stat, [2, 4], "TND")
