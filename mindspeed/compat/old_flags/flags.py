"""Old MindSpeed flags: which feature each switches on, and which setting it gives, from ``flags.yaml``. Read without torch.

Flags that Megatron itself has are not in the table: they are read from Megatron's parser.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any, Final, Literal

from mindspeed.compat.old_flags.other_flags import counts, translate_others
from mindspeed.compat.old_flags.recomputation import translate_recomputation
from mindspeed.engine.resolution.request import Layer
from mindspeed.files.tables import fields_of, table_beside
from mindspeed.megatron_lm.argument_words import ArgumentWords, problem_of_flags
from mindspeed.megatron_lm.dialects import Translation
from mindspeed.plugins.discovery import Catalog
from mindspeed.problems import Fix, Fixes, Problem, advice


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
    _smaller_groups(made, total, stages, per_chunk, places)
    if per_chunk:
        made.take("--num-layers-per-virtual-pipeline-stage", 1)
        words = ["--num-virtual-stages-per-pipeline-rank", str(total // stages // per_chunk)]
        made.put(*words)
        made.notes.append(f"--num-layers-per-virtual-pipeline-stage {per_chunk} includes them too: it is {' '.join(words)}")


def _smaller_groups(made: ArgumentWords, total: int, stages: int, per_chunk: int | None, places: str) -> None:
    """Let uniform recomputation take groups that fill each model chunk without its empty layers, with a warning."""
    flag, chunk = "--recompute-num-layers", per_chunk or total // stages
    count = made.number(flag)
    if made.value("--recompute-method") != "uniform" or not count or chunk % count:
        return
    empty = Counter(int(place) // chunk for place in set(places.split(",")) if place.strip().isdigit())
    group = gcd(count, *(chunk - number for number in empty.values()))
    if group != count:
        made.change(flag, str(group))
        text = (
            f"{flag} {count} is {group}: without the no-op positions {places} not every model chunk is a multiple of {count} "
            "layers. The same layers are recomputed, in smaller groups, which keep more inputs"
        )
        made.left_out.append(problem_of_flags("MS113", text, [flag], Fix.give_option(flag, str(group))))


DISPATCHER, EXPERTS, TENSOR = "--moe-token-dispatcher-type", "--expert-model-parallel-size", "--tensor-model-parallel-size"
_LOW_PRECISION: Final = ("--fp8-format", "--fp4-format")
_FULL_PRECISION: Final = (
    "moe_permutation_async_comm",
    "moe_alltoall_overlap_comm",
    "moe_allgather_overlap_comm",
    "moe_zero_memory",
    "moe_adaptive_recompute_activation",
    "moe_fb_overlap",
    "gemm_gradient_accumulation_fusion",
    "mla_mm_split",
    "mla_up_proj_tp_overlap",
    "mla_swap_core_attn_out",
    "enable_mla_absorb",
)
"""Flags that save time or memory, and whose features do not serve linear layers in fp8 or fp4."""
_INTERLEAVED: Final = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")


def without_unserved(made: ArgumentWords, values: Mapping[str, Any]) -> dict[str, Any]:
    """Skip old flags that do not support the attention, precision or pipeline of a command, which computes the same without."""
    left = dict(values)
    if not made.has("--enable-dsa-indexer") and made.value("--experimental-attention-variant") != "dsa":
        _skip(made, left, ("enable_mla_absorb",), "MindSpeed-LLM absorbs up-projections only in sparse attention")
    if low := next((flag for flag in _LOW_PRECISION if made.value(flag)), None):
        _skip(made, left, _FULL_PRECISION, f"mindspeed has no feature for {low}; Megatron's layers compute the same result")
    stages = made.number("--pipeline-model-parallel-size") or 1
    if left.get("schedules_method") == "dualpipev" and stages > 1 and left.pop("moe_fb_overlap", None):
        made.notes.append("--moe-fb-overlap is part of the feature dualpipev, to which --schedules-method dualpipev maps")
    if stages > 1 and not any(made.value(flag) for flag in _INTERLEAVED):
        reason = f"pipeline stages pair micro-batches only in Megatron's interleaved schedule; {_INTERLEAVED[0]} selects it"
        _skip(made, left, ("moe_fb_overlap",), reason)
    return left


def _skip(made: ArgumentWords, values: dict[str, Any], dests: Sequence[str], reason: str) -> None:
    """Remove those of some flags that are given, with a reason."""
    flags = [f"--{dest.replace('_', '-')}" for dest in dests if values.pop(dest, None)]
    if flags:
        text = f"{', '.join(flags)} {'is' if len(flags) == 1 else 'are'} skipped: {reason}"
        made.left_out.append(problem_of_flags("MS113", text, flags, Fix.drop_option(", ".join(flags))))


def in_new_meaning(made: ArgumentWords, extends: bool) -> None:
    """Rewrite them, with a note for each that changed.

    With ``extends`` the expert-parallel size counts ranks per tensor-parallel rank; here it counts all ranks with experts.
    """
    if made.value(DISPATCHER) == "alltoall_seq":
        made.change(DISPATCHER, "alltoall")
        text = "alltoall_seq is replaced by alltoall, the only all-to-all dispatcher since Megatron 0.14"
        made.notes.append(f"{DISPATCHER} {text}")
    ranks, tensor_ranks = made.number(EXPERTS), made.number(TENSOR)
    if extends and ranks is not None and tensor_ranks is not None:
        total = ranks * tensor_ranks
        made.change(EXPERTS, str(total))
        text = f"{EXPERTS} {ranks} with --moe-tp-extend-ep is {total} ranks with experts, {ranks} x tp {tensor_ranks}"
        made.notes.append(text)


def without_legacy_attention(made: ArgumentWords) -> None:
    """Remove the flash attention of Megatron's legacy models, which Megatron's deterministic mode refuses for every model.

    MindSpeed trains deterministically with it, because Megatron's deterministic mode stays off.
    """
    flag = "--use-flash-attn"
    if not made.has("--use-legacy-models") and made.take(flag, 0) is not None:
        made.notes.append(f"{flag} is not needed: only Megatron's legacy models read it, and deterministic mode refuses it")


TYPES: Final[dict[str, type]] = {"int": int, "float": float, "text": str}


@dataclass(frozen=True, slots=True)
class OldFlag:
    """Describe a flag of MindSpeed.

    ``feature`` is what it stands for; with ``choices`` the value chooses it (``{value: feature}``), or the value of the
    flag ``chooser``, the first if that is not given. ``setting`` is the setting that takes the value. A flag that does not
    ``switch`` only gives a setting. ``off`` are values that leave the feature off, as MindSpeed's defaults do. ``noop_reason``:
    why nothing is to be done for what the flag asks. ``size``: the parallel size of Megatron that must be above 1 for it.
    """

    flag: str
    feature: str = ""
    setting: str = ""
    takes: Literal["nothing", "int", "float", "text"] = "nothing"
    switch: bool = True
    off: tuple[Any, ...] = ()
    choices: Mapping[str, str] = field(default_factory=dict)
    chooser: str = ""
    noop_reason: str = ""
    size: str = ""

    @property
    def dest(self) -> str:
        """The attribute that MindSpeed's features read."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def features(self) -> tuple[str, ...]:
        """Every feature that this flag can map to."""
        return tuple(dict.fromkeys(self.choices.values())) or (self.feature,)

    def new_spelling(self, feature: str, value: Any = True) -> str:
        """Spell the new option: ``--features rms-norm``, or ``--set ring-attention.window=2``."""
        setting = f"--set {feature}.{self.setting}={str(value).lower() if value is True else value}" if self.setting else ""
        return " ".join(filter(None, [f"--features {feature}" if self.switch else "", setting]))

    def says_something(self, value: Any) -> bool:
        """Return whether a value has an effect: a setting may be 0, but a switch that counts is then off."""
        return value is not None and value is not False and not (self.switch and value == 0)

    def feature_for(self, value: Any, values: Mapping[str, Any]) -> str:
        """The feature that a value maps to; ``values`` are all arguments by attribute. ``""`` for none."""
        if value in self.off:
            return ""
        if not self.choices:
            return self.feature
        key = values.get(self.chooser.removeprefix("--").replace("-", "_")) if self.chooser else value
        return next(iter(self.choices.values())) if key is None else self.choices.get(str(key), "")


SOURCE: Final = "old flag of MindSpeed"
"""Source of values in a plan that came from an old flag."""

_TENSOR, _PIPELINE, _CONTEXT = (f"{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context"))


OLD_FLAGS: Final[tuple[OldFlag, ...]] = tuple(OldFlag(**fields_of(row)) for row in table_beside(__file__))

_NEEDED: Final = {("--context-parallel-algo", "hybrid_adaptive_cp_algo"): "--ulysses-degree-in-cp"}
"""Values of old flags that mean nothing without another setting."""

BY_FLAG: Final[dict[str, OldFlag]] = {old.flag: old for old in OLD_FLAGS}
BY_DEST: Final[dict[str, OldFlag]] = {old.dest: old for old in OLD_FLAGS}

_DETERMINISTIC: Final = ("npu_deterministic", "use_deter_comp")

MEGATRON_VALUES: Final = frozenset({"--position-embedding-type"})
"""Megatron's own flags to which MindSpeed adds a value: never registered; the value is removed before Megatron reads it."""


def read_old_flags(argv: Sequence[str], known: Collection[str], catalog: Catalog) -> Translation:
    """Read the old flags of a command line and remove them.

    ``known`` are the flags of the parser that reads the rest, Megatron's and the script's: those are never touched.
    """
    values, rest, problems = _split(argv, known)
    made = ArgumentWords(rest, known)
    sizes = {size: made.number(f"--{size.replace('_', '-')}") or 1 for size in (_TENSOR, _PIPELINE, _CONTEXT)}
    has_algorithm = "context_parallel_algo" in values or made.has("--cp-comm-type")
    if values.get("schedules_method") == "dualpipev" and sizes[_PIPELINE] > 1 and not any(map(made.value, _INTERLEAVED)):
        made.put(_INTERLEAVED[1], "2")
        made.notes.append(
            f"{_INTERLEAVED[1]} 2 is added, because --schedules-method dualpipev has two model chunks on each rank"
        )
    values, settings = translate_recomputation(made, values)
    layer, by_flag, missing = request_of(sizes | without_unserved(made, values), catalog)
    layer = replace(layer, settings=_merged(layer.settings, settings))
    made.notes[:0] = by_flag.values()
    in_new_meaning(made, bool(values.get("moe_tp_extend_ep")))
    if any(values.get(dest) for dest in _DETERMINISTIC):
        without_legacy_attention(made)
    if values.get("noop_layers"):
        without_empty_layers(made, str(values["noop_layers"]))
    translate_others(made)
    fallbacks = []
    if made.words != list(argv) and sizes[_CONTEXT] > 1 and not has_algorithm:
        name, feature = next(iter(BY_FLAG["--context-parallel-algo"].choices.items()))
        fallbacks = [(feature, f"MindSpeed uses {name} when --context-parallel-algo is not given")]
    all_problems = (*problems, *missing, *made.problems)
    return Translation(layer, tuple(made.words), tuple(made.notes), all_problems, tuple(made.left_out), tuple(fallbacks))


def _merged(first: Mapping[str, Mapping[str, Any]], second: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the settings of both."""
    return {name: {**first.get(name, {}), **second.get(name, {})} for name in {**first, **second}}


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
                notes[dest] = f"{old.flag} has no effect with this {old.chooser}"
            continue
        if old.size and values.get(old.size) == 1:
            notes[dest] = f"{old.flag} has no effect with --{old.size.replace('_', '-')} 1"
            continue
        needed = _NEEDED.get((old.flag, str(value)))
        if needed is not None and values.get(BY_FLAG[needed].dest) is None:
            text = f"{old.flag} {value} needs {needed}"
            problems.append(problem_of_flags("MS301", text, [old.flag], Fix.advise(f"set {needed} to 2 or more"), (feature,)))
        if old.noop_reason:
            notes[dest] = f"{old.flag} is not needed: {old.noop_reason}"
            continue
        if feature not in catalog.usable:
            text = f"{old.flag} maps to the feature {feature}, which this version of mindspeed does not have yet"
            problems.append(problem_of_flags("MS111", text, [old.flag], Fix.drop_option(old.flag), (feature,)))
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
    words = ArgumentWords(list(argv))
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    if words.has(DISPATCHER):
        values[DISPATCHER.removeprefix("--").replace("-", "_")] = words.value(DISPATCHER)
    for flag in dict.fromkeys(word.partition("=")[0] for word in argv):
        old = BY_FLAG.get(flag)
        is_megatrons = flag in known and flag not in MEGATRON_VALUES
        if old is None or is_megatrons or (flag in MEGATRON_VALUES and words.value(flag) not in old.choices):
            continue
        for taken in words.replace_all(flag, 0 if old.takes == "nothing" else 1):
            values[old.dest], problem = _converted(old, taken[0] if taken else None)
            problems += [problem] if problem is not None else []
    return values, words.words, problems


def _converted(old: OldFlag, text: str | None) -> tuple[Any, Problem | None]:
    if old.takes == "nothing":
        return True, None
    allowed = [*old.choices, *old.off] if old.choices and not old.chooser else []
    number: Fixes = (Fix.give_option(old.flag, "N" if old.takes in ("int", "float") else "VALUE"), Fix.drop_option(old.flag))
    fix = advice(f"use one of {', '.join(map(str, allowed))}" if allowed else "") or number
    if text is None:
        return None, problem_of_flags("MS301", f"{old.flag} has no value", [old.flag], fix, old.features)
    try:
        value = TYPES[old.takes](text)
    except ValueError:
        kind = "a whole number" if old.takes == "int" else "a number"
        message = f"{old.flag} is {text!r}, not {kind}"
        return None, problem_of_flags("MS301", message, [old.flag], number, old.features)
    if allowed and value not in allowed:
        return None, problem_of_flags("MS301", f"{old.flag} is {text!r}", [old.flag], fix, old.features)
    return value, None


def flags_of(feature: str) -> list[str]:
    """Old flags that map to a feature."""
    return [old.flag for old in OLD_FLAGS if feature in old.features]


def takes_text(flag: str) -> bool:
    """Return whether an old flag takes one text, such as a path."""
    old = BY_FLAG.get(flag)
    return old.takes == "text" if old is not None else counts().get(flag) == 1
