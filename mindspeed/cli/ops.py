"""``mindspeed ops``: the operators of this machine, and the build of those in C++."""

from __future__ import annotations

import click

from mindspeed.cli.lazy import Group
from mindspeed.cli.output import json_option, print_json, print_problems, print_result, print_table, wants_json
from mindspeed.job.world import PLATFORMS
from mindspeed.ops.variants import SOURCES


@click.group(cls=Group)
def ops() -> None:
    """List operators and build their C++ kernels."""


@ops.command("list")
@click.option("--platform", type=click.Choice(PLATFORMS), help="Device to list for  [default: detected]")
@json_option
def list_(platform: str | None) -> None:
    """List the operators.

    Each row shows the best variant for the platform, the variant that runs on this machine, and why they differ. A
    reference is plain torch: correct everywhere, but slower. "C++ (AVX-512)" is a C++ kernel that needs the instruction
    set AVX-512 of the CPU. "C++" without brackets is a kernel for every CPU. MEASURED is the speed of the operator here
    over that of what a job runs without it, as the last "mindspeed ops build" measured it.
    """
    from mindspeed.ops.availability import standings
    from mindspeed.platforms import detect

    platform = platform or detect()
    rows = standings(platform)
    if wants_json():
        print_json({"platform": platform, "operators": rows})
        return
    cells = [(row.name, row.label, row.runs or "-", row.measured, row.why) for row in rows]
    print_table(("OPERATOR", f"BEST ON {platform.upper()}", "RUNS HERE", "MEASURED", "WHY"), cells)


@ops.command()
@click.option("--force", is_flag=True, help="Compile again even if already built")
@click.option("--optional", is_flag=True, help="Succeed with a message if no C++ compiler exists or times cannot be stored")
@click.option("--verbose", is_flag=True, help="Show which sources are compiled and how long each takes")
@json_option
def build(force: bool, optional: bool, verbose: bool) -> None:
    """Build the C++ operators for this machine.

    The operators are compiled into one library in the cache (MINDSPEED_CACHE), which is loaded with the next import of an
    operator. An existing build is reused. Several processes may run this command at the same time: one compiles, the others
    wait. Without the library, operators use their plain-torch references, which are slower.
    """
    from mindspeed.ops import building
    from mindspeed.ops.variants import operator_files
    from mindspeed.problems import PlatformError

    if not operator_files(SOURCES):
        nothing = f"nothing to build: {SOURCES / 'cpu'} contains no C++ sources"
        print_result({"library": None, "operators": [], "compiled": False}, [nothing])
        return

    def report(line: str) -> None:
        """Print every line, or without --verbose one line for each source that is compiled, without its warnings."""
        if verbose or line.startswith(("waiting", "compiling")):
            click.echo(line, err=True)
        elif " compiled in " in line:
            click.echo(f"  {line.partition(chr(10))[0]}", err=True)

    def forgive(error: PlatformError, code: str) -> None:
        """Print the problem of an error with --optional, if it is this one; else raise the error."""
        if not optional or {problem.code for problem in error.problems} != {code}:
            raise error
        print_problems(error.problems)

    try:
        built, compiled = building.build(report, force, SOURCES)
    except PlatformError as error:
        forgive(error, "MS510")
        return
    try:
        speeds = building.measured(built, report, again=force)
    except PlatformError as error:
        forgive(error, "MS514")
        speeds = ()
    how = f"built in {built.seconds:.0f} s" if compiled else "are already built"
    lines = [f"{len(built.operators)} C++ operators {how}: {built.library}"]
    if verbose:
        lines.append(f"torch {built.key.torch}, compiler {built.compiler}, {built.key.processor}, {built.key.libc}")
    lines += [words for speed in speeds if (words := speed.verdict)]
    print_result(built.to_json() | {"compiled": compiled, "speeds": speeds}, lines)
