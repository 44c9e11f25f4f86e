"""``mindspeed preflight``: whether one node can run a locked job."""

from __future__ import annotations

import click

from mindspeed.cli.output import end, exit_code, json_option, print_result


@click.command()
@click.option("--lock", "path", default="mindspeed.lock", show_default=True, metavar="FILE", help="Lock file of the job")
@click.option("--run", metavar="FOLDER", help="Run folder, whose disk is checked  [default: that of the job, or .]")
@click.option("--free-disk", default=10.0, show_default=True, metavar="GIB", help="Disk space that the run needs")
@click.option("--free-shm", default=1.0, show_default=True, metavar="GIB", help="Space in /dev/shm that data loading needs")
@json_option
def preflight(path: str, run: str | None, free_disk: float, free_shm: float) -> None:
    """Check one node against a lock file.

    The check does not communicate with other nodes and does not import torch. The exit status is 1 when versions, files
    or settings of the node differ from the lock file. It is 3 when they are equal, but the
    machine lacks something, such as disk space.
    """
    from mindspeed.engine.planning.lock import read_lock
    from mindspeed.workbench.diagnostics.preflight import checks

    made = read_lock(path)
    results = list(checks(made, run or made.job.get("train", {}).get("run") or ".", free_disk, free_shm))
    print_result({"passed": all(result.passed for result in results), "checks": results}, map(str, results))
    end(exit_code([problem for result in results if (problem := result.problem()) is not None]))
