"""``mindspeed doctor``: what this machine has, what it lacks, and how to get it."""

from __future__ import annotations

from collections.abc import Iterator
from gettext import gettext
from typing import TYPE_CHECKING, Final

import click

from mindspeed.cli.output import end, exit_code, json_option, print_json, print_result, print_table, wants_json
from mindspeed.cli.terminal import bold, columns, on_terminal, padded
from mindspeed.problems import localized, marked

if TYPE_CHECKING:
    from mindspeed.workbench.diagnostics.finding import Finding


_STATES: Final = {"missing": marked("missing"), "optional": marked("optional"), "warning": marked("warning")}


@click.command()
@click.option("--matrix", is_flag=True, help="Print the support matrix: the versions and machines that were tested")
@click.option("--peak", is_flag=True, help="Measure the speed of dense matrix products on one device, in TFLOP/s")
@json_option
def doctor(matrix: bool, peak: bool) -> None:
    """Show what this machine has and lacks.

    Lists versions, every installed copy of Megatron, devices and compilers. The exit status is 3 when something that
    mindspeed needs is missing.
    """
    if matrix:
        _print_matrix()
        return
    if peak:
        _print_peaks()
        return
    from mindspeed.workbench.diagnostics.doctor import examine

    findings = []
    for finding in examine():
        findings.append(finding)
        if not wants_json():
            for line in _lines(finding):
                click.echo(line)
    problems = [problem for finding in findings if (problem := finding.problem()) is not None]
    if wants_json():
        print_json({"findings": findings, "problems": problems})
    elif problems:
        names = ", ".join(localized(problem.message) for problem in problems)
        click.echo("\n" + gettext("{count} missing: {names}").format(count=len(problems), names=names))
    end(exit_code(problems))


def _lines(finding: Finding) -> Iterator[str]:
    """Yield the line of a finding, bold where something is wrong, and its fix."""
    mark = "" if finding.state == "ok" else f"  [{gettext(_STATES[finding.state])}]"
    first, *rest = on_terminal(f"{padded(localized(finding.subject), 20)} {localized(finding.value)}{mark}")
    yield first if finding.state in ("ok", "optional") else bold(first)
    yield from rest
    if finding.fix:
        fix = gettext("fix: {text}").format(text=localized(finding.fix))
        yield from on_terminal(fix, " " * (23 if columns() >= 60 else 2))


def _print_peaks() -> None:
    from mindspeed.registry import probe
    from mindspeed.workbench.diagnostics.doctor import measure_peaks

    platform = probe().platform
    peaks = measure_peaks(platform)
    lines = (f"{name}  {peak:.3f} TFLOP/s on one {platform} device" for name, peak in peaks.items())
    print_result({"platform": platform, "teraflops": peaks}, lines)


def _print_matrix() -> None:
    from dataclasses import astuple

    from mindspeed.workbench.diagnostics.support_matrix import CELLS, COMBINATIONS, MEANING

    if wants_json():
        print_json({"cells": CELLS, "combinations": COMBINATIONS, "states": MEANING})
        return
    print_table(("COMPONENT", "VERSION", "STATE", "NOTE"), [astuple(cell) for cell in CELLS])
    click.echo()
    headers = ("PLATFORM", "MEGATRON", "TORCH", "TORCH_NPU", "CANN", "PYTHON", "HARDWARE", "STATE")
    print_table(headers, [astuple(row) for row in COMBINATIONS])
    click.echo()
    for state, meaning in MEANING.items():
        click.echo(f"{localized(state)}: {localized(meaning)}")
