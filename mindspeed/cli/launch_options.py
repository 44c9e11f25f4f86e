"""The options that say how many processes to start, and where, the same for every verb that runs a job."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from mindspeed.planning.plan import ActivationPlan


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

    @functools.wraps(command)
    def with_processes(nproc: int, **options: Any) -> Any:
        rendezvous = {name: options.pop(name) for name in _RENDEZVOUS}
        given = {"nnodes": str(options.pop("nnodes") or 1)} | {k: v for k, v in rendezvous.items() if v is not None}
        nodes = int(given["nnodes"])
        passthrough = [word for name, value in given.items() for word in ("--" + name.replace("_", "-"), value)]
        return command(processes=Processes(nproc, nodes, tuple(passthrough) if nodes > 1 else ()), **options)

    decorated: Callable[..., Any] = with_processes
    for name, meaning in reversed(_RENDEZVOUS.items()):
        decorated = click.option("--" + name.replace("_", "-"), name, metavar="WORD", help=f"{meaning} (several nodes)")(
            decorated
        )
    decorated = click.option("--nnodes", type=click.IntRange(1), metavar="N", help="nodes of the job  [default: 1]")(decorated)
    return click.option("--nproc", type=click.IntRange(1), default=1, metavar="N", help="processes on this node  [default: 1]")(
        decorated
    )


lock_option = click.option(
    "--lock", metavar="FILE", help="start nothing unless plan, versions and files are those of this lock file"
)


def hold_to_lock(file: str, plan: ActivationPlan) -> None:
    """Raise MindSpeedError with MS618 unless a plan is that of the lock file."""
    from mindspeed import registry
    from mindspeed.planning.lock import read_lock, require_match

    require_match(read_lock(file), registry.content_of(plan, {}), file)


def is_of_trainer(file: str) -> bool:
    """Return whether a lock file holds a job with a ``train`` section, hence the plan with the trainer's own values."""
    from mindspeed.planning.lock import read_lock

    return bool(read_lock(file).job.get("train"))


_RENDEZVOUS: Final = {
    "node_rank": "number of this node, from 0",
    "master_addr": "host of node 0",
    "master_port": "port on that host",
    "rdzv_backend": "torchrun's rendezvous backend",
    "rdzv_endpoint": "host:port of the rendezvous",
    "rdzv_id": "name of the job at the rendezvous",
}
