"""What a case is: a call of a public operator, with tensors of this device or that."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.ops.fusion_attention import LANES

BF16, FP16, FP32, INT8, INT32, INT64 = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.int8,
    torch.int32,
    torch.int64,
)
ANY, HALF, ONLY_BF16 = (FP32, BF16), (BF16, FP16), (BF16,)


@dataclass
class Make:
    """Where a case takes its tensors from: real ones on CPU, or fake ones on NPU under a `FakeTensorMode`.

    ``leaves`` are those that get a gradient, ``written`` those that backward writes to.
    """

    dtype: torch.dtype
    device: str
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    leaves: list[Tensor] = field(default_factory=list)
    written: list[Tensor] = field(default_factory=list)
    seed: int = 0

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Numbers that need no gradient."""
        self.seed += 1
        values = torch.randn(shape, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)
        return self.given(values.to(dtype or self.dtype))

    def leaf(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Numbers that need a gradient."""
        tensor = self.normal(*shape, dtype=dtype).requires_grad_()
        self.leaves.append(tensor)
        return tensor

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = INT64) -> Tensor:
        self.seed += 1
        values = torch.randint(low, high, shape, generator=torch.Generator().manual_seed(self.seed))
        return self.given(values.to(dtype))

    def given(self, values: Tensor) -> Tensor:
        # not .to(): a fake tensor of one number keeps it, and would take it along to a device that is not there
        return values if self.device == "cpu" else torch.empty(values.shape, dtype=values.dtype, device=self.device)


@dataclass(frozen=True)
class Case:
    """A call of a public operator; ``operator`` is the file with its kernels, ``backward`` None where it has no gradient.

    ``forward`` and ``backward`` are the operators of torch_npu that must run, in order; ``group``: it communicates;
    ``values``: torch_npu's documentation says what comes out.
    """

    operator: str
    what: str
    call: Callable[[Make], Callable[[], Any]]
    forward: tuple[str, ...]
    backward: tuple[str, ...] | None = None
    types: tuple[torch.dtype, ...] = ANY
    group: bool = False
    values: bool = True

    def __str__(self) -> str:
        return f"{self.operator}-{self.what}"


Call = Callable[[], Any]


def statistics(m: Make, *shape: int, unseen: int = 1) -> tuple[Tensor, Tensor]:
    """A maximum and a sum, repeated; the first ``unseen`` rows saw nothing."""
    maximum, total = m.normal(*shape, 1, dtype=FP32), m.normal(*shape, 1, dtype=FP32).abs() + 0.5
    nothing = m.given(torch.arange(shape[0]).view(-1, *(1 for _ in shape)) < unseen)
    lean = maximum.masked_fill(nothing, -torch.inf), total.masked_fill(nothing, 0)
    return tuple(x.expand(*x.shape[:-1], LANES).contiguous() for x in lean)  # type: ignore[return-value]
