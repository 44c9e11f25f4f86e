import importlib
import sys
from contextlib import nullcontext

import pytest
import torch

from mindspeed import registry
from mindspeed.engine.resolution.request import Layer
from mindspeed.features.matmul_add.feature import MatmulAdd
from mindspeed.features.matmul_add.layers import KERNELS, with_fusion_by_weight, with_kernels
from mindspeed.plugins import FeatureArgs, MindSpeedError, World
from mindspeed.plugins.active import ActiveFeatures, set_active
from mindspeed.workbench.verification.pool import WorkerPool


def test_both_kernels_add_the_product_to_what_is_there() -> None:
    x, dy = torch.randn(24, 8), torch.randn(24, 6)
    grad = torch.ones(6, 8)
    KERNELS.wgrad_gemm_accum_fp32(x, dy, grad)
    torch.testing.assert_close(grad, 1 + dy.t() @ x, rtol=1e-5, atol=1e-5)
    x, dy, grad = x.bfloat16(), dy.bfloat16(), torch.ones(6, 8, dtype=torch.bfloat16)
    KERNELS.wgrad_gemm_accum_fp16(x, dy, grad)
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad, (1 + dy.double().t() @ x.double()).bfloat16(), rtol=1e-2, atol=1e-2)


def test_a_function_that_imports_apex_gets_these_kernels_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def imports() -> object:
        return importlib.import_module("fused_weight_gradient_mlp_cuda")

    name = "fused_weight_gradient_mlp_cuda"
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert with_kernels(imports)() is KERNELS
    assert name not in sys.modules
    apex = object()
    monkeypatch.setitem(sys.modules, name, apex)
    assert with_kernels(imports)() is KERNELS
    assert sys.modules[name] is apex


def flags_of(feature: MatmulAdd, weight: torch.Tensor) -> list[bool]:
    """What Megatron's function gets for the flag that it was called with, False and True, while a feature is active."""
    flags: list[bool] = []
    linear = with_fusion_by_weight(lambda input, weight, bias, fused, **others: flags.append(fused) or input)
    set_active(ActiveFeatures({"matmul-add": feature}, lambda problem, log: None, lambda make: nullcontext()))
    try:
        for fused in (False, True):
            linear(input=weight, weight=weight, bias=None, gradient_accumulation_fusion=fused)
    finally:
        set_active(None)
    return flags


def test_the_weight_decides_whether_its_gradient_is_added_to_a_buffer() -> None:
    weight, feature = torch.nn.Parameter(torch.ones(2, 2)), MatmulAdd(FeatureArgs(), World({}))
    feature.requested = False
    assert flags_of(feature, weight) == [False, False]
    weight.main_grad = torch.zeros(2, 2)  # type: ignore[attr-defined]
    assert flags_of(feature, weight) == [False, False]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    assert flags_of(feature, weight) == [True, True]
    weight.main_grad = torch.zeros(2, 2, dtype=torch.float64)  # type: ignore[attr-defined]
    assert flags_of(feature, weight) == [False, False]
    weight.__fsdp_param__ = True  # type: ignore[attr-defined]
    assert flags_of(feature, weight) == [False, True]


def test_the_requested_feature_refuses_a_weight_without_a_buffer() -> None:
    feature = MatmulAdd(FeatureArgs(), World({}))
    with pytest.raises(MindSpeedError) as error:
        flags_of(feature, torch.nn.Parameter(torch.ones(2, 2)))
    assert str(error.value) == (
        "MS304 matmul-add: a weight has no fp32, fp16 or bf16 main_grad buffer of Megatron's data parallelism\n"
        "  fix: wrap the model in Megatron's DistributedDataParallel, or remove matmul-add"
    )
    assert flags_of(feature, torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)) == [False, False]


MICRO_BATCHES = 10


def errors_of_a_linear_layer(fused: bool) -> tuple[float, int]:
    """Relative error against fp64 of Megatron's bf16 weight gradient summed over micro-batches in fp32, and the number of
    calls that the kernel got. The sum is made as Megatron's data parallelism makes it."""
    from types import SimpleNamespace

    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce as linear

    calls = SimpleNamespace(count=0)
    if fused:
        from megatron.core.tensor_parallel import layers

        original = layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32

        def counted(*tensors: torch.Tensor) -> None:
            calls.count += 1
            original(*tensors)

        layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32 = counted
    try:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(48, 64, dtype=torch.bfloat16))
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(48, 64), False  # type: ignore[attr-defined]
        expected = torch.zeros(48, 64, dtype=torch.float64)
        for _ in range(MICRO_BATCHES):
            x, dy = torch.randn(96, 64).bfloat16(), torch.randn(96, 48).bfloat16()
            linear(x.unsqueeze(1), weight, None, fused, False, False).backward(dy.unsqueeze(1))
            if not weight.grad_added_to_main_grad:  # type: ignore[attr-defined]
                weight.main_grad.add_(weight.grad)  # type: ignore[attr-defined, arg-type]
            weight.grad = None
            expected += dy.double().t() @ x.double()
        error = (weight.main_grad - expected).norm() / expected.norm()  # type: ignore[attr-defined]
        return float(error), calls.count
    finally:
        if fused:
            layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32 = original


def test_in_bf16_the_sum_over_micro_batches_is_more_accurate_than_without_it(pool: WorkerPool) -> None:
    world = {"world_size": 1}
    with_it = registry.resolve([Layer("test", ("matmul-add",), world=world, platform="cpu")])
    without = registry.resolve([Layer("test", world=world, without=("matmul-add",), platform="cpu")])
    (fused, calls), (unfused, none) = (
        pool.call(errors_of_a_linear_layer, 1, chosen is with_it, plan=chosen)[0] for chosen in (with_it, without)
    )
    assert (calls, none) == (MICRO_BATCHES, 0)
    assert fused < 1e-6
    assert 5e-4 < unfused < 1e-2
