"""MindSpeed's count of layers, which has the empty places of a pipeline in it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def without_empty_layers(argv: Sequence[str], places: str) -> tuple[list[str], list[str]]:
    """Let ``--num-layers``, in which MindSpeed counts empty layers, count those of the model; with notes of what changed.

    Chunks that are given by their number of layers are given by their own number, which stays.
    """
    total, stages = _number(argv, "--num-layers"), _number(argv, "--pipeline-model-parallel-size") or 1
    if total is None:
        return list(argv), []
    layers = total - len(set(places.split(",")))
    argv = _with_value(argv, "--num-layers", "--num-layers", layers)
    notes = [f"--num-layers {total} counts the empty places {places} of --noop-layers: the model has {layers} layers"]
    per_chunk = _number(argv, "--num-layers-per-virtual-pipeline-stage")
    if per_chunk:
        chunks = total // stages // per_chunk
        spelling = "--num-virtual-stages-per-pipeline-rank"
        argv = _with_value(argv, "--num-layers-per-virtual-pipeline-stage", spelling, chunks)
        notes.append(f"--num-layers-per-virtual-pipeline-stage {per_chunk} counts them too: it is {spelling} {chunks}")
    return list(argv), notes


def _number(argv: Sequence[str], flag: str) -> int | None:
    """The last value of a flag in both of its forms, if it is a whole number."""
    words = [word for token in argv for word in (token.split("=", 1) if token.startswith(f"{flag}=") else [token])]
    values = [value for name, value in pairwise(words) if name == flag and value.isdigit()]
    return int(values[-1]) if values else None


def _with_value(argv: Sequence[str], flag: str, spelling: str, value: int) -> list[str]:
    """The arguments with one value in the place of all that a flag has."""
    words = [word for token in argv for word in (token.split("=", 1) if token.startswith(f"{flag}=") else [token])]
    kept = [word for index, word in enumerate(words) if flag not in (word, words[index - 1] if index else "")]
    return [*kept, spelling, str(value)]
