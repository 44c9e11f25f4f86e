"""Load the checkpoint of a HybridModel in a job of Megatron-LM with the GPTModel of the same layers: Megatron-LM refuses it."""

from __future__ import annotations

from copy import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mindspeed.engine.planning.checkpoint_layers import model_of
from mindspeed.job.hybrid_pattern import ATTENTION, pattern_of
from mindspeed.problems.fixes import advice
from mindspeed.problems.problem import Problem, RunError


def pattern_for_gpt(folder: Path, args: Any) -> str:
    """Return the pattern of a HybridModel whose checkpoint a job with a GPTModel loads; empty for all other jobs.

    Raises RunError with MS613 where the pattern is no row of pairs, of attention and what follows it.
    """
    has_no_hybrid = find_spec("megatron.core.models.hybrid") is None
    if has_no_hybrid or args.hybrid_layer_pattern or model_of(folder) != "HybridModel":
        return ""
    from megatron.core.dist_checkpointing import load_common_state_dict

    text: str = load_common_state_dict(folder)["args"].hybrid_layer_pattern
    pattern = pattern_of(text)
    kinds = [layer in ATTENTION for layer in pattern.layers]
    if pattern.predictions or kinds != [True, False] * (len(kinds) // 2):
        what = f"the checkpoint contains a HybridModel with the pattern {text}, which no GPTModel has"
        fix = f"resume with pretrain_hybrid.py and --hybrid-layer-pattern '{text}'"
        raise RunError([Problem("MS613", what, where=str(folder), fix=advice(fix))])
    return text


def point_at_pattern(state: dict[str, Any], pattern: str) -> None:
    """Let the sharded state of models and optimizer read the checkpoint of a HybridModel with this pattern."""
    from mindspeed.megatron.model_class import point_at_hybrid

    point_at_hybrid({key: value for key, value in state.items() if key.startswith(("model", "optimizer"))}, pattern)


def as_gpt(content: dict[str, Any], pattern: str) -> None:
    """Replace the arguments in a checkpoint's content by those of the GPTModel with the same layers."""
    content["args"] = args = copy(content["args"])
    args.hybrid_layer_pattern, args.num_layers = None, pattern_of(pattern).count(ATTENTION)
