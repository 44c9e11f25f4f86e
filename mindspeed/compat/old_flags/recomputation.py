"""Flags by which MindSpeed changes what Megatron's arguments of recomputation mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mindspeed.megatron_lm.argument_words import ArgumentWords, Count, problem_of_flags
from mindspeed.problems import Fix

PER_RANK: Final = "--enable-recompute-layers-per-pp-rank"
_GRANULARITY, _METHOD, _LAYERS = "--recompute-granularity", "--recompute-method", "--recompute-num-layers"
_FULL: Final[dict[str, Count]] = {_GRANULARITY: 1, _METHOD: 1, _LAYERS: 1}
_ALL: Final[dict[str, Count]] = {**_FULL, "--recompute-modules": "+", "--recompute-activations": 0}
_AHEAD, _BUBBLE = "--recompute-in-advance", "--recompute-in-bubble"
_COUNTS: Final = ("recompute_norm_num_layers", "recompute_activation_function_num_layers")
_ATTENTION, _PARTS, _NORMS = (
    "self_attention",
    ("linear_qkv", "core_attention", "linear_proj"),
    ("input_norm", "post_attention_norm"),
)
"""Names of modules in ``--swap-modules``: all of attention, its parts, and what is not offloaded."""
Settings = dict[str, dict[str, Any]]


def translate_recomputation(made: ArgumentWords, values: Mapping[str, Any]) -> tuple[dict[str, Any], Settings]:
    """Return the values of flags that are left, and settings of features that replace arguments of recomputation."""
    per_rank = made.take(PER_RANK, 0) is not None
    left = _within_a_chunk(made, values, per_rank)
    modules = _offloaded_modules(made, left)
    swaps = bool(left.get("swap_attention")) and made.value(_GRANULARITY) != "selective"
    if swaps and (settings := _instead_of_layers(made, left, per_rank)):
        return left, {"swap-attention": settings | modules}
    _ahead_of_backward(made, left, per_rank)
    of_rank = _of_rank(made, any(dest in left for dest in _COUNTS)) if per_rank else {}
    return left, of_rank | ({"swap-attention": modules} if modules else {})


def _model_chunks(made: ArgumentWords) -> tuple[int | None, int]:
    """Return the layers of a model chunk, if they are known, and the chunks of a pipeline rank."""
    layers, stages = made.number("--num-layers"), made.number("--pipeline-model-parallel-size") or 1
    chunk = made.number("--num-layers-per-virtual-pipeline-stage")
    if chunk:
        return chunk, max(1, layers // stages // chunk) if layers else 1
    chunks = made.number("--num-virtual-stages-per-pipeline-rank") or 1
    return layers // stages // chunks if layers is not None else None, chunks


def _within_a_chunk(made: ArgumentWords, values: Mapping[str, Any], per_rank: bool) -> dict[str, Any]:
    """Return values with the numbers of layers of a model chunk: those of a rank are dealt out to its chunks.

    A number above that of the chunk is left out, as MindSpeed then recomputes all layers, and so is the whole feature for 0.
    """
    left = dict(values)
    chunk, chunks = _model_chunks(made)
    for dest in _COUNTS:
        flag, count = f"--{dest.replace('_', '-')}", values.get(dest)
        if not isinstance(count, int):
            continue
        if count == 0:
            del left[dest]
            left.pop(dest.removesuffix("_num_layers"), None)
            made.notes.append(f"{flag} 0 recomputes nothing, so that {flag.removesuffix('-num-layers')} has no effect")
            continue
        if per_rank and chunks > 1:
            count = left[dest] = -(-count // chunks)
            text = f"{PER_RANK}: {flag} {values[dest]} of each pipeline rank is {count} of each of its {chunks} model chunks"
            if values[dest] % chunks:
                made.left_out.append(problem_of_flags("MS113", text, [flag], Fix.give_option(flag, str(count * chunks))))
            else:
                made.notes.append(text)
        if chunk is not None and count > chunk:
            del left[dest]
            made.notes.append(f"{flag} {values[dest]} covers all {chunk} layers of a model chunk")
    return left


def _offloaded_modules(made: ArgumentWords, left: dict[str, Any]) -> dict[str, Any]:
    """Take the names of ``--swap-modules``, and return the setting of those that offload less than all of attention."""
    if not isinstance(text := left.get("swap_modules"), str) or not left.get("swap_attention"):
        return {}
    del left["swap_modules"]
    names = [name.strip() for name in text.split(",") if name.strip()]
    norms = [name for name in names if name in _NORMS]
    if norms:
        made.notes.append(f"--swap-modules {','.join(norms)} has no effect: only what attention keeps is offloaded")
    names = [name for name in names if name not in norms]
    if unknown := [name for name in names if name not in (_ATTENTION, *_PARTS)]:
        parts = ",".join(_PARTS)
        text = f"--swap-modules names {', '.join(unknown)}, but mindspeed offloads only parts of attention"
        made.problems.append(problem_of_flags("MS113", text, ["--swap-modules"], Fix.give_option("--swap-modules", parts)))
    elif names and _ATTENTION not in names:
        return {"modules": tuple(dict.fromkeys(names))}
    return {}


def _taken(made: ArgumentWords, flags: Mapping[str, Count]) -> str:
    """Remove flags, and return those that were given."""
    return ", ".join(flag for flag, count in flags.items() if made.take(flag, count) is not None)


def _instead_of_layers(made: ArgumentWords, left: dict[str, Any], per_rank: bool) -> dict[str, Any]:
    """Let swap-attention take the place of full recomputation: MindSpeed recomputes the MLPs of as many layers, and no more.

    Empty where the command recomputes nothing.
    """
    count, method = made.number(_LAYERS), made.value(_METHOD)
    if count is None and method != "uniform":
        return {}
    chunk, chunks = _model_chunks(made)
    flags = _taken(made, _FULL)
    if left.pop("recompute_in_advance", False):
        text = f"{_AHEAD} is skipped: with --swap-attention, the MLPs are recomputed when backward reaches them"
        made.left_out.append(problem_of_flags("MS113", text, [_AHEAD], Fix.drop_option(_AHEAD)))
    settings: dict[str, Any] = {}
    if method == "uniform" and chunk is not None:
        count, per_rank = chunk, False
    if method == "block" and count:
        settings["attention_layers"] = count
    if count:
        settings["mlp_layers"] = count
    if count and per_rank and chunks > 1:
        settings["per_rank"] = True
    where = "pipeline rank" if "per_rank" in settings else "model chunk"
    does = f"the MLPs of {count} layers of each {where} are recomputed" if count else "no MLP is recomputed"
    made.notes.append(f"--swap-attention replaces {flags}: attention is offloaded, and {does} instead of whole layers")
    return settings


def _ahead_of_backward(made: ArgumentWords, left: dict[str, Any], per_rank: bool) -> None:
    """Let a feature that decides when layers are recomputed replace Megatron's arguments, which MindSpeed gives in addition.

    Such a feature recomputes every layer. Where a command recomputes fewer, Megatron's arguments stay.
    """
    flag = next((flag for flag in (_AHEAD, _BUBBLE) if left.get(flag.removeprefix("--").replace("-", "_"))), None)
    if flag is None or (made.number("--pipeline-model-parallel-size") or 1) == 1:
        return
    count, (chunk, chunks) = made.number(_LAYERS), _model_chunks(made)
    every = None if chunk is None else chunk * chunks if per_rank else chunk
    if flag == _AHEAD and count is not None and made.value(_GRANULARITY) is None:
        left.pop("recompute_in_advance")
        made.notes.append(f"{flag} has no effect without {_GRANULARITY} full, because no layer is recomputed")
    elif flag == _AHEAD and made.value(_METHOD) == "block" and count is not None and every is not None and count < every:
        left.pop("recompute_in_advance")
        text = (
            f"{flag} is skipped: {count} of {every} layers are recomputed, but mindspeed recomputes in advance only all "
            "layers; these are recomputed when backward reaches them"
        )
        made.left_out.append(problem_of_flags("MS113", text, [flag], Fix.drop_option(flag)))
    elif flags := _taken(made, _ALL):
        made.notes.append(f"{flag} replaces {flags}: it recomputes every layer")


def _of_rank(made: ArgumentWords, counts: bool) -> Settings:
    """Return the setting with which block recomputation counts the layers of a rank, unless that changes nothing.

    With ``counts``, numbers of layers of other flags are those of a rank too.
    """
    count, (chunk, chunks) = made.number(_LAYERS), _model_chunks(made)
    is_block = made.value(_GRANULARITY) == "full" and made.value(_METHOD) == "block"
    if chunks == 1 or not is_block or not count:
        if chunks == 1 or not counts:
            made.notes.append(f"{PER_RANK} is not needed: a rank has one chunk, or no number of layers in block recomputation")
        return {}
    if chunk is not None and count >= chunk * chunks:
        made.change(_LAYERS, str(chunk))
        made.notes.append(
            f"{PER_RANK}: {count} layers of each pipeline rank are all {chunk} layers of its {chunks} model chunks"
        )
        return {}
    made.notes.append(f"{PER_RANK} is recompute.per_rank=true: {count} layers of each pipeline rank are recomputed")
    return {"recompute": {"per_rank": True}}
