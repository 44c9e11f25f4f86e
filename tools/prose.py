"""Lint the texts that users read: ``python -m tools.prose`` prints every finding and fails where there is one.

Texts come from declarations, help, data files, and calls that make problems and notes. ``prose.txt`` has the banned words.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import yaml

from mindspeed.cli import main as command_line
from mindspeed.job.world import FIELDS
from mindspeed.plugins.conditions import Condition, ModelCondition
from mindspeed.plugins.discovery import discover
from mindspeed.plugins.hookspecs import HOOK_CLASSES
from mindspeed.problems import filled, on_command_line

ROOT: Final = Path(__file__).parents[1] / "mindspeed"
LONGEST: Final = 25  # words of a sentence
LINES: Final = Path(__file__).with_name("prose.txt").read_text(encoding="utf-8").splitlines()[1:]
BANNED: Final = {
    re.compile(rf"(?<![\w-])(?:{words})(?![\w-])", re.I): new for words, new in (line.split(" => ") for line in LINES)
}
NO_FIX: Final = "\0"  # the end of a problem that has no fix
QUOTED: Final = re.compile(r"`[^`]*`|\{[^}]*\}|--?\w[\w.-]*(?:[= ][A-Z]+)?")
ENDS: Final = re.compile(r"(?<=[.?!])\s+|\n\s*\n|\n\s*-\s|  +")
RIDDLE: Final = re.compile(r"(?:what|who|whoever|which|where|whether|whose|that|how|it|its|one|nothing)\b")
MESSAGES: Final = ("problem", "condition", "note", "finding")
REFUSALS: Final = dict.fromkeys(("UsageError", "ClickException", "BadParameter", "SettingsError"), (0, "problem"))
CALLS: Final = {"Problem": (1, "problem"), "PlanNote": (2, "note"), "Finding": (1, "finding"), "Advice": (0, "fix"), **REFUSALS}
KEYWORDS: Final = {"reason": "reason", "note": "fix", "message": "problem"}
NOT_TEXT: Final = ("pattern", "source", "names", "functions", "means")  # keys of data files


class Text(NamedTuple):
    """A text that users read, its kind and where it stands."""

    kind: str
    where: str
    text: str


def findings(text: Text) -> Iterator[str]:
    """Yield what is wrong with one text."""
    plain = QUOTED.sub("X", text.text)
    yield from (f"{found[0]!r}: write {instead}" for rule, instead in BANNED.items() if (found := rule.search(plain)))
    for sentence in ENDS.split(text.text):
        if (length := len(re.findall(r"\w\S*", sentence))) > LONGEST:
            yield f"a sentence of {length} words: {sentence[:50]!r}"
    if "<lambda>" in text.text:
        yield "<lambda>: write a sentence"
    if (text.kind in MESSAGES and RIDDLE.match(text.text)) or (text.kind == "docstring" and RIDDLE.match(text.text.lower())):
        yield f"begins with {text.text.split()[0]!r}: begin with a subject or a verb"
    if re.search(r"\{[^}]*\} (?:is|are) not known$", text.text):
        yield "'is not known' is glued to another text: write a sentence"
    if text.text.endswith(NO_FIX):
        yield "no fix"


def declared() -> Iterator[Text]:
    """Yield the texts of features, job fields and hooks, as the pages and the plan have them."""
    catalog = discover(only=())
    for name in sorted(catalog.usable):
        feature = catalog.feature(name)
        yield Text("summary", name, inspect.getdoc(feature) or "")
        yield from (
            Text("setting", f"{name}.{key}", field.description or "") for key, field in feature.Args.model_fields.items()
        )
        yield Text("reason", name, feature.spec.numerics.reason or "")
        for constraint in feature.spec.constraints:
            if isinstance(constraint, Condition | ModelCondition):
                yield Text("condition", name, constraint.message)
                yield Text("fix", name, on_command_line(filled(constraint.fix, name, str)))
            yield Text("reason", name, getattr(constraint, "reason", ""))
    yield from (Text("field", name, field.meaning) for name, field in FIELDS.items())
    hooks = chain.from_iterable(vars(owner).items() for owner in HOOK_CLASSES)
    yield from (Text("hook", name, inspect.getdoc(hook) or "") for name, hook in hooks if inspect.isfunction(hook))


def help_texts(name: str, command: click.Command) -> Iterator[Text]:
    """Yield the help of a command, of its options and of the commands below it."""
    yield from (Text("help", name, text) for text in (command.help, command.short_help, command.epilog) if text)
    yield from (Text("help", f"{name} {option.name}", getattr(option, "help", "") or "") for option in command.params)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for verb in command.list_commands(context):
            yield from help_texts(f"{name} {verb}", command.get_command(context, verb) or command)


def data_texts(value: Any, where: str) -> Iterator[Text]:
    """Yield the sentences of a data file."""
    if isinstance(value, Mapping):
        yield from (text for key, inner in value.items() if key not in NOT_TEXT for text in data_texts(inner, where))
    elif isinstance(value, list):
        yield from (text for inner in value for text in data_texts(inner, where))
    elif isinstance(value, str) and len(value.split()) > 3:
        yield Text("data", where, value)


def literal(node: ast.AST) -> str:
    """Return the text of a literal, with the source of an expression inside it in braces; empty for any other node."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(p.value) if isinstance(p, ast.Constant) else f"{{{ast.unparse(p.value)}}}" for p in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def written(source: str, where: str) -> Iterator[Text]:
    """Yield the texts in the calls of a module, and the first lines of its public docstrings."""
    for node in ast.walk(ast.parse(source)):
        at = f"{where}:{getattr(node, 'lineno', 1)}"
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            position, kind = CALLS.get(name, (0, ""))
            if kind and len(node.args) > position:
                fixed = name != "Problem" or len(node.args) > 5 or any(word.arg in ("fix", None) for word in node.keywords)
                yield Text(kind, at, literal(node.args[position]) + ("" if fixed else NO_FIX))
            yield from (Text(KEYWORDS[key.arg], at, literal(key.value)) for key in node.keywords if key.arg in KEYWORDS)
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and not getattr(node, "name", "").startswith("_"):
            yield Text("docstring", at, (ast.get_docstring(node) or "").partition("\n")[0])


def texts() -> Iterable[Text]:
    """Yield every text that users read, once."""
    files = [(path, path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*")) if path.suffix in (".py", ".yaml")]
    code = (written(text, str(path.relative_to(ROOT))) for path, text in files if path.suffix == ".py")
    data = (data_texts(yaml.safe_load(text), path.name) for path, text in files if path.suffix == ".yaml")
    found = chain(declared(), help_texts("mindspeed", command_line), *data, *code)
    return dict.fromkeys(text for text in found if text.text)


def main() -> int:
    """Print every finding and the number of each kind."""
    found = [(text, finding) for text in texts() for finding in findings(text)]
    print(*(f"{text.where}: {text.kind}: {finding}\n    {text.text!r}" for text, finding in found), sep="\n")
    print(f"{len(found)} findings", *(f"{kind} {count}" for kind, count in Counter(text.kind for text, _ in found).items()))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
