"""A transformer layer with experts that runs chunk by chunk, and its place in Megatron's specs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from mindspeed import plugins as ms
from mindspeed.features.ampipe.attention import Heads, Segment, attend, heads_of, segments_of
from mindspeed.megatron.module_specs import with_parts
from mindspeed.moe.dispatchers import OverlappedAllToAll
from mindspeed.moe.transfer import Steps, finished

Route = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Give the probabilities [T, E] of a chunk and its routing map."""


class ChunkedRouting:
    """The router of a layer on the chunks of one micro-batch, whose auxiliary losses are of all chunks together.

    Each chunk is routed as it comes, without losses; the last one again with all before it, where Megatron attaches the losses.
    """

    def __init__(self, router: Any, chunks: int) -> None:
        self._router, self._chunks = router, chunks
        self._logits: list[Tensor] = []

    def route(self, x_SBH: Tensor) -> tuple[Tensor, Tensor]:
        """Give the probabilities of the next chunk and its routing map."""
        router = self._router
        router._maintain_float32_expert_bias()
        self._logits.append(router.gating(router.apply_input_jitter(x_SBH)))
        if len(self._logits) < self._chunks:
            with without_losses(router):
                probs, routing_map = router.routing(self._logits[-1])
                return probs, routing_map
        probs, routing_map = router.routing(torch.cat(self._logits))
        tokens = x_SBH.shape[0] * x_SBH.shape[1]
        return probs[-tokens:], routing_map[-tokens:]


@contextmanager
def without_losses(router: Any) -> Iterator[None]:
    """Have a router attach no losses, and count no tokens for the biases of experts."""
    before = router.training, router.enable_expert_bias
    router.training = router.enable_expert_bias = False
    try:
        yield
    finally:
        router.training, router.enable_expert_bias = before


def overlapped_steps(layer: Any, x_SBH: Tensor, route: Route) -> Steps:
    """Run a layer whose dispatcher posts its transfers, and pause where dispatch and return are under way.

    Dispatcher and shared experts keep the state of a call, so that each chunk has a copy of them around the same weights.
    """
    dispatcher = copy.copy(layer.token_dispatcher)
    if dispatcher.shared_experts is not None:
        dispatcher.shared_experts = copy.copy(dispatcher.shared_experts)
    probs, routing_map = route(x_SBH)
    rows, probs = dispatcher.dispatch_preprocess(x_SBH, routing_map, probs)
    rows, probs = dispatcher.token_dispatch(rows, probs)
    shared = layer.shared_experts(x_SBH) if layer.use_shared_expert and dispatcher.shared_experts is None else None
    yield
    answers, _ = layer.experts(*dispatcher.dispatch_postprocess(rows, probs))
    answers = dispatcher.combine_preprocess(answers)
    yield
    y_SBH: Tensor = dispatcher.combine_postprocess(dispatcher.token_combine(answers))
    return y_SBH if shared is None else y_SBH + shared


def pipelined(chunks: Sequence[Steps], relayed: bool = False) -> list[Tensor]:
    """Run all chunks to their first pause, then to their second, then to their ends, and give their results.

    The dispatch of a chunk is under way while the next one comes to its dispatch, the return of one while the next one's
    experts are computed. With ``relayed`` the dispatch is followed by a gather and the return preceded by a scatter, each with
    a pause of its own: what has arrived of a chunk is sent on after the computation of the next one.
    """
    computing = [*chunks, *chunks]
    for number, chunk in enumerate(computing):
        next(chunk)
        if relayed and number > 0:
            next(computing[number - 1])
    if relayed:
        next(chunks[-1])
    return [finished(chunk) for chunk in chunks]


class ChunkedLayer:
    """Stands before ``TransformerLayer``. Layers without experts run as they did."""

    def __init__(self: Any, *args: Any, parts: int, relayed: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parts, self.relayed = parts, relayed

    def forward(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Give the layer's output and the context. Inference runs as it did."""
        inference = kwargs.get("inference_context") is not None or kwargs.get("inference_params") is not None
        if inference or not isinstance(self.mlp, MoELayer):
            return super().forward(*args, **kwargs)  # type: ignore[misc,no-any-return]
        return self.forward_in_chunks(*args, **kwargs), kwargs.get("context")

    def forward_in_chunks(self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **inputs: Any) -> Tensor:
        """Run attention, experts and residuals of [S, B, H] by chunks; keys and values are of the whole sequence."""
        check_inputs(inputs)
        check_length(hidden_states.shape[0], self.parts)
        positions = {name: value for name, value in inputs.items() if name.startswith("rotary")}
        heads = heads_of(self.self_attention, self.input_layernorm(hidden_states), attention_mask, **positions)
        ranks = heads.query.shape[0] // hidden_states.shape[0]
        segments = segments_of(heads.query, ranks, self.parts)
        rows = torch.split(hidden_states, hidden_states.shape[0] // self.parts)
        experts = self.steps_of_experts()
        chunks = [self.chunk(heads, *chunk, experts) for chunk in zip(segments, rows, strict=True)]
        return torch.cat(pipelined(chunks, self.relayed))

    def steps_of_experts(self: Any) -> Callable[[Tensor], Steps]:
        """Give the experts of one micro-batch, as a function of the next chunk."""
        if hasattr(self.mlp, "steps"):  # of layers that run in steps themselves
            return partial(self.mlp.steps, chunks=self.parts, relayed=self.relayed)
        return partial(overlapped_steps, self.mlp, route=ChunkedRouting(self.mlp.router, self.parts).route)

    def chunk(self: Any, heads: Heads, segments: list[Segment], residual: Tensor, experts: Callable[[Tensor], Steps]) -> Steps:
        """Run one chunk from its attention to its output."""
        answers, bias = self.self_attention.linear_proj(attend(self.self_attention.core_attention, heads, segments))
        residual = self.add((answers, bias), residual, self.self_attn_bda)
        answers = yield from experts(self.pre_mlp_layernorm(residual))
        return self.add((answers, None), residual, self.mlp_bda)  # type: ignore[no-any-return]

    def add(self: Any, answers: tuple[Tensor, Tensor | None], residual: Tensor, module: Any) -> Tensor:
        """Add expert outputs with their bias and dropout to the residual."""
        with self.bias_dropout_add_exec_handler():
            fused = module(self.training, self.config.bias_dropout_fusion)
            return fused(answers, residual, self.hidden_dropout)  # type: ignore[no-any-return]


def with_chunks(spec: Any, parts: int, relayed: bool) -> Any:
    """Copy a spec with every transformer layer exchanged for one that runs in ``parts`` chunks.

    With ``relayed`` transfers of the tensor ranks that share experts are hidden too.
    """
    made: dict[type, type] = {}

    def exchanged(name: str, part: Any) -> Any:
        layer = getattr(part, "module", None)
        if not isinstance(part, ModuleSpec) or not isinstance(layer, type) or not issubclass(layer, TransformerLayer):
            return part
        if layer not in made:
            made[layer] = type(layer.__name__, (ChunkedLayer, layer), {"__module__": __name__})
        return replace(part, module=made[layer], params={**part.params, "parts": parts, "relayed": relayed})

    return with_parts(spec, exchanged)


def unfit_layers(feature: Any, chunks: Sequence[torch.nn.Module]) -> list[str]:
    """Name the layers of model chunks that cannot run in chunks of the sequence, and why."""
    layers = [layer for chunk in chunks for layer in chunk.modules() if isinstance(layer, ChunkedLayer)]
    return [text for layer in layers for text in _why_unfit(layer)]


def _why_unfit(layer: Any) -> list[str]:
    if not isinstance(layer.mlp, MoELayer):
        return []
    core = getattr(layer.self_attention, "core_attention", None)
    wrong = {
        (
            f"the core attention is {type(core).__name__}, but only Megatron's local one and that of flash-attention are "
            "supported"
        ): (not isinstance(core, DotProductAttention)),
        "cross-attention is not supported": not isinstance(layer.cross_attention, IdentityOp),
        f"the MoE layer uses {type(layer.mlp.token_dispatcher).__name__}, which has no asynchronous transfers": (
            not hasattr(layer.mlp, "steps") and not isinstance(layer.mlp.token_dispatcher, OverlappedAllToAll)
        ),
    }
    return [f"layer {layer.layer_number} cannot run in chunks: {text}" for text, holds in wrong.items() if holds]


def check_inputs(inputs: dict[str, Any]) -> None:
    """Raise MindSpeedError with MS304 for inputs of a layer that chunks do not have."""
    unknown = ("packed_seq_params", "padding_mask", "attention_bias", "context", "context_mask", "sequence_len_offset")
    _refuse(
        [
            f"a layer received the argument {name}, which its chunks do not support"
            for name in unknown
            if inputs.get(name) is not None
        ]
    )


def check_length(rows: int, parts: int) -> None:
    """Raise MindSpeedError with MS304 where the rows of a rank are not divisible by the chunks."""
    _refuse([f"the {rows} rows of a rank are not divisible by {parts} chunks"] if rows % parts else [])


def _refuse(sentences: list[str]) -> None:
    if sentences:
        problem = partial(ms.Problem, "MS304", features=("ampipe",), fix=ms.Fix.remove_feature("ampipe"))
        raise ms.MindSpeedError([problem(f"ampipe: {sentence}") for sentence in sentences])
