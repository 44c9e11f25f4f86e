"""Sample texts that users read, as users meet them: ``python -m tools.prose_sample SEED`` prints Markdown for readers.

The sample has a fixed number of texts of each kind and is the same for one seed and source. Each text has the surroundings
that a user has when reading it: the page and heading of a paragraph, the type and default of a setting, the command of an
option, code and fix of a problem. ``<name>`` stands for a value. Two readers who did not write the texts judge whether they
understood each at first reading.
"""

from __future__ import annotations

import ast
import inspect
import random
import re
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import click
import yaml

from mindspeed.cli import main as command_line
from mindspeed.cli.request_options import TITLES
from mindspeed.compat.provided_names import PROVIDED
from mindspeed.job.world import World
from mindspeed.plugins.conditions import Condition
from mindspeed.plugins.discovery import discover
from mindspeed.plugins.feature import Feature
from mindspeed.plugins.hookspecs import HOOK_CLASSES
from mindspeed.problems import filled, on_command_line
from mindspeed.problems import fixes as fix_names
from mindspeed.workbench.pages.features import MODEL, sentence, type_text
from tools.prose import literal

ROOT: Final = Path(__file__).parents[1]
SIZES: Final[Mapping[str, int]] = {
    "summary": 10,
    "guide": 8,
    "setting": 8,
    "problem": 6,
    "condition": 6,
    "reason": 6,
    "help": 8,
    "hook": 4,
    "data": 4,
}
"""Number of texts of each kind in a sample of 60."""
SHOWN: Final = {
    "cpu.yaml": "features plan --base, what the CPU platform changes:\n\n{key}\n  {text}",
    "patches.yaml": "features plan --all, a patch:\n\n{key}\n  {text}",
    "fingerprint.yaml": "Page “Environment variables”, table “Variables that must be equal”, what each decides:\n\n`{key}`: "
    "{text}",
    "variables.yaml": "Page “Environment variables”:\n\n`{key}`: {text}",
    "error_codes.yaml": "$ mindspeed explain {key}\n\n{text}",
    "traps.yaml": "mindspeed check, a warning about a Megatron-LM command:\n\n{text}",
    "old_modules.yaml": "{key} is a name of Ascend's original MindSpeed that this package does not provide\n  fix: {text}",
    "provided_names.yaml": "{key} is a name of Ascend's original MindSpeed that this package does not provide\n  fix: {text}",
    "feature_classes.yaml": "help({key}), a class for MindSpeed's scripts:\n\n{key} of MindSpeed has no effect here: {text}",
}
"""What a user sees together with a sentence of a data file."""
PARTS: Final = re.compile(r"\{(?:self\.)?(?:text|reason|sentence|what|words|why|wrong|found|end|kind)\b")
"""Values that are a part of the sentence, which a sample cannot show."""


def main() -> None:
    """Print a sample with its instructions."""
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    print(f"# Sample {seed}\n\n{__doc__.partition(chr(10) * 2)[2]}")
    for number, (kind, shown) in enumerate(sample(seed), 1):
        print(f"## {number}. {kind}\n\n{shown.strip()}\n")


def sample(seed: int) -> list[tuple[str, str]]:
    """Return kind and shown text of a sample."""
    draw = random.Random(seed)
    return [(kind, shown) for kind, size in SIZES.items() for shown in draw.sample(sorted(set(KINDS[kind]())), size)]


def summaries() -> Iterator[str]:
    """Yield names, category and docstring of features, as ``features list`` and the first lines of a page have them."""
    for feature in features():
        spec = feature.spec
        yield f"Feature `{spec.name}` (category {spec.category.value}, level {spec.level})\n\n{inspect.getdoc(feature)}"


def settings() -> Iterator[str]:
    """Yield settings as on the page of their feature."""
    for feature in features():
        for key, field in feature.Args.model_fields.items():
            value = None if field.is_required() else field.get_default(call_default_factory=True)
            default = "required" if field.is_required() else "not set by default" if value is None else f"default {value}"
            yield (
                f"{_feature(feature)}\n\nsetting `{feature.spec.name}.{key}`, {type_text(field)}, "
                f"{default}:\n\n{field.description}"
            )


def conditions() -> Iterator[str]:
    """Yield problems that conditions make, with example values from the tests."""
    VALUES.maps[0] = EXAMPLES["conditions"]
    for feature in features():
        for constraint in feature.spec.constraints:
            if isinstance(constraint, Condition):
                name = feature.spec.name
                code = {"refuse": "MS304 ", "warn": "warning: "}.get(constraint.otherwise, "left out: ")
                template = constraint.message.replace("{feature}", name)
                values = _example(template)
                fix = _fill(on_command_line(filled(constraint.fix, name, str)).replace("{feature}", name), values)
                yield f"```\n{code}{name}: {_fill(template, values)}\n  because: {name}: requested\n" + (
                    f"  fix: {fix}\n```" if fix else "```"
                )


def reasons() -> Iterator[str]:
    """Yield reasons of patches, overrides, constraints and claims, below the feature that has them."""
    for feature in features():
        name = feature.spec.name
        if reason := feature.spec.numerics.reason:
            yield f"{_feature(feature)}\n\nnumerics: {feature.spec.numerics.claim}, {reason}"
        for constraint in feature.spec.constraints:
            if getattr(constraint, "reason", ""):
                where = "Page of the feature, “Works with, needs and refuses”"
                yield f"{_feature(feature)}\n\n{where}:\n\n{sentence(name, constraint)}"
        for patch in _changes(feature, "patches"):
            shown = f"{name}: {patch.reason}\n  {patch.kind} {patch.target}"
            yield f"{_feature(feature)}\n\npatches (features plan --all):\n\n{shown}"
        for override in _changes(feature, "megatron_args"):
            shown = f"{override.argument} = {override.value}  {name}: {override.reason}"
            yield f"{_feature(feature)}\n\nMegatron arguments (features plan --all):\n\n{shown}"


def help_texts() -> Iterator[str]:
    """Yield the help of commands, and each option once, with a command."""
    return _help("mindspeed", command_line, set())


def _help(name: str, command: click.Command, seen: set[tuple[str | None, str]]) -> Iterator[str]:
    short = command.get_short_help_str(limit=200)
    if command.help:
        yield f"$ {name} --help\n\n{inspect.cleandoc(command.help)}"
    for option in command.params:
        if isinstance(option, click.Option) and option.help and (option.name, option.help) not in seen:
            seen.add((option.name, option.help))
            names = "/".join(option.opts) + ("" if option.is_flag else f" {option.make_metavar(click.Context(command))}")
            yield f"$ {name} --help\n\n{short}\n\n{TITLES[type(option)]}:\n\n`{names}`  {option.help}"
    if isinstance(command, click.Group):
        context = click.Context(command)
        for verb in command.list_commands(context):
            yield from _help(f"{name} {verb}", command.get_command(context, verb) or command, seen)


def problems() -> Iterator[str]:
    """Yield the problems in the code with their fixes, and with example values where a test has them."""
    for file in sorted((ROOT / "mindspeed").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        known = {name: value for node in tree.body for name, value in _assigned(node)}
        assigned = dict(known)
        for node in sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0)):
            if isinstance(node, ast.FunctionDef):
                assigned = dict(known)
            assigned.update(_assigned(node))
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Problem" and len(node.args) > 1:
                code, message, *_ = (literal(assigned.get(getattr(part, "id", ""), part)) for part in node.args)
                message, special = _inlined(message, assigned), {}
                VALUES.maps[0] = EXAMPLES.get(file.name, {})
                for words, values in VALUES.maps[0].items():
                    special = values if isinstance(values, dict) and words in message else special
                VALUES.maps[0] = {**VALUES.maps[0], **special}
                if len(re.sub(r"\{[^}]*\}", "", message).split()) > 3 and not PARTS.search(message):
                    fixes = [word.value for word in node.keywords if word.arg == "fix"] or node.args[5:6]
                    values = {**_example(message, f"{code} "), **{name: str(value) for name, value in special.items()}}
                    text = _fill(message, values)
                    fix = "".join(_fix(fix, assigned, values) for fix in fixes) or _tested_fix(text)
                    where = next((_fill(literal(word.value), values) for word in node.keywords if word.arg == "where"), "")
                    lines = (f"{code} {text}", where and f"  where: {where}", fix and f"  fix: {fix}")
                    yield "```\n" + "\n".join(filter(None, lines)) + "\n```"


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names and values of an assignment."""
    if isinstance(node, ast.AnnAssign | ast.Assign) and node.value is not None:
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple) and len(target.elts) == len(node.value.elts):
            pairs = list(zip(target.elts, node.value.elts, strict=True))
        yield from ((name.id, value) for name, value in pairs if isinstance(name, ast.Name))


def _inlined(message: str, assigned: Mapping[str, ast.AST]) -> str:
    """Return a message with the texts that its module assigns to names in it."""
    return re.sub(r"\{(\w+)\}", lambda hole: (hole[1] in assigned and literal(assigned[hole[1]])) or hole[0], message)


EXAMPLES: Final[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("prose_values.yaml").read_text(encoding="utf-8"))
VALUES: Final[ChainMap[str, Any]] = ChainMap({}, EXAMPLES)
"""Values of expressions in messages, where no test or page has an example; first those of the module that is read."""


def _placeholder(expression: str) -> str:
    """Return a value of an expression, or what stands for one: the last name in it."""
    last = (re.findall("[A-Za-z_]+", expression) or ["value"])[-1]
    return str(VALUES.get(expression, VALUES.get(last, f"<{last.strip('_').lower()}>")))


class _Name(str):
    """A placeholder, of which every part and result is the placeholder."""

    def __getitem__(self, key: Any) -> str:
        return self

    def __getattr__(self, name: str) -> str:
        return self

    def __call__(self, *_: Any) -> str:
        return self


class _Value(dict[str, Any]):
    """Names of a module: what no other mapping has reads as a placeholder."""

    def __missing__(self, name: str) -> str:
        return _Name(_placeholder(name))


class _Evaluated(ast.NodeTransformer):
    """Put values of a message in the place of the expressions in its fix."""

    def __init__(self, values: Mapping[str, str], assigned: Mapping[str, ast.AST]) -> None:
        self._values, self._assigned = values, dict(assigned)

    def visit(self, node: ast.AST) -> Any:
        """Return the constant for an expression that has a value, and any other node with such parts."""
        if isinstance(node, ast.FormattedValue):
            inner = self.visit(node.value)
            return ast.Constant(str(inner.value) if isinstance(inner, ast.Constant) else _placeholder(ast.unparse(node.value)))
        value = self._values.get(ast.unparse(node)) if isinstance(node, ast.expr) else None
        if isinstance(node, ast.Name) and value is None and node.id in self._assigned:
            return self.visit(self._assigned.pop(node.id))
        if value is None or isinstance(node, ast.Constant):
            return self.generic_visit(node)
        return ast.Constant(int(value) if value.isdigit() else value.strip("'"))


def _fix(node: ast.AST, assigned: Mapping[str, ast.AST], values: Mapping[str, str]) -> str:
    """Return a fix in source, as far as its expression says it."""
    known = {**{name: str(value) for name, value in VALUES.items()}, **values}
    names = _Value(vars(fix_names), suggestion=lambda near, otherwise: otherwise)
    try:
        source = ast.unparse(_Evaluated(known, assigned).visit(ast.parse(ast.unparse(node), mode="eval")))
        fix = eval(source, {"__builtins__": {}}, names)
        steps = fix if isinstance(fix, tuple) else fix_names.advice(fix) if isinstance(fix, str) else (fix,)
        text = _fill(on_command_line(steps), values)
        return "" if re.fullmatch(r"<[\w ]*>", text) else text
    except Exception:  # an expression of values that only exist in a run
        return ""


def _tested_fix(text: str) -> str:
    """Return the fix that a test or page has after the text of a problem."""
    found = re.search(rf'{re.escape(text)}(?: \| |\\n  fix: |\n  fix: )([^"\n\\]+)', _quoted())
    return found[1] if found else ""


def hooks() -> Iterator[str]:
    """Yield hooks with their signatures."""
    for owner in HOOK_CLASSES:
        for name, hook in vars(owner).items():
            if inspect.isfunction(hook) and hook.__doc__:
                yield f"hook `{name}{inspect.signature(hook)}` of {owner.__name__}\n\n{inspect.getdoc(hook)}"


def guides() -> Iterator[str]:
    """Yield paragraphs of hand-written guides with title, heading and the glossary's words in them."""
    for file in sorted((ROOT / "docs").glob("*.md")):
        page = file.read_text(encoding="utf-8")
        page = re.sub(r"(?ms)^```.*?^```", lambda fence: fence[0].replace("\n\n", "\n"), re.sub(r"(?s)<!--.*?-->", "", page))
        blocks = [block.strip() for block in page.split("\n\n") if block.strip()]
        title = heading = ""
        for before, block, after in zip(["", *blocks], blocks, [*blocks[1:], ""], strict=False):
            if found := re.match(r"(#+) (.*)", block):
                title, heading = (found[2], "") if found[1] == "#" else (title, found[2])
            elif re.match(r"[A-Z`]", block) and not block.startswith("```") and len(block.split()) > 12:
                first = "" if before.startswith("#") else f"\n\n(before it)\n\n{before}"
                then = f"\n\n(after it)\n\n{after}" if block.endswith(":") else ""
                place = f"Page “{title}”, section “{heading or 'beginning'}”"
                yield f"{place}{first}\n\n(the text to judge)\n\n{block}{then}{_glossary(block)}"


def data() -> Iterator[str]:
    """Yield the sentences of data files, with the output that shows them."""
    for file in sorted((ROOT / "mindspeed").rglob("*.yaml")):
        shown, value = SHOWN.get(file.name), yaml.safe_load(file.read_text(encoding="utf-8"))
        if file.name == "known_errors.yaml":
            for error in value:
                yield f"$ mindspeed explain '{error['pattern']}'\n\n{error['cause']}\n  fix: {error['fix']}"
        elif file.name in ("flags.yaml", "other_flags.yaml"):
            yield from (f"mindspeed check, about a script for MindSpeed:\n\n{said}" for row in value for said in _flag(row))
        elif file.name == "old_modules.yaml":
            asked = {name: f"get_args of {name}" if name in PROVIDED or _is_module(name) else name for name in value}
            yield from _data({asked[name]: said for name, said in value.items()}, SHOWN[file.name], "")
        elif shown is not None:
            yield from _data(value, shown, "")


def _is_module(name: str) -> bool:
    return (ROOT / f"{name.replace('.', '/')}.py").exists()


def _flag(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is reported of a flag of MindSpeed."""
    flag = row.get("flag") or next(iter(row.get("flags", {})), "")
    if "noop_reason" in row:
        yield f"{flag} is not needed: {row['noop_reason']}"
    elif "means" in row:
        yield f"{flag} is translated automatically to Megatron's {row['means']}"
    elif "reason" in row:
        said = {"not-needed": "is not needed", "left-out": "is skipped", "library": "belongs to MindSpeed-LLM"}
        fix = row.get("fix", "" if row["kind"] == "not-needed" else f"remove {flag}")
        yield f"{flag} {said.get(row['kind'], 'has no equivalent')}: {row['reason']}" + (f"\n  fix: {fix}" if fix else "")


def _data(value: Any, shown: str, key: str) -> Iterator[str]:
    if isinstance(value, Mapping) and (text := value.get("text", value.get("reason"))):
        fix = f"\n  fix: {value['fix']}" if "fix" in value else ""
        places = {"types": "torch.cuda:", "collectives": "torch.distributed:"}
        where = str(value.get("prefix", f"{value['module']}:" if "module" in value else places.get(key, "")))
        names = [f"{where}{value['names'].split()[0]}"] if "names" in value and where else []
        target = value.get("target", f"{value['argument']} = {value.get('value')}" if "argument" in value else key)
        yield shown.format(key=[*names, target][0], text=text) + fix
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _data(inner, shown, str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _data(inner, shown, key)
    elif isinstance(value, str) and len(value.split()) > 3:
        yield shown.format(key=key, text=value)


KINDS: Final[Mapping[str, Callable[[], Iterator[str]]]] = {
    "summary": summaries,
    "guide": guides,
    "setting": settings,
    "problem": problems,
    "condition": conditions,
    "reason": reasons,
    "help": help_texts,
    "hook": hooks,
    "data": data,
}


@cache
def features() -> tuple[type[Feature[Any]], ...]:
    """Return the built-in features."""
    catalog = discover(only=())
    return tuple(catalog.feature(name) for name in sorted(catalog.usable))


def _feature(feature: type[Feature[Any]]) -> str:
    return f"Feature `{feature.spec.name}`: {feature.summary()}."


def _changes(feature: type[Feature[Any]], hook: str) -> list[Any]:
    try:
        return list(getattr(feature(feature.Args(), World(MODEL)), hook, list)())
    except Exception:  # a feature with required settings, or one that refuses the model
        return []


@cache
def _quoted() -> str:
    """Return the tests and pages, in which messages have values."""
    files = (file for folder in ("tests", "docs") for file in sorted((ROOT / folder).rglob("*.*")))
    text = "\n".join(file.read_text(encoding="utf-8") for file in files if file.suffix in (".py", ".md", ".txt"))
    return re.sub(r'"\n *f?"', "", text)


def _example(template: str, code: str = "") -> dict[str, str]:
    """Return the values that a test or page has in a message. It begins a quoted text, or follows its ``code``."""
    holes = re.findall(r"\{([^}]*)\}", template)
    pattern = r'([^\s"“”{}*\\]+?)'.join(re.escape(part) for part in re.split(r"\{[^}]*\}", template))
    found = re.search(rf'(?:(?<=["“])|(?<={code or " "})){pattern}(?= \| |["”\n\\])', _quoted()) if holes else None
    return dict(zip(holes, found.groups() if found else map(_placeholder, holes), strict=True))


def _fill(text: str, values: Mapping[str, str]) -> str:
    """Return a text with a value in every hole."""
    return re.sub(r"\{([^}]*)\}", lambda hole: values.get(hole[1], _placeholder(hole[1])), text)


@cache
def _terms() -> Mapping[str, str]:
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.M)
    return {term: meaning for names, meaning in rows[1:] for term in names.split(", ")}


def _glossary(text: str) -> str:
    """Return the glossary's lines for its terms in a text."""
    found = {term: meaning for term, meaning in _terms().items() if re.search(rf"\b{re.escape(term)}s?\b", text)}
    lines = "\n".join(f"- {term}: {meaning}" for term, meaning in found.items())
    return f"\n\n(glossary)\n{lines}" if lines else ""


if __name__ == "__main__":
    main()
