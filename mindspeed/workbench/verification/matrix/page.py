"""The page of the matrix: a self-contained heat map, and the same verdicts as data."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from mindspeed._version import __version__
from mindspeed.engine.inspection.megatron_copies import megatron_version
from mindspeed.files.tables import table_beside
from mindspeed.plugins.discovery import Catalog
from mindspeed.workbench.verification.matrix.cases import LAYOUTS, SWITCHES, MatrixCase
from mindspeed.workbench.verification.matrix.reach import Sources
from mindspeed.workbench.verification.matrix.store import is_stale
from mindspeed.workbench.verification.matrix.verdicts import CaseResult, count, result_from_json

FORMAT: Final = 1
_DATA: Final = "/*DATA*/null"


def summary(known: Mapping[str, CaseResult], catalog: Catalog, sources: Sources) -> dict[str, Any]:
    """Everything that the page shows; cases are sorted by name, and those judged on other sources are marked stale.

    Searches leave verdicts of settings, given sizes and commands in a store: the page has none of these.
    """
    features = sorted(catalog.usable, key=lambda name: (catalog.feature(name).spec.category.value, name))
    cases = [result for _, result in sorted(known.items()) if _is_published(result.case, catalog)]
    stale = {result.case.name for result in cases if is_stale(result, sources)}
    return {
        "format": FORMAT,
        "versions": {
            "mindspeed": __version__,
            "commit": _commit(),
            "python": platform.python_version(),
            "torch": version("torch"),
            "megatron": megatron_version(),
        },
        "features": [{"name": name, "category": catalog.feature(name).spec.category.value} for name in features],
        "layouts": list(LAYOUTS),
        "reproductions": {name: switch.reproduction for name, switch in SWITCHES.items() if switch.reproduction},
        "elsewhere": table_beside(__file__)["elsewhere"],
        "verdicts": count(result for result in cases if not result.case.switch),
        "stock": count(result for result in cases if result.case.switch),
        "stale": len(stale),
        "cases": [_row(result) | ({"stale": True} if result.case.name in stale else {}) for result in cases],
    }


def _is_published(case: MatrixCase, catalog: Catalog) -> bool:
    return catalog.usable.keys() >= set(case.features) and not (case.settings or case.given or case.test)


def _row(result: CaseResult) -> dict[str, Any]:
    """A verdict without what is empty, and with few digits."""
    row = result.to_json() | {"ratio": float(f"{result.ratio:.3g}")}
    row["case"] = {name: value for name, value in row["case"].items() if value}
    return {name: value for name, value in row.items() if value}


def _commit() -> str:
    """The commit of the checkout that this is; '' where it is none."""
    words = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--match=", "--dirty")
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def published(path: Path) -> dict[str, CaseResult]:
    """Read the verdicts of a ``matrix.json`` that were not stale when it was written; none where there is no such file.

    Raises ValueError for another format.
    """
    if not path.exists():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("format") != FORMAT:
        raise ValueError(f"format {data.get('format')!r} is not {FORMAT}")
    results = [result_from_json(row) for row in data["cases"] if not row.get("stale")]
    return {result.case.name: result for result in results}


def as_json(data: Mapping[str, Any]) -> str:
    """Write the data with one case a line, so that two versions can be compared."""
    head = json.dumps({name: value for name, value in data.items() if name != "cases"})
    rows = ",\n".join(map(json.dumps, data["cases"]))
    return f'{head[:-1]}, "cases": [\n{rows}\n]}}\n'


def html(data: Mapping[str, Any]) -> str:
    """The page, which needs no other file and no network."""
    shown = dict(data) | {"cases": [_shown(row) for row in data["cases"]]}
    text = files("mindspeed.workbench.verification.matrix").joinpath("page.html").read_text(encoding="utf-8")
    return text.replace(_DATA, json.dumps(shown, separators=(",", ":")).replace("</", "<\\/"))


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("name", "outcome", "reason", "code", "fix", "what", "ratio", "ranks", "command", "culprits", "stale")
    case: dict[str, Any] = row["case"]
    return {name: row[name] for name in kept if name in row} | case
