"""The page of a feature: everything that it declares, and its README."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args, get_origin

from pydantic.fields import FieldInfo

from mindspeed.engine.resolution.environment import SUPPORTED_MEGATRON
from mindspeed.job.world import PLATFORMS, World
from mindspeed.plugins import (
    After,
    ArgOverride,
    Before,
    Conflicts,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Numerics,
    Patch,
    Ref,
    Requires,
    RequiresAny,
    RequiresCapability,
    RequiresSlot,
    Slot,
    When,
)
from mindspeed.plugins.answers import implements
from mindspeed.plugins.conditions import Condition, ModelCondition, Otherwise
from mindspeed.plugins.discovery import Catalog, DiscoveredFeature
from mindspeed.plugins.hookspecs import HOOKS
from mindspeed.problems import Fix, filled, on_command_line
from mindspeed.workbench.pages.markdown import code, page, table
from mindspeed.workbench.pages.readme_sections import Section, sections
from mindspeed.workbench.pages.together import together
from mindspeed.workbench.verification.matrix.verdicts import CaseResult

LEVELS: Final = {
    0: "0: part of Megatron itself, at every level",
    1: "1: switched on at optimization level 1 where its conditions hold and it has a variant for the platform",
    2: "2: on request",
}
MODEL: Final = {
    "world_size": 8,
    "num_layers": 8,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "num_experts": 8,
    "grouped_experts": False,
    "vocab_size": 512,
    "seq_length": 64,
    "micro_batch_size": 1,
    "global_batch_size": 16,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation": "silu",
    "rotary": True,
    "dtype": "bf16",
    "platform": "cpu",
}
"""The model for which pages list patches: patches may depend on the world."""


def feature_page(
    found: DiscoveredFeature,
    verdicts: Mapping[str, CaseResult],
    categories: Mapping[str, str],
    shown: Sequence[str] = (),
) -> str:
    """Return the page of a loaded feature.

    It has verdicts of the matrix, by the ``categories`` of features, and further blocks that show how the feature works.
    """
    feature = found.feature
    if feature is None:
        raise ValueError(f"{found.name} is not loaded")
    readme = _readme(feature)
    parts = [
        [feature.summary() + ".", "", _in_short(feature.spec)],
        _text(feature),
        _section("When to use it", readme["when"]),
        _section("Usage", _usage(feature, readme)),
        _section("In your own trainer", _own_trainer(feature.spec)),
        _section("How it works", [*readme["about"], *readme["how"], *shown]),
        _section("Settings", [*readme["settings"], *_settings(feature)]),
        ["## Works with, needs and refuses", "", *_constraints(feature)],
        together(found.name, verdicts, categories),
        _section("Numerics", [_numerics(feature.spec.numerics) + ".", *readme["numerics"]]),
        _section("Measured effect", readme["measured"]),
        _section("Limits", readme["limits"]),
        ["## For developers", "", *_declaration(found, feature)],
        _changes(feature),
        _hooks(feature),
        _section("", readme["flags"]),
    ]
    return page(found.name, f"the declaration in {feature.__module__}", *(part for part in parts if part))


def _in_short(spec: FeatureSpec) -> str:
    """Category, level and claim in one line."""
    return f"*Category {spec.category.value}, level {spec.level}, {spec.numerics.claim}, {spec.stability.value}.*"


def _own_trainer(spec: FeatureSpec) -> list[str]:
    """Return the import line for a trainer without Megatron, or the reason why there is none."""
    if spec.own_trainer.startswith("from "):
        return [f"Without Megatron and without a plan:\n\n```python\n{spec.own_trainer}\n```"]
    return [f"Works only with Megatron: {spec.own_trainer}."] if spec.own_trainer else []


def own_trainers(catalog: Catalog) -> list[list[str]]:
    """Return the table of the import lines and reasons of all features that have one."""
    about = (
        "Modules, optimizers and functions of plain torch: no plan, no Megatron, nothing is patched. [Quickstart: your own "
        "trainer](quickstart-own-trainer.md) shows a loop that uses them, and examples with the Hugging Face `Trainer`, "
        "Accelerate and torchtitan."
    )
    rows = [
        (
            f"[{name}](features/{name}.md)",
            spec.category.value,
            code(own) if own.startswith("from ") else f"works only with Megatron: {own}",
        )
        for name, spec in catalog.specs.items()
        if (own := spec.own_trainer)
    ]
    return [[about, ""], table(("feature", "category", "in your own trainer"), rows)]


def _section(title: str, blocks: Sequence[str]) -> list[str]:
    """A heading and its blocks; nothing without a block."""
    return ["\n\n".join([f"## {title}", *blocks] if title else blocks)] if blocks else []


def _usage(feature: type[Feature[Any]], readme: Mapping[Section, Sequence[str]]) -> list[str]:
    """Return the README's usage, or the lines of a job file; then the command that verifies the claim."""
    name = feature.spec.name
    required = [key for key, field in feature.Args.model_fields.items() if field.is_required()]
    settings = [f"settings:\n  {name}:", *(f"    {key}: ..." for key in required)] if required else []
    job = "\n".join(["```yaml", f"features: [{name}]", *settings, "```"])
    everything = "\n".join(text for blocks in readme.values() for text in blocks)
    verify = re.search(rf"`(mindspeed\s+features\s+verify\s+{name}\b[^`]*)`", everything)
    check = [f"Verify the numerics claim on this machine:\n\n```\n{' '.join(verify[1].split())}\n```"] if verify else []
    return [*(readme["usage"] or [f"In a job file, or as `--features {name}`:\n\n{job}"]), *check]


def index(catalog: Catalog) -> list[list[str]]:
    """Return one line per feature."""
    rows = [
        (
            f"[{name}]({name}.md)",
            spec.category.value,
            str(spec.level),
            spec.numerics.claim,
            spec.stability.value,
            catalog.feature(name).summary(),
        )
        for name, spec in catalog.specs.items()
    ]
    return [table(("feature", "category", "level", "numerics", "stability", "what it does"), rows)]


def _text(feature: type[Feature[Any]]) -> list[str]:
    """The class docstring after its first line, which is the summary."""
    text = (inspect.getdoc(feature) or "").partition("\n")[2].strip().replace("``", "`")
    return [text] if text else []


def _declaration(found: DiscoveredFeature, feature: type[Feature[Any]]) -> list[str]:
    spec = feature.spec
    slots = ", ".join(sorted(spec.slots))
    rows = [
        ("category", spec.category.value),
        ("level", LEVELS[spec.level]),
        ("stability", spec.stability.value),
        ("numerics", spec.numerics.claim),
        ("platforms", ", ".join(name for name in PLATFORMS if not spec.platforms or name in spec.platforms)),
        ("megatron-core", code(spec.megatron) if spec.megatron else f"{code(SUPPORTED_MEGATRON)}, all that mindspeed supports"),
        ("slots", slots + (", depending on the settings" if implements(feature, "held_slots") else "")),
        ("sizes", ", ".join(_size(size, spec, argument) for size, argument in spec.sizes.items())),
        ("operators", ", ".join(f"[`mindspeed::{name}`](../operators.md#{name})" for name in spec.ops)),
        ("in checkpoints", str(spec.state)),
        ("provided by", found.distribution),
    ]
    return table(("", ""), [row for row in rows if row[1]])


def _size(size: str, spec: FeatureSpec, argument: str | None) -> str:
    given = f"`--{size}`"
    return f"{given} is `{spec.name}.{argument}`" if argument else f"follows from {given}"


def _numerics(numerics: Numerics) -> str:
    if numerics.claim == "exact":
        text = "Exact: bit for bit the results of the baseline"
    else:
        claim = numerics.claim.capitalize()
        text = f"{claim}: in fp32 the loss within {numerics.loss:g}, every gradient within {numerics.gradient:g}"
    return f"{text}; {numerics.reason}" if numerics.reason else text


def settings_table(name: str, model: type[FeatureArgs]) -> list[str]:
    """Lines of the table of a feature's settings; none if it takes none."""
    rows = [
        (code(f"{name}.{key}"), code(type_text(field)), _default(field), field.description or "")
        for key, field in model.model_fields.items()
    ]
    return table(("setting", "type", "default", "meaning"), rows) if rows else []


def type_text(field: FieldInfo) -> str:
    """The type of a field with its limits: ``int, >= 1``."""
    limits = []
    for item in field.metadata:
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            if (bound := getattr(item, name, None)) is not None:
                limits.append(f"{sign} {bound}")
    return ", ".join([_annotation(field.annotation), *limits])


def _annotation(annotation: Any) -> str:
    arguments = [argument for argument in get_args(annotation) if argument is not type(None)]
    if isinstance(annotation, type) and not arguments:
        return annotation.__name__
    if get_origin(annotation) is tuple:
        kinds = [_annotation(item) for item in arguments if item is not Ellipsis]
        number = "" if Ellipsis in arguments else f"{len(kinds)} "
        return f"list of {number}{' or '.join(dict.fromkeys(kinds))}"
    if get_args(annotation) and all(isinstance(argument, str | int | float) for argument in arguments):
        return " or ".join(map(str, arguments))
    return " or ".join(map(_annotation, arguments)) or str(annotation)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "" if value in (None, "") else code(value)


def _settings(feature: type[Feature[Any]]) -> list[str]:
    return ["\n".join(settings_table(feature.spec.name, feature.Args) or ["None."])]


def _constraints(feature: type[Feature[Any]]) -> list[str]:
    lines = []
    for constraint in feature.spec.constraints:
        when = _when(constraint.when)
        lines.append(f"- {sentence(feature.spec.name, constraint)}{when}")
    return lines or ["No constraint is declared."]


_OUTCOMES: Final[Mapping[Otherwise, str]] = {
    "refuse": "Refused",
    "warn": "Warned of",
    "idle": "Nothing to do",
    "skip": "Skipped by optimization level 1",
}


def _when(function: Callable[..., Any] | None) -> str:
    """The docstring of a predicate as a sentence about when a constraint counts."""
    if function is None:
        return ""
    about = (
        (inspect.getdoc(function) or "").partition("\n")[0].removesuffix(".").removeprefix("Return whether ").replace("``", "`")
    )
    return f" Applies when {about or function.__name__.replace('_', ' ')}."


_SLOTS: Final = {value for name, value in vars(Slot).items() if name.isupper()} - {Slot.CONTEXT_PARALLEL}
"""Slots that a constraint names; context-parallel is also a feature."""


def sentence(name: str, constraint: Any) -> str:
    because = f", because {constraint.reason}" if getattr(constraint, "reason", "") else ""
    if isinstance(constraint, Condition):
        steps = (step for step in filled(constraint.fix, name, str) if step != Fix.remove_feature(name))
        fix = on_command_line(tuple(steps))
        message, fix = (_placeholders(name, text, constraint.of) for text in (constraint.message, fix))
        fix = f" Fix: {fix}." if fix else ""
        return f"{_OUTCOMES[constraint.otherwise]}{f' with {constraint.of}' if constraint.of else ''}: “{message}”.{fix}"
    if isinstance(constraint, ModelCondition):
        return f"Checked when the model is built: {_placeholders(name, constraint.message)}."
    if isinstance(constraint, RequiresAny):
        chosen = f"one of {', '.join(constraint.names)}" if len(constraint.names) > 1 else constraint.names[0]
        return f"Requires that you request {chosen}{because}."
    if isinstance(constraint, RequiresSlot):
        chosen = (
            f" Name the feature in {code(f'{name}.{constraint.setting}')}, or set this to `auto`." if constraint.setting else ""
        )
        return f"Requires one of the features for {constraint.slot}{because}.{chosen}"
    if isinstance(constraint, RequiresCapability):
        return f"Works only with {constraint.slot} features that have the capability {code(constraint.capability)}{because}."
    verbs: dict[type[Any], str] = {
        Requires: "Requires",
        Conflicts: "Conflicts with",
        After: "Comes after",
        Before: "Comes before",
    }
    holders = "every feature that holds the slot " if constraint.name in _SLOTS else ""
    return f"{verbs[type(constraint)]} {holders}{constraint.name}{because}."


def _placeholders(name: str, template: str, other: str = "") -> str:
    """``{args.size}``, ``{other.size}`` and ``{world.tp}`` as *feature.size*, *other feature.size* and *tp*."""
    template = re.sub(r"\{other\.(\w+)[^}]*\}", rf"*{other}.\1*", template)
    template = template.replace("{feature}", name)
    template = re.sub(r"\{world\.(\w+)[^}]*\}", r"*\1*", template)
    template = re.sub(r"\{args\.(\w+)[^}]*\}", rf"*{name}.\1*", template)
    return re.sub(r"\{(\w+)[^}]*\}", r"*\1*", template)


def _changes(feature: type[Feature[Any]]) -> list[str]:
    lines = ["### What it changes in Megatron"]
    try:
        instance = feature(feature.Args(), World(MODEL))
        patches, overrides = _asked(instance, "patches"), _asked(instance, "megatron_args")
    except Exception as error:  # a feature with required settings, or one that refuses the model of the page
        return [
            *lines,
            "",
            f"Depends on settings that have no default ({type(error).__name__}); see `mindspeed features plan`.",
        ]
    if patches:
        headers = ("patch", "target", "with", "reason", "phase")
        lines += ["", "With default settings:", "", *table(headers, map(_patch_row, patches))]
    if overrides:
        rows = [(code(item.argument), code(item.value), item.reason) for item in overrides]
        lines += ["", *table(("argument of Megatron", "default here", "from"), rows)]
    if others := sorted(_mentioned(feature) - {item.argument for item in overrides}):
        lines += ["", f"Depending on the settings also {', '.join(map(code, others))}."]
    return lines if len(lines) > 1 else [*lines, "", "No patch and no argument of its own."]


def _asked(instance: Feature[Any], hook: str) -> list[Any]:
    method = getattr(instance, hook, None)
    found: list[Patch | ArgOverride] = method() if method else []
    return found


def _patch_row(patch: Patch) -> tuple[str, ...]:
    value = patch.value.target if isinstance(patch.value, Ref) else patch.value
    return patch.kind, code(patch.target), code(value), patch.reason + _guard(patch.when), patch.phase


def _guard(when: When | None) -> str:
    if when is None:
        return ""
    megatron = f"on megatron-core {when.megatron}" if when.megatron else ""
    platform = f"on {when.platform}" if when.platform else ""
    return f" (only {' and '.join(filter(None, (megatron, platform)))})"


def _mentioned(feature: type[Feature[Any]]) -> set[str]:
    """Names of Megatron arguments that the source of a feature mentions."""
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(feature).lstrip())) if isinstance(node, ast.Call)]
    overrides = [call for call in calls if ast.unparse(call.func) == "ArgOverride" and call.args]
    return {call.args[0].value for call in overrides if isinstance(call.args[0], ast.Constant)}  # type: ignore[misc]


def _hooks(feature: type[Feature[Any]]) -> list[str]:
    hooks = [name for name, facts in HOOKS.items() if facts.caller != "plan" and name in vars(feature)]
    linked = [f"[`{name}`](../hooks.md#{name})" for name in hooks]
    return [f"It takes part in {', '.join(linked)}."] if linked else []


def _readme(feature: type[Feature[Any]]) -> Mapping[Section, Sequence[str]]:
    """The sections of the README beside the feature; empty without one."""
    file = Path(inspect.getfile(feature)).with_name("README.md")
    return sections(file.read_text(encoding="utf-8") if file.is_file() else "")
