"""``mindspeed features test``: does a feature, or all of a distribution, keep the contract of features?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from mindspeed.cli.output import OK, PROBLEMS, end, json_option, print_json, wants_json

if TYPE_CHECKING:
    from mindspeed.conformance.outcome import Outcome


@click.command()
@click.argument("name", metavar="DISTRIBUTION|FEATURE")
@click.option("--parity", is_flag=True, help="also train a tiny model with and without each feature and compare")
@json_option
def test(name: str, parity: bool) -> None:
    """Test the features of an installed distribution, or one feature.

    One line for each check: settings, declaration, references, patch targets, order, cost of the import, applying and
    undoing, and with --parity the claim about numerics. The exit status is 1 when a check fails.
    """
    from mindspeed.conformance.suite import examine

    outcomes: list[Outcome] = []
    for outcome in examine(name, parity):
        if not wants_json():
            _print(outcome, is_first=not outcomes or outcomes[-1].feature != outcome.feature)
        outcomes.append(outcome)
    failed = sum(outcome.state == "failed" for outcome in outcomes)
    if wants_json():
        print_json({"name": name, "passed": not failed, "checks": outcomes})
    else:
        count = len({outcome.feature for outcome in outcomes})
        features = "1 feature" if count == 1 else f"{count} features"
        click.echo(f"{name}: {features}, {len(outcomes)} checks, {failed or 'none'} failed")
    end(PROBLEMS if failed else OK)


def _print(outcome: Outcome, is_first: bool) -> None:
    """Print an outcome, and above the first of a feature its name."""
    if is_first:
        click.secho(outcome.feature, bold=True)
    click.echo(f"  {outcome.check:<11}  {outcome.state:<7}  {outcome.text}")
    for line in outcome.details:
        click.echo(f"  {'':<11}  {'':<7}  {line}")
