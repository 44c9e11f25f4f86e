"""The Chinese catalogue of the command line: ``python -m tools.docs.catalogue`` brings its messages up to date.

A message that is new gets an empty translation, and one that no code has any more is removed. A test fails for both until the
command has run and the translations are there. The file is one that Babel, Poedit and msgfmt read.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import click

import mindspeed
from mindspeed.cli import main as command_line
from mindspeed.cli.language import help_paragraphs
from mindspeed.files.message_catalogue import CHINESE, read_catalogue
from mindspeed.plugins import Requires
from mindspeed.plugins.conditions import conditions
from mindspeed.plugins.discovery import discover
from mindspeed.problems import Fix, error_codes

HEADER: Final = "Language: zh\nMIME-Version: 1.0\nContent-Type: text/plain; charset=UTF-8\nContent-Transfer-Encoding: 8bit\n"
_PLACES: Final = {
    **dict.fromkeys(("gettext", "gettext.gettext", "marked", "_"), 0),
    **dict.fromkeys(("Text.of", "self.say", "words.say", "self.translate", "words.translate"), 0),
    **dict.fromkeys(("advice", "Fix.advise", "Fix.nothing"), 0),
    "Problem": 1,
}
"""Functions that mark or translate a text, and the place of that among their arguments."""


def messages() -> dict[str, str]:
    """Return every message of the command line and the place where it stands."""
    found: dict[str, str] = {}
    for group in (_of_commands(), _of_source(), _of_click(), _of_codes(), _of_features()):
        for message, place in group:
            if message.strip():
                found.setdefault(message, place)
    return found


def catalogue(translations: Mapping[str, str]) -> str:
    """Return the text of the catalogue with these translations."""
    entries = [_entry("", HEADER)]
    entries += [f"#: {place}\n{_entry(message, translations.get(message, ''))}" for message, place in messages().items()]
    return "\n".join(entries)


def _entry(message: str, translation: str) -> str:
    return "".join(
        f"{key} {json.dumps(text, ensure_ascii=False)}\n" for key, text in (("msgid", message), ("msgstr", translation))
    )


def _of_commands() -> Iterator[tuple[str, str]]:
    context = click.Context(command_line, info_name="mindspeed")
    yield from _of_command(command_line, context)


def _of_command(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    place = context.command_path
    for text in (*help_paragraphs(command), command.short_help or "", command.epilog or ""):
        yield text, place
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield parameter.help or "", place
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from _of_command(below, click.Context(below, parent=context, info_name=name))


def _of_source() -> Iterator[tuple[str, str]]:
    root = Path(mindspeed.__file__).parent
    for file in sorted(root.rglob("*.py")):
        for message in _marked_in(file):
            yield message, f"mindspeed/{file.relative_to(root)}"


def _of_click() -> Iterator[tuple[str, str]]:
    spec = find_spec("click")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("click")
    for name in ("core", "decorators", "exceptions", "formatting", "parser", "types"):
        for message in _marked_in(Path(spec.origin).with_name(f"{name}.py")):
            yield message, f"click/{name}.py"


def _marked_in(file: Path) -> Iterator[str]:
    """Yield the constants that functions of a file mark or translate."""
    source = file.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and node.args:
            place = _PLACES.get(ast.unparse(node.func), len(node.args))
            yield from (text for argument in node.args[place : place + 1] for text in _constants(argument))


def _constants(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.IfExp):
        yield from _constants(node.body)
        yield from _constants(node.orelse)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def _of_codes() -> Iterator[tuple[str, str]]:
    for code, paragraph in error_codes().items():
        yield paragraph, f"error code {code}"


def _of_features() -> Iterator[tuple[str, str]]:
    """Yield summaries, descriptions of settings, and the sentences of constraints."""
    catalog = discover(only=())
    for name, spec in catalog.specs.items():
        yield catalog.feature(name).summary(), f"feature {name}"
        for field in catalog.models[name].model_fields.values():
            yield field.description or "", f"feature {name}"
        for constraint in spec.constraints:
            if not isinstance(constraint, Requires) or constraint.reason:
                yield getattr(constraint, "reason", ""), f"feature {name}"
        for condition in conditions(spec.constraints):
            yield condition.message, f"feature {name}"
            for text in _texts_of(condition.fix):
                yield text, f"feature {name}"


def _texts_of(fixes: tuple[Fix, ...]) -> Iterator[str]:
    for fix in fixes:
        if fix.verb in ("advice", "nothing"):
            yield fix.name
        yield fix.note
        yield from _texts_of(fix.steps)


if __name__ == "__main__":
    known = read_catalogue(CHINESE.read_text(encoding="utf-8")) if CHINESE.exists() else {}
    CHINESE.write_text(catalogue(known), encoding="utf-8")
    missing = [message for message in messages() if message not in known]
    print(f"{len(messages())} messages, {len(missing)} without a translation")
