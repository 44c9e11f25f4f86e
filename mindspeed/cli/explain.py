"""``mindspeed explain CODE``: what an error code means."""

from __future__ import annotations

import textwrap

import click

from mindspeed.cli.output import json_option, print_json, wants_json


@click.command()
@click.argument("code")
@json_option
def explain(code: str) -> None:
    """Explain an error code, for example MS201."""
    show_code(code)


def show_code(code: str) -> None:
    """Print the paragraph of a code. Raises UsageError for one that does not exist."""
    from mindspeed.plugins.problems import CODES

    code = code.upper()
    if code not in CODES:
        raise click.UsageError(f"there is no code {code}; there are {', '.join(CODES)}")
    if wants_json():
        print_json({"code": code, "text": CODES[code]})
    else:
        click.echo(textwrap.fill(f"{code}: {CODES[code]}", width=100))
