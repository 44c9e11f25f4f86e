"""The lock file of a job: its request, the plan that it became, and what that is made of. Nodes are checked against it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mindspeed.engine.planning.fingerprint import Content, describe, describe_value, diff, is_of_machine, kind_of
from mindspeed.engine.planning.plan import ActivationPlan, plan_from_json
from mindspeed.files.text_files import write_files
from mindspeed.problems import Fix, MindSpeedError, Problem, advice

FORMAT: Final = 1
LOCK_VARIABLE: Final = "MINDSPEED_LOCK"
"""Environment variable that names the lock file of a job, as ``--lock`` does."""
SHOWN: Final = 12
"""Differences that a message lists at most."""


@dataclass(frozen=True, slots=True)
class Lock:
    """A job as it was locked: its request as the mapping of a job file, its plan, and the facts of `facts_to_lock`."""

    job: Mapping[str, Any]
    plan: ActivationPlan
    content: Mapping[str, str]

    def write(self, path: str | Path) -> None:
        """Write the lock file. Raises PlatformError (MS516); a lock file that existed is then unchanged."""
        data = {"format": FORMAT, "job": self.job, "content": self.content, "plan": self.plan.to_json()}
        write_files({Path(path): json.dumps(data, indent=2) + "\n"}, fix="choose another -o FILE")

    def versions(self) -> dict[str, str]:
        """Locked versions by name."""
        return facts_of(self.content, "version")


def read_lock(path: str | Path) -> Lock:
    """Read a lock file. Raises MindSpeedError with MS509 when it is missing or damaged."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']} is not {FORMAT}")
        return Lock(data["job"], plan_from_json(data["plan"]), dict(data["content"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        text = f"the lock file cannot be read: {type(error).__name__}: {error}"
        raise MindSpeedError(
            [Problem("MS509", text, where=str(path), fix=Fix.advise("write the file again with mindspeed lock -f JOB.yaml"))]
        ) from error


def facts_to_lock(plan: ActivationPlan, here: Content, can_run: bool) -> dict[str, str]:
    """Select the facts of a plan here that hold wherever the job runs; ``can_run``: this machine can run the job.

    One that cannot, such as a laptop without torch, says nothing of versions of torch and operators. Without the Megatron
    that the plan is for, the lock has its version and not the content of its files.
    """
    locked = {key: value for key, value in here.items() if can_run or not is_of_machine(key)}
    megatron = plan.environment.get("megatron")
    if megatron is not None and here.get("version megatron") != megatron:
        locked = {key: value for key, value in locked.items() if kind_of(key) != "target"} | {"version megatron": megatron}
    return locked


def differing(lock: Lock, here: Content) -> list[str]:
    """List the facts in which a process differs from a lock, the most telling first.

    Facts that the lock does not know may be anything: those of a machine where it was made on one that cannot run the job,
    the content of Megatron's files or of the data where it was made without them, sizes, such as the number of processes, and
    the arguments of a script where it was not made from a command. A process that trains nothing itself, or does not read
    the data, is not compared in these.
    """
    free = {"world"} | {kind for kind in ("option", "training", "data", "target") if not facts_of(lock.content, kind)}
    if not any(map(is_of_machine, lock.content)):
        free |= {"version", "operator", "variable"}
    absent = {kind for kind in ("training", "data") if not facts_of(here, kind)}
    keys = [key for key in diff(here, lock.content) if kind_of(key) not in absent]
    return [key for key in keys if key in lock.content or kind_of(key) not in free]


def require_match(lock: Lock, here: Content, where: str) -> None:
    """Raise MindSpeedError with MS618 when the facts of a plan in this process are not the locked ones."""
    keys = differing(lock, here)
    if keys:
        differences = [f"{describe(key, here.get(key))}, the lock has {locked_value(lock, key, here)}" for key in keys]
        more = [f"and {len(differences) - SHOWN} more differences"] if len(differences) > SHOWN else []
        size = here.get("world world_size")
        again = f" --world-size {size}" if size is not None and "world world_size" not in lock.content else ""
        fix = f"start the locked job, or lock this one with mindspeed lock{again}"
        text = f"this job differs from the locked one: it has {differences[0]}"
        raise MindSpeedError([Problem("MS618", text, chain=(*differences[1:SHOWN], *more), where=where, fix=advice(fix))])


def locked_value(lock: Lock, key: str, here: Content) -> str:
    """Describe the value of a fact in a lock, briefly where this process has the fact too."""
    locked = lock.content.get(key)
    return describe(key, locked) if locked is None or key not in here else describe_value(key, locked)


def facts_of(content: Mapping[str, str], kind: str) -> dict[str, str]:
    """The facts of one kind by name."""
    return {key.partition(" ")[2]: value for key, value in content.items() if kind_of(key) == kind}
