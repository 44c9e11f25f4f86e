"""Drift: how every target in Megatron differs between the release that features are written for and another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mindspeed.engine.inspection.contract_reading import read_contract, successors
from mindspeed.engine.inspection.contracts import (
    ABSENT,
    BASELINE,
    CHECKOUT,
    CORE,
    Contract,
    ContractVerdict,
    compare,
    difference,
    is_script,
    part_of,
    recorded_contracts,
)
from mindspeed.engine.inspection.megatron_copies import megatron_version, package_root, version_of
from mindspeed.engine.inspection.releases import recorded_releases
from mindspeed.engine.inspection.source import only_tree, trees_kept
from mindspeed.engine.planning.targets import PatchTarget
from mindspeed.engine.resolution.environment import version_in
from mindspeed.problems import Fix, MindSpeedError, Problem, advice

FAILED: Final = ("changed", "gone")
"""Verdicts that a feature does not survive without a look at it."""


@dataclass(frozen=True, slots=True)
class DriftRow:
    """Describe the drift of a target: what took its place, what the verdict does not say, the diff of its definition."""

    feature: str
    target: str
    verdict: ContractVerdict
    near: tuple[str, ...] = ()
    why: str = ""
    diff: str = ""


@dataclass(frozen=True, slots=True)
class Tree:
    """A Megatron to compare with: its version, and how the contract of a target in it is found.

    ``find`` gives None for a target in a part that this Megatron lacks. ``root`` is the folder of a source tree.
    """

    version: str | None
    find: Callable[[str], Contract | None]
    root: Path | None = None


def measure_drift(targets: Sequence[PatchTarget], tree: Tree) -> list[DriftRow]:
    """A row for every target, in the order given."""
    return [_row(target, tree) for target in targets]


def recorded_tree(version: str) -> Tree:
    """A recorded release. Raises MindSpeedError MS502 for a version that is not recorded."""
    recorded = recorded_contracts(version) if version in recorded_releases() else None
    if recorded is None:
        text = f"mindspeed has no record of megatron-core {version} to compare with, only of {', '.join(recorded_releases())}"
        fix = "give the path of its source tree or unpacked wheel instead: mindspeed patches drift --megatron PATH"
        raise MindSpeedError([Problem("MS502", text, fix=advice(fix))])
    return Tree(version, recorded[1].get)


@contextmanager
def source_tree(path: Path) -> Iterator[Tree]:
    """A checkout or an unpacked wheel, read within the block. Raises MindSpeedError MS502 for a folder without Megatron."""
    root = next((folder for folder in (path, path.parent) if (folder / "megatron" / "core").is_dir()), None)
    if root is None:
        text = f"{path} does not contain megatron/core"
        raise MindSpeedError(
            [
                Problem(
                    "MS502",
                    text,
                    fix=Fix.advise(
                        "give the folder that contains megatron/, or a Megatron version (mindspeed docs drift lists them)"
                    ),
                )
            ]
        )
    root = root.resolve()
    with only_tree(root, "megatron"), trees_kept():
        yield Tree(version_of(root / "megatron"), _reader(root / "megatron"), root)


@contextmanager
def installed_tree() -> Iterator[Tree]:
    """The Megatron that this process would import. Raises MindSpeedError MS502 when there is none."""
    root = package_root("core")
    if root is None:
        raise MindSpeedError(
            [Problem("MS502", "megatron-core is not installed", fix=Fix.run_command("pip install megatron-core==0.16.1"))]
        )
    with trees_kept():
        yield Tree(megatron_version(), _reader(package_root("training")), root.parent)


def read_targets(tree: Tree, targets: Sequence[PatchTarget]) -> dict[str, Contract]:
    """Read the contract of every target in the parts that a source tree has; the baseline finds ``near`` of a missing one."""
    contracts = {}
    for target in sorted({target.target for target in targets}):
        found = tree.find(target)
        if found is not None:
            absent = found.kind == ABSENT
            near = tuple(successors(target, _baseline(target) or Contract(ABSENT))) if absent else ()
            contracts[target] = Contract(ABSENT, near=near) if absent else found
    return contracts


def _reader(megatron: Path | None) -> Callable[[str], Contract | None]:
    """Read targets of megatron-core, and of Megatron-LM as far as ``megatron`` has it or the scripts beside it."""
    has_training = megatron is not None and (megatron / "training").is_dir()

    def read(target: str) -> Contract | None:
        if part_of(target) == CORE:
            return read_contract(target)
        if is_script(target):
            present = megatron is not None and (megatron.parent / f"{target.partition(':')[0]}.py").is_file()
        else:
            present = has_training and part_of(target) == CHECKOUT
        return read_contract(target) if present else None

    return read


def _baseline(target: str) -> Contract | None:
    known = recorded_contracts(BASELINE)
    return known[1].get(target) if known is not None else None


def _row(target: PatchTarget, tree: Tree) -> DriftRow:
    version = tree.version
    if target.guards and version is not None and not any(version_in(version, guard) for guard in target.guards):
        why = f"only for megatron-core {' or '.join(target.guards)}"
        return DriftRow(target.feature, target.target, "not applied", why=why)
    found, recorded = tree.find(target.target), _baseline(target.target)
    if found is None or (recorded is None and found.kind != ABSENT):
        return DriftRow(target.feature, target.target, "not recorded", why=_missing_row(tree, found))
    if found.kind == ABSENT:
        near = found.near if tree.root is None else tuple(successors(target.target, recorded or found))
        return DriftRow(target.feature, target.target, "gone", near)
    verdict = compare(recorded or found, found, target.by_name)
    return DriftRow(target.feature, target.target, verdict, why=difference(recorded or found, found))


def _missing_row(tree: Tree, found: Contract | None) -> str:
    """Say what a target without a verdict lacks: a row in a release file, or its part in this Megatron."""
    if found is None and tree.root is not None:
        return "no Megatron-LM in this tree"
    version = BASELINE if found is not None else tree.version
    return f"the record of megatron-core {version} has no row for this target; mindspeed patches record --megatron PATH adds it"
