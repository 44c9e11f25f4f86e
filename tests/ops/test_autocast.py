"""Under torch.autocast every operator takes the types that a model's layers hand it: half activations, fp32 weights."""

import pytest
import torch
import torch.distributed as dist

import mindspeed.ops
from mindspeed.ops import ALIASES, OPERATORS, lcal_coc

BF16 = torch.bfloat16
ENDS = torch.tensor([2, 5])
OF_ONE_TYPE = {"swiglu", "quant_gmm", "npu_quant_gmm", "npu_quant_gmm_v2", "npu_fused_moe_token_permute"}
"""Operators that have one floating operand, or types that scales declare."""
OF_BACKWARD = {"fusion_attention_grad", "npu_fusion_attention_grad", "logit_statistics", "logit_gradient"}
"""Operators that a function of autograd calls, with the tensors that it has converted."""


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def half(*shape):
    return torch.randn(*shape).bfloat16()


def single(*shape):
    return torch.randn(*shape)


def written(name, output, *operands, group=None):
    getattr(lcal_coc, name)(*operands, output, *([group] if group else []))
    return output


def added(name, grad, *operands):
    getattr(mindspeed.ops, name)(*operands, grad)
    return grad


NORM = (half(3, 2, 8), half(3, 2, 8), single(8))
ATTENTION = (half(4, 1, 16), single(4, 1, 16), single(4, 1, 16), 2, "SBH")
CALLS = {
    "ffn": (BF16, lambda f: f(half(5, 4), single(4, 6), single(6, 4), "gelu")),
    "npu_ffn": (BF16, lambda f: f(half(5, 4), single(4, 6), single(6, 4), "gelu")),
    "fusion_attention": (BF16, lambda f: f(*ATTENTION)[0]),
    "npu_fusion_attention": (BF16, lambda f: f(*ATTENTION)[0]),
    "attention": (BF16, lambda f: f(*ATTENTION)),
    "npu_gmm": (BF16, lambda f: f(half(5, 4), single(2, 4, 3), group_list=ENDS)),
    "npu_gmm_v2": (BF16, lambda f: f(half(5, 4), single(2, 4, 3), group_list=torch.tensor([2, 3]))),
    "npu_dropout_add_layer_norm": (torch.float32, lambda f: f(*NORM, single(8), 0.0, 1e-5)),
    "npu_dropout_add_rms_norm": (torch.float32, lambda f: f(*NORM, None, 0.0, 1e-5)),
    "npu_fused_moe_token_unpermute": (BF16, lambda f: f(half(4, 3), torch.arange(4), single(2, 2))),
    "npu_groupmatmul_add_fp32": (torch.float32, lambda f: added(f.__name__, single(2, 4, 3), half(5, 4), single(5, 3), ENDS)),
    "npu_matmul_add_fp32": (torch.float32, lambda f: added(f.__name__, single(3, 4), single(5, 4), half(5, 3))),
    "npu_ring_attention_update": (
        torch.float32,
        lambda f: f(half(5, 2, 12), *[single(2, 3, 5, 8)] * 2, single(5, 2, 12), *[single(2, 3, 5, 8)] * 2)[0],
    ),
    "npu_rotary_position_embedding": (BF16, lambda f: f(half(2, 3, 5, 8), half(1, 1, 5, 8), single(1, 1, 5, 8))),
    "rms_norm": (torch.float32, lambda f: f(half(4, 6), single(6))),
    "rms_norm_residual": (torch.float32, lambda f: f(half(4, 6), single(4, 6), single(6))[0]),
}
BETWEEN_RANKS = {
    "npu_all_to_all_all_gather_bmm": (BF16, lambda f, group: f(half(2, 4, 8), single(2, 8, 6), group, 1, group, 1)),
    "npu_bmm_reduce_scatter_all_to_all": (BF16, lambda f, group: f(half(2, 4, 8), single(2, 8, 6), group, 1, group, 1)),
    "npu_grouped_mat_mul_all_reduce": (BF16, lambda f, group: f([half(5, 4)], [single(4, 3)], group)[0]),
    "npu_mm_all_reduce_add_rms_norm": (
        BF16,
        lambda f, group: f(half(4, 8), single(8, 6), half(1, 4, 6), single(6), group)[0],
    ),
    "npu_mm_all_reduce_add_rms_norm_": (
        BF16,
        lambda f, group: f(half(4, 8), single(8, 6), half(1, 4, 6), single(6), group)[0],
    ),
    "lcal_coc": (BF16, lambda f, group: written("matmul_all_reduce", half(4, 6), half(4, 8), single(8, 6), group=group)),
}


def test_every_operator_is_called_here():
    assert {*CALLS, *BETWEEN_RANKS, *OF_ONE_TYPE, *OF_BACKWARD} == {*OPERATORS, *ALIASES}


@pytest.mark.parametrize("name", CALLS)
def test_types_are_converted_as_pytorch_does(name):
    dtype, call = CALLS[name]
    with torch.autocast("cpu", dtype=BF16):
        assert call(getattr(mindspeed.ops, name)).dtype == dtype


@pytest.mark.parametrize("name", BETWEEN_RANKS)
def test_types_are_converted_between_ranks_too(name, group):
    dtype, call = BETWEEN_RANKS[name]
    with torch.autocast("cpu", dtype=BF16):
        assert call(getattr(mindspeed.ops, name), group).dtype == dtype


def test_gradients_have_the_types_of_what_was_given():
    x, gamma = half(4, 6).requires_grad_(), single(6).requires_grad_()
    with torch.autocast("cpu", dtype=BF16):
        mindspeed.ops.rms_norm(x, gamma).sum().backward()
    assert (x.grad.dtype, gamma.grad.dtype) == (BF16, torch.float32)


def test_without_autocast_types_that_differ_are_refused():
    with pytest.raises(mindspeed.ops.errors.OperatorError, match="must have one type"):
        mindspeed.ops.rms_norm(half(4, 6), single(6))
