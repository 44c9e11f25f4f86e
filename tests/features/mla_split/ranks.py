"""What a rank of the tests computes: its heads of latent attention beside all heads of one process."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Linear
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed.features.mla_split.layers import _projected
from mindspeed.features.mla_split.projections import HeadWidths

WIDTHS = HeadWidths(heads=3, key=5, rope=2, value=4)
LATENT, TOKENS = 6, 8


def inputs() -> list[Tensor]:
    """Return latent vectors, rotary parts of keys, and the weight of keys and values."""
    made = torch.Generator().manual_seed(0)
    shapes = [(TOKENS, 2, LATENT), (TOKENS, 2, 1, WIDTHS.rope), (WIDTHS.heads * (WIDTHS.key + WIDTHS.value), LATENT)]
    return [torch.randn(shape, generator=made, dtype=torch.float64, requires_grad=True) for shape in shapes]


def concatenated(x: Tensor, positions: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values as Megatron makes them."""
    made = (x @ weight.t()).view(*x.shape[:-1], WIDTHS.heads, WIDTHS.key + WIDTHS.value)
    key, value = made.split([WIDTHS.key, WIDTHS.value], dim=-1)
    return torch.cat([key, positions.expand(*key.shape[:-1], -1)], dim=-1), value


class _Products(TorchDispatchMode):
    """Note each product among other events."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.mm.default:
            self.events.append("product")
        return function(*args, **(kwargs or {}))


@contextmanager
def noted() -> Iterator[list[str]]:
    """Note products and collectives in the order in which they begin, with the bytes that a rank hands over."""
    events: list[str] = []

    def noting(name: str, run: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(f"{name} {args[min(1, len(args) - 1)].nbytes}")
            return run(*args, **kwargs)

        return call

    names = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter", "all_reduce": "sum"}
    with ExitStack() as stack:
        for function, name in names.items():
            stack.enter_context(patch.object(dist, function, noting(name, getattr(dist, function))))
        stack.enter_context(_Products(events))
        yield events


def _turn(x: Tensor, angles: Tensor) -> Tensor:
    return x * angles


def beside_one_rank(sequence_parallel: bool) -> tuple[float, list[str]]:
    """Return the largest difference of this rank's results and gradients, and the order of products and collectives."""
    group, rank = dist.group.WORLD, dist.get_rank()
    x, positions, weight = inputs()
    made = torch.Generator().manual_seed(1)
    of_queries = torch.randn(WIDTHS.heads * (WIDTHS.key + WIDTHS.rope), LATENT, generator=made, dtype=torch.float64)
    angles = torch.randn(TOKENS, 1, 1, WIDTHS.rope, generator=made, dtype=torch.float64)

    def one(scale: int) -> list[Tensor]:
        query = (x @ (of_queries * scale).t()).view(TOKENS, 2, WIDTHS.heads, -1)
        turned = _turn(query[..., WIDTHS.key :], angles)
        key, value = concatenated(x, _turn(positions, angles), weight * scale)
        return [torch.cat([query[..., : WIDTHS.key], turned], dim=-1), key, value]

    both = [one(number + 1) for number in range(2)]
    whole = torch.autograd.grad(sum(t.square().sum() for made in both for t in made), [x, positions], retain_graph=True)
    (of_weight,) = torch.autograd.grad(sum(t.square().sum() for t in both[rank]), [weight])

    def linear(rows: Tensor) -> Linear:
        layer = Linear(*rows.t().shape, bias=False, dtype=torch.float64)
        layer.weight = torch.nn.Parameter(rows.detach() * (rank + 1))
        layer.tp_group, layer.sequence_parallel, layer.gradient_accumulation_fusion = group, sequence_parallel, False
        return layer

    config = SimpleNamespace(
        q_lora_rank=LATENT,
        sequence_parallel=sequence_parallel,
        qk_head_dim=WIDTHS.key,
        qk_pos_emb_head_dim=WIDTHS.rope,
        v_head_dim=WIDTHS.value,
    )
    layers = linear(of_queries), linear(weight)
    attention = SimpleNamespace(
        config=config,
        tp_group=group,
        linear_q_up_proj=layers[0],
        linear_kv_up_proj=layers[1],
        num_attention_heads_per_partition=WIDTHS.heads,
    )
    own = slice(rank * TOKENS // 2, (rank + 1) * TOKENS // 2) if sequence_parallel else slice(None)
    q, kv, rotary = (t.detach()[own].clone().requires_grad_() for t in (x, x, positions.squeeze(-2)))
    with noted() as events:
        mine = _projected(attention, _turn, q, kv, rotary, angles)
        gradients = torch.autograd.grad(
            sum(t.square().sum() for t in mine), [q, kv, rotary, *(layer.weight for layer in layers)]
        )
    found = [*mine, gradients[0] + gradients[1], gradients[2], gradients[4] * (rank + 1)]
    wanted = [*both[rank], whole[0][own], whole[1].squeeze(-2)[own], of_weight]
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)), events
