"""``mindspeed explain``: what an error code means, and why others print a text."""

from __future__ import annotations

import re
import textwrap
from gettext import gettext

import click

from mindspeed.cli.output import json_option, print_result, wants_json
from mindspeed.cli.terminal import wrapped
from mindspeed.problems import localized


@click.command()
@click.argument("code", metavar="CODE|TEXT")
@json_option
def explain(code: str) -> None:
    """Explain an error code, or an error message of another program.

    mindspeed explain MS201

    mindspeed explain "'Parameter' object has no attribute 'main_grad'"
    """
    if re.fullmatch(r"[A-Za-z]{2}-?\d+", code):
        show_code(code)
    else:
        _show_symptoms(code)


def _show_symptoms(text: str) -> None:
    from mindspeed.workbench.diagnostics.known_errors import symptoms_in

    symptoms = symptoms_in(text)
    if not symptoms and not wants_json():
        raise click.UsageError("no known error matches this text, and it is not an error code; see docs/troubleshooting.md")
    lines = []
    for symptom in symptoms:
        lines.append(textwrap.fill(symptom.cause, width=100))
        label = gettext("fix: {text}").format(text="")
        lines.append(textwrap.fill(symptom.fix, width=100, initial_indent=f"  {label}", subsequent_indent="       "))
        lines.append("  " + gettext("source: {text}").format(text=symptom.source))
    print_result({"symptoms": symptoms}, lines)


def show_code(code: str) -> None:
    """Print the paragraph of a code. Raises UsageError for one that does not exist."""
    from mindspeed.problems import error_codes, near_names, suggestion

    codes, code = error_codes(), code.upper()
    if code not in codes:
        known = f"the codes are {next(iter(codes))} to {next(reversed(codes))}, on the page errors (mindspeed docs errors)"
        raise click.UsageError(f"there is no code {code}; {suggestion(near_names(code, codes), known)}")
    print_result({"code": code, "text": codes[code]}, wrapped(f"{code}: {localized(codes[code])}", width=100, hang=""))
