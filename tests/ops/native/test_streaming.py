"""Operators that stream their tensors once: the C++ kernels beside their plain-torch references."""

import pytest
import torch

from mindspeed.ops.registration import operators
from tests.ops.native.kernels import TYPES, ULP, assert_like_reference, needs_library, normal, shuffled

pytestmark = needs_library


LAYER_NORM = "npu_dropout_add_layer_norm"


def layer_norm_arguments(shape, dtype, sum_type, rms, full, make):
    """Arguments of the forward: with everything that may be absent, or with nothing of it."""
    width, rows = shape[-1:], shape[:-1]
    mask = (normal(*shape, seed=9) > -0.5).to(torch.uint8)
    x0, weight = make(*shape, dtype=dtype), normal(*width, dtype=dtype, seed=2)
    residual, rowscale = make(*shape, dtype=sum_type, seed=3), normal(*rows, dtype=dtype, seed=4)
    bias, layerscale = normal(*width, dtype=dtype, seed=5), normal(*width, dtype=dtype, seed=6)
    optional = (residual, weight, None if rms else bias, rowscale, layerscale, mask) if full else (None, weight, *[None] * 4)
    return (x0, *optional, 0.3 if full else 0.0, 1e-5, sum_type, rms)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("shape", [(4, 3, 64), (2, 37, 7), (5, 8), (300, 100), (0, 8), (3, 20001)])
def test_dropout_add_norms_give_what_the_reference_gives(shape, full, rms, dtype):
    for make in (normal, shuffled):
        for sum_type in {dtype, torch.float32}:
            args = layer_norm_arguments(shape, dtype, sum_type, rms, full, make)
            assert_like_reference(LAYER_NORM, f"{LAYER_NORM}:_forward", *args, ulps=4)
            z, weight, rowscale, layerscale, mask = normal(*shape, dtype=sum_type, seed=11), args[2], *args[4:7]
            mean, rstd = (0 if rms else 1) * normal(*shape[:-1], 1, seed=12), normal(*shape[:-1], 1, seed=13).abs()
            dz = make(*shape, dtype=sum_type, seed=14) if full else torch.zeros((), dtype=sum_type).expand(shape)
            rest = (None, rowscale, layerscale, mask, args[7], rms)
            dout = make(*shape, dtype=dtype, seed=15)
            assert_like_reference(
                f"{LAYER_NORM}_backward", f"{LAYER_NORM}:_backward", dout, dz, z, weight, mean, rstd, *rest, ulps=4
            )


RING = "npu_ring_attention_update"


def sides(s, b, n, d, lanes, dtype):
    """Two results in SBH; the first token was seen by neither side, the second and third by one."""
    results = []
    for seed, hidden in ((1, slice(0, 2)), (2, slice(0, 3, 2))):
        maximum, total = 3 * normal(b, n, s, 1, seed=seed + 10), normal(b, n, s, 1, seed=seed + 20).abs()
        maximum[:, :, hidden], total[:, :, hidden] = -torch.inf, 0
        stats = (stat.repeat(1, 1, 1, lanes) for stat in (maximum, total))
        results += [normal(s, b, n * d, dtype=dtype, seed=seed), *stats]
    return results


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(5, 2, 3, 4, 8), (70, 1, 4, 64, 8), (33, 3, 2, 20, 1)])
def test_merged_results_are_those_of_the_reference(shape, dtype):
    results = sides(*shape, dtype)
    assert_like_reference(RING, f"{RING}:_forward", *results, None, "SBH", False)
    s, b, n, d, lanes = shape
    tokens = s * b
    packed = [t.reshape(tokens, n, d) if t.dim() == 3 else t.transpose(1, 2).reshape(tokens, n, lanes) for t in results]
    for ends in (None, torch.tensor([2, 2, tokens]), torch.tensor([0, tokens])):
        assert_like_reference(RING, f"{RING}:_forward", *packed, ends, "TND", False)


def test_merging_statistics_in_fp64_runs_the_reference():
    results = [t.double() for t in sides(5, 2, 3, 4, 8, torch.float32)]
    assert_like_reference(RING, f"{RING}:_forward", *results, None, "SBH", False, ulps=0)


ROTARY = "npu_rotary_position_embedding"
BROADCASTS = [
    ((2, 3, 5, 64), (1, 1, 5, 64)),
    ((2, 3, 5, 64), (2, 1, 5, 64)),
    ((2, 5, 3, 96), (1, 5, 1, 96)),
    ((5, 2, 3, 6), (5, 1, 1, 6)),
    ((5, 2, 3, 128), (5, 2, 3, 128)),
    ((4, 2, 3, 34), (1, 1, 1, 34)),
    ((10,), (10,)),
    ((0, 2, 3, 8), (1, 1, 3, 8)),
]


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("wide_tables", [False, True])
@pytest.mark.parametrize(("shape", "table"), BROADCASTS)
def test_turned_heads_have_the_bits_of_the_reference(shape, table, wide_tables, dtype, mode):
    table_type = torch.float32 if wide_tables else dtype
    cos, sin = normal(*table, dtype=table_type, seed=2), normal(*table, dtype=table_type, seed=3)
    for make in (normal, shuffled):
        x = make(*shape, dtype=dtype)
        assert_like_reference(ROTARY, f"{ROTARY}:_forward", x, cos, sin, mode, ulps=0)
        assert_like_reference(f"{ROTARY}_backward", f"{ROTARY}:_backward", x, cos, sin, mode, ulps=0)


NORMS = [
    ((512, 128), (128,)),
    ((7, 33), (33,)),
    ((3, 5, 2, 6), (2, 6)),
    ((1, 70001), (70001,)),
    ((130, 1), (1,)),
    ((5,), (5,)),
]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("shape", "norm"), [*NORMS, ((0, 8), (8,)), ((3, 0), (0,))])
@pytest.mark.parametrize("make", [normal, shuffled])
def test_norms_give_what_the_reference_gives(shape, norm, dtype, make):
    x, residual, dy, dsum = (make(*shape, dtype=dtype, seed=seed) for seed in (1, 2, 3, 4))
    gamma = normal(*norm, dtype=dtype, seed=5)
    rstd = normal(*shape[: len(shape) - len(norm)], *(1 for _ in norm), seed=6).abs()
    assert_like_reference("rms_norm", "rms_norm:_forward", x, gamma, 1e-6)
    assert_like_reference("rms_norm_residual", "rms_norm:_residual_forward", x, residual, gamma, 1e-6)
    assert_like_reference("rms_norm_backward", "rms_norm:_backward", dy, x, gamma, rstd, ulps=4)
    args = (dy, dsum, x, gamma, rstd)
    assert_like_reference("rms_norm_residual_backward", "rms_norm:_residual_backward", *args, ulps=4)


def test_the_gradient_of_gamma_does_not_depend_on_the_number_of_threads():
    x, dy, gamma, rstd = normal(300, 500), normal(300, 500, seed=2), normal(500, seed=3), torch.ones(300, 1)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(torch.ops.mindspeed.rms_norm_backward(dy, x, gamma, rstd)[1])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_results_past_the_caches_are_the_same():
    rows, width = 1100, 8192  # 34 MiB in fp32
    x, gamma = normal(rows, width), normal(width, seed=2)
    y, rstd = torch.ops.mindspeed.rms_norm(x, gamma, 1e-6)
    half, _ = torch.ops.mindspeed.rms_norm(x[: rows // 2], gamma, 1e-6)
    assert torch.equal(y[: rows // 2], half)
    dx, _ = torch.ops.mindspeed.rms_norm_backward(x, x, gamma, rstd)
    assert torch.equal(dx[:512], torch.ops.mindspeed.rms_norm_backward(x[:512], x[:512], gamma, rstd[:512])[0])


def test_a_norm_in_fp64_runs_the_reference():
    x, gamma = normal(3, 8).double(), normal(8).double()
    assert_like_reference("rms_norm", "rms_norm:_forward", x, gamma, 1e-6, ulps=0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("make", [normal, shuffled])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((5, 64), -1), ((3, 34, 7), 1), ((6, 4, 1), 0), ((2, 3, 778), 2), ((1, 20002), -1), ((0, 8), 1), ((3, 0), 1), ((2,), 0)],
)
def test_gated_halves_are_those_of_the_reference(shape, dim, dtype, make):
    x = 4 * make(*shape, dtype=dtype)
    half = [size // 2 if d == dim % len(shape) else size for d, size in enumerate(shape)]
    assert_like_reference("swiglu", "swiglu:_forward", x, dim)
    assert_like_reference("swiglu_backward", "swiglu:_backward", make(*half, dtype=dtype, seed=2), x, dim, ulps=4)


def test_extreme_gates_stay_finite():
    gates = torch.tensor([-200.0, -100.0, -88.0, -87.0, -50.0, 0.0, 50.0, 100.0, 3e38])
    x = torch.stack((gates, torch.ones_like(gates)), -1)
    assert_like_reference("swiglu", "swiglu:_forward", x, -1)
    assert torch.ops.mindspeed.swiglu(x, -1).isfinite().all()
    torch.testing.assert_close(
        torch.ops.mindspeed.swiglu(x[:8], -1)[:, 0], gates[:8] * gates[:8].sigmoid(), rtol=1e-6, atol=1e-35
    )


def test_the_sigmoid_of_a_bf16_gate_has_a_relative_error_of_at_most_two_to_the_minus_12():
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    gates = every[every.abs() < 80]
    exact = gates.double() * gates.double().sigmoid()
    y = torch.ops.mindspeed.swiglu(torch.cat((gates, torch.ones_like(gates))), 0).double()
    normal_ones = exact.abs() > 2.0**-126
    relative = ((y - exact) / exact)[normal_ones].abs().max().item()
    assert relative <= 2.0**-8 + 2.0**-12  # that of the rounding to bf16, and that of the sigmoid
    assert y[~normal_ones].abs().max().item() <= 2.0**-125


def test_a_bf16_gate_that_is_not_finite_gives_what_the_formula_gives():
    gates = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38, -3e38], dtype=torch.bfloat16)
    y = torch.ops.mindspeed.swiglu(torch.cat((gates, torch.ones_like(gates))), 0)
    torch.testing.assert_close(y, gates * gates.sigmoid(), equal_nan=True, rtol=0, atol=0)


LOGITS = "logit_statistics"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("with_total", "with_expected"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("shape", [(1, 1), (3, 15), (7, 100), (2, 4096), (5, 20001), (0, 8)])
def test_statistics_of_logits_and_their_gradients_are_those_of_the_reference(shape, with_total, with_expected, dtype):
    options = with_total, with_expected
    rows = torch.randint(-1, shape[1], shape[:1], generator=torch.Generator().manual_seed(2))
    for make in (normal, shuffled):
        logits = (3 * make(*shape, dtype=dtype)).to(dtype)
        assert_like_reference(LOGITS, f"{LOGITS}:_statistics", logits, rows, *options, ulps=64)
        largest, sums = torch.ops.mindspeed.logit_statistics(logits, rows, *options)
        arguments = largest, sums[0].log(), normal(4, shape[0], seed=4), rows
        found, wanted = logits.clone(), logits.clone()
        torch.ops.mindspeed.logit_gradient(found, *arguments, *options)
        operators()["logit_gradient"](wanted, *arguments, *options)
        torch.testing.assert_close(found, wanted, rtol=2 * ULP[dtype], atol=2e-6)
