import pytest
import torch

from mindspeed.ops import npu_rotary_position_embedding as rotary
from tests.ops.operator_checks import TOLERANCE, assert_close_to_fp64, randn, refused, strided

LAYOUTS = {
    "BNSD 11SD": ((2, 3, 5, 8), (1, 1, 5, 8)),
    "BNSD B1SD": ((2, 3, 5, 8), (2, 1, 5, 8)),
    "BNSD BNSD": ((2, 3, 5, 2), (2, 3, 5, 2)),
    "BSND 1S1D": ((2, 5, 3, 6), (1, 5, 1, 6)),
    "SBND S11D": ((5, 2, 3, 8), (5, 1, 1, 8)),
    "TND T1D": ((7, 3, 8), (7, 1, 8)),
    "no row": ((0, 2, 3, 8), (1, 1, 1, 8)),
    "no batch": ((3, 0, 2, 4), (3, 1, 1, 4)),
}


def formula(x, cos, sin, mode):
    """By complex multiplication with pairs (cos_i + i sin_i) that may differ within a pair."""
    turned = x.clone()
    half = x.shape[-1] // 2
    for i in range(half):
        a, b = (i, i + half) if mode == 0 else (2 * i, 2 * i + 1)
        turned[..., a] = x[..., a] * cos[..., a] - x[..., b] * sin[..., a]
        turned[..., b] = x[..., b] * cos[..., b] + x[..., a] * sin[..., b]
    return turned


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_computes_the_formula_and_its_gradients(layout, mode):
    x_shape, table_shape = LAYOUTS[layout]
    x, cos, sin = randn(*x_shape), randn(*table_shape, seed=2), randn(*table_shape, seed=3)
    torch.testing.assert_close(rotary(x, cos, sin, mode), formula(x, cos, sin, mode))
    assert torch.autograd.gradcheck(lambda *t: rotary(*t, mode), (x, cos, sin))


@pytest.mark.parametrize("mode", [0, 1])
def test_strided_input_gives_the_same(mode):
    x, cos, sin = strided(2, 3, 5, 8), strided(1, 1, 5, 8, seed=2), strided(1, 1, 5, 8, seed=3)
    assert not x.is_contiguous()
    torch.testing.assert_close(rotary(x, cos, sin, mode), formula(x, cos, sin, mode))
    assert torch.autograd.gradcheck(lambda *t: rotary(*t, mode), (x, cos, sin))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values_and_gradients_are_close_to_the_fp64_formula(dtype):
    inputs = randn(8, 2, 3, 64, dtype=dtype), *(randn(8, 1, 1, 64, dtype=dtype, seed=s) for s in (2, 3))
    assert_close_to_fp64(lambda *t: rotary(*t, 0), lambda *t: formula(*t, 0), inputs)


def test_a_half_precision_result_is_rounded_once():
    x, cos, sin = (randn(64, 2, 3, 32, dtype=torch.bfloat16, seed=s, grad=False) for s in (1, 2, 3))
    assert torch.equal(rotary(x, cos, sin), formula(x.float(), cos.float(), sin.float(), 0).to(torch.bfloat16))


def test_wide_tables_are_used_as_they_are():
    x, cos, sin = randn(4, 1, 1, 8, dtype=torch.bfloat16), randn(4, 1, 1, 8).float(), randn(4, 1, 1, 8, seed=3).float()
    y = rotary(x, cos, sin)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, formula(x.float(), cos, sin, 0).to(torch.bfloat16))


def test_backward_keeps_the_tables_and_the_input_only_where_they_need_gradients():
    x, cos, sin = randn(4, 2, 3, 8), randn(4, 1, 1, 8, seed=2, grad=False), randn(4, 1, 1, 8, seed=3, grad=False)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        rotary(x, cos, sin)
        assert saved == [cos.data_ptr(), sin.data_ptr()]
        saved.clear()
        rotary(x, cos.requires_grad_(), sin)
    assert saved == [cos.data_ptr(), sin.data_ptr(), x.data_ptr()]


@pytest.mark.parametrize(
    ("x", "cos", "sin", "mode", "message"),
    [
        ((2, 3), (2, 3), (2, 3), 0, "x of shape (2, 3) needs an even last dimension"),
        ((2, 4), (2, 4), (1, 4), 0, "cos has shape (2, 4) and sin (1, 4), but they must be equal"),
        ((2, 4), (3, 4), (3, 4), 0, "cos of shape (3, 4) does not broadcast to x of shape (2, 4)"),
        ((2, 4), (2, 2), (2, 2), 0, "cos of shape (2, 2) does not broadcast to x of shape (2, 4)"),
        ((2, 4), (4,), (4,), 0, "cos of shape (4,) does not broadcast to x of shape (2, 4)"),
        ((2, 4), (2, 4), (2, 4), 2, "mode is 2, but must be 0 (halves) or 1 (neighbours)"),
    ],
)
def test_wrong_shapes_and_modes_are_refused(x, cos, sin, mode, message):
    with refused(f"npu_rotary_position_embedding: {message}"):
        rotary(torch.ones(x), torch.ones(cos), torch.ones(sin), mode)


def test_tables_of_different_types_are_refused():
    message = "cos is torch.float32 and sin is torch.float16, but they must have one floating-point type"
    with refused(f"npu_rotary_position_embedding: {message}"):
        rotary(torch.ones(2, 4), torch.ones(2, 4), torch.ones(2, 4).half())
