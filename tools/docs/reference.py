"""Pages of reference: error codes, hooks, settings, the command line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from copy import copy
from typing import Any, Final

import click

from mindspeed.cli.request_options import JobCommand
from mindspeed.engine.planning.fingerprint import compared_variables
from mindspeed.engine.resolution.variables import variables
from mindspeed.job.world import FIELDS, PLATFORMS
from mindspeed.megatron.hook_points import CORE_HOOK_POINTS, TRAINING_HOOK_POINTS
from mindspeed.plugins.discovery import Catalog
from mindspeed.plugins.hookspecs import HOOK_CLASSES, HOOKS, Answers, Caller, TrainState, Unit
from mindspeed.problems.problem import error_codes
from tools.docs.features import settings_table, type_text
from tools.docs.markdown import code, page, table

GROUPS: Final = {
    "1": "Discovery",
    "2": "Resolution",
    "3": "Arguments and world",
    "4": "Patches and contracts",
    "5": "Platform and operators",
    "6": "Run time",
    "9": "Internal",
}
JOB_FILE: Final = {
    "features": "names of features to switch on",
    "without": "names of features to remove",
    "settings": "`{feature: {setting: value}}`",
    "world": "sizes and the model's shape, by the names below",
    "level": "optimization level: 0, 1 or 2",
    "platform": "npu, cuda or cpu (default: detected)",
    "strict": "refuse features that are only added as requirements, and checks that cannot be decided",
    "only": "use only the requested features and those that they require; by default, mindspeed also adds safe accelerations "
    "(features of optimization level 1)",
    "train": "how to train, read by `mindspeed pretrain` alone",
}


def errors_page() -> str:
    """Every code with its paragraph."""
    status = "Exit status: 0 fine, 1 problems, 2 usage, 3 environment (MS5xx)."
    parts = [[f"`mindspeed explain CODE` prints the same paragraphs. {status}"]]
    for digit, name in GROUPS.items():
        codes = [f"### {key}\n\n{text}\n" for key, text in error_codes().items() if key[2] == digit]
        parts.append([f"## {name}", "", "\n".join(codes).rstrip()])
    return page("Error codes", "mindspeed/problems/error_codes.yaml", *parts)


CALLERS: Final[dict[Caller, str]] = {
    "plan": "mindspeed itself, while the plan is made",
    "planner": "the planner of memory (`mindspeed memory plan`) and the search of a layout (`mindspeed tune`)",
    "session": "mindspeed itself, in every process with an active plan",
    "megatron-core": "megatron-core: every script that trains on it, also a plain one under `mindspeed run`",
    "training loop": "a training loop: `mindspeed pretrain`, Megatron-LM's, and `features verify`, which writes no checkpoint; "
    "a script with a loop of its own calls it through `mindspeed.engine.runtime.session`",
}
"""The programs that call hooks."""

ANSWERS: Final[dict[Answers, str]] = {
    "each": "the answer of every feature counts",
    "chained": "each feature gets the value that the feature before it returned",
    "one": "at most one feature may answer other than None",
    "merged": "the answers of several features are merged; only two values for one field are refused",
}
"""What becomes of the answers of several features to a hook that returns something."""


def hooks_page() -> str:
    """Every hook with its signature and its facts, by the object whose life it follows."""
    text = "A feature implements a hook as a method with the same name, marked `@hookimpl`; it may leave out parameters. "
    text += "Hooks run in plan order, per step or rarer, never inside a layer. A hook that no active feature implements is not "
    text += "wired. A feature keeps what it needs between hooks on its instance: each plan has its own."
    callers = [
        (code(caller), words, ", ".join(f"[{name}](#{name})" for name, facts in HOOKS.items() if facts.caller == caller))
        for caller, words in CALLERS.items()
    ]
    parts = [[text], ["## Which program calls which hook", "", *table(("caller", "calls it in", "hooks"), callers)]]
    for group in HOOK_CLASSES:
        words = " ".join(re.findall("[A-Z][a-z]+", group.__name__)[:-1])
        parts.append([f"## {words}", *(["", _prose(group)] if group.__doc__ else [])])
        for name, hook in vars(group).items():
            if name in HOOKS:
                parts.append(
                    [f"### {name}", "", f"```python\n{_signature(name, hook)}\n```", "", _prose(hook), "", *_facts(name)]
                )
    objects = [[f"### {kind.__name__}", "", _prose(kind), "", *_fields(kind)] for kind in (TrainState, Unit)]
    return page(
        "Hooks", "mindspeed/plugins/hookspecs.py", *parts, ["## Objects that hooks are given"], *objects, _hook_points()
    )


def _facts(name: str) -> list[str]:
    """The facts of one hook as a list."""
    facts = HOOKS[name]
    lines = [f"called by: {facts.caller}"]
    if facts.phase is not None:
        lines.append(f"phase of the run: {facts.phase}")
    if facts.answers in ANSWERS:
        lines.append(f"answers: {ANSWERS[facts.answers]}")
    if facts.none:
        lines.append(f"None means: {facts.none}")
    if targets := [point.target for point in (*CORE_HOOK_POINTS, *TRAINING_HOOK_POINTS) if name in point.hooks]:
        lines.append(f"upstream function: {', '.join(map(code, targets))}")
    return [f"- {line}" for line in lines]


def _fields(kind: type) -> list[str]:
    return [f"- `{name}: {annotation}`" for name, annotation in kind.__annotations__.items()]


def _hook_points() -> list[str]:
    """The table of upstream functions."""
    rows = []
    for point in (*CORE_HOOK_POINTS, *TRAINING_HOOK_POINTS):
        arguments = f"arguments of {point.arguments}" if point.arguments else ""
        hooks = ", ".join(f"[{hook}](#{hook})" for hook in point.hooks)
        on_cpu = f"on the CPU: {point.cpu}" if point.cpu else ""
        rows.append((code(point.target), "; ".join(filter(None, (arguments, point.run, point.loop, hooks, on_cpu)))))
    text = "Each function has one wrap, and a plan that needs nothing of a row leaves it out."
    return ["## Hook points", "", text, "", *table(("upstream function", "what happens there"), rows)]


def _signature(name: str, hook: Any) -> str:
    signature = inspect.signature(hook)
    parameters = ", ".join(str(parameter).replace("'", "") for parameter in signature.parameters.values())
    return f"def {name}({parameters}) -> {signature.return_annotation!s}"


def _prose(function: Any) -> str:
    return inspect.cleandoc(function.__doc__ or "").replace("``", "`")


def settings_page(catalog: Catalog) -> str:
    """Everything that can be set, and where."""
    from mindspeed.registry import base_features
    from mindspeed.workbench.training.config import TrainConfig

    order = (
        "Sources of a value, low to high: default, job file, environment variable, command line, API. "
        "`mindspeed features plan` shows the source of each value and what it overrode."
    )
    world = [
        (
            code(name),
            "list of names" if field.kind is tuple else field.kind.__name__,
            field.unit,
            field.meaning,
            code(", ".join(field.default) if field.kind is tuple else field.default) if field.has_default else "",
            ", ".join(map(code, field.arguments)),
            field.since,
        )
        for name, field in FIELDS.items()
    ]
    train = [
        (code(name), code(type_text(field)), "" if field.default is None else code(field.default), field.description or "")
        for name, field in TrainConfig.model_fields.items()
    ]
    parts = [
        [order],
        ["## Job file", "", *table(("key", "meaning"), [(code(key), meaning) for key, meaning in JOB_FILE.items()])],
        [
            "## World",
            "",
            "On the command line with dashes: `--seq-length 4096`.",
            "",
            *table(("field", "type", "unit", "meaning", "default", "read from Megatron-LM's", "since Megatron"), world),
        ],
        ["## Features", "", "On the command line `--set feature.setting=value`."],
    ]
    for name, model in catalog.models.items():
        if lines := settings_table(name, model):
            parts.append([f"### {name}", "", *lines])
    usage = "Every plan has the features of its platform: `--set device-emulation.poison=true` needs no `--features`."
    parts.append(["## Platforms", "", usage])
    for layer in dict.fromkeys(feature for platform in PLATFORMS for feature in base_features(platform)):
        if lines := settings_table(layer.spec.name, layer.Args):
            parts.append([f"### {layer.spec.name}", "", *lines])
    trainer = "The section `train` of a job file; on the command line of `mindspeed pretrain` with dashes: `--train-iters 300`."
    parts.append(["## Trainer", "", trainer, "", *table(("key", "type", "default", "meaning"), train)])
    return page("Settings", "the models of the features, the world and the trainer", *parts)


def variables_page() -> str:
    """Every environment variable that mindspeed reads, and those that are compared between ranks."""
    equal = "Ranks that differ in one of these stop before their first collective. `*` stands for any ending."
    compared = [(code(name), meaning) for name, meaning in compared_variables().items()]
    return page(
        "Environment variables",
        "mindspeed/engine/resolution/variables.py",
        table(("variable", "meaning"), [(code(name), meaning) for name, meaning in variables().items()]),
        ["## Variables that must be equal", "", equal, "", *table(("variable", "what it decides"), compared)],
    )


def command_line_page(main: click.Group) -> str:
    """The help of every verb."""
    parts = [[f"## {name}", "", f"```\n{text}\n```"] for name, text in _helps(main, "mindspeed", None)]
    return page("Command line", "the help of the verbs", *parts)


def _helps(command: click.Command, name: str, parent: click.Context | None) -> Iterator[tuple[str, str]]:
    if isinstance(command, JobCommand) and name != "check":  # one list of the job's options on the page
        command = copy(command)
        command.lists_sizes = False
    # as a call makes it: a bare Context knows nothing of the command's own settings, such as -h
    context = command.make_context(name, [], parent, resilient_parsing=True, terminal_width=100, max_content_width=100)
    yield context.command_path, "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    if isinstance(command, click.Group):
        for verb in command.list_commands(context):
            below = command.get_command(context, verb)
            if below is not None and not below.hidden:
                yield from _helps(below, verb, context)
