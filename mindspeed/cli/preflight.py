"""``mindspeed preflight``: whether one node can run a locked job."""

from __future__ import annotations

import click

from mindspeed.cli.output import end, exit_code, json_option, print_json, wants_json


@click.command()
@click.option("--lock", "path", default="mindspeed.lock", show_default=True, metavar="FILE", help="lock file of the job")
@click.option("--run", metavar="FOLDER", help="folder of the run, whose disk is checked  [default: that of the job, or .]")
@click.option("--free-disk", default=10.0, show_default=True, metavar="GIB", help="space that the run needs")
@click.option("--free-shm", default=1.0, show_default=True, metavar="GIB", help="space in /dev/shm that data loading needs")
@json_option
def preflight(path: str, run: str | None, free_disk: float, free_shm: float) -> None:
    """Check one node against a lock file.

    Nothing is exchanged with other nodes, and torch is not imported. The exit status is 0 when every check has passed,
    1 when the node has something else than the lock, 3 when only the machine itself lacks something.
    """
    from mindspeed.diagnostics.preflight import checks
    from mindspeed.engine.planning.lock import read_lock

    made = read_lock(path)
    results = list(checks(made, run or made.job.get("train", {}).get("run") or ".", free_disk, free_shm))
    if wants_json():
        print_json({"passed": all(result.passed for result in results), "checks": results})
    else:
        click.echo("\n".join(map(str, results)))
    end(exit_code([problem for result in results if (problem := result.problem()) is not None]))
