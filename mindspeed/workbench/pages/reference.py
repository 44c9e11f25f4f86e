"""Pages of reference: error codes, hooks, settings, variables, the Python API, and the table of all pages that are made."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, cast

import mindspeed
from mindspeed import plugins
from mindspeed.engine.planning.fingerprint import compared_variables
from mindspeed.engine.resolution.variables import variables
from mindspeed.files.tables import table_beside
from mindspeed.job.world import FIELDS, PLATFORMS
from mindspeed.megatron.hook_points import CORE_HOOK_POINTS, TRAINING_HOOK_POINTS
from mindspeed.plugins.discovery import Catalog
from mindspeed.plugins.hookspecs import HOOK_CLASSES, HOOKS, Answers, Caller, TrainState, Unit
from mindspeed.problems import error_codes
from mindspeed.workbench.pages.drift import drift
from mindspeed.workbench.pages.features import index, own_trainers, settings_table, type_text
from mindspeed.workbench.pages.markdown import code, page, table
from mindspeed.workbench.pages.operators import operators
from mindspeed.workbench.pages.support import support

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


def errors(_catalog: Catalog) -> Iterator[list[str]]:
    """Yield every code with its paragraph."""
    status = "Exit status: 0 fine, 1 problems, 2 usage, 3 environment (MS5xx)."
    yield [f"`mindspeed explain CODE` prints the same paragraphs. {status}"]
    for digit, name in GROUPS.items():
        codes = [f"### {key}\n\n{text}\n" for key, text in error_codes().items() if key[2] == digit]
        yield [f"## {name}", "", "\n".join(codes).rstrip()]


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
"""Meaning of the results of several features for one hook."""


def hooks(_catalog: Catalog) -> Iterator[list[str]]:
    """Yield every hook with its signature and its facts, by the object whose life it follows."""
    text = "A feature implements a hook as a method with the same name, marked `@hookimpl`; it may leave out parameters. "
    text += "Hooks run in plan order, per step or rarer, never inside a layer. A hook that no active feature implements is not "
    text += "wired. A feature keeps what it needs between hooks on its instance: each plan has its own."
    callers = [
        (code(caller), words, ", ".join(f"[{name}](#{name})" for name, facts in HOOKS.items() if facts.caller == caller))
        for caller, words in CALLERS.items()
    ]
    yield [text]
    yield ["## Which program calls which hook", "", *table(("caller", "calls it in", "hooks"), callers)]
    for group in HOOK_CLASSES:
        words = " ".join(re.findall("[A-Z][a-z]+", group.__name__)[:-1])
        yield [f"## {words}", *(["", _prose(group)] if group.__doc__ else [])]
        for name, hook in vars(group).items():
            if name in HOOKS:
                yield [f"### {name}", "", f"```python\n{_signature(name, hook)}\n```", "", _prose(hook), "", *_facts(name)]
    yield ["## Objects that hooks are given"]
    for kind in (TrainState, Unit):
        yield [f"### {kind.__name__}", "", _prose(kind), "", *_fields(kind)]
    yield _hook_points()


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


def settings(catalog: Catalog) -> Iterator[list[str]]:
    """Yield everything that can be set, and where."""
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
    yield [order]
    yield ["## Job file", "", *table(("key", "meaning"), [(code(key), meaning) for key, meaning in JOB_FILE.items()])]
    headers = ("field", "type", "unit", "meaning", "default", "read from Megatron-LM's", "since Megatron")
    yield ["## World", "", "On the command line with dashes: `--seq-length 4096`.", "", *table(headers, world)]
    yield ["## Features", "", "On the command line `--set feature.setting=value`."]
    for name, model in catalog.models.items():
        if lines := settings_table(name, model):
            yield [f"### {name}", "", *lines]
    usage = "Every plan has the features of its platform: `--set device-emulation.poison=true` needs no `--features`."
    yield ["## Platforms", "", usage]
    for layer in dict.fromkeys(feature for platform in PLATFORMS for feature in base_features(platform)):
        if lines := settings_table(layer.spec.name, layer.Args):
            yield [f"### {layer.spec.name}", "", *lines]
    trainer = "The section `train` of a job file; on the command line of `mindspeed pretrain` with dashes: `--train-iters 300`."
    yield ["## Trainer", "", trainer, "", *table(("key", "type", "default", "meaning"), train)]


def environment_variables(_catalog: Catalog) -> Iterator[list[str]]:
    """Yield every environment variable that mindspeed reads, and those that are compared between ranks."""
    equal = "Ranks that differ in one of these stop before their first collective. `*` stands for any ending."
    compared = [(code(name), meaning) for name, meaning in compared_variables().items()]
    yield table(("variable", "meaning"), [(code(name), meaning) for name, meaning in variables().items()])
    yield ["## Variables that must be equal", "", equal, "", *table(("variable", "what it decides"), compared)]


def python_api(_catalog: Catalog) -> Iterator[list[str]]:
    """Yield functions of ``mindspeed`` with signature and docstring, and what ``mindspeed.plugins`` exports for authors."""
    yield [
        "`mindspeed.plan` makes a plan or raises `ResolutionError` with every problem. `mindspeed.activate` patches Megatron "
        "in this process. Both may be called before or after Megatron is imported."
    ]
    yield ["```python", table_beside(__file__)["python API"].rstrip(), "```"]
    yield ["[Operators](operators.md) are functions of `mindspeed.ops`. [Public interfaces](interfaces.md) says what stays."]
    yield ["## mindspeed"]
    for name in mindspeed.__all__:
        if not name.startswith("_"):
            function = getattr(mindspeed, name)
            signature = str(inspect.signature(function)).replace("'", "")
            yield [f"### {name}", "", f"```python\n{name}{signature}\n```", "", _prose(function)]
    exported = sorted(name for name in cast("list[str]", plugins.__all__) if name.isidentifier())
    rows = [(code(name), _first_line(getattr(plugins, name))) for name in exported]
    yield ["## mindspeed.plugins", "", "What a feature imports.", "", *table(("name", "what it is"), rows)]


def _first_line(thing: Any) -> str:
    """Return the first line of the docstring of a class or function of this project; of another value what it is."""
    if getattr(thing, "__module__", "").startswith("mindspeed") and (inspect.isclass(thing) or inspect.isfunction(thing)):
        return _prose(thing).partition("\n")[0]
    return f"A {type(thing).__name__}." if not inspect.isroutine(thing) else "A function of pydantic."


class MadePage(NamedTuple):
    """A page that is made from what is installed: its title, the file or folder that it shows, and its parts."""

    title: str
    source: str
    parts: Callable[[Catalog], Iterable[Iterable[str]]]

    def text(self, catalog: Catalog) -> str:
        """Return the whole page."""
        return page(self.title, self.source, *self.parts(catalog))


REFERENCE: Final = {
    "features/index": MadePage("Features", "mindspeed/features", index),
    "errors": MadePage("Error codes", "mindspeed/problems/error_codes.yaml", errors),
    "hooks": MadePage("Hooks", "mindspeed/plugins/hookspecs.py", hooks),
    "operators": MadePage("Operators", "mindspeed/ops", operators),
    "settings": MadePage("Settings", "mindspeed/job/fields.py", settings),
    "environment-variables": MadePage(
        "Environment variables", "mindspeed/engine/resolution/variables.yaml", environment_variables
    ),
    "own-trainer": MadePage("Features in your own trainer", "mindspeed/nn", own_trainers),
    "python-api": MadePage("Python API", "mindspeed/plugins/api.py", python_api),
    "support": MadePage("Support", "mindspeed/workbench/diagnostics/support_matrix.yaml", support),
    "drift": MadePage("Drift of Megatron", "mindspeed/engine/inspection/releases", drift),
}
"""Pages by their path below the documentation."""
