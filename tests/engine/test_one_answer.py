"""The plan, Megatron-LM's arguments and the configuration that is built give one answer for every feature."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed.engine.planning.build_plan import manager_of
from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.engine.runtime.job_conditions import refusals
from mindspeed.job.config import world_of_config
from mindspeed.megatron.hook_wrappers import facts_of_spec
from mindspeed.megatron_lm.training_plan import plan_training
from mindspeed.plugins import Feature
from mindspeed.problems import Problem, ResolutionError
from mindspeed.registry import base_features, resolve
from tests.features.resolving import CATALOG, MODEL

ENVIRONMENT = made_up("cuda", "0.16.1")
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 64, "router_topk": 2, "grouped_experts": True, "dispatcher": "alltoall"}
WORLD = {name: value for name, value in MODEL.items() if name != "vocab_size"}  # no budget of memory is counted without it
WORLD |= {"global_batch_size": 32, "tied_embeddings": False, "multi_latent_attention": False, "dtype": "bf16"}

OWN: Mapping[str, dict[str, Any]] = {
    "alibi": {"rotary": False},
    "expert-parallel": EXPERTS | {"ep": 2},
    "grouped-matmul-add": EXPERTS,
    "mla-split": {"multi_latent_attention": True},
    "moe-allgather-dispatcher": {"dispatcher": "allgather"},
    "moe-allgather-overlap": {"dispatcher": "allgather", "ep": 2},
    "moe-alltoall-overlap": {"ep": 2},
    "moe-zero-memory": {"ep": 2},
    "sequence-parallel": {"tp": 2},
    "virtual-pipeline": {"pp": 2, "vpp": 2},
}
"""What some features need of a job to have something to do."""

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LINEAR = type("TELinear", (), {"__module__": "megatron.core.extensions.transformer_engine"})


def built(**attributes: Any) -> dict[str, Any]:
    """Return what a configuration with these attributes says of the job."""
    return world_of_config(SimpleNamespace(**attributes))


FACTS: Mapping[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "CUDA graphs": ({"cuda_graphs": True}, "--cuda-graph-impl local", built(cuda_graph_impl="local")),
    "low precision": (
        {"low_precision": True, "low_precision_recipe": "delayed"},
        "--fp8-format hybrid",
        built(fp8="hybrid", fp4=None, fp8_recipe="delayed"),
    ),
    "overlapped micro-batches": (
        {"overlapped_micro_batches": True},
        "--overlap-moe-expert-parallel-comm",
        built(overlap_moe_expert_parallel_comm=True),
    ),
    "FSDP": ({"fsdp": True}, "--use-megatron-fsdp", built(use_megatron_fsdp=True)),
    "Transformer Engine layers": (
        {"transformer_engine_layers": True},
        "--transformer-impl transformer_engine",
        facts_of_spec([LINEAR]),
    ),
    "offloading": ({"cpu_offloading": True}, "--cpu-offloading-num-layers 1", built(cpu_offloading=True)),
    "full recompute": (
        FULL,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        built(**FULL),
    ),
}
"""What changes for many features: in the words of a plan, of a command line, and read off what is built."""


BY_DEFAULT = ("overlapped micro-batches", "full recompute")
"""Facts of the default run: of a configuration, and one that is settings as well."""

SETTING_OF = {"full recompute": "recompute"}
"""The feature of which a fact is a setting: Megatron-LM's arguments for it become its settings."""


def surroundings(feature: type[Feature[Any]]) -> Layer:
    """Return the smallest request in which a feature does its work: that of its own verification."""
    name, needed = feature.spec.name, feature.spec.verify_with
    experts = (
        EXPERTS if "moe" in name or feature.spec.category.value in ("moe", "deepspeed-moe") or "ep" in needed.world else {}
    )
    settings = {owner: dict(values) for owner, values in needed.settings.items()}
    world = WORLD | experts | dict(needed.world) | OWN.get(name, {})
    return Layer("test", (name, *needed.features), settings, world, level=2)


def refused(problems: list[Problem] | tuple[Problem, ...], name: str) -> set[str]:
    """Return the refusals that concern a feature, by their conditions' sentences."""
    return {problem.message for problem in problems if problem.code == "MS304" and name in problem.features}


def by_plan(layer: Layer, fields: Mapping[str, Any], name: str) -> set[str]:
    try:
        resolve([replace(layer, world={**layer.world, **fields})], ENVIRONMENT, CATALOG)
    except ResolutionError as error:
        return refused(error.problems, name)
    return set()


def by_command(layer: Layer, arguments: str, name: str) -> set[str]:
    words = [*([] if "--transformer-impl" in arguments else ["--transformer-impl", "local"]), *arguments.split()]
    try:
        plan_training(words, {}, ENVIRONMENT, also=[layer])
    except ResolutionError as error:
        return refused(error.problems, name)
    return set()


def when_built(layer: Layer, facts: Mapping[str, Any], name: str) -> set[str]:
    plan = resolve([layer], ENVIRONMENT, CATALOG)
    return refused(refusals(facts, manager_of(plan, CATALOG, base_features("cuda")).features), name)


@pytest.mark.budget(60)
@pytest.mark.parametrize("fact", [pytest.param(fact, marks=() if fact in BY_DEFAULT else pytest.mark.long) for fact in FACTS])
def test_the_plan_the_command_line_and_what_is_built_give_one_answer(fact: str) -> None:
    fields, arguments, facts = FACTS[fact]
    answers = {}
    for name in CATALOG.usable:
        if name == SETTING_OF.get(fact):
            continue  # a plan with two values for one setting is refused: tests/engine/resolution/test_settings_of_the_job.py
        layer = surroundings(CATALOG.feature(name))
        answers[name] = by_plan(layer, fields, name), by_command(layer, arguments, name), when_built(layer, facts, name)
    assert {name: given for name, given in answers.items() if not given[0] == given[1] == given[2]} == {}
    assert any(given[0] for given in answers.values())
