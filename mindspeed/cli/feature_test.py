"""``mindspeed features test``: does a feature, or all of a distribution, keep the contract of features?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mindspeed.cli.matrix_options import budget_option, show_progress, store_option
from mindspeed.cli.output import OK, PROBLEMS, end, json_option, print_json, print_table, wants_json

if TYPE_CHECKING:
    from mindspeed.workbench.conformance.outcome import Outcome
    from mindspeed.workbench.verification.matrix.verdicts import CaseResult


@click.command()
@click.argument("name", metavar="DISTRIBUTION|FEATURE")
@click.option("--parity", is_flag=True, help="Also train a small model with and without each feature and compare")
@click.option("--pairs", is_flag=True, help="Also train with each feature together with every built-in one; takes minutes")
@budget_option
@store_option
@json_option
def test(name: str, parity: bool, pairs: bool, budget_seconds: float | None, store: Path | None) -> None:
    """Test the features of an installed distribution, or one feature.

    One line is printed per check. A check fails if the declaration or a setting is invalid, if a patch names a function
    that does not exist, or if a plan depends on the order of feature names. It also fails if the import takes too long,
    or if patches cannot be applied and undone. --parity also checks that training results differ from unmodified Megatron
    only as declared. --pairs adds a table of all pairs, as mindspeed features matrix shows them.
    Results are stored, so a stopped run continues where it stopped. The exit status is 1 when a check or a pair fails.
    """
    from mindspeed.workbench.conformance.suite import examine

    outcomes: list[Outcome] = []
    for outcome in examine(name, parity):
        if not wants_json():
            _print(outcome, is_first=not outcomes or outcomes[-1].feature != outcome.feature)
        outcomes.append(outcome)
    failed = sum(outcome.state == "failed" for outcome in outcomes)
    judged, missing = _judged_pairs(name, budget_seconds, store) if pairs else ([], 0)
    defects = sum(result.outcome.is_defect for result in judged)
    if wants_json():
        data = {"name": name, "passed": not (failed or defects), "checks": outcomes}
        more = {"pairs": [result.to_json() for result in judged], "pairs_left": missing}
        print_json(data | (more if pairs else {}))
    else:
        if pairs:
            _print_pairs(judged)
        count = len({outcome.feature for outcome in outcomes})
        features = "1 feature" if count == 1 else f"{count} features"
        click.echo(f"{name}: {features}, {len(outcomes)} checks, {failed or 'none'} failed")
        if pairs:
            left = f"; {missing} have no verdict yet" if missing else ""
            click.echo(f"{name}: {len(judged)} pairs, {defects or 'none'} failed{left}")
    end(PROBLEMS if failed or defects else OK)


def _judged_pairs(name: str, budget_seconds: float | None, store: Path | None) -> tuple[list[CaseResult], int]:
    """The verdicts of the pairs of a distribution, and how many have none within the budget."""
    from mindspeed import registry
    from mindspeed.workbench.conformance.suite import pairs_of
    from mindspeed.workbench.verification.matrix.reach import Sources
    from mindspeed.workbench.verification.matrix.run import judge_all, to_judge
    from mindspeed.workbench.verification.matrix.store import VerdictStore, default_store

    cases = pairs_of(name)
    kept, sources = VerdictStore(store or default_store()), Sources(registry.catalog())
    todo = to_judge(cases, kept.read(), sources)
    found = judge_all(todo, kept, sources, budget_seconds, show_progress)
    left = {case.name for case in todo} - {result.case.name for result in found}
    known = kept.read()
    return [known[case.name] for case in cases if case.name not in left], len(left)


def _print_pairs(judged: list[CaseResult]) -> None:
    rows = [(one.case.name, one.outcome.value, f"{one.code} {one.reason}".strip()) for one in judged]
    click.echo()
    print_table(("pair", "verdict", "reason"), sorted(rows, key=lambda row: (row[1], row[0])))


def _print(outcome: Outcome, is_first: bool) -> None:
    """Print an outcome, and above the first of a feature its name."""
    if is_first:
        click.secho(outcome.feature, bold=True)
    click.echo(f"  {outcome.check:<11}  {outcome.state:<7}  {outcome.text}")
    for line in outcome.details:
        click.echo(f"  {'':<11}  {'':<7}  {line}")
