"""Plan every training command that MindSpeed and MindSpeed-LLM publish, and record how many do and why others do not.

    MINDSPEED_PATH=... MINDSPEED_LLM_PATH=... python -m tools.published_commands [COMMIT COMMIT]

writes ``tools/docs/published_commands.json``, from which pages are made: counts, reasons and names of flags, no script text.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from mindspeed.engine.resolution.environment import made_up
from mindspeed.problems import MindSpeedError, Problem
from mindspeed.workbench.lint.dry_run import plan_command
from mindspeed.workbench.lint.launched_command import LaunchedCommand, training_commands

RECORD: Final = Path(__file__).parent / "docs" / "published_commands.json"
VARIABLES: Final = {"MindSpeed": "MINDSPEED_PATH", "MindSpeed-LLM": "MINDSPEED_LLM_PATH"}
MEGATRON, PLATFORM = "0.16.1", "npu"
_PREFIX: Final = "pretrain"
"""Programs with this beginning train; the others of MindSpeed-LLM fine-tune, generate, evaluate."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Hold what a dry run says of one command: the reasons of its refusal, none for a plan, and unknown options."""

    reasons: frozenset[str]
    unknown: tuple[str, ...] = ()


def published(checkout: Path) -> Iterator[LaunchedCommand]:
    """Every command of a checkout's scripts that pretrains."""
    for script in sorted(checkout.rglob("*.sh")):
        commands = training_commands(script.read_text(encoding="utf-8", errors="replace"), str(script.relative_to(checkout)))
        yield from (command for command in commands if Path(command.program).name.startswith(_PREFIX))


def outcome_of(command: LaunchedCommand) -> Outcome:
    """Plan one command for the NPU."""
    try:
        plan_command(command, made_up(PLATFORM, MEGATRON))
    except MindSpeedError as error:
        unknown = [problem.message.split()[0] for problem in error.problems if "is not an option of" in problem.message]
        return Outcome(frozenset(map(reason_of, error.problems)), tuple(unknown))
    return Outcome(frozenset())


def reason_of(problem: Problem) -> str:
    """The reason of a problem without numbers, names of flags and values of a script, so that equal reasons are equal."""
    head, colon, reason = problem.message.partition(": ")
    if problem.code == "MS113" and colon:
        belongs = "belongs to MindSpeed-LLM" if "to MindSpeed-LLM" in head else "no equivalent"
        return f"{belongs}: {re.sub(r' is not one of.*', '', reason)}"
    text = re.sub(r"(?<!\w)'[^']*'(?!\w)", "...", problem.message)
    text = re.sub(r"(takes one value, but|is followed by) .*", r"\1 ...", text)
    return re.sub(r"(?<![\w.-])\d[\d.]*", "N", text).replace(f"Megatron-LM {MEGATRON}", "Megatron-LM")


def measured(checkouts: dict[str, Path], commits: dict[str, str]) -> dict[str, Any]:
    """The record of all commands of some checkouts."""
    outcomes = {name: [outcome_of(command) for command in published(path)] for name, path in checkouts.items()}
    everything = [outcome for group in outcomes.values() for outcome in group]
    counts = Counter(reason for outcome in everything for reason in outcome.reasons)
    alone = Counter(reason for outcome in everything for reason in outcome.reasons if len(outcome.reasons) == 1)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "megatron": MEGATRON,
        "platform": PLATFORM,
        "checkouts": {
            name: {
                "commit": commits[name],
                "commands": len(group),
                "planned": sum(not outcome.reasons for outcome in group),
            }
            for name, group in outcomes.items()
        },
        "commands": len(everything),
        "planned": sum(not outcome.reasons for outcome in everything),
        "unknown": dict(sorted(Counter(flag for outcome in everything for flag in outcome.unknown).items())),
        "reasons": [[counts[reason], alone[reason], reason] for reason in sorted(counts, key=lambda r: (-counts[r], r))],
    }


def _commit(checkout: Path) -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    paths = {name: Path(os.environ[variable]) for name, variable in VARIABLES.items()}
    given = dict(zip(paths, sys.argv[1:], strict=False)) or {name: _commit(path) for name, path in paths.items()}
    RECORD.write_text(json.dumps(measured(paths, given), indent=1) + "\n", encoding="utf-8")
