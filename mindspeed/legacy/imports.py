"""Import names of MindSpeed that do not exist here: what takes the place of each.

A last-resort finder (installed by ``import mindspeed``, asked only about modules that nobody else finds) raises the error.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from mindspeed.plugins.near_names import near_names, suggestion
from mindspeed.plugins.problems import MindSpeedError, Problem


class OldNameError(MindSpeedError, ModuleNotFoundError):
    """MS112. An ImportError too, so that consumers that try an import go on as before."""


OLD_MODULES: Final[dict[str, tuple[str, ...] | str]] = {
    "mindspeed.auto_settings": ("auto-tuning",),
    "mindspeed.core": "the features of mindspeed take its place; 'mindspeed features list' shows them",
    "mindspeed.core.auto_parallel": ("auto-tuning",),
    "mindspeed.core.context_parallel": ("context-parallel",),
    "mindspeed.core.context_parallel.adaptive_context_parallel": ("adaptive-cp",),
    "mindspeed.core.context_parallel.adaptor": ("context-parallel", "flash-attention"),
    "mindspeed.core.context_parallel.get_batch_utils": ("context-parallel", "eod-reset"),
    "mindspeed.core.context_parallel.model_parallel_utils": ("context-parallel", "ring-attention", "hybrid-attention"),
    "mindspeed.core.context_parallel.ring_context_parallel": ("ring-attention",),
    "mindspeed.core.context_parallel.ulysses_context_parallel": ("ulysses-attention",),
    "mindspeed.core.distributed": ("async-ddp", "distributed-optimizer"),
    "mindspeed.core.fusions": "the operators of mindspeed.ops take its place",
    "mindspeed.core.fusions.fused_bias_swiglu": ("swiglu",),
    "mindspeed.core.fusions.fused_rms_norm": ("rms-norm",),
    "mindspeed.core.fusions.fused_rope": ("rotary-embedding",),
    "mindspeed.core.fusions.grouped_matmul": ("moe-grouped-gemm",),
    "mindspeed.core.fusions.ring_attn_update": ("ring-attention-update",),
    "mindspeed.core.fusions.rms_norm": ("rms-norm",),
    "mindspeed.core.megatron_basic": "the platform layer does this for every plan",
    "mindspeed.core.memory": ("recompute", "adaptive-recompute", "swap-attention"),
    "mindspeed.core.optimizer": ("distributed-optimizer", "reuse-fp32-param", "swap-optimizer"),
    "mindspeed.core.parallel_state": "the hook groups_created of a feature makes groups beside Megatron's",
    "mindspeed.core.pipeline_parallel": ("pipeline-parallel", "virtual-pipeline", "nano-pipe"),
    "mindspeed.core.pipeline_parallel.noop_layers": ("noop-layers",),
    "mindspeed.core.qat": "nothing takes its place yet",
    "mindspeed.core.ssm": "nothing takes its place yet",
    "mindspeed.core.tensor_parallel": ("tensor-parallel", "sequence-parallel"),
    "mindspeed.core.tensor_parallel.ascend_turbo": ("mc2",),
    "mindspeed.core.tensor_parallel.lcal_coc": ("coc",),
    "mindspeed.core.tensor_parallel.random": ("activation-recompute", "norm-recompute"),
    "mindspeed.core.tensor_parallel.tp_2d": ("tensor-parallel-2d",),
    "mindspeed.core.tensor_parallel_y_union_cp": ("tensor-parallel-2d",),
    "mindspeed.core.transformer.moe": ("expert-parallel", "moe-alltoall-overlap", "moe-allgather-overlap"),
    "mindspeed.fsdp": "nothing takes its place yet",
    "mindspeed.lite": "operators are in mindspeed.ops, also without Megatron",
    "mindspeed.mindspore": "nothing takes its place yet",
    "mindspeed.model": ("shared-attention-mask", "eod-reset"),
    "mindspeed.moe": ("deepspeed-moe",),
    "mindspeed.ops.fusion_attention_v2": "mindspeed.ops.fusion_attention takes its place",
    "mindspeed.ops.gmm": "mindspeed.ops.npu_gmm takes its place",
    "mindspeed.ops.npu_moe_token_permute": "mindspeed.ops.npu_fused_moe_token_permute takes its place",
    "mindspeed.ops.npu_moe_token_unpermute": "mindspeed.ops.npu_fused_moe_token_unpermute takes its place",
    "mindspeed.ops.npu_groupmatmul_add": "mindspeed.ops.npu_groupmatmul_add_fp32 takes its place",
    "mindspeed.ops.npu_matmul_add": "mindspeed.ops.npu_matmul_add_fp32 takes its place",
    "mindspeed.te": "Megatron's local layers are used, and features act on them",
    "mindspeed.te.pytorch.attention": ("context-parallel", "flash-attention"),
    "mindspeed.utils": ("context-parallel", "eod-reset"),
}
"""Old modules by prefix, of which the longest counts: the features that take its place, or a sentence."""

_FEATURES: Final = Path(__file__).resolve().parents[1] / "features"


def explain(missing: str) -> OldNameError | None:
    """The error for an import name that nobody found; None for a name that was never MindSpeed's."""
    prefix = name = _imported_name(missing)
    while prefix not in OLD_MODULES and "." in prefix:
        prefix = prefix.rpartition(".")[0]
    if prefix not in OLD_MODULES and not name.startswith("mindspeed.ops."):
        return None
    fix = replacement(prefix) if prefix in OLD_MODULES else _near_operator(name)
    error = OldNameError([Problem("MS112", f"{name} is an import name of MindSpeed that does not exist here", fix=fix)])
    error.name = name
    return error


def _imported_name(name: str) -> str:
    """The module whose import asked for ``name``, which may be only a package above it."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        inner = frame.f_locals.get("name") if frame.f_code.co_filename.startswith("<frozen importlib") else None
        if isinstance(inner, str) and inner.startswith(f"{name}."):
            name = inner
    return name


def replacement(prefix: str) -> str:
    """Describe the replacement of an old module of the table."""
    features = OLD_MODULES[prefix]
    if isinstance(features, str):
        return features
    there = [name for name in features if (_FEATURES / name.replace("-", "_")).is_dir()]
    later = [name for name in features if name not in there]
    parts = [f"--features {','.join(there)} takes its place" if there else ""]
    parts.append(f"{' and '.join(later)} will, and {'are' if len(later) > 1 else 'is'} not there yet" if later else "")
    return "; ".join(filter(None, parts))


def _near_operator(name: str) -> str:
    from mindspeed.ops import OPERATORS

    near = near_names(name.rpartition(".")[2], OPERATORS, cutoff=0.6)
    return suggestion([f"mindspeed.ops.{operator}" for operator in near], "mindspeed.ops has no such operator yet")
