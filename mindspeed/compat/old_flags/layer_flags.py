"""Old flags of layers: their count, which has the empty places of a pipeline in it, and when or what of them to recompute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mindspeed.megatron_lm.argument_words import ArgumentWords, Count

_POLICIES: Final = {"recompute_in_advance": "--recompute-in-advance", "recompute_in_bubble": "--recompute-in-bubble"}
_COUNTS: Final = ("recompute_norm_num_layers", "recompute_activation_function_num_layers")
_TAKEN: Final[dict[str, Count]] = {
    "--recompute-granularity": 1,
    "--recompute-method": 1,
    "--recompute-num-layers": 1,
    "--recompute-modules": "+",
    "--recompute-activations": 0,
}


def without_empty_layers(made: ArgumentWords, places: str) -> None:
    """Let ``--num-layers``, in which MindSpeed counts empty layers, count those of the model; with notes of what changed.

    Chunks that are given by their number of layers are given by their own number, which stays.
    """
    total, stages = made.number("--num-layers"), made.number("--pipeline-model-parallel-size") or 1
    if total is None:
        return
    layers = total - len(set(places.split(",")))
    made.take("--num-layers", 1)
    made.put("--num-layers", str(layers))
    text = f"includes the no-op positions {places} of --noop-layers: the model has {layers} layers"
    made.notes.append(f"--num-layers {total} {text}")
    per_chunk = made.number("--num-layers-per-virtual-pipeline-stage")
    if per_chunk:
        made.take("--num-layers-per-virtual-pipeline-stage", 1)
        words = ["--num-virtual-stages-per-pipeline-rank", str(total // stages // per_chunk)]
        made.put(*words)
        made.notes.append(f"--num-layers-per-virtual-pipeline-stage {per_chunk} includes them too: it is {' '.join(words)}")


def without_second_policy(made: ArgumentWords, values: Mapping[str, Any]) -> None:
    """Let a feature that decides when layers are recomputed replace Megatron's arguments, which MindSpeed gives in addition."""
    flag = next((flag for dest, flag in _POLICIES.items() if values.get(dest)), None)
    if flag is None or (made.number("--pipeline-model-parallel-size") or 1) == 1:
        return
    if taken := [name for name, count in _TAKEN.items() if made.take(name, count) is not None]:
        made.notes.append(f"{flag} replaces {', '.join(taken)}: it recomputes every layer")


def within_a_chunk(made: ArgumentWords, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values without a number of layers above that of a model chunk: MindSpeed recomputes all of them then."""
    kept = dict(values)
    layers, stages = made.number("--num-layers"), made.number("--pipeline-model-parallel-size") or 1
    chunk = made.number("--num-layers-per-virtual-pipeline-stage")
    if chunk is None and layers is not None:
        chunk = layers // stages // (made.number("--num-virtual-stages-per-pipeline-rank") or 1)
    for dest in _COUNTS:
        count = values.get(dest)
        if chunk is not None and isinstance(count, int) and count > chunk:
            kept.pop(dest)
            made.notes.append(f"--{dest.replace('_', '-')} {count} covers all {chunk} layers of a model chunk")
    return kept
