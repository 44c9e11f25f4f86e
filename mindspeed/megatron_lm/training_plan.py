"""From a Megatron-LM command line to a plan: the layers in their order, and what both say. Light."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from mindspeed import registry
from mindspeed.engine.inspection.cli_arguments import Surface
from mindspeed.engine.inspection.megatron_copies import mixed_roots, package_root, python_problem
from mindspeed.engine.planning.plan import ActivationPlan, PlannedOverride, PlannedPatch
from mindspeed.engine.resolution.environment import Environment
from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.engine.resolution.request import Layer
from mindspeed.job import megatron_arguments as flags
from mindspeed.megatron.hook_points import LOADING, MegatronHookPoints, hook_points_for
from mindspeed.megatron.parsed_arguments import contradiction, unsupported_arguments
from mindspeed.megatron_lm.command_line_fixes import MegatronCommandLine
from mindspeed.megatron_lm.given_arguments import Given, field_options_in, flattened, surface_or_nearest, without_option
from mindspeed.megatron_lm.script_options import imported_names
from mindspeed.megatron_lm.training_request import ScriptRequest, read_command_line
from mindspeed.plugins.patches import ArgOverride
from mindspeed.problems import MindSpeedError, Problem, ResolutionError
from mindspeed.process.run import REPORT_VARIABLE

SCRIPT_MODULES: Final = ("megatron.training", "mindspeed.megatron_adaptor")
"""A script that imports one of these is a Megatron-LM script."""


REPORT_NAME: Final = "mindspeed-report.json"

_SERVED: Final = {"distributed_backend": "the CPU platform creates gloo groups instead"}
"""Arguments whose other value the platform can serve: the user's word stays, and is a row of the plan."""


class _Need(NamedTuple):
    dest: str
    values: tuple[object, ...]
    module: str
    package: str


_NEEDS: Final = (
    _Need("moe_enable_deepep", (True,), "deep_ep", "DeepEP"),
    _Need("moe_flex_dispatcher_backend", ("deepep", "hybridep"), "deep_ep", "DeepEP"),
    _Need("optimizer", ("muon", "dist_muon", "adaptive_muon", "soap"), "emerging_optimizers", "Emerging Optimizers"),
    _Need("enable_ft_package", (True,), "nvidia_resiliency_ext", "nvidia-resiliency-ext"),
    _Need("inprocess_restart", (True,), "nvidia_resiliency_ext", "nvidia-resiliency-ext"),
    _Need("non_persistent_ckpt_type", ("local",), "nvidia_resiliency_ext", "nvidia-resiliency-ext"),
    _Need("experimental_attention_variant", ("gated_delta_net",), "fla", "flash-linear-attention"),
    _Need("linear_attention_type", ("gated_delta_net",), "fla", "flash-linear-attention"),
    _Need("use_megatron_fsdp", (True,), "einops", "einops"),
    _Need("num_distributed_optimizer_instances", (), "einops", "einops"),
    _Need("hierarchical_context_parallel_sizes", (), "einops", "einops"),
)
"""Values of arguments with which Megatron imports a package, and its name; none are all but the default."""
_STORAGE: Final = _Need("save", (), "multistorageclient", "multi-storage-client")
"""The package for URLs of checkpoint folders. Without it, Megatron-LM takes a URL for a folder of this machine."""


def plan_training(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    environment: Environment,
    below: Sequence[Layer] = (),
    also: Sequence[Layer] = (),
) -> tuple[ScriptRequest, ActivationPlan]:
    """Read a Megatron-LM command line and resolve it for an environment whose ``world_size`` is that of the job.

    ``below`` and ``also`` are layers that ``mindspeed run`` has read: a job file and environment variables, and options
    that rank with the command line. Raises MindSpeedError with every problem of the request, MS408 for two Megatrons on the
    path, MS502 for a Megatron-LM that needs a newer Python, and MS605 for arguments of Megatron that contradict the plan.
    """
    training = package_root("training")
    if problem := mixed_roots() or (python_problem(training.parent) if training is not None else None):
        raise MindSpeedError([problem])
    version, world_size = environment.megatron, environment.world_size or 1
    request = read_command_line(arguments, environ, version, registry.catalog_for, also, world_size, below)
    layers = (*request.defaults, *below, *request.layers, *also, request.command_line)
    environment = replace(environment, training=True)  # also on a laptop without Megatron-LM
    words, known = MegatronCommandLine(version, frozenset(request.given)), surface_or_nearest(version)
    try:
        plan = registry.resolve(layers, environment)
    except ResolutionError as error:
        error.words = words
        raise
    plan = replace(plan, rows=(*plan.rows, *request.notes, *_package_rows(request.given, known)))
    request, plan = _with_fields(request, _with_served(plan, request.given), known)
    plan = _with_weights(plan) if request.loads_hugging_face else plan
    problems = [*contradicted(request.given, plan.overrides), *_ignored_by_layers(request.given, plan.overrides)]
    if problems:
        raise ResolutionError(problems, words)
    return request, plan


def _package_rows(given: Mapping[str, Given], known: Surface) -> Iterator[PlanNote]:
    """Yield a row for every argument whose package is not installed here; the ranks may have it."""

    def applies(need: _Need) -> bool:
        value = given[need.dest].value
        return value in need.values if need.values else value != known.by_dest[need.dest][0].default

    needs = [(given[need.dest], need) for need in _NEEDS if need.dest in given and applies(need)]
    folders = (given[dest] for dest in ("save", "load") if dest in given)
    needs += [(argument, _STORAGE) for argument in folders if _is_url(argument.value)]
    for argument, need in needs:
        if find_spec(need.module) is None:
            word = " ".join(map(str, [argument.option, *flattened([] if argument.value is True else argument.value)]))
            text = f"{word} needs {need.package} on every rank; its module {need.module} is not installed here"
            yield PlanNote("not-checked", "megatron-lm", text)


def _is_url(folder: object) -> bool:
    return "://" in str(folder)


def report_beside(request: ScriptRequest, environ: MutableMapping[str, str]) -> None:
    """Write the report to the run, unless ``environ`` names a file for it: in the folder of its checkpoints, else of
    its TensorBoard files, else here."""
    folders = (request.given[dest].value for dest in ("save", "tensorboard_dir") if dest in request.given)
    folder = Path(next((folder for folder in folders if not _is_url(folder)), ".")).absolute()
    if REPORT_VARIABLE not in environ:
        folder.mkdir(parents=True, exist_ok=True)
        environ[REPORT_VARIABLE] = str(folder / REPORT_NAME)


def _with_fields(request: ScriptRequest, plan: ActivationPlan, known: Surface) -> tuple[ScriptRequest, ActivationPlan]:
    """Let options that Megatron-LM's parser lacks set the fields of Megatron's configuration, and take them from the rest."""
    options = [argument for argument in field_options_in(known) if argument.dest in request.given]
    if not options:
        return request, plan
    rest, overrides = list(request.rest), list(plan.overrides)
    for argument in options:
        reason = f"{argument.options[0]} is given, but Megatron-LM's parser has no such option"
        override = ArgOverride(argument.dest, request.given[argument.dest].value, reason)
        overrides.append(PlannedOverride(("command line",), override))
        rest = without_option(rest, argument.dest, known)
    patched = {planned.patch.target for planned in plan.patches}
    needed = hook_points_for((), {argument.dest for argument in options}, megatron=plan.environment.get("megatron"))
    missing = [patch for patch in needed if patch.target.startswith("megatron.core.") and patch.target not in patched]
    patches = [PlannedPatch(MegatronHookPoints.spec.name, patch, patch.target) for patch in missing]
    changed = replace(plan, overrides=tuple(overrides), patches=(*plan.patches, *patches))
    return replace(request, rest=tuple(rest)), changed


def _with_weights(plan: ActivationPlan) -> ActivationPlan:
    """Let the weights of a model of Hugging Face be loaded where Megatron-LM loads a checkpoint."""
    return replace(plan, patches=(*plan.patches, PlannedPatch(MegatronHookPoints.spec.name, LOADING, LOADING.target)))


def _with_served(plan: ActivationPlan, given: Mapping[str, Given]) -> ActivationPlan:
    """Leave the user's word where the platform can serve it."""
    base = {feature.name for feature in plan.base}
    for planned in plan.overrides:
        served, word = _SERVED.get(planned.override.argument), given.get(planned.override.argument)
        if served and word is not None and word.value != planned.override.value and base.issuperset(planned.owners):
            note = PlanNote("note", planned.owners[0], f"{word.source} {word.value} is kept: {served}")
            overrides = tuple(other for other in plan.overrides if other is not planned)
            plan = replace(plan, overrides=overrides, rows=(*plan.rows, note))
    return plan


def contradicted(given: Mapping[str, Given], overrides: Sequence[PlannedOverride]) -> list[Problem]:
    """MS605 for every argument that stands on the command line with another value than the plan sets."""
    values = {dest: argument.value for dest, argument in given.items()}
    problems = []
    for planned in overrides:
        target = flags.target_of(planned.override.argument, values)
        wanted = target.as_argument(planned.override.value)
        argument = given.get(target.dest)
        if argument is not None and argument.value != wanted:
            problems.append(contradiction(planned, argument.fact, wanted))
    return problems


def _ignored_by_layers(given: Mapping[str, Given], overrides: Sequence[PlannedOverride]) -> list[Problem]:
    planned = {row.override.argument: row.override.value for row in overrides if row.override.argument == "transformer_impl"}
    values = planned | {dest: argument.value for dest, argument in given.items()}
    return unsupported_arguments(values, {dest: argument.fact for dest, argument in given.items()})


def is_training_script(path: str | Path) -> bool:
    """Return whether a script drives Megatron-LM's training loop, by what it imports; the script is not run."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    return any(f"{name}.".startswith(f"{module}.") for name in imported_names(tree) for module in SCRIPT_MODULES)
