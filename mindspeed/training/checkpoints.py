"""Names and manifests of checkpoints: which one is newest, and whether a job may continue from it. Light."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from mindspeed.plugins.problems import Problem, RunError
from mindspeed.training.checkpoint_files import missing_and_cut

FOLDER: Final = "checkpoints"
MANIFEST: Final = "mindspeed.json"
FORMAT: Final = 1
_NAME: Final = re.compile(r"step-(\d{8})")


@dataclass(frozen=True, slots=True)
class Manifest:
    """Identify the content of a checkpoint. ``model`` and ``optimizer`` must be those of the job that loads it.

    ``step`` and ``samples`` are done; ``data`` identifies the data that the samples are of; ``layout`` are the sizes
    it was saved with, which need not be those of the job that loads it; ``files`` are the sizes of the files beside it.
    """

    step: int
    samples: int
    model: Mapping[str, Any]
    optimizer: str
    data: str
    layout: Mapping[str, int]
    plan: str
    files: Mapping[str, int] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Store in a checkpoint folder."""
        (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n", encoding="utf-8")


def checkpoint_path(run: str | Path, step: int) -> Path:
    """The folder of the checkpoint after ``step`` steps."""
    return Path(run) / FOLDER / f"step-{step:08d}"


def partial_path(checkpoint: Path) -> Path:
    """Return the folder in which a checkpoint is written before it is complete."""
    return checkpoint.with_name(f".{checkpoint.name}.partial")


def saved_steps(run: str | Path) -> list[int]:
    """Steps of the complete checkpoints of a run, oldest first."""
    folder = Path(run) / FOLDER
    names = (_NAME.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match.group(1)) for match in names if match)


def find_checkpoint(run: str | Path, step: int | None = None) -> Path:
    """Return a complete checkpoint of a run folder: that of ``step``, else the newest. Raises RunError with MS602."""
    steps = saved_steps(run)
    if not steps:
        state = "has no complete checkpoint" if Path(run).is_dir() else "does not exist"
        raise RunError([Problem("MS602", f"the run {run} {state}", where=str(run), fix="start it without --resume")])
    if step is not None and step not in steps:
        text = f"the run {run} has no checkpoint of step {step}, only of {', '.join(map(str, steps))}"
        raise RunError([Problem("MS602", text, where=str(run), fix=f"--step {steps[-1]}")])
    return checkpoint_path(run, steps[-1] if step is None else step)


def folder_in_use(run: str) -> Problem:
    """Return MS602 for a folder in which a new run would replace the checkpoints of another one."""
    fix = f"--resume {run} continues it, and another --run starts a new one"
    return Problem("MS602", f"the folder {run} already holds a run with checkpoints", where=run, fix=fix)


def remove_old(run: str | Path, keep: int) -> None:
    """Remove all but the ``keep`` newest checkpoints, and what interrupted saves have left."""
    for step in saved_steps(run)[:-keep]:
        shutil.rmtree(checkpoint_path(run, step), ignore_errors=True)
    for left in (Path(run) / FOLDER).glob(".step-*.partial"):
        shutil.rmtree(left, ignore_errors=True)


def read_manifest(checkpoint: Path) -> Manifest:
    """Read what a checkpoint is of. Raises RunError with MS602 when it does not say, or is incomplete."""
    try:
        data = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        if data.pop("format") != FORMAT:
            raise ValueError("it has a newer format")
        manifest = Manifest(**data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"{checkpoint} is not a checkpoint of mindspeed pretrain: {_why(error)}"
        raise RunError([Problem("MS602", text, where=str(checkpoint))]) from error
    if wrong := missing_and_cut(checkpoint, manifest.files):
        raise RunError([damaged(checkpoint, wrong)])
    return manifest


def damaged(checkpoint: Path, reasons: Sequence[str]) -> Problem:
    """Return MS602 for a checkpoint that cannot be loaded, with the way back to an earlier one."""
    run, name = checkpoint.parents[1], _NAME.fullmatch(checkpoint.name)
    earlier = [step for step in saved_steps(run) if name and step < int(name.group(1))]
    fix = "copy it again from where it came, or start a new run"
    if earlier:
        fix = f"--resume {run} --step {earlier[-1]} --run {run}-{earlier[-1]} goes on from the checkpoint before it"
    return Problem("MS602", f"{checkpoint} is damaged", chain=tuple(reasons), where=str(checkpoint), fix=fix)


def check_manifest(manifest: Manifest, model: Mapping[str, Any], optimizer: str, where: str) -> list[Problem]:
    """MS602 for a checkpoint of another model, with every difference; and for one of another kind of optimizer."""
    names = list(dict.fromkeys([*manifest.model, *model]))
    different = tuple(
        f"{name}: {manifest.model.get(name)} in the checkpoint, {model.get(name)} in this job"
        for name in names
        if manifest.model.get(name) != model.get(name)
    )
    problems = []
    if different:
        fix = "give this job the checkpoint's values, or start a new run"
        problems.append(Problem("MS602", "the checkpoint is of another model", chain=different, where=where, fix=fix))
    if manifest.optimizer != optimizer:
        text = f"the checkpoint has the state of a {manifest.optimizer} optimizer, and this job's is {optimizer}"
        fix = "switch the feature that distributes the optimizer as it was when the checkpoint was saved"
        problems.append(Problem("MS602", text, where=where, fix=fix))
    return problems


def _why(error: Exception) -> str:
    return f"it has no {MANIFEST}" if isinstance(error, FileNotFoundError) else f"{MANIFEST} cannot be read: {error}"
