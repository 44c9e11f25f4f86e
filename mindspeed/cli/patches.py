"""``mindspeed patches``: how the targets of all patches differ between Megatron versions, and recording a new one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mindspeed.cli.lazy import Group
from mindspeed.cli.output import OK, PROBLEMS, Amount, end, json_option, print_json, print_result, print_table, wants_json
from mindspeed.cli.request_options import names_option

if TYPE_CHECKING:
    from mindspeed.engine.planning.drift import DriftRow, Tree


@click.group(cls=Group)
def patches() -> None:
    """Compare the targets of all patches between Megatron versions."""


@patches.command()
@click.option(
    "--megatron",
    metavar="VERSION|PATH",
    help="Megatron to compare: a version that mindspeed has recorded (such as 0.16.1), a checkout or an unpacked wheel  "
    "[default: the installed one]",
)
@click.option("-f", "--file", metavar="JOB.yaml", help="Job file: compare only what its plan patches, and list what differs")
@json_option
def drift(megatron: str | None, file: str | None) -> None:
    """Compare the patch targets in a Megatron with the version that features are written for.

    A patch target is a function, class or value of Megatron that a feature patches. For each target, the verdict is same,
    appended (new parameters with defaults), body changed (same parameters, other code), changed (other parameters or kind),
    or gone (similar names are shown). The exit status is 1 when a target is changed or gone.
    """
    from mindspeed.engine.inspection.contracts import BASELINE
    from mindspeed.engine.planning.drift import FAILED, measure_drift
    from mindspeed.plugins.discovery import discover
    from mindspeed.registry import megatron_targets

    catalog = discover()
    for feature in catalog.broken.values():
        click.echo(f"{feature.problem}\n", err=True)
    targets = megatron_targets(catalog)
    with _tree(megatron) as tree:
        rows = measure_drift(targets, tree)
    if file is not None:
        patched = _patched_by(file)
        rows = [row for row in rows if (row.feature, row.target) in patched]
    if wants_json():
        keys = ("feature", "target", "verdict", "near")
        print_json({"megatron": tree.version, "targets": [{key: getattr(row, key) for key in keys} for row in rows]})
    else:
        where = f" in {tree.root}" if tree.root is not None else ""
        click.echo(f"megatron-core {tree.version or 'of unknown version'}{where}, against {BASELINE}")
        _print_rows(rows, only_different=file is not None)
    end(PROBLEMS if any(row.verdict in FAILED for row in rows) else OK)


@patches.command()
@click.option(
    "--megatron", metavar="PATH", help="Megatron to record: a checkout or an unpacked wheel  [default: the installed one]"
)
@click.option(
    "--into",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Folder for the record of the Megatron functions that features patch, and of Megatron's arguments  "
    "[default: this package]",
)
@json_option
def record(megatron: str | None, into: Path | None) -> None:
    """Record the patch targets and arguments of a Megatron release, for maintainers.

    Writes mindspeed/engine/inspection/releases/VERSION.json, which is always the same for the same source. An installed
    megatron-core does not contain Megatron-LM (megatron.training). If you record an installed megatron-core, the file keeps
    its earlier records of Megatron-LM.
    """
    from mindspeed.engine.inspection.releases import FOLDER
    from mindspeed.engine.planning.drift import installed_tree, source_tree
    from mindspeed.megatron.release_recording import record_release
    from mindspeed.plugins.discovery import discover
    from mindspeed.registry import megatron_targets

    targets = megatron_targets(discover(only=()))
    with installed_tree() if megatron is None else source_tree(Path(megatron)) as tree:
        file = record_release(tree, targets, into or FOLDER)
    print_result({"megatron": tree.version, "file": str(file)}, [str(file)])


@patches.command()
@click.argument("checkout", type=click.Path(path_type=Path))
@click.option(
    "--since",
    metavar="VERSION|PATH",
    help="Release to compare with; diffs are shown only if it is a checkout  [default: the newest recorded]",
)
@click.option(
    "--into",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    default=Path("build/follow"),
    show_default=True,
    help="Folder for the report, and for a record of the Megatron functions that features patch",
)
@click.option(
    "--claims/--no-claims",
    default=True,
    help="Train with and without every feature on the new Megatron (mindspeed features verify), and test it for known bugs",
)
@click.option(
    "--minutes",
    type=Amount(min=0.1),
    default=8.0,
    show_default=True,
    help="Time in minutes for --claims; after it, no further feature is verified",
)
@click.option(
    "--limit",
    type=Amount(min=1),
    default=90.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit in seconds for one feature (with --claims)",
)
@names_option("--features", "--feature", "names", help="With --claims: verify only these features; may be repeated")
@json_option
def follow(
    checkout: Path,
    since: str | None,
    into: Path,
    claims: bool,
    minutes: float,
    limit: float,
    names: tuple[str, ...],
) -> None:
    """Report what a new Megatron changes for features, for maintainers.

    Compares every patch target in CHECKOUT with the newest recorded release (or with --since), and shows the diff of each
    definition. Lists new Megatron arguments with names similar to a feature's. Runs mindspeed features verify for every
    feature on this Megatron, first for features whose targets differ, and the tests of its known bugs. Writes a report to
    FOLDER/VERSION.md (--into), and the patch targets and arguments of this Megatron to FOLDER/VERSION.json. The exit status is
    1 when a target is changed or gone, when a verification failed, or when this Megatron has other bugs than those listed for
    it.
    """
    from mindspeed.megatron.release_recording import record_release
    from mindspeed.plugins.discovery import discover
    from mindspeed.registry import megatron_targets
    from mindspeed.workbench.verification import following
    from mindspeed.workbench.verification.bugs_on_checkout import wrong
    from mindspeed.workbench.verification.claims_on_checkout import Limits

    catalog = discover(only=())
    verified = names or (sorted(catalog.specs) if claims else ())
    targets = megatron_targets(catalog)
    limits = Limits(limit, minutes * 60)
    report = following.follow(checkout, since, targets, catalog.specs, record_release, into, verified, limits)
    page = into / f"{report.version}.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(following.markdown(report), encoding="utf-8")
    counts = Counter(row.verdict for row in report.comparisons)
    held = sum(bool(row["holds"]) for row in report.claims)
    others = len(report.claims) - held - len(report.failed)
    found = Counter(row["verdict"] for row in report.bugs)
    lines = [
        f"megatron-core {report.version} against {report.since}: "
        + ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())),
        *(f"{feature}: Megatron has {argument}" for feature, argument in report.overlaps),
        *([f"claims: {held} hold, {others} features do not apply to {report.version}"] if report.claims else []),
        *([f"claims that did not hold or did not finish: {', '.join(report.failed)}"] if report.failed else []),
        *(["known bugs: " + ", ".join(f"{count} {verdict}" for verdict, count in found.items())] if found else []),
        *([f"bugs to correct in the list: {', '.join(wrong(report.bugs))}"] if wrong(report.bugs) else []),
        *report.notes,
        str(page),
    ]
    print_result({**report.to_json(), "report": str(page)}, lines)
    end(OK if report.holds else PROBLEMS)


def _tree(megatron: str | None) -> AbstractContextManager[Tree]:
    from mindspeed.engine.planning.drift import installed_tree, recorded_tree, source_tree

    if megatron is None:
        return installed_tree()
    return source_tree(Path(megatron)) if Path(megatron).exists() else nullcontext(recorded_tree(megatron))


def _patched_by(file: str) -> set[tuple[str, str]]:
    """Return feature and target of every patch in the plan of a job file, for the release that features are written for."""
    from mindspeed import registry
    from mindspeed.engine.inspection.contracts import BASELINE
    from mindspeed.engine.resolution.environment import made_up
    from mindspeed.engine.resolution.job_file import load_job_file

    layer = load_job_file(file).layer
    environment = made_up(layer.platform or registry.probe().platform, BASELINE)
    plan = registry.resolve([layer], environment)
    return {(planned.owner, planned.patch.target) for planned in plan.patches if not planned.skipped}


def _print_rows(rows: Sequence[DriftRow], only_different: bool) -> None:
    """The table, the rows that say more than their verdict below it, and the number of rows of each verdict."""
    shown = [row for row in rows if not (only_different and row.verdict == "same")]
    if shown:
        print_table(("FEATURE", "VERDICT", "TARGET"), [(row.feature, row.verdict, row.target) for row in shown])
    for row in rows:
        if reasons := [*filter(None, [row.why]), *([f"now {' or '.join(row.near)}"] if row.near else [])]:
            click.echo(f"\n{row.feature}: {row.verdict}: {row.target}")
            click.echo("\n".join(f"  {reason}" for reason in reasons))
    counts = Counter(row.verdict for row in rows)
    click.echo("\n" + ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
