"""Features as modules of plain torch, for a trainer without Megatron: no plan and no global state.

``from mindspeed.nn import RMSNorm`` imports torch and the mechanism only then. Tensors are [batch, tokens, ...], as torch's
``batch_first`` has them. Modules that communicate take a ``DeviceMesh`` of one dimension, or a process group.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mindspeed.nn.activation import SwiGLU as SwiGLU
    from mindspeed.nn.context_parallel import ContextParallelAttention as ContextParallelAttention
    from mindspeed.nn.dense_attention import Attention as Attention
    from mindspeed.nn.dense_attention import alibi_slopes as alibi_slopes
    from mindspeed.nn.dense_attention import attention as attention
    from mindspeed.nn.hugging_face import transformers_attention as transformers_attention
    from mindspeed.nn.linear import ColumnParallelLinear as ColumnParallelLinear
    from mindspeed.nn.linear import RowParallelLinear as RowParallelLinear
    from mindspeed.nn.loss import LinearCrossEntropyLoss as LinearCrossEntropyLoss
    from mindspeed.nn.moe import MoE as MoE
    from mindspeed.nn.moe import TopKRouter as TopKRouter
    from mindspeed.nn.norm import RMSNorm as RMSNorm
    from mindspeed.nn.rotary import RotaryEmbedding as RotaryEmbedding

_MODULES: Final = {
    "Attention": "dense_attention",
    "alibi_slopes": "dense_attention",
    "attention": "dense_attention",
    "ColumnParallelLinear": "linear",
    "ContextParallelAttention": "context_parallel",
    "LinearCrossEntropyLoss": "loss",
    "MoE": "moe",
    "RMSNorm": "norm",
    "RotaryEmbedding": "rotary",
    "RowParallelLinear": "linear",
    "SwiGLU": "activation",
    "TopKRouter": "moe",
    "transformers_attention": "hugging_face",
}
"""The submodule of each public name."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
