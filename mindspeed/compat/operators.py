"""Operators of MindSpeed whose arguments differ from those of `mindspeed.ops`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed.ops import lcal_coc
from mindspeed.ops.fusion_attention import fusion_attention_grad
from mindspeed.ops.npu_gmm import npu_gmm, npu_gmm_v2


def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_outputs: Tensor,
    head_num: int,
    input_layout: str,
    *,
    scale: float = 1.0,
    softmax_in: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Call `fusion_attention_grad`, where ``scale`` is called ``scale_value``; ``softmax_in`` is empty in MindSpeed too."""
    return fusion_attention_grad(query, key, value, grad_outputs, head_num, input_layout, scale_value=scale, **kwargs)


def npu_gmm_of_parameter(original_weight: Tensor | None, x: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
    """Multiply groups as `npu_gmm`; gradients are accumulated in ``original_weight.main_grad`` with ``gemm_fusion``."""
    return npu_gmm(x, weight, original_weight=original_weight, **kwargs)


def npu_gmm_v2_of_parameter(original_weight: Tensor | None, x: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
    """Multiply groups as `npu_gmm_v2`; gradients are accumulated in ``original_weight.main_grad`` with ``gemm_fusion``."""
    return npu_gmm_v2(x, weight, original_weight=original_weight, **kwargs)


def grouped_matmul(inputs: Tensor, m_split: Tensor | list[int], weights: Tensor) -> Tensor:
    """Multiply ``inputs`` [tokens, in] with one weight per group, [groups, in, out] or [groups, out, in].

    ``m_split`` counts the tokens of each group.
    """
    if weights.shape[1] != inputs.shape[-1]:
        weights = weights.transpose(1, 2)
    counts = torch.as_tensor(m_split, dtype=torch.int64, device=inputs.device)
    return npu_gmm_v2(inputs, weights, group_list=counts)


def npu_matmul_add_fp16(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    """Add ``grad_output.T @ total_input`` to ``grad`` in the type of the inputs."""
    if total_input.numel() and grad_output.numel():
        grad.add_(grad_output.t().matmul(total_input))


class _CoCOperations:
    """Products with collectives of the tensor-parallel group, with MindSpeed's arguments: each returns what it writes."""

    def pure_matmul(self, input1: Tensor, input2: Tensor, output: Tensor, bias: Tensor | None = None) -> Tensor:
        """Write ``input1 input2 + bias``."""
        return lcal_coc.pure_matmul(input1, input2, output, bias=bias)

    def matmul_all_reduce(self, input1: Tensor, input2: Tensor, output: Tensor, bias: Tensor | None = None) -> Tensor:
        """Write the sum over ranks of ``input1 input2``, plus bias."""
        return lcal_coc.matmul_all_reduce(input1, input2, output, _tensor_parallel_group(), bias=bias)

    def all_gather_matmul(self, input1: Tensor, input2: Tensor, output: Tensor, bias: Tensor | None = None) -> Tensor:
        """Write the product of ``input1`` of all ranks with ``input2``, plus bias."""
        return lcal_coc.all_gather_matmul(input1, input2, output, _tensor_parallel_group(), bias=bias)

    def all_gather_matmul_v2(
        self, input1: Tensor, input2: Tensor, output: Tensor, comm_output: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Write `all_gather_matmul`, and the gathered ``input1``."""
        return lcal_coc.all_gather_matmul_v2(input1, input2, output, comm_output, _tensor_parallel_group(), bias=bias)

    def matmul_reduce_scatter(self, input1: Tensor, input2: Tensor, output: Tensor, bias: Tensor | None = None) -> Tensor:
        """Write this rank's rows of the sum over ranks of ``input1 input2``, plus bias."""
        return lcal_coc.matmul_reduce_scatter(input1, input2, output, _tensor_parallel_group(), bias=bias)


coc_ops = _CoCOperations()


def _tensor_parallel_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()
