"""From a request to a job that can be started: everything that can be wrong is found here, before a process starts. Light."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from mindspeed import registry
from mindspeed.engine.inspection.megatron_copies import package_root
from mindspeed.engine.planning import checkpoint_state
from mindspeed.engine.planning.checkpoint_state import Change
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.applied_fixes import JobRequest
from mindspeed.engine.resolution.environment import Environment
from mindspeed.engine.resolution.request import Layer
from mindspeed.files.cache_folder import why_unwritable
from mindspeed.files.data_digest import data_facts
from mindspeed.files.indexed_paths import bin_path
from mindspeed.files.text_files import replace_text
from mindspeed.problems import CollectedProblems, Fix, Problem, ResolutionError, RunError, advice
from mindspeed.process.run import PLAN
from mindspeed.workbench.diagnostics import doctor
from mindspeed.workbench.training import checkpoints, corpus, request_text, shape
from mindspeed.workbench.training import resume as resuming
from mindspeed.workbench.training.config import OPERATION, TrainConfig, train_config, training_facts
from mindspeed.workbench.training.data_source import DataSource, enough_data, open_data
from mindspeed.workbench.training.planning import RunRequest, plan_run

JOB_VARIABLE: Final = "MINDSPEED_TRAIN"
"""Environment variable that names the job file of a training process."""


@dataclass(frozen=True, slots=True)
class Job:
    """Hold the values that every process of a run needs.

    ``checkpoint`` is the folder to continue from, or empty; with ``auto_resume`` a newer state that the nodes have kept comes
    first. ``request`` is the text of the job file that makes this job again; ``notes`` are sentences about what the job does
    otherwise than the run that it continues.
    """

    plan: ActivationPlan
    config: TrainConfig
    run: str
    data: str
    checkpoint: str = ""
    request: str = ""
    notes: tuple[str, ...] = ()
    auto_resume: bool = False

    def source(self) -> DataSource:
        """The data, checked again by the process that opens it."""
        return open_data(self.data, self.config.tokenizer)

    def changes(self) -> list[Change]:
        """Compare the features of this job with those of the checkpoint that it continues from."""
        folder = Path(self.checkpoint)
        record = checkpoint_state.read_record(folder) if self.checkpoint else None
        if record is None:
            return []
        classes, content = registry.feature_classes(self.plan), registry.content_of(self.plan)
        return checkpoint_state.changes(record, self.plan, classes, content, folder)

    def facts(self) -> dict[str, str]:
        """List what all ranks must have equal besides the plan: options, data, and the step that they continue from."""
        step = {"training step": str(checkpoints.step_of(Path(self.checkpoint)))} if self.checkpoint else {}
        return training_facts(self.config) | data_facts([self.data]) | step

    def locked_facts(self) -> dict[str, str]:
        """List what decides the numbers of the run besides the plan."""
        return training_facts(self.config, OPERATION) | (data_facts([self.data]) if self.config.data else {})

    @property
    def optimizer(self) -> str:
        """``distributed`` or ``plain``: checkpoints of the two differ."""
        return "distributed" if self._argument("use_distributed_optimizer") else "plain"

    @property
    def model(self) -> dict[str, Any]:
        """Values in which a checkpoint of this job's model must agree."""
        world = self.plan.world.known()
        names = (
            "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels num_experts "
            "vocab_size tied_embeddings normalization gated_linear_unit activation dtype"
        )
        if world.get("num_experts"):
            names += " moe_ffn_hidden_size shared_expert_hidden_size"
        model = {name: world.get(name) for name in names.split()} | {"style": self.config.style}
        if self.plan.world.is_hybrid:
            model["layers"] = self.plan.world.pattern.layers
        if world["rotary"]:
            return model | {"rotary_base": self.config.rotary_base}
        table = self._argument("position_embedding_type") != "none"
        return model | ({"seq_length": world["seq_length"]} if table else {})

    def _argument(self, name: str) -> Any:
        """The value that the plan gives to an argument of Megatron, or None."""
        return next((planned.override.value for planned in self.plan.overrides if planned.override.argument == name), None)


def make_job(
    layers: Sequence[Layer],
    train: Mapping[str, Mapping[str, Any]],
    environment: Environment,
    resume: str | None = None,
    step: int | None = None,
    auto_resume: bool = False,
) -> Job:
    """Make the job of a request.

    ``layers`` and ``train`` go from low to high; ``train`` maps a source to the values that it gives. ``resume`` is the
    folder of a run: its job file comes lowest, and its checkpoint of ``step``, else its newest, is loaded. With ``auto_resume``
    a newer state that the nodes have kept is loaded instead.
    Raises ResolutionError with everything that is wrong with features, values, data, checkpoint and installation.
    """
    problems = CollectedProblems()
    saved = problems.collect(lambda: resuming.read_request(resume, registry.catalog_for(()).owners)) if resume else None
    checkpoint = problems.collect(lambda: checkpoints.find_checkpoint(resume, step)) if resume else None
    notes: list[str] = []
    if saved and resume:
        if checkpoint and (cut := resuming.check_request(resume, checkpoint, registry.catalog_for(()).owners)):
            raise ResolutionError(cut)
        saved = replace(saved, layer=resuming.of_new_class(saved.layer, layers))
        kept, notes = resuming.keep_schedule(saved.train, request_text.merged(train))
        train = {resuming.RESUMED: {"run": resume, **kept}, **train}
        notes += resuming.schedule_changes(train_config({resuming.RESUMED: kept})[0], train_config(train)[0])
    config, wrong = train_config(train)
    problems += [*wrong, *_installation()]
    data = problems.collect(lambda: open_data(config.data or corpus.standard_library(), config.tokenizer))
    vocab_size = data.tokenizer.vocab_size if data else 0
    below = [saved.layer] if saved else []
    lowest = shape.trainer_layer(config, [*below, *layers], environment.platform, vocab_size)
    if saved:
        catalog = registry.catalog_for(saved.layer.features)
        layer, left_out = resuming.leave_out(saved.layer, layers, lowest, catalog, environment)
        below, notes = [layer], [*left_out, *notes]
    layers = [*below, *layers]
    run = config.run or time.strftime("runs/%Y%m%d-%H%M%S")
    done = checkpoints.step_of(checkpoint) if checkpoint else 0
    plan, more = plan_run(RunRequest(JobRequest(tuple(layers), environment), config, vocab_size, done))
    problems += more
    problems += _folder_problems(run, resume)
    if plan and data:
        request = request_text.job_file(layers, train)
        job = Job(plan, config, run, data.index.prefix, str(checkpoint or ""), request, tuple(notes), auto_resume)
        problems += enough_data(data, config.held_out, plan.world.seq_length)
        if checkpoint and resume:
            problems += _checkpoint_problems(job, checkpoint, resume, problems)
    if problems or not (plan and data):
        raise ResolutionError(problems)
    return job


def _checkpoint_problems(job: Job, checkpoint: Path, resume: str, problems: CollectedProblems) -> list[Problem]:
    """Everything because of which a job cannot continue from a checkpoint."""
    where = str(checkpoint)
    manifest = problems.collect(lambda: checkpoints.read_manifest(checkpoint))
    if manifest is None:
        return []
    refused = checkpoint_state.refusals(problems.collect(job.changes) or [], where)
    optimizer = manifest.optimizer if refused else job.optimizer  # which a feature has already been refused for
    saved, own, _ = resuming.comparable(manifest.model, job.model)
    return [
        *refused,
        *checkpoints.check_manifest(replace(manifest, model=saved), own, optimizer, where),
        *resuming.check_steps(job.config, manifest.step, where),
        *resuming.check_folder(resume, job.run, manifest.step),
        *_replaced_data(job, manifest, resume),
    ]


def _replaced_data(job: Job, manifest: checkpoints.Manifest, resume: str) -> list[Problem]:
    """MS601 for data of the run that has other content than when the checkpoint was written, under the same name."""
    before = resuming.read_request(resume, registry.catalog_for(()).owners).train.get("data")
    if before is None or job.config.data != before or job.source().is_that_of(manifest.data):
        return []
    text = f"the data {job.data} has changed since the checkpoint of step {manifest.step} was written"
    fix = "restore the file, or rename the new data and give the new name with --data PREFIX to read it from the beginning"
    return [Problem("MS601", text, where=str(bin_path(job.data)), fix=Fix.advise(fix))]


def _folder_problems(run: str, resume: str | None) -> list[Problem]:
    """MS603 for a run folder that cannot be made or read, and MS602 for one that another run is in."""
    if "://" in run:
        text = f"the run folder {run} is not in a file system, and mindspeed pretrain does not write to object storage"
        fix = f"mount the storage on every node, or --run FOLDER --remote {run}, which copies each checkpoint there"
        return [Problem("MS603", text, where=run, fix=advice(fix))]
    try:
        reason = why_unwritable(Path(run))
        if not reason:
            return [checkpoints.folder_in_use(run)] if checkpoints.saved_steps(run) and not resume else []
    except OSError as error:
        reason = str(error.strerror)
    text = f"the run folder {run} cannot be used: {reason}"
    return [Problem("MS603", text, where=run, fix=Fix.advise("--run FOLDER with a writable folder"))]


def write_job(job: Job, folder: str | Path | None = None) -> dict[str, str]:
    """Write a job into the run folder, or another one; return the variables with which a process finds it there."""
    folder = Path(folder or job.run)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        registry.write_plan(job.plan, folder / PLAN)
        replace_text(folder / checkpoints.REQUEST, job.request)
        fields = {name: getattr(job, name) for name in ("run", "data", "checkpoint", "request", "auto_resume")}
        process = json.dumps({"config": job.config.model_dump(), **fields}, indent=2) + "\n"
        replace_text(folder / "process.json", process)
    except OSError as error:
        text = f"the folder {folder} is not writable: {error.strerror}"
        raise RunError([Problem("MS603", text, fix=Fix.advise("--run FOLDER with a writable folder"))]) from error
    return {registry.PLAN_VARIABLE: str(folder / PLAN), JOB_VARIABLE: str(folder / "process.json")}


def read_job(environ: Mapping[str, str]) -> Job:
    """Inverse of `write_job`, in the process that was started."""
    fields = json.loads(Path(environ[JOB_VARIABLE]).read_text(encoding="utf-8"))
    config = TrainConfig(**fields.pop("config"))
    return Job(registry.read_plan(environ[registry.PLAN_VARIABLE]), config, **fields)


def _installation() -> list[Problem]:
    """Find what training lacks on this machine, without importing it."""
    problems = doctor.problems() + [problem for finding in doctor.packages() if (problem := finding.problem()) is not None]
    root = package_root("core")
    if root is not None and not list((root / "core" / "datasets").glob("helpers_cpp*")):
        text = f"megatron-core in {root} has no compiled data helpers"
        fix = "install its wheel, or compile core/datasets/helpers.cpp with g++ and pybind11"
        problems.append(Problem("MS502", text, where=str(root / "core" / "datasets"), fix=advice(fix)))
    return problems
