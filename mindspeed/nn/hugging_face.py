"""Attention of this package in models of Hugging Face's transformers, which is not imported here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from mindspeed.nn.context_parallel import ContextParallelAttention
from mindspeed.nn.dense_attention import Attention
from mindspeed.ops.errors import refuse

_NAME = "transformers_attention"


def transformers_attention(core: Attention | ContextParallelAttention) -> Callable[..., tuple[Tensor, None]]:
    """Return ``core`` as a function for ``transformers.AttentionInterface.register``.

    >>> AttentionInterface.register("ring", transformers_attention(ContextParallelAttention(mesh)))
    >>> model.set_attn_implementation("ring")

    The function gets query, key and value as [batch, heads, tokens, width] and returns [batch, tokens, heads, width]. Dropout
    follows the mode of the model. Raises OperatorError where a model requests other attention than that of ``core``: a mask,
    another scale, dropout, window or causality, or a cap of the scores.
    """

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        core.train(module.training)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        default = query.shape[-1] ** -0.5
        own = {"scale": core.scale or default, "dropout": core.dropout if module.training else 0.0}
        own |= {"window": getattr(core, "window", None), "causal": core.causal, "softcap": None}
        requested = {"scale": scaling or default, "dropout": dropout}
        requested |= {"window": sliding_window, "causal": causal, "softcap": softcap}
        for name in (name for name, value in own.items() if requested[name] != value):
            fix = f"set {name} of the registered module, or of the model's configuration"
            refuse(f"{_NAME}: the model requests {name}={requested[name]}, but the module has {own[name]}", fix)
        if attention_mask is not None:
            fix = "remove attention_mask from the batch; a causal model needs none for padding behind the text"
            refuse(f"{_NAME}: the batch has an attention mask", fix)
        return core(*(x.transpose(1, 2) for x in (query, key, value))), None

    return attend
