"""Compare an untested Megatron with the newest release that features run on, from source text."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mindspeed.engine.inspection.config_arguments import known_arguments
from mindspeed.engine.inspection.contract_reading import definition_nodes, successors
from mindspeed.engine.inspection.contracts import ABSENT, Contract, compare, difference, recorded_contracts
from mindspeed.engine.inspection.releases import recorded_releases, recorded_section
from mindspeed.engine.inspection.sites import definitions, find_site
from mindspeed.engine.planning.drift import DriftRow, Tree, read_targets, recorded_tree, source_tree
from mindspeed.engine.planning.targets import PatchTarget
from mindspeed.engine.resolution.environment import version_in
from mindspeed.megatron_lm.script_options import registered_options

CHANGED: Final = ("appended", "body changed", "changed", "gone")
_GENERIC: Final = frozenset({"a", "add", "of", "use", "enable", "num", "size", "type", "no", "is", "moe"})


@dataclass(frozen=True, slots=True)
class _Release:
    """Hold the contracts, definitions and argument names of a source tree or of a recorded release."""

    version: str
    contracts: Mapping[str, Contract]
    definitions: Mapping[str, str]
    arguments: frozenset[str]


def compare_releases(
    targets: Sequence[PatchTarget], features: Mapping[str, Sequence[str]], new: Path, since: str | None = None
) -> tuple[str, str, list[DriftRow], list[tuple[str, str]]]:
    """``(version, older version, rows of targets, overlaps with features)`` of the checkout ``new`` against ``since``.

    ``since`` is a checkout, which gives diffs too, or a recorded release; by default the newest that is recorded. An overlap is
    ``(feature, new argument)``; ``features`` are names with the arguments of Megatron that each declares. Raises MindSpeedError
    MS502 for a folder without Megatron.
    """
    before = _read(source_tree(Path(since)), targets) if since and Path(since).exists() else _recorded(since)
    with source_tree(new) as tree:
        after = _of_tree(tree, targets)
        rows = [row for target in targets if (row := _compare(target, before, after)) is not None]
    return after.version, before.version, rows, [*overlaps(features, after.arguments - before.arguments)]


def overlaps(features: Mapping[str, Sequence[str]], arguments: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield ``(feature, argument)`` for every new argument of Megatron that has all words of a feature's name, or of an
    argument that the feature declares."""
    for argument in sorted(arguments):
        words = _words(argument)
        for feature, declared in features.items():
            for name in (feature, *declared):
                wanted = _words(name) - _GENERIC
                if wanted and wanted <= words and name != argument:
                    yield feature, argument
                    break


def _words(name: str) -> frozenset[str]:
    """The words of a name, each without the ending of a plural."""
    return frozenset(word.removesuffix("s") for word in re.split(r"[-_.]", name.lower()) if word)


def _compare(target: PatchTarget, before: _Release, after: _Release) -> DriftRow | None:
    """None for a target that this Megatron need not have, or that lies in a part which is not there."""
    if target.guards and not any(version_in(after.version, guard) for guard in target.guards):
        return None
    name, old, new = target.target, before.contracts.get(target.target), after.contracts.get(target.target)
    if new is None:
        return None
    if old is None or (old.kind == ABSENT and new.kind != ABSENT):
        return DriftRow(target.feature, name, "new" if old is not None else "not recorded")
    if new.kind == ABSENT:
        return DriftRow(target.feature, name, "gone", tuple(successors(name, old)))
    verdict = compare(old, new, target.by_name)
    diff = _diff(name, before, after) if verdict != "same" else ""
    return DriftRow(target.feature, name, verdict, why=difference(old, new), diff=diff)


def _diff(target: str, before: _Release, after: _Release) -> str:
    """The unified diff of a definition; empty where one of the two is not at hand as source."""
    old, new = before.definitions.get(target), after.definitions.get(target)
    if old is None or new is None:
        return ""
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), before.version, after.version, lineterm="", n=2)
    return "\n".join(lines)


def _read(tree: AbstractContextManager[Tree], targets: Sequence[PatchTarget]) -> _Release:
    with tree as found:
        return _of_tree(found, targets)


def _of_tree(tree: Tree, targets: Sequence[PatchTarget]) -> _Release:
    contracts = read_targets(tree, targets)
    texts = {name: text for name in contracts if (text := _definition(name))}
    return _Release(tree.version or "of unknown version", contracts, texts, _arguments(known_arguments(), tree.root))


def _recorded(version: str | None) -> _Release:
    release = version or recorded_releases()[-1]
    recorded_tree(release)  # raises for a release that is not recorded
    names = recorded_section(release, "configuration")
    options = recorded_section(release, "command_line")
    known = {name for place in names[1].values() for name in place} if names is not None else set()
    known |= {row["dest"] for row in options[1]} if options is not None else set()
    _, contracts = recorded_contracts(release) or ("", {})
    return _Release(release, contracts, {}, frozenset(known))


def _definition(target: str) -> str:
    """The source text of the statements that bind a target, empty where there are none."""
    site = find_site(target)
    module, _ = definitions(site) or (None, ()) if site is not None else (None, ())
    if site is None or module is None or module.file is None:
        return ""
    lines = Path(module.file).read_text(encoding="utf-8").splitlines()
    nodes = definition_nodes(site)
    starts = [min(part.lineno for part in (node, *getattr(node, "decorator_list", ()))) for node in nodes]
    return "\n".join("\n".join(lines[start - 1 : node.end_lineno]) for start, node in zip(starts, nodes, strict=True))


_ARGUMENT_FILES: Final = ("training/arguments.py", "training/config", "training/argument_utils.py")


def _arguments(configuration: Mapping[str, frozenset[str]], root: Path | None) -> frozenset[str]:
    """Names of configuration fields, and options that are written in the files of Megatron-LM's parser."""
    names = {name for place in configuration.values() for name in place}
    for part in _ARGUMENT_FILES if root is not None else ():
        place = root / "megatron" / part if root is not None else Path()
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place] if place.is_file() else []:
            names |= set(_options_in(file))
    return frozenset(names)


def _options_in(file: Path) -> Iterator[str]:
    """Options that ``add_argument`` gets as text, and annotated fields of dataclasses, which newer parsers are made from."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    yield from (option[2:].replace("-", "_") for option in registered_options(tree))
    fields = (member for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for member in node.body)
    yield from (one.target.id for one in fields if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name))
