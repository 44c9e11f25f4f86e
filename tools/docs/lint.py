"""The page of ``mindspeed check``: what it finds in public commands, the rules that it runs, and its traps."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from mindspeed.plugins.discovery import Catalog
from mindspeed.workbench.lint.traps import known_traps
from mindspeed.workbench.pages.markdown import code, table
from mindspeed.workbench.pages.reference import MadePage
from tools.docs.results import BUG_RESULTS

RECORD = Path(__file__).with_name("lint_results.json")
EXPLANATIONS = Path(__file__).with_name("lint_explanations.yaml")
_WORDS = (
    "`mindspeed check` judges Megatron-LM training commands before they are queued, without torch, without a GPU and without a "
    "feature of mindspeed. It prints every mistake at once. For a script, a JSON file with a program and its args, "
    "a folder, or a command:"
)
_COMMANDS = (
    "```bash",
    "mindspeed check --platform cuda pretrain.sh",
    "mindspeed check --platform cuda --checkout Megatron-LM --arch 9.0 scripts/ --format sarif",
    "mindspeed check --platform cuda -- torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 2 ...",
    "```",
)
_RULES = (
    "The argument and configuration modules of the Megatron-LM that a command names are executed in a separate process, with "
    "stand-ins for torch and other packages. Each assertion and each raised error of their validation is one rule. A rule that "
    "needs a device, a package or a file is listed as not checked. `--static` leaves them out. The file of `--yaml-cfg` is "
    "judged by Megatron-LM's `validate_yaml`; Megatron-LM 0.16.1 itself starts with such a file only with `enable_msc` in it. "
    "Megatron-Bridge recipes import torch and models of other packages, and are not checked."
)
_RECORD = (
    "Every rule is of a function that validates arguments or a configuration. A rule is decided where a dense command and one "
    "with experts together settle it. Refused mutations are accepted commands with one wrong option "
    "(`tools/lint_mutations.txt`)."
)
_PUBLIC = (
    "Commands of public repositories, checked for CUDA devices, and those of MindSpeed and MindSpeed-LLM for NPUs as in "
    "[Moving from MindSpeed](moving-from-mindspeed.md). ms-swift and verl start Megatron with parsers of their own, so "
    "that none of their scripts holds a command of Megatron-LM."
)


_BUGS = (
    "`make test-versions` runs the test of each bug on every release, with and without the patch that mends it. The cells are "
    "what it saw without the patch. `absent`: the release does not have the code. `not run`: there is no test, or the machine "
    "or the copy of Megatron lacks what the test needs. No bug was shown with its patch."
)


def parts(_catalog: Catalog) -> Iterator[list[str]]:
    """Yield what `RECORD` and the traps say; ``python -m tools.lint_results`` writes the record."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    yield [_WORDS, "", *_COMMANDS]
    yield ["## Rules of Megatron-LM", "", _RULES, "", _RECORD, "", *_rules_table(record)]
    yield ["## Speed", "", _speed(record["speed"])]
    yield ["## Public commands", "", _PUBLIC, "", *_public_table(record)]
    yield ["## Findings in public commands", "", *_findings_table(record)]
    yield ["## Bugs of Megatron", "", _BUGS, "", *_bugs_table()]
    yield ["## Traps", "", "Combinations that Megatron-LM accepts, each with its source.", "", *_traps_table()]


LINT = MadePage("Checking commands", "mindspeed/workbench/lint/traps.yaml", parts)


def explanation_of(reason: str) -> str | None:
    """The line that explains a finding of a public command."""
    rows: dict[str, str] = yaml.safe_load(EXPLANATIONS.read_text(encoding="utf-8"))
    return next((text for pattern, text in rows.items() if re.search(pattern, reason)), None)


def reasons_of(record: Mapping[str, Any]) -> dict[str, Counter[str]]:
    """Every finding with the number of commands of each source that have it."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for name, kind, group in _groups(record):
        for count, reason in group["findings"]:
            found[reason][f"{name} {kind}"] += count
    return found


def _groups(record: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for name, source in record.items():
        for kind in ("functional tests", "examples", "scripts"):
            if kind in source:
                yield name, kind, source[kind]


def _rules_table(record: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, source in record.items():
        if (rules := source.get("rules")) is not None:
            share = f"{rules['decided']} of {rules['rules']} ({100 * rules['decided'] / rules['rules']:.0f} %)"
            refused = f"{rules['mutations'] - len(rules['let through'])} of {rules['mutations']}"
            rows.append((name, code(source["commit"][:12]), share, refused))
    return table(("Megatron-LM", "commit", "rules decided", "mutations refused"), rows)


def _speed(speed: Mapping[str, Mapping[str, float]]) -> str:
    one, many = speed["one"], speed["many"]
    return (
        f"One command takes {one['wall']} s and {one['processor']} processor seconds, 300 in a folder {many['wall']} s and "
        f"{many['processor']} processor seconds (2 cores, Python 3.11, at real-time priority: `python -m tools.lint_speed "
        "MEGATRON_LM`)."
    )


def _public_table(record: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, kind, group in _groups(record):
        commands, clean = group["commands"], group["clean"]
        rows.append((name, kind, code(record[name]["commit"][:12]), str(commands), str(clean), str(commands - clean)))
    return table(("repository", "commands of", "commit", "commands", "clean", "wrong"), rows)


def _findings_table(record: Mapping[str, Any]) -> list[str]:
    rows: dict[str, tuple[list[str], Counter[str]]] = {}
    for reason, places in reasons_of(record).items():
        reasons, counts = rows.setdefault(explanation_of(reason) or "", ([], Counter()))
        reasons.append(reason)
        counts += places
    cells = [
        ("; ".join(sorted(reasons)), explanation, "; ".join(f"{source}: {count}" for source, count in counts.items()))
        for explanation, (reasons, counts) in rows.items()
    ]
    return table(("finding", "explanation", "times found"), cells)


def _bugs_table() -> list[str]:
    results = json.loads(BUG_RESULTS.read_text(encoding="utf-8"))
    rows = []
    for bug in known_traps():
        if bug.is_bug:
            seen = [next((state for state, bugs in found.items() if bug.name in bugs), "not run") for found in results.values()]
            rows.append((bug.name, bug.consequence, "yes" if bug.has_fix else "no", *seen, bug.unproven or code(bug.proof)))
    return table(("bug", "consequence", "mended", *results, "test"), rows)


def _traps_table() -> list[str]:
    rows = [(trap.consequence, trap.text, trap.fix, trap.megatron, f"[source]({trap.source})") for trap in known_traps()]
    return table(("consequence", "what happens", "fix", "Megatron-LM", "source"), rows)
