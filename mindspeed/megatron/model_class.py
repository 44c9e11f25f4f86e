"""Load the checkpoint of a GPTModel into a HybridModel of the same layers, and back, while it is read.

Megatron points the tensors of a HybridModel at the checkpoint of a GPTModel (`gpt_checkpoint_interop`, from 0.19 on). The way
back is its inverse: a GPTModel saves all layers under one key with the layer as first axis, a HybridModel saves each under its
number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase, ShardedObject, ShardedTensorFactory

from mindspeed.engine.planning.checkpoint_layers import model_of
from mindspeed.job.hybrid_pattern import ATTENTION, pattern_of
from mindspeed.problems import Problem, RunError, advice

_LAYER: Final = re.compile(r"decoder\.layers\.(?P<part>self_attention|input_layernorm|mlp|pre_mlp_layernorm)\b")
_FINAL_NORM: Final = ("decoder.final_layernorm.", "decoder.final_norm.")


def point_at_gpt(state: Mapping[str, Any], pattern: str) -> None:
    """Let the sharded state of a HybridModel, and of its optimizer, read the checkpoint of a GPTModel."""
    from megatron.core.dist_checkpointing import gpt_checkpoint_interop as interop

    maps = interop.gpt_compatible_layer_maps(pattern)
    for part in state.values():
        interop.retarget_sharded_state_dict_to_gpt_checkpoint(part, maps)


def point_at_hybrid(state: Mapping[str, Any], pattern: str) -> None:
    """Let the sharded state of a GPTModel, and of its optimizer, read the checkpoint of a HybridModel with this pattern."""
    layers = pattern_of(pattern).layers
    attention = [at for at, layer in enumerate(layers) if layer in ATTENTION]
    after = [at for at, layer in enumerate(layers) if layer not in ATTENTION]

    def pointed(entry: Any) -> Any:
        if not isinstance(entry, ShardedBase):
            return entry
        if entry.key.endswith("output_layer._extra_state"):  # of a HybridModel alone
            return LocalNonpersistentObject(entry.data)
        entry.key = entry.key.replace(*_FINAL_NORM)
        if (found := _LAYER.search(entry.key)) is None:
            return entry
        numbers = after if "mlp" in found["part"] else attention
        return _of_one_layer(entry, found.start("part"), numbers)

    for part in state.values():
        dict_list_map_inplace(pointed, part)


def _of_one_layer(entry: Any, at: int, numbers: list[int]) -> Any:
    """Remove the axis of layers from an entry, whose key gets the number of its layer at this place."""
    if isinstance(entry, ShardedTensorFactory):
        build = entry.build_fn

        def built(*args: Any) -> Any:
            parts = build(*args)
            dict_list_map_inplace(lambda part: _of_one_layer(part, at, numbers), parts)
            return parts

        entry.build_fn = built
        return entry
    layer, *offset = entry.global_offset
    entry.key = f"{entry.key[:at]}{numbers[layer]}.{entry.key[at:]}"
    entry.global_offset, entry.global_shape = tuple(offset), tuple(entry.global_shape[1:])
    if isinstance(entry, ShardedObject):
        entry.global_offset, entry.global_shape = entry.global_offset or (0,), entry.global_shape or (1,)
        return entry
    entry.axis_fragmentations = tuple(entry.axis_fragmentations[1:])
    entry.prepend_axis_num -= 1
    return entry


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
