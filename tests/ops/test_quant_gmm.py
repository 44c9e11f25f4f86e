import pytest
import torch
import torch.nn.functional as F

from mindspeed.ops import npu_quant_gmm, npu_quant_gmm_v2, quant_gmm
from tests.ops.operator_checks import randn, refused

ACTIVATIONS = {
    0: lambda y: y,
    1: F.relu,
    2: lambda y: F.gelu(y, approximate="tanh"),
    4: lambda y: y / (1 + torch.exp(-1.702 * y)),
    5: F.silu,
}
SIZES = [3, 0, 6]


def integers(*shape, seed=1, dtype=torch.int8, limit=128):
    return torch.randint(-limit, limit, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def tensors(m=9, k=17, n=4):
    return integers(m, k), integers(3, k, n, seed=2), randn(3, n, dtype=torch.float32, grad=False).abs() / 1024


def formula(x, w, scale, per_token=None, bias=None, act_type=0, sizes=SIZES):
    """In int64 and fp64, expert by expert."""
    rows = []
    start = 0
    for e, size in enumerate(sizes):
        y = x[start : start + size].long() @ w[e].long() + (0 if bias is None else bias[e])
        y = y.double() * scale[e].double()
        y = y if per_token is None else y * per_token[start : start + size, None].double()
        rows.append(ACTIVATIONS[act_type](y))
        start += size
    return torch.cat(rows)


@pytest.mark.parametrize("act_type", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_computes_the_formula(act_type, dtype):
    x, w, scale = tensors()
    bias, per_token = integers(3, 4, seed=4, dtype=torch.int32, limit=1000), randn(9, dtype=torch.float32, grad=False)
    y = quant_gmm(
        x, w, scale, per_token_scale=per_token, bias=bias, group_list=[3, 3, 9], output_dtype=dtype, act_type=act_type
    )
    expected = formula(x, w, scale, per_token, bias, act_type)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, rtol=5e-3, atol=1e-3)
    assert (y == expected.to(dtype)).float().mean() > 0.9


def test_group_lists_of_sizes_and_of_ends_mean_the_same():
    x, w, scale = tensors()
    assert torch.equal(
        quant_gmm(x, w, scale, group_list=[3, 3, 9]), npu_quant_gmm_v2(x, w, scale, group_list=torch.tensor(SIZES))
    )
    assert npu_quant_gmm is quant_gmm


def test_the_result_is_bf16_unless_asked_otherwise():
    assert quant_gmm(*tensors(), group_list=[3, 3, 9]).dtype == torch.bfloat16


def test_integer_sums_are_exact_beyond_what_fp32_holds():
    k = 4099
    x, w = torch.full((1, k), 127, dtype=torch.int8), torch.full((1, k, 1), 127, dtype=torch.int8)
    bias = torch.tensor([[1 - 127 * 127 * k]], dtype=torch.int32)
    assert quant_gmm(x, w, torch.ones(1, 1), bias=bias, group_list=[1]).item() == 1


def test_an_int8_result_is_rounded_half_to_even_and_saturates():
    x, w = torch.tensor([[1], [3], [5], [100], [-100]], dtype=torch.int8), torch.ones(1, 1, 1, dtype=torch.int8)
    half = quant_gmm(x, w, torch.full((1, 1), 0.5), group_list=[5], output_dtype=torch.int8)
    assert half.flatten().tolist() == [0, 2, 2, 50, -50]
    double = quant_gmm(x, w, torch.full((1, 1), 2.0), group_list=[5], output_dtype=torch.int8)
    assert double.flatten().tolist() == [2, 6, 10, 127, -128]


def test_scales_of_every_type_mean_the_same():
    x, w, scale = tensors()
    scale = scale.bfloat16().float()
    bits = scale.view(torch.int32).long()
    assert torch.equal(quant_gmm(x, w, scale, group_list=[3, 3, 9]), quant_gmm(x, w, bits, group_list=[3, 3, 9]))
    assert torch.equal(quant_gmm(x, w, scale, group_list=[3, 3, 9]), quant_gmm(x, w, scale.bfloat16(), group_list=[3, 3, 9]))


def test_no_row_and_strided_operands_are_no_problem():
    x, w, scale = tensors()
    assert quant_gmm(x[:0], w, scale, group_list=[0, 0, 0]).shape == (0, 4)
    strided = x.t().contiguous().t(), w.transpose(1, 2).contiguous().transpose(1, 2), scale
    assert torch.equal(quant_gmm(*strided, group_list=[3, 3, 9]), quant_gmm(x, w, scale, group_list=[3, 3, 9]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(9, 17)}, "x is torch.float32 and weight is torch.int8, but both must be torch.int8"),
        ({"x": integers(9, 16)}, "x of shape (9, 16) and weight of shape (3, 17, 4) cannot be multiplied"),
        ({"group_list": [9]}, "weight has 3 matrices, but group_list has 1 groups"),
        ({"scale": torch.ones(3)}, "scale is torch.float32 of shape (3,), but must be int64, bf16 or fp32 of shape (3, 4)"),
        ({"bias": torch.ones(3, 4)}, "bias must be int32 of shape (3, 4)"),
        ({"per_token_scale": torch.ones(8)}, "per_token_scale must be fp32 of shape (9,)"),
        ({"offset": torch.ones(1)}, "offset is reserved and must be None"),
        ({"output_dtype": torch.float32}, "output_dtype is torch.float32, but must be int8, bf16 or fp16"),
        ({"act_type": 3}, "act_type is 3, but must be one of 0, 1, 2, 4, 5"),
        ({"output_dtype": torch.int8, "act_type": 1}, "an int8 result supports neither per_token_scale nor activation"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    x, weight, scale = tensors()
    with refused(f"quant_gmm: {message}"):
        quant_gmm(**{"x": x, "weight": weight, "scale": scale, "group_list": [3, 3, 9], **change})
