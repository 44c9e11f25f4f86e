"""``mindspeed features test``: does a feature, or all of a distribution, keep the contract of features?"""

from __future__ import annotations

import click

from mindspeed.cli.output import OK, PROBLEMS, json_option, print_json, wants_json


@click.command()
@click.argument("name", metavar="DISTRIBUTION|FEATURE")
@click.option("--parity", is_flag=True, help="also train a tiny model with and without each feature and compare")
@json_option
@click.pass_context
def test(context: click.Context, name: str, parity: bool) -> None:
    """Test the features of an installed distribution, or one feature.

    One line for each check: settings, declaration, references, patch targets, order, cost of the import, applying and
    undoing, and with --parity the claim about numerics. The exit status is 1 when a check fails.
    """
    from mindspeed.conformance.suite import examine

    outcomes = examine(name, parity)
    failed = sum(outcome.state == "failed" for outcome in outcomes)
    if wants_json():
        print_json({"name": name, "passed": not failed, "checks": [outcome.to_json() for outcome in outcomes]})
        context.exit(PROBLEMS if failed else OK)
    feature = ""
    for outcome in outcomes:
        if outcome.feature != feature:
            feature = outcome.feature
            click.secho(feature, bold=True)
        click.echo(f"  {outcome.check:<11}  {outcome.state:<7}  {outcome.text}")
        for line in outcome.details:
            click.echo(f"  {'':<11}  {'':<7}  {line}")
    count = len({outcome.feature for outcome in outcomes})
    features = f"{count} feature{'s' if count != 1 else ''}"
    click.echo(f"{name}: {features}, {len(outcomes)} checks, {f'{failed} failed' if failed else 'none failed'}")
    context.exit(PROBLEMS if failed else OK)
