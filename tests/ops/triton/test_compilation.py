"""All kernels through the whole compiler, for an H100 that need not be there: what the interpreter cannot tell.

Nothing runs: this is no statement about speed. It says that the compiler takes each kernel, that no register is spilled to
memory, that aligned rows are read and written 128 bits at a time, and that products use the tensor cores.
"""

from importlib import import_module

import pytest
import torch

from tests.ops.triton.compilation import compiling

BF16, FP32 = torch.bfloat16, torch.float32


def empty(*shape, dtype=BF16):
    return torch.empty(*shape, dtype=dtype, device="cuda:0")


def run(op, *arguments, schema=None):
    import_module(f"mindspeed.ops.cuda.{op}").KERNELS[schema or op].run(*arguments)


def norms(width, dtype=BF16):
    x, gamma, rstd = empty(4096, width, dtype=dtype), empty(width, dtype=dtype), empty(4096, 1, dtype=FP32)
    run("rms_norm", x, gamma, 1e-6)
    run("rms_norm", x, x, gamma, rstd, schema="rms_norm_backward")
    run("rms_norm", x, x, gamma, 1e-6, schema="rms_norm_residual")
    run("rms_norm", x, x, x, gamma, rstd, schema="rms_norm_residual_backward")


def gates():
    x = empty(4096, 2 * 11008)
    run("swiglu", x, -1)
    run("swiglu", empty(4096, 11008), x, -1, schema="swiglu_backward")


def turns():
    for mode in (0, 1):
        x, table = empty(4096, 1, 64, 128), empty(4096, 1, 1, 128)
        run("npu_rotary_position_embedding", x, table, table, mode)
        run("npu_rotary_position_embedding", x, table, table, mode, schema="npu_rotary_position_embedding_backward")
    run("npu_rotary_position_embedding", x, x, table, 0, schema="npu_rotary_position_embedding_tables_backward")


def merges():
    stats = empty(1, 32, 8192, 8, dtype=FP32)
    for dtype in (FP32, BF16):
        out = empty(8192, 1, 4096, dtype=dtype)
        run("npu_ring_attention_update", out, stats, stats, out, stats, stats, None, "SBH", False)


def experts():
    tokens, indices = empty(4096, 7168), torch.empty(4096, 8, dtype=torch.int64, device="cuda:0")
    rows, slots, probs = empty(4096 * 8, 7168), indices.flatten().int(), empty(4096, 8, dtype=FP32)
    run("npu_fused_moe_token_permute", tokens, indices, 4096 * 8, False)
    run("npu_fused_moe_token_unpermute", rows, slots, probs, 4096, 8, False)
    backward = (tokens, rows, slots, probs, 4096 * 8, 8, False)
    run("npu_fused_moe_token_unpermute", *backward, schema="npu_fused_moe_token_unpermute_backward")


def logits():
    x, rows, of_tokens = empty(512, 128256), torch.empty(512, dtype=torch.int64, device="cuda:0"), empty(512, dtype=FP32)
    for options in ((False, False), (True, True)):
        run("logit_statistics", x, rows, *options)
        run("logit_statistics", x, of_tokens, of_tokens, empty(4, 512, dtype=FP32), rows, *options, schema="logit_gradient")


def layer_norms(rms):
    x, weight, mask = empty(4096, 8192), empty(8192), empty(4096, 8192, dtype=torch.uint8)
    stat = empty(4096, 1, dtype=FP32)
    op = "npu_dropout_add_layer_norm"
    run(op, x, x, weight, None if rms else weight, None, None, mask, 0.1, 1e-5, BF16, rms)
    run(op, x, x, x, weight, stat, stat, None, None, None, mask, 0.1, rms, schema=f"{op}_backward")


def products(dtype, experts):
    x, w, dy = empty(32768, 4096, dtype=dtype), empty(experts, 4096, 2048, dtype=dtype), empty(32768, 2048, dtype=dtype)
    groups = torch.empty(experts, dtype=torch.int64, device="cuda:0")
    run("npu_gmm", x, w, None, groups, True)
    run("npu_gmm", dy, w.transpose(1, 2), None, groups, True)
    run("npu_gmm", x, dy, groups, True, schema="npu_gmm_sum")
    run("npu_groupmatmul_add_fp32", x, dy, groups, empty(experts, 4096, 2048, dtype=FP32))


def weight_gradient():
    run("npu_matmul_add_fp32", empty(8192, 8192), empty(8192, 8192), empty(8192, 8192, dtype=FP32))


SUMS = {"column_sums", "table_gradients", "statistics"}
"""Kernels that read much and write little."""
STREAMING = {
    "rms_norm 4096": lambda: norms(4096),
    "rms_norm 8192 fp32": lambda: norms(8192, FP32),
    "rms_norm 16384": lambda: norms(16384),
    "rms_norm 32768": lambda: norms(32768),
    "swiglu": gates,
    "npu_rotary_position_embedding": turns,
    "npu_ring_attention_update": merges,
    "token permutation": experts,
    "logit_statistics": logits,
    "dropout_add_layer_norm": lambda: layer_norms(False),
    "dropout_add_rms_norm": lambda: layer_norms(True),
}
PRODUCTS = {
    "npu_gmm bf16, 64 groups": lambda: products(BF16, 64),
    "npu_gmm fp16, 8 groups": lambda: products(torch.float16, 8),
    "npu_matmul_add_fp32": weight_gradient,
}


@pytest.mark.parametrize("name", STREAMING)
def test_streaming_kernels_spill_nothing_and_move_whole_vectors(name):
    with compiling() as found:
        STREAMING[name]()
    assert found
    assert {kernel.name: kernel.spilled for kernel in found if kernel.spilled} == {}
    for kernel in found:
        wide = sum(width for width in kernel.loads if width == 128) / sum(kernel.loads)
        assert wide > 0.75, (kernel.name, kernel.loads)
        assert 128 in kernel.stores or kernel.name in SUMS


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_spill_nothing_and_use_the_tensor_cores(name):
    with compiling() as found:
        PRODUCTS[name]()
    for kernel in found:
        assert kernel.spilled == 0, kernel
        assert kernel.products > 0, kernel
        assert kernel.shared <= 227 * 1024, kernel


def test_odd_sizes_biases_and_fp32_products_are_taken_by_the_compiler():
    with compiling() as found:
        norms(1001)
        run("swiglu", empty(3, 14), -1)
        run("npu_rotary_position_embedding", empty(3, 2, 5, 10), empty(3, 2, 5, 10), empty(3, 2, 5, 10), 1)
        x, w = empty(100, 35, dtype=FP32), empty(3, 35, 18, dtype=FP32)
        groups = torch.empty(3, dtype=torch.int64, device="cuda:0")
        run("npu_gmm", x, w, empty(3, 18, dtype=FP32), groups, False)
        run("npu_gmm", x, groups, False, schema="npu_gmm_bias")
        stats, out = empty(9, 3, 8, dtype=FP32), empty(9, 3, 20)
        run("npu_ring_attention_update", out, stats, stats, out, stats, stats, None, "TND", False)
        x, row, weight = empty(7, 70), empty(7), empty(70, dtype=FP32)
        scales, op = (row, weight), "npu_dropout_add_layer_norm"
        run(op, x, x, weight, weight, *scales, empty(7, 70, dtype=torch.uint8), 0.1, 1e-5, FP32, False)
        stat = empty(7, 1, dtype=FP32)
        run(op, x, x, x, weight, stat, stat, x, *scales, None, 0.1, False, schema=f"{op}_backward")
    assert {kernel.spilled for kernel in found} == {0}
    assert {"by_rows", "row_sums", "merge", "turn", "forward", "backward"} <= {kernel.name for kernel in found}
