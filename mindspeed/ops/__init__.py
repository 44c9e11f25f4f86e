"""Operators: each has a ``torch.library`` schema, a plain-torch reference, a shape kernel and a gradient.

``from mindspeed.ops import rms_norm`` gives the function, and imports torch only then.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mindspeed.ops import lcal_coc
    from mindspeed.ops.ffn import ffn
    from mindspeed.ops.fusion_attention import fusion_attention
    from mindspeed.ops.logit_statistics import logit_statistics
    from mindspeed.ops.npu_all_to_all_all_gather_bmm import npu_all_to_all_all_gather_bmm
    from mindspeed.ops.npu_bmm_reduce_scatter_all_to_all import npu_bmm_reduce_scatter_all_to_all
    from mindspeed.ops.npu_dropout_add_layer_norm import npu_dropout_add_layer_norm
    from mindspeed.ops.npu_fused_moe_token_permute import npu_fused_moe_token_permute
    from mindspeed.ops.npu_fused_moe_token_unpermute import npu_fused_moe_token_unpermute
    from mindspeed.ops.npu_gmm import npu_gmm
    from mindspeed.ops.npu_grouped_mat_mul_all_reduce import npu_grouped_mat_mul_all_reduce
    from mindspeed.ops.npu_groupmatmul_add_fp32 import npu_groupmatmul_add_fp32
    from mindspeed.ops.npu_matmul_add_fp32 import npu_matmul_add_fp32
    from mindspeed.ops.npu_mm_all_reduce_add_rms_norm import npu_mm_all_reduce_add_rms_norm
    from mindspeed.ops.npu_mm_all_reduce_add_rms_norm_ import npu_mm_all_reduce_add_rms_norm_
    from mindspeed.ops.npu_ring_attention_update import npu_ring_attention_update
    from mindspeed.ops.npu_rotary_position_embedding import npu_rotary_position_embedding
    from mindspeed.ops.quant_gmm import quant_gmm
    from mindspeed.ops.rms_norm import rms_norm
    from mindspeed.ops.swiglu import swiglu

__all__ = [
    "ffn",
    "fusion_attention",
    "lcal_coc",
    "logit_statistics",
    "npu_all_to_all_all_gather_bmm",
    "npu_bmm_reduce_scatter_all_to_all",
    "npu_dropout_add_layer_norm",
    "npu_fused_moe_token_permute",
    "npu_fused_moe_token_unpermute",
    "npu_gmm",
    "npu_grouped_mat_mul_all_reduce",
    "npu_groupmatmul_add_fp32",
    "npu_matmul_add_fp32",
    "npu_mm_all_reduce_add_rms_norm",
    "npu_mm_all_reduce_add_rms_norm_",
    "npu_ring_attention_update",
    "npu_rotary_position_embedding",
    "quant_gmm",
    "rms_norm",
    "swiglu",
]

OPERATORS: Final = tuple(__all__)
"""Public operators; each is a function in the module of the same name, and lcal_coc a module of functions."""

ALIASES: Final = {
    "npu_dropout_add_rms_norm": "npu_dropout_add_layer_norm",
    "rms_norm_residual": "rms_norm",
    "npu_gmm_v2": "npu_gmm",
    "npu_ffn": "ffn",
    "npu_quant_gmm": "quant_gmm",
    "npu_quant_gmm_v2": "quant_gmm",
    "npu_fusion_attention": "fusion_attention",
    "attention": "fusion_attention",
    "fusion_attention_grad": "fusion_attention",
    "npu_fusion_attention_grad": "fusion_attention",
    "logit_gradient": "logit_statistics",
}
"""Further public functions, and the modules that they are in."""


class _Operators(ModuleType):
    """The import system binds a submodule here under its name, which is also its operator's: the function wins."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OPERATORS and isinstance(value, ModuleType):
            module, value = value, getattr(value, name, value)
            for other in (other for other, owner in ALIASES.items() if owner == name):
                setattr(value, other, getattr(module, other))  # `ffn.npu_ffn`, as MindSpeed's modules are used
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Operators


def __getattr__(name: str) -> Any:
    if name not in OPERATORS and name not in ALIASES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{ALIASES.get(name, name)}")
    return getattr(module, name, module)


def __dir__() -> list[str]:
    return sorted({*globals(), *OPERATORS, *ALIASES})
