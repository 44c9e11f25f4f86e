import math

import pytest
import torch

from mindspeed.ops import ffn, npu_ffn
from tests.ops.operator_checks import TOLERANCE, randn, refused, strided

ACTIVATIONS = {
    "gelu": lambda x: x / 2 * (1 + torch.erf(x / math.sqrt(2))),
    "fastgelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": lambda x: x * (x > 0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}
GATED = {"geglu": "gelu", "swiglu": "silu", "reglu": "relu"}


def act(x, name):
    if name not in GATED:
        return ACTIVATIONS[name](x)
    half = x.shape[-1] // 2
    return ACTIVATIONS[GATED[name]](x[..., :half]) * x[..., half:]


def formula(x, w1, w2, b1, b2, name):
    return act(x @ w1 + b1, name) @ w2 + b2


def tensors(*leading, name="gelu", dtype=torch.float64, make=randn):
    inner = 6 if name in GATED else 3
    shapes = (*leading, 4, inner), (*leading, 3, 5), (*leading, inner), (*leading, 5)
    return [make(*shape, dtype=dtype, seed=n + 2, grad=False) for n, shape in enumerate(shapes)]


@pytest.mark.parametrize("name", [*ACTIVATIONS, *GATED])
@pytest.mark.parametrize("shape", [(7, 4), (2, 3, 4), (4,), (0, 4)])
def test_it_computes_the_formula(name, shape):
    x, (w1, w2, b1, b2) = randn(*shape, grad=False), tensors(name=name)
    torch.testing.assert_close(ffn(x, w1, w2, name.upper(), bias1=b1, bias2=b2), formula(x, w1, w2, b1, b2, name))
    torch.testing.assert_close(ffn(x, w1, w2, name), formula(x, w1, w2, 0, 0, name))


@pytest.mark.parametrize("sizes", [[2, 0, 5], [0, 0, 7], [7, 0, 0]])
@pytest.mark.parametrize("name", ["silu", "swiglu"])
def test_every_expert_has_its_own_tokens(sizes, name):
    x, (w1, w2, b1, b2) = randn(7, 4, grad=False), tensors(3, name=name)
    expected = torch.cat([formula(r, w1[e], w2[e], b1[e], b2[e], name) for e, r in enumerate(x.split(sizes))])
    ends = torch.tensor(sizes).cumsum(0).tolist()
    torch.testing.assert_close(ffn(x, w1, w2, name, expert_tokens=sizes, bias1=b1, bias2=b2), expected)
    torch.testing.assert_close(ffn(x, w1, w2, name, expert_tokens_index=ends, bias1=b1, bias2=b2), expected)


def test_strided_tensors_give_the_same():
    x, (w1, w2, b1, b2) = strided(2, 3, 4, grad=False), tensors(make=strided)
    torch.testing.assert_close(ffn(x, w1, w2, "relu", bias1=b1, bias2=b2), formula(x, w1, w2, b1, b2, "relu"))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values_are_rounded_once(dtype):
    x, (w1, w2, b1, b2) = randn(64, 4, dtype=dtype, grad=False), tensors(dtype=dtype)
    y = ffn(x, w1, w2, "gelu", bias1=b1, bias2=b2)
    exact = formula(*(t.double() for t in (x, w1, w2, b1, b2)), "gelu")
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert dtype == torch.float32 or (y == exact.to(dtype)).float().mean() > 0.995


def integers(*shape, seed):
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


@pytest.mark.parametrize("experts", [None, [2, 0, 3]])
def test_int8_tokens_and_weights(experts):
    lead = () if experts is None else (3,)
    x, w1, w2 = integers(5, 4, seed=1), integers(*lead, 4, 3, seed=2), integers(*lead, 3, 6, seed=3)
    b1, b2 = (integers(*lead, n, seed=n).int() for n in (3, 6))
    deq1, deq2 = (randn(*lead, n, seed=n, dtype=torch.float32, grad=False).abs() / 8 for n in (3, 6))
    scale, offset = torch.tensor([4.0]), torch.tensor([1.0])
    y = ffn(
        x,
        w1,
        w2,
        "relu",
        bias1=b1,
        bias2=b2,
        scale=scale,
        offset=offset,
        deq_scale1=deq1,
        deq_scale2=deq2,
        expert_tokens=experts,
    )

    def one(x, w1, w2, b1, b2, deq1, deq2):
        hidden = torch.relu((x.int() @ w1.int() + b1) * deq1) * 4 + 1
        return (hidden.round().clamp(-128, 127).int() @ w2.int() + b2) * deq2

    if experts is None:
        expected = one(x, w1, w2, b1, b2, deq1, deq2)
    else:
        expected = torch.cat([one(r, w1[e], w2[e], b1[e], b2[e], deq1[e], deq2[e]) for e, r in enumerate(x.split(experts))])
    assert y.dtype == torch.float16
    assert torch.equal(y, expected.half())


@pytest.mark.parametrize("groups", [None, 2])
def test_int8_weights_alone_are_widened_by_channel_or_by_group(groups):
    x, w1, w2 = randn(5, 4, grad=False).bfloat16(), integers(4, 6, seed=2), integers(6, 3, seed=3)
    shapes = ((6,), (3,)) if groups is None else ((groups, 6), (groups, 3))
    s1, s2 = (randn(*s, seed=5, grad=False).bfloat16() for s in shapes)
    o1, o2 = (randn(*s, seed=6, grad=False).bfloat16() for s in shapes)

    def widened(w, s, o):
        if groups is not None:
            s, o = (t.double().repeat_interleave(w.shape[0] // groups, 0) for t in (s, o))
        return (w.double() + o) * s

    given = {"antiquant_scale1": s1, "antiquant_scale2": s2, "antiquant_offset1": o1, "antiquant_offset2": o2}
    y = ffn(x, w1, w2, "silu", **given)
    expected = formula(x.double(), widened(w1, s1, o1), widened(w2, s2, o2), 0, 0, "silu")
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-2)


def test_backward_through_it_says_that_it_has_none():
    x, (w1, w2, *_) = randn(7, 4), tensors()
    with refused("ffn: the operator has no gradient; call it on tensors that need none, or under torch.no_grad()"):
        ffn(x, w1, w2, "gelu").sum().backward()


def test_the_name_of_mindspeed_is_the_same_function():
    assert npu_ffn is ffn


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "tanh"}, "activation is tanh, but must be one of gelu, fastgelu, relu, silu, geglu, swiglu, reglu"),
        (
            {"expert_tokens": [7], "expert_tokens_index": [7]},
            "expert_tokens and expert_tokens_index are both given, but only one is allowed",
        ),
        (
            {"x": torch.ones(7, 3)},
            (
                "x, weight1 and weight2 have shapes (7, 3), (4, 6) and (6, 5), but the weights must have 2 dimensions and "
                "the columns of x must match weight1"
            ),
        ),
        (
            {"activation": "swiglu"},
            "x, weight1 and weight2 have shapes (7, 4), (4, 6) and (6, 5), but swiglu gives 3 columns to weight2",
        ),
        ({"bias1": torch.ones(5)}, "bias1 must have shape (6,)"),
        (
            {"x": torch.ones(7, 4).half()},
            (
                "x, weight1 and weight2 are torch.float16, torch.float32 and torch.float32, but they must have one "
                "floating-point type"
            ),
        ),
        (
            {"weight1": torch.ones(4, 6).char(), "weight2": torch.ones(6, 5).char()},
            (
                "x, weight1 and weight2 are torch.float32, torch.int8 and torch.int8, but int8 weights need antiquant_scale1 "
                "and antiquant_scale2"
            ),
        ),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    given = {"x": torch.ones(7, 4), "weight1": torch.ones(4, 6), "weight2": torch.ones(6, 5), "activation": "gelu", **change}
    with refused(f"ffn: {message}"):
        ffn(**given)


def test_tokens_that_no_expert_has_are_refused():
    weights = torch.ones(2, 4, 6), torch.ones(2, 6, 5)
    with refused("ffn: the groups end at [3, 6], but must be ascending up to the 7 rows"):
        ffn(torch.ones(7, 4), *weights, "gelu", expert_tokens=[3, 3])
    with refused("ffn: 1 experts have tokens, but the weights have 2 and 2 experts"):
        ffn(torch.ones(7, 4), *weights, "gelu", expert_tokens=[7])
