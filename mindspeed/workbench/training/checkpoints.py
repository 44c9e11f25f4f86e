"""Names, manifests and files of checkpoints: which one is newest, whether it is whole, and whether a job may continue from it.

Light: sizes are compared without torch, contents by the checksums that torch writes and does not read.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from pydantic import ConfigDict, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from mindspeed.engine.planning.checkpoint_layers import TRACKER
from mindspeed.engine.planning.checkpoint_state import _words, keeps_common_file
from mindspeed.problems import Fix, Fixes, Problem, RunError, advice

FOLDER: Final = "checkpoints"
MANIFEST: Final = "mindspeed.json"
REQUEST: Final = "job.yaml"
"""The job file of a run; a checkpoint has that of the job which saved it."""
FORMAT: Final = 1
ESSENTIAL: Final = ("metadata.json", ".metadata")
"""Files without which Megatron loads no checkpoint."""
COMMON: Final = "common.pt"
"""A further one, where the checkpoint is of a Megatron that writes it."""
_NAME: Final = re.compile(r"step-(\d{8})")
UNREADABLE: Final = (
    *(OSError, ValueError, EOFError, LookupError, TypeError, AttributeError, ImportError, RecursionError),
    *(MemoryError, OverflowError, zipfile.BadZipFile, pickle.UnpicklingError),
)
"""Errors that reading damaged archives and pickles raises."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Identify the content of a checkpoint. ``model`` and ``optimizer`` must be those of the job that loads it.

    ``step`` and ``samples`` are done; ``data`` identifies the data that the samples are of; ``layout`` are the sizes
    it was saved with, which need not be those of the job that loads it; ``files`` are the sizes of the files beside it.
    """

    step: NonNegativeInt
    samples: NonNegativeInt
    model: Mapping[str, bool | int | float | str | None]
    optimizer: str
    data: str
    layout: Mapping[str, PositiveInt]
    plan: str
    files: Mapping[str, NonNegativeInt] = field(default_factory=dict)

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    def write(self, folder: Path) -> None:
        """Store in a checkpoint folder."""
        (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n", encoding="utf-8")


def checkpoint_path(run: str | Path, step: int) -> Path:
    """The folder of the checkpoint after ``step`` steps."""
    return Path(run) / FOLDER / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The number of steps after which a checkpoint was saved, from its name."""
    return int(checkpoint.name.rpartition("-")[2])


def partial_path(checkpoint: Path) -> Path:
    """Return the folder in which a checkpoint is written before it is complete."""
    return checkpoint.with_name(f".{checkpoint.name}.partial")


def saved_steps(run: str | Path) -> list[int]:
    """Steps of the complete checkpoints of a run, oldest first."""
    folder = Path(run) / FOLDER
    names = (_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else ()
    return sorted(int(match.group(1)) for match in names if match)


def find_checkpoint(run: str | Path, step: int | None = None) -> Path:
    """Return a complete checkpoint of a run folder: that of ``step``, else the newest. Raises RunError with MS602."""
    steps = saved_steps(run)
    if not steps:
        state = "has no complete checkpoint" if Path(run).is_dir() else "does not exist"
        raise RunError(
            [Problem("MS602", f"the run {run} {state}", where=str(run), fix=Fix.advise("start it without --resume"))]
        )
    if step is not None and step not in steps:
        text = f"the run {run} has no checkpoint of step {step}, only of {', '.join(map(str, steps))}"
        raise RunError([Problem("MS602", text, where=str(run), fix=Fix.give_option("--step", steps[-1]))])
    return checkpoint_path(run, steps[-1] if step is None else step)


def checkpoints_in(path: str | Path) -> dict[int, Path]:
    """Return the checkpoints of a run, or of a folder of Megatron-LM, by step, oldest first. Raises RunError with MS602."""
    folder = Path(path)
    if (folder / TRACKER).is_file():
        names = ((entry.name.removeprefix("iter_"), entry) for entry in folder.glob("iter_*") if entry.is_dir())
        return dict(sorted((int(number), entry) for number, entry in names if number.isdigit()))
    find_checkpoint(folder)
    return {step: checkpoint_path(folder, step) for step in saved_steps(folder)}


def newest_complete(run: str | Path) -> int | None:
    """Return the step of the newest checkpoint of a run that has all its files, or None."""
    return next((step for step in reversed(saved_steps(run)) if is_complete(checkpoint_path(run, step))), None)


def is_complete(checkpoint: Path) -> bool:
    """Return whether a checkpoint has all its files, at the sizes that were saved."""
    try:
        manifest_of(checkpoint)
    except RunError:
        return False
    return True


def checkpoint_at(path: str | Path, step: int | None = None) -> Path:
    """Return the checkpoint that a path names: itself, or one of a run or of a folder of Megatron-LM's.

    Of those it is that of ``step``, else the newest. Raises RunError with MS602 where a run has none.
    """
    folder = Path(path)
    if (folder / TRACKER).is_file():
        newest = (folder / TRACKER).read_text(encoding="utf-8").strip()
        name = newest if step is None else str(step)
        return folder / (f"iter_{int(name):07d}" if name.isdigit() else name)
    if step is not None or (folder / FOLDER).is_dir():
        return find_checkpoint(folder, step)
    return folder


def folder_in_use(run: str) -> Problem:
    """Return MS602 for a folder in which a new run would replace the checkpoints of another one."""
    fix = f"--resume {run} continues that run; use another --run for a new one"
    return Problem("MS602", f"the folder {run} already contains a run with checkpoints", where=run, fix=advice(fix))


def remove_old(run: str | Path, keep: int) -> None:
    """Remove all but the ``keep`` newest checkpoints, and what interrupted saves have left."""
    for step in saved_steps(run)[:-keep]:
        shutil.rmtree(checkpoint_path(run, step), ignore_errors=True)
    for left in (Path(run) / FOLDER).glob(".step-*.partial"):
        shutil.rmtree(left, ignore_errors=True)


def outdated(path: str | Path, keep: int) -> list[Path]:
    """Return the checkpoints of a run, or of a folder of Megatron-LM, that are older than its ``keep`` newest complete ones.

    The one with which Megatron-LM would go on stays, whatever its age. Raises RunError with MS602 where none is complete.
    """
    found = checkpoints_in(path)
    complete = [step for step, folder in found.items() if is_complete(folder)]
    if not complete:
        text = f"{path} has no complete checkpoint, so none of it is removed"
        raise RunError([Problem("MS602", text, where=str(path), fix=Fix.run_command(f"mindspeed checkpoint list {path}"))])
    oldest, next_one = complete[-keep:][0], checkpoint_at(path)
    return [folder for step, folder in found.items() if step < oldest and folder != next_one]


def read_manifest(checkpoint: Path) -> Manifest:
    """Read what a checkpoint is of. Raises RunError with MS602 when it does not say, or is incomplete."""
    try:
        manifest = _parsed(checkpoint)
    except (*UNREADABLE, ValidationError) as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {_words(error)}"
        text = f"{checkpoint} is not a checkpoint of mindspeed pretrain: {MANIFEST} {why}"
        raise RunError([Problem("MS602", text, where=str(checkpoint), fix=_way_back(checkpoint))]) from error
    _require_files(checkpoint, manifest.files)
    return manifest


def manifest_of(checkpoint: Path) -> Manifest | None:
    """Read what a checkpoint is of; None for one of Megatron-LM, which does not say. Raises RunError with MS602 as above."""
    if not (checkpoint.parent / TRACKER).is_file():
        return read_manifest(checkpoint)
    _require_files(checkpoint, {})
    return None


def _require_files(checkpoint: Path, sizes_saved: Mapping[str, int]) -> None:
    sizes = file_sizes(checkpoint)
    needed = [*ESSENTIAL, *([COMMON] if keeps_common_file(checkpoint) else []), *sizes_saved]
    reasons = [f"{name} is missing" for name in dict.fromkeys(needed) if name not in sizes]
    cut = (item for item in sizes_saved.items() if sizes.get(*item) != item[1])
    reasons += [f"{name} has {sizes[name]} of {size} bytes" for name, size in cut]
    if reasons:
        raise RunError([damaged(checkpoint, reasons)])


def _parsed(checkpoint: Path) -> Manifest:
    data = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ValueError("the file does not contain a JSON object")
    if data.pop("format", None) != FORMAT:
        raise ValueError(f"its format is not {FORMAT}; a newer mindspeed may be able to read it")
    return TypeAdapter(Manifest).validate_json(json.dumps(data))


def damaged(checkpoint: Path, reasons: Sequence[str]) -> Problem:
    """Return MS602 for a checkpoint that cannot be loaded, with the way back to an earlier one."""
    fix = _way_back(checkpoint) or advice("copy it again from its source, or start a new run")
    return Problem("MS602", f"{checkpoint} is damaged", chain=tuple(reasons), where=str(checkpoint), fix=fix)


def _way_back(checkpoint: Path) -> Fixes:
    """Return the options that continue from the checkpoint before one that cannot be loaded."""
    run, name = checkpoint.parent.parent, _NAME.fullmatch(checkpoint.name)
    earlier = [step for step in saved_steps(run) if name and step < int(name.group(1))]
    if not earlier:
        return ()
    return advice(f"--resume {run} --step {earlier[-1]} --run {run}-{earlier[-1]} continues from the previous checkpoint")


def file_sizes(folder: Path) -> dict[str, int]:
    """Return the size in bytes of every file of a checkpoint folder, by name."""
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}


def damages(folder: Path, part: int = 0, parts: int = 1) -> Iterator[str]:
    """Yield a sentence for each damaged file or tensor, reading every byte and comparing checksums.

    With ``parts``, only the share of number ``part`` of the tensors is read, so that ranks can divide the work.
    """
    from mindspeed.workbench.training.checkpoint_index import read_index

    for name in ("metadata.json", MANIFEST, "features.json", "plan.json"):
        try:
            if (folder / name).is_file():
                json.loads((folder / name).read_bytes())
        except UNREADABLE as error:
            yield f"{name} {_reason(error)}"
    if keeps_common_file(folder) and (damage := _archive_damage(folder / COMMON)):
        yield f"{COMMON} {damage}"
    try:
        index = read_index(folder)
        tensors = sorted((at.relative_path, at.offset, at.length, item.fqn) for item, at in index.storage_data.items())
    except UNREADABLE as error:
        yield f".metadata {_reason(error)}"
        return
    for name, offset, length, key in tensors[part::parts]:
        if damage := _archive_damage(folder / name, offset, length):
            yield f"{name}: {key} {damage}"


def _archive_damage(path: Path, offset: int = 0, length: int = -1) -> str:
    """Return what is wrong with a zip archive of torch inside a file, or ''."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read(length)
        if len(content) < length:
            raise EOFError(f"the file ends after {len(content)} of its {length} bytes")
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            broken = archive.testzip()
    except UNREADABLE as error:
        return _reason(error)
    return f"has other bytes than were saved, in {broken}" if broken else ""


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "cannot be read: the file is missing"
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"cannot be read: {text[0].lower()}{text[1:]}"


def check_manifest(manifest: Manifest, model: Mapping[str, Any], optimizer: str, where: str) -> list[Problem]:
    """MS602 for a checkpoint of another model, with every difference; and for one of another kind of optimizer."""
    pairs = {name: (manifest.model.get(name), model.get(name)) for name in (*manifest.model, *model)}
    unequal = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    different = [f"{name} is {saved} in the checkpoint, but {own} in this job" for name, (saved, own) in unequal.items()]
    problems = []
    if different:
        text = "the checkpoint and this job have different models"
        fix = "give this job the model options that the checkpoint was saved with, such as --hidden-size, or start a new run"
        problems.append(Problem("MS602", text, chain=different, where=where, fix=advice(fix)))
    if manifest.optimizer != optimizer:
        text = f"the checkpoint contains the state of a {manifest.optimizer} optimizer, but this job uses a {optimizer} one"
        fix = "use the same kind of optimizer, sharded or not, as when the checkpoint was saved"
        problems.append(Problem("MS602", text, where=where, fix=advice(fix)))
    return problems
