"""What `test_communicating_numerics.py` runs on every rank of a gloo job."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.ops import process_groups
from tests.npu_contract import bodies
from tests.npu_contract.case import Make
from tests.npu_contract.cases import CASES
from tests.npu_contract.hccl import group_of
from tests.npu_contract.hccl import names as communicator_names
from tests.npu_contract.recording import FORWARD, OnNpu, OnReference, forward_and_backward
from tests.ops.communicating import grid


def npu_mm_all_reduce_base(
    x1: Tensor,
    x2: Tensor,
    hcom: str,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None,
    dequant_scale: Tensor | None = None,
    antiquant_group_size: int = 0,
    **none: Any,
) -> Tensor:
    weight, dtype = x2.float(), x1.dtype
    if antiquant_scale is not None:
        assert antiquant_offset is not None
        each = antiquant_group_size or x2.shape[0]
        scale, offset = (
            t.float().view(-1, x2.shape[1]).repeat_interleave(each, 0) for t in (antiquant_scale, antiquant_offset)
        )
        weight = (weight + offset) * scale
    y = x1.float() @ weight
    y = y if bias is None else y + bias.float()
    if dequant_scale is not None:
        y = y * bodies._scale(dequant_scale)
        dtype = torch.bfloat16 if dequant_scale.dtype == torch.bfloat16 else torch.float16
    return process_groups.all_reduce(y, group_of(hcom)).to(dtype)


def npu_all_gather_base_mm(
    x1: Tensor, x2: Tensor, hcom: str, world_size: int, *, gather_index: int = 0, gather_output: bool = True, **none: Any
) -> tuple[Tensor, Tensor]:
    assert gather_index == 0
    assert process_groups.size_of(group_of(hcom)) == world_size
    gathered = process_groups.all_gather(x1, group_of(hcom)).flatten(0, 1)
    y = (gathered.float() @ x2.float()).to(x1.dtype)
    return y, gathered if gather_output else x1.new_empty(0)


def npu_mm_reduce_scatter_base(
    x1: Tensor, x2: Tensor, hcom: str, world_size: int, *, reduce_op: str = "sum", **none: Any
) -> Tensor:
    parts = (x1.float() @ x2.float()).unflatten(0, (world_size, -1))
    return process_groups.reduce_scatter(parts, group_of(hcom)).to(x1.dtype)


_BODIES = {
    "npu_mm_all_reduce_base": npu_mm_all_reduce_base,
    "npu_all_gather_base_mm": npu_all_gather_base_mm,
    "npu_mm_reduce_scatter_base": npu_mm_reduce_scatter_base,
}


def runs(names: list[str]) -> list[tuple[tuple[str, ...], list[Tensor], list[Tensor]]]:
    """Per case and type: the operators of torch_npu that ran, the results on NPU, and those of the reference."""
    groups, found = grid(2, 2), []
    with communicator_names(), bodies.installed(_BODIES):
        for case in (case for name in names for case in CASES if str(case) == name):
            for dtype in case.types:
                mode, results = OnNpu(), []
                for each in (mode, OnReference()):
                    make = Make(dtype, "cpu", groups, seed=100 * dist.get_rank())
                    values, _ = forward_and_backward(case.call(make), [], torch.empty_like, each)
                    results.append(values)
                found.append((mode.record.operators(FORWARD), *results))
    return found
