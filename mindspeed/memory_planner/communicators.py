"""Communicators that a rank creates on a device, before launch. Light, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.job.world import UnknownValue, World
from mindspeed.pipeline.feature import ScheduleFeature
from mindspeed.platforms.backend_rules import PAIR, rule_set
from mindspeed.plugins import Feature
from mindspeed.plugins.answers import answer
from mindspeed.plugins.discovery import Catalog

_RULES: Final = {"npu": "hccl-rules", "cuda": "nccl-rules"}


def communicator_lines(made: ActivationPlan, known: Catalog) -> list[str]:
    """Describe the communicators of the rank that has most; empty on a CPU, or where a size is not known."""
    if (rules := _RULES.get(made.world.platform)) is None:
        return []
    try:
        names = communicators(made, known)
    except UnknownValue:
        return []
    reserved = rule_set(rules).megabytes(names)
    size = "" if reserved is None else f", {reserved:,} MB outside of torch's memory"
    return [f"{len(names)}{size}: {', '.join(names)}"]


def communicators(made: ActivationPlan, known: Catalog) -> list[str]:
    """Return the communicators of the groups of Megatron and of features, on the rank that has most.

    They are named as in `mindspeed.platforms.backend_rules.created`. Those that only a dispatcher without capacity uses are
    counted for every model with experts.
    """
    world = made.world
    active = [(known.feature(planned.name), planned.args) for planned in made.features]
    overridden = {planned.override.argument: planned.override.value for planned in made.overrides}
    sharded = bool(overridden.get("use_distributed_optimizer"))
    schedules = [feature(feature.Args(**args), world) for feature, args in active if issubclass(feature, ScheduleFeature)]
    is_v = any(feature.placement() == "v" for feature in schedules)
    names = [name for name, size in _sizes(world, sharded, is_v) if size > 1]
    if world.pp > 1 and not schedules:
        names += _between_stages(world)
    return names + [name for feature, args in active for name in _of_feature(feature, args, world)]


def _of_feature(feature: type[Feature[Any]], args: Mapping[str, Any], world: World) -> Sequence[str]:
    """Return the communicators that a feature creates."""
    names: Sequence[str] | None = answer(feature, "communicators", feature.Args(**args), world)
    return names or ()


def _between_stages(world: World) -> list[str]:
    """Return the communicators of the messages between stages in Megatron's schedules."""
    if world.vpp == 1:
        return ["PIPELINE_MODEL_PARALLEL_GROUP"]
    other = "default_pg" if world.pp == 2 else "PIPELINE_MODEL_PARALLEL_GROUP"  # Megatron's own choice for two stages
    return [f"PIPELINE_MODEL_PARALLEL_GROUP{PAIR}", f"{other}{PAIR}"]


def _sizes(world: World, sharded: bool, is_v: bool) -> Iterator[tuple[str, int]]:
    """Yield the groups of Megatron that a training step uses, with the number of their ranks.

    With a ``sharded`` optimizer, all ranks take part in the norm of the gradients. In a V of stages, tied embeddings are on one
    rank.
    """
    yield "default_pg", int(world.world_size)
    yield "TENSOR_MODEL_PARALLEL_GROUP", world.tp
    yield "CONTEXT_PARALLEL_GROUP", world.cp
    yield "DATA_PARALLEL_GROUP_WITH_CP", world.dp * world.cp
    yield "EMBEDDING_GROUP", world.pp if world.is_set("tied_embeddings") and not is_v else 1
    if sharded:
        yield "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", int(world.world_size)
    else:
        yield "MODEL_PARALLEL_GROUP", world.tp * world.pp
    if world.is_set("num_experts"):
        experts = world.ep * (world.expert_tensor_size if world.is_set("expert_tensor_size") else world.tp)
        yield "EXPERT_MODEL_PARALLEL_GROUP", 1 if world.dispatcher == "allgather" else world.ep
        yield "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", experts
        yield "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", experts * world.pp
        yield "EXPERT_DATA_PARALLEL_GROUP", int(world.world_size) // (experts * world.pp)
