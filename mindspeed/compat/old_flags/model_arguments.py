"""Flags of MindSpeed-LLM for layers, routers, rotary embeddings and tokenizers in Megatron-LM's own arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mindspeed.compat.old_flags.recomputation import PER_RANK
from mindspeed.megatron_lm.argument_words import ArgumentWords, problem_of_flags
from mindspeed.problems import Fix

LAYER_SPECS: Final = ("qwen3_spec", "deepseek_spec", "bailing_spec", "qwen2_moe_spec")
"""Layer specs of MindSpeed-LLM that are Megatron's own layers."""
_TEXT_HANDLER: Final = "GeneralPretrainHandler"
"""The class of MindSpeed-LLM that makes a document of each record."""
_NORMED_SPECS: Final = ("gemma2_spec", "grok_spec")
"""Layer specs of MindSpeed-LLM whose layers may norm the outputs of attention and MLP."""
OTHER_PROGRAM: Final = Fix.advise("run it with MindSpeed-LLM")


@dataclass(frozen=True, slots=True)
class Rule:
    """Translate some flags; ``outcome`` is what becomes of them, for the table of the guide."""

    flags: tuple[str, ...]
    outcome: str
    apply: Callable[[ArgumentWords], None]


def _problem(made: ArgumentWords, flag: str, says: str, *fix: Fix) -> None:
    made.problems.append(problem_of_flags("MS113", f"{flag}{says}", [flag], fix))


def _number(values: list[str]) -> float | None:
    try:
        return float(values[0]) if values else None
    except ValueError:
        return None


def _whole(values: list[str]) -> int | None:
    number = _number(values)
    return int(number) if number is not None and number == int(number) else None


def _tokenizer(made: ArgumentWords) -> None:
    kind = made.value("--tokenizer-type")
    if kind == "MagistralTokenizer":
        made.take("--tokenizer-type", 1)
        fix = Fix.advise("use --tokenizer-type HuggingFaceTokenizer --tokenizer-model PATH")
        _problem(made, "--tokenizer-type", f" {kind} belongs to MindSpeed-LLM", fix)
    if kind != "PretrainedFromHF":
        return
    fast = "--tokenizer-hf-use-fast"
    words = [fast] if fast in made.known and not made.has("--tokenizer-not-use-fast") and not made.has(fast) else []
    made.replace("--tokenizer-type", 1, ["--tokenizer-type", "HuggingFaceTokenizer", *words])
    made.notes.append(f"--tokenizer-type PretrainedFromHF maps to Megatron's {' '.join(['HuggingFaceTokenizer', *words])}")


def _layer_spec(made: ArgumentWords) -> None:
    module = made.value("--spec") or ""
    if module.rpartition(".")[2] not in _NORMED_SPECS and made.take("--post-norm", 0) is not None:
        made.notes.append(
            f"--post-norm has no effect: only the layers of {' and '.join(_NORMED_SPECS)} read it in MindSpeed-LLM"
        )
    if not module.startswith("mindspeed_llm."):
        return
    made.take("--spec", "+")
    if module.rpartition(".")[2] in LAYER_SPECS:
        made.notes.append(f"--spec {module} is not needed: Megatron builds these layers from its other arguments")
    else:
        text = f" {module} belongs to MindSpeed-LLM: Megatron's GPT does not have these layers"
        _problem(made, "--spec", text, OTHER_PROGRAM, Fix.drop_option("--spec"))


def _dense_layers(made: ArgumentWords) -> None:
    taken = made.take("--first-k-dense-replace", 1)
    if taken is None:
        return
    count = _whole(taken)
    if count is None:
        says = f" is {' '.join(taken) or 'empty'}, not a whole number"
        _problem(made, "--first-k-dense-replace", says, Fix.advise("give a whole number"))
        return
    dense, layers, every = max(0, count), made.number("--num-layers"), made.number("--moe-layer-freq") or 1
    if layers is None:
        _problem(made, "--first-k-dense-replace", " needs --num-layers", Fix.advise("give --num-layers N"))
        return
    tail = f"[1]*{layers - dense}" if every == 1 else f"[{','.join(str(int(i % every == 0)) for i in range(dense, layers))}]"
    pattern = f"[0]*{dense}+{tail}" if dense else tail
    made.take("--moe-layer-freq", 1)
    if made.has("--num-experts"):
        made.put("--moe-layer-freq", pattern)
        made.notes.append(f"--first-k-dense-replace {dense} maps to Megatron's --moe-layer-freq '{pattern}'")


_INDEXER: Final = {
    "--index-n-heads": ("--dsa-indexer-n-heads", "64"),
    "--index-head-dim": ("--dsa-indexer-head-dim", "128"),
    "--index-topk": ("--dsa-indexer-topk", "2048"),
    "--indexer-loss-coeff": ("--dsa-indexer-loss-coeff", "1.0"),
}
"""MindSpeed-LLM's defaults of the indexer of sparse attention, by its flag; Megatron has none."""


def _sparse_attention(made: ArgumentWords) -> None:
    if not made.has("--enable-dsa-indexer"):
        return
    implementation = "--transformer-impl"
    if made.value(implementation) == "local":
        made.change(implementation, "transformer_engine")
        made.notes.append(
            f"{implementation} local is replaced by transformer_engine, to whose layers alone Megatron gives sparse attention"
        )
    defaults = [words for flag, words in _INDEXER.items() if not made.has(flag) and not made.has(words[0])]
    for words in defaults:
        made.put(*words)
    if defaults:
        made.notes.append(f"--enable-dsa-indexer adds {', '.join(map(' '.join, defaults))}, the defaults of MindSpeed-LLM")


_LOSS: Final = "--moe-router-load-balancing-type"
_BALANCING: Final = {"group_limited_greedy": "aux_loss", "noaux_tc": "none", "softmax_topk": "none"}
_ALL_EXPERTS: Final = ("group_limited_greedy", "softmax_topk")
"""Routers of one softmax of all experts, whose top k weights add up to 1 only with ``--norm-topk-prob``."""
_WITH_SEQUENCES: Final = ("none", "noaux_tc", "group_limited_greedy")
"""Routers that read ``--seq-aux``."""


def _router(made: ArgumentWords) -> None:
    kind = made.value(_LOSS)
    if kind == "pai_megatron_aux_loss":
        _one_softmax(made)
    elif kind == "sparsemixer_topk":
        made.take(_LOSS, 1)
        text = f" {kind} belongs to MindSpeed-LLM: Megatron's router has no such loss"
        _problem(made, _LOSS, text, Fix.advise(f"use {_LOSS} aux_loss"))
    elif kind in _BALANCING:
        made.replace(_LOSS, 1, [_LOSS, _BALANCING[kind]])
        text = f"{_LOSS} {kind} is translated automatically to Megatron's {_BALANCING[kind]}"
        if kind in _ALL_EXPERTS and not made.has("--norm-topk-prob") and not made.has("--moe-router-pre-softmax"):
            made.put("--moe-router-pre-softmax")
            text += " with --moe-router-pre-softmax"
        made.notes.append(text)
        if kind == "group_limited_greedy":
            _limited_groups(made)
    if made.take("--seq-aux", 0) is not None:
        if kind in _WITH_SEQUENCES:
            made.replace(_LOSS, 1, [_LOSS, "seq_aux_loss"])
            made.notes.append(f"--seq-aux maps to Megatron's {_LOSS} seq_aux_loss")
        else:
            made.notes.append(f"--seq-aux has no effect with {kind or 'aux_loss'}, as in MindSpeed-LLM")
    if made.take("--norm-topk-prob", 0) is not None:
        if made.value("--moe-router-score-function") != "sigmoid" and made.take("--moe-router-pre-softmax", 0) is not None:
            made.notes.append("--norm-topk-prob maps to Megatron's router without --moe-router-pre-softmax, which is removed")
        else:
            made.notes.append("--norm-topk-prob is not needed: Megatron's router normalizes the weights of the top k experts")


_LIMITS: Final = ("--moe-router-num-groups", "--n-group", "--moe-router-group-topk", "--topk-group")
_SCALES: Final = ("--moe-router-topk-scaling-factor", "--routed-scaling-factor")


def _limited_groups(made: ArgumentWords) -> None:
    made.notes.append(
        f"{_LOSS} group_limited_greedy selects groups by their highest score, Megatron by the sum of the highest ones of the "
        "experts that a token selects in a group"
    )
    if made.has("--norm-topk-prob"):
        idle = [flag for flag in _SCALES if made.take(flag, 1) is not None]
        made.notes += [f"{flag} has no effect with --norm-topk-prob, as in MindSpeed-LLM" for flag in idle]


def _one_softmax(made: ArgumentWords) -> None:
    """Translate MindSpeed-LLM's router of one softmax before the top k, which has no groups of experts and no factor."""
    made.replace(_LOSS, 1, [_LOSS, "aux_loss"])
    if not made.has("--moe-router-pre-softmax"):
        made.put("--moe-router-pre-softmax")
    idle = [flag for flag in (*_LIMITS, *_SCALES) if made.take(flag, 1) is not None]
    idle += [flag for flag in ("--seq-aux", "--norm-topk-prob") if made.take(flag, 0) is not None]
    text = "--moe-router-load-balancing-type pai_megatron_aux_loss maps to Megatron's aux_loss with --moe-router-pre-softmax"
    made.notes.append(text + (f"; it ignores {', '.join(idle)}" if idle else ""))


_ROPE_FLAGS: Final = {
    "--rope-scaling-mscale": "--mscale",
    "--rope-scaling-mscale-all-dim": "--mscale-all-dim",
    "--yarn-scaling-factor": "--rotary-scaling-factor",
}
_ROPE_FIELDS: Final = {
    "--rope-scaling-original-max-position-embeddings": "--original-max-position-embeddings",
    "--rope-scaling-beta-fast": "--beta-fast",
    "--rope-scaling-beta-slow": "--beta-slow",
}
"""Flags for fields of Megatron's configuration; their options are those of `mindspeed.megatron_lm.given_arguments`."""
_ROPE_VALUES: Final[dict[str, dict[tuple[str, ...], int]]] = {
    "llama3": {
        ("--rope-scaling-original-max-position-embeddings", "--original-max-position-embeddings"): 8192,
        ("--low-freq-factor",): 1,
        ("--high-freq-factor",): 4,
    },
}
"""Values of a scaled rotary embedding that Megatron fixes."""
_FIXED: Final = [flag for values in _ROPE_VALUES.values() for flags in values for flag in flags]
_ROPE_OTHERS: Final = tuple(dict.fromkeys([*_ROPE_FIELDS, *_FIXED]))


def _rotary(made: ArgumentWords) -> None:
    taken = made.take("--rope-scaling-type", 1)
    kind = taken[0] if taken else ""
    is_mla = made.has("--multi-latent-attention") or made.has("--multi-head-latent-attention")
    if kind == "yarn" and is_mla:
        made.put("--rope-type", "yarn")
        for old, new in {**_ROPE_FLAGS, **_ROPE_FIELDS, "--rope-scaling-factor": "--rotary-scaling-factor"}.items():
            made.replace(old, 1, [new, "VALUE"])
        made.notes.append(
            "--rope-scaling-type yarn maps to Megatron's --rope-type yarn, with --rotary-scaling-factor, --mscale, "
            "--original-max-position-embeddings, --beta-fast and --beta-slow"
        )
    elif kind == "llama3":
        made.put("--use-rope-scaling")
        made.notes.append("--rope-scaling-type llama3 maps to Megatron's --use-rope-scaling")
    elif kind == "linear":
        factor = _number(made.take("--rope-scaling-factor", 1) or ["1"])
        if factor is None or factor != int(factor):
            says = " of --rope-scaling-type linear is not a whole number"
            _problem(made, "--rope-scaling-factor", says, Fix.advise("give a whole number"))
            return
        made.put("--rotary-seq-len-interpolation-factor", str(int(factor)))
        made.notes.append("--rope-scaling-type linear maps to Megatron's --rotary-seq-len-interpolation-factor")
    elif kind:
        only = ": Megatron-LM supports this scaling only with --multi-latent-attention" if kind == "yarn" else ""
        flag = "--rope-scaling-type"
        _problem(made, flag, f" {kind} has no equivalent{only}", OTHER_PROGRAM, Fix.drop_option(flag))
    for flags, fixed in _ROPE_VALUES.get(kind, {}).items():
        for flag in flags:
            value = made.take(flag, 1)
            if value is not None and _number(value) != fixed:
                given = " ".join(value) or "empty"
                text = f" is {given}, but Megatron-LM has no argument for it and uses {fixed}"
                _problem(made, flag, text, Fix.drop_option(flag), OTHER_PROGRAM)
    rest = [flag for flag in (*_ROPE_FLAGS, *_ROPE_OTHERS) if flag not in made.known and made.take(flag, 1) is not None]
    if rest and not kind:
        made.notes.append(f"{', '.join(rest)} has no effect without --rope-scaling-type")


def _stages(made: ArgumentWords) -> None:
    taken, flag = made.take("--num-layer-list", 1), "--num-layer-list"
    if taken is None:
        taken, flag = made.take("--pipeline-num-transformer-layers", 1), "--pipeline-num-transformer-layers"
    if not taken:
        return
    layers = _layers_of_stages(taken[0])
    if layers is None:
        _problem(made, flag, f" is {taken[0]!r}, not a list of layer counts", Fix.advise(f"give {flag} 4,4,3"))
        return
    made.take("--num-layers-per-virtual-pipeline-stage", 1)
    chunks = ["t" * count for count in layers]
    layout = "|".join(["E" + chunks[0], *chunks[1:]]) + "m" * (made.number("--mtp-num-layers") or 0) + "L"
    made.put("--pipeline-model-parallel-layout", layout)
    made.notes.append(f"{flag} {taken[0]} maps to Megatron's --pipeline-model-parallel-layout, with one letter per layer")


def _layers_of_stages(text: str) -> list[int] | None:
    """Layers of each model chunk in the order of the model: ``4,4,3``, or a list of chunks for each rank, with ``[1,1]*2``."""
    if re.fullmatch(r"\d+(,\d+)*", text):
        return [int(number) for number in text.split(",")]
    repeated = re.sub(r"(\[[\d, ]+\])\*(\d+)", lambda match: ",".join([match[1]] * int(match[2])), text)
    try:
        ranks = json.loads(repeated)
        return [rank[chunk] for chunk in range(len(ranks[0])) for rank in ranks]
    except (ValueError, TypeError, IndexError):
        return None


def _up_projections(made: ArgumentWords) -> None:
    flag, granularity, modules = "--recompute-mla-up-proj", "--recompute-granularity", "--recompute-modules"
    if made.take(flag, 0) is None:
        return
    if made.value(granularity) != "full":
        is_selective = made.has(granularity) or made.has("--recompute-activations")
        before = made.take(modules, "+") or (["core_attn"] if is_selective else [])
        words = [] if is_selective else [granularity, "selective"]
        words += [modules, *before, *({"mla_up_proj"} - set(before))]
        made.put(*words)
        made.notes.append(f"{flag} maps to Megatron's {' '.join(words)}")
    elif made.value("--recompute-method") == "uniform":
        made.notes.append(f"{flag} is not needed: every layer is recomputed, with its up-projections")
    else:
        text = (
            f"{flag} is skipped: Megatron recomputes up-projections only with {granularity} selective, but this command "
            "recomputes layers as a whole"
        )
        made.left_out.append(problem_of_flags("MS113", text, [flag], Fix.drop_option(flag)))


_HANDLER, _FIELD = "--handler-name", "--json-keys"
_OF_PREPARATION: Final = (_HANDLER, _FIELD, "--append-eod", "--workers", "--output-prefix")


def _raw_data(made: ArgumentWords) -> None:
    """Request the preparation of raw text, for which MindSpeed-LLM has a class for each kind of records."""
    taken = made.take(_HANDLER, 1)
    if taken is None:
        return
    handler = " ".join(taken)
    if handler not in ("", _TEXT_HANDLER):
        kind = f"{handler} makes other samples than documents of text, which only MindSpeed-LLM's programs train on"
        fix = Fix.advise(f"use {_HANDLER} {_TEXT_HANDLER}, or prepare the data with MindSpeed-LLM and remove {_HANDLER}")
        _problem(made, _HANDLER, f" has no equivalent: {kind}", fix)
        return
    if not made.has(_FIELD):
        made.put(_FIELD, "text")
        made.notes.append(
            f"{_HANDLER} is translated automatically to {_FIELD} text: raw text is tokenized before training, once"
        )
    special = "--tokenizer-hf-include-special-tokens"
    if special in made.known and made.value("--tokenizer-type") == "HuggingFaceTokenizer" and not made.has(special):
        made.put(special)
        made.notes.append(f"{special} is added, because MindSpeed-LLM tokenizes raw text with them")


def _converted_weights(made: ArgumentWords) -> None:
    flag = "--enable-hf2mg-convert"
    if made.take(flag, 0) is None:
        return
    text = f"{flag} is not needed: --load with a Hugging Face model loads its weights without a conversion on the disk"
    if made.has("--load"):
        made.put("--exit-on-missing-checkpoint")
        text += "; --exit-on-missing-checkpoint is added, so that no run starts with random weights"
    made.notes.append(text)


RULES: Final = (
    Rule((), "", _tokenizer),
    Rule((), "", _layer_spec),
    Rule((), "", _sparse_attention),
    Rule(("--first-k-dense-replace",), "`--moe-layer-freq '[0]*K+[1]*N'`", _dense_layers),
    Rule(("--seq-aux",), "`--moe-router-load-balancing-type seq_aux_loss`", _router),
    Rule(("--norm-topk-prob",), "not needed without `--moe-router-pre-softmax`, which is removed", lambda made: None),
    Rule(
        ("--rope-scaling-type", *_ROPE_FLAGS, *_ROPE_OTHERS, "--beta-fast", "--beta-slow"),
        "`--rope-type yarn` with multi-latent attention, `--use-rope-scaling` for llama3, "
        "`--rotary-seq-len-interpolation-factor` for linear; `--original-max-position-embeddings`, `--beta-fast` and "
        "`--beta-slow` are options here; values that Megatron-LM fixes are compared",
        _rotary,
    ),
    Rule(
        ("--num-layer-list", "--pipeline-num-transformer-layers"),
        "`--pipeline-model-parallel-layout` with one letter per layer",
        _stages,
    ),
    Rule(
        (PER_RANK,),
        "`--set recompute.per_rank=true`, or `--set swap-attention.per_rank=true` with `--swap-attention`",
        lambda made: None,
    ),
    Rule(
        ("--recompute-mla-up-proj",),
        "`--recompute-granularity selective --recompute-modules mla_up_proj`; skipped with full recomputation",
        _up_projections,
    ),
    Rule(
        _OF_PREPARATION,
        f"with `{_HANDLER} {_TEXT_HANDLER}`, raw text is tokenized before training, by [the same options]"
        "(megatron-lm.md#raw-text-as-data); no equivalent of other handlers",
        _raw_data,
    ),
    Rule(
        ("--enable-hf2mg-convert",),
        "not needed: [`--load` with a Hugging Face model](megatron-lm.md#weights-of-hugging-face) loads its weights",
        _converted_weights,
    ),
)
"""In the order in which they are applied."""
