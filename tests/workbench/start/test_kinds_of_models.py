"""What a plan accepts of a feature, each of its settings and every kind of model, starts on every distinct rank."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed import registry
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.request import Layer, parse_assignments
from mindspeed.problems import MindSpeedError
from mindspeed.registry import probe
from mindspeed.workbench import verification
from mindspeed.workbench.start.trainer_start import distinct_ranks
from mindspeed.workbench.verification.shape import GPT, LLAMA, MOE, Recipe
from tests.drawn_jobs import choices

LATENT = replace(LLAMA, name="mla", num_query_groups=4, multi_latent_attention=True)
KINDS = {
    "every head with keys of its own": GPT,
    "grouped heads": LLAMA,
    "latent attention": LATENT,
    "latent attention without latent queries": LATENT.with_options({"q_lora_rank": None}),
    "experts": MOE,
    "shared experts": replace(MOE, shared_expert_hidden_size=24),
    "experts and latent attention": replace(MOE, num_query_groups=4, multi_latent_attention=True),
    "multi-token prediction": replace(LLAMA, mtp_num_layers=1),
}
ENGINE = "transformer-engine-layers"
DRY_RUN = str(Path(verification.__file__).with_name("dry_run.py"))
QUICK = {("shared experts", "moe-zero-memory", "")}
"""Cases of the default run; the others are long."""


def cases() -> Iterator[object]:
    for kind in KINDS:
        for name in sorted(registry.catalog().names):
            for engine in ("", ENGINE):
                marks = [] if (kind, name, engine) in QUICK else [pytest.mark.long]
                yield pytest.param(kind, name, engine, marks=marks)


def plans(kind: str, name: str, engine: str) -> Iterator[tuple[ActivationPlan, Recipe, str]]:
    """Yield the plans of a feature with one setting at a time at each value of its type that a plan accepts."""
    sizes = {size: 2 for size in registry.catalog().feature(name).spec.sizes if size != "dp"}
    sizes |= {"pp": 2} if "vpp" in sizes else {}
    recipe = Recipe(KINDS[kind], steps=1, dtype="bf16", global_batch_size=8)
    low = Layer("model", world={**recipe.world(), **sizes, "world_size": max(2, 2 ** len(sizes))})
    given = [f"{name}.{setting}={value}" for setting, values in choices(name).items() for value in values]
    for assignment in ("", *given):
        settings = parse_assignments([assignment] if assignment else [], "--set")
        high = Layer("feature", features=(name, *([engine] if engine else [])), settings=settings)
        try:
            plan = registry.resolve([low, high], probe("cpu"))
        except MindSpeedError:
            continue
        if name in plan.names:
            yield plan, recipe, assignment


@pytest.mark.cover(1, because="the drawn jobs of test_starts.py have features and kinds of models together")
@pytest.mark.parametrize(("kind", "name", "engine"), cases())
def test_what_a_plan_accepts_starts(kind, name, engine, pool):
    started = set()
    for plan, recipe, assignment in plans(kind, name, engine):
        if plan.digest in started:
            continue
        started.add(plan.digest)
        try:
            pool.call_alone(DRY_RUN, "measure", distinct_ranks(plan), int(plan.world.world_size), recipe, plan=plan)
        except MindSpeedError as error:
            pytest.fail(f"{kind}, {name} {engine} {assignment}\n{error}")
