"""What Megatron finds in place of Apex's module ``fused_weight_gradient_mlp_cuda``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

from torch import Tensor

from mindspeed.ops.npu_matmul_add_fp32 import npu_matmul_add_fp32
from mindspeed.plugins.problems import MindSpeedError, Problem


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


def check_buffers(chunks: Sequence[Any]) -> None:
    """Raise MS304 for a model whose parameters have no gradient buffer to add to."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad and not (hasattr(parameter, "main_grad") or hasattr(parameter, "__fsdp_param__")):
                text = f"matmul-add: {name} has no main_grad, the buffer that its gradient is added to"
                fix = (
                    "wrap the model in Megatron's DistributedDataParallel before its optimizer is made, or take out matmul-add"
                )
                raise MindSpeedError([Problem("MS304", text, ("matmul-add",), fix=fix)])
