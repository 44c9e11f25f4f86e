"""The options that say how many processes to start, and where, the same for every verb that runs a job."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from mindspeed.cli.output import end, exit_code, print_problems, wants_json
from mindspeed.cli.request_options import gather_options
from mindspeed.engine.resolution.setting_validation import flag

if TYPE_CHECKING:
    from mindspeed.engine.planning.plan import ActivationPlan
    from mindspeed.problems import MindSpeedError


@dataclass(frozen=True, slots=True)
class Processes:
    """``per_node`` processes on each of ``nodes`` nodes; ``passthrough`` are torchrun's own options for several nodes."""

    per_node: int = 1
    nodes: int = 1
    passthrough: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.per_node * self.nodes


def launch_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--nproc`` and the options of a job on several nodes; the command gets them as one argument ``processes``."""
    return gather_options(command, _OPTIONS, "processes", _processes)


def _processes(options: Mapping[str, Any]) -> Processes:
    nodes = options["nnodes"] or 1
    several = {"nnodes": nodes, **{name: options[name] for name in _RENDEZVOUS}} if nodes > 1 else {}
    words = [(flag(name), str(value)) for name, value in several.items() if value is not None]
    return Processes(options["nproc"], nodes, tuple(chain.from_iterable(words)))


lock_option = click.option(
    "--lock",
    metavar="FILE",
    envvar="MINDSPEED_LOCK",
    help="Lock file; the run starts only if plan, versions and files match it",
)


def hold_to_lock(file: str, plan: ActivationPlan, arguments: Mapping[str, str] | None = None) -> None:
    """Raise MindSpeedError with MS618 unless a plan, and what else decides the numbers of a run, are those of the lock file."""
    from mindspeed import registry
    from mindspeed.engine.planning.fingerprint import numeric_variables
    from mindspeed.engine.planning.lock import read_lock, require_match

    here = registry.content_of(plan, numeric_variables(os.environ)) | dict(arguments or {})
    require_match(read_lock(file), here, file)


def end_rank(error: MindSpeedError, environ: Mapping[str, str]) -> NoReturn:
    """End a rank of a job that runs already. One of the ranks prints the problems, the others a line."""
    from mindspeed.engine.runtime import rendezvous
    from mindspeed.process import error_file

    if not wants_json():
        click.echo(rendezvous.text_of(error, environ), err=True)
    elif environ["LOCAL_RANK"] == "0":
        print_problems(error.problems, error.words)
    error_file.leave_problems(error)
    rendezvous.report_failure(error, environ)
    end(exit_code(error.problems))


def is_of_trainer(file: str) -> bool:
    """Return whether a lock file holds a job with a ``train`` section, hence the plan with the trainer's own values."""
    from mindspeed.engine.planning.lock import read_lock

    return bool(read_lock(file).job.get("train"))


_RENDEZVOUS: Final = {
    "node_rank": "Number of this node, from 0",
    "master_addr": "Host name or address of node 0",
    "master_port": "TCP port of node 0, to which the other nodes connect",
    "rdzv_backend": "Rendezvous backend of torchrun",
    "rdzv_endpoint": "HOST:PORT of the rendezvous",
    "rdzv_id": "Name of the job at the rendezvous",
}
_OPTIONS: Final[dict[str, click.Option]] = {
    "nproc": click.Option(
        ["--nproc", "--nproc-per-node", "nproc"],
        type=click.IntRange(1),
        default=1,
        metavar="N",
        help="Number of processes on this node  [default: 1]",
    ),
    "nnodes": click.Option(["--nnodes"], type=click.IntRange(1), metavar="N", help="Number of nodes of the job  [default: 1]"),
    **{
        name: click.Option([flag(name), name], metavar="WORD", help=f"{meaning}; only for several nodes")
        for name, meaning in _RENDEZVOUS.items()
    },
}
