"""Old flags of layers: their count, which has the empty places of a pipeline in it, and when or what of them to recompute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from mindspeed.megatron_lm.old_flags.argument_words import ArgumentWords

_POLICIES: Final = {"recompute_in_advance": "--recompute-in-advance", "recompute_in_bubble": "--recompute-in-bubble"}
_COUNTS: Final = ("recompute_norm_num_layers", "recompute_activation_function_num_layers")
_TAKEN: Final = {
    "--recompute-granularity": 1,
    "--recompute-method": 1,
    "--recompute-num-layers": 1,
    "--recompute-modules": "+",
    "--recompute-activations": 0,
}


def without_empty_layers(argv: Sequence[str], places: str) -> tuple[list[str], list[str]]:
    """Let ``--num-layers``, in which MindSpeed counts empty layers, count those of the model; with notes of what changed.

    Chunks that are given by their number of layers are given by their own number, which stays.
    """
    made = ArgumentWords(list(argv))
    total, stages = made.number("--num-layers"), made.number("--pipeline-model-parallel-size") or 1
    if total is None:
        return made.words, []
    layers = total - len(set(places.split(",")))
    made.take("--num-layers", 1)
    made.put("--num-layers", str(layers))
    notes = [f"--num-layers {total} counts the empty places {places} of --noop-layers: the model has {layers} layers"]
    per_chunk = made.number("--num-layers-per-virtual-pipeline-stage")
    if per_chunk:
        made.take("--num-layers-per-virtual-pipeline-stage", 1)
        words = ["--num-virtual-stages-per-pipeline-rank", str(total // stages // per_chunk)]
        made.put(*words)
        notes.append(f"--num-layers-per-virtual-pipeline-stage {per_chunk} counts them too: it is {' '.join(words)}")
    return made.words, notes


def without_second_policy(words: Sequence[str], values: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Let a feature that decides when layers are recomputed replace Megatron's arguments, which MindSpeed gives beside it."""
    made = ArgumentWords(list(words))
    flag = next((flag for dest, flag in _POLICIES.items() if values.get(dest)), None)
    if flag is None or (made.number("--pipeline-model-parallel-size") or 1) == 1:
        return made.words, []
    taken = [name for name, count in _TAKEN.items() if made.take(name, count) is not None]  # type: ignore[arg-type]
    return made.words, [f"{flag} takes the place of {', '.join(taken)}: it recomputes every layer"] if taken else []


def within_a_chunk(words: Sequence[str], values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Values without a number of layers above that of a model chunk: MindSpeed recomputes all of them then."""
    made, kept, notes = ArgumentWords(list(words)), dict(values), []
    layers, stages = made.number("--num-layers"), made.number("--pipeline-model-parallel-size") or 1
    chunk = made.number("--num-layers-per-virtual-pipeline-stage")
    if chunk is None and layers is not None:
        chunk = layers // stages // (made.number("--num-virtual-stages-per-pipeline-rank") or 1)
    for dest in _COUNTS:
        count = values.get(dest)
        if chunk is not None and isinstance(count, int) and count > chunk:
            kept.pop(dest)
            notes.append(f"--{dest.replace('_', '-')} {count} is all of the {chunk} layers of a model chunk")
    return kept, notes
