"""The page of drift: every target of every patch against each recorded Megatron release, from the contract files alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mindspeed.engine.inspection.contracts import BASELINE
from mindspeed.engine.inspection.releases import recorded_releases
from mindspeed.engine.planning.drift import FAILED, DriftRow, measure_drift, recorded_tree
from mindspeed.engine.planning.targets import PatchTarget
from mindspeed.plugins.discovery import Catalog
from mindspeed.registry import megatron_targets
from mindspeed.workbench.pages.markdown import code, table

_MEANING: Final = (
    "- *same*: nothing that a caller or a patch can notice",
    "- *appended*: more parameters, all with defaults",
    "- *body changed*: the same parameters, other code",
    "- *changed*: other parameters, or another kind of thing",
    "- *gone*: no such name",
    "- *new*: absent from the baseline",
    "- *not applied*: the patch is for other versions only",
    "- *not recorded*: the record of the release, or of the baseline, has no row; `make releases` adds what it can read",
)


def drift(catalog: Catalog) -> list[list[str]]:
    """Return a row for every feature and target, a column for every release, and below what changed."""
    targets = megatron_targets(catalog)
    releases = {version: measure_drift(targets, recorded_tree(version)) for version in recorded_releases()}
    verdicts = zip(*releases.values(), strict=True)
    rows = [(rows[0].feature, code(rows[0].target), *(row.verdict for row in rows)) for rows in verdicts]
    words = (
        "Every place in Megatron that a feature, a platform, the compatibility fixes or a hook may patch, compared with "
        f"{BASELINE}. `mindspeed patches drift --megatron VERSION|PATH` prints the same for a recorded release, a checkout or "
        "an unpacked wheel. `megatron-lm` stands for what a job that starts with Megatron-LM's own script passes through. A "
        "*changed* target is one to look at: a wrapper that passes its arguments on does not mind. Which features run on which "
        "release is in [support](support.md)."
    )
    details = [_details(version, found) for version, found in releases.items() if any(row.verdict in FAILED for row in found)]
    return [[words, "", *_MEANING], table(("feature", "target", *releases), rows), _guards(catalog, targets), *details]


def guarded(catalog: Catalog, targets: Sequence[PatchTarget]) -> list[tuple[str, str, str]]:
    """Return ``(feature, target, releases)`` of every target whose patch has a separate guard (``When(megatron=...)``)."""
    ranges = {name: catalog.specs[name].megatron for name in catalog.usable}
    return [
        (target.feature, target.target, " or ".join(own))
        for target in targets
        if (own := [guard for guard in target.guards if guard != ranges.get(target.feature)])
    ]


def _guards(catalog: Catalog, targets: Sequence[PatchTarget]) -> list[str]:
    rows = [(feature, code(target), code(releases)) for feature, target, releases in guarded(catalog, targets)]
    words = (
        f"{len(rows)} of {len(targets)} patches are for some releases only (`When(megatron=...)`), since Megatron has the "
        "place under another name, or not at all, in the others:"
    )
    return ["## Patches for some releases only", "", words, "", *table(("feature", "target", "releases"), rows)]


def _details(version: str, rows: Sequence[DriftRow]) -> list[str]:
    cells = [(row.feature, code(row.target), row.verdict, row.why or _now(row)) for row in rows if row.verdict in FAILED]
    return [f"## {version}", "", *table(("feature", "target", "verdict", f"in {version}"), cells)]


def _now(row: DriftRow) -> str:
    return f"now {' or '.join(map(code, row.near))}" if row.near else "nothing like it"
