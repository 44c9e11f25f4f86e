"""The bias in Megatron's layers: given to core attentions that take one, added to the scores of Megatron's own."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec, get_module
from torch import Tensor

from mindspeed.context_parallel.position_bias import Form, PositionBias, slopes_of
from mindspeed.megatron.module_specs import class_for, is_unpatched, with_parts

if TYPE_CHECKING:
    from mindspeed.features.alibi.feature import Alibi, AlibiArgs


def with_position_bias(spec: Any, config: Any, args: AlibiArgs) -> Any:
    """The spec of a block whose core attentions all have the bias."""
    form: Form = "signed" if args.signed else "root" if args.kind == 3 else "distance"
    bias = PositionBias(slopes_of(config.num_attention_heads), form, matrix=args.kind == 0, fill=args.fill)
    return with_parts(spec, lambda name, part: _biased(part, bias, args.fused) if name == "core_attention" else part)


def attention_without_bias(feature: Alibi, spec: Any, config: Any) -> Iterator[str]:
    """Name the core attentions of a spec that add no bias, and that no feature exchanges for one that does."""
    exchanged = feature.world.cp > 1 or is_unpatched(DotProductAttention.forward, DotProductAttention)
    found: set[str] = set()

    def look(name: str, part: Any) -> Any:
        if name == "core_attention":
            attention = get_module(part)
            is_local = issubclass(attention, DotProductAttention)
            if not (is_local and exchanged) and "position_bias" not in inspect.signature(attention).parameters:
                found.add(f"{attention.__module__}.{attention.__qualname__}")
        return part

    with_parts(spec, look)
    for attention in sorted(found):
        yield f"the core attention of the model, {attention}, cannot add a position bias"


def _biased(part: Any, bias: PositionBias, fused: bool) -> ModuleSpec:
    """The spec of a core attention that has the bias."""
    attention = get_module(part)
    if not fused:
        attention = class_for(attention, {DotProductAttention: BiasedScores})
    given = part if isinstance(part, ModuleSpec) else ModuleSpec(module=attention)
    return ModuleSpec(attention, {**given.params, "position_bias": bias}, given.submodules)


class BiasedScores(DotProductAttention):  # type: ignore[misc]  # megatron has no types
    """Megatron's own core attention, with the bias added to its matrix of scores before the softmax."""

    def __init__(self, *args: Any, position_bias: PositionBias, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        own = position_bias.of_rank(kwargs.get("pg_collection") or kwargs.get("model_comm_pgs"))
        self.scale_mask_softmax: Any = BiasedSoftmax(self.scale_mask_softmax, own)


class BiasedSoftmax(torch.nn.Module):
    """Megatron's scaled and masked softmax of biased scores [batch, heads, queries, keys], not by its fused kernels."""

    def __init__(self, softmax: Any, bias: PositionBias) -> None:
        super().__init__()
        self.softmax = softmax
        self.bias = bias

    def forward(self, scores: Tensor, mask: Tensor | None, *offset: Any) -> Tensor:
        kind = torch.promote_types(scores.dtype, torch.float32) if self.softmax.softmax_in_fp32 else scores.dtype
        queries, keys = scores.shape[-2:]
        bias = self.bias.values(queries, keys, scores.device, kind)
        # Megatron multiplies by the scale after this, having divided the scores by it.
        biased = scores + (bias if self.softmax.scale is None else bias / self.softmax.scale)
        probabilities: Tensor = self.softmax.forward_torch_softmax(biased, mask, *offset)
        return probabilities
