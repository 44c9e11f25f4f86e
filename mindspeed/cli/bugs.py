"""``mindspeed bugs``: known bugs of a Megatron release, and those that hit a command."""

from __future__ import annotations

import textwrap

import click

from mindspeed.cli.output import json_option, print_result
from mindspeed.job.fields import PLATFORMS


@click.command(short_help="List known bugs of a Megatron release, or those that hit a command.")
@click.option("--megatron", metavar="VERSION", help="Release of Megatron  [default: the installed one]")
@click.option("--platform", type=click.Choice(PLATFORMS), help="Devices of the command  [default: those of this machine]")
@click.argument("command", metavar="[-- COMMAND ...]", nargs=-1, type=click.UNPROCESSED)
@json_option
def bugs(megatron: str | None, platform: str | None, command: tuple[str, ...]) -> None:
    """List known bugs of a Megatron release that train with wrong numbers, hang, fail, lose state or waste time.

    mindspeed bugs --megatron 0.16.1

    mindspeed bugs -- torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 2 ...

    A bug that is mended does not hit a job that trains with mindspeed, with or without features, unless it stands in the
    setting megatron-fixes.unmended. Give a command after ``--`` to list only what its arguments reach.
    """
    from mindspeed.engine.resolution.environment import is_version, version_in
    from mindspeed.megatron.fixes.feature import mended_bugs
    from mindspeed.megatron_lm.given_arguments import given_arguments, surface_or_nearest
    from mindspeed.registry import probe
    from mindspeed.workbench.lint.launched_command import command_of_words
    from mindspeed.workbench.lint.traps import known_traps, traps_of

    environment = probe(platform)
    version = megatron or environment.megatron
    if version is None:
        raise click.UsageError("no Megatron is installed; give its release with --megatron")
    if not is_version(version):
        raise click.BadParameter(f"{version} is no release of Megatron", param_hint="--megatron")
    found = [trap for trap in known_traps() if trap.is_bug and version_in(version, trap.megatron)]
    if command:
        known, launched = surface_or_nearest(version), command_of_words(command)
        given = {dest: one.value for dest, one in given_arguments([word.text for word in launched.arguments], known).items()}
        caught = set(traps_of(given, known, dict(launched.environ), environment.platform))
        found = [bug for bug in found if bug in caught]
    by_plan = mended_bugs(version)
    rows, lines = [], [f"megatron-core {version}: {len(found)} known bugs{' that hit this command' if command else ''}"]
    for bug in found:
        mended = bug.name in by_plan
        names = ("name", "consequence", "megatron", "text", "fix", "source", "proof", "unproven")
        rows.append({name: getattr(bug, name) for name in names} | {"mended": mended})
        state = "mended by every plan" if mended else "not mended"
        lines += ["", f"{bug.name} ({bug.consequence}; {bug.megatron}; {state})"]
        texts = [bug.text, bug.unproven and f"not shown by a test: {bug.unproven}", bug.fix and f"fix: {bug.fix}", bug.source]
        for text in filter(None, texts):
            lines += textwrap.wrap(text, 98, initial_indent="  ", subsequent_indent="  ")
    print_result({"megatron": version, "bugs": rows}, lines)
