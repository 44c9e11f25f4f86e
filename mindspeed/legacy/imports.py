"""Import names of MindSpeed that do not exist here: what takes the place of each.

A last-resort finder (installed by ``import mindspeed``, asked only about modules that nobody else finds) raises the error.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final, NamedTuple

from mindspeed.plugins.near_names import near_names, suggestion
from mindspeed.plugins.problems import MindSpeedError, Problem


class OldNameError(MindSpeedError, ModuleNotFoundError):
    """MS112. An ImportError too, so that consumers that try an import go on as before."""


class Replacement(NamedTuple):
    """Name the replacement of an old module and all below it: features of the framework, or a sentence."""

    features: tuple[str, ...] = ()
    instead: str = ""


def _features(*names: str) -> Replacement:
    return Replacement(names)


OLD_MODULES: Final[dict[str, Replacement]] = {
    "mindspeed.auto_settings": _features("auto-tuning"),
    "mindspeed.core": Replacement(instead="the features of mindspeed take its place; 'mindspeed features list' shows them"),
    "mindspeed.core.auto_parallel": _features("auto-tuning"),
    "mindspeed.core.context_parallel": _features("context-parallel"),
    "mindspeed.core.context_parallel.adaptive_context_parallel": _features("adaptive-cp"),
    "mindspeed.core.context_parallel.adaptor": _features("context-parallel", "flash-attention"),
    "mindspeed.core.context_parallel.get_batch_utils": _features("context-parallel", "eod-reset"),
    "mindspeed.core.context_parallel.model_parallel_utils": _features("context-parallel", "ring-attention", "hybrid-attention"),
    "mindspeed.core.context_parallel.ring_context_parallel": _features("ring-attention"),
    "mindspeed.core.context_parallel.ulysses_context_parallel": _features("ulysses-attention"),
    "mindspeed.core.distributed": _features("async-ddp", "distributed-optimizer"),
    "mindspeed.core.fusions": Replacement(instead="the operators of mindspeed.ops take its place"),
    "mindspeed.core.fusions.fused_bias_swiglu": _features("swiglu"),
    "mindspeed.core.fusions.fused_rms_norm": _features("rms-norm"),
    "mindspeed.core.fusions.fused_rope": _features("rotary-embedding"),
    "mindspeed.core.fusions.grouped_matmul": _features("moe-grouped-gemm"),
    "mindspeed.core.fusions.ring_attn_update": _features("ring-attention-update"),
    "mindspeed.core.fusions.rms_norm": _features("rms-norm"),
    "mindspeed.core.megatron_basic": Replacement(instead="the platform layer does this for every plan"),
    "mindspeed.core.memory": _features("recompute", "adaptive-recompute", "swap-attention"),
    "mindspeed.core.optimizer": _features("distributed-optimizer", "reuse-fp32-param", "swap-optimizer"),
    "mindspeed.core.parallel_state": Replacement(instead="the hook groups_created of a feature makes groups beside Megatron's"),
    "mindspeed.core.pipeline_parallel": _features("pipeline-parallel", "virtual-pipeline", "nano-pipe"),
    "mindspeed.core.pipeline_parallel.noop_layers": _features("noop-layers"),
    "mindspeed.core.qat": Replacement(),
    "mindspeed.core.ssm": Replacement(),
    "mindspeed.core.tensor_parallel": _features("tensor-parallel", "sequence-parallel"),
    "mindspeed.core.tensor_parallel.ascend_turbo": _features("mc2"),
    "mindspeed.core.tensor_parallel.lcal_coc": _features("coc"),
    "mindspeed.core.tensor_parallel.random": _features("activation-recompute", "norm-recompute"),
    "mindspeed.core.tensor_parallel.tp_2d": _features("tensor-parallel-2d"),
    "mindspeed.core.tensor_parallel_y_union_cp": _features("tensor-parallel-2d"),
    "mindspeed.core.transformer.moe": _features("expert-parallel", "moe-alltoall-overlap", "moe-allgather-overlap"),
    "mindspeed.fsdp": Replacement(),
    "mindspeed.lite": Replacement(instead="operators are in mindspeed.ops, also without Megatron"),
    "mindspeed.mindspore": Replacement(),
    "mindspeed.model": _features("shared-attention-mask", "eod-reset"),
    "mindspeed.moe": _features("deepspeed-moe"),
    "mindspeed.ops.fusion_attention_v2": Replacement(instead="mindspeed.ops.fusion_attention takes its place"),
    "mindspeed.ops.gmm": Replacement(instead="mindspeed.ops.npu_gmm takes its place"),
    "mindspeed.ops.npu_moe_token_permute": Replacement(instead="mindspeed.ops.npu_fused_moe_token_permute takes its place"),
    "mindspeed.ops.npu_moe_token_unpermute": Replacement(instead="mindspeed.ops.npu_fused_moe_token_unpermute takes its place"),
    "mindspeed.ops.npu_groupmatmul_add": Replacement(instead="mindspeed.ops.npu_groupmatmul_add_fp32 takes its place"),
    "mindspeed.ops.npu_matmul_add": Replacement(instead="mindspeed.ops.npu_matmul_add_fp32 takes its place"),
    "mindspeed.te": Replacement(instead="Megatron's local layers are used, and features act on them"),
    "mindspeed.te.pytorch.attention": _features("context-parallel", "flash-attention"),
    "mindspeed.utils": _features("context-parallel", "eod-reset"),
}
"""Old modules by prefix; the longest that matches speaks."""

_PACKAGE: Final = Path(__file__).resolve().parents[1]


def explain(missing: str) -> OldNameError | None:
    """The error for an import name that nobody found; None for a name that was never MindSpeed's."""
    prefix = name = _wanted(missing)
    while prefix not in OLD_MODULES and "." in prefix:
        prefix = prefix.rpartition(".")[0]
    if prefix not in OLD_MODULES and not name.startswith("mindspeed.ops."):
        return None
    fix = replacement(prefix) if prefix in OLD_MODULES else _near_operator(name)
    error = OldNameError([Problem("MS112", f"{name} is an import name of MindSpeed that does not exist here", fix=fix)])
    error.name = name
    return error


def _wanted(name: str) -> str:
    """The module whose import asked for ``name``, which may be only a package above it."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        asked = frame.f_locals.get("name") if frame.f_code.co_filename.startswith("<frozen importlib") else None
        if isinstance(asked, str) and asked.startswith(f"{name}."):
            name = asked
    return name


def replacement(prefix: str) -> str:
    """Describe the replacement of an old module of the table."""
    place = OLD_MODULES[prefix]
    if not place.features:
        return place.instead or "nothing takes its place yet"
    there = [name for name in place.features if (_PACKAGE / "features" / name.replace("-", "_")).is_dir()]
    later = [name for name in place.features if name not in there]
    parts = [f"--features {','.join(there)} takes its place" if there else ""]
    parts.append(f"{' and '.join(later)} will, and {'are' if len(later) > 1 else 'is'} not there yet" if later else "")
    return "; ".join(filter(None, parts))


def _near_operator(name: str) -> str:
    from mindspeed.ops import OPERATORS

    near = near_names(name.rpartition(".")[2], OPERATORS, cutoff=0.6)
    return suggestion([f"mindspeed.ops.{operator}" for operator in near], "mindspeed.ops has no such operator yet")
