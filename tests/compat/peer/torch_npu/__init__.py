"""A stand-in for torch_npu, for MindSpeed's own tests on the CPU: the calls that they compare with, in plain torch.

Importing it puts the cpu platform in force. Tensors of the device ``npu`` are tensors of the CPU.
"""

import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from mindspeed import registry
from mindspeed.engine.runtime import session

if session.current() is None:
    os.environ["MINDSPEED_REPORT"] = ""
    registry.activate(registry.plan(platform="cpu", level=0))


class _OnTheHost(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("npu"):
            kwargs["device"] = "cpu"
        args = tuple("cpu" if isinstance(value, str) and value.startswith("npu") else value for value in args)
        return function(*args, **kwargs)


_mode = _OnTheHost()
_mode.__enter__()

torch.Tensor.npu = lambda self, *args, **kwargs: self  # type: ignore[attr-defined]
torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
torch.nn.Module.npu = lambda self, *args, **kwargs: self  # type: ignore[attr-defined]
torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
torch.npu = npu = SimpleNamespace(  # type: ignore[attr-defined]
    is_available=lambda: True,
    device_count=lambda: 8,
    current_device=lambda: 0,
    set_device=lambda device: None,
    synchronize=lambda: None,
    get_device_name=lambda device=0: "Ascend910B",
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
)


torch.cuda.device_count = lambda: 8  # type: ignore[assignment]

_set_start_method = torch.multiprocessing.set_start_method


def _forked(method: str, force: bool = False) -> None:
    """Start processes with what this one has imported: eight of them import torch for a minute."""
    _set_start_method("fork", force=force)


torch.multiprocessing.set_start_method = _forked


class _Named:
    """A backend of a process group under the name that operators find the group by."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def get_hccl_comm_name(self, rank: int) -> str:
        return self.group.group_name


dist.ProcessGroup._get_backend = lambda self, device: _Named(self)  # type: ignore[method-assign]


def npu_fusion_attention(query: Any, key: Any, value: Any, head_num: int, input_layout: str, **kwargs: Any) -> Any:
    from mindspeed.ops import fusion_attention

    for old, new in (("pre_tockens", "pre_tokens"), ("next_tockens", "next_tokens")):
        if old in kwargs:
            kwargs[new] = kwargs.pop(old)
    return fusion_attention(query, key, value, head_num, input_layout, **kwargs)


def npu_mm_all_reduce_base(x1: Any, x2: Any, hcom: str, reduce_op: str = "sum", dequant_scale: Any = None) -> Any:
    """Multiply and sum over ranks in fp32: a second rounding to bfloat16 is more than the tests allow."""
    product = x1.float() @ x2.float() * (1.0 if dequant_scale is None else dequant_scale.float())
    dist.all_reduce(product)
    return product


def npu_add_rms_norm(x: Any, residual: Any, gamma: Any, epsilon: float) -> Any:
    total = x.float() + residual.float()
    scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon)
    return (total * scale * gamma.float()).to(gamma.dtype), scale, total.to(residual.dtype)


def npu_grouped_matmul(
    x: Any, weight: Any, bias: Any = None, group_list: Any = None, split_item: int = 0, **kwargs: Any
) -> Any:
    if group_list is None:
        biases = bias if bias is not None else [None] * len(x)
        return [torch.nn.functional.linear(a, b.t(), c) for a, b, c in zip(x, weight, biases, strict=False)]
    ends = torch.as_tensor(group_list).tolist()
    parts = torch.tensor_split(x[0], ends[:-1])
    return [torch.cat([a @ b for a, b in zip(parts, weight, strict=False)])]
