"""From a request to a job that can be started: everything that can be wrong is found here, before a process starts. Light."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml

from mindspeed import registry
from mindspeed.diagnostics import doctor
from mindspeed.inspection.megatron_copies import package_root
from mindspeed.planning import checkpoint_state
from mindspeed.planning.checkpoint_state import Change
from mindspeed.planning.plan import ActivationPlan
from mindspeed.plugins.problems import MindSpeedError, Problem, ResolutionError, RunError
from mindspeed.resolution.environment import Environment
from mindspeed.resolution.request import Layer, load_job_file
from mindspeed.training import checkpoints, corpus, shape
from mindspeed.training.config import TrainConfig, train_config
from mindspeed.training.indexed import Index, read_index
from mindspeed.training.tokenizer import Tokenizer, load_tokenizer, tokenizer_of

JOB_VARIABLE: Final = "MINDSPEED_TRAIN"
"""Environment variable that names the job file of a training process."""
RESUMED: Final = "resumed run"
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class DataSource:
    """Indexed data with its tokenizer."""

    index: Index
    tokenizer: Tokenizer

    @property
    def identity(self) -> str:
        """What tells this data from other data: its index, and the tokenizer that made it."""
        lengths = hashlib.blake2b(self.index.lengths.tobytes(), digest_size=8).hexdigest()
        return f"{self.tokenizer.name}, {self.index.tokens} tokens, {lengths}"

    def held_out_from(self, share: float) -> int:
        """The first sequence of the held-out part, rounded as Megatron's dataset builder does it."""
        return round((1 - share) * len(self.index.lengths))


@dataclass(frozen=True, slots=True)
class Job:
    """What every process of a run needs. ``checkpoint`` is the folder to continue from, or empty."""

    plan: ActivationPlan
    config: TrainConfig
    run: str
    data: str
    checkpoint: str = ""

    def source(self) -> DataSource:
        """The data, checked again by the process that opens it."""
        return open_data(self.data, self.config.tokenizer)

    def changes(self) -> list[Change]:
        """How the features of this job differ from those of the checkpoint that it continues from."""
        record = checkpoint_state.read_record(Path(self.checkpoint)) if self.checkpoint else None
        if record is None:
            return []
        return checkpoint_state.changes(record, self.plan, registry.catalog_for(self.plan.names))

    @property
    def optimizer(self) -> str:
        """``distributed`` or ``plain``: checkpoints of the two differ."""
        return "distributed" if self._argument("use_distributed_optimizer") else "plain"

    @property
    def model(self) -> dict[str, Any]:
        """What a checkpoint of this job's model must agree in."""
        world = self.plan.world.known()
        names = (
            "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups num_experts vocab_size "
            "normalization gated_linear_unit activation dtype"
        )
        model = {name: world.get(name) for name in names.split()} | {"style": self.config.style}
        if world["rotary"]:
            return model | {"rotary_base": self.config.rotary_base}
        table = self._argument("position_embedding_type") != "none"
        return model | ({"seq_length": world["seq_length"]} if table else {})

    def _argument(self, name: str) -> Any:
        """The value that the plan gives to an argument of Megatron, or None."""
        return next((planned.override.value for planned in self.plan.overrides if planned.override.argument == name), None)


def make_job(
    layers: Sequence[Layer], train: Mapping[str, Mapping[str, Any]], environment: Environment, resume: str | None = None
) -> tuple[Job, str]:
    """The job of a request, and the text of the job file from which ``resume`` makes it again.

    ``layers`` and ``train`` go from low to high; ``train`` maps a source to the values that it gives. ``resume`` is the
    folder of a run: its job file comes lowest, and its newest checkpoint is loaded.
    Raises ResolutionError with everything that is wrong with features, values, data, checkpoint and installation.
    """
    problems = _Problems()
    layers, train = list(layers), dict(train)
    if resume and (saved := problems.collect(lambda: load_job_file(Path(resume) / "job.yaml"))):
        layers.insert(0, _without(replace(saved.layer, source=RESUMED), layers))
        train = {RESUMED: {"run": resume, **saved.train}, **train}
    config, wrong = train_config(train)
    problems.found += [*wrong, *_installation()]
    data = problems.collect(lambda: open_data(config.data or corpus.standard_library(), config.tokenizer))
    vocab_size = data.tokenizer.vocab_size if data else 0
    lowest = shape.trainer_layer(config, layers, environment.platform, vocab_size)
    world = shape.given_world([lowest, *layers])
    problems.found += shape.check_world(world, vocab_size)
    plan = problems.collect(lambda: registry.resolve([lowest, *layers], environment))
    checkpoint = problems.collect(lambda: checkpoints.newest_checkpoint(resume)) if resume else None
    run = config.run or time.strftime("runs/%Y%m%d-%H%M%S")
    if not resume and checkpoints.saved_steps(run):
        fix = f"--resume {run} continues it, and another --run starts a new one"
        problems.found.append(Problem("MS602", f"the folder {run} already holds a run with checkpoints", where=run, fix=fix))
    if plan and data:
        job = Job(plan, config, run, data.index.prefix, str(checkpoint or ""))
        problems.found += _enough_data(data, config.held_out, plan.world.seq_length)
        if checkpoint and (manifest := problems.collect(lambda: checkpoints.read_manifest(checkpoint))):
            refused = checkpoint_state.refusals(problems.collect(job.changes) or [], str(checkpoint))
            optimizer = manifest.optimizer if refused else job.optimizer  # which a feature has already been refused for
            problems.found += [*refused, *checkpoints.check_manifest(manifest, job.model, optimizer, str(checkpoint))]
    if problems.found or not (plan and data):
        raise ResolutionError(problems.found)
    return job, job_file(layers, train)


def job_file(layers: Sequence[Layer], train: Mapping[str, Mapping[str, Any]]) -> str:
    """One job file that asks for what the layers ask together."""
    settings: dict[str, dict[str, Any]] = {}
    values: dict[str, Any] = {}
    for layer in layers:
        for feature, fields in layer.settings.items():
            settings.setdefault(feature, {}).update(fields)
    for given in train.values():
        values |= given
    if values.get("data"):
        values["data"] = os.path.abspath(values["data"])
    world = {name: value for name, value in shape.given_world(layers).items() if name != "world_size"}
    data: dict[str, Any] = {
        "features": list(dict.fromkeys(name for layer in layers for name in layer.features)),
        "without": list(dict.fromkeys(name for layer in layers for name in layer.without)),
        "settings": settings,
        "world": world,
        "train": {name: value for name, value in values.items() if name != "run" and value is not None},
    }
    for name in ("level", "strict", "platform"):
        data[name] = next((value for layer in reversed(layers) if (value := getattr(layer, name)) is not None), None)
    return yaml.safe_dump({key: value for key, value in data.items() if value not in (None, [], {})}, sort_keys=False)


def open_data(prefix: str, tokenizer: str | None) -> DataSource:
    """Indexed data and its tokenizer. Raises RunError with MS601."""
    index = read_index(prefix)
    return DataSource(index, load_tokenizer(tokenizer) if tokenizer else tokenizer_of(prefix))


def write_job(job: Job, request: str) -> dict[str, str]:
    """Make the run folder, and return the environment variables with which a training process finds its job."""
    folder = Path(job.run)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        registry.write_plan(job.plan, folder / "plan.json")
        (folder / "job.yaml").write_text(request, encoding="utf-8")
        fields = {"config": job.config.model_dump(), "run": job.run, "data": job.data, "checkpoint": job.checkpoint}
        (folder / "process.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError([Problem("MS603", f"the run folder {folder} cannot be written: {error.strerror}")]) from error
    return {registry.PLAN_VARIABLE: str(folder / "plan.json"), JOB_VARIABLE: str(folder / "process.json")}


def read_job(environ: Mapping[str, str]) -> Job:
    """Inverse of `write_job`, in the process that was started."""
    fields = json.loads(Path(environ[JOB_VARIABLE]).read_text(encoding="utf-8"))
    config = TrainConfig(**fields.pop("config"))
    return Job(registry.read_plan(environ[registry.PLAN_VARIABLE]), config, **fields)


class _Problems:
    """Collects the problems of steps that do not depend on one another."""

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def collect(self, step: Callable[[], _Result]) -> _Result | None:
        """The result of a step, or None after its problems were taken down."""
        try:
            return step()
        except MindSpeedError as error:
            self.found += [problem for problem in error.problems if problem not in self.found]
            return None


def _without(layer: Layer, above: Sequence[Layer]) -> Layer:
    """A saved request without the features that the new one takes out."""
    taken_out = {name for higher in above for name in higher.without}
    return replace(layer, features=tuple(name for name in layer.features if name not in taken_out))


def _enough_data(data: DataSource, share: float, seq_length: int) -> list[Problem]:
    first = data.held_out_from(share)
    problems = []
    for what, part in (("training", data.index.lengths[:first]), ("held-out", data.index.lengths[first:])):
        tokens = int(part.sum())
        if tokens <= seq_length:
            text = f"the {what} part of {data.index.prefix} has {tokens} tokens, and a sample needs {seq_length + 1}"
            fix = "prepare more text, or change --held-out or --seq-length"
            problems.append(Problem("MS601", text, where=data.index.prefix, fix=fix))
    return problems


def _installation() -> list[Problem]:
    """What training lacks on this machine, found without importing it."""
    problems = doctor.problems() + [problem for finding in doctor.packages() if (problem := finding.problem()) is not None]
    root = package_root("core")
    if root is not None and not list((root / "core" / "datasets").glob("helpers_cpp*")):
        text = f"megatron-core in {root} has no compiled data helpers"
        fix = "install its wheel, or compile core/datasets/helpers.cpp with g++ and pybind11"
        problems.append(Problem("MS502", text, where=str(root / "core" / "datasets"), fix=fix))
    return problems
