"""What holds for every operator: it is the same compiled, recomputed and in inference mode, and registered as PyTorch asks."""

from importlib import import_module

import pytest
import torch

import mindspeed.ops
from mindspeed.ops import ffn, npu_gmm, quant_gmm
from tests.ops.operator_checks import (
    assert_holds_everywhere,
    assert_same_in_inference_mode,
    assert_same_when_compiled,
    randn,
    strided,
)

FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = (FP32, BF16, torch.float16)
ENDS, SIZES, SLOTS = torch.tensor([2, 2, 6]), torch.tensor([2, 3]), torch.randperm(12)
EXPERTS = torch.tensor([[0, 1], [2, 1], [3, 0], [1, 2], [0, 3], [2, 0]])


def made(*shapes, dtype=BF16, grad=True, make=randn):
    """Tensors of these shapes."""
    return [make(*shape, dtype=dtype, seed=n + 1, grad=grad) for n, shape in enumerate(shapes)]


def integers(*shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def named(name):
    return lambda *tensors, **more: getattr(mindspeed.ops, name)(*tensors, **more)


def norm_of_a_sum(name):
    return lambda x, residual, weight, rows, scale: named(name)(x, residual, weight, None, 0.0, 1e-5, rows, scale, prenorm=True)


def there_and_back(tokens, probs):
    rows, slots = named("npu_fused_moe_token_permute")(tokens, EXPERTS, 10)
    return named("npu_fused_moe_token_unpermute")(rows, slots, probs)


def grouped(x, w, b):
    return npu_gmm(x, w, bias=b, group_list=ENDS)


def turned(x, cos, sin):
    return named("npu_rotary_position_embedding")(x, cos, sin, 1)


NORM = (3, 2, 8), (3, 2, 8), (8,), (3, 2), (8,)
HEADS, TABLES = made((4, 2, 3, 8)), made((4, 1, 1, 8), (4, 1, 1, 8))
DIFFERENTIABLE = {
    "grouped product": (grouped, made((6, 4), (3, 4, 5), (3, 5))),
    "tokens there and back": (there_and_back, [*made((6, 4)), randn(6, 2, dtype=FP32)]),
    "rotary": (turned, HEADS + TABLES),
    "rotary with fixed tables": (turned, HEADS + [table.detach() for table in TABLES]),
    **{name: (norm_of_a_sum(name), made(*NORM)) for name in ("npu_dropout_add_layer_norm", "npu_dropout_add_rms_norm")},
    **{f"swiglu {dtype}": (named("swiglu"), made((4, 6), dtype=dtype)) for dtype in DTYPES},
    **{f"rms_norm {dtype}": (named("rms_norm"), made((4, 6), (6,), dtype=dtype)) for dtype in DTYPES},
    **{f"sum {dtype}": (named("rms_norm_residual"), made((4, 6), (4, 6), (6,), dtype=dtype)) for dtype in DTYPES},
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_it_is_the_same_compiled_recomputed_and_in_inference_mode(name):
    function, tensors = DIFFERENTIABLE[name]
    assert_holds_everywhere(function, *tensors)


def experts(x, w1, w2, b1, b2):
    return ffn(x, w1, w2, "gelu", expert_tokens=[3, 0, 4], bias1=b1, bias2=b2)


def quantized(x, w, scale):
    return quant_gmm(x, w, scale, group_list=torch.tensor([3, 3, 9]), act_type=5)


SIDE = made((5, 2, 12), (2, 3, 5, 8), (2, 3, 5, 8), dtype=FP32, grad=False)
PACKED = made((10, 3, 4), (10, 3, 8), (10, 3, 8), dtype=FP32, grad=False)
QUANTIZED = integers(9, 17), integers(3, 17, 4), randn(3, 4, dtype=FP32, grad=False).abs()
WEIGHTS = (3, 4, 3), (3, 3, 5), (3, 3), (3, 5)
WITHOUT_GRADIENT = {
    "npu_ring_attention_update": (named("npu_ring_attention_update"), [*SIDE, *SIDE]),
    "quant_gmm": (quantized, QUANTIZED),
    "ffn": (experts, made((7, 4), *WEIGHTS, dtype=torch.float64, grad=False)),
}


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_what_has_no_gradient_is_the_same_compiled_and_in_inference_mode(name):
    function, tensors = WITHOUT_GRADIENT[name]
    assert_same_when_compiled(function, *tensors)
    assert_same_in_inference_mode(function, *tensors)


def arguments():
    """Arguments of every registered function, by its name: with and without what may be absent, and with other strides."""
    layer, permute, unpermute = "npu_dropout_add_layer_norm", "npu_fused_moe_token_permute", "npu_fused_moe_token_unpermute"
    rotary, ring, add = "npu_rotary_position_embedding", "npu_ring_attention_update", "matmul_add_fp32"
    x, residual, weight, rows, scale = made((3, 2, 4), (3, 2, 4), (4,), (3, 2), (4,), dtype=FP32)
    known = [t.detach() for t in (x, x, x, weight)], torch.ones(3, 2, 1), torch.ones(3, 2, 4, dtype=torch.uint8)
    yield layer, (x, residual, weight, scale, rows, scale, known[2], 0.5, 1e-5, FP32, False)
    yield layer, (x, None, weight, None, None, None, None, 0.0, 1e-5, BF16, True)
    yield f"{layer}_backward", (*known[0], known[1], known[1], known[0][0], rows.detach(), scale.detach(), known[2], 0.5, False)
    yield f"{layer}_backward", (*known[0], known[1], known[1], None, None, None, None, 0.0, True)
    for make in (randn, strided):
        x, gamma, rstd = *made((3, 4, 8), (8,), dtype=FP32, make=make), torch.ones(3, 4, 1)
        y, g = x.detach(), gamma.detach()
        yield "rms_norm", (x, gamma, 1e-6)
        yield "rms_norm_backward", (y, y, g, rstd)
        yield "rms_norm_residual", (x, x, gamma, 1e-6)
        yield "rms_norm_residual_backward", (y, y, y, g, rstd)
        yield "swiglu", (x, -1)
        yield "swiglu_backward", (make(3, 2, 8, dtype=FP32, grad=False), y, 1)
        heads, cos, sin = made((2, 3, 5, 8), (1, 1, 5, 8), (1, 1, 5, 8), dtype=FP32, make=make)
        yield rotary, (heads, cos, sin, 1)
        yield f"{rotary}_backward", (heads.detach(), cos.detach(), sin.detach(), 0)
        yield f"{rotary}_tables_backward", (heads.detach(), heads.detach(), cos.detach(), 0)
    yield ring, (*SIDE, *SIDE, None, "SBH", False)
    yield ring, (*PACKED, *PACKED, torch.tensor([5, 10]), "TND", True)
    tokens, probs, sent = *made((6, 3), (6, 2), dtype=FP32), randn(12, 3, dtype=FP32)
    slots, dout = SLOTS.int(), torch.ones(6, 3)
    yield permute, (tokens, EXPERTS, 8, False)
    yield permute, (tokens, EXPERTS, 12, True)
    yield unpermute, (sent, slots, probs, 6, 2, False)
    yield unpermute, (sent, slots % 6, probs, 6, 1, True)
    yield f"{unpermute}_backward", (dout, sent.detach(), slots, probs.detach(), 12, 2, False)
    yield f"{unpermute}_backward", (dout, None, slots % 6, None, 12, 1, True)
    for dtype in (FP32, BF16):
        x, w, b, dy = made((5, 3), (2, 3, 4), (2, 4), (5, 4), dtype=dtype)
        yield "npu_gmm", (x, w, b, SIZES, False)
        yield "npu_gmm", (x, w, None, SIZES.cumsum(0), True)
        yield "npu_gmm_separate", (x, list(w.detach().unbind()), SIZES, False)
        yield "npu_gmm_sum", (x, dy, SIZES, False)
        yield "npu_gmm_bias", (x.detach(), SIZES, False)
    x, dy = made((3, 2), (3, 4), grad=False)
    yield f"npu_{add}", (x, dy, torch.zeros(4, 2))
    yield f"npu_group{add}", (x, dy, torch.tensor([1, 3]), torch.zeros(2, 2, 4))
    yield "quant_gmm", (*QUANTIZED, torch.ones(9), None, torch.tensor([3, 3, 9]), BF16, 5, True)
    weights = made((7, 4), *WEIGHTS, dtype=torch.float64, grad=False)
    yield "ffn", (*weights, *[None] * 8, "gelu", [3, 0, 4], False, torch.float64)


@pytest.mark.parametrize(("name", "given"), arguments())
def test_it_is_registered_as_pytorch_wants_it(name, given):
    for operator in mindspeed.ops.OPERATORS:
        import_module(f"mindspeed.ops.{operator}")
    more = {"rtol": 1e-2, "atol": 1e-2} if given[0].dtype == BF16 else {}
    torch.library.opcheck(getattr(torch.ops.mindspeed, name).default, given, **more)
