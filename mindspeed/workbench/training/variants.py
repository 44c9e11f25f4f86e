"""Variants of one job, without features and with them, each trained by a command of mindspeed in a separate process. Light."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from mindspeed import registry
from mindspeed.engine.planning.kill_switch import DISABLE_VARIABLE
from mindspeed.engine.planning.plan import ActivationPlan, plan_from_json
from mindspeed.engine.resolution.planned_feature import ReasonKind
from mindspeed.files.step_log import LOG
from mindspeed.plugins import Capability
from mindspeed.problems import MindSpeedError, Problem, RunError, advice
from mindspeed.process.run import REPORT_VARIABLE

OUTPUT: Final = "output.txt"
"""File of a run folder with what the run printed."""
_DISABLED: Final = "MS211"
"""Code of the problem of a feature that requires a disabled one."""
_LAST_LINES: Final = 8
"""Lines of the output that a problem shows."""
_FINISHED: Final = advice("give the folders of two finished runs instead: mindspeed compare RUN RUN")
_PROGRAM: Final = (sys.executable, "-m", "mindspeed")


@dataclass(frozen=True, slots=True)
class ComparedJob:
    """Hold the commands that check and train a job, as words behind ``mindspeed``. Both get the features by variables.

    ``plan_in`` finds the plan in the JSON that ``check`` prints; ``train`` gives the words for a run folder. ``is_script`` is
    True for a script of Megatron-LM, whose log and report are where a variable says.
    """

    check: tuple[str, ...]
    plan_in: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    train: Callable[[Path], tuple[str, ...]]
    is_script: bool


@dataclass(frozen=True, slots=True)
class Variant:
    """A job with some of its features disabled. ``missing`` are all that it lacks."""

    name: str
    disabled: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """Name of the run folder."""
        return self.name.replace(" ", "-")


def pretrain_job(words: Sequence[str]) -> ComparedJob:
    """Return the job of ``mindspeed pretrain WORDS``."""
    return ComparedJob(
        ("pretrain", *words, "--dry-run", "--json"),
        lambda answer: answer["plan"],
        lambda folder: ("pretrain", *words, "--run", str(folder)),
        is_script=False,
    )


def script_job(options: Sequence[str], nproc: int, words: Sequence[str], script: Sequence[str]) -> ComparedJob:
    """Return the job of a Megatron-LM command. ``words`` are all of it, ``script`` its program with the arguments."""
    return ComparedJob(
        ("check", *options, "--json", "--", *words),
        lambda answer: answer["commands"][0]["plan"],
        lambda folder: ("run", *options, "--nproc", str(nproc), "--", *script),
        is_script=True,
    )


def variants(job: ComparedJob, leave_one_out: bool) -> Iterator[Variant | MindSpeedError]:
    """Yield the job without its features, with them, and on request without each one; an error in place of a refused one.

    Features that own a parallel size, and those of level 0, stay. Raises MindSpeedError where the job itself is refused or has
    no feature.
    """
    plan = _plan(job, ())
    removed = removable(plan)
    if not removed:
        text = "the job has no features to compare with: all features in its plan are parts of Megatron or own a parallel size"
        raise RunError([Problem("MS301", text, fix=advice("name features with --features"))])
    yield _variant(job, "without features", removed, plan)
    yield Variant("with features")
    known = set()
    for name in removed if leave_one_out and len(removed) > 1 else ():
        variant = _variant(job, f"without {name}", (name,), plan)
        if isinstance(variant, MindSpeedError):
            yield variant
        elif variant.missing not in known:
            known.add(variant.missing)
            yield variant


def removable(plan: ActivationPlan) -> tuple[str, ...]:
    """Return the features of a plan without which the job keeps its layout."""
    owners = {feature.name for feature in plan.features if any(why.kind is ReasonKind.SIZE for why in feature.why)}
    return tuple(feature.name for feature in plan.features if feature.level > 0 and feature.name not in owners)


def train(job: ComparedJob, variant: Variant, folder: Path) -> None:
    """Train a variant in its run folder. Raises RunError: MS603 for a folder with a run, MS604 with the reason of a failure."""
    if (folder / LOG).exists():
        text = f"{folder} contains another run"
        raise RunError([Problem("MS603", text, where=str(folder), fix=advice("give a new folder with --output"))])
    folder.mkdir(parents=True, exist_ok=True)
    environ = _environ(variant.disabled)
    if job.is_script:
        environ[REPORT_VARIABLE] = str((folder / "report.json").absolute())
    with (folder / OUTPUT).open("w", encoding="utf-8") as output:
        done = subprocess.run([*_PROGRAM, *job.train(folder)], stdout=output, stderr=output, env=environ, check=False)
    if done.returncode:
        lines = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace").splitlines()
        text = f"the run {variant.name} ended with exit status {done.returncode}"
        fix = advice(f"correct the cause in {folder / OUTPUT}")
        raise RunError([Problem("MS604", text, chain=lines[-_LAST_LINES:], where=str(folder), fix=fix)])


def _variant(job: ComparedJob, name: str, disabled: tuple[str, ...], whole: ActivationPlan) -> Variant | MindSpeedError:
    """Disable features of a job, and those that require them. Return the problems of a job that is refused without them."""
    while True:
        try:
            left = _plan(job, disabled).names
            return Variant(name, disabled, tuple(feature for feature in whole.names if feature not in left))
        except MindSpeedError as error:
            owners = [feature for problem in error.problems if problem.code == _DISABLED for feature in problem.features]
            if not (more := tuple(dict.fromkeys(feature for feature in owners if feature not in disabled))):
                return RunError(
                    replace(problem, message=f"the job {name}: {problem.message}", fix=_FINISHED) for problem in error.problems
                )
            disabled += more


def _plan(job: ComparedJob, disabled: Sequence[str]) -> ActivationPlan:
    """Check the job with some features disabled. Raises RunError with its problems."""
    words = [*_PROGRAM, *job.check]
    done = subprocess.run(words, capture_output=True, text=True, env=_environ(disabled), check=False)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        chain, fix = done.stderr.splitlines()[-_LAST_LINES:], advice("correct the command")
        raise RunError([Problem("MS604", f"mindspeed {job.check[0]} refuses the command", chain=chain, fix=fix)]) from None
    if answer.get("problems"):
        raise RunError(map(Problem.from_json, answer["problems"]))
    return plan_from_json(job.plan_in(answer))


def _environ(disabled: Sequence[str]) -> dict[str, str]:
    environ = dict(os.environ)
    _add(environ, "MINDSPEED_FEATURES", ",".join(_measuring()), ",")
    if disabled:
        _add(environ, DISABLE_VARIABLE, ",".join(disabled), ",")
    return environ


def _measuring() -> list[str]:
    """Return the features that measure every variant."""
    specs = registry.catalog(frozenset()).specs
    return [name for name, spec in specs.items() if Capability.STEP_COSTS in spec.provides]


def _add(environ: dict[str, str], variable: str, value: str, separator: str) -> None:
    """Append a value to a variable that holds several."""
    environ[variable] = separator.join(filter(None, (environ.get(variable), value)))
