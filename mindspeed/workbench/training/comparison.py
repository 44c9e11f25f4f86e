"""Compare two jobs, in whatever form each was kept: job file, plan, lock, run or checkpoint. Light."""

from __future__ import annotations

import argparse
import collections
import io
import json
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mindspeed.engine.planning.checkpoint_layers import TRACKER
from mindspeed.engine.planning.checkpoint_state import FILE as FEATURES
from mindspeed.engine.planning.checkpoint_state import read_record
from mindspeed.engine.planning.fingerprint import KINDS, Content, diff, installed_versions, kind_of, plan_facts
from mindspeed.engine.planning.lock import read_lock
from mindspeed.engine.planning.plan import ActivationPlan, plan_from_json
from mindspeed.files.step_log import LOG, read_log
from mindspeed.job.megatron_arguments import world_of
from mindspeed.problems import Fix, MindSpeedError, Problem, RunError
from mindspeed.process.run import PLAN
from mindspeed.workbench.training.checkpoints import COMMON, MANIFEST, UNREADABLE, checkpoint_at, read_manifest, saved_steps

_SAFE: Final[Mapping[tuple[str, str], type]] = {
    ("argparse", "Namespace"): argparse.Namespace,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
}


class Unread:
    """Replace an object whose class was not called; it prints as the class and its arguments."""

    name = "object"

    def __init__(self, *arguments: Any, **_: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None:
        """Take an element of a list."""

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.arguments))})"


class _Reader(pickle.Unpickler):
    """Read plain data; classes and functions other than those of `_SAFE` become `Unread`, tensors as well."""

    def find_class(self, module: str, name: str) -> Any:
        return _SAFE.get((module, name)) or type(name, (Unread,), {"name": name})

    def persistent_load(self, key: Any) -> Any:
        return Unread("tensor")


def saved_arguments(folder: Path) -> dict[str, Any] | None:
    """Return the arguments of the run that saved a checkpoint folder; None where the folder does not keep them by themselves.

    Raises one of `checkpoints.UNREADABLE` for a damaged file.
    """
    path = folder / COMMON
    if not path.is_file():
        return None
    with zipfile.ZipFile(path) as archive:
        name = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
        if name is None:
            raise ValueError("data.pkl is missing")
        saved = _Reader(io.BytesIO(archive.read(name))).load()
    arguments = saved.get("args") if isinstance(saved, dict) else None
    return dict(vars(arguments)) if isinstance(arguments, argparse.Namespace) else None


_EFFECTS: Final = ("report.json", "mindspeed-report.json")
"""Names of the file with the effects of features, in the folder of `mindspeed pretrain` and of Megatron-LM."""

_OF_TIME: Final = ("seconds",)
"""Numbers of a logged step that differ between equal runs."""

_COUNTED: Final = {"setting", "argument", "patch"}
"""Kinds of which a job without features has no fact, though its form keeps them."""

PlanOfJob = Callable[[str], ActivationPlan]


@dataclass(frozen=True, slots=True)
class JobSide:
    """A side of a comparison: its facts (`fingerprint.Content`), sources of its values, and the numbers of its steps."""

    path: str
    form: str
    facts: Content
    sources: Mapping[str, str] = field(default_factory=dict)
    steps: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    @property
    def kinds(self) -> set[str]:
        """Kinds of facts that this form keeps."""
        return set(map(kind_of, self.facts))

    def shown(self, key: str) -> str:
        """The value of a fact with its source, ``not set`` where there is none."""
        source = self.sources.get(key)
        return f"{self.facts.get(key, 'not set')}{f' ({source})' if source else ''}"


@dataclass(frozen=True, slots=True)
class Difference:
    """A fact that two jobs do not share; None where a side does not have it."""

    kind: str
    name: str
    first: str | None
    second: str | None
    first_source: str | None
    second_source: str | None

    @property
    def key(self) -> str:
        """The key of the fact."""
        return f"{self.kind} {self.name}".rstrip()


@dataclass(frozen=True, slots=True)
class StepDifference:
    """The first step of two runs with an unequal number."""

    step: int
    number: str
    first: float | None
    second: float | None


def differences(first: JobSide, second: JobSide) -> list[Difference]:
    """List the facts that differ, of the kinds that both forms keep; the most telling kind first."""
    common = first.kinds & second.kinds | _COUNTED & (first.kinds | second.kinds)
    keys = [key for key in diff(first.facts, second.facts) if kind_of(key) in common and _is_telling(key, first, second)]
    if any(kind_of(key) == "feature" for key in keys):  # another order says no more than that
        keys = [key for key in keys if kind_of(key) != "order"]
    return [_difference(key, first, second) for key in keys]


def not_compared(first: JobSide, second: JobSide) -> dict[str, list[str]]:
    """Return the kinds of facts that one form alone keeps, by the path of its side."""
    kept = {first.path: first.kinds - second.kinds, second.path: second.kinds - first.kinds}
    return {path: sorted(kinds - _COUNTED, key=KINDS.index) for path, kinds in kept.items() if kinds - _COUNTED}


def first_step_that_differs(first: JobSide, second: JobSide) -> StepDifference | None:
    """Return the first step that both runs logged with unequal numbers; times of steps do not count."""
    for step in sorted(first.steps.keys() & second.steps.keys()):
        ours, theirs = first.steps[step], second.steps[step]
        for number in sorted({**ours, **theirs}, key=lambda name: name != "loss"):
            if ours.get(number) != theirs.get(number):
                return StepDifference(step, number, ours.get(number), theirs.get(number))
    return None


def _is_telling(key: str, first: JobSide, second: JobSide) -> bool:
    """Return whether both sides have a fact, or the one that has it says more than that a feature more is active."""
    sides = [side for side in (first, second) if key in side.facts]
    is_default = kind_of(key) == "setting" and sides[0].sources.get(key) == "default"
    return len(sides) == 2 or not (is_default or kind_of(key) == "source")


def _difference(key: str, first: JobSide, second: JobSide) -> Difference:
    kind, _, name = key.partition(" ")
    return Difference(kind, name, first.facts.get(key), second.facts.get(key), first.sources.get(key), second.sources.get(key))


def read_side(path: str, plan_of_job: PlanOfJob) -> JobSide:
    """Read one job. ``plan_of_job`` resolves a job file.

    Raises MindSpeedError for what is missing, damaged or none of the forms.
    """
    place = Path(path)
    if place.is_dir():
        return _read_folder(place)
    if place.suffix == ".json" or place.suffix == ".lock":
        return _read_json(place)
    return _of_plan(path, "job file", plan_of_job(path), installed_versions())


def _read_json(path: Path) -> JobSide:
    """Read a lock file, a plan file, or what ``mindspeed features plan --json`` printed."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if "job" in data:
            lock = read_lock(path)
            return JobSide(str(path), "lock", {**plan_facts(lock.plan, None), **lock.content}, _sources(lock.plan))
        return _of_plan(str(path), "plan", plan_from_json(data.get("plan", data)))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        text = f"the file cannot be read as a plan or lock file: {type(error).__name__}: {error}"
        raise MindSpeedError([Problem("MS305", text, where=str(path), fix=Fix.advise(_FORMS))]) from error


def _of_plan(path: str, form: str, plan: ActivationPlan, versions: Mapping[str, str] | None = None) -> JobSide:
    facts = plan_facts(plan, None) | {f"version {name}": version for name, version in (versions or {}).items()}
    return JobSide(path, form, facts, _sources(plan))


def _sources(plan: ActivationPlan) -> dict[str, str]:
    """Return the source of each setting, the reason of each feature and the owners of each argument."""
    found = {f"feature {feature.name}": str(feature.why[0]) for feature in plan.features if feature.why}
    for feature in (*plan.base, *plan.features):
        found |= {f"setting {feature.name}.{name}": value.source for name, value in feature.settings.items()}
    return found | {f"argument {planned.override.argument}": ", ".join(planned.owners) for planned in plan.overrides}


def _read_folder(folder: Path) -> JobSide:
    """Read a run, a checkpoint of ours or of Megatron-LM, or the newest one of a folder of either."""
    if (folder / LOG).is_file():
        return side_of_run(folder)
    if saved_steps(folder) or (folder / TRACKER).is_file():
        folder = checkpoint_at(folder)
    if (folder / FEATURES).is_file() or (folder / MANIFEST).is_file():
        return _of_checkpoint(folder)
    return _of_megatron(folder)


def effects_of_run(folder: Path) -> dict[str, Any]:
    """Return what the run has reported about the effects of its features; nothing where it has not."""
    for name in _EFFECTS:
        with suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
            return found
    return {}


def has_plan(folder: Path) -> bool:
    """Return whether the folder of a run contains its plan."""
    return (folder / PLAN).is_file() or "plan" in effects_of_run(folder)


def plan_of_run(folder: Path) -> ActivationPlan:
    """Return the plan of a run, which Megatron-LM has in its report. Raises MindSpeedError with MS305."""
    from mindspeed.registry import read_plan

    if (folder / PLAN).is_file() or "plan" not in (effects := effects_of_run(folder)):
        return read_plan(folder / PLAN)
    try:
        return plan_from_json(effects["plan"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        text = f"the plan in the report of the run cannot be read: {error}"
        raise RunError([Problem("MS305", text, where=str(folder), fix=Fix.advise("run the job again"))]) from error


def side_of_run(folder: Path) -> JobSide:
    """Read the folder of a run. Raises MindSpeedError for what is missing or damaged."""
    plan = plan_of_run(folder)
    facts = plan_facts(plan, None) | _options(folder / "process.json")
    if saved_steps(folder):
        record = read_record(checkpoint_at(folder))
        facts = {**(record.content if record else {}), **facts}
    return JobSide(str(folder), "run", facts, _sources(plan), dict(_logged(folder / LOG)))


def _options(path: Path) -> dict[str, str]:
    """The trainer's options of a run; its own folder is none. A run of Megatron-LM keeps none."""
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))["config"]
    except (OSError, ValueError, LookupError) as error:
        text = f"the options of the run cannot be read from its file process.json: {error}"
        fix = Fix.advise("give the folder of another run, or the job file of this run")
        raise RunError([Problem("MS602", text, where=str(path), fix=fix)]) from error
    return {f"option {name}": str(value) for name, value in config.items() if name != "run"}


def _logged(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the numbers of every step; a resumed run repeats steps, and the last entry wins. A torn last line is no step."""
    for row in read_log(path):
        if "loss" in row:
            yield row.pop("step"), {name: value for name, value in row.items() if name not in _OF_TIME}


def _of_checkpoint(folder: Path) -> JobSide:
    record = read_record(folder)
    facts = dict(record.content) if record else {}
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder)
        facts |= {f"model {name}": str(value) for name, value in manifest.model.items()}
        facts |= {"training step": str(manifest.step), "training optimizer": manifest.optimizer, "training data": manifest.data}
    return JobSide(str(folder), "checkpoint", facts | _arguments(folder))


def _of_megatron(folder: Path) -> JobSide:
    facts = _arguments(folder)
    if not facts:
        text = "the folder is neither the folder of a run nor a checkpoint with readable arguments"
        raise RunError([Problem("MS602", text, where=str(folder), fix=Fix.advise(_FORMS))])
    return JobSide(str(folder), "checkpoint of Megatron-LM", facts)


def _arguments(folder: Path) -> dict[str, str]:
    """Megatron-LM's arguments in a checkpoint, and the values of the job that they give."""
    try:
        arguments = saved_arguments(folder)
    except UNREADABLE as error:
        text = f"the arguments in the checkpoint cannot be read: {type(error).__name__}: {error}"
        raise RunError(
            [Problem("MS602", text, where=str(folder), fix=Fix.advise("give another checkpoint, or the job file of its run"))]
        ) from error
    if arguments is None:
        return {}
    world = {f"world {name}": str(value) for name, (value, _) in world_of(arguments).items()}
    return world | {f"option {name}": str(value) for name, value in arguments.items() if name != "rank"}


_FORMS: Final = "give a job file (.yaml), a plan or lock file (.json, .lock), or the folder of a run or checkpoint"
