"""Attention of CUDA: what is handed to torch's flash kernels, and what comes back. No GPU: the kernels are stood in for."""

import pytest
import torch

from mindspeed.ops.attention_arguments import AttentionOptions
from mindspeed.ops.cuda import fusion_attention as cuda
from mindspeed.ops.fusion_attention import _backward, _forward
from mindspeed.ops.registration import with_reference
from tests.ops.flash_stand_in import flash_on_cpu
from tests.ops.operator_checks import randn

FORWARD = with_reference(cuda.KERNELS["fusion_attention"], _forward)
BACKWARD = with_reference(cuda.KERNELS["fusion_attention_backward"], _backward)

NO_BOUND = 2147483647
MASK = torch.ones(1, dtype=torch.bool)
"""Modes 2, 3 and 4 do not read it."""


@pytest.fixture
def flash(monkeypatch):
    monkeypatch.setattr(cuda, "_device_takes", lambda device: True)
    with flash_on_cpu() as called:
        yield called


def options(layout, heads, mode=0, before=NO_BOUND, after=NO_BOUND, q_ends=None, kv_ends=None, keep=1.0):
    return AttentionOptions(heads, layout, 0.3, keep, before, after, None, q_ends, kv_ends, mode, 1, 0, 0)


def laid_out(layout, batch, length, heads, width, seed, dtype=torch.bfloat16):
    shape = {
        "SBH": (length, batch, heads * width),
        "BSH": (batch, length, heads * width),
        "BSND": (batch, length, heads, width),
        "BNSD": (batch, heads, length, width),
        "TND": (batch * length, heads, width),
    }[layout]
    return randn(*shape, seed=seed, grad=False).to(dtype)


def both_ways(q, k, v, mask, opts, **calls):
    """Results and gradients of the kernel of CUDA and of the reference, the gradients from one result and its statistics."""
    torch.manual_seed(3)
    out, maximum, total, state = FORWARD(q, k, v, calls.get("pse"), mask, *opts)
    torch.manual_seed(3)
    expected, m, s, drawn = _forward(q, k, v, calls.get("pse"), mask, *opts)
    dout = randn(*out.shape, seed=9, grad=False).to(out.dtype)
    before = (dout, q, k, v, calls.get("pse"), mask)
    grads = BACKWARD(*before, state if opts.keep_prob < 1 else None, expected, maximum, total, False, *opts)
    wanted = _backward(*before, drawn if opts.keep_prob < 1 else None, expected, m, s, False, *opts)
    return (out, maximum + total.log(), *grads[:3]), (expected, m + s.log(), *wanted[:3])


def assert_flash_is_right(flash, *arguments, **calls):
    found, expected = both_ways(*arguments, **calls)
    assert flash == ["forward", "backward"]
    for value, reference in zip(found, expected, strict=True):
        assert (value.dtype, value.shape, value.stride()) == (reference.dtype, reference.shape, reference.stride())
        torch.testing.assert_close(value, reference, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("layout", ["SBH", "BSH", "BSND", "BNSD", "TND"])
@pytest.mark.parametrize("mode", [None, 2, 3, 4])
def test_every_layout_and_window_with_shared_key_heads_is_the_reference(flash, layout, mode):
    keys = 7 if mode == 2 else 11
    q = laid_out(layout, 2, 7, 4, 16, 1)
    k, v = (laid_out(layout, 2, keys, 2, 16, seed) for seed in (2, 3))
    ends = {"q_ends": [7, 14], "kv_ends": [keys, 2 * keys]} if layout == "TND" else {}
    opts = options(layout, 4, mode or 0, 2 if mode == 4 else NO_BOUND, 1 if mode == 4 else NO_BOUND, **ends)
    assert_flash_is_right(flash, q, k, v, None if mode is None else MASK, opts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widths", [(24, 16), (10, 10), (16, 24)])
def test_heads_of_other_widths_are_filled_up(flash, widths, dtype):
    q, k = (laid_out("BSND", 2, 5, 2, widths[0], seed, dtype) for seed in (1, 2))
    v = laid_out("BSND", 2, 5, 2, widths[1], 3, dtype)
    assert_flash_is_right(flash, q, k, v, MASK, options("BSND", 2, 3))


def test_packed_sequences_may_be_unequal_and_empty(flash):
    q, k, v = (laid_out("TND", 1, n, 2, 8, seed) for seed, n in ((1, 9), (2, 14), (3, 14)))
    opts = options("TND", 2, 3, q_ends=[4, 4, 9], kv_ends=[6, 9, 14])
    assert_flash_is_right(flash, q, k, v, MASK, opts)


def test_elements_that_are_not_side_by_side_are_copied(flash):
    q, k, v = (laid_out("BSND", 2, 5, 2, 32, seed)[..., ::2] for seed in (1, 2, 3))
    found, expected = both_ways(q, k, v, None, options("BSND", 2))
    assert flash == ["forward", "backward"]
    torch.testing.assert_close(found[0], expected[0], rtol=2e-2, atol=2e-2)


def test_a_row_that_saw_no_key_anywhere_gets_no_gradient(flash):
    q, k, v = (laid_out("BNSD", 1, 4, 1, 8, seed) for seed in (1, 2, 3))
    opts = options("BNSD", 1)
    out, maximum, total, _ = FORWARD(q, k, v, None, None, *opts)
    maximum[:, :, 1], total[:, :, 1] = -torch.inf, 0
    dq, dk, dv, _ = BACKWARD(torch.ones_like(out), q, k, v, None, None, None, out, maximum, total, False, *opts)
    assert not dq[:, :, 1].any()
    assert dq[:, :, 0].any()
    assert dk.isfinite().all()
    assert dv.isfinite().all()


def heads(*, keys=7, dtype=torch.bfloat16, width=8):
    return [laid_out("BNSD", 1, n, 2, width, seed, dtype) for seed, n in ((1, 7), (2, keys), (3, keys))]


REFERENCE = {
    "fp32": (heads(dtype=torch.float32), None, options("BNSD", 2), {}),
    "a bias": (heads(), None, options("BNSD", 2), {"pse": torch.zeros(1, 2, 7, 7).bfloat16()}),
    "dropout of everything": (heads(), None, options("BNSD", 2, keep=0.0), {}),
    "a mask that is read": (heads(), torch.zeros(7, 7, dtype=torch.bool), options("BNSD", 2, 1), {}),
    "mode 2 with more keys": (heads(keys=9), MASK, options("BNSD", 2, 2), {}),
    "more queries than keys": (heads(keys=5), MASK, options("BNSD", 2, 3), {}),
    "a band beside the diagonal": (heads(), MASK, options("BNSD", 2, 4, -1, 3), {}),
    "heads wider than 256": (heads(width=264), None, options("BNSD", 2), {}),
    "no queries": ([x[:, :, :n] for x, n in zip(heads(), (0, 7, 7), strict=True)], None, options("BNSD", 2), {}),
}


@pytest.mark.parametrize("name", REFERENCE)
def test_the_reference_runs_for(flash, name):
    tensors, mask, opts, calls = REFERENCE[name]
    found, expected = both_ways(*tensors, mask, opts, **calls)
    assert flash == []
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_reference_runs_on_a_gpu_without_flash_kernels(monkeypatch):
    tensors = heads()
    monkeypatch.setattr(cuda, "_device_takes", lambda device: False)
    with flash_on_cpu() as called:
        out, *_ = FORWARD(*tensors, None, None, *options("BNSD", 2))
    assert called == []
    assert torch.equal(out, _forward(*tensors, None, None, *options("BNSD", 2))[0])


@pytest.mark.parametrize("layout", ["SBH", "TND"])
def test_dropout_has_one_mask_in_both_directions(flash, layout):
    """The stand-in draws its mask as the reference does, so that both give the same values."""
    ends = [10, 20] if layout == "TND" else None
    q, k, v = (laid_out(layout, 2, 10, 2, 8, seed) for seed in (1, 2, 3))
    assert_flash_is_right(flash, q, k, v, MASK, options(layout, 2, 3, q_ends=ends, kv_ends=ends, keep=0.6))


@pytest.mark.parametrize(("layout", "ends"), [("SBH", None), ("TND", [3, 10])])
def test_the_calls_fit_the_operators_of_this_torch(layout, ends, monkeypatch):
    """Names of arguments and shapes, by torch's own shape kernels."""
    monkeypatch.setattr(cuda, "_device_takes", lambda device: True)
    q, k, v = (laid_out(layout, 1, 10, 2, 8, seed).to("meta") for seed in (1, 2, 3))
    opts = options(layout, 2, 4, 2, 2, ends, ends)
    out, maximum, total, _ = FORWARD(q, k, v, None, MASK, *opts)
    grads = BACKWARD(out, q, k, v, None, MASK, None, out, maximum, total, False, *opts)
    assert out.shape == q.shape
    assert maximum.shape == total.shape == ((10, 2, 1) if layout == "TND" else (1, 2, 10, 1))
    assert [g.shape for g in grads[:3]] == [q.shape, k.shape, v.shape]
