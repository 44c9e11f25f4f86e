"""What the tests of context-parallel attention run on every rank, and the dense attention they are held to."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.context_parallel import costs
from mindspeed.context_parallel.layout import Layout
from mindspeed.problems import MindSpeedError


def function_of(name: str) -> Any:
    """A function by its name, ``package.module:function``."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def attend(
    name: str, layout: Layout, tensors: Sequence[Tensor], keywords: dict[str, Any], mask: Tensor | None = None
) -> list[Tensor]:
    """Result and gradients of this rank's share: ``tensors`` are query, key, value and the gradient of the result, whole."""
    rank = dist.get_rank()
    *inputs, dout = (layout.take(x, rank).clone() for x in tensors)
    q, k, v = (x.requires_grad_() for x in inputs)
    more = {} if mask is None else {"mask": layout.take(mask, rank, mask.dim() - 2)}
    out = function_of(name)(q, k, v, dist.group.WORLD, **keywords, **more)
    out.backward(dout)
    return [out.detach(), q.grad, k.grad, v.grad]


def dense(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None, scale: float | None = None, bias: Tensor | None = None
) -> Tensor:
    """Attention by the formula, in the type of its inputs, of [tokens, batch, heads, width]; hidden rows give zeros."""
    repeat = q.shape[2] // k.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    probs = scores.softmax(-1).nan_to_num(0.0)
    return (probs @ v).permute(2, 0, 1, 3)


def causal(tokens: int) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(1)


def document_numbers(ends: list[int]) -> Tensor:
    """The document of each token."""
    return torch.bucketize(torch.arange(ends[-1]), torch.tensor(ends), right=True)


def made(
    tokens: int, batch: int, heads: int, groups: int, width: int, value_width: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Query, key, value and the gradient of the result."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(heads, width), (groups, width), (groups, value_width), (heads, value_width)]
    return [torch.randn(tokens, batch, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def shape(tensors: Any, world: int) -> costs.Attention:
    """What the closed forms take of a rank's share of these tensors."""
    q, k, v, _ = tensors
    tokens = q.shape[0] // world * q.shape[1]
    return costs.Attention(tokens, q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.element_size())


def reference(tensors: Sequence[Tensor], *args: Any) -> list[Tensor]:
    """Result and gradients of the dense formula in fp64."""
    q, k, v = (x.detach().double().clone().requires_grad_() for x in tensors[:3])
    out = dense(q, k, v, *args)
    out.backward(tensors[3].double())
    return [out.detach(), q.grad, k.grad, v.grad]


TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2.5e-2}


def assert_like_dense(shards: Sequence[Sequence[Tensor]], layout: Layout, expected: Sequence[Tensor]) -> None:
    """The shares of all ranks, put together, against the dense result and gradients."""
    for number, wanted in enumerate(expected):
        got = layout.restore([shard[number] for shard in shards])
        tolerance = TOLERANCE[got.dtype]
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance * max(1.0, float(wanted.abs().max())))


def refusals(name: str, cases: Sequence[tuple[Sequence[Tensor], dict[str, Any]]]) -> list[str]:
    """The messages of calls that are refused."""
    messages = []
    for tensors, keywords in cases:
        try:
            function_of(name)(*tensors, dist.group.WORLD, **keywords)
        except MindSpeedError as error:
            messages.append(str(error))
        else:
            messages.append("not refused")
    return messages
