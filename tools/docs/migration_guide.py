"""The tables of docs/moving-from-mindspeed.md, from the code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mindspeed.compat.old_flags.flags import OLD_FLAGS
from mindspeed.compat.old_flags.model_arguments import RULES
from mindspeed.compat.old_flags.other_flags import flag_groups
from mindspeed.compat.old_modules import OLD_MODULES, replacement
from mindspeed.plugins.discovery import Catalog

PAGE: Final = "moving-from-mindspeed.md"
PUBLISHED: Final = Path(__file__).with_name("published_commands.json")


def flag_rows(catalog: Catalog) -> list[str]:
    """One row per old flag: the flag, the feature, what to write now."""
    anchors: set[str] = set()
    rows = ["| old flag | feature | write instead |", "| --- | --- | --- |"]
    for old in OLD_FLAGS:
        values = {feature: [value for value, name in old.choices.items() if name == feature] for feature in old.features}
        for feature in old.features:
            value = "" if not old.choices or old.chooser else f" {' or '.join(values[feature])}"
            if old.chooser:
                value = f" with {old.chooser} {values[feature][0]}"
            spelling = f"`{old.new_spelling(feature, True if old.takes == 'nothing' else 'VALUE')}`"
            there = spelling if feature in catalog.usable else "not there yet"
            there = f"not needed: {old.noop_reason}" if old.noop_reason else there
            rows.append(f"| {_anchor(old.flag, anchors)}`{old.flag}{value}` | {feature} | {there} |")
    return rows


def _anchor(flag: str, used: set[str]) -> str:
    """The target of links to a flag, at its first row: ``moving-from-mindspeed.md#use-nanopipe``."""
    name = flag.lstrip("-")
    if name in used:
        return ""
    used.add(name)
    return f'<a id="{name}"></a>'


def described_flags() -> Iterator[tuple[str, str]]:
    """Yield every flag that stands for no feature, with what becomes of it."""
    for rule in RULES:
        yield from ((flag, rule.outcome) for flag in rule.flags)
    for group in flag_groups():
        yield from ((flag, group.outcome) for flag in group.flags)


def other_rows() -> list[str]:
    """One row per outcome of the flags that stand for no feature."""
    anchors: set[str] = set()
    outcomes: dict[str, list[str]] = {}
    for flag, outcome in described_flags():
        outcomes.setdefault(outcome, []).append(f"{_anchor(flag, anchors)}`{flag}`")
    rows = [f"| {', '.join(flags)} | {outcome} |" for outcome, flags in outcomes.items()]
    return ["| flags of MindSpeed and MindSpeed-LLM | what becomes of them |", "| --- | --- |", *rows]


def module_rows() -> list[str]:
    """One row per old import name that does not exist: the name, and what takes its place."""
    rows = ["| old import name | what takes its place |", "| --- | --- |"]
    operators = "mindspeed.ops."  # which of them exist is a page of its own
    return rows + [f"| `{name}` | {replacement(name)} |" for name in sorted(OLD_MODULES) if not name.startswith(operators)]


def published_rows() -> list[str]:
    """What a dry run said of every published training command: counts, and the reasons of those that are refused."""
    record = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    sources = ", ".join(
        f"{name} at {source['commit'][:10]} ({source['planned']} of {source['commands']})"
        for name, source in record["checkouts"].items()
    )
    unknown = ", ".join(f"`{flag}`" for flag in record["unknown"])
    lines = [
        f"**{record['planned']} of {record['commands']}** published commands that pretrain have a plan for the "
        f"{record['platform'].upper()} with Megatron-LM {record['megatron']}: {sources}; read on {record['date']} by "
        "`python -m tools.published_commands`.",
        "",
        f"Options that no parser registers, mostly misspelt: {unknown}." if unknown else "No option is unknown.",
        "",
        "Commands that fine-tune, generate or evaluate are not counted, because they start MindSpeed-LLM's own programs. "
        "The table below lists why commands are refused. A command can have several reasons. The column *commands* counts all "
        "commands that have the reason of the row. The column *alone* counts those that have no other reason.",
        "",
        "| commands | alone | reason |",
        "| --- | --- | --- |",
    ]
    return lines + [f"| {count} | {alone} | {_escaped(reason)} |" for count, alone, reason in record["reasons"]]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def filled(page: str, catalog: Catalog) -> str:
    """A page with its marked tables made anew."""
    tables = {
        "flags": flag_rows(catalog),
        "other flags": other_rows(),
        "published commands": published_rows(),
        "imports": module_rows(),
    }
    for mark, rows in tables.items():
        begin, rest = page.split(f"<!-- {mark} -->\n")
        end = rest[rest.index(f"<!-- end of {mark} -->") :]
        page = "\n".join([f"{begin}<!-- {mark} -->", *rows, end])
    return page
