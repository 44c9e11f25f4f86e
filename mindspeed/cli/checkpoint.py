"""``mindspeed checkpoint``: list, prune, inspect, verify and convert checkpoints, and compare one with a job."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindspeed.cli.lazy import Group
from mindspeed.cli.output import OK, PROBLEMS, end, json_option, print_json, print_result, print_table, wants_json
from mindspeed.cli.request_options import JobCommand, Request, request_options
from mindspeed.problems import Fix

if TYPE_CHECKING:
    from mindspeed.engine.planning.checkpoint_layers import LayerKind
    from mindspeed.workbench.training.checkpoints import Manifest

KINDS: tuple[LayerKind, ...] = ("transformer-engine", "local")
step_option = click.option(
    "--step", type=click.IntRange(1), metavar="N", help="Step of a run's checkpoint  [default: the newest]"
)


@click.group(cls=Group)
def checkpoint() -> None:
    """List, prune, inspect, verify, convert and compare checkpoints."""


@checkpoint.command("list")
@click.argument("run", metavar="RUN")
@json_option
def list_(run: str) -> None:
    """List the checkpoints of a run, or of a folder of Megatron-LM, oldest first.

    The column state shows ok when every file of the checkpoint exists and has the size that it was saved with. To check
    the contents too, use mindspeed checkpoint verify.
    """
    from mindspeed.problems import RunError
    from mindspeed.workbench.training.checkpoints import checkpoints_in, manifest_of

    rows = []
    for step, folder in checkpoints_in(run).items():
        row: dict[str, Any] = {"step": step, "checkpoint": str(folder), "state": "ok", "layout": ""}
        try:
            manifest = manifest_of(folder)
            row["layout"] = _layout(manifest) if manifest is not None else ""
        except RunError as error:
            row["state"] = "; ".join(error.problems[0].chain or (error.problems[0].message,))
        size = sum(path.stat().st_size for path in folder.iterdir())
        rows.append(row | {"bytes": size, "saved": _time(folder)})
    if wants_json():
        print_json({"run": run, "checkpoints": rows})
        return
    columns = ("step", "saved", "MiB", "layout", "state")
    cells = [(str(r["step"]), r["saved"], f"{r['bytes'] / 2**20:.1f}", r["layout"], r["state"]) for r in rows]
    print_table(columns, cells)


@checkpoint.command()
@click.argument("run", metavar="RUN")
@click.option("--keep", type=click.IntRange(1), required=True, metavar="N", help="Number of complete checkpoints to keep")
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing")
@json_option
def prune(run: str, keep: int, dry_run: bool) -> None:
    """Remove old checkpoints of a run, or of a folder of Megatron-LM.

    Keeps the N newest checkpoints that have all their files, everything newer than the oldest of them, and the one from which
    Megatron-LM would continue. Nothing is removed if no checkpoint is complete.
    """
    import shutil

    from mindspeed.workbench.training.checkpoints import outdated

    folders = outdated(run, keep)
    size = sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())
    for folder in folders if not dry_run else ():
        shutil.rmtree(folder)
    lines = [*map(str, folders), f"{'would free' if dry_run else 'freed'} {size / 2**30:.1f} GiB in {len(folders)} checkpoints"]
    print_result({"run": run, "removed": [str(folder) for folder in folders], "bytes": size, "dry_run": dry_run}, lines)


@checkpoint.command()
@click.argument("path", metavar="CHECKPOINT")
@step_option
@json_option
def inspect(path: str, step: int | None) -> None:
    """Print the model, the layers, the layout and the features of a checkpoint.

    CHECKPOINT is the folder of a checkpoint, or of a run, whose newest checkpoint is used.
    """
    from mindspeed.engine.planning.checkpoint_layers import NAMES, layers_of, model_of
    from mindspeed.engine.planning.checkpoint_state import read_record
    from mindspeed.engine.planning.lock import facts_of
    from mindspeed.workbench.training.checkpoints import MANIFEST, checkpoint_at, read_manifest

    folder = checkpoint_at(path, step)
    kind = layers_of(folder)
    is_of_megatron = kind is not None and not (folder / MANIFEST).is_file()
    manifest, record = None if is_of_megatron else read_manifest(folder), read_record(folder)
    features = {feature.name: dict(feature.settings) for feature in record.features} if record else {}
    software = facts_of(record.content, "version") if record else {}
    layers, model = NAMES[kind] if kind else "unknown", model_of(folder)
    rows = {"checkpoint": f"{folder}, saved {_time(folder)}", "layers": f"{layers}, {model}" if model else layers}
    if manifest is not None:
        rows |= {
            "step": f"{manifest.step}, after {manifest.samples} samples",
            "layout": _layout(manifest),
            "model": ", ".join(f"{name} {value}" for name, value in manifest.model.items()),
            "optimizer": manifest.optimizer,
            "data": manifest.data,
        }
    rows["software"] = ", ".join(f"{name} {software[name]}" for name in ("mindspeed", "megatron", "torch") if name in software)
    rows["plan"] = manifest.plan if manifest else record.plan if record else ""
    lines = [*(f"{name:<11} {text}" for name, text in rows.items() if text), "features"]
    for name, settings in features.items():
        values = "  ".join(f"{key}={value}" for key, value in settings.items() if value is not None)
        lines.append(f"  {name}  {values}".rstrip())
    data = {"checkpoint": str(folder), "layers": kind, "class": model or None}
    data |= {name: value for name, value in asdict(manifest).items() if name != "files"} if manifest else {}
    print_result(data | {"features": features, "software": software}, lines)


@checkpoint.command()
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option(
    "--to", "kind", type=click.Choice(KINDS), required=True, help="Layers of the new checkpoint: local or Transformer Engine"
)
@step_option
@json_option
def convert(source: str, target: str, kind: LayerKind, step: int | None) -> None:
    """Convert a checkpoint between Megatron's local layers and Transformer Engine's.

    mindspeed checkpoint convert RUN RUN-te --to transformer-engine

    SRC is a checkpoint in the format torch_dist, a run folder, or a checkpoint folder of Megatron-LM. The newest checkpoint
    in it is converted. DST is a new folder, which appears only after the conversion has succeeded. Weights and optimizer
    states get other names, but their values do not change. Files are linked, not copied, if both folders are on one file
    system.
    """
    from mindspeed.engine.planning.checkpoint_layers import NAMES
    from mindspeed.workbench.training.conversion import convert

    folder = convert(Path(source), Path(target), kind, step)
    print_result({"checkpoint": str(folder), "layers": kind}, [f"{folder}: for {NAMES[kind]}"])


@checkpoint.command()
@click.argument("path", metavar="CHECKPOINT")
@step_option
@json_option
def verify(path: str, step: int | None) -> None:
    """Read every byte of a checkpoint and compare it with the checksums that were saved.

    CHECKPOINT is the folder of a checkpoint, or of a run, whose newest checkpoint is used. The exit status is 1 when a file
    or a tensor is damaged, and the output names each of them.
    """
    from mindspeed.problems import RunError
    from mindspeed.workbench.training.checkpoints import checkpoint_at, damaged, damages, file_sizes, manifest_of

    folder = checkpoint_at(path, step)
    manifest_of(folder)
    if reasons := list(damages(folder)):
        raise RunError([damaged(folder, reasons)])
    sizes = file_sizes(folder)
    total = sum(sizes.values())
    data = {"checkpoint": str(folder), "files": len(sizes), "bytes": total, "problems": []}
    print_result(data, [f"{folder}: {len(sizes)} files, {total / 2**20:.1f} MiB, unchanged since they were saved"])


@checkpoint.command(cls=JobCommand)
@click.argument("path", metavar="CHECKPOINT")
@step_option
@request_options
@json_option
def diff(request: Request, path: str, step: int | None) -> None:
    """Compare the features and the model of a checkpoint with those of a job.

    mindspeed checkpoint diff RUN -f job.yaml

    CHECKPOINT is the folder of a checkpoint, or of a run, whose newest checkpoint is used. Model values that the job does
    not give are read from the checkpoint. Each difference is marked as safe (the job can resume), convertible (its data are
    converted on resume) or refused (the job cannot resume). The exit status is 1 when a difference is refused.
    """
    from mindspeed import registry
    from mindspeed.engine.planning.checkpoint_state import FILE, changes, read_record
    from mindspeed.problems import Problem, RunError
    from mindspeed.workbench.training.checkpoints import MANIFEST, check_manifest, checkpoint_at, read_manifest
    from mindspeed.workbench.training.shape import asked_model, saved_layer

    folder = checkpoint_at(path, step)
    record = read_record(folder)
    if record is None:
        text = f"the checkpoint does not contain the list of features that it was saved with: {FILE} is missing"
        raise RunError([Problem("MS602", text, where=str(folder), fix=Fix.advise("give a checkpoint that mindspeed saved"))])
    manifest = read_manifest(folder) if (folder / MANIFEST).is_file() else None
    if manifest is None:
        plan, problems = request.plan_of_run(), []
    else:
        model = {**manifest.model, **asked_model(manifest.model, request.layers, request.train)}
        problems = check_manifest(manifest, model, manifest.optimizer, str(folder))
        plan = request.resolve(None, saved_layer(manifest.model))
    changed = changes(record, plan, registry.feature_classes(plan), registry.content_of(plan), folder)
    refused = [change for change in changed if change.verdict == "refused"]
    lines = list(map(str, problems))
    for change in changed:
        lines += [str(change), *([f"{'':<11}    fix: {change.fix}"] if change in refused else [])]
    print_result({"checkpoint": str(folder), "changes": changed, "problems": problems}, lines or ["no difference"])
    end(PROBLEMS if refused or problems else OK)


def _layout(manifest: Manifest) -> str:
    sizes = dict(manifest.layout)
    ranks = sizes.pop("world_size", 1)
    return " ".join([f"{ranks} ranks" if ranks > 1 else "1 rank", *(f"{name} {n}" for name, n in sizes.items() if n > 1)])


def _time(folder: Path) -> str:
    return datetime.fromtimestamp(folder.stat().st_mtime).isoformat(" ", "seconds")
