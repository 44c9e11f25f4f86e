"""``mindspeed ops build``: compile the C++ operators into the cache, once per machine and version."""

from __future__ import annotations

import click

from mindspeed.cli.output import json_option, print_json, print_problems, wants_json
from mindspeed.ops.variants import SOURCES


@click.command()
@click.option("--force", is_flag=True, help="compile again what is built already")
@click.option("--optional", is_flag=True, help="a machine without a C++ compiler is told so, and is no error")
@click.option("--verbose", is_flag=True, help="say which sources are compiled, and how long each takes")
@json_option
def build(force: bool, optional: bool, verbose: bool) -> None:
    """Build the C++ operators for this machine.

    They are compiled into one library in the cache (MINDSPEED_CACHE), which the next import of an operator loads. What
    is built already is not built again. Several processes may do this at once: one compiles, the others wait for it.
    Without it, operators run their slower references.
    """
    from mindspeed.ops import building
    from mindspeed.ops.sources import operator_files
    from mindspeed.plugins.problems import PlatformError

    if not operator_files(SOURCES):
        if wants_json():
            print_json({"library": None, "operators": [], "compiled": False})
        else:
            click.echo(f"nothing to build: there are no C++ sources in {SOURCES / 'cpu'}")
        return

    def say(line: str) -> None:
        if verbose or line.startswith(("waiting", "compiling")):
            click.echo(line, err=True)

    try:
        built, compiled = building.build(say, force, SOURCES)
    except PlatformError as error:
        if not (optional and {problem.code for problem in error.problems} == {"MS510"}):
            raise
        print_problems(error.problems)
        return
    if wants_json():
        print_json(built.to_json() | {"compiled": compiled})
        return
    how = f"built in {built.seconds:.0f} s" if compiled else "are built already"
    click.echo(f"{len(built.operators)} C++ operators {how}: {built.library}")
    if verbose:
        click.echo(f"torch {built.key.torch}, compiler {built.compiler}, {built.key.processor}, {built.key.libc}")
