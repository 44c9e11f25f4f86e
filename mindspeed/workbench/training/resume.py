"""Put the saved request of a run below a new one, and judge what the new one changes. Light."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from mindspeed.engine.resolution.environment import Environment
from mindspeed.engine.resolution.job_file import load_job_file
from mindspeed.engine.resolution.request import JobFile, Layer
from mindspeed.engine.resolution.request_merge import MergedRequest, merge
from mindspeed.job.hybrid_pattern import pattern_of
from mindspeed.job.world import UnknownValue
from mindspeed.plugins.conditions import obstacle
from mindspeed.plugins.discovery import Catalog
from mindspeed.problems import Fix, Problem, advice
from mindspeed.workbench.training import checkpoints
from mindspeed.workbench.training.config import TrainConfig, train_config
from mindspeed.workbench.training.shape import PATTERN, given_world

RESUMED: Final = "resumed run"
"""Source of values that the saved job of a run gives."""


def read_request(run: str, owners: Mapping[str, tuple[str, str | None]]) -> JobFile:
    """Read the job file of a run folder. Raises ResolutionError with MS305.

    ``owners`` are the spellings of parallel sizes (`Catalog.owners`); a size that the file gives in both of them, as
    files of earlier versions do after ``--tp`` overrode a setting, has the value of ``world``.
    """
    saved = load_job_file(Path(run) / checkpoints.REQUEST)
    settings, world = merge_spellings([saved.layer], owners)
    return replace(saved, layer=replace(saved.layer, source=RESUMED, settings=settings, world=world))


def check_request(run: str, checkpoint: Path, owners: Mapping[str, tuple[str, str | None]]) -> list[Problem]:
    """MS602 for a job file that lacks values which the one of the checkpoint has: a run never removes any.

    Parallel sizes and the layers of another class of model are left alone, as a run may give them otherwise.
    """
    own, recorded = Path(run) / checkpoints.REQUEST, checkpoint / checkpoints.REQUEST
    if not recorded.is_file():
        return []
    changing = {*owners, PATTERN, "num_layers"} | {f"{owner}.{argument}" for owner, argument in owners.values()}
    missing = _values_in(load_job_file(recorded)) - _values_in(load_job_file(own)) - changing
    if not missing:
        return []
    text = f"{own} lacks values that the run had when {checkpoint.name} was saved: {', '.join(sorted(missing))}"
    fix = Fix.run_command(f"cp {shlex.quote(str(recorded))} {shlex.quote(str(own))}")
    return [Problem("MS602", text, where=str(own), fix=fix)]


def _values_in(file: JobFile) -> set[str]:
    """Return the names of what a job file gives, apart from features."""
    layer = file.layer
    switches = {name for name in ("level", "strict", "only", "platform") if getattr(layer, name) is not None}
    settings = {f"{feature}.{name}" for feature, fields in layer.settings.items() for name in fields}
    return switches | settings | layer.world.keys() | {f"train.{name}" for name in file.train}


def merge_spellings(
    layers: Sequence[Layer], owners: Mapping[str, tuple[str, str | None]]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Merge settings and world of layers, low to high, so that of two spellings of a size the overridden one is gone."""
    settings: dict[str, dict[str, Any]] = {}
    world: dict[str, Any] = {}
    for layer in layers:
        world |= {name: value for name, value in layer.world.items() if value is not None}
        for feature, fields in layer.settings.items():
            settings.setdefault(feature, {}).update(fields)
        for size, (owner, argument) in owners.items():
            if argument is None:
                continue
            if layer.world.get(size) is not None:
                settings.get(owner, {}).pop(argument, None)
            elif argument in layer.settings.get(owner, {}):
                world.pop(size, None)
    return {feature: fields for feature, fields in settings.items() if fields}, world


def leave_out(
    saved: Layer, above: Sequence[Layer], lowest: Layer, catalog: Catalog, environment: Environment
) -> tuple[Layer, list[str]]:
    """Remove features of a saved layer that conflict with the layers above, or that no longer apply to their sizes.

    Returns the layer and a sentence for each feature that applied before and does not now.
    """
    without = {name for layer in above for name in layer.without}
    named = {name for layer in above for name in layer.features}
    before, after = (merge([lowest, *layers], catalog, environment) for layers in ([saved], [saved, *above]))
    asked = [name for name in saved.features if name not in without | named]
    idle = {name for name in asked if _applies(name, before, catalog) and not _applies(name, after, catalog)}
    kept = tuple(name for name in saved.features if name not in without | idle)
    return replace(saved, features=kept), [f"{name} was skipped: it has no effect in this layout" for name in sorted(idle)]


def of_new_class(saved: Layer, above: Sequence[Layer]) -> Layer:
    """Return the saved layer without its number of layers where the layers above make a HybridModel of a GPTModel, or back."""
    asked = given_world(above).get(PATTERN)
    before = str(saved.world.get(PATTERN) or "")
    if asked is None or bool(asked) == bool(before):
        return saved
    world = {name: value for name, value in saved.world.items() if name not in ("num_layers", PATTERN)}
    layers = pattern_of(before).transformer_layers
    return replace(saved, world=world | ({"num_layers": layers} if layers else {}))


def comparable(saved: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any], str]:
    """Return the models of a checkpoint and a job, as GPTModels where one of them is a HybridModel, and a sentence then."""
    if ("layers" in saved) == ("layers" in own):
        return saved, own, ""
    names = ("HybridModel", "GPTModel") if "layers" in saved else ("GPTModel", "HybridModel")
    return _as_transformer(saved), _as_transformer(own), "the checkpoint of a {} is loaded into a {}".format(*names)


def _as_transformer(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the model of a checkpoint as a GPTModel with the same layers, where there is one."""
    if not (layers := pattern_of(model.get("layers", "")).transformer_layers):
        return model
    return {name: value for name, value in model.items() if name != "layers"} | {"num_layers": layers}


def keep_schedule(saved: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the saved values of ``train`` with the end of the decay that the run had, and a sentence when that matters.

    A run without ``decay_iters`` ends its decay at its last step; more steps must not change the rate of the next one.
    """
    before, _ = train_config({RESUMED: saved})
    if before.decay_iters is not None or given.get("train_iters", before.train_iters) == before.train_iters:
        return dict(saved), []
    kept = {**saved, "decay_iters": before.train_iters}
    if given.get("decay_iters") is not None or before.decay == "constant":
        return kept, []
    stretch = f"--decay-iters {given['train_iters']} extends it"
    return kept, [f"the learning rate keeps its schedule, whose decay ends at step {before.train_iters}; {stretch}"]


def schedule_changes(before: TrainConfig, after: TrainConfig) -> list[str]:
    """Return a sentence for each value of the schedule and the optimizer that differs from the saved run's."""
    names = "lr min_lr warmup_iters decay_iters decay weight_decay adam_beta1 adam_beta2 adam_eps clip_grad dropout seed"
    pairs = ((name, getattr(before, name), getattr(after, name)) for name in names.split())
    return [f"{name} changed from {old} to {new}" for name, old, new in pairs if old != new]


def check_steps(config: TrainConfig, step: int, where: str) -> list[Problem]:
    """MS301 when the steps that are wanted are fewer than those of the checkpoint."""
    if config.train_iters >= step:
        return []
    text = f"train.train_iters is {config.train_iters}, but the checkpoint was saved after step {step}"
    fix = f"--train-iters {2 * step} (or any number greater than the checkpoint's step), or --step N for an earlier checkpoint"
    return [Problem("MS301", text, where=where, fix=advice(fix))]


def check_folder(resume: str, run: str, step: int) -> list[Problem]:
    """MS602 when going on from a step would put two runs into one folder, whose checkpoints replace each other."""
    steps = checkpoints.saved_steps(run)
    if Path(resume).resolve() != Path(run).resolve():
        return [checkpoints.folder_in_use(run)] if steps else []
    later = [str(saved) for saved in steps if saved > step and checkpoints.is_complete(checkpoints.checkpoint_path(run, saved))]
    if not later:
        return []
    text = f"{run} contains later checkpoints than step {step}, of step {', '.join(later)}, which would be replaced"
    fix = f"--resume {resume} --step {step} --run {resume.rstrip('/')}-{step} continues in a separate folder"
    return [Problem("MS602", text, where=run, fix=advice(fix))]


def _applies(name: str, request: MergedRequest, catalog: Catalog) -> bool:
    """Return whether a feature says that it has something to do; what cannot be asked is left to the resolver."""
    if name not in catalog.specs:
        return True
    values = {key: value.value for key, value in request.settings.get(name, {}).items()}
    try:
        args = catalog.models[name].model_validate(values)
        return obstacle(catalog.specs[name].constraints, name, args, request.as_world()) is None
    except (UnknownValue, ValueError):
        return True
