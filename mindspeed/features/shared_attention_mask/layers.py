"""The core attention that layers are built with: the one that the specification names, with the shared mask."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec

from mindspeed import plugins as ms
from mindspeed.context_parallel.attention_mask import mask_of
from mindspeed.context_parallel.mask_rules import MaskRule
from mindspeed.megatron.module_specs import with_parts
from mindspeed.problems import Fix

_INPUTS: Final = ("query", "key", "value", "attention_mask", "attn_mask_type", "attention_bias", "packed_seq_params")
"""The parameters of a core attention's forward, in order."""


class SharedMask:
    """Replaces a core attention class in a spec and builds a module of that class, which follows the mask rule."""

    def __new__(cls, *args: Any, attention: type, rule: MaskRule, **kwargs: Any) -> Any:
        module: Any = attention(*args, **kwargs)
        if module.attn_mask_type == AttnMaskType.causal:
            _share(module, rule)
        return module


def _share(attention: Any, rule: MaskRule) -> None:
    """Have self-attention see by the rule, whatever mask it is given.

    A core attention that calls the operator (flash-attention's) needs no tensor for a causal mask or a window.
    """
    by_operator = getattr(attention, "knows_documents", False)  # the attribute of modules that call it
    if rule.width is not None and by_operator:
        attention.scale_mask_softmax.window_size = (rule.width - 1, 0)
    elif rule.kind != "causal":
        attention.scale_mask_softmax.attn_mask_type = AttnMaskType.arbitrary  # the fused causal kernel reads no mask
    needs_tensor = not by_operator or rule.kind not in ("causal", "sliding-window")
    attention.register_forward_pre_hook(partial(_with_mask, rule, needs_tensor), with_kwargs=True)


def _with_mask(
    rule: MaskRule, needs_tensor: bool, attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give the inputs as they came, in order or by name, with the shared mask."""
    inputs = {**dict(zip(_INPUTS, args, strict=False)), **kwargs}
    query = inputs["query"]
    tokens = query.shape[0]
    if tokens == inputs["key"].shape[0]:
        if inputs.get("packed_seq_params") is not None and rule.kind != "causal":
            raise _refused(f"packed sequences need a causal mask, but the shared mask is {rule.kind}")
        inputs["attention_mask"] = mask_of(rule, tokens, query.device)[None, None] if needs_tensor else None
    in_order = _INPUTS[: len(args)]
    return tuple(inputs[name] for name in in_order), {name: inputs[name] for name in inputs if name not in in_order}


def with_shared_mask(spec: Any, rule: MaskRule) -> Any:
    """Exchange every local core attention of a block's spec for one that has the mask."""

    def exchanged(name: str, part: Any) -> Any:
        attention = getattr(part, "module", part)
        if not isinstance(attention, type) or not issubclass(attention, DotProductAttention):
            return part
        params, submodules = getattr(part, "params", {}), getattr(part, "submodules", None)
        return ModuleSpec(SharedMask, {**params, "attention": attention, "rule": rule}, submodules)

    return with_parts(spec, exchanged)


def _refused(sentence: str) -> ms.MindSpeedError:
    name = "shared-attention-mask"
    return ms.MindSpeedError([ms.Problem("MS332", f"{name}: {sentence}", (name,), fix=Fix.remove_feature(name))])
