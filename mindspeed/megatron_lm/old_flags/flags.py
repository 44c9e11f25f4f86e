"""Old MindSpeed flags: which feature each switches on, and which setting it gives. One table, read without torch and megatron.

Flags that Megatron itself has are not in the table: they are read from Megatron's parser.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from mindspeed.engine.resolution.request import Layer
from mindspeed.megatron_lm.old_flags.argument_words import ArgumentWords, problem_of_flags
from mindspeed.megatron_lm.old_flags.empty_layers import without_empty_layers
from mindspeed.megatron_lm.old_flags.expert_flags import in_new_meaning, without_unserved
from mindspeed.megatron_lm.old_flags.old_flag import TYPES, OldFlag
from mindspeed.megatron_lm.old_flags.other_flags import counts, translate_others
from mindspeed.megatron_lm.old_flags.recompute_flags import within_a_chunk, without_second_policy
from mindspeed.plugins.discovery import Catalog
from mindspeed.plugins.fixes import Advice, DropOption
from mindspeed.plugins.problems import Problem

SOURCE: Final = "old MindSpeed flag"
"""Source of values in a plan that came from an old flag."""

_TENSOR, _PIPELINE, _CONTEXT = (f"{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context"))


def _switches(feature: str, *flags: str, size: str = "") -> Iterator[OldFlag]:
    return (OldFlag(flag, feature, size=size) for flag in flags)


def _settings(
    feature: str, takes: Literal["nothing", "int", "float", "text"], size: str = "", **settings: str
) -> Iterator[OldFlag]:
    """Flags that only give a setting: ``setting="--flag"``."""
    return (OldFlag(flag, feature, setting, takes, switch=False, size=size) for setting, flag in settings.items())


def _settings_by_algorithm(takes: Literal["int", "text"], choices: Mapping[str, str], **settings: str) -> Iterator[OldFlag]:
    """Flags that give a setting of the algorithm of context parallelism that is asked for."""
    for setting, flag in settings.items():
        yield OldFlag(flag, "", setting, takes, False, choices=choices, chooser="--context-parallel-algo")


_ALGORITHMS: Final = {
    "megatron_cp_algo": "ring-attention",
    "ulysses_cp_algo": "ulysses-attention",
    "hybrid_cp_algo": "hybrid-attention",
    "adaptive_cp_algo": "adaptive-cp",
    "hybrid_adaptive_cp_algo": "adaptive-cp",
    "kvallgather_cp_algo": "kv-allgather-cp",
}
"""MindSpeed's names of the algorithms of context parallelism; the first is its default, here and below."""
_WITH_RINGS: Final = {name: _ALGORITHMS[name] for name in ("megatron_cp_algo", "hybrid_cp_algo")}
_CACHING: Final = {name: _ALGORITHMS[name] for name in ("megatron_cp_algo", "ulysses_cp_algo", "hybrid_cp_algo")}

_DISPATCHERS: Final = {
    f"all{kind}": f"moe-all{kind.removesuffix('_seq')}-dispatcher" for kind in ("gather", "toall", "toall_seq")
}


OLD_FLAGS: Final[tuple[OldFlag, ...]] = (
    # operators
    *_switches("rms-norm", "--use-fused-rmsnorm"),
    *_switches("swiglu", "--use-fused-swiglu"),
    *_switches("rotary-embedding", "--use-fused-rotary-pos-emb"),
    *_switches("flash-attention", "--use-fusion-attn-v2"),
    *_settings("flash-attention", "int", sparse_mode="--sparse-mode", pre_tokens="--pre-tockens", next_tokens="--next-tockens"),
    *_switches("moe-token-permute", "--use-fused-moe-token-permute-and-unpermute"),
    *_switches("ring-attention-update", "--use-fused-ring-attention-update", size=_CONTEXT),
    *_switches("grouped-matmul-add", "--gemm-gradient-accumulation-fusion"),
    *_switches("coc", "--use-ascend-coc", size=_TENSOR),
    *_settings("coc", "int", _TENSOR, mode="--coc-mode", parts="--coc-parallel-num"),
    *_settings("coc", "nothing", _TENSOR, fused="--coc-fused-kernel"),
    *_switches("mc2", "--use-ascend-mc2", "--use-mc2", size=_TENSOR),
    # context parallelism
    OldFlag("--context-parallel-algo", takes="text", choices=_ALGORITHMS),
    *_settings_by_algorithm("int", _WITH_RINGS, window="--cp-window-size"),
    *_settings("ring-attention", "nothing", second_communicator="--use-cp-send-recv-overlap"),
    OldFlag(
        "--megatron-cp-in-bnsd",
        "ring-attention",
        switch=False,
        noop_reason="the attention operator takes tensors as Megatron has them, and turns none",
    ),
    *_settings_by_algorithm(
        "int",
        {"hybrid_cp_algo": "hybrid-attention", "hybrid_adaptive_cp_algo": "adaptive-cp"},
        ulysses_degree="--ulysses-degree-in-cp",
    ),
    *(
        OldFlag(
            flag,
            "context-parallel",
            takes="text",
            switch=False,
            noop_reason="a causal mask is implied, and any other that the model gives is read",
        )
        for flag in ("--attention-mask-type", "--cp-attention-mask-type")
    ),
    OldFlag(
        "--attention-mask-on-cpu",
        "context-parallel",
        switch=False,
        noop_reason="a causal mask is never made, and of another a rank has only what its algorithm reads",
    ),
    *_settings_by_algorithm("text", _CACHING, keep="--context-parallel-kv-cache-policy"),
    *_settings_by_algorithm("int", _CACHING, interval="--context-parallel-cache-interval"),
    *_settings("ulysses-attention", "nothing", kv_allgather="--use-ulysses-allgather-kv"),
    *_settings(
        "adaptive-cp",
        "nothing",
        without_coarse="--adaptive-cp-without-coarse",
        dynamic_mask="--adaptive-cp-dynamic-attn-mask",
        only_reschedule="--adaptive-cp-only-reschedule",
        own_masks="--adaptive-cp-manually-set-mask-list",
    ),
    # pipelines and tensor parallelism
    OldFlag("--noop-layers", "noop-layers", "layers", "text"),
    *_switches("dynamic-shapes", "--variable-seq-lengths", size=_PIPELINE),
    *_switches("recompute-in-bubble", "--recompute-in-bubble", size=_PIPELINE),
    *_switches("recompute-in-advance", "--recompute-in-advance", size=_PIPELINE),
    *_switches("nano-pipe", "--use-nanopipe", size=_PIPELINE),
    *_settings("nano-pipe", "nothing", _PIPELINE, swap="--use-nanopipe-swap"),
    *_switches("tensor-parallel-2d", "--tp-2d"),
    *_settings("tensor-parallel-2d", "int", x="--tp-x", y="--tp-y"),
    *_settings(
        "tensor-parallel-2d",
        "nothing",
        overlap_gather="--enable-overlap-ag-with-matmul",
        overlap_scatter="--enable-overlap-matmul-with-rs",
        overlap_backward="--enable-backward-overlap-ag-with-matmul",
    ),
    *_switches("gloo-free-checkpoint", "--disable-gloo-group"),
    *_settings("gloo-free-checkpoint", "int", slice="--hccl-slice-size"),
    # memory
    OldFlag("--adaptive-recompute-device-size", "adaptive-recompute", "budget_mb", "int", off=(-1,)),
    *_settings("adaptive-recompute", "int", profiling_steps="--adaptive-recompute-profiling-step"),
    *_settings("adaptive-recompute", "nothing", swap="--adaptive-recompute-device-swap"),
    *_switches("adaptive-recompute", "--adaptive-memory-optimization"),
    *_switches("activation-recompute", "--recompute-activation-function"),
    *_settings("activation-recompute", "int", num_layers="--recompute-activation-function-num-layers"),
    *_switches("norm-recompute", "--recompute-norm"),
    *_settings("norm-recompute", "int", num_layers="--recompute-norm-num-layers"),
    *_switches("reuse-fp32-param", "--reuse-fp32-param"),
    *_switches("swap-attention", "--swap-attention"),
    *_settings("swap-attention", "text", modules="--swap-modules"),
    *_switches("swap-optimizer", "--swap-optimizer"),
    *_settings("swap-optimizer", "int", parts="--swap-optimizer-times"),
    # mixture of experts
    *_switches("moe-adaptive-recompute", "--moe-adaptive-recompute-activation"),
    *_settings("moe-adaptive-recompute", "float", scale="--moe-adaptive-recompute-activation-scale"),
    OldFlag(
        "--moe-permutation-async-comm",
        choices={"allgather": "moe-allgather-dispatcher"}
        | dict.fromkeys(("alltoall", "alltoall_seq"), "moe-alltoall-dispatcher"),
        chooser="--moe-token-dispatcher-type",
    ),
    OldFlag("--moe-zero-memory", "moe-zero-memory", "level", "text", off=("disable",)),
    *_settings("moe-zero-memory", "int", num_layers="--moe-zero-memory-num-layers"),
    *_switches("moe-allgather-overlap", "--moe-allgather-overlap-comm"),
    *_switches("moe-alltoall-overlap", "--moe-alltoall-overlap-comm"),
    *_switches("moe-tp-extend-ep", "--moe-tp-extend-ep", size=_TENSOR),
    OldFlag("--n-shared-experts", "moe-shared-experts", "count", "int"),
    *_settings("moe-shared-experts", "nothing", gate="--shared-expert-gate"),
    OldFlag("--moe-model-type", takes="text", choices={"deepspeed_moe": "deepspeed-moe"}, off=("megatron_moe",)),
    *_settings("deepspeed-moe", "float", capacity_factor="--moe-train-capacity-factor"),
    *_settings("deepspeed-moe", "text", noise="--noisy-gate-policy"),
    *_settings("deepspeed-moe", "nothing", sinkhorn="--moe-use-sinkhorn"),
    *_settings("deepspeed-moe", "int", interval="--expert-interval"),
    OldFlag("--no-use-rts", noop_reason="places are given in order unless deepspeed-moe.random_priority is set"),
    *_switches("deepspeed-moe-rearrange", "--enable-token-rearrange-opt"),
    *_switches("deepspeed-moe-dropless", "--moe-no-drop"),
    *_settings("deepspeed-moe-dropless", "nothing", padding="--moe-dynamic-padding"),
    *_switches("pipe-experts", "--use-pipe-experts"),
    *_settings("pipe-experts", "int", parts="--pipe-experts-multi-data"),
    *_settings("pipe-experts", "nothing", streams="--pipe-experts-multi-stream"),
    OldFlag("--ampipe-degree", "ampipe", "parts", "int", off=(1,)),
    *_settings("ampipe", "nothing", overlap="--ampipe-tp-sp-comm-overlap"),
    # scenarios and tools
    OldFlag("--position-embedding-type", takes="text", choices={"alibi": "alibi"}),
    *_settings("alibi", "nothing", square="--square-alibi-mask", fill="--fill-neg-inf", opposite="--alibi-diagonal-opposite"),
    *_settings("alibi", "int", fused_type="--alibi-fusion-attn-type"),
    OldFlag("--fix-sub-seq-length", "eod-reset", "fixed_document_length", "int", switch=False, off=(-1,)),
    *_switches("tflops", "--op-cal-tflops"),
    *_switches("deterministic", "--npu-deterministic", "--use-deter-comp"),
    *_switches("moe-load-report", "--print-expert-load"),
    *_switches("auto-tuning", "--auto-tuning", "--auto-settings"),
    *_settings("auto-tuning", "text", mode="--auto-settings-type", folder="--auto-settings-work-dir"),
    *_settings("auto-tuning", "int", ranks="--auto-settings-ranks"),
    *_settings("profiler", "text", level="--profile-level", folder="--profile-save-path"),
    *_settings(
        "profiler",
        "nothing",
        cpu="--profile-with-cpu",
        stack="--profile-with-stack",
        memory="--profile-with-memory",
        shapes="--profile-record-shapes",
    ),
)

_NEEDED: Final = {("--context-parallel-algo", "hybrid_adaptive_cp_algo"): "--ulysses-degree-in-cp"}
"""Values of old flags that mean nothing without another setting."""

BY_FLAG: Final[dict[str, OldFlag]] = {old.flag: old for old in OLD_FLAGS}
BY_DEST: Final[dict[str, OldFlag]] = {old.dest: old for old in OLD_FLAGS}

MEGATRON_VALUES: Final = frozenset({"--position-embedding-type"})
"""Megatron's own flags to which MindSpeed adds a value: never registered; the value is removed before Megatron reads it."""


@dataclass(frozen=True, slots=True)
class OldFlags:
    """Translate the old flags of a command line.

    ``layer`` goes below every other source; ``rest`` is the command line without the old flags; ``notes`` name the new
    spelling of each; ``problems`` are flags of what does not exist (MS111, MS113), or without their value (MS301);
    ``left_out`` are flags without which the run computes the same, a problem of strict requests alone; ``fallbacks`` are
    features that MindSpeed takes by itself, with the reason, unless another one is named.
    """

    layer: Layer
    rest: tuple[str, ...]
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    left_out: tuple[Problem, ...] = ()
    fallbacks: tuple[tuple[str, str], ...] = ()


def read_old_flags(argv: Sequence[str], known: Collection[str], catalog: Catalog) -> OldFlags:
    """Read the old flags of a command line and remove them.

    ``known`` are the flags of the parser that reads the rest, Megatron's and the script's: those are never touched.
    """
    values, rest, problems = _split(argv, known)
    words = ArgumentWords(rest)
    sizes = {size: words.number(f"--{size.replace('_', '-')}") or 1 for size in (_TENSOR, _PIPELINE, _CONTEXT)}
    rest, moved = without_second_policy(rest, values)
    values, clamped = within_a_chunk(rest, values)
    values, unserved = without_unserved(rest, values)
    layer, by_flag, missing = request_of(sizes | values, catalog)
    rest, changed = in_new_meaning(rest, bool(values.get("moe_tp_extend_ep")))
    notes = [*by_flag.values(), *moved, *clamped, *changed]
    if values.get("noop_layers"):
        rest, counted = without_empty_layers(rest, str(values["noop_layers"]))
        notes += counted
    others = translate_others(rest, known)
    all_problems, left_out = (*problems, *missing, *others.problems), (*unserved, *others.left_out)
    fallbacks = []
    is_old = others.words != list(argv)
    if is_old and sizes[_CONTEXT] > 1 and "context_parallel_algo" not in values and not words.has("--cp-comm-type"):
        name, feature = next(iter(_ALGORITHMS.items()))
        fallbacks = [(feature, f"MindSpeed's --context-parallel-algo is {name} where it is not given")]
    return OldFlags(layer, tuple(others.words), (*notes, *others.notes), all_problems, left_out, tuple(fallbacks))


def request_of(values: Mapping[str, Any], catalog: Catalog) -> tuple[Layer, dict[str, str], list[Problem]]:
    """Translate arguments by attribute (``{"use_fused_rmsnorm": True}``), with a note for each, and MS111 problems."""
    features: list[str] = []
    settings: dict[str, dict[str, Any]] = {}
    notes: dict[str, str] = {}
    problems = []
    for dest, value in values.items():
        old = BY_DEST.get(dest)
        feature = old.feature_for(value, values) if old is not None and old.says_something(value) else ""
        if old is None or not feature:
            if old is not None and old.chooser and old.says_something(value) and value not in old.off:
                notes[dest] = f"{old.flag} means nothing with this {old.chooser}"
            continue
        if old.size and values.get(old.size) == 1:
            notes[dest] = f"{old.flag} does nothing with --{old.size.replace('_', '-')} 1"
            continue
        needed = _NEEDED.get((old.flag, str(value)))
        if needed is not None and values.get(BY_FLAG[needed].dest) is None:
            text = f"{old.flag} {value} needs {needed}"
            problems.append(problem_of_flags("MS301", text, [old.flag], Advice(f"give {needed} 2 or more"), (feature,)))
        if old.noop_reason:
            notes[dest] = f"{old.flag} is not needed: {old.noop_reason}"
            continue
        if feature not in catalog.usable:
            text = f"{old.flag} stands for the feature {feature}, which this version of mindspeed does not have yet"
            problems.append(problem_of_flags("MS111", text, [old.flag], DropOption(old.flag), (feature,)))
            continue
        spelling = old.new_spelling(feature, value)
        does = "switches on" if old.switch else "is a setting of"
        notes[dest] = f"{old.flag} {does} {feature}; the new spelling is {spelling}"
        if old.switch and feature not in features:
            features.append(feature)
        if old.setting:
            settings.setdefault(feature, {})[old.setting] = value
    return Layer(SOURCE, tuple(features), settings), notes, problems


def register_old_flags(parser: argparse.ArgumentParser, feature: str | None = None) -> None:
    """Add the old flags, all or those of one feature, that a parser does not have yet."""
    for old in OLD_FLAGS:
        is_of_feature = feature is None or feature in old.features
        if not is_of_feature or old.flag in MEGATRON_VALUES or old.flag in parser._option_string_actions:
            continue
        spellings = " or ".join(old.new_spelling(name, "VALUE") for name in old.features)
        help = f"not needed: {old.noop_reason}" if old.noop_reason else f"old spelling of {spellings}"
        if old.takes == "nothing":
            parser.add_argument(old.flag, action="store_true", help=help)
        else:
            choices = list(old.choices) + list(old.off) if old.choices and not old.chooser else None
            parser.add_argument(old.flag, type=TYPES[old.takes], default=None, choices=choices, help=help)


def _split(argv: Sequence[str], known: Collection[str]) -> tuple[dict[str, Any], list[str], list[Problem]]:
    """Arguments of old flags by attribute, what remains of the command line, and problems with their values."""
    values: dict[str, Any] = {}
    rest: list[str] = []
    problems: list[Problem] = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        flag, equals, value = token.partition("=")
        old = BY_FLAG.get(flag)
        if token == "--":
            rest += [token, *tokens]
            break
        if old is None or (flag in known and flag not in MEGATRON_VALUES):
            if old is None and flag == "--moe-token-dispatcher-type":
                values[flag.removeprefix("--").replace("-", "_")] = value or next(iter(tokens), None)
            rest.append(token)
            continue
        if old.takes == "nothing":
            values[old.dest] = True
            continue
        text = value if equals else (tokens.pop(0) if tokens and not tokens[0].startswith("--") else None)
        if flag in MEGATRON_VALUES and text not in old.choices:
            rest += [token] if equals or text is None else [token, text]
            continue
        parsed, problem = _converted(old, text)
        values[old.dest] = parsed
        problems += [problem] if problem is not None else []
    return values, rest, problems


def _converted(old: OldFlag, text: str | None) -> tuple[Any, Problem | None]:
    allowed = [*old.choices, *old.off] if old.choices and not old.chooser else []
    if text is None:
        return None, problem_of_flags("MS301", f"{old.flag} has no value", [old.flag], features=old.features)
    try:
        value = TYPES[old.takes](text)
    except ValueError:
        kind = "a whole number" if old.takes == "int" else "a number"
        message = f"{old.flag} is {text!r}, not {kind}"
        return None, problem_of_flags("MS301", message, [old.flag], features=old.features)
    if allowed and value not in allowed:
        fix = Advice(f"use one of {', '.join(map(str, allowed))}")
        return None, problem_of_flags("MS301", f"{old.flag} is {text!r}", [old.flag], fix, old.features)
    return value, None


def flags_of(feature: str) -> list[str]:
    """Old flags that stand for a feature."""
    return [old.flag for old in OLD_FLAGS if feature in old.features]


def takes_text(flag: str) -> bool:
    """Return whether an old flag takes one text, such as a path."""
    old = BY_FLAG.get(flag)
    return old.takes == "text" if old is not None else counts().get(flag) == 1
