"""``mindspeed features verify``: train a tiny model with and without features and compare."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from mindspeed.cli.output import PROBLEMS, end, json_option, print_json, print_problems, print_table, wants_json
from mindspeed.cli.request_options import JobCommand, Request, names_argument, request_options
from mindspeed.cli.terminal import on_terminal
from mindspeed.platforms.backend_rules import NAMES, BackendRules, RuleSet, rule_set

if TYPE_CHECKING:
    from mindspeed.workbench.verification.comparison import ComparisonResult
    from mindspeed.workbench.verification.harness import Verdict


@click.command(cls=JobCommand)
@names_argument("NAME...")
@click.option(
    "--nproc", type=click.IntRange(1), metavar="N", help="Number of processes  [default: the fewest that the features need]"
)
@click.option(
    "--backend",
    type=click.Choice(NAMES),
    help="Check the rules of a collective backend in the run with the features. A job that would hang on a device, or a call "
    "that the backend refuses, is then a problem. nccl-rules-eager = NCCL with device_id",
)
@request_options
@json_option
def verify(request: Request, names: tuple[str, ...], nproc: int | None, backend: BackendRules | None) -> None:
    """Verify on this machine how much features change training results.

    Trains a small model for a few steps with and without the verified features, from the same weights and data. Losses,
    gradients and weights are compared. The exit status is 1 when results differ more than a feature declares, or when a
    feature had no effect.

    Give the features to verify as NAME. All features of --features and of the job file are then active in both runs. Without
    NAME, the features of --features are verified, and only features of the job file are active in both runs.
    """
    from mindspeed.workbench.verification.case import build_case, held_to
    from mindspeed.workbench.verification.harness import verify as prove
    from mindspeed.workbench.verification.pool import WorkerPool

    names, request = request.subject(names)
    also = [name for layer in request.layers for name in layer.features if name not in names]
    rules = (held_to(backend),) if backend else ()
    case = build_case(names, (*request.layers, *rules), also, nproc, request.environment())
    with WorkerPool() as pool:
        verdict = prove(case, pool, _show_step)
    if wants_json():
        print_json(verdict.to_json())
    else:
        _print(verdict, rule_set(backend) if backend else None)
    end(0 if verdict.holds else PROBLEMS)


def _show_step(step: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"{step} ...", err=True)


def _print(verdict: Verdict, rules: RuleSet | None) -> None:
    rows = []
    for kind in dict.fromkeys(_kind(check) for check in verdict.checks):
        checks = [check for check in verdict.checks if _kind(check) == kind]
        worst = max(checks, key=lambda check: (not check.holds, check.largest_difference or 0.0))
        difference = "-" if worst.largest_difference is None else f"{worst.largest_difference:.1e}"
        rows.append((kind, str(len(checks)), difference, f"{worst.tolerance:.0e}", worst.what.partition(" of ")[2]))
    print_table(("compared", "checks", "largest difference", "allowed", "worst"), rows)
    for line in _proof_lines(verdict, rules):
        for part in on_terminal(line):
            click.echo(part)
    print_problems(verdict.problems)
    click.echo(f"{verdict.feature}: {verdict.claim} {'holds' if verdict.holds else 'does not hold'}")


def _proof_lines(verdict: Verdict, rules: RuleSet | None) -> Iterator[str]:
    """Yield the sizes, the calls of patched functions, the bytes with and without the feature, communicators and host reads."""
    proof = verdict.proof
    yield "sizes: " + ", ".join(f"{name} {size}" for name, size in proof.world.items())
    if proof.note:
        yield f"note: {proof.note}"
    for name, places in proof.sites_reached.items():
        yield f"{name} reached: " + ", ".join(f"{place} ({count}x)" for place, count in places.items())
    for kind, (before, after) in proof.bytes.items():
        predicted = f"; {' and '.join(map(str, proof.formula[kind]))} by the formula" if kind in proof.formula else ""
        yield f"bytes of {kind}: {before} without, {after} with{predicted}"
    if proof.communicators:
        size = "" if (reserved := rules and rules.megabytes(proof.communicators)) is None else f", {reserved} MB"
        yield f"communicators of a rank: {len(proof.communicators)}{size} ({', '.join(proof.communicators)})"
    for line, count in proof.host_reads.items():
        yield f"host read: {line} ({count}x)"


def _kind(check: ComparisonResult) -> str:
    """``gradient`` of ``gradient of decoder.layers.0...``."""
    return check.what.partition(" of ")[0]
