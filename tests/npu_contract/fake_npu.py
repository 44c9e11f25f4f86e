"""Cases on fake NPU tensors: shapes and types by the shape kernels of the real torch_npu."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from mindspeed.ops.registration import Kernel
from tests.npu_contract.case import Case, Make
from tests.npu_contract.hccl import communicators
from tests.npu_contract.recording import OnNpu, Record, described, forward_and_backward


@contextmanager
def groups() -> Iterator[dict[str, dist.ProcessGroup]]:
    """Rank 0 of 2 x 2, its expert and its tensor group."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    with communicators():
        yield {"EP": dist.new_group([0, 2]), "TP": dist.new_group([0, 1])}
    dist.destroy_process_group()


@contextmanager
def corrected_shapes() -> Iterator[None]:
    """Shape kernels of torch_npu 2.13.0 that are wrong, put right.

    That of ``npu_fusion_attention_grad_v2`` raises; that of ``npu_fusion_attention_v2`` knows neither BSND and TND nor values
    of another width; that of ``npu_fusion_attention_grad`` forgets the gradient of the bias.
    """

    def forward_v2(query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **more: Any) -> Any:
        taken = {"scale", "atten_mask", "pse", "sparse_mode"} & set(more)
        one = {name: more[name] for name in taken}
        return torch.ops.npu.npu_fusion_attention(query, key, value, head_num, input_layout, **one)

    def backward(query: Tensor, key: Tensor, value: Tensor, *args: Any, pse: Tensor | None = None, **more: Any) -> Any:
        grads = [torch.empty_like(x) for x in (query, key, value)]
        return (*grads, query.new_empty(0) if pse is None else torch.empty_like(pse))

    def backward_v1(*args: Any, **more: Any) -> Any:
        return (*backward(*args, **more), args[0].new_empty(0))

    def backward_v2(*args: Any, **more: Any) -> Any:
        return (*backward(*args, **more), args[0].new_empty(0), args[0].new_empty(0), None)

    library = torch.library.Library("npu", "IMPL", "Meta")  # type: ignore[no-untyped-call]
    library.impl("npu_fusion_attention_v2", forward_v2, allow_override=True)  # type: ignore[no-untyped-call]
    library.impl("npu_fusion_attention_grad", backward_v1, allow_override=True)  # type: ignore[no-untyped-call]
    library.impl("npu_fusion_attention_grad_v2", backward_v2, allow_override=True)  # type: ignore[no-untyped-call]
    yield
    library._destroy()  # type: ignore[no-untyped-call]


def run(
    case: Case, dtype: torch.dtype, known: dict[str, dist.ProcessGroup], kernels: dict[str, Kernel] | None = None
) -> Record:
    """The record of a case; an exception of torch_npu or of a comparison comes through."""
    with FakeTensorMode():
        make = Make(dtype, "npu", known)
        call = case.call(make)
        mode = OnNpu(kernels, shapes=True)
        _, grads = forward_and_backward(call, make.leaves, torch.empty_like, mode)
    assert [shape for shape, *_ in described(grads)] == [tuple(leaf.shape) for leaf in make.leaves if grads]
    assert [grad.dtype for grad in grads] == [leaf.dtype for leaf in make.leaves if grads]
    return mode.record
