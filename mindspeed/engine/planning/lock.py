"""The lock file of a job: its request, the plan that it became, and what that is made of. Nodes are checked against it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mindspeed.engine.planning.fingerprint import Content, describe, describe_value, diff
from mindspeed.engine.planning.plan import ActivationPlan, plan_from_json
from mindspeed.plugins.problems import MindSpeedError, Problem
from mindspeed.plugins.text_files import write_files

FORMAT: Final = 1
DEFAULT_NAME: Final = "mindspeed.lock"
SHOWN: Final = 12
"""Differences that a message lists at most."""


@dataclass(frozen=True, slots=True)
class Lock:
    """A job as it was locked.

    ``job`` is the request as the mapping of a job file. ``content`` has the facts of `content_of` without environment
    variables, which belong to the machines of the job.
    """

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
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"the lock file cannot be read: {type(error).__name__}: {error}"
        raise MindSpeedError(
            [Problem("MS509", text, where=str(path), fix="write it again with mindspeed lock -f JOB.yaml")]
        ) from error


def require_match(lock: Lock, here: Content, where: str) -> None:
    """Raise MindSpeedError with MS618 when the facts of a plan in this process are not the locked ones.

    What the lock does not know of the world, such as sizes that only the launcher says, may be anything.
    """
    keys = [key for key in diff(here, lock.content) if key in lock.content or not key.startswith("world ")]
    if keys:
        differences = [f"{describe(key, here.get(key))}, the lock has {_locked(key, here, lock.content)}" for key in keys]
        more = [f"and {len(differences) - SHOWN} more differences"] if len(differences) > SHOWN else []
        fix = "start it as it was locked, or lock it again with mindspeed lock"
        text = f"this job is not the one that was locked: it has {differences[0]}"
        raise MindSpeedError([Problem("MS618", text, chain=(*differences[1:SHOWN], *more), where=where, fix=fix)])


def _locked(key: str, here: Mapping[str, str], locked: Mapping[str, str]) -> str:
    return describe(key, locked.get(key)) if key not in here else describe_value(key, locked.get(key))


def facts_of(content: Mapping[str, str], kind: str) -> dict[str, str]:
    """The facts of one kind by name."""
    return {key.partition(" ")[2]: value for key, value in content.items() if key.startswith(f"{kind} ")}
