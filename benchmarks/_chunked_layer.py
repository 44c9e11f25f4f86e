"""One transformer layer with experts under a plan on every rank: results, bytes kept, exposed transfers, hooks of gradients."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import mindspeed
from benchmarks._moe_layer import Kept
from benchmarks._virtual_time import virtual_time
from mindspeed.megatron.module_specs import with_parts
from mindspeed.moe import transfer

TOKENS, HIDDEN, EXPERTS = 24, 32, 4
MASK = 2048 * 2048
"""Bytes of the mask that the operator of attention keeps for all layers."""
Fault = Literal["", "wait at the post", "offset"]


@dataclass(frozen=True)
class Run:
    """What is run: attention over all tokens or causal, a planted fault, and the number of a wait that is left out."""

    full: bool = False
    fault: Fault = ""
    skip: int | None = None


@dataclass
class Measured:
    """Results and gradients of a rank, and their cost. ``hooks`` are calls of each gradient hook in one backward."""

    values: list[Tensor]
    kept: int
    exposed: float
    hooks: set[int]
    waits: int


def plan(
    parts: int,
    *more: str,
    layer: str = "deepspeed-moe",
    tp: int = 1,
    cpu: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
) -> Any:
    """A plan for two ranks with experts (x ``tp``): the layer in ``parts`` chunks, whole with 0."""
    settings: dict[str, dict[str, Any]] = {"device-emulation": cpu or {}}
    if layer == "deepspeed-moe":
        settings[layer] = {"groups": 4 * tp, "min_capacity": 1}
    if parts:
        settings["ampipe"] = {"parts": parts}
    if "moe-shared-experts" in more:
        settings["moe-shared-experts"] = {"count": 1}
    names = [layer, *(["ampipe"] if parts else []), *more]
    world = {"ep": 2, "tp": tp, "num_experts": EXPERTS, "world_size": 2 * tp, "seq_length": TOKENS, "micro_batch_size": 1}
    return mindspeed.plan(features=names, settings=settings, world=world, platform="cpu", without=list(without))


def build(full: bool, tokens: int = TOKENS, hidden: int = HIDDEN, width: int = 48) -> Any:
    """The layer, with weights that depend on the place of an expert in the whole layer alone."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mindspeed.workbench.verification.placement import fill_weights

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        ffn_hidden_size=width,
        num_attention_heads=4,
        num_query_groups=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_ffn_hidden_size=width,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        perform_initialization=False,
    )
    spec = get_gpt_layer_local_spec(EXPERTS)
    if full:
        spec = with_parts(spec, lambda name, part: unmasked(part, AttnMaskType.no_mask))
    model = GPTModel(config, spec, 64, tokens).cuda()
    fill_weights([model], 7)
    return model.decoder.layers[0]


def unmasked(part: Any, kind: Any) -> Any:
    """A spec of self-attention that sees all tokens, any other part as it is."""
    params = getattr(part, "params", None) or {}
    return replace(part, params={**params, "attn_mask_type": kind}) if "attn_mask_type" in params else part


def measure(how: Run) -> Measured:
    """Forward and backward of one micro-batch. A chunk's projection takes as long as its dispatch."""
    layer = build(how.full)
    counts: Counter[str] = Counter()
    nodes = []  # which autograd keeps only as long as somebody does
    for name, parameter in layer.named_parameters():
        nodes.append(parameter.expand_as(parameter).grad_fn.next_functions[0][0])
        nodes[-1].register_hook(lambda *grads, name=name: counts.update([name]))
    rank, ranks = torch.distributed.get_rank(), layer.self_attention.pg_collection.tp.size()
    draw = torch.Generator("cpu").manual_seed(100 + rank)
    x, dy = (torch.randn(TOKENS // ranks, 1, HIDDEN, generator=draw) for _ in range(2))
    x.requires_grad_()
    kept = Kept(layer)
    sent = TOKENS * 2 * HIDDEN * 4 / 2
    with planted(how) as waits, virtual_time(TOKENS * HIDDEN * HIDDEN, sent) as schedule:
        with kept:
            y = layer(x, attention_mask=None)[0]
        y.backward(dy)
    values = [y.detach(), x.grad, *(p.grad for p in layer.parameters())]
    return Measured(values, kept.bytes, schedule.total("wait"), set(counts.values()), waits[0])


def seconds(tokens: int, hidden: int, clock: str, passes: int = 12) -> tuple[float, float]:
    """The least of a forward and backward pass of a layer in one piece and in its chunks, in turn, by a clock of `time`."""
    from mindspeed.features.ampipe.layers import ChunkedLayer

    layer = build(False, tokens, hidden, hidden)
    x = torch.randn(tokens, 1, hidden).requires_grad_()
    times: tuple[list[float], list[float]] = ([], [])
    read = getattr(time, clock)
    for _ in range(passes):
        for run, took in zip((super(ChunkedLayer, layer).forward, layer), times, strict=True):
            torch.distributed.barrier()
            start = read()
            run(x, attention_mask=None)[0].sum().backward()
            took.append(read() - start)
    return min(times[0][1:]), min(times[1][1:])


@contextmanager
def planted(how: Run) -> Iterator[list[int]]:
    """Plant a fault, and count the waits."""
    waits, wait, post = [0], transfer.PendingCollective.wait, transfer.post_all_to_all

    def counted(pending: transfer.PendingCollective) -> Tensor:
        if not pending._works:
            return wait(pending)
        waits[0] += 1
        return pending.received if waits[0] - 1 == how.skip else wait(pending)

    def posted(*args: Any) -> transfer.PendingCollective:
        pending = post(*args)
        if how.fault == "wait at the post":
            pending.wait()
        return pending

    with (
        patch.object(transfer.PendingCollective, "wait", counted),
        patch.object(transfer, "post_all_to_all", posted),
        _moved(how.fault),
    ):
        yield waits


@contextmanager
def _moved(fault: Fault) -> Iterator[None]:
    """Let the queries of a chunk begin one row too early."""
    if fault != "offset":
        yield
        return
    from mindspeed.features.ampipe import attention, layers

    def early(*args: Any) -> Any:
        chunks = attention.segments_of(*args)
        return [chunks[0], *([replace(segment, start=segment.start - 1) for segment in chunk] for chunk in chunks[1:])]

    with patch.object(layers, "segments_of", early):
        yield
