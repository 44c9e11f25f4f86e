"""Weight gradients added to their buffer: stand-in for Apex's module ``fused_weight_gradient_mlp_cuda``, and its use."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from mindspeed import plugins as ms
from mindspeed.ops.npu_matmul_add_fp32 import npu_matmul_add_fp32

_NO_BUFFER: Final = "a weight has no fp32, fp16 or bf16 main_grad buffer of Megatron's data parallelism"
_WRAPPED: Final = (ms.Fix.advise("wrap the model in Megatron's DistributedDataParallel"), ms.Fix.remove_feature("matmul-add"))


def wgrad_gemm_accum_fp32(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add ``grad_output^T total_input`` to an fp32 ``main_grad`` [O, I], from [T, O] and [T, I]."""
    npu_matmul_add_fp32(total_input, grad_output, main_grad)


def wgrad_gemm_accum_fp16(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """The same for a ``main_grad`` in the type of the layer, fp16 or bf16: product and sum are rounded once."""
    main_grad.addmm_(grad_output.t(), total_input)


NAME: Final = "fused_weight_gradient_mlp_cuda"
KERNELS: Final = ModuleType(NAME, "Kernels of mindspeed under the names of Apex's.")
KERNELS.__dict__.update(wgrad_gemm_accum_fp32=wgrad_gemm_accum_fp32, wgrad_gemm_accum_fp16=wgrad_gemm_accum_fp16)


def with_kernels(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around a function that imports the module by its name."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _importable():
            return original(*args, **kwargs)

    return call


@contextmanager
def _importable() -> Iterator[None]:
    before = sys.modules.get(NAME)
    sys.modules[NAME] = KERNELS
    try:
        yield
    finally:
        if before is None:
            del sys.modules[NAME]
        else:
            sys.modules[NAME] = before


_BUFFER_TYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


def with_fusion_by_weight(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Around the function of a linear layer: the weight decides whether its gradient is added to a buffer."""

    @functools.wraps(original)
    def linear(
        input: Tensor, weight: Tensor, bias: Tensor | None, gradient_accumulation_fusion: bool, *args: Any, **kwargs: Any
    ) -> Tensor:
        fused = gradient_accumulation_fusion if hasattr(weight, "__fsdp_param__") else takes_sum(weight)
        return original(input, weight, bias, fused, *args, **kwargs)

    return linear


def decided_by_weight(original: Callable[[Tensor, bool], bool]) -> Callable[[Tensor, bool], bool]:
    """Around the question of other linear layers whether a weight's gradient is added to its buffer."""

    @functools.wraps(original)
    def adds(weight: Tensor, requested: bool) -> bool:
        return original(weight, requested) if hasattr(weight, "__fsdp_param__") else takes_sum(weight)

    return adds


def takes_sum(weight: Tensor) -> bool:
    """Return whether a weight has a gradient buffer that a kernel adds to.

    Raises MS304 for one without where the feature is requested; a script may use layers without Megatron's data parallelism.
    """
    buffer = getattr(weight, "main_grad", None)
    if buffer is not None and buffer.dtype in _BUFFER_TYPES and hasattr(weight, "grad_added_to_main_grad"):
        return True
    feature = ms.active_feature("matmul-add")
    if feature is not None and weight.requires_grad and torch.is_grad_enabled():
        if feature.requested:
            raise ms.MindSpeedError([ms.Problem("MS304", f"matmul-add: {_NO_BUFFER}", ("matmul-add",), fix=_WRAPPED)])
        text = f"matmul-add: {_NO_BUFFER}. Training continues: Megatron adds up the gradient of this weight without fusion"
        ms.report_problem(
            ms.Problem("MS413", text, ("matmul-add",), fix=ms.Fix.advise("--without matmul-add removes this warning")),
            log=os.environ.get("RANK", "0") == "0",
        )
    return False
