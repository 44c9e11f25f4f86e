"""`fusion_attention` on CUDA by torch's flash attention: no score matrix, no repeated key heads, packed sequences in one call.

Taken: bf16 and fp16, heads up to 256 wide, and what a query sees being a window: everything (no mask), or sparse modes 2, 3
and 4 with a mask, from queries that are not more than the keys. Biases and other masks run the reference. Dropout has the
random state that torch's kernel draws. Statistics are ``(logsumexp, 1)``. The kernel rounds the probabilities to the type of
its inputs.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from mindspeed.ops.attention_arguments import AttentionGradientInputs, AttentionOptions
from mindspeed.ops.attention_layout import Ranges, head_view, head_width, heads_like, lengths_of, padded_heads
from mindspeed.ops.fusion_attention import state_like
from mindspeed.ops.numerics import filled
from mindspeed.ops.registration import Kernel

_WIDEST: Final = 256
_ALL: Final = -1
"""A side of the window without a bound."""


@cache
def _drops() -> bool:
    """Return whether torch's kernel gives its random state as one tensor, as from 2.7 on."""
    return any(argument.name == "rng_state" for argument in torch.ops.aten._flash_attention_backward.default._schema.arguments)


class AttentionWindow(NamedTuple):
    """Query i sees key j if ``i + d - left <= j <= i + d + right``, d being keys minus queries; -1 is no bound."""

    left: int
    right: int


@lru_cache(maxsize=64)
def _device_takes(device: torch.device) -> bool:
    """Return whether torch has a flash kernel for this GPU: compute capability 8 or more. Other devices only ask beforehand."""
    if device.type != "cuda":
        return True
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def window(lengths: Ranges, masked: bool, options: AttentionOptions) -> AttentionWindow | None:
    """Express the visibility of keys as a window; None if the kernel does not have it."""
    if any(queries and not keys for queries, keys in lengths):
        return None
    if not masked:
        return AttentionWindow(_ALL, _ALL)
    if any(queries > keys for queries, keys in lengths):  # a row might see nothing, and the kernel bounds d + right by the keys
        return None
    if options.mode == 2 and all(queries == keys for queries, keys in lengths):
        return AttentionWindow(_ALL, 0)
    if options.mode == 3:
        return AttentionWindow(_ALL, 0)
    if options.mode == 4 and options.before >= 0 and options.after >= 0:
        longest = max(keys for _, keys in lengths)
        return AttentionWindow(*(_ALL if side >= longest else side for side in (options.before, options.after)))
    return None


class KernelInputs(NamedTuple):
    """Tensors as the kernel wants them, [B, S, N, D] or packed [T, N, D], and the rest of its arguments."""

    query: Tensor
    key: Tensor
    value: Tensor
    ends: tuple[Tensor | None, Tensor | None]
    longest: tuple[int, int]
    causal: bool
    sides: dict[str, Any]


def _supports(query: Tensor, key: Tensor, value: Tensor, pse: Tensor | None, mask: Tensor | None, *rest: Any) -> bool:
    options = AttentionOptions(*rest)
    if query.dtype not in (torch.bfloat16, torch.float16) or pse is not None:
        return False
    if options.keep_prob < 1 and not (options.keep_prob and _drops()):
        return False
    if not filled(query, key, value) or not _device_takes(query.device):
        return False
    seen = window(lengths_of(query, key, options), mask is not None, options)
    return seen is not None and max(_widths(query, key, value, options)) <= _WIDEST


def _supports_backward(dout: Tensor, *args: Any) -> bool:
    return _supports(*args[:5], *args[10:])


def _widths(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> list[int]:
    """Widths of the heads of queries and of values."""
    groups = heads_like(key, options.layout, query, options.heads)
    return [head_width(x, options.layout, heads) for x, heads in ((query, options.heads), (value, groups))]


def _call(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: AttentionOptions) -> KernelInputs:
    """The call of the kernel."""
    lengths, groups = lengths_of(query, key, options), heads_like(key, options.layout, query, options.heads)
    seen = window(lengths, mask is not None, options) or AttentionWindow(_ALL, _ALL)
    width = -(-max(_widths(query, key, value, options)) // 8) * 8
    heads = ((query, options.heads), (key, groups), (value, groups))
    views = [padded_heads(_view(x, options.layout, count), width) for x, count in heads]
    ends: tuple[Tensor | None, Tensor | None] = (None, None)
    if options.layout == "TND":
        lists = (options.q_ends or [], options.kv_ends or [])
        ends = tuple(torch.tensor([0, *known], dtype=torch.int32, device=query.device) for known in lists)  # type: ignore[assignment]
    longest = max(queries for queries, _ in lengths), max(keys for _, keys in lengths)
    causal = seen == AttentionWindow(_ALL, 0)
    sides = {"scale": options.scale}
    if not causal and seen != AttentionWindow(_ALL, _ALL):
        sides |= {"window_size_left": seen.left, "window_size_right": seen.right}
    return KernelInputs(views[0], views[1], views[2], ends, longest, causal, sides)


def _view(x: Tensor, layout: str, heads: int) -> Tensor:
    return x if layout == "TND" else head_view(x, layout, heads).transpose(1, 2)


def _in_layout(x: Tensor, width: int, layout: str) -> Tensor:
    """A result of the kernel, without what was padded, in the layout of the call."""
    x = x[..., :width]
    if layout == "BNSD":
        x = x.transpose(1, 2)
    elif layout == "SBH":
        x = x.transpose(0, 1)
    return (x.flatten(2) if layout in ("SBH", "BSH") else x).contiguous()


def forward(
    query: Tensor, key: Tensor, value: Tensor, pse: Tensor | None, mask: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result, statistics, [B, N, S, 1] or [T, N, 1], and the random state."""
    options = AttentionOptions(*rest)
    call, dropped = _call(query, key, value, mask, options), 1 - options.keep_prob
    out, logsumexp, state, *_ = torch.ops.aten._flash_attention_forward(
        call.query, call.key, call.value, *call.ends, *call.longest, dropped, call.causal, False, **call.sides
    )
    width = head_width(value, options.layout, heads_like(key, options.layout, query, options.heads))
    logsumexp = (logsumexp.t() if options.layout == "TND" else logsumexp)[..., None].contiguous()
    drawn = state.view(torch.int64) if dropped else state_like(query, options)
    return _in_layout(out, width, options.layout), logsumexp, torch.ones_like(logsumexp), drawn


def backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; the statistics may be any whose ``maximum + log(sum)`` is the logsumexp."""
    dout, query, key, value, _, mask, state, out, maximum, total, _, options = AttentionGradientInputs.of(*args)
    call, dropped = _call(query, key, value, mask, options), 1 - options.keep_prob
    maximum, total = maximum[..., 0], total[..., 0]
    # exp(logit - inf) is zero: a row that saw no key among all of which this is a block has no gradient
    logsumexp = torch.where(total > 0, maximum + total.log(), torch.inf)
    logsumexp = (logsumexp.t() if options.layout == "TND" else logsumexp).contiguous()
    sides = [padded_heads(_view(x, options.layout, options.heads), call.query.shape[-1]) for x in (dout, out)]
    drawn = query.new_empty(2, dtype=torch.uint64) if state is None else state.view(torch.uint64)
    generator = (drawn, query.new_empty((), dtype=torch.uint64))
    forward = (sides[0], *call[:3], sides[1], logsumexp, *call.ends, *call.longest)
    grads = torch.ops.aten._flash_attention_backward(*forward, dropped, call.causal, *generator, **call.sides)
    groups = heads_like(key, options.layout, query, options.heads)
    widths = [head_width(x, options.layout, n) for x, n in ((query, options.heads), (key, groups), (value, groups))]
    dq, dk, dv = (_in_layout(x, width, options.layout) for x, width in zip(grads, widths, strict=True))
    return dq, dk, dv, query.new_empty(0)


KERNELS: Final[dict[str, Kernel]] = {
    "fusion_attention": Kernel(forward, _supports),
    "fusion_attention_backward": Kernel(backward, _supports_backward),
}
