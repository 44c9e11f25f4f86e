import pytest
import torch
import torch.nn.functional as F

from mindspeed.ops import npu_dropout_add_layer_norm, npu_dropout_add_rms_norm
from tests.ops.operator_checks import TOLERANCE, assert_close_to_fp64, randn, refused, strided

NORMS = {"layer": npu_dropout_add_layer_norm, "rms": npu_dropout_add_rms_norm}


def formula(norm, x0, residual, weight, bias=None, rowscale=None, layerscale=None, mask=None, p=0.0, eps=1e-5):
    z = x0 if rowscale is None else x0 * rowscale.unsqueeze(-1)
    z = z if layerscale is None else z * layerscale
    z = z if mask is None else torch.where(mask.bool(), z / (1 - p), 0)
    z = z if residual is None else z + residual
    if norm == "layer":
        return F.layer_norm(z, z.shape[-1:], weight, bias, eps), z
    return z * (z.pow(2).sum(-1, keepdim=True) / z.shape[-1] + eps).pow(-0.5) * weight, z


def inputs(norm, *shape, dtype=torch.float64, make=randn):
    h = shape[-1]
    x0, residual = make(*shape, dtype=dtype), make(*shape, dtype=dtype, seed=2)
    weight, bias = randn(h, dtype=dtype, seed=3), randn(h, dtype=dtype, seed=4) if norm == "layer" else None
    return x0, residual, weight, bias, randn(*shape[:-1], dtype=dtype, seed=5), randn(h, dtype=dtype, seed=6)


def fused(norm, **options):
    def call(x0, residual, weight, bias, rowscale, layerscale):
        return NORMS[norm](x0, residual, weight, bias, 0.0, 1e-5, rowscale, layerscale, prenorm=True, **options)

    return call


@pytest.mark.parametrize("shape", [(3, 2, 7), (5, 8), (4,), (0, 2, 4), (2, 0, 4), (1, 1, 1)])
@pytest.mark.parametrize("norm", NORMS)
def test_it_computes_the_formula_and_its_gradients(norm, shape):
    tensors = inputs(norm, *shape)
    for value, expected in zip(fused(norm)(*tensors), formula(norm, *tensors), strict=True):
        torch.testing.assert_close(value, expected)
    assert torch.autograd.gradcheck(fused(norm), tensors)


@pytest.mark.parametrize("norm", NORMS)
def test_strided_input_gives_the_same(norm):
    tensors = inputs(norm, 3, 2, 6, make=strided)
    torch.testing.assert_close(fused(norm)(*tensors), formula(norm, *tensors))
    assert torch.autograd.gradcheck(fused(norm), tensors)


@pytest.mark.parametrize("norm", NORMS)
def test_a_plain_call_gives_the_norm_alone(norm):
    x0, _, weight, *_ = inputs(norm, 4, 3, 6)
    torch.testing.assert_close(NORMS[norm](x0, None, weight, None, 0.0, 1e-5), formula(norm, x0, None, weight)[0])
    assert torch.autograd.gradcheck(lambda x0, w: NORMS[norm](x0, None, w, None, 0.0, 1e-5), (x0, weight))


@pytest.mark.parametrize("norm", NORMS)
def test_dropout_drops_by_its_mask_and_scales_what_it_keeps(norm):
    tensors = inputs(norm, 3, 4, 5)

    def drop(*t):
        torch.manual_seed(3)
        return NORMS[norm](*t[:4], 0.4, 1e-5, *t[4:], prenorm=True, return_dropout_mask=True)

    out, z, mask = drop(*tensors)
    assert mask.dtype == torch.uint8
    assert mask.unique().tolist() == [0, 1]
    expected = formula(norm, *tensors, mask=mask, p=0.4)
    torch.testing.assert_close((out, z), expected)
    assert torch.autograd.gradcheck(lambda *t: drop(*t)[:2], tensors)


def test_the_share_of_kept_elements_is_one_minus_p():
    x0, weight = torch.ones(64, 64, 32), torch.ones(32)
    _, z, mask = npu_dropout_add_layer_norm(x0, None, weight, None, 0.3, 1e-5, prenorm=True, return_dropout_mask=True)
    assert abs(mask.float().mean().item() - 0.7) < 0.01
    assert abs(z.mean().item() - 1.0) < 0.01


def test_dropout_of_everything_leaves_the_residual_and_no_nan():
    x0, residual, weight, bias, *_ = inputs("layer", 2, 3, 4)
    out, z = npu_dropout_add_layer_norm(x0, residual, weight, bias, 1.0, 1e-5, prenorm=True)
    assert torch.equal(z, residual)
    out.sum().backward()
    assert torch.equal(x0.grad, torch.zeros_like(x0))


def test_without_dropout_the_mask_is_ones():
    x0, weight = torch.ones(2, 3, 4), torch.ones(4)
    _, mask = npu_dropout_add_rms_norm(x0, None, weight, None, 0.0, 1e-5, return_dropout_mask=True)
    assert torch.equal(mask, torch.ones(2, 3, 4, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norm", NORMS)
def test_values_and_gradients_are_close_to_the_fp64_formula(norm, dtype):
    assert_close_to_fp64(
        fused(norm),
        lambda *t: formula(norm, *t),
        inputs(norm, 16, 4, 96, dtype=dtype),
        2e-2 if dtype != torch.float32 else None,
    )


def test_a_long_row_keeps_its_precision():
    x0 = torch.full((1, 1, 1 << 18), 3.0) + torch.randn(1 << 18, generator=torch.Generator().manual_seed(1))
    out = npu_dropout_add_layer_norm(x0, None, torch.ones(1 << 18), None, 0.0, 1e-5)
    torch.testing.assert_close(out.double(), F.layer_norm(x0.double(), (1 << 18,)), rtol=1e-5, atol=1e-5)


def test_the_sum_has_the_type_of_the_residual_and_is_not_rounded_before_the_norm():
    x0, residual, weight, *_ = (None if t is None else t.detach() for t in inputs("rms", 32, 4, 64, dtype=torch.bfloat16))
    out, z = npu_dropout_add_rms_norm(x0, residual.float(), weight, None, 0.0, 1e-5, prenorm=True)
    assert (out.dtype, z.dtype) == (torch.bfloat16, torch.float32)
    exact, _ = formula("rms", x0.double(), residual.double(), weight.double())
    out, z = npu_dropout_add_rms_norm(x0, residual, weight, None, 0.0, 1e-5, prenorm=True)
    assert z.dtype == torch.bfloat16
    assert (out == exact.to(torch.bfloat16)).float().mean() > 0.999
    _, z = npu_dropout_add_rms_norm(x0, None, weight, None, 0.0, 1e-5, prenorm=True, residual_in_fp32=True)
    assert z.dtype == torch.float32


def test_backward_keeps_the_sum_and_not_the_input():
    x0, residual, weight, bias, *_ = inputs("layer", 4, 8, 32, dtype=torch.bfloat16)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        npu_dropout_add_layer_norm(x0, residual, weight, bias, 0.1, 1e-5)
    assert sorted((tuple(t.shape), str(t.dtype)) for t in saved) == [
        ((4, 8, 1), "torch.float32"),
        ((4, 8, 1), "torch.float32"),
        ((4, 8, 32), "torch.bfloat16"),
        ((4, 8, 32), "torch.uint8"),
        ((32,), "torch.bfloat16"),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"residual": torch.ones(2, 4)}, "residual must have a floating-point type and shape (2, 3, 4), to match x0"),
        ({"weight": torch.ones(3)}, "weight must have a floating-point type and shape (4,), to match x0"),
        ({"rowscale": torch.ones(2)}, "rowscale must have a floating-point type and shape (2, 3), to match x0"),
        ({"layerscale": torch.ones(4).int()}, "layerscale must have a floating-point type and shape (4,), to match x0"),
        ({"x0": torch.ones(2, 3, 4).int()}, "x0 is torch.int32 of shape (2, 3, 4), but must be a floating-point matrix"),
        ({"dropout_p": 1.5}, "dropout_p is 1.5, but must be between 0 and 1"),
        (
            {"x0": torch.ones(2, 3, 4).bfloat16(), "weight": torch.ones(4).half()},
            "x0 is torch.bfloat16 and weight is torch.float16, but two different 16-bit types are not supported",
        ),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    arguments = {"x0": torch.ones(2, 3, 4), "residual": None, "weight": torch.ones(4), "bias": None}
    with refused(f"npu_dropout_add_layer_norm: {message}"):
        npu_dropout_add_layer_norm(**{**arguments, "dropout_p": 0.0, "epsilon": 1e-5, **change})


def test_rms_norm_refuses_a_bias():
    with refused("npu_dropout_add_rms_norm: a bias is given, but RMSNorm has no bias"):
        npu_dropout_add_rms_norm(torch.ones(2, 4), None, torch.ones(4), torch.ones(4), 0.0, 1e-5)
