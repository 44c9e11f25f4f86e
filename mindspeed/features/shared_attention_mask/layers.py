"""The core attention that layers are built with: whichever the specification names, with the shared mask."""

from __future__ import annotations

from typing import Any, ClassVar

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from mindspeed.context_parallel.attention_mask import MaskRule, mask_of
from mindspeed.features.shared_attention_mask.feature import SharedAttentionMaskArgs
from mindspeed.plugins import MindSpeedError, Problem, with_modules


class SharedMask:
    """Put before a core attention: self-attention that would be causal sees by the rule, whatever mask it is given.

    A core attention that calls the operator (flash-attention's) needs no tensor for a causal mask or a window.
    """

    rule: ClassVar[MaskRule]
    needs_tensor: ClassVar[bool]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
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
        """As the core attention's own."""
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


class _Sharing(dict[type, Any]):
    """Finds for every core attention the class that has the shared mask as well."""

    def __init__(self, rule: MaskRule) -> None:
        super().__init__()
        self.rule = rule

    def get(self, cls: type, default: Any = None) -> Any:
        if not issubclass(cls, DotProductAttention):
            return default
        if cls not in self:
            needs_tensor = not getattr(cls, "knows_documents", False)  # what the attention operator's own modules say
            members = {"rule": self.rule, "needs_tensor": needs_tensor, "__module__": __name__}
            self[cls] = type(f"SharedMask{cls.__name__}", (SharedMask, cls), members)
        return self[cls]


def with_shared_mask(spec: Any, args: SharedAttentionMaskArgs) -> Any:
    """The spec of a block with every local core attention exchanged for one that has the mask."""
    return with_modules(spec, _Sharing(MaskRule(args.kind, args.width, args.prefix)))


def _refused(sentence: str) -> MindSpeedError:
    name = "shared-attention-mask"
    return MindSpeedError([Problem("MS332", f"{name}: {sentence}", (name,), fix=f"take out {name}")])
