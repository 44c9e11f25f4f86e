"""One MoE layer of Megatron under a plan on every rank, and what a forward and backward pass of it costs."""

from __future__ import annotations

import ctypes
import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import mindspeed
from benchmarks._virtual_time import virtual_time
from mindspeed.memory.model_layers import tracker_state
from mindspeed.memory.recomputation import generators
from mindspeed.moe import transfer
from mindspeed.ops.process_groups import PendingCollective
from mindspeed.pipeline.executor import in_thread_like_this
from mindspeed.pipeline.paired_transfers import LAYER_STATES, TRACKER_NAME
from mindspeed.platforms.collectives import traffic
from mindspeed.process.place import PLACE
from mindspeed.process.turns import in_turns


@dataclass(frozen=True)
class Shape:
    """A layer: ``width`` is that of an expert, ``hot`` adds to the router's logit of expert 0 so that a rank starves."""

    tokens: int = 24
    hidden: int = 32
    width: int = 48
    experts: int = 8
    topk: int = 2
    shared: int = 0
    hot: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """Results and gradients of two micro-batches in flight, and the costs of the first; ``time`` is virtual."""

    values: list[Tensor]
    rows: int
    kept: int
    held: int
    sent: dict[str, int]
    exposed: float
    time: float


def plan_of(
    *features: str, settings: dict[str, dict[str, Any]] | None = None, ep: int = 2, level: int = 2, **world: Any
) -> Any:
    """A plan for experts on ``ep`` ranks of the CPU."""
    known = {"ep": ep, "num_experts": 8, "world_size": ep * world.get("tp", 1), "linear_bias": False} | world
    return mindspeed.plan(features=list(features), settings=settings or {}, world=known, platform="cpu", level=level)


def build(shape: Shape, dtype: torch.dtype) -> Any:
    """The layer with weights that depend on the place of an expert in the whole layer alone."""
    return build_layers(shape, dtype, 1)[0].mlp


def build_layers(shape: Shape, dtype: torch.dtype, count: int) -> Any:
    """The layers of a model, attention included, with such weights."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mindspeed.workbench.verification.placement import fill_weights

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=count,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.width,
        num_attention_heads=4,
        num_moe_experts=shape.experts,
        moe_router_topk=shape.topk,
        moe_ffn_hidden_size=shape.width,
        moe_shared_expert_intermediate_size=shape.shared or None,
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        perform_initialization=False,
        params_dtype=dtype,
        **shape.options,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(shape.experts), 64, 64).cuda()
    fill_weights([model], 7)
    return model.decoder.layers


def run(shape: Shape, dtype: torch.dtype = torch.float32, delay: float = 0.0) -> Outcome:
    """Forward of two micro-batches, then backward of both in the same order; ``delay`` is that of `virtual_time`."""
    layer = build(shape, dtype)
    if shape.hot:
        original = layer.router.gating
        push = torch.zeros(shape.experts)
        push[: shape.topk] = shape.hot
        layer.router.gating = lambda x: original(x) + push
    rank = torch.distributed.get_rank()
    draw = torch.Generator("cpu").manual_seed(100 + rank)
    inputs = [torch.randn(shape.tokens, 1, shape.hidden, generator=draw).to(dtype).requires_grad_() for _ in range(2)]
    grads = [torch.randn(shape.tokens, 1, shape.hidden, generator=draw).to(dtype) for _ in range(2)]
    received: list[int] = []
    experts = layer.experts
    if hasattr(experts, "products"):
        products = experts.products
        experts.products = lambda x, *rest: received.append(len(x)) or products(x, *rest)  # type: ignore[func-returns-value]
    kept = Kept(layer)
    unit = shape.tokens * shape.topk * shape.hidden * shape.width
    size = torch.finfo(dtype).bits // 8 * shape.tokens * shape.topk * shape.hidden / 2
    with virtual_time(unit, size, delay) as schedule, traffic() as forth, kept:
        first = layer(inputs[0])[0]
    rows = sum(received)
    second = layer(inputs[1])[0]
    with virtual_time(unit, size, delay) as backward, traffic() as back:
        torch.autograd.backward(first, grads[0])
    torch.autograd.backward(second, grads[1])
    schedule.events += backward.events
    values = [first.detach(), second.detach(), *(x.grad for x in inputs), *(p.grad for p in layer.parameters())]
    sent: dict[str, int] = {}
    for (kind, _), count in (*forth.items(), *back.items()):
        sent[kind] = sent.get(kind, 0) + count.bytes
    ended = schedule.now + backward.now
    return Outcome(values, rows, kept.bytes, kept.held, sent, schedule.exposed, ended)  # type: ignore[arg-type]


class PairedPasses:
    """A backward and a forward pass of four layers, which take turns or follow one another."""

    def __init__(self, shape: Shape) -> None:
        self.layers = build_layers(shape, torch.float32, 4)
        self.mask = torch.zeros(1, 1, shape.tokens, shape.tokens, dtype=torch.bool)
        draw = torch.Generator("cpu").manual_seed(100 + torch.distributed.get_rank())
        self.inputs = [torch.randn(shape.tokens, 1, shape.hidden, generator=draw).requires_grad_() for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x, attention_mask=self.mask)
        return x

    def run(self, first: Tensor, together: bool) -> None:
        """Run the backward pass of an output, and the forward pass of other tokens."""
        if together:
            states = (*generators(), tracker_state(), TRACKER_NAME, LAYER_STATES, PLACE)
            in_turns(lambda: self.forward(self.inputs[1]), in_thread_like_this(lambda: first.sum().backward()), states)
        else:
            first.sum().backward()
            self.forward(self.inputs[1])


def run_paired(shape: Shape, together: bool) -> tuple[float, float]:
    """The share of transfer time that a rank waits, and the virtual time, of a backward and a forward pass."""
    passes = PairedPasses(shape)
    first = passes.forward(passes.inputs[0])
    unit = shape.tokens * shape.topk * shape.hidden * shape.width
    with virtual_time(unit, 4 * shape.tokens * shape.topk * shape.hidden / 2) as schedule:
        passes.run(first, together)
    return schedule.exposed, schedule.now


def processor_times(shape: Shape, keeps_freed: bool, rounds: int = 12) -> tuple[float, float]:
    """The least processor time of both passes one after the other, and in turns.

    With ``keeps_freed`` the C library returns no freed memory to the system, as the allocator of an accelerator does.
    """
    if keeps_freed:
        library = ctypes.CDLL(None)
        for option, value in (_TRIM_THRESHOLD, 2**31 - 1), (_MMAP_MAX, 0), (_ARENA_MAX, 1):
            library.mallopt(option, value)
    torch.set_num_threads(1)
    passes = PairedPasses(shape)
    least = [math.inf, math.inf]
    for turn in range(2 * rounds):
        first = passes.forward(passes.inputs[0])
        torch.distributed.barrier()
        start = time.process_time()
        passes.run(first, together=bool(turn % 2))
        least[turn % 2] = min(least[turn % 2], time.process_time() - start)
        del first
    return least[0], least[1]


_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
"""Options of glibc's mallopt."""


@contextmanager
def waits_at_once() -> Iterator[None]:
    """Wait right after every post of a transfer."""

    def eager(original: Callable[..., PendingCollective]) -> Callable[..., PendingCollective]:
        def post(*args: Any) -> PendingCollective:
            pending = original(*args)
            pending.wait()
            return pending

        return post

    with ExitStack() as stack:
        for name in ("post_all_to_all", "post_all_gather", "post_reduce_scatter"):
            stack.enter_context(patch.object(transfer, name, eager(getattr(transfer, name))))
        yield


def run_eagerly(shape: Shape) -> Outcome:
    """The outcome where nothing is hidden."""
    with waits_at_once():
        return run(shape)


def run_counting_pairs(shape: Shape) -> tuple[Outcome, int, int]:
    """The outcome, and the pairs of a token and a rank that this rank sent and received with the first micro-batch."""
    from mindspeed.moe.dispatchers import OncePerRankCall

    chosen: list[Tensor] = []
    original = OncePerRankCall.__init__

    def watched(call: OncePerRankCall, *args: Any) -> None:
        original(call, *args)
        chosen.append(call._chosen)

    with patch.object(OncePerRankCall, "__init__", watched):
        outcome = run(shape)
    by_rank = chosen[0].view(shape.tokens, torch.distributed.get_world_size(), -1).any(-1)
    received = torch.empty_like(pairs := by_rank.sum(0))
    torch.distributed.all_to_all_single(received, pairs)
    return outcome, int(pairs.sum()), int(received.sum())


class Kept:
    """Bytes that autograd saves in a block, each storage once, without weights; ``held`` adds what else lives on after it, in
    the contexts of autograd's nodes and elsewhere."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.bytes = self.held = 0
        self._layer = layer
        self._saved: list[Tensor] = []

    def __enter__(self) -> Kept:
        self._before = _living()
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        weights, before = _storages(list(self._layer.parameters())), _storages(self._before)
        saved = _storages(self._saved)
        self.bytes = sum(size for start, size in saved.items() if start not in weights)
        self.held = min(self._living_since(before, saved) for _ in range(3))

    def _living_since(self, before: dict[int, int], saved: dict[int, int]) -> int:
        """Bytes that live now and did not before. A thread of gloo lets go of its tensors shortly after the transfer ended."""
        time.sleep(0.02)
        after = _storages(_living()) | saved
        return sum(size for start, size in after.items() if start not in before)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._saved.append(tensor)
        return tensor


def _living() -> list[Tensor]:
    """Every tensor that Python code holds now."""
    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), Tensor)]


def _storages(tensors: list[Tensor]) -> dict[int, int]:
    """Bytes of each storage, by its address."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
