"""The core attention that layers are built with: whichever the specification names, with the shared mask."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from mindspeed.context_parallel.attention_mask import MaskRule, mask_of
from mindspeed.plugins import MindSpeedError, Problem, with_parts


class SharedMask:
    """Put before a core attention: self-attention that would be causal sees by the rule, whatever mask it is given.

    A core attention that calls the operator (flash-attention's) needs no tensor for a causal mask or a window.
    """

    def __init__(self, *args: Any, rule: MaskRule, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rule = rule
        self.needs_tensor = not getattr(self, "knows_documents", False)  # the attribute of modules that call the operator
        softmax: Any = self.scale_mask_softmax  # type: ignore[attr-defined]
        self.shares = self.attn_mask_type == AttnMaskType.causal  # type: ignore[attr-defined]
        if not self.shares or self.rule.kind == "causal":
            return
        if self.rule.width is not None and not self.needs_tensor:
            softmax.window_size = (self.rule.width - 1, 0)
        else:
            softmax.attn_mask_type = AttnMaskType.arbitrary  # the fused causal kernel reads no mask

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *rest: Any, **named: Any
    ) -> Tensor:
        """Compute attention as the core attention does, with the shared mask."""
        tokens = query.shape[0]
        if self.shares and tokens == key.shape[0]:
            if named.get("packed_seq_params") is not None and self.rule.kind != "causal":
                raise _refused(f"packed sequences are causal, and the shared mask is {self.rule.kind}")
            attention_mask = mask_of(self.rule, tokens, query.device)[None, None] if self._tensor else None
        result: Tensor = super().forward(query, key, value, attention_mask, *rest, **named)  # type: ignore[misc]
        return result

    @property
    def _tensor(self) -> bool:
        return self.needs_tensor or self.rule.kind not in ("causal", "sliding-window")


@lru_cache
def _sharing(attention: type) -> type:
    """The class of a core attention that has the shared mask as well."""
    return type(f"SharedMask{attention.__name__}", (SharedMask, attention), {"__module__": __name__})


def with_shared_mask(spec: Any, rule: MaskRule) -> Any:
    """Exchange every local core attention of a block's spec for one that has the mask."""

    def exchanged(name: str, part: Any) -> Any:
        attention = getattr(part, "module", part)
        if not isinstance(attention, type) or not issubclass(attention, DotProductAttention):
            return part
        params, submodules = getattr(part, "params", {}), getattr(part, "submodules", None)
        return ModuleSpec(_sharing(attention), {**params, "rule": rule}, submodules)

    return with_parts(spec, exchanged)


def _refused(sentence: str) -> MindSpeedError:
    name = "shared-attention-mask"
    return MindSpeedError([Problem("MS332", f"{name}: {sentence}", (name,), fix=f"remove {name}")])
