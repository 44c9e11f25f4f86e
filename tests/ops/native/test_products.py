"""Products of matrices: the C++ kernels beside their plain-torch references."""

import pytest
import torch

from mindspeed.ops import npu_groupmatmul_add_fp32, npu_matmul_add_fp32, quant_gmm
from mindspeed.ops.native_library import DTYPES, choose_library
from mindspeed.ops.speeds import PRODUCTS
from mindspeed.ops.speeds import cases as measured_cases
from tests.ops.native.moe_cases import ROUNDING, SHAPES, SIZES, TYPES, assert_close, laid_out, need, numbers, reference

OPS = torch.ops.mindspeed
GROUPED, SINGLE, QUANTIZED = "npu_groupmatmul_add_fp32", "npu_matmul_add_fp32", "quant_gmm"


@pytest.fixture(autouse=True)
def _library():
    need("npu_gmm", GROUPED, SINGLE, QUANTIZED)


@pytest.mark.parametrize("layout", ["plain", "transposed", "strided"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", SIZES)
def test_the_products_are_those_of_the_reference(name, dtype, layout):
    sizes, module = SIZES[name], reference("npu_gmm")
    groups = torch.tensor(sizes)
    for inner, columns in SHAPES:
        x = laid_out(numbers(sum(sizes), inner, dtype=dtype), layout)
        w = laid_out(numbers(len(sizes), inner, columns, dtype=dtype, seed=2), layout)
        bias = numbers(len(sizes), columns, dtype=dtype, seed=3)
        dy = laid_out(numbers(sum(sizes), columns, dtype=dtype, seed=4), layout)
        with torch.no_grad():
            pairs = [
                (OPS.npu_gmm(x, w, bias, groups, False), module._forward(x, w, bias, groups, False)),
                (OPS.npu_gmm(x, w, None, groups.cumsum(0), True), module._forward(x, w, None, groups, False)),
                (OPS.npu_gmm_sum(x, dy, groups, False), module._sum(x, dy, groups, False)),
                (OPS.npu_gmm_bias(dy, groups, False), module._bias_sum(dy, groups, False)),
            ]
        for ours, theirs in pairs:
            assert_close(ours, theirs, 2 * ROUNDING[dtype])


@pytest.fixture
def left_to_torch():
    """Products as on a processor where those of torch are faster."""
    chosen = [(op, *case) for op in PRODUCTS for case in measured_cases(op)]
    for case in chosen:
        choose_library(*case, True)
    yield
    for case in chosen:
        choose_library(*case, False)


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=DTYPES)
@pytest.mark.parametrize("name", SIZES)
def test_products_of_torch_are_those_of_the_reference(left_to_torch, name, dtype):
    for layout in ("plain", "transposed", "strided"):
        test_the_products_are_those_of_the_reference(name, dtype, layout)
        test_sums_of_groups_are_those_of_the_reference(name, dtype, layout)


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 77, 2500])
def test_a_sum_added_by_torch_is_that_of_the_reference(left_to_torch, tokens, dtype):
    for layout in ("plain", "transposed", "strided"):
        test_an_added_sum_is_that_of_the_reference(tokens, dtype, layout)


@pytest.mark.parametrize("small", [False, True])
def test_the_size_of_the_matrices_decides_whose_products_run(small):
    """2^24 multiplications are the most that are small; torch's products show as calls of mm."""
    for width, is_small in ((256, True), (257, False)):
        x, weight = numbers(2 * width, width), numbers(2, width, width, seed=2)
        choose_library("npu_gmm", "fp32", small, True)
        try:
            with torch.autograd.profiler.profile() as profile:
                OPS.npu_gmm(x, weight, None, torch.tensor([width, width]), False)
        finally:
            choose_library("npu_gmm", "fp32", small, False)
        assert ("aten::mm" in {event.name for event in profile.function_events}) is (small is is_small)


@pytest.mark.parametrize("dtype", TYPES)
def test_sums_longer_than_a_block_are_kept_wide(dtype):
    sizes = torch.tensor([40, 3])
    x, w = numbers(43, 2500, dtype=dtype), numbers(2, 2500, 50, dtype=dtype, seed=2)
    exact = torch.cat([a.double() @ b.double() for a, b in zip(x.split([40, 3]), w, strict=True)])
    assert_close(OPS.npu_gmm(x, w, None, sizes, False).double(), exact, ROUNDING[dtype])
    rows = numbers(3001, 20, dtype=dtype), numbers(3001, 50, dtype=dtype, seed=2)
    exact = rows[0].double().t() @ rows[1].double()
    assert_close(OPS.npu_gmm_sum(*rows, torch.tensor([3001]), False)[0].double(), exact, ROUNDING[dtype])


def test_packed_columns_begin_at_a_cache_line_however_long_the_sum():
    """Of a sum of 375 as many packed rows fit as would end in the middle of a line, where wide loads fail."""
    sizes = torch.tensor([127, 375, 333, 189])
    rows, columns = numbers(1024, 192), numbers(1024, 128, seed=2)
    for ours, x, y in zip(
        OPS.npu_gmm_sum(rows, columns, sizes, False), *(a.split(sizes.tolist()) for a in (rows, columns)), strict=True
    ):
        assert_close(ours.double(), x.double().t() @ y.double(), ROUNDING[torch.float32])
    for length in range(257, 512, 2):
        x, w = numbers(30, length), numbers(1, length, 50, seed=2)
        exact = x.double() @ w[0].double()
        assert_close(OPS.npu_gmm(x, w, None, torch.tensor([30]), False).double(), exact, ROUNDING[torch.float32])


def test_what_is_not_a_number_stays_so():
    x = torch.tensor([[float("nan"), 1.0], [float("inf"), 1.0]]).bfloat16()
    y = OPS.npu_gmm(x, torch.ones(1, 2, 3).bfloat16(), None, torch.tensor([2]), False)
    assert y[0].isnan().all()
    assert y[1].isinf().all()


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_changes_nothing(threads):
    x, w, groups = numbers(500, 96).bfloat16(), numbers(4, 96, 400, seed=2).bfloat16(), torch.tensor([400, 0, 1, 99])
    before = torch.get_num_threads()
    expected = OPS.npu_gmm(x, w, None, groups, False)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(OPS.npu_gmm(x, w, None, groups, False), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("layout", ["plain", "transposed", "strided"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", SIZES)
def test_sums_of_groups_are_those_of_the_reference(name, dtype, layout):
    sizes, wide = SIZES[name], torch.float64 if dtype == torch.float64 else torch.float32
    ends = torch.tensor(sizes).cumsum(0)
    for inner, columns in SHAPES:
        x = laid_out(numbers(sum(sizes), inner, dtype=dtype), layout)
        dy = laid_out(numbers(sum(sizes), columns, dtype=dtype, seed=2), layout)
        ours = numbers(len(sizes), inner, columns, dtype=wide, seed=3)
        theirs = ours.clone()
        npu_groupmatmul_add_fp32(x, dy, ends, ours)
        reference(GROUPED)._add(x, dy, ends, theirs)
        assert_close(ours, theirs, 4e-6)


def test_an_empty_group_keeps_its_bits():
    grad = numbers(2, 3, 4)
    before = grad.clone()
    npu_groupmatmul_add_fp32(numbers(5, 3).bfloat16(), numbers(5, 4).bfloat16(), [0, 5], grad)
    assert torch.equal(grad[0], before[0])
    assert not torch.equal(grad[1], before[1])


@pytest.mark.parametrize("layout", ["plain", "transposed", "strided"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens", [0, 1, 77, 2500])
def test_an_added_sum_is_that_of_the_reference(tokens, dtype, layout):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for inputs, outputs in SHAPES:
        x = laid_out(numbers(tokens, inputs, dtype=dtype), layout)
        dy = laid_out(numbers(tokens, outputs, dtype=dtype, seed=2), layout)
        ours = laid_out(numbers(outputs, inputs, dtype=wide, seed=3), layout)
        theirs = ours.clone()
        npu_matmul_add_fp32(x, dy, ours)
        reference(SINGLE)._add(x, dy, theirs)
        assert_close(ours, theirs, 4e-6)


def integers(*shape, seed=1, dtype=torch.int8, limit=128):
    return torch.randint(-limit, limit, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def cases(sizes, layout="plain"):
    """Arguments of the operator up to the groups, for every shape."""
    for inner, columns in SHAPES:
        x, w = integers(sum(sizes), inner), integers(len(sizes), inner, columns, seed=2)
        scale, per_token = numbers(len(sizes), columns, seed=3) / 128, numbers(sum(sizes), seed=4)
        bias = integers(len(sizes), columns, seed=5, dtype=torch.int32, limit=2**31 - 1)
        yield laid_out(x, layout), laid_out(w, layout), scale, per_token, bias


@pytest.mark.parametrize("layout", ["plain", "transposed", "strided"])
@pytest.mark.parametrize("name", SIZES)
def test_integer_products_without_activation_are_the_reference_bit_for_bit(name, layout):
    groups, forward = torch.tensor(SIZES[name]), reference(QUANTIZED)._forward
    for x, w, scale, per_token, bias in cases(SIZES[name], layout):
        for dtype, scales, token, added in (
            (torch.bfloat16, scale, per_token, bias),
            (torch.float16, scale.bfloat16(), None, bias),
            (torch.bfloat16, scale.view(torch.int32).long(), per_token, None),
            (torch.int8, scale / 64, None, None),
        ):
            for activation in (0,) if dtype == torch.int8 else (0, 1):
                arguments = x, w, scales, token, added, groups, dtype, activation, False
                assert torch.equal(torch.ops.mindspeed.quant_gmm(*arguments), forward(*arguments))


@pytest.mark.parametrize("activation", [2, 4, 5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_activations_differ_by_a_rounding_at_most(activation, dtype, tolerance):
    sizes, forward = SIZES["balanced"], reference(QUANTIZED)._forward
    for x, w, scale, per_token, _ in cases(sizes):
        arguments = x, w, scale / 256, per_token, None, torch.tensor(sizes), dtype, activation, False
        ours, theirs = torch.ops.mindspeed.quant_gmm(*arguments), forward(*arguments)
        assert_close(ours, theirs, tolerance)
        assert (ours == theirs).double().mean() > 0.95 or not ours.numel()


@pytest.mark.parametrize("inner", [4099, 70001])
def test_integer_sums_are_exact_at_the_ends_of_their_range(inner):
    for a in (127, -128):
        x, w = torch.full((9, inner), a, dtype=torch.int8), torch.full((1, inner, 2), -128, dtype=torch.int8)
        bias = torch.ones(1, 2, dtype=torch.int32)
        y = quant_gmm(x, w, torch.full((1, 2), 1.0), bias=bias, group_list=[9])
        assert torch.equal(y, torch.full((9, 2), -128.0 * a * inner + 1, dtype=torch.float64).float().bfloat16())
